"""Pushes and pulls of arrays on a cluster: from checked arguments to requests, and from answers to arrays.

The user's thread checks, copies where it has to, and lays out; the node's thread does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdist.core.policy import Policy
from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import (
    ALONE_BYTES_MIN,
    KeyInfo,
    Plan,
    Request,
    RunData,
    RunKind,
    RunPlan,
    Transfer,
)
from kvdist.kernels.interface import Kernels
from kvdist.kvstore import values
from kvdist.kvstore.arguments import (
    Hyperparameters,
    PullArgs,
    PushArgs,
    Settings,
    cut,
    gathered,
    hyperparameters_of,
    made,
    named,
    plain_one,
    plan_hyperparameters,
    pull_args,
    push_args,
)
from kvdist.kvstore.backend import Lending, PushOptions, PushPull, combined
from kvdist.kvstore.coalescing import SMALL_BYTES_MAX, Coalescer, is_small
from kvdist.kvstore.device import Devices, Download, Part, PinnedBlocks, as_host_bits
from kvdist.kvstore.keys import KeyTable
from kvdist.kvstore.staging import Payloads, Reads, Shares, Staging, Stagings, lay_out, lend, reaches_another
from kvdist.kvstore.values import Key, Keys, Value
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.arrays import Bits, padded
from kvdist.protocol.messages import Flag
from kvdist.runtime.cluster import Cluster
from kvdist.runtime.node import Finish
from kvdist.transport.shared_memory.allocator import Allocator

if TYPE_CHECKING:
    from kvdist.kvstore.compression import StoreCompression


class ArrayTransfers:
    """Pushes and pulls of one store.

    Args:
        cluster: this process's membership.
        keys: the initialised keys.
        policy: when servers make a version.
        kernels: what sums over devices on the host.
        devices: the GPUs that are used.
        remember: gets the error of a push without a future.
        check: raises why nothing can be pushed any more.
    """

    def __init__(
        self,
        cluster: Cluster,
        keys: KeyTable,
        policy: Policy,
        kernels: Kernels,
        devices: Devices,
        remember: Callable[[BaseException], None],
        check: Callable[[], None],
    ) -> None:
        self.optimizer: Optimizer | None = None
        """Whose numbers travel with each push."""
        self.compression: StoreCompression | None = None
        """What encodes pushes."""
        self._cluster = cluster
        self._keys = keys
        self._kernels = kernels
        self._devices = devices
        self._download = Download()
        self._blocks = PinnedBlocks()
        self._remember = remember
        self.check = check
        self._stagings = Stagings(policy.slice_bytes(cluster.config.limits), cluster.memory, cluster.traffic)
        # Only what waits for everybody's pushes is summed on the way to a server.
        self._is_summed = policy.has_rounds
        node = self._node = cluster.node
        self._coalescer = Coalescer(
            self._lay_out,
            self._plan_pull,
            lambda answer, make, growing: node.submit_for(answer, make, growing=growing),
            node.hurry,
            remember,
            cluster.under_way.leave,
        )

    def close(self) -> None:
        """Nothing is asked any more: let go of what results came in."""
        self._blocks.close()

    def submit(self, make: Callable[[int], Request], finish: Finish | None) -> Future[Any]:
        """Leave a request for the node's thread, behind all that was asked before; see `Node.submit`."""
        self._coalescer.close()
        return self._node.submit(make, finish)

    def ask(self, make: Callable[[int], Request]) -> Any:
        """The same, and wait for its result."""
        self._coalescer.close()
        return self._cluster.ask(make)

    def push(self, call: PushPull) -> None:
        """Push; the caller's arrays are free when this returns, and no one waits for the answer."""
        plain = plain_one(self._keys, call.key, call.value)
        if plain is not None and plain[1].nbytes <= SMALL_BYTES_MAX:
            self._push_coalesced(*plain, call.priority, call.options)
            return
        given = push_args(self._keys, call.key, call.value, self._devices)
        if is_small(given):
            (bits,) = as_host_bits(given.bits[0])
            self._push_coalesced(given.infos[0], bits, call.priority, call.options)
            return
        self._push(given, call).add_done_callback(self._remember_error)

    def push_async(self, call: PushPull) -> Future[None]:
        """Push; the future resolves when it is counted."""
        return self._push(push_args(self._keys, call.key, call.value, self._devices), call)

    def _push_coalesced(self, info: KeyInfo, bits: Bits, priority: int, options: PushOptions) -> None:
        setting = hyperparameters_of(info, self.optimizer)
        nbytes, encoded = padded(bits.nbytes), None
        self._cluster.under_way.enter(nbytes, self.check)
        try:
            # Encoded now, not when it leaves: residuals follow the order of the calls.
            if info.is_compressed and self.compression is not None:
                encoded = self.compression.encode(info, [bits])
            self._coalescer.push(info, bits, setting, priority, options, encoded)
        except BaseException:
            self._cluster.under_way.leave(nbytes)
            raise

    def _push(self, given: PushArgs, call: PushPull) -> Future[None]:
        label, options, priority = f"push of {named(given.infos)}", call.options, call.priority

        def part(some: PushArgs) -> Future[None]:
            return self._submit_push(
                RunKind.PUSH, some, options, call.lending, label, priority, lambda own: own.release
            )

        places = self._parts(given)
        if len(places) == 1:
            return part(given)
        return combined([part(given.part(place)) for place in places])

    def _submit_push(
        self,
        kind: RunKind,
        some: PushArgs,
        options: PushOptions,
        lending: Lending,
        label: str,
        priority: int,
        complete: Callable[[Payloads], Finish],
    ) -> Future[Any]:
        """Lay out a push and leave it for the node's thread; its bytes are under way until it is counted.

        Args:
            kind, label, priority: of the request.
            some: what is pushed.
            options: how it counts.
            lending: which arrays of the caller may be sent.
            complete: adds to the runs of the push what the request needs besides; gives what follows its answer.
        """
        staging = self._staging(some.infos)

        def submit() -> Future[Any]:
            settings = plan_hyperparameters(staging.plan, self.optimizer)
            lent = self._lent(staging.plan, some.bits, lending, self._reads_pushes)
            own = self._laid_out(staging, some, settings, options, lent)

            def make(number: int) -> Request:
                own.settle()
                return Transfer(number, kind, label, own.runs, priority)

            try:
                return self.submit(make, complete(own))
            except BaseException:
                own.settle()  # the buffers are let go, and a GPU may still be writing into them
                raise

        return self._cluster.under_way.count(staging.nbytes, self.check, submit)

    def _parts(self, given: PushArgs) -> list[slice]:
        """In which parts a push leaves: what has to be encoded first should not wait for the rest."""
        return [slice(None)] if self.compression is None else parts_of(given.infos)

    def _remember_error(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._remember(error)

    def pull(self, call: PushPull) -> Future[Any]:
        """Pull into `out`, or into new arrays."""
        if call.out is None:
            return self._pull_to(*made(self._keys, call.key), call.priority)
        if call.lending is not Lending.RESIDENT:
            return self._pull_into(self._places(call.key, call.out), call.priority)
        # Pulls of small keys that are asked for one by one travel together.
        plain = plain_one(self._keys, call.key, call.out, writable=True)
        if plain is not None and _is_coalesced(*plain):
            return self._coalescer.pull(*plain, None, call.priority)
        places = self._places(call.key, call.out)
        if len(places.infos) == 1 and _is_coalesced(places.infos[0], places.results[0]):
            finish = None if places.is_direct else places.spread
            return self._coalescer.pull(places.infos[0], places.results[0], finish, call.priority)
        return self._pull_into(places, call.priority)

    def _places(self, key: Keys, out: Value) -> PullArgs:
        return pull_args(self._keys, key, out, self._devices, self._blocks)

    def _pull_into(self, places: PullArgs, priority: int) -> Future[Any]:
        return self._pull_to(places.infos, places.results, places.spread, priority)

    def _pull_to(self, infos: Sequence[KeyInfo], results: Sequence[Bits], finish: Finish, priority: int) -> Future[Any]:
        runs = self._plan_pull(infos, results)
        label = f"pull of {named(infos)}"
        return self.submit(lambda number: Transfer(number, RunKind.PULL, label, runs, priority), finish)

    def pushpull(self, call: PushPull) -> Future[Any]:
        """Push and pull the result; large results are shown where they lie if `shared`, except those of GPUs."""
        contribution = push_args(self._keys, call.key, call.value, self._devices)
        places = self._places(call.key, call.value if call.out is None else call.out)
        priority, options, lending, hold = call.priority, call.options, call.lending, call.shared
        if call.out is not None and reaches_another(contribution.bits, places.results):
            lending = Lending.NOTHING
        if not hold and len(parts := self._parts(contribution)) > 1:
            label = f"pushpull of {named(contribution.infos)}"
            return combined(
                [
                    self._pushpull_part(
                        contribution.part(part), places.results[part], priority, options, lending, label
                    )
                    for part in parts
                ],
                places.spread,
            )

        def complete(own: Payloads) -> Finish:
            # A result that is shown is not in the memory from which results rise to GPUs.
            views = SharedResults(own.staging.plan, self._shows_results) if hold and places.upload is None else None
            own.runs = [
                views.keeping(run)
                if views is not None and views.keeps(run.plan)
                else replace(run, sinks=cut(run.plan, places.results))
                for run in own.runs
            ]

            def finish() -> Any:
                shown = [None] * len(places.infos) if hold else None
                if views is not None:
                    shown = views.shown(self._cluster.memory, places.results, self._keys, self._cluster.traffic)
                places.spread()
                own.release()
                return shown

            return finish

        label = f"pushpull of {named(contribution.infos)}"
        return self._submit_push(RunKind.PUSHPULL, contribution, options, lending, label, priority, complete)

    def _pushpull_part(
        self, some: PushArgs, results: Sequence[Bits], priority: int, options: PushOptions, lending: Lending, label: str
    ) -> Future[Any]:
        def complete(own: Payloads) -> Finish:
            own.runs = [replace(run, sinks=cut(run.plan, results)) for run in own.runs]
            return own.release

        return self._submit_push(RunKind.PUSHPULL, some, options, lending, label, priority, complete)

    def give(self, kind: RunKind, given: Sequence[tuple[Key, Any]]) -> None:
        """Send first or new values, and wait until the servers have them."""
        staging = self._staging([self._keys[one] for one, _ in given])
        arrays = [[values.read_bits(array)] for _, array in given]
        # The caller waits, so its own memory is sent where it can be.
        lent = self._lent(
            staging.plan, arrays, Lending.EVERYTHING, lambda run: self._node.view.shares_memory(run.server)
        )
        payloads, _, _ = staging.fill(arrays, self._kernels, lent)
        runs = [RunData(plan, payload) for plan, payload in zip(staging.plan.runs, payloads, strict=True)]
        label = f"init of {named(staging.plan.keys)}"
        self.ask(lambda number: Transfer(number, kind, label, runs))

    def _staging(self, infos: Sequence[KeyInfo]) -> Staging:
        return self._stagings.of(infos, self._keys.nbytes)

    def _lay_out(self, given: PushArgs, options: PushOptions, settings: Sequence[Hyperparameters]) -> Payloads:
        staging = self._staging(given.infos)
        lent: list[memoryview | None] = [None] * len(staging.plan.runs)
        return self._laid_out(staging, given, gathered(settings), options, lent)

    def _laid_out(
        self,
        staging: Staging,
        given: PushArgs,
        settings: Settings,
        options: PushOptions,
        lent: Sequence[memoryview | None],
    ) -> Payloads:
        own = (staging, given, settings, options, self._kernels, lent, self._reads_pushes, self._download)
        if self.compression is None:
            return lay_out(*own)
        from kvdist.kvstore.compression import encoded_payloads  # a feature at a seam: loaded where it is used

        return encoded_payloads(self.compression, *own)

    def _reads_pushes(self, run: RunPlan) -> bool:
        """Whether a push of this run is read where it lies."""
        view = self._node.view
        return view.reads_pushes(run) if self._is_summed else view.shares_memory(run.server)

    def _shows_results(self, server: int) -> bool:
        """Whether this server answers by values that can be read where they lie."""
        view = self._node.view
        return view.shows_results(server) if self._is_summed else view.shares_memory(server)

    def _plan_pull(self, infos: Sequence[KeyInfo], results: Sequence[Bits]) -> list[RunData]:
        return [RunData(run, sinks=cut(run, results)) for run in self._staging(infos).plan.runs]

    def _lent(
        self, plan: Plan, bits: Sequence[Sequence[Part]], lending: Lending, reads: Reads
    ) -> list[memoryview | None]:
        return [lend(run, bits, lending, reads, self._cluster.memory) for run in plan.runs]


def _is_coalesced(info: KeyInfo, result: Bits) -> bool:
    """Whether a pull of this key alone may travel with others: it is small, and one answer brings all of it."""
    return result.nbytes <= SMALL_BYTES_MAX and len(info.slices) == 1


class SharedResults:
    """The keys of one call whose results stay in the servers' memory: large ones, all of whose servers share it.

    Args:
        plan: the keys and their runs.
        shares: whether the server of a rank shares memory with this process.
    """

    def __init__(self, plan: Plan, shares: Shares) -> None:
        self._plan = plan
        self._indices = [
            i
            for i, info in enumerate(plan.keys)
            if info.pulled_as is None and _is_large(info) and _all_share(info, shares)
        ]
        self._wanted = set(self._indices)
        self._kept: dict[int, list[tuple[int, int, dict[int, Bits]]]] = {index: [] for index in self._indices}
        """Key → its slices: (start, stop, the run's values by their place)."""

    def keeps(self, run: RunPlan) -> bool:
        """Whether the result of this run stays where it is."""
        return len(run.pieces) == 1 and run.pieces[0].index in self._wanted

    def keeping(self, run: RunData) -> RunData:
        """The run, asking for a result that may be read where it lies."""
        kept: dict[int, Bits] = {}
        (piece,) = run.plan.pieces
        self._kept[piece.index].append((piece.start, piece.stop, kept))
        assert run.flags is not None
        return replace(run, flags=run.flags | np.uint8(Flag.HOLD), kept=kept)

    def shown(self, memory: Allocator, results: Sequence[Bits], keys: KeyTable, traffic: Traffic) -> list[Any]:
        """The results have come: per key an array that shows it, or None after copying it to `results`."""
        found: list[Any] = [None] * len(self._plan.keys)
        for index in self._indices:
            info = self._plan.keys[index]
            pieces = sorted(self._kept[index], key=lambda piece: piece[:2])
            window = memory.show([kept[0].view(np.uint8) for _, _, kept in pieces])
            if window is not None:
                found[index] = shown = keys.like(info, window.view(info.dtype.storage))
                if isinstance(shown, np.ndarray):
                    shown.flags.writeable = False  # what torch does not know
                continue
            for start, stop, kept in pieces:
                results[index][start:stop] = kept[0]
                traffic.copied_out += kept[0].nbytes
        return found


def _is_large(info: KeyInfo) -> bool:
    return all(piece.count * info.dtype.itemsize >= ALONE_BYTES_MIN for piece in info.slices)


def _all_share(info: KeyInfo, shares: Shares) -> bool:
    return all(shares(piece.server) for piece in info.slices)


PART_BYTES = 8 << 20
"""Of values: a millisecond of encoding, and some four messages."""


def parts_of(infos: Sequence[KeyInfo], part_bytes: int = PART_BYTES) -> list[slice]:
    """Stretches of a list of keys, each but the last of so many bytes of values or more; at least one."""
    parts, begin, nbytes = [], 0, 0
    for i, info in enumerate(infos):
        nbytes += info.size * info.dtype.itemsize
        if nbytes >= part_bytes:
            parts.append(slice(begin, i + 1))
            begin, nbytes = i + 1, 0
    if begin < len(infos) or not parts:
        parts.append(slice(begin, len(infos)))
    return parts
