"""The values of a collective store as one worker has them, and the sums that change them.

What follows from a sum happens on the engine's thread, in the order of the calls; the store within this process that
has the values is touched under a lock.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from kvdist.errors import CollectiveMismatch
from kvdist.kvstore import values
from kvdist.kvstore.allreduce import KeyAllReduce, KeySum, Ranks, Summed, as_tensor, memory_of, write
from kvdist.kvstore.base import Keys, UpdaterFunction, Value
from kvdist.kvstore.declared import CollectiveKeys
from kvdist.kvstore.local import LocalStore
from kvdist.kvstore.local_rows import resolved
from kvdist.kvstore.local_saving import Holding
from kvdist.kvstore.local_values import Updaters
from kvdist.kvstore.values import Bits, Key
from kvdist.optimizer.base import LIVE, Optimizer


class OwnValues(LocalStore):
    """A store within this process, whose content others save."""

    @property
    def updater(self) -> Updaters | None:
        """What updates the values, with its states; None without an optimizer."""
        return self._arrays.updaters

    def held(self) -> list[Holding]:
        """What is to be saved."""
        return self._held()

    def take(self, found: Sequence[Bits | None]) -> None:
        """Take these values, in the order of `held`; None leaves one as it is."""
        self._take(found)


class ReplicatedValues:
    """This worker's copy of the values.

    Args:
        keys: that there are.
        ranks: with whom sums are made.
        local: has the values.
        predivide: by what values are divided before they are summed, and multiplied after it.
    """

    def __init__(self, keys: CollectiveKeys, ranks: Ranks, local: OwnValues, predivide: float = 1.0) -> None:
        self.lock = threading.RLock()
        self.unkept: set[Key] = set()
        """Keys whose sums go to the callers alone."""
        self.optimizer: Optimizer | None = None
        """The one whose numbers the user may change; the values are updated by a copy of it."""
        self.last: Future[Any] = resolved(None)
        """What was begun last: the values are those of now when it is done."""
        self._keys = keys
        self._ranks = ranks
        self._local = local
        self._predivide = predivide
        self._own: Optimizer | None = None
        self._has_updater = False

    def place(self, given: Sequence[tuple[Key, Any, list[Any]]]) -> None:
        """Have rank 0's values in the store and in places."""
        memories = [[memory_of(place) for place in places] for _, _, places in given]
        tensors = []
        for (_, first, _), (memory, *_) in zip(given, [one or [None] for one in memories], strict=True):
            own = as_tensor(first)
            tensors.append(own.clone(memory_format=torch.contiguous_format) if memory is None else memory.copy_(own))
        self._ranks.broadcast(tensors)
        kept, arrays = [], []
        for (one, first, places), targets, tensor in zip(given, memories, tensors, strict=True):
            for place, memory in zip(places, targets, strict=True):
                write(place, memory, tensor)
            if one not in self.unkept:
                kept.append(one)
                arrays.append(values.like(values.kind_of(first), *self._keys[one], values.read_bits(tensor)))
        with self.lock:
            if kept:
                self._local.broadcast(kept, arrays, out=arrays)

    def update_by(self, optimizer: Optimizer) -> None:
        """From now on sums are gradients."""
        own = copy.copy(optimizer)
        with self.lock:
            self._local.set_optimizer(own)
        self.optimizer, self._own, self._has_updater = optimizer, own, True

    def call(self, updater: UpdaterFunction) -> None:
        """From now on a function changes the values."""
        with self.lock:
            self._local.set_updater(updater)
        self.optimizer, self._own, self._has_updater = None, None, True

    def pull(self, key: Keys, out: Value | None, ignore_sparse: bool) -> Future[Any]:
        """Hand values out, once what was begun before is done."""
        for one in values.keys(key):
            self._keys[one]  # which says so if there is none
            if one in self.unkept:
                raise ValueError(f"key {one!r} is a Trainer's: its sums go to the caller of pushpull, and none is kept")
        if out is not None:
            self._keys.writable(key, out)

        def hand_out() -> Any:
            with self.lock:
                return self._local.pull(key, out, ignore_sparse=ignore_sparse)

        return after(self.last, hand_out)

    def begin(
        self, given: Sequence[tuple[Key, list[Any], list[Any]]], average: bool, keeps: bool = False
    ) -> Future[None]:
        """Have sums made, and then whatever follows from them."""
        parts = []
        for one, arrays, places in given:
            own, wire = self._keys.types[one]
            parts.append(KeySum(one, self._keys[one][0], own, arrays, places, wire))
        numbers = None if self.optimizer is None else {name: getattr(self.optimizer, name) for name in LIVE}
        weight = 1.0 if self.optimizer is None else float(self.optimizer.rescale_grad)

        def then(summed: list[Summed]) -> list[Summed]:
            return self._take(summed, numbers)

        summing = KeyAllReduce(parts, average, then, weight, self._predivide, keeps)
        self.last = self._ranks.submit(summing)
        return self.last

    def _take(self, summed: list[Summed], numbers: Mapping[str, Any] | None) -> list[Summed]:
        """On the engine's thread: what the sums do to the values. Returns those that are results as they are."""
        kept = [one for one in summed if one.part.key not in self.unkept]
        for one in kept:
            if 0 < one.averaging < one.count:
                raise CollectiveMismatch(
                    f"of the {one.count} workers that gave a value for key {one.part.key!r} {one.averaging} want an"
                    " average and the others a sum: say the same everywhere, in a Trainer by step() on all workers or"
                    " step(batch_size) on all"
                )
        with self.lock:
            if numbers is not None:
                self._copy_numbers(numbers)
            pushed = [one for one in kept if one.count]
            if pushed:
                self._local.push([one.part.key for one in pushed], [_in_kind(one) for one in pushed])
            wanted = [one for one in kept if one.part.places and (self._has_updater or not one.count)]
            if wanted:
                self._local.pull([one.part.key for one in wanted], out=[list(one.part.places) for one in wanted])
        pulled = {one.part.key for one in wanted}
        return [one for one in summed if one.part.key not in pulled]

    def _copy_numbers(self, numbers: Mapping[str, Any]) -> None:
        assert self._own is not None
        for name, number in numbers.items():
            setattr(self._own, name, number)
        self._own.rescale_grad = 1.0  # each worker has multiplied its own, as another may have another


def after(future: Future[Any], do: Callable[[], Any]) -> Future[Any]:
    """A future of what `do` returns, called when another one is done: at once if it is, else on the engine's thread."""
    result: Future[Any] = Future()

    def call(_: Future[Any]) -> None:
        try:
            result.set_result(do())
        except Exception as error:  # noqa: BLE001 (whoever waits for it is told)
            result.set_exception(error)

    future.add_done_callback(call)
    return result


def _in_kind(one: Summed) -> Any:
    return one.tensor.to(one.part.dtype)
