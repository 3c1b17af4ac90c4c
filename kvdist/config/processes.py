"""Processes of one machine: how kvdist starts its own, and whether one that has left its word still runs.

``python -m`` and ``python -c`` put the current folder in front of everything, so a ``queue.py`` or a ``token.py`` of
the user's, whose own script may lie elsewhere, would be taken for that of the standard library. Python has an option
against that from 3.11 on.

The number of a process says little: it may be another one's by now, or that of another container.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

LEAVE_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""The first line of a program that ``python -c`` runs, where '' in the path is the current folder."""


def module_words(module: str) -> tuple[str, ...]:
    """The words after ``python`` that run a module as ``-m`` does, but not with what lies in the current folder.

    They are one line, and have nothing that a shell or Kubernetes would replace between single quotes.
    """
    run = f'import runpy; runpy.run_module("{module}", run_name="__main__", alter_sys=True)'
    return ("-c", f"{LEAVE_FOLDER}; {run}")


def this_process() -> str:
    """The word of this process: its number, when it began, and the namespace that counts it."""
    return f"{os.getpid()}.{_begin_of(os.getpid())}.{_namespace()}"


def may_run(word: str) -> bool:
    """Whether a process of this machine that has left its word runs, or cannot be seen from here.

    Raises:
        ValueError: the text is no such word.
    """
    pid, begin, namespace = word.split(".")
    if namespace != _namespace() or begin == UNKNOWN:
        return True
    now = _begin_of(int(pid))
    return now == begin or (now == UNKNOWN and _is_there(int(pid)))


UNKNOWN = "-"
"""In place of what the system does not tell."""
ENDED = ("Z", "X")
"""The states of a process that has ended and whose parent has not heard so; the first is in place of its begin."""


def _begin_of(pid: int) -> str:
    """When a process began, which tells it from a later one with its number."""
    with contextlib.suppress(OSError):
        # After the process name, which may contain spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
        return ENDED[0] if fields[0] in ENDED else fields[19]
    return UNKNOWN


def _is_there(pid: int) -> bool:
    """Whether a process has this number, also where ``/proc`` does not show those of others (``hidepid``)."""
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
