"""Which process holds a port or a socket's file of this machine, as far as the system tells."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

LISTENING = "0A"
"""The state, in ``/proc/net/tcp``."""


def owner_of_port(port: int) -> str:
    """``process 4242 (python)`` that listens at a port; '' if that cannot be seen, as with other users' processes."""
    return _owner_of(_listening_inodes(port))


def owner_of_file(path: str) -> str:
    """The same of the socket that is bound to a path."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text("utf-8", "surrogateescape").splitlines()[1:]
        return _owner_of(line.split()[6] for line in lines if line.endswith(f" {path}"))
    return ""


def _owner_of(inodes: Iterable[str]) -> str:
    wanted = {f"socket:[{inode}]" for inode in inodes}
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
