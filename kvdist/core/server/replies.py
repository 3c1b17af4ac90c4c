"""`Replies`: the replies of a server, collected while it handles a message. Pure.

Small values are copied together into a frame; a large value leaves as a view of its block's published buffer, without a
copy. The buffer is *leased* until the worker has acknowledged the message, and no new version is written into a leased
buffer. All replies to a message leave in as few messages as possible.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Buffer
from kvdist.core.server.peers import Peers
from kvdist.core.traffic import Traffic
from kvdist.dtypes import DType
from kvdist.nodes import Member
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U8, U32, Arrays, Bits, Payload, padded

JOIN_BYTES_MAX = 64 << 10
"""Values up to this size are copied together into a frame; a larger value is a frame by itself, without a copy."""
TOGETHER_BYTES_MAX, FRAMES_MAX = 16 << 20, 32
"""Limits of a message of replies that stays on this host."""


class Replies:
    """The replies of a server.

    Args:
        limits: sizes.
        traffic: counts passes over values.
        peers: the live workers, and which of them are on other hosts.
    """

    def __init__(self, limits: Limits, traffic: Traffic, peers: Peers) -> None:
        self.limits = limits
        self.traffic = traffic
        self.peers = peers
        self._all: dict[Member, Reply] = {}

    def to(self, member: Member) -> Reply:
        """Return the reply to a worker."""
        reply = self._all.get(member)
        if reply is None:
            reply = self._all[member] = Reply()
        return reply

    def pop_messages(self) -> list[fx.Effect]:
        """Remove and return all replies as effects. A worker that left meanwhile gets nothing."""
        effects: list[fx.Effect] = []
        for member, reply in self._all.items():
            if self.peers.has(member):
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
    """The reply to a worker."""

    _counted: list[tuple[int, U32, int]] = field(default_factory=list)
    """(run, slices, version)"""
    _values: list[tuple[int, Block]] = field(default_factory=list)
    """(run, block)"""
    _lent: list[tuple[int, Block, Buffer, Buffer | None]] = field(default_factory=list)
    """(run, block, buffer that the worker reads now, buffer that it read before)"""
    _measured: list[tuple[int, U32, int, float]] = field(default_factory=list)
    """(run, slices, version, sum of squares)"""
    _messages: list[tuple[msg.Values, Buffer | None]] = field(default_factory=list)
    """(message with optimizer states or rows, buffer that it shows if any)"""
    _refused: dict[tuple[msg.ErrorCode, str], list[tuple[int, U32]]] = field(default_factory=dict)
    """(code, reason) → [(run, slices)]"""
    _handed_back: list[tuple[int, U32]] = field(default_factory=list)
    """(run, slices)"""

    def acknowledge(self, run: int, ids: U32, version: int) -> None:
        """Report that contributions, or first values, of these slices were counted."""
        self._counted.append((run, ids, version))

    def value(self, run: int, block: Block) -> None:
        """Send the block's present values."""
        self._values.append((run, block))

    def lend(self, member: Member, run: int, block: Block) -> None:
        """Send the block's present values, which the worker reads in place."""
        before = block.lend(member)  # at once: a later row of the message may split the block
        self._lent.append((run, block, block.lent[member], before))

    def measured(self, run: int, block: Block) -> None:
        """Send the block's sum of squares."""
        self._measured.append((run, block.ids, block.version, block.squares))

    def state(self, run: int, ids: U32, version: int, dtype: DType, parts: Sequence[Bits]) -> None:
        """Send a part of the optimizer state of each of these slices; one copy."""
        memory, position = np.zeros(sum(padded(part.nbytes) for part in parts), np.uint8), 0
        for part in parts:
            memory[position : position + part.nbytes] = part.view(np.uint8)
            position += padded(part.nbytes)
        count = len(parts)
        arrays = Arrays(_u8([dtype] * count), _u32([part.size for part in parts]), memory.data)
        self._messages.append((msg.Values(_u32([run] * count), ids, _u32([version] * count), arrays), None))

    def rows(self, message: msg.Values, buffer: Buffer) -> None:
        """Send the rows in a buffer, which is leased for it."""
        buffer.leases += 1
        self._messages.append((message, buffer))

    def refuse(self, run: int, ids: U32, code: msg.ErrorCode, reason: str) -> None:
        """Refuse these slices."""
        self._refused.setdefault((code, reason), []).append((run, ids))

    def hand_back(self, run: int, ids: U32) -> None:
        """Ask for these contributions once more, separately: the sum with them was dropped."""
        self._handed_back.append((run, ids))

    def drop(self) -> None:
        """Release the leases of a reply that is not sent."""
        leased = [buffer for _, buffer in self._messages] + [before for *_, before in self._lent]
        for buffer in leased:
            if buffer is not None:
                buffer.leases -= 1

    def messages(
        self, member: Member, payload_bytes_max: int, traffic: Traffic, is_near: bool = True
    ) -> list[fx.Effect]:
        """Return the reply in as few messages as possible.

        Args:
            member: the worker.
            payload_bytes_max: the size up to which small values are joined, and large values that cross a network.
            traffic: counts passes over values.
            is_near: whether the worker is on this host.
        """
        together_max = TOGETHER_BYTES_MAX if is_near else payload_bytes_max
        effects: list[fx.Effect] = [
            fx.Send(member, message, None if buffer is None else (buffer,)) for message, buffer in self._messages
        ]
        effects += self._value_messages(member, payload_bytes_max, together_max, traffic)
        if self._measured:
            effects.append(fx.Send(member, _squares(self._measured)))
        if self._counted:
            runs, ids, versions = zip(*self._counted, strict=True)
            effects.append(fx.Send(member, msg.Counted(_repeated(runs, ids), _joined(ids), _repeated(versions, ids))))
        for (code, reason), slices in self._refused.items():
            runs, ids = zip(*slices, strict=True)
            effects.append(fx.Send(member, msg.Refused(_repeated(runs, ids), _joined(ids), code, reason)))
        if self._handed_back:
            runs, ids = zip(*self._handed_back, strict=True)
            effects.append(fx.Send(member, msg.HandedBack(_repeated(runs, ids), _joined(ids))))
        return effects

    def _value_messages(
        self, member: Member, payload_bytes_max: int, together_max: int, traffic: Traffic
    ) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        large = _LargeValues()
        for run, block, shown, before in self._lent:
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
    """Values that leave in the same message, each as a frame that shows the buffer of its block."""

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

    def message(self, member: Member) -> fx.Send:
        frames = [frame for frame in self.frames if len(frame)]  # a value without elements has none
        payload = tuple(frames) if len(frames) > 1 else frames[0] if frames else b""
        return fx.Send(member, _message(self.blocks, payload), tuple(self.leased))


def _copied(member: Member, batch: Sequence[tuple[int, Block]]) -> fx.Send:
    """Return a message with copies of small values: a single pass over them."""
    return fx.Send(member, _message(batch, b"".join([block.outgoing.payload for _, block in batch])))


def _message(batch: Sequence[tuple[int, Block]], payload: Payload | tuple[Payload, ...]) -> msg.Values:
    runs, blocks = zip(*batch, strict=True)
    ids = [block.ids for block in blocks]
    dtypes = _repeated([block.outgoing_dtype for block in blocks], ids).astype(np.uint8)
    return msg.Values(
        _repeated(runs, ids),
        _joined(ids),
        _repeated([block.version for block in blocks], ids),
        Arrays(dtypes, _joined([block.counts for block in blocks]), payload),
    )


def _squares(measured: Sequence[tuple[int, U32, int, float]]) -> msg.Values:
    """Return a float64 for the first slice of each block, and nothing for its other slices."""
    runs, ids, versions, squares = zip(*measured, strict=True)
    counts = np.concatenate([np.arange(len(some)) == 0 for some in ids]).astype(np.uint32)
    dtypes = np.full(len(counts), DType.FLOAT64, np.uint8)
    arrays = Arrays(dtypes, counts, np.array(squares, np.float64).tobytes())
    return msg.Values(_repeated(runs, ids), _joined(ids), _repeated(versions, ids), arrays)


def _repeated(numbers: Sequence[int], ids: Sequence[U32]) -> U32:
    """Return the number of each group of slices, repeated for each slice of the group."""
    return np.repeat(_u32(numbers), [len(some) for some in ids])


def _joined(columns: Sequence[U32]) -> U32:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _u32(numbers: Sequence[int]) -> U32:
    return np.array(numbers, np.uint32)


def _u8(numbers: Sequence[int]) -> U8:
    return np.array(numbers, np.uint8)
