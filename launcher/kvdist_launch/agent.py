"""The remote end of an ssh pipe: starts and watches the processes of its host on behalf of the launcher.

It is started by ssh, see `ssh.far_command`. Its standard input and output are the pipe, see `agent_protocol`.
Rules:

* It ends every process of its host when the pipe ends, when the launcher has been silent for too long (a broken network
  closes no connection), and when the launcher asks for it.
* It decides nothing else. Exits go to the launcher at once, output as it comes.
* A watchdog notices the death of the agent, as on the launcher's host.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from kvdist.config.settings import Limits
from kvdist.errors import ConfigError, KvdistError
from kvdist.nodes import SCHEDULER, NodeId
from kvdist_launch.agent_protocol import (
    GREETING,
    PIPE_READ_BYTES,
    Frame,
    FrameDecoder,
    FrameWriter,
    node_of,
    process_of,
)
from kvdist_launch.exits import ProcessExit
from kvdist_launch.probe import facts_of_this_host
from kvdist_launch.processes import BEAT_S, CommandError, LocalProcesses, SignalPipe
from kvdist_launch.root_socket import turn_away
from kvdist_launch.start import INTERRUPTIONS, inherit

PATIENCES = 2
"""Silence of the launcher, in multiples of the patience, after which it counts as lost; it sends a frame every
second."""

GRACE_S, TERMINATE_S = 2.0, 1.0
"""Time for processes to end by themselves after the pipe's end, and after SIGTERM: less than five seconds together."""

DRAIN_S = 0.5


class Agent:
    """Runs the processes of this host.

    Args:
        inward, outward: descriptors of the pipe.
    """

    def __init__(self, inward: int, outward: int) -> None:
        self._inward = inward
        self._selector = selectors.DefaultSelector()
        self._signals = SignalPipe()
        self._decoder = FrameDecoder()
        self._writer = FrameWriter(self._selector, outward, self._lose)
        self._processes = LocalProcesses(self._selector, self)
        self._alive: list[NodeId] = []
        self._listening: socket.socket | None = None
        self._call = bytearray()
        self._heard_at = self._beat_at = time.monotonic()
        self._patience_s = Limits.patience_s
        self._is_lost = False
        self._is_dismissed = False

    def run(self) -> int:
        """Serve until the launcher dismisses the agent or is lost. Returns the exit code."""
        with self._signals, self._selector:
            self._selector.register(self._signals.descriptor, selectors.EVENT_READ, self._take_signals)
            self._selector.register(self._inward, selectors.EVENT_READ, self._read)
            self._writer.send("greeting", **facts_of_this_host())
            try:
                while not (self._is_dismissed or self._is_lost):
                    self._turn(BEAT_S)
                if self._is_lost:
                    self._end_all()
                else:
                    self._drain()
            finally:
                self._stop_listening()
                self._processes.release()
        return 1 if self._is_lost else 0

    # As the listener of the processes.

    def started(self, host: str, pids: Sequence[tuple[NodeId, int]]) -> None:
        self._alive += [node for node, _ in pids]
        self._writer.send("started", pids=pids)

    def output(self, node: NodeId, stream: int, data: bytes) -> None:
        self._writer.send("output", data, node=node, stream=stream)
        self._processes.pause(self._writer.is_full)

    def stopped(self, node: NodeId, pid: int) -> None:
        self._writer.send("stopped", node=node, pid=pid)

    def output_ended(self, node: NodeId, stream: int) -> None:
        self._writer.send("output_ended", node=node, stream=stream)

    def ended(self, exits: Sequence[ProcessExit]) -> None:
        if any(one.node == SCHEDULER and not one.is_failure for one in exits):
            self._stop_listening()  # it will not be started again
        gone = {one.node for one in exits}
        self._alive = [node for node in self._alive if node not in gone]
        self._writer.send("ended", endings=exits)

    def settled(self, exits: Sequence[ProcessExit]) -> None:
        self._writer.send("settled", endings=exits)

    # Frames of the launcher.

    def _read(self) -> None:
        data = os.read(self._inward, PIPE_READ_BYTES)
        if not data:
            self._lose()
            return
        self._heard_at = time.monotonic()
        for frame in self._decoder.feed(data):
            self._perform(frame)

    def _perform(self, frame: Frame) -> None:
        fields = frame.fields
        match frame.kind:
            case "alive":
                self._patience_s = float(fields["patience_s"])
                self._writer.send("alive")
            case "start":
                self._start(fields)
            case "call" if frame.payload:
                self._call += frame.payload
            case "call":
                self._processes.call(bytes(self._call))
                self._call.clear()
            case "signal" if (node := node_of(fields["node"])) in self._alive:
                self._processes.signal_group(node, int(fields["number"]))
            case "tell" if (node := node_of(fields["node"])) in self._alive:
                self._processes.tell(node, str(fields["line"]))
            case "leave":
                self._is_dismissed = True
            case "ask":
                question = str(fields.pop("question"))
                self._processes.ask(question, **fields)
                self._writer.send("answer", question=question, found=self._processes.answers[question])

    def _start(self, fields: dict[str, Any]) -> None:
        processes = [process_of(one) for one in fields["processes"]]
        found = self._processes.probe.take_listening()
        if found is not None:
            turn_away(found)
            self._listening = found
        try:
            secret = fields.get("secret")
            self._processes.start(processes, self._listening, None if secret is None else bytes.fromhex(secret))
        except ConfigError as error:
            code = error.exit_code if isinstance(error, CommandError) else 0
            self._writer.send("refused", text=str(error), code=code)
        if not fields["keeps_socket"]:
            # The socket is the scheduler's alone from now on: after its end nothing must accept connections.
            self._stop_listening()

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()
            self._listening = None

    # The loop.

    def _turn(self, timeout_s: float) -> None:
        for key, _ in self._selector.select(timeout_s):
            key.data()
        self._processes.pause(self._writer.is_full)
        if time.monotonic() >= self._beat_at:
            self._beat_at = time.monotonic() + BEAT_S
            self._processes.beat(self._beat_at)
        if time.monotonic() - self._heard_at > PATIENCES * self._patience_s:
            self._lose()

    def _take_signals(self) -> None:
        if INTERRUPTIONS.intersection(self._signals.read()):
            self._lose()

    def _lose(self) -> None:
        self._is_lost = True

    def _end_all(self) -> None:
        """End all processes after the loss of the launcher, in order if possible."""
        self._writer.close()
        for number, delay_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, TERMINATE_S)):
            deadline = time.monotonic() + delay_s
            while self._alive and (left_s := deadline - time.monotonic()) > 0:
                self._turn(left_s)
            for node in self._alive:
                self._processes.signal_group(node, number)

    def _drain(self) -> None:
        """Pass on output in flight. A launcher that lives but does not keep up delays the deadline."""
        deadline = time.monotonic() + DRAIN_S
        while not self._is_lost:
            if self._writer.is_empty and (self._processes.is_silent or time.monotonic() >= deadline):
                return
            self._turn(max(0.0, deadline - time.monotonic()) or 1.0)
            if self._writer.is_full:
                deadline = time.monotonic() + DRAIN_S


def main() -> int:
    """Run the agent of this host. Returns the exit code."""
    inherit("kvdist_launch.agent")
    os.write(1, GREETING + b"\n")
    try:
        return Agent(0, 1).run()
    except KvdistError as error:
        print(f"kvdist_launch.agent: {error}", file=sys.stderr, flush=True)
        return 1


if __name__ == "__main__":
    raise SystemExit(main())
