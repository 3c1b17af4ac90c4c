"""What the ranks of a collective job tell each other beside their values: statements, what rank 0 has, who is there.

Every rank calls the same method at the same place of its program. Nothing here is a key of the store.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvdist.collective.engine import ALL_RANKS, CollectiveEngine
from kvdist.collective.operations import AllGather, AllReduce, BarrierOperation, Broadcast, Operation
from kvdist.collective.reduction import Sum
from kvdist.errors import BarrierTimeout, CollectiveError, InitMismatch, KvdistError
from kvdist.kvstore import values
from kvdist.kvstore.summing import as_tensor
from kvdist.kvstore.together import as_averaged, as_given, like

STATEMENT_BYTES_MAX = 8192
"""What is longer is cut and not compared."""
SHOWN_MAX = 300
"""Characters of a statement in an error message."""


class Ranks:
    """Some ranks, as one store talks to them.

    Args:
        engine: this process as a rank.
        number: of the group.
        store: unlike that of the other stores of this engine, and the same on all ranks.
    """

    def __init__(self, engine: CollectiveEngine, number: int = ALL_RANKS, store: int = 0) -> None:
        self._engine = engine
        self._number = number
        self._group = group = engine.group(number)
        self.rank = group.rank
        self.size = group.size
        self._root = group.ranks[0]
        self._store = store
        self._barrier_lock = threading.Lock()
        self._barrier: Future[Any] | None = None
        """One that timed out and that the others may still come to."""
        self._barriers = 0

    @property
    def has_lost(self) -> bool:
        """Whether something could not be done because a rank is gone."""
        return self._group.loss is not None

    def submit(self, operation: Operation) -> Future[Any]:
        """Have the ranks do something together."""
        return self._engine.submit(operation, self._number)

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """Within it this worker looks at what it was given: if that is wrong, the others hear of it and do not wait."""
        try:
            yield
        except (TypeError, ValueError, KvdistError) as error:
            with contextlib.suppress(CollectiveError):  # then they know already
                self._engine.refuse(error, self._number)
            raise

    def agree(self, statement: str, what: Callable[[list[str]], str] | None = None) -> None:
        """See `KVStore.agree`; `what` makes the sentence of all statements, which are not cut then."""
        said = statement.encode()
        said = said if what is not None else said[:STATEMENT_BYTES_MAX]
        all_said = [one.decode(errors="replace") for one in self._gathered(said)]
        if any(one != all_said[0] for one in all_said):
            raise InitMismatch(_who_said_what(all_said) if what is None else what(all_said))

    def average(self, value: Any, counts: bool) -> Any:
        """See `KVStore.average`."""
        with self.told():
            array = as_averaged(value)
            said = described([array])
        self.agree(f"average of {said}")
        result = as_tensor(array) if counts else torch.zeros_like(as_tensor(array))
        share = torch.tensor([float(counts)], device=result.device)
        self.submit(AllReduce("", [result, share], [result, share], Sum)).result()
        result = result / share.to(result.dtype) if share.item() else torch.full_like(result, float("nan"))
        return as_given(value, result.to(array) if isinstance(array, Tensor) else result.numpy().reshape(array.shape))

    def from_rank_0(self, arrays: Sequence[Any]) -> list[Any]:
        """See `KVStore.from_rank_0`."""
        with self.told():
            said = described(arrays)
        self.agree(f"values of rank 0: {said}")
        results = [like(array) for array in arrays]
        for result, array in zip(results, arrays, strict=True):
            result[...] = array.detach() if isinstance(array, Tensor) else array
        self.broadcast([as_tensor(result) for result in results])
        return results

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors by those of the first rank; waits for it."""
        if tensors:
            self.submit(Broadcast("", tensors, tensors, self._root, 0)).result()

    def barrier(self, timeout: float | None) -> None:
        """See `KVStore.barrier`. One that timed out is still to be passed: the next call waits for it again."""
        with self._barrier_lock:
            if self._barrier is None:
                self._barriers += 1
                self._engine.board.set(self._note(self.rank), "here")
                self._barrier = self.submit(BarrierOperation())
            if not wait([self._barrier], timeout).done:
                missing = tuple(rank for rank in range(self.size) if not self._engine.board.check([self._note(rank)]))
                raise BarrierTimeout(
                    f"not all ranks came to the barrier within {timeout:g} s; missing are {list(missing)}", missing
                )
            passed, self._barrier = self._barrier, None
            passed.result()
            self._engine.board.delete_key(self._note(self.rank))

    def _note(self, rank: int) -> str:
        return f"barrier/{self._number}/{self._store}/{self._barriers}/{rank}"

    def _gathered(self, said: bytes) -> list[bytes]:
        """What each rank said."""
        length = torch.tensor([len(said)], dtype=torch.int64)
        text = torch.from_numpy(np.frombuffer(said, np.uint8).copy())
        lengths, texts = self.submit(AllGather("", [length, text])).result()
        parts = torch.split(texts, lengths.tolist())
        return [part.numpy().tobytes() for part in parts]


def described(arrays: Sequence[Any]) -> str:
    """The dtypes and shapes of arrays in words."""
    found = [values.describe(array) for array in arrays]
    return "; ".join(f"{dtype.label} of shape {shape}" for shape, dtype in found)


def _who_said_what(all_said: Sequence[str]) -> str:
    said = "; ".join(f"worker-{rank} says: {text[:SHOWN_MAX] or 'nothing'}" for rank, text in enumerate(all_said))
    return f"the workers do not agree. {said}. Every worker must run the same program on the same model"
