"""`Round`: the contributions to the next version of slices, with a slot for each worker. Pure; it computes nothing.

Every holder of slices on a server has a round; `kvdist.core.server.holder.close_round` closes it. Invariants:

* A round is a set keyed by worker, never a count of messages: the first contribution of a worker wins.
* Contributions are taken in rank order, so that two runs give the same bits.
* Each worker has a counter of its pushes. Only its next push fits; the value already has any earlier push.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdist import errors
from kvdist.core import machine as fx
from kvdist.core.policy import SYNC, Policy
from kvdist.naming import name_of
from kvdist.nodes import Member, worker
from kvdist.optimizer.base import Optimizer
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import Bits

# Plain numbers: operators of enums are written in Python, and these are compared for every block of every push.
_EMPTY, _AVERAGE = int(msg.Flag.EMPTY), int(msg.Flag.AVERAGE)
_WEIGHTED, _HOLD = int(msg.Flag.WEIGHTED), int(msg.Flag.HOLD)

Setting = tuple[float | None, float | None, float | None]
"""Learning rate, weight decay, rescale; None where the server's optimizer decides."""
RowIds = npt.NDArray[np.int64]
"""(k,) row ids of a whole table, strictly ascending."""
Refusal = tuple[msg.ErrorCode, str]
"""The code and the reason of a refusal."""
UNANSWERED = -1
"""Replaces the number of a run where the push came in a sum: the worker that sent the sum gets the reply for all of
it."""


def setting_of(numbers: tuple[float, float, float]) -> Setting:
    """Convert numbers from the wire, where not-a-number means that the server's optimizer decides."""
    lr, wd, rescale = (None if math.isnan(number) else number for number in numbers)
    return lr, wd, rescale


def numbers_of(setting: Setting) -> tuple[float, float, float]:
    """The inverse of `setting_of`, for the wire."""
    lr, wd, rescale = (math.nan if number is None else number for number in setting)
    return lr, wd, rescale


@dataclass(slots=True)
class Contribution:
    """The push of a worker to the slices of a holder: part of their next version."""

    member: Member
    run: int
    step: int
    """Number of pushes that the worker sent before this push."""
    version: int
    """The oldest version of a slice that the worker had seen."""
    samples: int
    """Number of examples that the push sums; 0 if unknown."""
    flags: int
    """`Flag`s."""
    setting: Setting
    values: Bits
    """The elements of all slices, or of the rows in `row_ids`; empty if the push has no gradient."""
    pull: bool = False
    summed_with: tuple[int, ...] = ()
    """The ranks of all workers whose pushes came in the same sum; empty for a push that came alone. The first
    contribution of a sum has the values, the others are empty."""
    row_ids: RowIds | None = None
    """The rows of a table that `values` has; None for a block, whose elements are all pushed."""

    @property
    def is_empty(self) -> bool:
        """Whether it has no gradient, or another contribution has the sum of both: then it is only counted."""
        return bool(self.flags & _EMPTY)

    @property
    def contributor(self) -> msg.Contributor:
        """The entry for this push in the list of the pushes in a sum."""
        return msg.Contributor(self.member.node.rank, self.member.incarnation, self.step, self.samples)

    @property
    def reads_in_place(self) -> bool:
        """Whether the worker reads the new value in place."""
        return bool(self.flags & _HOLD)


@dataclass(slots=True)
class Admission:
    """The versions that a round may close while workers join the running job. Without it, a worker takes part in all
    versions."""

    limit: int | None = None
    """The highest version until the scheduler has decided from which version on newcomers take part; None: no limit."""
    since: dict[int, float] = field(default_factory=dict)
    """Worker rank → the version from which on it takes part, if that is still to come; NEVER if it is not known yet."""

    def allows(self, version: int) -> bool:
        """Whether the round at this version may close."""
        return self.limit is None or version < self.limit

    def of(self, ranks: Iterable[int], version: int) -> set[int]:
        """Return the workers among these that take part in the round at this version."""
        return {rank for rank in ranks if self.since.get(rank, 0) <= version}

    def is_skipped(self, live: Set[int]) -> bool:
        """Whether none of these workers takes part yet, but some will: then a round closes without contributions."""
        return any(self.since.get(rank, 0) < fx.NEVER for rank in live)


class Verdict(enum.Enum):
    """Outcomes of a contribution at a holder."""

    ACCEPTED = enum.auto()
    ALREADY_COUNTED = enum.auto()
    """A closed round counted it: its sender gets the answer again."""
    REPEATED = enum.auto()
    """The open round already has it."""
    INCOMPLETE = enum.auto()
    """It is a part of a push of rows, kept until the last part comes."""
    HAND_BACK = enum.auto()
    """It is a sum that includes a push which has also come by itself: each worker in the sum must push for itself."""


@dataclass(slots=True)
class PullRequest:
    """A worker that waits until a holder has counted its pushes and has reached a version."""

    member: Member
    run: int
    step: int
    version: int
    row_ids: RowIds | None = None
    """The rows of a table that the worker wants; None for all elements of a block."""


@dataclass(slots=True, eq=False)
class Round:
    """The open round of a holder, the counters of the rounds before it, and the pulls that wait for its end."""

    key: int | str
    """The key, for messages."""
    policy: Policy
    version: int = 0
    """Number of closed rounds."""
    restored: int = 0
    """Updates of the value minus closed rounds: the updates before a loaded checkpoint, less the rounds without any
    contribution."""
    slots: dict[int, Contribution] = field(default_factory=dict)
    """Worker rank → its contribution."""
    counted: dict[int, int] = field(default_factory=dict)
    """Worker rank → number of its pushes that are in the value, or were refused for good."""
    examples: dict[int, int] = field(default_factory=dict)
    """Worker rank → number of examples that those pushes summed, for workers that report it."""
    samples: int = 0
    """Number of examples that the value sums, with those of lost workers and of a loaded checkpoint, as far as pushes
    have the number."""
    refused: dict[int, tuple[int, Refusal]] = field(default_factory=dict)
    """Worker rank → the counter of its last push and the refusal, if that push was refused for good. A worker that
    repeats the push is refused again: a neighbour may have left with the first answer."""
    pulls: list[PullRequest] = field(default_factory=list)
    _unsatisfied: int = field(default=0, init=False)
    """Number of pulls, from the first, that were checked since the last count and still wait."""
    open_since: float = 0.0
    admission: Admission | None = None
    """State of newcomers; None nearly always."""
    began: dict[int, int] = field(default_factory=dict)
    """Rank of each worker that has joined later → where its counter began: the pushes below that number are those of
    others."""

    @property
    def is_quiet(self) -> bool:
        """Whether it has no contribution and no waiting reader."""
        return not self.slots and not self.pulls

    def offer(self, contribution: Contribution, now: float) -> Verdict:
        """Put a contribution into its slot.

        Raises:
            PushRefused: the worker's push counter does not fit, which only a broken peer can cause.
        """
        verdict = self.verdict_on(contribution)
        if verdict is Verdict.ACCEPTED:
            rank = contribution.member.node.rank
            if not self.slots:
                self.open_since = now
            self.slots[rank] = contribution
            self.refused.pop(rank, None)  # it was answered, or the worker would not go on
        return verdict

    def verdict_on(self, contribution: Contribution) -> Verdict:
        """The verdict that `offer` would return.

        Raises:
            PushRefused: as `offer`.
        """
        rank = contribution.member.node.rank
        expected = self.counted.get(rank, 0)
        if contribution.step < expected:
            return Verdict.ALREADY_COUNTED
        if contribution.step > expected:
            raise errors.PushRefused(
                f"{contribution.member} sent its push {contribution.step} of {name_of(self.key)},"
                f" but only {expected} of its pushes have been counted"
            )
        return Verdict.REPEATED if rank in self.slots else Verdict.ACCEPTED

    def wait(self, pull: PullRequest, now: float) -> None:
        """Queue a pull."""
        if self.is_quiet:
            self.open_since = now
        self.pulls.append(pull)

    def is_complete(self, live: Set[int], present: Set[int] | None = None) -> bool:
        """Whether the round can be closed while these workers are alive.

        Args:
            live: the ranks of the workers that are alive.
            present: the ranks whose contributions count; None for the ranks of all slots.
        """
        if present is None:
            present = self.slots.keys()
        admission = self.admission
        if admission is None:
            return bool(present) and self.policy.is_full(present, live)
        awaited, ready = admission.of(live, self.version), admission.of(present, self.version)
        if not admission.allows(self.version):
            return False
        return self.policy.is_full(ready, awaited) if ready else not awaited and admission.is_skipped(live)

    def missing(self, live: Set[int], present: Set[int] | None = None) -> tuple[int, ...]:
        """Return the ranks whose contributions are awaited; `present` are the ranks that count, None: all slots."""
        awaited = live if self.admission is None else self.admission.of(live, self.version)
        return self.policy.missing(self.slots.keys() if present is None else present, awaited) if self.slots else ()

    def close(self, ranks: Sequence[int] | None = None) -> list[Contribution]:
        """Count contributions, in rank order, and close the round: the version grows by 1.

        Args:
            ranks: the ranks to count; None for the choice of the policy.
        """
        chosen = self.policy.chosen(self.ready()) if ranks is None else ranks
        contributions = [self.slots.pop(rank) for rank in chosen]
        self.version += 1
        self.restored -= not contributions
        self._unsatisfied = 0
        for contribution in contributions:
            self.counted[contribution.member.node.rank] = contribution.step + 1
            if contribution.samples:
                rank = contribution.member.node.rank
                self.examples[rank] = self.examples.get(rank, 0) + contribution.samples
                self.samples += contribution.samples
        if self.admission is not None:
            self._tidy(self.admission)
        return contributions

    def ready(self) -> Set[int]:
        """The ranks whose contributions may be in the next version."""
        present = self.slots.keys()
        return present if self.admission is None else self.admission.of(present, self.version)

    # Newcomers: workers that join a running job. Counters of workers are aligned with versions: a worker's next push is
    # for the version after `counted` of them, so a newcomer's begin at the version in which it takes part first.

    def promise(self, more: int = 1) -> None:
        """Promise to make at most `more` versions until `admit`. An earlier promise still holds."""
        admission = self.admission = self.admission or Admission()
        if admission.limit is None:
            admission.limit = self.version + more

    def held_version(self, more: int) -> int:
        """Return the version at which this round promised to make at most `more` versions; without a promise its
        present version."""
        limit = None if self.admission is None else self.admission.limit
        return self.version if limit is None else max(limit - more, 0)

    def admit(self, ranks: Collection[int], version: int | None) -> None:
        """Let workers take part from a version on; None for not yet, until the next call."""
        admission = self.admission = self.admission or Admission()
        admission.limit = None
        self._unsatisfied = 0
        for rank in ranks:
            admission.since[rank] = fx.NEVER if version is None else version
            if version is not None:
                self.counted[rank] = self.began[rank] = version
        self._tidy(admission)

    def leave_out(self, ranks: Sequence[int]) -> None:
        """Begin without these newcomers, until `admit`."""
        if ranks:
            self.admit(ranks, None)

    def rejoin(self, ranks: Iterable[int]) -> None:
        """Continue with workers that have rejoined (``--on-loss wait``). Their counted pushes still count."""
        if self.admission is not None:
            self.admission.limit = None
            self._tidy(self.admission)
        self.began.update({rank: self.counted.get(rank, 0) for rank in ranks})

    def is_before(self, pull: PullRequest) -> bool:
        """Whether a pull wants the version before the present version: a rejoined worker repeats the step."""
        return pull.step == self.version - 1 < self.counted.get(pull.member.node.rank, 0)

    def _tidy(self, admission: Admission) -> None:
        admission.since = {rank: since for rank, since in admission.since.items() if since > self.version}
        if not admission.since and admission.limit is None:
            self.admission = None

    def refuse(self, contributions: Sequence[Contribution], refusal: Refusal) -> None:
        """Record that these counted contributions have not been applied."""
        for contribution in contributions:
            self.refused[contribution.member.node.rank] = (contribution.step, refusal)
            self.samples -= contribution.samples

    def refusal_of(self, contribution: Contribution) -> Refusal | None:
        """Return the refusal of a contribution; None if it was not refused for good."""
        step, refusal = self.refused.get(contribution.member.node.rank, (-1, None))
        return refusal if step == contribution.step else None

    def take_satisfied(self) -> list[PullRequest]:
        """Remove and return the pulls that the present state answers."""
        ready, waiting = list[PullRequest](), list[PullRequest]()
        for pull in self.pulls[self._unsatisfied :]:
            (ready if self.satisfies(pull) else waiting).append(pull)
        if ready:
            self.pulls[self._unsatisfied :] = waiting
        self._unsatisfied = len(self.pulls)
        return ready

    def satisfies(self, pull: PullRequest) -> bool:
        """Whether the present state answers a pull."""
        return self.counted.get(pull.member.node.rank, 0) >= pull.step and self.version >= pull.version

    def forget(self, gone: Set[int]) -> None:
        """Drop the pulls of workers that are gone. Their pushes still count."""
        self.pulls = [pull for pull in self.pulls if pull.member.node.rank not in gone]
        self._unsatisfied = 0

    def credit(self, examples: int) -> None:
        """Count examples of a lost worker that count in other slices, but not in this slice yet."""
        if self.samples:
            self.samples += examples

    def drop(self, ranks: Set[int]) -> dict[int, int]:
        """Drop pushes of lost workers that no version has. Returns rank → number of its pushes that versions have.

        Their counters are dropped, too: they would be wrong for another process of that rank, and keep blocks from
        merging.
        """
        for rank in ranks:
            self.slots.pop(rank, None)
            self.refused.pop(rank, None)
            if self.admission is not None:
                self.admission.since.pop(rank, None)
            self.examples.pop(rank, None)
        return {rank: max(self.counted.pop(rank, 0) - self.began.pop(rank, 0), 0) for rank in ranks}

    def drop_uncounted(self, ranks: Set[int]) -> None:
        """Drop pushes of lost workers that no version has: the workers will rejoin, and push again."""
        for rank in ranks:
            self.slots.pop(rank, None)

    def rewind(self, version: int, ranks: Iterable[int], later: Set[int]) -> None:
        """Go back to a version, with as many counted pushes of each of these ranks; the open round is dropped.

        Args:
            version: the version.
            ranks: the live workers.
            later: those of them that have joined later.
        """
        self.version = version
        self.counted = dict.fromkeys(ranks, version)
        self.began = dict.fromkeys(later & self.counted.keys(), version)
        self.examples = {}
        self.slots, self.refused, self.pulls, self.admission = {}, {}, [], None
        self._unsatisfied = 0

    def keep_only(self, live: Mapping[int, object]) -> None:
        """Drop the contributions of departed workers: they belong to values that were replaced."""
        self.slots = {rank: one for rank, one in self.slots.items() if rank in live}

    def validate(self) -> None:
        """Check every invariant."""
        for rank, contribution in self.slots.items():
            assert contribution.member.node == worker(rank), "a slot holds its own worker's contribution"
            assert contribution.step == self.counted.get(rank, 0), "a slot holds the worker's next push"


def scales_of(
    present: Sequence[Contribution], contributions: Sequence[Contribution], optimizer: Optimizer | None
) -> list[float]:
    """The factor of each contribution in `present`.

    Args:
        present: contributions with values, which `agreed_settings` has checked.
        contributions: all contributions of the round.
        optimizer: provides the rescale for contributions without a rescale.

    Raises:
        PushRefused: a mean is of no samples, which only a broken peer can cause.
    """
    if present and present[0].flags & _WEIGHTED:
        if not all(one.samples for one in present):
            raise errors.PushRefused("a contribution that is weighted by its samples has none")
        total = sum(one.samples for one in contributions if one.flags & _WEIGHTED)
        return [rescale_of(one, optimizer) * one.samples / total for one in present]
    count = len(contributions)
    scales = []
    for one in present:
        rescale = rescale_of(one, optimizer)
        scales.append(rescale / count if one.flags & _AVERAGE else rescale)
    return scales


def rescale_of(contribution: Contribution, optimizer: Optimizer | None) -> float:
    """The number that a worker's optimizer multiplies its gradients by."""
    rescale = contribution.setting[2]
    if rescale is None:
        rescale = 1.0 if optimizer is None else optimizer.rescale_grad
    return rescale


def agreed_settings(
    key: int | str, present: Sequence[Contribution], later: Set[int], policy: Policy = SYNC
) -> tuple[float | None, float | None]:
    """The learning rate and weight decay of a round; None where the server's optimizer decides.

    Args:
        key: for messages.
        present: the contributions with a gradient.
        later: the ranks of workers that have joined later, whose schedules may have begun anew: the others' words hold.
        policy: the policy of the round. Where each worker has its pace, the numbers of the lowest rank hold.

    Raises:
        OptimizerMismatch: the numbers differ, or only some workers weigh by samples.
    """
    first, weighted = present[0].setting, present[0].flags & _WEIGHTED
    for other in present[1:]:
        if other.flags & _WEIGHTED != weighted:
            said = "; ".join(f"{one.member}: {'yes' if one.flags & _WEIGHTED else 'no'}" for one in present)
            raise errors.OptimizerMismatch(
                f"only some workers pass the number of samples of their gradient of {name_of(key)} ({said}): call"
                " step(samples=n) on all workers, or on none"
            )
        if other.setting != first and other.setting[:2] != first[:2] and not policy.has_own_pace:
            if later:
                elders = [one for one in present if one.member.node.rank not in later]
                if len(elders) < len(present):
                    eldest = min(present, key=lambda one: one.member.incarnation)
                    return agreed_settings(key, elders or [eldest], frozenset(), policy)
            said = "; ".join(f"{c.member} {_said(c.setting)}" for c in present)
            raise errors.OptimizerMismatch(
                f"workers disagree on the learning rate or weight decay of {name_of(key)} in one round: {said}."
                " Set the optimizer on every worker, and change its numbers at the same step"
            )
    return first[:2]


def require_optimizer(key: int | str, policy: Policy, optimizer: object | None) -> None:
    """Refuse a contribution that no round sums where nothing updates.

    Raises:
        PushRefused: the store has neither.
    """
    if policy.needs_optimizer and optimizer is None:
        raise errors.PushRefused(
            f"{name_of(key)}: a dist_async store has no rounds to sum, so it needs an optimizer:"
            " call set_optimizer before the first push"
        )


def _said(setting: Setting) -> str:
    lr, wd, _ = setting
    return "has not called set_optimizer" if lr is None or wd is None else f"says lr {lr:g}, wd {wd:g}"
