"""Every CUDA kernel that may be launched, as tests compile them all beforehand: a GPU compiles what it launches."""

from __future__ import annotations

from kvdist.dtypes import DType
from kvdist.kernels.cupy_cuda import ELEMENT, HALVES, INTEGER_BATCH, RULES, SUM_BATCHES

FLOATS = (DType.FLOAT32, DType.FLOAT64, *HALVES)


def instances():
    """Every kernel that may be launched, by the expression that names it in C++."""
    return [*_sums(), *_updates(), *_coders(), *_movers()]


def _sums():
    integers = dict.fromkeys(name for dtype, name in ELEMENT.items() if not dtype.is_floating)
    pairs = [(ELEMENT[dtype], ELEMENT[dtype]) for dtype in FLOATS] + [(ELEMENT[half], "float") for half in HALVES]
    kinds = [(*pair, *batch) for pair in pairs for batch in SUM_BATCHES.items()]
    kinds += [(name, name, *INTEGER_BATCH) for name in integers]
    sums = [f"weighted_sum<{element}, {out}, {batch}, {turns}>" for element, out, batch, turns in kinds]
    casts = [cast for half in HALVES for cast in (f"cast<{ELEMENT[half]}, float>", f"cast<float, {ELEMENT[half]}>")]
    return sums + casts


def _updates():
    kinds = [(dtype, "false") for dtype in FLOATS] + [(dtype, "true") for dtype in HALVES]
    return [f"update<{rule}, {ELEMENT[dtype]}, {master}>" for rule in RULES.values() for dtype, master in kinds]


def _coders():
    rounding = [f"round_to_half<{ELEMENT[half]}>" for half in HALVES]
    return [
        *rounding,
        *(f"quantise<{bits}>" for bits in (1, 2)),
        *(f"dequantise<{bits}, {add}>" for bits in (1, 2) for add in ("false", "true")),
    ]


def _movers():
    floats = [ELEMENT[dtype] for dtype in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16)]
    return [
        "copy_pieces",
        *(f"find_not_finite<{unit}>" for unit in ("u16", "u32", "u64")),
        *(f"add_rows<{element}>" for element in floats),
        *(f"sum_groups<{element}>" for element in dict.fromkeys(ELEMENT.values())),
        *(f"squares<{element}>" for element in floats),
        "add_partials",
    ]
