"""The stores ``dist`` and their other spellings: values that rest on servers, shared by all workers of a cluster.

The user's thread checks and copies (a plain array is copied before `push` returns), makes a request, and waits on a
future if the call asks for it. Everything else happens on the node's thread.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvdist.config.losses import LossPolicy
from kvdist.core.policy import SYNC, Policy
from kvdist.core.worker.requests import (
    KEYS_PER_MESSAGE,
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    ReportProgress,
    ReportTimes,
    Request,
    RunKind,
    TakePart,
    UseKernels,
)
from kvdist.dtypes import DType
from kvdist.errors import (
    ConfigError,
    DeviceError,
    FencedError,
    PeerLostError,
    PushRefused,
    RolledBackError,
    StoreClosed,
)
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.backend import (
    Ability,
    Backend,
    Lending,
    LoadJob,
    PushPull,
    Reduction,
    SaveJob,
)
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.keys import Fresh, KeyArrays, require_no_tables, require_sendable
from kvdist.kvstore.metrics import MetricsExchange
from kvdist.kvstore.placement import Devices
from kvdist.kvstore.push_pull import ArrayTransfers
from kvdist.kvstore.rowsparse import RowSparse
from kvdist.kvstore.sparse import MixedTransfers, RowTransfers
from kvdist.kvstore.values import Key, Keys, Value
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState
from kvdist.protocol.arrays import ALIGNMENT_BYTES
from kvdist.protocol.messages import Command, Configure, Due, DueWhen, OnLoss, Progress, StepTimes
from kvdist.runtime.cluster import Cluster, Leasing
from kvdist.runtime.waits import AwaitedLock

if TYPE_CHECKING:
    from kvdist.kvstore.checkpoints import Checkpoint, ServerSaving

LOG = logging.getLogger("kvdist")


class DistBackend(Backend):
    """Values on servers.

    Args:
        type_name: the name by which the store was created.
        policy: when servers make a version.
        cluster: this process's membership.
        kernels: what sums over devices on the host.
        devices: the GPUs that it uses; None where values of GPUs are brought to the host.
        is_internal: whether it is part of another store, and need not update where workers may be lost: a mean of
            metrics is over the workers that take part.
    """

    abilities = frozenset(Ability) - {Ability.UPDATER, Ability.CLIPPING}
    transfer = property(attrgetter("arrays.transfer"))

    def __init__(
        self,
        type_name: str,
        policy: Policy,
        cluster: Cluster,
        kernels: Kernels = REFERENCE,
        devices: Devices | None = None,
        is_internal: bool = False,
    ) -> None:
        config = cluster.config
        super().__init__(type_name, cluster.rank, config.num_workers, config.num_servers, devices, kernels)
        self._policy = policy
        view = cluster.node.view
        self.on_loss = view.on_loss.name.lower()
        LossPolicy(self.on_loss, has_rounds=policy.is_lockstep).check()
        self.came_late = cluster.came_late
        if policy.is_lockstep:
            self.abilities = self.abilities | {Ability.CLIPPING}
        self._cluster = cluster
        self._number = cluster.open_store()
        self.devices.pin_with(lambda device: cluster.memory.pin(device.pin))
        self.arrays: ArrayTransfers = ArrayTransfers(cluster, policy, self, self._require_usable)
        self.arrays.on_loss = self.on_loss
        self.arrays.must_update = view.on_loss is not OnLoss.FAIL and not is_internal
        self._rows = self.rows = RowTransfers(cluster, self.arrays)
        self._members = view.members
        """As the functions of `watch_members` know them."""
        self._barrier_lock = AwaitedLock()
        self._is_closed = False
        self._metrics = MetricsExchange(lambda: KVStore(DistBackend("dist", SYNC, cluster, kernels, None, True)))
        self._saving: ServerSaving | None = None
        cluster.stores.append(self)

    @property
    def optimizer(self) -> Optimizer | None:
        return self.arrays.optimizer

    def num_dead_nodes(self) -> int:
        return self._cluster.node.view.lost + isinstance(self._cluster.node.failure, PeerLostError | FencedError)

    @property
    def members(self) -> tuple[int, ...]:
        return self._cluster.node.view.members

    def take_part(self) -> int:
        updates: int = self._cluster.ask(lambda request: TakePart(request, self._number))
        return updates

    def report_progress(
        self, key: Key, samples: int, when: DueWhen, quota: int, now: bool, together: bool
    ) -> Future[Due | None]:
        """Report the progress since the last push of a key, and learn when the next push is due by a rule."""
        piece = self.keys[key].slices[0]
        progress = Progress(piece.number, 0, samples, when, quota, now, together)
        return self.arrays.submit(lambda number: ReportProgress(number, piece.server, progress), None)

    def report_times(self, times: StepTimes) -> None:
        self._cluster.node.submit(lambda number: ReportTimes(number, times))

    # Keys.

    def declare(self, given: KeyArrays) -> None:
        fresh = self.keys.undeclared(given)
        if not fresh:
            return
        require_sendable(fresh)
        infos = self._agreed(fresh)
        compression = self.compression
        if compression is not None:
            infos = [replace(one, is_compressed=not one.form and compression.covers(one.key)) for one in infos]
        before = self.keys.nbytes
        for info, (_, array, *_) in zip(infos, fresh, strict=True):
            self.keys.add(info, array)
        padding_max = ALIGNMENT_BYTES * sum(len(info.slices) for info in infos if not info.form)
        self._cluster.under_way.grow(self.keys.nbytes - before + padding_max)
        mine = [(info, array) for info, (_, array, *_) in zip(infos, fresh, strict=True) if info.giver == self.rank]
        arrays = [(info.key, array) for info, array in mine if not info.form]
        if arrays:
            self.arrays.give(RunKind.INITIALISE, arrays)
        for info, array in mine:
            if isinstance(array, RowSparse):
                self._rows.give(info, array.canonical())

    def _agreed(self, fresh: Sequence[Fresh]) -> list[KeyInfo]:
        """Agree on new keys with all workers; on many by several messages, so that all processes work at a time."""
        futures = []
        for start in range(0, len(fresh), KEYS_PER_MESSAGE):
            names, _, shapes, dtypes, forms = zip(*fresh[start : start + KEYS_PER_MESSAGE], strict=True)
            said = (self._policy.name, names, shapes, dtypes, self._pulled_as(names, dtypes, forms), forms)
            futures.append(self.arrays.submit(partial(_declaration, self._number, said), None))
        return [info for future in futures for info in self._cluster.wait(future)]

    def _pulled_as(self, names: Sequence[Key], dtypes: Sequence[DType], forms: Sequence[str]) -> tuple[DType, ...]:
        """In which types values come back: tables of rows, which send little, as they are."""
        compression = self.compression
        if compression is None:
            return ()
        fresh = list(zip(names, dtypes, forms, strict=True))
        compression.require((key, dtype) for key, dtype, form in fresh if not form)
        return tuple(dtype if form else compression.pulled_as(key, dtype) for key, dtype, form in fresh)

    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        replaced = [(one, arrays[0]) for one, arrays in given if one in self.keys and arrays]
        require_no_tables(self.keys.tables, replaced)
        self.declare(given)
        if replaced:
            # The pull waits for this worker's pushes to be counted, so between the two barriers no push is under way,
            # and no round that was meant for the old values closes on the new ones.
            self._pull([one for one, _ in replaced], None, 0)
            self.check()
            self._replace_by(lambda: self.arrays.give(RunKind.REPLACE, replaced))
            if self.compression is not None:
                self.compression.forget(one for one, _ in replaced)
        self._pull(key, out, priority)

    def _replace_by(self, give: Callable[[], None]) -> None:
        """Broadcast the values of rank 0, or of the next rank if that is lost, for all workers at once."""
        for attempt in count():
            if self._has_given(give, attempt):
                return  # else it was lost or has left in the middle: some is new and some old

    def _has_given(self, give: Callable[[], None], attempt: int) -> bool:
        self.meet()
        # A member that has just come back, or rests, is at another place of the program, and gives nothing here.
        members = sorted(self.members)
        giver = members[attempt % len(members)]
        if giver == self.rank:
            give()

        def barrier(number: int) -> EnterBarrier:
            return EnterBarrier(number, self._number, giver=giver)

        # Values that were shown may have been written to: this call is how such a change becomes everybody's.
        with self._barrier_lock:
            try:
                self._cluster.wait(self.arrays.submit(barrier, self._cluster.memory.forget_shown))
            except PeerLostError:
                if self._cluster.node.failure is not None:
                    raise
                return False
        return True

    def _pull(self, key: Keys, out: Value | None, priority: int) -> None:
        call = PushPull(key, None, out, priority, Lending.EVERYTHING, pushes=False)
        self._cluster.wait((MixedTransfers(self) if self.keys.tables else self.arrays).transfer(call))
        if self.errors:
            raise self.errors.popleft()

    # Values.

    def wait(self, future: Future[Any], lends: bool = False) -> Any:
        try:
            return self._cluster.wait(future)
        except KeyboardInterrupt:
            if lends:
                LOG.warning(
                    "interrupted: waiting until the arrays under way are yours again; interrupt again to give up"
                )
                with contextlib.suppress(Exception):
                    future.result()
            raise

    def pushpull_clipped(self, call: PushPull, clip_norm: float) -> float:
        from kvdist.kvstore.clipping import pushpull_clipped  # a feature at a seam: loaded where it is used

        if self.arrays.must_update:
            raise ConfigError(
                f"KVDIST_ON_LOSS is {self.on_loss!r} (kvdist-launch --on-loss), and servers that clip by the norm keep"
                " gradients from one push to the next, which a lost worker would leave half done: leave clip_norm out,"
                " or use fail"
            )
        with self.reporting():
            tables = [one for one in values.keys(call.key) if one in self.keys.tables]
            if tables:
                raise TypeError(
                    f"{name_of(tables[0])} is a table of rows, which pushpull_clipped does not take: push it by itself"
                )
        return pushpull_clipped(self.arrays, call, clip_norm, partial(self.wait, lends=True))

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that servers of this host are shown."""
        return self._cluster.memory.allocate(nbytes)

    # All workers together.

    def meet(self, timeout: float | None = None, statement: str | None = None) -> None:
        # One at a time: a second thread's barrier is the next one, not the same.
        with self._barrier_lock:
            self.arrays.ask(lambda number: EnterBarrier(number, self._number, timeout, statement or ""))

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        return self._metrics.reduce(arrays, how)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        if self.arrays.optimizer is None:
            self.arrays.ask(lambda number: Configure(number, self._number, optimizer.describe()))
        self.arrays.optimizer = optimizer

    def compress(self, params: Mapping[str, Any]) -> None:
        super().compress(params)
        self._cluster.node.submit(lambda number: UseKernels(number, self.kernels))

    def command(self, head: int, body: str) -> None:
        self.arrays.ask(lambda number: Command(number, head, body))

    # Files.

    @property
    def leasing_side(self) -> DistBackend:
        return self

    def lease(self, make: Callable[[int, int], Request]) -> Any:
        """Ask the scheduler for examples, or tell it of them.

        Args:
            make: makes the request of its number and the store's.
        """
        return self._cluster.ask(lambda request: make(request, self._number))

    @property
    def batches_pushed(self) -> int:
        """How many pushes that say their examples have left this process for the servers, or are about to."""
        return self._cluster.batches_pushed

    @property
    def leasing(self) -> Leasing | None:
        """What this process has leased of the cluster's data, if it ever has."""
        return self._cluster.leasing

    @leasing.setter
    def leasing(self, leasing: Leasing) -> None:
        self._cluster.leasing = leasing

    def save(self, job: SaveJob) -> Future[Path]:
        if self._cluster.leasing is not None:
            self._cluster.leasing.tell()
        return self._files().save(self.keys.all, job)

    def claim(self, job: SaveJob) -> None:
        """Make sure that a checkpoint can be saved to a folder, as the first `save` does.

        Raises:
            CheckpointError: it cannot.
        """
        self._files().claim(self.keys.all, job)

    def states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        from kvdist.kvstore.checkpoints import pull_states

        return pull_states(self.arrays.ask, *self._with_states(keys))

    def replace_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        from kvdist.kvstore.checkpoints import replace_states

        infos, optimizer = self._with_states(keys)

        def give() -> None:
            replace_states(self.arrays.ask, infos, states, optimizer)

        if self.arrays.must_update:
            self._replace_by(give)
        elif self.rank == min(self.members):
            give()

    def totals(self, keys: Sequence[Key]) -> tuple[int, int]:
        from kvdist.kvstore.checkpoints import pull_totals

        return pull_totals(self.arrays.ask, [self.keys[key] for key in keys])

    def load(self, job: LoadJob) -> Checkpoint:
        if not job.values:
            self.adopt_optimizer(self._files().saved_optimizer(job))
        checkpoint = self._files().load(job)
        if job.values and self.compression is not None:
            self.compression.forget()
        return checkpoint

    def _files(self) -> ServerSaving:
        if self._saving is None:
            from kvdist.kvstore.checkpoints import ServerSaving

            cluster = self._cluster
            self._saving = ServerSaving(
                self._number, self.rank, self.arrays.submit, cluster.wait, cluster.retain, cluster.memory.forget_shown
            )
        return self._saving

    def _with_states(self, keys: Sequence[Key]) -> tuple[list[KeyInfo], Optimizer]:
        optimizer = self.arrays.optimizer
        if optimizer is None:
            raise PushRefused("this store has no optimizer, and so no states: call set_optimizer first")
        infos = [self.keys[key] for key in keys]
        tables = [info.key for info in infos if info.form]
        if tables:
            raise PushRefused(f"{name_of(tables[0])} is a table of rows, whose states only a checkpoint has")
        return infos, optimizer

    # The store.

    def close(self, wait: bool, failure: str = "") -> None:
        """Leave the store; the last store of the process leaves the cluster. Raises the error of a lost push."""
        self._is_closed = True
        self._cluster.under_way.wake()
        if wait and self._saving is not None:
            self._saving.wait()
        self._metrics.close()
        self._cluster.stores_open -= 1
        self._cluster.stores.remove(self)
        try:
            if self._cluster.stores_open == 0:
                self._cluster.leave(failure, wait=wait)
        finally:
            with contextlib.suppress(DeviceError):  # a GPU that has failed reads nothing any more
                self.arrays.close()
        if self.errors:
            raise self.errors.popleft()
        if self._saving is not None:
            self._saving.close(wait)

    def check_rollback(self) -> None:
        error = self._cluster.rolled_back
        if error is not None:
            raise self._cluster.accept_rollback(error)

    def forget_pushes(self) -> None:
        """Drop values that have not left, and the residuals of those that have."""
        self.arrays.flush()
        if self.compression is not None:
            self.compression.forget()
        self._cluster.memory.forget_shown()

    def rolled_back(self, step: int) -> None:
        """Tell the user."""
        for watcher in self.rollback_watchers:
            watcher(step)

    def check(self) -> None:
        self._cluster.node.begin_call()
        if self._cluster.rolled_back is not None:
            self.check_rollback()
        if self.watchers and self._members != self.members:
            before, self._members = self._members, self.members
            for watcher in self.watchers:
                watcher(before, self._members)

    def _require_usable(self) -> None:
        """What a push that waits for room asks from time to time."""
        if self._is_closed:
            raise StoreClosed(f"this {self.type!r} store has been closed; close it after its last use")
        self.check()
        if self.errors:
            raise self.errors.popleft()

    def note_error(self, error: BaseException) -> None:
        # The cluster is left only when the servers have what was pushed, so a push is not lost if leaving overtook its
        # answer.
        if isinstance(error, RolledBackError) or (self._is_closed and isinstance(error, StoreClosed)):
            return  # every call says so until the user has seen it
        if self._is_closed:
            # Other stores of the process are open, so the answer still came; no call on this one can raise it.
            LOG.error("a push to a store that has been closed meanwhile failed: %s", error)
        self.errors.append(error)


def _declaration(store: int, said: tuple[Any, ...], number: int) -> DeclareKeys:
    return DeclareKeys(number, store, *said)
