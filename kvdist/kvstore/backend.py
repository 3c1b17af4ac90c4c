"""`Backend`: the few primitives over which `KVStore` has all its public methods; each kind of store is a backend.

`KVStore` has checked that the store is open before it calls a primitive, and that the backend has the ability for it.
Invariants:

* A mistake of the caller raises in the call, inside `reporting` where other workers would wait for this worker.
* The error of a push that has no future is put into `errors`; the next call on the store raises it.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdist.config.policies import TrainingPolicy
from kvdist.core.worker.requests import KeyInfo
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore.keys import Ids, KeyArrays, KeyTable, Rows
from kvdist.kvstore.placement import Devices
from kvdist.kvstore.values import Bits, Key, Keys, UpdaterFunction, Value
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState
from kvdist.protocol.messages import Flag, StepTimes
from kvdist.runtime.waits import AwaitedFuture

if TYPE_CHECKING:
    from kvdist.checkpoint.format import OwnStates
    from kvdist.kvstore.compression import StoreCompression

Average: TypeAlias = bool | Literal["samples"]
"""Whether a sum is divided: by the number of all workers, or by that of all their samples; see `KVStore.push`."""
SAMPLES_MAX = (1 << 32) - 1
"""A message has four bytes for it."""


class Ability(enum.Enum):
    """What not every store can do; see `UNABLE` for the error then."""

    OPTIMIZER = enum.auto()
    UPDATER = enum.auto()
    COMPRESSION = enum.auto()
    ROWS = enum.auto()
    STATES = enum.auto()
    CLIPPING = enum.auto()
    WEIGHTS = enum.auto()


UNABLE: Mapping[Ability, tuple[type[Exception], str]] = {
    Ability.OPTIMIZER: (
        NotImplementedError,
        (
            "has no servers that could run an optimizer: each worker updates with the sums of gradients. A Trainer does"
            " so by itself; in a loop of your own use torch.optim, or a store with servers, 'dist'"
        ),
    ),
    Ability.UPDATER: (
        TypeError,
        "keeps values on servers, and servers run no functions from workers: use set_optimizer, or a 'local' store",
    ),
    Ability.COMPRESSION: (ValueError, "does not compress gradients: that needs 'dist' or 'device'"),
    Ability.ROWS: (
        TypeError,
        (
            "has no tables of rows, which need servers: use 'hybrid', which keeps them on servers and sums everything"
            " else without, or 'dist'"
        ),
    ),
    Ability.STATES: (NotImplementedError, "does not give out or take the states of its optimizer"),
    Ability.CLIPPING: (
        NotImplementedError,
        "does not clip gradients by the norm of all of them: that needs 'dist', whose servers sum all before updates",
    ),
    Ability.WEIGHTS: (
        NotImplementedError,
        (
            "does not weight values by their samples: multiply them by their number, sum, and divide by the sum of"
            " these numbers, as Trainer.step(samples=n) does; or use 'dist', whose servers do it"
        ),
    ),
}
"""The error of a store that cannot do something: ``the store 'collective' has no tables of rows, ...``."""


# Pushes and pulls.


@dataclass(frozen=True, slots=True)
class PushOptions:
    """How the servers count a push; see `KVStore.push`."""

    average: Average
    samples: int

    def __post_init__(self) -> None:
        if not 0 <= self.samples <= SAMPLES_MAX:
            raise ValueError(f"samples is {self.samples}; it counts examples, from 0 to {SAMPLES_MAX}")
        if self.average not in (False, True, "samples"):
            raise ValueError(f"average is {self.average!r}; it is True, False or 'samples'")
        if self.is_weighted and not self.samples:
            raise ValueError("average='samples' needs samples: of how many examples the values are the mean")

    @property
    def is_weighted(self) -> bool:
        """Whether contributions weigh as much as their samples."""
        return self.average == "samples"

    @property
    def flags(self) -> int:
        """As they travel."""
        return int(Flag.WEIGHTED if self.is_weighted else Flag.AVERAGE if self.average else 0)


PLAIN = PushOptions(average=False, samples=0)
"""The usual options."""


class Lending(enum.Enum):
    """Which arrays of the caller may be sent from where they are, because they do not change meanwhile."""

    NOTHING = enum.auto()
    """The call returns at once, and all arrays are the caller's again. Only a push; it has no future."""
    RESIDENT = enum.auto()
    """The caller has a future, and an array of `KVStore.empty` belongs to the store until it resolves."""
    EVERYTHING = enum.auto()
    """The caller waits."""


@dataclass(slots=True)
class PushPull:
    """A call of `push`, `pull` or `pushpull`, in any of their forms.

    Attributes:
        key: as the caller gave it.
        value: values to push, if `pushes`.
        out: where results go, if `pulls`; None for new arrays, or in place if it pushes too.
        priority, ignore_sparse: as the caller gave them.
        options: how the push counts.
        lending: what may be sent without a copy, and how the caller waits.
        shared: whether large results may be shown where servers of this host keep them.
    """

    key: Keys
    value: Value
    out: Value
    priority: int
    lending: Lending
    options: PushOptions = PLAIN
    pushes: bool = True
    pulls: bool = True
    ignore_sparse: bool = True
    shared: bool = False

    @property
    def skips_rows(self) -> bool:
        """Whether an array's result is not written into a `RowSparse`, with a warning in place of an error."""
        return self.ignore_sparse and not self.pushes


MembershipWatcher = Callable[[tuple[int, ...], tuple[int, ...]], object]
"""Takes the ranks of the workers before and after the change."""


class TableTransfers(Protocol):
    """Moves rows of keys that are tables."""

    def push(self, info: KeyInfo, rows: Rows | None, priority: int, options: PushOptions) -> Future[None]:
        """Push rows; None for no gradient on this worker."""

    def pull(self, info: KeyInfo, ids: Ids, out: Bits, priority: int) -> Future[None]:
        """Pull the rows `ids`, strictly ascending, into `out`: (k · row length,)."""


# What else a backend is asked for.


class Reduction(enum.Enum):
    """What `Backend.reduce` makes of the workers' arrays."""

    SUM = enum.auto()
    """The sum, with which `gather` exchanges bytes."""
    MEAN = enum.auto()
    MEAN_OF_OTHERS = enum.auto()
    """This worker's arrays do not count. NaN where no worker's do."""
    RANK_0 = enum.auto()
    """The values of rank 0."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """A checkpoint to write; see `KVStore.save_checkpoint`.

    Attributes:
        directory, step, state, keep, names: as in that method.
        states_only: whether the directory itself is the checkpoint.
        write_own: writes the states of this worker's local optimizer into a folder, for this run and step.
    """

    directory: str | os.PathLike[str]
    step: int | None = None
    state: Any = None
    keep: int | None = None
    names: Mapping[Key, str] | None = None
    states_only: bool = False
    write_own: Callable[[Path, str, int], OwnStates] | None = None


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A checkpoint to read; see `KVStore.load_checkpoint`.

    Attributes:
        directory: folder of checkpoints, or a checkpoint that has states only.
        step: which; None for the newest.
        values, states: parts to restore. Without `values` the directory is the checkpoint itself.
        names: key → what it is called now, where a key is but a place.
    """

    directory: str | os.PathLike[str]
    step: int | None = None
    values: bool = True
    states: bool = True
    names: Mapping[Key, str] | None = None


class Backend(abc.ABC):
    """A kind of store.

    Args:
        type_name: the name by which the store was created.
        rank: this worker's number.
        num_workers, num_servers: of the store.
        devices: the GPUs that it uses; None where values of GPUs are brought to the host.
        kernels: what does the arithmetic on the host.

    Attributes:
        keys: the initialised keys.
        compression: what encodes pushes; None while nothing does.
        uncompressed: keys that travel as they are.
        errors: of pushes without a future; the next call raises them.
        rows: moves rows of tables; None without `Ability.ROWS`.
        rollback_watchers: called when all workers go back to a snapshot.
        watchers: called by `check` when `members` has changed.
        on_loss: what follows when a worker is lost: ``fail``, ``wait`` or ``continue``.
        came_late: whether this process has joined a running job.
        policy: when a trainer exchanges, if not in each step.
        position: where a process that trains alone is in its data, for checkpoints.
        samples: number of examples behind the values, for checkpoints, where no server counts them.
    """

    on_loss = "fail"
    came_late = False
    policy: TrainingPolicy | None = None
    samples = 0
    position: Callable[[], Mapping[str, Any] | None] = staticmethod(lambda: None)
    abilities: frozenset[Ability] = frozenset()

    def __init__(
        self,
        type_name: str,
        rank: int = 0,
        num_workers: int = 1,
        num_servers: int = 0,
        devices: Devices | None = None,
        kernels: Kernels = REFERENCE,
    ) -> None:
        self.type = type_name
        self.rank = rank
        self.num_workers = num_workers
        self.num_servers = num_servers
        self.devices = devices or Devices()
        self.errors: deque[BaseException] = deque()
        self.kernels = kernels
        self.keys = KeyTable()
        self.compression: StoreCompression | None = None
        self.uncompressed: set[Key] = set()
        self.rows: TableTransfers | None = None
        self.watchers: list[MembershipWatcher] = []
        self.rollback_watchers: list[Callable[[int], None]] = []

    def require_able(self, ability: Ability) -> None:
        """Raise the error of `UNABLE` if the store lacks an ability."""
        if ability not in self.abilities:
            kind, sentence = UNABLE[ability]
            raise kind(f"the store {self.type!r} {sentence}")

    @property
    @abc.abstractmethod
    def optimizer(self) -> Optimizer | None:
        """What updates the values; None while a sum replaces a value, or a function changes it."""

    @property
    def holdings(self) -> str:
        """The keys in the `repr` of a store, such as ``6 keys``."""
        return f"{len(self.keys)} keys"

    def require(self, key: Key) -> object:
        """Raises `KeyNotInitialised` for a key that is not initialised."""
        return self.keys[key]

    @abc.abstractmethod
    def declare(self, given: KeyArrays) -> None:
        """Agree on new keys with all workers, and give them rank 0's values."""

    @abc.abstractmethod
    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        """Make rank 0's arrays everybody's, for new keys and others, and write them into `out`."""

    @abc.abstractmethod
    def transfer(self, call: PushPull) -> Future[Any]:
        """Push and pull arrays; a future of the result of the call. Callers do not read that of `Lending.NOTHING`."""

    @abc.abstractmethod
    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        """New arrays like these: sums or means over the workers, or those of rank 0. They are no keys of the store."""

    @abc.abstractmethod
    def meet(self, timeout: float | None = None, statement: str | None = None) -> None:
        """Wait until every worker has called it, and check that all make the same statement."""

    @abc.abstractmethod
    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Take sums for gradients of this optimizer. It follows the same rule as the optimizer before."""

    def adopt_optimizer(self, saved: Optimizer | None) -> None:
        """Use the optimizer whose states are about to be loaded, unless the store has an optimizer."""
        if self.optimizer is None and saved is not None:
            self.require_able(Ability.OPTIMIZER)
            self.set_optimizer(saved)

    def set_updater(self, function: UpdaterFunction) -> None:
        """Let a function change the values; see `Ability.UPDATER`."""
        raise NotImplementedError

    def compress(self, params: Mapping[str, Any]) -> None:
        """Compress keys that are initialised from now on; a second call must ask for the same."""
        from kvdist.kvstore.compression import StoreCompression  # a feature at a seam: loaded where it is used

        with self.reporting():
            chosen = StoreCompression(params, self.uncompressed, self.kernels)
            self.require_compression(chosen)
            if self.compression is not None:
                self.compression.require_equal(chosen)
                return
            chosen.require_no_keys(self.keys.infos)
        self.meet(statement=chosen.statement)
        self.compression = chosen

    def require_compression(self, chosen: StoreCompression) -> None:  # noqa: B027  # most compress in all ways
        """Raises a `ValueError` where the store cannot compress so."""

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """Let keys travel as they are."""
        if self.compression is not None:
            self.compression.require_uncompressed(keys, self.keys.infos)
        self.uncompressed.update(keys)

    def leave_unkept(self, keys: Sequence[Key]) -> None:  # noqa: B027  # a hint may be ignored
        """A hint: see `KVStore.leave_unkept`."""

    def expect_rows(self, keys: Sequence[Key]) -> None:  # noqa: B027  # a hint may be ignored
        """A hint: see `KVStore.expect_rows`."""

    def pushpull_clipped(self, call: PushPull, clip_norm: float) -> float:
        """Push, clip and pull; see `Ability.CLIPPING`."""
        raise NotImplementedError

    @abc.abstractmethod
    def save(self, job: SaveJob) -> Future[Path]:
        """Write a checkpoint; a future of its folder."""

    @abc.abstractmethod
    def load(self, job: LoadJob) -> Any:
        """Read a checkpoint, which is returned."""

    @abc.abstractmethod
    def states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        """The optimizer's states of keys, copies."""

    @abc.abstractmethod
    def replace_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        """Replace the optimizer's states of keys."""

    def totals(self, keys: Sequence[Key]) -> tuple[int, int] | None:
        """Number of examples behind the values of keys, of all workers, and number of updates: -1 where each worker has
        its own number; of the key that has most. None where no server counts them."""
        return None

    @abc.abstractmethod
    def close(self, wait: bool, failure: str = "") -> None:
        """Leave, perhaps because this worker cannot go on. Called once."""

    def note_error(self, error: BaseException) -> None:
        """Keep the error of a push without a future. On any thread."""
        self.errors.append(error)

    def note_failed(self, future: Future[Any]) -> None:
        """Keep the error of a push that nobody waits for, if it has failed. On any thread."""
        error = future.exception()
        if error is not None:
            self.note_error(error)

    def command(self, head: int, body: str) -> None:  # noqa: B027  # most have no servers
        """Let every server run a handler. A store without servers does nothing."""

    def num_dead_nodes(self) -> int:
        """How many processes are known to be lost."""
        return 0

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the present workers, in order."""
        return tuple(range(self.num_workers))

    @property
    def leasing_side(self) -> Any:
        """The `DistBackend` whose scheduler leases examples, and has the place in the data in each checkpoint of this
        store; None where a process that trains alone sets its `position`."""
        return None

    def take_part(self) -> int:
        """Let others wait from now on for the pushes of this process, which has joined a running job.

        Returns:
            How many updates the weights have had by then.
        """
        return 0

    def report_times(self, times: StepTimes) -> None:  # noqa: B027  # most have no scheduler
        """Tell the scheduler how the time of the last steps went."""

    def check(self) -> None:  # noqa: B027  # a store within a process can always be called
        """Raise the reason why calls are impossible, if any. Called at the beginning of each call."""

    def check_rollback(self) -> None:  # noqa: B027  # most stores know of none
        """Raise `RolledBackError` if all workers went back to a snapshot and the user does not know."""

    def wait(self, future: Future[Any], lends: bool = False) -> Any:
        """The result of a future; with `lends`, arrays of the caller are under way until it is done."""
        return future.result()

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        """Within it a caller's mistake is reported to the other workers, if they would wait for this worker."""
        return contextlib.nullcontext()

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory for an array of `KVStore.empty`."""
        return np.empty(nbytes, np.uint8)


def resolved(result: Any) -> Future[Any]:
    """A future that has its result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


def combined(futures: Sequence[Future[Any]], finish: Callable[[], Any] = lambda: None) -> Future[Any]:
    """A future for several futures: when all are done it has the result of `finish`, or the first error.

    `finish` is called on the thread that resolves the last future.
    """
    whole: Future[Any] = AwaitedFuture()
    whole.set_running_or_notify_cancel()
    lock = threading.Lock()
    left = len(futures)

    def one_is_done(_: Any) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left > 0:
                return
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            whole.set_exception(errors[0])
            return
        try:
            whole.set_result(finish())
        except Exception as error:  # noqa: BLE001  # the caller that waits for the future gets it
            whole.set_exception(error)

    if not futures:
        left = 1
        one_is_done(None)
    for future in futures:
        future.add_done_callback(one_is_done)
    return whole
