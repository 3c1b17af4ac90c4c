"""When workers push under a quota: what the server that counts says, and what becomes of it when others are there."""

from __future__ import annotations

import pytest

from kvdist.core.machine import Send
from kvdist.core.server.peers import Peers
from kvdist.core.server.progress import Quotas
from kvdist.nodes import Member, worker
from kvdist.protocol.messages import Due, DueWhen, NotDue, Progress

WORKERS = [Member(worker(rank), 10 + rank) for rank in range(3)]


@pytest.fixture
def peers() -> Peers:
    peers = Peers()
    peers.workers = dict(enumerate(WORKERS))
    peers.rest(set())
    return peers


def said(samples: int, step: int = 0, *, now: bool = False, together: bool = False) -> Progress:
    return Progress(7, step, samples, DueWhen.QUOTA, 20, now, together)


def due(effects: object) -> dict[int, Due]:
    assert isinstance(effects, list)
    told = {}
    for effect in effects:
        assert isinstance(effect, Send) and isinstance(effect.message, Due)
        told[effect.to.node.rank] = effect.message
    return told


def everybody(step: int, together: bool = False) -> dict[int, Due]:
    return dict.fromkeys(range(3), Due(7, step, together, 0))


def test_a_push_is_due_when_all_together_have_made_enough(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert not quotas.heard(WORKERS[0], said(12), 0.0) and not quotas.heard(WORKERS[1], said(7), 0.0)
    assert due(quotas.heard(WORKERS[1], said(8), 0.0)) == everybody(0)


def awaited(effects: object) -> tuple[int, ...]:
    """Who is awaited, as one worker is told."""
    assert isinstance(effects, list)
    (told,) = effects
    assert isinstance(told, Send) and isinstance(told.message, NotDue)
    return told.message.ranks


def test_a_report_that_is_repeated_counts_once_and_hears_who_is_awaited(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert not quotas.heard(WORKERS[0], said(9), 0.0)
    assert [awaited(quotas.heard(WORKERS[0], said(9), 0.0)) for _ in range(5)] == [(1, 2)] * 5


@pytest.mark.parametrize("rests", [False, True])
def test_who_waits_for_all_hears_who_has_not_come(peers: Peers, rests: bool) -> None:
    quotas = Quotas(peers)
    peers.rest({1} if rests else set())
    assert not quotas.heard(WORKERS[0], said(1, together=True), 0.0)
    assert awaited(quotas.heard(WORKERS[0], said(1, together=True), 0.0)) == ((2,) if rests else (1, 2))
    if not rests:
        assert not quotas.heard(WORKERS[2], said(0, together=True), 0.0)
        assert awaited(quotas.heard(WORKERS[0], said(1, together=True), 0.0)) == (1,)


def test_what_was_made_before_the_last_push_does_not_count_for_the_next(peers: Peers) -> None:
    quotas = Quotas(peers)
    quotas.heard(WORKERS[0], said(15), 0.0)
    assert due(quotas.heard(WORKERS[1], said(15), 0.0)) == everybody(0)
    assert not quotas.heard(WORKERS[1], said(15, step=1), 0.0)
    assert due(quotas.heard(WORKERS[2], said(30), 0.0)) == {2: Due(7, 0, False, 0)}, (
        "it has not pushed for the first time"
    )
    assert due(quotas.heard(WORKERS[0], said(5, step=1), 0.0)) == everybody(1)


def test_one_worker_alone_may_say_that_it_is_time(peers: Peers) -> None:
    assert due(Quotas(peers).heard(WORKERS[2], said(0, now=True), 0.0)) == everybody(0)


def test_all_that_are_awaited_wait_for_each_other(peers: Peers) -> None:
    quotas = Quotas(peers)
    peers.rest({1})
    assert not quotas.heard(WORKERS[0], said(1, together=True), 0.0)
    assert due(quotas.heard(WORKERS[2], said(0, together=True), 0.0)) == everybody(0, together=True)


def test_who_is_lost_or_rests_is_not_waited_for(peers: Peers) -> None:
    quotas = Quotas(peers)
    quotas.heard(WORKERS[0], said(1, together=True), 0.0), quotas.heard(WORKERS[1], said(1, together=True), 0.0)
    del peers.workers[2]
    peers.rest(set())
    assert due(quotas.roster(0.0)) == dict.fromkeys(range(2), Due(7, 0, True, 0))


def test_what_a_lost_worker_has_made_does_not_count(peers: Peers) -> None:
    quotas = Quotas(peers)
    quotas.heard(WORKERS[2], said(15), 0.0)
    del peers.workers[2]
    peers.rest(set())
    assert not quotas.roster(0.0) and not quotas.heard(WORKERS[0], said(10), 0.0)


def test_a_server_that_knows_nothing_learns_from_who_has_pushed_that_it_was_due(peers: Peers) -> None:
    heir = Quotas(peers)
    assert not heir.heard(WORKERS[0], said(3, step=5, together=True), 0.0)
    assert due(heir.heard(WORKERS[1], said(0, step=6), 0.0)) == everybody(5)


def test_who_has_joined_later_does_not_know_what_was_due(peers: Peers) -> None:
    quotas = Quotas(peers)
    peers.since[1] = 6
    assert not quotas.heard(WORKERS[0], said(3, step=5), 0.0) and not quotas.heard(WORKERS[1], said(9, step=6), 0.0)
    assert due(quotas.heard(WORKERS[2], said(17, step=5), 0.0)) == everybody(5)


def test_after_the_way_back_to_a_snapshot_nothing_of_before_counts(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert quotas.heard(WORKERS[0], said(20, step=9), 0.0)
    quotas.clear()
    assert not quotas.heard(WORKERS[0], said(19, step=4), 0.0)
    assert due(quotas.heard(WORKERS[1], said(1, step=4), 0.0)) == everybody(4)


# Enough workers in place of enough examples.


def ready(step: int = 0, *, made: int = 1, number: int = 2, together: bool = False) -> Progress:
    return Progress(7, step, made, DueWhen.QUORUM, number, False, together)


def test_a_push_is_due_when_a_quorum_of_workers_has_something(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert not quotas.heard(WORKERS[0], ready(), 0.0)
    assert awaited(quotas.heard(WORKERS[0], ready(), 0.0)) == (1, 2), "once more from the same worker is not enough"
    assert not quotas.heard(WORKERS[1], ready(made=0), 0.0)
    assert due(quotas.heard(WORKERS[2], ready(), 0.0)) == everybody(0)
    assert not quotas.heard(WORKERS[0], ready(1), 0.0), "the one that was late has nothing for the next one yet"
    assert due(quotas.heard(WORKERS[1], ready(1), 0.0)) == everybody(1)


@pytest.mark.parametrize("change", ["lost", "rests", "waits for all"])
def test_who_cannot_have_anything_is_not_counted_among_the_workers(peers: Peers, change: str) -> None:
    quotas = Quotas(peers)
    assert not quotas.heard(WORKERS[0], ready(number=3), 0.0) and not quotas.heard(WORKERS[2], ready(number=3), 0.0)
    if change == "waits for all":
        assert due(quotas.heard(WORKERS[1], ready(made=0, number=3, together=True), 0.0)) == everybody(0)
        return
    if change == "lost":
        del peers.workers[1]
    peers.rest({1} if change == "rests" else set())
    assert set(due(quotas.roster(0.0))) == set(peers.workers), "all that can have something have it"


def test_what_a_lost_worker_had_does_not_make_a_version(peers: Peers) -> None:
    quotas = Quotas(peers)
    for one in WORKERS[:2]:
        assert not quotas.heard(one, ready(number=3), 0.0)
    del peers.workers[1]
    peers.rest(set())
    assert not quotas.roster(0.0)
    assert due(quotas.heard(WORKERS[2], ready(number=3), 0.0)), "both that are there have it"


def played(quotas: Quotas, arrivals: list[tuple[float, int]], step: int) -> float:
    """When the push is due, if workers come at these times."""
    for now, rank in arrivals:
        if quotas.deadline <= now:
            at = quotas.deadline
            assert due(quotas.tick(at)) == everybody(step)
            return at
        if quotas.heard(WORKERS[rank], ready(step), now):
            return now
    at = quotas.deadline
    assert due(quotas.tick(at)) == everybody(step)
    return at


def test_a_quorum_waits_as_long_as_others_have_needed_lately_and_not_for_one_that_is_always_slow(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert played(quotas, [(10.0, 0), (10.1, 1)], 0) == 10.1, "nothing is known yet"
    assert not quotas.heard(WORKERS[2], ready(1), 10.3), "it was late by 0.2 s"
    assert played(quotas, [(20.0, 0)], 1) == pytest.approx(20.0 + 1.5 * 0.2), "now it has come first"
    assert played(quotas, [(30.0, 1), (30.1, 0), (30.35, 2)], 2) == 30.35, "within the grace"
    assert played(quotas, [(40.0, 1), (40.1, 0)], 3) == pytest.approx(40.1 + 1.5 * 0.25), "no longer than that"
    for step in range(4, 30):  # worker 2 needs six times as long as the others
        now = 10.0 * step + 10.0
        if step % 6 == 5:
            quotas.heard(WORKERS[2], ready(step), now - 4.0)
        at = played(quotas, [(now, 1), (now + 0.1, 0)], step)
    assert at == now + 0.1, "what it waited for in vain is forgotten"


def test_the_grace_of_a_quorum_that_is_lost_ends(peers: Peers) -> None:
    quotas = Quotas(peers)
    played(quotas, [(10.0, 0), (10.1, 1)], 0)
    quotas.heard(WORKERS[2], ready(1), 10.3)
    assert played(quotas, [(20.0, 0)], 1) > 20.0
    played(quotas, [(30.0, 1), (30.1, 0)], 2)
    quotas.heard(WORKERS[0], ready(3), 40.0), quotas.heard(WORKERS[1], ready(3), 40.0)
    assert 40.0 < quotas.deadline < 50.0
    for rank in (0, 1):
        del peers.workers[rank]
    peers.rest(set())
    assert not quotas.roster(40.1) and not quotas.tick(50.0)
    assert quotas.deadline > 1e6, "nobody is there to wait for others"
    assert due(quotas.heard(WORKERS[2], ready(3), 60.0)) == {2: Due(7, 3, False, 0)}


# Each push is a version.


def asks(quotas: Quotas, rank: int, step: int) -> Due:
    (told,) = due(quotas.heard(WORKERS[rank], Progress(7, step, 1, DueWhen.ASYNC, 2, False, False), 0.0)).items()
    assert told[0] == rank
    return told[1]


def test_who_joins_has_the_weights_of_then(peers: Peers) -> None:
    quotas = Quotas(peers)
    peers.newcomers[2] = peers.workers.pop(2)
    peers.rest(set())
    for step in range(4):
        asks(quotas, 0, step)
    peers.workers[2], peers.since[2] = peers.newcomers.pop(2), 12
    peers.rest(set())
    assert asks(quotas, 1, 0).delay == 4, "it was there"
    assert asks(quotas, 0, 4).delay == 0, "what was dropped is no version"
    assert asks(quotas, 2, 12).delay == 1, "its pushes are numbered elsewhere"


def test_another_process_of_a_lost_worker_begins_anew(peers: Peers) -> None:
    quotas = Quotas(peers)
    asks(quotas, 2, 5), asks(quotas, 0, 0)
    peers.workers[2] = again = Member(worker(2), 99)
    peers.rest(set())
    assert quotas.roster(0.0) == []
    asks(quotas, 0, 1)
    assert due(quotas.heard(again, Progress(7, 3, 1, DueWhen.ASYNC, 2, False, False), 0.0)) == {2: Due(7, 3, False, 1)}


def test_a_gradient_is_as_late_as_pushes_were_let_through_since_the_weights_came(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert asks(quotas, 0, 0) == Due(7, 0, False, 0)
    assert asks(quotas, 1, 0) == Due(7, 0, False, 1)
    assert asks(quotas, 0, 1) == Due(7, 1, False, 1)
    assert asks(quotas, 2, 0) == Due(7, 0, False, 3), "dropped: it is no version"
    assert asks(quotas, 2, 0) == Due(7, 0, False, 3), "a question that is repeated has the same answer"
    assert asks(quotas, 2, 1) == Due(7, 1, False, 0), "it got the newest weights instead"
    assert asks(quotas, 1, 1) == Due(7, 1, False, 2)
