"""Sums over the ranks of a collective job, and what else ranks exchange: statements, rank 0's values, barriers.

Invariants:

* All keys of a call are a single operation, and so a single round.
* With them travels, for each key, how many ranks have a value for it, and how many of those want an average: a result
  is an average if all ranks that have a value want an average, which divides by the number of all workers.
* Sums are computed in the memory of results: in place they cost no pass beside those of the engine, but for the
  division of averages.
* Arguments are not written, unless they are places of results.
"""

from __future__ import annotations

import contextlib
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from kvdist.collective.engine import ALL_RANKS, CollectiveEngine
from kvdist.collective.operations import AllGather, AllReduce, BarrierOperation, Broadcast, Operation
from kvdist.collective.signature import ASIDE
from kvdist.core.worker.requests import KeyInfo
from kvdist.errors import BarrierTimeout, CollectiveError, InitMismatch, KvdistError
from kvdist.kvstore import values
from kvdist.kvstore.backend import Reduction
from kvdist.naming import NamedKey, who_says_what
from kvdist.reduce_op import Sum

KEYS_NAMED_MAX = 8
"""Keys that are named where people read of a call; of more, the first and the last."""


@dataclass(frozen=True, slots=True)
class KeySum:
    """A key of a call.

    Attributes:
        info: the key, as all ranks declared it.
        dtype: type of its values.
        wire: type in which they travel; `dtype` where they are not compressed.
        given: arrays of this rank, an array per device; none for no gradient.
        places: arrays that get the sum; empty for the store alone.
    """

    info: KeyInfo
    dtype: torch.dtype
    wire: torch.dtype
    given: Sequence[Any]
    places: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Summed:
    """The sum of a key, on the engine's thread.

    Attributes:
        part: the key.
        tensor: the sum, or the average.
        count: how many ranks had a value; the tensor means nothing for 0.
        averaging: how many of them wanted an average; the tensor is an average if all did.
    """

    part: KeySum
    tensor: Tensor
    count: int
    averaging: int


class KeyAllReduce(AllReduce):
    """The keys of a call, summed over the ranks.

    Args:
        parts: the keys, in an order that is the same on all ranks.
        average: whether this rank wants each sum divided by the number of ranks.
        weight: factor of this rank's values before the sum.
        predivide: divisor of values before the sum, and factor of the sum.
        keeps: whether arrays may be read until the operation is done; else they are copied now.
        then: called with the sums, on the engine's thread, before the places are written; it returns the sums that it
            has not written itself.
    """

    def __init__(
        self,
        parts: Sequence[KeySum],
        average: bool,
        then: Callable[[list[Summed]], list[Summed]],
        weight: float = 1.0,
        predivide: float = 1.0,
        keeps: bool = False,
    ) -> None:
        self._parts = parts
        self._then = then
        home = _home(parts)
        self._targets = [[memory_of(place) for place in part.places] for part in parts]
        pairs = [self._pair(i, home, weight, keeps) for i in range(len(parts))]
        has = [float(bool(part.given)) for part in parts]
        counts = torch.tensor([has, [average * one for one in has]], dtype=torch.float32, device=home)
        inputs, outputs = zip(*pairs, (counts, counts), strict=True)
        super().__init__("", inputs, outputs, Sum, 1 / predivide, predivide, _keys_of(parts))

    def finish(self) -> Any:
        *sums, totals = super().finish()
        counts, averaging = ([round(count) for count in row] for row in totals.tolist())
        summed = [Summed(*one) for one in zip(self._parts, sums, counts, averaging, strict=True)]
        if self._size > 1:
            _divide([one.tensor for one in summed if one.averaging == one.count], self._size)
        targets = {part.info.key: memories for part, memories in zip(self._parts, self._targets, strict=True)}
        for one in self._then(summed):
            for place, memory in zip(one.part.places, targets[one.part.info.key], strict=True):
                write(place, memory, one.tensor)

    def _pair(self, number: int, home: torch.device, weight: float, keeps: bool) -> tuple[Tensor, Tensor]:
        """Return the tensor to send of a key, and the tensor for its sum: the same tensor where no copy is needed."""
        part, targets = self._parts[number], self._targets[number]
        target = targets[0] if targets else None
        if target is not None and _is_in_place(part, target, home) and weight == 1.0:
            return target, target  # the usual case, told without a look at what is given
        given = [as_tensor(array).to(part.dtype) for array in part.given]
        fits = target is not None and target.device == home and part.wire is part.dtype is target.dtype
        if target is None or not fits or _overlaps(target, given[1:]):
            target = torch.empty(part.info.shape, dtype=part.wire, device=home)
        if not given:
            return target.zero_(), target
        first = given[0]
        if len(given) == 1 and weight == 1.0 and first.device == home and part.wire is part.dtype:
            if _is_same(first, target):
                return target, target
            if keeps:
                return first.contiguous(), target
        _add_up(given, weight, target)
        return target, target


def as_tensor(value: Any) -> Tensor:
    """A value as a tensor, to be read: without a copy where its memory can be shown."""
    if isinstance(value, Tensor):
        return value.detach()
    shape, dtype = values.describe(value)
    made: Tensor = values.like("torch", shape, dtype, values.read_bits(value))
    return made


def dtype_of(label: str) -> torch.dtype:
    """The torch dtype of an element type that a key may have."""
    found: torch.dtype = getattr(torch, label)
    return found


def _keys_of(parts: Sequence[KeySum]) -> str:
    """The keys of a call, another text for other keys; then, for people alone, the names that they have besides."""
    keys = [part.info.key for part in parts]
    listed = _listed([repr(key) for key in keys])
    if not any(isinstance(key, NamedKey) for key in keys):
        return listed
    names = [key.name if isinstance(key, NamedKey) else repr(key) for key in keys]
    return f"{listed}{ASIDE}{', '.join(names) if len(names) <= KEYS_NAMED_MAX else f'{names[0]} to {names[-1]}'}"


def _listed(keys: Sequence[str]) -> str:
    if len(keys) == 1:
        return f"key {keys[0]}"
    if len(keys) <= KEYS_NAMED_MAX:
        return f"keys {', '.join(keys)}"
    return f"{len(keys)} keys, {keys[0]} to {keys[-1]}, checksum {zlib.crc32(','.join(keys).encode()):08x}"


def _home(parts: Sequence[KeySum]) -> torch.device:
    """Where a call's keys are summed: on the device of the first tensor, which is the host's for arrays."""
    arrays = [array for part in parts for array in (*part.places, *part.given)]
    return arrays[0].device if arrays and isinstance(arrays[0], Tensor) else torch.device("cpu")


def memory_of(place: Any) -> Tensor | None:
    """The memory of a place, to be written by any thread; None where it has no order that a tensor could show.

    Autograd learns now, and only now, that it changes: later writes belong to this call.
    """
    if isinstance(place, Tensor):
        if not place.is_contiguous():
            return None
        increment_version(place)
        return place.data
    if type(place) is np.ndarray and place.flags.c_contiguous and place.dtype.isnative:
        return torch.from_numpy(place)
    shape, dtype = values.describe(place)
    bits = values.writable_bits(place, dtype)
    if bits is None:
        return None
    shown: Tensor = values.like("torch", shape, dtype, bits)
    return shown


def write(place: Any, memory: Tensor | None, tensor: Tensor) -> None:
    """Write a result into a place; `memory` is its memory, None where no tensor can show it."""
    if memory is not None:
        if memory is not tensor and not _is_same(memory, tensor):
            memory.copy_(tensor)
    elif isinstance(place, Tensor):
        place.detach().copy_(tensor)
    else:
        dtype = values.describe(place)[1]
        values.write_bits(place, values.read_bits(tensor.to(dtype_of(dtype.label))), dtype)


def _is_in_place(part: KeySum, target: Tensor, home: torch.device) -> bool:
    """Whether the array of a single device is to become the sum, in memory that can be sent."""
    is_alone = len(part.given) == 1 and part.given[0] is part.places[0]
    return is_alone and part.wire is part.dtype is target.dtype and target.device == home


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of the same shape show the same memory in the same order."""
    return one.data_ptr() == other.data_ptr() and one.dtype is other.dtype and one.stride() == other.stride()


def _overlaps(target: Tensor, others: Sequence[Tensor]) -> bool:
    where = target.untyped_storage().data_ptr()
    return any(other.untyped_storage().data_ptr() == where for other in others)


def _add_up(given: Sequence[Tensor], weight: float, target: Tensor) -> None:
    """Write the sum over devices, times a weight, into `target`. A pass for each device, and a pass for a weight."""
    if weight != 1.0 and len(given) == 1 and target.dtype is given[0].dtype and target.device == given[0].device:
        torch.mul(given[0], weight, out=target)
        return
    whole = target if target.dtype is given[0].dtype else torch.empty_like(target, dtype=given[0].dtype)
    whole.copy_(given[0])
    for other in given[1:]:
        whole.add_(other.to(whole.device))
    if weight != 1.0:
        whole.mul_(weight)
    if whole is not target:
        target.copy_(whole)


def _divide(sums: Sequence[Tensor], count: int) -> None:
    """Turn sums into averages, in place: a single pass. Integers are cut toward zero, as in Horovod."""
    floating = [tensor for tensor in sums if tensor.is_floating_point()]
    if floating:
        torch._foreach_mul_(floating, 1 / count)
    for tensor in sums:
        if not tensor.is_floating_point():
            tensor.div_(count, rounding_mode="trunc")


STATEMENT_BYTES_MAX = 8192
"""Bytes beyond these are not compared."""
SHOWN_MAX = 300
"""Characters of a statement in an error message."""


class Ranks:
    """The ranks of a store.

    Args:
        engine: this process as a rank.
        number: number of their group.
        store: number of the store among those of the engine, the same on all ranks.
    """

    def __init__(self, engine: CollectiveEngine, number: int = ALL_RANKS, store: int = 0) -> None:
        self._engine = engine
        self._number = number
        self._group = group = engine.group(number)
        self.rank = group.rank
        self.num_workers = group.size
        self._root = group.ranks[0]
        self._store = store
        self._barrier_lock = threading.Lock()
        self._barrier: Future[Any] | None = None
        """A barrier that timed out; the other ranks may still come to it."""
        self._barriers = 0

    @property
    def has_lost(self) -> bool:
        """Whether an operation has failed because a rank is lost."""
        return self._group.loss is not None

    def submit(self, operation: Operation) -> Future[Any]:
        """Have the ranks do something together."""
        return self._engine.submit(operation, self._number)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Within it a caller's mistake is reported to the other ranks, which then do not wait for this rank."""
        try:
            yield
        except (TypeError, ValueError, KvdistError) as error:
            with contextlib.suppress(CollectiveError):  # then they know already
                self._engine.refuse(error, self._number)
            raise

    def agree(self, statement: str, what: Callable[[list[str]], str] | None = None) -> None:
        """See `KVStore.agree`; the text behind `ASIDE` is shown in place of the text before it, which is compared.

        `what` makes the sentence of all statements, which are not cut then; '' for none.
        """
        said = statement.encode()
        said = said if what is not None else said[:STATEMENT_BYTES_MAX]
        all_said = [one.decode(errors="replace") for one in self._gathered(said)]
        if len({one.partition(ASIDE)[0] for one in all_said} if what is None else set(all_said)) > 1:
            sentence = (what or _who_said_what)(all_said)
            if sentence:
                raise InitMismatch(sentence)

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        """New arrays like these: their sums or means over the ranks, or those of rank 0."""
        said = described(arrays)
        if how is Reduction.RANK_0:
            self.agree(f"values of rank 0: {said}")
            results = [values.zeros_like(array) for array in arrays]
            for result, array in zip(results, arrays, strict=True):
                result[...] = array.detach() if isinstance(array, Tensor) else array
            self.broadcast([as_tensor(result) for result in results])
            return results
        self.agree(f"{'exchange of bytes as' if how is Reduction.SUM else 'average of'} {said}")
        counts = how is not Reduction.MEAN_OF_OTHERS
        sums = [as_tensor(array) if counts else torch.zeros_like(as_tensor(array)) for array in arrays]
        share = torch.tensor([float(counts)], device=sums[0].device)
        self.submit(AllReduce("", [*sums, share], [*sums, share], Sum)).result()
        if how is not Reduction.SUM:
            nan = float("nan")
            sums = [one / share.to(one.dtype) if share.item() else torch.full_like(one, nan) for one in sums]
        return [
            one.to(array) if isinstance(array, Tensor) else one.numpy().reshape(array.shape)
            for one, array in zip(sums, arrays, strict=True)
        ]

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first rank; waits for it."""
        if tensors:
            self.submit(Broadcast("", tensors, tensors, self._root, 0)).result()

    def barrier(self, timeout: float | None) -> None:
        """See `KVStore.barrier`. The next call after a time-out waits for the same barrier."""
        with self._barrier_lock:
            if self._barrier is None:
                self._barriers += 1
                self._engine.board.set(self._note(self.rank), "here")
                self._barrier = self.submit(BarrierOperation())
            if not wait([self._barrier], timeout).done:
                missing = tuple(
                    rank for rank in range(self.num_workers) if not self._engine.board.check([self._note(rank)])
                )
                raise BarrierTimeout(
                    f"not all ranks came to the barrier within {timeout:g} s; missing are {list(missing)}", missing
                )
            passed, self._barrier = self._barrier, None
            passed.result()
            self._engine.board.delete_key(self._note(self.rank))

    def _note(self, rank: int) -> str:
        return f"barrier/{self._number}/{self._store}/{self._barriers}/{rank}"

    def _gathered(self, said: bytes) -> list[bytes]:
        """The text of each rank."""
        length = torch.tensor([len(said)], dtype=torch.int64, device="cpu")
        text = torch.from_numpy(np.frombuffer(said, np.uint8).copy())
        lengths, texts = self.submit(AllGather("", [length, text])).result()
        parts = torch.split(texts, lengths.tolist())
        return [part.numpy().tobytes() for part in parts]


def described(arrays: Sequence[Any]) -> str:
    """The dtypes and shapes of arrays in words."""
    found = [values.describe(array) for array in arrays]
    return "; ".join(f"{dtype.label} of shape {shape}" for shape, dtype in found)


def _who_said_what(all_said: Sequence[str]) -> str:
    shown = [text.rpartition(ASIDE)[2] for text in all_said]
    said = who_says_what((rank, text[:SHOWN_MAX] or "nothing") for rank, text in enumerate(shown))
    return f"the workers do not agree. {said}. Every worker must run the same program on the same model"
