"""How long it takes to import kvdist, to start a cluster, create a store in every worker and end, and to make keys.

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
MANY = 200_000
INIT = f"""
import time
import numpy as np
from kvdist import kv
store = kv.create('dist')
names = [f"layer.{{number}}.weight" for number in range({MANY})]
values = [np.full(4, number, np.float32) for number in range({MANY})]
def timed(call):
    store.barrier()
    start = time.perf_counter()
    call()
    store.barrier()
    return time.perf_counter() - start
seconds = [timed(lambda: store.init(names, values))]
for _ in range(2):
    seconds.append(timed(lambda: (store.push(names, values), store.pull(names, out=values))))
if store.rank == 0:
    print("seconds", *seconds)
store.close()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures import and start.")
    parser.add_argument("--repeats", type=int, default=10)
    repeats = parser.parse_args().repeats
    seconds, heavy = zip(*(time_import() for _ in range(repeats)), strict=True)
    report("import kvdist", seconds, target_s=0.15)
    print(f"  heavy libraries drawn in: {', '.join(sorted(set().union(*heavy))) or 'none'}")
    report("kvdist-launch -n 2 -s 2, kv.create('dist')", [time_cluster() for _ in range(repeats)], target_s=2.0)
    init, *rounds = zip(*(time_keys() for _ in range(min(repeats, 3))), strict=True)
    report(f"init of {MANY} keys of 16 bytes, 2 workers, 2 servers", init, target_s=3.0)
    for name, seconds in zip(("first", "second"), rounds, strict=True):
        print(f"  {name} push and pull of all: median {statistics.median(seconds):.3f} s")


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


def time_keys() -> tuple[float, ...]:
    """Seconds of an init of many keys, and of two rounds with all of them."""
    command = launch_command(2, 2, [sys.executable, "-c", INIT])
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (line,) = [line for line in done.stdout.splitlines() if "seconds " in line] or sys.exit(done.stdout)
    return tuple(map(float, line.split("seconds ")[1].split()))


def report(what: str, seconds: list[float] | tuple[float, ...], target_s: float) -> None:
    median = statistics.median(seconds)
    verdict = "met" if median <= target_s else "MISSED"
    print(f"{what}: median {median:.3f} s, worst {max(seconds):.3f} s of {len(seconds)}; target {target_s} s {verdict}")


if __name__ == "__main__":
    main()
