"""Admission, agreements, barriers, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

from kvdist.checkpoint.snapshot import EVERYTHING, FileRecord, Manifest, ReadManifest, Sweep
from kvdist.config.settings import ClusterConfig, Limits
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction
from kvdist.core.machine import (
    Bind,
    ChildEnded,
    Halt,
    LauncherGone,
    Log,
    PeerConnected,
    PeerDisconnected,
    Persist,
    Persisted,
    ProcessStarted,
    Send,
    Unreachable,
)
from kvdist.core.scheduler.agreement import Agreement
from kvdist.core.scheduler.rollback import Snapshot
from kvdist.core.scheduler.scheduler import ROSTER_GAP_S, Scheduler
from kvdist.core.server.server import Server
from kvdist.core.worker.requests import EnterBarrier, Register
from kvdist.errors import BarrierTimeout, ConfigError, InitMismatch, JobOver, OptimizerMismatch, PeerLostError
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import UNRANKED, Member, NodeId, Role, server, worker
from kvdist.protocol.messages import (
    Abort,
    Alive,
    Barrier,
    Command,
    Done,
    ErrorCode,
    Failed,
    Fate,
    Goodbye,
    Hello,
    Join,
    Load,
    Perform,
    Rejected,
    Roster,
    Save,
    Saved,
    SavedFile,
    Seen,
    Waiting,
    Welcome,
)
from kvdist.version import __version__
from tests.cases import each
from tests.core.wired import Wired


def stranger(role: Role, token: int) -> Member:
    return Member(NodeId(role, UNRANKED), token)


def hello(rank: int = -1, workers: int = 2, servers: int = 1, pid: int = 50) -> Hello:
    return Hello(rank, "far", pid, "", workers, servers, __version__)


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(ClusterConfig(Role.SCHEDULER, "host-s", 1, 2, 1), 0.0)


def test_a_repeated_hello_gets_the_same_seat(scheduler: Scheduler) -> None:
    first = scheduler.handle(stranger(Role.WORKER, 7), hello(1), 0.0)
    again = scheduler.handle(stranger(Role.WORKER, 7), hello(1), 1.0)
    assert first == again
    assert first == [
        Send(stranger(Role.WORKER, 7), Welcome(1, 1)),
        Bind(stranger(Role.WORKER, 7), Member(worker(1), 1)),
    ]
    assert len(scheduler.membership.peers) == 1


@pytest.mark.parametrize(("role", "rank"), [(Role.WORKER, 0), (Role.SERVER, 1), (Role.SERVER, -1)])
def test_the_token_of_another_gives_nobody_his_seat(scheduler: Scheduler, role: Role, rank: int) -> None:
    scheduler.handle(stranger(Role.WORKER, 7), hello(1), 0.0)
    (answer,) = scheduler.handle(stranger(role, 7), hello(rank), 1.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Rejected)
    assert "with the token of worker-1" in answer.message.reason
    (welcome, _) = scheduler.handle(stranger(Role.WORKER, 7), hello(), 2.0)  # without a rank it may be the same
    assert isinstance(welcome, Send) and welcome.message == Welcome(1, 1)


def test_who_asks_for_no_rank_gets_the_next_free_one(scheduler: Scheduler) -> None:
    scheduler.handle(stranger(Role.WORKER, 7), hello(0), 0.0)
    welcome = scheduler.handle(stranger(Role.WORKER, 8), hello(), 0.0)[0]
    assert isinstance(welcome, Send) and welcome.message == Welcome(1, 2)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (hello(0, pid=51), "worker-0 is taken by process 50 on far; process 51 on far claims the same rank"),
        (hello(1, workers=3), "it expects 3 worker"),
        (hello(1, servers=4), "DMLC_NUM_WORKER and DMLC_NUM_SERVER must agree"),
        (hello(2), "it asks for rank 2, but there are only 2 worker"),
    ],
)
def test_a_hello_that_cannot_be_seated_is_refused_with_the_reason(
    scheduler: Scheduler, asked: Hello, reason: str
) -> None:
    scheduler.handle(stranger(Role.WORKER, 7), hello(0), 0.0)
    (answer,) = scheduler.handle(stranger(Role.WORKER, 8), asked, 0.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Rejected) and reason in answer.message.reason


def test_one_worker_too_many_is_refused(scheduler: Scheduler) -> None:
    for token in (1, 2):
        scheduler.handle(stranger(Role.WORKER, token), hello(), 0.0)
    (answer,) = scheduler.handle(stranger(Role.WORKER, 3), hello(), 0.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Rejected)
    assert answer.message.reason == "the cluster has its 2 worker(s) already"


def test_the_roster_goes_to_all_when_the_last_one_has_come(scheduler: Scheduler) -> None:
    scheduler.handle(stranger(Role.WORKER, 1), hello(0), 0.0)
    scheduler.handle(stranger(Role.SERVER, 2), hello(0), 0.0)
    effects = scheduler.handle(stranger(Role.WORKER, 3), hello(1), 0.0)
    rosters = [effect for effect in effects if isinstance(effect, Send) and isinstance(effect.message, Roster)]
    assert [str(effect.to) for effect in rosters] == ["worker-0", "server-0", "worker-1"]
    assert scheduler.membership.is_complete and scheduler.epoch == 1


def test_a_process_of_an_earlier_job_is_told_that_it_has_no_seat(scheduler: Scheduler) -> None:
    assert "worker-0 has no seat in this job" in str(scheduler.refuses(Member(worker(0), 99), Alive()))


def test_a_stranger_may_only_say_hello_and_not_as_a_scheduler(scheduler: Scheduler) -> None:
    assert scheduler.refuses(stranger(Role.WORKER, 1), hello(0)) is None
    assert scheduler.refuses(stranger(Role.WORKER, 1), Alive()) == ""
    assert scheduler.refuses(stranger(Role.SCHEDULER, 1), hello(1)) is not None


def test_another_version_of_kvdist_gets_no_seat(scheduler: Scheduler) -> None:
    (answer,) = scheduler.handle(stranger(Role.WORKER, 1), replace(hello(0), version="0.0.9"), 0.0)
    assert isinstance(answer, Send) and isinstance(answer.message, Rejected)
    assert "it runs kvdist 0.0.9" in answer.message.reason


def test_a_server_cannot_speak_for_the_worker_of_its_rank() -> None:
    wired = Wired(2, 2)
    wired.barrier(0)
    wired.settle()
    impostor = wired.member("server-1")
    for message in (Barrier(99, 0, ""), Goodbye(98, "")):
        assert wired.scheduler.handle(impostor, message, 1.0) == []
    assert wired.scheduler.explain(1.0) == "waiting 1.0 s for worker-1 to reach barrier 0"


def test_the_lowest_live_worker_gives_the_first_values() -> None:
    wired = Wired(2, 1)
    wired.leave(0)
    wired.advance(0.1)
    wired.declare(1, {"late": (1,)})
    wired.settle()
    assert wired.infos["late"].giver == 1


def test_an_incomplete_cluster_ends_with_who_is_missing(scheduler: Scheduler) -> None:
    scheduler.handle(stranger(Role.WORKER, 1), hello(1), 0.0)
    assert scheduler.explain(1.0) == "0/1 servers, 1/2 workers; waiting for server-0, worker-0 to register"
    scheduler.tick(10.0)
    effects = scheduler.tick(300.0)
    stop = effects[-1]
    assert isinstance(stop, Halt) and isinstance(stop.error, PeerLostError)
    assert str(stop.error) == "the cluster is incomplete after 300 s: server-0, worker-0 did not register"


def test_who_is_missing_is_named_with_the_place_where_the_launcher_started_it(scheduler: Scheduler) -> None:
    scheduler.handle(stranger(Role.WORKER, 1), hello(1), 0.0)
    scheduler.observe(ProcessStarted(worker(0), "d2", 4242), 0.5)
    told = "worker-0 on d2 (pid 4242 was started there, no hello yet)"
    assert scheduler.explain(1.0) == f"0/1 servers, 1/2 workers; waiting for server-0, {told} to register"
    stop = scheduler.tick(300.0)[-1]
    assert isinstance(stop, Halt)
    assert str(stop.error) == f"the cluster is incomplete after 300 s: server-0, {told} did not register"


def test_who_waits_for_the_cluster_is_told_for_whom(scheduler: Scheduler) -> None:
    scheduler.handle(stranger(Role.WORKER, 1), hello(1), 0.0)
    (hint,) = scheduler.tick(10.0)
    assert isinstance(hint, Send) and isinstance(hint.message, Waiting)
    assert hint.message.deed == "server-0, worker-0 to register"


# Agreement.


def test_keys_are_placed_once_when_all_have_declared_them_and_everybody_gets_the_same_places() -> None:
    wired = Wired(3, 2)
    first = wired.declare(0, {"a": (3,), "b": (2, 2)})
    wired.settle()
    assert first not in wired.completed
    others = [wired.declare(rank, {"b": (2, 2), "a": (3,)}) for rank in (1, 2)]
    wired.settle()
    places = [{info.key: info.slices for info in wired.completed[request]} for request in (first, *others)]
    assert places[0] == places[1] == places[2]
    assert sum("Assign" in line for line in wired.log) == 2


def test_a_mismatch_reaches_every_rank_even_one_that_comes_late() -> None:
    wired = Wired(3, 1)
    requests = [wired.declare(0, {"w": (2, 3)}), wired.declare(1, {"w": (3, 2)})]
    wired.settle()
    requests.append(wired.declare(2, {"w": (2, 3)}))
    wired.settle()
    sentences = {str(wired.failed[request]) for request in requests}
    assert len(sentences) == 1 and all(isinstance(wired.failed[request], InitMismatch) for request in requests)
    assert "worker-1 declares key 'w' with shape (3, 2); worker-0 and worker-2 with shape (2, 3);" in sentences.pop()


def test_stores_of_two_types_are_the_same_error_on_every_rank() -> None:
    wired = Wired(3, 1)
    requests = [wired.declare(0, {"w": (2,)}), wired.declare(1, {"w": (2,)}, mode="async")]
    wired.settle()
    requests.append(wired.declare(2, {"w": (2,)}))
    wired.settle()
    sentences = {str(wired.failed[request]) for request in requests}
    assert len(sentences) == 1
    assert "store 0 is sync on worker-0 and async on worker-1" in sentences.pop()


def test_the_same_optimizer_from_every_rank_is_one_call() -> None:
    wired = Wired(2, 2)
    requests = [wired.set_optimizer(rank, "sgd", learning_rate=0.5) for rank in (0, 1)]
    wired.settle()
    requests.append(wired.set_optimizer(1, "sgd", learning_rate=0.5))
    wired.settle()
    assert all(request in wired.completed for request in requests)
    assert sum("SetOptimizer" in line for line in wired.log) == 2


def test_another_optimizer_is_an_error_that_shows_both() -> None:
    wired = Wired(2, 1)
    wired.set_optimizer(0, "sgd", learning_rate=0.5)
    other = wired.set_optimizer(1, "sgd", learning_rate=0.25)
    wired.settle()
    error = wired.failed[other]
    assert isinstance(error, OptimizerMismatch)
    assert "learning_rate=0.5" in str(error) and "learning_rate=0.25" in str(error) and "worker-0 set" in str(error)


# Barriers.


def test_a_barrier_opens_when_every_worker_is_there() -> None:
    wired = Wired(2, 1)
    first = wired.barrier(0)
    wired.settle()
    assert first not in wired.completed
    second = wired.barrier(1)
    wired.settle()
    assert {first, second} <= wired.completed.keys()


def test_arriving_twice_is_arriving_once() -> None:
    wired = Wired(3, 1)
    requests = [wired.barrier(0), wired.barrier(0), wired.barrier(1)]
    wired.settle()
    assert not set(requests) & wired.completed.keys()


def test_a_barrier_that_is_late_names_who_is_missing() -> None:
    wired = Wired(3, 1)
    late = wired.barrier(1, timeout_s=2.0)
    wired.advance(2.5)
    error = wired.failed[late]
    assert isinstance(error, BarrierTimeout) and error.missing == (0, 2)
    assert str(error) == "worker-0 (host-0), worker-2 (host-2) did not reach barrier 0 within 2.0 s"


def test_a_barrier_can_be_tried_again_after_it_was_late() -> None:
    wired = Wired(2, 1)
    late = wired.barrier(0, timeout_s=1.0)
    wired.advance(1.5)
    assert late in wired.failed
    requests = [wired.barrier(0), wired.barrier(1)]
    wired.settle()
    assert set(requests) <= wired.completed.keys()
    again = [wired.barrier(rank) for rank in (0, 1)]
    wired.settle()
    assert set(again) <= wired.completed.keys()


def the_next_barrier_waits_for(wired: Wired, rank: int, other: int) -> None:
    """The next barrier of a worker is that of the other one."""
    alone = wired.barrier(rank)
    wired.settle()
    assert alone not in wired.completed
    together = wired.barrier(other)
    wired.settle()
    assert {alone, together} <= wired.completed.keys()


@pytest.mark.parametrize("meanwhile", ["the answer has come", "the answer is under way", "the scheduler was away"])
def test_a_barrier_that_was_late_and_is_over_is_passed_by_the_next_call(meanwhile: str) -> None:
    wired = Wired(2, 1)
    late = wired.barrier(0, timeout_s=1.0)
    wired.advance(1.5)
    assert late in wired.failed
    other = wired.barrier(1)
    wired.deliver()
    if meanwhile != "the answer is under way":
        wired.settle()
    if meanwhile == "the scheduler was away":
        wired.return_scheduler()
    again = wired.barrier(0)
    wired.advance(1.0)
    assert {other, again} <= wired.completed.keys()
    the_next_barrier_waits_for(wired, 0, 1)


def test_a_worker_that_asks_who_is_missing_when_the_barrier_is_over_does_not_enter_the_next_one() -> None:
    wired = Wired(2, 1)
    late, other = wired.barrier(0, timeout_s=1.0), wired.barrier(1)
    wired.deliver(2)
    wired.now += 1.0
    wired.tick()
    assert any(isinstance(packet.message, Barrier) for _, _, packet in wired.wire)
    wired.settle()
    assert {late, other} <= wired.completed.keys()
    the_next_barrier_waits_for(wired, 0, 1)


def test_workers_that_are_late_at_barriers_of_two_stores_hear_who_is_missing_at_each() -> None:
    wired = Wired(3, 1)
    wired.ask(0, lambda number: EnterBarrier(number, 1))
    late = [wired.ask(1, lambda number, store=store: EnterBarrier(number, store, 1.0)) for store in (0, 1)]
    wired.advance(1.5)
    errors = [wired.failed[request] for request in late]
    assert [isinstance(error, BarrierTimeout) and error.missing for error in errors] == [(0, 2), (2,)]


def test_a_load_for_which_a_worker_waits_is_not_its_next_one() -> None:
    wired = Wired(2, 1)
    loads = [wired.load(0, "/run/step-1"), wired.load(0, "/run/step-2")]
    wired.settle()
    assert wired.scheduler.checkpoints.loading_of(0)[0].keys() == {0, 1}
    loads += [wired.load(1, "/run/step-1"), wired.load(1, "/run/step-2")]
    wired.settle()
    reasons = {str(wired.failed[load]) for load in loads}
    assert len(reasons) == 1 and "the store has no keys" in reasons.pop()


def test_workers_that_say_the_same_at_a_barrier_go_on() -> None:
    wired = Wired(2, 1)
    requests = [wired.barrier(rank, statement="8 parameters") for rank in (0, 1)]
    wired.settle()
    assert set(requests) <= wired.completed.keys()


def test_workers_that_say_different_things_at_a_barrier_all_hear_who_said_what() -> None:
    wired = Wired(3, 1)
    requests = [wired.barrier(rank, statement=text) for rank, text in enumerate(("8 parameters", "", "8 parameters"))]
    wired.settle()
    errors = [wired.failed[request] for request in requests]
    assert all(isinstance(error, InitMismatch) for error in errors)
    assert str(errors[0]) == str(errors[1]) == str(errors[2])
    assert "worker-1 says: nothing; worker-0 and worker-2 say: 8 parameters. Every" in str(errors[0])
    again = [wired.barrier(rank) for rank in (0, 1, 2)]
    wired.settle()
    assert set(again) <= wired.completed.keys()


def test_a_worker_that_leaves_does_not_hold_up_a_barrier() -> None:
    wired = Wired(3, 1)
    requests = [wired.barrier(0), wired.barrier(1)]
    wired.leave(2)
    wired.settle()
    assert set(requests) <= wired.completed.keys()


# Ends.


def test_the_last_goodbye_stops_the_servers_and_then_the_scheduler() -> None:
    wired = Wired(2, 2)
    wired.leave(0)
    wired.settle()
    assert wired.stopped == {"worker-0": None}
    wired.leave(1)
    wired.advance(1.0)
    assert wired.stopped == dict.fromkeys(["worker-0", "worker-1", "server-0", "server-1", "scheduler"])


def test_connections_of_workers_that_end_do_not_count_as_servers_that_ended() -> None:
    wired = Wired(2, 2)
    wired.leave(0)
    wired.leave(1)
    while "scheduler -> server-1: Stop()" not in wired.log[-1]:
        wired.deliver()
    for rank in (0, 1):
        wired.observe("scheduler", PeerDisconnected(wired.member(f"worker-{rank}"), "closed"))
    assert "scheduler" not in wired.stopped
    wired.settle()
    assert wired.stopped == dict.fromkeys(["worker-0", "worker-1", "server-0", "server-1", "scheduler"])


def test_a_lost_worker_is_named_with_host_process_step_and_cause() -> None:
    wired = Wired(2, 1)
    wired.initialise({"w": [1, 2]})
    wired.push(1, {"w": [1, 1]})
    wired.settle()
    wired.observe("scheduler", PeerDisconnected(wired.member("worker-1"), "connection reset"))
    waiting = wired.push(0, {"w": [1, 1]})
    wired.settle()
    lost = wired.barrier(0)
    wired.advance(0.3)
    assert "scheduler" not in wired.stopped
    wired.advance(0.2)
    sentence = "worker-1 (host host-1, pid 101) was lost, last reported in step 1: connection reset"
    error = wired.stopped["worker-0"]
    assert isinstance(error, PeerLostError)
    assert (str(error), error.node, error.host, error.cause) == (sentence, "worker-1", "host-1", "connection reset")
    assert str(wired.failed[lost]) == str(wired.stopped["server-0"]) == str(wired.stopped["scheduler"]) == sentence
    assert waiting in wired.completed


def test_the_verdict_tells_the_step_that_a_worker_was_heard_in() -> None:
    wired = Wired(2, 1)
    wired.initialise({"w": [1, 2]})
    wired.push(1, {"w": [1, 1]})
    wired.advance(1.2)
    wired.observe("scheduler", ChildEnded(worker(1), "killed by signal 9", clean=False))
    wired.settle()
    error = wired.stopped["worker-0"]
    assert isinstance(error, PeerLostError) and error.step == 1
    assert str(error) == "worker-1 (host host-1, pid 101) was lost, last reported in step 1: killed by signal 9"


@each("who", ["scheduler", "worker-0", "server-0"])
@each("after_silence, grace_s", [(False, 0.4), (True, 6.65)])
def test_a_broken_connection_is_lost_after_the_grace_and_sooner_if_the_peer_closed_it(
    who: str, after_silence: bool, grace_s: float
) -> None:
    wired = Wired(2, 1, Limits(patience_s=10.0))
    peer = wired.member("worker-1") if who == "scheduler" else SCHEDULER_MEMBER
    wired.observe(who, PeerDisconnected(peer, "gone", after_silence))
    wired.advance(grace_s - 0.02)
    assert who not in wired.stopped
    wired.advance(0.03)
    assert isinstance(wired.stopped[who], PeerLostError)


@each("patience_s", [1.0, 2.0, 10.0])
def test_where_the_others_go_on_a_silent_worker_is_given_up_less_than_a_second_after_the_patience(
    patience_s: float,
) -> None:
    limits = Limits(patience_s=patience_s)
    wired = Wired(3, 1, limits, on_loss="continue")
    scheduler, silent = wired.scheduler, wired.member("worker-1")
    wired.observe("scheduler", PeerDisconnected(silent, "gone", after_silence=True))
    wired.advance(patience_s - limits.silence_s)
    assert silent not in scheduler.membership.lost
    wired.advance(0.95)
    assert silent in scheduler.membership.lost and wired.stopped.keys() <= {"worker-1"}


@each("patience_s", [1.0, 2.0, 10.0])
@each(
    "on_loss, share, root_host, grace_s",
    [
        ("continue", 1.2, "127.0.0.1", 0.0),
        ("continue", 0.8, "127.0.0.1", 0.4),
        ("continue", 1.2, "host-s", 0.4),  # over a network, which may have broken the connection
        ("fail", 1.2, "127.0.0.1", 0.4),
    ],
)
def test_a_worker_of_this_host_that_has_said_nothing_for_the_patience_is_given_up_at_once_if_the_others_go_on(
    patience_s: float, on_loss: str, share: float, root_host: str, grace_s: float
) -> None:
    wired = Wired(3, 1, Limits(patience_s=patience_s), on_loss=on_loss)
    wired.scheduler.config = replace(wired.scheduler.config, root_host=root_host)
    wired.advance(patience_s)
    silent = wired.member("worker-1")
    wired.stopped["worker-1"] = None
    wired.advance(share * patience_s)
    wired.observe("scheduler", PeerDisconnected(silent, "closed"))
    wired.advance(max(0.0, grace_s - 0.05))
    assert _is_told_lost(wired) == (grace_s == 0.0)
    wired.advance(0.1)
    assert _is_told_lost(wired)


def _is_told_lost(wired: Wired) -> bool:
    told = "worker-1 (host host-1, pid 101) was lost"
    return any(told in text for text in (*wired.reports, str(wired.stopped.get("worker-0"))))


def test_a_scheduler_that_stood_still_gives_nobody_up_before_they_could_come_back() -> None:
    wired = Wired(3, 1, Limits(patience_s=2.0), on_loss="continue")
    wired.advance(5.0)
    wired.now += 3.0
    for rank in (0, 1, 2):
        wired.observe("scheduler", PeerDisconnected(wired.member(f"worker-{rank}"), "closed"))
    wired.advance(0.3)
    for rank in (0, 1, 2):
        wired.observe("scheduler", PeerConnected(wired.member(f"worker-{rank}")))
    wired.advance(5.0)
    assert not wired.scheduler.membership.lost and wired.stopped == {}


def test_a_connection_that_comes_back_in_time_is_forgiven() -> None:
    wired = Wired(2, 1)
    wired.observe("scheduler", PeerDisconnected(wired.member("worker-1"), "connection reset"))
    wired.advance(0.3)
    wired.observe("scheduler", PeerConnected(wired.member("worker-1")))
    wired.advance(5.0)
    assert wired.stopped == {}


def test_a_worker_that_reports_a_failure_ends_the_job_with_its_words() -> None:
    wired = Wired(2, 1)
    wired.leave(1, "ended by an unhandled ValueError: bad data")
    wired.settle()
    error = wired.stopped["worker-0"]
    assert isinstance(error, PeerLostError) and "ended by an unhandled ValueError: bad data" in str(error)


@each("name", ["worker-1", "server-0"])
def test_a_child_that_ends_badly_ends_the_job(name: str) -> None:
    wired = Wired(2, 1)
    wired.observe("scheduler", ChildEnded(wired.member(name).node, "exited with code 3", clean=False))
    wired.settle()
    error = wired.stopped["worker-0"]
    assert isinstance(error, PeerLostError) and (error.node, error.cause) == (name, "exited with code 3")


def test_a_worker_that_ends_well_after_its_goodbye_is_no_news() -> None:
    wired = Wired(2, 1)
    wired.leave(1)
    wired.settle()
    wired.observe("scheduler", ChildEnded(worker(1), "exited with code 0", clean=True))
    wired.settle()
    assert wired.stopped == {"worker-1": None}


def test_a_worker_that_ends_well_without_a_goodbye_is_lost() -> None:
    wired = Wired(2, 1)
    wired.observe("scheduler", ChildEnded(worker(1), "exited with code 0", clean=True))
    wired.settle()
    assert isinstance(wired.stopped["worker-0"], PeerLostError)


def test_a_worker_that_never_joined_is_an_error_for_those_who_wait(scheduler: Scheduler) -> None:
    scheduler.handle(stranger(Role.WORKER, 1), hello(1), 0.0)
    effects = scheduler.observe(ChildEnded(worker(0), "exited with code 0", clean=True), 1.0)
    stop = effects[-1]
    assert isinstance(stop, Halt)
    assert "worker-0 ended without having joined the cluster, but worker-1 waits for it" in str(stop.error)


def test_workers_that_never_joined_and_nobody_waits_for_end_the_job_well(scheduler: Scheduler) -> None:
    scheduler.handle(stranger(Role.SERVER, 1), hello(0), 0.0)
    effects = [scheduler.observe(ChildEnded(worker(rank), "exited with code 0", True), 1.0) for rank in (0, 1)]
    assert effects[0] == []
    assert any(isinstance(effect, Send) and type(effect.message).__name__ == "Stop" for effect in effects[1])
    assert scheduler.observe(ChildEnded(server(0), "exited with code 0", True), 1.1) == [Halt(None)]


def test_a_child_that_dies_before_joining_is_named(scheduler: Scheduler) -> None:
    effects = scheduler.observe(ChildEnded(server(0), "exited with code 1", clean=False), 1.0)
    stop = effects[-1]
    assert isinstance(stop, Halt)
    assert str(stop.error) == "server-0 was lost: exited with code 1 before it had joined the cluster"


@each("on_loss, says_so", [("fail", False), ("wait", True), ("continue", True)])
def test_where_others_would_go_on_the_sentence_says_that_the_cluster_was_not_complete(
    on_loss: str, says_so: bool
) -> None:
    made = Scheduler(ClusterConfig(Role.SCHEDULER, "host-s", 1, 2, 1, on_loss=on_loss), 0.0)
    made.handle(stranger(Role.WORKER, 7), hello(0), 0.0)
    stop = made.observe(ChildEnded(worker(0), "killed by signal 15 (SIGTERM)", clean=False), 1.0)[-1]
    assert isinstance(stop, Halt)
    why = "; the others cannot go on, as the cluster was not complete yet"
    assert str(stop.error).endswith(f" was lost: killed by signal 15 (SIGTERM){why * says_so}")


def test_without_its_launcher_the_job_ends() -> None:
    wired = Wired(1, 1)
    wired.observe("scheduler", LauncherGone())
    wired.settle()
    assert str(wired.stopped["worker-0"]) == "the launcher is gone"


def test_registering_twice_in_one_cluster_is_refused_on_the_second_process() -> None:
    wired = Wired(2, 1, form=False)
    joining = wired.workers[1].joining
    joining.introduction = replace(joining.introduction, wanted_rank=0)
    requests = [wired.ask(rank, Register) for rank in (0, 1)]
    wired.advance(0.0)
    (refused,) = [request for request in requests if request in wired.failed]
    assert isinstance(wired.failed[refused], ConfigError) and "claims the same rank" in str(wired.failed[refused])


def test_long_waits_are_hinted_at_with_who_is_missing() -> None:
    wired = Wired(2, 1, limits=Limits(explain_after_s=10.0))
    wired.declare(0, {"w": (2,)})
    wired.advance(10.5)
    assert wired.workers[0].explain(10.5) == (
        "worker-0: waiting 10.5 s for worker-1 (host-1) to initialise key 'w', in init of key 'w'"
    )
    assert wired.scheduler.explain(10.5) == "waiting 10.5 s for worker-1 to initialise key 'w'"


def test_workers_that_leave_at_once_are_announced_together() -> None:
    scheduler = Scheduler(ClusterConfig(Role.SCHEDULER, "host-s", 1, 4, 1), 0.0)
    members = [Member(worker(rank), rank + 1) for rank in range(4)]
    for member in members:
        scheduler.handle(stranger(Role.WORKER, 10 + member.node.rank), hello(member.node.rank, workers=4), 0.0)
    scheduler.handle(stranger(Role.SERVER, 20), hello(0, workers=4), 0.0)

    def rosters(effects: Sequence[object]) -> list[Roster]:
        return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, Roster)]

    assert len(rosters(scheduler.handle(members[0], Goodbye(1, ""), 1.0))) == 4
    later = [scheduler.handle(member, Goodbye(1, ""), 1.0 + ROSTER_GAP_S) for member in members[1:3]]
    assert [rosters(effects) for effects in later] == [[], []]
    assert scheduler.deadline == 1.0 + ROSTER_GAP_S * 5
    told = rosters(scheduler.tick(scheduler.deadline))
    assert [[str(peer.member) for peer in roster.peers] for roster in told] == [["worker-3", "server-0"]] * 2
    assert rosters(scheduler.tick(9.0)) == []


# Servers with copies. The simulation meets these moments too rarely.


class NotedAccounts:
    """Notes what all servers have counted of those that were given up."""

    def __init__(self) -> None:
        self.most: list[int] = []

    def account(self, member: Member, fates: Iterable[Fate]) -> None:
        self.most += [one.most for one in fates]

    def lost(self, member: Member) -> None:
        """Nothing is leased."""


def seen(scheduler: Scheduler, fates: tuple[Fate, ...] = (), version: int = 0) -> Seen:
    """What a server says when it has applied the newest roster, and its backup has everything."""
    return Seen(scheduler.membership.epoch, fates, np.zeros(0, np.uint32), True, version, version)


def with_copies() -> tuple[Scheduler, list[Member]]:
    """The scheduler of two workers and three servers with copies of each other's slices, and the servers."""
    config = ClusterConfig(Role.SCHEDULER, "host-s", 1, 2, 3, on_loss="continue", replicas=1)
    scheduler = Scheduler(config, 0.0)
    for role, count in ((Role.SERVER, 3), (Role.WORKER, 2)):
        for rank in range(count):
            scheduler.handle(stranger(role, (100 if role is Role.SERVER else 200) + rank), hello(rank, 2, 3), 0.0)
    servers = [scheduler.membership.servers[NodeId(Role.SERVER, rank)] for rank in range(3)]
    for one in servers:
        scheduler.handle(one, seen(scheduler), 0.1)
    assert all(scheduler.membership.may_lose(one.node) for one in servers)
    return scheduler, servers


def begin_cut(scheduler: Scheduler, now: float) -> list[int]:
    """Begin a cut without newcomers, of which every server hears. Returns where its version will be."""
    versions: list[int] = []
    assert scheduler.newcomers is not None
    scheduler.newcomers.cut(lambda version: versions.append(version) or [])  # type: ignore[func-returns-value]
    scheduler.tick(now)
    return versions


def test_who_has_answered_how_far_it_is_before_it_had_a_lost_servers_slices_is_asked_again() -> None:
    scheduler, servers = with_copies()
    versions = begin_cut(scheduler, 0.2)
    for one in (servers[0], servers[2]):
        scheduler.handle(one, seen(scheduler, version=5), 0.2)
    scheduler.observe(ChildEnded(servers[1].node, "killed", False), 0.3)
    scheduler.handle(servers[0], seen(scheduler, version=5), 0.4)
    assert not versions and scheduler.membership.hold
    scheduler.handle(servers[2], seen(scheduler, version=6), 0.4)  # the lost one had closed a round more
    assert versions == [7] and not scheduler.membership.hold


def test_a_server_that_comes_back_is_let_in_while_others_are_asked() -> None:
    scheduler, servers = with_copies()
    scheduler.observe(ChildEnded(servers[1].node, "killed", False), 0.2)
    versions = begin_cut(scheduler, 0.2)
    effects = scheduler.handle(stranger(Role.SERVER, 9), hello(1, 2, 3), 0.3)
    assert any(isinstance(one, Send) and isinstance(one.message, Welcome) for one in effects)
    told = {one.to: one.message for one in effects if isinstance(one, Send) and isinstance(one.message, Roster)}
    new = scheduler.membership.servers[servers[1].node]
    assert told[new].hold == told[servers[0]].hold > 0
    for one, version in ((servers[0], 5), (servers[2], 5), (new, 0)):
        effects = scheduler.handle(one, seen(scheduler, version=version), 0.4)
    assert versions == [6]
    assert {one.to for one in effects if isinstance(one, Send) and isinstance(one.message, Roster)} == {
        servers[0],
        servers[2],
        new,
    }


def test_servers_come_and_go_while_workers_call_for_a_load_and_not_while_servers_read() -> None:
    scheduler, servers = with_copies()
    with mock.patch.object(type(scheduler.keys), "saved", lambda keys, store: ("w",)):
        workers = [*scheduler.membership.awaited.values()]
        load = Load(1, 0, "/run/step-1", ("weights",), "")
        assert scheduler.handle(workers[0], load, 0.2) == [], "it waits for the other one"
        scheduler.observe(ChildEnded(servers[1].node, "killed", False), 0.3)
        assert not scheduler._stopped, "another one has its slices"
        effects = scheduler.handle(stranger(Role.SERVER, 9), hello(1, 2, 3), 0.4)
        assert any(isinstance(one, Send) and isinstance(one.message, Welcome) for one in effects), "it is let in"
        assert scheduler.handle(workers[1], load, 0.5) == [], "copies are not whole"
        for one in scheduler.membership.servers.values():
            effects = scheduler.handle(one, seen(scheduler), 0.6)
        assert any(isinstance(one, Persist) and isinstance(one.work, ReadManifest) for one in effects)
        scheduler.observe(ChildEnded(servers[2].node, "killed", False), 0.7)
        assert scheduler._stopped, "half of the store would be of the checkpoint"


def with_a_snapshot() -> Scheduler:
    """The scheduler of two workers and two servers that have written a snapshot."""
    config = ClusterConfig(Role.SCHEDULER, "host-s", 1, 2, 2, on_loss="continue", snapshots="/snapshots")
    scheduler = Scheduler(config, 0.0)
    for role in (Role.SERVER, Role.WORKER):
        for rank in range(2):
            scheduler.handle(stranger(role, (100 if role is Role.SERVER else 200) + rank), hello(rank, 2, 2), 0.0)
    assert scheduler.rollback is not None
    snapshot = Snapshot(0, -6, {}, Agreement("snapshot", "", 0.0, {}, ()), lambda message: None, lambda message: [])
    snapshot.order = Save(0, 0, "/snapshots/step-5", EVERYTHING, -6, "r", 5, 2, 0, SavedFile("", 0, ""), "")
    scheduler.rollback.written = [snapshot]
    return scheduler


def test_a_worker_that_is_lost_while_all_go_back_is_not_accounted_for() -> None:
    scheduler = with_a_snapshot()
    lost = scheduler.membership.awaited[worker(1)]
    scheduler.observe(ChildEnded(NodeId(Role.SERVER, 1), "killed", False), 0.2)
    scheduler.observe(ChildEnded(worker(1), "killed", False), 0.3)
    assert lost in scheduler.membership.unaccounted and lost in scheduler.losses._undone


def test_what_late_workers_have_asked_at_a_barrier_is_dropped_when_all_go_back() -> None:
    """A server that replaces a lost server knows no workers yet when it hears what the others are asked."""
    scheduler = with_a_snapshot()
    scheduler._questions.ask(Join(0, 0, (1,)), None)
    assert [type(one) for one in scheduler._questions.unanswered] == [Join]
    scheduler.observe(ChildEnded(NodeId(Role.SERVER, 1), "killed", False), 0.2)
    assert scheduler._questions.unanswered == []


def test_workers_hear_of_every_loss_whatever_servers_have_answered_meanwhile() -> None:
    config = ClusterConfig(Role.SCHEDULER, "host-s", 1, 8, 2, on_loss="continue")
    scheduler = Scheduler(config, 0.0)
    for role, count in ((Role.SERVER, 2), (Role.WORKER, 8)):
        for rank in range(count):
            scheduler.handle(stranger(role, (100 if role is Role.SERVER else 200) + rank), hello(rank, 8, 2), 0.0)
    servers = [scheduler.membership.servers[NodeId(Role.SERVER, rank)] for rank in range(2)]
    first, second = (scheduler.membership.awaited[worker(rank)] for rank in (1, 2))
    fates = (Fate(1, first.incarnation, 0, 5, 5, 1, 1, examples=40),)
    effects = scheduler.observe(ChildEnded(first.node, "killed", False), 1.0)
    effects += scheduler.observe(ChildEnded(second.node, "killed", False), 1.001)
    for answers in (fates, ()):
        for one in servers:
            effects += scheduler.handle(one, seen(scheduler, answers), 1.002)
    effects += scheduler.tick(scheduler.deadline)
    survivor = scheduler.membership.awaited[worker(0)]
    sent = [one.message for one in effects if isinstance(one, Send) and one.to == survivor]
    assert {first, second} <= {member for one in sent if isinstance(one, Roster) for member in one.lost}


def test_a_server_that_replaces_a_lost_server_is_asked_what_the_others_are_asked() -> None:
    """A command that is under way when all go back waits for the answer of every server, of the new server too."""
    scheduler = with_a_snapshot()
    command = Command(7, 0, b"stop training")
    scheduler.handle(scheduler.membership.awaited[worker(0)], command, 0.1)
    scheduler.observe(ChildEnded(NodeId(Role.SERVER, 1), "killed", False), 0.2)
    effects = scheduler.handle(stranger(Role.SERVER, 9), hello(1, 2, 2), 0.3)
    new = scheduler.membership.servers[NodeId(Role.SERVER, 1)]
    asked = [
        (one.to, one.message.body) for one in effects if isinstance(one, Send) and isinstance(one.message, Perform)
    ]
    assert asked == [(new, command.body)]


def test_pushes_that_a_rollback_undoes_are_not_accounted_for() -> None:
    scheduler, servers = with_copies()
    noted = scheduler.losses.leases = NotedAccounts()
    lost = scheduler.membership.awaited[worker(1)]
    fates = (Fate(1, lost.incarnation, 0, 50, 50, 1, 1, examples=400),)
    scheduler.observe(ChildEnded(worker(1), "killed", False), 0.2)
    scheduler.tick(0.3)
    scheduler.handle(servers[0], seen(scheduler, fates), 0.4)
    scheduler.losses.roll_back()
    effects = [one for server in servers[1:] for one in scheduler.handle(server, seen(scheduler, fates), 0.5)]
    assert not noted.most and not scheduler.membership.fates and not scheduler.membership.unaccounted
    assert not [one.text for one in effects if isinstance(one, Log)]


def test_what_a_lost_server_had_counted_of_a_lost_worker_is_awaited_of_its_heir() -> None:
    scheduler, servers = with_copies()
    noted = scheduler.losses.leases = NotedAccounts()
    lost = scheduler.membership.awaited[worker(1)]
    scheduler.observe(ChildEnded(worker(1), "killed", False), 0.2)
    scheduler.tick(0.3)

    def counted(most: int) -> tuple[Fate, ...]:
        return (Fate(1, lost.incarnation, 0, most, most, 1, 1),)

    for one in (servers[0], servers[2]):
        scheduler.handle(one, seen(scheduler, counted(3)), 0.4)
    scheduler.observe(ChildEnded(servers[1].node, "killed", False), 0.5)
    assert not noted.most, "the heir has not said what the copy counts"
    for one, most in ((servers[0], 3), (servers[2], 4)):
        scheduler.handle(one, seen(scheduler, counted(most)), 0.6)
    assert noted.most == [4]


@each("said", ["worker-0 cannot take part", "[Errno 28] No space left on device"])
def test_a_checkpoint_that_a_lost_server_has_spoilt_says_so_and_what_another_server_had_said_before(said: str) -> None:
    scheduler, servers = with_copies()
    scheduler.observe(ChildEnded(servers[0].node, "killed", False), 0.2)
    for one in servers[1:]:
        scheduler.handle(one, Saved(0, 0, SavedFile("", 0, ""), said), 0.3)
    save = Save(1, 0, "/run/step-1", ("weights",), 0, "", 1, 0, 1, SavedFile("", 0, ""), "")
    workers = scheduler.membership.awaited.values()
    told = [one.message for member in workers for one in scheduler.handle(member, save, 0.4) if isinstance(one, Send)]
    reasons = {one.reason for one in told if isinstance(one, Failed)}
    assert reasons == {f"server-1: {said}; server-0 was lost before it had saved its slices: save again"}


@each("is_there", [False, True])
def test_a_checkpoint_that_would_be_refused_is_complete_if_an_earlier_scheduler_has_written_its_manifest(
    is_there: bool,
) -> None:
    scheduler, servers = with_copies()
    scheduler.observe(ChildEnded(servers[0].node, "killed", False), 0.2)
    made = SavedFile("server-1-0a.safetensors", 8, "0" * 64)
    for one in servers[1:]:
        scheduler.handle(one, Saved(0, 0, made if one is servers[1] else SavedFile("", 0, ""), ""), 0.3)
    save = Save(1, 0, "/run/step-1", ("weights",), 0, "0123456789abcdef", 1, 0, 1, SavedFile("", 0, ""), "")
    workers = [*scheduler.membership.awaited.values()]
    *_, swept = [one for member in workers for one in scheduler.handle(member, save, 0.4)]
    assert isinstance(swept, Persist) and isinstance(swept.work, Sweep)
    record = FileRecord(made.name if is_there else "server-1-09.safetensors", made.nbytes, made.sha256)
    found = Manifest(1, ("weights",), "sync", True, None, 2, 2, (), (record,))
    answers = scheduler.observe(Persisted(swept.token, found), 0.5)
    assert [type(one.message) for one in answers if isinstance(one, Send)] == [Done if is_there else Failed] * 2


def test_who_is_given_up_before_it_has_heard_its_welcome_is_told_to_start_again() -> None:
    scheduler, _ = with_copies()
    scheduler.observe(ChildEnded(worker(1), "killed", False), 0.2)
    scheduler.handle(stranger(Role.WORKER, 9), hello(1, 2, 3), 0.3)
    scheduler.observe(Unreachable(scheduler.membership.newcomers[worker(1)], "nothing gets through"), 0.4)
    (answer,) = scheduler.handle(stranger(Role.WORKER, 9), hello(1, 2, 3), 0.5)
    assert isinstance(answer, Send) and isinstance(answer.message, Abort)
    assert answer.message.code == ErrorCode.PEER_LOST and answer.message.sentence.endswith("start it again")


def test_who_still_waits_for_a_rank_when_the_job_ends_hears_how_it_has_ended() -> None:
    for ends_well in (True, False):
        scheduler, servers = with_copies()
        workers = dict(scheduler.membership.awaited)
        late = [stranger(Role.WORKER, 9), stranger(Role.SERVER, 10)]
        for one in late:
            (answer,) = scheduler.handle(one, hello(1, 2, 3), 0.2)
            assert isinstance(answer, Send) and isinstance(answer.message, Waiting), "it may be alive that has the rank"
        if ends_well:
            effects = [one for member in workers.values() for one in scheduler.handle(member, Goodbye(1, ""), 0.3)]
        else:
            effects = scheduler.end_job(servers[0], "for a test", "the job ends for a test")
        said = {one.to: one.message for one in effects if isinstance(one, Send) and one.to in late}
        assert set(said) == set(late)
        for message in said.values():
            if ends_well:
                assert isinstance(message, Rejected) and message.is_over
            else:
                assert isinstance(message, Abort) and message.sentence == "the job ends for a test"


def test_a_server_that_comes_too_late_ends_well() -> None:
    about = Introduction(Role.SERVER, 7, 1, "host", 1, "tcp://host:12", 1, 2, __version__, "tcp://host:1")
    (effect,) = Server(about, Limits(), REFERENCE, 0.0).handle(SCHEDULER_MEMBER, Rejected("it is over", True), 0.1)
    assert isinstance(effect, Halt) and isinstance(effect.error, JobOver)
