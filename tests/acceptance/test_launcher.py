"""The commands: versions and imports, debuggers, names of processes, restarts, and what exit codes say."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvdist


@pytest.mark.parametrize("module", ["kvdist", "kvdist_launch", "kvdist_launch.run_cli"])
def test_every_command_says_its_version(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert kvdist.__version__ in done.stdout


def test_stores_can_be_imported_from_kvdist_kv():
    program = "import kvdist.kv as kv; from kvdist.kv import create; from kvdist import kv as same; print(kv is same)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("True\n", "")
