"""Commands of a worker to every server: the scheduler passes them on, servers run what is registered there. Pure.

What a handler does is the business of whoever registered it. It runs between two messages, so no push is half applied
while it runs, and the server answers nobody meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvdist.core.effects import Effect, Send
from kvdist.core.seats import Seats
from kvdist.core.servers_asked import ServersAsked
from kvdist.nodes import Member
from kvdist.protocol.commands import HEAD_OF_USERS_MAX, Command, Perform
from kvdist.protocol.messages import Done, ErrorCode, Failed

Handler = Callable[[int, str, int], object]
"""Called as ``handler(head, body, rank)`` with the server's rank; what it returns is not looked at."""


def pass_on(sender: Member, message: Command, seats: Seats, asked: ServersAsked) -> list[Effect]:
    """The scheduler's part: all servers are asked, and the worker is answered when the last one has answered."""

    def all_answered(failure: str) -> list[Effect]:
        if failure:
            return [Send(sender, Failed(message.request, ErrorCode.INTERNAL, failure))]
        return [Send(sender, Done(message.request))]

    return asked.ask(seats.servers, lambda request: Perform(request, message.head, message.body), all_answered)


def perform(handlers: Mapping[int, Handler], message: Perform, rank: int) -> Done | Failed:
    """The server's part: run the handler, and say how that went."""
    handler = handlers.get(message.head)
    if handler is None:
        return Failed(message.request, ErrorCode.INTERNAL, _unknown(message.head, handlers))
    try:
        handler(message.head, message.body, rank)
    except Exception as error:  # noqa: BLE001  # whatever a handler raised belongs to the caller
        failed = f"command {message.head} failed with " if message.head <= HEAD_OF_USERS_MAX else ""
        return Failed(message.request, ErrorCode.INTERNAL, f"{failed}{type(error).__name__}: {error}")
    return Done(message.request)


def _unknown(head: int, handlers: Mapping[int, Handler]) -> str:
    known = ", ".join(str(one) for one in sorted(handlers) if one <= HEAD_OF_USERS_MAX)
    return (
        f"no handler is registered for command {head}; known are: {known or 'none'}. Servers know those of the modules"
        " that whoever starts them names: kvdist-launch --server-module"
    )
