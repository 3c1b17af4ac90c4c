"""How a server closes rounds: one seam for all three ways, so that a profiler can look at the clock there. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvdist.core.group import Group, GroupPush
from kvdist.core.shard import Contribution, Shard
from kvdist.core.whole import close
from kvdist.kernels.interface import Kernels
from kvdist.optimizer.interface import SliceUpdater


class Rounds:
    """Closes them, and nothing else."""

    def close_slice(self, shard: Shard, updater: SliceUpdater | None, kernels: Kernels) -> list[Contribution]:
        """Of one slice: see `Shard.close`."""
        return shard.close(updater, kernels)

    def close_group(self, group: Group, kernels: Kernels) -> list[GroupPush] | None:
        """Of slices that always come together: see `Group.close`."""
        return group.close(kernels)

    def close_whole(
        self, shards: Sequence[Shard], rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater
    ) -> None:
        """Of all slices of one parameter: see `whole.close`."""
        close(shards, rounds, updater)
