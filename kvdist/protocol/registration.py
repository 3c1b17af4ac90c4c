"""How a process comes into a cluster: messages as those of `kvdist.protocol.messages`, which are spoken first.

Hello, Welcome and Rejected are exchanged before there are sequence numbers, hence idempotent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvdist.nodes import Member


@dataclass(frozen=True, slots=True)
class Hello:
    """Process → scheduler: here I am. Repeated until answered; the stamp's incarnation is the process's token."""

    KIND: ClassVar[int] = 1
    SEQUENCED: ClassVar[bool] = False
    wanted_rank: int
    """The rank asked for, or -1."""
    host: str
    pid: int
    endpoint: str
    """Where a server accepts workers, or a worker the others of its host; empty for a worker that sums alone."""
    num_workers: int
    num_servers: int
    version: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Scheduler → process: your rank and incarnation."""

    KIND: ClassVar[int] = 2
    SEQUENCED: ClassVar[bool] = False
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Anybody → a process that may not take part: why not. Final."""

    KIND: ClassVar[int] = 3
    SEQUENCED: ClassVar[bool] = False
    reason: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of the roster."""

    member: Member
    host: str
    pid: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class Roster:
    """Scheduler → all: who is in the cluster now. The first one says that it is complete."""

    KIND: ClassVar[int] = 4
    SEQUENCED: ClassVar[bool] = True
    peers: tuple[Peer, ...]
