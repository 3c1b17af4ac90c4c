"""Saving and loading of a trainer: by its store if that updates the weights, else by the workers.

Workers that update have the same weights and states: the first worker writes these, each worker adds its `state`, and
no worker returns before all have written.
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
        parameters: all parameters; the key of each is its position.
        local: the optimizer of this process, unless the store updates.
        store: the store of the trainer, or None.
        store_updates: whether the store updates the weights.
        has_local_steps: whether workers update, too, between two updates by the store: then `states` are the worker's.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        local: LocalUpdate,
        store: KVStoreBase | None,
        store_updates: bool,
        has_local_steps: bool = False,
    ) -> None:
        self._parameters = parameters
        self._local = local
        self._samples = 0
        if not isinstance(store, KVStore | None):
            raise NotImplementedError(
                f"the store {store.type!r} only implements KVStoreBase, which cannot save its values; save"
                " net.state_dict(), or use one of kvdist's stores"
            )
        self._store = store
        self._updating = store if store_updates else None
        """The store if it updates, and so saves and loads; else None."""
        self._has_local_steps = has_local_steps
        self._stepping = None if has_local_steps else self._updating
        """The store if it has the states of the optimizer; else None."""
        self._workers = WorkerSaving(None if store is None else store._backend, self._held, lambda: local.updater)
        if store is not None:
            store._at_close(self._workers.close)

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """See `Trainer.save_states`."""
        job = SaveJob(fname, names=self._names, states_only=True)
        if self._updating is not None:
            self._updating._backend.wait(self._updating._save(job))
        else:
            self._files().save(job)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """See `Trainer.load_states`."""
        job = LoadJob(fname, values=False, names=self._names)
        if self._updating is not None:
            self._updating._load(job)
        else:
            self._load_here(job)

    def states(self, keys: Sequence[int]) -> list[SliceState | None]:
        """Return the state of the optimizer for each key; not a collective call."""
        if self._stepping is not None:
            return self._stepping.optimizer_states(keys)
        states = [self._local.updater.state_of(key) for key in keys]
        return [None if state is None else state.copy() for state in states]

    def replace_states(self, keys: Sequence[int], states: Sequence[SliceState | None]) -> None:
        """Replace the states of the optimizer. Every worker calls it with the same states, as agreed before."""
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
        """See `Trainer.save_checkpoint`; `steps` is the number of local steps of this worker."""
        job = SaveJob(directory, step, state, keep, self._names)
        if self._updating is None:
            return self._files().save(job)
        if self._has_local_steps:
            job = replace(job, write_own=partial(self._workers.write_own, steps=steps))
        return self._updating._save(job)

    def tell_position(self, position: Callable[[], Mapping[str, Any] | None]) -> None:
        """Save the position in the data, which `position` returns, with every later checkpoint."""
        self._workers.position = position
        if self._updating is not None:
            self._updating._backend.position = position

    def tell_samples(self, samples: int) -> None:
        """Save the number of examples behind the weights with every later checkpoint, unless servers count them."""
        self._samples = samples
        if self._updating is not None:
            self._updating._backend.samples = samples

    def close(self) -> None:
        """Release the locks of checkpoint folders, so that other jobs may save into them; the store stays open.

        Raises:
            CheckpointError: the last checkpoint of the workers has failed, and its future was not read.
        """
        self._workers.close()

    def load_checkpoint(self, directory: str | os.PathLike[str], step: int | None, with_states: bool) -> Checkpoint:
        """See `Trainer.load_checkpoint`. Where the store updates, the weights are still to be pulled."""
        job = LoadJob(directory, step, states=with_states, names=self._names)
        return self._load_here(job) if self._updating is None else self._updating._load(job)

    def load_own(self, folder: Path) -> None:
        """Restore the states of this worker's local optimizer, if the checkpoint has any.

        Raises:
            CheckpointError: a file of a worker is damaged.
        """
        self._files().load_own(folder)
        self._local.spread()

    @property
    def _names(self) -> dict[int | str, str]:
        return {parameter.key: parameter.name for parameter in self._parameters}

    def _files(self) -> WorkerSaving:
        """Return the checkpoints of the workers, if the store is open and no push has failed unread."""
        if self._store is not None:
            self._store._begin()
        return self._workers

    def _held(self) -> list[HeldArray]:
        held = []
        for parameter in self._parameters:
            given = parameter.carried[0]
            shape, dtype = values.describe(given)
            held.append(HeldArray(parameter.key, shape, dtype, values.read_bits(given), self._samples))
        return held

    def _load_here(self, job: LoadJob) -> Checkpoint:
        checkpoint, values_read = self._files().load(job)
        self._local.spread()
        for parameter, bits in zip(self._parameters, values_read, strict=True):
            if bits is not None:
                for replica in parameter.carried:
                    values.write_bits(replica, bits, values.describe(replica)[1])
        return checkpoint
