"""Workers that are lost while the others wait for them: what they come back to, and what ends the wait."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvdist.core.machine import PeerDisconnected, TellLauncher
from kvdist.errors import ConfigError, FencedError, PeerLostError
from kvdist.optimizer.registry import create
from kvdist.protocol.messages import Configure, Goodbye, Lease
from tests.cases import each
from tests.core.wired import Wired

SHAPES = {"w": (3,), "b": (1,)}


@pytest.fixture
def wired() -> Wired:
    """Key w is cut over both servers."""
    made = Wired(2, 2, on_loss="wait", bigarray_bound=2)
    made.initialise({"w": [0.0, 0.0, 0.0], "b": [0.0]})
    for rank in (0, 1):
        made.set_optimizer(rank, "test")
    made.settle()
    return made


def begin_anew(wired: Wired, rank: int) -> None:
    """What the script of a worker that was started again does first."""
    wired.come_back(rank)
    wired.declare(rank, SHAPES)
    wired.set_optimizer(rank, "test")
    wired.settle()


def test_a_step_that_was_made_in_some_slices_is_made_again_and_counts_once(wired: Wired) -> None:
    first = [wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}) for rank in (0, 1)]
    wired.settle()
    assert [wired.value(one, "w") for one in first] == [[2, 2, 2]] * 2
    other = wired.pushpull(0, {"w": [10, 10, 10], "b": [10]})
    wired.settle()
    wired.push(1, {"w": [100, 100, 100], "b": [100]})
    wired.wire = type(wired.wire)([one for one in wired.wire if one[1] != "server-1"])
    wired.kill("worker-1")
    wired.advance(10.0)
    versions = {block.version for server in wired.servers for block in server.shard.blocks}
    assert versions == {1, 2} and other not in wired.completed, "the step is made in part"
    begin_anew(wired, 1)
    place = wired.take_part(1)
    read = wired.pull(1, "w", "b")
    wired.advance(1.0)
    assert wired.completed[place] == 1 and other not in wired.completed
    assert (wired.value(read, "w"), wired.value(read, "b")) == ([2, 2, 2], [2]), "the weights of before that step"
    again = wired.pushpull(1, {"w": [100, 100, 100], "b": [100]})
    wired.settle()
    assert wired.value(other, "w") == wired.value(again, "w") == [112, 112, 112]
    assert wired.value(other, "b") == wired.value(again, "b") == [112]


def test_what_was_not_counted_is_pushed_again(wired: Wired) -> None:
    wired.push(1, {"w": [100, 100, 100]})
    wired.settle()
    wired.kill("worker-1")
    wired.advance(1.0)
    other = wired.pushpull(0, {"w": [10, 10, 10]})
    wired.advance(10.0)
    assert other not in wired.completed, "what it had pushed does not count without it"
    begin_anew(wired, 1)
    again = wired.pushpull(1, {"w": [100, 100, 100]})
    wired.advance(1.0)
    assert wired.value(other, "w") == wired.value(again, "w") == [110, 110, 110]


def test_a_barrier_waits_until_a_lost_worker_has_come_back(wired: Wired) -> None:
    wired.kill("worker-1")
    barrier = wired.barrier(0)
    wired.advance(60.0)
    assert barrier not in wired.completed
    wired.come_back(1)
    assert barrier in wired.completed, "its place in the program is behind that barrier"


def test_a_barrier_that_a_lost_worker_had_reached_is_passed(wired: Wired) -> None:
    wired.barrier(1)
    wired.settle()
    wired.kill("worker-1")
    barrier = wired.barrier(0)
    wired.settle()
    assert barrier in wired.completed


def test_a_worker_that_does_not_come_back_in_time_ends_the_job_by_its_name(wired: Wired) -> None:
    wired.kill("worker-1")
    wired.advance(599.0)
    assert not wired.stopped.keys() - {"worker-1"}
    wired.advance(2.0)
    for name in ("scheduler", "server-0", "worker-0"):
        error = wired.stopped[name]
        assert isinstance(error, PeerLostError) and error.node == "worker-1"
        assert "it has not come back within 600 s" in str(error)


def test_one_that_is_lost_again_has_its_time_again(wired: Wired) -> None:
    wired.kill("worker-1")
    wired.advance(500.0)
    wired.come_back(1)
    wired.advance(500.0)
    wired.observe("scheduler", PeerDisconnected(wired.member("worker-1"), "reset", after_silence=True))
    wired.stopped["worker-1"] = None
    wired.advance(500.0)
    assert not wired.stopped.keys() - {"worker-1"}
    wired.advance(200.0)
    assert isinstance(wired.stopped["scheduler"], PeerLostError)


def test_the_others_finish_and_one_that_comes_back_still_does_what_its_script_does_at_the_end(wired: Wired) -> None:
    for rank in (0, 1):
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
    wired.settle()
    wired.kill("worker-1")
    wired.leave(0)
    wired.advance(10.0)
    assert "scheduler" not in wired.stopped
    begin_anew(wired, 1)
    place = wired.take_part(1)
    wired.settle()
    read = wired.pull(1, "w")
    wired.settle()
    assert wired.completed[place] == 1 and wired.value(read, "w") == [2, 2, 2]
    wired.leave(1)
    wired.advance(10.0)
    assert wired.stopped["scheduler"] is None and wired.stopped["worker-1"] is None


def test_a_sum_that_belongs_to_no_step_goes_on_when_a_lost_worker_is_back(wired: Wired) -> None:
    for rank in (0, 1):
        wired.declare(rank, {"mean": (1,)}, store=1)
    wired.settle()
    wired.give(0, {"mean": [0.0]})
    for rank in (0, 1):
        wired.push(rank, {"mean": [1.0]})
    wired.settle()
    wired.kill("worker-1")
    alone = wired.pushpull(0, {"mean": [5.0]})
    wired.advance(10.0)
    assert alone not in wired.completed
    begin_anew(wired, 1)
    wired.take_part(1)
    wired.advance(1.0)
    assert wired.value(alone, "mean") == [5.0]


def test_who_was_only_silent_is_heard_by_nobody_and_its_place_is_kept(wired: Wired) -> None:
    wired.observe("scheduler", PeerDisconnected(wired.member("worker-1"), "no sign of life", after_silence=True))
    other = wired.pushpull(0, {"w": [10, 10, 10]})
    wired.advance(60.0)
    wired.push(1, {"w": [7, 7, 7]})
    wired.advance(1.0)
    assert isinstance(wired.stopped["worker-1"], FencedError) and other not in wired.completed
    begin_anew(wired, 1)
    wired.push(1, {"w": [100, 100, 100]})
    wired.advance(1.0)
    assert wired.value(other, "w") == [110, 110, 110]


def test_a_key_that_is_declared_before_the_first_step_waits_for_one_that_came_back_before_it(wired: Wired) -> None:
    wired.kill("worker-1")
    begin_anew(wired, 1)
    wired.take_part(1)
    wired.settle()
    wired.declare(0, {"late": (1,)})
    wired.settle()
    wired.give(0, {"late": [0.0]})
    other = wired.pushpull(0, {"late": [10]})
    wired.advance(1.0)
    assert other not in wired.completed, "the step is not made without it"
    wired.declare(1, {"late": (1,)})
    wired.settle()
    again = wired.pushpull(1, {"late": [100]})
    wired.advance(1.0)
    assert wired.value(other, "late") == wired.value(again, "late") == [110]


@each("store, declares_first", [(2, True), (3, False)])
def test_a_key_that_is_declared_after_the_first_steps_is_refused_by_its_name(
    wired: Wired, store: int, declares_first: bool
) -> None:
    for _ in range(2):
        for rank in (0, 1):
            wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
        wired.settle()

    def declare() -> list[int]:
        asked = [wired.declare(rank, {"late": (2,)}, store=store) for rank in (0, 1)]
        wired.settle()
        return asked

    description = create("test").describe()
    asked = declare() if declares_first else []
    assert {*asked} <= wired.completed.keys(), "a sum may come at any time"
    chosen = [wired.ask(rank, lambda number: Configure(number, store, description)) for rank in (0, 1)]
    wired.settle()
    refused = chosen if declares_first else declare()
    for request in refused:
        error = wired.failed[request]
        assert isinstance(error, ConfigError) and "key 'late' is declared after the first steps" in str(error)
    done = [wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}) for rank in (0, 1)]
    wired.settle()
    assert {*done} <= wired.completed.keys(), "the others go on"


def test_leases_of_data_are_refused(wired: Wired) -> None:
    request = wired.ask(0, lambda number: Lease(number, 0, 0, 8, 1, False, 0, 1, 1, 0, 0, False))
    wired.settle()
    error = wired.failed[request]
    assert isinstance(error, ConfigError) and "KVDIST_ON_LOSS is 'wait'" in str(error)


def test_the_launcher_is_told_whose_exit_code_is_waited_for_after_its_goodbye(wired: Wired) -> None:
    wired.scheduler.config = replace(wired.scheduler.config, supervised=True)
    member = wired.member("worker-1")
    effects = wired.scheduler.handle(member, Goodbye(99, "", True), wired.now)
    assert TellLauncher("leaves worker 1 life 0") in effects
    assert wired.scheduler.membership.awaited[member.node] == member
