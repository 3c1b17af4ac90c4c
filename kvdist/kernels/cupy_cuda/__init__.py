"""The kernels for NVIDIA's GPUs as text, and which instances of their templates there are.

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
FLOATS = (DType.FLOAT32, DType.FLOAT64, *HALVES)

RULES = {"sgd": "SGD", "sgd_momentum": "SGD_MOMENTUM", "nag": "NAG", "adam": "ADAM", "adamw": "ADAMW",
         "adagrad": "ADAGRAD"}  # fmt: skip
"""The names of equations, as the kernels call them."""

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


def instances() -> list[str]:
    """Every kernel that may be launched, by the expression that names it in C++."""
    return [*_sums(), *_updates(), *_coders(), *_movers()]


def _sums() -> list[str]:
    integers = dict.fromkeys(name for dtype, name in ELEMENT.items() if not dtype.is_floating)
    pairs = [(ELEMENT[dtype], ELEMENT[dtype]) for dtype in FLOATS] + [(ELEMENT[half], "float") for half in HALVES]
    kinds = [(*pair, *batch) for pair in pairs for batch in SUM_BATCHES.items()]
    kinds += [(name, name, *INTEGER_BATCH) for name in integers]
    sums = [f"weighted_sum<{element}, {out}, {batch}, {turns}>" for element, out, batch, turns in kinds]
    casts = [cast for half in HALVES for cast in (f"cast<{ELEMENT[half]}, float>", f"cast<float, {ELEMENT[half]}>")]
    return sums + casts


def _updates() -> list[str]:
    kinds = [(dtype, "false") for dtype in FLOATS] + [(dtype, "true") for dtype in HALVES]
    return [f"update<{rule}, {ELEMENT[dtype]}, {master}>" for rule in RULES.values() for dtype, master in kinds]


def _coders() -> list[str]:
    rounding = [f"round_to_half<{ELEMENT[half]}>" for half in HALVES]
    return [
        *rounding,
        *(f"quantise<{bits}>" for bits in (1, 2)),
        *(f"dequantise<{bits}, {add}>" for bits in (1, 2) for add in ("false", "true")),
    ]


def _movers() -> list[str]:
    floats = [ELEMENT[dtype] for dtype in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16)]
    return [
        "copy_pieces",
        *(f"find_not_finite<{unit}>" for unit in ("u16", "u32", "u64")),
        *(f"add_rows<{element}>" for element in floats),
        *(f"sum_groups<{element}>" for element in dict.fromkeys(ELEMENT.values())),
        *(f"squares<{element}>" for element in floats),
        "add_partials",
    ]
