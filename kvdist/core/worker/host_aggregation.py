"""Host aggregation: the workers of a host sum their pushes before they cross the network. Pure.

Every worker learns from the first roster which workers share its host, and which servers are elsewhere. The worker with
the lowest rank is the *leader*; the others, its *followers*, send their pushes to it instead of the server, and get the
replies from it. Pulls and first values go to the servers. Invariants:

* A slice is forwarded when every live worker of the host has contributed, and never before, so a forwarded push never
  makes a server wait for a worker of this host. An incomplete slice is *handed back* after a while: each worker sends
  its contribution itself, and the server knows which are late. The leader never hands a forwarded slice back.
* Contributions that agree in settings and flags, and in samples if samples weigh, are summed in rank order. The sum
  replaces the contribution of the lowest rank with a gradient, and carries the list of the pushes in it. Contributions
  that do not agree with that rank's are handed back. Half precision goes to the servers: the sum of a host could round
  or overflow where that of all workers does not.
* When the leader leaves, its followers push to the servers again. A server recognises by the push counter what it has.
* When a worker is lost, servers count nothing of a sum that it is in, as a sum cannot be split: they hand it back, and
  each of the other workers sends its contribution itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.round import Contribution, numbers_of, setting_of
from kvdist.core.server.buffers import Allocate, ordinary_memory
from kvdist.core.worker import requests as req
from kvdist.core.worker.transfers import LEADER, Transfers, push_of
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member, Role, host_of
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U32, Arrays, Bits, PayloadView, offsets

_HOLD, _WEIGHTED = int(msg.Flag.HOLD), int(msg.Flag.WEIGHTED)
_NO_VALUES = np.zeros(0, np.uint8)


class HostAggregation:
    """A worker's part in the sums of its host.

    Args:
        setting: ``off``, ``auto`` (large slices that go to servers elsewhere are summed first) or ``on`` (all slices).
        limits: sizes and times.
        allocate: allocates memory for sums, and for values to forward to other workers.
        kernels: the backend for sums.
    """

    def __init__(
        self, setting: str, limits: Limits, allocate: Allocate = ordinary_memory, kernels: Kernels = REFERENCE
    ) -> None:
        self.leader: Member | None = None
        """The worker that pushes for this host; None when every worker pushes for itself."""
        self.members: dict[int, Member] = {}
        """Rank → live worker of this host, this worker among them."""
        self.servers: frozenset[int] = frozenset()
        """The ranks of the servers to which the leader pushes."""
        self._me: Member | None = None
        self._setting = setting
        self._limits = limits
        self._kernels = kernels
        self._allocate = allocate
        self._met: set[Member] = set()
        """Every worker that has ever been a member."""
        self._rounds: HostRounds | None = None
        """The leader's rounds; None on other workers."""
        self._forwarded: dict[int, HostRound] = {}
        """Slice → its round until the sum is counted: a server of this host reads the sum in place, even after it has
        acknowledged the message, so the memory must not be used again."""
        self._unarrived: Counter[int] = Counter()
        """Worker rank → sums with its contributions that no server has acknowledged."""
        self._leaving: dict[Member, int] = {}
        """Follower that wants to leave → its request."""
        self._goodbye_said = False
        self._may_leave = False

    def attach(self, transfers: Transfers) -> None:
        """Use the transfers of the worker; to be called before anything else."""
        self._transfers = transfers

    @property
    def leads(self) -> bool:
        """Whether this worker pushes for its host."""
        return self._rounds is not None

    @property
    def follows(self) -> bool:
        """Whether another worker pushes for this worker."""
        return self.leader is not None and self._rounds is None

    def aggregates(self, server: int, nbytes: int) -> bool:
        """Whether pushes of a slice of this size to this server are summed on this host first.

        By default small slices are not: their bytes are few, and a server applies many of them in a round.
        """
        return server in self.servers and (self._setting == "on" or req.travels_alone(nbytes))

    def is_member(self, source: Member) -> bool:
        """Whether messages of this worker are accepted: the leader accepts those of its host, followers those of the
        leader."""
        if self.leads:
            return source != self._me and self.members.get(source.node.rank) == source
        return self.follows and source == self.leader

    def has_left(self, source: Member) -> bool:
        """Whether this worker was once a member; late messages of it are ignored."""
        return source in self._met

    # The roster.

    def roster(self, me: Member, peers: Sequence[msg.Peer]) -> list[fx.Effect]:
        """Handle a roster: `peers` are the live processes of the cluster."""
        if self._me is None:
            self._me = me
            return self._meet(peers)
        alive = {peer.member for peer in peers}
        gone = [member for member in self.members.values() if member not in alive]
        if not gone or self.leader is None:
            return []
        self.members = {rank: member for rank, member in self.members.items() if member in alive}
        heard = gone if self._rounds is not None else [member for member in gone if member == self.leader]
        if self._rounds is not None:
            self._rounds.set_members(self.members)
            for member in gone:
                self._leaving.pop(member, None)
            if len(self.members) == 1:
                self._rounds.end()
        elif heard:
            self.leader = None
            self._transfers.reclaim()
        return [fx.Forget(member) for member in heard]

    def _meet(self, peers: Sequence[msg.Peer]) -> list[fx.Effect]:
        me = self._me
        assert me is not None
        hosts = {peer.member: host_of(peer.endpoint) for peer in peers}
        mine = hosts.get(me, "")
        workers = {
            member.node.rank: member
            for member, host in hosts.items()
            if member.node.role is Role.WORKER and host == mine
        }
        if self._setting == "off" or not mine or len(workers) < 2:
            return []
        servers = [member for member in hosts if member.node.role is Role.SERVER]
        self.servers = frozenset(
            member.node.rank for member in servers if self._setting == "on" or hosts[member] != mine
        )
        self.members = workers
        self._met = set(workers.values())
        leader = workers[min(workers)]
        if leader == me:
            # The leader accepts messages of the others even if it does not sum: their settings may differ.
            self._lead(me)
        elif self.servers:
            self.leader = leader
            self._transfers.add_server(LEADER, is_near=True)
            endpoint = next(peer.endpoint for peer in peers if peer.member == leader)
            return [fx.Connect(leader, endpoint)]
        return []

    def _lead(self, me: Member) -> None:
        self.leader = me
        self._rounds = HostRounds(me, self.members, self._limits.explain_after_s / 2)
        if not self.servers:
            self._rounds.end()

    # Sending.

    def flush(self, now: float) -> list[fx.Effect]:
        """Send everything that may leave: to the leader, forwarded, or handed back."""
        for part in self._transfers.take_aggregated():
            if self._rounds is not None:
                self._rounds.offer(self._rounds.me, push_of(part), now)
            elif self.leader is not None:
                self._transfers.delegate(part)
            else:
                self._transfers.send_directly(part)
        return [] if self._rounds is None else self._forward(self._rounds)

    def _forward(self, host_rounds: HostRounds) -> list[fx.Effect]:
        if not (host_rounds.full or host_rounds.back):
            return self._farewells()  # asked at each message of this worker
        rounds, host_rounds.full = host_rounds.full, []
        for host_round in rounds:
            own = self._transfers.run(host_round.shares[host_rounds.me.node.rank].run)
            host_rounds.hand_back_apart(host_round, own.plan)
            if host_round.shares:
                run = self._summed(host_round, own)
                self._unarrived.update([one.rank for one in run.contributors])
                self._forwarded[host_round.number] = host_round
                self._transfers.send_directly(req.RunPart(run))
        back, host_rounds.back = host_rounds.back, {}
        effects: list[fx.Effect] = []
        for member, slices in back.items():
            runs, ids = zip(*sorted(slices), strict=True)
            message = msg.HandedBack(_u32(runs), _u32(ids))
            if member == host_rounds.me:
                self._transfers.handed_back(message)
            else:
                effects.append(fx.Send(member, message))
        return effects + self._farewells()

    def _summed(self, host_round: HostRound, own: req.Run) -> req.Run:
        """Return the sum of a host as a run to send, by a single pass over the contributions; the answer goes to the
        run `own`."""
        shares = host_round.in_order()
        first, arrays = shares[0], [share.values for share in shares if not share.is_empty]
        plan = own.plan.alone(host_round.number)
        if arrays:
            dtype, nbytes = DType(int(plan.dtypes[0])), arrays[0].nbytes
            memory = host_round.memory = self._allocate(plan.nbytes)
            self._kernels.weighted_sum(arrays, [1.0] * len(arrays), dtype, memory[:nbytes].view(dtype.storage))
            memory[nbytes:] = 0
            self._transfers.traffic.summed += len(arrays) * nbytes
        payload = None if host_round.memory is None else host_round.memory.data
        run = req.Run(plan, payload, flags=np.array([first.flags], np.uint8), settings=(numbers_of(first.setting),))
        run.contributors = tuple([share.contributor for share in shares])
        run.number, run.priority = own.number, own.priority
        run.kind = req.RunKind.PUSHPULL if any(share.pull for share in shares) else req.RunKind.PUSH
        run.steps, run.versions = _u32([first.step]), _u32([min(share.version for share in shares)])
        for share in shares:
            share.values = _NO_VALUES  # the memory of the others is free again once this is counted
        return run

    def arrived(self, contributors: Sequence[msg.Contributor]) -> None:
        """Note that a server has received sums with these contributions."""
        self._unarrived.subtract([one.rank for one in contributors])

    # Messages of the others.

    def handle(self, sender: Member, message: msg.Message, now: float) -> None:
        """Handle a message of another worker of this host."""
        match message:
            case msg.Push() if self._rounds is not None:
                self._rounds.offer(sender, message, now)
            case msg.HandedBack():
                self._transfers.handed_back(message)
            case msg.Goodbye(request=0) if self._rounds is not None:
                self._rounds.rest(sender)
            case msg.Goodbye() if self._rounds is not None:  # a follower wants to leave: finish what it contributed to
                self._leaving[sender] = message.request
                self._rounds.hand_back_of(sender)
            case msg.Done():  # the servers have all contributions of this follower
                self._may_leave = True
            case _:
                pass

    def _farewells(self) -> list[fx.Effect]:
        ready = [member for member in self._leaving if not self._unarrived[member.node.rank]]
        return [fx.Send(member, msg.Done(self._leaving.pop(member))) for member in ready]

    # Leaving.

    def leave(self, request: int) -> list[fx.Effect]:
        """Leave the host, once everything pushed has been received by servers or the leader.

        The leader hands back incomplete slices; a follower asks the leader to.
        """
        if self._rounds is not None or self.leader is None:
            self._may_leave = True
        elif not self._goodbye_said:
            self._goodbye_said = True
            return [fx.Send(self.leader, msg.Goodbye(request, ""))]
        return []

    def rest(self) -> list[fx.Effect]:
        """Pause pushing: the others of this host do not wait until this worker pushes again."""
        if self._rounds is not None:
            self._rounds.rest(self._rounds.me)
        elif self.leader is not None:
            return [fx.Send(self.leader, msg.Goodbye(0, ""))]
        return []

    def stop_leading(self) -> None:
        """Let every worker push for itself: the user of the leader has closed its store."""
        if self._rounds is not None:
            self._rounds.end()

    @property
    def may_leave(self) -> bool:
        """Whether no worker of this host needs this worker, or has contributions of it."""
        return self._may_leave or (self.leader is None)

    # Replies.

    def pass_on(self, message: msg.Values | msg.Counted | msg.Refused) -> list[fx.Effect]:
        """The replies for followers that result from a server's reply to this leader."""
        if not self._forwarded:
            return []
        told: dict[tuple[Member, bool], list[tuple[int, int]]] = {}
        for begin, end in self._transfers.pushed_stretches(message.runs):
            for position, number in enumerate(message.ids[begin:end].tolist(), begin):
                for share in self._followers_in(number):
                    told.setdefault((share.member, share.pull), []).append((position, share.run))
        return self._told(message, told)

    def handed_back(self, message: msg.HandedBack) -> None:
        """Hand back slices of sums that a server has dropped: every worker in them sends its contribution itself."""
        for number in message.ids.tolist():
            for share in self._followers_in(number):
                assert self._rounds is not None, "only a leader forwards"
                self._rounds.hand_back_share(number, share)

    def _followers_in(self, number: int) -> list[Contribution]:
        """Forget a slice that was forwarded; return the shares of followers in its sum."""
        host_round = self._forwarded.pop(number, None)
        shares = [] if host_round is None else host_round.shares.values()
        followers = [share for share in shares if share.member != self._me]
        return [share for share in followers if self.members.get(share.member.node.rank) == share.member]

    def _told(
        self, message: msg.Values | msg.Counted | msg.Refused, told: dict[tuple[Member, bool], list[tuple[int, int]]]
    ) -> list[fx.Effect]:
        block: memoryview | None = None
        effects: list[fx.Effect] = []
        for (member, pull), asked in told.items():
            positions = np.array([position for position, _ in asked], np.intp)
            runs, ids = _u32([run for _, run in asked]), message.ids[positions]
            if isinstance(message, msg.Refused):
                effects.append(fx.Send(member, msg.Refused(runs, ids, message.code, message.reason)))
                continue
            versions = message.versions[positions]
            if isinstance(message, msg.Values) and pull:
                block = self._copied(message.arrays) if block is None else block
                arrays = _chosen(message.arrays, block, positions)
                effects.append(fx.Send(member, msg.Values(runs, ids, versions, arrays)))
            else:
                effects.append(fx.Send(member, msg.Counted(runs, ids, versions)))
        return effects

    def _copied(self, arrays: Arrays) -> memoryview:
        """Copy values for the followers, once: the memory in which they arrived is used again at once."""
        memory = self._allocate(arrays.nbytes)
        start = 0
        for frame in arrays.frames:
            piece = np.frombuffer(frame, np.uint8)
            memory[start : start + len(piece)] = piece
            start += len(piece)
        self._transfers.traffic.passed_on += len(memory)
        return memory.data

    # Time.

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        return fx.NEVER if self._rounds is None else self._rounds.deadline

    def tick(self, now: float) -> None:
        """Hand back slices that wait for too long."""
        if self._rounds is not None:
            self._rounds.hand_back_late(now)

    def validate(self) -> None:
        """Check every invariant."""
        if self._rounds is not None:
            self._rounds.validate()
            assert not self._rounds.full, "what is full is forwarded at once"
        assert all(count >= 0 for count in self._unarrived.values()), "what leaves arrives once"


@dataclass(slots=True, eq=False)
class HostRound:
    """The contributions of a host to the next version of a slice, its *shares*, as far as they have arrived."""

    number: int
    since: float
    shares: dict[int, Contribution] = field(default_factory=dict)
    """Worker rank → its share. Its values lie in the worker's memory, or where they arrived."""
    memory: Bits | None = None
    """The sum, once it is forwarded."""

    def in_order(self) -> list[Contribution]:
        """Return the shares by rank, those with a gradient first."""
        return sorted(self.shares.values(), key=lambda share: (share.is_empty, share.member.node.rank))


class HostRounds:
    """The pushes of a host that its leader has, slice by slice.

    A worker has a single push of a slice in flight, as towards a server, numbered by its push counter.

    Args:
        me: the leader.
        members: rank → worker of this host, the leader among them.
        patience_s: how long a slice may stay incomplete before it is handed back.
    """

    def __init__(self, me: Member, members: Mapping[int, Member], patience_s: float) -> None:
        self.me = me
        self.members = dict(members)
        self.full: list[HostRound] = []
        """Complete rounds, to be forwarded."""
        self.back: dict[Member, list[tuple[int, int]]] = {}
        """Worker → (run, slice) that it has to send itself."""
        self.is_over = False
        """Whether everything is handed back from now on."""
        self._patience_s = patience_s
        self._rounds: dict[int, HostRound] = {}
        """Slice → its open round, the oldest first."""
        self._alone_up_to: dict[int, int] = {}
        """Slice → the last push counter whose contributions were handed back."""
        self._resting: set[Member] = set()
        """Workers that push nothing for now. Meanwhile everything is handed back, as nothing can be summed."""

    @property
    def deadline(self) -> float:
        """When the oldest open round is handed back."""
        oldest = next(iter(self._rounds.values()), None)
        return fx.NEVER if oldest is None else oldest.since + self._patience_s

    def offer(self, sender: Member, message: msg.Push, now: float) -> None:
        """Add the contributions of a worker.

        Raises:
            ValueError: the payload has another length than its header.
        """
        settings = [setting_of(numbers) for numbers in message.settings]
        columns = (
            message.ids, message.runs, message.steps, message.versions, message.samples, message.flags,
            message.setting_of,
        )  # fmt: skip
        values = PayloadView(message.arrays).arrays(0, len(message.ids))
        for number, run, step, version, samples, flags, setting, array in zip(
            *(column.tolist() for column in columns), values, strict=True
        ):
            about = (run, step, version, samples, flags, settings[setting], array)
            self._offer(number, Contribution(sender, *about, message.pull), now)

    def set_members(self, members: Mapping[int, Member]) -> None:
        """Replace the live workers of the host. Departed workers are no longer awaited.

        A worker that took leave has no share, see `hand_back_of`. Shares of lost workers are dropped: servers would
        refuse them.
        """
        self.members = dict(members)
        self._resting &= set(members.values())
        for host_round in list(self._rounds.values()):
            host_round.shares = {rank: share for rank, share in host_round.shares.items() if rank in members}
            if not host_round.shares:
                del self._rounds[host_round.number]
            elif host_round.shares.keys() >= self.members.keys():
                self._complete(host_round)

    def hand_back_late(self, now: float) -> None:
        """Hand back slices that have been incomplete for too long."""
        for host_round in list(self._rounds.values()):
            if host_round.since + self._patience_s > now:
                break
            self.hand_back(host_round)

    def hand_back_of(self, member: Member) -> None:
        """Hand back incomplete slices with a share of this worker, which wants to leave."""
        for host_round in [one for one in self._rounds.values() if member.node.rank in one.shares]:
            self.hand_back(host_round)

    def rest(self, member: Member) -> None:
        """Do not wait for this worker until it pushes again."""
        self._resting.add(member)
        for host_round in list(self._rounds.values()):
            self.hand_back(host_round)

    def hand_back(self, host_round: HostRound) -> None:
        """Let every worker send this slice itself."""
        self._rounds.pop(host_round.number, None)
        shares, host_round.shares = host_round.shares, {}
        for share in shares.values():
            self.hand_back_share(host_round.number, share)
            last = self._alone_up_to.get(host_round.number, -1)
            self._alone_up_to[host_round.number] = max(last, share.step)

    def hand_back_apart(self, host_round: HostRound, plan: req.RunPlan) -> None:
        """Let the workers whose shares cannot be summed with those of the others send them; all, if none can."""
        position = plan.positions[host_round.number]
        form = (int(plan.counts[position]), DType(int(plan.dtypes[position])).storage)
        shares = host_round.in_order()
        fitting = [share for share in shares if share.is_empty or (share.values.size, share.values.dtype) == form]
        joined = {share.member for share in fitting if _agree(share, fitting[0])}
        if len(joined) < 2 or self.me not in joined:
            self.hand_back(host_round)
            return
        for share in shares:
            if share.member not in joined:
                del host_round.shares[share.member.node.rank]
                self.hand_back_share(host_round.number, share)

    def hand_back_share(self, number: int, share: Contribution) -> None:
        """Let a worker send its share of a slice itself."""
        self.back.setdefault(share.member, []).append((share.run, number))

    def end(self) -> None:
        """Hand back everything that is incomplete, and all later shares."""
        self.is_over = True
        for host_round in list(self._rounds.values()):
            self.hand_back(host_round)

    def validate(self) -> None:
        """Check every invariant."""
        for number, host_round in self._rounds.items():
            present = host_round.shares.keys()
            assert number == host_round.number
            assert present, "a round begins with a share"
            assert present <= self.members.keys(), "what is forwarded is of those that are there"
            assert not self._resting, "nothing is kept back for those that rest"
            assert not present >= self.members.keys(), "a full round is forwarded at once"
            assert len({share.step for share in host_round.shares.values()}) == 1, "shares of one round, one counter"

    def _offer(self, number: int, share: Contribution, now: float) -> None:
        self._resting.discard(share.member)
        if self.is_over or share.step <= self._alone_up_to.get(number, -1):
            self.hand_back_share(number, share)
            return
        host_round = self._rounds.get(number)
        if host_round is None:
            host_round = self._rounds[number] = HostRound(number, now)
        host_round.shares[share.member.node.rank] = share
        if share.flags & _HOLD or self._resting:
            self.hand_back(host_round)  # a reader of the server's memory must be known to the server
        elif host_round.shares.keys() >= self.members.keys():
            self._complete(host_round)

    def _complete(self, host_round: HostRound) -> None:
        del self._rounds[host_round.number]
        self.full.append(host_round)


def _agree(share: Contribution, first: Contribution) -> bool:
    """Whether a share can be summed with the share of the lowest rank that has a gradient."""
    weighs = first.flags & _WEIGHTED
    if share.is_empty:
        return share.flags & _WEIGHTED == weighs
    is_alike = (share.flags, share.setting) == (first.flags, first.setting)
    return is_alike and (not weighs or share.samples == first.samples)


def _chosen(arrays: Arrays, block: memoryview, positions: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Arrays:
    """Return some of the arrays whose bytes are `block`, as a frame; if all, the block itself."""
    if len(positions) == len(arrays.counts):
        return Arrays(arrays.dtypes, arrays.counts, block)
    starts, total = offsets(arrays.dtypes, arrays.counts)
    bounds = [*starts.tolist(), total]
    pieces = [block[bounds[i] : bounds[i + 1]] for i in positions.tolist()]
    payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Arrays(arrays.dtypes[positions], arrays.counts[positions], payload)


def _u32(numbers: Sequence[int]) -> U32:
    return np.array(numbers, np.uint32)
