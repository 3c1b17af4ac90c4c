"""The scheduler's part in checkpoints: it waits for all workers and servers, and completes or refuses them. Pure.

A checkpoint is an agreement of the workers, which mark their pushes, and the servers, which write their slices. When it
is complete the manifest is written, which makes it valid; if any member fails, its files are removed, and training goes
on. Before the first checkpoint in a directory the scheduler locks it, and asks the servers whether they can write to
it. Restoring is an agreement of the workers; then every server reads, and all take over the values, or none does.

A snapshot is a checkpoint that only servers agree on, and a rollback is a load that workers are told to enter; both are
ordered by `kvdist.core.scheduler.rollback`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdist import errors
from kvdist.checkpoint.snapshot import (
    EVERYTHING,
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
from kvdist.core import machine as fx
from kvdist.core.policy import MODES
from kvdist.core.scheduler.agreement import Agreement, MemberWait, Questions
from kvdist.core.scheduler.keys import Keys
from kvdist.core.scheduler.membership import Membership
from kvdist.naming import minority_first
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol import messages as msg

if TYPE_CHECKING:  # a feature at a seam: loaded where it is used
    from kvdist.core.scheduler.leases import Leases


@dataclass(slots=True, eq=False)
class SaveUnderWay:
    """A checkpoint under way."""

    store: int
    counter: int
    """Number of the checkpoint in its store; negative for a snapshot."""
    servers: dict[NodeId, Member]
    """Servers with slices when it began: without the file of any of them the checkpoint fails."""
    agreement: Agreement[msg.Save | msg.SavedFile]
    """The workers' messages and the servers' files."""
    position: Callable[[SaveUnderWay], Mapping[str, Any] | None]
    """Returns the positions of the workers in their data at the moment of the checkpoint; raises a ValueError."""
    end: Callable[[SaveUnderWay], list[fx.Effect]]
    """Called at the end: `failure` says how the checkpoint went."""
    live: frozenset[int] = frozenset()
    """Ranks of the workers that had to call when it began, without resting workers."""
    keys: tuple[SavedKey, ...] = ()
    """Keys of the store when the first worker called: keys that are initialised later are in the next checkpoint."""
    order: msg.Save | None = None
    """The folder and the contents to save: the message of the first worker, or of the scheduler for a snapshot."""
    failure: str = ""
    is_ending: bool = False
    """Whether all have reported: the manifest is being written, or the files are being removed."""

    @property
    def is_written(self) -> bool:
        """Whether all members have written their parts: the manifest is being written, or has been."""
        return self.is_ending and not self.failure

    @property
    def folders(self) -> set[str]:
        """Folders into which members may have written files."""
        return {order.folder for order in (self.order, *(message for _, message in self.saves)) if order and order.run}

    def fail(self, reason: str) -> None:
        """Fail the checkpoint for a reason; the first reason counts."""
        self.failure = self.failure or reason

    @property
    def saves(self) -> list[tuple[Member, msg.Save]]:
        """(worker, message) of the workers that have called, in the order of their calls."""
        said = self.agreement.said.values()
        return [(member, statement) for member, statement in said if isinstance(statement, msg.Save)]

    @property
    def files(self) -> list[msg.SavedFile]:
        """The files of the servers, then those of the workers, by rank."""
        said = sorted(self.agreement.said.values(), key=lambda one: (one[0].node.role is Role.WORKER, one[0].node.rank))
        files = [statement.file if isinstance(statement, msg.Save) else statement for _, statement in said]
        return [file for file in files if file.name]

    @property
    def is_complete(self) -> bool:
        """Whether all have reported. The checkpoint ends then for all, complete or failed."""
        return self.agreement.is_complete and self.order is not None

    @property
    def name(self) -> str:
        """Name of the checkpoint, for people."""
        steps = {message.step for _, message in self.saves}
        return "checkpoint" if len(steps) != 1 else f"checkpoint of step {min(steps)}"

    def waits(self) -> Iterator[MemberWait]:
        """Yield the waits of workers for the checkpoint."""
        for wait in self.agreement.waits():
            subject = f"save_checkpoint ({self.name})"
            yield replace(wait, subject=subject, deed=f"call {subject}")


@dataclass(slots=True, eq=False)
class FolderClaim:
    """A directory that workers claim for checkpoints of this job."""

    first: msg.Claim
    counter: int
    """The number of the checkpoint for which it was claimed first."""
    agreement: Agreement[str]
    """Agreement on the lock; the first worker claims it for all."""
    run: str = ""
    failure: str = ""
    """Reason why the job cannot save into the directory: the answer to every claim of this checkpoint."""
    counters: dict[tuple[Member, int], int] = field(default_factory=dict)
    """(worker, request) of an open claim → number of the worker's checkpoint."""
    end: Callable[[str], list[fx.Effect]] | None = None
    """Called with '' when the directory is locked, or with the failure."""

    def is_answer_to(self, claim: msg.Claim, counter: int) -> bool:
        """Return whether this claim also answers `claim`: a refused directory is tried again for each later checkpoint.
        A worker with a refused claim takes part in that checkpoint, so its next claim is of a later checkpoint."""
        return not self.failure or (self.first.store, self.counter) == (claim.store, counter)

    def numbered(self, answers: list[fx.Effect]) -> list[fx.Effect]:
        """Return the answers to claims, each with the number of its receiver's checkpoint."""
        return [
            replace(one, message=replace(one.message, counter=self.counters.pop((one.to, one.message.request))))
            for one in answers
            if isinstance(one, fx.Send) and isinstance(one.message, msg.Claimed)
        ]


@dataclass(slots=True, eq=False)
class LoadUnderWay:
    """A load of a store under way: workers have called for it, or are told to enter it, for a rollback."""

    store: int
    counter: int
    """Number of the load in its store; for a rollback, its negative number."""
    folder: str
    contents: tuple[str, ...]
    agreement: Agreement[msg.Load | msg.Quiet]
    """The messages of the workers: each has no push in flight."""
    may_begin: Callable[[], bool]
    """Whether servers can read."""
    check: Callable[[LoadUnderWay, Manifest], None]
    """Checks whether the store can be restored from a checkpoint; raises a CheckpointError or a ValueError."""
    end: Callable[[LoadUnderWay, str], list[fx.Effect]]
    """Called when every server has taken over the values, with '', or none has, with the failure."""
    is_reading: bool = False
    is_taking: bool = False
    """Whether every server has read, and takes over the values."""
    take_data: Callable[[], None] | None = None
    """Restores the workers' positions in their data; None if the checkpoint has none."""

    @property
    def rollback(self) -> int:
        """Number of the rollback; 0 for a load that workers have called for."""
        return max(0, -self.counter)


class Checkpoints:
    """All checkpoints that are being written or read.

    Args:
        membership: members of the cluster.
        keys: keys and optimizers of the cluster.
        questions: requests to servers.
    """

    def __init__(self, membership: Membership, keys: Keys, questions: Questions) -> None:
        self._membership = membership
        self._keys = keys
        self._questions = questions
        self._claims: dict[str, FolderClaim] = {}
        """Directory → its claim."""
        self._saving: dict[tuple[int, int], SaveUnderWay] = {}
        self._loading: dict[tuple[int, int], LoadUnderWay] = {}
        self._unaware: dict[Member, tuple[float, str]] = {}
        """Worker that may mark pushes at a lost server → (epoch of the roster that ends this, reason to fail)."""
        self.saves: dict[int, int] = {}
        """Store → number of its checkpoints so far."""
        self.loads: dict[int, int] = {}
        self.after_load: Callable[[], None] | None = None
        """Called after a load has replaced the values of a store."""
        self.data: Leases | None = None
        """Positions of the workers in their data, if the scheduler knows them."""
        self.restoring_data: Callable[[Mapping[str, Any]], Callable[[], None]] | None = None
        """Reads the positions in a manifest, and returns a function that restores them."""

    def __len__(self) -> int:
        """Number of checkpoints and loads under way that workers have called for."""
        return sum(counter >= 0 for _, counter in (*self._saving, *self._loading))

    def saving_of(self, store: int) -> tuple[dict[int, Agreement[Any]], int]:
        """Return the checkpoints of a store under way, by number, and the number of all so far."""
        saving = {number: one.agreement for (of, number), one in self._saving.items() if of == store and number >= 0}
        return saving, self.saves.get(store, 0)

    def next_saves(self) -> Sequence[Sequence[int]]:
        """Return stores, and the number of the next checkpoint of each, for a worker that has rested."""
        stores = sorted(self.saves)
        return stores, [min(opened, default=count) for opened, count in map(self.saving_of, stores)]

    def loading_of(self, store: int) -> tuple[dict[int, Agreement[Any]], int]:
        """Return the loads of a store under way, by number, and the number of all so far."""
        loading = {number: one.agreement for (of, number), one in self._loading.items() if of == store and number >= 0}
        return loading, self.loads.get(store, 0)

    def drop_all(self) -> list[fx.Effect]:
        """Drop all checkpoints and loads under way; their callers know, and will use the same numbers again.

        A snapshot whose manifest is being written stays.
        """
        kept = {which: saving for which, saving in self._saving.items() if which[1] < 0 and saving.is_written}
        folders = {folder for which, saving in self._saving.items() if which not in kept for folder in saving.folders}
        for counts, dropped in ((self.saves, self._saving), (self.loads, self._loading)):
            for store, counter in dropped:
                if counter >= 0:
                    counts[store] = min(counts[store], counter)
        for loading in self._loading.values():
            self._questions.drop(loading.agreement.waits_for)
        self._saving = kept
        self._loading.clear()
        return [fx.Persist(None, Sweep(folder)) for folder in sorted(folders)]

    @property
    def is_saving(self) -> bool:
        """Whether workers wait for a checkpoint."""
        return any(counter >= 0 for _, counter in self._saving)

    @property
    def locked_folders(self) -> list[tuple[str, str]]:
        """(folder that was claimed first, run) of each directory that this job has locked."""
        return [(one.first.folder, one.run) for one in self._claims.values() if one.run and not one.failure]

    # Saving.

    def claim(self, sender: Member, message: msg.Claim, counter: int, now: float) -> list[fx.Effect]:
        """Handle the claim of a worker that is about to save its checkpoint `counter`, into a directory that is new."""
        claim, effects = self._claim(message, counter, now)
        claim.counters[sender, message.request] = counter
        return [*effects, *claim.numbered(claim.agreement.ask(sender, message.request))]

    def lock(
        self, folder: str, store: int, now: float, end: Callable[[str], list[fx.Effect]]
    ) -> tuple[FolderClaim, list[fx.Effect]]:
        """Claim the directory of a folder for snapshots of a store; `end` is called with '' or with the failure."""
        claim = self._claims.get(directory_of(folder))
        if claim is not None and claim.failure:
            del self._claims[directory_of(folder)]
        claim, effects = self._claim(msg.Claim(0, store, folder, EVERYTHING), -1, now)
        claim.end = end
        return claim, [*effects, *(end("") if claim.agreement.is_answered else [])]

    def _claim(self, message: msg.Claim, counter: int, now: float) -> tuple[FolderClaim, list[fx.Effect]]:
        directory = directory_of(message.folder)
        claim = self._claims.get(directory)
        if claim is not None and claim.is_answer_to(message, counter):
            return claim, []
        agreement: Agreement[str] = Agreement(f"the lock of {directory}", "", now, self._membership.awaited)
        claim = self._claims[directory] = FolderClaim(message, counter, agreement)
        return claim, [fx.Persist(claim, LockFolder(message.folder))]

    def _locked(self, claim: FolderClaim, run: str) -> list[fx.Effect]:
        """Ask the servers whether they can write into a directory that this job has locked."""
        claim.run = run
        first = claim.first
        message = msg.Prepare(0, first.store, first.folder, first.contents, run)
        return self._questions.ask(message, partial(self._prepared, claim), claim.agreement)

    def _prepared(self, claim: FolderClaim, failure: str) -> list[fx.Effect]:
        """Answer a claim after the servers' answers; unlock the directory if a server cannot write into it."""
        unlock = [fx.Persist(None, UnlockFolder(claim.first.folder))] if failure else []
        return [*unlock, *self._answer_claim(claim, failure)]

    @staticmethod
    def _answer_claim(claim: FolderClaim, failure: str) -> list[fx.Effect]:
        claim.failure = failure
        claimed = partial(msg.Claimed, counter=0, run=claim.run, failure=failure)
        answers = claim.numbered(claim.agreement.answer(claimed))
        claim.counters.clear()  # of workers that have left
        return answers if claim.end is None else [*answers, *claim.end(failure)]

    def save(self, sender: Member, message: msg.Save, now: float) -> list[fx.Effect]:
        """Handle the call of a worker that has marked its pushes."""
        next_counter = self.saves.get(message.store, 0)
        if message.counter > next_counter:
            reason = f"{sender} saves checkpoint {message.counter}, where the next is {next_counter}"
            return [fx.Send(sender, _answer(message.request, reason))]
        saving = self._open(message, now)
        earlier = saving.saves
        if not earlier:
            saving.order = message
            saving.agreement.joined_later = partial(self._membership.joined_later, message.pushes)
            saving.keys = self._keys.saved(message.store)
        saving.agreement.say(sender, message)
        effects = saving.agreement.ask(sender, message.request)
        first, said = (earlier or saving.saves)[0]
        if message.failure and not any(one.failure for _, one in earlier):
            saving.failure = f"{sender}: {message.failure}"  # more useful than failures of others that follow from it
        elif sender in self._unaware and not any(one.failure for _, one in earlier):
            saving.failure = _with_loss(saving.failure, self._unaware[sender][1])
        elif saving.failure:
            pass
        elif _arguments(said) != _arguments(message):
            saving.fail(_differ([(first.node.rank, _arguments(said)), (sender.node.rank, _arguments(message))]))
        elif not saving.keys:
            saving.fail("the store has no keys: init them before")
        elif message.num_keys != len(saving.keys):
            saving.fail(
                f"{sender} saves {message.num_keys} keys, where the store has {len(saving.keys)}:"
                " call save_checkpoint when every init has returned"
            )
        return effects + self._advance(saving)

    def saved(self, sender: Member, message: msg.Saved, now: float) -> list[fx.Effect]:
        """Handle the report of a server that has written its slices or failed."""
        which = (message.store, message.counter)
        if which not in self._saving and message.counter != self.saves.get(message.store, 0):
            return []  # the checkpoint is over
        saving = self._open(message, now)
        if saving.servers.get(sender.node) != sender:
            return []  # the server had no slices when the checkpoint began
        return self.report(saving, sender, message)

    def report(self, saving: SaveUnderWay, server: Member, message: msg.Saved | msg.SnapshotTaken) -> list[fx.Effect]:
        """Handle the report of a server about a checkpoint under way."""
        saving.agreement.say(server, message.file)
        if message.failure:
            saving.fail(f"{server}: {message.failure}")
        return self._advance(saving)

    def take_snapshot(self, saving: SaveUnderWay) -> None:
        """Await the servers' parts of a snapshot."""
        self._saving[saving.store, saving.counter] = saving

    def drop(self, saving: SaveUnderWay) -> None:
        """Drop a snapshot under way."""
        self._saving.pop((saving.store, saving.counter), None)

    def advance_all(self) -> list[fx.Effect]:
        """Continue checkpoints and loads whose waits may be over, such as after a worker has left."""
        effects = [effect for saving in list(self._saving.values()) for effect in self._advance(saving)]
        for loading in list(self._loading.values()):
            effects += self._begin_loading(loading)
        return effects

    def server_lost(self, server: Member, unaware: Iterable[Member]) -> None:
        """Fail the checkpoints that lack slices of a lost server.

        Args:
            server: the lost server.
            unaware: workers that may not know of the loss, and may have marked pushes at the lost server.
        """
        reason = f"{server} was lost before it had saved its slices: save again"
        self._unaware |= dict.fromkeys(unaware, (self._membership.epoch + 1, reason))
        for saving in self._saving.values():
            if saving.servers.get(server.node) == server and not saving.agreement.has_heard(server):
                saving.fail(reason)
                del saving.servers[server.node]

    def is_unaware(self, member: Member) -> bool:
        """Return whether a worker may not know that a server is lost."""
        return member in self._unaware

    def heard(self, member: Member, epoch: int) -> None:
        """Record that a worker knows the servers of this roster."""
        if self._unaware.get(member, (fx.NEVER, ""))[0] <= epoch:
            del self._unaware[member]

    @property
    def is_loading(self) -> bool:
        """Whether servers restore a store: all workers have called for the load, and copies are complete."""
        return any(loading.is_reading for loading in self._loading.values())

    def _open(self, message: msg.Save | msg.Saved, now: float) -> SaveUnderWay:
        which = (message.store, message.counter)
        saving = self._saving.get(which)
        if saving is None:
            workers, there_now = self._membership.awaited, self._membership.servers
            servers = {node: one for node, one in there_now.items() if self._membership.numbers_of(node)}
            there = self._membership.members
            quorum = (*self._membership.quorum, servers)
            agreement: Agreement[msg.Save | msg.SavedFile] = Agreement("checkpoint", "", now, there, quorum)
            live = frozenset(node.rank for node in workers)
            saving = self._saving[which] = SaveUnderWay(
                *which, servers, agreement, self._position, self._answer_saving, live
            )
            self.saves[message.store] = message.counter + 1
        return saving

    def _advance(self, saving: SaveUnderWay) -> list[fx.Effect]:
        if saving.is_ending or not saving.is_complete:
            return []
        saving.is_ending, manifest = True, None
        if not saving.failure:
            try:
                manifest = self._manifest(saving)
            except ValueError as error:
                saving.fail(str(error))
        if manifest is None:
            return self._sweep(saving)
        exempted = {member.node.rank for member in saving.agreement.exempted}
        gone = saving.live - {member.node.rank for member, _ in saving.saves} - exempted
        gone -= {node.rank for node in self._membership.resting}
        lost = gone & {member.node.rank for member in self._membership.lost}
        ways = ((lost, "lost before"), (gone - lost, "left instead of"))
        lacks = " and ".join(f"{_names(ranks)} ({how} calling save_checkpoint)" for ranks, how in ways if ranks)
        assert saving.order is not None
        written = fx.Persist(saving, WriteManifest(saving.order.folder, manifest, saving.order.keep))
        return [*([fx.Log(f"{saving.name} has no state of {lacks}")] if lacks else []), written]

    def _sweep(self, saving: SaveUnderWay) -> list[fx.Effect]:
        """Remove the files of a failed checkpoint; only then may workers try again, perhaps in the same folder."""
        folders = sorted(saving.folders)
        if not folders:
            return self._end_saving(saving, "")  # no files were to be written
        *others, last = folders
        return [*(fx.Persist(None, Sweep(folder)) for folder in others), fx.Persist(saving, Sweep(last))]

    def _end_saving(self, saving: SaveUnderWay, failure: str, present: Manifest | None = None) -> list[fx.Effect]:
        if failure and not saving.failure:
            saving.failure = failure
            return self._sweep(saving)
        if present is not None and present.is_of(saving.files):
            saving.failure = ""  # the manifest exists, though its writing ended with an error
        if self._saving.get((saving.store, saving.counter)) is not saving:
            return []  # the checkpoint was dropped meanwhile
        del self._saving[saving.store, saving.counter]
        return saving.end(saving)

    def _position(self, saving: SaveUnderWay) -> Mapping[str, Any] | None:
        return None if self.data is None else self.data.position((saving.store, saving.counter))

    def _answer_saving(self, saving: SaveUnderWay) -> list[fx.Effect]:
        """Answer the workers that have called for a checkpoint."""
        if self.data is not None:
            self.data.saved((saving.store, saving.counter))
        return saving.agreement.answer(partial(_answer, failure=saving.failure))

    def _manifest(self, saving: SaveUnderWay) -> Manifest:
        order = saving.order
        assert order is not None
        mode, optimizer = self._keys.stores[saving.store].mode, self._keys.optimizers.get(saving.store)
        return Manifest(
            order.step,
            order.contents,
            mode,
            MODES[mode].is_lockstep,
            None if optimizer is None else optimizer.description,
            len(saving.saves) or len(self._membership.awaited),
            len(saving.servers),
            saving.keys,
            tuple(FileRecord(file.name, file.nbytes, file.sha256) for file in saving.files),
            order.run,
            saving.position(saving),
        )

    # Loading.

    def load(self, sender: Member, message: msg.Load, counter: int, now: float) -> list[fx.Effect]:
        """Handle load `counter` of a worker, which has no push under way, and waits until the store is restored."""
        which, workers = (message.store, counter), self._membership.awaited
        loading = self._loading.get(which)
        if loading is None:
            subject, deed = "loading of a checkpoint", "call load_checkpoint"
            later = partial(self._membership.joined_later, message.pushes)
            agreement: Agreement[msg.Load | msg.Quiet]
            agreement = Agreement(subject, deed, now, workers, self._membership.quorum, later)
            loading = self._loading[which] = LoadUnderWay(
                message.store,
                counter,
                message.folder,
                message.contents,
                agreement,
                self._may_load,
                self._check,
                self._answer_loading,
            )
            self.loads[message.store] = counter + 1
        loading.agreement.say(sender, message)
        return [*loading.agreement.ask(sender, message.request), *self._begin_loading(loading)]

    def _may_load(self) -> bool:
        return not self._membership.is_filling

    def roll_back(self, loading: LoadUnderWay) -> list[fx.Effect]:
        """Open a load that the workers do not call for, for a rollback: they answer by `quiet`."""
        self._loading[loading.store, loading.counter] = loading
        return self._begin_loading(loading)

    def quiet(self, loading: LoadUnderWay, sender: Member, message: msg.Quiet) -> list[fx.Effect]:
        """Handle the message of a worker that has no push in flight, and waits until all have gone back."""
        loading.agreement.say(sender, message)
        return self._begin_loading(loading)

    def _begin_loading(self, loading: LoadUnderWay) -> list[fx.Effect]:
        if loading.is_reading or not loading.agreement.is_complete or not loading.may_begin():
            return []
        loading.is_reading = True
        calls = [(member, one) for member, one in loading.agreement.said.values() if isinstance(one, msg.Load)]
        for member, message in calls:
            if message.failure:
                return self._end_loading(loading, f"{member}: {message.failure}")
        arguments = [(member.node.rank, _arguments(message)) for member, message in calls]
        if len({some for _, some in arguments}) > 1:
            return self._end_loading(loading, _differ(arguments))
        if not self._keys.saved(loading.store):
            return self._end_loading(loading, "the store has no keys: init them before")
        return [fx.Persist(loading, ReadManifest(loading.folder))]

    def _let_servers_read(self, loading: LoadUnderWay, manifest: Manifest) -> list[fx.Effect]:
        """Check a manifest that has been read; if it fits, let the servers read."""
        try:
            loading.check(loading, manifest)
        except (errors.CheckpointError, ValueError) as error:
            return self._end_loading(loading, str(error))
        message = msg.Restore(0, loading.store, loading.folder, loading.contents)
        return self._questions.ask(message, partial(self._read, loading), loading.agreement)

    def _check(self, loading: LoadUnderWay, manifest: Manifest) -> None:
        """Check whether a store, as it is now, can be restored from a checkpoint that workers have named."""
        optimizer = self._keys.optimizers.get(loading.store)
        description = None if optimizer is None else optimizer.description
        manifest.require(self._keys.saved(loading.store), description, loading.contents)
        if manifest.data is not None and self.restoring_data is not None:
            loading.take_data = self.restoring_data(manifest.data)

    def _read(self, loading: LoadUnderWay, failure: str) -> list[fx.Effect]:
        """Let the servers take over the values that they have read, or drop them if a server failed."""
        loading.is_taking = not failure
        take = msg.TakeRestored(0, loading.store, loading.rollback)
        message = msg.DropRestored(0, loading.store) if failure else take
        return self._questions.ask(message, partial(self._taken, loading, failure), loading.agreement)

    def _taken(self, loading: LoadUnderWay, failure: str, _: str) -> list[fx.Effect]:
        """End a load, as every server has taken over or dropped its values."""
        return self._end_loading(loading, failure)

    def _is_open(self, loading: LoadUnderWay) -> bool:
        """Return whether a load was not dropped meanwhile."""
        return self._loading.get((loading.store, loading.counter)) is loading

    def _end_loading(self, loading: LoadUnderWay, failure: str) -> list[fx.Effect]:
        if not self._is_open(loading):
            return []  # the load was dropped meanwhile
        del self._loading[loading.store, loading.counter]
        return loading.end(loading, failure)

    def _answer_loading(self, loading: LoadUnderWay, failure: str) -> list[fx.Effect]:
        """Answer the workers that have called for a load."""
        for follows in (loading.take_data, self.after_load):
            if not failure and follows is not None:
                follows()
        return loading.agreement.answer(partial(_answer, failure=failure))

    # Both.

    def persisted(self, event: fx.Persisted) -> list[fx.Effect]:
        """Handle the end of a work with the disk: a lock, a manifest written or read, or files removed."""
        match event.token:
            case FolderClaim() as claim if event.failure:
                return self._answer_claim(claim, event.failure)
            case FolderClaim() as claim:
                assert isinstance(event.product, str)
                return self._locked(claim, event.product)
            case SaveUnderWay() as saving:
                assert event.product is None or isinstance(event.product, Manifest)
                return self._end_saving(saving, event.failure, event.product)
            case LoadUnderWay() as loading if event.failure:
                return self._end_loading(loading, event.failure)
            case LoadUnderWay() as loading if self._is_open(loading):
                assert isinstance(event.product, Manifest)
                return self._let_servers_read(loading, event.product)
            case _:
                return []

    def waits(self) -> Iterator[MemberWait]:
        """Yield all waits for claims, checkpoints and loads."""
        for claim in self._claims.values():
            yield from claim.agreement.waits()
        for saving in self._saving.values():
            yield from saving.waits()
        for loading in self._loading.values():
            yield from loading.agreement.waits()

    def validate(self) -> None:
        """Check every invariant."""
        for which, saving in self._saving.items():
            assert which == (saving.store, saving.counter), "a checkpoint is known by its store and count"
            assert saving.is_ending == saving.is_complete, "it ends when all have reported, and not before"
            saving.agreement.validate()
        for claim in self._claims.values():
            claim.agreement.validate()
        for loading in self._loading.values():
            may_wait = not loading.may_begin() or not loading.agreement.is_complete
            assert loading.is_reading or may_wait, "a complete agreement is carried out"


def _answer(request: int, failure: str) -> msg.Done | msg.Failed:
    return msg.Failed(request, msg.ErrorCode.CHECKPOINT, failure) if failure else msg.Done(request)


def _with_loss(failure: str, loss: str) -> str:
    """Return the failure of a checkpoint with a lost server, and with an earlier failure of another: perhaps by the
    loss, perhaps not, as with a full disk."""
    if loss in failure:
        return failure
    return f"{failure}; {loss}" if failure else loss


def _arguments(message: msg.Save | msg.Load) -> tuple[Hashable, ...]:
    """Return the arguments that must be equal on all workers."""
    more = (message.step, message.keep) if isinstance(message, msg.Save) else ()
    return (message.folder, message.contents, *more)


def _names(ranks: Iterable[int]) -> str:
    return ", ".join(f"worker-{rank}" for rank in sorted(ranks))


def _differ(said: Sequence[tuple[int, Hashable]]) -> str:
    told = ", ".join(f"{who} {'name' if ' ' in who else 'names'} {value}" for who, value in minority_first(said))
    return f"the workers do not agree: {told}; all must give the same arguments"
