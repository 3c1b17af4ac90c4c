"""`Node`: the only loop. It runs a machine over a transport, and passes calls and answers between threads.

A single thread owns a `Node` and its attributes. Other threads may only `submit` and `post`, which put an item into the
mailbox and wake the loop, and read `view`, a snapshot that never changes, and `failure` and `stopped`, which are set
once; answers are futures. Only this module knows machines, bytes and sockets at once, and only it carries out effects.
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
"""Most messages to a peer that are sent together; more would delay the peer's first work."""
TURN_S = 1.0
"""Longest sleep of the loop."""
LINGER_S = 0.5
"""Longest time for the last messages to leave."""
GARBAGE_REPORTS_MAX = 5
"""Number of invalid messages that are logged; further ones are only counted."""

NOT_BACK = "it has not come back since the scheduler was started again"
"""Cause of the loss of a member that does not connect to a restarted scheduler."""

URGENT = -fx.NEVER
WAIT_MAX_S = 0.05
"""Longest wait of an item in the mailbox, however many items follow."""

_living: weakref.WeakSet[Node] = weakref.WeakSet()


Finish = Callable[[], Any]
"""Called on the node's thread when a request is fulfilled, before its future resolves; returns the future's result."""


class Answer(Protocol):
    """Takes the outcome of a request, as a `concurrent.futures.Future` does."""

    def set_result(self, result: Any) -> None:
        """Take the result of the request."""

    def set_exception(self, exception: BaseException) -> None:
        """Take the error with which the request failed."""


class AnswerByKey(abc.ABC):
    """Takes the outcome of a request that is answered key by key."""

    @abc.abstractmethod
    def set_keys(self, keys: Sequence[int], error: Exception | None) -> None:
        """Take the arrival of the keys with these indices, or their error."""

    @abc.abstractmethod
    def set_result(self, result: Any) -> None:
        """Take the result, after the answers for all keys."""

    @abc.abstractmethod
    def set_exception(self, exception: BaseException) -> None:
        """Take the error for all keys without an answer."""


class Growing(Protocol):
    """A request that may grow until it is submitted to the machine."""

    def due(self, now: float) -> float:
        """Return the latest time for its submission, as known now. Called again at that time."""


@dataclass(slots=True)
class Errand:
    """A request before its submission to the machine: `make` gets its number, on the node's thread."""

    make: Callable[[int], req.Request]
    answer: Answer | AnswerByKey
    finish: Finish | None
    growing: Growing | None = None
    """If set, the request waits until its `due`, or until an urgent item comes."""
    since_ns: int = 0
    """Time at which the user's call began, for a trace; see `NodeTrace`."""


class Mailbox:
    """Items from other threads for the thread of a node, in order, and the time to handle them. Safe from any thread.

    Most items are urgent. The others may wait a little for further items, because two threads of Python that exchange
    work at every call spend their time waiting for each other.

    Args:
        wake: wakes the node's thread.
        clock: monotonic seconds.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self.clock = clock
        self._items: list[Errand | fx.Event] = []
        # Reentrant: a signal handler of the user may call kvdist while the thread that it interrupts holds the lock.
        self._lock = threading.RLock()
        self._closed = False
        self._due = fx.NEVER
        self._since = fx.NEVER
        """Time at which the first growing item came."""

    @property
    def due(self) -> float:
        """Time at which the node's thread should handle the items; `NEVER` without items."""
        return self._due

    def put(self, item: Errand | fx.Event) -> bool:
        """Add an item; False if the mailbox is closed."""
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
        """Make all items urgent."""
        with self._lock:
            if self._items:
                self._look_by(URGENT)

    def pop_due(self, now: float) -> list[Errand | fx.Event]:
        """Remove and return all items, if they are due."""
        if now < self._due:
            return []
        with self._lock:
            if self._due != URGENT and self._items:
                # Items stay in order, so a growing item holds back the items before it. Only the last items grow.
                last = [item for item in self._items[-2:] if isinstance(item, Errand) and item.growing]
                due = max([item.growing.due(now) for item in last if item.growing], default=URGENT)
                due = min(due, self._since + WAIT_MAX_S)
                if now < due:
                    self._due = due
                    return []
            items, self._items, self._due, self._since = self._items, [], fx.NEVER, fx.NEVER
            return items

    def _look_by(self, due: float) -> None:
        """Make the node's thread handle the items by this time; under the lock."""
        wakes = self._due == fx.NEVER or (due == URGENT and self._due != URGENT)
        self._due = min(self._due, due)
        if wakes:
            self._wake()

    def close(self) -> list[Errand | fx.Event]:
        """Refuse further items, and return the rest."""
        with self._lock:
            self._closed = True
            items, self._items, self._due, self._since = self._items, [], fx.NEVER, fx.NEVER
            return items


class Tracer(abc.ABC):
    """Notes what a node does. Times are those of `time.monotonic_ns`."""

    # On threads of the user.

    @abc.abstractmethod
    def called(self) -> None:
        """Note that the user has called a method; a request may follow."""

    @abc.abstractmethod
    def take_since(self) -> int:
        """Return the start of the call whose request is being submitted."""

    @abc.abstractmethod
    def wait(self, future: Future[Any]) -> Any:
        """Return the result of a future, with the wait in the trace."""

    # On the node's thread.

    @abc.abstractmethod
    def asked(self, request: req.Request, since_ns: int) -> None:
        """Note a request to the machine; `since_ns` is 0 if tracing began after the request was submitted."""

    @abc.abstractmethod
    def answered(self, request: int, error: Exception | None = None) -> None:
        """Note that a request has been fulfilled or has failed."""

    @abc.abstractmethod
    def handled(self, packet: msg.Packet, since_ns: int) -> None:
        """Note that a message has been handled, with its effects."""


class Recorder(abc.ABC):
    """Keeps the last inputs of a node's machine and its answers. Times are those of the machine."""

    @abc.abstractmethod
    def received(self, now: float, frames: Sequence[Buffer], message: msg.Message) -> None:
        """Keep a message to the machine."""

    @abc.abstractmethod
    def observed(self, now: float, event: fx.Event) -> None:
        """Keep an event for the machine."""

    @abc.abstractmethod
    def ticked(self, now: float) -> None:
        """Keep a tick of the machine."""

    @abc.abstractmethod
    def asked(self, now: float, requests: Sequence[req.Request]) -> None:
        """Keep requests of the user to the machine."""

    @abc.abstractmethod
    def sent(self, to: Member, frames: Sequence[Buffer]) -> None:
        """Keep a message of the machine; no frames if it could not leave."""

    @abc.abstractmethod
    def did(self, effect: fx.Effect) -> None:
        """Keep an effect of the machine that sends no message."""

    @abc.abstractmethod
    def explained(self, now: float, text: str) -> None:
        """Keep the explanation of a long wait."""

    @abc.abstractmethod
    def ended(self, failure: Exception | None) -> None:
        """Note the end of the node."""


class Node:
    """A machine with its transport and its thread.

    Args:
        machine: scheduler, server or worker.
        transport: connections to the other processes.
        job: tag of the job.
        explain_after_s: a wait longer than this is explained, again at every multiple.
        clock: monotonic seconds.
        disk: disk for the machine's files; None for the disk of this host.
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
        """Newest snapshot of the cluster, for any thread. Replaced before the effects of a change are carried out."""
        self.stopped = False
        self.failure: Exception | None = None
        """Error with which the node stopped; None if it stopped well."""
        self._has_halted = False
        """Whether the machine has ended the node by `Halt`; False after an error or a signal."""
        self.garbage_dropped = 0
        """Number of invalid messages."""
        self.forgeries = 0
        """Number of messages signed by another sender than the owner of the connection's key."""
        self.trace: Tracer | None = None
        """Tracer of the node's events, or None. Any thread may set it, so methods read it once."""
        self.ring: Recorder | None = None
        """Recorder of the machine's inputs and answers, or None; set before the node runs."""
        self.journal: Journal | None = None
        """Journal of the machine's inputs, for a process that replaces this process; see `keep`."""
        self.is_revived = False
        """Whether the machine had inputs in an earlier process."""
        self._explain_after_s = explain_after_s
        self._explained_until = fx.NEVER
        self.clock = clock
        self._work_s = 0.0
        """Seconds of turns, without their waits, since the last report to the machine."""
        self._work_heard_at = clock()
        self._forked = False
        self._routes: dict[Member, Route] = {}
        self._members: dict[Route, Member] = {}
        self._mailbox = Mailbox(transport.wake, clock)
        self._outgoing: dict[Route, list[list[Buffer]]] = {}
        """Route → messages of this turn, which are sent together."""
        self._closed = False
        self._dialled: dict[Route, Member] = {}
        """Route that this process has dialled → member that is expected at it."""
        self._sharing: set[Route] = set()
        """Routes whose peers read the shared memory of this process."""
        self._introduced: dict[Route, Member] = {}
        """Route → last stranger that introduced itself by it and has no rank yet."""
        self._refused_routes: set[Route] = set()
        """Routes of strangers, other versions and forged names: refused once, and ignored since."""
        self._superseded: dict[Route, Member] = {}
        """Old route of a member that has dialled anew → member. It is still read, but not used for sending."""
        self._answers: dict[int, tuple[Answer | AnswerByKey, Finish | None]] = {}
        self._numbers = count(1)
        _living.add(self)

    # For other threads.

    def submit(self, make: Callable[[int], req.Request], finish: Finish | None = None) -> Future[Any]:
        """Submit a request; `make` gets its number. Every error except `ForkError` comes through the future."""
        self.check_fork()
        future: Future[Any] = AwaitedFuture()
        # It cannot be cancelled: its messages have left, and the answer may be under way into the user's arrays.
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
            answer: gets the outcome, on the node's thread.
            make: creates the request from its number, on the node's thread.
            finish: as in `submit`.
            growing: lets the request wait a little, so that it may take in later calls; see `hurry`.
        """
        self.check_fork()
        trace = self.trace
        since_ns = 0 if trace is None else trace.take_since()
        if not self._mailbox.put(Errand(make, answer, finish, growing, since_ns)):
            answer.set_exception(self._reason())

    def hurry(self) -> None:
        """Stop the waits of growing requests."""
        self._mailbox.hurry()

    def post(self, event: fx.Event) -> None:
        """Pass an event to the machine."""
        self._mailbox.put(event)

    def begin_call(self) -> None:
        """Note the thread of a user's call, and its time for the trace. Raises `ForkError` in a forked child."""
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
        """Keep a journal, before the node runs. If an earlier process has written it, continue from its last input."""
        self.journal = journal
        if journal.is_new:
            journal.begin(self.reliable, self.clock())
            return
        state, effects = journal.read()
        clock, absence_s = self.clock, self.clock() - state.now
        self.clock = self._mailbox.clock = lambda: clock() - absence_s  # for the machine, no time has passed
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
        # Messages to others are repeated anyway; logs and lines for the launcher are not.
        self._carry_out([effect for effect in effects if isinstance(effect, fx.Log | fx.TellLauncher)])

    def run(self) -> None:
        """Run the loop until the machine stops, then close the transport."""
        try:
            while not self.stopped:
                self.turn(TURN_S)
        except BaseException as error:
            self._stop(error if isinstance(error, Exception) else None)
            raise
        finally:
            self.finish()

    def turn(self, timeout_s: float) -> bool:
        """Run the loop once: handle arrivals, requests, timers. Returns whether there were any.

        Args:
            timeout_s: longest wait for an event.
        """
        now = self.clock()
        timeout_s = max(0.0, min(timeout_s, self.deadline - now))
        events = self.transport.recv(timeout_s)
        # Timers are due by the time of the last read: if this process stands still, or computes for seconds, others are
        # not late, as their messages wait to be read.
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
        """Add the time of a turn since `since`, and report the sum to the machine once a second."""
        now = self.clock()
        self._work_s += now - since
        passed_s = now - self._work_heard_at
        if passed_s >= TURN_S:
            work_s, self._work_s, self._work_heard_at = self._work_s, 0.0, now
            self._observe(fx.Worked(work_s, max(passed_s - work_s, 0.0)), now)

    @property
    def deadline(self) -> float:
        """Time at which `turn` has work to do, whatever arrives."""
        return min(self.reliable.deadline, self._mailbox.due)

    def finish(self) -> None:
        """Send the last acknowledgements, close the transport, and fail the requests that are still open.

        A node with a journal sends nothing unless its machine has halted: it may have been interrupted before it wrote
        an input.
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
        """Make a route that of the sender, if the sender may use it. Returns whether to handle the message."""
        source = packet.stamp.source
        may_speak = self._may_speak(route, packet)
        refusal = self.reliable.refusal(packet) if may_speak else ""
        if refusal is not None:
            # A packet that is dropped without an answer is of this job, and too early or too late.
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
            # Several connections are read in turn: this message was sent before the peer dialled anew.
            return True
        known = self._routes.get(source)
        if known is not None:
            # The peer dialled anew. Messages of the old connection may be lost, noticed or not.
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
        """Return whether the sender of a message can be at the other end of its route.

        Servers and workers dial the scheduler, workers dial servers and each other, and a server dials its backup. Only
        such processes dial this process.
        """
        dialled, source = self._dialled.get(route), packet.stamp.source
        if dialled is not None:
            return source == dialled or isinstance(packet.message, msg.Rejected)
        is_worker = self.machine.me.node.role is Role.WORKER
        return source.node.role is Role.WORKER or (not is_worker and source.node.role is Role.SERVER)

    def _refuse(self, route: Route, packet: msg.Packet) -> None:
        """Refuse a route and send the reason, once: answers to a peer that does not read stay in memory."""
        if route not in self._refused_routes:
            self._refused_routes.add(route)
            self.transport.send(route, encode(packet))
            self.transport.hang_up(route)

    def _other_version(self, route: Route, error: VersionMismatch) -> None:
        """Stop if the scheduler has another version; refuse any other process with another version."""
        if self._members.get(route) == SCHEDULER_MEMBER:
            self._stop(errors.ConfigError(f"{error}: install the same version of kvdist on every machine"))
        else:
            self._garbage(route, error)
            self._refuse(route, self.reliable.rejection(str(error)))

    def _forged(self, route: Route, packet: msg.Packet, sender: NodeId) -> None:
        """Refuse a process with a key of this job that uses another's name, with a reason: it may be a mistake."""
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
        # A member with another route by now has come back already.
        if member is not None and self._routes.get(member) == route:
            self._observe(fx.PeerDisconnected(member, reason, after_silence), self.clock())

    def _forget_route(self, route: Route) -> None:
        """Forget the stranger of a closed route, and its refusal. A member may come back by any route."""
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
            except Exception as error:  # noqa: BLE001  # the caller gets the error of `make`, whatever it is
                item.answer.set_exception(error)
            else:
                self._answers[request.request] = (item.answer, item.finish)
                requests.append(request)
                if trace is not None:
                    trace.asked(request, item.since_ns)
        now = self.clock()
        for event in events:
            if isinstance(event, fx.Persisted) and event.failure and event.token is None:  # else the machine reports it
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
        """Replace `view` by a new snapshot of the cluster."""
        machine = self.machine
        if isinstance(machine, Worker):
            self.view = machine.view(self._shares_memory_with)
        else:
            self.view = ClusterView(machine.me, machine.epoch)

    def _shares_memory_with(self, member: Member) -> bool:
        return self._routes.get(member) in self._sharing

    def _share(self, route: Route, is_shared: bool) -> None:
        """Record whether the peer of a route reads the shared memory of this process."""
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
                    with contextlib.suppress(OSError):  # the end of the launcher is noticed elsewhere
                        print(line, flush=True)  # noqa: T201 (the launcher reads this output)
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
        # Without a route the peer is away: messages that matter are repeated when it is back.
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
            # A user's arguments are checked at the call; an error that slips through must not leave others waiting.
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
        except Exception as error:  # noqa: BLE001  # the caller gets the error of `finish`, whatever it is
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
    """Log that a restarted process could not lock a folder again, if so."""
    if failure:
        LOG.error("%s", failure)


def _introduces(packet: msg.Packet, sender: NodeId) -> bool:
    """Return whether a process without a rank sent this, of its key's role; a hello must ask for the key's rank."""
    source, message = packet.stamp.source.node, packet.message
    if source.rank != UNRANKED or source.role is not sender.role:
        return False
    return not isinstance(message, msg.Hello) or message.wanted_rank == sender.rank


def run_together(nodes: Sequence[Node], wait: Callable[[float], object]) -> None:
    """Run several nodes in a single thread until all have stopped, first to last in every round.

    Args:
        nodes: the nodes; `wait` must wake for all of their transports.
        wait: sleeps for at most this many seconds, or until an event for any of the nodes.
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
                # At once, so that the others notice its end.
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
