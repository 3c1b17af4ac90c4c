"""Pushes that servers clip by the norm of all gradients of the call: `kvdist.core.server.clipping` has the protocol."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from kvdist.core.worker.requests import Plan, Run, RunKind, Transfer
from kvdist.kvstore.backend import PushPull
from kvdist.kvstore.keys import named
from kvdist.kvstore.push_pull import ArrayTransfers, Payloads
from kvdist.kvstore.results import cut
from kvdist.protocol.arrays import Bits
from kvdist.protocol.messages import Flag
from kvdist.runtime.node import Finish

EPSILON = 1e-6
"""What ``torch.nn.utils.clip_grad_norm_`` adds to the norm by which it divides."""


def pushpull_clipped(
    arrays: ArrayTransfers, call: PushPull, clip_norm: float, wait: Callable[[Future[Any]], Any]
) -> float:
    """Push, let the servers clip, and pull; return the norm before clipping.

    Args:
        arrays: of the store.
        call: pushes and pulls.
        clip_norm: the largest norm.
        wait: gives the result of a future.

    Raises:
        FloatingPointError: the norm is not finite; nothing was updated.
    """
    given, call, places = arrays.pushed_and_pulled(call)
    label = f"pushpull of {named(given.infos)}"
    own: Payloads = wait(arrays.lay_out(RunKind.PUSHPULL, given, call, label, _measured))
    norm = norm_of(own.runs)
    if not math.isfinite(norm):
        raise FloatingPointError(
            f"the norm of the gradients is {norm}, so they cannot be clipped to {clip_norm}, and no weight was updated."
            " Some worker's gradients have NaN or infinity: the Trainer's reject_nonfinite=True names it"
        )
    runs = applying_runs(own.staging.plan, places.results, min(1.0, clip_norm / (norm + EPSILON)))

    def finish() -> None:
        places.spread()
        own.release()

    wait(arrays.submit(lambda number: Transfer(number, RunKind.PUSHPULL, label, runs, call.priority), finish))
    return norm


def _measured(own: Payloads) -> Finish:
    """Let a push be measured. Its buffers are not free then: servers of this host read them once more."""
    own.runs = list(map(_to_measure, own.runs))
    return lambda: own


def _to_measure(run: Run) -> Run:
    assert run.flags is not None
    return replace(run, flags=run.flags | np.uint8(Flag.MEASURE), kept={}, stays=False)


def norm_of(runs: Sequence[Run]) -> float:
    """The norm of what was measured. The sum is exact, so the order of answers does not matter: all workers agree."""
    parts = [float(part[0]) for run in runs for part in (run.kept or {}).values() if part.size]
    try:
        return math.sqrt(math.fsum(parts))
    except OverflowError:
        return math.inf


def applying_runs(plan: Plan, results: Sequence[Bits], factor: float) -> list[Run]:
    """The runs of a push that lets servers apply what they have kept, multiplied by a factor.

    Args:
        plan: of the push that was measured.
        results: per key of the plan where its new value goes.
        factor: above 0, the same on all workers.
    """
    setting = ((math.nan, math.nan, factor),)
    flag = Flag.EMPTY | Flag.APPLY
    return [
        Run(run, memoryview(b""), cut(run, results), np.full(len(run.ids), flag, np.uint8), setting)
        for run in plan.runs
    ]
