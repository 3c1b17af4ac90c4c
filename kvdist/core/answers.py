"""What one worker is told at the end of a message: small values joined, large ones shown without a copy.

A large value leaves as a view of the shard's published buffer. The buffer carries a *lease* until the worker has
acknowledged the message, and no new version is written into a leased buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from kvdist.core.effects import Effect, Send
from kvdist.core.group import Group
from kvdist.core.shard import Bits, Buffer, Shard
from kvdist.core.traffic import Traffic
from kvdist.dtypes import DType
from kvdist.nodes import Member
from kvdist.protocol.arrays import U8, U32, Arrays, Payload, padded
from kvdist.protocol.messages import Counted, ErrorCode, Outcome, Refused, Values

JOIN_BYTES_MAX = 64 << 10
"""Values up to this size are copied together into one frame; larger ones are frames of their own, without a copy."""
TOGETHER_BYTES_MAX, FRAMES_MAX = 16 << 20, 32
"""What arose from one message leaves in messages of up to so many bytes and frames where it stays on this host."""


class Numbered(Protocol):
    """A slice of any form."""

    @property
    def number(self) -> int:
        """Its number in the cluster."""

    @property
    def version(self) -> int:
        """How many rounds have been closed."""


@dataclass(slots=True)
class Answers:
    """The answers to one worker that one message gave rise to."""

    _counted: list[tuple[int, int, int, int]] = field(default_factory=list)
    """(run, slice, version, outcome)"""
    _values: list[tuple[int, Shard]] = field(default_factory=list)
    """(run, shard)"""
    _held: list[tuple[int, Shard]] = field(default_factory=list)
    """(run, shard)"""
    _made: list[Effect] = field(default_factory=list)
    """Messages that are made already: of groups, and of states."""
    _refused: dict[tuple[ErrorCode, str], list[tuple[int, int]]] = field(default_factory=dict)
    """(code, reason) → [(run, slice)]"""

    def counted(self, run: int, shard: Numbered, outcome: Outcome) -> None:
        """The contribution, or first value, was taken."""
        self._counted.append((run, shard.number, shard.version, outcome))

    def value(self, run: int, shard: Shard) -> None:
        """The shard's present value is wanted."""
        self._values.append((run, shard))

    def held(self, run: int, shard: Shard) -> None:
        """The shard's present value is wanted, and will be read where it lies."""
        self._held.append((run, shard))

    def group(self, member: Member, run: int, group: Group, with_values: bool) -> None:
        """All slices of a group are counted, and wanted if `with_values`: one message, without a copy."""
        n = len(group.ids)
        runs, outcomes = np.full(n, run, np.uint32), np.full(n, Outcome.COUNTED, np.uint8)
        versions = group.versions.copy()  # what waits to be sent again must not change
        if not with_values:
            self._made.append(Send(member, Counted(runs, group.ids, versions, outcomes)))
            return
        buffer = group.outgoing
        buffer.leases += 1
        arrays = Arrays(group.outgoing_dtypes, group.counts, buffer.payload)
        self._made.append(Send(member, Values(runs, group.ids, versions, outcomes, arrays), (buffer,)))

    def state(self, member: Member, run: int, shard: Shard, dtype: DType, part: Bits) -> None:
        """This part of what the optimizer remembers of the shard is wanted. It must not change any more."""
        memory = np.zeros(padded(part.nbytes), np.uint8)
        memory[: part.nbytes] = part.view(np.uint8)
        arrays = Arrays(_u8([dtype]), _u32([part.size]), memory.data)
        columns = (_u32([run]), _u32([shard.number]), _u32([shard.version]), _u8([Outcome.COUNTED]))
        self._made.append(Send(member, Values(*columns, arrays)))

    def refuse(self, run: int, number: int, code: ErrorCode, reason: str) -> None:
        """The slice of this number was refused."""
        self._refused.setdefault((code, reason), []).append((run, number))

    def messages(self, member: Member, payload_bytes_max: int, traffic: Traffic, is_near: bool = True) -> list[Effect]:
        """All that as few messages.

        Args:
            payload_bytes_max: small values are joined up to this size, and large ones where they cross a network.
            is_near: whether they stay on this host.
        """
        together_max = TOGETHER_BYTES_MAX if is_near else payload_bytes_max
        effects = [*self._made, *self._value_messages(member, payload_bytes_max, together_max, traffic)]
        if self._counted:
            runs, ids, versions, outcomes = zip(*self._counted, strict=True)
            effects.append(Send(member, Counted(_u32(runs), _u32(ids), _u32(versions), _u8(outcomes))))
        for (code, reason), slices in self._refused.items():
            runs, ids = zip(*slices, strict=True)
            effects.append(Send(member, Refused(_u32(runs), _u32(ids), code, reason)))
        return effects

    def _value_messages(
        self, member: Member, payload_bytes_max: int, together_max: int, traffic: Traffic
    ) -> list[Effect]:
        effects: list[Effect] = []
        large = _Batch()
        for run, shard in self._held:
            before = shard.hold(member)
            assert shard.published is not None
            if large.is_full(len(shard.published.payload), together_max):
                effects.append(large.message(member))
                large = _Batch()
            large.add(run, shard, shard.published.payload, before)
        small: list[tuple[int, Shard]] = []
        small_bytes = 0
        for run, shard in self._values:
            buffer = shard.outgoing
            nbytes = len(buffer.payload)
            if nbytes > JOIN_BYTES_MAX:
                if large.is_full(nbytes, together_max):
                    effects.append(large.message(member))
                    large = _Batch()
                buffer.leases += 1
                large.add(run, shard, buffer.payload, buffer)
                continue
            if small and small_bytes + nbytes > payload_bytes_max:
                effects.append(_joined(member, small))
                small, small_bytes = [], 0
            small.append((run, shard))
            small_bytes += nbytes
            traffic.joined += nbytes
        if large.frames:
            effects.append(large.message(member))
        if small:
            effects.append(_joined(member, small))
        return effects


@dataclass(slots=True)
class _Batch:
    """Values that leave together, each as a frame that shows its buffer."""

    slices: list[tuple[int, Shard]] = field(default_factory=list)
    frames: list[memoryview] = field(default_factory=list)
    leased: list[Buffer] = field(default_factory=list)
    nbytes: int = 0

    def is_full(self, nbytes: int, together_max: int) -> bool:
        return bool(self.frames) and (self.nbytes + nbytes > together_max or len(self.frames) >= FRAMES_MAX)

    def add(self, run: int, shard: Shard, payload: memoryview, leased: Buffer | None) -> None:
        self.slices.append((run, shard))
        self.frames.append(payload)
        self.nbytes += len(payload)
        if leased is not None:
            self.leased.append(leased)

    def message(self, member: Member) -> Send:
        frames = [frame for frame in self.frames if len(frame)]  # a value without elements has none
        payload = tuple(frames) if len(frames) > 1 else frames[0] if frames else b""
        return Send(member, _message(self.slices, payload), tuple(self.leased))


def _joined(member: Member, batch: Sequence[tuple[int, Shard]]) -> Send:
    """One message with copies of small values: one pass over bytes that are few."""
    return Send(member, _message(batch, b"".join([shard.outgoing.payload for _, shard in batch])))


def _message(batch: Sequence[tuple[int, Shard]], payload: Payload | tuple[Payload, ...]) -> Values:
    shards = [shard for _, shard in batch]
    return Values(
        _u32([run for run, _ in batch]),
        _u32([shard.number for shard in shards]),
        _u32([shard.version for shard in shards]),
        np.full(len(batch), Outcome.COUNTED, np.uint8),
        Arrays(_u8([shard.outgoing_dtype for shard in shards]), _u32([shard.count for shard in shards]), payload),
    )


def _u32(numbers: Sequence[int]) -> U32:
    return np.array(numbers, np.uint32)


def _u8(numbers: Sequence[int]) -> U8:
    return np.array(numbers, np.uint8)
