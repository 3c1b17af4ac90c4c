"""A worker and the other workers of its host: one of them, the *leader*, pushes to the servers for all.

Which workers share a host, and which servers are elsewhere, everybody reads from the first roster, so all have the
same picture. The worker with the lowest rank leads; the others are its *followers*.

* A follower's pushes go to the leader instead of the server, and its answers come from there. Pulls and first values
  go to the servers, as ever.
* The leader collects (`HostSum`), sums and forwards (`Joiner`), and passes the answers on: values are copied once, into
  memory that all followers are shown.
* When the leader leaves, its followers push to the servers themselves, and say again what is not answered: a server
  that has it already, in a sum, knows it by the push counter, and answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core.host_sum import HostSum, parts_of
from kvdist.core.joined import Joiner
from kvdist.core.machine import NEVER, Connect, Effect, Forget, Send
from kvdist.core.server.buffers import Allocate
from kvdist.core.worker.requests import travels_alone
from kvdist.core.worker.transfers import LEADER, Transfers
from kvdist.kernels.interface import Kernels
from kvdist.nodes import Member, Role, host_of
from kvdist.protocol.arrays import U32, Arrays, offsets
from kvdist.protocol.messages import Counted, Done, Goodbye, HandedBack, Peer, Push, Refused, Values

Answer = Values | Counted | Refused


@dataclass(frozen=True, slots=True)
class _Awaiting:
    """A follower that waits for the answer to its share of a forwarded slice."""

    member: Member
    run: int
    pull: bool


class Neighbours:
    """What a worker has to do with the other workers of its host.

    Args:
        setting: ``off``, ``auto`` (large slices that go to servers elsewhere are summed first) or ``on`` (all slices).
        limits: sizes and times.
        transfers: the worker's own traffic.
        kernels: what sums.
        allocate: gives memory that travels well.
    """

    def __init__(
        self, setting: str, limits: Limits, transfers: Transfers, kernels: Kernels, allocate: Allocate
    ) -> None:
        self.leader: Member | None = None
        """Who pushes for this host; None when everybody pushes for itself."""
        self.members: dict[int, Member] = {}
        """Rank → live worker of this host, this one among them."""
        self.detoured: frozenset[int] = frozenset()
        """The ranks of the servers to which the leader pushes."""
        self._me: Member | None = None
        self._setting = setting
        self._limits = limits
        self._transfers = transfers
        self._kernels = kernels
        self._allocate = allocate
        self._met: set[Member] = set()
        """All that were ever members."""
        self._sum: HostSum | None = None
        """The leader's."""
        self._joiner: Joiner | None = None
        self._sums: dict[int, Arrays] = {}
        """Slice → where its sum lies until it is counted: a server of this host reads it there, also when it has
        acknowledged the message, and the memory must not be given out again."""
        self._awaiting: dict[int, list[_Awaiting]] = {}
        """Forwarded slice → the followers that wait for its answer."""
        self._unarrived: dict[Member, int] = {}
        """Worker → joined pushes with its contributions that no server has acknowledged yet."""
        self._leaving: dict[Member, int] = {}
        """Follower that wants to leave → its request."""
        self._goodbye_said = False
        self._may_leave = False

    @property
    def leads(self) -> bool:
        """Whether this worker pushes for its host."""
        return self._sum is not None

    @property
    def follows(self) -> bool:
        """Whether another worker pushes for this one."""
        return self.leader is not None and self._sum is None

    def sums(self, server: int, nbytes: int) -> bool:
        """Whether pushes of a slice of this size to this server are summed on this host first.

        Small ones are not, unless that was asked for: their bytes are few, and many of them that come from a worker
        together are one round for the server.
        """
        return server in self.detoured and (self._setting == "on" or travels_alone(nbytes))

    def is_member(self, source: Member) -> bool:
        """Whether this live worker of the host is to be heard: by the leader everybody, by the others the leader."""
        if self.leads:
            return source != self._me and self.members.get(source.node.rank) == source
        return self.follows and source == self.leader

    def has_left(self, source: Member) -> bool:
        """Whether this worker was once a member; its last words are not worth an answer."""
        return source in self._met

    # The roster.

    def roster(self, me: Member, peers: Sequence[Peer]) -> list[Effect]:
        """These processes are in the cluster."""
        if self._me is None:
            self._me = me
            return self._meet(peers)
        alive = {peer.member for peer in peers}
        gone = [member for member in self.members.values() if member not in alive]
        if not gone or self.leader is None:
            return []
        self.members = {rank: member for rank, member in self.members.items() if member in alive}
        heard = gone if self._sum is not None else [member for member in gone if member == self.leader]
        if self._sum is not None:
            self._sum.set_members(self.members)
            for member in gone:
                self._leaving.pop(member, None)
            if len(self.members) == 1:
                self._sum.end()
        elif heard:
            self.leader = None
            self._transfers.take_back()
        return [Forget(member) for member in heard]

    def _meet(self, peers: Sequence[Peer]) -> list[Effect]:
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
        self.detoured = frozenset(
            member.node.rank for member in servers if self._setting == "on" or hosts[member] != mine
        )
        self.members = workers
        self._met = set(workers.values())
        leader = workers[min(workers)]
        if leader == me:
            # It hears the others even where it would not sum itself, for they may have been told otherwise.
            self._lead(me)
        elif self.detoured:
            self.leader = leader
            self._transfers.add_server(LEADER, is_near=True)
            endpoint = next(peer.endpoint for peer in peers if peer.member == leader)
            return [Connect(leader, endpoint)]
        return []

    def _lead(self, me: Member) -> None:
        limits = self._limits
        self.leader = me
        self._sum = HostSum(me, self.members, limits.explain_after_s / 2)
        self._joiner = Joiner(
            me, self._kernels, self._allocate, limits.slice_bytes, limits.frame_bytes_max, self._transfers.traffic
        )
        if not self.detoured:
            self._sum.end()

    # What leaves.

    def settle(self, now: float) -> list[Effect]:
        """Let everything go its way that is ready to: to the leader, forwarded, or handed back."""
        for part in self._transfers.take_detours():
            if self._sum is not None:
                self._sum.offer_own(part, now)
            elif self.leader is not None:
                self._transfers.give_to_leader(part)
            else:
                self._transfers.send_directly(part)
        return [] if self._sum is None else self._forward(self._sum)

    def _forward(self, host_sum: HostSum) -> list[Effect]:
        assert self._joiner is not None
        rounds, host_sum.full = host_sum.full, []
        for host_round in [one for one in rounds if not self._joiner.fits(one)]:
            rounds.remove(host_round)
            host_sum.hand_back(host_round)
        for host_round in rounds:
            self._awaiting[host_round.number] = [
                _Awaiting(share.member, share.run, share.pull)
                for share in host_round.shares.values()
                if share.own is None
            ]
        for ready in self._joiner.join(rounds):
            for member in ready.members:
                self._unarrived[member] = self._unarrived.get(member, 0) + 1
            self._sums.update(dict.fromkeys(ready.message.ids.tolist(), ready.message.arrays))
            self._transfers.send_ready(ready)
        own, host_sum.own_back = host_sum.own_back, {}
        for part in parts_of(own.values()):
            self._transfers.send_directly(part)
        back, host_sum.back = host_sum.back, {}
        effects: list[Effect] = []
        for member, slices in back.items():
            runs, ids = zip(*slices, strict=True)
            effects.append(Send(member, HandedBack(_u32(runs), _u32(ids))))
        return effects + self._farewells()

    def arrived(self, members: Sequence[Member]) -> None:
        """A server has received a joined push with contributions of these workers."""
        for member in members:
            self._unarrived[member] -= 1

    # What the others say.

    def pushed(self, sender: Member, message: Push, now: float) -> None:
        """A follower contributes."""
        if self._sum is not None:
            self._sum.offer(sender, message, now)

    def farewell(self, sender: Member, message: Goodbye) -> None:
        """A follower wants to leave: nothing of it may be here alone."""
        if self._sum is not None:
            self._leaving[sender] = message.request
            self._sum.hand_back_of(sender)

    def _farewells(self) -> list[Effect]:
        ready = [member for member in self._leaving if not self._unarrived.get(member)]
        return [Send(member, Done(self._leaving.pop(member))) for member in ready]

    # Leaving.

    def leave(self, request: int) -> list[Effect]:
        """This worker leaves, and all it has pushed has been received: by servers, or by the leader.

        The leader hands back what is incomplete, a follower asks the leader to.
        """
        if self._sum is not None or self.leader is None:
            self._may_leave = True
        elif not self._goodbye_said:
            self._goodbye_said = True
            return [Send(self.leader, Goodbye(request, ""))]
        return []

    def stop_leading(self) -> None:
        """The leader's user has closed its store: everybody pushes for itself."""
        if self._sum is not None:
            self._sum.end()

    def released(self) -> None:
        """The leader has nothing of this worker any more that servers do not have."""
        self._may_leave = True

    @property
    def may_leave(self) -> bool:
        """Whether nobody of this host needs this worker, or has anything of it."""
        return self._may_leave or (self.leader is None)

    # Answers.

    def passed_on(self, message: Answer, pushed: Sequence[tuple[int, int]]) -> list[Effect]:
        """What the followers are told of an answer to this leader.

        Args:
            message: the answer.
            pushed: its stretches that answer pushes: (begin, end).
        """
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

    def _told(self, message: Answer, told: dict[tuple[Member, bool], list[tuple[int, int]]]) -> list[Effect]:
        block: memoryview | None = None
        effects: list[Effect] = []
        for (member, pull), places in told.items():
            positions = np.array([position for position, _ in places], np.intp)
            runs, ids = _u32([run for _, run in places]), message.ids[positions]
            if isinstance(message, Refused):
                effects.append(Send(member, Refused(runs, ids, message.code, message.reason)))
                continue
            versions, outcomes = message.versions[positions], message.outcomes[positions]
            if isinstance(message, Values) and pull:
                block = self._copied(message.arrays) if block is None else block
                arrays = _chosen(message.arrays, block, positions)
                effects.append(Send(member, Values(runs, ids, versions, outcomes, arrays)))
            else:
                effects.append(Send(member, Counted(runs, ids, versions, outcomes)))
        return effects

    def _copied(self, arrays: Arrays) -> memoryview:
        """The one copy of values for the followers: where they came to may be used again as soon as they are here."""
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
        return NEVER if self._sum is None else self._sum.deadline

    def tick(self, now: float) -> None:
        """Hand back what waits for too long."""
        if self._sum is not None:
            self._sum.hand_back_late(now)

    def validate(self) -> None:
        """Check every invariant."""
        if self._sum is not None:
            self._sum.validate()
            assert not self._sum.full, "what is full is forwarded at once"
        assert all(count >= 0 for count in self._unarrived.values()), "what leaves arrives once"


def _chosen(arrays: Arrays, block: memoryview, positions: np.ndarray[tuple[int], np.dtype[np.intp]]) -> Arrays:
    """Some of the arrays whose bytes are `block`, as one frame: of all of them the block itself."""
    if len(positions) == len(arrays.counts):
        return Arrays(arrays.dtypes, arrays.counts, block)
    starts, total = offsets(arrays.dtypes, arrays.counts)
    bounds = [*starts.tolist(), total]
    pieces = [block[bounds[i] : bounds[i + 1]] for i in positions.tolist()]
    payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    return Arrays(arrays.dtypes[positions], arrays.counts[positions], payload)


def _u32(numbers: Sequence[int]) -> U32:
    return np.array(numbers, np.uint32)
