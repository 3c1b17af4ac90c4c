"""``kvdist doctor``: checks this machine, or every host as before a job, and measures their speed and network.

Only the agent is started on a host. Links are measured in turn, in both directions, so that no measurement disturbs
another. With ``--parameters`` and ``--step`` a table compares the ways of training, by the model of `kvdist.estimate`.
The last line of the output starts a job. The exit code is 0 if a job could run, 1 if a host or a link has a problem, 2
if the command line is wrong.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

from kvdist.config.addresses import address_of_interface
from kvdist.config.command_line import USAGE_ERROR, Parser, end_with
from kvdist.errors import ConfigError
from kvdist.estimate import (
    COMMAND,
    MachineSpeed,
    Mode,
    add_model_arguments,
    best_of,
    estimate,
    flat,
    line_to_paste,
    modes,
    positives,
)
from kvdist.nodes import Role
from kvdist_launch.host_pool import HostConnection, HostPool, judge, table
from kvdist_launch.hosts import Host, read_hosts
from kvdist_launch.job import GracePeriods
from kvdist_launch.options import OPTIONS
from kvdist_launch.output import JobOutput, TextSink, text_table
from kvdist_launch.probe import SERVE_S, TOKEN_BYTES, LinkSpeed
from kvdist_launch.ssh import python_of_hosts, ssh_options
from kvdist_launch.start import inherit
from kvdist_launch.supervisor import Supervisor

PROGRAM = "kvdist doctor"
PROBLEM = 1

LINK_S = 0.5
"""The usual time of a measurement."""

SILENT_S = 5.0
"""Total time of all measurements above which a line announces it."""

ANSWER_S = 2 * SERVE_S
"""Time for an agent's answer; longer than all waits of a measurement."""

ALONE_MB_PER_S = 1e6
"""MB/s assumed for a machine without a link to another."""

WORKERS_OF_CPU = 2
"""Workers in the line that starts a job on this machine, if it has no GPU."""

HERE = "this machine"

OF_HOSTS = (
    "--hostfile", "--python", "--activate", "--ssh-option", "--accept-new-host-keys", "--interface", "--sync-dst-dir",
)  # fmt: skip
"""The options of ``kvdist-launch`` that name the hosts and how to reach them."""

OTHER_HELP = {"--sync-dst-dir": {"help": "check whether DIR can be written to on every host, and its free space"}}
"""Settings of options that have another effect than in ``kvdist-launch``."""

EPILOG = """\
The first table is the one that kvdist-launch prints before a job, with the speed of each host in products of float32
matrices on all cores. The others have, from the host of the row to that of the column, the median of small round trips
and the bytes per second of a burst of 0.3 s, both over one TCP connection. Links are measured one after another. With
--parameters and --step a last table has what each way of training would make of the hosts, and which to take. The last
line starts a job. The exit code is 1 if a host, or a link between two, has a problem.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Examine hosts as the command line asks. Returns the exit code.

    Args:
        argv: the words after the program's name; None takes those of this process.
    """
    options = _parser().parse_args(sys.argv[1:] if argv is None else list(argv))
    try:
        if (options.parameters is None) != (options.step is None):
            raise ConfigError("--parameters and --step need each other")
        if options.speeds is not None and options.step is None:
            raise ConfigError("--speeds needs --parameters and --step")
        options.speeds = None if options.speeds is None else flat(options.speeds)
        text, problems = _examine(options)
    except ConfigError as error:
        return end_with(f"error: {error}", USAGE_ERROR, PROGRAM)
    print("\n\n".join(part for part in (text, "\n".join(problems)) if part))
    return PROBLEM if problems else 0


def _parser() -> Parser:
    parser = Parser(
        prog=PROGRAM,
        description="Check this machine, or every host as before a job, and measure the network between them.",
        epilog=EPILOG,
    )
    group = parser.add_argument_group("hosts")
    for names, settings in OPTIONS:
        if names[-1] in OF_HOSTS:
            group.add_argument(*names, **{**settings, **OTHER_HELP.get(names[-1], {})})
    model = parser.add_argument_group("the model to be trained, to be told what each mode would do")
    add_model_arguments(model)
    about = "of the hosts, in their order, instead of measuring them: for GPUs, say"
    model.add_argument("--speeds", type=positives, nargs="+", metavar="V", help=about)
    return parser


def _examine(options: argparse.Namespace) -> tuple[str, list[str]]:
    """The tables and the line that starts a job, and a sentence for each problem."""
    interface = options.interface
    mine = None if interface is None else address_of_interface(interface)
    hosts = [Host("localhost")] if options.hostfile is None else read_hosts(options.hostfile)
    if options.speeds is not None and len(options.speeds) != len(hosts):
        raise ConfigError(f"--speeds has {len(options.speeds)} values for {len(hosts)} hosts")
    sink = TextSink(sys.stderr)
    supervisor = Supervisor(JobOutput(sink, sink), sink, GracePeriods())
    with HostPool(hosts, python_of_hosts(options), ssh_options(options), supervisor) as pool:
        pool.connect()
        pool.here.found["address"] = mine
        pool.ask(lambda _: {"folder": options.sync_dst_dir, "interface": interface})
        for one in pool.connections:
            one.problem = one.problem or str(one.found.get("no_interface", ""))
        judge(pool.connections, options.sync_dst_dir)
        name_twice_named(pool.connections)
        if options.speeds is None:
            _measure_speeds(pool)
        count = 1 + sum(not (one.is_here or one.problem) for one in pool.connections)
        if (seconds := count * (count - 1) * LINK_S) > SILENT_S:
            sink.write_lines(b"", [f"measuring {count} machines in pairs, about {seconds:.0f} s\n".encode()])
        links = measure_links(pool)
        problems = [f"{one.host.name}: {one.problem}" for one in pool.connections if one.problem]
        problems += links.problems
        well = [one for one in pool.connections if not one.problem]
        found = [] if options.step is None or not well else _modes(options, pool.connections, links)
        tables = [table(pool.connections), links.tables(), estimate(found) if found else ""]
        if not problems:
            tables.append(_advice(options, well, found))
        return "\n\n".join(filter(None, tables)), problems


def name_twice_named(connections: Sequence[HostConnection]) -> None:
    """Report a host that is the same machine as an earlier host: a job would count its cores twice."""
    firsts: dict[str, HostConnection] = {}
    for one in connections:
        if one.problem:
            continue
        first = firsts.setdefault(str(one.facts.get("machine")), one)
        if first is not one and not (one.host.is_local and first.host.is_local):  # two names of this machine
            name = first.host.name
            one.problem = f"the same machine as {name}: name it once, with the slots of both, as in -H {name}:2"


def _measure_speeds(pool: HostPool) -> None:
    """Let the hosts without a problem measure their speeds, in turn."""
    for one in pool.connections:
        if not one.problem:
            found = _answer(pool, one, "measure_compute")
            one.problem = str(found.get("problem", ""))
            one.found["gflops"] = "" if one.problem else f"{found['gflops']:.3g}"


def _answer(pool: HostPool, one: HostConnection, question: str, **fields: Any) -> dict[str, Any]:
    """The answer of a host to a question of `HostProbe.answer`; a ``problem`` if it does not answer."""
    (answer,) = pool.answers(question, [(one, fields)], ANSWER_S)
    return {"problem": answer} if isinstance(answer, str) else answer


def _modes(options: argparse.Namespace, connections: Sequence[HostConnection], links: LinkTable) -> list[Mode]:
    """The ways of training on the hosts without a problem, of which at least one must exist."""
    speeds = {
        _name(one): float(one.found["gflops"]) if options.speeds is None else options.speeds[place]
        for place, one in enumerate(connections)
        if not one.problem
    }
    most = max(speeds.values())
    machines = [MachineSpeed(name, speed / most, links.slowest_of(name, speeds)) for name, speed in speeds.items()]
    return modes(machines, options.parameters, options.step, options.batch)


def _name(one: HostConnection) -> str:
    """A host's name in tables."""
    return HERE if one.host.is_local else one.host.name


def _advice(options: argparse.Namespace, connections: Sequence[HostConnection], found: Sequence[Mode]) -> str:
    """The line that starts a job on these hosts, in the best mode if modes are known."""
    reach = [word for names, _ in OPTIONS if names[-1] in OF_HOSTS for word in _as_given(options, names[-1])]
    if not found:
        if options.hostfile is None:
            gpus = int(connections[0].facts["gpus"])
            count = ["-n", str(gpus or WORKERS_OF_CPU)]
        else:
            slots = [one.host.slots for one in connections if one.host.takes(Role.WORKER)]
            count = [] if slots and all(slots) else ["-n", str(max(1, len(slots)))]
        return f"start a job:\n  kvdist-launch {shlex.join([*reach, *count])} {COMMAND}"
    best = best_of(found)
    if len(best.machines) < len(connections):
        spelled = {_name(one): f"{one.host.user or ''}{'@' * bool(one.host.user)}{one.host}" for one in connections}
        reach[reach.index("-H") + 1] = ",".join(spelled[name] for name in best.machines)
    return f"start a job in this mode:\n  {line_to_paste(best, reach)}"


def _as_given(options: argparse.Namespace, name: str) -> list[str]:
    """The words of the command line that set an option; empty if the option is not set."""
    value = getattr(options, name.removeprefix("--").replace("-", "_"))
    if value is None or value is False:
        return []
    word = "-H" if name == "--hostfile" else name
    if value is True:
        return [word]
    return [part for one in (value if isinstance(value, list) else [value]) for part in (word, one)]


@dataclass(frozen=True)
class LinkTable:
    """Latency and bandwidth between machines.

    Attributes:
        names: names of the machines.
        speeds: (from, to) → speed of the link, by positions in `names`.
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
        """MB/s of the slowest line between a machine and others; `ALONE_MB_PER_S` for a machine without lines."""
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


def measure_links(pool: HostPool) -> LinkTable:
    """Measure the links between this machine and all hosts without a problem.

    Args:
        pool: the hosts. To measure an interface, each must have been asked for its address on it, and `pool.here` have
            found its own. If a host is this machine, this machine has the host's name in the tables.
    """
    others = [one for one in pool.connections if not one.is_here and not one.problem]
    names_of_here = [one.host.name for one in others if one.is_this_machine]
    others = [one for one in others if not one.is_this_machine]
    machines = [pool.here, *others]
    pairs = permutations(range(len(machines)), 2)
    speeds = {(source, target): _measure(pool, machines[source], machines[target]) for source, target in pairs}
    name_of_here = next(iter(names_of_here), HERE)
    return LinkTable((name_of_here, *(one.host.name for one in others)), speeds)


def _measure(pool: HostPool, source: HostConnection, target: HostConnection) -> LinkSpeed:
    token = os.urandom(TOKEN_BYTES).hex()
    address = str(target.found.get("address") or (source.seen_as if target.is_here else target.address))
    if not address:
        return LinkSpeed(problem=f"the address under which {_name(target)} is reached is unknown")
    opened = _answer(pool, target, "measure_listen", address=address, token=token)
    try:
        if "port" not in opened:
            return LinkSpeed(problem=f"{_name(target)}: {opened['problem']}")
        return LinkSpeed(**_answer(pool, source, "measure_dial", address=address, port=opened["port"], token=token))
    finally:
        target.processes.ask("measure_end")


if __name__ == "__main__":
    inherit(PROGRAM)
    raise SystemExit(main())
