"""The scheduler's part in checkpoints: it waits for all workers and servers, and makes or refuses the whole. Pure.

A checkpoint is a set of workers that have marked their pushes and of servers that have written theirs. When both are
complete the manifest is written, which makes it one; if anybody fails it is swept away, and training goes on. Before
the first one in a directory the scheduler takes its lock, and asks the servers whether they can write there. Restoring
is a set of workers too; then every server reads, and all take over what they have read, or none does.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from kvdist.checkpoint.snapshot import (
    FileRecord,
    LockFolder,
    Manifest,
    ReadManifest,
    SavedKey,
    Sweep,
    UnlockFolder,
    WriteManifest,
    directory_of,
)
from kvdist.core.machine import Effect, Log, Persist, Persisted, Send
from kvdist.core.policy import POLICIES
from kvdist.core.scheduler.agreements import Agreements
from kvdist.core.scheduler.membership import Seats
from kvdist.core.scheduler.servers_asked import ServersAsked
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.nodes import Member
from kvdist.protocol.messages import (
    CHECKPOINT,
    Claim,
    Claimed,
    Done,
    DropRestored,
    ErrorCode,
    Failed,
    Load,
    Message,
    Prepare,
    Restore,
    Save,
    Saved,
    SavedFile,
    TakeRestored,
    Waiting,
)


@dataclass(slots=True, eq=False)
class Saving:
    """One checkpoint under way."""

    store: int
    counter: int
    since: float
    live: frozenset[int]
    """The ranks of the workers that were there when it began."""
    arrived: dict[int, tuple[Member, Save]] = field(default_factory=dict)
    """Rank → the worker and what it said."""
    files: dict[int, SavedFile] = field(default_factory=dict)
    """Rank of a server that has reported → its file."""
    keys: tuple[SavedKey, ...] = ()
    """Of the store when the first worker called: what is initialised later is in the next checkpoint."""
    failure: str = ""
    is_ending: bool = False
    """Everybody has reported: the manifest is being written, or what was written is being removed."""

    def fail(self, reason: str) -> None:
        """Note why it cannot be made; the first reason counts."""
        self.failure = self.failure or reason


@dataclass(slots=True, eq=False)
class Claiming:
    """A directory into which this job saves, or was asked to."""

    first: Claim
    run: str = ""
    failure: str = ""
    """Why it cannot be: the answer to every claim of this checkpoint."""
    is_settled: bool = False
    waiting: list[tuple[Member, int]] = field(default_factory=list)
    """Who has claimed it, and the request, until it is settled."""

    def is_answer_to(self, claim: Claim) -> bool:
        """Whether the claim need not be looked into: what was refused is, for every further checkpoint. A worker whose
        claim was refused takes part in that checkpoint all the same, so its next claim is of a further one."""
        return not self.failure or (self.first.store, self.first.counter) == (claim.store, claim.counter)


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
        self._claims: dict[str, Claiming] = {}
        """By directory."""
        self._saving: dict[tuple[int, int], Saving] = {}
        self._loading: dict[tuple[int, int], Loading] = {}

    def __len__(self) -> int:
        """How many are under way."""
        return len(self._saving) + len(self._loading)

    # Saving.

    def claim(self, sender: Member, message: Claim) -> list[Effect]:
        """A worker is about to save into a directory for the first time."""
        directory = directory_of(message.folder)
        claiming, effects = self._claims.get(directory), []
        if claiming is None or not claiming.is_answer_to(message):
            claiming = self._claims[directory] = Claiming(message)
            effects = [Persist(claiming, LockFolder(message.folder))]
        claiming.waiting.append((sender, message.request))
        return [*effects, *self._claimed(claiming)]

    def _locked(self, claiming: Claiming, run: str) -> list[Effect]:
        """The directory is this job's: see whether the servers can write there."""
        claiming.run = run
        first = claiming.first

        def make(request: int) -> Message:
            return Prepare(request, first.store, first.folder, first.contents, run)

        def prepared(failure: str) -> list[Effect]:
            unlock = [Persist(None, UnlockFolder(first.folder))] if failure else []
            return [*unlock, *self._settle(claiming, failure)]

        return self._asked.ask(self._seats.servers, make, prepared)

    def _settle(self, claiming: Claiming, failure: str) -> list[Effect]:
        claiming.failure, claiming.is_settled = failure, True
        return self._claimed(claiming)

    def _claimed(self, claiming: Claiming) -> list[Effect]:
        """Answer those who have claimed a directory, if the answer is known."""
        if not claiming.is_settled:
            return []
        waiting, claiming.waiting = claiming.waiting, []
        failure, run = claiming.failure, claiming.run
        return [
            Send(member, Failed(request, ErrorCode.CHECKPOINT, failure) if failure else Claimed(request, run))
            for member, request in waiting
            if self._seats.workers.get(member.node.rank) == member
        ]

    def save(self, sender: Member, message: Save, now: float) -> list[Effect]:
        """A worker has marked its pushes."""
        saving = self._open(message, now)
        if not saving.arrived:
            saving.keys = self._keys(message.store)
        is_first = not any(said.failure for _, said in saving.arrived.values())
        saving.arrived[sender.node.rank] = (sender, message)
        first, said = next(iter(saving.arrived.values()))
        if message.failure and is_first:  # says more than what others could not do because of it
            saving.failure = f"{sender}: {message.failure}"
        elif saving.failure:
            pass
        elif _place(said) != _place(message):
            saving.fail(_differ(first, _place(said), sender, _place(message)))
        elif not saving.keys:
            saving.fail("the store has no keys: init them before")
        elif message.num_keys != len(saving.keys):
            saving.fail(
                f"{sender} saves {message.num_keys} keys, where the store has {len(saving.keys)}:"
                " call save_checkpoint when every init has returned"
            )
        return self._advance(saving)

    def saved(self, sender: Member, message: Saved, now: float) -> list[Effect]:
        """A server has written its slices, or could not."""
        saving = self._open(message, now)
        saving.files[sender.node.rank] = message.file
        if message.failure:
            saving.fail(f"{sender}: {message.failure}")
        return self._advance(saving)

    def release(self) -> list[Effect]:
        """A worker has left: nobody waits for it any more."""
        effects = [effect for saving in list(self._saving.values()) for effect in self._advance(saving)]
        for loading in list(self._loading.values()):
            effects += self._begin_loading(loading)
        return effects

    def _open(self, message: Save | Saved, now: float) -> Saving:
        place = (message.store, message.counter)
        saving = self._saving.get(place)
        if saving is None:
            saving = self._saving[place] = Saving(*place, now, frozenset(self._seats.workers))
        return saving

    def _is_complete(self, saving: Saving) -> bool:
        """Whether everybody has reported, so that nothing more of it comes: good or bad, it ends then, and for all."""
        has_servers = len(saving.files) == len(self._seats.servers)
        return has_servers and bool(saving.arrived) and self._seats.workers.keys() <= saving.arrived.keys()

    def _advance(self, saving: Saving) -> list[Effect]:
        if saving.is_ending or not self._is_complete(saving):
            return []
        saving.is_ending = True
        if saving.failure:
            return self._sweep(saving)
        first = next(iter(saving.arrived.values()))[1]
        names = ", ".join(f"worker-{rank}" for rank in sorted(saving.live - saving.arrived.keys()))
        lacks = f"{_named(saving)} has no state of {names}, which left instead of calling save_checkpoint"
        written = Persist(saving, WriteManifest(first.folder, self._manifest(saving, first), first.keep))
        return [*([Log(lacks)] if names else []), written]

    def _sweep(self, saving: Saving) -> list[Effect]:
        """Remove what was written; only then may anybody try again, perhaps in the same folder."""
        folders = sorted({message.folder for _, message in saving.arrived.values() if message.run})
        if not folders:
            return self._end_saving(saving, "")  # nobody was to write anything
        *others, last = folders
        return [*(Persist(None, Sweep(folder)) for folder in others), Persist(saving, Sweep(last))]

    def _end_saving(self, saving: Saving, failure: str) -> list[Effect]:
        if failure and not saving.failure:
            saving.failure = failure
            return self._sweep(saving)
        del self._saving[saving.store, saving.counter]
        return self._answers(saving, saving.failure)

    def _manifest(self, saving: Saving, first: Save) -> Manifest:
        mode, optimizer = self._agreements.books[saving.store].mode, self._agreements.optimizers.get(saving.store)
        files = [file for _, file in sorted(saving.files.items())]
        files += [message.file for _, (_, message) in sorted(saving.arrived.items())]
        return Manifest(
            first.step,
            first.contents,
            mode,
            POLICIES[mode].has_rounds,
            None if optimizer is None else optimizer.description,
            len(saving.arrived),
            len(self._seats.servers),
            saving.keys,
            tuple(FileRecord(file.name, file.nbytes, file.sha256) for file in files if file.name),
            first.run,
        )

    def _keys(self, store: int) -> tuple[SavedKey, ...]:
        book = self._agreements.books.get(store)
        entries = () if book is None else book.entries.values()
        return tuple(SavedKey(one.key, one.shape, DType(one.dtype).label, one.form) for one in entries if one.placed)

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
        for other, message in loading.arrived.values():
            if message.failure:
                return self._end_loading(asked, f"{other}: {message.failure}")
        for other, message in others:
            if _place(message) != _place(asked):
                return self._end_loading(asked, _differ(first, _place(asked), other, _place(message)))
        if not self._keys(asked.store):
            return self._end_loading(asked, "the store has no keys: init them before")
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
        return self._answers(self._loading.pop((asked.store, asked.counter)), failure)

    # Both.

    def persisted(self, event: Persisted) -> list[Effect]:
        """A manifest is written or read, or could not be; or what was written is removed."""
        match event.token:
            case Claiming() as claiming if event.failure:
                return self._settle(claiming, event.failure)
            case Claiming() as claiming:
                assert isinstance(event.product, str)
                return self._locked(claiming, event.product)
            case Saving() as saving:
                return self._end_saving(saving, event.failure)
            case Load() as asked if event.failure:
                return self._end_loading(asked, event.failure)
            case Load() as asked:
                assert isinstance(event.product, Manifest)
                return self._check(asked, event.product)
            case _:
                return []

    def _answers(self, one: Open, failure: str) -> list[Effect]:
        """What the workers are told that have not left."""
        live = self._seats.workers
        return [
            Send(member, Failed(said.request, ErrorCode.CHECKPOINT, failure) if failure else Done(said.request))
            for member, said in one.arrived.values()
            if live.get(member.node.rank) == member
        ]

    def hints(self, live: Set[int], now: float) -> Iterator[Effect]:
        """Tell those who wait for whom."""
        for subject, one, missing in self._waits(live):
            hint = Waiting(subject, missing, now - one.since)
            yield from (Send(member, hint) for rank, (member, _) in one.arrived.items() if rank in live)

    def waits(self, live: Set[int]) -> Iterator[tuple[int, int, Set[int]]]:
        """(rank, request, which workers have to call as well) of all who wait."""
        for _, one, missing in self._waits(live):
            yield from ((rank, said.request, set(missing)) for rank, (_, said) in one.arrived.items())

    def oldest_wait(self, live: Set[int]) -> tuple[str, float, tuple[int, ...]] | None:
        """What has been waited for longest, since when, and who is missing."""
        waits = [(one.since, subject, missing) for subject, one, missing in self._waits(live)]
        if not waits:
            return None
        since, subject, missing = min(waits)
        return subject, since, missing

    def validate(self) -> None:
        """Check every invariant."""
        for place, saving in self._saving.items():
            assert place == (saving.store, saving.counter), "a checkpoint is known by its store and count"
            assert saving.is_ending == self._is_complete(saving), "it ends when everybody has reported, and not before"
        for claiming in self._claims.values():
            assert not (claiming.is_settled and claiming.waiting), "who has an answer does not wait for it"
        live = self._seats.workers.keys()
        for loading in self._loading.values():
            assert loading.is_reading or not live <= loading.arrived.keys(), "who waits for nobody goes on"

    def _waits(self, live: Set[int]) -> Iterator[tuple[str, Open, tuple[int, ...]]]:
        """What is waited for, who waits, and which workers are missing; if none is, the subject names the servers."""
        for saving in self._saving.values():
            missing = tuple(sorted(live - saving.arrived.keys()))
            servers = [str(one) for one in self._seats.servers if one.node.rank not in saving.files]
            where = "" if missing or not saving.arrived else f" on {', '.join(servers) or 'the scheduler'}"
            called = " (every worker must call save_checkpoint)" if missing and saving.arrived else ""
            yield f"{_named(saving)}{where}{called}", saving, missing
        for loading in self._loading.values():
            yield "loading of a checkpoint", loading, tuple(sorted(live - loading.arrived.keys()))


def _named(saving: Saving) -> str:
    steps = {message.step for _, message in saving.arrived.values()}
    return CHECKPOINT if len(steps) != 1 else f"{CHECKPOINT} of step {min(steps)}"


def _place(message: Save | Load) -> tuple[object, ...]:
    """What all workers must say alike."""
    more = (message.step, message.keep) if isinstance(message, Save) else ()
    return (message.folder, message.contents, *more)


def _differ(first: Member, said: tuple[object, ...], other: Member, says: tuple[object, ...]) -> str:
    return f"the workers do not agree: {first} names {said}, {other} names {says}; all must give the same arguments"
