"""Calls for one small key at a time, as in ``for k in keys: store.push(k, grad[k])``, joined to calls for many.

Rules that hold here:

* What was said keeps its order: a gathering takes in a call only while no other request of the store stands behind it
  in the mailbox, but for the pulls that follow its pushes, of which none may be of the key that is pushed.
* A call is checked, and its value copied, before it returns. What it costs later is paid by the node's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from kvdist.core.requests import Bits, KeyInfo, Kind, RunData, Transfer
from kvdist.kvstore.contribution import Contribution, Terms
from kvdist.kvstore.handed import Given, named
from kvdist.kvstore.settings import Setting
from kvdist.kvstore.values import Key

SMALL_BYTES_MAX = 16 << 10
"""Larger values are worth a request of their own."""
GATHERED_MAX = 4096
"""Calls that one request takes in."""


LayOut = Callable[[Given, Terms, Sequence[Setting]], Contribution]
"""Makes the runs of a push, given the setting of each key."""
PlanPull = Callable[[Sequence[KeyInfo], Sequence[Bits]], Sequence[RunData]]
"""Makes the runs of a pull into these arrays."""


class _Gathering:
    """One request that is still to be made."""

    def __init__(self, priority: int) -> None:
        self.priority = priority
        self.infos: dict[Key, KeyInfo] = {}
        self.is_open = True
        """Under the lock of `Gatherings`."""


class _Pushes(_Gathering):
    def __init__(self, lay_out: LayOut, priority: int, terms: Terms, failed: Callable[[BaseException], None]) -> None:
        super().__init__(priority)
        self._lay_out = lay_out
        self.terms = terms
        self.bits: list[list[Bits]] = []
        self.settings: list[Setting] = []
        self._failed = failed
        self._contribution: Contribution | None = None

    def make(self, number: int) -> Transfer:
        infos = list(self.infos.values())
        self._contribution = own = self._lay_out(Given(infos, self.bits), self.terms, self.settings)
        return Transfer(number, Kind.PUSH, f"push of {named(infos)}", own.runs, self.priority)

    def set_result(self, result: Any) -> None:  # nobody waits for it
        assert self._contribution is not None
        self._contribution.release()

    def set_exception(self, exception: BaseException) -> None:
        self._failed(exception)


class _Pulls(_Gathering):
    def __init__(self, plan_pull: PlanPull, priority: int) -> None:
        super().__init__(priority)
        self._plan_pull = plan_pull
        self.results: list[Bits] = []
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def make(self, number: int) -> Transfer:
        infos = list(self.infos.values())
        runs = self._plan_pull(infos, self.results)
        return Transfer(number, Kind.PULL, f"pull of {named(infos)}", runs, self.priority)

    def set_result(self, result: Any) -> None:  # each has its own
        for future, finish in self.waiting:
            try:
                future.set_result(finish())
            except Exception as error:  # noqa: BLE001  # it belongs to the one who waits
                future.set_exception(error)

    def set_exception(self, exception: BaseException) -> None:
        for future, _ in self.waiting:
            future.set_exception(exception)


class Gatherings:
    """The gatherings of one store that still take in calls: at most one of pushes, and one of pulls behind it.

    Args:
        lay_out, plan_pull: make requests out of what was gathered.
        submit: leaves a request for the node's thread, not urgently.
        touch: tells that thread that more was gathered.
        failed: gets the error of pushes.
    """

    def __init__(
        self,
        lay_out: LayOut,
        plan_pull: PlanPull,
        submit: Callable[[Any, Callable[[int], Any]], None],
        touch: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._lay_out = lay_out
        self._plan_pull = plan_pull
        self._submit = submit
        self._touch = touch
        self._failed = failed
        self._lock = threading.RLock()
        self._pushes: _Pushes | None = None
        self._pulls: _Pulls | None = None

    def close(self) -> None:
        """Another request is about to be left: what is gathered goes before it as it is."""
        with self._lock:
            for gathering in (self._pushes, self._pulls):
                if gathering is not None:
                    gathering.is_open = False
            self._pushes = self._pulls = None

    def push(self, info: KeyInfo, bits: Bits, setting: Setting, priority: int, terms: Terms) -> None:
        """Take in a push; `bits` are copied."""
        with self._lock:
            into = self._pushes
            pulled = self._pulls is not None and info.key in self._pulls.infos
            if into is None or not _takes(into, info.key, priority) or into.terms != terms or pulled:
                self.close()
                into = self._pushes = _Pushes(self._lay_out, priority, terms, self._failed)
                self._submit(into, self._closing(into))
            into.infos[info.key] = info
            into.bits.append([np.array(bits)])
            into.settings.append(setting)
            self._touch()

    def pull(self, info: KeyInfo, result: Bits, finish: Callable[[], Any], priority: int) -> Future[Any]:
        """Take in a pull into `result`; `finish` gives what the future resolves to."""
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            into = self._pulls
            if into is None or not _takes(into, info.key, priority):
                if into is not None:
                    self.close()
                into = self._pulls = _Pulls(self._plan_pull, priority)
                self._submit(into, self._closing(into))
            into.infos[info.key] = info
            into.results.append(result)
            into.waiting.append((future, finish))
            self._touch()
        return future

    def _closing(self, gathering: _Pushes | _Pulls) -> Callable[[int], Transfer]:
        """The request is made when it is sent; from then on it takes in nothing more."""

        def make(number: int) -> Transfer:
            with self._lock:
                gathering.is_open = False
            return gathering.make(number)

        return make


def is_small(given: Given) -> bool:
    """Whether this is one small array of one key."""
    return len(given.infos) == 1 and len(given.bits[0]) == 1 and given.bits[0][0].nbytes <= SMALL_BYTES_MAX


def _takes(gathering: _Gathering, key: Key, priority: int) -> bool:
    return (
        gathering.is_open
        and gathering.priority == priority
        and key not in gathering.infos
        and len(gathering.infos) < GATHERED_MAX
    )
