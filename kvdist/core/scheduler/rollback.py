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

In an asynchronous store each server takes its slices as they are, and when one is lost, only the one in its place goes
back. It hears from each worker what was counted there, and goes on from that; what it lacks is lost, and is said.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
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
    gone: Set[Member] = frozenset()
    """The workers that had left or were lost before."""
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
class Recalled:
    """Snapshots of an earlier scheduler: the manifest of the first is being read, and of the others if it has none."""

    found: list[tuple[str, dict[Member, msg.SnapshotTaken]]]
    """Folder, and what every server has written there; the newest first."""


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


@dataclass(slots=True, eq=False)
class Returning:
    """A server of an asynchronous store was lost: the one in its place goes back to a snapshot, and nobody else."""

    number: int
    lost: Member
    begun_at: float
    there: dict[NodeId, Member] = field(default_factory=dict)
    """The one in its place, once it is there."""
    to: Snapshot | None = None
    """What it reads."""
    asked: Agreement[str] | None = None
    """What it is doing."""
    has_gone_back: bool = False
    silent: set[Member] = field(default_factory=set)
    """Workers that have not said what it lacks."""
    missed: dict[Member, tuple[int, int]] = field(default_factory=dict)
    """Worker → of its pushes to a slice those that are lost: the least, the most. Those, too, that were lost with one
    that had taken this place, and had not gone back to the end."""
    before: Set[int] = frozenset()
    """The numbers of those."""


class SnapshotScheduler(Protocol):
    """What the scheduler does for snapshots."""

    steps: dict[Member, int]

    @property
    def now(self) -> float:
        """The time."""

    def is_whole(self) -> list[fx.Effect]:
        """A server has what it had: what has waited for that goes on."""

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
        self.returning: dict[NodeId, Returning] = {}
        membership.restoring = self.returning
        self._number = 0
        self._last = 0
        """The number of the last snapshot of an asynchronous store: how far the farthest worker was, and none twice."""
        self._lost: Member | None = None
        """The server that was lost last."""

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
        if self.returning:
            absent = [one.begun_at for one in self.returning.values() if not one.there]
            return min(absent, default=fx.NEVER) + self._patience_s
        if self._making is not None:
            return fx.NEVER if self._making.is_late else self._making.begun_at + self._late_s
        return self._lock_late_at if self._is_locking else self._next

    def tick(self, now: float) -> list[fx.Effect]:
        """Begin a snapshot if it is time; give up a server that does not come back."""
        if self.way_back is not None or self.returning:
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
        if self.is_partial:
            self._last = max(self._last + 1, *self._scheduler.steps.values())
            return self._begin(self._last, now)
        return self._newcomers.cut(lambda version: self._begin(version, now))

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
        """For whom the way back waits, of all or of the one in the place of a lost server."""
        back = self.way_back or next(iter(self.returning.values()), None)
        if back is None:
            return None
        nodes = [NodeId(Role.SERVER, rank) for rank in range(self._num_servers)]
        missing = tuple(node for node in nodes if node not in self._membership.servers)
        which = f"the snapshot of step {back.to.version}" if back.to is not None else "the newest snapshot"
        deed = f"come back, and read {which}"
        if not missing and back.asked is not None and back.asked.waits_for is not None:
            missing, deed = back.asked.waits_for.missing(), f"{back.asked.deed} {which}"
        elif not missing:
            deed = f"read the manifest of {which}"
        if not missing and isinstance(back, WayBack) and back.busy and back.is_read:
            missing = tuple(sorted((one.node for one in back.busy), key=lambda node: node.rank))
            deed = f"drop what they have asked for: all go back to {which}"
        if not missing and isinstance(back, Returning) and back.silent:
            missing = tuple(sorted((one.node for one in back.silent), key=lambda node: node.rank))
            deed = f"say what {back.lost.node} lacks of their pushes"
        return MemberWait(SCHEDULER_MEMBER, 0, back.begun_at, missing, "", deed)

    @property
    def is_partial(self) -> bool:
        """Whether only the slices of a lost server go back, because the store is asynchronous."""
        store = self._store()
        return store is not None and not POLICIES[self._keys.stores[store].mode].is_lockstep

    def _store(self) -> int | None:
        """The store that is updated, once it has keys."""
        stores = [store for store in self._keys.optimizers if self._keys.saved(store)]
        return stores[0] if stores else None

    def _begin(self, version: int, now: float) -> list[fx.Effect]:
        """Servers promise to make this version at most: let them take it."""
        store = self._store()
        if store is None or self.way_back is not None or self._making is not None:
            return []
        folder = f"{self._folder}/step-{version}"
        self._making = Snapshot(store, version, folder, self._keys.saved(store), now, gone=self._gone)
        self._note_leases(self._making)
        message = msg.TakeSnapshot(store, version, folder, self._run)
        return [fx.Send(server, message) for server in self._membership.servers.values()]

    def has_leases(self, leases: Leases) -> None:
        """Workers lease examples from now on, perhaps while servers take a snapshot."""
        self.leases = leases
        leases.in_snapshot = self.examples_of
        if self._making is not None and not self._making.is_written:
            self._note_leases(self._making)

    def _note_leases(self, making: Snapshot) -> None:
        if self.leases is not None and not self.is_partial:
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
        if self.leases is not None and not self.is_partial:
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
            POLICIES[mode].is_lockstep,
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
        if isinstance(event.token, Returning):
            return self._checked_alone(event.token, event)
        if isinstance(event.token, Recalled):
            return self._recalled(event.token, event, now)
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
        obstacle = ""
        modes = {POLICIES[store.mode].is_lockstep for store in self._keys.stores.values()}
        if isinstance(message, msg.Declare) and modes - {POLICIES[message.mode].is_lockstep}:
            obstacle = "a dist_async store beside one of sums or rounds (store.average makes one)"
        elif (
            isinstance(message, msg.Configure) and message.store not in self._keys.optimizers and self._keys.optimizers
        ):
            obstacle = "a second store with an optimizer"
        return (
            f"snapshots (KVDIST_SNAPSHOTS) cannot bring back {obstacle} yet: leave one of them out" if obstacle else ""
        )

    def recall(self, written: Mapping[str, dict[Member, msg.SnapshotTaken]]) -> list[fx.Effect]:
        """Take over from an earlier scheduler: go back to the newest snapshot that all servers have written.

        Args:
            written: folder → what servers have said of it, the newest last.
        """
        servers = set(self._membership.servers.values())
        self._none_known = (
            "the scheduler was started again, and knows no snapshot that all servers have written; if there is one in"
            f" {self._folder}, load_checkpoint reads it when the job is started again"
        )
        found = [one for one in reversed(list(written.items())) if one[1].keys() >= servers]
        return self._look_at(Recalled(found))

    def _look_at(self, recalled: Recalled) -> list[fx.Effect]:
        self._is_locking = bool(recalled.found)
        if self._is_locking:
            return [fx.Persist(recalled, ReadManifest(recalled.found[0][0]))]
        if self.newest is not None:
            return [fx.Log(f"the newest snapshot is that of step {self.newest.version}: all can go back to it")]
        return [fx.Log("no snapshot is known any more: until there is a new one, the loss of a server ends the job")]

    def _recalled(self, recalled: Recalled, event: fx.Persisted, now: float) -> list[fx.Effect]:
        """Its manifest was read; there is none if the earlier scheduler was lost before it was written."""
        folder, taken = recalled.found.pop(0)
        manifest, store = event.product, self._store()
        names = {one.file.name for one in taken.values()} - {""}
        if store is None or not isinstance(manifest, Manifest) or {file.name for file in manifest.files} != names:
            return self._look_at(recalled)
        self._next, self._run = now, manifest.run
        known = (manifest.keys, now, taken, manifest.data)
        self.written.insert(0, Snapshot(store, manifest.step, folder, *known, is_written=True, gone=self._gone))
        self._last = max(self._last, manifest.step)
        return self._look_at(recalled)

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
        noted: list[fx.Effect] = []
        if self.leases is not None:
            self.leases.go_back(to.position)
            noted = self.leases.restored(list)  # servers hear it before they go back themselves
        self._number += 1
        busy = list(self._membership.workers.values())
        self.way_back = WayBack(self._number, to, set(busy), now)
        self._newcomers.begin_anew()
        message = msg.Rewind(self._number, to.version, f"{lost} was lost: all go back to step {to.version}")
        return [*noted, *(fx.Send(member, message) for member in busy), *self._advance(now)]

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
        messages = [*self._keys.told(), *self._questions.repeated(server)]
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
        return [*self._advance(now), *(told for one in list(self.returning.values()) for told in self._return(one))]

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

        def make(request: int) -> msg.RollBack:
            back.request = request
            return msg.RollBack(request, back.number, *back.to.versions)

        back.asked = self._step(back, "go back to")
        return self._questions.ask(make, lambda _: self._ended(back, now), back.asked)

    def _step(self, back: WayBack | Returning, deed: str) -> Agreement[str]:
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
        return self._questions.ask(
            lambda request: msg.Restore(request, back.to.store, back.to.folder, EVERYTHING),
            lambda reason: self._read(back, reason),
            back.asked,
        )

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

    def _without(self, damaged: Snapshot, failure: str, one: Returning | None = None) -> list[fx.Effect]:
        """A snapshot cannot be read: all go back to the one before it, or this server alone does."""
        assert self._lost is not None
        if damaged in self.written:
            self.written.remove(damaged)
            self._useless.append(damaged.folder)
        cause, before = f"the snapshot {damaged.folder} cannot be read: {failure}", self._complete()
        obstacle = "there is none before it" if before is None else self._lacks(before)
        if before is None or obstacle:
            return self._scheduler.end_job(self._lost, cause, f"{self._lost} was lost, and {cause}; {obstacle}")
        told = fx.Log(f"{cause}; that of step {before.version} takes its place")
        if one is None:
            return [told, *self.begin(self._lost, self._scheduler.now)]
        one.to = None
        return [told, *self._return(one)]

    def _ended(self, back: WayBack, now: float) -> list[fx.Effect]:
        if back is not self.way_back:
            return []
        self.way_back = None
        self._next = now
        self._membership.go_back(back.to.version)
        told = fx.Log(f"all have gone back to step {back.to.version}, and go on from there")
        return [told, *self._newcomers.gone_back()]

    # The way back of one server, in an asynchronous store.

    def begin_alone(self, lost: Member, now: float) -> None:
        """A server was lost, and has left the membership: the one that takes its place goes back."""
        self._lost = lost
        if self._making is not None and not self._making.is_written:
            self._making = None
        self._number += 1
        before, one = self.returning.get(lost.node), Returning(self._number, lost, now)
        if before is not None:
            before.there.clear()
            one.missed, one.before = before.missed, before.before | {before.number}
        self.returning[lost.node] = one

    def examples_of(self, incarnation: int) -> int:
        """How many examples of a worker are in a snapshot to which a server may go back alone."""
        found = [*self.written, self._making, *(one.to for one in self.returning.values())]
        written = [one for one in found if one is not None and one.is_written]
        return max([one.trained.get(incarnation, 0) for one in written if self.is_partial], default=0)

    def missed(self, sender: Member, message: msg.Missed) -> list[fx.Effect]:
        """A worker says what a server that has gone back lacks of its pushes."""
        for one in self.returning.values():
            if message.number in one.before | {one.number}:
                least, most = one.missed.get(sender, (0, 0))
                one.missed[sender] = (least + message.least, most + message.most)
            if message.number == one.number:
                one.silent.discard(sender)
        return self.advance(self._scheduler.now)

    def _return(self, one: Returning) -> list[fx.Effect]:
        server = self._membership.servers.get(one.lost.node)
        if server is None or (one.to is None and self.newest is None and self._making is not None):
            return []  # or the manifest of the one to go back to is being written
        one.there[server.node] = server
        if one.to is None and self.newest is None:
            return self._without_any()
        if one.to is None:
            one.to = self.newest
            assert one.to is not None
            return [fx.Persist(one, ReadManifest(one.to.folder))]
        one.silent.intersection_update(self._membership.there.values())
        if not one.has_gone_back or one.silent:
            return []
        del self.returning[one.lost.node]
        self._next = self._scheduler.now
        return [fx.Log(self._told(server, one)), *self._scheduler.is_whole()]

    def _checked_alone(self, one: Returning, event: fx.Persisted) -> list[fx.Effect]:
        """The manifest was read: if it is what was written, let the server read."""
        if self.returning.get(one.lost.node) is not one:
            return []
        to = one.to
        assert to is not None
        failure = event.failure
        if not failure:
            assert isinstance(event.product, Manifest)
            failure = self._misfit(event.product, to)
        if failure:
            return self._without(to, failure, one)

        def read(failure: str) -> list[fx.Effect]:
            if self.returning.get(one.lost.node) is not one:
                return []
            if failure:
                return self._without(to, failure, one)
            one.silent = set(self._membership.there.values())
            taken = next(said for member, said in to.taken.items() if member.node == one.lost.node)
            where = (one.number, taken.ids, taken.versions)
            one.asked = self._step(one, "go back to")
            return self._questions.ask(lambda request: msg.RollBack(request, *where), ended, one.asked, one.there)

        def ended(_: str) -> list[fx.Effect]:
            one.has_gone_back = True
            return self.advance(self._scheduler.now)

        one.asked = self._step(one, "read")
        return self._questions.ask(
            lambda request: msg.Restore(request, to.store, to.folder, EVERYTHING), read, one.asked, one.there
        )

    @property
    def _gone(self) -> Set[Member]:
        """The workers that have left or were lost, if they have pushed anything."""
        left = {self._membership.peers[node].member for node in self._membership.left}
        gone = left | self._membership.lost.keys()
        return {one for one in gone if one.node.role is Role.WORKER and self._scheduler.steps.get(one)}

    def _told(self, server: Member, one: Returning) -> str:
        """What is lost, for people."""
        assert one.to is not None
        missed = sorted(one.missed.items(), key=lambda said: said[0].node.rank)
        lost = [f"{_range(*counts)} of {sender}" for sender, counts in missed if counts[1]]
        since = [f"all of {gone} since" for gone in sorted(map(str, self._gone - one.to.gone))]
        listed = ", ".join(lost + since) or "none"
        return (
            f"{server} goes on from the snapshot of step {one.to.version}, and the others where they are;"
            f" pushes to each of its keys that are lost: {listed}"
        )


def _range(least: int, most: int) -> str:
    return f"{most}" if least == most else f"{least} to {most}"
