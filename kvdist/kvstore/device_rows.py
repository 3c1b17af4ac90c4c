"""Sparse gradients on GPUs: repeated rows are summed there, so that each row leaves once, or goes into an array."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from kvdist.core.sharding import row_length
from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device
from kvdist.kvstore import values
from kvdist.kvstore.devices import Devices, OnDevice
from kvdist.kvstore.values import Bits

RowsOnDevice = tuple[OnDevice, OnDevice]
"""The index of each row, int64, and the rows one after the other."""


def merged_gradient(info: KeyInfo, arrays: Sequence[Any], devices: Devices) -> tuple[Bits, Bits] | None:
    """The sum of what is pushed to a table, if all of it are sparse tensors on GPUs; else None. Waits for the GPU.

    Args:
        info: the table.
        arrays: per device what it contributes.
        devices: the GPUs that are used.

    Returns:
        Ids in ascending order, and their rows: (k, row length).
    """
    if not arrays or not all(_fits(info, array) and devices.of(array) is not None for array in arrays):
        return None
    parts = [_rows_of(array, info.dtype, devices) for array in arrays]
    ids, rows = merged(parts, info.dtype)
    found = ids.on_host(), rows.on_host()
    # Not -1: nobody's gradient may have a row, as that of an empty batch.
    return found[0], found[1].reshape(len(found[0]), row_length(info.shape))


def merged(parts: Sequence[RowsOnDevice], dtype: DType) -> RowsOnDevice:
    """The rows of all parts, each index once and in order, on the GPU of the first part."""
    home = parts[0][0].device
    ids = _joined(home, [part[0] for part in parts])
    rows = _joined(home, [part[1] for part in parts])
    different, sums = home.merge_rows(ids, rows, dtype)
    return OnDevice(home, different), OnDevice(home, sums)


def dense_there(value: Any, devices: Devices) -> Any:
    """A sparse tensor as an array, on the GPU on which it lies; None where it lies on none that is used.

    Halves of a repeated row are summed in float32.
    """
    if not (values.is_tensor(value) and _is_sparse(value)) or devices.of(value) is None:
        return None
    torch = sys.modules["torch"]
    if value.dtype is torch.bfloat16 or not value.dtype.is_floating_point or value.sparse_dim() != 1:
        return value.float().to_dense().to(value.dtype) if value.dtype is torch.bfloat16 else value.to_dense()
    _, dtype = values.describe(value._values())
    ids, rows = merged([_rows_of(value, dtype, devices)], dtype)
    dense = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    ids.device.add_rows(ids.device.view(dense, dtype), ids.array, rows.array)
    return dense


def _is_sparse(value: Any) -> bool:
    return value.layout is sys.modules["torch"].sparse_coo


def _fits(info: KeyInfo, value: Any) -> bool:
    """Whether it is rows of this table. What is not is refused where values of the host are."""
    if not (values.is_tensor(value) and _is_sparse(value) and value.sparse_dim() == 1):
        return False
    return tuple(value.shape) == info.shape and values.describe(value._values())[1] is info.dtype


def _rows_of(value: Any, dtype: DType, devices: Devices) -> RowsOnDevice:
    # Not `coalesce()`: torch sums halves in their own type.
    plain = value.detach()
    device = devices.of(value)
    assert device is not None
    ids = device.view(plain._indices()[0].contiguous(), DType.INT64)
    return OnDevice(device, ids), OnDevice(device, device.view(plain._values().contiguous(), dtype))


def _joined(home: Device, parts: Sequence[OnDevice]) -> Array:
    if len(parts) == 1:
        return parts[0].array
    whole = home.kernels.empty(sum(part.size for part in parts), parts[0].array.dtype)
    start = 0
    for part in parts:
        home.copy(part.array, whole[start : start + part.size], part.device)
        start += part.size
    return whole
