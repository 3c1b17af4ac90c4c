"""One server's rows of a table: who has contributed to their next version, and who waits for which of them.

The rows themselves are a `RowBlock`. Rules that hold here:

* A round is a set keyed by worker, as for every slice; contributions are taken in rank order.
* Rows are changed in place, so what is handed out is gathered when it is answered, into memory of its own.
* A contribution too large for a message arrives in several and takes its slot with the last one. If one of them is
  refused, so are those behind it: no part of a contribution counts without the others.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdist.core.policy import Policy
from kvdist.core.round import (
    PullRequest,
    Round,
    Setting,
    Verdict,
    agreed_settings,
    require_optimizer,
    scale_of,
)
from kvdist.core.server.buffers import Bits
from kvdist.core.server.row_block import RowBlock
from kvdist.errors import PushRefused
from kvdist.nodes import Member
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.arrays import U32
from kvdist.protocol.messages import Flag

Ids = npt.NDArray[np.int64]
"""(k,) row ids of the whole table, strictly ascending."""

_EMPTY = int(Flag.EMPTY)


@dataclass(slots=True)
class RowContribution:
    """What one worker adds to the next version of the rows.

    parts: (ids, values) as they came, ascending from part to part.
    """

    member: Member
    run: int
    step: int
    version: int
    samples: int
    flags: int
    setting: Setting
    parts: list[tuple[Ids, Bits]]

    @property
    def is_empty(self) -> bool:
        """Whether there is no gradient; one of no rows is a gradient."""
        return bool(self.flags & _EMPTY)

    def obstacle_to(self, part: RowContribution) -> str:
        """Why this is not the next part of it; '' if it is."""
        if (part.run, part.step, part.flags) != (self.run, self.step, self.flags):
            return "a part of another push between those"
        ids = part.parts[0][0]
        last = next((int(before[-1]) for before, _ in reversed(self.parts) if len(before)), -1)
        return "rows that do not ascend" if len(ids) and int(ids[0]) <= last else ""


@dataclass(slots=True)
class RowPull(PullRequest):
    """A worker that waits for rows to reach a state."""

    ids: Ids


@dataclass(slots=True, eq=False)
class RowShard:
    """The rows of one table that one server keeps, and their rounds."""

    number: int
    block: RowBlock
    round: Round[RowContribution, RowPull]
    has_value: bool
    """Whether its first values are complete."""
    arriving: dict[int, RowContribution] = field(default_factory=dict)
    """Worker rank → a contribution of which more is to come."""
    spoilt: dict[int, int] = field(default_factory=dict)
    """Worker rank → the last of its runs of which something was refused."""
    rooms: dict[int, Bits] = field(default_factory=dict)
    """Worker rank → memory for the values of a contribution in several parts: fresh memory is slow."""

    @property
    def key(self) -> int | str:
        """Of the table."""
        return self.round.key

    @property
    def ids(self) -> U32:
        """(1,) its number."""
        return np.array([self.number], np.uint32)

    @property
    def version(self) -> int:
        """How many rounds have been closed."""
        return self.round.version

    @property
    def policy(self) -> Policy:
        """When rounds are closed."""
        return self.round.policy

    @property
    def counted(self) -> dict[int, int]:
        """Worker rank → how many of its pushes are in the value, or were refused for good."""
        return self.round.counted

    @property
    def owner(self) -> RowShard:
        """It is saved by itself."""
        return self

    def offer(self, contribution: RowContribution, more: bool, now: float) -> Verdict:
        """Put a contribution, or the next part of it, into its slot.

        Raises:
            PushRefused: the worker's push counter does not fit, or a part does not follow the one before it; its
                sender is broken.
        """
        rank = contribution.member.node.rank
        verdict = self.round.place_of(contribution)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        begun = self.arriving.pop(rank, None)
        if begun is not None:
            obstacle = begun.obstacle_to(contribution)
            if obstacle:
                raise PushRefused(f"{contribution.member} sent {obstacle} of key {self.key!r}")
            begun.parts += contribution.parts
            contribution = begun
        if more:
            self.arriving[rank] = contribution
            return Verdict.REPEATED
        return self.round.offer(contribution, now)

    def spoil(self, rank: int, run: int) -> None:
        """Something of a run was refused: what has come of it is dropped, and what is to come will be."""
        self.spoilt[rank] = run
        begun = self.arriving.get(rank)
        if begun is not None and begun.run == run:
            del self.arriving[rank]

    def is_spoilt(self, rank: int, run: int) -> bool:
        """Whether something of this run was refused before."""
        return self.spoilt.get(rank) == run

    def is_ready(self, live: Set[int]) -> bool:
        """Whether the open round can be closed while these workers are alive."""
        return self.has_value and self.round.is_complete(live)

    def apply(self, contributions: Sequence[RowContribution], optimizer: Optimizer | None) -> None:
        """Change the rows by the contributions of a round.

        Raises:
            OptimizerMismatch, PushRefused: the round cannot be applied; nothing has changed.
        """
        require_optimizer(self.key, self.policy, optimizer)
        present = [contribution for contribution in contributions if not contribution.is_empty]
        if not present:
            return
        lr, wd = agreed_settings(self.key, present)
        scales = [scale_of(contribution, len(contributions), optimizer) for contribution in present]
        try:
            self.block.update([self._rows(c) for c in present], scales, optimizer, lr, wd)
        except (MemoryError, TypeError, ValueError) as error:
            raise PushRefused(f"key {self.key!r}: {error}") from error

    def take_satisfied_pulls(self) -> list[RowPull]:
        """The pulls that the present state answers; they are removed."""
        return self.round.take_satisfied() if self.has_value else []

    def obstacle_to(self, ids: Ids) -> str:
        """What is wrong with the ids of a message; '' if nothing is."""
        if not len(ids):
            return ""
        first, stop = self.block.first, self.block.stop
        if ids[0] < first or ids[-1] >= stop or not (ids[1:] > ids[:-1]).all():
            return f"key {self.key!r}: rows must ascend from {first} to {stop - 1} here"
        return ""

    def validate(self, live: Set[int]) -> None:
        """Check every invariant."""
        self.block.validate()
        self.round.validate()
        assert not self.is_ready(live), "a full round is closed at once"
        waiting = self.round.pulls if self.has_value else []
        assert not any(self.round.satisfies(pull) for pull in waiting), "a pull that can be answered is answered"
        assert not self.round.slots.keys() & self.arriving.keys(), "what is complete does not arrive"

    def _rows(self, contribution: RowContribution) -> tuple[Ids, Bits]:
        """All its ids and values, until the next round; one pass over them where they came in several messages."""
        if len(contribution.parts) == 1:
            return contribution.parts[0]
        ids, values = zip(*contribution.parts, strict=True)
        count, rank = sum(map(len, values)), contribution.member.node.rank
        room = self.rooms.get(rank)
        if room is None or not count <= len(room) <= 2 * count:
            room = self.rooms[rank] = np.empty(count, self.block.dtype.storage)
        np.concatenate(values, out=room[:count])
        return np.concatenate(ids), room[:count]
