"""A disk that exists only in memory: works take their time, one after the other, and fail when the seed says so.

All processes of a cluster share one shelf, as they would a folder. What is being written is compared at the end with
what it was at the beginning: whoever goes on training meanwhile must keep its hands off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.snapshot import (
    STATES,
    WEIGHTS,
    DiskResult,
    DiskTask,
    FileRecord,
    LockFolder,
    Manifest,
    ReadManifest,
    ReadShards,
    SliceImage,
    Sweep,
    WantedSlice,
    WriteManifest,
    WriteShard,
)
from kvdist.errors import CheckpointError
from kvdist.optimizer.states import SliceState
from kvdist.runtime.io_thread import Disk, Done
from tests.core.network import Network

WORK_S = 0.04
"""The longest that a work takes, about as long as a few rounds."""
FULL = "the disk is full"
SNAPSHOTS = "/snapshots"

Array = npt.NDArray[Any]


@dataclass(eq=False)
class Shelf:
    """What all disks of a cluster hold."""

    files: dict[str, dict[str, tuple[SliceImage, ...]]] = field(default_factory=dict)
    """Folder → name → slices."""
    manifests: dict[str, Manifest] = field(default_factory=dict)
    """By folder."""
    written: int = 0
    swept: set[str] = field(default_factory=set)
    """Folders of attempts that failed."""
    torn: set[tuple[str, type[DiskTask]]] = field(default_factory=set)
    """Folders of snapshots of which something does not have its checksum any more, and by what it is read."""

    def called_for(self) -> list[str]:
        """The folders of checkpoints that workers have called for: others are snapshots."""
        return [folder for folder in self.manifests if not folder.startswith(SNAPSHOTS)]

    def slices(self, folder: str) -> list[SliceImage]:
        """All slices of a checkpoint, in the order of their elements."""
        files = self.files.get(folder, {})
        found = [one for record in self.manifests[folder].files for one in files[record.name]]
        return sorted(found, key=lambda one: (str(one.key), one.start))

    def gathered(self, folder: str, what: str) -> dict[int | str, Array]:
        """Key → its weights, or the state of this name, put together."""
        parts: dict[int | str, list[Array]] = {}
        ends: dict[int | str, int] = {}
        for one in self.slices(folder):
            assert ends.get(one.key, 0) == one.start, f"key {one.key!r} has a gap or an overlap at {one.start}"
            ends[one.key] = one.start + one.count
            array = one.weight if what == WEIGHTS else one.states[what]
            assert array is not None
            parts.setdefault(one.key, []).append(array)
        return {key: np.concatenate(arrays) for key, arrays in parts.items()}

    def perform(self, work: DiskTask) -> DiskResult:
        """Do a work."""
        folder = self.files.setdefault(work.folder, {})
        match work:
            case LockFolder():
                return "0123456789abcdef"
            case WriteShard():
                self.written += 1
                name = f"{work.stem}-{self.written:016x}.safetensors"
                folder[name] = work.slices
                return FileRecord(name, 8, f"{self.written:064x}")
            case WriteManifest() if self.has(work):
                pass
            case WriteManifest():
                missing = [one.name for one in work.manifest.files if one.name not in folder]
                if missing and work.folder in self.swept:
                    raise CheckpointError(FULL)  # by a scheduler that was killed before it could say so
                assert not missing, f"{missing} are in the manifest of {work.folder} and not there"
                self.manifests[work.folder] = work.manifest
                self.torn = {one for one in self.torn if one[0] != work.folder}
                left = sorted({folder for folder, _ in self.torn} & self.manifests.keys())
                assert not left, f"{left} would stay in the place of good ones"
                self._sweep(work.folder)
                self._prune(work)
            case ReadManifest() if work.folder not in self.manifests:
                raise CheckpointError("there is no manifest")
            case ReadManifest():
                return self.manifests[work.folder]
            case ReadShards():
                return tuple(self._read(work.folder, one, work.contents) for one in work.wanted)
            case Sweep():
                if work.whole:
                    self.manifests.pop(work.folder, None)
                self.swept.add(work.folder)
                self._sweep(work.folder)
                return self.manifests.get(work.folder)
        return None

    def has(self, work: DiskTask) -> bool:
        """Whether this is there already: written by a scheduler that was killed before it could say so."""
        present = self.manifests.get(work.folder)
        return isinstance(work, WriteManifest) and present is not None and present.is_of(work.manifest.files)

    def _prune(self, work: WriteManifest) -> None:
        """Of snapshots as many stay as the folders of a real disk do: the one just written, and the highest others."""
        if work.folder.startswith(SNAPSHOTS):
            others = [one for one in self.manifests if one.startswith(SNAPSHOTS) and one != work.folder]
            for folder in sorted(others, key=lambda one: self.manifests[one].step)[: 1 - work.keep]:
                del self.manifests[folder]

    def _sweep(self, folder: str) -> None:
        named = {file.name for file in self.manifests[folder].files} if folder in self.manifests else set()
        self.files[folder] = {name: one for name, one in self.files[folder].items() if name in named}

    def _read(self, folder: str, wanted: WantedSlice, contents: Sequence[str]) -> SliceImage:
        for one in self.slices(folder):
            if one.ids is not None and (one.key, one.start) == (wanted.key, wanted.start):
                return replace(one, number=wanted.number)
        stretch = slice(wanted.start, wanted.start + wanted.count)
        is_saved = any(one.key == wanted.key for one in self.slices(folder))
        assert is_saved, f"key {wanted.key} is in the manifest of {folder}, and not saved there"
        weight = self.gathered(folder, WEIGHTS)[wanted.key][stretch] if WEIGHTS in contents else None
        state, has_state = None, STATES in contents and wanted.has_state
        if has_state:
            arrays = tuple(self.gathered(folder, name)[wanted.key][stretch].copy() for name in wanted.state_names)
            counts = [one.state.count for one in self.slices(folder) if one.key == wanted.key and one.state is not None]
            state = SliceState(max(counts, default=0), arrays)
        version = max(one.version for one in self.slices(folder) if one.key == wanted.key)
        where = (wanted.number, wanted.key, wanted.start, wanted.count, wanted.dtype)
        return SliceImage(*where, version, weight, has_state, state, wanted.state_names)


class SimulatedDisk(Disk):
    """The disk of one process.

    Args:
        network: the clock, and chance.
        shelf: what is there.
        full: how probable it is that a work fails.
        torn: how probable it is that a snapshot turns out to be torn when it is read.
        may_be_torn: whether one of this folder may be, as another one can be read in its place.
    """

    def __init__(
        self, network: Network, shelf: Shelf, full: float, torn: float, may_be_torn: Callable[[str], bool]
    ) -> None:
        self._network = network
        self._shelf = shelf
        self._full = full
        self._torn = torn
        self._may_be_torn = may_be_torn
        self._waiting: deque[tuple[DiskTask, Done]] = deque()

    def begin(self, work: DiskTask, done: Done) -> None:
        self._waiting.append((work, done))
        if len(self._waiting) == 1:
            self._start()

    def crash(self) -> None:
        """The process was killed: its present work may be done, the others are not."""
        if self._waiting and self._network.random.random() < 0.5:
            self._shelf.perform(self._waiting[0][0])
        self._waiting.clear()

    def close(self, linger_s: float) -> None:
        while len(self._waiting) > 1:
            self._waiting.pop()

    def _start(self) -> None:
        work = self._waiting[0][0]
        self._network.say(f"disk begins {type(work).__name__} {work.folder}")
        before = _copied(work.slices) if isinstance(work, WriteShard) else ()
        self._network.after(self._network.random.uniform(0, WORK_S), lambda: self._end(before))

    def _is_torn(self, work: ReadManifest | ReadShards) -> bool:
        """Chance says so when its manifest, or its files, are read first."""
        torn, one = self._shelf.torn, (work.folder, type(work))
        if self._torn and one not in torn and self._may_be_torn(work.folder):
            chance = self._torn if isinstance(work, ReadShards) else self._torn / 4
            if self._network.random.random() < chance:
                torn.add(one)
                self._network.used["torn snapshot"] += 1
        return one in torn

    def _end(self, before: tuple[SliceImage, ...]) -> None:
        if not self._waiting:
            return
        work, done = self._waiting.popleft()
        if isinstance(work, WriteShard):
            for then, now in zip(before, work.slices, strict=True):
                assert content(then) == content(now), f"slice {now.start} of {now.key!r} changed while it was saved"
            work = replace(work, slices=before)
        if self._waiting:
            self._start()
        may_fail = not isinstance(work, Sweep | ReadManifest) and not self._shelf.has(work)
        if may_fail and self._network.random.random() < self._full:
            self._network.used["full disk"] += 1
            done(None, FULL)
        elif isinstance(work, ReadManifest | ReadShards) and self._is_torn(work):
            done(None, f"{work.folder} is damaged")
        else:
            try:
                done(self._shelf.perform(work), "")
            except CheckpointError as error:
                done(None, str(error))


def _copied(slices: Sequence[SliceImage]) -> tuple[SliceImage, ...]:
    def own(array: Array | None) -> Array | None:
        return None if array is None else array.copy()

    def own_state(state: SliceState | None) -> SliceState | None:
        if state is None:
            return None
        return replace(state, arrays=tuple(array.copy() for array in state.arrays), master=own(state.master))

    return tuple(
        replace(
            one,
            weight=own(one.weight),
            state=own_state(one.state),
        )
        for one in slices
    )


def content(one: SliceImage) -> tuple[bytes, Mapping[str, bytes], int]:
    """What of a slice is compared."""
    weight = b"" if one.weight is None else one.weight.tobytes()
    return (
        weight,
        {name: array.tobytes() for name, array in one.states.items()},
        0 if one.state is None else one.state.count,
    )
