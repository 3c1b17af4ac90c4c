"""What a CUDA device computes, as launches of the kernels beside this; nothing is known of the device but addresses.

So the same code runs on a GPU and, in tests, over kernels that are compiled for this processor. Rules that hold here:
arguments are checked as the reference checks them; scalars are rounded once, to the type in which the kernel computes;
arrays without elements launch nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.cupy_cuda import (
    CHUNK_BYTES,
    ELEMENT,
    HALVES,
    INTEGER_BATCH,
    NUMBERS_MAX,
    RULES,
    SUM_BATCHES,
    TERMS_MAX,
    THREADS,
)
from kvdist.kernels.interface import Array, Equation, Kernels
from kvdist.kernels.quantization import (
    WORD_ELEMENTS_1BIT,
    WORD_ELEMENTS_2BIT,
    check_dequantised,
    check_quantised,
    check_rounded,
)
from kvdist.kernels.reference import check_sum, factored, update_rows

PACK_BYTES = 16
WHOLE = 1 << 62
"""`Kernels.chunk_elements`: a device takes everything at once."""

SQUARES_BLOCKS_MAX = 1024
WORD_ELEMENTS = {1: WORD_ELEMENTS_1BIT, 2: WORD_ELEMENTS_2BIT}
ROW_TURNS = 4
"""Rows that a group of threads takes, as in ``rows.cu``."""
LANES_LOG2_MAX = THREADS.bit_length() - 1

_NUMPY_ELEMENT = {np.dtype(np.float32): "float", np.dtype(np.float64): "double", np.dtype(np.float16): "f16"}
_EXPONENT: dict[DType, Any] = {
    DType.FLOAT32: np.uint32(0x7F800000),
    DType.FLOAT64: np.uint64(0x7FF0000000000000),
    DType.FLOAT16: np.uint16(0x7C00),
    DType.BFLOAT16: np.uint16(0x7F80),
}
"""The bits that are all set in an infinity and in NaN."""


class CudaRuntime(Protocol):
    """Memory and launches of one device."""

    def active(self) -> AbstractContextManager[Any]:
        """See `Kernels.active`."""

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """See `Kernels.empty`."""

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Array:
        """See `Kernels.zeros`."""

    def clear(self, array: Array) -> None:
        """Fill it with zeros."""

    def address(self, array: Array) -> int:
        """Where its first element lies."""

    def sent(self, host: Array) -> Array:
        """A copy of a small array of the host, as bytes on the device; it may change as soon as this returns."""

    def number(self, array: Array) -> Any:
        """The one element of an array. Waits for the device."""

    def grouped(self, indices: Array) -> tuple[Array, Array, Array]:
        """Sort and group int64 indices.

        Returns:
            Different indices, ascending; places in `indices`, by index and then by place; and where among those places
            each different index begins. Waits for the device.
        """

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        """Queue a kernel on the current stream.

        Args:
            kernel: the expression that names it in C++, such as ``cast<f16, float>``.
            blocks: at least 1.
            arguments: NumPy scalars of the exact types of the kernel's parameters, addresses as uint64; what the
                kernel takes as a struct is an array of one element of a structured type.
        """


class CudaArithmetic:
    """The part of a `Device` that computes.

    Args:
        runtime: memory and launches.
        name: of the backend, for the log.
    """

    def __init__(self, runtime: CudaRuntime, name: str) -> None:
        self._runtime = runtime
        self._kernels = self._table(name)

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def _table(self, name: str) -> Kernels:
        return Kernels(
            name=name,
            chunk_elements=WHOLE,
            active=self._runtime.active,
            empty=self._runtime.empty,
            zeros=self._runtime.zeros,
            squares=self._squares,
            weighted_sum=self._weighted_sum,
            to_float32=self._to_float32,
            from_float32=self._from_float32,
            fused_update=self._fused_update,
            update_rows=update_rows,
            round_to_half=self._round_to_half,
            quantise_2bit=partial(self._quantise, 2),
            dequantise_2bit=partial(self._dequantise, 2),
            quantise_1bit=partial(self._quantise, 1),
            dequantise_1bit=partial(self._dequantise, 1),
        )

    def pack(self, sources: Sequence[Array], offsets: Sequence[int], out: Array) -> None:
        """See `Device.pack`. One launch, and one small copy to the device."""
        addresses, places, sizes = self._bucket(sources, offsets, out)
        self._move(addresses, places, sizes)

    def unpack(self, source: Array, offsets: Sequence[int], outs: Sequence[Array]) -> None:
        addresses, places, sizes = self._bucket(outs, offsets, source)
        self._move(places, addresses, sizes)

    def add_dequantised_2bit(self, data: Array, threshold: float, total: Array) -> None:
        self._dequantise(2, data, threshold, total, add=True)

    def add_dequantised_1bit(self, data: Array, threshold: float, total: Array) -> None:
        self._dequantise(1, data, threshold, total, add=True)

    def all_finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        exponent = _EXPONENT.get(dtype)
        addresses, sizes = self._where(arrays)
        table, blocks = _pieces(addresses, addresses, sizes)
        if exponent is None or not blocks:
            return True
        found = self._runtime.zeros(1, np.dtype(np.uint32))
        pieces = self._runtime.sent(table)
        self._runtime.launch(
            f"find_not_finite<u{8 * exponent.itemsize}>", blocks, self._pointer(pieces), np.int32(len(table)), exponent,
            self._pointer(found),
        )  # fmt: skip
        return not self._runtime.number(found)

    def merge_rows(self, indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
        length = _row_length(indices, rows)
        if not indices.size:
            return self._runtime.empty(0, np.dtype(np.int64)), self._runtime.empty(0, dtype.storage)
        kept, order, starts = self._runtime.grouped(indices)
        sums = self._runtime.empty(kept.size * length, dtype.storage)
        if sums.size:
            lanes, blocks = _lanes(kept.size, -(-length * dtype.itemsize // PACK_BYTES))
            addresses = [self._pointer(array) for array in (rows, order, starts, sums)]
            numbers = [np.int64(number) for number in (kept.size, indices.size, length)]
            self._runtime.launch(f"sum_groups<{ELEMENT[dtype]}>", blocks, *addresses, *numbers, lanes)
        return kept, sums

    def add_rows(self, table: Array, indices: Array, rows: Array) -> None:
        dtype = next(
            (each for each in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16) if each.storage == rows.dtype), None
        )
        if dtype is None or table.dtype != rows.dtype:
            raise TypeError(f"rows of one of float32, float64 and float16 are added, not {rows.dtype} to {table.dtype}")
        length = _row_length(indices, rows)
        if not rows.size:
            return
        lanes, blocks = _lanes(indices.size, -(-length * dtype.itemsize // PACK_BYTES))
        pointers = [self._pointer(array) for array in (table, indices, rows)]
        self._runtime.launch(
            f"add_rows<{ELEMENT[dtype]}>", blocks, *pointers, np.int64(indices.size), np.int64(length), lanes
        )

    def _weighted_sum(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """See `WeightedSum`. One launch for any number of sources."""
        check_sum(contributions, scales, dtype, out)
        if not contributions:
            self._runtime.clear(out)
            return
        if not out.size:
            return
        wide = _wide(dtype)
        own, factor = factored(scales)
        batch, turns = _batch(len(contributions)) if dtype.is_floating else INTEGER_BATCH
        target = ELEMENT[dtype] if out.dtype == dtype.storage else "float"
        addresses = [self._runtime.address(array) for array in contributions]
        terms, more = self._terms(addresses, own, wide)
        self._runtime.launch(
            f"weighted_sum<{ELEMENT[dtype]}, {target}, {batch}, {turns}>",
            _blocks(out.size, turns * PACK_BYTES // dtype.itemsize),
            self._pointer(out), terms, _address_of(self._runtime, more), np.int32(len(contributions)),
            rounded(factor, wide), np.int64(out.size), _aligned(self._runtime.address(out), *addresses),
        )  # fmt: skip

    def _to_float32(self, bits: Array, dtype: DType, out: Array | None = None) -> Array:
        _require_half(dtype)
        values = self._runtime.empty(bits.size, np.dtype(np.float32)) if out is None else out
        self._cast(f"cast<{ELEMENT[dtype]}, float>", bits, values)
        return values

    def _from_float32(self, values: Array, dtype: DType, out: Array | None = None) -> Array:
        _require_half(dtype)
        bits = self._runtime.empty(values.size, dtype.storage) if out is None else out
        self._cast(f"cast<float, {ELEMENT[dtype]}>", values, bits)
        return bits

    def _fused_update(
        self,
        equation: Equation,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        clip: float | None,
        out: Array,
        states: Sequence[Array],
        dtype: DType,
        master: Array | None = None,
    ) -> bool:
        """See `FusedUpdate`. One launch for any number of sources, none among them."""
        rule = RULES.get(equation.name)
        if rule is None or equation.is_negative or not dtype.is_floating:
            return False
        if not weight.size:
            return True
        wide = _wide(dtype)
        own, factor = factored(scales)
        arrays = [0 if array is None else self._runtime.address(array) for array in (out, weight, master)]
        arrays += [self._runtime.address(state) for state in states]
        sources = [self._runtime.address(array) for array in contributions]
        terms, more = self._terms(sources, own, wide)
        call = np.zeros(1, _update_type(wide))
        call["arrays"][0, : len(arrays)] = arrays
        call["size"], call["count"], call["aligned"] = weight.size, len(sources), _aligned(*arrays, *sources)
        with np.errstate(all="ignore"):
            call["factor"], call["limit"] = factor, np.inf if clip is None else clip
            call["numbers"][0, : len(equation.numbers)] = equation.numbers
        kernel = f"update<{rule}, {ELEMENT[dtype]}, {'false' if master is None else 'true'}>"
        blocks = _blocks(weight.size, PACK_BYTES // dtype.itemsize)
        self._runtime.launch(kernel, blocks, call, terms, _address_of(self._runtime, more))
        return True

    def _round_to_half(self, grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        _require_half(dtype)
        check_rounded(grad, residual, dtype, out)
        if out.size:
            pointers = [self._pointer(array) for array in (grad, residual, out)]
            kernel = f"round_to_half<{ELEMENT[dtype]}>"
            self._runtime.launch(kernel, _blocks(out.size, 8), *pointers, np.int64(out.size), _aligned(*pointers))

    def _quantise(self, bits: int, grad: Array, residual: Array, threshold: float, out: Array) -> None:
        """See `Quantise`.

        Args:
            bits: of a code: 1 or 2.
            grad, residual, threshold, out: as there.
        """
        check_quantised(grad, residual, out, WORD_ELEMENTS[bits])
        if out.size:
            inputs = [self._pointer(grad), self._pointer(residual)]
            turns = 4 if bits == 2 else 2
            self._runtime.launch(
                f"quantise<{bits}>", _blocks(out.size, turns), *inputs, np.float32(threshold), self._pointer(out),
                np.int64(grad.size), np.int64(out.size), _aligned(*inputs),
            )  # fmt: skip

    def _dequantise(self, bits: int, data: Array, threshold: float, out: Array, add: bool = False) -> None:
        """See `Dequantise`.

        Args:
            bits: of a code: 1 or 2.
            data, threshold, out: as there.
            add: whether to add to what is in `out`.
        """
        check_dequantised(data, out, WORD_ELEMENTS[bits])
        if out.size:
            self._runtime.launch(
                f"dequantise<{bits}, {'true' if add else 'false'}>", _blocks(out.size, 16), self._pointer(data),
                np.float32(threshold), self._pointer(out), np.int64(out.size), _aligned(self._runtime.address(out)),
            )  # fmt: skip

    def _squares(self, values: Array) -> float:
        """See `Squares`. Two launches, and one wait."""
        element = _NUMPY_ELEMENT.get(values.dtype)
        if element is None:
            raise TypeError(f"squares are summed of float32, float64 and float16, not of {values.dtype}")
        if not values.size:
            return 0.0
        blocks = min(SQUARES_BLOCKS_MAX, _blocks(values.size, 4 * PACK_BYTES // values.dtype.itemsize))
        partial_sums, total = (self._runtime.empty(count, np.dtype(np.float64)) for count in (blocks, 1))
        given, kept = self._pointer(values), self._pointer(partial_sums)
        self._runtime.launch(f"squares<{element}>", blocks, given, np.int64(values.size), kept, _aligned(given))
        self._runtime.launch("add_partials", 1, kept, np.int32(blocks), self._pointer(total))
        return float(self._runtime.number(total))

    def _where(self, arrays: Sequence[Array]) -> tuple[Array, Array]:
        """Addresses and bytes."""
        addresses = np.array([self._runtime.address(array) for array in arrays], np.int64)
        return addresses, np.array([array.nbytes for array in arrays], np.int64)

    def _bucket(self, arrays: Sequence[Array], offsets: Sequence[int], bucket: Array) -> tuple[Array, Array, Array]:
        """Where the arrays lie, where their places in the bucket lie, and their bytes."""
        if bucket.dtype != np.uint8:
            raise TypeError(f"a bucket is an array of uint8, not {bucket.dtype}")
        if len(offsets) != len(arrays):
            raise ValueError(f"{len(arrays)} arrays need as many offsets, not {len(offsets)}")
        addresses, sizes = self._where(arrays)
        places = np.array(offsets, np.int64)
        beyond = np.flatnonzero((places < 0) | (places + sizes > bucket.nbytes))
        if beyond.size:
            first = beyond[0]
            raise ValueError(f"{sizes[first]} bytes at {places[first]} do not fit into a bucket of {bucket.nbytes}")
        return addresses, places + self._runtime.address(bucket), sizes

    def _move(self, sources: Array, targets: Array, sizes: Array) -> None:
        table, blocks = _pieces(sources, targets, sizes)
        if blocks:
            pieces = self._runtime.sent(table)
            self._runtime.launch("copy_pieces", blocks, self._pointer(pieces), np.int32(len(table)))

    def _cast(self, kernel: str, given: Array, out: Array) -> None:
        if given.size != out.size:
            raise ValueError(f"{given.size} elements are cast to as many, not to {out.size}")
        if out.size:
            pointers = [self._pointer(out), self._pointer(given)]
            self._runtime.launch(kernel, _blocks(out.size, 16), *pointers, np.int64(out.size), _aligned(*pointers))

    def _pointer(self, array: Array) -> np.uint64:
        return np.uint64(self._runtime.address(array))

    def _terms(
        self, addresses: Sequence[int], scales: Sequence[float], wide: np.dtype[Any]
    ) -> tuple[Array, Array | None]:
        """The struct of the first sources, and the table of the others, on the device."""
        term = _term_type(wide)
        terms = np.zeros(max(TERMS_MAX, len(addresses)), term)
        terms["source"][: len(addresses)] = addresses
        with np.errstate(all="ignore"):
            terms["scale"][: len(addresses)] = scales
        more = self._runtime.sent(terms[TERMS_MAX:]) if len(addresses) > TERMS_MAX else None
        return terms[:TERMS_MAX].view(np.dtype([("term", term, (TERMS_MAX,))])), more


def rounded(value: float, dtype: np.dtype[Any]) -> Any:
    """A number in the type in which a kernel computes; too large is infinite."""
    with np.errstate(all="ignore"):
        return dtype.type(value)


def _wide(dtype: DType) -> np.dtype[Any]:
    """The type in which the kernels compute."""
    return dtype.accumulate if dtype.is_floating else np.dtype(f"u{dtype.itemsize}")


@cache
def _term_type(wide: np.dtype[Any]) -> np.dtype[Any]:
    """``Term`` of ``common.cuh``."""
    return np.dtype({"names": ["source", "scale"], "formats": [np.uint64, wide], "offsets": [0, 8], "itemsize": 16})


@cache
def _update_type(wide: np.dtype[Any]) -> np.dtype[Any]:
    """``Update`` of ``updates.cu``."""
    fields: list[Any] = [("arrays", np.uint64, (5,)), ("size", np.int64), ("factor", wide), ("limit", wide)]
    fields += [("numbers", wide, (NUMBERS_MAX,)), ("count", np.int32), ("aligned", np.int32)]
    return np.dtype(fields, align=True)


def _batch(count: int) -> tuple[int, int]:
    """The smallest batch that takes `count` sources at once, or the largest there is; and its packs."""
    return next((each for each in SUM_BATCHES.items() if each[0] >= count), list(SUM_BATCHES.items())[-1])


def _blocks(items: int, items_per_thread: int) -> int:
    return -(-items // (items_per_thread * THREADS))


def _aligned(*addresses: int | np.uint64) -> np.int32:
    """Whether all arrays start where loads of 16 bytes may."""
    return np.int32(all(int(address) % PACK_BYTES == 0 for address in addresses))


def _address_of(engine: CudaRuntime, array: Array | None) -> np.uint64:
    return np.uint64(0 if array is None else engine.address(array))


def _require_half(dtype: DType) -> None:
    if dtype not in HALVES:
        raise TypeError(f"{dtype.label} is not a half: only float16 and bfloat16 are cast from and to float32")


def _pieces(sources: Array, targets: Array, sizes: Array) -> tuple[Array, int]:
    """The table of ``Piece``, without those of no bytes, and how many chunks there are."""
    ends = np.cumsum(-(-sizes // CHUNK_BYTES))
    firsts = np.concatenate([np.zeros(1, np.int64), ends])
    return np.column_stack([sources, targets, sizes, firsts[:-1]])[sizes > 0], int(firsts[-1])


def _row_length(indices: Array, rows: Array) -> int:
    length, rest = divmod(rows.size, max(1, indices.size))
    if indices.dtype != np.int64:
        raise TypeError(f"indices of rows are int64, not {indices.dtype}")
    if rest or (rows.size and not indices.size):
        raise ValueError(f"row data has {rows.size} elements, which is not a multiple of {indices.size} rows")
    return length


def _lanes(rows: int, units: int) -> tuple[np.int32, int]:
    """The logarithm of how many threads share a row, and how many blocks there are."""
    lanes = min(LANES_LOG2_MAX, (units - 1).bit_length())
    return np.int32(lanes), -(-rows // ((THREADS >> lanes) * ROW_TURNS))
