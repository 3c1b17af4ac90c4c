"""One table of optimizers, one battery: against torch where the rule is the same, and against formulas in float64."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Updater, create
from kvdist.optimizer.base import Piece
from tests.cases import each
from tests.optimizer.formulas import NO_DECAY, TABLE, shape_of

torch = pytest.importorskip("torch")

SIZES = [0, 1, 7, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1]
FLOATS = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]
HALVES = FLOATS[:2]
STEPS = 50

every_rule = each("name, numbers, formula", TABLE)


def lr_at(step):
    return 0.05 if step < 20 else 0.01


def wd_of(name, wd):
    return 0.0 if name in NO_DECAY else wd


def stored(values, dtype):
    if dtype in HALVES:
        return REFERENCE.from_float32(values.astype(np.float32), dtype)
    return values.astype(dtype.storage)


def as_float64(values, dtype):
    if dtype is DType.BFLOAT16:
        return REFERENCE.to_float32(values, dtype).astype(np.float64)
    return values.astype(np.float64)


def run(updater, formula, dtype, size, steps, scales, wd, clip, numbers, in_place=False, restart=None):
    """Run updater and formula side by side; returns the final weight, and both as float64.

    With `restart` the formula goes on from the updater's weight at each step: halves would else drift apart.
    """
    rng = np.random.default_rng(size)
    extent = Extent("w", shape_of(size))
    weight = stored(rng.standard_normal(size), dtype)
    other = np.empty_like(weight)
    expected = as_float64(weight, dtype).reshape(extent.shape)
    memory = {}
    restart = dtype in HALVES if restart is None else restart
    for step in range(steps):
        grads = [stored(rng.standard_normal(size), dtype) for _ in scales]
        total = sum(as_float64(grad, dtype) * scale for grad, scale in zip(grads, scales, strict=True))
        if restart:
            expected = as_float64(weight, dtype).reshape(extent.shape)
        expected = formula(expected, total.reshape(extent.shape), memory, step + 1, lr_at(step), wd, numbers, clip)
        target = weight if in_place else other
        before = weight.copy()
        updater.update("w", weight, grads, scales, dtype, target, lr_at(step), wd, extent)
        if not in_place:
            np.testing.assert_array_equal(weight.view(np.uint8), before.view(np.uint8))
            weight, other = other, weight
    return weight, as_float64(weight, dtype), expected.reshape(-1)


TOLERANCE = {DType.FLOAT64: 1e-12, DType.FLOAT32: 5e-5, DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}


def assert_follows(actual, expected, tolerance, name):
    """Signs of sums near 0 may fall otherwise in another precision, so signum may differ in a few elements."""
    far = ~np.isclose(actual, expected, rtol=tolerance, atol=tolerance)
    assert far.sum() <= far.size * (0.002 if name == "signum" else 0), (actual[far], expected[far])


@every_rule
@each(
    "dtype, clip, wd",
    [
        (DType.FLOAT32, None, 0.0),
        (DType.FLOAT64, 0.5, 0.1),
        (DType.FLOAT16, 0.5, 0.0),
        (DType.BFLOAT16, None, 0.1),
    ],
)
def test_fifty_steps_follow_the_formula_with_a_learning_rate_that_changes(name, numbers, formula, dtype, clip, wd):
    updater = Updater(create(name, clip_gradient=clip, **numbers))
    scales = (0.25, 1.0, 0.5)
    _, actual, expected = run(updater, formula, dtype, 1000, STEPS, scales, wd_of(name, wd), clip, numbers)
    assert np.isfinite(expected).all()
    assert_follows(actual, expected, TOLERANCE[dtype], name)


@every_rule
@each("dtype", HALVES)
def test_halves_with_a_master_follow_the_formula_as_float32_does(name, numbers, formula, dtype):
    updater = Updater(create(name, multi_precision=True, **numbers))
    wd = wd_of(name, 0.1)
    weight, _, expected = run(updater, formula, dtype, 1001, STEPS, (0.5, 1.0), wd, None, numbers, restart=False)
    master = updater.states["w"].master
    assert master.dtype == np.float32
    np.testing.assert_array_equal(REFERENCE.from_float32(master, dtype), weight)
    assert_follows(master, expected, TOLERANCE[DType.FLOAT32], name)


@every_rule
def test_awkward_sizes_follow_the_formula(name, numbers, formula):
    for size in SIZES:
        updater = Updater(create(name, **numbers))
        _, actual, expected = run(updater, formula, DType.FLOAT32, size, 3, (1.0, 1.0), wd_of(name, 0.1), None, numbers)
        assert_follows(actual, expected, 2e-5, name)


@every_rule
@each("dtype", [DType.BFLOAT16, DType.FLOAT32])
def test_in_place_and_out_of_place_give_the_same_bits(name, numbers, formula, dtype):
    arguments = (formula, dtype, CHUNK_ELEMENTS + 1, 4, (1.0, 0.5), wd_of(name, 0.1), 0.5, numbers)
    apart, _, _ = run(Updater(create(name, clip_gradient=0.5, **numbers)), *arguments)
    in_place, _, _ = run(Updater(create(name, clip_gradient=0.5, **numbers)), *arguments, in_place=True)
    np.testing.assert_array_equal(apart.view(np.uint8), in_place.view(np.uint8))


@every_rule
@each("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_slices_give_the_same_bits_as_one_piece(name, numbers, formula, dtype):
    size, row = 2 * CHUNK_ELEMENTS + 4, 6
    shape, wd = (size // row, row), wd_of(name, 0.1)
    rng = np.random.default_rng(0)
    weight, grad = rng.standard_normal((2, size)).astype(dtype.storage)
    whole, pieces = weight.copy(), weight.copy()
    by_piece, at_once = Updater(create(name, **numbers)), Updater(create(name, **numbers))
    for _ in range(2):
        at_once.update(0, whole, [grad], [1.0], dtype, whole, 0.1, wd, Extent("w", shape))
        parts = [
            Piece(start, pieces[start : start + 996], [grad[start : start + 996]], [1.0],
                  pieces[start : start + 996], Extent("w", shape, start))
            for start in range(0, size, 996)
        ]  # fmt: skip
        for together in [parts] if by_piece.optimizer.needs_norms else [[part] for part in parts]:
            by_piece.update_together(together, dtype, 0.1, wd)
    if by_piece.optimizer.needs_norms:  # sums of squares in another order: all bits but the last ones
        np.testing.assert_allclose(whole, pieces, rtol=0, atol=16 * np.finfo(dtype.storage).eps)
    else:
        np.testing.assert_array_equal(whole, pieces)


@every_rule
def test_float32_arithmetic_is_done_in_float32(name, numbers, formula):
    updater = Updater(create(name, **numbers))
    rng = np.random.default_rng(5)
    weight, grad = rng.standard_normal((2, 1000)).astype(np.float32)
    out = np.empty_like(weight)
    extent = Extent("w", shape_of(1000))
    updater.update(0, weight, [grad], [1.0], DType.FLOAT32, out, 0.1, 0.0, extent)
    assert all(array.dtype == np.float32 for array in updater.states[0].arrays)
    # One step, with the formula in float32: a few roundings of weight, result or step (about 0.1).
    shaped = weight.reshape(extent.shape), grad.reshape(extent.shape)
    expected = formula(*shaped, {}, 1, 0.1, 0.0, numbers, None).reshape(-1)
    assert expected.dtype == np.float32
    difference = np.abs(out.astype(np.float64) - expected)
    largest = np.maximum(np.maximum(np.abs(weight), np.abs(expected)), np.float32(0.1)).astype(np.float32)
    assert (difference <= 8 * np.spacing(largest)).all()


@every_rule
def test_a_gradient_of_zeros_and_a_parameter_of_zeros_stay_finite(name, numbers, formula):
    weight = np.zeros(21, np.float32)
    updater = Updater(create(name, **numbers))
    for _ in range(3):
        updater.update("w", weight, [], [], DType.FLOAT32, weight, 0.1, wd_of(name, 0.1), Extent("w", (3, 7)))
    assert np.isfinite(weight).all()
    if name != "sgld":
        assert not weight.view(np.uint32).any(), "zeros without a sign: they may be the padding of a message"


def test_a_sum_that_float64_would_keep_is_rounded_as_float32():
    weight = np.array([1.0], np.float32)
    out = np.empty_like(weight)
    grads = [np.array([value], np.float32) for value in (1.0, 2.0**-24, -1.0)]
    Updater(create("test")).update(0, weight, grads, [1.0] * 3, DType.FLOAT32, out)
    assert out[0] == 1.0
    # On a weight of 0 a sum in float64, 2**-24, would show.
    Updater(create("test")).update(0, np.zeros(1, np.float32), grads, [1.0] * 3, DType.FLOAT32, out)
    assert out[0] == 0.0


@each(
    "name, numbers, peer",
    [
        ("sgd", {}, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
        ("sgd", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)),
        ("nag", {}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)),
        ("adam", {"epsilon": 0.0}, lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1, eps=0.0)),
        ("adamax", {"epsilon": 0.0}, lambda p: torch.optim.Adamax(p, lr=0.05, weight_decay=0.1, eps=0.0)),
        ("nadam", {}, lambda p: torch.optim.NAdam(p, lr=0.05, weight_decay=0.1)),
        ("adagrad", {}, lambda p: torch.optim.Adagrad(p, lr=0.05, weight_decay=0.1, eps=1e-6)),
        ("adadelta", {}, lambda p: torch.optim.Adadelta(p, lr=0.05, weight_decay=0.1)),
        ("rmsprop", {}, lambda p: torch.optim.RMSprop(p, lr=0.05, weight_decay=0.1, alpha=0.9)),
        (
            "rmsprop",
            {"centered": True, "epsilon": 0.0},
            lambda p: torch.optim.RMSprop(
                p, lr=0.05, weight_decay=0.1, alpha=0.9, eps=0.0, momentum=0.9, centered=True
            ),
        ),
    ],
)
@each("dtype", [DType.FLOAT32, DType.FLOAT64])
def test_fifty_steps_at_one_learning_rate_equal_torch(name, numbers, peer, dtype):
    # Without epsilon the two places where it may stand agree.
    rng = np.random.default_rng(11)
    weight = rng.standard_normal(1001).astype(dtype.storage)
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer, updater = peer([parameter]), Updater(create(name, learning_rate=0.05, wd=0.1, **numbers))
    for _ in range(STEPS):
        grad = rng.standard_normal(1001).astype(dtype.storage)
        parameter.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        updater("w", grad, weight)
    # torch keeps one of Nadam's numbers in float32.
    tolerance = 1e-12 if dtype is DType.FLOAT64 and name != "nadam" else 2e-5
    np.testing.assert_allclose(weight, parameter.detach().numpy(), rtol=tolerance, atol=tolerance)


def test_adamw_without_weight_decay_equals_torch():
    # The mirrored rule decays by η·wd, where η holds the correction of the bias; without decay both agree.
    rng = np.random.default_rng(12)
    weight = rng.standard_normal(100)
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer = torch.optim.AdamW([parameter], lr=0.05, weight_decay=0.0, eps=0.0)
    updater = Updater(create("adamw", learning_rate=0.05, epsilon=0.0))
    for _ in range(STEPS):
        grad = rng.standard_normal(100)
        parameter.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        updater(0, grad, weight)
    np.testing.assert_allclose(weight, parameter.detach().numpy(), rtol=1e-12, atol=1e-12)


@each("dtype", FLOATS)
@each("name", ["sgd", "test"])
def test_integer_gradients_with_learning_rate_one_give_exact_weights(dtype, name):
    updater = Updater(create(name, learning_rate=1.0))
    weight = stored(np.arange(50.0), dtype)
    for worker_grads in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
        grads = [stored(np.full(50, value), dtype) for value in worker_grads]
        updater.update("w", weight, grads, [1.0] * 3, dtype, weight)
    sign = -1 if name == "sgd" else 1
    np.testing.assert_array_equal(as_float64(weight, dtype), np.arange(50.0) + sign * 21)
