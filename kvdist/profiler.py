"""Traces of workers and servers, as files for Perfetto (ui.perfetto.dev) or ``chrome://tracing``.

The function names are those of MXNet's profiler. Each process writes a separate file: ``profile.json`` becomes
``profile.worker-0.json``, ``profile.server-1.json``. The functions act on the calling worker; with
``profile_process='server'`` they act on all servers, once a ``dist`` store exists. Call the latter on a single worker:
a `start` of a second worker that follows the `dump` of the first begins a new trace, which replaces the finished file.

The trace of a worker has each call of a store on a cluster until its completion, the time that a thread waited, and
each received message. The trace of a server has each message and each completed round, with key, version, number of
contributions, and the duration of the sum and the update. Stores within a process are not traced.

The whole file is rewritten every `dump_period` seconds, so it is valid however the process ends; after a signal that
kills the process, the events since the last rewrite are missing.
"""

from __future__ import annotations

import json
import logging
import os

from kvdist.config.paths import expanded
from kvdist.diagnostics.profiler import PROFILER_HEAD, PROFILERS, TraceSettings, require_plain
from kvdist.errors import KvdistError
from kvdist.protocol.messages import Command
from kvdist.runtime.cluster import PROCESS_CLUSTER

__all__ = ["dump", "pause", "resume", "set_config", "set_state", "start", "stop"]

LOG = logging.getLogger("kvdist")

MXNET_OPTIONS = {
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
    **mxnet_options: object,
) -> None:
    """Set the file and the size of the next trace.

    A trace that ``MXNET_PROFILER_AUTOSTART`` began, and that no `start` has continued, goes on with its events under
    the new settings; the file under the old name stays.

    Args:
        filename: for a worker a path; a name without a directory is in ``KVDIST_PROFILE_DIR``, or else in the current
            directory. For servers a plain name of 1 to 64 characters from A-Z a-z 0-9 . _ -, in the
            ``KVDIST_PROFILE_DIR`` of the server.
        max_events: number of newest events to keep, 1 to 1000000, about half a kilobyte of memory each. The file has
            the number of dropped events.
        dump_period: seconds between two rewrites of the file, at most a day; longer if rewriting takes long.
        profile_process: ``worker`` for this process, ``server`` for all servers.
        mxnet_options: ``profile_all`` and similar options of MXNet, without effect.

    Raises:
        TypeError: an option is unknown, or has a wrong type.
        ValueError: a number is out of range, or the name is invalid.
        KvdistError: a trace with other settings is in progress; or an autostarted trace cannot be written to its new
            file.
    """
    unknown = mxnet_options.keys() - MXNET_OPTIONS
    if unknown:
        raise TypeError(
            f"set_config has no option {', '.join(sorted(unknown))}; it takes filename, max_events, dump_period,"
            f" profile_process, and, without effect, {', '.join(sorted(MXNET_OPTIONS))}"
        )
    name = expanded(filename) if isinstance(filename, str | os.PathLike) else filename
    settings = TraceSettings(name, max_events, dump_period)
    if profile_process == "server":
        require_plain(name)
    if not _told_servers(profile_process, "set_config", **settings.as_fields()):
        PROFILERS.worker.set_config(settings)


def set_state(state: str = "stop", profile_process: str = "worker") -> None:
    """Call `start` for ``run``, or `stop` for ``stop``.

    Raises:
        ValueError: the state is another word.
    """
    if state not in ("run", "stop"):
        raise ValueError(f"the state of the profiler is 'run' or 'stop', not {state!r}")
    (start if state == "run" else stop)(profile_process)


def start(profile_process: str = "worker") -> None:
    """Start recording. On a worker without a store, recording starts with its first store.

    Raises:
        KvdistError: the file cannot be written, or ``profile_process='server'`` without a store on a cluster.
    """
    if not _told_servers(profile_process, "start"):
        PROFILERS.worker.start(by_call=True)


def stop(profile_process: str = "worker") -> None:
    """Stop recording and write the file. `start` continues the same trace, `dump` finishes it.

    Servers write while they go on working, as with `dump`.

    Raises:
        KvdistError: the file cannot be written.
    """
    if not _told_servers(profile_process, "stop"):
        PROFILERS.worker.stop()


def pause(profile_process: str = "worker") -> None:
    """Leave out all events until `resume`."""
    if not _told_servers(profile_process, "pause"):
        PROFILERS.worker.pause()


def resume(profile_process: str = "worker") -> None:
    """Continue recording after `pause`."""
    if not _told_servers(profile_process, "resume"):
        PROFILERS.worker.resume()


def dump(finished: bool = True, profile_process: str = "worker") -> None:
    """Write the trace to its file.

    Servers answer at once and write while they go on working: their files are complete a moment later, at the latest
    when the job has ended.

    Args:
        finished: stop recording, so that the next `start` begins a new trace.
        profile_process: ``worker`` for this process, ``server`` for all servers.

    Raises:
        KvdistError: the file cannot be written; it is then unchanged. A server logs errors that occur while it writes,
            such as a full disk.
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
        raise KvdistError("the profiler of the servers needs a store: call kv.create('dist') first")
    body = json.dumps({"do": call, **fields})
    cluster.ask(lambda number: Command(number, PROFILER_HEAD, body))
    return True
