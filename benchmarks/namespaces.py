"""What is left of a slow line: two "hosts" or more, network namespaces with a server and workers each, and 1 Gbit/s.

    sudo python benchmarks/namespaces.py --peer mxnet --peer gloo-flat
    sudo python benchmarks/namespaces.py --workers 2    # on each host: with one push per host, and with one per worker
    sudo python benchmarks/namespaces.py --hosts 4 --mbit 200 --copies --optimizer sgd    # behind a switch

The cost model for servers that share the workers' n machines: a step that sends M bytes of gradients a worker over
cards of B bytes per second in each direction takes at least 2 (n - 1) M / (n B), as long as a ring all-reduce. The
share of the bound is that time over the measured one. Headers of Ethernet, IP and TCP count against the line here (the
kernel's token bucket counts them), so not even plain TCP reaches 100 %: it is measured too, and the share of it given.

The namespaces need root. They are gone when the script ends, by Ctrl-C too; the next run removes those of a killed one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import end_to_end
from cluster import Start, end_on_terminate, environment, run_together, worker_command
from end_to_end import Training
from models import parse_spec
from peers.environments import Absent
from peers.mxnet import mxnet_starts
from peers.torch_gloo import torch_starts
from systems import COPIES, GOING_ON, Measured, Work, take_turns
from workers.workload import Spec

PREFIX = "kvdist-bench-"
PORT = 9191
BURST_KILOBYTES = 256
LATENCY_MS = 50
"""Of the token bucket: how long a packet may wait for tokens. A card's queue holds about as much."""
SYSTEMS = {
    "line": "plain TCP, both ways at once",
    "kvdist": "kvdist",
    "kvdist-each": "kvdist, LOCAL_REDUCE=off",
    "kvdist-continue": "kvdist, --on-loss continue",
    "kvdist-copies": "kvdist, --replicas 1",
    "mxnet": "MXNet 1.9.1",
    "gloo-flat": "torch gloo, one flat tensor",
}
HOSTS = 2
VARIABLES = {"kvdist-each": {"KVDIST_LOCAL_REDUCE": "off"}, "kvdist-continue": GOING_ON, "kvdist-copies": COPIES}


@dataclass(frozen=True)
class Host:
    """A network namespace."""

    name: str
    address: str
    interface: str

    def inside(self, start: Start) -> Start:
        """The same process, in this namespace."""
        return replace(start, command=["ip", "netns", "exec", self.name, *start.command])


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    work = Work(
        options.spec,
        servers=options.hosts,
        workers=options.hosts * options.workers,
        steps=options.steps,
        warmup=2,
        optimizer=options.optimizer,
    )
    each = ["kvdist-each"] if options.workers > 1 else []
    try:
        copies = ["kvdist-continue", "kvdist-copies"] if options.copies else []
        line = ["line"] if options.hosts == HOSTS else []
        measured = measure(work, [*line, "kvdist", *each, *copies, *options.peer], options.turns, options.mbit)
    except Absent as error:
        raise SystemExit(f"SKIPPED: {error}") from error
    print_table(work, measured, options.mbit)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures push and pull over a slow line.")
    parser.add_argument("--spec", type=parse_spec, default=parse_spec("25x1048576"), help="as for push_pull.py")
    parser.add_argument("--mbit", type=int, default=1000, help="of each card, in each direction (default: 1000)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--hosts", type=int, default=HOSTS, help="how many; peers and plain TCP have two")
    parser.add_argument("--workers", type=int, default=1, help="on each host (default: 1); peers have one")
    parser.add_argument("--copies", action="store_true", help="--on-loss continue, too, without and with --replicas 1")
    parser.add_argument("--optimizer", choices=["none", "sgd", "adam"], default="none", help="on the servers")
    parser.add_argument("--peer", choices=["mxnet", "gloo-flat"], action="append", default=[], help="may be repeated")
    options = parser.parse_args()
    if options.copies and options.optimizer == "none":
        parser.error("--copies needs --optimizer: only stores that update go on without a lost process")
    if options.peer and (options.workers > 1 or options.hosts > HOSTS):
        parser.error("--peer is for two hosts and one worker on each")
    if options.hosts < HOSTS:
        parser.error("--hosts is at least 2")
    return options


def bound_s(spec: Spec, mbit: int, hosts: int = HOSTS) -> float:
    """The least time of a step by the cost model."""
    return 2 * (hosts - 1) * spec.payload_bytes / (hosts * mbit * 1e6 / 8)


def measure(work: Work, systems: list[str], turns: int, mbit: int = 1000) -> dict[str, Measured]:
    """Seconds of every step by system, each in turns between the same namespaces, one for each server.

    Raises:
        Absent: namespaces cannot be made here.
    """
    with limited_hosts(mbit, work.servers) as hosts:
        return take_turns(systems, lambda name, folder: run_together(starts(name, work, hosts, folder)), turns)


def starts(name: str, work: Work | Training, hosts: list[Host], folder: str) -> list[Start]:
    """The processes of one turn, each in its namespace."""
    if isinstance(work, Training):
        return training_starts(name, work, hosts, folder)
    words = work.arguments(name, folder)
    if name.startswith("kvdist"):
        command, variables = worker_command("kvdist_worker.py", *words), VARIABLES.get(name, {})
        return kvdist_starts(command, hosts, work.workers // len(hosts), **variables)
    if name == "mxnet":
        return mxnet_starts_inside(words, hosts)
    if name == "gloo-flat":
        variables = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": hosts[0].interface}
        ranks = torch_starts(len(hosts), worker_command("torch_worker.py", *words), variables)
        return [host.inside(start) for host, start in zip(hosts, ranks, strict=True)]
    words = [hosts[0].address, str(PORT), str(work.spec.payload_bytes), str(work.steps), folder]
    sides = zip(hosts, ("listen", "dial"), strict=True)
    return [host.inside(Start(worker_command("line_worker.py", side, *words), environment())) for host, side in sides]


def training_starts(system: str, training: Training, hosts: list[Host], folder: str) -> list[Start]:
    """One worker without servers on each host, for all systems with the variables that torchrun would set."""
    if system in end_to_end.WITHOUT_EXCHANGE:
        return end_to_end.starts(training, system, folder)
    variables = {"MASTER_ADDR": hosts[0].address, "GLOO_SOCKET_IFNAME": hosts[0].interface, "KVDIST_SECURITY": "none"}
    command = end_to_end.command_of(training, system, folder)
    ranks = torch_starts(len(hosts), command, end_to_end.ONE_THREAD | variables)
    return [host.inside(start) for host, start in zip(hosts, ranks, strict=True)]


def kvdist_starts(command: list[str], hosts: list[Host], per_host: int = 1, **variables: str) -> list[Start]:
    """A cluster started by hand: the scheduler on the first host, a server and some workers on each."""
    module = [sys.executable, "-m", "kvdist"]
    shared = cluster_variables(hosts, per_host) | {"KVDIST_SECURITY": "none"} | variables
    found = [hosts[0].inside(Start(module, environment(**shared, DMLC_ROLE="scheduler")))]
    for rank, host in enumerate(hosts):
        here = shared | {"DMLC_NODE_HOST": host.address}
        found.append(host.inside(Start(module, environment(**here, DMLC_ROLE="server", KVDIST_RANK=str(rank)))))
        for own in range(rank * per_host, (rank + 1) * per_host):
            worker = environment(**here, DMLC_ROLE="worker", KVDIST_RANK=str(own), OMP_NUM_THREADS="1")
            found.append(host.inside(Start(command, worker)))
    return found


def mxnet_starts_inside(words: list[str], hosts: list[Host]) -> list[Start]:
    """The same of MXNet."""
    scheduler, *others = mxnet_starts(len(hosts), len(hosts), words)
    shared = cluster_variables(hosts)
    places = [hosts[0], *hosts, *hosts]
    return [
        host.inside(replace(start, environment=start.environment | shared | {"DMLC_NODE_HOST": host.address}))
        for host, start in zip(places, [scheduler, *others], strict=True)
    ]


def cluster_variables(hosts: list[Host], per_host: int = 1) -> dict[str, str]:
    return {
        "DMLC_PS_ROOT_URI": hosts[0].address,
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(len(hosts) * per_host),
        "DMLC_NUM_SERVER": str(len(hosts)),
    }


@contextlib.contextmanager
def limited_hosts(mbit: int | None, count: int = HOSTS) -> Iterator[list[Host]]:
    """Namespaces, joined by virtual cards that send no more than `mbit` each (None: as fast as they can); gone when the
    block ends. Two are joined directly, more by a switch, which sends no more to any of them.

    Raises:
        Absent: not root, or the tools or the kernel lack something.
    """
    if os.geteuid() or not (shutil.which("ip") and shutil.which("tc")):
        raise Absent("network namespaces need root, ip and tc")
    remove_stale()
    hosts = [Host(f"{PREFIX}{os.getpid()}-{i}", f"10.77.0.{i + 1}", "line") for i in range(count)]
    switch = f"{PREFIX}{os.getpid()}-switch"
    try:
        for host in hosts:
            ip("netns", "add", host.name)
        cards = [["name", host.interface, "netns", host.name] for host in hosts]
        if count == HOSTS:
            ip("link", "add", *cards[0], "type", "veth", "peer", *cards[1])
        else:
            ip("netns", "add", switch)
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
        for number, (host, card) in enumerate(zip(hosts, cards, strict=True)):
            if count > HOSTS:
                port = f"port{number}"
                ip("link", "add", *card, "type", "veth", "peer", "name", port, "netns", switch)
                ip("-n", switch, "link", "set", port, "master", "bridge", "up")
                limit(switch, port, mbit)
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                ip("-n", host.name, "link", "set", interface, "up")
            limit(host.name, host.interface, mbit)
        yield hosts
    finally:
        remove([*(host.name for host in hosts), switch])


def limit(namespace: str, interface: str, mbit: int | None) -> None:
    """Let a card send no more than this."""
    if mbit is not None:
        words = ["rate", f"{mbit}mbit", "burst", f"{BURST_KILOBYTES}kb", "latency", f"{LATENCY_MS}ms"]
        run_tool(["tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *words])


def ip(*words: str) -> str:
    return run_tool(["ip", *words])


def run_tool(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Absent(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def remove(names: list[str]) -> None:
    """Delete these namespaces, as far as they exist; their cards go with them."""
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def remove_stale() -> None:
    """Delete what a run that was killed has left."""
    for line in ip("netns", "list").splitlines():
        name = line.split()[0]
        owner = name.removeprefix(PREFIX).partition("-")[0]
        if name.startswith(PREFIX) and not Path("/proc", owner).exists():
            remove([name])


def print_table(work: Work, measured: dict[str, Measured], mbit: int) -> None:
    """One line a system: its time, and its share of the bound and of what plain TCP reaches."""
    bound = bound_s(work.spec, mbit, work.servers)
    print(f"\n{work}\n{work.servers} hosts of {mbit} Mbit/s each way; cost model's bound {bound * 1e3:.0f} ms")
    print(f"{'':30} {'median ms':>10} {'p90 ms':>9} {'of the bound':>13} {'of plain TCP':>13}")
    line = measured.get("line", Measured())
    for name, one in measured.items():
        if not one.seconds:
            print(f"{SYSTEMS[name]:30} left out: {one.left_out.splitlines()[-1]}")
            continue
        of_line = f"{line.median_s / one.median_s:13.1%}" if line.seconds else ""
        print(
            f"{SYSTEMS[name]:30} {one.median_s * 1e3:10.0f} {one.quantile_s(0.9) * 1e3:9.0f}"
            f" {bound / one.median_s:13.1%} {of_line}",
            flush=True,
        )


if __name__ == "__main__":
    main()
