"""Workers train on a queue of examples: each is counted once, whoever dies, leaves, or goes on with a checkpoint."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from kvdist.training.queue_sampler import BATCHES_PER_LEASE

GOES_ON = ["--on-loss", "continue"]
BATCH = 8


def found(job):
    """What the workers that came to the end say: the steps and examples of each, and how often examples count."""
    lines = job.processes["launcher"].lines_with(" steps, version ")
    numbers = [re.search(r"used (\d+) in (\d+) steps, version (\d+); counts (\{.*\})$", line) for line in lines]
    assert numbers and all(numbers), job.transcript()
    assert len({one[4] for one in numbers}) == 1, "all have the same weights at the end"
    assert len({one[3] for one in numbers}) == 1, "and know how many updates they have had"
    return [(int(one[1]), int(one[2])) for one in numbers], ast.literal_eval(numbers[0][4])


@pytest.mark.parametrize(
    ("store", "loader_workers", "num_workers", "examples", "victims"),
    [
        ("dist", "0", 6, 3_000, {1: 100, 2: 200, 4: 150, 5: 300}),
        pytest.param("dist", "2", 4, 10_000, {0: 64, 3: 400}, marks=pytest.mark.slow),
        pytest.param("dist_async", "0", 5, 10_000, {0: 200, 2: 80, 3: 300}, marks=pytest.mark.slow),
    ],
)
def test_every_example_is_counted_once_when_workers_are_killed(
    job, tmp_path, store, loader_workers, num_workers, examples, victims
):
    command = ("leases.py", str(examples), "1", str(BATCH), loader_workers, store, str(victims))
    launcher = job.launch(num_workers, 2, *command, options=GOES_ON, LOADER_TEMP=str(tmp_path))
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("was killed by signal 9 (SIGKILL); the other worker")) == len(victims)
    used, counts = found(job)
    assert len(used) == num_workers - len(victims)
    in_part = len(launcher.lines_with(" in part: in "))
    assert sum(counts.values()) == examples
    assert all(max(both) == 1 for both in counts), "nothing twice, and nothing left out everywhere"
    assert counts.get((1, 1), 0) >= examples - in_part * BATCH, "only what is said to count in part does"


@pytest.mark.slow
def test_every_example_is_counted_once_when_workers_are_killed_again_and_again_and_come_back(job):
    victims = {1: 24, 2: 16, 3: 40, 4: 8, 5: 32}
    command = ("leases.py", "40000", "1", str(BATCH), "0", "dist", str(victims))
    launcher = job.launch(6, 2, *command, options=[*GOES_ON, "--restart", "50"])
    job.finish(timeout_s=600.0)  # some 5,000 steps, on a machine that may have other work
    assert launcher.code == 0, job.transcript()
    kills = len(launcher.lines_with("was killed by signal 9 (SIGKILL); starting it again"))
    assert kills >= 20, "the fault happened, again and again"
    _, counts = found(job)
    in_part = len(launcher.lines_with(" in part: in "))
    assert sum(counts.values()) == 40_000
    assert all(max(both) == 1 for both in counts), "nothing twice, and nothing left out everywhere"
    assert counts.get((1, 1), 0) >= 40_000 - in_part * BATCH, "only what is said to count in part does"


@pytest.mark.parametrize(
    ("kills", "examples", "victims"),
    [(1, 2_000, {2: 160}), pytest.param(4, 40_000, {1: 240, 3: 400}, marks=pytest.mark.slow)],
)
def test_every_example_is_counted_once_when_the_scheduler_and_workers_are_killed(job, kills, examples, victims):
    command = ("leases.py", str(examples), "1", str(BATCH), "0", "dist", str(victims))
    launcher = job.launch(4, 2, *command, options=[*GOES_ON, "--restart", "20"])
    job.line("launcher", "w0 │ has ")
    for count in range(1, kills + 1):
        job.kill("scheduler")
        job.line("launcher", "the scheduler was started again and goes on where it was", count=count)
    job.finish(timeout_s=600.0)  # some 5,000 steps, on a machine that may have other work
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with(f"the scheduler was started {kills + 1} times; it was killed by signal 9"), "the fault"
    _, counts = found(job)
    in_part = len(launcher.lines_with(" in part: in "))
    assert sum(counts.values()) == examples
    assert all(max(both) == 1 for both in counts), "nothing twice, and nothing left out everywhere"
    assert counts.get((1, 1), 0) >= examples - in_part * BATCH, "only what is said to count in part does"


def test_the_others_know_of_the_last_updates_whose_worker_dies_before_it_says_so(job):
    options = [*GOES_ON, "--restart", "1"]
    launcher = job.launch(
        2, 2, "leases.py", f"{5 * BATCH}", "1", f"{BATCH}", "0", "dist", "{}", options=options, DIES_LAST="1"
    )
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("(SIGKILL); starting it again"), "the fault"
    used, counts = found(job)
    assert (16, 2) in used and counts == {(1, 1): 5 * BATCH}
    assert launcher.lines_with("used 16 in 2 steps, version 3"), job.transcript()


def test_who_joins_when_all_examples_are_used_counts_the_updates_that_were_made(job, tmp_path):
    command = ("leases.py", f"{10 * BATCH}", "1", f"{BATCH}", "0", "dist", f"{{1: {BATCH}}}")
    launcher = job.launch(2, 2, *command, options=[*GOES_ON, "--restart", "1"], JOINS_LAST=str(tmp_path))
    job.finish()
    assert launcher.code == 0, job.transcript()
    (joins,) = launcher.lines_with("joins at version ")
    used, counts = found(job)
    assert (0, 0) in used and counts == {(1, 1): 10 * BATCH}
    (made,) = {int(one.rpartition(" version ")[2].partition(";")[0]) for one in launcher.lines_with(" steps, version ")}
    assert int(joins.rpartition(" ")[2]) == made + 1, "it was promised to take part in a version that nobody made"


@pytest.mark.slow
def test_copies_of_servers_know_how_many_examples_are_in_the_weights(job):
    options = [*GOES_ON, "--replicas", "1", "--restart", "9"]
    launcher = job.launch(3, 3, "leases.py", "6000", "1", str(BATCH), "0", "dist", "{1: 400}", options=options)
    job.line("launcher", "w0 │ has ")
    job.kill("server-1")
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("server-1 was started 2 times; it was killed by signal 9"), "the fault"
    _, counts = found(job)  # each worker has compared its weights with `samples_seen`
    assert sum(counts.values()) == 6_000 and all(max(both) == 1 for both in counts)


@pytest.mark.parametrize("batches", [BATCHES_PER_LEASE - 1, BATCHES_PER_LEASE])
def test_who_gets_sigterm_leaves_with_nothing_but_its_leases_and_exit_code_0(job, batches):
    launcher = job.launch(3, 1, "leases.py", "1000", "1", str(BATCH), "0", "dist", "{}", TERMINATED=f"{batches}")
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("SIGTERM: this worker has finished its batch and leaves"), job.transcript()
    used, counts = found(job)
    assert len(used) == 2 and counts == {(1, 1): 1000}, job.transcript()


def test_under_a_quota_who_gets_sigterm_pushes_what_it_has_returns_its_leases_and_leaves_with_exit_code_0(
    job, tmp_path
):
    command = ("leases.py", "1000", "1", str(BATCH), "0", "dist", "{}")
    here = str(tmp_path / "here")
    launcher = job.launch(3, 1, *command, options=["--policy", "quota:400"], TERMINATED="7", HERE=here)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("SIGTERM: this worker has finished its batch and leaves"), "the fault happened"
    made = len(launcher.lines_with("w1 │ has ")) * BATCH
    used, counts = found(job)
    assert len(used) == 2 and counts == {(1, 1): 1000}, "each example counts once"
    assert made == 7 * BATCH and sum(examples for examples, _ in used) == 1000 - made, "nothing was made again"


@pytest.mark.parametrize("way", ["leaves", "again"])
def test_every_example_is_counted_once_when_an_error_interrupts_a_step_that_waits(job, way):
    launcher = job.launch(
        3, 1, "leases.py", "4000", "1", str(BATCH), "0", "dist", "{}", options=GOES_ON, INTERRUPTED=way
    )
    job.finish()
    assert launcher.code == 0, job.transcript()
    fault = "a process of the loader has died; 2 workers go on" if way == "leaves" else "w1 │ begins again"
    assert len(launcher.lines_with(fault)) == 1, job.transcript()
    used, counts = found(job)
    assert len(used) == (2 if way == "leaves" else 3) and counts == {(1, 1): 4000}, job.transcript()


@pytest.mark.slow
def test_another_number_of_workers_goes_on_where_a_checkpoint_was_saved(job, tmp_path):
    folder = str(tmp_path / "saved")
    launcher = job.launch(
        3, 2, "leases.py", "2000", "2", "16", "2", "dist", "{}", folder, KVDIST_CHECKPOINT_ROOT=str(tmp_path)
    )
    job.finish()
    assert launcher.code == 0, job.transcript()
    used, counts = found(job)
    before = sum(examples for examples, _ in used)
    assert 0 < before < 4000 and set(counts) <= {(0, 0), (1, 1)}
    launcher = job.launch(
        2, 1, "leases.py", "2000", "2", "8", "0", "dist", "{}", folder, KVDIST_CHECKPOINT_ROOT=str(tmp_path)
    )
    job.finish()
    assert launcher.code == 0, job.transcript()
    used, counts = found(job)
    assert before + sum(examples for examples, _ in used) == 4000
    assert counts == {(2, 2): 2000}


@pytest.mark.slow
def test_workers_with_other_lengths_are_told_so(job):
    launcher = job.launch(2, 1, "leases.py", "900", "1", "8", "0", "dist", "{}", OTHER_LENGTH="1")
    job.finish()
    assert launcher.code, job.transcript()
    said = " ".join(launcher.text.split())
    assert re.search(r"the workers do not agree: worker-\d has QueueSampler\((900|901), epochs=1", said), said


@pytest.mark.slow
def test_the_example_uses_each_example_once(job):
    program = str(Path(__file__).resolve().parents[2] / "examples" / "queue_of_examples.py")
    launcher = job.launch(3, 1, sys.executable, program, "--examples", "900", options=GOES_ON)
    job.finish()
    assert launcher.code == 0, job.transcript()
    used = [int(line.split("used ")[1].split()[0]) for line in launcher.lines_with(" examples, version ")]
    assert len(used) == 3 and sum(used) == 2700


@pytest.mark.parametrize(
    ("servers", "deaths"),
    [
        *(pytest.param(2, deaths, marks=pytest.mark.slow) for deaths in (["1:24"], ["1:28"], ["1:24", "2:28"])),
        (1, ["1:24", "2:28"]),
        (2, ["1:28", "2:24"]),
    ],
)
def test_an_example_counts_once_in_samples_seen_with_the_first_fragment_that_has_it(job, servers, deaths):
    options = ["--on-loss", "continue", "--restart", "1", "--policy", "diloco:10,fragments=2"]
    launcher = job.launch(3, servers, "fragments.py", *deaths, options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    for death in deaths:
        assert launcher.lines_with(f"worker-{death[0]} was started 2 times; it was killed by signal 9"), "it happened"
    said = {line.rpartition(" ")[2] for line in launcher.lines_with("samples_seen ")}
    assert said == {"1200"}, job.transcript()
