"""All exceptions of kvdist, in a single class hierarchy.

A mistake of the caller raises at the call, with an error that derives from the usual built-in (`ValueError`,
`TypeError`, `KeyError`). A failure of a peer or of the network raises in the calls that wait for it, and names the
peer.
"""


class KvdistError(Exception):
    """Base class of all exceptions that kvdist defines."""


class ConfigError(KvdistError, ValueError):
    """Environment variables or arguments describe an impossible or incomplete cluster."""


class AuthenticationError(ConfigError):
    """The cluster does not accept the keys of this process; the message advises which settings to check."""


class KeyNotInitialised(KvdistError, KeyError):
    """A key was pushed or pulled before `init` or `broadcast`."""

    def __str__(self) -> str:
        # KeyError prints the repr of its argument, which turns a sentence into a quoted string.
        return str(self.args[0]) if self.args else "key not initialised"


class InitMismatch(KvdistError, ValueError):
    """Workers declared a key with different shapes, dtypes or store types."""


class OptimizerMismatch(KvdistError, ValueError):
    """Workers disagree on the optimizer of a store, or on the learning rate of a round."""


class PushRefused(KvdistError, ValueError):
    """A server refused a contribution; the message names the key and the reason."""


class DeviceError(KvdistError, RuntimeError):
    """A GPU is not usable: the GPU, its driver or its library is missing, or its memory is full."""


class CheckpointError(KvdistError, RuntimeError):
    """A checkpoint could not be written or read; the message names the file and the fault.

    A failed write leaves earlier checkpoints as they were, and a program that catches this error can go on training.
    """


class NoCheckpoint(CheckpointError):
    """The folder has no checkpoint yet; a run then starts from the beginning."""


class StoreClosed(KvdistError, RuntimeError):
    """The store was used after `close()`."""


class JobOver(StoreClosed):
    """This process was started after the others, or restarted, and the others have already finished.

    It is not a failure: if it is not caught, the process ends with exit code 0.
    """


class ForkError(KvdistError, RuntimeError):
    """A store was used in a forked child process; sockets and threads do not survive a fork."""


class DeadlineExceeded(KvdistError, TimeoutError):
    """A wait has exceeded its deadline; the message names the awaited answer, its sender and the time waited."""


class BarrierTimeout(DeadlineExceeded):
    """A barrier has exceeded its timeout; `missing` holds the ranks of the workers that did not arrive."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class DeadlockError(KvdistError, RuntimeError):
    """Workers wait for each other and none can continue; the message names the call of each worker."""


class PeerLostError(KvdistError, ConnectionError):
    """A process of the cluster is lost. The message is a sentence with its name, host, cause and step.

    Attributes:
        node: name of the lost process, such as ``worker-3``; '' if it never had a name.
        host: host of the process; '' if unknown.
        cause: cause of its end, such as ``killed by signal 9``.
        step: its last known training step, or None.
    """

    def __init__(self, message: str, node: str = "", host: str = "", cause: str = "", step: int | None = None) -> None:
        super().__init__(message)
        self.node = node
        self.host = host
        self.cause = cause
        self.step = step


class CollectiveError(KvdistError, RuntimeError):
    """A collective operation failed or cannot start; the message names it, and the rank at fault if known."""


class CollectiveMismatch(CollectiveError, ValueError):
    """Ranks called different operations at the same place of their programs; all of them get this error."""


class DuplicateNameError(CollectiveError, ValueError):
    """An operation of the same kind and name is still in progress on this rank; the other ranks get no error."""


class ProcessSetError(CollectiveError, ValueError):
    """A rank called an operation of an unknown process set, or is not a member; the other ranks get no error."""


class RankLostError(PeerLostError, CollectiveError):
    """A rank of a collective job is lost. `node` is its name, such as ``rank 3``."""


class RolledBackError(KvdistError, RuntimeError):
    """A server was lost, and all workers have gone back to a snapshot; the interrupted call had no effect.

    It is raised once, by a call in progress or by the next call. The store then holds the values of `step`, and all
    workers must continue from it: pull the weights, and go on with the loop at that step.

    Attributes:
        step: number of steps in the snapshot.
    """

    def __init__(self, message: str, step: int = 0) -> None:
        super().__init__(message)
        self.step = step


class FencedError(KvdistError, RuntimeError):
    """A newer process of the same rank has replaced this process, which must stop."""


class ProtocolError(KvdistError):
    """Bytes from a peer are not a valid message. The decoder raises no other exception."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, at most 300 characters; the class name if the text is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]


INCOMPLETE = "the others cannot go on, as the cluster was not complete yet"
"""A scheduler's explanation of a loss before the cluster was complete, repeated by the launcher."""
NO_COPY = (
    "no other process has its weights. --replicas 1 (KVDIST_REPLICAS) lets another server keep a copy and go on; with"
    " --snapshots DIR (KVDIST_SNAPSHOTS) and --restart N all go back to the newest snapshot (not of a dist_async store)"
)
"""A scheduler's advice about a lost server when a replica would have let the job go on."""
EXITED = "exited with code "
"""Start of a cause that is known from an exit code."""
UNHANDLED = "ended by an unhandled "
"""Start of a cause that is an exception, before its class."""


def failure_of(error: BaseException | None) -> str:
    """Return the reason for a process that ends by this error; '' for None and for ``sys.exit()`` with code 0."""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int | None) else 1
        return f"{EXITED}{code}" if code else ""
    text = "" if error is None else " ".join(str(error).split("\n"))[:1000]
    return "" if error is None else f"{UNHANDLED}{type(error).__name__}{text and f': {text}'}"
