"""Performs disk tasks beside the loop of a node: in order, on a thread that starts with the first task."""

from __future__ import annotations

import abc
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvdist import errors
from kvdist.checkpoint.snapshot import DiskResult, DiskTask

if TYPE_CHECKING:
    from kvdist.checkpoint.locks import Locks

Done = Callable[[DiskResult, str], None]
"""Takes the result of a task and '', or None and the reason of its failure. Called on another thread."""


class Disk(abc.ABC):
    """Performs disk tasks."""

    @abc.abstractmethod
    def begin(self, work: DiskTask, done: Done) -> None:
        """Queue a task behind those begun before, and call `done` after it. Returns at once."""

    @abc.abstractmethod
    def close(self, linger_s: float) -> None:
        """Wait at most `linger_s` seconds for the tasks begun so far; later tasks are not performed."""


class ThreadedDisk(Disk):
    """The disk of this machine.

    Args:
        root: the folder that tasks are restricted to; None allows all.
    """

    def __init__(self, root: Path | None = None) -> None:
        self._root = root
        self._locks: Locks | None = None
        self._waiting: queue.SimpleQueue[tuple[DiskTask, Done] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, work: DiskTask, done: Done) -> None:
        self._waiting.put((work, done))
        if self._thread is None:
            # Only here: a job without checkpoints does without the modules that know files.
            from kvdist.checkpoint.locks import Locks

            self._locks = Locks()
            # Not waited for at the end: what is not complete by then does not count as a checkpoint.
            self._thread = threading.Thread(target=self._run, args=(self._locks,), name="kvdist-disk", daemon=True)
            self._thread.start()

    def close(self, linger_s: float) -> None:
        if self._thread is not None:
            self._waiting.put(None)
            self._thread.join(linger_s)
        if self._locks is not None:
            self._locks.close()

    def _run(self, locks: Locks) -> None:
        while (item := self._waiting.get()) is not None:
            work, done = item
            done(*outcome(work, locks, self._root))
            del item, work, done  # or the arrays of the last one would stay until the next


def outcome(work: DiskTask, locks: Locks, root: Path | None) -> tuple[DiskResult, str]:
    """Perform a task. Returns its result and '', or None and the reason of its failure."""
    try:
        from kvdist.checkpoint.folders import perform

        return perform(work, locks, root), ""
    except errors.CheckpointError as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001  # whatever went wrong is the outcome
        return None, f"a checkpoint in {work.folder} failed: {type(error).__name__}: {error}"
