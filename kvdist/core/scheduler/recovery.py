"""A scheduler that was started again: it learns from all others what its predecessor knew. Pure.

Whoever hears of the new term says all that it knows and still waits for, and then `Reregister`. Rules that hold here:

* Nothing is decided before all members have registered, are known to be gone, or have had their time. What comes
  before is kept, in order, and handled then.
* Who was in any roster is a member, unless somebody knows that it has left or was given up.
* What one worker was told of a barrier, a checkpoint or a load, every other is told that asks for it again.
* What one server was told of a key or an optimizer, all are told. Who gives a key's first value is kept if all that
  have slices and register knew.
* Which data a worker has was told to all servers before it was to the worker; the newest of these notes counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.nodes import UNRANKED, Member, NodeId, Role, server, worker
from kvdist.protocol import messages as msg

Call = tuple[int, int, int]
"""A barrier, a checkpoint or a load: the code of its message, the store, the count."""


@dataclass(slots=True)
class Memories:
    """What others remember of an earlier scheduler."""

    registered: dict[Member, msg.Reregister] = field(default_factory=dict)
    peers: dict[Member, msg.Peer] = field(default_factory=dict)
    """All processes that anybody knows."""
    members: dict[NodeId, Member] = field(default_factory=dict)
    """The newest of each rank."""
    left: set[Member] = field(default_factory=set)
    """Those of them that have left, as anybody knows."""
    lost: set[Member] = field(default_factory=set)
    """Those that were given up."""
    assigned: dict[tuple[int, int], dict[Member, msg.Assign]] = field(default_factory=dict)
    """(store, first slice) → by server what it was told."""
    optimizers: dict[int, msg.SetOptimizer] = field(default_factory=dict)
    snapshots: dict[str, dict[Member, msg.SnapshotTaken]] = field(default_factory=dict)
    """Folder → what servers have written there by themselves; the newest is the last."""
    rest: msg.Rest | None = None
    """The newest one that any server has: who has which data."""
    resting: set[Member] = field(default_factory=set)
    """Those that ask for data, and may not have been awaited."""
    copied: list[msg.Copied] = field(default_factory=list)
    """Which servers have a backup with all that they have."""
    ended: dict[NodeId, fx.ChildEnded] = field(default_factory=dict)
    """What the launcher says of processes."""
    later: list[Callable[[float], list[fx.Effect]]] = field(default_factory=list)
    """What has come and is to be handled when everything is known."""
    asked_again: set[Call] = field(default_factory=set)

    def register(self, sender: Member, message: msg.Reregister) -> None:
        """Take what a process says of itself and of the others."""
        self.registered[sender] = message
        for peer in message.peers:
            member = peer.member
            self.peers[member] = peer
            known = self.members.setdefault(member.node, member)
            if known.incarnation < member.incarnation:
                self.members[member.node] = member
        self.left.update(peer.member for peer in message.left)
        self.lost.update(peer.member for peer in message.lost)

    def missing(self) -> list[Member]:
        """The members that should register and have not."""
        known = self.registered.keys() | self.left | self.lost
        away = [one for one in self.members.values() if one not in known]
        return sorted(away, key=lambda one: (one.node.role is Role.WORKER, one.node.rank))

    def end_of(self, member: Member) -> fx.ChildEnded | None:
        """What the launcher says of the end of this process, or of a later one of its rank; None if nothing."""
        ended = self.ended.get(member.node)
        life = self.peers[member].life if member in self.peers else 0
        return ended if ended is not None and life <= ended.life else None

    def awaited(self) -> list[Member]:
        """The members that may still register."""
        return [member for member in self.missing() if self.end_of(member) is None]

    def is_over(self, num_servers: int) -> bool:
        """Whether every server has ended well: an earlier scheduler had told them to, as all workers were gone."""
        ends = [self.ended.get(server(rank)) for rank in range(num_servers)]
        return all(ended is not None and ended.clean for ended in ends)

    def workers_have_ended_well(self, num_workers: int) -> bool:
        """Whether every worker has: those of the start, and what joined later as far as the launcher knows of it."""
        ends = [self.ended.get(worker(rank)) for rank in range(num_workers)]
        ends += [ended for node, ended in self.ended.items() if node.role is Role.WORKER]
        return all(ended is not None and ended.clean for ended in ends)

    def joined(self) -> tuple[dict[Member, int], set[Member], dict[Member, int]]:
        """Members that have joined later and their versions; newcomers; and those members that not all servers know."""
        members, said = self.members, dict[Member, list[int]]()
        for message in self.registered.values():
            for rank, version in zip(message.joined, message.since, strict=False):
                said.setdefault(members[worker(rank)], []).append(version)
        since = {member: min(versions) for member, versions in said.items() if min(versions) < msg.LATER}
        halfway = {member: version for member, version in since.items() if msg.LATER in said[member]}
        known = [
            {peer.member for peer in one.peers} for by, one in self.registered.items() if by.node.role is Role.SERVER
        ]
        unknown = {one for one in members.values() if any(one not in those for those in known)}
        return since, (said.keys() | unknown) - since.keys(), halfway

    def answers(self) -> dict[Call, tuple[int, str]]:
        """What workers were told of their calls: the code of the error, or -1, and why."""
        calls = (call for message in self.registered.values() for call in message.calls)
        return {(call.kind, call.store, call.counter): (call.code, call.reason) for call in calls}


class ReturnedScheduler(Scheduler):
    """The machine of a scheduler of a later term.

    Args:
        config: the size of the cluster, how keys are placed, and how long others have to register.
        now: the time.
        term: which scheduler of the job this is: 2, 3, …
    """

    def __init__(self, config: ClusterConfig, now: float, term: int) -> None:
        super().__init__(config, now, term=term)
        self._memories: Memories | None = Memories()
        """None when everything is known."""
        self._register_by = now + config.away_s

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        return super().deadline if self._memories is None else self._register_by

    def refuses(self, source: Member, message: msg.Message) -> str | None:
        """Listen to all that may be members until it is known who is."""
        if self._memories is None or source.node.rank == UNRANKED:
            return super().refuses(source, message)
        return None

    def handle(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        """Collect what others know; then as ever."""
        memories = self._memories
        if memories is None:
            return super().handle(sender, message, now)
        match message:
            case msg.Hello():
                awaited = f"{self._awaited(memories)} to register with the scheduler that was started again"
                if self.newcomers is None:
                    return [fx.Send(sender, msg.Waiting(awaited, (), 0.0))]
                return self.newcomers.delay(sender, awaited)
            case msg.Alive():
                return []
            case msg.Assign(store=store, placement=placement):
                memories.assigned.setdefault((store, min(placement.first_slices)), {})[sender] = message
            case msg.SetOptimizer(store=store):
                memories.optimizers[store] = message
            case msg.SnapshotTaken():
                memories.snapshots.setdefault(message.folder, {})[sender] = message
            case msg.Rest():
                memories.rest = max(memories.rest or message, message, key=lambda one: one.request)
            case msg.Copied():
                memories.copied.append(message)
            case msg.Reregister():
                memories.register(sender, message)
                return self._begin_if_known(now)
            case _:
                if isinstance(message, msg.Barrier | msg.Save | msg.Load):
                    memories.asked_again.add((message.KIND, message.store, message.counter))
                if isinstance(message, msg.Lease) and message.rests:
                    memories.resting.add(sender)
                memories.later.append(partial(self._again, sender, message))
        return []

    def observe(self, event: fx.Event, now: float) -> list[fx.Effect]:
        """What happens meanwhile is looked at when everything is known."""
        memories = self._memories
        if memories is None or isinstance(event, fx.LauncherGone | fx.ProcessStarted):
            return super().observe(event, now)
        memories.later.append(partial(super().observe, event))
        if isinstance(event, fx.ChildEnded):
            memories.ended[event.node] = event
        return self._begin_if_known(now)

    def tick(self, now: float) -> list[fx.Effect]:
        """Wait no longer than others have to register."""
        if self._memories is None:
            return super().tick(now)
        return self._begin(now) if now >= self._register_by else []

    @property
    def waiting_since(self) -> float | None:
        """Since when it waits for the others."""
        return super().waiting_since if self._memories is None else self._started_at

    def explain(self, now: float) -> str | None:
        """Who has to register."""
        if self._memories is None:
            return super().explain(now)
        names = self._awaited(self._memories)
        return f"the scheduler was started again {now - self._started_at:.1f} s ago; it waits for {names} to register"

    @staticmethod
    def _awaited(memories: Memories) -> str:
        lines = [memories.peers[member] for member in memories.awaited()]
        return ", ".join(f"{one.member} (pid {one.pid} on {one.host})" for one in lines) or "the members"

    def _begin_if_known(self, now: float) -> list[fx.Effect]:
        memories = self._memories
        assert memories is not None
        is_known = not memories.awaited() if memories.registered else memories.is_over(self.config.num_servers)
        return self._begin(now) if is_known else []

    def _begin(self, now: float) -> list[fx.Effect]:
        """Go on with what is known."""
        memories, self._memories = self._memories, None
        assert memories is not None
        self._answers = memories.answers()
        self._asked_again = memories.asked_again
        self._over = set[Call]()
        if not memories.registered:
            servers, workers = self.config.num_servers, self.config.num_workers
            if memories.is_over(servers) or memories.workers_have_ended_well(workers):
                return [*self._turn_away_late(), *self._stop(None)]
            return [effect for event in memories.later for effect in event(now)]
        self._recall_members(memories)
        missing = memories.missing()
        told = (
            f"the scheduler was started again (term {self.term}); {len(memories.registered)} processes have registered"
        )
        for member in self.membership.lost:
            if member.node.role is Role.SERVER:  # who has not heard of it may have marked pushes there, as ever
                self.checkpoints.server_lost(member, self.membership.workers.values())
        effects: list[fx.Effect] = [fx.Log(told), *self._recall_agreements(memories, now)]
        if memories.rest is not None and memories.rest.note:
            effects += self._recall_leases(memories, memories.rest)
        if self.newcomers is not None:
            calls = {member: message.calls for member, message in memories.registered.items()}
            effects += self.newcomers.recall(memories.joined()[2], calls)
        if self.rollback is not None:
            effects += self.rollback.recall(memories.snapshots)
        self._wait_if_deserted(now)
        effects += self._without(missing, memories, now)
        if self._stopped:
            return effects
        effects += [] if self._is_over else self._announce(now)
        for event in memories.later:
            effects += event(now)
        for kind, store, counter in (*self._answers, *self._over):  # now that what is under way is known to be
            counts = self.checkpoints.saves if kind == msg.Save.KIND else self.checkpoints.loads
            if kind != msg.Barrier.KIND:
                counts[store] = max(counts.get(store, 0), counter + 1)
        return effects + self._without_departed(now)

    def _wait_if_deserted(self, now: float) -> None:
        """If only servers are left, and were not told to stop, wait for a worker to rejoin within the return limit."""
        there = self.membership
        lost = [member for member in there.lost if member.node.role is Role.WORKER]
        return_s = self.config.return_limit_s
        if lost and return_s and not (there.there or there.newcomers):
            cause = f"it was the last worker, and none has come back within {return_s:g} s"
            last = max(lost, key=lambda one: one.incarnation)
            sentence = f"{last} was lost: {cause}"
            self._awaited_rejoins[last.node] = (
                now + return_s,
                lambda: self._abort(str(last), "", cause, None, sentence),
            )

    def _recall_members(self, memories: Memories) -> None:
        newest = max(memories.registered.values(), key=lambda message: message.epoch)
        since, newcomers, _ = memories.joined()
        peers, left, lost = memories.peers.values(), memories.left, memories.lost
        self.membership.recall(peers, left, lost, newest.epoch, since, newcomers, newest.owners)
        self.losses.lost_before = frozenset(self.membership.lost)
        rosters = {message.epoch: message for message in memories.registered.values()}
        for message in memories.copied:
            of = rosters.get(message.epoch)
            # Most rosters change no copy, and the server that would say so may be dead.
            still = of is not None and self._copy_of(of, message.rank) == self._copy_of(newest, message.rank)
            self.membership.copied(message.rank, newest.epoch if still else message.epoch)

    def _copy_of(self, roster: msg.Reregister, rank: int) -> tuple[set[Member], Sequence[int]]:
        """A server and the one that keeps its copy, and the slices of which servers the first one has."""
        pair = {server(rank), server((rank + 1) % self.config.num_servers)}
        owners = roster.owners or range(self.config.num_servers)
        numbers = [number for number, owner in enumerate(owners) if owner == rank]
        lost = {peer.member for peer in roster.lost}
        return {peer.member for peer in roster.peers if peer.member.node in pair} - lost, numbers

    def _recall_agreements(self, memories: Memories, now: float) -> list[fx.Effect]:
        """Keys and optimizers, of which servers are told once more; passed barriers; locks of folders."""
        first = min(memories.registered, key=lambda one: (one.node.role is not Role.WORKER, one.node.rank))
        effects: list[fx.Effect] = []
        for optimizer in memories.optimizers.values():
            effects += self.keys.recall_optimizer(optimizer, first, now)
        servers = self.membership.servers.items()
        # Another may be new, and know less; and of one that is gone its heir knows all.
        having = {one for node, one in servers if self.membership.numbers_of(node)} & memories.registered.keys()
        for _, told in sorted(memories.assigned.items()):
            message = next(iter(told.values()))
            is_told = having <= told.keys() and len({one.giver for one in told.values()}) == 1
            effects += self.keys.recall(message, is_told, first)
            if is_told and not {one for _, one in servers} <= told.keys():
                effects += self._questions.ask(partial(_numbered, message), lambda _: [])
        for kind, store, counter in self._answers:
            if kind == msg.Barrier.KIND:
                self._passed[store] = max(self._passed.get(store, 0), counter + 1)
        for register in memories.registered.values():
            for folder in register.folders:
                effects += self.checkpoints.recall(folder, register.run, now)
        return effects

    def _recall_leases(self, memories: Memories, rest: msg.Rest) -> list[fx.Effect]:
        """Which worker has which part of the data."""
        resting = [one.node for one in memories.resting if one.node.rank in rest.ranks and self.membership.has(one)]
        open_ = memories.asked_again - self._answers.keys()
        saving = {(store, counter) for kind, store, counter in open_ if kind == msg.Save.KIND}
        effects, (stores, *numbers) = self._with_leases().recall(rest.note, resting, saving)
        for counts, told in zip((self._passed, self.checkpoints.saves, self.checkpoints.loads), numbers, strict=True):
            for store, count in zip(stores, told, strict=True):
                counts[store] = max(counts.get(store, 0), count)
        return effects

    def _without(self, missing: list[Member], memories: Memories, now: float) -> list[fx.Effect]:
        """Go on without those that have not registered, or end the job, and name all of them."""
        silent, replaced, effects = [], [], list[fx.Effect]()
        for member in missing:
            ended = memories.end_of(member)
            if ended is None:
                silent.append(member)
            elif ended.life != self.membership.lives[member]:
                replaced.append(member)
            elif ended.clean:  # it had heard that it may go, from the earlier scheduler
                self.membership.leave(member.node)
                effects += [] if self.leases is None else self.leases.left(member)
        effects += self._end_if_alone(now)
        if self._is_over:
            for member in (*silent, *replaced):
                self.membership.leave(member.node)
            return effects + self._stop_if_alone()
        cause = f"did not register within {self.config.away_s:g} s with the scheduler that was started again"
        mortal = [member for member in silent if not self.losses.may_go_on(member, "")]
        if mortal:
            names = ", ".join(map(str, silent))
            return [*effects, *self._abort(str(mortal[0]), "", cause, None, f"{names} {cause}")]
        for member in silent:
            effects += self._lost(member, cause, now)
        for member in replaced:
            effects += self._lost(member, "it has ended, and its rank was started again since", now, has_ended=True)
        return effects

    def _again(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        """Handle what has come before everything was known."""
        if not self.membership.has(sender) or self._stopped:
            return []
        if isinstance(message, msg.Barrier | msg.Save | msg.Load):
            counter, effects = message.counter, list[fx.Effect]()
            if not isinstance(message, msg.Save) and counter == msg.LATER and self.newcomers is not None:
                counter = self.newcomers.answered(sender, message)
                effects = self.newcomers.tell(sender, message, counter) if counter < msg.LATER else []
            answer = self._answers.get((message.KIND, message.store, counter))
            if answer is not None:
                code, reason = answer
                request = message.request
                return [*effects, fx.Send(sender, msg.Done(request) if code < 0 else msg.Failed(request, code, reason))]
        if isinstance(message, msg.Saved):
            # All workers had marked when it was said. If nobody asks any more, all have been answered.
            call = (msg.Save.KIND, message.store, message.counter)
            if call in self._answers or call not in self._asked_again:
                self._over.add(call)
                return []
        return super().handle(sender, message, now)


def _numbered(message: msg.Assign, request: int) -> msg.Assign:
    return replace(message, request=request)
