"""Workers that join a running job: a rank that was started again, or one more than there were at the start. Pure.

A newcomer is welcomed at once, hears who is in the cluster when every server knows it, and looks on: nothing that it
calls before its first push changes anything. With that push it asks to be a member. The scheduler looks for the
highest version of all slices, while every server promises to make one more at most; from the version after it on,
T, every round waits for the newcomer. Nobody stops for that. Rules that hold here:

* A newcomer is counted in no version before its T, and awaited in all from T on.
* One cut at a time: all that are ready when servers have answered share it. It is made even if they are gone, as it
  ends the promise.
* T is a place in the program: after T pushes. What the others agree on before that place does not wait for the
  newcomer; what comes after it does. Its own barriers and loads get the numbers that the others' have, once it is known
  which is its first; so do its checkpoints, when it claims a folder.
* A newcomer whose model is another than the one that the others have agreed on is refused while it looks on, and it
  alone.
* With fewer workers than `ClusterConfig.min_workers` a cut is begun and not made before enough are there: so servers
  keep their promise, and no round is closed but the one that is open.
* Slices that are not pushed at each step (of means, say) have no version that says where in the program they are. A
  newcomer takes part in a store of such slices from its first barrier there on, at which all workers stand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvdist import errors
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.agreement import Agreement, MemberWait, Questions
from kvdist.core.scheduler.keys import REFUSED, Keys
from kvdist.core.scheduler.membership import Membership
from kvdist.naming import model_of, name_of
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol import messages as msg


@dataclass(slots=True, eq=False)
class Unannounced:
    """A newcomer whose existence servers have to learn before it may speak to them. A token of their rosters."""

    member: Member
    unaware: set[Member]


Call = msg.Barrier | msg.Load | msg.Claim
"""What all workers do as often, and count."""


@dataclass(slots=True, eq=False)
class WaitingCall:
    """What a newcomer says, and cannot be answered before another worker has said the same."""

    sender: Member
    message: msg.Declare | msg.Configure | Call
    since: float
    decided: int = 0
    """How many of the keys of a declaration have their places, or an error, from its first one on."""


class NewcomerScheduler(Protocol):
    """What the scheduler does for newcomers."""

    on_loss: msg.OnLoss
    config: ClusterConfig

    @property
    def now(self) -> float:
        """When the last message or event came."""

    @property
    def idle(self) -> int:
        """How many newcomers find no data to train on."""

    @property
    def calls(self) -> int:
        """How many barriers, checkpoints and loads there have been, those included that are under way."""

    def announce(self) -> list[fx.Effect]:
        """Tell all who is there."""

    def again(self, sender: Member, message: msg.Message) -> list[fx.Effect]:
        """Handle what had to wait."""


class Newcomers:
    """All that have come later.

    Args:
        membership: who is in the cluster.
        keys: what is declared.
        questions: what servers are asked.
        patience_s: how long a rank may be wanted by a second process before that is refused.
        scheduler: does the rest.
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
        """What is said to a process that comes too late."""
        self._delayed: set[Member] = set()
        """Processes that were told to ask again later."""
        self.introductions: dict[Member, Unannounced] = {}
        """Newcomers that not all servers know of."""
        self._early: dict[NodeId, tuple[Member, float]] = {}
        """Rank → a process that wants it, though its last process has not been given up yet, and since when."""
        self._line: list[Member] = []
        """Newcomers that become members by the next cut."""
        self._at_cut: Callable[[int], list[fx.Effect]] | None = None
        """Callback of the next cut: gets its version before the servers do, and returns what to send before it."""
        self._at_current_cut: Callable[[int], list[fx.Effect]] | None = None
        """Callback of the cut for which servers are being asked now."""
        self._paused_since: float | None = None
        """Since when the cut has waited for enough workers; None if it does not wait."""
        self._found_by: dict[Member, msg.CutFound] = {}
        """Server → how far its slices are."""
        self._is_finding = self._must_find_again = False
        """Whether servers are being asked for their versions; and whether they must be asked once more."""
        self._waiting: list[WaitingCall] = []
        self._looked_at: tuple[int, ...] = ()
        """What all that waits depended on when it was looked at: see `_state`."""
        self._models: dict[int, str] = {}
        """Store → what all workers have said of the model of their Trainers."""
        self._aligned: set[tuple[Member, type[msg.Message], int]] = set()
        """(who has joined later, kind of call, store) where it gives its calls the numbers that the others do."""
        self._joined: dict[Member, set[int]] = {}
        """Who has joined later → the stores where it takes part in all slices."""

    # Coming.

    def hello(self, stranger: Member, hello: msg.Hello, now: float) -> list[fx.Effect]:
        """A process wants to join the running job."""
        node = NodeId(Role.WORKER, hello.wanted_rank)
        if hello.wanted_rank >= 0 and self._membership.is_there(node):
            return self.keep(node, stranger, hello, now)
        try:
            member = self._membership.admit(stranger, hello)
        except errors.ConfigError as error:
            return [fx.Send(stranger, msg.Rejected(str(error)))]
        self._early.pop(member.node, None)
        self.introductions[member] = Unannounced(member, set(self._membership.servers.values()))
        config = self._scheduler.config
        own = (self._scheduler.on_loss, config.away_s, config.replicas)
        welcome = msg.Welcome(member.node.rank, member.incarnation, *own)
        return [fx.Send(stranger, welcome), fx.Bind(stranger, member), *self._scheduler.announce()]

    def keep(self, node: NodeId, stranger: Member, hello: msg.Hello, now: float) -> list[fx.Effect]:
        """The process that has this rank may be dead: hellos are repeated until that is known, or that it lives."""
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
        """Let a process ask again soon, and say for what it waits."""
        self._delayed.add(stranger)
        return [fx.Send(stranger, msg.Waiting(awaited, (), 0.0))]

    def acknowledged(self, server: Member, introductions: Iterable[Unannounced]) -> list[fx.Effect]:
        """A server knows of these newcomers; those that all know of may hear of the cluster."""
        effects: list[fx.Effect] = []
        for introduction in introductions:
            introduction.unaware.discard(server)
            if not introduction.unaware and introduction.member in self.introductions:
                del self.introductions[introduction.member]
                effects.append(fx.Send(introduction.member, self._membership.roster))
        return effects

    def server_lost(self, server: Member) -> list[fx.Effect]:
        """A server is gone, and another one has its slices."""
        self._must_find_again = self._is_finding
        return self.acknowledged(server, list(self.introductions.values()))

    # Going.

    def forget(self, member: Member) -> None:
        """A worker was given up, or has left."""
        self.introductions.pop(member, None)
        self._joined.pop(member, None)
        self._line = [one for one in self._line if one != member]
        self._waiting = [one for one in self._waiting if one.sender != member]
        self._aligned = {place for place in self._aligned if place[0] != member}

    def end(self) -> list[fx.Effect]:
        """The last member has finished well: who has only looked on is too late."""
        late = [*self._membership.newcomers.values()]
        for member in late:
            self._membership.leave(member.node)
        self.introductions.clear()
        return [fx.Send(member, msg.Rejected(self.over, is_over=True)) for member in late]

    def turn_away(self, answer: msg.Message) -> list[fx.Effect]:
        """The job ends: those that wait to be let in must hear so, for soon there is no scheduler to ask again.

        Those that have been let in since have other names, by which they hear of it.
        """
        delayed, self._delayed = self._delayed, set()
        return [fx.Send(stranger, answer) for stranger in sorted(delayed, key=lambda one: one.incarnation)]

    # Looking on.

    def answer(self, sender: Member, message: msg.Message) -> list[fx.Effect] | None:
        """What a worker hears that looks on; None for what everybody hears.

        Its program begins anew, while the others are in the middle of theirs: what they have agreed on stays.
        """
        if isinstance(message, msg.Ready):
            return self._ready(sender, message)
        if self._membership.newcomers.get(sender.node) != sender:
            return None
        match message:
            case msg.Barrier(request, store, _, statement) if said := model_of(statement):
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
        """Whether it is worth handling what has waited."""
        message = waiting.message
        if not self._membership.there:
            return True
        if isinstance(message, msg.Declare):
            return self._undecided_key(waiting, message) is None
        return not isinstance(message, msg.Configure) or message.store in self._keys.optimizers

    def _undecided_key(self, waiting: WaitingCall, message: msg.Declare) -> int | str | None:
        """The first key of a declaration that has neither its place nor an error; None if there is none."""
        while waiting.decided < len(message.keys):
            key = message.keys[waiting.decided]
            if not self._keys.is_decided(message.store, key):
                return key
            waiting.decided += 1
        return None

    def waits(self) -> Iterator[MemberWait]:
        """The newcomers that wait for what no other worker has declared or chosen yet; all while they are too few."""
        workers = tuple(sorted(self._membership.there, key=lambda node: node.rank))
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
        for member in (*there, *self._membership.workers.values()):
            yield MemberWait(member, 0, self._paused_since, (), "", deed, who)

    def agreed(self, store: int, statement: str) -> None:
        """All workers have made the same statement at a barrier of this store."""
        model = model_of(statement)
        if model:
            self._models[store] = model

    def advance(self) -> list[fx.Effect]:
        """Handle again what had to wait, as long as anything that it depends on changes. Called after every message."""
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
        """What decides whether anything that waits can go on, as numbers of which one differs whenever that does."""
        return self._membership.changes, self._keys.changes, self._scheduler.calls, len(self._aligned)

    # Becoming a member.

    def _ready(self, sender: Member, message: msg.Ready) -> list[fx.Effect]:
        if self._membership.newcomers.get(sender.node) == sender:
            self._line.append(sender)
            return self._next_cut()
        joined = self._joined.get(sender)
        if joined is None or message.store in joined:
            return []  # it is told where its counters begin
        return self.join([sender], message.store)

    def cut(self, at: Callable[[int], list[fx.Effect]]) -> list[fx.Effect]:
        """Make a cut, though nobody may join by it; `at` is called with its version, before servers are told."""
        self._at_cut = at
        return self._next_cut()

    def begin_anew(self) -> None:
        """All go back to an earlier step, and stand there together: no cut before that is worth anything."""
        self._line, self._at_cut, self._at_current_cut = [], None, None
        self._waiting.clear()
        self._joined.clear()
        self._keys.exempt_nobody()

    def gone_back(self) -> list[fx.Effect]:
        """All have gone back, and servers make no version before the next cut."""
        if self._paused_since is None:
            return self.cut(_nothing)
        self._paused_since = None
        return self._find()  # what they have said is of versions that are undone

    def pause_if_few(self) -> list[fx.Effect]:
        """After a loss: with fewer workers than ``--min-workers``, let servers close one more round at most."""
        return self._next_cut()

    def _lacking(self, joining: int = 0) -> int:
        """How many workers are missing to the least, with so many that join.

        Who has finished well is not, nor who would join if the others had left it any data.
        """
        least = self._scheduler.config.min_workers or 0
        return max(0, least - self._membership.workers_counted - joining - self._scheduler.idle)

    def _next_cut(self) -> list[fx.Effect]:
        if self._paused_since is not None:
            return self._admit()
        if self._is_finding or not (self._line or self._at_cut or self._lacking()):
            return []
        self._at_current_cut, self._at_cut = self._at_cut, None
        return self._find()

    def _find(self) -> list[fx.Effect]:
        self._found_by, self._is_finding, self._must_find_again = {}, True, False
        return self._questions.ask(msg.FindCut(0), self._found)

    def found(self, server: Member, message: msg.CutFound) -> list[fx.Effect]:
        """A server says how far its slices are."""
        self._found_by[server] = message
        return self._questions.answered(server, message.request, "")

    def _found(self, _: str) -> list[fx.Effect]:
        """All servers have said how far they are, and make one more version of each slice at most."""
        if self._must_find_again:  # some slices have another server now, which may have been asked before it had them
            return self._find()
        self._is_finding = False
        return self._admit()

    def _admit(self) -> list[fx.Effect]:
        """Make members of those that wait, if enough are there then."""
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
        version, ranks = self._version(), tuple(one.node.rank for one in there)
        for member in there:
            self._membership.make_member(member, version)
            self._joined[member] = set()
        at, self._at_current_cut = self._at_current_cut, None
        before = [] if at is None else at(version)
        cut = self._make(version, ranks)
        return [*told, *before, *cut, *(self._scheduler.announce() if there else []), *self._next_cut()]

    @property
    def _ready_ones(self) -> list[Member]:
        return [one for one in self._line if self._membership.newcomers.get(one.node) == one]

    def _make(self, version: int, ranks: Sequence[int]) -> list[fx.Effect]:
        """Say it to servers. They hear of the next one after that, and are asked how far they are in between."""
        return self._questions.ask(msg.Cut(0, -1, version, tuple(ranks)))

    def _version(self) -> int:
        """From which version on newcomers take part.

        Where all wait for them it is the lowest one of the slices of a step, as nobody is beyond that step. Slices that
        are further behind are pushed less often, and say nothing of it.
        """
        highest = max([one.highest for one in self._found_by.values()], default=0)
        if self._scheduler.on_loss is not msg.OnLoss.WAIT:
            return highest + 1
        lowest = min([one.lowest for one in self._found_by.values() if one.highest >= highest - 1], default=highest)
        return min(highest, max(lowest, highest - 1))

    # Taking part.

    def joining(self, store: int, members: Iterable[Member]) -> list[Member]:
        """Those of these workers that are at a barrier of this store for the first time since they have joined."""
        return [member for member in members if store not in self._joined.get(member, (store,))]

    def join(
        self,
        members: Sequence[Member],
        store: int,
        then: Callable[[str], list[fx.Effect]] | None = None,
        cause: Agreement[Any] | None = None,
    ) -> list[fx.Effect]:
        """Let these take part in all slices of a store, if there are some that are not pushed at each step."""
        for member in members:
            self._joined[member].add(store)
        ranks = tuple(member.node.rank for member in members)
        return self._questions.ask(msg.Cut(0, store, 0, ranks), then, cause)

    def number(self, sender: Member, message: Call, opened: Mapping[int, Agreement[Any]], count: int) -> int | None:
        """The number that all workers give to the call of one of them; None if that is not known yet.

        Args:
            sender: who calls.
            message: its call, which waits for another worker's if the number is not known.
            opened: what is open of this kind in this store, by number.
            count: how many there were, at least.
        """
        place = (sender, type(message), message.store)
        if message.counter == msg.LATER:
            numbers = [number for number, one in opened.items() if sender not in one.exempted]
            if not numbers and any(self._knows(other, place) for other in self._membership.workers.values()):
                self._waiting.append(WaitingCall(sender, message, self._scheduler.now))
                return None
            return min(numbers, default=max([count, *(number + 1 for number in opened)]))
        self._aligned.add(place)
        return message.counter

    def align(self, member: Member, stores: Iterable[int]) -> None:
        """A worker hears the numbers of all that there has been: it counts as the others from now on."""
        self._aligned.update((member, kind, store) for kind in (msg.Barrier, msg.Load, msg.Claim) for store in stores)

    def tell(self, sender: Member, message: Call, number: int) -> list[fx.Effect]:
        """Tell a worker the number of its call, if it does not know it."""
        if message.counter != msg.LATER:
            return []
        self._aligned.add((sender, type(message), message.store))
        return [fx.Send(sender, msg.Numbered(message.request, number))]

    def _knows(self, other: Member, place: tuple[Member, type[msg.Message], int]) -> bool:
        """Whether another worker's calls of this kind say which the next one is."""
        return other != place[0] and (other not in self._membership.since or (other, *place[1:]) in self._aligned)


def _nothing(_: int) -> list[fx.Effect]:
    """What follows a cut that is made for itself."""
    return []


def _process(peer: msg.Peer) -> str:
    return f"{peer.member} (pid {peer.pid} on {peer.host})"
