"""How much memory a server takes, against what it is allowed: 200 MB + (2 + optimizer states + workers) × its weights.

    python benchmarks/memory.py

A page that several processes map counts for each of them with its share (PSS): the resident size of a server (RSS) also
counts all of the workers' memory that it can read. Both are printed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cluster import cluster_of
from steady import steady_cluster
from workers.workload import Spec

STATES = {"none": 0, "sgd": 1, "adam": 2}
"""Arrays as large as the weight that an optimizer keeps; sgd runs with momentum."""
BASE_BYTES = 200e6


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures the memory of servers.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--spec", type=Spec.parse, default=Spec.parse("25x1048576"), help="COUNTxELEMENTS of float32")
    options = parser.parse_args()
    weights_bytes = options.spec.payload_bytes / options.servers
    missed = False
    for optimizer, states in STATES.items():
        allowed = BASE_BYTES + (2 + states + options.workers) * weights_bytes
        with steady_cluster(options.workers, options.servers, str(options.spec), optimizer) as cluster:
            for process in cluster_of(cluster.launcher.pid):
                if process.name.startswith("server"):
                    share, resident = memory_of(process.pid)
                    missed |= share > allowed
                    print(
                        f"{options.spec}, {options.workers} workers, optimizer {optimizer}, {process.name}: "
                        f"its share {share / 1e6:.0f} MB (all that it can read {resident / 1e6:.0f} MB); "
                        f"allowed {allowed / 1e6:.0f} MB {'MISSED' if share > allowed else 'met'}",
                        flush=True,
                    )
    sys.exit(missed)


def memory_of(pid: int) -> tuple[int, int]:
    """(its share of what it maps, all that it maps) in bytes."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text("ascii").splitlines()
    sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines[1:]}
    return sizes["Pss"], sizes["Rss"]


if __name__ == "__main__":
    main()
