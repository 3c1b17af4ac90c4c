"""One file of arrays in the safetensors format: eight bytes of length, a header in JSON, the arrays back to back.

Written from where the arrays lie and read into where they shall lie: no copy of a file is ever in memory, and bfloat16,
which NumPy does not have, is written and read like everything else. Any program that knows the format reads what is
written here. Nothing in a header is trusted: every offset is compared with its shape, with its neighbours' and with the
length of the file.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.files import FileRecord, open_regular, write_file, write_named_file
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError

Bits = npt.NDArray[np.generic]
"""A 1-D array of `DType.storage` elements."""

SUFFIX = ".safetensors"
METADATA = "__metadata__"
HEADER_BYTES_MAX = 100_000_000
"""As other readers of the format have it."""
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
"""What the format calls each element type."""
_TYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array to be written.

    Attributes:
        name: unique in its file.
        dtype: element type.
        shape: its lengths.
        read: gives its elements, 1-D and contiguous; called once, when they are written.
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
        CheckpointError: there are too many for one header, or a name is no text.
        OSError: the disk is full, say.
    """
    ordered = _ordered(tensors)
    return write_file(folder, stem, SUFFIX, _parts(_header(ordered, metadata), ordered))


def write_named_tensors(
    path: Path, tensors: Sequence[Tensor], metadata: Mapping[str, str], overwrite: bool
) -> FileRecord:
    """Write a file of these arrays under this very name.

    Raises:
        CheckpointError: as of `write_tensors`.
        FileExistsError: there is one, and it is not to be overwritten.
        OSError: the disk is full, say.
    """
    ordered = _ordered(tensors)
    return write_named_file(path, _parts(_header(ordered, metadata), ordered), overwrite)


def _ordered(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Wide elements first: so each array starts where its elements may."""
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
        raise CheckpointError(f"two arrays of one file cannot have one name, and none can be called {METADATA}")
    try:
        header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise CheckpointError(f"the name of an array is no text that a file can hold: {error}") from None
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
class Entry:
    """Where an array lies in its file."""

    dtype: DType
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize


class TensorFile:
    """A file of arrays, read piece by piece.

    Args:
        path: the file. It may belong to somebody else: see the rules of this module.

    Raises:
        CheckpointError: it is not such a file, or damaged.
        OSError: it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, str] = {}
        self.entries: dict[str, Entry] = {}
        with BufferedReader(open_regular(path)) as file:
            nbytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if nbytes < 8 or length > min(HEADER_BYTES_MAX, nbytes - 8):
                raise CheckpointError(f"{path} is no safetensors file, or cut off: its header does not fit into it")
            header = file.read(length)
        try:
            entries = json.loads(header, object_pairs_hook=_without_twins)
            metadata = entries.pop(METADATA, {})
            self.metadata = {name: str(value) for name, value in metadata.items()}
            self.entries = {name: _entry(entry, 8 + length) for name, entry in entries.items()}
            _require_back_to_back(self.entries.values(), 8 + length, nbytes)
        # A header is made of whatever JSON can say.
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: its header is not readable ({error})") from None

    def read_into(self, name: str, start: int, out: Bits) -> None:
        """Fill `out` with the elements of an array from `start`.

        Raises:
            CheckpointError: there is no such array, or it is shorter, or of another type.
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
        raise ValueError("one name stands there twice")
    return found


def _entry(entry: Any, begin: int) -> Entry:
    dtype = _TYPES[entry["dtype"]]
    shape, (low, high) = tuple(entry["shape"]), entry["data_offsets"]
    if len(shape) > DIMENSIONS_MAX or any(not _is_count(number) for number in [*shape, low, high]):
        raise ValueError("a length or an offset is no count")
    if high - low != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array is not as long as its shape says")
    return Entry(dtype, shape, begin + low)


def _is_count(number: object) -> bool:
    return type(number) is int and 0 <= number <= COUNT_MAX


def _require_back_to_back(entries: Iterable[Entry], begin: int, nbytes: int) -> None:
    """Whether the arrays fill the file: none outside, none over another, no room for anything else."""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.nbytes)):
        if entry.offset != begin:
            raise ValueError("an array begins where another one lies, or beyond the end of the one before it")
        begin += entry.nbytes
    if begin != nbytes:
        raise ValueError(f"its arrays end at byte {begin} and the file at byte {nbytes}")
