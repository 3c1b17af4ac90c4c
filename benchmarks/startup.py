"""How long it takes to import kvdist, to start a cluster, create a store in every worker and end, and to make keys.

Python's own caches of what it has compiled are used and written, as they are in an installed package.

python benchmarks/startup.py
"""

from __future__ import annotations

import argparse
import resource
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
ENDED = "ended at"
CREATE = f"""
import time
from kvdist import kv
store = kv.create('dist')
print("{ENDED}", time.monotonic())
"""
ONE_KEY = f"""
import time
import numpy as np
from kvdist import kv
store = kv.create('dist')
value = np.ones(1_000_000, np.float32)
store.init("w", value)
store.push("w", value)
store.pull("w", out=value)
print("{ENDED}", time.monotonic())
"""
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
    for what, script in (("kv.create('dist')", CREATE), ("one key of 4 MB, pushed and pulled once", ONE_KEY)):
        wholes, ends, busy = zip(*(time_cluster(script) for _ in range(repeats)), strict=True)
        report(f"kvdist-launch -n 2 -s 2, {what}", wholes, target_s=1.0)
        report("  from the last line of the last script to the launcher's end", ends, target_s=0.3)
        print(f"  processor time of all processes: median {statistics.median(busy):.2f} s, least {min(busy):.2f} s")
    init, *rounds = zip(*(time_keys() for _ in range(min(repeats, 3))), strict=True)
    report(f"init of {MANY} keys of 16 bytes, 2 workers, 2 servers", init, target_s=3.0)
    for name, seconds in zip(("first", "second"), rounds, strict=True):
        print(f"  {name} push and pull of all: median {statistics.median(seconds):.3f} s")


def time_import() -> tuple[float, set[str]]:
    """Seconds of the import alone, and the heavy libraries it drew in."""
    done = subprocess.run([sys.executable, "-c", IMPORT], env=with_caches(), capture_output=True, text=True, check=True)
    taken, *heavy = done.stdout.split()
    return float(taken), set(heavy)


def with_caches() -> dict[str, str]:
    """This process's environment, in which Python may keep what it compiles."""
    return {name: value for name, value in environment().items() if name != "PYTHONDONTWRITEBYTECODE"}


def processor_s() -> float:
    """Processor time of all processes that this one has started and that have ended, in seconds."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def time_cluster(script: str) -> tuple[float, float, float]:
    """Seconds from the launcher's start to its end, from the end of the last script to that, and of processors."""
    command = launch_command(2, 2, [sys.executable, "-c", script])
    start, used = time.monotonic(), processor_s()
    done = subprocess.run(command, env=with_caches(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    end = time.monotonic()
    if done.returncode:
        sys.exit(f"{done.stdout}\nthe launcher ended with code {done.returncode}")
    ended = [float(line.split(ENDED)[1]) for line in done.stdout.splitlines() if ENDED in line]
    return end - start, end - max(ended), processor_s() - used


def time_keys() -> tuple[float, ...]:
    """Seconds of an init of many keys, and of two rounds with all of them."""
    command = launch_command(2, 2, [sys.executable, "-c", INIT])
    done = subprocess.run(command, env=with_caches(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    (line,) = [line for line in done.stdout.splitlines() if "seconds " in line] or sys.exit(done.stdout)
    return tuple(map(float, line.split("seconds ")[1].split()))


def report(what: str, seconds: list[float] | tuple[float, ...], target_s: float) -> None:
    median = statistics.median(seconds)
    verdict = "met" if median <= target_s else "MISSED"
    print(f"{what}: median {median:.3f} s, worst {max(seconds):.3f} s of {len(seconds)}; target {target_s} s {verdict}")


if __name__ == "__main__":
    main()
