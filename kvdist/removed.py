"""Keyword arguments of earlier versions, whose use is an error that names the replacement."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

AVERAGES_ELSEWHERE = "torch.optim.swa_utils.AveragedModel on a worker"
"""Replacement of the averages of weights that servers kept."""


def removed_keywords(**instead: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that refuses removed keyword arguments by a `TypeError`; the signature stays.

    Args:
        instead: removed name → replacement.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for name in kwargs:
                if name in instead:
                    raise TypeError(f"{name} was removed: use {instead[name]}")
            return function(*args, **kwargs)

        return checked

    return decorate
