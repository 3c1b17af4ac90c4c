"""The names of stores: which there are, what each means, and what to use instead of those that there are not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvdist.core.policy import ASYNC, SYNC, Policy

LOCAL_NAMES = (
    "local",
    "local_update_cpu",
    "local_allreduce_cpu",
    "device",
    "local_allreduce_device",
    "nccl",
)
"""Stores within one process. They do the same: this version makes all sums on the CPU."""

DIST_NAMES: Mapping[str, Policy] = MappingProxyType(
    {
        "dist": SYNC,
        "dist_sync": SYNC,
        "dist_device_sync": SYNC,
        "dist_sync_device": SYNC,
        "p3": SYNC,
        "p3store_dist": SYNC,
        "dist_async": ASYNC,
        "dist_async_device": ASYNC,
        "dist_device_async": ASYNC,
    }
)
"""Stores on a cluster, and when their versions are made.

The two of P3, which sent slices by priority, are the usual one: it always does that."""

_COLLECTIVES = (
    "it sums without servers, which this version does not do: use 'dist', which gives the same sums, or"
    " torch.distributed"
)

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "horovod": _COLLECTIVES,
        "byteps": _COLLECTIVES,
        "collective": _COLLECTIVES,
        "allreduce": _COLLECTIVES,
        "hybrid": _COLLECTIVES,
        "teststore": "it is a test double of the mirrored system: register a class of your own called TestStore",
        "dist_device": "say whether workers wait for each other: use 'dist_device_sync' or 'dist_device_async'",
        "dist_sync_async": "it is one or the other: use 'dist_sync' or 'dist_async'",
    }
)
"""Names that people try, and what to use."""
