"""Processes of a machine: how kvdist starts its modules, and whether a process known by its identity still runs.

``python -m`` and ``python -c`` put the current folder in front of everything, so a ``queue.py`` or a ``token.py`` of
the user, whose script may lie elsewhere, would shadow that of the standard library. Python has an option against that
from 3.11 on.

The id of a process does not identify it: it may be reused, or belong to another container. So an identity has the id,
the start time and the namespace.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LEAVE_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""First line of a program for ``python -c``: removes the current folder, '', from the path of modules."""


def module_words(module: str) -> tuple[str, ...]:
    """The words after ``python`` that run a module as ``-m`` does, but without modules of the current folder.

    They are a single line, and have nothing that a shell or Kubernetes would replace between single quotes.
    """
    run = f'import runpy; runpy.run_module("{module}", run_name="__main__", alter_sys=True)'
    return ("-c", f"{LEAVE_FOLDER}; {run}")


def this_process() -> str:
    """Identity of this process: its id, its start time, and the namespace of the id."""
    return f"{os.getpid()}.{_begin_of(os.getpid())}.{_namespace()}"


def may_run(word: str) -> bool:
    """Whether a process of this machine, by its `this_process`, runs, or is invisible to this process.

    Raises:
        ValueError: the text is no such identity.
    """
    pid, begin, namespace = word.split(".")
    if namespace != _namespace() or begin == UNKNOWN:
        return True
    now = _begin_of(int(pid))
    return now == begin or (now == UNKNOWN and _is_there(int(pid)))


UNKNOWN = "-"
"""Stands for a start time or a namespace that the system does not reveal."""
ENDED = ("Z", "X")
"""States of a process that has ended and that its parent has not reaped; the first replaces its start time."""


def _begin_of(pid: int) -> str:
    """Start time of a process, which distinguishes it from a later process with the same id."""
    with contextlib.suppress(OSError):
        # After the process name, which may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return ENDED[0] if fields[0] in ENDED else fields[19]
    return UNKNOWN


def _is_there(pid: int) -> bool:
    """Whether a process has this id, also if ``/proc`` hides processes of other users (``hidepid``)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def _namespace() -> str:
    with contextlib.suppress(OSError):
        return str(os.stat("/proc/self/ns/pid").st_ino)
    return UNKNOWN
