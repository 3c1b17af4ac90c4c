"""The manifest: what a checkpoint has, written last. A folder without one is no checkpoint.

It is JSON with a checksum over everything else in it, so that a changed digit is found, and names every file with its
length and checksum. A folder of checkpoints has one folder ``step-<K>`` for each.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvdist.checkpoint.files import FileRecord, replace_file, require_present
from kvdist.dtypes import from_name
from kvdist.errors import CheckpointError
from kvdist.optimizer.registry import from_description
from kvdist.version import __version__

NAME = "manifest.json"
FORMAT = "kvdist checkpoint"
VERSION = 1
"""Of the format. A reader refuses what is newer than itself."""
MANIFEST_BYTES_MAX = 1 << 30

WEIGHTS, STATES = "weights", "states"
EVERYTHING = (WEIGHTS, STATES)
"""What a checkpoint can hold."""

_STEP = re.compile(r"step-(\d{1,19})")
_WORKER = re.compile(r"worker-(\d+)-[0-9a-f]+\.json")
_OWN_FILE = re.compile(r"(server|worker)-\d+-[0-9a-f]+\.(safetensors|json)|(server|worker)-\d+.*\.part")


@dataclass(frozen=True, slots=True)
class SavedKey:
    """A key as every worker knows it."""

    key: int | str
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"shape {self.shape} and dtype {self.dtype}"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint has.

    Attributes:
        step: the user's number of it; 0 for states that were saved alone.
        contents: of `WEIGHTS` and `STATES`.
        mode: of the store, ``sync``, ``async`` or ``local``.
        exact: whether it is one moment of the whole store. In asynchronous mode it is not: each slice has all pushes
            that preceded the call on any worker, and perhaps some later ones.
        optimizer: its description; None for a store without one.
        num_workers, num_servers: who wrote it. Any number can read it.
        keys: in the order of their initialisation.
        files: all of them.
    """

    step: int
    contents: tuple[str, ...]
    mode: str
    exact: bool
    optimizer: Mapping[str, Any] | None
    num_workers: int
    num_servers: int
    keys: tuple[SavedKey, ...]
    files: tuple[FileRecord, ...]

    @property
    def shards(self) -> list[FileRecord]:
        """The files with arrays."""
        return [file for file in self.files if not _WORKER.fullmatch(file.name)]

    @property
    def workers(self) -> dict[int, FileRecord]:
        """Rank → what that worker wanted to have back."""
        found = [(_WORKER.fullmatch(file.name), file) for file in self.files]
        return {int(match[1]): file for match, file in found if match}

    def require(self, keys: Iterable[SavedKey], optimizer: Mapping[str, Any] | None, contents: Sequence[str]) -> None:
        """Whether a store of these keys and this optimizer can take in these contents.

        Raises:
            CheckpointError: it cannot; says what differs.
        """
        missing = [one for one in contents if one not in self.contents]
        if missing:
            raise CheckpointError(f"the checkpoint has no {' and no '.join(missing)}, only {', '.join(self.contents)}")
        saved, present = ({key.key: key for key in some} for some in (self.keys, keys))
        for key in present.keys() - saved.keys():
            raise CheckpointError(f"the checkpoint has no key {key!r}, which this store has")
        for key in saved.keys() - present.keys():
            raise CheckpointError(f"the checkpoint has a key {key!r}, which this store has not: init it before")
        for key, one in saved.items():
            if one != present[key]:
                raise CheckpointError(f"key {key!r} has {one} in the checkpoint, but {present[key]} in this store")
        if STATES in contents:
            self._require_same_states(optimizer)

    def _require_same_states(self, optimizer: Mapping[str, Any] | None) -> None:
        theirs, ours = _state_of(self.optimizer), _state_of(optimizer)
        if theirs != ours:
            raise CheckpointError(
                f"the checkpoint holds the states of {_told(self.optimizer)}, but this store updates with"
                f" {_told(optimizer)}: call set_optimizer with the same rule before, or load with states=False"
            )


def _state_of(description: Mapping[str, Any] | None) -> object:
    """What must be equal for states to fit."""
    if description is None:
        return None
    optimizer = from_description(dict(description))
    return optimizer.name, optimizer.state_names, tuple(optimizer.initial_scalars), optimizer.multi_precision


def _told(description: Mapping[str, Any] | None) -> str:
    if description is None:
        return "no optimizer"
    options = ", ".join(f"{name}={value!r}" for name, value in description.items() if name != "name")
    return f"{description.get('name')}({options})"


def folder_of(directory: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return directory / f"step-{step}"


def complete_steps(directory: Path) -> list[int]:
    """The steps of which there is a checkpoint, in order."""
    if not directory.is_dir():
        return []
    matches = [_STEP.fullmatch(folder.name) for folder in directory.iterdir() if (folder / NAME).is_file()]
    return sorted(int(match[1]) for match in matches if match)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the folder a checkpoint, if all its files are there.

    Raises:
        CheckpointError: one is not, as seen from here.
        OSError: the disk is full, say.
    """
    for file in manifest.files:
        require_present(folder, file)
    body = {"format": FORMAT, "version": VERSION, "kvdist": __version__, **asdict(manifest)}
    replace_file(folder / NAME, _with_checksum(body))


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a newer version.
    """
    path = folder / NAME
    try:
        if path.stat().st_size > MANIFEST_BYTES_MAX:
            raise CheckpointError(f"{path} is no manifest: it is longer than {MANIFEST_BYTES_MAX} bytes")
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {NAME} cannot be read ({error.strerror})") from None
    try:
        body = json.loads(text)
        if body.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint")
        if body["version"] > VERSION:
            raise CheckpointError(
                f"{path} is of version {body['version']} of the format, written by kvdist {body.get('kvdist')}; this is"
                f" kvdist {__version__}, which reads version {VERSION}: install a newer one"
            )
        body.pop("sha256")
        if _with_checksum(body) != text:
            raise CheckpointError(f"{path} is damaged: its content does not have its checksum")
        return _parsed(body)
    # It is made of whatever JSON can say.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not readable ({error})") from None


def prune(directory: Path, keep: int) -> None:
    """Remove all checkpoints but the newest `keep`; 0 keeps all. The manifest goes first."""
    for step in complete_steps(directory)[:-keep] if keep else ():
        folder = folder_of(directory, step)
        (folder / NAME).unlink(missing_ok=True)
        sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what no manifest names: files of attempts that failed, and the folder if nothing is left."""
    named: set[str] = set()
    if (folder / NAME).is_file():
        named = {file.name for file in read_manifest(folder).files}
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if _OWN_FILE.fullmatch(path.name) and path.name not in named:
            path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()


def _with_checksum(body: dict[str, Any]) -> bytes:
    """The text of a manifest; the same body always gives the same."""
    inner = json.dumps(body, sort_keys=True)
    digest = hashlib.sha256(inner.encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def _parsed(body: dict[str, Any]) -> Manifest:
    known = {name: body[name] for name in Manifest.__dataclass_fields__}
    manifest = Manifest(**known)
    return replace(
        manifest,
        contents=tuple(manifest.contents),
        keys=tuple(_parsed_keys(body["keys"])),
        files=tuple(FileRecord(**_plain_file(file)) for file in body["files"]),
    )


def _parsed_keys(keys: Iterable[dict[str, Any]]) -> Iterator[SavedKey]:
    for one in keys:
        from_name(one["dtype"])
        yield SavedKey(one["key"], tuple(int(length) for length in one["shape"]), one["dtype"])


def _plain_file(file: dict[str, Any]) -> dict[str, Any]:
    """A file of the folder itself: a manifest may come from a stranger, and names nothing outside."""
    if not _OWN_FILE.fullmatch(file["name"]):
        raise ValueError(f"a file called {file['name']!r}")
    return file
