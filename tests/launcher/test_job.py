"""When a job has failed, which process is named, which are told to end, and the summary: with literal times."""

from __future__ import annotations

import json
import os
import signal

import pytest

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.config.losses import LossPolicy
from kvdist.errors import INCOMPLETE
from kvdist.nodes import SCHEDULER, NodeId, Role, server, worker
from kvdist.version import __version__
from kvdist_launch.exits import ProcessExit
from kvdist_launch.job import (
    WITHOUT_COPY,
    GracePeriods,
    Job,
    Say,
    SendSignal,
    last_concluded,
    remove_summary,
    summary,
    write_summary,
)
from tests.cases import each

NODES = [SCHEDULER, server(0), server(1), worker(0), worker(1)]
GRACE = GracePeriods(grace_s=5.0, farewell_s=4.0, terminate_s=2.0)


def new_job() -> Job:
    return Job(NODES, now=100.0, grace=GRACE)


def end(job: Job, now: float, *ends: tuple[NodeId, int]) -> list[object]:
    return list(job.ended([ProcessExit(node, 1000 + NODES.index(node), status) for node, status in ends], now))


def sentence(job: Job, now: float) -> str:
    return job.conclude(now)[-1]


def signals(actions: list[object]) -> dict[NodeId, int]:
    return {action.node: action.number for action in actions if isinstance(action, SendSignal)}


def test_a_job_is_over_when_everybody_has_ended_with_0():
    job = new_job()
    assert end(job, 101.0, (worker(0), 0)) == []
    assert job.deadline is None
    assert end(job, 102.0, (worker(1), 0)) == []
    assert job.deadline == 106.0
    end(job, 103.0, (server(0), 0), (server(1), 0), (SCHEDULER, 0))
    assert job.is_over
    assert (job.exit_code(), sentence(job, 103.5)) == (0, "2 workers and 2 servers finished in 3.5 s")


def test_what_remains_after_the_farewell_is_terminated_then_killed_and_the_job_still_succeeded():
    job = new_job()
    end(job, 102.0, (worker(0), 0), (worker(1), 0))
    end(job, 103.0, (SCHEDULER, 0), (server(0), 0))
    assert job.tick(105.9) == []
    said, *sent = job.tick(106.0)
    assert said == Say("server-1 did not end within 4 s of the last worker's end; terminating")
    assert signals(sent) == {server(1): signal.SIGTERM}
    assert job.deadline == 108.0
    assert signals(job.tick(108.0)) == {server(1): signal.SIGKILL}
    end(job, 108.1, (server(1), -9))
    assert job.is_over
    assert job.exit_code() == 0


def test_the_first_failure_is_named_and_later_ones_are_not():
    job = new_job()
    end(job, 112.3, (worker(1), -9))
    end(job, 112.5, (worker(0), 1), *((node, EXIT_PEER_LOST) for node in (server(0), server(1), SCHEDULER)))
    assert job.is_over
    assert job.exit_code() == 137
    assert sentence(job, 113.0) == (
        "worker-1 (pid 1004) was killed by signal 9 (SIGKILL) after 12.3 s; job ended with exit code 137; if nobody"
        " sent that signal, the kernel may have, because memory ran out: see dmesg; --on-loss continue --restart N lets"
        " the others go on, and starts it again"
    )


@each(
    "node, status, options, cure",
    [
        (server(1), -9, {"losses": LossPolicy("continue")}, WITHOUT_COPY),
        (server(1), -9, {"losses": LossPolicy("wait")}, "--on-loss continue --replicas 1 lets another server go on"),
        (server(1), -15, {}, "--on-loss continue --replicas 1 lets another server go on"),
        (worker(1), -11, {}, "-x PYTHONFAULTHANDLER=1 shows the line where it crashed; --on-loss continue"),
        (worker(1), -15, {"nodes": NODES[3:]}, "--on-worker-exit restart:N starts the job again"),
    ],
)
def test_the_last_line_says_what_to_do_about_a_killed_process(node, status, options, cure):
    nodes = options.pop("nodes", NODES)
    job = Job(nodes, 100.0, GRACE, **options)
    job.started(((one, "") for one in nodes), 100.0)
    end(job, 101.0, (node, status))
    assert f"; job ended with exit code {128 - status}; " in sentence(job, 102.0)
    assert cure in sentence(job, 102.0)


@each(
    "alike, which, others",
    [
        ([0, 1, 2], "", []),
        ([1, 2], " (on 2 of 3 workers)", ["1 worker failed with exit code 1"]),
        ([2], "", ["2 workers failed with exit code 1"]),
    ],
)
def test_the_last_line_has_the_error_and_on_how_many_workers_it_was(alike, which, others):
    job = running_job()
    lines = [f"[rank{rank}]: ValueError: x" if rank in alike else "KeyError: y" for rank in range(3)]
    ends = [ProcessExit(worker(rank), 7, 1, line.encode()) for rank, line in enumerate(lines)]
    job.ended(ends[2:], 104.5)
    job.ended(ends[:2], 104.6)
    assert sentence(job, 110.0).endswith(f"; job ended with exit code 1: ValueError: x{which}")
    assert sentence(job, 110.0).startswith("all 3 workers failed with exit code 1 after 4.5 s") is (len(alike) == 3)
    assert job.conclude(110.0)[:-1] == others


@each(
    "last, raised, error",
    [
        (b"ValueError: x\n", b"", ": ValueError: x"),
        (b"\tsize mismatch for weight\n", b"[rank0]: RuntimeError: Error(s) in loading state_dict:\n",
         ": RuntimeError: Error(s) in loading state_dict:"),
        (b"a warning\n", b"my.Problem\n", ": my.Problem"),
        (b"a word\n", b"", "; the last line of its standard error: a word"),
        (b"", b"", ""),
    ],
)  # fmt: skip
def test_the_error_of_a_process_is_its_exception_and_no_other_line(last, raised, error):
    job = new_job()
    job.ended([ProcessExit(worker(1), 7, 3, last, exception_line=raised)], 101.0)
    assert sentence(job, 102.0).endswith(f"failed with exit code 3 after 1.0 s; job ended with exit code 3{error}")


DEADLOCKED = "worker-0 waits for worker-1 in barrier; worker-1 waits for worker-0 to push 'w' (step 3), in pull"


def test_a_deadlock_is_the_cause_whoever_is_seen_to_end_first():
    for first in (SCHEDULER, worker(1)):
        job = running_job()
        said = {
            node: f"kvdist{'.errors.DeadlockError' if node.role is Role.WORKER else ''}: deadlock: {DEADLOCKED}"
            for node in HOSTS
        }
        ends = {node: ProcessExit(node, 7, 1, line.encode()) for node, line in said.items()}
        job.ended([ends.pop(first)], 104.5)
        assert job.tick(105.0) == [Say("a deadlock; waiting up to 4.9 s for the other processes to exit")]
        job.ended(ends.values(), 105.1)
        assert job.conclude(110.0, ["its last line"]) == [
            f"deadlock after 4.5 s; job ended with exit code 1: {DEADLOCKED}"
        ]


def test_a_failure_is_told_after_half_a_second_if_other_processes_are_still_there():
    job = new_job()
    assert end(job, 112.3, (worker(1), -9)) == []
    assert job.deadline == 112.8 and job.tick(112.7) == []
    assert job.tick(112.8) == [
        Say("worker-1 (pid 1004) was killed by signal 9 (SIGKILL); waiting up to 5 s for the other processes to exit")
    ]
    assert job.tick(113.3) == [] and job.deadline == 117.3


def test_those_that_do_not_notice_a_failure_are_terminated_then_killed():
    job = new_job()
    end(job, 110.0, (worker(1), 3))
    job.tick(110.5)
    assert job.deadline == 115.0
    assert signals(job.tick(115.0)) == dict.fromkeys(NODES[:4], signal.SIGTERM)
    end(job, 115.5, *((node, -15) for node in NODES[:3]))
    assert signals(job.tick(117.0)) == {worker(0): signal.SIGKILL}
    end(job, 117.1, (worker(0), -9))
    assert (job.is_over, job.exit_code()) == (True, 3)


@each(
    "ends, named, exit_code",
    [
        ([(worker(0), 1), (worker(1), -11)], worker(1), 139),
        ([(SCHEDULER, EXIT_PEER_LOST), (worker(1), 1)], worker(1), 1),
        ([(server(0), 0), (worker(1), 2)], worker(1), 2),
        ([(SCHEDULER, EXIT_PEER_LOST), (server(1), 9)], server(1), 9),
    ],
)
def test_of_endings_seen_at_once_the_likeliest_cause_is_named(ends, named, exit_code):
    job = new_job()
    end(job, 101.0, *ends)
    assert job.cause is not None
    assert (job.cause.node, job.exit_code()) == (named, exit_code)


def test_a_lost_peer_is_a_consequence_even_if_it_was_seen_first():
    job = new_job()
    end(job, 101.0, (server(0), EXIT_PEER_LOST))
    end(job, 101.2, (worker(0), 4))
    assert job.cause is not None
    assert job.cause.node == worker(0)


def test_a_lost_peer_is_named_when_nothing_else_failed():
    job = new_job()
    end(job, 101.0, (server(0), EXIT_PEER_LOST))
    job.tick(106.0)
    end(job, 106.1, *((node, -15) for node in NODES if node != server(0)))
    assert job.exit_code() == EXIT_PEER_LOST
    assert sentence(job, 107.0).startswith("server-0 (pid 1001) lost a peer and ended with exit code 75 after 1.0 s")


def test_a_worker_that_lost_a_peer_is_not_named_even_if_it_ends_before_the_one_that_failed():
    job = new_job()
    lost = ProcessExit(worker(0), 1003, 1, b"kvdist.errors.PeerLostError: worker-1 was lost\n")
    job.ended([lost], 101.0)
    assert job.tick(101.5) == [
        Say("worker-1 was lost; waiting up to 5 s for the other processes to exit")  # the culprit, not who noticed
    ]
    job.ended([ProcessExit(worker(1), 1004, 1, b"ValueError: mine\n")], 101.6)
    assert job.cause is not None
    assert job.cause.node == worker(1)


def test_a_last_worker_that_lost_a_peer_still_fails_the_job():
    job = new_job()
    end(job, 101.0, (worker(1), 0))
    job.ended([ProcessExit(worker(0), 1003, 1, b"kvdist.errors.PeerLostError: server-0 was lost\n")], 102.0)
    assert job.exit_code() == EXIT_PEER_LOST


@each(
    "code, last_line",
    [
        (75, b"whatever the program prints"),
        (75, b"kvdist.errors.PeerLostError: worker-1 was lost\n"),
        (1, b"kvdist.errors.RankLostError: rank 1 on host d2 is gone\n"),
        (1, b"[rank0]: kvdist.errors.PeerLostError: worker-1 was lost\n"),  # as torch.distributed prints it
    ],
)
def test_a_worker_says_that_it_lost_a_peer_by_its_code_or_by_its_traceback(code, last_line):
    job = new_job()
    job.ended([ProcessExit(worker(0), 1003, code, last_line)], 101.0)
    assert job.exit_code() == EXIT_PEER_LOST
    end(job, 101.2, (worker(1), 3))
    assert job.exit_code() == 3, "that one failed by itself"


def test_a_worker_that_fails_by_itself_is_named_though_a_server_left_before_it():
    job = new_job()
    assert end(job, 101.0, (server(1), 0)) == []
    job.ended([ProcessExit(worker(0), 1003, 1, b"ValueError: mine\n")], 101.3)
    assert job.cause is not None and job.cause.node == worker(0)


def test_a_server_that_leaves_early_is_the_cause_of_the_losses_after_it():
    job = new_job()
    assert end(job, 101.0, (server(1), 0)) == []
    job.ended([ProcessExit(worker(0), 1003, 1, b"kvdist.errors.PeerLostError: server-1 was lost\n")], 101.3)
    assert job.exit_code() == 1
    assert sentence(job, 102.0) == (
        "server-1 (pid 1002) ended early with exit code 0 after 1.0 s; job ended with exit code 1"
    )


def test_a_server_that_leaves_early_fails_the_job_even_if_nobody_notices():
    job = new_job()
    end(job, 101.0, (server(1), 0))
    assert job.tick(105.9) == []
    assert signals(job.tick(106.0)) == {node: signal.SIGTERM for node in NODES if node != server(1)}
    assert job.exit_code() == 1


def test_a_cluster_dissolved_in_order_leaves_the_workers_time_to_finish():
    job = new_job()
    end(job, 101.0, (server(1), 0))
    end(job, 101.1, (server(0), 0))
    end(job, 101.2, (SCHEDULER, 0))
    assert signals(job.tick(150.0)) == {}
    end(job, 160.0, (worker(0), 0))
    end(job, 170.0, (worker(1), 0))
    assert (job.is_over, job.exit_code()) == (True, 0)


def test_a_worker_that_fails_after_the_cluster_was_dissolved_is_named():
    job = new_job()
    end(job, 101.0, (server(1), 0), (server(0), 0))
    end(job, 101.2, (SCHEDULER, 0))
    end(job, 102.0, (worker(0), 5))
    assert job.exit_code() == 5


def test_a_server_that_fails_after_the_last_worker_fails_the_job():
    job = new_job()
    end(job, 101.0, (worker(0), 0), (worker(1), 0))
    end(job, 101.5, (server(0), 1))
    assert job.exit_code() == 1


def test_a_scheduler_that_lost_a_peer_after_all_workers_succeeded_fails_nothing():
    job = new_job()
    end(job, 101.0, (worker(0), 0), (worker(1), 0), (server(0), EXIT_PEER_LOST))
    end(job, 101.5, (server(1), EXIT_PEER_LOST), (SCHEDULER, EXIT_PEER_LOST))
    assert (job.is_over, job.exit_code()) == (True, 0)


def test_an_interruption_asks_workers_first_and_lets_servers_live_until_they_have_ended():
    job = new_job()
    said, *sent = job.interrupt(signal.SIGINT, 110.0)
    assert isinstance(said, Say)
    assert signals(sent) == {worker(0): signal.SIGINT, worker(1): signal.SIGINT}
    assert end(job, 111.0, (worker(0), -2)) == []
    assert signals(end(job, 112.0, (worker(1), 0))) == dict.fromkeys(NODES[:3], signal.SIGTERM)
    end(job, 112.1, *((node, -15) for node in NODES[:3]))
    assert job.exit_code() == 130
    assert sentence(job, 112.2) == ("interrupted by signal 2 (SIGINT) after 12.2 s; job ended with exit code 130")


def test_who_ignores_an_interruption_is_terminated_after_the_grace():
    job = new_job()
    job.interrupt(signal.SIGTERM, 110.0)
    said, *sent = job.tick(115.0)
    assert said == Say("worker-0, worker-1 did not end within 5 s of the interruption; terminating")
    assert signals(sent) == dict.fromkeys(NODES, signal.SIGTERM)
    assert signals(job.tick(117.0)) == dict.fromkeys(NODES, signal.SIGKILL)
    assert job.exit_code() == 143


def test_a_second_interruption_kills_at_once():
    job = new_job()
    job.interrupt(signal.SIGINT, 110.0)
    assert signals(job.interrupt(signal.SIGINT, 110.5)) == dict.fromkeys(NODES, signal.SIGKILL)


def test_signals_in_quick_succession_are_one_interruption():
    job = new_job()
    job.interrupt(signal.SIGHUP, 110.0)
    assert job.interrupt(signal.SIGTERM, 110.1) == []


def test_an_interruption_after_the_end_of_all_processes_changes_nothing():
    job = new_job()
    end(job, 110.0, *((node, 0) for node in NODES))
    assert job.is_over and job.interrupt(signal.SIGTERM, 110.1) == []
    assert job.exit_code() == 0 and not job.is_interrupted


def test_an_interruption_after_a_failure_shortens_the_grace_and_keeps_the_cause():
    job = new_job()
    end(job, 110.0, (worker(1), 3))
    assert signals(job.interrupt(signal.SIGINT, 111.0)) == dict.fromkeys(NODES[:4], signal.SIGTERM)
    assert job.exit_code() == 3


def test_one_worker_and_one_server_are_counted_in_the_singular():
    job = Job([SCHEDULER, server(0), worker(0)], now=0.0)
    job.ended([ProcessExit(node, 1, 0) for node in (worker(0), server(0), SCHEDULER)], 1.0)
    assert sentence(job, 1.04) == "1 worker and 1 server finished in 1.0 s"


@each(
    "ending, report",
    [
        (ProcessExit(worker(1), 7, 3), "ended worker 1 exit 3"),
        (ProcessExit(server(0), 7, -9), "ended server 0 signal 9"),
        (ProcessExit(worker(12), 7, 0), "ended worker 12 exit 0"),
    ],
)
def test_the_scheduler_is_told_role_rank_and_how(ending, report):
    assert ending.report == report


def test_a_signal_without_a_name_is_told_by_its_number():
    # 33 is used by the C library itself and has no name.
    assert str(ProcessExit(worker(0), 7, -33)) == "worker-0 (pid 7) was killed by signal 33"


# What is told of a job that is over.

HOSTS = {SCHEDULER: "", server(0): "d1", server(1): "d2", worker(0): "d1", worker(1): "d2", worker(2): "d1"}
SUMMARY_GRACE = GracePeriods(grace_s=4.9, terminate_s=2.0)


def running_job() -> Job:
    job = Job(list(HOSTS), 100.0, SUMMARY_GRACE)
    job.started(HOSTS.items(), 100.25)
    return job


def exits(*ends: tuple[NodeId, int]) -> list[ProcessExit]:
    return [ProcessExit(node, 1000 + list(HOSTS).index(node), status) for node, status in ends]


def failed_job() -> Job:
    """worker-1 fails, the processes that lose a peer end by themselves, and the rest is told to end."""
    job = running_job()
    job.ended(exits((worker(1), 3)), 104.5)
    job.ended(exits((SCHEDULER, EXIT_PEER_LOST), (server(0), EXIT_PEER_LOST), (server(1), EXIT_PEER_LOST)), 104.6)
    assert signals(job.tick(109.4)) == {worker(0): signal.SIGTERM, worker(2): signal.SIGTERM}
    job.ended(exits((worker(0), -15), (worker(2), -9)), 109.5)
    return job


FAILED = "worker-1 (pid 1004) failed with exit code 3 after 4.5 s; job ended with exit code 3"


def test_a_failure_is_told_with_last_lines_and_how_the_others_ended():
    assert failed_job().conclude(110.0, ["Traceback", "ValueError: x"]) == [
        "the last lines of worker-1:",
        "    Traceback",
        "    ValueError: x",
        "2 workers were ended by the launcher",
        FAILED,
    ]


def test_last_lines_that_the_user_has_just_seen_are_not_repeated_but_in_the_summary():
    job = failed_job()
    assert job.conclude(110.0, ["ValueError: x"], is_on_screen=True)[-1:] == [FAILED]
    assert len(job.conclude(110.0, ["ValueError: x"], is_on_screen=True)) == 2
    assert summary([job], 3, 110.0)["first_failure"]["last_lines"] == ["ValueError: x"]


def test_a_process_that_said_nothing_has_no_last_lines():
    assert len(failed_job().conclude(110.0)) == 2


@each(
    "ends, told",
    [
        ([(worker(0), 0)], "1 worker finished"),
        ([(worker(0), 0), (worker(2), 0), (server(0), 0)], "2 workers and 1 server finished"),
        ([(worker(0), 4), (worker(2), 5)], "1 worker failed with exit code 4; 1 worker failed with exit code 5"),
        ([(worker(0), -9), (worker(2), -9)], "2 workers were killed by signal 9 (SIGKILL)"),
        (
            [(SCHEDULER, -11), (server(0), -11), (worker(0), -11)],
            "1 worker, 1 server and the scheduler were killed by signal 11 (SIGSEGV)",
        ),
    ],
)
def test_the_others_are_told_by_the_ways_in_which_they_ended(ends, told):
    job = running_job()
    job.ended(exits((worker(1), 3)), 101.0)
    job.ended(exits(*ends), 102.0)
    assert job.conclude(103.0)[0] == told


def test_processes_of_a_lost_host_are_told_as_such():
    job, lost = running_job(), "the connection to d2 ended"
    job.ended([ProcessExit(node, 1, 255, host="d2", lost=lost) for node in (worker(1), server(1))], 103.0)
    assert job.conclude(103.0)[0] == "1 server was lost with its host"
    failure = summary([job], 255, 104.0)["first_failure"]
    assert failure["lost"] == lost and "exit_code" not in failure


def test_the_summary_has_everything_that_a_program_wants_to_know():
    job = failed_job()
    job.conclude(110.0, ["ValueError: x"])
    fields = summary([job], 3, 110.0)
    processes = fields.pop("processes")
    assert fields == {
        "version": __version__,
        "exit_code": 3,
        "duration_s": 10.0,
        "outcome": "failed",
        "sentence": FAILED,
        "first_failure": {
            "node": "worker-1",
            "role": "worker",
            "rank": 1,
            "host": "d2",
            "pid": 1004,
            "restarts": 0,
            "exit_code": 3,
            "after_s": 4.25,
            "last_lines": ["ValueError: x"],
        },
    }
    assert [one["node"] for one in processes] == [str(node) for node in HOSTS]
    assert processes[5] == {
        "node": "worker-2", "host": "d1", "pid": 1005, "restarts": 0, "signal": 9, "started_s": 0.25, "ended_s": 9.5,
    }  # fmt: skip


@each(
    "code, reason, outcome",
    [
    (0, "", "finished"), (130, "", "interrupted"), (127, "on d2, no such program", "failed"),
],
)  # fmt: skip
def test_the_outcome_is_one_word(code, reason, outcome):
    job = running_job()
    job.conclude(102.0)
    fields = summary([job], code, 102.0, reason)
    assert (fields["outcome"], fields["sentence"]) == (outcome, reason or "3 workers and 2 servers finished in 2.0 s")


def test_a_job_of_which_nothing_was_started_says_so():
    fields = summary([Job((), 100.0)], 127, 102.0, "no such program")
    assert (fields["outcome"], fields["sentence"]) == ("not started", "no such program")


@each("has_begun", [False, True])
def test_a_job_that_could_not_be_started_again_keeps_its_failure(has_begun):
    jobs = [failed_job()]
    jobs[0].conclude(110.0, ["ValueError"])
    jobs += [running_job()] if has_begun else []
    assert last_concluded(jobs) is jobs[0]
    fields = summary(jobs, 1, 114.0)
    assert (fields["outcome"], fields["sentence"]) == ("failed", FAILED)
    assert (fields["first_failure"]["exit_code"], fields["first_failure"]["last_lines"]) == (3, ["ValueError"])


def test_a_job_that_was_started_again_has_all_processes_and_only_the_last_failure():
    first = failed_job()
    first.conclude(110.0, ["ValueError"])
    second = Job([worker(0), worker(1)], 112.0, launched=100.0)
    second.started([(worker(0), "d1"), (worker(1), "d2")], 112.0)
    second.ended([ProcessExit(worker(1), 8, 4), ProcessExit(worker(0), 7, 0)], 113.0)
    lines = second.conclude(113.0)
    assert lines[0] == "1 worker finished"
    fields = summary([first, second], 4, 114.0)
    assert (fields["sentence"], fields["first_failure"]["pid"]) == (lines[1], 8)
    records = [one for one in fields["processes"] if one["node"] == "worker-0"]
    assert [(one["started_s"], one["ended_s"]) for one in records] == [(0.25, 9.5), (12.0, 13.0)]
    third = Job([worker(0)], 114.0, launched=100.0)
    third.conclude(115.0)
    assert summary([first, second, third], 0, 115.0)["first_failure"] is None


def test_a_summary_replaces_the_one_of_the_job_before_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"exit_code": 1})
    write_summary(path, {"exit_code": 0, "text": "é"})
    assert json.loads(path.read_text("utf-8")) == {"exit_code": 0, "text": "é"}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "summary.json"
    path.mkdir()
    with pytest.raises(OSError):
        write_summary(path, {})
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_summary_goes_through_links_and_pipes_and_leaves_them_what_they_are(tmp_path):
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target.json")
    write_summary(link, {"exit_code": 1})
    assert link.is_symlink() and json.loads((tmp_path / "target.json").read_text()) == {"exit_code": 1}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    remove_summary(pipe)
    write_summary(pipe, {"exit_code": 2})
    assert json.loads(os.read(reader, 1000)) == {"exit_code": 2}
    os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["link.json", "pipe", "target.json"]


def test_the_summary_of_an_earlier_job_is_removed_if_it_is_there(tmp_path):
    path = tmp_path / "summary.json"
    remove_summary(path)
    path.write_text("{}")
    remove_summary(path)
    assert not path.exists()


def surviving_job() -> Job:
    job = Job(NODES, now=100.0, grace=GRACE, losses=LossPolicy("continue"))
    job.started([(node, "") for node in NODES], 100.0)
    return job


def test_a_job_that_goes_on_tells_who_was_lost_and_ends_well_with_the_others():
    job = surviving_job()
    (said,) = end(job, 101.0, (worker(0), -signal.SIGKILL))
    assert isinstance(said, Say)
    assert said.text == "worker-0 (pid 1003) was killed by signal 9 (SIGKILL); the other workers go on"
    assert job.cause is None and job.deadline is None
    end(job, 102.0, (worker(1), 0))
    end(job, 103.0, (server(0), 0), (server(1), 0), (SCHEDULER, 0))
    told = "1 worker and 2 servers finished in 3.5 s; worker-0 (pid 1003) was killed by signal 9 (SIGKILL)"
    assert (job.exit_code(), sentence(job, 103.5)) == (0, told)


@pytest.mark.parametrize("replicas", [True, False])
def test_a_job_goes_on_without_a_server_of_which_another_has_a_copy(replicas):
    job = Job(NODES, now=100.0, grace=GRACE, losses=LossPolicy("continue", replicas=int(replicas)))
    job.started([(node, "") for node in NODES], 100.0)
    (said,) = end(job, 101.0, (server(0), -signal.SIGKILL)) or job.tick(101.5)
    told = "; the others go on if one has a copy of all that it had"
    assert isinstance(said, Say) and said.text.endswith(told) is replicas
    end(job, 102.0, (worker(0), 0), (worker(1), 0))
    end(job, 103.0, (server(1), 0), (SCHEDULER, 0))
    assert (job.cause is None, job.exit_code()) == ((True, 0) if replicas else (False, 137))


def test_the_last_worker_of_a_job_that_goes_on_fails_it():
    job = surviving_job()
    end(job, 101.0, (worker(0), -signal.SIGKILL))
    end(job, 102.0, (worker(1), 3))
    assert job.cause is not None and job.cause.node == worker(1) and job.exit_code() == 3


def test_when_the_scheduler_ends_a_job_that_goes_on_the_last_loss_is_the_cause():
    job = surviving_job()
    end(job, 101.0, (worker(0), 1))
    end(job, 102.0, (SCHEDULER, EXIT_PEER_LOST))
    assert job.cause is not None and job.cause.node == worker(0) and job.exit_code() == 1


def test_what_the_scheduler_says_of_why_the_others_cannot_go_on_follows_the_cause():
    job = surviving_job()
    (said,) = end(job, 101.0, (worker(0), -signal.SIGTERM))
    assert isinstance(said, Say) and said.text.endswith("the other workers go on")
    line = f"kvdist: worker-0 was lost: killed by signal 15 (SIGTERM); {INCOMPLETE}".encode()
    job.ended([ProcessExit(SCHEDULER, 1000, EXIT_PEER_LOST, line)], 101.5)
    (said,) = job.tick(102.0)
    cause = "worker-0 (pid 1003) was killed by signal 15 (SIGTERM)"
    assert isinstance(said, Say) and said.text.startswith(f"{cause}; {INCOMPLETE}; waiting")
    end(job, 102.0, *((node, EXIT_PEER_LOST) for node in (server(0), server(1), worker(1))))
    told = f"{cause} after 1.0 s; {INCOMPLETE}; job ended with exit code 143"
    assert sentence(job, 102.0) == told


def test_who_was_lost_after_others_had_finished_fails_a_job_that_the_scheduler_ends():
    job = surviving_job()
    end(job, 101.0, (worker(0), 0))
    end(job, 102.0, (worker(1), -signal.SIGKILL))
    end(job, 103.0, (SCHEDULER, EXIT_PEER_LOST), (server(0), EXIT_PEER_LOST), (server(1), EXIT_PEER_LOST))
    assert job.cause is not None and job.cause.node == worker(1) and job.exit_code() == 137


# Who does not end.


def of(job: Job, *pids: tuple[NodeId, int]) -> Job:
    job.started([(node, "") for node, _ in pids], 100.0)
    job.placed(pids)
    return job


@each(
    "node, has_begun_to_end",
    [*((node, False) for node in NODES), *((node, True) for node in NODES if node.role is not Role.WORKER)],
)
def test_who_is_stopped_is_told_of_after_3_s_in_every_role_and_phase(node, has_begun_to_end):
    job = of(Job(NODES, now=100.0, grace=GracePeriods(farewell_s=60.0)), (node, 42))
    if has_begun_to_end:
        end(job, 101.0, (worker(0), 0), (worker(1), 0))
    job.stopped(node, 43, 101.0)
    assert job.deadline == 104.0 and job.tick(103.9) == []
    told = f"{node} (pid 42) has been stopped by a signal for 3 s; kill -CONT 43 lets it go on"
    assert job.tick(104.0) == [Say(told)] and job.tick(112.0) == []


def test_who_goes_on_within_a_third_of_the_patience_is_not_told_of():
    job = of(Job(NODES, now=100.0, grace=GracePeriods(patience_s=6.0)), (worker(1), 42))
    job.stopped(worker(1), 42, 101.0)
    assert job.deadline == 103.0
    job.stopped(worker(1), 0, 102.9)
    assert job.deadline is None and job.tick(120.0) == []


PATIENCE_ADVICE = "(KVDIST_PATIENCE_S); kill -CONT 43 in time lets it go on"
SILENT = "worker-1 (host vm, pid 42) was lost, last heard of in step 44: the connection was closed"


@each(
    "stopped, reason, last",
    [
        (
            worker(1),
            SILENT,
            f"worker-1 (pid 42) was stopped by a signal and silent for longer than 10 s {PATIENCE_ADVICE}",
        ),
        (worker(0), SILENT, SILENT),
    ],
)
def test_a_lost_process_that_a_signal_had_stopped_is_named_as_such(stopped, reason, last):
    job = of(Job(NODES, now=100.0, grace=GRACE), *((node, 42) for node in NODES))
    job.stopped(stopped, 43, 101.0)
    peers = [node for node in NODES if node != worker(1)]
    line = f"kvdist.errors.PeerLostError: {reason}".encode()
    job.ended([ProcessExit(node, 42, EXIT_PEER_LOST, line) for node in peers], 112.0)
    *_, said = job.tick(112.5)
    assert isinstance(said, Say) and said.text.startswith(last.partition(";")[0])
    job.tick(117.0)
    job.ended([ProcessExit(worker(1), 42, -9)], 119.0)
    assert sentence(job, 119.0) == f"job ended with exit code 75 after 12.0 s: {last}"


def test_a_worker_that_gave_up_waiting_names_the_other_one_as_the_cause():
    job = of(new_job(), *((node, 42) for node in NODES))
    awaited = "waiting 25.1 s for worker-1 (vm) to push key 'w' (step 6), in push"
    said = f"{awaited}; the job ends after 25 s of this (KVDIST_STALL_SHUTDOWN_S)"
    line = f"kvdist.errors.DeadlineExceeded: worker-0: {said}".encode()
    job.ended([ProcessExit(worker(0), 42, 1, line, exception_line=line)], 126.0)
    assert sentence(job, 132.0) == (
        f"job ended with exit code 1 after 26.0 s: worker-0 gave up {awaited} (KVDIST_STALL_SHUTDOWN_S allows 25 s)"
    )


def test_a_peer_that_an_exception_ends_slowly_does_not_make_75_of_the_exit_code():
    job = of(new_job(), *((node, 42) for node in NODES))
    text = "worker-1 (host vm, pid 42) was lost: ended by an unhandled ConfigError: a QueueSampler needs continue"
    line = f"kvdist.errors.PeerLostError: {text}".encode()
    job.ended([ProcessExit(node, 42, EXIT_PEER_LOST, line) for node in NODES if node != worker(1)], 101.0)
    job.tick(106.0)
    job.ended([ProcessExit(worker(1), 42, -15)], 108.0)
    assert job.exit_code() == 1
    lines = job.conclude(108.0, ["the last line of a server"])
    assert lines[-1] == f"job ended with exit code 1 after 1.0 s: {text}" and "the last line" not in "".join(lines)


def dissolve(job: Job, now: float) -> None:
    assert end(job, now, (worker(0), 0), (server(0), 0), (server(1), 0), (SCHEDULER, 0)) == []


def finish_one(job: Job, now: float) -> None:
    assert end(job, now, (worker(0), 0)) == []


ENDINGS = [(NODES, dissolve), ([worker(0), worker(1)], finish_one)]
"""A job whose servers and scheduler are gone, and one that never had any."""


@each("nodes, finish", ENDINGS)
def test_a_job_tells_for_whose_end_it_waits_and_kills_nobody_who_may_have_work(nodes, finish):
    job = of(Job(nodes, now=100.0, grace=GRACE), *((node, 42) for node in nodes))
    finish(job, 101.0)
    assert job.deadline == 111.0
    assert job.tick(111.0) == [Say("the job waits for the end of worker-1 (pid 42)")]
    assert job.deadline is None and job.tick(9999.0) == []


@each("lingers, nodes, finish", [(lingers, *ending) for lingers in (True, False) for ending in ENDINGS])
def test_a_job_kills_after_the_grace_who_alone_keeps_it_from_ending_and_stands_still(lingers, nodes, finish):
    job = of(Job(nodes, now=100.0, grace=GRACE), *((node, 42) for node in nodes))
    finish(job, 101.0)
    if lingers:
        job.lingers(worker(1), 112.0)
    else:
        job.stopped(worker(1), 42, 102.0)
    assert job.tick(112.0)[-1] == Say("the job waits for the end of worker-1 (pid 42), and kills it in 5 s")
    assert job.deadline == 117.0 and job.tick(116.9) == []
    assert job.tick(117.0) == [SendSignal(worker(1), signal.SIGKILL)]
    end(job, 117.1, (worker(1), -9))
    assert job.is_over and job.exit_code() == 137
    assert "killed by signal 9 (SIGKILL) after 17.1 s; the job had waited for nothing but its end; " in sentence(
        job, 118.0
    )


def test_a_job_that_goes_on_ends_well_without_who_stood_still_at_its_end():
    job = surviving_job()
    job.placed([(worker(1), 42)])
    job.stopped(worker(1), 42, 100.5)
    dissolve(job, 101.0)
    assert job.tick(110.5)[-1] == Say("the job waits for the end of worker-1 (pid 42), and kills it in 5 s")
    assert job.tick(115.5) == [SendSignal(worker(1), signal.SIGKILL)]
    end(job, 115.6, (worker(1), -9))
    assert (job.is_over, job.exit_code()) == (True, 0)


def test_all_that_stand_still_are_killed_where_nobody_else_is_left():
    nodes = [worker(0), worker(1), worker(2)]
    job = of(Job(nodes, now=100.0, grace=GRACE), *((node, 42) for node in nodes))
    for node in nodes[1:]:
        job.stopped(node, 42, 100.5)
    finish_one(job, 101.0)
    told = "the job waits for the end of worker-1 (pid 42), worker-2 (pid 42), and kills them in 5 s"
    assert job.tick(110.5)[-1] == Say(told)
    assert signals(job.tick(115.5)) == dict.fromkeys(nodes[1:], signal.SIGKILL)


def test_who_goes_on_in_the_grace_is_not_killed():
    job = of(new_job(), (worker(1), 42))
    job.stopped(worker(1), 42, 100.5)
    dissolve(job, 101.0)
    job.tick(110.5)
    job.stopped(worker(1), 0, 112.0)
    assert job.tick(115.5) == []


def test_who_stands_still_while_another_works_is_not_killed():
    nodes = [worker(0), worker(1), worker(2)]
    job = of(Job(nodes, now=100.0, grace=GRACE), *((node, 42) for node in nodes))
    job.stopped(worker(1), 42, 100.5)
    job.ended([ProcessExit(worker(0), 42, 0)], 101.0)
    told = [action.text for action in job.tick(130.0) if isinstance(action, Say)]
    assert told[-1] == "the job waits for the end of worker-1 (pid 42), worker-2 (pid 42)" and job.tick(999.0) == []
    job.ended([ProcessExit(worker(2), 42, 0)], 1000.0)
    assert job.tick(1000.0) == [Say("the job waits for the end of worker-1 (pid 42), and kills it in 5 s")]
    assert job.tick(1005.0) == [SendSignal(worker(1), signal.SIGKILL)]


def test_who_stands_still_in_a_cluster_that_others_have_left_is_not_killed():
    job = of(surviving_job(), (worker(1), 42))
    job.stopped(worker(1), 42, 100.5)
    assert end(job, 101.0, (worker(0), 0)) == []
    assert [action.text.partition(" for ")[0] for action in job.tick(110.5)] == [
        "worker-1 (pid 42) has been stopped by a signal"
    ]
    assert job.deadline is None and job.tick(9999.0) == [], "the scheduler gives it up, after the patience"


@each("life, is_killed", [(0, True), (1, False)])
def test_who_stands_still_in_its_end_is_killed_where_others_wait_for_its_exit_code(life, is_killed):
    job = of(surviving_job(), (worker(1), 42))
    job.leaves(worker(1), life, 100.5)
    job.stopped(worker(1), 42, 100.6)
    assert end(job, 101.0, (worker(0), 0)) == []
    job.tick(111.0)
    assert job.tick(116.0) == ([SendSignal(worker(1), signal.SIGKILL)] if is_killed else []), "of another life"


def test_who_does_not_even_end_when_killed_is_told_of():
    job = of(new_job(), (worker(1), 42))
    job.interrupt(signal.SIGINT, 101.0)
    job.interrupt(signal.SIGINT, 102.0)
    end(job, 102.1, *((node, -9) for node in NODES[:4]))
    assert job.tick(112.0) == [Say("worker-1 (pid 42) did not end within 10 s of SIGKILL; the system keeps it")]
    assert job.deadline is None
