"""The scheduler's part in checkpoints: it waits for all workers and servers, and makes or refuses the whole. Pure.

A checkpoint is a set of workers that have marked their pushes and of servers that have written theirs. When both are
complete the manifest is written, which makes it one; if anybody fails it is swept away, and training goes on. Restoring
is a set of workers too; then every server reads, and all take over what they have read, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from kvdist.checkpoint.files import FileRecord
from kvdist.checkpoint.manifest import Manifest, SavedKey
from kvdist.checkpoint.works import ReadManifest, Sweep, WriteManifest
from kvdist.core.agreements import Agreements
from kvdist.core.effects import Effect, Persist, Persisted, Send
from kvdist.core.policy import SYNC
from kvdist.core.seats import Seats
from kvdist.core.servers_asked import ServersAsked
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.nodes import Member
from kvdist.protocol.messages import Done, ErrorCode, Failed, Message, Waiting
from kvdist.protocol.saving import Discard, DropRestored, Load, Restore, Save, Saved, SavedFile, TakeRestored


@dataclass(slots=True, eq=False)
class Saving:
    """One checkpoint under way."""

    since: float
    arrived: dict[int, tuple[Member, Save]] = field(default_factory=dict)
    """Rank → the worker and what it said."""
    files: dict[int, SavedFile] = field(default_factory=dict)
    """Rank of a server → its file."""
    failure: str = ""
    is_writing: bool = False


@dataclass(slots=True, eq=False)
class Loading:
    """A store that is to be restored."""

    since: float
    arrived: dict[int, tuple[Member, Load]] = field(default_factory=dict)
    is_reading: bool = False


Open = Saving | Loading


class Checkpoints:
    """All checkpoints that are written or read.

    Args:
        seats: who is in the cluster.
        agreements: its keys and optimizers.
        asked: what servers are asked.
    """

    def __init__(self, seats: Seats, agreements: Agreements, asked: ServersAsked) -> None:
        self._seats = seats
        self._agreements = agreements
        self._asked = asked
        self._saving: dict[tuple[int, int], Saving] = {}
        self._loading: dict[tuple[int, int], Loading] = {}

    # Saving.

    def save(self, sender: Member, message: Save, now: float) -> list[Effect]:
        """A worker has marked its pushes."""
        saving = self._saving.setdefault((message.store, message.counter), Saving(now))
        saving.arrived[sender.node.rank] = (sender, message)
        if message.store not in self._agreements.books:
            saving.failure = "the store has no keys"
        if message.failure and not saving.failure:
            saving.failure = f"{sender}: {message.failure}"
        said = [_place(one) for _, one in saving.arrived.values()]
        if said[0] != _place(message) and not saving.failure:
            first = next(iter(saving.arrived.values()))[0]
            saving.failure = _differ(first, said[0], sender, _place(message))
        return self._advance(message.store, message.counter, saving)

    def saved(self, sender: Member, message: Saved, now: float) -> list[Effect]:
        """A server has written its slices, or could not."""
        saving = self._saving.setdefault((message.store, message.counter), Saving(now))
        saving.files[sender.node.rank] = message.file
        if message.failure and not saving.failure:
            saving.failure = f"{sender}: {message.failure}"
        return self._advance(message.store, message.counter, saving)

    def release(self) -> list[Effect]:
        """A worker has left: nobody waits for it any more."""
        effects: list[Effect] = []
        for (store, counter), saving in list(self._saving.items()):
            effects += self._advance(store, counter, saving)
        for loading in list(self._loading.values()):
            effects += self._begin_loading(loading)
        return effects

    def _advance(self, store: int, counter: int, saving: Saving) -> list[Effect]:
        """Go on if everybody is here who is awaited. It has failed only then too, so that it fails for all."""
        everybody = self._seats.workers.keys() <= saving.arrived.keys()
        if not everybody or saving.is_writing or not saving.arrived:
            return []
        first = next(iter(saving.arrived.values()))[1]
        folder = first.folder
        if saving.failure:
            del self._saving[store, counter]
            discards = [Send(server, Discard(store, counter)) for server in self._seats.servers]
            return [*discards, Persist(None, Sweep(folder)), *_failed(saving, saving.failure)]
        if not self._holders(store) <= saving.files.keys():
            return []
        saving.is_writing = True
        return [Persist(first, WriteManifest(folder, self._manifest(store, saving, first), first.keep))]

    def _holders(self, store: int) -> set[int]:
        """The ranks of the servers that keep anything of the store."""
        return self._agreements.books[store].holders(self._agreements.placer.num_servers)

    def _manifest(self, store: int, saving: Saving, first: Save) -> Manifest:
        book = self._agreements.books[store]
        optimizer = self._agreements.optimizers.get(store)
        files = [file for _, file in sorted(saving.files.items())]
        files += [message.file for _, (_, message) in sorted(saving.arrived.items())]
        return Manifest(
            first.step,
            first.contents,
            book.mode,
            book.mode == SYNC.name,
            None if optimizer is None else optimizer.description,
            len(saving.arrived),
            len(self._seats.servers),
            self._keys(store),
            tuple(FileRecord(file.name, file.nbytes, file.sha256) for file in files if file.name),
        )

    def _keys(self, store: int) -> tuple[SavedKey, ...]:
        entries = self._agreements.books[store].entries.values()
        return tuple(SavedKey(one.key, one.shape, DType(one.dtype).label) for one in entries if one.placed)

    # Loading.

    def load(self, sender: Member, message: Load, now: float) -> list[Effect]:
        """A worker has no push under way, and waits for the store to be restored."""
        loading = self._loading.setdefault((message.store, message.counter), Loading(now))
        loading.arrived[sender.node.rank] = (sender, message)
        return self._begin_loading(loading)

    def _begin_loading(self, loading: Loading) -> list[Effect]:
        if loading.is_reading or not self._seats.workers.keys() <= loading.arrived.keys():
            return []
        loading.is_reading = True
        (first, asked), *others = loading.arrived.values()
        if asked.store not in self._agreements.books:
            return self._end_loading(asked, "the store has no keys: init them before")
        for other, message in others:
            if _place(message) != _place(asked):
                return self._end_loading(asked, _differ(first, _place(asked), other, _place(message)))
        return [Persist(asked, ReadManifest(asked.folder))]

    def _check(self, asked: Load, manifest: Manifest) -> list[Effect]:
        """The manifest has been read: if it fits, let the servers read."""
        optimizer = self._agreements.optimizers.get(asked.store)
        try:
            description = None if optimizer is None else optimizer.description
            manifest.require(self._keys(asked.store), description, asked.contents)
        except (CheckpointError, ValueError) as error:
            return self._end_loading(asked, str(error))

        def make(request: int) -> Message:
            return Restore(request, asked.store, asked.folder, asked.contents)

        return self._asked.ask(self._seats.servers, make, lambda failure: self._read(asked, failure))

    def _read(self, asked: Load, failure: str) -> list[Effect]:
        """Every server has read, or one could not."""
        kind = DropRestored if failure else TakeRestored
        servers = self._seats.servers
        return self._asked.ask(servers, lambda n: kind(n, asked.store), lambda _: self._end_loading(asked, failure))

    def _end_loading(self, asked: Load, failure: str) -> list[Effect]:
        loading = self._loading.pop((asked.store, asked.counter))
        return _failed(loading, failure) if failure else _done(loading)

    # Both.

    def persisted(self, event: Persisted) -> list[Effect]:
        """A manifest is written or read, or could not be."""
        match event.token:
            case Save() as first:
                saving = self._saving.pop((first.store, first.counter))
                if not event.failure:
                    return _done(saving)
                return [Persist(None, Sweep(first.folder)), *_failed(saving, event.failure)]
            case Load() as asked if event.failure:
                return self._end_loading(asked, event.failure)
            case Load() as asked:
                assert isinstance(event.product, Manifest)
                return self._check(asked, event.product)
            case _:
                return []  # what a failed attempt left could not be removed; the next one will try again

    def hints(self, live: Set[int], now: float) -> Iterator[Effect]:
        """Tell those who wait for whom."""
        for subject, one, missing in self._waits(live):
            hint = Waiting(subject, missing, now - one.since)
            yield from (Send(member, hint) for member, _ in one.arrived.values())

    def oldest_wait(self, live: Set[int]) -> tuple[str, float, tuple[int, ...]] | None:
        """What has been waited for longest, since when, and who is missing."""
        waits = [(one.since, subject, missing) for subject, one, missing in self._waits(live)]
        if not waits:
            return None
        since, subject, missing = min(waits)
        return subject, since, missing

    def _waits(self, live: Set[int]) -> Iterator[tuple[str, Open, tuple[int, ...]]]:
        for name, table in (("checkpoint", self._saving), ("loading of a checkpoint", self._loading)):
            for (_, counter), one in table.items():
                yield f"{name} {counter}", one, tuple(sorted(live - one.arrived.keys()))


def _place(message: Save | Load) -> tuple[object, ...]:
    """What all workers must say alike."""
    more = (message.step, message.keep) if isinstance(message, Save) else ()
    return (message.folder, message.contents, *more)


def _differ(first: Member, said: tuple[object, ...], other: Member, says: tuple[object, ...]) -> str:
    return f"the workers do not agree: {first} names {said}, {other} names {says}; all must give the same arguments"


def _done(one: Open) -> list[Effect]:
    return [Send(member, Done(message.request)) for member, message in one.arrived.values()]


def _failed(one: Open, reason: str) -> list[Effect]:
    return [
        Send(member, Failed(message.request, ErrorCode.CHECKPOINT, reason)) for member, message in one.arrived.values()
    ]
