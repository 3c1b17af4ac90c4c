"""How a process of the job ended, and how messages describe that. Pure."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.errors import UNHANDLED, DeadlineExceeded, DeadlockError, PeerLostError, RankLostError
from kvdist.nodes import NodeId, Role
from kvdist_launch.output import TEXT_MAX, TORCH_PREFIX, printable, shortened

PEER_LOST_TRACEBACK = re.compile(
    rb"(?:\[rank[0-9]+\]: )?(?:%s):"
    % b"|".join(f"{one.__module__}.{one.__qualname__}".encode() for one in (PeerLostError, RankLostError))
)
"""Begin of the last line of a traceback if a worker did not catch the error; torch.distributed puts the rank before it.
Most such workers end with EXIT_PEER_LOST, but a program may install a hook for uncaught exceptions."""

EXCEPTION = re.compile(r"(\w+\.)*\w*(Error|Exception|Interrupt|Exit|Warning)(: .*)?")
"""Last line of a traceback, as opposed to the last line of a program that ended in another way."""

ROLE_PREFIX = "kvdist: "
"""Prefix of a scheduler or a server before the reason why it ends."""

DEADLOCK = re.compile(rf"(?:{ROLE_PREFIX}|{DeadlockError.__module__}\.{DeadlockError.__qualname__}: )deadlock: (.+)")

GAVE_UP = re.compile(
    rf"{DeadlineExceeded.__module__}\.{DeadlineExceeded.__qualname__}: (?P<waiting>.*); the job ends after"
    r" (?P<limit>\S+ s) of this \(KVDIST_STALL_SHUTDOWN_S\)"
)
"""Error of a worker that has waited for another worker for as long as the user allows."""

HOST_LOST = 255
"""The exit code of ssh after a lost connection, and of a job that loses a host."""

VERDICT_MAX = 4 * TEXT_MAX
"""Characters of a scheduler's verdict, which may name eight workers, and ends with what to do."""

SENTENCE_MAX = 300
"""Characters of a last line that count when two failures are compared."""

CLAUSE_MAX = 150
"""Characters that are repeated of a text that is shown in full elsewhere."""

SIGNAL_BASE = 128
"""A shell's exit code for a process that a signal killed is this plus the signal's number."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How a process ended.

    Attributes:
        status: its exit code, or minus the number of the signal that killed it (as in `subprocess`).
        last_error_line: the last line it printed to standard error.
        exception_line: the line that names the exception, of a traceback at the end of standard error.
        host: the host it ran on; empty if the job uses only this machine.
        lost: why its host cannot be reached any more, or empty; `status` is then not the process's.
        life: how often it had been restarted, as its ``KVDIST_RESTARTS`` says.
    """

    node: NodeId
    pid: int
    status: int
    last_error_line: bytes = b""
    host: str = ""
    lost: str = ""
    life: int = 0
    exception_line: bytes = b""

    @property
    def is_failure(self) -> bool:
        """Whether its exit code was not 0."""
        return self.status != 0

    @property
    def is_consequence(self) -> bool:
        """Whether it failed because another process was lost, by its exit code or its traceback."""
        says_so = self.node.role is Role.WORKER and PEER_LOST_TRACEBACK.match(self.last_error_line) is not None
        return self.status == EXIT_PEER_LOST or (self.status == 1 and says_so)

    @property
    def lost_peer(self) -> str:
        """The peer that a consequence lost and why: its last line, in the words of the scheduler."""
        line = self.last_error_line.decode(errors="replace") if self.is_consequence else ""
        return printable(line.partition(": ")[2].strip(), VERDICT_MAX)

    @property
    def last_line(self) -> str:
        """The last line that it printed to standard error, without the prefix of torch.distributed."""
        return _plain(self.last_error_line)

    @property
    def error(self) -> str:
        """Why it failed, by the exception that ended it, or by the message of a scheduler or server; empty if not
        known."""
        if self.status <= 0 or self.lost or self.is_consequence:
            return ""
        last, raised = self.last_line, _plain(self.exception_line)
        if self.node.role is not Role.WORKER and last.startswith(ROLE_PREFIX):
            return printable(last.removeprefix(ROLE_PREFIX))
        return printable(last if EXCEPTION.fullmatch(last) else raised)

    @property
    def gave_up(self) -> str:
        """The peer that it awaited until the user's limit, which makes the peer the cause; empty if it did not."""
        found = GAVE_UP.fullmatch(self.error)
        if found is None:
            return ""
        return (
            f"{self.node} gave up {found['waiting'].removeprefix(f'{self.node}: ')} (KVDIST_STALL_SHUTDOWN_S allows"
            f" {found['limit']})"
        )

    @property
    def last_words(self) -> str:
        """The last line of its standard error, to append to a sentence; empty if it has written none."""
        line = printable(self.last_error_line.decode(errors="replace").strip())
        return f"; the last line of its standard error: {line}" if line else ""

    @property
    def deadlock(self) -> str:
        """The workers that wait for each other, if the job ended by a deadlock: all its processes print the same
        line."""
        found = DEADLOCK.fullmatch(self.last_line) if self.status == 1 else None
        return "" if found is None else printable(found[1], VERDICT_MAX)

    @property
    def doubt(self) -> int:
        """Sort key for exits seen at the same moment: the likelier the exit is the first cause, the lower."""
        if self.status < 0 or self.lost:
            return 0
        return 3 if self.is_consequence else 1 if self.is_failure else 2

    @property
    def exit_code(self) -> int:
        """The launcher's exit code if this is the cause."""
        if self.is_consequence:
            # A peer that ended by an exception of its own may be slow to end: trying again would not help it.
            return 1 if f": {UNHANDLED}" in self.lost_peer else EXIT_PEER_LOST
        return SIGNAL_BASE - self.status if self.status < 0 else self.status

    @property
    def report(self) -> str:
        """The line for the scheduler's standard input, without line end."""
        how = f"signal {-self.status}" if self.status < 0 else f"exit {self.status}"
        life = f" life {self.life}" if self.life else ""
        return f"ended {self.node.role} {self.node.rank} {f'lost {self.host}' if self.lost else how}{life}"

    @property
    def way(self) -> str:
        """How it ended, as a predicate that follows its name."""
        if self.lost:
            return f"was lost: {self.lost}"
        if self.status < 0:
            return f"was killed by {signal_name(-self.status)}"
        if self.is_consequence:
            lost = shortened(self.lost_peer, CLAUSE_MAX)
            return f"lost a peer and ended with exit code {self.status}" + (f" ({lost})" if lost else "")
        return f"{'failed' if self.status else 'ended early'} with exit code {self.status}"

    def __str__(self) -> str:
        return f"{process_name(self.node, self.pid, self.host)} {self.way}"


def _plain(line: bytes) -> str:
    return TORCH_PREFIX.sub(b"", line.strip()).decode(errors="replace")


def process_name(node: NodeId, pid: int, host: str) -> str:
    """``worker-1 on d2 (pid 42)``, without the host if the job uses only this machine."""
    return f"{node} on {host} (pid {pid})" if host else f"{node} (pid {pid})"


def signal_name(number: int) -> str:
    """``signal 9 (SIGKILL)``, or the bare number if the system has no name for it."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
