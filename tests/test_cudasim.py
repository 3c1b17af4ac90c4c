"""Runs `tests/cudasim` in a process of its own: numba's simulator of a GPU is chosen before numba is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RUN_MARK

ROOT = Path(__file__).resolve().parent.parent


def simulated(*arguments: str) -> str:
    """Run pytest with the simulator; its report if all passed.

    Raises:
        pytest.fail.Exception: with the report, which names the failing tests.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    # With the mark of this run, it knows itself for a part of it, which does not look for what others leave meanwhile.
    kept = {name: value for name, value in os.environ.items() if name == RUN_MARK or not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env={**kept, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        pytest.fail(f"with NUMBA_ENABLE_CUDASIM=1: {done.stdout[-20000:]}{done.stderr[-2000:]}", pytrace=False)
    return done.stdout


@pytest.mark.timeout(600)
def test_kernels_for_gpus_pass_their_tests_in_the_simulator():
    assert "passed" in simulated("tests/cudasim")
