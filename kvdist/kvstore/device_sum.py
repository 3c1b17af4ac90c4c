"""Bringing the contributions of several GPUs to the one where they are summed.

Every key has a home among the GPUs that contribute to it, so that bytes balance and all links are used. What lies
elsewhere comes by one copy: directly between GPUs that reach each other. Where some cannot be reached so, those that
reach each other form an island, whose contributions are summed there first, so that one array crosses instead of many.
The order of sums, and with it the last bits, then depends on the links; without islands it is the order given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device
from kvdist.kvstore.devices import OnDevice


def home_of(devices: Sequence[Device], load: Mapping[int, int]) -> Device:
    """The one with the fewest bytes so far; the first of several.

    Args:
        devices: those that contribute.
        load: device index → bytes that are summed there.
    """
    return min(devices, key=lambda device: load.get(device.index, 0))


def islands(parts: Sequence[OnDevice], home: Device) -> list[list[OnDevice]]:
    """The parts in groups whose GPUs reach each other; what is at home or reaches it stays alone."""
    groups: list[list[OnDevice]] = []
    far: list[list[OnDevice]] = []
    for part in parts:
        if part.device.index == home.index or home.reaches(part.device):
            groups.append([part])
            continue
        for island in far:
            if all(other.device.reaches(part.device) or other.device.index == part.device.index for other in island):
                island.append(part)
                break
        else:
            far.append([part])
            groups.append(far[-1])
    return groups


def brought(parts: Sequence[OnDevice], home: Device, dtype: DType) -> list[Array]:
    """Arrays of `home` whose sum is that of the parts, in their order. Parts that lie there are not copied.

    Halves are not summed on the way, because they would be rounded once more.
    """
    is_half = dtype.storage != dtype.accumulate
    groups = [[part] for part in parts] if is_half else islands(parts, home)
    # On an island all reach each other, so the sum there makes no islands again.
    sums = [group[0] if len(group) == 1 else summed(group[0].device, group, dtype) for group in groups]
    return [moved(one, home) for one in sums]


def summed(home: Device, parts: Sequence[OnDevice], dtype: DType, out: Array | None = None) -> OnDevice:
    """The sum of parts on one of their GPUs: one pass over what was brought there. A single part is given as it is."""
    arrays = brought(parts, home, dtype)
    if len(arrays) == 1 and out is None:
        return OnDevice(home, arrays[0])
    total = home.kernels.empty(parts[0].size, dtype.storage) if out is None else out
    home.kernels.weighted_sum(arrays, [1.0] * len(arrays), dtype, total)
    return OnDevice(home, total)


def moved(part: OnDevice, home: Device) -> Array:
    """A part as an array of `home`: itself, if it lies there."""
    if part.device.index == home.index:
        return part.array
    copy = home.kernels.empty(part.size, part.array.dtype)
    home.copy(part.array, copy, part.device)
    return copy
