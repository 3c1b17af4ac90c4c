"""First values of rows: the same wherever and whenever a row is touched, spread as they say, and written as text."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer.initializer import Constant, Initializer, Normal, Uniform, Zeros, initializer_from
from tests.cases import each

F32, F64, F16, BF16 = DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16
RANDOM = [Normal(2.0, 5), Uniform(2.0, 5)]
NORMAL_OF_SEED_3 = [1.4800235, -0.16713794, 2.0070877, 0.59065616, -0.010422966, 1.225194]
UNIFORM_OF_SEED_3 = [-0.34035611, -0.78579485, -0.9080053, 0.67976773, -0.75561643, -0.0909077]


@each("initializer", RANDOM)
def test_a_row_does_not_depend_on_the_others_nor_on_their_order(initializer):
    ids = np.array([7, 0, 2**62, 123_456_789, 3])
    together = initializer.rows(ids, 5, F32).reshape(5, 5)
    for position, one in enumerate(ids):
        np.testing.assert_array_equal(initializer.rows(np.array([one]), 5, F32), together[position])
    np.testing.assert_array_equal(initializer.rows(ids[::-1], 5, F32).reshape(5, 5), together[::-1])


@each("initializer", RANDOM)
def test_a_column_does_not_depend_on_the_length_of_the_row(initializer):
    short, long = (initializer.rows(np.arange(4), length, F32).reshape(4, length) for length in (3, 8))
    np.testing.assert_array_equal(short, long[:, :3])


@each("initializer", RANDOM)
def test_chunks_do_not_show(initializer):
    whole = initializer.rows(np.arange(5000), 33, F32).reshape(5000, 33)
    np.testing.assert_array_equal(initializer.rows(np.arange(4000, 4100), 33, F32), whole[4000:4100].reshape(-1))


def test_these_numbers_never_change():
    """Tables in checkpoints do not hold rows that were never touched."""
    np.testing.assert_allclose(Normal(1.0, 3).rows(np.array([0, 10**12]), 3, F32), NORMAL_OF_SEED_3, rtol=1e-6)
    np.testing.assert_allclose(Uniform(1.0, 3).rows(np.array([0, 10**12]), 3, F32), UNIFORM_OF_SEED_3, rtol=1e-6)


def test_normal_numbers_have_the_moments_and_tails_of_a_normal_distribution():
    values = Normal(3.0, 1).rows(np.arange(200_000), 4, F32).astype(np.float64) / 3.0
    assert abs(values.mean()) < 0.006
    assert abs(values.std() - 1) < 0.006
    assert abs((values**3).mean()) < 0.02
    assert abs((values**4).mean() - 3) < 0.05
    assert abs((np.abs(values) > 2).mean() - 0.0455) < 0.002


def test_pairs_of_columns_point_in_all_directions_alike():
    pairs = Normal(1.0, 2).rows(np.arange(200_000), 2, F32).reshape(-1, 2)
    counts, _ = np.histogram(np.arctan2(pairs[:, 1], pairs[:, 0]), bins=16, range=(-math.pi, math.pi))
    assert np.abs(counts / len(pairs) - 1 / 16).max() < 0.002


def test_uniform_numbers_fill_their_range_evenly():
    values = Uniform(0.5, 1).rows(np.arange(200_000), 4, F32)
    counts, _ = np.histogram(values, bins=20, range=(-0.5, 0.5))
    assert counts.sum() == values.size
    assert np.abs(counts / values.size - 0.05).max() < 0.002


@each("initializer", RANDOM)
def test_columns_rows_and_seeds_are_independent(initializer):
    rows = initializer.rows(np.arange(50_000), 4, F64).reshape(-1, 4)
    other = type(initializer)(initializer.scale, initializer.seed + 1).rows(np.arange(50_000), 4, F64).reshape(-1, 4)
    correlated = np.corrcoef(np.hstack([rows[:-1], rows[1:], other[:-1]]), rowvar=False)
    np.fill_diagonal(correlated, 0)
    assert np.abs(correlated).max() < 0.02


@each("initializer", [*RANDOM, Constant(0.1), Zeros()])
@each("dtype", [F16, BF16, F64])
def test_other_types_hold_the_float32_values_rounded(initializer, dtype):
    ids = np.arange(100)
    wide, other = initializer.rows(ids, 7, F32), initializer.rows(ids, 7, dtype)
    if dtype is F64:
        np.testing.assert_allclose(other, wide, rtol=1e-7)
    else:
        np.testing.assert_array_equal(other, REFERENCE.from_float32(wide, dtype))


@each("length", [0, 1])
def test_no_rows_and_rows_without_elements(length):
    for initializer in (*RANDOM, Zeros(), Constant(1)):
        assert initializer.rows(np.zeros(0, np.int64), length, F32).size == 0
        assert initializer.rows(np.arange(3), length, F32).size == 3 * length


@each(
    "initializer",
    [Zeros(), Constant(-1.5e-8), Constant(3), Uniform(0.07, 3), Normal(1e-300), Normal(123.25, 2**53 - 1)],
)
def test_the_text_means_the_same_again(initializer):
    assert initializer_from(initializer.describe()) == initializer
    assert initializer_from(initializer) is initializer


@each(
    "text, meant",
    [
        ("normal(0.01)", Normal(0.01, 0)),
        ("normal( 1 , seed = 4 )", Normal(1.0, 4)),
        ("uniform(1e-2,seed=3)", Uniform(0.01, 3)),
        ("constant(-2.)", Constant(-2.0)),
    ],
)
def test_people_may_write_it_shorter(text, meant):
    assert initializer_from(text) == meant


@each("text", [
        "", "ones", "Zeros", "zeros()", "constant()", "constant(nan)", "constant(inf)", "constant(1e999)",
        "normal(-1)", "normal(1e39)", "normal(1,seed=-1)", "normal(1,seed=1.5)", "normal(1,3)",
        "normal(1,seed=9999999999999999)",
        "uniform(1);import os", "normal(1)\n", "constant(١)", "constant(" + "1" * 200 + ")", None, 3, b"zeros",
    ])  # fmt: skip
def test_any_other_text_is_refused(text):
    with pytest.raises(ValueError, match=r"an initialiser is written|must be"):
        initializer_from(text)


@each(
    "make, error, said",
    [
        (lambda: Constant(math.nan), ValueError, "must be finite"),
        (lambda: Constant("1"), TypeError, "must be a number"),
        (lambda: Normal(-1.0), ValueError, "at least 0"),
        (lambda: Uniform(1.0, -1), ValueError, "seed of uniform must be from 0"),
        (lambda: Normal(1.0, 1.5), TypeError, "seed of normal must be a whole number"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(make, error, said):
    with pytest.raises(error, match=said):
        make()


@each("initializer, fits", [(Zeros(), True), (Constant(3), True), (Constant(0.5), False), (Constant(300), False)])
def test_integers_start_as_whole_numbers_in_range(initializer, fits):
    if fits:
        initializer.check(DType.INT8)
        assert initializer.rows(np.arange(2), 2, DType.INT8).dtype == np.int8
    else:
        with pytest.raises(ValueError, match="rows of int8 cannot start as"):
            initializer.check(DType.INT8)


@each("initializer", RANDOM)
def test_integers_are_not_random(initializer):
    with pytest.raises(ValueError, match="rows of int32 cannot start as"):
        initializer.check(DType.INT32)
    assert isinstance(initializer, Initializer)
