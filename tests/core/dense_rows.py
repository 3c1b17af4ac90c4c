"""Rounds for blocks of rows, and what a dense parameter makes of them: the oracle of the tests of row blocks."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.checkpoint.snapshot import EVERYTHING
from kvdist.core.server.table_rows import TableRows
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Updater, create
from kvdist.optimizer.registry import registered
from kvdist.optimizer.states import SliceState

F32, F64, F16, BF16 = DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16
RULES = [name for name in registered() if not create(name).needs_norms]
NUMBERS = {"dcasgd": {"momentum": 0.5}, "rmsprop": {"centered": True}}
VARIANTS = [(name, NUMBERS.get(name, {})) for name in RULES] + [
    ("sgd", {"momentum": 0.9}),
    ("nag", {"momentum": 0.0}),
    ("signum", {"momentum": 0.0}),
    ("signum", {"momentum": 0.0, "wd_lh": 0.1}),
    ("rmsprop", {"clip_weights": 0.5}),
    ("dcasgd", {}),
]
IDS = [name + "".join(f"-{key}-{value}" for key, value in numbers.items()) for name, numbers in VARIANTS]
every_rule = pytest.mark.parametrize(("name", "numbers"), VARIANTS, ids=IDS)
PARTIAL = [(name, numbers) for name, numbers in VARIANTS if name != "sgld"]
"""Rules that can leave rows out; sgld moves every element."""
TYPES = [(F32, False), (F64, False), (F16, False), (F16, True), (BF16, False), (BF16, True)]
"""Element types, and whether float32 masters are kept."""


def stored(values, dtype):
    if dtype in (F16, BF16):
        return REFERENCE.from_float32(np.ascontiguousarray(values, np.float32).reshape(-1), dtype)
    return np.ascontiguousarray(values).astype(dtype.storage).reshape(-1)


def as_bits(values):
    return values.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[values.itemsize])


def wd_of(name, wd):
    return 0.0 if name == "groupadagrad" else wd


def ids_of(rng, first, stop, count):
    return np.sort(rng.choice(np.arange(first, stop), count, replace=False)).astype(np.int64)


class Dense:
    """The same rows as a stretch of a dense parameter."""

    def __init__(self, key, shape, dtype, first, stop, optimizer, weight):
        self.row_length = int(np.prod(shape[1:]))
        self.extent = Extent(key, shape, first * self.row_length)
        self.dtype, self.first, self.rows = dtype, first, stop - first
        self.updater = None if optimizer is None else Updater(optimizer)
        self.weight = weight.copy()

    def spread(self, ids, values):
        dense = np.zeros((self.rows, self.row_length), self.dtype.storage)
        dense[ids - self.first] = values.reshape(len(ids), self.row_length)
        return dense.reshape(-1)

    def update(self, contributions, scales, lr, wd, touched_only=False):
        dense = [self.spread(*one) for one in contributions]
        out = np.empty_like(self.weight)
        if self.updater is None:
            REFERENCE.weighted_sum(dense, scales, self.dtype, out)
            self.weight = out
            return
        if "w" not in self.updater.states:
            fresh = SliceState.fresh(self.updater.optimizer, self.weight, self.dtype, self.extent, REFERENCE)
            self.updater.restore("w", fresh)
        before = self.updater.states["w"].copy()
        self.updater.update("w", self.weight, dense, scales, self.dtype, out, lr, wd, self.extent)
        if touched_only:
            self.take_back(contributions, before, out)
        self.weight = out

    def take_back(self, contributions, before, out):
        """Rows that nobody pushed are as they were."""
        touched = np.zeros(self.rows, bool)
        for ids, _ in contributions:
            touched[ids - self.first] = True
        after = self.updater.states["w"]
        pairs = [(out, self.weight), *zip(after.arrays, before.arrays, strict=True)]
        if after.master is not None:
            pairs.append((after.master, before.master))
        for new, old in pairs:
            new.reshape(self.rows, -1)[~touched] = old.reshape(self.rows, -1)[~touched]


def rounds_of(rng, dtype, first, stop, row_length):
    """Contributions that hurt: none, one row, all rows, equal ids, disjoint ones, overlapping ones."""
    rows = stop - first
    everything = np.arange(first, stop)
    some = ids_of(rng, first, stop, rows // 2)
    rest = np.setdiff1d(everything, some)
    block = everything[2 : rows - 1]
    lists = [
        [some],
        [some, rest, some],
        [everything, everything],
        [np.zeros(0, np.int64), some],
        [np.zeros(0, np.int64)],
        [ids_of(rng, first, stop, 1), everything, ids_of(rng, first, stop, rows // 3)],
        [block, block],
        [some, ids_of(rng, first, stop, rows // 2)],
    ]
    for ids in lists:
        yield [(one, stored(rng.standard_normal(len(one) * row_length), dtype)) for one in ids]


def scales_of(contributions):
    return [0.5, 1.0, 0.25][: len(contributions)]


def block_of(shape, dtype, first, stop, initializer=None, kernels=REFERENCE, key="w"):
    return TableRows(key, 7, shape, dtype, first, stop, initializer, kernels)


def all_rows(block):
    out = np.empty((block.stop - block.first) * block.row_length, block.dtype.storage)
    block.gather(np.arange(block.first, block.stop), out)
    return out


def image_of(block, optimizer=None):
    return block.saved(0, optimizer, EVERYTHING)


def assert_same(block, dense, exact=True):
    """Weights, and states of the rows that exist, are equal but for the sign of zeros."""
    np.testing.assert_array_equal(as_float(all_rows(block), block.dtype), as_float(dense.weight, block.dtype))
    snapshot = image_of(block, dense.updater and dense.updater.optimizer)
    if dense.updater is None:
        return
    state = dense.updater.states["w"]
    rows = np.arange(dense.rows) if snapshot.ids is None else snapshot.ids - dense.first
    assert (snapshot.state.count, snapshot.state.scalars) == (state.count, state.scalars)
    assert len(snapshot.state.arrays) == len(state.arrays)
    for mine, theirs in zip(snapshot.state.arrays, state.arrays, strict=True):
        np.testing.assert_array_equal(mine, theirs.reshape(dense.rows, -1)[rows].reshape(-1))
    if state.master is not None:
        np.testing.assert_array_equal(snapshot.state.master, state.master.reshape(dense.rows, -1)[rows].reshape(-1))


def as_float(values, dtype):
    return REFERENCE.to_float32(values, dtype) if dtype is BF16 else values


def assert_equal_snapshots(one, other):
    assert one.initializer == other.initializer
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_array_equal(one.weight, other.weight)
    assert (one.state is None) == (other.state is None)
    if one.state is not None:
        assert one.state.history == other.state.history
        for mine, theirs in zip(one.state.arrays, other.state.arrays, strict=True):
            np.testing.assert_array_equal(mine, theirs)
        np.testing.assert_array_equal(one.state.master, other.state.master)
