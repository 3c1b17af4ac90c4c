"""Every CUDA kernel is compiled by NVIDIA's compiler of run time, for real architectures; no GPU is needed for that."""

from __future__ import annotations

import functools
import re

import pytest

from kvdist.kernels import cupy_cuda as cuda
from tests.kernels.cuda_instances import instances

nvrtc = pytest.importorskip(
    "cuda.bindings.nvrtc", reason="no cuda-bindings here: THE CUDA KERNELS ARE NOT COMPILED", exc_type=ImportError
)

FILES = sorted(set(cuda.FAMILIES.values()))
PTX, CUBIN = "compute_80", "sm_90"
REGISTERS_MAX = 128
"""At 128 registers two blocks of 256 threads are on a multiprocessor at a time."""

NARROW = re.compile(r"dequantise<\d, false>|add_partials")
"""Kernels that read nothing 16 bytes at a time."""


def succeeded(result):
    code, *values = result
    assert code == nvrtc.nvrtcResult.NVRTC_SUCCESS, code
    return values[0] if values else None


@functools.cache
def compiled(names, architecture):
    """What the compiler said, the program in PTX, and the names of these kernels of one file there."""
    family = cuda.family_of(names[0])
    try:
        program = succeeded(nvrtc.nvrtcCreateProgram(cuda.source(family).encode(), b"kernel.cu", 0, [], []))
    except RuntimeError as error:
        pytest.skip(f"no library of NVRTC here: THE CUDA KERNELS ARE NOT COMPILED ({error})")
    for name in names:
        succeeded(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    options = [*cuda.COMPILE_OPTIONS, f"--gpu-architecture={architecture}"]
    options += ["--ptxas-options=-v"] if architecture.startswith("sm") else []
    outcome = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])[0]
    # Not bytes, which NVRTC would write into all the same: those of length one are shared by the whole process.
    log = bytearray(succeeded(nvrtc.nvrtcGetProgramLogSize(program)))
    succeeded(nvrtc.nvrtcGetProgramLog(program, log))
    said = log.decode().strip("\0 \n")
    assert outcome == nvrtc.nvrtcResult.NVRTC_SUCCESS, said
    ptx = bytearray(succeeded(nvrtc.nvrtcGetPTXSize(program)))
    succeeded(nvrtc.nvrtcGetPTX(program, ptx))
    mangled = {succeeded(nvrtc.nvrtcGetLoweredName(program, name.encode())).decode(): name for name in names}
    succeeded(nvrtc.nvrtcDestroyProgram(program))
    return said, ptx.decode(errors="replace"), mangled


def bodies(ptx, mangled):
    """The text of each kernel."""
    parts = re.split(r"\.entry ", ptx)[1:]
    return {mangled[part.partition("(")[0].strip()]: part for part in parts}


def of_family(family):
    return tuple(name for name in instances() if cuda.family_of(name) == family)


def first_and_last(family):
    """Two instances of each template of a file."""
    templates = {name.partition("<")[0]: name for name in reversed(of_family(family))}
    return tuple(sorted({*templates.values(), *{name.partition("<")[0]: name for name in of_family(family)}.values()}))


@pytest.mark.parametrize("chosen", [first_and_last, pytest.param(of_family, marks=pytest.mark.slow)])
def test_kernels_compile_without_a_warning_load_16_bytes_at_a_time_and_contract_nothing(chosen):
    wide = re.compile(r"ld\.global(\.nc)?\.(v4\.[usbf]32|v2\.[usbf]64)")
    unwanted = re.compile(r"\b(?:fma\S*|\S*\.approx\S*|\S*\.ftz\S*|\.local\b.*|(?:ld|st)\.local\S*)")
    for family in FILES:
        said, ptx, mangled = compiled(chosen(family), PTX)
        assert said == "", family
        texts = bodies(ptx, mangled)
        assert sorted(texts) == sorted(mangled.values())
        narrow = [name for name, body in texts.items() if not wide.search(body)]
        assert [name for name in narrow if not NARROW.match(name)] == []
        assert unwanted.findall(ptx) == [], family


@pytest.mark.slow
@pytest.mark.parametrize("family", FILES)
def test_no_kernel_spills_its_registers(family):
    said, _, mangled = compiled(of_family(family), CUBIN)
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
    registers = [int(count) for count in re.findall(r"Used (\d+) registers", said)]
    assert len(frames) == len(registers) == len(mangled)
    assert set(frames) == {("0", "0", "0")}
    assert max(registers) <= REGISTERS_MAX
