"""Gradient compression: what may be asked for, and what the bytes and the residuals are."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer.compression import (
    GradientCompression,
    Half,
    OneBit,
    Scaled,
    TopK,
    TwoBit,
    decode,
    encode,
    from_params,
)
from kvdist.protocol.arrays import Encoding, coded_size
from tests.cases import each

KNOWN = "'2bit', '1bit', 'fp16', 'bf16', 'int8', 'int4', 'topk'"
SIZES = [0, 1, 3, 15, 16, 17, 31, 32, 33, 1001]


def sent(codec, gradient, residual):
    """The bytes of one push, without padding, and what the server makes of them."""
    padded, entries = encode(codec, gradient, residual, REFERENCE)
    data = padded[: coded_size(codec.encoding, entries)]
    assert len(padded) % 8 == 0 and not padded[len(data) :].any()
    out = np.full(gradient.size, 77, np.float32)
    decode(codec.encoding, codec.parameter, data, entries, out, REFERENCE)
    return data, out


def f32(*numbers):
    return np.array(numbers, np.float32)


def noise(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def simulated(gradient, residual, bits, threshold):
    """The specification, element by element, with the packing of words written out as text."""
    limit, text, out = np.float32(threshold), "", []
    for i, g in enumerate(gradient):
        r = np.float32(residual[i] + g)
        if bits == 2:
            code, worth = ("11", limit) if r >= limit else ("10", -limit) if r <= -limit else ("00", np.float32(0))
        else:
            code, worth = ("1", np.float32(1)) if r > limit else ("0", np.float32(-1))
        residual[i] = r - worth
        text += code
        out.append(worth)
    text = text.ljust(-(-len(text) // 32) * 32, "0")
    return bytes(int(text[i : i + 8], 2) for i in range(0, len(text), 8)), np.array(out, np.float32)


@each("size", SIZES)
@each("codec, bits", [(TwoBit(0.5), 2), (TwoBit(0.1), 2), (OneBit(0.0), 1), (OneBit(-0.3), 1)])
def test_bytes_residuals_and_what_arrives_are_those_of_the_specification(codec, bits, size):
    ours, theirs = np.zeros(size, np.float32), np.zeros(size, np.float32)
    for step in range(5):
        data, out = sent(codec, noise(size, step), ours)
        expected, worth = simulated(noise(size, step), theirs, bits, codec.threshold)
        assert data.tobytes() == expected
        assert out.tolist() == worth.tolist()
        assert ours.tolist() == theirs.tolist()


def test_the_bytes_of_two_bits_are_in_the_order_of_the_elements_with_the_first_one_highest():
    data, _ = sent(TwoBit(0.5), f32(0.5, -0.5, 0.2, 1, 0, -9), np.zeros(6, np.float32))
    assert data.tobytes() == bytes([0b11_10_00_11, 0b00_10_00_00, 0, 0])


def test_the_bytes_of_one_bit_are_in_the_order_of_the_elements_with_the_first_one_highest():
    gradient = np.array([1, -1, 1, 1, -1, -1, -1, 1, 1], np.float32)
    assert sent(OneBit(0.0), gradient, np.zeros(9, np.float32))[0].tobytes() == bytes([0b10110001, 0b10000000, 0, 0])


def test_two_bits_send_no_more_than_the_threshold_and_keep_the_rest():
    residual = np.zeros(3, np.float32)
    seen = [sent(TwoBit(0.5), gradient, residual)[1].tolist() for gradient in (f32(0, 0.4, 5), f32(0, 0.1, 0))]
    assert seen == [[0, 0, 0.5], [0, 0.5, 0.5]]
    assert residual.tolist() == [0, 0, 4]


@each("threshold", [1e-7, 0.1, 1 / 3, 123456.789, 1.1754944e-38])
def test_a_threshold_is_not_rounded_to_six_decimals(threshold):
    codec = from_params({"type": "2bit", "threshold": threshold}).codec
    _, out = sent(codec, f32(1e6), np.zeros(1, np.float32))
    assert out[0] == np.float32(threshold) != 0


def test_nan_and_infinity_stay_where_they_are_and_two_bits_send_zero_or_the_threshold():
    residual = np.zeros(4, np.float32)
    for _ in range(2):
        assert sent(TwoBit(0.5), f32(np.nan, np.inf, -np.inf, 0), residual)[1].tolist() == [0, 0.5, -0.5, 0]
    assert np.isnan(residual[0]) and residual[1:].tolist() == [math.inf, -math.inf, 0]
    residual = np.zeros(3, np.float32)
    assert sent(OneBit(0.5), f32(np.nan, np.inf, -np.inf), residual)[1].tolist() == [-1, 1, -1]


@each("dtype", [DType.FLOAT16, DType.BFLOAT16])
@each("size", SIZES)
def test_halves_are_rounded_and_what_is_lost_is_sent_later(dtype, size):
    residual, total = np.zeros(size, np.float32), np.zeros(size, np.float64)
    for step in range(4):
        _, out = sent(Half(dtype), noise(size, step), residual)
        assert out.tolist() == REFERENCE.to_float32(REFERENCE.from_float32(out, dtype), dtype).tolist(), "it is a half"
        total += out
    gradients = np.sum([noise(size, step).astype(np.float64) for step in range(4)], axis=0)
    np.testing.assert_allclose(total + residual, gradients, atol=1e-5)


def test_what_is_too_large_for_float16_goes_as_the_largest_and_the_rest_follows():
    residual = np.zeros(5, np.float32)
    _, out = sent(Half(DType.FLOAT16), f32(1e5, -1e5, np.inf, -np.inf, np.nan), residual)
    assert out[:4].tolist() == [65504, -65504, math.inf, -math.inf] and np.isnan(out[4])
    assert residual.tolist() == [1e5 - 65504, 65504 - 1e5, 0, 0, 0]
    assert sent(Half(DType.FLOAT16), np.zeros(5, np.float32), residual)[1].tolist() == [34496, -34496, 0, 0, 0]


def scaled_again(values, bits):
    """The specification of scaled integers, block by block, in exact arithmetic where rounding could hide something."""
    most, scales, codes, worth = 2 ** (bits - 1) - 1, [], [], []
    for begin in range(0, len(values), 256):
        block = values[begin : begin + 256]
        scale = np.float32(np.abs(block).max() / np.float32(most))
        integers = [0 if scale == 0 else round(float(np.float32(one / scale))) for one in block]
        scales.append(scale)
        codes += [integer + most + 1 for integer in integers]
        worth += [np.float32(integer) * scale for integer in integers]
    per_word = 32 // bits
    codes += [0] * (-len(codes) % per_word)
    packed = codes if bits == 8 else [16 * high + low for high, low in zip(codes[::2], codes[1::2], strict=True)]
    return np.array(scales, "<f4").tobytes() + bytes(packed), np.array(worth, np.float32)


@each("size", [*SIZES, 255, 256, 257, (1 << 16) + 300])
@each("bits", [8, 4])
def test_scaled_integers_are_those_of_the_specification_and_what_is_lost_is_sent_later(bits, size):
    codec = from_params({"type": f"int{bits}"}).codec
    ours, theirs, total = np.zeros(size, np.float32), np.zeros(size, np.float32), np.zeros(size)
    for step in range(4):
        data, out = sent(codec, noise(size, step), ours)
        theirs += noise(size, step)
        expected, worth = scaled_again(theirs, bits)
        bounds = np.repeat(np.frombuffer(expected[: -(-size // 256) * 4], "<f4"), 256)[:size]
        assert data.tobytes() == expected
        assert out.tolist() == worth.tolist()
        assert (np.abs(theirs - out) <= bounds * 0.500001).all(), "none is off by more than half a scale"
        theirs -= worth
        assert ours.tolist() == theirs.tolist()
        total += out
    gradients = np.sum([noise(size, step).astype(np.float64) for step in range(4)], axis=0)
    np.testing.assert_allclose(total + ours, gradients, atol=1e-5)


@each("bits", [8, 4])
def test_scaled_integers_of_the_smallest_and_the_largest_numbers_stay_finite_and_lose_nothing(bits):
    codec = from_params({"type": f"int{bits}"}).codec
    for gradient in (f32(3.4028235e38, -3.4028235e38, 1), f32(1e-44, -3e-44, 2.7e-43), np.zeros(300, np.float32)):
        residual = np.zeros(gradient.size, np.float32)
        _, out = sent(codec, gradient, residual)
        assert np.isfinite(out).all() and np.isfinite(residual).all()
        np.testing.assert_array_equal((out.astype(np.float64) + residual).astype(np.float32), gradient)


@each("bits", [8, 4])
def test_what_is_not_finite_makes_the_elements_of_its_scale_nan_once(bits):
    codec = from_params({"type": f"int{bits}"}).codec
    for wrong in (np.nan, np.inf, -np.inf):
        gradient, residual = np.ones(600, np.float32), np.zeros(600, np.float32)
        gradient[300] = wrong
        _, out = sent(codec, gradient, residual)
        assert np.isnan(out[256:512]).all() and np.isfinite(out[:256]).all() and np.isfinite(out[512:]).all()
        assert not residual[256:512].any()
        assert np.isfinite(sent(codec, np.ones(600, np.float32), residual)[1]).all()


def test_the_largest_of_top_k_travel_and_the_others_wait():
    residual = np.zeros(5, np.float32)
    data, out = sent(TopK(0.4), f32(1, -5, 2, 0.5, -3), residual)
    assert out.tolist() == [0, -5, 0, 0, -3]
    assert residual.tolist() == [1, 0, 2, 0.5, 0]
    assert data[:8].view("<u4").tolist() == [1, 4] and data[8:].view("<f4").tolist() == [-5, -3]
    assert sent(TopK(0.4), np.zeros(5, np.float32), residual)[1].tolist() == [1, 0, 2, 0, 0]


@each("size, ratio, entries", [(0, 0.01, 0), (1, 0.01, 1), (100, 0.01, 1), (101, 0.01, 2),
                                                        (7, 1, 7), (1000, 1e-9, 1)])  # fmt: skip
def test_top_k_sends_its_share_rounded_up(size, ratio, entries):
    residual = np.zeros(size, np.float32)
    data, out = sent(TopK(ratio), noise(size), residual)
    assert len(data) == 8 * entries == 8 * np.count_nonzero(out)
    np.testing.assert_array_equal(out + residual, noise(size))


def test_nan_is_among_the_largest_of_top_k():
    residual = np.zeros(4, np.float32)
    assert np.isnan(sent(TopK(0.25), f32(1, np.nan, 9, 2), residual)[1][1])
    assert residual.tolist() == [1, 0, 9, 2]


def test_an_index_that_was_changed_on_its_way_writes_nowhere_else():
    data = np.concatenate([np.array([9], "<u4").view(np.uint8), np.array([1], "<f4").view(np.uint8)])
    with pytest.raises(IndexError):
        decode(5, 0.0, data, 1, np.zeros(3, np.float32), REFERENCE)


@each(
    "params, expected",
    [
        ({"type": "2bit"}, GradientCompression(TwoBit(0.5))),
        ({"type": "2bit", "threshold": 2}, GradientCompression(TwoBit(2.0))),
        ({"type": "1bit"}, GradientCompression(OneBit(0.5))),
        ({"type": "1bit", "threshold": -0.5}, GradientCompression(OneBit(-0.5))),
        ({"type": "1bit", "threshold": np.float32(0)}, GradientCompression(OneBit(0.0))),
        ({"type": "fp16"}, GradientCompression(Half(DType.FLOAT16))),
        ({"type": "bf16", "pull": "fp16"}, GradientCompression(Half(DType.BFLOAT16), DType.FLOAT16)),
        ({"type": "int8"}, GradientCompression(Scaled(Encoding.INT8))),
        ({"type": "int4", "pull": "bf16"}, GradientCompression(Scaled(Encoding.INT4), DType.BFLOAT16)),
        ({"type": "topk"}, GradientCompression(TopK(0.01))),
        ({"type": "topk", "ratio": 1, "pull": "bf16"}, GradientCompression(TopK(1.0), DType.BFLOAT16)),
    ],
)
def test_parameters_and_their_defaults(params, expected):
    assert from_params(params) == expected


@each(
    "params, complaint",
    [
        ({}, f"no 'type'; known types are {KNOWN}"),
        ({"threshold": 0.5}, "no 'type'"),
        ({"type": "3bit"}, f"no compression of type '3bit'; known are {KNOWN}"),
        ({"type": ["2bit"]}, "no compression of type"),
        ({"type": "2bit", "threshold": 0}, "above 0"),
        ({"type": "2bit", "threshold": -1}, "above 0"),
        ({"type": "2bit", "threshold": 1e-60}, "above 0"),
        ({"type": "2bit", "threshold": 1e60}, "above 0"),
        ({"type": "2bit", "threshold": math.nan}, "above 0"),
        ({"type": "1bit", "threshold": math.inf}, "finite"),
        ({"type": "topk", "ratio": 0}, "at most 1"),
        ({"type": "topk", "ratio": 1.5}, "at most 1"),
        ({"type": "topk", "ratio": math.nan}, "at most 1"),
        ({"type": "2bit", "ratio": 0.1}, "no parameter 'ratio'; it has 'type', 'threshold', 'pull'"),
        ({"type": "fp16", "threshold": 0.5}, "no parameter 'threshold'; it has 'type', 'pull'"),
        ({"type": "2bit", "treshold": 1, "x": 2}, "no parameter 'treshold', 'x'"),
        ({"type": "2bit", "pull": "int8"}, "'pull' is 'int8'"),
        ({"type": "2bit", "pull": ["fp16"]}, "'pull' is"),
    ],
)
def test_what_cannot_be_asked_for_is_refused_with_what_can(params, complaint):
    with pytest.raises(ValueError) as caught:
        from_params(params)
    assert complaint in str(caught.value)


@each(
    "params",
    [None, "2bit", ["type"], {"type": "2bit", "threshold": "0.5"},
                                    {"type": "2bit", "threshold": True}, {"type": "topk", "ratio": None}],
)  # fmt: skip
def test_parameters_of_a_wrong_type_are_refused(params):
    with pytest.raises(TypeError, match="compression"):
        from_params(params)


def test_a_compression_says_what_it_is():
    assert str(from_params({"type": "2bit", "pull": "fp16"})) == (
        "2bit with the threshold 0.5, values come back as float16"
    )
    assert [str(from_params({"type": name})) for name in ("1bit", "fp16", "bf16", "int8", "int4", "topk")] == [
        "1bit with the threshold 0.5", "fp16", "bf16", "int8", "int4", "topk with the ratio 0.01"
    ]  # fmt: skip
