"""What the kernels for GPUs cost beside torch's own ops, and the speed of the device's memory.

    make gpu                               # after the tests that need a GPU
    python benchmarks/gpu.py --quick       # small and few: does everything run?

A row is one kernel on one size. Before anybody's time is taken, what it computed from fresh random numbers was compared
with float64, or with the reference's bits, in the same run; the error stands in the row, and who was wrong has no time
there. The bound is the bytes that must be read and written at the speed of torch's copy in the same run. How times
are taken is told in `gpu_measure.py`. Results go to ``results/gpu-<device>-<date>.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import re
import secrets
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import machine

from kvdist.errors import DeviceError
from kvdist.kernels.gpu import open_gpu

if TYPE_CHECKING:
    from gpu_measure import Bench, Case, Row

RESULTS = Path(__file__).resolve().parent / "results"
OURS = "kvdist"
"""Name of our kernels among the contenders."""
LIBRARIES = ("torch", "cupy", "numba", "numba-cuda", "numpy")
ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the kernels for GPUs on one of them.")
    parser.add_argument("--device", type=int, default=0, help="which of the visible ones")
    parser.add_argument("--check", action="store_true", help="only say whether there is one, by the exit code")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds; writes nothing by itself")
    parser.add_argument("--only", metavar="TEXT", help="only the rows whose name has this in it")
    parser.add_argument("--results", type=Path, metavar="DIR", help=f"where results go, by default {RESULTS.name}/")
    options = parser.parse_args()
    obstacle = no_device(options.device)
    if obstacle:
        raise SystemExit(f"gpu: {obstacle}")
    if options.check:
        return
    bench = open_bench(options.device, options.quick)
    if not bench.devices:
        raise SystemExit(f"gpu: there is nothing of ours to measure: {'; '.join(bench.left_out.values())}")
    rows = run(bench, options.only or "")
    folder = options.results or (None if options.quick or options.only else RESULTS)
    if folder is not None:
        write(folder, rows, bench)
    wrong = [f"{row.case.name} by {name}" for row in rows for name in row.wrong]
    if wrong:
        raise SystemExit(f"gpu: WRONG RESULTS: {'; '.join(wrong)}")


def no_device(index: int) -> str:
    """Why nothing can be measured here, in one sentence; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return f"torch cannot be imported ({error}); name a Python that has torch for CUDA, as by make gpu PYTHON=..."
    if not torch.cuda.is_available():
        return "there is no CUDA device that torch can use here; run this on a machine with a GPU and a torch for CUDA"
    if not 0 <= index < torch.cuda.device_count():
        return f"there is no CUDA device {index}; torch sees {torch.cuda.device_count()}, counted from 0"
    return ""


def open_bench(index: int, quick: bool) -> Bench:
    """The device, with our kernels if they work there."""
    import torch
    from gpu_measure import Bench, EventClock, Sizes

    place = f"cuda:{index}"
    torch.cuda.set_device(index)
    devices: dict[str, Any] = {}
    left_out: dict[str, str] = {}
    try:
        devices[OURS] = open_gpu(index)
    except DeviceError as error:
        left_out[OURS] = f"absent: {error}"
    sizes = replace(Sizes(), elements=1 << 24, rows=250_000, table_rows=1_000_000) if quick else Sizes()
    cache = torch.cuda.get_device_properties(index).L2_cache_size
    rounds = 3 if quick else ROUNDS
    return Bench(place, devices, left_out, EventClock(place), sizes, cache, rounds, secrets.randbits(31))


def run(bench: Bench, only: str = "") -> list[Row]:
    """Measure the copy, and every case whose name has this text in it; print each as it is known."""
    from gpu_cases import arithmetic
    from gpu_measure import measure
    from gpu_moves import copy, moves

    rows: list[Row] = []
    with contextlib.ExitStack() as stack:
        chosen = [case for case in [*arithmetic(bench), *moves(bench, stack)] if only in case.name]
        for case in [copy(bench), *chosen]:
            rows.append(measure(case, bench))
            print("\n".join(table_lines(rows[-1], bandwidth(rows))), flush=True)
    return rows


def bandwidth(rows: list[Row]) -> float | None:
    """Bytes read and written in a second by the copy, the first of the rows; None where it was not measured."""
    results = list(rows[0].results.values())
    return rows[0].case.moved_bytes / results[0].median_s if results else None


# The table.

HEADER = [
    "| kernel | MB moved | by | ms (10 % to 90 %) | GB/s | of copy | error | |",
    "|---|---|---|---|---|---|---|---|",
]


def table_lines(row: Row, copied: float | None) -> list[str]:
    """One line for each contender, the fastest marked; then what was aimed at."""
    case, lines = row.case, []
    fastest = winner(row)
    for name, one in row.results.items():
        rate = case.moved_bytes / one.median_s
        share = "" if case.over_host or copied is None else f"{rate / copied:.0%}"
        times = f"{one.median_s * 1e3:.3f} ({one.low_s * 1e3:.3f} to {one.high_s * 1e3:.3f})"
        mark = "fastest" if name == fastest and len(row.results) > 1 else ""
        head = f"| {case.name} | {case.moved_bytes / 1e6:.0f} | {name} | {times}"
        lines.append(f"{head} | {rate / 1e9:.0f} | {share} | {one.error:.1g} | {mark} |")
    lines += [f"| {case.name} | | {name} | {reason} | | | | |" for name, reason in row.left_out.items()]
    return lines + [f"| {case.name} | | aim | {said} | | | | |" for said in verdicts(row, copied)]


def winner(row: Row) -> str | None:
    """The fastest that was right; None where nobody was."""
    return min(row.results, key=lambda name: row.results[name].median_s) if row.results else None


def verdicts(row: Row, copied: float | None) -> list[str]:
    """What was aimed at, what was reached, and whether that is enough."""
    case, said = row.case, []
    ours = [row.results[OURS].median_s] if OURS in row.results else []
    others = [one.median_s for name, one in row.results.items() if name != OURS]
    if case.share is not None:
        found = case.moved_bytes / min(ours) / copied if ours and copied else None
        said.append(_verdict(f"{case.share:.0%} of the copy's bandwidth", found, case.share, "{:.0%}"))
    if case.ratio is not None:
        found = min(others) / min(ours) if ours and others else None
        said.append(_verdict(f"{case.ratio:g} times as fast as the fastest other", found, case.ratio, "{:.2f} times"))
    return said


def _verdict(aim: str, found: float | None, wanted: float, form: str) -> str:
    if found is None:
        return f"{aim}: not measured"
    return f"{aim}: {'reached' if found >= wanted else 'NOT reached'}, {form.format(found)}"


# Files.


def write(folder: Path, rows: list[Row], bench: Bench) -> None:
    """Keep the results, as numbers and as a page."""
    import torch

    device = torch.cuda.get_device_name(bench.place) if torch.cuda.is_available() else bench.place
    today = datetime.date.today().isoformat()
    name = f"gpu-{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-{today}"
    about = {"device": device, "date": today, "seed": bench.seed, "rounds": bench.rounds, **versions(bench)}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record(rows, about), indent=2) + "\n", encoding="utf-8")
    (folder / f"{name}.md").write_text(page(rows, about), encoding="utf-8")
    print(f"written to {folder / name}.json and .md")


def versions(bench: Bench) -> dict[str, str]:
    """What was used, and what was left out."""
    found = {name: device.library for name, device in bench.devices.items()} | dict(bench.left_out)
    for library in LIBRARIES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.setdefault(library, importlib.metadata.version(library))
    return found


def record(rows: list[Row], about: dict[str, Any]) -> dict[str, Any]:
    """All numbers, for JSON."""
    copied = bandwidth(rows)
    return {
        "machine": machine(),
        **about,
        "copy_bytes_per_s": copied,
        "rows": [_row_record(row, row.case, copied) for row in rows],
    }


def _row_record(row: Row, case: Case, copied: float | None) -> dict[str, Any]:
    return {
        "kernel": case.name,
        "moved_bytes": case.moved_bytes,
        "tolerance": case.tolerance,
        "fastest": winner(row),
        "results": [vars(one) for one in row.results.values()],
        "left_out": row.left_out,
        "aims": verdicts(row, copied),
    }


def page(rows: list[Row], about: dict[str, Any]) -> str:
    """The table in Markdown."""
    told = ", ".join(f"{name} {value}" for name, value in about.items())
    copied = bandwidth(rows)
    lines = [f"# Kernels on {about['device']}", "", f"`python benchmarks/gpu.py`; {told}.", "", *HEADER]
    for row in rows:
        lines += table_lines(row, copied)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
