"""A server's part in restoring a store: its slices are read first, and taken over once every server has read. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdist.checkpoint.slices import ReadSlice, WantedSlice
from kvdist.checkpoint.works import ReadShards
from kvdist.core.effects import Effect, Persist, Persisted, Send
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.shard import Shard
from kvdist.optimizer.states import has_master
from kvdist.optimizer.updater import Updater
from kvdist.protocol.messages import Done, ErrorCode, Failed
from kvdist.protocol.saving import DropRestored, Restore, TakeRestored


class Restoring:
    """What has been read, and waits for the word of the scheduler."""

    def __init__(self) -> None:
        self._read: dict[int, Sequence[ReadSlice]] = {}
        """By store."""

    def read(self, message: Restore, shards: Sequence[Shard], updater: Updater | None) -> list[Effect]:
        """Begin to read these slices."""
        if not shards:
            return [Send(SCHEDULER_MEMBER, Done(message.request))]
        wanted = tuple(_wanted(shard, updater) for shard in shards)
        return [Persist(message, ReadShards(message.folder, wanted, message.contents))]

    def persisted(self, event: Persisted) -> list[Effect]:
        """They are read, or could not be."""
        message = event.token
        assert isinstance(message, Restore)
        if event.failure:
            return [Send(SCHEDULER_MEMBER, Failed(message.request, ErrorCode.CHECKPOINT, event.failure))]
        assert isinstance(event.product, tuple)
        self._read[message.store] = event.product
        return [Send(SCHEDULER_MEMBER, Done(message.request))]

    def end(
        self, message: TakeRestored | DropRestored, shards: Mapping[int, Shard], updater: Updater | None
    ) -> list[Effect]:
        """Every server has read: take it over. Or one could not: forget it."""
        read = self._read.pop(message.store, ())
        for one in read if isinstance(message, TakeRestored) else ():
            if one.weight is not None:
                shards[one.number].replace(one.weight)
            if updater is not None and (one.state is not None or one.is_fresh):
                updater.restore(one.number, one.state)
        return [Send(SCHEDULER_MEMBER, Done(message.request))]


def _wanted(shard: Shard, updater: Updater | None) -> WantedSlice:
    where = (shard.number, shard.key, shard.extent.start, shard.count, shard.dtype)
    if updater is None:
        return WantedSlice(*where)
    optimizer = updater.optimizer
    row = max(1, shard.extent.row_length) if optimizer.by_rows else 1
    master = has_master(optimizer, shard.dtype)
    from_weight = master or bool(optimizer.states_from_weight)
    return WantedSlice(*where, optimizer.state_names, row, master, has_state=True, from_weight=from_weight)
