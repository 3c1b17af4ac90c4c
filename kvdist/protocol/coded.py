"""Where encoded arrays lie in a payload, and what must hold of them.

The bytes of an array follow from its encoding and its number of entries, so no size travels and none can be wrong.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvdist.dtypes import DType
from kvdist.errors import ProtocolError
from kvdist.protocol.arrays import U32, Arrays
from kvdist.protocol.compressed import Coded, Encoding
from kvdist.protocol.layout import PayloadView, padded_sizes

INDEX = np.dtype("<u4")
"""Of a top-k entry; all indices of an array stand before all values."""
VALUE = np.dtype("<f4")
_ENCODINGS = frozenset(int(encoding) for encoding in Encoding)
_WORD_BITS = {Encoding.TWO_BIT: 2, Encoding.ONE_BIT: 1}
"""Bits of an entry, where entries are packed into words of 32."""
_ENTRY_BYTES = {
    Encoding.FLOAT16: 2,
    Encoding.BFLOAT16: 2,
    Encoding.TOP_K: INDEX.itemsize + VALUE.itemsize,
}


def coded_sizes(encoding: int, entries: U32) -> npt.NDArray[np.int64]:
    """The (n,) bytes of arrays of so many entries, without padding."""
    which, wide = Encoding(encoding), entries.astype(np.int64)
    bits = _WORD_BITS.get(which)
    return wide * _ENTRY_BYTES[which] if bits is None else (wide * bits + 31) // 32 * 4


def coded_size(encoding: Encoding, entries: int) -> int:
    """The bytes of one array, without padding."""
    bits = _WORD_BITS.get(encoding)
    return entries * _ENTRY_BYTES[encoding] if bits is None else -(-entries * bits // 32) * 4


def as_octets(coded: Coded) -> Arrays:
    """The same payload as plain arrays of bytes."""
    sizes = coded_sizes(coded.encoding, coded.entries)
    if (sizes >> 32).any():
        raise ProtocolError("an encoded array of 4 GiB or more")
    return Arrays(np.full(len(sizes), DType.UINT8, np.uint8), sizes.astype(np.uint32), coded.payload)


def decoded_dtypes(coded: Coded) -> npt.NDArray[np.uint8]:
    """(n,) the dtype of the elements: float32."""
    return np.full(len(coded.counts), DType.FLOAT32, np.uint8)


def check_coded(coded: Coded, decoded_bytes_max: int) -> None:
    """What must hold of encoded arrays before anybody looks at their payload.

    Args:
        coded: the arrays; its lists have one length.
        decoded_bytes_max: what all of them may have together when they are decoded.

    Raises:
        ProtocolError: it does not hold.
    """
    if type(coded.encoding) not in (int, Encoding) or coded.encoding not in _ENCODINGS:
        raise ProtocolError(f"unknown encoding {ascii(coded.encoding)[:40]}")
    if not _is_float32(coded.parameter):
        raise ProtocolError("the parameter of an encoding is not a finite number of float32")
    if coded.encoding == Encoding.TWO_BIT and not coded.parameter > 0:
        raise ProtocolError("the threshold of 2-bit is not more than 0")
    if coded.encoding not in _WORD_BITS and coded.parameter != 0:
        raise ProtocolError("a parameter for an encoding that has none")
    if coded.encoding == Encoding.TOP_K:
        if (coded.entries > coded.counts).any():
            raise ProtocolError("more entries than elements")
    elif (coded.entries != coded.counts).any():
        raise ProtocolError("another number of entries than elements, in an encoding of all elements")
    decoded = int(padded_sizes(decoded_dtypes(coded), coded.counts).sum())
    if decoded > decoded_bytes_max:
        raise ProtocolError(f"{decoded} bytes when decoded, where {decoded_bytes_max} are allowed")


def _is_float32(number: float) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.isfinite(number)) and float(np.float32(number)) == number


def check_indices(coded: Coded) -> None:
    """Look at the indices of top-k entries in a payload of the right size: one pass over them.

    Raises:
        ProtocolError: they do not ascend, or one is no element's.
    """
    if coded.encoding != Encoding.TOP_K:
        return
    payload = PayloadView(as_octets(coded)).arrays(0, len(coded.counts))
    for data, count in zip(payload, coded.counts.tolist(), strict=True):
        indices = data[: len(data) // 2].view(INDEX)
        if len(indices) and (int(indices[-1]) >= count or bool((indices[1:] <= indices[:-1]).any())):
            raise ProtocolError("the indices of top-k entries do not ascend, or one is no element's")
