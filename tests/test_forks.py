"""A fork is a process like one that is started from scratch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forks import Forked

SURROUNDINGS = """
import os, sys, tempfile
from pathlib import Path

shown = Path("/proc/self/environ").read_bytes().split(b"\\0")
print(sys.argv, sys.path[:2], os.getcwd(), tempfile.gettempdir(), sys.stdin.read(), __name__)
print({name: (value, f"{name}={value}".encode() in shown) for name, value in os.environ.items() if name != "LC_CTYPE"})
print(os.getsid(0) == os.getpid(), os.getppid() == int(sys.argv[1]), os.read(int(sys.argv[2]), 100))
assert sys.modules["__main__"].shown is shown
kept: 1 + 1
print(__annotations__)
"""
ENDS = [
    "print('said')",
    "1 / 0",
    "raise SystemExit",
    "raise SystemExit(7)",
    "import sys; sys.exit('a sentence')",
    "raise KeyboardInterrupt",
    "import os; os.kill(os.getpid(), 9)",
    "import atexit; atexit.register(print, 'at the end')",
    "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
]


def outcome(popen: type[subprocess.Popen[Any]], *argv: str, **given: Any) -> tuple[int, str]:
    """The exit code, and what was printed."""
    pipe = subprocess.PIPE
    with popen(
        [sys.executable, *argv], stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, **given
    ) as started:
        text, _ = started.communicate("given", timeout=100)
    return started.returncode, text


@pytest.mark.parametrize("is_file", [False, True])
def test_a_fork_has_its_own_surroundings(forked: type[Forked], tmp_path: Path, is_file: bool) -> None:
    (tmp_path / "here.py").write_text(SURROUNDINGS)
    env = {"A": "b", "TMPDIR": str(tmp_path), "PYTHONPATH": "/nowhere", "PYTHONUNBUFFERED": "1"}
    program = [str(tmp_path / "here.py")] if is_file else ["-c", SURROUNDINGS]
    found = []
    for popen in (subprocess.Popen, forked):
        reading, writing = os.pipe()
        os.write(writing, b"through a descriptor")
        words = [*program, str(os.getpid()), str(reading)]
        found.append(outcome(popen, *words, cwd=tmp_path, env=env, pass_fds=[reading], start_new_session=True))
        os.close(reading)
        os.close(writing)
    assert found[0] == found[1] and found[0][0] == 0 and "through a descriptor" in found[0][1], found


def test_a_fork_ends_as_a_process_does(forked: type[Forked]) -> None:
    for code in ENDS:
        (wanted, said), (came, text) = outcome(subprocess.Popen, "-c", code), outcome(forked, "-c", code)
        assert (came, text.splitlines()[-1:]) == (wanted, said.splitlines()[-1:]), code
