"""The NumPy kernels against arithmetic in float64 or Python integers, and against torch's casts."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS
from kvdist.kernels.reference import REFERENCE
from tests.cases import each

torch = pytest.importorskip("torch")

SIZES = [0, 1, 7, 1000, CHUNK_ELEMENTS - 1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, 2 * CHUNK_ELEMENTS + 3]
HALVES = [DType.FLOAT16, DType.BFLOAT16]
TORCH = {DType.FLOAT16: torch.float16, DType.BFLOAT16: torch.bfloat16}


def widen(bits, dtype):
    """float64 values of halves by torch, so that the code under test is not its own oracle."""
    return torch.from_numpy(bits.view(np.int16).copy()).view(TORCH[dtype]).double().numpy()


def narrow(values, dtype):
    return torch.from_numpy(np.ascontiguousarray(values)).to(TORCH[dtype]).view(torch.int16).numpy().view(dtype.storage)


def contribution(dtype, size, seed):
    rng = np.random.default_rng(seed)
    if not dtype.is_floating:
        low = 0 if dtype is DType.UINT8 else -100
        return rng.integers(low, 100, size).astype(dtype.storage)
    values = rng.standard_normal(size).astype(np.float32)
    return narrow(values, dtype) if dtype in HALVES else values.astype(dtype.storage)


def expected_sum(contributions, scales, dtype):
    total = np.zeros(contributions[0].size, np.float64 if dtype.is_floating else np.int64)
    for values, scale in zip(contributions, scales, strict=True):
        if dtype in HALVES:
            total += widen(values, dtype) * scale
        elif dtype.is_floating:
            total += values.astype(np.float64) * scale
        else:
            total += values
    return total


@each("dtype", list(DType))
@each("count", [1, 2, 3, 4, 5])
def test_a_sum_in_the_accumulating_type_equals_the_sum_in_float64(dtype, count):
    scale_sets = [[1.0] * count]
    if dtype.is_floating:
        scale_sets += [[0.3] * count, [1.0, 0.25, -3.0, 1.0, 0.1][:count], [0.7, 1.0, 2.0, 0.1, 1.0][:count]]
    for size in SIZES:
        contributions = [contribution(dtype, size, seed) for seed in range(count)]
        for scales in scale_sets:
            out = np.full(size, 99, dtype.accumulate)
            REFERENCE.weighted_sum(contributions, scales, dtype, out)
            expected = expected_sum(contributions, scales, dtype)
            if dtype.is_floating:
                tolerance = 1e-14 if dtype is DType.FLOAT64 else 3e-6
                np.testing.assert_allclose(out, expected, rtol=0, atol=tolerance * 10)
            else:
                np.testing.assert_array_equal(out, expected.astype(dtype.storage))


@each("dtype", HALVES)
@each("scales", [[1.0], [0.3], [1.0, 1.0, 1.0], [0.5, 2.0, 1.0]])
def test_a_sum_of_halves_is_rounded_once_from_float32(dtype, scales):
    for size in SIZES:
        contributions = [contribution(dtype, size, seed) for seed in range(len(scales))]
        wide, out = np.empty(size, np.float32), np.empty(size, dtype.storage)
        REFERENCE.weighted_sum(contributions, scales, dtype, wide)
        REFERENCE.weighted_sum(contributions, scales, dtype, out)
        np.testing.assert_array_equal(out, narrow(wide, dtype))


def test_halves_are_not_rounded_between_additions():
    # 2048 + 1 is 2048 in float16, so adding 1 twice must happen in a wider type to be seen.
    contributions = [np.array([value], np.float16) for value in (2048, 1, 1)]
    out = np.empty(1, np.float16)
    REFERENCE.weighted_sum(contributions, [1.0] * 3, DType.FLOAT16, out)
    assert out[0] == 2050


def test_float32_is_summed_in_float32_in_the_order_given():
    contributions = [np.array([value], np.float32) for value in (1.0, 2.0**-24, 2.0**-24)]
    out = np.empty(1, np.float32)
    REFERENCE.weighted_sum(contributions, [1.0] * 3, DType.FLOAT32, out)
    assert out[0] == 1.0
    REFERENCE.weighted_sum(contributions[::-1], [1.0] * 3, DType.FLOAT32, out)
    assert out[0] == np.float32(1 + 2.0**-23)


@each("dtype", list(DType))
def test_contributions_may_be_read_only_and_unaligned(dtype):
    aligned = [contribution(dtype, 1001, seed) for seed in range(3)]
    odd = [np.frombuffer(b"x" + values.tobytes(), dtype.storage, offset=1) for values in aligned]
    assert not odd[0].flags.writeable
    assert dtype.itemsize == 1 or not odd[0].flags.aligned
    out, expected = np.empty(1001, dtype.storage), np.empty(1001, dtype.storage)
    REFERENCE.weighted_sum(odd, [1.0] * 3, dtype, out)
    REFERENCE.weighted_sum(aligned, [1.0] * 3, dtype, expected)
    np.testing.assert_array_equal(out, expected)


@each("dtype", list(DType))
def test_no_contributions_sum_to_zero(dtype):
    out = np.ones(5, dtype.storage)
    REFERENCE.weighted_sum([], [], dtype, out)
    assert not out.any()


def test_integers_wrap_and_overflow_to_infinity_is_silent():
    out = np.empty(1, np.int8)
    REFERENCE.weighted_sum([np.array([127], np.int8), np.array([1], np.int8)], [1.0, 1.0], DType.INT8, out)
    assert out[0] == -128
    large = np.array([3e38], np.float32)
    total = np.empty(1, np.float32)
    REFERENCE.weighted_sum([large, large], [1.0, 1.0], DType.FLOAT32, total)
    assert total[0] == np.inf
    half = np.array([60000], np.float16)
    REFERENCE.weighted_sum([half, half], [1.0, 1.0], DType.FLOAT16, rounded := np.empty(1, np.float16))
    assert rounded[0] == np.inf


def test_integers_take_no_scale():
    with pytest.raises(ValueError, match="int32 cannot be scaled"):
        REFERENCE.weighted_sum([np.ones(2, np.int32)], [0.5], DType.INT32, np.empty(2, np.int32))


@each(
    "contributions, scales, out, error, words",
    [
        ([np.ones(2, np.float32)], [], np.empty(2, np.float32), ValueError, "as many scales"),
        ([np.ones(3, np.float32)], [1.0], np.empty(2, np.float32), ValueError, "3 elements where the sum has 2"),
        ([np.ones(2, np.float64)], [1.0], np.empty(2, np.float32), TypeError, "not float64"),
        ([np.ones(2, np.float32)], [1.0], np.empty(2, np.float64), TypeError, "not float64"),
    ],
)
def test_a_wrong_argument_is_named_before_anything_is_written(contributions, scales, out, error, words):
    out.fill(5)
    with pytest.raises(error, match=words):
        REFERENCE.weighted_sum(contributions, scales, DType.FLOAT32, out)
    assert (out == 5).all()


@each("dtype", HALVES)
def test_every_half_widens_to_the_value_torch_gives_it(dtype):
    bits = np.arange(65536, dtype=np.uint16).view(dtype.storage)
    values = REFERENCE.to_float32(bits, dtype)
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, widen(bits, dtype))


@each("dtype", HALVES)
def test_every_half_survives_the_way_there_and_back(dtype):
    bits = np.arange(65536, dtype=np.uint16).view(dtype.storage)
    values = REFERENCE.to_float32(bits, dtype)
    back = REFERENCE.from_float32(values, dtype)
    number = ~np.isnan(values)
    np.testing.assert_array_equal(back.view(np.uint16)[number], bits.view(np.uint16)[number])
    assert np.isnan(widen(back, dtype)[~number]).all()


@each("dtype", HALVES)
def test_rounding_to_halves_agrees_with_torch(dtype):
    rng = np.random.default_rng(3)
    upper = np.arange(65536, dtype=np.uint32) << 16
    edges = np.concatenate([upper | low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF)])
    anything = rng.integers(0, 2**32, 3 * CHUNK_ELEMENTS + 1, dtype=np.uint64).astype(np.uint32)
    values = np.concatenate([edges, anything]).view(np.float32)
    bits = REFERENCE.from_float32(values, dtype)
    expected = narrow(values, dtype)
    number = ~np.isnan(values)
    assert (~number).sum() > 1000
    np.testing.assert_array_equal(bits.view(np.uint16)[number], expected.view(np.uint16)[number])
    assert np.isnan(widen(bits, dtype)[~number]).all()


def test_casts_refuse_what_is_no_half():
    with pytest.raises(TypeError, match="float64 is not a half"):
        REFERENCE.to_float32(np.ones(1), DType.FLOAT64)
    with pytest.raises(TypeError, match="int8 is not a half"):
        REFERENCE.from_float32(np.ones(1, np.float32), DType.INT8)
