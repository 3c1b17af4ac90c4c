"""`Quotas`: when workers push, where a policy counts their examples. Pure.

One server counts for all: the one with the slice that the workers name, so no other has to know. What it says is only
*when* each worker makes its next push, a mean of what it has by then. A version is still made of one push of every
worker, so all slices agree on what is in it, and what is lost, repeated or rolled back is treated as ever. Rules here:

* Reports say how much there is since the last push, not how much more, so one that is repeated changes nothing.
* A worker that has pushed for the n-th time has heard that it was due. So a server that knows nothing, as it has the
  slices of a lost one, learns from the newest report of each worker what that one had said. Of a worker that has joined
  later, only from its second push on.
"""

from __future__ import annotations

from kvdist.core.machine import Effect, Send
from kvdist.core.server.peers import Peers
from kvdist.nodes import Member
from kvdist.protocol.messages import Due, Progress


class Quotas:
    """What the workers have said of their progress, and what they were told.

    Args:
        peers: who is there.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._said: dict[int, dict[Member, Progress]] = {}
        """Slice → the newest report of each worker."""
        self._due: dict[int, Due] = {}
        """Slice → what all were told last."""

    def heard(self, sender: Member, message: Progress) -> list[Effect]:
        """A worker reports."""
        self._said.setdefault(message.slice, {})[sender] = message
        due = self._due.get(message.slice)
        if due is not None and message.step <= due.step:
            return [Send(sender, due)]
        return self._look(message.slice)

    def roster(self) -> list[Effect]:
        """Others are there, or rest."""
        for number, said in self._said.items():
            self._said[number] = {one: report for one, report in said.items() if self._peers.has(one)}
        return [effect for number in self._said for effect in self._look(number)]

    def clear(self) -> None:
        """All have gone back to a snapshot."""
        self._said.clear()
        self._due.clear()

    def _look(self, number: int) -> list[Effect]:
        """Say whether the next push of a slice is due."""
        said, told = self._said[number], self._due.get(number)
        if not said:
            return []
        since = self._peers.since
        pushed = [report.step for one, report in said.items() if report.step > since.get(one.node.rank, 0)]
        open_ = max(-1 if told is None else told.step + 1, min(report.step for report in said.values()), *pushed, 0)
        reports = {one.node.rank: report for one, report in said.items() if report.step == open_}
        awaited = {rank for rank in self._peers.awaited if since.get(rank, 0) <= open_}
        together = awaited <= {rank for rank, report in reports.items() if report.together}
        made = sum(report.samples for report in reports.values())
        if any(together or report.now or made >= report.quota for report in reports.values()):
            return self._tell(Due(number, open_, together))
        if any(report.step < open_ for report in said.values()) and (told is None or told.step < open_ - 1):
            return self._tell(Due(number, open_ - 1, False))
        return []

    def _tell(self, due: Due) -> list[Effect]:
        self._due[due.slice] = due
        return [Send(member, due) for member in self._peers.workers.values()]
