"""What a job does after a loss, and what may not be combined with it."""

from __future__ import annotations

import pytest

from kvdist.config.losses import LossPolicy
from kvdist.config.policies import policy_from
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from tests.cases import each

SIZES = {"num_workers": 2, "num_servers": 2}
GOES_ON = {"on_loss": "continue", **SIZES}
WAITS = {"on_loss": "wait", **SIZES}


@each(
    "facts, sentence",
    [
        ({**WAITS, "replicas": 1}, "KVDIST_ON_LOSS is 'wait' (kvdist-launch --on-loss), which only waits for lost"),
        ({**WAITS, "scheduler_away_s": 5.0}, "but KVDIST_SCHEDULER_AWAY_S is 5.0: leave KVDIST_SCHEDULER_AWAY_S out"),
        ({**WAITS, "policy": policy_from("local_sgd:4,delay=1")}, "under the policy local_sgd:4,delay=1 a lost worker"),
        ({**WAITS, "policy": policy_from("async")}, "do not wait for each other: use continue"),
        ({**WAITS, "has_rounds": False}, "do not wait for each other: use continue"),
        ({**WAITS, "leases": True}, "gives the examples of a lost worker to others: use a SplitSampler"),
        ({**GOES_ON, "workers_update": True}, "servers must hold the weights, and this Trainer's workers update"),
        ({**GOES_ON, "overlaps": True, "snapshots": "d"}, "overlap=True cannot go back to a snapshot"),
        ({**GOES_ON, "min_workers": 2, "has_rounds": False}, "rounds of a dist_async store wait for no worker"),
        ({**GOES_ON, "snapshots": "d", "has_rounds": False}, "which dist_async and the policy async make: take"),
        (
            {**GOES_ON, "snapshots": "d", "policy": policy_from("async:2")},
            "which dist_async and the policy async make: take",
        ),
        ({**GOES_ON, "replicas": 1, "snapshots": "d"}, "replaced by its copy or by a snapshot, not by both"),
        ({**SIZES, "max_workers": 3}, "KVDIST_MAX_WORKERS is 3: others can join only where losses do not end the job"),
        ({**SIZES, "snapshots": "d"}, "set KVDIST_ON_LOSS=continue (kvdist-launch --on-loss continue)"),
        ({**GOES_ON, "max_workers": 1}, "KVDIST_MAX_WORKERS is 1, which is less than the 2 workers at the start"),
    ],
)
def test_a_contradiction_is_refused_with_the_variable_that_was_set(facts, sentence):
    with pytest.raises(ConfigError) as refused:
        LossPolicy(**facts).check()
    assert sentence in str(refused.value)


@each(
    "facts, options, sentence",
    [
        (
            {**WAITS, "replicas": 1},
            ("on_loss", "replicas"),
            "--on-loss wait only waits for lost workers, but --replicas",
        ),
        (
            {**WAITS, "replicas": 1},
            ("on_loss",),
            "--on-loss wait only waits for lost workers, but KVDIST_REPLICAS is 1",
        ),
        ({**SIZES, "replicas": 1}, ("replicas",), "--replicas is 1, but without --on-loss the first loss ends the job"),
        ({**GOES_ON, "num_servers": 1, "replicas": 1}, ("replicas",), "--replicas 1 keeps each copy on another server"),
        ({**GOES_ON, "snapshots": "d"}, ("snapshots",), "add --on-loss continue --restart N, and servers (-s N)"),
        ({**GOES_ON, "snapshots": "d", "restart": 1, "target": "--emit sbatch"}, ("snapshots",), "with --emit sbatch"),
    ],
)
def test_a_launcher_names_the_option_that_was_written(facts, options, sentence):
    written = {name: facts[name] for name in options}
    assert sentence in LossPolicy(**facts, is_launched=True, options=written).refusal()


def test_what_fits_is_not_refused():
    LossPolicy().check()
    LossPolicy(**WAITS, return_s=7.0, restart=3, scheduler_away_s=0.0).check()
    LossPolicy(**GOES_ON, replicas=1, max_workers=4, min_workers=2, restart=3, policy=policy_from("quota:5")).check()
    LossPolicy(**GOES_ON, snapshots="d").check()
    LossPolicy(workers_update=True, overlaps=True, leases=True, has_rounds=False).check()


@each(
    "facts, roles",
    [
        ({**GOES_ON}, set()),
        ({**GOES_ON, "restart": 1}, {Role.WORKER, Role.SCHEDULER}),
        ({**GOES_ON, "restart": 1, "snapshots": "d"}, set(Role)),
        ({**GOES_ON, "restart": 1, "replicas": 1}, set(Role)),
        ({**WAITS, "restart": 1}, {Role.WORKER}),
    ],
)
def test_the_launcher_starts_again_whoever_can_come_back(facts, roles):
    assert LossPolicy(**facts).restarted == roles
