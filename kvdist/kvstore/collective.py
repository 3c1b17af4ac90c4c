"""The stores ``collective`` and its other names: a local store on every worker, whose contributions are sums over all.

A call checks its arguments and hands the engine a single operation for all its keys; what follows from the sums happens
on the engine's thread, in the order of the calls. Invariants:

* All workers make the same calls with the same keys, in the same order. A worker without a gradient gives None; it
  still makes the call.
* The values are the same on all workers because the sums are.
* A key that `leave_unkept` has named has no value in the store: `pushpull` gives its sum to the caller alone.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from kvdist.collective.engine import ALL_RANKS, CollectiveEngine
from kvdist.collective.signature import ASIDE
from kvdist.core.worker.requests import KeyInfo
from kvdist.errors import CollectiveMismatch
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.allreduce import KeyAllReduce, KeySum, Ranks, Summed, as_tensor, dtype_of, memory_of, write
from kvdist.kvstore.backend import Ability, Lending, PushPull, resolved
from kvdist.kvstore.keys import Fresh, KeyArrays, alone, is_sparse
from kvdist.kvstore.local import LocalBackend
from kvdist.kvstore.placement import Devices
from kvdist.kvstore.rowsparse import LazyRows
from kvdist.kvstore.values import Key, Keys, UpdaterFunction, Value
from kvdist.naming import minority_first, name_of
from kvdist.optimizer.base import LIVE, Optimizer
from kvdist.optimizer.compression import Half

if TYPE_CHECKING:
    from kvdist.kvstore.compression import StoreCompression

ROWS_ADVICE = (
    "tables of rows need servers, which this store does not have: use 'hybrid', which keeps them on servers and sums"
    " everything else without, or 'dist'"
)


class CollectiveBackend(LocalBackend):
    """The same values on every worker.

    Args:
        type_name: name by which the store was created.
        engine: this process as a rank.
        leave: called when the store is closed.
        number: number of the group of ranks that share the store.
        store: number of the store among those of the engine, the same on all ranks.
        kernels: kernels that update values on the host.
        devices: GPUs that the store uses.
        updates: whether `set_optimizer` is for this store; else the workers update.
        predivide: divisor of values before they are summed, and factor of sums.
    """

    reporting = property(attrgetter("_ranks.reporting"))
    reduce = property(attrgetter("_ranks.reduce"))

    def __init__(
        self,
        type_name: str,
        engine: CollectiveEngine,
        leave: Callable[[], None] = lambda: None,
        *,
        number: int = ALL_RANKS,
        store: int = 0,
        kernels: Kernels = REFERENCE,
        devices: Devices | None = None,
        updates: bool = False,
        predivide: float = 1.0,
    ) -> None:
        self._ranks: Ranks = Ranks(engine, number, store)
        super().__init__(type_name, kernels, devices, self._ranks.rank, self._ranks.num_workers)
        abilities = {Ability.UPDATER, Ability.COMPRESSION, Ability.STATES}
        self.abilities = frozenset(abilities | {Ability.OPTIMIZER} if updates else abilities)
        self.lock = threading.RLock()
        self._leave = leave
        self._predivide = predivide
        self._types: dict[Key, tuple[torch.dtype, torch.dtype]] = {}
        """Key → the type of its values, and the type in which they travel."""
        self._unkept: set[Key] = set()
        """Keys whose sums go to the callers alone."""
        self._optimizer: Optimizer | None = None
        """The optimizer whose numbers the user may change; a copy of it updates the values."""
        self._last: Future[Any] = resolved(None)
        """Future of the call that was begun last: the values have all calls when it is done."""

    @property
    def optimizer(self) -> Optimizer | None:
        return self._optimizer

    def num_dead_nodes(self) -> int:
        return int(self._ranks.has_lost)

    # Keys.

    def declare(self, given: KeyArrays) -> None:
        self._broadcast(self._agreed(given), {})

    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        self._agreed(given)
        with self.reporting():
            places = {info.key: arrays for info, arrays in self.keys.writable(values.pairs(key, out))}
        self._quiesce()
        self._broadcast([(one, arrays[0]) for one, arrays in given], places)

    def _agreed(self, given: KeyArrays) -> list[tuple[Key, Any]]:
        """Enter new keys, which all workers declare alike, and return them with their first values.

        Raises:
            InitMismatch: workers declare different keys, or a key has been declared otherwise before.
            TypeError, ValueError: a value cannot be the first value of a key.
        """
        with self.reporting():
            for one, arrays in given:
                if any(isinstance(array, LazyRows) or is_sparse(array) for array in arrays):
                    raise TypeError(f"{name_of(one)}: {ROWS_ADVICE}")
            fresh = self.keys.undeclared(given)
            if self.compression is not None:
                self.compression.require((one, dtype) for one, _, _, dtype, _ in fresh)
        if fresh:
            self._ranks.agree("\n".join(_declaration(new) for new in fresh), first_difference)
        for new in fresh:
            one, first, _, dtype, _ = new
            wire = dtype if self.compression is None else self.compression.sent_as(one, dtype)
            self._types[one] = dtype_of(dtype.label), dtype_of(wire.label)
            self.keys.add(alone(new), first)
        return [(one, first) for one, first, *_ in fresh]

    def _broadcast(self, firsts: Sequence[tuple[Key, Any]], places: Mapping[Key, Sequence[Any]]) -> None:
        """Write the values of rank 0 into the store and into places."""
        tensors, memories = [], []
        for one, first in firsts:
            tensor, targets = as_tensor(first), [memory_of(place) for place in places.get(one, ())]
            memory = targets[0] if targets else None
            if memory is None or memory.dtype is not tensor.dtype:
                tensors.append(tensor.clone(memory_format=torch.contiguous_format))
            else:
                tensors.append(memory.copy_(tensor))
            memories.append(targets)
        self._ranks.broadcast(tensors)
        for (one, _), tensor, targets in zip(firsts, tensors, memories, strict=True):
            for place, memory in zip(places.get(one, ()), targets, strict=True):
                write(place, memory, tensor)
            if one not in self._unkept:
                self._keep(self.keys[one], tensor)

    def _keep(self, info: KeyInfo, tensor: torch.Tensor) -> None:
        bits = values.read_bits(tensor)
        with self.lock:
            if info.key in self.entries:
                self.entries[info.key].load(bits)
            else:
                self.entries[info.key] = self.new_value(info, self.keys.like(info, bits))

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        self._unkept.update(one for one in keys if one not in self.keys)

    # Values.

    def transfer(self, call: PushPull) -> Future[Any]:
        if not call.pushes:
            return self._pull(call)
        if call.options.is_weighted:
            self.require_able(Ability.WEIGHTS)
        with self.reporting():
            matched = self._matched(call)
        parts = [KeySum(info, *self._types[info.key], arrays, places) for info, arrays, places in matched]
        optimizer, average = self._optimizer, bool(call.options.average)
        numbers = None if optimizer is None else {name: getattr(optimizer, name) for name in LIVE}
        weight = 1.0 if optimizer is None else float(optimizer.rescale_grad)

        def then(sums: list[Summed]) -> list[Summed]:
            return self._take(sums, numbers)

        keeps = call.pulls and call.lending is Lending.EVERYTHING
        future = self._last = self._ranks.submit(KeyAllReduce(parts, average, then, weight, self._predivide, keeps))
        if call.lending is Lending.NOTHING:
            future.add_done_callback(self.note_failed)
        return future

    def _matched(self, call: PushPull) -> list[tuple[KeyInfo, list[Any], list[Any]]]:
        """Check a push: keys with the arrays of this worker, and those for the sum."""
        if call.pulls and call.out is None and not holds_rows(call.value):
            return [(info, arrays, arrays) for info, arrays in self.keys.writable(values.pairs(call.key, call.value))]
        pushed = self.keys.contributed(values.pairs(call.key, call.value), self.devices)
        if not call.pulls:
            return [(info, arrays, []) for info, arrays in pushed]
        out = self.keys.writable(values.pairs(call.key, call.value if call.out is None else call.out))
        return [(info, arrays, places) for (info, arrays), (_, places) in zip(pushed, out, strict=True)]

    def _pull(self, call: PushPull) -> Future[Any]:
        """Write values into `out`, or new arrays, once all earlier calls are done."""
        for one in values.keys(call.key):
            self.keys[one]  # raises KeyNotInitialised
            if one in self._unkept:
                raise ValueError(
                    f"{name_of(one)} belongs to a Trainer: pushpull returns its sums, and the store does not keep them"
                )
        read = self.reading(call)

        def hand_out() -> Any:
            with self.lock:
                return read()

        return after(self._last, hand_out)

    def _take(self, sums: list[Summed], numbers: Mapping[str, Any] | None) -> list[Summed]:
        """Change values by sums, and return the sums that are results as they are. Called on the engine's thread."""
        kept = [one for one in sums if one.part.info.key not in self._unkept]
        if not kept:
            return sums
        for one in kept:
            if 0 < one.averaging < one.count:
                raise CollectiveMismatch(
                    f"{one.averaging} of the {one.count} workers with a value for {one.part.info.name} ask for an"
                    " average and the others for a sum: pass the same average on all workers (in a Trainer: step() on"
                    " all workers, or step(batch_size) on all)"
                )
        with self.lock:
            if numbers is not None and self.updaters is not None:
                for name, number in numbers.items():
                    setattr(self.updaters.optimizer, name, number)
                self.updaters.optimizer.rescale_grad = 1.0  # each worker has multiplied by its rescale_grad already
            self.contribute([(one.part.info, [one.tensor.to(one.part.dtype)]) for one in kept if one.count])
            updates = self.updaters is not None or self.function is not None
            pulled = [one.part for one in kept if one.part.places and (updates or not one.count)]
            self.write_to([(part.info, part.places) for part in pulled])
        written = {part.info.key for part in pulled}
        return [one for one in sums if one.part.info.key not in written]

    # All workers together.

    def meet(self, timeout: float | None = None, statement: str | None = None) -> None:
        if statement is None:
            self._ranks.barrier(timeout)
        else:
            self._ranks.agree(statement)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self._ranks.agree(f"the optimizer {optimizer.describe()}")
        with self.lock:
            super().set_optimizer(optimizer.twin())
        self._optimizer = optimizer

    def set_updater(self, function: UpdaterFunction) -> None:
        self._quiesce()
        with self.lock:
            super().set_updater(function)
        self._optimizer = None

    def require_compression(self, chosen: StoreCompression) -> None:
        if not isinstance(chosen.compression.codec, Half):
            raise ValueError(
                f"the store {self.type!r} sums while values travel, so it compresses by 'fp16' or 'bf16' alone, not by"
                f" {chosen.compression}; 'dist' does the others"
            )

    # The store.

    def close(self, wait: bool, failure: str = "") -> None:  # the engine tells it
        """Leave the store when all calls are done. Raises the error of a lost push."""
        with contextlib.ExitStack() as stack:
            stack.callback(super().close, wait)
            if wait:
                wait_for([self._last])
            self._leave()
            if self.errors:
                raise self.errors.popleft()

    def _quiesce(self) -> None:
        """Wait until the values have all calls, and raise the first error of a push."""
        wait_for([self._last])
        if self.errors:
            raise self.errors.popleft()


def _declaration(new: Fresh) -> str:
    """The declaration of a key: a text to compare, then a text for people, as names may differ."""
    one, _, shape, dtype, _ = new
    kind = f"{dtype.label} of shape {shape}"
    return f"{one!r}: {kind}{ASIDE}{name_of(one)}: {kind}"


def first_difference(all_said: list[str]) -> str:
    """The sentence for workers that have declared different keys, a line per key; '' where only names differ."""
    lines = itertools.zip_longest(*(said.split("\n") for said in all_said), fillvalue="no further key")
    differing = next((one for one in lines if len({line.partition(ASIDE)[0] for line in one}) > 1), None)
    if differing is None:
        return ""
    shown = enumerate(line.rpartition(ASIDE)[2] for line in differing)
    said = "; ".join(f"{who}: {line}" for who, line in minority_first(shown))
    return f"workers declared different keys: {said}. All must declare the same ones in the same order"


def after(future: Future[Any], do: Callable[[], Any]) -> Future[Any]:
    """A future of the result of `do`, which runs when another future is done: now, or later on the engine's thread.

    It cannot be cancelled.
    """
    result: Future[Any] = Future()
    result.set_running_or_notify_cancel()

    def call(_: Future[Any]) -> None:
        try:
            result.set_result(do())
        except Exception as error:  # noqa: BLE001 (who waits for it gets it)
            result.set_exception(error)

    future.add_done_callback(call)
    return result


def holds_rows(value: Value) -> bool:
    """Whether a value, or a value in a list, is rows."""
    return any(map(holds_rows, value)) if isinstance(value, (list, tuple)) else is_sparse(value)
