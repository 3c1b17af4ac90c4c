"""A store saved in between and loaded again goes on as if nothing had happened, whichever store it is."""

from __future__ import annotations

import json
import logging
import os
import shutil

import numpy as np
import pytest
import torch

from kvdist import KVStore, StoreClosed, kv, lr_scheduler, optimizer
from kvdist.checkpoint.folders import complete_steps
from kvdist.checkpoint.format import NAME, read_manifest
from kvdist.errors import CheckpointError, KeyNotInitialised
from tests.cases import each, pairs

STORES = ["local", "dist", "dist_async"]
SHAPES = {"w": (7, 5), "bias": (5,), "scalar": (), "empty": (0, 3), "long": (70_001,)}
MATRICES = {"w": (7, 5), "empty": (0, 3), "tall": (20_001, 3), "thin": (9, 1)}
RULES = {
    "plain": ("sgd", {"learning_rate": 0.1}),
    "momentum": ("sgd", {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}),
    "adam": ("adam", {"learning_rate": 0.01}),
    "lars": ("lars", {"learning_rate": 0.1, "momentum": 0.9}),
    "lamb": ("lamb", {"learning_rate": 0.01}),
    "rows": ("groupadagrad", {"learning_rate": 0.1}),
    "numbers beside the arrays": ("nadam", {"learning_rate": 0.01}),
    "noise": ("sgld", {"learning_rate": 0.01, "seed": 5}),
    "follows the weight": ("dcasgd", {"learning_rate": 0.1, "momentum": 0.9}),
    "a schedule": ("sgd", {"lr_scheduler": lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)}),
    "no rule": (None, {}),
}
TYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
ACROSS = [("local", "dist"), ("dist", "local")]


def random(shape, seed, dtype):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).to(dtype)


def started(kind, rule=("sgd", {}), dtype=torch.float32, seed=0, shapes=SHAPES):
    """A store with keys; the seed says with which values."""
    store = kv.create(kind)
    name, numbers = rule
    if name is not None:
        store.set_optimizer(optimizer.create(name, **numbers))
    store.init(list(shapes), [random(shape, 100 * seed + n, dtype) for n, shape in enumerate(shapes.values())])
    return store


def step(store, number, dtype=torch.float32, shapes=SHAPES):
    store.push(list(shapes), [random(shape, 1000 * number + n, dtype) for n, shape in enumerate(shapes.values())])


def bits(store, shapes=SHAPES):
    """All values, byte by byte."""
    return {key: value.numpy().tobytes() for key, value in zip(shapes, as_bytes(store, shapes), strict=True)}


def as_bytes(store, shapes):
    for value in store.pull(list(shapes)):
        yield value.reshape(-1).contiguous().view(torch.uint8) if value.numel() else value.float()


def course(store, directory, dtype=torch.float32, shapes=SHAPES):
    """Two steps, a save, two more: what was there after each of the last two."""
    for number in (1, 2):
        step(store, number, dtype, shapes)
    saving = store.save_checkpoint(directory, 2, state={"epoch": 3})
    step(store, 3, dtype, shapes)  # before anybody waits for it
    later = [bits(store, shapes)]
    assert saving.result(60) == directory / "step-2"
    step(store, 4, dtype, shapes)
    return [*later, bits(store, shapes)]


def assert_goes_on(store, directory, expected, dtype=torch.float32, shapes=SHAPES):
    loaded = store.load_checkpoint(directory)
    assert (loaded.step, loaded.folder) == (2, directory / "step-2")
    assert (loaded.state, loaded.states) == ({"epoch": 3}, {0: {"epoch": 3}})
    for number, wanted in zip((3, 4), expected, strict=True):
        step(store, number, dtype, shapes)
        assert bits(store, shapes) == wanted


@each("rule", RULES)
@each("before, after", ACROSS)
def test_it_goes_on_bit_by_bit_in_the_same_store_and_in_another(tmp_path, before, after, rule):
    shapes = MATRICES if rule == "rows" else SHAPES
    with started(before, RULES[rule], shapes=shapes) as store:
        expected = course(store, tmp_path, shapes=shapes)
        assert_goes_on(store, tmp_path, expected, shapes=shapes)
    with started(after, RULES[rule], seed=9, shapes=shapes) as store:
        step(store, 77, shapes=shapes)
        assert_goes_on(store, tmp_path, expected, shapes=shapes)


@each("dtype, multi_precision, way", pairs(TYPES, [False, True], ACROSS))
def test_it_goes_on_in_every_type_with_masters_and_without(tmp_path, dtype, multi_precision, way):
    before, after = way
    rule = ("adam", {"learning_rate": 0.001, "multi_precision": multi_precision})
    with started(before, rule, dtype) as store:
        expected = course(store, tmp_path, dtype)
    with started(after, rule, dtype, seed=9) as store:
        assert_goes_on(store, tmp_path, expected, dtype)


@each("kind", STORES)
def test_the_values_are_those_of_the_save(tmp_path, kind):
    with started(kind) as store:
        step(store, 1)
        wanted = bits(store)
        store.save_checkpoint(tmp_path, 0).result(60)
        step(store, 2)
        assert bits(store) != wanted
        checkpoint = store.load_checkpoint(tmp_path, 0)
        assert bits(store) == wanted
        assert (checkpoint.exact, checkpoint.state, checkpoint.states) == (kind != "dist_async", None, {})


@each("kind", STORES)
def test_types_that_no_optimizer_updates_are_saved_too(tmp_path, kind):
    values = [torch.tensor([1, -(2**62)]), torch.tensor([200, 7], dtype=torch.uint8), torch.zeros(0, dtype=torch.int8)]
    others = [torch.ones_like(value) for value in values]
    with kv.create(kind) as store:
        store.init([1, 2, 3], values)
        store.save_checkpoint(tmp_path, 1).result(60)
        store.broadcast([1, 2, 3], others, others)
        store.load_checkpoint(tmp_path)
        assert [value.tolist() for value in store.pull([1, 2, 3])] == [value.tolist() for value in values]


@each("kind", STORES)
def test_states_that_were_never_used_are_those_of_the_beginning(tmp_path, kind):
    with started(kind, RULES["adam"]) as store:
        store.save_checkpoint(tmp_path, 1).result(60)
        step(store, 1)
        wanted = bits(store)
        step(store, 2)
        store.load_checkpoint(tmp_path)
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
        assert bits(store) != changed
        other.load_checkpoint(tmp_path, states=False)
        assert bits(other) == wanted


@each("kind", STORES)
def test_the_newest_step_is_loaded_or_the_one_that_is_named(tmp_path, kind):
    with started(kind) as store:
        seen = {}
        for number in (1, 10, 9):
            step(store, number)
            seen[number] = bits(store)
            store.save_checkpoint(tmp_path, number, keep=2).result(60)
        assert complete_steps(tmp_path) == [9, 10]
        assert store.load_checkpoint(tmp_path).step == 10 and bits(store) == seen[10]
        assert store.load_checkpoint(str(tmp_path), 9).step == 9 and bits(store) == seen[9]


@each("kind", STORES)
def test_a_step_may_be_saved_again_and_saves_follow_each_other(tmp_path, kind):
    with started(kind) as store:
        futures = []
        for number in range(4):
            step(store, number)
            futures.append(store.save_checkpoint(tmp_path, 5, state=number))
        wanted = bits(store)
        assert [future.result(60) for future in futures] == [tmp_path / "step-5"] * 4
        step(store, 9)
        assert store.load_checkpoint(tmp_path).state == 3 and bits(store) == wanted
        assert len(list((tmp_path / "step-5").iterdir())) == 3


@pytest.mark.parametrize("kind", STORES)
def test_a_relative_path_is_one_from_here(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    with started(kind) as store:
        assert store.save_checkpoint("run", 1).result(60) == tmp_path / "run" / "step-1"
        assert store.load_checkpoint("run").folder == tmp_path / "run" / "step-1"


# States alone.


@each("before, after", [("local", "dist"), ("dist", "local"), ("dist_async", "dist")])
@each("rule", ["momentum", "adam", "rows", "lars", "plain"])
def test_states_alone_come_back_and_the_weights_stay(tmp_path, before, after, rule):
    shapes = MATRICES if rule == "rows" else SHAPES
    with started(before, RULES[rule], shapes=shapes) as store:
        step(store, 1, shapes=shapes)
        weights = store.pull(list(shapes))
        store.save_optimizer_states(tmp_path / "states")
        step(store, 2, shapes=shapes)
        wanted = bits(store, shapes)
    with started(after, RULES[rule], seed=9, shapes=shapes) as store:
        store.broadcast(list(shapes), weights, weights)
        present = bits(store, shapes)
        store.load_optimizer_states(tmp_path / "states")
        assert bits(store, shapes) == present
        step(store, 2, shapes=shapes)
        assert bits(store, shapes) == wanted


@each("kind", STORES)
def test_states_of_an_unknown_key_are_refused_and_nothing_is_replaced(kind):
    with started(kind, RULES["adam"]) as store:
        step(store, 1)
        first = next(iter(SHAPES))
        for call in (
            lambda: store.optimizer_states([first, "unknown"]),
            lambda: store.replace_optimizer_states([first, "unknown"], [None, None]),
        ):
            with pytest.raises(KeyNotInitialised, match="key 'unknown' has not been initialised"):
                call()
        assert store.optimizer_states([first])[0] is not None


@each("kind", STORES)
def test_a_store_without_an_optimizer_gets_the_one_that_was_saved(tmp_path, kind):
    with started("local", RULES["adam"]) as store:
        step(store, 1)
        weights = store.pull(list(SHAPES))
        store.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
        store.save_optimizer_states(tmp_path / "states")
        step(store, 2)
        wanted = bits(store)
    with started(kind, (None, {}), seed=9) as store:
        store.broadcast(list(SHAPES), weights, weights)
        store.load_optimizer_states(str(tmp_path / "states"))
        step(store, 2)
        assert bits(store) == wanted


@each("kind", STORES)
def test_states_are_no_checkpoint_and_a_checkpoint_has_states(tmp_path, kind):
    with started(kind, RULES["adam"]) as store:
        store.save_optimizer_states(tmp_path / "run" / "step-3")
        with pytest.raises(CheckpointError, match="the checkpoint has no weights, only states"):
            store.load_checkpoint(tmp_path / "run")
        step(store, 1)
        folder = store.save_checkpoint(tmp_path / "run", 4).result(60)
        store.load_optimizer_states(folder)


# Bad input.


@each("kind", STORES)
@each("number", [-1, True, "1", 1.0, None, 1 << 63, np.float32(1)])
def test_a_step_that_is_no_count_is_refused(tmp_path, kind, number):
    with started(kind) as store:
        with pytest.raises(ValueError, match="the step of a checkpoint is .*; it must be a number from 0"):
            store.save_checkpoint(tmp_path, number)
        if number is not None:
            with pytest.raises(ValueError, match="the step of a checkpoint is .*; it must be a number from 0"):
                store.load_checkpoint(tmp_path, number)
    assert list(tmp_path.iterdir()) == []


@each("kind", STORES)
@each("keep", [0, -1, True, "1", 1.5, 1 << 32])
def test_a_number_to_keep_that_keeps_nothing_is_refused(tmp_path, kind, keep):
    with started(kind) as store, pytest.raises(ValueError, match="it is the number of newest checkpoints to keep"):
        store.save_checkpoint(tmp_path, 1, keep=keep)
    assert list(tmp_path.iterdir()) == []


@each("kind", STORES)
def test_a_state_that_json_cannot_say_is_refused(tmp_path, kind):
    with started(kind) as store:
        with pytest.raises(TypeError, match="the state of a checkpoint must consist of"):
            store.save_checkpoint(tmp_path, 1, state=torch.ones(3))
        with pytest.raises(TypeError, match="names must be a dict of key to name"):
            store.save_checkpoint(tmp_path, 1, names=["w"])
    assert list(tmp_path.iterdir()) == []


@each("kind", STORES)
@each("folder", ["a\0b", "x" * 2000, "\udc80"])
def test_a_folder_that_no_message_carries_is_refused(tmp_path, kind, folder):
    with started(kind) as store:
        for call in (
            lambda: store.save_checkpoint(tmp_path / folder, 1),
            lambda: store.load_checkpoint(tmp_path / folder),
            lambda: store.save_optimizer_states(tmp_path / folder),
            lambda: store.load_optimizer_states(tmp_path / folder),
        ):
            with pytest.raises(ValueError, match="the folder"):
                call()


@each("kind", STORES)
def test_a_store_without_keys_has_nothing_to_save(tmp_path, kind):
    with kv.create(kind) as store:
        for call in (lambda: store.save_checkpoint(tmp_path, 1), lambda: store.save_optimizer_states(tmp_path)):
            with pytest.raises(ValueError, match="no keys to save: call init first"):
                call()
    assert list(tmp_path.iterdir()) == []


@each("kind", STORES)
def test_a_store_that_is_closed_neither_saves_nor_loads(tmp_path, kind):
    with started(kind) as store:
        pass
    for call in (
        lambda: store.save_checkpoint(tmp_path, 1),
        lambda: store.load_checkpoint(tmp_path),
        lambda: store.save_optimizer_states(tmp_path),
        lambda: store.load_optimizer_states(tmp_path),
    ):
        with pytest.raises(StoreClosed):
            call()


def refused(store: KVStore, sentence, directory, number=None, states=True):
    """Loading is refused, and nothing has changed."""
    before = bits(store)
    with pytest.raises(CheckpointError, match=sentence):
        store.load_checkpoint(directory, number, states=states)
    assert bits(store) == before


@each("kind", STORES)
def test_where_there_is_no_checkpoint_it_says_so(tmp_path, kind):
    with started(kind) as store:
        refused(store, "there is no checkpoint in .*: there is no such folder", tmp_path / "gone")
        store.save_checkpoint(tmp_path, 3).result(60)
        refused(store, "there is no checkpoint of step 4 in .*, only of 3", tmp_path, 4)
        with pytest.raises(CheckpointError, match="is not a checkpoint: manifest.json cannot be read"):
            store.load_optimizer_states(tmp_path)


OTHER = {
    "a key more": ({**SHAPES, "new": (3,)}, torch.float32, "the checkpoint has no key 'new', which this store has"),
    "a key less": ({"w": (7, 5)}, torch.float32, "the checkpoint has key 'bias', 'scalar', 'empty' and 1 more, which"),
    "another shape": ({**SHAPES, "w": (5, 7)}, torch.float32, r"key 'w' has shape \(7, 5\) .* but shape \(5, 7\)"),
    "another type": (SHAPES, torch.float64, "key 'w' has .* dtype float32 in the checkpoint, but .* dtype float64"),
}


@each("kind", STORES)
@each("shapes, dtype, sentence", OTHER.values())
def test_another_store_is_told_what_differs_and_stays_as_it_is(tmp_path, kind, shapes, dtype, sentence):
    with started("local") as store:
        store.save_checkpoint(tmp_path, 3).result(60)
    with started(kind, dtype=dtype, shapes=shapes) as store:
        for states in (True, False):
            before = bits(store, shapes)
            with pytest.raises(CheckpointError, match=sentence):
                store.load_checkpoint(tmp_path, states=states)
            assert bits(store, shapes) == before


@each("kind", STORES)
@each("rule", ["plain", "adam", "no rule", "rows"])
def test_another_rule_is_told_so_and_may_have_the_weights(tmp_path, kind, rule):
    with started("local", RULES["momentum"]) as store:
        step(store, 1)
        store.save_checkpoint(tmp_path, 3).result(60)
        wanted = bits(store)
    with started(kind, RULES[rule], seed=9) as store:
        refused(store, r"holds the states of sgd\(.*\), but this store updates with", tmp_path)
        store.load_checkpoint(tmp_path, states=False)
        assert bits(store) == wanted


@each("kind, file, how", pairs(STORES, ["server", "worker", NAME], ["flipped", "cut", "gone"]))
def test_a_damaged_checkpoint_changes_nothing_and_the_one_before_can_be_had(tmp_path, kind, file, how):
    with started(kind, RULES["adam"]) as store:
        step(store, 1)
        wanted = bits(store)
        store.save_checkpoint(tmp_path, 3, state=1).result(60)
        folder = store.save_checkpoint(tmp_path, 4, state=1).result(60)
        (path,) = folder.glob(f"{file}*")
        content = path.read_bytes()
        if how == "flipped":
            path.write_bytes(content[:-3] + bytes([content[-3] ^ 1]) + content[-2:])
        elif how == "cut":
            path.write_bytes(content[:-3])
        else:
            path.unlink()
        step(store, 2)
        refused(store, "is damaged|cut off or changed|is not there|is no checkpoint of step 4", tmp_path, 4)
        store.load_checkpoint(tmp_path, 3)
        assert bits(store) == wanted


@each("kind", STORES)
def test_a_newer_version_is_refused(tmp_path, kind):
    with started(kind) as store:
        folder = store.save_checkpoint(tmp_path, 3).result(60)
        body = json.loads((folder / NAME).read_text())
        (folder / NAME).write_text(json.dumps({**body, "version": 3}))
        refused(store, "is of version 3 of the format, .*: install a newer one", tmp_path)


# A disk that fails.


@pytest.mark.parametrize("kind", STORES)
def test_a_full_disk_fails_the_checkpoint_and_nothing_else(tmp_path, kind, monkeypatch, caplog):
    with started(kind, RULES["adam"]) as store:
        step(store, 1)
        wanted = bits(store)
        store.save_checkpoint(tmp_path, 1, state=1).result(60)
        step(store, 2)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched, caplog.at_level(logging.ERROR, "kvdist"):
            patched.setattr("kvdist.checkpoint.files.os.fsync", full)
            with pytest.raises(CheckpointError, match="No space left on device"):
                store.save_checkpoint(tmp_path, 2, state=2).result(60)
            patched.undo()
            step(store, 3)
            store.save_checkpoint(tmp_path, 4, keep=2, state=4).result(60)
        assert "No space left" in caplog.text or kind != "local", "what the call itself does not raise is logged"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["lock.json", "step-1", "step-4"]
        assert store.load_checkpoint(tmp_path, 1).state == 1 and bits(store) == wanted


@each("kind", STORES)
def test_a_file_where_the_folder_should_be_is_a_sentence(tmp_path, kind):
    (tmp_path / "states").write_text("precious")
    with started(kind, RULES["adam"]) as store:
        with pytest.raises(CheckpointError, match="could not be used for a checkpoint"):
            store.save_optimizer_states(tmp_path / "states")
        with pytest.raises(CheckpointError, match="could not be used for a checkpoint"):
            store.save_checkpoint(tmp_path / "states", 1).result(60)
    assert (tmp_path / "states").read_text() == "precious"


@each("kind", STORES)
def test_a_checkpoint_that_was_copied_elsewhere_is_as_good(tmp_path, kind):
    with started(kind) as store:
        store.save_checkpoint(tmp_path / "run", 1, state=5).result(60)
        wanted = bits(store)
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        shutil.rmtree(tmp_path / "run")
        os.rename(tmp_path / "copy" / "step-1", tmp_path / "copy" / "step-8")
        step(store, 1)
        assert store.load_checkpoint(tmp_path / "copy").state == 5 and bits(store) == wanted
        assert read_manifest(tmp_path / "copy" / "step-8").step == 1


@each("kind", STORES)
def test_a_folder_that_is_cleared_meanwhile_is_made_and_locked_again(tmp_path, kind):
    folder = tmp_path / "run"
    with started(kind) as store:
        store.save_checkpoint(folder, 1, state=1).result(60)
        shutil.rmtree(folder)
        store.save_checkpoint(folder, 2, state=2).result(60)
        assert sorted(path.name for path in folder.iterdir()) == ["lock.json", "step-2"]
        assert store.load_checkpoint(folder).state == 2
    assert [path.name for path in folder.iterdir()] == ["step-2"]
