"""What one worker is told at the end of a message: small values joined, large ones shown without a copy.

A large value leaves as a view of its block's published buffer. The buffer carries a *lease* until the worker has
acknowledged the message, and no new version is written into a leased buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdist.core.machine import Effect, Send
from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Bits, Buffer
from kvdist.core.traffic import Traffic
from kvdist.dtypes import DType
from kvdist.nodes import Member
from kvdist.protocol.arrays import U8, U32, Arrays, Payload, padded
from kvdist.protocol.messages import Counted, ErrorCode, Outcome, Refused, Values

JOIN_BYTES_MAX = 64 << 10
"""Values up to this size are copied together into one frame; larger ones are frames of their own, without a copy."""
TOGETHER_BYTES_MAX, FRAMES_MAX = 16 << 20, 32
"""What arose from one message leaves in messages of up to so many bytes and frames where it stays on this host."""


@dataclass(slots=True)
class Answers:
    """The answers to one worker that one message gave rise to."""

    _counted: list[tuple[int, U32, int, int]] = field(default_factory=list)
    """(run, slices, version, outcome)"""
    _values: list[tuple[int, Block]] = field(default_factory=list)
    """(run, block)"""
    _held: list[tuple[int, Block, Buffer, Buffer | None]] = field(default_factory=list)
    """(run, block, what it shows, what the worker has read until now)"""
    _states: list[Effect] = field(default_factory=list)
    """Messages that are made already."""
    _refused: dict[tuple[ErrorCode, str], list[tuple[int, U32]]] = field(default_factory=dict)
    """(code, reason) → [(run, slices)]"""

    def counted(self, run: int, ids: U32, version: int, outcome: Outcome) -> None:
        """The contributions, or first values, of these slices were taken."""
        self._counted.append((run, ids, version, outcome))

    def value(self, run: int, block: Block) -> None:
        """The block's present values are wanted."""
        self._values.append((run, block))

    def held(self, member: Member, run: int, block: Block) -> None:
        """The block's present values are wanted, and will be read where they lie."""
        before = block.hold(member)  # at once: what comes next in the message may split the block
        self._held.append((run, block, block.held[member], before))

    def state(self, member: Member, run: int, block: Block, dtype: DType, part: Bits) -> None:
        """This part of what the optimizer remembers of a block of one slice is wanted. It must not change any more."""
        memory = np.zeros(padded(part.nbytes), np.uint8)
        memory[: part.nbytes] = part.view(np.uint8)
        arrays = Arrays(_u8([dtype]), _u32([part.size]), memory.data)
        columns = (_u32([run]), block.ids, _u32([block.version]), _u8([Outcome.COUNTED]))
        self._states.append(Send(member, Values(*columns, arrays)))

    def refuse(self, run: int, ids: U32, code: ErrorCode, reason: str) -> None:
        """These slices were refused."""
        self._refused.setdefault((code, reason), []).append((run, ids))

    def messages(self, member: Member, payload_bytes_max: int, traffic: Traffic, is_near: bool = True) -> list[Effect]:
        """All that as few messages.

        Args:
            payload_bytes_max: small values are joined up to this size, and large ones where they cross a network.
            is_near: whether they stay on this host.
        """
        together_max = TOGETHER_BYTES_MAX if is_near else payload_bytes_max
        effects = [*self._states, *self._value_messages(member, payload_bytes_max, together_max, traffic)]
        if self._counted:
            runs, ids, versions, outcomes = zip(*self._counted, strict=True)
            columns = (_repeated(runs, ids), _joined(ids), _repeated(versions, ids))
            effects.append(Send(member, Counted(*columns, _repeated(outcomes, ids).astype(np.uint8))))
        for (code, reason), slices in self._refused.items():
            runs, ids = zip(*slices, strict=True)
            effects.append(Send(member, Refused(_repeated(runs, ids), _joined(ids), code, reason)))
        return effects

    def _value_messages(
        self, member: Member, payload_bytes_max: int, together_max: int, traffic: Traffic
    ) -> list[Effect]:
        effects: list[Effect] = []
        large = _Batch()
        for run, block, shown, before in self._held:
            if large.is_full(len(shown.payload), together_max):
                effects.append(large.message(member))
                large = _Batch()
            large.add(run, block, shown.payload, before)
        small: list[tuple[int, Block]] = []
        small_bytes = 0
        for run, block in self._values:
            buffer = block.outgoing
            nbytes = len(buffer.payload)
            if nbytes > JOIN_BYTES_MAX:
                if large.is_full(nbytes, together_max):
                    effects.append(large.message(member))
                    large = _Batch()
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
class _Batch:
    """Values that leave together, each block's as a frame that shows its buffer."""

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
    """One message with copies of small values: one pass over bytes that are few."""
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
