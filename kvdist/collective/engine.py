"""This process as a rank: its groups, its beginning and end, and which engine the current thread uses.

An engine can be closed and another one made in the same process at the same rendezvous. Rank 0 draws a token for each
meeting and no rank uses one twice, so a new engine meets nothing of an old one.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from kvdist.collective.channel import Channel, ConnectingGroup
from kvdist.collective.consistency import ConsistencyCheck, SingleRankCheck
from kvdist.collective.control import Control, open_control
from kvdist.collective.group import Group
from kvdist.collective.operations import JoinOperation, Operation, zeros_operation
from kvdist.collective.rendezvous import meet, own_address
from kvdist.collective.timeline import NO_TIMELINE, FileTimeline, Timeline
from kvdist.config.environment import World, placed
from kvdist.config.settings import CollectiveSettings
from kvdist.errors import CollectiveError, ConfigError, ForkError

ALL_RANKS = 0
"""The number of the group of all ranks."""
DEFAULTS = CollectiveSettings()


class CollectiveEngine:
    """One rank.

    Args:
        world: who it is.
        met: the tokens of meetings at which this process has been, to which that of this one is added.
        find: meets the others; see `rendezvous.meet`.
        settings: what the user has set.

    Attributes:
        sets: the process sets: number → ranks. All ranks know all of them.
    """

    def __init__(
        self,
        world: World,
        met: set[str] | None = None,
        find: Callable[[World, float], Store] = meet,
        settings: CollectiveSettings = DEFAULTS,
    ) -> None:
        self.world = world
        self.sets: dict[int, tuple[int, ...]] = {ALL_RANKS: tuple(range(world.size))}
        self._pid = os.getpid()
        self._groups: dict[int, Group] = {}
        self._next_set = ALL_RANKS + 1
        self._timeline: Timeline = NO_TIMELINE
        self._closing: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._address = own_address(world, settings)
        self._control, self._store = self._meet(set() if met is None else met, find, settings)
        self.board.set(_local_size_of(self.world.rank), str(self.world.local_size))
        self._check: ConsistencyCheck = SingleRankCheck() if self._control is None else self._control.check
        try:
            self._new_group(ALL_RANKS, self.sets[ALL_RANKS])
        except BaseException as error:
            if self._control is not None:
                self._control.close(f"it could not connect to the others: {error}")
            raise
        if settings.timeline:
            try:
                self.start_timeline(settings.timeline, settings.timeline_marks_cycles)
            except OSError as error:
                self.close(f"its timeline cannot be written: {error}")
                raise

    @property
    def board(self) -> Store:
        """What all ranks share beside their operations, for short notes; they are gone with the engine."""
        return PrefixStore("board", self._store)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every machine has as many ranks as this one."""
        sizes = {int(self.board.get(_local_size_of(rank))) for rank in range(self.world.size)}
        return sizes == {self.world.local_size}

    def group(self, number: int = ALL_RANKS) -> Group:
        """One of the groups this rank is in.

        Raises:
            CollectiveError: it is not in that one.
        """
        try:
            return self._groups[number]
        except KeyError:
            known = f"of ranks {list(self.sets[number])}" if number in self.sets else "which is not known"
            raise CollectiveError(f"rank {self.world.rank} is not in process set {number}, {known}") from None

    def submit(self, operation: Operation, number: int = ALL_RANKS) -> Future[Any]:
        """Have the ranks of a group do something together.

        Raises:
            CollectiveError: this rank is not in the group, or the group has failed.
            ForkError: this process is a child of that which is the rank.
        """
        self._check_fork()
        return self.group(number).submit(operation)

    def refuse(self, error: BaseException, number: int = ALL_RANKS) -> None:
        """Tell the ranks of a group that this one cannot call the next operation, so that they do not wait for it.

        Args:
            error: why; the caller raises it here.
            number: of the group.
        """
        self._check_fork()
        self.group(number).refuse(error)

    def join(self) -> int:
        """Let the others go on without this rank, until all have called this; returns who did last."""
        return int(self.submit(JoinOperation()).result())

    def start_timeline(self, path: str, marks_cycles: bool = False) -> None:
        """Note what the operations do when, in the place of an earlier timeline.

        Raises:
            OSError: nothing can be written there.
        """
        self.stop_timeline()
        self._set_timeline(FileTimeline(path, self.world.rank, marks_cycles))

    def stop_timeline(self) -> None:
        """Finish the timeline, if there is one."""
        stopped = self._timeline
        self._set_timeline(NO_TIMELINE)
        if isinstance(stopped, FileTimeline):
            stopped.stop()

    def at_close(self, action: Callable[[], None]) -> None:
        """Call this when the engine is closed."""
        self._closing.append(action)

    def not_at_close(self, action: Callable[[], None]) -> None:
        """Take back an `at_close`."""
        self._closing = [other for other in self._closing if other != action]

    def close(self, failure: str = "") -> None:
        """Take leave of the others. A forked child leaves all that to its parent.

        Args:
            failure: why this process cannot go on; '' finishes what was submitted.
        """
        if os.getpid() != self._pid:
            return
        for action in self._closing:
            action()
        self._closing.clear()
        groups = list(self._groups.values())
        if failure:
            for group in groups:
                group.fail(lambda _: CollectiveError(f"this process ends: {failure}"))
        # Before anything is waited for: others may wait for what is never called here, and this rank for them.
        called = {group.number: group.stop_calls() for group in groups}
        if self._control is not None and failure:
            self._control.close(failure)
        elif self._control is not None:
            self._control.check.say_last_calls({at: count for at, count in called.items() if count is not None})
        for group in groups:
            group.close()
        if self._control is not None and not failure:
            self._control.close()
        self.stop_timeline()

    # On the thread of the group of all ranks.

    def open_set(self, ranks: tuple[int, ...]) -> int:
        """Know another process set, and connect to its members if this rank is one. Returns its number."""
        number, self._next_set = self._next_set, self._next_set + 1
        self.sets[number] = ranks
        if self.world.rank in ranks:
            self._new_group(number, ranks)
        return number

    def close_set(self, number: int) -> None:
        """Forget a process set."""
        self.sets.pop(number, None)
        group = self._groups.pop(number, None)
        if group is not None:
            group.close()
        if self._control is not None:
            self._control.check.leave(number)

    def _meet(
        self, met: set[str], find: Callable[[World, float], Store], settings: CollectiveSettings
    ) -> tuple[Control | None, Store]:
        if self.world.size == 1:
            return None, HashStore()
        store = find(self.world, settings.start_timeout_s)
        control = open_control(self.world, store, self._address, settings, met)
        control.wait_for_all()
        if self.world.is_assumed:
            self.world = placed(self.world, control.hosts)
        # Behind this prefix lies nothing of an earlier attempt to meet here.
        return control, PrefixStore(control.token, store)

    def _new_group(self, number: int, ranks: Sequence[int]) -> None:
        ranks = tuple(ranks)
        store = PrefixStore(f"group{number}", self._store)
        channel = Channel(store, ranks.index(self.world.rank), len(ranks), self._address)
        opening = ConnectingGroup(number, ranks)
        if self._control is not None:
            self._control.check.enter(opening)
        opening.open(channel)
        group = Group(number, ranks, channel, self._check, zeros_operation)
        group.timeline = self._timeline
        if self._control is not None:
            self._control.check.enter(group)
        self._groups[number] = group
        group.start()

    def _set_timeline(self, timeline: Timeline) -> None:
        with self._lock:
            self._timeline = timeline
            for group in list(self._groups.values()):
                group.timeline = timeline

    def _check_fork(self) -> None:
        if os.getpid() != self._pid:
            raise ForkError(
                f"this process was forked from rank {self.world.rank}, whose connections it cannot use: call collective"
                " operations in the parent, or start children with the method 'spawn'"
            )


def _local_size_of(rank: int) -> str:
    """Where a rank notes how many there are on its machine."""
    return f"local_size/{rank}"


class _ThreadEngine(threading.local):
    """What a thread that is a rank of its own uses instead of the process's engine."""

    engine: CollectiveEngine | None = None


_of_thread = _ThreadEngine()
of_process: list[CollectiveEngine] = []
"""None or one."""


def is_initialized() -> bool:
    """Whether this process is a rank, between `init` and `shutdown`."""
    return _of_thread.engine is not None or bool(of_process)


def current() -> CollectiveEngine:
    """The engine in use.

    Raises:
        ConfigError: `init` was not called; a ValueError, as in Horovod.
    """
    if _of_thread.engine is not None:
        return _of_thread.engine
    if not of_process:
        raise ConfigError("this process is no rank yet: kvdist.collective has not been initialized; call init() first")
    return of_process[0]


@contextlib.contextmanager
def using(engine: CollectiveEngine) -> Iterator[CollectiveEngine]:
    """Let this thread be the rank of an engine of its own."""
    before, _of_thread.engine = _of_thread.engine, engine
    try:
        yield engine
    finally:
        _of_thread.engine = before
