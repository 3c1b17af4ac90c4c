"""The definition of every kernel, in NumPy: other backends must produce the same bits. Without another backend it runs.

A pass reads the whole of an array from memory or cache. Docstrings count the passes of each kernel, because on a host
they are the whole cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels import quantization
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Equation, Kernels, Rows
from kvdist.kernels.quantization import from_float32, to_float32


def weighted_sum(contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
    """See `WeightedSum`.

    Passes for n contributions of full width: 1 for n = 1, n - 1 for more; 1 more when all share a scale that is not
    1; 2n - 1 when scales differ. From two passes on, all but the first have their operands in cache.
    """
    check_sum(contributions, scales, dtype, out)
    if not contributions:
        out.fill(0)
        return
    with np.errstate(all="ignore"):
        if dtype.accumulate != dtype.storage:
            _sum_halves(contributions, scales, dtype, out)
        elif out.size <= CHUNK_ELEMENTS or (len(contributions) <= 2 and all(scale == 1 for scale in scales)):
            _sum(contributions, scales, out)
        else:
            for start in range(0, out.size, CHUNK_ELEMENTS):
                part = slice(start, start + CHUNK_ELEMENTS)
                _sum([contribution[part] for contribution in contributions], scales, out[part])


def check_sum(contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
    """Refuse the arguments that `WeightedSum` refuses."""
    if len(scales) != len(contributions):
        raise ValueError(f"{len(contributions)} contributions need as many scales, not {len(scales)}")
    storage, size = dtype.storage, out.size
    if out.dtype != storage and out.dtype != dtype.accumulate:
        raise TypeError(f"a sum of {dtype.label} goes to an array of {storage} or {dtype.accumulate}, not {out.dtype}")
    for contribution in contributions:
        if contribution.dtype != storage:
            raise TypeError(f"a contribution of {dtype.label} is an array of {storage}, not {contribution.dtype}")
        if contribution.size != size:
            raise ValueError(f"a contribution has {contribution.size} elements where the sum has {size}")
    if not dtype.is_floating and any(scale != 1 for scale in scales):
        raise ValueError(
            f"gradients of {dtype.label} cannot be scaled by {list(scales)}: use a scale of 1 or a floating-point key"
        )


def factored(scales: Sequence[float]) -> tuple[Sequence[float], float]:
    """Scales of the contributions, and the scale of the sum. If all are equal, only the sum is multiplied."""
    if scales and scales.count(scales[0]) == len(scales):
        return (1.0,) * len(scales), scales[0]
    return scales, 1.0


def _all_equal(scales: Sequence[float]) -> bool:
    return scales.count(scales[0]) == len(scales)


def _sum(contributions: Sequence[Array], scales: Sequence[float], out: Array) -> None:
    """Write the sum of arrays whose type is the type of the sum."""
    first, scale = contributions[0], scales[0]
    if not _all_equal(scales):
        _sum_unequal(contributions, scales, out)
    elif len(contributions) == 1:
        _scaled(first, scale, out)
    else:
        np.add(first, contributions[1], out=out)
        for contribution in contributions[2:]:
            np.add(out, contribution, out=out)
        if scale != 1:
            np.multiply(out, scale, out=out)


def _sum_unequal(contributions: Sequence[Array], scales: Sequence[float], out: Array) -> None:
    term = np.empty_like(out)
    _scaled(contributions[0], scales[0], out)
    for contribution, scale in zip(contributions[1:], scales[1:], strict=True):
        if scale == 1:
            np.add(out, contribution, out=out)
        else:
            np.add(out, _scaled(contribution, scale, term), out=out)


def _scaled(values: Array, scale: float, out: Array) -> Array:
    if scale == 1:
        np.copyto(out, values)
    else:
        np.multiply(values, scale, out=out)
    return out


def _sum_halves(contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
    """Sum halves in float32. Passes: n to widen, n - 1 to add, and 1 to round if `out` is a half."""
    narrow = out.dtype == dtype.storage
    if narrow and len(contributions) == 1 and scales[0] == 1:
        np.copyto(out, contributions[0])
        return
    length = min(out.size, CHUNK_ELEMENTS)
    wide, term = np.empty(length, np.float32), np.empty(length, np.float32)
    for start in range(0, out.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        target = out[part]
        total = wide[: target.size] if narrow else target
        _widen_and_sum([each[part] for each in contributions], scales, dtype, total, term[: target.size])
        if narrow:
            from_float32(total, dtype, target)


def _widen_and_sum(
    contributions: Sequence[Array], scales: Sequence[float], dtype: DType, total: Array, term: Array
) -> None:
    equal = _all_equal(scales)
    for position, (contribution, scale) in enumerate(zip(contributions, scales, strict=True)):
        values = to_float32(contribution, dtype, term if position else total)
        if scale != 1 and not equal:
            np.multiply(values, scale, out=values)
        if position:
            np.add(total, values, out=total)
    if equal and scales[0] != 1:
        np.multiply(total, scales[0], out=total)


def fused_update(
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
    """See `FusedUpdate`. NumPy sums first; then `elementwise.evaluate` takes the expression."""
    return False


def update_rows(
    equation: Equation,
    weight: Array,
    slots: Array,
    ids: Array,
    contributions: Sequence[Rows],
    scales: Sequence[float],
    clip: float | None,
    states: Sequence[Array],
    dtype: DType,
) -> bool:
    """See `UpdateRows`. The reference gathers."""
    return False


def empty(count: int, dtype: np.dtype[Any]) -> Array:
    """See `NewArray`."""
    return np.empty(count, dtype)


def zeros(count: int, dtype: np.dtype[Any]) -> Array:
    """See `NewArray`. The operating system provides pages at their first use."""
    return np.zeros(count, dtype)


def squares(values: Array) -> float:
    """See `Squares`. Two passes."""
    return float(np.multiply(values, values, dtype=np.float64).sum())


REFERENCE = Kernels(
    name="numpy",
    chunk_elements=CHUNK_ELEMENTS,
    active=nullcontext,
    empty=empty,
    zeros=zeros,
    squares=squares,
    weighted_sum=weighted_sum,
    to_float32=to_float32,
    from_float32=from_float32,
    fused_update=fused_update,
    update_rows=update_rows,
    round_to_half=quantization.round_to_half,
    quantise_2bit=quantization.quantise_2bit,
    dequantise_2bit=quantization.dequantise_2bit,
    quantise_1bit=quantization.quantise_1bit,
    dequantise_1bit=quantization.dequantise_1bit,
)
"""The NumPy backend."""
