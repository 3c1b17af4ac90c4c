"""Traces of what workers and servers do, as files for Perfetto (ui.perfetto.dev) or ``chrome://tracing``.

The names are those of MXNet's profiler. Each process writes a file of its own: ``profile.json`` becomes
``profile.worker-0.json``, ``profile.server-1.json``. Workers trace themselves; for servers give
``profile_process='server'``, once a ``dist`` store is there. Let one worker do that: the `start` of a second one that
comes after the `dump` of the first begins a new trace, which takes the place of the finished one once it has something
to tell.

On a worker a trace has each call of the stores on a cluster, from the call to its completion, how long a thread waited,
and each message that came. On a server it has each message, and each round that was closed: its key, version, number
of contributions and the time of the sum and the update. Stores within a process are not traced.

While a trace is made its file is renewed now and then, a whole one each time. So it is valid however the process ends;
after a signal that ends it at once, the moments since the last renewal are missing.
"""

from __future__ import annotations

import json
import logging
import os

from kvdist.config.paths import expanded
from kvdist.errors import KvdistError
from kvdist.protocol.messages import Command
from kvdist.runtime.cluster import PROCESS_CLUSTER
from kvdist.runtime.profiler import PROFILER_HEAD, PROFILERS, TraceSettings, require_plain

__all__ = ["dump", "pause", "resume", "set_config", "set_state", "start", "stop"]

LOG = logging.getLogger("kvdist")

OF_THE_MIRRORED = {
    "aggregate_stats",
    "continuous_dump",
    "profile_all",
    "profile_api",
    "profile_imperative",
    "profile_memory",
    "profile_symbolic",
}
"""Options of MXNet that choose what is traced there; here it is always the same."""


def set_config(
    filename: str | os.PathLike[str] = "profile.json",
    *,
    max_events: int = 100_000,
    dump_period: float = 1.0,
    profile_process: str = "worker",
    **of_the_mirrored: object,
) -> None:
    """Choose where the next trace goes, and how large it becomes.

    A trace that ``MXNET_PROFILER_AUTOSTART`` began, and that no `start` has joined, goes on under the new settings with
    all that it has; what was written under the old name stays.

    Args:
        filename: of a worker any path; one without a directory lies in ``KVDIST_PROFILE_DIR``, or where the process
            runs. Of servers a plain name, 1 to 64 of the characters A-Z a-z 0-9 . _ -, which lies in the
            ``KVDIST_PROFILE_DIR`` that was chosen when the server was started.
        max_events: how many events are kept, the newest, 1 to 1000000; the file says how many are gone. One takes
            about half a kilobyte of memory.
        dump_period: seconds between two renewals of the file, at most a day; longer if renewing takes long.
        profile_process: ``worker`` for this process, ``server`` for all servers.
        of_the_mirrored: ``profile_all`` and its kin are taken and change nothing.

    Raises:
        TypeError: an option is not known, or has a wrong type.
        ValueError: a number is out of range, or the name is not valid, or a server's is not plain.
        KvdistError: a trace is being made that a call began, with other settings; or an autostarted one cannot be
            written to its new place.
    """
    unknown = of_the_mirrored.keys() - OF_THE_MIRRORED
    if unknown:
        raise TypeError(
            f"set_config has no option {', '.join(sorted(unknown))}; it takes filename, max_events, dump_period,"
            f" profile_process, and, without effect, {', '.join(sorted(OF_THE_MIRRORED))}"
        )
    name = expanded(filename) if isinstance(filename, str | os.PathLike) else filename
    settings = TraceSettings(name, max_events, dump_period)
    if profile_process == "server":
        require_plain(name)
    if not _told_servers(profile_process, "set_config", **settings.as_fields()):
        PROFILERS.worker.set_config(settings)


def set_state(state: str = "stop", profile_process: str = "worker") -> None:
    """`start` for ``run``, `stop` for ``stop``.

    Raises:
        ValueError: the state is another word.
    """
    if state not in ("run", "stop"):
        raise ValueError(f"the state of the profiler is 'run' or 'stop', not {state!r}")
    (start if state == "run" else stop)(profile_process)


def start(profile_process: str = "worker") -> None:
    """Record from now on. On a worker it may come before the store: then recording begins with that.

    Raises:
        KvdistError: the file cannot be written, or ``server`` was given and there is no store on a cluster.
    """
    if not _told_servers(profile_process, "start"):
        PROFILERS.worker.start(by_call=True)


def stop(profile_process: str = "worker") -> None:
    """Record no more, and write what there is. `start` goes on with the same trace, `dump` finishes it.

    Servers write beside their work, as in `dump`.

    Raises:
        KvdistError: it cannot be written.
    """
    if not _told_servers(profile_process, "stop"):
        PROFILERS.worker.stop()


def pause(profile_process: str = "worker") -> None:
    """Leave out what happens until `resume`."""
    if not _told_servers(profile_process, "pause"):
        PROFILERS.worker.pause()


def resume(profile_process: str = "worker") -> None:
    """Record again after `pause`."""
    if not _told_servers(profile_process, "resume"):
        PROFILERS.worker.resume()


def dump(finished: bool = True, profile_process: str = "worker") -> None:
    """Write the trace.

    Servers note what there is, answer, and write beside their work: their files are complete a moment later, and when
    the job has ended at the latest.

    Args:
        finished: record no more, and let the next `start` make a new trace.
        profile_process: ``worker`` for this process, ``server`` for all servers.

    Raises:
        KvdistError: it cannot be written; the file is as it was. What a server finds out only while it writes, such as
            a full disk, it logs.
    """
    if not _told_servers(profile_process, "dump", finished=bool(finished)) and PROFILERS.worker.dump(finished) is None:
        LOG.warning("profiler.dump() has nothing to write: start() was not called, or no store is on a cluster")


def _told_servers(profile_process: str, call: str, **fields: object) -> bool:
    """Pass a call on to all servers; False where it is for this process."""
    if profile_process not in ("worker", "server"):
        raise ValueError(f"profile_process is 'worker' or 'server', not {profile_process!r}")
    if profile_process == "worker":
        return False
    cluster = PROCESS_CLUSTER.present
    if cluster is None:
        raise KvdistError("servers are told by way of a store: call kv.create('dist') before their profiler is used")
    body = json.dumps({"do": call, **fields})
    cluster.ask(lambda number: Command(number, PROFILER_HEAD, body))
    return True
