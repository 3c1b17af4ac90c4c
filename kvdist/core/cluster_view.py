"""The cluster as threads of the user may know it: a record that never changes.

`Node` publishes a new record when the cluster changes, and the user's threads read the newest. They never look into a
machine, which belongs to the node's thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdist.core.worker import requests as req
from kvdist.nodes import Member
from kvdist.protocol import messages as msg


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The cluster as a process sees it. Servers are named by their ranks.

    me: this process; its rank is `UNRANKED` until the scheduler has assigned a rank.
    epoch: number of the newest roster.
    sharing: servers that read this process's shared memory, so that its content is not sent to them.
    far: servers whose addresses lie across a network.
    summed: servers to which large slices go as a sum of this host.
    summed_small: the same for small slices.
    leader_shares: whether another worker sums for this process, and reads its shared memory.
    members: ranks of the live workers, in order.
    on_loss: what follows when a worker is lost.
    lost: number of workers that were lost.
    """

    me: Member
    epoch: int = 0
    sharing: frozenset[int] = frozenset()
    far: frozenset[int] = frozenset()
    summed: frozenset[int] = frozenset()
    summed_small: frozenset[int] = frozenset()
    leader_shares: bool = False
    members: tuple[int, ...] = ()
    on_loss: msg.OnLoss = msg.OnLoss.FAIL
    lost: int = 0

    def shares_memory(self, server: int) -> bool:
        """Whether this server reads this process's shared memory."""
        return server in self.sharing

    def is_far(self, server: int) -> bool:
        """Whether messages to this server cross a network."""
        return server in self.far and server not in self.sharing

    def reads_pushes(self, run: req.RunPlan) -> bool:
        """Whether a push of this run is read in place: by its server, or by the worker that sums for this host."""
        is_large = len(run.ids) == 1 and req.travels_alone(run.nbytes)
        is_summed = run.server in (self.summed if is_large else self.summed_small)
        return self.leader_shares if is_summed else run.server in self.sharing

    def shows_results(self, server: int) -> bool:
        """Whether this server answers a push itself, by values that can be read in place."""
        return server in self.sharing and server not in self.summed
