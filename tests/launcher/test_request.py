"""The user's command: words or one quoted string, checked before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvdist.errors import ConfigError
from kvdist_launch.processes import CommandError
from kvdist_launch.request import parse_command
from tests.cases import each


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with the programs ``train`` and ``my train``."""
    for name in ("train", "my train"):
        program = tmp_path / name
        program.write_text("#!/bin/sh\n")
        program.chmod(0o755)
    return str(tmp_path)


@each(
    "words, command",
    [
        (["train"], ("train",)),
        (["train", "-n", "5", "a b", ""], ("train", "-n", "5", "a b", "")),
        (["train --x 1"], ("train", "--x", "1")),
        (["train --text 'a b' \"c\"d"], ("train", "--text", "a b", "cd")),
        (["train $HOME *"], ("train", "$HOME", "*")),
        (["my train"], ("my train",)),
        (["train", "a && b"], ("train", "a && b")),
    ],
)
def test_one_quoted_string_is_split_and_words_are_taken_as_they_are(path, words, command):
    assert parse_command(words, path) == command


@each("words", [[], [""], ["  "]])
def test_a_missing_command_is_refused_with_an_example(path, words):
    with pytest.raises(ConfigError, match="the command is missing"):
        parse_command(words, path)


def test_quotes_that_do_not_match_are_refused(path):
    with pytest.raises(ConfigError, match="cannot be split into words: no closing quotation"):
        parse_command(["train 'a"], path)


@each("text", ["train && train", "train | tee log", "train > log", "train ; train"])
def test_a_command_for_a_shell_is_refused_and_told_how_to_get_one(path, text):
    with pytest.raises(ConfigError, match="needs a shell") as caught:
        parse_command([text], path)
    assert f"sh -c '{text}'" in str(caught.value)


@each(
    "words, message",
    [
        (["trian"], "the command 'trian' does not exist: it is not in any directory of PATH"),
        (["./absent.py"], "the command './absent.py' does not exist: there is no such file"),
        (["FOO=1 train"], "the command 'FOO=1' does not exist: it sets a variable; .*: -x FOO=1"),
    ],
)
def test_a_command_that_does_not_exist_is_named(path, words, message):
    with pytest.raises(CommandError, match=message) as caught:
        parse_command(words, path)
    assert caught.value.exit_code == 127


def test_a_file_that_is_not_executable_is_named_with_the_cure(path):
    script = Path(path, "train.py")
    script.write_text("print(1)\n")
    with pytest.raises(CommandError, match=r"train.py is not executable; make it so \(chmod \+x") as caught:
        parse_command([str(script)], path)
    assert caught.value.exit_code == 126


def test_a_directory_is_not_a_command(path):
    with pytest.raises(CommandError, match="is a directory, not a command") as caught:
        parse_command([path], None)
    assert caught.value.exit_code == 126


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script in it."""
    folder = tmp_path / "here"
    folder.mkdir()
    (folder / "train.py").write_text("")
    monkeypatch.chdir(folder)
    return folder


@each(
    "text",
    [
        "python train.py",
        "python3.12 -u -X dev -Werror train.py absent.py",
        "python -m absent.py",
        "python -c absent.py",
        "python -",
        "sh -ex train.py",
        "sh -c absent.py",
    ],
)
def test_a_script_that_exists_or_is_none_is_not_refused(here, text):
    assert parse_command(text.split(), None, is_here=False, is_read_here=True) == tuple(text.split())


@each(
    "text, message",
    [
        ("python trian.py", r"there is no script trian.py in .*/here; did you mean train.py\?"),
        ("/usr/bin/python3 -u -X dev -Werror absent", "there is no script absent in .*/here; name it by its path from"),
        ("bash -e run.sh", "there is no script run.sh in .*/here"),
    ],
)
def test_a_script_that_does_not_exist_is_named_with_the_nearest_one(here, text, message):
    with pytest.raises(CommandError, match=message) as caught:
        parse_command(text.split(), None, is_here=False, is_read_here=True)
    assert caught.value.exit_code == 127


def test_a_script_of_another_machine_may_not_be_here(here):
    assert parse_command(["python", "absent.py"], None, is_here=False)
    assert parse_command(["python", "/srv/absent.py"], None, is_here=False, is_read_here=True)
    with pytest.raises(CommandError, match=r"there is no script /srv/absent.py; name it"):
        parse_command([sys.executable, "/srv/absent.py"], None)


def test_a_module_that_does_not_exist_is_named_with_the_nearest_one(here):
    with pytest.raises(CommandError, match=r"there is no module trian in .*/here or .*; did you mean python -m train"):
        parse_command([sys.executable, "-u", "-m", "trian.main"], None)
    for module in ("train", "json.tool", "pytest"):
        assert parse_command([sys.executable, "-m", module], None)
    assert parse_command(["python", "-m", "absent"], None, is_here=False)


def test_a_module_may_lie_in_a_folder_of_pythonpath(here, tmp_path: Path):
    (tmp_path / "elsewhere").write_text("")
    assert parse_command([sys.executable, "-m", "elsewhere"], None, modules=f"{here}:{tmp_path}")


def test_a_misspelled_script_without_its_interpreter_is_named_with_the_nearest_one(here):
    with pytest.raises(CommandError, match=r"the command 'trian.py' does not exist: .*; did you mean python train.py"):
        parse_command(["trian.py"], None)
