"""Servers that are each other's backups: what one does in which order of messages. The simulation has all the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction
from kvdist.core.machine import Effect, PeerConnected, PeerDisconnected, Send, Transmit
from kvdist.core.reliable import RETRY_S, Reliable
from kvdist.core.server.replica import CopiedShard, ReplicatedServer
from kvdist.core.server.shard import Shard
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member, NodeId, Role, worker
from kvdist.optimizer.base import Piece
from kvdist.optimizer.registry import create
from kvdist.optimizer.updater import Updater
from kvdist.protocol.arrays import Arrays
from kvdist.protocol.messages import (
    Assign,
    Done,
    Goodbye,
    InitValues,
    OnLoss,
    Packet,
    Peer,
    Placement,
    Replicate,
    Replicated,
    Roster,
    SetOptimizer,
    TakeRestored,
    Welcome,
)
from kvdist.version import __version__
from tests.simulation import Scenario, run

FIRST, SECOND, WORKER = Member(NodeId(Role.SERVER, 0), 11), Member(NodeId(Role.SERVER, 1), 12), Member(worker(0), 13)
ROSTER = Roster(tuple(Peer(one, "host", 1, f"tcp://host:{one.incarnation}") for one in (FIRST, SECOND, WORKER)), 1)
RULE = create("sgd", learning_rate=0.1).describe()


def stranger(rank: int) -> ReplicatedServer:
    """A server that wants this rank, and has not been welcomed."""
    about = Introduction(Role.SERVER, 7, rank, "host", 1, f"tcp://host:{rank}", 1, 2, __version__, "tcp://host:1")
    return ReplicatedServer(about, Limits(), REFERENCE, 0.0)


def welcome(server: ReplicatedServer, member: Member) -> ReplicatedServer:
    told = Welcome(member.node.rank, member.incarnation, OnLoss.CONTINUE, 0.0, 1)
    server.handle(SCHEDULER_MEMBER, told, 0.0)
    return server


def second_server() -> ReplicatedServer:
    return welcome(stranger(1), SECOND)


def sent(effects: list[Effect], to: Member) -> list[object]:
    return [effect.message for effect in effects if isinstance(effect, Send) and effect.to == to]


@pytest.mark.parametrize("is_early", [False, True], ids=["the roster first", "the other server first"])
def test_of_two_servers_the_one_that_is_dialled_tells_the_other_all_in_any_order_of_their_first_messages(
    is_early: bool,
) -> None:
    server = second_server()
    told_by_the_other = [(FIRST, ROSTER), (FIRST, SetOptimizer(0, 0, RULE))]
    told_by_the_scheduler = [(SCHEDULER_MEMBER, ROSTER), (SCHEDULER_MEMBER, SetOptimizer(5, 0, RULE))]
    both = (told_by_the_other, told_by_the_scheduler)
    told: list[object] = []
    done: list[object] = []
    for sender, message in [pair for said in (both if is_early else both[::-1]) for pair in said]:
        effects = server.handle(sender, message, 0.0)
        server.validate()
        told += [one for one in sent(effects, FIRST) if not isinstance(one, Replicated)]
        done += sent(effects, SCHEDULER_MEMBER)
    assert any(isinstance(one, SetOptimizer) for one in told), "the copy there has to have the rule"
    assert Done(5) not in done, "it is not said before the copy has it"
    effects = server.handle(FIRST, Replicated(len(told)), 0.0)
    assert Done(5) in sent(effects, SCHEDULER_MEMBER)


@pytest.mark.parametrize("mode, pushers", [("async", {0, 1}), ("sync", {None})])
def test_a_backup_knows_whose_push_an_update_is_as_its_server_does(mode: str, pushers: set[int | None]) -> None:
    places: list[str] = ["server"]
    applied: dict[str, set[int | None]] = {"server": set(), "copy": set()}
    update, replicate = Updater.update_together, CopiedShard.replicate

    def noted(self: Updater, pieces: Sequence[Piece], *numbers: Any) -> None:
        applied[places[-1]].add(numbers[-1])
        update(self, pieces, *numbers)

    def in_a_copy(self: CopiedShard, message: Replicate) -> None:
        places.append("copy")
        replicate(self, message)
        places.pop()

    with (
        mock.patch.object(Updater, "update_together", noted),
        mock.patch.object(CopiedShard, "replicate", in_a_copy),
    ):
        run(0, Scenario(rounds=5, mode=mode, optimizer="sgd", replicas=1, saves=0.0, on_loss="continue"))
    assert applied == {"server": pushers, "copy": pushers}


def goodbyes(server: ReplicatedServer, now: float) -> list[Goodbye]:
    return [one for one in sent(server.tick(now), SCHEDULER_MEMBER) if isinstance(one, Goodbye)]


def with_backup(slices: int = 1) -> ReplicatedServer:
    """The second of two servers, which has a link to the first; with slices, or without any."""
    server = second_server()
    roster = replace(ROSTER, owners=() if slices else (0, 0))
    server.handle(SCHEDULER_MEMBER, roster, 0.0)
    server.handle(FIRST, roster, 0.1)
    return server


@pytest.mark.parametrize("does_come_back", [False, True])
def test_a_server_whose_backup_only_it_cannot_reach_gives_itself_up_after_a_while(does_come_back: bool) -> None:
    server = with_backup()
    server.observe(PeerDisconnected(FIRST, "connection reset"), 1.0)
    assert not goodbyes(server, 30.9), "the scheduler may still say that the backup is lost"
    if does_come_back:
        server.observe(PeerConnected(FIRST), 30.95)
    assert not goodbyes(server, 31.0), "one without slices goes first"
    said = goodbyes(server, 33.0)
    assert bool(said) != does_come_back
    for one in said:
        assert one.failure == "it cannot reach server-0, which has the copy of its slices: connection reset"
    assert bool(goodbyes(server, 35.0)) != does_come_back, "what is said may be lost with a scheduler"


def test_of_two_servers_that_do_not_reach_each_other_the_one_without_slices_goes_first() -> None:
    server = with_backup(slices=0)
    server.observe(PeerDisconnected(FIRST, "connection reset"), 1.0)
    assert not goodbyes(server, 30.9) and goodbyes(server, 31.0)


def test_a_server_that_never_had_a_link_to_its_backup_gives_itself_up() -> None:
    server = second_server()
    server.handle(SCHEDULER_MEMBER, ROSTER, 0.0)
    assert not goodbyes(server, 30.0)
    (said,) = goodbyes(server, 32.0)
    assert said.failure.endswith("there was never a connection between them")


def test_workers_that_come_back_do_not_put_off_the_judgement_of_a_backup() -> None:
    server = with_backup()
    server.observe(PeerDisconnected(FIRST, "connection reset"), 1.0)
    for now in range(2, 31):
        server.observe(PeerConnected(WORKER), float(now))
    assert not goodbyes(server, 31.0)
    assert any(goodbyes(server, later) for later in (33.0, 35.0))


def test_a_server_takes_over_slices_of_which_the_lost_server_has_forwarded_nothing() -> None:
    server = second_server()
    server.handle(SCHEDULER_MEMBER, ROSTER, 0.0)
    placement = Placement((0, 1), (0, 1), 64)
    assign = Assign(1, 0, "sync", ("v", "w"), ((2,), (2,)), (1, 1), (1, 1), ("", ""), placement)
    server.handle(SCHEDULER_MEMBER, assign, 0.1)
    copy = server.copy
    assert copy is not None and copy.shard.holder(0) is None, "the other server has not forwarded it"
    server.handle(SCHEDULER_MEMBER, replace(ROSTER, peers=ROSTER.peers[1:], epoch=2, owners=(1, 1)), 0.2)
    assert [server.shard.holder(number) is not None for number in (0, 1)] == [True, True]


def test_rounds_that_go_back_know_which_workers_have_joined_later() -> None:
    server = second_server()
    late = replace(ROSTER.peers[2], since=5)
    server.handle(SCHEDULER_MEMBER, replace(ROSTER, peers=(*ROSTER.peers[:2], late)), 0.0)
    assign = Assign(1, 0, "sync", ("w",), ((2,),), (1,), (1,), ("",), Placement((0,), (1,), 64))
    server.handle(SCHEDULER_MEMBER, assign, 0.1)
    server._roll_back(TakeRestored(2, 0, 1))
    holder = server.shard.holder(0)
    assert holder is not None and holder.round.began == {0: 0}


def test_a_lost_workers_examples_count_alike_in_slices_that_are_taken_over() -> None:
    heir, copy = welcome(stranger(1), SECOND).shard, welcome(stranger(0), FIRST).shard
    credited: list[tuple[str, int]] = []
    for name, shard, examples in (("heir", heir, 32), ("copy", copy, 24)):
        shard._credited[7, 0] = examples
        shard.credit = partial(noted_credit, credited, name, shard)  # type: ignore[method-assign]
    heir.absorb(copy)
    assert credited == [("heir", 0), ("copy", 8)] and heir._credited == {(7, 0): 32}


def noted_credit(credited: list[tuple[str, int]], name: str, shard: Shard, fates: Sequence[Any]) -> None:
    (fate,) = fates
    credited.append((name, fate.examples - shard._credited[fate.incarnation, fate.store]))
    Shard.credit(shard, fates)


def test_a_server_does_not_judge_its_backup_while_the_scheduler_is_away() -> None:
    server = with_backup()
    server.observe(PeerDisconnected(FIRST, "connection reset"), 1.0)
    server.observe(PeerDisconnected(SCHEDULER_MEMBER, "connection reset"), 30.5)
    assert not goodbyes(server, 31.0)
    server.observe(PeerConnected(SCHEDULER_MEMBER), 31.1)
    judged_at = 31.1 + server.limits.reconnect_grace_s(True, True)
    assert not goodbyes(server, judged_at), "if it was started again, it gives up then who has not come back to it"
    assert any(goodbyes(server, judged_at + later) for later in (2.1, 4.2, 6.3))


def test_a_new_backup_that_is_spoken_to_before_its_welcome_has_all_within_seconds() -> None:
    """What comes before is dropped, without a broken connection. With so many bytes it would be repeated in minutes."""
    primary, backup = welcome(stranger(0), FIRST), stranger(1)
    links = {FIRST: Reliable(primary, 1), SECOND: Reliable(backup, 1)}
    column, count = np.zeros(1, np.uint32), 1 << 18
    alone = Roster((ROSTER.peers[0], ROSTER.peers[2]), 1, owners=(0, 0))
    placement = Placement((0,), (0,), 4 * count)
    assigned = Assign(1, 0, "sync", ("w",), ((count,),), (1,), (1,), ("",), placement)
    values = InitValues(column, column, Arrays(np.array([1], np.uint8), np.array([count], np.uint32), bytes(4 * count)))
    for sender, message in ((SCHEDULER_MEMBER, alone), (SCHEDULER_MEMBER, assigned), (WORKER, values)):
        primary.handle(sender, message, 0.0)
    under_way: list[tuple[Member, Packet]] = []

    def carry(effects: list[Effect]) -> None:
        under_way.extend((one.to, one.packet) for one in effects if isinstance(one, Transmit) and one.to in links)

    both = replace(ROSTER, epoch=2, owners=(0, 0))
    carry(links[FIRST].perform(lambda: primary.handle(SCHEDULER_MEMBER, both, 0.0), 0.0))
    for to, packet in under_way:
        assert not links[to].receive(packet, 0.0), "it does not know its own name"
    under_way.clear()
    welcome(backup, SECOND)
    carry(links[SECOND].perform(lambda: backup.handle(SCHEDULER_MEMBER, both, 0.0), 0.0))
    now = 0.0
    while now < 2 * RETRY_S:
        now += 0.1
        for link in links.values():
            carry(link.tick(now))
        while under_way:
            to, packet = under_way.pop(0)
            carry(links[to].receive(packet, now))
        primary.validate()
        backup.validate()
    assert primary.is_whole and primary.epoch == both.epoch
