"""Gradient compression: float32 contributions in fewer bytes, whose error is kept and sent later.

The error stays in the *residual*, an array of float32 of the length of the gradient, which starts at zero and is added
to the next gradient. Pure; the arithmetic is in `kvdist.kernels`, the layout of the bytes in `protocol/WIRE.md`.

| type | an element travels as | the server sees | residual |
|---|---|---|---|
| ``2bit`` | 2 bits | ±threshold where the sum of gradient and residual reaches it, else 0 | the rest |
| ``1bit`` | 1 bit | +1 above the threshold, else -1 | the rest |
| ``fp16``, ``bf16`` | 16 bits | the nearest half | the rounding error |
| ``int8``, ``int4`` | 8 or 4 bits, and 256 share a scale | the nearest of 255 or 15 multiples of that | the rest |
| ``topk`` | 8 bytes, but only a share `ratio` of them, the largest | the largest; 0 for the others | the others |
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Kernels
from kvdist.protocol.arrays import BLOCK, INDEX, INTEGER_BITS, VALUE, Encoding, coded_size, padded

Octets = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TwoBit:
    """Each element is sent as +`threshold`, -`threshold` or 0, so at most the threshold of it travels in a push."""

    encoding: ClassVar[Encoding] = Encoding.TWO_BIT
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not 0 < _as_float32(self.threshold) < math.inf:
            raise ValueError(f"the threshold of '2bit' is {self.threshold!r}; it must be a number of float32 above 0")

    def __str__(self) -> str:
        return f"2bit with the threshold {self.threshold!r}"

    @property
    def parameter(self) -> float:
        """The threshold as a float32 number, as the arithmetic uses it."""
        return _as_float32(self.threshold)

    def write(self, grad: Array, residual: Array, kernels: Kernels, out: Array) -> None:
        """See `EachCodec`. A single pass reads gradient and residual, writes the residual and a quarter byte each."""
        kernels.quantise_2bit(grad, residual, self.parameter, out)


@dataclass(frozen=True, slots=True)
class OneBit:
    """Each element is sent as +1 above the threshold, else as -1: no code has the value 0, so zeros alternate."""

    encoding: ClassVar[Encoding] = Encoding.ONE_BIT
    threshold: float = 0.5

    def __post_init__(self) -> None:
        if not math.isfinite(_as_float32(self.threshold)):
            raise ValueError(f"the threshold of '1bit' is {self.threshold!r}; it must be a finite number of float32")

    def __str__(self) -> str:
        return f"1bit with the threshold {self.threshold!r}"

    @property
    def parameter(self) -> float:
        """The threshold as a float32 number, as the arithmetic uses it."""
        return _as_float32(self.threshold)

    def write(self, grad: Array, residual: Array, kernels: Kernels, out: Array) -> None:
        """See `EachCodec`. A single pass reads gradient and residual, writes the residual and an eighth byte each."""
        kernels.quantise_1bit(grad, residual, self.parameter, out)


@dataclass(frozen=True, slots=True)
class Half:
    """Each element is rounded to `dtype`."""

    dtype: DType
    parameter: ClassVar[float] = 0.0

    def __str__(self) -> str:
        return "fp16" if self.dtype is DType.FLOAT16 else "bf16"

    @property
    def encoding(self) -> Encoding:
        """Encoding of the half type."""
        return Encoding.FLOAT16 if self.dtype is DType.FLOAT16 else Encoding.BFLOAT16

    def write(self, grad: Array, residual: Array, kernels: Kernels, out: Array) -> None:
        """See `EachCodec`. A single pass reads gradient and residual, writes the residual and two bytes each."""
        kernels.round_to_half(grad, residual, self.dtype, out.view(self.dtype.storage))


@dataclass(frozen=True, slots=True)
class TopK:
    """Only the largest elements travel, of each slice the share `ratio`, rounded up."""

    encoding: ClassVar[Encoding] = Encoding.TOP_K
    parameter: ClassVar[float] = 0.0
    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"the ratio of 'topk' is {self.ratio!r}; it must be more than 0 and at most 1")

    def __str__(self) -> str:
        return f"topk with the ratio {self.ratio!r}"

    def entries(self, count: int) -> int:
        """Number of elements, out of `count`, that travel."""
        return min(count, math.ceil(self.ratio * count))

    def encode(self, grad: Array, residual: Array) -> tuple[Octets, int]:
        """See `encode`. Four passes: sum, absolute values, selection (in a copy), and reset of the selected elements.

        A NaN counts as larger than any number, so it travels and leaves nothing behind.
        """
        entries = self.entries(grad.size)
        whole, data = room(self.encoding, entries)
        with np.errstate(all="ignore"):
            np.add(residual, grad, out=residual)
            sizes = np.abs(residual)
        rest = grad.size - entries
        indices = np.sort(np.argpartition(sizes, rest)[rest:]) if 0 < rest < grad.size else np.arange(entries)
        middle = entries * INDEX.itemsize
        data[:middle].view(INDEX)[...] = indices
        data[middle:].view(VALUE)[...] = residual[indices]
        residual[indices] = 0
        return whole, entries


@dataclass(frozen=True, slots=True)
class Scaled:
    """Each element is an integer of `bits` bits times a scale, which 256 elements share.

    The scale makes the largest element the largest integer, so that no element is off by more than half a scale. If any
    of the 256 elements is NaN or infinite, the scale is NaN, and so are all 256 when they are decoded.
    """

    encoding: Encoding
    parameter: ClassVar[float] = 0.0

    def __str__(self) -> str:
        return f"int{self.bits}"

    @property
    def bits(self) -> int:
        """Number of bits of an integer."""
        return INTEGER_BITS[self.encoding]

    @property
    def most(self) -> int:
        """The largest integer; the least is its negative."""
        return (1 << self.bits - 1) - 1

    def encode(self, grad: Array, residual: Array) -> tuple[Octets, int]:
        """See `encode`. Ten passes in cache, and a pass over memory."""
        whole, data = room(self.encoding, grad.size)
        blocks = -(-grad.size // BLOCK)
        scales, codes = data[: blocks * VALUE.itemsize].view(VALUE), data[blocks * VALUE.itemsize :]
        codes[-(-grad.size * self.bits // 8) :] = 0
        for begin in range(0, grad.size, CHUNK_ELEMENTS):  # a multiple of the block
            rest = residual[begin : begin + CHUNK_ELEMENTS]
            own = scales[begin // BLOCK : -(-(begin + rest.size) // BLOCK)]
            with np.errstate(all="ignore"):
                np.add(rest, grad[begin : begin + CHUNK_ELEMENTS], out=rest)
                self._write_scales(rest, own)
                wide = np.repeat(own, BLOCK)[: rest.size]
                integers = np.clip(np.rint(rest / np.where(wide > 0, wide, 1)), -self.most, self.most)
                np.subtract(rest, integers * wide, out=rest)
                unknown = np.isnan(wide)
                if unknown.any():
                    rest[unknown] = integers[unknown] = 0
            self._pack(integers, codes[begin * self.bits // 8 :])
        return whole, grad.size

    def _write_scales(self, values: Array, scales: Array) -> None:
        largest = np.maximum.reduceat(np.abs(values), np.arange(0, values.size, BLOCK))
        np.divide(largest, np.float32(self.most), out=scales)
        np.minimum(scales, np.float32(SCALE_TIMES_MOST_MAX / self.most), out=scales, where=np.isfinite(largest))
        scales[~np.isfinite(largest)] = np.nan

    def _pack(self, integers: Array, out: Array) -> None:
        codes = (integers + (self.most + 1)).astype(np.uint8)
        if self.bits == INTEGER_BITS[Encoding.INT8]:
            out[: codes.size] = codes
            return
        first, second = codes[::2], codes[1::2]
        np.left_shift(first, 4, out=out[: first.size])
        out[: second.size] |= second

    def decode(self, data: Octets, out: Array) -> None:
        """See `decode`. Four passes in cache, and a pass over memory."""
        blocks = -(-out.size // BLOCK)
        scales, codes = data[: blocks * VALUE.itemsize].view(VALUE), data[blocks * VALUE.itemsize :]
        for begin in range(0, out.size, CHUNK_ELEMENTS):
            part = out[begin : begin + CHUNK_ELEMENTS]
            own = scales[begin // BLOCK : -(-(begin + part.size) // BLOCK)]
            coded = codes[begin * self.bits // 8 : -(-(begin + part.size) * self.bits // 8)]
            if self.bits == INTEGER_BITS[Encoding.INT8]:
                part[:] = coded
            else:
                part[::2] = (coded >> 4)[: -(-part.size // 2)]
                part[1::2] = (coded & 15)[: part.size // 2]
            with np.errstate(all="ignore"):
                part -= self.most + 1
                part *= np.repeat(own, BLOCK)[: part.size]


SCALE_TIMES_MOST_MAX = 3.4028e38
"""A little less than the largest float32 number, which a rounded scale could exceed."""

EachCodec = TwoBit | OneBit | Half
"""Codec of each element by itself. ``write(grad, residual, kernels, out)`` is `encode` into the bytes `out`, whose
number is `coded_size`; all arrays are of the kernels' kind."""
Codec = EachCodec | Scaled | TopK
"""Encoding of gradients."""


@dataclass(frozen=True, slots=True)
class GradientCompression:
    """Compression of a store.

    Attributes:
        codec: codec of pushed gradients.
        pulled_as: the type in which values are pulled: a half, or float32.
    """

    codec: Codec
    pulled_as: DType = DType.FLOAT32

    def __str__(self) -> str:
        pull = "" if self.pulled_as is DType.FLOAT32 else f", values come back as {self.pulled_as.label}"
        return f"{self.codec}{pull}"


_HALVES = {"fp16": DType.FLOAT16, "bf16": DType.BFLOAT16}
_TYPES: Mapping[str, tuple[Callable[..., Codec], str]] = {
    "2bit": (TwoBit, "threshold"),
    "1bit": (OneBit, "threshold"),
    "fp16": (lambda: Half(DType.FLOAT16), ""),
    "bf16": (lambda: Half(DType.BFLOAT16), ""),
    "int8": (lambda: Scaled(Encoding.INT8), ""),
    "int4": (lambda: Scaled(Encoding.INT4), ""),
    "topk": (TopK, "ratio"),
}
"""Type → function that creates the codec, and name of its parameter, or ''."""


def from_params(params: Mapping[str, Any]) -> GradientCompression:
    """The compression of parameters such as ``{'type': '2bit', 'threshold': 0.5, 'pull': 'fp16'}``.

    Raises:
        TypeError, ValueError: a parameter is not valid; the message lists the valid ones.
    """
    if not isinstance(params, Mapping):
        raise TypeError(
            f"compression parameters are a dict such as {{'type': '2bit', 'threshold': 0.5}}, not"
            f" {type(params).__name__}"
        )
    rest = dict(params)
    known = ", ".join(repr(one) for one in _TYPES)
    name = rest.pop("type", None)
    if name is None:
        raise ValueError(f"the compression parameters {params!r} have no 'type'; known types are {known}")
    if not isinstance(name, str) or name not in _TYPES:
        raise ValueError(f"there is no compression of type {name!r}; known are {known}")
    make, own = _TYPES[name]
    pull = rest.pop("pull", None)
    if pull is not None and not (isinstance(pull, str) and pull in _HALVES):
        raise ValueError(f"'pull' is {pull!r}; values come back as 'fp16' or 'bf16', or whole when it is left out")
    numbers_given = {own: _number(own, rest.pop(own))} if own and own in rest else {}
    if rest:
        allowed = ", ".join(repr(one) for one in ("type", own, "pull") if one)
        raise ValueError(
            f"compression of type {name!r} has no parameter {', '.join(map(repr, rest))}; it has {allowed}"
        )
    return GradientCompression(make(**numbers_given), DType.FLOAT32 if pull is None else _HALVES[pull])


def encode(codec: Codec, grad: Array, residual: Array, kernels: Kernels) -> tuple[Octets, int]:
    """Encode the sum of `grad` and `residual`, and keep the error in `residual`.

    Returns:
        The bytes, padded to a multiple of 8, and the number of entries in them.
    """
    if isinstance(codec, Scaled | TopK):
        return codec.encode(grad, residual)
    whole, data = room(codec.encoding, grad.size)
    codec.write(grad, residual, kernels, data)
    return whole, grad.size


def decode(encoding: int, parameter: float, data: Octets, entries: int, out: Array, kernels: Kernels) -> None:
    """Decode a contribution into `out`, float32, in a single pass; top-k in two.

    Args:
        encoding: value of `Encoding`.
        parameter: parameter of the codec.
        data: the encoded bytes, without padding.
        entries: number of entries in the bytes.
        out: array with the number of elements of the contribution.

    Raises:
        IndexError: an index of top-k is out of range.
    """
    match Encoding(encoding):
        case Encoding.TWO_BIT:
            kernels.dequantise_2bit(data, parameter, out)
        case Encoding.ONE_BIT:
            kernels.dequantise_1bit(data, parameter, out)
        case Encoding.FLOAT16:
            kernels.to_float32(data.view(DType.FLOAT16.storage), DType.FLOAT16, out)
        case Encoding.BFLOAT16:
            kernels.to_float32(data.view(DType.BFLOAT16.storage), DType.BFLOAT16, out)
        case Encoding.INT8 | Encoding.INT4 as integers:
            Scaled(integers).decode(data, out)
        case Encoding.TOP_K:
            middle = entries * INDEX.itemsize
            out.fill(0)
            # NumPy looks at every index: in shared memory a sender could have changed it since it was checked.
            out[data[:middle].view(INDEX)] = data[middle:].view(VALUE)


def room(encoding: Encoding, entries: int) -> tuple[Octets, Octets]:
    """New memory for an encoded array, and a view of it without the padding."""
    size = coded_size(encoding, entries)
    whole = np.empty(padded(size), np.uint8)
    whole[size:] = 0
    return whole, whole[:size]


def _as_float32(value: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"the {name} of a compression is a number, not {type(value).__name__} ({value!r})")
    return float(value)
