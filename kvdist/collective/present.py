"""Which engine counts: one for the process, or for a thread that is a rank of its own.

It is decided where an object is made or a function is called; an operation keeps to its engine.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from kvdist.collective.engine import Engine
from kvdist.errors import ConfigError


class _State(threading.local):
    """What a thread that is a rank of its own uses instead of the process's engine."""

    engine: Engine | None = None


_of_thread = _State()
of_process: list[Engine] = []
"""None or one."""


def is_initialized() -> bool:
    """Whether this process is a rank, between `init` and `shutdown`."""
    return _of_thread.engine is not None or bool(of_process)


def current() -> Engine:
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
def using(engine: Engine) -> Iterator[Engine]:
    """Let this thread be the rank of an engine of its own."""
    before, _of_thread.engine = _of_thread.engine, engine
    try:
        yield engine
    finally:
        _of_thread.engine = before
