"""`pull(average=True)`: the average of the weights that servers keep, and in checkpoints and exports."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdist import ConfigError, RowSparse, kv
from kvdist.checkpoint.export import export
from kvdist.errors import CheckpointError
from kvdist.optimizer import create
from tests.cases import each

HALF_LIFE = 3.0


def stepped(store, steps, dtype=torch.float32, size=100_001, begin=0):
    """A few updates of two keys; the averages of the long one, as NumPy makes them."""
    pull = np.float32(1 - 2 ** (-1 / HALF_LIFE))
    expected, found = store.pull("long").float().numpy().copy(), None
    for step in range(begin, begin + steps):
        grad = torch.from_numpy(np.random.default_rng(step).standard_normal(size)).to(dtype)
        store.push(["long", "short"], [grad, torch.ones(3, dtype=dtype)])
        found = store.pull("long").float().numpy()
        expected = expected - (expected - found) * pull
    return expected


def started(kind="dist", dtype=torch.float32, size=100_001, **more):
    store = kv.create(kind)
    store.set_optimizer(create("sgd", learning_rate=0.25, average_half_life=HALF_LIFE, **more))
    store.init(["long", "short"], [torch.ones(size, dtype=dtype), torch.zeros(3, dtype=dtype)])
    return store


@each("kind", ["dist", "dist_async"])
@each("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a_pull_of_averages_gives_the_bits_of_the_equation(kind, dtype):
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    with started(kind, dtype) as store:
        assert torch.equal(store.pull("long", average=True), torch.ones(100_001, dtype=wide))  # before the first update
        expected = stepped(store, 4, dtype)
        found = store.pull(["short", "long"], average=True)[1]
        assert found.dtype is wide
        if dtype is torch.float64:
            np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5)
        else:
            np.testing.assert_array_equal(found.numpy(), expected)
        out = [torch.zeros(100_001, dtype=torch.float16), torch.zeros(100_001)]
        assert store.pull("long", out, average=True) is None
        assert torch.equal(out[0], found.half()) and torch.equal(out[1], found.float())


def test_a_pull_of_averages_sees_the_pushes_before_it():
    with started() as store:
        store.push("short", torch.ones(3))
        found = store.pull("short", average=True)
        pull = 1 - 2 ** (-1 / HALF_LIFE)
        torch.testing.assert_close(found, torch.full((3,), -0.25 * pull))


def test_values_that_are_replaced_begin_a_new_average():
    with started() as store:
        stepped(store, 2)
        other = torch.full((100_001,), 7.0)
        store.broadcast("long", other, torch.empty(100_001))
        assert torch.equal(store.pull("long", average=True), other)
        assert not torch.equal(store.pull("short", average=True), store.pull("short"))
        expected = stepped(store, 2)
        np.testing.assert_array_equal(store.pull("long", average=True).numpy(), expected)


def test_stores_and_optimizers_that_keep_none_say_so():
    with kv.create("local") as store, pytest.raises(ConfigError, match=r"'local' keeps no averages .*AveragedModel"):
        store.set_optimizer("sgd", average_half_life=3)
    with kv.create("dist") as store:
        store.set_optimizer("sgd")
        store.init("w", torch.ones(3))
        with pytest.raises(ConfigError, match="keeps no averages of the weights: give its optimizer"):
            store.pull("w", average=True)
    with started() as store:
        store.init("counts", np.zeros(3, np.int64))
        with pytest.raises(TypeError, match="'counts' is of int64, which no optimizer updates or averages"):
            store.pull("counts", average=True)


def test_tables_of_rows_are_refused():
    with started() as store, pytest.raises(ValueError, match="table of rows 'rows' are not averaged, and sgd has"):
        store.init("rows", RowSparse.zeros((4, 2), "float32"))


# Checkpoints.


def test_a_checkpoint_has_it_and_goes_on(tmp_path):
    with started() as store:
        stepped(store, 3)
        store.save_checkpoint(tmp_path, 3).result(60)
        expected = store.pull(["long", "short"], average=True)
        stepped(store, 2, begin=3)
        later = store.pull(["long", "short"], average=True)
    with started() as store:
        store.load_checkpoint(tmp_path)
        assert all(map(torch.equal, store.pull(["long", "short"], average=True), expected))
        stepped(store, 2, begin=3)
        assert all(map(torch.equal, store.pull(["long", "short"], average=True), later))


def test_from_a_checkpoint_without_one_it_begins_with_the_weights_and_may_be_left_out(tmp_path):
    kinds = {"with": HALF_LIFE, "without": None}
    for name, half_life in kinds.items():
        with kv.create("dist") as store:
            store.set_optimizer(create("sgd", momentum=0.9, average_half_life=half_life))
            store.init(["long", "short"], [torch.ones(100_001), torch.zeros(3)])
            store.push(["long", "short"], [torch.ones(100_001), torch.ones(3)])
            store.save_checkpoint(tmp_path / name, 1).result(60)
            if half_life is None:
                store.save_optimizer_states(tmp_path / "states")
    with started(momentum=0.9) as store:
        store.load_checkpoint(tmp_path / "without")
        for key in ("long", "short"):
            assert torch.equal(store.pull(key, average=True), store.pull(key))
        with pytest.raises(CheckpointError, match="neither an average of"):
            store.load_optimizer_states(tmp_path / "states")
        stepped(store, 1)
        store.load_checkpoint(tmp_path / "without", states=False)
        assert torch.equal(store.pull("long", average=True), store.pull("long"))
    with kv.create("dist") as store:
        store.set_optimizer(create("sgd", momentum=0.9))
        store.init(["long", "short"], [torch.ones(100_001), torch.zeros(3)])
        store.load_checkpoint(tmp_path / "with")
        assert list(map(len, [state.arrays for state in store.optimizer_states(["long", "short"])])) == [1, 1]


@each("dtype", [torch.float32, torch.bfloat16])
def test_an_export_may_be_of_the_averages(tmp_path, dtype):
    safetensors = pytest.importorskip("safetensors.torch")
    with started(dtype=dtype) as store:
        stepped(store, 3, dtype)
        store.save_checkpoint(tmp_path, 3).result(60)
        expected = store.pull(["long", "short"], average=True)
        weights = store.pull(["long", "short"])
    export(tmp_path, tmp_path / "averages.safetensors", average=True)
    export(tmp_path, tmp_path / "weights.safetensors")
    found = safetensors.load_file(tmp_path / "averages.safetensors")
    for key, average in zip(("long", "short"), expected, strict=True):
        assert torch.equal(found[key], average.to(dtype))
    assert torch.equal(safetensors.load_file(tmp_path / "weights.safetensors")["long"], weights[0])
    with kv.create("dist") as store:
        store.set_optimizer("sgd")
        store.init("w", torch.ones(3))
        store.save_checkpoint(tmp_path / "without", 1).result(60)
    with pytest.raises(CheckpointError, match="has no averages of the weights"):
        export(tmp_path / "without", tmp_path / "none.safetensors", average=True)
