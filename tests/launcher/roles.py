"""Stand-ins for ``python -m kvdist``: a scheduler and servers that obey the launcher, without a network.

The servers wait on a FIFO that the scheduler holds open: a byte means goodbye (exit 0), its end that the scheduler
is lost (exit 75). The variables SCHEDULER_DOES and SERVER_DOES make them misbehave; with ``go on`` the scheduler
does not mind lost workers, and says where it listens; with ``give up`` it also gives up worker 1, life 0, when worker 0
has finished. A server opens the FIFO that READY_FIFO names, if it is set, when it hears of such things, and so waits
for whoever opens the other end.
"""

import os
import signal
import socket
import sys

PEER_LOST = 75


def scheduler() -> int:
    does = os.environ.get("SCHEDULER_DOES")
    goes_on = does in ("go on", "give up")
    if does == "fail":
        print("address in use", file=sys.stderr)
        return 1
    goodbye = os.open(os.environ["GOODBYE_FIFO"], os.O_RDWR)
    if goes_on:
        listening = socket.socket(fileno=int(os.environ["KVDIST_LISTEN_FD"]))
        assert listening.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        print(f"listens at {listening.getsockname()}", flush=True)
    print(f"pid {os.getpid()}", flush=True)
    waiting = {"worker": int(os.environ["DMLC_NUM_WORKER"]), "server": int(os.environ["DMLC_NUM_SERVER"])}
    for line in sys.stdin:
        print(line, end="", flush=True)
        if does == "give up" and line == "ended worker 0 exit 0\n":
            print("given up worker 1 life 0", flush=True)
        if line.startswith("placed "):
            continue
        _, role, _, how, number, *_ = line.split()
        if goes_on and role == "worker" and (how, number) != ("exit", "0"):
            continue
        if (how, number) != ("exit", "0"):
            return PEER_LOST
        waiting[role] -= 1
        if role == "worker" and waiting["worker"] == 0:
            os.write(goodbye, b"0" * waiting["server"])
        if not any(waiting.values()):
            return 0
    return PEER_LOST


def server() -> int:
    does = os.environ.get("SERVER_DOES")
    if does == "leave":
        return 0
    goodbye = os.open(os.environ["GOODBYE_FIFO"], os.O_RDONLY)
    if "READY_FIFO" in os.environ:
        os.close(os.open(os.environ["READY_FIFO"], os.O_WRONLY))
    print(f"pid {os.getpid()}", flush=True)
    if not os.read(goodbye, 1):
        return PEER_LOST
    if does == "stay":
        signal.pause()
    return 0


if __name__ == "__main__":
    raise SystemExit({"scheduler": scheduler, "server": server}[os.environ["DMLC_ROLE"]]())
