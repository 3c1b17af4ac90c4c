"""Folders of checkpoints: which are complete, which one is the newest, and what of them goes away.

A folder of checkpoints has one folder ``step-<K>`` for each. Only files of the names that checkpoints have are ever
removed, and of a folder whose manifest cannot be read none: who knows what it names.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

from kvdist.checkpoint.files import PART, explained, make_durable
from kvdist.checkpoint.manifest import NAME, SERVER_FILE, WORKER_FILE, read_manifest
from kvdist.errors import CheckpointError, NoCheckpoint

NAMED_MAX = 10
"""Steps that an error names."""

_STEP = re.compile(r"step-(0|[1-9][0-9]{0,18})")
_UNFINISHED = re.compile(
    rf"(server-[0-9]+\.safetensors|worker-[0-9]+\.json|{re.escape(NAME)})\.[0-9]+{re.escape(PART)}"
)


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step}"


def step_of(folder: Path) -> int | None:
    """The step of a folder by its name; None for another name."""
    match = _STEP.fullmatch(folder.name)
    return int(match[1]) if match else None


def directory_of(folder: str | Path) -> Path:
    """Where the checkpoints lie of which this folder is one; itself, if it is not of a step."""
    path = Path(folder)
    return path.parent if step_of(path) is not None else path


def all_steps(directory: Path) -> list[int]:
    """The steps that have a folder, complete or not, in order."""
    if not directory.is_dir():
        return []
    steps = [step_of(folder) for folder in directory.iterdir() if folder.is_dir()]
    return sorted(step for step in steps if step is not None)


def complete_steps(directory: Path) -> list[int]:
    """The steps of which there is a checkpoint, in order."""
    return [step for step in all_steps(directory) if (folder_of(directory, step) / NAME).is_file()]


def find(directory: Path, step: int | None) -> Path:
    """The folder of a checkpoint that is to be read: of a step, or of the highest.

    Raises:
        NoCheckpoint: there is none.
        CheckpointError: it cannot be looked for.
    """
    with explained(f"{directory} could not be searched for checkpoints"):
        steps = complete_steps(directory)
    if not steps:
        raise NoCheckpoint(f"there is no checkpoint in {directory}: no folder step-<number> with a {NAME}")
    if step is not None and step not in steps:
        more = f"{len(steps) - NAMED_MAX} more and " if len(steps) > NAMED_MAX else ""
        last = ", ".join(map(str, steps[-NAMED_MAX:]))
        raise NoCheckpoint(f"there is no checkpoint of step {step!r} in {directory}, only of {more}{last}")
    return folder_of(directory, steps[-1] if step is None else step)


def prune(directory: Path, keep: int, written: int) -> None:
    """Remove all checkpoints but `keep`, and what attempts that failed have left in folders of earlier steps.

    Args:
        directory: where they lie.
        keep: how many stay, at least 1: the one that was just written, and of the others those of the highest steps.
        written: its step. After going back to an earlier one it need not be the highest.
    """
    others = [step for step in complete_steps(directory) if step != written]
    gone = others[: max(0, len(others) - keep + 1)]
    for step in all_steps(directory):
        folder = folder_of(directory, step)
        if folder.is_symlink():
            continue  # somebody keeps it elsewhere
        if step in gone:
            (folder / NAME).unlink(missing_ok=True)
            make_durable(folder)  # before what it names: a manifest never outlives its files
        if step in gone or step < written:
            sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what no manifest names: files of attempts that failed, and the folder if nothing is left."""
    named: set[str] = set()
    if not folder.is_dir():
        return
    if (folder / NAME).exists():
        try:
            named = {file.name for file in read_manifest(folder).files}
        except CheckpointError:
            return
    for path in folder.iterdir():
        own = SERVER_FILE.fullmatch(path.name) or WORKER_FILE.fullmatch(path.name)
        if (own and path.name not in named) or _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()
