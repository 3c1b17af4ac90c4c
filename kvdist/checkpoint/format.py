"""Files of a checkpoint: arrays in the safetensors format, the manifest, and files of workers.

Invariants:

* Arrays are written from their place in memory, and read into their place: no copy of a whole file is in memory, and
  bfloat16, which NumPy lacks, is treated like every type. Any reader of safetensors reads the files.
* Files are not trusted: every offset of a header is compared with its shape, its neighbours and the length of the file;
  a manifest names no file outside its folder.
* The manifest is written last, with a checksum of everything else in it: a folder without a manifest is no checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kvdist.checkpoint.files import (
    open_regular,
    read_intact,
    read_regular,
    replace_file,
    require_present,
    write_file,
    write_named_file,
)
from kvdist.checkpoint.snapshot import (
    EVERYTHING,
    OWN_FILE,
    RUN,
    SERVER_FILE,
    WORKER_FILE,
    Bits,
    FileRecord,
    Manifest,
    SavedKey,
)
from kvdist.dtypes import DType, from_name
from kvdist.errors import CheckpointError
from kvdist.optimizer.initializer import initializer_from
from kvdist.version import __version__

SUFFIX = ".safetensors"
METADATA = "__metadata__"
HEADER_BYTES_MAX = 100_000_000
"""Limit, as in other readers of the format."""
ALIGNMENT_BYTES = 8
DIMENSIONS_MAX = 64
COUNT_MAX = (1 << 63) - 1

NAMES = {
    DType.FLOAT64: "F64",
    DType.INT64: "I64",
    DType.FLOAT32: "F32",
    DType.INT32: "I32",
    DType.FLOAT16: "F16",
    DType.BFLOAT16: "BF16",
    DType.INT8: "I8",
    DType.UINT8: "U8",
}
"""Element type → its name in the format."""
_TYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array to be written.

    Attributes:
        name: name, unique in its file.
        dtype: element type.
        shape: lengths of its dimensions.
        read: returns its elements, 1-D and contiguous; called once, when they are written.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    read: Callable[[], Bits]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, stem: str, tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> FileRecord:
    """Write a file of these arrays, named by its content.

    Raises:
        CheckpointError: the header would be too long, or a name is not unique or cannot be encoded.
        OSError: writing failed, as on a full disk.
    """
    ordered = _ordered(tensors)
    return write_file(folder, stem, SUFFIX, _parts(_header(ordered, metadata), ordered))


def write_named_tensors(
    path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str], overwrite: bool
) -> FileRecord:
    """Write a file of these arrays under this exact name.

    Raises:
        CheckpointError: as in `write_tensors`.
        FileExistsError: the file exists, and `overwrite` is False.
        OSError: writing failed, as on a full disk.
    """
    ordered = _ordered(tensors)
    return write_named_file(path, _parts(_header(ordered, metadata), ordered), overwrite)


def _ordered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the arrays with the widest elements first, so that each array is aligned."""
    return sorted(tensors, key=lambda tensor: -tensor.dtype.itemsize)


def _header(ordered: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, Any] = {METADATA: dict(metadata)}
    offset = 0
    for tensor in ordered:
        end = offset + tensor.nbytes
        entries[tensor.name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    if len(entries) != len(ordered) + 1:
        raise CheckpointError(f"the arrays of a file need different names, and none may be called {METADATA}")
    try:
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the name of an array cannot be encoded: {error}") from None
    header += b" " * (-len(header) % ALIGNMENT_BYTES)
    if len(header) > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"{len(ordered)} arrays need a header of {len(header)} bytes, where files may have {HEADER_BYTES_MAX};"
            " use more servers, or a larger KVDIST_SLICE_BYTES"
        )
    return header


def _parts(header: bytes, ordered: Sequence[Tensor]) -> Iterator[memoryview]:
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for tensor in ordered:
        if tensor.nbytes:
            yield np.ascontiguousarray(tensor.read()).view(np.uint8).data


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Place of an array in its file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    """Offset of its first byte in the file."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class TensorFile:
    """A file of arrays, read piece by piece.

    Args:
        path: path of the file, which is not trusted.

    Raises:
        CheckpointError: the file is not in the format, or damaged.
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.entries: dict[str, TensorEntry] = {}
        with BufferedReader(open_regular(path)) as file:
            nbytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if nbytes < 8 or length > min(HEADER_BYTES_MAX, nbytes - 8):
                raise CheckpointError(f"{path} is not a safetensors file, or cut off: its header does not fit into it")
            header = file.read(length)
        try:
            entries = json.loads(header, object_pairs_hook=_without_twins)
            metadata = entries.pop(METADATA, {})
            self.metadata = {name: str(value) for name, value in metadata.items()}
            self.entries = {name: _entry(entry, 8 + length) for name, entry in entries.items()}
            _require_back_to_back(self.entries.values(), 8 + length, nbytes)
        # JSON can hold any type and any depth.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its header is not readable ({error})") from None

    def read_into(self, name: str, start: int, out: Bits) -> None:
        """Fill `out` with the elements of an array from `start`.

        Raises:
            CheckpointError: the file has no such array, or it is shorter, or of another type.
        """
        entry = self.entries.get(name)
        if entry is None or out.dtype != entry.dtype.storage or not 0 <= start <= entry.size - out.size:
            raise CheckpointError(f"{self.path} does not have elements {start} to {start + out.size} of {name}")
        view = out.view(np.uint8).data
        with open_regular(self.path) as file:
            file.seek(entry.offset + start * entry.dtype.itemsize)
            while view:
                count = file.readinto(view)
                if not count:
                    raise CheckpointError(f"{self.path} was cut off while it was read")
                view = view[count:]


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found


def _entry(entry: Any, begin: int) -> TensorEntry:
    dtype = _TYPES[entry["dtype"]]
    shape, (low, high) = tuple(entry["shape"]), entry["data_offsets"]
    if len(shape) > DIMENSIONS_MAX or any(not _is_count(number) for number in [*shape, low, high]):
        raise ValueError("a length or an offset is not a count")
    if high - low != math.prod(shape) * dtype.itemsize:
        raise ValueError("the length of an array contradicts its shape")
    return TensorEntry(dtype, shape, begin + low)


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= COUNT_MAX


def _require_back_to_back(entries: Iterable[TensorEntry], begin: int, nbytes: int) -> None:
    """Check that the arrays fill the file exactly: without overlaps, gaps or other data."""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != begin:
            raise ValueError("arrays overlap, or leave a gap")
        begin += entry.nbytes
    if begin != nbytes:
        raise ValueError(f"its arrays end at byte {begin} and the file at byte {nbytes}")


# The manifest.

_Named = TypeVar("_Named")

NAME = "manifest.json"
FORMAT = "kvdist checkpoint"
VERSION = 2
"""Version of the format. A reader refuses newer versions."""
VERSION_WITHOUT_TABLES = 1
"""Version of manifests without tables of rows, which older readers can read."""
MANIFEST_BYTES_MAX = 1 << 30

LISTED = (SERVER_FILE, WORKER_FILE)
"""Names of the files that a manifest lists."""
_SHA256 = re.compile(r"[0-9a-f]{64}")


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Complete a checkpoint: check that its files exist, and write its manifest.

    Raises:
        CheckpointError: a file is missing on this host.
        OSError: writing failed, as on a full disk.
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
        "keys": [_described_key(one) for one in manifest.keys],
    }
    if manifest.data is None:
        del body["data"]
    replace_file(folder / NAME, _with_checksum(body))


def _described_key(one: SavedKey) -> dict[str, Any]:
    entry = asdict(one)
    return entry if one.form else {name: value for name, value in entry.items() if name != "form"}


def _require_ours(path: Path) -> None:
    """Check that a file of this common name is a manifest of a checkpoint, if it exists.

    Raises:
        CheckpointError: another program wrote the file.
    """
    if os.path.lexists(path) and FORMAT.encode() not in read_regular(path, MANIFEST_BYTES_MAX):
        raise CheckpointError(f"{path} belongs to another program; choose another folder for checkpoints")


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a folder.

    Raises:
        CheckpointError: the manifest is missing, damaged, or of a newer version.
    """
    path = folder / NAME
    try:
        text = read_regular(path, MANIFEST_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(f"{folder} is not a checkpoint: {NAME} cannot be read ({error.strerror})") from None
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
    # JSON can hold any type and any depth.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not readable ({error})") from None


def _with_checksum(body: dict[str, Any]) -> bytes:
    """Return the text of a manifest; equal bodies have equal texts."""
    inner = json.dumps(body, sort_keys=True)
    digest = hashlib.sha256(inner.encode()).hexdigest()
    return (json.dumps({**body, "sha256": digest}, sort_keys=True, indent=1) + "\n").encode()


def _parsed(body: dict[str, Any]) -> Manifest:
    optimizer, contents = body["optimizer"], tuple(body["contents"])
    if optimizer is not None and type(optimizer) is not dict:
        raise ValueError("the optimizer is not a table")
    if not contents or any(one not in EVERYTHING for one in contents):
        raise ValueError(f"contents of {contents!r:.80}")
    if type(body["exact"]) is not bool or type(body["mode"]) is not str:
        raise ValueError("the mode is not a text, or exact is not a truth value")
    return Manifest(
        _count(body["step"]),
        contents,
        body["mode"],
        body["exact"],
        optimizer,
        _count(body["num_workers"]),
        _count(body["num_servers"]),
        tuple(_with_different_names([_parsed_key(**one) for one in body["keys"]], "key", lambda one: one.key)),
        tuple(_with_different_names([_parsed_file(**one) for one in body["files"]], "file", lambda one: one.name)),
        _parsed_run(body.get("run", "")),
        _parsed_data(body.get("data")),
    )


def _parsed_data(data: Any) -> dict[str, Any] | None:
    if data is not None and type(data) is not dict:
        raise ValueError("the place in the data is not a table")
    return data


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


def _parsed_file(name: Any, nbytes: Any, sha256: Any, kinds: Sequence[re.Pattern[str]] = LISTED) -> FileRecord:
    if not any(kind.fullmatch(name) for kind in kinds):
        raise ValueError(f"a file called {name!r:.300}")
    if not _SHA256.fullmatch(sha256):
        raise ValueError(f"a checksum {sha256!r:.80}")
    return FileRecord(name, _count(nbytes), sha256)


def _count(number: Any) -> int:
    if type(number) is not int or not 0 <= number <= COUNT_MAX:
        raise ValueError(f"{number!r:.80} where a count belongs")
    return number


def _with_different_names(found: Sequence[_Named], what: str, name: Callable[[_Named], object]) -> Sequence[_Named]:
    if len({name(one) for one in found}) != len(found):
        raise ValueError(f"a {what} occurs twice")
    return found


# Files of workers: the user's state, and from rank 0 the names of parameters.

STATE_BYTES_MAX = 16 << 20


@dataclass(frozen=True, slots=True)
class OwnStates:
    """States of the optimizer of a worker that updates its weights itself.

    Attributes:
        file: file with the states.
        optimizer: description of the optimizer.
        steps: number of steps of the worker.
    """

    file: FileRecord
    optimizer: Mapping[str, Any]
    steps: int


@dataclass(frozen=True, slots=True)
class WorkerFile:
    """Content of the file of a worker.

    Attributes:
        state: state from the user, of any JSON type; None without a state.
        names: key → name of its parameter.
        own: states of the worker's optimizer, if the worker updates its weights itself.
    """

    state: Any
    names: Mapping[int | str, str]
    own: OwnStates | None = None


def read_worker(folder: Path, record: FileRecord, manifest: Manifest) -> WorkerFile:
    """Read the file of a worker.

    Raises:
        CheckpointError: the file is missing or damaged, or belongs to another checkpoint.
    """
    path = folder / record.name
    if record.nbytes > STATE_BYTES_MAX:
        raise CheckpointError(f"{path} is damaged: it has {record.nbytes} bytes, and {STATE_BYTES_MAX} are allowed")
    text = read_intact(folder, record)
    try:
        content = json.loads(text)
        manifest.require_part(path, content.get("run"), content.get("step"))
        return WorkerFile(content["state"], dict(_names(content["names"])), _own_states(content.get("own")))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: not readable ({error})") from None


def read_workers(folder: Path, manifest: Manifest) -> dict[int, WorkerFile]:
    """Return rank → content of the worker's file.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    return {rank: read_worker(folder, record, manifest) for rank, record in manifest.workers.items()}


def _own_states(own: Any) -> OwnStates | None:
    if own is None:
        return None
    if type(own["optimizer"]) is not dict:
        raise ValueError("the optimizer is not a table")
    return OwnStates(_parsed_file(**own["file"], kinds=(OWN_FILE,)), own["optimizer"], _count(own["steps"]))


def _names(pairs: Any) -> Iterator[tuple[int | str, str]]:
    for key, name in pairs:
        if type(key) not in (int, str) or type(name) is not str:
            raise ValueError(f"a key {key!r:.80} called {name!r:.80}")
        yield key, name
