"""One plain safetensors file out of a checkpoint: the weights under the names that the user gave them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvdist.checkpoint.files import explained
from kvdist.checkpoint.folders import find
from kvdist.checkpoint.manifest import NAME, WEIGHTS, Manifest, SavedKey, read_manifest
from kvdist.checkpoint.slices import Shards
from kvdist.checkpoint.tensors import METADATA, Bits, Tensor, write_named_tensors
from kvdist.checkpoint.workers import read_worker
from kvdist.dtypes import from_name
from kvdist.errors import CheckpointError, ConfigError

FRAMEWORK = {"format": "pt"}
"""What readers of models look for beside the arrays."""


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written.

    Attributes:
        folder: the checkpoint.
        step: its step.
        arrays: how many.
        nbytes: length of the file.
    """

    folder: Path
    step: int
    arrays: int
    nbytes: int


def export(source: Path, out: Path, step: int | None = None, *, overwrite: bool = False) -> Exported:
    """Write the weights of a checkpoint into one file, which any reader of safetensors loads.

    Checksums are compared before anything is written. One key at a time is in memory. The file has its name only when
    all of it is on the disk.

    Args:
        source: a folder of checkpoints, or that of one checkpoint.
        out: the file.
        step: of which step; None for the newest, or for the only one.
        overwrite: whether a file of that name may be replaced.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, has no weights, or two keys share a name.
        ConfigError: the file is there already, or cannot be.
    """
    _require_room(out, overwrite)
    folder = chosen(source, step)
    manifest = read_manifest(folder)
    if step is not None and manifest.step != step:
        raise CheckpointError(f"{folder} is the checkpoint of step {manifest.step}, not of step {step}")
    if WEIGHTS not in manifest.contents:
        raise CheckpointError(f"{folder} holds the states of an optimizer and no weights: there is nothing to export")
    names = _names(folder, manifest)
    shards = Shards(folder, manifest)
    shards.verify()
    tensors = [_tensor(shards, one, names[one.key]) for one in manifest.keys]
    metadata = {**FRAMEWORK, "kvdist.step": str(manifest.step)}
    with explained(f"{out} could not be written"):
        try:
            record = write_named_tensors(out, tensors, metadata, overwrite)
        except FileExistsError:
            raise _taken(out) from None
    return Exported(folder, manifest.step, len(tensors), record.nbytes)


def chosen(source: Path, step: int | None) -> Path:
    """The folder of the checkpoint that is meant: the source itself, if it is one.

    Raises:
        CheckpointError: there is none.
    """
    with explained(f"{source} could not be searched for checkpoints"):
        if (source / NAME).exists():
            return source
    return find(source, step)


def _require_room(out: Path, overwrite: bool) -> None:
    if out.is_dir() or not out.parent.is_dir():
        what = "is a folder" if out.is_dir() else f"cannot be: there is no folder {out.parent}"
        raise ConfigError(f"{out} {what}; name a file in a folder that is there, such as model.safetensors")
    if out.exists() and not overwrite:
        raise _taken(out)


def _taken(out: Path) -> ConfigError:
    return ConfigError(f"{out} is there already: name another file, or say --force to replace it")


def _names(folder: Path, manifest: Manifest) -> Mapping[int | str, str]:
    """Key → what its array is called: what worker 0 said, or else the key itself."""
    first = manifest.workers.get(0)
    given = {} if first is None else read_worker(folder, first).names
    names = {one.key: given.get(one.key, str(one.key)) for one in manifest.keys}
    keys = defaultdict(list)
    for key, name in names.items():
        keys[name].append(key)
    for name, same in keys.items():
        if len(same) > 1:
            raise CheckpointError(
                f"the keys {' and '.join(map(repr, same))} would both be called {name!r}: give save_checkpoint names"
                " that differ"
            )
        if name == METADATA:
            raise CheckpointError(f"key {same[0]!r} cannot be called {name}, which means something else in such a file")
    return names


def _tensor(shards: Shards, one: SavedKey, name: str) -> Tensor:
    dtype = from_name(one.dtype)

    def read() -> Bits:
        return shards.whole(one.key, math.prod(one.shape), dtype)

    return Tensor(name, dtype, one.shape, read)
