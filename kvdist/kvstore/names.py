"""The names of stores: which there are, what each means, and what to use instead of those that there are not."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kvdist.core.policy import ASYNC, P3, SYNC, Policy

LOCAL_NAMES = (
    "local",
    "local_update_cpu",
    "local_allreduce_cpu",
    "device",
    "local_allreduce_device",
    "nccl",
)
"""Stores within one process."""

HOST_NAMES = frozenset({"local", "local_update_cpu", "local_allreduce_cpu"})
"""Those of them that sum in the host's memory, wherever values lie; the others do where they lie."""

DEVICE_NAMES = frozenset(
    {
        "device",
        "local_allreduce_device",
        "nccl",
        "dist_device_sync",
        "dist_sync_device",
        "dist_async_device",
        "dist_device_async",
    }
)
"""Stores that sum values of GPUs there, and say so where they cannot. The other ones on a cluster do it if they can."""

COMPRESSING_NAMES = frozenset({"device", "local_allreduce_device"})
"""Those of them that compress gradients; the others do not in the mirrored system either."""

DIST_NAMES: Mapping[str, Policy] = MappingProxyType(
    {
        "dist": SYNC,
        "dist_sync": SYNC,
        "dist_device_sync": SYNC,
        "dist_sync_device": SYNC,
        "p3": P3,
        "p3store_dist": P3,
        "dist_async": ASYNC,
        "dist_async_device": ASYNC,
        "dist_device_async": ASYNC,
    }
)
"""Stores on a cluster, and when their versions are made.

All send what is urgent first. The two of P3 cut keys into small slices for that, and have little on its way at once."""

COLLECTIVE_NAMES = ("collective", "horovod", "allreduce", "byteps")
"""Stores that sum without servers. ``nccl`` is one of them where this process is one of several ranks."""

HYBRID = "hybrid"
"""Rows on servers, everything else summed without."""

ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "teststore": "it is a test double of the mirrored system: register a class of your own called TestStore",
        "dist_device": "say whether workers wait for each other: use 'dist_device_sync' or 'dist_device_async'",
        "dist_sync_async": "it is one or the other: use 'dist_sync' or 'dist_async'",
    }
)
"""Names that people try, and what to use."""
