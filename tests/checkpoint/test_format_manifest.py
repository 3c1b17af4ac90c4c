"""The manifest: what it says comes back, a changed byte is found, and it names nothing outside its folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.checkpoint.files import write_file
from kvdist.checkpoint.format import NAME, read_manifest, write_manifest
from kvdist.checkpoint.snapshot import EVERYTHING, STATES, WEIGHTS, Manifest, SavedKey, chosen_optimizer
from kvdist.errors import CheckpointError
from kvdist.optimizer import create
from tests.cases import each

KEYS = (SavedKey("w", (3, 5), "float32"), SavedKey(7, (), "bfloat16"), SavedKey("0", (0, 2), "int64"))
LAZY = SavedKey("e", (10**9, 4), "float16", "normal(0.01,seed=3)")
TABLES = (*KEYS, SavedKey("t", (8, 4), "float32", "rows"), LAZY)
SGD = create("sgd", momentum=0.9).describe()


def records(folder):
    return (
        write_file(folder, "server-0", ".safetensors", [memoryview(b"abc")]),
        write_file(folder, "server-12", ".safetensors", [memoryview(b"")]),
        write_file(folder, "worker-3", ".json", [memoryview(b"{}")]),
    )


def manifest(files=(), **changes):
    return replace(Manifest(5, EVERYTHING, "sync", True, SGD, 4, 2, KEYS, tuple(files)), **changes)


def signed(body):
    inner = json.dumps({name: value for name, value in body.items() if name != "sha256"}, sort_keys=True)
    digits = hashlib.sha256(inner.encode()).hexdigest()
    return json.dumps({**body, "sha256": digits}, sort_keys=True, indent=1) + "\n"


def read_changed(folder, change):
    """Read a manifest that a stranger has written: changed, with a right checksum."""
    write_manifest(folder, manifest(records(folder)))
    body = json.loads((folder / NAME).read_text())
    change(body)
    (folder / NAME).write_text(signed(body))
    return read_manifest(folder)


@each(
    "changes",
    [
        {},
        {"optimizer": None, "mode": "local"},
        {"contents": (STATES,), "step": 0},
        {"contents": (WEIGHTS,), "exact": False, "mode": "async", "step": (1 << 63) - 1},
        {"keys": ()},
        {"keys": TABLES},
        {"keys": (SavedKey('"ключ"\n', (1, 1, 1), "uint8"),)},
        {"optimizer": create("adam", lr_scheduler=None, clip_gradient=0.1).describe()},
    ],
)
def test_what_was_written_comes_back(tmp_path, changes):
    written = manifest(records(tmp_path), **changes)
    write_manifest(tmp_path, written)
    assert read_manifest(tmp_path) == written
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_files_of_servers_are_told_from_those_of_workers(tmp_path):
    one, other, own = records(tmp_path)
    found = manifest((one, own, other))
    assert found.shards == [one, other] and found.workers == {3: own}


def test_it_is_plain_json_that_a_reader_of_another_kind_can_check(tmp_path):
    write_manifest(tmp_path, manifest(records(tmp_path)))
    body = json.loads((tmp_path / NAME).read_text())
    assert (body["format"], body["version"], body["step"]) == ("kvdist checkpoint", 1, 5)
    assert body["keys"][1] == {"key": 7, "shape": [], "dtype": "bfloat16"}
    assert signed(body) == (tmp_path / NAME).read_text()


def test_only_with_tables_it_is_one_that_older_readers_do_not_know(tmp_path):
    write_manifest(tmp_path, manifest(records(tmp_path), keys=TABLES))
    body = json.loads((tmp_path / NAME).read_text())
    assert body["version"] == 2
    assert [one.get("form") for one in body["keys"]] == [None, None, None, "rows", "normal(0.01,seed=3)"]


@each(
    "shape, dtype, form",
    [
        ([8, 4], "float32", "rows of mine"),
        ([8, 4], "float32", 7),
        ([8, 4], "float32", None),
        ([8, 4], "float32", ["rows"]),
        ([8, 4], "float32", "__import__('os')"),
        ([8, 4], "int32", "normal(0.01)"),
        ([8, 4], "float32", "constant(1e9999)"),
        ([], "float32", "rows"),
        ([8, 0], "float32", "zeros"),
    ],
)
def test_a_form_that_no_table_has_is_not_believed(tmp_path, shape, dtype, form):
    def change(body):
        body["keys"][0].update(shape=shape, dtype=dtype, form=form)

    with pytest.raises(CheckpointError, match=f"{NAME} is damaged: not readable"):
        read_changed(tmp_path, change)


def test_a_table_fits_one_that_begins_alike_and_all_its_rows_an_array(tmp_path):
    whole = {form: SavedKey("t", (8, 4), "float32", form) for form in ("", "rows", "zeros", "normal(0.01,seed=3)")}
    fits = {(one, other) for one in whole for other in whole if whole[one].fits(whole[other])}
    assert fits == {(one, one) for one in whole} | {("", "rows"), ("rows", "")}
    assert not whole["rows"].fits(replace(whole["rows"], shape=(4, 8)))
    assert not whole["zeros"].fits(replace(whole["zeros"], dtype="float64"))
    found = manifest(keys=(whole["zeros"],))
    found.require((whole["zeros"],), SGD, EVERYTHING)
    with pytest.raises(CheckpointError, match=r"rows that begin as zeros in the checkpoint, but .* init it as it was"):
        found.require((whole["rows"],), SGD, EVERYTHING)


def test_it_is_written_only_when_every_file_is_there_with_its_length(tmp_path):
    files = records(tmp_path)
    (tmp_path / files[2].name).unlink()
    with pytest.raises(CheckpointError, match=r"worker-3-\w+\.json is not there"):
        write_manifest(tmp_path, manifest(files))
    (tmp_path / files[2].name).write_bytes(b"{")
    with pytest.raises(CheckpointError, match="has 1 bytes where 2 were written"):
        write_manifest(tmp_path, manifest(files))
    assert not (tmp_path / NAME).exists()


def test_a_manifest_cut_off_anywhere_is_damaged(tmp_path):
    write_manifest(tmp_path, manifest(records(tmp_path)))
    content = (tmp_path / NAME).read_bytes()
    for length in range(len(content)):
        (tmp_path / NAME).write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=re.escape(f"{tmp_path / NAME} is damaged")):
            read_manifest(tmp_path)


def test_each_flipped_bit_of_a_manifest_is_found(tmp_path):
    write_manifest(tmp_path, manifest(records(tmp_path)))
    content = (tmp_path / NAME).read_bytes()
    for position in range(len(content)):
        for bit in (1, 1 << position % 8):
            changed = bytearray(content)
            changed[position] ^= bit
            (tmp_path / NAME).write_bytes(changed)
            with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / NAME))):
                read_manifest(tmp_path)


def test_a_newer_version_says_what_wrote_it_and_what_to_do(tmp_path):
    with pytest.raises(CheckpointError, match=r"version 3 of the format, written by kvdist 9\.9; .* install a newer"):
        read_changed(tmp_path, lambda body: body.update(version=3, kvdist="9.9", new=[]))


@each("version", [-1, True, "1", None, 1.0, [1], 1 << 70])
def test_a_version_that_is_no_count_is_damage(tmp_path, version):
    with pytest.raises(CheckpointError, match="is damaged"):
        read_changed(tmp_path, lambda body: body.update(version=version))


def test_a_manifest_of_a_version_that_knew_no_runs_is_read(tmp_path):
    found = read_changed(tmp_path, lambda body: body.pop("run"))
    assert found.run == "" and found.step == 5
    found.require_part(tmp_path / "server-0", None, None)  # whose files say nothing of it


@each("run", [7, None, "x", "0" * 15, ["0"], "G" * 16])
def test_a_run_that_is_none_is_damage(tmp_path, run):
    with pytest.raises(CheckpointError, match="is damaged"):
        read_changed(tmp_path, lambda body: body.update(run=run))


@each("other", [("f" * 16, 5), ("0" * 16, 6), (None, None), (5, "0" * 16)])
def test_a_file_of_another_run_or_step_is_no_part(tmp_path, other):
    ours = manifest(run="0" * 16)
    ours.require_part(tmp_path / "server-0", "0" * 16, "5")
    with pytest.raises(CheckpointError, match="server-0 does not belong to this checkpoint"):
        ours.require_part(tmp_path / "server-0", *other)


def file_named(name):
    return lambda body: body["files"][0].update(name=name)


WRONG = {
    "a file above": file_named("../server-0-ab.safetensors"),
    "a file elsewhere": file_named("/etc/passwd"),
    "a file below": file_named("sub/server-0-ab.safetensors"),
    "a way out behind a good beginning": file_named("server-0-ab/../../x.part"),
    "an unfinished file": file_named("server-0.safetensors.7.part"),
    "the manifest itself": file_named(NAME),
    "a line break in a name": file_named("server-0-ab.safetensors\n"),
    "digits of another script": file_named("server-٣-ab.safetensors"),
    "an endless rank": file_named(f"server-{'1' * 5000}-ab.safetensors"),
    "a name that is no text": file_named(["server-0-ab.safetensors"]),
    "one file twice": lambda body: body["files"].append(body["files"][0]),
    "a negative length": lambda body: body["files"][0].update(nbytes=-1),
    "a length that is a truth value": lambda body: body["files"][0].update(nbytes=True),
    "a checksum of another form": lambda body: body["files"][0].update(sha256="../x"),
    "more about a file": lambda body: body["files"][0].update(mode=0),
    "less about a file": lambda body: body["files"][0].pop("sha256"),
    "files that are none": lambda body: body.update(files=7),
    "files by name": lambda body: body.update(files={"a": "b"}),
    "one key twice": lambda body: body["keys"].append(body["keys"][0]),
    "a key that is a list": lambda body: body["keys"][0].update(key=[1]),
    "a key that is a truth value": lambda body: body["keys"][0].update(key=True),
    "a key that is no whole number": lambda body: body["keys"][0].update(key=1.0),
    "a type that no key has": lambda body: body["keys"][0].update(dtype="float8"),
    "a type that is no name": lambda body: body["keys"][0].update(dtype=["float32"]),
    "a negative shape": lambda body: body["keys"][0].update(shape=[-1]),
    "a shape of truth values": lambda body: body["keys"][0].update(shape=[True]),
    "a shape of text": lambda body: body["keys"][0].update(shape="35"),
    "a huge shape": lambda body: body["keys"][0].update(shape=[1 << 70]),
    "a shape of too many dimensions": lambda body: body["keys"][0].update(shape=[1] * 65),
    "no keys at all": lambda body: body.pop("keys"),
    "a step that is text": lambda body: body.update(step="5"),
    "a negative step": lambda body: body.update(step=-1),
    "a huge step": lambda body: body.update(step=1 << 63),
    "contents that nobody knows": lambda body: body.update(contents=["weights", "secrets"]),
    "contents that are text": lambda body: body.update(contents="weights"),
    "no contents": lambda body: body.update(contents=[]),
    "an optimizer that is a name": lambda body: body.update(optimizer="sgd"),
    "a mode that is none": lambda body: body.update(mode=None),
    "an exactness that is none": lambda body: body.update(exact="yes"),
    "workers that are no count": lambda body: body.update(num_workers=None),
    "servers that are no count": lambda body: body.update(num_servers=1.5),
}


@each("change", WRONG.values())
def test_a_strangers_manifest_is_not_believed(tmp_path, change):
    with pytest.raises(CheckpointError, match=f"{NAME} is damaged: not readable"):
        read_changed(tmp_path, change)


@each(
    "text",
    [b"", b"[]", b"7", b"null", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b"{}"],
)
def test_what_is_no_manifest_is_said_to_be_none(tmp_path, text):
    (tmp_path / NAME).write_bytes(text)
    with pytest.raises(CheckpointError, match=f"{NAME} is (damaged|not the manifest of a checkpoint)"):
        read_manifest(tmp_path)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(ANY_JSON)
@settings(max_examples=30)
def test_any_json_in_any_entry_is_a_manifest_or_an_error(tmp_path_factory, value):
    folder = tmp_path_factory.mktemp("any")
    write_manifest(folder, manifest(records(folder)))
    body = json.loads((folder / NAME).read_text())
    for name in body.keys() - {"sha256"}:
        (folder / NAME).write_text(signed({**body, name: value}))
        try:
            read_manifest(folder)
        except CheckpointError as error:
            assert str(folder) in str(error)


def test_a_folder_without_one_is_no_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "gone"):
        with pytest.raises(CheckpointError, match=r"is not a checkpoint: manifest.json cannot be read \(No such file"):
            read_manifest(folder)


@each("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_read(tmp_path, make):
    make(tmp_path / NAME)
    with pytest.raises(CheckpointError, match="is not a regular file"):
        read_manifest(tmp_path)


# Whether it fits a store.


def required(keys=KEYS, optimizer=SGD, contents=EVERYTHING):
    manifest().require(keys, optimizer, contents)


def test_the_store_that_wrote_it_can_take_it_in():
    required()
    required(keys=tuple(reversed(KEYS)))
    required(optimizer=create("sgd", momentum=0.5, learning_rate=3, wd=1).describe())
    required(optimizer=None, contents=(WEIGHTS,))
    required(optimizer=create("adam").describe(), contents=(WEIGHTS,))
    manifest(optimizer=None).require(KEYS, None, EVERYTHING)


@each(
    "keys, sentence",
    [
        ((*KEYS, SavedKey("new", (1,), "float32")), "the checkpoint has no key 'new', which this store has"),
        (KEYS[1:], "the checkpoint has key 'w', which this store has not: init before you load"),
        ((), "the checkpoint has key 'w', 7, '0', which this store has not"),
        ((*KEYS[:2], SavedKey(0, (0, 2), "int64")), "the checkpoint has no key 0, which"),
        ((SavedKey("w", (5, 3), "float32"), *KEYS[1:]), r"key 'w' has shape \(3, 5\) and .* but shape \(5, 3\) and"),
        ((SavedKey("w", (3, 5), "float16"), *KEYS[1:]), "but shape .* and dtype float16 in this store"),
        ((*KEYS, *(SavedKey(n, (), "int8") for n in range(1, 6))), "has no key 1, 2, 3 and 2 more, which"),
    ],
)
def test_other_keys_are_named(keys, sentence):
    with pytest.raises(CheckpointError, match=sentence):
        required(keys)


@each(
    "saved, present",
    [
        ("sgd", None),
        (None, "sgd"),
        ("sgd", "adam"),
        (create("sgd"), create("sgd", momentum=0.9)),
        (create("rmsprop"), create("rmsprop", centered=True)),
        (create("sgd", momentum=0.9), create("sgd", momentum=0.9, multi_precision=True)),
    ],
)
def test_states_of_another_rule_do_not_fit(saved, present):
    theirs, ours = (None if one is None else create(one).describe() for one in (saved, present))
    with pytest.raises(CheckpointError, match="holds the states of .*, but this store updates with .*: call set_opti"):
        manifest(optimizer=theirs).require(KEYS, ours, EVERYTHING)
    manifest(optimizer=theirs).require(KEYS, ours, (WEIGHTS,))


def test_what_it_does_not_hold_cannot_be_loaded():
    with pytest.raises(CheckpointError, match="the checkpoint has no weights, only states"):
        manifest(contents=(STATES,)).require(KEYS, SGD, EVERYTHING)


@each("description", [{"name": "mine"}, {}, {"name": "sgd"}, {**SGD, "momentum": "x"}])
def test_an_optimizer_that_nobody_knows_here_is_a_sentence(description):
    with pytest.raises(CheckpointError, match="the optimizer of the checkpoint cannot be used here: "):
        chosen_optimizer(description)
    with pytest.raises(CheckpointError, match="the optimizer of the checkpoint cannot be used here: "):
        manifest(optimizer=description).require(KEYS, SGD, EVERYTHING)
