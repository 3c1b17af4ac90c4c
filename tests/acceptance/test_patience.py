"""How long a process may be silent: KVDIST_PATIENCE_S, and what it replaced."""

from __future__ import annotations

import signal

import pytest

from tests.acceptance.programs import ROUNDS, is_going_on


def stop(job, name, seconds):
    """Let a process stand still for so long."""
    job.kill(name, signal.SIGSTOP)
    with pytest.raises(AssertionError, match="not within"):
        job.wait(lambda: any(process.code is not None for process in job.processes.values()), "an end", seconds)
    job.kill(name, signal.SIGCONT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["worker-1", "server-0", "scheduler"])
def test_a_process_may_stand_still_for_five_seconds(job, script, tmp_path, name):
    job.cluster(2, 1, script(ROUNDS), str(tmp_path), KVDIST_PATIENCE_S="10")
    is_going_on(job)
    stop(job, name, 5.0)
    is_going_on(job)
    (tmp_path / "end").touch()
    job.succeed()
    assert all("right in all rounds" in job.processes[f"worker-{rank}"].text for rank in range(2))


@pytest.mark.slow
def test_a_debugger_may_stop_a_process_for_longer_than_the_default_if_patience_says_so(job, script, tmp_path):
    job.launch(2, 1, script(ROUNDS), str(tmp_path), options=["--patience", "3600"], KVDIST_PATIENCE_S="")
    is_going_on(job, "launcher")
    stop(job, "worker-1", 13.0)
    is_going_on(job, "launcher")
    (tmp_path / "end").touch()
    job.succeed()
    assert len(job.processes["launcher"].lines_with("right in all rounds")) == 2


@pytest.mark.parametrize("name", ["worker-1", "server-0"])
def test_who_stands_still_for_longer_than_a_short_patience_is_named(job, script, tmp_path, name):
    job.cluster(2, 1, script(ROUNDS), str(tmp_path), KVDIST_PATIENCE_S="2")
    is_going_on(job)
    job.kill(name, signal.SIGSTOP)
    job.finish(but=name)
    assert job.processes[name].code is None, "it has not ended by itself"
    for process in job.processes.values():
        if process.name != name:
            assert f"{name} (" in process.text and "was lost" in process.text, job.transcript()
    job.kill(name)
    job.finish()


@pytest.mark.parametrize("old", ["KVDIST_SILENCE_S", "KVDIST_RECONNECT_GRACE_S"])
def test_settings_that_patience_replaced_are_refused(job, script, old):
    job.launch(1, 1, script("print('started')"), **{old: "60"})
    job.node("scheduler", 1, 1, **{old: "60"})
    codes = job.finish()
    assert codes == {"launcher": 2, "scheduler": 2}, job.transcript()
    for process in job.processes.values():
        assert f"{old} is 60" in process.text and "replaced by KVDIST_PATIENCE_S" in process.text, job.transcript()
        assert "started" not in process.text


def test_the_end_of_a_process_is_noticed_at_once_however_patient_the_job_is(job, script, tmp_path):
    job.cluster(2, 1, script(ROUNDS), str(tmp_path), KVDIST_PATIENCE_S="3600")
    is_going_on(job)
    job.kill("worker-1")
    codes = job.finish()
    assert codes["worker-1"] == -signal.SIGKILL
    assert "worker-1 (" in job.processes["worker-0"].text, job.transcript()
