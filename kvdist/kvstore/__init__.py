"""Stores by name: `create`, and `register` for custom stores, `register_command` for handlers on servers.

Public as `kvdist.kv`.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvdist.config import exit_codes
from kvdist.config.environment import has_servers_from_env, read_setting, world_from_env
from kvdist.config.policies import Pace, TrainingPolicy, policy_from
from kvdist.core.policy import ASYNC, QUOTA, with_priority_slices
from kvdist.errors import ConfigError
from kvdist.kernels.cpu import choose
from kvdist.kvstore import registry
from kvdist.kvstore.adapter import KVStoreBase
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.dist import DistBackend
from kvdist.kvstore.local import LocalBackend
from kvdist.kvstore.placement import Devices
from kvdist.kvstore.registry import (
    COLLECTIVE_NAMES,
    DEVICE_NAMES,
    DIST_NAMES,
    HOST_NAMES,
    HYBRID,
    LOCAL_NAMES,
    register,
    register_command,
)
from kvdist.runtime.cluster import PROCESS_CLUSTER

if TYPE_CHECKING:
    from kvdist.kvstore.collective import CollectiveBackend

__all__ = ["KVStore", "KVStoreBase", "create", "register", "register_command"]

LOG = logging.getLogger("kvdist")


def create(name: str = "local", *, policy: str | TrainingPolicy | None = None) -> KVStore:
    """Create a store by its name.

    With ``dist`` and its other spellings, this process joins the cluster that its environment variables describe, and
    the call returns when the cluster is complete. Without such variables the call starts a cluster of this process
    alone, inside it, and logs a warning. A second ``dist`` store of a process has a separate set of keys, and its mode
    and optimizer are independent. All workers must create ``dist``, ``collective`` and ``hybrid`` stores in the same
    order.

    Args:
        name: in upper or lower case, one of

            - ``local``, ``device``: values within this process;
            - ``dist``, ``dist_sync``: values on servers, which wait for every worker;
            - ``dist_async``: values on servers, which apply each push at once;
            - ``collective``, ``horovod``, ``allreduce``, ``byteps``: workers sum among themselves, without servers;
              also ``nccl`` if a launcher has started several processes;
            - ``hybrid``: tables of rows on servers, all other keys as in ``collective``;
            - another of MXNet's names for these;
            - the name of a class that was passed to `register`, which takes precedence.

        policy: when a `Trainer` on a synchronous ``dist`` store exchanges gradients or weights: ``kvdist.quota(512)``,
            ``kvdist.local_sgd(20)``, ``kvdist.diloco(100)``, or a text such as ``'diloco:100'``. With
            ``kvdist.asynchronous(4)`` the store becomes a ``dist_async`` store. None reads ``KVDIST_POLICY``; if that
            is unset, gradients are exchanged in each step, as with ``'sync'``.

    Returns:
        A `KVStore`, or an object of a registered class.

    Raises:
        TypeError: `name` is not a string, or `policy` is neither a policy nor a string.
        ValueError: the name or the policy is unknown; the message lists the known ones.
        ConfigError: the environment variables are incomplete or those of another launcher, ``KVDIST_KERNELS`` is
            invalid, or the store does not support policies.
        CollectiveError: in a job without servers, the other ranks did not appear in time.
        DeadlineExceeded: the scheduler does not answer, or the cluster does not become complete.
    """
    exit_codes.shorten_tracebacks()
    if not isinstance(name, str):
        raise TypeError(f"the name of a store is a string, not {type(name).__name__}")
    registry.require_known(name)
    lowered = name.lower()
    chosen = _chosen_policy(lowered, policy)
    if lowered in registry.REGISTERED:
        return registry.REGISTERED[lowered]()  # type: ignore[no-any-return]  # the class is the user's promise
    if lowered in COLLECTIVE_NAMES or (lowered == "nccl" and _is_one_of_several()):
        return collective_store(lowered)
    if lowered == HYBRID:
        return _hybrid()
    if lowered in LOCAL_NAMES:
        if lowered == "nccl":
            LOG.warning("kv.create('nccl') in a process that is alone: the store is what 'device' gives")
        return KVStore(LocalBackend(lowered, choose(read_setting("KVDIST_KERNELS")), _devices(lowered)))
    return KVStore(_dist(lowered, chosen))


def _chosen_policy(name: str, given: object) -> TrainingPolicy | None:
    """When a trainer on this store exchanges."""
    if not isinstance(given, str | TrainingPolicy | None):
        called = getattr(given, "__name__", "") if callable(given) else ""
        shown = f"the function {called}, which must be called" if called else repr(given)
        raise TypeError(
            f"policy is {shown}; write kvdist.local_sgd(20), kvdist.diloco(100), kvdist.quota(512), or 'diloco:100'"
        )
    wanted = policy_from(given) if isinstance(given, str) else given or read_setting("KVDIST_POLICY")
    if wanted is None or (name in DIST_NAMES and (wanted.pace is Pace.ALONE or DIST_NAMES[name].is_lockstep)):
        return wanted
    if given is None and name not in DIST_NAMES:
        if name not in LOCAL_NAMES:  # those may be for metrics
            LOG.warning("KVDIST_POLICY is %s, and the store %r has none: it exchanges in each step", wanted, name)
        return None  # a store beside those on servers, for which the job has one
    kind = "all" if wanted.pace is Pace.ALONE else "synchronous"
    origin = "policy" if given is not None else "KVDIST_POLICY (kvdist-launch --policy)"
    raise ConfigError(f"{origin} is {wanted}, which is for {kind} stores on servers: use 'dist', not {name!r}")


def _dist(name: str, chosen: TrainingPolicy | None = None) -> DistBackend:
    policy = DIST_NAMES[name]
    is_sliced = policy.by_priority or read_setting("KVDIST_PRIORITY_SLICES")
    if chosen is not None and chosen.pace is Pace.OWN:
        policy = QUOTA
    elif chosen is not None and chosen.pace is Pace.ALONE and policy.is_lockstep:
        name, policy = "dist_async", ASYNC
    if is_sliced:
        policy = with_priority_slices(policy)
    kernels, devices = choose(read_setting("KVDIST_KERNELS")), _devices(name)  # may refuse, so they come first
    backend = DistBackend(name, policy, PROCESS_CLUSTER.join(), kernels, devices)
    backend.policy = chosen
    return backend


def _is_one_of_several() -> bool:
    """Whether a launcher has started this process beside others, without servers."""
    return not has_servers_from_env() and world_from_env().size > 1


def collective_store(name: str, number: int = 0, predivide: float = 1.0) -> KVStore:
    """A store that sums among workers.

    Args:
        name: its type.
        number: of the group of ranks that share it.
        predivide: by what values are divided before they are summed, and multiplied after it.
    """
    return KVStore(_collective(name, number, predivide=predivide))


def _collective(name: str, number: int = 0, updates: bool = False, predivide: float = 1.0) -> CollectiveBackend:
    on_loss = read_setting("KVDIST_ON_LOSS")
    if on_loss != "fail":
        raise ConfigError(
            f"KVDIST_ON_LOSS is {on_loss!r} (kvdist-launch --on-loss), and the store {name!r} sums among workers, none"
            " of which can be left out: use a dist store that updates, or fail"
        )
    try:  # torch, which the other stores do without, is imported here
        from kvdist.kvstore.collective import CollectiveBackend
        from kvdist.kvstore.engine_lifecycle import ENGINE
    except ImportError as error:
        raise ImportError(
            f"the store {name!r} needs torch, which is not installed or too old: pip install 'torch>=2.1'"
        ) from error
    kernels, devices = choose(read_setting("KVDIST_KERNELS")), _devices(name)
    engine, store, leave = ENGINE.join()
    try:
        return CollectiveBackend(
            name, engine, leave, number=number, store=store, kernels=kernels, devices=devices,
            updates=updates, predivide=predivide,
        )  # fmt: skip
    except BaseException:
        leave()  # such as a rank that is not in the group
        raise


def _hybrid() -> KVStore:
    workers = _collective(HYBRID, updates=True)  # first, as it refuses more, and before a cluster is joined
    try:
        servers = _dist("dist")
    except BaseException:
        workers.close(wait=False)
        raise
    from kvdist.kvstore.hybrid import HybridBackend

    return KVStore(HybridBackend(servers, workers))


def _devices(name: str) -> Devices | None:
    """The GPUs of a store: none for a name in `HOST_NAMES`."""
    return None if name in HOST_NAMES else Devices(read_setting("KVDIST_GPU"), name in DEVICE_NAMES)
