"""How a process ends: what is shown of an uncaught exception, and the exit code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvdist.config import exit_codes
from tests.cases import each

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
import numpy as np
import kvdist
from kvdist import kv

def update(key, gradient, value):
    raise ZeroDivisionError("the program's own")

def called_back():
    store.set_updater(update)
    store.push("w", np.ones(3, np.float32))

def misfits():
    store.push("w", np.ones((2, 2), np.float32))

def fails_alone():
    __import__("json").loads("{")

def loads():
    store.load_checkpoint("/nonexistent")

def fails_after_another():
    try:
        loads()
    except kvdist.CheckpointError:
        store.pull("unknown")

def reads():
    import torch

    class Broken(torch.utils.data.Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, index):
            raise LookupError("the program's own")

    trainer = kvdist.Trainer([torch.nn.Parameter(torch.zeros(2))], "sgd", kvstore=None)
    list(trainer.batches(torch.utils.data.DataLoader(Broken(), sampler=kvdist.QueueSampler(8))))

store = kv.create("local" if sys.argv[1] == "called_back" else "dist")
store.init("w", np.zeros(3, np.float32))
globals()[sys.argv[1]]()
"""


def shown(script: Path, *words: str, options: Sequence[str] = ()) -> tuple[str, list[str]]:
    """The last line of a program's traceback, and the files of its frames."""
    command = [sys.executable, *options, str(script), *words]
    variables = {**os.environ, "KVDIST_KERNELS": "numpy"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, env=variables)
    assert done.returncode == 1, done.stderr
    return done.stderr.splitlines()[-1], re.findall(r'^  File "([^"]+)"', done.stderr, re.MULTILINE)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_an_error_of_kvdist_shows_the_frames_of_the_program_and_the_call(script: Path) -> None:
    sentence, files = shown(script, "loads")
    assert sentence.startswith("kvdist.errors.NoCheckpoint: there is no checkpoint in /nonexistent")
    assert files[:2] == [str(script)] * 2 and len(files) == 2 + 1
    in_full = shown(script, "loads", options=["-X", "dev"])
    assert in_full[0] == sentence and len(in_full[1]) > len(files)


def test_an_error_of_kvdist_that_another_one_caused_shows_few_frames_of_both(script: Path) -> None:
    sentence, files = shown(script, "fails_after_another")
    assert sentence.startswith("kvdist.errors.KeyNotInitialised: key 'unknown' has not been initialised")
    assert files.count(str(script)) == 2 + 2 and len(files) <= 4 + 2 * 1


def test_another_exception_of_kvdist_shows_as_few(script: Path) -> None:
    sentence, files = shown(script, "misfits")
    assert sentence.startswith("ValueError: ")
    assert files[:2] == [str(script)] * 2 and len(files) == 2 + 3


def test_an_exception_of_the_program_below_kvdist_shows_as_few_between_its_frames(script: Path) -> None:
    sentence, files = shown(script, "called_back")
    assert sentence == "ZeroDivisionError: the program's own"
    assert files[:2] == [str(script)] * 2 and files[-1] == str(script) and len(files) == 2 + 3 + 1
    assert len(shown(script, "called_back", options=["-X", "dev"])[1]) > len(files)


def test_frames_of_torch_below_kvdist_are_left_out(script: Path) -> None:
    sentence, files = shown(script, "reads")
    assert sentence == "LookupError: the program's own"
    assert files[:2] == [str(script)] * 2 and files[-1] == str(script) and len(files) == 2 + 3 + 1


def test_an_exception_that_does_not_touch_kvdist_is_shown_in_full(script: Path) -> None:
    assert shown(script, "fails_alone") == shown(script, "fails_alone", options=["-X", "dev"])


ENDS = """
import atexit, contextlib, sys, threading
from kvdist.config import exit_codes

exit_codes.note_exits()
atexit.register(exit_codes.end_with, 75)
"""
CAUGHT = """
try:
    sys.exit(3)
except SystemExit as error:
    assert error.code == 3
"""


@each(
    "program, code",
    [
        ("", 75),
        ("sys.exit(0)", 75),
        (CAUGHT, 75),
        ("with contextlib.suppress(SystemExit): sys.exit(3)", 75),
        ("thread = threading.Thread(target=sys.exit, args=[3]); thread.start(); thread.join()", 75),
        ("sys.exit(3)", 3),
        ("sys.exit('a sentence')", 1),
        ("sys.exit(256 + 7)", 7),
        (f"{CAUGHT}    sys.exit(4)", 4),
        (f"{CAUGHT}    error.code = 5; raise", 5),
        ("raise ValueError", 1),
    ],
)
def test_a_process_ends_with_another_code_than_0_only_where_python_ends_it_so(program, code):
    done = subprocess.run([sys.executable, "-c", ENDS + program], capture_output=True, text=True, cwd=ROOT, timeout=100)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("\n") <= 1 or code == 1, done.stderr


LINGERS = """
import atexit, sys, threading
from kvdist.config import exit_codes

sys.stderr = None
looked, goes_on = threading.Event(), threading.Event()

class Time:
    def sleep(duration_s):
        if duration_s == exit_codes.LINGER_S:
            looked.set()
            goes_on.wait()

def work():
    goes_on.set()
    told.join()
    print("worked", flush=True)

exit_codes.time = Time
exit_codes.tell_what_lingers()
(told,) = (one for one in threading.enumerate() if one.name == "kvdist-end")
"""
WAITS = """
threading.Thread(target=work, name="reader").start()
"""
WORKS = """
atexit.register(work)
threading.Thread(target=looked.wait, name="reader").start()
"""


@each("program, told", [(WAITS, ["reader"]), (WORKS, [])])
def test_the_threads_that_keep_a_process_are_told_of_on_its_standard_error_and_not_work_after_them(program, told):
    argv, variables = [sys.executable, "-c", LINGERS + program], {**os.environ, "KVDIST_LOCAL_RANK": "0"}
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=variables, timeout=100)
    assert re.findall(r"^kvdist: .* the process waits for (.*); end it, .*\n", done.stderr) == told, done.stderr
    assert (done.stderr != "") == bool(told) and done.stdout == "worked\n"


def test_what_sys_exit_raises_reads_as_pythons_own(monkeypatch):
    monkeypatch.setattr(sys, "exit", sys.exit)
    exit_codes.note_exits()
    with pytest.raises(SystemExit) as found:
        sys.exit(3)
    assert traceback.format_exception_only(found.value) == ["SystemExit: 3\n"]
    assert type(found.value).__name__ == "SystemExit"
