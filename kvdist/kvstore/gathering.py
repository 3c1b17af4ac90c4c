"""Pushes of one small key at a time, as in ``for k in keys: store.push(k, grad[k])``, joined to pushes of many.

Rules that hold here:

* What was said keeps its order: a gathering takes in a push only while no other request of the store stands behind it
  in the mailbox, but for pulls of other keys.
* A push is checked, and its value copied, before it returns. What it costs later is paid by the node's thread.
* Pulls are not joined: each has somebody who waits for it, and must not wait for the rounds of other keys.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvdist.core.requests import Bits, KeyInfo, Kind, Transfer
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


class Gatherings:
    """The gathering of one store that still takes in pushes, if there is one.

    Args:
        lay_out: makes a request out of what was gathered.
        submit: leaves a request for the node's thread, not urgently.
        touch: tells that thread that more was gathered.
        failed: gets the error of pushes.
    """

    def __init__(
        self,
        lay_out: LayOut,
        submit: Callable[[Any, Callable[[int], Any]], None],
        touch: Callable[[], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        self._lay_out = lay_out
        self._submit = submit
        self._touch = touch
        self._failed = failed
        self._lock = threading.RLock()
        self._pushes: _Pushes | None = None
        self._pulled: set[Key] = set()
        """Keys of which pulls stand behind the gathering."""

    def close(self) -> None:
        """Another request is about to be left: what is gathered goes before it as it is."""
        with self._lock:
            if self._pushes is not None:
                self._pushes.is_open = False
            self._pushes = None

    def push(self, info: KeyInfo, bits: Bits, setting: Setting, priority: int, terms: Terms) -> None:
        """Take in a push; `bits` are copied."""
        with self._lock:
            into = self._pushes
            pulled = info.key in self._pulled
            if into is None or not _takes(into, info.key, priority) or into.terms != terms or pulled:
                self.close()
                self._pulled.clear()
                into = self._pushes = _Pushes(self._lay_out, priority, terms, self._failed)
                self._submit(into, self._closing(into))
            into.infos[info.key] = info
            into.bits.append([np.array(bits)])
            into.settings.append(setting)
            self._touch()

    def pulled(self, key: Key) -> None:
        """A pull of this key is about to be left, behind what is gathered: no later push of it may go before it."""
        with self._lock:
            self._pulled.add(key)

    def _closing(self, gathering: _Pushes) -> Callable[[int], Transfer]:
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
