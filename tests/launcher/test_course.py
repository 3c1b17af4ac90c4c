"""When a job has failed, who is named, and who is told to end: with literal times and no process."""

from __future__ import annotations

import signal

import pytest

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.nodes import SCHEDULER, NodeId, server, worker
from kvdist_launch.job import GracePeriods, Job, ProcessExit, Say, SendSignal

NODES = [SCHEDULER, server(0), server(1), worker(0), worker(1)]
PATIENCE = GracePeriods(grace_s=5.0, farewell_s=4.0, terminate_s=2.0)


def new_course() -> Job:
    return Job(NODES, now=100.0, patience=PATIENCE)


def end(course: Job, now: float, *ends: tuple[NodeId, int]) -> list[object]:
    return list(course.ended([ProcessExit(node, 1000 + NODES.index(node), status) for node, status in ends], now))


def signals(actions: list[object]) -> dict[NodeId, int]:
    return {action.node: action.number for action in actions if isinstance(action, SendSignal)}


def test_a_job_is_over_when_everybody_has_ended_with_0():
    course = new_course()
    assert end(course, 101.0, (worker(0), 0)) == []
    assert course.deadline is None
    assert end(course, 102.0, (worker(1), 0)) == []
    assert course.deadline == 106.0
    end(course, 103.0, (server(0), 0), (server(1), 0), (SCHEDULER, 0))
    assert course.is_over
    assert (course.exit_code(), course.summary(103.5)) == (0, "2 workers and 2 servers finished in 3.5 s")


def test_what_remains_after_the_farewell_is_terminated_then_killed_and_the_job_still_succeeded():
    course = new_course()
    end(course, 102.0, (worker(0), 0), (worker(1), 0))
    end(course, 103.0, (SCHEDULER, 0), (server(0), 0))
    assert course.tick(105.9) == []
    said, *sent = course.tick(106.0)
    assert said == Say("server-1 did not end within 4 s of the last worker's end; terminating")
    assert signals(sent) == {server(1): signal.SIGTERM}
    assert course.deadline == 108.0
    assert signals(course.tick(108.0)) == {server(1): signal.SIGKILL}
    assert course.deadline is None
    end(course, 108.1, (server(1), -9))
    assert course.is_over
    assert course.exit_code() == 0


def test_the_first_failure_is_named_and_later_ones_are_not():
    course = new_course()
    said = end(course, 112.3, (worker(1), -9))
    assert said == [Say("worker-1 (pid 1004) was killed by signal 9 (SIGKILL); the others get 5 s to end")]
    end(course, 112.5, (worker(0), 1), *((node, EXIT_PEER_LOST) for node in (server(0), server(1), SCHEDULER)))
    assert course.is_over
    assert course.exit_code() == 137
    assert course.summary(113.0) == (
        "worker-1 (pid 1004) was killed by signal 9 (SIGKILL) after 12.3 s; job ended with exit code 137"
    )


def test_those_that_do_not_notice_a_failure_are_terminated_then_killed():
    course = new_course()
    end(course, 110.0, (worker(1), 3))
    assert course.deadline == 115.0
    assert signals(course.tick(115.0)) == dict.fromkeys(NODES[:4], signal.SIGTERM)
    end(course, 115.5, *((node, -15) for node in NODES[:3]))
    assert signals(course.tick(117.0)) == {worker(0): signal.SIGKILL}
    end(course, 117.1, (worker(0), -9))
    assert (course.is_over, course.exit_code()) == (True, 3)


@pytest.mark.parametrize(
    ("ends", "named", "exit_code"),
    [
        ([(worker(0), 1), (worker(1), -11)], worker(1), 139),
        ([(SCHEDULER, EXIT_PEER_LOST), (worker(1), 1)], worker(1), 1),
        ([(server(0), 0), (worker(1), 2)], worker(1), 2),
        ([(SCHEDULER, EXIT_PEER_LOST), (server(1), 9)], server(1), 9),
    ],
)
def test_of_endings_seen_at_once_the_likeliest_cause_is_named(ends, named, exit_code):
    course = new_course()
    end(course, 101.0, *ends)
    assert course.cause is not None
    assert (course.cause.node, course.exit_code()) == (named, exit_code)


def test_a_lost_peer_is_a_consequence_even_if_it_was_seen_first():
    course = new_course()
    end(course, 101.0, (server(0), EXIT_PEER_LOST))
    end(course, 101.2, (worker(0), 4))
    assert course.cause is not None
    assert course.cause.node == worker(0)


def test_a_lost_peer_is_named_when_nothing_else_failed():
    course = new_course()
    end(course, 101.0, (server(0), EXIT_PEER_LOST))
    course.tick(106.0)
    end(course, 106.1, *((node, -15) for node in NODES if node != server(0)))
    assert course.exit_code() == EXIT_PEER_LOST
    assert course.summary(107.0).startswith("server-0 (pid 1001) lost a peer and ended with exit code 75 after 1.0 s")


def test_a_worker_that_lost_a_peer_is_not_named_even_if_it_ends_before_the_one_that_failed():
    course = new_course()
    lost = ProcessExit(worker(0), 1003, 1, b"kvdist.errors.PeerLostError: worker-1 was lost\n")
    assert course.ended([lost], 101.0) == [
        Say("worker-0 (pid 1003) lost a peer and ended with exit code 1 (worker-1 was lost); the others get 5 s to end")
    ]
    course.ended([ProcessExit(worker(1), 1004, 1, b"ValueError: mine\n")], 101.1)
    assert course.cause is not None
    assert course.cause.node == worker(1)


def test_a_last_worker_that_lost_a_peer_still_fails_the_job():
    course = new_course()
    end(course, 101.0, (worker(1), 0))
    course.ended([ProcessExit(worker(0), 1003, 1, b"kvdist.errors.PeerLostError: server-0 was lost\n")], 102.0)
    assert course.exit_code() == EXIT_PEER_LOST


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        (75, b"whatever the program prints"),
        (75, b"kvdist.errors.PeerLostError: worker-1 was lost\n"),
        (1, b"kvdist.errors.RankLostError: rank 1 on host d2 is gone\n"),
        (1, b"[rank0]: kvdist.errors.PeerLostError: worker-1 was lost\n"),  # as torch.distributed prints it
    ],
)
def test_a_worker_says_that_it_lost_a_peer_by_its_code_or_by_its_traceback(code, last_line):
    course = new_course()
    course.ended([ProcessExit(worker(0), 1003, code, last_line)], 101.0)
    assert course.exit_code() == EXIT_PEER_LOST
    end(course, 101.2, (worker(1), 3))
    assert course.exit_code() == 3, "that one failed by itself"


def test_a_worker_that_fails_by_itself_is_named_though_a_server_left_before_it():
    course = new_course()
    assert end(course, 101.0, (server(1), 0)) == []
    course.ended([ProcessExit(worker(0), 1003, 1, b"ValueError: mine\n")], 101.3)
    assert course.cause is not None and course.cause.node == worker(0)


def test_a_server_that_leaves_early_is_the_cause_of_the_losses_after_it():
    course = new_course()
    assert end(course, 101.0, (server(1), 0)) == []
    course.ended([ProcessExit(worker(0), 1003, 1, b"kvdist.errors.PeerLostError: server-1 was lost\n")], 101.3)
    assert course.exit_code() == 1
    assert course.summary(102.0) == (
        "server-1 (pid 1002) ended early with exit code 0 after 1.0 s; job ended with exit code 1"
    )


def test_a_server_that_leaves_early_fails_the_job_even_if_nobody_notices():
    course = new_course()
    end(course, 101.0, (server(1), 0))
    assert course.tick(105.9) == []
    assert signals(course.tick(106.0)) == {node: signal.SIGTERM for node in NODES if node != server(1)}
    assert course.exit_code() == 1


def test_a_cluster_dissolved_in_order_leaves_the_workers_time_to_finish():
    course = new_course()
    end(course, 101.0, (server(1), 0))
    end(course, 101.1, (server(0), 0))
    end(course, 101.2, (SCHEDULER, 0))
    assert course.deadline is None
    end(course, 160.0, (worker(0), 0))
    end(course, 170.0, (worker(1), 0))
    assert (course.is_over, course.exit_code()) == (True, 0)


def test_a_worker_that_fails_after_the_cluster_was_dissolved_is_named():
    course = new_course()
    end(course, 101.0, (server(1), 0), (server(0), 0))
    end(course, 101.2, (SCHEDULER, 0))
    end(course, 102.0, (worker(0), 5))
    assert course.exit_code() == 5


def test_a_server_that_fails_after_the_last_worker_fails_the_job():
    course = new_course()
    end(course, 101.0, (worker(0), 0), (worker(1), 0))
    end(course, 101.5, (server(0), 1))
    assert course.exit_code() == 1


def test_a_scheduler_that_lost_a_peer_after_all_workers_succeeded_fails_nothing():
    course = new_course()
    end(course, 101.0, (worker(0), 0), (worker(1), 0), (server(0), EXIT_PEER_LOST))
    end(course, 101.5, (server(1), EXIT_PEER_LOST), (SCHEDULER, EXIT_PEER_LOST))
    assert (course.is_over, course.exit_code()) == (True, 0)


def test_an_interruption_asks_workers_first_and_lets_servers_live_until_they_have_ended():
    course = new_course()
    said, *sent = course.interrupt(signal.SIGINT, 110.0)
    assert isinstance(said, Say)
    assert signals(sent) == {worker(0): signal.SIGINT, worker(1): signal.SIGINT}
    assert end(course, 111.0, (worker(0), -2)) == []
    assert signals(end(course, 112.0, (worker(1), 0))) == dict.fromkeys(NODES[:3], signal.SIGTERM)
    end(course, 112.1, *((node, -15) for node in NODES[:3]))
    assert course.exit_code() == 130
    assert course.summary(112.2) == ("interrupted by signal 2 (SIGINT) after 12.2 s; job ended with exit code 130")


def test_who_ignores_an_interruption_is_terminated_after_the_grace():
    course = new_course()
    course.interrupt(signal.SIGTERM, 110.0)
    said, *sent = course.tick(115.0)
    assert said == Say("worker-0, worker-1 did not end within 5 s of the interruption; terminating")
    assert signals(sent) == dict.fromkeys(NODES, signal.SIGTERM)
    assert signals(course.tick(117.0)) == dict.fromkeys(NODES, signal.SIGKILL)
    assert course.exit_code() == 143


def test_a_second_interruption_kills_at_once():
    course = new_course()
    course.interrupt(signal.SIGINT, 110.0)
    assert signals(course.interrupt(signal.SIGINT, 110.5)) == dict.fromkeys(NODES, signal.SIGKILL)


def test_signals_in_quick_succession_are_one_interruption():
    course = new_course()
    course.interrupt(signal.SIGHUP, 110.0)
    assert course.interrupt(signal.SIGTERM, 110.1) == []


def test_an_interruption_after_a_failure_shortens_the_grace_and_keeps_the_cause():
    course = new_course()
    end(course, 110.0, (worker(1), 3))
    assert signals(course.interrupt(signal.SIGINT, 111.0)) == dict.fromkeys(NODES[:4], signal.SIGTERM)
    assert course.exit_code() == 3


def test_one_worker_and_one_server_are_counted_in_the_singular():
    course = Job([SCHEDULER, server(0), worker(0)], now=0.0)
    course.ended([ProcessExit(node, 1, 0) for node in (worker(0), server(0), SCHEDULER)], 1.0)
    assert course.summary(1.04) == "1 worker and 1 server finished in 1.0 s"


@pytest.mark.parametrize(
    ("ending", "report"),
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
