"""The only loop: runs any machine over any transport, and hands calls and answers between threads.

One thread owns a `Node` and everything in it. Other threads may only `submit` and `post`, which put something into
the mailbox and wake the loop, and read `view`, a snapshot that never changes, and `failure` and `stopped`, which are
set once; answers come back as futures. This is the one place that knows machines, bytes and sockets at once, and the
one place where effects are carried out.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol

from kvdist import errors
from kvdist.checkpoint.snapshot import DiskResult, LockFolder
from kvdist.config.exit_codes import exit_with_peer_lost
from kvdist.core import machine as fx
from kvdist.core.cluster_view import ClusterView
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.reliable import ACK_DELAY_S, Reliable
from kvdist.core.worker import requests as req
from kvdist.core.worker.worker import Worker
from kvdist.nodes import UNRANKED, Member, NodeId, Role
from kvdist.protocol import messages as msg
from kvdist.protocol.wire import VersionMismatch, decode, encode
from kvdist.runtime.io_thread import Disk, ThreadedDisk
from kvdist.runtime.waits import AwaitedFuture, note_call
from kvdist.transport.base import Arrived, Buffer, Connected, DialRefused, Disconnected, MemoryShared, Route, Transport

if TYPE_CHECKING:  # features at a seam: nodes run without them
    from kvdist.runtime.journal import Journal

LOG = logging.getLogger("kvdist")

MESSAGES_TOGETHER = 8
"""Messages to one peer that wait for each other at most; more would let the peer wait for its first work."""
TURN_S = 1.0
"""The longest the loop sleeps."""
LINGER_S = 0.5
"""How long last words may take to leave."""
GARBAGE_REPORTS_MAX = 5
"""Invalid messages that are reported one by one; the rest is only counted."""

NOT_BACK = "it has not come back since the scheduler was started again"
"""Why a member is lost that does not connect to a scheduler that takes the place of another."""

URGENT = -fx.NEVER
WAIT_MAX_S = 0.05
"""The longest that anything waits in the mailbox, however much comes after it."""

_living: weakref.WeakSet[Node] = weakref.WeakSet()


Finish = Callable[[], Any]
"""Called on the node's thread when a request is fulfilled, before its future resolves; gives the future's result."""


class Answer(Protocol):
    """Takes the outcome of a request; a `concurrent.futures.Future` is one."""

    def set_result(self, result: Any) -> None:
        """The request is fulfilled."""

    def set_exception(self, exception: BaseException) -> None:
        """It is not, and why."""


class AnswerByKey(abc.ABC):
    """Takes the outcome of a request that is answered key by key."""

    @abc.abstractmethod
    def set_keys(self, keys: Sequence[int], error: Exception | None) -> None:
        """The keys with these indices have arrived, or failed."""

    @abc.abstractmethod
    def set_result(self, result: Any) -> None:
        """All keys have been answered."""

    @abc.abstractmethod
    def set_exception(self, exception: BaseException) -> None:
        """Those keys that have not been answered will not be, and why."""


class Growing(Protocol):
    """A request that may take in more until it is made."""

    def due(self, now: float) -> float:
        """When it should be made at the latest, as far as is known now. Asked again then."""


@dataclass(slots=True)
class Errand:
    """A request that is still to be made: `make` gets its number, on the node's thread."""

    make: Callable[[int], req.Request]
    answer: Answer | AnswerByKey
    finish: Finish | None
    growing: Growing | None = None
    """It is not urgent: it waits for as long as this says, or until anything urgent comes."""
    since_ns: int = 0
    """When the user's call began that it is for, if anybody wants to know; see `NodeTrace`."""


class Mailbox:
    """What other threads leave for the thread of a node, in order, and when that has to look. Safe from any thread.

    Most of it is urgent. What is not may wait a little for more of its kind, because two threads of Python that hand
    work over at every call spend their time waiting for each other.

    Args:
        wake: makes the node's thread look.
        clock: monotonic seconds.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self.clock = clock
        self._items: list[Errand | fx.Event] = []
        # Reentrant, because a signal handler of the user may call us while the thread it interrupted holds it.
        self._lock = threading.RLock()
        self._closed = False
        self._due = fx.NEVER
        self._since = fx.NEVER
        """When the first of what lies here came."""

    @property
    def due(self) -> float:
        """When the node's thread should look; `NEVER` when there is nothing."""
        return self._due

    def put(self, item: Errand | fx.Event) -> bool:
        """Leave something; False if the mailbox is closed."""
        growing = item.growing if isinstance(item, Errand) else None
        with self._lock:
            if self._closed:
                return False
            self._items.append(item)
            if growing is None:
                self._look_by(URGENT)
            else:
                now = self.clock()
                self._since = min(self._since, now)
                self._look_by(growing.due(now))
            return True

    def hurry(self) -> None:
        """What was left here is urgent now."""
        with self._lock:
            if self._items:
                self._look_by(URGENT)

    def pop_due(self, now: float) -> list[Errand | fx.Event]:
        """All of it, if it is due."""
        if now < self._due:
            return []
        with self._lock:
            if self._due != URGENT and self._items:
                # In order, so what still grows keeps back what stands before it. Only the last ones of a store grow.
                last = [item for item in self._items[-2:] if isinstance(item, Errand) and item.growing]
                due = max([item.growing.due(now) for item in last if item.growing], default=URGENT)
                due = min(due, self._since + WAIT_MAX_S)
                if now < due:
                    self._due = due
                    return []
            items, self._items, self._due, self._since = self._items, [], fx.NEVER, fx.NEVER
            return items

    def _look_by(self, due: float) -> None:
        """Have the node's thread look no later than this; under the lock."""
        wakes = self._due == fx.NEVER or (due == URGENT and self._due != URGENT)
        self._due = min(self._due, due)
        if wakes:
            self._wake()

    def close(self) -> list[Errand | fx.Event]:
        """Take no more; what is left."""
        with self._lock:
            self._closed = True
            items, self._items, self._due, self._since = self._items, [], fx.NEVER, fx.NEVER
            return items


class Tracer(abc.ABC):
    """Notes what a node does. Times are those of `time.monotonic_ns`."""

    # On threads of the user.

    @abc.abstractmethod
    def called(self) -> None:
        """The user has called a method, and a request may follow."""

    @abc.abstractmethod
    def take_since(self) -> int:
        """When the call began that makes the request which is submitted now."""

    @abc.abstractmethod
    def wait(self, future: Future[Any]) -> Any:
        """The result of a future, waited for in the trace."""

    # On the node's thread.

    @abc.abstractmethod
    def asked(self, request: req.Request, since_ns: int) -> None:
        """The machine gets a request; `since_ns` is 0 if tracing began after it was submitted."""

    @abc.abstractmethod
    def answered(self, request: int, error: Exception | None = None) -> None:
        """A request is fulfilled, or cannot be."""

    @abc.abstractmethod
    def handled(self, packet: msg.Packet, since_ns: int) -> None:
        """A message has been dealt with, and what follows from it has been done."""


class Recorder(abc.ABC):
    """Keeps what a node's machine was told last and what it answered. Times are those of the machine."""

    @abc.abstractmethod
    def received(self, now: float, frames: Sequence[Buffer], message: msg.Message) -> None:
        """The machine gets a message."""

    @abc.abstractmethod
    def observed(self, now: float, event: fx.Event) -> None:
        """The machine is told of an event."""

    @abc.abstractmethod
    def ticked(self, now: float) -> None:
        """The machine is told the time."""

    @abc.abstractmethod
    def asked(self, now: float, requests: Sequence[req.Request]) -> None:
        """The machine gets requests of the user."""

    @abc.abstractmethod
    def sent(self, to: Member, frames: Sequence[Buffer]) -> None:
        """The machine has sent a message; no frames if it could not leave."""

    @abc.abstractmethod
    def did(self, effect: fx.Effect) -> None:
        """The machine wants this done, which is no message."""

    @abc.abstractmethod
    def explained(self, now: float, text: str) -> None:
        """The node has explained for what it waits."""

    @abc.abstractmethod
    def ended(self, failure: Exception | None) -> None:
        """The node has ended."""


class Node:
    """One machine, one transport, one thread.

    Args:
        machine: what reacts.
        transport: what carries.
        job: the tag of the job.
        explain_after_s: a wait longer than this is explained, again at every multiple.
        clock: monotonic seconds.
        disk: where the machine's state is kept; None for the disk of this machine.
    """

    def __init__(
        self,
        machine: fx.Machine,
        transport: Transport,
        job: int,
        explain_after_s: float,
        clock: Callable[[], float] = time.monotonic,
        disk: Disk | None = None,
    ) -> None:
        self.machine = machine
        self._disk = ThreadedDisk() if disk is None else disk
        self.transport = transport
        self.reliable = Reliable(machine, job)
        self.view = ClusterView(machine.me)
        """The newest snapshot of the cluster, for any thread. Replaced before anybody hears of what has changed."""
        self.stopped = False
        self.failure: Exception | None = None
        """Why the machine stopped; None if it stopped well."""
        self._has_halted = False
        """Whether the machine has said that its part is over, rather than that an error or a signal has ended it."""
        self.garbage_dropped = 0
        """Messages that were not valid."""
        self.forgeries = 0
        """Messages whose sender is not whom its key belongs to."""
        self.trace: Tracer | None = None
        """Notes what happens here, if that is wanted. Any thread sets it, so read it once."""
        self.ring: Recorder | None = None
        """Keeps what the machine was told last and what it answered, if that is wanted; set before the node runs."""
        self.journal: Journal | None = None
        """Gets each input of the machine, for a process that takes the place of this one; see `keep`."""
        self.is_revived = False
        """Whether the machine has had inputs in a process before this one."""
        self._explain_after_s = explain_after_s
        self._explained_until = fx.NEVER
        self.clock = clock
        self._work_s = 0.0
        """What turns have taken without their waits, since the machine has heard of it."""
        self._work_heard_at = clock()
        self._forked = False
        self._routes: dict[Member, Route] = {}
        self._members: dict[Route, Member] = {}
        self._mailbox = Mailbox(transport.wake, clock)
        self._outgoing: dict[Route, list[list[Buffer]]] = {}
        """What one turn has to say, so that it leaves together."""
        self._closed = False
        self._dialled: dict[Route, Member] = {}
        """Routes that this process has dialled, and who is expected there."""
        self._sharing: set[Route] = set()
        """Routes whose peers read the shared memory of this process."""
        self._introduced: dict[Route, Member] = {}
        """Who has introduced itself last by a route that others have dialled, and has no seat yet."""
        self._refused_routes: set[Route] = set()
        """Routes of strangers, of other versions or of others' names: told so once, and not listened to any more."""
        self._superseded: dict[Route, Member] = {}
        """Routes of members that have dialled anew: what is left there is still heard, and nothing is sent there."""
        self._answers: dict[int, tuple[Answer | AnswerByKey, Finish | None]] = {}
        self._numbers = count(1)
        _living.add(self)

    # For other threads.

    def submit(self, make: Callable[[int], req.Request], finish: Finish | None = None) -> Future[Any]:
        """Hand the machine a request; `make` gets its number. Every error comes through the future."""
        self.check_fork()
        future: Future[Any] = AwaitedFuture()
        # It cannot be cancelled: what was asked has left, and the answer may be under way into the user's arrays.
        future.set_running_or_notify_cancel()
        self.submit_for(future, make, finish)
        return future

    def submit_for(
        self,
        answer: Answer | AnswerByKey,
        make: Callable[[int], req.Request],
        finish: Finish | None = None,
        growing: Growing | None = None,
    ) -> None:
        """`submit` for a caller that takes the outcome without a future.

        Args:
            answer: gets it, on the node's thread.
            make: makes the request out of its number, on the node's thread.
            finish: as in `submit`.
            growing: lets it wait a little, so that `make` may take in what is submitted meanwhile; see `hurry`.
        """
        self.check_fork()
        trace = self.trace
        since_ns = 0 if trace is None else trace.take_since()
        if not self._mailbox.put(Errand(make, answer, finish, growing, since_ns)):
            answer.set_exception(self._reason())

    def hurry(self) -> None:
        """What was submitted and may wait a little is wanted now."""
        self._mailbox.hurry()

    def post(self, event: fx.Event) -> None:
        """Hand the machine an event."""
        self._mailbox.put(event)

    def begin_call(self) -> None:
        """A call of the user: note its thread, and the time for the trace; raise `ForkError` in a forked child."""
        if self._forked:
            self.check_fork()
        note_call()
        trace = self.trace
        if trace is not None:
            trace.called()

    def check_fork(self) -> None:
        """Raise `ForkError` in a forked child: threads and sockets stay with the parent."""
        if self._forked:
            raise errors.ForkError(
                "this process was forked from one with a kvdist store, and a store does not survive a fork;"
                " use it in the parent only, or create it after the fork"
            )

    # For the thread that owns the node.

    def keep(self, journal: Journal) -> None:
        """Keep a journal, before the node runs. If a process before this one has written it, go on where that was."""
        self.journal = journal
        if journal.is_new:
            journal.begin(self.reliable, self.clock())
            return
        state, effects = journal.read()
        clock, absence_s = self.clock, self.clock() - state.now
        self.clock = self._mailbox.clock = lambda: clock() - absence_s  # the machine has not been away
        self.reliable, self.machine, self.is_revived = state.reliable, state.scheduler, True
        cure = "" if state.scheduler.config.supervised else ". If this is a new job, end it and remove that file"
        LOG.warning("the scheduler was started again and goes on where it was, by its journal %s%s", journal.path, cure)
        works = list(state.works.values())
        state.scheduler.resume(self.clock())
        for member in list(self.reliable.links):
            self._observe(fx.PeerDisconnected(member, NOT_BACK, True), self.clock())
        for place in state.scheduler.locked_folders:
            self._disk.begin(LockFolder(*place), _locked_again)
        for work in works:
            self._disk.begin(work.work, partial(self._persisted, work.token))
        # What goes to others is repeated anyway, and nothing else would do these once more.
        self._carry_out([effect for effect in effects if isinstance(effect, fx.Log | fx.TellLauncher)])

    def run(self) -> None:
        """Turn until the machine stops, then close the transport."""
        try:
            while not self.stopped:
                self.turn(TURN_S)
        except BaseException as error:
            self._stop(error if isinstance(error, Exception) else None)
            raise
        finally:
            self.finish()

    def turn(self, timeout_s: float) -> bool:
        """One round of the loop: what has arrived, what was asked, what is due. True if there was anything.

        Args:
            timeout_s: how long to wait for something to happen.
        """
        now = self.clock()
        timeout_s = max(0.0, min(timeout_s, self.deadline - now))
        events = self.transport.recv(timeout_s)
        # What is due is due by the time at which the line was last listened to: if this process then stands still, or
        # computes for seconds, others are not late, for what they said meanwhile lies unread.
        heard_at = self.clock()
        for event in events:
            if self.stopped:
                break
            match event:
                case Arrived(route, frames, sender):
                    self._arrived(route, frames, sender)
                case Connected(route):
                    self._share(route, False)
                    self._came_back(self._members.get(route))
                case MemoryShared(route):
                    self._share(route, True)
                case Disconnected(route, reason, after_silence):
                    self._share(route, False)
                    self._went_away(route, reason, after_silence)
                    self._forget_route(route)
                case DialRefused(_, reason):
                    self._stop(errors.AuthenticationError(reason))
        asked = self._take_mail()
        due = self.reliable.deadline <= heard_at
        if due:
            self._tick(heard_at)
        self._explain(heard_at)
        if self.machine.hears_of_work:
            self._note_work(heard_at)
        self._send_outgoing()
        if self.journal is not None and not self.stopped and self.journal.is_due(heard_at):
            self.journal.write_state(self.clock())
        return bool(events) or asked or due

    def _note_work(self, since: float) -> None:
        """Count what a turn has done since then, and tell the machine once a second."""
        now = self.clock()
        self._work_s += now - since
        passed_s = now - self._work_heard_at
        if passed_s >= TURN_S:
            work_s, self._work_s, self._work_heard_at = self._work_s, 0.0, now
            self._observe(fx.Worked(work_s, max(passed_s - work_s, 0.0)), now)

    @property
    def deadline(self) -> float:
        """When `turn` has something to do, whatever arrives."""
        return min(self.reliable.deadline, self._mailbox.due)

    def finish(self) -> None:
        """Say the last acknowledgements, free the transport, and fail the requests that are still open.

        Whoever can be started again by a journal says nothing: it may have been interrupted before it wrote an input.
        """
        self._stop(None)
        if not self._closed:
            self._closed = True
            journal, self.journal = self.journal, None
            if journal is None or self._has_halted:
                self._tick(self.clock() + ACK_DELAY_S)
                self._send_outgoing()
            self.transport.close(LINGER_S)
            self._disk.close(LINGER_S)
            if journal is not None:
                journal.close(is_over=self._has_halted)
        for item in self._mailbox.close():
            if isinstance(item, Errand):
                item.answer.set_exception(self._reason())
        for answer, _ in self._answers.values():
            answer.set_exception(self._reason())
        self._answers.clear()
        if self.ring is not None:
            self.ring.ended(self.failure)

    def _stop(self, failure: Exception | None) -> None:
        if not self.stopped:
            if isinstance(failure, errors.PeerLostError | errors.FencedError):
                exit_with_peer_lost()
            self.failure = failure
            self.stopped = True

    def _reason(self) -> Exception:
        return self.failure or errors.StoreClosed("the store is closed: this process has left the cluster")

    def _arrived(self, route: Route, frames: Sequence[memoryview], sender: NodeId | None) -> None:
        if route in self._refused_routes:
            return
        try:
            packet = decode(frames)
        except VersionMismatch as error:
            self._other_version(route, error)
            return
        except errors.ProtocolError as error:
            self._garbage(route, error)
            return
        source = packet.stamp.source
        if sender is not None and source.node != sender and not _introduces(packet, sender):
            self._forged(route, packet, sender)
            return
        if self._routes.get(source) != route and not self._adopt(route, packet):
            return
        trace, ring = self.trace, self.ring
        since_ns = 0 if trace is None else time.monotonic_ns()
        now = self.clock()
        if ring is not None:
            ring.received(now, frames, packet.message)
        effects = self.reliable.receive(packet, now)
        if self.journal is not None:
            self.journal.received(now, frames)
        self._carry_out(effects)
        if trace is not None:
            trace.handled(packet, since_ns)

    def _adopt(self, route: Route, packet: msg.Packet) -> bool:
        """Take a route for that of the sender, if it may speak there; whether the message is to be read."""
        source = packet.stamp.source
        may_speak = self._may_speak(route, packet)
        refusal = self.reliable.refusal(packet) if may_speak else ""
        if refusal is not None:
            # What is dropped without a word is of this job, and too early or too late.
            is_stranger = not may_speak or (bool(refusal) and self.reliable.is_stranger(packet.stamp))
            self.reliable.strangers_refused += is_stranger
            if refusal:
                self._refuse(route, self.reliable.rejection(refusal, packet.stamp))
            else:
                self.transport.hang_up(route)
            return False
        if isinstance(packet.message, msg.Rejected):
            return True
        if self._superseded.get(route) == source:
            # Several connections are read in turn: this was said before the peer dialled anew, and is read after.
            return True
        known = self._routes.get(source)
        if known is not None:
            # The peer dialled anew. What was said under the old connection may be lost, noticed or not.
            self._went_away(known, "a new connection took its place")
            self._supersede(known, source)
        if source.node.rank == UNRANKED:
            self._routes.pop(self._introduced.get(route, source), None)
            self._introduced[route] = source
        self._routes[source] = route
        self._members[route] = source
        if known is not None or self.reliable.is_apart(source):
            self._came_back(source)
        return True

    def _supersede(self, known: Route, member: Member) -> None:
        self._members.pop(known, None)
        self._superseded[known] = member

    def _may_speak(self, route: Route, packet: msg.Packet) -> bool:
        """Whether the sender of a message can be at the other end of its route.

        Servers and workers dial the scheduler, workers dial servers and each other, and a server the one that keeps a
        copy of its slices. A process that dials this one cannot be anything else.
        """
        dialled, source = self._dialled.get(route), packet.stamp.source
        if dialled is not None:
            return source == dialled or isinstance(packet.message, msg.Rejected)
        is_worker = self.machine.me.node.role is Role.WORKER
        return source.node.role is Role.WORKER or (not is_worker and source.node.role is Role.SERVER)

    def _refuse(self, route: Route, packet: msg.Packet) -> None:
        """Say once why a route is not listened to any more: answers to a peer that does not read stay in memory."""
        if route not in self._refused_routes:
            self._refused_routes.add(route)
            self.transport.send(route, encode(packet))
            self.transport.hang_up(route)

    def _other_version(self, route: Route, error: VersionMismatch) -> None:
        """Stop if the scheduler has another version; refuse any other process that has."""
        if self._members.get(route) == SCHEDULER_MEMBER:
            self._stop(errors.ConfigError(f"{error}: install the same version of kvdist on every machine"))
        else:
            self._garbage(route, error)
            self._refuse(route, self.reliable.rejection(str(error)))

    def _forged(self, route: Route, packet: msg.Packet, sender: NodeId) -> None:
        """Refuse a process with a key of this job that speaks in another's name, and say why: it may be a mistake."""
        self.forgeries += 1
        stamp = packet.stamp
        claimed = stamp.source.node
        if isinstance(packet.message, msg.Hello):
            claimed = NodeId(claimed.role, max(packet.message.wanted_rank, -1) % (UNRANKED + 1))
        reason = f"the key of this connection is that of {sender}, but what it says is signed {claimed}"
        if self.forgeries <= GARBAGE_REPORTS_MAX:
            LOG.warning("%s dropped a forged message: %s", self.machine.me, reason)
        advice = "role and KVDIST_RANK must be those for which its key was made"
        self._refuse(route, self.reliable.rejection(f"{reason}; {advice}", stamp))

    def _garbage(self, route: Route, error: errors.ProtocolError) -> None:
        self.garbage_dropped += 1
        sender: Member | str = self._members.get(route, "a stranger")
        if sender == "a stranger":
            self.transport.hang_up(route)
        if self.garbage_dropped <= GARBAGE_REPORTS_MAX:
            LOG.warning("%s dropped an invalid message from %s: %s", self.machine.me, sender, error)

    def _came_back(self, member: Member | None) -> None:
        if member is not None:
            self._observe(fx.PeerConnected(member), self.clock())

    def _went_away(self, route: Route, reason: str, after_silence: bool = False) -> None:
        member = self._members.get(route)
        # A member that is heard under another route by now has come back already.
        if member is not None and self._routes.get(member) == route:
            self._observe(fx.PeerDisconnected(member, reason, after_silence), self.clock())

    def _forget_route(self, route: Route) -> None:
        """The connection of a route is over: nothing of a stranger's is kept, and a member may come back anywhere."""
        self._refused_routes.discard(route)
        self._superseded.pop(route, None)
        if self._superseded and (member := self._members.get(route)) is not None:
            self._superseded = {old: whose for old, whose in self._superseded.items() if whose != member}
        stranger = self._introduced.pop(route, None)
        if stranger is not None and self._routes.get(stranger) == route:
            del self._routes[stranger]
            self._members.pop(route, None)

    def _take_mail(self) -> bool:
        requests: list[req.Request] = []
        events: list[fx.Event] = []
        trace = self.trace
        for item in self._mailbox.pop_due(self.clock()):
            if not isinstance(item, Errand):
                events.append(item)
                continue
            try:
                request = item.make(next(self._numbers))
            except Exception as error:  # noqa: BLE001  # whatever the making raised belongs to its caller
                item.answer.set_exception(error)
            else:
                self._answers[request.request] = (item.answer, item.finish)
                requests.append(request)
                if trace is not None:
                    trace.asked(request, item.since_ns)
        now = self.clock()
        for event in events:
            if isinstance(event, fx.Persisted) and event.failure and event.token is None:  # else the machine says so
                LOG.error("%s: %s", self.machine.me, event.failure)
            self._observe(event, now)
        machine = self.machine
        if requests and isinstance(machine, Worker):
            if self.ring is not None:
                self.ring.asked(now, requests)
            self._carry_out(self.reliable.perform(lambda: machine.submit(requests, now), now))
        return bool(requests or events)

    def _observe(self, event: fx.Event, now: float) -> None:
        if self.ring is not None:
            self.ring.observed(now, event)
        effects = self.reliable.observe(event, now)
        if self.journal is not None:
            self.journal.observed(now, event)
        self._carry_out(effects)

    def _tick(self, now: float) -> None:
        if self.ring is not None:
            self.ring.ticked(now)
        effects = self.reliable.tick(now)
        if self.journal is not None:
            self.journal.ticked(now)
        self._carry_out(effects)

    def _publish(self) -> None:
        """Show other threads what has changed in the cluster."""
        machine = self.machine
        if isinstance(machine, Worker):
            self.view = machine.view(self._shares_memory_with)
        else:
            self.view = ClusterView(machine.me, machine.epoch)

    def _shares_memory_with(self, member: Member) -> bool:
        return self._routes.get(member) in self._sharing

    def _share(self, route: Route, is_shared: bool) -> None:
        """Note whether the peer of a route reads the shared memory of this process."""
        if is_shared:
            self._sharing.add(route)
        elif route in self._sharing:
            self._sharing.remove(route)
        else:
            return
        self._publish()

    def _carry_out(self, effects: Sequence[fx.Effect]) -> None:
        if self.machine.epoch != self.view.epoch or self.machine.me is not self.view.me:
            self._publish()
        ring = self.ring
        for effect in effects:
            if ring is not None and type(effect) is not fx.Transmit:
                ring.did(effect)
            match effect:
                case fx.Transmit(to, packet):
                    self._transmit(to, packet)
                case fx.CompleteRequest(request, result):
                    self._complete(request, result)
                case fx.CompleteKeys(request, keys, refusal):
                    self._keys_answered(request, keys, refusal)
                case fx.FailRequest(request, error):
                    answer, _ = self._answers.pop(request, (None, None))
                    trace = self.trace
                    if trace is not None:
                        trace.answered(request, error)
                    if answer is not None:
                        answer.set_exception(error)
                case fx.Connect(to, endpoint):
                    route = self.transport.connect(endpoint, to.node)
                    self._routes[to] = route
                    self._members[route] = self._dialled[route] = to
                case fx.Bind(stranger, member):
                    route, known = self._routes.pop(stranger), self._routes.get(member, None)
                    self._introduced.pop(route, None)
                    if known not in (None, route):
                        self._supersede(known, member)
                    self._routes[member] = route
                    self._members[route] = member
                case fx.Log(text):
                    LOG.warning("%s", text)
                case fx.TellLauncher(line):
                    with contextlib.suppress(OSError):  # the launcher has gone, which is noticed elsewhere
                        print(line, flush=True)  # noqa: T201 (that is what it is for)
                case fx.Persist(token, work):
                    if self.journal is not None:
                        self.journal.began(effect)
                    self._disk.begin(work, partial(self._persisted, token))
                case fx.Halt(failure):
                    self._has_halted = True
                    self._stop(failure)
                case fx.Send() | fx.Forget():
                    raise AssertionError("Reliable takes these")

    def _persisted(self, token: object, product: DiskResult, failure: str) -> None:
        self.post(fx.Persisted(token, product, failure))

    def _transmit(self, to: Member, packet: msg.Packet) -> None:
        route, ring = self._routes.get(to), self.ring
        # Without a route the peer is away: what matters is repeated when it is back.
        if ring is not None and (route is None or isinstance(packet.message, msg.Rejected)):
            ring.sent(to, ())
        if route is None:
            return
        if isinstance(packet.message, msg.Rejected):
            self._refuse(route, packet)
            return
        try:
            frames = encode(packet)
        except ValueError as error:
            # What a user may hand in is checked at the call; what slips through must not leave others waiting.
            self._stop(errors.KvdistError(f"{self.machine.me} has something to say that no message can carry: {error}"))
            return
        if ring is not None:
            ring.sent(to, frames)
        if route not in self._outgoing and route not in self._sharing:
            self.transport.send(route, frames)
            return
        together = self._outgoing.setdefault(route, [])
        together.append(frames)
        if len(together) >= MESSAGES_TOGETHER:
            self.transport.send_all(route, self._outgoing.pop(route))

    def _send_outgoing(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for route, messages in outgoing.items():
            self.transport.send_all(route, messages)

    def _complete(self, request: int, result: object) -> None:
        answer, finish = self._answers.pop(request, (None, None))
        if answer is None:
            return
        trace = self.trace
        try:
            outcome = result if finish is None else finish()
            if trace is not None:
                trace.answered(request)
            answer.set_result(outcome)
        except Exception as error:  # noqa: BLE001  # whatever the finishing raised belongs to its caller
            if trace is not None:
                trace.answered(request, error)
            answer.set_exception(error)

    def _keys_answered(self, request: int, keys: Sequence[int], error: Exception | None) -> None:
        answer, _ = self._answers.get(request, (None, None))
        if isinstance(answer, AnswerByKey):
            answer.set_keys(keys, error)

    def _explain(self, now: float) -> None:
        since = self.machine.waiting_since
        if since is None:
            self._explained_until = fx.NEVER
            return
        waits = int((now - since) / self._explain_after_s)
        if waits < 1:
            self._explained_until = since
        elif now >= min(self._explained_until, fx.NEVER) + self._explain_after_s or self._explained_until == fx.NEVER:
            self._explained_until = since + waits * self._explain_after_s
            text = self.machine.explain(now)
            LOG.warning("%s", text)
            if self.ring is not None and text is not None:
                self.ring.explained(now, text)


def _locked_again(_: DiskResult, failure: str) -> None:
    """A process that takes the place of another has its lock of a folder, or could not have it."""
    if failure:
        LOG.error("%s", failure)


def _introduces(packet: msg.Packet, sender: NodeId) -> bool:
    """Whether this is from a process that has no seat yet, of that role, and wants the very rank of its key."""
    source, message = packet.stamp.source.node, packet.message
    if source.rank != UNRANKED or source.role is not sender.role:
        return False
    return not isinstance(message, msg.Hello) or message.wanted_rank == sender.rank


def run_together(nodes: Sequence[Node], wait: Callable[[float], object]) -> None:
    """Run several nodes in one thread until all have stopped, first to last in every round.

    Args:
        nodes: the nodes; their transports must share what `wait` waits for.
        wait: sleeps for at most this many seconds, or until something happens for any of the nodes.
    """
    running = list(nodes)
    try:
        while running:
            busy = False
            for node in running:
                try:
                    busy = node.turn(0.0) or busy
                except Exception as error:
                    node._stop(error)
                    raise
            for node in [node for node in running if node.stopped]:
                # At once, so that the others see it go.
                node.finish()
                running.remove(node)
            if running and not busy:
                now = time.monotonic()
                wait(max(0.0, min(TURN_S, *(node.deadline - now for node in running))))
    finally:
        for node in nodes:
            node.finish()


def _poison_children() -> None:
    for node in list(_living):
        node._forked = True


os.register_at_fork(after_in_child=_poison_children)
