"""The pipes to and from one worker that calls a function: what is sent, and what has come back of the result."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
from collections.abc import Callable
from typing import Any

from kvdist_launch.cargo import unpack_result
from kvdist_launch.crew import READ_BYTES


class Call:
    """The pipes to and from one worker.

    Args:
        call: what is sent.
    """

    def __init__(self, call: bytes) -> None:
        theirs_in, self._outward = os.pipe()
        self._inward, theirs_out = os.pipe()
        self.theirs: tuple[int, ...] = (theirs_in, theirs_out)
        self._mine = {self._inward, self._outward}
        self._unsent = memoryview(call)
        self._received = bytearray()
        self._head: dict[str, Any] = {}
        self._selector: selectors.BaseSelector | None = None
        self._raised: Callable[[], None] | None = None

    def begin(self, selector: selectors.BaseSelector, raised: Callable[[], None]) -> None:
        """The worker has its ends.

        Args:
            selector: where the pipes are waited for.
            raised: called when the function has raised.
        """
        self._selector, self._raised = selector, raised
        self._close_theirs()
        for descriptor, event, act in (
            (self._outward, selectors.EVENT_WRITE, self._send),
            (self._inward, selectors.EVENT_READ, self.receive),
        ):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, event, act)

    def receive(self) -> None:
        """Take what is there of the result."""
        with contextlib.suppress(BlockingIOError):
            while self._inward in self._mine:
                data = os.read(self._inward, READ_BYTES)
                self._received += data
                if not self._head and b"\n" in data:
                    self._take_head()
                if not data:
                    self._end(self._inward)

    @property
    def head(self) -> dict[str, Any]:
        """What came before the result, or in its place; empty if it did not come whole."""
        return self._head if len(self._received) == self._head.get("bytes", 0) else {}

    def take_result(self) -> Any:
        """The result. Its bytes are not kept: there may be very many."""
        received, self._received = self._received, bytearray()
        return unpack_result(received)

    def forget(self) -> None:
        """There is no selector any more."""
        self._selector = None

    def close(self) -> None:
        """Free everything."""
        self._close_theirs()
        for descriptor in list(self._mine):
            self._end(descriptor)

    def _take_head(self) -> None:
        end = self._received.index(b"\n")
        self._head = json.loads(self._received[:end])
        del self._received[: end + 1]
        if "raised" in self._head and self._raised is not None:
            self._raised()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._outward, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # The worker has ended; how, is seen elsewhere.
        self._end(self._outward)

    def _end(self, descriptor: int) -> None:
        if self._selector is not None:
            self._selector.unregister(descriptor)
        os.close(descriptor)
        self._mine.discard(descriptor)

    def _close_theirs(self) -> None:
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = ()
