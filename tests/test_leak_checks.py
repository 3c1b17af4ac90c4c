"""The checks of `conftest.py` find what they are there to find: a run of tests that leave things behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

LEAKY_TESTS = """
import os, socket, subprocess, sys, threading

import pytest

kept, forever = [], threading.Event()


def test_tidy():
    thread = threading.Thread(target=forever.wait, args=(0.01,))
    thread.start()
    subprocess.run([sys.executable, "-c", ""], check=True)
    with socket.socket():
        pass


def test_thread():
    threading.Thread(target=forever.wait, daemon=True, name="stray").start()


def test_child():
    kept.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(20)"]))


def test_descriptor():
    kept.append(socket.socket())


@pytest.mark.gpu
def test_descriptor_of_a_driver():
    kept.append(socket.socket())


def test_grandchild():
    code = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(20)'])"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_file():
    open(os.environ["XDG_RUNTIME_DIR"] + "/kvdist-left.sock", "w").close()


def test_file_of_another_job():
    open("kvdist-of-others.sock", "w").close()
"""


def test_whatever_a_test_leaves_behind_makes_the_run_red(tmp_path: Path) -> None:
    conftest = (Path(__file__).parent / "conftest.py").read_text("utf-8")
    conftest = conftest.replace("GRACE_S = 30.0", "GRACE_S = 0.5").replace("torch.cuda.is_available()", "True")
    (tmp_path / "conftest.py").write_text(conftest, "utf-8")
    (tmp_path / "test_leaky.py").write_text(LEAKY_TESTS, "utf-8")
    # The fresh run is its own: it does not take itself for a part of this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment["TMPDIR"] = str(tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    guilty = set(re.findall(r"ERROR \S+::(\w+)", done.stdout))
    assert guilty == {"test_thread", "test_child", "test_descriptor"}
    assert "left behind on this machine" in done.stderr
    assert len(re.findall(r"process \d+ ", done.stderr)) == 2
    assert "kvdist-left.sock" in done.stderr and "kvdist-of-others.sock" not in done.stderr
    assert not list(tmp_path.glob("run-*")), "the run's own directory is removed"
