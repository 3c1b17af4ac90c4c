"""A server's part in checkpoints: the moment of each slice that is saved while training goes on, and restoring. Pure.

Every worker marks its pushes: *the checkpoint has my first n pushes of this slice*. A mark leaves before any later push
of its worker, so it reaches a server in time. Invariants:

* In synchronous mode the first mark fixes the moment: the version with exactly the marked pushes, taken before a round
  with more is closed. The marks of other workers must agree.
* In other modes a slice is taken when every live worker has marked it and all marked pushes are counted. It may have
  later pushes: nothing is lost, but slices have different moments, and the manifest records this.
* A weight is leased, not copied, until it is written. States and rows change in place, so they are copied in one pass.
* Every worker marks at every server, and every server reports once: when all live workers have marked and its file is
  written, or after a failure. A worker may push through the leader of its host: the leader's mark is in time.
* Every server reads a restored store first, and replaces its values when all servers have read.
* Snapshots that servers write by themselves have no marks: the scheduler sends the version of each slice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Protocol

from kvdist.checkpoint.snapshot import (
    EVERYTHING,
    WEIGHTS,
    CheckFolder,
    FileRecord,
    ReadShards,
    SliceImage,
    WantedSlice,
    WriteShard,
)
from kvdist.core import machine as fx
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.round import Round
from kvdist.core.server.buffers import Buffer
from kvdist.core.server.holder import Holder
from kvdist.core.server.peers import Peers
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.protocol import messages as msg


class CheckpointSource(Protocol):
    """Slices of a server that can be saved and restored."""

    def holder(self, number: int) -> Holder | None:
        """Return the holder of a slice; None if the server does not keep it."""

    def key_of(self, number: int) -> int | str:
        """Return the key of a slice."""

    def images_of(self, numbers: Sequence[int], contents: Sequence[str]) -> tuple[list[SliceImage], Buffer | None]:
        """Return the present values of slices, in memory that does not change; and the buffer leased for it, if any.

        Args:
            numbers: slices of a single holder that has a value.
            contents: parts to copy: `WEIGHTS`, `STATES`.

        Raises:
            MemoryError: a copy has no room; nothing has changed.
        """

    def wanted(self, store: int) -> list[WantedSlice]:
        """Return the slices of a store that a checkpoint must have to be restored."""

    def restore(self, store: int, found: Sequence[SliceImage]) -> None:
        """Replace the slices of a store by those read from a checkpoint."""


NO_FILE = msg.SavedFile("", 0, "")


@dataclass(slots=True, eq=False)
class ServerCheckpoint:
    """A checkpoint under way on a server."""

    store: int
    counter: int
    folder: str
    contents: tuple[str, ...]
    run: str
    step: int
    marks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Slice that is not taken yet → rank → mark of the worker."""
    taken: dict[int, SliceImage] = field(default_factory=dict)
    """Slice → its copy, until it is written."""
    versions: dict[int, int] = field(default_factory=dict)
    """Slice of a synchronous store → version that was taken."""
    trained: dict[int, int] = field(default_factory=dict)
    """Incarnation of a worker → examples of its pushes in the taken slices, the most of any slice; only for snapshots
    that servers write by themselves."""
    leased: list[Buffer] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    """Ranks that have marked all their slices."""
    pushes: int = 0
    """Pushes of its workers before the checkpoint: workers that joined later in the program take no part."""
    at: Mapping[int, int] | None = None
    """Slice → version at which it is taken, for snapshots without marks."""
    is_begun: bool = False
    """Whether its file has been begun, or it has failed: it takes no more slices."""
    is_writing: bool = False
    file: msg.SavedFile = NO_FILE
    failure: str = ""

    def fail(self, reason: str) -> None:
        """Fail the checkpoint for a reason; the first reason counts."""
        self.failure = self.failure or reason

    def release(self) -> None:
        """Release the leased buffers and drop the copies."""
        for buffer in self.leased:
            buffer.leases -= 1
        self.leased.clear()
        self.taken.clear()


class ServerCheckpoints:
    """All checkpoints under way on a server.

    Args:
        peers: live members.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._source: CheckpointSource
        self._open: dict[tuple[int, int], ServerCheckpoint] = {}
        self.awaited: dict[int, list[ServerCheckpoint]] = {}
        """Slice → checkpoints that wait for it. Empty nearly always: checked whenever a round is closed."""
        self.ready: dict[ServerCheckpoint, None] = {}
        """Checkpoints for `take_effects` to continue, once each. Empty nearly always."""

    def attach(self, source: CheckpointSource) -> None:
        """Use this source of slices; to be called before anything else."""
        self._source = source

    def mark(self, sender: Member, message: msg.MarkPushes) -> None:
        """Record which pushes of a worker belong to a checkpoint, and take the slices that are due."""
        checkpoint = self._open.get((message.store, message.counter))
        if checkpoint is None:
            where = (message.folder, message.contents, message.run, message.step)
            checkpoint = ServerCheckpoint(message.store, message.counter, *where)
            checkpoint.pushes = message.pushes
            self._open[message.store, message.counter] = checkpoint
        if not message.contents:
            checkpoint.fail(f"{sender} cannot take part")
        elif (checkpoint.folder, checkpoint.contents) != (message.folder, message.contents):
            ours, theirs = (f"{' and '.join(one.contents)} to {one.folder}" for one in (checkpoint, message))
            checkpoint.fail(f"the workers do not agree: some save {ours}, {sender} saves {theirs}")
        rank = sender.node.rank
        found = [] if checkpoint.failure else self._enter(checkpoint, message, rank)
        if message.last:
            checkpoint.marked.add(rank)
            _require_alike(checkpoint, self._awaited(checkpoint))
        self.ready[checkpoint] = None
        self.look(found, rank)

    def take_at(self, message: msg.TakeSnapshot, versions: Mapping[int, int]) -> None:
        """Take each slice at its version, for a checkpoint that servers write by themselves.

        Args:
            message: the scheduler's message, with store, folder and run.
            versions: slice → its version, which is the present or a later version.
        """
        counter = -1 - message.version  # checkpoints of workers are numbered from 0
        earlier = self._open.pop((message.store, counter), None)
        if earlier is not None:  # the scheduler has dropped it, as the store was loaded
            self._forget(earlier)
            self.ready.pop(earlier, None)
        where = (message.folder, EVERYTHING, message.run, message.version)
        checkpoint = ServerCheckpoint(message.store, counter, *where, at=versions)
        self._open[message.store, counter] = checkpoint
        for number in versions:
            self.awaited.setdefault(number, []).append(checkpoint)
            checkpoint.marks[number] = {}
        self.ready[checkpoint] = None
        self.look(list(versions))

    def clear(self) -> None:
        """Drop all checkpoints under way, without a report: the scheduler knows."""
        for checkpoint in self._open.values():
            self._forget(checkpoint)
        self._open.clear()
        self.ready.clear()

    def look(self, numbers: Sequence[int], marked_by: int | None = None) -> None:
        """Take the slices that are due, for every checkpoint that awaits them.

        Args:
            numbers: slices whose counters have changed, or that a worker has marked.
            marked_by: rank of that worker. Marks of others were checked when they came.
        """
        due: dict[tuple[int, int], list[int]] = {}
        checkpoints: dict[int, ServerCheckpoint] = {}
        for number in dict.fromkeys(numbers):
            for checkpoint in self.awaited.get(number, ()):
                holder = self._found(number)
                round_, marks = holder.round, checkpoint.marks[number]
                is_exact = round_.policy.is_lockstep
                if checkpoint.at is not None:
                    is_due = round_.version >= checkpoint.at[number]
                else:
                    looked_at = marks
                    if is_exact and marked_by is not None:
                        looked_at = {rank: marks[rank] for rank in marks.keys() & {marked_by}}
                    workers = self._peers.awaited if is_exact else self._awaited(checkpoint)
                    is_due = _is_due(round_, looked_at, workers, is_exact)
                if not holder.has_value or not is_due:
                    continue
                late = [rank for rank, step in marks.items() if is_exact and round_.counted.get(rank, 0) != step]
                if late:
                    step_then = round_.counted.get(late[0], 0)
                    checkpoint.fail(_disagreement(self._source.key_of(number), late[0], marks[late[0]], step_then))
                due.setdefault((id(checkpoint), id(holder)), []).append(number)
                checkpoints[id(checkpoint)] = checkpoint
        for (which, _), some in due.items():
            self._copy(checkpoints[which], some)

    def unmark(self, lost: Set[int]) -> None:
        """Drop the marks of lost workers, as the marked pushes may never be counted."""
        for checkpoint in self.called_for:
            checkpoint.marked -= lost  # or slices that only it had marked would count as all slices
            for number, marks in list(checkpoint.marks.items()):
                for rank in lost & marks.keys():
                    del marks[rank]
                if not marks:
                    del checkpoint.marks[number]
                    self._stop_awaiting(number, checkpoint)

    def _awaited(self, checkpoint: ServerCheckpoint) -> Set[int]:
        """Return the ranks that must mark."""
        return self._peers.awaited - {rank for rank, since in self._peers.since.items() if since >= checkpoint.pushes}

    def roster(self) -> None:
        """Continue without departed workers. Called when the rounds that waited for them are closed."""
        self.look(list(self.awaited))
        for checkpoint in self.called_for:
            _require_alike(checkpoint, self._awaited(checkpoint))
            self.ready[checkpoint] = None

    @property
    def called_for(self) -> list[ServerCheckpoint]:
        """Checkpoints that workers have called for."""
        return [checkpoint for checkpoint in self._open.values() if checkpoint.at is None]

    def take_effects(self) -> list[fx.Effect]:
        """Return the effects that write or report checkpoints now."""
        ready, self.ready = self.ready, {}
        return [effect for checkpoint in ready for effect in self._advance(checkpoint)]

    def persisted(self, event: fx.Persisted) -> list[fx.Effect]:
        """Handle the end of a write, complete or failed."""
        checkpoint = event.token
        assert isinstance(checkpoint, ServerCheckpoint)
        checkpoint.is_writing = False
        checkpoint.release()
        if self._open.get((checkpoint.store, checkpoint.counter)) is not checkpoint:
            return []  # the checkpoint was dropped meanwhile
        if event.failure:
            checkpoint.fail(event.failure)
        made = event.product
        checkpoint.file = (
            msg.SavedFile(made.name, made.nbytes, made.sha256) if isinstance(made, FileRecord) else NO_FILE
        )
        return self._advance(checkpoint)

    def validate(self) -> None:
        """Check every invariant."""
        assert not self.ready, "what can go on has gone on"
        for number, waiting in self.awaited.items():
            assert waiting, "slices that no checkpoint waits for are not listed"
            assert all(number in one.marks and number not in one.taken for one in waiting), (
                "what is awaited is not taken"
            )
        for which, one in self._open.items():
            assert which == (one.store, one.counter), "a checkpoint is known by its store and count"
            assert all(one in self.awaited[number] for number in one.marks), "every awaited slice is listed"
            assert len(one.leased) <= len(one.taken), "what is leased is to be written"
            assert not one.failure or one.is_writing or not (one.marks or one.taken), "what has failed keeps nothing"
            waits = one.is_writing or one.marks or (one.at is None and not self._awaited(one) <= one.marked)
            assert waits, "what is complete is reported"

    def _found(self, number: int) -> Holder:
        holder = self._source.holder(number)
        assert holder is not None, "an awaited slice is kept by this server"
        return holder

    def _enter(self, checkpoint: ServerCheckpoint, message: msg.MarkPushes, rank: int) -> list[int]:
        """Record the marks of a message. Returns the slices that are not taken yet."""
        found = []
        for number, step in zip(message.ids.tolist(), message.steps.tolist(), strict=True):
            holder = self._source.holder(number)
            if holder is None:
                checkpoint.fail(f"slice {number} is not kept by {self._peers.name}")
                continue
            if number in checkpoint.versions:
                # Each round since then had a push of every live worker.
                step_then = holder.round.counted.get(rank, 0) - (holder.round.version - checkpoint.versions[number])
                if step_then != step:
                    checkpoint.fail(_disagreement(self._source.key_of(number), rank, step, step_then))
            elif not checkpoint.is_begun:  # else other workers do not know the key, which the scheduler notices
                if number not in checkpoint.marks:
                    self.awaited.setdefault(number, []).append(checkpoint)
                checkpoint.marks.setdefault(number, {})[rank] = step
                found.append(number)
        return found

    def _advance(self, checkpoint: ServerCheckpoint) -> list[fx.Effect]:
        if checkpoint.is_writing:
            return []
        if checkpoint.failure:
            self._forget(checkpoint)
        elif checkpoint.marks:
            return []
        elif checkpoint.taken and (checkpoint.marked or checkpoint.at is not None):
            checkpoint.is_begun = checkpoint.is_writing = True
            slices = tuple(checkpoint.taken.values())
            return [
                fx.Persist(
                    checkpoint, WriteShard(checkpoint.folder, self._peers.name, slices, checkpoint.run, checkpoint.step)
                )
            ]
        if checkpoint.at is None and not self._awaited(checkpoint) <= checkpoint.marked:
            return []
        del self._open[checkpoint.store, checkpoint.counter]
        if checkpoint.at is not None:
            return [fx.Send(SCHEDULER_MEMBER, _taken(checkpoint))]
        file = NO_FILE if checkpoint.failure else checkpoint.file
        return [fx.Send(SCHEDULER_MEMBER, msg.Saved(checkpoint.store, checkpoint.counter, file, checkpoint.failure))]

    def _forget(self, checkpoint: ServerCheckpoint) -> None:
        """Drop the marks and copies of a checkpoint, and take no more slices."""
        checkpoint.is_begun = True
        for number in checkpoint.marks:
            self._stop_awaiting(number, checkpoint)
        checkpoint.marks.clear()
        checkpoint.release()

    def _stop_awaiting(self, number: int, checkpoint: ServerCheckpoint) -> None:
        checkpoints = self.awaited[number]
        checkpoints.remove(checkpoint)
        if not checkpoints:
            del self.awaited[number]

    def _copy(self, checkpoint: ServerCheckpoint, numbers: Sequence[int]) -> None:
        """Copy slices of a single holder for a checkpoint."""
        holder = self._found(numbers[0])
        if not checkpoint.failure:
            try:
                saved, leased = self._source.images_of(numbers, checkpoint.contents)
            except MemoryError:
                key = self._source.key_of(numbers[0])
                checkpoint.fail(f"no memory for the copy of {name_of(key)} that a checkpoint needs: use more servers")
            else:
                checkpoint.taken.update(zip(numbers, saved, strict=True))
                checkpoint.leased += [] if leased is None else [leased]
        for number in numbers:
            if holder.round.policy.is_lockstep:
                checkpoint.versions[number] = holder.round.version
            del checkpoint.marks[number]
            self._stop_awaiting(number, checkpoint)
        if checkpoint.at is not None:
            self._note_trained(checkpoint, holder.round.examples)
        self.ready[checkpoint] = None

    def _note_trained(self, checkpoint: ServerCheckpoint, examples: Mapping[int, int]) -> None:
        """Record the examples in a taken slice. `Seen` has reported those of lost workers before."""
        for worker in (*self._peers.workers.values(), *self._peers.left):
            used = max(checkpoint.trained.get(worker.incarnation, 0), examples.get(worker.node.rank, 0))
            checkpoint.trained[worker.incarnation] = used


def _taken(checkpoint: ServerCheckpoint) -> msg.SnapshotTaken:
    file = NO_FILE if checkpoint.failure else checkpoint.file
    trained = tuple(msg.Trained(worker, examples) for worker, examples in checkpoint.trained.items())
    return msg.SnapshotTaken(checkpoint.folder, file, checkpoint.failure, trained)


def _is_due(round_: Round, marks: Mapping[int, int], workers: Set[int], is_exact: bool) -> bool:
    if is_exact:
        return any(round_.counted.get(rank, 0) >= step for rank, step in marks.items())
    return workers <= marks.keys() and all(round_.counted.get(rank, 0) >= step for rank, step in marks.items())


def _require_alike(checkpoint: ServerCheckpoint, workers: Set[int]) -> None:
    """Fail a checkpoint if all workers have marked, but not every awaited slice; else it would wait for ever."""
    if not workers <= checkpoint.marked:
        return
    for number, marks in checkpoint.marks.items():
        if not workers <= marks.keys():
            ranks = ", ".join(f"worker-{rank}" for rank in sorted(workers - marks.keys()))
            checkpoint.fail(
                f"{ranks} did not know slice {number} yet, which other workers save:"
                " call save_checkpoint when every init has returned"
            )
            return


def _disagreement(key: int | str, rank: int, step: int, step_then: int) -> str:
    return (
        f"worker-{rank} called save_checkpoint after {step} pushes of {name_of(key)}, where the checkpoint of the"
        f" other workers has {step_then}: every worker must call it at the same step"
    )


class Restoring:
    """Slices that were read from a checkpoint, until the scheduler reports that every server has read.

    Args:
        sources: the slices of this server.
    """

    def __init__(self, sources: Sequence[CheckpointSource]) -> None:
        self._sources = sources
        self._read: dict[int, Sequence[SliceImage]] = {}
        """Store → slices that were read."""

    def prepare(self, message: msg.Prepare, name: str) -> list[fx.Effect]:
        """Check that the slices of a store can be written, to files called `name`."""
        wanted = [one for source in self._sources for one in source.wanted(message.store)]
        whole = [one.count * one.dtype.itemsize for one in wanted if not one.lazy_row]
        nbytes = sum(whole) if WEIGHTS in message.contents else 0  # without states and lazy rows
        return [fx.Persist(message, CheckFolder(message.folder, name, message.run, nbytes))]

    def read(self, message: msg.Restore) -> list[fx.Effect]:
        """Begin to read the slices of a store."""
        wanted = tuple(one for source in self._sources for one in source.wanted(message.store))
        if not wanted:
            return [fx.Send(SCHEDULER_MEMBER, msg.Done(message.request))]
        return [fx.Persist(message, ReadShards(message.folder, wanted, message.contents))]

    def persisted(self, event: fx.Persisted) -> list[fx.Effect]:
        """Answer the scheduler after a check or a read of the disk, complete or failed."""
        message = event.token
        assert isinstance(message, msg.Restore | msg.Prepare)
        if event.failure:
            return [fx.Send(SCHEDULER_MEMBER, msg.Failed(message.request, msg.ErrorCode.CHECKPOINT, event.failure))]
        if isinstance(message, msg.Prepare):
            return [fx.Send(SCHEDULER_MEMBER, msg.Done(message.request))]
        assert isinstance(event.product, tuple)
        self._read[message.store] = event.product
        return [fx.Send(SCHEDULER_MEMBER, msg.Done(message.request))]

    def pop_read(self, store: int) -> Sequence[SliceImage]:
        """Remove all slices that were read, and return those of a store."""
        read, self._read = self._read, {}
        return read.get(store, ())

    def end(self, message: msg.TakeRestored | msg.DropRestored) -> list[fx.Effect]:
        """Take over the slices that were read, or drop them because a server could not read."""
        read = self._read.pop(message.store, ())
        for source in self._sources if isinstance(message, msg.TakeRestored) else ():
            source.restore(message.store, [one for one in read if source.holder(one.number) is not None])
        return [fx.Send(SCHEDULER_MEMBER, msg.Done(message.request))]
