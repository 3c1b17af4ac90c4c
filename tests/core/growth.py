"""What machines keep: the sizes of all their containers, and which of them grow with the steps of a run."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import partial, reduce
from operator import and_, or_
from types import FunctionType, MethodType
from typing import Any

import numpy as np

from tests.simulation import Cluster, Scenario, run

GROWTH_MAX = 1.1
"""How much larger a container may be after twice as many steps."""
BY_CHANCE = 12
"""Things more that may be in all containers of one name, where a tenth is less than one."""


def sizes(roots: Iterable[Any]) -> Counter[str]:
    """How many things are in the containers that these objects refer to, by class and attribute, over all objects.

    What is not kvdist's own is not followed: clocks, futures, and what tests have put into it.
    """
    found: Counter[str] = Counter()
    seen: dict[int, Any] = {}
    todo = [("", root) for root in roots]
    while todo:
        name, thing = todo.pop()
        if id(thing) in seen:
            continue
        seen[id(thing)] = thing
        if isinstance(thing, deque) and thing.maxlen is not None:
            continue  # it is as long as it may be, sooner or later
        if isinstance(thing, Mapping | Set | list | tuple | deque | bytearray):
            found[name] += len(thing)
        elif isinstance(thing, np.ndarray):
            found[name] += thing.size
        todo += _within(name, thing)
    return found


def _within(name: str, thing: Any) -> Iterator[tuple[str, Any]]:
    kind = type(thing)
    if isinstance(thing, Mapping):
        yield from ((f"{name}[]", one) for pair in thing.items() for one in pair)
    elif isinstance(thing, Set | list | tuple | deque):
        yield from ((f"{name}[]", one) for one in thing)
    elif isinstance(thing, FunctionType):
        yield from ((f"{name}()", cell.cell_contents) for cell in thing.__closure__ or ())
    elif isinstance(thing, partial):
        yield from ((f"{name}()", one) for one in (thing.func, *thing.args, *thing.keywords.values()))
    elif isinstance(thing, MethodType):
        yield name, thing.__self__
    elif kind.__module__.startswith("kvdist."):
        slots = [slot for one in kind.__mro__ for slot in one.__dict__.get("__slots__", ())]
        own = {slot: getattr(thing, slot, None) for slot in slots} | getattr(thing, "__dict__", {})
        yield from ((f"{kind.__name__}.{attribute}", one) for attribute, one in own.items())


def growth(seed: int, scenario: Scenario, steps: int) -> dict[str, tuple[int, int]]:
    """The containers that are larger after `2 * steps` steps of a run than after `steps`, and how large they were.

    How much is under way differs from round to round. So it is the largest size in a quarter of the first steps, and
    the smallest in a quarter of the others: what is kept for good never becomes less.
    """
    looked_at: dict[int, Counter[str]] = {}

    def look(cluster: Cluster) -> None:
        step = min((user.round for user in cluster.users.values() if not user.done), default=-1)
        if step not in looked_at and (step % steps >= steps - steps // 4):
            looked_at[step] = sizes(one.node for one in cluster.processes.values() if not one.ended)

    run(seed, scenario, look=look)
    first = [found for step, found in looked_at.items() if step < steps]
    second = [found for step, found in looked_at.items() if steps <= step < 2 * steps]
    assert first and second, f"this run has fewer than {2 * steps} steps"
    before, after = reduce(or_, first), reduce(and_, second)
    return {name: (before[name], size) for name, size in after.items() if size > GROWTH_MAX * before[name] + BY_CHANCE}
