"""Host aggregation: the workers of a host sum their pushes before they cross the network. Pure.

Every worker learns from the first roster which workers share its host, and which servers are elsewhere. The worker with
the lowest rank is the *leader*; the others, its *followers*, send their pushes to it instead of the server, and get the
replies from it. Pulls and first values go to the servers. Invariants:

* A slice is forwarded when every live worker of the host has contributed, and never before, so a forwarded push never
  makes a server wait for a worker of this host. An incomplete slice is *handed back* after a while: each worker sends
  its own contribution, and the server knows who is late. A forwarded slice is never handed back.
* Contributions that agree in settings and flags, and in samples where those weigh, are summed in rank order, in the row
  of the lowest rank with a gradient; the rows of the others are *carried*. Halves are not summed: the sum of a host
  could round or overflow where that of all workers does not.
* When the leader leaves, its followers push to the servers again. A server knows by the push counter what it has.
* When a worker is lost, servers count nothing of a sum that it is in, as that cannot be taken apart: they hand it back,
  and each of the others sends its own contribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.round import Setting, setting_of
from kvdist.core.server.buffers import Allocate, ordinary_memory
from kvdist.core.traffic import Traffic
from kvdist.core.worker import requests as req
from kvdist.core.worker.transfers import LEADER, SETTINGS_PER_MESSAGE_MAX, Ready, Transfers, push_of
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member, Role, host_of
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U32, Arrays, Bits, PayloadView, offsets, padded

ROWS_PER_MESSAGE_MAX = 1 << 16
"""Keeps the columns of a message far below the longest header."""
_EMPTY, _CARRIED, _HOLD, _WEIGHTED = map(int, (msg.Flag.EMPTY, msg.Flag.CARRIED, msg.Flag.HOLD, msg.Flag.WEIGHTED))
_NAN = float("nan")


@dataclass(frozen=True, slots=True)
class _Waiter:
    """A follower that waits for the reply to its share of a forwarded slice."""

    member: Member
    run: int
    pull: bool


class HostAggregation:
    """A worker's part in the sums of its host.

    Args:
        setting: ``off``, ``auto`` (large slices that go to servers elsewhere are summed first) or ``on`` (all slices).
        limits: sizes and times.
        allocate: gives memory for sums, and for values on their way to other workers.
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
        """All that were ever members."""
        self._rounds: HostRounds | None = None
        """Of the leader."""
        self._joiner: PushJoiner | None = None
        self._sums: dict[int, Arrays] = {}
        """Slice → its sum until it is counted: a server of this host reads it in place, even after it has acknowledged
        the message, so the memory must not be used again."""
        self._awaiting: dict[int, list[_Waiter]] = {}
        """Forwarded slice → the followers that wait for its reply."""
        self._unarrived: dict[Member, int] = {}
        """Worker → joined pushes with its contributions that no server has acknowledged."""
        self._leaving: dict[Member, int] = {}
        """Follower that wants to leave → its request."""
        self._goodbye_said = False
        self._may_leave = False

    def attach(self, transfers: Transfers) -> None:
        """Take the traffic of the worker; to be called before anything else."""
        self._transfers = transfers

    @property
    def leads(self) -> bool:
        """Whether this worker pushes for its host."""
        return self._rounds is not None

    @property
    def follows(self) -> bool:
        """Whether another worker pushes for this one."""
        return self.leader is not None and self._rounds is None

    def aggregates(self, server: int, nbytes: int) -> bool:
        """Whether pushes of a slice of this size to this server are summed on this host first.

        By default small slices are not: their bytes are few, and a server applies many of them in a round.
        """
        return server in self.servers and (self._setting == "on" or req.travels_alone(nbytes))

    def is_member(self, source: Member) -> bool:
        """Whether messages of this worker are accepted: the leader listens to all of its host, they to the leader."""
        if self.leads:
            return source != self._me and self.members.get(source.node.rank) == source
        return self.follows and source == self.leader

    def has_left(self, source: Member) -> bool:
        """Whether this worker was once a member; late messages of it are ignored."""
        return source in self._met

    # The roster.

    def roster(self, me: Member, peers: Sequence[msg.Peer]) -> list[fx.Effect]:
        """Take the live processes of the cluster."""
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
            # It listens to the others even if it does not sum itself: their settings may differ.
            self._lead(me)
        elif self.servers:
            self.leader = leader
            self._transfers.add_server(LEADER, is_near=True)
            endpoint = next(peer.endpoint for peer in peers if peer.member == leader)
            return [fx.Connect(leader, endpoint)]
        return []

    def _lead(self, me: Member) -> None:
        limits = self._limits
        self.leader = me
        self._rounds = HostRounds(me, self.members, limits.explain_after_s / 2)
        self._joiner = PushJoiner(
            me, self._kernels, self._allocate, limits.slice_bytes, limits.frame_bytes_max, self._transfers.traffic
        )
        if not self.servers:
            self._rounds.end()

    # What leaves.

    def flush(self, now: float) -> list[fx.Effect]:
        """Send everything that may leave: to the leader, forwarded, or handed back."""
        for part in self._transfers.take_aggregated():
            if self._rounds is not None:
                self._rounds.offer(self._rounds.me, push_of(part), now, part.run)
            elif self.leader is not None:
                self._transfers.delegate(part)
            else:
                self._transfers.send_directly(part)
        return [] if self._rounds is None else self._forward(self._rounds)

    def _forward(self, host_rounds: HostRounds) -> list[fx.Effect]:
        assert self._joiner is not None
        if not (host_rounds.full or host_rounds.own_back or host_rounds.back):
            return self._farewells()  # asked at each message of this worker
        rounds, host_rounds.full = host_rounds.full, []
        for host_round in [one for one in rounds if not self._joiner.fits(one)]:
            rounds.remove(host_round)
            host_rounds.hand_back(host_round)
        for host_round in rounds:
            self._awaiting[host_round.number] = [
                _Waiter(share.member, share.run, share.pull)
                for share in host_round.shares.values()
                if share.own is None
            ]
        for ready in self._joiner.join(rounds):
            for member in ready.members:
                self._unarrived[member] = self._unarrived.get(member, 0) + 1
            self._sums.update(dict.fromkeys(ready.message.ids.tolist(), ready.message.arrays))
            self._transfers.send_ready(ready)
        own, host_rounds.own_back = host_rounds.own_back, {}
        for run, numbers in own.values():
            self._transfers.send_directly(req.RunPart(run, sorted(run.plan.positions[number] for number in numbers)))
        back, host_rounds.back = host_rounds.back, {}
        effects: list[fx.Effect] = []
        for member, slices in back.items():
            runs, ids = zip(*slices, strict=True)
            effects.append(fx.Send(member, msg.HandedBack(_u32(runs), _u32(ids))))
        return effects + self._farewells()

    def arrived(self, members: Sequence[Member]) -> None:
        """Note that a server has received a joined push with contributions of these workers."""
        for member in members:
            self._unarrived[member] -= 1

    # What the others say.

    def handle(self, sender: Member, message: msg.Message, now: float) -> None:
        """React to a message of another worker of this host."""
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
        ready = [member for member in self._leaving if not self._unarrived.get(member)]
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
        """Push nothing for a while: the others of this host do not wait until this worker pushes again."""
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
        """The replies to the followers that follow from a server's reply to this leader."""
        if self._rounds is None or not (self._sums or self._awaiting):
            return []
        pushed = self._transfers.pushed_stretches(message.runs)
        for begin, end in pushed if self._sums else ():
            for number in message.ids[begin:end].tolist():
                self._sums.pop(number, None)
        if not self._awaiting:
            return []
        told: dict[tuple[Member, bool], list[tuple[int, int]]] = {}
        for begin, end in pushed:
            for position, number in enumerate(message.ids[begin:end].tolist(), begin):
                for one in self._awaiting.pop(number, ()):
                    if self.members.get(one.member.node.rank) == one.member:
                        told.setdefault((one.member, one.pull), []).append((position, one.run))
        return self._told(message, told)

    def handed_back(self, message: msg.HandedBack) -> None:
        """A server has dropped sums with these slices: every worker in them sends its own contribution."""
        if self._rounds is not None:
            for number in message.ids.tolist():
                self._sums.pop(number, None)
                for one in self._awaiting.pop(number, ()):
                    if self.members.get(one.member.node.rank) == one.member:
                        self._rounds.back.setdefault(one.member, []).append((one.run, number))

    def _told(
        self, message: msg.Values | msg.Counted | msg.Refused, told: dict[tuple[Member, bool], list[tuple[int, int]]]
    ) -> list[fx.Effect]:
        block: memoryview | None = None
        effects: list[fx.Effect] = []
        for (member, pull), places in told.items():
            positions = np.array([position for position, _ in places], np.intp)
            runs, ids = _u32([run for _, run in places]), message.ids[positions]
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
        """Hand back what waits for too long."""
        if self._rounds is not None:
            self._rounds.hand_back_late(now)

    def validate(self) -> None:
        """Check every invariant."""
        if self._rounds is not None:
            self._rounds.validate()
            assert not self._rounds.full, "what is full is forwarded at once"
        assert all(count >= 0 for count in self._unarrived.values()), "what leaves arrives once"


@dataclass(slots=True, eq=False)
class Share:
    """The contribution of a worker of this host to the next version of a slice."""

    member: Member
    run: int
    step: int
    version: int
    samples: int
    flags: int
    setting: Setting
    dtype: int
    values: Bits
    """In place: in the worker's memory, or where they arrived."""
    pull: bool
    own: req.Run | None = None
    """The run of the leader, for its share."""


@dataclass(slots=True, eq=False)
class HostRound:
    """The shares of a slice that have arrived."""

    number: int
    since: float
    shares: dict[int, Share] = field(default_factory=dict)
    """Worker rank → its share."""


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
        """To be forwarded."""
        self.own_back: dict[int, tuple[req.Run, list[int]]] = {}
        """Run → its slices that the leader sends unsummed."""
        self.back: dict[Member, list[tuple[int, int]]] = {}
        """Follower → (run, slice) that it has to send itself."""
        self.is_over = False
        """Whether everything is handed back from now on."""
        self._patience_s = patience_s
        self._rounds: dict[int, HostRound] = {}
        """Slice → its open round, the oldest first."""
        self._alone_up_to: dict[int, int] = {}
        """Slice → the last push counter whose contributions were handed back."""
        self._resting: set[Member] = set()
        """Who pushes nothing for now. Meanwhile everything is handed back, as nothing can be summed."""

    @property
    def deadline(self) -> float:
        """When the oldest open round is handed back."""
        oldest = next(iter(self._rounds.values()), None)
        return fx.NEVER if oldest is None else oldest.since + self._patience_s

    def offer(self, sender: Member, message: msg.Push, now: float, own: req.Run | None = None) -> None:
        """Take the contributions of a worker; `own` is the run if it is the leader.

        Raises:
            ValueError: the payload has another length than its header.
        """
        columns = (
            message.ids, message.runs, message.steps, message.versions, message.samples, message.flags,
            message.setting_of, message.arrays.dtypes,
        )  # fmt: skip
        settings = [setting_of(numbers) for numbers in message.settings]
        values = PayloadView(message.arrays).arrays(0, len(message.ids))
        pull = message.pull
        for number, run, step, version, samples, flags, setting, dtype, array in zip(
            *(column.tolist() for column in columns), values, strict=True
        ):
            share = Share(sender, run, step, version, samples, flags, settings[setting], dtype, array, pull, own)
            self._offer(number, share, now)

    def set_members(self, members: Mapping[int, Member]) -> None:
        """Take the live workers of the host. The others are no longer waited for.

        A departed worker has no share, see `hand_back_of`. Shares of lost workers go: servers would refuse them.
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
        for share in host_round.shares.values():
            self._return(host_round.number, share)
            last = self._alone_up_to.get(host_round.number, -1)
            self._alone_up_to[host_round.number] = max(last, share.step)

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

    def _offer(self, number: int, share: Share, now: float) -> None:
        self._resting.discard(share.member)
        if self.is_over or share.step <= self._alone_up_to.get(number, -1):
            self._return(number, share)
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

    def _return(self, number: int, share: Share) -> None:
        if share.own is not None:
            self.own_back.setdefault(share.run, (share.own, []))[1].append(number)
        else:
            self.back.setdefault(share.member, []).append((share.run, number))


@dataclass(slots=True, eq=False)
class JoinedRow:
    """The contribution of a worker to a slice, as it travels."""

    number: int
    run: int
    """The leader's."""
    share: Share
    flags: int
    summands: list[Bits]
    """The arrays that are summed into its bytes; empty for an empty or carried row."""

    @property
    def count(self) -> int:
        return self.summands[0].size if self.summands else 0


@dataclass(slots=True, eq=False)
class SmallRows:
    """Rows of small slices that leave in the same message."""

    rows: list[JoinedRow] = field(default_factory=list)
    nbytes: int = 0
    settings: set[Setting] = field(default_factory=set)

    def has_room_for(self, rows: Sequence[JoinedRow], nbytes_max: int) -> bool:
        settings = self.settings.union(row.share.setting for row in rows)
        fits = self.nbytes + _nbytes(rows) <= nbytes_max and len(self.rows) + len(rows) <= ROWS_PER_MESSAGE_MAX
        return fits and len(settings) <= SETTINGS_PER_MESSAGE_MAX

    def add(self, rows: Sequence[JoinedRow]) -> None:
        self.rows += rows
        self.nbytes += _nbytes(rows)
        self.settings.update(row.share.setting for row in rows)


class PushJoiner:
    """Turns complete rounds into joined pushes.

    Args:
        me: the leader.
        kernels: what sums.
        allocate: gives the memory from which sums are sent.
        join_bytes_max: small slices travel together up to this size.
        payload_bytes_max: the most that a message may have.
        traffic: counts passes over values.
    """

    def __init__(
        self,
        me: Member,
        kernels: Kernels,
        allocate: Allocate,
        join_bytes_max: int,
        payload_bytes_max: int,
        traffic: Traffic,
    ) -> None:
        self._me = me
        self._kernels = kernels
        self._allocate = allocate
        self._join_bytes_max = join_bytes_max
        self._payload_bytes_max = payload_bytes_max
        self._traffic = traffic

    def fits(self, host_round: HostRound) -> bool:
        """Whether a message can carry the slice; false if many rows of a large slice have bytes."""
        if sum(padded(share.values.nbytes) for share in host_round.shares.values()) <= self._payload_bytes_max:
            return True  # even if nothing can be summed
        return _nbytes(self._rows(host_round)) <= self._payload_bytes_max

    def join(self, rounds: Iterable[HostRound]) -> Iterator[Ready]:
        """Yield few messages: small slices together, a large slice alone, so that sums and sends overlap."""
        batches: dict[tuple[int, bool, int], SmallRows] = {}
        for host_round in rounds:
            own = host_round.shares[self._me.node.rank].own
            assert own is not None
            pull = any(share.pull for share in host_round.shares.values())
            key = (own.plan.server, pull, own.priority)
            rows = self._rows(host_round)
            if _nbytes(rows) >= req.ALONE_BYTES_MIN:
                yield self._ready(key, rows)
                continue
            batch = batches.setdefault(key, SmallRows())
            if batch.rows and not batch.has_room_for(rows, self._join_bytes_max):
                yield self._ready(key, batch.rows)
                batch = batches[key] = SmallRows()
            batch.add(rows)
        for key, batch in batches.items():
            yield self._ready(key, batch.rows)

    def _rows(self, host_round: HostRound) -> list[JoinedRow]:
        run = host_round.shares[self._me.node.rank].run
        rows: list[JoinedRow] = []
        carriers: dict[object, JoinedRow] = {}
        for rank in sorted(host_round.shares):
            share = host_round.shares[rank]
            row = JoinedRow(host_round.number, run, share, share.flags, [])
            rows.append(row)
            if share.flags & _EMPTY:
                continue
            dtype = DType(share.dtype)
            alone = rank if dtype.accumulate != dtype.storage else -1
            weight = share.samples if share.flags & _WEIGHTED else 0
            carrier = carriers.setdefault((share.flags, share.setting, weight, dtype, share.values.size, alone), row)
            carrier.summands.append(share.values)
            if carrier is not row:
                row.flags |= _CARRIED
        return rows

    def _ready(self, key: tuple[int, bool, int], rows: Sequence[JoinedRow]) -> Ready:
        server, pull, priority = key
        settings = {setting: i for i, setting in enumerate(dict.fromkeys(row.share.setting for row in rows))}
        shares = [row.share for row in rows]
        arrays = self._summed(rows)
        message = msg.JoinedPush(
            pull=pull,
            runs=np.array([row.run for row in rows], np.uint32),
            ids=np.array([row.number for row in rows], np.uint32),
            ranks=np.array([share.member.node.rank for share in shares], np.uint32),
            steps=np.array([share.step for share in shares], np.uint32),
            versions=np.array([share.version for share in shares], np.uint32),
            samples=np.array([share.samples for share in shares], np.uint32),
            flags=np.array([row.flags for row in rows], np.uint8),
            settings=tuple(_numbers(setting) for setting in settings),
            setting_of=np.array([settings[share.setting] for share in shares], np.uint8),
            arrays=arrays,
        )
        members = tuple(dict.fromkeys(share.member for share in shares))
        return Ready(server, priority, message, arrays.nbytes, members)

    def _summed(self, rows: Sequence[JoinedRow]) -> Arrays:
        """Return the bytes of all rows in a buffer, by a single pass over the summed arrays."""
        dtypes = np.array([row.share.dtype for row in rows], np.uint8)
        counts = np.array([row.count for row in rows], np.uint32)
        starts, total = offsets(dtypes, counts)
        memory = self._allocate(total)
        for row, start in zip(rows, starts.tolist(), strict=True):
            if not row.summands:
                continue
            dtype = DType(row.share.dtype)
            stop = start + row.count * dtype.itemsize
            target = memory[start:stop].view(dtype.storage)
            self._kernels.weighted_sum(row.summands, [1.0] * len(row.summands), dtype, target)
            memory[stop : start + padded(stop - start)] = 0
            self._traffic.summed += len(row.summands) * (stop - start)
        return Arrays(dtypes, counts, memory.data if total else b"")


def _nbytes(rows: Sequence[JoinedRow]) -> int:
    return sum(padded(row.summands[0].nbytes) for row in rows if row.summands)


def _numbers(setting: Setting) -> tuple[float, float, float]:
    lr, wd, rescale = (_NAN if number is None else number for number in setting)
    return lr, wd, rescale


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
