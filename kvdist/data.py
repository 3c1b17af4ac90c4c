"""Splitting data: over workers (`SplitSampler`) and over the devices of one worker (`split_and_load`).

Neither imports torch: a sampler is anything that can be iterated and measured, and a tensor moves itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from kvdist.kvstore.values import is_tensor

State: TypeAlias = dict[str, Any]
"""A place in the data: what `SplitSampler` was made with, the epoch, and how many of its examples were visited."""


class SplitSampler:
    """Indices of one of several equal, contiguous parts of a data set, for ``DataLoader(sampler=...)``.

    Each worker takes the part of its rank: ``SplitSampler(len(dataset), store.num_workers, store.rank)``. All parts
    have the same length, so all workers make the same number of steps.

    Args:
        length: examples in the data set.
        num_parts: parts, normally `store.num_workers`.
        part_index: which part, normally `store.rank`.
        shuffle: a new order within the part in each epoch; otherwise ascending.
        seed: makes the orders the same in every run; they differ from epoch to epoch. None: they are new each time.
        drop_last: leave out the last ``length % num_parts`` examples, which no part ever visits. With False no
            example is lost: parts are one longer where needed, and those at the end go on with the first examples of
            the data set, which are then visited twice.

    Raises:
        ValueError: a number is out of range, or every part would be empty.
    """

    def __init__(
        self,
        length: int,
        num_parts: int = 1,
        part_index: int = 0,
        *,
        shuffle: bool = True,
        seed: int | None = None,
        drop_last: bool = True,
    ) -> None:
        _check_parts(length, num_parts, part_index)
        if drop_last and 0 < length < num_parts:
            raise ValueError(
                f"{length} examples in {num_parts} equal parts leave every part empty;"
                " use fewer workers or drop_last=False"
            )
        self._length = length
        self._num_parts = num_parts
        self._part_index = part_index
        self._shuffle = shuffle
        self._seed = seed
        self._drop_last = drop_last
        self._epoch = 0
        """The one that the next iteration is."""
        self._rest: list[int] | None = None
        """What the next iteration visits, where that is the rest of an epoch."""
        self._origins: list[State] = []
        """The places from which the present epoch was gone on with."""
        self._before = 0
        """How many examples of the present epoch had been visited when it was gone on with."""
        self._visited: int | None = None
        """Of the epoch under way."""

    def __len__(self) -> int:
        return _part_length(self._length, self._num_parts, self._drop_last) if self._rest is None else len(self._rest)

    def __iter__(self) -> Iterator[int]:
        if self._rest is None:
            self._origins, self._before = [], 0
        order = _order(self._place(0)) if self._rest is None else self._rest
        self._epoch += 1
        self._rest = None
        self._visited = self._before
        return self._counted(order, self._before)

    def _counted(self, order: list[int], before: int) -> Iterator[int]:
        for visited, index in enumerate(order, before + 1):
            self._visited = visited
            yield index
        self._visited = None

    def state_dict(self, visited: int | None = None) -> State:
        """The place in the data, to go on from there: in the same order, or with another number of workers.

        It is made of numbers, so it can be the `state` of a checkpoint.

        Args:
            visited: how many examples of this epoch this worker has used. None: as many as were asked for, which is
                more than were used where a ``DataLoader`` with workers of its own reads ahead.

        Raises:
            ValueError: an order without a seed cannot be made again, or `visited` is out of range.
        """
        found = self._visited if visited is None else visited
        if found is None and self._rest is None:
            return self._place(0)
        if found is None:  # the next iteration is the rest of an epoch
            return {**self._place(self._before), "resumed_from": self._origins}
        if self._shuffle and self._seed is None:
            raise ValueError("the order of this epoch cannot be made again: give SplitSampler a seed")
        state = {**self._place(found), "epoch": self._epoch - 1, "resumed_from": self._origins}
        length = len(_order(state))
        if not self._before <= found <= length:
            raise ValueError(f"visited is {found}, but this worker's part of the epoch has {length} examples")
        # At the end of an epoch the place is the beginning of the next one.
        return self._place(0) if found == length else state

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Let the next iteration go on where a `state_dict` was made.

        Args:
            state: of the same part of as many parts; or those of all parts, by rank, such as
                ``load_checkpoint(…).states``. Then what nobody had visited is split over the present parts.

        Raises:
            ValueError: it belongs to another data set or another order, or some parts are missing.
        """
        states: dict[int, State] = {state["part_index"]: dict(state)} if "part_index" in state else dict(state)
        for one in states.values():
            self._require_same_data(one)
        some = next(iter(states.values()))
        own = states.get(self._part_index)
        if own is not None and own["num_parts"] == self._num_parts:
            before, origins = own["visited"], own.get("resumed_from", [])
            rest = _order(own)[before:]
        elif sorted(states) == list(range(some["num_parts"])):
            origins = [states[rank] for rank in sorted(states)]
            before, rest = 0, _order({**self._place(0), "resumed_from": origins})
        else:
            raise ValueError(
                f"the place is that of part {', '.join(map(str, sorted(states)))} of {some['num_parts']}, and this is"
                f" part {self._part_index} of {self._num_parts}: give those of all parts, as load_checkpoint().states"
            )
        self._epoch, self._origins, self._before, self._visited = some["epoch"], origins, before, None
        at_start = not any(one["visited"] or one.get("resumed_from") for one in states.values())
        self._rest = None if at_start else rest

    def _place(self, visited: int) -> State:
        return {
            "length": self._length,
            "num_parts": self._num_parts,
            "part_index": self._part_index,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
            "epoch": self._epoch,
            "visited": visited,
        }

    def _require_same_data(self, state: State) -> None:
        for name in ("length", "shuffle", "seed"):
            mine, theirs = self._place(0)[name], state[name]
            if mine != theirs:
                raise ValueError(f"the place is in data with {name}={theirs!r}, but this sampler has {name}={mine!r}")

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, so that a resumed run with a seed goes on in the same order.

        Without this call the iterations count as epochs 0, 1, 2, ….
        """
        if epoch < 0:
            raise ValueError(f"the epoch is {epoch}; epochs count from 0")
        self._epoch, self._rest, self._visited = epoch, None, None


def split_and_load(data: Any, devices: Sequence[Any], batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Split a batch along an axis, one part for each device, and move each part to its device.

    Args:
        data: a torch tensor, or a NumPy array (which stays one, and stays on the host).
        devices: torch devices or their names; an array may only go to ``cpu``. There may be one, or the same one twice.
        batch_axis: the axis to split.
        even_split: insist on parts of the same size.

    Returns:
        A list with one part per device, also when there is one device. Parts are views where nothing had to move.

    Raises:
        ValueError: see `split_data`; or an array is to go to another device than the host.
    """
    parts = split_data(data, len(devices), batch_axis, even_split)
    if is_tensor(data):
        pinned = data.is_pinned()  # only from there may a copy go on while the program does
        return [part.to(device, non_blocking=pinned) for part, device in zip(parts, devices, strict=True)]
    elsewhere = [str(device) for device in devices if str(device) != "cpu"]
    if elsewhere:
        raise ValueError(f"a NumPy array cannot move to {elsewhere[0]}; give torch.from_numpy(array) instead")
    return parts


def split_data(data: Any, num_slice: int, batch_axis: int = 0, even_split: bool = True) -> list[Any]:
    """Split a tensor or array along an axis, without copying.

    Args:
        data: a torch tensor or a NumPy array.
        num_slice: how many parts.
        batch_axis: the axis to split.
        even_split: insist on parts of the same size. With False the first ``size % num_slice`` parts are one longer,
            and with fewer examples than parts the last parts are empty.

    Raises:
        TypeError: the data is neither tensor nor array.
        ValueError: the size is not divisible by `num_slice` with `even_split`, or there is no such axis.
    """
    if not is_tensor(data) and not isinstance(data, np.ndarray):
        raise TypeError(f"only torch tensors and NumPy arrays can be split, not {type(data).__name__}")
    if num_slice < 1:
        raise ValueError(f"cannot split into {num_slice} parts; name at least one device")
    if not -data.ndim <= batch_axis < data.ndim:
        raise ValueError(f"data of shape {tuple(data.shape)} has no axis {batch_axis}")
    axis = batch_axis % data.ndim
    size = data.shape[axis]
    if even_split and size % num_slice:
        raise ValueError(
            f"a batch of {size} along axis {axis} cannot be split evenly into {num_slice} parts; use a batch size that"
            f" {num_slice} divides, or even_split=False"
        )
    each, longer = divmod(size, num_slice)
    bounds = [part * each + min(part, longer) for part in range(num_slice + 1)]
    before = (slice(None),) * axis
    return [data[(*before, slice(start, stop))] for start, stop in itertools.pairwise(bounds)]


def _part_length(length: int, num_parts: int, drop_last: bool) -> int:
    return length // num_parts if drop_last else -(-length // num_parts)


def _order(state: State) -> list[int]:
    """All examples that a part visits in an epoch, or in the rest of one that was gone on with."""
    origins: Sequence[State] = state.get("resumed_from", [])
    left = [index for origin in origins for index in _order(origin)[origin["visited"] :]]
    length = len(left) if origins else state["length"]
    count = _part_length(length, state["num_parts"], state["drop_last"])
    start = count * state["part_index"]
    indices = [index % length for index in range(start, start + count)]
    if origins:
        return [left[index] for index in indices]
    if state["shuffle"]:
        # A text seeds by its hash under SHA-512: the same on every machine, and no two epochs are related.
        seed = None if state["seed"] is None else f"{state['seed']}/{state['epoch']}/{state['part_index']}"
        random.Random(seed).shuffle(indices)
    return indices


def _check_parts(length: int, num_parts: int, part_index: int) -> None:
    if length < 0:
        raise ValueError(f"length is {length}; it counts the examples of the data set, at least 0")
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; there must be at least 1")
    if not 0 <= part_index < num_parts:
        raise ValueError(f"part_index is {part_index}; with num_parts={num_parts} it must be from 0 to {num_parts - 1}")
