"""A rollback on a worker: a server was lost, and all go back to a snapshot. Pure.

The worker drops its requests to servers and to other workers, and reports to the scheduler when nothing is in flight.
Then every server reports the versions of its slices; until all have, new calls of the user are queued. A call before
the user knows of the rollback fails, so no gradient of dropped weights is pushed.
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
"""Requests in which servers or all other workers take part. Other requests stay open at the scheduler, or concern this
worker alone."""


@dataclass(slots=True)
class Rewinding:
    """A rollback under way on a worker."""

    number: int
    """Number of the rollback, from the scheduler."""
    step: int
    """Step of the snapshot."""
    is_quiet: bool = False
    """Whether nothing from before the rollback is in flight, and the scheduler knows."""
    told: set[Member] = field(default_factory=set)
    """Servers that have rolled back."""
    queued: list[req.Request] = field(default_factory=list)
    """Calls of the user that wait until all servers have rolled back."""
