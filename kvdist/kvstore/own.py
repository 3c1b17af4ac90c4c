"""Stores of the user's own: the classes that `create` knows by name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from kvdist.kvstore.names import COLLECTIVE_NAMES, DIST_NAMES, HYBRID, LOCAL_NAMES

REGISTERED: dict[str, Callable[[], Any]] = {}
"""Name → class."""

Store = TypeVar("Store", bound=type)


def register(cls: Store) -> Store:
    """Make a class of your own available to `create`, under its name in lower case. Usable as a decorator.

    The class is called without arguments. To serve a `Trainer` it derives from `KVStoreBase`, the least that one needs,
    or from `KVStore`; a script that calls it itself may have it as it likes. A name that is taken is replaced, with a
    warning.

    Raises:
        TypeError: it is not a class.
    """
    if not isinstance(cls, type):
        raise TypeError(f"register a class, not {type(cls).__name__}: an object of it is made at each create()")
    name = cls.__name__.lower()
    if name in {*REGISTERED, *LOCAL_NAMES, *DIST_NAMES, *COLLECTIVE_NAMES, HYBRID}:
        warnings.warn(f"the store {name!r} is now {cls.__module__}.{cls.__qualname__}", stacklevel=2)
    REGISTERED[name] = cls
    return cls
