"""The average of the weights that an optimizer keeps: the equation, in NumPy and in torch, and what becomes of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Updater, create
from kvdist.optimizer.base import AVERAGE, Extent, Piece
from kvdist.optimizer.registry import from_description
from kvdist.optimizer.states import Part
from tests.cases import each

HALF_LIFE = 5.0
PULL = 1 - 2 ** (-1 / HALF_LIFE)
RULES = {"sgd": {"momentum": 0.9}, "adam": {}, "torch.adamw": {}, "lars": {"momentum": 0.9}, "dcasgd": {}, "sgld": {}}


def drawn(seed, size, dtype=DType.FLOAT32):
    values = np.random.default_rng(seed).standard_normal(size)
    return values.astype(dtype.storage) if dtype.storage == dtype.accumulate else half(values, dtype)


def half(values, dtype):
    return REFERENCE.from_float32(np.asarray(values, np.float32), dtype)


def course(name, numbers, dtype=DType.FLOAT32, size=CHUNK_ELEMENTS + 5, steps=4, **more):
    """Weights from the first on, and the average behind each update."""
    updater, weights, averages = Updater(create(name, **numbers, **more)), [drawn(0, size, dtype)], []
    for step in range(steps):
        out = np.zeros_like(weights[0])
        updater.update("w", weights[-1], [drawn(10 + step, size, dtype)], [0.5], dtype, out, lr=0.1, wd=0.0)
        weights.append(out)
        state = updater.states["w"]
        if updater.optimizer.average_half_life is not None:
            averages.append(state.arrays[-1].copy())
    return weights, averages, state


@each("name", RULES)
def test_it_has_the_bits_of_the_equation_and_leaves_the_weights_alone(name):
    weights, averages, _ = course(name, RULES[name], average_half_life=HALF_LIFE)
    plain, _, _ = course(name, RULES[name])
    expected = weights[0]
    for weight, without, average in zip(weights[1:], plain[1:], averages, strict=True):
        expected = expected - (expected - weight) * np.float32(PULL)
        np.testing.assert_array_equal(average, expected)
        np.testing.assert_array_equal(weight, without)


def test_it_is_that_of_torch_whose_model_was_given_the_first_weights():
    weights, averages, _ = course("sgd", {"momentum": 0.9}, size=17, steps=50, average_half_life=HALF_LIFE)
    net = torch.nn.Linear(17, 1, bias=False)
    decay = 0.5 ** (1 / HALF_LIFE)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    for weight in weights:
        net.weight.data = torch.from_numpy(weight).view(1, 17)
        averaged.update_parameters(net)
    torch.testing.assert_close(averaged.module.weight.view(-1), torch.from_numpy(averages[-1]), rtol=1e-5, atol=1e-6)


def test_an_old_weight_counts_half_after_the_half_life():
    updater, weight = Updater(create("sgd", average_half_life=HALF_LIFE)), np.zeros(1, np.float32)
    grad = np.full(1, -1, np.float32)
    updater.update("w", weight, [grad], [1.0], DType.FLOAT32, weight, lr=1.0)  # from 0 to 1
    first = updater.states["w"].arrays[-1].item()
    for _ in range(int(HALF_LIFE)):
        updater.update("w", weight, [0 * grad], [1.0], DType.FLOAT32, weight, lr=1.0)
    assert 1 - updater.states["w"].arrays[-1].item() == pytest.approx((1 - first) / 2, rel=1e-5)


def test_weights_that_stay_are_their_own_average_to_the_bit():
    updater, weight = Updater(create("sgd", average_half_life=0.7)), drawn(3, 100)
    for _ in range(3):
        updater.update("w", weight, [drawn(4, 100)], [1.0], DType.FLOAT32, weight, lr=0.0)
    assert updater.states["w"].arrays[-1].tobytes() == weight.tobytes()


@each("dtype", [DType.FLOAT16, DType.BFLOAT16])
@each("masters", [False, True])
def test_that_of_halves_is_float32_and_follows_the_master_where_there_is_one(dtype, masters):
    settings = {"average_half_life": HALF_LIFE, "multi_precision": masters}
    weights, averages, state = course("adam", {}, dtype, **settings)
    assert averages[-1].dtype == np.float32
    if masters:
        assert not np.array_equal(state.master, REFERENCE.to_float32(weights[-1], dtype))
        _, (first, *_), state = course("adam", {}, dtype, steps=1, **settings)
        begin = REFERENCE.to_float32(weights[0], dtype)
        np.testing.assert_array_equal(first, begin - (begin - state.master) * np.float32(PULL))
        return
    expected = REFERENCE.to_float32(weights[0], dtype)
    for weight in weights[1:]:
        expected = expected - (expected - REFERENCE.to_float32(weight, dtype)) * np.float32(PULL)
    np.testing.assert_array_equal(averages[-1], expected)


def test_a_parameter_in_pieces_has_that_of_the_whole():
    """Of a rule with norms, whose pieces are updated together."""
    rule = create("lars", momentum=0.9, average_half_life=HALF_LIFE)
    whole, cut = Updater(rule), Updater(rule)
    weight, grad = drawn(0, 100), drawn(1, 100)
    out, pieces = np.empty_like(weight), []
    whole.update("w", weight, [grad], [1.0], DType.FLOAT32, out)
    cuts = {"a": slice(0, 37), "b": slice(37, 100)}
    for name, part in cuts.items():
        extent = Extent("w", (100,), part.start)
        pieces.append(Piece(name, weight[part], [grad[part]], [1.0], np.empty_like(weight[part]), extent))
    cut.update_together(pieces, DType.FLOAT32)
    for name, part in cuts.items():
        np.testing.assert_allclose(cut.states[name].arrays[-1], whole.states["w"].arrays[-1][part], rtol=1e-6)


def test_it_is_joined_and_split_with_its_slices():
    updater = Updater(create("sgd", average_half_life=HALF_LIFE))
    for name, size in (("a", 3), ("b", 2)):
        updater.update(name, drawn(0, size), [drawn(1, size)], [1.0], DType.FLOAT32, np.empty(size, np.float32))
    before = {name: updater.states[name].arrays[-1].copy() for name in "ab"}
    parts = [Part("a", 0, 3), Part("b", 4, 2)]
    updater.join("both", parts, 6, DType.FLOAT32)
    np.testing.assert_array_equal(updater.states["both"].arrays[-1][4:], before["b"])
    updater.split("both", parts)
    for name, average in before.items():
        np.testing.assert_array_equal(updater.states[name].arrays[-1], average)


def test_it_is_part_of_the_rule_and_off_unless_asked_for():
    plain, averaging = create("sgd"), create("sgd", average_half_life=100)
    assert plain.kept_names == plain.state_names == ()
    assert averaging.kept_names == (AVERAGE,) and averaging.state_names == ()
    assert from_description(averaging.describe()).average_half_life == 100
    assert create("sgd", average_half_life=0).rule() == plain.rule() != averaging.rule()
    assert str(averaging) == "sgd(average_half_life=100.0)"
    with pytest.raises(ValueError, match="average_half_life must be at least 0, not -1"):
        create("sgd", average_half_life=-1)
    with pytest.raises(ValueError, match="groupadagrad has no average_half_life: its states are by rows"):
        create("groupadagrad", average_half_life=1)


def test_a_description_from_before_there_were_averages_is_one_without():
    description = create("adam").describe()
    del description["average_half_life"]
    assert from_description(description).average_half_life is None
