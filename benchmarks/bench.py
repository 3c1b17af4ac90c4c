"""The benchmarks as a product: holds every contest, and says which of the ratios were reached.

    python benchmarks/bench.py                 # the headline rows, within 20 minutes
    python benchmarks/bench.py --full          # one dimension varied at a time, models, other modes
    python benchmarks/bench.py --only large    # some contests by name

Writes ``results/headline.json`` (or ``full.json``), a Markdown table and plots beside it. The file is written after
each contest, so a run that is stopped leaves what it has measured.
"""

from __future__ import annotations

import argparse
import fnmatch
import time
from dataclasses import replace
from pathlib import Path

import end_to_end
import namespaces
import push_pull
import systems
from cluster import end_on_terminate, machine
from end_to_end import Training
from peers.environments import Absent
from report import Report
from systems import Measured, Work
from targets import CONTESTS, FULL_TURNS, ROWS, Contest, Line, full_contests

RESULTS = Path(__file__).resolve().parent / "results"


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    turns = options.turns or (FULL_TURNS if options.full else 3)
    contests = [one for one in (full_contests() if options.full else CONTESTS) if wanted(one.name, options.only)]
    if not contests:
        raise SystemExit(f"no contest is called {', '.join(options.only)}")
    name = options.out or ("full" if options.full else "headline")
    report = Report(machine(), turns, ROWS)
    started = time.monotonic()
    for number, contest in enumerate(contests, 1):
        print(f"\n[{number}/{len(contests)}, {time.monotonic() - started:.0f} s] {contest.name}", flush=True)
        report.add(contest, hold(contest, turns, options.steps))
        report.write(RESULTS, name)
    print(f"\n{report.markdown()}\nwritten to {RESULTS / name}.json and .md, in {time.monotonic() - started:.0f} s")
    report.draw(RESULTS, name)
    if failed := report.failures():
        raise SystemExit(f"kvdist itself failed: {'; '.join(failed)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Holds every contest.")
    parser.add_argument("--full", action="store_true", help="what the headline leaves out; an hour or two")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="names of contests, such as mlp")
    parser.add_argument("--turns", type=int, help=f"fresh clusters of each system (default: 3; --full: {FULL_TURNS})")
    parser.add_argument("--steps", type=int, help="timed steps in each turn; default: as each contest says")
    parser.add_argument("--out", metavar="NAME", help="name of the files in results/ (default: headline or full)")
    return parser.parse_args()


def wanted(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def hold(contest: Contest, turns: int, steps: int | None) -> dict[str, Measured]:
    """Let the systems of a contest take turns, print their table and return what they took."""
    work = contest.work
    if isinstance(work, Work):
        work = replace(work, steps=steps or work.steps)
        measured = systems.measure(work, contest.systems, turns)
        push_pull.print_table(work, measured)
    elif isinstance(work, Training):
        work = replace(work, steps=steps or work.steps)
        measured = end_to_end.measure(work, list(contest.systems), turns)
        end_to_end.print_table(work, measured)
    else:
        measured = hold_on_line(work, contest.systems, turns, steps)
    return measured


def hold_on_line(line: Line, names: tuple[str, ...], turns: int, steps: int | None) -> dict[str, Measured]:
    """The same between two namespaces; the cost model's bound takes part as ``bound``."""
    assert isinstance(line.work, Work), "the headline trains on one machine"
    work = replace(line.work, steps=steps or line.work.steps)
    try:
        measured = namespaces.measure(work, list(names), turns, line.mbit)
    except Absent as error:
        print(f"LEFT OUT: {error}", flush=True)
        return {name: Measured(left_out=str(error)) for name in (*names, "bound")}
    namespaces.print_table(work, measured, line.mbit)
    return measured | {"bound": Measured([namespaces.bound_s(work.spec, line.mbit)])}


if __name__ == "__main__":
    main()
