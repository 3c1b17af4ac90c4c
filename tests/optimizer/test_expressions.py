"""Rules as expressions: what they are made of, and that NumPy evaluates them alike by a plan and at once."""

from __future__ import annotations

import ast
import inspect
import math
import sys

import numpy as np
import pytest

from kvdist.kernels import elementwise
from kvdist.kernels.elementwise import decayed, evaluate, limited, sqrt
from kvdist.kernels.interface import CHUNK_ELEMENTS, NUMBERS_MAX, STATES_MAX
from kvdist.optimizer import adagrad, adam, ftrl, layerwise, sgd, torch_rules
from tests.cases import each

LONG = 4 * elementwise.PLANNED_ELEMENTS
MODULES = [adagrad, adam, ftrl, layerwise, sgd, torch_rules]
MAKERS = ("Equation", "evaluate")
"""Functions whose first argument is an expression."""


def functions_in(node, module):
    """Functions that are named in a piece of syntax."""
    named = [getattr(module, one.id, None) for one in ast.walk(node) if isinstance(one, ast.Name)]
    return [one for one in named if inspect.isfunction(one)]


def syntax_of(function):
    return ast.parse(inspect.getsource(function)).body[0]


def expressions():
    """Every expression of the package, and what it calls, but for the functions of `elementwise`."""
    found = []
    for module in MODULES:
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in MAKERS:
                found += functions_in(node.args[0], module)
    for function in found:  # grows on the way
        module = sys.modules[function.__module__]
        called = functions_in(syntax_of(function), module)
        found += [one for one in called if one not in found and one.__module__ != elementwise.__name__]
    return list(dict.fromkeys(found))


EXPRESSIONS = expressions()


def literals(function):
    """Constants in the body of a function, but for its docstring."""
    body = syntax_of(function).body
    is_documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    return [one.value for part in body[is_documented:] for one in ast.walk(part) if isinstance(one, ast.Constant)]


@each("expression", EXPRESSIONS)
def test_an_expression_has_no_literal_numbers_and_says_its_formula(expression):
    assert literals(expression) == []
    assert expression.__doc__


@each("expression", EXPRESSIONS)
def test_an_expression_only_calls_what_numba_compiles(expression):
    calls = [one.func for one in ast.walk(syntax_of(expression)) if isinstance(one, ast.Call)]
    names = {one.id for one in calls if isinstance(one, ast.Name)}
    assert len(names) == len({ast.dump(one) for one in calls}), "an attribute of a module is called"
    helpers = {name for name, _ in inspect.getmembers(elementwise, inspect.isfunction)}
    assert names <= helpers | {"abs"} | {one.__name__ for one in EXPRESSIONS}


def with_a_literal(grad, weight, lr):
    """A rule as it must not be."""
    return weight - grad * lr * 2.0


def test_the_search_finds_expressions_and_literals():
    names = {one.__name__ for one in EXPRESSIONS}
    assert {"sgd", "adam", "toward", "sgld", "group_adagrad", "lans_directions", "torch_rmsprop_centered"} <= names
    assert len(names) > 40
    assert literals(with_a_literal) == [2.0]


@each("expression", EXPRESSIONS)
def test_kernels_have_room_for_an_expression(expression):
    names = list(inspect.signature(expression).parameters)
    if names[:2] == ["grad", "weight"]:
        assert len(names) - 2 <= STATES_MAX + NUMBERS_MAX


# Evaluation. A plan writes to the arrays of states, to outs and to the gradient as soon as they are free.


def exchanged(grad, weight, first, second, lr):
    return weight - grad * lr, second, first


def remembered(grad, weight, previous, lr):
    return weight - (grad + (weight - previous)) * lr, weight


def unchanged(grad, weight, first, second, lr):
    return weight - first * lr, first, second + grad


def twice(grad, weight, first, second, lr):
    moved = first * lr + grad
    return weight + moved, moved, moved


def used_late(grad, weight, first, second, lr):
    new = first * lr + grad
    return weight - new / sqrt(first * first + abs(second)), new, second * lr + first


def deep(grad, weight, first, second, lr):
    one, two, three = grad * first, grad * second, first * second
    return (one + two) * (two + three) - (one - three) * weight * grad, two * lr, one + two * three


def clipped(grad, weight, lr):
    return limited(weight - grad * lr, lr)


def gradient_itself(grad, weight, first, lr):
    return weight + grad, grad


def without_a_plan(grad, weight, lr):
    return np.where(weight > grad, weight, grad * lr)


CASES = {
    without_a_plan: 0, exchanged: 2, remembered: 1, unchanged: 2, twice: 2, used_late: 2, deep: 2, clipped: 0,
    gradient_itself: 1,
}  # fmt: skip


@each("expression", CASES)
@each("in_place", [True, False])
@each("size", [0, 1, 2, 1000, LONG, CHUNK_ELEMENTS + 5, 3 * CHUNK_ELEMENTS + 1])
@each("dtype", [np.float32, np.float64])
def test_an_expression_is_evaluated_as_if_it_read_everything_before_it_wrote(expression, in_place, size, dtype):
    rng = np.random.default_rng(size)
    grad, weight, *states = rng.standard_normal((2 + CASES[expression], size)).astype(dtype)
    lr = dtype(0.3)
    expected = expression(grad.copy(), weight.copy(), *[one.copy() for one in states], lr)
    expected = expected if isinstance(expected, tuple) else (expected,)
    before = weight.copy()
    out = weight if in_place else np.full(size, 7, dtype)
    scratch = np.full(size, np.nan, dtype)
    evaluate(expression, (grad, weight, *states), (0.3,), (out, *states), scratch)
    for actual, wanted in zip((out, *states), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)
    if not in_place:
        np.testing.assert_array_equal(weight, before)


def test_a_plan_is_made_for_numbers_with_their_signs():
    def times(grad, weight, lr):
        return grad * lr

    ones = np.ones(LONG, np.float32)
    for number in (0.0, -0.0, 0.0):
        out = np.empty_like(ones)
        evaluate(times, (ones.copy(), ones), (number,), (out,))
        assert np.signbit(out).all() == np.signbit(number)


def branches(grad, weight, lr, wd, other):
    step = decayed(grad, weight, wd) * lr
    if -other < other:
        step = step * other
    return weight - (step if lr >= other else -lr * step) - weight * (lr * wd)


def branches_with_constants(grad, weight, lr, wd, limit):
    return weight - limited(decayed(grad, weight, wd), limit) * (-lr if lr < 0 else lr)


@each("expression", [branches, branches_with_constants])
@each("size", [3, LONG])
def test_other_numbers_take_other_branches_and_other_values(expression, size):
    grad, weight = np.random.default_rng(size).standard_normal((2, size)).astype(np.float32)
    for numbers in ((0.5, 0.0, np.inf), (0.5, 0.25, 0.125), (0.25, 0.0, 0.5), (-0.5, 0.5, 0.25), (0.5, 0.0, np.inf)):
        out = np.empty_like(weight)
        evaluate(expression, (grad.copy(), weight), numbers, (out,))
        np.testing.assert_array_equal(out, expression(grad.copy(), weight, *numbers))


@each("size", [2, LONG])
def test_an_expression_cannot_branch_on_elements(size):
    def branching(grad, weight, lr):
        return weight if grad > weight else grad

    ones = np.ones(size, np.float32)
    with pytest.raises(ValueError, match="truth value"):
        evaluate(branching, (ones.copy(), ones), (0.1,), (ones,))


def test_a_result_too_many_or_too_few_is_an_error():
    arrays = [np.ones(LONG, np.float32) for _ in range(3)]
    for short in (5, LONG):
        cut = [one[:short] for one in arrays]
        with pytest.raises(ValueError, match=r"remembered returns \d results, not \d: it must return the new weight"):
            evaluate(remembered, cut, (0.1,), (*cut[1:], cut[0].copy()))


def product_decides(grad, weight, lr, wd, other):
    return weight - grad if lr * wd != 0 else weight + grad


def size_decides(grad, weight, lr, wd, other):
    return weight - grad if abs(wd) != 0 else weight + grad


def square_decides(grad, weight, lr, wd, other):
    return weight - grad if wd != lr * lr else weight + grad


def infinity_decides(grad, weight, lr, wd, other):
    return weight - grad if math.isinf(other) else weight + grad


def has_a_default(grad, weight, lr, wd=0.0, other=0.0):
    return weight - limited(grad, lr) * lr - decayed(grad, weight, wd)


@each("expression", [product_decides, size_decides, square_decides, infinity_decides, has_a_default])
def test_what_is_computed_from_numbers_is_in_no_plan(expression):
    grad, weight = np.random.default_rng(1).standard_normal((2, LONG)).astype(np.float32)
    for numbers in ((0.5, 0.5, 1.0), (0.5, 0.0, 1.0), (0.5, 0.25, np.inf), (0.25, 0.25, 1.0)):
        for count in (1, 3) if expression is has_a_default else (3,):
            out = np.empty_like(weight)
            evaluate(expression, (grad.copy(), weight), numbers[:count], (out,))
            np.testing.assert_array_equal(out, expression(grad.copy(), weight, *numbers[:count]))
