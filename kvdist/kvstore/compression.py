"""Compressed pushes: the residual of each key, how a push is encoded with it, and the payloads of what was encoded.

Invariants:

* Everything about a push that can be wrong has been checked before its residual is touched.
* A push is encoded in the thread of its caller, before the call returns, so residuals follow the order of the calls.
* A residual starts at zero with the key. It starts again when the values of the key are replaced (`broadcast`) or
  restored (`load_checkpoint`). Checkpoints do not contain it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdist.core.worker.requests import Encoded, KeyInfo, Plan, RunData, RunPlan
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device, DeviceEvent, Kernels
from kvdist.kvstore.arguments import EncodedSlices, PushArgs, Settings
from kvdist.kvstore.backend import PushOptions
from kvdist.kvstore.device import Download, OnDevice, Part, as_host_bits, moved, summed, uploaded
from kvdist.kvstore.staging import Payloads, Reads, Staging, lay_out
from kvdist.kvstore.values import Key
from kvdist.optimizer.compression import EachCodec, GradientCompression, Half, TopK, TwoBit, decode, from_params, room
from kvdist.protocol.arrays import U32, Bits, coded_size

KEYS_NAMED_MAX = 5


class StoreCompression:
    """The compression of one store on one worker.

    Args:
        params: as the user gave them.
        exempt: keys that travel as they are; read at each call.
        kernels: what does the arithmetic.

    Raises:
        TypeError, ValueError: see `kvdist.optimizer.compression.from_params`.
    """

    def __init__(self, params: Any, exempt: Collection[Key], kernels: Kernels) -> None:
        self.compression: GradientCompression = from_params(params)
        self._exempt = exempt
        self._kernels = kernels
        self._residuals: dict[Any, Bits | OnDevice] = {}
        """By key, or by key and device; each lies where its gradients come from."""
        self._lock = threading.Lock()

    @property
    def statement(self) -> str:
        """What all workers must have in common, in words."""
        return f"gradient compression by {self.compression}"

    def require_equal(self, other: StoreCompression) -> None:
        """Check that another call asks for what this store does already.

        Raises:
            ValueError: it asks for something else.
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
            ValueError: one has been initialised, and is compressed.
        """
        for key in keys:
            if key in known and self.covers(key):
                raise ValueError(f"key {key!r} is initialised and compressed; call leave_uncompressed before its init")

    def covers(self, key: Key) -> bool:
        """Whether pushes of this key are compressed."""
        return key not in self._exempt

    def require(self, keys: Iterable[tuple[Key, DType]]) -> None:
        """Check that keys about to be initialised can be compressed.

        Raises:
            TypeError: one is not of float32.
        """
        for key, dtype in keys:
            if self.covers(key) and dtype is not DType.FLOAT32:
                raise TypeError(
                    f"key {key!r} is {dtype.label}, and this store compresses gradients, which it can do for float32"
                    " only: convert it, or call leave_uncompressed for this key before"
                )

    def pulled_as(self, key: Key, dtype: DType) -> DType:
        """The type in which values of a key come back."""
        return self.compression.pulled_as if self.covers(key) else dtype

    def forget(self, keys: Iterable[Key] | None = None) -> None:
        """What is left over of these keys, or of all, is no longer wanted."""
        with self._lock:
            gone = None if keys is None else set(keys)
            self._residuals = {
                name: residual
                for name, residual in self._residuals.items()
                if gone is not None and _key_of(name) not in gone
            }

    def encode(self, info: KeyInfo, parts: Sequence[Bits]) -> EncodedSlices:
        """One push of one key, slice by slice, summed over devices first.

        One pass over gradient and residual, and as many more as a sum of several devices takes, in cache.
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
        """What the contributions of a key's devices become on their way, each with a residual of its own."""
        with self._lock:
            return [self._through(part, self._residual((key, device), part.size)) for device, part in enumerate(parts)]

    def _encode(self, parts: Sequence[Bits], residual: Bits) -> tuple[Bits, int]:
        gradient = parts[0]
        if len(parts) > 1:
            gradient = np.empty_like(residual)
            self._kernels.weighted_sum(parts, [1.0] * len(parts), DType.FLOAT32, gradient)
        return self.compression.codec.encode(gradient, residual, self._kernels)

    def _through(self, part: Bits, residual: Bits) -> Bits:
        decoded = np.empty_like(residual)
        codec = self.compression.codec
        padded, entries = codec.encode(part, residual, self._kernels)
        data = padded[: coded_size(codec.encoding, entries)]
        decode(codec.encoding, codec.parameter, data, entries, decoded, self._kernels)
        return decoded

    def residual_on(self, name: Any, part: OnDevice) -> Array:
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


def encode_all(compressing: StoreCompression, given: PushArgs) -> list[EncodedSlices | None]:
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


def _encode(
    compressing: StoreCompression, info: KeyInfo, parts: Sequence[Part], marks: list[DeviceEvent]
) -> EncodedSlices:
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


def through_on_devices(compressing: StoreCompression, key: Key, parts: Sequence[OnDevice], home: Device) -> list[Array]:
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


EncodedRun = tuple[memoryview, U32]
"""The payload of a run, and the entries of each slice."""


def encoded_payloads(
    compressing: StoreCompression,
    staging: Staging,
    given: PushArgs,
    settings: Settings,
    options: PushOptions,
    kernels: Kernels,
    lent: Sequence[memoryview | None],
    reads: Reads,
    download: Download,
) -> Payloads:
    """As `lay_out`, with the runs of compressed keys encoded."""
    encoded = given.encoded
    if encoded is None:
        encoded = encode_all(compressing, given)
    payloads = assembled(staging.plan, encoded)
    lent = [own if found is None else found[0] for own, found in zip(lent, payloads, strict=True)]
    contribution = lay_out(staging, given, settings, options, kernels, lent, reads, download)
    contribution.runs = as_encoded(contribution.runs, payloads, compressing.compression)
    return contribution


def assembled(plan: Plan, encoded: Sequence[EncodedSlices | None]) -> list[EncodedRun | None]:
    """The payload and the entries of each run of a plan whose keys are compressed; None for the others.

    A slice that travels alone is not copied.

    Args:
        plan: how the keys travel.
        encoded: per key of the plan what `StoreCompression.encode` made of it; None where it has no value.
    """
    return [_assembled(run, encoded) if plan.keys[run.pieces[0].index].is_compressed else None for run in plan.runs]


def _assembled(run: RunPlan, encoded: Sequence[EncodedSlices | None]) -> EncodedRun:
    found = [None if (own := encoded[piece.index]) is None else own[piece.start] for piece in run.pieces]
    entries = np.array([0 if one is None else one[1] for one in found], np.uint32)
    present = [one[0].data for one in found if one is not None]
    return present[0] if len(present) == 1 else memoryview(b"".join(present)), entries


def as_encoded(
    runs: Sequence[RunData],
    payloads: Sequence[EncodedRun | None],
    compression: GradientCompression,
) -> list[RunData]:
    """The runs of a push; those that are encoded have `encoded` set. They are sent from ordinary memory."""
    codec = compression.codec
    return [
        run if own is None else replace(run, encoded=Encoded(codec.encoding, codec.parameter, own[1]), stays=False)
        for run, own in zip(runs, payloads, strict=True)
    ]
