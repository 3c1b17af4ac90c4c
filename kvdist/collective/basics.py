"""`init`, `shutdown`, `join`, and the questions who this process is, for the engine of this process."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Iterable

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from kvdist.collective.engine import CollectiveEngine, of_process
from kvdist.collective.engine import current as current
from kvdist.collective.engine import is_initialized as is_initialized
from kvdist.collective.engine import using as using
from kvdist.collective.process_sets import ProcessSet, add_process_set
from kvdist.collective.rendezvous import forget_port, leave_port, meet, meet_again
from kvdist.config.environment import World, collective_settings_from_env, world_from_env
from kvdist.errors import CollectiveError
from kvdist.runtime.process_name import name_process


class _MeetingPoint:
    """The meeting point of this process, found once: a launcher's socket can be listened at only once.

    Attributes:
        met: the tokens of the meetings at which this process has been.
    """

    def __init__(self) -> None:
        self.met: set[str] = set()
        self._stores: dict[World, PrefixStore] = {}

    def find(self, world: World, timeout_s: float) -> Store:
        """The store that all ranks share."""
        if world not in self._stores:
            self._stores[world] = meet(world, timeout_s)
            return self._stores[world]
        leave_port(world, self._stores[world])
        return meet_again(world, self._stores[world], timeout_s)


_meeting = _MeetingPoint()


def init(world: World | None = None, process_sets: str | Iterable[ProcessSet | Iterable[int]] | None = None) -> None:
    """Become a rank; a second call does nothing.

    Args:
        world: who this process is; None asks the environment.
        process_sets: to be known from the start, the same on all ranks; Horovod's word ``dynamic`` has no effect.

    Raises:
        ConfigError: the environment says only half of it.
        CollectiveError: the other ranks were not found in time.
    """
    if is_initialized():
        return
    found = world_from_env() if world is None else world
    try:
        engine = CollectiveEngine(found, _meeting.met, _meeting.find, collective_settings_from_env())
    finally:
        forget_port(found)
    of_process.append(engine)
    if found.size > 1:
        name_process(f"worker-{found.rank}")
    try:
        for process_set in () if process_sets is None or isinstance(process_sets, str) else process_sets:
            add_process_set(process_set)
    except BaseException as error:
        _close(error)  # a second call would not make the rest of them
        raise


def shutdown() -> None:
    """Stop being a rank; a second call does nothing. `init` may be called again then, by all ranks.

    What the other ranks call then raises, if this one has not called it too. Within the handling of an exception, they
    are told of that.
    """
    _close(sys.exc_info()[1])


def _close(error: BaseException | None) -> None:
    # An error of an operation is known to the others already, and what follows it is often a new beginning.
    is_end = isinstance(error, SystemExit) and not error.code
    is_news = error is not None and not isinstance(error, CollectiveError) and not is_end
    failure = f"ended by {type(error).__name__}: {str(error)[:500]}" if is_news else ""
    while of_process:
        of_process.pop().close(failure)


def _at_exit() -> None:
    # An exception that ended the main thread is told to the others.
    error = getattr(sys, "last_value", None)
    _close(error)


atexit.register(_at_exit)


def join(device: int = -1) -> int:  # noqa: ARG001 (Horovod has it)
    """Take part in what the others still do, with zeros, until all ranks have called this.

    Only Sum and Average of allreduce can be done by the others meanwhile; an average divides by the number of all
    ranks. Anything else raises on those who call it.

    Args:
        device: without effect; Horovod's.

    Returns:
        The rank that called it last, on all ranks.
    """
    return current().join()


def start_timeline(path: str, mark_cycles: bool = False) -> None:
    """Write what the operations do when to a file that ``chrome://tracing`` and Perfetto open.

    Args:
        path: rank 0 writes there, any other rank beside it, as in ``timeline.rank1.json``.
        mark_cycles: also mark where the thread of operations had done all there was.

    Raises:
        OSError: nothing can be written there.
    """
    current().start_timeline(path, mark_cycles)


def stop_timeline() -> None:
    """Finish the timeline, if there is one."""
    current().stop_timeline()


def rank() -> int:
    """This process's number among all, from 0."""
    return current().world.rank


def size() -> int:
    """The number of processes."""
    return current().world.size


def local_rank() -> int:
    """This process's number among those of its machine: which GPU is its own, say."""
    return current().world.local_rank


def local_size() -> int:
    """The number of processes on this machine."""
    return current().world.local_size


def is_homogeneous() -> bool:
    """Whether every machine has as many processes as this one."""
    return current().is_homogeneous


def cross_rank() -> int:
    """This machine's number among those that have a process of this local rank."""
    return current().world.cross_rank


def cross_size() -> int:
    """The number of machines that have a process of this local rank."""
    return current().world.cross_size
