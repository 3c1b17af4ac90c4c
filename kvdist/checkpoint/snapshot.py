"""Checkpoint data that the core handles, and disk tasks that it orders. No file access.

The machines of scheduler and server order a `DiskTask` by an effect and receive its result by an event; the node calls
`kvdist.checkpoint.folders.perform` on a separate thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import from_description
from kvdist.optimizer.states import SliceState, has_master
from kvdist.protocol.messages import ROWS, SavedFile

Bits = npt.NDArray[np.generic]
"""A 1-D array of `DType.storage` elements."""
Ids = npt.NDArray[np.int64]
"""(k,) row ids in the whole table, strictly ascending."""

WEIGHTS, STATES = "weights", "states"
EVERYTHING = (WEIGHTS, STATES)
"""Parts that a checkpoint can have."""
DROPPED_HYPERPARAMETER, DROPPED_STATE = "average_half_life", "average"
"""Earlier versions kept averages of the weights, as the last of the states; loading drops them."""

SERVER_FILE = re.compile(r"server-[0-9]{1,9}-[0-9a-f]{1,64}\.safetensors")
WORKER_FILE = re.compile(r"worker-([0-9]{1,9})-[0-9a-f]{1,64}\.json")
OWN_FILE = re.compile(r"worker-[0-9]{1,9}-states-[0-9a-f]{1,64}\.safetensors")
"""File with the states of an optimizer that a worker runs itself; the worker's `WORKER_FILE` names it."""
RUN = re.compile(r"[0-9a-f]{16}")
"""Identifier of a job, drawn at random."""

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file as a manifest records it.

    Attributes:
        name: name in its folder.
        nbytes: length.
        sha256: SHA-256 of its content, 64 hexadecimal digits.
    """

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedKey:
    """A key as every worker knows it.

    Attributes:
        form: "" for an array, `ROWS` for a table whose rows all exist, or the initializer of a lazy table as text.
    """

    key: int | str
    shape: tuple[int, ...]
    dtype: str
    form: str = ""

    def __str__(self) -> str:
        kind = f", as a table of rows that begin as {self.form}" if self.is_lazy else ""
        return f"shape {self.shape} and dtype {self.dtype}{kind}"

    @property
    def is_lazy(self) -> bool:
        """Whether this is a lazy table, of which only some rows exist."""
        return self.form not in ("", ROWS)

    def fits(self, other: SavedKey) -> bool:
        """Return whether values of either key fit the other. Arrays and `ROWS` tables are alike: all their elements
        exist."""
        ours, theirs = (one.form if one.is_lazy else "" for one in (self, other))
        return (self.key, self.shape, self.dtype, ours) == (other.key, other.shape, other.dtype, theirs)


@dataclass(frozen=True, slots=True)
class Manifest:
    """Manifest of a checkpoint.

    Attributes:
        step: number from the user; 0 for states that were saved alone.
        run: run of the job that wrote it, also in each of its files; '' from older versions of kvdist.
        contents: parts: `WEIGHTS`, `STATES`.
        mode: mode of the store: ``sync``, ``async`` or ``local``.
        exact: whether it is a single moment of the whole store. In asynchronous mode it is not: each slice has all
            pushes before the call on any worker, and perhaps later pushes.
        optimizer: description of the optimizer; None for a store without an optimizer.
        num_workers, num_servers: size of the cluster that wrote it. A cluster of any size can read it.
        keys: keys in the order of their initialisation.
        files: files of the servers and the workers.
        data: positions of the workers in their data, as numbers and lists; None if no examples were leased.
    """

    step: int
    contents: tuple[str, ...]
    mode: str
    exact: bool
    optimizer: Mapping[str, Any] | None
    num_workers: int
    num_servers: int
    keys: tuple[SavedKey, ...]
    files: tuple[FileRecord, ...]
    run: str = ""
    data: Mapping[str, Any] | None = None

    @property
    def has_averages(self) -> bool:
        """Whether an earlier version has saved averages of the weights, which loading drops."""
        return (self.optimizer or {}).get(DROPPED_HYPERPARAMETER) is not None

    @property
    def shards(self) -> list[FileRecord]:
        """Files with arrays."""
        return [file for file in self.files if not WORKER_FILE.fullmatch(file.name)]

    def is_of(self, files: Iterable[FileRecord | SavedFile]) -> bool:
        """Return whether these files are of the same attempt to save: different attempts have shards of different
        names."""
        return not {file.name for file in self.shards}.isdisjoint(file.name for file in files)

    @property
    def workers(self) -> dict[int, FileRecord]:
        """Rank → file of the worker."""
        found = [(WORKER_FILE.fullmatch(file.name), file) for file in self.files]
        return {int(match[1]): file for match, file in found if match}

    def require_part(self, path: object, run: object, step: object) -> None:
        """Check that a file was written for this checkpoint, by the run and the step in the file.

        Raises:
            CheckpointError: the file was written by another job, or for another step.
        """
        if self.run and (run, str(step)) != (self.run, str(self.step)):
            raise CheckpointError(
                f"{path} does not belong to this checkpoint: it was written by run {run!r:.40} for step {step!r:.40},"
                f" the manifest by run {self.run!r} for step {self.step}. Two jobs have saved into the same folder, or"
                " files of two checkpoints were mixed"
            )

    def require(self, keys: Iterable[SavedKey], optimizer: Mapping[str, Any] | None, contents: Sequence[str]) -> None:
        """Check that a store with these keys and this optimizer can load these contents.

        Raises:
            CheckpointError: it cannot; the message has the difference.
        """
        missing = [one for one in contents if one not in self.contents]
        if missing:
            raise CheckpointError(f"the checkpoint has no {' and no '.join(missing)}, only {', '.join(self.contents)}")
        saved, present = ({key.key: key for key in some} for some in (self.keys, keys))
        if new := [key for key in present if key not in saved]:
            raise CheckpointError(f"the checkpoint has no {_listed(new)}, which this store has")
        if old := [key for key in saved if key not in present]:
            raise CheckpointError(f"the checkpoint has {_listed(old)}, which this store has not: init before you load")
        for key, one in saved.items():
            if not one.fits(present[key]):
                raise CheckpointError(
                    f"{name_of(key)} has {one} in the checkpoint, but {present[key]} in this store: init it as it was"
                )
        if STATES in contents:
            self._require_same_states(optimizer)

    def _require_same_states(self, optimizer: Mapping[str, Any] | None) -> None:
        theirs, ours = _state_of(self.optimizer), _state_of(optimizer)
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint holds the states of {_described(self.optimizer)}, but this store updates with"
                f" {_described(optimizer)}: call set_optimizer with the same rule before, or load with states=False"
            )


def _state_of(description: Mapping[str, Any] | None) -> object:
    """Return the part of a description that must be equal for states to be loaded."""
    if description is None:
        return None
    optimizer = chosen_optimizer(description)
    return optimizer.name, optimizer.state_names, tuple(optimizer.initial_scalars), optimizer.multi_precision


def chosen_optimizer(description: Mapping[str, Any]) -> Optimizer:
    """Return the optimizer that a manifest describes.

    Raises:
        CheckpointError: this process has no optimizer with this name and these options.
    """
    try:
        return from_description({name: one for name, one in description.items() if name != DROPPED_HYPERPARAMETER})
    except ValueError as error:
        raise CheckpointError(f"the optimizer of the checkpoint cannot be used here: {error}") from None


def _listed(keys: Sequence[int | str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"key {', '.join(map(repr, keys[:3]))}{more}"


def _described(description: Mapping[str, Any] | None) -> str:
    if description is None:
        return "no optimizer"
    options = ", ".join(f"{name}={value!r}" for name, value in description.items() if name != "name")
    return f"{description.get('name')}({options})"


def step_of(name: str) -> int | None:
    """Return the step of a folder with this name; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def directory_of(folder: str) -> str:
    """Return the directory of checkpoints that has this folder; the folder itself, if it is not the folder of a
    step."""
    directory, _, name = folder.rstrip("/").rpartition("/")
    if step_of(name) is None:
        return folder
    return directory or ("/" if folder.startswith("/") else ".")


@dataclass(frozen=True, slots=True, eq=False)
class SliceImage:
    """The content of a slice at one moment: what a server copies, a checkpoint has, and a backup is filled with.

    Attributes:
        number: number of the slice on its server; 0 in a process without servers.
        key: key of the slice.
        start: first element.
        count: number of elements.
        dtype: element type.
        version: number of closed rounds; the highest of all pieces, if the image was read from several.
        weight: value; None in an image of states alone.
        has_state: whether the state is part of the image.
        state: state of the optimizer; None before the first update, or if the state is not part of the image.
        state_names: names of the arrays of the state.
        ids: rows of a lazy table that exist, to which all arrays belong; None without a lazy table.
        initializer: initializer of the other rows, as text.
        samples: number of examples behind the value, as far as reported.
    """

    number: int
    key: int | str
    start: int
    count: int
    dtype: DType
    version: int
    weight: Bits | None
    has_state: bool = False
    state: SliceState | None = None
    state_names: tuple[str, ...] = ()
    ids: Ids | None = None
    initializer: str = ""
    samples: int = 0

    def with_state(self, state: SliceState | None, optimizer: Optimizer) -> SliceImage:
        """Return the image with a state of this optimizer; None: before the first update."""
        return replace(self, has_state=True, state=state, state_names=optimizer.state_names)

    @property
    def states(self) -> dict[str, Bits]:
        """Name → array of the state, of `DType.accumulate`."""
        return {} if self.state is None else dict(zip(self.state_names, self.state.arrays, strict=True))


@dataclass(frozen=True, slots=True, eq=False)
class WantedSlice:
    """A slice that a server wants to fill from a checkpoint.

    Attributes:
        number: number of the slice on the server.
        row: elements of the key for each element of a state: more than 1 only for optimizers by rows.
        lazy_row: elements of a row of a lazy table, else 0.
    """

    number: int
    key: int | str
    start: int
    count: int
    dtype: DType
    state_names: tuple[str, ...] = ()
    """Names of the states to restore."""
    row: int = 1
    has_master: bool = False
    has_state: bool = False
    """Whether an optimizer updates the slice."""
    from_weight: bool = False
    """Whether its states begin as copies of the weight, and not all as zeros."""
    lazy_row: int = 0

    def updated_by(self, optimizer: Optimizer | None, row_length: int) -> WantedSlice:
        """Return the slice with the states that an optimizer keeps for it; None: the slice itself.

        Args:
            optimizer: the optimizer of the store.
            row_length: elements of a row of the key.
        """
        if optimizer is None:
            return self
        master, row = has_master(optimizer, self.dtype), max(1, row_length) if optimizer.by_rows else 1
        from_weight = master or bool(optimizer.states_from_weight)
        names = optimizer.state_names
        return replace(self, state_names=names, row=row, has_master=master, has_state=True, from_weight=from_weight)

    @property
    def stop(self) -> int:
        """End of the range of elements."""
        return self.start + self.count


# Tasks.


@dataclass(frozen=True, slots=True, eq=False)
class LockFolder:
    """Lock the directory of a checkpoint against other jobs; returns the run, which its files name.

    `run` is that of a lost process which this process replaces, else ''.
    """

    folder: str
    run: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class UnlockFolder:
    """Unlock the directory for other jobs; returns None."""

    folder: str


@dataclass(frozen=True, slots=True, eq=False)
class CheckFolder:
    """Check that this process could write `nbytes` of a checkpoint of this run; returns None."""

    folder: str
    stem: str
    run: str
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteShard:
    """Write the slices of a server for this step of this run; returns a `FileRecord`."""

    folder: str
    stem: str
    slices: tuple[SliceImage, ...]
    run: str
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteManifest:
    """Write the manifest, which completes the checkpoint, and keep `keep` checkpoints in the directory; 0 keeps all.
    Locks the directory again if its lock was removed. Returns None."""

    folder: str
    manifest: Manifest
    keep: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ReadManifest:
    """Read the manifest of a checkpoint; returns a `Manifest`."""

    folder: str


@dataclass(frozen=True, slots=True, eq=False)
class ReadShards:
    """Read the slices that a server wants; returns a tuple of `SliceImage`."""

    folder: str
    wanted: tuple[WantedSlice, ...]
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Remove the files of failed attempts from a folder, or its `whole` checkpoint; returns the manifest that
    remains."""

    folder: str
    whole: bool = False


DiskTask = LockFolder | UnlockFolder | CheckFolder | WriteShard | WriteManifest | ReadManifest | ReadShards | Sweep
DiskResult = FileRecord | Manifest | tuple[SliceImage, ...] | str | None
