"""Commands of a worker to every server: the scheduler passes them on, servers run what is registered there. Pure.

What a handler does is the business of whoever registered it. It runs between two messages, so no push is half applied
while it runs, and the server answers nobody meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from kvdist.core.machine import Effect, Send
from kvdist.core.scheduler.membership import Seats
from kvdist.core.scheduler.servers_asked import ServersAsked
from kvdist.nodes import Member
from kvdist.protocol.messages import HEAD_OF_USERS_MAX, Command, Done, ErrorCode, Failed, Perform, Waiting

Handler = Callable[[int, str, int], object]
"""Called as ``handler(head, body, rank)`` with the server's rank; what it returns is not looked at."""


def pass_on(sender: Member, message: Command, seats: Seats, asked: ServersAsked) -> list[Effect]:
    """The scheduler's part: all servers are asked, and the worker is answered when the last one has answered.

    Until then it knows who has not, should it wait so long that it is explained.
    """
    servers = seats.servers
    awaited = {str(server) for server in servers}
    failures: dict[int, str] = {}

    def answered(server: Member, failure: str) -> list[Effect]:
        awaited.discard(str(server))
        if failure:
            failures[server.node.rank] = failure
        if awaited:
            return [hint()]
        if failures:
            return [Send(sender, Failed(message.request, ErrorCode.INTERNAL, _failures(failures, len(servers))))]
        return [Send(sender, Done(message.request))]

    def hint() -> Effect:
        names = ", ".join(str(server) for server in servers if str(server) in awaited)
        return Send(sender, Waiting(f"the command on {names}", (), 0.0))

    def make(request: int) -> Perform:
        return Perform(request, message.head, message.body)

    # One by one, because who has answered matters.
    effects = [effect for server in servers for effect in asked.ask([server], make, partial(answered, server))]
    return [*effects, hint()]


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


def _failures(failures: Mapping[int, str], num_servers: int) -> str:
    """One reason in full, and on whom else there was one."""
    if len(failures) == 1:
        return next(iter(failures.values()))
    names = ", ".join(f"server-{rank}" for rank in sorted(failures))
    share = "all" if len(failures) == num_servers else f"{len(failures)} of"
    return f"{failures[min(failures)]} ({share} {num_servers} servers failed: {names})"


def _unknown(head: int, handlers: Mapping[int, Handler]) -> str:
    known = ", ".join(str(one) for one in sorted(handlers) if one <= HEAD_OF_USERS_MAX)
    return (
        f"no handler is registered for command {head}; known are: {known or 'none'}. Servers know those of the modules"
        " that whoever starts them names: kvdist-launch --server-module"
    )
