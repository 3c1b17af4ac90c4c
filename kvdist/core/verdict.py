"""How the loss of a process is put into words, alike wherever it is raised."""

from __future__ import annotations

from kvdist.errors import PeerLostError
from kvdist.nodes import Member
from kvdist.protocol.messages import Abort


def lost(message: Abort) -> PeerLostError:
    """The scheduler's verdict as an exception."""
    step = None if message.step < 0 else message.step
    return PeerLostError(message.sentence, message.node, message.host, message.cause, step)


def scheduler_lost(endpoint: str, me: Member) -> PeerLostError:
    """The scheduler itself is gone; `me` noticed."""
    cause = "its connection closed and did not come back"
    return PeerLostError(f"scheduler (at {endpoint}) was lost: {cause}; noticed by {me}", "scheduler", endpoint, cause)
