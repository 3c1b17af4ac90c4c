"""What `Updater` keeps, refuses, and leaves alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.optimizer import Optimizer, Updater, create
from kvdist.optimizer.states import Part
from tests.cases import each

F32 = DType.FLOAT32


def ones(size=3):
    return np.ones(size, np.float32)


def test_states_and_counts_are_kept_for_each_index_apart():
    updater = Updater(create("sgd", momentum=0.5, learning_rate=1.0))
    first, second = ones(), ones()
    updater("a", ones(), first)
    updater("a", ones(), first)
    updater(("b", 1), ones(), second)
    assert {index: state.count for index, state in updater.states.items()} == {"a": 2, ("b", 1): 1}
    np.testing.assert_array_equal(updater.states["a"].arrays[0], np.full(3, -1.5))
    np.testing.assert_array_equal(updater.states["b", 1].arrays[0], np.full(3, -1.0))
    np.testing.assert_array_equal(first, np.full(3, 1 - 1 - 1.5))


def test_plain_sgd_keeps_no_array_and_adam_two_in_float32_for_halves():
    updater = Updater(create("sgd"))
    updater(0, ones(), ones())
    assert updater.states[0].arrays == ()
    updater = Updater(create("adam"))
    updater(0, np.ones(3, np.float16), np.ones(3, np.float16))
    assert [array.dtype for array in updater.states[0].arrays] == [np.float32, np.float32]


def test_rescale_and_multipliers_of_the_key_reach_a_local_update():
    optimizer = create("sgd", learning_rate=0.5, wd=0.25, rescale_grad=0.5)
    optimizer.set_lr_mult({"a": 2.0})
    optimizer.set_wd_mult({"b": 0.0})
    updater = Updater(optimizer)
    a, b = ones(), ones()
    updater("a", ones(), a)
    updater("b", ones(), b)
    np.testing.assert_array_equal(a, np.full(3, 1 - 1.0 * (0.5 + 0.25)))
    np.testing.assert_array_equal(b, np.full(3, 1 - 0.5 * 0.5))


def test_a_learning_rate_given_with_the_update_wins_over_the_optimizers():
    out = ones()
    Updater(create("sgd", learning_rate=9.0)).update("a", ones(), [ones()], [1.0], F32, out, lr=0.5, wd=0.0)
    np.testing.assert_array_equal(out, np.full(3, 0.5))


def test_no_contribution_is_a_gradient_of_zeros():
    weight = ones()
    Updater(create("sgd", learning_rate=0.5, wd=0.5)).update("a", weight, [], [], F32, weight)
    np.testing.assert_array_equal(weight, np.full(3, 0.75))


@each("order", ["C", "F"])
def test_local_weights_of_any_shape_and_layout_are_updated_in_place(order):
    weight = np.asarray(np.arange(12, dtype=np.float32).reshape(3, 4), order=order)
    grad = np.asarray(np.ones((3, 4), np.float32), order="C")
    view = weight[:, 1:3]
    Updater(create("sgd", learning_rate=1.0))("w", grad[:, 1:3], view)
    expected = np.arange(12, dtype=np.float32).reshape(3, 4)
    expected[:, 1:3] -= 1
    np.testing.assert_array_equal(weight, expected)
    scalar = np.array(3.0, np.float32)
    Updater(create("sgd", learning_rate=1.0))("s", np.array(1.0, np.float32), scalar)
    assert scalar == 2.0


def test_overflow_and_not_a_number_pass_without_a_warning():
    weight = np.array([1.0, 3e38], np.float32)
    grad = np.array([np.nan, -3e38], np.float32)
    Updater(create("sgd", learning_rate=1.0, clip_gradient=None))(0, grad, weight)
    assert np.isnan(weight[0])
    assert weight[1] == np.inf
    half = np.array([60000], np.float16)
    Updater(create("sgd", learning_rate=1.0))(0, np.array([-60000], np.float16), half)
    assert half[0] == np.inf


@each(
    "changes, error, words",
    [
        ({"dtype": DType.INT32}, TypeError, "int32: optimizers update floating types only"),
        ({"weight": np.ones(3)}, TypeError, "not float64"),
        ({"out": np.ones(4, np.float32)}, ValueError, "3 elements, the array for the new one 4"),
        ({"contributions": [np.ones(2, np.float32)]}, ValueError, "a gradient has 2 elements, the weight 3"),
        ({"contributions": [np.ones(3, np.float16)]}, TypeError, "not float16"),
        ({"scales": [1.0, 1.0]}, ValueError, "1 contributions need as many"),
        ({"scales": [float("nan")]}, ValueError, "finite scales"),
        ({"lr": float("inf")}, ValueError, "learning rate inf"),
        ({"wd": float("nan")}, ValueError, "weight decay nan"),
        ({"weight": ones(4), "out": ones(4), "contributions": [ones(4)]}, ValueError, "3 elements of float32 at its"),
    ],
)
def test_a_refused_update_names_the_mistake_and_changes_nothing(changes, error, words):
    updater = Updater(create("adam"))
    weight = ones()
    updater("w", ones(), weight)
    before = [array.copy() for array in updater.states["w"].arrays]
    arguments = {"weight": weight, "contributions": [ones()], "scales": [1.0], "dtype": F32, "out": ones()}
    arguments.update(changes)
    with pytest.raises(error, match=words):
        updater.update("w", **arguments)
    assert updater.states["w"].count == 1
    for array, old in zip(updater.states["w"].arrays, before, strict=True):
        np.testing.assert_array_equal(array, old)


def test_a_refused_first_update_leaves_no_state():
    updater = Updater(create("adam"))
    with pytest.raises(ValueError, match="not finite"):
        updater.update("w", ones(), [ones()], [1.0], F32, ones(), lr=float("nan"))
    assert not updater.states


def test_local_gradients_of_another_shape_or_type_are_refused():
    updater = Updater(create("sgd"))
    with pytest.raises(ValueError, match=r"shape \(2,\), the weight \(3,\)"):
        updater("w", ones(2), ones(3))
    with pytest.raises(TypeError, match="the gradient is float64, the weight float32"):
        updater("w", np.ones(3), ones(3))
    with pytest.raises(TypeError, match="floating types only"):
        updater("w", np.ones(3, np.int32), np.ones(3, np.int32))
    with pytest.raises(TypeError, match="uint16 are not supported"):
        updater("w", np.ones(3, np.uint16), np.ones(3, np.uint16))


def test_the_states_cannot_be_replaced_through_the_view():
    updater = Updater(create("sgd"))
    with pytest.raises(TypeError):
        updater.states["w"] = None


@dataclass(kw_only=True, eq=False)
class Recorder(Optimizer):
    """Notes what the rule is given."""

    name: ClassVar[str] = "recorder"

    @property
    def state_names(self):
        return ("a", "b")

    def __post_init__(self):
        super().__post_init__()
        self._calls = []

    def apply(self, weight, grad, out, state, scratch, step):
        sizes = (weight.size, grad.size, out.size, [s.size for s in state], scratch.size)
        self._calls.append((*sizes, step.lr, step.wd, step.count, step.start))


def test_a_rule_gets_pieces_of_equal_length_and_one_count_for_all_of_them():
    rule = Recorder()
    size = CHUNK_ELEMENTS + 3
    updater = Updater(rule)
    updater.update("w", ones(size), [ones(size)], [1.0], F32, ones(size), lr=0.5, wd=0.25)
    chunk = CHUNK_ELEMENTS
    assert rule._calls == [
        (chunk, chunk, chunk, [chunk, chunk], chunk, 0.5, 0.25, 1, 0),
        (3, 3, 3, [3, 3], 3, 0.5, 0.25, 1, chunk),
    ]
    updater.update("w", ones(size), [], [], F32, ones(size), lr=0.5, wd=0.25)
    assert rule._calls[-1][-2] == 2


# Several arrays that go on as one.

PARTS = (Part("a", 0, 3), Part("b", 4, 1), Part("c", 6, 0), Part("d", 6, 5))
SIZE = 12


def values_of(seed, dtype=np.float32):
    return np.random.default_rng(seed).integers(-9, 9, SIZE).astype(dtype)


def train(updater, weight, rounds, dtype=F32, joined=False, index="all"):
    """Update each part by itself, or all as one; the padding between the parts takes part in that."""
    for seed in rounds:
        grad = values_of(seed, weight.dtype)
        if joined:
            updater.update(index, weight, [grad, grad], [0.5, 0.25], dtype, weight)
            continue
        for part in PARTS:
            own = slice(part.start, part.start + part.count)
            updater.update(part.index, weight[own], [grad[own], grad[own]], [0.5, 0.25], dtype, weight[own])


def of_parts(array):
    return np.concatenate([array[part.start : part.start + part.count] for part in PARTS])


@each("dtype", [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16])
@each(
    "name, numbers",
    [("sgd", {}), ("sgd", {"momentum": 0.9}), ("adam", {}), ("adam", {"clip_gradient": 2.0}), ("test", {})],
)
def test_states_that_are_joined_and_split_go_on_to_the_bit(name, numbers, dtype):
    alone, joined = Updater(create(name, **numbers)), Updater(create(name, **numbers))
    ours, theirs = values_of(99, dtype.storage), values_of(99, dtype.storage)
    train(alone, theirs, range(9), dtype)
    train(joined, ours, range(3), dtype)
    for begin in (3, 6):
        assert joined.joinable([part.index for part in PARTS])
        joined.join("all", PARTS, SIZE, dtype)
        assert set(joined.states) == {"all"}
        train(joined, ours, range(begin, begin + 2), dtype, joined=True)
        joined.split("all", PARTS)
        assert set(joined.states) == {"a", "b", "c", "d"}
        train(joined, ours, range(begin + 2, begin + 3), dtype)
    np.testing.assert_array_equal(of_parts(ours), of_parts(theirs))
    for index, state in alone.states.items():
        assert joined.states[index].count == state.count == 9
        for found, wanted in zip(joined.states[index].arrays, state.arrays, strict=True):
            np.testing.assert_array_equal(found, wanted)


def test_parts_that_were_never_updated_are_joined_without_a_state_and_split_without_one():
    updater = Updater(create("adam"))
    assert updater.joinable(["a", "b"])
    updater.join("all", PARTS, SIZE, F32)
    assert not updater.states
    updater.split("all", PARTS)
    assert not updater.states


def test_a_join_that_sees_no_update_gives_back_what_it_took():
    updater = Updater(create("adam"))
    train(updater, values_of(0), range(2))
    before = {index: [array.copy() for array in state.arrays] for index, state in updater.states.items()}
    updater.join("all", PARTS, SIZE, F32)
    updater.split("all", PARTS)
    assert {index: state.count for index, state in updater.states.items()} == dict.fromkeys("abcd", 2)
    for index, arrays in before.items():
        for old, new in zip(arrays, updater.states[index].arrays, strict=True):
            np.testing.assert_array_equal(old, new)


def test_only_arrays_with_as_many_updates_can_go_on_as_one():
    updater = Updater(create("adam"))
    updater("a", ones(), ones())
    assert not updater.joinable(["a", "b"])
    updater("b", ones(), ones())
    assert updater.joinable(["a", "b"])
    updater("b", ones(), ones())
    assert not updater.joinable(["a", "b"])
    assert updater.joinable(["b"])


def test_states_of_one_index_are_not_shared_with_another_after_a_split():
    updater = Updater(create("sgd", momentum=0.5, learning_rate=1.0))
    updater.join("all", PARTS, SIZE, F32)
    train(updater, values_of(0), [1], joined=True)
    updater.split("all", PARTS)
    before = updater.states["d"].arrays[0].copy()
    updater("a", ones(3), ones(3))
    np.testing.assert_array_equal(updater.states["d"].arrays[0], before)
    assert (updater.states["a"].count, updater.states["d"].count) == (2, 1)


def test_a_refused_update_of_joined_arrays_changes_nothing():
    updater = Updater(create("adam"))
    train(updater, values_of(0), range(2))
    updater.join("all", PARTS, SIZE, F32)
    before = [array.copy() for array in updater.states["all"].arrays]
    weight = values_of(3)
    with pytest.raises(ValueError, match="not finite"):
        updater.update("all", weight, [weight], [1.0], F32, weight, lr=float("nan"))
    assert updater.states["all"].count == 2
    for old, new in zip(before, updater.states["all"].arrays, strict=True):
        np.testing.assert_array_equal(old, new)
