"""The command line: whose word is whose, and messages for what cannot be done."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvdist_launch.cli import OPTIONS, main, split_command


@pytest.mark.parametrize(
    ("words", "own", "command"),
    [
        ("-n 2 python train.py -n 5 --env x", "-n 2", "python train.py -n 5 --env x"),
        ("-n 2 -s 1 -- python train.py -- -n 5", "-n 2 -s 1", "python train.py -- -n 5"),
        ("-n2 --env=A=b train", "-n2 --env=A=b", "train"),
        ("--env A=b --env-worker C:d -n 1 ./train --version", "--env A=b --env-worker C:d -n 1", "./train --version"),
        ("-n 2 -- -odd-name", "-n 2", "-odd-name"),
        ("--env -- train", "--env --", "train"),
        ("--version train", "--version", "train"),
        ("-n 2", "-n 2", ""),
        ("-n", "-n", ""),
        ("", "", ""),
    ],
)
def test_options_after_the_command_belong_to_the_command(words, own, command):
    assert split_command(words.split()) == (own.split(), command.split())


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["-n", "2", "no-such-program-at-all"], 127, "the command 'no-such-program-at-all' does not exist"),
        (["-n", "2", "/"], 126, "/ is a directory, not a command"),
        (["-n", "2"], 2, "there is no command to run"),
        (["-n", "0", "true"], 2, "-n is 0; a job needs at least 1 worker"),
        (["-n", "1", "-s", "0", "true"], 2, "-s is 0; a job needs at least 1 server"),
        (["-n", "1", "-H", "hosts", "true"], 2, "several machines are not supported by this version; leave out -H"),
        (["-n", "1", "--launcher", "ssh", "true"], 2, "leave out --launcher ssh"),
        (["-n", "1", "--sync-dst-dir", "/d", "true"], 2, "leave out --sync-dst-dir /d"),
        (["-n", "1", "--env", "A", "true"], 2, "'A' does not set a variable"),
        (["-n", "1", "--env", "KVDIST_SLICE_BYTES=x", "true"], 2, "KVDIST_SLICE_BYTES is 'x'"),
        (["-n", "1", "--server-module", "a-b", "true"], 2, "'a-b' is not the name of a module"),
        (["-n", "1", "--optimizer-module", "a/b.py", "true"], 2, "'a/b.py' is not the name of a module"),
        (["-n", "1", "--grace", "-1", "true"], 2, "--grace is -1.0; it must be a number of seconds"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_starts(capfd, words, code, message):
    assert main(words, role_command=["/nonexistent"]) == code
    err = capfd.readouterr().err
    assert err.startswith("kvdist-launch: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["true"], "-n/--num-workers"),
        (["-n", "two", "true"], "invalid int value: 'two'"),
        (["-n", "1", "--num", "2", "true"], "unrecognized arguments: --num"),
    ],
)
def test_an_unknown_or_missing_option_is_a_usage_error(capsys, words, message):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_schedulers_and_servers_are_told_of_optimizer_modules_and_workers_are_not(capfd):
    words = ["-n", "1", "--optimizer-module", "my_rules,team.rules", "--optimizer-module", "more", "echo", "worker"]
    main(words, role_command=["echo", "role"])
    lines = capfd.readouterr().out.splitlines()
    told = "role --optimizer-module my_rules --optimizer-module team.rules --optimizer-module more"
    assert sorted(line.partition("] ")[2] for line in lines) in ([told, told, "worker"], [told, told])


def test_schedulers_and_servers_are_told_of_server_modules_too(capfd):
    words = ["-n", "1", "--optimizer-module", "rules", "--server-module", "a,b.c", "true"]
    main(words, role_command=["echo", "role"])
    lines = capfd.readouterr().out.splitlines()
    assert {line.partition("] ")[2] for line in lines} == {
        "role --server-module a --server-module b.c --optimizer-module rules"
    }


def test_a_role_program_that_cannot_be_started_leaves_nothing_behind(capfd):
    assert main(["-n", "1", "sleep", "60"], role_command=["/nonexistent"]) == 127
    assert "scheduler could not be started: /nonexistent: No such file or directory" in capfd.readouterr().err


def test_a_script_that_the_system_cannot_execute_is_named_and_leaves_nothing_behind(capfd, tmp_path):
    script = tmp_path / "train"
    script.write_text("no interpreter is named here\n")
    script.chmod(0o755)
    assert main(["-n", "1", str(script)], role_command=["sleep", "60"]) == 126
    assert f"worker-0 could not be started: {script}: Exec format error" in capfd.readouterr().err


def test_the_help_names_every_supported_option_and_shows_examples(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    names = [name for names, settings in OPTIONS for name in names if settings["help"] != "==SUPPRESS=="]
    assert [name for name in names if name not in shown] == []
    assert "examples:" in shown


def test_the_version_is_printed_without_a_command(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("kvdist-launch ")


def test_the_threads_given_to_each_worker_are_said_unless_the_user_chose_them(launch, monkeypatch):
    words = ("-n", "1", "-s", "1", "true")
    assert "kvdist-launch: OMP_NUM_THREADS=" not in launch("--env", "OMP_NUM_THREADS=1", *words).finish()[2]
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert "kvdist-launch: OMP_NUM_THREADS=" in launch("--env", "A=1", *words).finish()[2]


def test_the_launcher_loads_no_heavy_library():
    script = (
        "import sys, kvdist_launch.cli\n"
        "heavy = {'numpy', 'torch', 'zmq', 'msgpack', 'numba', 'rich', 'asyncio', 'importlib.metadata'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
