"""Saving and loading of a trainer, on its store where that updates, else in this process.

Where the store updates, its servers write their state. Where workers update, all have the same weights and states: the
first worker writes these, each adds its own `state`, and none returns before all have written.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvdist.kvstore import values
from kvdist.kvstore.adapter import KVStoreBase
from kvdist.kvstore.backend import LoadJob, SaveJob
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.checkpoints import Checkpoint, HeldArray, WorkerSaving
from kvdist.optimizer.states import SliceState
from kvdist.training.parameters import Parameter
from kvdist.training.weights import LocalUpdate


class TrainingState:
    """Saves and loads a trainer's weights and optimizer states.

    Args:
        parameters: all of them; their keys are their positions.
        local: the optimizer that runs here, unless the store updates.
        store: the trainer's; None without one.
        is_updated_there: whether the store updates.
        steps_here: whether workers make steps of their own between two of the store's: then `states` are theirs.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        local: LocalUpdate,
        store: KVStoreBase | None,
        is_updated_there: bool,
        steps_here: bool = False,
    ) -> None:
        self._parameters = parameters
        self._local = local
        self._samples = 0
        self._store = _able(store)
        self._updating = self._store if is_updated_there else None
        """The store where it updates, which then saves and loads."""
        self._steps_here = steps_here
        self._stepping = None if steps_here else self._updating
        """The store where it has the states of the optimizer."""
        self._workers = WorkerSaving(self._store, self._held, lambda: local.updater)
        if self._store is not None:
            self._store._at_close(self._workers.close)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """See `Trainer.save_states`."""
        job = SaveJob(fname, names=self._names, states_only=True)
        if self._updating is not None:
            self._updating._backend.wait(self._updating._save(job))
        else:
            self._workers.save(job)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """See `Trainer.load_states`."""
        job = LoadJob(fname, values=False, names=self._names)
        if self._updating is not None:
            self._updating._load(job)
        else:
            self._load_here(job)

    def states(self, keys: Sequence[int]) -> list[SliceState | None]:
        """The optimizer's state of each key; not a collective call."""
        if self._stepping is not None:
            return self._stepping.optimizer_states(keys)
        states = [self._local.updater.state_of(key) for key in keys]
        return [None if state is None else state.copy() for state in states]

    def replace_states(self, keys: Sequence[int], states: Sequence[SliceState | None]) -> None:
        """Go on from these; every worker calls it, and has agreed that they are the same everywhere."""
        if self._stepping is not None:
            self._stepping.replace_optimizer_states(keys, states)
        else:
            for key, state in zip(keys, states, strict=True):
                self._local.updater.restore(key, None if state is None else state.copy())
            self._local.spread()
        if self._store is not None:
            self._store.barrier()  # no worker pushes before they are in place

    def save_checkpoint(
        self, directory: str | os.PathLike[str], step: int, state: Any, keep: int | None, steps: int
    ) -> Future[Path]:
        """See `Trainer.save_checkpoint`; where workers make steps of their own, this one has made `steps`."""
        job = SaveJob(directory, step, state, keep, self._names)
        if self._updating is None:
            return self._workers.save(job)
        if self._steps_here:
            job = replace(job, write_own=partial(self._workers.write_own, steps=steps))
        return self._updating._save(job)

    def tell_position(self, position: Callable[[], Mapping[str, Any] | None]) -> None:
        """Save the place in the data with every checkpoint from now on, as this says it."""
        self._workers.position = position
        if self._updating is not None:
            self._updating._backend.position = position

    def tell_samples(self, samples: int) -> None:
        """Save with every checkpoint from now on of how many examples the weights are made, if no server counts."""
        self._samples = samples
        if self._updating is not None:
            self._updating._backend.samples = samples

    def close(self) -> None:
        """Release the locks of checkpoint folders, so that other jobs may save there; the store stays open.

        Raises:
            CheckpointError: the last checkpoint made here has failed and its future was not read.
        """
        self._workers.close()

    def load_checkpoint(self, directory: str | os.PathLike[str], step: int | None, with_states: bool) -> Checkpoint:
        """See `Trainer.load_checkpoint`. Where the store updates, the weights are still to be pulled."""
        job = LoadJob(directory, step, states=with_states, names=self._names)
        return self._load_here(job) if self._updating is None else self._updating._load(job)

    def load_own(self, folder: Path) -> None:
        """Take over the states of this worker's own optimizer from a checkpoint, if it has them.

        Raises:
            CheckpointError: a file of a worker is damaged.
        """
        self._workers.load_own(folder)
        self._local.spread()

    @property
    def _names(self) -> dict[int | str, str]:
        return {key: parameter.name for key, parameter in enumerate(self._parameters)}

    def _held(self) -> list[HeldArray]:
        held = []
        for key, parameter in enumerate(self._parameters):
            given = parameter.carried[0]
            shape, dtype = values.describe(given)
            held.append(HeldArray(key, shape, dtype, values.read_bits(given), self._samples))
        return held

    def _load_here(self, job: LoadJob) -> Checkpoint:
        checkpoint, values_read = self._workers.load(job)
        self._local.spread()
        for parameter, bits in zip(self._parameters, values_read, strict=True):
            if bits is not None:
                for replica in parameter.carried:
                    values.write_bits(replica, bits, values.describe(replica)[1])
        return checkpoint


def _able(store: KVStoreBase | None) -> KVStore | None:
    """The store, if it can do what is needed here.

    Raises:
        NotImplementedError: it is one of the user's own, which can do less.
    """
    if store is None or isinstance(store, KVStore):
        return store
    raise NotImplementedError(
        f"the store {store.type!r} only implements KVStoreBase, which cannot save its values; save net.state_dict(), or"
        " use one of kvdist's stores"
    )
