"""How many files a process may have open: each connection is one, and the memory of each process of the same host.

Systems give a process 1,024 by default and allow many more (`ulimit -Hn`): the soft limit is there to be raised.
"""

from __future__ import annotations

import resource

RAISED_MAX = 1 << 20
"""Not beyond this, even where the hard limit is: some programs close every number up to the limit when they start."""

BASE, PER_WORKER, PER_SERVER = 64, 3, 5
"""Measured: a process has some 20 of its own; a worker opens five for each server, most of them of ZeroMQ's own, and a
server two for each worker of its host. The rest is for the script, its libraries and checkpoints."""


def raise_open_files_limit() -> int:
    """Raise this process's soft limit to the hard one, for itself and what it starts. Returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, RAISED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS has another limit below the one that it tells
            return soft
        return wanted
    return RAISED_MAX if soft == resource.RLIM_INFINITY else soft


def open_files_warning(limit: int, num_workers: int, num_servers: int) -> str:
    """A sentence where `limit` open files are too few for a process of a job of that size, else ''."""
    needed = BASE + PER_WORKER * num_workers + PER_SERVER * num_servers
    if limit >= needed:
        return ""
    return (
        f"a process may have {limit} files open here, and a job of {num_workers} workers and {num_servers} servers"
        f" may need {needed}: raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
    )
