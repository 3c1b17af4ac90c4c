"""Arrays on the wire: columns of numbers in a header, and values in payload frames."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from kvdist import errors
from kvdist.dtypes import DType

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
Payload = bytes | bytearray | memoryview
Bits = npt.NDArray[np.generic]
"""A 1-D array of `DType.storage` elements."""
Size = TypeVar("Size", int, npt.NDArray[np.int64])

ALIGNMENT_BYTES = 8
"""Each array in a payload starts at a multiple of this."""


class _InFrames:
    """Arrays back to back in one or more payload frames; each frame holds whole arrays."""

    __slots__ = ()
    payload: Payload | tuple[Payload, ...]

    @property
    def frames(self) -> tuple[Payload, ...]:
        """The payload frames."""
        return self.payload if isinstance(self.payload, tuple) else (self.payload,)

    @property
    def nbytes(self) -> int:
        """The bytes of all payload frames."""
        if type(self.payload) is memoryview:
            return self.payload.nbytes  # nearly always, and asked several times for each message
        return sum(len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in self.frames)


@dataclass(frozen=True, slots=True, eq=False)
class Arrays(_InFrames):
    """Plain arrays, each starting at a multiple of 8 bytes of the payload.

    Attributes:
        dtypes: (n,) codes of `kvdist.dtypes.DType`.
        counts: (n,) elements of each array.
        payload: all bytes.
        encoding: 0 = the elements themselves.
    """

    dtypes: U8
    counts: U32
    payload: Payload | tuple[Payload, ...]
    encoding: int = 0


class Encoding(enum.IntEnum):
    """Encodings of float32 elements; WIRE.md specifies the bytes. A code never gets a second meaning."""

    TWO_BIT = 1
    ONE_BIT = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    TOP_K = 5
    INT8 = 6
    INT4 = 7


@dataclass(frozen=True, slots=True, eq=False)
class Coded(_InFrames):
    """Arrays of float32 in the same encoding. The bytes of an array follow from its number of entries.

    Attributes:
        counts: (n,) elements of each array, 0 for an empty contribution.
        entries: (n,) number of elements that travel: all, except for top-k.
        encoding: the code of the encoding.
        parameter: the threshold of 2-bit and 1-bit, else 0.
        payload: all bytes.
    """

    counts: U32
    entries: U32
    encoding: int
    parameter: float
    payload: Payload | tuple[Payload, ...]


# Where arrays lie in a payload: each starts at the next multiple of eight bytes after the one before it. Both sides
# compute this from dtypes and counts, so offsets do not travel and cannot be wrong.


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to the offset at which the next array of a payload may start."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


ITEMSIZES = np.zeros(256, np.int64)
"""(256,) bytes per element by dtype code; 0 where no dtype has that code."""
for _dtype in DType:
    ITEMSIZES[_dtype] = _dtype.itemsize
ITEMSIZES.flags.writeable = False

_STORAGE = {int(dtype): dtype.storage for dtype in DType}


def pad_sizes(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Round (n,) bytes of arrays up to whole multiples of 8, in place.

    No sum of them overflows: a count is below 2**32, an element has at most 8 bytes, and a message has at most 2**20
    slices.
    """
    sizes += ALIGNMENT_BYTES - 1
    sizes &= -ALIGNMENT_BYTES
    return sizes


def offsets(dtypes: U8, counts: U32) -> tuple[npt.NDArray[np.int64], int]:
    """The (n,) byte offset at which each array starts, and the bytes of the whole payload."""
    sizes = pad_sizes(ITEMSIZES.take(dtypes) * counts)
    ends = np.cumsum(sizes)
    return ends - sizes, int(ends[-1]) if len(ends) else 0


class PayloadView:
    """A payload seen as its arrays, read-only and without a copy.

    A frame whose address is not a multiple of 8 (a transport may deliver any) is copied once as a whole.

    Raises:
        ValueError: the length of the payload contradicts dtypes and counts.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._bases = [_aligned(frame) for frame in arrays.frames]
        self._starts, self._total = offsets(arrays.dtypes, arrays.counts)
        lengths = [len(base) for base in self._bases]
        if sum(lengths) != self._total:
            raise ValueError(f"the payload has {sum(lengths)} bytes where its dtypes and counts make {self._total}")
        self._ends = np.cumsum(lengths)

    def arrays(self, begin: int, end: int) -> list[npt.NDArray[Any]]:
        """The 1-D arrays of entries `begin` to `end`, each of its dtype's storage type."""
        dtypes, counts = self._arrays.dtypes[begin:end], self._arrays.counts[begin:end].tolist()
        codes = dtypes.tolist()
        if len(self._starts) == 1:  # a large array that travels alone
            return [self._bases[0].view(_STORAGE[code])[:count] for code, count in zip(codes, counts, strict=True)]
        frames = self._frames(begin, end)
        if codes and codes == codes[:1] * len(codes):  # nearly always, and thousands of small arrays are much of a step
            places = stretches(np.array(frames, np.uint32)) if len(self._bases) > 1 else [(0, end - begin)]
            parts = [self._alike(frames[i], begin + i, counts[i:j], codes[0]) for i, j in places]
            return list(chain.from_iterable(parts))
        # A frame is a multiple of 8 bytes, so all of it can be seen as each type, and an array is a slice of that.
        pairs = set(zip(frames, codes, strict=True))
        typed = {(frame, code): self._bases[frame].view(_STORAGE[code]) for frame, code in pairs}
        before = self._ends - [len(base) for base in self._bases]
        firsts = ((self._starts[begin:end] - before[frames]) // ITEMSIZES[dtypes]).tolist()
        return [
            typed[frame, code][first : first + count]
            for frame, code, first, count in zip(frames, codes, firsts, counts, strict=True)
        ]

    def _alike(self, frame: int, begin: int, counts: list[int], code: int) -> list[npt.NDArray[Any]]:
        """Arrays of the same dtype in the same frame, from entry `begin` on; at least one."""
        base, itemsize, count = self._bases[frame], int(ITEMSIZES[code]), counts[0]
        typed, before = base.view(_STORAGE[code]), int(self._ends[frame]) - len(base)
        firsts = (self._starts[begin : begin + len(counts)] - before) // itemsize
        if count and count * itemsize % ALIGNMENT_BYTES == 0 and counts == [count] * len(counts):
            first = int(firsts[0])  # without gaps: NumPy cuts rows of a matrix in half the time of slices
            return list(typed[first : first + count * len(counts)].reshape(-1, count))
        return [typed[first : first + size] for first, size in zip(firsts.tolist(), counts, strict=True)]

    def stretch(self, begin: int, end: int, dtype: DType) -> npt.NDArray[Any]:
        """The entries `begin` to `end`, all of the same dtype, as a single 1-D array that includes the padding.

        A copy if they lie in several frames, else a view.
        """
        start = int(self._starts[begin])
        stop = int(self._starts[end]) if end < len(self._starts) else self._total
        last = int(np.searchsorted(self._ends, stop))
        first = last if last == 0 or start >= self._ends[last - 1] else int(np.searchsorted(self._ends, start, "right"))
        if first == last:  # nearly always
            before = int(self._ends[last]) - len(self._bases[last])
            return self._bases[last][start - before : stop - before].view(dtype.storage)
        pieces = self._bases[first : last + 1]
        pieces[0] = pieces[0][start - int(self._ends[first]) :]  # counted from its end
        pieces[-1] = pieces[-1][: stop - int(self._ends[last - 1])]
        return np.concatenate(pieces).view(dtype.storage)

    def _frames(self, begin: int, end: int) -> list[int]:
        """The frame of each entry."""
        if len(self._bases) == 1:
            return [0] * (end - begin)
        # An entry without elements may start at the very end: it lies in the last frame.
        found = np.searchsorted(self._ends, self._starts[begin:end], side="right")
        frames: list[int] = np.minimum(found, len(self._bases) - 1).tolist()
        return frames


def _aligned(frame: Payload) -> npt.NDArray[np.uint8]:
    base: npt.NDArray[np.uint8] = np.frombuffer(memoryview(frame).toreadonly(), np.uint8)
    if base.__array_interface__["data"][0] % ALIGNMENT_BYTES:
        base = base.copy()
        base.flags.writeable = False
    return base


def views(arrays: Arrays) -> list[npt.NDArray[Any]]:
    """A list with an array per entry; see `PayloadView`."""
    return PayloadView(arrays).arrays(0, len(arrays.counts))


def stretches(numbers: U32) -> list[tuple[int, int]]:
    """(begin, end) of each run of equal numbers, in order."""
    if not len(numbers):
        return []
    data = numbers.tobytes()
    if data == data[: numbers.itemsize] * len(numbers):  # nearly always one, and bytes are compared soonest
        return [(0, len(numbers))]
    ends = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


# Encoded arrays.

INDEX = np.dtype("<u4")
"""The index of a top-k entry; all indices of an array stand before all values."""
VALUE = np.dtype("<f4")
BLOCK = 256
"""Number of elements of scaled integers that share a scale; all scales of an array stand before all codes."""
INTEGER_BITS: dict[int, int] = {Encoding.INT8: 8, Encoding.INT4: 4}
"""Bits of a scaled integer."""
_ENCODINGS = frozenset(int(encoding) for encoding in Encoding)
_WORD_BITS: dict[int, int] = {Encoding.TWO_BIT: 2, Encoding.ONE_BIT: 1}
"""Bits of an entry, where entries are packed into words of 32."""
_ENTRY_BYTES: dict[int, int] = {
    Encoding.FLOAT16: 2,
    Encoding.BFLOAT16: 2,
    Encoding.TOP_K: INDEX.itemsize + VALUE.itemsize,
}


def coded_size(encoding: int, entries: Size) -> Size:
    """The bytes of an encoded array, or of (n,) arrays, by the number of entries, without padding."""
    if encoding in INTEGER_BITS:
        return (entries + (BLOCK - 1)) // BLOCK * VALUE.itemsize + (entries * INTEGER_BITS[encoding] + 31) // 32 * 4
    bits = _WORD_BITS.get(encoding)
    return entries * _ENTRY_BYTES[encoding] if bits is None else (entries * bits + 31) // 32 * 4


def coded_sizes(encoding: int, entries: U32) -> npt.NDArray[np.int64]:
    """The (n,) bytes of encoded arrays, by their numbers of entries, without padding."""
    return coded_size(encoding, entries.astype(np.int64))


def as_octets(coded: Coded) -> Arrays:
    """The same payload as plain arrays of uint8."""
    sizes = coded_sizes(coded.encoding, coded.entries)
    if (sizes >> 32).any():
        raise errors.ProtocolError("an encoded array of 4 GiB or more")
    return Arrays(np.full(len(sizes), DType.UINT8, np.uint8), sizes.astype(np.uint32), coded.payload)


def decoded_dtypes(coded: Coded) -> npt.NDArray[np.uint8]:
    """(n,) the dtype of the elements: float32."""
    return np.full(len(coded.counts), DType.FLOAT32, np.uint8)


def check_coded(coded: Coded, decoded_bytes_max: int) -> None:
    """Refuse encoded arrays that do not fit together, before their payload is read.

    Args:
        coded: the arrays; its lists have the same length.
        decoded_bytes_max: largest total size of the decoded arrays, in bytes.

    Raises:
        ProtocolError: a value does not fit; the message names it.
    """
    if type(coded.encoding) not in (int, Encoding) or coded.encoding not in _ENCODINGS:
        raise errors.ProtocolError(f"unknown encoding {ascii(coded.encoding)[:40]}")
    if not _is_float32(coded.parameter):
        raise errors.ProtocolError("the parameter of an encoding is not a finite float32 number")
    if coded.encoding == Encoding.TWO_BIT and not coded.parameter > 0:
        raise errors.ProtocolError("the threshold of 2-bit is not above 0")
    if coded.encoding not in _WORD_BITS and coded.parameter != 0:
        raise errors.ProtocolError(f"encoding {int(coded.encoding)} has no parameter, found {coded.parameter}")
    if coded.encoding == Encoding.TOP_K:
        if (coded.entries > coded.counts).any():
            raise errors.ProtocolError("more entries than elements")
    elif (coded.entries != coded.counts).any():
        raise errors.ProtocolError("another number of entries than elements; only top-k may leave elements out")
    decoded = int(pad_sizes(coded.counts.astype(np.int64) * VALUE.itemsize).sum())
    if decoded > decoded_bytes_max:
        raise errors.ProtocolError(f"{decoded} bytes when decoded, where {decoded_bytes_max} are allowed")


def _is_float32(number: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(number)) and float(np.float32(number)) == number


def check_indices(coded: Coded) -> None:
    """Check the indices of top-k entries in a payload of the right size, in a single pass.

    Raises:
        ProtocolError: they do not ascend, or an index is out of range.
    """
    if coded.encoding != Encoding.TOP_K:
        return
    payload = PayloadView(as_octets(coded)).arrays(0, len(coded.counts))
    for data, count in zip(payload, coded.counts.tolist(), strict=True):
        indices = data[: len(data) // 2].view(INDEX)
        if len(indices) and (int(indices[-1]) >= count or bool((indices[1:] <= indices[:-1]).any())):
            raise errors.ProtocolError("the indices of top-k entries do not ascend, or one is out of range")
