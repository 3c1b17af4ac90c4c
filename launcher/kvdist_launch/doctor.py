"""``kvdist doctor -H HOSTS``: look at every host as before a job, and measure the network between them.

Starts nothing there but the agent. The exit code is 0 if a job could run, 1 if a host or a way between two has a
problem, 2 if the command line is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvdist.config.addresses import address_of_interface
from kvdist.errors import ConfigError
from kvdist_launch.course import Patience
from kvdist_launch.fleet import Fleet
from kvdist_launch.hosts import read_hosts
from kvdist_launch.matrix import Matrix, measure
from kvdist_launch.options import OPTIONS
from kvdist_launch.output import TextSink
from kvdist_launch.preflight import explained, judge, table
from kvdist_launch.ssh import SshOptions, python_of_hosts
from kvdist_launch.supervisor import Supervisor
from kvdist_launch.transcript import Transcript

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
    matrix: Matrix


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
    supervisor = Supervisor(Transcript(sink, sink), sink, Patience())
    fleet = Fleet(read_hosts(options.hostfile), python, ssh, supervisor)
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
        matrix = measure(fleet, supervisor.selector, mine)
        problems = tuple(f"{one.host.name}: {one.problem}" for one in fleet.stations if one.problem)
        return Findings(table(fleet.stations), problems, matrix)
    finally:
        fleet.release()


if __name__ == "__main__":
    raise SystemExit(main())
