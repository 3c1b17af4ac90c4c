"""Jobs of workers alone: ``kvdist-launch -s 0``, from the socket that rank 0 inherits to the first failure."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from kvdist_launch.cli import main

MEET = """
import os, socket
rank, size = int(os.environ["KVDIST_RANK"]), int(os.environ["DMLC_NUM_WORKER"])
if rank == 0:
    with socket.socket(fileno=int(os.environ["KVDIST_LISTEN_FD"])) as listening:
        assert listening.getsockname()[1] == int(os.environ["DMLC_PS_ROOT_PORT"])
        for _ in range(size - 1):
            peer, _ = listening.accept()
            print("met", peer.recv(9).decode(), flush=True)
            peer.close()
else:
    assert "KVDIST_LISTEN_FD" not in os.environ
    with socket.create_connection((os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"]))) as rank0:
        rank0.sendall(str(rank).encode())
        assert rank0.recv(1) == b""  # rank 0 has said so, and hung up
names = ("NUM_SERVER", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
told = [os.environ.get(f"DMLC_{name}") or os.environ[f"KVDIST_{name}"] for name in names]
print("rank", rank, "of", size, "servers, place:", *told, "restarts", os.environ.get("KVDIST_RESTARTS", "none"))
"""
TOGETHER_S = 30.0
"""One failing rank ends all others within this time, on a slow machine too; they would sleep for 60 s."""


def test_workers_run_alone_and_find_rank_0_at_the_socket_it_inherits(launch: Callable[..., object]):
    code, out, err = launch("-n", "3", "-s", "0", "python", "-c", MEET).finish()
    assert code == 0, err
    lines = sorted(out.splitlines())
    assert [line for line in lines if "met" in line] == ["w0 │ met 1", "w0 │ met 2"]
    assert [line.partition(" │ ")[2] for line in lines if "rank" in line] == [
        f"rank {rank} of 3 servers, place: 0 {rank} 3 0 1 restarts none" for rank in range(3)
    ]
    assert "kvdist-launch: 3 workers finished in " in err


def test_the_first_rank_that_fails_ends_the_others_and_gives_the_code(launch, is_gone):
    sleep = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    script = f"import os\nif os.environ['KVDIST_RANK'] == '1': exit(7)\n{sleep}"
    started = launch("-n", "3", "-s", "0", "python", "-c", script)
    began = time.monotonic()
    code, out, err = started.finish()
    assert (code, time.monotonic() - began < TOGETHER_S) == (7, True), err
    assert "worker-1 (pid " in err.splitlines()[-1]
    assert "failed with exit code 7" in err.splitlines()[-1]
    assert all(is_gone(int(line.split()[-1])) for line in out.splitlines())


def test_a_killed_rank_is_named_and_ends_the_others_in_time(launch, is_gone):
    script = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
    started = launch("-n", "2", "-s", "0", "python", "-c", script)
    pids = [int(started.line_with("pid ").split()[-1]) for _ in range(2)]
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    code, _, err = started.finish()
    assert time.monotonic() - began < TOGETHER_S
    assert code == 128 + signal.SIGKILL
    assert "was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]
    assert is_gone(pids[0])


LOSES = """
import os, select, sys
from kvdist.errors import RankLostError
if os.environ["KVDIST_RANK"] == "0":
    with open(sys.argv[1], "w") as fifo:
        fifo.write(str(os.getpid()))
    raise RankLostError("rank 1 has left", "rank 1")
with open(sys.argv[1]) as fifo:
    first = int(fifo.read())
try:
    select.select([os.pidfd_open(first)], [], [])
except ProcessLookupError:
    pass  # it has ended already
exit(9)
"""


def test_a_rank_that_ends_for_the_loss_of_another_is_not_blamed_though_it_ends_first(launch, tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    words = ("-n", "2", "-s", "0", "--grace", "5", "python", "-c", LOSES, str(tmp_path / "fifo"))
    code, _, err = launch(*words).finish()
    assert code == 9, err
    assert "worker-1 (pid " in err.splitlines()[-1]


def test_a_rank_that_fails_as_soon_as_it_has_come_is_named_though_others_still_connect(launch):
    script = """
import kvdist.horovod as hvd
hvd.init()
if hvd.rank() == 0:
    raise AttributeError("a mistake of rank 0")
"""
    code, _, err = launch("-n", "2", "-s", "0", "python", "-c", script).finish()
    assert code == 1, err
    assert "w0 │ AttributeError: a mistake of rank 0" in err
    assert "worker-0 (pid " in err.splitlines()[-1]


def test_a_job_is_started_again_with_a_socket_of_its_own(launch):
    script = MEET + "\nif rank == 1 and os.environ.get('KVDIST_RESTARTS') != '1': exit(3)"
    code, out, err = launch("-n", "2", "-s", "0", "--on-worker-exit", "restart:2", "python", "-c", script).finish()
    assert code == 0, err
    assert out.count("met 1") == 2
    assert "w0 │ rank 0 of 2 servers, place: 0 0 2 0 1 restarts 1\n" in out


def test_logs_and_summary_are_as_ever(launch, tmp_path):
    words = ("--log-dir", str(tmp_path / "logs"), "--json-summary", str(tmp_path / "end.json"))
    assert launch("-n", "2", "-s", "0", *words, "echo", "hello").finish()[0] == 0
    assert {path.name: path.read_text() for path in (tmp_path / "logs").iterdir()} == {
        "worker-0.log": "hello\n",
        "worker-1.log": "hello\n",
    }
    summary = json.loads((tmp_path / "end.json").read_text())
    assert (summary["outcome"], [one["node"] for one in summary["processes"]]) == ("finished", ["worker-0", "worker-1"])


def test_a_dry_run_shows_workers_alone(capfd):
    assert main(["-n", "2", "-s", "0", "-H", "d1,d2", "--security", "none", "--dry-run", "-v", "train"]) == 0
    shown = capfd.readouterr().out
    heads = [line for line in shown.splitlines() if " on " in line and not line.startswith(" ")]
    assert [head.partition(" in ")[0] for head in heads] == ["worker-0 on d1", "worker-1 on d2"]
    assert shown.count("  set     DMLC_PS_ROOT_URI=d1\n") == 2
    assert shown.count("  set     DMLC_NUM_SERVER=0\n") == 2


def test_commands_for_shells_are_those_of_workers_alone(capfd):
    assert main(["-n", "2", "-s", "0", "--launcher", "none", "true"]) == 0
    shown = capfd.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith(("# worker", "# s"))] == [
        "# worker-0, on localhost", "# worker-1, on localhost",
    ]  # fmt: skip
