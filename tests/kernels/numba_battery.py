"""What numba's device must do with updates: it has kernels for few rules, of float32 and float64, and says so.

Used as `tests.kernels.device_battery`.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.optimizer import Updater, create
from kvdist.optimizer.offload import require_runs_on
from tests.cases import each
from tests.kernels.device_battery import FLOATS, up
from tests.kernels.update_battery import check_update


@each("dtype", FLOATS)
@each("rule", ["sgd", "momentum", "adam"])
def test_an_update_has_the_bits_of_the_reference(device, rule, dtype):
    for size, count, kind in ((0, 1, "ones"), (1, 1, "equal"), (17, 0, "ones"), (65, 2, "unequal"), (65, 17, "equal")):
        check_update(device, rule, dtype, size, count, kind=kind, wd=0.01, clip_gradient=0.5)
    check_update(device, rule, dtype, 65, 3, shift=1, in_place=True)


def test_a_rule_without_a_kernel_is_refused_before_the_first_update(device):
    for name, options in (("sgd", {}), ("sgd", {"momentum": 0.9}), ("adam", {})):
        require_runs_on(create(name, **options), device)
    for name in ("adamw", "lamb", "sgld"):
        with pytest.raises(DeviceError, match=f"{name} cannot run on cuda:0 .*: use another optimizer, or keep"):
            require_runs_on(create(name), device)


def test_halves_are_not_updated(device):
    weight = up(device, np.zeros(3, np.float16))
    with pytest.raises(TypeError, match="has no kernel for sgd of float16 on cuda:0: install cupy there"):
        Updater(create("sgd"), device.kernels).update("w", weight, [weight], [1.0], DType.FLOAT16, weight)
