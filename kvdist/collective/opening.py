"""The ranks of a group connect to each other; who is gone meanwhile is known by the control channel.

Gloo waits for the address of each rank, and would for one that has died. So a thread does that, a daemon, which is left
alone where it can have no end.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError

from kvdist.collective.channel import Channel


class Opening:
    """A group that is not there yet, as far as it is told of the end of things.

    Args:
        number: that of the group.
        ranks: its members.
    """

    is_open = False

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self._opened: Future[None] = Future()

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """One of the ranks is gone, or everything is over."""
        with contextlib.suppress(InvalidStateError):
            self._opened.set_exception(error_of("the connections to the other ranks"))

    def open(self, channel: Channel) -> None:
        """Connect a channel to the other ranks.

        Raises:
            CollectiveError: one of them is gone.
            RuntimeError: torch could not.
        """
        threading.Thread(target=self._run, args=(channel,), name="kvdist-opening", daemon=True).start()
        self._opened.result()

    def _run(self, channel: Channel) -> None:
        try:
            channel.open()
        except Exception as error:  # noqa: BLE001 (whoever waits for it is told)
            with contextlib.suppress(InvalidStateError):
                self._opened.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self._opened.set_result(None)
