"""kvdist doctor on this machine alone; tests/machines has the real ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvdist.__main__
from kvdist.config.processes import module_words
from kvdist_launch.doctor import LinkTable, main
from kvdist_launch.probe import LinkSpeed


def test_this_machine_alone_needs_no_network_and_is_well(capsys):
    assert main(["-H", "localhost"]) == 0
    out = capsys.readouterr().out
    assert "this machine" in out and "MB/s" not in out


def test_hosts_must_be_named(capsys):
    assert main([]) == 2
    assert "-H is missing" in capsys.readouterr().err
    assert main(["-H", "a;b"]) == 2


def test_a_folder_that_cannot_be_written_to_is_a_problem(capsys):
    assert main(["-H", "localhost", "--sync-dst-dir", "/proc/version/job"]) == 1
    assert "localhost: /proc/version is not a folder" in capsys.readouterr().out


def test_kvdist_hands_the_launchers_command_over(monkeypatch):
    called: list[tuple[str, list[str]]] = []

    def execv(path, argv):
        called.append((path, argv))
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        kvdist.__main__.main(["doctor", "-H", "a b"])
    assert called == [(sys.executable, [sys.executable, *module_words("kvdist_launch.doctor"), "-H", "a b"])]


def test_the_help_of_kvdist_names_it_and_it_has_its_own():
    for words, text in ((["--help"], "kvdist doctor"), (["doctor", "--help"], "usage: kvdist doctor")):
        argv = [sys.executable, "-m", "kvdist", *words]
        assert text in subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_the_tables_have_a_cell_for_each_direction_and_a_sentence_for_each_that_failed():
    speeds = {
        (0, 1): LinkSpeed(0.213, 117.6),
        (1, 0): LinkSpeed(0.25, 99.4),
        (0, 2): LinkSpeed(12.0, 3.0),
        (2, 0): LinkSpeed(problem="no answer from 10.0.0.1:7 within 3 s: a firewall, or no route"),
        (1, 2): LinkSpeed(1.0, 1000.0),
        (2, 1): LinkSpeed(1.0, 1000.0),
    }
    links = LinkTable(("this machine", "d1", "[x]"), speeds)
    lines = [line.split() for line in links.tables().splitlines() if "─" not in line]
    assert lines == [
        ["ms,", "there", "and", "back", "this", "machine", "d1", "[x]"],
        ["this", "machine", "0.21", "12.00"],
        ["d1", "0.25", "1.00"],
        ["[x]", "no", "1.00"],
        [],
        ["MB/s", "this", "machine", "d1", "[x]"],
        ["this", "machine", "118", "3"],
        ["d1", "99", "1000"],
        ["[x]", "no", "1000"],
    ]
    assert links.problems == ["[x] → this machine: no answer from 10.0.0.1:7 within 3 s: a firewall, or no route"]


def test_one_machine_alone_has_no_tables():
    assert LinkTable(("this machine",), {}).tables() == ""


def test_what_a_mode_would_make_is_told_where_the_model_is_given(capsys):
    assert main(["-H", "localhost", "--parameters", "1e6", "--step", "0.1"]) == 0
    assert "take this machine alone: 1.00 times the rate of this machine alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--parameters", "1e6"], "--parameters and --step need each other"),
        (["--speeds", "1"], "--speeds needs --parameters and --step"),
        (["--parameters", "1e6", "--step", "1", "--speeds", "1,2"], "--speeds has 2 values, and -H 1 hosts"),
        (["--parameters", "many", "--step", "1"], "argument --parameters: 'many' is not a number above 0"),
    ],
)
def test_a_model_that_is_not_whole_is_refused(words, said, capsys):
    assert main(["-H", "localhost", *words]) == 2
    assert said in capsys.readouterr().err


def test_the_slowest_line_of_a_machine_is_one_between_hosts():
    speeds = {
        (0, 1): LinkSpeed(1.0, 3.0),
        (1, 0): LinkSpeed(1.0, 5.0),
        (1, 2): LinkSpeed(1.0, 90.0),
        (2, 1): LinkSpeed(1.0, 80.0),
    }
    links = LinkTable(("this machine", "d1", "d2"), speeds)
    assert links.slowest_of("d1", {"d1", "d2"}) == 80.0
    assert links.slowest_of("d1", {"this machine", "d1", "d2"}) == 3.0
