"""What the journal of the scheduler takes, of a job whose workers lease their data.

    python benchmarks/journal.py --workers 1000 --minutes 1

kvdist's own machines on the modelled network of `scale.py`, as in `scale_unequal.py`; each worker trains a batch of 32
examples in 4 to 16 s, and leases its examples from the scheduler, whose journal is a file. Printed are the inputs of an
hour, by their kinds; the time that an input takes to be written, and a state; the largest size of the file; and the
time in which a new process reads it when it is longest.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from cluster import end_on_terminate
from modelled import Card, Costs
from models import parse_spec
from scale_unequal import BATCH, RESULTS, SHRINK, Job, Trainee
from simulated import Machines, Program, long_headers_read_once, no_garbage, shrunk_thresholds

from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.protocol import messages as msg
from kvdist.protocol import wire
from kvdist.runtime.journal import ENTRIES_MAX, Entry, Journal

HOUR_S = 3600.0
EXAMPLES, EPOCHS = 1_281_167, 90
"""Of ImageNet, as in its usual training."""


class LeasingTrainee(Trainee):
    """A worker that leases the examples of its batches."""

    _left = 0
    _lease: Any = None

    def _begin(self) -> Program:
        yield from super()._begin()
        self._ask(0)

    def _ask(self, used: int) -> None:
        self._lease = self._node.submit(
            lambda number: msg.Lease(number, 0, 0, EXAMPLES, EPOCHS, True, 7, BATCH, 4 * BATCH, used, 0, False)
        )

    def _end_batch(self) -> None:
        self._trained = getattr(self, "_trained", 0) + BATCH
        self._left -= BATCH
        if self._lease is not None and self._lease.done():
            leased = self._lease.result()
            self._left, self._lease = self._left + leased.stop - leased.start, None
        if self._left <= BATCH and self._lease is None:
            self._ask(self._trained)
        super()._end_batch()


class Watched(Journal):
    """A journal that is timed."""

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self.append_s: list[float] = []
        self.state_s: list[float] = []
        self.kinds: Counter[str] = Counter()
        self.largest = self.state_bytes = 0

    def _append(self, entry: Entry) -> None:
        began = time.perf_counter()
        super()._append(entry)
        self.append_s.append(time.perf_counter() - began)
        self.kinds[name_of(entry)] += 1

    def write_state(self, now: float) -> None:
        self.largest = max(self.largest, self.path.stat().st_size)
        began = time.perf_counter()
        super().write_state(now)
        self.state_s.append(time.perf_counter() - began)
        self.state_bytes = self.path.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1.0, help="of the simulated job")
    options = parser.parse_args()
    end_on_terminate()
    kept = json.loads((RESULTS / "scale.json").read_text())
    machines = Machines(8, Card(10e9 / 8, 50e-6))
    with shrunk_thresholds(SHRINK), no_garbage(), long_headers_read_once(), tempfile.TemporaryDirectory() as folder:
        import scale_unequal

        scale_unequal.Trainee = LeasingTrainee  # type: ignore[misc]
        job = Job(options.workers, "quota", parse_spec("1x1048576"), machines, Costs(**kept["costs"]))
        node = job.processes["scheduler"].node
        assert isinstance(node.machine, Scheduler)
        config, path = node.machine.config, Path(folder) / "journal"
        journal = Watched(path, config)
        node.keep(journal)
        clock = job.network.clock
        while any(user.steps_done < 0 for user in job.users):
            assert clock.step()
        journal.kinds.clear()
        begun = clock.now
        while clock.now < begun + 60 * options.minutes:
            assert clock.step()
        journal.write_state(clock.now)
        report(journal, HOUR_S / (60 * options.minutes))
        while journal.entries < ENTRIES_MAX - 50:
            assert clock.step()
        journal.close(is_over=False)
        largest = max(journal.largest, path.stat().st_size)
        began = time.perf_counter()
        reader = Journal(path, config)
        reader.read()
        took_s = time.perf_counter() - began
    print(
        f"the file has {largest / 1e6:.1f} MB at most; a new process reads {reader.entries:,} inputs in"
        f" {took_s:.2f} s, {1e6 * took_s / max(1, reader.entries):.0f} us each"
    )


def name_of(entry: Entry) -> str:
    """The kind of an input: the message's name, or what else it is."""
    if len(entry) == 4:
        return wire.decode([entry[1], entry[2]]).message.__class__.__name__
    return type(entry[1]).__name__ if len(entry) == 3 else "(something due)"


def report(journal: Watched, times: float) -> None:
    """Print what an hour would have been."""
    print(f"{'input':18} {'an hour':>12}")
    for name, count in journal.kinds.most_common():
        print(f"{name:18} {count * times:12,.0f}")
    appended = 1e6 * np.array(journal.append_s)
    print(f"an input is written in {np.median(appended):.1f} us (median; {np.percentile(appended, 99):.0f} us: 99 %)")
    print(
        f"a state of {journal.state_bytes / 1e6:.2f} MB is written in {journal.state_s[-1] * 1e3:.0f} ms, every"
        f" {ENTRIES_MAX:,} inputs: {1e6 * journal.state_s[-1] / ENTRIES_MAX:.1f} us an input more"
    )


if __name__ == "__main__":
    main()
