"""Cases of a property: pairs of values instead of the full product, and a loop that says which case failed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from itertools import combinations, product
from typing import Any


def pairs(*axes: Iterable[Any], where: Callable[..., bool] = lambda *case: True) -> list[tuple[Any, ...]]:
    """Return few cases that hold each pair of values of each two axes: what fails most often fails for a pair.

    The list is the same in every run: the first case that covers most of what is left, again and again. A pair that
    no case has for which ``where`` is true is left out.
    """
    values = [list(axis) for axis in axes]
    places = [case for case in product(*(range(len(axis)) for axis in values)) if where(*picked(values, case))]
    covered = [frozenset(combinations(enumerate(case), min(2, len(axes)))) for case in places]
    left = frozenset().union(*covered)
    chosen = []
    while left:
        best = max(range(len(places)), key=lambda index: len(covered[index] & left))
        chosen.append(picked(values, places[best]))
        left -= covered[best]
    return chosen


def picked(values: list[list[Any]], case: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(axis[place] for axis, place in zip(values, case, strict=True))


@contextlib.contextmanager
def case(*what: object) -> Iterator[None]:
    """Say of which case of a loop it is that fails; pytest shows it under the failure."""
    try:
        yield
    except BaseException:
        print("failed in the case of", *what)
        raise
