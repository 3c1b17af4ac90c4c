"""Runs `tests/cudasim` in a process of its own: numba's simulator of a GPU is chosen before numba is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RUN_MARK

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.mark.timeout(1200)
def test_kernels_for_gpus_pass_their_tests_in_the_simulator(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "tests/cudasim"]
    # With the mark of this run, it knows itself for a part of it, which does not look for what others leave meanwhile;
    # and it tidies up in a folder of its own.
    kept = {name: value for name, value in os.environ.items() if name == RUN_MARK or not name.startswith("PYTEST_")}
    environment = {**kept, "NUMBA_ENABLE_CUDASIM": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    report = f"{done.stdout[-20000:]}{done.stderr[-2000:]}"
    if done.returncode or " passed" not in done.stdout:
        pytest.fail(f"with NUMBA_ENABLE_CUDASIM=1: {report}", pytrace=False)
