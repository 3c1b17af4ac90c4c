"""What workers wait for that no call of theirs says: a way back to a snapshot, and a place in training. Snapshots that
are not complete. Each is said, and ends by ``KVDIST_STALL_SHUTDOWN_S``."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdist.checkpoint.snapshot import LockFolder, ReadManifest, ReadShards, WriteManifest, WriteShard
from kvdist.config.settings import Limits
from kvdist.core.worker.requests import AcceptRollback, Leave, ReportProgress
from kvdist.errors import DeadlineExceeded, RolledBackError
from kvdist.protocol.messages import Due, DueWhen, Progress, SavedFile, SnapshotTaken
from tests.core.wired import OpenWork, Wired

STALL_S = 40.0


class WaitingThread:
    """A thread of a user, which waits in a call since then, beside those that may act."""

    def __init__(self, since: float, others: str = "") -> None:
        self.since, self.others = since, others

    def blocked_since(self) -> float | None:
        return self.since

    def may_act(self, now: float) -> str:
        return self.others

    def longest_wait_since(self) -> float | None:
        return self.since

    def room_wait(self) -> str:
        return ""


def train(wired: Wired, steps: int = 1) -> None:
    for _ in range(steps):
        requests = [wired.pushpull(rank, {"w": [1, 1], "b": [1]}) for rank in (0, 1)]
        wired.settle()
        assert all(request in wired.completed for request in requests)


def is_work_of(one: OpenWork, who: str, kind: type) -> bool:
    return one.who == who and isinstance(one.work, kind)


def work_but(wired: Wired, who: str, kind: type) -> OpenWork:
    """Do all that is to be done with the disk, but for one thing, which hangs; returns that."""
    wired.settle()
    while others := [one for one in wired.works if not is_work_of(one, who, kind)]:
        wired.works.remove(others[0])
        wired.finish(others[0])
        wired.settle()
    (hanging,) = wired.works
    return hanging


@pytest.fixture
def wired(tmp_path: Path) -> Wired:
    """Two workers and two servers, with something on each of these, after three steps and a snapshot."""
    limits = Limits(explain_after_s=10.0, stall_shutdown_s=STALL_S)
    wired = Wired(2, 2, limits, on_loss="continue", snapshots=str(tmp_path))
    wired.initialise({"w": [0, 0], "b": [0]})
    assert {info.slices[0].server for info in wired.infos.values()} == {0, 1}
    for rank in (0, 1):
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    wired.settle_works()
    begin_snapshot(wired)
    wired.settle_works()
    assert [one.version for one in wired.scheduler.rollback.written] == [1]
    train(wired, 2)
    return wired


def begin_snapshot(wired: Wired) -> None:
    """Let it be time for one, and make the step of which it is, and no other."""
    rollback = wired.scheduler.rollback
    rollback._next = wired.now
    for _ in range(2):  # the first look takes the folder's lock
        wired.advance(1.0)
        if rollback._making is None:
            wired.settle_works()
    train(wired)
    assert rollback._making is not None and not rollback._making.is_written


def lose_server(wired: Wired) -> list[int]:
    """Server 1 is lost, and both users hear so; returns their calls, which are held back."""
    lost = [wired.pull(rank, "w", "b") for rank in (0, 1)]
    wired.kill("server-1")
    wired.settle()
    assert all(isinstance(wired.failed[request], RolledBackError) for request in lost)
    for worker in wired.workers:
        worker.watch(WaitingThread(wired.now))
    return [wired.ask(rank, AcceptRollback) for rank in (0, 1)]


def test_a_server_that_reads_a_snapshot_for_long_is_named_by_all(wired: Wired) -> None:
    calls = lose_server(wired)
    wired.return_server(1)
    hanging = work_but(wired, "server-1", ReadShards)
    wired.advance(11.0)
    awaited = "waiting 12.0 s for server-1 to read the snapshot of step 1"
    assert wired.scheduler.waiting_since == wired.now - 12.0 and wired.scheduler.explain(wired.now) == awaited
    for rank, worker in enumerate(wired.workers):
        assert worker.waiting_since == wired.now - 12.0
        assert worker.explain(wired.now) == f"worker-{rank}: {awaited}, in going back to a snapshot"
    assert not [line for line in wired.log if "Blocked(" in line], "nobody waits for another worker"
    wired.works.remove(hanging)
    wired.finish(hanging)
    wired.settle_works()
    assert all(isinstance(wired.completed[call], RolledBackError) for call in calls)
    for machine in (wired.scheduler, *wired.workers):
        assert machine.waiting_since is None and machine.explain(wired.now) is None
    train(wired)


@pytest.mark.parametrize("who, kind, awaited", [
    ("server-0", ReadShards, "server-0 to read the snapshot of step 1"),
    ("scheduler", ReadManifest, "the scheduler to read the manifest of the snapshot of step 1"),
])  # fmt: skip
def test_who_has_to_read_is_named(wired: Wired, who: str, kind: type, awaited: str) -> None:
    lose_server(wired)
    wired.return_server(1)
    work_but(wired, who, kind)
    wired.advance(11.0)
    assert f"s for {awaited}" in (wired.scheduler.explain(wired.now) or "")
    assert f"s for {awaited}, in going back" in (wired.workers[1].explain(wired.now) or "")


def test_a_server_that_is_not_back_is_named(wired: Wired) -> None:
    lose_server(wired)
    wired.advance(11.0)
    for machine in (wired.scheduler, *wired.workers):
        assert "waiting 11.0 s for server-1 to come back, and read the snapshot of step 1" in machine.explain(wired.now)


def test_a_worker_that_is_not_quiet_is_named(wired: Wired) -> None:
    wired.stopped["worker-1"] = None  # it stands still, and its heartbeats go on
    wired.kill("server-1")
    wired.settle()
    wired.ask(0, AcceptRollback)
    wired.return_server(1)
    wired.settle_works()
    wired.advance(11.0)
    for machine in (wired.scheduler, wired.workers[0]):
        assert "s for worker-1" in machine.explain(wired.now)
        assert "to drop what they have asked for: all go back to the snapshot of step 1" in machine.explain(wired.now)


def test_before_the_scheduler_says_more_a_worker_says_that_all_go_back(wired: Wired) -> None:
    lose_server(wired)
    wired.advance(1.0)
    text = "worker-0: waiting 1.0 s for the others to go back to the snapshot of step 1, in going back to a snapshot"
    assert wired.workers[0].explain(wired.now) == text


def test_a_way_back_without_an_end_ends_after_the_time_for_waits(wired: Wired) -> None:
    calls = lose_server(wired)
    wired.return_server(1)
    work_but(wired, "server-1", ReadShards)
    wired.advance(STALL_S - 2.0)
    assert not wired.stopped and not set(calls) & wired.failed.keys()
    wired.advance(5.0)
    for call in calls:
        assert isinstance(wired.failed[call], DeadlineExceeded)
        assert "for server-1 to read the snapshot of step 1" in str(wired.failed[call])
        assert "the job ends after 40 s of this (KVDIST_STALL_SHUTDOWN_S)" in str(wired.failed[call])


@pytest.mark.parametrize("is_over", [True, False])
def test_all_have_gone_back_before_a_barrier_that_was_late(wired: Wired, is_over: bool) -> None:
    late = wired.barrier(0, timeout_s=1.0)
    wired.advance(1.5)
    passed = [wired.barrier(1)] if is_over else []
    wired.settle()
    assert late in wired.failed and set(passed) <= wired.completed.keys()
    lose_server(wired)
    wired.return_server(1)
    wired.settle_works()
    barriers = [wired.barrier(0)]
    wired.settle()
    assert not set(barriers) & wired.completed.keys()
    barriers.append(wired.barrier(1))
    wired.settle()
    assert set(barriers) <= wired.completed.keys()


def test_a_server_that_is_lost_on_the_way_back_leaves_calls_held_back_once(wired: Wired) -> None:
    calls = lose_server(wired)
    wired.return_server(1)
    work_but(wired, "server-1", ReadShards)
    wired.works.clear()
    wired.kill("server-1")
    wired.return_server(1)
    wired.settle_works()
    assert all(isinstance(wired.completed[call], RolledBackError) for call in calls)
    assert all(worker.waiting_since is None for worker in wired.workers)


def test_a_push_between_the_news_of_a_loss_and_the_order_to_go_back_is_dropped(wired: Wired) -> None:
    (worker, _), lost = wired.workers, wired.servers[1].me
    wired.kill("server-1")
    while lost in {peer.member for peer in worker.peers.everyone}:
        wired.deliver()
    early = [wired.pushpull(0, {"w": [1, 1], "b": [1]}) for _ in range(2)]
    assert worker.rolled_back is None, "the order has not arrived"
    wired.settle()
    assert all(isinstance(wired.failed[call], RolledBackError) for call in early)
    calls = [wired.ask(rank, AcceptRollback) for rank in (0, 1)]
    wired.return_server(1)
    wired.settle_works()
    assert all(isinstance(wired.completed[call], RolledBackError) for call in calls)
    train(wired, 2)
    assert all(worker.waiting_since is None for worker in wired.workers)


def test_the_number_of_updates_goes_back_with_the_weights(wired: Wired, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved" / "step-3")
    for rank in (0, 1):
        wired.save(rank, folder, "w", "b", step=3)
    wired.settle_works()
    train(wired)
    for rank in (0, 1):
        wired.load(rank, folder)
    wired.settle_works()
    begin_snapshot(wired)
    wired.settle_works()
    (newest,) = wired.scheduler.rollback.written
    lose_server(wired)
    wired.return_server(1)
    wired.settle_works()
    rounds = [holder.round for server in wired.servers for holder in server.shard]
    assert {(round_.version, round_.restored) for round_ in rounds} == {(newest.version, -1)}


def test_an_answer_from_before_the_order_to_go_back_is_not_of_the_same_step_after_it(wired: Wired) -> None:
    """Or a worker would push a version that the others have not been told of, and wait for them for ever."""
    piece, worker = wired.infos["w"].slices[0], wired.workers[0]

    def report() -> int:
        progress = Progress(piece.number, 0, 1, DueWhen.QUORUM, 2, False, False)
        return wired.ask(0, lambda number: ReportProgress(number, piece.server, progress))

    report()
    wired.settle()
    calls = lose_server(wired)
    assert not worker.handle(wired.servers[0].me, Due(piece.number, 6, False, 0), wired.now)
    wired.return_server(1)
    wired.settle_works()
    assert all(call in wired.completed for call in calls)
    again = report()
    wired.settle()
    assert again not in wired.completed, "the other worker has not reported"


def test_a_folder_of_snapshots_that_is_not_locked_is_named_once(tmp_path: Path) -> None:
    wired = Wired(1, 1, on_loss="continue", snapshots=str(tmp_path))
    wired.set_optimizer(0, "sgd", learning_rate=1.0)
    wired.initialise({"w": [0, 0]})
    wired.advance(60.0)
    assert [type(event.work) for event in wired.works] == [LockFolder]
    told = f"the scheduler has waited 2 s for the lock of the folder {tmp_path}; another job is taking it"
    assert [told in line for line in wired.reports if "no snapshot can be written" in line] == [True]
    wired.settle_works()
    assert wired.scheduler.rollback._claim.run


# Too few workers.


@pytest.fixture
def alone() -> Wired:
    """Two workers of at least two were lost, and one is back."""
    limits = Limits(explain_after_s=10.0, stall_shutdown_s=STALL_S)
    wired = Wired(2, 1, limits, on_loss="continue", min_workers=2, return_s=60.0)
    wired.initialise({"w": [0, 0], "b": [0]})
    train(wired)
    wired.kill("worker-0")
    wired.kill("worker-1")
    wired.settle()
    wired.come_back(1)
    wired.declare(1, {"w": (2,), "b": (1,)})
    wired.settle()
    wired.workers[1].watch(WaitingThread(wired.now))
    return wired


def test_a_newcomer_says_how_many_workers_it_waits_for(alone: Wired) -> None:
    push = alone.push(1, {"w": [1, 1]})
    behind = alone.pull(1, "w")
    alone.advance(12.0)
    worker = alone.workers[1]
    assert worker.waiting_since == alone.now - 12.0
    awaited = "waiting 12.0 s for 1 more worker to join: 1 of at least 2 are there (--min-workers)"
    assert worker.explain(alone.now) == f"worker-1: {awaited}, in push of key 'w'"
    assert not [line for line in alone.log if "Blocked(" in line]
    alone.come_back(0)
    alone.declare(0, {"w": (2,), "b": (1,)})
    alone.settle()
    alone.push(0, {"w": [1, 1]})
    alone.advance(1.0)
    assert push in alone.completed and behind in alone.completed
    assert worker.waiting_since is None and worker.explain(alone.now) is None


def test_a_member_that_is_left_says_how_many_workers_it_waits_for_and_not_that_a_server_is_silent() -> None:
    wired = Wired(2, 1, Limits(explain_after_s=10.0), on_loss="continue", min_workers=2, return_s=60.0)
    for rank in (0, 1):
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    wired.initialise({"w": [0, 0], "b": [0]})
    train(wired)
    wired.kill("worker-0")
    wired.settle()
    worker = wired.workers[1]
    worker.watch(WaitingThread(wired.now, others="Thread-1"))
    calls = [wired.pushpull(1, {"w": [1, 1], "b": [1]}) for _ in range(2)]  # one is counted without the other
    wired.advance(12.0)
    assert [call in wired.completed for call in calls] == [True, False]
    awaited = "1 more worker to join: 1 of at least 2 are there (--min-workers)"
    assert worker.explain(wired.now) == f"worker-1: waiting 12.0 s for {awaited}, in pushpull of key 'w', 'b'"


def with_newcomer() -> Wired:
    """Two workers and a server; worker 1 was lost after a step, and has declared its keys again."""
    wired = Wired(2, 1, on_loss="continue")
    wired.initialise({"w": [0, 0], "b": [0]})
    train(wired)
    wired.kill("worker-1")
    wired.come_back(1)
    wired.declare(1, {"w": (2,), "b": (1,)})
    wired.settle()
    return wired


def test_a_newcomer_may_push_what_is_not_pushed_at_each_step_first() -> None:
    wired = with_newcomer()
    late = wired.pushpull(1, {"w": [1, 2]})
    wired.settle()
    other = wired.pushpull(0, {"w": [3, 4]})
    wired.settle()
    assert wired.value(late, "w") == wired.value(other, "w") == [4, 6]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_first_barrier_of_a_newcomer_is_that_of_the_others_at_its_place(is_first: bool) -> None:
    """Not the one before it, which the others have yet to reach when the newcomer calls, or have reached."""
    wired = with_newcomer()
    wired.take_part(1)
    wired.settle()
    wired.push(1, {"w": [1, 1], "b": [1]})
    wired.settle()
    calls = [(1, "later"), (0, "earlier")][:: 1 if is_first else -1]
    barriers = {statement: wired.barrier(rank, statement=statement) for rank, statement in calls}
    wired.settle()
    assert barriers["earlier"] in wired.completed and barriers["later"] not in wired.completed
    wired.push(0, {"w": [1, 1], "b": [1]})
    wired.settle()
    other = wired.barrier(0, statement="later")
    wired.settle()
    assert wired.completed.keys() >= {other, barriers["later"]} and not wired.failed


def test_a_newcomer_may_be_late_at_its_first_barrier_before_others_have_reached_any() -> None:
    wired = with_newcomer()
    wired.take_part(1)
    wired.settle()
    wired.push(1, {"w": [1, 1], "b": [1]})
    late = wired.barrier(1, timeout_s=1.0)
    wired.advance(2.5)
    assert str(wired.failed[late]) == "the other workers did not reach the barrier within 2.0 s"
    again = wired.barrier(1)
    wired.push(0, {"w": [1, 1], "b": [1]})
    wired.settle()
    assert again not in wired.completed
    barriers = [again, wired.barrier(0)]
    wired.settle()
    assert set(barriers) <= wired.completed.keys()
    barriers = [wired.barrier(1)]
    wired.settle()
    assert not set(barriers) & wired.completed.keys()
    barriers.append(wired.barrier(0))
    wired.settle()
    assert set(barriers) <= wired.completed.keys()


@pytest.mark.parametrize("call", ["push", "place"])
def test_a_newcomer_that_waits_for_too_long_ends(alone: Wired, call: str) -> None:
    request = alone.push(1, {"w": [1, 1]}) if call == "push" else alone.take_part(1)
    alone.advance(STALL_S - 2.0)
    assert request not in alone.failed
    alone.advance(3.0)
    error = alone.failed[request]
    assert isinstance(error, DeadlineExceeded) and "1 of at least 2 are there" in str(error)


def test_a_newcomer_may_be_ended_while_it_waits(alone: Wired) -> None:
    request = alone.push(1, {"w": [1, 1]})
    alone.settle()
    leave = alone.ask(1, lambda number: Leave(number, "killed by the user"))
    alone.settle()
    assert request in alone.failed and leave in alone.completed


def test_a_newcomer_says_which_server_lets_it_wait() -> None:
    wired = with_newcomer()
    wired.stopped["server-0"] = None  # it stands still
    wired.take_part(1)
    wired.advance(11.0)
    text = "worker-1: waiting 11.0 s for server-0 (host-0) to let it take part, in taking part in a running job"
    assert wired.workers[1].explain(wired.now) == text


# Snapshots that are not complete.


def late(wired: Wired) -> list[str]:
    return [text for text in wired.reports if "is not complete" in text]


@pytest.mark.parametrize("who, kind, silent", [
    ("server-1", WriteShard, "not written yet by server-1 (a disk hangs, or a key is not pushed any more)"),
    ("scheduler", WriteManifest, "the scheduler has not written its manifest"),
])  # fmt: skip
def test_a_snapshot_that_is_not_written_is_reported_once(wired: Wired, who: str, kind: type, silent: str) -> None:
    begin_snapshot(wired)
    version = wired.scheduler.rollback._making.version
    hanging = work_but(wired, who, kind)
    since = wired.scheduler.rollback._making.agreement.since
    wired.advance(since + 180.0 - wired.now - 1.0)
    assert not late(wired), "three intervals of a minute are left to it"
    wired.advance(400.0)
    told = f"the snapshot of step {version} is not complete after 180 s: {silent}; the last complete one is of step 1"
    assert late(wired) == [told]
    wired.works.remove(hanging)
    wired.finish(hanging)
    wired.settle_works()
    assert f"snapshots are written again: that of step {version} is there" in wired.reports


def test_only_servers_report_parts_of_a_snapshot_and_a_load_drops_it(wired: Wired) -> None:
    begin_snapshot(wired)
    scheduler, making = wired.scheduler, wired.scheduler.rollback._making
    report = SnapshotTaken(making.folder, SavedFile("", 0, ""), "the disk is full", ())
    assert not scheduler.handle(wired.workers[0].me, report, wired.now)
    assert not making.failure and making in scheduler.checkpoints._saving.values()
    scheduler.rollback.forget()
    assert making not in scheduler.checkpoints._saving.values() and scheduler.rollback._making is None
    assert not scheduler.handle(wired.servers[0].me, report, wired.now)


def test_a_key_that_is_pushed_no_more_makes_a_snapshot_late(wired: Wired) -> None:
    rollback = wired.scheduler.rollback
    rollback._next = wired.now
    wired.advance(2.0)
    assert rollback._making is not None
    for rank in (0, 1):
        wired.push(rank, {"w": [1, 1]})
    wired.settle_works()
    wired.advance(200.0)
    behind = wired.infos["b"].slices[0].server
    assert len(late(wired)) == 1 and f"not written yet by server-{behind} (" in late(wired)[0]


def test_a_key_that_a_newcomer_does_not_declare_is_waited_for_by_its_name() -> None:
    wired = Wired(3, 1, Limits(explain_after_s=10.0), on_loss="continue")
    wired.initialise({"w": [0, 0], "b": [0]})
    for rank in range(3):
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    wired.settle()
    wired.kill("worker-2")
    wired.advance(1.0)
    train(wired)
    wired.come_back(2)
    wired.declare(2, {"w": (2,)})  # "b" may still come: a script declares a key where it uses it
    wired.settle()
    wired.push(2, {"w": [1, 1]})
    wired.advance(1.0)
    for _ in range(2):
        requests = [wired.pushpull(rank, {"w": [1, 1], "b": [1]}) for rank in (0, 1)]
        wired.push(2, {"w": [1, 1]})
        wired.advance(20.0)
    said = [line for line in wired.log if "Waiting(deed=\"push key 'b'" in line]
    assert said and all("ranks=(2,)" in line for line in said), wired.log
    assert not wired.completed.keys() & set(requests) and not wired.failed


def test_a_worker_that_waits_for_pushes_of_two_trainers_hears_of_each_whom_it_waits_for() -> None:
    wired = Wired(3, 1)
    wired.initialise({"w": [0.0], "b": [0.0]})
    wired.workers[0].watch(WaitingThread(wired.now))

    def exchange(rank: int, key: str) -> None:
        piece = wired.infos[key].slices[0]
        progress = Progress(piece.number, 0, 0, DueWhen.QUOTA, 100, False, True)
        wired.ask(rank, lambda number: ReportProgress(number, piece.server, progress))

    for rank, key in ((0, "w"), (0, "b"), (1, "w"), (2, "b")):
        exchange(rank, key)
    wired.settle()
    assert [pending.awaits for pending in wired.workers[0]._pending] == [None, None]
    wired.advance(5.0)
    assert [pending.awaits for pending in wired.workers[0]._pending] == [(2,), (1,)]
    text = str(wired.workers[0].explain(wired.now))
    assert "for worker-2 (host-2) to make an exchange of all workers (step 1), in exchange()" in text
