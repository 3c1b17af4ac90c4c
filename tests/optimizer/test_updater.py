"""What `Updater` keeps, refuses, and leaves alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.optimizer import Optimizer, Updater, create

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


@pytest.mark.parametrize("order", ["C", "F"])
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


@pytest.mark.parametrize(
    ("changes", "error", "words"),
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

    def apply(self, weight, grad, out, state, scratch, lr, wd, count):
        self._calls.append((weight.size, grad.size, out.size, [s.size for s in state], scratch.size, lr, wd, count))


def test_a_rule_gets_pieces_of_equal_length_and_one_count_for_all_of_them():
    rule = Recorder()
    size = CHUNK_ELEMENTS + 3
    updater = Updater(rule)
    updater.update("w", ones(size), [ones(size)], [1.0], F32, ones(size), lr=0.5, wd=0.25)
    chunk = CHUNK_ELEMENTS
    assert rule._calls == [
        (chunk, chunk, chunk, [chunk, chunk], chunk, 0.5, 0.25, 1),
        (3, 3, 3, [3, 3], 3, 0.5, 0.25, 1),
    ]
    updater.update("w", ones(size), [], [], F32, ones(size), lr=0.5, wd=0.25)
    assert rule._calls[-1][-1] == 2
