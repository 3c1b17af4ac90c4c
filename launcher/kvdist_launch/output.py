"""Output of processes: shown by the launcher in whole lines, logged, and the last lines kept.

Every line gets a short prefix with the name of its process: ``w0 │``, or ``w0@d1 │`` on several hosts. Bytes pass
through unchanged: they are not decoded, so no output can be refused or altered. A carriage return ends a line too, as
progress bars use it, and a line longer than `LINE_BYTES_MAX` is shown in pieces.

Text from other machines (ssh, login scripts, agents) is escaped and cut before it becomes part of a message.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import selectors
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

from kvdist.errors import ConfigError
from kvdist.nodes import NodeId, Role

OUT, ERR = 0, 1
"""Numbers of the streams: standard output and standard error."""

PROGRAM = "kvdist-launch"
"""The prefix of the launcher's own messages."""

LAST_LINES = 10
"""Lines of a process that are repeated if its failure ends the job."""

LINE_BYTES_MAX = 64 * 1024
"""A line longer than this is shown in pieces of this size."""

TEXT_MAX = 1000
"""Characters that are kept of a text from another machine."""

WRITE_BYTES = select.PIPE_BUF
"""Bytes that a pipe or a terminal that is ready for writing takes without blocking."""

FULL_BYTES = 1 << 20
"""Bytes waiting to be written above which producers pause."""

COLOURS = (36, 32, 33, 35, 34, 96, 92, 93, 95, 94)
"""ANSI foreground colours of the workers, in turn; red is left to errors."""

COLOUR_OF_OTHERS = 90
"""Colour of the scheduler and the servers: grey, as they print rarely and users look for workers."""

NEWS = re.compile(rb"(given up|joined|at work|leaves) (worker|server) ([0-9]+) life ([0-9]+)\n")
"""Messages of the scheduler to the launcher: a process was evicted though it may still run, a restarted process joined,
a process is at work, or it takes leave as its interpreter ends."""

LOSS = re.compile(rb"kvdist: (\S+ (\(.*\) )?was lost[,:] |\S+ ended without having joined |deadlock: )|" + NEWS.pattern)
"""Lines of the scheduler and the servers about a lost peer or a deadlock. They are not shown: every process prints
them, and the launcher names the peer."""

FORMING = re.compile(rb"(worker|server)-[0-9]+ has waited [0-9.]+ s for the cluster of .* to be complete")
"""Lines that all processes but the scheduler print while others start. They are not shown: the scheduler names the
missing processes."""

TORCH_PREFIX = re.compile(rb"^\[rank[0-9]+\]: ")
"""Prefix of torch.distributed before the lines of a traceback."""

TRACEBACK = b"Traceback (most recent call last):"

ERROR_BEGINS = re.compile(re.escape(TRACEBACK) + rb"|kvdist\.errors\.\w+: ")
"""First line of an error; the error of a lost peer has no traceback."""

CHAINS = (b"During handling of the above exception", b"The above exception was the direct cause")
"""Lines between the tracebacks of chained exceptions."""

ERROR_LINES_MAX = 1000
"""Lines of an error, and of the output after it, that are compared with other errors."""

ERRORS_MAX = 100
"""Number of shown errors, the latest ones, that are compared with others."""

HELD_S = 10.0
"""Longest time that an error may be held back because another worker has written it, too."""

SCREEN_LINES = 20
"""Lines shown since the last line of a process up to which its last lines are not repeated."""

CLEAR_LINE = b"\x1b[K"
TABLE_WIDTH = 160


def short_name(node: NodeId) -> str:
    """``w0``, ``s1``, ``sched``."""
    return "sched" if node.role is Role.SCHEDULER else f"{str(node.role)[0]}{node.rank}"


def printable(text: str, most: int = TEXT_MAX) -> str:
    """The first words of the text, at most `most` characters, with invisible characters escaped, as in ``\\x1b``."""
    words = shortened(text, most)
    visible = (one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in words)
    return "".join(visible)


def shortened(text: str, most: int) -> str:
    """The text, or its first words of at most `most` characters and an ellipsis."""
    if len(text) <= most:
        return text
    return f"{text[: most + 1].rpartition(' ')[0].rstrip(' ,;:.') or text[:most]} …"


def all_printable(value: Any) -> Any:
    """A value of JSON with all texts in it made printable."""
    match value:
        case str():
            return printable(value)
        case list():
            return [all_printable(one) for one in value]
        case dict():
            return {str(name): all_printable(one) for name, one in value.items()}
        case _:
            return value


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> str:
    """A table as lines of text, the same on a terminal and in a file; columns with blanks alone are left out.

    Args:
        titles: titles of the columns.
        rows: the cells; a row that is too short is filled with blanks.
        right: whether all columns but the first are numbers, which are right-aligned.
    """
    # Imported here because a job on one machine needs no table, and importing takes longer than starting it.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells = list(rows)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    shown = [place for place in range(len(titles)) if any(len(row) > place and row[place] for row in cells)]
    for place in shown:
        table.add_column(Text(titles[place]), no_wrap=True, justify="right" if right and place else "left")
    for row in cells:
        table.add_row(*(Text(row[place]) for place in shown if place < len(row)))
    width = max(TABLE_WIDTH, sum(len(title) + 20 for title in titles))
    text = StringIO()  # and no capture of standard output, which may be full
    Console(file=text, width=width, no_color=True, highlight=False, force_terminal=False).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines() if line.strip())


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
        """The rest of an unfinished last line, with a line end."""
        rest, self._rest = self._rest.rstrip(b"\r"), b""
        return [rest + b"\n"] if rest else []


class Sink:
    """An output stream of the launcher.

    Args:
        descriptor: the file descriptor to write to.
        is_terminal: whether lines may be overwritten (progress bars) and coloured.
        colours: whether prefixes are coloured on a terminal.
        clock: seconds since the epoch, to begin each line with the time; None leaves the time out.
        program: the prefix of the launcher's own messages.

    Attributes:
        has_failed: whether output was lost for another reason than that its reader closed it.
        other: the stream that reports such a failure; None reports nothing.
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
        self.has_failed = False
        self.other: Sink | None = None
        self._waiting = bytearray()
        self._selector: selectors.BaseSelector | None = None
        self._is_expected = False
        self._is_mid_line = False

    def is_beside(self, other: Sink) -> bool:
        """Whether both streams go to the same file or terminal, so that readers of `other` see the lines of this stream
        too."""
        with contextlib.suppress(OSError):  # closed: it has no reader
            return self is other or os.path.sameopenfile(self._descriptor, other._descriptor)
        return False

    def prefix(self, node: NodeId, host: str = "") -> bytes:
        """The prefix of each line of a process; `host` is empty if the job uses only this machine."""
        text = f"{short_name(node)}@{host} │" if host else f"{short_name(node)} │"
        if self._colours:
            colour = COLOURS[node.rank % len(COLOURS)] if node.role is Role.WORKER else COLOUR_OF_OTHERS
            text = f"\x1b[{colour}m{text}\x1b[0m"
        return text.encode() + b" "

    def write_lines(self, prefix: bytes, lines: list[bytes]) -> None:
        """Write `lines`, each after `prefix`, at once."""
        if lines and self._clock is not None:
            prefix = f"{_time_of_day(self._clock())} ".encode() + prefix
        if lines and self._is_mid_line:
            self._is_mid_line = False
            self._write(b"\n")
        self._write(b"".join(self._shown(prefix + line) for line in lines))

    def write_raw(self, data: bytes) -> None:
        """Write data that may end within a line, such as a prompt; lines that follow begin on a new line."""
        self._is_mid_line = not data.endswith(b"\n")
        self._write(data)

    def say(self, text: str) -> None:
        """Write a message of the launcher."""
        self.write_lines(self._own_prefix, [text.encode(errors="surrogateescape") + b"\n"])

    def _shown(self, line: bytes) -> bytes:
        if not self.is_terminal:
            # Nothing can be overwritten in a file, and lines of others would end up behind a bare "\r".
            return line[:-1] + b"\n"
        # A progress bar, perhaps on the other stream, may have left a longer line there to be overwritten.
        return CLEAR_LINE + line

    @property
    def is_full(self) -> bool:
        """Whether more than `FULL_BYTES` wait to be written, so that producers should pause."""
        return len(self._waiting) > FULL_BYTES

    def attend(self, selector: selectors.BaseSelector) -> None:
        """Stop blocking on the reader: unread output is queued, and written when the selector reports room."""
        self._selector = selector

    def finish(self) -> None:
        """Block again, and wait until the reader has everything."""
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
        """Whether `WRITE_BYTES` can be written without waiting, or waiting is right.

        Other programs may share the output, so it must stay blocking; it is polled before each write instead.
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
            # Another program made our output non-blocking, which ends of one terminal share.
            os.set_blocking(self._descriptor, True)
        except OSError as error:
            # The reader is gone (as in `| head`) or the disk is full. Hours of training are worth more than output.
            self._is_gone = True
            self.has_failed = error.errno != errno.EPIPE
            if self.has_failed and self.other is not None:
                name = "standard output" if self._descriptor == 1 else "standard error"
                self.other.say(f"{name} cannot be written to ({error.strerror}); the rest of it is dropped")
        return 0

    def _expect(self, wanted: bool) -> None:
        """Let the selector wait until the reader takes more, or stop that."""
        if self._selector is None or wanted == self._is_expected:
            return
        self._is_expected = wanted
        if wanted:
            self._selector.register(self._descriptor, selectors.EVENT_WRITE, self._flush)
        else:
            self._selector.unregister(self._descriptor)


class TextSink(Sink):
    """An output to a Python stream, such as a notebook's, which may have no descriptor."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(-1, stream.isatty())
        self._stream = stream

    def is_beside(self, other: Sink) -> bool:
        return True  # a notebook shows both in one cell

    def _write(self, data: bytes) -> None:
        if self._is_gone:
            return
        try:
            self._stream.write(data.decode(errors="replace"))
            self._stream.flush()
        except (OSError, ValueError):  # gone, or closed
            self._is_gone = True


def _time_of_day(now: float) -> str:
    """Seconds since the epoch in ISO 8601, in local time, with milliseconds."""
    milliseconds = int(now * 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(milliseconds // 1000))}.{milliseconds % 1000:03}"


class LogFiles:
    """The log files of a job: ``worker-0.log``, ``server-1.log``, ``scheduler.log``, with both outputs line by line.

    A file of an earlier job is kept as ``worker-0.log.1``. A disk that fills up ends the logs, not the job.

    Args:
        folder: their folder; it is created if need be.
        say: prints a message for the user.
        ranks: the number of workers, for Horovod's layout: ``rank.0/stdout`` and ``rank.0/stderr``, workers only, the
            ranks with as many digits as the largest; None is the layout above.
    """

    def __init__(self, folder: Path, say: Callable[[str], None], ranks: int | None = None) -> None:
        self._folder = folder
        self._say = say
        self._digits = None if ranks is None else len(str(ranks - 1))
        self._descriptors: dict[Path, int] = {}
        self._has_ended = False

    def open(self, nodes: Iterable[NodeId]) -> None:
        """Create the files; files that this job has already are continued.

        Raises:
            ConfigError: a file cannot be created.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for path in (path for node in nodes for path in self._paths(node)):
                if path in self._descriptors or self._has_ended:
                    continue
                if path.exists():
                    path.replace(f"{path}.1")
                path.parent.mkdir(exist_ok=True)
                self._descriptors[path] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        except OSError as error:
            self.close()
            option = "--log-dir" if self._digits is None else "--output-filename"
            raise ConfigError(
                f"log files cannot be written to {self._folder}: {error.filename or self._folder}: {error.strerror};"
                f" give {option} a folder that can be written to"
            ) from error

    def write(self, node: NodeId, stream: int, lines: Iterable[bytes]) -> None:
        """Append lines of an output of a process to its file, unless logging has ended."""
        paths = self._paths(node)
        descriptor = self._descriptors.get(paths[stream]) if paths else None
        if descriptor is None:
            return
        # A line of a progress bar is a line here: nothing can be overwritten in a file.
        data = memoryview(b"".join(line[:-1] + b"\n" for line in lines))
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            # All files are likely to have the same problem, and one message is enough.
            self._say(f"{paths[stream]}: {error.strerror}; the log files end here, the job goes on")
            self.close()

    def mark(self, node: NodeId, text: str) -> None:
        """Append a line of the launcher to each file of a process."""
        for path, stream in {path: stream for stream, path in enumerate(self._paths(node))}.items():
            if path in self._descriptors:
                self.write(node, stream, [text.encode() + b"\n"])

    def close(self) -> None:
        """Close the files; later lines are dropped."""
        self._has_ended = True
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def _paths(self, node: NodeId) -> tuple[Path, ...]:
        """The files for the two outputs of a process; empty if they are not logged."""
        if self._digits is None:
            return (self._folder / f"{node}.log",) * 2
        if node.role is not Role.WORKER:
            return ()
        folder = self._folder / f"rank.{node.rank:0{self._digits}d}"
        return folder / "stdout", folder / "stderr"


@dataclass(eq=False)
class _Error:
    """An error that a worker has written, and the lines after it up to the next error.

    Attributes:
        node: the worker.
        since: time of the first line.
        changed_at: time of the last line.
        lines: its lines, without the prefixes of torch.distributed.
        held: the last of the lines with their prefixes, those that are not shown yet.
        has_ended: whether it is complete.
        other: the error of another worker that may be the same; None if all lines are shown.
    """

    node: NodeId
    since: float
    changed_at: float
    lines: list[bytes] = field(default_factory=list)
    held: list[bytes] = field(default_factory=list)
    has_ended: bool = False
    other: _Error | None = None

    @property
    def is_held(self) -> bool:
        """Whether none of its lines is shown yet."""
        return len(self.held) == len(self.lines)

    @property
    def is_repeated(self) -> bool:
        """Whether its lines equal the first lines of the other worker's error."""
        return self.other is not None and self.other.lines[: len(self.lines)] == self.lines

    def may_be(self, other: _Error) -> bool:
        """Whether it may turn out to be a part of `other`, whose lines are shown as they come."""
        common = min(len(self.lines), len(other.lines))
        is_longer = other.has_ended and common < len(self.lines)
        return not is_longer and self.lines[:common] == other.lines[:common]

    def goes_on(self) -> bool:
        """Whether the next line belongs to it, even if it looks like the begin of another error."""
        last = next((line for line in reversed(self.lines) if line.strip()), b"")
        return last.startswith((b" ", b"Traceback ", *CHAINS))


Shown = list[tuple[NodeId, list[bytes]]]
"""Workers and the lines of their standard errors to show now."""


class RepeatedErrors:
    """Holds back an error of a worker as long as its lines equal those of an error that another worker has just
    written.

    An error that is equal to its end is not shown: at the end of the job the launcher prints on how many workers it
    was. As soon as a line differs, and in any case after `HELD_S`, all of it is shown. Errors that were shown longer
    ago do not count.

    Attributes:
        shown_by: worker → the worker whose output showed its last error.
    """

    def __init__(self) -> None:
        self._last: dict[NodeId, _Error] = {}
        """The last error of each worker."""
        self._shown: deque[_Error] = deque(maxlen=ERRORS_MAX)
        """Errors whose lines are, or were, shown as they come."""
        self.shown_by: dict[NodeId, NodeId] = {}

    def take(self, node: NodeId, lines: list[bytes], now: float) -> Shown:
        """Accept lines that a worker has written. Returns the lines to show."""
        shown: Shown = []
        for line in lines:
            plain = TORCH_PREFIX.sub(b"", line)
            error = self._last.get(node)
            if ERROR_BEGINS.match(plain) and (error is None or error.has_ended or not error.goes_on()):
                shown += self.end(node, now)
                if error is not None and error.held:
                    _add(shown, node, error.held)
                error = self._last[node] = _Error(node, now, now)
                self.shown_by.pop(node, None)
            if error is None or error.has_ended:
                _add(shown, node, [line])
                continue
            error.lines.append(plain)
            error.held.append(line)
            error.changed_at = now
            if len(error.lines) == ERROR_LINES_MAX:
                error.has_ended = True
            for who, some in [*self._look(error, now), *self._look_at_followers(error, now)]:
                _add(shown, who, some)
        return shown

    def end(self, node: NodeId, now: float) -> Shown:
        """Mark the worker's last error as complete. Returns the lines to show."""
        error = self._last.get(node)
        if error is None:
            return []
        error.has_ended = True
        return [*self._look(error, now), *self._look_at_followers(error, now)]

    def tick(self, now: float) -> Shown:
        """Return the lines that were held back for `HELD_S`."""
        return [one for error in self._last.values() for one in self._look(error, now)]

    def _look(self, error: _Error, now: float) -> Shown:
        """Check whether an error may still equal another worker's. Returns the lines to show if not."""
        if error.has_ended and error.is_repeated and error.other is not None:
            self.shown_by[error.node] = error.other.node
            error.held = []
            return []
        if not error.held:
            return []
        if now - error.since > HELD_S:
            error.other = None
        elif error.other is None or not error.may_be(error.other):
            recent = (one for one in self._shown if now - one.changed_at <= HELD_S)
            error.other = next((one for one in recent if error.may_be(one)), None) if error.is_held else None
        if error.other is not None:
            return []
        if error.is_held:
            self._shown.append(error)
        held, error.held = error.held, []
        return [(error.node, held)]

    def _look_at_followers(self, error: _Error, now: float) -> Shown:
        followers = [one for one in self._last.values() if one.other is error]
        return [one for follower in followers for one in self._look(follower, now)]


def _add(shown: Shown, node: NodeId, lines: list[bytes]) -> None:
    """Append lines to `shown`, to the last entry if that is of the same worker."""
    if shown and shown[-1][0] == node:
        shown[-1][1].extend(lines)
    else:
        shown.append((node, list(lines)))


@dataclass
class _OutputStream:
    """An output of a process."""

    sink: Sink
    prefix: bytes
    is_shown: bool
    is_raw: bool
    splitter: LineSplitter = field(default_factory=LineSplitter)
    last_line: bytes = b""
    is_in_traceback: bool = False
    exception: bytes = b""
    """The line of the last traceback that names the exception, until `LAST_LINES` lines have followed it."""
    followed_by: int = 0

    def note(self, line: bytes) -> None:
        """Remember the last line and the exception, which explain how the process ends."""
        if not line.strip():
            return
        self.last_line = line
        plain = TORCH_PREFIX.sub(b"", line)
        if plain.startswith(TRACEBACK):
            self.is_in_traceback, self.exception = True, b""
        elif self.is_in_traceback and not plain.startswith(b" "):
            self.is_in_traceback, self.exception, self.followed_by = False, plain, 0
        elif self.exception:
            self.followed_by += 1
            self.exception = self.exception if self.followed_by <= LAST_LINES else b""


class JobOutput:
    """The output of the processes of a job: shown if it passes the filter, logged and remembered in any case.

    Args:
        out, err: sinks of standard outputs and standard errors.
        patterns: filters for the processes whose lines are shown, as in file names (``w0``, ``s*``, ``worker-[0-3]``,
            ``*@d1``); empty shows all.
        logs: the log files; None writes none.

    Attributes:
        sinks: `out` and `err`.
    """

    def __init__(self, out: Sink, err: Sink, patterns: Sequence[str] = (), logs: LogFiles | None = None) -> None:
        self.sinks = (out, err)
        self._patterns = patterns
        self._logs = logs
        self._streams: dict[tuple[NodeId, int], _OutputStream] = {}
        self._last: dict[NodeId, deque[bytes]] = {}
        self._is_seen = [sink.is_beside(err) for sink in self.sinks]
        self._repeated = RepeatedErrors()
        self._lines_shown = 0
        # How many lines of all processes had been shown, where the launcher's messages are, when the last one of a
        # process was; it has none where that went elsewhere, such as to a file.
        self._shown_at: dict[NodeId, int] = {}

    def open(self, processes: Iterable[tuple[NodeId, str]], with_stdin: NodeId | None = None) -> list[str]:
        """Prepare for the output of processes. Returns warnings for the user.

        Args:
            processes: each with its host; the host is empty if the job uses only this machine.
            with_stdin: the process that reads the user's input: its output is shown at once, and without prefixes.

        Raises:
            ConfigError: log files cannot be created.
        """
        known = list(processes)
        for node, host in known:
            self._expect(node, host, is_raw=node == with_stdin)
        if self._logs is not None:
            self._logs.open(node for node, _ in known)
        idle = [one for one in self._patterns if not any(_matches(one, node, host) for node, host in known)]
        return [f"--filter {','.join(idle)} matches no process of this job"] if idle else []

    def open_again(self, node: NodeId, host: str, life: int, with_stdin: NodeId | None = None) -> None:
        """Prepare for the output of a restarted process. Output of its earlier lives stays in its log only.

        Args:
            node, host, with_stdin: as for `open`.
            life: how often it was restarted.
        """
        for stream in (OUT, ERR):
            self.finish(node, stream)
        self._expect(node, host, is_raw=node == with_stdin)
        if self._logs is not None:
            self._logs.mark(node, f"{PROGRAM}: {node} is started again ({life})")

    def _expect(self, node: NodeId, host: str, is_raw: bool) -> None:
        self._last[node] = deque(maxlen=LAST_LINES)
        is_shown = is_raw or not self._patterns or any(_matches(one, node, host) for one in self._patterns)
        for number, sink in enumerate(self.sinks):
            self._streams[node, number] = _OutputStream(sink, sink.prefix(node, host), is_shown, is_raw)

    def feed(self, node: NodeId, stream: int, data: bytes) -> list[bytes]:
        """Accept output of a process. Returns the lines that it completes."""
        found = self._streams[node, stream]
        if found.is_raw:
            found.sink.write_raw(data)
        lines = found.splitter.feed(data)
        self._take(node, stream, lines)
        return lines

    def finish(self, node: NodeId, stream: int) -> None:
        """End an output of a process; an unfinished line is shown too."""
        self._take(node, stream, self._streams[node, stream].splitter.finish())
        if stream == ERR:
            self._show_all(self._repeated.end(node, time.monotonic()))

    def tick(self) -> None:
        """Show the lines that were held back for `HELD_S`."""
        self._show_all(self._repeated.tick(time.monotonic()))

    def close(self) -> None:
        """End all outputs."""
        for node, stream in self._streams:
            self.finish(node, stream)

    @property
    def is_full(self) -> bool:
        """Whether the reader of an output does not keep up."""
        return any(sink.is_full for sink in self.sinks)

    def last_error_line(self, node: NodeId) -> bytes:
        """The last line of a process's standard error that is not blank."""
        return self._streams[node, ERR].last_line

    def exception_line(self, node: NodeId) -> bytes:
        """The line that names the exception of a traceback that a process has just written; empty without a
        traceback."""
        return self._streams[node, ERR].exception

    def is_on_screen(self, node: NodeId) -> bool:
        """Whether readers of standard errors have just seen the last line that a process wrote to either output."""
        shown_at = self._shown_at.get(self._repeated.shown_by.get(node, node))
        return shown_at is not None and self._lines_shown - shown_at <= SCREEN_LINES

    def last_lines(self, node: NodeId) -> list[bytes]:
        """The last lines of a process, of both outputs in order of arrival, without line ends."""
        return [line.rstrip(b"\r\n") for line in self._last[node]]

    def _take(self, node: NodeId, number: int, lines: list[bytes]) -> None:
        if not lines:
            return
        stream = self._streams[node, number]
        if stream.is_shown and number == ERR and node.role is Role.WORKER and not stream.is_raw:
            self._show_all(self._repeated.take(node, lines, time.monotonic()))
        elif stream.is_shown:
            self._show(node, number, lines)
        for line in lines if number == ERR else ():
            stream.note(line)
        self._last[node].extend(line for line in lines if line.strip())
        if self._logs is not None:
            self._logs.write(node, number, lines)

    def _show_all(self, shown: Shown) -> None:
        for node, lines in shown:
            self._show(node, ERR, lines)

    def _show(self, node: NodeId, number: int, lines: list[bytes]) -> None:
        """Write and count the lines that are not hidden; lines of a raw output were written as they came and are only
        counted."""
        stream = self._streams[node, number]
        hidden = [] if self._patterns else [FORMING] if node.role is Role.WORKER else [FORMING, LOSS]
        shown = [line for line in lines if not any(pattern.match(line) for pattern in hidden)]
        if not stream.is_raw:
            stream.sink.write_lines(stream.prefix, shown)
        if shown and self._is_seen[number]:
            self._lines_shown += len(shown)
            self._shown_at[node] = self._lines_shown
        elif shown:
            self._shown_at.pop(node, None)


def _matches(pattern: str, node: NodeId, host: str) -> bool:
    names = [short_name(node), str(node)]
    if host:
        names += [f"{name}@{host}" for name in names]
    return any(fnmatchcase(name, pattern) for name in names)
