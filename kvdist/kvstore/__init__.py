"""Stores by name: `create`, and `register` for stores of your own. Public as ``kvdist.kv``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from kvdist.config import kernels_from_env
from kvdist.core.policy import ASYNC, SYNC, Policy
from kvdist.kernels.choice import choose
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.cluster import MEMBERSHIP
from kvdist.kvstore.dist import DistStore
from kvdist.kvstore.local import LocalStore

__all__ = ["KVStore", "create", "register"]

LOCAL_NAMES = (
    "local",
    "local_update_cpu",
    "local_allreduce_cpu",
    "device",
    "local_allreduce_device",
)
"""Stores within one process."""

DIST_NAMES: dict[str, Policy] = {
    "dist": SYNC,
    "dist_sync": SYNC,
    "dist_device_sync": SYNC,
    "dist_sync_device": SYNC,
    "dist_async": ASYNC,
    "dist_async_device": ASYNC,
    "dist_device_async": ASYNC,
}
"""Stores on a cluster, and when their versions are made."""

_registered: dict[str, Callable[[], Any]] = {}

Store = TypeVar("Store", bound=type)


def create(name: str = "local") -> KVStore:
    """Make a store.

    For ``dist`` and its spellings this process joins the cluster that its environment describes, and the call returns
    when the cluster is complete. Without one, a cluster of this process alone is started inside it, and a warning says
    so. A second ``dist`` store of a process has keys, a mode and an optimizer of its own; all workers create theirs
    in the same order.

    Args:
        name: ``local`` or ``device`` (values within this process), ``dist`` or ``dist_sync`` (servers wait for every
            worker), ``dist_async`` (servers apply each push at once), one of the mirrored system's other spellings of
            these, or the name of a registered class. Upper case is the same.

    Raises:
        TypeError: the name is not a string.
        ValueError: no store has that name; the message lists those there are.
        ConfigError: the environment describes half a cluster, or another launcher's, or `KVDIST_KERNELS` is wrong.
        DeadlineExceeded: the scheduler does not answer, or the cluster does not become complete.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a string, not {type(name).__name__}")
    lowered = name.lower()
    if lowered in _registered:
        return _registered[lowered]()  # type: ignore[no-any-return]  # the class is the user's promise
    if lowered in LOCAL_NAMES:
        return LocalStore(lowered, choose(kernels_from_env()))
    if lowered in DIST_NAMES:
        kernels = choose(kernels_from_env())
        return DistStore(lowered, DIST_NAMES[lowered], MEMBERSHIP.join(), kernels)
    known = ", ".join([*LOCAL_NAMES, *DIST_NAMES, *_registered])
    raise ValueError(f"there is no store called {name!r}; known are: {known}")


def register(cls: Store) -> Store:
    """Make a class of your own available to `create`, under its name in lower case. Usable as a decorator.

    The class is called without arguments. It should offer what `KVStore` does as far as your scripts need it. A name
    that is taken is replaced, with a warning.
    """
    name = cls.__name__.lower()
    if name in _registered or name in LOCAL_NAMES or name in DIST_NAMES:
        warnings.warn(f"the store {name!r} is now {cls.__module__}.{cls.__qualname__}", stacklevel=2)
    _registered[name] = cls
    return cls
