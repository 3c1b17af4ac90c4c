"""The content of a slice, in the parts that messages carry (`Fill`, `PullState`, `ReplaceState`). Pure.

Part 0 is numbers, float64: the count of updates, then the numbers of the rule. Parts 1 and on are the arrays of
`Optimizer.state_names`, of `DType.accumulate`, and `MASTER` is the float32 weight behind a weight in halves. `TOTALS`
is beside the state: the number of examples summed in the value, and in a pull also the number of updates where a round
has pushes of all workers. A `Fill` also has the parts `WEIGHT` and `ROW_IDS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist import errors
from kvdist.checkpoint.snapshot import SliceImage
from kvdist.core.server.block import Block
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.optimizer.states import SliceState, is_count
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.arrays import U8, Arrays, Bits, padded
from kvdist.protocol.messages import ROW_IDS, WEIGHT

NUMBERS, MASTER, TOTALS = 0, 255, 252
COUNTS = (NUMBERS, TOTALS)
"""Parts that are float64, with values of any dtype."""
PIECE_BYTES_MAX, FILL_BYTES_MAX = 4 << 20, 8 << 20
"""Limits of `Fill`: bytes of a piece of an array, and of a message."""


def parts_of_state(state: SliceState) -> dict[int, Bits]:
    """Return the parts of a state; arrays are not copied."""
    parts: dict[int, Bits] = {NUMBERS: np.array([state.count, *state.scalars], np.float64)}
    parts.update(enumerate(state.arrays, 1))
    return parts if state.master is None else {**parts, MASTER: state.master}


def parts_of(image: SliceImage) -> dict[int, Bits]:
    """Return the parts of an image; arrays are not copied. The numbers are empty before the first update."""
    parts = {NUMBERS: np.zeros(0)} if image.state is None else parts_of_state(image.state)
    beside = {ROW_IDS: image.ids, WEIGHT: image.weight}
    parts |= {part: array for part, array in beside.items() if array is not None}
    return {**parts, TOTALS: np.array([image.samples], np.float64)} if image.samples else parts


def with_parts(image: SliceImage, parts: Mapping[int, npt.NDArray[Any]]) -> SliceImage:
    """Return an image with these parts as its content, as `parts_of` returned them."""
    arrays = tuple(parts[part] for part in sorted(parts) if 0 < part < TOTALS)
    numbers, totals, state = parts[NUMBERS].tolist(), parts.get(TOTALS), None
    if numbers:
        state = SliceState(int(numbers[0]), arrays, tuple(numbers[1:]), parts.get(MASTER))
    return replace(
        image,
        weight=parts.get(WEIGHT),
        has_state=True,
        state=state,
        ids=parts.get(ROW_IDS),
        samples=0 if totals is None else int(totals[0]),
    )


def part_dtype(part: int, dtype: DType) -> DType:
    """Return the element type of a part of a slice of this element type."""
    if part in COUNTS:
        return DType.FLOAT64
    return {WEIGHT: dtype, ROW_IDS: DType.INT64}.get(part, dtype.of_states)


def packed(image: SliceImage) -> Iterator[tuple[U8, Arrays]]:
    """Pack an image into few messages: the parts, and a piece of an array for each."""
    parts: list[int] = []
    arrays: list[Bits] = []
    for part, array in _pieces(image):
        if sum(one.nbytes for one in arrays) + array.nbytes > FILL_BYTES_MAX:
            yield _message(parts, arrays, image.dtype)
            parts, arrays = [], []
        parts.append(part)
        arrays.append(array)
    yield _message(parts, arrays, image.dtype)


def _pieces(image: SliceImage) -> Iterator[tuple[int, Bits]]:
    """Yield an image in pieces: the part, and a piece of its array."""
    for part, array in parts_of(image).items():
        step = PIECE_BYTES_MAX // array.itemsize
        for start in range(0, len(array) or 1, step):
            yield part, array[start : start + step]


def _message(parts: Sequence[int], arrays: Sequence[Bits], dtype: DType) -> tuple[U8, Arrays]:
    """Show each array in a frame; only arrays with a partial last word are copied."""
    frames = [array.view(np.uint8).data for array in arrays if array.nbytes]
    whole = [frame if len(frame) % 8 == 0 else bytes(frame).ljust(padded(len(frame)), b"\0") for frame in frames]
    dtypes = np.array([part_dtype(part, dtype) for part in parts], np.uint8)
    counts = np.array([len(array) for array in arrays], np.uint32)
    payload = tuple(whole) if len(whole) > 1 else whole[0] if whole else b""
    return np.array(parts, np.uint8), Arrays(dtypes, counts, payload)


# Parts of the state of a block.


def read_part(block: Block, updater: SliceUpdater | None, part: int, kernels: Kernels) -> Bits:
    """Return a copy of a part of the state; before the first update, the state with which that begins.

    Raises:
        PushRefused: the state has no such part.
    """
    state = _state(block, updater, kernels)
    return _part(block, state, part)


def replace_part(block: Block, updater: SliceUpdater | None, part: int, values: Bits, kernels: Kernels) -> None:
    """Replace a part of the state. The numbers come first; a count of 0 makes the slice new.

    Raises:
        PushRefused: the state has no such part, or the part has another size or type.
    """
    state = _state(block, updater, kernels)
    assert updater is not None
    expected = _part(block, state, part)
    if (values.size, values.dtype) != (expected.size, expected.dtype):
        raise errors.PushRefused(
            f"part {part} of the optimizer's state of {name_of(block.key)} has {values.size} elements of"
            f" {values.dtype}, where {updater.optimizer.name} keeps {expected.size} of {expected.dtype}"
        )
    if part == NUMBERS:
        count, *scalars = values.tolist()
        if not is_count(count):
            raise errors.PushRefused(f"the optimizer's state of {name_of(block.key)} cannot have had {count} updates")
        state.count, state.scalars = int(count), tuple(scalars)
        updater.restore(block, state if count else None)
        return
    expected[...] = values
    updater.restore(block, state)


def _state(block: Block, updater: SliceUpdater | None, kernels: Kernels) -> SliceState:
    """Return a copy of the present state."""
    if updater is None or block.published is None:
        raise errors.PushRefused(f"{name_of(block.key)} has no optimizer's state: call set_optimizer before")
    state = updater.states.get(block)
    if state is not None:
        return state.copy()
    return SliceState.fresh(updater.optimizer, block.published.array, block.dtype, block.extents[0], kernels)


def _part(block: Block, state: SliceState, part: int) -> Bits:
    found = parts_of_state(state).get(part)
    if found is None or (part != NUMBERS and not block.dtype.is_floating):
        raise errors.PushRefused(f"the optimizer's state of {name_of(block.key)} has no part {part}")
    return found
