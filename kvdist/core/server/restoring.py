"""A server's part in restoring a store: its slices are read first, and taken over once every server has read. Pure.

And what it does before a store is saved into a new place: it sees whether it can write there.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdist.checkpoint.snapshot import WEIGHTS, CheckFolder, ReadShards, ReadSlice
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import Effect, Persist, Persisted, Send
from kvdist.core.server.keeping import Keeper
from kvdist.protocol.messages import Done, DropRestored, ErrorCode, Failed, Prepare, Restore, TakeRestored


class Restoring:
    """What has been read, and waits for the word of the scheduler.

    Args:
        keepers: who keeps the slices of this server.
    """

    def __init__(self, keepers: Sequence[Keeper]) -> None:
        self._keepers = keepers
        self._read: dict[int, Sequence[ReadSlice]] = {}
        """By store."""

    def prepare(self, message: Prepare, name: str) -> list[Effect]:
        """See whether there is a place for the slices of a store, in files called `name`."""
        wanted = [one for keeper in self._keepers for one in keeper.wanted(message.store)]
        whole = [one.count * one.dtype.itemsize for one in wanted if not one.lazy_row]
        nbytes = sum(whole) if WEIGHTS in message.contents else 0  # states, and rows that exist, come on top of it
        return [Persist(message, CheckFolder(message.folder, name, message.run, nbytes))]

    def read(self, message: Restore) -> list[Effect]:
        """Begin to read the slices of a store."""
        wanted = tuple(one for keeper in self._keepers for one in keeper.wanted(message.store))
        if not wanted:
            return [Send(SCHEDULER_MEMBER, Done(message.request))]
        return [Persist(message, ReadShards(message.folder, wanted, message.contents))]

    def persisted(self, event: Persisted) -> list[Effect]:
        """What was begun is done, or could not be."""
        message = event.token
        assert isinstance(message, Restore | Prepare)
        if event.failure:
            return [Send(SCHEDULER_MEMBER, Failed(message.request, ErrorCode.CHECKPOINT, event.failure))]
        if isinstance(message, Prepare):
            return [Send(SCHEDULER_MEMBER, Done(message.request))]
        assert isinstance(event.product, tuple)
        self._read[message.store] = event.product
        return [Send(SCHEDULER_MEMBER, Done(message.request))]

    def end(self, message: TakeRestored | DropRestored) -> list[Effect]:
        """Every server has read: take it over. Or one could not: forget it."""
        read = self._read.pop(message.store, ())
        for keeper in self._keepers if isinstance(message, TakeRestored) else ():
            keeper.restore(message.store, [one for one in read if keeper.keeps(one.number)])
        return [Send(SCHEDULER_MEMBER, Done(message.request))]
