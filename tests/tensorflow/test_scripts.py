"""The scripts of Horovod's documents at two processes, with the lines changed that docs/collective.md names."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.keras.jobs import as_of_torchrun

PROGRAMS = Path(__file__).with_name("programs")
TIMEOUT_S = 280.0
"""For processes that import TensorFlow, which takes half a minute each on a machine that is busy."""

pytestmark = pytest.mark.timeout(TIMEOUT_S + 20)


def run(job, tmp_path, name, *arguments, ranks=2):
    """Run a program at some ranks; of each what it says of itself, once all have the same weights."""
    paths = [str(PROGRAMS / name), *map(str, arguments)]
    for rank in range(ranks):
        # TensorFlow imports what it makes of a function from a temporary file, and leaves its compiled form there.
        variables = {**as_of_torchrun(rank, ranks, job.port), "PYTHONDONTWRITEBYTECODE": "1"}
        job.start(f"rank-{rank}", ["env", "-C", str(tmp_path), sys.executable, *paths], **variables)
    job.succeed(TIMEOUT_S)
    return reports("\n".join(job.processes[f"rank-{rank}"].text for rank in range(ranks)), ranks)


def reports(text, ranks):
    """What each rank has said of itself in a text, once all have told the same digest."""
    assert len(set(re.findall(r"digest (\S+)", text))) == 1, text
    said = sorted(re.findall(r"rank (\d) of (\d): (.*)$", text, re.MULTILINE))
    assert [line[:2] for line in said] == [(str(rank), str(ranks)) for rank in range(ranks)], text
    return [dict(zip(words[::2], words[1::2], strict=True)) for words in (line[2].split() for line in said)]


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
    for result in run(job, tmp_path, "loop.py", 120):
        assert int(result["steps"]) == 60 and float(result["loss"]) < 1.5, job.transcript()
    assert len(job.processes["rank-0"].lines_with("Step #")) == 6
    assert job.processes["rank-1"].lines_with("Step #") == []


def test_the_session_script_trains_and_goes_on_from_the_checkpoint_of_rank_0(job, tmp_path):
    logs = tmp_path / "train_logs"
    for result in run(job, tmp_path, "session.py", 40, logs):
        assert float(result["loss"]) < 0.9 * float(result["first"]), job.transcript()
    assert (logs / "checkpoint").exists()
    job.processes.clear()
    for result in run(job, tmp_path, "session.py", 60, logs):
        assert int(result["began"]) == 40, job.transcript()
