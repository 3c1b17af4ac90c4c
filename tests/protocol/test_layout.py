"""Offsets of arrays in a payload, and arrays that show a payload."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.protocol import messages as m
from kvdist.protocol.layout import ITEMSIZES, offsets, views

COUNTS = [0, 1, 3, 7, 8, 9, 64, 1001]


def filled(entries):
    """Arrays with random bytes, and the arrays that a reader should see."""
    generator = np.random.default_rng(len(entries))
    payload, expected = b"", []
    for dtype, count in entries:
        data = generator.integers(0, 256, count * dtype.itemsize, np.uint8).tobytes()
        expected.append(np.frombuffer(data, dtype.storage))
        payload += data + b"\xaa" * (m.padded(len(data)) - len(data))
    codes = np.array([dtype for dtype, _ in entries], np.uint8)
    return m.Arrays(codes, np.array([count for _, count in entries], np.uint32), payload), expected


MIXED = [(dtype, count) for count in COUNTS for dtype in DType]


def test_each_array_starts_where_the_padded_one_before_ended():
    arrays, _ = filled(MIXED)
    starts, total = offsets(arrays.dtypes, arrays.counts)
    at = 0
    for start, (dtype, count) in zip(starts.tolist(), MIXED, strict=True):
        assert start == at
        at += m.padded(count * dtype.itemsize)
    assert total == at == len(arrays.payload)


def test_no_arrays_have_no_offsets_and_no_bytes():
    starts, total = offsets(np.zeros(0, np.uint8), np.zeros(0, np.uint32))
    assert (len(starts), total) == (0, 0)
    assert views(m.Arrays(np.zeros(0, np.uint8), np.zeros(0, np.uint32), b"")) == []


def test_sizes_of_the_largest_counts_do_not_wrap():
    starts, total = offsets(np.full(3, DType.FLOAT64, np.uint8), np.full(3, 0xFFFFFFFF, np.uint32))
    assert starts.tolist() == [0, 8 * 0xFFFFFFFF, 16 * 0xFFFFFFFF]
    assert total == 24 * 0xFFFFFFFF


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("shift", range(8))
def test_views_show_every_array_at_any_address(wrap, shift):
    arrays, expected = filled(MIXED)
    moved = wrap(b"#" * shift + bytes(arrays.payload))
    shown = views(m.Arrays(arrays.dtypes, arrays.counts, memoryview(moved)[shift:]))
    for view, want in zip(shown, expected, strict=True):
        assert view.dtype == want.dtype
        assert view.tobytes() == want.tobytes()
        assert view.flags.aligned
        assert not view.flags.writeable


def test_views_of_an_aligned_payload_are_no_copies():
    buffer = np.zeros(4, np.float64)
    arrays = m.Arrays(np.array([2], np.uint8), np.array([4], np.uint32), memoryview(buffer).cast("B"))
    (view,) = views(arrays)
    buffer[2] = 5
    assert view.tolist() == [0, 0, 5, 0]


def test_a_payload_of_another_length_is_an_error():
    arrays, _ = filled(MIXED)
    short = m.Arrays(arrays.dtypes, arrays.counts, arrays.payload[:-8])
    with pytest.raises(ValueError, match="the payload has"):
        views(short)


def test_the_table_of_sizes_knows_the_dtypes_and_no_others():
    assert {code: size for code, size in enumerate(ITEMSIZES.tolist()) if size} == {
        int(dtype): dtype.itemsize for dtype in DType
    }
