"""`DistStore`: values that rest on servers, shared by all workers of a cluster.

The user's thread checks and copies (a plain array is copied before `push` returns), makes a request, and waits on a
future if the call says so. Everything else happens on the node's thread. Rules that hold here:

* Whatever can be known to be wrong here raises here, before anything is sent.
* The error of a push that nobody waited for is raised by the next call on the store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdist.core.policy import SYNC, Policy
from kvdist.core.requests import (
    Bits,
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    Kind,
    Plan,
    Request,
    RunData,
    RunPlan,
    SetStoreOptimizer,
    Transfer,
)
from kvdist.errors import OptimizerMismatch, PeerLostError, StoreClosed
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.base import Keys, KVStore, UpdaterFunction, Value
from kvdist.kvstore.cluster import Cluster
from kvdist.kvstore.commands import command_of
from kvdist.kvstore.contribution import Contribution, Terms, contribute
from kvdist.kvstore.gathering import PLAIN, SMALL_BYTES_MAX, Gatherings, is_small
from kvdist.kvstore.handed import Given, Taken, cut, given, made, named, plain_one, taken
from kvdist.kvstore.key_table import KeyTable
from kvdist.kvstore.saved import Checkpoint, Names
from kvdist.kvstore.saving import Saving
from kvdist.kvstore.settings import Setting, gathered, setting_of, settings_of
from kvdist.kvstore.staging import Lending, Reads, Shares, Staging, Stagings, lend, reaches_another
from kvdist.kvstore.together import Together
from kvdist.kvstore.values import Key
from kvdist.kvstore.views import Views
from kvdist.mailbox import Finish
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create

LOG = logging.getLogger("kvdist")


class DistStore(KVStore):
    """The stores ``dist``, ``dist_async`` and their other spellings.

    Args:
        type_name: the name it was created by.
        policy: when servers make a version.
        cluster: this process's membership.
        kernels: what sums over devices.
    """

    def __init__(self, type_name: str, policy: Policy, cluster: Cluster, kernels: Kernels = REFERENCE) -> None:
        self._type = type_name
        self._policy = policy
        self._cluster = cluster
        self._kernels = kernels
        self._number = cluster.open_store()
        self._keys = KeyTable()
        self._stagings = Stagings(cluster.config.limits.slice_bytes, cluster.memory, cluster.traffic)
        # Only what waits for everybody's pushes is summed on the way to a server.
        is_summed = policy.close is None
        self._reads_pushes: Reads = cluster.reads_pushes if is_summed else self._is_read_by_server
        self._shows_results: Shares = cluster.shows_results if is_summed else cluster.shares_memory
        self._optimizer: Optimizer | None = None
        self._barrier_lock = threading.Lock()
        self._closed = False
        self._errors: deque[BaseException] = deque()
        """Of pushes that nobody waited for."""
        waits = (cluster.wait, cluster.hold)
        self._saving = Saving(self._number, cluster.rank, self._submit, *waits, cluster.memory.forget_shown)
        self._together = Together(lambda: DistStore("dist", SYNC, cluster, kernels))
        node = cluster.node
        self._gatherings = Gatherings(
            self._lay_out,
            self._plan_pull,
            lambda answer, make, growing: node.submit_for(answer, make, growing=growing),
            node.hurry,
            self._remember,
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"worker {self.rank} of {self.num_workers}, {len(self._keys)} keys"
        return f"<{self._type} store, {state}>"

    @property
    def type(self) -> str:
        """The name with which the store was created."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._cluster.rank

    @property
    def num_workers(self) -> int:
        """How many workers the cluster was started with."""
        return self._cluster.config.num_workers

    @property
    def num_servers(self) -> int:
        """How many servers keep the values."""
        return self._cluster.config.num_servers

    def num_dead_nodes(self) -> int:
        """How many processes are known to be lost; the loss of one ends the job. See `KVStore.num_dead_nodes`."""
        return int(isinstance(self._cluster.node.failure, PeerLostError))

    def init(self, key: Keys, value: Value) -> None:
        """Agree on keys with all workers; rank 0's values win. See `KVStore.init`."""
        self._require_usable()
        fresh = self._keys.undeclared(values.pairs(key, value))
        if not fresh:
            return
        shapes_dtypes = [values.describe(array) for _, array in fresh]
        names = tuple(one for one, _ in fresh)
        shapes = tuple(shape for shape, _ in shapes_dtypes)
        dtypes = tuple(dtype for _, dtype in shapes_dtypes)
        infos = self._ask(lambda number: DeclareKeys(number, self._number, self._policy.name, names, shapes, dtypes))
        for info, (_, array) in zip(infos, fresh, strict=True):
            self._keys.add(info, array)
        mine = [(one, array) for info, (one, array) in zip(infos, fresh, strict=True) if info.giver == self.rank]
        if mine:
            self._give(Kind.INITIALISE, mine)

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0) -> None:
        """Contribute; returns as soon as the values are copied. See `KVStore.push`."""
        self._require_usable()
        terms = PLAIN if not average and samples == 0 else Terms(average, samples)
        plain = plain_one(self._keys, key, value)
        if plain is not None and plain[1].nbytes <= SMALL_BYTES_MAX:
            self._gatherings.push(*plain, setting_of(plain[0], self._optimizer), priority, terms)
            return
        handed = given(self._keys, key, value)
        if is_small(handed):
            info = handed.infos[0]
            setting = setting_of(info, self._optimizer)
            self._gatherings.push(info, handed.bits[0][0], setting, priority, terms)
            return
        self._push(handed, priority, terms, Lending.NOTHING).add_done_callback(self._remember_error)

    def pull(self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Read; waits for this worker's own pushes to be counted. See `KVStore.pull`."""
        self._require_usable()
        result = self._cluster.wait(self._pull(key, out, priority))
        self._raise_lost_error()  # of an own push that this pull was to see
        return result

    def pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None = None,
        priority: int = 0,
        *,
        average: bool = False,
        samples: int = 0,
    ) -> None:
        """Contribute and read the result in one round trip. See `KVStore.pushpull`."""
        # The caller waits, so large arrays are sent from where they are: a pass over the bytes less, and the first of
        # them are under way at once.
        future = self._pushpull(key, value, out, priority, Terms(average, samples), Lending.EVERYTHING)
        try:
            self._cluster.wait(future)
        except KeyboardInterrupt:
            LOG.warning("interrupted: waiting until the arrays under way are yours again; interrupt again to give up")
            with contextlib.suppress(Exception):
                future.result()
            raise
        self._raise_lost_error()

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> Future[None]:
        """`push`, with a future that resolves when the servers have counted it."""
        self._require_usable()
        return self._push(given(self._keys, key, value), priority, Terms(average, samples), Lending.RESIDENT)

    def _push(self, handed: Given, priority: int, terms: Terms, lending: Lending) -> Future[None]:
        own = self._contribute(handed, terms, lending)
        label = f"push of {named(own.staging.plan.keys)}"
        return self._submit(lambda number: Transfer(number, Kind.PUSH, label, own.runs, priority), own.release)

    def pull_async(
        self,
        key: Keys,
        out: Value | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,  # dense values do not depend on it
    ) -> Future[Any]:
        """`pull`, with a future of its result."""
        self._require_usable()
        if out is None:
            return self._pull(key, out, priority)
        plain = plain_one(self._keys, key, out, writable=True)
        if plain is not None and _is_gathered(*plain):
            return self._gatherings.pull(*plain, None, priority)
        places = taken(self._keys, key, out)
        if len(places.infos) == 1 and _is_gathered(places.infos[0], places.results[0]):
            finish = places.spread if places.copies else None
            return self._gatherings.pull(places.infos[0], places.results[0], finish, priority)
        return self._pull_into(places, priority)

    def _pull(self, key: Keys, out: Value | None, priority: int) -> Future[Any]:
        if out is None:
            return self._pull_to(*made(self._keys, key), priority)
        return self._pull_into(taken(self._keys, key, out), priority)

    def _pull_into(self, places: Taken, priority: int) -> Future[Any]:
        return self._pull_to(places.infos, places.results, places.spread, priority)

    def _pull_to(self, infos: Sequence[KeyInfo], results: Sequence[Bits], finish: Finish, priority: int) -> Future[Any]:
        runs = self._plan_pull(infos, results)
        label = f"pull of {named(infos)}"
        return self._submit(lambda number: Transfer(number, Kind.PULL, label, runs, priority), finish)

    def pushpull_async(
        self,
        key: Keys,
        value: Value,
        out: Value | None = None,
        priority: int = 0,
        *,
        average: bool = False,
        samples: int = 0,
    ) -> Future[None]:
        """`pushpull`, with a future."""
        return self._pushpull(key, value, out, priority, Terms(average, samples), Lending.RESIDENT)

    def _pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None,
        priority: int,
        terms: Terms,
        lending: Lending,
        hold: bool = False,
    ) -> Future[Any]:
        self._require_usable()
        contribution = given(self._keys, key, value)
        places = taken(self._keys, key, value if out is None else out)
        if out is not None and lending is not Lending.NOTHING and reaches_another(contribution.bits, places.results):
            lending = Lending.NOTHING
        own = self._contribute(contribution, terms, lending)
        views = Views(own.staging.plan, self._shows_results) if hold else None
        runs = [
            views.keeping(run)
            if views is not None and views.keeps(run.plan)
            else replace(run, sinks=cut(run.plan, places.results))
            for run in own.runs
        ]

        def finish() -> Any:
            shown = (
                None
                if views is None
                else views.shown(self._cluster.memory, places.results, self._keys, self._cluster.traffic)
            )
            places.spread()
            own.release()
            return shown

        label = f"pushpull of {named(own.staging.plan.keys)}"
        return self._submit(lambda number: Transfer(number, Kind.PUSHPULL, label, runs, priority), finish)

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull` without a copy of large results. See `KVStore.pushpull_shared`."""
        future = self._pushpull(key, value, out, priority, Terms(average, samples), Lending.EVERYTHING, hold=True)
        shown: list[Any] = self._cluster.wait(future)
        self._raise_lost_error()
        return shown

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Give every worker rank 0's present values; every worker calls it. See `KVStore.broadcast`."""
        self._require_usable()
        given = values.pairs(key, value)
        replaced = [(one, arrays[0]) for one, arrays in given if one in self._keys and arrays]
        self.init(key, value)
        if replaced:
            # The pull waits for this worker's pushes to be counted, so between the two barriers nobody's push is
            # under way, and no round that was meant for the old values closes on the new ones.
            self.pull([one for one, _ in replaced])
            self.barrier()
            mine = [(one, array) for one, array in replaced if self._keys[one].giver == self.rank]
            if mine:
                self._give(Kind.REPLACE, mine)
            # Values that were shown may have been written to: this call is how such a change becomes everybody's.
            with self._barrier_lock:
                forget = self._cluster.memory.forget_shown
                self._cluster.wait(self._submit(lambda number: EnterBarrier(number, self._number), forget))
        self.pull(key, out, priority)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here. See `KVStore.barrier`."""
        self._require_usable()
        if timeout is not None and not timeout > 0:
            raise ValueError(
                f"the time-out of a barrier is {timeout}; it must be a positive number of seconds, or None"
            )
        # One at a time: a second thread's barrier is the next one, not the same.
        with self._barrier_lock:
            self._ask(lambda number: EnterBarrier(number, self._number, timeout))

    def agree(self, statement: str) -> None:
        """A barrier at which all must say the same. See `KVStore.agree`."""
        self._require_usable()
        with self._barrier_lock:
            self._ask(lambda number: EnterBarrier(number, self._number, None, statement))

    def average(self, value: Any, *, counts: bool = True) -> Any:
        """The mean over the workers. See `KVStore.average`."""
        self._require_usable()
        return self._together.average(value, counts)

    def from_rank_0(self, values: Sequence[Any]) -> list[Any]:
        """What rank 0 has. See `KVStore.from_rank_0`."""
        self._require_usable()
        return self._together.from_rank_0(values)

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Let the servers update the values. See `KVStore.set_optimizer`."""
        self._require_usable()
        chosen = create(optimizer, **hyperparameters)
        if self._optimizer is not None:
            if chosen.rule() != self._optimizer.rule():
                raise OptimizerMismatch(
                    f"this store's servers update with {self._optimizer}; it cannot be changed to"
                    f" {chosen}. Create a second store for that"
                )
        else:
            self._ask(lambda number: SetStoreOptimizer(number, self._number, chosen.describe()))
        self._optimizer = chosen

    def set_updater(self, updater: UpdaterFunction) -> None:
        """Always a `TypeError`: the values rest on servers, which run no code that a worker sends."""
        raise TypeError(
            f"a {self._type!r} store keeps its values on servers, and servers run no functions from workers;"
            " use set_optimizer, or a 'local' store"
        )

    def send_command_to_servers(self, head: int, body: str = "") -> None:
        """Let every server run a registered handler. See `KVStore.send_command_to_servers`."""
        self._require_usable()
        self._ask(command_of(head, body))

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        state: Any = None,
        keep: int | None = None,
        names: Names | None = None,
    ) -> Future[Path]:
        """Let the servers save what they keep. See `KVStore.save_checkpoint`."""
        self._require_usable()
        return self._saving.save(self._keys.all, directory, step, state, keep, names)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Let the servers go on from a checkpoint. See `KVStore.load_checkpoint`."""
        self._require_usable()
        return self._saving.load(directory, step, states)

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Let the servers save what their optimizer remembers. See `KVStore.save_optimizer_states`."""
        self._require_usable()
        self._cluster.wait(self._saving.save_states(self._keys.all, fname))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Give it back to them. See `KVStore.load_optimizer_states`."""
        self._require_usable()
        self._saving.load_states(fname, self._optimizer, self.set_optimizer)

    def is_capable(self, capability: str) -> bool:
        """True for ``optimizer``. See `KVStore.is_capable`."""
        return values.is_optimizer_capability(capability)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new array in memory that servers of this host are shown. See `KVStore.empty`."""
        wanted = values.as_numpy_dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(lengths) * wanted.itemsize
        return self._cluster.memory.allocate(nbytes).view(wanted).reshape(lengths)

    def close(self, wait: bool = True) -> None:
        """Leave the store; the last store of the process leaves the cluster. Raises the error of a lost push."""
        if self._closed:
            return
        self._closed = True
        if wait:
            self._saving.wait()
        self._together.close()
        self._cluster.stores_open -= 1
        if self._cluster.stores_open == 0:
            self._cluster.leave(wait=wait)
        self._raise_lost_error()

    # Checks.

    def _require_usable(self) -> None:
        if self._closed:
            raise StoreClosed(f"this {self._type!r} store has been closed; create another one")
        self._cluster.node.begin_call()
        self._raise_lost_error()

    def _raise_lost_error(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def _remember_error(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._remember(error)

    def _remember(self, error: BaseException) -> None:
        # Nobody leaves before the servers have what was pushed, so a push is not lost if leaving overtook its answer.
        left_first = self._closed and isinstance(error, StoreClosed)
        if left_first:
            return
        if self._closed:
            # Other stores of the process are open, so the answer still came; nobody is going to call this one again.
            LOG.error("a push to a store that has been closed meanwhile failed: %s", error)
        self._errors.append(error)

    # Transfers.

    def _staging(self, infos: Sequence[KeyInfo]) -> Staging:
        return self._stagings.of(infos, self._keys.nbytes)

    def _submit(self, make: Callable[[int], Request], finish: Finish) -> Future[Any]:
        self._gatherings.close()
        return self._cluster.submit(make, finish)

    def _ask(self, make: Callable[[int], Request]) -> Any:
        self._gatherings.close()
        return self._cluster.ask(make)

    def _lay_out(self, handed: Given, terms: Terms, settings: Sequence[Setting]) -> Contribution:
        staging = self._staging(handed.infos)
        lent: list[memoryview | None] = [None] * len(staging.plan.runs)
        return contribute(staging, handed, gathered(settings), terms, self._kernels, lent, self._reads_pushes)

    def _is_read_by_server(self, run: RunPlan) -> bool:
        return self._cluster.shares_memory(run.server)

    def _plan_pull(self, infos: Sequence[KeyInfo], results: Sequence[Bits]) -> list[RunData]:
        return [RunData(run, sinks=cut(run, results)) for run in self._staging(infos).plan.runs]

    def _contribute(self, contribution: Given, terms: Terms, lending: Lending) -> Contribution:
        staging = self._staging(contribution.infos)
        settings, reads = settings_of(staging.plan, self._optimizer), self._reads_pushes
        lent = self._lent(staging.plan, contribution.bits, lending, reads)
        return contribute(staging, contribution, settings, terms, self._kernels, lent, reads)

    def _lent(
        self, plan: Plan, bits: Sequence[Sequence[Bits]], lending: Lending, reads: Reads
    ) -> list[memoryview | None]:
        return [lend(run, bits, lending, reads, self._cluster.memory) for run in plan.runs]

    def _give(self, kind: Kind, given: Sequence[tuple[Key, Any]]) -> None:
        """Send first or new values, and wait until the servers have them."""
        staging = self._staging([self._keys[one] for one, _ in given])
        arrays = [[values.read_bits(array)] for _, array in given]
        # The caller waits, so its own memory is sent where it can be.
        lent = self._lent(staging.plan, arrays, Lending.EVERYTHING, self._is_read_by_server)
        payloads, _ = staging.fill(arrays, self._kernels, lent)
        runs = [RunData(plan, payload) for plan, payload in zip(staging.plan.runs, payloads, strict=True)]
        label = f"init of {named(staging.plan.keys)}"
        self._ask(lambda number: Transfer(number, kind, label, runs))


def _is_gathered(info: KeyInfo, result: Bits) -> bool:
    """Whether a pull of this key alone may travel with others: it is small, and one answer brings all of it."""
    return result.nbytes <= SMALL_BYTES_MAX and len(info.slices) == 1
