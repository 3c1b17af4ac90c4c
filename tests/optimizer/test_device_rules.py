"""Every optimizer on the arrays of a device that obeys NumPy's functions: the same bits as on the host."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Updater, create
from kvdist.optimizer.offload import require_runs_on
from tests.cases import each
from tests.devices import NumpyDevice
from tests.optimizer.formulas import NO_DECAY, TABLE, shape_of

SIZE = 1000


EVERY = [case for case in TABLE if case[0] != "sgld"]


@each("name, numbers, formula", EVERY)
@each("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_a_rule_gives_the_bits_of_the_host_on_a_device(name, numbers, formula, dtype):
    device = NumpyDevice()
    rule = create(name, clip_gradient=0.5, multi_precision=True, **numbers)
    here, there = Updater(rule), Updater(rule, device.kernels)
    rng = np.random.default_rng(1)
    weight = stored(rng.standard_normal(SIZE), dtype)
    on_device = device.array(weight)
    for _ in range(3):
        grads = [stored(rng.standard_normal(SIZE), dtype) for _ in range(2)]
        copies = [device.array(one) for one in grads]
        rates = (0.05, 0.0 if name in NO_DECAY else 0.1, Extent("w", shape_of(SIZE)))
        here.update("w", weight, grads, (0.5, 1.0), dtype, weight, *rates)
        there.update("w", on_device, copies, (0.5, 1.0), dtype, on_device, *rates)
    assert on_device.memory.tobytes() == weight.tobytes()
    for own, other in zip(here.states["w"].arrays, there.states["w"].arrays, strict=True):
        assert other.memory.tobytes() == own.tobytes()


def test_a_rule_that_a_device_cannot_run_is_refused_in_a_sentence():
    with pytest.raises(DeviceError, match="sgld cannot run on cuda:0 .*: use another optimizer, or keep"):
        require_runs_on(create("sgld"), NumpyDevice())


def stored(values: np.ndarray, dtype: DType) -> np.ndarray:
    narrow = values.astype(np.float32)
    return REFERENCE.from_float32(narrow, dtype) if dtype is DType.BFLOAT16 else narrow
