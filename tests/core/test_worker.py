"""What a user's calls become, and how they end."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import ACK_BYTES_MAX, CompleteRequest, PeerConnected, PeerDisconnected, Send
from kvdist.core.sharding import slices_of
from kvdist.core.worker.requests import DeclareKeys, Register, ReportTimes, Run, RunKind, Transfer, make_plan
from kvdist.core.worker.transfers import FAR_BYTES_MAX
from kvdist.dtypes import DType
from kvdist.errors import DeadlineExceeded, PeerLostError, PushRefused, StoreClosed
from kvdist.nodes import Role, server
from kvdist.protocol.messages import MarkPushes, Placed, Placement, Rewind, Roster, StepTimes
from tests.cases import each
from tests.core.wired import Wired


@pytest.fixture
def wired() -> Wired:
    made = Wired(2, 1)
    made.initialise({"w": [1, 2, 3], "b": [5]})
    made.log.clear()
    return made


def said_by(wired: Wired, name: str, kind: str) -> int:
    return sum(f" {name} -> " in line and f": {kind}(" in line for line in wired.log)


def test_joining_completes_with_the_rank_when_everybody_is_there() -> None:
    wired = Wired(2, 1, form=False)
    first = wired.ask(1, Register)
    wired.advance(0.0)
    assert wired.completed[first] == 1
    later = wired.ask(1, Register)
    assert wired.completed[later] == 1


def test_hello_is_repeated_until_it_is_answered() -> None:
    wired = Wired(1, 1, form=False)
    wired.tick()
    wired.lose()
    wired.now = 0.5
    wired.tick()
    wired.settle()
    assert wired.scheduler.membership.is_complete
    assert said_by(wired, "worker-?", "Hello") == 2


def test_a_scheduler_that_does_not_answer_is_an_error_with_what_to_check() -> None:
    wired = Wired(1, 1, limits=Limits(connect_timeout_s=3.0), form=False)
    request = wired.ask(0, Register)
    wired.stopped["scheduler"] = None
    wired.advance(3.0)
    error = wired.failed[request]
    assert isinstance(error, DeadlineExceeded)
    assert "the scheduler at tcp://host-s:1 did not answer within 3 s: is it running" in str(error)


def test_a_worker_says_that_it_waits_for_the_scheduler_and_then_for_the_cluster() -> None:
    wired = Wired(2, 1, form=False)
    wired.stopped["worker-1"] = None
    assert wired.workers[0].explain(2.0) == "waiting for the scheduler at tcp://host-s:1 to answer, since 2.0 s"
    wired.advance(1.0)
    assert wired.workers[0].explain(3.0) == (
        "worker-0 has waited 3.0 s for the cluster of 2 worker(s) and 1 server(s) to be complete"
    )


def test_a_second_push_of_a_key_stays_until_the_first_is_counted(wired: Wired) -> None:
    first = [wired.push(0, {"w": [step, step, step]}) for step in (1, 2)]
    wired.settle()
    assert said_by(wired, "worker-0", "Push") == 1
    wired.push(1, {"w": [10, 10, 10]})
    wired.settle()
    assert said_by(wired, "worker-0", "Push") == 2
    assert first[0] in wired.completed and first[1] not in wired.completed


def test_a_transfer_of_nothing_is_finished_at_once(wired: Wired) -> None:
    wired.submit(0, [Transfer(900, RunKind.PULL, "pull of nothing", [], 0)])
    assert 900 in wired.completed
    assert wired.workers[0].waiting_since is None


def test_memory_of_a_transfer_is_free_when_it_is_done_and_not_when_python_looks_for_cycles() -> None:
    wired = Wired(1, 1)
    wired.initialise({"w": [1, 2, 3]})
    (plan,) = make_plan([wired.infos["w"]], 1024).runs
    sink = np.empty(3, np.float32)
    seen = weakref.ref(sink)
    run = Run(plan, sinks=[sink])
    del sink
    gc.disable()
    try:
        wired.submit(0, [Transfer(900, RunKind.PULL, "pull", [run])])
        wired.settle()
        assert 900 in wired.completed and seen() is not None
        del run
        assert seen() is None
    finally:
        gc.enable()


def test_pulls_that_were_asked_for_together_leave_in_one_message(wired: Wired) -> None:
    (plan,) = make_plan([wired.infos["w"]], 1024).runs
    runs = {number: Run(plan, sinks=[np.empty(3, np.float32)]) for number in (900, 901)}
    wired.submit(0, [Transfer(number, RunKind.PULL, "pull", [run]) for number, run in runs.items()])
    wired.settle()
    assert {900, 901} <= wired.completed.keys()
    assert said_by(wired, "worker-0", "Pull") == said_by(wired, "server-0", "Values") == 1


@each("host, messages", [("127.0.0.1", 1), ("10.0.0.1", 3)])
def test_slices_that_are_large_for_a_line_leave_together_only_on_the_loopback(host: str, messages: int) -> None:
    wired = Wired(1, 1, server_host=host)
    large = {key: [float(key)] * (FAR_BYTES_MAX // 8 + key) for key in (1, 2, 3)}
    wired.initialise(large)
    wired.log.clear()
    pushed = wired.pushpull(0, large)
    wired.settle()
    assert said_by(wired, "worker-0", "Push") == said_by(wired, "server-0", "Values") == messages
    assert all(wired.value(pushed, key) == value for key, value in large.items())


@each("mode, overtakes", [("sync", False), ("p3", True)])
def test_with_priority_slices_what_is_urgent_overtakes_what_was_pushed_before(mode: str, overtakes: bool) -> None:
    # The large key is seven slices of at most 64 KiB, and two of them may be on their way.
    limits = Limits(slice_bytes=1 << 16, priority_slice_bytes=1 << 16, priority_window_bytes=1 << 17)
    wired = Wired(1, 1, server_host="10.0.0.1", limits=limits)
    large = [1.0] * (100_000 + 3)
    wired.initialise({"large": large, "urgent": [1.0]}, mode=mode)
    later = wired.pushpull(0, {"large": large})
    first = wired.pushpull(0, {"urgent": [2.0]}, priority=1)
    wired.settle()
    assert (wired.value(later, "large"), wired.value(first, "urgent")) == (large, [2.0])
    assert (list(wired.completed).index(first) < list(wired.completed).index(later)) is overtakes
    assert wired.servers[0].ack_bytes_max == (1 << 15 if mode == "p3" else ACK_BYTES_MAX)


def test_a_pull_sees_the_workers_own_pushes(wired: Wired) -> None:
    wired.push(0, {"w": [1, 1, 1]})
    read = wired.pull(0, "w")
    wired.settle()
    assert read not in wired.completed
    wired.push(1, {"w": [2, 2, 2]})
    wired.settle()
    assert wired.value(read, "w") == [3, 3, 3]


def test_a_pull_of_several_keys_waits_for_the_last() -> None:
    wired = Wired(2, 2, bigarray_bound=4)
    wired.initialise({"cut": [1, 2, 3, 4, 5], "b": [5]})
    wired.push(0, {"b": [1]})
    read = wired.pull(0, "cut", "b")
    wired.settle()
    assert read not in wired.completed
    wired.push(1, {"b": [1]})
    wired.settle()
    assert (wired.value(read, "cut"), wired.value(read, "b")) == ([1, 2, 3, 4, 5], [2])


def test_a_pull_that_is_answered_key_by_key_does_not_wait_for_the_last() -> None:
    wired = Wired(2, 2)
    wired.initialise({"w": [1, 2, 3], "b": [5], "c": [6, 7]})
    for rank in (0, 1):
        wired.push(rank, {"w": [0, 0, 0], "b": [0], "c": [0, 0]})  # from now on they may be a group
    wired.settle()
    wired.push(0, {"b": [1]})
    read = wired.pull(0, "w", "b", "c", key_by_key=True)
    wired.settle()
    assert wired.answered[read] == {0: None, 2: None}
    assert read not in wired.completed
    assert wired.results[read]["c"].tolist() == [0, 0]
    wired.push(1, {"b": [1]})
    wired.settle()
    assert wired.answered[read] == dict.fromkeys(range(3))
    assert wired.value(read, "b") == [2]


def test_a_key_that_is_refused_fails_alone_where_each_is_answered_by_itself(wired: Wired) -> None:
    wired.servers[0].shard.blocks._counts[wired.infos["b"].slices[0].number] = -1
    alone, together = wired.pull(0, "w", "b", key_by_key=True), wired.pull(0, "w", "b")
    wired.settle()
    assert wired.answered[alone][0] is None
    assert isinstance(wired.answered[alone][1], PushRefused)
    assert alone in wired.completed and alone not in wired.failed
    assert isinstance(wired.failed[together], PushRefused)


def test_lists_of_keys_in_another_order_on_each_worker_do_not_wait_for_each_other(wired: Wired) -> None:
    reads = []
    for step in range(3):
        reads.append(wired.pushpull(0, {"w": [step, 0, 0], "b": [1]}))
        reads.append(wired.pushpull(1, {"b": [2], "w": [0, step, 0]}))
    wired.settle()
    assert wired.value(reads[-1], "w") == [2, 2, 0] and wired.value(reads[-2], "b") == [3]


def test_lists_that_overlap_in_another_way_on_each_worker_do_not_wait_for_each_other() -> None:
    wired = Wired(2, 1)
    wired.initialise({"x": [0], "y": [0]})
    requests = [wired.push(0, {key: [1] for key in keys}) for keys in ("x", "xy", "y")]
    requests += [wired.push(1, {key: [1] for key in keys}) for keys in ("y", "yx", "x")]
    wired.advance(1.0)
    assert set(requests) <= wired.completed.keys()


def test_a_lost_server_is_judged_by_the_scheduler(wired: Wired) -> None:
    request = wired.pushpull(0, {"w": [1, 1, 1]})
    wired.settle()
    reason = "connection reset"
    for name in ("scheduler", "worker-0", "worker-1"):
        wired.observe(name, PeerDisconnected(wired.member("server-0"), reason))
    wired.stopped["server-0"] = None
    wired.advance(0.5)
    assert str(wired.failed[request]) == "server-0 (host host-0, pid 100) was lost: connection reset"


def test_a_worker_that_alone_loses_a_server_tells_the_scheduler_and_ends(wired: Wired) -> None:
    wired.observe("worker-0", PeerDisconnected(wired.member("server-0"), "no route"))
    wired.advance(2.3)
    assert "worker-0" not in wired.stopped
    wired.advance(0.2)
    error = wired.stopped["worker-0"]
    assert isinstance(error, PeerLostError) and error.node == "server-0"
    assert "though the scheduler still sees it" in str(error)
    other = wired.stopped["worker-1"]
    assert isinstance(other, PeerLostError) and "lost its connection to server-0 (no route)" in str(other)


def test_a_lost_scheduler_ends_a_worker_after_a_grace_and_later_calls_fail_alike(wired: Wired) -> None:
    request = wired.barrier(0)
    wired.stopped["scheduler"] = None
    wired.observe("worker-0", PeerDisconnected(SCHEDULER_MEMBER, "reset"))
    wired.advance(0.5)
    assert isinstance(wired.failed[request], PeerLostError)
    later = wired.push(0, {"w": [1, 1, 1]})
    assert wired.failed[later] is wired.failed[request]


def test_a_mended_connection_is_no_loss(wired: Wired) -> None:
    wired.observe("worker-0", PeerDisconnected(wired.member("server-0"), "reset"))
    wired.advance(0.2)
    wired.observe("worker-0", PeerConnected(wired.member("server-0")))
    wired.advance(5.0)
    assert wired.stopped == {}


def test_leaving_waits_until_what_was_pushed_has_arrived(wired: Wired) -> None:
    wired.push(0, {"w": [1, 1, 1]})
    left = wired.leave(0)
    assert said_by(wired, "worker-0", "Goodbye") == 0
    wired.advance(0.1)
    assert left in wired.completed and wired.stopped["worker-0"] is None


def test_leaving_waits_for_pushes_that_stand_in_line(wired: Wired) -> None:
    for _ in range(2):
        wired.push(0, {"w": [1, 1, 1]})
    left = wired.leave(0)
    wired.advance(1.0)
    assert left not in wired.completed
    wired.push(1, {"w": [1, 1, 1]})
    wired.advance(1.0)
    assert left in wired.completed


def test_calls_after_leaving_fail(wired: Wired) -> None:
    wired.leave(0)
    later = wired.pull(0, "w")
    assert isinstance(wired.failed[later], StoreClosed)


def test_a_scheduler_that_dies_during_the_goodbye_keeps_nobody(wired: Wired) -> None:
    left = wired.leave(0)
    wired.lose()
    wired.stopped["scheduler"] = None
    wired.observe("worker-0", PeerDisconnected(SCHEDULER_MEMBER, "reset"))
    wired.advance(0.5)
    assert left in wired.completed and wired.stopped["worker-0"] is None


def test_a_worker_speaks_up_at_once_so_that_the_scheduler_knows_its_new_connection(wired: Wired) -> None:
    wired.observe("worker-0", PeerDisconnected(SCHEDULER_MEMBER, "reset"))
    wired.tick()
    assert said_by(wired, "worker-0", "Alive") == 1


def test_a_hello_lost_with_its_connection_is_said_again_at_once() -> None:
    wired = Wired(1, 1, form=False)
    wired.tick()
    wired.lose()
    wired.observe("worker-0", PeerDisconnected(SCHEDULER_MEMBER, "reset"))
    wired.tick()
    assert said_by(wired, "worker-?", "Hello") == 2


def test_a_heartbeat_tells_the_step(wired: Wired) -> None:
    for rank in (0, 1):
        wired.push(rank, {"w": [1, 1, 1]})
    wired.advance(1.1)
    assert wired.scheduler.steps[wired.member("worker-0")] == 1


def test_a_wait_is_explained_by_what_and_whom(wired: Wired) -> None:
    wired.pushpull(0, {"w": [1, 1, 1]})
    assert wired.workers[0].explain(wired.now + 3) == (
        "worker-0: waiting 3.0 s for server-0 (host-0) to answer pushpull of key 'w'"
    )
    wired.barrier(1)
    assert wired.workers[1].explain(wired.now + 3) == "worker-1: waiting 3.0 s for the scheduler to answer barrier"


def test_who_has_marked_at_a_lost_server_tells_the_heir_that_it_cannot_take_part() -> None:
    """Else the marks of those that call later would wait there for its own, as long as it stays."""
    wired = Wired(1, 2, on_loss="continue")
    wired.initialise({"w": [1, 2, 3], "b": [5]})
    machine, roster = wired.workers[0], wired.scheduler.membership.roster
    machine.peers.num_replicas = 1  # as it hears when it is welcomed where servers have copies
    first, other = (peer for peer in roster.peers if peer.member.node.role is Role.SERVER)
    again = replace(other, member=replace(other.member, incarnation=99), life=1)
    worker = next(peer for peer in roster.peers if peer.member == machine.me)
    for epoch, servers, owner in ((2, (first,), 0), (3, (first, again), 0)):
        machine.handle(SCHEDULER_MEMBER, Roster((*servers, worker), epoch, owners=(owner, owner)), 0.0)
    wired.save(0, "/checkpoints/step-1", "w", "b", step=1)
    effects = machine.handle(SCHEDULER_MEMBER, Roster((again, worker), 4, owners=(1, 1)), 0.0)
    sent = [one for one in effects if isinstance(one, Send) and isinstance(one.message, MarkPushes)]
    marks = [(one.to, one.message) for one in sent]
    assert [(to, one.counter, one.contents, one.last) for to, one in marks] == [(again.member, 0, (), True)]


def test_keys_are_cut_for_all_servers_while_a_server_is_lost() -> None:
    """A key that was agreed before the loss may be placed while all wait for another server of that rank."""
    wired = Wired(1, 3, on_loss="continue")
    wired.initialise({"b": [5]})
    machine, roster = wired.workers[0], wired.scheduler.membership.roster
    machine.aggregation = None  # as where servers write snapshots
    shape = (3000, 1000)
    machine.submit([DeclareKeys(77, 0, "sync", ("w",), (shape,), (DType.FLOAT32,))], 0.0)
    rest = tuple(peer for peer in roster.peers if peer.member.node != server(1))
    machine.handle(SCHEDULER_MEMBER, Roster(rest, roster.epoch + 1), 0.0)
    machine.handle(SCHEDULER_MEMBER, Rewind(1, 0, "server-1 was lost"), 0.0)
    placement = Placement((9,), (Placement.CUT,), 1 << 20)
    effects = machine.handle(SCHEDULER_MEMBER, Placed(77, placement, (0,)), 0.0)
    (info,) = next(one.result for one in effects if isinstance(one, CompleteRequest))
    assert info.slices == tuple(slices_of(shape, 4, "", Placement.CUT, 3, 9, 1 << 20))
    assert {piece.server for piece in info.slices} == {0, 1, 2}


def test_a_report_of_times_says_for_how_long_pushes_were_on_their_way(wired: Wired) -> None:
    wired.push(0, {"w": [1, 1, 1]})
    wired.now += 2.0
    wired.settle()  # what has arrived is acknowledged with the next message, or soon
    wired.advance(1.0)
    wired.now += 5.0
    for _ in range(2):
        request = wired.ask(0, lambda number: ReportTimes(number, StepTimes(3, 96, 1, 2, 3, 0)))
        assert request in wired.completed, "nobody waits for it"
    first, second = (line.rpartition("sending_us=") for line in wired.log if "StepTimes" in line)
    assert first[0].endswith("worker-0 -> scheduler: StepTimes(steps=3, data_us=1, compute_us=2, blocked_us=3, ")
    assert 2_000_000 <= int(first[2][:-1]) < 2_100_000
    assert second[2] == "0)", "it is of the time since the last one"
