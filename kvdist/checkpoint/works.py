"""What a process can be asked to do with its disk: one frozen dataclass per kind, done by `perform`.

The pure machines of scheduler and server ask for it by an effect, and hear of the result by an event; whoever runs
them does it on a thread of its own, so that training goes on.

A folder may be named by a peer. A process writes and reads below its root alone, which whoever started it has
chosen; within it only files of the names that checkpoints have.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvdist.checkpoint.files import FileRecord, check_room, explained
from kvdist.checkpoint.folders import directory_of, prune, step_of, sweep
from kvdist.checkpoint.locks import Locks, require_run
from kvdist.checkpoint.manifest import Manifest, read_manifest, write_manifest
from kvdist.checkpoint.slices import ReadSlice, SavedSlice, Shards, WantedSlice, write_slices
from kvdist.errors import CheckpointError

LOG = logging.getLogger("kvdist")


@dataclass(frozen=True, slots=True, eq=False)
class LockFolder:
    """Keep other jobs from saving where this checkpoint is to lie; gives the run, which its files are to name."""

    folder: str


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
    """Make the folder a checkpoint, of which `keep` stay beside each other; 0 keeps all. Takes the lock of the
    directory, if somebody has removed it. Gives None."""

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
    """Remove what an attempt that failed has left in the folder; gives None."""

    folder: str


Work = LockFolder | UnlockFolder | CheckFolder | WriteShard | WriteManifest | ReadManifest | ReadShards | Sweep
Product = FileRecord | Manifest | tuple[ReadSlice, ...] | str | None


def perform(work: Work, locks: Locks, root: Path | None = None) -> Product:
    """Do it.

    Args:
        work: what.
        locks: of whom it is done for.
        root: below which folder; None for everywhere.

    Raises:
        CheckpointError: it cannot be done; says why.
    """
    folder = _allowed(work.folder, root)
    directory = directory_of(folder)
    with explained(f"{folder} could not be used for a checkpoint"):
        match work:
            case LockFolder():
                return locks.take(directory)
            case UnlockFolder():
                locks.release(directory)
            case CheckFolder():
                require_run(directory, work.run)
                check_room(directory, work.stem, work.nbytes)
            case WriteShard():
                return write_slices(folder, work.stem, work.slices, work.run, work.step)
            case WriteManifest():
                locks.take(directory)
                write_manifest(folder, work.manifest)
                _tidy(folder, work.keep, root)
            case ReadManifest():
                return read_manifest(folder)
            case ReadShards():
                return _read(Shards(folder, read_manifest(folder)), work.wanted, work.contents)
            case Sweep():
                sweep(folder)
    return None


def _read(shards: Shards, wanted: Iterable[WantedSlice], contents: tuple[str, ...]) -> tuple[ReadSlice, ...]:
    return tuple(shards.read(one, contents) for one in wanted)


def _tidy(folder: Path, keep: int, root: Path | None) -> None:
    """Remove what is not needed beside a checkpoint that is complete: that it cannot be done makes it no worse."""
    try:
        sweep(folder)
        step = step_of(folder)
        if keep and step is not None:
            prune(_allowed(str(folder.parent), root), keep, step)
    except (OSError, CheckpointError) as error:
        LOG.warning("the checkpoint %s is complete, but what is older could not be removed: %s", folder, error)


def _allowed(name: str, root: Path | None) -> Path:
    folder = Path(name)
    if not folder.is_absolute() or ".." in folder.parts:
        raise CheckpointError(f"{name} is no absolute path of a folder")
    try:
        is_below = root is None or folder.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a character that no path has
        raise CheckpointError(f"{name!r} cannot be the path of a folder: {error}") from None
    if not is_below:
        raise CheckpointError(
            f"{folder} lies outside {root}, below which this process keeps checkpoints: save them there, or start the"
            " job with KVDIST_CHECKPOINT_ROOT naming a folder above them (the default is the one it was started in)"
        )
    return folder
