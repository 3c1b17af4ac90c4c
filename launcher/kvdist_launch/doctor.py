"""``kvdist doctor -H HOSTS``: check every host as before a job, and measure the network between them.

Starts nothing there but the agent. Links are measured one after another, in both directions, so that none disturbs
another. The exit code is 0 if a job could run, 1 if a host or a link has a problem, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import selectors
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from kvdist.config.addresses import address_of_interface
from kvdist.errors import ConfigError
from kvdist_launch.host_pool import HostConnection, HostPool, RemoteProcesses
from kvdist_launch.hosts import read_hosts
from kvdist_launch.job import GracePeriods
from kvdist_launch.options import OPTIONS
from kvdist_launch.output import JobOutput, TextSink, text_table
from kvdist_launch.preflight import explained, judge, table
from kvdist_launch.probe import SERVE_S, TOKEN_BYTES, LinkSpeed, SpeedListener, measure_speed
from kvdist_launch.ssh import SshOptions, python_of_hosts
from kvdist_launch.supervisor import Supervisor

ANSWER_S = 2 * SERVE_S
"""For an agent's answer; longer than everything that a measurement waits for."""

THIS_MACHINE = "this machine"


@dataclass(frozen=True)
class LinkTable:
    """What was measured.

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

    @property
    def slowest(self) -> float | None:
        """The lowest bandwidth between hosts of the job, in MB/s; None if nothing was measured."""
        return min((one.mb_per_s for one in self._of_hosts()), default=None)

    @property
    def latency_ms(self) -> float:
        """The longest round trip between hosts of the job."""
        return max((one.latency_ms for one in self._of_hosts()), default=0.0)

    def _of_hosts(self) -> list[LinkSpeed]:
        """What was measured; the launching machine's own lines, the first, only if there are no others."""
        measured = {place: one for place, one in self.speeds.items() if not one.problem}
        return [one for place, one in measured.items() if 0 not in place] or list(measured.values())

    def tables(self) -> str:
        """Two tables, of latencies and bandwidths: from the host of the row to that of the column.

        Empty if there is only one machine.
        """
        if not self.speeds:
            return ""
        latency = self._table("ms, there and back", lambda speed: f"{speed.latency_ms:.2f}")
        bandwidth = self._table("MB/s", lambda speed: f"{speed.mb_per_s:.0f}")
        return f"{latency}\n\n{bandwidth}"

    def _table(self, title: str, shown: Callable[[LinkSpeed], str]) -> str:
        places = range(len(self.names))
        rows = [[name, *(self._cell((row, column), shown) for column in places)] for row, name in enumerate(self.names)]
        return text_table([title, *self.names], rows, right=True)

    def _cell(self, place: tuple[int, int], shown: Callable[[LinkSpeed], str]) -> str:
        speed = self.speeds.get(place)
        return "" if speed is None else "no" if speed.problem else shown(speed)


def measure_links(fleet: HostPool, selector: selectors.BaseSelector, interface: str | None = None) -> LinkTable:
    """Measure between all hosts that are connected, and this machine.

    Args:
        fleet: the hosts. With an interface, each has been asked for its address there.
        selector: the fleet's.
        interface: this machine's address on the interface that is to be measured; None measures the routes by which
            hosts were reached.
    """
    parties: list[_Here | _There] = [
        _There(station, station.crew, fleet)
        for station in fleet.stations
        if isinstance(station.crew, RemoteProcesses) and not station.problem
    ]
    here = _Here(selector, interface)
    parties.insert(0, here)
    try:
        speeds = {(source, target): _speed(parties[source], parties[target]) for source, target in _pairs(len(parties))}
    finally:
        here.close()
    return LinkTable(tuple(party.name for party in parties), speeds)


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return ((source, target) for source in range(count) for target in range(count) if source != target)


def _speed(source: _Here | _There, target: _Here | _There) -> LinkSpeed:
    token = os.urandom(TOKEN_BYTES).hex()
    address = target.address_from(source)
    if not address:
        return LinkSpeed(problem=f"it is not known under which address {target.name} is reached")
    opened = target.open(address, token)
    try:
        if "port" not in opened:
            return LinkSpeed(problem=f"{target.name}: {opened['problem']}")
        return source.dial(address, int(opened["port"]), token)
    finally:
        target.close()


class _Here:
    """This machine."""

    name = THIS_MACHINE

    def __init__(self, selector: selectors.BaseSelector, address: str | None) -> None:
        self._ear = SpeedListener(selector)
        self._address = address

    def address_from(self, other: _Here | _There) -> str:
        """Under which it is reached from another one."""
        return self._address or (other.station.seen_as if isinstance(other, _There) else "")

    def open(self, address: str, token: str) -> dict[str, Any]:
        """Listen."""
        return self._ear.open(address, token)

    def dial(self, address: str, port: int, token: str) -> LinkSpeed:
        """Measure."""
        return measure_speed(address, port, token)

    def close(self) -> None:
        """Listen no more."""
        self._ear.close()


class _There:
    """Another machine."""

    def __init__(self, station: HostConnection, crew: RemoteProcesses, fleet: HostPool) -> None:
        self.station = station
        self.name = station.host.name
        self._crew = crew
        self._fleet = fleet

    def address_from(self, other: _Here | _There) -> str:
        """Under which it is reached from another one."""
        return str(self.station.found.get("address") or self.station.address)

    def open(self, address: str, token: str) -> dict[str, Any]:
        """Listen."""
        return self._ask("measure_listen", "measure_listening", address=address, token=token)

    def dial(self, address: str, port: int, token: str) -> LinkSpeed:
        """Measure."""
        return LinkSpeed(**self._ask("measure_dial", "measured", address=address, port=port, token=token))

    def close(self) -> None:
        """Listen no more."""
        self._crew.ask("measure_end")

    def _ask(self, question: str, kind: str, **fields: Any) -> dict[str, Any]:
        crew = self._crew
        crew.answers.pop(kind, None)
        crew.ask(question, **fields)
        self._fleet.turn_until(lambda: kind in crew.answers or bool(crew.failure), ANSWER_S)
        nothing = {"problem": crew.failure or f"its agent has not answered within {ANSWER_S:g} s"}
        return crew.answers.get(kind, nothing)


PROBLEM = 1
USAGE_ERROR = 2

WAY_S = 0.5
"""What measuring from one host to another takes, as a rule."""

PATIENCE_S = 5.0
"""Whoever waits longer is told for how long."""

OF_HOSTS = (
    "--hostfile", "--python", "--activate", "--ssh-option", "--accept-new-host-keys", "--interface", "--sync-dst-dir",
)  # fmt: skip
"""The options of ``kvdist-launch`` that say which hosts there are and how they are reached."""

OTHER_HELP = {"--sync-dst-dir": {"help": "see whether DIR can be written to on every host, and how much room it has"}}
"""Of options that do something else here than in ``kvdist-launch``."""

EPILOG = """\
The first table is the one that kvdist-launch prints before a job. The others have, from the host of the row to that of
the column, the median of small round trips and the bytes per second of a burst of 0.3 s, both over one TCP connection.
Pairs are measured one after another. The exit code is 1 if a host, or a way between two, has a problem.
"""


@dataclass(frozen=True)
class Findings:
    """What was found out.

    Attributes:
        table: the hosts.
        problems: a sentence for each host that cannot take part.
        matrix: what was measured between those that can.
    """

    table: str
    problems: tuple[str, ...]
    matrix: LinkTable


def main(argv: Sequence[str] | None = None) -> int:
    """Examine hosts as the command line says. Returns the exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.
    """
    parser = argparse.ArgumentParser(
        prog="kvdist doctor",
        description="Look at every host as before a job, and measure latency and bandwidth between them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_host_options(parser)
    options = parser.parse_args(argv)
    try:
        if options.hostfile is None:
            raise ConfigError("-H is missing: name a hostfile, or a list such as -H a,b")
        found = examine(options)
    except ConfigError as error:
        print(f"kvdist doctor: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    problems = [*found.problems, *found.matrix.problems]
    print("\n\n".join(part for part in (found.table, found.matrix.tables(), "\n".join(problems)) if part))
    return PROBLEM if problems else 0


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Let a parser know the options that say which hosts there are; see `OF_HOSTS`."""
    group = parser.add_argument_group("hosts")
    for names, settings in OPTIONS:
        if names[-1] in OF_HOSTS:
            group.add_argument(*names, **{**settings, **OTHER_HELP.get(names[-1], {})})


def examine(options: argparse.Namespace) -> Findings:
    """Look at hosts and measure.

    Args:
        options: those of `add_host_options`.

    Raises:
        ConfigError: the hosts are not valid, or this machine has no such interface.
    """
    interface = options.interface
    mine = None if interface is None else address_of_interface(interface)
    python = python_of_hosts(options.python, options.activate)
    ssh = SshOptions(options.accept_new_host_keys, tuple(options.ssh_option or ()), options.activate or "")
    sink = TextSink(sys.stderr)
    supervisor = Supervisor(JobOutput(sink, sink), sink, GracePeriods())
    fleet = HostPool(read_hosts(options.hostfile), python, ssh, supervisor)
    try:
        fleet.connect()
        for station in fleet.stations:
            if station.problem:
                station.problem = explained(station.problem, station.host.python or python, station.host)
        fleet.ask(lambda _: {"folder": options.sync_dst_dir, "interface": interface})
        for station in fleet.stations:
            station.problem = station.problem or str(station.found.get("no_interface", ""))
        judge(fleet.stations, options.sync_dst_dir)
        count = 1 + sum(not station.is_here and not station.problem for station in fleet.stations)
        if (seconds := count * (count - 1) * WAY_S) > PATIENCE_S:
            sink.write_lines(b"", [f"measuring {count} machines in pairs, about {seconds:.0f} s\n".encode()])
        matrix = measure_links(fleet, supervisor.selector, mine)
        problems = tuple(f"{one.host.name}: {one.problem}" for one in fleet.stations if one.problem)
        return Findings(table(fleet.stations), problems, matrix)
    finally:
        fleet.release()


if __name__ == "__main__":
    raise SystemExit(main())
