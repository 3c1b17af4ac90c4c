"""One slice of one key on its server: its versions, who has contributed to the next one, who waits for it.

Rules that hold here:

* A round is a set keyed by worker, never a count of messages: the first contribution of a worker wins.
* What has been handed out never changes. A new version is written into another buffer than the published one, and
  never into one that somebody still reads (a *lease*).
* Contributions are summed in rank order, so that two runs give the same bits.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence, Set
from dataclasses import InitVar, dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvdist.core.policy import Policy
from kvdist.core.requests import ALONE_BYTES_MIN
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.kernels.interface import Kernels
from kvdist.nodes import Member, worker
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.interface import SliceUpdater
from kvdist.optimizer.step import Extent
from kvdist.protocol.arrays import padded
from kvdist.protocol.messages import ErrorCode, Flag

# Plain numbers: operators of enums are written in Python, and this is asked for every slice of every push.
_AVERAGE, _HOLD = int(Flag.AVERAGE), int(Flag.HOLD)
_ADDS_NOTHING = int(Flag.EMPTY | Flag.CARRIED)

Bits = npt.NDArray[np.generic]
"""A 1-D array of `DType.storage` elements."""


Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""Gives that many bytes of memory, from where they travel best; their content means nothing."""


def ordinary_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Bytes of this process alone."""
    return np.empty(nbytes, np.uint8)


class Block:
    """Memory for the first values of many slices: small ones get a piece of one allocation.

    Args:
        sizes: bytes of each value.
        allocate: gives memory.
    """

    def __init__(self, sizes: npt.NDArray[np.int64], allocate: Allocate) -> None:
        small = int(sizes[sizes < ALONE_BYTES_MIN].sum())
        self._left = allocate(small) if small else np.empty(0, np.uint8)
        self._allocate = allocate

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """See `Allocate`."""
        if not 0 < nbytes <= min(len(self._left), ALONE_BYTES_MIN - 1):
            return self._allocate(nbytes)
        piece, self._left = self._left[:nbytes], self._left[nbytes:]
        return piece


Setting = tuple[float | None, float | None, float | None]
"""Learning rate, weight decay, rescale; None where the server's optimizer decides."""


def setting_of(numbers: tuple[float, float, float]) -> Setting:
    """From the wire, where not-a-number stands for what the server's optimizer decides."""
    lr, wd, rescale = (None if math.isnan(number) else number for number in numbers)
    return lr, wd, rescale


@dataclass(slots=True)
class Contribution:
    """What one worker adds to the next version of a slice."""

    member: Member
    run: int
    step: int
    version: int
    samples: int
    flags: int
    setting: Setting
    values: Bits
    pull: bool
    silent: bool = False
    """It came with that of another worker, who is answered for both."""

    @property
    def is_empty(self) -> bool:
        """Whether it only counts: there is no gradient, or it is in the sum that another contribution carries."""
        return bool(self.flags & _ADDS_NOTHING)

    @property
    def holds(self) -> bool:
        """Whether the value that answers is read where it lies."""
        return bool(self.flags & _HOLD)


@dataclass(slots=True)
class PullRequest:
    """A worker that waits for the slice to reach a state."""

    member: Member
    run: int
    step: int
    version: int


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for one version. While `leases` is not 0 somebody still reads it.

    payload: the bytes of `array` and the padding behind it, ready to be sent.
    pooled: whether it may be written again; not when it is a part of a larger buffer.
    """

    array: Bits
    payload: memoryview
    leases: int = 0
    pooled: bool = True

    @classmethod
    def of(cls, count: int, dtype: DType, allocate: Allocate) -> Buffer:
        """A new one for `count` elements, not initialised but for the padding."""
        nbytes = count * dtype.itemsize
        memory = allocate(padded(nbytes))
        if len(memory) > nbytes:
            memory[nbytes:] = 0
        return cls(memory[:nbytes].view(dtype.storage), memory.data)


class HalvesOf(Protocol):
    """See `kvdist.core.halves.Halves`."""

    dtype: DType
    kernels: Kernels

    def of(self, values: Sequence[Bits]) -> Buffer:
        """These values as halves."""

    def forget(self) -> None:
        """There is another version."""


class Verdict(enum.Enum):
    """What `Shard.offer` did."""

    ACCEPTED = enum.auto()
    ALREADY_COUNTED = enum.auto()
    REPEATED = enum.auto()


Refusal = tuple[ErrorCode, str]
"""Of which kind, and why."""


@dataclass(slots=True, eq=False)
class Shard:
    """The state of one slice."""

    key: int | str
    number: int
    dtype: DType
    count: int
    policy: Policy
    allocate: Allocate = ordinary_memory
    version: int = 0
    """How many rounds have been closed."""
    published: Buffer | None = None
    """The present value; None before the first one has arrived."""
    spare: list[Buffer] = field(default_factory=list)
    slots: dict[int, Contribution] = field(default_factory=dict)
    """Worker rank → its contribution to the open round."""
    counted: dict[int, int] = field(default_factory=dict)
    """Worker rank → how many of its pushes are in the value, or were refused for good."""
    refused: dict[int, tuple[int, Refusal]] = field(default_factory=dict)
    """Worker rank → the counter of its last push that was refused for good. Whoever says that push again is told again:
    the first answer may have gone to a neighbour that left before it had passed it on."""
    pulls: list[PullRequest] = field(default_factory=list)
    held: dict[Member, Buffer] = field(default_factory=dict)
    """Worker → the version that it reads where it lies. Each is leased once for that; for good, when the worker leaves,
    because its process may go on reading."""
    open_since: float = 0.0
    halves: HalvesOf | None = None
    """Makes what workers get in place of the value; None where they get it as it is."""
    extent: Extent = field(init=False)
    """Where it lies in its parameter."""
    shape: InitVar[tuple[int, ...] | None] = None
    start: InitVar[int] = 0

    def __post_init__(self, shape: tuple[int, ...] | None, start: int) -> None:
        self.extent = Extent(self.key, (self.count,) if shape is None else shape, start)

    @property
    def has_value(self) -> bool:
        """Whether its first value is there."""
        return self.published is not None

    def initialise(self, values: Bits, allocate: Allocate | None = None) -> None:
        """Take the first value; one copy, into memory of `allocate`. One that is there already stays."""
        if self.published is None:
            self.replace(values, allocate)

    def replace(self, values: Bits, allocate: Allocate | None = None) -> None:
        """Take another value in place of the present one; one copy. The version stays: no round made it."""
        # In memory of its own, so that only updates write into spare buffers: an updater knows the weight that it wrote
        # last by its array, and must not meet that array with another content.
        target = Buffer.of(self.count, self.dtype, allocate or self.allocate)
        target.array[...] = values
        self.publish(target)
        self.spare = [buffer for buffer in self.spare if buffer.leases]

    def offer(self, contribution: Contribution, now: float) -> Verdict:
        """Put a contribution into its slot.

        Raises:
            PushRefused: the worker's push counter does not fit, which only a broken peer can cause.
        """
        rank = contribution.member.node.rank
        expected = self.counted.get(rank, 0)
        if contribution.step < expected:
            return Verdict.ALREADY_COUNTED
        if contribution.step > expected:
            raise PushRefused(
                f"{contribution.member} sent its push {contribution.step} of key {self.key!r},"
                f" but only {expected} of its pushes have been counted"
            )
        if rank in self.slots:
            present = self.slots[rank]
            if present.silent and not contribution.silent:
                # Who summed it with others has left, so its worker asks for itself now.
                present.run, present.pull, present.silent = contribution.run, contribution.pull, False
                present.flags |= contribution.flags & _HOLD
            return Verdict.REPEATED
        if not self.slots:
            self.open_since = now
        self.slots[rank] = contribution
        return Verdict.ACCEPTED

    def offer_joined(self, contributions: Sequence[Contribution], now: float) -> Verdict:
        """Put the contributions of several workers, summed together, into their slots: all or none.

        Raises:
            PushRefused: only some of them are the next pushes of their workers, which only a broken peer can cause.
        """
        counted = [self.counted.get(contribution.member.node.rank, 0) for contribution in contributions]
        if all(contribution.step < own for contribution, own in zip(contributions, counted, strict=True)):
            return Verdict.ALREADY_COUNTED
        for contribution, own in zip(contributions, counted, strict=True):
            if contribution.step != own or contribution.member.node.rank in self.slots:
                raise PushRefused(
                    f"push {contribution.step} of {contribution.member} to key {self.key!r} came in a sum, but"
                    f" {own} of its pushes have been counted"
                )
        for contribution in contributions:
            self.offer(contribution, now)
        return Verdict.ACCEPTED

    def refusal_of(self, contribution: Contribution) -> Refusal | None:
        """What its worker was told when the contribution was refused for good; None if it never was."""
        step, refusal = self.refused.get(contribution.member.node.rank, (-1, None))
        return refusal if step == contribution.step else None

    def is_ready(self, members: Set[int]) -> bool:
        """Whether the open round can be closed while the workers `members` are alive."""
        return self.published is not None and bool(self.slots) and self.policy.is_full(self.slots.keys(), members)

    def close(self, updater: SliceUpdater | None, kernels: Kernels) -> list[Contribution]:
        """Make the next version out of the open round and return what went into it, in rank order.

        Passes over the slice, W contributions: without an optimizer W reads and one write; with one as many more as
        its rule says. The published buffer is read, never written.

        Raises:
            OptimizerMismatch, PushRefused: the round cannot be applied. It is closed all the same, with the value as it
                was, so that the workers' counters go on; the caller tells them.
        """
        contributions = self.take(sorted(self.slots)[: self.policy.close])
        present = [contribution for contribution in contributions if not contribution.is_empty]
        if present:
            self._apply(present, len(contributions), updater, kernels)
        return contributions

    def take(self, ranks: Sequence[int]) -> list[Contribution]:
        """Count these workers' contributions to the open round, which makes a version, and return them."""
        contributions = [self.slots.pop(rank) for rank in ranks]
        self.version += 1
        for contribution in contributions:
            self.counted[contribution.member.node.rank] = contribution.step + 1
        return contributions

    def hold(self, member: Member) -> Buffer | None:
        """Let a worker read the present version where it lies, and return the one that it read until now.

        That one stays leased until the worker has the new one; whoever calls sees to it.
        """
        assert self.published is not None
        before = self.held.get(member)
        self.held[member] = self.published
        self.published.leases += 1
        return before

    def take_satisfied_pulls(self) -> list[PullRequest]:
        """The pulls that the present state answers; they are removed."""
        if not self.pulls or self.published is None:
            return []
        ready = [pull for pull in self.pulls if self._satisfies(pull)]
        if ready:
            self.pulls = [pull for pull in self.pulls if not self._satisfies(pull)]
        return ready

    def validate(self, members: Set[int], alone: bool = True) -> None:
        """Check every invariant. Unless `alone`, the round also waits for other slices."""
        assert self.published is None or self.published not in self.spare, "the published buffer is not spare"
        assert not (alone and self.is_ready(members)), "a full round is closed at once"
        assert not any(self._satisfies(pull) for pull in self.pulls), "a pull that can be answered is answered"
        for rank, contribution in self.slots.items():
            assert contribution.member.node == worker(rank), "a slot holds its own worker's contribution"
            assert contribution.step == self.counted.get(rank, 0), "a slot holds the worker's next push"

    def _satisfies(self, pull: PullRequest) -> bool:
        return (
            self.published is not None
            and self.counted.get(pull.member.node.rank, 0) >= pull.step
            and self.version >= pull.version
        )

    def _apply(
        self, present: Sequence[Contribution], total: int, updater: SliceUpdater | None, kernels: Kernels
    ) -> None:
        assert self.published is not None
        if self.policy.needs_optimizer and updater is None:
            raise PushRefused(
                f"key {self.key!r}: a dist_async store has no rounds to sum, so it needs an optimizer:"
                " call set_optimizer before the first push"
            )
        lr, wd = agreed_settings(self.key, present)
        target = self.target()
        optimizer = None if updater is None else updater.optimizer
        scales = [scale_of(c.setting, c.flags, total, optimizer) for c in present]
        values = [contribution.values for contribution in present]
        try:
            if updater is None:
                kernels.weighted_sum(values, scales, self.dtype, target.array)
            else:
                before, extent = self.published.array, self.extent
                updater.update(self.number, before, values, scales, self.dtype, target.array, lr, wd, extent)
        except (TypeError, ValueError) as error:
            self.spare.append(target)
            raise PushRefused(f"key {self.key!r}: {error}") from error
        self.publish(target)

    @property
    def outgoing(self) -> Buffer:
        """The present version as it travels to workers."""
        assert self.published is not None
        return self.published if self.halves is None else self.halves.of([self.published.array])

    @property
    def outgoing_dtype(self) -> DType:
        """Of what travels to workers."""
        return self.dtype if self.halves is None else self.halves.dtype

    def publish(self, buffer: Buffer) -> None:
        """Show this version from now on."""
        if self.halves is not None:
            self.halves.forget()
        if self.published is not None and self.published.pooled:
            self.spare.append(self.published)
        self.published = buffer

    def target(self) -> Buffer:
        """A buffer that nobody reads. There are at most two more than there are readers that lag behind."""
        for i, buffer in enumerate(self.spare):
            if buffer.leases == 0:
                return self.spare.pop(i)
        return Buffer.of(self.count, self.dtype, self.allocate)


class Told(Protocol):
    """What of a contribution workers must agree on."""

    @property
    def member(self) -> Member:
        """Whose it is."""

    @property
    def setting(self) -> Setting:
        """The numbers of the optimizer that it came with."""


def scale_of(setting: Setting, flags: int, total: int, optimizer: Optimizer | None) -> float:
    """The factor of a contribution in a round of `total`."""
    rescale = setting[2]
    if rescale is None:
        rescale = 1.0 if optimizer is None else optimizer.rescale_grad
    return rescale / total if flags & _AVERAGE else rescale


def agreed_settings(key: int | str, present: Sequence[Told]) -> tuple[float | None, float | None]:
    """The learning rate and weight decay of a round; None where the server's optimizer decides."""
    first = present[0].setting
    for other in present[1:]:
        if other.setting != first and other.setting[:2] != first[:2]:
            said = "; ".join(f"{c.member} {_said(c.setting)}" for c in present)
            raise OptimizerMismatch(
                f"workers disagree on the learning rate or weight decay of key {key!r} in one round: {said}."
                " Set the optimizer on every worker, and change its numbers at the same step"
            )
    return first[:2]


def _said(setting: Setting) -> str:
    lr, wd, _ = setting
    return "has not called set_optimizer" if lr is None or wd is None else f"says lr {lr:g}, wd {wd:g}"
