"""What a worker keeps with a checkpoint: as it was given, or refused when it is given."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.checkpoint import format as workers
from kvdist.checkpoint.files import write_file
from kvdist.checkpoint.format import read_worker
from kvdist.checkpoint.snapshot import EVERYTHING, Manifest
from kvdist.errors import CheckpointError
from kvdist.kvstore import checkpoints
from tests.cases import each

MANIFEST = Manifest(7, EVERYTHING, "local", True, None, 1, 1, (), ())
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=15,
)


def kept(folder, state, names=None):
    content = checkpoints.worker_content(state, names, 3)
    record = checkpoints.write_worker_file(folder, 3, content, "0" * 16, 7)
    return read_worker(folder, record, MANIFEST)


@given(PLAIN.filter(lambda state: state is not None), st.dictionaries(st.integers() | st.text(), st.text(), max_size=4))
@settings(max_examples=60)
def test_what_was_given_comes_back(tmp_path_factory, state, names):
    found = kept(tmp_path_factory.mktemp("kept"), state, names)
    assert found.state == state and repr(found.state) == repr(state)
    assert found.names == names and [type(key) for key in found.names] == [type(key) for key in names]


def test_numbers_that_are_none_come_back_too(tmp_path):
    assert math.isnan(kept(tmp_path, {"loss": math.nan}).state["loss"])
    assert kept(tmp_path, [math.inf, -0.0]).state == [math.inf, 0.0]


def test_nothing_is_no_file():
    assert checkpoints.worker_content(None, None, 0) == checkpoints.worker_content(None, {}, 0) == b""
    assert json.loads(checkpoints.worker_content(None, {"w": "net.weight"}, 0)) == {
        "rank": 0,
        "state": None,
        "names": [["w", "net.weight"]],
    }


def endless():
    state = []
    state.append({"again": state})
    return state


def deep(depth):
    return [deep(depth - 1)] if depth else []


@each(
    "state, sentence",
    [
        (np.ones(3), "Object of type ndarray is not JSON serializable. Convert arrays to lists"),
        ({"a": [{"b": b"bytes"}]}, "Object of type bytes"),
        ({1, 2}, "Object of type set"),
        (Path("x"), "Object of type PosixPath"),
        ({"epochs": {3: "done"}}, "a dict has the key 3, which is not text"),
        ({None: 1}, "a dict has the key None"),
        (({True: 1},), "a dict has the key True"),
        (endless(), "nested deeper than 100 times, or holds itself"),
        (deep(101), "nested deeper than 100 times"),
    ],
)
def test_a_state_that_would_not_come_back_is_refused_when_it_is_given(state, sentence):
    with pytest.raises(TypeError, match=f"a checkpoint must consist of dicts with text as keys.*{sentence}"):
        checkpoints.worker_content(state, None, 0)


def test_a_state_as_deep_as_is_allowed_comes_back(tmp_path):
    assert kept(tmp_path, deep(100)).state == deep(100)


@each("names", [["w"], "w", {(1, 2): "w"}, {None: "w"}, {True: "w"}, {1.5: "w"}])
def test_names_that_are_not_by_key_are_refused_when_they_are_given(names):
    with pytest.raises(TypeError, match="names must be a dict of key to name"):
        checkpoints.worker_content(None, names, 0)


def test_a_state_that_is_too_long_is_refused(monkeypatch):
    monkeypatch.setattr(checkpoints, "STATE_BYTES_MAX", 100)
    with pytest.raises(ValueError, match=r"has \d+ bytes as JSON; 100 are allowed"):
        checkpoints.worker_content("x" * 100, None, 0)


@each(
    "text",
    [
        b"",
        b"7",
        b"[]",
        b"{}",
        b'{"state": 1}',
        b'{"names": []}',
        b'{"state": 1, "names": 7}',
        b'{"state": 1, "names": [["w"]]}',
        b'{"state": 1, "names": [[["w"], "x"]]}',
        b'{"state": 1, "names": [[true, "x"]]}',
        b'{"state": 1, "names": [["w", 7]]}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_a_strangers_file_is_not_believed(tmp_path, text):
    record = write_file(tmp_path, "worker-0", ".json", [memoryview(text)])
    with pytest.raises(CheckpointError, match=r"worker-0-\w+\.json is damaged: not readable"):
        read_worker(tmp_path, record, MANIFEST)


def test_a_strangers_file_may_not_be_endless(tmp_path, monkeypatch):
    record = write_file(tmp_path, "worker-0", ".json", [memoryview(b"x" * 101)])
    monkeypatch.setattr(workers, "STATE_BYTES_MAX", 100)
    with pytest.raises(CheckpointError, match="has 101 bytes, and 100 are allowed"):
        read_worker(tmp_path, record, MANIFEST)
