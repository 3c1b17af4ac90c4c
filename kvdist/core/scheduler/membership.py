"""Who sits where: the scheduler's list of processes, by role and rank.

A seat is given once. A process is known by the token of its hello, so a repeated hello gets the same answer.
"""

from __future__ import annotations

from collections import Counter

from kvdist.config.settings import ClusterConfig
from kvdist.errors import ConfigError
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol.messages import Hello, Peer
from kvdist.version import __version__


class Seats:
    """The seats of one cluster.

    Args:
        config: how many there are.
        first_incarnation: where incarnations begin.
    """

    def __init__(self, config: ClusterConfig, first_incarnation: int) -> None:
        self._config = config
        self.peers: dict[NodeId, Peer] = {}
        self.left: set[NodeId] = set()
        """Workers that said goodbye; their seats stay theirs."""
        self.places: dict[NodeId, str] = {}
        """Where the launcher has started whom, for people."""
        self._tokens: dict[int, Member] = {}
        self._next_incarnation = first_incarnation

    def known(self, stranger: Member, hello: Hello) -> Member | None:
        """The member that this stranger became before, if its hello is a repeated one.

        Raises:
            ConfigError: it has the token of a member, but another role or rank: it is somebody else.
        """
        member = self._tokens.get(stranger.incarnation)
        if member is None:
            return None
        role, rank = stranger.node.role, hello.wanted_rank
        if role is not member.node.role or (rank >= 0 and rank != member.node.rank):
            wanted = f"{role}-{rank}" if rank >= 0 else f"a {role}"
            raise ConfigError(
                f"it wants to be {wanted}, with the token of {member.node}, which only {member.node} has: start it anew"
            )
        return member

    def give(self, stranger: Member, hello: Hello) -> Member:
        """Seat a process.

        Raises:
            ConfigError: there is no seat for it; the message says why.
        """
        role = stranger.node.role
        self._check(role, hello)
        rank = hello.wanted_rank if hello.wanted_rank >= 0 else self._free_rank(role)
        member = Member(NodeId(role, rank), self._next_incarnation)
        self._next_incarnation += 1
        self._tokens[stranger.incarnation] = member
        self.peers[member.node] = Peer(member, hello.host, hello.pid, hello.endpoint)
        return member

    def holds(self, member: Member) -> bool:
        """Whether this very process sits in its seat."""
        peer = self.peers.get(member.node)
        return peer is not None and peer.member == member

    @property
    def all_taken(self) -> bool:
        """Whether everybody has come."""
        return len(self.peers) == self._config.num_workers + self._config.num_servers

    @property
    def workers(self) -> dict[int, Member]:
        """Rank → the worker there, of those who have not left."""
        return {
            node.rank: peer.member
            for node, peer in self.peers.items()
            if node.role is Role.WORKER and node not in self.left
        }

    @property
    def servers(self) -> list[Member]:
        """The servers, by rank."""
        servers = [peer.member for node, peer in self.peers.items() if node.role is Role.SERVER]
        return sorted(servers, key=lambda member: member.node.rank)

    @property
    def present(self) -> tuple[Peer, ...]:
        """Everybody who has not left."""
        return tuple(peer for node, peer in self.peers.items() if node not in self.left)

    def roster(self) -> str:
        """How many have come, who has not, and what is known of those."""
        came = Counter(node.role for node in self.peers)
        config = self._config
        counts = f"{came[Role.SERVER]}/{config.num_servers} servers, {came[Role.WORKER]}/{config.num_workers} workers"
        return f"{counts}; waiting for {', '.join(self.missing())} to register"

    def missing(self) -> list[str]:
        """The names of those who have not come, and where they were started."""
        wanted = [NodeId(Role.SERVER, rank) for rank in range(self._config.num_servers)]
        wanted += [NodeId(Role.WORKER, rank) for rank in range(self._config.num_workers)]
        return [f"{node}{self.places.get(node, '')}" for node in wanted if node not in self.peers]

    def validate(self) -> None:
        """Check every invariant."""
        incarnations = [peer.member.incarnation for peer in self.peers.values()]
        assert len(set(incarnations)) == len(incarnations), "an incarnation belongs to one process"
        for node, peer in self.peers.items():
            assert peer.member.node == node, "a process sits in its own seat"

    def _check(self, role: Role, hello: Hello) -> None:
        config = self._config
        if hello.version != __version__:
            raise ConfigError(
                f"it runs kvdist {hello.version}, the scheduler {__version__}: install the same on every machine"
            )
        if (hello.num_workers, hello.num_servers) != (config.num_workers, config.num_servers):
            raise ConfigError(
                f"it was told of {hello.num_workers} worker(s) and {hello.num_servers} server(s), the scheduler of"
                f" {config.num_workers} and {config.num_servers}: DMLC_NUM_WORKER and DMLC_NUM_SERVER must agree"
            )
        count = config.num_workers if role is Role.WORKER else config.num_servers
        if hello.wanted_rank >= count:
            raise ConfigError(f"it asks for rank {hello.wanted_rank}, but there are only {count} {role}(s)")
        if hello.wanted_rank < 0:
            if self._free_rank(role) >= count:
                raise ConfigError(f"the cluster has its {count} {role}(s) already")
            return
        taken = self.peers.get(NodeId(role, hello.wanted_rank))
        if taken is not None:
            raise ConfigError(
                f"{taken.member} is taken by process {taken.pid} on {taken.host}; process {hello.pid} on"
                f" {hello.host} claims the same rank: each needs a KVDIST_RANK of its own"
            )

    def _free_rank(self, role: Role) -> int:
        rank = 0
        while NodeId(role, rank) in self.peers:
            rank += 1
        return rank
