"""When workers push under a quota: what the server that counts says, and what becomes of it when others are there."""

from __future__ import annotations

import pytest

from kvdist.core.machine import Send
from kvdist.core.server.peers import Peers
from kvdist.core.server.progress import Quotas
from kvdist.nodes import Member, worker
from kvdist.protocol.messages import Due, Progress

WORKERS = [Member(worker(rank), 10 + rank) for rank in range(3)]


@pytest.fixture
def peers() -> Peers:
    peers = Peers()
    peers.workers = dict(enumerate(WORKERS))
    peers.rest(set())
    return peers


def said(samples: int, step: int = 0, *, now: bool = False, together: bool = False) -> Progress:
    return Progress(7, step, samples, 20, now, together)


def due(effects: object) -> dict[int, Due]:
    assert isinstance(effects, list)
    told = {}
    for effect in effects:
        assert isinstance(effect, Send) and isinstance(effect.message, Due)
        told[effect.to.node.rank] = effect.message
    return told


def everybody(step: int, together: bool = False) -> dict[int, Due]:
    return dict.fromkeys(range(3), Due(7, step, together))


def test_a_push_is_due_when_all_together_have_made_enough(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert not quotas.heard(WORKERS[0], said(12)) and not quotas.heard(WORKERS[1], said(7))
    assert due(quotas.heard(WORKERS[1], said(8))) == everybody(0)


def test_a_report_that_is_repeated_counts_once(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert not any(quotas.heard(WORKERS[0], said(9)) for _ in range(5))


def test_what_was_made_before_the_last_push_does_not_count_for_the_next(peers: Peers) -> None:
    quotas = Quotas(peers)
    quotas.heard(WORKERS[0], said(15))
    assert due(quotas.heard(WORKERS[1], said(15))) == everybody(0)
    assert not quotas.heard(WORKERS[1], said(15, step=1))
    assert due(quotas.heard(WORKERS[2], said(30))) == {2: Due(7, 0, False)}, "it has not pushed for the first time"
    assert due(quotas.heard(WORKERS[0], said(5, step=1))) == everybody(1)


def test_one_worker_alone_may_say_that_it_is_time(peers: Peers) -> None:
    assert due(Quotas(peers).heard(WORKERS[2], said(0, now=True))) == everybody(0)


def test_all_that_are_awaited_wait_for_each_other(peers: Peers) -> None:
    quotas = Quotas(peers)
    peers.rest({1})
    assert not quotas.heard(WORKERS[0], said(1, together=True))
    assert due(quotas.heard(WORKERS[2], said(0, together=True))) == everybody(0, together=True)


def test_who_is_lost_or_rests_is_not_waited_for(peers: Peers) -> None:
    quotas = Quotas(peers)
    quotas.heard(WORKERS[0], said(1, together=True)), quotas.heard(WORKERS[1], said(1, together=True))
    del peers.workers[2]
    peers.rest(set())
    assert due(quotas.roster()) == dict.fromkeys(range(2), Due(7, 0, True))


def test_what_a_lost_worker_has_made_does_not_count(peers: Peers) -> None:
    quotas = Quotas(peers)
    quotas.heard(WORKERS[2], said(15))
    del peers.workers[2]
    peers.rest(set())
    assert not quotas.roster() and not quotas.heard(WORKERS[0], said(10))


def test_a_server_that_knows_nothing_learns_from_who_has_pushed_that_it_was_due(peers: Peers) -> None:
    heir = Quotas(peers)
    assert not heir.heard(WORKERS[0], said(3, step=5, together=True))
    assert due(heir.heard(WORKERS[1], said(0, step=6))) == everybody(5)


def test_who_has_joined_later_does_not_know_what_was_due(peers: Peers) -> None:
    quotas = Quotas(peers)
    peers.since[1] = 6
    assert not quotas.heard(WORKERS[0], said(3, step=5)) and not quotas.heard(WORKERS[1], said(9, step=6))
    assert due(quotas.heard(WORKERS[2], said(17, step=5))) == everybody(5)


def test_after_the_way_back_to_a_snapshot_nothing_of_before_counts(peers: Peers) -> None:
    quotas = Quotas(peers)
    assert quotas.heard(WORKERS[0], said(20, step=9))
    quotas.clear()
    assert not quotas.heard(WORKERS[0], said(19, step=4))
    assert due(quotas.heard(WORKERS[1], said(1, step=4))) == everybody(4)
