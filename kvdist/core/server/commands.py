"""Commands of a worker to every server, which run the handlers that are registered on servers. Pure.

A handler runs between two messages: no push is half applied while it runs, and the server answers nothing meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvdist.protocol import messages as msg

Handler = Callable[[int, str, int], object]
"""Called as ``handler(head, body, rank)`` with the server's rank; its result is ignored."""


def perform(handlers: Mapping[int, Handler], message: msg.Perform, rank: int) -> msg.Done | msg.Failed:
    """Run the handler of a command, and return the answer to the scheduler."""
    handler = handlers.get(message.head)
    if handler is None:
        return msg.Failed(message.request, msg.ErrorCode.INTERNAL, _unknown(message.head, handlers))
    try:
        handler(message.head, message.body, rank)
    except (Exception, SystemExit) as error:  # noqa: BLE001  # whatever a handler raised belongs to the caller
        failed = f"command {message.head} failed with " if message.head <= msg.HEAD_OF_USERS_MAX else ""
        return msg.Failed(message.request, msg.ErrorCode.INTERNAL, f"{failed}{type(error).__name__}: {error}")
    return msg.Done(message.request)


def _unknown(head: int, handlers: Mapping[int, Handler]) -> str:
    known = ", ".join(str(one) for one in sorted(handlers) if one <= msg.HEAD_OF_USERS_MAX)
    return (
        f"no handler is registered for command {head}; known are: {known or 'none'}. Servers know those of the modules"
        " that they are started with: kvdist-launch --server-module"
    )
