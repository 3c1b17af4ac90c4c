"""How much memory a server takes, against what it is allowed: 200 MB + (2 + optimizer states + workers) × its weights.

    python benchmarks/memory.py
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
                    resident, peak = memory_of(process.pid)
                    missed |= resident > allowed
                    print(
                        f"{options.spec}, {options.workers} workers, optimizer {optimizer}, {process.name}: "
                        f"resident {resident / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB; "
                        f"allowed {allowed / 1e6:.0f} MB {'MISSED' if resident > allowed else 'met'}",
                        flush=True,
                    )
    sys.exit(missed)


def memory_of(pid: int) -> tuple[int, int]:
    """(resident, highest resident so far) in bytes."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["VmRSS"].split()[0]) * 1024, int(status["VmHWM"].split()[0]) * 1024


if __name__ == "__main__":
    main()
