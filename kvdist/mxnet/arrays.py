"""MXNet's arrays as NumPy's and as kvdist's rows, and results back into them.

An array in host memory is not copied: the NumPy array shows its memory, until MXNet computes with it again. So it is
used within a single call of the store, and no longer.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, MXNetError, check_call
from numpy.typing import NDArray

from kvdist.errors import ProtocolError
from kvdist.kvstore.rowsparse import RowSparse
from kvdist.protocol.objects import Leaf

MXArray: TypeAlias = Any
"""An array of MXNet, which does not describe its types."""
Array: TypeAlias = NDArray[Any]


def listed(key: Any, value: Any) -> tuple[list[Any], list[list[MXArray]]]:
    """Keys, and for each the list of its arrays (an array for each device), from any spelling that MXNet allows.

    Raises:
        ValueError: the numbers of keys and values differ.
    """
    is_list = isinstance(key, (list, tuple))
    keys, values = (list(key), list(value)) if is_list else ([key], [value])
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys were given with {len(values)} values")
    return keys, [list(one) if isinstance(one, (list, tuple)) else [one] for one in values]


def is_sparse(array: MXArray) -> bool:
    """Whether an array is row_sparse.

    Raises:
        MXNetError: it is sparse in another way.
    """
    stype = array.stype
    if stype not in ("default", "row_sparse"):
        raise MXNetError(f"a store has dense and row_sparse arrays, not {stype}: use .tostype('row_sparse')")
    return bool(stype == "row_sparse")


def read(array: MXArray) -> Any:
    """A value to push or initialise: a NumPy array that shows a dense array, or `RowSparse` with copies."""
    if is_sparse(array):
        return RowSparse(array.indices.asnumpy().astype(np.int64), array.data.asnumpy(), array.shape)
    array.wait_to_read()
    shown = memory_of(array)
    return array.asnumpy() if shown is None else shown


def room(array: MXArray) -> Array:
    """Memory for a result that `write` then assigns to a dense array: the array's memory, if NumPy can write to it.

    MXNet must be done with the array, reading included.
    """
    shown = memory_of(array)
    return np.empty(array.shape, array.dtype) if shown is None else shown


def write(results: Sequence[Array], arrays: Sequence[MXArray]) -> None:
    """Assign results that were received in other memory than the arrays'."""
    for result, array in zip(results, arrays, strict=True):
        if result.flags.owndata:
            with autograd.pause():
                array[() if array.ndim == 0 else slice(None)] = result


@contextmanager
def written(outs: Sequence[Sequence[MXArray]]) -> Iterator[list[list[Array]]]:
    """Yield memory for the results of keys, which are assigned to the arrays of `outs`, a list for each key, at the
    end."""
    mx.nd.waitall()  # once: waiting to write costs a thread's turn for each array
    rooms = [[room(one) for one in arrays] for arrays in outs]
    yield rooms
    for results, arrays in zip(rooms, outs, strict=True):
        write(results, arrays)


def write_rows(rows: RowSparse, array: MXArray) -> None:
    """Make rows the content of a row_sparse array."""
    given = (rows.values.astype(array.dtype, copy=False), rows.indices)
    with autograd.pause():  # Gluon pulls the rows of a batch while it records
        mx.nd.sparse.row_sparse_array(given, shape=array.shape, ctx=array.context, dtype=array.dtype).copyto(array)


def memory_of(array: MXArray) -> Array | None:
    """An array that shows the memory of a dense array; None where NumPy cannot see it."""
    pointer, shape, dtype = ctypes.c_void_p(), array.shape, np.dtype(array.dtype)  # MXNet looks them up each time
    size = math.prod(shape)
    if array.context.device_type != "gpu" and size:
        check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    if pointer.value is None:
        return None
    shown: Array = np.frombuffer((ctypes.c_byte * (size * dtype.itemsize)).from_address(pointer.value), dtype)
    return shown.reshape(shape)


def class_of(value: object) -> str:
    """The full name of a value's class, for messages."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def described(array: MXArray) -> str:
    """The dtype and shape of an array in words: ``float32 (3, 2)``, ``row_sparse float32 (3, 2)``."""
    kind = "row_sparse " if is_sparse(array) else ""
    return f"{kind}{np.dtype(array.dtype).name} {tuple(array.shape)}"


def scaled(values: Any, factor: float, divisor: int = 1) -> Any:
    """NumPy's values · factor / divisor, integers cut toward zero; where both are 1 the array itself."""
    if (factor, divisor) == (1.0, 1):
        return values
    wide = values.astype(np.promote_types(values.dtype, np.float32), copy=False)
    return (wide * factor / divisor).astype(values.dtype, copy=False)


def leaf_of(value: object) -> Leaf | None:
    """The form in which a dense array of MXNet travels within an object.

    Raises:
        TypeError: it is row_sparse.
    """
    if not isinstance(value, mx.nd.NDArray):
        return None
    if is_sparse(value):
        raise TypeError(f"it is {described(value)}: send its .tostype('default')")
    return Leaf("mxnet" if type(value) is mx.nd.NDArray else "mxnet.np", value.asnumpy())


def array_of(kind: str, values: Array) -> MXArray:
    """The array of MXNet that has travelled within an object.

    Raises:
        ProtocolError: it was another library's.
    """
    if kind not in ("mxnet", "mxnet.np"):
        raise ProtocolError(f"an array of the unknown kind {kind[:40]!r}")
    return (mx.nd if kind == "mxnet" else mx.np).array(values, dtype=values.dtype)
