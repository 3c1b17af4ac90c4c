"""What a store that compresses keeps: the residual of each key, and how a push is encoded with it.

Rules that hold here:

* Everything about a push that can be wrong has been looked at before its residual is touched.
* A push is encoded in the thread of its caller, before the call returns, so residuals follow the order of the calls.
* A residual starts at zero with the key. It starts again when the values of the key are replaced (`broadcast`) or
  restored (`load_checkpoint`), for what is left over was meant for the values there were. It is not in checkpoints.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from kvdist.core.worker.requests import Bits, KeyInfo
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Kernels
from kvdist.kvstore.devices import OnDevice
from kvdist.kvstore.handed import EncodedSlices
from kvdist.kvstore.values import Key
from kvdist.optimizer.compression import GradientCompression, decode, from_params
from kvdist.protocol.arrays import coded_size

KEYS_NAMED_MAX = 5


class Compressing:
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

    def require_equal(self, other: Compressing) -> None:
        """Check that another call asks for what this store does already.

        Raises:
            ValueError: it asks for something else.
        """
        if other.compression != self.compression:
            raise ValueError(
                f"this store compresses by {self.compression}; it cannot change to {other.compression}. Create a"
                " second store for that"
            )

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


def require_no_keys(keys: Collection[Key]) -> None:
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


def require_uncompressed(compressing: Compressing | None, keys: Iterable[Key], known: Collection[Key]) -> None:
    """Check that keys can still be left uncompressed.

    Raises:
        ValueError: one has been initialised, and is compressed.
    """
    for key in keys:
        if compressing is not None and key in known and compressing.covers(key):
            raise ValueError(f"key {key!r} is initialised and compressed; call leave_uncompressed before its init")


def _key_of(name: Any) -> Any:
    return name[0] if isinstance(name, tuple) else name
