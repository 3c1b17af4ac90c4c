"""The compiled kernels of encoded contributions against the reference, bit by bit; and what both refuse."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import CHUNK_ELEMENTS, Kernels
from kvdist.kernels.reference import REFERENCE
from tests.cases import each

SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 31, 32, 33, 1001, 4095, 4096, 4097, CHUNK_ELEMENTS + 5]
HALVES = [DType.FLOAT16, DType.BFLOAT16]
CODERS = [("quantise_2bit", "dequantise_2bit", 16), ("quantise_1bit", "dequantise_1bit", 32)]
SPECIAL = [0.0, -0.0, 1e-41, np.inf, -np.inf, np.nan, 3e38, -3e38, 0.5, -0.5, 65504, 65519.99, 65520, 6e-8, 2.98e-8]


@pytest.fixture(scope="module")
def numba() -> Kernels:
    pytest.importorskip("numba")
    return choose("numba")


def values(size, seed):
    """Numbers of many magnitudes, and among them those that are special to somebody."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal(size) * 10.0 ** rng.integers(-8, 6, size)).astype(np.float32)
    places = rng.integers(0, size, size // 10 + 1) if size else np.zeros(0, np.int64)
    numbers[places] = rng.choice(np.array(SPECIAL, np.float32), places.size)
    return numbers


def assert_same_bits(actual, expected):
    """Equal in every bit; NaN equals NaN."""
    both_nan = np.isnan(actual) & np.isnan(expected)
    np.testing.assert_array_equal(actual.view(np.uint32)[~both_nan], expected.view(np.uint32)[~both_nan])


@each("size", SIZES)
@each("quantise, dequantise, word", CODERS)
def test_codes_residuals_and_what_they_are_worth_have_the_bits_of_the_reference(
    numba, quantise, dequantise, word, size
):
    for threshold in (0.5, 1e-7):
        gradient, ours, theirs = values(size, size), values(size, size + 1), values(size, size + 1)
        codes, expected = (np.full(-(-size // word) * 4, fill, np.uint8) for fill in (0xAA, 0x55))
        gradient.flags.writeable = False
        getattr(numba, quantise)(gradient, ours, threshold, codes)
        getattr(REFERENCE, quantise)(gradient, theirs, threshold, expected)
        np.testing.assert_array_equal(codes, expected)
        assert_same_bits(ours, theirs)
        worth, should = np.full(size, 7, np.float32), np.full(size, 8, np.float32)
        getattr(numba, dequantise)(codes, threshold, worth)
        getattr(REFERENCE, dequantise)(codes, threshold, should)
        assert_same_bits(worth, should)


@each("size", SIZES)
@each("dtype", HALVES)
def test_rounding_with_a_residual_has_the_bits_of_the_reference(numba, dtype, size):
    gradient, ours, theirs = values(size, size), values(size, size + 1), values(size, size + 1)
    halves, expected = np.empty(size, dtype.storage), np.empty(size, dtype.storage)
    numba.round_to_half(gradient, ours, dtype, halves)
    REFERENCE.round_to_half(gradient, theirs, dtype, expected)
    assert_same_bits(REFERENCE.to_float32(halves, dtype), REFERENCE.to_float32(expected, dtype))
    assert_same_bits(ours, theirs)


@each("dtype", HALVES)
def test_every_half_is_widened_as_by_the_reference(numba, dtype):
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype.storage)
    assert_same_bits(numba.to_float32(halves, dtype), REFERENCE.to_float32(halves, dtype))


@each("dtype", HALVES)
def test_any_float32_is_narrowed_as_by_the_reference(numba, dtype):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_003, dtype=np.uint32)
    edges = np.arange(1 << 16, dtype=np.uint32) << 16
    numbers = np.concatenate([bits, edges, edges + 0x8000, edges + 0x7FFF, edges + 0x1000, edges + 0xFFF]).view(
        np.float32
    )
    ours, theirs = numba.from_float32(numbers, dtype), REFERENCE.from_float32(numbers, dtype)
    assert_same_bits(REFERENCE.to_float32(ours, dtype), REFERENCE.to_float32(theirs, dtype))
    out = np.empty(numbers.size, dtype.storage)
    assert numba.from_float32(numbers, dtype, out) is out
    np.testing.assert_array_equal(out.view(np.uint16), ours.view(np.uint16))


@each("backend", ["numpy", "numba"])
@each("quantise, dequantise, word", CODERS)
def test_wrong_types_and_lengths_are_refused_and_nothing_is_written(quantise, dequantise, word, backend):
    if backend == "numba":
        pytest.importorskip("numba")
    kernels = choose(backend)
    gradient, residual, codes = np.ones(17, np.float32), np.ones(17, np.float32), np.zeros(-(-17 // word) * 4, np.uint8)
    for wrong in (
        (gradient[:16], residual, codes), (gradient, residual[:16], codes), (gradient, residual, codes[:-1]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="elements need"):
            getattr(kernels, quantise)(wrong[0], wrong[1], 0.5, wrong[2])
    with pytest.raises(TypeError, match="float32 is quantised"):
        getattr(kernels, quantise)(gradient.astype(np.float64), residual, 0.5, codes)
    with pytest.raises(ValueError, match="come from"):
        getattr(kernels, dequantise)(codes[:-1], 0.5, residual)
    with pytest.raises(TypeError, match="dequantised into float32"):
        getattr(kernels, dequantise)(codes, 0.5, residual.astype(np.float64))
    with pytest.raises(ValueError, match="lengths differ"):
        kernels.round_to_half(gradient, residual[:3], DType.FLOAT16, np.zeros(17, np.float16))
    with pytest.raises(TypeError, match="float32 is rounded"):
        kernels.round_to_half(gradient, residual, DType.FLOAT16, np.zeros(17, np.uint16))
    assert (residual == 1).all() and not codes.any()


def test_arrays_that_lie_crookedly_are_left_to_the_reference(numba):
    memory = np.zeros(4 * 40 + 1, np.uint8)
    crooked = memory[1:].view(np.float32)
    crooked[:] = 0.75
    residual, codes = np.zeros(40, np.float32), np.zeros(12, np.uint8)
    numba.quantise_2bit(crooked, residual, 0.5, codes)
    assert (residual == 0.25).all() and (codes[:10] == 0xFF).all()
    strided = np.ones(80, np.float32)[::2]
    numba.quantise_1bit(strided, residual, 0.5, np.zeros(8, np.uint8))
    assert (residual == 0.25).all()
