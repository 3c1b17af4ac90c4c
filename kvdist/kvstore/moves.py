"""How values of a `DistStore` move: from checked calls to requests of the worker machine, and back into arrays.

The user's thread checks, copies where it has to, and lays out; the node's thread does the rest. Everything here was
let in by the store, which looks whether it is open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from kvdist.core.policy import Policy
from kvdist.core.worker.requests import Bits, KeyInfo, Kind, Plan, Request, RunData, RunPlan, Transfer
from kvdist.kernels.interface import Kernels
from kvdist.kvstore import values
from kvdist.kvstore.ascent import Blocks
from kvdist.kvstore.base import Keys, Value
from kvdist.kvstore.calls import combined
from kvdist.kvstore.cluster import Cluster
from kvdist.kvstore.compressing import Compressing
from kvdist.kvstore.contribution import Contribution, Terms, contribute
from kvdist.kvstore.descent import Descent
from kvdist.kvstore.devices import Devices, Part, as_host_bits
from kvdist.kvstore.encoding import contribute_encoded
from kvdist.kvstore.gathering import SMALL_BYTES_MAX, Gatherings, is_small
from kvdist.kvstore.handed import Given, Taken, cut, given, made, named, plain_one, taken
from kvdist.kvstore.key_table import KeyTable
from kvdist.kvstore.parts import parts_of
from kvdist.kvstore.settings import Setting, Settings, gathered, setting_of, settings_of
from kvdist.kvstore.staging import Lending, Reads, Shares, Staging, Stagings, lend, reaches_another
from kvdist.kvstore.values import Key
from kvdist.kvstore.views import Views
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.arrays import padded
from kvdist.runtime.mailbox import Finish


class Moves:
    """Pushes and pulls of one store.

    Args:
        cluster: this process's membership.
        keys: the initialised keys.
        policy: when servers make a version.
        kernels: what sums over devices on the host.
        devices: the GPUs that are used.
        remember: gets the error of a push that nobody waits for.
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
        self.compressing: Compressing | None = None
        """What encodes pushes."""
        self._cluster = cluster
        self._keys = keys
        self._kernels = kernels
        self._devices = devices
        self._descent = Descent()
        self._blocks = Blocks()
        self._remember = remember
        self.check = check
        self._stagings = Stagings(policy.slice_bytes(cluster.config.limits), cluster.memory, cluster.traffic)
        # Only what waits for everybody's pushes is summed on the way to a server.
        is_summed = policy.has_rounds
        self._reads_pushes: Reads = cluster.reads_pushes if is_summed else self._is_read_by_server
        self._shows_results: Shares = cluster.shows_results if is_summed else cluster.shares_memory
        node = cluster.node
        self._gatherings = Gatherings(
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
        self._gatherings.close()
        return self._cluster.submit(make, finish)

    def ask(self, make: Callable[[int], Request]) -> Any:
        """The same, and wait for its result."""
        self._gatherings.close()
        return self._cluster.ask(make)

    def push(self, key: Keys, value: Value, priority: int, terms: Terms) -> None:
        """Push; the caller's arrays are free when it returns, and nobody waits for the answer."""
        plain = plain_one(self._keys, key, value)
        if plain is not None and plain[1].nbytes <= SMALL_BYTES_MAX:
            self._push_gathered(*plain, priority, terms)
            return
        handed = given(self._keys, key, value, self._devices)
        if is_small(handed):
            (bits,) = as_host_bits(handed.bits[0])
            self._push_gathered(handed.infos[0], bits, priority, terms)
            return
        self.watch(self._push(handed, priority, terms, Lending.NOTHING))

    def _push_gathered(self, info: KeyInfo, bits: Bits, priority: int, terms: Terms) -> None:
        setting = setting_of(info, self.optimizer)
        nbytes, encoded = padded(bits.nbytes), None
        self._cluster.under_way.enter(nbytes, self.check)
        try:
            # Encoded now, not when it leaves: residuals follow the order of the calls.
            if info.is_compressed and self.compressing is not None:
                encoded = self.compressing.encode(info, [bits])
            self._gatherings.push(info, bits, setting, priority, terms, encoded)
        except BaseException:
            self._cluster.under_way.leave(nbytes)
            raise

    def push_async(self, key: Keys, value: Value, priority: int, terms: Terms) -> Future[None]:
        """Push; the future resolves when it is counted."""
        return self._push(given(self._keys, key, value, self._devices), priority, terms, Lending.RESIDENT)

    def _push(self, handed: Given, priority: int, terms: Terms, lending: Lending) -> Future[None]:
        label = f"push of {named(handed.infos)}"

        def part(some: Given) -> Future[None]:
            return self._submit_push(Kind.PUSH, some, terms, lending, label, priority, lambda own: own.release)

        places = self._parts(handed)
        if len(places) == 1:
            return part(handed)
        return combined([part(handed.part(place)) for place in places])

    def _submit_push(
        self,
        kind: Kind,
        some: Given,
        terms: Terms,
        lending: Lending,
        label: str,
        priority: int,
        complete: Callable[[Contribution], Finish],
    ) -> Future[Any]:
        """Lay out a push and leave it for the node's thread; its bytes are under way until it is counted.

        Args:
            kind, label, priority: of the request.
            some: what is pushed.
            terms: how it counts.
            lending: which arrays of the caller may be sent.
            complete: adds to the runs of the push what the request needs besides; gives what follows its answer.
        """
        staging = self._staging(some.infos)

        def submit() -> Future[Any]:
            settings = settings_of(staging.plan, self.optimizer)
            lent = self._lent(staging.plan, some.bits, lending, self._reads_pushes)
            own = self._laid_out(staging, some, settings, terms, lent)

            def make(number: int) -> Request:
                own.settle()
                return Transfer(number, kind, label, own.runs, priority)

            try:
                return self.submit(make, complete(own))
            except BaseException:
                own.settle()  # the buffers are let go, and a GPU may still be writing into them
                raise

        return self._cluster.under_way.count(staging.nbytes, self.check, submit)

    def _parts(self, handed: Given) -> list[slice]:
        """In which parts a push leaves: what has to be encoded first should not wait for the rest."""
        return [slice(None)] if self.compressing is None else parts_of(handed.infos)

    def watch(self, future: Future[None]) -> None:
        """Remember the error of a push, as nobody waits for it."""
        future.add_done_callback(self._remember_error)

    def _remember_error(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._remember(error)

    def pull_gathered(self, key: Keys, out: Value, priority: int) -> Future[Any]:
        """Pull into `out`, together with other pulls of small keys that are asked for one by one."""
        plain = plain_one(self._keys, key, out, writable=True)
        if plain is not None and _is_gathered(*plain):
            return self._gatherings.pull(*plain, None, priority)
        places = taken(self._keys, key, out, self._devices, self._blocks)
        if len(places.infos) == 1 and _is_gathered(places.infos[0], places.results[0]):
            finish = None if places.is_direct else places.spread
            return self._gatherings.pull(places.infos[0], places.results[0], finish, priority)
        return self._pull_into(places, priority)

    def pull(self, key: Keys, out: Value | None, priority: int) -> Future[Any]:
        """Pull into `out`, or into new arrays."""
        if out is None:
            return self._pull_to(*made(self._keys, key), priority)
        return self._pull_into(taken(self._keys, key, out, self._devices, self._blocks), priority)

    def _pull_into(self, places: Taken, priority: int) -> Future[Any]:
        return self._pull_to(places.infos, places.results, places.spread, priority)

    def _pull_to(self, infos: Sequence[KeyInfo], results: Sequence[Bits], finish: Finish, priority: int) -> Future[Any]:
        runs = self._plan_pull(infos, results)
        label = f"pull of {named(infos)}"
        return self.submit(lambda number: Transfer(number, Kind.PULL, label, runs, priority), finish)

    def pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None,
        priority: int,
        terms: Terms,
        lending: Lending,
        hold: bool = False,
    ) -> Future[Any]:
        """Push and pull the result; with `hold` large results are shown where they lie, but for those of GPUs."""
        contribution = given(self._keys, key, value, self._devices)
        places = taken(self._keys, key, value if out is None else out, self._devices, self._blocks)
        if out is not None and lending is not Lending.NOTHING and reaches_another(contribution.bits, places.results):
            lending = Lending.NOTHING
        if not hold and len(parts := self._parts(contribution)) > 1:
            label = f"pushpull of {named(contribution.infos)}"
            return combined(
                [
                    self._pushpull_part(contribution.part(part), places.results[part], priority, terms, lending, label)
                    for part in parts
                ],
                places.spread,
            )

        def complete(own: Contribution) -> Finish:
            # A result that is shown is not in the memory from which results rise to GPUs.
            views = Views(own.staging.plan, self._shows_results) if hold and places.ascent is None else None
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
        return self._submit_push(Kind.PUSHPULL, contribution, terms, lending, label, priority, complete)

    def _pushpull_part(
        self, some: Given, results: Sequence[Bits], priority: int, terms: Terms, lending: Lending, label: str
    ) -> Future[Any]:
        def complete(own: Contribution) -> Finish:
            own.runs = [replace(run, sinks=cut(run.plan, results)) for run in own.runs]
            return own.release

        return self._submit_push(Kind.PUSHPULL, some, terms, lending, label, priority, complete)

    def give(self, kind: Kind, given: Sequence[tuple[Key, Any]]) -> None:
        """Send first or new values, and wait until the servers have them."""
        staging = self._staging([self._keys[one] for one, _ in given])
        arrays = [[values.read_bits(array)] for _, array in given]
        # The caller waits, so its own memory is sent where it can be.
        lent = self._lent(staging.plan, arrays, Lending.EVERYTHING, self._is_read_by_server)
        payloads, _, _ = staging.fill(arrays, self._kernels, lent)
        runs = [RunData(plan, payload) for plan, payload in zip(staging.plan.runs, payloads, strict=True)]
        label = f"init of {named(staging.plan.keys)}"
        self.ask(lambda number: Transfer(number, kind, label, runs))

    def _staging(self, infos: Sequence[KeyInfo]) -> Staging:
        return self._stagings.of(infos, self._keys.nbytes)

    def _lay_out(self, handed: Given, terms: Terms, settings: Sequence[Setting]) -> Contribution:
        staging = self._staging(handed.infos)
        lent: list[memoryview | None] = [None] * len(staging.plan.runs)
        return self._laid_out(staging, handed, gathered(settings), terms, lent)

    def _laid_out(
        self, staging: Staging, handed: Given, settings: Settings, terms: Terms, lent: Sequence[memoryview | None]
    ) -> Contribution:
        own = (staging, handed, settings, terms, self._kernels, lent, self._reads_pushes, self._descent)
        return contribute(*own) if self.compressing is None else contribute_encoded(self.compressing, *own)

    def _is_read_by_server(self, run: RunPlan) -> bool:
        return self._cluster.shares_memory(run.server)

    def _plan_pull(self, infos: Sequence[KeyInfo], results: Sequence[Bits]) -> list[RunData]:
        return [RunData(run, sinks=cut(run, results)) for run in self._staging(infos).plan.runs]

    def _lent(
        self, plan: Plan, bits: Sequence[Sequence[Part]], lending: Lending, reads: Reads
    ) -> list[memoryview | None]:
        return [lend(run, bits, lending, reads, self._cluster.memory) for run in plan.runs]


def _is_gathered(info: KeyInfo, result: Bits) -> bool:
    """Whether a pull of this key alone may travel with others: it is small, and one answer brings all of it."""
    return result.nbytes <= SMALL_BYTES_MAX and len(info.slices) == 1
