"""Splitting data: over workers (`SplitSampler`) and over the devices of one worker (`split_and_load`).

Neither imports torch: a sampler is anything that can be iterated and measured, and a tensor moves itself.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdist.kvstore.values import is_tensor
from kvdist.sampling import Place, State, part_length, resume


class SplitSampler:
    """Indices of one of several equal, contiguous parts of a data set, for ``DataLoader(sampler=...)``.

    Each worker takes the part of its rank: ``SplitSampler(len(dataset), store.num_workers, store.rank)``. All parts
    have the same length, so all workers make the same number of steps.

    A ``DataLoader`` with ``num_workers`` above 0 reads ahead: it asks for examples that no step has used yet, and
    `state_dict` counts them as visited. There give the number that was used, ``state_dict(visited=batches_done *
    batch_size)``, less what a shorter last batch lacks. It counts from the beginning of the epoch, also after a resume
    within it; where the number of workers changed within the epoch, it counts from there. Either way,
    ``state_dict()["visited"]`` after `load_state_dict` is the number to count on from.

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
        self._next = Place(length, shuffle, seed, num_parts, part_index, drop_last)
        """Where the next iteration begins."""
        self._rest: list[int] | None = None
        """What the next iteration visits, where that is the rest of an epoch."""
        self._begun: Place | None = None
        """Where the latest iteration began; None if there was none since the next one was set."""
        self._visited = 0
        """How far the latest iteration is in its epoch."""
        self._end = 0
        """How far it goes."""

    @property
    def epoch(self) -> int:
        """The epoch in which the next example is, from 0: the running one, and at the end of that the next.

        After `load_state_dict`, ``for epoch in range(sampler.epoch, epochs)`` makes exactly what is left, wherever
        the state was saved.
        """
        return self._place(None).epoch

    def __len__(self) -> int:
        if self._rest is not None:
            return len(self._rest)
        return part_length(self._next.length, self._next.num_parts, self._next.drop_last)

    def __iter__(self) -> Iterator[int]:
        order = self._next.order() if self._rest is None else self._rest
        self._begun, self._visited = self._next, self._next.visited
        self._end = self._visited + len(order)
        self._next, self._rest = self._next.beginning_of(self._next.epoch + 1), None
        return self._counted(order, self._visited)

    def _counted(self, order: list[int], before: int) -> Iterator[int]:
        for visited, index in enumerate(order, before + 1):
            self._visited = visited
            yield index

    def state_dict(self, visited: int | None = None) -> State:
        """The place in the data, to go on from there: in the same order, or with another number of workers.

        It is made of numbers, so it can be the `state` of a checkpoint. At the end of an epoch it is the beginning of
        the next one.

        Args:
            visited: how many examples of the epoch last begun this worker has used; see the class for what it counts
                and when to give it. None: as many as were asked for.

        Raises:
            ValueError: an order without a seed cannot be made again, or `visited` is out of range.
        """
        place = self._place(visited)
        if not (place.is_beginning or place.can_be_made_again):
            raise ValueError("the order of this epoch cannot be made again: give SplitSampler a seed")
        return place.to_state()

    def _place(self, visited: int | None) -> Place:
        if self._begun is None:
            before, found, end = self._next, self._next.visited, self._next.visited
        else:
            before, found, end = self._begun, self._visited, self._end
        if visited is not None:
            found = operator.index(visited)
        if not before.visited <= found <= end:
            raise ValueError(
                f"visited is {found}, but this worker has begun at {before.visited} of epoch {before.epoch} and was"
                f" given examples up to {end}; it counts from the beginning of the epoch"
            )
        return self._next if found == end else replace(before, visited=found)

    def load_state_dict(self, state: Mapping[Any, Any]) -> None:
        """Let the next iteration go on where a `state_dict` was made.

        Args:
            state: of the same part of as many parts; or those of all parts, by rank:
                ``{rank: state["sampler"] for rank, state in checkpoint.states.items()}``, where each worker saved
                ``{"sampler": sampler.state_dict()}``. Then what nobody had visited is split over the present parts.

        Raises:
            ValueError: it is no such state, it belongs to another data set or another order, or some parts are missing.
        """
        self._next, self._rest = resume(self._next, state)
        self._begun = None

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, so that a resumed run with a seed goes on in the same order.

        Without this call the iterations count as epochs 0, 1, 2, …. Of an epoch in the middle of which
        `load_state_dict` has put the sampler, the next iteration is the rest.
        """
        if epoch < 0:
            raise ValueError(f"the epoch is {epoch}; epochs count from 0")
        if epoch != self._next.epoch:
            self._next, self._rest = self._next.beginning_of(epoch), None
        self._begun = None


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


def _check_parts(length: int, num_parts: int, part_index: int) -> None:
    if length < 0:
        raise ValueError(f"length is {length}; it counts the examples of the data set, at least 0")
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}; there must be at least 1")
    if not 0 <= part_index < num_parts:
        raise ValueError(f"part_index is {part_index}; with num_parts={num_parts} it must be from 0 to {num_parts - 1}")
