"""Starts every process of a kvdist job and ends them all: the command ``kvdist-launch``.

The package is made of a pure middle and a thin rim. `plan` decides what runs, `course` decides when a job has
failed and who is told to end; neither touches a process. `crew` and `supervisor` start and watch real ones. Of
kvdist only a few light modules are used, so the command starts in a few milliseconds.

`run` does the same for a function, from Python.
"""

from __future__ import annotations

from typing import Any

__all__ = ["JobFailure", "WorkerFailure", "run"]


def __getattr__(name: str) -> Any:
    # Looked up late: the command does not need it, and starts sooner without.
    if name in __all__:
        from kvdist_launch import function

        return getattr(function, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
