"""The benchmarks measure what they say: their checks fail on a wrong result, and their scripts run."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.fixture(scope="module")
def workload() -> ModuleType:
    spec = importlib.util.spec_from_file_location("workload", BENCHMARKS / "workers" / "workload.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["workload"] = module  # where its dataclass looks for its own annotations
    spec.loader.exec_module(module)
    return module


def test_a_sum_without_one_worker_ends_the_benchmark(workload: ModuleType) -> None:
    expected = workload.Expected("none", num_workers=2).after_step()
    workload.check([np.full(100, 3.0, np.float32)], [expected], step=0)
    with pytest.raises(SystemExit, match="key 1"):
        workload.check([np.full(100, 3.0), np.full(100, 2.0)], [expected], step=0)


def test_the_expected_weights_follow_momentum_and_adam(workload: ModuleType) -> None:
    sgd, adam = workload.Expected("sgd", num_workers=2), workload.Expected("adam", num_workers=2)
    assert [sgd.after_step(), sgd.after_step()] == pytest.approx([-0.03, -0.03 - 0.057])
    assert [adam.after_step(), adam.after_step()] == pytest.approx([-0.01, -0.02], rel=1e-6)


@pytest.mark.parametrize("text", ["25", "x25", "25x", "25xx4", "-1x4"])
def test_a_spec_that_is_none_is_refused(workload: ModuleType, text: str) -> None:
    with pytest.raises(Exception, match="is not COUNTxELEMENTS"):
        workload.Spec.parse(text)


def test_push_pull_measures_a_local_store_and_writes_the_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    command = [sys.executable, str(BENCHMARKS / "push_pull.py"), "--store", "local", "--workers", "1", "--spec", "3x17"]
    command += ["--steps", "2", "--warmup", "1", "--turns", "1", "--json", str(path)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (result,) = json.loads(path.read_text())["results"]
    assert (result["system"], result["spec"], result["steps"]) == ("kvdist", "3x17", 2)
    assert "median ms" in printed


def test_kernels_are_measured_beside_each_other(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    path = tmp_path / "kernels.json"
    command = [sys.executable, str(BENCHMARKS / "kernels.py"), "--elements", "17", "--repeats", "1", "--no-torch"]
    subprocess.run([*command, "--json", str(path)], capture_output=True, check=True)
    results = json.loads(path.read_text())["results"]
    assert {result["backend"] for result in results} == {"numpy", "numba"}
    assert {result["kernel"] for result in results} == {"sum", "sgd", "momentum", "nag", "adam", "adamw"}
