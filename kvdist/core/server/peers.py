"""What a server knows of the other processes: who is alive, on which host, and to whom values cross a network. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvdist.config.endpoints import crosses_network
from kvdist.nodes import Member, Role, host_of
from kvdist.protocol.messages import Peer


@dataclass(slots=True)
class Peers:
    """The newest roster, as all parts of a server read it. Only `Server` changes it."""

    name: str = "this server"
    """Of this server, for messages."""
    workers: dict[int, Member] = field(default_factory=dict)
    """Rank → the live worker there."""
    left: set[Member] = field(default_factory=set)
    """Workers that have left; their late messages are ignored."""
    lost: set[Member] = field(default_factory=set)
    """Workers that were given up; they are told so."""
    far: set[Member] = field(default_factory=set)
    """The processes to which values cross a network."""
    _host_of: dict[Member, str] = field(default_factory=dict)
    _on_host: dict[str, dict[int, Member]] = field(default_factory=dict)
    """Host → rank → worker, departed ones included: their pushes may arrive after they have left."""

    def update(self, peers: Sequence[Peer], lost: Sequence[int], endpoint: str) -> list[Member]:
        """Take a roster.

        Args:
            peers: all live processes.
            lost: the ranks of those that were there, and were given up.
            endpoint: where this server listens.

        Returns:
            The workers that are gone, by rank: they have left, or are `lost`.
        """
        before = self.workers
        self.workers = {peer.member.node.rank: peer.member for peer in peers if peer.member.node.role is Role.WORKER}
        for peer in peers:
            host = host_of(peer.endpoint)
            if crosses_network(endpoint) and not (host and host == host_of(endpoint)):
                self.far.add(peer.member)
            if host and peer.member.node.role is Role.WORKER:
                self._host_of[peer.member] = host
                self._on_host.setdefault(host, {})[peer.member.node.rank] = peer.member
        gone = [member for rank, member in sorted(before.items()) if self.workers.get(rank) != member]
        self.lost.update(member for member in gone if member.node.rank in lost)
        self.left.update(member for member in gone if member not in self.lost)
        return gone

    def neighbours_of(self, worker: Member) -> dict[int, Member]:
        """Rank → the workers whose contributions a worker may bring: those of its host, departed ones included."""
        return self._on_host.get(self._host_of.get(worker, ""), {worker.node.rank: worker})
