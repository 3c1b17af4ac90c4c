"""kvdist doctor on this machine alone; tests/machines has the real ones."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvdist.__main__
from kvdist_launch.doctor import main


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
    assert "localhost: /proc/version is no folder" in capsys.readouterr().out


def test_kvdist_hands_the_launchers_command_over(monkeypatch):
    called: list[tuple[str, list[str]]] = []

    def execv(path, argv):
        called.append((path, argv))
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        kvdist.__main__.main(["doctor", "-H", "a b"])
    assert called == [(sys.executable, [sys.executable, "-m", "kvdist_launch.doctor", "-H", "a b"])]


def test_the_help_of_kvdist_names_it_and_it_has_its_own():
    for words, text in ((["--help"], "kvdist doctor"), (["doctor", "--help"], "usage: kvdist doctor")):
        argv = [sys.executable, "-m", "kvdist", *words]
        assert text in subprocess.run(argv, capture_output=True, text=True, check=True).stdout
