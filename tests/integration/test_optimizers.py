"""Optimizers on servers: what they compute, what reaches them while they run, what is refused."""

from __future__ import annotations

import os
import shutil
from collections import Counter

import pytest


def run(job, workers, scenarios, servers=2, timeout_s=100.0, **variables):
    """Launch scenarios of `programs/optimizers.py`, one after the other in one job; every worker has checked each.

    Returns: the lines that the workers printed, without their prefixes.
    """
    job.launch(workers, servers, "optimizers.py", scenarios, **variables)
    job.succeed(timeout_s)
    lines = [line.split(" │ ", 1)[1] for line in job.processes["launcher"].worker_lines()]
    for scenario in scenarios.split(","):
        checked = sorted(line for line in lines if line.startswith(f"{scenario} checked on"))
        assert checked == [f"{scenario} checked on {rank} of {workers}" for rank in range(workers)], job.transcript()
    return lines


def test_two_workers_and_two_servers_see_the_same_weights_and_learning_rates(job):
    run(job, 2, "gluon_step,learning_rate,trainer_learning_rate,same_from_all,different,schedule,masters")


def test_two_workers_make_the_steps_of_torchs_own_optimizer_in_one_process(job):
    run(job, 2, "torchs_own", timeout_s=300.0)  # the first optimizer of torch imports its compiler
    for cache in job.folder.glob("torchinductor_*"):  # made by `torch.optim`
        shutil.rmtree(cache)


def test_servers_compute_what_an_updater_does_that_has_whole_keys(job):
    scenarios = "lars,lamb,lans,rows,noise,nadam"
    digests = Counter(line for line in run(job, 2, scenarios) if line.startswith("digest"))
    assert list(digests.values()) == [2] * 6, "each worker prints the same digest"


RULE = """
from dataclasses import dataclass
from typing import ClassVar

from kvdist.optimizer import Optimizer, register


@register
@dataclass(kw_only=True, eq=False)
class Quartering(Optimizer):
    name: ClassVar[str] = "quartering"

    @property
    def state_names(self):
        return ()

    def apply(self, weight, grad, out, state, scratch, step):
        out[...] = weight * 0.25 + grad * step.lr
"""


@pytest.fixture
def rule(tmp_path):
    (tmp_path / "rules_of_the_operator.py").write_text(RULE)
    return os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_an_optimizer_of_the_operators_own_runs_on_the_servers(job, rule):
    run(job, 2, "own_rule", PYTHONPATH=rule, KVDIST_OPTIMIZER_MODULE="rules_of_the_operator")


def test_an_optimizer_that_only_workers_know_is_refused_with_advice(job, rule):
    refused = [line for line in run(job, 2, "own_rule_unknown", PYTHONPATH=rule) if line.startswith("refused")]
    assert len(refused) == 2
    assert all("unknown optimizer 'quartering'" in line and "--server-module" in line for line in refused)


@pytest.mark.slow
def test_seven_workers_take_the_step_of_the_mirrored_systems_test(job):
    run(job, 7, "gluon_step")


@pytest.mark.slow_cases("lost_push")
@pytest.mark.parametrize("scenario", ["disagreement", "lost_push"])
def test_workers_that_disagree_on_the_learning_rate_are_named_to_all_of_them(job, scenario):
    refused = [line for line in run(job, 3, scenario) if line.startswith("refused: ")]
    assert len(refused) == (6 if scenario == "disagreement" else 3)
    for line in refused:
        assert "workers disagree on the learning rate or weight decay of key" in line
        assert all(f"worker-{rank} says lr " in line for rank in range(3))


def test_an_asynchronous_store_without_an_optimizer_says_what_to_do(job):
    refused = [line for line in run(job, 2, "asynchronous_without") if line.startswith("refused: ")]
    assert all("it needs an optimizer: call set_optimizer before the first push" in line for line in refused)
    assert refused


@pytest.mark.slow_cases("batch_sizes", "bfloat16", "groups")
@pytest.mark.parametrize(
    "scenario",
    [
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("nesterov", "adam_w", "clipping")),
        *("bfloat16", "groups", "batch_sizes"),
    ],
)
def test_two_workers_have_the_expected_weights_and_the_same_bits_after(job, scenario):
    digests = Counter(line for line in run(job, 2, scenario) if line.startswith("digest"))
    ways = 2 if scenario in ("bfloat16", "groups", "batch_sizes") else 1
    assert list(digests.values()) == [2] * ways, "each worker prints the same digest, one for each way to update"


@pytest.mark.slow
def test_two_runs_give_the_same_bits(job):
    digests = set()
    for _ in range(2):
        digests |= {line for line in run(job, 3, "same_bits") if line.startswith("digest")}
    assert len(digests) == 1
