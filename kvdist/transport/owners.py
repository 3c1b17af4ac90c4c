"""Which process holds a port of this machine, as far as the system tells."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LISTENING = "0A"
"""The state, in ``/proc/net/tcp``."""


def owner_of_port(port: int) -> str:
    """``process 4242 (python)`` that listens at a port; '' if that cannot be seen, as with other users' processes."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not wanted:
        return ""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(folder / name) in wanted for name in os.listdir(folder)):
                return f"process {folder.parent.name} ({(folder.parent / 'comm').read_text('utf-8').strip()})"
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text("ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]
