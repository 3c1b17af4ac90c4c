"""Checkpoints as users see them: where they lie, what a worker keeps with them, what comes back, what has failed."""

from __future__ import annotations

import json
import logging
import operator
import os
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdist.checkpoint import folders
from kvdist.checkpoint.files import explained, write_file
from kvdist.checkpoint.format import STATE_BYTES_MAX, read_workers
from kvdist.checkpoint.snapshot import FileRecord, Manifest
from kvdist.config import exit_codes
from kvdist.errors import CheckpointError, PeerLostError
from kvdist.protocol.limits import DEFAULT
from kvdist.runtime.cluster import PROCESS_CLUSTER

LOG = logging.getLogger("kvdist")

Names = Mapping[int | str, str]
"""Key → what the user calls it."""
STEP_MAX = (1 << 63) - 1
MARK_BYTES = 80
"""At most so many, run and step, are added to what a worker keeps."""
DEPTH_MAX = 100
"""Of a state: what JSON writes it must be able to read, on a smaller stack too."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been loaded.

    Attributes:
        folder: where it lies.
        step: the number with which it was saved.
        state: what this worker gave as `state`; None if it gave nothing, or did not exist.
        states: rank → what that worker gave; for a run that goes on with another number of workers.
        exact: whether it is one moment of the whole store; not so for asynchronous stores.
    """

    folder: Path
    step: int
    state: Any = None
    states: Mapping[int, Any] = field(default_factory=dict)
    exact: bool = True


class CheckpointFuture(Future[Path]):
    """What `save_checkpoint` returns: the folder, or why there is no checkpoint. Cannot be cancelled.

    A failure is the program's once it has looked: by `result()` or `exception()`, or because a later call on the store
    raised it. If it never does, the process ends with an exit code that is not 0.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.settled: Future[None] = Future()
        """Done when this is; to wait for it is not to look."""
        self._is_abandoned = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path:
        """The folder of the checkpoint. See `concurrent.futures.Future.result`."""
        try:
            return super().result(timeout)
        finally:
            self.look()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Why there is no checkpoint, or None. See `concurrent.futures.Future.exception`."""
        try:
            return super().exception(timeout)
        finally:
            self.look()

    def finish(self, error: BaseException | None) -> None:
        """It is complete, or has failed."""
        if error is None:
            self.set_result(self.folder)
        else:
            if not self._is_abandoned:
                exit_codes.note_exits()
                _FAILED[self] = error
            self.set_exception(error)
        self.settled.set_result(None)

    @property
    def has_failed(self) -> bool:
        """Whether it is known that there is no checkpoint; to ask is not to look."""
        return self.done() and super().exception() is not None

    def abandon(self) -> None:
        """Nobody needs to look: something else tells the program that there is no checkpoint."""
        self._is_abandoned = True
        self.look()

    def look(self) -> BaseException | None:
        """Its failure, if it has failed and nobody has looked; it is the caller's now."""
        return _FAILED.pop(self, None)


class LastSave:
    """The last checkpoint of a store, whose failure somebody must hear of."""

    def __init__(self) -> None:
        self.future: CheckpointFuture | None = None

    def run(self, folder: Path, save: Callable[[], None]) -> CheckpointFuture:
        """Make a checkpoint in this thread; the future says whether that was possible."""
        self.future = CheckpointFuture(folder)
        try:
            save()
        except CheckpointError as error:
            LOG.error("no checkpoint was made: %s", error)
            self.future.finish(error)
        else:
            self.future.finish(None)
        return self.future

    def before_next(self) -> None:
        """Another one is wanted.

        Raises:
            CheckpointError: this one has failed, and nobody has looked.
        """
        self._raise("the checkpoint before this one")

    def at_close(self) -> None:
        """The store is closed.

        Raises:
            CheckpointError: this one has failed, and nobody has looked.
        """
        self._raise("the last checkpoint")

    def abandon(self) -> None:
        """An exception is on its way to the program, which says more than the failure of this one."""
        if self.future is not None:
            self.future.abandon()

    def _raise(self, what: str) -> None:
        error = None if self.future is None else self.future.look()
        if isinstance(error, CheckpointError):
            assert self.future is not None
            raise CheckpointError(f"{what}, {self.future.folder}, was not made: {error}")
        if error is not None:  # the cluster was lost
            raise error


_FAILED: dict[CheckpointFuture, BaseException] = {}
"""At which nobody has looked."""


def _end_badly() -> None:
    """The interpreter ends: a process whose last checkpoint has failed, unheard, must not seem to have succeeded."""
    unheard = {future: error for future, error in _FAILED.items() if not _was_told(error)}
    for future, error in unheard.items():
        LOG.error("the last checkpoint, %s, was not made: %s", future.folder, error)
    if unheard:
        lost = any(isinstance(error, PeerLostError) for error in unheard.values())
        exit_codes.end_with(exit_codes.EXIT_PEER_LOST if lost else 1)
        _FAILED.clear()  # their tracebacks hold the program's variables, and so its open files


def _was_told(error: BaseException) -> bool:
    """Whether the program knows that the cluster was lost: every call raises the same error, which notes where."""
    return isinstance(error, PeerLostError) and error.__traceback__ is not None


PROCESS_CLUSTER.after_leaving.append(_end_badly)
os.register_at_fork(after_in_child=_FAILED.clear)


def place(directory: str | os.PathLike[str], step: int) -> Path:
    """The folder of a checkpoint that is to be written.

    Raises:
        ValueError: the step is no count.
    """
    return folders.folder_of(absolute(directory), checked_step(step))


def checked_step(step: object) -> int:
    """A count as Python's own: NumPy's are as good.

    Raises:
        ValueError: it is none.
    """
    try:
        found = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if not 0 <= found <= STEP_MAX:
        raise ValueError(f"the step of a checkpoint is {step!r}; it must be a number from 0, such as the steps made")
    return found


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same place for every process, wherever it was started.

    Raises:
        ValueError: it is too long for a message, or no text.
    """
    found = Path(os.path.abspath(os.fsdecode(path)))
    if "\0" in str(found):
        raise ValueError(f"the folder {str(path)[:80]!r} has a character that no path can have")
    try:
        nbytes = len(str(found).encode())
    except UnicodeEncodeError:
        raise ValueError(f"the folder {str(path)[:80]!r} has characters that are not text (lone surrogates)") from None
    if nbytes > DEFAULT.name_bytes_max - 64:  # room for the folder of a step
        raise ValueError(f"the folder {str(path)[:80]!r}… has {nbytes} bytes, more than a message can carry")
    return found


def checked_keep(keep: int | None) -> int:
    """As it travels: 0 for all.

    Raises:
        ValueError: it would leave none.
    """
    if keep is None:
        return 0
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep < 1 << 32:
        raise ValueError(f"keep is {keep!r}; it says how many of the newest checkpoints stay: at least 1, or None")
    return keep


def find(directory: str | os.PathLike[str], step: int | None) -> Path:
    """The folder of a checkpoint that is to be read: of a step, or the newest.

    Raises:
        CheckpointError: there is none.
        ValueError: the step is no count.
    """
    return folders.find(absolute(directory), None if step is None else checked_step(step))


def own_file(state: Any, names: Names | None, rank: int) -> bytes:
    """What a worker keeps with a checkpoint, as JSON; empty for nothing.

    Raises:
        TypeError: the state is not made of what JSON can say, or the names are not by key.
        ValueError: it is too long.
    """
    if state is None and not names:
        return b""
    named = _named({} if names is None else names)
    try:
        _require_plain(state, 0)
        text = json.dumps({"rank": rank, "state": state, "names": named}, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the state of a checkpoint is made of dicts with text as keys, lists, numbers, text, True, False and None:"
            f" {error}. Give lists instead of arrays: torch.get_rng_state().tolist(), for one"
        ) from None
    content = text.encode()
    if len(content) > STATE_BYTES_MAX - MARK_BYTES:
        raise ValueError(f"the state of a checkpoint has {len(content)} bytes as JSON; {STATE_BYTES_MAX} are allowed")
    return content


def _require_plain(value: object, depth: int) -> None:
    """JSON would make text of other keys of a dict, and nobody would notice before the state is used again."""
    if depth > DEPTH_MAX:
        raise TypeError(f"it is nested deeper than {DEPTH_MAX} times, or holds itself")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a dict has the key {key!r:.80}, which is no text")
            _require_plain(inner, depth + 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _require_plain(inner, depth + 1)


def _named(names: Names) -> list[list[int | str]]:
    if not isinstance(names, Mapping):
        raise TypeError(f"names is a dict, key → name, not {type(names).__name__}")
    for key in names:
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise TypeError(f"names is a dict, key → name; {key!r:.80} is no key")
    return [[key, str(name)] for key, name in names.items()]


def write_own_file(folder: Path, rank: int, content: bytes, run: str, step: int) -> FileRecord:
    """Write what `own_file` gave, for this step of this run.

    Raises:
        CheckpointError: the disk is full, say.
    """
    text = content.removesuffix(b"}") + f', "run": {json.dumps(run)}, "step": {step}}}'.encode()
    with explained(f"{folder} could not be used for a checkpoint"):
        return write_file(folder, f"worker-{rank}", ".json", [memoryview(text)])


def loaded(folder: Path, manifest: Manifest, rank: int) -> Checkpoint:
    """What is given to the user who has loaded it.

    Raises:
        CheckpointError: a worker's file is missing or damaged.
    """
    states = {one: content.state for one, content in read_workers(folder, manifest).items()}
    return Checkpoint(folder, manifest.step, states.get(rank), states, manifest.exact)
