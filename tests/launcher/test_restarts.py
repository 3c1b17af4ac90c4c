"""Which processes are started again, and when: by rules with literal times, then with real processes."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace

import pytest

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.config.losses import LossPolicy
from kvdist.nodes import SCHEDULER, Role, server, worker
from kvdist_launch.exits import ProcessExit
from kvdist_launch.job import GracePeriods, Job, Restart, Say, SendSignal, summary
from kvdist_launch.restarts import HEALTHY_S, Restarts
from tests.cases import each

KILLED = -signal.SIGKILL
NODES = [SCHEDULER, server(0), worker(0), worker(1)]
NOT_AGAIN = "so it is not started again (correct the error first)"
FENCED = b"kvdist.errors.FencedError: worker-1 was given up 14.2 s ago"


def ended(node=worker(1), status=KILLED, line=b"", life=0, lost=""):  # noqa: B008  # a value
    return ProcessExit(node, 7, status, line, "d2" if lost else "", lost, life)


@each(
    "first, second, ends_job",
    [
        (ended(), ended(), False),
        (ended(status=75), ended(status=75), False),
        (ended(status=255, lost="no answer"), ended(status=255, lost="no answer"), False),
        (ended(status=1, line=FENCED), ended(status=1, line=FENCED), False),
        (ended(status=1, line=b"ValueError: x\n"), ended(status=1, line=b"ValueError: x\n"), True),
        (ended(status=1, line=b"ValueError: x\n"), ended(worker(0), 1, b"[rank0]: ValueError: x\n"), True),
        (ended(status=1, line=b"ValueError: x\n"), ended(status=1, line=b"ValueError: y\n"), False),
        (ended(status=1, line=b"ValueError: x\n"), ended(status=4, line=b"ValueError: x\n"), False),
        (ended(status=3), ended(worker(0), 3), True),
        (ended(status=3, line=b"step 9\n"), ended(worker(0), 3, b"step 9\n"), True),
        (ended(status=3, line=b"step 9\n"), ended(worker(0), 4, b"step 9\n"), False),
        (ended(line=b"step 9\n"), ended(worker(0), line=b"step 9\n"), False),
        (ended(status=128 + 9, line=b"step 9\n"), ended(worker(0), 128 + 9, b"step 9\n"), False),
        (ended(status=128 + 9, line=b"ValueError: x\n"), ended(status=128 + 9, line=b"ValueError: x\n"), True),
        (ended(status=200), ended(status=200), True),
        (ended(status=255, line=b"step 9\n"), ended(worker(0), 255, b"step 9\n"), True),
        (ended(status=3), ended(status=4), False),
        (ended(status=3), ended(status=KILLED), False),
    ],
)
def test_the_same_mistake_twice_ends_the_job_and_what_befalls_a_process_does_not(first, second, ends_job):
    restarts = Restarts(5)
    assert restarts.judge(first, 1.0).delay_s is not None
    assert restarts.judge(second, 1.0).ends_job == ends_job


@each(
    "line, ends_job",
    [
        (b"", False),
        (b"INFO: step 9 of 10\n", False),
        (b"loss 0.31, Error: 0.2\n", False),
        (b"ValueError: x\n", True),
        (b"[rank1]: torch.OutOfMemoryError: CUDA out of memory\n", True),
        (b"models.NoSuchLayerError\n", True),
    ],
)
def test_of_processes_that_lived_for_long_only_the_same_exception_is_the_same_mistake(line, ends_job):
    restarts = Restarts(5)
    assert not restarts.judge(ended(worker(0), 1, line), HEALTHY_S).ends_job
    assert restarts.judge(ended(status=1, line=line), HEALTHY_S).ends_job == ends_job


def test_starts_come_later_each_time_and_a_minute_of_health_is_a_new_beginning():
    restarts = Restarts(99)
    assert [restarts.judge(ended(), 1.0).delay_s for _ in range(8)] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert [restarts.judge(ended(), lived_s).delay_s for lived_s in (HEALTHY_S, 1.0)] == [0, 1]
    assert restarts.judge(ended(worker(0)), 1.0).delay_s == 0, "each has delays of its own"
    assert Restarts(1).judge(ended(status=EXIT_PEER_LOST), 1.0).delay_s == 1, "it may be a consequence"


@each(
    "one, delays_s",
    [
        (ended(), [0] * 8),
        (ended(status=128 + 9), [0] * 8),
        (ended(status=255, lost="no answer"), [0] * 8),
        (ended(status=1, line=FENCED), [0] * 8),
        (ended(status=EXIT_PEER_LOST), [1] * 8),
        (ended(server(0)), [0] * 8),
        (ended(SCHEDULER), [0] * 8),
        (ended(status=3), [0, 1, 2, 4, 8, 16, 30, 30]),
        (ended(status=1, line=b"ValueError: {}"), [0, 1, 2, 4, 8, 16, 30, 30]),
        (ended(status=200, line=b"ValueError: {}"), [0, 1, 2, 4, 8, 16, 30, 30]),
        (ended(status=255), [0, 1, 2, 4, 8, 16, 30, 30]),
    ],
)
def test_a_life_that_was_at_work_delays_the_next_one_only_if_it_ended_by_itself(one, delays_s):
    restarts = Restarts(99, set(Role))
    lines = [one.last_error_line.replace(b"{}", b"%d" % number) or b"%d" % number for number in range(len(delays_s))]
    verdicts = [restarts.judge(replace(one, last_error_line=line), 9.0, True) for line in lines]
    assert [verdict.delay_s for verdict in verdicts] == delays_s


def test_kills_before_the_first_step_delay_the_next_start_until_a_life_has_made_one():
    restarts = Restarts(99)
    assert [restarts.judge(ended(), 9.0, was).delay_s for was in (False, False, False, True, False, False)] == [
        *(0, 1, 2),
        *(0, 0, 1),
    ]


def test_each_process_is_started_again_so_often_and_no_more():
    restarts = Restarts(2)
    assert [restarts.judge(ended(), 1.0).text for _ in range(3)] == [
        "starting it again (1 of 2)",
        "starting it again in 1 s (2 of 2)",
        "it is not started again, as it has been 2 times (--restart 2)",
    ]
    assert restarts.judge(ended(worker(0)), 1.0).delay_s == 0


@each(
    "one, is_judged",
    [
        (ended(server(0)), False),
        (ended(SCHEDULER), True),
        (ended(SCHEDULER, EXIT_PEER_LOST), False),
        (ended(SCHEDULER, 2), False),
        (ended(SCHEDULER, 255, lost="no answer"), False),
    ],
)
def test_others_than_workers_are_started_again_after_a_signal_if_their_role_can_join_again(one, is_judged):
    verdict = Restarts(3, {Role.WORKER, Role.SCHEDULER}).judge(one, 1.0)
    assert (verdict is not None) == is_judged


# The job.


def new_job(limit=5, **losses):
    losses = LossPolicy(**{"on_loss": "continue", "restart": limit, **losses})
    job = Job(NODES, 100.0, GracePeriods(5.0, 5.0, 2.0), losses=losses)
    job.started([(node, "") for node in NODES], 100.0)
    return job


def again(job, node, now):
    """Start `node` again at its time, as the supervisor does. Returns its life."""
    assert job.deadline == now
    (action,) = job.tick(now)
    assert isinstance(action, Restart) and action.node == node
    job.joined(node, action.life)
    job.started([(node, "")], now)
    return action.life


def finish(job, now, *lives):
    for number, life in enumerate(lives):
        job.ended([ended(worker(number), 0, life=life)], now)
    job.ended([ended(SCHEDULER, 0), ended(server(0), 0)], now)


def test_a_killed_worker_is_started_again_and_the_summary_says_how_often_and_why():
    job = new_job()
    (said,) = job.ended([ended()], 101.0)
    assert said == Say("worker-1 (pid 7) was killed by signal 9 (SIGKILL); starting it again (1 of 5)")
    assert again(job, worker(1), 101.0) == 1
    assert job.ended([ended(life=1)], 102.0) and again(job, worker(1), 103.0) == 2
    finish(job, 110.0, 0, 2)
    assert (job.is_over, job.exit_code()) == (True, 0)
    assert job.conclude(110.0) == [
        "worker-1 was started 3 times; it was killed by signal 9 (SIGKILL) after 1.0 and 2.0 s",
        "2 workers and 1 server finished in 10.0 s",
    ]
    told = [one for one in summary([job], 0, 110.0)["processes"] if one["node"] == "worker-1"]
    assert [(one["restarts"], one.get("signal")) for one in told] == [(0, 9), (1, 9), (2, None)]


def test_many_ends_of_one_kind_are_counted():
    job, now = new_job(limit=99), 100.0
    for life in range(6):
        now += HEALTHY_S
        job.ended([ended(life=life)], now)
        again(job, worker(1), now)
    finish(job, 500.0, 0, 6)
    assert job.conclude(500.0)[0] == (
        "worker-1 was started 7 times; it was killed by signal 9 (SIGKILL) 6 times, the last time after 360.0 s"
    )


@each(
    "who, told, delay_s",
    [
        (worker(1), (worker(1), 2), 0),
        (worker(1), (worker(1), 1), 1),
        (server(0), (server(0), 2), 0),
        (SCHEDULER, (worker(1), 0), 0),
        (SCHEDULER, None, 1),
    ],
)
def test_who_was_at_work_in_this_life_is_started_again_at_once(who, told, delay_s):
    job, now = new_job(limit=99, snapshots="/d"), 100.0
    for life in (0, 1):
        now += HEALTHY_S
        job.ended([ended(who, life=life)], now)
        again(job, who, now)
    if told is not None:
        job.at_work(*told)
    job.ended([ended(who, life=2)], now + 1)
    again(job, who, now + 1 + delay_s)


def test_what_is_said_of_an_earlier_life_changes_nothing():
    job = new_job()
    job.ended([ended()], 101.0)
    again(job, worker(1), 101.0)
    assert job.ended([ended()], 102.0) == [] and job.deadline is None
    finish(job, 110.0, 0, 1)
    assert job.is_over and job.exit_code() == 0


def test_a_job_whose_workers_are_all_gone_waits_for_those_that_come_again():
    job = new_job()
    job.ended([ended(), ended(worker(0), 0)], 101.0)
    assert not job.is_over and again(job, worker(1), 101.0) == 1
    finish(job, 110.0, *())
    job.ended([ended(life=1, status=0)], 111.0)
    assert job.is_over and job.exit_code() == 0


def test_the_same_exception_twice_fails_the_job_with_a_sentence():
    job = new_job()
    job.ended([ended(worker(0), 1, b"ValueError: loss is nan")], 101.0)
    again(job, worker(0), 101.0)
    job.ended([ended(status=1, line=b"ValueError: loss is nan")], 102.0)
    (said,) = job.tick(102.5)
    reason = (
        "the same error ended worker-0 and worker-1, so neither is started again (correct the error first): ValueError:"
        " loss is nan"
    )
    assert said == Say(
        f"worker-1 (pid 7) failed with exit code 1; {reason}; waiting up to 5 s for the other processes to exit"
    )
    job.ended([ended(node, 75) for node in NODES[:2]] + [ended(worker(0), 75, life=1)], 103.0)
    assert job.is_over and job.exit_code() == 1
    assert job.conclude(103.0)[-1] == (
        f"worker-1 (pid 7) failed with exit code 1 after 2.0 s; {reason}; job ended with exit code 1"
    )


@each("on_loss, exit_code", [("continue", 0), ("fail", 137)])
def test_a_worker_that_may_not_be_started_again_is_lost(on_loss, exit_code):
    job = new_job(limit=1, on_loss=on_loss)
    job.ended([ended()], 101.0)
    again(job, worker(1), 101.0)
    (said,) = job.ended([ended(life=1)], 102.0) or job.tick(102.5)
    assert (
        "not started again, as it has been once (--restart 1)" in said.text
        if on_loss == "continue"
        else "waiting" in said.text
    )
    finish(job, 103.0, 0)
    assert (job.is_over, job.exit_code()) == (True, exit_code)


def test_a_job_that_the_scheduler_has_dissolved_starts_nothing():
    job = new_job()
    job.ended([ended(status=75)], 101.0)
    assert job.deadline == 102.0
    job.ended([ended(worker(0), 0)], 101.1)
    (said,) = job.ended([ended(SCHEDULER, 0)], 101.2)
    assert said.text == "worker-1 is not started again: the others have finished"
    job.ended([ended(server(0), 0)], 101.3)
    assert job.is_over and job.exit_code() == 0


@each("has_joined", [True, False])
def test_who_has_not_joined_the_others_when_they_finish_is_ended(has_joined):
    job = new_job()
    job.ended([ended()], 101.0)
    again(job, worker(1), 101.0)
    job.joined(worker(1), int(has_joined))  # what is said of an earlier life comes late
    job.ended([ended(worker(0), 0)], 105.0)
    told = job.ended([ended(SCHEDULER, 0), ended(server(0), 0)], 105.1)
    assert [one for one in told if isinstance(one, SendSignal)] == [SendSignal(worker(1), signal.SIGKILL)] * (
        not has_joined
    )
    job.ended([ended(status=0 if has_joined else KILLED, life=1)], 106.0)
    assert job.is_over and job.exit_code() == 0
    finished = "2 workers" if has_joined else "1 worker"
    assert job.conclude(106.0)[-1] == f"{finished} and 1 server finished in 6.0 s"


@each("at_once", [True, False])
@each("one", [ended(SCHEDULER), ended(server(0)), ended(server(0), 255, lost="no answer")])
def test_a_scheduler_or_server_that_is_lost_when_all_workers_have_finished_fails_nothing(one, at_once):
    job = new_job(snapshots="/d")
    finished = [ended(worker(0), 0), ended(worker(1), 0)]
    told = job.ended([*finished, one] if at_once else finished, 101.0)
    told += [] if at_once else job.ended([one], 101.1)
    assert [said.text for said in told] == [f"{one}; it is not started again, as all workers have finished"]
    assert not [action for action in job.tick(104.0) if isinstance(action, Restart)]
    job.ended([ended(node, 0) for node in (SCHEDULER, server(0)) if node != one.node], 102.0)
    assert job.is_over and job.exit_code() == 0
    assert job.conclude(102.0)[-1].endswith(f" finished in 2.0 s; {one}")


def test_an_interrupted_or_failed_job_starts_nothing():
    job = new_job()
    job.ended([ended(status=75), ended(worker(0), 75)], 101.0)
    job.interrupt(signal.SIGINT, 101.5)
    assert not [one for one in job.tick(105.0) if isinstance(one, Restart)]
    job = new_job()
    job.ended([ended(status=75)], 101.0)
    job.ended([ended(server(0))], 101.1)
    assert job.cause.node == server(0) and not [one for one in job.tick(103.0) if isinstance(one, Restart)]


def test_a_loss_that_was_made_good_is_not_what_fails_the_job_later():
    job = new_job()
    job.ended([ended()], 101.0)
    again(job, worker(1), 101.0)
    job.ended([ended(SCHEDULER, EXIT_PEER_LOST)], 200.0)
    assert job.cause.node == SCHEDULER
    job.ended([ended(server(0))], 200.1)
    assert job.cause.node == server(0) and job.exit_code() == 137


def test_a_process_that_was_given_up_is_killed_if_it_is_of_the_present_life():
    job = new_job()
    said, sent = job.given_up(worker(1), 0)
    assert isinstance(said, Say) and sent == SendSignal(worker(1), signal.SIGKILL)
    job.ended([ended()], 101.0)
    assert job.given_up(worker(1), 0) == [], "it has ended"
    again(job, worker(1), 101.0)
    assert job.given_up(worker(1), 0) == [] and job.given_up(worker(1), 1)


# Real processes.

DIES = (
    "import os, sys, time\n"
    "rank, life = os.environ['KVDIST_RANK'], int(os.environ.get('KVDIST_RESTARTS', '0'))\n"
    "print('life', life, 'pid', os.getpid(), flush=True)\n"
    "if rank == '1' and life < int(sys.argv[1]): os.kill(os.getpid(), 9)\n"
)
WORDS = ("--on-loss", "continue", "--env", "SCHEDULER_DOES=go on")


def lives(out, prefix="w1"):
    return [line.split()[3] for line in out.splitlines() if line.startswith(prefix) and " life " in line]


def test_a_worker_that_kills_itself_is_started_until_it_succeeds(launch, tmp_path):
    logs, told = tmp_path / "logs", tmp_path / "summary"
    files = ("--log-dir", str(logs), "--json-summary", str(told))
    words = (*WORDS, "--restart", "9", *files, "python", "-c", DIES, "2")
    code, out, err = launch("-n", "2", "-s", "1", *words).finish()
    assert code == 0, err
    assert lives(out) == ["0", "1", "2"]
    reports = [line.removeprefix("sched │ ") for line in out.splitlines() if "ended worker 1" in line]
    assert reports == ["ended worker 1 signal 9", "ended worker 1 signal 9 life 1", "ended worker 1 exit 0 life 2"]
    log = (logs / "worker-1.log").read_text().splitlines()
    assert [line.split()[:2] for line in log[::2]] == [["life", "0"], ["life", "1"], ["life", "2"]]
    assert log[1::2] == [f"kvdist-launch: worker-1 is started again ({life})" for life in (1, 2)]
    assert [one["restarts"] for one in json.loads(told.read_text())["processes"] if one["node"] == "worker-1"] == [
        0,
        1,
        2,
    ]
    assert "worker-1 was started 3 times; it was killed by signal 9 (SIGKILL)" in err


def test_what_a_killed_worker_had_started_is_ended_before_the_next_life(launch, is_gone):
    script = (
        "import os, subprocess, time\n"
        "if 'KVDIST_RESTARTS' in os.environ: raise SystemExit(0)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print('child', child.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    job = launch("-n", "1", "-s", "1", *WORDS, "--restart", "1", "python", "-c", script)
    child = int(job.line_with(" child ").split()[-1])
    code, _, err = job.finish()
    assert code == 0 and is_gone(child), err


def test_a_stopped_worker_that_the_scheduler_has_given_up_is_killed_and_started_again(launch):
    script = (
        "import os, signal\n"
        "rank, life = os.environ['KVDIST_RANK'], os.environ.get('KVDIST_RESTARTS', '0')\n"
        "print('life', life, flush=True)\n"
        "if (rank, life) == ('1', '0'): os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    words = (*WORDS, "--env", "SCHEDULER_DOES=give up", "--restart", "1", "python", "-c", script)
    code, out, err = launch("-n", "2", "-s", "1", *words).finish()
    assert code == 0 and lives(out)[-1] == "1", err
    assert "worker-1 has been given up, and its process is ended" in err and "given up worker" not in out
    assert "killed by signal 9 (SIGKILL); starting it again (1 of 1)" in err


def test_an_exception_that_comes_again_ends_the_job(launch):
    script = "import time; time.sleep(0.1); raise ValueError('loss is nan')"
    words = (*WORDS, "--restart", "9", "--grace", "0.2", "python", "-c", script)
    code, _, err = launch("-n", "1", "-s", "1", *words).finish()
    assert code == 1
    assert f"the same error ended worker-0 twice, {NOT_AGAIN}: ValueError: loss is nan" in err.splitlines()[-1]


LOST_AGAIN = b"kvdist.errors.PeerLostError: worker-1 (host vm, pid 7) was lost: ended by an unhandled NameError: x"


@each("peers", [[SCHEDULER], [worker(0)], [server(0), worker(0)]])
def test_the_same_exception_twice_is_told_also_if_its_consequences_are_seen_first(peers):
    job = new_job()
    job.ended([ended(status=1, line=b"NameError: x")], 101.0)
    again(job, worker(1), 101.0)
    job.ended([ended(node, 75, LOST_AGAIN) for node in peers], 102.0)
    job.ended([ended(status=1, line=b"NameError: x", life=1)], 103.0)
    job.ended([ended(node, 75, LOST_AGAIN) for node in NODES[:3] if node not in peers], 104.0)
    assert job.is_over and job.exit_code() == 1
    why = f"the same error ended worker-1 twice, {NOT_AGAIN}: NameError: x; job ended with exit code 1"
    assert job.conclude(104.0)[-1] == f"worker-1 (pid 7) failed with exit code 1 after 3.0 s; {why}"


def test_a_program_that_is_gone_when_it_is_to_start_again_counts_as_having_ended(launch, tmp_path):
    program = tmp_path / "train"
    program.write_text(f"#!{sys.executable}\nimport os\nos.unlink({str(program)!r})\nos.kill(os.getpid(), 9)\n")
    program.chmod(0o755)
    job = launch("-n", "1", "-s", "1", *WORDS, "--restart", "9", "--grace", "0.2", str(program))
    code, _, err = job.finish()
    assert code == 127 and f"worker-0 could not be started: {program}: No such file" in err


def test_processes_that_were_started_again_end_with_a_killed_launcher(launch, is_gone):
    script = DIES + "time.sleep(60)\n"
    job = launch("-n", "2", "-s", "1", *WORDS, "--restart", "9", "python", "-c", script, "1")
    pid = int(job.line_with("w1 │ life 1 ").split()[-1])
    job.process.kill()
    assert is_gone(pid, 15.0)


@each("words", [(), ("-H", "a", "--security", "none", "--scheduler-on", "a")])
def test_a_killed_scheduler_is_started_again_at_its_socket_and_told_what_it_missed(launch, launch_on, tmp_path, words):
    os.mkfifo(tmp_path / "held")
    held = os.open(tmp_path / "held", os.O_RDWR)  # else the servers would take its end for that of the job
    script = "import os, time; os.environ['KVDIST_RANK'] == '1' and time.sleep(1.5)"
    words = ("-n", "2", "-s", "1", *words, *WORDS, "--restart", "3", "python", "-c", script)
    job = launch(*words, env={"GOODBYE_FIFO": str(tmp_path / "held")})
    at = job.line_with(" listens at ").split(" at ")[1]
    pid = int(job.line_with(" pid ").split()[-1])
    assert "ended worker 0 exit 0" in job.line_with("ended worker 0")
    os.kill(pid, signal.SIGKILL)
    assert job.line_with(" listens at ").split(" at ")[1] == at
    code, out, err = job.finish()
    os.close(held)
    assert code == 0, err
    assert "ended worker 0 exit 0" in out and "ended worker 1 exit 0" in out and "ended scheduler" not in out
    assert "was killed by signal 9 (SIGKILL); starting it again (1 of 3)" in err
    assert "kvdist-launch: the scheduler was started 2 times; it was killed by signal 9" in err


def test_a_scheduler_that_is_started_again_is_told_of_an_end_whose_rank_runs_again(launch, tmp_path):
    for name in ("held", "back", "go"):
        os.mkfifo(tmp_path / name)
    held = os.open(tmp_path / "held", os.O_RDWR)  # else the servers would take its end for that of the job
    script = (
        "import os, sys\n"
        "if 'KVDIST_RESTARTS' not in os.environ: os.kill(os.getpid(), 9)\n"
        "open(sys.argv[1], 'w').close()\n"
        "open(sys.argv[2]).close()\n"
    )
    words = (*WORDS, "--restart", "3", "python", "-c", script, str(tmp_path / "back"), str(tmp_path / "go"))
    job = launch("-n", "1", "-s", "1", *words, env={"GOODBYE_FIFO": str(tmp_path / "held")})
    pid = job.pid_of("scheduler")
    assert job.line_with("ended worker 0").endswith("ended worker 0 signal 9\n")
    open(tmp_path / "back").close()
    os.kill(pid, signal.SIGKILL)
    job.pid_of("scheduler")
    open(tmp_path / "go", "w").close()
    code, out, err = job.finish()
    os.close(held)
    assert code == 0 and "the scheduler was started 2 times" in err, err
    told = [line for line in out.splitlines() if line.startswith("sched │ ended worker 0 ")]
    assert told == ["sched │ ended worker 0 signal 9", "sched │ ended worker 0 exit 0 life 1"]


@pytest.fixture
def hosts(tmp_path):
    """A hostfile: server on a, one slot each on b and c."""
    path = tmp_path / "hosts"
    path.write_text("a role=server\nb role=worker slots=1\nc role=worker slots=1\n")
    return str(path)


LOSES_HOST = (
    "import os, sys, time\n"
    "life = int(os.environ.get('KVDIST_RESTARTS', '0'))\n"
    "print(f'life {life}', flush=True)  # one write: the agent may die between two\n"
    "if not life and os.environ['KVDIST_RANK'] == '0':\n"
    "    os.kill(os.getppid(), 9)\n"
    "    time.sleep(60)\n"
)


@each("workers, place", [("1", "c"), ("2", "b")])
def test_a_worker_whose_agent_is_killed_is_started_on_a_spare_host_or_there_again(launch_on, hosts, workers, place):
    words = ("-n", workers, "-s", "1", *WORDS, "--restart", "3", "python", "-c", LOSES_HOST)
    code, out, err = launch_on(hosts, *words).finish()
    assert code == 0, err
    assert "worker-0 on b (pid " in err and "was lost: the connection to b ended" in err
    assert f"worker-0 is started again on {place}" in err
    assert lives(out, f"w0@{place}")[-1] == "1"
    assert "ended worker 0 lost b\n" in out and f"placed worker 0 {place} " in out
