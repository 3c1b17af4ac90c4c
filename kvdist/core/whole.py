"""Slices of one parameter that make their versions together, because their optimizer needs lengths of the whole.

The scheduler gives such a parameter to one server. Its slices travel, wait and are answered one by one as ever; only
the closing of a round is common: it waits until every slice has the contributions of the same workers, and one update
reads all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from kvdist.core.shard import Contribution, Shard, agreed_settings, scale_of
from kvdist.errors import PushRefused
from kvdist.optimizer.interface import SliceUpdater
from kvdist.optimizer.step import Piece


class Wholes:
    """Which slices of a server belong to one parameter, in the order of its elements."""

    def __init__(self) -> None:
        self._shards_of: dict[int, tuple[Shard, ...]] = {}
        """Slice → all slices of its parameter that are here, if it is not the only one."""

    def add(self, shards: Iterable[Shard]) -> None:
        """These are all slices of a parameter that are kept here."""
        together = tuple(shards)
        if len(together) > 1:
            self._shards_of.update((shard.number, together) for shard in together)

    def of(self, shard: Shard) -> tuple[Shard, ...]:
        """All slices of the parameter of this one."""
        return self._shards_of.get(shard.number) or (shard,)


def contributors(shards: Sequence[Shard]) -> set[int]:
    """The ranks whose contributions to the open round all of these slices have."""
    return set.intersection(*(set(shard.slots) for shard in shards))


def next_round(shards: Sequence[Shard], members: Set[int]) -> list[list[Contribution]]:
    """Per slice the contributions to the next version, in rank order, if it can be made while `members` are alive."""
    present = contributors(shards)
    has_values = all(shard.published is not None for shard in shards)
    if not (present and has_values and shards[0].policy.is_full(present, members)):
        return []
    ranks = sorted(present)[: shards[0].policy.close]
    return [[shard.slots[rank] for rank in ranks] for shard in shards]


def close(shards: Sequence[Shard], contributions: Sequence[Sequence[Contribution]], updater: SliceUpdater) -> None:
    """Make the next version of all slices; contributions are those of `next_round`.

    Raises:
        OptimizerMismatch, PushRefused: as of `Shard.close`.
    """
    for shard, own in zip(shards, contributions, strict=True):
        shard.take([contribution.member.node.rank for contribution in own])
    present = [[contribution for contribution in own if not contribution.is_empty] for own in contributions]
    spoken = next((own for own in present if own), None)
    if spoken is None:
        return
    lr, wd = agreed_settings(shards[0].key, spoken)
    targets = [shard.target() for shard in shards]
    pieces = []
    for shard, own, target in zip(shards, present, targets, strict=True):
        assert shard.published is not None
        scales = [scale_of(each.setting, each.flags, len(contributions[0]), updater.optimizer) for each in own]
        values = [each.values for each in own]
        pieces.append(Piece(shard.number, shard.published.array, values, scales, target.array, shard.extent))
    try:
        updater.update_together(pieces, shards[0].dtype, lr, wd)
    except (TypeError, ValueError) as error:
        for shard, target in zip(shards, targets, strict=True):
            shard.spare.append(target)
        raise PushRefused(f"key {shards[0].key!r}: {error}") from error
    for shard, target in zip(shards, targets, strict=True):
        shard.publish(target)
