"""`QueueSampler`: workers take the next examples when they need them; each is used once, on however many workers.

The scheduler leases ranges of places (`kvdist.core.scheduler.leases`); a process alone has a queue without a scheduler.
The order of an epoch is a permutation that every worker makes from (seed, epoch), so none is sent. Walk of a batch: the
loader asks the sampler, which leases a range when it has none left → `drive` hands the batch out, and knows how many
examples that are → the trainer's step tells the servers with its push, and the sampler once it has returned (`_use`).
"""

from __future__ import annotations

import abc
import contextlib
import logging
import signal
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvdist.core.scheduler.leases import LeaseHolder, Plan, Queue, Range, position_of, restored
from kvdist.core.worker.requests import Request
from kvdist.errors import ConfigError, KvdistError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.dist import DistBackend
from kvdist.protocol.messages import Lease, Used
from kvdist.training.data import DrivenSampler, require_whole

if TYPE_CHECKING:
    from kvdist.training.trainer import Trainer

BATCHES_PER_LEASE = 4
"""For each worker process of a loader: few enough that a lost worker has few, and leases are rare all the same."""
SEED_MAX = (1 << 64) - 1
LENGTH_MAX = (1 << 63) - 1
EPOCHS_MAX = (1 << 31) - 1

LOG = logging.getLogger("kvdist")


class LeaseAnswer(NamedTuple):
    """What there is to train on.

    Attributes:
        given: the next range; None if no range is free now.
        is_over: whether all examples of the pass are used, by any worker.
        version: the most updates of the weights that any worker knows of.
    """

    given: Range | None
    is_over: bool
    version: int


class Leasing(abc.ABC):
    """Where a process gets its examples, and what it has of them.

    Attributes:
        number: of the pass that comes next, or goes on; after a rollback perhaps an earlier pass.
        begun: the last pass that the program has begun.
        holder: leased and unused ranges.
        is_shared: whether others train on the same data.
    """

    is_shared = False

    def __init__(self) -> None:
        self.number = self.begun = 0
        self.holder = LeaseHolder(0)
        self.count_what_has_left: Callable[[], object] = lambda: None
        """Let count as used what a trainer has pushed; see `Trainer._count_what_has_left`."""

    @abc.abstractmethod
    def lease(self, plan: Plan, batch: int, wanted: int, version: int, *, rests: bool) -> LeaseAnswer:
        """The next range, which is held now; with `rests` wait for a range, or for the end."""

    @abc.abstractmethod
    def give_back(self) -> None:
        """Return the unused ranges to others, before this process leaves."""

    def restore(self, position: Mapping[str, Any]) -> None:
        """A checkpoint was loaded: go on where it was saved. Leased ranges are void."""
        self.holder.ranges.clear()
        self.number = self.begun = min(self.number, restored(position)[0])


class OwnQueue(Leasing):
    """The data of a process that trains alone."""

    def __init__(self) -> None:
        super().__init__()
        self._plan: Plan | None = None
        self._pass = 0
        self._queue = Queue()

    def lease(self, plan: Plan, batch: int, wanted: int, version: int, *, rests: bool) -> LeaseAnswer:
        """See `Leasing`. Nobody else could give anything back, so nothing to lease means the end.

        Raises:
            ValueError: the checkpoint that was loaded is of other data.
        """
        if self._plan is None or self.number > self._pass:
            self._plan, self._pass, self._queue = plan, self.number, Queue.of(plan)
        if plan != self._plan:
            raise ValueError(
                f"{self._plan} has not come to its end, perhaps in a loaded checkpoint, and this is {plan}"
            )
        if self.number < self._pass:
            return LeaseAnswer(None, True, version)
        given = self._queue.lease(batch, wanted, 1)
        if given is not None:
            self.holder.ranges.append(given)
        return LeaseAnswer(given, rests and given is None, version)

    def give_back(self) -> None:
        """See `Leasing`."""
        self._queue.give_back(self.holder.ranges)
        self.holder.ranges.clear()

    def position(self) -> dict[str, Any] | None:
        """For a checkpoint."""
        if self._plan is None:
            return None
        return position_of(self._pass, self._plan, [*self._queue.free, *self.holder.ranges])

    def restore(self, position: Mapping[str, Any]) -> None:
        """See `Leasing`."""
        super().restore(position)
        self._pass, self._plan, self._queue = restored(position)


class SharedQueue(Leasing):
    """The data of a cluster, as the scheduler leases it; an object in each process.

    Args:
        ask: hands the worker a request, which it gets a number and the store's number for, and waits for the result.
    """

    is_shared = True

    def __init__(self, ask: Callable[[Callable[[int, int], Request]], Any]) -> None:
        super().__init__()
        self.ask = ask
        self._reported = 0
        """Examples that the scheduler knows to be used: other leased examples go to others as this process leaves."""

    def lease(self, plan: Plan, batch: int, wanted: int, version: int, *, rests: bool) -> LeaseAnswer:
        """See `Leasing`.

        Raises:
            ConfigError: the workers' samplers differ, or another sampler has not come to its end.
        """
        self._reported = self.holder.used
        said = (self.number, *plan, batch, wanted, self._reported, version, rests)
        leased = self.ask(lambda request, store: Lease(request, store, *said))
        given = Range(leased.epoch, leased.start, leased.stop)
        if given.size:
            self.holder.ranges.append(given)
        return LeaseAnswer(given if given.size else None, leased.is_over, leased.version)

    def tell(self) -> None:
        """Say how much is used, before a checkpoint."""
        self.ask(lambda request, _: Used(request, self.holder.used, False))

    def give_back(self) -> None:
        """See `Leasing`."""
        self.count_what_has_left()
        gives_back = bool(self.holder.ranges)
        if gives_back or self.holder.used > self._reported:
            self._reported = self.holder.used
            self.holder.ranges.clear()
            with contextlib.suppress(KvdistError):  # the cluster has ended first, or will ask the servers
                self.ask(lambda request, _: Used(request, self._reported, gives_back))

    def rolled_back(self) -> None:
        """All return to a snapshot: leased ranges are void, and servers count examples from 0 again.

        In which pass the snapshot is only the scheduler knows: it says of each before that it is over.
        """
        self.holder, self.number, self._reported = LeaseHolder(0), 0, 0


class QueueSampler(DrivenSampler):
    """Sampler for ``DataLoader(sampler=...)`` that yields indices which all workers take from a common queue.

    Each example is used once per epoch, whatever the number and speed of the workers, and even if some of them are
    lost. The scheduler leases each worker a few batches at a time. Examples that a lost worker has not used are leased
    to other workers, as soon as the servers have reported how many of its pushes count. If the last push of a lost
    worker is in only some slices of the weights, its examples count as used, and a line in the log names them.

    Iterate ``for batch in trainer.batches(loader)`` a single time: the loop makes all `epochs`, and ends on all workers
    when every example is used. A worker that gets no lease is not awaited in the meantime. Every checkpoint includes
    the position, and `load_checkpoint` resumes from it, on any number of workers. On SIGTERM, the signal that spot
    machines get, the loop finishes its batch, pushes the result of its steps, returns the unused part of its lease, and
    raises ``SystemExit(0)``.

    Worker processes of the loader (``num_workers``) and ``StatefulDataLoader`` are supported. Batches must be those of
    torch's ``BatchSampler``, without ``drop_last``. With several workers the store must be a ``dist`` store that
    updates the weights. The sampler also works in a single process.

    Args:
        length: number of examples in the data set, equal on all workers.
        epochs: number of times that an iteration uses each example.
        shuffle: True for a new random order in each epoch, equal on all workers; False for ascending indices.
        seed: seed of the orders, 0 or more, equal on all workers.
        store: store of the trainer; None takes the store of the trainer that iterates.

    Raises:
        ValueError: a number is out of range.
    """

    def __init__(
        self, length: int, *, epochs: int = 1, shuffle: bool = True, seed: int = 0, store: object = None
    ) -> None:
        numbers = (("length", length, 0, LENGTH_MAX), ("epochs", epochs, 1, EPOCHS_MAX), ("seed", seed, 0, SEED_MAX))
        for name, number, least, most in numbers:
            if not least <= require_whole(name, number) <= most:
                raise ValueError(f"{name} is {number}; it must be a whole number from {least} to {most}")
        self._plan = Plan(int(length), int(epochs), bool(shuffle), int(seed))
        self._store = store
        self._leasing: Leasing | None = None
        self._first_pass = 0
        """When it was used first: its epochs count from there."""
        self._handed = 0
        """Number of examples in the batches that the program has got, used examples included."""
        self._yielded = 0
        """How many the loader has asked for in this iteration."""
        self._end = 0
        """How many that will be with the rest of the present batch."""
        self._ends: deque[int] = deque()
        """The same at the end of each batch that the program has not got, in order."""
        self._first_batch = 1
        self._maker: Any = None
        """What makes the loader's batches; None for batches of a single example."""
        self._loader_workers = 1
        self._version = 0
        self._is_begun = self._is_over = False
        self._is_driven = False
        self._iterations = 0
        self._rollbacks = 0
        """Number of rollbacks to a snapshot."""
        self._order: tuple[int, NDArray[np.int64]] = (-1, np.zeros(0, np.int64))
        """The last epoch whose order was needed, and that."""

    def __repr__(self) -> str:
        return str(self._plan)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raises a `TypeError` once a trainer has iterated it: a copy would hand out the same examples again."""
        if self._leasing is not None:
            raise TypeError(
                "a QueueSampler that a Trainer has iterated cannot be pickled or copied, as what it leases belongs to"
                " this process: make another one; save_checkpoint keeps the position in the data"
            )
        return super().__reduce_ex__(protocol)

    def __len__(self) -> int:
        raise TypeError(
            "a QueueSampler has no length, as fast workers take more batches than slow ones: loop over"
            " trainer.batches(loader), and count with trainer.version or samples_seen; len(data) is that of the data"
        )

    def __iter__(self) -> Iterator[int]:
        if not self._is_driven:
            raise RuntimeError(
                "a QueueSampler was iterated without a Trainer: write `for batch in trainer.batches(loader):`"
            )
        self._iterations += 1
        self._yielded = self._end = 0
        self._ends.clear()
        self._first_batch = 1 if self._maker is None else self._maker.batch_size
        return self._indices(self._iterations)

    def _indices(self, iteration: int) -> Iterator[int]:
        """What is leased and not used, then what else there is to lease now."""
        ranges = deque(self._held.ranges)
        while True:
            one = ranges.popleft() if ranges else self._lease(rests=False)
            if one is None:
                return
            for index in self._examples(one):
                if iteration != self._iterations:
                    return  # another one has begun, and this is the rest of a loader that was left
                if self._yielded == self._end:
                    self._end += self._batch
                    self._ends.append(self._end)
                self._yielded += 1
                yield index

    def _examples(self, one: Range) -> Sequence[int]:
        """The examples at the places of a range."""
        if not self._plan.shuffle:
            return range(one.start, one.stop)
        assert self._leasing is not None
        epoch = (self._leasing.number - self._first_pass) * self._plan.epochs + one.epoch
        if self._order[0] != epoch:
            self._order = (epoch, order_of(self._plan.length, self._plan.seed, epoch))
        examples: list[int] = self._order[1][one.start : one.stop].tolist()
        return examples

    @property
    def _batch(self) -> int:
        """Examples in a batch that begins now; torchdata's loaders keep the size with which an iteration began."""
        from torch.utils.data import BatchSampler  # there is a trainer, so there is torch

        return self._maker.batch_size if type(self._maker) is BatchSampler else self._first_batch

    def _lease(self, *, rests: bool) -> Range | None:
        assert self._leasing is not None
        wanted = BATCHES_PER_LEASE * self._batch * self._loader_workers
        answer = self._leasing.lease(self._plan, self._batch, wanted, self._version, rests=rests)
        self._version = max(self._version, answer.version)
        self._is_over, self._is_begun = answer.is_over, not answer.is_over
        return answer.given

    # What the trainer calls.

    def drive(self, trainer: Trainer, loader: Any, batch: int | None, drops_last: bool) -> Iterator[Any]:
        """Iterate a loader until all examples are used; see `kvdist.Trainer.batches`."""
        if batch is None or drops_last:
            raise ValueError(
                "with a QueueSampler the DataLoader must make torch's batches in order, so that it is known which"
                " examples each has (batch_size=, or torch's BatchSampler; in_order=True), and leave none out"
                " (drop_last=False)"
            )
        self._bind(trainer)
        maker = getattr(loader, "batch_sampler", None)
        self._maker = None if maker is self else maker
        self._first_batch = batch
        self._loader_workers = max(1, getattr(loader, "num_workers", 0))
        self._version, self._is_over = trainer._model.updates, False
        assert self._leasing is not None
        self._leasing.begun = max(self._leasing.begun, self._leasing.number)
        trainer._count_what_has_left()
        with Departure() as departure:
            while True:
                with trainer._skipping_rollback():
                    if trainer._is_void:
                        trainer._go_back()
                    self._pass_by()
                    yield from self._until_nothing_is_leased(trainer, loader, departure)
                    if not self._go_on(trainer, departure):
                        return

    def _pass_by(self) -> None:
        """After a rollback: find the pass that has unused examples again."""
        assert self._leasing is not None
        while self._leasing.number < self._leasing.begun and not self._held.ranges:
            self._lease(rests=False)
            if not self._is_over:
                return
            self._leasing.number += 1

    def _bind(self, trainer: Trainer) -> None:
        if self._store is not None and self._store is not trainer.kvstore:
            raise ValueError("the QueueSampler has another store than this trainer: leave store= out")
        if trainer._start().join is not None:
            raise RuntimeError("a QueueSampler needs no trainer.join(): a worker without examples is not waited for")
        before = trainer._feed.queue
        if before is self:
            return
        if isinstance(before, QueueSampler) and before._is_begun:
            raise RuntimeError(f"{self} begins before {before} has ended: train on them one after the other")
        trainer._feed.queue = self
        self._leasing = before._leasing if isinstance(before, QueueSampler) else leasing_of(trainer)
        assert self._leasing is not None
        self._leasing.give_back()  # what another trainer of this process has left
        of = weakref.WeakMethod(trainer._count_what_has_left)
        self._leasing.count_what_has_left = lambda: None if (count := of()) is None else count()
        self._first_pass = self._leasing.number
        self._handed = self._held.used  # what another sampler of this process has used is none of this one's

    @property
    def _held(self) -> LeaseHolder:
        """The leased and unused ranges."""
        assert self._leasing is not None
        return self._leasing.holder

    def _until_nothing_is_leased(self, trainer: Trainer, loader: Any, departure: Departure) -> Iterator[Any]:
        begun, rollbacks = self._held.used, self._rollbacks
        self._handed = begun
        self._is_driven = True
        try:
            for batch in trainer._clock.loading(loader):
                self._leave_if_asked(trainer, departure)
                if self._rollbacks > rollbacks:
                    return  # what the loader has read ahead is void
                self._handed = begun + min(self._ends.popleft(), self._yielded)
                trainer._feed.reached[self] = (self._iterations, self._handed, "")
                trainer._take_part()
                yield batch
                self._version = trainer.version
                self._leave_if_asked(trainer, departure)
                if self._rollbacks > rollbacks:
                    return
        finally:
            self._is_driven = False
        trainer._exchange(together=False)
        self._version = trainer.version
        if self.unused:
            trainer._feed.reached.pop(self, None)
            LOG.warning(
                "%d examples were handed out and no step has used them: they count as used. Call trainer.step() for the"
                " last batches, too",
                self.unused,
            )
            self._use(self._iterations, self._handed, "")

    def _go_on(self, trainer: Trainer, departure: Departure) -> bool:
        """Wait, outside of the rounds, for more examples; False at the end of the pass."""
        assert self._leasing is not None
        if not self._is_over:
            with departure.at_once():
                self._lease(rests=True)
        if self._leasing.is_shared:
            trainer._catch_up(self._version)
            trainer._recount()
            self._version = trainer._model.updates
        if self._is_over:
            self._leasing.number += 1
        return self._leasing.number <= self._leasing.begun

    def _leave_if_asked(self, trainer: Trainer, departure: Departure) -> None:
        if departure.is_asked:
            assert self._leasing is not None
            trainer._push_before_leaving()
            self._leasing.give_back()
            LOG.warning("SIGTERM: this worker has finished its batch and leaves; what it had leased is for others")
            raise SystemExit(0)

    @property
    def unused(self) -> int:
        """Number of examples delivered since the last step; the next step sums them."""
        if self._leasing is None:
            return 0
        return self._handed - self._held.used

    def _use(self, iteration: int, used: int | None, unknown: str) -> None:
        if iteration == self._iterations and used is not None:
            self._held.use(used)

    def rolled_back(self) -> None:
        """Restart the loader with new leases, after a rollback to a snapshot."""
        self._rollbacks += 1
        self._iterations += 1
        self._handed = self._yielded = self._version = self._end = 0
        self._ends.clear()
        self._is_over = False

    def restore(self, position: Mapping[str, Any]) -> None:
        """Go to the position in the data of a loaded checkpoint.

        Raises:
            RuntimeError: a loader is being iterated and has read ahead.
        """
        if self._is_driven:
            raise RuntimeError("load_checkpoint() was called within the loop over trainer.batches(): leave it before")
        assert self._leasing is not None
        self._leasing.restore(position)
        self._handed = self._held.used
        self._iterations += 1


def leasing_of(trainer: Trainer) -> Leasing:
    """Where the samplers of a trainer get their examples.

    Raises:
        ConfigError: no scheduler can lease them, or a worker that has rested could not get the weights of the others.
    """
    store, on_server = trainer.kvstore, trainer._start().on_server
    backend = store._backend.leasing_side if isinstance(store, KVStore) and on_server else None
    if isinstance(backend, DistBackend):
        shared = backend.leasing if isinstance(backend.leasing, SharedQueue) else SharedQueue(backend.lease)
        shared.ask, backend.leasing = backend.lease, shared
        if trainer._feed.position is not None:
            shared.restore(trainer._feed.position)
        return shared
    if store is not None and store.num_workers > 1:
        raise ConfigError(
            f"a QueueSampler with {store.num_workers} workers needs a store 'dist...' that updates the weights, so that"
            " a worker without examples gets the weights of the others; this Trainer has"
            f" {store.type!r}{'' if on_server else ' and its workers update'}: use SplitSampler"
        )
    own = OwnQueue()
    if trainer._feed.position is not None:
        own.restore(trainer._feed.position)
    trainer._state("batches").tell_position(own.position)
    return own


def order_of(length: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """The order of an epoch: a permutation of all examples, the same on every machine."""
    return np.random.Generator(np.random.PCG64([seed, epoch])).permutation(length)


Handler = Callable[[int, FrameType | None], Any]


class Departure:
    """While it is entered on the main thread, SIGTERM asks this process to leave, instead of ending it at once.

    A handler of the program is called as well; a signal that the program ignores is ignored.
    """

    def __init__(self) -> None:
        self.is_asked = False
        self._is_idle = False
        self._before: Any = None
        self._is_entered = False

    def __enter__(self) -> Departure:
        self._before = signal.getsignal(signal.SIGTERM)
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and self._before not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGTERM, self._ask)
            self._is_entered = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_entered and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._before)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Within this, there is nothing to finish."""
        self._is_idle = True
        try:
            if self.is_asked:
                raise SystemExit(0)
            yield
        finally:
            self._is_idle = False

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True
        if callable(self._before) and getattr(self._before, "__module__", "") != "kvdist.checkpoint.locks":
            self._before(number, frame)
        if self._is_idle:
            raise SystemExit(0)
