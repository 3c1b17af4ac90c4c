"""`init`, `shutdown`, `join`, and the rank, size and place of this process, for the engine of this process."""

from __future__ import annotations

import atexit
import logging
import sys
from collections.abc import Iterable
from dataclasses import replace

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from kvdist.collective.engine import CollectiveEngine, of_process
from kvdist.collective.engine import current as current
from kvdist.collective.engine import is_initialized as is_initialized
from kvdist.collective.engine import using as using
from kvdist.collective.process_sets import ProcessSet, add_process_sets
from kvdist.collective.rendezvous import forget_port, leave_port, meet, meet_again
from kvdist.config.environment import (
    World,
    collective_settings_from_env,
    horovod_log_level,
    horovod_without_effect,
    place_of_rank,
    require_own_place,
    take_place,
    world_from_env,
)
from kvdist.config.exit_codes import shorten_tracebacks, tell_what_lingers
from kvdist.errors import CollectiveError
from kvdist.runtime.process_name import name_process

LOG = logging.getLogger("kvdist")


class _MeetingPoint:
    """The rendezvous store of this process, found once: a launcher's socket can be listened at only once.

    Attributes:
        met: the tokens of this process's meetings.
    """

    def __init__(self) -> None:
        self.met: set[str] = set()
        self._stores: dict[World, PrefixStore] = {}

    def find(self, world: World, timeout_s: float) -> Store:
        """Return the store that all ranks share."""
        again = replace(world, meeting=replace(world.meeting, listen_fd=None))  # it is taken by then
        if again not in self._stores:
            self._stores[again] = meet(world, timeout_s)
            return self._stores[again]
        leave_port(world, self._stores[again])
        return meet_again(world, self._stores[again], timeout_s)


_meeting = _MeetingPoint()


def init(world: World | None = None, process_sets: str | Iterable[ProcessSet | Iterable[int]] | None = None) -> None:
    """Make this process a rank of a job without servers. A second call does nothing.

    Args:
        world: rank, size and machine of this process; None reads the environment variables of the launcher.
        process_sets: list of process sets to register, equal on all ranks; Horovod's ``dynamic`` has no effect.

    Raises:
        ConfigError: the environment variables are incomplete.
        CollectiveError: the other ranks did not appear in time.
        ValueError: the process sets are invalid or differ between ranks. All ranks raise, and may call `init` again.
    """
    if is_initialized():
        return
    level = horovod_log_level()
    shorten_tracebacks()
    found = world_from_env() if world is None else world
    place = place_of_rank() if world is None else ""
    if place:
        require_own_place(place)
    try:
        engine = CollectiveEngine(found, _meeting.met, _meeting.find, collective_settings_from_env())
    finally:
        forget_port(found)
    of_process.append(engine)
    if place:
        take_place(f"worker-{found.rank}", place)
    _heed_horovods_variables(found.rank, level)
    if found.size > 1:
        name_process(f"worker-{found.rank}")
    try:
        add_process_sets([] if process_sets is None or isinstance(process_sets, str) else list(process_sets))
    except BaseException as error:
        # A second call would not make the rest of them. All ranks know of a ValueError.
        _close(None if isinstance(error, ValueError) else error)
        raise


def _heed_horovods_variables(rank: int, level: str | None) -> None:
    """Log from the level that is asked for; name the variables without effect on rank 0."""
    if level is not None:
        LOG.setLevel(level)
        if not LOG.hasHandlers():  # what Python has for such a program shows warnings and above
            LOG.addHandler(logging.StreamHandler())
    for sentence in horovod_without_effect() if rank == 0 else ():
        LOG.warning("%s", sentence)


def shutdown() -> None:
    """Leave the job; a second call does nothing. All ranks may call `init` again afterwards.

    Operations in which the other ranks still wait for this rank then raise. If this process is handling an exception,
    the error of the other ranks names it.
    """
    _close(sys.exc_info()[1])
    tell_what_lingers()


def _close(error: BaseException | None) -> None:
    # The other ranks know of a CollectiveError already, and a new `init` often follows it.
    is_end = isinstance(error, SystemExit) and not error.code
    is_news = error is not None and not isinstance(error, CollectiveError) and not is_end
    failure = f"ended by {type(error).__name__}: {str(error)[:500]}" if is_news else ""
    while of_process:
        of_process.pop().close(failure)


def _at_exit() -> None:
    _close(getattr(sys, "last_value", None))  # the exception that ended the main thread


atexit.register(_at_exit)


def join(device: int = -1) -> int:  # noqa: ARG001 (Horovod has it)
    """Take part in the operations of the other ranks with zeros, until all ranks have called `join`.

    In the meantime the other ranks can only call allreduce with Sum or Average; an average divides by the number of all
    ranks. Any other operation raises on the ranks that call it.

    Args:
        device: accepted for Horovod, without effect.

    Returns:
        The last rank that called `join`, equal on all ranks.
    """
    return current().join()


def start_timeline(path: str, mark_cycles: bool = False) -> None:
    """Write a timeline of the operations to a file for ``chrome://tracing`` or Perfetto.

    Args:
        path: file of rank 0; other ranks write beside it, as in ``timeline.rank1.json``.
        mark_cycles: also mark the times at which the queue of operations is empty.

    Raises:
        OSError: the file cannot be written.
    """
    current().start_timeline(path, mark_cycles)


def stop_timeline() -> None:
    """Finish the timeline, if any."""
    current().stop_timeline()


def rank() -> int:
    """Rank of this process, from 0."""
    return current().world.rank


def size() -> int:
    """Number of processes."""
    return current().world.size


def local_rank() -> int:
    """Rank of this process on its machine, for example to choose a GPU."""
    return current().world.local_rank


def local_size() -> int:
    """Number of processes on this machine."""
    return current().world.local_size


def is_homogeneous() -> bool:
    """Whether all machines have equally many processes."""
    return current().is_homogeneous


def cross_rank() -> int:
    """Number of this machine among the machines that have a process of this local rank."""
    return current().world.cross_rank


def cross_size() -> int:
    """Number of machines that have a process of this local rank."""
    return current().world.cross_size
