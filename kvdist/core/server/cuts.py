"""A server's part in checkpoints: which moment of each slice is saved, while training goes on. Pure.

Every worker marks its pushes: *the checkpoint has my first n pushes of this slice*. A mark leaves before any later push
of its worker, so a server knows it in time. Rules that hold here:

* In synchronous mode all workers are in the same round, so the first mark fixes the moment: the version that has
  exactly those pushes. It is taken before a round is closed that has more; marks of other workers must say the same.
  Who pushes through the leader of its host may be overtaken by its own push, but the leader's mark is in time then.
* Otherwise a slice is taken when every live worker has marked it and all marked pushes are counted. Later pushes may
  be in it: nothing is lost, but it is not one moment of the whole store, and the manifest says so.
* A weight is not copied: what is published never changes, so it is leased until it is written. States change in place,
  and so do rows of tables; they are copied, one pass over them.
* Every worker marks at every server, be it no slice, and every server reports once: when all live workers have marked
  and its file is written, or something has failed. So nobody has to be told to stop, and nothing is left over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kvdist.checkpoint.snapshot import FileRecord, SavedSlice, WriteShard
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import Effect, Persist, Persisted, Send
from kvdist.core.server.buffers import Buffer
from kvdist.core.server.keeping import Keeper, Kept
from kvdist.nodes import Member
from kvdist.protocol.messages import MarkPushes, Saved, SavedFile

NO_FILE = SavedFile("", 0, "")


@dataclass(slots=True, eq=False)
class Cut:
    """One checkpoint under way."""

    store: int
    counter: int
    folder: str
    contents: tuple[str, ...]
    run: str
    step: int
    marks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Slice that is not taken yet → rank → its mark."""
    taken: dict[int, SavedSlice] = field(default_factory=dict)
    """What is not written yet."""
    versions: dict[int, int] = field(default_factory=dict)
    """Slice of a synchronous store → its version that was taken."""
    leased: list[Buffer] = field(default_factory=list)
    marked: set[int] = field(default_factory=set)
    """Ranks that have marked all their slices."""
    is_begun: bool = False
    """Its file is being written, or is there: it takes no more slices."""
    is_writing: bool = False
    file: SavedFile = NO_FILE
    failure: str = ""

    def fail(self, reason: str) -> None:
        """Note why it cannot be made; the first reason counts."""
        self.failure = self.failure or reason

    def release(self) -> None:
        """What was taken is not needed any more."""
        for buffer in self.leased:
            buffer.leases -= 1
        self.leased.clear()
        self.taken.clear()


class Cuts:
    """All checkpoints that are under way on a server."""

    def __init__(self) -> None:
        self._keepers: list[Keeper] = []
        self._cuts: dict[tuple[int, int], Cut] = {}
        self.awaited: dict[int, list[Cut]] = {}
        """Slice → the cuts that wait for it. Empty nearly always: asked whenever a round is closed."""
        self.ready: dict[Cut, None] = {}
        """The cuts to be looked at by `take_effects`, once each. Empty nearly always."""

    def __len__(self) -> int:
        """How many there are."""
        return len(self._cuts)

    def add(self, keeper: Keeper) -> None:
        """The slices that it keeps are saved, too."""
        self._keepers.append(keeper)

    def mark(self, sender: Member, message: MarkPushes, workers: Mapping[int, Member], name: str) -> None:
        """A worker says which of its pushes belong to a checkpoint; perhaps this is the moment for some slices."""
        cut = self._cuts.get((message.store, message.counter))
        if cut is None:
            where = (message.folder, message.contents, message.run, message.step)
            cut = self._cuts[message.store, message.counter] = Cut(message.store, message.counter, *where)
        if not message.contents:
            cut.fail(f"{sender} cannot take part")
        elif (cut.folder, cut.contents) != (message.folder, message.contents):
            ours, theirs = (f"{' and '.join(one.contents)} to {one.folder}" for one in (cut, message))
            cut.fail(f"the workers do not agree: some save {ours}, {sender} saves {theirs}")
        rank = sender.node.rank
        found = [] if cut.failure else self._enter(cut, message, rank, name)
        if message.last:
            cut.marked.add(rank)
            _require_alike(cut, workers)
        self.ready[cut] = None
        self.look(found, workers)

    def look(self, numbers: Sequence[int], workers: Mapping[int, Member]) -> None:
        """Take those of these slices whose moment this is, for every checkpoint that awaits them.

        Called when their counters have changed.
        """
        due: dict[tuple[int, int], list[Kept]] = {}
        cuts: dict[int, Cut] = {}
        for number in dict.fromkeys(numbers):
            for cut in self.awaited.get(number, ()):
                kept = self._kept(number)
                marks = cut.marks[number]
                is_exact = kept.policy.close is None
                if not kept.has_value or not _is_due(kept, marks, workers, is_exact):
                    continue
                late = [rank for rank, step in marks.items() if is_exact and kept.counted.get(rank, 0) != step]
                if late:
                    cut.fail(_disagreement(kept, late[0], marks[late[0]], kept.counted.get(late[0], 0)))
                due.setdefault((id(cut), id(kept.owner)), []).append(kept)
                cuts[id(cut)] = cut
        for (number, _), some in due.items():
            self._take(cuts[number], some)

    def roster(self, workers: Mapping[int, Member]) -> None:
        """Who has left marks nothing any more. Called when the rounds that waited for them are closed."""
        self.look(list(self.awaited), workers)
        for cut in self._cuts.values():
            _require_alike(cut, workers)
            self.ready[cut] = None

    def take_effects(self, workers: Mapping[int, Member], name: str) -> list[Effect]:
        """What has to be written or said now."""
        ready, self.ready = self.ready, {}
        return [effect for cut in ready for effect in self._advance(cut, workers, name)]

    def persisted(self, event: Persisted, workers: Mapping[int, Member], name: str) -> list[Effect]:
        """A file is written, or could not be."""
        cut = event.token
        assert isinstance(cut, Cut)
        cut.is_writing = False
        cut.release()
        if event.failure:
            cut.fail(event.failure)
        made = event.product
        cut.file = SavedFile(made.name, made.nbytes, made.sha256) if isinstance(made, FileRecord) else NO_FILE
        return self._advance(cut, workers, name)

    def validate(self, workers: Mapping[int, Member]) -> None:
        """Check every invariant."""
        assert not self.ready, "what can go on has gone on"
        for number, cuts in self.awaited.items():
            assert cuts, "who waits for nothing is not listed"
            assert all(number in cut.marks and number not in cut.taken for cut in cuts), "what is awaited is not taken"
        for place, cut in self._cuts.items():
            assert place == (cut.store, cut.counter), "a checkpoint is known by its store and count"
            assert all(cut in self.awaited[number] for number in cut.marks), "whoever waits is listed"
            assert len(cut.leased) <= len(cut.taken), "what is leased is to be written"
            assert not cut.failure or cut.is_writing or not (cut.marks or cut.taken), "what has failed keeps nothing"
            waits = cut.is_writing or cut.marks or not workers.keys() <= cut.marked
            assert waits, "what is complete is reported"

    def _keeper_of(self, number: int) -> Keeper | None:
        """Who keeps the slice, if it is here."""
        return next((keeper for keeper in self._keepers if keeper.keeps(number)), None)

    def _kept(self, number: int) -> Kept:
        keeper = self._keeper_of(number)
        assert keeper is not None, "what is awaited is here"
        return keeper.kept(number)

    def _enter(self, cut: Cut, message: MarkPushes, rank: int, name: str) -> list[int]:
        """Note the marks of a message; returns the slices that are not taken yet."""
        found = []
        for number, step in zip(message.ids.tolist(), message.steps.tolist(), strict=True):
            keeper = self._keeper_of(number)
            if keeper is None:
                cut.fail(f"slice {number} is not kept by {name}")
                continue
            if number in cut.versions:
                kept = keeper.kept(number)
                # Each round since then had a push of every live worker.
                step_then = kept.counted.get(rank, 0) - (kept.version - cut.versions[number])
                if step_then != step:
                    cut.fail(_disagreement(kept, rank, step, step_then))
            elif not cut.is_begun:  # else it is of a key that others do not know: the scheduler finds that out
                if number not in cut.marks:
                    self.awaited.setdefault(number, []).append(cut)
                cut.marks.setdefault(number, {})[rank] = step
                found.append(number)
        return found

    def _advance(self, cut: Cut, workers: Mapping[int, Member], name: str) -> list[Effect]:
        if cut.is_writing:
            return []
        if cut.failure:
            self._forget(cut)
        elif cut.marks:
            return []
        elif cut.taken and cut.marked:
            cut.is_begun = cut.is_writing = True
            return [Persist(cut, WriteShard(cut.folder, name, tuple(cut.taken.values()), cut.run, cut.step))]
        if not workers.keys() <= cut.marked:
            return []
        del self._cuts[cut.store, cut.counter]
        file = NO_FILE if cut.failure else cut.file
        return [Send(SCHEDULER_MEMBER, Saved(cut.store, cut.counter, file, cut.failure))]

    def _forget(self, cut: Cut) -> None:
        """It has failed: wait for no slice any more, and keep none."""
        cut.is_begun = True
        for number in cut.marks:
            self._stop_awaiting(number, cut)
        cut.marks.clear()
        cut.release()

    def _stop_awaiting(self, number: int, cut: Cut) -> None:
        cuts = self.awaited[number]
        cuts.remove(cut)
        if not cuts:
            del self.awaited[number]

    def _take(self, cut: Cut, some: Sequence[Kept]) -> None:
        """Take slices of one owner."""
        numbers = [kept.number for kept in some]
        keeper = self._keeper_of(numbers[0])
        if keeper is not None and not cut.failure:
            try:
                saved, leased = keeper.taken(numbers, cut.contents)
            except MemoryError:
                cut.fail(f"there is no memory for a copy of what is saved of key {some[0].key!r}: use more servers")
            else:
                cut.taken.update(zip(numbers, saved, strict=True))
                cut.leased += [] if leased is None else [leased]
        for kept, number in zip(some, numbers, strict=True):
            if kept.policy.close is None:
                cut.versions[number] = kept.version
            del cut.marks[number]
            self._stop_awaiting(number, cut)
        self.ready[cut] = None


def _is_due(kept: Kept, marks: Mapping[int, int], workers: Mapping[int, Member], is_exact: bool) -> bool:
    if is_exact:
        return any(kept.counted.get(rank, 0) >= step for rank, step in marks.items())
    return workers.keys() <= marks.keys() and all(kept.counted.get(rank, 0) >= step for rank, step in marks.items())


def _require_alike(cut: Cut, workers: Mapping[int, Member]) -> None:
    """Whether what is still awaited is marked by everybody, once all have marked; or it might be awaited for ever."""
    if not workers.keys() <= cut.marked:
        return
    for number, marks in cut.marks.items():
        if not workers.keys() <= marks.keys():
            ranks = ", ".join(f"worker-{rank}" for rank in sorted(workers.keys() - marks.keys()))
            cut.fail(
                f"{ranks} did not know slice {number} yet, which other workers save:"
                " call save_checkpoint when every init has returned"
            )
            return


def _disagreement(kept: Kept, rank: int, step: int, step_then: int) -> str:
    return (
        f"worker-{rank} called save_checkpoint after {step} pushes of key {kept.key!r}, where the checkpoint of the"
        f" other workers has {step_then}: every worker must call it at the same step"
    )
