"""Who is in the cluster. Only the scheduler changes this; servers and workers get rosters of it. Pure.

A rank is given once, to a process that is known by the token of its hello, so a repeated hello gets the same answer.
The set is fixed once it is complete, but for members that leave, and for workers that are given up: those are *lost*.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Set
from dataclasses import dataclass, field, replace

from kvdist import errors
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.nodes import Member, NodeId, Role, server, worker
from kvdist.protocol import messages as msg
from kvdist.version import __version__


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Why a member that is not heard is suspected, and when it counts as lost."""

    due: float
    reason: str
    has_ended: bool
    """Whether its own host closed the connection, as it does when a process ends."""


@dataclass(frozen=True, slots=True)
class Untold:
    """The workers that the next roster says were given up, or have ended."""

    lost: set[int] = field(default_factory=set)
    ended: set[Member] = field(default_factory=set)


class Membership:
    """The members of one cluster.

    Args:
        config: how many there are to be.
        first_incarnation: where incarnations begin.
    """

    def __init__(self, config: ClusterConfig, first_incarnation: int) -> None:
        self.epoch = 0
        """How many rosters there have been."""
        self.peers: dict[NodeId, msg.Peer] = {}
        """All processes that have registered; a process that has left keeps its rank."""
        self.workers: dict[NodeId, Member] = {}
        """The live workers that take part, without newcomers and resting workers; agreements hold this very dict."""
        self.newcomers: dict[NodeId, Member] = {}
        """Workers that have come when the cluster was complete, until a cut makes members of them."""
        self.since: dict[Member, int] = {}
        """Workers that became members so → how many pushes the others had made that they had not."""
        self.lives: dict[Member, int] = {}
        """How often a process of its rank was started before each, as it says itself."""
        self.resting: dict[NodeId, Member] = {}
        """Live workers that have nothing to train on, so that nobody waits for them."""
        self.there = ChainMap(self.workers, self.resting)
        """The live workers by node id, resting ones included; a read-only view."""
        self.away: dict[NodeId, Member] = {}
        """Lost workers whose rejoin all wait for (``--on-loss wait``)."""
        self.changes = 0
        """Counts each change of `workers`, `resting` and `away`."""
        self.quorum = (self.workers, self.away)
        """The groups whose statements the agreements of workers need."""
        self.servers: dict[NodeId, Member] = {}
        self.owners = list(range(config.num_servers))
        """Number of a server, as placement names it → the rank of the one that has its slices."""
        self._uncopied: dict[int, int] = {}
        """Rank of a server of which not all has a copy → the first roster in which that is so."""
        self.left: set[NodeId] = set()
        """Workers that have said goodbye, and servers that have ended after they were told to."""
        self.absent: set[NodeId] = set()
        """Workers whose processes ended well without having registered."""
        self.lost: dict[Member, str] = {}
        """The processes that were given up, and why. They have left, too, but nobody listens to them any more."""
        self._config = config
        self._started_on: dict[NodeId, str] = {}
        self._suspects: dict[Member, Suspicion] = {}
        self._ended: set[Member] = set()
        self._untold = Untold()
        self._tokens: dict[int, Member] = {}
        self._next_incarnation = first_incarnation

    @property
    def waits(self) -> bool:
        """Whether all wait for lost workers."""
        return self._config.on_loss == "wait"

    # Joining.

    def known(self, stranger: Member, hello: msg.Hello) -> Member | None:
        """The member that this stranger has become before, if its hello is a repeated one.

        Raises:
            ConfigError: it has the token of a member, but another role or rank: it is another process.
        """
        member = self._tokens.get(stranger.incarnation)
        if member is None:
            return None
        role, rank = stranger.node.role, hello.wanted_rank
        if role is not member.node.role or (rank >= 0 and rank != member.node.rank):
            wanted = f"{role}-{rank}" if rank >= 0 else f"a {role}"
            raise errors.ConfigError(
                f"it wants to be {wanted}, with the token of {member.node}, which only {member.node} has: start it anew"
            )
        return member

    def admit(self, stranger: Member, hello: msg.Hello) -> Member:
        """Give a process its rank and incarnation.

        Raises:
            ConfigError: it cannot have one; the message says why.
        """
        role, is_late = stranger.node.role, self.is_complete
        node = self._rank_for(role, hello)
        member = Member(node, self._next_incarnation)
        self._next_incarnation += 1
        self._tokens[stranger.incarnation] = member
        self.peers[node] = msg.Peer(member, hello.host, hello.pid, hello.endpoint, hello.life)
        self.lives[member] = hello.life
        self.left.discard(node)
        self.away.pop(node, None)
        if is_late and role is Role.SERVER and self._config.replicas:  # the backup of the one before it, without a copy
            self._uncopied |= dict.fromkeys((node.rank, self._rank_beside(node, -1)), self.epoch + 1)
        workers = self.newcomers if is_late else self.workers
        (workers if role is Role.WORKER else self.servers)[node] = member
        self.changes += 1
        return member

    def make_member(self, member: Member, since: int) -> None:
        """A cut lets rounds wait for a newcomer."""
        self.workers[member.node] = self.newcomers.pop(member.node)
        self.since[member] = since
        self.changes += 1

    def go_back(self, version: int) -> None:
        """All workers stand after so many pushes now, whenever they have joined."""
        self.since = {member: min(since, version - 1) for member, since in self.since.items()}

    def joined_later(self, pushes: int) -> Set[Member]:
        """The workers that have joined later in the program than after so many pushes."""
        return {member for member, since in self.since.items() if since >= pushes}

    def is_there(self, node: NodeId) -> bool:
        """Whether a worker of this rank is there, as a member or a newcomer."""
        return node in self.there or node in self.newcomers

    @property
    def is_complete(self) -> bool:
        """Whether all have registered."""
        return len(self.peers) >= self._config.num_workers + self._config.num_servers

    def has_started(self, node: NodeId, host: str, pid: int) -> None:
        """The launcher has started a process there."""
        self._started_on[node] = f" on {host} (pid {pid} was started there, no hello yet)"

    def missing(self) -> list[str]:
        """The processes that have not registered, and where they were started."""
        wanted = [server(rank) for rank in range(self._config.num_servers)]
        wanted += [worker(rank) for rank in range(self._config.num_workers)]
        return [f"{node}{self._started_on.get(node, '')}" for node in wanted if node not in self.peers]

    def progress(self) -> str:
        """How many have registered, and who has not."""
        came = [sum(node.role is role for node in self.peers) for role in (Role.SERVER, Role.WORKER)]
        counts = f"{came[0]}/{self._config.num_servers} servers, {came[1]}/{self._config.num_workers} workers"
        return f"{counts}; waiting for {', '.join(self.missing())} to register"

    # Being there.

    def has(self, member: Member) -> bool:
        """Whether this very process has its rank, whether it has left or not; it has not if it was given up."""
        peer = self.peers.get(member.node)
        return peer is not None and peer.member == member and member not in self.lost

    @property
    def present(self) -> tuple[msg.Peer, ...]:
        """All that have not left."""
        return tuple(peer for node, peer in self.peers.items() if node not in self.left)

    def next_roster(self) -> msg.Roster:
        """Who is there now, in a new epoch."""
        self.epoch += 1
        told, self._untold = self._untold, Untold()
        return replace(self.roster, lost=tuple(sorted(told.lost)), ended=tuple(told.ended))

    @property
    def roster(self) -> msg.Roster:
        """Who is there now, for one that has heard nothing yet."""
        newcomers = tuple(sorted(node.rank for node in self.newcomers))
        is_moved = self.owners != sorted(set(self.owners))
        return msg.Roster(self.present, self.epoch, newcomers=newcomers, owners=tuple(self.owners) if is_moved else ())

    # Leaving and dying.

    def leave(self, node: NodeId) -> None:
        """A worker has said goodbye, or a server has ended after it was told to. Its rank stays its own."""
        self.left.add(node)
        self.changes += 1
        for live in (self.servers, self.workers, self.resting, self.newcomers):
            member = live.pop(node, None)
            if member is not None:
                self._suspects.pop(member, None)
                self.since.pop(member, None)

    def rest(self, node: NodeId) -> bool:
        """Record that a worker has nothing to train on, so nobody waits for it. Returns whether it was awaited."""
        member = self.workers.pop(node, None)
        if member is not None:
            self.resting[node] = member
            self.changes += 1
        return member is not None

    def wake(self, node: NodeId) -> None:
        """Record that a resting worker has something to train on again, so that the others wait for it."""
        member = self.resting.pop(node, None)
        if member is not None:
            self.workers[node] = member
            self.changes += 1

    def lose(self, member: Member, cause: str, has_ended: bool) -> None:
        """Give up a worker that is there, or a server that may be lost; it may go on, unless it has ended."""
        self.leave(member.node)
        self.lost[member] = cause
        if member.node.role is Role.WORKER:  # that a server is not there, rosters say as they are
            self._untold.lost.add(member.node.rank)
            self.away |= {member.node: member} if self.waits else {}
        elif self._config.replicas:
            heir, rank = self._rank_beside(member.node, 1), member.node.rank
            self.owners = [heir if owner == rank else owner for owner in self.owners]
            self._uncopied |= dict.fromkeys((heir, self._rank_beside(member.node, -1)), self.epoch + 1)
        if has_ended:
            self.has_ended(member)

    def has_ended(self, member: Member) -> bool:
        """Note that the process of a lost worker is no more; whether that is news."""
        is_news = member not in self._ended
        self._ended.add(member)
        if is_news and member.node.role is Role.WORKER:
            self._untold.ended.add(member)
        return is_news

    # Servers with copies of each other's slices.

    def _rank_beside(self, server: NodeId, step: int) -> int:
        return (server.rank + step) % self._config.num_servers

    def backup_of(self, server: NodeId) -> Member | None:
        """The server that keeps a copy of what this one has, or is getting it: the next one, if it is there."""
        backup = self.servers.get(NodeId(Role.SERVER, self._rank_beside(server, 1)))
        return backup if self._config.replicas else None

    def numbers_of(self, server: NodeId) -> list[int]:
        """The slices of which servers, as placement names them, this one has."""
        return [number for number, owner in enumerate(self.owners) if owner == server.rank]

    def may_lose(self, server: NodeId) -> bool:
        """Whether nothing is lost with this server: it has nothing, or there is a copy of all that it has."""
        has_copy = self.backup_of(server) is not None and server.rank not in self._uncopied
        return self._config.replicas > 0 and (has_copy or not self.numbers_of(server))

    def copied(self, rank: int, epoch: int) -> bool:
        """All that a server had in this roster has a copy; whether that is news."""
        if self._uncopied.get(rank, epoch + 1) > epoch:
            return False
        del self._uncopied[rank]
        return True

    @property
    def is_filling(self) -> bool:
        """Whether a server is giving its backup what that lacks."""
        backups = (self.backup_of(NodeId(Role.SERVER, rank)) for rank in self._uncopied if self._is_server(rank))
        return any(backups)

    def _is_server(self, rank: int) -> bool:
        return NodeId(Role.SERVER, rank) in self.servers

    @property
    def workers_counted(self) -> int:
        """How many workers are there or have finished well."""
        finished = [node for node in self.left if node.role is Role.WORKER and self.peers[node].member not in self.lost]
        return len(self.there) + len(finished)

    @property
    def workers_are_gone(self) -> bool:
        """Whether no worker is there, nor will come."""
        if self.is_complete:
            return not (self.there or self.newcomers)
        return sum(node.role is Role.WORKER for node in self.left | self.absent) == self._config.num_workers

    @property
    def servers_are_gone(self) -> bool:
        """Whether every server has ended."""
        return sum(node.role is Role.SERVER for node in self.left) == self._config.num_servers

    def suspect(self, member: Member, due: float, reason: str, after_silence: bool = False) -> None:
        """A member counts as lost at that time, unless it comes back; one that has left does not."""
        if self.has(member) and member.node not in self.left:
            self._suspects[member] = Suspicion(due, reason, not after_silence)

    def judge_silent(self, due: float) -> None:
        """All have registered now: those for whose return nobody was in a hurry before have until then."""
        for member, suspicion in self._suspects.items():
            self._suspects[member] = replace(suspicion, due=min(suspicion.due, due))

    def trust(self, member: Member) -> None:
        """A suspect has come back."""
        self._suspects.pop(member, None)

    @property
    def next_loss(self) -> float:
        """When the first suspect counts as lost, or NEVER."""
        return min((suspicion.due for suspicion in self._suspects.values()), default=fx.NEVER)

    def take_lost(self, now: float) -> tuple[Member, Suspicion] | None:
        """A suspect whose time is over, and why it was suspected."""
        for member, suspicion in self._suspects.items():
            if now >= suspicion.due:
                del self._suspects[member]
                return member, suspicion
        return None

    def validate(self) -> None:
        """Check every invariant."""
        incarnations = [peer.member.incarnation for peer in self.peers.values()]
        assert len(set(incarnations)) == len(incarnations), "an incarnation belongs to one process"
        for node, peer in self.peers.items():
            assert peer.member.node == node, "a process has its own rank"
        assert not self.workers.keys() & self.newcomers.keys(), "a newcomer is no member yet"
        assert not self.since.keys() - set(self.there.values()), "who has joined later is there"
        live = self.workers | self.resting | self.newcomers | self.servers
        assert live == {peer.member.node: peer.member for peer in self.present}, "a live member has not left"
        assert not self._suspects.keys() - set(live.values()), "only a live member is suspected"
        assert not self.lost.keys() & set(live.values()), "who was given up is not there"
        assert not self.away.keys() & live.keys(), "who has come back is not away"

    def _rank_for(self, role: Role, hello: msg.Hello) -> NodeId:
        config = self._config
        if hello.version != __version__:
            raise errors.ConfigError(
                f"it runs kvdist {hello.version}, the scheduler {__version__}: install the same on every machine"
            )
        if (hello.num_workers, hello.num_servers) != (config.num_workers, config.num_servers):
            raise errors.ConfigError(
                f"it expects {hello.num_workers} worker(s) and {hello.num_servers} server(s), the scheduler"
                f" {config.num_workers} and {config.num_servers}: DMLC_NUM_WORKER and DMLC_NUM_SERVER must agree"
            )
        count = config.num_workers if role is Role.WORKER else config.num_servers
        if role is Role.WORKER and self.is_complete:
            count = config.most_workers
        if hello.wanted_rank >= count:
            raise errors.ConfigError(f"it asks for rank {hello.wanted_rank}, but there are only {count} {role}(s)")
        if hello.wanted_rank < 0:
            free = [rank for rank in range(count) if self._is_free(NodeId(role, rank))]
            if not free:
                raise errors.ConfigError(f"the cluster has its {count} {role}(s) already")
            return NodeId(role, free[0])
        node = NodeId(role, hello.wanted_rank)
        if not self._is_free(node):
            taken = self.peers[node]
            raise errors.ConfigError(
                f"{taken.member} is taken by process {taken.pid} on {taken.host}; process {hello.pid} on {hello.host}"
                " claims the same rank: each process needs a different KVDIST_RANK"
            )
        return node

    def _is_free(self, node: NodeId) -> bool:
        """Whether nobody has had this rank, or who had it was given up."""
        taken = self.peers.get(node)
        return taken is None or taken.member in self.lost
