"""What a trainer saves and loads: on its store where that updates, else from here.

Where the store updates, its servers write what they keep. Where workers update, all of them have the same weights and
states: the first of them writes these, each adds its own `state`, and nobody returns before all have written.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvdist.checkpoint.files import DIGITS, FileRecord, explained, record_of
from kvdist.checkpoint.manifest import EVERYTHING, STATES, WEIGHTS, read_manifest
from kvdist.checkpoint.slices import ReadSlice
from kvdist.errors import CheckpointError
from kvdist.kvstore import local_saving, saved, values
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.contract import KVStoreBase
from kvdist.local_update import LocalUpdate
from kvdist.parameters import Parameter

LOG = logging.getLogger("kvdist")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Job:
    """What is to be saved, and where."""

    folder: Path
    contents: tuple[str, ...]
    step: int = 0
    keep: int = 0
    content: bytes = b""
    """Of this worker's own file."""


class TrainingState:
    """The weights of a trainer and what its optimizer remembers.

    Args:
        parameters: all of them; their keys are their positions.
        local: the optimizer that runs here, unless the store updates.
        store: the trainer's; None without one.
        is_updated_there: whether the store updates.
    """

    def __init__(
        self, parameters: Sequence[Parameter], local: LocalUpdate, store: KVStoreBase | None, is_updated_there: bool
    ) -> None:
        self._parameters = parameters
        self._local = local
        self._is_updated_there = is_updated_there
        self._store = _able(store)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """See `Trainer.save_states`."""
        if self._is_updated_there and self._store is not None:
            self._store.save_optimizer_states(fname)
        else:
            self._save_here(lambda: _Job(saved.absolute(fname), (STATES,)))

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """See `Trainer.load_states`."""
        if self._is_updated_there and self._store is not None:
            self._store.load_optimizer_states(fname)
        else:
            self._load_here(lambda: saved.Checkpoint(saved.absolute(fname), 0), (STATES,))

    def save_checkpoint(
        self, directory: str | os.PathLike[str], step: int, state: Any, keep: int | None
    ) -> Future[Path]:
        """See `Trainer.save_checkpoint`."""
        names: dict[int | str, str] = {key: parameter.name for key, parameter in enumerate(self._parameters)}
        if self._is_updated_there and self._store is not None:
            return self._store.save_checkpoint(directory, step, state=state, keep=keep, names=names)
        future: Future[Path] = Future()

        def job() -> _Job:
            folder, number = saved.place(directory, step), saved.checked_keep(keep)
            return _Job(folder, EVERYTHING, saved.checked_step(step), number, saved.own_file(state, names, self._rank))

        try:
            future.set_result(self._save_here(job))
        except CheckpointError as error:
            LOG.error("no checkpoint was made: %s", error)
            future.set_exception(error)
        return future

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None, with_states: bool
    ) -> saved.Checkpoint:
        """See `Trainer.load_checkpoint`. Where the store updates, the weights are still to be pulled."""
        if self._is_updated_there and self._store is not None:
            return self._store.load_checkpoint(directory, step, states=with_states)

        def find() -> saved.Checkpoint:
            folder = saved.find(directory, step)
            return saved.loaded(folder, read_manifest(folder), self._rank)

        return self._load_here(find, EVERYTHING if with_states else (WEIGHTS,))

    @property
    def _rank(self) -> int:
        return 0 if self._store is None else self._store.rank

    def _held(self) -> list[local_saving.Held]:
        held = []
        for key, parameter in enumerate(self._parameters):
            shape, dtype = values.describe(parameter.replicas[0])
            held.append(local_saving.Held(key, shape, dtype, values.read_bits(parameter.replicas[0])))
        return held

    def _save_here(self, make: Callable[[], _Job]) -> Path:
        """Every worker writes its own file, then the first of them the rest."""
        job = self._together(make, "its arguments are wrong")
        if self._store is not None:
            self._store.agree(f"saves {job.folder} ({', '.join(job.contents)}), keep {job.keep or 'all'}")
        live = _live(self._store)

        def write_own() -> FileRecord | None:
            return saved.write_own_file(job.folder, self._rank, job.content) if job.content else None

        record = self._together(write_own, "its own file could not be written")
        digits = _all_digits(self._store, record, len(live))

        def write_rest() -> None:
            if self._rank == live[0]:
                files, updater = _records(job.folder, digits), self._local.updater
                local_saving.save(job.folder, job.contents, self._held(), updater, job.step, job.keep, files=files)

        self._together(write_rest, f"worker-{live[0]} could not write the rest")
        return job.folder

    def _load_here(self, find: Callable[[], saved.Checkpoint], contents: tuple[str, ...]) -> saved.Checkpoint:
        """Every worker reads; if all could, all take over what they have read."""
        held = self._held()

        def read() -> tuple[saved.Checkpoint, list[ReadSlice]]:
            checkpoint = find()
            return checkpoint, local_saving.read(checkpoint.folder, contents, held, self._local.updater)

        checkpoint, found = self._together(read, "it could not be read")
        if self._store is not None:
            self._store.agree(f"loads {checkpoint.folder}")
        values_read = local_saving.take(held, found, self._local.updater)
        self._local.spread()
        for parameter, bits in zip(self._parameters, values_read, strict=True):
            if bits is not None:
                for replica in parameter.replicas:
                    values.write_bits(replica, bits)
        return checkpoint

    def _together(self, do: Callable[[], T], what: str) -> T:
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


def _able(store: KVStoreBase | None) -> KVStore | None:
    """The store, if it can do what is needed here.

    Raises:
        NotImplementedError: it is one of the user's own, which can do less.
    """
    if store is None or isinstance(store, KVStore):
        return store
    raise NotImplementedError(
        f"the store {store.type!r} keeps the contract of KVStoreBase, which has no way to save what it holds; save"
        " net.state_dict(), or use one of kvdist's stores"
    )


def _live(store: KVStore | None) -> list[int]:
    """The ranks of the workers that have not left, in order."""
    if store is None:
        return [0]
    mine = np.zeros(store.num_workers)
    mine[store.rank] = 1.0
    return [int(rank) for rank in np.flatnonzero(store.average(mine))]


def _all_digits(store: KVStore | None, record: FileRecord | None, num_live: int) -> list[str]:
    """Rank → the digits of the name of its own file; zeros for none.

    A mean over the live workers of arrays that are zero but for their own rows carries them: 32 bits at a time, which a
    float64 has room for, multiplied and divided by the number of workers.
    """
    own = "0" * DIGITS if record is None else record.sha256[:DIGITS]
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
