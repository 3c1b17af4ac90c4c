"""Compiled kernels against the reference, bit by bit: through the functions that stores call."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import CHUNK_ELEMENTS, Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Step, Updater, create, registry
from kvdist.optimizer.base import formula_of
from tests.cases import each, pairs

pytest.importorskip("numba")

SIZES = [0, 1, 3, 17, 1001, CHUNK_ELEMENTS + 5]
COUNTS = [0, 1, 2, 3, 4, 5, 9]
FLOATS = {DType.FLOAT32: np.uint32, DType.FLOAT64: np.uint64}
HALVES = [DType.FLOAT16, DType.BFLOAT16]
RULES = {
    "sgd": ("sgd", {}),
    "momentum": ("sgd", {"momentum": 0.9}),
    "nag": ("nag", {"momentum": 0.7}),
    "adam": ("adam", {}),
    "adamw": ("adamw", {}),
    "adamw without correction": ("adamw", {"correct_bias": False}),
    "adabelief": ("adabelief", {}),
    "adamax": ("adamax", {}),
    "nadam": ("nadam", {}),
    "adagrad": ("adagrad", {}),
    "adadelta": ("adadelta", {}),
    "rmsprop": ("rmsprop", {"clip_weights": 0.7}),
    "rmsprop centered": ("rmsprop", {"centered": True}),
    "ftrl": ("ftrl", {}),
    "ftml": ("ftml", {}),
    "signum": ("signum", {"wd_lh": 0.1}),
    "signum without momentum": ("signum", {"momentum": 0.0}),
    "dcasgd": ("dcasgd", {}),
    "dcasgd with momentum": ("dcasgd", {"momentum": 0.9}),
    "test": ("test", {}),
    "lars": ("lars", {}),
    "lars with momentum": ("lars", {"momentum": 0.9}),
    "lamb": ("lamb", {}),
    "lans": ("lans", {}),
    "torch.sgd": ("torch.sgd", {"momentum": 0.9, "dampening": 0.3}),
    "torch.sgd with nesterov": ("torch.sgd", {"momentum": 0.9, "nesterov": True}),
    "torch.adam": ("torch.adam", {}),
    "torch.adam with amsgrad": ("torch.adam", {"amsgrad": True}),
    "torch.adam, maximised": ("torch.adam", {"maximize": True}),
    "torch.adamw": ("torch.adamw", {}),
    "torch.nadam": ("torch.nadam", {}),
    "torch.adamax": ("torch.adamax", {}),
    "torch.adamax with small betas": ("torch.adamax", {"betas": (0.4, 0.5)}),
    "torch.radam": ("torch.radam", {"betas": (0.3, 0.99)}),
    "torch.rmsprop": ("torch.rmsprop", {}),
    "torch.rmsprop with momentum": ("torch.rmsprop", {"momentum": 0.9}),
    "torch.rmsprop centered": ("torch.rmsprop", {"centered": True}),
    "torch.rmsprop centered with momentum": ("torch.rmsprop", {"centered": True, "momentum": 0.9}),
    "torch.adagrad": ("torch.adagrad", {"lr_decay": 0.1}),
    "torch.adagrad from an initial value": ("torch.adagrad", {"initial_accumulator_value": 0.5}),
    "torch.adadelta": ("torch.adadelta", {}),
}


@pytest.fixture(scope="module")
def numba() -> Kernels:
    return choose("numba")


@functools.lru_cache(maxsize=256)
def values(size, seed, dtype=DType.FLOAT32):
    """Normal numbers of many magnitudes, and among them zeros of both signs, subnormals, infinities and NaN."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)).astype(dtype.storage)
    special = np.array([0.0, -0.0, 1e-41, np.inf, -np.inf, np.nan, 3e38, -3e38], dtype.storage)
    places = rng.integers(0, size, size // 20) if size else np.zeros(0, np.int64)
    numbers[places] = rng.choice(special, places.size)
    return numbers


def assert_same_bits(actual, expected, dtype=DType.FLOAT32):
    """Equal in every bit; NaN equals NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    bits = FLOATS[dtype]
    np.testing.assert_array_equal(actual.view(bits)[~both_nan], expected.view(bits)[~both_nan])


def scales_of(kind, count):
    return {
        "ones": [1.0] * count,
        "equal": [0.3] * count,
        "unequal": [0.7, 1.0, -2.5, 1e-3, 1.0, 0.1, 3.0, 1.0, 0.5][:count],
    }[kind]


@each("dtype", FLOATS)
@each("kind", ["ones", "equal", "unequal"])
@each("count", COUNTS)
def test_a_sum_has_the_bits_of_the_reference(numba, count, kind, dtype):
    for size in SIZES:
        contributions = [values(size, seed, dtype) for seed in range(count)]
        out, expected = np.full(size, 7, dtype.storage), np.full(size, 8, dtype.storage)
        numba.weighted_sum(contributions, scales_of(kind, count), dtype, out)
        REFERENCE.weighted_sum(contributions, scales_of(kind, count), dtype, expected)
        assert_same_bits(out, expected, dtype)


def run(
    kernels, rule, size, count, *, kind="equal", dtype=DType.FLOAT32, in_place=False, prepare=lambda a: a, **changes
):
    """Six updates, as `torch.radam` has another equation from the sixth on; the weight and all states."""
    name, numbers = RULES[rule]
    updater = Updater(create(name, **{**numbers, **changes}), kernels)
    weight = values(size, 99, dtype).copy()
    for step in range(6):
        out = weight if in_place else np.full(size, 5, dtype.storage)
        contributions = [prepare(values(size, 10 * step + i, dtype)) for i in range(count)]
        updater.update("w", weight if in_place else prepare(weight), contributions, scales_of(kind, count), dtype, out)
        weight = out
    return weight, *updater.states["w"].arrays


def assert_equal_runs(numba, *arguments, **settings):
    actual = run(numba, *arguments, **settings)
    expected = run(REFERENCE, *arguments, **settings)
    assert len(actual) == len(expected)
    for ours, theirs in zip(actual, expected, strict=True):
        assert_same_bits(ours, theirs, settings.get("dtype", DType.FLOAT32))


@each("rule, count, size", pairs(RULES, COUNTS, SIZES))
def test_an_update_has_the_bits_of_the_reference_at_every_size(numba, rule, count, size):
    assert_equal_runs(numba, rule, size, count)


@each(
    "rule, count, kind, wd, clip, dtype, in_place",
    pairs(RULES, [1, 2, 5, 9], ["ones", "equal", "unequal"], [0.0, 0.01], [None, 0.5], FLOATS, [False, True]),
)
def test_an_update_has_the_bits_of_the_reference_with_every_setting(
    numba, rule, count, kind, wd, clip, dtype, in_place
):
    settings = {"kind": kind, "wd": wd, "clip_gradient": clip, "dtype": dtype, "in_place": in_place}
    assert_equal_runs(numba, rule, 1001, count, **settings)


@each("rule", RULES)
def test_a_long_weight_may_be_updated_in_place(numba, rule):
    assert_equal_runs(numba, rule, CHUNK_ELEMENTS + 5, 2, wd=0.01, in_place=True)


def read_only(array):
    return np.frombuffer(array.tobytes(), array.dtype) if array.size else array


def inside_a_larger_array(array):
    return np.concatenate([np.zeros(3, array.dtype), array, np.zeros(3, array.dtype)])[3:-3]


def off_by_a_byte(array):
    return np.frombuffer(b"x" + array.tobytes(), array.dtype, offset=1) if array.size else array


@each("prepare", [read_only, inside_a_larger_array, off_by_a_byte])
def test_inputs_may_lie_anywhere_and_be_read_only(numba, prepare):
    for rule in RULES:
        assert_equal_runs(numba, rule, 1001, 2, prepare=prepare)
    assert_equal_runs(numba, "momentum", CHUNK_ELEMENTS + 5, 5, prepare=prepare)
    contributions = [prepare(values(1001, seed)) for seed in range(3)]
    out, expected = np.empty(1001, np.float32), np.empty(1001, np.float32)
    numba.weighted_sum(contributions, [1.0] * 3, DType.FLOAT32, out)
    REFERENCE.weighted_sum(contributions, [1.0] * 3, DType.FLOAT32, expected)
    assert_same_bits(out, expected)


@each("dtype", [DType.FLOAT16, DType.BFLOAT16, DType.INT32])
def test_what_is_not_compiled_goes_the_way_of_the_reference(numba, dtype):
    contributions = [np.arange(1001).astype(dtype.storage)] * 3
    out, expected = np.empty(1001, dtype.storage), np.empty(1001, dtype.storage)
    numba.weighted_sum(contributions, [1.0] * 3, dtype, out)
    REFERENCE.weighted_sum(contributions, [1.0] * 3, dtype, expected)
    np.testing.assert_array_equal(out.view(np.uint8), expected.view(np.uint8))
    if dtype.is_floating:
        weights = []
        for kernels in (numba, REFERENCE):
            weight = np.ones(1001, dtype.storage)
            Updater(create("adam"), kernels).update(0, weight, contributions, [1.0] * 3, dtype, weight)
            weights.append(weight.view(np.uint16))
        np.testing.assert_array_equal(*weights)


def test_a_wrong_argument_is_refused_before_anything_is_written(numba):
    out = np.full(2, 5, np.float32)
    with pytest.raises(ValueError, match="3 elements where the sum has 2"):
        numba.weighted_sum([np.ones(3, np.float32)] * 3, [1.0] * 3, DType.FLOAT32, out)
    with pytest.raises(TypeError, match="not float64"):
        numba.weighted_sum([np.ones(2)] * 3, [1.0] * 3, DType.FLOAT32, out)
    assert (out == 5).all()


WITHOUT_A_KERNEL = {"groupadagrad", "sgld"}
"""Their histories of rows, and their noise, are arrays that NumPy computes for each chunk."""


def equation_of(optimizer, wd, count):
    """The equation of an update, with norms and scalars for the rules that need them."""
    scalars = optimizer.advance(tuple(optimizer.initial_scalars.values()), count)
    step = Step(0.1, wd, count, Extent("w", (1, 5)), 0, scalars, (2.0, 3.0, 0.5, 4.0)[: 2 * optimizer.norm_count])
    return formula_of(optimizer, step)


@each("rule", RULES)
def test_a_rule_of_this_package_is_taken_up_by_the_compiled_kernels(numba, rule):
    name, numbers = RULES[rule]
    optimizer = create(name, **numbers)
    weight, states = np.ones(5, np.float32), [np.full(5, 0.5, np.float32) for _ in optimizer.state_names]
    equation = equation_of(optimizer, 0.0, 1)
    assert numba.fused_update(equation, weight, [np.ones(5, np.float32)], [1.0], None, weight, states, DType.FLOAT32)
    assert (weight != 1).all()


def test_every_rule_is_compiled_but_for_those_that_are_known_not_to_be():
    ours = {name for name, cls in registry._BY_NAME.items() if cls.__module__.startswith("kvdist.optimizer.")}
    assert {name for name, _ in RULES.values()} | WITHOUT_A_KERNEL == ours


GROUPS = '[["1",{"amsgrad":true}],["2",{"maximize":true,"beta1":0.4}]]'


@each("key, count, dtype", pairs([0, 1, 2], [1, 3, 6], [*FLOATS, *HALVES]))
def test_groups_of_keys_have_the_bits_of_the_reference(numba, key, count, dtype):
    updaters = [Updater(create("torch.adam", groups=GROUPS, clip_gradient=0.5), one) for one in (numba, REFERENCE)]
    weights = [stored(1001, 99, dtype) for _ in updaters]
    for step in range(3):
        grads = [stored(1001, 10 * step + i, dtype) for i in range(count)]
        for updater, weight in zip(updaters, weights, strict=True):
            updater.update(key, weight, grads, scales_of("unequal", count), dtype, weight)
    for ours, theirs in zip(*([w, *u.states[key].arrays] for u, w in zip(updaters, weights, strict=True)), strict=True):
        assert_same_values(ours, theirs, dtype)


def stored(size, seed, dtype):
    """`values` of any floating type."""
    if dtype in FLOATS:
        return values(size, seed, dtype).copy()
    return REFERENCE.from_float32(values(size, seed), dtype)


def assert_same_values(actual, expected, dtype):
    """Equal in every bit, of halves too; NaN equals NaN."""
    if actual.dtype == np.uint16:
        actual, expected = (REFERENCE.to_float32(one, dtype) for one in (actual, expected))
    both_nan = np.isnan(actual) & np.isnan(expected)
    actual, expected = np.where(both_nan, 0, actual), np.where(both_nan, 0, expected)
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@each("rule, dtype, master", pairs(RULES, HALVES, [False, True]))
def test_halves_have_the_bits_of_the_reference(numba, rule, dtype, master):
    name, numbers = RULES[rule]
    finals = []
    for kernels in (numba, REFERENCE):
        updater = Updater(create(name, multi_precision=master, clip_gradient=0.5, **numbers), kernels)
        weight = stored(1001, 99, dtype)
        for step in range(3):
            grads = [stored(1001, 10 * step + i, dtype) for i in range(2)]
            updater.update("w", weight, grads, [0.5, 1.0], dtype, weight, 0.1, 0.01)
        state = updater.states["w"]
        finals.append([weight, *state.arrays, *([state.master] if master else [])])
    for ours, theirs in zip(*finals, strict=True):
        assert_same_values(ours, theirs, dtype)


def states_of(rule):
    name, numbers = RULES[rule]
    return len(create(name, **numbers).state_names)


TYPE_OF_ROWS = dict(zip(sorted(RULES, key=states_of), itertools.cycle(FLOATS), strict=False))
"""Rule → one of the types: a kernel takes a second to compile, and the loop over rows differs by the number of states
alone, each of which has both types. The tests above have the rules' equations in both."""


@each("rule, count, kind, clip", pairs(RULES, [1, 2, 6], ["ones", "equal", "unequal"], [None, 0.5]))
def test_rows_that_lie_anywhere_are_updated_as_if_they_were_an_array(numba, rule, count, kind, clip):
    (name, numbers), dtype = RULES[rule], TYPE_OF_ROWS[rule]
    optimizer, rng, width = create(name, **numbers), np.random.default_rng(5), 17
    slots, ids = rng.permutation(90)[:40], np.sort(rng.choice(1000, 40, replace=False))
    # The last one has every row, some have none.
    places = [np.flatnonzero(rng.random(40) < i / max(1, count - 1)) for i in range(count - 1)] + [np.arange(40)]
    rows = [values(len(each) * width, i, dtype).reshape(-1, width) for i, each in enumerate(places)]
    arrays = [
        np.abs(values(90 * width, 70 + i, dtype)).reshape(90, width) for i in range(1 + len(optimizer.state_names))
    ]
    equation = equation_of(optimizer, 0.01, 6)
    expected = [array.copy() for array in arrays]
    weight, *states = [array[slots].reshape(-1) for array in expected]
    spread = np.zeros((count, 40, width), dtype.storage)
    for whole, each_places, each_rows in zip(spread, places, rows, strict=True):
        whole[each_places] = each_rows
    flat, scales = [whole.reshape(-1) for whole in spread], scales_of(kind, count)
    assert numba.fused_update(equation, weight, flat, scales, clip, weight, states, dtype)
    for array, changed in zip(expected, [weight, *states], strict=True):
        array[slots] = changed.reshape(40, width)
    contributions = [(ids[each_places], each_rows) for each_places, each_rows in zip(places, rows, strict=True)]
    assert numba.update_rows(equation, arrays[0], slots, ids, contributions, scales, clip, arrays[1:], dtype)
    for array, wanted in zip(arrays, expected, strict=True):
        assert_same_bits(array.reshape(-1), wanted.reshape(-1), dtype)
