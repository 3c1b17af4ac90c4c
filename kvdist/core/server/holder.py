"""`Holder`: slices of a server with common counters, a block of arrays or the rows of a table. Pure.

Storage is of two kinds. A block publishes immutable versions, which are leased and shown without a copy; rows change in
place and are gathered. All code above it knows a holder by the interface below: rounds, replies, checkpoints, copies on
backups, losses and newcomers treat both kinds alike.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence, Set

from kvdist.checkpoint.snapshot import SliceImage, WantedSlice
from kvdist.core.round import Contribution, Round, RowIds
from kvdist.core.server.buffers import Buffer
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.arrays import U32, Arrays


class Holder(abc.ABC):
    """Slices of a store with common counters.

    Attributes:
        store: the number of the store.
        ids: (n,) the numbers of the slices.
        round: the open round, and the counters of the rounds before it.
        has_value: whether the first values are complete; no round closes before.
    """

    __slots__ = ()

    store: int
    ids: U32
    round: Round
    has_value: bool

    @abc.abstractmethod
    def key_of(self, position: int) -> int | str:
        """Return the key of a slice, by its position in `ids`."""

    # Rounds.

    def together(self, updater: SliceUpdater | None) -> Sequence[Holder]:
        """Return the holders whose rounds close together with this holder's round, itself among them."""
        return (self,)

    @abc.abstractmethod
    def keep_version(self, contributions: Sequence[Contribution], updater: SliceUpdater | None) -> None:
        """Keep the present version before these contributions change it (``--on-loss wait``).

        Raises:
            OptimizerMismatch, PushRefused: the contributions cannot be applied.
        """

    @abc.abstractmethod
    def apply(self, rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater | None) -> None:
        """Change the values of all holders of `together` by the contributions to each, which are counted already.

        Raises:
            OptimizerMismatch, PushRefused: the contributions cannot be applied; nothing has changed.
        """

    @abc.abstractmethod
    def summed(self, contributions: Sequence[Contribution], scales: Sequence[float]) -> tuple[Buffer, RowIds | None]:
        """Return the scaled sum of contributions, and the rows that it has if not all elements.

        Raises:
            MemoryError, TypeError, ValueError: the contributions cannot be summed.
        """

    @abc.abstractmethod
    def forwarded(self, total: Buffer | None, row_ids: RowIds | None) -> list[Arrays]:
        """Lay a sum out as the arrays of messages to the backup; None stands for a round without a gradient."""

    # Checkpoints and rollbacks.

    @abc.abstractmethod
    def saved(
        self, positions: Sequence[int], updater: SliceUpdater | None, contents: Sequence[str]
    ) -> tuple[list[SliceImage], Buffer | None]:
        """Return the present values of slices, in memory that does not change; and the buffer leased for it, if any.

        Args:
            positions: positions in `ids`.
            updater: the updater of the store, with the optimizer states of blocks.
            contents: parts to copy: `WEIGHTS`, `STATES`.

        Raises:
            MemoryError: a copy has no room; nothing has changed.
        """

    @abc.abstractmethod
    def wanted(self, updater: SliceUpdater | None) -> list[WantedSlice]:
        """Return the content that a checkpoint must have for each slice."""

    @abc.abstractmethod
    def load(self, image: SliceImage, updater: SliceUpdater | None) -> None:
        """Replace the value and the state of the only slice by those of an image."""

    @abc.abstractmethod
    def clear_for_rollback(self, is_updated: bool) -> None:
        """Drop everything but the value, before a rollback. A sum, which no optimizer updates, gets a value."""

    # Workers that are gone.

    def forget(self, gone: Set[int]) -> None:
        """Drop the pulls and incomplete pushes of departed workers. Their complete contributions still count."""
        self.round.forget(gone)

    @abc.abstractmethod
    def validate(self) -> None:
        """Check every invariant."""


def optimizer_of(updater: SliceUpdater | None) -> Optimizer | None:
    """Return the optimizer of an updater; None where a sum replaces the values."""
    return None if updater is None else updater.optimizer


def contributors(holders: Sequence[Holder]) -> Set[int]:
    """Return the ranks that have contributed to the open round of each holder."""
    return set.intersection(*(set(holder.round.ready()) for holder in holders))


def is_complete(holders: Sequence[Holder], live: Set[int]) -> bool:
    """Whether the rounds of holders can close with contributions of the same workers, while these are alive."""
    present = None if len(holders) == 1 else contributors(holders)
    return all(holder.has_value for holder in holders) and holders[0].round.is_complete(live, present)


def close_round(holders: Sequence[Holder], live: Set[int]) -> list[list[Contribution]]:
    """Close the open round of a holder, or the common round of all blocks of a parameter.

    The blocks of a parameter whose rule needs norms of the whole travel, wait and are answered separately. Only the
    closing is common: it waits until every block has the contributions of the same workers.

    Args:
        holders: of the same policy.
        live: the ranks of the live workers.

    Returns:
        For each holder the contributions to its next version, in rank order, which are counted now; an empty list if
        the round cannot close yet.
    """
    if len(holders) == 1:  # without a call too many: checked for every block of every push
        round_ = holders[0].round
        return [round_.close()] if round_.is_complete(live) and holders[0].has_value else []
    if not is_complete(holders, live):
        return []
    ranks = holders[0].round.policy.chosen(contributors(holders))
    return [holder.round.close(ranks) for holder in holders]
