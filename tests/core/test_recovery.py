"""A scheduler that was killed and started again: what it learns from others, what it decides, who is heard."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvdist.checkpoint.snapshot import FileRecord, LockFolder, WriteManifest
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import ChildEnded, Effect, Halt, PeerDisconnected, Persisted, Send, Transmit
from kvdist.core.worker.newcomer import Newcomer
from kvdist.core.worker.requests import ClaimFolder, TakePart
from kvdist.errors import FencedError, InitMismatch, OptimizerMismatch, PeerLostError
from kvdist.nodes import UNRANKED, Member, NodeId, Role, worker
from kvdist.protocol.messages import Command, Hello, Lease, Packet, Rejected, Reregister, Rewind, Stamp, Used, Waiting
from tests.core.wired import JOB, Wired

REGISTER = Reregister(9, (), (), (), (), (), (), "", ())
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


def return_scheduler(wired: Wired, term: int = 2) -> None:
    wired.return_scheduler(term)
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


def test_questions_have_other_numbers_than_those_of_the_last_one(wired: Wired) -> None:
    return_scheduler(wired)
    wired.log.clear()
    for rank in range(3):
        wired.declare(rank, {"late": (2,)})
    wired.settle()
    (assigned,) = [line for line in wired.log if "-> server-0: Assign(" in line]
    assert int(assigned.partition("request=")[2].partition(",")[0]) > 1 << 32


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


def test_a_command_that_is_repeated_runs_once() -> None:
    ran: list[tuple[int, str]] = []
    wired = trained(2, 2, handlers={7: lambda head, body, rank: ran.append((rank, body))})
    request = wired.ask(1, lambda number: Command(number, 7, "do"))
    while not ran:
        wired.deliver()
    return_scheduler(wired)
    assert request in wired.completed
    assert sorted(ran) == [(0, "do"), (1, "do")]


def test_who_was_lost_stays_so_and_its_rank_is_not_awaited(wired: Wired) -> None:
    zombie = wired.member("worker-1")
    wired.observe("scheduler", PeerDisconnected(zombie, "no sign of life", after_silence=True))
    wired.advance(10.0)
    epoch = wired.scheduler.epoch
    return_scheduler(wired)
    assert wired.scheduler.epoch > epoch
    assert wired.scheduler.membership.lost.keys() == {zombie}
    assert isinstance(wired.stopped["worker-1"], FencedError)
    barriers = [wired.barrier(rank) for rank in (0, 2)]
    wired.settle()
    assert set(barriers) <= wired.completed.keys()


def test_who_does_not_register_is_given_up_after_its_time(wired: Wired) -> None:
    wired.stopped["worker-2"] = None
    wired.return_scheduler()
    barriers = [wired.barrier(rank) for rank in (0, 1)]
    wired.advance(59.0)
    assert "waits for worker-2 (pid 102 on host-2) to register" in str(wired.scheduler.explain(wired.now))
    assert not wired.completed.keys() & set(barriers)
    wired.advance(2.0)
    assert set(barriers) <= wired.completed.keys()
    assert any("worker-2 (host host-2, pid 102) was lost: did not register within 60 s" in one for one in wired.reports)


def test_whom_the_launcher_has_seen_end_is_not_waited_for(wired: Wired) -> None:
    wired.stopped["worker-2"] = None
    wired.return_scheduler()
    wired.observe("scheduler", ChildEnded(worker(2), KILLED, clean=False))
    barriers = [wired.barrier(rank) for rank in (0, 1)]
    wired.advance(1.0)
    assert set(barriers) <= wired.completed.keys()
    assert any(KILLED in one for one in wired.reports)


def test_a_process_is_not_waited_for_of_whose_rank_a_later_one_has_ended(wired: Wired) -> None:
    wired.stopped["worker-2"] = None
    wired.return_scheduler()
    wired.observe("scheduler", ChildEnded(worker(2), "exited with code 0", clean=True, life=1))
    barriers = [wired.barrier(rank) for rank in (0, 1)]
    wired.advance(1.0)
    assert set(barriers) <= wired.completed.keys()
    told = "worker-2 (host host-2, pid 102) was lost: it has ended, and its rank was started again since"
    assert any(told in one for one in wired.reports), wired.reports


def test_a_process_is_waited_for_of_whose_rank_an_earlier_one_has_ended(wired: Wired) -> None:
    wired.kill("worker-2")
    wired.come_back(2)
    wired.stopped["worker-2"] = None
    wired.return_scheduler()
    wired.observe("scheduler", ChildEnded(worker(2), KILLED, clean=False))
    wired.advance(59.0)
    assert "waits for worker-2 (pid 102 on host-2) to register" in str(wired.scheduler.explain(wired.now))


def test_a_newcomer_waits_as_long_as_the_scheduler_that_was_started_again_does(wired: Wired) -> None:
    wired.stopped["worker-1"] = wired.stopped["worker-2"] = None
    wired.return_scheduler()
    wired.come_back(1, 45.0)
    awaited = "worker-1 (pid 101 on host-1), worker-2 (pid 102 on host-2)"
    hint = f"waiting for {awaited} to register with the scheduler that was started again"
    assert hint in str(wired.workers[1].explain(wired.now))
    wired.advance(20.0)
    assert "worker-1" not in wired.stopped
    assert wired.scheduler.membership.newcomers == {worker(1): wired.member("worker-1")}


def test_where_a_loss_ends_the_job_all_that_are_missing_are_named() -> None:
    wired = Wired(3, 1, on_loss="fail", scheduler_away_s=5.0)
    for name in ("worker-1", "worker-2"):
        wired.stopped[name] = None
    wired.return_scheduler()
    wired.advance(6.0)
    for name in ("scheduler", "server-0", "worker-0"):
        failure = wired.stopped[name]
        assert isinstance(failure, PeerLostError)
        assert str(failure).startswith("worker-1, worker-2 did not register within 5 s"), failure


def test_a_job_whose_last_worker_has_left_meanwhile_ends_well(wired: Wired) -> None:
    for rank in range(3):
        wired.leave(rank)
    while not any(str(one[2].message).startswith("Stop") for one in wired.wire):
        wired.deliver()
    ended = [rank for rank in range(3) if f"worker-{rank}" in wired.stopped]
    wired.return_scheduler()
    for rank in ended:
        wired.observe("scheduler", ChildEnded(worker(rank), "exited with code 0", clean=True))
    wired.advance(10.0)
    assert {name: failure for name, failure in wired.stopped.items() if failure is not None} == {}
    assert wired.stopped.keys() == wired.processes.keys()


def with_nobody_left(wired: Wired) -> None:
    """All have ended, and the scheduler was killed before it could; it is started again."""
    for rank in range(3):
        wired.leave(rank)
    wired.advance(1.0)
    assert wired.stopped.keys() == wired.processes.keys()
    del wired.stopped["scheduler"]
    wired.return_scheduler()


def test_a_process_that_comes_when_servers_have_ended_well_hears_at_once_that_the_job_is_over(wired: Wired) -> None:
    with_nobody_left(wired)
    late = Member(NodeId(Role.WORKER, UNRANKED), 77)
    (answer,) = wired.scheduler.handle(late, Hello(1, "host", 7, "", 3, 2, "9"), wired.now)
    assert isinstance(answer, Send) and isinstance(answer.message, Waiting)
    assert not wired.scheduler.observe(ChildEnded(worker(1), KILLED, clean=False), wired.now), "it is its rank"
    assert not wired.scheduler.observe(ChildEnded(NodeId(Role.SERVER, 0), "exited", clean=True), wired.now)
    told, end = wired.scheduler.observe(ChildEnded(NodeId(Role.SERVER, 1), "exited", clean=True), wired.now)
    assert isinstance(told, Send) and told.to == late
    assert isinstance(told.message, Rejected) and told.message.is_over
    assert isinstance(end, Halt) and end.error is None


def test_a_worker_that_had_joined_later_and_has_failed_is_named_by_a_scheduler_that_finds_nobody(wired: Wired) -> None:
    with_nobody_left(wired)
    for rank in range(4):
        wired.observe("scheduler", ChildEnded(worker(rank), KILLED if rank == 3 else "exited", clean=rank < 3))
    wired.advance(61.0)
    assert "worker-3" in str(wired.stopped["scheduler"])


def test_a_job_of_which_nobody_is_left_has_ended_well_if_its_workers_have(wired: Wired) -> None:
    with_nobody_left(wired)
    wired.observe("scheduler", ChildEnded(NodeId(Role.SERVER, 0), KILLED, clean=False))
    for rank in range(3):
        wired.observe("scheduler", ChildEnded(worker(rank), "exited with code 0", clean=True))
    wired.advance(59.0)
    assert "scheduler" not in wired.stopped, "some may still register"
    wired.advance(2.0)
    assert wired.stopped["scheduler"] is None


def test_the_lock_of_a_folder_is_taken_again_with_the_run_that_files_name(wired: Wired, tmp_path: Path) -> None:
    folder = str(tmp_path / "step-0")
    claims = [wired.ask(rank, lambda number: ClaimFolder(number, 0, folder, ("weights",))) for rank in range(2)]
    wired.settle_works()
    run = wired.completed[claims[0]]
    return_scheduler(wired)
    work = wired.works[0].work
    assert isinstance(work, LockFolder) and work.run == run
    wired.settle_works()
    claim = wired.ask(2, lambda number: ClaimFolder(number, 0, folder, ("weights",)))
    wired.settle_works()
    assert wired.completed[claim] == run


def test_messages_of_an_older_term_change_nothing_and_tell_who_sends_them_of_the_new_one(wired: Wired) -> None:
    return_scheduler(wired)
    sender = wired.member("worker-0")
    before = wired.scheduler.membership.workers.copy()
    wired.hear("scheduler", Packet(Stamp(JOB, 1, 1, sender, 0, 77, 0, 0), REGISTER))
    assert wired.scheduler.membership.workers == before
    assert wired.log[-1].endswith("scheduler -> worker-0: Ack(wanted=False)")


def test_a_scheduler_whose_place_was_taken_ends_itself(wired: Wired) -> None:
    sender = wired.member("worker-0")
    wired.hear("scheduler", Packet(Stamp(JOB, 2, 1, sender, 0, 1, 0, 0), REGISTER))
    failure = wired.stopped["scheduler"]
    assert isinstance(failure, FencedError)
    assert "a scheduler of term 2 has taken the place of this one, of term 1" in str(failure)


def test_a_cut_that_not_all_servers_have_heard_of_is_told_again(wired: Wired) -> None:
    told, untold = (server.peers for server in wired.servers)
    told.since[2] = 1
    untold.newcomers[2] = untold.workers.pop(2)
    untold.rest(set())
    return_scheduler(wired)
    assert told.since == untold.since == {2: 1}
    assert untold.awaited == {0, 1, 2}
    assert wired.scheduler.membership.since == {wired.member("worker-2"): 1}


def test_what_servers_have_promised_the_last_one_ends(wired: Wired) -> None:
    for server in wired.servers:
        server.dense.promise(1)
    return_scheduler(wired)
    assert all(block.round.admission is None for server in wired.servers for block in server.dense)
    for _ in range(3):
        reads = [wired.pushpull(rank, {"w": [1, 1, 1], "b": [1]}) for rank in range(3)]
        wired.settle()
    assert [wired.value(read, "w") for read in reads] == [[9, 9, 9]] * 3


def test_a_worker_that_looks_on_says_once_more_that_it_wants_to_be_a_member(wired: Wired) -> None:
    for server in wired.servers:
        server.peers.newcomers[2] = server.peers.workers.pop(2)
        server.peers.rest(set())
    late = wired.workers[2]
    late._newcomer = Newcomer(late.transfers, late.servers)
    asked = wired.ask(2, lambda number: TakePart(number, 0))
    wired.settle()
    assert asked not in wired.completed, "the last scheduler has not made a cut"
    return_scheduler(wired)
    assert asked in wired.completed
    assert [server.peers.since for server in wired.servers] == [{2: 1}, {2: 1}]
    assert wired.scheduler.membership.since == {wired.member("worker-2"): 1}


def lease(wired: Wired, rank: int, used: int = 0, *, length: int = 1000, rests: bool = False) -> int:
    return wired.ask(rank, lambda number: Lease(number, 0, 0, length, 1, True, 7, 4, 16, used, 0, rests))


def given(wired: Wired, request: int) -> tuple[int, int]:
    leased = wired.completed[request]
    return leased.start, leased.stop


def deliver_until_noted(wired: Wired, count: int) -> None:
    """Until so many servers know what the next grant is."""
    before = [server._rested for server in wired.servers]
    while sum(one is not server._rested for one, server in zip(before, wired.servers, strict=True)) < count:
        wired.deliver()


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_a_lease_that_was_given_and_not_said_is_given_once(wired: Wired, servers: int) -> None:
    first = lease(wired, 0)
    wired.settle()
    second = lease(wired, 1)
    deliver_until_noted(wired, servers)
    assert second not in wired.completed
    return_scheduler(wired)
    third = lease(wired, 2)
    wired.settle()
    assert [given(wired, one) for one in (first, second, third)] == [(0, 16), (16, 32), (32, 48)]


def test_a_scheduler_that_repeats_a_lease_and_dies_has_told_all_servers_before(wired: Wired) -> None:
    """One server alone has heard of it from the first scheduler, and is silent when the third asks."""
    given_first = lease(wired, 0)
    deliver_until_noted(wired, 1)
    return_scheduler(wired)
    assert given(wired, given_first) == (0, 16)
    assert len({server._rested.note for server in wired.servers if server._rested is not None}) == 1
    return_scheduler(wired, 3)
    other = lease(wired, 1)
    wired.settle()
    assert given(wired, other) == (16, 32)


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
    return_scheduler(wired, 3)
    ended = [lease(wired, rank, used, length=8, rests=True) for rank, used in ((0, 0), (1, 8))]
    wired.settle()
    assert wired.completed[ended[0]].is_over and wired.completed[ended[1]].is_over and wired.completed[resting].is_over
    assert wired.completed[resting].barriers.tolist() == [1]


def test_no_note_is_kept_where_the_scheduler_is_not_started_again() -> None:
    wired = trained(2, 1, on_loss="fail")
    wired.log.clear()
    lease(wired, 0)
    wired.settle()
    assert not [line for line in wired.log if "Rest(" in line] and wired.servers[0]._rested is None


def test_what_servers_have_said_of_losses_is_said_again_in_one_line_of_each_process_once(wired: Wired) -> None:
    for rank in range(3):
        wired.push(rank, {"w": [1, 1, 1], "b": [1]})
    wired.settle()
    wired.kill("worker-2")
    wired.advance(1.0)
    said = "worker-2: its first push is in the weights"
    assert sum(report.startswith(said) for report in wired.reports) == 1, wired.reports
    wired.kill("worker-1")
    wired.advance(1.0)
    return_scheduler(wired)
    (report,) = [one for one in wired.reports if "that were lost before" in one]
    assert report.endswith("these pushes are in the weights: worker-2 (1), worker-1 (1)"), report


def test_a_stranger_cannot_end_a_scheduler_by_naming_a_later_term(wired: Wired) -> None:
    stranger = Member(NodeId(Role.WORKER, UNRANKED), 99)
    hello = Hello(0, "host-9", 9, "", 3, 2, "0.0")
    unknown = Member(worker(0), 12345)
    for source, said in ((stranger, hello), (unknown, Command(1, 1, ""))):
        effects = wired.processes["scheduler"].receive(Packet(Stamp(JOB, 9, 0, source, 0, 0, 0, 0), said), wired.now)
        (said_to_it,) = [effect.packet.message for effect in effects if isinstance(effect, Transmit)]
        assert isinstance(said_to_it, Rejected | Waiting)
        assert not any(isinstance(effect, Halt) for effect in effects)
    assert wired.scheduler.term == 1


def test_nobody_listens_to_a_scheduler_of_an_older_term(wired: Wired) -> None:
    old = wired.processes["scheduler"].links[wired.member("worker-0")].next_seq
    return_scheduler(wired)
    stopped = wired.stopped.copy()
    stamp = Stamp(JOB, 1, 1, SCHEDULER_MEMBER, wired.member("worker-0").incarnation, old, 0, 0)
    wired.hear("worker-0", Packet(stamp, Command(1, 1, "")))
    assert wired.processes["worker-0"].machine.term == 2
    assert wired.stopped == stopped


def test_a_process_that_knows_no_roster_yet_cannot_be_known_to_the_new_one() -> None:
    wired = Wired(2, 1, on_loss="continue", form=False)
    wired.stopped["worker-1"] = None
    wired.advance(1.0)
    wired.return_scheduler()
    wired.advance(1.0)
    for name in ("worker-0", "server-0"):
        assert "it was started again before this process had heard who is there" in str(wired.stopped[name])


def test_a_later_process_gets_a_later_incarnation(wired: Wired) -> None:
    return_scheduler(wired)
    known = [peer.member.incarnation for peer in wired.scheduler.membership.peers.values()]
    assert wired.scheduler.membership._next_incarnation > max(known)


def test_a_worker_that_goes_back_to_a_snapshot_when_the_scheduler_is_lost_says_what_to_do() -> None:
    wired = trained(snapshots="/data/run")
    rewind = Rewind(1, 0, "server-1 was lost: all go back to step 0")
    told: list[Effect] = [Send(wired.member("worker-0"), rewind)]
    wired.carry_out("scheduler", wired.processes["scheduler"].perform(lambda: told, wired.now))
    wired.settle()
    return_scheduler(wired)
    failure = wired.stopped["worker-0"]
    assert isinstance(failure, PeerLostError)
    assert "it was started again while servers went back to a snapshot, which a new scheduler cannot" in str(failure)
    assert "start the job again, and read the newest snapshot with load_checkpoint" in str(failure)
    assert "worker-1" not in wired.stopped, "it goes on"


def test_a_scheduler_that_knows_no_snapshot_says_why_and_where_there_may_be_one() -> None:
    wired = trained(snapshots="/data/run")
    wired.stopped["server-1"] = None
    wired.return_scheduler()
    wired.observe("scheduler", ChildEnded(NodeId(Role.SERVER, 1), KILLED, clean=False))
    wired.advance(1.0)
    said = str(wired.stopped["scheduler"])
    assert "nobody can go back: the scheduler was started again, and knows no snapshot that all servers have" in said
    assert "if there is one in /data/run, load_checkpoint reads it when the job is started again" in said


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
