"""How one process ended, in the three forms that are needed: for people, for the scheduler, and as an exit code."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.errors import PeerLostError, RankLostError
from kvdist.nodes import NodeId, Role

PEER_LOST_TRACEBACK = re.compile(
    rb"(?:\[rank[0-9]+\]: )?(?:%s):"
    % b"|".join(f"{one.__module__}.{one.__qualname__}".encode() for one in (PeerLostError, RankLostError))
)
"""How the last line of a traceback begins when a worker did not catch the error; torch.distributed puts the rank before
it. Most such workers end with EXIT_PEER_LOST, but a program may have a hook of its own for uncaught exceptions."""

HOST_LOST = 255
"""What ssh ends with when the connection is gone, and so does a job that loses a host."""

SENTENCE_MAX = 300
"""Characters of another process's last line that are repeated."""

SIGNAL_BASE = 128
"""A shell's exit code for a process that a signal killed is this plus the signal's number."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of the process in seat `node`.

    Attributes:
        pid: the process's id.
        status: its exit code, or minus the number of the signal that killed it (as in `subprocess`).
        last_error_line: the last line it printed to standard error.
        host: the host it ran on; empty where there is only this machine.
        lost: why nothing is known but that its host cannot be reached any more; then there is no status of its own.
    """

    node: NodeId
    pid: int
    status: int
    last_error_line: bytes = b""
    host: str = ""
    lost: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it ended in any other way than exit code 0."""
        return self.status != 0

    @property
    def is_consequence(self) -> bool:
        """Whether it says of itself that it failed because another process was lost."""
        says_so = self.node.role is Role.WORKER and PEER_LOST_TRACEBACK.match(self.last_error_line) is not None
        return self.status == EXIT_PEER_LOST or (self.status == 1 and says_so)

    @property
    def doubt(self) -> int:
        """Orders endings seen at the same moment: the likelier one is the first cause, the lower."""
        if self.status < 0 or self.lost:
            return 0
        return 3 if self.is_consequence else 1 if self.is_failure else 2

    @property
    def exit_code(self) -> int:
        """The code with which the launcher passes this ending on."""
        if self.is_consequence:
            return EXIT_PEER_LOST
        return SIGNAL_BASE - self.status if self.status < 0 else self.status

    @property
    def report(self) -> str:
        """The line, without line end, that tells the scheduler."""
        how = f"signal {-self.status}" if self.status < 0 else f"exit {self.status}"
        if self.lost:
            how = f"lost {self.host}"
        return f"ended {self.node.role} {self.node.rank} {how}"

    def __str__(self) -> str:
        who = f"{self.node} on {self.host} (pid {self.pid})" if self.host else f"{self.node} (pid {self.pid})"
        if self.lost:
            return f"{who} was lost: {self.lost}"
        if self.status < 0:
            return f"{who} was killed by {signal_name(-self.status)}"
        if self.is_consequence:
            # Its last line says which peer, in the words of the scheduler.
            lost = self.last_error_line.decode(errors="replace").partition(": ")[2].strip()[:SENTENCE_MAX]
            return f"{who} lost a peer and ended with exit code {self.status}" + (f" ({lost})" if lost else "")
        return f"{who} {'failed' if self.status else 'ended early'} with exit code {self.status}"


def signal_name(number: int) -> str:
    """``signal 9 (SIGKILL)``, or the bare number when the system has no name for it."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
