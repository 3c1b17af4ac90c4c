"""What servers keep, cut in one way, comes back cut in any other: the same bits, or an error says what is gone."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.checkpoint import shards as slices
from kvdist.checkpoint.format import Tensor, write_tensors
from kvdist.checkpoint.shards import SLICES, Shards, write_slices
from kvdist.checkpoint.snapshot import EVERYTHING, STATES, WEIGHTS, Manifest, SavedKey, SliceImage, WantedSlice
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.optimizer.states import SliceState
from tests.cases import each

FLOATING = [dtype for dtype in DType if dtype.is_floating or dtype is DType.BFLOAT16]
NAMES = ("mean", "variance")


def random_bits(dtype, size, seed):
    data = np.random.default_rng(seed).integers(0, 256, size * np.dtype(dtype).itemsize, np.uint8)
    return data.view(dtype)


class Whole:
    """A key with all that belongs to it, to be cut."""

    def __init__(self, key, shape, dtype, row=1, states=NAMES, master=True, seed=0):
        self.key, self.shape, self.dtype, self.row, self.states = key, shape, dtype, row, states
        self.size = math.prod(shape)
        self.weight = random_bits(dtype.storage, self.size, seed)
        wide = np.float64 if dtype is DType.FLOAT64 else np.float32
        self.arrays = {name: random_bits(wide, self.size // row, seed + 1 + n) for n, name in enumerate(states)}
        self.master = random_bits(wide, self.size, seed + 9) if master else None

    def saved(self, start, stop, updates=3, scalars=(0.5, 1e-300), samples=0):
        rows = slice(start // self.row, stop // self.row)
        arrays = tuple(array[rows] for array in self.arrays.values())
        master = None if self.master is None else self.master[start:stop]
        return SliceImage(
            0,
            self.key,
            start,
            stop - start,
            self.dtype,
            17,
            self.weight[start:stop],
            True,
            SliceState(updates, arrays, scalars, master) if updates else None,
            tuple(self.arrays),
            samples=samples,
        )

    def wanted(self, start, stop, **changes):
        given = {"state_names": self.states, "row": self.row, "has_master": self.master is not None, "has_state": True}
        return WantedSlice(start, self.key, start, stop - start, self.dtype, **{**given, **changes})

    def require_equal(self, found, start, stop):
        rows = slice(start // self.row, stop // self.row)
        assert found.weight.tobytes() == self.weight[start:stop].tobytes()
        for name, array in zip(self.states, found.state.arrays, strict=True):
            assert array.dtype == self.arrays[name].dtype and array.tobytes() == self.arrays[name][rows].tobytes()
        if self.master is None:
            assert found.state.master is None
        else:
            assert found.state.master.tobytes() == self.master[start:stop].tobytes()
        assert (found.state.count, found.state.scalars) == (3, (0.5, 1e-300))


def manifest(records, wholes=()):
    keys = tuple(SavedKey(one.key, one.shape, one.dtype.label) for one in wholes)
    return Manifest(1, EVERYTHING, "sync", True, None, 1, len(records), keys, tuple(records))


def write(folder, *servers):
    return [write_slices(folder, f"server-{rank}", kept, "", 0) for rank, kept in enumerate(servers)]


def shards(folder, *servers):
    return Shards(folder, manifest(write(folder, *servers)))


@st.composite
def cuts(draw, size, row):
    """Ends of slices, at whole rows."""
    rows = size // row
    ends = draw(st.lists(st.integers(1, max(1, rows - 1)), unique=True, max_size=6)) if rows > 1 else []
    return [0, *sorted(end * row for end in ends), size]


@st.composite
def resharding(draw):
    row = draw(st.sampled_from([1, 1, 3, 5]))
    rows = draw(st.integers(0, 23))
    dtype = draw(st.sampled_from(FLOATING))
    whole = Whole(
        draw(st.one_of(st.integers(0, 1 << 40), st.text(max_size=5))),
        (rows, row),
        dtype,
        row,
        draw(st.sampled_from([(), ("history",), NAMES])),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )
    servers = draw(st.integers(1, 4))
    before, after = draw(cuts(whole.size, row)), draw(cuts(whole.size, row))
    owners = draw(st.lists(st.integers(0, servers - 1), min_size=len(before) - 1, max_size=len(before) - 1))
    return whole, servers, before, after, owners


@given(resharding())
@settings(max_examples=120)
def test_however_a_key_was_cut_it_comes_back_however_it_is_cut_now(tmp_path_factory, case):
    whole, servers, before, after, owners = case
    folder = tmp_path_factory.mktemp("cut")
    kept = [[] for _ in range(servers)]
    for start, stop, owner in zip(before, before[1:], owners, strict=False):
        kept[owner].append(whole.saved(start, stop))
    found = shards(folder, *kept)
    for start, stop in itertools.pairwise(after):
        whole.require_equal(found.read(whole.wanted(start, stop), EVERYTHING), start, stop)
    assert found.whole(whole.key, whole.size, whole.dtype).tobytes() == whole.weight.tobytes()


@each("dtype", list(DType))
@each("size", [0, 1, 7, 1025])
def test_a_weight_of_every_type_and_size_comes_back(tmp_path, dtype, size):
    whole = Whole("w", (size,), dtype, states=(), master=False)
    found = shards(tmp_path, [whole.saved(0, size)]).read(whole.wanted(0, size, has_state=False), (WEIGHTS,))
    assert found.weight.dtype == dtype.storage and found.weight.tobytes() == whole.weight.tobytes()
    assert found.state is None


def test_keys_that_look_alike_are_kept_apart(tmp_path):
    wholes = [Whole(key, (4,), DType.FLOAT32, seed=n) for n, key in enumerate([1, "1", '"1"', "1[0:4]/weight", "", 11])]
    found = shards(tmp_path, [one.saved(0, 4) for one in wholes])
    for one in wholes:
        one.require_equal(found.read(one.wanted(0, 4), EVERYTHING), 0, 4)


def test_weights_alone_and_states_alone_are_read_alone(tmp_path):
    whole = Whole("w", (6,), DType.FLOAT16)
    found = shards(tmp_path, [whole.saved(0, 6)])
    assert found.read(whole.wanted(0, 6), (WEIGHTS,)).state is None
    assert found.read(whole.wanted(0, 6), (STATES,)).weight is None
    assert found.read(whole.wanted(0, 6, has_state=False), EVERYTHING).state is None


def test_of_slices_with_different_histories_the_furthest_counts(tmp_path):
    whole = Whole("w", (6,), DType.FLOAT32)
    others = [whole.saved(2, 4, 9, (2.0,)), whole.saved(4, 6, 5, (3.0,))]
    found = shards(tmp_path, [whole.saved(0, 2, 3, (1.0,))], others)
    state = found.read(whole.wanted(0, 6), EVERYTHING).state
    assert (state.count, state.scalars) == (9, (2.0,))
    assert found.read(whole.wanted(0, 2), EVERYTHING).state.count == 3


def test_samples_of_a_slice_are_those_of_the_piece_that_has_most(tmp_path):
    whole = Whole("w", (6,), DType.FLOAT32)
    found = shards(tmp_path, [whole.saved(0, 2, samples=70)], [whole.saved(2, 4, samples=90), whole.saved(4, 6)])
    assert [found.read(whole.wanted(*ends), EVERYTHING).samples for ends in ((0, 6), (0, 2), (4, 6))] == [90, 70, 0]


def test_numbers_beside_the_arrays_come_back_exactly(tmp_path):
    scalars = (0.1 + 0.2, -0.0, math.inf, -math.inf, 5e-324)
    whole = Whole("w", (1,), DType.FLOAT32)
    state = shards(tmp_path, [whole.saved(0, 1, 1 << 40, scalars)]).read(whole.wanted(0, 1), EVERYTHING).state
    assert [one.hex() for one in state.scalars] == [one.hex() for one in scalars] and state.count == 1 << 40


@each("contents", [(WEIGHTS,), (STATES,), EVERYTHING])
@each("states", [(), NAMES])
@each("kept, element", [([], 0), ([(2, 6)], 0), ([(0, 2)], 2), ([(0, 2), (4, 6)], 2), ([(0, 2), (2, 5)], 5)])
def test_a_piece_that_is_nowhere_is_named(tmp_path, kept, element, states, contents):
    whole = Whole("w", (6,), DType.FLOAT32, states=states, master=False)
    found = shards(tmp_path, *([whole.saved(*ends)] for ends in kept))
    with pytest.raises(CheckpointError, match=f"has no element {element} of key 'w': a file of a server is not in it"):
        found.read(whole.wanted(0, 6), contents)


@each("size", [0, 3])
def test_a_key_that_is_nowhere_is_named(tmp_path, size):
    whole = Whole("w", (size,), DType.FLOAT32)
    with pytest.raises(CheckpointError, match="has no element 0 of key 'v'"):
        shards(tmp_path, [whole.saved(0, size)]).read(WantedSlice(0, "v", 0, size, DType.FLOAT32), (WEIGHTS,))


def test_an_element_that_is_there_twice_is_an_error(tmp_path):
    whole = Whole("w", (6,), DType.FLOAT32)
    found = shards(tmp_path, [whole.saved(0, 4)], [whole.saved(3, 6)])
    with pytest.raises(CheckpointError, match="has element 3 of key 'w' twice"):
        found.read(whole.wanted(0, 6), EVERYTHING)


def test_another_type_or_other_states_are_an_error(tmp_path):
    whole = Whole("w", (6,), DType.FLOAT32)
    found = shards(tmp_path, [whole.saved(0, 6)])
    with pytest.raises(CheckpointError, match=r"does not have elements 0 to 6 of \"w\"\[0:6\]/weight"):
        found.read(WantedSlice(0, "w", 0, 6, DType.FLOAT16), (WEIGHTS,))
    for names in [(), ("mean",), ("variance", "mean"), ("mean", "momentum")]:
        with pytest.raises(CheckpointError, match="has states mean, variance of key 'w', where the optimizer has"):
            found.read(whole.wanted(0, 6, state_names=names), EVERYTHING)


@each("saved, wanted", [([0, 4, 9], [0, 9]), ([0, 9], [0, 4, 9])])
def test_states_by_rows_of_keys_cut_within_rows_are_refused_and_their_weights_are_not(tmp_path, saved, wanted):
    whole = Whole("w", (3, 3), DType.FLOAT32, row=3)
    found = shards(tmp_path, [whole.saved(*ends) for ends in itertools.pairwise(saved)])
    for ends in itertools.pairwise(wanted):
        with pytest.raises(CheckpointError, match="key 'w' is cut within its rows, .* call set_optimizer before init"):
            found.read(whole.wanted(*ends), EVERYTHING)
        start, stop = ends
        assert found.read(whole.wanted(*ends), (WEIGHTS,)).weight.tobytes() == whole.weight[start:stop].tobytes()


def test_each_changed_byte_of_a_file_is_found_before_anything_is_read(tmp_path):
    whole = Whole("w", (3,), DType.BFLOAT16)
    records = write(tmp_path, [whole.saved(0, 3)])
    path = tmp_path / records[0].name
    content = path.read_bytes()
    for position in range(len(content)):  # the length of the header, the header, the arrays
        changed = bytearray(content)
        changed[position] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(CheckpointError, match="is damaged: its content does not have the checksum"):
            Shards(tmp_path, manifest(records)).read(whole.wanted(0, 3), EVERYTHING)
        with pytest.raises(CheckpointError, match="is damaged: its content does not have the checksum"):
            Shards(tmp_path, manifest(records)).verify()


def test_a_file_is_read_for_its_checksum_once_and_only_if_something_of_it_is_wanted(tmp_path, monkeypatch):
    whole = Whole("w", (9,), DType.FLOAT32)
    records = write(tmp_path, [whole.saved(0, 3)], [whole.saved(3, 6)], [whole.saved(6, 9)])
    compared = []
    monkeypatch.setattr(slices, "require_intact", lambda folder, record: compared.append(record))
    found = Shards(tmp_path, manifest(records))
    assert compared == []
    for start, stop in [(0, 2), (1, 3), (3, 5), (2, 4)]:
        found.read(whole.wanted(start, stop), (WEIGHTS,))
    assert compared == records[:2]
    found.verify()
    found.verify()
    assert compared == records


def test_a_file_that_is_missing_or_cut_off_is_found(tmp_path):
    whole = Whole("w", (3,), DType.FLOAT64)
    records = write(tmp_path, [whole.saved(0, 2)], [whole.saved(2, 3)])
    path = tmp_path / records[1].name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="it is cut off or changed"):
        Shards(tmp_path, manifest(records))
    path.unlink()
    with pytest.raises(CheckpointError, match="is not there"):
        Shards(tmp_path, manifest(records))


GOOD = ["w", 0, 2, 1, 1, [], []]
WRONG = {
    "no JSON": "{",
    "a number": "7",
    "a table": json.dumps({"w": GOOD}),
    "too few entries": json.dumps([GOOD[:-1]]),
    "a key that is a list": json.dumps([[["w"], *GOOD[1:]]]),
    "a key that is a truth value": json.dumps([[True, *GOOD[1:]]]),
    "a negative start": json.dumps([["w", -1, *GOOD[2:]]]),
    "a start that is text": json.dumps([["w", "0", *GOOD[2:]]]),
    "a count that is no whole number": json.dumps([["w", 0, 2.5, *GOOD[3:]]]),
    "updates that are a truth value": json.dumps([["w", 0, 2, 1, True, [], []]]),
    "scalars that are none": json.dumps([["w", 0, 2, 1, 1, 7, []]]),
    "scalars of text": json.dumps([["w", 0, 2, 1, 1, ["x"], []]]),
    "a scalar without end": '[["w", 0, 2, 1, 1, [1' + "0" * 400 + "], []]]",
    "states that are none": json.dumps([["w", 0, 2, 1, 1, [], 7]]),
    "nested without end": "[" * 100_000,
}


@each("told", WRONG.values())
def test_what_a_file_says_of_its_slices_is_not_believed(tmp_path, told):
    arrays = [Tensor('"w"[0:2]/weight', DType.FLOAT32, (2,), lambda: np.zeros(2, np.float32))]
    record = write_tensors(tmp_path, "server-0", arrays, {SLICES: told})
    with pytest.raises(CheckpointError, match="is damaged: its slices are not readable"):
        Shards(tmp_path, manifest([record]))


@each("told", ["7", "[]", "[-1]", '["1"]', "[[1]]", "[true]", "[1, 2]"])
def test_what_a_file_says_of_its_samples_is_not_believed(tmp_path, told):
    arrays = [Tensor('"w"[0:2]/weight', DType.FLOAT32, (2,), lambda: np.zeros(2, np.float32))]
    record = write_tensors(tmp_path, "server-0", arrays, {SLICES: json.dumps([GOOD]), slices.SAMPLES: told})
    with pytest.raises(CheckpointError, match="is damaged: its slices are not readable"):
        Shards(tmp_path, manifest([record]))


def test_a_snapshot_of_an_asynchronous_store_loads_without_its_counters(tmp_path):
    arrays = [Tensor('"w"[0:2]/weight', DType.FLOAT32, (2,), lambda: np.arange(2, dtype=np.float32))]
    by_version_0_2_0 = {SLICES: json.dumps([GOOD]), "kvdist.counted": json.dumps([[[3, 20, 640]]])}
    record = write_tensors(tmp_path, "server-0", arrays, by_version_0_2_0)
    read = Shards(tmp_path, manifest([record])).read(WantedSlice(0, "w", 0, 2, DType.FLOAT32), (WEIGHTS,))
    assert read.weight.tolist() == [0, 1]


def test_a_slice_that_is_told_of_and_not_there_is_an_error(tmp_path):
    record = write_tensors(tmp_path, "server-0", [], {SLICES: json.dumps([GOOD])})
    with pytest.raises(CheckpointError, match=r"does not have elements 0 to 2 of \"w\"\[0:2\]/weight"):
        Shards(tmp_path, manifest([record])).read(WantedSlice(0, "w", 0, 2, DType.FLOAT32), (WEIGHTS,))


def test_a_file_of_arrays_of_somebody_else_has_no_slices(tmp_path):
    record = write_tensors(tmp_path, "server-0", [], {})
    with pytest.raises(CheckpointError, match="its slices are not readable"):
        Shards(tmp_path, manifest([record]))


def test_a_key_that_is_no_text_for_a_file_is_a_sentence(tmp_path):
    whole = Whole("\udc80", (1,), DType.FLOAT32)
    with pytest.raises(CheckpointError, match="cannot be encoded"):
        write(tmp_path, [whole.saved(0, 1)])
    assert list(tmp_path.iterdir()) == []
