"""A server's part in checkpoints: which moment of each slice is saved, while training goes on. Pure.

Every worker marks its pushes: *the checkpoint has my first n pushes of this slice*. A mark leaves before any later push
of its worker, so a server knows it in time. Rules that hold here:

* In synchronous mode all workers are in the same round, so the first mark fixes the moment: the version that has
  exactly those pushes. It is taken before a round is closed that has more; marks of other workers must say the same.
* Otherwise a slice is taken when every live worker has marked it and all marked pushes are counted. Later pushes may
  be in it: nothing is lost, but it is not one moment of the whole store, and the manifest says so.
* A weight is not copied: what is published never changes, so it is leased until it is written. States change in place;
  they are copied, one pass over them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdist.checkpoint.files import FileRecord
from kvdist.checkpoint.manifest import STATES, WEIGHTS
from kvdist.checkpoint.slices import SavedSlice
from kvdist.checkpoint.works import WriteShard
from kvdist.core.effects import Effect, Persist, Persisted, Send
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.shard import Buffer, Shard
from kvdist.kernels.interface import Kernels
from kvdist.nodes import Member
from kvdist.optimizer.states import SliceState
from kvdist.optimizer.updater import Updater
from kvdist.protocol.messages import U32
from kvdist.protocol.saving import Discard, Mark, Saved, SavedFile

NO_FILE = SavedFile("", 0, "")


@dataclass(slots=True, eq=False)
class Cut:
    """One checkpoint under way."""

    store: int
    counter: int
    folder: str
    contents: tuple[str, ...]
    marks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Slice that is not taken yet → rank → its mark."""
    taken: dict[int, SavedSlice] = field(default_factory=dict)
    counted: dict[int, dict[int, int]] = field(default_factory=dict)
    """Slice → rank → how many of its pushes are in what was taken; for slices of exact checkpoints."""
    leased: list[Buffer] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    """Ranks that have marked all their slices."""
    is_writing: bool = False
    file: SavedFile | None = None
    failure: str = ""

    def release(self) -> None:
        """What was taken is not needed any more."""
        for buffer in self.leased:
            buffer.leases -= 1
        self.leased.clear()
        self.taken.clear()


class Cuts:
    """All checkpoints that are under way on a server.

    Args:
        kernels: what widens weights, for the states of slices that were never updated.
    """

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._cuts: dict[tuple[int, int], Cut] = {}
        self.awaited: dict[int, list[Cut]] = {}
        """Slice → the cuts that wait for it. Empty nearly always: asked whenever a round is closed."""
        self._ready: list[Cut] = []

    def mark(self, sender: Member, message: Mark, shards: Mapping[int, Shard], name: str) -> list[Shard]:
        """A worker says which of its pushes belong to a checkpoint; returns the slices to look at."""
        cut = self._cuts.get((message.store, message.counter))
        if cut is None:
            cut = Cut(message.store, message.counter, message.folder, message.contents)
            self._cuts[message.store, message.counter] = cut
        if cut.folder != message.folder:
            cut.failure = f"the workers save to {cut.folder} and, {sender}, to {message.folder}"
        found = []
        rank = sender.node.rank
        for number, step in zip(message.ids.tolist(), message.steps.tolist(), strict=True):
            shard = shards.get(number)
            if shard is None:
                cut.failure = f"slice {number} is not kept by {name}"
            elif number in cut.counted:
                self._compare(cut, shard, sender, step)
            elif number not in cut.taken and not cut.is_writing:
                if number not in cut.marks:
                    self.awaited.setdefault(number, []).append(cut)
                cut.marks.setdefault(number, {})[rank] = step
                found.append(shard)
        if message.last:
            cut.marked.add(rank)
            self._ready.append(cut)
        return found

    def awaits(self, ids: U32) -> bool:
        """Whether any of these slices is still to be taken, one by one."""
        return bool(self.awaited) and any(number in self.awaited for number in ids.tolist())

    def look(self, shard: Shard, updater: Updater | None, workers: Mapping[int, Member]) -> None:
        """Take the slice for every checkpoint whose moment this is. Called when its counters have changed."""
        for cut in list(self.awaited.get(shard.number, ())):
            marks = cut.marks[shard.number]
            is_exact = shard.policy.close is None
            if shard.published is None or not _is_due(shard, marks, workers, is_exact):
                continue
            late = [rank for rank, step in marks.items() if is_exact and shard.counted.get(rank, 0) != step]
            if late:
                cut.failure = cut.failure or _disagreement(shard, late[0], marks[late[0]], shard.counted)
            self._take(cut, shard, updater, is_exact)

    def roster(self, workers: Mapping[int, Member]) -> None:
        """Who has left marks nothing any more."""
        self._ready += self._cuts.values()

    def discard(self, message: Discard) -> None:
        """The checkpoint has failed elsewhere."""
        cut = self._cuts.pop((message.store, message.counter), None)
        if cut is not None:
            self._forget(cut)
            if not cut.is_writing or cut.file is not None:
                cut.release()

    def take_effects(self, workers: Mapping[int, Member], name: str) -> list[Effect]:
        """What has to be written or said now."""
        if not self._ready:
            return []
        effects: list[Effect] = []
        ready, self._ready = self._ready, []
        for cut in dict.fromkeys(ready):
            if (cut.store, cut.counter) in self._cuts:
                effects += self._advance(cut, workers, name)
        return effects

    def persisted(self, event: Persisted, workers: Mapping[int, Member], name: str) -> list[Effect]:
        """A file is written, or could not be."""
        cut = event.token
        assert isinstance(cut, Cut)
        cut.release()
        cut.failure = cut.failure or event.failure
        made = event.product
        cut.file = SavedFile(made.name, made.nbytes, made.sha256) if isinstance(made, FileRecord) else NO_FILE
        self._ready.append(cut)
        return self.take_effects(workers, name)

    def validate(self) -> None:
        """Check every invariant."""
        for number, cuts in self.awaited.items():
            assert cuts, "who waits for nothing is not listed"
            assert all(number in cut.marks and number not in cut.taken for cut in cuts), "what is awaited is not taken"

    def _advance(self, cut: Cut, workers: Mapping[int, Member], name: str) -> list[Effect]:
        if cut.failure:
            self._forget(cut)
            if not cut.is_writing:
                cut.release()
            if cut.file is None and cut.is_writing:
                return []  # its file is removed when it is there
            return [self._report(cut, cut.file or NO_FILE)]
        if cut.file is not None:
            return [self._report(cut, cut.file)] if workers.keys() <= cut.marked else []
        if cut.marks or not cut.marked or cut.is_writing:
            return []
        cut.is_writing = True
        return [Persist(cut, WriteShard(cut.folder, name, tuple(cut.taken.values())))]

    def _report(self, cut: Cut, file: SavedFile) -> Effect:
        del self._cuts[cut.store, cut.counter]
        return Send(SCHEDULER_MEMBER, Saved(cut.store, cut.counter, file, cut.failure))

    def _forget(self, cut: Cut) -> None:
        """Wait for no slice any more."""
        for number in cut.marks:
            self._stop_awaiting(number, cut)
        cut.marks.clear()

    def _stop_awaiting(self, number: int, cut: Cut) -> None:
        cuts = self.awaited[number]
        cuts.remove(cut)
        if not cuts:
            del self.awaited[number]

    def _take(self, cut: Cut, shard: Shard, updater: Updater | None, is_exact: bool) -> None:
        buffer = shard.published
        assert buffer is not None
        state = self._state(cut, shard, updater)
        names = updater.optimizer.state_names if updater is not None and state is not None else ()
        weight = None
        if WEIGHTS in cut.contents:
            buffer.leases += 1
            cut.leased.append(buffer)
            weight = buffer.array
        cut.taken[shard.number] = SavedSlice(
            shard.key,
            shard.extent.start,
            shard.count,
            shard.dtype,
            shard.version,
            weight,
            {} if state is None else dict(zip(names, state.arrays, strict=True)),
            0 if state is None else state.count,
            () if state is None else state.scalars,
            None if state is None else state.master,
        )
        if is_exact:
            cut.counted[shard.number] = dict(shard.counted)
        del cut.marks[shard.number]
        self._stop_awaiting(shard.number, cut)
        self._ready.append(cut)

    def _state(self, cut: Cut, shard: Shard, updater: Updater | None) -> SliceState | None:
        """A copy of what the optimizer remembers of the slice; a fresh one if it was never updated."""
        if updater is None or STATES not in cut.contents:
            return None
        present = updater.states.get(shard.number)
        if present is not None:
            return present.copy()
        assert shard.published is not None
        return SliceState.fresh(updater.optimizer, shard.published.array, shard.dtype, shard.extent, self._kernels)

    def _compare(self, cut: Cut, shard: Shard, sender: Member, step: int) -> None:
        counted = cut.counted[shard.number]
        if counted.get(sender.node.rank, 0) != step:
            cut.failure = cut.failure or _disagreement(shard, sender.node.rank, step, counted)


def _is_due(shard: Shard, marks: Mapping[int, int], workers: Mapping[int, Member], is_exact: bool) -> bool:
    if is_exact:
        return any(shard.counted.get(rank, 0) >= step for rank, step in marks.items())
    return workers.keys() <= marks.keys() and all(shard.counted.get(rank, 0) >= step for rank, step in marks.items())


def _disagreement(shard: Shard, rank: int, step: int, counted: Mapping[int, int]) -> str:
    return (
        f"worker-{rank} called save_checkpoint after {step} pushes of key {shard.key!r}, where the checkpoint of the"
        f" other workers has {counted.get(rank, 0)}: every worker must call it at the same step"
    )
