"""How long one push and pull of a list of arrays takes, in a cluster of real processes on this machine.

    python benchmarks/push_pull.py --workers 2 --servers 2 --spec 25x1048576 --spec resnet50 --peer mxnet --peer ddp

Each ``--peer`` does the same work in turns with kvdist within the same run (see `systems.py`). What a step is, and how
its result is checked, stands in `workers/workload.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from cluster import end_on_terminate, machine
from models import MODELS, parse_spec
from systems import IN_PROCESS_STORES, SYSTEMS, Measured, Work, measure
from workers.workload import CALLS

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = [name for name in SYSTEMS if not name.startswith("kvdist")]


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    ours = [name for name in options.ours if name not in options.peer]
    results: list[dict[str, object]] = []
    for spec in options.spec or [parse_spec("25x1048576"), parse_spec("1000x1000")]:
        shared = {name: getattr(options, name) for name in ("workers", "servers", "store", "call", "optimizer")}
        work = Work(spec, **shared, steps=options.steps, warmup=options.warmup)
        measured = measure(work, [*ours, *options.peer], options.turns)
        print_table(work, measured)
        results += [summary(work, name, one) for name, one in measured.items()]
    if options.json:
        path = RESULTS / options.json
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "results": results}, indent=2) + "\n", encoding="utf-8")
        print(f"written to {path}")
    if any(result["system"] in ours and result["left_out"] for result in results):
        raise SystemExit("kvdist itself failed; see above")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures push and pull.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    known = ", ".join(MODELS)
    parser.add_argument("--spec", type=parse_spec, action="append", help=f"COUNTxELEMENTS of float32, or {known}")
    parser.add_argument("--store", default="dist_sync", help="type of the store (default: dist_sync)")
    parser.add_argument("--call", choices=CALLS, default="pushpull", help="one list call, two, or a loop over keys")
    parser.add_argument(
        "--store-arrays",
        choices=["plain", "resident", "shared"],
        default="plain",
        help="resident: store.empty; shared: that, and results are shown, not copied",
    )
    parser.add_argument("--transport", choices=["auto", "tcp"], default="auto", help="tcp: plain TCP, no shared memory")
    parser.add_argument("--optimizer", choices=["none", "sgd", "adam"], default="none", help="on the servers")
    parser.add_argument("--steps", type=int, default=20, help="timed steps in each turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those")
    parser.add_argument("--turns", type=int, default=3, help="clusters started for each system, taking turns")
    parser.add_argument(
        "--copies", action="store_true", help="with --on-loss continue, without and with --replicas 1 in turns"
    )
    parser.add_argument("--peer", choices=PEERS, action="append", default=[], help="compare with it; may be repeated")
    parser.add_argument("--json", metavar="FILE", help=f"write the results to FILE, in {RESULTS.name}/ if relative")
    options = parser.parse_args()
    if options.copies and options.optimizer == "none":
        parser.error("--copies needs --optimizer: only stores that update go on without a lost process")
    if options.peer and options.store in IN_PROCESS_STORES:
        parser.error(f"--peer compares clusters, and {options.store} is a store within one process")
    if options.transport == "tcp" and options.store_arrays != "plain":
        kind = options.store_arrays
        parser.error(f"--store-arrays {kind} has shared memory, which --transport tcp refuses; give one of the two")
    if options.copies and options.store_arrays != "plain":
        parser.error(f"--copies is measured with plain arrays, not with --store-arrays {options.store_arrays}")
    ours = "kvdist-tcp" if options.transport == "tcp" else "kvdist"
    if options.copies:
        options.ours = [f"{ours}-continue", f"{ours}-copies"]
        return options
    options.ours = [ours if options.store_arrays == "plain" else f"kvdist-{options.store_arrays}"]
    return options


def summary(work: Work, name: str, measured: Measured) -> dict[str, object]:
    """What a system took for a work, for files."""
    described = {
        "system": name,
        "spec": str(work.spec),
        "payload_bytes": work.spec.payload_bytes,
        "keys": work.spec.count,
        **{key: getattr(work, key) for key in ("workers", "servers", "store", "call", "optimizer")},
        "left_out": measured.left_out,
        "steps": len(measured.seconds),
    }
    if not measured.seconds:
        return described
    return described | {
        "median_ms": round(measured.median_s * 1e3, 2),
        "p10_ms": round(measured.quantile_s(0.1) * 1e3, 2),
        "p90_ms": round(measured.quantile_s(0.9) * 1e3, 2),
        "gigabytes_per_s": round(work.spec.payload_bytes / measured.median_s / 1e9, 3),
        "keys_per_s": round(work.spec.count / measured.median_s),
    }


def print_table(work: Work, measured: dict[str, Measured]) -> None:
    """One line a system, and how they compare with the first."""
    print(f"\n{work}")
    print(f"{'':28} {'median ms':>10} {'p90 ms':>10} {'GB/s each way':>14} {'keys/s':>10} {'steps':>6} {'ratio':>7}")
    first = next(iter(measured.values()))
    for name, one in measured.items():
        if not one.seconds:
            print(f"{SYSTEMS[name].label:28} left out: {one.left_out.splitlines()[-1]}", flush=True)
            continue
        median = one.median_s
        ratio = f"{median / first.median_s:7.2f}" if first.seconds else ""
        print(
            f"{SYSTEMS[name].label:28} {median * 1e3:10.1f} {one.quantile_s(0.9) * 1e3:10.1f} "
            f"{work.spec.payload_bytes / median / 1e9:14.2f} {work.spec.count / median:10.0f} "
            f"{len(one.seconds):6} {ratio}",
            flush=True,
        )


if __name__ == "__main__":
    main()
