"""The part of a `DistStore` that saves it and restores it.

The servers write and read; a worker marks its pushes, adds what it wants to have back itself, and waits on a future.
One checkpoint at a time: a second one waits until the first is complete, so that servers copy states once at most.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvdist.checkpoint.format import read_manifest
from kvdist.checkpoint.locks import require_run
from kvdist.checkpoint.snapshot import EVERYTHING, STATES, WEIGHTS, chosen_optimizer, directory_of
from kvdist.core.worker.requests import ClaimFolder, KeyInfo, LoadStore, Request, SaveStore
from kvdist.errors import CheckpointError
from kvdist.kvstore import saved
from kvdist.kvstore.saved import CheckpointFuture, LastSave
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.messages import SavedFile
from kvdist.runtime.mailbox import Finish

LOG = logging.getLogger("kvdist")

Submit = Callable[[Callable[[int], Request], Finish | None], Future[Any]]
Wait = Callable[[Future[Any]], Any]


NO_FILE = SavedFile("", 0, "")
_NOWHERE = Path("/nowhere")
"""Named where a worker fails before it has a folder to name."""


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a checkpoint goes, and what it is."""

    folder: Path
    contents: tuple[str, ...]
    step: int = 0
    keep: int = 0
    content: bytes = b""
    """Of this worker's own file."""
    run: str = ""
    """As the claim of its directory gave it."""


class Saving:
    """What a store needs for `save_checkpoint` and its kin.

    Args:
        number: the store's.
        rank: this worker's.
        submit: hands a request to the worker.
        result_of: waits for a future.
        hold: keeps the process in the cluster until a future is done.
        forget_shown: lets go of values that are shown: they will be others.
    """

    def __init__(
        self,
        number: int,
        rank: int,
        submit: Submit,
        result_of: Wait,
        hold: Callable[[Future[None]], None],
        forget_shown: Callable[[], None],
    ) -> None:
        self._number = number
        self._rank = rank
        self._submit = submit
        self._result_of = result_of
        self._hold = hold
        self._forget_shown = forget_shown
        self._last = LastSave()
        self._claimed: dict[Path, str] = {}
        """Directory → the run that its checkpoints are of, if this store has saved there."""
        self._seen: set[Path] = set()
        """Directories of those that are the same folder here as on the scheduler."""

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

        def make() -> _Place:
            folder, number = saved.place(directory, step), saved.checked_keep(keep)
            content = saved.own_file(state, names, self._rank)
            return _Place(folder, EVERYTHING, saved.checked_step(step), number, content)

        return self._save(keys, make)

    def claim(self, keys: Sequence[KeyInfo], directory: str | os.PathLike[str], step: int) -> None:
        """See `DistStore._claim_folder`. A refusal ends the checkpoint for all, so the next claim is looked into."""
        self.wait()
        place = _Place(_NOWHERE, EVERYTHING)
        try:
            place = _Place(saved.place(directory, step), EVERYTHING)
            self._claim(place)
        except (CheckpointError, TypeError, ValueError) as error:
            self._begin(keys, place, NO_FILE, str(error))
            self._last.abandon()
            raise

    def save_states(self, keys: Sequence[KeyInfo], fname: str | os.PathLike[str]) -> Future[Path]:
        """See `KVStore.save_optimizer_states`."""
        return self._save(keys, lambda: _Place(saved.absolute(fname), (STATES,)))

    def _save(self, keys: Sequence[KeyInfo], make: Callable[[], _Place]) -> Future[Path]:
        """Take part in a checkpoint. A failure of this worker is told to all, or they would wait for it."""
        if not keys:
            raise ValueError("the store has no keys to save: init them before")
        self.wait()
        place, file = _Place(_NOWHERE, EVERYTHING), NO_FILE
        try:
            self._last.before_next()
            place = self._claim(make())
            if place.content:
                record = saved.write_own_file(place.folder, self._rank, place.content, place.run, place.step)
                file = SavedFile(record.name, record.nbytes, record.sha256)
        except (CheckpointError, TypeError, ValueError) as error:
            self._begin(keys, place, NO_FILE, str(error))
            self._last.abandon()
            raise
        return self._begin(keys, place, file)

    def _claim(self, place: _Place) -> _Place:
        """The same, once the job has the lock of the directory and every server can write there."""
        directory = Path(directory_of(str(place.folder)))
        run = self._claimed.get(directory)
        if run is None:
            where = (self._number, str(place.folder), place.contents)
            run = self._result_of(self._submit(lambda request: ClaimFolder(request, *where), None))
            self._claimed[directory] = run
        if place.content and directory not in self._seen:
            require_run(directory, run)
            self._seen.add(directory)
        return replace(place, run=run)

    def _begin(self, keys: Sequence[KeyInfo], place: _Place, file: SavedFile, failure: str = "") -> CheckpointFuture:
        where = (str(place.folder), place.contents, place.run, place.step, place.keep)

        def make(request: int) -> Request:
            return SaveStore(request, self._number, *where, file, tuple(keys), failure)

        submitted = self._submit(make, None)
        future = self._last.future = CheckpointFuture(place.folder)
        self._hold(future.settled)
        submitted.add_done_callback(lambda done: self._finish(future, done, failure))
        return future

    def load(self, directory: str | os.PathLike[str], step: int | None, with_states: bool) -> saved.Checkpoint:
        """See `KVStore.load_checkpoint`."""
        contents = EVERYTHING if with_states else (WEIGHTS,)
        with self._told_to_all(contents):
            folder = saved.find(directory, step)
            checkpoint = saved.loaded(folder, read_manifest(folder), self._rank)
        self._load(folder, contents)
        return checkpoint

    def load_states(
        self, fname: str | os.PathLike[str], present: Optimizer | None, choose: Callable[[Optimizer], None]
    ) -> None:
        """See `KVStore.load_optimizer_states`."""
        with self._told_to_all((STATES,)):
            folder = saved.absolute(fname)
            manifest = read_manifest(folder)
        if present is None and manifest.optimizer is not None:
            choose(chosen_optimizer(manifest.optimizer))
        self._load(folder, (STATES,))

    @contextlib.contextmanager
    def _told_to_all(self, contents: tuple[str, ...]) -> Iterator[None]:
        """What goes wrong on this worker alone fails the loading of all, or the others would wait for it."""
        try:
            yield
        except (CheckpointError, TypeError, ValueError) as error:
            with contextlib.suppress(CheckpointError):
                self._load(_NOWHERE, contents, str(error))
            raise

    def _load(self, folder: Path, contents: tuple[str, ...], failure: str = "") -> None:
        self.wait()
        where = (self._number, str(folder), contents, failure)
        self._result_of(self._submit(lambda request: LoadStore(request, *where), self._forget_shown))

    def wait(self) -> None:
        """Until what was begun is complete, or has failed; its own future says which."""
        if self._last.future is not None:
            self._result_of(self._last.future.settled)

    def close(self, wait: bool) -> None:
        """The store was closed; see `KVStore.close`.

        Raises:
            CheckpointError: the last checkpoint has failed, and nobody has looked at its future.
        """
        if wait:
            self._last.at_close()

    def _finish(self, future: CheckpointFuture, done: Future[Any], failure: str) -> None:
        error = done.exception()
        if self._rank == 0 and error is not None and not failure:  # which this worker has raised itself
            LOG.error("no checkpoint was made: %s", error)
        future.finish(error)
