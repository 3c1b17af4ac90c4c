"""Snapshots, which servers take without calls of workers, and the rollback to them when a server is lost. Pure.

A snapshot is a checkpoint that only servers agree on, at a cut, as newcomers have it: every slice is taken when it
reaches version T, so it is a single moment of the whole store, and no worker stops. A rollback is a load that all
workers are told to enter: when a server is lost, and its rank has registered again, all servers read the newest
snapshot. `kvdist.core.scheduler.checkpoints` carries out both. Invariants:

* A snapshot counts from the moment its manifest is written. All files are compared with their checksums before any
  server goes back; if a file is damaged, all go back to the previous snapshot.
* No server goes back before every worker is quiet: it has dropped its calls, and has nothing in flight. So no push from
  before the rollback is counted after it.
* No worker continues before every server has gone back.
* Calls that reach the scheduler from a worker that does not know of the rollback yet are dropped, and so are barriers,
  checkpoints and loads under way.
* The loss of another server meanwhile begins the rollback anew.

An asynchronous store has no versions that all slices share, so it is refused; `--replicas` keeps copies of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvdist import errors
from kvdist.checkpoint.snapshot import EVERYTHING, Manifest, Sweep
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.scheduler.agreement import Agreement, MemberWait, Questions
from kvdist.core.scheduler.checkpoints import Checkpoints, FolderClaim, LoadUnderWay, SaveUnderWay
from kvdist.core.scheduler.keys import Keys
from kvdist.core.scheduler.membership import Membership
from kvdist.core.scheduler.newcomers import Newcomers
from kvdist.naming import name_of
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol import messages as msg

if TYPE_CHECKING:  # a feature at a seam: schedulers run without it
    from kvdist.core.scheduler.leases import Leases

KEPT = 2
"""Number of snapshots that stay: the newest, and the snapshot before it."""
FAILURES_APART_S = 3600.0
"""Assumed time between two losses of a server, for the interval that costs least."""
AGAIN_S = 60.0
"""Time until the next try after a failure of the disk."""
INTERVALS_LATE = 3.0
"""Number of intervals, or of durations of the last snapshot, after which a snapshot is reported as late."""
LOOK_AGAIN_S = 1.0
"""Time until the next try while the job has nothing to write yet."""
LOCK_LATE_S = 2.0
"""Time after which a folder that is not locked yet is reported."""


@dataclass(slots=True, eq=False)
class Snapshot(SaveUnderWay):
    """A snapshot, complete or under way."""

    again_s: float = AGAIN_S
    """Time until the next try if the snapshot fails."""
    trained: dict[int, int] = field(default_factory=dict)
    """Incarnation of a worker → examples of its pushes in the snapshot: examples that count in some slices count."""
    data: Mapping[str, Any] | None = None
    """Positions of the workers in their data, if they lease examples."""
    is_late: bool = False
    """Whether the snapshot was reported as late."""

    @property
    def version(self) -> int:
        """Version of the slices."""
        return -1 - self.counter

    @property
    def folder(self) -> str:
        """Folder of the snapshot."""
        assert self.order is not None
        return self.order.folder


class SnapshotScheduler(Protocol):
    """The scheduler, as snapshots see it; this module imports nothing of `scheduler`, which imports it."""

    @property
    def now(self) -> float:
        """Time of the machine."""

    def end_job(self, member: Member, cause: str, sentence: str) -> list[fx.Effect]:
        """End the job because of the loss of a process."""


class Rollback:
    """The snapshots that servers write by themselves, and the rollback to one of them.

    The walk of a rollback: `begin` → `Checkpoints.roll_back` → (every worker is quiet) `ReadManifest` → `_check` →
    `Restore` on all servers → `TakeRestored` → `_loaded`.

    Args:
        config: folder and interval of the snapshots.
        now: the time.
        membership: members of the cluster.
        keys: keys and optimizers of the cluster.
        questions: requests to servers.
        checkpoints: saves and loads.
        newcomers: makes cuts.
        scheduler: the scheduler.
    """

    def __init__(
        self,
        config: ClusterConfig,
        now: float,
        membership: Membership,
        keys: Keys,
        questions: Questions,
        checkpoints: Checkpoints,
        newcomers: Newcomers,
        scheduler: SnapshotScheduler,
    ) -> None:
        assert config.snapshots is not None
        self._folder = config.snapshots.rstrip("/")
        self._interval_s = config.snapshot_interval_s
        self._patience_s = config.limits.form_timeout_s
        self._explain_after_s = config.limits.explain_after_s
        self._took_s = 0.0
        """Duration of the last snapshot."""
        self._num_servers = config.num_servers
        self._membership = membership
        self._keys = keys
        self._questions = questions
        self._checkpoints = checkpoints
        self._newcomers = newcomers
        self._scheduler = scheduler
        self.leases: Leases | None = None
        """Leases of examples; None if no worker has asked for any."""
        self._claim: FolderClaim | None = None
        """The lock of the folder, from its first try on."""
        self._lock_late_at = fx.NEVER
        """Time at which a folder that is not locked yet is reported."""
        self._next = now
        """Time at which the next snapshot begins."""
        self._making: Snapshot | None = None
        self._reported: set[str] = set()
        """Causes of failures since the last complete snapshot: each is reported once."""
        self.written: list[Snapshot] = []
        """Complete snapshots, the newest last."""
        self._none_known = "there is no snapshot yet"
        """Reason for an empty `written`."""
        self._useless: list[str] = []
        """Folders of damaged and undone snapshots: removed before the next manifest is written, else older snapshots
        would be removed in their place."""
        self.way_back: LoadUnderWay | None = None
        """The rollback under way."""
        self._to: Snapshot | None = None
        """Snapshot of the present or the last rollback."""
        self._number = 0
        self._lost: Member | None = None
        """Server that was lost last."""

    # Snapshots.

    @property
    def newest(self) -> Snapshot | None:
        """Newest complete snapshot."""
        return self.written[-1] if self.written else None

    @property
    def deadline(self) -> float:
        """Time at which `tick` should run next."""
        if self.way_back is not None:
            return fx.NEVER if self._is_whole else self.way_back.agreement.since + self._patience_s
        if self._making is not None:
            return fx.NEVER if self._making.is_late else self._making.agreement.since + self._late_s
        return self._lock_late_at if self._is_locking else self._next

    @property
    def _is_whole(self) -> bool:
        """Whether no rank of a server is vacant."""
        return len(self._membership.servers) >= self._num_servers

    @property
    def _is_locking(self) -> bool:
        return self._claim is not None and not self._claim.agreement.is_answered

    def tick(self, now: float) -> list[fx.Effect]:
        """Begin a snapshot if it is time, report delays, and end the job if a lost server is not replaced in time."""
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
        store = self._store()
        if not self._membership.awaited or store is None:
            return []
        if self._claim is None or self._claim.failure:
            self._lock_late_at = now + LOCK_LATE_S
            self._claim, effects = self._checkpoints.lock(f"{self._folder}/step-0", store, now, self._locked)
            return effects
        self._newcomers.cut(partial(self._begin, now))
        return []

    def _locked(self, failure: str) -> list[fx.Effect]:
        """Begin the first snapshot at once when the folder is locked; try again later if the lock failed."""
        self._next = self._scheduler.now + (self._again_s if failure else 0.0)
        if not failure:
            return []
        return self._once(failure, f"no snapshots can be written, so the loss of a server ends the job: {failure}")

    @property
    def _late_s(self) -> float:
        return max(self._explain_after_s, INTERVALS_LATE * max(self._again_s, self._took_s))

    def _late(self, making: Snapshot, now: float) -> list[fx.Effect]:
        """Report which process has not done its part; no other snapshot is begun before."""
        making.is_late = True
        silent = sorted(map(str, making.agreement.missing()))
        what = "the scheduler has not written its manifest"
        if silent:
            what = f"not written yet by {', '.join(silent)} (a disk hangs, or a key is not pushed any more)"
        last = (
            "there is none before" if self.newest is None else f"the last complete one is of step {self.newest.version}"
        )
        took = f"{now - making.agreement.since:.0f} s"
        return self._once("late", f"the snapshot of step {making.version} is not complete after {took}: {what}; {last}")

    @property
    def wait(self) -> MemberWait | None:
        """Members for which the rollback waits, and their part; None without a rollback."""
        back = self.way_back
        if back is None:
            return None
        assert self._to is not None
        agreement, which = back.agreement, f"the snapshot of step {self._to.version}"
        nodes = [NodeId(Role.SERVER, rank) for rank in range(self._num_servers)]
        awaited = tuple(node for node in nodes if node not in self._membership.servers)
        deed = f"come back, and read {which}"
        if not awaited:
            awaited = agreement.missing()
            deed = f"drop what they have asked for: all go back to {which}"
        if not awaited and agreement.waits_for is not None:
            awaited = agreement.waits_for.missing()
            deed = f"{'go back to' if back.is_taking else 'read'} {which}"
        if not awaited:
            deed = f"read the manifest of {which}"
        return MemberWait(SCHEDULER_MEMBER, 0, agreement.since, awaited, "", deed)

    def _store(self) -> int | None:
        """Return the store with an optimizer, once it has keys."""
        stores = [store for store in self._keys.optimizers if self._keys.saved(store)]
        return stores[0] if stores else None

    def _begin(self, now: float, version: int) -> list[fx.Effect]:
        """Order the servers, which have promised to make no later version, to take a snapshot of this version."""
        store = self._store()
        if store is None or self.way_back is not None or self._making is not None or self._claim is None:
            return []
        folder, run, servers = f"{self._folder}/step-{version}", self._claim.run, dict(self._membership.servers)
        agreement: Agreement[msg.Save | msg.SavedFile] = Agreement("snapshot", "", now, {}, (servers,))
        parts = (servers, agreement, self._position, self._ended)
        making = self._making = Snapshot(store, -1 - version, *parts, again_s=self._again_s)
        making.keys = self._keys.saved(store)
        what = (making.counter, run, version, KEPT, len(making.keys), msg.SavedFile("", 0, ""), "")
        making.order = msg.Save(0, store, folder, EVERYTHING, *what)
        self._checkpoints.take_snapshot(making)
        if self.leases is not None:
            self.leases.snapshot_begins(version)
        message = msg.TakeSnapshot(store, version, folder, run)
        return [fx.Send(server, message) for server in servers.values()]

    def use_leases(self, leases: Leases) -> None:
        """Record that workers lease examples from now on, perhaps during a snapshot."""
        self.leases = leases
        if self._making is not None and not self._making.is_ending:
            leases.snapshot_begins(self._making.version)

    def snapshot_taken(self, sender: Member, message: msg.SnapshotTaken) -> list[fx.Effect]:
        """Handle the report of a server that has written its part, or has failed."""
        making = self._making
        if making is None or making.folder != message.folder or making.is_ending:
            return []
        for worker in message.trained:
            making.trained[worker.incarnation] = max(making.trained.get(worker.incarnation, 0), worker.examples)
        effects = self._checkpoints.report(making, sender, message)
        if not making.is_written:
            return effects
        useless, self._useless = self._useless, []
        removed = [fx.Persist(None, Sweep(folder, whole=True)) for folder in useless if folder != making.folder]
        return [*removed, *effects]

    def _position(self, making: SaveUnderWay) -> Mapping[str, Any] | None:
        assert isinstance(making, Snapshot)
        try:
            making.data = None if self.leases is None else self.leases.position_at(making.trained)
        except ValueError:
            making.again_s = LOOK_AGAIN_S
            raise
        return making.data

    def _ended(self, making: SaveUnderWay) -> list[fx.Effect]:
        """Handle the end of a snapshot, complete or failed."""
        if self._making is not making:
            return []
        making, self._making, now = self._making, None, self._scheduler.now
        if making.failure:
            self._next = now + making.again_s
            before = "there is none before" if self.newest is None else f"that of step {self.newest.version} stays"
            told = (
                f"the snapshot of step {making.version} was not made, training goes on, and {before}: {making.failure}"
            )
            return self._once(making.failure.replace(making.folder, ""), told) + self._without_any(making)
        self.written = [*self.written, making][-KEPT:]
        self._took_s = now - making.agreement.since
        self._next = now + self._pause_s(self._took_s)
        told = f"snapshots are written again: that of step {making.version} is there"
        logged = [fx.Log(told)] if self._reported else []
        self._reported.clear()
        return [*logged, *self._checkpoints.advance_all()]

    def _without_any(self, making: Snapshot) -> list[fx.Effect]:
        """End the job if the rollback was to a snapshot that could not be completed."""
        if self.way_back is None or self._to is not making:
            return []
        assert self._lost is not None
        cause = "the only snapshot could not be written"
        return self._scheduler.end_job(self._lost, cause, f"{self._lost} was lost, and {cause}")

    def _once(self, cause: str, told: str) -> list[fx.Effect]:
        """Log a failure that may recur at each try, once for each cause."""
        is_new = cause not in self._reported
        self._reported.add(cause)
        return [fx.Log(told)] if is_new else []

    @property
    def _again_s(self) -> float:
        return AGAIN_S if self._interval_s is None else self._interval_s

    def _pause_s(self, took_s: float) -> float:
        """Return the time from a snapshot to the next: J. W. Young, A first order approximation, CACM 1974."""
        if self._interval_s is not None:
            return max(self._interval_s, took_s)
        return max(took_s, math.sqrt(2.0 * took_s * FAILURES_APART_S), LOOK_AGAIN_S)

    def refusal(self, message: msg.Configure) -> str:
        """Return why an optimizer cannot be used with snapshots; '' if it can."""
        optimizers = self._keys.optimizers
        if optimizers and message.store not in optimizers:
            return "snapshots (KVDIST_SNAPSHOTS) cannot bring back a second store with an optimizer: leave one out"
        return ""

    def forget(self) -> None:
        """Forget all snapshots, because a load has replaced the values of the store."""
        if self._making is not None:
            self._checkpoints.drop(self._making)
        self.written, self._making = [], None
        self._none_known = "there is no snapshot since the store was loaded"
        self._next = self._scheduler.now

    # The rollback.

    def obstacle(self) -> str:
        """Return why a rollback is impossible if a server is lost now; '' if it is possible."""
        complete = self._complete()
        if complete is None:
            return self._none_known
        return self._lacks(complete) or ("" if self._membership.members else "no worker is left that could go on")

    def _lacks(self, snapshot: Snapshot) -> str:
        """Return which key is not in a snapshot; '' if all are."""
        kept = {key.key for key in snapshot.keys}
        new = [key.key for store in self._keys.optimizers for key in self._keys.saved(store) if key.key not in kept]
        return f"{name_of(new[0])} was initialised after the last snapshot" if new else ""

    def _complete(self) -> Snapshot | None:
        """Return the newest snapshot, or the first snapshot if its files are complete and its manifest is being
        written."""
        making = self._making
        return making if self.newest is None and making is not None and making.is_written else self.newest

    def begin(self, lost: Member, now: float) -> list[fx.Effect]:
        """Begin the rollback after the loss of a server, which has left the membership: tell all workers to drop their
        calls."""
        self._lost, to = lost, self._complete()
        assert to is not None
        if self._making is not None and self._making is not to:  # of steps that are undone
            if self._making.is_written:  # it takes the place of the oldest
                self._useless.append(self._making.folder)
                self.written = self.written[1 - KEPT :]
            self._making = None
        if self.leases is not None:
            self.leases.roll_back(to.data)
        self._number += 1
        agreement: Agreement[msg.Load | msg.Quiet] = Agreement("", "", now, {}, (self._membership.awaited,))
        what = (to.store, -self._number, to.folder, EVERYTHING, agreement)
        back = self.way_back = LoadUnderWay(*what, self._may_read, self._check, self._loaded)
        self._to = to
        self._newcomers.roll_back()
        message = msg.Rewind(self._number, to.version, f"{lost} was lost: all go back to step {to.version}")
        told = [fx.Send(member, message) for member in self._membership.awaited.values()]
        return [*told, *self._checkpoints.roll_back(back)]

    def _may_read(self) -> bool:
        """Return whether every rank has a live server, and the manifest of the snapshot is written."""
        return self._is_whole and self._making is None

    def ignores(self, sender: Member) -> bool:
        """Return whether a worker does not know of the rollback yet, so that it will drop its calls."""
        return self.way_back is not None and not self.way_back.agreement.has_heard(sender)

    def is_stale(self, sender: Member) -> bool:
        """Return whether a report of a server is about dropped checkpoints, because the server has not gone back
        yet."""
        back = self.way_back
        answers = None if back is None or not back.is_taking else back.agreement.waits_for
        return back is not None and (answers is None or not answers.has_heard(sender))

    def welcome(self, server: Member) -> list[fx.Effect]:
        """Bring a server that replaces a lost server up to date: keys, optimizers and open requests."""
        messages = [*self._keys.told(), *self._questions.unanswered]
        return [fx.Send(server, message) for message in messages]

    def quiet(self, sender: Member, message: msg.Quiet) -> list[fx.Effect]:
        """Handle the message of a worker that has dropped its calls, and has nothing in flight."""
        if self.way_back is None or self.way_back.rollback != message.number:
            return []
        return self._checkpoints.quiet(self.way_back, sender, message)

    def _check(self, back: LoadUnderWay, manifest: Manifest) -> None:
        """Check that a manifest is that of the snapshot; raises a CheckpointError."""
        assert self._to is not None and self._claim is not None
        manifest.require(self._to.keys, self._keys.optimizers[back.store].description, back.contents)
        run, own = manifest.run, self._claim.run
        if run != own:
            raise errors.CheckpointError(
                f"it was written by run {run}, and this is {own}: give each job a folder of its own"
            )

    def _loaded(self, _: LoadUnderWay, failure: str) -> list[fx.Effect]:
        """Handle the end of the load: all servers have gone back, or none has."""
        assert self._to is not None
        if failure:
            return self._without(self._to, failure)
        self.way_back, self._next = None, self._scheduler.now
        self._membership.roll_back(self._to.version)
        self._newcomers.rolled_back()
        return [fx.Log(f"all have gone back to step {self._to.version}, and go on from there")]

    def _without(self, damaged: Snapshot, failure: str) -> list[fx.Effect]:
        """Go back to the previous snapshot, as a snapshot cannot be read."""
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
