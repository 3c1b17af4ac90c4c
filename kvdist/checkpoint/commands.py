"""The commands that work on checkpoints: ``kvdist export`` and ``kvdist checkpoints``.

Each gives the text to be shown and the exit code, or raises what is to be said instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from kvdist.checkpoint.export import export
from kvdist.checkpoint.files import explained, require_intact, require_present
from kvdist.checkpoint.folders import all_steps, folder_of
from kvdist.checkpoint.manifest import NAME, Manifest, read_manifest
from kvdist.checkpoint.slices import Shards
from kvdist.checkpoint.workers import read_workers
from kvdist.errors import CheckpointError

Command = Callable[[argparse.Namespace], tuple[str, int]]


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands to those of a parser: `command` of its result is the `Command`."""
    one = commands.add_parser("export", help="write the weights of a checkpoint into one safetensors file")
    one.add_argument("checkpoint", type=Path, metavar="CKPT", help="a folder of checkpoints, or of one step")
    one.add_argument("out", type=Path, metavar="OUT", help="the file to write, such as model.safetensors")
    one.add_argument("--step", type=int, metavar="N", help="of which step; the newest if it is not given")
    one.add_argument("--force", action="store_true", help="replace OUT if it is there")
    one.set_defaults(command=_export)
    some = commands.add_parser("checkpoints", help="list the checkpoints in a folder")
    some.add_argument("directory", type=Path, metavar="DIR", help="a folder of checkpoints, or of one step")
    some.add_argument("--verify", action="store_true", help="read all of them, and compare checksums and runs")
    some.set_defaults(command=_list)


def _export(options: argparse.Namespace) -> tuple[str, int]:
    done = export(options.checkpoint, options.out, options.step, overwrite=options.force)
    return f"{options.out}: {done.arrays} arrays of {done.folder}, step {done.step}, {_told(done.nbytes)}", 0


def _list(options: argparse.Namespace) -> tuple[str, int]:
    directory: Path = options.directory
    with explained(f"{directory} could not be searched for checkpoints"):
        is_one = (directory / NAME).exists()
        folders = [directory] if is_one else [folder_of(directory, step) for step in all_steps(directory)]
    if not folders:
        raise CheckpointError(f"there is no checkpoint in {directory}: no folder step-<number>")
    lines = [_line(folder, options.verify) for folder in folders]
    return "\n".join(line for line, _ in lines), max(code for _, code in lines)


def _line(folder: Path, verify: bool) -> tuple[str, int]:
    """What is known of one checkpoint; and 1 if it is damaged, else 0."""
    if not (folder / NAME).exists():
        return f"{folder.name:<16} incomplete: being written, or an attempt that failed", 0
    try:
        manifest = read_manifest(folder)
        for record in manifest.files:
            (require_intact if verify else require_present)(folder, record)
        if verify:
            Shards(folder, manifest)  # which compares what each file says of itself with the manifest
            read_workers(folder, manifest)
    except CheckpointError as error:
        return f"{folder.name:<16} damaged: {error}", 1
    return f"{folder.name:<16} {'intact' if verify else 'complete'}: {_summary(manifest)}", 0


def _summary(manifest: Manifest) -> str:
    nbytes = sum(record.nbytes for record in manifest.files)
    optimizer = "no optimizer" if manifest.optimizer is None else str(manifest.optimizer.get("name"))
    return (
        f"{_told(nbytes)}, {len(manifest.keys)} key(s), {' and '.join(manifest.contents)}, {optimizer},"
        f" {manifest.mode}, {manifest.num_workers} worker(s), {manifest.num_servers} server(s)"
        + (f", run {manifest.run}" if manifest.run else "")
    )


def _told(nbytes: int) -> str:
    size, unit = float(nbytes), "bytes"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
