"""What of a node goes into a trace: calls of the user, messages, closed rounds.

A node without a trace has None in its place and looks at that, so tracing that is off costs the look. What overlaps,
the user's calls, are spans of their own; messages and rounds nest on the node's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvdist.core.server.block import Block, Contribution
from kvdist.core.server.rounds import Rounds
from kvdist.core.worker.requests import (
    ClaimFolder,
    DeclareKeys,
    EnterBarrier,
    Leave,
    LoadStore,
    Register,
    Request,
    SaveStore,
    SendCommand,
    SetStoreOptimizer,
    Transfer,
    UseKernels,
)
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.messages import (
    HEAD_OF_USERS_MAX,
    Ack,
    CompressedPush,
    InitValues,
    JoinedPush,
    Packet,
    Perform,
    Pull,
    Push,
    ReplaceValues,
    Roster,
    Stop,
    Values,
)
from kvdist.runtime.trace import Trace, now_ns

CALLS_OPEN_MAX = 100_000
"""Calls that may be under way and noted; more are not."""


class _Called(threading.local):
    """When the present thread's call began, if no request has been made for it yet; else 0."""

    since_ns = 0


class NodeTrace:
    """Notes what a node does.

    Args:
        trace: where.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._called = _Called()
        self._calls: dict[int, tuple[str, int, dict[str, Any]]] = {}
        """Request → what was asked, since when, and more about it. Only the node's thread uses it."""

    # On the user's threads.

    def called(self) -> None:
        """The user has called a method, and a request may follow."""
        self._called.since_ns = now_ns()

    def take_since(self) -> int:
        """When the call began that makes the request which is submitted now."""
        since_ns, self._called.since_ns = self._called.since_ns, 0
        return since_ns or now_ns()

    def wait(self, future: Future[Any]) -> Any:
        """The result of a future, waited for in the trace."""
        since = now_ns()
        try:
            return future.result()
        finally:
            self.trace.add("wait", "wait", since, {})

    # On the node's thread.

    def asked(self, request: Request, since_ns: int) -> None:
        """The machine gets a request; `since_ns` is 0 if tracing began after it was submitted."""
        if since_ns and len(self._calls) < CALLS_OPEN_MAX:
            label, arguments = _told(request)
            self._calls[request.request] = (label, since_ns, arguments)

    def answered(self, request: int, error: Exception | None = None) -> None:
        """A request is fulfilled, or cannot be."""
        label, since, arguments = self._calls.pop(request, ("", 0, {}))
        if since:
            if error is not None:
                arguments["error"] = f"{type(error).__name__}: {error}"
            self.trace.add(label, "call", since, arguments, overlaps=True)

    def handled(self, packet: Packet, since_ns: int) -> None:
        """A message has been dealt with, and what follows from it has been done."""
        tells = True
        arguments: dict[str, Any] = {"from": str(packet.stamp.source), "step": packet.stamp.step}
        match packet.message:
            case (
                Push(ids=ids, arrays=arrays)
                | CompressedPush(ids=ids, arrays=arrays)
                | JoinedPush(ids=ids, arrays=arrays)
                | Values(ids=ids, arrays=arrays)
                | InitValues(ids=ids, arrays=arrays)
                | ReplaceValues(ids=ids, arrays=arrays)
            ):
                arguments |= {"slices": len(ids), "bytes": arrays.nbytes}
            case Pull(ids=ids):
                arguments |= {"slices": len(ids)}
            case Perform(head=head):
                # Commands of kvdist itself are those of the profiler.
                arguments |= {"command": head}
                tells = head <= HEAD_OF_USERS_MAX
            case Ack() | Roster() | Stop():
                tells = False
        self.trace.add(type(packet.message).__name__, "message", since_ns, arguments, tells=tells)


class TracedRounds(Rounds):
    """Applies rounds and notes each: the time is that of the sum and the update.

    Args:
        trace: where.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def apply(self, block: Block, contributions: Sequence[Contribution], updater: SliceUpdater | None) -> None:
        """To one block, noted under the key of its first slice."""
        since = now_ns()
        super().apply(block, contributions, updater)
        self._note([block], since, len(contributions))

    def apply_jointly(
        self, blocks: Sequence[Block], contributions: Sequence[Sequence[Contribution]], updater: SliceUpdater
    ) -> None:
        """To all blocks of a parameter, noted under its key."""
        since = now_ns()
        super().apply_jointly(blocks, contributions, updater)
        self._note(blocks, since, len(contributions[0]))

    def _note(self, blocks: Sequence[Block], since_ns: int, contributions: int) -> None:
        arguments = {
            "key": blocks[0].key,
            "version": blocks[0].version,
            "contributions": contributions,
            "bytes": sum(int(block.counts.sum()) * block.dtype.itemsize for block in blocks),
            "slices": sum(len(block) for block in blocks),
        }
        self._trace.add(f"round of key {blocks[0].key!r}", "round", since_ns, arguments)


def _told(request: Request) -> tuple[str, dict[str, Any]]:
    """What a request is, for people, and what else there is to say of it."""
    match request:
        case Transfer(label=label, runs=runs, priority=priority):
            nbytes = sum(run.plan.nbytes for run in runs)
            return label, {"bytes": nbytes, "slices": sum(len(run.plan.ids) for run in runs), "priority": priority}
        case DeclareKeys(keys=keys):
            return f"declaration of {len(keys)} key(s)", {"keys": len(keys)}
        case SetStoreOptimizer() | SendCommand():
            return request.label, {}
        case EnterBarrier():
            return "barrier", {}
        case ClaimFolder():
            return "lock of a folder of checkpoints", {}
        case SaveStore(step=step, keys=keys):
            return f"checkpoint of step {step}", {"keys": len(keys)}
        case LoadStore():
            return "loading of a checkpoint", {}
        case UseKernels():
            return "choice of kernels", {}
        case Register():
            return "joining the cluster", {}
        case Leave():
            return "leaving the cluster", {}
