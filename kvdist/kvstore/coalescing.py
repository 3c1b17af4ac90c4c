"""Coalescing of calls for single small keys, as in ``for k in keys: store.push(k, grad[k])``, into batches.

Invariants:

* Requests keep their order: a batch takes in a call only while no other request of the store stands behind it in the
  mailbox, except the pulls that follow its pushes; no such pull may be of a key that is pushed.
* A call is checked, and its value copied, before it returns. The rest is done by the node's thread.
* Pulls travel together, but each has a separate future: a caller that waits for a key does not wait for other rounds.
* A loop is coalesced as it was the last time, so that the servers see the same keys together at every step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kvdist.core.machine import NEVER
from kvdist.core.worker.requests import KeyInfo, Run, RunKind, Transfer
from kvdist.kvstore.backend import PushOptions
from kvdist.kvstore.keys import named
from kvdist.kvstore.values import Key
from kvdist.protocol.arrays import Bits, padded
from kvdist.runtime.node import AnswerByKey, Finish, Growing
from kvdist.runtime.waits import AwaitedFuture

if TYPE_CHECKING:
    from kvdist.kvstore.compression import EncodedSlices

# Reentrant, because a signal handler of the user may call us while the thread it interrupted holds it.
_LOCK = threading.RLock()


class PullFuture(AwaitedFuture[None]):
    """A future of None that cannot be cancelled: the answer may be under way into the user's array.

    Args:
        hurry: called when a thread waits.
    """

    _is_whole = False
    """Whether the base class is initialised. False on the class, so that each future need not set it."""
    _is_done = False
    _error: BaseException | None = None

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry

    def __getattr__(self, name: str) -> Any:
        # Only attributes that the base class sets when it is initialised can be missing.
        if self._is_whole:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not self._is_done:
            self._hurry()
        self._become_whole()
        return getattr(self, name)

    def cancel(self) -> bool:
        """Always False."""
        return False

    def cancelled(self) -> bool:
        """Always False."""
        return False

    def running(self) -> bool:
        """Whether the pull is still in progress."""
        return not self._is_done

    def done(self) -> bool:
        """Whether the result is in its array, or the pull has failed."""
        return self._is_done

    def result(self, timeout: float | None = None) -> None:
        """Wait until the result is in its array.

        Raises:
            TimeoutError: the result is not in its array after `timeout` seconds.
            KvdistError: the pull has failed.
        """
        if not self._is_done:
            self._hurry()
            super().result(timeout)
        elif self._error is not None:
            raise self._error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return the error of the pull; None if it succeeded."""
        if self._is_done:
            return self._error
        self._hurry()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        """Have `fn` called when the pull is done. No thread waits for it, so the batch is not hurried."""
        self._become_whole()
        super().add_done_callback(fn)

    def set_result(self, result: None) -> None:
        """Complete the future: the result is in its array."""
        fulfil([self])

    def set_exception(self, exception: BaseException | None) -> None:
        """Complete the future with an error: the pull has failed."""
        assert exception is not None
        fail([self], exception)

    def _become_whole(self) -> None:
        """Initialise the base class: the attributes of a `Future`."""
        with _LOCK:
            if not self._is_whole:
                # Made elsewhere and put here at once: another thread may use each part as soon as it is there.
                base: Future[None] = Future()
                base.set_running_or_notify_cancel()
                vars(self).update(vars(base))
                self._is_whole = True
                if self._is_done:
                    self._tell()

    def _tell(self) -> None:
        """Let the base class wake waiting threads and call callbacks."""
        if self._error is None:
            super().set_result(None)
        else:
            super().set_exception(self._error)


def fulfil(futures: Sequence[PullFuture]) -> None:
    """Complete futures whose results are in their arrays."""
    with _LOCK:
        for future in futures:
            future._is_done = True
        whole = [future for future in futures if future._is_whole]
    for future in whole:
        future._tell()


def fail(futures: Sequence[PullFuture], error: BaseException) -> None:
    """Complete futures with an error."""
    with _LOCK:
        for future in futures:
            future._error = error
            future._is_done = True
        whole = [future for future in futures if future._is_whole]
    for future in whole:
        future._tell()


SMALL_BYTES_MAX = 16 << 10
"""Size of the largest values that are coalesced; a larger value gets a separate request."""
BATCH_CALLS_MAX = 4096
"""Number of calls that a batch takes in."""
QUIET_S = 0.0005
"""Time without a new call after which a batch is sent,"""
PATIENCE_S = 0.03
"""or this time, if the batch took in more calls the last time: a loop whose thread is interrupted should not be cut."""
BATCH_S = 0.05
"""Time after which a batch is sent in any case: a loop that takes longer does other work besides, or is very long."""

Hyperparameters = tuple[float, float, float]
"""Learning rate, weight decay and rescale of a key."""
LayOut = Callable[
    [list[KeyInfo], Sequence[Sequence[Bits]], "list[EncodedSlices | None]", PushOptions, Sequence[Hyperparameters]],
    tuple[Sequence[Run], Finish],
]
"""Builds the runs of a push from the bits, codes and hyperparameters of each key; returns them with the function to
call when servers have counted the push."""
PlanPull = Callable[[Sequence[KeyInfo], Sequence[Bits]], Sequence[Run]]
"""Builds the runs of a pull of keys into arrays."""
Failed = Callable[[BaseException], None]
"""Receives the error of pushes."""
Submit = Callable[["_PushBatch | _PullBatch", Callable[[int], Transfer], Growing], None]
"""Leaves a request for the node's thread, which may send it later."""


class _Batch:
    """Calls that will be sent as a single request.

    Args:
        expected: number of calls in the last batch that began with the same key.
        lock: lock of the `Coalescer`.
    """

    def __init__(self, expected: int, lock: threading.RLock) -> None:
        self.lock = lock
        self.priority = 0
        """Highest priority of the calls; the whole batch is sent with it."""
        self.infos: dict[Key, KeyInfo] = {}
        self.is_open = True
        """Whether the batch still takes in calls; under the lock."""
        self.error: BaseException | None = None
        """Error for which the batch will not be sent; under the lock."""
        self._expected = expected
        self._since: float | None = None
        self._seen, self._seen_at = 0, 0.0
        """Number of calls when `due` was last called, and the time at which that number last changed."""

    def due(self, now: float) -> float:
        """Time at which the node's thread should send the batch if no call is added any more; see `Growing`."""
        if not self.is_open:
            return -NEVER
        if self._since is None:
            self._since = self._seen_at = now
        count = len(self.infos)
        if count != self._seen:
            self._seen, self._seen_at = count, now
        return min(self._seen_at + (PATIENCE_S if count < self._expected else QUIET_S), self._since + BATCH_S)

    def end(self, error: BaseException) -> None:
        """Close the batch, which will not be sent. A call that was just added sees the error."""
        with self.lock:
            self.is_open = False
            self.error = error

    def takes(self, key: Key) -> bool:
        """Whether a call for this key may be added to the batch."""
        return self.is_open and key not in self.infos and len(self.infos) < BATCH_CALLS_MAX

    def add(self, info: KeyInfo, priority: int) -> None:
        """Enter the key and the priority of a call; the subclass's lists are filled by the `Coalescer`."""
        if priority > self.priority or not self.infos:
            self.priority = priority
        self.infos[info.key] = info


class _PushBatch(_Batch):
    def __init__(
        self,
        expected: int,
        lock: threading.RLock,
        lay_out: LayOut,
        options: PushOptions,
        failed: Failed,
        leave: Callable[[int], None],
    ) -> None:
        super().__init__(expected, lock)
        self.nbytes = 0
        """Bytes in flight with this batch; under the lock."""
        self._leave = leave
        self._lay_out = lay_out
        self.options = options
        self.bits: list[list[Bits]] = []
        self.encoded: list[EncodedSlices | None] = []
        self.settings: list[Hyperparameters] = []
        self._failed = failed
        self._release: Finish | None = None

    def make(self, number: int) -> Transfer:
        infos = list(self.infos.values())
        runs, self._release = self._lay_out(infos, self.bits, self.encoded, self.options, self.settings)
        self.bits, self.encoded = [], []  # they lie in the staging buffers now
        return Transfer(number, RunKind.PUSH, f"push of {named(infos)}", runs, self.priority)

    def set_result(self, result: Any) -> None:  # no thread waits for it
        assert self._release is not None
        self._release()
        self._leave(self.nbytes)

    def set_exception(self, exception: BaseException) -> None:
        self.end(exception)
        self._failed(exception)
        self._leave(self.nbytes)


class _PullBatch(_Batch, AnswerByKey):
    def __init__(self, expected: int, lock: threading.RLock, plan_pull: PlanPull) -> None:
        super().__init__(expected, lock)
        self._plan_pull = plan_pull
        self.results: list[Bits] = []
        self.futures: list[PullFuture] = []
        self.finishes: dict[PullFuture, Finish] = {}
        """Future → function to call before it is completed, for pulls that need such a call."""

    def make(self, number: int) -> Transfer:
        infos = list(self.infos.values())
        runs = self._plan_pull(infos, self.results)
        return Transfer(number, RunKind.PULL, f"pull of {named(infos)}", runs, self.priority, key_by_key=True)

    def set_keys(self, keys: Sequence[int], error: Exception | None) -> None:
        futures = [self.futures[index] for index in keys]
        if error is not None:
            fail(futures, error)
            return
        for future in [future for future in futures if future in self.finishes] if self.finishes else ():
            try:
                self.finishes.pop(future)()
            except Exception as raised:  # noqa: BLE001  # it belongs to the one who waits
                fail([future], raised)
                futures.remove(future)
        fulfil(futures)

    def set_result(self, result: Any) -> None:  # each has had its own
        pass

    def set_exception(self, exception: BaseException) -> None:
        with self.lock:
            self.end(exception)
            waiting = [future for future in self.futures if not future.done()]
        fail(waiting, exception)


class Coalescer:
    """The open batches of a store: at most a batch of pushes, and a batch of pulls behind it.

    Args:
        lay_out: builds the runs of a batch of pushes.
        plan_pull: builds the runs of a batch of pulls.
        submit: leaves a request for the node's thread.
        hurry: informs the node's thread that a caller waits.
        failed: receives the error of pushes.
        leave: receives the number of bytes that are no longer in flight.
    """

    def __init__(
        self,
        lay_out: LayOut,
        plan_pull: PlanPull,
        submit: Submit,
        hurry: Callable[[], None],
        failed: Failed,
        leave: Callable[[int], None],
    ) -> None:
        self._lay_out = lay_out
        self._plan_pull = plan_pull
        self._submit = submit
        self._hurry = hurry
        self._failed = failed
        self._leave = leave
        # Reentrant, because a signal handler of the user may call us while the thread it interrupted holds it.
        self._lock = threading.RLock()
        self._pushes: _PushBatch | None = None
        self._pulls: _PullBatch | None = None
        self._counts: dict[tuple[RunKind, Key], int] = {}
        """Kind and first key of a batch → number of calls in the last such batch."""

    def close(self) -> None:
        """Close the open batches, so that they are sent before any later request."""
        with self._lock:
            for gathering in (self._pushes, self._pulls):
                if gathering is not None:
                    gathering.is_open = False
            self._pushes = self._pulls = None

    def push(
        self,
        info: KeyInfo,
        bits: Bits,
        setting: Hyperparameters,
        priority: int,
        options: PushOptions,
        encoded: EncodedSlices | None = None,
    ) -> None:
        """Add a push, whose bytes already count as in flight, to a batch; `bits` are copied unless `encoded`."""
        copy, key = [bits.copy() if encoded is None else bits], info.key
        with self._lock:
            into, pulls = self._pushes, self._pulls
            if into is None or not into.takes(key) or into.options != options or (pulls and key in pulls.infos):
                into = self._begin_pushes(key, options)
            into.add(info, priority)
            into.bits.append(copy)
            into.encoded.append(encoded)
            into.settings.append(setting)
            error = into.error
            if error is None:
                into.nbytes += padded(bits.nbytes)
        if error is not None:
            self._failed(error)
            self._leave(padded(bits.nbytes))

    def pull(self, info: KeyInfo, result: Bits, finish: Finish | None, priority: int) -> PullFuture:
        """Add a pull of a single-slice key into `result` to a batch; `finish` copies it to further arrays."""
        future, key = PullFuture(self._hurry), info.key
        with self._lock:
            into = self._pulls
            if into is None or not into.takes(key):
                into = self._begin_pulls(key)
            into.add(info, priority)
            into.results.append(result)
            into.futures.append(future)
            if finish is not None:
                into.finishes[future] = finish
            error = into.error
        if error is not None:
            fail([future], error)
        return future

    def _begin_pushes(self, key: Key, options: PushOptions) -> _PushBatch:
        self.close()
        expected = self._counts.get((RunKind.PUSH, key), 0)
        self._pushes = begun = _PushBatch(expected, self._lock, self._lay_out, options, self._failed, self._leave)
        self._submit(begun, self._closing(begun, (RunKind.PUSH, key)), begun)
        return begun

    def _begin_pulls(self, key: Key) -> _PullBatch:
        if self._pulls is not None:
            self.close()
        expected = self._counts.get((RunKind.PULL, key), 0)
        self._pulls = begun = _PullBatch(expected, self._lock, self._plan_pull)
        self._submit(begun, self._closing(begun, (RunKind.PULL, key)), begun)
        return begun

    def _closing(self, gathering: _PushBatch | _PullBatch, name: tuple[RunKind, Key]) -> Callable[[int], Transfer]:
        """The function that builds the request when it is sent; from then on the batch takes in no call."""

        def make(number: int) -> Transfer:
            with self._lock:
                gathering.is_open = False
                self._counts[name] = len(gathering.infos)
            return gathering.make(number)

        return make
