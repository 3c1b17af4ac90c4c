"""`kvdist export` and `kvdist checkpoints`: one plain file out of a checkpoint, and what a folder has."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from kvdist import LazyRows, RowSparse, kv
from kvdist.__main__ import main
from kvdist.checkpoint import export as exporting
from kvdist.checkpoint.export import export
from kvdist.checkpoint.format import NAME, read_manifest
from kvdist.checkpoint.shards import Shards
from kvdist.config.exit_codes import EXIT_CONFIG
from kvdist.errors import CheckpointError, ConfigError

VALUES = {
    "w": torch.arange(15, dtype=torch.float32).reshape(3, 5),
    "half": torch.tensor([0.1, -7.0, float("inf")], dtype=torch.bfloat16),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.zeros((0, 4), dtype=torch.float16),
    "count": torch.tensor([1, -(2**62)]),
}
NAMES = {"w": "net.0.weight", "half": "net.ключ", "nobody": "gone"}


def checkpoint(directory, step=1, values=VALUES, names=NAMES, kind="local"):
    with kv.create(kind) as store:
        store.init(list(values), list(values.values()))
        return store.save_checkpoint(directory, step, names=names).result(60)


def told(capsys, *arguments):
    """The exit code of the command, and what it said."""
    code = main([str(one) for one in arguments])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("kind", ["local", "dist"])
def test_the_library_of_the_format_loads_what_was_exported_under_the_users_names(tmp_path, capsys, kind):
    checkpoint(tmp_path / "run", 7, kind=kind)
    code, out, err = told(capsys, "export", tmp_path / "run", tmp_path / "model.safetensors")
    assert (code, err) == (0, "")
    assert out == (
        f"{tmp_path}/model.safetensors: 5 arrays of {tmp_path}/run/step-7, step 7,"
        f" {(tmp_path / 'model.safetensors').stat().st_size} bytes\n"
    )
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == {"net.0.weight", "net.ключ", "scalar", "empty", "count"}
    for key, value in VALUES.items():
        loaded = found[NAMES.get(key, key)]
        assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape) and torch.equal(loaded, value)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "kvdist.step": "7"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "run"]


@pytest.mark.parametrize("kind", ["local", "dist"])
def test_a_lazy_table_is_two_arrays_and_what_its_other_rows_are(tmp_path, capsys, kind):
    eager = np.arange(12, dtype=np.float32).reshape(4, 3)
    with kv.create(kind) as store:
        store.set_optimizer("test")
        store.init("eager", RowSparse(np.arange(4), eager))
        store.init("lazy", LazyRows((10**9, 2), initializer="constant(2)", dtype="float16"))
        store.init("untouched", LazyRows((10**9, 2, 5)))
        store.push("lazy", RowSparse([999_999_999, 3], np.full((2, 2), [[1], [4]], np.float16), (10**9, 2)))
        store.save_checkpoint(tmp_path / "run", 1, names={"lazy": "emb"}).result(60)
    code, out, err = told(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert (code, err) == (0, "") and "5 arrays of" in out
    found = load_file(tmp_path / "out")
    assert found.keys() == {"eager", "emb.indices", "emb.values", "untouched.indices", "untouched.values"}
    assert found["eager"].tolist() == eager.tolist()
    assert found["emb.indices"].tolist() == [3, 999_999_999]
    assert (found["emb.values"].dtype, found["emb.values"].tolist()) == (torch.float16, [[6, 6], [3, 3]])
    assert found["untouched.indices"].shape == (0,) and found["untouched.values"].shape == (0, 2, 5)
    with safe_open(tmp_path / "out", "pt") as file:
        assert json.loads(file.metadata()["kvdist.lazy"]) == {
            "emb": {"shape": [10**9, 2], "initializer": "constant(2.0)"},
            "untouched": {"shape": [10**9, 2, 5], "initializer": "zeros"},
        }
    code, out, _ = told(capsys, "checkpoints", tmp_path / "run", "--verify")
    assert code == 0 and "intact" in out and "3 key(s)" in out


def test_a_key_called_as_an_array_of_a_lazy_table_is_a_sentence(tmp_path):
    with kv.create("local") as store:
        store.init("e", LazyRows((9, 2)))
        store.init("e.values", np.zeros(3))
        store.save_checkpoint(tmp_path / "run", 1).result(60)
    with pytest.raises(CheckpointError, match=r"the keys 'e.values' and 'e' would both be called 'e\.values'"):
        export(tmp_path / "run", tmp_path / "out")


def test_a_module_takes_its_weights_back(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    state = {name: value.detach() for name, value in net.named_parameters()}
    checkpoint(tmp_path, 1, dict(enumerate(state.values())), dict(enumerate(state)))
    export(tmp_path, tmp_path / "model.safetensors")
    other = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_keys_without_names_are_called_by_themselves(tmp_path):
    checkpoint(tmp_path, 1, {3: torch.ones(2), -4: torch.zeros(1)}, None)
    export(tmp_path, tmp_path / "out")
    assert load_file(tmp_path / "out").keys() == {"3", "-4"}


def test_the_newest_step_is_taken_or_the_one_that_is_named_or_the_folder_itself(tmp_path):
    for step in (1, 2, 10):
        checkpoint(tmp_path / "run", step, {"w": torch.full((3,), float(step))}, None)

    def value(source, step=None):
        exported = export(source, tmp_path / "out", step, overwrite=True)
        return exported.step, load_file(tmp_path / "out")["w"].tolist()

    assert value(tmp_path / "run") == (10, [10.0] * 3)
    assert value(tmp_path / "run", 2) == (2, [2.0] * 3)
    assert value(tmp_path / "run" / "step-1") == value(tmp_path / "run" / "step-1", 1) == (1, [1.0] * 3)
    with pytest.raises(CheckpointError, match="is the checkpoint of step 1, not of step 2"):
        value(tmp_path / "run" / "step-1", 2)
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 3 in .*, only of 1, 2, 10"):
        value(tmp_path / "run", 3)


def test_a_checkpoint_may_have_been_moved_and_renamed(tmp_path):
    checkpoint(tmp_path / "run", 4).rename(tmp_path / "best")
    assert export(tmp_path / "best", tmp_path / "out").step == 4


def test_a_file_that_is_there_is_replaced_only_by_force(tmp_path, capsys):
    checkpoint(tmp_path)
    (tmp_path / "out").write_text("precious")
    code, out, err = told(capsys, "export", tmp_path, tmp_path / "out")
    assert (code, out) == (EXIT_CONFIG, "") and (tmp_path / "out").read_text() == "precious"
    assert err == f"kvdist: {tmp_path}/out is there already: name another file, or say --force to replace it\n"
    assert told(capsys, "export", tmp_path, tmp_path / "out", "--force")[0] == 0
    assert load_file(tmp_path / "out").keys() >= {"net.0.weight"}


def test_a_file_that_appears_while_it_is_written_is_not_replaced(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    whole = Shards.whole

    def late(*arguments):
        (tmp_path / "out").write_text("precious")
        return whole(*arguments)

    monkeypatch.setattr(Shards, "whole", late)
    with pytest.raises(ConfigError, match="is there already"):
        export(tmp_path, tmp_path / "out")
    assert (tmp_path / "out").read_text() == "precious"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "step-1"]


def test_one_key_at_a_time_is_read(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    events = []
    whole, write = Shards.whole, exporting.write_named_tensors
    monkeypatch.setattr(Shards, "whole", lambda self, key, *rest: (events.append(key), whole(self, key, *rest))[1])

    def noticing(path, tensors, *rest):
        assert events == []
        return write(path, tensors, *rest)

    monkeypatch.setattr(exporting, "write_named_tensors", noticing)
    export(tmp_path, tmp_path / "out")
    assert sorted(events) == ["count", "half", "scalar", "w"]


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        ({"w": "x", "half": "x"}, r"the keys 'w' and 'half' would both be called 'x': give save_checkpoint names that"),
        ({"w": "half"}, "the keys 'w' and 'half' would both be called 'half'"),
        ({"w": "__metadata__"}, "key 'w' cannot be called __metadata__"),
        ({"w": "\ud800"}, "cannot be encoded"),
    ],
)
def test_names_that_one_file_cannot_have_are_an_error(tmp_path, capsys, names, sentence):
    checkpoint(tmp_path / "run", 1, VALUES, names)
    with pytest.raises(CheckpointError, match=sentence):
        export(tmp_path / "run", tmp_path / "out")
    assert told(capsys, "export", tmp_path / "run", tmp_path / "out")[0] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def damage(folder, how):
    (shard,) = folder.glob("server-*")
    (own,) = folder.glob("worker-*")
    if how == "flipped":
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    elif how == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif how == "gone":
        shard.unlink()
    elif how == "own":
        own.write_bytes(own.read_bytes().replace(b"net", b"met"))
    elif how == "manifest":
        (folder / NAME).write_bytes((folder / NAME).read_bytes().replace(b"float32", b"float16"))
    else:
        (folder / NAME).unlink()


DAMAGE = {
    "flipped": "is damaged: its content does not have the checksum",
    "cut": "it is cut off or changed",
    "gone": "is not there",
    "own": "is damaged: its content does not have the checksum",
    "manifest": "manifest.json is damaged",
    "none": "there is no checkpoint in",
}


@pytest.mark.parametrize(("how", "sentence"), DAMAGE.items())
def test_a_damaged_checkpoint_is_a_sentence_and_no_file(tmp_path, capsys, how, sentence):
    damage(checkpoint(tmp_path / "run"), how)
    code, out, err = told(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert (code, out) == (1, "") and err.startswith("kvdist: ") and err.count("\n") == 1 and sentence in err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_states_alone_are_nothing_to_export(tmp_path):
    with kv.create("local") as store:
        store.init("w", np.ones(3))
        store.set_optimizer("adam")
        store.save_optimizer_states(tmp_path / "states")
    with pytest.raises(CheckpointError, match="holds the states of an optimizer and no weights"):
        export(tmp_path / "states", tmp_path / "out")


@pytest.mark.parametrize(
    ("out", "sentence"),
    [(".", "is a folder; name a file in a folder that is there"), ("gone/out", "cannot be: there is no folder")],
)
def test_a_place_where_no_file_can_be_is_a_mistake_of_the_command(tmp_path, capsys, monkeypatch, out, sentence):
    checkpoint(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    code, _, err = told(capsys, "export", "run", out)
    assert code == EXIT_CONFIG and sentence in err and err.count("\n") == 1


def test_a_full_disk_is_a_sentence_and_leaves_nothing(tmp_path, capsys, monkeypatch):
    checkpoint(tmp_path / "run")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvdist.checkpoint.files.os.fsync", full)
    code, _, err = told(capsys, "export", tmp_path / "run", tmp_path / "out")
    assert (code, err) == (1, f"kvdist: {tmp_path}/out could not be written: No space left on device\n")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("words", ["export", "export a", "export a b --step x", "checkpoints"])
def test_words_that_no_command_takes_end_with_code_2(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == EXIT_CONFIG and "usage: " in capsys.readouterr().err


# The list.


def test_a_folder_is_listed_step_by_step(tmp_path, capsys):
    for step in (9, 10):
        checkpoint(tmp_path, step)
    (tmp_path / "step-11").mkdir()
    code, out, err = told(capsys, "checkpoints", tmp_path)

    def summary(step):
        manifest = read_manifest(tmp_path / f"step-{step}")
        nbytes, run = sum(record.nbytes for record in manifest.files), manifest.run
        return f"{nbytes} bytes, 5 key(s), weights and states, no optimizer, local, 1 worker(s), 1 server(s), run {run}"

    assert (code, err) == (0, "")
    assert out.splitlines() == [
        f"step-9           complete: {summary(9)}",
        f"step-10          complete: {summary(10)}",
        "step-11          incomplete: being written, or an attempt that failed",
    ]


def test_the_folder_of_one_step_is_listed_alone(tmp_path, capsys):
    checkpoint(tmp_path, 8)
    checkpoint(tmp_path, 9).rename(tmp_path / "best")
    code, out, _ = told(capsys, "checkpoints", tmp_path / "best", "--verify")
    assert code == 0 and out.startswith("best             intact: ") and out.count("\n") == 1


@pytest.mark.parametrize("how", ["flipped", "cut", "gone", "manifest"])
def test_damage_is_listed_as_such_and_found_by_reading_all(tmp_path, capsys, how):
    checkpoint(tmp_path, 1)
    damage(checkpoint(tmp_path, 2), how)
    assert ("step-2           damaged: " in told(capsys, "checkpoints", tmp_path)[1]) == (how != "flipped")
    code, out, _ = told(capsys, "checkpoints", tmp_path, "--verify")
    first, second = out.splitlines()
    assert first.startswith("step-1           intact: ") and second.startswith("step-2           damaged: ")
    assert DAMAGE[how] in second and code == 1


def test_an_empty_folder_has_none(tmp_path, capsys):
    for folder, why in ((tmp_path, "no folder step-<number>"), (tmp_path / "gone", "there is no such folder")):
        assert told(capsys, "checkpoints", folder) == (
            1,
            "",
            f"kvdist: there is no checkpoint in {folder}: {why}\n",
        )


def test_a_size_is_told_in_a_unit_that_suits_it(tmp_path, capsys):
    folder = checkpoint(tmp_path, 1, {"w": torch.zeros(600_000)}, None)
    assert "2.4 MB, 1 key(s)" in told(capsys, "checkpoints", tmp_path)[1]
    assert json.loads((folder / NAME).read_text())["keys"][0]["shape"] == [600_000]
