"""A server's record of the other processes: which are live, on which host, and to which values cross a network.
Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from kvdist.config.endpoints import crosses_network
from kvdist.nodes import Member, Role, host_of
from kvdist.protocol import messages as msg


@dataclass(slots=True)
class Peers:
    """The newest roster, as all parts of a server read it. Only `Server` changes it."""

    name: str = "this server"
    """Name of this server, for messages."""
    workers: dict[int, Member] = field(default_factory=dict)
    """Rank → live worker."""
    awaited: set[int] = field(default_factory=set)
    """Ranks of the workers that rounds and checkpoints wait for: all but resting workers."""
    resting: set[int] = field(default_factory=set)
    newcomers: dict[int, Member] = field(default_factory=dict)
    """Rank → worker that no round waits for yet."""
    since: dict[int, int] = field(default_factory=dict)
    """Rank of a worker that has joined later → number of pushes of the others before it joined."""
    left: set[Member] = field(default_factory=set)
    """Workers that have left; their late messages are ignored."""
    lost: set[Member] = field(default_factory=set)
    """Lost workers; their messages are refused with the reason."""
    awaits_return: bool = False
    """Whether all wait for the return of lost workers."""
    away: set[int] = field(default_factory=set)
    """Ranks of the lost workers whose return is awaited."""
    owners: tuple[int, ...] = ()
    """Number of a server in the placement → rank of the server that has its slices; empty if no slices have moved."""
    far: set[Member] = field(default_factory=set)
    """Processes to which values cross a network."""
    _host_of: dict[Member, str] = field(default_factory=dict)
    """Worker → its host, departed workers included, as their pushes may come later."""

    def update(self, message: msg.Roster, endpoint: str) -> tuple[list[Member], dict[int, int]]:
        """Update the members from a roster.

        Args:
            message: the roster.
            endpoint: where this server listens.

        Returns:
            The workers that have left or are lost, by rank; and the workers that have become members after others,
            rank → version from which on rounds wait for them.
        """
        peers, members = message.peers, self.workers
        before = [*members.values(), *self.newcomers.values()]
        there = {peer.member.node.rank: peer.member for peer in peers if peer.member.node.role is Role.WORKER}
        self.newcomers = {rank: there.pop(rank) for rank in message.newcomers}
        self.workers = there
        self.since = {peer.member.node.rank: peer.since for peer in peers if 0 <= peer.since < msg.LATER}
        joined = {rank: since for rank, since in self.since.items() if members.get(rank) != there[rank]}
        self.away.difference_update(joined)
        self.owners = message.owners
        for peer in peers:
            host = host_of(peer.endpoint)
            if crosses_network(endpoint) and not (host and host == host_of(endpoint)):
                self.far.add(peer.member)
            if host and peer.member.node.role is Role.WORKER:
                self._host_of[peer.member] = host
        present = {*self.workers.values(), *self.newcomers.values()}
        gone = sorted(set(before) - present, key=lambda member: member.node.rank)
        lost = [member for member in gone if member in message.lost]
        self.away.update([member.node.rank for member in lost] if self.awaits_return else ())
        self.rest(set(message.resting))
        self.lost.update(message.lost)
        self.left.update(member for member in gone if member not in self.lost)
        return gone, joined

    def has(self, member: Member) -> bool:
        """Whether this worker, in this life, is live, as a member or as a newcomer."""
        rank = member.node.rank
        return self.workers.get(rank) == member or self.newcomers.get(rank) == member

    def rest(self, ranks: Set[int]) -> None:
        """Await all workers but these."""
        self.resting = set(ranks)
        self.awaited = (self.workers.keys() | self.away) - self.resting

    def are_neighbours(self, one: Member, other: Member) -> bool:
        """Whether a worker may bring contributions of another worker, perhaps a departed worker: of the same host."""
        return one == other or (one in self._host_of and self._host_of[one] == self._host_of.get(other))
