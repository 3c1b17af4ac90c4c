"""Who knocked at a listening socket in vain: said once for each address, and again when the reason is certain.

Of a connection that is over before its address could be seen it is said only where nothing has been said yet that is as
certain: it may be any of those that were named.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
from collections import deque

LOG = logging.getLogger("kvdist")

TOLD_MAX = 10
"""Addresses of which it is said; after that they are only counted elsewhere."""
FAILURES_MAX = 100
"""Refused at the same time, of which it is remembered why."""


class Callers:
    """The connections of one listener that have not said anything yet."""

    def __init__(self) -> None:
        self._addresses: dict[int, str] = {}
        self._failures: deque[tuple[str, bool]] = deque(maxlen=FAILURES_MAX)
        """Why connections are refused that have not been closed yet, and whether that is certain, in order."""
        self._told: dict[str, bool] = {}
        """Address → whether the reason that was told was certain."""

    def accepted(self, descriptor: int) -> None:
        """A connection came."""
        self._addresses[descriptor] = _address_of(descriptor)

    def known(self, descriptor: int) -> None:
        """It is one of ours."""
        self._addresses.pop(descriptor, None)

    def refused(self, why: str, is_certain: bool) -> None:
        """A connection that is about to be closed has failed; '' if that is not worth a word.

        Which one is not said. It is the next to be closed of those that are not known, or, where several threads of
        libzmq refuse at the same time, one of the next: for people that is near enough.
        """
        self._failures.append((why, is_certain))

    def closed(self, descriptor: int, endpoint: str) -> None:
        """A connection is over that came to `endpoint`."""
        address = self._addresses.pop(descriptor, None)
        if address is None or not self._failures:
            return
        failure, is_certain = self._failures.popleft()
        if not self._addresses:
            self._failures.clear()  # whose they were has gone unseen
        told = [self._told[address]] if address in self._told else []
        if not address:
            told = list(self._told.values())
        is_news = not any(told) if is_certain else not told
        if failure and is_news and (address in self._told or len(self._told) < TOLD_MAX):
            self._told[address] = is_certain
            came = f" from {address}" if address else ""
            LOG.warning("%s refused a connection%s: %s", endpoint, came, failure)


def _address_of(descriptor: int) -> str:
    """Where an accepted connection comes from; '' if it is over already, or not of the network. For people only.

    libzmq owns the descriptor and may close it at any time, so what is seen may be another connection by now, or a
    file of this process. A file is not even duplicated: closing the duplicate would drop the locks that the process
    has on it.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return ""
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                return str(connection.getpeername()[0]).removeprefix("::ffff:")
    return ""
