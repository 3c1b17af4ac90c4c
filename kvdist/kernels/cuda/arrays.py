"""What is done with many arrays or with rows on a device, over any engine: see `kvdist.kernels.interface.Device`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.cuda import CHUNK_BYTES, ELEMENT, THREADS, UNITS
from kvdist.kernels.cuda.calls import PACK_BYTES, Engine
from kvdist.kernels.interface import Array

ROW_TURNS = 4
"""Rows that a group of threads takes, as in ``rows.cu``."""

LANES_LOG2_MAX = THREADS.bit_length() - 1
_EXPONENT: dict[DType, Any] = {
    DType.FLOAT32: np.uint32(0x7F800000),
    DType.FLOAT64: np.uint64(0x7FF0000000000000),
    DType.FLOAT16: np.uint16(0x7C00),
    DType.BFLOAT16: np.uint16(0x7F80),
}


def pack(engine: Engine, sources: Sequence[Array], offsets: Sequence[int], out: Array) -> None:
    """See `Device.pack`. One launch, and one small copy to the device."""
    addresses, places, sizes = _bucket(engine, sources, offsets, out)
    _move(engine, addresses, places, sizes)


def unpack(engine: Engine, source: Array, offsets: Sequence[int], outs: Sequence[Array]) -> None:
    """See `Device.unpack`."""
    addresses, places, sizes = _bucket(engine, outs, offsets, source)
    _move(engine, places, addresses, sizes)


def all_finite(engine: Engine, arrays: Sequence[Array], dtype: DType) -> bool:
    """See `Device.all_finite`."""
    exponent = _EXPONENT.get(dtype)
    addresses, sizes = _where(engine, arrays)
    table, blocks = _pieces(addresses, addresses, sizes)
    if exponent is None or not blocks:
        return True
    found = engine.zeros(1, np.dtype(np.uint32))
    pieces = engine.sent(table)
    engine.launch(
        f"find_not_finite<u{8 * exponent.itemsize}>", blocks, np.uint64(engine.address(pieces)), np.int32(len(table)),
        exponent, np.uint64(engine.address(found)),
    )  # fmt: skip
    return not engine.number(found)


def merge_rows(engine: Engine, indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
    """See `Device.merge_rows`."""
    length = _row_length(indices, rows)
    if not indices.size:
        return engine.empty(0, np.dtype(np.int64)), engine.empty(0, dtype.storage)
    kept, order, starts = engine.grouped(indices)
    sums = engine.empty(kept.size * length, dtype.storage)
    if sums.size:
        lanes, blocks = _lanes(kept.size, -(-length * dtype.itemsize // PACK_BYTES))
        addresses = [np.uint64(engine.address(array)) for array in (rows, order, starts, sums)]
        numbers = [np.int64(number) for number in (kept.size, indices.size, length)]
        engine.launch(f"sum_groups<{ELEMENT[dtype]}>", blocks, *addresses, *numbers, lanes)
    return kept, sums


def gather_rows(engine: Engine, table: Array, indices: Array, out: Array) -> None:
    """See `Device.gather_rows`."""
    row_bytes = _row_length(indices, out) * out.dtype.itemsize
    if not row_bytes:
        return
    addresses = [engine.address(array) for array in (table, indices, out)]
    unit = next(size for size in UNITS if not any(each % size for each in (addresses[0], addresses[2], row_bytes)))
    lanes, blocks = _lanes(indices.size, row_bytes // unit)
    pointers = [np.uint64(address) for address in addresses]
    engine.launch(
        f"gather_rows<{UNITS[unit]}>", blocks, *pointers, np.int64(indices.size), np.int64(row_bytes // unit), lanes
    )


def add_rows(engine: Engine, table: Array, indices: Array, rows: Array) -> None:
    """See `Device.add_rows`."""
    dtype = next((each for each in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16) if each.storage == rows.dtype), None)
    if dtype is None or table.dtype != rows.dtype:
        raise TypeError(f"rows of one of float32, float64 and float16 are added, not {rows.dtype} to {table.dtype}")
    length = _row_length(indices, rows)
    if not rows.size:
        return
    lanes, blocks = _lanes(indices.size, -(-length * dtype.itemsize // PACK_BYTES))
    pointers = [np.uint64(engine.address(array)) for array in (table, indices, rows)]
    engine.launch(f"add_rows<{ELEMENT[dtype]}>", blocks, *pointers, np.int64(indices.size), np.int64(length), lanes)


def _where(engine: Engine, arrays: Sequence[Array]) -> tuple[Array, Array]:
    """Addresses and bytes."""
    addresses = np.array([engine.address(array) for array in arrays], np.int64)
    return addresses, np.array([array.nbytes for array in arrays], np.int64)


def _bucket(
    engine: Engine, arrays: Sequence[Array], offsets: Sequence[int], bucket: Array
) -> tuple[Array, Array, Array]:
    """Where the arrays lie, where their places in the bucket lie, and their bytes."""
    if bucket.dtype != np.uint8:
        raise TypeError(f"a bucket is an array of uint8, not {bucket.dtype}")
    if len(offsets) != len(arrays):
        raise ValueError(f"{len(arrays)} arrays need as many offsets, not {len(offsets)}")
    addresses, sizes = _where(engine, arrays)
    places = np.array(offsets, np.int64)
    beyond = np.flatnonzero((places < 0) | (places + sizes > bucket.nbytes))
    if beyond.size:
        first = beyond[0]
        raise ValueError(f"{sizes[first]} bytes at {places[first]} do not fit into a bucket of {bucket.nbytes}")
    return addresses, places + engine.address(bucket), sizes


def _pieces(sources: Array, targets: Array, sizes: Array) -> tuple[Array, int]:
    """The table of ``Piece``, without those of no bytes, and how many chunks there are."""
    ends = np.cumsum(-(-sizes // CHUNK_BYTES))
    firsts = np.concatenate([np.zeros(1, np.int64), ends])
    return np.column_stack([sources, targets, sizes, firsts[:-1]])[sizes > 0], int(firsts[-1])


def _move(engine: Engine, sources: Array, targets: Array, sizes: Array) -> None:
    table, blocks = _pieces(sources, targets, sizes)
    if blocks:
        pieces = engine.sent(table)
        engine.launch("copy_pieces", blocks, np.uint64(engine.address(pieces)), np.int32(len(table)))


def _row_length(indices: Array, rows: Array) -> int:
    length, rest = divmod(rows.size, max(1, indices.size))
    if indices.dtype != np.int64:
        raise TypeError(f"rows are named by int64, not {indices.dtype}")
    if rest or (rows.size and not indices.size):
        raise ValueError(f"{rows.size} elements are no whole rows of {indices.size}")
    return length


def _lanes(rows: int, units: int) -> tuple[np.int32, int]:
    """The logarithm of how many threads share a row, and how many blocks there are."""
    lanes = min(LANES_LOG2_MAX, (units - 1).bit_length())
    return np.int32(lanes), -(-rows // ((THREADS >> lanes) * ROW_TURNS))
