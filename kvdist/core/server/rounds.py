"""How rounds of blocks are applied: one by one, or jointly for rules that need norms of the whole parameter. Pure.

The scheduler gives such a parameter to one server. Its slices are blocks by themselves, which travel, wait and are
answered one by one; only the closing of a round is common: it waits until every block has the contributions of the same
workers, and one update reads all of them.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from kvdist.core.round import agreed_settings, scale_of
from kvdist.core.server.block import Block, Contribution
from kvdist.errors import PushRefused
from kvdist.optimizer.base import Piece
from kvdist.optimizer.updater import SliceUpdater


class Rounds:
    """Makes the next version of a block, or of all blocks of one parameter together. The profiler replaces it."""

    def apply(self, block: Block, contributions: Sequence[Contribution], updater: SliceUpdater | None) -> None:
        """To one block: see `Block.apply`."""
        block.apply(contributions, updater)

    def apply_jointly(
        self, blocks: Sequence[Block], contributions: Sequence[Sequence[Contribution]], updater: SliceUpdater
    ) -> None:
        """To all blocks of one parameter: see `apply_jointly`."""
        apply_jointly(blocks, contributions, updater)


def contributors(blocks: Sequence[Block]) -> set[int]:
    """The ranks whose contributions to the open round all of these blocks have."""
    return set.intersection(*(set(block.round.slots) for block in blocks))


def next_joint_round(blocks: Sequence[Block], live: Set[int]) -> list[list[Contribution]]:
    """For each block the contributions to the next version, in rank order; empty if it cannot be made yet."""
    present = contributors(blocks)
    policy = blocks[0].round.policy
    if not (present and all(block.published is not None for block in blocks) and policy.is_full(present, live)):
        return []
    ranks = sorted(present)[: policy.close]
    return [[block.round.slots[rank] for rank in ranks] for block in blocks]


def apply_jointly(
    blocks: Sequence[Block], contributions: Sequence[Sequence[Contribution]], updater: SliceUpdater
) -> None:
    """Make the next version of all blocks from the contributions of a round, which are counted already.

    Raises:
        OptimizerMismatch, PushRefused: as `Block.apply`.
    """
    present = [[contribution for contribution in own if not contribution.is_empty] for own in contributions]
    spoken = next((own for own in present if own), None)
    if spoken is None:
        return
    lr, wd = agreed_settings(blocks[0].key, spoken)
    targets = [block.pool.take() for block in blocks]
    pieces = []
    for block, own, target in zip(blocks, present, targets, strict=True):
        assert block.published is not None
        scales = [scale_of(each, len(contributions[0]), updater.optimizer) for each in own]
        values = [each.values for each in own]
        pieces.append(Piece(block, block.published.array, values, scales, target.array, block.extents[0]))
    try:
        updater.update_together(pieces, blocks[0].dtype, lr, wd)
    except (TypeError, ValueError) as error:
        for block, target in zip(blocks, targets, strict=True):
            block.pool.give_back(target)
        raise PushRefused(f"key {blocks[0].key!r}: {error}") from error
    for block, target in zip(blocks, targets, strict=True):
        block.publish(target)
