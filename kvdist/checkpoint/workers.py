"""What each worker keeps with a checkpoint: its own state, and from rank 0 the names of parameters."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdist.checkpoint.files import FileRecord, read_intact
from kvdist.checkpoint.manifest import Manifest
from kvdist.errors import CheckpointError

STATE_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """What a worker gave.

    Attributes:
        state: whatever JSON can say; None for nothing.
        names: key → what the user calls it.
    """

    state: Any
    names: Mapping[int | str, str]


def read_worker(folder: Path, record: FileRecord, manifest: Manifest) -> WorkerFile:
    """The content of one worker's file.

    Raises:
        CheckpointError: it is missing or damaged, or of another checkpoint.
    """
    path = folder / record.name
    if record.nbytes > STATE_BYTES_MAX:
        raise CheckpointError(f"{path} is damaged: it has {record.nbytes} bytes, and {STATE_BYTES_MAX} are allowed")
    text = read_intact(folder, record)
    try:
        content = json.loads(text)
        manifest.require_part(path, content.get("run"), content.get("step"))
        return WorkerFile(content["state"], dict(_names(content["names"])))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not readable ({error})") from None


def read_workers(folder: Path, manifest: Manifest) -> dict[int, WorkerFile]:
    """Rank → what that worker kept.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    return {rank: read_worker(folder, record, manifest) for rank, record in manifest.workers.items()}


def _names(pairs: Any) -> Iterator[tuple[int | str, str]]:
    for key, name in pairs:
        if type(key) not in (int, str) or type(name) is not str:
            raise ValueError(f"a key {key!r:.80} called {name!r:.80}")
        yield key, name
