"""A scheduler that was killed and started again goes on from its journal: to the others it has stood still."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdist.checkpoint.snapshot import FileRecord, WriteManifest
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import ChildEnded, PeerDisconnected, Persisted
from kvdist.core.worker.requests import ClaimFolder
from kvdist.errors import InitMismatch, OptimizerMismatch, PeerLostError
from kvdist.nodes import NodeId, Role, worker
from kvdist.protocol.messages import Ack, Command, Lease, Packet, Stamp, Used
from tests.core.wired import JOB, Wired

KILLED = "killed by signal 9 (SIGKILL)"


def trained(num_workers: int = 3, num_servers: int = 2, on_loss: str = "continue", **options: object) -> Wired:
    made = Wired(num_workers, num_servers, on_loss=on_loss, **options)  # type: ignore[arg-type]
    made.initialise({"w": [0.0, 0.0, 0.0], "b": [0.0]})
    for rank in range(num_workers):
        made.set_optimizer(rank, "test")
    made.settle()
    return made


@pytest.fixture
def wired() -> Wired:
    return trained()


def return_scheduler(wired: Wired) -> None:
    wired.return_scheduler()
    wired.advance(1.0)


def test_pushes_and_pulls_go_on_while_it_is_away(wired: Wired) -> None:
    for rank in range(3):
        wired.observe(f"worker-{rank}", PeerDisconnected(SCHEDULER_MEMBER, "reset"))
    reads = [wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}) for rank in range(3)]
    wired.advance(30.0)
    assert [wired.value(read, "w") for read in reads] == [[3, 3, 3]] * 3
    wired.advance(31.0)
    for rank in range(3):
        failure = wired.stopped[f"worker-{rank}"]
        assert isinstance(failure, PeerLostError)
        assert "it was not started again within 60 s (KVDIST_SCHEDULER_AWAY_S)" in str(failure)


def test_what_was_open_is_answered_by_the_new_one(wired: Wired) -> None:
    barriers = [wired.barrier(rank) for rank in (0, 1)]
    declared = [wired.declare(rank, {"late": (2,)}) for rank in (0, 2)]
    wired.settle()
    return_scheduler(wired)
    assert not wired.completed.keys() & {*barriers, *declared}, "others have to do the same first"
    barriers.append(wired.barrier(2))
    declared.append(wired.declare(1, {"late": (2,)}))
    wired.settle()
    assert wired.completed.keys() >= {*barriers, *declared}
    numbers = [piece.number for info in wired.infos.values() for piece in info.slices]
    assert len(set(numbers)) == len(numbers), "slices are numbered behind those of the last scheduler"
    wired.give(0, {"late": [5, 6]})
    wired.settle()
    read = wired.pull(2, "late")
    wired.settle()
    assert wired.value(read, "late") == [5, 6]


def test_keys_and_optimizers_are_those_of_the_last_one(wired: Wired) -> None:
    return_scheduler(wired)
    declared = wired.declare(0, {"w": (3,), "b": (1,)})
    other, same = wired.set_optimizer(1, "sgd", learning_rate=0.5), wired.set_optimizer(1, "test")
    wired.settle()
    assert [info.slices for info in wired.completed[declared]] == [wired.infos[key].slices for key in ("w", "b")]
    assert same in wired.completed
    assert isinstance(wired.failed[other], OptimizerMismatch)


def test_a_barrier_that_one_worker_has_passed_is_passed_for_all(wired: Wired) -> None:
    barriers = [wired.barrier(rank) for rank in range(3)]
    while not wired.completed.keys() & set(barriers):
        wired.deliver()
    assert not set(barriers) <= wired.completed.keys(), "not all have heard of it"
    return_scheduler(wired)
    assert set(barriers) <= wired.completed.keys()


def test_a_barrier_that_has_failed_for_one_worker_fails_for_all(wired: Wired) -> None:
    barriers = [wired.barrier(rank, statement=f"{rank} parameters") for rank in range(3)]
    while not wired.failed.keys() & set(barriers):
        wired.deliver()
    assert not set(barriers) <= wired.failed.keys(), "not all have heard of it"
    return_scheduler(wired)
    assert [type(wired.failed[barrier]) for barrier in barriers] == [InitMismatch] * 3
    assert len({str(wired.failed[barrier]) for barrier in barriers}) == 1


def test_a_command_runs_once() -> None:
    ran: list[tuple[int, str]] = []
    wired = trained(2, 2, handlers={7: lambda head, body, rank: ran.append((rank, body))})
    request = wired.ask(1, lambda number: Command(number, 7, "do"))
    while not ran:
        wired.deliver()
    return_scheduler(wired)
    assert request in wired.completed
    assert sorted(ran) == [(0, "do"), (1, "do")]


def test_who_was_lost_stays_so(wired: Wired) -> None:
    zombie = wired.member("worker-1")
    wired.observe("scheduler", PeerDisconnected(zombie, "no sign of life", after_silence=True))
    wired.advance(10.0)
    return_scheduler(wired)
    assert wired.scheduler.membership.lost.keys() == {zombie}
    barriers = [wired.barrier(rank) for rank in (0, 2)]
    wired.settle()
    assert set(barriers) <= wired.completed.keys()


def test_who_does_not_connect_again_is_given_up_after_its_time(wired: Wired) -> None:
    wired.stopped["worker-2"] = None
    wired.return_scheduler()
    barriers = [wired.barrier(rank) for rank in (0, 1)]
    wired.advance(wired.limits.reconnect_grace_s(True, True) - 0.1)
    assert not wired.completed.keys() & set(barriers)
    wired.advance(1.0)
    assert set(barriers) <= wired.completed.keys()
    told = "worker-2 (host host-2, pid 102) was lost"
    assert any(told in one for one in wired.reports), wired.reports


def test_whom_the_launcher_has_seen_end_is_not_waited_for(wired: Wired) -> None:
    wired.stopped["worker-2"] = None
    wired.return_scheduler()
    wired.observe("scheduler", ChildEnded(worker(2), KILLED, clean=False))
    barriers = [wired.barrier(rank) for rank in (0, 1)]
    wired.advance(1.0)
    assert set(barriers) <= wired.completed.keys()
    assert any(KILLED in one for one in wired.reports)


def test_a_cluster_that_was_not_complete_becomes_so() -> None:
    wired = Wired(2, 1, on_loss="continue", form=False)
    late = wired.processes.pop("worker-1")
    wired.stopped["worker-1"] = None
    wired.advance(1.0)
    return_scheduler(wired)
    assert wired.stopped.keys() == {"worker-1"}
    wired.processes["worker-1"] = late
    del wired.stopped["worker-1"]
    wired.form()
    wired.initialise({"w": [1.0, 2.0]})
    barriers = [wired.barrier(rank) for rank in range(2)]
    wired.settle()
    assert set(barriers) <= wired.completed.keys()


def test_a_job_whose_last_worker_has_left_meanwhile_ends_well(wired: Wired) -> None:
    for rank in range(3):
        wired.leave(rank)
    while not any(str(one[2].message).startswith("Stop") for one in wired.wire):
        wired.deliver()
    wired.return_scheduler()
    wired.advance(10.0)
    assert {name: failure for name, failure in wired.stopped.items() if failure is not None} == {}
    assert wired.stopped.keys() == wired.processes.keys()


def test_the_folders_that_it_had_locked_are_known(wired: Wired, tmp_path: Path) -> None:
    folder = str(tmp_path / "step-0")
    claims = [wired.ask(rank, lambda number: ClaimFolder(number, 0, folder, ("weights",))) for rank in range(2)]
    wired.settle_works()
    run = wired.completed[claims[0]]
    return_scheduler(wired)
    assert wired.scheduler.locked_folders == [(folder, run)]
    claim = wired.ask(2, lambda number: ClaimFolder(number, 0, folder, ("weights",)))
    wired.settle()
    assert wired.completed[claim] == run


def lease(wired: Wired, rank: int, used: int = 0, *, length: int = 1000, rests: bool = False) -> int:
    return wired.ask(rank, lambda number: Lease(number, 0, 0, length, 1, True, 7, 4, 16, used, 0, rests))


def given(wired: Wired, request: int) -> tuple[int, int]:
    leased = wired.completed[request]
    return leased.start, leased.stop


def test_a_lease_that_was_given_and_not_heard_of_is_given_once(wired: Wired) -> None:
    first = lease(wired, 0)
    wired.settle()
    second = lease(wired, 1)
    wired.deliver()
    assert second not in wired.completed
    return_scheduler(wired)
    third = lease(wired, 2)
    wired.settle()
    assert [given(wired, one) for one in (first, second, third)] == [(0, 16), (16, 32), (32, 48)]


def test_a_lease_takes_one_message_and_an_answer(wired: Wired) -> None:
    wired.log.clear()
    lease(wired, 0)
    wired.settle()
    assert [line.partition("(")[0].partition(" ")[2] for line in wired.log if "Ack(" not in line] == [
        "worker-0 -> scheduler: Lease",
        "scheduler -> worker-0: Leased",
    ]


def test_what_a_worker_has_not_used_that_died_while_the_scheduler_was_away_goes_to_others(wired: Wired) -> None:
    ranges = [lease(wired, rank) for rank in range(3)]
    wired.settle()
    for rank in range(3):
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}, samples=4)
    wired.settle()
    assert given(wired, ranges[1]) == (16, 32)
    wired.stopped["worker-1"] = None
    wired.return_scheduler()
    wired.observe("scheduler", ChildEnded(worker(1), KILLED, False))
    wired.advance(1.0)
    again = lease(wired, 0, 16)
    wired.settle()
    assert given(wired, again) == (20, 32)


def test_a_checkpoint_that_is_open_keeps_what_its_callers_had_not_used(wired: Wired) -> None:
    """One has called and goes on, when the scheduler is lost; what it uses then is not in that checkpoint."""
    for rank in range(3):
        lease(wired, rank)
        wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}, samples=4)
        wired.settle()
        wired.ask(rank, lambda number: Used(number, 4, False))
    wired.settle()
    wired.save(0, "/checkpoints/step-1", "w", "b")
    lease(wired, 0, 16)
    wired.settle()
    return_scheduler(wired)
    for rank in (1, 2):
        wired.save(rank, "/checkpoints/step-1", "w", "b")
    wired.settle()
    while not isinstance(wired.works[0].work, WriteManifest):
        wired.observe(wired.works[0].who, Persisted(wired.works.popleft().token, FileRecord("a", 8, 64 * "0"), ""))
        wired.settle()
    data = wired.works[0].work.manifest.data
    assert data is not None and data["left"] == [[0, 4, 16], [0, 20, 32], [0, 36, 1000]]


def test_who_rests_goes_on_only_when_all_do_and_hears_what_it_has_missed(wired: Wired) -> None:
    for rank in (0, 1):
        lease(wired, rank, length=8)
    resting = lease(wired, 2, length=8, rests=True)
    wired.settle()
    barriers = [wired.barrier(rank) for rank in (0, 1)]
    wired.settle()
    assert set(barriers) <= wired.completed.keys(), "it does not wait for who rests"
    wired.ask(0, lambda number: Used(number, 0, True))
    wired.settle()
    return_scheduler(wired)
    assert [server.peers.resting for server in wired.servers] == [{2}, {2}]
    assert resting not in wired.completed, "what is free is for those who work"
    again = lease(wired, 1, 4, length=8)
    wired.settle()
    assert given(wired, again) == (0, 4)
    return_scheduler(wired)
    ended = [lease(wired, rank, used, length=8, rests=True) for rank, used in ((0, 0), (1, 8))]
    wired.settle()
    assert wired.completed[ended[0]].is_over and wired.completed[ended[1]].is_over and wired.completed[resting].is_over
    later = [wired.barrier(2)]
    wired.settle()
    assert not wired.completed.keys() & {*later}, "its next barrier is the next one of all"
    later += [wired.barrier(rank) for rank in (0, 1)]
    wired.settle()
    assert wired.completed.keys() >= {*later}


@pytest.mark.parametrize("is_over", [True, False])
def test_who_rests_leaves_the_barrier_at_which_it_was_late(wired: Wired, is_over: bool) -> None:
    late = wired.barrier(2, timeout_s=1.0)
    wired.advance(1.5)
    assert late in wired.failed
    for rank in (0, 1):
        lease(wired, rank, length=8)
    lease(wired, 2, length=8, rests=True)
    wired.settle()
    passed = [wired.barrier(rank) for rank in (0, 1) if is_over]
    wired.settle()
    assert set(passed) <= wired.completed.keys()
    for rank in (0, 1):
        lease(wired, rank, 4, length=8, rests=True)
    wired.settle()
    first = wired.barrier(2)
    wired.settle()
    assert first not in wired.completed
    others = [wired.barrier(rank) for rank in (0, 1)]
    wired.settle()
    assert {first, *others} <= wired.completed.keys()


def test_what_was_said_of_losses_is_not_said_again(wired: Wired) -> None:
    for rank in range(3):
        wired.push(rank, {"w": [1, 1, 1], "b": [1]})
    wired.settle()
    wired.kill("worker-2")
    wired.advance(1.0)
    return_scheduler(wired)
    said = "worker-2: its first push is in the weights"
    assert sum(report.startswith(said) for report in wired.reports) == 1, wired.reports


def test_a_worker_that_was_lost_before_every_server_was_replaced_is_not_waited_for() -> None:
    wired = trained(replicas=1)
    wired.kill("worker-0")
    wired.advance(2.0)
    for rank in (0, 1):
        wired.kill(f"server-{rank}")
        wired.return_server(rank)
        wired.advance(5.0)
    return_scheduler(wired)
    barriers = [wired.barrier(rank) for rank in (1, 2)]
    wired.advance(wired.limits.form_timeout_s + 10.0)
    assert wired.completed.keys() >= set(barriers) and set(wired.stopped) == {"worker-0"}, wired.stopped
    wired.kill("server-1")
    wired.advance(5.0)
    assert set(wired.stopped) == {"worker-0", "server-1"}, "its copy is with the other one"


def test_a_server_that_dies_while_the_scheduler_is_away_is_replaced_by_its_copy() -> None:
    wired = trained(replicas=1)
    wired.stopped["server-1"] = None
    wired.return_scheduler()
    wired.observe("scheduler", ChildEnded(NodeId(Role.SERVER, 1), KILLED, clean=False))
    wired.advance(1.0)
    reads = [wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}) for rank in range(3)]
    wired.advance(1.0)
    assert [wired.value(read, "w") for read in reads] == [[3, 3, 3]] * 3


# A scheduler that has forgotten, as after a power cut.


def forget(wired: Wired, count: int = 1) -> None:
    """The scheduler knows nothing of the last messages to and from worker 0."""
    link = wired.processes["scheduler"].links[wired.member("worker-0")]
    link.received -= count
    link.next_seq -= count


def test_a_worker_notices_that_a_scheduler_has_forgotten_what_it_had_acknowledged(wired: Wired) -> None:
    barriers = [wired.barrier(rank) for rank in range(3)]
    wired.advance(1.0)
    assert set(barriers) <= wired.completed.keys()
    forget(wired)
    return_scheduler(wired)
    failure = wired.stopped["worker-0"]
    assert isinstance(failure, PeerLostError) and "it has come back without" in str(failure), failure


def test_a_scheduler_notices_that_it_has_forgotten_what_others_have_heard(wired: Wired) -> None:
    wired.return_scheduler()
    link = wired.processes["scheduler"].links[wired.member("worker-0")]
    stamp = Stamp(JOB, 1, wired.member("worker-0"), 0, 0, link.next_seq, 0)
    wired.hear("scheduler", Packet(stamp, Ack(wanted=False)))
    failure = wired.stopped["scheduler"]
    assert failure is not None and "its journal lacks its end" in str(failure)
