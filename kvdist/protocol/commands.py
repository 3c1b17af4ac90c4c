"""Commands to servers: messages as those of `kvdist.protocol.messages`.

A command names a handler by a number and gives it a text. Which handlers there are, whoever started a server has
chosen; a message cannot add one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

HEAD_OF_USERS_MAX = (1 << 31) - 1
"""Numbers above it are those of kvdist itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """Worker → scheduler: let every server run the handler `head` with `body`, and say when all have."""

    KIND: ClassVar[int] = 50
    SEQUENCED: ClassVar[bool] = True
    request: int
    head: int
    body: str


@dataclass(frozen=True, slots=True)
class Perform:
    """Scheduler → server: run the handler `head` with `body`."""

    KIND: ClassVar[int] = 51
    SEQUENCED: ClassVar[bool] = True
    request: int
    head: int
    body: str
