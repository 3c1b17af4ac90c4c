"""Slow links: the share of time that workers compute while they exchange a model of 30 M parameters every 100 steps.

    sudo python benchmarks/local_steps.py          # half an hour; --write keeps results/local_steps.md and .png
    sudo python benchmarks/local_steps.py --mbit 50 --ways "diloco:100" "diloco:100,fragments=4 int4:bf16"

Two "hosts", network namespaces with a server and a worker each, and a slow line between (see namespaces.py). Steps are
paced: `--unit` seconds asleep, then the worker's own optimizer. What such a step takes before the first exchange has
begun is computing, and all that steps take longer in the two periods after the first one is not. A way is a policy, and
behind it how pushes and answers are compressed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from cluster import ROOT, end_on_terminate, machine, run_together, worker_command
from namespaces import kvdist_starts, limited_hosts
from peers.environments import Absent

RESULTS = ROOT / "benchmarks" / "results" / "local_steps"
WAYS = ["diloco:100", "diloco:100,fragments=4,bits=8", "diloco:100,fragments=4 int4:bf16"]

RUN_S = 1800.0
"""At 10 Mbit/s a run takes ten minutes."""


def measured(way: str, mbit: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """What each worker has found, by rank.

    Raises:
        Absent: namespaces cannot be made here.
        RuntimeError: the job failed; the message holds what it printed.
    """
    policy, _, compression = way.partition(" ")
    with limited_hosts(mbit) as hosts, tempfile.TemporaryDirectory(prefix="local-steps-") as folder:
        words = (folder, str(options.unit), str(options.steps), compression)
        starts = kvdist_starts(worker_command("local_steps_worker.py", *words), hosts, KVDIST_POLICY=policy)
        run_together(starts, RUN_S)
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(hosts))]


Found = dict[str, dict[str, list[float]]]
"""Way → Mbit/s → the share of time computing, and the seconds of a step."""


def page(found: Found) -> str:
    """A table of the shares, a row for each way."""
    speeds = speeds_of(found)
    steps_ms = sorted(1e3 * step_s for row in found.values() for _, step_s in row.values())
    rows = [["policy, and how pushes:answers travel", *(f"{mbit} Mbit/s" for mbit in speeds)]]
    rows += [["---"] * len(rows[0])]
    rows += [
        [f"`{way}`", *(f"{row[mbit][0]:.0%}" if mbit in row else "" for mbit in speeds)] for way, row in found.items()
    ]
    return "\n".join([
        "# Local steps on slow lines", "",
        f"Made by `python benchmarks/local_steps.py --write` on {machine()['processor']}. The share of time that two",
        "workers compute, which exchange a model of 30 million parameters every 100 steps. Two hosts are namespaces",
        "with a server and a worker each, and a line between them whose speed is limited. A step takes",
        f"{steps_ms[0]:.0f} to {steps_ms[-1]:.0f} ms.", "",
        *(f"| {' | '.join(row)} |" for row in rows), "",
    ])  # fmt: skip


def speeds_of(found: Found) -> list[str]:
    """The fastest line first."""
    return sorted({mbit for row in found.values() for mbit in row}, key=int, reverse=True)


def draw(found: Found, path: Path) -> None:
    """The shares as bars, a panel for each speed of the line."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    speeds = speeds_of(found)
    figure, axes = plt.subplots(1, len(speeds), figsize=(4 * len(speeds), 2.6), sharey=True, squeeze=False)
    for axis, mbit in zip(axes[0], speeds, strict=True):
        for place, row in enumerate(found.values()):
            if mbit not in row:
                continue
            share = row[mbit][0]
            axis.barh(place, 100 * share, color=f"C{place}")
            axis.text(2, place, f"{share:.0%}", va="center", fontweight="bold")
        axis.set(title=f"{mbit} Mbit/s", xlim=(0, 105), xlabel="% of the time computing")
    axes[0][0].set_yticks(range(len(found)), list(found))
    axes[0][0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    print(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 200, 50, 10], help="of each card, each way")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--unit", type=float, default=0.03, help="seconds of sleep in a step")
    parser.add_argument("--steps", type=int, default=100, help="of a period, as the policies say")
    parser.add_argument("--write", action="store_true", help="add to results/local_steps.json, table and picture")
    options = parser.parse_args()
    end_on_terminate()
    print(f"{'share of time computing, by Mbit/s':36}", *(f"{one:>16}" for one in options.mbit))
    kept = RESULTS.with_suffix(".json")
    found: Found = json.loads(kept.read_text()) if options.write and kept.exists() else {}
    for way in options.ways:
        print(f"{way:36}", end="", flush=True)
        for mbit in options.mbit:
            try:
                workers = measured(way, mbit, options)
            except Absent as error:
                raise SystemExit(f"SKIPPED: {error}") from error
            share, step_s = (statistics.mean(one[name] for one in workers) for name in ("share", "step_s"))
            found.setdefault(way, {})[str(mbit)] = [round(share, 4), round(step_s, 5)]
            print(f" {share:5.0%} of {step_s * 1e3:4.0f} ms", end="", flush=True)
        print()
    if options.write:
        kept.write_text(json.dumps(found, indent=1) + "\n")
        RESULTS.with_suffix(".md").write_text(page(found), encoding="utf-8")
        draw(found, RESULTS.with_suffix(".png"))


if __name__ == "__main__":
    sys.exit(main())
