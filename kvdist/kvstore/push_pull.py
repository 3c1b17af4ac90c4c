"""Pushes and pulls of arrays on a cluster, from the arguments of a call to its answer.

`ArrayTransfers.transfer` takes a call. Its stages follow in the order of this module:

1. *check*: `push_args` (and `results.pull_args`) check keys, shapes and dtypes, and resolve the arrays to memory;
2. *plan*: `Stagings.of` keeps the plan of a list of keys: which slices travel together to which server;
3. *lend or copy*: `lend` lets a large slice be sent from the caller's memory, `Staging.fill` copies the others;
4. *request*: `push_runs` adds hyperparameters and flags, and the request is left for the node's thread;
5. *finish*: on that thread, once servers have counted the push, results are copied and buffers become free again.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from kvdist.core.policy import Policy
from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import (
    ALONE_BYTES_MIN,
    KeyInfo,
    Plan,
    Request,
    Run,
    RunKind,
    RunPlan,
    Transfer,
    make_plan,
)
from kvdist.dtypes import DType
from kvdist.errors import ConfigError
from kvdist.kernels.interface import DeviceEvent, Kernels
from kvdist.kvstore import values
from kvdist.kvstore.backend import Backend, Lending, PushOptions, PushPull, combined, resolved
from kvdist.kvstore.coalescing import SMALL_BYTES_MAX, Coalescer, Hyperparameters
from kvdist.kvstore.keys import KeyTable, as_dense, named
from kvdist.kvstore.placement import Devices, OnDevice, Part, as_host_bits, names_gpus, require_one_kind
from kvdist.kvstore.results import PullArgs, SharedResults, cut, new_results, pull_args, reaches_another
from kvdist.kvstore.values import Key, Keys, Value
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.arrays import U8, Bits, padded
from kvdist.protocol.messages import Flag
from kvdist.runtime.cluster import Cluster
from kvdist.runtime.node import Finish
from kvdist.transport.shared_memory.allocator import Allocator

if TYPE_CHECKING:
    from kvdist.kvstore.compression import EncodedRun, EncodedSlices
    from kvdist.kvstore.device import DeviceTransfers

_NOT_READ: Future[None] = resolved(None)
"""Completed future, returned for a push without an answer for the caller."""

Reads = Callable[[RunPlan], bool]
"""Predicate: the receiver of a run reads its payload in shared memory."""


class ArrayTransfers:
    """Pushes and pulls of a store.

    Args:
        cluster: this process's membership.
        policy: when servers make a version.
        backend: keys, kernels, GPUs and compression of the store; takes errors of pushes without a future.
        check: raises an error once pushes are refused.
    """

    def __init__(
        self,
        cluster: Cluster,
        policy: Policy,
        backend: Backend,
        check: Callable[[], None],
    ) -> None:
        self.optimizer: Optimizer | None = None
        """Optimizer whose hyperparameters travel with each push; None while the store sums."""
        self.must_update = False
        """Whether pushes without an optimizer are refused, because workers may be lost without ending the job."""
        self.on_loss = "fail"
        """Value of ``KVDIST_ON_LOSS``, for the message of that refusal."""
        self._cluster = cluster
        self._backend = backend
        self._keys = backend.keys
        self._kernels = backend.kernels
        self._devices = backend.devices
        self._gpus: DeviceTransfers | None = None
        """Transfers between GPUs and the host; None until a call first needs them."""
        self._gpus_lock = threading.Lock()
        self.check = check
        self._stagings = Stagings(policy.slice_bytes(cluster.config.limits), cluster.memory, cluster.traffic)
        # Only what waits for everybody's pushes is summed on the way to a server.
        self._is_summed = policy.is_lockstep
        node = self._node = cluster.node
        self._coalescer = Coalescer(
            self._lay_out_batch,
            self._plan_pull,
            lambda answer, make, growing: node.submit_for(answer, make, growing=growing),
            node.hurry,
            backend.note_error,
            cluster.under_way.leave,
        )

    def close(self) -> None:
        """Free the pinned memory of results; no call follows."""
        if self._gpus is not None:
            self._gpus.close()

    def flush(self) -> None:
        """Let the coalesced calls be sent."""
        self._coalescer.close()

    def submit(self, make: Callable[[int], Request], finish: Finish | None) -> Future[Any]:
        """Leave a request for the node's thread, behind all earlier calls; see `Node.submit`."""
        self._coalescer.close()
        return self._node.submit(make, finish)

    def ask(self, make: Callable[[int], Request]) -> Any:
        """Leave a request for the node's thread, behind all earlier calls, and wait for its result."""
        self._coalescer.close()
        return self._cluster.ask(make)

    # The calls.

    def transfer(self, call: PushPull) -> Future[Any]:
        """Push and pull; a future of the call's return value, already complete for a push whose answer is not awaited.

        With `call.shared`, large results are returned as views of shared memory, except results for GPUs.
        """
        if not call.pushes:
            return self._pull(call)
        if self.optimizer is None and self.must_update:
            refuse_to_sum(self.on_loss)
        if call.lending is Lending.NOTHING and not call.pulls:
            return self._push_unread(call)
        if not call.pulls:
            return self._push(push_args(self._keys, call.key, call.value, self._devices), call)
        return self._push(*self.pushed_and_pulled(call))

    def pushed_and_pulled(self, call: PushPull) -> tuple[PushArgs, PushPull, PullArgs]:
        """Checked push arguments, the call, and its checked results.

        The returned call lends nothing if a result would overwrite memory that is pushed.
        """
        given = push_args(self._keys, call.key, call.value, self._devices)
        places = self._places(call.key, call.value if call.out is None else call.out)
        if call.out is not None and given.may_be_lent and reaches_another(given.bits, places.results):
            call = replace(call, lending=Lending.NOTHING)
        return given, call, places

    def _push_unread(self, call: PushPull) -> Future[None]:
        """Push; the caller's arrays may be changed when this returns, and no caller waits for the answer."""
        plain = self._keys.plain_one(call.key, call.value)
        if plain is not None and plain[1].nbytes <= SMALL_BYTES_MAX:
            self._push_coalesced(*plain, call)
            return _NOT_READ
        given = push_args(self._keys, call.key, call.value, self._devices)
        if _is_one_small(given):
            (bits,) = as_host_bits(given.bits[0])
            self._push_coalesced(given.infos[0], bits, call)
        else:
            self._push(given, call).add_done_callback(self._backend.note_failed)
        return _NOT_READ

    def _pull(self, call: PushPull) -> Future[Any]:
        """Pull into `out`, or into new arrays."""
        if call.out is None:
            return self._pull_into(*new_results(self._keys, call.key), call.priority)
        # Pulls of small keys that are asked for one by one travel together.
        may_join = call.lending is Lending.RESIDENT
        plain = self._keys.plain_one(call.key, call.out, writable=True) if may_join else None
        if plain is not None and _is_coalesced(*plain):
            return self._coalescer.pull(*plain, None, call.priority)
        places = self._places(call.key, call.out, call.skips_rows)
        if may_join and len(places.infos) == 1 and _is_coalesced(places.infos[0], places.results[0]):
            finish = None if places.is_direct else places.spread
            return self._coalescer.pull(places.infos[0], places.results[0], finish, call.priority)
        return self._pull_into(places.infos, places.results, places.spread, call.priority)

    def give(self, kind: RunKind, given: Sequence[tuple[Key, Any]]) -> None:
        """Send first or new values, and wait until the servers have them."""
        staging = self._staging([self._keys[one] for one, _ in given])
        arrays = [[values.read_bits(array)] for _, array in given]
        # The caller waits, so its own memory is sent where it can be.
        lent = self._lent(
            staging.plan, arrays, Lending.EVERYTHING, lambda run: self._node.view.shares_memory(run.server)
        )
        own = staging.fill(arrays, self._kernels, lent)
        runs = [Run(plan, payload) for plan, payload in zip(staging.plan.runs, own.memory, strict=True)]
        label = f"init of {named(staging.plan.keys)}"
        self.ask(lambda number: Transfer(number, kind, label, runs))

    # From checked arguments to requests.

    def _push(self, given: PushArgs, call: PushPull, places: PullArgs | None = None) -> Future[Any]:
        """Push, and pull into `places`. A large push that is compressed is split, so that sending overlaps encoding."""
        label = f"{'push' if places is None else 'pushpull'} of {named(given.infos)}"
        parts = [slice(None)] if self._backend.compression is None or call.shared else parts_of(given.infos)
        if len(parts) == 1:
            return self._push_part(given, call, label, places, None if places is None else places.spread)
        return combined(
            [
                self._push_part(given.part(part), call, label, None if places is None else places.part(part))
                for part in parts
            ],
            _nothing if places is None else places.spread,
        )

    def _push_part(
        self,
        given: PushArgs,
        call: PushPull,
        label: str,
        places: PullArgs | None,
        spread: Finish | None = None,
    ) -> Future[Any]:
        """Lay out a push and leave it for the node's thread; its bytes are in flight until servers have counted it.

        Args:
            given: keys and contributions.
            call: options of the call.
            label: name of the request in messages.
            places: memory of the results; None for a push without a pull.
            spread: called when the results have arrived.
        """
        if places is None:
            return self.lay_out(RunKind.PUSH, given, call, label, lambda own: own.release)
        return self.lay_out(RunKind.PUSHPULL, given, call, label, lambda own: self._answered(own, call, places, spread))

    def lay_out(
        self, kind: RunKind, given: PushArgs, call: PushPull, label: str, finish_of: Callable[[Payloads], Finish]
    ) -> Future[Any]:
        """Lay out a push and leave it for the node's thread.

        `finish_of` may change the runs; it returns the function that is called when servers have counted them.
        """
        staging = self._staging(given.infos)

        def submit() -> Future[Any]:
            settings = plan_hyperparameters(staging.plan, self.optimizer)
            lent = self._lent(staging.plan, given.bits, call.lending, self._reads_pushes)
            own = self._laid_out(staging, given, settings, call.options, lent)

            def make(number: int) -> Request:
                own.wait_for_gpu()
                return Transfer(number, kind, label, own.runs, call.priority)

            self._cluster.batches_pushed += call.options.samples > 0
            try:
                return self.submit(make, finish_of(own))
            except BaseException:
                own.wait_for_gpu()  # the buffers become free, and a GPU may still be writing into them
                raise

        return self._cluster.under_way.count(staging.nbytes, self.check, submit)

    def _answered(self, own: Payloads, call: PushPull, places: PullArgs, spread: Finish | None) -> Finish:
        """The function to call when results have arrived; sets the destinations of the results in the runs."""
        shared = None
        if call.shared and places.is_direct:  # else a result is wanted in the caller's arrays besides
            shared = SharedResults(own.staging.plan, self._shows_results)
        for i, run in enumerate(own.runs):
            if shared is not None and shared.keeps(run.plan):
                own.runs[i] = shared.keeping(run)
            else:
                run.sinks = cut(run.plan, places.results)

        def finish() -> Any:
            shown = [None] * len(places.infos) if call.shared else None
            if shared is not None:
                shown = shared.shown(self._cluster.memory, places.results, self._keys, self._cluster.traffic)
            if spread is not None:
                spread()
            own.release()
            return shown

        return finish

    def _push_coalesced(self, info: KeyInfo, bits: Bits, call: PushPull) -> None:
        setting = hyperparameters_of(info, self.optimizer)
        nbytes, encoded = padded(bits.nbytes), None
        self._cluster.under_way.enter(nbytes, self.check)
        try:
            # Encoded now, not when it leaves: residuals follow the order of the calls.
            if info.is_compressed and self._backend.compression is not None:
                encoded = self._backend.compression.encode(info, [bits])
            self._coalescer.push(info, bits, setting, call.priority, call.options, encoded)
        except BaseException:
            self._cluster.under_way.leave(nbytes)
            raise

    def _pull_into(
        self, infos: Sequence[KeyInfo], results: Sequence[Bits], finish: Finish, priority: int
    ) -> Future[Any]:
        runs = self._plan_pull(infos, results)
        label = f"pull of {named(infos)}"
        return self.submit(lambda number: Transfer(number, RunKind.PULL, label, runs, priority), finish)

    def _plan_pull(self, infos: Sequence[KeyInfo], results: Sequence[Bits]) -> list[Run]:
        return [Run(run, sinks=cut(run, results)) for run in self._staging(infos).plan.runs]

    def _places(self, key: Keys, out: Value, skips_rows: bool = False) -> PullArgs:
        return pull_args(self._keys, key, out, self._device_transfers, skips_rows)

    def _staging(self, infos: Sequence[KeyInfo]) -> Staging:
        return self._stagings.of(infos, self._keys.nbytes)

    def _lent(
        self, plan: Plan, bits: Sequence[Sequence[Part]], lending: Lending, reads: Reads
    ) -> list[memoryview | None]:
        return [lend(run, bits, lending, reads, self._cluster.memory) for run in plan.runs]

    def _lay_out_batch(
        self,
        infos: list[KeyInfo],
        bits: Sequence[Sequence[Bits]],
        encoded: list[EncodedSlices | None],
        options: PushOptions,
        settings: Sequence[Hyperparameters],
    ) -> tuple[Sequence[Run], Finish]:
        """The runs of a batch of small pushes, and the function to call when servers have counted them."""
        staging = self._staging(infos)
        lent: list[memoryview | None] = [None] * len(staging.plan.runs)
        own = self._laid_out(staging, PushArgs(infos, bits), gathered(settings), options, lent, encoded)
        return own.runs, own.release

    def _laid_out(
        self,
        staging: Staging,
        given: PushArgs,
        settings: Settings,
        options: PushOptions,
        lent: list[memoryview | None],
        encoded: Sequence[EncodedSlices | None] | None = None,
    ) -> Payloads:
        """A push in the memory from which it is sent; `encoded` has the codes of keys that are encoded already."""
        codes: Sequence[EncodedRun | None] = [None] * len(lent)
        if self._backend.compression is not None:
            codes = self._backend.compression.encoded_runs(staging.plan, given.bits, encoded)
            lent = [own if code is None else code[0] for own, code in zip(lent, codes, strict=True)]
        bring = self._device_transfers().bring if given.is_on_gpus else None
        own = staging.fill(given.bits, self._kernels, lent, bring)
        own.runs = push_runs(staging.plan, own.memory, given.bits, settings, options, codes, self._reads_pushes)
        return own

    def _device_transfers(self) -> DeviceTransfers:
        with self._gpus_lock:
            if self._gpus is None:
                from kvdist.kvstore.device import DeviceTransfers  # a feature at a seam: loaded where it is used

                self._gpus = DeviceTransfers(self._devices)
            return self._gpus

    def _reads_pushes(self, run: RunPlan) -> bool:
        """Whether the receiver of a push reads this run's payload in shared memory."""
        view = self._node.view
        return view.reads_pushes(run) if self._is_summed else view.shares_memory(run.server)

    def _shows_results(self, server: int) -> bool:
        """Whether this server answers with values in shared memory."""
        view = self._node.view
        return view.shows_results(server) if self._is_summed else view.shares_memory(server)


def _nothing() -> None:
    """Do nothing: a push without a pull has no results to copy."""


def _is_coalesced(info: KeyInfo, result: Bits) -> bool:
    """Whether a pull of this key may be coalesced with others: the value is small, and a single slice."""
    return result.nbytes <= SMALL_BYTES_MAX and len(info.slices) == 1


PART_BYTES = 8 << 20
"""Bytes of values in a part of a compressed push: a millisecond of encoding, and some four messages."""


def parts_of(infos: Sequence[KeyInfo], part_bytes: int = PART_BYTES) -> list[slice]:
    """Stretches of a list of keys, each but the last with at least `part_bytes` of values; never an empty list."""
    parts, begin, nbytes = [], 0, 0
    for i, info in enumerate(infos):
        nbytes += info.size * info.dtype.itemsize
        if nbytes >= part_bytes:
            parts.append(slice(begin, i + 1))
            begin, nbytes = i + 1, 0
    if begin < len(infos) or not parts:
        parts.append(slice(begin, len(infos)))
    return parts


# 1. What is pushed.


@dataclass(slots=True)
class PushArgs:
    """Keys and contributions of a push.

    Attributes:
        infos: the keys.
        bits: per key the contributions of its devices, where they lie; empty for a key without a gradient.
        is_on_gpus: whether some contribution lies on a GPU.
        may_be_lent: whether some contribution may be large enough to be sent from the caller's memory.
    """

    infos: Sequence[KeyInfo]
    bits: Sequence[Sequence[Part]]
    is_on_gpus: bool = False
    may_be_lent: bool = True

    def part(self, place: slice) -> PushArgs:
        """The arguments of some of the keys."""
        return replace(self, infos=self.infos[place], bits=self.bits[place])


def push_args(keys: KeyTable, key: Keys, value: Value, devices: Devices) -> PushArgs:
    """Keys and contributions of a push, checked.

    Raises:
        DeviceError: a GPU cannot be used, or some values of a key lie on the host and some on GPUs.
        KeyNotInitialised, TypeError, ValueError: a key or a value is wrong; the message names the key.
    """
    plain = keys.plain_list(key, value)
    if plain is not None:
        expected, arrays = plain
        # Tuples, because they come from a free list, and lists of thousands of new lists make Python look for cycles.
        return PushArgs(expected.infos, list(zip(arrays)), may_be_lent=expected.largest >= ALONE_BYTES_MIN)
    pairs = values.pairs(key, value)
    matched = keys.matched([(one, [as_dense(one, array, devices) for array in arrays]) for one, arrays in pairs])
    infos = [info for info, _ in matched]
    if not names_gpus(matched):
        return PushArgs(infos, [[values.read_bits(array) for array in arrays] for _, arrays in matched])
    for info, arrays in matched:
        require_one_kind(info.key, arrays)
    bits = [[devices.read(array, info.dtype) for array in arrays] for info, arrays in matched]
    return PushArgs(infos, bits, any(isinstance(part, OnDevice) for parts in bits for part in parts))


def _is_one_small(given: PushArgs) -> bool:
    """Whether the push is a single small array of a single key, in host memory."""
    if len(given.infos) != 1 or len(given.bits[0]) != 1 or given.is_on_gpus:
        return False
    return given.bits[0][0].nbytes <= SMALL_BYTES_MAX


# 2. The plan of a list of keys, and the buffers that are laid out as it says.

STAGED_BYTES_MIN = 64 << 20
STAGED_MODELS_MAX = 4
"""Bytes of buffers that are kept for the latest lists of keys: `STAGED_MODELS_MAX` times the bytes of all keys, at
least `STAGED_BYTES_MIN`."""

JOINED_BYTES_MAX = 1 << 10
"""Average size below which arrays of a packed run are joined before the copy: for such arrays a second copy of all
bytes costs less than a NumPy copy of each array."""
SETS_KEPT_MAX = 2
"""Number of sets of buffers kept for a plan: a set is filled while another is in flight."""

Buffers = list["RunBuffer | None"]
"""The buffer of each run of a plan; None for a run that has needed no buffer yet."""

Bring = Callable[
    [Plan, RunPlan, memoryview, Sequence[Bits], Sequence[Sequence[Part]], Kernels, list[DeviceEvent]], None
]
"""See `DeviceTransfers.bring`."""

PLAN_BYTES = 512
"""Approximate size of a plan for each of its keys: with small keys a plan is larger than its buffers."""


class Stagings:
    """Plans and buffers of the lists of keys that were used lately.

    Args:
        slice_bytes: the size up to which small slices travel together.
        memory: allocator of the buffers.
        traffic: counters of copied bytes.
    """

    def __init__(self, slice_bytes: int, memory: Allocator, traffic: Traffic) -> None:
        self._traffic = traffic
        self._slice_bytes = slice_bytes
        self._memory = memory
        self._by_keys: OrderedDict[tuple[Key, ...], Staging] = OrderedDict()
        """Plan and buffers of each list of keys, the latest last."""
        self._latest: tuple[Sequence[KeyInfo], Staging] | None = None
        """The latest list of keys, as the object that `KeyTable` has for it, which never changes; and its buffers."""
        self._nbytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_keys)

    def of(self, infos: Sequence[KeyInfo], all_bytes: int) -> Staging:
        """The plan and buffers for these keys in this order; `all_bytes` is the size of all keys of the store."""
        with self._lock:  # the node's thread lays out what was gathered
            if self._latest is not None and self._latest[0] is infos:
                return self._latest[1]
            names = tuple([info.key for info in infos])
            staging = self._by_keys.get(names)
            if staging is None:
                staging = self._made(names, infos, all_bytes)
            self._by_keys.move_to_end(names)
            self._latest = (infos, staging) if type(infos) is tuple else None
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


class RunBuffer:
    """The payload of a run, and a typed view of each of its slices."""

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
    """The buffers of a plan: as many sets as are in flight at once.

    Buffers are reused, because the first touch of fresh memory costs several times a copy.
    """

    def __init__(self, plan: Plan, memory: Allocator, traffic: Traffic) -> None:
        self.plan = plan
        self._traffic = traffic
        self._memory = memory
        self.nbytes = sum(run.nbytes for run in plan.runs)
        """Bytes of a set of buffers."""
        # What a burst of pushes needed more than this is not kept.
        self._free: deque[Buffers] = deque(maxlen=SETS_KEPT_MAX)

    def fill(
        self,
        arrays: Sequence[Sequence[Part]],
        kernels: Kernels,
        lent: Sequence[memoryview | None],
        bring: Bring | None = None,
    ) -> Payloads:
        """The payload of each run: lent memory, or a copy of the arrays, summed over devices on the way.

        Makes a single pass over the bytes that are copied.

        Args:
            arrays: per key of the plan its contributions as bits, an array per device.
            kernels: kernels for the sums.
            lent: per run the caller's memory, or an encoded payload, or None for a run that is copied.
            bring: enqueues copies from GPUs; None if no contribution lies on a GPU.
        """
        devices = set(map(len, arrays))
        if 0 in devices:
            # Some key has no value here. That is rare, so it may be slow, and occupies no buffers.
            runs = zip(self.plan.runs, lent, strict=True)
            return Payloads(self, [self._without(run, arrays, kernels) if own is None else own for run, own in runs])
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = [None] * len(self.plan.runs)
        filled = Payloads(self, [], buffers)
        single = list(chain.from_iterable(arrays)) if devices == {1} else None
        try:
            for i, (run, payload) in enumerate(zip(self.plan.runs, lent, strict=True)):
                if payload is None:
                    buffer = buffers[i] = buffers[i] or RunBuffer(run, self._memory)
                    if bring is None:
                        self._copy(run, buffer, arrays, kernels, single)
                    else:
                        bring(self.plan, run, buffer.payload, buffer.views, arrays, kernels, filled.marks)
                    self._traffic.copied_in += run.nbytes
                    payload = buffer.payload
                filled.memory.append(payload)
        except BaseException:
            filled.wait_for_gpu()  # the buffers become free, and a GPU may still be writing into them
            raise
        return filled

    def give_back(self, buffers: Buffers) -> None:
        """Keep the buffers of a push that servers have counted for the next push. Called from the node's thread."""
        self._free.append(buffers)

    def _copy(
        self,
        run: RunPlan,
        buffer: RunBuffer,
        arrays: Sequence[Sequence[Any]],
        kernels: Kernels,
        single: Sequence[Any] | None,
    ) -> None:
        """Fill a buffer; `single` has the only array of each key, if no key has more."""
        if run.whole_keys is not None and single is not None:
            own = [single[index] for index in run.whole_keys]
            if run.is_packed and run.nbytes < JOINED_BYTES_MAX * len(own):
                buffer.payload[:] = b"".join(own)
                return
            for array, view in zip(own, buffer.views, strict=True):
                view[...] = array
            return
        for piece, view in zip(run.pieces, buffer.views, strict=True):
            parts = [part[piece.start : piece.stop] for part in arrays[piece.index]]
            if len(parts) == 1:
                view[...] = parts[0]
            else:
                kernels.weighted_sum(parts, [1.0] * len(parts), self.plan.keys[piece.index].dtype, view)

    def _without(self, run: RunPlan, arrays: Sequence[Sequence[Part]], kernels: Kernels) -> memoryview:
        """The payload of a run some of whose keys have no value: those take no bytes."""
        payload = bytearray()
        for piece in run.pieces:
            if not arrays[piece.index]:
                continue
            dtype = self.plan.keys[piece.index].dtype
            total = np.empty(piece.stop - piece.start, dtype.storage)
            parts = as_host_bits([part[piece.start : piece.stop] for part in arrays[piece.index]])
            kernels.weighted_sum(parts, [1.0] * len(parts), dtype, total)
            payload += total.tobytes()
            payload += b"\0" * (-total.nbytes % 8)
        return memoryview(payload)


@dataclass(slots=True)
class Payloads:
    """The runs of a push, and the buffers that they occupy until servers have counted them."""

    staging: Staging
    memory: list[memoryview]
    """The payload of each run."""
    buffers: Buffers = field(default_factory=list)
    marks: list[DeviceEvent] = field(default_factory=list)
    """Events after which GPUs have copied into the payloads."""
    runs: list[Run] = field(default_factory=list)

    def wait_for_gpu(self) -> None:
        """Wait until the payloads are filled. To be called before they are sent, on the node's thread.

        The program goes on meanwhile, and the GPU copies a push while the program enqueues the sums of the next.
        """
        for mark in self.marks:
            mark.wait()
        self.marks.clear()

    def release(self) -> None:
        """Give the buffers back, after servers have counted the push. Called from the node's thread."""
        if self.buffers:
            self.staging.give_back(self.buffers)


# 3. What is lent.


def lend(
    run: RunPlan, arrays: Sequence[Sequence[Part]], lending: Lending, reads: Reads, memory: Allocator
) -> memoryview | None:
    """The caller's memory as the payload of a run; None if the run has to be copied.

    Only a large slice of a single array can be lent: it travels alone. For a server that shares memory it is copied
    into that memory, unless it lies in it already: a single pass instead of the two that a socket makes.

    Args:
        run: the run.
        arrays: per key of the plan its contributions as bits.
        lending: which memory may be lent.
        reads: whether the receiver of a run shares memory with this process.
        memory: allocator of shared memory.
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


# 4. What travels with the payloads.

SERVER_DECIDES: Hyperparameters = (math.nan, math.nan, math.nan)
"""Hyperparameters of a push by a worker without an optimizer."""

Settings = tuple[list[Hyperparameters], "np.ndarray[Any, Any] | None"]
"""Distinct hyperparameters, and for each key of a plan their index; None instead of indices if all are alike."""


def refuse_to_sum(on_loss: str) -> NoReturn:
    """Raises a `ConfigError`: the store only sums, and a sum that lacks a lost worker would replace the weights."""
    raise ConfigError(
        f"KVDIST_ON_LOSS is {on_loss!r} (kvdist-launch --on-loss), which needs a store that updates, because servers"
        " must hold the weights, but this store only sums: call set_optimizer before the first push, or use fail"
    )


def hyperparameters_of(info: KeyInfo, optimizer: Optimizer | None) -> Hyperparameters:
    """The hyperparameters of a key."""
    if optimizer is None:
        return SERVER_DECIDES
    numbers = (optimizer.pushed_lr(info.key), optimizer.wd_for(info.key), optimizer.rescale_grad)
    return _finite(info.key, numbers)


def gathered(settings: Sequence[Hyperparameters]) -> Settings:
    """The hyperparameters of a list of keys as distinct tuples and an index per key."""
    distinct: dict[Hyperparameters, int] = {}
    index = [distinct.setdefault(setting, len(distinct)) for setting in settings]
    return list(distinct), np.array(index) if len(distinct) > 1 else None


def plan_hyperparameters(plan: Plan, optimizer: Optimizer | None) -> Settings:
    """The distinct hyperparameters of a plan's keys, and an index per key; None if all are alike."""
    if optimizer is None:
        return [SERVER_DECIDES], None
    rescale = optimizer.rescale_grad
    if not optimizer.lr_mult and not optimizer.wd_mult:
        return [_finite(None, (optimizer.pushed_lr(None), optimizer.wd, rescale))], None
    return gathered([hyperparameters_of(info, optimizer) for info in plan.keys])


def run_hyperparameters(
    settings: list[Hyperparameters], index: np.ndarray[Any, Any] | None
) -> tuple[tuple[Hyperparameters, ...], U8 | None]:
    """The hyperparameters that a run uses, and the indices of its slices into them."""
    if index is None:
        return (settings[0],), None
    used, positions = np.unique(index, return_inverse=True)
    return tuple(settings[i] for i in used.tolist()), positions.astype(np.uint8)


def _finite(key: Key | None, setting: Hyperparameters) -> Hyperparameters:
    if not all(map(math.isfinite, setting)):
        whose = "the optimizer" if key is None else name_of(key)
        raise ValueError(f"learning rate, weight decay and rescale of {whose} are {setting}; they must be finite")
    return setting


def push_runs(
    plan: Plan,
    payloads: Sequence[memoryview],
    bits: Sequence[Sequence[Part]],
    settings: Settings,
    options: PushOptions,
    codes: Sequence[EncodedRun | None],
    reads: Reads,
) -> list[Run]:
    """The runs of a push.

    Args:
        plan: plan of the keys.
        payloads: per run its bytes.
        bits: per key its contributions; an empty list for an empty contribution.
        settings: hyperparameters of the optimizer.
        options: how the push counts.
        codes: per run its encoding; None for a run that is not encoded.
        reads: whether the receiver of a run shares memory with this process.
    """
    distinct, setting_of_key = settings
    flag = options.flags
    empty = None if all(bits) else np.array([Flag.EMPTY * (not parts) for parts in bits], np.uint8)
    runs = []
    for run, payload, code in zip(plan.runs, payloads, codes, strict=True):
        flags = np.full(len(run.ids), flag, np.uint8)
        if empty is not None:
            flags |= empty[run.key_of]
        own, index = run_hyperparameters(distinct, None if setting_of_key is None else setting_of_key[run.key_of])
        stays = code is None and reads(run)
        encoded = None if code is None else code[1]
        runs.append(Run(run, payload, (), flags, own, index, None, stays, options.samples, encoded=encoded))
    return runs
