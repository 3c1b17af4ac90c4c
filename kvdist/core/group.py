"""Many small slices that always come together, counted and updated as one.

A thousand small parameters are a thousand slices. When every worker pushes the same run of them, what was decided and
computed slice by slice is decided once and computed in one call over one stretch of memory. Rules that hold here:

* A group is another representation of its slices, never another behaviour. `dissolve` turns it back into shards, at
  any time, and a round in which anything is unusual (an empty contribution, settings that differ, a repeated push, a
  pull of some of the slices only) is closed by the shards.
* While a slice is in a group, its shard is out of date. Whoever wants the shard dissolves the group first.
* What has been handed out never changes: a version is written into a buffer that nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdist.core.halves import Halves
from kvdist.core.shard import Allocate, Bits, Buffer, Contribution, PullRequest, Setting, Shard, scale_of
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.nodes import Member
from kvdist.optimizer.interface import SliceUpdater
from kvdist.optimizer.states import Part
from kvdist.protocol.arrays import U8, U32
from kvdist.protocol.layout import PayloadView, offsets, stretches
from kvdist.protocol.messages import Flag, Push

SLICES_MIN = 2
"""A group of one would gain nothing."""
_APART = int(Flag.EMPTY | Flag.HOLD)
"""What adds nothing is no gradient, and what is held is kept back slice by slice."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPush:
    """What one worker adds to the next version of all slices of a group."""

    member: Member
    run: int
    steps: U32
    versions: U32
    samples: U32
    flags: int
    setting: Setting
    values: Bits
    """The payload as it came, padding included."""
    pull: bool

    @classmethod
    def of(
        cls, sender: Member, message: Push, stretch: slice, payload: PayloadView, settings: Sequence[Setting]
    ) -> GroupPush | None:
        """These slices of a message as one contribution; None where they count or look differently."""
        flags, setting_of = message.flags[stretch], message.setting_of[stretch]
        codes, runs = message.arrays.dtypes[stretch], message.runs[stretch]
        if len(codes) < SLICES_MIN or flags[0] & _APART or (runs != runs[0]).any():
            return None
        if (flags != flags[0]).any() or (setting_of != setting_of[0]).any() or (codes != codes[0]).any():
            return None
        return cls(
            sender,
            int(runs[0]),
            message.steps[stretch],
            message.versions[stretch],
            message.samples[stretch],
            int(flags[0]),
            settings[int(setting_of[0])],
            payload.stretch(stretch.start, stretch.stop, DType(int(codes[0]))),
            message.pull,
        )


@dataclass(frozen=True, slots=True, eq=False)
class GroupPull:
    """A worker that waits for all slices of a group to reach a state."""

    member: Member
    run: int
    steps: U32
    versions: U32


@dataclass(slots=True, eq=False)
class GroupBuffer:
    """Memory for one version of all slices, laid out as a payload. While `leases` is not 0 somebody still reads it."""

    array: Bits
    payload: memoryview
    slices: list[Buffer]
    """The same memory, slice by slice; not to be written by whoever gets one."""
    leases: int = 0


class Group:
    """Slices of one store and dtype in the order of a run.

    Args:
        shards: the slices, with no open round and nobody waiting, and each with a value. They are taken over.
        ids: (n,) their numbers.
        dtype: of them all.
        updater: what updates them; None while a sum replaces the value.
        allocate: gives memory for values.
    """

    def __init__(
        self, shards: Sequence[Shard], ids: U32, dtype: DType, updater: SliceUpdater | None, allocate: Allocate
    ) -> None:
        self.shards = shards
        self.ids = ids
        self.policy = shards[0].policy
        self.counts: U32 = np.array([shard.count for shard in shards], np.uint32)
        self.dtypes: U8 = np.full(len(shards), dtype, np.uint8)
        self.dtype = dtype
        self.versions: U32 = np.array([shard.version for shard in shards], np.uint32)
        ranks = set().union(*(shard.counted for shard in shards))
        self.counted: dict[int, U32] = {
            rank: np.array([shard.counted.get(rank, 0) for shard in shards], np.uint32) for rank in ranks
        }
        self.slots: dict[int, GroupPush] = {}
        self.pulls: list[GroupPull] = []
        self.open_since = 0.0
        self.rounds = 0
        """Closed since it was made."""
        self._updater = updater
        self._allocate = allocate
        self._starts, self._nbytes = offsets(self.dtypes, self.counts)
        self._spare: list[GroupBuffer] = []
        self._parts = [
            Part(shard.number, start // dtype.itemsize, shard.count)
            for shard, start in zip(shards, self._starts.tolist(), strict=True)
        ]
        if updater is not None:
            updater.join(self, self._parts, self._nbytes // dtype.itemsize, dtype)
        self.published = self._new_buffer()
        for shard, buffer in zip(shards, self.published.slices, strict=True):
            assert shard.published is not None
            buffer.array[...] = shard.published.array
        halves = shards[0].halves
        self._halves = None if halves is None else Halves(halves.dtype, self.counts.tolist(), halves.kernels, allocate)

    @property
    def outgoing(self) -> GroupBuffer | Buffer:
        """The present version as it travels to workers."""
        if self._halves is None:
            return self.published
        return self._halves.of([buffer.array for buffer in self.published.slices])

    @property
    def outgoing_dtypes(self) -> U8:
        """(n,) of what travels to workers."""
        return self.dtypes if self._halves is None else self._halves.dtypes

    def fits(self, push: GroupPush) -> bool:
        """Whether this is the worker's next push of each slice, and its first in this round."""
        rank = push.member.node.rank
        return rank not in self.slots and bool((push.steps == self.counted_of(rank)).all())

    def offer(self, push: GroupPush, now: float) -> None:
        """Put a contribution that fits into its slot."""
        if not self.slots:
            self.open_since = now
        self.slots[push.member.node.rank] = push

    def is_ready(self, members: Set[int]) -> bool:
        """Whether the open round can be closed while the workers `members` are alive."""
        return bool(self.slots) and self.policy.is_full(self.slots.keys(), members)

    def close(self, kernels: Kernels) -> list[GroupPush] | None:
        """Make the next version and return what went into it; None if the shards have to do it, nothing is changed.

        Passes are those of `Shard.close`, over all slices together.
        """
        ranks = sorted(self.slots)[: self.policy.close]
        pushes = [self.slots[rank] for rank in ranks]
        lr, wd = pushes[0].setting[:2]
        if any(push.setting[:2] != (lr, wd) for push in pushes) or (self.policy.needs_optimizer and not self._updater):
            return None
        values = [push.values for push in pushes]
        optimizer = None if self._updater is None else self._updater.optimizer
        scales = [scale_of(push.setting, push.flags, len(pushes), optimizer) for push in pushes]
        target = self._target()
        try:
            if self._updater is None:
                kernels.weighted_sum(values, scales, self.dtype, target.array)
            else:
                self._updater.update(self, self.published.array, values, scales, self.dtype, target.array, lr, wd)
        except (TypeError, ValueError):
            self._spare.append(target)
            return None
        self._spare.append(self.published)
        self.published = target
        if self._halves is not None:
            self._halves.forget()
        self.versions += np.uint32(1)
        self.rounds += 1
        for rank, push in zip(ranks, pushes, strict=True):
            self.counted[rank] = push.steps + np.uint32(1)
            del self.slots[rank]
        return pushes

    def take_satisfied_pulls(self) -> list[GroupPull]:
        """The pulls that the present state answers; they are removed."""
        ready = [pull for pull in self.pulls if self.satisfies(pull)]
        self.pulls = [pull for pull in self.pulls if pull not in ready] if ready else self.pulls
        return ready

    def is_even(self, pull: GroupPull) -> bool:
        """Whether one and the same round answers a pull for all slices. Or some of them would wait for the others."""
        lags = ((pull.steps, self.counted_of(pull.member.node.rank)), (pull.versions, self.versions))
        for wanted, present in lags:
            lag = np.maximum(wanted.astype(np.int64) - present, 0)
            if (lag != lag[0]).any():
                return False
        return True

    def satisfies(self, pull: GroupPull) -> bool:
        """Whether the present state answers a pull."""
        counted = self.counted_of(pull.member.node.rank)
        return bool((counted >= pull.steps).all() and (self.versions >= pull.versions).all())

    def counted_of(self, rank: int) -> U32 | np.uint32:
        """(n,) how many pushes of a worker are in the values; a plain 0 for one that has not pushed."""
        return self.counted.get(rank, np.uint32(0))

    def dissolve(self) -> None:
        """Put everything back into the shards."""
        for i, shard in enumerate(self.shards):
            shard.version = int(self.versions[i])
            shard.counted = {rank: int(counted[i]) for rank, counted in self.counted.items()}
            shard.published = self.published.slices[i]
            if shard.halves is not None:
                shard.halves.forget()
            if self.slots or self.pulls:
                shard.open_since = self.open_since
        for push in self.slots.values():
            self._spread(push)
        for pull in self.pulls:
            steps, versions = pull.steps.tolist(), pull.versions.tolist()
            for i, shard in enumerate(self.shards):
                shard.pulls.append(PullRequest(pull.member, pull.run, steps[i], versions[i]))
        if self._updater is not None:
            self._updater.split(self, self._parts)

    def validate(self, members: Set[int]) -> None:
        """Check every invariant."""
        assert self.published not in self._spare, "the published buffer is not spare"
        assert not self.is_ready(members), "a full round is closed at once"
        assert not any(self.satisfies(pull) for pull in self.pulls), "a pull that can be answered is answered"
        assert not any(shard.slots or shard.pulls for shard in self.shards), "what is open is open in the group"

    def _spread(self, push: GroupPush) -> None:
        steps, versions, samples = push.steps.tolist(), push.versions.tolist(), push.samples.tolist()
        for i, (shard, part) in enumerate(zip(self.shards, self._parts, strict=True)):
            shard.slots[push.member.node.rank] = Contribution(
                push.member,
                push.run,
                steps[i],
                versions[i],
                samples[i],
                push.flags,
                push.setting,
                push.values[part.start : part.start + part.count],
                push.pull,
            )

    def _target(self) -> GroupBuffer:
        for i, buffer in enumerate(self._spare):
            if buffer.leases == 0:
                return self._spare.pop(i)
        return self._new_buffer()

    def _new_buffer(self) -> GroupBuffer:
        memory: npt.NDArray[np.uint8] = self._allocate(self._nbytes)
        memory.fill(0)  # the padding is sent too
        array: Bits = memory.view(self.dtype.storage)
        slices = [
            Buffer(array[part.start : part.start + part.count], memory.data[start:stop], pooled=False)
            for part, start, stop in zip(
                self._parts, self._starts.tolist(), [*self._starts[1:].tolist(), self._nbytes], strict=True
            )
        ]
        return GroupBuffer(array, memory.data, slices)


def joined_stretches(runs: U32) -> list[tuple[int, int]]:
    """The stretches of equal runs; neighbours that are too short for a group as one, to be looked at slice by slice."""
    joined: list[tuple[int, int]] = []
    short = False
    for begin, end in stretches(runs):
        was_short, short = short, end - begin < SLICES_MIN
        if short and was_short:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    return joined
