"""Where arrays lie in a payload, and arrays that show a payload."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.dtypes import DType
from kvdist.protocol.arrays import ITEMSIZES, Arrays, PayloadView, offsets, padded, views
from tests.cases import each

COUNTS = [0, 1, 3, 7, 8, 9, 64, 1001]


def filled(entries):
    """Arrays with random bytes, and the arrays that a reader should see."""
    generator = np.random.default_rng(len(entries))
    payload, expected = b"", []
    for dtype, count in entries:
        data = generator.integers(0, 256, count * dtype.itemsize, np.uint8).tobytes()
        expected.append(np.frombuffer(data, dtype.storage))
        payload += data + b"\xaa" * (padded(len(data)) - len(data))
    codes = np.array([dtype for dtype, _ in entries], np.uint8)
    return Arrays(codes, np.array([count for _, count in entries], np.uint32), payload), expected


MIXED = [(dtype, count) for count in COUNTS for dtype in DType]


def test_each_array_starts_where_the_padded_one_before_ended():
    arrays, _ = filled(MIXED)
    starts, total = offsets(arrays.dtypes, arrays.counts)
    at = 0
    for start, (dtype, count) in zip(starts.tolist(), MIXED, strict=True):
        assert start == at
        at += padded(count * dtype.itemsize)
    assert total == at == len(arrays.payload)


def test_no_arrays_have_no_offsets_and_no_bytes():
    starts, total = offsets(np.zeros(0, np.uint8), np.zeros(0, np.uint32))
    assert (len(starts), total) == (0, 0)
    assert views(Arrays(np.zeros(0, np.uint8), np.zeros(0, np.uint32), b"")) == []


def test_sizes_of_the_largest_counts_do_not_wrap():
    starts, total = offsets(np.full(3, DType.FLOAT64, np.uint8), np.full(3, 0xFFFFFFFF, np.uint32))
    assert starts.tolist() == [0, 8 * 0xFFFFFFFF, 16 * 0xFFFFFFFF]
    assert total == 24 * 0xFFFFFFFF


@each("wrap", [bytes, bytearray, memoryview])
@each("shift", range(8))
def test_views_show_every_array_at_any_address(wrap, shift):
    arrays, expected = filled(MIXED)
    moved = wrap(b"#" * shift + bytes(arrays.payload))
    shown = views(Arrays(arrays.dtypes, arrays.counts, memoryview(moved)[shift:]))
    for view, want in zip(shown, expected, strict=True):
        assert view.dtype == want.dtype
        assert view.tobytes() == want.tobytes()
        assert view.flags.aligned
        assert not view.flags.writeable


def test_views_of_an_aligned_payload_are_no_copies():
    buffer = np.zeros(4, np.float64)
    arrays = Arrays(np.array([2], np.uint8), np.array([4], np.uint32), memoryview(buffer).cast("B"))
    (view,) = views(arrays)
    buffer[2] = 5
    assert view.tolist() == [0, 0, 5, 0]


def test_a_payload_of_another_length_is_an_error():
    arrays, _ = filled(MIXED)
    short = Arrays(arrays.dtypes, arrays.counts, arrays.payload[:-8])
    with pytest.raises(ValueError, match="the payload has"):
        views(short)


def test_the_table_of_sizes_knows_the_dtypes_and_no_others():
    assert {code: size for code, size in enumerate(ITEMSIZES.tolist()) if size} == {
        int(dtype): dtype.itemsize for dtype in DType
    }


# Several payload frames.


def in_frames(entries, cuts, shift=0):
    """The same arrays with the payload cut in front of the entries `cuts`; each frame begins `shift` bytes too late."""
    arrays, expected = filled(entries)
    starts, total = offsets(arrays.dtypes, arrays.counts)
    bounds = sorted({0, total, *(int(starts[cut]) for cut in cuts)})
    frames = []
    for low, high in itertools.pairwise(bounds):
        memory = np.zeros(high - low + 16, np.uint8)
        memory[shift : shift + high - low] = np.frombuffer(arrays.payload[low:high], np.uint8)
        frames.append(memory.data[shift : shift + high - low])
    return Arrays(arrays.dtypes, arrays.counts, tuple(frames)), expected


CUTS = [[], [1], [8, 9], [0, 5, 40], range(len(MIXED)), [len(MIXED) - 1]]


@each("shift", [0, 1, 4, 8])
@each("cuts", CUTS)
def test_views_show_every_array_wherever_the_frames_begin(cuts, shift):
    arrays, expected = in_frames(MIXED, cuts, shift)
    for view, want in zip(views(arrays), expected, strict=True):
        assert view.dtype == want.dtype
        assert view.tobytes() == want.tobytes()
        assert view.flags.aligned and not view.flags.writeable


@settings(max_examples=80)
@given(st.data())
def test_any_part_of_any_arrays_is_shown_from_any_frames(data):
    kinds = st.tuples(st.sampled_from(list(DType)), st.sampled_from([0, 0, 1, 2, 3, 9]))
    alike = st.builds(lambda kind, count: [kind] * count, kinds, st.integers(1, 12))
    entries = data.draw(st.lists(kinds, min_size=1, max_size=12) | alike)
    cuts = data.draw(st.lists(st.integers(0, len(entries) - 1)))
    arrays, expected = in_frames(entries, cuts, data.draw(st.sampled_from([0, 0, 2])))
    if not arrays.frames:
        return  # nothing has any bytes
    begin = data.draw(st.integers(0, len(entries)))
    end = data.draw(st.integers(begin, len(entries)))
    shown = PayloadView(arrays).arrays(begin, end)
    assert [view.tobytes() for view in shown] == [want.tobytes() for want in expected[begin:end]]


def test_arrays_without_elements_at_the_edges_of_frames_are_shown():
    f32 = DType.FLOAT32
    entries = [(f32, 0), (f32, 2), (f32, 0), (f32, 0), (f32, 3), (f32, 0)]
    for cuts in ([2], [3], [4], [1], [5]):
        arrays, expected = in_frames(entries, cuts)
        assert [len(view) for view in views(arrays)] == [0, 2, 0, 0, 3, 0]
        assert [view.tobytes() for view in views(arrays)] == [want.tobytes() for want in expected]


F32S = [(DType.FLOAT32, count) for count in (3, 0, 1, 8, 5, 2)]


@each("cuts", [[], [2], [3], [1, 4], [0, 1, 2, 3, 4, 5]])
def test_a_stretch_shows_the_padding_and_crosses_frames(cuts):
    whole, expected = in_frames(F32S, [])
    arrays, _ = in_frames(F32S, cuts)
    plain = np.frombuffer(whole.frames[0], np.float32)
    starts, total = offsets(arrays.dtypes, arrays.counts)
    ends = [*starts.tolist(), total]
    view = PayloadView(arrays)
    for begin, end in itertools.combinations(range(len(F32S) + 1), 2):
        stretch = view.stretch(begin, end, DType.FLOAT32)
        assert stretch.tobytes() == plain[ends[begin] // 4 : ends[end] // 4].tobytes()
        assert stretch.flags.aligned
    assert view.stretch(1, 2, DType.FLOAT32).size == 0
    assert view.stretch(3, 4, DType.FLOAT32).tobytes() == expected[3].tobytes()


def test_a_stretch_within_one_frame_is_no_copy():
    memories = [np.zeros(4, np.float32), np.zeros(6, np.float32)]
    arrays = Arrays(
        np.full(3, DType.FLOAT32, np.uint8),
        np.array([4, 2, 4], np.uint32),
        tuple(memory.view(np.uint8).data for memory in memories),
    )
    view = PayloadView(arrays)
    second, both = view.stretch(1, 3, DType.FLOAT32), view.stretch(0, 3, DType.FLOAT32)
    memories[1][0] = 7
    assert second[0] == 7 and both[4] == 0


def test_frames_of_another_length_altogether_are_an_error():
    arrays, _ = in_frames(MIXED, [30])
    with pytest.raises(ValueError, match="the payload has"):
        views(Arrays(arrays.dtypes, arrays.counts, arrays.frames[:1]))
