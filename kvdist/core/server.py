"""The server: keeps its slices of every key, closes rounds, answers pushes and pulls. Pure; no socket, no clock.

Walk of a push: `handle` → `_push` (check every slice against the table) → `Shard.offer` → when full `Shard.close` →
`_answer` everybody who waited. Answers to one worker that arise from one message leave in one message, small arrays
joined, large ones as views of the published buffer under a lease that ends when the worker has them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from kvdist.config import Limits
from kvdist.core.answers import Answers
from kvdist.core.effects import NEVER, Disconnected, Effect, Event, Forget, Machine, Report, Send, Stop
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction, Joining
from kvdist.core.policy import POLICIES
from kvdist.core.shard import Allocate, Buffer, Contribution, PullRequest, Setting, Shard, Verdict, ordinary_memory
from kvdist.core.sharding import Slice, cut
from kvdist.core.verdict import lost, scheduler_lost
from kvdist.dtypes import DType
from kvdist.errors import KvdistError, OptimizerMismatch, PushRefused
from kvdist.kernels.interface import Kernels
from kvdist.nodes import Member, Role
from kvdist.optimizer.registry import from_description
from kvdist.optimizer.updater import Updater
from kvdist.protocol.layout import views
from kvdist.protocol.messages import (
    U8,
    U32,
    Abort,
    Alive,
    Arrays,
    Assign,
    Done,
    ErrorCode,
    Failed,
    Flag,
    InitValues,
    Message,
    Outcome,
    Pull,
    Push,
    Rejected,
    ReplaceValues,
    Roster,
    SetOptimizer,
    Waiting,
    Welcome,
)
from kvdist.protocol.messages import (
    Stop as StopMessage,
)


class Server(Machine):
    """The pure machine of a server.

    Args:
        introduction: who this process is and where it listens.
        limits: sizes and times.
        kernels: who does the arithmetic.
        now: the time.
        allocate: gives memory for values.
    """

    def __init__(
        self,
        introduction: Introduction,
        limits: Limits,
        kernels: Kernels,
        now: float,
        allocate: Allocate = ordinary_memory,
    ) -> None:
        self.limits = limits
        self.kernels = kernels
        self._allocate = allocate
        self.joining = Joining(introduction, limits.connect_timeout_s, limits.form_timeout_s, now)
        self.epoch = 0
        self.step = 0
        self.steps: dict[Member, int] = {}
        self.workers: dict[int, Member] = {}
        """Rank → the live worker there."""
        self._left: set[Member] = set()
        """Workers that said goodbye; their last words are not worth an answer."""
        self.updaters: dict[int, Updater] = {}
        """Store → what updates its values; absent while a sum replaces them."""
        self.shards: dict[int, Shard] = {}
        self._store_of: dict[int, int] = {}
        """Slice → its store."""
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Slice → elements; -1 for a slice that is not kept here."""
        self._dtypes: U8 = np.zeros(0, np.uint8)
        self._answers: dict[Member, Answers] = {}
        self._open: set[int] = set()
        """Slices with an open round or waiting pulls."""
        self._next_alive = NEVER
        self._next_look = NEVER
        self._scheduler_lost_at = NEVER
        self._stopping = False

    @property
    def me(self) -> Member:  # type: ignore[override]  # read-only here: the joining decides
        """Who this process is."""
        return self.joining.me

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        return min(self.joining.deadline, self._next_alive, self._next_look, self._scheduler_lost_at)

    def refuses(self, source: Member, message: Message) -> str | None:
        """Listen to the scheduler and to the live workers of the roster."""
        if source == SCHEDULER_MEMBER or self.workers.get(source.node.rank) == source:
            return None
        if source in self._left:
            return ""
        return f"{source} is not a worker of this cluster: it belongs to an earlier job, or was replaced"

    def handle(self, sender: Member, message: Message, now: float) -> list[Effect]:
        """React to a message of a worker or of the scheduler."""
        match message:
            case Push():
                self._push(sender, message, now)
            case Pull():
                self._pull(sender, message, now)
            case InitValues() | ReplaceValues():
                self._initialise(sender, message, now)
            case _:
                return self._control(message, now) if sender.node.role is Role.SCHEDULER else []
        return self._flush()

    def observe(self, event: Event, now: float) -> list[Effect]:
        """React to a broken or mended connection; only the scheduler's matters, it judges the others."""
        if isinstance(event, Disconnected):
            if event.member == SCHEDULER_MEMBER and not self._stopping:
                # What is said now leaves with the next connection, and tells the scheduler whose it is.
                self.joining.disconnected(now)
                if self.joining.welcomed:
                    self._next_alive = now
                    self._scheduler_lost_at = now + self.limits.reconnect_grace_s
        elif getattr(event, "member", None) == SCHEDULER_MEMBER:
            self._scheduler_lost_at = NEVER
        return []

    def tick(self, now: float) -> list[Effect]:
        """Heartbeat, hints to those who wait, deadlines."""
        try:
            effects = self.joining.tick(now)
        except KvdistError as error:
            return [Stop(error)]
        if now >= self._scheduler_lost_at:
            return [Stop(scheduler_lost(self.joining.introduction.scheduler_endpoint, self.me))]
        if now >= self._next_alive:
            self._next_alive = now + self.limits.heartbeat_s
            effects.append(Send(SCHEDULER_MEMBER, Alive()))
        if now >= self._next_look:
            self._next_look = now + self.limits.explain_after_s / 2
            effects += self._hints(now)
        return effects

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[Effect]:
        """Values have arrived: the buffers they showed are free again."""
        for token in tokens:
            assert isinstance(token, Buffer) and token.leases > 0
            token.leases -= 1
        return []

    @property
    def waiting_since(self) -> float | None:
        """Since when this server waits for the cluster to form; its open rounds are explained by the workers."""
        return None if self.joining.complete else self.joining.started_at

    def explain(self, now: float) -> str | None:
        """The oldest open round, and who is missing in it."""
        waiting = self.joining.explain(now)
        if waiting is not None:
            return waiting
        rounds = [self.shards[number] for number in self._open if self.shards[number].slots]
        if not rounds:
            return None
        shard = min(rounds, key=lambda shard: (shard.open_since, shard.number))
        missing = ", ".join(f"worker-{rank}" for rank in shard.policy.missing(shard.slots.keys(), self.workers.keys()))
        return f"round {shard.version} of key {shard.key!r} has waited {now - shard.open_since:.1f} s for {missing}"

    def validate(self) -> None:
        """Check every invariant."""
        assert not self._answers, "answers leave with the message that caused them"
        for number, shard in self.shards.items():
            shard.validate(self.workers.keys())
            waits = bool(shard.slots or shard.pulls)
            assert not waits or number in self._open, "who waits is known"

    # What the scheduler says.

    def _control(self, message: Message, now: float) -> list[Effect]:
        match message:
            case Welcome():
                self.joining.welcome(message, now)
                self._next_alive = now + self.limits.heartbeat_s
            case Rejected():
                return [Stop(self.joining.refusal(message))]
            case Roster():
                return self._roster(message, now)
            case Assign():
                self._assign(message)
                return [Send(SCHEDULER_MEMBER, Done(message.request))]
            case SetOptimizer():
                return [self._set_optimizer(message)]
            case Abort():
                return [Stop(lost(message))]
            case Waiting():
                pass  # A hint for whoever joins; the scheduler prints it too.
            case StopMessage():
                self._stopping = True
                return [Stop()]
            case _:
                return [Report(f"ignored an unexpected {type(message).__name__} from the scheduler")]
        return []

    def _roster(self, message: Roster, now: float) -> list[Effect]:
        peers = self.joining.roster(message)
        before = self.workers
        self.workers = {peer.member.node.rank: peer.member for peer in peers if peer.member.node.role is Role.WORKER}
        self.epoch += 1
        self._next_look = now + self.limits.explain_after_s
        gone = before.keys() - self.workers.keys()
        self._left |= {before[rank] for rank in gone}
        # Whoever left cannot be waited for any more, and waits for nothing itself.
        for number in sorted(self._open):
            shard = self.shards[number]
            shard.pulls = [pull for pull in shard.pulls if pull.member.node.rank not in gone]
            self._close_if_ready(shard, now)
        return [*self._flush(), *(Forget(before[rank]) for rank in sorted(gone))]

    def _assign(self, message: Assign) -> None:
        policy = POLICIES[message.mode]
        placement = message.placement
        num_servers = self.joining.introduction.num_servers
        for key, size, code, first, home in zip(
            message.keys, message.sizes, message.dtypes, placement.first_slices, placement.homes, strict=True
        ):
            dtype = DType(code)
            for piece in cut(size, dtype.itemsize, home, num_servers, first, placement.slice_bytes):
                if piece.server == self.me.node.rank and piece.number not in self.shards:
                    self.shards[piece.number] = Shard(key, piece.number, dtype, piece.count, policy, self._allocate)
                    self._store_of[piece.number] = message.store
                    self._enter(piece, dtype)

    def _enter(self, piece: Slice, dtype: DType) -> None:
        """Note what a slice must look like. The table at least doubles when it grows, or each init would copy it."""
        size = len(self._counts)
        if piece.number >= size:
            more = max(piece.number + 1 - size, size)
            self._counts = np.concatenate([self._counts, np.full(more, -1, np.int64)])
            self._dtypes = np.concatenate([self._dtypes, np.zeros(more, np.uint8)])
        self._counts[piece.number] = piece.count
        self._dtypes[piece.number] = dtype

    def _set_optimizer(self, message: SetOptimizer) -> Effect:
        try:
            optimizer = from_description(message.description)
        except (ValueError, TypeError) as error:
            return Send(SCHEDULER_MEMBER, Failed(message.request, ErrorCode.CONFIG, str(error)))
        self.updaters[message.store] = Updater(optimizer, self.kernels)
        return Send(SCHEDULER_MEMBER, Done(message.request))

    # What workers say.

    def _initialise(self, sender: Member, message: InitValues | ReplaceValues, now: float) -> None:
        arrays = views(message.arrays)
        for i in self._checked(sender, message.runs, message.ids, message.arrays):
            shard = self.shards[int(message.ids[i])]
            put = shard.replace if isinstance(message, ReplaceValues) else shard.initialise
            put(arrays[i])
            self._to(sender).counted(int(message.runs[i]), shard, Outcome.INITIALISED)
            self._close_if_ready(shard, now)

    def _push(self, sender: Member, message: Push, now: float) -> None:
        arrays = views(message.arrays)
        runs, ids, steps = message.runs.tolist(), message.ids.tolist(), message.steps.tolist()
        versions, samples, flags = message.versions.tolist(), message.samples.tolist(), message.flags.tolist()
        setting_of = message.setting_of.tolist()
        settings = [_setting(numbers) for numbers in message.settings]
        for i in self._checked(sender, message.runs, message.ids, message.arrays, message.flags):
            shard = self.shards[ids[i]]
            contribution = Contribution(
                sender,
                runs[i],
                steps[i],
                versions[i],
                samples[i],
                flags[i],
                settings[setting_of[i]],
                arrays[i],
                message.pull,
            )
            try:
                verdict = shard.offer(contribution, now)
            except PushRefused as error:
                self._to(sender).refuse(runs[i], ids[i], ErrorCode.REFUSED, str(error))
                continue
            if verdict is Verdict.ACCEPTED:
                self._open.add(ids[i])
                self._close_if_ready(shard, now)
            elif verdict is Verdict.ALREADY_COUNTED:
                self._answer_contribution(shard, contribution)

    def _pull(self, sender: Member, message: Pull, now: float) -> None:
        steps, versions = message.steps.tolist(), message.versions.tolist()
        runs, ids = message.runs.tolist(), message.ids.tolist()
        for i in self._checked(sender, message.runs, message.ids):
            shard = self.shards[ids[i]]
            if not shard.pulls:
                shard.open_since = shard.open_since if shard.slots else now
            shard.pulls.append(PullRequest(sender, runs[i], steps[i], versions[i]))
            self._answer_pulls(shard)
            if shard.pulls:
                self._open.add(ids[i])

    def _checked(
        self, sender: Member, runs: U32, ids: U32, arrays: Arrays | None = None, flags: U8 | None = None
    ) -> Iterable[int]:
        """The positions whose slice is kept here and whose array has its shape; the others are refused."""
        inside = ids < len(self._counts)
        expected = np.where(inside, self._counts[np.where(inside, ids, 0)], -1) if len(self._counts) else inside - 1
        good = expected >= 0
        if arrays is not None:
            fits = (arrays.counts == expected) & (
                arrays.dtypes == self._dtypes[np.where(inside, ids, 0)] if good.any() else good
            )
            if flags is not None:
                fits |= (flags & Flag.EMPTY).astype(bool)
            good &= fits
        if good.all():
            return range(len(ids))
        for i in np.flatnonzero(~good).tolist():
            known = expected[i] >= 0
            what = "has another size or dtype than was declared" if known else f"is not kept by {self.me}"
            self._to(sender).refuse(int(runs[i]), int(ids[i]), ErrorCode.REFUSED, f"slice {int(ids[i])} {what}")
        positions: list[int] = np.flatnonzero(good).tolist()
        return positions

    def _close_if_ready(self, shard: Shard, now: float) -> None:
        while shard.is_ready(self.workers.keys()):
            contributions = list(shard.slots.values())
            try:
                contributions = shard.close(self.updaters.get(self._store_of[shard.number]), self.kernels)
            except (OptimizerMismatch, PushRefused) as error:
                mismatch = isinstance(error, OptimizerMismatch)
                code = ErrorCode.OPTIMIZER_MISMATCH if mismatch else ErrorCode.REFUSED
                for contribution in contributions:
                    self._to(contribution.member).refuse(contribution.run, shard.number, code, str(error))
            else:
                for contribution in contributions:
                    self._answer_contribution(shard, contribution)
        self._answer_pulls(shard)
        if not shard.slots and not shard.pulls:
            self._open.discard(shard.number)

    # What workers are told.

    def _to(self, member: Member) -> Answers:
        answers = self._answers.get(member)
        if answers is None:
            answers = self._answers[member] = Answers()
        return answers

    def _answer_contribution(self, shard: Shard, contribution: Contribution) -> None:
        answers = self._to(contribution.member)
        if contribution.pull:
            answers.value(contribution.run, shard)
        else:
            answers.counted(contribution.run, shard, Outcome.COUNTED)

    def _answer_pulls(self, shard: Shard) -> None:
        for pull in shard.take_satisfied_pulls():
            self._to(pull.member).value(pull.run, shard)

    def _flush(self) -> list[Effect]:
        effects: list[Effect] = []
        for member, answers in self._answers.items():
            if self.workers.get(member.node.rank) != member:
                continue  # It left, or was replaced, while others were still in the round.
            effects += answers.messages(member, self.limits.slice_bytes)
        self._answers = {}
        return effects

    def _hints(self, now: float) -> list[Effect]:
        """Tell those who have waited long in which round, and for whom."""
        hints: dict[Member, Waiting] = {}
        for number in sorted(self._open):
            shard = self.shards[number]
            if now - shard.open_since < self.limits.explain_after_s:
                continue
            missing = shard.policy.missing(shard.slots.keys(), self.workers.keys()) if shard.slots else ()
            subject = f"round {shard.version} of key {shard.key!r}"
            if shard.published is None:
                subject, missing = f"the first value of key {shard.key!r}", (0,)
            waiters = [c.member for c in shard.slots.values()] + [pull.member for pull in shard.pulls]
            for member in waiters:
                hints.setdefault(member, Waiting(subject, missing, now - shard.open_since))
        return [Send(member, hint) for member, hint in hints.items()]


def _setting(numbers: tuple[float, float, float]) -> Setting:
    """From the wire, where not-a-number stands for what the server's optimizer decides."""
    lr, wd, rescale = (None if math.isnan(number) else number for number in numbers)
    return lr, wd, rescale
