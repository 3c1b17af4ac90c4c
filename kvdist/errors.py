"""Every exception that kvdist raises, in one tree.

A mistake of the caller raises at the call and derives from the built-in that a Python user expects (`ValueError`,
`TypeError`, `KeyError`). A failure of a peer or the network fails the request that waited for it and names the peer.
"""


class KvdistError(Exception):
    """The root: `except KvdistError` catches whatever kvdist raises on purpose."""


class ConfigError(KvdistError, ValueError):
    """The cluster described by the environment or the arguments is impossible or incomplete."""


class AuthenticationError(ConfigError):
    """The cluster does not accept the keys of this process; the message says where and what to check."""


class KeyNotInitialised(KvdistError, KeyError):
    """A key was pushed or pulled before `init` or `broadcast` had given it a value."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which turns a sentence into a quoted string.
        return str(self.args[0]) if self.args else "key not initialised"


class InitMismatch(KvdistError, ValueError):
    """Workers declared one key with different shapes, dtypes or store types."""


class OptimizerMismatch(KvdistError, ValueError):
    """Workers disagree on the optimizer of a store, or on the learning rate of one round."""


class PushRefused(KvdistError, ValueError):
    """A server refused a contribution; the message names the key and the reason."""


class DeviceError(KvdistError, RuntimeError):
    """A GPU cannot be used: the GPU, its driver or its library is missing, or its memory is full."""


class CheckpointError(KvdistError, RuntimeError):
    """A checkpoint could not be written, or cannot be read; the message names the file and what is wrong with it.

    A failed write leaves earlier checkpoints as they were, and a program that catches this error can train on.
    """


class NoCheckpoint(CheckpointError):
    """The folder has no checkpoint yet, so a run starts from the beginning."""


class StoreClosed(KvdistError, RuntimeError):
    """The store was used after `close()`."""


class JobOver(StoreClosed):
    """This process was started again, or later than the others, and they have finished meanwhile.

    Nothing is wrong: where it is not caught, the process ends with exit code 0.
    """


class ForkError(KvdistError, RuntimeError):
    """The store was used in a forked child; sockets and threads do not survive a fork."""


class DeadlineExceeded(KvdistError, TimeoutError):
    """A wait ran past its deadline; the message says what was awaited, from which process, since when."""


class BarrierTimeout(DeadlineExceeded):
    """A barrier ran past the time-out given to it; `missing` holds the worker ranks that had not arrived."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class DeadlockError(KvdistError, RuntimeError):
    """Workers wait for each other and none can go on; the message names the call of each."""


class PeerLostError(KvdistError, ConnectionError):
    """A process of the cluster is gone. The message is one sentence with its name, host, cause and step.

    Attributes:
        node: the name of the lost process, such as ``worker-3`` ('' when it never had one).
        host: the host it ran on ('' when unknown).
        cause: what ended it, such as ``killed by signal 9``.
        step: the last training step it was known to be in, or None.
    """

    def __init__(self, message: str, node: str = "", host: str = "", cause: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.host = host
        self.cause = cause
        self.step = step


class CollectiveError(KvdistError, RuntimeError):
    """A collective operation failed or cannot begin; the message names it, and the rank at fault if it is known."""


class CollectiveMismatch(CollectiveError, ValueError):
    """Ranks called different operations at the same place of their programs; all of them get the same error."""


class DuplicateNameError(CollectiveError, ValueError):
    """An operation is called while another one of its kind and name is in progress; the other ranks do not learn it."""


class ProcessSetError(CollectiveError, ValueError):
    """A rank calls an operation of a process set that it is not in, or that does not exist; no other rank learns it."""


class RankLostError(PeerLostError, CollectiveError):
    """A rank of a collective job is gone. `node` is its name, such as ``rank 3``."""


class RolledBackError(KvdistError, RuntimeError):
    """A server was lost, and all have gone back to a snapshot: this call was dropped, or came too early.

    It is raised once, by what was under way or by the next call. Then the store holds the values of `step`, and all
    workers go on from there: pull the weights, and begin the loop again at that step.

    Attributes:
        step: how many steps the snapshot has.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class FencedError(KvdistError, RuntimeError):
    """A newer process of the same rank has replaced this one, which must not go on."""


class ProtocolError(KvdistError):
    """Bytes from a peer that are not a valid message. The only exception the decoder raises."""


def first_line(error: BaseException) -> str:
    """The first line of an error's text, at most 300 characters, or the name of its class where it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


INCOMPLETE = "the others cannot go on, as the cluster was not complete yet"
"""What a scheduler says of a loss before all were there, and the launcher after it."""
NO_COPY = (
    "no other process has its weights. --replicas 1 (KVDIST_REPLICAS) lets another server keep a copy and go on; with"
    " --snapshots DIR (KVDIST_SNAPSHOTS) and --restart N all go back to the newest snapshot"
)
"""What a scheduler and the launcher say of a lost server where the job could have gone on with a copy."""
EXITED = "exited with code "
"""Begins the cause of an end that an exit code tells."""


def failure_of(error: BaseException | None) -> str:
    """Why a process cannot go on that ends by this error; '' without one, and for ``sys.exit()`` of code 0."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int | None) else 1
        return f"{EXITED}{code}" if code else ""
    text = "" if error is None else " ".join(str(error).split("\n"))[:1000]
    return "" if error is None else f"ended by an unhandled {type(error).__name__}: {text}"
