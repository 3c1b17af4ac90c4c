"""What the core knows of checkpoints: what is saved and read, and what a process is asked to do with its disk.

Nothing here touches a file. The machines of scheduler and server ask for a `DiskTask` by an effect and get its result
by an event; between the two the node calls `kvdist.checkpoint.folders.perform` on a thread of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
"""(k,) row ids of a whole table, strictly ascending."""

WEIGHTS, STATES = "weights", "states"
EVERYTHING = (WEIGHTS, STATES)
"""What a checkpoint can hold. Averages of the weights are states."""

SERVER_FILE = re.compile(r"server-[0-9]{1,9}-[0-9a-f]{1,64}\.safetensors")
WORKER_FILE = re.compile(r"worker-([0-9]{1,9})-[0-9a-f]{1,64}\.json")
OWN_FILE = re.compile(r"worker-[0-9]{1,9}-states-[0-9a-f]{1,64}\.safetensors")
"""The states of a worker's own optimizer, which its `WORKER_FILE` names."""
RUN = re.compile(r"[0-9a-f]{16}")
"""What tells jobs apart: drawn by each."""

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a file without opening it.

    Attributes:
        name: within its folder.
        nbytes: its length.
        sha256: of its content, 64 hexadecimal digits.
    """

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class SavedKey:
    """A key as every worker knows it.

    Attributes:
        form: "" for an array, `ROWS` for a table whose rows all exist, or what the rows of a lazy one begin as.
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
        """Whether only some of its rows exist."""
        return self.form not in ("", ROWS)

    def fits(self, other: SavedKey) -> bool:
        """Whether one can go on from the other. All elements of an array are there, and all of a table of `ROWS`."""
        ours, theirs = (one.form if one.is_lazy else "" for one in (self, other))
        return (self.key, self.shape, self.dtype, ours) == (other.key, other.shape, other.dtype, theirs)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint has.

    Attributes:
        step: the user's number of it; 0 for states that were saved alone.
        run: of the job that wrote it, the same in each of its files; empty if an older kvdist wrote it.
        contents: of `WEIGHTS` and `STATES`.
        mode: of the store, ``sync``, ``async`` or ``local``.
        exact: whether it is one moment of the whole store. In asynchronous mode it is not: each slice has all pushes
            that preceded the call on any worker, and perhaps some later ones.
        optimizer: its description; None for a store without one.
        num_workers, num_servers: who wrote it. Any number can read it.
        keys: in the order of their initialisation.
        files: all of them.
        data: where the workers were in their data, as numbers and lists; None where nothing was leased.
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
    def shards(self) -> list[FileRecord]:
        """The files with arrays."""
        return [file for file in self.files if not WORKER_FILE.fullmatch(file.name)]

    def is_of(self, files: Iterable[FileRecord | SavedFile]) -> bool:
        """Whether it is of the attempt that has made these files: no other makes shards of the same names."""
        return not {file.name for file in self.shards}.isdisjoint(file.name for file in files)

    @property
    def workers(self) -> dict[int, FileRecord]:
        """Rank → what that worker wanted to have back."""
        found = [(WORKER_FILE.fullmatch(file.name), file) for file in self.files]
        return {int(match[1]): file for match, file in found if match}

    def require_part(self, path: object, run: object, step: object) -> None:
        """Whether a file was written for this checkpoint, by what it says of itself.

        Raises:
            CheckpointError: it was written by another job, or for another step.
        """
        if self.run and (run, str(step)) != (self.run, str(self.step)):
            raise CheckpointError(
                f"{path} does not belong to this checkpoint: it was written by run {run!r:.40} for step {step!r:.40},"
                f" the manifest by run {self.run!r} for step {self.step}. Two jobs have saved into the same folder, or"
                " files of two checkpoints were mixed"
            )

    def require(self, keys: Iterable[SavedKey], optimizer: Mapping[str, Any] | None, contents: Sequence[str]) -> None:
        """Whether a store of these keys and this optimizer can take in these contents.

        Raises:
            CheckpointError: it cannot; says what differs.
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
    """What must be equal for states to fit."""
    if description is None:
        return None
    optimizer = chosen_optimizer(description)
    return optimizer.name, optimizer.state_names, tuple(optimizer.initial_scalars), optimizer.multi_precision


def chosen_optimizer(description: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a manifest.

    Raises:
        CheckpointError: this process does not know its name, or not with these numbers.
    """
    try:
        return from_description(dict(description))
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
    """The step of a folder of this name; None for another name."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match else None


def directory_of(folder: str) -> str:
    """The directory of checkpoints in which this folder lies; itself, if it is not of a step."""
    directory, _, name = folder.rstrip("/").rpartition("/")
    if step_of(name) is None:
        return folder
    return directory or ("/" if folder.startswith("/") else ".")


@dataclass(frozen=True, slots=True, eq=False)
class SavedSlice:
    """One slice at the moment of a checkpoint.

    Attributes:
        key: its key.
        start: its first element.
        dtype: element type.
        version: how many rounds had been closed.
        weight: its value; None if only states are saved.
        states: name → array, of `DType.accumulate`.
        updates: how many updates the states have had.
        scalars: numbers beside the arrays.
        master: the float32 weight behind a half one.
        ids: of a lazy table the rows that exist: all arrays are those of these rows; None for what is whole.
        initializer: how its other rows begin, as text.
        samples: of how many examples an array is made, as far as that was said.
    """

    key: int | str
    start: int
    count: int
    dtype: DType
    version: int
    weight: Bits | None
    states: Mapping[str, Bits] = field(default_factory=dict)
    updates: int = 0
    scalars: tuple[float, ...] = ()
    master: Bits | None = None
    ids: Ids | None = None
    initializer: str = ""
    samples: int = 0

    def with_state(self, state: SliceState | None, optimizer: Optimizer | None) -> SavedSlice:
        """Return the slice with the state of its optimizer; without a state, the slice itself."""
        if state is None or optimizer is None:
            return self
        states = dict(zip(optimizer.kept_names, state.arrays, strict=True))
        return replace(self, states=states, updates=state.count, scalars=state.scalars, master=state.master)


@dataclass(frozen=True, slots=True, eq=False)
class WantedSlice:
    """One slice that a server keeps, to be filled.

    Attributes:
        number: the server's name for it.
        row: elements of the key for each element of a state: more than 1 only for rules by rows.
        lazy_row: elements of a row of a lazy table; 0 for what is whole.
    """

    number: int
    key: int | str
    start: int
    count: int
    dtype: DType
    state_names: tuple[str, ...] = ()
    """`Optimizer.kept_names`."""
    row: int = 1
    has_master: bool = False
    has_state: bool = False
    """Whether an optimizer updates it."""
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
        names = optimizer.kept_names
        return replace(self, state_names=names, row=row, has_master=master, has_state=True, from_weight=from_weight)

    @property
    def stop(self) -> int:
        """The end of its elements."""
        return self.start + self.count


@dataclass(frozen=True, slots=True, eq=False)
class ReadSlice:
    """What was found for it."""

    number: int
    weight: Bits | None
    state: SliceState | None
    is_fresh: bool = False
    """States were asked for, and it was never updated."""
    ids: Ids | None = None
    """As of `SavedSlice`."""
    initializer: str = ""
    samples: int = 0


# Tasks.


@dataclass(frozen=True, slots=True, eq=False)
class LockFolder:
    """Keep other jobs from saving where this checkpoint is to lie; gives the run, which its files are to name.

    A process that takes the place of one that was lost has that one's `run`; empty for one of its own.
    """

    folder: str
    run: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class UnlockFolder:
    """Let other jobs save there; gives None."""

    folder: str


@dataclass(frozen=True, slots=True, eq=False)
class CheckFolder:
    """See whether this process could write a part of this size of a checkpoint of this run; gives None."""

    folder: str
    stem: str
    run: str
    nbytes: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteShard:
    """Write what a server keeps, for this step of this run; gives a `FileRecord`."""

    folder: str
    stem: str
    slices: tuple[SavedSlice, ...]
    run: str
    step: int


@dataclass(frozen=True, slots=True, eq=False)
class WriteManifest:
    """Make the folder a checkpoint; `keep` of them stay in the directory, 0 keeps all. Takes the lock of the
    directory, if it was removed. Gives None."""

    folder: str
    manifest: Manifest
    keep: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class ReadManifest:
    """Read what a checkpoint has; gives a `Manifest`."""

    folder: str


@dataclass(frozen=True, slots=True, eq=False)
class ReadShards:
    """Read what a server is to keep; gives a tuple of `ReadSlice`."""

    folder: str
    wanted: tuple[WantedSlice, ...]
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Sweep:
    """Remove what a failed attempt has left in the folder, or all of a checkpoint; gives the manifest that stays."""

    folder: str
    whole: bool = False


DiskTask = LockFolder | UnlockFolder | CheckFolder | WriteShard | WriteManifest | ReadManifest | ReadShards | Sweep
DiskResult = FileRecord | Manifest | tuple[ReadSlice, ...] | str | None
