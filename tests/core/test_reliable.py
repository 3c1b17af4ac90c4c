"""Exactly once, in order: a machine that writes down what it hears, behind `Reliable`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvdist.core.machine import (
    ACK_BYTES_MAX,
    NEVER,
    Bind,
    Effect,
    Event,
    Forget,
    Machine,
    PeerConnected,
    PeerDisconnected,
    Send,
    Transmit,
    Unreachable,
)
from kvdist.core.reliable import ACK_DELAY_S, ANSWER_S_MAX, RETRY_MAX_S, RETRY_S, SLOWEST_BYTES_PER_S, Reliable
from kvdist.nodes import UNRANKED, Member, NodeId, Role, server, worker
from kvdist.protocol import wire
from kvdist.protocol.arrays import Arrays
from kvdist.protocol.messages import Ack, Alive, Done, InitValues, Message, Packet, Rejected, Stamp
from tests.cases import each
from tests.protocol.conftest import messages

JOB = 7
ANN, BOB = Member(worker(0), 1), Member(server(0), 2)


class Notebook(Machine):
    """Writes down what it hears."""

    def __init__(self, me: Member) -> None:
        self.me = me
        self.epoch = 0
        self.step = 0
        self.steps: dict[Member, int] = {}
        self.heard: list[Message] = []
        self.returned: list[object] = []
        self.events: list[Event] = []
        self.answers: list[Effect] = []
        self.refusals: dict[Member, str] = {}

    def refuses(self, source: Member, message: Message) -> str | None:
        return self.refusals.get(source)

    def handle(self, sender: Member, message: Message, now: float) -> list[Effect]:
        self.heard.append(message)
        answers, self.answers = self.answers, []
        return answers

    def observe(self, event: Event, now: float) -> list[Effect]:
        self.events.append(event)
        return []

    def tick(self, now: float) -> list[Effect]:
        return []

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[Effect]:
        self.returned += tokens
        return []

    @property
    def deadline(self) -> float:
        return NEVER

    @property
    def waiting_since(self) -> float | None:
        return None

    def explain(self, now: float) -> str | None:
        return None

    def validate(self) -> None:
        pass


class Pair:
    """Ann says numbers to Bob."""

    def __init__(self) -> None:
        self.ann, self.bob = Notebook(ANN), Notebook(BOB)
        self.from_ann, self.from_bob = Reliable(self.ann, JOB), Reliable(self.bob, JOB)

    def say(self, *numbers: int, now: float = 0.0) -> list[Packet]:
        effects = self.from_ann.perform(lambda: [Send(BOB, Done(n), token=n) for n in numbers], now)
        return packets(effects)

    def bob_hears(self, *heard: Packet, now: float = 0.0) -> list[Packet]:
        return [said for packet in heard for said in packets(self.from_bob.receive(packet, now))]

    def ann_hears(self, *heard: Packet, now: float = 0.0) -> list[Packet]:
        return [said for packet in heard for said in packets(self.from_ann.receive(packet, now))]

    @property
    def numbers(self) -> list[int]:
        return [message.request for message in self.bob.heard if isinstance(message, Done)]


def packets(effects: Sequence[Effect]) -> list[Packet]:
    return [effect.packet for effect in effects if isinstance(effect, Transmit)]


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_messages_are_numbered_from_one_per_peer(pair: Pair) -> None:
    assert [packet.stamp.seq for packet in pair.say(10, 11, 12)] == [1, 2, 3]
    other = pair.from_ann.perform(lambda: [Send(Member(server(1), 3), Done(1))], 0.0)
    assert [packet.stamp.seq for packet in packets(other)] == [1]


def test_what_comes_twice_is_heard_once_and_acknowledged_again(pair: Pair) -> None:
    (said,) = pair.say(10)
    pair.bob_hears(said, said)
    assert pair.numbers == [10]
    assert pair.from_bob.duplicates_dropped == 1
    assert pair.from_bob.deadline == ACK_DELAY_S


def test_a_gap_is_refused_and_asked_for_once(pair: Pair) -> None:
    _first, second, third = pair.say(10, 11, 12)
    asked = pair.bob_hears(second, third)
    assert [packet.message for packet in asked] == [Ack(wanted=True)]
    assert pair.numbers == []
    repeated = pair.ann_hears(*asked)
    assert [packet.stamp.seq for packet in repeated] == [1, 2, 3]
    pair.bob_hears(*repeated)
    assert pair.numbers == [10, 11, 12]


def test_acknowledgements_are_cumulative_and_return_each_token_once(pair: Pair) -> None:
    pair.bob_hears(*pair.say(10, 11, 12))
    (ack,) = packets(pair.from_bob.tick(ACK_DELAY_S))
    assert (ack.message, ack.stamp.ack, ack.stamp.seq) == (Ack(wanted=False), 3, 0)
    pair.ann_hears(ack, ack)
    assert pair.ann.returned == [10, 11, 12]
    assert not pair.from_ann.links[BOB].unacknowledged and pair.from_ann.deadline == NEVER


def test_an_acknowledgement_rides_on_a_message_that_goes_that_way(pair: Pair) -> None:
    pair.bob.answers = [Send(ANN, Done(99))]
    (answer,) = pair.bob_hears(*pair.say(10))
    assert answer.stamp.ack == 1
    pair.ann_hears(answer)
    assert pair.ann.returned == [10]
    assert pair.from_bob.tick(ACK_DELAY_S) == []


def test_an_acknowledgement_travels_alone_after_a_while(pair: Pair) -> None:
    pair.bob_hears(*pair.say(10), now=5.0)
    assert pair.from_bob.tick(5.0) == []
    assert pair.from_bob.deadline == 5.0 + ACK_DELAY_S
    assert len(packets(pair.from_bob.tick(5.0 + ACK_DELAY_S))) == 1


def test_silence_repeats_the_oldest_message_with_growing_patience(pair: Pair) -> None:
    pair.say(10, 11)
    times: list[float] = []
    while len(times) < 6:
        now = pair.from_ann.deadline
        times.append(now)
        assert [packet.stamp.seq for packet in packets(pair.from_ann.tick(now))] == [1]
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert gaps == [RETRY_S, 4, 8, 16, RETRY_MAX_S, RETRY_MAX_S]


def test_what_is_large_has_longer_to_arrive_so_that_a_slow_line_does_not_carry_it_twice(pair: Pair) -> None:
    column = np.zeros(1, np.uint32)
    large = InitValues(column, column, Arrays(np.array([1], np.uint8), column, bytes(1 << 20)))
    said = packets(pair.from_ann.perform(lambda: [Send(BOB, large), Send(BOB, large)], 0.0))
    assert pair.from_ann.deadline == RETRY_S + (2 << 20) / SLOWEST_BYTES_PER_S
    pair.bob_hears(said[0])
    pair.ann_hears(*pair.bob_hears(), *packets(pair.from_bob.tick(ACK_DELAY_S)), now=10.0)
    assert pair.from_ann.deadline == 10.0 + RETRY_S + (1 << 20) / SLOWEST_BYTES_PER_S
    pair.from_ann.perform(lambda: [Send(BOB, large)] * 20, 11.0)
    assert pair.from_ann.deadline == 11.0 + RETRY_S + ANSWER_S_MAX, "whatever is lost is said again within minutes"
    pair.from_ann.validate()


@each("name", sorted(form.message.__name__ for form in wire.KINDS.values() if form.has_payload))
def test_the_payload_of_each_kind_that_has_one_gives_the_peer_longer_to_answer(name: str) -> None:
    pair = Pair()
    (message,) = [one for one in messages() if type(one).__name__ == name]
    (said,) = packets(pair.from_ann.perform(lambda: [Send(BOB, message)], 0.0))
    payload_bytes = sum(len(frame) for frame in wire.encode(said)[2:])
    assert payload_bytes and pair.from_ann.deadline == RETRY_S + payload_bytes / SLOWEST_BYTES_PER_S
    pair.bob_hears(said)
    assert pair.from_bob.links[ANN].owed_bytes == payload_bytes, "so many are acknowledged at once when they are many"


def test_a_mended_connection_repeats_everything_and_asks_for_the_same(pair: Pair) -> None:
    pair.say(10, 11)
    assert pair.from_ann.observe(PeerDisconnected(BOB, "reset"), 1.0) == []
    said = packets(pair.from_ann.observe(PeerConnected(BOB), 1.1))
    assert [(packet.stamp.seq, packet.message) for packet in said] == [
        (1, Done(10)),
        (2, Done(11)),
        (0, Ack(wanted=True)),
    ]
    pair.bob_hears(*said)
    assert pair.numbers == [10, 11]


def test_a_first_connection_repeats_nothing(pair: Pair) -> None:
    pair.say(10)
    assert pair.from_ann.observe(PeerConnected(BOB), 0.1) == []


def test_messages_that_may_be_lost_are_not_numbered_nor_repeated(pair: Pair) -> None:
    (alive,) = packets(pair.from_ann.perform(lambda: [Send(BOB, Alive())], 0.0))
    assert alive.stamp.seq == 0
    assert pair.from_ann.deadline == NEVER
    pair.bob_hears(alive, alive)
    assert pair.bob.heard == [Alive(), Alive()]


def test_every_packet_says_who_speaks_to_which_life_and_in_which_step(pair: Pair) -> None:
    pair.ann.step, pair.ann.epoch = 5, 2
    (said,) = pair.say(10)
    assert said.stamp == Stamp(JOB, 2, ANN, 2, 1, 0, 5)
    pair.bob_hears(said)
    assert pair.bob.steps == {ANN: 5}


def test_who_is_not_listened_to_changes_nothing_and_is_told_why(pair: Pair) -> None:
    said = pair.say(10)
    pair.bob.refusals[ANN] = "worker-0 was replaced"
    (refused,) = pair.bob_hears(*said)
    assert refused.message == Rejected("worker-0 was replaced")
    assert pair.bob.heard == [] and not pair.from_bob.links


def test_who_left_is_dropped_without_a_word(pair: Pair) -> None:
    said = pair.say(10)
    pair.bob.refusals[ANN] = ""
    assert pair.bob_hears(*said) == []
    assert pair.bob.heard == [] and pair.from_bob.strangers_refused == 0


def test_what_is_meant_for_a_former_life_is_dropped_without_a_word(pair: Pair) -> None:
    stamp = Stamp(JOB, 0, ANN, 1, 1, 0, 0)
    assert pair.bob_hears(Packet(stamp, Done(1))) == []
    assert pair.bob.heard == [] and pair.from_bob.strangers_refused == 0


def test_another_job_is_refused_with_where_to_look(pair: Pair) -> None:
    (refused,) = pair.bob_hears(Packet(Stamp(JOB + 1, 0, ANN, 2, 1, 0, 0), Done(1)))
    assert isinstance(refused.message, Rejected) and "belongs to another job than worker-0's" in refused.message.reason
    assert pair.bob.heard == []


def test_a_refusal_is_never_refused_in_turn(pair: Pair) -> None:
    assert pair.bob_hears(Packet(Stamp(JOB + 1, 0, ANN, 2, 0, 0, 0), Rejected("go away"))) == []


def test_many_bytes_are_acknowledged_at_once(pair: Pair) -> None:
    column = np.zeros(1, np.uint32)
    arrays = Arrays(np.array([1], np.uint8), column, bytes(ACK_BYTES_MAX))
    said = packets(pair.from_ann.perform(lambda: [Send(BOB, InitValues(column, column, arrays))], 3.0))
    pair.bob_hears(*said, now=3.0)
    assert pair.from_bob.deadline == 3.0


def test_a_stranger_is_heard_without_numbers_and_gets_the_answer_that_it_can_read(pair: Pair) -> None:
    stranger = Member(NodeId(Role.WORKER, UNRANKED), 555)
    pair.bob.answers = [Send(stranger, Done(3))]
    (answer,) = pair.bob_hears(Packet(Stamp(JOB, 0, stranger, 0, 0, 0, 0), Done(1)))
    assert (answer.stamp.destination, answer.stamp.seq) == (555, 0)
    assert stranger not in pair.from_bob.links


def test_a_member_that_introduces_itself_again_after_a_break_gets_everything_again(pair: Pair) -> None:
    stranger = Member(NodeId(Role.WORKER, UNRANKED), 555)
    pair.from_bob.perform(lambda: [Send(ANN, Done(1))], 0.0)
    pair.from_bob.observe(PeerDisconnected(ANN, "reset"), 0.1)
    pair.bob.answers = [Bind(stranger, ANN)]
    said = pair.bob_hears(Packet(Stamp(JOB, 0, stranger, 0, 0, 0, 0), Done(1)), now=0.2)
    assert [packet.message for packet in said] == [Done(1), Ack(wanted=True)]
    assert pair.bob.events[-1] == PeerConnected(ANN)


def test_connections_that_let_nothing_through_are_counted_and_end_with_a_reason(pair: Pair) -> None:
    pair.from_ann.perform(lambda: [Send(BOB, Done(1))], 0.0)
    for time in range(1, 5):
        pair.from_ann.observe(PeerDisconnected(BOB, "reset"), time)
        pair.from_ann.observe(PeerConnected(BOB), time + 0.1)
    assert not [event for event in pair.ann.events if isinstance(event, Unreachable)]
    pair.from_ann.observe(PeerDisconnected(BOB, "reset"), 5.0)
    assert pair.from_ann.observe(PeerConnected(BOB), 5.1) == [], "nothing is said again"
    (event,) = [event for event in pair.ann.events if isinstance(event, Unreachable)]
    assert event.member == BOB and event.reason.startswith("5 connections to it were made one after another, and broke")


@pytest.mark.parametrize("waits", [True, False])
def test_connections_that_break_are_not_counted_where_something_gets_through_or_nothing_waits(
    pair: Pair, waits: bool
) -> None:
    for time in range(1, 20):
        if waits:
            pair.from_ann.perform(lambda: [Send(BOB, Done(1))], time)
            pair.ann_hears(Packet(Stamp(JOB, 0, BOB, ANN.incarnation, 0, time - 1, 0), Ack(wanted=False)), now=time)
        pair.from_ann.observe(PeerDisconnected(BOB, "reset"), time)
        pair.from_ann.observe(PeerConnected(BOB), time + 0.1)
    assert not [event for event in pair.ann.events if isinstance(event, Unreachable)]


def test_a_forgotten_peer_returns_its_tokens(pair: Pair) -> None:
    pair.say(10, 11)
    pair.from_ann.perform(lambda: [Forget(BOB)], 0.0)
    assert pair.ann.returned == [10, 11]
    assert pair.from_ann.deadline == NEVER


def test_the_invariants_notice_a_hole_in_what_is_unacknowledged(pair: Pair) -> None:
    pair.say(10, 11, 12)
    pair.from_ann.validate()
    del pair.from_ann.links[BOB].unacknowledged[1]
    with pytest.raises(AssertionError, match="contiguous"):
        pair.from_ann.validate()
