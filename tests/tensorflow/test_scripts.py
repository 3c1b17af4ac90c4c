"""Scripts of Horovod's documents and examples at two processes; docs/reference/collective.md: lines that change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.collective.scripts import horovodrun, reports

PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_S = 280.0
"""For processes that import TensorFlow, which takes half a minute each on a machine that is busy."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def test_the_introductions_notebook_trains_with_the_three_callbacks_and_saves_on_rank_0(job, tmp_path):
    notebook = job.start("notebook", ["env", "-C", str(tmp_path), sys.executable, str(PROGRAMS / "fit.py"), "4", "60"])
    job.succeed(TIMEOUT_S)
    first, second = reports(notebook.text, 2)
    assert first == second
    assert float(first["accuracy"]) > 0.8 and float(first["lr"]) == 0.002, job.transcript()
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{epoch}.h5" for epoch in range(1, 5)]
    assert len(notebook.lines_with("w0 │ Epoch 3: finished gradual learning rate warmup to 0.002.")) == 1
    assert not notebook.lines_with("w1 │ Epoch")


def test_the_introductions_loop_with_a_tape_keeps_two_ranks_alike(job, tmp_path):
    for result in horovodrun(job, tmp_path, PROGRAMS / "loop.py", 120, timeout_s=TIMEOUT_S):
        assert int(result["steps"]) == 60 and float(result["loss"]) < 1.5, job.transcript()
    assert len(job.processes["launcher"].lines_with("w0 │ Step #")) == 6
    assert not job.processes["launcher"].lines_with("w1 │ Step #")


def test_the_session_script_trains_and_goes_on_from_the_checkpoint_of_rank_0(job, tmp_path):
    logs, script = tmp_path / "train_logs", PROGRAMS / "session.py"
    for result in horovodrun(job, tmp_path, script, 40, logs, timeout_s=TIMEOUT_S / 2):
        assert float(result["loss"]) < 0.9 * float(result["first"]), job.transcript()
    assert (logs / "checkpoint").exists()
    for result in horovodrun(job, tmp_path, script, 60, logs, timeout_s=TIMEOUT_S / 2):
        assert int(result["began"]) == 40, job.transcript()


@pytest.mark.parametrize("options", [[], ["--fp16-allreduce"]], ids=["whole", "half"])
@pytest.mark.parametrize(("name", "steps"), [("synthetic.py", "13"), ("keras_synthetic.py", "12")])
def test_synthetic_benchmarks(job, tmp_path, name, steps, options):
    first, second = horovodrun(job, tmp_path, PROGRAMS / name, *options, timeout_s=TIMEOUT_S)
    assert first == second and first["steps"] == steps
    assert len(job.processes["launcher"].lines_with("img/sec per CPU")) == 3
