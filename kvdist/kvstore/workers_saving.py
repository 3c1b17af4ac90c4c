"""How workers save together what all of them have: the first one writes it, each adds its own `state`, and all wait.

Every step of it is one that all workers make, so what one of them cannot do fails on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from kvdist.checkpoint.files import DIGITS, explained, record_of
from kvdist.checkpoint.locks import Locks, require_run
from kvdist.checkpoint.snapshot import FileRecord, ReadSlice, directory_of
from kvdist.errors import CheckpointError
from kvdist.kvstore import local_saving, saved
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local_saving import Holding, KeepsStates
from kvdist.kvstore.values import Bits

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SavingJob:
    """What is to be saved, and where."""

    folder: Path
    contents: tuple[str, ...]
    step: int = 0
    keep: int = 0
    content: bytes = b""
    """Of this worker's own file."""
    run: str = ""
    """Of the job, once it has the lock of the folder."""
    live: tuple[int, ...] = ()
    """The ranks of the workers that save; the first one writes what all have."""


class WorkersSaving:
    """The workers of a store; alone without one.

    Args:
        store: with which they agree; its `close` is that of this, too.
    """

    def __init__(self, store: KVStore | None) -> None:
        self._store = store
        self._locks = Locks()
        self._last = saved.LastSave()
        if store is not None:
            store._at_close(self.close)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return 0 if self._store is None else self._store.rank

    def save_checkpoint(
        self, make: Callable[[], SavingJob], held: Callable[[], Sequence[Holding]], updater: KeepsStates | None
    ) -> saved.CheckpointFuture:
        """`claim`, which fails here, then `write`, of which the future tells."""

        def job() -> SavingJob:
            self._last.before_next()
            return make()

        claimed = self.claim(job)
        return self._last.run(claimed.folder, lambda: self.write(claimed, held, updater))

    def save(
        self, make: Callable[[], SavingJob], held: Callable[[], Sequence[Holding]], updater: KeepsStates | None
    ) -> None:
        """`claim`, then `write`."""
        self.write(self.claim(make), held, updater)

    def claim(self, make: Callable[[], SavingJob]) -> SavingJob:
        """Get ready: all say the same, and the first worker has the lock of the folder, and can write there.

        Args:
            make: what is to be saved; it may find that the arguments are wrong.
        """
        job = self.together(make, "its arguments are wrong, or it has not looked at a checkpoint that failed")
        if self._store is not None:
            self._store.agree(f"saves {job.folder} ({', '.join(job.contents)}), keep {job.keep or 'all'}")
        live = _live(self._store)

        def lock() -> str:
            return local_saving.claim(job.folder, self._locks) if self.rank == live[0] else ""

        own = self.together(lock, f"worker-{live[0]} cannot save there")
        run = _all_digits(self._store, own, len(live))[live[0]]
        return replace(job, run=run, live=tuple(live))

    def write(self, job: SavingJob, held: Callable[[], Sequence[Holding]], updater: KeepsStates | None) -> None:
        """Every worker writes its own file, then the first of them the rest.

        Args:
            job: as `claim` gave it.
            held: the keys; called on the first worker.
            updater: what has their states.
        """
        folder, first = job.folder, job.live[0]

        def write_own() -> FileRecord | None:
            if not job.content:
                return None
            require_run(Path(directory_of(str(folder))), job.run)
            return saved.write_own_file(folder, self.rank, job.content, job.run, job.step)

        def write_rest() -> None:
            if self.rank == first:
                files = _records(folder, digits)
                what = (job.contents, held(), updater)
                local_saving.save(folder, *what, self._locks, job.run, job.step, job.keep, files=files)

        try:
            record = self.together(write_own, "its own file could not be written")
        except CheckpointError:
            if self.rank == first:  # all have written by now what they could
                local_saving.sweep(folder, self._locks)
            raise
        digits = _all_digits(self._store, "" if record is None else record.sha256[:DIGITS], len(job.live))
        self.together(write_rest, f"worker-{first} could not write the rest")

    def close(self, wait: bool = True) -> None:
        """Nothing is saved any more: let other jobs save there.

        Raises:
            CheckpointError: the last checkpoint has failed, nobody has looked at its future, and `wait` is set.
        """
        self._locks.close()
        if wait:
            self._last.at_close()

    def load(
        self,
        find: Callable[[], saved.Checkpoint],
        contents: tuple[str, ...],
        held: Sequence[Holding],
        updater: KeepsStates | None,
    ) -> tuple[saved.Checkpoint, list[Bits | None]]:
        """Every worker reads; if all could, all take over the states, and get the values."""
        checkpoint, found = self.read(find, contents, held, updater)
        return checkpoint, local_saving.take(held, found, updater)

    def read(
        self,
        find: Callable[[], saved.Checkpoint],
        contents: tuple[str, ...],
        held: Sequence[Holding],
        updater: KeepsStates | None,
    ) -> tuple[saved.Checkpoint, list[ReadSlice]]:
        """The first part of `load`: every worker reads, and all could if this returns. Nothing has changed yet."""

        def read() -> tuple[saved.Checkpoint, list[ReadSlice]]:
            checkpoint = find()
            return checkpoint, local_saving.read(checkpoint.folder, contents, held, updater)

        checkpoint, found = self.together(read, "it could not be read")
        if self._store is not None:
            self._store.agree(f"loads {checkpoint.folder}")
        return checkpoint, found

    def together(self, do: Callable[[], T], what: str) -> T:
        """Something that all workers do: it fails on all of them if it fails on one.

        Raises:
            CheckpointError: on another worker; here it is what was raised.
        """
        outcome: T | Exception
        try:
            outcome = do()
        except (CheckpointError, TypeError, ValueError) as error:
            outcome = error
        has_failed = isinstance(outcome, Exception)
        shares = 1.0 if self._store is None else self._store.average(float(not has_failed))
        if isinstance(outcome, Exception):
            raise outcome
        if shares < 1.0:
            raise CheckpointError(f"another worker failed: {what}; its log, or its exception, says why")
        return outcome


def _live(store: KVStore | None) -> list[int]:
    """The ranks of the workers that have not left, in order."""
    if store is None:
        return [0]
    mine = np.zeros(store.num_workers)
    mine[store.rank] = 1.0
    return [int(rank) for rank in np.flatnonzero(store.average(mine))]


def _all_digits(store: KVStore | None, own: str, num_live: int) -> list[str]:
    """Rank → its hexadecimal digits, `DIGITS` of them; zeros for none.

    A mean over the live workers of arrays that are zero but for their own rows carries them: 32 bits at a time, which a
    float64 has room for, multiplied and divided by the number of workers.
    """
    own = own or "0" * DIGITS
    if store is None:
        return [own]
    halves = np.zeros((store.num_workers, 2))
    halves[store.rank] = [int(own[:8], 16), int(own[8:], 16)]
    found = np.rint(store.average(halves * num_live))
    return [f"{int(high):08x}{int(low):08x}" for high, low in found]


def _records(folder: Path, digits: Sequence[str]) -> list[FileRecord]:
    """What the workers have written."""
    with explained(f"{folder} could not be read"):
        names = [f"worker-{rank}-{own}.json" for rank, own in enumerate(digits) if own.strip("0")]
        return [record_of(folder, name) for name in names]
