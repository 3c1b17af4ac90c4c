"""Where a trainer's weights are updated: on the store, or by each worker. The table of the mirrored system, mended.

| situation | store | the store updates |
|---|---|---|
| no store wanted | none | no: each process alone |
| one device, a store by the name of one within a process | none: it would only copy | no |
| a store of rounds | yes | as wanted; else where it can, the environment allows it, and (``local``) none is big |
| an asynchronous store | yes | always: there are no sums to give back; to want otherwise is an error |
| some gradient is sparse | yes | on servers always, to want otherwise is an error; in a process only if wanted |
| a store that cannot update | yes | no; to want otherwise is an error |

Everything here is a function of what is asked and what the store can do: no store is touched.
"""

from __future__ import annotations

from collections.abc import Iterable

BIG_PARAMETER_ELEMENTS = 16 * 1024 * 1024
"""With a larger parameter the store ``local`` leaves the update to the devices."""

ASYNCHRONOUS = frozenset({"dist_async", "dist_device_async", "dist_async_device"})
"""Stores that cannot hand out the sum of a round, because they have no rounds."""


def would_only_copy(devices: int, workers: int, servers: int) -> bool:
    """Whether a store that was asked for by name is of no use: one device, one worker, and no server."""
    return devices == 1 and workers == 1 and servers == 0


def store_updates(
    store_type: str,
    capable: bool,
    wanted: bool | None,
    *,
    by_default: bool = True,
    sizes: Iterable[int] = (),
    has_servers: bool = False,
    has_sparse_grads: bool = False,
) -> bool:
    """Whether the store holds the optimizer.

    Args:
        store_type: the name of the store.
        capable: whether it can update.
        wanted: what the user said; None for nothing.
        by_default: what the environment says for those who said nothing.
        sizes: elements of each parameter; they count for a store that was asked for as ``local``.
        has_servers: whether its values rest on servers.
        has_sparse_grads: whether some gradient is sparse.

    Raises:
        ValueError: what is wanted cannot be.
    """
    if wanted and not capable:
        raise ValueError(
            f"the store {store_type!r} cannot update weights, but update_on_kvstore=True asks for it; leave it out, and"
            " each worker updates with the sums of gradients"
        )
    if store_type in ASYNCHRONOUS:
        if wanted is False:
            raise ValueError(
                f"the store {store_type!r} trains asynchronously, which needs update_on_kvstore=True: without rounds"
                " there are no sums for the workers to update with. Leave update_on_kvstore out, or take 'dist'"
            )
        return True
    if has_sparse_grads and has_servers and wanted is False:
        raise ValueError(
            f"some gradients are sparse, and the store {store_type!r} keeps its values on servers, which needs"
            " update_on_kvstore=True then. Leave update_on_kvstore and clip_norm out, or make the layer with"
            " sparse=False"
        )
    if wanted is not None:
        return wanted
    if has_sparse_grads:
        return capable and has_servers
    return capable and by_default and all(size <= BIG_PARAMETER_ELEMENTS for size in sizes)
