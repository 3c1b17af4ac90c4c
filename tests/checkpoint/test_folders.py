"""Folders of checkpoints: which steps are there, and which one is meant."""

from __future__ import annotations

import os

import pytest

from kvdist.checkpoint.folders import all_steps, complete_steps, find, folder_of
from kvdist.checkpoint.format import NAME
from kvdist.checkpoint.snapshot import directory_of, step_of
from kvdist.errors import CheckpointError
from tests.cases import each


def complete(directory, *steps):
    for step in steps:
        folder_of(directory, step).mkdir(parents=True)
        (folder_of(directory, step) / NAME).write_text("{}")


@each("step", [0, 1, 9, 10, 1200, (1 << 63) - 1])
def test_a_step_is_known_by_the_name_of_its_folder(tmp_path, step):
    assert step_of(folder_of(tmp_path, step).name) == step


@each("name", ["step-", "step-01", "step--1", "step-٣", "step-1\n", "Step-1", "step-1.part", "step-" + "9" * 20, "1"])
def test_a_folder_of_another_name_is_no_step(tmp_path, name):
    assert step_of(name) is None
    complete(tmp_path, 3)
    (tmp_path / name).mkdir()
    (tmp_path / name / NAME).write_text("{}")
    assert complete_steps(tmp_path) == all_steps(tmp_path) == [3]


def test_steps_are_in_the_order_of_numbers_and_complete_with_a_manifest(tmp_path):
    complete(tmp_path, 9, 10, 1000)
    folder_of(tmp_path, 99).mkdir()
    folder_of(tmp_path, 98).write_text("a file")
    (tmp_path / "step-97" / NAME).mkdir(parents=True)
    assert complete_steps(tmp_path) == [9, 10, 1000]
    assert all_steps(tmp_path) == [9, 10, 97, 99, 1000]


def test_the_highest_step_is_found_or_the_one_that_is_named(tmp_path):
    complete(tmp_path, 9, 10)
    assert find(tmp_path, None) == tmp_path / "step-10" and find(tmp_path, 9) == tmp_path / "step-9"


@each("where", ["", "gone", "gone/deeper"])
def test_where_there_is_none_it_says_what_was_looked_for(tmp_path, where):
    folder_of(tmp_path, 1).mkdir()
    why = "there is no such folder" if where else "no folder step-<number> with a manifest"
    with pytest.raises(CheckpointError, match=f"there is no checkpoint in .*: {why}"):
        find(tmp_path / where, None)


def test_a_step_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    complete(tmp_path, *range(1, 4))
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 7 in .*, only of 1, 2, 3$"):
        find(tmp_path, 7)
    complete(tmp_path, *range(20, 30))
    with pytest.raises(CheckpointError, match="only of 3 more and 20, 21, .*, 29$"):
        find(tmp_path, 7)


def test_a_folder_that_may_not_be_read_is_a_sentence(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        for name in ("listdir", "scandir"):
            patched.setattr(os, name, refuse)
        with pytest.raises(CheckpointError, match="could not be searched for checkpoints: Permission denied"):
            find(tmp_path, None)


def test_a_folder_of_a_step_lies_in_its_directory_and_another_is_one_itself():
    assert [directory_of(name) for name in ("/a/step-5", "/a/step-5/", "/step-5", "step-5", "/a/b", "/a/step-05")] == [
        "/a", "/a", "/", ".", "/a/b", "/a/step-05",
    ]  # fmt: skip
