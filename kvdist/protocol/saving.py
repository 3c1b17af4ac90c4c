"""How a store is saved and restored: messages as those of `kvdist.protocol.messages`.

The servers write and read the arrays themselves, in a folder that they share; what travels is who, where and when.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

CHECKPOINT = "checkpoint"
"""How the subject of every hint begins that is about one which is being saved."""
U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file in the folder; `name` is empty for none."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _OfStore:
    """What is asked about a store, and answered."""

    SEQUENCED: ClassVar[bool] = True
    request: int
    store: int


@dataclass(frozen=True, slots=True)
class _FromWorker(_OfStore):
    """What a worker asks about its `counter`-th checkpoint, or its `counter`-th load, which is in this folder."""

    counter: int
    folder: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _ToServer(_OfStore):
    """What a server is to do in this folder."""

    folder: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claim(_FromWorker):
    """Worker → scheduler: the `counter`-th checkpoint of this store will be the first one that I save into the
    directory of this folder. Answered when the job has the lock of the directory and every server can write there."""

    KIND: ClassVar[int] = 43


@dataclass(frozen=True, slots=True)
class Claimed:
    """Scheduler → worker: save there; files say that they are of this run."""

    KIND: ClassVar[int] = 48
    SEQUENCED: ClassVar[bool] = True
    request: int
    run: str


@dataclass(frozen=True, slots=True)
class Prepare(_ToServer):
    """Scheduler → server: checkpoints of this run are going to lie in the directory of this folder; can you write
    there?"""

    KIND: ClassVar[int] = 49
    run: str


@dataclass(frozen=True, slots=True, eq=False)
class Mark:
    """Worker → server: the `counter`-th checkpoint of this store has my first `steps` pushes of each slice.

    It comes before any later push of this worker, to every server, with no slices to one that keeps nothing of the
    store. The slices are those of arrays and of tables alike. Not answered: the server reports to the scheduler.
    """

    KIND: ClassVar[int] = 40
    SEQUENCED: ClassVar[bool] = True
    store: int
    counter: int
    folder: str
    contents: tuple[str, ...]
    """Empty if this worker cannot take part: then nothing is written."""
    run: str
    step: int
    last: bool
    """Whether these are the last of the slices."""
    ids: U32
    steps: U32


@dataclass(frozen=True, slots=True)
class Save(_FromWorker):
    """Worker → scheduler: I have marked my pushes. Answered when the checkpoint is complete, or has failed."""

    KIND: ClassVar[int] = 41
    run: str
    """Empty if the worker has not claimed the folder, and does not take part."""
    step: int
    keep: int
    """How many checkpoints to keep beside each other; 0 = all."""
    num_keys: int
    """How many keys the store has, as this worker knows."""
    file: SavedFile
    """What the worker itself wants to have back."""
    failure: str
    """Why the worker cannot take part; empty if it does."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Server → scheduler: all workers have marked, and my slices are in this file (none if I keep nothing),
    or they are not, because of `failure`. Every server says it once for every checkpoint."""

    KIND: ClassVar[int] = 42
    SEQUENCED: ClassVar[bool] = True
    store: int
    counter: int
    file: SavedFile
    failure: str


@dataclass(frozen=True, slots=True)
class Load(_FromWorker):
    """Worker → scheduler: none of my pushes is under way; restore the store. Answered when every server has."""

    KIND: ClassVar[int] = 44
    failure: str
    """Why the worker cannot take part; empty if it does."""


@dataclass(frozen=True, slots=True)
class Restore(_ToServer):
    """Scheduler → server: read your slices, and wait."""

    KIND: ClassVar[int] = 45


@dataclass(frozen=True, slots=True)
class TakeRestored(_OfStore):
    """Scheduler → server: every server has read what it needs; go on from there."""

    KIND: ClassVar[int] = 46


@dataclass(frozen=True, slots=True)
class DropRestored(_OfStore):
    """Scheduler → server: some server could not read; forget what you have read."""

    KIND: ClassVar[int] = 47
