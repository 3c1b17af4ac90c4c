"""Which functions do the arithmetic on this host, and the NumPy-side half of the compiled ones.

A compiled kernel takes the place of the reference where it is measured to be faster: any optimizer's update of float32
or float64, and sums that cost the reference more than one pass. Where it is not there yet, or does not fit, the
reference works instead. Both give the same bits, so nobody can tell from the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.coding import coders_of
from kvdist.kernels.interface import CHUNK_ELEMENTS, NUMBERS_MAX, SOURCES_MAX, Array, Equation, Kernels
from kvdist.kernels.loading import LOADER, Kernel, Loader
from kvdist.kernels.reference import REFERENCE, check_sum

_ONES = (1.0,) * SOURCES_MAX
_ZEROS = (0.0,) * NUMBERS_MAX
_OFF = float("inf")
_LABELS = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}


def choose(setting: str, loader: Loader = LOADER) -> Kernels:
    """The kernels of a setting (``KVDIST_KERNELS``).

    Args:
        setting: ``numpy`` is the reference; ``auto`` starts with it and goes over to numba in the background when
            there is work enough and numba is installed; ``numba`` imports it now and waits for every kernel.
        loader: where compiled kernels come from.

    Raises:
        ConfigError: ``numba`` is asked for and cannot be imported.
    """
    if setting == "numpy":
        return REFERENCE
    if setting == "numba":
        loader.require()
        compiled = Compiled(loader.demanded)
    else:
        compiled = Compiled(loader.offered)
    coders = coders_of(compiled.kernel)
    return replace(
        REFERENCE, name=setting, weighted_sum=compiled.weighted_sum, fused_update=compiled.fused_update, **coders
    )


class Compiled:
    """Calls compiled kernels with what they take.

    Args:
        kernel: the compiled kernel of a name, or None; told how many elements it is for.
    """

    def __init__(self, kernel: Callable[[str, int], Kernel | None]) -> None:
        self.kernel = kernel

    def weighted_sum(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """See `WeightedSum`. One pass of up to four contributions; each more is added in the cache."""
        count = len(contributions)
        label = _LABELS.get(dtype.storage)
        # One array, or two without a scale, are one pass of the reference too.
        if label is not None and (count > 2 or (count == 2 and (scales[0] != 1 or scales[-1] != 1))):
            kernel = self.kernel(f"sum_{label}", out.size)
            if kernel is not None and _fit(out, *contributions):
                check_sum(contributions, scales, dtype, out)
                _sum(kernel, contributions, *_factored(scales), out)
                return
        REFERENCE.weighted_sum(contributions, scales, dtype, out)

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
        """See `FusedUpdate`. Halves go the way of many passes."""
        label = _LABELS.get(weight.dtype)
        if label is None or not contributions or master is not None:
            return False
        kernel = self.kernel(f"{equation.name}_{label}", weight.size)
        if kernel is None or not _fit(weight, out, *states, *contributions):
            return False
        own, factor = _factored(scales)
        tail = (factor, _OFF if clip is None else clip, *equation.numbers, *_ZEROS[len(equation.numbers) :])
        if len(contributions) <= SOURCES_MAX:
            _update(kernel, weight, contributions, own, out, states, tail)
            return True
        add = self.kernel(f"sum_{label}", weight.size)
        if add is None:
            return False
        total = np.empty(min(weight.size, CHUNK_ELEMENTS), weight.dtype)
        for start in range(0, weight.size, CHUNK_ELEMENTS):
            part = slice(start, start + CHUNK_ELEMENTS)
            target = out[part]
            _sum(add, [each[part] for each in contributions], own, 1.0, total[: target.size])
            arrays = [state[part] for state in states]
            _update(kernel, weight[part], [total[: target.size]], (1.0,), target, arrays, tail)
        return True


def _fit(*arrays: Array) -> bool:
    """Whether a compiled kernel can work on the arrays where they lie."""
    return all((flags := array.flags).c_contiguous and flags.aligned for array in arrays)


def _factored(scales: Sequence[float]) -> tuple[Sequence[float], float]:
    """Each contribution's own scale, and the one of the sum. A factor of 1 changes no bit."""
    if scales.count(scales[0]) == len(scales):
        return (1.0,) * len(scales), scales[0]
    return scales, 1.0


def _padded(contributions: Sequence[Array], scales: Sequence[float]) -> tuple[object, ...]:
    """Four arrays, how many of them count, and four scales."""
    count = len(contributions)
    missing = SOURCES_MAX - count
    return (*contributions, *(contributions[0],) * missing, count, *scales, *_ONES[:missing])


def _sum(kernel: Kernel, contributions: Sequence[Array], scales: Sequence[float], factor: float, out: Array) -> None:
    """A sum of two arrays or more."""
    count = len(contributions)
    if count <= SOURCES_MAX:
        kernel(out, *_padded(contributions, scales), factor)
        return
    for start in range(0, out.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        target = out[part]
        kernel(target, *_padded([each[part] for each in contributions[:SOURCES_MAX]], scales[:SOURCES_MAX]), 1.0)
        for i in range(SOURCES_MAX, count):
            last = factor if i == count - 1 else 1.0
            kernel(target, *_padded([contributions[i][part]], [scales[i]]), last)


def _update(
    kernel: Kernel,
    weight: Array,
    contributions: Sequence[Array],
    scales: Sequence[float],
    out: Array,
    states: Sequence[Array],
    tail: tuple[float, ...],
) -> None:
    # A rule without the states leaves the arrays that stand for them alone.
    first, second = (*states, out, out)[:2]
    kernel(out, weight, first, second, *_padded(contributions, scales), *tail)
