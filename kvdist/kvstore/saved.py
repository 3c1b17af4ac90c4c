"""Checkpoints as users see them: where they lie, what a worker keeps with them, what comes back."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvdist.checkpoint.files import FileRecord, explained, require_intact, write_file
from kvdist.checkpoint.manifest import Manifest, complete_steps, folder_of
from kvdist.errors import CheckpointError
from kvdist.protocol.limits import DEFAULT

Names = Mapping[int | str, str]
"""Key → what the user calls it."""
STEP_MAX = (1 << 63) - 1
STATE_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that has been loaded.

    Attributes:
        folder: where it lies.
        step: the number with which it was saved.
        state: what this worker gave as `state`; None if it gave nothing, or did not exist.
        states: rank → what that worker gave; for a run that goes on with another number of workers.
        exact: whether it is one moment of the whole store; not so for asynchronous stores.
    """

    folder: Path
    step: int
    state: Any = None
    states: Mapping[int, Any] = field(default_factory=dict)
    exact: bool = True


def place(directory: str | os.PathLike[str], step: int) -> Path:
    """The folder of a checkpoint that is to be written.

    Raises:
        ValueError: the step is no count.
    """
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= STEP_MAX:
        raise ValueError(f"the step of a checkpoint is {step!r}; it must be a number from 0, such as the steps made")
    return folder_of(absolute(directory), step)


def absolute(path: str | os.PathLike[str]) -> Path:
    """The same place for every process, wherever it was started.

    Raises:
        ValueError: it is too long for a message, or no text.
    """
    found = Path(os.path.abspath(path))
    try:
        nbytes = len(str(found).encode())
    except UnicodeEncodeError:
        raise ValueError(f"the folder {str(path)[:80]!r} has characters that are not text (lone surrogates)") from None
    if nbytes > DEFAULT.name_bytes_max - 64:  # room for the folder of a step
        raise ValueError(f"the folder {str(path)[:80]!r}… has {nbytes} bytes, more than a message can carry")
    return found


def checked_keep(keep: int | None) -> int:
    """As it travels: 0 for all.

    Raises:
        ValueError: it would leave none.
    """
    if keep is None:
        return 0
    if isinstance(keep, bool) or not isinstance(keep, int) or not 1 <= keep < 1 << 32:
        raise ValueError(f"keep is {keep!r}; it says how many of the newest checkpoints stay: at least 1, or None")
    return keep


def find(directory: str | os.PathLike[str], step: int | None) -> Path:
    """The folder of a checkpoint that is to be read: of a step, or the newest.

    Raises:
        CheckpointError: there is none.
    """
    root = absolute(directory)
    with explained(f"{root} could not be searched for checkpoints"):
        steps = complete_steps(root)
    if not steps:
        raise CheckpointError(f"there is no checkpoint in {root}: no folder step-<number> with a manifest.json")
    if step is not None and step not in steps:
        raise CheckpointError(f"there is no checkpoint of step {step} in {root}, only of {', '.join(map(str, steps))}")
    return folder_of(root, steps[-1] if step is None else step)


def own_file(state: Any, names: Names | None, rank: int) -> bytes:
    """What a worker keeps with a checkpoint, as it is written; empty for nothing.

    Raises:
        TypeError: the state is not made of what JSON can say.
        ValueError: it is too long.
    """
    if state is None and not names:
        return b""
    try:
        named = [[key, str(name)] for key, name in (names or {}).items()]
        text = json.dumps({"rank": rank, "state": state, "names": named}, allow_nan=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"the state of a checkpoint is made of dicts with text as keys, lists, numbers, text, True, False and None:"
            f" {error}. Give lists instead of arrays: torch.get_rng_state().tolist(), for one"
        ) from None
    content = text.encode()
    if len(content) > STATE_BYTES_MAX:
        raise ValueError(f"the state of a checkpoint has {len(content)} bytes as JSON; {STATE_BYTES_MAX} are allowed")
    return content


def write_own_file(folder: Path, rank: int, content: bytes) -> FileRecord:
    """Write it.

    Raises:
        CheckpointError: the disk is full, say.
    """
    with explained(f"{folder} could not be used for a checkpoint"):
        return write_file(folder, f"worker-{rank}", ".json", [memoryview(content)])


def loaded(folder: Path, manifest: Manifest, rank: int) -> Checkpoint:
    """What is given to the user who has loaded it.

    Raises:
        CheckpointError: a worker's file is missing or damaged.
    """
    states = {one: content["state"] for one, content in own_files(folder, manifest).items()}
    return Checkpoint(folder, manifest.step, states.get(rank), states, manifest.exact)


def own_files(folder: Path, manifest: Manifest) -> dict[int, dict[str, Any]]:
    """Rank → what that worker kept.

    Raises:
        CheckpointError: as of `loaded`.
    """
    found: dict[int, dict[str, Any]] = {}
    for rank, record in manifest.workers.items():
        require_intact(folder, record)
        with explained(f"{folder / record.name} could not be read"):
            text = (folder / record.name).read_bytes()
        try:
            content = json.loads(text)
            found[rank] = {"state": content["state"], "names": {key: str(name) for key, name in content["names"]}}
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise CheckpointError(f"{folder / record.name} is damaged: not readable ({error})") from None
    return found
