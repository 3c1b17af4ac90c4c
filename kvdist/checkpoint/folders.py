"""Folders of checkpoints: which are complete, which are removed, and execution of the tasks of `snapshot`.

A directory of checkpoints has a folder ``step-<K>`` for each checkpoint. Only files with the names of checkpoint files
are ever removed, and none if the manifest of the folder cannot be read, as its files are unknown. A peer may name any
folder, so `perform` works only below the root that was chosen when the process was started.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterable
from pathlib import Path

from kvdist.checkpoint.files import PART, check_room, explained, make_durable
from kvdist.checkpoint.format import NAME, read_manifest, read_workers, write_manifest
from kvdist.checkpoint.locks import Locks, require_run
from kvdist.checkpoint.shards import Shards, write_slices
from kvdist.checkpoint.snapshot import (
    OWN_FILE,
    SERVER_FILE,
    WORKER_FILE,
    CheckFolder,
    DiskResult,
    DiskTask,
    LockFolder,
    Manifest,
    ReadManifest,
    ReadShards,
    SliceImage,
    Sweep,
    UnlockFolder,
    WantedSlice,
    WriteManifest,
    WriteShard,
    directory_of,
    step_of,
)
from kvdist.errors import CheckpointError, NoCheckpoint

LOG = logging.getLogger("kvdist")

NAMED_MAX = 10
"""Maximum number of steps that an error names."""

_UNFINISHED = re.compile(
    rf"((server-[0-9]+|worker-[0-9]+-states)\.safetensors|worker-[0-9]+\.json|{re.escape(NAME)})\.[0-9]+{re.escape(PART)}"
)


def folder_of(directory: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return directory / f"step-{step}"


def all_steps(directory: Path) -> list[int]:
    """Return the steps with a folder, complete or not, in order."""
    if not directory.is_dir():
        return []
    steps = [step_of(folder.name) for folder in directory.iterdir() if folder.is_dir()]
    return sorted(step for step in steps if step is not None)


def complete_steps(directory: Path) -> list[int]:
    """Return the steps with a complete checkpoint, in order."""
    return [step for step in all_steps(directory) if (folder_of(directory, step) / NAME).is_file()]


def find(directory: Path, step: int | None) -> Path:
    """Return the folder of the checkpoint of a step, or of the highest step, to read it.

    Raises:
        NoCheckpoint: the directory has no such checkpoint.
        CheckpointError: the directory cannot be searched.
    """
    with explained(f"{directory} could not be searched for checkpoints"):
        steps = complete_steps(directory)
    if not steps:
        why = f"no folder step-<number> with a {NAME}" if directory.is_dir() else "there is no such folder"
        raise NoCheckpoint(f"there is no checkpoint in {directory}: {why}")
    if step is not None and step not in steps:
        more = f"{len(steps) - NAMED_MAX} more and " if len(steps) > NAMED_MAX else ""
        last = ", ".join(map(str, steps[-NAMED_MAX:]))
        raise NoCheckpoint(f"there is no checkpoint of step {step!r} in {directory}, only of {more}{last}")
    return folder_of(directory, steps[-1] if step is None else step)


def prune(directory: Path, keep: int, written: int) -> None:
    """Remove all checkpoints but `keep`, and files of failed attempts in folders of earlier steps.

    Args:
        directory: directory of the checkpoints.
        keep: number of remaining checkpoints, at least 1: the newest, and those of the highest steps among the others.
        written: step of the newest checkpoint, not necessarily the highest step after a return to an earlier step.
    """
    others = [step for step in complete_steps(directory) if step != written]
    gone = others[: max(0, len(others) - keep + 1)]
    for step in all_steps(directory):
        folder = folder_of(directory, step)
        if folder.is_symlink():
            continue  # the user keeps the checkpoint elsewhere
        if step in gone:
            _unmake(folder)
        if step in gone or step < written:
            sweep(folder)


def _unmake(folder: Path) -> None:
    """Remove the manifest before the files that it names, so that it never outlives them."""
    if (folder / NAME).exists():
        (folder / NAME).unlink()
        make_durable(folder)


def sweep(folder: Path) -> Manifest | None:
    """Remove files of failed attempts, which no manifest names, and the folder if it is then empty.

    Returns:
        The manifest; None if it is missing, or cannot be read, in which case nothing is removed.
    """
    named: set[str] = set()
    kinds = [SERVER_FILE, WORKER_FILE, OWN_FILE]
    manifest = None
    if not folder.is_dir():
        return None
    if (folder / NAME).exists():
        try:
            manifest = read_manifest(folder)
        except CheckpointError:
            return None
        named = {file.name for file in manifest.files}
        try:
            named.update(one.own.file.name for one in read_workers(folder, manifest).values() if one.own is not None)
        except CheckpointError:  # it is unknown which files with states of workers belong to the checkpoint
            kinds.remove(OWN_FILE)
    for path in folder.iterdir():
        ours = any(kind.fullmatch(path.name) for kind in kinds)
        if (ours and path.name not in named) or _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # the folder is not empty
        folder.rmdir()
    return manifest


# Tasks.


def perform(task: DiskTask, locks: Locks, root: Path | None = None) -> DiskResult:
    """Perform a task and return its result.

    Args:
        task: the task.
        locks: locks of the scheduler or the store that orders the task.
        root: folder below which the task may write and read; None for everywhere.

    Raises:
        CheckpointError: the task failed; the message has the reason.
    """
    folder = _allowed(task.folder, root)
    directory = Path(directory_of(str(folder)))
    with explained(f"{folder} could not be used for a checkpoint"):
        match task:
            case LockFolder():
                return locks.take(directory, task.run)
            case UnlockFolder():
                locks.release(directory)
            case CheckFolder():
                require_run(directory, task.run)
                check_room(directory, task.stem, task.nbytes)
            case WriteShard():
                return write_slices(folder, task.stem, task.slices, task.run, task.step)
            case WriteManifest():
                locks.take(directory)
                if not _is_written(folder, task.manifest):
                    write_manifest(folder, task.manifest)
                _tidy(folder, task.keep, root)
            case ReadManifest():
                return read_manifest(folder)
            case ReadShards():
                return _read(Shards(folder, read_manifest(folder)), task.wanted, task.contents)
            case Sweep():
                if task.whole:
                    _unmake(folder)
                return sweep(folder)
    return None


def _is_written(folder: Path, manifest: Manifest) -> bool:
    """Return whether a scheduler that was killed before it reported has written the manifest."""
    try:
        return read_manifest(folder).is_of(manifest.files)
    except (OSError, CheckpointError):
        return False


def _read(shards: Shards, wanted: Iterable[WantedSlice], contents: tuple[str, ...]) -> tuple[SliceImage, ...]:
    return tuple(shards.read(one, contents) for one in wanted)


def _tidy(folder: Path, keep: int, root: Path | None) -> None:
    """Remove what a complete checkpoint makes superfluous. A failure is only logged, as the checkpoint is still
    good."""
    try:
        sweep(folder)
        step = step_of(folder.name)
        if keep and step is not None:
            prune(_allowed(str(folder.parent), root), keep, step)
    except (OSError, CheckpointError) as error:
        LOG.warning("the checkpoint %s is complete, but what is older could not be removed: %s", folder, error)


def _allowed(name: str, root: Path | None) -> Path:
    folder = Path(name)
    if not folder.is_absolute() or ".." in folder.parts:
        raise CheckpointError(f"{name} is not an absolute path of a folder")
    try:
        is_below = root is None or folder.resolve().is_relative_to(root.resolve())
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, an invalid character
        raise CheckpointError(f"{name!r} cannot be the path of a folder: {error}") from None
    if not is_below:
        raise CheckpointError(
            f"{folder} is outside {root}, the folder below which this process may keep checkpoints: save below it, or"
            " set KVDIST_CHECKPOINT_ROOT to a folder above both (default: the folder in which the process was started)"
        )
    return folder
