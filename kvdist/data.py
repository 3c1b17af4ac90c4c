"""Splitting data: over workers (`SplitSampler`) and over the devices of one worker (`split_and_load`).

Neither imports torch: a sampler is anything that can be iterated and measured, and a tensor moves itself.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from kvdist.kvstore.values import is_tensor


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
        self._part_length = length // num_parts if drop_last else -(-length // num_parts)
        self._start = self._part_length * part_index
        self._part_index = part_index
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return self._part_length

    def __iter__(self) -> Iterator[int]:
        indices = [index % self._length for index in range(self._start, self._start + self._part_length)]
        if self._shuffle:
            # A text seeds by its hash under SHA-512: the same on every machine, and no two epochs are related.
            seed = None if self._seed is None else f"{self._seed}/{self._epoch}/{self._part_index}"
            random.Random(seed).shuffle(indices)
        self._epoch += 1
        return iter(indices)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is, so that a resumed run with a seed goes on in the same order.

        Without this call the iterations count as epochs 0, 1, 2, ….
        """
        if epoch < 0:
            raise ValueError(f"the epoch is {epoch}; epochs count from 0")
        self._epoch = epoch


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
