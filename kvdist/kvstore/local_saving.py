"""Checkpoints of what one process keeps: the values of a `LocalStore`, or of a trainer that updates here.

The files are those that servers write, so a store on a cluster can go on from them, and the other way round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvdist.checkpoint.files import FileRecord
from kvdist.checkpoint.manifest import STATES, WEIGHTS, Manifest, SavedKey
from kvdist.checkpoint.slices import ReadSlice, SavedSlice, WantedSlice
from kvdist.checkpoint.works import ReadManifest, ReadShards, Sweep, WriteManifest, WriteShard, perform
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.kvstore import saved
from kvdist.kvstore.values import Bits, Key, Shape
from kvdist.optimizer.states import has_master
from kvdist.optimizer.step import Extent
from kvdist.optimizer.updater import Updater

MODE = "local"


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One key that this process keeps."""

    key: Key
    shape: Shape
    dtype: DType
    bits: Bits
    """All of its elements, 1-D."""


def save(
    folder: Path,
    contents: tuple[str, ...],
    held: Sequence[Held],
    updater: Updater | None,
    step: int = 0,
    keep: int = 0,
    content: bytes = b"",
    files: Sequence[FileRecord] = (),
) -> None:
    """Write a checkpoint of these keys; `content` is what the process keeps with it, `files` are there already.

    Raises:
        CheckpointError: it could not be written; nothing of it is left.
    """
    if not held:
        raise ValueError("there are no keys to save: init them before")
    try:
        shard = perform(WriteShard(str(folder), "server-0", tuple(_saved(one, updater, contents) for one in held)))
        assert isinstance(shard, FileRecord)
        files = [shard, *files, *([saved.write_own_file(folder, 0, content)] if content else [])]
        description = None if updater is None else updater.optimizer.describe()
        manifest = Manifest(step, contents, MODE, True, description, 1, 1, _keys(held), tuple(files))
        perform(WriteManifest(str(folder), manifest, keep))
    except CheckpointError:
        with contextlib.suppress(CheckpointError):  # why it could not be written says more
            perform(Sweep(str(folder)))
        raise


def load(folder: Path, contents: tuple[str, ...], held: Sequence[Held], updater: Updater | None) -> list[Bits | None]:
    """Give the updater its states back; returns the values of the keys, None for each that was not asked for.

    Raises:
        CheckpointError: as of `read`; nothing has changed.
    """
    return take(held, read(folder, contents, held, updater), updater)


def read(folder: Path, contents: tuple[str, ...], held: Sequence[Held], updater: Updater | None) -> list[ReadSlice]:
    """What a checkpoint has of these keys, in their order.

    Raises:
        CheckpointError: there is none, it is damaged, or does not fit.
    """
    manifest = perform(ReadManifest(str(folder)))
    assert isinstance(manifest, Manifest)
    manifest.require(_keys(held), None if updater is None else updater.optimizer.describe(), contents)
    wanted = tuple(_wanted(number, one, updater) for number, one in enumerate(held))
    found = perform(ReadShards(str(folder), wanted, contents))
    assert isinstance(found, tuple)
    return list(found)


def take(held: Sequence[Held], found: Sequence[ReadSlice], updater: Updater | None) -> list[Bits | None]:
    """Give the updater what was read of its states; returns the values."""
    return [_taken(one, read, updater) for one, read in zip(held, found, strict=True)]


def _keys(held: Sequence[Held]) -> tuple[SavedKey, ...]:
    return tuple(SavedKey(one.key, tuple(one.shape), one.dtype.label) for one in held)


def _saved(one: Held, updater: Updater | None, contents: tuple[str, ...]) -> SavedSlice:
    weight = one.bits if WEIGHTS in contents else None
    where = (one.key, 0, one.bits.size, one.dtype, 0, weight)
    if updater is None or STATES not in contents:
        return SavedSlice(*where)
    state = updater.states.get(one.key)
    if state is None:
        return SavedSlice(*where)
    states = dict(zip(updater.optimizer.state_names, state.arrays, strict=True))
    return SavedSlice(*where, states, state.count, state.scalars, state.master)


def _wanted(number: int, one: Held, updater: Updater | None) -> WantedSlice:
    where = (number, one.key, 0, one.bits.size, one.dtype)
    if updater is None:
        return WantedSlice(*where)
    optimizer = updater.optimizer
    row = max(1, Extent(one.key, tuple(one.shape)).row_length) if optimizer.by_rows else 1
    master = has_master(optimizer, one.dtype)
    from_weight = master or bool(optimizer.states_from_weight)
    return WantedSlice(*where, optimizer.state_names, row, master, has_state=True, from_weight=from_weight)


def _taken(one: Held, read: ReadSlice, updater: Updater | None) -> Bits | None:
    if updater is not None and (read.state is not None or read.is_fresh):
        updater.restore(one.key, read.state)
    return read.weight
