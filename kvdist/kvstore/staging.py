"""The payloads of a push: memory laid out as its plan says, in which contributions wait until they are counted.

A plan's buffers are used again and again, because the first touch of fresh memory costs several times a copy.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import ALONE_BYTES_MIN, KeyInfo, Plan, RunData, RunPlan, make_plan
from kvdist.dtypes import DType
from kvdist.kernels.interface import DeviceEvent, Kernels
from kvdist.kvstore.arguments import PushArgs, Settings, run_hyperparameters
from kvdist.kvstore.backend import Lending, PushOptions
from kvdist.kvstore.device import Download, OnDevice, Part, as_host_bits
from kvdist.kvstore.values import Key
from kvdist.protocol.arrays import U8, Bits
from kvdist.protocol.messages import Flag
from kvdist.transport.shared_memory.allocator import Allocator

STAGED_BYTES_MIN = 64 << 20
STAGED_MODELS_MAX = 4
"""Buffers are kept for lists of keys used lately: this many times the bytes of all keys, or at least those."""

SETS_KEPT_MAX = 2
"""One set is being filled while the other one is under way."""

PAIRS_COMPARED_MAX = 1 << 20
"""Above this it costs more to see whether arrays overlap than to copy them."""

Shares = Callable[[int], bool]
"""Whether the server of a rank shares memory with this process."""

Reads = Callable[[RunPlan], bool]
"""Whether the receiver of a run reads it where it lies."""

Buffers = list["RunBuffer | None"]
"""One for each run of a plan that needed one."""


class RunBuffer:
    """The payload of one run, and a typed view of each of its slices."""

    def __init__(self, plan: RunPlan, memory: Allocator) -> None:
        bytes_ = memory.allocate(max(plan.nbytes, 1))
        bytes_.fill(0)  # once, so that the padding is defined
        self.payload = bytes_.data[: plan.nbytes]
        self.views: list[Bits] = []
        codes = plan.dtypes.tolist()
        typed = {code: bytes_[: plan.nbytes].view(DType(code).storage) for code in set(codes)}
        for piece, code in zip(plan.pieces, codes, strict=True):
            whole = typed[code]
            first = piece.offset // whole.itemsize
            self.views.append(whole[first : first + piece.stop - piece.start])


class Staging:
    """The buffers of one plan: as many sets as are under way at once."""

    def __init__(self, plan: Plan, memory: Allocator, traffic: Traffic) -> None:
        self.plan = plan
        self._traffic = traffic
        self._memory = memory
        self.nbytes = sum(run.nbytes for run in plan.runs)
        """Bytes of one set of buffers."""
        # What a burst of pushes needed more than this is not kept.
        self._free: deque[Buffers] = deque(maxlen=SETS_KEPT_MAX)

    def fill(
        self,
        arrays: Sequence[Sequence[Part]],
        kernels: Kernels,
        lent: Sequence[memoryview | None],
        download: Download | None = None,
    ) -> tuple[list[memoryview], Buffers, list[DeviceEvent]]:
        """The payload of each run, the buffers that they occupy, and what to wait for before they are sent.

        Each key's array is copied, summed over devices on the way: one pass over the bytes. Runs for which a payload is
        lent need none.

        Args:
            arrays: per key of the plan its contributions, one per device, as bits.
            kernels: what sums.
            lent: per run the caller's own memory to be used as the payload, or None.
            download: brings down what lies on GPUs; None where nothing does.
        """
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = [None] * len(self.plan.runs)
        payloads = []
        marks: list[DeviceEvent] = []
        try:
            for i, (run, payload) in enumerate(zip(self.plan.runs, lent, strict=True)):
                if payload is None:
                    buffer = buffers[i] = buffers[i] or RunBuffer(run, self._memory)
                    if download is None:
                        self._copy(run, buffer, arrays, kernels)
                    else:
                        download.bring(self.plan, run, buffer.payload, buffer.views, arrays, kernels, marks)
                    self._traffic.copied_in += run.nbytes
                    payload = buffer.payload
                payloads.append(payload)
        except BaseException:
            for mark in marks:  # the buffers are let go, and a GPU may still be writing into them
                mark.wait()
            raise
        return payloads, buffers, marks

    def give_back(self, buffers: Buffers) -> None:
        """These buffers are counted; they may be filled again. Called from the node's thread."""
        self._free.append(buffers)

    def _copy(self, run: RunPlan, buffer: RunBuffer, arrays: Sequence[Sequence[Any]], kernels: Kernels) -> None:
        if run.whole_keys is not None and all(len(arrays[index]) == 1 for index in run.whole_keys):
            for index, view in zip(run.whole_keys, buffer.views, strict=True):
                view[...] = arrays[index][0]
            return
        for piece, view in zip(run.pieces, buffer.views, strict=True):
            parts = [part[piece.start : piece.stop] for part in arrays[piece.index]]
            if len(parts) == 1:
                view[...] = parts[0]
            else:
                kernels.weighted_sum(parts, [1.0] * len(parts), self.plan.keys[piece.index].dtype, view)


PLAN_BYTES = 512
"""What a plan takes for each of its keys, roughly: where keys are small it is more than their buffers."""


class Stagings:
    """The buffers of the lists of keys that were used lately.

    Args:
        slice_bytes: the size up to which small slices travel together.
        memory: where the buffers lie.
        traffic: where passes are counted.
    """

    def __init__(self, slice_bytes: int, memory: Allocator, traffic: Traffic) -> None:
        self._traffic = traffic
        self._slice_bytes = slice_bytes
        self._memory = memory
        self._by_keys: OrderedDict[tuple[Key, ...], Staging] = OrderedDict()
        """The latest last."""
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_keys)

    def of(self, infos: Sequence[KeyInfo], all_bytes: int) -> Staging:
        """The plan and buffers for these keys in this order; `all_bytes` is the size of all keys of the store."""
        names = tuple([info.key for info in infos])
        with self._lock:  # the node's thread lays out what was gathered
            staging = self._by_keys.get(names)
            if staging is None:
                return self._made(names, infos, all_bytes)
            self._by_keys.move_to_end(names)
            return staging

    def _made(self, names: tuple[Key, ...], infos: Sequence[KeyInfo], all_bytes: int) -> Staging:
        staging = self._by_keys[names] = Staging(make_plan(infos, self._slice_bytes), self._memory, self._traffic)
        self._nbytes += staging.nbytes + PLAN_BYTES * len(names)
        allowed = max(STAGED_BYTES_MIN, STAGED_MODELS_MAX * all_bytes)
        while self._nbytes > allowed and len(self._by_keys) > 1:
            # A script that shuffles its list of keys would otherwise keep buffers for every order.
            keys, oldest = self._by_keys.popitem(last=False)
            self._nbytes -= oldest.nbytes + PLAN_BYTES * len(keys)
        return staging


def lend(
    run: RunPlan, arrays: Sequence[Sequence[Part]], lending: Lending, reads: Reads, memory: Allocator
) -> memoryview | None:
    """The caller's own memory as the payload of a run; None where it has to be copied first.

    Only a large slice of one array can be lent: it travels alone. To a server that shares memory it goes by a copy into
    that memory, unless it lies there already: one pass instead of the two that a socket makes.

    Args:
        run: the run.
        arrays: per key of the plan its contributions as bits.
        lending: what may be lent.
        reads: whether its receiver shares memory with this process.
        memory: what would be shared.
    """
    if lending is Lending.NOTHING or len(run.pieces) > 1 or run.nbytes < ALONE_BYTES_MIN:
        return None
    piece = run.pieces[0]
    parts = arrays[piece.index]
    if len(parts) != 1 or isinstance(parts[0], OnDevice):
        return None
    bytes_ = parts[0][piece.start : piece.stop].view(np.uint8)
    if len(bytes_) < run.nbytes or not (memory.owns(bytes_) or (lending is Lending.EVERYTHING and not reads(run))):
        return None
    return bytes_.data


def reaches_another(arrays: Sequence[Sequence[Part]], results: Sequence[Bits]) -> bool:
    """Whether the result of some key is written where the array of another key lies, which must not be lent then.

    Args:
        arrays: per key its contributions.
        results: per key where its result goes.
    """
    large = [
        (i, part)
        for i, parts in enumerate(arrays)
        for part in parts
        if part.nbytes >= ALONE_BYTES_MIN and not isinstance(part, OnDevice)
    ]
    if not large:
        return False
    if len(large) * len(results) > PAIRS_COMPARED_MAX:
        return True
    sources = np.array([_extent(part) for _, part in large], np.int64).reshape(-1, 2)
    targets = np.array([_extent(result) for result in results], np.int64).reshape(-1, 2)
    meets = (sources[:, None, 0] < targets[None, :, 1]) & (targets[None, :, 0] < sources[:, None, 1])
    keys = np.array([i for i, _ in large], np.intp)
    meets[np.arange(len(large)), keys] = False  # its own value comes back only after it was counted
    return bool(meets.any())


def _extent(array: Bits) -> tuple[int, int]:
    """The first address of a contiguous array, and the one behind it."""
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes


@dataclass(slots=True)
class Payloads:
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


def lay_out(
    staging: Staging,
    given: PushArgs,
    settings: Settings,
    options: PushOptions,
    kernels: Kernels,
    lent: Sequence[memoryview | None],
    reads: Reads,
    download: Download,
) -> Payloads:
    """Lay out the arrays of a push.

    Args:
        staging: the buffers of this list of keys.
        given: what is pushed.
        settings: the numbers of the optimizer that travel along.
        options: how the push counts.
        kernels: what sums over devices.
        lent: per run the caller's own memory that is sent, or an encoded payload, or None.
        reads: whether the receiver of a run shares memory with this process.
        download: brings down what lies on GPUs.
    """
    plan, bits = staging.plan, given.bits
    distinct, setting_of_key = settings
    flag = int(Flag.AVERAGE) if options.average else 0
    buffers: Buffers = []
    marks: list[DeviceEvent] = []
    if all(bits):
        payloads, buffers, marks = staging.fill(bits, kernels, lent, download if given.is_on_gpus else None)
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
        own, index = run_hyperparameters(distinct, None if setting_of_key is None else setting_of_key[run.key_of])
        runs.append(RunData(run, payload, (), run_flags, own, index, samples=options.samples, stays=reads(run)))
    return Payloads(staging, runs, buffers, marks)


def _payload_of_some(run: RunPlan, given: PushArgs, kernels: Kernels) -> memoryview:
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
