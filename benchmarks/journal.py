"""What a journal of the scheduler would take: entries, bytes and microseconds, of a job whose workers lease their data.

    python benchmarks/journal.py --workers 100 --minutes 5

kvdist's own machines on the modelled network of `scale.py`, as in `scale_unequal.py`; each worker trains a batch of 32
examples in 4 to 16 s, and leases its examples from the scheduler. All inputs of the scheduler are kept as `Ring` keeps
them. Printed are, for an hour of a thousand workers, how many inputs of each kind there are and how many bytes their
envelopes and headers have, with and without those that change nothing a new scheduler needs (heartbeats, reports of
steps, timers); the time of an append to a file; and the time in which a new scheduler replays what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from cluster import end_on_terminate
from modelled import Card, Costs
from models import parse_spec
from scale_unequal import BATCH, RESULTS, SHRINK, Job, Trainee
from simulated import Machines, Program, long_headers_read_once, no_garbage, shrunk_thresholds

from kvdist.core.record import Asked, Observed, Received, Ticked
from kvdist.core.replay import Difference, replay
from kvdist.protocol import messages as msg
from kvdist.protocol import wire
from kvdist.runtime.ring import Ring

HOUR_S, WORKERS = 3600.0, 1000
EXAMPLES, EPOCHS = 1_281_167, 90
"""Of ImageNet, as in its usual training."""
IDLE = {"Alive", "StepTimes", "Blocked"}
"""Messages of which a returning scheduler needs none: the next ones say the same."""
FRAME_BYTES = 4 + 8 + 4
"""Of an entry beside envelope and header: its length, the time, a checksum."""


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=100)
    parser.add_argument("--minutes", type=float, default=5.0, help="of the simulated job")
    options = parser.parse_args()
    end_on_terminate()
    kept = json.loads((RESULTS / "scale.json").read_text())
    machines = Machines(8, Card(10e9 / 8, 50e-6))
    with shrunk_thresholds(SHRINK), no_garbage(), long_headers_read_once():
        import scale_unequal

        scale_unequal.Trainee = LeasingTrainee  # type: ignore[misc]
        job = Job(options.workers, "quota", parse_spec("1x1048576"), machines, Costs(**kept["costs"]))
        node = job.processes["scheduler"].node
        ring = node.ring = Ring(node.machine, 1, 1 << 40, None, lambda: job.network.clock.now)
        clock = job.network.clock
        while any(user.steps_done < 0 for user in job.users):
            assert clock.step()
        formed, begun = len(ring.entries), clock.now
        while clock.now < begun + 60 * options.minutes:
            assert clock.step()
    steady = list(ring.entries)[formed:]
    times = HOUR_S / (60 * options.minutes) * WORKERS / options.workers
    report(steady, times)
    print(f"an append to a file: {append_us(steady):.1f} us (median of its writes)")
    inputs = [one for one in ring.entries if isinstance(one, Received | Observed | Ticked | Asked)]
    began = time.perf_counter()
    outcome = replay(ring.beginning, list(ring.entries))
    took_us = 1e6 * (time.perf_counter() - began) / len(inputs)
    what = "differs from" if isinstance(outcome, Difference) else "equals"
    print(f"a replay, compared with all that was sent: {took_us:.0f} us an input; the new scheduler {what} the old one")


def name_of(entry: Any) -> str:
    """The kind of an input: the message's name, or what else it is."""
    if isinstance(entry, Received):
        return wire.decode([entry.envelope, entry.header]).message.__class__.__name__
    return type(entry.event).__name__ if isinstance(entry, Observed) else type(entry).__name__


def report(entries: list[Any], times: float) -> None:
    """Print a table of the kinds of inputs, scaled to an hour of a thousand workers."""
    counts, sizes = Counter[str](), Counter[str]()
    for entry in entries:
        if isinstance(entry, Received | Observed | Ticked | Asked):
            name = name_of(entry)
            counts[name] += 1
            sizes[name] += FRAME_BYTES + (len(entry.envelope) + len(entry.header) if isinstance(entry, Received) else 8)
    print(f"{'kind':16} {'entries an hour':>16} {'MB an hour':>11}   (1,000 workers)")
    for name, count in counts.most_common():
        print(f"{name:16} {count * times:16,.0f} {sizes[name] * times / 1e6:11.1f}")
    needed = [name for name in counts if name not in IDLE and name != "Ticked"]
    entries_of = sum(counts[name] for name in needed) * times
    print(f"needed by a scheduler that returns: {entries_of:,.0f} entries, ", end="")
    print(f"{sum(sizes[name] for name in needed) * times / 1e6:.1f} MB an hour")


def append_us(entries: list[Any]) -> float:
    """Microseconds of one write of an entry to a file in the folder for temporary files."""
    lines = [one.envelope + one.header for one in entries if isinstance(one, Received)][:20_000]
    taken = []
    with tempfile.TemporaryDirectory() as folder:
        file = os.open(Path(folder) / "journal", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for line in lines:
            began = time.perf_counter()
            os.write(file, line)
            taken.append(time.perf_counter() - began)
        os.close(file)
    return 1e6 * statistics.median(taken) if taken else 0.0


if __name__ == "__main__":
    main()
