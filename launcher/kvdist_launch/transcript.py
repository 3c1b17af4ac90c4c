"""What the processes of a job print: shown with prefixes, written to log files, and remembered for last words.

Every line is shown at once, if the user's patterns let it through. Whether it is shown or not, it goes to the log file
of its process and is remembered for the closing summary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from kvdist.nodes import NodeId
from kvdist_launch.logs import Logs
from kvdist_launch.output import LineSplitter, Sink, short_name

LAST_LINES = 10
"""Lines of a process that are repeated when its failure ends the job."""

ERR = 1
"""The stream of standard errors; 0 is that of standard outputs."""


class Filter:
    """Whose lines are shown.

    Args:
        patterns: as in file names (``w0``, ``s*``, ``worker-[0-3]``), of short or long names; none shows all.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        self._patterns = tuple(patterns)

    def shows(self, node: NodeId, host: str = "") -> bool:
        """Whether the lines of a process are shown."""
        return not self._patterns or any(_matches(pattern, node, host) for pattern in self._patterns)

    def idle(self, nodes: Iterable[tuple[NodeId, str]]) -> list[str]:
        """The patterns that match none of these processes, given with their hosts: likely misspelt."""
        known = list(nodes)
        return [one for one in self._patterns if not any(_matches(one, node, host) for node, host in known)]


def _matches(pattern: str, node: NodeId, host: str) -> bool:
    names = [short_name(node), str(node)]
    if host:
        names += [f"{name}@{host}" for name in names]
    return any(fnmatchcase(name, pattern) for name in names)


@dataclass
class _Stream:
    """One output of one process."""

    sink: Sink
    prefix: bytes
    shown: bool
    is_raw: bool
    splitter: LineSplitter = field(default_factory=LineSplitter)
    last_line: bytes = b""


class Transcript:
    """The output of one job.

    Args:
        out: where standard outputs go.
        err: where standard errors go.
        shows: whose lines are shown.
        logs: the log files; None writes none.

    Attributes:
        sinks: where standard outputs and standard errors go.
    """

    def __init__(self, out: Sink, err: Sink, shows: Filter | None = None, logs: Logs | None = None) -> None:
        self.sinks = (out, err)
        self._shows = Filter() if shows is None else shows
        self._logs = logs
        self._streams: dict[tuple[NodeId, int], _Stream] = {}
        self._last: dict[NodeId, deque[bytes]] = {}

    def open(self, processes: Iterable[tuple[NodeId, str]], with_stdin: NodeId | None = None) -> list[str]:
        """Expect output of these. Returns what the user should be told.

        Args:
            processes: who, and on which host; the host is empty where there is only one machine.
            with_stdin: whose input is the user's, so that its output is shown at once, and without prefixes.

        Raises:
            ConfigError: log files cannot be made.
        """
        known = list(processes)
        for node, host in known:
            self._last[node] = deque(maxlen=LAST_LINES)
            for number, sink in enumerate(self.sinks):
                is_raw = node == with_stdin
                stream = _Stream(sink, sink.prefix(node, host), is_raw or self._shows.shows(node, host), is_raw)
                self._streams[node, number] = stream
        if self._logs is not None:
            self._logs.open(node for node, _ in known)
        idle = self._shows.idle(known)
        return [f"--filter {','.join(idle)} matches no process of this job"] if idle else []

    def feed(self, node: NodeId, stream: int, data: bytes) -> None:
        """A process has printed."""
        found = self._streams[node, stream]
        if found.is_raw:
            found.sink.write_raw(data)
        self._take(node, stream, found.splitter.feed(data))

    def finish(self, node: NodeId, stream: int) -> None:
        """Nothing more will come from this output; an unfinished line is one, too."""
        self._take(node, stream, self._streams[node, stream].splitter.finish())

    def close(self) -> None:
        """Nothing more will come from anybody."""
        for node, stream in self._streams:
            self.finish(node, stream)

    @property
    def is_full(self) -> bool:
        """Whether whoever reads it does not keep up."""
        return any(sink.is_full for sink in self.sinks)

    def last_error_line(self, node: NodeId) -> bytes:
        """The last line that is not blank of a process's standard error."""
        return self._streams[node, ERR].last_line

    def last_lines(self, node: NodeId) -> list[bytes]:
        """The last lines of a process, of both outputs as they came, without line ends."""
        return [line.rstrip(b"\r\n") for line in self._last[node]]

    def _take(self, node: NodeId, number: int, lines: list[bytes]) -> None:
        if not lines:
            return
        stream = self._streams[node, number]
        if stream.shown and not stream.is_raw:
            stream.sink.write_lines(stream.prefix, lines)
        stream.last_line = next((line for line in reversed(lines) if line.strip()), stream.last_line)
        self._last[node].extend(line for line in lines if line.strip())
        if self._logs is not None:
            self._logs.write(node, number, lines)
