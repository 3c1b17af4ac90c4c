"""`Trainer(share_weights=True)` with real processes."""

from __future__ import annotations

import os

import pytest

pytest.importorskip("torch")


def digests(launcher, word):
    return {line.partition(f"digest {word} ")[2] for line in launcher.text.splitlines() if f"digest {word} " in line}


@pytest.mark.slow_cases("tcp")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_shared_weights_are_those_that_are_copied(job, transport):
    launcher = job.launch(2, 2, "shared_weights.py", "same", KVDIST_TRANSPORT=transport)
    job.succeed()
    assert all(len(digests(launcher, optimizer)) == 1 for optimizer in ("sgd", "adam"))
    shown = [line.partition("shown ")[2] for line in launcher.text.splitlines() if "shown " in line]
    large = "[True, False, True, False]" if transport == "auto" else "[False, False, False, False]"
    assert shown == [large] * 4, job.transcript()


def test_a_change_in_place_is_refused_and_then_everybodys(job):
    launcher = job.launch(2, 2, "shared_weights.py", "changed")
    job.succeed()
    refused = [line for line in launcher.lines_with("refused: parameter 2") if "was changed outside of step()" in line]
    assert len(refused) == 2 and "call trainer.broadcast_parameters()" in refused[0].replace("Call", "call")
    assert len(digests(launcher, "changed")) == 1


@pytest.mark.slow
def test_a_graph_through_older_weights_is_refused(job):
    launcher = job.launch(2, 1, "shared_weights.py", "graphs")
    job.succeed()
    assert len(launcher.lines_with("modified by an inplace operation")) == 2, job.transcript()


@pytest.mark.slow
def test_weights_stay_what_they_were_after_leaving(job, tmp_path):
    os.mkfifo(tmp_path / "done")
    launcher = job.launch(3, 2, "shared_weights.py", "leaving", str(tmp_path / "done"))
    job.succeed()
    assert len(launcher.lines_with("kept")) == 3
