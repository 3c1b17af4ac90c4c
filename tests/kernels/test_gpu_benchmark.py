"""`benchmarks/gpu.py` without a GPU: its rows on a device made of host memory, and what it says where there is none."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import Equation, Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore.values import read_bits
from tests.devices import DeviceArray, NumpyDevice

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parent.parent.parent
BENCHMARKS = ROOT / "benchmarks"


COPY_BYTES_PER_S = 4.3e12
"""At which `docs/measured/gpu.md` computes what a kernel takes at least."""


class StandIn(NumpyDevice):
    """The device of NumPy for tensors of the host, with any kernels of the host."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__()
        names = ("weighted_sum", "to_float32", "from_float32", "fused_update", "round_to_half", "squares")
        names += tuple(f"{verb}_{bits}bit" for verb in ("quantise", "dequantise") for bits in (1, 2))
        self.kernels = replace(self.kernels, **{name: self._on_memory(getattr(kernels, name)) for name in names})

    def view(self, value: Any, dtype: DType) -> DeviceArray:
        assert value.is_contiguous() and dtype.label in str(value.dtype)
        return DeviceArray(read_bits(value), self)

    def _memory_of(self, value: Any) -> Any:
        return value if isinstance(value, Equation) else super()._memory_of(value)


@pytest.fixture(autouse=True, scope="module")
def importable() -> Iterator[None]:
    """The scripts import each other as scripts do: from the folder they lie in."""
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


def load(name: str) -> ModuleType:
    return importlib.import_module(name)


def bench_of(devices: dict[str, Any], left_out: dict[str, str] | None = None) -> Any:
    """The benchmark on a few odd numbers of elements, on the host."""
    measure = load("gpu_measure")
    sizes = measure.Sizes(elements=1003, rows=50, table_rows=80, row_elements=3, bucket=(5, 1, 64), keys=2)
    sizes = replace(sizes, key_elements=7)
    clock = measure.HostClock(lambda: None)
    return measure.Bench("cpu", devices, left_out or {}, clock, sizes, cache_bytes=100, rounds=2, seed=5)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """All rows, with the compiled kernels of the host, by name."""
    pytest.importorskip("numba", reason="the fused optimizers of the device made of host memory are numba's")
    bench = bench_of({"kvdist": StandIn(choose("numba"))})
    return {row.case.name: row for row in load("gpu").run(bench)}


def test_every_kernel_is_right_and_has_its_time_beside_torch(found: dict[str, Any]) -> None:
    assert [name for name, row in found.items() if row.wrong] == []
    fused = {name for name in found if name.startswith("sum of 4 and ")}
    assert len(fused) == 5 and len(found) == 29
    for name, row in found.items():
        ours = set() if name == "copy" or row.case.by_host else {"kvdist"}
        assert ours <= row.results.keys(), (name, row.left_out)
        assert all(one.median_s > 0 and one.error <= row.case.tolerance for one in row.results.values())
        assert row.left_out == {}, name
        others = row.results.keys() - ours
        assert others or re.search("quantise|residual", name), "torch has an op of its own for the others"


def test_the_numbers_of_the_issue_are_among_the_rows(found: dict[str, Any]) -> None:
    for name in ("sum of 2 × float32", "sum of 4 × float32", "sum of 8 × float32"):
        assert found[name].case.share == 0.9
    wanted = {
        "sum of 8 × float32": (1.8, {"torch add chain", "torch stack().sum(0)"}),
        "sum of 4 and adam": (1.5, {"torch add chain, fused"}),
        "pack of 3 tensors": (1.0, {"torch _foreach_copy_"}),
        "sum of 50 rows of 3, 30% repeated": (1.5, {"torch unique, index_add_"}),
    }
    for name, (ratio, peers) in wanted.items():
        assert found[name].case.ratio == ratio and peers <= found[name].results.keys()
    for name in ("2-bit quantise with residual", "2-bit de-quantise and add"):
        assert found[name].case.share == 0.8
    (step,) = (row for name, row in found.items() if name.startswith("step of"))
    assert {name.split(",")[0] for name in step.results} == {"dist_device_sync", "device", "dist_sync"}


def test_the_bytes_of_a_row_are_those_of_its_formula(found: dict[str, Any]) -> None:
    per_element = {
        "copy": 4 * 8,
        "sum of 8 × float32": 36,
        "sum of 4 × bfloat16": 10,
        "sum of 4 and sgd": 24,
        "sum of 4 and adam": 40,
        "float16 to float32": 6,
        "squared norm": 4,
    }
    assert {name: found[name].case.moved_bytes / 1003 for name in per_element} == per_element
    assert found["2-bit quantise with residual"].case.moved_bytes == 12 * 1003 + 63 * 4


def told() -> dict[str, list[float]]:
    """The rows of the tables in `docs/measured/gpu.md` that begin with a kernel, and the numbers in them."""
    text = (ROOT / "docs" / "measured" / "gpu.md").read_text("utf-8").partition("## Roofline")[2]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:2] == "| "]
    number = re.compile(r"\d+(\.\d+)?")
    return {cells[0]: [float(cell) for cell in cells[1:] if number.fullmatch(cell)] for cells in rows}


def test_the_roofline_in_the_document_is_made_of_the_bytes_that_the_benchmark_counts() -> None:
    measure, rows = load("gpu_measure"), told()
    bench = replace(bench_of({}), sizes=measure.Sizes())
    arithmetic = load("gpu_cases").arithmetic(bench)
    assert len(arithmetic) == 20
    for case in arithmetic:
        read, written, together, ms = rows.pop(case.name)
        assert read + written == together == case.moved_bytes / bench.sizes.elements, case.name
        assert ms == pytest.approx(case.moved_bytes / COPY_BYTES_PER_S * 1e3, abs=0.006), case.name
    with contextlib.ExitStack() as stack:
        others = {case.name: case for case in load("gpu_moves").moves(bench, stack)}
    del rows["kernel"]
    assert len(rows) == 5
    for name, (megabytes, ms) in rows.items():
        assert megabytes == round(others[name].moved_bytes / 1e6)
        assert ms == pytest.approx(others[name].moved_bytes / COPY_BYTES_PER_S * 1e3, abs=0.006)


def wrong(**functions: Any) -> StandIn:
    """A device with functions that do something else."""
    return StandIn(replace(REFERENCE, **functions))


def writes_nothing(*_: Any) -> None:
    pass


def misses_the_last(contributions: Any, scales: Any, dtype: Any, out: Any) -> None:
    REFERENCE.weighted_sum([one[:-1] for one in contributions], scales, dtype, out[:-1])


def raises(*_: Any) -> None:
    raise RuntimeError("the device is full\nand more")


@pytest.mark.parametrize("function", [writes_nothing, misses_the_last])
def test_who_computes_something_else_has_no_time(function: Any) -> None:
    measure, cases = load("gpu_measure"), load("gpu_cases")
    bench = bench_of({"kvdist": wrong(weighted_sum=function), "another": StandIn(REFERENCE)})
    row = measure.measure(cases.sums(bench, 2, cases.DType.FLOAT32), bench)
    assert row.wrong == ["kvdist"] and row.left_out["kvdist"].startswith("WRONG: the error is nan")
    assert row.results.keys() == {"another", "torch add chain", "torch stack().sum(0)"}


def test_a_code_that_differs_in_one_bit_is_wrong() -> None:
    def almost(grad: Any, residual: Any, threshold: float, out: Any) -> None:
        REFERENCE.quantise_2bit(grad, residual, threshold, out)
        out[-4] ^= 1

    measure, cases = load("gpu_measure"), load("gpu_cases")
    bench = bench_of({"kvdist": wrong(quantise_2bit=almost)})
    row = measure.measure(cases.quantise(bench, 2), bench)
    assert row.results == {} and row.left_out == {"kvdist": "WRONG: the error is inf, allowed is 0"}


def test_who_fails_is_told_with_the_reason_and_the_others_are_measured() -> None:
    measure, cases = load("gpu_measure"), load("gpu_cases")
    bench = bench_of({"kvdist": wrong(weighted_sum=raises)}, {"another": "absent: No module named 'numba'"})
    row = measure.measure(cases.sums(bench, 4, cases.DType.FLOAT32), bench)
    assert row.left_out == {
        "kvdist": "RuntimeError: the device is full", "another": "absent: No module named 'numba'"
    } and row.wrong == []  # fmt: skip
    assert len(row.results) == 2


def test_backends_that_are_absent_stand_in_each_row_of_theirs() -> None:
    measure, cases, moves = load("gpu_measure"), load("gpu_cases"), load("gpu_moves")
    bench = bench_of({}, absent := {"kvdist": "absent: a reason"})
    assert measure.measure(cases.squares(bench), bench).left_out == absent
    assert measure.measure(moves.copy(bench), bench).left_out == {}


def test_a_row_says_who_won_and_whether_its_aims_are_reached() -> None:
    gpu, measure, cases = load("gpu"), load("gpu_measure"), load("gpu_cases")
    case = cases.sums(bench_of({}), 8, cases.DType.FLOAT32)
    row = measure.Row(case)
    assert gpu.winner(row) is None
    assert gpu.verdicts(row, 1e9) == [
        "90% of the copy's bandwidth: not measured",
        "1.8 times as fast as the fastest other: not measured",
    ]
    seconds = {"kvdist": case.moved_bytes / 0.95e9, "torch add chain": 1.0}
    row.results = {name: measure.Result(name, one, one, one, 1, 1e-8) for name, one in seconds.items()}
    row.results["torch add chain"] = measure.Result("torch add chain", 1.7 * seconds["kvdist"], 0, 0, 1, 0.0)
    assert gpu.winner(row) == "kvdist"
    assert gpu.verdicts(row, 1e9) == [
        "90% of the copy's bandwidth: reached, 95%",
        "1.8 times as fast as the fastest other: NOT reached, 1.70 times",
    ]
    marked = [line for line in gpu.table_lines(row, 1e9) if line.endswith("| fastest |")]
    assert len(marked) == 1 and "| kvdist |" in marked[0] and "| 95% |" in marked[0]


def test_results_are_kept_as_numbers_and_as_a_page(found: dict[str, Any], tmp_path: Path) -> None:
    gpu = load("gpu")
    gpu.write(tmp_path, list(found.values()), bench_of({"kvdist": StandIn(REFERENCE)}, {"cupy": "absent: it is"}))
    (numbers,), (page,) = tmp_path.glob("gpu-*.json"), tmp_path.glob("gpu-*.md")
    kept = json.loads(numbers.read_text())
    assert len(kept["rows"]) == len(found) and kept["copy_bytes_per_s"] > 0 and kept["cupy"] == "absent: it is"
    assert all("error" in result for row in kept["rows"] for result in row["results"])
    assert page.read_text().count("| fastest |") >= 20


def without_cuda() -> dict[str, str]:
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}


def test_make_gpu_without_a_device_runs_no_test_and_fails() -> None:
    command = ["make", "--no-print-directory", "gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, env=without_cuda(), capture_output=True, text=True)
    assert done.returncode != 0 and done.stdout == ""
    (sentence,) = [line for line in done.stderr.splitlines() if "make" not in line]
    assert re.fullmatch(r"gpu: there is no CUDA device that torch can use here; .+", sentence)


def test_the_tests_for_gpus_are_found_without_zeromq_and_without_plugins_of_pytest(tmp_path: Path) -> None:
    (tmp_path / "absent.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('zmq', 'rich', 'pytest_timeout', 'xdist', 'hypothesis'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "absent", "-m", "gpu", "--collect-only", "-q"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/training/test_replicas.py::test_a_network_is_replicated_on_a_gpu_and_trained_there" in done.stdout
