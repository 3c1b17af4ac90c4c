"""Replies to workers, collected while one message is handled: small values joined, large ones sent without a copy.

A large value leaves as a view of its block's published buffer. The buffer is *leased* until the worker has acknowledged
the message, and no new version is written into a leased buffer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core.machine import Effect, Send
from kvdist.core.round import Round
from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Buffer
from kvdist.core.server.peers import Peers
from kvdist.core.traffic import Traffic
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch
from kvdist.naming import waiting
from kvdist.nodes import Member
from kvdist.protocol.arrays import U8, U32, Arrays, Bits, Payload, padded
from kvdist.protocol.messages import Counted, ErrorCode, Outcome, Refused, RowValues, Values, Waiting

JOIN_BYTES_MAX = 64 << 10
"""Values up to this size are copied together into one frame; larger ones are frames of their own, without a copy."""
TOGETHER_BYTES_MAX, FRAMES_MAX = 16 << 20, 32
"""The size of a message of replies that stays on this host."""


class Leased(Protocol):
    """Memory that is being read while `leases` is not 0."""

    leases: int


@dataclass(slots=True)
class RoundWait:
    """An open round for which workers wait: what has to be done, and the ranks that have to do it."""

    round: Round[Any, Any]
    deed: str
    missing: tuple[int, ...]

    def describe(self, now: float) -> str:
        """One sentence."""
        names = ", ".join(f"worker-{rank}" for rank in self.missing)
        return waiting(now - self.round.open_since, names, self.deed)


def hints(waits: Iterable[RoundWait], now: float) -> list[Effect]:
    """Messages to the workers that wait: for which round, how long, and for whom.

    Whoever waits for no worker hears nothing: its own push is still under way, perhaps through a leader.
    """
    messages: dict[Member, Waiting] = {}
    for wait in waits:
        if not wait.missing:
            continue
        waited = now - wait.round.open_since
        for waiter in (*wait.round.slots.values(), *wait.round.pulls):
            messages.setdefault(waiter.member, Waiting(wait.deed, wait.missing, waited))
    return [Send(member, message) for member, message in messages.items()]


def code_of(error: Exception) -> ErrorCode:
    """The code with which a round that was not applied is refused."""
    return ErrorCode.OPTIMIZER_MISMATCH if isinstance(error, OptimizerMismatch) else ErrorCode.REFUSED


class Replies:
    """The replies of a server.

    Args:
        limits: sizes.
        traffic: counts passes over values.
        peers: who is alive, and how far away.
    """

    def __init__(self, limits: Limits, traffic: Traffic, peers: Peers) -> None:
        self.limits = limits
        self.traffic = traffic
        self.peers = peers
        self._all: dict[Member, Reply] = {}

    def to(self, member: Member) -> Reply:
        """The reply to one worker."""
        reply = self._all.get(member)
        if reply is None:
            reply = self._all[member] = Reply()
        return reply

    def take(self) -> list[Effect]:
        """Everything collected since the last time. A worker that left meanwhile gets nothing."""
        effects: list[Effect] = []
        for member, reply in self._all.items():
            if self.peers.workers.get(member.node.rank) == member:
                is_near = member not in self.peers.far
                effects += reply.messages(member, self.limits.slice_bytes, self.traffic, is_near)
            else:
                reply.drop()
        self._all = {}
        return effects

    def validate(self) -> None:
        """Check every invariant."""
        assert not self._all, "replies leave with the message that caused them"


@dataclass(slots=True)
class Reply:
    """The reply to one worker."""

    _counted: list[tuple[int, U32, int, int]] = field(default_factory=list)
    """(run, slices, version, outcome)"""
    _values: list[tuple[int, Block]] = field(default_factory=list)
    """(run, block)"""
    _held: list[tuple[int, Block, Buffer, Buffer | None]] = field(default_factory=list)
    """(run, block, what it shows, what the worker has read until now)"""
    _states: list[Values] = field(default_factory=list)
    _rows: list[tuple[RowValues, Leased]] = field(default_factory=list)
    """(message, the buffer that it shows)"""
    _refused: dict[tuple[ErrorCode, str], list[tuple[int, U32]]] = field(default_factory=dict)
    """(code, reason) → [(run, slices)]"""

    def counted(self, run: int, ids: U32, version: int, outcome: Outcome) -> None:
        """Say that contributions, or first values, of these slices were counted."""
        self._counted.append((run, ids, version, outcome))

    def value(self, run: int, block: Block) -> None:
        """Send the block's present values."""
        self._values.append((run, block))

    def held(self, member: Member, run: int, block: Block) -> None:
        """Send the block's present values, which the worker reads in place."""
        before = block.hold(member)  # at once: a later row of the message may split the block
        self._held.append((run, block, block.held[member], before))

    def state(self, run: int, block: Block, dtype: DType, part: Bits) -> None:
        """Send a part of the optimizer state of a block of one slice. It must not change any more."""
        memory = np.zeros(padded(part.nbytes), np.uint8)
        memory[: part.nbytes] = part.view(np.uint8)
        arrays = Arrays(_u8([dtype]), _u32([part.size]), memory.data)
        columns = (_u32([run]), block.ids, _u32([block.version]), _u8([Outcome.COUNTED]))
        self._states.append(Values(*columns, arrays))

    def rows(self, message: RowValues, buffer: Leased) -> None:
        """Send rows, which lie in this buffer."""
        buffer.leases += 1
        self._rows.append((message, buffer))

    def refuse(self, run: int, ids: U32, code: ErrorCode, reason: str) -> None:
        """Refuse these slices."""
        self._refused.setdefault((code, reason), []).append((run, ids))

    def drop(self) -> None:
        """Say nothing."""
        for _, buffer in self._rows:
            buffer.leases -= 1

    def messages(self, member: Member, payload_bytes_max: int, traffic: Traffic, is_near: bool = True) -> list[Effect]:
        """The reply in as few messages as possible.

        Args:
            member: the worker.
            payload_bytes_max: the size up to which small values are joined, and large ones that cross a network.
            traffic: counts passes over values.
            is_near: whether the worker is on this host.
        """
        together_max = TOGETHER_BYTES_MAX if is_near else payload_bytes_max
        effects: list[Effect] = [Send(member, state) for state in self._states]
        effects += self._value_messages(member, payload_bytes_max, together_max, traffic)
        if self._counted:
            runs, ids, versions, outcomes = zip(*self._counted, strict=True)
            columns = (_repeated(runs, ids), _joined(ids), _repeated(versions, ids))
            effects.append(Send(member, Counted(*columns, _repeated(outcomes, ids).astype(np.uint8))))
        for (code, reason), slices in self._refused.items():
            runs, ids = zip(*slices, strict=True)
            effects.append(Send(member, Refused(_repeated(runs, ids), _joined(ids), code, reason)))
        effects += [Send(member, message, (buffer,)) for message, buffer in self._rows]
        return effects

    def _value_messages(
        self, member: Member, payload_bytes_max: int, together_max: int, traffic: Traffic
    ) -> list[Effect]:
        effects: list[Effect] = []
        large = _LargeValues()
        for run, block, shown, before in self._held:
            if large.is_full(len(shown.payload), together_max):
                effects.append(large.message(member))
                large = _LargeValues()
            large.add(run, block, shown.payload, before)
        small: list[tuple[int, Block]] = []
        small_bytes = 0
        for run, block in self._values:
            buffer = block.outgoing
            nbytes = len(buffer.payload)
            if nbytes > JOIN_BYTES_MAX:
                if large.is_full(nbytes, together_max):
                    effects.append(large.message(member))
                    large = _LargeValues()
                buffer.leases += 1
                large.add(run, block, buffer.payload, buffer)
                continue
            if small and small_bytes + nbytes > payload_bytes_max:
                effects.append(_copied(member, small))
                small, small_bytes = [], 0
            small.append((run, block))
            small_bytes += nbytes
            traffic.joined += nbytes
        if large.frames:
            effects.append(large.message(member))
        if small:
            effects.append(_copied(member, small))
        return effects


@dataclass(slots=True)
class _LargeValues:
    """Values that leave in one message, each block's as a frame that shows its buffer."""

    blocks: list[tuple[int, Block]] = field(default_factory=list)
    frames: list[memoryview] = field(default_factory=list)
    leased: list[Buffer] = field(default_factory=list)
    nbytes: int = 0

    def is_full(self, nbytes: int, together_max: int) -> bool:
        return bool(self.frames) and (self.nbytes + nbytes > together_max or len(self.frames) >= FRAMES_MAX)

    def add(self, run: int, block: Block, payload: memoryview, leased: Buffer | None) -> None:
        self.blocks.append((run, block))
        self.frames.append(payload)
        self.nbytes += len(payload)
        if leased is not None:
            self.leased.append(leased)

    def message(self, member: Member) -> Send:
        frames = [frame for frame in self.frames if len(frame)]  # a value without elements has none
        payload = tuple(frames) if len(frames) > 1 else frames[0] if frames else b""
        return Send(member, _message(self.blocks, payload), tuple(self.leased))


def _copied(member: Member, batch: Sequence[tuple[int, Block]]) -> Send:
    """One message with copies of small values: one pass over them."""
    return Send(member, _message(batch, b"".join([block.outgoing.payload for _, block in batch])))


def _message(batch: Sequence[tuple[int, Block]], payload: Payload | tuple[Payload, ...]) -> Values:
    runs, blocks = zip(*batch, strict=True)
    ids = [block.ids for block in blocks]
    dtypes = _repeated([block.outgoing_dtype for block in blocks], ids).astype(np.uint8)
    return Values(
        _repeated(runs, ids),
        _joined(ids),
        _repeated([block.version for block in blocks], ids),
        np.full(len(dtypes), Outcome.COUNTED, np.uint8),
        Arrays(dtypes, _joined([block.counts for block in blocks]), payload),
    )


def _repeated(numbers: Sequence[int], ids: Sequence[U32]) -> U32:
    """One number for each group of slices, repeated for each of them."""
    return np.repeat(_u32(numbers), [len(own) for own in ids])


def _joined(columns: Sequence[U32]) -> U32:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _u32(numbers: Sequence[int]) -> U32:
    return np.array(numbers, np.uint32)


def _u8(numbers: Sequence[int]) -> U8:
    return np.array(numbers, np.uint8)
