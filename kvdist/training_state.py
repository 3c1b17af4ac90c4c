"""What a trainer saves and loads: on its store where that updates, else from here.

Where the store updates, its servers write what they keep. Where workers update, all of them have the same weights and
states: rank 0 writes them, each worker adds its own `state`, and nobody returns before all have written.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.checkpoint.files import DIGITS, FileRecord, explained, record_of
from kvdist.checkpoint.manifest import EVERYTHING, STATES, WEIGHTS, read_manifest
from kvdist.errors import CheckpointError
from kvdist.kvstore import local_saving, saved, values
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.contract import KVStoreBase
from kvdist.local_update import LocalUpdate
from kvdist.parameters import Parameter


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
            self._save_here(saved.absolute(fname), (STATES,), 0, 0, b"")

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """See `Trainer.load_states`."""
        if self._is_updated_there and self._store is not None:
            self._store.load_optimizer_states(fname)
        else:
            self._load_here(saved.absolute(fname), (STATES,))

    def save_checkpoint(
        self, directory: str | os.PathLike[str], step: int, state: Any, keep: int | None
    ) -> Future[Path]:
        """See `Trainer.save_checkpoint`."""
        names: dict[int | str, str] = {key: parameter.name for key, parameter in enumerate(self._parameters)}
        if self._is_updated_there and self._store is not None:
            return self._store.save_checkpoint(directory, step, state=state, keep=keep, names=names)
        folder, number = saved.place(directory, step), saved.checked_keep(keep)
        future: Future[Path] = Future()
        try:
            self._save_here(folder, EVERYTHING, step, number, saved.own_file(state, names, self._rank))
            future.set_result(folder)
        except CheckpointError as error:
            future.set_exception(error)
        return future

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None, with_states: bool
    ) -> saved.Checkpoint:
        """See `Trainer.load_checkpoint`. Where the store updates, the weights are still to be pulled."""
        if self._is_updated_there and self._store is not None:
            return self._store.load_checkpoint(directory, step, states=with_states)
        folder = saved.find(directory, step)
        checkpoint = saved.loaded(folder, read_manifest(folder), self._rank)
        self._load_here(folder, EVERYTHING if with_states else (WEIGHTS,))
        return checkpoint

    @property
    def _rank(self) -> int:
        return 0 if self._store is None else self._store.rank

    def _held(self) -> list[local_saving.Held]:
        held = []
        for key, parameter in enumerate(self._parameters):
            shape, dtype = values.describe(parameter.replicas[0])
            held.append(local_saving.Held(key, shape, dtype, values.read_bits(parameter.replicas[0])))
        return held

    def _save_here(self, folder: Path, contents: tuple[str, ...], step: int, keep: int, content: bytes) -> None:
        """Every worker writes its own file, then rank 0 the rest."""
        store, record = self._store, None
        failure: CheckpointError | None = None
        try:
            if content:
                record = saved.write_own_file(folder, self._rank, content)
        except CheckpointError as error:
            failure = error
        digits = _all_digits(store, record)
        self._agree(store, failure, "its own file could not be written")
        if self._rank == 0:
            try:
                files = _records(folder, digits)
                local_saving.save(folder, contents, self._held(), self._local.updater, step, keep, files=files)
            except CheckpointError as error:
                failure = error
        self._agree(store, failure, "rank 0 could not write the checkpoint")

    def _load_here(self, folder: Path, contents: tuple[str, ...]) -> None:
        if self._store is not None:
            self._store.agree(f"loads {folder}")
        found = local_saving.load(folder, contents, self._held(), self._local.updater)
        self._local.spread()
        for parameter, bits in zip(self._parameters, found, strict=True):
            if bits is not None:
                for replica in parameter.replicas:
                    values.write_bits(replica, bits)

    def _agree(self, store: KVStore | None, failure: CheckpointError | None, what: str) -> None:
        """Whether all have done their part.

        Raises:
            CheckpointError: one has not.
        """
        shares = 1.0 if store is None else store.average(float(failure is None))
        if failure is not None:
            raise failure
        if shares < 1.0:
            raise CheckpointError(f"no checkpoint was made: on another worker {what}; its log says why")


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


def _all_digits(store: KVStore | None, record: FileRecord | None) -> list[str]:
    """Rank → the digits of the name of its own file; zeros for none.

    A mean over the workers of arrays that are zero but for their own rows carries them, exactly: 32 bits at a time.
    """
    own = "0" * DIGITS if record is None else record.sha256[:DIGITS]
    if store is None:
        return [own]
    halves = np.zeros((store.num_workers, 2))
    halves[store.rank] = [int(own[:8], 16), int(own[8:], 16)]
    found = np.rint(store.average(halves * store.num_workers))
    return [f"{int(high):08x}{int(low):08x}" for high, low in found]


def _records(folder: Path, digits: Sequence[str]) -> list[FileRecord]:
    """What the workers have written."""
    with explained(f"{folder} could not be read"):
        names = [f"worker-{rank}-{own}.json" for rank, own in enumerate(digits) if own.strip("0")]
        return [record_of(folder, name) for name in names]
