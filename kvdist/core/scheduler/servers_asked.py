"""Requests of the scheduler to every server, each answered once by all of them. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvdist.core.machine import Effect, Send
from kvdist.nodes import Member
from kvdist.protocol.messages import Message

Then = Callable[[str], list[Effect]]
"""What to do when the last server has answered; called with '' or with the first failure."""


@dataclass(slots=True)
class _Asked:
    """A request and who has not answered it."""

    awaited: set[Member]
    then: Then
    failure: str = ""


class ServersAsked:
    """All requests that are not answered yet."""

    def __init__(self) -> None:
        self._open: dict[int, _Asked] = {}
        self._next_request = 0

    def ask(self, servers: Sequence[Member], make: Callable[[int], Message], then: Then) -> list[Effect]:
        """Send each server the message that `make` makes of the request's number."""
        self._next_request += 1
        request = self._next_request
        self._open[request] = _Asked(set(servers), then)
        return [Send(server, make(request)) for server in servers]

    def answered(self, sender: Member, request: int, failure: str) -> list[Effect]:
        """A server has answered, with '' or with why it could not."""
        asked = self._open.get(request)
        if asked is None or sender not in asked.awaited:
            return []
        asked.awaited.discard(sender)
        asked.failure = asked.failure or failure
        if asked.awaited:
            return []
        del self._open[request]
        return asked.then(asked.failure)
