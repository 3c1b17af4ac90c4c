"""Checkpoints of a store: their types, and how servers, workers or a single process write and read them.

Invariants:

* A store writes a single checkpoint at a time: a second waits until the first is complete.
* A failure on any worker fails on all, or the others would wait for it.
* A failed checkpoint is reported: by its future, else by the next call, else by the process's exit code.
* All kinds of stores write the same files, so each can load the checkpoints of the others.
"""

from __future__ import annotations

import contextlib
import json
import logging
import operator
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np

from kvdist.checkpoint import folders
from kvdist.checkpoint.files import explained, write_file
from kvdist.checkpoint.folders import perform
from kvdist.checkpoint.format import NAME, STATE_BYTES_MAX, OwnStates, read_manifest, read_workers
from kvdist.checkpoint.locks import Locks, require_run
from kvdist.checkpoint.shards import Shards, write_slices
from kvdist.checkpoint.snapshot import (
    EVERYTHING,
    STATES,
    WEIGHTS,
    CheckFolder,
    FileRecord,
    LockFolder,
    Manifest,
    ReadManifest,
    ReadShards,
    SavedKey,
    SliceImage,
    Sweep,
    UnlockFolder,
    WantedSlice,
    WriteManifest,
    WriteShard,
    chosen_optimizer,
    directory_of,
)
from kvdist.config import exit_codes
from kvdist.config.paths import expanded
from kvdist.core.server.slice_parts import COUNTS, NUMBERS, TOTALS, part_dtype, parts_of_state
from kvdist.core.server.table_rows import TableRows
from kvdist.core.worker.requests import (
    ClaimFolder,
    KeyInfo,
    LoadStore,
    Request,
    Run,
    RunKind,
    RunPlan,
    RunSlice,
    SaveStore,
    Transfer,
)
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError, InitMismatch, PeerLostError
from kvdist.kvstore.backend import LoadJob, Reduction, SaveJob
from kvdist.kvstore.keys import named
from kvdist.kvstore.local_values import Updaters
from kvdist.kvstore.values import Key, Shape
from kvdist.naming import who_says_what
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.states import SliceState, has_master, state_size
from kvdist.protocol.arrays import Bits, padded
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import SavedFile
from kvdist.runtime.cluster import PROCESS_CLUSTER
from kvdist.runtime.node import Finish
from kvdist.runtime.waits import AwaitedFuture

LOG = logging.getLogger("kvdist")

Names = Mapping[int | str, str]
"""Key → name from the user."""
STEP_MAX = (1 << 63) - 1
MARK_BYTES = 80
"""Bytes reserved for run and step, which `write_worker_file` adds to the content."""
DEPTH_MAX = 100
"""Deepest nesting of a state, so that JSON can read it on a smaller stack too."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Description of a loaded checkpoint, as `load_checkpoint` returns it.

    Attributes:
        folder: path of the checkpoint.
        step: step number of the checkpoint.
        state: `state` that the worker of this rank saved; None if it saved nothing or did not exist.
        states: states of all ranks, as a dict of rank to state, for a run with another number of workers.
        exact: whether the checkpoint is a consistent cut of the store; False for asynchronous stores.
        data: position of a `QueueSampler`, which resumes from it by itself; None without such a sampler.
    """

    folder: Path
    step: int
    state: Any = None
    states: Mapping[int, Any] = field(default_factory=dict)
    exact: bool = True
    data: Mapping[str, Any] | None = None


class CheckpointFuture(AwaitedFuture[Path]):
    """Future of the folder of a checkpoint, as `save_checkpoint` returns it. Cannot be cancelled.

    A failure is read by `result()` or `exception()`, or when a later call on the store raises it. A process with an
    unread failure ends with an exit code other than 0.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.settled: AwaitedFuture[None] = AwaitedFuture()
        """Future that is done with the checkpoint; waiting for it does not read a failure."""
        self._is_abandoned = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Path:
        """Return the folder of the checkpoint. See `concurrent.futures.Future.result`."""
        try:
            return super().result(timeout)
        finally:
            self.look()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the failure of the checkpoint, or None. See `concurrent.futures.Future.exception`."""
        try:
            return super().exception(timeout)
        finally:
            self.look()

    def finish(self, error: BaseException | None) -> None:
        """Complete the future, with the folder or an error."""
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
        """Whether a failure is known; does not read it."""
        return self.done() and super().exception() is not None

    def abandon(self) -> None:
        """Treat a failure as read: the program learns of it in another way."""
        self._is_abandoned = True
        self.look()

    def look(self) -> BaseException | None:
        """Return an unread failure or None, and mark it as read."""
        return _FAILED.pop(self, None)


class Saving:
    """Base of all ways of saving: the last checkpoint of a store, whose failure must be reported."""

    def __init__(self) -> None:
        self._last: CheckpointFuture | None = None

    def _raise_failed(self, what: str) -> None:
        """Raise the failure of the last checkpoint, unless it was read."""
        error = None if self._last is None else self._last.look()
        if isinstance(error, CheckpointError):
            assert self._last is not None
            raise CheckpointError(f"{what}, {self._last.folder}, was not written: {error}")
        if error is not None:  # the cluster was lost
            raise error


_FAILED: dict[CheckpointFuture, BaseException] = {}
"""Failed checkpoint → its unread failure."""


def _end_badly() -> None:
    """Log unread failures as the interpreter ends, and set an exit code of failure."""
    unheard = {future: error for future, error in _FAILED.items() if not _was_told(error)}
    for future, error in unheard.items():
        LOG.error("the last checkpoint, %s, was not written: %s", future.folder, error)
    if unheard:
        lost = any(isinstance(error, PeerLostError) for error in unheard.values())
        exit_codes.end_with(exit_codes.EXIT_PEER_LOST if lost else 1)
        _FAILED.clear()  # their tracebacks hold the program's variables, and so its open files


def _was_told(error: BaseException) -> bool:
    """Return whether a call has raised this error of a lost cluster, which has a traceback then."""
    return isinstance(error, PeerLostError) and error.__traceback__ is not None


PROCESS_CLUSTER.after_leaving.append(_end_badly)
os.register_at_fork(after_in_child=_FAILED.clear)


def checkpoint_folder(directory: str | os.PathLike[str], step: object) -> Path:
    """Return the folder of a checkpoint to write.

    Raises:
        ValueError: the step is not a count.
    """
    return folders.folder_of(absolute(directory), as_step(step))


def as_step(step: object) -> int:
    """Return a step as an `int`; integers of NumPy are accepted.

    Raises:
        ValueError: the step is not a count.
    """
    try:
        found = -1 if isinstance(step, bool) else operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        found = -1
    if not 0 <= found <= STEP_MAX:
        raise ValueError(
            f"the step of a checkpoint is {step!r}; it must be a number from 0, such as the number of steps so far"
        )
    return found


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path, valid in processes with any working directory.

    Raises:
        ValueError: the path is too long for a message, is not text, or has an undefined ``~`` or ``$NAME``.
    """
    found = Path(os.path.abspath(expanded(path)))
    if "\0" in str(found):
        raise ValueError(f"the folder {str(path)[:80]!r} has a character that no path can have")
    try:
        nbytes = len(str(found).encode())
    except UnicodeEncodeError:
        raise ValueError(f"the folder {str(path)[:80]!r} has characters that are not text (lone surrogates)") from None
    if nbytes > DEFAULT.name_bytes_max - 64:  # room for the folder of a step
        raise ValueError(f"the folder {str(path)[:80]!r}… has {nbytes} bytes, more than a message can carry")
    return found


def as_keep(keep: int | None) -> int:
    """Return the number of checkpoints to keep as in a message: 0 for all.

    Raises:
        ValueError: the number is not at least 1.
    """
    if keep is None:
        return 0
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep < 1 << 32:
        raise ValueError(
            f"keep is {keep!r}; it is the number of newest checkpoints to keep: at least 1, or None for all"
        )
    return keep


def worker_content(state: Any, names: Names | None, rank: int) -> bytes:
    """Return the JSON that a worker saves with a checkpoint; empty without state and names.

    Raises:
        TypeError: the state is not JSON-compatible, or the names are not a dict of key to name.
        ValueError: the JSON is too long.
    """
    if state is None and not names:
        return b""
    named = _named({} if names is None else names)
    try:
        _require_plain(state, 0)
        text = json.dumps({"rank": rank, "state": state, "names": named}, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            "the state of a checkpoint must consist of dicts with text as keys, lists, numbers, text, True, False and"
            f" None: {error}. Convert arrays to lists, for example torch.get_rng_state().tolist()"
        ) from None
    content = text.encode()
    if len(content) > STATE_BYTES_MAX - MARK_BYTES:
        raise ValueError(f"the state of a checkpoint has {len(content)} bytes as JSON; {STATE_BYTES_MAX} are allowed")
    return content


def _require_plain(value: object, depth: int) -> None:
    """Require text as keys of dicts: JSON converts other keys, which is noticed only when the state is used again."""
    if depth > DEPTH_MAX:
        raise TypeError(f"it is nested deeper than {DEPTH_MAX} times, or holds itself")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"a dict has the key {key!r:.80}, which is not text")
            _require_plain(inner, depth + 1)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            _require_plain(inner, depth + 1)


def _named(names: Names) -> list[list[int | str]]:
    if not isinstance(names, Mapping):
        raise TypeError(f"names must be a dict of key to name, not {type(names).__name__}")
    for key in names:
        if isinstance(key, bool) or not isinstance(key, (int, str)):
            raise TypeError(f"names must be a dict of key to name; {key!r:.80} is not a key")
    return [[key, str(name)] for key, name in names.items()]


def write_worker_file(
    folder: Path, rank: int, content: bytes, run: str, step: int, own: OwnStates | None = None
) -> FileRecord:
    """Write the result of `worker_content` to a file, for this step of this run.

    Raises:
        CheckpointError: the disk is full, for example.
    """
    more = f', "run": {json.dumps(run)}, "step": {step}'
    more += "" if own is None else f', "own": {json.dumps(asdict(own))}'
    text = content.removesuffix(b"}") + f"{more}}}".encode()
    with explained(f"{folder} could not be used for a checkpoint"):
        return write_file(folder, f"worker-{rank}", ".json", [memoryview(text)])


@dataclass(frozen=True, slots=True)
class Destination:
    """Folder and contents of a checkpoint to write."""

    folder: Path
    contents: tuple[str, ...]
    step: int = 0
    keep: int = 0
    content: bytes = b""
    """Content of this worker's file."""
    run: str = ""
    """Run of the job, once the job has the lock of the folder."""


def destination(job: SaveJob, rank: int) -> Destination:
    """Return folder and contents of a checkpoint, before the folder is claimed.

    Raises:
        TypeError, ValueError: an argument of the call is wrong.
    """
    if job.states_only:
        return Destination(absolute(job.directory), (STATES,), content=worker_content(None, job.names, rank))
    folder, keep = checkpoint_folder(job.directory, job.step), as_keep(job.keep)
    return Destination(folder, EVERYTHING, as_step(job.step), keep, worker_content(job.state, job.names, rank))


def found_checkpoint(job: LoadJob, rank: int) -> Checkpoint:
    """Return the checkpoint that a call to load asks for.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, or has the names of its keys in another order.
        ValueError: the step is not a count.
    """
    folder = absolute(job.directory)
    if job.values:
        folder = folders.find(folder, None if job.step is None else as_step(job.step))
    elif job.names is None:
        return Checkpoint(folder, 0)
    manifest = read_manifest(folder)
    if STATES in contents_of(job):
        _warn_of_averages(folder, manifest, rank)
    workers = read_workers(folder, manifest)
    if job.names is not None and 0 in workers:
        _require_same_order(folder, workers[0].names, job.names)
    states = {one: content.state for one, content in workers.items()}
    return Checkpoint(folder, manifest.step, states.get(rank), states, manifest.exact, manifest.data)


def _warn_of_averages(folder: Path, manifest: Manifest, rank: int) -> None:
    if manifest.has_averages and rank == 0:
        LOG.warning(
            "the averages of the weights in %s, of an earlier version of kvdist, are dropped; weights and states are"
            " loaded: average on a worker, with torch.optim.swa_utils.AveragedModel",
            folder,
        )


def _require_same_order(folder: Path, saved: Names, present: Names) -> None:
    """Refuse a checkpoint whose keys are positions in a list that had the same names in another order."""
    differing = [key for key in present if saved.get(key) != present[key]]
    if differing and Counter(saved.values()) == Counter(present.values()):
        key = differing[0]
        raise CheckpointError(
            f"{folder} was saved with the parameters in another order: it has {saved.get(key)!r} in the place of"
            f" {present[key]!r}. Give them in the same order in every run, as net.named_parameters() does"
        )


def own_steps(folder: Path) -> int | None:
    """Return the most steps of any worker with local steps, when it saved; None without such workers.

    Raises:
        CheckpointError: a file is damaged.
    """
    workers = read_workers(folder, read_manifest(folder)).values()
    return max((one.own.steps for one in workers if one.own is not None), default=None)


def contents_of(job: LoadJob) -> tuple[str, ...]:
    """Return the contents of a checkpoint that a call to load restores."""
    if not job.values:
        return (STATES,)
    return EVERYTHING if job.states else (WEIGHTS,)


MODE = "local"


@dataclass(frozen=True, slots=True, eq=False)
class HeldArray:
    """Array of a key in this process."""

    key: Key
    shape: Shape
    dtype: DType
    bits: Bits
    """All elements of the key, 1-D."""
    samples: int = 0
    """`SliceImage.samples`."""

    @property
    def saved_key(self) -> SavedKey:
        """Description of the key in a manifest."""
        return SavedKey(self.key, tuple(self.shape), self.dtype.label)

    def saved(self, updater: Updaters | None, contents: tuple[str, ...]) -> SliceImage:
        """Return the slice to write, with `bits` itself as weight."""
        weight = self.bits if WEIGHTS in contents else None
        image = SliceImage(0, self.key, 0, self.bits.size, self.dtype, 0, weight, samples=self.samples)
        if updater is None or STATES not in contents:
            return image
        return image.with_state(updater.state_of(self.key), updater.optimizer)

    def wanted(self, number: int, updater: Updaters | None) -> WantedSlice:
        """Return the slice to read from a checkpoint."""
        wanted = WantedSlice(number, self.key, 0, self.bits.size, self.dtype)
        return wanted.updated_by(_optimizer(updater), Extent(self.key, tuple(self.shape)).row_length)

    def take(self, image: SliceImage, updater: Updaters | None) -> Bits | None:
        """Restore the states in the updater; return the value, which the holder takes over."""
        if updater is not None and image.has_state:
            updater.restore(self.key, image.state)
        return image.weight


@dataclass(frozen=True, slots=True, eq=False)
class HeldTable:
    """Table of a key in this process."""

    block: TableRows
    form: str
    """`SavedKey.form`."""

    @property
    def saved_key(self) -> SavedKey:
        """Description of the key in a manifest."""
        return SavedKey(self.block.key, self.block.shape, self.block.dtype.label, self.form)

    def saved(self, updater: Updaters | None, contents: tuple[str, ...]) -> SliceImage:
        """Return the slice to write, with a copy of the existing rows."""
        return self.block.saved(0, _optimizer(updater), contents)

    def wanted(self, number: int, updater: Updaters | None) -> WantedSlice:
        """Return the slice to read from a checkpoint."""
        return replace(self.block.wanted(_optimizer(updater)), number=number)

    def take(self, image: SliceImage, updater: Updaters | None) -> None:
        """Restore rows and states in place."""
        self.block.load(image, _optimizer(updater))


Held = HeldArray | HeldTable


def _saved_keys(held: Sequence[Held]) -> tuple[SavedKey, ...]:
    return tuple(one.saved_key for one in held)


def _description(updater: Updaters | None) -> Mapping[str, Any] | None:
    return None if updater is None else updater.optimizer.describe()


def _optimizer(updater: Updaters | None) -> Optimizer | None:
    return None if updater is None else updater.optimizer


T = TypeVar("T")


class Workers(Protocol):
    """Workers that exchange arrays: the backend of a store, or its ranks."""

    rank: int
    num_workers: int

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        """See `Backend.reduce`."""


RANKS = 4096
"""Ranks that `gather` tells apart, at least: workers that join a job have higher ranks than those of its start."""


def gather(workers: Workers, content: bytes) -> dict[int, bytes]:
    """Return the bytes of every live worker, by rank. Every worker must call it.

    Each worker adds its bytes to its row of a table, and zeros to the rows of the others.
    """
    sizes = np.zeros(max(RANKS, workers.num_workers), np.int64)
    sizes[workers.rank] = len(content) + 1
    (sizes,) = workers.reduce([sizes], Reduction.SUM)
    ranks = np.flatnonzero(sizes).tolist()
    rows = np.zeros((len(ranks), 1 << int(sizes.max()).bit_length()), np.uint8)  # few widths, so few keys
    rows[ranks.index(workers.rank), : len(content) + 1] = np.frombuffer(content + b"\1", np.uint8)
    (rows,) = workers.reduce([rows], Reduction.SUM)
    ends = sizes[ranks] - 1
    # A row without its last byte is that of a worker that was lost between the two sums.
    return {rank: row[:end].tobytes() for rank, end, row in zip(ranks, ends, rows, strict=True) if row[end]}


class WorkerSaving(Saving):
    """Checkpoints of workers that hold the same values: the first writes them, each adds its `state`, and all wait.

    All take part in every stage, so a failure on any worker fails on all.

    Args:
        workers: workers that save together; None for a single process.
        held: returns the keys.
        updater: returns the updater with their states.
    """

    def __init__(
        self, workers: Workers | None, held: Callable[[], Sequence[Held]], updater: Callable[[], Updaters | None]
    ) -> None:
        super().__init__()
        self._workers = workers
        self.rank = 0 if workers is None else workers.rank
        self._held = held
        self._updater = updater
        self._locks = Locks()
        self.position: Callable[[], Mapping[str, Any] | None] = lambda: None
        """Function for the position of this process in its data."""

    def save(self, job: SaveJob) -> CheckpointFuture:
        """Write a checkpoint before returning. A failure after the claim of the folder is in the future.

        Raises:
            CheckpointError: the folder cannot be claimed, or the previous checkpoint failed and that was not read; for
                states alone, also any later failure.
        """

        def checked() -> Destination:
            if not job.states_only:
                self._raise_failed("the checkpoint before this one")
            return destination(job, self.rank)

        place, statements = self._together(
            checked,
            lambda place: f"saves {place.folder} ({', '.join(place.contents)}), keep {place.keep or 'all'}",
            is_equal=True,
        )
        first = min(statements)
        _, runs = self._together(lambda: self._claim(place.folder) if self.rank == first else "", str)
        place = replace(place, run=runs[first])
        future = CheckpointFuture(place.folder)
        if job.states_only:
            self._write(place, first)
            future.finish(None)
            return future
        self._last = future
        try:
            self._write(place, first)
        except CheckpointError as error:
            LOG.error("no checkpoint was written: %s", error)
            future.finish(error)
        else:
            future.finish(None)
        return future

    def _claim(self, folder: Path) -> str:
        """Lock the directory of this folder, check that this process can write to it, and return the run.

        Raises:
            CheckpointError: another job saves to the directory, or it is not writable. No files are left.
        """
        run = perform(LockFolder(str(folder)), self._locks)
        assert isinstance(run, str)
        try:
            perform(CheckFolder(str(folder), "server-0", run, 0), self._locks)
        except CheckpointError:
            perform(UnlockFolder(str(folder)), self._locks)
            raise
        return run

    def _write(self, place: Destination, first: int) -> None:
        """Write the file of every worker, then the rest on the first worker. A failure leaves no files."""
        folder = place.folder

        def write_own() -> str:
            if not place.content:
                return ""
            require_run(Path(directory_of(str(folder))), place.run)
            return json.dumps(asdict(write_worker_file(folder, self.rank, place.content, place.run, place.step)))

        try:
            _, records = self._together(write_own, str)
            files = [FileRecord(**json.loads(record)) for record in records.values() if record]
            self._together(lambda: self._write_rest(place, files) if self.rank == first else None)
        except CheckpointError:
            if self.rank == first:  # by now all have written their files or failed
                with contextlib.suppress(CheckpointError):  # the error of the attempt matters more
                    perform(Sweep(str(folder)), self._locks)
            raise

    def _write_rest(self, place: Destination, files: Sequence[FileRecord]) -> None:
        """Write the values that all workers hold, and the manifest."""
        held, updater = self._held(), self._updater()
        if not held:
            raise ValueError("the store has no keys to save: call init first")
        folder, contents, run, step = str(place.folder), place.contents, place.run, place.step
        slices = tuple(one.saved(updater, contents) for one in held)
        shard = perform(WriteShard(folder, "server-0", slices, run, step), self._locks)
        assert isinstance(shard, FileRecord)
        keys, description, position = _saved_keys(held), _description(updater), self.position()
        manifest = Manifest(step, contents, MODE, True, description, 1, 1, keys, (shard, *files), run, position)
        perform(WriteManifest(folder, manifest, place.keep), self._locks)

    def close(self, wait: bool = True) -> None:
        """Release the directories, so that other jobs can save to them.

        Raises:
            CheckpointError: the last checkpoint has failed, its future was not read, and `wait` is set.
        """
        self._locks.close()
        if wait:
            self._raise_failed("the last checkpoint")

    def load(self, job: LoadJob) -> tuple[Checkpoint, list[Bits | None]]:
        """Read on all workers; if all succeed, restore tables and states, and return the values of arrays."""
        checkpoint, held, found = self.read(job)
        return checkpoint, self.restore(held, found)

    def read(self, job: LoadJob) -> tuple[Checkpoint, Sequence[Held], Sequence[SliceImage]]:
        """Read on all workers, or fail on all, without changing anything: first part of `load`."""
        held, contents = self._held(), contents_of(job)

        def read() -> tuple[Checkpoint, Sequence[SliceImage]]:
            checkpoint = found_checkpoint(job, self.rank)
            folder, updater, locks = str(checkpoint.folder), self._updater(), Locks()  # reading takes no lock
            manifest = perform(ReadManifest(folder), locks)
            assert isinstance(manifest, Manifest)
            manifest.require(_saved_keys(held), _description(updater), contents)
            wanted = tuple(one.wanted(number, updater) for number, one in enumerate(held))
            found = perform(ReadShards(folder, wanted, contents), locks)
            assert isinstance(found, tuple)
            return checkpoint, found

        (checkpoint, found), _ = self._together(read, lambda result: f"loads {result[0].folder}", is_equal=True)
        return checkpoint, held, found

    def restore(self, held: Sequence[Held], found: Sequence[SliceImage]) -> list[Bits | None]:
        """Restore tables and states, and return the values of arrays: second part of `load`."""
        updater = self._updater()
        return [one.take(found_slice, updater) for one, found_slice in zip(held, found, strict=True)]

    def write_own(self, folder: Path, run: str, step: int, steps: int) -> OwnStates:
        """Write the states of this worker's local optimizer, after `steps` steps, for this step of this run.

        Raises:
            CheckpointError: the disk is full, for example.
        """
        updater = self._updater()
        assert updater is not None
        slices = [one.saved(updater, (STATES,)) for one in self._held()]
        with explained(f"{folder} could not be used for a checkpoint"):
            record = write_slices(folder, f"worker-{self.rank}-states", slices, run, step)
        return OwnStates(record, updater.optimizer.describe(), steps)

    def load_own(self, folder: Path) -> None:
        """Restore the states that the worker of this rank wrote, or begin without states if none fit.

        Raises:
            CheckpointError: a file is damaged, on any worker.
        """
        held, updater = self._held(), self._updater()
        assert updater is not None

        def read() -> tuple[Sequence[SliceImage], str]:
            manifest = read_manifest(folder)
            workers = read_workers(folder, manifest)
            own = workers[self.rank].own if self.rank in workers else None
            there = [rank for rank, one in workers.items() if one.own is not None]
            if own is None:
                return (), f"it has those of worker {', '.join(map(str, there))}" if there else "it has none"
            parts = replace(manifest, files=(own.file,), optimizer=own.optimizer, contents=(STATES,))
            try:
                parts.require(_saved_keys(held), _description(updater), (STATES,))
            except CheckpointError as error:
                return (), str(error)
            shards = Shards(folder, parts)
            return [shards.read(one.wanted(i, updater), (STATES,)) for i, one in enumerate(held)], ""

        (found, obstacle), _ = self._together(read)
        if obstacle:
            for one in held:
                updater.restore(one.saved_key.key, None)
            text = "the local optimizer of worker %d begins anew: %s has no states for it (%s)"
            LOG.warning(text, self.rank, folder, obstacle)
        for one, read_slice in zip(held, found, strict=False):
            one.take(read_slice, updater)

    def saved_optimizer(self, job: LoadJob) -> Optimizer | None:
        """Return the optimizer whose states were saved."""
        return self._together(lambda: _saved_optimizer(job, self.rank))[0]

    def _together(
        self, do: Callable[[], T], statement: Callable[[T], str] = lambda _: "", is_equal: bool = False
    ) -> tuple[T, dict[int, str]]:
        """Call `do` on all workers; fails on all if it fails on any.

        Returns:
            The result of `do`, and the statement of every worker about its result, by rank.

        Raises:
            CheckpointError: `do` failed on another worker. The failed worker raises the error of `do`.
            InitMismatch: `is_equal` is set, and statements differ.
        """
        failure: Exception | None = None
        try:
            result = do()
            text = f"+{statement(result)}"
        except (CheckpointError, TypeError, ValueError) as error:
            failure, text = error, f"-{error}"
        content = text.encode(errors="backslashreplace")
        gathered = {self.rank: content} if self._workers is None else gather(self._workers, content)
        if failure is not None:
            raise failure
        texts = {rank: one.decode() for rank, one in gathered.items()}
        failures = [f"worker-{rank} failed: {one[1:]}" for rank, one in texts.items() if one.startswith("-")]
        if failures:
            raise CheckpointError("; ".join(failures))
        statements = {rank: one[1:] for rank, one in texts.items()}
        if is_equal and len(set(statements.values())) > 1:
            raise InitMismatch(
                f"the workers do not agree. {who_says_what(statements.items())}. Every worker must run the same program"
                " on the same model"
            )
        return result, statements


def _saved_optimizer(job: LoadJob, rank: int) -> Optimizer | None:
    folder = absolute(job.directory)
    manifest = read_manifest(folder)
    if job.names is None:  # else `found_checkpoint` warns
        _warn_of_averages(folder, manifest, rank)
    return None if manifest.optimizer is None else chosen_optimizer(manifest.optimizer)


Submit = Callable[[Callable[[int], Request], Finish | None], Future[Any]]
Wait = Callable[[Future[Any]], Any]

NO_FILE = SavedFile("", 0, "")
_NOWHERE = Path("/nowhere")
"""Placeholder where a worker fails before it knows the folder."""


class ServerSaving(Saving):
    """Checkpoints of a store whose servers write the values.

    Args:
        number: number of the store.
        rank: rank of this worker.
        submit: submits a request to the worker.
        result_of: waits for a future.
        hold: keeps the process in the cluster until a future is done.
        forget_shown: drops shared results, whose values change.
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
        super().__init__()
        self._number = number
        self._rank = rank
        self._submit = submit
        self._result_of = result_of
        self._hold = hold
        self._forget_shown = forget_shown
        self._claimed: dict[Path, str] = {}
        """Directory → run of its checkpoints, if this store has saved to it."""
        self._seen: set[Path] = set()
        """Directories that are the same folder in this process as on the scheduler."""

    def claim(self, keys: Sequence[KeyInfo], job: SaveJob) -> None:
        """Require that checkpoints can be saved into this directory, as the first `save` does.

        Raises:
            CheckpointError: they cannot. A refusal fails the checkpoint on all, so the next claim is checked again.
        """
        self.wait()
        place = Destination(_NOWHERE, EVERYTHING)
        try:
            place = Destination(checkpoint_folder(job.directory, job.step), EVERYTHING)
            self._claim(place)
        except (CheckpointError, TypeError, ValueError) as error:
            self._begin(keys, place, NO_FILE, str(error)).abandon()
            raise

    def save(self, keys: Sequence[KeyInfo], job: SaveJob) -> Future[Path]:
        """Take part in a checkpoint. A failure of this worker fails on all, or they would wait for it."""
        if not keys:
            raise ValueError("the store has no keys to save: call init first")
        self.wait()
        place, file = Destination(_NOWHERE, EVERYTHING), NO_FILE
        try:
            self._raise_failed("the checkpoint before this one")
            place = self._claim(destination(job, self._rank))
            if place.content and place.run:
                own = None if job.write_own is None else job.write_own(place.folder, place.run, place.step)
                record = write_worker_file(place.folder, self._rank, place.content, place.run, place.step, own)
                file = SavedFile(record.name, record.nbytes, record.sha256)
        except (CheckpointError, TypeError, ValueError) as error:
            self._begin(keys, place, NO_FILE, str(error)).abandon()
            raise
        return self._begin(keys, place, file) if place.run else self._repeated(place)

    @staticmethod
    def _repeated(place: Destination) -> CheckpointFuture:
        """Return the checkpoint of the other workers, unchanged, on a rejoined worker before its first step.

        Raises:
            CheckpointError: the others have not saved it.
        """
        if not (place.folder / NAME).is_file():
            raise CheckpointError(
                f"this worker has joined later, and the others have not saved {place.folder}: it saves with them after"
                " its first step, not before"
            )
        future = CheckpointFuture(place.folder)
        future.finish(None)
        return future

    def _claim(self, place: Destination) -> Destination:
        """Return the destination with its run, once the directory is locked for the job and writable on all servers; a
        rejoined worker before its first step gets no run."""
        directory = Path(directory_of(str(place.folder)))
        run = self._claimed.get(directory)
        if run is None:
            where = (self._number, str(place.folder), place.contents)
            run = self._result_of(self._submit(lambda request: ClaimFolder(request, *where), None))
            if not run:  # a rejoined worker before its first step
                return place
            self._claimed[directory] = run
        if place.content and directory not in self._seen:
            require_run(directory, run)
            self._seen.add(directory)
        return replace(place, run=run)

    def _begin(
        self, keys: Sequence[KeyInfo], place: Destination, file: SavedFile, failure: str = ""
    ) -> CheckpointFuture:
        where = (str(place.folder), place.contents, place.run, place.step, place.keep)

        def make(request: int) -> Request:
            return SaveStore(request, self._number, *where, file, tuple(keys), failure)

        submitted = self._submit(make, None)
        future = self._last = CheckpointFuture(place.folder)
        self._hold(future.settled)
        submitted.add_done_callback(lambda done: self._finish(future, done, failure))
        return future

    def load(self, job: LoadJob) -> Checkpoint:
        """See `KVStore.load_checkpoint`."""
        contents = contents_of(job)
        with self._told_to_all(contents):
            checkpoint = found_checkpoint(job, self._rank)
        self._load(checkpoint.folder, contents)
        return checkpoint

    def saved_optimizer(self, job: LoadJob) -> Optimizer | None:
        """Return the optimizer whose states were saved."""
        with self._told_to_all((STATES,)):
            return _saved_optimizer(job, self._rank)

    @contextlib.contextmanager
    def _told_to_all(self, contents: tuple[str, ...]) -> Iterator[None]:
        """Fail the load on all workers if it fails on this worker, or the others would wait for it."""
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
        """Wait until the last checkpoint is complete or has failed, without reading the failure."""
        if self._last is not None:
            self._result_of(self._last.settled)

    def close(self, wait: bool) -> None:
        """Report an unread failure if `wait` is set; see `KVStore.close`.

        Raises:
            CheckpointError: the last checkpoint has failed, and its future was not read.
        """
        if wait:
            self._raise_failed("the last checkpoint")

    def _finish(self, future: CheckpointFuture, done: Future[Any], failure: str) -> None:
        error = done.exception()
        if self._rank == 0 and error is not None and not failure:  # this worker has raised that itself
            LOG.error("no checkpoint was written: %s", error)
        future.finish(error)


Ask: TypeAlias = Callable[[Callable[[int], Request]], Any]
"""Function that submits a request to the worker and waits for its result."""


def pull_states(ask: Ask, infos: Sequence[KeyInfo], optimizer: Optimizer) -> list[SliceState | None]:
    """Return the whole state of each key; None for a key that was never updated.

    Raises:
        PushRefused: pushes of this worker are in flight, or the servers have no state.
    """
    numbers = [np.empty((len(info.slices), 1 + len(optimizer.initial_scalars))) for info in infos]
    _move_states(ask, RunKind.PULL_STATE, infos, [(i, NUMBERS, own) for i, own in enumerate(numbers)])
    states: list[SliceState | None] = []
    for info, own in zip(infos, numbers, strict=True):
        # All slices have had the same number of updates; in asynchronous stores the highest counts.
        count, *scalars = own[own[:, 0].argmax()].tolist()
        states.append(_empty_state(info, optimizer, int(count), tuple(scalars)) if count and info.size else None)
    _move_states(ask, RunKind.PULL_STATE, infos, _state_arrays(states))
    return states


def pull_totals(ask: Ask, infos: Sequence[KeyInfo]) -> tuple[int, int]:
    """Return the most examples and updates behind any slice of these keys; updates are -1 without rounds."""
    found = [np.empty((len(info.slices), 2)) for info in infos]
    _move_states(ask, RunKind.PULL_STATE, infos, [(i, TOTALS, own) for i, own in enumerate(found)])
    samples, updates = np.concatenate(found).max(axis=0).tolist()
    return int(samples), int(updates)


def replace_states(
    ask: Ask, infos: Sequence[KeyInfo], states: Sequence[SliceState | None], optimizer: Optimizer
) -> None:
    """Replace the states on the servers; None is the state before any update."""
    numbers = []
    for i, (info, state) in enumerate(zip(infos, states, strict=True)):
        row = [0.0, *optimizer.initial_scalars.values()] if state is None else [state.count, *state.scalars]
        numbers.append((i, NUMBERS, np.tile(np.array(row, np.float64), (len(info.slices), 1))))
    _move_states(ask, RunKind.REPLACE_STATE, infos, numbers)
    _move_states(ask, RunKind.REPLACE_STATE, infos, _state_arrays(states))


def _empty_state(info: KeyInfo, optimizer: Optimizer, count: int, scalars: tuple[float, ...]) -> SliceState:
    size = state_size(optimizer, info.size, Extent(info.key, info.shape))
    arrays = tuple(np.empty(size, info.dtype.accumulate) for _ in optimizer.state_names)
    master = np.empty(size, info.dtype.accumulate) if has_master(optimizer, info.dtype) else None
    return SliceState(count, arrays, scalars, master)


def _state_arrays(states: Sequence[SliceState | None]) -> Iterator[tuple[int, int, Bits]]:
    """Yield (index of the key, part, whole array) of all states."""
    for i, state in enumerate(states):
        if state is not None:
            yield from ((i, part, array) for part, array in parts_of_state(state).items() if part != NUMBERS)


def _move_states(ask: Ask, kind: RunKind, infos: Sequence[KeyInfo], parts: Any) -> None:
    runs = [run for i, part, array in parts for run in _state_runs(kind, i, infos[i], part, array)]
    verb = "pull" if kind is RunKind.PULL_STATE else "replacement"
    label = f"{verb} of the optimizer's state of {named(infos)}"
    ask(lambda number: Transfer(number, kind, label, runs))


def _state_runs(kind: RunKind, index: int, info: KeyInfo, part: int, array: Bits) -> Iterator[Run]:
    """Yield a run for each slice; small runs are still sent together."""
    dtype = part_dtype(part, info.dtype)
    for place, piece in enumerate(info.slices):
        if part in COUNTS:
            own = array[place]
        else:
            row = max(1, info.size // max(1, array.size))  # more than 1 for optimizers with states by rows
            own = array[piece.start // row : piece.stop // row]
        plan = RunPlan(
            piece.server,
            np.array([piece.number], np.uint32),
            np.array([own.size], np.uint32),
            np.array([dtype], np.uint8),
            (RunSlice(index, 0, own.size, 0),),
            padded(own.nbytes),
            {piece.number: 0},
            np.array([index], np.intp),
        )
        payload = None if kind is RunKind.PULL_STATE else padded_bytes(own)
        yield Run(plan, payload, (own,) if payload is None else (), states=np.array([part], np.uint8))


def padded_bytes(array: Bits) -> memoryview:
    """Return a copy of an array, padded for a payload."""
    memory = np.zeros(padded(array.nbytes), np.uint8)
    memory[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    return memory.data
