"""MXNet's arrays as NumPy's and as kvdist's rows, and results back into them.

An array on the host is not copied: what is returned shows its memory, until MXNet computes with it again. So it is used
within one call of the store, and no longer.
"""

from __future__ import annotations

import ctypes
import math

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.base import _LIB, MXNetError, check_call

from kvdist import RowSparse


def listed(key, value) -> tuple[list, list[list]]:
    """Keys, and for each the list of its arrays, one for a device, of any spelling that MXNet allows.

    Raises:
        ValueError: there are not as many values as keys.
    """
    is_list = isinstance(key, (list, tuple))
    keys, values = (list(key), list(value)) if is_list else ([key], [value])
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys were given with {len(values)} values")
    return keys, [list(one) if isinstance(one, (list, tuple)) else [one] for one in values]


def is_sparse(array) -> bool:
    """Whether an array has rows only.

    Raises:
        MXNetError: it is sparse in another way.
    """
    stype = array.stype
    if stype not in ("default", "row_sparse"):
        raise MXNetError(f"a store has dense and row_sparse arrays, not {stype}: use .tostype('row_sparse')")
    return stype == "row_sparse"


def read(array):
    """What is pushed or a first value: a NumPy array that shows a dense one, or `RowSparse` with copies."""
    if is_sparse(array):
        return RowSparse(array.indices.asnumpy().astype(np.int64), array.data.asnumpy(), array.shape)
    array.wait_to_read()
    shown = memory_of(array)
    return array.asnumpy() if shown is None else shown


def room(array) -> np.ndarray:
    """Where a result goes that `write` then gives to a dense array: its own memory, if NumPy can write there.

    MXNet must be done with the array, reading included.
    """
    shown = memory_of(array)
    return np.empty(array.shape, array.dtype) if shown is None else shown


def write(results, arrays) -> None:
    """Assign what was received in other memory than an array's own."""
    for result, array in zip(results, arrays, strict=True):
        if result.flags.owndata:
            with autograd.pause():
                array[() if array.ndim == 0 else slice(None)] = result


def write_rows(rows: RowSparse, array) -> None:
    """Make rows the content of a row_sparse array."""
    given = (rows.values.astype(array.dtype, copy=False), rows.indices)
    with autograd.pause():  # Gluon pulls the rows of a batch while it records
        mx.nd.sparse.row_sparse_array(given, shape=array.shape, ctx=array.context, dtype=array.dtype).copyto(array)


def memory_of(array) -> np.ndarray | None:
    """An array that shows the memory of a dense one; None where NumPy cannot see it."""
    pointer, shape, dtype = ctypes.c_void_p(), array.shape, np.dtype(array.dtype)  # MXNet looks them up each time
    size = math.prod(shape)
    if array.context.device_type != "gpu" and size:
        check_call(_LIB.MXNDArrayGetData(array.handle, ctypes.byref(pointer)))
    if pointer.value is None:
        return None
    return np.frombuffer((ctypes.c_byte * (size * dtype.itemsize)).from_address(pointer.value), dtype).reshape(shape)
