"""`Join`: the steps of a trainer whose workers have different numbers of batches.

Invariants:

* Before each step every worker announces, in a store of the `Join`, whether it makes the step, is done, or has left by
  an error. So all workers agree whether a step follows, and raise together if a worker has left.
* A worker that is done takes part without gradients. If the workers update, it first takes all of the optimizer's
  numbers from the lowest rank that makes the step, because its schedule has stopped: the weights stay equal.
"""

from __future__ import annotations

import contextlib
import enum
import json
import zlib

import numpy as np

from kvdist.errors import KvdistError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.checkpoints import gather
from kvdist.naming import NamedKey
from kvdist.optimizer.base import Optimizer, numbers_of
from kvdist.schema import Value
from kvdist.training.param_groups import NUMBERS, ParamGroups

STATE = NamedKey(0, "who makes the next step within trainer.join()")


class NextStep(enum.IntEnum):
    """State that a worker announces before a step."""

    LEFT = -1
    DONE = 0
    STEPS = 1


class Join:
    """A `kvdist.Trainer.join` block.

    Args:
        store: a store of the trainer's workers, used by this object only.
        groups: the parameter groups, if the workers update; None if the store does.
        keys: number of parameters.

    Raises:
        InitMismatch: the workers update with different numbers.
    """

    def __init__(self, store: KVStore, groups: ParamGroups | None, keys: int) -> None:
        self._store = store
        self._groups = groups
        self._keys = keys
        self._has_ended = False
        if groups is not None:
            said = ", ".join(f"{name} {value!r}" for name, value in _rule_of(groups.optimizer).items() if value)
            digest = zlib.crc32(self._numbers(groups.optimizer))
            store.agree(f"begins trainer.join() with {said}, and numbers of the digest {digest:08x} in all")
        store.init(STATE, np.zeros(store.num_workers))

    def meet(self, part: NextStep) -> bool:
        """Exchange the states of all workers before the next step.

        Args:
            part: state of this worker.

        Returns:
            Whether any worker makes the step.

        Raises:
            RuntimeError: a worker has left the block by an error. All other workers raise it.
        """
        parts = np.zeros(self._store.num_workers)
        parts[self._store.rank] = part
        self._store.pushpull(STATE, parts)
        left = np.flatnonzero(parts == NextStep.LEFT)
        if len(left) and part is not NextStep.LEFT:
            self._has_ended = True
            names = ", ".join(f"worker-{rank}" for rank in left)
            raise RuntimeError(
                f"{names} left `with trainer.join():` by an exception, which its output shows; the other workers leave"
                " it too, and this step did not happen"
            )
        stepping = np.flatnonzero(parts == NextStep.STEPS)
        if len(stepping) and len(stepping) < len(parts) and self._groups is not None:
            self._share_numbers(self._groups, root=int(stepping[0]), takes=part is NextStep.DONE)
        return bool(len(stepping))

    def leave(self) -> None:
        """Announce that this worker leaves by an error, unless another worker has left by an error before."""
        if not self._has_ended:
            with contextlib.suppress(KvdistError):  # the error that is on its way says more
                self.meet(NextStep.LEFT)

    def _numbers(self, live: Optimizer) -> bytes:
        """The numbers of the rule, and the factors of each key, as JSON."""
        tables = {
            name: [getattr(live, name).get(key, 1.0) for key in range(self._keys)] for _, name in NUMBERS.values()
        }
        return json.dumps([_rule_of(live), tables]).encode()

    def _share_numbers(self, groups: ParamGroups, root: int, takes: bool) -> None:
        """Send the numbers of the worker `root` to all workers; those that are done take them."""
        is_root = self._store.rank == root
        numbers = gather(self._store._backend, self._numbers(groups.optimizer) if is_root else b"").get(root)
        if takes and numbers is not None:
            rule, tables = json.loads(numbers)
            groups.replace(rule, {name: dict(enumerate(factors)) for name, factors in tables.items()})


def _rule_of(live: Optimizer) -> dict[str, Value]:
    """Numbers of the optimizer, without multipliers, that must be equal for workers to make equal updates."""
    return {name: vars(live)[name] for name in numbers_of(type(live)) if name != "rescale_grad"}
