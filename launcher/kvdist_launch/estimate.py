"""``kvdist estimate``: what a step will cost on the network, from a list of parameters and how fast the lines are.

The numbers are a lower bound by the model of `cost`: processors, and steps that do not overlap, come on top.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.cost import Cost, Layout, Scheme, Tensor, apart, cost, verdict
from kvdist_launch.doctor import add_host_options, examine
from kvdist_launch.hosts import read_hosts
from kvdist_launch.parameters import ITEMSIZES, of_file, of_number, of_shapes
from kvdist_launch.placement import place
from kvdist_launch.tables import text_table

PROBLEM = 1
USAGE_ERROR = 2

EPILOG = """\
examples:
  kvdist estimate model.safetensors -n 4 -s 2 --bandwidth 117    lines of 1 Gbit/s, each process on its own machine
  kvdist estimate --shapes 4096x4096,4096 -n 4 -s 2 -H hosts     lines as they are between these hosts
  kvdist estimate --params 7e9 --dtype bfloat16 -n 8 -s 8 --bandwidth 2900 --compute-ms 350
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Estimate as the command line says. Returns the exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.
    """
    options = _parser().parse_args(argv)
    if options.num_servers is None:
        options.num_servers = options.num_workers
    try:
        tensors = _tensors(options)
        for flag, count in (("-n", options.num_workers), ("-s", options.num_servers)):
            if count < 1:
                raise ConfigError(f"{flag} is {count}; a job needs at least 1")
        layout, mb_per_s, latency_ms = _network(options)
    except ConfigError as error:
        print(f"kvdist estimate: error: {error}", file=sys.stderr)
        return USAGE_ERROR
    if mb_per_s is None:
        print("kvdist estimate: nothing could be measured between these hosts; see kvdist doctor", file=sys.stderr)
        return PROBLEM
    costs = [(scheme, cost(tensors, layout, scheme, mb_per_s, latency_ms)) for scheme in Scheme]
    print(report(tensors, layout, costs, mb_per_s, latency_ms))
    if options.compute_ms is not None:
        print(f"\n{verdict(costs, options.compute_ms)}")
    return 0


def report(
    tensors: Sequence[Tensor],
    layout: Layout,
    costs: Sequence[tuple[Scheme, Cost]],
    mb_per_s: float,
    latency_ms: float,
) -> str:
    """The estimate for people."""
    elements, nbytes = sum(one.elements for one in tensors), sum(one.elements * one.itemsize for one in tensors)
    titles = ("compression", "a worker pushes", "and pulls", "a server gets", "and sends", "busiest line", "ms a step")
    rows = [
        [
            scheme.value,
            *map(_size, (one.push_bytes, one.pull_bytes, one.server_in_bytes, one.server_out_bytes)),
            f"{_size(one.line_bytes)} {one.line}" if one.line_bytes else one.line,
            f"{one.ms:.1f}",
        ]
        for scheme, one in costs
    ]
    sizes = f"{_counted(len(tensors), 'parameter')}, {elements:,} elements, {_size(nbytes)}"
    job = f"{_counted(len(layout.workers), 'worker')} and {_counted(len(layout.servers), 'server')}"
    lines = f"lines of {mb_per_s:.0f} MB/s, {latency_ms:.2f} ms there and back"
    where = _counted(len(layout.names), "machine")
    return f"{sizes}\n{job} on {where}; {lines}\n\n{text_table(titles, rows, right=True)}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvdist estimate",
        description="Say what a step will cost on the network, at least.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    what = parser.add_argument_group("parameters (one of the three)")
    what.add_argument("file", nargs="?", type=Path, metavar="FILE", help="a safetensors file")
    what.add_argument("--shapes", metavar="SHAPES", help="shapes with commas between, as in 1000x1000,1000")
    what.add_argument("--params", type=float, metavar="N", help="the number of elements, as in 25e6")
    what.add_argument("--dtype", choices=sorted(ITEMSIZES), default="float32", help="of --shapes and --params")
    job = parser.add_argument_group("job")
    job.add_argument("-n", "--num-workers", type=int, required=True, metavar="WORKERS", help="number of workers")
    job.add_argument("-s", "--num-servers", type=int, metavar="SERVERS", help="number of servers (default: as workers)")
    job.add_argument("--compute-ms", type=float, metavar="MS", help="how long a worker computes in a step")
    network = parser.add_argument_group("network (one of -H and --bandwidth)")
    network.add_argument("--bandwidth", type=float, metavar="MB/s", help="of each line, in each direction")
    network.add_argument("--latency-ms", type=float, default=0.0, metavar="MS", help="of a round trip (default: 0)")
    add_host_options(parser)
    return parser


def _tensors(options: argparse.Namespace) -> list[Tensor]:
    given = [one for one in (options.file, options.shapes, options.params) if one is not None]
    if len(given) != 1:
        raise ConfigError("name the parameters in one way: FILE, --shapes or --params")
    if options.file is not None:
        return of_file(options.file)
    if options.shapes is not None:
        return of_shapes(options.shapes, options.dtype)
    return of_number(options.params, options.dtype)


def _network(options: argparse.Namespace) -> tuple[Layout, float | None, float]:
    """Where processes are, MB/s, and ms; None if it was to be measured and could not be."""
    num_workers, num_servers = options.num_workers, options.num_servers
    if (options.hostfile is None) == (options.bandwidth is None):
        raise ConfigError("say how fast the network is in one way: --bandwidth MB/s, or -H HOSTS to measure it")
    if options.hostfile is None:
        if not options.bandwidth > 0:
            raise ConfigError(f"--bandwidth is {options.bandwidth:g}; it counts megabytes per second, more than 0")
        return apart(num_workers, num_servers), options.bandwidth, options.latency_ms
    hosts = read_hosts(options.hostfile)
    seats = place(hosts, num_workers, num_servers)
    of_role = {role: tuple(one.host for one in seats if one.node.role is role) for role in (Role.WORKER, Role.SERVER)}
    layout = Layout(of_role[Role.WORKER], of_role[Role.SERVER], tuple(host.name for host in hosts))
    found = examine(options)
    for problem in (*found.problems, *found.matrix.problems):
        print(f"kvdist estimate: {problem}", file=sys.stderr)
    return layout, found.matrix.slowest, found.matrix.latency_ms


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


if __name__ == "__main__":
    raise SystemExit(main())
