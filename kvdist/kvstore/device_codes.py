"""Encoding gradients on the GPU where they lie, so that codes leave it in place of numbers.

A residual stays on the GPU that its gradients come from. Top-k has no kernel for GPUs: its gradients are encoded on the
host.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device, DeviceEvent
from kvdist.kvstore.compressing import Compressing
from kvdist.kvstore.device_sum import moved, summed
from kvdist.kvstore.devices import OnDevice, Part, as_host_bits, uploaded
from kvdist.kvstore.handed import EncodedSlices, Given
from kvdist.kvstore.values import Bits, Key
from kvdist.optimizer.compression import EachCodec, Half, TopK, TwoBit, room
from kvdist.protocol.arrays import coded_size


def encode_all(compressing: Compressing, given: Given) -> list[EncodedSlices | None]:
    """Per key what is sent of its contributions; None for keys that travel as they are, or have none.

    One pass over gradient and residual of each key. What lies on GPUs is summed and encoded there; the codes of all
    keys are waited for once.
    """
    marks: list[DeviceEvent] = []
    encoded = [
        _encode(compressing, info, parts, marks) if info.is_compressed and parts else None
        for info, parts in zip(given.infos, given.bits, strict=True)
    ]
    for mark in marks:
        mark.wait()
    return encoded


def _encode(compressing: Compressing, info: KeyInfo, parts: Sequence[Part], marks: list[DeviceEvent]) -> EncodedSlices:
    codec = compressing.compression.codec
    on_gpus = [part for part in parts if isinstance(part, OnDevice)]
    if not on_gpus or isinstance(codec, TopK):
        return compressing.encode(info, as_host_bits(parts))
    total = summed(on_gpus[0].device, on_gpus, DType.FLOAT32)
    residual = compressing.residual_on(info.key, total)
    codes: EncodedSlices = {}
    for piece in info.slices:
        stretch = slice(piece.start, piece.stop)
        codes[piece.start] = _encoded_there(codec, total[stretch], residual[stretch])
    marks.append(total.device.mark())
    return codes


def _encoded_there(codec: EachCodec, part: OnDevice, residual: Array) -> tuple[Bits, int]:
    """The codes of a slice, in host memory that has them when a mark made behind this has been waited for."""
    whole, data = room(codec.encoding, part.size)
    codes = part.device.kernels.empty(data.size, data.dtype)
    codec.write(part.array, residual, part.device.kernels, codes)
    part.device.download(codes, data)
    return whole, part.size


def through_on_devices(compressing: Compressing, key: Key, parts: Sequence[OnDevice], home: Device) -> list[Array]:
    """What the contributions of a key become on their way to its home, each with a residual of its own.

    Codes cross, and are added up at home: what is worth ±t goes straight into one sum.
    """
    codec = compressing.compression.codec
    if isinstance(codec, TopK):
        through = compressing.through(key, as_host_bits(parts))
        return [home_part.array for home_part in (uploaded(bits, home) for bits in through)]
    codes = []
    for place, part in enumerate(parts):
        own = part.device.kernels.empty(coded_size(codec.encoding, part.size), np.dtype(np.uint8))
        codec.write(part.array, compressing.residual_on((key, place), part), part.device.kernels, own)
        codes.append(OnDevice(part.device, own))
    # One by one: codes are not numbers, so GPUs that reach each other have nothing to sum.
    return _decoded(codec, [moved(one, home) for one in codes], parts[0].size, home)


def _decoded(codec: EachCodec, codes: Sequence[Array], count: int, home: Device) -> list[Array]:
    kernels = home.kernels
    if isinstance(codec, Half):
        wide = []
        for one in codes:
            values = kernels.empty(count, np.dtype(np.float32))
            kernels.to_float32(one.view(codec.dtype.storage), codec.dtype, values)
            wide.append(values)
        return wide
    total = kernels.zeros(count, np.dtype(np.float32))
    for one in codes:
        if isinstance(codec, TwoBit):
            home.add_dequantised_2bit(one, codec.parameter, total)
        else:
            home.add_dequantised_1bit(one, codec.parameter, total)
    return [total]
