"""Attaches diagnostics to the nodes of this process: nothing in core, runtime or kvstore knows of them.

- Each node: the last events, where ``KVDIST_DUMP`` names a folder for them (`Ring`).
- The scheduler: who is slow (`Verdicts`).
- A server: the fate of gradients, where ``KVDIST_LEDGER`` names a folder for it.
- Servers and workers: the profiler.
"""

from __future__ import annotations

from pathlib import Path

from kvdist.config.environment import read_setting
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.server import Server
from kvdist.diagnostics.pace import Verdicts
from kvdist.diagnostics.profiler import PROFILERS
from kvdist.runtime.node import Node


def attach(node: Node) -> None:
    """Attach the diagnostics that the role and the settings ask for to a node that does not run yet."""
    keep_events(node)
    machine = node.machine
    if isinstance(machine, Scheduler):
        judge_pace(machine)
        return
    if isinstance(machine, Server) and (folder := read_setting("KVDIST_LEDGER")) is not None:
        from kvdist.diagnostics import ledger  # a feature at a seam: loaded where it is used

        ledger.keep(machine, Path(folder))
    PROFILERS.attach(node)


def judge_pace(scheduler: Scheduler) -> None:
    """Let a scheduler report slow members. A scheduler from a journal has its `Verdicts` already."""
    if scheduler.verdicts is None:
        scheduler.verdicts = Verdicts(scheduler.membership, scheduler.loads_bytes)


def keep_events(node: Node) -> None:
    """Let a node write its last events to a file if it fails, where ``KVDIST_DUMP`` names a folder."""
    folder = read_setting("KVDIST_DUMP")
    if folder is not None:
        from kvdist.diagnostics.ring import (
            Ring,
            write_at_exit,
            write_when_terminated,
        )  # a feature at a seam: loaded where it is used

        about = (node.reliable.job, read_setting("KVDIST_DUMP_EVENTS"), Path(folder).absolute())
        node.ring = ring = Ring(node.machine, *about, node.clock, node.is_revived)
        write_when_terminated(ring)
        write_at_exit(ring)
