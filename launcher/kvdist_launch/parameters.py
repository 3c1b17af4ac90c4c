"""Lists of parameters, as users have them: a safetensors file, shapes, or a number."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

from kvdist.errors import ConfigError
from kvdist_launch.cost import Tensor

ITEMSIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Types of parameters that are trained."""

SAFETENSORS = {"F16": 2, "BF16": 2, "F32": 4, "F64": 8}
HEADER_BYTES_MAX = 100 << 20
ELEMENTS_MAX = 1e18


def of_shapes(text: str, dtype: str) -> list[Tensor]:
    """The parameters of shapes such as ``1000x1000,1000``.

    Args:
        text: shapes with commas between; ``scalar`` is one of no dimensions.
        dtype: of all of them; see `ITEMSIZES`.

    Raises:
        ConfigError: one is no shape.
    """
    tensors = []
    for shape in text.split(","):
        if not re.fullmatch(r"scalar|[0-9]+(x[0-9]+)*", shape.strip()):
            raise ConfigError(f"--shapes {shape!r} is no shape; write sizes with x between, as in 1000x1000,1000")
        sizes = [] if shape.strip() == "scalar" else map(int, shape.split("x"))
        tensors.append(Tensor(math.prod(sizes), ITEMSIZES[dtype]))
    return tensors


def of_number(count: float, dtype: str) -> list[Tensor]:
    """So many elements, in one parameter.

    Raises:
        ConfigError: it is no number of elements.
    """
    if not 1 <= count < ELEMENTS_MAX:
        raise ConfigError(f"--params is {count:g}; it counts elements, at least 1")
    return [Tensor(int(count), ITEMSIZES[dtype])]


def of_file(path: Path) -> list[Tensor]:
    """The floating-point arrays of a safetensors file; others are not trained.

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length)) if 2 <= length <= HEADER_BYTES_MAX else None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is no safetensors file: its header is no JSON") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is no safetensors file: it has no header")
    header.pop("__metadata__", None)
    tensors = [_tensor(path, name, one) for name, one in header.items()]
    trained = [one for one in tensors if one is not None]
    if not trained:
        raise ConfigError(f"{path} has no floating-point arrays")
    return trained


def _tensor(path: Path, name: str, entry: Any) -> Tensor | None:
    """One array, None if it is not of a type that is trained."""
    shape = entry.get("shape") if isinstance(entry, dict) else None
    if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
        raise ConfigError(f"{path} is no safetensors file: {name!r:.80} has no shape")
    itemsize = SAFETENSORS.get(str(entry.get("dtype")))
    return None if itemsize is None else Tensor(math.prod(shape), itemsize)
