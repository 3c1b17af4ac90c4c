"""Runs the processes of a plan to their end: one selector loop for output, endings, signals and deadlines.

It knows no rule of its own: `Course` decides, this carries out. It returns only when every process it started has
ended and been reaped, together with what they left in their process groups.
"""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO

from kvdist.nodes import NodeId
from kvdist_launch.course import Action, Course, Patience, Say, SendSignal
from kvdist_launch.local import Child, Guard, start
from kvdist_launch.output import LineSplitter, Sink
from kvdist_launch.plan import Process
from kvdist_launch.signals import INTERRUPTIONS, Signals

READ_BYTES = 64 * 1024
"""Taken from a process's output at a time, so that one that prints much does not keep the others waiting."""

DRAIN_S = 0.5
"""How long the output of processes is awaited that outlive the one that started them (such as ``tee``)."""

SELF_PREFIX = b"kvdist-launch: "


@dataclass
class Source:
    """One output of one process on its way to one of ours."""

    stream: IO[bytes]
    sink: Sink
    prefix: bytes
    splitter: LineSplitter = field(default_factory=LineSplitter)
    is_open: bool = True
    last_line: bytes = b""


class Supervisor:
    """Runs one job.

    Args:
        processes: what to start, in order.
        out: where standard outputs go.
        err: where standard errors and the launcher's own messages go.
        patience: how long is waited for processes that should end.
    """

    def __init__(self, processes: Sequence[Process], out: Sink, err: Sink, patience: Patience) -> None:
        self._processes = list(processes)
        self._sinks = (out, err)
        self._selector = selectors.DefaultSelector()
        self._course = Course([process.node for process in processes], time.monotonic(), patience)
        self._children: dict[NodeId, Child] = {}
        self._running: list[Child] = []
        self._sources: dict[NodeId, list[Source]] = {}
        self._signals = Signals()

    def run(self) -> int:
        """Start everything, wait until all has ended, say how, and return the job's exit code.

        Raises:
            CommandError: a process could not be started; none is left.
        """
        with self._signals, self._selector:
            self._running = start(self._processes)
            self._children = {child.node: child for child in self._running}
            guard = None
            try:
                guard = Guard(self._running)
                self._watch()
                self._drain()
            finally:
                for child in self._children.values():
                    child.reap()
                if guard is not None:
                    guard.dismiss()
        self.say(self._course.summary(time.monotonic()))
        return self._course.exit_code()

    def say(self, text: str) -> None:
        """Print a message of the launcher's own."""
        self._sinks[1].write_lines(SELF_PREFIX, [text.encode(errors="surrogateescape") + b"\n"])

    def _watch(self) -> None:
        self._selector.register(self._signals.descriptor, selectors.EVENT_READ, self._take_signals)
        for child in self._running:
            self._sources[child.node] = [
                Source(stream, sink, sink.prefix(child.node))
                for stream, sink in zip(child.outputs, self._sinks, strict=True)
            ]
            for source in self._sources[child.node]:
                os.set_blocking(source.stream.fileno(), False)
                self._selector.register(source.stream, selectors.EVENT_READ, partial(self._read, source))
        while not self._course.is_over:
            deadline = self._course.deadline
            self._select(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._perform(self._course.tick(time.monotonic()))

    def _select(self, timeout_s: float | None) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()

    def _drain(self) -> None:
        """Read what is still on its way; the selector holds the outputs that have not ended, and the signals."""
        deadline = time.monotonic() + DRAIN_S
        while len(self._selector.get_map()) > 1 and (left_s := deadline - time.monotonic()) > 0:
            self._select(left_s)
        for sources in self._sources.values():
            for source in sources:
                self._finish(source)

    def _read(self, source: Source) -> None:
        if not source.is_open:
            return  # It ended earlier in the same turn of the loop.
        try:
            data = os.read(source.stream.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._show(source, source.splitter.feed(data))
        else:
            self._selector.unregister(source.stream)
            source.is_open = False
            self._finish(source)

    def _finish(self, source: Source) -> None:
        self._show(source, source.splitter.finish())

    def _show(self, source: Source, lines: list[bytes]) -> None:
        source.sink.write_lines(source.prefix, lines)
        source.last_line = next((line for line in reversed(lines) if line.strip()), source.last_line)

    def _take_signals(self) -> None:
        numbers = self._signals.read()
        if signal.SIGCHLD in numbers:
            self._take_endings()
        for number in numbers:
            if number in INTERRUPTIONS:
                self._perform(self._course.interrupt(number, time.monotonic()))

    def _take_endings(self) -> None:
        endings = [ending for child in self._running if (ending := child.ending()) is not None]
        for index, ending in enumerate(endings):
            child = self._children[ending.node]
            self._running.remove(child)
            if ending.is_failure:
                # What it had started may hold its sockets open and so hide its end from the others.
                child.signal_group(signal.SIGKILL)
            for other in self._running:
                other.tell(ending.report)
            endings[index] = replace(ending, last_error_line=self._read_last_words(child))
        self._perform(self._course.ended(endings, time.monotonic()))

    def _read_last_words(self, child: Child) -> bytes:
        """Show what it printed before its end (one read takes what a pipe holds): reasons before conclusions.

        Returns the last line of its standard error.
        """
        for source in self._sources[child.node]:
            self._read(source)
        return self._sources[child.node][1].last_line

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Say(text):
                    self.say(text)
                case SendSignal(node, number):
                    self._children[node].signal_group(number)
