"""What a push sends: per run of its plan the bytes, the flags, and the numbers of the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdist.core.worker.requests import RunData, RunPlan
from kvdist.kernels.interface import DeviceEvent, Kernels
from kvdist.kvstore.descent import Descent
from kvdist.kvstore.devices import as_host_bits
from kvdist.kvstore.handed import Given
from kvdist.kvstore.settings import Settings, used_settings
from kvdist.kvstore.staging import Buffers, Reads, Staging
from kvdist.protocol.arrays import U8
from kvdist.protocol.messages import Flag

SAMPLES_MAX = (1 << 32) - 1
"""A message has four bytes for it."""


@dataclass(slots=True)
class Contribution:
    """One push: its runs, and the buffers that they occupy until they are counted."""

    staging: Staging
    runs: list[RunData]
    buffers: Buffers = field(default_factory=list)
    marks: list[DeviceEvent] = field(default_factory=list)
    """What GPUs still copy into the payloads."""

    def settle(self) -> None:
        """Wait until the payloads are filled. To be called before they are sent, on the node's thread.

        The program goes on meanwhile, and the GPU copies one push while the program asks for the next one's sums.
        """
        for mark in self.marks:
            mark.wait()
        self.marks.clear()

    def release(self) -> None:
        """It is counted: its buffers may be filled again. Called from the node's thread."""
        if self.buffers:
            self.staging.give_back(self.buffers)


@dataclass(frozen=True, slots=True)
class Terms:
    """How the servers are to count a push; see `KVStore.push`."""

    average: bool
    samples: int

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= SAMPLES_MAX:
            raise ValueError(f"samples is {self.samples}; it counts examples, from 0 to {SAMPLES_MAX}")


def contribute(
    staging: Staging,
    given: Given,
    settings: Settings,
    terms: Terms,
    kernels: Kernels,
    lent: Sequence[memoryview | None],
    reads: Reads,
    descent: Descent,
) -> Contribution:
    """Lay out the arrays of a push.

    Args:
        staging: the buffers of this list of keys.
        given: what is pushed.
        settings: the numbers of the optimizer that travel along.
        terms: how the push counts.
        kernels: what sums over devices.
        lent: per run the caller's own memory that is sent, or an encoded payload, or None.
        reads: whether whoever a run is sent to shares memory with this process.
        descent: brings down what lies on GPUs.
    """
    plan, bits = staging.plan, given.bits
    distinct, setting_of_key = settings
    flag = int(Flag.AVERAGE) if terms.average else 0
    buffers: Buffers = []
    marks: list[DeviceEvent] = []
    if all(bits):
        payloads, buffers, marks = staging.fill(bits, kernels, lent, descent if given.is_on_gpus else None)
        flags: list[U8] = [_flags(run, flag) for run in plan.runs]
    else:
        # Some key has no value here. That is rare, so it may be slow, and occupies no buffers.
        empty = np.array([not parts for parts in bits])
        flags = [_flags(run, flag) | np.where(empty[run.key_of], Flag.EMPTY, 0).astype(np.uint8) for run in plan.runs]
        payloads = [
            _payload_of_some(run, given, kernels) if own is None else own
            for run, own in zip(plan.runs, lent, strict=True)
        ]
    runs = []
    for run, payload, run_flags in zip(plan.runs, payloads, flags, strict=True):
        own, index = used_settings(distinct, None if setting_of_key is None else setting_of_key[run.key_of])
        runs.append(RunData(run, payload, (), run_flags, own, index, samples=terms.samples, stays=reads(run)))
    return Contribution(staging, runs, buffers, marks)


def _payload_of_some(run: RunPlan, given: Given, kernels: Kernels) -> memoryview:
    """The payload of a run some of whose keys have no value: those take no bytes."""
    payload = bytearray()
    for piece in run.pieces:
        if not given.bits[piece.index]:
            continue
        info = given.infos[piece.index]
        total = np.empty(piece.stop - piece.start, info.dtype.storage)
        parts = as_host_bits([part[piece.start : piece.stop] for part in given.bits[piece.index]])
        kernels.weighted_sum(parts, [1.0] * len(parts), info.dtype, total)
        payload += total.tobytes()
        payload += b"\0" * (-total.nbytes % 8)
    return memoryview(payload)


def _flags(run: RunPlan, flag: int) -> U8:
    return np.full(len(run.ids), flag, np.uint8)
