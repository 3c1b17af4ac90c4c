"""Rules that need more than their own element: lengths of the whole parameter, rows, scalars, a master; refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Updater, create
from kvdist.optimizer.base import Piece
from kvdist.optimizer.states import Part
from tests.cases import each

F32, F64 = DType.FLOAT32, DType.FLOAT64
NORMS = ["lars", "lamb", "lans"]


def piece(index, weight, grad, start, shape=(10,)):
    return Piece(index, weight, [grad], [1.0], weight, Extent("w", shape, start))


# Lengths of the whole.


@each("name", NORMS)
def test_a_part_of_a_parameter_is_refused_and_the_error_says_what_to_do(name):
    updater, weight = Updater(create(name)), np.ones(4)
    for parts in (
        [piece(0, weight[:2], weight[:2], 0)],
        [piece(0, weight[:2], weight[:2], 0), piece(1, weight[2:], weight[2:], 3)],
        [piece(0, weight[:2], weight[:2], 8)],
    ):
        with pytest.raises(ValueError, match="norm of the whole parameter 'w'.*set_optimizer before init"):
            updater.update_together(parts, F64, 0.1, 0.0)
    assert not updater.states
    np.testing.assert_array_equal(weight, np.ones(4))


@each("name", NORMS)
def test_all_pieces_use_the_lengths_of_the_whole(name):
    """One part has a gradient 1000 times the other's: with lengths of its own each would take another step."""
    rng = np.random.default_rng(1)
    weight, grad = rng.standard_normal((2, 10))
    grad[5:] *= 1000
    whole, parts = weight.copy(), weight.copy()
    one, several = Updater(create(name, wd=0.1)), Updater(create(name, wd=0.1))
    for _ in range(5):
        one.update("w", whole, [grad], [1.0], F64, whole)
        several.update_together([piece(0, parts[:5], grad[:5], 0), piece(1, parts[5:], grad[5:], 5)], F64)
    np.testing.assert_allclose(parts, whole, rtol=1e-13)
    assert [state.count for state in several.states.values()] == [5, 5]
    alone = weight.copy()
    apart = Updater(create(name, wd=0.1))
    apart.update("half", alone[:5], [grad[:5]], [1.0], F64, alone[:5])
    apart.update("rest", alone[5:], [grad[5:]], [1.0], F64, alone[5:])
    once = weight.copy()
    Updater(create(name, wd=0.1)).update("w", once, [grad], [1.0], F64, once)
    assert np.abs(alone - once).max() > 1e-5


@each("name", NORMS)
def test_rules_that_need_norms_do_not_go_on_as_one(name):
    updater = Updater(create(name))
    assert updater.optimizer.needs_norms
    assert not updater.joinable(["a", "b"])


@each("name", NORMS)
def test_not_a_number_stays_in_its_parameter_and_gives_no_warning(name):
    updater, weight = Updater(create(name)), np.array([1.0, np.nan, 3e38], np.float32)
    updater("w", np.array([np.inf, 1, 3e38], np.float32), weight)
    assert np.isnan(weight[1])


@each(
    "key, shape, scaled",
    [
        ("fc.weight", (8,), True),
        ("fc.bias", (8,), False),
        ("bn_gamma", (8,), False),
        ("bn_beta", (2, 4), False),
        (3, (2, 4), True),
        (3, (8,), False),
        (3, (), False),
    ],
)
def test_lars_leaves_biases_and_scales_of_normalisations_at_the_plain_rate(key, shape, scaled):
    size = math.prod(shape)
    weight, grad = np.full(size, 2.0), np.full(size, 4.0)
    updater = Updater(create("lars", learning_rate=0.5, eta=0.25, epsilon=0.0))
    updater.update(key, weight, [grad], [1.0], F64, weight, extent=Extent(key, shape))
    # ‖w‖/‖g‖ is 1/2.
    np.testing.assert_allclose(weight, np.full(size, 2.0 - 4.0 * 0.5 * (0.25 / 2 if scaled else 1.0)), rtol=1e-14)


# Rows.


def test_a_row_longer_than_a_chunk_has_one_history():
    row = CHUNK_ELEMENTS + 3
    grad = np.arange(2 * row, dtype=np.float64) % 7
    weight = np.zeros(2 * row)
    updater = Updater(create("groupadagrad", learning_rate=1.0, epsilon=0.0))
    updater.update("w", weight, [grad], [1.0], F64, weight, extent=Extent("w", (2, row)))
    history = (grad.reshape(2, row) ** 2).mean(axis=1)
    np.testing.assert_allclose(updater.states["w"].arrays[0], history, rtol=1e-13)
    np.testing.assert_allclose(weight.reshape(2, row), -grad.reshape(2, row) / np.sqrt(history)[:, None], rtol=1e-13)


@each("shape", [(), (6,), (1, 2, 3)])
def test_group_adagrad_refuses_what_is_no_matrix(shape):
    weight = np.ones(math.prod(shape))
    with pytest.raises(ValueError, match="updates matrices, but the parameter 'w' has shape"):
        Updater(create("groupadagrad")).update("w", weight, [weight], [1.0], F64, weight, extent=Extent("w", shape))


def test_group_adagrad_refuses_weight_decay_and_torn_rows():
    updater, weight = Updater(create("groupadagrad")), np.ones(6)
    with pytest.raises(ValueError, match=r"no weight decay, and wd is 0\.5"):
        updater.update("w", weight, [weight], [1.0], F64, weight, wd=0.5, extent=Extent("w", (2, 3)))
    with pytest.raises(ValueError, match="whole rows of the parameter 'w'.*set_optimizer before init"):
        updater.update("w", weight, [weight], [1.0], F64, weight, extent=Extent("w", (3, 4), 2))
    assert not updater.states


@each("shape", [(0, 5), (5, 0), (0, 0)])
def test_a_matrix_without_elements_is_updated_to_itself(shape):
    weight = np.ones(0)
    updater = Updater(create("groupadagrad"))
    updater.update("w", weight, [weight], [1.0], F64, weight, extent=Extent("w", shape))
    assert updater.states["w"].count == 1


# Learning rates that a rule divides by.


@each("name", ["ftrl", "ftml"])
def test_rules_that_divide_by_the_learning_rate_refuse_0_and_change_nothing(name):
    updater, weight = Updater(create(name)), np.ones(3)
    with pytest.raises(ValueError, match="divides by the learning rate, but that of 'w' is 0"):
        updater.update("w", weight, [weight], [1.0], F64, weight, lr=0.0)
    assert not updater.states
    np.testing.assert_array_equal(weight, np.ones(3))


# Scalars and first states.


def test_nadam_keeps_its_schedule_for_each_slice_and_a_join_keeps_it_too():
    updater = Updater(create("nadam", beta1=0.5, schedule_decay=0.0))
    a, b = np.ones(3), np.ones(2)
    for _ in range(3):
        updater("a", np.ones(3), a)
        updater("b", np.ones(2), b)
    assert [state.scalars for state in updater.states.values()] == [(0.25**3,), (0.25**3,)]
    parts = [Part("a", 0, 3), Part("b", 4, 2)]
    assert updater.joinable("ab")
    updater.join("both", parts, 6, F64)
    assert (updater.states["both"].count, updater.states["both"].scalars) == (3, (0.25**3,))
    updater.split("both", parts)
    assert updater.states["b"].scalars == (0.25**3,)
    updater("a", np.ones(3), a)
    assert not updater.joinable("ab")


def test_the_earlier_weight_of_dcasgd_starts_as_the_weight():
    updater, weight = Updater(create("dcasgd", learning_rate=1.0, lamda=1.0)), np.array([2.0])
    updater("w", np.array([3.0]), weight)
    assert weight == [-1.0], "nothing to compensate at first"
    updater("w", np.array([2.0]), weight)
    assert weight == [-1.0 - (2.0 + 4.0 * -3.0)]
    assert updater.states["w"].arrays[0] == [-1.0]


# Masters.


def half(values, dtype):
    return REFERENCE.from_float32(np.asarray(values, np.float32), dtype)


@each("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_steps_too_small_for_a_half_add_up_in_its_master(dtype):
    small = 2.0**-14  # less than half of the last bit of 1
    grad = half([1.0], dtype)
    for multi_precision, expected in ((False, 1.0), (True, 1.0 - 64 * small)):
        updater = Updater(create("sgd", learning_rate=small, multi_precision=multi_precision))
        weight = half([1.0], dtype)
        for _ in range(64):
            updater.update("w", weight, [grad], [1.0], dtype, weight)
        assert REFERENCE.to_float32(weight, dtype) == half_value(expected, dtype)
    assert updater.states["w"].master == np.float32(1.0 - 64 * small)


def half_value(value, dtype):
    return REFERENCE.to_float32(half([value], dtype), dtype)


@each("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_a_weight_that_somebody_else_has_written_counts_and_its_neighbours_masters_stay(dtype):
    updater = Updater(create("sgd", learning_rate=2.0**-14, multi_precision=True))
    weight, grad = half([1.0, 1.0], dtype), half([1.0, 1.0], dtype)
    updater.update("w", weight, [grad], [1.0], dtype, weight)
    weight[1:] = half([5.0], dtype)
    updater.update("w", weight, [grad], [1.0], dtype, weight)
    np.testing.assert_array_equal(updater.states["w"].master, np.array([1 - 2 * 2.0**-14, 5 - 2.0**-14], np.float32))


@each("dtype", [F32, F64])
def test_full_widths_need_no_master(dtype):
    updater, weight = Updater(create("adam", multi_precision=True)), np.ones(3, dtype.storage)
    updater("w", weight.copy(), weight)
    assert updater.states["w"].master is None


def test_masters_are_joined_and_split_with_their_slices():
    dtype = DType.FLOAT16
    updater = Updater(create("sgd", learning_rate=2.0**-14, momentum=0.5, multi_precision=True))
    for name, size in (("a", 3), ("b", 2)):
        updater.update(
            name, half(np.ones(size), dtype), [half(np.ones(size), dtype)], [1.0], dtype, np.ones(size, "f2")
        )
    master = updater.states["b"].master.copy()
    parts = [Part("a", 0, 3), Part("b", 4, 2)]
    updater.join("both", parts, 6, dtype)
    np.testing.assert_array_equal(updater.states["both"].master[4:], master)
    assert updater.states["both"].master[3] == 0
    updater.split("both", parts)
    np.testing.assert_array_equal(updater.states["b"].master, master)
