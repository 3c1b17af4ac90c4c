"""Membership: the processes in the cluster. Only the scheduler changes it; servers and workers get rosters. Pure.

A process gets its rank once. The token of its hello identifies it, so a repeated hello gets the same answer. Once the
cluster is complete, its members change only as members leave or are *lost*, and as processes join late.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Set
from dataclasses import dataclass, replace
from functools import partial

from kvdist import errors
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.scheduler.views import Views
from kvdist.nodes import Member, NodeId, Role, server, worker
from kvdist.protocol import messages as msg
from kvdist.version import __version__


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Reason to suspect a silent member, and time at which it counts as lost."""

    due: float
    reason: str
    has_ended: bool
    """Whether the member's host closed the connection, as it does when a process ends."""


class Membership:
    """The members of a cluster.

    Args:
        config: settings, with the numbers of workers and servers.
        first_incarnation: incarnation of the first member.
    """

    def __init__(self, config: ClusterConfig, first_incarnation: int) -> None:
        self.peers: dict[NodeId, msg.Peer] = {}
        """Node id → process that has registered last; a process that has left keeps its rank."""
        self.awaited: dict[NodeId, Member] = {}
        """Live workers that take part, without newcomers and resting workers; agreements hold this very dict."""
        self.newcomers: dict[NodeId, Member] = {}
        """Workers that registered when the cluster was complete, until a cut makes them members."""
        self.since: dict[Member, int] = {}
        """Member that was a newcomer → pushes that the others had made before it joined."""
        self.hold = 0
        """Epoch of the first roster that lets servers make at most a version more; 0 if they may go on."""
        self.lives: dict[Member, int] = {}
        """Member → number of earlier starts of its rank, as reported in its hello."""
        self.resting: dict[NodeId, Member] = {}
        """Live workers without examples, which are not awaited."""
        self.members = ChainMap(self.awaited, self.resting)
        """Live workers by node id, including resting workers; a read-only view."""
        self.away: dict[NodeId, Member] = {}
        """Lost workers whose rejoin is awaited (``--on-loss wait``)."""
        self.changes = 0
        """Number of changes of `awaited`, `resting`, `newcomers`, `servers` and `left`."""
        self.quorum = (self.awaited, self.away)
        """Groups whose statements the agreements of workers need."""
        self.servers: dict[NodeId, Member] = {}
        self.views = Views(self.servers)
        self.owners = list(range(config.num_servers))
        """Number of a server in the placement → rank of the server that has its slices."""
        self._uncopied: dict[int, int] = {}
        """Rank of a server whose slices lack a copy → epoch of the first roster with that state."""
        self.left: set[NodeId] = set()
        """Members that have left: by a goodbye, by an ordered end, or because they were lost."""
        self.absent: set[NodeId] = set()
        """Workers whose processes ended well without having registered."""
        self.lost: dict[Member, str] = {}
        """Lost process → cause. Lost processes have left, too, but their messages are refused."""
        self._config = config
        self._started_on: dict[NodeId, str] = {}
        self._suspects: dict[Member, Suspicion] = {}
        self.unaccounted: dict[Member, None] = {}
        """Lost workers for whose pushes not all servers have accounted."""
        self.fates: dict[Member, tuple[msg.Fate, ...]] = {}
        """Lost worker → the account over all servers, until all servers know it."""
        self._ended: set[Member] = set()
        self._untold: dict[Member, None] = {}
        """Lost workers of whose ends not all servers know."""
        self._tokens: dict[int, Member] = {}
        self._next_incarnation = first_incarnation

    @property
    def epoch(self) -> int:
        """Number of the newest roster."""
        return self.views.epoch

    @property
    def awaits_return(self) -> bool:
        """Whether the cluster waits for the rejoin of lost workers."""
        return self._config.on_loss == "wait"

    # Joining.

    def known(self, stranger: Member, hello: msg.Hello) -> Member | None:
        """Return the member that a stranger became by an earlier hello with the same token, or None.

        Raises:
            ConfigError: the token belongs to a member with another role or rank, so to another process.
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
        """Assign a rank and an incarnation to a process.

        Raises:
            ConfigError: the process cannot have a rank; the message has the reason.
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
        # The slices of a new server have no copy yet, nor those of the server before it, whose backup it is.
        if is_late and role is Role.SERVER and self._config.replicas:
            self._uncopied |= dict.fromkeys((node.rank, self._rank_beside(node, -1)), self.epoch + 1)
        workers = self.newcomers if is_late else self.awaited
        (workers if role is Role.WORKER else self.servers)[node] = member
        self.changes += 1
        return member

    def make_member(self, member: Member, since: int) -> None:
        """Make a newcomer a member, as a cut lets rounds wait for it. The others had made `since` pushes before."""
        self.awaited[member.node] = self.newcomers.pop(member.node)
        self.since[member] = since
        self.changes += 1

    def roll_back(self, version: int) -> None:
        """Let all workers count as members from this version of a snapshot on, whenever they joined."""
        self.since = {member: min(since, version - 1) for member, since in self.since.items()}

    def joined_later(self, pushes: int) -> Set[Member]:
        """Return the workers that joined after at least this number of pushes of the others."""
        return {member for member, since in self.since.items() if since >= pushes}

    def is_live(self, node: NodeId) -> bool:
        """Return whether a worker of this rank is live, as a member or a newcomer."""
        return node in self.members or node in self.newcomers

    @property
    def is_complete(self) -> bool:
        """Whether all workers and servers have registered."""
        return len(self.peers) >= self._config.num_workers + self._config.num_servers

    def note_started(self, node: NodeId, host: str, pid: int) -> None:
        """Record that the launcher has started a process on a host."""
        self._started_on[node] = f" on {host} (pid {pid} was started there, no hello yet)"

    def missing(self) -> list[str]:
        """Return the processes that have not registered, with the hosts on which they were started."""
        wanted = [server(rank) for rank in range(self._config.num_servers)]
        wanted += [worker(rank) for rank in range(self._config.num_workers)]
        return [f"{node}{self._started_on.get(node, '')}" for node in wanted if node not in self.peers]

    def progress(self) -> str:
        """Explain how many processes have registered, and which are missing."""
        came = [sum(node.role is role for node in self.peers) for role in (Role.SERVER, Role.WORKER)]
        counts = f"{came[0]}/{self._config.num_servers} servers, {came[1]}/{self._config.num_workers} workers"
        return f"{counts}; waiting for {', '.join(self.missing())} to register"

    # Present members.

    def has(self, member: Member) -> bool:
        """Return whether this very process has its rank, live or left, and is not lost."""
        peer = self.peers.get(member.node)
        return peer is not None and peer.member == member and member not in self.lost

    @property
    def present(self) -> tuple[msg.Peer, ...]:
        """Processes that have not left."""
        return tuple(peer for node, peer in self.peers.items() if node not in self.left)

    @property
    def roster(self) -> msg.Roster:
        """Roster of the present epoch."""
        peers = tuple(replace(peer, since=self._since(peer.member)) for peer in self.present)
        owners = () if self.owners == sorted(set(self.owners)) else tuple(self.owners)
        fates = tuple(fate for fates in self.fates.values() for fate in fates)
        news = (tuple(self.unaccounted), tuple(self._untold), owners, fates)
        return msg.Roster(peers, self.epoch, *news, self.hold, tuple(sorted(node.rank for node in self.resting)))

    def _since(self, member: Member) -> int:
        """Return the version from which on rounds wait for a member; see `Peer.since`."""
        return msg.LATER if self.newcomers.get(member.node) == member else self.since.get(member, -1)

    # Leaving and losses.

    def leave(self, node: NodeId) -> None:
        """Record that a member has left. It keeps its rank."""
        self.left.add(node)
        self.changes += 1
        for live in (self.servers, self.awaited, self.resting, self.newcomers):
            member = live.pop(node, None)
            if member is not None:
                self._suspects.pop(member, None)
                self.since.pop(member, None)

    def rest(self, node: NodeId) -> bool:
        """Record that a worker has no examples, so is not awaited. Returns whether it was awaited."""
        member = self.awaited.pop(node, None)
        if member is not None:
            self.resting[node] = member
            self.changes += 1
        return member is not None

    def wake(self, node: NodeId) -> None:
        """Record that a resting worker has examples again, so is awaited."""
        member = self.resting.pop(node, None)
        if member is not None:
            self.awaited[node] = member
            self.changes += 1

    def lose(self, member: Member, cause: str, has_ended: bool) -> None:
        """Record the loss of a live worker, or of a server that may be lost. It may run on, unless `has_ended`."""
        self.leave(member.node)
        self.lost[member] = cause
        if member.node.role is Role.WORKER:  # rosters show the loss of a server by its absence
            self.unaccounted[member] = None
            self.away |= {member.node: member} if self.awaits_return else {}
        else:
            self.views.server_lost(member)
            if self._config.replicas:
                heir, rank = self._rank_beside(member.node, 1), member.node.rank
                self.owners = [heir if owner == rank else owner for owner in self.owners]
                self._uncopied |= dict.fromkeys((heir, self._rank_beside(member.node, -1)), self.epoch + 1)
        if has_ended:
            self.note_ended(member)

    def note_ended(self, member: Member) -> bool:
        """Record that the process of a lost member has ended. Returns whether that is news."""
        is_news = member not in self._ended
        self._ended.add(member)
        if is_news and member.node.role is Role.WORKER:
            self._untold[member] = None
            self.views.then(partial(self._tell, member))
        return is_news

    def _tell(self, member: Member) -> list[fx.Effect]:
        """Record that all servers know that a lost worker's process has ended."""
        del self._untold[member]
        return []

    # Servers with copies of each other's slices.

    def _rank_beside(self, server: NodeId, step: int) -> int:
        return (server.rank + step) % self._config.num_servers

    def backup_of(self, server: NodeId) -> Member | None:
        """Return the server with a copy, finished or not, of this server's slices: the next rank, if it is live."""
        backup = self.servers.get(NodeId(Role.SERVER, self._rank_beside(server, 1)))
        return backup if self._config.replicas else None

    def numbers_of(self, server: NodeId) -> list[int]:
        """Return the numbers in the placement whose slices this server has."""
        return [number for number, owner in enumerate(self.owners) if owner == server.rank]

    def may_lose(self, server: NodeId) -> bool:
        """Return whether no values are lost with this server: it has no slices, or all of them have a copy."""
        has_copy = self.backup_of(server) is not None and server.rank not in self._uncopied
        return self._config.replicas > 0 and (has_copy or not self.numbers_of(server))

    def copied(self, rank: int, epoch: int) -> bool:
        """Record that all slices that a server had in this epoch have a copy. Returns whether that is news."""
        if self._uncopied.get(rank, epoch + 1) > epoch:
            return False
        del self._uncopied[rank]
        return True

    @property
    def is_filling(self) -> bool:
        """Whether a server is sending missing slices to its backup."""
        backups = (self.backup_of(NodeId(Role.SERVER, rank)) for rank in self._uncopied if self._is_server(rank))
        return any(backups)

    def _is_server(self, rank: int) -> bool:
        return NodeId(Role.SERVER, rank) in self.servers

    @property
    def workers_counted(self) -> int:
        """Number of workers that are live or have finished well."""
        finished = [node for node in self.left if node.role is Role.WORKER and self.peers[node].member not in self.lost]
        return len(self.members) + len(finished)

    @property
    def workers_are_gone(self) -> bool:
        """Whether no worker is live, and none is expected."""
        if self.is_complete:
            return not (self.members or self.newcomers)
        return sum(node.role is Role.WORKER for node in self.left | self.absent) == self._config.num_workers

    @property
    def servers_are_gone(self) -> bool:
        """Whether every server has ended."""
        return sum(node.role is Role.SERVER for node in self.left) == self._config.num_servers

    def suspect(self, member: Member, due: float, reason: str, is_silent: bool = False) -> None:
        """Suspect a live member: it counts as lost at `due`, unless it comes back."""
        if self.has(member) and member.node not in self.left:
            self._suspects[member] = Suspicion(due, reason, not is_silent)

    def judge_silent(self, due: float) -> None:
        """Limit the time of all suspects to `due`: the cluster is complete now, and silence counts."""
        for member, suspicion in self._suspects.items():
            self._suspects[member] = replace(suspicion, due=min(suspicion.due, due))

    def trust(self, member: Member) -> None:
        """Drop the suspicion of a member that has come back."""
        self._suspects.pop(member, None)

    @property
    def next_loss(self) -> float:
        """Time at which the first suspect counts as lost, or NEVER."""
        return min((suspicion.due for suspicion in self._suspects.values()), default=fx.NEVER)

    def take_lost(self, now: float) -> tuple[Member, Suspicion] | None:
        """Remove and return a suspect whose time is over, with its suspicion; None if no suspect is due."""
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
        assert not self.awaited.keys() & self.newcomers.keys(), "a newcomer is no member yet"
        assert not self.since.keys() - set(self.members.values()), "who has joined later is there"
        live = self.awaited | self.resting | self.newcomers | self.servers
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
            count = config.loss_policy.most_workers
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
        """Return whether no process has had this rank, or the last process of it was lost."""
        taken = self.peers.get(node)
        return taken is None or taken.member in self.lost
