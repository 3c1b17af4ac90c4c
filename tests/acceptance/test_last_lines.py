"""What a user reads last when a job has gone wrong: the cause, and what to do about it."""

from __future__ import annotations

import re
import sys

import pytest

from tests.cases import each
from tests.integration.processes import Job

START = """
    import os, sys, time
    from pathlib import Path
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    rank = store.rank
    store.init("w", np.zeros(4, np.float32))
"""


def closing_lines(job: Job) -> list[str]:
    """The lines that the launcher writes when every process has ended."""
    lines = job.processes["launcher"].text.splitlines()
    begin = max((place for place, line in enumerate(lines) if not line.startswith("kvdist-launch: ")), default=-1)
    return lines[begin + 1 :]


@each(
    "options, cure",
    [
        (["--on-loss", "continue"], r".* no other process has its weights\. --replicas 1 .* --snapshots DIR .*"),
        (["--on-loss", "wait", "--restart", "3"], r".*; --on-loss continue --replicas 1 lets another server go on.*"),
        ([], r".*; --on-loss continue --replicas 1 lets another server go on.*"),
    ],
)
def test_a_lost_server_names_what_keeps_its_weights(job, script, options, cure):
    program = script(START + "    print('ready', flush=True)\n    time.sleep(600)\n    store.close()\n")
    job.launch(1, 2, program, options=options)
    job.line("launcher", "ready")
    job.kill("server-1")
    job.finish()
    *_, last = closing_lines(job)
    assert re.match(r"kvdist-launch: server-1 \(pid \d+\) was killed by signal 9 \(SIGKILL\) after ", last), last
    assert re.fullmatch(cure, last), last


def test_a_worker_hears_what_would_have_kept_the_weights_of_a_lost_server(job, script):
    program = script(START + "    store.pull('w')\n    print('ready', flush=True)\n    time.sleep(600)\n")
    job.cluster(1, 2, program, KVDIST_ON_LOSS="continue")
    job.line("worker-0", "ready")
    job.kill("server-1")
    line = job.line("scheduler", "server-1 (host ")
    assert "no other process has its weights. --replicas 1 (KVDIST_REPLICAS)" in line
    job.kill("worker-0")
    job.finish()


UNEVEN = """
    for step in range(3 if rank == 0 else 2):
        store.pushpull("w", np.ones(4, np.float32))
    store.average(1.0)
"""


def test_a_deadlock_names_the_calls_and_what_lets_workers_have_different_numbers_of_batches(job, script):
    launcher = job.launch(2, 1, script(START + UNEVEN))
    job.finish()
    *_, last = closing_lines(job)
    assert re.match(r"kvdist-launch: deadlock after [\d.]+ s; job ended with exit code 1: worker-0 waits for", last)
    assert "worker-0 waits for worker-1 to push key 'w' (step 3), in pushpull of key 'w'" in last
    assert re.search(r"worker-1 waits for worker-0 in [^;]*average of", last)
    assert last.endswith("take `with trainer.join():` or a QueueSampler")
    shown = [line for line in launcher.lines_with("deadlock: ") if not line.startswith(("w0 ", "w1 "))]
    assert shown == [], "servers and the scheduler are not blamed"
    assert launcher.code == 1


@each("call", ["average(1.0)", "barrier()", "init('v', np.zeros(4))"])
def test_a_deadlock_of_a_call_that_rank_0_makes_alone_says_that_every_worker_must_make_it(job, script, call):
    alone = f"    if rank == 0:\n        store.{call}\n    store.pushpull('w', np.ones(4, np.float32))\n"
    job.launch(2, 1, script(START + alone))
    job.finish()
    last = closing_lines(job)[-1]
    assert ". Every worker must make the call of worker-0, outside of any `if rank == 0:`; where workers" in last, last


def test_a_deadlock_in_which_no_round_is_awaited_asks_for_the_same_order_alone(job, script):
    order = "    for key in 'ab' if rank == 0 else 'ba':\n        store.init(key, np.zeros(4, np.float32))\n"
    job.launch(2, 1, script(START + order))
    job.finish()
    assert closing_lines(job)[-1].endswith(". Every worker must make the same calls in the same order")


TOGETHER = """
    import os, sys, time
    from pathlib import Path

    folder, rank = Path(sys.argv[1]), os.environ["KVDIST_RANK"]
    (folder / rank).touch()
    while len(list(folder.iterdir())) < 4:
        time.sleep(0.01)
    {ends}
"""
"""Four workers, which go on when all are there."""


@each("servers", [0, 1])
def test_an_error_that_all_workers_raise_is_shown_once(job, script, tmp_path, servers):
    folder = tmp_path / "there"
    folder.mkdir()
    program = script(TOGETHER.format(ends="raise LookupError('no such column: price')"))
    launcher = job.launch(4, servers, sys.executable, program, str(folder), options=["--grace", "60"])
    job.finish()
    assert len(launcher.lines_with("│ LookupError: no such column: price")) == 1, job.transcript()
    assert len(launcher.lines_with("Traceback (most recent call last):")) == 1
    *_, last = closing_lines(job)
    assert last.partition("kvdist-launch: ")[2].startswith("all 4 workers failed with exit code 1 after "), last
    assert last.endswith("job ended with exit code 1: LookupError: no such column: price")


def test_errors_that_differ_are_all_shown(job, script, tmp_path):
    folder = tmp_path / "there"
    folder.mkdir()
    program = script(TOGETHER.format(ends="raise LookupError(f'no such column on {rank}')"))
    launcher = job.launch(4, 0, sys.executable, program, str(folder), options=["--grace", "60"])
    job.finish()
    assert len(launcher.lines_with("│ LookupError: no such column on ")) == 4, job.transcript()
    assert len(launcher.lines_with("Traceback (most recent call last):")) == 4
    assert re.search(r"exit code 1: LookupError: no such column on \d$", closing_lines(job)[-1])


def test_a_lost_peer_is_told_by_one_of_the_workers_that_lost_it(job, script):
    ends = "    print('ready', flush=True)\n    while True:\n        store.pull('w')\n        time.sleep(0.01)\n"
    launcher = job.launch(4, 1, script(START + ends), options=["--grace", "60"])
    job.line("launcher", "ready", count=4)
    job.kill("server-0")
    job.finish()
    assert len(launcher.lines_with("│ kvdist.errors.PeerLostError: server-0 ")) == 1, job.transcript()


@pytest.mark.parametrize("closes", [False, True])
def test_steps_that_some_workers_did_not_make_are_told_unless_all_have_closed_their_stores(job, script, closes):
    rounds = f"""
    for step in range(5 if rank == 0 else 3):
        store.push("w", np.ones(4, np.float32))
    if {closes}:
        store.close()
    """
    launcher = job.launch(2, 1, script(START + rounds))
    job.finish()
    assert launcher.code == 0, job.transcript()
    told = launcher.lines_with("WARNING: worker-0 made 5 steps and worker-1 3: the last steps lack the gradients")
    assert len(told) == (not closes), job.transcript()
    if told:
        assert "trainer.join()" in told[0] and "QueueSampler" in told[0]
        assert told[0].endswith("store.close(), which worker-0, worker-1 did not call")
