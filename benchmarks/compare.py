"""Two commits of kvdist beside each other: is any of the headline's rows slower than it was?

    python benchmarks/compare.py --base HEAD~1            # the working tree against the commit before, 15 pairs a row
    python benchmarks/compare.py --base v0.1 --only small --only 'large*' --pairs 30
    python benchmarks/compare.py --base main --only bytes-1024/kvdist --only keys-10000/kvdist    # of the full table

Each row is measured in pairs, one fresh cluster of the base and one of the working tree, so that whatever else the
machine does meets both. Both run the worker scripts of the working tree. A pair's ratio is the base's median step over
the working tree's: above 1 is faster. A row's ratio is the median of its pairs' ratios, with the 95 % interval that a
bootstrap over the pairs gives. A row fails when even the upper end of that interval is below 0.97; then the exit code
is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import end_to_end
import namespaces
import numpy as np
import sparse
import systems
from cluster import PLAIN_TCP, ROOT, Start, end_on_terminate, environment, run_together
from end_to_end import Training
from peers.environments import Absent
from systems import Measured, Work, take_turns
from targets import CONTESTS, Contest, full_contests

PAIRS = 15
ROW_SYSTEMS = ("kvdist", "kvdist-tcp")
TABLES = (
    Contest("rows", sparse.Work(sparse.MXNET_ROWS, sparse.PUSHED, ("--whole",), steps=30, warmup=20), ROW_SYSTEMS),
    Contest("rows-declared", sparse.Work(1_000_000, sparse.PUSHED, steps=30, warmup=20), ROW_SYSTEMS),
)
"""Random rows of tables, pushed and pulled; beside the headline."""
SLOWER_BELOW = 0.97
"""A row whose whole interval lies below this ratio is slower, and not by chance."""
CONFIDENCE = 0.95
RESAMPLES = 10_000


@dataclass(frozen=True)
class Compared:
    """How a row of the working tree compares with the base.

    Attributes:
        ratio: the median over the pairs of the base's milliseconds over the working tree's.
        low, high: the ends of its 95 % interval.
    """

    ratio: float
    low: float
    high: float

    @property
    def is_slower(self) -> bool:
        return self.high < SLOWER_BELOW


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    rows = list(chosen_rows(options.only))
    if not rows:
        raise SystemExit(f"no row is called {', '.join(options.only)}; the rows are {', '.join(row_names())}")
    failed = []
    with checkout(options.base) as base, tempfile.TemporaryDirectory(prefix="compare-") as empty:
        os.chdir(empty)  # `python -m` imports from the current folder first
        for folder in (base, ROOT):
            check_imports(folder)
        print(f"{'row':32} {'base ms':>9} {'now ms':>9} {'ratio':>7} {'95 % interval':>17}", flush=True)
        for contest, system in rows:
            name = f"{contest.name}/{system}"
            if not print_row(name, measure(contest, system, base, options.pairs)):
                failed.append(name)
    if failed:
        raise SystemExit(f"slower than {options.base}, or without a result: {', '.join(failed)}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compares the working tree with another commit.")
    parser.add_argument("--base", required=True, metavar="REV", help="the commit to compare with")
    parser.add_argument("--pairs", type=int, default=PAIRS, help=f"clusters of each commit in a row (default: {PAIRS})")
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN", help="rows, such as small or '*/tcp'")
    return parser.parse_args()


def chosen_rows(patterns: Sequence[str]) -> Iterator[tuple[Contest, str]]:
    """Contests of the headline and of tables, by name those of the full table, too, each with one system of ours."""
    for contest in (*CONTESTS, *TABLES, *full_contests()) if patterns else (*CONTESTS, *TABLES):
        for system in contest.systems:
            words = (contest.name, f"{contest.name}/{system}")
            chosen = not patterns or any(fnmatch.fnmatch(word, one) for word in words for one in patterns)
            if system.startswith("kvdist") and chosen:
                yield contest, system


def row_names() -> list[str]:
    return [f"{contest.name}/{system}" for contest, system in chosen_rows([])]


@contextlib.contextmanager
def checkout(revision: str) -> Iterator[Path]:
    """The two packages as they were in another commit, in a folder that is gone afterwards."""
    command = ["git", "-C", str(ROOT), "archive", "--format=tar", revision, "kvdist", "launcher"]
    archived = subprocess.run(command, capture_output=True, check=False)
    if archived.returncode:
        raise SystemExit(f"--base {revision}: {archived.stderr.decode().strip()}")
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as archive:
            archive.extractall(folder, filter="data")
        yield Path(folder).resolve()


def measure(contest: Contest, system: str, base: Path, pairs: int) -> dict[str, Measured]:
    """The row's work in turns, by the base and by the working tree."""
    with contextlib.ExitStack() as stack:
        try:
            start = starter(contest, system, stack)
        except Absent as error:
            return {name: Measured(left_out=str(error)) for name in ("base", "now")}
        folders = {"base": base, "now": ROOT}

        def one_turn(name: str, folder: str) -> None:
            run_together([with_code_of(folders[name], one) for one in start(folder)])

        return take_turns(folders, one_turn, pairs)


def starter(contest: Contest, system: str, stack: contextlib.ExitStack) -> Callable[[str], list[Start]]:
    """What starts the processes of one turn, given a folder for their results.

    Raises:
        Absent: it cannot be measured here.
    """
    work = contest.work
    if isinstance(work, sparse.Work):
        variables = PLAIN_TCP if system == "kvdist-tcp" else {}
        return lambda folder: sparse.starts(work, folder, **variables)
    if isinstance(work, Training):
        return lambda folder: end_to_end.starts(work, system, folder)
    if isinstance(work, Work):
        return lambda folder: systems.SYSTEMS[system].starts(work, work.arguments(system, folder))
    hosts = stack.enter_context(namespaces.limited_hosts(work.mbit))
    return lambda folder: namespaces.starts(system, work.work, hosts, folder)


def with_code_of(folder: Path, start: Start) -> Start:
    """The same process, importing kvdist and its launcher from this folder."""
    paths = [str(folder), str(folder / "launcher"), start.environment["PYTHONPATH"]]
    return replace(start, environment=start.environment | {"PYTHONPATH": os.pathsep.join(paths)})


def check_imports(folder: Path) -> None:
    """See that processes import the code of this folder, for a comparison of one commit with itself says nothing.

    Raises:
        RuntimeError: they import another one.
    """
    words = "import kvdist, kvdist_launch; print(kvdist.__file__, kvdist_launch.__file__)"
    probe = with_code_of(folder, Start([sys.executable, "-c", words], environment()))
    found = subprocess.run(probe.command, env=probe.environment, capture_output=True, text=True, check=True).stdout
    if any(folder not in Path(path).parents for path in found.split()):
        raise RuntimeError(f"the code of {folder} was to be measured, but Python imports {found}")


def print_row(name: str, measured: dict[str, Measured]) -> bool:
    """One line; False for a row that is slower, or in which kvdist failed."""
    base, now = measured["base"], measured["now"]
    for one in (base, now):
        if one.left_out:
            print(f"{name:32} LEFT OUT: {one.left_out.splitlines()[-1]}", flush=True)
            return not one.failed
    found = compare(base.turn_medians_s, now.turn_medians_s)
    verdict = "SLOWER" if found.is_slower else ""
    print(
        f"{name:32} {base.median_s * 1e3:9.1f} {now.median_s * 1e3:9.1f} {found.ratio:7.3f}"
        f"   {found.low:6.3f} to {found.high:5.3f} {verdict}",
        flush=True,
    )
    return not found.is_slower


def compare(base_s: Sequence[float], now_s: Sequence[float]) -> Compared:
    """The ratio of pairs of seconds, and its interval by a bootstrap over the pairs, with the same draws every time."""
    ratios = np.array(base_s) / np.array(now_s)
    draws = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.quantile(medians, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Compared(float(np.median(ratios)), float(low), float(high))


if __name__ == "__main__":
    main()
