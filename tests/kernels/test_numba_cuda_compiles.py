"""numba's kernels for GPUs are compiled to the assembly of real devices, which needs none.

numba's simulator, in which `tests/cudasim` runs them, knows no types: it sees no kernel that cannot be compiled.
"""

from __future__ import annotations

import importlib.metadata
import re
from types import SimpleNamespace

import pytest

from tests.cases import each

INSTALLED = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
IS_HERE = "numba-cuda" in INSTALLED and any("nvvm" in name or "cuda-nvcc" in name for name in INSTALLED)

pytestmark = pytest.mark.skipif(not IS_HERE, reason="numba-cuda and NVVM are not installed: NOTHING IS COMPILED")

FREE = re.compile(r"fma\.|mul\.(?:ftz\.)?f|(?:div|sqrt)\.(?:approx|full)|\.ftz")
"""Instructions that are not rounded as the host's, or that the assembler may contract to such: a product that does not
say how it is rounded, followed by a sum."""


def kernels(label):
    """Each kernel of one type with the types of its arguments."""
    from numba.core import types as nt
    from numba.core.types.containers import UniTuple

    from kvdist.kernels import numba_cuda
    from kvdist.kernels.interface import NUMBERS_MAX

    real = {"float32": nt.float32, "float64": nt.float64}[label]
    array, octets, single = real[::1], nt.uint8[::1], nt.float32
    for count in (1, 3):
        terms = (UniTuple(array, count), UniTuple(real, count), real)
        yield numba_cuda.SUMS[label], (array, *terms, nt.boolean)
        for (_, own), kernel in numba_cuda.UPDATES.items():
            if own == label:
                yield kernel, (array, array, array, array, *terms, real, UniTuple(real, NUMBERS_MAX))
    yield numba_cuda.quantise_2bit, (single[::1], single[::1], single, octets)
    yield numba_cuda.dequantise_2bit, (octets, single, single[::1], nt.boolean)


@each("capability", [(8, 0), (9, 0)])
@each("label", ["float32", "float64"])
def test_every_kernel_is_compiled_to_instructions_that_round_as_the_host_does(monkeypatch, label, capability):
    from numba import cuda, void
    from numba.cuda import dispatcher

    # Functions that become part of a kernel ask for the device's kind by themselves.
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability))
    for kernel, types in kernels(label):
        ptx, _ = cuda.compile(kernel.py_func, void(*types), cc=capability, output="ptx", device=False, abi="numba")
        assert f".target sm_{capability[0]}{capability[1]}" in ptx and ".entry" in ptx
        assert not FREE.findall(ptx), kernel.py_func.__name__
