"""What the machines want done, and what can happen to them: the whole vocabulary between pure and impure.

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
"""Of `Machine.ack_bytes_max`: an eighth of the usual window."""


@dataclass(frozen=True, slots=True)
class Send:
    """Say `message` to `to`. `token` comes back through `Machine.acknowledged` when `to` has acknowledged it."""

    to: Member
    message: msg.Message
    token: object = None


@dataclass(frozen=True, slots=True)
class Transmit:
    """Put a stamped message on the wire. Only `Reliable` makes these, out of `Send`."""

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
    """Take back all that `member`, which has left, has not acknowledged, and return its tokens to `acknowledged`.

    Later messages to it are sent; who may send some gives the effect again.
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
    """Do this with the disk while everything else goes on; what came of it is `Persisted` with the same token."""

    token: object
    work: DiskTask


@dataclass(frozen=True, slots=True)
class Halt:
    """This process's part is over; with an error if it ends because something failed."""

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
    """Whether it had brought nothing for a while before; either side may have broken it for that."""


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
    """How often a process of this rank had been started before it."""


@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """The launcher has started a process of the job on a host of that name, under that process id."""

    node: NodeId
    host: str
    pid: int


@dataclass(frozen=True, slots=True)
class LauncherGone:
    """The launcher that supervised this job has ended."""


@dataclass(frozen=True, slots=True)
class Worked:
    """This process has computed for so many seconds since the last of these, and waited for something to do."""

    computed_s: float
    waited_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Persisted:
    """A work with the disk is done, or could not be done; then `failure` has the reason."""

    token: object
    product: DiskResult = None
    failure: str = ""


Event = (
    PeerConnected | PeerDisconnected | Unreachable | ChildEnded | ProcessStarted | LauncherGone | Persisted | Worked
)  # fmt: skip

NEVER = float("inf")

VERDICT_WAIT_S = 2.0
"""How long after the grace of a broken connection whoever misses it waits for the scheduler to judge the peer."""


class Machine(abc.ABC):
    """One role of the cluster as a pure state machine.

    `handle` takes a message in order and exactly once; `Reliable` sees to that. A machine knows the time only by
    its argument `now`, in seconds of a clock that never goes back.
    """

    me: Member
    epoch: int
    step: int
    """The training step this process is in."""
    hears_of_work: bool = False
    """Whether it gets an event once a second with the work of this process: see `Worked`."""
    steps: dict[Member, int]
    """The training step each peer was in when it was last heard of."""
    ack_bytes_max: int = ACK_BYTES_MAX
    """Payload bytes after which their arrival is acknowledged at once, because the window of the peer waits for it."""

    @abc.abstractmethod
    def refuses(self, source: Member, message: msg.Message) -> str | None:
        """Why nothing from `source` is listened to: a sentence to answer with, '' to say nothing; None to listen.

        Only members of the roster, by their incarnations, may change anything: not a stranger, not a process of an
        earlier job on the same port, not a process that was replaced.
        """

    @abc.abstractmethod
    def handle(self, sender: Member, message: msg.Message, now: float) -> list[Effect]:
        """React to a message."""

    @abc.abstractmethod
    def observe(self, event: Event, now: float) -> list[Effect]:
        """React to something that is not a message."""

    @abc.abstractmethod
    def tick(self, now: float) -> list[Effect]:
        """Do what has fallen due. Called at or after `deadline`, and harmless before it."""

    @abc.abstractmethod
    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[Effect]:
        """Messages with these tokens have arrived at `member`, or never will because it has left."""

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
        """Return a sentence with what is awaited, from whom, and since when; None if nothing is awaited."""

    @abc.abstractmethod
    def validate(self) -> None:
        """Check every invariant; raises AssertionError. For tests and the simulator."""
