"""Rows of a table on one GPU: merged where they share an index, gathered, and added where they belong.

Which rows belong together is sorted out by torch on the device where torch uses CUDA, else on the host, to which only
the indices go; the rows themselves never leave the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array
from kvdist.kernels.numba_gpu_kernels import as_array, stored
from kvdist.kernels.numba_gpu_memory import Memory, NumbaArray
from kvdist.kernels.numba_gpu_streams import torch_with_cuda

_INT64 = np.dtype(np.int64)


def merge_rows(memory: Memory, indices: Array, rows: Array, dtype: DType) -> tuple[NumbaArray, NumbaArray]:
    """See `Device.merge_rows`."""
    if not indices.size:
        return memory.empty(0, _INT64), memory.empty(0, dtype.storage)
    width = rows.size // indices.size
    torch = torch_with_cuda()
    if torch is None:
        kept, order, starts = map(memory.sent, grouped(memory.fetched(as_array(indices))))
    else:
        tensor = torch.as_tensor(indices, device=f"cuda:{memory.index}")
        kept, order, starts = (memory.view(each, DType.INT64) for each in grouped_by_torch(torch, tensor))
    out = memory.empty(kept.size * width, dtype.storage)
    memory.launch(
        ("merge", dtype.label, 0), out.size,
        stored(rows, dtype), order, starts, np.int64(width), stored(out, dtype),
    )  # fmt: skip
    return kept, out


def grouped(indices: Array) -> tuple[Array, Array, Array]:
    """The different indices, in which order to read the rows, and where those of each index start, with the end."""
    order = np.argsort(indices, kind="stable")
    ordered = indices[order]
    starts = np.flatnonzero(np.concatenate(([True], ordered[1:] != ordered[:-1])))
    return ordered[starts], order.astype(np.int64), np.append(starts, indices.size).astype(np.int64)


def grouped_by_torch(torch: Any, indices: Any) -> tuple[Any, Any, Any]:
    """The same of a tensor."""
    ordered, order = torch.sort(indices, stable=True)
    kept, counts = torch.unique_consecutive(ordered, return_counts=True)
    starts = torch.zeros(kept.numel() + 1, dtype=torch.int64, device=indices.device)
    torch.cumsum(counts, 0, out=starts[1:])
    return kept, order, starts


def gather_rows(memory: Memory, table: Array, indices: Array, out: Array) -> None:
    """See `Device.gather_rows`."""
    if not out.size:
        return
    label = f"uint{8 * out.dtype.itemsize}"
    width = np.int64(out.size // indices.size)
    memory.launch(
        ("gather", label, 0), out.size,
        as_array(table).view(label), as_array(indices), width, as_array(out).view(label),
    )  # fmt: skip


def add_rows(memory: Memory, table: Array, indices: Array, rows: Array) -> None:
    """See `Device.add_rows`."""
    if rows.size:
        dtype = DType[rows.dtype.name.upper()]
        width = np.int64(rows.size // indices.size)
        arguments = stored(table, dtype), as_array(indices), width, stored(rows, dtype)
        memory.launch(("addrows", dtype.label, 0), rows.size, *arguments)
