"""Compressed pushes: the residual of each key, the encoding of a push with it, and the payloads of encoded pushes.

Invariants:

* All checks of a push have succeeded before its residual is touched.
* A push is encoded in the thread of its caller, before the call returns, so residuals follow the order of the calls.
* A residual starts at zero with the key. It starts again when the values of the key are replaced (`broadcast`) or
  restored (`load_checkpoint`). Checkpoints do not contain it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from kvdist.core.worker.requests import Encoded, KeyInfo, Plan, RunPlan
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device, DeviceEvent, Kernels
from kvdist.kvstore.placement import OnDevice, Part, as_host_bits
from kvdist.kvstore.values import Key
from kvdist.naming import name_of
from kvdist.optimizer.compression import (
    EachCodec,
    GradientCompression,
    Half,
    Scaled,
    TopK,
    TwoBit,
    decode,
    encode,
    from_params,
    room,
)
from kvdist.protocol.arrays import Bits, coded_size

KEYS_NAMED_MAX = 5

EncodedSlices = dict[int, tuple[Bits, int]]
"""The encoded contribution to a key: start of a slice → its bytes, padded, and the number of entries in them."""
EncodedRun = tuple[memoryview, Encoded]
"""The payload of a run, and the description of its encoding."""


class StoreCompression:
    """The compression of a store on a worker.

    Args:
        params: parameters of the user's call.
        exempt: keys that travel uncompressed; read at each call.
        kernels: kernels of the CPU for the arithmetic.

    Raises:
        TypeError, ValueError: see `kvdist.optimizer.compression.from_params`.
    """

    def __init__(self, params: Any, exempt: Collection[Key], kernels: Kernels) -> None:
        self.compression: GradientCompression = from_params(params)
        self._exempt = exempt
        self._kernels = kernels
        self._residuals: dict[Any, Bits | OnDevice] = {}
        """Key, or key and device → residual, on the host or on the GPU of the gradients."""
        self._lock = threading.Lock()

    @property
    def statement(self) -> str:
        """Sentence that names the compression, which all workers must have in common."""
        return f"gradient compression by {self.compression}"

    def require_equal(self, other: StoreCompression) -> None:
        """Check that another call asks for the compression that this store has already.

        Raises:
            ValueError: the call asks for another compression.
        """
        if other.compression != self.compression:
            raise ValueError(
                f"this store compresses by {self.compression}; it cannot change to {other.compression}. Create a"
                " second store for that"
            )

    def require_no_keys(self, keys: Collection[Key]) -> None:
        """Check that compression is not set too late.

        Raises:
            ValueError: keys have been initialised.
        """
        if keys:
            shown = ", ".join(repr(key) for key in list(keys)[:KEYS_NAMED_MAX])
            more = ", …" if len(keys) > KEYS_NAMED_MAX else ""
            raise ValueError(
                f"set_gradient_compression must come before the first init, but {shown}{more} have been initialised;"
                " set it as soon as the store is created"
            )

    def require_uncompressed(self, keys: Iterable[Key], known: Collection[Key]) -> None:
        """Check that keys can still be left uncompressed.

        Raises:
            ValueError: a key has been initialised, and is compressed.
        """
        for key in keys:
            if key in known and self.covers(key):
                raise ValueError(
                    f"{name_of(key)} is initialised and compressed; call leave_uncompressed before its init"
                )

    def covers(self, key: Key) -> bool:
        """Whether pushes of this key are compressed."""
        return key not in self._exempt

    def require(self, keys: Iterable[tuple[Key, DType]]) -> None:
        """Check that keys about to be initialised can be compressed.

        Raises:
            TypeError: the values of a key are not float32.
        """
        for key, dtype in keys:
            if self.covers(key) and dtype is not DType.FLOAT32:
                raise TypeError(
                    f"{name_of(key)} is {dtype.label}, and this store compresses gradients, which it can do for float32"
                    " only: convert it, or call leave_uncompressed for this key before"
                )

    def pulled_as(self, key: Key, dtype: DType) -> DType:
        """The type in which values of a key are pulled."""
        return self.compression.pulled_as if self.covers(key) else dtype

    def sent_as(self, key: Key, dtype: DType) -> DType:
        """The type in which values of a key are sent by a codec that rounds them."""
        codec = self.compression.codec
        return codec.dtype if isinstance(codec, Half) and self.covers(key) else dtype

    def forget(self, keys: Iterable[Key] | None = None) -> None:
        """Drop the residuals of these keys, or of all keys."""
        with self._lock:
            gone = None if keys is None else set(keys)
            self._residuals = {
                name: residual
                for name, residual in self._residuals.items()
                if gone is not None and _key_of(name) not in gone
            }

    def encode(self, info: KeyInfo, parts: Sequence[Bits]) -> EncodedSlices:
        """Encode a push of a key, slice by slice, summed over devices first.

        Makes a pass over gradient and residual, and as many more as a sum of several devices takes, in cache.
        """
        with self._lock:
            residual = self._residual(info.key, info.size)
            return {
                piece.start: self._encode(
                    [part[piece.start : piece.stop] for part in parts], residual[piece.start : piece.stop]
                )
                for piece in info.slices
            }

    def through(self, key: Key, parts: Sequence[Bits]) -> list[Bits]:
        """The contributions of a key's devices after encoding and decoding, each with a separate residual."""
        with self._lock:
            return [self._through(part, self._residual((key, device), part.size)) for device, part in enumerate(parts)]

    def encoded_runs(
        self,
        plan: Plan,
        bits: Sequence[Sequence[Part]],
        encoded: Sequence[EncodedSlices | None] | None = None,
    ) -> list[EncodedRun | None]:
        """The payload of each run of a plan whose keys are compressed; None for the other runs.

        Makes a pass over gradient and residual of each key. A slice that travels alone is not copied. Contributions on
        GPUs are summed and encoded on a GPU; a single wait covers the codes of all keys.

        Args:
            plan: plan of the keys.
            bits: per key of the plan the contributions of its devices; an empty list for a key without a gradient.
            encoded: per key the result of `encode`; None if the keys are still to be encoded.
        """
        if encoded is None:
            marks: list[DeviceEvent] = []
            encoded = [
                self._encoded(info, parts, marks) if info.is_compressed and parts else None
                for info, parts in zip(plan.keys, bits, strict=True)
            ]
            for mark in marks:
                mark.wait()
        return [
            self._assembled(run, encoded) if plan.keys[run.pieces[0].index].is_compressed else None for run in plan.runs
        ]

    def _encoded(self, info: KeyInfo, parts: Sequence[Part], marks: list[DeviceEvent]) -> EncodedSlices:
        on_gpus = [part for part in parts if isinstance(part, OnDevice)]
        codec = self.compression.codec
        if not on_gpus or isinstance(codec, Scaled | TopK):
            return self.encode(info, as_host_bits(parts))
        from kvdist.kvstore.device import summed  # a feature at a seam: loaded where it is used

        total = summed(on_gpus[0].device, on_gpus, DType.FLOAT32)
        residual = self._residual_on(info.key, total)
        codes: EncodedSlices = {}
        for piece in info.slices:
            stretch = slice(piece.start, piece.stop)
            codes[piece.start] = _encoded_there(codec, total[stretch], residual[stretch])
        marks.append(total.device.mark())
        return codes

    def _assembled(self, run: RunPlan, encoded: Sequence[EncodedSlices | None]) -> EncodedRun:
        codec = self.compression.codec
        found = [None if (own := encoded[piece.index]) is None else own[piece.start] for piece in run.pieces]
        entries = np.array([0 if one is None else one[1] for one in found], np.uint32)
        present = [one[0].data for one in found if one is not None]
        payload = present[0] if len(present) == 1 else memoryview(b"".join(present))
        return payload, Encoded(codec.encoding, codec.parameter, entries)

    def through_on_devices(self, key: Key, parts: Sequence[OnDevice], home: Device) -> list[Array]:
        """The contributions of a key after encoding, the copy to `home` and decoding, each with a separate residual.

        Only codes are copied between GPUs. On `home` the codes of one and two bits are decoded into a single sum.
        """
        from kvdist.kvstore.device import moved, uploaded  # a feature at a seam: loaded where it is used

        codec = self.compression.codec
        if isinstance(codec, Scaled | TopK):
            return [uploaded(bits, home).array for bits in self.through(key, as_host_bits(parts))]
        codes = []
        for place, part in enumerate(parts):
            own = part.device.kernels.empty(coded_size(codec.encoding, part.size), np.dtype(np.uint8))
            codec.write(part.array, self._residual_on((key, place), part), part.device.kernels, own)
            codes.append(OnDevice(part.device, own))
        return _decoded(codec, [moved(one, home) for one in codes], parts[0].size, home)

    def _encode(self, parts: Sequence[Bits], residual: Bits) -> tuple[Bits, int]:
        gradient = parts[0]
        if len(parts) > 1:
            gradient = np.empty_like(residual)
            self._kernels.weighted_sum(parts, [1.0] * len(parts), DType.FLOAT32, gradient)
        return encode(self.compression.codec, gradient, residual, self._kernels)

    def _through(self, part: Bits, residual: Bits) -> Bits:
        decoded = np.empty_like(residual)
        codec = self.compression.codec
        padded, entries = encode(codec, part, residual, self._kernels)
        data = padded[: coded_size(codec.encoding, entries)]
        decode(codec.encoding, codec.parameter, data, entries, decoded, self._kernels)
        return decoded

    def _residual_on(self, name: Any, part: OnDevice) -> Array:
        """The residual of a key, or of a key and the place of a contribution in its list, on the gradient's GPU."""
        device = part.device
        with self._lock:
            residual = self._residuals.get(name)
            if isinstance(residual, OnDevice) and residual.device is device:
                return residual.array
            own = device.kernels.zeros(part.size, np.dtype(np.float32))
            if isinstance(residual, OnDevice):
                device.copy(residual.array, own, residual.device)
            elif residual is not None:
                device.upload(residual, own)
                device.mark().wait()
            self._residuals[name] = OnDevice(device, own)
            return own

    def _residual(self, name: Any, size: int) -> Bits:
        residual = self._residuals.get(name)
        if isinstance(residual, OnDevice):
            residual = self._residuals[name] = residual.on_host()
        elif residual is None:
            residual = self._residuals[name] = np.zeros(size, np.float32)
        return residual


def _key_of(name: Any) -> Any:
    return name[0] if isinstance(name, tuple) else name


def _encoded_there(codec: EachCodec, part: OnDevice, residual: Array) -> tuple[Bits, int]:
    """The codes of a slice, in host memory that is valid after a wait for a later event of the GPU."""
    whole, data = room(codec.encoding, part.size)
    codes = part.device.kernels.empty(data.size, data.dtype)
    codec.write(part.array, residual, part.device.kernels, codes)
    part.device.download(codes, data)
    return whole, part.size


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
