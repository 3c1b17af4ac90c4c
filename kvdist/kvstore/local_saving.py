"""Checkpoints of what one process keeps: arrays and tables of a `LocalStore`, or weights that a trainer updates here.

The files are those that servers write, so a store on a cluster can go on from them, and the other way round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from kvdist.checkpoint.folders import perform
from kvdist.checkpoint.locks import Locks
from kvdist.checkpoint.snapshot import (
    STATES,
    WEIGHTS,
    CheckFolder,
    FileRecord,
    LockFolder,
    Manifest,
    ReadManifest,
    ReadShards,
    ReadSlice,
    SavedKey,
    SavedSlice,
    Sweep,
    UnlockFolder,
    WantedSlice,
    WriteManifest,
    WriteShard,
)
from kvdist.core.server.table_rows import TableRows
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.kvstore import saved
from kvdist.kvstore.values import Bits, Key, Shape
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.states import SliceState, has_master

MODE = "local"


class KeepsStates(Protocol):
    """What has the optimizer's states: see `kvdist.optimizer.updater.Updater`."""

    @property
    def optimizer(self) -> Optimizer:
        """The rule and its numbers."""

    def state_of(self, index: Hashable) -> SliceState | None:
        """The state of a key."""

    def restore(self, index: Hashable, state: SliceState | None) -> None:
        """Go on from this state."""


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One key that this process keeps."""

    key: Key
    shape: Shape
    dtype: DType
    bits: Bits
    """All of its elements, 1-D."""

    @property
    def saved_key(self) -> SavedKey:
        """What the manifest says of it."""
        return SavedKey(self.key, tuple(self.shape), self.dtype.label)

    def saved(self, updater: KeepsStates | None, contents: tuple[str, ...]) -> SavedSlice:
        """What is written; it shows the bits themselves."""
        weight = self.bits if WEIGHTS in contents else None
        where = (self.key, 0, self.bits.size, self.dtype, 0, weight)
        state = None if updater is None or STATES not in contents else updater.state_of(self.key)
        if updater is None or state is None:
            return SavedSlice(*where)
        states = dict(zip(updater.optimizer.state_names, state.arrays, strict=True))
        return SavedSlice(*where, states, state.count, state.scalars, state.master)

    def wanted(self, number: int, updater: KeepsStates | None) -> WantedSlice:
        """What a checkpoint must have of it."""
        where = (number, self.key, 0, self.bits.size, self.dtype)
        if updater is None:
            return WantedSlice(*where)
        optimizer = updater.optimizer
        row = max(1, Extent(self.key, tuple(self.shape)).row_length) if optimizer.by_rows else 1
        master = has_master(optimizer, self.dtype)
        from_weight = master or bool(optimizer.states_from_weight)
        return WantedSlice(*where, optimizer.state_names, row, master, has_state=True, from_weight=from_weight)

    def take(self, found: ReadSlice, updater: KeepsStates | None) -> Bits | None:
        """Give the updater its states back; returns the value, which whoever holds it takes over."""
        if updater is not None and (found.state is not None or found.is_fresh):
            updater.restore(self.key, found.state)
        return found.weight


@dataclass(frozen=True, slots=True, eq=False)
class HeldTable:
    """One table that this process keeps."""

    block: TableRows
    form: str
    """As it was declared."""

    @property
    def saved_key(self) -> SavedKey:
        """What the manifest says of it."""
        return SavedKey(self.block.key, self.block.shape, self.block.dtype.label, self.form)

    def saved(self, updater: KeepsStates | None, contents: tuple[str, ...]) -> SavedSlice:
        """What is written: a copy of the rows that exist."""
        return self.block.saved(0, _optimizer(updater), contents)

    def wanted(self, number: int, updater: KeepsStates | None) -> WantedSlice:
        """What a checkpoint must have of it."""
        return replace(self.block.wanted(_optimizer(updater)), number=number)

    def take(self, found: ReadSlice, updater: KeepsStates | None) -> None:
        """Go on from what was found; there is nothing left to take over."""
        self.block.load(found, _optimizer(updater))


Holding = Held | HeldTable


def claim(folder: Path, locks: Locks) -> str:
    """Lock the directory of this folder, see whether this process can write there, and return the run.

    Raises:
        CheckpointError: another job saves there, or it cannot be written. Nothing is left of the attempt.
    """
    run = perform(LockFolder(str(folder)), locks)
    assert isinstance(run, str)
    try:
        perform(CheckFolder(str(folder), "server-0", run, 0), locks)
    except CheckpointError:
        perform(UnlockFolder(str(folder)), locks)
        raise
    return run


def save(
    folder: Path,
    contents: tuple[str, ...],
    held: Sequence[Holding],
    updater: KeepsStates | None,
    locks: Locks,
    run: str,
    step: int = 0,
    keep: int = 0,
    content: bytes = b"",
    files: Sequence[FileRecord] = (),
) -> None:
    """Write a checkpoint of these keys into a folder that `claim` has claimed.

    Args:
        folder: where.
        contents: what of them: `WEIGHTS`, `STATES`.
        held: the keys.
        updater: what has their states.
        locks: with which the folder was claimed.
        run: what that gave.
        step: the user's number of it.
        keep: how many checkpoints stay; 0 for all.
        content: what the process keeps with it.
        files: what is there already.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    if not held:
        raise ValueError("there are no keys to save: init them before")
    try:
        slices = tuple(one.saved(updater, contents) for one in held)
        shard = perform(WriteShard(str(folder), "server-0", slices, run, step), locks)
        assert isinstance(shard, FileRecord)
        files = [shard, *files, *([saved.write_own_file(folder, 0, content, run, step)] if content else [])]
        description = None if updater is None else updater.optimizer.describe()
        manifest = Manifest(step, contents, MODE, True, description, 1, 1, _keys(held), tuple(files), run)
        perform(WriteManifest(str(folder), manifest, keep), locks)
    except CheckpointError:
        sweep(folder, locks)
        raise


def sweep(folder: Path, locks: Locks) -> None:
    """Remove what an attempt has left that failed, as far as possible: why it failed says more."""
    with contextlib.suppress(CheckpointError):
        perform(Sweep(str(folder)), locks)


def load(
    folder: Path, contents: tuple[str, ...], held: Sequence[Holding], updater: KeepsStates | None
) -> list[Bits | None]:
    """Restore tables and states; returns the values of the arrays, None for each other key or if not asked for.

    Raises:
        CheckpointError: as of `read`; nothing has changed.
    """
    return take(held, read(folder, contents, held, updater), updater)


def read(
    folder: Path, contents: tuple[str, ...], held: Sequence[Holding], updater: KeepsStates | None
) -> list[ReadSlice]:
    """What a checkpoint has of these keys, in their order.

    Raises:
        CheckpointError: there is none, it is damaged, or does not fit.
    """
    locks = Locks()  # reading takes none
    manifest = perform(ReadManifest(str(folder)), locks)
    assert isinstance(manifest, Manifest)
    manifest.require(_keys(held), None if updater is None else updater.optimizer.describe(), contents)
    wanted = tuple(one.wanted(number, updater) for number, one in enumerate(held))
    found = perform(ReadShards(str(folder), wanted, contents), locks)
    assert isinstance(found, tuple)
    return list(found)


def take(held: Sequence[Holding], found: Sequence[ReadSlice], updater: KeepsStates | None) -> list[Bits | None]:
    """Restore tables and states from what was read; returns the values of arrays."""
    return [one.take(read, updater) for one, read in zip(held, found, strict=True)]


def _keys(held: Sequence[Holding]) -> tuple[SavedKey, ...]:
    return tuple(one.saved_key for one in held)


def _optimizer(updater: KeepsStates | None) -> Optimizer | None:
    return None if updater is None else updater.optimizer
