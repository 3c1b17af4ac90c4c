"""Workers that are given up while the others go on: what counts, who is heard, what still ends the job."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from kvdist.checkpoint.snapshot import EVERYTHING
from kvdist.core.machine import ChildEnded, PeerDisconnected, Unreachable
from kvdist.core.scheduler.newcomers import Newcomers
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.buffers import Buffer
from kvdist.core.worker.requests import ClaimFolder
from kvdist.errors import ConfigError, FencedError, InitMismatch, PeerLostError
from kvdist.protocol.messages import Flag
from tests.cases import each
from tests.core.wired import Wired

READY = Newcomers._ready

KILLED = "killed by signal 9 (SIGKILL)"


def going_on(num_workers: int = 3, num_servers: int = 1, **options: int) -> Wired:
    made = Wired(num_workers, num_servers, on_loss="continue", **options)  # type: ignore[arg-type]
    made.initialise({"w": [0.0, 0.0, 0.0], "b": [0.0]})
    for rank in range(num_workers):
        made.set_optimizer(rank, "test")
    made.settle()
    return made


@pytest.fixture
def wired() -> Wired:
    return going_on()


def end_after_silence(wired: Wired, name: str) -> None:
    """The connections of a process bring nothing any more, and are broken for that."""
    wired.observe("scheduler", PeerDisconnected(wired.member(name), "no sign of life", after_silence=True))
    wired.advance(60.0)


def held_by(wired: Wired, name: str) -> Buffer | None:
    return wired.servers[0].shard.blocks.of(0)[0].lent.get(wired.member(name))


def test_what_is_not_counted_is_dropped_and_the_round_is_closed_by_the_others(wired: Wired) -> None:
    for rank in (0, 1, 2):
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
    wired.settle()
    reads = [wired.pushpull(rank, {"w": [10, 10, 10], "b": [10]}) for rank in (0, 2)]
    wired.push(1, {"w": [100, 100, 100], "b": [100]})
    wired.settle()
    wired.pushpull(1, {"w": [500, 500, 500], "b": [500]})  # of the next round
    wired.settle()
    assert wired.value(reads[0], "w") == [123, 123, 123]
    reads = [wired.pushpull(rank, {"w": [1000] * 3, "b": [1000]}) for rank in (0, 2)]
    wired.lose()  # nothing of these has arrived
    wired.kill("worker-1")
    wired.advance(10.0)
    assert [wired.value(read, "w") for read in reads] == [[2123] * 3] * 2
    assert any(
        report.startswith("worker-1 (host ") and report.endswith("; 2 workers go on") for report in wired.reports
    )
    assert "worker-1: its first 2 pushes are in the weights, and nothing of the next" in wired.reports
    for block in wired.servers[0].shard.blocks:
        assert set(block.round.counted) == {0, 2}, "blocks with other counters would not merge"


@pytest.mark.parametrize("turns", [1, 3])
def test_the_pushes_of_each_life_are_counted_from_its_own_beginning(wired: Wired, turns: int) -> None:
    for _ in range(4):
        for rank in (0, 1, 2):
            wired.push(rank, {"w": [1, 1, 1], "b": [1]})
        wired.settle()
    wired.kill("worker-1")
    wired.advance(10.0)
    wired.come_back(1)
    wired.declare(1, {"w": (3,), "b": (1,)})
    wired.set_optimizer(1, "test")
    wired.settle()
    wired.take_part(1)
    wired.settle()
    for turn in range(turns + 1):
        for rank in (0, 1, 2) if turn else (0, 2):  # it takes part after one more step of the others
            wired.push(rank, {"w": [1, 1, 1], "b": [1]})
        wired.settle()
    wired.kill("worker-1")
    wired.advance(10.0)
    said = [report for report in wired.reports if "nothing of the next" in report]
    last = "its first push is" if turns == 1 else f"its first {turns} pushes are"
    texts = [f"{one} in the weights, and nothing of the next" for one in ("its first 4 pushes are", last)]
    assert said == [f"worker-1: {text}" for text in texts]


def test_what_is_counted_on_one_server_and_not_on_another_is_said_to_count_in_part() -> None:
    wired = going_on(2, 2, bigarray_bound=2)
    wired.pushpull(0, {"w": [1, 1, 1]})
    wired.settle()
    wired.push(1, {"w": [10, 10, 10]})
    wired.wire = type(wired.wire)([one for one in wired.wire if one[1] != "server-1"])
    wired.deliver(len(wired.wire))
    wired.kill("worker-1")
    wired.advance(10.0)
    read = wired.pull(0, "w")
    wired.settle()
    assert sorted(set(wired.value(read, "w"))) == [1, 11]
    assert any("no push of it is in the weights, and push 1 in part: in 1 of 2 slices" in one for one in wired.reports)


def test_a_worker_knows_within_half_the_time_until_it_speaks_of_a_wait_which_lost_worker_it_waits_for() -> None:
    wired = Wired(2, 2, on_loss="wait")
    wired.initialise({"w": [0.0], "b": [0.0]})
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.settle()
    wired.pushpull(0, {"w": [1], "b": [1]})
    wired.settle()
    wired.kill("worker-1")
    wired.advance(wired.workers[0].limits.explain_after_s / 2)
    said = str(wired.workers[0].explain(wired.now))
    assert "for worker-1 (lost, its return is awaited) to push key 'b' (step 1), in pushpull" in said


def test_a_worker_whose_connection_is_broken_for_its_silence_is_lost_for_that(wired: Wired) -> None:
    wired.advance(1.0)
    wired.stopped["worker-1"] = None
    wired.advance(30.0)
    wired.observe("scheduler", PeerDisconnected(wired.member("worker-1"), "the connection was closed or broke"))
    wired.advance(60.0)
    (said,) = [report for report in wired.reports if report.startswith("worker-1 (host ")]
    assert re.search(r"was lost, .*: was silent for (29|3\d)\.\d s \(KVDIST_PATIENCE_S\); 2 workers go on", said), said


@each("asks", ["scheduler", "server-0"])
def test_who_was_silent_for_too_long_is_told_that_the_others_went_on(asks: str) -> None:
    wired = going_on()
    end_after_silence(wired, "worker-1")
    if asks == "scheduler":
        wired.barrier(1)
    else:
        wired.pull(1, "w")
    wired.settle()
    error = wired.stopped["worker-1"]
    assert isinstance(error, FencedError) and "worker-1 was given up" in str(error)
    read = wired.pull(0, "w")
    wired.settle()
    assert wired.value(read, "w") == [0, 0, 0]


def test_the_same_words_of_two_workers_end_the_job_and_the_same_end_does_not() -> None:
    wired = going_on(5)
    wired.kill("worker-4")
    wired.kill("worker-3")
    wired.leave(2, "ended by an unhandled ValueError: loss is nan")
    wired.advance(1.0)
    assert "scheduler" not in wired.stopped
    wired.leave(1, "ended by an unhandled ValueError: loss is nan")
    wired.advance(1.0)
    error = wired.stopped["scheduler"]
    assert isinstance(error, PeerLostError) and error.node == "worker-1"


def test_the_last_worker_ends_the_job_even_if_others_have_finished() -> None:
    wired = going_on(2)
    wired.leave(0)
    wired.advance(1.0)
    wired.kill("worker-1")
    wired.advance(1.0)
    assert isinstance(wired.stopped["scheduler"], PeerLostError)


@each("replicas", [0, 1])
def test_examples_of_lost_workers_count_in_all_slices_if_in_any_of_any_server(replicas: int) -> None:
    wired = Wired(3, 2, on_loss="continue", replicas=replicas)
    wired.initialise({"w": [0.0], "b": [0.0]}, mode="async")
    for rank in range(3):
        wired.set_optimizer(rank, "test")
    wired.settle()
    for rank in range(3):
        wired.push(rank, {"w": [1], "b": [1]}, samples=4)
    assert wired.infos["w"].slices[0].server != wired.infos["b"].slices[0].server
    for rank, key in ((1, "w"), (2, "b")):  # what these push to the other key never arrives
        wired.push(rank, {key: [1]}, samples=4)
        wired.settle()
        wired.kill(f"worker-{rank}")
        wired.advance(10.0)
    machines = [*wired.servers, *(server.copy for server in wired.servers if replicas)]
    seen = {block.key: block.round.samples for machine in machines for block in machine.shard.blocks}
    assert seen == {"w": 20, "b": 20}


@each("replicas", [0, 1])
def test_where_a_server_may_die_a_worker_leaves_when_its_pushes_are_counted(replicas: int) -> None:
    wired = going_on(2)
    wired.workers[0].peers.num_replicas = replicas
    wired.push(0, {"w": [1.0, 1.0, 1.0]})
    leaves = wired.leave(0)
    wired.advance(1.0)
    assert (leaves in wired.completed) is (replicas == 0), "one server alone has it, and the round is open"
    wired.push(1, {"w": [1.0, 1.0, 1.0]})
    wired.advance(1.0)
    assert leaves in wired.completed


def test_who_fails_after_it_has_left_is_only_told_of() -> None:
    wired = going_on(2)
    wired.leave(0)
    wired.advance(1.0)
    wired.kill("worker-0", "exited with code 3")
    wired.advance(1.0)
    assert "scheduler" not in wired.stopped
    assert any("exited with code 3; it had left before" in report for report in wired.reports)


@each(
    "said, passes",
    [
        ({0: 0, 2: 0}, True),
        ({0: 1, 2: 1}, False),
        ({0: 0, 2: 2}, False),
    ],
)
def test_a_barrier_that_needs_a_giver_fails_for_all_without_it(said: dict[int, int], passes: bool) -> None:
    wired = going_on()
    requests = [wired.barrier(rank, giver=giver) for rank, giver in said.items()]
    wired.settle()
    assert not any(request in wired.completed for request in requests)
    wired.kill("worker-1")
    wired.advance(1.0)
    assert [request in wired.completed for request in requests] == [passes] * 2
    assert passes or all(isinstance(wired.failed[request], PeerLostError) for request in requests)
    again = [wired.barrier(rank, giver=0) for rank in said]
    wired.advance(1.0)
    assert all(request in wired.completed for request in again)


def test_another_worker_gives_first_values_if_the_first_one_is_lost_before_it_was_told() -> None:
    wired = Wired(2, 1, on_loss="continue")
    requests = [wired.declare(rank, {"w": (2,)}) for rank in (0, 1)]
    while not any(to == "server-0" for _, to, _ in wired.wire):
        wired.deliver()  # the server is asked to keep the key
    wired.kill("worker-0")
    wired.settle()
    (info,) = wired.completed[requests[1]]
    assert info.giver == 1 and "scheduler" not in wired.stopped


def test_a_key_that_can_never_get_its_first_value_ends_the_job() -> None:
    wired = Wired(2, 1, on_loss="continue")
    for rank in (0, 1):
        wired.declare(rank, {"w": (2,)})
    wired.settle()
    wired.kill("worker-0")
    wired.settle()
    error = wired.stopped["scheduler"]
    assert isinstance(error, PeerLostError) and "worker-0 was lost before it had given key 'w' its first value" in str(
        error
    )


def test_what_a_lost_worker_reads_is_free_once_its_process_has_ended(wired: Wired) -> None:
    for rank in (0, 1, 2):
        wired.pushpull(rank, {"w": [1, 1, 1]}, flag=int(Flag.HOLD))
    wired.advance(0.1)
    held = held_by(wired, "worker-1")
    assert held is not None
    before = held.leases
    end_after_silence(wired, "worker-1")
    assert held.leases == before, "it may go on reading"
    wired.kill("worker-1")
    wired.advance(1.0)
    assert held.leases == before - 1 and held_by(wired, "worker-1") is None


@each("supervised, silent_s, is_end", [(False, 0.0, True), (False, 7.5, False), (True, 0.0, False)])
def test_a_connection_that_was_closed_at_once_is_an_end_where_no_launcher_sees_ends(
    supervised: bool, silent_s: float, is_end: bool
) -> None:
    wired = going_on()
    wired.scheduler.config = replace(wired.scheduler.config, supervised=supervised)
    for rank in (0, 1, 2):
        wired.pushpull(rank, {"w": [1, 1, 1]}, flag=int(Flag.HOLD))
    wired.advance(0.1)
    assert held_by(wired, "worker-1") is not None
    wired.stopped["worker-1"] = None
    wired.advance(silent_s)
    wired.observe("scheduler", PeerDisconnected(wired.member("worker-1"), "connection reset"))
    wired.advance(10.0)
    assert wired.workers[0].view(lambda _: False).members == (0, 2)
    assert (held_by(wired, "worker-1") is None) == is_end


def test_the_launcher_is_told_of_workers_that_may_still_run() -> None:
    wired = going_on(5)
    wired.scheduler.config = replace(wired.scheduler.config, supervised=True)
    wired.kill("worker-3")
    wired.leave(2, "ended by an unhandled ValueError: loss is nan")
    wired.scheduler.membership.lives[wired.member("worker-1")] = 2  # it had been started again twice
    end_after_silence(wired, "worker-1")
    assert wired.told == ["given up worker 1 life 2"]
    wired.kill("worker-1")
    assert "scheduler" not in wired.stopped


def test_the_launcher_is_told_once_of_each_life_that_it_has_made_a_step() -> None:
    wired = going_on()
    wired.scheduler.config = replace(wired.scheduler.config, supervised=True)
    wired.advance(5.0)
    assert wired.told == []
    for _ in range(2):
        for rank in (0, 1, 2):
            wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
        wired.advance(5.0)
    assert sorted(wired.told) == [f"at work worker {rank} life 0" for rank in (0, 1, 2)]
    wired.told.clear()
    wired.kill("worker-1")
    wired.come_back(1)
    life = wired.scheduler.membership.lives[wired.member("worker-1")]
    assert wired.told == [f"joined worker 1 life {life}"]
    wired.declare(1, {"w": (3,), "b": (1,)})
    wired.take_part(1)
    wired.advance(5.0)
    assert len(wired.told) == 1, "the steps of the others are not its own"
    for rank in (0, 1, 2):
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
    wired.advance(5.0)
    assert wired.told[1:] == [f"at work worker 1 life {life}"]
    assert wired.scheduler._at_work == {wired.member(f"worker-{rank}") for rank in (0, 1, 2)}, (
        "earlier lives are forgotten"
    )


def test_losses_right_after_each_other_share_a_roster() -> None:
    wired = going_on(5)
    before = wired.scheduler.membership.epoch
    for rank in (1, 2, 3):
        wired.kill(f"worker-{rank}")
    wired.advance(1.0)
    assert wired.scheduler.membership.epoch == before + 2
    assert wired.servers[0].peers.workers.keys() == {0, 4}
    assert len(wired.servers[0].peers.lost) == 3


def test_a_server_does_not_fail_because_it_cannot_reach_a_lost_worker(wired: Wired) -> None:
    end_after_silence(wired, "worker-1")
    wired.observe("server-0", Unreachable(wired.member("worker-1"), "nothing gets through"))
    wired.advance(1.0)
    assert not wired.stopped.keys() - {"worker-1"}, "which has heard of it"


def test_a_worker_that_a_server_cannot_reach_ends_and_the_others_go_on(wired: Wired) -> None:
    wired.observe("server-0", Unreachable(wired.member("worker-1"), "nothing gets through"))
    wired.settle()
    error = wired.stopped.pop("worker-1")
    assert isinstance(error, FencedError) and str(error) == "server-0 cannot reach worker-1: nothing gets through"
    wired.kill("worker-1", "exited with code 75")
    wired.advance(1.0)
    assert wired.stopped.keys() == {"worker-1"} and wired.servers[0].peers.workers.keys() == {0, 2}


def test_one_death_is_one_loss_whoever_reports_it(wired: Wired) -> None:
    wired.kill("worker-1")
    wired.observe("scheduler", PeerDisconnected(wired.member("worker-1"), "closed"))
    wired.observe("scheduler", ChildEnded(wired.member("worker-1").node, KILLED, clean=False))
    wired.advance(10.0)
    assert sum("was lost" in report for report in wired.reports) == 1
    assert wired.workers[0].view(lambda _: False).members == (0, 2)
    assert wired.workers[0].view(lambda _: False).lost == 1


def test_a_worker_that_has_just_come_back_gives_nothing_in_a_barrier_of_the_others_and_the_next_one_does() -> None:
    wired = going_on()
    for rank in (0, 1, 2):
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
    wired.settle()
    wired.kill("worker-0")
    wired.come_back(0)
    wired.declare(0, {"w": (3,), "b": (1,)})
    wired.take_part(0)
    wired.advance(1.0)
    assert wired.workers[1].view(lambda _: False).members == (0, 1, 2), "it is a member, as rounds wait for it"
    for giver, passes in ((0, False), (1, True)):
        requests = [wired.barrier(rank, giver=giver) for rank in (1, 2)]
        wired.advance(1.0)
        assert [request in wired.completed for request in requests] == [passes] * 2
        assert passes or all(isinstance(wired.failed[request], PeerLostError) for request in requests)


def test_a_worker_that_comes_back_saves_nothing_before_its_first_push(wired: Wired, tmp_path: Path) -> None:
    wired.pushpull(0, {"w": [1, 1, 1], "b": [1]})
    wired.kill("worker-1")
    wired.come_back(1)
    wired.declare(1, {"w": (3,), "b": (1,)})
    wired.settle()
    wired.log.clear()
    claim = wired.ask(1, lambda number: ClaimFolder(number, 0, str(tmp_path / "step-0"), EVERYTHING))
    save = wired.save(1, tmp_path / "step-0")
    wired.settle()
    assert wired.completed[claim] == wired.completed[save] == "", "of no run"
    assert not wired.works and not [line for line in wired.log if "Claim" in line or "Save" in line or "Mark" in line]


def lost_after(statement: str, wired: Wired | None = None) -> Wired:
    """All make a statement, and worker 1 is killed after the first step and started again."""
    wired = wired or going_on()
    for rank in (0, 1, 2):
        wired.barrier(rank, statement=statement)
    wired.settle()
    for rank in (0, 1, 2):
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
    wired.settle()
    wired.kill("worker-1")
    wired.come_back(1)
    return wired


def require_refused(wired: Wired, request: int, *words: str) -> None:
    """The newcomer has this error; the others make rounds, with it and without it, and nobody waits for it."""
    error = wired.failed[request]
    assert isinstance(error, InitMismatch)
    for word in (*words, "was refused, and nothing was changed: start it with the program of the others"):
        assert word in str(error), error
    for total, then in ((5, lambda: None), (7, lambda: wired.leave(1, str(error))), (9, lambda: None)):
        reads = [wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}) for rank in (0, 2)]
        wired.advance(1.0)
        assert [wired.value(read, "w") for read in reads] == [[total] * 3] * 2
        then()
        wired.advance(1.0)
    barriers = [wired.barrier(rank) for rank in (0, 2)]
    wired.settle()
    assert all(barrier in wired.completed for barrier in barriers)


def test_who_comes_back_hears_of_the_cluster_as_soon_as_all_servers_have_heard_of_it() -> None:
    wired = going_on(num_servers=2)
    wired.kill("worker-1")
    wired.come_back(1, seconds=0.0)
    assert wired.workers[1].joining.complete, "no acknowledgement waits for another message"


@each(
    "shapes, dtype, mode, said",
    [
        ({"w": (4,), "b": (1,)}, "float32", "sync", "declares key 'w' with shape (4,), dtype float32"),
        ({"w": (3,), "b": (1,)}, "float64", "sync", "declares key 'w' with shape (3,), dtype float64"),
        ({"w": (3,), "b": (1,)}, "float32", "async", "store 0 is sync on worker-0 and async on worker-1"),
        ({"new": (2,), "w": (4,)}, "float32", "sync", "declares key 'w' with shape (4,)"),
    ],
)
def test_a_newcomer_with_other_keys_is_refused_and_the_others_go_on(
    shapes: dict[int | str, tuple[int, ...]], dtype: str, mode: str, said: str
) -> None:
    wired = lost_after("2 parameters, trained are 0-1")
    request = wired.declare(1, shapes, mode, dtype)
    wired.settle()
    require_refused(wired, request, said)
    wired.come_back(1)
    again = wired.declare(1, {"w": (3,), "b": (1,)})
    wired.settle()
    assert again in wired.completed, "one with their model is not"


@each("said", ["3 parameters, trained are 0-2", "1 parameters, trained are 0", "2 parameters, trained are 0"])
def test_a_newcomer_with_a_layer_more_or_fewer_is_refused_and_the_others_go_on(said: str) -> None:
    wired = lost_after("2 parameters, trained are 0-1, goes on from the optimizer state 0")
    request = wired.barrier(1, statement=said)
    wired.settle()
    require_refused(
        wired, request, f"worker-1 says: {said}; the workers that it joins have said: 2 parameters, trained are 0-1."
    )


@each("said", ["2 parameters, trained are 0-1, goes on from the optimizer state 7", "begins with step 400", ""])
def test_a_newcomer_that_states_all_else_otherwise_takes_part_in_the_others_barriers(said: str) -> None:
    wired = lost_after("2 parameters, trained are 0-1")
    request = wired.barrier(1, statement=said)
    wired.declare(1, {"w": (3,), "b": (1,)})
    wired.take_part(1)
    wired.advance(1.0)
    assert request in wired.completed
    for rank in (0, 2, 0, 1, 2):  # the newcomer takes part from the third version on
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]})
    wired.settle()
    barriers = [wired.barrier(rank, statement="the end") for rank in (0, 2)]
    wired.settle()
    assert not any(barrier in wired.completed for barrier in barriers), "they wait for it"
    barriers.append(wired.barrier(1, statement="the end"))
    wired.settle()
    assert all(barrier in wired.completed for barrier in barriers)


def test_a_scheduler_that_was_started_again_refuses_another_model_as_before() -> None:
    wired = Wired(3, 1, on_loss="continue", scheduler_away_s=30.0)
    wired.initialise({"w": [0.0, 0.0, 0.0], "b": [0.0]})
    for rank in range(3):
        wired.set_optimizer(rank, "test")
    wired.settle()
    lost_after("2 parameters, trained are 0-1", wired)
    request = wired.barrier(1, statement="3 parameters, trained are 0-2")
    wired.return_scheduler()
    wired.advance(40.0)
    require_refused(wired, request, "the workers that it joins have said: 2 parameters, trained are 0-1.")


def test_a_newcomer_that_declares_a_key_of_its_own_is_told_for_whom_it_waits() -> None:
    wired = lost_after("")
    request = wired.declare(1, {"w": (3,), "b": (1,), "new": (2,)})
    wired.advance(30.0)
    assert request not in wired.completed and request not in wired.failed
    scheduler = wired.processes["scheduler"].machine
    said = str(scheduler.explain(wired.now))
    assert "for worker-0, worker-2 to initialise key 'new', as only worker-1 has, which joins them" in said
    for rank in (0, 2):
        wired.declare(rank, {"new": (2,)})
    wired.settle()
    assert request in wired.completed and scheduler.explain(wired.now) is None


@each("mode, least, is_refused", [("async", 2, True), ("async", 1, False), ("sync", 2, False)])
def test_rounds_that_wait_for_nobody_are_refused_with_a_least_number_of_workers(
    mode: str, least: int, is_refused: bool
) -> None:
    wired = Wired(2, 1, on_loss="continue")
    scheduler = wired.processes["scheduler"].machine
    assert isinstance(scheduler, Scheduler)
    scheduler.config = replace(scheduler.config, min_workers=least)
    requests = [wired.declare(rank, {"w": (2,)}, mode) for rank in (0, 1)]
    wired.settle()
    assert [request in wired.completed for request in requests] == [not is_refused] * 2
    for request in requests if is_refused else ():
        error = wired.failed[request]
        assert isinstance(error, ConfigError) and str(error).startswith("KVDIST_MIN_WORKERS is 2 (")


def ready_together() -> Wired:
    """Two of three workers are back, and push for the first time, one right behind the other."""
    wired = Wired(3, 2, on_loss="continue")
    wired.initialise({"w": [0.0, 0.0]})
    for rank in range(3):
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    wired.settle()
    for rank in (1, 2):
        wired.kill(f"worker-{rank}")
    wired.settle()
    for rank in (1, 2):
        wired.come_back(rank)
        wired.declare(rank, {"w": (2,)})
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    wired.settle()
    for rank in (1, 2):
        wired.push(rank, {"w": [1.0, 1.0]})
    wired.settle()
    return wired


def test_a_worker_that_is_ready_while_servers_are_asked_because_of_another_joins_behind_it() -> None:
    assert ready_together().scheduler.membership.newcomers == {}
    forgets = mock.patch.object(
        Newcomers, "_ready", lambda self, sender, message: [] if self._is_finding else READY(self, sender, message)
    )
    with forgets:
        assert len(ready_together().scheduler.membership.newcomers) == 1, "it comes while servers are asked"
