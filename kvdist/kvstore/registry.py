"""Names and meanings of the stores, registered store classes, and handlers of commands on servers.

A server runs only handlers that were registered by a module named at its start (``--server-module``): a worker sends
the number of a handler and a text for it, never code.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from kvdist.config.suggestions import did_you_mean
from kvdist.core.policy import ASYNC, P3, SYNC, Policy
from kvdist.core.server.commands import Handler
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import HEAD_OF_USERS_MAX
from kvdist.runtime.cluster import HANDLERS

LOCAL_NAMES = (
    "local",
    "local_update_cpu",
    "local_allreduce_cpu",
    "device",
    "local_allreduce_device",
    "nccl",
)
"""Stores within a process."""

HOST_NAMES = frozenset({"local", "local_update_cpu", "local_allreduce_cpu"})
"""The stores within a process that sum in the host's memory, wherever values lie; the others sum where values lie."""

DEVICE_NAMES = frozenset(
    {
        "device",
        "local_allreduce_device",
        "nccl",
        "dist_device_sync",
        "dist_sync_device",
        "dist_async_device",
        "dist_device_async",
    }
)
"""Stores that sum values of GPUs on the GPU, and raise where this is not possible.

Other stores on a cluster do so if they can."""

COMPRESSING_NAMES = frozenset({"device", "local_allreduce_device"})
"""The stores that compress gradients; the others do not in MXNet either."""

DIST_NAMES: Mapping[str, Policy] = MappingProxyType(
    {
        "dist": SYNC,
        "dist_sync": SYNC,
        "dist_device_sync": SYNC,
        "dist_sync_device": SYNC,
        "p3": P3,
        "p3store_dist": P3,
        "dist_async": ASYNC,
        "dist_async_device": ASYNC,
        "dist_device_async": ASYNC,
    }
)
"""Stores on a cluster, and when a round of theirs closes.

All send the urgent slices first. The two of P3 cut keys into small slices for that, and send few bytes at once."""

COLLECTIVE_NAMES = ("collective", "horovod", "allreduce", "byteps")
"""Stores that sum without servers. ``nccl`` is such a store where a job has several ranks."""

HYBRID = "hybrid"
"""Rows on servers, everything else summed without."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "teststore": "it is a test double of MXNet's: register a class of your own called TestStore",
        "dist_device": "say whether workers wait for each other: use 'dist_device_sync' or 'dist_device_async'",
        "dist_sync_async": "it is one or the other: use 'dist_sync' or 'dist_async'",
    }
)
"""Names that people try, and what to use."""


REGISTERED: dict[str, Callable[[], Any]] = {}
"""Name → class."""

Store = TypeVar("Store", bound=type)


def register(cls: Store) -> Store:
    """Register a custom store class, so that `create` accepts its name in lower case. Usable as a decorator.

    `create` calls the class without arguments. A store for a `Trainer` must derive from `KVStoreBase`; a script that
    calls the store directly may use any class. An existing name is replaced, with a warning.

    Raises:
        TypeError: `cls` is not a class.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register takes a class, not {type(cls).__name__}: create() makes an object of it each time")
    name = cls.__name__.lower()
    if name in {*REGISTERED, *LOCAL_NAMES, *DIST_NAMES, *COLLECTIVE_NAMES, HYBRID}:
        warnings.warn(f"the store {name!r} is now {cls.__module__}.{cls.__qualname__}", stacklevel=2)
    REGISTERED[name] = cls
    return cls


def require_known(name: str) -> None:
    """Refuse a name that `create` does not know.

    Raises:
        ValueError: it is unknown; the message lists the known names.
    """
    lowered = name.lower()
    known = [*LOCAL_NAMES, *DIST_NAMES, *COLLECTIVE_NAMES, HYBRID, *REGISTERED]
    if lowered in known:
        return
    advice = f": {ELSEWHERE[lowered]}" if lowered in ELSEWHERE else ""
    near = "" if advice else did_you_mean(name, known)
    before = f"{near} Known" if near else "known"
    raise ValueError(f"there is no store called {name!r}{advice}; {before} are: {', '.join(known)}")


_Function = TypeVar("_Function", bound=Handler)


def register_command(head: int) -> Callable[[_Function], _Function]:
    """Decorator that registers a function as the handler of `KVStore.send_command_to_servers`.

    A server calls ``function(head, body, rank)``, with the rank of the server, between two messages. Keep it short: no
    worker gets an answer until it returns. Its return value is ignored; an exception, including ``SystemExit``, is
    reported to the caller as text. Servers import the module with ``--server-module``.

    Args:
        head: number of the command, 0 to 2147483647. Running the same definition again replaces the earlier handler.

    Raises:
        TypeError: `head` is not an integer, or the decorated object is not callable.
        ValueError: `head` is out of range, or belongs to another function.
    """
    require_head(head)

    def register(function: _Function) -> _Function:
        if not callable(function):
            raise TypeError(f"a command's handler is a function of (head, body, rank), not {type(function).__name__}")
        known = HANDLERS.get(head)
        if known is not None and _name(known) != _name(function):
            raise ValueError(f"command {head} belongs to {_name(known)}: choose another number")
        HANDLERS[head] = function
        return function

    return register


def require_head(head: object) -> None:
    """Refuse anything but the number of a command."""
    if not isinstance(head, int) or isinstance(head, bool):
        raise TypeError(f"the number of a command is an int, not {type(head).__name__}")
    if not 0 <= head <= HEAD_OF_USERS_MAX:
        raise ValueError(f"the number of a command is from 0 to {HEAD_OF_USERS_MAX}, not {head}")


def require_body(body: object) -> None:
    """Refuse what cannot travel as the text of a command."""
    if not isinstance(body, str):
        raise TypeError(f"the body of a command is a str, not {type(body).__name__}; write numbers as JSON, say")
    try:
        nbytes = len(body.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"the body of a command cannot be written as UTF-8: {error}") from None
    if nbytes > DEFAULT.body_bytes_max:
        raise ValueError(
            f"the body of a command has {nbytes} bytes of UTF-8, more than the limit of {DEFAULT.body_bytes_max}; put"
            " larger data into a file, or into keys"
        )


def _name(function: Handler) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
