"""Merges what many processes print into the launcher's own output, one whole line at a time.

Every line gets a short prefix that says whose it is: ``w0 │``, or ``w0@d1 │`` where there are several hosts. Bytes
pass through as they are: no decoding, so nothing a process prints can be refused or changed. A carriage return ends a
line too, as progress bars use it, and no line is kept longer than `LINE_BYTES_MAX` while waiting for its end.
"""

from __future__ import annotations

import os
import re
import select
import selectors
import time
from collections.abc import Callable
from typing import TextIO

from kvdist.nodes import NodeId, Role

LINE_BYTES_MAX = 64 * 1024
"""A line longer than this is shown in pieces of this size."""

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""ANSI foreground colours given to workers in turn; red is left to errors."""

COLOUR_OF_OTHERS = 90
"""Scheduler and servers are grey: they speak rarely and the eye looks for workers."""

PROGRAM = "kvdist-launch"
"""Who says the launcher's own messages."""

CLEAR_LINE = b"\x1b[K"

SHORT = {Role.WORKER: "w", Role.SERVER: "s"}


def short_name(node: NodeId) -> str:
    """``w0``, ``s1``, ``sched``."""
    return f"{SHORT[node.role]}{node.rank}" if node.role in SHORT else "sched"


def time_of_day(now: float) -> str:
    """Seconds since the epoch as ISO 8601 has them, in local time, with milliseconds."""
    milliseconds = int(now * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(milliseconds // 1000))}.{milliseconds % 1000:03}"


WRITE_BYTES = select.PIPE_BUF
"""As much as a pipe or a terminal that can be written to takes at once."""

FULL_BYTES = 1 << 20


class LineSplitter:
    """Cuts a stream of bytes into lines, each with the ``\\n`` or ``\\r`` that ended it (``\\n`` for both)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes."""
        *lines, rest = re.split(rb"(?<=\n)|(?<=\r)(?!\n)", self._rest + data)
        if lines and not rest and lines[-1].endswith(b"\r"):
            # The next byte may be the other half of a "\r\n".
            rest = lines.pop()
        while len(rest) > LINE_BYTES_MAX:
            lines.append(rest[:LINE_BYTES_MAX] + b"\n")
            rest = rest[LINE_BYTES_MAX:]
        self._rest = rest
        return [line[:-2] + b"\n" if line.endswith(b"\r\n") else line for line in lines if line != b"\r"]

    def finish(self) -> list[bytes]:
        """What is left of an unfinished last line, with a line end."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest + b"\n"] if rest else []


class Sink:
    """One of the launcher's own output streams.

    Args:
        descriptor: the file descriptor to write to.
        is_terminal: whether lines may be overwritten (progress bars) and coloured.
        colours: whether prefixes are coloured on a terminal; the user may have asked for none.
        clock: seconds since the epoch, where each line begins with the time; None where it does not.
        program: stands before the launcher's own messages.
    """

    def __init__(
        self,
        descriptor: int,
        is_terminal: bool,
        colours: bool = True,
        clock: Callable[[], float] | None = None,
        program: str = PROGRAM,
    ) -> None:
        self._descriptor = descriptor
        self.is_terminal = is_terminal
        self._colours = colours and is_terminal
        self._clock = clock
        self._own_prefix = f"{program}: ".encode()
        self._is_gone = False
        self._waiting = bytearray()
        self._selector: selectors.BaseSelector | None = None
        self._is_expected = False
        self._is_mid_line = False

    def prefix(self, node: NodeId, host: str = "") -> bytes:
        """What stands before each line of the process in seat `node`.

        Args:
            node: whose.
            host: where it runs; empty where there is only one machine.
        """
        text = f"{short_name(node)}@{host} │" if host else f"{short_name(node)} │"
        if self._colours:
            colour = COLOURS[node.rank % len(COLOURS)] if node.role is Role.WORKER else COLOUR_OF_OTHERS
            text = f"\x1b[{colour}m{text}\x1b[0m"
        return text.encode() + b" "

    def write_lines(self, prefix: bytes, lines: list[bytes]) -> None:
        """Write `lines`, each after `prefix`, in one piece."""
        if lines and self._clock is not None:
            prefix = f"{time_of_day(self._clock())} ".encode() + prefix
        if lines and self._is_mid_line:
            self._is_mid_line = False
            self._write(b"\n")
        self._write(b"".join(self._shown(prefix + line) for line in lines))

    def write_raw(self, data: bytes) -> None:
        """Write what may end within a line, such as a prompt; lines that follow begin on a new one."""
        self._is_mid_line = not data.endswith(b"\n")
        self._write(data)

    def say(self, text: str) -> None:
        """Write a message of the launcher's own."""
        self.write_lines(self._own_prefix, [text.encode(errors="surrogateescape") + b"\n"])

    def _shown(self, line: bytes) -> bytes:
        if not self.is_terminal:
            # Nothing can be overwritten in a file, and lines of others would end up behind a bare "\r".
            return line[:-1] + b"\n"
        # A longer line may stand there that a progress bar, perhaps on the other stream, meant to be overwritten.
        return CLEAR_LINE + line

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that whoever produces more should wait."""
        return len(self._waiting) > FULL_BYTES

    def attend(self, selector: selectors.BaseSelector) -> None:
        """From now on never wait for the reader; what it does not take waits here, and for the selector."""
        self._selector = selector

    def finish(self) -> None:
        """Wait for the reader again, and until it has everything."""
        self._expect(False)
        self._selector = None
        self._flush()

    def _write(self, data: bytes) -> None:
        self._waiting += data
        self._flush()

    def _flush(self) -> None:
        written = 0
        with memoryview(self._waiting) as view:
            while written < len(view) and not self._is_gone and self._takes_more():
                written += self._write_some(view[written : written + WRITE_BYTES])
            if self._is_gone:
                written = len(view)
        del self._waiting[:written]
        self._expect(bool(self._waiting))

    def _takes_more(self) -> bool:
        """Whether as much as is written at a time can be written without waiting, or waiting is right.

        The output may be shared with other programs, so it must stay blocking; it is asked before each write instead.
        """
        if self._selector is None:
            return True
        asked = select.poll()
        asked.register(self._descriptor, select.POLLOUT)
        return bool(asked.poll(0))

    def _write_some(self, piece: memoryview) -> int:
        try:
            return os.write(self._descriptor, piece)
        except BlockingIOError:
            # Somebody else made our output non-blocking, which ends of one terminal share.
            os.set_blocking(self._descriptor, True)
        except OSError:
            # The reader is gone (as in `| head`) or the disk is full. Hours of training are worth more than
            # lines that nobody can see.
            self._is_gone = True
        return 0

    def _expect(self, wanted: bool) -> None:
        """Let the selector wait until the reader takes more, or no longer."""
        if self._selector is None or wanted == self._is_expected:
            return
        self._is_expected = wanted
        if wanted:
            self._selector.register(self._descriptor, selectors.EVENT_WRITE, self._flush)
        else:
            self._selector.unregister(self._descriptor)


class TextSink(Sink):
    """An output that is a stream of Python's, such as a notebook's, which may have no descriptor.

    Args:
        stream: what is printed to.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(-1, stream.isatty())
        self._stream = stream

    def _write(self, data: bytes) -> None:
        if self._is_gone:
            return
        try:
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
        except (OSError, ValueError):  # gone, or closed
            self._is_gone = True
