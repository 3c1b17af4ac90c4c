"""Runs `tests/cudasim` in a process of its own: numba's simulator of a GPU is chosen before numba is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def simulated(*arguments: str) -> str:
    """Run pytest with the simulator; its report if all passed.

    Raises:
        pytest.fail.Exception: with the report, which names the failing tests.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=ROOT, env={**environment, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True
    )
    if done.returncode:
        pytest.fail(f"with NUMBA_ENABLE_CUDASIM=1: {done.stdout[-20000:]}{done.stderr[-2000:]}", pytrace=False)
    return done.stdout


@pytest.mark.timeout(600)
def test_kernels_for_gpus_pass_their_tests_in_the_simulator():
    assert "passed" in simulated("tests/cudasim")
