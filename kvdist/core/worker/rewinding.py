"""A worker on its way back to a snapshot, because a server was lost: what it drops, and what it holds back. Pure.

It drops all that it has asked of servers and of other workers, and tells the scheduler when nothing of that is under
way any more. Then every server says where it stands now. Until all have, calls of the user are held back. Everything
that was called before the user knows of this fails, so that nobody pushes what was made of weights that are no more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from kvdist.core.worker import requests as req
from kvdist.nodes import Member
from kvdist.protocol import messages as msg

DROPPED = (
    req.Transfer,
    req.EnterBarrier,
    req.ClaimFolder,
    req.SaveStore,
    req.LoadStore,
    req.ReportProgress,
    msg.Lease,
    msg.Used,
)
"""What is done together with servers or all other workers. What is left is said again, or concerns nobody else."""


@dataclass(slots=True)
class Rewinding:
    """The way back of one worker."""

    number: int
    """Of the scheduler's message."""
    step: int
    """Of the snapshot."""
    is_quiet: bool = False
    """Nothing of before is under way, and the scheduler knows."""
    told: set[Member] = field(default_factory=set)
    """The servers that have gone back."""
    queued: list[req.Request] = field(default_factory=list)
