"""What of a node goes into a trace: calls of the user, messages, closed rounds.

A node without a trace has None in its place and looks at that, so tracing that is off costs the look. What overlaps,
the user's calls, are spans of their own; messages and rounds nest on the node's thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from kvdist.core.group import Group, GroupPush
from kvdist.core.requests import (
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
)
from kvdist.core.rounds import Rounds
from kvdist.core.shard import Contribution, Shard
from kvdist.kernels.interface import Kernels
from kvdist.optimizer.interface import SliceUpdater
from kvdist.protocol.commands import HEAD_OF_USERS_MAX, Perform
from kvdist.protocol.compressed import CompressedPush
from kvdist.protocol.messages import (
    Ack,
    InitValues,
    JoinedPush,
    Packet,
    Pull,
    Push,
    ReplaceValues,
    Stop,
    Values,
)
from kvdist.protocol.registration import Roster
from kvdist.trace import Trace, now_ns

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
    """Closes rounds and notes each: the time is that of the sum and the update.

    Args:
        trace: where.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    def close_slice(self, shard: Shard, updater: SliceUpdater | None, kernels: Kernels) -> list[Contribution]:
        """Of one slice, noted."""
        since = now_ns()
        contributions = super().close_slice(shard, updater, kernels)
        self._note(shard, since, len(contributions), shard.count * shard.dtype.itemsize, 1)
        return contributions

    def close_group(self, group: Group, kernels: Kernels) -> list[GroupPush] | None:
        """Of slices that always come together, noted under the key of the first."""
        since = now_ns()
        pushes = super().close_group(group, kernels)
        if pushes is not None:
            first, version = group.shards[0], int(group.versions[0])
            nbytes = int(group.counts.sum()) * group.dtype.itemsize
            self._note(first, since, len(pushes), nbytes, len(group.shards), version)
        return pushes

    def close_whole(
        self, shards: Sequence[Shard], rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater
    ) -> None:
        """Of all slices of a parameter, noted under its key."""
        since = now_ns()
        super().close_whole(shards, rounds, updater)
        nbytes = sum(shard.count * shard.dtype.itemsize for shard in shards)
        self._note(shards[0], since, len(rounds[0]), nbytes, len(shards))

    def _note(
        self, shard: Shard, since_ns: int, contributions: int, nbytes: int, slices: int, version: int | None = None
    ) -> None:
        arguments = {
            "key": shard.key,
            "version": shard.version if version is None else version,
            "contributions": contributions,
            "bytes": nbytes,
            "slices": slices,
        }
        self._trace.add(f"round of key {shard.key!r}", "round", since_ns, arguments)


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
        case Register():
            return "joining the cluster", {}
        case Leave():
            return "leaving the cluster", {}
