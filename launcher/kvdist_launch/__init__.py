"""Starts every process of a kvdist job and ends them all: the command ``kvdist-launch``.

`plan` decides which processes run, `job` when a job has failed and which processes must end; both are pure.
`processes` and `supervisor` start and watch real processes. Of kvdist only a few light modules are imported, so the
command starts in a few milliseconds.

`run` does the same for a function, from Python.
"""

from __future__ import annotations

TYPE_CHECKING = False  # as in `typing`, which takes longer to import than all that `start` needs
if TYPE_CHECKING:
    from typing import Any

__all__ = ["JobFailure", "WorkerFailure", "run"]


def __getattr__(name: str) -> Any:
    # Looked up late: the command does not need it, and starts sooner without.
    if name in __all__:
        from kvdist_launch import function

        return getattr(function, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
