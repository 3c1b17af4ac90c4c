"""The part of a `DistStore` that saves it and restores it.

The servers write and read; a worker marks its pushes, adds what it wants to have back itself, and waits on a future.
One checkpoint at a time: a second one waits until the first is complete, so that servers copy states once at most.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from kvdist.checkpoint.manifest import EVERYTHING, STATES, WEIGHTS, chosen_optimizer, read_manifest
from kvdist.core.requests import KeyInfo, LoadStore, Request, SaveStore
from kvdist.errors import CheckpointError
from kvdist.kvstore import saved
from kvdist.mailbox import Finish
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.saving import SavedFile

LOG = logging.getLogger("kvdist")

Submit = Callable[[Callable[[int], Request], Finish], Future[Any]]
Wait = Callable[[Future[Any]], Any]


class Saving:
    """What a store needs for `save_checkpoint` and its kin.

    Args:
        number: the store's.
        rank: this worker's.
        submit: hands a request to the worker.
        result_of: waits for a future.
        forget_shown: lets go of values that are shown: they will be others.
    """

    def __init__(
        self, number: int, rank: int, submit: Submit, result_of: Wait, forget_shown: Callable[[], None]
    ) -> None:
        self._number = number
        self._rank = rank
        self._submit = submit
        self._result_of = result_of
        self._forget_shown = forget_shown
        self._last: Future[Path] | None = None

    def save(
        self,
        keys: Sequence[KeyInfo],
        directory: str | os.PathLike[str],
        step: int,
        state: Any,
        keep: int | None,
        names: saved.Names | None,
    ) -> Future[Path]:
        """See `KVStore.save_checkpoint`."""
        folder, number = saved.place(directory, step), saved.checked_keep(keep)
        content = saved.own_file(state, names, self._rank)
        return self._save(keys, folder, EVERYTHING, step, number, content)

    def save_states(self, keys: Sequence[KeyInfo], fname: str | os.PathLike[str]) -> Future[Path]:
        """See `KVStore.save_optimizer_states`."""
        return self._save(keys, saved.absolute(fname), (STATES,), 0, 0, b"")

    def _save(
        self, keys: Sequence[KeyInfo], folder: Path, contents: tuple[str, ...], step: int, keep: int, content: bytes
    ) -> Future[Path]:
        if not keys:
            raise ValueError("the store has no keys to save: init them before")
        self.wait()
        file, failure = SavedFile("", 0, ""), ""
        try:
            if content:
                record = saved.write_own_file(folder, self._rank, content)
                file = SavedFile(record.name, record.nbytes, record.sha256)
        except CheckpointError as error:
            failure = str(error)  # told to all, or they would wait for this worker

        def make(request: int) -> Request:
            place = (self._number, str(folder), contents, step, keep)
            return SaveStore(request, *place, file, tuple(keys), failure)

        self._last = self._submit(make, lambda: folder)
        self._last.add_done_callback(self._tell)
        return self._last

    def load(self, directory: str | os.PathLike[str], step: int | None, with_states: bool) -> saved.Checkpoint:
        """See `KVStore.load_checkpoint`."""
        folder = saved.find(directory, step)
        checkpoint = saved.loaded(folder, read_manifest(folder), self._rank)
        self._load(folder, EVERYTHING if with_states else (WEIGHTS,))
        return checkpoint

    def load_states(
        self, fname: str | os.PathLike[str], present: Optimizer | None, choose: Callable[[Optimizer], None]
    ) -> None:
        """See `KVStore.load_optimizer_states`."""
        folder = saved.absolute(fname)
        manifest = read_manifest(folder)
        if present is None and manifest.optimizer is not None:
            choose(chosen_optimizer(manifest.optimizer))
        self._load(folder, (STATES,))

    def _load(self, folder: Path, contents: tuple[str, ...]) -> None:
        self.wait()
        number = self._number
        future = self._submit(lambda request: LoadStore(request, number, str(folder), contents), self._forget_shown)
        self._result_of(future)

    def wait(self) -> None:
        """Until what was begun is complete, or has failed; its own future says which."""
        if self._last is not None:
            wait([self._last])
            self._last = None

    def _tell(self, future: Future[Path]) -> None:
        error = future.exception()
        if self._rank == 0 and isinstance(error, CheckpointError):
            LOG.error("no checkpoint was made, and training goes on: %s", error)
