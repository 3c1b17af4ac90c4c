"""The messages between scheduler, servers and workers: a frozen dataclass per kind, and the stamp on each message.

WIRE.md specifies the bytes. A field's annotation names its wire type: `wire` compiles the codec from it, and a test
compares it with the tables of WIRE.md. Annotations are therefore not postponed in this module. Invariants:

* A kind means one thing. No flag changes what a message is.
* Messages about slices have parallel arrays, an element per slice (`ids[i]`, `steps[i]`, …), so that a thousand small
  keys cost a single message and a handful of array operations.
* A *run* is the sender's number for a batch of slices that it asked for at once; answers repeat it.
* `SEQUENCED` messages are numbered, acknowledged and repeated until they arrive; the others may be lost.
"""

import enum
from dataclasses import dataclass
from typing import Annotated, ClassVar

from kvdist.nodes import Member, worker
from kvdist.protocol.arrays import U8
from kvdist.protocol.limits import SLICE_BYTES_MIN
from kvdist.protocol.wire_types import (
    MEMBER,
    Body,
    Boolean,
    CodedArrays,
    Description,
    DTypes,
    Forms,
    FromMinusOne,
    Givers,
    Int64,
    Keys,
    Members,
    Name,
    Names,
    Numbers,
    Ranks,
    Requests,
    RowArrays,
    RowIds,
    Seconds,
    Sentence,
    Settings,
    Shapes,
    SliceArrays,
    U8s,
    U32s,
    UInt32,
    UInt64,
    bits,
    code,
    integer,
    list_of,
    record,
)  # fmt: skip


class WireMessage:
    """Base class of all messages."""

    __slots__ = ()
    KIND: ClassVar[int]
    """The code of the kind."""
    SEQUENCED: ClassVar[bool] = True
    """Whether messages of this kind are numbered, acknowledged and repeated until they arrive."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The envelope: sender, incarnation of the receiver, order. WIRE.md has the widths."""

    job: int
    epoch: int
    source: Member
    destination: int
    """The incarnation of the receiver; 0 while the sender does not know it."""
    seq: int
    """1, 2, … per pair of members for sequenced messages; 0 for the others."""
    ack: int
    """Every sequenced message up to this number has arrived at the sender."""
    step: int
    """A worker's number of pushes of its most pushed key, 0 from other processes: for logs, errors and the launcher."""


class ErrorCode(enum.IntEnum):
    """Why a request failed; each code becomes an exception type on the worker."""

    INTERNAL = 0
    INIT_MISMATCH = 1
    OPTIMIZER_MISMATCH = 2
    REFUSED = 3
    CONFIG = 4
    CHECKPOINT = 5
    PEER_LOST = 6
    """A process of the job is lost."""
    DEADLOCK = 7
    """Processes wait for each other in a circle."""


class OnLoss(enum.IntEnum):
    """Policies for the loss of a worker."""

    FAIL = 0
    """The job ends."""
    WAIT = 1
    """The others wait for its return."""
    CONTINUE = 2
    """The others go on without it."""


class DueWhen(enum.IntEnum):
    """The rule for when the next push of a worker is due. `Progress.quota` is the number in each sentence."""

    QUOTA = 0
    """The workers together have processed `quota` examples since the last version."""
    QUORUM = 1
    """All workers have completed their steps; or `quota` workers have, and the others are not expected soon."""
    ASYNC = 2
    """At once. A gradient may be of weights that are at most `quota` versions old."""


class Flag(enum.IntFlag):
    """The kind of a contribution; a byte per slice."""

    EMPTY = 1
    """No gradient on this worker: counts, adds nothing, and has no bytes in the payload."""
    WEIGHTED = 2
    """A mean over its samples: multiply it by their number, and divide the sum by that of the whole round."""
    AVERAGE = 4
    """Divide the sum by the number of contributions, including empty contributions."""
    HOLD = 8
    """The new value is read in place by the worker, until the next value of this slice has been received."""
    MEASURE = 32
    """Keep the contributions of the round, and answer with the sum of squares of their sum."""
    APPLY = 64
    """Empty: apply the contributions that the previous round has kept, multiplied by the rescale of this push."""


ROWS = "rows"
"""The form of a table whose first values are sent."""

MORE = 128
"""A flag: further rows of the same contribution, or of the same first values, follow."""

Error = Annotated[int, code("error", ErrorCode, "an error")]
Loss = Annotated[int, code("on-loss", OnLoss, "a policy of losses")]
When = Annotated[int, code("due-when", DueWhen, "a rule of what is due")]
_PUSH_FLAGS = Flag.EMPTY | Flag.WEIGHTED | Flag.AVERAGE | Flag.HOLD
PushFlags = Annotated[U8, bits(_PUSH_FLAGS | Flag.MEASURE | Flag.APPLY)]
JoinedPushFlags = Annotated[U8, bits(Flag.EMPTY | Flag.WEIGHTED | Flag.AVERAGE)]
InitRowsFlags = Annotated[U8, bits(MORE)]
PushRowsFlags = Annotated[U8, bits(Flag.EMPTY | Flag.WEIGHTED | Flag.AVERAGE | MORE)]

# Registration: spoken before there are sequence numbers, hence idempotent.


@dataclass(frozen=True, slots=True)
class Hello(WireMessage):
    """Process → scheduler: register me. Repeated until answered; the stamp's incarnation is the process's token."""

    KIND = 1
    SEQUENCED = False
    wanted_rank: FromMinusOne
    """The rank asked for, or -1."""
    host: Name
    pid: UInt32
    endpoint: Name
    """Endpoint of a server for workers, or of a worker for the others of its host; empty for a worker that sums
    alone."""
    num_workers: UInt32
    num_servers: UInt32
    version: Name
    life: UInt32 = 0
    """Number of earlier starts of a process of this rank, from its launcher; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Welcome(WireMessage):
    """Scheduler → process: your rank and incarnation."""

    KIND = 2
    SEQUENCED = False
    rank: UInt32
    incarnation: UInt64
    on_loss: Loss = OnLoss.FAIL
    """The scheduler's policy, which holds for all."""
    away_s: Seconds = 0.0
    """Time that the scheduler may be away, because it is restarted; 0: it is not restarted."""
    replicas: UInt32 = 0
    """Number of other servers that keep a copy of the slices of each server."""


@dataclass(frozen=True, slots=True)
class Rejected(WireMessage):
    """Any process → a process that may not take part: the reason. Final."""

    KIND = 3
    SEQUENCED = False
    reason: Sentence
    is_over: Boolean = False
    """Whether it is too late, because the job has ended well; nothing is wrong then."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A line of the roster."""

    member: Annotated[Member, MEMBER]
    host: Name
    pid: UInt32
    endpoint: Name
    life: UInt32 = 0
    """Number of processes of this rank that were started before."""
    since: FromMinusOne = -1
    """The version from which on rounds wait for a worker that has joined later; `LATER`: none does yet; -1: all do."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Numbers of counted pushes of a lost worker in the slices of a store: those of a server, or all."""

    rank: UInt32
    incarnation: UInt64
    store: UInt32
    least: UInt32
    most: UInt32
    slices: UInt32
    """Number of slices with `most` counted pushes."""
    of: UInt32
    """Number of slices that any worker has pushed."""
    examples: UInt64 = 0
    """Number of examples that its pushes summed, where most are counted."""


Fates = Annotated[tuple[Fate, ...], list_of("fates", record("fate", Fate), "members_max")]


@dataclass(frozen=True, slots=True)
class Roster(WireMessage):
    """Scheduler → all: the cluster as it is. The first roster means that the cluster is complete.

    A roster replaces all earlier rosters: a process that has missed some needs only the newest. A roster with which
    nothing changes for workers goes to servers alone.
    """

    KIND = 4
    peers: Annotated[tuple[Peer, ...], list_of("peers", record("peer", Peer), "members_max")]
    epoch: UInt32 = 0
    """1, 2, …"""
    lost: Members = ()
    """Lost workers, until all servers have accounted for their pushes, of which none is counted any more."""
    ended: Members = ()
    """Lost workers whose processes have ended and read nothing more, until all servers know."""
    owners: Ranks = ()
    """Number of a server in the placement → rank of the server that has its slices; empty if no slices have moved."""
    fates: Fates = ()
    """Numbers of counted pushes of lost workers over all servers, until all servers know."""
    hold: UInt32 = 0
    """Epoch of the first roster with this hold; 0: none. A server makes at most a version more of each slice while it
    lasts, and none where all wait for the return of lost workers."""
    resting: Ranks = ()
    """Workers without examples: no round waits for them, and their pushes still count."""

    @property
    def newcomers(self) -> frozenset[int]:
        """Ranks of the workers that no round waits for yet."""
        return frozenset(peer.member.node.rank for peer in self.peers if peer.since == LATER)


@dataclass(frozen=True, slots=True)
class Seen(WireMessage):
    """Server → scheduler: the roster of this epoch is applied. Repeated when another field has changed."""

    KIND = 6
    epoch: UInt32
    fates: Fates
    """Fates of the roster's lost workers: no more of their pushes will be counted."""
    valueless: Numbers
    """The slices of this server without first values, if the roster has lost workers."""
    whole: Boolean
    """Whether the backup of this server has a copy of all its slices."""
    highest: UInt32
    """The highest version of slices that are updated in rounds, when the present hold began; 0 without such slices."""
    lowest: UInt32
    """The lowest version then of slices that are at most a version behind the highest; `LATER` without such slices."""


# Keys and optimizers: agreed on by all workers through the scheduler.


@dataclass(frozen=True, slots=True)
class _OfStore(WireMessage):
    """A request about a store."""

    request: UInt64
    store: UInt32


@dataclass(frozen=True, slots=True)
class _OfKeys(_OfStore):
    """A request about new keys of a store."""

    mode: Name
    """The name of the store's policy: ``sync`` or ``async``."""
    keys: Keys
    shapes: Shapes
    dtypes: DTypes
    pulled_as: DTypes
    """Per key the dtype in which its values travel to workers: that of the key, or a half for a key of float32."""
    forms: Forms
    """Per key: empty for an array, else the initial value of the rows of a table."""


@dataclass(frozen=True, slots=True)
class Declare(_OfKeys):
    """Worker → scheduler: this worker initialises these keys next."""

    KIND = 10
    pushes: UInt32 = 0
    """Number of the worker's pushes of its most pushed key: its place in the program."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of the slices of a list of keys.

    `homes[i]` is a server's rank, or `CUT` for a key cut over all, or `CUT_AT_ROWS` for a key cut between its rows.
    """

    CUT: ClassVar[int] = 0xFFFFFFFF
    CUT_AT_ROWS: ClassVar[int] = 0xFFFFFFFE
    first_slices: Givers
    homes: Givers
    slice_bytes: Annotated[int, integer("slice_bytes", SLICE_BYTES_MIN, (1 << 32) - 1)]


_PLACEMENT = record("placement", Placement, "keys", ("first_slices", "homes"))


@dataclass(frozen=True, slots=True)
class Placed(WireMessage):
    """Scheduler → worker: every worker declared these keys alike; this is their placement."""

    KIND = 11
    request: UInt64
    placement: Annotated[Placement, _PLACEMENT]
    givers: Givers
    """Per key the rank of the worker with its first value; `LATER` if rounds do not wait for the receiver yet, because
    the others have agreed on the key without it: `Counters` will have the begin."""


@dataclass(frozen=True, slots=True)
class Assign(_OfKeys):
    """Scheduler → server: these keys exist; keep the slices that are yours."""

    KIND = 12
    placement: Annotated[Placement, _PLACEMENT]
    giver: UInt32 = 0
    """Rank of the worker that will be ordered to send their first values."""
    later: Ranks = ()
    """The ranks of members that their rounds do not wait for yet: the others have agreed on them without these."""


@dataclass(frozen=True, slots=True)
class Configure(_OfStore):
    """Worker → scheduler: the optimizer of this store, as names and numbers."""

    KIND = 13
    description: Description


@dataclass(frozen=True, slots=True)
class SetOptimizer(_OfStore):
    """Scheduler → server: update the weights of this store with this optimizer from now on."""

    KIND = 14
    description: Description


@dataclass(frozen=True, slots=True)
class Done(WireMessage):
    """The request is fulfilled."""

    KIND = 15
    request: UInt64


@dataclass(frozen=True, slots=True)
class Failed(WireMessage):
    """The request cannot be fulfilled."""

    KIND = 16
    request: UInt64
    code: Error
    reason: Sentence


@dataclass(frozen=True, slots=True)
class Barrier(_OfStore):
    """Worker → scheduler: I am at a barrier of this store. Answered by `Done` when all are.

    Their statements must be equal, and their givers too, or all are answered by `Failed`; also if the giver does not
    arrive because it is lost. A worker that looks on is answered at once: the description of the model by its `Trainer`
    is compared with that of the others.
    """

    KIND = 17
    statement: Sentence
    giver: FromMinusOne = -1
    """The worker whose values the others wait for; -1 for none."""
    pushes: UInt32 = 0
    """As in `Declare`."""
    repeats: Boolean = False
    """Whether the worker has entered this barrier before, and knows of no answer: it asks for the missing workers, or
    it calls again after its timeout. Answered at once if the barrier is over."""


# Data: between workers and servers, and workers of one host. No scheduler involved.


@dataclass(frozen=True, slots=True, eq=False)
class _OfSlices(WireMessage):
    """A message about slices: the run of each, and its number."""

    runs: U32s
    ids: U32s


@dataclass(frozen=True, slots=True, eq=False)
class _AfterPushes(_OfSlices):
    """A message about slices after a number of pushes of the worker, at these versions."""

    steps: U32s
    """The worker's push counter of the slice: 0 for its first push."""
    versions: U32s
    """The newest version that the worker has seen, on which it has computed a contribution."""


@dataclass(frozen=True, slots=True, eq=False)
class InitValues(_OfSlices):
    """Worker 0 → server: the first values of slices. Repeated, it changes nothing."""

    KIND = 20
    arrays: SliceArrays


@dataclass(frozen=True, slots=True, eq=False)
class _Contributions(WireMessage):
    """A push of whole slices, a column entry for each; with `pull`, the new values are wanted."""

    pull: Boolean
    runs: U32s
    ids: U32s
    steps: U32s
    """The worker's push counter of the slice: 0 for its first push."""
    versions: U32s
    """The version of the weights that the contribution was computed on."""
    samples: U32s
    """Number of examples that the contribution sums; 0 = unknown."""
    flags: PushFlags
    settings: Settings
    """Distinct (learning rate, weight decay, rescale); NaN for a number that the server's optimizer should decide."""
    setting_of: U8s
    """(n,) index into `settings`."""


@dataclass(frozen=True, slots=True, eq=False)
class Push(_Contributions):
    """Worker → server, or the worker that sums for its host: contributions; with `pull`, the new values are wanted."""

    KIND = 21
    arrays: SliceArrays


@dataclass(frozen=True, slots=True, eq=False)
class Pull(_AfterPushes):
    """Worker → server: send the values as soon as my first `steps` pushes are counted and `versions` is reached."""

    KIND = 22


@dataclass(frozen=True, slots=True, eq=False)
class Values(_OfSlices):
    """Server → worker: the values that a request of the worker asks for, at a version of each slice.

    It answers `Pull` and `Push` with `pull`; `PullRows`, by the values of those rows in their order; `PullState`, by a
    state; and contributions with `Flag.MEASURE`, by sums of squares.
    """

    KIND = 23
    versions: U32s
    arrays: SliceArrays


@dataclass(frozen=True, slots=True, eq=False)
class Counted(_OfSlices):
    """Server → worker: contributions or first values of slices are counted, at a version of each slice."""

    KIND = 24
    versions: U32s


@dataclass(frozen=True, slots=True, eq=False)
class Refused(_OfSlices):
    """Server → worker: these slices of a request failed, for the same reason. Their neighbours are not touched."""

    KIND = 25
    code: Error
    reason: Sentence


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceValues(_OfSlices):
    """Worker 0 → server: new values of slices in place of the present values, while no push is in flight."""

    KIND = 26
    arrays: SliceArrays


@dataclass(frozen=True, slots=True, eq=False)
class PullState(_OfSlices):
    """Worker → server: send the optimizer's state of slices, of which my first `steps` pushes are counted.

    Averages of the weights wait for these pushes, other parts are refused until then. Each is answered by `Values` with
    its part, of the dtype in which states are kept.
    """

    KIND = 70
    steps: U32s
    parts: U8s
    """(n,) the part of the state: see WIRE.md."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceState(_OfSlices):
    """Worker → server: new parts of the optimizer's state in place of the present, while no push is in flight."""

    KIND = 71
    parts: U8s
    arrays: SliceArrays


@dataclass(frozen=True, slots=True)
class Contributor:
    """A push in a sum."""

    rank: UInt32
    incarnation: UInt64
    step: UInt32
    samples: UInt32

    @property
    def member(self) -> Member:
        """The worker that has pushed."""
        return Member(worker(self.rank), self.incarnation)


Contributors = Annotated[
    tuple[Contributor, ...], list_of("contributors", record("contributor", Contributor), "members_max")
]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedPush(WireMessage):
    """Worker → server: the sums of the pushes of several workers of the sender's host, in the columns of `Push`."""

    KIND = 27
    pull: Boolean
    contributors: Contributors
    """The pushes in every sum, that of the sender among them. A sum counts in the place of the first push; the others
    add no bytes."""
    runs: U32s
    """Runs of the sender, which gets the only answer."""
    ids: U32s
    versions: U32s
    flags: JoinedPushFlags
    settings: Settings
    setting_of: U8s
    arrays: SliceArrays


@dataclass(frozen=True, slots=True, eq=False)
class HandedBack(_OfSlices):
    """Worker that sums for its host → worker of that host: send these contributions to the server yourself.

    Server → worker: their sum is dropped, as a worker in it is lost; its sender forwards this to the others.
    """

    KIND = 28


@dataclass(frozen=True, slots=True, eq=False)
class CompressedPush(_Contributions):
    """Worker → server: contributions of float32, encoded. The columns are those of `Push`, and so are the answers."""

    KIND = 29
    arrays: CodedArrays


# Tables of rows.

# A message carries some rows of a table, each with its id. A table has one slice on each server that keeps rows of it.
# Row ids are those of the whole table, int64, strictly ascending within a message's slice. A contribution too large for
# one message comes in several, all but the last with `MORE`.


@dataclass(frozen=True, slots=True, eq=False)
class InitRows(_OfSlices):
    """Worker 0 → server: the first values of rows; rows that are not named are zero. Repeated, it changes nothing."""

    KIND = 60
    flags: InitRowsFlags
    arrays: RowArrays


@dataclass(frozen=True, slots=True, eq=False)
class PushRows(_AfterPushes):
    """Worker → server: contributions of rows, perhaps of no rows. The other columns are those of `Push`."""

    KIND = 61
    samples: U32s
    flags: PushRowsFlags
    settings: Settings
    setting_of: U8s
    arrays: RowArrays


@dataclass(frozen=True, slots=True, eq=False)
class PullRows(_AfterPushes):
    """Worker → server: send these rows as soon as my first `steps` pushes are counted and `versions` is reached.

    `arrays` has an entry for each slice: the ids.
    """

    KIND = 62
    arrays: RowIds


# Life and death.


@dataclass(frozen=True, slots=True)
class Alive(WireMessage):
    """Process → scheduler, every heartbeat: the process lives; the stamp has its step."""

    KIND = 30
    SEQUENCED = False


@dataclass(frozen=True, slots=True)
class StepTimes(WireMessage):
    """Process → scheduler, at most once a second: times since the last report. Each number is a sum.

    A server has no steps: it reports for how long its node's thread has computed, and waited.
    """

    KIND = 38
    SEQUENCED = False
    steps: UInt32
    samples: UInt64
    """Number of examples of the steps, as far as it is known."""
    data_us: UInt64
    """Microseconds in which the program has waited for its loader."""
    compute_us: UInt64
    """Microseconds that were spent neither in the loader nor in waiting for the store."""
    blocked_us: UInt64
    """Microseconds in which the program has waited for the store."""
    sending_us: UInt64
    """Microseconds in which messages to servers were in flight, whatever the program did meanwhile."""


@dataclass(frozen=True, slots=True)
class Ack(WireMessage):
    """Only the acknowledgement in the stamp. `wanted` asks for an answer: the connection is new."""

    KIND = 31
    SEQUENCED = False
    wanted: Boolean


@dataclass(frozen=True, slots=True)
class Waiting(WireMessage):
    """Scheduler or server → worker: the reason why a request of the worker waits, so that the worker can report it."""

    KIND = 32
    SEQUENCED = False
    deed: Sentence
    """The awaited action of the workers, such as ``push 'fc1' (step 8)``; without workers it names the process, too."""
    ranks: Ranks
    """The workers awaited."""
    since_s: Seconds
    request: UInt64 = 0
    """The request of the worker; 0 if its number is unknown."""


@dataclass(frozen=True, slots=True)
class Goodbye(WireMessage):
    """Worker → scheduler: I leave. With a `failure`, also from a server, the job cannot go on. Answered by `Done`.

    Before that, to the worker that sums for its host: nothing of mine may be with you alone. Answered likewise.
    With request 0, to that worker too: I push nothing for a while, do not wait for me. Not answered.
    With `ends` the process ends with it, and has not closed its stores: its exit code may still be an error.
    """

    KIND = 33
    request: UInt64
    failure: Sentence
    ends: Boolean = False


@dataclass(frozen=True, slots=True)
class Abort(WireMessage):
    """Scheduler → all: the job ends because of this."""

    KIND = 34
    SEQUENCED = False
    code: Error
    """`ErrorCode.PEER_LOST` or `ErrorCode.DEADLOCK`. The fields about a process below are only for the former."""
    node: Name
    host: Name
    cause: Sentence
    step: FromMinusOne
    """-1 when unknown."""
    sentence: Sentence


@dataclass(frozen=True, slots=True)
class Stop(WireMessage):
    """Scheduler → server: every worker has left; end."""

    KIND = 35


@dataclass(frozen=True, slots=True, eq=False)
class Blocked(WireMessage):
    """Worker → scheduler: all threads of the user wait, and can go on only by actions of other workers.

    It holds until the next report. An empty `call` withdraws it. Slices that are alike stand together in stretches; the
    last stretch is all slices that this worker does not know.
    """

    KIND = 36
    number: UInt64
    """Counts the different reports of this worker."""
    call: Sentence
    """The call that waits, for people, such as ``pull of key 'w'``; '' if this worker may go on."""
    requests: Requests
    """The open requests to the scheduler."""
    awaits: Ranks
    """The workers that a server awaits before the next push of this worker is due."""
    slice: FromMinusOne
    """The slice that the call waits for, or -1."""
    firsts: Numbers
    """(n,) the first slice of each stretch, ascending."""
    pushed: Numbers
    """(n,) number of times that this worker has pushed each slice of the stretch; only of slices that have rounds."""
    awaited: Numbers
    """(n,) number of times that all workers must have pushed it before the next answer can come; 0 where none is
    awaited."""


@dataclass(frozen=True, slots=True)
class CheckBlocked(WireMessage):
    """Scheduler → worker: is the last `Blocked` still true? Answered by `Blocked`, with the same number if so."""

    KIND = 37


# Checkpoints.


@dataclass(frozen=True, slots=True)
class SavedFile:
    """A file in the folder; `name` is empty for none."""

    name: Name
    nbytes: UInt64
    sha256: Name


_FILE = record("file", SavedFile)


@dataclass(frozen=True, slots=True)
class _OfFolder(_OfStore):
    """A request about the checkpoint in this folder."""

    folder: Name
    contents: Names


@dataclass(frozen=True, slots=True)
class Claim(_OfFolder):
    """Worker → scheduler: my next checkpoint of this store will be the first that I save into the directory of this
    folder. Answered when the job has the lock of the directory and every server can write to it."""

    KIND = 43


@dataclass(frozen=True, slots=True)
class Claimed(WireMessage):
    """Scheduler → worker: save into that folder, if you can; files say that they are of this run."""

    KIND = 48
    request: UInt64
    counter: UInt64
    """Number of that checkpoint among those of the store."""
    run: Name
    failure: Sentence
    """Why it cannot be saved; '' if it can."""


@dataclass(frozen=True, slots=True)
class Prepare(_OfFolder):
    """Scheduler → server: can you write into the directory of this folder, which will hold checkpoints of this run?"""

    KIND = 49
    run: Name


@dataclass(frozen=True, slots=True, eq=False)
class MarkPushes(WireMessage):
    """Worker → server: the `counter`-th checkpoint of this store has my first `steps` pushes of each slice.

    It comes before any later push of this worker, to every server, without slices to a server with none of the store.
    The slices are those of arrays and of tables alike. Not answered: the server reports to the scheduler.
    """

    KIND = 40
    store: UInt32
    counter: UInt64
    folder: Name
    contents: Names
    """Empty if this worker cannot take part: then nothing is written."""
    run: Name
    step: UInt64
    last: Boolean
    """Whether these are the last of the slices."""
    ids: Numbers
    steps: Numbers
    pushes: UInt32 = 0
    """As in `Declare`."""


@dataclass(frozen=True, slots=True)
class Save(_OfFolder):
    """Worker → scheduler: I have marked my pushes. Answered when the checkpoint is complete, or has failed."""

    KIND = 41
    counter: UInt64
    run: Name
    """Empty if the worker has not claimed the folder, and does not take part."""
    step: UInt64
    keep: UInt32
    """Number of checkpoints to keep; 0 = all."""
    num_keys: UInt32
    """Number of keys of the store, as this worker knows."""
    file: Annotated[SavedFile, _FILE]
    """The worker's own file in the checkpoint."""
    failure: Sentence
    """Why the worker cannot take part; empty if it does."""
    pushes: UInt32 = 0
    """As in `Declare`."""


@dataclass(frozen=True, slots=True)
class Saved(WireMessage):
    """Server → scheduler: all workers have marked, and my slices are in this file (none if I keep nothing),
    or they are not, because of `failure`. Every server reports once for every checkpoint."""

    KIND = 42
    store: UInt32
    counter: UInt64
    file: Annotated[SavedFile, _FILE]
    failure: Sentence


@dataclass(frozen=True, slots=True)
class Load(_OfFolder):
    """Worker → scheduler: none of my pushes is in flight; restore the store. Answered when every server has."""

    KIND = 44
    failure: Sentence
    """Why the worker cannot take part; empty if it does."""
    pushes: UInt32 = 0
    """As in `Declare`."""


@dataclass(frozen=True, slots=True)
class Restore(_OfFolder):
    """Scheduler → server: read your slices, and wait."""

    KIND = 45


@dataclass(frozen=True, slots=True)
class TakeRestored(_OfStore):
    """Scheduler → server: every server has read its values; go on from them.

    After a `Rewind` the push counters, too, are those that were read, and every worker gets a `Rewound`: no push of any
    worker is in flight. Slices that were not read begin anew. No version is completed before the next cut.
    """

    KIND = 46
    rollback: UInt32
    """Number of the `Rewind`; 0 where workers have called for a load."""


@dataclass(frozen=True, slots=True)
class DropRestored(_OfStore):
    """Scheduler → server: some server could not read; forget what you have read."""

    KIND = 47


# Newcomers: workers that join a running job.

LATER = (1 << 32) - 1
"""Replaces a counter: no round of this slice waits for the worker before another `Counters` with its begin."""


@dataclass(frozen=True, slots=True)
class Ready(WireMessage):
    """Newcomer → scheduler: my next push is of this store, where no round waits for me yet.

    Newcomer → server: this worker is connected; the store has no meaning.
    """

    KIND = 84
    store: UInt32


@dataclass(frozen=True, slots=True)
class Join(_OfStore):
    """Scheduler → server: rounds of this store that have left these members out wait for them from now on.

    The server informs the members by `Counters`.
    """

    KIND = 85
    ranks: Ranks


@dataclass(frozen=True, slots=True, eq=False)
class Counters(WireMessage):
    """Server → worker that joined later: where your push counters of my slices begin, or `LATER`.

    updates: number of updates of the weights by that push, those before a loaded checkpoint included.
    """

    KIND = 83
    ids: Numbers
    steps: Numbers
    updates: Numbers


# Snapshots, which servers write by themselves, and the way back to one when a server is lost.


@dataclass(frozen=True, slots=True)
class TakeSnapshot(WireMessage):
    """Scheduler → server: write every slice of this store into this folder, as it is at this version.

    It comes while `Roster.hold` is set. A slice that is not pushed in step with the others is written as it
    is now.
    """

    KIND = 110
    store: UInt32
    version: UInt32
    folder: Name
    run: Name


@dataclass(frozen=True, slots=True)
class Trained:
    """Number of examples that a worker's pushes summed, of those in a snapshot."""

    incarnation: UInt64
    """Incarnation of the worker."""
    examples: UInt64


@dataclass(frozen=True, slots=True, eq=False)
class SnapshotTaken(WireMessage):
    """Server → scheduler: my slices of that snapshot are in this file; or not, because of `failure`. It names all
    workers whose pushes the slices count, except those that were evicted before."""

    KIND = 111
    folder: Name
    file: Annotated[SavedFile, _FILE]
    failure: Sentence
    trained: Annotated[tuple[Trained, ...], list_of("trained", record("trained", Trained), "members_max")]


@dataclass(frozen=True, slots=True)
class Rewind(WireMessage):
    """Scheduler → worker: a server was lost, and all go back to this step. Drop your requests to servers and to other
    workers, and answer by `Quiet` when all that you have sent to live servers has arrived."""

    KIND = 112
    number: UInt32
    """Number of these messages so far, including this."""
    step: UInt32
    reason: Sentence


@dataclass(frozen=True, slots=True)
class Quiet(WireMessage):
    """Worker → scheduler: I have dropped all that the `Rewind` names, and none of it is in flight."""

    KIND = 113
    number: UInt32


@dataclass(frozen=True, slots=True, eq=False)
class Rewound(WireMessage):
    """Server → worker: I am back at the snapshot. My slices have these versions, each of as many pushes of yours."""

    KIND = 115
    number: UInt32
    ids: Numbers
    versions: Numbers


# Replicas: what a server tells the one that keeps a copy of its slices, before anybody hears what has come of it. First
# values, new values and states, and the scheduler's messages about keys and members, it forwards unchanged.


@dataclass(frozen=True, slots=True, eq=False)
class Replicate(WireMessage):
    """Server → its backup: a round is closed, and this is the scaled sum of its pushes, or a part of it."""

    KIND = 100
    ids: U32s
    """The slice of each array. The slice of a table comes twice: with the ids of the summed rows, and their values."""
    version: UInt32
    """Version after the round."""
    contributors: Contributors
    settings: Settings
    """A single (learning rate, weight decay, 1); NaN for a number that the optimizer decides."""
    code: FromMinusOne
    """The error code with which the round was refused; -1 if it was not."""
    reason: Sentence
    is_empty: Boolean
    """Whether the round has no gradient, and the arrays no elements. A gradient without rows is a gradient."""
    more: Boolean
    """Whether further parts of the round follow: slices that are updated together with these, or rows."""
    arrays: SliceArrays

    @property
    def has_rows(self) -> bool:
        """Whether the sum is of rows of a table."""
        return len(self.ids) == 2 and bool(self.ids[0] == self.ids[1])


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a worker in a round."""

    rank: UInt32
    counted: UInt32
    """Number of its pushes that are in the value, or were refused for good."""
    examples: UInt64
    since: FromMinusOne
    """The version from which on it takes part, `LATER` if that is not known yet; -1: it takes part already."""
    began: FromMinusOne
    """The begin of its counter, if it has joined later, else -1."""
    refused: FromMinusOne
    """The counter of its last push, if that was refused for good, else -1; `code` and `reason` have the refusal."""
    code: FromMinusOne
    reason: Sentence


WEIGHT, ROW_IDS = 254, 253
"""Parts of a slice beside those of its optimizer's state, in `Fill`."""


@dataclass(frozen=True, slots=True, eq=False)
class Fill(WireMessage):
    """Server → its backup: the present state of a slice, which was not in the copy."""

    KIND = 103
    ids: U32s
    """The slice, repeated for each part."""
    parts: U8s
    """Per array the part of which it is a piece; pieces of a part follow each other."""
    version: UInt32
    standings: Annotated[tuple[Standing, ...], list_of("standings", record("standing", Standing), "members_max")]
    limit: FromMinusOne
    """No version above this may be completed yet; -1: no limit."""
    restored: Int64
    """Number of updates of the slice, less the number of its rounds."""
    has_value: Boolean
    """Whether its first values are complete."""
    initializer: Name
    """Initial value of lazy rows."""
    more: Boolean
    """Further pieces of the same slice follow."""
    arrays: SliceArrays


@dataclass(frozen=True, slots=True)
class Replicated(WireMessage):
    """Backup → the server whose slices it copies: the first `count` of your messages are in the copy."""

    KIND = 102
    count: UInt64


# Commands.

HEAD_OF_USERS_MAX = (1 << 31) - 1
"""Numbers above it are those of kvdist itself."""


@dataclass(frozen=True, slots=True)
class Command(WireMessage):
    """Worker → scheduler: let every server run the handler `head` with `body`. Answered when all have."""

    KIND = 50
    request: UInt64
    head: UInt32
    body: Body


@dataclass(frozen=True, slots=True)
class Perform(WireMessage):
    """Scheduler → server: run the handler `head` with `body`."""

    KIND = 51
    request: UInt64
    head: UInt32
    body: Body


# Leases: which examples of the data set a worker trains on next.


@dataclass(frozen=True, slots=True)
class Lease(_OfStore):
    """Worker → scheduler: lease me examples."""

    KIND = 90
    number: UInt32
    """The pass through the data: 0, 1, …"""
    length: UInt64
    """Examples in the data set."""
    epochs: UInt32
    """Number of times that the pass takes each of them."""
    shuffle: Boolean
    seed: UInt64
    batch: UInt32
    """Examples in a batch."""
    wanted: UInt32
    """Largest number of examples to lease."""
    used: UInt64
    """Number of its examples that this process has used, since it began."""
    version: UInt64
    """Number of updates of the weights that it knows of."""
    rests: Boolean
    """Whether the worker has no examples left: if none are free, answer when some are, and do not wait for me."""


@dataclass(frozen=True, slots=True)
class Leased(WireMessage):
    """Scheduler → worker: the places `start` … `stop` - 1 in the order of this epoch are yours; none if both are equal.

    A worker that has rested gets the number of the next checkpoint of each store, too.
    """

    KIND = 91
    request: UInt64
    epoch: UInt32
    start: UInt64
    stop: UInt64
    is_over: Boolean
    """Whether all examples of the pass are used."""
    version: UInt64
    """Largest number of updates that any worker knows of."""
    has_rested: Boolean
    """Whether the worker has rested: the others may have left barriers without it."""
    stores: Numbers
    saves: Numbers


@dataclass(frozen=True, slots=True)
class Used(WireMessage):
    """Worker → scheduler: number of my examples that are used; with `gives_back` others may have the rest."""

    KIND = 93
    request: UInt64
    used: UInt64
    gives_back: Boolean


@dataclass(frozen=True, slots=True)
class Progress(WireMessage):
    """Worker → server of a slice: number of examples that I have trained on since my last push of it, the `step`-th.

    The next push is due by the rule `when`, or when all ask for `together`.
    """

    KIND = 94
    slice: UInt32
    step: UInt32
    samples: UInt64
    """With `QUORUM`, 1 if the steps are complete, else 0."""
    when: When
    quota: UInt64
    now: Boolean
    """Whether the push is due regardless of the progress of the others."""
    together: Boolean
    """Whether this worker waits until all ask for it, and takes part meanwhile in earlier pushes that are due."""


@dataclass(frozen=True, slots=True)
class Due(WireMessage):
    """Server → worker: push this slice, and all that belongs to the same step, if you have pushed it `step` times."""

    KIND = 95
    slice: UInt32
    step: UInt32
    together: Boolean
    """Whether all workers wait for this."""
    delay: UInt64
    """Number of others' pushes since this worker's last push, where each push is a version; else 0."""


@dataclass(frozen=True, slots=True)
class NotDue(WireMessage):
    """Server → worker: the next push of this slice is not due yet. The answer to a repeated `Progress`."""

    KIND = 96
    SEQUENCED = False
    slice: UInt32
    step: UInt32
    """The step of the worker's `Progress`."""
    ranks: Ranks
    """The workers any of which may still do something for it to be due."""


Message = (
    Hello | Welcome | Rejected | Roster | Seen | Declare | Placed | Assign | Configure | SetOptimizer
    | Done | Failed | Barrier | InitValues | ReplaceValues | Push | CompressedPush | Pull | Values | Counted | Refused
    | JoinedPush | HandedBack | PullState | ReplaceState | Alive | StepTimes | Ack | Waiting | Goodbye | Abort | Stop
    | Blocked | CheckBlocked
    | InitRows | PushRows | PullRows
    | Claim | Claimed | Prepare | MarkPushes | Save | Saved | Load | Restore | TakeRestored | DropRestored
    | Ready | Join | Counters
    | TakeSnapshot | SnapshotTaken | Rewind | Quiet | Rewound
    | Command | Perform
    | Lease | Leased | Used | Progress | Due | NotDue
    | Replicate | Replicated | Fill
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packet:
    """A stamped message, as the transport carries it and the cores receive it."""

    stamp: Stamp
    message: Message
