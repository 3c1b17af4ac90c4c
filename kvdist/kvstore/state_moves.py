"""What the optimizer on the servers remembers of keys, on its way to a worker and back: `PullState`, `ReplaceState`.

One worker asks alone, between two of its steps: none of its pushes is under way, so in a synchronous store no round can
be closed meanwhile, and what it reads is of one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvdist.core.server.block_state import MASTER, NUMBERS, state_dtype
from kvdist.core.worker.requests import KeyInfo, Request, RunData, RunKind, RunPlan, RunSlice, Transfer
from kvdist.dtypes import DType
from kvdist.kvstore.arguments import named
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.states import SliceState, has_master, state_size
from kvdist.protocol.arrays import Bits, padded

Ask: TypeAlias = Callable[[Callable[[int], Request]], Any]
"""Hands a request to the worker, and waits for its result."""


def pull_states(ask: Ask, infos: Sequence[KeyInfo], optimizer: Optimizer) -> list[SliceState | None]:
    """The state of each key, whole; None for one that was never updated.

    Raises:
        PushRefused: pushes of this worker are under way, or there is no state.
    """
    numbers = [np.empty((len(info.slices), 1 + len(optimizer.initial_scalars))) for info in infos]
    _move(ask, RunKind.PULL_STATE, infos, [(i, NUMBERS, own) for i, own in enumerate(numbers)])
    states: list[SliceState | None] = []
    for info, own in zip(infos, numbers, strict=True):
        # All slices have had the same updates, but for asynchronous stores: then the furthest counts.
        count, *scalars = own[own[:, 0].argmax()].tolist()
        states.append(_empty(info, optimizer, int(count), tuple(scalars)) if count and info.size else None)
    _move(ask, RunKind.PULL_STATE, infos, _arrays(states))
    return states


def replace_states(
    ask: Ask, infos: Sequence[KeyInfo], states: Sequence[SliceState | None], optimizer: Optimizer
) -> None:
    """Give the servers these states in place of theirs; None makes a key one that was never updated."""
    numbers = []
    for i, (info, state) in enumerate(zip(infos, states, strict=True)):
        row = [0.0, *optimizer.initial_scalars.values()] if state is None else [state.count, *state.scalars]
        numbers.append((i, NUMBERS, np.tile(np.array(row, np.float64), (len(info.slices), 1))))
    _move(ask, RunKind.REPLACE_STATE, infos, numbers)
    _move(ask, RunKind.REPLACE_STATE, infos, _arrays(states))


def _empty(info: KeyInfo, optimizer: Optimizer, count: int, scalars: tuple[float, ...]) -> SliceState:
    size = state_size(optimizer, info.size, Extent(info.key, info.shape))
    arrays = tuple(np.empty(size, info.dtype.accumulate) for _ in optimizer.state_names)
    master = np.empty(size, info.dtype.accumulate) if has_master(optimizer, info.dtype) else None
    return SliceState(count, arrays, scalars, master)


def _arrays(states: Sequence[SliceState | None]) -> Iterator[tuple[int, int, Bits]]:
    """(index of the key, part, all of it)"""
    for i, state in enumerate(states):
        if state is not None:
            yield from ((i, part, array) for part, array in enumerate(state.arrays, 1))
            if state.master is not None:
                yield i, MASTER, state.master


def _move(ask: Ask, kind: RunKind, infos: Sequence[KeyInfo], parts: Any) -> None:
    runs = [run for i, part, array in parts for run in _runs(kind, i, infos[i], part, array)]
    verb = "pull" if kind is RunKind.PULL_STATE else "replacement"
    label = f"{verb} of the optimizer's state of {named(infos)}"
    ask(lambda number: Transfer(number, kind, label, runs))


def _runs(kind: RunKind, index: int, info: KeyInfo, part: int, array: Bits) -> Iterator[RunData]:
    """One run for each slice; those that are small leave joined all the same."""
    dtype = DType.FLOAT64 if part == NUMBERS else state_dtype(info.dtype)
    for place, piece in enumerate(info.slices):
        if part == NUMBERS:
            own = array[place]
        else:
            row = max(1, info.size // max(1, array.size))  # more than 1 for rules by rows
            own = array[piece.start // row : piece.stop // row]
        plan = RunPlan(
            piece.server,
            np.array([piece.number], np.uint32),
            np.array([own.size], np.uint32),
            np.array([dtype], np.uint8),
            (RunSlice(index, 0, own.size, 0),),
            padded(own.nbytes),
            {piece.number: 0},
            np.array([index], np.intp),
        )
        payload = None if kind is RunKind.PULL_STATE else padded_bytes(own)
        yield RunData(plan, payload, (own,) if payload is None else (), parts=np.array([part], np.uint8))


def padded_bytes(array: Bits) -> memoryview:
    """A copy of an array as a payload has it."""
    memory = np.zeros(padded(array.nbytes), np.uint8)
    memory[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    return memory.data
