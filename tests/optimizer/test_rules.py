"""One table of optimizers, one battery: against torch where the rule is the same, and against formulas in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Updater, create

torch = pytest.importorskip("torch")

SIZES = [0, 1, 7, 1000, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1]
FLOATS = [DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64]
STEPS = 50


# The published equations, written out again with plain float64 expressions. `h` holds the hyper-parameters, `s` the
# state (fresh zeros), t counts from 1; each returns the new weight.


def sgd(w, g, s, t, lr, wd, h):
    g = g + wd * w
    s["m"] = h.get("momentum", 0.0) * s["m"] - lr * g
    return w + s["m"]


def nag(w, g, s, t, lr, wd, h):
    g = g + wd * w
    mu = h.get("momentum", 0.9)
    s["m"] = mu * s["m"] - lr * g
    return w + mu * s["m"] - lr * g


def adam(w, g, s, t, lr, wd, h):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-8)
    g = g + wd * w
    s["m"] = b1 * s["m"] + (1 - b1) * g
    s["v"] = b2 * s["v"] + (1 - b2) * g**2
    return w - lr * math.sqrt(1 - b2**t) / (1 - b1**t) * s["m"] / (np.sqrt(s["v"]) + eps)


def adamw(w, g, s, t, lr, wd, h):
    b1, b2, eps = h.get("beta1", 0.9), h.get("beta2", 0.999), h.get("epsilon", 1e-6)
    s["m"] = b1 * s["m"] + (1 - b1) * g
    s["v"] = b2 * s["v"] + (1 - b2) * g**2
    eta = lr * math.sqrt(1 - b2**t) / (1 - b1**t) if h.get("correct_bias", True) else lr
    return w - eta * (s["m"] / (np.sqrt(s["v"]) + eps) + wd * w)


def plus_gradient(w, g, s, t, lr, wd, h):
    return w + g


TABLE = [
    ("sgd", {}, sgd),
    ("sgd", {"momentum": 0.9}, sgd),
    ("nag", {}, nag),
    ("nag", {"momentum": 0.5}, nag),
    ("adam", {}, adam),
    ("adam", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3}, adam),
    ("adamw", {}, adamw),
    ("adamw", {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-3, "correct_bias": False}, adamw),
    ("test", {}, plus_gradient),
]
IDS = [name + "".join(f"-{key}={value}" for key, value in numbers.items()) for name, numbers, _ in TABLE]
every_rule = pytest.mark.parametrize(("name", "numbers", "formula"), TABLE, ids=IDS)


def lr_at(step):
    return 0.05 if step < 20 else 0.01


def stored(values, dtype):
    if dtype in (DType.FLOAT16, DType.BFLOAT16):
        return REFERENCE.from_float32(values.astype(np.float32), dtype)
    return values.astype(dtype.storage)


def as_float64(values, dtype):
    if dtype is DType.BFLOAT16:
        return REFERENCE.to_float32(values, dtype).astype(np.float64)
    return values.astype(np.float64)


def run(updater, formula, dtype, size, steps, scales, wd, clip, numbers, in_place=False):
    """Run updater and formula side by side; returns both final weights as float64. Halves restart each step."""
    rng = np.random.default_rng(size)
    weight = stored(rng.standard_normal(size), dtype)
    other = np.empty_like(weight)
    expected = as_float64(weight, dtype)
    state = {"m": np.zeros(size), "v": np.zeros(size)}
    for step in range(steps):
        grads = [stored(rng.standard_normal(size), dtype) for _ in scales]
        total = sum(as_float64(grad, dtype) * scale for grad, scale in zip(grads, scales, strict=True))
        total = np.clip(total, -clip, clip) if clip else total
        if dtype.itemsize == 2:
            expected = as_float64(weight, dtype)
        expected = formula(expected, total, state, step + 1, lr_at(step), wd, numbers)
        target = weight if in_place else other
        before = weight.copy()
        updater.update("w", weight, grads, scales, dtype, target, lr_at(step), wd)
        if not in_place:
            np.testing.assert_array_equal(weight.view(np.uint8), before.view(np.uint8))
            weight, other = other, weight
    return weight, as_float64(weight, dtype), expected


TOLERANCE = {DType.FLOAT64: 1e-13, DType.FLOAT32: 2e-5, DType.FLOAT16: 1e-3, DType.BFLOAT16: 8e-3}


@every_rule
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("wd", [0.0, 0.1])
def test_fifty_steps_follow_the_formula_with_a_learning_rate_that_changes(name, numbers, formula, dtype, clip, wd):
    updater = Updater(create(name, clip_gradient=clip, **numbers))
    _, actual, expected = run(updater, formula, dtype, 1000, STEPS, (0.25, 1.0, 0.5), wd, clip, numbers)
    np.testing.assert_allclose(actual, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@every_rule
@pytest.mark.parametrize("size", SIZES)
def test_awkward_sizes_follow_the_formula(name, numbers, formula, size):
    updater = Updater(create(name, **numbers))
    _, actual, expected = run(updater, formula, DType.FLOAT32, size, 3, (1.0, 1.0), 0.1, None, numbers)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@every_rule
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("size", [7, CHUNK_ELEMENTS + 1])
def test_in_place_and_out_of_place_give_the_same_bits(name, numbers, formula, dtype, size):
    arguments = (formula, dtype, size, 4, (1.0, 0.5), 0.1, 0.5, numbers)
    apart, _, _ = run(Updater(create(name, clip_gradient=0.5, **numbers)), *arguments)
    in_place, _, _ = run(Updater(create(name, clip_gradient=0.5, **numbers)), *arguments, in_place=True)
    np.testing.assert_array_equal(apart.view(np.uint8), in_place.view(np.uint8))


@every_rule
def test_chunks_give_the_same_bits_as_one_piece(name, numbers, formula):
    size = 2 * CHUNK_ELEMENTS + 5
    rng = np.random.default_rng(0)
    weight, grad = rng.standard_normal((2, size)).astype(np.float32)
    whole, pieces = np.empty_like(weight), np.empty_like(weight)
    Updater(create(name, **numbers)).update(0, weight, [grad], [1.0], DType.FLOAT32, whole, 0.1, 0.1)
    by_piece = Updater(create(name, **numbers))
    for start in range(0, size, 999):
        part = slice(start, start + 999)
        by_piece.update(start, weight[part], [grad[part]], [1.0], DType.FLOAT32, pieces[part], 0.1, 0.1)
    np.testing.assert_array_equal(whole, pieces)


@every_rule
def test_float32_arithmetic_is_done_in_float32(name, numbers, formula):
    updater = Updater(create(name, **numbers))
    rng = np.random.default_rng(5)
    weight, grad = rng.standard_normal((2, 1000)).astype(np.float32)
    out = np.empty_like(weight)
    updater.update(0, weight, [grad], [1.0], DType.FLOAT32, out, 0.1, 0.0)
    assert all(array.dtype == np.float32 for array in updater.states[0].arrays)
    # One step, written in float32 by hand: a few roundings of weight, result or step (about 0.1).
    state = {"m": np.zeros(1000, np.float32), "v": np.zeros(1000, np.float32)}
    one = {key: np.float32(value) if isinstance(value, float) else value for key, value in numbers.items()}
    expected = formula(weight, grad, state, 1, np.float32(0.1), np.float32(0), one)
    difference = np.abs(out.astype(np.float64) - expected)
    largest = np.maximum(np.maximum(np.abs(weight), np.abs(expected)), np.float32(0.1)).astype(np.float32)
    assert (difference <= 4 * np.spacing(largest)).all()


def test_a_sum_that_float64_would_keep_is_rounded_as_float32():
    weight = np.array([1.0], np.float32)
    out = np.empty_like(weight)
    grads = [np.array([value], np.float32) for value in (1.0, 2.0**-24, -1.0)]
    Updater(create("test")).update(0, weight, grads, [1.0] * 3, DType.FLOAT32, out)
    assert out[0] == 1.0
    # On a weight of 0 a sum in float64, 2**-24, would show.
    Updater(create("test")).update(0, np.zeros(1, np.float32), grads, [1.0] * 3, DType.FLOAT32, out)
    assert out[0] == 0.0


@pytest.mark.parametrize(
    ("name", "numbers", "peer"),
    [
        ("sgd", {}, lambda p: torch.optim.SGD(p, lr=0.05, weight_decay=0.1)),
        ("sgd", {"momentum": 0.9}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1)),
        ("nag", {}, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.1, nesterov=True)),
        ("adam", {"epsilon": 0.0}, lambda p: torch.optim.Adam(p, lr=0.05, weight_decay=0.1, eps=0.0)),
    ],
    ids=["sgd", "momentum", "nag", "adam"],
)
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64], ids=lambda dtype: dtype.label)
def test_fifty_steps_at_one_learning_rate_equal_torch(name, numbers, peer, dtype):
    # Without epsilon the two places where Adam's may stand agree.
    rng = np.random.default_rng(11)
    weight = rng.standard_normal(1001).astype(dtype.storage)
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    optimizer, updater = peer([parameter]), Updater(create(name, learning_rate=0.05, wd=0.1, **numbers))
    for _ in range(STEPS):
        grad = rng.standard_normal(1001).astype(dtype.storage)
        parameter.grad = torch.from_numpy(grad.copy())
        optimizer.step()
        updater("w", grad, weight)
    tolerance = 1e-12 if dtype is DType.FLOAT64 else 2e-5
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


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: dtype.label)
@pytest.mark.parametrize("name", ["sgd", "test"])
def test_integer_gradients_with_learning_rate_one_give_exact_weights(dtype, name):
    updater = Updater(create(name, learning_rate=1.0))
    weight = stored(np.arange(50.0), dtype)
    for worker_grads in ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0]):
        grads = [stored(np.full(50, value), dtype) for value in worker_grads]
        updater.update("w", weight, grads, [1.0] * 3, dtype, weight)
    sign = -1 if name == "sgd" else 1
    np.testing.assert_array_equal(as_float64(weight, dtype), np.arange(50.0) + sign * 21)
