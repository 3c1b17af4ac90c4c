"""This process as a rank: its groups, its start and end, and which engine the current thread uses.

After an engine is closed, another can be created in the same process at the same rendezvous. Rank 0 draws a token for
each meeting and no rank uses a token twice, so a new engine never meets an old engine.
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
from kvdist.collective.consistency import ConsistencyCheck
from kvdist.collective.control import Control, open_control
from kvdist.collective.group import Group
from kvdist.collective.operations import MarkerOperation, Operation, failed_operation, zeros_operation
from kvdist.collective.rendezvous import meet, own_address
from kvdist.collective.signature import JOIN_SIGNATURE
from kvdist.collective.timeline import NO_TIMELINE, FileTimeline, Timeline
from kvdist.config.environment import World, placed
from kvdist.config.settings import CollectiveSettings
from kvdist.errors import CollectiveError, ConfigError, ForkError, ProcessSetError

ALL_RANKS = 0
"""The number of the group of all ranks."""
DEFAULTS = CollectiveSettings()


class CollectiveEngine:
    """This process as a rank of a collective job.

    Args:
        world: this process's rank, size and machine.
        met: the tokens of this process's earlier meetings; the new token is added.
        find: returns the store that all ranks share; see `rendezvous.meet`.
        settings: the user's settings.

    Attributes:
        sets: the process sets, number → ranks, the same on all ranks.

    Raises:
        CollectiveError: the ranks could not connect.
        OSError: the timeline cannot be written.
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
        self._shares_memory = settings.transport == "auto"
        self._control, self._store = self._meet(set() if met is None else met, find, settings)
        self.board.set(_local_size_of(self.world.rank), str(self.world.local_size))
        self._check = ConsistencyCheck() if self._control is None else self._control.check
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
        """A store for short notes that all ranks share; it ends with the engine."""
        return PrefixStore("board", self._store)

    @property
    def is_homogeneous(self) -> bool:
        """Whether every machine has as many ranks as this machine."""
        sizes = {int(self.board.get(_local_size_of(rank))) for rank in range(self.world.size)}
        return sizes == {self.world.local_size}

    def group(self, number: int = ALL_RANKS) -> Group:
        """Return a group that this rank is a member of.

        Raises:
            ProcessSetError: it is not a member.
        """
        try:
            return self._groups[number]
        except KeyError:
            known = f"of ranks {list(self.sets[number])}" if number in self.sets else "which does not exist"
            raise ProcessSetError(f"rank {self.world.rank} is not in process set {number}, {known}") from None

    def submit(self, operation: Operation, number: int = ALL_RANKS) -> Future[Any]:
        """Queue an operation of a group; return the future of its result.

        Raises:
            CollectiveError: this rank is not in the group, or the group has failed.
            ForkError: this process was forked from the rank.
        """
        self._check_fork()
        return self.group(number).submit(operation)

    def refuse(self, error: BaseException, number: int = ALL_RANKS, kind: str = "operation", name: str = "") -> None:
        """Report to the ranks of a group that this rank cannot call an operation, so that none waits for it.

        Args:
            error: the reason; the caller raises it.
            number: number of the group.
            kind, name: kind and name of the operation; without a name it is the next of the operations without a name.
        """
        self._check_fork()
        self.group(number).submit(failed_operation(error, kind, name))

    def join(self) -> int:
        """Let the others go on without this rank until all have called this; return the last rank to call it."""
        return int(self.submit(MarkerOperation(JOIN_SIGNATURE)).result())

    def start_timeline(self, path: str, marks_cycles: bool = False) -> None:
        """Start to write a timeline, in place of an earlier timeline.

        Raises:
            OSError: the file cannot be written.
        """
        self.stop_timeline()
        self._set_timeline(FileTimeline(path, self.world.rank, marks_cycles))

    def stop_timeline(self) -> None:
        """Finish the timeline, if any."""
        stopped = self._timeline
        self._set_timeline(NO_TIMELINE)
        if isinstance(stopped, FileTimeline):
            stopped.stop()

    def at_close(self, action: Callable[[], None]) -> None:
        """Register a function to call when the engine is closed."""
        self._closing.append(action)

    def not_at_close(self, action: Callable[[], None]) -> None:
        """Undo an `at_close`."""
        self._closing = [other for other in self._closing if other != action]

    def close(self, failure: str = "") -> None:
        """Leave the job. In a forked child it does nothing.

        Args:
            failure: why this process cannot go on; '' finishes the submitted operations.
        """
        if os.getpid() != self._pid:
            return
        for action in self._closing:
            action()
        self._closing.clear()
        groups = list(self._groups.values())
        if failure and self._control is not None:
            # Also those that still connect.
            self._control.check.fail(lambda _: CollectiveError(f"this process ends: {failure}"))
        # Before any wait: the others may wait for operations that are never called here, and this rank for them.
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
        """Add a process set, connect to its members if this rank is a member, and return its number."""
        number, self._next_set = self._next_set, self._next_set + 1
        self.sets[number] = ranks
        if self.world.rank in ranks:
            self._new_group(number, ranks)
        return number

    def close_set(self, number: int) -> None:
        """Remove a process set."""
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
            self.world = placed(self.world, control.machines)
        # No earlier meeting has written under this prefix.
        return control, PrefixStore(control.token, store)

    def _new_group(self, number: int, ranks: Sequence[int]) -> None:
        ranks = tuple(ranks)
        store = PrefixStore(f"group{number}", self._store)
        channel = Channel(store, ranks.index(self.world.rank), len(ranks), self._address, self._shares_memory)
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
    """The key under which a rank publishes the number of ranks on its machine."""
    return f"local_size/{rank}"


class _ThreadEngine(threading.local):
    """The engine of a thread that is a separate rank, in place of the process's."""

    engine: CollectiveEngine | None = None


_of_thread = _ThreadEngine()
of_process: list[CollectiveEngine] = []
"""The engine of this process; empty without an engine."""


def is_initialized() -> bool:
    """Whether this process is a rank, from `init` until `shutdown`."""
    return _of_thread.engine is not None or bool(of_process)


def current() -> CollectiveEngine:
    """The engine of this thread or process. An operation keeps the engine that was current when it was called.

    Raises:
        ConfigError: `init` was not called; a ValueError, as in Horovod.
    """
    if _of_thread.engine is not None:
        return _of_thread.engine
    if not of_process:
        raise ConfigError("kvdist.horovod (kvdist.collective) has not been initialized; use hvd.init()")
    return of_process[0]


@contextlib.contextmanager
def using(engine: CollectiveEngine) -> Iterator[CollectiveEngine]:
    """Let this thread act as the rank of an engine."""
    before, _of_thread.engine = _of_thread.engine, engine
    try:
        yield engine
    finally:
        _of_thread.engine = before
