"""Handlers of the user's own on servers: what `KVStore.send_command_to_servers` can run.

A server runs a handler that a module registered which whoever started the server named (``--server-module``), and
nothing else: a worker sends the number of a handler and a text for it, never code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvdist.core.commands import Handler
from kvdist.core.worker.requests import SendCommand
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import HEAD_OF_USERS_MAX

HANDLERS: dict[int, Handler] = {}
"""Head → handler, of this process."""

_Function = TypeVar("_Function", bound=Handler)


def register_command(head: int) -> Callable[[_Function], _Function]:
    """Decorator: let `KVStore.send_command_to_servers` run this function on servers.

    It is called as ``function(head, body, rank)`` with the server's rank, between two messages: nobody is answered
    until it returns, so let it be short. What it raises, ``SystemExit`` too, is raised at the caller, as text; what it
    returns is not looked at. Servers import the module by ``--server-module``.

    Args:
        head: the number of the command, 0 to 2147483647. The same definition run again replaces the old one.

    Raises:
        TypeError: the number is no integer, or what is decorated cannot be called.
        ValueError: the number is out of range, or belongs to another function.
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
    """Refuse what is no number of a command."""
    if not isinstance(head, int) or isinstance(head, bool):
        raise TypeError(f"the number of a command is an int, not {type(head).__name__}")
    if not 0 <= head <= HEAD_OF_USERS_MAX:
        raise ValueError(f"the number of a command is from 0 to {HEAD_OF_USERS_MAX}, not {head}")


def command_of(head: int, body: str) -> Callable[[int], SendCommand]:
    """What makes the request out of its number.

    Raises:
        TypeError, ValueError: `head` is no number of a command, or `body` cannot travel as its text.
    """
    require_head(head)
    _require_body(body)
    return lambda number: SendCommand(number, head, body)


def _require_body(body: object) -> None:
    if not isinstance(body, str):
        raise TypeError(f"the body of a command is a str, not {type(body).__name__}; write numbers as JSON, say")
    try:
        nbytes = len(body.encode())
    except UnicodeEncodeError as error:
        raise ValueError(f"the body of a command cannot be written as UTF-8: {error}") from None
    if nbytes > DEFAULT.body_bytes_max:
        raise ValueError(
            f"the body of a command has {nbytes} bytes of UTF-8, where {DEFAULT.body_bytes_max} are allowed; put what"
            " is larger into a file, or into keys"
        )


def _name(function: Handler) -> str:
    return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', repr(function))}"
