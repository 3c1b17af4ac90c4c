"""How a server applies rounds: one seam for both ways, so that a profiler can look at the clock there. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvdist.core.server import joint_update
from kvdist.core.server.block import Block, Contribution
from kvdist.optimizer.updater import SliceUpdater


class Rounds:
    """Applies them, and nothing else."""

    def apply(self, block: Block, contributions: Sequence[Contribution], updater: SliceUpdater | None) -> None:
        """To one block: see `Block.apply`."""
        block.apply(contributions, updater)

    def apply_jointly(
        self, blocks: Sequence[Block], contributions: Sequence[Sequence[Contribution]], updater: SliceUpdater
    ) -> None:
        """To all blocks of one parameter: see `joint_update.apply`."""
        joint_update.apply(blocks, contributions, updater)
