"""Everything that processes say to each other: one frozen dataclass per kind, and the stamp on each message.

`WIRE.md` is the specification of the bytes; `wire` turns these objects into frames and back. Rules that hold here:

* A kind means one thing. No flag changes what a message is.
* Whatever is about slices is a set of parallel arrays, one element per slice (`ids[i]`, `steps[i]`, …), so that a
  thousand small keys cost one message and a handful of array operations.
* A *run* is the sender's number for a batch of slices that it asked for at once; answers repeat it.
* `SEQUENCED` messages are numbered, acknowledged and repeated until they arrive; the others may be lost.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from kvdist.nodes import Member
from kvdist.protocol.arrays import U8, U32, Arrays, Coded


@dataclass(frozen=True, slots=True)
class Stamp:
    """The envelope: who speaks, to which life of whom, in which order. See WIRE.md for widths."""

    job: int
    term: int
    epoch: int
    source: Member
    destination: int
    """The incarnation this is meant for; 0 while the sender does not know it."""
    seq: int
    """1, 2, … per pair of members for sequenced messages; 0 for the others."""
    ack: int
    """Every sequenced message up to this number has arrived here."""
    step: int
    """The training step the sender is in, for people."""


class Outcome(enum.IntEnum):
    """What became of a contribution."""

    COUNTED = 0
    KEPT = 1
    """Kept for the next version."""
    DROPPED = 2
    """Too old for the store's policy."""
    INITIALISED = 3
    """The first value of the slice is in place."""


class ErrorCode(enum.IntEnum):
    """Why a request failed; each becomes one exception type on the worker."""

    INTERNAL = 0
    INIT_MISMATCH = 1
    OPTIMIZER_MISMATCH = 2
    REFUSED = 3
    CONFIG = 4
    CHECKPOINT = 5
    PEER_LOST = 6
    """A process of the job is gone."""
    DEADLOCK = 7
    """Processes wait for each other in calls that only the others of them could end."""


class Flag(enum.IntFlag):
    """What a contribution is; one byte per slice."""

    EMPTY = 1
    """No gradient on this worker: counts, adds nothing, and has no bytes in the payload."""
    DELTA = 2
    """A change of the weights made by local steps, not a gradient."""
    AVERAGE = 4
    """Divide the sum by the number of contributions."""
    HOLD = 8
    """The value that answers is read where it lies, until the next one of this slice has been received."""
    CARRIED = 16
    """Only in a joined push: it is in the sum that another row of its slice carries, and has no bytes of its own."""


# Registration.


@dataclass(frozen=True, slots=True)
class Hello:
    """Process → scheduler: here I am. Repeated until answered; the stamp's incarnation is the process's token."""

    KIND: ClassVar[int] = 1
    SEQUENCED: ClassVar[bool] = False
    wanted_rank: int
    """The rank asked for, or -1."""
    host: str
    pid: int
    endpoint: str
    """Where a server accepts workers, or a worker the others of its host; empty for a worker that sums alone."""
    num_workers: int
    num_servers: int
    version: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """Scheduler → process: your rank and incarnation."""

    KIND: ClassVar[int] = 2
    SEQUENCED: ClassVar[bool] = False
    rank: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """Anybody → a process that may not take part: why not. Final."""

    KIND: ClassVar[int] = 3
    SEQUENCED: ClassVar[bool] = False
    reason: str


@dataclass(frozen=True, slots=True)
class Peer:
    """One line of the roster."""

    member: Member
    host: str
    pid: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class Roster:
    """Scheduler → all: who is in the cluster now. The first one says that it is complete."""

    KIND: ClassVar[int] = 4
    SEQUENCED: ClassVar[bool] = True
    peers: tuple[Peer, ...]


# Keys and optimizers: agreed on by all workers through the scheduler.


@dataclass(frozen=True, slots=True)
class Declare:
    """Worker → scheduler: I am about to initialise these keys."""

    KIND: ClassVar[int] = 10
    SEQUENCED: ClassVar[bool] = True
    request: int
    store: int
    mode: str
    """The name of the store's policy: ``sync`` or ``async``."""
    keys: tuple[int | str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[int, ...]
    pulled_as: tuple[int, ...]
    """Per key the dtype in which its values travel to workers: its own, or a half for a key of float32."""
    forms: tuple[str, ...]
    """Per key: empty for an array, else what the rows of a table begin as."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the slices of a list of keys live.

    `homes[i]` is a server's rank, or `CUT` for a key cut over all, or `CUT_AT_ROWS` for one cut between its rows.
    """

    CUT: ClassVar[int] = 0xFFFFFFFF
    CUT_AT_ROWS: ClassVar[int] = 0xFFFFFFFE
    first_slices: tuple[int, ...]
    homes: tuple[int, ...]
    slice_bytes: int


@dataclass(frozen=True, slots=True)
class Placed:
    """Scheduler → worker: every worker declared these keys alike; this is where they live."""

    KIND: ClassVar[int] = 11
    SEQUENCED: ClassVar[bool] = True
    request: int
    placement: Placement
    givers: tuple[int, ...]
    """Per key the rank of the worker whose value is the first one."""


@dataclass(frozen=True, slots=True)
class Assign:
    """Scheduler → server: these keys exist; keep the slices that are yours."""

    KIND: ClassVar[int] = 12
    SEQUENCED: ClassVar[bool] = True
    request: int
    store: int
    mode: str
    keys: tuple[int | str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[int, ...]
    pulled_as: tuple[int, ...]
    forms: tuple[str, ...]
    placement: Placement


@dataclass(frozen=True, slots=True)
class Configure:
    """Worker → scheduler: the optimizer of this store, as names and numbers."""

    KIND: ClassVar[int] = 13
    SEQUENCED: ClassVar[bool] = True
    request: int
    store: int
    description: dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class SetOptimizer:
    """Scheduler → server: from now on update the weights of this store so."""

    KIND: ClassVar[int] = 14
    SEQUENCED: ClassVar[bool] = True
    request: int
    store: int
    description: dict[str, str | int | float | bool | None]


@dataclass(frozen=True, slots=True)
class Done:
    """The request is fulfilled."""

    KIND: ClassVar[int] = 15
    SEQUENCED: ClassVar[bool] = True
    request: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The request cannot be fulfilled."""

    KIND: ClassVar[int] = 16
    SEQUENCED: ClassVar[bool] = True
    request: int
    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Barrier:
    """Worker → scheduler: I am at the `counter`-th barrier of this store. Answered by `Done` when all are.

    All of them must say the same in `statement`, or all are answered by `Failed`.
    """

    KIND: ClassVar[int] = 17
    SEQUENCED: ClassVar[bool] = True
    request: int
    store: int
    counter: int
    statement: str


# Data: between workers and servers, and workers of one host. No scheduler involved.


@dataclass(frozen=True, slots=True, eq=False)
class InitValues:
    """Worker 0 → server: the first values of slices. Repeated, it changes nothing."""

    KIND: ClassVar[int] = 20
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class Push:
    """Worker → server, or the worker that sums for its host: contributions; with `pull`, the new values are wanted."""

    KIND: ClassVar[int] = 21
    SEQUENCED: ClassVar[bool] = True
    pull: bool
    runs: U32
    ids: U32
    steps: U32
    """The worker's push counter of the slice: 0 for its first push."""
    versions: U32
    """The version of the weights that the contribution was computed on."""
    samples: U32
    """How many examples the contribution sums; 0 = not said."""
    flags: U8
    settings: tuple[tuple[float, float, float], ...]
    """Distinct (learning rate, weight decay, rescale); NaN for what the server's optimizer should decide."""
    setting_of: U8
    """(n,) index into `settings`."""
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class Pull:
    """Worker → server: send the values as soon as my first `steps` pushes are counted and `versions` is reached."""

    KIND: ClassVar[int] = 22
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    steps: U32
    versions: U32


@dataclass(frozen=True, slots=True, eq=False)
class Values:
    """Server → worker: values of slices at a version; answers `Pull`, and `Push` with `pull`."""

    KIND: ClassVar[int] = 23
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    versions: U32
    outcomes: U8
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Server → worker: what became of contributions or first values."""

    KIND: ClassVar[int] = 24
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    versions: U32
    outcomes: U8


@dataclass(frozen=True, slots=True, eq=False)
class Refused:
    """Server → worker: these slices of a request failed, for one reason. Their neighbours are not touched."""

    KIND: ClassVar[int] = 25
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    code: int
    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceValues:
    """Worker 0 → server: new values of slices in place of the present ones, while nobody's push is under way."""

    KIND: ClassVar[int] = 26
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class PullState:
    """Worker → server: send what the optimizer remembers of slices, of which my first `steps` pushes are counted.

    Each is answered by `Values` with its part, of the dtype in which states are kept.
    """

    KIND: ClassVar[int] = 70
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    steps: U32
    parts: U8
    """(n,) which part of the state: see WIRE.md."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceState:
    """Worker → server: parts of the optimizer's state in place of the present ones, while no push is under way."""

    KIND: ClassVar[int] = 71
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    parts: U8
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPush:
    """Worker → server: contributions of several workers of the sender's host, summed there. One answer per slice.

    The columns are those of `Push`, one row per slice and worker. The rows of a slice stand together, by rank, the
    sender's among them; `runs` repeats the sender's own run, under which it is answered.
    """

    KIND: ClassVar[int] = 27
    SEQUENCED: ClassVar[bool] = True
    pull: bool
    runs: U32
    ids: U32
    ranks: U32
    """Whose contribution a row is."""
    steps: U32
    versions: U32
    samples: U32
    flags: U8
    settings: tuple[tuple[float, float, float], ...]
    setting_of: U8
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class HandedBack:
    """Worker that sums for its host → worker of that host: send these contributions to the server yourself."""

    KIND: ClassVar[int] = 28
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32


@dataclass(frozen=True, slots=True, eq=False)
class CompressedPush:
    """Worker → server: contributions of float32, encoded. The columns are those of `Push`, and so are the answers."""

    KIND: ClassVar[int] = 29
    SEQUENCED: ClassVar[bool] = True
    pull: bool
    runs: U32
    ids: U32
    steps: U32
    versions: U32
    samples: U32
    flags: U8
    settings: tuple[tuple[float, float, float], ...]
    setting_of: U8
    arrays: Coded


# Tables of rows.

ROWS = "rows"
"""The form of a table whose first values are sent."""

MORE = 128
"""A flag: further rows of the same contribution, or of the same first values, follow."""


@dataclass(frozen=True, slots=True, eq=False)
class InitRows:
    """Worker 0 → server: the first values of rows; rows that are not named are zero. Repeated, it changes nothing."""

    KIND: ClassVar[int] = 60
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    flags: U8
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class PushRows:
    """Worker → server: contributions of rows; one without rows counts, too. The other columns are those of `Push`."""

    KIND: ClassVar[int] = 61
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    steps: U32
    versions: U32
    samples: U32
    flags: U8
    settings: tuple[tuple[float, float, float], ...]
    setting_of: U8
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class PullRows:
    """Worker → server: send these rows as soon as my first `steps` pushes are counted and `versions` is reached.

    `arrays` has one entry for each slice: the ids.
    """

    KIND: ClassVar[int] = 62
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    steps: U32
    versions: U32
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class RowValues:
    """Server → worker: the values of the rows that `PullRows` named, in its order. One entry for each slice."""

    KIND: ClassVar[int] = 63
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    versions: U32
    arrays: Arrays


# Life and death.


@dataclass(frozen=True, slots=True)
class Alive:
    """Process → scheduler, every heartbeat: I live; the stamp says in which step."""

    KIND: ClassVar[int] = 30
    SEQUENCED: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class Ack:
    """Nothing but the acknowledgement in the stamp. `wanted` asks for one back: the connection is new."""

    KIND: ClassVar[int] = 31
    SEQUENCED: ClassVar[bool] = False
    wanted: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """Scheduler or server → worker: what your request waits for, so that your side can say it."""

    KIND: ClassVar[int] = 32
    SEQUENCED: ClassVar[bool] = False
    subject: str
    """Such as ``round 7 of key 'fc1'``."""
    ranks: tuple[int, ...]
    """The workers awaited."""
    since_s: float


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Worker → scheduler: I leave. With a `failure` the job cannot go on; a server says only that. Answered by `Done`.

    Before that, to the worker that sums for its host: nothing of mine may be with you alone. Answered likewise.
    """

    KIND: ClassVar[int] = 33
    SEQUENCED: ClassVar[bool] = True
    request: int
    failure: str


@dataclass(frozen=True, slots=True)
class Abort:
    """Scheduler → all: the job ends because of this."""

    KIND: ClassVar[int] = 34
    SEQUENCED: ClassVar[bool] = False
    code: int
    """`ErrorCode.PEER_LOST` or `ErrorCode.DEADLOCK`. What is said of a process below, only the former has."""
    node: str
    host: str
    cause: str
    step: int
    """-1 when unknown."""
    sentence: str


@dataclass(frozen=True, slots=True)
class Stop:
    """Scheduler → server: every worker has left; end."""

    KIND: ClassVar[int] = 35
    SEQUENCED: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, eq=False)
class Blocked:
    """Worker → scheduler: all threads of my user wait, and can go on only if other workers do something.

    It holds until the next one. An empty `place` takes it back. Slices that are alike stand together in stretches; the
    last stretch is all slices that this worker does not know.
    """

    KIND: ClassVar[int] = 36
    SEQUENCED: ClassVar[bool] = True
    number: int
    """Counts the different reports of this worker."""
    place: str
    """The call that waits, for people, such as ``pull of key 'w'``; '' if this worker may go on."""
    requests: tuple[int, ...]
    """The open requests to the scheduler."""
    slice: int
    """For which slice the call waits, or -1."""
    firsts: U32
    """(n,) the first slice of each stretch, ascending."""
    pushed: U32
    """(n,) how often this worker has pushed each slice of the stretch; only of slices that have rounds."""
    awaited: U32
    """(n,) how often all workers must have pushed it before the next answer can come; 0 where none is awaited."""


@dataclass(frozen=True, slots=True)
class CheckBlocked:
    """Scheduler → worker: do you still wait as you said? Answered by `Blocked`, with the same number if so."""

    KIND: ClassVar[int] = 37
    SEQUENCED: ClassVar[bool] = True


# Checkpoints.

CHECKPOINT = "checkpoint"
"""How the subject of every hint begins that is about one which is being saved."""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file in the folder; `name` is empty for none."""

    name: str
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class _OfStore:
    """What is asked about a store, and answered."""

    SEQUENCED: ClassVar[bool] = True
    request: int
    store: int


@dataclass(frozen=True, slots=True)
class _FromWorker(_OfStore):
    """What a worker asks about its `counter`-th checkpoint, or its `counter`-th load, which is in this folder."""

    counter: int
    folder: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _ToServer(_OfStore):
    """What a server is to do in this folder."""

    folder: str
    contents: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claim(_FromWorker):
    """Worker → scheduler: the `counter`-th checkpoint of this store will be the first one that I save into the
    directory of this folder. Answered when the job has the lock of the directory and every server can write there."""

    KIND: ClassVar[int] = 43


@dataclass(frozen=True, slots=True)
class Claimed:
    """Scheduler → worker: save there; files say that they are of this run."""

    KIND: ClassVar[int] = 48
    SEQUENCED: ClassVar[bool] = True
    request: int
    run: str


@dataclass(frozen=True, slots=True)
class Prepare(_ToServer):
    """Scheduler → server: checkpoints of this run are going to lie in the directory of this folder; can you write
    there?"""

    KIND: ClassVar[int] = 49
    run: str


@dataclass(frozen=True, slots=True, eq=False)
class MarkPushes:
    """Worker → server: the `counter`-th checkpoint of this store has my first `steps` pushes of each slice.

    It comes before any later push of this worker, to every server, with no slices to one that keeps nothing of the
    store. The slices are those of arrays and of tables alike. Not answered: the server reports to the scheduler.
    """

    KIND: ClassVar[int] = 40
    SEQUENCED: ClassVar[bool] = True
    store: int
    counter: int
    folder: str
    contents: tuple[str, ...]
    """Empty if this worker cannot take part: then nothing is written."""
    run: str
    step: int
    last: bool
    """Whether these are the last of the slices."""
    ids: U32
    steps: U32


@dataclass(frozen=True, slots=True)
class Save(_FromWorker):
    """Worker → scheduler: I have marked my pushes. Answered when the checkpoint is complete, or has failed."""

    KIND: ClassVar[int] = 41
    run: str
    """Empty if the worker has not claimed the folder, and does not take part."""
    step: int
    keep: int
    """How many checkpoints to keep beside each other; 0 = all."""
    num_keys: int
    """How many keys the store has, as this worker knows."""
    file: SavedFile
    """What the worker itself wants to have back."""
    failure: str
    """Why the worker cannot take part; empty if it does."""


@dataclass(frozen=True, slots=True)
class Saved:
    """Server → scheduler: all workers have marked, and my slices are in this file (none if I keep nothing),
    or they are not, because of `failure`. Every server says it once for every checkpoint."""

    KIND: ClassVar[int] = 42
    SEQUENCED: ClassVar[bool] = True
    store: int
    counter: int
    file: SavedFile
    failure: str


@dataclass(frozen=True, slots=True)
class Load(_FromWorker):
    """Worker → scheduler: none of my pushes is under way; restore the store. Answered when every server has."""

    KIND: ClassVar[int] = 44
    failure: str
    """Why the worker cannot take part; empty if it does."""


@dataclass(frozen=True, slots=True)
class Restore(_ToServer):
    """Scheduler → server: read your slices, and wait."""

    KIND: ClassVar[int] = 45


@dataclass(frozen=True, slots=True)
class TakeRestored(_OfStore):
    """Scheduler → server: every server has read what it needs; go on from there."""

    KIND: ClassVar[int] = 46


@dataclass(frozen=True, slots=True)
class DropRestored(_OfStore):
    """Scheduler → server: some server could not read; forget what you have read."""

    KIND: ClassVar[int] = 47


# Commands.

HEAD_OF_USERS_MAX = (1 << 31) - 1
"""Numbers above it are those of kvdist itself."""


@dataclass(frozen=True, slots=True)
class Command:
    """Worker → scheduler: let every server run the handler `head` with `body`, and say when all have."""

    KIND: ClassVar[int] = 50
    SEQUENCED: ClassVar[bool] = True
    request: int
    head: int
    body: str


@dataclass(frozen=True, slots=True)
class Perform:
    """Scheduler → server: run the handler `head` with `body`."""

    KIND: ClassVar[int] = 51
    SEQUENCED: ClassVar[bool] = True
    request: int
    head: int
    body: str


Message = (
    Hello | Welcome | Rejected | Roster | Declare | Placed | Assign | Configure | SetOptimizer | Done | Failed
    | Barrier | InitValues | ReplaceValues | Push | CompressedPush | Pull | Values | Counted | Refused | JoinedPush
    | HandedBack | PullState | ReplaceState | Alive | Ack | Waiting | Goodbye | Abort | Stop | Blocked
    | CheckBlocked
    | InitRows | PushRows | PullRows | RowValues
    | Claim | Claimed | Prepare | MarkPushes | Save | Saved | Load | Restore | TakeRestored | DropRestored
    | Command | Perform
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packet:
    """A stamped message: what the transport carries and what the cores receive."""

    stamp: Stamp
    message: Message
