"""`Join`: the steps of a trainer whose workers have different numbers of batches.

Invariants:

* Before each step every worker says on a store of its own whether it makes the step, is done, or has left by an error.
  So all know alike whether there is a step, and raise together if one has left.
* A worker that is done takes part without gradients. Where the workers update, it first takes the optimizer's numbers
  from the lowest rank that makes the step, because its own schedule has stopped: the weights stay equal.
"""

from __future__ import annotations

import contextlib
import enum
import zlib

import numpy as np

from kvdist.errors import KvdistError
from kvdist.kvstore.base import KVStore
from kvdist.naming import NamedKey
from kvdist.optimizer.base import Optimizer

STATE = NamedKey(0, "who makes the next step within trainer.join()")
NUMBERS = NamedKey(1, "the optimizer's numbers within trainer.join()")

CHANGING = ("learning_rate", "wd", "momentum", "beta1", "beta2")
"""The optimizer's numbers that may change where the workers update; not every rule has all."""


class NextStep(enum.IntEnum):
    """What a worker says before a step."""

    LEFT = -1
    DONE = 0
    STEPS = 1


class Join:
    """One `kvdist.Trainer.join` block.

    Args:
        store: one that nothing else uses, of the trainer's workers.
        live: the optimizer, where the workers update; None where the store does.
        keys: how many parameters there are.

    Raises:
        InitMismatch: the workers update with different numbers.
    """

    def __init__(self, store: KVStore, live: Optimizer | None, keys: int) -> None:
        self._store = store
        self._live = live
        self._keys = keys
        self._has_ended = False
        if live is not None:
            own = ", ".join(f"{name} {vars(live)[name]!r}" for name in self._fields)
            digest = zlib.crc32(repr(self._numbers()).encode())
            store.agree(f"begins trainer.join() with {own}, and numbers of the digest {digest:08x} in all")
        store.init([STATE, NUMBERS], [np.zeros(store.num_workers), np.zeros(len(self._numbers()))])

    def meet(self, part: NextStep) -> bool:
        """Say what this worker does in the next step, and hear the others.

        Returns:
            Whether any worker makes the step.

        Raises:
            RuntimeError: a worker has left the block by an error. All others raise it.
        """
        parts = np.zeros(self._store.num_workers)
        parts[self._store.rank] = part
        self._store.pushpull(STATE, parts)
        left = np.flatnonzero(parts == NextStep.LEFT)
        if len(left) and part is not NextStep.LEFT:
            self._has_ended = True
            names = ", ".join(f"worker-{rank}" for rank in left)
            raise RuntimeError(
                f"{names} left `with trainer.join():` by an error, which its own output has; the other workers leave it"
                " too, and this step was not made"
            )
        stepping = np.flatnonzero(parts == NextStep.STEPS)
        if len(stepping) and len(stepping) < len(parts) and self._live is not None:
            self._share_numbers(self._live, root=int(stepping[0]), takes=part is NextStep.DONE)
        return bool(len(stepping))

    def leave(self) -> None:
        """Tell the others that this worker leaves by an error, unless they have left themselves."""
        if not self._has_ended:
            with contextlib.suppress(KvdistError):  # the error that is on its way says more
                self.meet(NextStep.LEFT)

    @property
    def _fields(self) -> list[str]:
        return [name for name in CHANGING if self._live is not None and name in vars(self._live)]

    def _numbers(self) -> list[float]:
        """A digest of what groups have of their own, `CHANGING`, and the multipliers of each key."""
        if self._live is None:
            return []
        own = vars(self._live)
        tables = [[table.get(key, 1.0) for key in range(self._keys)] for table in (own["lr_mult"], own["wd_mult"])]
        groups = zlib.crc32(str(own.get("groups", "")).encode())
        return [float(groups), *(own[name] for name in self._fields), *tables[0], *tables[1]]

    def _share_numbers(self, live: Optimizer, root: int, takes: bool) -> None:
        numbers = np.array(self._numbers())
        out = np.empty_like(numbers)
        self._store.pushpull(NUMBERS, numbers if self._store.rank == root else None, out=out)
        if takes:
            if out[0] != numbers[0]:
                raise NotImplementedError(
                    "within trainer.join() groups with numbers of their own, such as betas, cannot change them once a"
                    " worker is done: make the scheduler with cycle_momentum=False"
                )
            own, *tables = np.split(out[1:], [len(out) - 1 - 2 * self._keys, len(out) - 1 - self._keys])
            for name, number in zip(self._fields, own.tolist(), strict=True):
                live.change_here(name, number)
            live.lr_mult, live.wd_mult = (_factors(table.tolist()) for table in tables)


def _factors(table: list[float]) -> dict[int, float]:
    return {key: factor for key, factor in enumerate(table) if factor != 1.0}
