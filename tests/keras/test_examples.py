"""The examples with Keras: a script at one, two and four processes, the cells of the notebook, and one of Horovod's."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.collective.scripts import horovodrun

PROGRAMS = Path(__file__).with_name("programs")
EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SCRIPT, NOTEBOOK = EXAMPLES / "keras_fit.py", EXAMPLES / "notebook.ipynb"
TIMEOUT_S = 240.0
"""For processes that import Keras and torch, each on a machine that is busy."""
OF_KERAS = ["-W", "error", "-W", "ignore:__array__ implementation:DeprecationWarning"]

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


@pytest.fixture(autouse=True)
def installed(keras):
    """Whatever the examples need; Keras leaves its settings in a folder of the test's."""
    pytest.importorskip("sklearn")


def results(text, ranks):
    """The loss and the accuracy that all ranks printed."""
    said = re.findall(r"rank (\d) of (\d): Train_loss (\S+) Test_acc (\S+)", text)
    assert sorted(line[:2] for line in said) == [(str(rank), str(ranks)) for rank in range(ranks)], text
    ((loss, accuracy),) = {line[2:] for line in said}
    return float(loss), float(accuracy)


@pytest.mark.slow
def test_the_network_learns_alone_without_a_launcher(job):
    alone = job.start("alone", [sys.executable, *OF_KERAS, str(SCRIPT), "--epochs", "6"])
    job.succeed(TIMEOUT_S)
    loss, accuracy = results(alone.text, 1)
    assert loss < 0.3 and accuracy > 0.9, alone.text


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_learn_the_same_network_and_rank_0_writes_it(job, ranks, tmp_path):
    options = ["--epochs", "8", "--checkpoints", str(tmp_path)]
    launcher = job.launch(ranks, 0, sys.executable, *OF_KERAS, str(SCRIPT), *options)
    job.succeed(TIMEOUT_S)
    loss, accuracy = results(launcher.text, ranks)
    assert loss < 0.5 and accuracy > 0.9, launcher.text
    assert len(launcher.lines_with("finished gradual learning rate warmup")) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint-{epoch}.keras" for epoch in range(1, 9)]


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_in_their_order(job, tmp_path):
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    program = tmp_path / "cells.py"
    program.write_text("\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"), "utf-8")
    notebook = job.start("notebook", ["env", "-C", str(tmp_path), sys.executable, str(program)])
    job.succeed(TIMEOUT_S)
    (line,) = notebook.lines_with(" on 2 processes")
    assert float(line.split()[1]) > 0.8, notebook.text
    assert {"checkpoint-1.keras", "checkpoint-8.keras"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_horovods_imagenet_example_goes_on_from_the_checkpoint_of_rank_0(job, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    script = PROGRAMS / "imagenet.py"
    before, _ = horovodrun(job, tmp_path, script, timeout_s=TIMEOUT_S / 2)
    rates = [float(rate) for rate in before["lr"].split("/")]
    assert before["began"] == "0" and rates[1:] == [0.1, 0.1], before
    after, other = horovodrun(job, tmp_path, script, "--epochs", "5", "--fp16-allreduce", timeout_s=TIMEOUT_S / 2)
    assert after == other and after["began"] == "3" and after["lr"] == "0.010000/0.001000"
    assert float(after["accuracy"]) > 0.8, (before, after)
