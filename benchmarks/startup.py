"""How long it takes to import kvdist, and to start a cluster, create a store in every worker and end.

    python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time

from cluster import environment, launch_command

IMPORT = """
import sys, time
start = time.perf_counter()
import kvdist
print(time.perf_counter() - start, *(name for name in ("torch", "numba", "cupy") if name in sys.modules))
"""
CREATE = "from kvdist import kv; kv.create('dist')"


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures import and start.")
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    seconds, heavy = zip(*(time_import() for _ in range(repeats)), strict=True)
    report("import kvdist", seconds, target_s=0.15)
    print(f"  heavy libraries drawn in: {', '.join(sorted(set().union(*heavy))) or 'none'}")
    report("kvdist-launch -n 2 -s 2, kv.create('dist')", [time_cluster() for _ in range(repeats)], target_s=2.0)


def time_import() -> tuple[float, set[str]]:
    """Seconds of the import alone, and the heavy libraries it drew in."""
    done = subprocess.run([sys.executable, "-c", IMPORT], env=environment(), capture_output=True, text=True, check=True)
    taken, *heavy = done.stdout.split()
    return float(taken), set(heavy)


def time_cluster() -> float:
    """Seconds from starting the launcher to its end."""
    command = launch_command(2, 2, [sys.executable, "-c", CREATE])
    start = time.perf_counter()
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    taken = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{done.stdout}\nthe launcher ended with code {done.returncode}")
    return taken


def report(what: str, seconds: list[float] | tuple[float, ...], target_s: float) -> None:
    median = statistics.median(seconds)
    verdict = "met" if median <= target_s else "MISSED"
    print(f"{what}: median {median:.3f} s, worst {max(seconds):.3f} s of {len(seconds)}; target {target_s} s {verdict}")


if __name__ == "__main__":
    main()
