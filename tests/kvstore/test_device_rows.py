"""Rows on GPUs, which are NumPy's here: what is merged there is what the host merges."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore.device import merged, merged_gradient
from kvdist.kvstore.placement import OnDevice
from kvdist.kvstore.rowsparse import canonical
from tests.cases import each
from tests.devices import DeviceArray, NumpyDevice

ROW = 3


@each("dtype", [DType.FLOAT32, DType.BFLOAT16, DType.INT64])
@each("counts", [(0,), (1,), (40,), (40, 0, 25)])
def test_rows_of_several_gpus_are_merged_on_the_first_as_on_the_host(dtype, counts):
    generator = np.random.default_rng(3)
    gpus = [NumpyDevice(index) for index in range(len(counts))]
    parts, ids, rows = [], [], []
    for gpu, count in zip(gpus, counts, strict=True):
        own = generator.integers(0, 20, count)
        plain = generator.integers(-9, 9, count * ROW)
        bits = plain.astype(np.float32) if dtype is DType.BFLOAT16 else plain.astype(dtype.storage)
        bits = REFERENCE.from_float32(bits, dtype) if dtype is DType.BFLOAT16 else bits
        parts.append((OnDevice(gpu, gpu.array(own)), OnDevice(gpu, gpu.array(bits))))
        ids.append(own)
        rows.append(bits.reshape(count, ROW))
    expected = canonical(np.concatenate(ids), np.concatenate(rows), dtype)
    found = merged(parts, dtype)
    assert found[0].device is found[1].device is gpus[0]
    assert np.array_equal(found[0].on_host(), expected[0])
    assert np.array_equal(found[1].on_host().reshape(-1, ROW), expected[1])


@pytest.mark.parametrize("counts", [(0,), (0, 0), (0, 2)], ids=str)
def test_sparse_tensors_without_rows_are_gradients_of_a_table(counts):
    torch = pytest.importorskip("torch")

    class Torchs(NumpyDevice):
        """One that takes torch's tensors of the host for its own."""

        def view(self, value: Any, dtype: DType) -> DeviceArray:
            return self.array(value.numpy().reshape(-1))

    class Devices:
        """Everything lies on one."""

        def __init__(self) -> None:
            self.gpu = Torchs()

        def of(self, value: Any) -> NumpyDevice:
            return self.gpu

    info = KeyInfo("table", (6, ROW), DType.FLOAT32, (), form="zeros")
    tensors = [
        torch.sparse_coo_tensor(torch.arange(count)[None], torch.ones(count, ROW), (6, ROW), check_invariants=True)
        for count in counts
    ]
    found = merged_gradient(info, tensors, Devices())
    assert found is not None
    assert np.array_equal(found[0], np.arange(sum(counts)))
    assert np.array_equal(found[1], np.ones((sum(counts), ROW), np.float32))
