"""What identifies a parameter on all workers is its name, in whatever order each of them lists its own."""

from __future__ import annotations

import ast
import re

import pytest

pytest.importorskip("torch")

STEP = {"a": 0.0, "b": 3.0, "c": 7.0, "frozen": 7.0}
TWO = {"a": -1.0, "b": 1.0, "c": 5.0, "frozen": 7.0}


def weights(line):
    return ast.literal_eval(re.search(r"\{.*\}$", line)[0])


def test_parameters_are_matched_by_their_names_on_every_store_and_under_every_policy(job):
    launcher = job.launch(2, 1, "orders.py", "stores")
    job.succeed()
    lines = launcher.worker_lines()
    assert len(lines) == 2 * 8, job.transcript()
    for line in lines:
        assert weights(line) == (TWO if "dist_async" in line else STEP), job.transcript()


def test_groups_and_states_of_torch_follow_the_names(job):
    launcher = job.launch(2, 1, "orders.py", "optimizers")
    job.finish()
    # b had a momentum of 8, of which a half is left, and its gradient of 2.
    for line in launcher.lines_with("optimizer {"):
        assert weights(line) == STEP | {"b": -1.0}, job.transcript()
    assert len(launcher.lines_with("momentum 6.0")) == 2, job.transcript()


def test_a_checkpoint_in_another_order_is_refused(job, tmp_path):
    launcher = job.launch(2, 1, "orders.py", "checkpoints", str(tmp_path), KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.succeed()
    assert [weights(line) for line in launcher.lines_with("loaded {")] == [STEP | {"c": 5.0}] * 4, job.transcript()
    refused = launcher.lines_with("was saved with the parameters in another order: it has 'a' in the place of 'frozen'")
    assert len(refused) == 4, job.transcript()


def test_what_is_not_trained_comes_from_rank_0_whatever_its_type(job, tmp_path):
    launcher = job.launch(2, 1, "orders.py", "carried", str(tmp_path), KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.succeed()
    expected = [[True, False], [300, 300], [400, 400], [1.5 + 1.5j, 3 - 1.5j], True]
    assert len(launcher.lines_with(f"carried {expected}")) == 4, job.transcript()


def test_workers_whose_buffers_differ_are_refused(job):
    launcher = job.launch(2, 1, "orders.py", "buffers")
    job.succeed()
    for what in ("name", "late name", "shape", "type", "none"):
        for kind in ("dist", "collective"):
            assert len(launcher.lines_with(f"refused: {what} {kind}")) == 2, job.transcript()


def test_workers_whose_parameters_have_other_names_or_none_are_refused(job):
    launcher = job.launch(2, 1, "orders.py", "names")
    job.succeed()
    refused = launcher.lines_with("refused: the workers do not agree")
    assert len(refused) == 4, job.transcript()
    assert len([line for line in refused if "of 'a' to 'x'" in line and "of 'a' to 'b'" in line]) == 2


@pytest.mark.parametrize("on_loss", ["continue", "wait"])
def test_a_worker_that_comes_back_with_another_order_trains_the_same_parameters(job, tmp_path, on_loss):
    launcher = job.launch(
        2, 1, "orders.py", "returns", str(tmp_path / "end"), options=["--on-loss", on_loss, "--restart", "1"]
    )
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-1 was started 2 times; it was killed by signal 9"), "the fault happened"
    assert len(launcher.lines_with("returned True")) == 2, job.transcript()
