"""One plain safetensors file out of a checkpoint: the weights under the names that the user gave them.

A lazy table, which may be larger than any disk, becomes two arrays: ``<name>.indices``, the rows that exist, and
``<name>.values``, theirs. What the other rows are is said in the metadata, under "kvdist.lazy".
"""

from __future__ import annotations

import json
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
from kvdist.dtypes import DType, from_name
from kvdist.errors import CheckpointError, ConfigError

FRAMEWORK = {"format": "pt"}
"""What readers of models look for beside the arrays."""
INDICES, VALUES = ".indices", ".values"
"""Behind the name of a lazy table."""


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
    tensors = [tensor for one in manifest.keys for tensor in _tensors(shards, one, names[one.key])]
    metadata = {**FRAMEWORK, "kvdist.step": str(manifest.step), **_lazy(shards, manifest, names)}
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
    given = {} if first is None else read_worker(folder, first, manifest).names
    names = {one.key: given.get(one.key, str(one.key)) for one in manifest.keys}
    keys = defaultdict(list)
    for one in manifest.keys:
        for name in _called(one, names[one.key]):
            keys[name].append(one.key)
    for name, same in keys.items():
        if len(same) > 1:
            raise CheckpointError(
                f"the keys {' and '.join(map(repr, same))} would both be called {name!r}: give save_checkpoint names"
                " that differ"
            )
        if name == METADATA:
            raise CheckpointError(f"key {same[0]!r} cannot be called {name}, which means something else in such a file")
    return names


def _called(one: SavedKey, name: str) -> list[str]:
    """What the arrays of a key are called."""
    return [name + INDICES, name + VALUES] if one.is_lazy else [name]


def _tensors(shards: Shards, one: SavedKey, name: str) -> list[Tensor]:
    dtype, size = from_name(one.dtype), math.prod(one.shape)
    if not one.is_lazy:
        return [Tensor(name, dtype, one.shape, lambda: shards.whole(one.key, size, dtype))]
    row, count = math.prod(one.shape[1:]), shards.num_rows(one.key)

    def indices() -> Bits:
        ids = shards.rows(one.key, size, row, dtype, ()).ids
        assert ids is not None, "a lazy table has them"
        return ids

    def values() -> Bits:
        weight = shards.rows(one.key, size, row, dtype, (WEIGHTS,)).weight
        assert weight is not None, "weights were asked for"
        return weight

    first, second = _called(one, name)
    return [Tensor(first, DType.INT64, (count,), indices), Tensor(second, dtype, (count, *one.shape[1:]), values)]


def _lazy(shards: Shards, manifest: Manifest, names: Mapping[int | str, str]) -> dict[str, str]:
    """Of each lazy table its shape, and what a row is that has no values."""
    told = {
        names[one.key]: {"shape": list(one.shape), "initializer": shards.initializer(one.key)}
        for one in manifest.keys
        if one.is_lazy
    }
    return {"kvdist.lazy": json.dumps(told, ensure_ascii=False)} if told else {}
