"""What every `kvdist.kernels.interface.Device` must do, held against the NumPy reference bit by bit.

A file of tests imports everything from here and gives two fixtures: `device`, and `sizes`, the lengths to try (a
simulator takes short ones). Nothing is needed but NumPy, pytest and kvdist itself.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.quantization import quantised_bytes
from kvdist.kernels.reference import REFERENCE
from tests.cases import each, pairs

LONG = [0, 1, 3, 7, 8, 17, 255, 256, 257, 4099, 70001]
SHORT = [0, 1, 7, 17, 257]
"""For `sizes`: all lengths that have hurt, and few for what runs slowly."""

HALVES = [DType.FLOAT16, DType.BFLOAT16]
FLOATS = [DType.FLOAT32, DType.FLOAT64]
NUMPY_FLOATS = [*FLOATS, DType.FLOAT16]
KINDS = ["ones", "equal", "unequal"]


# Arrays.


def floats(size, seed, storage=np.float32):
    """Normal numbers of many magnitudes; among them zeros of both signs, subnormals, infinities, NaN and large ones."""
    rng = np.random.default_rng(seed)
    numbers = (rng.standard_normal(size) * 10.0 ** rng.integers(-6, 6, size)).astype(storage)
    special = np.array([0.0, -0.0, 1e-41, np.inf, -np.inf, np.nan, 3e38, -3e38, 65504.0, 65520.0], storage)
    places = rng.integers(0, size, size // 20) if size else np.zeros(0, np.int64)
    numbers[places] = rng.choice(special, places.size)
    return numbers


def values(size, seed, dtype=DType.FLOAT32):
    """An array of `dtype.storage` with everything in it that can go wrong."""
    if not dtype.is_floating:
        limits = np.iinfo(dtype.storage)
        return np.random.default_rng(seed).integers(limits.min, limits.max, size, dtype.storage, endpoint=True)
    if dtype in HALVES:
        return REFERENCE.from_float32(floats(size, seed), dtype)
    return floats(size, seed, dtype.storage)


def tame(size, seed, dtype=DType.FLOAT32):
    """An array of `dtype.storage` of ordinary numbers."""
    numbers = np.random.default_rng(seed).standard_normal(size)
    if dtype in HALVES:
        return REFERENCE.from_float32(numbers.astype(np.float32), dtype)
    return numbers.astype(dtype.storage)


def up(device, host, shift=0):
    """A copy on the device, `shift` elements after the beginning of its memory."""
    array = device.kernels.empty(host.size + shift, host.dtype)[shift:]
    device.upload(np.ascontiguousarray(host), array)
    device.mark().wait()
    return array


def down(device, array):
    """A copy on the host."""
    host = np.empty(array.size, array.dtype)
    device.download(array, host)
    device.mark().wait()
    return host


def assert_same(actual, expected, dtype):
    """Equal in every bit; NaN equals NaN."""
    assert actual.dtype == expected.dtype and actual.size == expected.size
    if dtype.is_floating:
        wide = dtype if actual.dtype == dtype.storage else DType.FLOAT32
        seen, wanted = (REFERENCE.to_float32(each, wide) if wide in HALVES else each for each in (actual, expected))
        rest = ~(np.isnan(seen) & np.isnan(wanted))
        actual, expected = actual[rest], expected[rest]
    unsigned = np.dtype(f"u{actual.itemsize}")
    np.testing.assert_array_equal(actual.view(unsigned), expected.view(unsigned))


def scales_of(kind, count):
    given = [0.7, 1.0, -2.5, 1e-3, 1.0, 0.1, 3.0, 1.0, 0.5]
    return {"ones": [1.0] * count, "equal": [0.3] * count, "unequal": (given * 5)[:count]}[kind]


def outs_of(dtype):
    """The types a sum may go to."""
    return sorted({dtype.storage.str, dtype.accumulate.str})


# Sums and casts.


def check_sum(device, dtype, kind, count, size, shifts=(0,)):
    hosts = [values(size, seed, dtype) for seed in range(count)]
    arrays = [up(device, host, shifts[i % len(shifts)]) for i, host in enumerate(hosts)]
    for kept in outs_of(dtype):
        out, expected = up(device, np.full(size, 7, kept), shifts[-1]), np.full(size, 8, kept)
        device.kernels.weighted_sum(arrays, scales_of(kind, count), dtype, out)
        REFERENCE.weighted_sum(hosts, scales_of(kind, count), dtype, expected)
        assert_same(down(device, out), expected, dtype)


@each(
    "count, dtype, kind",
    [
        *itertools.product([0, 1], list(DType), ["ones"]),
        *pairs([1, 2, 3, 4, 5, 8, 33, 40], [*FLOATS, *HALVES], KINDS),
        *itertools.product([2, 3, 4, 5, 8, 33, 40], [one for one in DType if not one.is_floating], ["ones"]),
    ],
)
def test_a_sum_of_any_number_of_sources_has_the_bits_of_the_reference(device, sizes, count, dtype, kind):
    for size in sizes if count < 8 else sizes[-1:]:
        check_sum(device, dtype, kind, count, size)


@each("dtype", list(DType))
def test_arrays_of_a_sum_may_start_anywhere(device, dtype):
    for shifts in ((1,), (0, 1, 2, 3), (4, 3, 8), (2, 0)):
        check_sum(device, dtype, "ones", 3, 255, shifts)


def test_a_sum_refuses_what_the_reference_refuses(device):
    new, total = device.kernels.zeros, device.kernels.weighted_sum
    one = new(5, np.dtype(np.float32))
    with pytest.raises(TypeError, match="a contribution of float64"):
        total([one], [1.0], DType.FLOAT64, new(5, np.dtype(np.float64)))
    with pytest.raises(ValueError, match="4 elements where the sum has 5"):
        total([new(4, np.dtype(np.float32))], [1.0], DType.FLOAT32, one)
    with pytest.raises(ValueError, match="need as many scales"):
        total([one], [], DType.FLOAT32, new(5, np.dtype(np.float32)))
    with pytest.raises(ValueError, match="cannot be scaled"):
        total([new(5, np.dtype(np.int32))], [2.0], DType.INT32, new(5, np.dtype(np.int32)))


@each("dtype", HALVES)
def test_casts_have_the_bits_of_the_reference(device, sizes, dtype):
    for size in sizes:
        wide, bits = floats(size, 1), values(size, 2, dtype)
        for shift in (0, 1):
            given = up(device, wide, shift)
            narrowed = down(device, device.kernels.from_float32(given, dtype))
            assert_same(narrowed, REFERENCE.from_float32(wide, dtype), dtype)
            out = up(device, np.zeros(size, dtype.storage), shift)
            assert device.kernels.from_float32(given, dtype, out) is out
            assert_same(down(device, out), REFERENCE.from_float32(wide, dtype), dtype)
            given = up(device, bits, shift)
            widened = down(device, device.kernels.to_float32(given, dtype))
            assert_same(widened, REFERENCE.to_float32(bits, dtype), DType.FLOAT32)
            out = up(device, np.zeros(size, np.float32), shift)
            assert device.kernels.to_float32(given, dtype, out) is out
            assert_same(down(device, out), REFERENCE.to_float32(bits, dtype), DType.FLOAT32)


@each("dtype", HALVES)
def test_ties_are_rounded_to_even_and_small_numbers_are_kept(device, dtype):
    halves = np.arange(0, 65536, 257, dtype=np.uint16).view(dtype.storage)
    exact = REFERENCE.to_float32(halves, dtype)
    with np.errstate(all="ignore"):
        beside = [exact, np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(-np.inf))]
        following = (halves.view(np.uint16) + np.uint16(1)).view(dtype.storage)
        between = exact + (REFERENCE.to_float32(following, dtype) - exact) / 2
    for wide in (*beside, between.astype(np.float32)):
        seen = down(device, device.kernels.from_float32(up(device, wide), dtype))
        assert_same(seen, REFERENCE.from_float32(wide, dtype), dtype)
    assert_same(down(device, device.kernels.to_float32(up(device, halves), dtype)), exact, DType.FLOAT32)


def test_only_halves_are_cast(device):
    one = device.kernels.zeros(1, np.dtype(np.float32))
    with pytest.raises(TypeError, match="not a half"):
        device.kernels.to_float32(one, DType.FLOAT32)
    with pytest.raises(TypeError, match="not a half"):
        device.kernels.from_float32(one, DType.FLOAT64)


# Quantising.


@each("dtype", HALVES)
def test_rounding_to_halves_keeps_what_it_loses(device, sizes, dtype):
    for size in sizes:
        for shift in (0, 1):
            residual, theirs = up(device, np.zeros(size, np.float32), shift), np.zeros(size, np.float32)
            for seed in range(3):
                grad, out = floats(size, seed), up(device, np.zeros(size, dtype.storage), shift)
                expected = np.zeros(size, dtype.storage)
                device.kernels.round_to_half(up(device, grad, shift), residual, dtype, out)
                REFERENCE.round_to_half(grad, theirs, dtype, expected)
                assert_same(down(device, out), expected, dtype)
                assert_same(down(device, residual), theirs, DType.FLOAT32)


BITS = {"2bit": 16, "1bit": 32}
"""Elements of a word of four bytes."""


def check_quantised(device, kind, size, threshold, shift):
    ours, theirs = (getattr(kernels, f"quantise_{kind}") for kernels in (device.kernels, REFERENCE))
    back, back_theirs = (getattr(kernels, f"dequantise_{kind}") for kernels in (device.kernels, REFERENCE))
    add = getattr(device, f"add_dequantised_{kind}")
    count = quantised_bytes(size, BITS[kind])
    residual, kept = up(device, np.zeros(size, np.float32), shift), np.zeros(size, np.float32)
    total, expected_total = up(device, tame(size, 77), shift), tame(size, 77)
    for seed in range(3):
        grad = floats(size, seed) if seed else tame(size, seed)
        out, expected = up(device, np.full(count, 9, np.uint8), shift), np.full(count, 8, np.uint8)
        ours(up(device, grad, shift), residual, threshold, out)
        theirs(grad, kept, threshold, expected)
        np.testing.assert_array_equal(down(device, out), expected)
        assert_same(down(device, residual), kept, DType.FLOAT32)
        worth, expected_worth = up(device, np.full(size, 5, np.float32), shift), np.zeros(size, np.float32)
        back(out, threshold, worth)
        back_theirs(expected, threshold, expected_worth)
        assert_same(down(device, worth), expected_worth, DType.FLOAT32)
        add(out, threshold, total)
        expected_total += expected_worth
        assert_same(down(device, total), expected_total, DType.FLOAT32)


@each("threshold", [0.1, 0.0])
@each("kind", BITS)
def test_quantising_has_the_bits_of_the_reference(device, sizes, kind, threshold):
    for size in sorted({*sizes, 15, 16, 31, 32, 33, 64}):
        for shift in (0, 1):
            check_quantised(device, kind, size, threshold, shift)


@each("kind", BITS)
def test_quantising_refuses_what_the_reference_refuses(device, kind):
    single, octets = np.dtype(np.float32), np.dtype(np.uint8)
    new = device.kernels.zeros
    with pytest.raises(ValueError, match="bytes"):
        getattr(device.kernels, f"quantise_{kind}")(new(17, single), new(17, single), 0.5, new(3, octets))
    with pytest.raises(ValueError, match="bytes"):
        getattr(device.kernels, f"dequantise_{kind}")(new(3, octets), 0.5, new(17, single))
    with pytest.raises(TypeError, match="float32"):
        getattr(device.kernels, f"dequantise_{kind}")(new(8, octets), 0.5, new(17, np.dtype(np.float64)))


# Buckets.


def bucket(device, sizes):
    """Hosts of very different sizes and types, where each begins in a bucket, and the bucket's length."""
    hosts = [
        values(size, seed, list(DType)[seed % len(DType)]) for seed, size in enumerate([*sizes, 1, 5, 33, 2, 64, 3])
    ]
    offsets, end = [], 0
    for host in hosts:
        end = -(-end // host.itemsize) * host.itemsize
        offsets.append(end)
        end += host.nbytes
    return hosts, offsets, end


def test_arrays_are_packed_and_unpacked(device, sizes):
    hosts, offsets, end = bucket(device, sizes)
    for shift in (0, 1):
        out, expected = up(device, np.full(end + 3, 7, np.uint8)), np.full(end + 3, 7, np.uint8)
        device.pack([up(device, host, shift) for host in hosts], offsets, out)
        for host, offset in zip(hosts, offsets, strict=True):
            expected[offset : offset + host.nbytes] = host.view(np.uint8)
        np.testing.assert_array_equal(down(device, out), expected)
        outs = [up(device, np.zeros_like(host), shift) for host in hosts]
        device.unpack(out, offsets, outs)
        for host, array in zip(hosts, outs, strict=True):
            np.testing.assert_array_equal(down(device, array).view(np.uint8), host.view(np.uint8))


def test_hundreds_of_arrays_and_none_are_packed(device):
    hosts = [np.full(1 + i % 5, i, np.float32) for i in range(300)]
    offsets = list(np.cumsum([0, *(host.nbytes for host in hosts[:-1])]))
    out = device.kernels.zeros(sum(host.nbytes for host in hosts), np.dtype(np.uint8))
    whole = up(device, np.concatenate(hosts))
    starts = [offset // 4 for offset in offsets]
    device.pack([whole[start : start + host.size] for start, host in zip(starts, hosts, strict=True)], offsets, out)
    np.testing.assert_array_equal(down(device, out).view(np.float32), np.concatenate(hosts))
    device.pack([], [], out)
    device.unpack(out, [], [])
    np.testing.assert_array_equal(down(device, out).view(np.float32), np.concatenate(hosts))


# Rows.


def merged(indices, rows, dtype):
    """The different indices, and for each the sum of its rows in the order given."""
    length = rows.size // max(1, indices.size)
    table = rows.reshape(indices.size, length)
    different = np.unique(indices)
    sums = np.empty((different.size, length), dtype.storage)
    for place, index in enumerate(different):
        own = list(table[indices == index])
        REFERENCE.weighted_sum(own, [1.0] * len(own), dtype, sums[place])
    return different, sums.reshape(-1)


@each("dtype", list(DType))
@each("length", [1, 3, 8, 33])
def test_rows_that_share_an_index_are_summed_in_the_order_given(device, dtype, length):
    for count, highest in ((1, 1), (9, 3), (40, 1 << 40), (60, 20), (65, 1)):
        rng = np.random.default_rng(count)
        indices = rng.integers(0, highest, count)
        rows = tame(count * length, 5, dtype) if dtype.is_floating else values(count * length, 5, dtype)
        kept, sums = device.merge_rows(up(device, indices), up(device, rows, count % 2), dtype)
        expected_kept, expected = merged(indices, rows, dtype)
        np.testing.assert_array_equal(down(device, kept), expected_kept)
        assert_same(down(device, sums), expected, dtype)


def test_no_rows_are_merged_into_none(device):
    indices, rows = device.kernels.zeros(0, np.dtype(np.int64)), device.kernels.zeros(0, np.dtype(np.float32))
    kept, sums = device.merge_rows(indices, rows, DType.FLOAT32)
    assert kept.size == sums.size == 0 and kept.dtype == np.int64 and sums.dtype == np.float32


@each("dtype", NUMPY_FLOATS)
@each("length", [1, 3, 8, 33])
def test_rows_are_added_where_they_belong(device, dtype, length):
    for indices in (np.array([3, 0, 19, 7]), np.zeros(0, np.int64), np.arange(20)[::-1].copy()):
        table, rows = tame(20 * length, 1, dtype), tame(indices.size * length, 2, dtype)
        ours = up(device, table, 1)
        device.add_rows(ours, up(device, indices), up(device, rows))
        expected = table.copy().reshape(20, length)
        expected[indices] += rows.reshape(indices.size, length)
        assert_same(down(device, ours), expected.reshape(-1), dtype)


# Numbers of an array.


@each("dtype", NUMPY_FLOATS)
def test_squares_are_summed_in_float64(device, sizes, dtype):
    for size in sizes:
        given = tame(size, 3, dtype)
        for shift in (0, 1):
            seen = device.kernels.squares(up(device, given, shift))
            assert isinstance(seen, float)
            assert seen == pytest.approx(REFERENCE.squares(given), rel=1e-12)
            assert seen == device.kernels.squares(up(device, given, shift))


@each("dtype", list(DType))
def test_what_is_not_finite_is_found_wherever_it_is(device, sizes, dtype):
    lengths = [size for size in sizes if size]
    clean = [tame(size, 1, dtype) if dtype.is_floating else values(size, 1, dtype) for size in lengths]
    assert device.all_finite([up(device, each, 1) for each in clean], dtype)
    assert device.all_finite([], dtype)
    if not dtype.is_floating:
        return
    for bad in (np.inf, -np.inf, np.nan):
        for which, place in ((0, 0), (-1, -1), (len(lengths) // 2, 0)):
            dirty = [each.copy() for each in clean]
            single = np.array([bad], np.float32)
            as_stored = REFERENCE.from_float32(single, dtype) if dtype in HALVES else single.astype(dtype.storage)
            dirty[which][place] = as_stored[0]
            assert not device.all_finite([up(device, each, 1) for each in dirty], dtype)


# Memory.


def test_a_device_says_what_it_is(device):
    assert device.name.endswith(f":{device.index}") and device.library and device.kernels.name
    assert device.reaches(device)


def test_new_arrays_are_empty_or_zero(device):
    for dtype in DType:
        array = device.kernels.zeros(19, dtype.storage)
        assert array.size == 19 and array.dtype == dtype.storage and array.nbytes == 19 * dtype.itemsize
        assert not down(device, array).any()
        assert device.kernels.empty(3, dtype.storage).size == 3
        assert device.kernels.empty(0, dtype.storage).size == 0


def test_an_array_can_be_cut_and_filled(device):
    array = up(device, np.arange(10, dtype=np.float32))
    with device.kernels.active():
        array[2:5][...] = 0
    np.testing.assert_array_equal(down(device, array), np.float32([0, 1, 0, 0, 0, 5, 6, 7, 8, 9]))
    np.testing.assert_array_equal(down(device, array[6:9]), np.float32([6, 7, 8]))


@each("dtype", list(DType))
def test_arrays_are_copied_up_down_and_across(device, sizes, dtype):
    for size in sizes:
        host = values(size, 1, dtype)
        there = up(device, host, 1)
        beside = device.kernels.zeros(size, dtype.storage)
        device.copy(there, beside, device)
        np.testing.assert_array_equal(down(device, beside).view(np.uint8), host.view(np.uint8))


def test_a_view_shows_the_memory_of_its_value(device):
    for dtype in DType:
        array = up(device, values(9, 1, dtype))
        view = device.view(array, dtype)
        assert view.size == 9 and view.dtype == dtype.storage
        with device.kernels.active():
            view[...] = 0
        assert not down(device, array).any()


def test_pinned_memory_carries_copies_and_can_be_let_go(device):
    host = np.arange(5000, dtype=np.float32)
    hold = device.pin(host)
    array = device.kernels.empty(5000, np.dtype(np.float32))
    device.upload(host, array)
    device.mark().wait()
    host[:] = 0
    device.download(array, host)
    device.mark().wait()
    np.testing.assert_array_equal(host, np.arange(5000))
    del hold
    assert device.pin(host) is not None or device.pin(np.empty(0, np.float32)) is None


def test_a_mark_can_be_waited_for_twice(device):
    array = device.kernels.zeros(1000, np.dtype(np.float32))
    mark = device.mark()
    mark.wait()
    mark.wait()
    assert not down(device, array).any()
