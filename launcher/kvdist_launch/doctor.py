"""``kvdist doctor -H HOSTS``: check every host as before a job, and measure the network between them.

Starts nothing there but the agent. Links are measured one after another, in both directions, so that none disturbs
another. With ``--parameters`` and ``--step`` it says what each way of training would make of these machines; it asks
``python -m kvdist estimate``, which has the model. The exit code is 0 if a job could run, 1 if a host or a link has a
problem, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import selectors
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from kvdist.config.addresses import address_of_interface
from kvdist.config.processes import module_words
from kvdist.errors import ConfigError
from kvdist_launch.agent_protocol import REPLIES
from kvdist_launch.host_pool import HostConnection, HostPool, RemoteProcesses, judge, table
from kvdist_launch.hosts import read_hosts
from kvdist_launch.job import GracePeriods
from kvdist_launch.options import OPTIONS
from kvdist_launch.output import JobOutput, TextSink, text_table
from kvdist_launch.probe import SERVE_S, TOKEN_BYTES, HostProbe, LinkSpeed
from kvdist_launch.ssh import python_of_hosts, ssh_options
from kvdist_launch.start import inherit
from kvdist_launch.supervisor import Supervisor

PROBLEM = 1
USAGE_ERROR = 2

LINK_S = 0.5
"""The usual time of one measurement."""

SILENT_S = 5.0
"""If all measurements take longer, a line says how long."""

ANSWER_S = 2 * SERVE_S
"""For an agent's answer; longer than everything that a measurement waits for."""

ALONE_MB_PER_S = 1e6
"""Of a machine that has no line to another."""

ESTIMATE_S = 60.0
"""For ``python -m kvdist estimate``."""

HERE = "this machine"

OF_HOSTS = (
    "--hostfile", "--python", "--activate", "--ssh-option", "--accept-new-host-keys", "--interface", "--sync-dst-dir",
)  # fmt: skip
"""The options of ``kvdist-launch`` that say which hosts there are and how they are reached."""

OTHER_HELP = {"--sync-dst-dir": {"help": "check whether DIR can be written to on every host, and its free space"}}
"""Of options that do something else here than in ``kvdist-launch``."""

EPILOG = """\
The first table is the one that kvdist-launch prints before a job. The others have, from the host of the row to that of
the column, the median of small round trips and the bytes per second of a burst of 0.3 s, both over one TCP connection.
Links are measured one after another. With --parameters and --step a last table has what each way of training
would make of the hosts, and which one to take; their speeds are measured by products of matrices on all cores. The exit
code is 1 if a host, or a link between two, has a problem.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Examine hosts as the command line says. Returns the exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.
    """
    parser = argparse.ArgumentParser(
        prog="kvdist doctor",
        description="Check every host as before a job, and measure latency and bandwidth between them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("hosts")
    for names, settings in OPTIONS:
        if names[-1] in OF_HOSTS:
            group.add_argument(*names, **{**settings, **OTHER_HELP.get(names[-1], {})})
    model = parser.add_argument_group("the model to be trained, to be told what each mode would do")
    model.add_argument("--parameters", metavar="N", help="how many weights it has, such as 30e6")
    model.add_argument("--step", metavar="S", help="seconds of a step on the fastest host alone")
    model.add_argument(
        "--speeds", metavar="V,V,…", help="of the hosts, in their order, instead of measuring them: for GPUs, say"
    )
    options = parser.parse_args(argv)
    try:
        if options.hostfile is None:
            raise ConfigError("-H is missing: name a hostfile, or a list such as -H a,b")
        if (options.parameters is None) != (options.step is None):
            raise ConfigError("--parameters and --step need each other")
        if options.speeds is not None and options.step is None:
            raise ConfigError("--speeds needs --parameters and --step")
        text, problems = _examine(options)
    except ConfigError as error:
        print(f"kvdist doctor: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    print("\n\n".join(part for part in (text, "\n".join(problems)) if part))
    return PROBLEM if problems else 0


def _examine(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The tables, and a sentence for each problem."""
    interface = options.interface
    mine = None if interface is None else address_of_interface(interface)
    sink = TextSink(sys.stderr)
    supervisor = Supervisor(JobOutput(sink, sink), sink, GracePeriods())
    with HostPool(read_hosts(options.hostfile), python_of_hosts(options), ssh_options(options), supervisor) as pool:
        pool.connect()
        pool.ask(lambda _: {"folder": options.sync_dst_dir, "interface": interface})
        for one in pool.connections:
            one.problem = one.problem or str(one.found.get("no_interface", ""))
        judge(pool.connections, options.sync_dst_dir)
        count = 1 + sum(not one.problem for one, _ in pool.remote())
        if (seconds := count * (count - 1) * LINK_S) > SILENT_S:
            sink.write_lines(b"", [f"measuring {count} machines in pairs, about {seconds:.0f} s\n".encode()])
        links = measure_links(pool, supervisor.selector, mine)
        modes = "" if options.step is None else _modes(options, pool, links)
        problems = [f"{one.host.name}: {one.problem}" for one in pool.connections if one.problem]
        tables = [table(pool.connections), links.tables(), modes]
        return "\n\n".join(filter(None, tables)), [*problems, *links.problems]


def _modes(options: argparse.Namespace, pool: HostPool, links: LinkTable) -> str:
    """What each way of training would make of the hosts that are well; '' if there is none.

    Raises:
        ConfigError: the numbers of the command line do not go with the hosts.
    """
    given = [] if options.speeds is None else options.speeds.split(",")
    if given and len(given) != len(pool.connections):
        raise ConfigError(f"--speeds has {len(given)} values, and -H {len(pool.connections)} hosts")
    here = HostProbe(selectors.DefaultSelector())
    speeds: dict[str, str] = {}
    for place, one in enumerate(pool.connections):
        if one.problem:
            continue
        machine = _Machine(one.processes if isinstance(one.processes, RemoteProcesses) else here, pool, one)
        found = {} if given else machine.ask("measure_compute")
        one.problem = str(found.get("problem", ""))
        if not one.problem:
            speeds[HERE if one.host.is_local else one.host.name] = given[place] if given else str(found["gflops"])
    if not speeds:
        return ""
    lines = [str(links.slowest_of(name, speeds)) for name in speeds]
    words = ["--parameters", options.parameters, "--step", options.step, "--speeds", *speeds.values()]
    words += ["--names", *speeds, "--mb-per-s", *lines]
    argv = [sys.executable, *module_words("kvdist"), "estimate", *words]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=ESTIMATE_S)
    if done.returncode:
        raise ConfigError((done.stderr or done.stdout).strip().rpartition("error: ")[2])
    return done.stdout.rstrip()


@dataclass(frozen=True)
class LinkTable:
    """Latency and bandwidth between machines.

    Attributes:
        names: of the machines.
        speeds: (from, to) → what was measured, by places in `names`.
    """

    names: tuple[str, ...]
    speeds: dict[tuple[int, int], LinkSpeed]

    @property
    def problems(self) -> list[str]:
        """A sentence for each direction that could not be measured."""
        return [
            f"{self.names[source]} → {self.names[target]}: {speed.problem}"
            for (source, target), speed in self.speeds.items()
            if speed.problem
        ]

    def slowest_of(self, name: str, among: Collection[str]) -> float:
        """MB/s of the slowest line between a machine and others; of one alone as good as infinite."""
        ends = [(self.names[source], self.names[target], speed) for (source, target), speed in self.speeds.items()]
        found = [
            speed.mb_per_s
            for source, target, speed in ends
            if name in (source, target) and {source, target} <= {*among} and not speed.problem
        ]
        return min(found, default=ALONE_MB_PER_S)

    def tables(self) -> str:
        """Two tables, of latencies and bandwidths, from the host of the row to that of the column; '' for one
        machine."""
        if not self.speeds:
            return ""
        latency = self._table("ms, there and back", lambda speed: f"{speed.latency_ms:.2f}")
        bandwidth = self._table("MB/s", lambda speed: f"{speed.mb_per_s:.0f}")
        return f"{latency}\n\n{bandwidth}"

    def _table(self, title: str, shown: Callable[[LinkSpeed], str]) -> str:
        def cell(row: int, column: int) -> str:
            speed = self.speeds.get((row, column))
            return "" if speed is None else "no" if speed.problem else shown(speed)

        places = range(len(self.names))
        rows = [[name, *(cell(row, column) for column in places)] for row, name in enumerate(self.names)]
        return text_table([title, *self.names], rows, right=True)


def measure_links(pool: HostPool, selector: selectors.BaseSelector, address: str | None = None) -> LinkTable:
    """Measure between all hosts that are connected, and this machine.

    Args:
        pool: the hosts. To measure one interface, each has been asked for its address there.
        selector: the pool's.
        address: this machine's address on that interface; None measures the routes by which hosts were reached.
    """
    here = _Machine(HostProbe(selector), pool, own_address=address)
    there = [_Machine(remote, pool, connection) for connection, remote in pool.remote() if not connection.problem]
    machines = [here, *there]
    try:
        pairs = permutations(range(len(machines)), 2)
        speeds = {(source, target): _measure(machines[source], machines[target]) for source, target in pairs}
    finally:
        here.end_measurement()
    return LinkTable(tuple(machine.name for machine in machines), speeds)


def _measure(source: _Machine, target: _Machine) -> LinkSpeed:
    token = os.urandom(TOKEN_BYTES).hex()
    address = target.address_from(source)
    if not address:
        return LinkSpeed(problem=f"the address under which {target.name} is reached is unknown")
    opened = target.ask("measure_listen", address=address, token=token)
    try:
        if "port" not in opened:
            return LinkSpeed(problem=f"{target.name}: {opened['problem']}")
        return LinkSpeed(**source.ask("measure_dial", address=address, port=int(opened["port"]), token=token))
    finally:
        target.end_measurement()


@dataclass(frozen=True)
class _Machine:
    """One end of a link: this machine by its own probe, another one by its agent."""

    probe: HostProbe | RemoteProcesses
    pool: HostPool
    connection: HostConnection | None = None
    own_address: str | None = None

    @property
    def name(self) -> str:
        return HERE if self.connection is None else self.connection.host.name

    def address_from(self, other: _Machine) -> str:
        """The address under which `other` reaches this machine; '' if it is not known."""
        if self.connection is not None:
            return str(self.connection.found.get("address") or self.connection.address)
        return self.own_address or ("" if other.connection is None else other.connection.seen_as)

    def ask(self, kind: str, **fields: Any) -> dict[str, Any]:
        if isinstance(self.probe, HostProbe):
            return self.probe.answer(kind, fields)
        agent, reply = self.probe, REPLIES[kind]
        agent.ask(kind, **fields)
        self.pool.turn_until(lambda: reply in agent.answers or bool(agent.failure), ANSWER_S)
        nothing = {"problem": agent.failure or f"its agent has not answered within {ANSWER_S:g} s"}
        return agent.answers.get(reply, nothing)

    def end_measurement(self) -> None:
        if isinstance(self.probe, HostProbe):
            self.probe.end_measurement()
        else:
            self.probe.ask("measure_end")


if __name__ == "__main__":
    inherit("kvdist doctor")
    raise SystemExit(main())
