"""Stores by name: `create`, and `register` for stores of your own, `register_command` for handlers on servers.

Public as ``kvdist.kv``.
"""

from __future__ import annotations

import logging

from kvdist.config import kernels_from_env
from kvdist.kernels.choice import choose
from kvdist.kvstore import own
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.cluster import MEMBERSHIP
from kvdist.kvstore.commands import register_command
from kvdist.kvstore.contract import KVStoreBase
from kvdist.kvstore.dist import DistStore
from kvdist.kvstore.local import LocalStore
from kvdist.kvstore.names import DIST_NAMES, ELSEWHERE, LOCAL_NAMES
from kvdist.kvstore.own import register

__all__ = ["KVStore", "KVStoreBase", "create", "register", "register_command"]

LOG = logging.getLogger("kvdist")


def create(name: str = "local") -> KVStore:
    """Make a store.

    For ``dist`` and its spellings this process joins the cluster that its environment describes, and the call returns
    when the cluster is complete. Without one, a cluster of this process alone is started inside it, and a warning says
    so. A second ``dist`` store of a process has keys, a mode and an optimizer of its own; all workers create theirs
    in the same order.

    Args:
        name: ``local`` or ``device`` (values within this process), ``dist`` or ``dist_sync`` (servers wait for every
            worker), ``dist_async`` (servers apply each push at once), one of the mirrored system's other spellings of
            these, or the name of a registered class, which comes first. Upper case is the same.

    Raises:
        TypeError: the name is not a string.
        ValueError: no store has that name; the message lists those there are.
        ConfigError: the environment describes half a cluster, or another launcher's, or `KVDIST_KERNELS` is wrong.
        DeadlineExceeded: the scheduler does not answer, or the cluster does not become complete.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a string, not {type(name).__name__}")
    lowered = name.lower()
    if lowered in own.REGISTERED:
        return own.REGISTERED[lowered]()  # type: ignore[no-any-return]  # the class is the user's promise
    if lowered in LOCAL_NAMES:
        if lowered == "nccl":
            LOG.warning("kv.create('nccl'): this version sums on the CPU; the store is what 'device' gives")
        return LocalStore(lowered, choose(kernels_from_env()))
    if lowered in DIST_NAMES:
        kernels = choose(kernels_from_env())
        return DistStore(lowered, DIST_NAMES[lowered], MEMBERSHIP.join(), kernels)
    advice = f": {ELSEWHERE[lowered]}" if lowered in ELSEWHERE else ""
    known = ", ".join([*LOCAL_NAMES, *DIST_NAMES, *own.REGISTERED])
    raise ValueError(f"there is no store called {name!r}{advice}; known are: {known}")
