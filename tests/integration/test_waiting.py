"""Workers are killed and started again while the others wait for them; the weights are those of an undisturbed run."""

from __future__ import annotations

import re
import signal

import pytest

from tests.cases import each
from tests.test_documentation import ROOT, fenced

WAITS = ["--on-loss", "wait"]


KILLED = "was killed by signal 9 (SIGKILL); starting it again"


def weights_of(job, kind, victim, lives, ended=KILLED, **environment):
    """The digest that all workers end with; all deaths must have happened."""
    options = [*WAITS, *(["--restart", str(lives)] if lives else [])]
    options += ["--policy", "local_sgd:3"] if kind == "local steps" else []
    launcher = job.launch(3, 2, "waiting.py", kind, str(victim), str(lives), options=options, **environment)
    job.finish()
    assert launcher.code == 0, job.transcript()
    killed = launcher.lines_with(ended)
    assert len(killed) == len(launcher.lines_with("all wait up to 120 s for its return")) == lives, job.transcript()
    back = [re.search(r"in life (\d) at version (\d+)", line) for line in launcher.lines_with("is back in life")]
    assert [int(found[1]) for found in back if found] == [*range(1, lives + 1)], job.transcript()
    versions = [int(found[2]) for found in back if found]
    assert versions == sorted(versions) and (not lives or versions[-1] > 0), "it goes on where it was"
    digests = {line.rpartition("weights ")[2] for line in launcher.lines_with("weights ")}
    assert len(launcher.lines_with("weights ")) == 3 and len(digests) == 1, job.transcript()
    return digests.pop()


@pytest.mark.parametrize(
    ("kind", "victim", "lives"),
    [
        ("momentum", 1, 3),
        ("local steps", 1, 3),
        pytest.param("adam", 0, 5, marks=pytest.mark.slow),
        pytest.param("rows", 2, 5, marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_is_killed_again_and_again_changes_no_bit_of_the_weights(job, kind, victim, lives):
    assert weights_of(job, kind, victim, lives) == weights_of(job, kind, victim, 0)


def test_nor_does_one_that_ends_by_an_exception_or_asks_to_be_started_again(job):
    undisturbed = weights_of(job, "momentum", 1, 0)
    for ends, ended in [
        ("exception", "failed with exit code 1; starting it again"),
        ("75", "ended with exit code 75; starting it again"),
    ]:
        assert weights_of(job, "momentum", 1, 2, ended, ENDS=ends) == undisturbed, ends


@pytest.mark.parametrize("victims", ["1", pytest.param("0,1,2", marks=pytest.mark.slow, id="all at once")])
def test_the_script_of_the_page_on_checkpoints_goes_on_where_it_was(job, tmp_path, victims):
    (script,) = [block for block in fenced(ROOT / "docs" / "checkpoints.md", "python") if "NoCheckpoint" in block]
    (tmp_path / "train.py").write_text(script.replace("step % 50", "step % 5"))
    words = ("resuming.py", str(tmp_path), victims, "12", "18")
    options = [*WAITS, "--restart", "3"]
    launcher = job.launch(3, 2, *words, options=options, KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.finish()
    assert launcher.code == 0, job.transcript()
    for rank in victims.split(","):
        assert launcher.lines_with(f"worker-{rank} was started 2 times; it was killed by signal 9"), (
            "the fault happened"
        )
    back = launcher.lines_with("is back at version 12")
    assert len(back) == len(victims.split(",")), job.transcript()
    assert len(launcher.lines_with("ended in step 60 at version 60")) == 3, job.transcript()


def weights_with_second(job, tmp_path, lives):
    """The weights that all workers end with, where a second model comes after one was killed and is back."""
    folder = tmp_path / str(lives)
    folder.mkdir()
    options = [*WAITS, *(["--restart", str(lives)] if lives else [])]
    launcher = job.launch(3, 2, "waiting_second.py", str(folder), "0", str(lives), options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("was killed by signal 9 (SIGKILL); starting it again")) == lives, job.transcript()
    lines = [line.rpartition("weights ")[2] for line in launcher.lines_with("weights ")]
    assert len(lines) == 3 and len(set(lines)) == 1, job.transcript()
    return lines[0]


def test_a_model_that_is_declared_when_a_killed_worker_is_back_has_each_of_its_steps(job, tmp_path):
    disturbed = weights_with_second(job, tmp_path, 1)
    assert disturbed == weights_with_second(job, tmp_path, 0)
    assert disturbed.endswith(f"and {[-111.0 * 21] * 3}")


def test_a_model_that_is_declared_after_the_first_steps_is_refused_by_the_name_of_its_key(job, tmp_path):
    launcher = job.launch(3, 2, "waiting_second.py", str(tmp_path), "3", "0", options=WAITS)
    job.finish()
    assert launcher.code == 1, job.transcript()
    said = "key 'second' is declared after the first steps, and KVDIST_ON_LOSS is 'wait'"
    assert any("kvdist.errors.ConfigError" in line for line in launcher.lines_with(said)), job.transcript()


@pytest.mark.slow
def test_a_worker_that_does_not_come_back_in_time_ends_the_job_by_its_name(job):
    launcher = job.launch(2, 1, "waiting.py", "momentum", "1", "1", options=WAITS, KVDIST_RETURN_S="1")
    job.finish()
    assert launcher.code in (75, 128 + signal.SIGKILL), job.transcript()
    (line,) = launcher.lines_with("all have waited for its return, and it has not come back within 1 s")
    assert "worker-1" in line and "killed by signal 9" in line, job.transcript()
    assert launcher.lines_with("was killed by signal 9 (SIGKILL); the other workers wait for it"), job.transcript()


@each(
    "option, value",
    [("--replicas", "1"), ("--snapshots", "snapshots"), ("--max-workers", "4")],
)
def test_what_goes_on_without_lost_workers_is_refused_beside_it(job, option, value):
    launcher = job.launch(2, 2, "nothing.py", options=[*WAITS, "--restart", "1", option, value])
    job.finish()
    assert launcher.code == 2, job.transcript()
    assert launcher.lines_with(f"--on-loss wait only waits for lost workers, but {option} is {value}")
