"""What each kernel is called with: the functions of `Kernels`, and those that only devices have, over any engine.

Rules that hold here: nothing is known of CUDA but addresses, so that the same code runs over an engine that has the
kernels compiled for this processor. Arguments are checked as the reference checks them. Scalars are rounded once, to
the type in which the kernel computes. Arrays without elements launch nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, partial
from typing import Any, Protocol

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.cuda import ELEMENT, HALVES, INTEGER_BATCH, RULES, SUM_BATCHES, TERMS_MAX, THREADS
from kvdist.kernels.interface import NUMBERS_MAX, Array, Equation, Kernels
from kvdist.kernels.quantised import (
    WORD_ELEMENTS_1BIT,
    WORD_ELEMENTS_2BIT,
    check_dequantised,
    check_quantised,
    check_rounded,
)
from kvdist.kernels.reference import check_sum

PACK_BYTES = 16
WHOLE = 1 << 62
"""`Kernels.chunk_elements`: a device takes everything at once."""

SQUARES_BLOCKS_MAX = 1024
WORD_ELEMENTS = {1: WORD_ELEMENTS_1BIT, 2: WORD_ELEMENTS_2BIT}
_NUMPY_ELEMENT = {np.dtype(np.float32): "float", np.dtype(np.float64): "double", np.dtype(np.float16): "f16"}


class Engine(Protocol):
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
        """Ask for a kernel on the current stream.

        Args:
            kernel: as of `kvdist.kernels.cuda.instances`.
            blocks: at least 1.
            arguments: NumPy scalars of the exact types of the kernel's parameters, addresses as uint64; what the
                kernel takes as a struct is an array of one element of a structured type.
        """


class Calls:
    """Calls the kernels of one engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def table(self, name: str) -> Kernels:
        """All of them, as other code takes them.

        Args:
            name: of the backend, for the log.
        """
        return Kernels(
            name=name,
            chunk_elements=WHOLE,
            active=self._engine.active,
            empty=self._engine.empty,
            zeros=self._engine.zeros,
            squares=self.squares,
            weighted_sum=self.weighted_sum,
            to_float32=self.to_float32,
            from_float32=self.from_float32,
            fused_update=self.fused_update,
            round_to_half=self.round_to_half,
            quantise_2bit=partial(self.quantise, 2),
            dequantise_2bit=partial(self.dequantise, 2),
            quantise_1bit=partial(self.quantise, 1),
            dequantise_1bit=partial(self.dequantise, 1),
        )

    def weighted_sum(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """See `WeightedSum`. One launch for any number of sources."""
        check_sum(contributions, scales, dtype, out)
        if not contributions:
            self._engine.clear(out)
            return
        if not out.size:
            return
        wide = _wide(dtype)
        own, factor = factored(scales)
        batch, turns = _batch(len(contributions)) if dtype.is_floating else INTEGER_BATCH
        target = ELEMENT[dtype] if out.dtype == dtype.storage else "float"
        addresses = [self._engine.address(array) for array in contributions]
        terms, more = self._terms(addresses, own, wide)
        self._engine.launch(
            f"weighted_sum<{ELEMENT[dtype]}, {target}, {batch}, {turns}>",
            _blocks(out.size, turns * PACK_BYTES // dtype.itemsize),
            self._pointer(out), terms, _address_of(self._engine, more), np.int32(len(contributions)),
            rounded(factor, wide), np.int64(out.size), _aligned(self._engine.address(out), *addresses),
        )  # fmt: skip

    def to_float32(self, bits: Array, dtype: DType, out: Array | None = None) -> Array:
        """See `ToFloat32`."""
        _require_half(dtype)
        values = self._engine.empty(bits.size, np.dtype(np.float32)) if out is None else out
        self._cast(f"cast<{ELEMENT[dtype]}, float>", bits, values)
        return values

    def from_float32(self, values: Array, dtype: DType, out: Array | None = None) -> Array:
        """See `FromFloat32`."""
        _require_half(dtype)
        bits = self._engine.empty(values.size, dtype.storage) if out is None else out
        self._cast(f"cast<float, {ELEMENT[dtype]}>", values, bits)
        return bits

    def fused_update(
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
        if rule is None or not dtype.is_floating:
            return False
        if not weight.size:
            return True
        wide = _wide(dtype)
        own, factor = factored(scales)
        arrays = [0 if array is None else self._engine.address(array) for array in (out, weight, master)]
        arrays += [self._engine.address(state) for state in states]
        sources = [self._engine.address(array) for array in contributions]
        terms, more = self._terms(sources, own, wide)
        call = np.zeros(1, _update_type(wide))
        call["arrays"][0, : len(arrays)] = arrays
        call["size"], call["count"], call["aligned"] = weight.size, len(sources), _aligned(*arrays, *sources)
        with np.errstate(all="ignore"):
            call["factor"], call["limit"] = factor, np.inf if clip is None else clip
            call["numbers"][0, : len(equation.numbers)] = equation.numbers
        kernel = f"update<{rule}, {ELEMENT[dtype]}, {'false' if master is None else 'true'}>"
        blocks = _blocks(weight.size, PACK_BYTES // dtype.itemsize)
        self._engine.launch(kernel, blocks, call, terms, _address_of(self._engine, more))
        return True

    def round_to_half(self, grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        """See `RoundToHalf`."""
        _require_half(dtype)
        check_rounded(grad, residual, dtype, out)
        if out.size:
            pointers = [self._pointer(array) for array in (grad, residual, out)]
            kernel = f"round_to_half<{ELEMENT[dtype]}>"
            self._engine.launch(kernel, _blocks(out.size, 8), *pointers, np.int64(out.size), _aligned(*pointers))

    def quantise(self, bits: int, grad: Array, residual: Array, threshold: float, out: Array) -> None:
        """See `Quantise`.

        Args:
            bits: of a code: 1 or 2.
            grad, residual, threshold, out: as there.
        """
        check_quantised(grad, residual, out, WORD_ELEMENTS[bits])
        if out.size:
            inputs = [self._pointer(grad), self._pointer(residual)]
            turns = 4 if bits == 2 else 2
            self._engine.launch(
                f"quantise<{bits}>", _blocks(out.size, turns), *inputs, np.float32(threshold), self._pointer(out),
                np.int64(grad.size), np.int64(out.size), _aligned(*inputs),
            )  # fmt: skip

    def dequantise(self, bits: int, data: Array, threshold: float, out: Array, add: bool = False) -> None:
        """See `Dequantise`.

        Args:
            bits: of a code: 1 or 2.
            data, threshold, out: as there.
            add: whether to add to what is in `out`.
        """
        check_dequantised(data, out, WORD_ELEMENTS[bits])
        if out.size:
            self._engine.launch(
                f"dequantise<{bits}, {'true' if add else 'false'}>", _blocks(out.size, 16), self._pointer(data),
                np.float32(threshold), self._pointer(out), np.int64(out.size), _aligned(self._engine.address(out)),
            )  # fmt: skip

    def squares(self, values: Array) -> float:
        """See `Squares`. Two launches, and one wait."""
        element = _NUMPY_ELEMENT.get(values.dtype)
        if element is None:
            raise TypeError(f"squares are summed of float32, float64 and float16, not of {values.dtype}")
        if not values.size:
            return 0.0
        blocks = min(SQUARES_BLOCKS_MAX, _blocks(values.size, 4 * PACK_BYTES // values.dtype.itemsize))
        partial_sums, total = (self._engine.empty(count, np.dtype(np.float64)) for count in (blocks, 1))
        given, kept = self._pointer(values), self._pointer(partial_sums)
        self._engine.launch(f"squares<{element}>", blocks, given, np.int64(values.size), kept, _aligned(given))
        self._engine.launch("add_partials", 1, kept, np.int32(blocks), self._pointer(total))
        return float(self._engine.number(total))

    def _cast(self, kernel: str, given: Array, out: Array) -> None:
        if given.size != out.size:
            raise ValueError(f"{given.size} elements are cast to as many, not to {out.size}")
        if out.size:
            pointers = [self._pointer(out), self._pointer(given)]
            self._engine.launch(kernel, _blocks(out.size, 16), *pointers, np.int64(out.size), _aligned(*pointers))

    def _pointer(self, array: Array) -> np.uint64:
        return np.uint64(self._engine.address(array))

    def _terms(
        self, addresses: Sequence[int], scales: Sequence[float], wide: np.dtype[Any]
    ) -> tuple[Array, Array | None]:
        """The struct of the first sources, and the table of the others, on the device."""
        term = _term_type(wide)
        terms = np.zeros(max(TERMS_MAX, len(addresses)), term)
        terms["source"][: len(addresses)] = addresses
        with np.errstate(all="ignore"):
            terms["scale"][: len(addresses)] = scales
        more = self._engine.sent(terms[TERMS_MAX:]) if len(addresses) > TERMS_MAX else None
        return terms[:TERMS_MAX].view(np.dtype([("term", term, (TERMS_MAX,))])), more


def factored(scales: Sequence[float]) -> tuple[Sequence[float], float]:
    """Each source's own scale, and the one of the sum. A factor of 1 changes no bit."""
    if scales and scales.count(scales[0]) == len(scales):
        return (1.0,) * len(scales), scales[0]
    return scales, 1.0


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
    """The smallest batch that takes so many sources at once, or the largest there is; and its packs."""
    return next((each for each in SUM_BATCHES.items() if each[0] >= count), list(SUM_BATCHES.items())[-1])


def _blocks(items: int, items_per_thread: int) -> int:
    return -(-items // (items_per_thread * THREADS))


def _aligned(*addresses: int | np.uint64) -> np.int32:
    """Whether all arrays start where loads of 16 bytes may."""
    return np.int32(all(int(address) % PACK_BYTES == 0 for address in addresses))


def _address_of(engine: Engine, array: Array | None) -> np.uint64:
    return np.uint64(0 if array is None else engine.address(array))


def _require_half(dtype: DType) -> None:
    if dtype not in HALVES:
        raise TypeError(f"{dtype.label} is not a half: only float16 and bfloat16 are cast from and to float32")
