"""`kvdist`: its subcommands, and what it says where there is none."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module

import pytest

from kvdist.__main__ import GROUPS, SUBCOMMANDS, main
from kvdist.config.processes import module_words
from kvdist.version import __version__
from tests.cases import each

COLUMNS = 80
TIMEOUT_S = 60


def test_alone_it_says_what_it_is_and_what_there_is_in_groups_that_fit_a_terminal(capsys):
    assert main([]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"kvdist {__version__}: ")
    for title, group in GROUPS.items():
        lines = out[out.index(f"\n{title}:\n") :].splitlines()[2 : 2 + len(group)]
        assert [line.split()[0] for line in lines] == list(group)
    assert max(map(len, out.splitlines())) <= COLUMNS


def test_its_help_has_the_same_groups_and_the_options_of_a_server(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    out = capsys.readouterr().out
    assert ended.value.code == 0 and "--server-module" in out
    assert all(one.about in out for one in SUBCOMMANDS.values())


@each(
    "words, said",
    [
        (["docter", "-H", "a"], "unknown command docter; did you mean doctor?"),
        (["lauch"], "unknown command lauch; did you mean launch?"),
        (["check"], "unknown command check; did you mean checkpoints?"),
        (["x"], "unknown command x; kvdist --help lists all"),
    ],
)
def test_an_unknown_command_is_refused_in_a_sentence_with_the_nearest_one(words, said, capsys):
    assert main(words) == 2
    assert capsys.readouterr() == ("", f"kvdist: error: {said}\n")


@each(
    "words, said",
    [
        (["-n", "2", "python", "a.py"], "kvdist: error: unknown option -n; kvdist launch -n ... starts a job"),
        (["--verion"], "kvdist: error: unknown option --verion; did you mean --version?"),
        (["export", "a", "b", "--forc"], "kvdist export: error: unknown option --forc; did you mean --force?"),
        (["checkpoints", "a", "--zzz"], "kvdist checkpoints: error: unknown option --zzz; --help lists all"),
    ],
)
def test_an_unknown_option_is_refused_in_a_sentence_with_the_nearest_one(words, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2 and said in capsys.readouterr().err


@each("name, module", [(name, one.place) for name, one in SUBCOMMANDS.items() if ":" not in one.place])
def test_a_command_of_the_launcher_takes_the_place_of_this_process(monkeypatch, name, module):
    called: list[tuple[str, list[str]]] = []

    def execv(path, argv):
        called.append((path, argv))
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", execv)
    with pytest.raises(SystemExit):
        main([name, "-H", "a b", "--help"])
    assert called == [(sys.executable, [sys.executable, *module_words(module), "-H", "a b", "--help"])]


def test_every_command_has_a_help_of_its_own():
    programs = {"launch": "kvdist-launch", "run": "kvdist-run"}
    for name in SUBCOMMANDS:
        argv = [sys.executable, "-m", "kvdist", name, "--help"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        assert done.stdout.startswith(f"usage: {programs.get(name, f'kvdist {name}')} "), done.stdout


def test_a_job_starts_by_either_name():
    hello = [sys.executable, "-c", "print('hello')"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for words in (["launch", "-n", "1", "-s", "0"], ["run", "-np", "1"]):
        argv = [sys.executable, "-m", "kvdist", *words, *hello]
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
        assert done.stdout == "w0 │ hello\n"


def test_a_command_that_runs_here_is_one_function_that_adds_its_arguments():
    for one in SUBCOMMANDS.values():
        module, _, function = one.place.partition(":")
        assert not function or callable(getattr(import_module(module), function))


def test_it_loads_neither_numpy_nor_sockets_until_it_knows_what_to_do():
    code = "import sys, kvdist.__main__; print(sorted({'numpy', 'zmq', 'rich', 'kvdist.serve'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=TIMEOUT_S)
    assert done.stdout == "[]\n"
