"""The scheduler: admits members, agrees on keys and optimizers, keeps barriers, judges losses. Pure.

It is off the data path: no push or pull passes through it. Its decisions are agreements of members
(`kvdist.core.scheduler.agreement`), never counts of messages, so a repeated request changes nothing. `explain`, the
hints to members that wait long and the search for deadlocks all use the waits of these agreements.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from kvdist import errors
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.policy import MODES
from kvdist.core.scheduler.agreement import Agreement, Answer, MemberWait, Questions
from kvdist.core.scheduler.checkpoints import Checkpoints
from kvdist.core.scheduler.deadlocks import NAMED_MAX, Deadlocks
from kvdist.core.scheduler.keys import Keys
from kvdist.core.scheduler.losses import Losses
from kvdist.core.scheduler.membership import Membership
from kvdist.core.sharding import Placer
from kvdist.naming import name_of, who_says_what
from kvdist.nodes import UNRANKED, Member, NodeId, Role, worker
from kvdist.protocol import messages as msg

if TYPE_CHECKING:  # a feature at a seam: schedulers run without it
    from kvdist.core.scheduler.leases import Leases
    from kvdist.core.scheduler.newcomers import Newcomers
    from kvdist.core.scheduler.rollback import Rollback

BarrierWord = tuple[str, int]
"""Statement of a worker at a barrier, and rank of the giver, the worker whose values all workers get, or -1."""

ROSTER_GAP_S = 0.001
"""Time between two rosters, for each member: a roster for all members costs the square of their number, and a thousand
workers may leave at nearly the same time."""


class Verdicts(Protocol):
    """Detects slow members by the times that all members report: see `kvdist/diagnostics/pace.py`."""

    def heard(self, sender: Member, message: msg.StepTimes, now: float) -> list[fx.Effect]:
        """Handle the times of a member."""

    def summary(self) -> list[fx.Effect]:
        """Return the summary of the whole job at its end."""


class Scheduler(fx.Machine):
    """The pure machine of the scheduler.

    Args:
        config: size of the cluster, placement of keys, and other settings.
        now: the time.
        first_incarnation: incarnation of the first member. A number that differs between jobs keeps processes of an
            earlier job on the same port from being taken for members of this job.
    """

    def __init__(self, config: ClusterConfig, now: float, first_incarnation: int = 1) -> None:
        self.config = config
        self.limits = config.limits
        self.me = SCHEDULER_MEMBER
        self.epoch = self.step = 0
        self.membership = Membership(config, first_incarnation)
        self.steps: dict[Member, int] = {}
        self._questions = Questions(self.membership.servers)
        placer = Placer(
            config.num_servers,
            config.bigarray_bound,
            config.limits.slice_bytes,
            config.placement == "hash",
        )
        self.loads_bytes = placer.loads_bytes
        self.keys = Keys(self.membership, placer, self._questions, config.limits)
        self.checkpoints = Checkpoints(self.membership, self.keys, self._questions)
        self.on_loss = msg.OnLoss[config.on_loss.upper()]
        self.newcomers: Newcomers | None = None
        if self.on_loss is not msg.OnLoss.FAIL:
            from kvdist.core.scheduler.newcomers import Newcomers  # a feature at a seam: loaded where it is used

            patience_s = config.limits.reconnect_grace_s(True) + config.limits.patience_s
            self.newcomers = Newcomers(self.membership, self.keys, self._questions, patience_s, self)
        self.rollback: Rollback | None = None
        if config.snapshots is not None:
            from kvdist.core.scheduler.rollback import Rollback  # a feature at a seam: loaded where it is used

            assert self.newcomers is not None
            parts = (self.membership, self.keys, self._questions, self.checkpoints, self.newcomers, self)
            self.rollback = Rollback(config, now, *parts)
            self.checkpoints.after_load = self.rollback.forget
        can_return = config.loss_policy.return_limit_s > 0
        self.losses = Losses(self.membership, self.keys, self.on_loss, can_return, self._doomed)
        self.leases: Leases | None = None
        """Leases of examples; None until a worker asks for a lease, or a checkpoint with leases is loaded."""
        self.verdicts: Verdicts | None = None
        """Detector of slow members, if diagnostics are attached."""
        self.checkpoints.restoring_data = self._restoring_data
        self._deadlocks = Deadlocks()
        self._barriers: dict[tuple[int, int], Agreement[BarrierWord]] = {}
        """(store, number) → open barrier."""
        self._passed: dict[int, int] = {}
        """Store → number of its barriers that are over."""
        self._commands: list[Agreement[str]] = []
        """Commands that not every server has run."""
        self._at_work: set[Member] = set()
        """Live workers that have completed a step."""
        self._heard: dict[Member, float] = {}
        """Member → time of its last message."""
        self._started_at = now
        self._form_by = now + config.limits.form_timeout_s
        self._next_look = now + config.limits.explain_after_s
        self._announced_at = -fx.NEVER
        self._announce_at = fx.NEVER
        """Time at which a change of the membership must be announced."""
        self._rounds: dict[int, tuple[int, bool]] = {}
        """Rank of a worker that has left → (number of its rounds, whether it had closed its stores)."""
        self._ending: set[Member] = set()
        """Workers whose goodbye reported the end of their process, until the launcher reports its exit code."""
        self._awaited_rejoins: dict[NodeId, tuple[float, Callable[[], list[fx.Effect]]]] = {}
        """Awaited rejoins: node → (deadline, function that ends the job when it passes)."""
        self._stop_by = fx.NEVER
        self._stopped = False
        self._error: errors.KvdistError | None = None
        """Error that has ended the job."""
        self._now = now
        """Time of the last message or event."""
        self._awake_since = now
        """Time since which events have come at least every few heartbeats, so this process was not suspended."""

    @property
    def deadline(self) -> float:
        """Time at which `tick` should run next."""
        form_by = fx.NEVER if self.membership.is_complete else self._form_by
        snapshot = fx.NEVER if self.rollback is None or self._is_over else self.rollback.deadline
        dues = (form_by, self._next_look, self._announce_at, self._stop_by, self._deadlocks.due, self.keys.due)
        returns = min([due for due, _ in self._awaited_rejoins.values()], default=fx.NEVER)
        return min(self.membership.next_loss, returns, snapshot, *dues)

    def refuses(self, source: Member, message: msg.Message) -> str | None:
        """Return the reason to refuse a message, unless it is of a member, or the hello of a process that wants to
        join."""
        if self.membership.has(source):
            return None
        if source.node.rank == UNRANKED and source.node.role is not Role.SCHEDULER:
            return None if isinstance(message, msg.Hello) else ""
        if source in self.membership.lost:
            return self._fenced(source)
        return f"{source} has no seat in this job: it is of an earlier one, or was replaced; start the whole job again"

    def handle(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        """Handle a message of a server or a worker."""
        self._note_time(now)
        effects = self._handle(sender, message, now)
        if self.newcomers is not None:
            effects = effects + self.newcomers.advance() + self._begins_work(sender)
        return self._with_news(effects)

    def _begins_work(self, member: Member) -> list[fx.Effect]:
        """Report a worker's first step to the launcher, which limits restarts of processes that end before their first
        step."""
        is_there = self.config.supervised and self.membership.awaited.get(member.node) == member
        if not is_there or member in self._at_work:
            return []
        if self.steps.get(member, 0) <= self.membership.since.get(member, 0):
            return []
        self._at_work.add(member)
        return [fx.TellLauncher(f"at work worker {member.node.rank} life {self.membership.lives[member]}")]

    def resume(self, now: float) -> None:
        """Continue in a new process, to which the launcher has not reported the workers at work.

        If the job has ended, some members may not know it, so it is ended again after the time for a farewell.
        """
        self._at_work.clear()
        if self._stopped:
            self._stopped, self._stop_by = False, now + self.limits.farewell_s

    def _note_time(self, now: float) -> None:
        if now - self._now > self.limits.quiet_s:
            self._awake_since = now
        self._now = now

    def again(self, sender: Member, message: msg.Message) -> list[fx.Effect]:
        """Handle a message that had to wait."""
        return self._handle(sender, message, self._now) if self.membership.has(sender) else []

    def _handle(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        is_worker = sender.node.role is Role.WORKER
        if sender.node.rank != UNRANKED:
            self._heard[sender] = now
        if is_worker and self.newcomers is not None:
            answer = self.newcomers.answer(sender, message)
            if answer is not None:
                return answer
        if self.rollback is not None:
            answer = self._about_snapshots(self.rollback, sender, message, now)
            if answer is not None:
                return answer
        match message:
            case msg.Hello():
                return self._hello(sender, message, now)
            case msg.Declare(request, mode=mode) if is_worker and (why := self._why_not(mode)):
                return [fx.Send(sender, msg.Failed(request, msg.ErrorCode.CONFIG, why))]
            case msg.Declare() if is_worker:
                return self.keys.declare(sender, message, now)
            case msg.Configure() if is_worker:
                return self.keys.configure(sender, message, now)
            case msg.Barrier() if is_worker:
                return self._barrier(sender, message, now)
            case msg.Blocked() if is_worker:
                self._deadlocks.report(sender, message, now)
                return []
            case msg.Claim() if is_worker:
                return self._claim(sender, message, now)
            case msg.Save() if is_worker:
                if self.leases is not None:
                    self.leases.mark(sender, message)
                return self.checkpoints.save(sender, message, now)
            case msg.Load() if is_worker:
                number = self._number(sender, message, *self.checkpoints.loading_of(message.store))
                return [] if number is None else self.checkpoints.load(sender, message, number, now)
            case msg.Saved() if not is_worker:
                return self.checkpoints.saved(sender, message, now)
            case msg.Command() if is_worker:
                return self._command(sender, message, now)
            case msg.StepTimes():
                return [] if self.verdicts is None else self.verdicts.heard(sender, message, now)
            case msg.Goodbye() if is_worker:
                return self._goodbye(sender, message, now)
            case msg.Goodbye() if message.failure:
                return self._lost(sender, message.failure, now)
            case msg.Lease() if is_worker and (why := replace(self.config.loss_policy, leases=True).refusal()):
                return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, why))]
            case msg.Lease() if is_worker:
                return self._with_leases().lease(sender, message, now)
            case msg.Used() if is_worker:
                return self._with_leases().used(sender, message)
            case msg.Seen() if not is_worker:
                copied = self._copied(sender, message.epoch) if message.whole else []
                return [*copied, *self.membership.views.heard(sender, message)]
            case msg.Done() if not is_worker:
                return self._questions.answered(sender, message.request, "")
            case msg.Failed() if not is_worker:
                return self._questions.answered(sender, message.request, f"{sender}: {message.reason}")
            case _:
                return []

    def observe(self, event: fx.Event, now: float) -> list[fx.Effect]:
        """Handle an event: of a connection, of the disk, or of the launcher."""
        self._note_time(now)
        return self._with_news(self._observe(event, now))

    def _observe(self, event: fx.Event, now: float) -> list[fx.Effect]:
        match event:
            case fx.PeerDisconnected(member) if member in self._ending:
                return []
            case fx.PeerDisconnected(member, reason, after_silence):
                # libzmq does not report whether it has closed a silent connection within a host itself.
                heard = self._heard.get(member, now)
                is_quiet = now - heard > self.limits.quiet_s
                is_silent = after_silence or is_quiet
                is_judged = self.membership.is_complete or not is_silent
                grace_s = self._grace_s(after_silence, silent_s=now - max(heard, self._awake_since))
                due = now + grace_s if is_judged else fx.NEVER
                reason = f"was silent for {now - heard:.1f} s (KVDIST_PATIENCE_S)" if is_quiet else reason
                self.membership.suspect(member, due, reason, is_silent)
            case fx.PeerConnected(member):
                self.membership.trust(member)
            case fx.Unreachable(member, reason):
                return self._lost(member, reason, now)
            case fx.ChildEnded():
                return self._child_ended(event, now)
            case fx.ProcessStarted(node, host, pid):
                self.membership.note_started(node, host, pid)
            case fx.Persisted():
                return self.checkpoints.persisted(event)
            case fx.LauncherGone():
                return self._abort(
                    "launcher", self.config.root_host, "it ended or was killed", None, "the launcher is gone"
                )
        return self._stop_if_alone()

    def tick(self, now: float) -> list[fx.Effect]:
        """Do whatever is due: evictions, deadlines, announcements, searches for deadlocks, snapshots, hints."""
        self._note_time(now)
        return self._with_news(self._tick(now))

    def _tick(self, now: float) -> list[fx.Effect]:
        lost = self.membership.take_lost(now)
        if lost is not None:
            member, why = lost
            # A device between two hosts may close a connection, too; a launcher reports the end of each process.
            has_ended = why.has_ended and not self.config.supervised
            return self._server_gone(member) if self._is_over else self._lost(member, why.reason, now, has_ended)
        if now >= self._stop_by:
            return self._stop(None)
        for due, end in self._awaited_rejoins.values():
            if now >= due:
                return end()
        if not self.membership.is_complete and now >= self._form_by:
            missing = self.membership.missing()
            cause = f"did not register within {self.limits.form_timeout_s:g} s"
            sentence = f"the cluster is incomplete after {self.limits.form_timeout_s:g} s: {', '.join(missing)}"
            return self._abort(missing[0].split(" ")[0], "", cause, None, f"{sentence} did not register")
        if now >= self._announce_at:
            return self._announce(now)
        if now >= self.keys.due:
            return self.keys.advance_all(now)
        if now >= self._deadlocks.due:
            return self._look_for_deadlocks(now)
        if self.rollback is not None and not self._is_over and now >= self.rollback.deadline:
            return self.rollback.tick(now)
        if now >= self._next_look:
            self._next_look = now + self.limits.explain_after_s / 2
            return self._hints(now)
        return []

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[fx.Effect]:
        """Handle acknowledged messages: a stop (its token is the server), or a roster."""
        if member in tokens:
            return self._server_gone(member)
        for epoch in tokens:
            if isinstance(epoch, int):
                self.checkpoints.heard(member, epoch)
        return []

    @property
    def waiting_since(self) -> float | None:
        """Time since which the scheduler waits for the cluster to form, or for a rollback."""
        if not self.membership.is_complete:
            return self._started_at
        return None if self._snapshot_wait is None else self._snapshot_wait.since

    @property
    def _snapshot_wait(self) -> MemberWait | None:
        return None if self.rollback is None or self._is_over else self.rollback.wait

    def explain(self, now: float) -> str | None:
        """Return the action for which the oldest wait waits, and the members that must act."""
        if not self.membership.is_complete:
            return self.membership.progress()
        oldest = self._snapshot_wait or min(self._waits(), key=lambda wait: wait.since, default=None)
        return None if oldest is None else oldest.sentence(now)

    def validate(self) -> None:
        """Check every invariant."""
        self.membership.validate()
        for barrier in self._barriers.values():
            is_passing = not barrier.is_complete or barrier.waits_for is not None
            assert not self.membership.awaited or is_passing, "a complete barrier is passed at once"
            barrier.validate()
        self.checkpoints.validate()
        if self.leases is not None:
            self.leases.validate()

    # Joining.

    def _hello(self, sender: Member, message: msg.Hello, now: float) -> list[fx.Effect]:
        try:
            known = self.membership.known(sender, message)
            if known is None and self.newcomers is not None and self.membership.is_complete:
                return self._hello_late(self.newcomers, sender, message, now)
            member = known or self.membership.admit(sender, message)
        except errors.ConfigError as error:
            return [fx.Send(sender, msg.Rejected(str(error)))]
        if member in self.membership.lost:
            # It has not received its welcome, so it cannot read messages to a member; it may be started again.
            cause, again = self.membership.lost[member], f"{self._fenced(member)}; start it again"
            return [fx.Send(sender, msg.Abort(msg.ErrorCode.PEER_LOST, str(member), "", cause, -1, again))]
        effects = self.welcome(sender, member)
        if known is not None:
            return effects
        if self._is_over and member.node.role is Role.SERVER:
            effects.append(fx.Send(member, msg.Stop(), member))
        elif self.membership.is_complete:
            self.membership.judge_silent(now + self._grace_s(after_silence=True))
            effects += self._announce(-fx.NEVER)
        elif self.membership.absent:
            effects += self._incomplete_for_ever()
        return effects

    def welcome(self, stranger: Member, member: Member) -> list[fx.Effect]:
        """Tell an admitted process which member it is, and know it by this name from then on."""
        own = (self.on_loss, self.config.loss_policy.away_s, self.config.replicas)
        word = msg.Welcome(member.node.rank, member.incarnation, *own)
        return [fx.Send(stranger, word), fx.Bind(stranger, member)]

    def _grace_s(self, after_silence: bool, silent_s: float = 0.0) -> float:
        """Return how long a peer may be disconnected, after `silent_s` of silence while this process was awake."""
        goes_on = self.on_loss is not msg.OnLoss.FAIL
        is_on_host = self.config.is_local  # libzmq waits for the whole patience, and no network can break
        if goes_on and is_on_host and not after_silence and silent_s >= self.limits.patience_s:
            return 0.0
        return self.limits.reconnect_grace_s(after_silence, goes_on)

    def _hello_late(self, newcomers: Newcomers, sender: Member, message: msg.Hello, now: float) -> list[fx.Effect]:
        if sender.node.role is not Role.WORKER:
            return self._server_late(newcomers, sender, message, now)
        if self._is_over:
            return [fx.Send(sender, msg.Rejected(newcomers.over, is_over=True))]
        effects = newcomers.hello(sender, message, now)
        if self.membership.newcomers:
            self._awaited_rejoins = {
                node: due for node, due in self._awaited_rejoins.items() if node in self.membership.away
            }
            effects += self._without_departed(now)
        joined = [effect.member for effect in effects if isinstance(effect, fx.Bind)] if self.config.supervised else []
        return [*effects, *(fx.TellLauncher(f"joined worker {one.node.rank} life {message.life}") for one in joined)]

    def _announce_soon(self, now: float) -> list[fx.Effect]:
        """Announce departures: now, or together with the next departures if the last roster is recent."""
        self._announce_at = self._announced_at + ROSTER_GAP_S * len(self.membership.peers)
        return self._announce(now) if now >= self._announce_at else []

    def _announce(self, now: float) -> list[fx.Effect]:
        """Send the roster of a new epoch to all members."""
        self._announced_at, self._announce_at = now, fx.NEVER
        unknown = set() if self.newcomers is None else self.newcomers.introductions
        return self._send_roster([peer.member for peer in self.membership.present if peer.member not in unknown])

    def _send_roster(self, members: Iterable[Member]) -> list[fx.Effect]:
        """Send the roster of a new epoch to these members, among them all servers."""
        views = self.membership.views
        views.epoch += 1
        views.is_stale = False
        self.epoch = views.epoch
        roster = self.membership.roster
        return [fx.Send(member, roster, self._token(member)) for member in members]

    def _with_news(self, effects: list[fx.Effect]) -> list[fx.Effect]:
        """Append a roster for servers, if they have to know of something new, and have answered the last roster.

        While a roster for all is due soon, they wait for that: a loss is in no roster for servers before it is in one
        for all, or it could be settled before workers hear of it.
        """
        views, is_due_soon = self.membership.views, self._announce_at < fx.NEVER
        if not views.is_stale or not views.is_answered or is_due_soon or self._is_over:
            return effects
        return [*effects, *self.announce_to_servers()]

    def _token(self, member: Member) -> int | None:
        """Return the token of a roster for this member, if checkpoints depend on its acknowledgement."""
        return self.epoch if self.checkpoints.is_unaware(member) else None

    def announce(self) -> list[fx.Effect]:
        """Announce the present members now."""
        return self._announce(self._now)

    def announce_to_servers(self) -> list[fx.Effect]:
        """Send a roster to the servers alone, as workers need not know what has changed; to all, if that is due."""
        if self._announce_at < fx.NEVER:
            return self._announce(self._now)
        return self._send_roster(self.membership.servers.values())

    # Barriers and commands.

    def _barrier(self, sender: Member, message: msg.Barrier, now: float) -> list[fx.Effect]:
        """Handle the arrival of a worker at a barrier; if the worker has entered it before, say who is missing.

        Each worker makes a statement, which may be empty. If the statements at a barrier differ, it fails for all
        workers: so they detect different models before the first gradient.
        """
        passed = self._passed.get(message.store, 0)
        opened = {number: one for (store, number), one in self._barriers.items() if store == message.store}
        entered = [number for number, one in opened.items() if one.has_heard(sender)]
        number = entered[0] if entered else self._number(sender, message, opened, passed)
        if number is None:
            return []
        if message.repeats and not entered:
            return [fx.Send(sender, msg.Done(message.request))]  # the barrier is over
        which, workers = (message.store, number), self.membership.awaited
        barrier = self._barriers.get(which)
        if barrier is None:
            subject, later = f"barrier {number}", partial(self.membership.joined_later, message.pushes)
            quorum = self.membership.quorum
            barrier = self._barriers[which] = Agreement(subject, f"reach {subject}", now, workers, quorum, later)
        barrier.say(sender, (message.statement, message.giver))
        barrier.ask(sender, message.request)
        if entered:
            waits = (wait for wait in barrier.waits() if (wait.member, wait.request) == (sender, message.request))
            return [wait.hint(now) for wait in waits]
        return self._pass_barriers()

    def _pass_barriers(self) -> list[fx.Effect]:
        """Complete the barriers at which all live workers have arrived."""
        effects: list[fx.Effect] = []
        for (store, counter), barrier in list(self._barriers.items()):
            if barrier.is_complete and barrier.waits_for is None:
                effects += self._pass(store, counter, barrier)
        return effects

    def _pass(self, store: int, counter: int, barrier: Agreement[BarrierWord]) -> list[fx.Effect]:
        """Complete a barrier; newcomers at it take part in everything afterwards."""

        there = [member for member, _ in barrier.said.values() if self.membership.awaited.get(member.node) == member]
        joining = [] if self.newcomers is None else self.newcomers.joining(store, there)
        answer_all = partial(self._answer_barrier, store, counter, barrier)
        if self.newcomers is None or not joining:
            return answer_all()
        return self.newcomers.join(joining, store, answer_all, barrier)

    def _answer_barrier(
        self, store: int, counter: int, barrier: Agreement[BarrierWord], _: str = ""
    ) -> list[fx.Effect]:
        if self._barriers.get((store, counter)) is not barrier:
            return []  # the barrier was dropped meanwhile
        del self._barriers[store, counter]
        self._passed[store] = counter + 1
        answer = _barrier_answer(barrier)
        if self.newcomers is not None and answer is msg.Done:
            self.newcomers.agreed(store, next(iter(barrier.said.values()))[1][0])
        return barrier.answer(answer)

    def _number(
        self,
        sender: Member,
        message: msg.Barrier | msg.Load | msg.Claim,
        opened: Mapping[int, Agreement[Any]],
        count: int,
    ) -> int | None:
        """Return the number of a call among those of its kind and store; None if it has none yet, and waits.

        It is that of the first open agreement that waits for the caller, else the next.
        """
        numbers = [n for n, one in opened.items() if not one.has_heard(sender) and sender not in one.exempted]
        if self.newcomers is not None and self.newcomers.must_wait(sender, message, bool(numbers)):
            return None
        return min(numbers, default=max([count, *(number + 1 for number in opened)]))

    def _claim(self, sender: Member, message: msg.Claim, now: float) -> list[fx.Effect]:
        number = self._number(sender, message, *self.checkpoints.saving_of(message.store))
        return [] if number is None else self.checkpoints.claim(sender, message, number, now)

    def _command(self, sender: Member, message: msg.Command, now: float) -> list[fx.Effect]:
        """Let all servers run a command of a worker, which is answered after the last server."""
        command: Agreement[str] = Agreement("the command", "", now, self.membership.awaited)
        self._commands.append(command)
        effects = command.ask(sender, message.request)
        order = msg.Perform(0, message.head, message.body)
        return effects + self._questions.ask(order, partial(self._performed, command), command)

    def _performed(self, command: Agreement[str], failure: str) -> list[fx.Effect]:
        self._commands.remove(command)
        assert command.waits_for is not None
        failures = {node.rank: text for node, (_, text) in command.waits_for.said.items() if text}
        reason = _command_failures(failures, self.config.num_servers)
        failed = partial(msg.Failed, code=msg.ErrorCode.INTERNAL, reason=reason)
        return command.answer(failed if failure else msg.Done)

    # Departures, losses, the end.

    def _goodbye(self, sender: Member, message: msg.Goodbye, now: float) -> list[fx.Effect]:
        effects: list[fx.Effect] = [fx.Send(sender, msg.Done(message.request))]
        if message.failure:
            # An exit code does not identify a failure: other workers may end with the same code.
            said = "" if message.failure.startswith(errors.EXITED) else message.failure
            return effects + self._lost(sender, message.failure, now, said=said)
        if sender.node in self.membership.left:
            return effects
        self._rounds[sender.node.rank] = (self.steps.get(sender, 0), not message.ends)
        if message.ends and self.config.supervised and self.on_loss is msg.OnLoss.WAIT:
            self._ending.add(sender)  # and the launcher reports how: if it will come back, others must wait for it
            self.membership.trust(sender)
            return [*effects, fx.TellLauncher(f"leaves worker {sender.node.rank} life {self.membership.lives[sender]}")]
        return effects + self._left(sender, now)

    def _left(self, sender: Member, now: float) -> list[fx.Effect]:
        """Handle the final departure of a worker."""
        self.membership.leave(sender.node)
        self._at_work.discard(sender)
        effects: list[fx.Effect] = []
        if self.newcomers is not None:
            self.newcomers.forget(sender)
            is_over = self.on_loss is not msg.OnLoss.WAIT and not self.membership.members
            effects += self.newcomers.end() if is_over else []
        if self.leases is not None:
            self.leases.on_left(sender)
        return effects + self._announce_soon(now) + self._without_departed(now)

    def _without_departed(self, now: float) -> list[fx.Effect]:
        """Complete agreements that have waited only for a departed worker."""
        effects = [*self._pass_barriers(), *self.checkpoints.advance_all(), *self.keys.advance_all(now)]
        return effects + self._end_if_alone(now)

    @property
    def _is_over(self) -> bool:
        """Whether every worker has left, and the servers are ordered to stop."""
        return self._stop_by < fx.NEVER

    def _end_if_alone(self, now: float) -> list[fx.Effect]:
        """Stop the servers after the last worker has left, also servers that have not registered yet."""
        if not self.membership.workers_are_gone or self._is_over or self._awaited_rejoins:
            return []
        self._stop_by = now + self.limits.farewell_s
        self._announce_at = fx.NEVER
        effects: list[fx.Effect] = [fx.Send(server, msg.Stop(), server) for server in self.membership.servers.values()]
        effects += self._turn_away_late()
        effects += [] if self.verdicts is None else self.verdicts.summary()
        effects += self._uneven()
        if len(self.membership.absent) == self.config.num_workers:
            effects.insert(0, fx.Log("no worker joined the cluster: does the script call kv.create('dist')?"))
        return effects

    def _uneven(self) -> list[fx.Effect]:
        """Report different numbers of rounds of the workers: as a warning if a worker did not close its store."""
        counts = {rank: count for rank, (count, _) in self._rounds.items()}
        open_ = [rank for rank, (_, has_closed) in sorted(self._rounds.items()) if not has_closed]
        may_differ = self.on_loss is not msg.OnLoss.FAIL or self.leases is not None or not self.keys.is_lockstep
        if may_differ or len(set(counts.values())) < 2:
            return []
        most, least = max(counts, key=lambda rank: counts[rank]), min(counts, key=lambda rank: counts[rank])
        text = (
            f"worker-{most} made {counts[most]} steps and worker-{least} {counts[least]}: the last steps lack the"
            " gradients of workers that had ended. Give all workers the same number of batches: a SplitSampler or"
            " QueueSampler for the data, or `with trainer.join():`."
        )
        if not open_:
            return [fx.Log(f"{text} Where the numbers are meant to differ, all is well")]
        names = ", ".join(f"worker-{rank}" for rank in open_[:NAMED_MAX])
        more = f" and {len(open_) - NAMED_MAX} more" if len(open_) > NAMED_MAX else ""
        purpose = f"Where the numbers are meant to differ, end the script with store.close(), which {names}{more}"
        return [fx.Log(f"WARNING: {text} {purpose} did not call")]

    def _turn_away_late(self) -> list[fx.Effect]:
        """Reject processes that still wait to join, as the job is over."""
        if self.newcomers is None:
            return []
        return self.newcomers.turn_away(msg.Rejected(self.newcomers.over, is_over=True))

    def _server_gone(self, server: Member) -> list[fx.Effect]:
        """Handle the end of a server that was ordered to stop."""
        self.membership.leave(server.node)
        return self._stop_if_alone()

    def _stop_if_alone(self) -> list[fx.Effect]:
        return self._stop(None) if self._is_over and self.membership.servers_are_gone else []

    def _child_ended(self, event: fx.ChildEnded, now: float) -> list[fx.Effect]:
        node, membership = event.node, self.membership
        peer = membership.peers.get(node)
        if self.newcomers is not None and peer is not None and membership.lives[peer.member] != event.life:
            return self._earlier_ended(event, now)
        if peer is not None and peer.member in self._ending:
            self._ending.discard(peer.member)
            if event.clean:
                return self._left(peer.member, now)
        if event.clean and node.role is Role.WORKER and (node in membership.left or peer is None):
            if peer is None:
                membership.absent.add(node)
                return self._end_if_alone(now) or self._incomplete_for_ever()
            return []
        if event.clean and self._is_over:
            return self._server_gone(Member(node, 0))
        member = peer.member if peer else Member(node, 0)
        if member in membership.lost:
            return self._announce_soon(now) if membership.note_ended(member) else []
        cause = event.cause + ("" if peer else " before it had joined the cluster")
        return self._lost(member, cause, now, has_ended=True)

    def _earlier_ended(self, event: fx.ChildEnded, now: float) -> list[fx.Effect]:
        """Handle the end of an earlier process of a rank, or of its next process before its hello."""
        lives = self.membership.lives
        news = [one for one in self.membership.lost if one.node == event.node and lives[one] == event.life]
        told = [self.membership.note_ended(member) for member in news]
        return self._announce_soon(now) if any(told) else []

    def _incomplete_for_ever(self) -> list[fx.Effect]:
        """End the job if workers wait for a worker whose process has ended without joining."""
        waiting = [node for node in self.membership.peers if node.role is Role.WORKER]
        if not waiting:
            return []
        absent = f"worker-{min(node.rank for node in self.membership.absent)}"
        cause = "ended without having joined the cluster"
        sentence = f"{absent} {cause}, but {waiting[0]} waits for it: every worker must call kv.create('dist')"
        return self._abort(absent, "", cause, None, sentence)

    def _lost(self, member: Member, cause: str, now: float, has_ended: bool = False, said: str = "") -> list[fx.Effect]:
        """Handle the loss of a process: the job ends, or the others go on without it.

        Args:
            member: the lost process.
            cause: cause, as a phrase.
            now: the time.
            has_ended: whether the process is known to have ended.
            said: the cause, if the process itself reported it.
        """
        if member in self.membership.lost:
            return []  # launcher, connection and the process itself may all report the same loss
        self._at_work.discard(member)
        peer = self.membership.peers.get(member.node)
        host = peer.host if peer else ""
        step = self.steps.get(member) if member.node.role is Role.WORKER else None
        where = self._where(member)
        # Workers report their step once a second, and with each message to the scheduler.
        when = "" if step is None else f", last reported in step {step}"
        sentence = f"{where} was lost{when}: {cause}"
        if self.rollback is not None and self.membership.servers.get(member.node) == member and not self._is_over:
            obstacle = self.rollback.obstacle()
            if not obstacle:
                return self._go_back_without(self.rollback, member, cause, sentence, has_ended, now)
            sentence = f"{sentence}, and nobody can go back: {obstacle}"
        if member.node.role is Role.SERVER and self.losses.may_go_on(member, said) and not self.checkpoints.is_loading:
            effects = self._go_on_with_heir(member, cause, sentence, has_ended, now)
            return effects if has_ended else [*effects, *self._end_given_up(member)]
        if member.node.role is Role.WORKER and self.losses.may_go_on(member, said):
            self.losses.note(said)
            others = (self.membership.members.keys() | self.membership.newcomers.keys()) - {member.node}
            if self.on_loss is msg.OnLoss.WAIT or not others:
                self._wait_for_return(member, host, cause, step, sentence, now)
            effects = self._go_on_without(member, cause, sentence, has_ended, now)
            # A process that has reported its failure ends. A silent process may be suspended for ever.
            is_there = member in self.membership.lost and not has_ended and not said
            return [*effects, *self._end_given_up(member)] if is_there else effects
        if self.on_loss is not msg.OnLoss.FAIL and not self.membership.is_complete:
            sentence = f"{sentence}; {errors.INCOMPLETE}"
        elif self.on_loss is msg.OnLoss.CONTINUE and member.node.role is Role.SERVER and not self._keeps_copies:
            sentence = f"{sentence}; {errors.NO_COPY}"
        return self._abort(str(member), host, cause, step, sentence)

    @property
    def _keeps_copies(self) -> bool:
        """Whether the weights of a server also exist elsewhere: on another server, or in snapshots."""
        return self.config.replicas > 0 or self.rollback is not None

    def _where(self, member: Member) -> str:
        """Return a description of a process and its host, for people."""
        peer = self.membership.peers.get(member.node)
        return f"{member} (host {peer.host}, pid {peer.pid})" if peer else str(member)

    def _copied(self, server: Member, epoch: int) -> list[fx.Effect]:
        """Record that a server's backup has a complete copy of its slices, which loads wait for."""
        node, membership = server.node, self.membership
        if not membership.copied(node.rank, epoch):
            return []
        backup = membership.backup_of(node)
        effects: list[fx.Effect] = []
        if backup is not None and membership.numbers_of(node):
            told = f"{self._where(backup)} has a copy of {server}'s slices: the job survives a loss of {server} again"
            effects.append(fx.Log(told))
        return effects + self.checkpoints.advance_all()

    def _wait_for_return(
        self, member: Member, host: str, cause: str, step: int | None, sentence: str, now: float
    ) -> None:
        """Await the rejoin of a lost worker: all wait for it, or it was the last worker, and the weights wait on the
        servers."""
        if member.node in self.membership.left:
            return
        limit_s = self.config.loss_policy.return_limit_s
        late = f"it was the last worker, and none has come back within {limit_s:g} s"
        if self.on_loss is msg.OnLoss.WAIT:
            late = f"all have waited for its return, and it has not come back within {limit_s:g} s"
        self._awaited_rejoins[member.node] = (
            now + limit_s,
            partial(self._abort, str(member), host, cause, step, f"{sentence}; {late}"),
        )

    def _go_back_without(
        self, rollback: Rollback, member: Member, cause: str, sentence: str, has_ended: bool, now: float
    ) -> list[fx.Effect]:
        """Evict a server, and begin the rollback to the newest snapshot, which waits for a replacement."""
        effects: list[fx.Effect] = [fx.Log(f"{sentence}; all go back to the newest snapshot"), fx.Forget(member)]
        self.membership.lose(member, cause, has_ended)
        self.losses.roll_back()
        effects += [] if has_ended else self._end_given_up(member)
        for newcomer in list(self.membership.newcomers.values()):
            why = f"{member} was lost while it joined"
            verdict = msg.Abort(
                msg.ErrorCode.PEER_LOST, str(member), "", cause, -1, f"{newcomer} must start again: {why}"
            )
            effects += [fx.Send(newcomer, verdict), *self._lost(newcomer, why, now)]
        self._barriers.clear()
        self._deadlocks = Deadlocks()
        return [*effects, *self.checkpoints.drop_all(), *self._announce(now), *rollback.begin(member, now)]

    def _server_late(self, newcomers: Newcomers, sender: Member, message: msg.Hello, now: float) -> list[fx.Effect]:
        """Handle the hello of a server that wants to replace a lost server."""
        node = NodeId(Role.SERVER, message.wanted_rank)
        if self._is_over:
            return [fx.Send(sender, msg.Rejected(newcomers.over, is_over=True))]
        if self.rollback is None and not self.config.replicas:
            return [
                fx.Send(sender, msg.Rejected(f"the cluster is complete, and a {sender.node.role} cannot join later"))
            ]
        if node in self.membership.servers:
            return newcomers.delay_claimant(node, sender, message, now)
        if self.rollback is None and self.checkpoints.is_loading:
            return newcomers.delay(sender, "a checkpoint to be loaded")
        try:
            member = self.membership.admit(sender, message)
        except errors.ConfigError as error:
            return [fx.Send(sender, msg.Rejected(str(error)))]
        effects = self.welcome(sender, member)
        if self.config.supervised:
            effects.append(fx.TellLauncher(f"at work server {member.node.rank} life {message.life}"))
        if self.rollback is None:
            # Its predecessor in the ring copies lasting state to it. It takes no part in open commands and checkpoints,
            # and receives all later requests.
            self._questions.exempt(member)
            told = fx.Log(f"{self._where(member)} is back, and is given a copy of slices while training goes on")
            return [*effects, told, *self._announce(now)]
        return [*effects, *self.rollback.welcome(member), *self._announce(now), *self.checkpoints.advance_all()]

    def _about_snapshots(
        self, rollback: Rollback, sender: Member, message: msg.Message, now: float
    ) -> list[fx.Effect] | None:
        """Handle a message that concerns snapshots; return None for all other messages."""
        match message:
            case msg.SnapshotTaken() if sender.node.role is Role.SERVER:
                return rollback.snapshot_taken(sender, message)
            case msg.Quiet() if sender.node.role is Role.WORKER:
                return rollback.quiet(sender, message)
            case msg.Barrier() | msg.Claim() | msg.Save() | msg.Load() | msg.Lease() | msg.Used() if rollback.ignores(
                sender
            ):
                return []
            case msg.Saved() if rollback.is_stale(sender):
                return []
            case msg.Hello() if sender.node.role is Role.WORKER and rollback.way_back:
                assert self.newcomers is not None
                return self.newcomers.delay(sender, "the others to go back to a snapshot")
            case msg.Configure() if reason := rollback.refusal(message):
                return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, reason))]
        return None

    def _why_not(self, mode: str) -> str:
        """Return why the policy for losses excludes stores of a mode; '' if it does not."""
        has_rounds = mode not in MODES or MODES[mode].is_lockstep
        return replace(self.config.loss_policy, has_rounds=has_rounds).refusal()

    @property
    def now(self) -> float:
        """Time of the last message or event."""
        return self._now

    @property
    def locked_folders(self) -> list[tuple[str, str]]:
        """(folder, run) of each directory that this process has locked."""
        return self.checkpoints.locked_folders

    def end_job(self, member: Member, cause: str, sentence: str) -> list[fx.Effect]:
        """End the job because of the loss of a process."""
        return self._abort(str(member), "", cause, None, sentence)

    def _end_given_up(self, member: Member) -> list[fx.Effect]:
        """Order the launcher to end an evicted process that may still be live."""
        if not self.config.supervised:
            return []
        life = self.membership.lives[member]
        return [fx.TellLauncher(f"given up {member.node.role} {member.node.rank} life {life}")]

    def _go_on_without(self, member: Member, cause: str, sentence: str, has_ended: bool, now: float) -> list[fx.Effect]:
        """Evict a worker, and announce its loss, so that no round waits for it."""
        if member.node in self.membership.left:  # it had left before its loss
            return [fx.Log(f"{sentence}; it had left before")]
        self.membership.lose(member, cause, has_ended)
        self.membership.views.then(partial(self.losses.settle, member))
        if self.rollback is not None and self.rollback.way_back is not None:
            self.losses.roll_back()
        self._deadlocks.forget(member, now)
        others, limit_s = len(self.membership.members), self.config.loss_policy.return_limit_s
        go_on = f"{others} worker{' goes' if others == 1 else 's go'} on"
        if self.on_loss is msg.OnLoss.WAIT:
            go_on = f"all wait up to {limit_s:g} s for its return (KVDIST_RETURN_S)"
        elif self._awaited_rejoins:
            go_on = f"it was the last worker; the weights wait {limit_s:g} s for one that comes back"
        told = fx.Log(f"{sentence}; {go_on}")
        effects: list[fx.Effect] = [told, fx.Forget(member)]
        if self.newcomers is not None:
            self.newcomers.forget(member)
            self.newcomers.reconsider_pause()
        if self.leases is not None:
            self.leases.on_lost(member)
        return [*effects, *self._announce_soon(now), *self._without_departed(now)]

    def _go_on_with_heir(
        self, member: Member, cause: str, sentence: str, has_ended: bool, now: float
    ) -> list[fx.Effect]:
        """Evict a server whose slices have a copy on another server, and announce the failover."""
        heir, owned = self.membership.backup_of(member.node), self.membership.numbers_of(member.node)
        workers = [*self.membership.members.values(), *self.membership.newcomers.values()]
        self.membership.lose(member, cause, has_ended)
        if owned:
            self.checkpoints.server_lost(member, workers)
        go_on = f"{heir} goes on with its slices" if owned else "it had only copies of others' slices"
        effects: list[fx.Effect] = [fx.Log(f"{sentence}; {go_on}"), fx.Forget(member)]
        return [*effects, *self._announce(now), *self._questions.advance(), *self._without_departed(now)]

    def _with_leases(self) -> Leases:
        if self.leases is None:
            from kvdist.core.scheduler.leases import Leases  # a feature at a seam: loaded where it is used

            leases = Leases(
                self.membership,
                self._go_on_without_data,
                self.checkpoints.next_saves,
                self._is_saving,
            )
            self.leases = self.checkpoints.data = self.losses.leases = leases
            if self.rollback is not None:
                self.rollback.use_leases(leases)
        return self.leases

    def _is_saving(self) -> bool:
        return self.checkpoints.is_saving

    def _restoring_data(self, position: Mapping[str, Any]) -> Callable[[], None]:
        return self._with_leases().restoring(position)

    def _go_on_without_data(self, now: float) -> list[fx.Effect]:
        """Complete agreements that have waited only for a worker that rests now."""
        if self.newcomers is not None:
            self.newcomers.reconsider_pause()
        return [*self._pass_barriers(), *self.checkpoints.advance_all(), *self.keys.advance_all(now)]

    @property
    def idle(self) -> int:
        """Number of newcomers without examples to train on."""
        return 0 if self.leases is None else self.leases.idle

    @property
    def calls(self) -> int:
        """Number of barriers, checkpoints and loads so far, including those under way."""
        made = self.checkpoints
        return len(self._barriers) + sum(map(sum, (self._passed.values(), made.saves.values(), made.loads.values())))

    def _fenced(self, member: Member) -> str:
        return (
            f"{member} was given up ({self.membership.lost[member]}), and the others went on without it: this process"
            " must not go on"
        )

    def _doomed(self, key: int | str, giver: Member) -> list[fx.Effect]:
        """End the job because a key can never get its first value, and its users would wait for ever."""
        if self.rollback is not None and self.rollback.way_back is not None:
            return []  # a server that has not gone back yet has no values
        cause = self.membership.lost[giver]
        sentence = (
            f"{giver} was lost before it had given {name_of(key)} its first value ({cause}), and nobody else has it:"
            " start the job again"
        )
        return self._abort(str(giver), "", cause, None, sentence)

    def _abort(self, node: str, host: str, cause: str, step: int | None, sentence: str) -> list[fx.Effect]:
        if self._stopped:
            return []
        verdict = msg.Abort(msg.ErrorCode.PEER_LOST, node, host, cause, -1 if step is None else step, sentence)
        return self._tell_all(verdict, errors.PeerLostError(sentence, node, host, cause, step))

    def _look_for_deadlocks(self, now: float) -> list[fx.Effect]:
        live = {node.rank for node in self.membership.awaited}
        waits = {(wait.member.node.rank, wait.request): set(wait.workers) for wait in self._waits()}
        effects, sentence = self._deadlocks.look(live, waits, self.keys.key_of, now)
        if not sentence or self._stopped:
            return effects
        return self._tell_all(
            msg.Abort(msg.ErrorCode.DEADLOCK, "", "", "deadlock", -1, sentence), errors.DeadlockError(sentence)
        )

    def _tell_all(self, verdict: msg.Abort, error: errors.KvdistError) -> list[fx.Effect]:
        """End the job for all members but the process that the verdict is about."""
        replaced = {str(member) for member in self.membership.lost}
        present = [peer.member for peer in self.membership.present]
        others = [member for member in present if str(member) != verdict.node or str(member) in replaced]
        effects: list[fx.Effect] = [fx.Send(member, verdict) for member in others]
        if self.newcomers is not None:
            effects += self.newcomers.turn_away(verdict)
        return effects + self._stop(error)

    def _stop(self, error: errors.KvdistError | None) -> list[fx.Effect]:
        if self._stopped:
            return []
        self._stopped, self._error = True, self._error or error
        return [fx.Halt(self._error)]

    # Waits.

    def _waits(self) -> Iterator[MemberWait]:
        """Yield the waits of all members for agreements."""
        agreements: list[Agreement[Any]] = [*self._barriers.values(), *self._commands]
        for agreement in agreements:
            yield from agreement.waits()
        yield from self.checkpoints.waits()
        yield from self.keys.waits()
        if self.newcomers is not None:
            yield from self.newcomers.waits()
        if self.leases is not None:
            yield from self.leases.waits()
        if self.rollback is not None and (wait := self.rollback.wait) is not None:
            for member in self.membership.members.values():
                yield replace(wait, member=member)

    def _hints(self, now: float) -> list[fx.Effect]:
        """Return hints about missing members, for members that may have waited long; a worker shows the last of several
        hints."""
        if not self.membership.is_complete:
            hint = msg.Waiting(f"{', '.join(self.membership.missing())} to register", (), now - self._started_at)
            return [fx.Send(peer.member, hint) for peer in self.membership.present]
        return [wait.hint(now) for wait in sorted(self._waits(), key=lambda wait: wait.since, reverse=True)]


def _barrier_answer(barrier: Agreement[BarrierWord]) -> Answer:
    said = barrier.disagreement(lambda word: word[0] or "nothing")
    if not said:
        givers = {giver for _, (_, giver) in barrier.said.values() if giver >= 0}
        if len(givers) > 1 or any(worker(giver) not in barrier.said for giver in givers):
            names = ", ".join(f"worker-{giver}" for giver in sorted(givers))
            reason = (
                f"{names}, whose values were to be everybody's, was lost or has left in the middle: give them again"
            )
            return partial(msg.Failed, code=msg.ErrorCode.PEER_LOST, reason=reason)
        return msg.Done
    reason = (
        f"the workers do not agree. {who_says_what(said)}. Every worker must run the same program on the same model"
    )
    return partial(msg.Failed, code=msg.ErrorCode.INIT_MISMATCH, reason=reason)


def _command_failures(failures: Mapping[int, str], num_servers: int) -> str:
    """Return a single reason in full, and the names of all servers that failed; '' if none failed."""
    if len(failures) < 2:
        return "".join(failures.values())
    names = ", ".join(f"server-{rank}" for rank in sorted(failures))
    share = "all" if len(failures) == num_servers else f"{len(failures)} of"
    return f"{failures[min(failures)]} ({share} {num_servers} servers failed: {names})"
