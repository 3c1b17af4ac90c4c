"""Processes that die, stop or leave: whoever waits learns of it within seconds, by name; nothing is left behind.

A killing asserts that the victim was alive and the others blocked when it came.
"""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest

from kvdist.config.sockets import local_endpoint
from tests.integration.processes import EXIT_PEER_LOST, TICKS_MAX, TIMEOUT_S, prefix_of

VICTIMS = ["worker-1", "server-1", "scheduler"]
CALLS = ["pushpull", "barrier", "init"]
QUICK = {"KVDIST_PATIENCE_S": "5"}
"""Long enough that a process which waits for a processor is not taken for one that stands still."""
QUICK_TICKS_MAX = 100 + TICKS_MAX
"""With `QUICK`: twice that patience."""
GRACE = ["--grace", "30"]
"""So that the launcher does not end those who are about to say whom they have lost."""


def all_are_blocked(job, names, call):
    """Wait until the workers say so; whether one was wrong is seen by what it prints afterwards."""
    for name in names:
        for line in ("blocked in", "tick"):
            job.line(name, line, count=1 if name != "launcher" else 2)
    assert any(f"blocked in {call}" in process.text for process in job.processes.values())


def kill(job, victim, number=signal.SIGKILL):
    """Send a signal to a process that runs; when."""
    pid = job.pid_of(victim)
    assert pid in job.marked(), f"{victim} runs"
    return job.kill(victim, number)


def ticks(text, name):
    """How often a worker of the launcher said that it runs."""
    return text.splitlines().count(f"{prefix_of(name)}tick")


def named(victim):
    """How a sentence about the loss of a victim begins."""
    if victim == "scheduler":
        return "scheduler (at ipc:///"
    return f"{victim} (host {socket.gethostname()}, pid "


@pytest.mark.slow_cases("scheduler-barrier", "server-1-barrier", "server-1-pushpull", "worker-1-barrier")
@pytest.mark.parametrize("call", [*CALLS[:2], *(pytest.param(call, marks=pytest.mark.slow) for call in CALLS[2:])])
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_without_a_launcher_is_named_everywhere(job, victim, call):
    job.cluster(2, 2, "faults.py", "blocked", call)
    all_are_blocked(job, ["worker-0", "worker-1"], call)
    before = job.ticks()
    kill(job, victim)
    codes = job.finish()
    assert job.processes[victim].code == -signal.SIGKILL, "the fault happened"
    for name, process in job.processes.items():
        if name == victim:
            continue
        assert named(victim) in process.text, job.transcript()
        assert "was lost" in process.text and "the call returned" not in process.text
        assert codes[name] == EXIT_PEER_LOST, job.transcript()
        if name.startswith("worker"):
            assert "PeerLostError: " in process.text
            assert "1 is known to be lost" in process.text
            host = local_endpoint(job.port) if victim == "scheduler" else socket.gethostname()
            assert process.lines_with(f"lost {victim!r} on {host!r}: "), job.transcript()
            assert process.lines_with("lost again: "), "the next call fails alike"
    job.assert_soon(before)


@pytest.mark.slow_cases(
    "scheduler-barrier", "scheduler-init", "server-1-barrier", "server-1-init", "worker-1-barrier", "worker-1-init"
)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_under_the_launcher_is_named_everywhere(job, victim, call):
    launcher = job.launch(2, 2, "faults.py", "blocked", call, options=GRACE)
    all_are_blocked(job, ["launcher"], call)
    pid = job.pid_of(victim)
    before = launcher.text
    kill(job, victim)
    job.finish()
    assert launcher.code == 128 + signal.SIGKILL
    summary = launcher.text.splitlines()[-1]
    assert f"{victim} (pid {pid}) was killed by signal 9 (SIGKILL)" in summary, job.transcript()
    survivors = [name for name in ("worker-0", "worker-1") if name != victim]
    for name in survivors:
        lost = [line for line in launcher.lines_with(f"lost {victim!r} on ") if line.startswith(prefix_of(name))]
        assert lost, job.transcript()
        assert ticks(launcher.text, name) - ticks(before, name) <= TICKS_MAX, job.transcript()
    raised = launcher.lines_with("PeerLostError: ")  # the same error of several workers is shown once
    assert raised and f": {victim} (" in raised[0], job.transcript()
    assert "the call returned" not in launcher.text


@pytest.mark.parametrize("call", ["save", "close"])
def test_kill_9_of_a_worker_that_saves_or_closes_is_named_everywhere(job, tmp_path, call):
    settings = {"FOLDER": str(tmp_path / "saved"), "KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    job.cluster(2, 2, "faults.py", "blocked", call, **settings)
    all_are_blocked(job, ["worker-0", "worker-1"], call)
    assert f"blocked in {call}" in job.processes["worker-0"].text
    if call == "save":
        job.wait(lambda: any(tmp_path.rglob("server-*.safetensors")), "a server has written its file")
    before = job.ticks()
    kill(job, "worker-0")
    codes = job.finish()
    assert codes.pop("worker-0") == -signal.SIGKILL, "the fault happened"
    assert set(codes.values()) == {EXIT_PEER_LOST}, job.transcript()
    assert all(named("worker-0") in job.processes[name].text for name in codes), job.transcript()
    assert "the call returned" not in job.transcript() and not [*tmp_path.rglob("manifest.json")]
    job.assert_soon(before)


@pytest.mark.slow_cases("scheduler", "server-1")
@pytest.mark.parametrize("victim", VICTIMS)
def test_kill_9_in_the_middle_of_large_transfers_is_named_everywhere(job, victim):
    job.cluster(2, 2, "faults.py", "endless", "20000000")
    for name in ("worker-0", "worker-1"):
        job.line(name, "going")
    before = job.ticks()
    kill(job, victim)
    job.finish()
    job.assert_soon(before)
    for process in job.processes.values():
        if process.name != victim:
            assert named(victim) in process.text and process.code, job.transcript()


@pytest.mark.slow_cases("scheduler", "worker-0")
@pytest.mark.parametrize("victim", ["server-0", "worker-0", "scheduler"])
def test_kill_9_before_the_cluster_is_complete_is_named_to_those_who_wait(job, victim):
    settings = {"KVDIST_EXPLAIN_AFTER_S": "0.5"}
    for name in ("scheduler", "server-0", "server-1", "worker-0", "worker-1"):
        job.node(name, 3, 2, "nothing.py", **settings)
    for name in ("server-0", "server-1", "worker-0", "worker-1"):
        job.line(name, f"{name} has waited ")
    kill(job, victim)
    job.finish()
    for process in job.processes.values():
        if process.name != victim:
            assert named(victim) in process.text and process.code, job.transcript()


@pytest.mark.slow_cases("server-0")
@pytest.mark.parametrize("victim", ["scheduler", "server-0", "worker-0"])
def test_who_stands_still_for_three_patiences_before_the_cluster_is_complete_is_not_lost(job, victim):
    settings = {"KVDIST_EXPLAIN_AFTER_S": "0.5", "KVDIST_PATIENCE_S": "1"}
    for name in ("scheduler", "server-0", "worker-0"):
        job.node(name, 2, 1, "nothing.py", **settings)
    for name in ("server-0", "worker-0"):
        job.line(name, f"{name} has waited ")
    kill(job, victim, signal.SIGSTOP)
    time.sleep(3.0)  # the length of the pause is the fault
    job.kill(victim, signal.SIGCONT)
    job.node("worker-1", 2, 1, "nothing.py", **settings)
    job.finish()
    assert not any(process.code for process in job.processes.values()), job.transcript()


@pytest.mark.slow_cases("server-0")
@pytest.mark.parametrize("victim", ["server-0", "worker-1"])
def test_a_process_that_stands_still_is_noticed(job, victim):
    job.cluster(2, 1, "faults.py", "blocked", "pushpull", **QUICK)
    all_are_blocked(job, ["worker-0", "worker-1"], "pushpull")
    before = job.ticks()
    kill(job, victim, signal.SIGSTOP)
    job.finish(but=victim)
    job.assert_soon(before, QUICK_TICKS_MAX)
    survivors = [process for process in job.processes.values() if process.name != victim]
    for process in survivors:
        assert f"{victim} (" in process.text and "was lost" in process.text, job.transcript()
    assert job.processes[victim].code is None, "the fault happened: it did not end by itself"
    job.kill(victim)
    job.finish()


def test_a_scheduler_that_stands_still_is_noticed(job):
    job.cluster(2, 1, "faults.py", "blocked", "pushpull", **QUICK)
    all_are_blocked(job, ["worker-0", "worker-1"], "pushpull")
    before = job.ticks()
    kill(job, "scheduler", signal.SIGSTOP)
    job.finish(but="scheduler")
    job.assert_soon(before, QUICK_TICKS_MAX)
    for name in ("server-0", "worker-0", "worker-1"):
        assert named("scheduler") in job.processes[name].text, job.transcript()
    job.kill("scheduler")
    job.finish()


def test_a_pause_that_is_shorter_than_the_patience_hurts_nobody(job):
    job.cluster(2, 1, "faults.py", "endless")
    job.line("worker-0", "going")
    job.line("worker-1", "going")
    kill(job, "server-0", signal.SIGSTOP)
    time.sleep(0.7)  # the length of the pause is the fault
    job.kill("server-0", signal.SIGCONT)
    with pytest.raises(AssertionError, match="not within 1.5 s"):
        job.wait(lambda: any(p.code is not None for p in job.processes.values()), "somebody ends", timeout_s=1.5)
    kill(job, "worker-1")
    job.finish()


def test_an_exception_in_one_script_ends_the_others_with_a_sentence_that_names_it(job):
    job.cluster(3, 2, "faults.py", "raises")
    codes = job.finish()
    assert codes["worker-1"] == 1
    sentence = "ended by an unhandled RuntimeError: the script of worker 1 is wrong"
    for name in ("worker-0", "worker-2", "server-0", "server-1", "scheduler"):
        assert sentence in job.processes[name].text and "worker-1 (host " in job.processes[name].text, job.transcript()
        assert codes[name] == EXIT_PEER_LOST


def test_an_exception_in_one_script_is_the_launchers_first_cause(job):
    launcher = job.launch(3, 2, "faults.py", "raises")
    job.finish()
    assert launcher.code == 1
    assert "worker-1 (pid " in launcher.text.splitlines()[-1], job.transcript()
    assert "failed with exit code 1" in launcher.text.splitlines()[-1], job.transcript()


def test_a_worker_that_exits_without_a_word_is_lost(job):
    job.cluster(2, 1, "faults.py", "exits", "0")
    codes = job.finish()
    assert codes["worker-1"] == 0 and codes["worker-0"] == EXIT_PEER_LOST
    assert named("worker-1") in job.processes["worker-0"].text


@pytest.mark.parametrize("code", [0, 7])
def test_a_worker_that_exits_without_a_word_is_lost_under_the_launcher(job, code):
    launcher = job.launch(2, 1, "faults.py", "exits", str(code), options=GRACE)
    job.finish()
    raised = launcher.lines_with("PeerLostError: ")
    assert raised and raised[0].startswith("w0 │") and "worker-1 (" in raised[0], job.transcript()
    # Where nobody failed by itself, the first cause is that a peer was lost.
    assert launcher.code == (code or EXIT_PEER_LOST), job.transcript()
    assert any("worker-1 (" in line for line in launcher.lines_with("kvdist-launch: ")), job.transcript()


def test_sys_exit_with_a_code_fails_the_job_under_the_launcher(job, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    launcher = job.launch(2, 1, "faults.py", "exits_by_itself", "3", FIFO=str(tmp_path / "fifo"))
    job.finish()
    assert launcher.code == 3
    assert "worker-1 (pid " in launcher.text.splitlines()[-1] and "failed with exit code 3" in launcher.text


def test_an_interrupted_worker_is_lost_by_name(job):
    job.cluster(2, 1, "faults.py", "endless")
    job.line("worker-0", "going")
    job.line("worker-1", "going")
    kill(job, "worker-1", signal.SIGINT)
    codes = job.finish()
    assert codes["worker-1"] == -signal.SIGINT, "the fault happened"
    for name in ("worker-0", "server-0", "scheduler"):
        text = job.processes[name].text
        assert named("worker-1") in text and "ended by an unhandled KeyboardInterrupt" in text, job.transcript()


def test_a_worker_that_ends_without_a_store_is_told_to_those_who_wait(job):
    launcher = job.launch(2, 1, "faults.py", "never_joins")
    job.finish()
    assert launcher.code != 0 and "the call returned" not in launcher.text
    text = "worker-1 ended without having joined the cluster, but worker-0 waits for it: every worker must call"
    assert text in launcher.text, job.transcript()


def test_a_job_whose_workers_need_no_store_ends_well(job):
    job.launch(2, 1, "faults.py", "never_joins_at_all")
    job.succeed()


def test_kill_9_of_the_launcher_ends_everything(job):
    launcher = job.launch(2, 2, "faults.py", "blocked", "pushpull")
    all_are_blocked(job, ["launcher"], "pushpull")
    others = job.children()
    assert len(others) == 5
    kill(job, "launcher")
    job.finish()
    assert launcher.code == -signal.SIGKILL
    deadline = time.monotonic() + TIMEOUT_S
    while (left := set(others.values()) & set(job.marked())) and time.monotonic() < deadline:
        time.sleep(0.02)  # they are the children of nobody whose end could be waited for
    assert not left, f"{left} of {others} are still there\n{job.transcript()}"


def test_an_interruption_of_the_launcher_leaves_nothing_behind(job):
    launcher = job.launch(2, 2, "faults.py", "endless")
    job.line("launcher", "going", count=2)
    kill(job, "launcher", signal.SIGINT)
    job.finish()
    assert launcher.code == 128 + signal.SIGINT, job.transcript()
    assert "interrupted by signal 2 (SIGINT)" in launcher.text.splitlines()[-1]
