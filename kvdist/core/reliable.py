"""Exactly-once delivery in order, over connections that may break at any byte.

The transport delivers in order but loses messages in flight when a connection breaks (and does not report which).
`Reliable` wraps a machine and mends that: it numbers messages per pair of members, keeps each until it is acknowledged,
retransmits missing messages, drops duplicates before looking at them, and refuses messages that come from another job
or from an earlier incarnation, or are meant for one. Acknowledgements are cumulative and ride on every message; they
travel alone only when no other message goes that way.

Rules that the simulator checks: a machine sees each sequenced message of a peer exactly once and in order; a token is
returned exactly once; an older incarnation changes nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvdist import errors
from kvdist.core import machine as fx
from kvdist.nodes import UNRANKED, Member, NodeId, Role
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import Arrays, Coded

ACK_DELAY_S = 0.02
"""Time that an acknowledgement waits for a message to ride on."""
RETRY_S = 2.0
"""Silence after which the oldest unacknowledged message is repeated; doubles up to `RETRY_MAX_S`."""
RETRY_MAX_S = 16.0
SLOWEST_BYTES_PER_S = 1 << 14
"""Assumed rate of the slowest lines: each payload byte in flight gives the peer that much longer to acknowledge before
a retransmission. The rate is a share of 1 Mbit/s for each of eight workers, on which every message went twice without
this allowance. Messages lost with a broken connection do not wait for it: they are retransmitted as soon as there is a
new connection."""
ANSWER_S_MAX = 300.0
"""Upper limit of that allowance, so that a message that was lost without a broken connection is retransmitted within
minutes, however many bytes are in flight."""
FRUITLESS_CONNECTIONS_MAX = 5
"""Number of consecutive connections without any acknowledgement of the peer that end the link."""

SPARE_ENTRIES = 64
"""Number of stale entries in a heap that are never worth a cleanup."""


class Due(Protocol):
    """An item with a due time."""

    listed: float
    """The time of its entry in the heap, kept by `Deadlines`; NEVER without an entry."""

    @property
    def due(self) -> float:
        """When the item needs attention, or NEVER."""


Thing = TypeVar("Thing", bound=Due)


class Deadlines(Generic[Thing]):
    """Finds the first due item of many, without a look at all of them at each message.

    A server has a link to each of a thousand workers, and asks at every message how long it may wait. Items are in a
    heap by the times when they were due. An item that is due later by now stays in place and is corrected when it comes
    to the top; an item that is due earlier is entered again, and its earlier entry is stale.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Thing]] = []
        self._entered = 0
        """Number of entries so far, which numbers the entries in order."""
        self._listed = 0
        """Number of items with a valid entry."""

    @property
    def first(self) -> float:
        """When the first item is due, or NEVER."""
        while self._heap:
            listed, _, thing = self._heap[0]
            if listed == thing.listed == thing.due:
                return listed
            heapq.heappop(self._heap)
            if listed == thing.listed:
                self._forget(thing)
                self.enter(thing)
        return fx.NEVER

    def enter(self, thing: Thing) -> None:
        """Enter an item that may be due earlier than before. Unnecessary if it is due later, or never."""
        due = thing.due
        if due >= thing.listed:
            return
        self._listed += thing.listed == fx.NEVER
        thing.listed = due
        self._entered += 1
        heapq.heappush(self._heap, (due, self._entered, thing))
        if len(self._heap) > 4 * self._listed + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].listed]
            heapq.heapify(self._heap)

    def pop_due(self, now: float) -> Iterator[Thing]:
        """Yield the due items, earliest first. The caller does the work that each is due for."""
        while self.first <= now:
            thing = heapq.heappop(self._heap)[2]
            self._forget(thing)
            yield thing
            self.enter(thing)

    def _forget(self, thing: Thing) -> None:
        thing.listed = fx.NEVER
        self._listed -= 1


@dataclass(slots=True)
class PeerLink:
    """The state of the traffic with a member."""

    peer: Member
    next_seq: int = 1
    unacknowledged: deque[tuple[int, msg.Message, object]] = field(default_factory=deque)
    received: int = 0
    """Every message up to this number has been passed to the machine."""
    flying_bytes: int = 0
    """Payload bytes that are not acknowledged."""
    owed_bytes: int = 0
    ack_due: float = fx.NEVER
    retry_s: float = RETRY_S
    retry_due: float = fx.NEVER
    listed: float = fx.NEVER
    """The time of its entry in the heap of due times."""
    broken: bool = False
    asked_at: int = -1
    """The value of `received` at which a retransmission was requested, so that a gap is requested once."""
    fruitless: int = 0
    """Number of connections since the last acknowledgement that were opened while messages waited for an
    acknowledgement."""

    @property
    def acknowledged(self) -> int:
        """Every message up to this number has arrived, or was withdrawn."""
        return self.next_seq - len(self.unacknowledged) - 1

    @property
    def due(self) -> float:
        """When an acknowledgement or a retransmission is due."""
        return min(self.ack_due, self.retry_due)

    def expect_answer(self, now: float) -> None:
        """Start the time that the peer has to acknowledge the messages in flight."""
        patience_s = self.retry_s + min(self.flying_bytes / SLOWEST_BYTES_PER_S, ANSWER_S_MAX)
        self.retry_due = now + patience_s if self.unacknowledged else fx.NEVER


class Reliable:
    """A machine with a reliable link to each of its peers. Has the machine's methods, for packets.

    Args:
        machine: handles the messages.
        job: the job's tag; packets of another job are refused.
    """

    def __init__(self, machine: fx.Machine, job: int) -> None:
        self.machine = machine
        self.job = job
        self.links: dict[Member, PeerLink] = {}
        self._dues: Deadlines[PeerLink] = Deadlines()
        self.duplicates_dropped = 0
        self.strangers_refused = 0

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        return min(self._dues.first, self.machine.deadline)

    def receive(self, packet: msg.Packet, now: float) -> list[fx.Effect]:
        """React to a packet from the transport."""
        stamp = packet.stamp
        refusal = self.refusal(packet)
        if refusal is not None:
            self.strangers_refused += bool(refusal) and self.is_stranger(stamp)
            return [fx.Transmit(stamp.source, self.rejection(refusal, stamp))] if refusal else []
        if isinstance(packet.message, msg.Rejected):
            return self._stamped(self.machine.handle(stamp.source, packet.message, now), now)
        if stamp.source.node.rank == UNRANKED:
            return self._introduced(self.machine.handle(stamp.source, packet.message, now), now)
        link = self._link(stamp.source)
        self.machine.steps[stamp.source] = stamp.step
        if stamp.ack >= link.next_seq and self.machine.me.node.role is Role.SCHEDULER:
            return [fx.Halt(_forgotten(link, stamp.ack))]
        effects = self._acknowledge(link, stamp.ack, now)
        if isinstance(packet.message, msg.Ack):
            if packet.message.wanted and stamp.ack < link.acknowledged and stamp.source.node.role is Role.SCHEDULER:
                return effects + self._stamped(self.machine.observe(_forgetful(link), now), now)
            return effects + (self._repeat(link, now) if packet.message.wanted else [])
        if stamp.seq:
            verdict = self._sequence(link, stamp.seq, packet.message, now)
            if verdict is not None:
                return effects + verdict
        return effects + self._stamped(self.machine.handle(stamp.source, packet.message, now), now)

    def observe(self, event: fx.Event, now: float) -> list[fx.Effect]:
        """Handle an event that is not a packet."""
        effects: list[fx.Effect] = []
        if isinstance(event, fx.PeerDisconnected) and event.member in self.links:
            self.links[event.member].broken = True
        if isinstance(event, fx.PeerConnected):
            link = self.links.get(event.member)
            if link is not None and link.broken:
                link.broken = False
                link.fruitless = link.fruitless + 1 if link.unacknowledged else 0
                if link.fruitless >= FRUITLESS_CONNECTIONS_MAX:
                    return self._stamped(self.machine.observe(_unreachable(link), now), now)
                # Messages in flight are lost in both directions: retransmit all, and ask the peer to.
                effects = [*self._repeat(link, now), self._unsequenced(event.member, msg.Ack(wanted=True))]
        return effects + self._stamped(self.machine.observe(event, now), now)

    def tick(self, now: float) -> list[fx.Effect]:
        """Send the acknowledgements and retransmissions that are due, then let the machine tick."""
        effects: list[fx.Effect] = []
        for link in self._dues.pop_due(now):
            if link.retry_due <= now:
                link.retry_s = min(2 * link.retry_s, RETRY_MAX_S)
                effects += self._repeat(link, now, 1)
            elif link.ack_due <= now:
                effects.append(self._unsequenced(link.peer, msg.Ack(wanted=False)))
        if self.machine.deadline <= now:
            effects += self._stamped(self.machine.tick(now), now)
        return effects

    def perform(self, action: Callable[[], list[fx.Effect]], now: float) -> list[fx.Effect]:
        """Run any other method of the machine and stamp the messages that it sends."""
        return self._stamped(action(), now)

    def rejection(self, reason: str, asked: msg.Stamp | None = None, is_over: bool = False) -> msg.Packet:
        """A refusal, which reveals nothing about this job or process that a stranger could use.

        Args:
            reason: the text for the other side.
            asked: the stamp of the refused message; None if it cannot be read.
            is_over: see `Rejected`.
        """
        role = self.machine.me.node.role
        me = Member(NodeId(role, 0 if role is Role.SCHEDULER else UNRANKED), 0)
        job, to = (0, 0) if asked is None else (asked.job, asked.source.incarnation)
        return msg.Packet(msg.Stamp(job, 0, me, to, 0, 0, 0), msg.Rejected(reason, is_over))

    def validate(self) -> None:
        """Check every invariant of the links and of the machine."""
        first = self._dues.first
        for link in self.links.values():
            waiting = link.unacknowledged
            assert bool(waiting) == (link.retry_due < fx.NEVER), "what is unacknowledged will be repeated"
            assert first <= link.due, "no link waits longer than it should"
            flying, seq = 0, link.next_seq - len(waiting)
            for number, message, _ in waiting:
                assert number == seq, "unacknowledged is contiguous"
                flying, seq = flying + _payload_bytes(message), seq + 1
            assert flying == link.flying_bytes, "bytes are counted once out and once back"
        self.machine.validate()

    def is_apart(self, member: Member) -> bool:
        """Whether the connection to a member is known to be broken."""
        link = self.links.get(member)
        return link is not None and link.broken

    def refusal(self, packet: msg.Packet) -> str | None:
        """None to accept a packet, a sentence to refuse it with, or '' to drop it silently."""
        stamp, me = packet.stamp, self.machine.me
        if isinstance(packet.message, msg.Rejected):
            # It does not name its sender, but only a process that has received a message of this process knows its
            # incarnation.
            return None if stamp.destination == me.incarnation and me.node.role is not Role.SCHEDULER else ""
        if stamp.job != self.job:
            return (
                f"this port belongs to another job than {stamp.source}'s: check the address of the scheduler"
                " and that both were started by the same launcher (KVDIST_JOB)"
            )
        if stamp.destination and stamp.destination != me.incarnation:
            # Meant for a former life of this seat. After a hello the first answers still carry the token.
            return ""
        return self.machine.refuses(stamp.source, packet.message)

    def is_stranger(self, stamp: msg.Stamp) -> bool:
        """Whether the sender of a refused message is unknown to this process: not an earlier incarnation of this
        job."""
        return stamp.job != self.job or stamp.source not in self.links

    def _introduced(self, effects: Sequence[fx.Effect], now: float) -> list[fx.Effect]:
        """Handle the effects of a stranger's message. If it registers a member, this is a connection to it, perhaps a
        new one."""
        stamped = self._stamped(effects, now)
        for effect in effects:
            if isinstance(effect, fx.Bind):
                stamped += self.observe(fx.PeerConnected(effect.member), now)
        return stamped

    def _link(self, member: Member) -> PeerLink:
        link = self.links.get(member)
        if link is None:
            link = self.links[member] = PeerLink(member)
        return link

    def _acknowledge(self, link: PeerLink, ack: int, now: float) -> list[fx.Effect]:
        waiting = link.unacknowledged
        if not waiting or waiting[0][0] > ack:
            return []
        link.fruitless = 0
        tokens = []
        while waiting and waiting[0][0] <= ack:
            _, message, token = waiting.popleft()
            link.flying_bytes -= _payload_bytes(message)
            if token is not None:
                tokens.append(token)
        link.retry_s = RETRY_S
        self._expect_answer(link, now)
        return self._stamped(self.machine.acknowledged(link.peer, tokens, now), now) if tokens else []

    def _sequence(self, link: PeerLink, seq: int, message: msg.Message, now: float) -> list[fx.Effect] | None:
        """None if the message is the next in order; else the effects in place of handling it."""
        if seq == link.received + 1:
            link.received = seq
            link.owed_bytes += _payload_bytes(message)
            is_urgent = link.owed_bytes >= self.machine.ack_bytes_max
            link.ack_due = now if is_urgent else min(link.ack_due, now + ACK_DELAY_S)
            self._dues.enter(link)
            return None
        if seq <= link.received:
            self.duplicates_dropped += 1
            link.ack_due = min(link.ack_due, now + ACK_DELAY_S)
            self._dues.enter(link)
            return []
        if link.asked_at == link.received:
            return []
        link.asked_at = link.received
        return [self._unsequenced(link.peer, msg.Ack(wanted=True))]

    def _repeat(self, link: PeerLink, now: float, messages_max: int | None = None) -> list[fx.Effect]:
        self._expect_answer(link, now)
        again = list(link.unacknowledged)[:messages_max]
        return [fx.Transmit(link.peer, msg.Packet(self._stamp(link.peer, seq), message)) for seq, message, _ in again]

    def _stamped(self, effects: Iterable[fx.Effect], now: float) -> list[fx.Effect]:
        stamped: list[fx.Effect] = []
        for effect in effects:
            if isinstance(effect, fx.Send):
                stamped.append(self._transmit(effect, now))
            elif isinstance(effect, fx.Forget):
                stamped += self._forget(effect.member, now)
            else:
                stamped.append(effect)
        return stamped

    def _forget(self, member: Member, now: float) -> list[fx.Effect]:
        """Retransmit nothing to a member that has left. The numbers of its messages stay known, should duplicates
        arrive."""
        link = self._link(member)
        tokens = [token for _, _, token in link.unacknowledged if token is not None]
        link.unacknowledged.clear()
        link.flying_bytes = 0
        link.retry_due = fx.NEVER
        return self._stamped(self.machine.acknowledged(member, tokens, now), now) if tokens else []

    def _transmit(self, send: fx.Send, now: float) -> fx.Transmit:
        if isinstance(send.message, msg.Rejected):
            asked = msg.Stamp(self.job, 0, send.to, 0, 0, 0, 0)
            return fx.Transmit(send.to, self.rejection(send.message.reason, asked, send.message.is_over))
        if not send.message.SEQUENCED or send.to.node.rank == UNRANKED:
            return self._unsequenced(send.to, send.message)
        link = self._link(send.to)
        seq = link.next_seq
        link.next_seq = seq + 1
        link.unacknowledged.append((seq, send.message, send.token))
        nbytes = _payload_bytes(send.message)
        link.flying_bytes += nbytes
        if link.retry_due == fx.NEVER:
            self._expect_answer(link, now)
        else:
            latest = now + link.retry_s + ANSWER_S_MAX
            link.retry_due = min(link.retry_due + nbytes / SLOWEST_BYTES_PER_S, latest)
        return fx.Transmit(send.to, msg.Packet(self._stamp(send.to, seq), send.message))

    def _expect_answer(self, link: PeerLink, now: float) -> None:
        link.expect_answer(now)
        self._dues.enter(link)

    def _unsequenced(self, to: Member, message: msg.Message) -> fx.Transmit:
        return fx.Transmit(to, msg.Packet(self._stamp(to, 0), message))

    def _stamp(self, to: Member, seq: int) -> msg.Stamp:
        received = 0
        link = self.links.get(to)
        if link is not None:
            received = link.received
            link.ack_due = fx.NEVER
            link.owed_bytes = 0
        machine = self.machine
        # A stranger does not know the scheduler's incarnation: 0 means the present one.
        destination = 0 if to.node.role is Role.SCHEDULER else to.incarnation
        return msg.Stamp(self.job, machine.epoch, machine.me, destination, seq, received, machine.step)


def _unreachable(link: PeerLink) -> fx.Unreachable:
    messages = len(link.unacknowledged)
    return fx.Unreachable(
        link.peer,
        f"{link.fruitless} connections to it were made one after another, and broke before any of {messages} message(s)"
        f" with {link.flying_bytes} payload bytes had arrived: look whether the network loses large packets (its MTU is"
        " smaller than the interfaces say; ping -M do -s 1472 HOST shows it), and whether a firewall or proxy between"
        " closes connections",
    )


def _forgotten(link: PeerLink, ack: int) -> errors.KvdistError:
    """The error of a scheduler that receives acknowledgements of messages that it does not remember to have sent."""
    return errors.FencedError(
        f"{link.peer} has heard {ack - link.next_seq + 1} message(s) of this scheduler that it knows nothing of: its"
        " journal lacks its end, as after a loss of power, so it must not go on. Start the job again, from a checkpoint"
    )


def _forgetful(link: PeerLink) -> fx.Unreachable:
    """The event for a scheduler that has acknowledged messages and no longer knows them."""
    return fx.Unreachable(
        link.peer,
        "it has come back without what it had acknowledged: its journal lacks its end, as after a loss of power",
    )


def _payload_bytes(message: msg.Message) -> int:
    """The bytes of its payload frames, which every kind that has any declares as its `arrays`."""
    arrays: Arrays | Coded | None = getattr(message, "arrays", None)
    return 0 if arrays is None else arrays.nbytes
