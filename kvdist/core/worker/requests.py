"""Requests of the user's threads to the worker: a frozen dataclass per call, and the data of transfers.

* A *run* is a batch of slices of a server that travel together. A *plan* has the runs of a list of keys, and the place
  of each slice in its run, as a *piece* of it. It depends on the keys only, so it is computed once and used at every
  step; a `Run` is the data of a transfer for a run of the plan.
* A *part* is the slices of a run that may leave now: nearly always all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from kvdist.core.sharding import Slice
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of, names_of
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import ITEMSIZES, U8, U32, Bits, Payload, coded_sizes, offsets, padded

Column = TypeVar("Column", U8, U32)
"""A number per slice."""

KEYS_PER_MESSAGE = 4096
"""New keys in a message: few, so that the scheduler reads a message while a worker writes the next."""
SLICES_PER_RUN_MAX = 256
"""Enough to keep messages rare, few enough that a server sums a run while the next run is in flight."""
ALONE_BYTES_MIN = 64 << 10
"""A slice of at least this size is a run by itself, and is never copied together with other slices."""
_EMPTY = int(msg.Flag.EMPTY)
_CLIPPED = int(msg.Flag.MEASURE | msg.Flag.APPLY)


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as of `Slice`
class KeyInfo:
    """An initialised key: its shape and dtype, and the servers of its slices."""

    key: int | str
    shape: tuple[int, ...]
    dtype: DType
    slices: tuple[Slice, ...]
    giver: int = 0
    """The rank of the worker that sends the first value."""
    pulled_as: DType | None = None
    """The dtype in which its values come back, if another than `dtype`."""
    is_compressed: bool = False
    """Whether pushes to it travel encoded."""
    form: str = ""
    """How its rows begin, if it is a sparse table."""
    name: str = field(init=False, compare=False)
    """Its name in messages: see `name_of`."""

    def __post_init__(self) -> None:
        self.name = name_of(self.key)

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.slices[-1].stop


@dataclass(slots=True, unsafe_hash=True)  # not frozen, as of `Slice`
class RunSlice:
    """A piece of a run: a slice of it, elements `start` to `stop` of the plan's `index`-th key, at byte `offset`."""

    index: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, slots=True, eq=False)
class RunPlan:
    """Slices of a server that travel together. Parallel arrays, an element per slice."""

    server: int
    ids: U32
    counts: U32
    dtypes: U8
    pieces: tuple[RunSlice, ...]
    nbytes: int
    """The size of the payload."""
    positions: dict[int, int]
    """Slice → its position in the arrays."""
    key_of: npt.NDArray[np.intp]
    """(n,) the index of the key of each slice."""
    whole_keys: tuple[int, ...] | None = None
    """The indices of the keys, if every slice is the whole of its key, as is usual for small keys."""
    is_packed: bool = False
    """Whether the slices lie back to back, without padding."""

    def positions_of(self, ids: U32) -> Sequence[int]:
        """Return the positions in the arrays of some of the slices, by their numbers."""
        if len(ids) == len(self.ids) and (ids == self.ids).all():
            return range(len(ids))  # an answer to the whole run: the usual case
        return [self.positions[number] for number in ids.tolist()]

    def alone(self, number: int) -> RunPlan:
        """Return the plan of a run of a single slice. It is not for answers."""
        one = slice(self.positions[number], self.positions[number] + 1)
        counts, dtypes = self.counts[one], self.dtypes[one]
        return replace(self, ids=self.ids[one], counts=counts, dtypes=dtypes, nbytes=offsets(dtypes, counts)[1])


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """How a list of keys travels."""

    keys: tuple[KeyInfo, ...]
    runs: tuple[RunPlan, ...]


def travels_alone(nbytes: int) -> bool:
    """Whether a slice of this size travels alone in a message."""
    return padded(nbytes) >= ALONE_BYTES_MIN


def make_plan(keys: Sequence[KeyInfo], run_bytes_max: int) -> Plan:
    """The plan for a list of keys, in their order.

    Small slices of a server share runs of at most `run_bytes_max` bytes; a large slice is a run by itself.
    """
    runs: list[RunPlan] = []
    # By server, and whether they travel encoded: a message has one encoding.
    batches: dict[tuple[int, bool], _Batch] = {}
    nbytes_of: dict[tuple[int, bool], int] = {}
    for index, info in enumerate(keys):
        dtype, size = info.dtype, info.size
        for piece in info.slices:
            nbytes = padded((piece.stop - piece.start) * dtype.itemsize)
            if nbytes >= ALONE_BYTES_MIN:
                runs.append(_run(piece.server, [(index, piece, dtype, size)]))
                continue
            way = (piece.server, info.is_compressed)
            total = nbytes_of.get(way, 0) + nbytes
            batch = batches.get(way)
            if batch is None:
                batch = batches[way] = []
            elif total > run_bytes_max or len(batch) >= SLICES_PER_RUN_MAX:
                runs.append(_run(piece.server, batch))
                batch, total = [], nbytes
                batches[way] = batch
            batch.append((index, piece, dtype, size))
            nbytes_of[way] = total
    runs += [_run(server, batch) for (server, _), batch in batches.items()]
    return Plan(tuple(keys), tuple(runs))


_Batch = list[tuple[int, Slice, DType, int]]
"""The index of the key, a slice of it, its dtype, and the number of elements of the key."""


def _run(server: int, batch: _Batch) -> RunPlan:
    indices, slices, dtypes, sizes = zip(*batch, strict=True)
    ids = [piece.number for piece in slices]
    starts, stops = [piece.start for piece in slices], [piece.stop for piece in slices]
    counts = (np.array(stops, np.int64) - np.array(starts, np.int64)).astype(np.uint32)
    codes = np.array(dtypes, np.uint8)
    places, nbytes = offsets(codes, counts)
    return RunPlan(
        server,
        np.array(ids, np.uint32),
        counts,
        codes,
        tuple(map(RunSlice, indices, starts, stops, places.tolist())),
        nbytes,
        dict(zip(ids, range(len(ids)), strict=True)),
        np.array(indices, np.intp),
        indices if not any(starts) and stops == list(sizes) else None,
        int((ITEMSIZES.take(codes) * counts).sum()) == nbytes,
    )


class RunKind(enum.Enum):
    """The purpose of a run, of slices or of rows of a table."""

    INITIALISE = "init"
    REPLACE = "replace"
    PUSH = "push"
    PULL = "pull"
    PUSHPULL = "pushpull"
    PULL_STATE = "pull of state"
    REPLACE_STATE = "replace state"

    @property
    def pushes(self) -> bool:
        """Whether it carries a contribution."""
        return self in (RunKind.PUSH, RunKind.PUSHPULL)

    @property
    def pulls(self) -> bool:
        """Whether values come back."""
        return self in (RunKind.PULL, RunKind.PUSHPULL, RunKind.PULL_STATE)


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Some rows of a run: their ids and, but for a pull, their values, laid out as a payload."""

    rows: int
    payload: memoryview


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """How the payload of a run is encoded; see `kvdist.protocol.arrays.Coded`. `entries` has a number per slice."""

    encoding: int
    parameter: float
    entries: U32


BatchKey: TypeAlias = tuple[RunKind, int, float | tuple[msg.Contributor, ...]]


@dataclass(slots=True, eq=False)
class Run:
    """The data of a transfer for a run of a plan. It belongs to the worker once it is submitted, and to that transfer.

    payload: the contribution's bytes in the layout of the plan; the worker's until the run is counted.
    sinks: for a pull, per slice the 1-D array that takes the value.
    kept: instead of sinks, takes the values themselves, as they lie in the transport's memory, by the slice's place.
    """

    plan: RunPlan
    payload: memoryview | None = None
    sinks: Sequence[Bits] = ()
    flags: U8 | None = None
    settings: tuple[tuple[float, float, float], ...] = ()
    setting_of: U8 | None = None
    kept: dict[int, Bits] | None = None
    stays: bool = False
    """Whether the server reads the payload in place, so that a larger message costs nothing."""
    samples: int = 0
    """Number of examples that a contribution sums; 0 if unknown."""
    chunks: Sequence[RowChunk] = ()
    """For a run of rows: its content, a message per chunk, instead of a payload."""
    row_length: int = 0
    """Elements of a row."""
    encoded: Encoded | None = None
    """How the payload is encoded; None for the elements themselves."""
    states: U8 | None = None
    """For `PULL_STATE` and `REPLACE_STATE`: which array of the optimizer's state is meant, per slice."""
    contributors: tuple[msg.Contributor, ...] = ()
    """The pushes that are in it, if it is the sum of a host."""

    # The state of the run while it is in flight.

    # Not the transfer itself: a cycle of the two would keep the payload's memory until Python looks for cycles.

    number: int = field(init=False, repr=False)
    request: int = field(init=False, repr=False)
    kind: RunKind = field(init=False, repr=False)
    priority: int = field(init=False, repr=False)
    key_by_key: bool = field(init=False, repr=False)
    steps: U32 = field(init=False, repr=False)
    """(n,) the worker's push counters."""
    versions: U32 = field(init=False, repr=False)
    """(n,) the versions that were seen."""
    left: int = field(init=False, repr=False)
    """Slices without an answer."""
    answered: npt.NDArray[np.bool_] | None = field(init=False, repr=False)
    """(n,) which slices have an answer, where each key is answered separately: none may be answered twice."""

    def begin(self, number: int, transfer: Transfer, steps: U32, versions: U32) -> None:
        """Take over a run, which is in flight from now on as part of a transfer."""
        self.number, self.request, self.kind = number, transfer.request, transfer.kind
        self.priority, self.key_by_key = transfer.priority, transfer.key_by_key
        self.steps, self.versions, self.left = steps, versions, len(self.plan.ids)
        self.answered = np.zeros(self.left, np.bool_) if self.key_by_key else None

    @property
    def is_clipped(self) -> bool:
        """Whether servers keep its pushes until the norm is known, or apply the pushes that they have kept."""
        return self.flags is not None and bool(self.flags[0] & _CLIPPED)

    @property
    def batch_key(self) -> BatchKey:
        """Equal for runs that may travel in the same message: their purpose and their encoding; -1 for rows."""
        encoded = self.encoded
        if encoded is None:
            return (self.kind, -1 if self.chunks else 0, self.contributors)
        return (self.kind, encoded.encoding, encoded.parameter)


class RunPart:
    """The slices of a run that may leave now, nearly always all; or a chunk of its rows.

    Args:
        run: the run.
        positions: which of its slices, in ascending order; None for all.
        chunk: the index of a chunk, for a run of rows.
    """

    __slots__ = ("_chunk", "_more", "_positions", "nbytes", "run")

    def __init__(self, run: Run, positions: Sequence[int] | None = None, chunk: int | None = None) -> None:
        self.run = run
        whole = positions is None or len(positions) == len(run.plan.ids)
        self._positions = None if whole else np.array(positions, np.intp)
        self._chunk = None if chunk is None else run.chunks[chunk]
        self._more = msg.MORE if chunk is not None and chunk < len(run.chunks) - 1 else 0
        payload = run.payload if self._chunk is None else self._chunk.payload
        self.nbytes = 0 if payload is None else len(payload) if whole else sum(map(len, self._stretches()))

    @property
    def ids(self) -> U32:
        """(n,) the slices."""
        return self._of(self.run.plan.ids)

    @property
    def steps(self) -> U32:
        """(n,) the worker's push counters."""
        return self._of(self.run.steps)

    @property
    def versions(self) -> U32:
        """(n,) the versions that were seen."""
        return self._of(self.run.versions)

    @property
    def dtypes(self) -> U8:
        """(n,) codes of element types; of rows (2,), of ids and values, or (1,) of ids, for a pull."""
        dtypes = self.run.plan.dtypes
        return self._of(dtypes) if self._chunk is None else np.array([DType.INT64, *dtypes][: self._width], np.uint8)

    @property
    def counts(self) -> U32:
        """As many elements in the payload; 0 for an empty contribution."""
        if self._chunk is None:
            return self._of(self._run_counts())
        rows = self._chunk.rows
        return np.array([rows, rows * self.run.row_length][: self._width], np.uint32)

    @property
    def flags(self) -> U8:
        """(n,) flags."""
        flags = self.run.flags
        if flags is None:
            flags = np.zeros(len(self.run.plan.ids), np.uint8)
        return flags | np.uint8(msg.MORE) if self._more else self._of(flags)

    @property
    def setting_of(self) -> U8:
        """(n,) indices into the settings of the run."""
        own = self.run.setting_of
        return self._of(np.zeros(len(self.run.plan.ids), np.uint8) if own is None else own)

    @property
    def states(self) -> U8:
        """(n,) which arrays of an optimizer's state."""
        assert self.run.states is not None
        return self._of(self.run.states)

    @property
    def entries(self) -> U32:
        """(n,) entries in the encoded payload."""
        assert self.run.encoded is not None
        return self._of(self.run.encoded.entries)

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of an encoded payload once it is decoded, at most, and those of rows; 0 for plain slices."""
        if self._chunk is not None:
            return self.nbytes
        return 0 if self.run.encoded is None else self.run.plan.nbytes

    def payload(self) -> Payload:
        """The bytes: the memory of the run, or copies of the stretches of a part."""
        payload = self.run.payload if self._chunk is None else self._chunk.payload
        if payload is None:
            return b""
        return payload if self._positions is None else b"".join(self._stretches())

    @property
    def _width(self) -> int:
        return 1 if self.run.kind is RunKind.PULL else 2

    def _of(self, column: Column) -> Column:
        return column if self._positions is None else column[self._positions]

    def _run_counts(self) -> U32:
        flags, counts = self.run.flags, self.run.plan.counts
        return counts if flags is None else np.where(flags & _EMPTY, np.uint32(0), counts)

    def _stretches(self) -> list[memoryview]:
        assert self.run.payload is not None and self._positions is not None
        encoded = self.run.encoded
        if encoded is None:
            starts, total = offsets(self.run.plan.dtypes, self._run_counts())
        else:
            sizes = coded_sizes(encoded.encoding, encoded.entries)
            starts, total = offsets(np.full(len(sizes), DType.UINT8, np.uint8), sizes.astype(np.uint32))
        bounds = [*starts.tolist(), total]
        return [self.run.payload[bounds[i] : bounds[i + 1]] for i in self._positions.tolist()]


@dataclass(frozen=True, slots=True, eq=False)
class Register:
    """Join the cluster; completes with the worker's rank."""

    request: int


@dataclass(frozen=True, slots=True, eq=False)
class UseKernels:
    """Convert values that come in another dtype than their key's by these kernels from now on; completes at once."""

    request: int
    kernels: Kernels


@dataclass(frozen=True, slots=True, eq=False)
class DeclareKeys:
    """Agree on keys with all workers; completes with a tuple of `KeyInfo`."""

    request: int
    store: int
    mode: str
    keys: tuple[int | str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[DType, ...]
    pulled_as: tuple[DType, ...] = ()
    """The dtypes in which values come back; empty if equal to `dtypes`."""
    forms: tuple[str, ...] = ()
    """Form of each key; empty if all are arrays."""

    @property
    def message(self) -> msg.Declare:
        """The message to the scheduler."""
        dtypes, forms = tuple(map(int, self.dtypes)), self.forms or ("",) * len(self.keys)
        pulled_as = tuple(map(int, self.pulled_as)) or dtypes
        return msg.Declare(self.request, self.store, self.mode, self.keys, self.shapes, dtypes, pulled_as, forms)


@dataclass(frozen=True, slots=True, eq=False)
class Transfer:
    """A push, a pull, both, or the first values; completes when the last slice is answered."""

    request: int
    kind: RunKind
    label: str
    """The transfer, for people, such as ``push of key 'fc1'``."""
    runs: Sequence[Run]
    priority: int = 0
    key_by_key: bool = False
    """Whether each key is answered as soon as possible (`CompleteKeys`); then every key is a single slice."""


@dataclass(frozen=True, slots=True, eq=False)
class EnterBarrier:
    """Wait for all workers; after `timeout_s` the wait fails, and the error names the missing workers.

    It also fails, for all workers, if they do not all make the same `statement`.
    """

    request: int
    store: int
    timeout_s: float | None = None
    statement: str = ""
    giver: int = -1
    """The worker without which this barrier means nothing; -1 for none."""


@dataclass(frozen=True, slots=True, eq=False)
class ClaimFolder:
    """Claim the directory of this folder for the next checkpoint, the first in it; completes with the run, when the job
    has the lock of the directory and every server can write to it."""

    request: int
    store: int
    folder: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class SaveStore:
    """Save the store with the pushes that were submitted before; completes when the checkpoint is complete."""

    request: int
    store: int
    folder: str
    contents: tuple[str, ...]
    run: str
    """The run returned by the claim of its directory; empty without a claim, which fails for all."""
    step: int
    keep: int
    file: msg.SavedFile
    keys: tuple[KeyInfo, ...]
    """All keys of the store."""
    failure: str = ""
    """Why this worker cannot take part, so that it fails for all."""


@dataclass(frozen=True, slots=True, eq=False)
class LoadStore:
    """Restore the store, once no push of this worker is in flight; completes when every server has done so."""

    request: int
    store: int
    folder: str
    contents: tuple[str, ...]
    failure: str = ""
    """Why this worker cannot take part, so that it fails for all."""


@dataclass(frozen=True, slots=True, eq=False)
class TakePart:
    """Let rounds wait from now on for this worker, which joined later; completes with the number of updates of the
    store's weights at that time."""

    request: int
    store: int


@dataclass(frozen=True, slots=True, eq=False)
class ReportProgress:
    """Report how many examples were processed since the last push of a slice. Completes with a `Due` when the next push
    is due, or with None at the next report, if that comes first."""

    request: int
    server: int
    """The number of the server that has the slice."""
    progress: msg.Progress
    """The report without its `step`, which the worker fills in."""


@dataclass(frozen=True, slots=True, eq=False)
class ReportTimes:
    """Report the times of the last steps to the scheduler; completes at once."""

    request: int
    times: msg.StepTimes
    """The times without `sending_us`, which the worker fills in."""


@dataclass(frozen=True, slots=True, eq=False)
class Leave:
    """Take leave once all pushes have arrived; with a `failure` report it at once, which ends the job."""

    request: int
    failure: str = ""
    ends: bool = False
    """Whether the process ends, and has closed no store."""


@dataclass(frozen=True, slots=True, eq=False)
class AcceptRollback:
    """Announce that the user is about to see the rollback: later calls are meant for the state after it.

    Answered when all processes have gone back, with the newest error: another server may have been lost meanwhile.
    """

    request: int


Request = (
    Register
    | AcceptRollback
    | UseKernels
    | DeclareKeys
    | Transfer
    | msg.Configure
    | msg.Command
    | EnterBarrier
    | ClaimFolder
    | SaveStore
    | LoadStore
    | msg.Lease
    | msg.Used
    | TakePart
    | ReportProgress
    | ReportTimes
    | Leave
)
"""The worker passes `Configure` and `Command` on to the scheduler; they complete when all servers have executed
them."""


def label_of(request: Request) -> str:
    """Return a short name of a request, for people."""
    match request:
        case Register():
            return "joining the cluster"
        case AcceptRollback():
            return "going back to a snapshot"
        case UseKernels():
            return "choice of kernels"
        case DeclareKeys(keys=keys):
            return f"init of {names_of(keys)}"
        case Transfer(label=label):
            return label
        case msg.Configure():
            return "set_optimizer"
        case msg.Command(head=head):
            return f"{f'command {head}' if head <= msg.HEAD_OF_USERS_MAX else 'a command of kvdist'} to the servers"
        case EnterBarrier(statement=statement):
            return f"barrier ({statement})" if statement else "barrier"
        case ClaimFolder(folder=folder):
            return f"lock of the folder of {folder}"
        case SaveStore(step=step):
            return f"checkpoint of step {step}"
        case LoadStore():
            return "loading of a checkpoint"
        case TakePart():
            return "taking part in a running job"
        case ReportProgress(progress=progress):
            return "exchange() or save_checkpoint()" if progress.together else "trainer.step()"
        case ReportTimes():
            return "report of the times of steps"
        case msg.Lease():
            return "lease of examples"
        case msg.Used():
            return "account of the examples used"
        case Leave():
            return "leaving the cluster"
