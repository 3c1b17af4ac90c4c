"""Stores with tables of rows, saved in between and loaded again: as if nothing had happened, whichever store it is."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from kvdist import LazyRows, RowSparse, kv
from kvdist.checkpoint.format import NAME, read_manifest
from kvdist.errors import CheckpointError
from tests.cases import each, pairs

STORES = ["local", "dist", "dist_async"]
ROWS = 211
LAZY_ROWS = 10**9
BEGINS = "normal(0.05,seed=3)"
LAZY = {"lazy_update": True}
RULES = {
    "plain": ("sgd", {"learning_rate": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01, **LAZY}),
    "adam": ("adam", {"learning_rate": 0.01, **LAZY}),
    "adagrad": ("adagrad", {"learning_rate": 0.1}),
    "rows": ("groupadagrad", {"learning_rate": 0.1}),
    "numbers beside the arrays": ("nadam", {"learning_rate": 0.01, **LAZY}),
    "follows the weight": ("dcasgd", {"learning_rate": 0.1, "momentum": 0.9, **LAZY}),
    "no rule": (None, {}),
}
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ACROSS = [("local", "dist"), ("dist", "local")]


def rows_of(seed, count, rows, dtype, far=1):
    generator = np.random.default_rng(seed)
    ids = np.sort(generator.choice(rows, count, replace=False)) * far
    return RowSparse(ids, torch.from_numpy(generator.standard_normal((count, 3))).to(dtype), (rows * far, 3))


def started(kind, rule=RULES["adagrad"], dtype=torch.float32, seed=0):
    """A store with an array, a table all of whose rows exist, and a lazy one; the seed says with which values."""
    store = kv.create(kind)
    name, numbers = rule
    if name is not None:
        store.set_optimizer(name, **numbers)
    store.init("array", torch.from_numpy(np.random.default_rng([seed]).standard_normal((7, 3))).to(dtype))
    store.init("eager", rows_of(seed, ROWS, ROWS, dtype))
    store.init("lazy", LazyRows((LAZY_ROWS, 3), str(dtype).removeprefix("torch."), BEGINS))
    return store


def step(store, number, dtype=torch.float32):
    store.push("array", torch.from_numpy(np.random.default_rng(number).standard_normal((7, 3))).to(dtype))
    store.push("eager", rows_of(10 * number, 17, ROWS, dtype))
    store.push("lazy", rows_of(10 * number + 1, 19, 100, dtype, LAZY_ROWS // 100))


def bits(store):
    """All values, byte by byte; of the lazy table those that are ever touched and some between them."""
    found = [store.pull("array")]
    for key, ids in (("eager", np.arange(ROWS)), ("lazy", np.arange(0, LAZY_ROWS, LAZY_ROWS // 200))):
        found.append(torch.as_tensor(store.row_sparse_pull(key, row_ids=ids).values))
    return [as_bytes(value) for value in found]


def as_bytes(value):
    return value.contiguous().view(torch.uint8).numpy().tobytes()


def course(store, directory, dtype=torch.float32):
    """Two steps, a save, two more: what was there after each of the last two."""
    for number in (1, 2):
        step(store, number, dtype)
    saving = store.save_checkpoint(directory, 2, state={"epoch": 3})
    step(store, 3, dtype)  # before anybody waits for it
    later = [bits(store)]
    assert saving.result(60) == directory / "step-2"
    step(store, 4, dtype)
    return [*later, bits(store)]


def assert_goes_on(store, directory, expected, dtype=torch.float32):
    assert store.load_checkpoint(directory).step == 2
    for number, wanted in zip((3, 4), expected, strict=True):
        step(store, number, dtype)
        assert bits(store) == wanted


@each("rule, before, after", [*((rule, *way) for rule in RULES for way in ACROSS), ("adam", "dist", "dist_async")])
def test_tables_go_on_bit_by_bit_in_the_same_store_and_in_another(tmp_path, before, after, rule):
    with started(before, RULES[rule]) as store:
        expected = course(store, tmp_path)
        assert_goes_on(store, tmp_path, expected)
    with started(after, RULES[rule], seed=9) as store:
        step(store, 77)
        assert_goes_on(store, tmp_path, expected)


@each("dtype, multi_precision, way", pairs(TYPES, [False, True], ACROSS))
def test_tables_go_on_in_every_type_with_masters_and_without(tmp_path, dtype, multi_precision, way):
    before, after = way
    rule = ("adam", {"learning_rate": 0.001, "multi_precision": multi_precision, **LAZY})
    with started(before, rule, dtype) as store:
        expected = course(store, tmp_path, dtype)
    with started(after, rule, dtype, seed=9) as store:
        assert_goes_on(store, tmp_path, expected, dtype)


@each("kind", STORES)
def test_the_rows_of_a_lazy_table_cost_as_much_on_the_disk_as_there_are(tmp_path, kind):
    with started(kind, RULES["adam"]) as store:
        step(store, 1)
        folder = store.save_checkpoint(tmp_path, 1).result(60)
        assert sum(file.nbytes for file in read_manifest(folder).files) < 30_000
        assert [one.form for one in read_manifest(folder).keys if one.form] == ["rows", BEGINS]


@each("kind", STORES)
def test_a_table_that_was_never_pushed_is_as_it_began(tmp_path, kind):
    with started(kind, RULES["adam"]) as store:
        began = bits(store)
        store.save_checkpoint(tmp_path, 1).result(60)
        step(store, 1)
        wanted = bits(store)
        step(store, 2)
        store.load_checkpoint(tmp_path)
        assert bits(store) == began
        step(store, 1)
        assert bits(store) == wanted


@each("kind", STORES)
def test_without_states_the_optimizer_remembers_what_it_did(tmp_path, kind):
    with started(kind, RULES["momentum"]) as store, started("local", RULES["plain"], seed=9) as other:
        step(store, 1)
        store.save_checkpoint(tmp_path, 1).result(60)
        wanted = bits(store)
        step(store, 2)
        changed = bits(store)
        store.load_checkpoint(tmp_path, states=False)
        assert bits(store) == wanted
        step(store, 2)
        assert all(one != two for one, two in zip(bits(store), changed, strict=True)), "momentum has gone on"
        step(other, 5)
        other.load_checkpoint(tmp_path, states=False)
        assert bits(other) == wanted


@each("kind", STORES)
@each("rule", ["adam", "rows", "follows the weight", "numbers beside the arrays"])
def test_states_of_tables_alone_come_back_with_the_values_that_they_belong_to(tmp_path, kind, rule):
    with started(kind, RULES[rule]) as store:
        step(store, 1)
        store.save_checkpoint(tmp_path / "run", 1).result(60)
        store.save_optimizer_states(tmp_path / "states")
        step(store, 2)
        wanted = bits(store)
        step(store, 3)
        store.load_checkpoint(tmp_path / "run", states=False)
        store.load_optimizer_states(tmp_path / "states")
        step(store, 2)
        assert bits(store) == wanted


@each("kind", ["local", "dist"])
def test_states_bring_their_optimizer_to_a_store_of_tables_without_one(tmp_path, kind):
    with started(kind) as store:
        step(store, 1)
        store.save_checkpoint(tmp_path / "run", 1).result(60)
        store.save_optimizer_states(tmp_path / "states")
        step(store, 2)
        wanted = bits(store)
    with started(kind, RULES["no rule"], seed=9) as store:
        store.load_optimizer_states(tmp_path / "states")
        store.load_checkpoint(tmp_path / "run")
        step(store, 2)
        assert bits(store) == wanted


@each("kind", ["local", "dist"])
def test_a_table_and_an_array_of_the_same_values_can_be_loaded_as_each_other(tmp_path, kind):
    ids, first = np.arange(40), np.random.default_rng(1).standard_normal((40, 3)).astype(np.float32)
    grads = [np.random.default_rng(n).standard_normal((40, 3)).astype(np.float32) for n in (2, 3)]

    def opened(value):
        store = kv.create(kind)
        store.set_optimizer("adam", learning_rate=0.1)
        store.init("w", value)
        return store

    def value_of(store, is_table):
        return (store.row_sparse_pull("w", row_ids=ids).values if is_table else store.pull("w")).tobytes()

    with opened(first) as array, opened(RowSparse(ids, first)) as table:
        for one, other, folder in ((array, table, "a"), (table, array, "b")):
            one.push("w", grads[0])
            one.save_checkpoint(tmp_path / folder, 1).result(60)
            one.push("w", grads[1])
            other.push("w", grads[1])  # gone when it is loaded
            other.load_checkpoint(tmp_path / folder)
            other.push("w", grads[1])
            assert value_of(one, one is table) == value_of(other, other is table)


# Loads that are refused.


def table(shape=(40, 3), begins="zeros", dtype="float32"):
    return LazyRows(shape, dtype, begins)


OTHERS = {
    "another initialiser": (table(), table(begins="normal(0.01)"), "rows that begin as zeros in .* begin as normal"),
    "another seed": (table(begins="normal(0.01,seed=1)"), table(begins="normal(0.01,seed=2)"), "seed=1.*seed=2"),
    "another shape": (table(), table((41, 3)), r"shape \(40, 3\).*shape \(41, 3\)"),
    "another type": (table(), table(dtype="float64"), "dtype float32.*dtype float64"),
    "an array": (table(), np.zeros((40, 3), np.float32), "rows that begin as zeros in the checkpoint, but shape"),
    "a table of an array": (np.zeros((40, 3), np.float32), table(), "but shape .* rows that begin as zeros in this"),
    "all rows": (table(), RowSparse(np.arange(40), np.zeros((40, 3), np.float32)), "rows that begin as zeros"),
    "some rows": (RowSparse(np.arange(40), np.zeros((40, 3), np.float32)), table(), "rows that begin as zeros"),
}


@each("saved, present, sentence", OTHERS.values())
@each("kind", ["local", "dist"])
def test_a_table_of_another_kind_is_refused_and_nothing_changes(tmp_path, kind, saved, present, sentence):
    with kv.create(kind) as store, kv.create(kind) as other:
        store.init("w", saved)
        other.init("w", present)
        store.save_checkpoint(tmp_path, 1).result(60)
        values = other.pull("w", ignore_sparse=False)
        with pytest.raises(CheckpointError, match=f"key 'w' has .*{sentence}"):
            other.load_checkpoint(tmp_path)
        after = other.pull("w", ignore_sparse=False)
        assert np.array_equal(getattr(values, "values", values), getattr(after, "values", after))


@each("kind", ["local", "dist"])
def test_states_of_another_rule_are_refused_for_tables_too(tmp_path, kind):
    with started(kind, RULES["adam"]) as store, started(kind, RULES["adagrad"], seed=9) as other:
        step(store, 1)
        store.save_checkpoint(tmp_path, 1).result(60)
        before = bits(other)
        with pytest.raises(CheckpointError, match="holds the states of adam.* but this store updates with adagrad"):
            other.load_checkpoint(tmp_path)
        assert bits(other) == before


@each("kind", STORES)
def test_a_damaged_file_changes_no_table(tmp_path, kind):
    with started(kind) as store:
        step(store, 1)
        folder = store.save_checkpoint(tmp_path, 1).result(60)
        (path,) = folder.glob("server-0-*")
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        step(store, 2)
        before = bits(store)
        with pytest.raises(CheckpointError, match="server-0-.* checksum"):
            store.load_checkpoint(tmp_path)
        assert bits(store) == before


@pytest.mark.parametrize("kind", STORES)
def test_a_full_disk_leaves_nothing_of_tables_and_training_goes_on(tmp_path, kind, monkeypatch, caplog):
    with started(kind) as store, started("local") as undisturbed:
        step(store, 1)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched, caplog.at_level(logging.CRITICAL, "kvdist"):
            patched.setattr("kvdist.checkpoint.files.os.fsync", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                store.save_checkpoint(tmp_path / "run", 1).result(60)
        assert not list((tmp_path / "run").rglob("*.*")), "neither files nor what was unfinished"
        step(store, 2)
        for number in (1, 2):
            step(undisturbed, number)
        assert bits(store) == bits(undisturbed)
        assert (store.save_checkpoint(tmp_path / "run", 2).result(60) / NAME).exists()
