"""What every device that runs every rule must do with updates, held against the NumPy reference bit by bit.

Used as `tests.kernels.device_battery`.
"""

from __future__ import annotations

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Equation
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Updater, create
from kvdist.optimizer.adagrad import adagrad
from kvdist.optimizer.adam import adam, adamw
from kvdist.optimizer.sgd import nag, sgd, sgd_momentum
from tests.cases import each
from tests.kernels.device_battery import FLOATS, HALVES, assert_same, down, scales_of, tame, up, values

RULES = {
    "sgd": ("sgd", {}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "nag": ("nag", {"momentum": 0.7}),
    "adam": ("adam", {}),
    "adamw": ("adamw", {}),
    "adamw without correction": ("adamw", {"correct_bias": False}),
    "adagrad": ("adagrad", {}),
}
EQUATIONS = {
    "sgd": (Equation(sgd, (0.1, 0.01)), 0),
    "sgd_momentum": (Equation(sgd_momentum, (0.1, 0.01, 0.9)), 1),
    "nag": (Equation(nag, (0.1, 0.01, 0.9)), 1),
    "adam": (Equation(adam, (0.1, 0.01, 0.9, 0.1, 0.99, 0.01, 1e-8)), 2),
    "adamw": (Equation(adamw, (0.1, 0.01, 0.9, 0.1, 0.99, 0.01, 1e-8)), 2),
    "adagrad": (Equation(adagrad, (0.1, 0.01, 1e-7)), 1),
}
"""Equations by name, with the number of their states."""


def updated(kernels, rule, dtype, size, count, kind="equal", lift=lambda array: array, in_place=False, **settings):
    """Weight, states and master after three updates, of whatever library `lift` makes arrays of."""
    name, numbers = RULES[rule]
    updater = Updater(create(name, **{**numbers, **settings}), kernels)
    weight = lift(tame(size, 99, dtype))
    for step in range(3):
        out = weight if in_place else lift(np.zeros(size, dtype.storage))
        given = [lift(values(size, 10 * step + i, dtype)) for i in range(count)]
        updater.update("w", weight, given, scales_of(kind, count), dtype, out)
        weight = out
    state = updater.states["w"]
    return weight, *state.arrays, *(() if state.master is None else (state.master,))


def check_update(device, rule, dtype, size, count, shift=0, **settings):
    actual = updated(device.kernels, rule, dtype, size, count, lift=lambda host: up(device, host, shift), **settings)
    expected = updated(REFERENCE, rule, dtype, size, count, **settings)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same(down(device, ours), theirs, dtype)


@each("dtype", [*FLOATS, *HALVES])
@each("rule", RULES)
def test_an_update_has_the_bits_of_the_reference(device, sizes, rule, dtype):
    for size in sizes[-3:]:
        check_update(device, rule, dtype, size, 3, wd=0.01, clip_gradient=0.5)


@each("dtype", HALVES)
@each("rule", RULES)
def test_a_half_weight_may_have_a_master(device, sizes, rule, dtype):
    for size in sizes[-2:]:
        check_update(device, rule, dtype, size, 2, wd=0.01, multi_precision=True)


@each("rule", RULES)
def test_an_update_knows_every_kind_of_scale(device, rule):
    for count, kind in ((1, "ones"), (1, "equal"), (2, "unequal"), (5, "unequal"), (9, "ones")):
        check_update(device, rule, DType.FLOAT32, 257, count, kind=kind)


@each("rule", RULES)
def test_an_update_takes_no_gradients_and_many(device, rule):
    for count in (0, 33):
        check_update(device, rule, DType.FLOAT32, 17, count, wd=0.01)


@each("dtype", [DType.FLOAT32, DType.BFLOAT16])
@each("rule", RULES)
def test_arrays_of_an_update_may_start_anywhere_and_the_weight_may_be_written_in_place(device, rule, dtype):
    for shift in (1, 4):
        check_update(device, rule, dtype, 259, 2, shift=shift, in_place=True, multi_precision=True)


@each("dtype", [*FLOATS, *HALVES])
@each("name", EQUATIONS)
def test_the_rules_that_backends_may_know_are_done_in_one_piece(device, name, dtype):
    equation, count = EQUATIONS[name]
    assert equation.name == name
    weight, grad = (up(device, tame(17, seed, dtype)) for seed in (1, 2))
    states = [device.kernels.zeros(17, dtype.accumulate) for _ in range(count)]
    update = device.kernels.fused_update
    assert update(equation, weight, [grad], [1.0], None, weight, states, dtype)


def sgd_of_a_user(grad, weight, lr, wd):
    return weight - grad * grad * lr


sgd_of_a_user.__name__ = "sgd"


def test_a_rule_of_a_user_with_the_name_of_ours_is_the_user_s(device):
    weight, grad = (up(device, tame(17, seed)) for seed in (1, 2))
    equation = Equation(sgd_of_a_user, (0.1, 0.0))
    assert device.kernels.fused_update(equation, weight, [grad], [1.0], None, weight, [], DType.FLOAT32)
    expected = sgd_of_a_user(tame(17, 2), tame(17, 1), np.float32(0.1), 0)
    assert_same(down(device, weight), expected, DType.FLOAT32)


def test_a_rule_that_maximises_takes_the_gradient_with_the_other_sign(device):
    weight, grad = (up(device, tame(17, seed)) for seed in (1, 2))
    equation = Equation(sgd, (0.1, 0.0), is_negative=True)
    assert device.kernels.fused_update(equation, weight, [grad], [1.0], None, weight, [], DType.FLOAT32)
    assert_same(down(device, weight), sgd(-tame(17, 2), tame(17, 1), np.float32(0.1), 0), DType.FLOAT32)


@each("dtype", HALVES)
def test_a_master_follows_a_weight_that_somebody_else_has_changed(device, dtype):
    finals = []
    for kernels, lift in ((REFERENCE, np.copy), (device.kernels, lambda host: up(device, host))):
        updater = Updater(create("sgd", momentum=0.9, multi_precision=True), kernels)
        weight = lift(tame(100, 1, dtype))
        updater.update("w", weight, [lift(tame(100, 2, dtype))], [1.0], dtype, weight)
        changed = weight.copy() if kernels is REFERENCE else down(device, weight)
        changed[::3] = tame(100, 3, dtype)[::3]
        weight = lift(changed)
        updater.update("w", weight, [lift(tame(100, 4, dtype))], [1.0], dtype, weight)
        finals.append((weight, updater.states["w"].master))
    for theirs, ours in zip(*finals, strict=True):
        assert_same(down(device, ours), theirs, dtype)
