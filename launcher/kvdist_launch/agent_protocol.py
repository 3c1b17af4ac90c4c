"""Messages between the launcher and its agent on another host, over the pipe that ssh provides.

A frame is a line of JSON with a field ``kind``, followed by as many raw bytes as its field ``bytes`` says, if it has
that field. A node, a process or an exit is a JSON object with the fields that differ from their defaults. Output of
processes travels raw, so it can neither be mistaken for a frame nor be refused.

Text before the line `GREETING` was printed by the other side's login scripts.
"""

from __future__ import annotations

import json
import os
import selectors
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvdist.errors import KvdistError
from kvdist.nodes import NodeId, Role
from kvdist_launch.environment import Environment
from kvdist_launch.exits import ProcessExit
from kvdist_launch.plan import Process

GREETING = b"kvdist-agent 1"
"""The first line of an agent, with the version of this protocol."""

HEADER_BYTES_MAX = 64 << 20
"""Largest head of a frame: that of a plan with the environments of many processes."""

PAYLOAD_BYTES_MAX = 1 << 20
PIPE_READ_BYTES = 256 * 1024

PIPE_FULL_BYTES = 4 << 20
"""Bytes waiting to be written above which the other side does not keep up."""


class FrameError(KvdistError):
    """The other side sent an invalid frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A message."""

    kind: str
    fields: dict[str, Any]
    payload: bytes = b""

    def encode(self) -> bytes:
        """The encoded frame."""
        head: dict[str, Any] = {"kind": self.kind, **self.fields}
        if self.payload:
            head["bytes"] = len(self.payload)
        return json.dumps(head, separators=(",", ":"), default=_as_json).encode() + b"\n" + self.payload


class FrameDecoder:
    """Cuts a stream of bytes into frames."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._head: dict[str, Any] | None = None

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes.

        Raises:
            FrameError: the bytes are not valid frames.
        """
        self._rest += data
        frames = []
        while (frame := self._next()) is not None:
            frames.append(frame)
        return frames

    def _next(self) -> Frame | None:
        if self._head is None:
            line, found, rest = self._rest.partition(b"\n")
            if not found:
                if len(line) > HEADER_BYTES_MAX:
                    raise FrameError(f"a frame's head is longer than {HEADER_BYTES_MAX} bytes")
                return None
            self._rest, self._head = rest, _frame_head(line)
        size = self._head.get("bytes", 0)
        if type(size) is not int or not 0 <= size <= PAYLOAD_BYTES_MAX:
            raise FrameError(f"a frame's payload of {size!r:.40} bytes is out of range")
        if len(self._rest) < size:
            return None
        fields, self._head = self._head, None
        payload = bytes(self._rest[:size])
        del self._rest[:size]
        fields.pop("bytes", None)
        return Frame(fields.pop("kind"), fields, payload)


def _frame_head(line: bytes | bytearray) -> dict[str, Any]:
    try:
        head = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"{bytes(line[:80])!r} is not a frame") from error
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise FrameError(f"{bytes(line[:80])!r} is not a frame: it has no kind")
    return head


class FrameWriter:
    """Writes frames to a pipe without ever waiting for its reader.

    Args:
        selector: waits until the pipe takes more.
        descriptor: the writing end.
        broken: is called when the reader has closed the pipe.
    """

    def __init__(self, selector: selectors.BaseSelector, descriptor: int, broken: Callable[[], None]) -> None:
        os.set_blocking(descriptor, False)
        self._selector = selector
        self._descriptor = descriptor
        self._broken = broken
        self._waiting = bytearray()
        self._is_registered = False
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """Whether more than `PIPE_FULL_BYTES` wait, so that producers should pause."""
        return len(self._waiting) > PIPE_FULL_BYTES

    @property
    def is_empty(self) -> bool:
        """Whether everything has been written."""
        return not self._waiting

    def send(self, kind: str, payload: bytes = b"", **fields: Any) -> None:
        """Write a frame, or keep it until the pipe takes it."""
        if self._is_closed:
            return
        self._waiting += Frame(kind, fields, payload).encode()
        self.flush()

    def flush(self) -> None:
        """Write as much as the pipe takes now."""
        try:
            while self._waiting:
                with memoryview(self._waiting)[:PIPE_READ_BYTES] as piece:
                    written = os.write(self._descriptor, piece)
                del self._waiting[:written]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
            self._broken()
            return
        self._expect(bool(self._waiting))

    def close(self) -> None:
        """Drop the frames that wait and later frames. The descriptor stays open; the caller owns it."""
        self._is_closed = True
        self._waiting.clear()
        self._expect(False)

    def _expect(self, wanted: bool) -> None:
        if wanted and not self._is_registered:
            self._selector.register(self._descriptor, selectors.EVENT_WRITE, self.flush)
        elif self._is_registered and not wanted:
            self._selector.unregister(self._descriptor)
        self._is_registered = wanted


def _as_json(value: Any) -> object:
    """A role as its word, a dataclass as its fields that differ from their defaults."""
    if isinstance(value, Role):
        return str(value)
    return {each.name: getattr(value, each.name) for each in fields(value) if getattr(value, each.name) != each.default}


def node_of(values: Mapping[str, Any]) -> NodeId:
    """The node of a frame's fields."""
    return NodeId(Role(values["role"]), int(values["rank"]))


def process_of(values: Mapping[str, Any]) -> Process:
    """The process of a frame's fields."""
    node, argv = node_of(values["node"]), tuple(values["argv"])
    return Process(**{**values, "node": node, "argv": argv, "environment": Environment(**values["environment"])})


def exit_of(values: Mapping[str, Any], host: str) -> ProcessExit:
    """The exit of a frame's fields, on the host of that name."""
    node, life = node_of(values["node"]), int(values.get("life", 0))
    return ProcessExit(node, int(values["pid"]), int(values["status"]), host=host, life=life)
