"""`Peers`: a worker's record of the other processes, from the newest roster and from its connections. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdist.config.endpoints import crosses_network
from kvdist.core import machine as fx
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.nodes import Member, Role
from kvdist.protocol import messages as msg

NEIGHBOUR_WAIT_S = 10.0
"""Time for the scheduler's verdict on a disconnected worker of this host, which may have left: its roster may be
late."""


@dataclass(slots=True, eq=False)
class Peers:
    """The other processes of a worker's cluster."""

    everyone: tuple[msg.Peer, ...] = ()
    """Live processes, this process among them."""
    servers: dict[int, Member] = field(default_factory=dict)
    """Number of a server in the placement → server that has its slices."""
    live_servers: set[Member] = field(default_factory=set)
    """Live servers."""
    workers: tuple[int, ...] = ()
    """Ranks of the live workers, without newcomers."""
    num_lost: int = 0
    """Number of workers that were lost."""
    on_loss: msg.OnLoss = msg.OnLoss.FAIL
    num_replicas: int = 0
    """Number of other servers with a copy of each slice."""
    _broken: dict[Member, tuple[float, str]] = field(default_factory=dict)
    """Member → (time at which its broken connection counts as lost, reason for the break)."""

    # Rosters.

    def roster(self, message: msg.Roster, everyone: tuple[msg.Peer, ...]) -> list[msg.Peer]:
        """Take over a roster. Returns the servers to dial."""
        self.num_lost += len(set(message.lost) & {peer.member for peer in self.everyone})
        self.everyone = everyone
        ranks = {peer.member.node.rank for peer in everyone if peer.member.node.role is Role.WORKER}
        self.workers = tuple(sorted(ranks - set(message.newcomers)))
        new = [peer for peer in self._live_servers() if peer.member not in self.live_servers]
        self.live_servers.update(peer.member for peer in new)
        return new

    def move(self, owners: Sequence[int]) -> list[tuple[int, Member | None, msg.Peer]]:
        """Return the numbers of the placement whose slices another server has now, with that server.

        Args:
            owners: rank of the server that has the slices of each number.

        Returns:
            (number, the server before, the server now) of each; None at the first roster.
        """
        live = {peer.member.node.rank: peer for peer in self._live_servers()}
        moved = [
            (number, self.servers.get(number), live[rank])
            for number, rank in enumerate(owners)
            if rank in live and self.servers.get(number) != live[rank].member
        ]
        self.servers.update({number: now.member for number, _, now in moved})
        return moved

    def pop_lost_servers(self) -> list[Member]:
        """Forget the dialled servers that are not live any more, and return them."""
        lost = self.live_servers - {peer.member for peer in self._live_servers()}
        self.live_servers -= lost
        for member in lost:
            self.forget_link(member)
        return sorted(lost, key=lambda member: member.incarnation)

    def pop_lost_owners(self) -> list[Member]:
        """Forget which slices the lost servers had, and return these servers."""
        live = {peer.member for peer in self._live_servers()}
        lost = {number: member for number, member in self.servers.items() if member not in live}
        for number in lost:
            del self.servers[number]
        return list(dict.fromkeys(lost.values()))

    def _live_servers(self) -> list[msg.Peer]:
        return [peer for peer in self.everyone if peer.member.node.role is Role.SERVER]

    # Connections.

    @property
    def next_lost_link(self) -> float:
        """Time at which the next broken connection counts as lost."""
        return min([due for due, _ in self._broken.values()]) if self._broken else fx.NEVER

    def disconnected(self, member: Member, due: float, reason: str) -> None:
        """Record a broken connection, which counts as lost from `due` on."""
        self._broken[member] = (due, reason)

    def connected(self, member: Member, scheduler_due: float) -> None:
        """Record a connection that works again. If it is the scheduler's, no other counts as lost before
        `scheduler_due`: the scheduler may have been away, and judges from now on."""
        self.forget_link(member)
        if member == SCHEDULER_MEMBER:
            self._broken = {one: (max(due, scheduler_due), reason) for one, (due, reason) in self._broken.items()}

    def forget_link(self, member: Member) -> None:
        """Forget that the connection to a process is broken."""
        self._broken.pop(member, None)

    def forget_links(self) -> None:
        """Forget all broken connections."""
        self._broken.clear()

    def lost_link(self, now: float) -> tuple[Member, str] | None:
        """Return a process whose connection counts as lost, and the reason; None if all others may come back.

        While the scheduler is away, it cannot judge, and only its connection can count as lost.
        """
        for member, (due, reason) in list(self._broken.items()):
            if now >= due and member != SCHEDULER_MEMBER and SCHEDULER_MEMBER in self._broken:
                self._broken[member] = (now + fx.VERDICT_WAIT_S, reason)
            elif now >= due:
                return member, reason
        return None

    # Names.

    def far_servers(self) -> set[Member]:
        """Return the servers that are reached over a network."""
        return {peer.member for peer in self._live_servers() if crosses_network(peer.endpoint)}

    def host(self, member: Member) -> str:
        """Return the host of a process, for messages."""
        return next((peer.host for peer in self.everyone if peer.member == member), "unknown host")

    def worker_name(self, rank: int) -> str:
        """Return the name of a worker with its host, for messages."""
        for peer in self.everyone:
            if peer.member.node.role is Role.WORKER and peer.member.node.rank == rank:
                return f"worker-{rank} ({peer.host})"
        return f"worker-{rank} (lost, its return is awaited)" if self.on_loss is msg.OnLoss.WAIT else f"worker-{rank}"
