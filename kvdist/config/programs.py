"""How processes of kvdist's own are started: with modules that nothing in the current folder can replace.

``python -m`` and ``python -c`` put the current folder in front of everything, so a ``queue.py`` or a ``token.py`` of
the user's, whose own script may lie elsewhere, would be taken for that of the standard library. Python has an option
against that from 3.11 on.
"""

from __future__ import annotations

LEAVE_FOLDER = "import sys; sys.path[:] = filter(None, sys.path)"
"""The first line of a program that ``python -c`` runs, where '' in the path is the current folder."""


def module_words(module: str) -> tuple[str, ...]:
    """The words after ``python`` that run a module as ``-m`` does, but not with what lies in the current folder.

    They are one line, and have nothing that a shell or Kubernetes would replace between single quotes.
    """
    run = f'import runpy; runpy.run_module("{module}", run_name="__main__", alter_sys=True)'
    return ("-c", f"{LEAVE_FOLDER}; {run}")
