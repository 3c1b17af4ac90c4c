"""Newcomers: workers that join a running job, by a rank that was started again or by an additional rank. Pure.

A newcomer is welcomed at once, and gets the roster when every server knows it. Its calls before its first push change
nothing. With that push, or by `TakePart`, it asks to become a member. The scheduler finds the highest version of all
slices, while every server promises to make at most the next version; from version T on, which `_version` chooses, every
round waits for the newcomer. The other workers do not stop for that. Invariants:

* A newcomer is counted in no version before its T, and awaited in all from T on.
* A single cut at a time: all newcomers that are ready when servers have answered share it. It is made even if they have
  left, as it ends the promise.
* T is a place in the program: after T pushes. Agreements of the others before that place do not wait for the newcomer,
  later agreements do. Its barriers and loads get the others' numbers, once the number of its first is known; so do its
  checkpoints, when it claims a folder.
* A newcomer whose model differs from the agreed model is refused before it becomes a member, and no other worker is.
* With fewer workers than `ClusterConfig.min_workers` a cut begins, but is not made until enough have joined: so servers
  keep their promise, and only the open round is closed.
* Slices that are not pushed at each step (of means, say) have no version that shows the place in the program. A
  newcomer takes part in a store of such slices from its first barrier of that store on, at which all workers stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kvdist import errors
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.scheduler.agreement import Agreement, MemberWait, Questions
from kvdist.core.scheduler.keys import REFUSED, Keys
from kvdist.core.scheduler.membership import Membership
from kvdist.naming import model_of, name_of
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol import messages as msg

Call = msg.Barrier | msg.Load | msg.Claim
"""A call that every worker makes equally often, so that the scheduler numbers it."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """A call of a newcomer, or of a worker that joined later, that waits for another worker's call."""

    sender: Member
    message: msg.Declare | msg.Configure | Call
    since: float
    decided: int = 0
    """Number of keys of a declaration, from the first on, that have their places or an error."""


class NewcomerScheduler(Protocol):
    """The scheduler, as newcomers see it; this module imports nothing of `scheduler`, which imports it."""

    on_loss: msg.OnLoss
    config: ClusterConfig

    @property
    def now(self) -> float:
        """Time of the last message or event."""

    @property
    def idle(self) -> int:
        """Number of newcomers without data to train on."""

    @property
    def calls(self) -> int:
        """Number of barriers, checkpoints and loads so far, including those under way."""

    def welcome(self, stranger: Member, member: Member) -> list[fx.Effect]:
        """Tell an admitted process which member it is."""

    def announce(self) -> list[fx.Effect]:
        """Send a new roster to all."""

    def announce_to_servers(self) -> list[fx.Effect]:
        """Send a new roster to all servers."""

    def again(self, sender: Member, message: msg.Message) -> list[fx.Effect]:
        """Handle a message that had to wait."""


class Newcomers:
    """All workers that join late.

    Args:
        membership: members of the cluster.
        keys: declared keys.
        questions: requests to servers.
        patience_s: time after which a second process that asks for a rank is refused.
        scheduler: functions of the scheduler.
    """

    def __init__(
        self, membership: Membership, keys: Keys, questions: Questions, patience_s: float, scheduler: NewcomerScheduler
    ) -> None:
        self._membership = membership
        self._keys = keys
        self._questions = questions
        self._patience_s = patience_s
        self._scheduler = scheduler
        self.over = "the job is over: all workers had finished before this process could take part"
        """Reason for the rejection of a process that comes too late."""
        self._delayed: set[Member] = set()
        """Processes that must ask again later."""
        self.introductions: set[Member] = set()
        """Newcomers that some servers do not know yet, so that they may not send to them."""
        self._early: dict[NodeId, tuple[Member, float]] = {}
        """Rank in use → (process that asks for it before its last process is lost, time of the first hello)."""
        self._line: list[Member] = []
        """Newcomers that become members by the next cut."""
        self._at_cut: Callable[[int], list[fx.Effect]] | None = None
        """Callback of the next cut: gets its version before the servers do, and returns the effects to carry out before
        it."""
        self._at_current_cut: Callable[[int], list[fx.Effect]] | None = None
        """Callback of the cut for which servers are being asked now."""
        self._paused_since: float | None = None
        """Time since which the cut waits for enough workers; None if it does not wait."""
        self._is_finding = False
        """Whether servers are being asked for their versions."""
        self._search = 0
        """Number of the last search for the highest version."""
        self._waiting: list[WaitingCall] = []
        self._looked_at: tuple[int, ...] = ()
        """State at the last check of the waiting calls; see `_state`."""
        self._models: dict[int, str] = {}
        """Store → description of the Trainers' model, on which all workers agree."""
        self._aligned: set[tuple[Member, type[msg.Message], int]] = set()
        """(late member, kind of call, store) after its first such call: the next is the next of all workers."""
        self._joined: dict[Member, set[int]] = {}
        """Late member → stores where it takes part in all slices."""

    # Joining.

    def hello(self, stranger: Member, hello: msg.Hello, now: float) -> list[fx.Effect]:
        """Let a process join the running job."""
        node = NodeId(Role.WORKER, hello.wanted_rank)
        if hello.wanted_rank >= 0 and self._membership.is_live(node):
            return self.delay_claimant(node, stranger, hello, now)
        try:
            member = self._membership.admit(stranger, hello)
        except errors.ConfigError as error:
            return [fx.Send(stranger, msg.Rejected(str(error)))]
        self._early.pop(member.node, None)
        self.introductions.add(member)
        self._membership.views.then(partial(self._introduced, member))
        return [*self._scheduler.welcome(stranger, member), *self._scheduler.announce()]

    def delay_claimant(self, node: NodeId, stranger: Member, hello: msg.Hello, now: float) -> list[fx.Effect]:
        """Delay a process that asks for a rank in use, whose process may be dead; refuse it after `patience_s`."""
        wants, since = self._early.get(node, (stranger, now))
        if wants != stranger:
            since = now
        self._early[node] = stranger, since
        holder = self._membership.peers[node]
        if now < since + self._patience_s:
            return self.delay(stranger, f"{_process(holder)} to be given up, whose rank it wants")
        del self._early[node]
        reason = (
            f"two processes say that they are {node}: {_process(holder)}, which is alive, and pid {hello.pid} on"
            f" {hello.host}: each needs a KVDIST_RANK of its own"
        )
        return [fx.Send(stranger, msg.Rejected(reason))]

    def delay(self, stranger: Member, awaited: str) -> list[fx.Effect]:
        """Let a process ask again soon, and tell it whom it waits for."""
        self._delayed.add(stranger)
        return [fx.Send(stranger, msg.Waiting(awaited, (), 0.0))]

    def _introduced(self, member: Member) -> list[fx.Effect]:
        """Send the roster to a newcomer that all servers know."""
        if member not in self.introductions:
            return []
        self.introductions.discard(member)
        return [fx.Send(member, self._membership.roster)]

    # Leaving.

    def forget(self, member: Member) -> None:
        """Forget a worker that was lost or has left."""
        self.introductions.discard(member)
        self._joined.pop(member, None)
        self._line = [one for one in self._line if one != member]
        self._waiting = [one for one in self._waiting if one.sender != member]
        self._aligned = {one for one in self._aligned if one[0] != member}

    def end(self) -> list[fx.Effect]:
        """Reject all newcomers, as the last member has finished well."""
        late = [*self._membership.newcomers.values()]
        for member in late:
            self._membership.leave(member.node)
        self.introductions.clear()
        return [fx.Send(member, msg.Rejected(self.over, is_over=True)) for member in late]

    def turn_away(self, answer: msg.Message) -> list[fx.Effect]:
        """Send the end of the job to processes that must ask again later, as the scheduler ends soon.

        Processes that were admitted since ignore it: they have new names, by which they hear of the end.
        """
        delayed, self._delayed = self._delayed, set()
        return [fx.Send(stranger, answer) for stranger in sorted(delayed, key=lambda one: one.incarnation)]

    # Before the first push.

    def answer(self, sender: Member, message: msg.Message) -> list[fx.Effect] | None:
        """Answer a message of a newcomer; None if it is handled like those of members.

        Its program begins anew, while the others are in the middle of theirs: their agreements stay.
        """
        if isinstance(message, msg.Ready):
            return self._ready(sender, message)
        if self._membership.newcomers.get(sender.node) != sender:
            return None
        match message:
            case msg.Barrier(request, store, statement) if said := model_of(statement):
                agreed = self._models.get(store, said)
                if said == agreed:
                    return [fx.Send(sender, msg.Done(request))]
                reason = f"{sender} says: {said}; the workers that it joins have said: {agreed}. {REFUSED}"
                return [fx.Send(sender, msg.Failed(request, msg.ErrorCode.INIT_MISMATCH, reason))]
            case msg.Declare(request):
                reason = self._keys.misfit(sender, message)
                if reason:
                    return [fx.Send(sender, msg.Failed(request, msg.ErrorCode.INIT_MISMATCH, reason))]
            case msg.Configure():
                pass
            case _:
                return None
        waiting = WaitingCall(sender, message, self._scheduler.now)
        if self._may_go_on(waiting):
            return None
        self._waiting.append(waiting)
        return []

    def _may_go_on(self, waiting: WaitingCall) -> bool:
        """Return whether a waiting call can be handled now."""
        message = waiting.message
        if not self._membership.members:
            return True
        if isinstance(message, msg.Declare):
            return self._undecided_key(waiting, message) is None
        return not isinstance(message, msg.Configure) or message.store in self._keys.optimizers

    def _undecided_key(self, waiting: WaitingCall, message: msg.Declare) -> int | str | None:
        """Return the first key of a declaration with neither a place nor an error; None if all are decided."""
        while waiting.decided < len(message.keys):
            key = message.keys[waiting.decided]
            if not self._keys.is_decided(message.store, key):
                return key
            waiting.decided += 1
        return None

    def waits(self) -> Iterator[MemberWait]:
        """Yield waits of newcomers for declarations and optimizers of others, and of all while workers are too few."""
        workers = tuple(sorted(self._membership.members, key=lambda node: node.rank))
        for one in self._waiting:
            sender, message = one.sender, one.message
            if isinstance(message, msg.Declare) and (key := self._undecided_key(one, message)) is not None:
                subject, deed = f"the declaration of {name_of(key)}", f"initialise {name_of(key)}"
            elif isinstance(message, msg.Configure):
                subject, deed = f"the optimizer of store {message.store}", "call set_optimizer"
            else:
                continue
            deed += f", as only {sender} has, which joins them: if it runs another program, start it with theirs"
            yield MemberWait(sender, message.request, one.since, workers, subject, deed)
        if self._paused_since is None:
            return
        there, least = self._ready_ones, self._scheduler.config.min_workers or 0
        lacking = self._lacking(len(there))
        who = f"{lacking} more worker{'s' if lacking > 1 else ''}"
        deed = f"join: {least - lacking} of at least {least} are there (--min-workers)"
        for member in (*there, *self._membership.awaited.values()):
            yield MemberWait(member, 0, self._paused_since, (), "", deed, who)

    def agreed(self, store: int, statement: str) -> None:
        """Store the model in a statement that all workers have made at a barrier of this store, if it has any."""
        model = model_of(statement)
        if model:
            self._models[store] = model

    def advance(self) -> list[fx.Effect]:
        """Handle waiting calls again, as long as the state that they depend on changes. Called after every message."""
        effects: list[fx.Effect] = []
        while self._waiting and (state := self._state) != self._looked_at:
            self._looked_at = state
            waiting, self._waiting = self._waiting, []
            for one in waiting:
                if self._may_go_on(one):
                    effects += self._scheduler.again(one.sender, one.message)
                else:
                    self._waiting.append(one)
        return effects

    @property
    def _state(self) -> tuple[int, ...]:
        """Numbers on which the waiting calls depend: a number changes whenever a call may go on."""
        return self._membership.changes, self._keys.changes, self._scheduler.calls, len(self._aligned)

    # Becoming a member.

    def _ready(self, sender: Member, message: msg.Ready) -> list[fx.Effect]:
        if self._membership.newcomers.get(sender.node) == sender:
            self._line.append(sender)
            self._next_cut()
            return []
        joined = self._joined.get(sender)
        if joined is None or message.store in joined:
            return []  # servers tell it where its counters begin
        return self.join([sender], message.store)

    def cut(self, at: Callable[[int], list[fx.Effect]]) -> None:
        """Make a cut even without newcomers; `at` is called with its version, before the cut is sent to servers."""
        self._at_cut = at
        self._next_cut()

    def roll_back(self) -> None:
        """Drop all cuts and waiting calls, as all workers go back to the same earlier step."""
        self._line, self._at_cut, self._at_current_cut = [], None, None
        self._waiting.clear()
        self._joined.clear()
        self._questions.drop_all(msg.Join)  # each worker asks again
        self._keys.exempt_nobody()

    def rolled_back(self) -> None:
        """Make a cut after a rollback: servers make no version before it. What they have said is of undone versions."""
        self._paused_since = None
        self._find()

    def reconsider_pause(self) -> None:
        """Pause after a loss that leaves fewer workers than ``--min-workers``: servers close at most the next round."""
        self._next_cut()

    def _lacking(self, joining: int = 0) -> int:
        """Return how many workers are missing to ``--min-workers``, with `joining` more.

        Workers that have finished well count, and newcomers for which the others have left no data.
        """
        least = self._scheduler.config.min_workers or 0
        return max(0, least - self._membership.workers_counted - joining - self._scheduler.idle)

    def _next_cut(self) -> None:
        """Begin a cut, or look whether a cut that waits for workers can be made."""
        is_paused = self._paused_since is not None
        if self._is_finding or not (is_paused or self._line or self._at_cut or self._lacking()):
            return
        if not is_paused:
            self._at_current_cut, self._at_cut = self._at_cut, None
        self._find()

    def _find(self) -> None:
        """Ask all servers for their versions, while each makes at most the next version of each slice."""
        views = self._membership.views
        self._is_finding = views.is_stale = True
        self._search += 1
        self._membership.hold = self._membership.hold or views.epoch + 1
        views.then(partial(self._found, self._search))

    def _found(self, search: int) -> list[fx.Effect]:
        """Admit newcomers, as all servers have sent their versions."""
        if search != self._search:
            return []
        self._is_finding = False
        return self._admit()

    def _admit(self) -> list[fx.Effect]:
        """Make the ready newcomers members, if enough workers are live then."""
        there, told = self._ready_ones, list[fx.Effect]()
        least, lacking = self._scheduler.config.min_workers, self._lacking(len(there))
        if lacking:
            if self._paused_since is None:
                told.append(fx.Log(f"training waits for {lacking} more worker(s): at least {least} must be there"))
                self._paused_since = self._scheduler.now
            return told
        if self._paused_since is not None:
            self._paused_since = None
            count = self._membership.workers_counted + len(there) + self._scheduler.idle
            told.append(fx.Log(f"training goes on: {count} workers are there"))
        self._line = []
        version, self._membership.hold = self._version(), 0
        for member in there:
            self._membership.make_member(member, version)
            self._joined[member] = set()
        at, self._at_current_cut = self._at_current_cut, None
        told += [] if at is None else at(version)
        told += self._scheduler.announce() if there else self._scheduler.announce_to_servers()
        self._next_cut()
        return told

    @property
    def _ready_ones(self) -> list[Member]:
        return [one for one in self._line if self._membership.newcomers.get(one.node) == one]

    def _version(self) -> int:
        """Return the version from which on newcomers take part.

        With ``--on-loss wait`` it is the lowest version of the slices of a step, as no worker is beyond that step.
        Slices that are further behind are pushed less often, and are ignored.
        """
        answers = self._membership.views.answers
        highest = max([one.highest for one in answers], default=0)
        if self._scheduler.on_loss is not msg.OnLoss.WAIT:
            return highest + 1
        lowest = min([one.lowest for one in answers if one.highest >= highest - 1], default=highest)
        return min(highest, max(lowest, highest - 1))

    # Taking part.

    def joining(self, store: int, members: Iterable[Member]) -> list[Member]:
        """Return the workers that are at a barrier of this store for the first time since they joined."""
        return [member for member in members if store not in self._joined.get(member, (store,))]

    def join(
        self,
        members: Sequence[Member],
        store: int,
        then: Callable[[str], list[fx.Effect]] | None = None,
        cause: Agreement[Any] | None = None,
    ) -> list[fx.Effect]:
        """Let late members take part in all slices of a store, also in slices that are not pushed at each step."""
        for member in members:
            self._joined[member].add(store)
        ranks = tuple(member.node.rank for member in members)
        return self._questions.ask(msg.Join(0, store, ranks), then, cause)

    def must_wait(self, sender: Member, message: Call, is_expected: bool) -> bool:
        """Return whether a call has no number yet, as a late worker makes its first call of this kind; and queue it.

        Args:
            sender: worker that calls.
            message: its call, which waits for another worker's call if it has no number.
            is_expected: whether others wait for this worker in such a call, so that its number is known.
        """
        kind = type(message), message.store
        if self._is_aligned(sender, *kind):
            return False
        others = (other for other in self._membership.awaited.values() if other != sender)
        if not is_expected and any(self._is_aligned(other, *kind) for other in others):
            self._waiting.append(WaitingCall(sender, message, self._scheduler.now))
            return True
        self._aligned.add((sender, *kind))
        return False

    def _is_aligned(self, member: Member, kind: type[msg.Message], store: int) -> bool:
        """Return whether a worker's next call of this kind is the next of all workers."""
        is_late = member in self._membership.since or self._membership.newcomers.get(member.node) == member
        return not is_late or (member, kind, store) in self._aligned


def _process(peer: msg.Peer) -> str:
    return f"{peer.member} (pid {peer.pid} on {peer.host})"
