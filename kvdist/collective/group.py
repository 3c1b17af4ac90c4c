"""A group of ranks: one queue and one thread, which begins operations in program order.

The thread begins up to `BEGUN_MAX` operations before the first is done, and finishes them in order. Each caller has a
future from the start. Before an operation begins, the consistency check confirms that the other ranks are at the same
one; it also explains failures, because torch's text for a broken connection names no rank.

The thread is a daemon: an operation that can never end, because a peer is at another one, is left to the end of the
process, and `fail` resolves every waiting future.

CUDA operations run on a stream of the group, ordered behind the caller's stream at submission; the stream that asks for
the result waits for it. The host never waits for a device.
"""

from __future__ import annotations

import contextlib
import threading
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
from kvdist.collective.operations import FailedOperation, Operation
from kvdist.collective.signature import JOIN
from kvdist.collective.timeline import NO_TIMELINE, Timeline
from kvdist.errors import CollectiveError, PeerLostError
from kvdist.protocol.collective import Participate


class DeviceFuture(Future[Any]):
    """The future of an operation on CUDA tensors.

    Args:
        operation: kept until the result has been asked for, and with it the tensors that the device may still read.
    """

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self._operation: Operation | None = operation
        # Operations that do not say where their tensors are have them where the caller works.
        self.device = operation.cuda_device if operation.cuda_device is not None else torch.cuda.current_device()
        self._called = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._called.record(torch.cuda.current_stream(self.device))
        self._finished: torch.cuda.Event | None = None

    def order_after_caller(self, stream: torch.cuda.Stream) -> None:
        """Let the group's stream wait for what the caller had begun."""
        stream.wait_event(self._called)

    def order_before_result(self, stream: torch.cuda.Stream) -> None:
        """Let whoever gets the result wait for what the group's stream has begun."""
        self._finished = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._finished.record(stream)

    def result(self, timeout: float | None = None) -> Any:
        """The result, to be used on the present stream."""
        value = super().result(timeout)
        if self._finished is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(self._finished)
            for tensor in _tensors_in(value):
                tensor.record_stream(stream)
            self._operation = None
        return value


class Stream:
    """The stream of a group, made at the first operation on CUDA tensors."""

    def __init__(self) -> None:
        self._made: dict[int, torch.cuda.Stream] = {}

    def entered(self, future: Future[Any]) -> AbstractContextManager[Any]:
        """For what the group's thread does for an operation."""
        if not isinstance(future, DeviceFuture):
            return contextlib.nullcontext()
        return torch.cuda.stream(self._on(future.device))

    def follow(self, future: Future[Any]) -> None:
        """Order the stream behind the caller of an operation."""
        if isinstance(future, DeviceFuture):
            future.order_after_caller(self._on(future.device))

    def lead(self, future: Future[Any]) -> None:
        """Order the result of an operation behind the stream."""
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
"""Operations that are begun and not done: the channel has the next one at hand when one is done."""
LAST_WAIT_S = 1.0
"""How long a failed group may take to end. What can never be finished has no end."""


@dataclass(slots=True, eq=False)
class PendingOperation:
    """An operation that the program has called."""

    sequence: int
    operation: Operation
    future: Future[Any]
    since_ns: int


class Group:
    """Some of the ranks, and what they do together.

    Args:
        number: the same on all ranks; 0 is the group of all.
        ranks: its members, by their ranks among all, ascending.
        channel: connected to them; this group owns it from now on.
        check: asked about every operation.
        stand_in: makes this rank's part in what the others do when this one has joined.
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
        """What an operation failed with because a rank is gone."""
        self._channel = channel
        self._check = check
        self._stand_in = stand_in
        self._stream = Stream()
        self._queue: SimpleQueue[PendingOperation | None] = SimpleQueue()
        self._waiting: dict[int, PendingOperation] = {}
        self._names: set[str] = set()
        self._lock = threading.Lock()
        self._failure: Callable[[str], BaseException] | None = None
        """Makes the error of whoever comes late, for what is called."""
        self._fails_from = 0
        self._is_broken = False
        self._called = 0
        self._has_joined = False
        self._begun: deque[tuple[PendingOperation, list[Work], int]] = deque()
        self._thread = threading.Thread(target=self._run, name=f"kvdist-collective-{number}", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, operation: Operation) -> Future[Any]:
        """Have an operation done after all that were submitted before.

        Raises:
            CollectiveError: the group has failed or is closed, or an operation of that name is under way.
        """
        name = operation.signature.name
        future: Future[Any] = DeviceFuture(operation) if operation.signature.device == "cuda" else Future()
        with self._lock:
            if name in self._names:
                error = CollectiveError(
                    f"{operation.signature} is called while an operation of the name {name!r} is under way: give each"
                    " its own name, or synchronize() the first before"
                )
                self._put(FailedOperation(error), Future())
                raise error
            self._put(operation, future)
        return future

    def refuse(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot call the next operation, which this was to be."""
        with self._lock:
            self._put(FailedOperation(error), Future())

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """Tell everybody who waits for one from this operation on, and whoever comes later, that it will not be done.

        Args:
            error_of: makes the error, for the operation that is waited for, or for '' if there is none.
            from_sequence: of the first one that it concerns.
        """
        with self._lock:
            ended = [called for sequence, called in self._waiting.items() if sequence >= from_sequence]
            for called in ended:
                del self._waiting[called.sequence]
                self._names.discard(called.operation.signature.name)
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

    def stop_calls(self) -> int | None:
        """Take no more operations. Returns how many were taken, None if a `join` may still let others call more."""
        with self._lock:
            if self._failure is None or self._called < self._fails_from:
                self._failure, self._fails_from = _closed, self._called
            return None if self._has_joined else self._called

    def close(self) -> None:
        """Finish what is under way and let go of the connections. What can never be finished is left alone."""
        self.stop_calls()
        with self._lock:
            # What a rank that has left had done with the others can still be done.
            has_failed = self._is_broken and not self._waiting
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(LAST_WAIT_S if has_failed else None)

    def _put(self, operation: Operation, future: Future[Any]) -> None:
        if self._failure is not None and self._called >= self._fails_from:
            error = self._failure(str(operation.signature))
            self._note(error)
            raise error
        if self._has_joined:
            raise CollectiveError(f"{operation.signature} is called while join() has not returned; wait for that first")
        signature = operation.signature
        called = PendingOperation(self._called, operation, future, self.timeline.now())
        self._called += 1
        self._has_joined = signature.kind == JOIN
        if signature.name:
            self._names.add(signature.name)
        self._waiting[called.sequence] = called
        self._check.called(self.number, signature)
        self._queue.put(called)

    def _note(self, error: BaseException | None) -> None:
        """Before anybody is told of it: who is told may ask whether a rank is lost."""
        if isinstance(error, PeerLostError):
            self.loss = error

    # On the group's thread.

    def _run(self) -> None:
        while True:
            while self._begun and (len(self._begun) >= BEGUN_MAX or self._queue.empty()):
                self._finish(*self._begun.popleft())
            if self._queue.empty():
                self.timeline.mark_cycle()
            called = self._queue.get()
            if called is None:
                break
            if called.operation.signature.kind == JOIN:
                self._join(called)
            else:
                self._begin(called)
        while self._begun:
            self._finish(*self._begun.popleft())
        self._channel.close()

    def _begin(self, called: PendingOperation) -> None:
        kind, name = called.operation.signature.kind, called.operation.signature.name
        try:
            asked_ns = self.timeline.queued(kind, name, called.since_ns)
            self._check.admit(self.number, called.sequence)
            begun_ns = self.timeline.negotiated(kind, name, asked_ns)
            with self._stream.entered(called.future):
                self._stream.follow(called.future)
                self._begun.append((called, called.operation.begin(self._channel), begun_ns))
        except Exception as error:  # noqa: BLE001 (whoever waits for it is told)
            self._resolve(called, None, self._explained(error, called))

    def _finish(self, called: PendingOperation, works: list[Work], begun_ns: int) -> None:
        try:
            with self._stream.entered(called.future):
                for work in works:
                    work.wait()
                result = called.operation.finish()
                self._stream.lead(called.future)
            self.timeline.finished(called.operation.signature.kind, called.operation.signature.name, begun_ns)
        except Exception as error:  # noqa: BLE001 (whoever waits for it is told)
            self._resolve(called, None, self._explained(error, called))
        else:
            self._resolve(called, result, None)

    def _join(self, called: PendingOperation) -> None:
        """Take part in what the others do, until all have joined; the result is who did last."""
        while self._begun:
            self._finish(*self._begun.popleft())
        try:
            while isinstance(order := self._check.stand_in(self.number, called.sequence), Participate):
                with self._lock:
                    self._called += 1
                    if self._waiting.pop(called.sequence, None) is not None:  # else `fail` has told it
                        self._waiting[called.sequence + 1] = called
                    called.sequence += 1
                if order.kind:
                    operation = self._stand_in(order)
                    for work in operation.begin(self._channel):
                        work.wait()
                    operation.finish()
                self._check.done(self.number)
        except Exception as error:  # noqa: BLE001 (whoever waits for it is told)
            self._has_joined = False
            self._resolve(called, None, self._explained(error, called))
        else:
            self._has_joined = False
            self._resolve(called, order.last, None)

    def _explained(self, error: Exception, called: PendingOperation) -> BaseException:
        if isinstance(error, CollectiveError):
            return error
        told = self._check.explain(error, self.number, called.sequence, called.operation.signature)
        # What torch could not do leaves the connections in no known state.
        self.fail(lambda _: told)
        return told

    def _resolve(self, called: PendingOperation, result: Any, error: BaseException | None) -> None:
        with self._lock:
            self._names.discard(called.operation.signature.name)
            is_waited_for = self._waiting.pop(called.sequence, None) is not None
            self._note(error)
        self._check.done(self.number)
        if not is_waited_for:
            return  # `fail` has told it
        if error is None:
            called.future.set_result(result)
        else:
            called.future.set_exception(error)


def _closed(called: str) -> CollectiveError:
    text = "this group of ranks has been closed by shutdown()"
    return CollectiveError(f"{text}; {called} was called after that" if called else text)
