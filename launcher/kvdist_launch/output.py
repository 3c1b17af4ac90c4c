"""Merges what many processes print into the launcher's own output, one whole line at a time.

Every line gets a prefix that says whose it is. Bytes pass through as they are: no decoding, so nothing a process
prints can be refused or changed. A carriage return ends a line too, as progress bars use it, and no line is kept
longer than `LINE_BYTES_MAX` while waiting for its end.
"""

from __future__ import annotations

import os
import re

from kvdist.nodes import NodeId, Role

LINE_BYTES_MAX = 64 * 1024
"""A line longer than this is shown in pieces of this size."""

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""ANSI foreground colours given to workers in turn; red is left to errors."""

COLOUR_OF_OTHERS = 90
"""Scheduler and servers are grey: they speak rarely and the eye looks for workers."""

CLEAR_LINE = b"\x1b[K"


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
    """

    def __init__(self, descriptor: int, is_terminal: bool, colours: bool = True) -> None:
        self._descriptor = descriptor
        self._is_terminal = is_terminal
        self._colours = colours and is_terminal
        self._is_gone = False

    def prefix(self, node: NodeId) -> bytes:
        """What stands before each line of the process in seat `node`."""
        text = f"[{node}]"
        if self._colours:
            colour = COLOURS[node.rank % len(COLOURS)] if node.role is Role.WORKER else COLOUR_OF_OTHERS
            text = f"\x1b[{colour}m{text}\x1b[0m"
        return text.encode() + b" "

    def write_lines(self, prefix: bytes, lines: list[bytes]) -> None:
        """Write `lines`, each after `prefix`, in one piece."""
        self._write(b"".join(self._shown(prefix + line) for line in lines))

    def _shown(self, line: bytes) -> bytes:
        if not self._is_terminal:
            # Nothing can be overwritten in a file, and lines of others would end up behind a bare "\r".
            return line[:-1] + b"\n"
        # A longer line may stand there that a progress bar, perhaps on the other stream, meant to be overwritten.
        return CLEAR_LINE + line

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._is_gone:
            try:
                view = view[os.write(self._descriptor, view) :]
            except BlockingIOError:
                # Somebody else made our output non-blocking, which ends of one terminal share.
                os.set_blocking(self._descriptor, True)
            except OSError:
                # The reader is gone (as in `| head`) or the disk is full. Hours of training are worth more than
                # lines that nobody can see.
                self._is_gone = True
