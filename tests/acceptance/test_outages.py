"""Packets between two hosts are lost without a word for a while: for less than the patience, and for longer."""

from __future__ import annotations

import pytest

from tests.acceptance.programs import ROUNDS, is_going_on
from tests.namespaces import outage

pytestmark = pytest.mark.machines

PATIENCES_S = [4, pytest.param(10, marks=pytest.mark.slow)]
BACK_SHARE = 0.4
"""Of the patience: by then every connection is back. A dial in vain, a pause and another dial take half of this."""

UPDATED = (
    ROUNDS.replace('    store.init("w"', '    store.set_optimizer("sgd", learning_rate=1.0)\n    store.init("w"')
    .replace("value = np.full(20_000, rounds,", "value = np.full(20_000, -1,")
    .replace("store.num_workers * rounds", "store.num_workers * (rounds + 1)")
)
"""The same with a store that updates, which alone can go on without a worker."""


@pytest.mark.parametrize(
    ("patience_s", "on_loss", "program", "shares"),
    [
        (4, "fail", ROUNDS, (0.70, 0.85, 0.95)),
        pytest.param(10, "fail", ROUNDS, (0.70, 0.85, 0.95), marks=pytest.mark.slow),
        pytest.param(4, "continue", UPDATED, (0.60, 0.70, 0.80), marks=pytest.mark.slow),
    ],
)
def test_outages_that_are_shorter_than_the_patience_lose_nobody(
    job, script, hosts, cluster_over_link, tmp_path, patience_s, on_loss, program, shares
):
    words = {"KVDIST_PATIENCE_S": str(patience_s), "KVDIST_ON_LOSS": on_loss}
    cluster_over_link(2, 1, script(program), str(tmp_path), **words)
    for share in shares:
        is_going_on(job)
        lose_packets_for(job, hosts, share * patience_s)
        is_going_on(job)
        let_run(job, BACK_SHARE * patience_s)
        idle_before = times_idle(job)
        (tmp_path / "idle").touch()
        job.wait(lambda: times_idle(job) > idle_before, "a worker idles, for which the other waits")  # noqa: B023
        lose_packets_for(job, hosts, share * patience_s)
        let_run(job, BACK_SHARE * patience_s)
        (tmp_path / "idle").unlink()
    is_going_on(job)
    (tmp_path / "end").touch()
    job.succeed()
    assert all("right in all rounds" in job.processes[f"worker-{rank}"].text for rank in range(2))


def times_idle(job):
    return sum(len(job.processes[f"worker-{rank}"].lines_with("idle")) for rank in range(2))


def lose_packets_for(job, hosts, seconds):
    with outage(hosts):
        let_run(job, seconds)


def let_run(job, seconds):
    """Take in what the processes print for so long."""
    with pytest.raises(AssertionError, match="not within"):
        job.wait(lambda: False, "", seconds)


@pytest.mark.parametrize("patience_s", PATIENCES_S)
def test_an_outage_that_is_much_longer_than_the_patience_ends_every_process(
    job, script, hosts, cluster_over_link, tmp_path, patience_s
):
    cluster_over_link(2, 1, script(ROUNDS), str(tmp_path), KVDIST_PATIENCE_S=str(patience_s))
    is_going_on(job)
    lose_packets_for(job, hosts, 1.6 * patience_s)
    codes = job.finish()
    assert all(codes.values()), job.transcript()
    for process in job.processes.values():
        assert "was lost" in process.text, job.transcript()
