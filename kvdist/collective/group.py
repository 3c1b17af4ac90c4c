"""A group of ranks: one queue and one thread, which begins operations in program order.

The thread begins up to `BEGUN_MAX` operations before the first is done, and finishes them in order. Each caller has a
future from the start. Before an operation begins, the consistency check confirms that the other ranks are at the same
operation; it also explains failures, because torch's text for a broken connection names no rank.

The thread is a daemon: an operation that can never end, because a peer is at another operation, is left to the end of
the process, and `fail` resolves every waiting future.

CUDA operations run on a stream of the group, ordered behind the caller's stream at submission; the stream that asks for
the result waits for it. The host never waits for a device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch.distributed import Work

from kvdist.collective.channel import Channel
from kvdist.collective.consistency import ConsistencyCheck
from kvdist.collective.operations import Operation
from kvdist.collective.signature import JOIN, JOIN_SIGNATURE
from kvdist.collective.timeline import NO_TIMELINE, Timeline
from kvdist.errors import CollectiveError, CollectiveMismatch, DuplicateNameError, PeerLostError
from kvdist.protocol.collective import AllJoined, Mismatch, Participate

_waiters: dict[threading.Thread, tuple[float, Future[Any]]] = {}
"""Thread of this process that waits for an operation → (time since when, its future)."""


class OperationFuture(Future[Any]):
    """The future of an operation, which notes the threads that wait for it, and cannot be cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result, or raise the error."""
        self.exception(timeout)
        return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end; return the error, None after success."""
        if self.done():
            return super().exception()
        thread = threading.current_thread()
        _waiters[thread] = time.monotonic(), self
        try:
            return super().exception(timeout)
        finally:
            _waiters.pop(thread, None)


class DeviceFuture(OperationFuture):
    """The future of an operation on CUDA tensors.

    Args:
        operation: kept until the result is taken, with the tensors that the device may still read.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation: Operation | None = operation
        # An operation without a known device has its tensors on the caller's device.
        self.device = operation.cuda_device if operation.cuda_device is not None else torch.cuda.current_device()
        self._called = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._called.record(torch.cuda.current_stream(self.device))
        self._finished: torch.cuda.Event | None = None

    def order_after_caller(self, stream: torch.cuda.Stream) -> None:
        """Make the group's stream wait for the work that the caller had begun."""
        stream.wait_event(self._called)

    def order_before_result(self, stream: torch.cuda.Stream) -> None:
        """Make streams that take the result wait for the work on the group's stream."""
        self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._finished.record(stream)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result, for use on the current stream."""
        value = super().result(timeout)
        if self._finished is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._finished)
            for tensor in _tensors_in(value):
                tensor.record_stream(stream)
            self._operation = None
        return value


class Stream:
    """The CUDA streams of a group, created for each device at its first operation on CUDA tensors."""

    def __init__(self) -> None:
        self._made: dict[int, torch.cuda.Stream] = {}

    def entered(self, future: Future[Any]) -> AbstractContextManager[Any]:
        """Return the context in which the group's thread works on an operation."""
        if not isinstance(future, DeviceFuture):
            return contextlib.nullcontext()
        return torch.cuda.stream(self._on(future.device))

    def follow(self, future: Future[Any]) -> None:
        """Order the stream behind the caller's."""
        if isinstance(future, DeviceFuture):
            future.order_after_caller(self._on(future.device))

    def lead(self, future: Future[Any]) -> None:
        """Order the result behind the stream."""
        if isinstance(future, DeviceFuture):
            future.order_before_result(self._on(future.device))

    def _on(self, device: int) -> torch.cuda.Stream:
        if device not in self._made:
            self._made[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return self._made[device]


def _tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.is_cuda else []
    return [tensor for item in value for tensor in _tensors_in(item)] if isinstance(value, list | tuple) else []


BEGUN_MAX = 16
"""Operations that may be begun and not done, so that the channel has the next operation when one is done."""
LAST_WAIT_S = 1.0
"""Time that `close` waits for the thread of a failed group, which may be stuck in an operation for ever."""


@dataclass(slots=True, eq=False)
class PendingOperation:
    """An operation that the program has called and that is not done.

    Attributes:
        call: its number among the calls of this rank.
        sequence: its number among the operations; -1 until it has begun.
    """

    call: int
    operation: Operation
    future: Future[Any]
    since_ns: int
    sequence: int = -1

    @property
    def has_begun(self) -> bool:
        return self.sequence >= 0


class Group:
    """Some of the ranks, and the operations that they do together.

    Args:
        number: number of the group, the same on all ranks; 0 is the group of all ranks.
        ranks: the members, by their global ranks, ascending.
        channel: connected to the members; the group owns it.
        check: admits every operation.
        stand_in: creates this rank's part in an operation of the others while this rank has joined.
    """

    is_open = True

    def __init__(
        self,
        number: int,
        ranks: Sequence[int],
        channel: Channel,
        check: ConsistencyCheck,
        stand_in: Callable[[Participate], Operation],
    ) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self.rank = channel.rank
        self.size = channel.size
        self.timeline: Timeline = NO_TIMELINE
        self.loss: PeerLostError | None = None
        """The error of an operation that failed because a rank was lost."""
        self._channel = channel
        self._check = check
        self._stand_in = stand_in
        self._stream = Stream()
        self._queue: SimpleQueue[bool] = SimpleQueue()
        """True for each called operation, False for the end."""
        self._waiting: dict[int, PendingOperation] = {}
        """Pending operations by their call numbers."""
        self._turn = 0
        """The number of the operation that begins next."""
        self._names: dict[str, int] = {}
        """Name → the call in progress with that name; refused operations occupy no name."""
        self._lock = threading.Lock()
        self._failure: Callable[[str], BaseException] | None = None
        """Creates the error of later calls, from the operation."""
        self._fails_from = 0
        self._is_broken = False
        self._called = 0
        self._has_joined = False
        self._begun: deque[tuple[PendingOperation, Sequence[Work], int]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"kvdist-collective-{number}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, operation: Operation) -> Future[Any]:
        """Queue an operation behind those submitted before.

        Raises:
            CollectiveError: the group has failed or is closed.
            DuplicateNameError: an operation of that kind and name is in progress; the other ranks learn nothing of
                this.
        """
        signature = operation.signature
        future = DeviceFuture(operation) if signature.device == "cuda" else OperationFuture()
        with self._lock:
            if signature.key in self._names and not signature.is_refused:
                raise DuplicateNameError(
                    f"{signature} has the same name as another tensor that is currently being processed: give each its"
                    " own name, or synchronize() the first one before"
                )
            self._put(operation, future)
        return future

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """Fail the operations from `from_sequence` on, pending and future.

        Args:
            error_of: creates the error from the operation that is waited for, or '' if there is none.
            from_sequence: the first operation concerned.
        """
        with self._lock:
            # A call that has not begun may still become an earlier operation; if not, the thread fails it later.
            ended = [
                called
                for called in self._waiting.values()
                if (called.sequence if called.has_begun else self._turn) >= from_sequence
            ]
            for called in ended:
                self._forget(called)
            error = error_of(str(ended[0].operation.signature) if ended else "")
            self._is_broken = True
            if ended:
                self._note(error)
            if self._failure is None or from_sequence < self._fails_from:
                self._failure, self._fails_from = error_of, from_sequence
        for called in ended:
            called.future.set_exception(error)
        if from_sequence == 0:
            self._channel.abort()

    def stuck_at(self, since: float, one_left: bool) -> int | None:
        """The first operation that the program waits for, if it can call no other before that ends.

        Args:
            since: all threads of the process have waited since this time.
            one_left: whether a member has left and calls no more operations; then only threads that wait for this group
                count.
        """
        called = {id(one.future): one for one in list(self._waiting.values())}
        waits = dict(_waiters)
        if one_left:
            waits = {thread: wait for thread, wait in waits.items() if id(wait[1]) in called}
        elif any(thread not in waits and not _calls_nothing(thread) for thread in threading.enumerate()):
            return None
        if any(at > since for at, _ in waits.values()):
            return None
        awaited = [called[id(future)] for _, future in waits.values() if id(future) in called]
        return min((one.sequence if one.has_begun else self._turn for one in awaited), default=None)

    def stop_calls(self) -> int | None:
        """Accept no more operations; return how many were called, None if a pending `join` may add to them."""
        with self._lock:
            if self._failure is None or self._called < self._fails_from:
                self._failure, self._fails_from = _closed, self._called
            return None if self._has_joined else self._called

    def close(self) -> None:
        """Finish pending operations and release the connections. A thread that is stuck for ever is abandoned."""
        self.stop_calls()
        with self._lock:
            # Operations that a rank had called before it left can still be finished.
            has_failed = self._is_broken and not self._waiting
        self._queue.put(False)
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST_WAIT_S if has_failed else None)

    def _put(self, operation: Operation, future: Future[Any]) -> None:
        if self._failure is not None and self._called >= self._fails_from:
            error = self._failure(str(operation.signature))
            self._note(error)
            raise error
        if self._has_joined:
            raise CollectiveError(f"{operation.signature} is called before join() has returned; wait for that first")
        signature, since_ns = operation.signature, self.timeline.now()
        self._has_joined = signature.kind == JOIN
        call = self._check.called(self.number, signature)
        if signature.name and not signature.is_refused:
            self._names[signature.key] = call
        self._waiting[call] = PendingOperation(call, operation, future, since_ns)
        self._called += 1
        self._queue.put(True)

    def _forget(self, called: PendingOperation) -> bool:
        """Remove a pending operation; return whether it was pending."""
        key = called.operation.signature.key
        if self._names.get(key) == called.call:
            del self._names[key]
        return self._waiting.pop(called.call, None) is not None

    def _note(self, error: BaseException | None) -> None:
        """Remember the loss of a rank, before any future is resolved with it."""
        if isinstance(error, PeerLostError):
            self.loss = error

    # On the group's thread.

    def _run(self) -> None:
        while True:
            while self._begun and not self._may_begin():
                self._finish(*self._begun.popleft())
            if self._queue.empty():
                self.timeline.mark_cycle()
            if not self._queue.get():
                break
            self._begin_next()
        while self._begun:
            self._finish(*self._begun.popleft())
        self._channel.close()

    def _may_begin(self) -> bool:
        """Whether to begin another operation before the first is done: not if others may wait for the first before."""
        is_free = len(self._begun) < BEGUN_MAX and not self._channel.waits_in_begin
        return is_free and not self._queue.empty() and self._check.has_next(self.number)

    def _begin_next(self) -> None:
        """Begin the next operation: the oldest call, or another call where ranks have other orders."""
        asked_ns = self.timeline.now()
        try:
            while isinstance(turn := self._check.next(self.number, self._turn), Participate):
                self._take_part(turn)
        except CollectiveError as error:
            self._give_up(error)
            return
        match turn:
            case AllJoined(last=last):
                self._has_joined = False
                self._resolve(self._take_turn(None), last, None)
            case Mismatch(call=call, text=text):
                self._resolve(self._take_turn(call), None, CollectiveMismatch(text))
            case _:
                self._begin(self._take_turn(turn), asked_ns)

    def _take_turn(self, call: int | None) -> PendingOperation | None:
        """Let a call, or the oldest call, be the next operation; return it unless `fail` has resolved it."""
        with self._lock:
            called = self._waiting.get(call) if call is not None else self._oldest()
            if called is not None:
                called.sequence = self._turn
            self._turn += 1
        return called

    def _oldest(self) -> PendingOperation | None:
        return next((called for called in self._waiting.values() if not called.has_begun), None)

    def _give_up(self, error: BaseException) -> None:
        """Fail the oldest call, because no operation can be the next."""
        with self._lock:
            self._has_joined = False
            called = self._oldest()
            if called is not None and self._failure is not None and self._turn >= self._fails_from:
                error = self._failure(str(called.operation.signature))
        self._resolve(called, None, error)

    def _begin(self, called: PendingOperation | None, asked_ns: int) -> None:
        if called is None:
            self._check.done(self.number)
            return
        kind, name = called.operation.signature.kind, called.operation.signature.name
        try:
            begun_ns = self.timeline.negotiated(kind, name, called.since_ns, asked_ns)
            with self._stream.entered(called.future):
                self._stream.follow(called.future)
                self._begun.append((called, called.operation.begin(self._channel), begun_ns))
        except Exception as error:  # noqa: BLE001 (it resolves the future)
            self._resolve(called, None, self._explained(error, called))

    def _finish(self, called: PendingOperation, works: Sequence[Work], begun_ns: int) -> None:
        try:
            with self._stream.entered(called.future):
                for work in works:
                    work.wait()
                result = called.operation.finish()
                self._stream.lead(called.future)
            self.timeline.finished(called.operation.signature.kind, called.operation.signature.name, begun_ns)
        except Exception as error:  # noqa: BLE001 (it resolves the future)
            self._resolve(called, None, self._explained(error, called))
        else:
            self._resolve(called, result, None)

    def _take_part(self, order: Participate) -> None:
        """Take part in an operation of the others while this rank has joined."""
        while self._begun:
            self._finish(*self._begun.popleft())
        with self._lock:
            self._called += 1
            self._turn += 1
        try:
            if order.kind:
                operation = self._stand_in(order)
                for work in operation.begin(self._channel):
                    work.wait()
                operation.finish()
        except Exception as error:  # noqa: BLE001 (it resolves the future of `join`)
            explained = self._check.explain(error, self.number, order.sequence, JOIN_SIGNATURE)
            self.fail(lambda _: explained)
        self._check.done(self.number)

    def _explained(self, error: Exception, called: PendingOperation) -> BaseException:
        if isinstance(error, CollectiveError):
            return error
        explained = self._check.explain(error, self.number, called.sequence, called.operation.signature)
        # After an error of torch the state of the connections is unknown.
        self.fail(lambda _: explained)
        return explained

    def _resolve(self, called: PendingOperation | None, result: Any, error: BaseException | None) -> None:
        """End an operation, unless `fail` has resolved it."""
        is_waited_for = False
        with self._lock:
            if called is not None:
                is_waited_for = self._forget(called)
            self._note(error)
        self._check.done(self.number)
        if called is None or not is_waited_for:
            return
        if error is None:
            called.future.set_result(result)
        else:
            called.future.set_exception(error)


def _calls_nothing(thread: threading.Thread) -> bool:
    """Whether a thread calls no operation while all others wait: a thread of kvdist, or the helper of a waiting
    thread."""
    return thread.name.startswith("kvdist-") or isinstance(thread, threading._DummyThread)


def _closed(called: str) -> CollectiveError:
    text = "this group of ranks has been closed by shutdown()"
    return CollectiveError(f"{text}; {called} was called after that" if called else text)
