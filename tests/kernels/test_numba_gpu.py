"""Kernels for GPUs are compiled to the assembly of real devices, which needs none.

numba's simulator, in which `tests/cudasim` runs them, knows no types: it sees no kernel that cannot be compiled.
"""

from __future__ import annotations

import importlib.metadata
import re
from types import SimpleNamespace

import pytest

NEEDED = ("numba-cuda", "nvidia-nvvm", "nvidia-cuda-nvrtc")


def missing() -> list[str]:
    """Which of the packages that compile are not installed."""
    installed = {distribution.metadata["Name"] for distribution in importlib.metadata.distributions()}
    return [name for name in NEEDED if name not in installed]


if missing():
    NAMES = []
else:
    from numba import cuda, void
    from numba.cuda import dispatcher

    from kvdist.kernels.numba_gpu_launch import names, template

    NAMES = names()

pytestmark = pytest.mark.skipif(not NAMES, reason=f"NO KERNEL FOR GPUs IS COMPILED: {missing()} not installed")

FREE = re.compile(r"fma\.|mul\.(?:ftz\.)?f|(?:div|sqrt)\.(?:approx|full)|\.ftz")
"""Instructions that are not rounded as the host's, or that the assembler may contract to such: a product that does not
say how it is rounded, followed by a sum."""

FUSES = {"squares"}
"""Whose numbers are summed in float64, and held to no other bits than their own."""


def quick() -> list[tuple[str, str, int]]:
    """One kernel of every text, and some of the types that go another way."""
    first = {what: (what, label, count) for what, label, count in reversed(NAMES) if "wide_" not in what}
    plain = [name for what, name in first.items() if not what.startswith("master_")]
    return [*plain, ("adam", "float64", 1), ("wide_nag", "float16", 1), ("master_adam", "bfloat16", 2)]


def assembly(monkeypatch: pytest.MonkeyPatch, name: tuple[str, str, int], capability: tuple[int, int]) -> str:
    """What the kernel is compiled to."""
    # Functions that become part of a kernel ask for the device's kind by themselves.
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: SimpleNamespace(compute_capability=capability))
    function, signature = template(name)
    ptx, _ = cuda.compile(function, void(*signature), cc=capability, output="ptx", device=False, abi="numba")
    return ptx


def check(monkeypatch: pytest.MonkeyPatch, name: tuple[str, str, int], capability: tuple[int, int]) -> None:
    """Whether it is compiled, to instructions that round as the host's."""
    ptx = assembly(monkeypatch, name, capability)
    assert f".target sm_{capability[0]}{capability[1]}" in ptx
    assert ".entry" in ptx
    if name[0] not in FUSES:
        assert not FREE.findall(ptx)


@pytest.mark.parametrize("name", quick() or [None], ids=str)
def test_a_kernel_is_compiled_without_a_device(monkeypatch, name):
    check(monkeypatch, name, (9, 0))


@pytest.mark.slow
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("name", NAMES or [None], ids=str)
def test_every_kernel_is_compiled_for_every_kind_of_device(monkeypatch, name, capability):
    check(monkeypatch, name, capability)
