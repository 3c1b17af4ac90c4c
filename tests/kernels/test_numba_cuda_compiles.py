"""Every kernel for GPUs is compiled to the assembly of real devices, which needs none.

numba's simulator, in which `tests/cudasim` runs the kernels, knows no types: it sees no kernel that cannot be compiled.
"""

from __future__ import annotations

import importlib.metadata
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Updater, create
from kvdist.optimizer.torch_rules import TORCH_RULES
from tests.cases import each
from tests.optimizer.formulas import TABLE

INSTALLED = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
IS_HERE = "numba-cuda" in INSTALLED and any("nvvm" in name or "cuda-nvcc" in name for name in INSTALLED)
ASSEMBLES = any("nvjitlink" in name for name in INSTALLED)
"""Whether the programs are assembled too, as they are for a device; otherwise its driver does that."""

pytestmark = pytest.mark.skipif(not IS_HERE, reason="numba-cuda and NVVM are not installed: NOTHING IS COMPILED")

FREE = re.compile(r"fma\.|mul\.(?:ftz\.)?f|(?:div|sqrt)\.(?:approx|full)|\.ftz|\.local")
"""Instructions that are not rounded as the host's, or that the assembler may contract to such: a product that does not
say how it is rounded, followed by a sum. And memory of a thread's own, which a kernel needs if its registers spill."""

FLOATS = (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16)


def moving_kernels():
    """All kernels but those of updates."""
    from kvdist.kernels import numba_cuda

    for dtype in DType:
        yield from (numba_cuda.weighted_sum(dtype, dtype, count) for count in (1, 3, numba_cuda.SOURCES_MAX))
        yield numba_cuda.sum_groups(dtype)
    for half in (DType.FLOAT16, DType.BFLOAT16):
        yield numba_cuda.weighted_sum(half, DType.FLOAT32, 2)
        yield numba_cuda.cast(half, DType.FLOAT32)
        yield numba_cuda.cast(DType.FLOAT32, half)
        yield numba_cuda.round_to_half(half)
    for dtype in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16):
        yield numba_cuda.squares(dtype)
        yield numba_cuda.add_rows(dtype)
    yield from (*numba_cuda.QUANTISE.values(), *numba_cuda.DEQUANTISE.values())
    yield from map(numba_cuda.copy_arrays, (1, 2, 4, 8))
    yield from (numba_cuda.find_not_finite(dtype)[0] for dtype in FLOATS)


def equations():
    """The expression of every rule that kvdist has for single elements, with the numbers of numbers and of states."""
    found = {}

    def seen(equation, weight, contributions, scales, clip, out, states, dtype, master=None):
        found[equation.expression, len(equation.numbers)] = len(states)
        return False

    kernels = replace(REFERENCE, fused_update=seen)
    for name, numbers in [
        *((name, numbers) for name, numbers, _ in TABLE),
        *((one.name, {}) for one in TORCH_RULES),
    ]:
        weight = np.ones(4, np.float32)
        extent = Extent("w", (2, 2))
        Updater(create(name, **numbers), kernels).update(
            "w", weight, [weight.copy()], [1.0], DType.FLOAT32, weight, extent=extent
        )
    return [(*key, states) for key, states in found.items()]


def update_kernels(dtype):
    from kvdist.kernels import numba_cuda

    for expression, numbers, states in equations():
        yield numba_cuda.update(expression, dtype, states, numbers, 2, False, False)
        if dtype.storage != dtype.accumulate:
            yield numba_cuda.update(expression, dtype, states, numbers, 1, True, True)


def require_exact(kernels, capability, monkeypatch):
    from numba.cuda import dispatcher

    from kvdist.kernels import numba_cuda

    # Functions that become part of a kernel ask for the device's kind by themselves.
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability))
    count = 0
    for kernel in kernels:
        ptx, entry = kernel.compile(capability)
        text = ptx.decode()
        assert f".target sm_{capability[0]}{capability[1]}" in text and text.count(".entry") == 1
        assert f".entry {entry}(" in text
        assert not FREE.findall(text), kernel
        parameters = len(re.findall(r"\.param", text.partition(")")[0]))
        if ASSEMBLES:
            code = numba_cuda.assembled(ptx, capability)
            assert code.startswith(b"\x7fELF") and entry.encode() in code, kernel
        assert parameters == sum(int(name.partition("[")[2].rstrip("]") or 1) for name in kernel.types), kernel
        count += 1
    return count


@each("capability", [(8, 0), (9, 0)])
def test_kernels_are_compiled_to_instructions_that_round_as_the_host_does(monkeypatch, capability):
    assert require_exact(moving_kernels(), capability, monkeypatch) > 50


@each("name", ["add_rows", "sum_groups"])
def test_no_thread_divides_for_a_row(monkeypatch, name):
    from kvdist.kernels import numba_cuda

    kernel = getattr(numba_cuda, name)(DType.FLOAT32)
    require_exact([kernel], (9, 0), monkeypatch)
    ptx, _ = kernel.compile((9, 0))
    assert len(re.findall(r"div\.s64", ptx.decode())) == 1  # by the size of the grid, once for each thread


@pytest.mark.slow
@each("capability", [(8, 0), (9, 0)])
@each("dtype", FLOATS)
def test_every_rule_is_compiled_to_instructions_that_round_as_the_host_does(monkeypatch, dtype, capability):
    assert require_exact(update_kernels(dtype), capability, monkeypatch) > 15
