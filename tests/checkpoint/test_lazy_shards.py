"""Lazy tables in files: the rows that exist, cut in any way, come back in any other, and no others come into being."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.checkpoint.format import Tensor, write_tensors
from kvdist.checkpoint.shards import SLICES, Shards, write_slices
from kvdist.checkpoint.snapshot import EVERYTHING, STATES, WEIGHTS, Manifest, SliceImage, WantedSlice
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.optimizer.states import SliceState
from tests.cases import each

BEGINS = "normal(0.01,seed=3)"
NAMES = ("mean", "variance")


class Table:
    """A lazy table of `count` rows, of which some exist."""

    def __init__(self, count, ids, row=3, by_rows=False, seed=0, dtype=DType.FLOAT16):
        self.count, self.row, self.by_rows, self.dtype = count, row, by_rows, dtype
        self.ids = np.array(sorted(ids), np.int64)
        generator = np.random.default_rng(seed)
        self.weight = generator.integers(0, 1 << 15, (len(ids), row)).astype(np.uint16).view(dtype.storage)
        width = 1 if by_rows else row
        self.states = {name: generator.standard_normal((len(ids), width)).astype(np.float32) for name in NAMES}
        self.master = generator.standard_normal((len(ids), row)).astype(np.float32)

    def inside(self, start, stop):
        return (self.ids >= start) & (self.ids < stop)

    def saved(self, start, stop, updates=3, begins=BEGINS):
        """A slice of these rows."""
        rows = self.inside(start, stop)
        arrays = tuple(array[rows].reshape(-1) for array in self.states.values())
        return SliceImage(
            0,
            "e",
            start * self.row,
            (stop - start) * self.row,
            self.dtype,
            17,
            self.weight[rows].reshape(-1),
            True,
            SliceState(updates, arrays, (0.5,), self.master[rows].reshape(-1)) if updates else None,
            NAMES,
            self.ids[rows],
            begins,
        )

    def wanted(self, start, stop, **changes):
        row = self.row if self.by_rows else 1
        given = {"state_names": NAMES, "row": row, "has_master": True, "has_state": True, "lazy_row": self.row}
        return WantedSlice(7, "e", start * self.row, (stop - start) * self.row, self.dtype, **{**given, **changes})

    def require_equal(self, found, start, stop):
        rows = self.inside(start, stop)
        assert (found.number, found.initializer) == (7, BEGINS)
        assert found.ids.dtype == np.int64 and found.ids.tolist() == self.ids[rows].tolist()
        assert found.weight.tobytes() == self.weight[rows].tobytes()
        for array, name in zip(found.state.arrays, NAMES, strict=True):
            assert array.tobytes() == self.states[name][rows].tobytes()
        assert found.state.master.tobytes() == self.master[rows].tobytes()
        assert (found.state.count, found.state.scalars) == (3, (0.5,))


def shards(folder, *servers):
    records = [write_slices(folder, f"server-{rank}", kept, "", 0) for rank, kept in enumerate(servers)]
    return Shards(folder, manifest(records))


def manifest(records):
    return Manifest(1, EVERYTHING, "sync", True, None, 1, len(records), (), tuple(records))


@st.composite
def cuts(draw, count):
    """Ends of ranges of rows; some may be empty, as where there are more servers than rows."""
    return [0, *sorted(draw(st.lists(st.integers(0, count), max_size=5))), count]


@st.composite
def resharding(draw):
    count = draw(st.sampled_from([1, 2, 7, 1000, 10**12]))
    ids = draw(st.sets(st.integers(0, count - 1), max_size=12))
    table = Table(count, ids, draw(st.sampled_from([1, 3])), draw(st.booleans()), draw(st.integers(0, 9)))
    return table, draw(cuts(count)), draw(cuts(count))


@given(resharding())
@settings(max_examples=100)
def test_however_a_lazy_table_was_cut_its_rows_come_back_however_it_is_cut_now(tmp_path_factory, case):
    table, before, after = case
    folder = tmp_path_factory.mktemp("cut")
    # Empty ranges of one place have one name in a file, so each server has one slice.
    found = shards(folder, *([table.saved(*ends)] for ends in itertools.pairwise(before)))
    for start, stop in itertools.pairwise(after):
        table.require_equal(found.read(table.wanted(start, stop), EVERYTHING), start, stop)
    assert found.num_rows("e") == len(table.ids) and found.initializer("e") == BEGINS
    whole = found.rows("e", table.count * table.row, table.row, table.dtype, (WEIGHTS,))
    assert whole.ids.tolist() == table.ids.tolist() and whole.weight.tobytes() == table.weight.tobytes()


def test_weights_alone_and_states_alone_come_with_their_rows(tmp_path):
    table = Table(100, [4, 50])
    found = shards(tmp_path, [table.saved(0, 100)])
    weights, states = (found.read(table.wanted(0, 100), (one,)) for one in (WEIGHTS, STATES))
    assert weights.state is None and states.weight is None and states.state.count == 3
    assert weights.ids.tolist() == states.ids.tolist() == [4, 50]


def test_rows_that_were_never_updated_have_no_states(tmp_path):
    table = Table(100, [4, 50])
    found = shards(tmp_path, [table.saved(0, 100, updates=0)]).read(table.wanted(0, 100), EVERYTHING)
    assert found.state is None and found.has_state and found.ids.tolist() == [4, 50]


def test_a_file_of_a_server_that_is_missing_is_noticed_though_its_rows_need_not_exist(tmp_path):
    table = Table(100, [4])
    with pytest.raises(CheckpointError, match="has no element 150 of key 'e': a file of a server is not in it"):
        shards(tmp_path, [table.saved(0, 50)]).read(table.wanted(0, 100), EVERYTHING)


def test_a_lazy_table_is_not_read_as_a_whole_array_nor_the_other_way_round(tmp_path):
    table = Table(4, range(4), row=1, dtype=DType.FLOAT16)
    lazy, whole = tmp_path / "lazy", tmp_path / "whole"
    found = shards(lazy, [table.saved(0, 4)])
    with pytest.raises(CheckpointError, match="has key 'e' as a lazy table, which is whole here"):
        found.read(table.wanted(0, 4, lazy_row=0), EVERYTHING)
    array = SliceImage(0, "e", 0, 4, DType.FLOAT16, 1, table.weight.reshape(-1))
    with pytest.raises(CheckpointError, match="has key 'e' as whole, which is a lazy table here"):
        shards(whole, [array]).read(table.wanted(0, 4), EVERYTHING)


def test_pieces_that_begin_otherwise_are_an_error(tmp_path):
    table = Table(10, [1, 7])
    found = shards(tmp_path, [table.saved(0, 5)], [table.saved(5, 10, begins="zeros")])
    with pytest.raises(CheckpointError, match="disagree on the initial value of the rows of key 'e'"):
        found.read(table.wanted(0, 10), EVERYTHING)


@each("ids", [[3, 3], [4, 3], [-1, 2], [0, 10], [-(2**63), 2**63 - 1]])
def test_rows_that_do_not_ascend_within_their_slice_are_damage(tmp_path, ids):
    table = Table(10, [1, 7])
    table.ids, table.inside = np.array(ids), lambda *_: slice(None)
    with pytest.raises(CheckpointError, match=r"the rows of \"e\"\[0:30\] do not ascend from 0 to 9"):
        shards(tmp_path, [table.saved(0, 10)]).read(table.wanted(0, 10), EVERYTHING)


def file_of(folder, arrays, told):
    tensors = [Tensor(f'"e"[0:6]/{name}', DType(code), (len(a),), lambda a=a: a) for name, code, a in arrays]
    return Shards(folder, manifest([write_tensors(folder, "server-0", tensors, {SLICES: json.dumps([told])})]))


GOOD = ["e", 0, 6, 1, 0, [], [], BEGINS]
WEIGHT = ("weight", DType.FLOAT32, np.zeros(4, np.float32))


@each(
    "indices, sentence",
    [
        ([], "does not say which rows"),
        ([("indices", DType.INT32, np.array([0, 1], np.int32))], "does not have elements 0 to 2 of .*/indices"),
        ([("indices", DType.INT64, np.array([0, 1, 2]))], "does not have elements 0 to 6 of .*/weight"),
    ],
)
def test_rows_that_are_not_what_the_arrays_have_are_damage(tmp_path, indices, sentence):
    found = file_of(tmp_path, [WEIGHT, *indices], GOOD)
    with pytest.raises(CheckpointError, match=sentence):
        found.read(WantedSlice(0, "e", 0, 6, DType.FLOAT32, lazy_row=2), (WEIGHTS,))


def test_a_slice_that_ends_within_a_row_is_damage(tmp_path):
    found = file_of(tmp_path, [WEIGHT, ("indices", DType.INT64, np.array([0]))], GOOD)
    with pytest.raises(CheckpointError, match="is cut within a row"):
        found.read(WantedSlice(0, "e", 0, 4, DType.FLOAT32, lazy_row=4), (WEIGHTS,))


@each("begins", ["__import__('os')", 7, None, "", ["zeros"], "zeros\n"])
def test_what_rows_begin_as_is_not_believed(tmp_path, begins):
    with pytest.raises(CheckpointError, match="its slices are not readable"):
        file_of(tmp_path, [WEIGHT], [*GOOD[:-1], begins])
    with pytest.raises(CheckpointError, match="its slices are not readable"):
        file_of(tmp_path, [WEIGHT], [*GOOD, "zeros"])


def test_a_table_with_fewer_rows_than_servers_comes_back_on_all_of_them(tmp_path):
    weight = np.arange(6, dtype=np.float32)
    saved = [SliceImage(0, "t", 3 * i, 3, DType.FLOAT32, 1, weight[3 * i : 3 * i + 3]) for i in (0, 1)]
    nothing = SliceImage(0, "t", 6, 0, DType.FLOAT32, 1, weight[:0])
    found = shards(tmp_path, *([one] for one in (*saved, nothing)))
    for start, stop in ((0, 6), (0, 0), (3, 3), (6, 6), (3, 6)):
        wanted = WantedSlice(0, "t", start, stop - start, DType.FLOAT32)
        assert found.read(wanted, (WEIGHTS,)).weight.tolist() == weight[start:stop].tolist()
