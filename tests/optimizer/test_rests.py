"""`Optimizer.rests`: who says that a gradient of zeros changes nothing is held to it."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.optimizer import Extent, Updater, create, from_description
from kvdist.optimizer.registry import registered
from tests.cases import each

SHAPE = (6, 4)
SIZE = 24
VARIANTS = [
    *((name, {}) for name in registered()),
    ("sgd", {"momentum": 0.9}),
    ("nag", {"momentum": 0.0}),
    ("signum", {"momentum": 0.0}),
    ("signum", {"momentum": 0.0, "wd_lh": 0.1}),
    ("dcasgd", {"momentum": 0.5}),
    ("adagrad", {"epsilon": 0.0}),
    ("adagrad", {"epsilon": 1e-60}),
    ("groupadagrad", {"epsilon": 0.0}),
    ("adam", {"beta1": 0.0, "beta2": 0.0}),
    ("rmsprop", {"rho": 0.0}),
    ("rmsprop", {"centered": True}),
    ("torch.sgd", {"momentum": 0.9}),
    ("torch.adagrad", {"eps": 0.0}),
    ("torch.adagrad", {"initial_accumulator_value": 0.1}),
]
RESTING = {"sgd", "adagrad", "groupadagrad", "test", "signum momentum=0.0", "torch.sgd", "torch.adagrad"}


def name_of(name, numbers):
    return " ".join([name, *(f"{key}={value}" for key, value in numbers.items())])


def moved_by_zeros(optimizer, wd, dtype):
    """Whether a zero gradient changes weight or states, after none, one and several real ones; and for lr 0 too."""
    rng = np.random.default_rng(3)
    updater = Updater(optimizer)
    weight = rng.standard_normal(SIZE).astype(dtype.storage)
    extent = Extent("w", SHAPE)
    zeros = np.zeros(SIZE, dtype.storage)

    def update(grad, lr=0.1):
        updater.update("w", weight, [grad], [0.5], dtype, weight, lr, wd, extent)

    moved = False
    for _ in range(4):
        before = weight.copy(), None if "w" not in updater.states else updater.states["w"].copy()
        update(zeros, 0.05)
        after = updater.states["w"]
        earlier = before[1].arrays if before[1] is not None else [np.zeros_like(one) for one in after.arrays]
        pairs = [(before[0], weight), *zip(earlier, after.arrays, strict=True)]
        moved |= any(old.tobytes() != new.tobytes() for old, new in pairs)
        grad = (rng.standard_normal(SIZE) * 10.0 ** rng.integers(-30, 30, SIZE)).astype(dtype.storage)
        grad[:8] = 0  # rows that never have a gradient
        update(grad)
    return moved


@each("dtype", [DType.FLOAT32, DType.FLOAT64])
@each("wd", [0.0, 0.1])
@each("name, numbers", VARIANTS)
def test_a_rule_rests_only_where_a_zero_gradient_changes_no_bit(name, numbers, wd, dtype):
    optimizer = create(name, **numbers)
    if name == "groupadagrad" and wd:
        assert not optimizer.rests(wd)
        return
    rests = optimizer.rests(wd)
    assert rests == (name_of(name, numbers) in RESTING and (wd == 0 or name == "test"))
    if rests:
        assert not moved_by_zeros(optimizer, wd, dtype)


@each("name, numbers", [("adam", {}), ("nag", {"momentum": 0.0}), ("sgd", {"momentum": 0.9})])
def test_the_check_above_sees_rules_that_do_not_rest(name, numbers):
    assert moved_by_zeros(create(name, **numbers), 0.0, DType.FLOAT32)
    assert moved_by_zeros(create("sgd"), 0.1, DType.FLOAT32)
    assert moved_by_zeros(create("adagrad", epsilon=0.0), 0.0, DType.FLOAT32)


def test_lazy_update_is_off_unless_asked_for_and_part_of_the_rule():
    assert create("adam").lazy_update is False
    lazy = create("adam", lazy_update=True)
    assert lazy.rule() != create("adam").rule()
    assert from_description(lazy.describe()).lazy_update is True
    assert str(lazy) == "adam(lazy_update=True)"
    with pytest.raises(AttributeError, match="lazy_update cannot change after creation"):
        lazy.lazy_update = False
    with pytest.raises(TypeError, match="lazy_update must be True or False, not 1"):
        create("adam", lazy_update=1)


def test_a_description_from_before_lazy_update_is_one_without_it():
    description = create("adam").describe()
    del description["lazy_update"]
    assert from_description(description).describe() == create("adam").describe()
