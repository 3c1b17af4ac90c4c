"""What a checkpoint costs the training beside it, and how long it takes until it is on the disk.

    python benchmarks/checkpoint.py                       # 25 arrays of 4 MB with Adam, on the disk of the home folder
    python benchmarks/checkpoint.py --folder /mnt/fast

Two workers step without a pause; some steps in, all call `save_checkpoint` and go on. Reported are the median step
without one under way, the step in which it is called, the median of those while servers write, and the seconds until
the future is done, beside those of writing and syncing as many bytes by one process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from cluster import Start, end_on_terminate, environment, launch_command, run_together, worker_command
from models import parse_spec
from systems import Work

SAVES = 3
CHUNK = bytes(8 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures checkpoints.")
    parser.add_argument("--spec", type=parse_spec, default=parse_spec("25x1048576"), help="as for push_pull.py")
    parser.add_argument("--folder", type=Path, default=Path.home(), help="where to write; emptied afterwards")
    options = parser.parse_args()
    end_on_terminate()
    work = Work(options.spec, optimizer="adam", steps=20, warmup=20)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        command = worker_command("checkpoint_worker.py", *work.arguments("kvdist", folder))
        run_together([Start(launch_command(2, 2, command), environment(KVDIST_CHECKPOINT_ROOT=folder))])
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
        nbytes = sum(path.stat().st_size for path in Path(folder).glob("step-*/server-*")) // SAVES
        plain_s = write_plainly(Path(folder) / "plain", nbytes)

    def median_ms(name: str) -> float:
        return 1e3 * statistics.median(second for one in told for second in one[name])

    print(f"{options.spec} with Adam: {nbytes / 1e6:.0f} MB a checkpoint, medians of {SAVES}, two workers and servers")
    print(f"a step without one {median_ms('quiet'):.1f} ms, in which it is called {median_ms('called'):.1f} ms,")
    print(f"while servers write {median_ms('beside'):.1f} ms; complete after {median_ms('complete'):.0f} ms")
    print(f"writing and syncing as much by one process alone: {1e3 * plain_s:.0f} ms")


def write_plainly(path: Path, nbytes: int) -> float:
    """Seconds until so many bytes of one file are on the disk."""
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(nbytes // len(CHUNK)):
            file.write(CHUNK)
        os.fsync(file.fileno())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
