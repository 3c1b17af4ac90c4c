"""A machine that is told again what it was told answers the same, also from a record that was written to a file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.shard import Shard
from kvdist.core.worker.transfers import Transfers
from kvdist.diagnostics.replay import Difference, replay
from kvdist.diagnostics.why import read_dumps
from tests.cases import each
from tests.simulation import SCENARIOS, run, small_messages

REPLAYED = ["checkpoints in a storm", "hosts in a storm", "rows and a killed server", "offloaded and encoded", "quota"]


@each("name", REPLAYED)
def test_every_machine_of_a_cluster_answers_the_same_again(name: str, tmp_path: Path) -> None:
    assert run(0, SCENARIOS[name], tmp_path).used["replayed"] > 100


@each(
    "who, mutant",
    [
        ("scheduler", mock.patch.object(Scheduler, "_announce", lambda self, now: [])),
        ("server-1", mock.patch.object(Shard, "pull", lambda self, sender, message, now: None)),
        ("worker-0", mock.patch.object(Transfers, "release", lambda self, credit: None)),
    ],
)
def test_another_machine_answers_otherwise(who: str, mutant: object, tmp_path: Path) -> None:
    run(1, replace(SCENARIOS["leaver"], victims=("worker-1",), fault_round=1), tmp_path)
    (dump,) = [dump for dump in read_dumps(tmp_path) if dump.process == who]
    with small_messages():
        assert not isinstance(replay(dump.beginning, dump.entries), Difference)
        with mutant:  # type: ignore[attr-defined]
            try:
                outcome = replay(dump.beginning, dump.entries)
            except AssertionError:
                return  # it notices by itself that this cannot be
    assert isinstance(outcome, Difference)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_machine_of_every_cluster_answers_the_same_again(name: str, tmp_path: Path) -> None:
    scenario = SCENARIOS[name]
    if name == "odd copies":
        # A record does not say how many rows a copy was filled with, and with odd times a repetition depends on it.
        scenario = replace(scenario, tables=False)
    assert run(1, scenario, tmp_path).used["replayed"] > 100
