"""How the launcher begins: interrupted at any moment, with what it has inherited, and with outputs that are full."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.launcher.conftest import TIMEOUT_S

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCRIPTS = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["scripts"]
WORDS = {"kvdist-launch": ("-n", "1", "-s", "0"), "kvdist-run": ("-np", "1")}


def command(name: str, *options: str) -> list[str]:
    """A command as it is installed, with these options of Python's."""
    module, _, function = SCRIPTS[name].partition(":")
    return [sys.executable, *options, "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("name", WORDS)
@each("imported", ["kvdist.errors", "kvdist_launch.job", "kvdist_launch.request"])
def test_a_signal_ends_a_launcher_that_still_imports_with_its_exit_code(env, name, number, imported):
    argv = [*command(name, "-X", "importtime"), *WORDS[name], "sleep", "60"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        assert any(line.split()[-1] == imported for line in launcher.stderr), "it was imported"
        launcher.send_signal(number)
        said = launcher.stderr.read()
        assert launcher.wait(TIMEOUT_S) == 128 + number, said
    assert f"{name}: interrupted" in said and "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_after_the_end_of_a_job_changes_neither_its_exit_code_nor_its_summary(env, tmp_path, number):
    os.mkfifo(tmp_path / "summary")
    argv = [*command("kvdist-launch"), *WORDS["kvdist-launch"], "--json-summary", str(tmp_path / "summary"), "true"]
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as launcher:
        assert launcher.stderr is not None
        assert any("1 worker finished" in line for line in launcher.stderr), "it waits for a reader of the summary"
        launcher.send_signal(number)
        reader = os.open(tmp_path / "summary", os.O_RDONLY | os.O_NONBLOCK)
        assert launcher.wait(TIMEOUT_S) == 0, launcher.stderr.read()
        told = json.loads(os.read(reader, 1 << 16))
        os.close(reader)
    assert (told["exit_code"], told["outcome"]) == (0, "finished")


def as_child(env: dict[str, str], before: str, *words: str, **options: str) -> subprocess.Popen[str]:
    """Start ``kvdist-launch`` after a piece of Python in the same process."""
    begin = f"import os, signal, sys; {before}; os.execv(sys.executable, sys.argv[1:])"
    argv = [sys.executable, "-c", begin, *command("kvdist-launch"), *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(argv, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)


def ends(launcher: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = launcher.communicate(timeout=TIMEOUT_S)
    return launcher.returncode, out, err


@each("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_launcher_that_was_started_with_closed_descriptors_runs_its_job(env, tmp_path, closed):
    done = tmp_path / "done"
    worker = f"import os; [os.fstat(number) for number in range(3)]; open({str(done)!r}, 'w')"
    before = "; ".join(f"os.close({number})" for number in closed)
    words = (
        "-n",
        "1",
        "-s",
        "1",
        "--stdin",
        "w0",
        "python",
        "-c",
        f"from kvdist import kv; s = kv.create('dist'); {worker}",
    )
    code, _, err = ends(as_child(env, before, *words))
    assert code == 0 and done.exists(), err


def test_a_job_ends_by_a_signal_that_its_launcher_was_started_with_blocked_and_blocks_none(env):
    worker = "import signal, time; print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True); time.sleep(60)"
    before = "signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())"
    launcher = as_child(env, before, *WORDS["kvdist-launch"], "--grace", "0.2", "python", "-c", worker)
    assert launcher.stdout is not None and launcher.stdout.readline() == "w0 │ set()\n"
    launcher.send_signal(signal.SIGTERM)
    assert ends(launcher)[0] == 143


def test_what_the_caller_ignores_ends_no_job_and_exit_codes_are_none_of_it(env, tmp_path):
    os.mkfifo(tmp_path / "go")
    worker = (
        "import signal, sys; ignored = [signal.getsignal(n) == signal.SIG_IGN for n in (1, 15)]\n"
        "print('ignores', ignored, flush=True); open(sys.argv[1]).read(); sys.exit(3)"
    )
    before = "[signal.signal(n, signal.SIG_IGN) for n in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)]"
    launcher = as_child(env, before, *WORDS["kvdist-launch"], "python", "-c", worker, str(tmp_path / "go"))
    assert launcher.stdout is not None and launcher.stdout.readline() == "w0 │ ignores [True, True]\n"
    for number in (signal.SIGHUP, signal.SIGTERM):
        launcher.send_signal(number)
    (tmp_path / "go").write_text("")
    code, _, err = ends(launcher)
    assert code == 3 and "asking the workers to end" not in err, err


def test_files_of_a_job_can_be_used_whatever_umask_the_launcher_was_started_with(env):
    words = (*WORDS["kvdist-launch"], "python", "-c", "import os; print(f'{os.umask(0):03o}')")
    for given, expected in ((0o777, "077"), (0o022, "022"), (0o000, "000")):
        assert ends(as_child(env, f"os.umask({given})", *words))[1] == f"w0 │ {expected}\n"


def test_a_folder_that_is_gone_is_said_in_one_sentence(env, tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    launcher = as_child(env, "os.rmdir(os.getcwd())", *WORDS["kvdist-launch"], "true", cwd=str(folder))
    sentence = "kvdist-launch: error: the current folder was removed: change to another one\n"
    assert ends(launcher) == (2, "", sentence)


def test_what_was_asked_for_and_cannot_be_written_is_told_in_one_sentence(env):
    for argv, program in (
        ([*command("kvdist-run"), "--check-build"], "kvdist-run"),
        ([sys.executable, "-m", "kvdist", "config"], "kvdist"),
    ):
        with open("/dev/full", "w") as full:
            done = subprocess.run(argv, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
        (told,) = done.stderr.splitlines()
        why = f"{program}: standard output cannot be written to (No space left on device)"
        assert done.returncode == 1 and told.startswith(why), done.stderr


@each("words, code", [(("echo", "hello"), 0), (("--dry-run", "echo", "hello"), 1)])
def test_an_output_that_is_full_is_told_on_the_other_one(env, words, code):
    argv = [*command("kvdist-launch"), *WORDS["kvdist-launch"], *words]
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, env=env, stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
        told = (
            "kvdist-launch: standard output cannot be written to (No space left on device); the rest of it is dropped"
        )
        assert done.returncode == code and done.stderr.splitlines().count(told) == 1, done.stderr
        if code == 0:
            done = subprocess.run(argv, env=env, stderr=full, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT_S)
            assert done.returncode == 0 and told.replace("output", "error") in done.stdout.splitlines()
