"""Export of a checkpoint as a single safetensors file: the weights under the names from the user.

A lazy table, which may be larger than any disk, becomes two arrays: ``<name>.indices`` with the ids of its existing
rows, and ``<name>.values`` with their values. The metadata describes the other rows under "kvdist.lazy".
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from kvdist.checkpoint.files import explained, require_intact, require_present
from kvdist.checkpoint.folders import all_steps, find, folder_of
from kvdist.checkpoint.format import (
    METADATA,
    NAME,
    Tensor,
    read_manifest,
    read_worker,
    read_workers,
    write_named_tensors,
)
from kvdist.checkpoint.shards import Shards
from kvdist.checkpoint.snapshot import WEIGHTS, Bits, Manifest, SavedKey
from kvdist.config.paths import expanded
from kvdist.dtypes import DType, from_name
from kvdist.errors import CheckpointError, ConfigError
from kvdist.naming import name_of

FRAMEWORK = {"format": "pt"}
"""Metadata that readers of models expect."""
INDICES, VALUES = ".indices", ".values"
"""Suffixes of the arrays of a lazy table."""


@dataclass(frozen=True, slots=True)
class Exported:
    """Result of an export.

    Attributes:
        folder: folder of the checkpoint.
        step: its step.
        arrays: number of arrays.
        nbytes: length of the file.
    """

    folder: Path
    step: int
    arrays: int
    nbytes: int


def export(source: Path, out: Path, step: int | None = None, *, overwrite: bool = False) -> Exported:
    """Write the weights of a checkpoint into a single file, which any reader of safetensors loads.

    All checksums are compared before the file is written. Only a single key at a time is in memory. The file gets its
    name when it is complete.

    Args:
        source: directory of checkpoints, or folder of a checkpoint.
        out: path of the file.
        step: step of the checkpoint; None for the newest.
        overwrite: whether an existing file may be replaced.

    Raises:
        CheckpointError: the checkpoint is missing or damaged, has no weights, or two keys share a name.
        ConfigError: the file exists, or its path is unusable.
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
    """Return the folder of the checkpoint: `source` itself, if it is a checkpoint.

    Raises:
        CheckpointError: `source` has no such checkpoint.
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
    """Return key → name of its array: the name from the file of worker 0, or else the key itself."""
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
            raise CheckpointError(
                f"{name_of(same[0])} cannot be called {name}, which means something else in such a file"
            )
    return names


def _called(one: SavedKey, name: str) -> list[str]:
    """Return the names of the arrays of a key."""
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
    """Return metadata: the shape of each lazy table, and the initializer of its other rows."""
    tables = {
        names[one.key]: {"shape": list(one.shape), "initializer": shards.initializer(one.key)}
        for one in manifest.keys
        if one.is_lazy
    }
    return {"kvdist.lazy": json.dumps(tables, ensure_ascii=False)} if tables else {}


# The commands.


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvdist export``, and its function as `command`."""
    parser.add_argument("checkpoint", metavar="CKPT", help="a folder of checkpoints, or of one step")
    parser.add_argument("out", metavar="OUT", help="the file to write, such as model.safetensors")
    parser.add_argument("--step", type=int, metavar="N", help="the step to export (default: the newest)")
    parser.add_argument("--force", action="store_true", help="replace OUT if the file exists")
    parser.set_defaults(command=_export)


def add_list_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvdist checkpoints``, and its function as `command`."""
    parser.add_argument("directory", metavar="DIR", help="a folder of checkpoints, or of one step")
    parser.add_argument("--verify", action="store_true", help="read every checkpoint, and compare checksums and runs")
    parser.set_defaults(command=_list)


def _export(options: argparse.Namespace) -> tuple[str, int]:
    source, out = Path(expanded(options.checkpoint)), Path(expanded(options.out))
    done = export(source, out, options.step, overwrite=options.force)
    return f"{out}: {done.arrays} arrays of {done.folder}, step {done.step}, {_size_text(done.nbytes)}", 0


def _list(options: argparse.Namespace) -> tuple[str, int]:
    directory = Path(expanded(options.directory))
    with explained(f"{directory} could not be searched for checkpoints"):
        is_one = (directory / NAME).exists()
        folders = [directory] if is_one else [folder_of(directory, step) for step in all_steps(directory)]
    if not folders:
        why = "no folder step-<number>" if directory.is_dir() else "there is no such folder"
        raise CheckpointError(f"there is no checkpoint in {directory}: {why}")
    lines = [_line(folder, options.verify) for folder in folders]
    return "\n".join(line for line, _ in lines), max(code for _, code in lines)


def _line(folder: Path, verify: bool) -> tuple[str, int]:
    """Return a line about a checkpoint; and 1 if it is damaged, else 0."""
    if not (folder / NAME).exists():
        return f"{folder.name:<16} incomplete: being written, or an attempt that failed", 0
    try:
        manifest = read_manifest(folder)
        for record in manifest.files:
            (require_intact if verify else require_present)(folder, record)
        if verify:
            Shards(folder, manifest)  # compares the run and step in each file with the manifest
            read_workers(folder, manifest)
    except CheckpointError as error:
        return f"{folder.name:<16} damaged: {error}", 1
    return f"{folder.name:<16} {'intact' if verify else 'complete'}: {_summary(manifest)}", 0


def _summary(manifest: Manifest) -> str:
    nbytes = sum(record.nbytes for record in manifest.files)
    optimizer = "no optimizer" if manifest.optimizer is None else str(manifest.optimizer.get("name"))
    return (
        f"{_size_text(nbytes)}, {len(manifest.keys)} key(s), {' and '.join(manifest.contents)}, {optimizer},"
        f" {manifest.mode}, {manifest.num_workers} worker(s), {manifest.num_servers} server(s)"
        + (f", run {manifest.run}" if manifest.run else "")
    )


def _size_text(nbytes: int) -> str:
    size, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
