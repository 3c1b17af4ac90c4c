"""The stores ``collective`` and its other names: every worker has a copy of the values, and sums need no server.

A call checks and hands the engine one operation for all its keys; what follows from the sums happens on the engine's
thread, in the order of the calls. Invariants:

* All workers make the same calls with the same keys, in the same order. A worker without a gradient gives None; it
  still makes the call.
* Each worker keeps the values in a store within its process. They are the same everywhere because the sums are.
* A key that `leave_unkept` has named has no value here: `pushpull` gives its sum to the caller, and copies nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

import torch

from kvdist.collective.engine import ALL_RANKS, CollectiveEngine
from kvdist.collective.signature import ASIDE
from kvdist.core.worker.requests import KeyInfo
from kvdist.errors import CollectiveMismatch
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.allreduce import (
    KeyAllReduce,
    KeySum,
    Ranks,
    Summed,
    as_tensor,
    dtype_of,
    memory_of,
    write,
)
from kvdist.kvstore.backend import (
    Ability,
    Backend,
    Lending,
    LoadJob,
    PushPull,
    Reduction,
    SaveJob,
    resolved,
)
from kvdist.kvstore.keys import Fresh, KeyArrays, KeyTable, alone, as_dense, is_sparse
from kvdist.kvstore.local import LocalBackend
from kvdist.kvstore.placement import Devices, Matched
from kvdist.kvstore.rowsparse import LazyRows
from kvdist.kvstore.values import Key, Keys, UpdaterFunction, Value
from kvdist.naming import minority_first, name_of
from kvdist.optimizer.base import LIVE, Optimizer
from kvdist.optimizer.compression import Half
from kvdist.optimizer.states import SliceState

if TYPE_CHECKING:
    from kvdist.kvstore.checkpoints import Checkpoint, CheckpointFuture, Held, WorkerSaving
    from kvdist.kvstore.compression import StoreCompression

ROWS_ADVICE = (
    "tables of rows need servers, which this store does not have: use 'hybrid', which keeps them on servers and sums"
    " everything else without, or 'dist'"
)

Agree = Callable[[str, Callable[[list[str]], str]], None]
"""Compares what all workers say; where they differ, the second argument makes the sentence, or '' if they may."""


class CollectiveBackend(Backend):
    """A copy of the values on every worker.

    Args:
        type_name: the name by which the store was created.
        engine: this process as a rank.
        leave: called when the store is closed.
        number: of the group of ranks that share the store.
        store: unlike that of the other stores of this engine, and the same on all ranks.
        kernels: what updates values on the host.
        devices: the GPUs that it uses.
        updates: whether `set_optimizer` is for this store; else the workers update.
        predivide: by what values are divided before they are summed, and multiplied after it.
    """

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
        self._ranks = ranks = Ranks(engine, number, store)
        super().__init__(type_name, ranks.rank, ranks.num_workers, devices=devices, kernels=kernels)
        abilities = {Ability.UPDATER, Ability.COMPRESSION, Ability.STATES}
        self.abilities = frozenset(abilities | {Ability.OPTIMIZER} if updates else abilities)
        self._leave = leave
        self.keys: CollectiveKeys = CollectiveKeys(self)
        self._local = LocalBackend("device", kernels, self.devices)
        self.arrays: ReplicatedValues = ReplicatedValues(self, ranks, self._local, predivide)
        self._saving: WorkerSaving | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        return self.arrays.optimizer

    def num_dead_nodes(self) -> int:
        return int(self._ranks.has_lost)

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        return self._ranks.reporting()

    # Keys.

    def declare(self, given: KeyArrays) -> None:
        with self.reporting():
            fresh = self.keys.fresh(given)
        self.arrays.place([(one, array, []) for one, array in self.keys.agreed(fresh, self._ranks.agree)])

    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        with self.reporting():
            fresh = self.keys.fresh(given)
        self.keys.agreed(fresh, self._ranks.agree)
        with self.reporting():
            places = {info.key: own for info, own in self.keys.writable(values.pairs(key, out))}
        self._wait_for_sums()
        self.arrays.place([(one, arrays[0], places.get(one, [])) for one, arrays in given])

    # All workers together.

    def meet(self, timeout: float | None = None, statement: str | None = None) -> None:
        if statement is None:
            self._ranks.barrier(timeout)
        else:
            self._ranks.agree(statement)

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        return self._ranks.reduce(arrays, how)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self._ranks.agree(f"the optimizer {optimizer.describe()}")
        self.arrays.update_by(optimizer)

    def set_updater(self, function: UpdaterFunction) -> None:
        self._wait_for_sums()
        self.arrays.call(function)

    def require_compression(self, chosen: StoreCompression) -> None:
        if not isinstance(chosen.compression.codec, Half):
            raise ValueError(
                f"the store {self.type!r} sums while values travel, so it compresses by 'fp16' or 'bf16' alone, not by"
                f" {chosen.compression}; 'dist' does the others"
            )

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        self.arrays.unkept.update(one for one in keys if one not in self.keys)

    # Files.

    def states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        self._wait_for_sums()
        with self.arrays.lock:
            return self._local.states(keys)

    def replace_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        self._wait_for_sums()
        with self.arrays.lock:
            self._local.replace_states(keys, states)

    def save(self, job: SaveJob) -> CheckpointFuture:
        self._wait_for_sums()
        return self._files().save(job)

    def load(self, job: LoadJob) -> Checkpoint:
        self._wait_for_sums()
        if not job.values:
            self.adopt_optimizer(self._files().saved_optimizer(job))
        # Not under the lock: the engine's thread takes it for what other threads push, and only then lets ranks agree.
        files = self._files()
        checkpoint, held, found = files.read(job)
        with self.arrays.lock:
            self._local.take(files.restore(held, found))
        return checkpoint

    def _files(self) -> WorkerSaving:
        if self._saving is None:
            from kvdist.kvstore.checkpoints import WorkerSaving

            self._saving = WorkerSaving(self._ranks, self._held, lambda: self._local.arrays.updaters)
            self._saving.position = lambda: self.position()
        return self._saving

    def _held(self) -> list[Held]:
        self._local.samples = self.samples
        with self.arrays.lock:
            return self._local.held()

    def close(self, wait: bool, failure: str = "") -> None:  # the engine tells it
        """Leave the store, once what was begun is done. Raises the error of a lost push."""
        with contextlib.ExitStack() as stack:
            if self._saving is not None:
                stack.callback(self._saving.close, wait)
            if wait:
                wait_for([self.arrays.last])
            self._local.close(wait)
            self._leave()
            if self.errors:
                raise self.errors.popleft()

    def _wait_for_sums(self) -> None:
        """Wait until the sums that were begun are done, and raise the first error of one."""
        wait_for([self.arrays.last])
        if self.errors:
            raise self.errors.popleft()


class CollectiveKeys(KeyTable):
    """The keys of one store, and how their values travel.

    Args:
        backend: the store's: has its GPUs and compression.
    """

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.types: dict[Key, tuple[torch.dtype, torch.dtype]] = {}
        """Of a key's values, and that in which they travel."""
        self._backend = backend

    def fresh(self, given: KeyArrays) -> Sequence[Fresh]:
        """The new keys, with what this worker says of them.

        Raises:
            InitMismatch: one has been declared otherwise before.
            TypeError, ValueError: a value cannot be a key's.
        """
        for one, arrays in given:
            if any(isinstance(array, LazyRows) or is_sparse(array) for array in arrays):
                raise TypeError(f"{name_of(one)}: {ROWS_ADVICE}")
        fresh = self.undeclared(given)
        if self._backend.compression is not None:
            self._backend.compression.require((one, dtype) for one, _, _, dtype, _ in fresh)
        return fresh

    def agreed(self, fresh: Sequence[Fresh], agree: Agree) -> list[tuple[Key, Any]]:
        """Know these, which all workers have declared alike when this returns; they, with their values.

        Raises:
            InitMismatch: workers have declared different ones.
        """
        if fresh:
            agree("\n".join(_declaration(new) for new in fresh), first_difference)
        compression = self._backend.compression
        for new in fresh:
            one, first, _, dtype, _ = new
            self.add(alone(new), first)
            wire = dtype if compression is None else compression.sent_as(one, dtype)
            self.types[one] = dtype_of(dtype.label), dtype_of(wire.label)
        return [(one, first) for one, first, *_ in fresh]

    def contributed(self, key: Keys, value: Value) -> Matched:
        """The keys of a call with what is given for them, which fits; rows as arrays."""
        pairs = values.pairs(key, value)
        return self.matched(
            [(one, [as_dense(one, array, self._backend.devices) for array in arrays]) for one, arrays in pairs]
        )


def _declaration(new: Fresh) -> str:
    """What a worker says of a key: what is compared, then what people read, as names may differ."""
    one, _, shape, dtype, _ = new
    kind = f"{dtype.label} of shape {shape}"
    return f"{one!r}: {kind}{ASIDE}{name_of(one)}: {kind}"


def first_difference(all_said: list[str]) -> str:
    """The sentence for workers that have declared different keys, one a line; '' where only names differ."""
    lines = itertools.zip_longest(*(said.split("\n") for said in all_said), fillvalue="no further key")
    differing = next((one for one in lines if len({line.partition(ASIDE)[0] for line in one}) > 1), None)
    if differing is None:
        return ""
    shown = enumerate(line.rpartition(ASIDE)[2] for line in differing)
    said = "; ".join(f"{who}: {line}" for who, line in minority_first(shown))
    return f"workers declared different keys: {said}. All must declare the same ones in the same order"


class ReplicatedValues:
    """This worker's copy of the values.

    Args:
        backend: the store's: has its keys, and takes errors of pushes without a future.
        ranks: with whom sums are made.
        local: has the values.
        predivide: by what values are divided before they are summed, and multiplied after it.
    """

    def __init__(self, backend: CollectiveBackend, ranks: Ranks, local: LocalBackend, predivide: float = 1.0) -> None:
        self.lock = threading.RLock()
        self.unkept: set[Key] = set()
        """Keys whose sums go to the callers alone."""
        self.optimizer: Optimizer | None = None
        """The one whose numbers the user may change; the values are updated by a copy of it."""
        self.last: Future[Any] = resolved(None)
        """What was begun last: the values are those of now when it is done."""
        self._backend = backend
        self._keys = backend.keys
        self._ranks = ranks
        self._local = local
        self._predivide = predivide
        self._own: Optimizer | None = None
        self._has_updater = False

    def transfer(self, call: PushPull) -> Future[Any]:
        """Push and pull; a future of what the call returns."""
        if not call.pushes:
            return self._pull(call)
        if call.options.is_weighted:
            self._backend.require_able(Ability.WEIGHTS)
        with self._ranks.reporting():
            given = self._matched(call)
        future = self._begin(given, bool(call.options.average), call.pulls and call.lending is Lending.EVERYTHING)
        if call.lending is Lending.NOTHING:
            future.add_done_callback(self._backend.note_failed)
        return future

    def place(self, given: Sequence[tuple[Key, Any, list[Any]]]) -> None:
        """Have rank 0's values in the store and in places."""
        memories = [[memory_of(place) for place in places] for _, _, places in given]
        tensors = []
        for (_, first, _), (memory, *_) in zip(given, [one or [None] for one in memories], strict=True):
            own = as_tensor(first)
            if memory is None or memory.dtype is not own.dtype:
                tensors.append(own.clone(memory_format=torch.contiguous_format))
            else:
                tensors.append(memory.copy_(own))
        self._ranks.broadcast(tensors)
        kept, arrays = [], []
        for (one, _, places), targets, tensor in zip(given, memories, tensors, strict=True):
            for place, memory in zip(places, targets, strict=True):
                write(place, memory, tensor)
            if one not in self.unkept:
                kept.append(one)
                arrays.append(self._keys.like(self._keys[one], values.read_bits(tensor)))
        with self.lock:
            if kept:
                first = values.pairs(kept, arrays)
                self._local.declare(first)
                self._local.arrays.replace(first)

    def update_by(self, optimizer: Optimizer) -> None:
        """From now on sums are gradients."""
        own = optimizer.twin()
        with self.lock:
            self._local.set_optimizer(own)
        self.optimizer, self._own, self._has_updater = optimizer, own, True

    def call(self, updater: UpdaterFunction) -> None:
        """From now on a function changes the values."""
        with self.lock:
            self._local.set_updater(updater)
        self.optimizer, self._own, self._has_updater = None, None, True

    def _matched(self, call: PushPull) -> list[tuple[KeyInfo, list[Any], list[Any]]]:
        """The keys of a push, what is given for each, and where its sum goes."""
        if not call.pulls:
            return [(info, arrays, []) for info, arrays in self._keys.contributed(call.key, call.value)]
        if call.out is None and not holds_rows(call.value):
            return [(info, arrays, arrays) for info, arrays in self._keys.writable(values.pairs(call.key, call.value))]
        given = self._keys.contributed(call.key, call.value)
        out = self._keys.writable(values.pairs(call.key, call.value if call.out is None else call.out))
        return [(info, arrays, places) for (info, arrays), (_, places) in zip(given, out, strict=True)]

    def _pull(self, call: PushPull) -> Future[Any]:
        """Write values into `out`, or new arrays, once what was begun before is done."""
        for one in values.keys(call.key):
            self._keys[one]  # which says so if there is none
            if one in self.unkept:
                raise ValueError(
                    f"{name_of(one)} belongs to a Trainer: pushpull returns its sums, and the store does not keep them"
                )
        places = None if call.out is None else self._keys.writable(values.pairs(call.key, call.out), call.skips_rows)
        local = self._local.arrays

        def hand_out() -> Any:
            with self.lock:
                if places is None:
                    return local.transfer(call).result()
                return local.write_to([(local[info.key], arrays) for info, arrays in places])

        return after(self.last, hand_out)

    def _begin(
        self, given: Sequence[tuple[KeyInfo, list[Any], list[Any]]], average: bool, keeps: bool = False
    ) -> Future[None]:
        """Have sums made, and then whatever follows from them."""
        parts = []
        for info, arrays, places in given:
            own, wire = self._keys.types[info.key]
            parts.append(KeySum(info.key, info.shape, own, arrays, places, wire))
        numbers = None if self.optimizer is None else {name: getattr(self.optimizer, name) for name in LIVE}
        weight = 1.0 if self.optimizer is None else float(self.optimizer.rescale_grad)

        def then(summed: list[Summed]) -> list[Summed]:
            return self._take(summed, numbers)

        summing = KeyAllReduce(parts, average, then, weight, self._predivide, keeps)
        self.last = self._ranks.submit(summing)
        return self.last

    def _take(self, summed: list[Summed], numbers: Mapping[str, Any] | None) -> list[Summed]:
        """On the engine's thread: what the sums do to the values. Returns the sums that are results as they are."""
        kept = [one for one in summed if one.part.key not in self.unkept]
        for one in kept:
            if 0 < one.averaging < one.count:
                raise CollectiveMismatch(
                    f"{one.averaging} of the {one.count} workers with a value for {name_of(one.part.key)} ask for an"
                    " average and the others for a sum: pass the same average on all workers (in a Trainer: step() on"
                    " all workers, or step(batch_size) on all)"
                )
        with self.lock:
            if numbers is not None:
                self._copy_numbers(numbers)
            pushed = [one for one in kept if one.count]
            if pushed:
                self._local.arrays.contribute(
                    self._local.arrays.matched([(one.part.key, [one.tensor.to(one.part.dtype)]) for one in pushed])
                )
            wanted = [one for one in kept if one.part.places and (self._has_updater or not one.count)]
            if wanted:
                self._local.arrays.write_to(
                    self._local.arrays.writable([(one.part.key, list(one.part.places)) for one in wanted])
                )
        pulled = {one.part.key for one in wanted}
        return [one for one in summed if one.part.key not in pulled]

    def _copy_numbers(self, numbers: Mapping[str, Any]) -> None:
        assert self._own is not None
        for name, number in numbers.items():
            setattr(self._own, name, number)
        self._own.rescale_grad = 1.0  # each worker has multiplied its own, as another may have another


def after(future: Future[Any], do: Callable[[], Any]) -> Future[Any]:
    """A future of what `do` returns, called when another one is done: at once if it is, else on the engine's thread.

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
    """Whether a value, or one in a list of them, is rows."""
    return any(map(holds_rows, value)) if isinstance(value, (list, tuple)) else is_sparse(value)
