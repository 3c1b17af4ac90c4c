"""Commands of a worker to every server: servers run the handlers that are registered there. Pure.

A handler runs between two messages: no push is half applied while it runs, and the server answers nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvdist.protocol.messages import HEAD_OF_USERS_MAX, Done, ErrorCode, Failed, Perform

Handler = Callable[[int, str, int], object]
"""Called as ``handler(head, body, rank)`` with the server's rank; what it returns is not looked at."""


def perform(handlers: Mapping[int, Handler], message: Perform, rank: int) -> Done | Failed:
    """The server's part: run the handler, and say how that went."""
    handler = handlers.get(message.head)
    if handler is None:
        return Failed(message.request, ErrorCode.INTERNAL, _unknown(message.head, handlers))
    try:
        handler(message.head, message.body, rank)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a handler raised belongs to the caller
        failed = f"command {message.head} failed with " if message.head <= HEAD_OF_USERS_MAX else ""
        return Failed(message.request, ErrorCode.INTERNAL, f"{failed}{type(error).__name__}: {error}")
    return Done(message.request)


def _unknown(head: int, handlers: Mapping[int, Handler]) -> str:
    known = ", ".join(str(one) for one in sorted(handlers) if one <= HEAD_OF_USERS_MAX)
    return (
        f"no handler is registered for command {head}; known are: {known or 'none'}. Servers know those of the modules"
        " that they are started with: kvdist-launch --server-module"
    )
