"""Snapshots that servers write by themselves, and the way back to the newest one when a server is lost. Pure.

A snapshot is a checkpoint that no worker calls for. Its moment is that of a cut, as newcomers have it: every slice is
taken when it reaches version T, so it is one moment of the whole store, and nobody stops. When a server is lost, and
its rank registers again, all servers read the newest snapshot, and all workers drop what they have asked for. Rules
that hold here:

* A snapshot is one when its manifest is written, and not before. What is torn is never read: all files are compared
  with their checksums before any server goes back, and if one is damaged, the snapshot before is the newest.
* No server goes back before every worker is quiet: has dropped what it had asked for, with nothing under way. So no
  push of before is counted after.
* No worker goes on before every server has gone back.
* What a worker calls before it hears of this, and what was agreed on and not answered, is dropped by all.
* Whatever is lost meanwhile, another server among it, the way back begins anew.

An asynchronous store has no versions that all slices share, so it is refused; `--replicas` keeps copies of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvdist import errors
from kvdist.checkpoint.snapshot import (
    EVERYTHING,
    FileRecord,
    LockFolder,
    Manifest,
    ReadManifest,
    SavedKey,
    Sweep,
    WriteManifest,
)
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.agreement import Agreement, MemberWait, Questions
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.policy import POLICIES
from kvdist.core.scheduler.keys import Keys
from kvdist.core.scheduler.membership import Membership
from kvdist.core.scheduler.newcomers import Newcomers
from kvdist.naming import name_of
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U32

if TYPE_CHECKING:  # a feature at a seam: schedulers run without it
    from kvdist.core.scheduler.leases import Leases

KEPT = 2
"""Snapshots that stay: the newest, and the one before it."""
FAILURES_APART_S = 3600.0
"""How often a server is thought to be lost, for the interval that costs least."""
AGAIN_S = 60.0
"""When it is tried once more, where the disk has failed."""
INTERVALS_LATE = 3.0
"""A snapshot that takes so many intervals is said to be late; or so often as long as the last one took."""
LOOK_AGAIN_S = 1.0
"""When there is nothing to be written yet."""
LOCK_LATE_S = 2.0
"""After how long it is said that the folder is not locked yet."""


@dataclass(slots=True, eq=False)
class Snapshot:
    """One snapshot, complete or under way."""

    store: int
    version: int
    folder: str
    keys: tuple[SavedKey, ...]
    begun_at: float
    taken: dict[Member, msg.SnapshotTaken] = field(default_factory=dict)
    position: Mapping[str, Any] | None = None
    """In the data, if workers lease them."""
    is_written: bool = False
    """Its manifest is there, or is being written."""
    is_late: bool = False
    """That it takes long was said."""

    @property
    def failure(self) -> str:
        """Why it cannot be made; '' if it can."""
        return next((f"{member}: {one.failure}" for member, one in self.taken.items() if one.failure), "")

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """The files of the servers that keep something of the store."""
        files: list[msg.SavedFile] = [one.file for one in self.taken.values() if one.file.name]
        return tuple(FileRecord(file.name, file.nbytes, file.sha256) for file in files)

    @property
    def versions(self) -> tuple[U32, U32]:
        """(n,) slices, and (n,) the version of each."""
        taken = self.taken.values()
        return np.concatenate([one.ids for one in taken]), np.concatenate([one.versions for one in taken])

    @property
    def trained(self) -> dict[int, int]:
        """Incarnation of a worker → how many of its examples are in it: what counts in part counts as used."""
        found: dict[int, int] = {}
        for one in [trained for taken in self.taken.values() for trained in taken.trained]:
            found[one.incarnation] = max(found.get(one.incarnation, 0), one.examples)
        return found


@dataclass(slots=True, eq=False)
class WayBack:
    """A server was lost, and all go back to a snapshot."""

    number: int
    to: Snapshot
    busy: set[Member]
    """Workers that still have messages to servers in flight."""
    begun_at: float
    is_asked: bool = False
    """The servers read."""
    is_read: bool = False
    asked: Agreement[str] | None = None
    """What servers are doing."""
    request: int = -1
    """Of the order to go back."""
    gone_back: set[Member] = field(default_factory=set)
    """The servers that have."""


class SnapshotScheduler(Protocol):
    """What the scheduler does for snapshots."""

    @property
    def now(self) -> float:
        """The time."""

    def end_job(self, member: Member, cause: str, sentence: str) -> list[fx.Effect]:
        """End the job because of this process."""


class Rollback:
    """All snapshots of a job.

    Args:
        config: where they are written, and how often.
        now: the time.
        membership: who is in the cluster.
        keys: what is declared.
        questions: what servers are asked.
        newcomers: makes cuts.
        scheduler: does the rest.
    """

    def __init__(
        self,
        config: ClusterConfig,
        now: float,
        membership: Membership,
        keys: Keys,
        questions: Questions,
        newcomers: Newcomers,
        scheduler: SnapshotScheduler,
    ) -> None:
        assert config.snapshots is not None
        self._folder = config.snapshots.rstrip("/")
        self._interval_s = config.snapshot_interval_s
        self._patience_s = config.limits.form_timeout_s
        self._explain_after_s = config.limits.explain_after_s
        self._took_s = 0.0
        """How long the last snapshot took."""
        self._num_servers = config.num_servers
        self._membership = membership
        self._keys = keys
        self._questions = questions
        self._newcomers = newcomers
        self._scheduler = scheduler
        self.leases: Leases | None = None
        """What workers train on; None if nobody has asked for any."""
        self._run = ""
        self._has_lock = self._is_locking = False
        self._lock_late_at = fx.NEVER
        """When it is said that the folder is not locked yet."""
        self._next = now
        """When the next snapshot begins."""
        self._making: Snapshot | None = None
        self._said: set[str] = set()
        """Why none could be made since the last one that was: each cause is said once."""
        self.written: list[Snapshot] = []
        """Those to which all can go back, the newest last."""
        self._none_known = "there is no snapshot yet"
        """Why, if there are none."""
        self._useless: list[str] = []
        """Folders of snapshots that are damaged, or of what is undone: they go before the next manifest is written, or
        it would be older ones that go."""
        self.way_back: WayBack | None = None
        self._number = 0
        self._lost: Member | None = None
        """The server that was lost last."""

    @property
    def locked_folders(self) -> list[tuple[str, str]]:
        """A folder of snapshots, if this job has the lock of its directory; and the run."""
        return [(f"{self._folder}/step-0", self._run)] if self._has_lock else []

    # Snapshots.

    @property
    def newest(self) -> Snapshot | None:
        """The newest of which the manifest is written."""
        return self.written[-1] if self.written else None

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        if self.way_back is not None:
            is_whole = len(self._membership.servers) == self._num_servers
            return fx.NEVER if is_whole else self.way_back.begun_at + self._patience_s
        if self._making is not None:
            return fx.NEVER if self._making.is_late else self._making.begun_at + self._late_s
        return self._lock_late_at if self._is_locking else self._next

    def tick(self, now: float) -> list[fx.Effect]:
        """Begin a snapshot if it is time; give up a server that does not come back."""
        if self.way_back is not None:
            assert self._lost is not None
            waited = f"nobody took its place within {self._patience_s:g} s"
            return self._scheduler.end_job(self._lost, waited, f"{self._lost} was lost, and {waited}")
        if self._making is not None:
            return self._late(self._making, now)
        if self._is_locking:
            self._lock_late_at = fx.NEVER
            told = (
                f"no snapshot can be written yet: the scheduler has waited {LOCK_LATE_S:g} s for the lock of the folder"
                f" {self._folder}; another job is taking it (lock.json there says which process on which host), or the"
                " file system does not answer"
            )
            return self._once("lock", told)
        self._next = now + min(LOOK_AGAIN_S, self._again_s)
        if not self._membership.workers or self._store() is None:
            return []
        if not self._has_lock:
            self._is_locking, self._lock_late_at = True, now + LOCK_LATE_S
            return [fx.Persist(self, LockFolder(f"{self._folder}/step-0", self._run))]
        return self._newcomers.cut(partial(self._begin, now))

    @property
    def _late_s(self) -> float:
        return max(self._explain_after_s, INTERVALS_LATE * max(self._again_s, self._took_s))

    def _late(self, making: Snapshot, now: float) -> list[fx.Effect]:
        """Say who has not done its part; no other snapshot is begun before."""
        making.is_late = True
        silent = sorted(str(one) for one in self._membership.servers.values() if one not in making.taken)
        what = "the scheduler has not written its manifest"
        if silent:
            what = f"not written yet by {', '.join(silent)} (a disk hangs, or a key is not pushed any more)"
        last = (
            "there is none before" if self.newest is None else f"the last complete one is of step {self.newest.version}"
        )
        took = f"{now - making.begun_at:.0f} s"
        return self._once("late", f"the snapshot of step {making.version} is not complete after {took}: {what}; {last}")

    @property
    def wait(self) -> MemberWait | None:
        """For whom the way back waits."""
        back = self.way_back
        if back is None:
            return None
        nodes = [NodeId(Role.SERVER, rank) for rank in range(self._num_servers)]
        missing = tuple(node for node in nodes if node not in self._membership.servers)
        which = f"the snapshot of step {back.to.version}"
        deed = f"come back, and read {which}"
        if not missing and back.asked is not None and back.asked.waits_for is not None:
            missing, deed = back.asked.waits_for.missing(), f"{back.asked.deed} {which}"
        elif not missing:
            deed = f"read the manifest of {which}"
        if not missing and back.busy and back.is_read:
            missing = tuple(sorted((one.node for one in back.busy), key=lambda node: node.rank))
            deed = f"drop what they have asked for: all go back to {which}"
        return MemberWait(SCHEDULER_MEMBER, 0, back.begun_at, missing, "", deed)

    def _store(self) -> int | None:
        """The store that is updated, once it has keys."""
        stores = [store for store in self._keys.optimizers if self._keys.saved(store)]
        return stores[0] if stores else None

    def _begin(self, now: float, version: int) -> list[fx.Effect]:
        """Servers promise to make this version at most: let them take it."""
        store = self._store()
        if store is None or self.way_back is not None or self._making is not None:
            return []
        folder = f"{self._folder}/step-{version}"
        self._making = Snapshot(store, version, folder, self._keys.saved(store), now)
        self._note_leases(self._making)
        message = msg.TakeSnapshot(store, version, folder, self._run)
        return [fx.Send(server, message) for server in self._membership.servers.values()]

    def has_leases(self, leases: Leases) -> None:
        """Workers lease examples from now on, perhaps while servers take a snapshot."""
        self.leases = leases
        if self._making is not None and not self._making.is_written:
            self._note_leases(self._making)

    def _note_leases(self, making: Snapshot) -> None:
        if self.leases is not None:
            self.leases.snapshot_begins(making.version)

    def snapshot_taken(self, sender: Member, message: msg.SnapshotTaken) -> list[fx.Effect]:
        """A server has written its part, or could not."""
        making = self._making
        if making is None or making.folder != message.folder or making.is_written:
            return []
        making.taken[sender] = message
        if not self._membership.servers.items() <= {(one.node, one) for one in making.taken}:
            return []
        if making.failure:
            return self._failed(making, making.failure)
        if self.leases is not None:
            try:
                making.position = self.leases.position_at(making.trained)
            except ValueError as error:
                effects = self._failed(making, str(error))
                self._next = self._scheduler.now + LOOK_AGAIN_S
                return effects
        making.is_written = True
        useless, self._useless = self._useless, []
        goes = [fx.Persist(None, Sweep(folder, whole=True)) for folder in useless if folder != making.folder]
        return [*goes, fx.Persist(making, WriteManifest(making.folder, self._manifest(making), KEPT))]

    def _manifest(self, making: Snapshot) -> Manifest:
        description = self._keys.optimizers[making.store].description
        mode, workers = self._keys.stores[making.store].mode, len(self._membership.workers)
        counts = (workers, self._num_servers)
        return Manifest(
            making.version,
            EVERYTHING,
            mode,
            True,  # one moment of the whole store
            description,
            *counts,
            making.keys,
            making.files,
            self._run,
            making.position,
        )

    def persisted(self, event: fx.Persisted, now: float) -> list[fx.Effect]:
        """The folder is this job's, a manifest is written or read; or not."""
        if isinstance(event.token, Snapshot):
            return self._written(event.token, event.failure, now)
        if isinstance(event.token, WayBack):
            return self._checked(event.token, event)
        if event.token is not self:
            return []
        self._is_locking, self._has_lock = False, not event.failure
        self._next = now + self._again_s if event.failure else now
        if event.failure:
            told = f"no snapshots can be written, so the loss of a server ends the job: {event.failure}"
            return self._once(event.failure, told)
        assert isinstance(event.product, str)
        self._run = event.product
        return []

    def _written(self, making: Snapshot, failure: str, now: float) -> list[fx.Effect]:
        if making is not self._making:
            return []
        if failure:
            return self._failed(making, failure) + self.advance(now)
        self.written, self._making = [*self.written, making][-KEPT:], None
        self._took_s = now - making.begun_at
        self._next = now + self._pause_s(self._took_s)
        told = [fx.Log(f"snapshots are written again: that of step {making.version} is there")] if self._said else []
        self._said.clear()
        return [*told, *self.advance(now)]

    def _failed(self, making: Snapshot, reason: str) -> list[fx.Effect]:
        self._making = None
        self._next = self._scheduler.now + self._again_s
        before = "there is none before" if self.newest is None else f"that of step {self.newest.version} stays"
        told = f"the snapshot of step {making.version} was not made, training goes on, and {before}: {reason}"
        return [*self._once(reason.replace(making.folder, ""), told), fx.Persist(None, Sweep(making.folder))]

    def _once(self, cause: str, told: str) -> list[fx.Effect]:
        """What is said of a failure that comes again each time it is tried."""
        is_new = cause not in self._said
        self._said.add(cause)
        return [fx.Log(told)] if is_new else []

    @property
    def _again_s(self) -> float:
        return AGAIN_S if self._interval_s is None else self._interval_s

    def _pause_s(self, took_s: float) -> float:
        """How long after a snapshot the next one begins: J. W. Young, A first order approximation, CACM 1974."""
        if self._interval_s is not None:
            return max(self._interval_s, took_s)
        return max(took_s, math.sqrt(2.0 * took_s * FAILURES_APART_S), LOOK_AGAIN_S)

    def refusal(self, message: msg.Declare | msg.Configure) -> str:
        """Why this cannot be beside snapshots; '' if it can."""
        if isinstance(message, msg.Declare) and not POLICIES[message.mode].is_lockstep:
            return (
                "snapshots (--snapshots, KVDIST_SNAPSHOTS) cannot bring back a store without rounds (dist_async, the"
                " policy async): take --replicas 1 instead, which loses no push"
            )
        optimizers = self._keys.optimizers
        if isinstance(message, msg.Configure) and optimizers and message.store not in optimizers:
            return "snapshots (KVDIST_SNAPSHOTS) cannot bring back a second store with an optimizer: leave one out"
        return ""

    def forget(self) -> None:
        """The store was loaded: what was before is not to come back."""
        self.written, self._making = [], None
        self._none_known = "there is no snapshot since the store was loaded"
        self._next = self._scheduler.now

    # The way back.

    def obstacle(self) -> str:
        """Why nobody can go back when a server is lost now; '' if all can."""
        complete = self._complete()
        if complete is None:
            return self._none_known
        return self._lacks(complete) or ("" if self._membership.there else "no worker is left that could go on")

    def _lacks(self, snapshot: Snapshot) -> str:
        """Which key is not in it; '' if all are."""
        kept = {key.key for key in snapshot.keys}
        new = [key.key for store in self._keys.optimizers for key in self._keys.saved(store) if key.key not in kept]
        return f"{name_of(new[0])} was initialised after the last snapshot" if new else ""

    def _complete(self) -> Snapshot | None:
        """The newest snapshot, or the one whose files are all there and whose manifest is being written."""
        making = self._making
        return making if self.newest is None and making is not None and making.is_written else self.newest

    def begin(self, lost: Member, now: float) -> list[fx.Effect]:
        """A server was lost, and has left the membership: let all workers drop what they ask for."""
        self._lost = lost
        to = self._complete()
        assert to is not None
        if self._making is not None and self._making is not to:  # it is of what is dropped now
            if self._making.is_written:  # it takes the place of the oldest
                self._useless.append(self._making.folder)
                self.written = self.written[1 - KEPT :]
            self._making = None
        if self.leases is not None:
            self.leases.go_back(to.position)
        self._number += 1
        busy = list(self._membership.workers.values())
        self.way_back = WayBack(self._number, to, set(busy), now)
        self._newcomers.begin_anew()
        message = msg.Rewind(self._number, to.version, f"{lost} was lost: all go back to step {to.version}")
        return [*(fx.Send(member, message) for member in busy), *self._advance(now)]

    def ignores(self, sender: Member) -> bool:
        """Whether this worker has called something that it is going to drop."""
        return self.way_back is not None and sender in self.way_back.busy

    def note_done(self, sender: Member, request: int) -> None:
        """A server has done something: what it says of checkpoints from now on is not of those that were dropped."""
        if self.way_back is not None and self.way_back.request == request:
            self.way_back.gone_back.add(sender)

    def is_stale(self, sender: Member) -> bool:
        """Whether a server says something about checkpoints that were dropped."""
        return self.way_back is not None and sender not in self.way_back.gone_back

    def welcome(self, server: Member) -> list[fx.Effect]:
        """A server has taken the place of a lost one: tell it what all others know."""
        messages = [*self._keys.told(), *self._questions.unanswered]
        return [fx.Send(server, message) for message in messages]

    def quiet(self, sender: Member, message: msg.Quiet, now: float) -> list[fx.Effect]:
        """A worker has dropped what it had asked for, and nothing of it is under way."""
        if self.way_back is not None and self.way_back.number == message.number:
            self.way_back.busy.discard(sender)
        return self._advance(now)

    def advance(self, now: float) -> list[fx.Effect]:
        """A worker is gone, or a server is back."""
        if self.way_back is not None:
            self.way_back.busy.intersection_update(self._membership.workers.values())
        return self._advance(now)

    def _advance(self, now: float) -> list[fx.Effect]:
        back = self.way_back
        if back is None or len(self._membership.servers) < self._num_servers:
            return []
        if not back.is_asked:
            if self._making is not None:
                return []  # the manifest of the one to go back to is being written
            back.is_asked = True
            if self.newest is None:
                return self._without_any()
            assert back.to is self.newest, "it was said to workers"
            return [fx.Persist(back, ReadManifest(back.to.folder))]
        if not back.is_read or back.busy or back.request >= 0:
            return []

        back.asked, back.request = self._step(back, "go back to"), self._questions.next_request
        message = msg.RollBack(0, back.number, *back.to.versions)
        return self._questions.ask(message, partial(self._ended, back, now), back.asked)

    def _step(self, back: WayBack, deed: str) -> Agreement[str]:
        return Agreement("", deed, back.begun_at, {})

    def _without_any(self) -> list[fx.Effect]:
        assert self._lost is not None
        cause = "the only snapshot could not be written"
        return self._scheduler.end_job(self._lost, cause, f"{self._lost} was lost, and {cause}")

    def _checked(self, back: WayBack, event: fx.Persisted) -> list[fx.Effect]:
        """The manifest was read: if it is what was written, let the servers read."""
        if back is not self.way_back:
            return []
        failure = event.failure
        if not failure:
            assert isinstance(event.product, Manifest)
            failure = self._misfit(event.product, back.to)
        if failure:
            return self._without(back.to, failure)
        back.asked = self._step(back, "read")
        message = msg.Restore(0, back.to.store, back.to.folder, EVERYTHING)
        return self._questions.ask(message, partial(self._read, back), back.asked)

    def _misfit(self, manifest: Manifest, to: Snapshot) -> str:
        try:
            manifest.require(to.keys, self._keys.optimizers[to.store].description, EVERYTHING)
        except errors.CheckpointError as error:
            return str(error)
        if manifest.run != self._run:
            return f"it was written by run {manifest.run}, and this is {self._run}: give each job a folder of its own"
        return ""

    def _read(self, back: WayBack, failure: str) -> list[fx.Effect]:
        if back is not self.way_back:
            return []
        if failure:
            return self._without(back.to, failure)
        back.is_read = True
        return self._advance(self._scheduler.now)

    def _without(self, damaged: Snapshot, failure: str) -> list[fx.Effect]:
        """A snapshot cannot be read: all go back to the one before it."""
        assert self._lost is not None
        if damaged in self.written:
            self.written.remove(damaged)
            self._useless.append(damaged.folder)
        cause, before = f"the snapshot {damaged.folder} cannot be read: {failure}", self._complete()
        obstacle = "there is none before it" if before is None else self._lacks(before)
        if before is None or obstacle:
            return self._scheduler.end_job(self._lost, cause, f"{self._lost} was lost, and {cause}; {obstacle}")
        told = fx.Log(f"{cause}; that of step {before.version} takes its place")
        return [told, *self.begin(self._lost, self._scheduler.now)]

    def _ended(self, back: WayBack, now: float, _: str) -> list[fx.Effect]:
        if back is not self.way_back:
            return []
        self.way_back = None
        self._next = now
        self._membership.go_back(back.to.version)
        told = fx.Log(f"all have gone back to step {back.to.version}, and go on from there")
        return [told, *self._newcomers.gone_back()]
