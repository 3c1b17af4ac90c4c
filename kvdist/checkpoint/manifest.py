"""The manifest: what a checkpoint has, written last. A folder without one is no checkpoint.

It is JSON with a checksum over everything else in it, so that a changed digit is found, and names every file with its
length and checksum. It may come from a stranger: every entry is checked, and it names no file outside its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from kvdist.checkpoint.files import FileRecord, read_regular, replace_file, require_present
from kvdist.dtypes import from_name
from kvdist.errors import CheckpointError
from kvdist.initializer import initializer_from
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import from_description
from kvdist.protocol.messages import ROWS
from kvdist.version import __version__

_Named = TypeVar("_Named")

NAME = "manifest.json"
FORMAT = "kvdist checkpoint"
VERSION = 2
"""Of the format. A reader refuses what is newer than itself."""
VERSION_WITHOUT_TABLES = 1
"""Written where no key is a table of rows: then nothing is different, and older readers can go on."""
MANIFEST_BYTES_MAX = 1 << 30

WEIGHTS, STATES = "weights", "states"
EVERYTHING = (WEIGHTS, STATES)
"""What a checkpoint can hold."""

DIMENSIONS_MAX = 64
COUNT_MAX = (1 << 63) - 1

SERVER_FILE = re.compile(r"server-[0-9]{1,9}-[0-9a-f]{1,64}\.safetensors")
WORKER_FILE = re.compile(r"worker-([0-9]{1,9})-[0-9a-f]{1,64}\.json")
RUN = re.compile(r"[0-9a-f]{16}")
"""What tells jobs apart: drawn by each."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class SavedKey:
    """A key as every worker knows it.

    Attributes:
        form: "" for an array, `ROWS` for a table of rows all of which exist, or what the rows of a lazy one begin as.
    """

    key: int | str
    shape: tuple[int, ...]
    dtype: str
    form: str = ""

    def __str__(self) -> str:
        kind = f", as a table of rows that begin as {self.form}" if self.is_lazy else ""
        return f"shape {self.shape} and dtype {self.dtype}{kind}"

    @property
    def is_lazy(self) -> bool:
        """Whether only some of its rows exist."""
        return self.form not in ("", ROWS)

    def fits(self, other: SavedKey) -> bool:
        """Whether one can go on from the other. All elements of an array are there, and all of a table of `ROWS`."""
        ours, theirs = (one.form if one.is_lazy else "" for one in (self, other))
        return (self.key, self.shape, self.dtype, ours) == (other.key, other.shape, other.dtype, theirs)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint has.

    Attributes:
        step: the user's number of it; 0 for states that were saved alone.
        run: of the job that wrote it, the same in each of its files; empty if an older kvdist wrote it.
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
    run: str = ""

    @property
    def shards(self) -> list[FileRecord]:
        """The files with arrays."""
        return [file for file in self.files if not WORKER_FILE.fullmatch(file.name)]

    @property
    def workers(self) -> dict[int, FileRecord]:
        """Rank → what that worker wanted to have back."""
        found = [(WORKER_FILE.fullmatch(file.name), file) for file in self.files]
        return {int(match[1]): file for match, file in found if match}

    def require_part(self, path: Path, run: object, step: object) -> None:
        """Whether a file was written for this checkpoint, by what it says of itself.

        Raises:
            CheckpointError: it was written by another job, or for another step.
        """
        if self.run and (run, str(step)) != (self.run, str(self.step)):
            raise CheckpointError(
                f"{path} is not a part of this checkpoint: it was written by run {run!r:.40} for step {step!r:.40}, the"
                f" manifest by run {self.run!r} for step {self.step}. Two jobs have saved into one folder, or files of"
                " two checkpoints were put together"
            )

    def require(self, keys: Iterable[SavedKey], optimizer: Mapping[str, Any] | None, contents: Sequence[str]) -> None:
        """Whether a store of these keys and this optimizer can take in these contents.

        Raises:
            CheckpointError: it cannot; says what differs.
        """
        missing = [one for one in contents if one not in self.contents]
        if missing:
            raise CheckpointError(f"the checkpoint has no {' and no '.join(missing)}, only {', '.join(self.contents)}")
        saved, present = ({key.key: key for key in some} for some in (self.keys, keys))
        if new := [key for key in present if key not in saved]:
            raise CheckpointError(f"the checkpoint has no {_listed(new)}, which this store has")
        if old := [key for key in saved if key not in present]:
            raise CheckpointError(f"the checkpoint has {_listed(old)}, which this store has not: init before you load")
        for key, one in saved.items():
            if not one.fits(present[key]):
                raise CheckpointError(
                    f"key {key!r} has {one} in the checkpoint, but {present[key]} in this store: init it as it was"
                )
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
    optimizer = chosen_optimizer(description)
    return optimizer.name, optimizer.state_names, tuple(optimizer.initial_scalars), optimizer.multi_precision


def chosen_optimizer(description: Mapping[str, Any]) -> Optimizer:
    """The optimizer of a manifest.

    Raises:
        CheckpointError: this process knows none of that name, or not with these numbers.
    """
    try:
        return from_description(dict(description))
    except ValueError as error:
        raise CheckpointError(f"the optimizer of the checkpoint cannot be used here: {error}") from None


def _listed(keys: Sequence[int | str]) -> str:
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    return f"key {', '.join(map(repr, keys[:3]))}{more}"


def _told(description: Mapping[str, Any] | None) -> str:
    if description is None:
        return "no optimizer"
    options = ", ".join(f"{name}={value!r}" for name, value in description.items() if name != "name")
    return f"{description.get('name')}({options})"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make the folder a checkpoint, if all its files are there.

    Raises:
        CheckpointError: one is not, as seen from here.
        OSError: the disk is full, say.
    """
    for file in manifest.files:
        require_present(folder, file)
    _require_ours(folder / NAME)
    has_tables = any(one.form for one in manifest.keys)
    body = {
        "format": FORMAT,
        "version": VERSION if has_tables else VERSION_WITHOUT_TABLES,
        "kvdist": __version__,
        **asdict(manifest),
        "keys": [_told_key(one) for one in manifest.keys],
    }
    replace_file(folder / NAME, _with_checksum(body))


def _told_key(one: SavedKey) -> dict[str, Any]:
    told = asdict(one)
    return told if one.form else {name: value for name, value in told.items() if name != "form"}


def _require_ours(path: Path) -> None:
    """Many programs have files of this name.

    Raises:
        CheckpointError: the file is there, and is none of ours.
    """
    if os.path.lexists(path) and FORMAT.encode() not in read_regular(path, MANIFEST_BYTES_MAX):
        raise CheckpointError(f"{path} belongs to another program; choose another folder for checkpoints")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder.

    Raises:
        CheckpointError: there is none, or it is damaged, or of a newer version.
    """
    path = folder / NAME
    try:
        text = read_regular(path, MANIFEST_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(f"{folder} is no checkpoint: {NAME} cannot be read ({error.strerror})") from None
    try:
        body = json.loads(text)
        if body.get("format") != FORMAT:
            raise CheckpointError(f"{path} is not the manifest of a checkpoint")
        if _count(body["version"]) > VERSION:
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


def _with_checksum(body: dict[str, Any]) -> bytes:
    """The text of a manifest; the same body always gives the same."""
    inner = json.dumps(body, sort_keys=True)
    digest = hashlib.sha256(inner.encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def _parsed(body: dict[str, Any]) -> Manifest:
    optimizer, contents = body["optimizer"], tuple(body["contents"])
    if optimizer is not None and type(optimizer) is not dict:
        raise ValueError("the optimizer is no table")
    if not contents or any(one not in EVERYTHING for one in contents):
        raise ValueError(f"contents of {contents!r:.80}")
    if type(body["exact"]) is not bool or type(body["mode"]) is not str:
        raise ValueError("the mode is no text, or whether it is exact is no truth value")
    return Manifest(
        _count(body["step"]),
        contents,
        body["mode"],
        body["exact"],
        optimizer,
        _count(body["num_workers"]),
        _count(body["num_servers"]),
        tuple(_without_twins([_parsed_key(**one) for one in body["keys"]], "key", lambda one: one.key)),
        tuple(_without_twins([_parsed_file(**one) for one in body["files"]], "file", lambda one: one.name)),
        _parsed_run(body.get("run", "")),
    )


def _parsed_run(run: Any) -> str:
    if type(run) is not str or not (run == "" or RUN.fullmatch(run)):
        raise ValueError(f"a run {run!r:.80}")
    return run


def _parsed_key(key: Any, shape: Any, dtype: Any, form: Any = "") -> SavedKey:
    if type(key) not in (int, str):
        raise ValueError(f"a key {key!r:.80}")
    if len(shape) > DIMENSIONS_MAX:
        raise ValueError(f"a shape of {len(shape)} dimensions")
    found = SavedKey(key, tuple(_count(length) for length in shape), dtype, form)
    kind = from_name(dtype)
    if form and (not shape or not math.prod(shape[1:])):
        raise ValueError(f"a table of shape {shape}, which has no rows with elements")
    if found.is_lazy:
        if type(form) is not str:
            raise ValueError(f"a form {form!r:.80}")
        initializer_from(form).check(kind)
    return found


def _parsed_file(name: Any, nbytes: Any, sha256: Any) -> FileRecord:
    if not (SERVER_FILE.fullmatch(name) or WORKER_FILE.fullmatch(name)):
        raise ValueError(f"a file called {name!r:.300}")
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"a checksum {sha256!r:.80}")
    return FileRecord(name, _count(nbytes), sha256)


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= COUNT_MAX:
        raise ValueError(f"{number!r:.80} where a count belongs")
    return number


def _without_twins(found: Sequence[_Named], what: str, name: Callable[[_Named], object]) -> Sequence[_Named]:
    if len({name(one) for one in found}) != len(found):
        raise ValueError(f"one {what} is named twice")
    return found
