"""Effects that machines return, and events that they observe: the whole vocabulary between pure and impure.

A machine never acts. It answers every input with a list of effects, which `Node` carries out in order and matches
exhaustively in a single place; a simulator does the same with a simulated network.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

from kvdist.checkpoint.snapshot import DiskResult, DiskTask
from kvdist.nodes import Member, NodeId
from kvdist.protocol import messages as msg

ACK_BYTES_MAX = 8 << 20
"""Default of `Machine.ack_bytes_max`: an eighth of the usual window."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to `to`. `token` comes back through `Machine.acknowledged` when `to` has acknowledged it."""

    to: Member
    message: msg.Message
    token: object = None


@dataclass(frozen=True, slots=True)
class Transmit:
    """Put a stamped message on the wire. Only `Reliable` creates these, from `Send`."""

    to: Member
    packet: msg.Packet


@dataclass(frozen=True, slots=True)
class Connect:
    """Dial `endpoint`; messages to `to` go to it from then on."""

    to: Member
    endpoint: str


@dataclass(frozen=True, slots=True)
class Bind:
    """The process that introduced itself as `stranger` is `member` from now on: same connection, new name."""

    stranger: Member
    member: Member


@dataclass(frozen=True, slots=True)
class Forget:
    """Withdraw all messages to `member`, which has left, that it has not acknowledged, and return their tokens to
    `acknowledged`.

    Later messages to it are sent; a machine that may send some returns this effect again.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class CompleteRequest:
    """The user's request is fulfilled."""

    request: int
    result: object = None


@dataclass(frozen=True, slots=True)
class CompleteKeys:
    """Some keys of a request that is answered key by key have their answer; an error if they were refused."""

    request: int
    keys: Sequence[int]
    """Their indices in the request's plan."""
    error: Exception | None = None


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The user's request cannot be fulfilled."""

    request: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Log:
    """Log a warning."""

    text: str


@dataclass(frozen=True, slots=True)
class TellLauncher:
    """Print a line on standard output, for the launcher that started this process."""

    line: str


@dataclass(frozen=True, slots=True, eq=False)
class Persist:
    """Perform a disk task while everything else goes on; its result is a `Persisted` with the same token."""

    token: object
    work: DiskTask


@dataclass(frozen=True, slots=True)
class Halt:
    """End this process's part; with an error if it ends because of a failure."""

    error: Exception | None = None


Effect = (
    Send | Transmit | Connect | Bind | Forget | CompleteRequest | CompleteKeys | FailRequest
    | Log | TellLauncher | Persist | Halt
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PeerConnected:
    """A connection to `member` is up again, or a new connection is."""

    member: Member


@dataclass(frozen=True, slots=True)
class PeerDisconnected:
    """The connection to `member` broke."""

    member: Member
    reason: str
    after_silence: bool = False
    """Whether it had been silent for a while before; either side may have broken it for that."""


@dataclass(frozen=True, slots=True)
class Unreachable:
    """Connections to `member` come up again and again, and no message to it gets through."""

    member: Member
    reason: str


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """The launcher saw a process of the job end; `cause` is a phrase such as ``exited with code 1``."""

    node: NodeId
    cause: str
    clean: bool
    """Whether it ended with exit code 0."""
    life: int = 0
    """Number of processes of this rank that had been started before it."""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The launcher has started a process of the job on the host `host`, with the process id `pid`."""

    node: NodeId
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class LauncherGone:
    """The launcher that supervised this job has ended."""


@dataclass(frozen=True, slots=True)
class Worked:
    """Seconds that this process has computed, and has waited for work, since the last event of this kind."""

    computed_s: float
    waited_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Persisted:
    """A disk task is done; or it failed, and `failure` has the reason."""

    token: object
    product: DiskResult = None
    failure: str = ""


Event = (
    PeerConnected | PeerDisconnected | Unreachable | ChildEnded | ProcessStarted | LauncherGone | Persisted | Worked
)  # fmt: skip

NEVER = float("inf")

VERDICT_WAIT_S = 2.0
"""Time after the grace of a broken connection that a process which misses the peer gives the scheduler to judge it."""


class Machine(abc.ABC):
    """A role of the cluster as a pure state machine.

    `handle` gets every message in order and exactly once; `Reliable` guarantees that. A machine knows the time only by
    its argument `now`, in seconds of a clock that never goes back.
    """

    me: Member
    epoch: int
    step: int
    """The training step of this process."""
    hears_of_work: bool = False
    """Whether it gets an event once a second with the work of this process: see `Worked`."""
    steps: dict[Member, int]
    """The training step of each peer in its last message."""
    ack_bytes_max: int = ACK_BYTES_MAX
    """Payload bytes after which their arrival is acknowledged at once, because the window of the peer waits for it."""

    @abc.abstractmethod
    def refuses(self, source: Member, message: msg.Message) -> str | None:
        """Why messages of `source` are refused: a sentence to answer with, '' to answer nothing; None to accept them.

        Only members of the roster, by their incarnations, may change anything: not a stranger, not a process of an
        earlier job on the same port, not a process that was replaced.
        """

    @abc.abstractmethod
    def handle(self, sender: Member, message: msg.Message, now: float) -> list[Effect]:
        """Handle a message."""

    @abc.abstractmethod
    def observe(self, event: Event, now: float) -> list[Effect]:
        """Handle an event."""

    @abc.abstractmethod
    def tick(self, now: float) -> list[Effect]:
        """Do the work that is due. Called at or after `deadline`, and harmless before it."""

    @abc.abstractmethod
    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[Effect]:
        """Handle the arrival of messages with these tokens at `member`; or they never will arrive, because it has
        left."""

    @property
    @abc.abstractmethod
    def deadline(self) -> float:
        """When `tick` should run next; `NEVER` if nothing is due."""

    @property
    @abc.abstractmethod
    def waiting_since(self) -> float | None:
        """Since when this process waits for others; None if it does not."""

    @abc.abstractmethod
    def explain(self, now: float) -> str | None:
        """Return a sentence about the awaited event, the awaited processes, and the time waited; None if nothing is
        awaited."""

    @abc.abstractmethod
    def validate(self) -> None:
        """Check every invariant; raises AssertionError. For tests and the simulator."""
