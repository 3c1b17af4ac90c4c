"""The kernels for NVIDIA's GPUs as text: what they are called, where each stands, and how they are compiled.

The `.cu` files beside this are CUDA C++ without any header. `kvdist.kernels.cupy_cuda.device` compiles them when they
are first launched, tests for this processor. `COMPILE_OPTIONS` are part of their meaning: without them results differ
from the reference in their last bits.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from kvdist.dtypes import DType

COMPILE_OPTIONS = ("-std=c++17", "--fmad=false", "--ftz=false")

THREADS = 256
"""Threads of a block, as in ``common.cuh``."""

CHUNK_BYTES = 16384
"""What a block takes of one of many arrays, as in ``pieces.cu``."""

TERMS_MAX = 32
"""How many sources of a sum are named in the arguments of a kernel; the table of more lies on the device."""

ELEMENT = {
    DType.FLOAT32: "float",
    DType.FLOAT64: "double",
    DType.FLOAT16: "f16",
    DType.BFLOAT16: "bf16",
    DType.INT8: "u8",
    DType.UINT8: "u8",
    DType.INT32: "u32",
    DType.INT64: "u64",
}
"""The type of elements in the kernels. Integers are unsigned there: they wrap to the same bits."""

HALVES = (DType.FLOAT16, DType.BFLOAT16)

RULES = {"sgd": "SGD", "sgd_momentum": "SGD_MOMENTUM", "nag": "NAG", "adam": "ADAM", "adamw": "ADAMW",
         "adagrad": "ADAGRAD"}  # fmt: skip
"""The names of equations, as the kernels call them."""

NUMBERS_MAX = 7
"""How many numbers a rule has at most, as in ``updates.cu``."""

SUM_BATCHES = {1: 4, 2: 4, 4: 2, 8: 1}
"""How many sources a sum loads at a time, and how many packs of each: some eight loads of a thread are on their way."""

INTEGER_BATCH = (4, 1)
"""Likewise, for all sums of integers: few are summed, and each instance takes time to compile."""

FAMILIES = {
    "weighted_sum": "sums",
    "cast": "sums",
    "update": "updates",
    "round_to_half": "coding",
    "quantise": "coding",
    "dequantise": "coding",
    "copy_pieces": "pieces",
    "find_not_finite": "pieces",
    "add_rows": "rows",
    "sum_groups": "rows",
    "squares": "squares",
    "add_partials": "squares",
}
"""The file of each kernel."""


@cache
def source(family: str) -> str:
    """The text of one file, with what it shares with the others before it."""
    folder = Path(__file__).parent
    return "".join((folder / name).read_text("utf-8") for name in ("common.cuh", f"{family}.cu"))


def family_of(kernel: str) -> str:
    """The file that defines a kernel, such as ``cast<f16, float>``."""
    return FAMILIES[kernel.partition("<")[0]]
