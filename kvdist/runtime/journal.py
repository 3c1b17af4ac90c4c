"""The journal of a scheduler: a file with each input of its machine, so that a new process can replay them.

An input is appended after the machine has reacted to it, which changes nothing outside, and before any of its effects
leaves. So the journal covers all messages that others have from the scheduler. To them a scheduler that was killed and
started again has only stood still: it has the same members, numbers and open questions. Rules:

* A torn entry at the end was never acted on, and is dropped. Any other damage is an error, and changes nothing.
* A single process has the file: it is locked with ``flock``.
* The time of the machine continues from the last entry, so a restart makes no member silent.
* A process that ends without ending the job sends nothing after its last entry.
* Entries lost in a power cut are noticed by the numbers of messages: see `Reliable`.

The file is a line of JSON, which names the job and the host, and records: a length, its complement and the CRC-32 of
the pickle that follows. The first record is a state, the others are inputs since. After `ENTRIES_MAX` inputs the state
is written anew, into a file beside it that is renamed: this bounds the size of the file, and the time to read it. Only
its owner can read or write it. It has no secrets, and only the sizes of messages' values. Reading it imports no module,
and calls only functions and classes of the modules in `OWN` and `OTHERS`.
"""

from __future__ import annotations

import contextlib
import copyreg
import fcntl
import io
import json
import logging
import os
import pickle
import stat
import struct
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MethodType
from typing import Any

from kvdist.checkpoint.locks import flocked
from kvdist.config.addresses import host_name
from kvdist.config.settings import ClusterConfig
from kvdist.core import machine as fx
from kvdist.core.reliable import Reliable
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.errors import ConfigError
from kvdist.protocol.wire import decode
from kvdist.transport.base import Buffer
from kvdist.version import __version__

LOG = logging.getLogger("kvdist")

FORMAT = "kvdist journal"
RECORD = struct.Struct("<III")
"""The length of the pickle that follows, its complement, and the CRC-32 of the pickle."""
LENGTH_MAX = 0xFFFF_FFFF
ENTRIES_MAX = 20_000
"""Inputs after which the state is written anew; they are replayed in one to two seconds."""
BYTES_MAX = 32 << 20
"""Bytes of entries after which the state is written anew, in case some are long."""
START_ANEW = "Start the job again, from a checkpoint if it has one, and remove {}"
RETRY_S = 10.0
"""Time after a failed write until the state is written once more."""
STALE_S = 86400.0
"""Age, against the newest journal, at which a journal that no process has open belongs to a job that is over."""
LOCK_WAIT_S = 5.0
"""Longest wait for the lock: a killed process may hold it until the system has ended the process."""
ASIDE = ".new"
"""Suffix of the file that replaces a journal."""
WITHOUT_FLOCK = "two schedulers of one job are kept apart only by whoever starts them"

Entry = tuple[Any, ...]
"""(time,) of a tick; (time, event, number of its work with the disk, -1 for none) of an event; (time, envelope, header,
bytes of the payload, -1 for none) of a message."""


@dataclass(slots=True)
class State:
    """A scheduler between two inputs.

    Attributes:
        now: time of the machine.
        reliable: the machine, and its links to all other processes.
        works: number → work with the disk that has not ended.
        begun: number of works with the disk that have begun.
    """

    now: float
    reliable: Reliable
    works: dict[int, fx.Persist]
    begun: int = 0

    @property
    def scheduler(self) -> Scheduler:
        """Machine of `reliable`."""
        machine = self.reliable.machine
        assert isinstance(machine, Scheduler)
        return machine

    def replay(self, entry: Entry) -> list[fx.Effect]:
        """Give the machine an input again, and return the same effects as before."""
        self.now = now = entry[0]
        match entry:
            case (_,):
                effects = self.reliable.tick(now)
            case (_, event, work):
                if isinstance(event, fx.Persisted):
                    event = replace(event, token=self.works.pop(work).token)
                effects = self.reliable.observe(event, now)
            case (_, envelope, header, nbytes):
                payload = [] if nbytes < 0 else [bytes(nbytes)]
                effects = self.reliable.receive(decode([envelope, header, *payload]), now)
            case _:
                raise ValueError(f"{len(entry)} values, where an entry has 1, 3 or 4")
        for effect in effects:
            if isinstance(effect, fx.Persist):
                self.begin(effect)
        return effects

    def begin(self, work: fx.Persist) -> None:
        """Remember a work with the disk until it has ended."""
        self.works[self.begun] = work
        self.begun += 1

    def end(self, event: fx.Persisted) -> int:
        """Forget the work that this event ends, and return its number."""
        number = next(number for number, work in self.works.items() if work.token is event.token)
        del self.works[number]
        return number


class Journal:
    """The file of a scheduler, which only this process has open.

    Args:
        path: the file.
        config: settings of the scheduler.

    Raises:
        ConfigError: the file cannot be opened, another process has it, or other users may read or write it.
    """

    def __init__(self, path: Path, config: ClusterConfig) -> None:
        self.path = path
        self._aside = path.with_name(path.name + ASIDE)
        self._config = config
        self._descriptor = _locked(path)
        self._state: State | None = None
        self._is_complete = False
        """Whether the file has a state and all inputs since; else it has none of them."""
        self.entries = 0
        """Number of inputs since the state in the file."""
        self._nbytes = 0
        """Bytes of the records of these inputs."""
        self._retry_at = fx.NEVER
        """Time at which the state is written once more, after a failed write; else NEVER."""

    # Writing.

    def begin(self, reliable: Reliable, now: float) -> None:
        """Begin the journal of a machine."""
        self._state = State(now, reliable, {})
        self.write_state(now)

    def received(self, now: float, frames: Sequence[Buffer]) -> None:
        """Append a message."""
        envelope, header, *payload = frames
        nbytes = sum([memoryview(frame).nbytes for frame in payload]) if payload else -1
        self._append((now, bytes(envelope), bytes(header), nbytes))

    def observed(self, now: float, event: fx.Event) -> None:
        """Append an event other than a message."""
        assert self._state is not None
        work = self._state.end(event) if isinstance(event, fx.Persisted) else -1
        self._append((now, replace(event, token=None) if isinstance(event, fx.Persisted) else event, work))

    def ticked(self, now: float) -> None:
        """Append a tick."""
        self._append((now,))

    def began(self, work: fx.Persist) -> None:
        """Remember a work with the disk that the machine has begun."""
        assert self._state is not None
        self._state.begin(work)

    def is_due(self, now: float) -> bool:
        """Return whether the state should be written now, between two inputs."""
        is_long = self.entries >= ENTRIES_MAX or self._nbytes >= BYTES_MAX
        return now >= self._retry_at if self._retry_at < fx.NEVER else is_long

    def write_state(self, now: float) -> None:
        """Replace the journal by a new file that begins with the present state."""
        assert self._state is not None
        self._state.now = now
        try:
            self._aside.unlink(missing_ok=True)  # of a process that was killed at this point, or of another user
            descriptor = os.open(self._aside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                flocked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, self._aside, WITHOUT_FLOCK)
                _write(descriptor, self._heading + record_of(self._state))
                os.rename(self._aside, self.path)
            except BaseException:
                os.close(descriptor)
                self._aside.unlink(missing_ok=True)
                raise
        except OSError as error:
            if self._is_complete:  # the old file may get as many inputs again
                self.entries = self._nbytes = 0
                LOG.warning("the journal %s grows, as it cannot be written anew (%s)", self.path, error.strerror)
            else:
                self._fail(error, now)
            return
        os.close(self._descriptor)
        self._descriptor, self._is_complete = descriptor, True
        self.entries = self._nbytes = 0
        if self._retry_at < fx.NEVER:
            self._retry_at = fx.NEVER
            LOG.warning("the journal of the scheduler, %s, is written again", self.path)

    def close(self, is_over: bool) -> None:
        """Close the file; nothing happens if it is closed.

        Args:
            is_over: whether the job has ended; then the file is removed.
        """
        if is_over:
            for path in (self.path, self._aside):
                with contextlib.suppress(OSError):
                    path.unlink()
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1

    def _append(self, entry: Entry) -> None:
        if not self._is_complete:
            return
        record = record_of(entry)
        try:
            _write(self._descriptor, record)
        except OSError as error:
            self._fail(error, entry[0])
        self.entries += 1
        self._nbytes += len(record)

    def _fail(self, error: OSError, now: float) -> None:
        """Empty a file that cannot be written, as it will lack the inputs to come.

        Raises:
            ConfigError: the file cannot be emptied either.
        """
        if self._retry_at == fx.NEVER:
            LOG.warning(
                "the journal of the scheduler, %s, cannot be written (%s): until it can, a loss of the scheduler ends"
                " the job. Free some room, or name a file on another disk by KVDIST_JOURNAL",
                self.path,
                error.strerror,
            )
        self._retry_at, self._is_complete = now + RETRY_S, False
        try:
            os.ftruncate(self._descriptor, min(os.fstat(self._descriptor).st_size, len(self._heading)))
        except OSError as worse:
            raise ConfigError(
                f"the journal of the scheduler, {self.path}, can neither be written ({error.strerror}) nor emptied"
                f" ({worse.strerror}), and a scheduler that is started again would read what is out of date: name a"
                " file on another disk by KVDIST_JOURNAL"
            ) from worse

    @property
    def _heading(self) -> bytes:
        """Line with the format, version, job and host of the journal."""
        job, host = self._config.job_tag, host_name()
        return json.dumps({"format": FORMAT, "kvdist": __version__, "job": job, "host": host}).encode() + b"\n"

    # Reading.

    @property
    def is_new(self) -> bool:
        """Whether no scheduler has written into the file."""
        return self._state is None and os.fstat(self._descriptor).st_size == 0

    def read(self) -> tuple[State, list[fx.Effect]]:
        """Read the file, and continue the journal after its last input.

        Returns:
            The scheduler after its last input, and the effects of that input, which may not have left.

        Raises:
            ConfigError: the file is of another job, version, host or settings, it is damaged, or its scheduler has
                emptied it.
        """
        data = bytearray(os.fstat(self._descriptor).st_size)
        data = data[: os.preadv(self._descriptor, [data], 0)]
        start = self._read_heading(bytes(data[: data.find(b"\n") + 1]))
        if start == len(data):
            raise ConfigError(
                f"{self._whose} has no state: the scheduler could not write it any more (its disk was full), so no"
                f" other can take its place. {START_ANEW.format(self.path)}"
            )
        contents, end = self._records(data, start)
        effects: list[fx.Effect] = []
        place = "the state"
        try:
            state = unpickled(contents[0])
            self._require_settings(state.scheduler.config)
            for number, content in enumerate(contents[1:], 1):
                place = f"entry {number}"
                effects = state.replay(unpickled(content))
        except ConfigError:
            raise
        except Exception as error:  # a file may have any contents
            raise ConfigError(
                f"{self._whose} cannot be followed: {place} of {len(contents) - 1} entries gives"
                f" {type(error).__name__}: {error}. {START_ANEW.format(self.path)}"
            ) from error
        if end < len(data):
            LOG.warning("%s ends in the middle of an entry, which nobody has acted on", self._whose)
            os.ftruncate(self._descriptor, end)
        os.lseek(self._descriptor, 0, os.SEEK_END)
        self._state, self._is_complete = state, True
        self.entries, self._nbytes = len(contents) - 1, end
        return state, effects

    @property
    def _whose(self) -> str:
        return f"the journal of the scheduler, {self.path} (KVDIST_JOURNAL),"

    def _read_heading(self, line: bytes) -> int:
        """Check that the heading is that of this job, version and host. Returns its number of bytes."""
        try:
            heading = dict(json.loads(line))
        except (ValueError, TypeError):
            heading = {}
        if heading.get("format") != FORMAT:
            raise ConfigError(
                f"KVDIST_JOURNAL is {self.path}, which is no journal of kvdist: name a file for the scheduler alone"
            )
        if heading.get("job") != self._config.job_tag:
            raise ConfigError(
                f"{self._whose} is of another job than {self._config.job!r}, which this is (KVDIST_JOB): give each job"
                f" its own file, or remove {self.path} if that job is over"
            )
        for name, own, cure in (
            ("kvdist", __version__, "install the version with which the job was started"),
            ("host", host_name(), "a scheduler can only take the place of another on the same host: start it there"),
        ):
            if heading.get(name) != own:
                raise ConfigError(f"{self._whose} is of {name} {heading.get(name)!r:.80}, and this is {own!r}: {cure}")
        return len(line)

    def _records(self, data: bytearray, start: int) -> tuple[list[bytes], int]:
        """Return the contents of all records except a torn record at the end, and the end of the last of them."""
        contents: list[bytes] = []
        while start + RECORD.size <= len(data) and any(data[start:]):  # a power cut may add zeros
            length, complement, checksum = RECORD.unpack_from(data, start)
            stop = start + RECORD.size + length
            content = bytes(data[start + RECORD.size : stop])
            is_torn = length ^ complement == LENGTH_MAX and stop > len(data) and contents
            if is_torn:
                break
            if length ^ complement != LENGTH_MAX or zlib.crc32(content) != checksum:
                raise self._damaged(data, start)
            contents.append(content)
            start = stop
        if not contents:
            raise self._damaged(data, start)
        return contents, start

    def _damaged(self, data: bytearray, start: int) -> ConfigError:
        return ConfigError(
            f"{self._whose} is damaged at byte {start} of {len(data)}: no scheduler can be made of it."
            f" {START_ANEW.format(self.path)}"
        )

    def _require_settings(self, config: ClusterConfig) -> None:
        """Refuse a file whose scheduler had other settings."""
        for field in fields(ClusterConfig):
            before, now = getattr(config, field.name), getattr(self._config, field.name)
            if before != now and field.name not in OF_PROCESS:
                raise ConfigError(
                    f"{self._whose} is of a scheduler with {field.name}={before!r}, and this one has {now!r}: start it"
                    " with the same settings"
                )


OF_PROCESS = frozenset({"restarts", "listen_fd"})
"""Settings that may differ between two processes of a scheduler."""


OWN = (
    "kvdist.core.",
    "kvdist.diagnostics.pace",
    "kvdist.protocol.",
    "kvdist.errors",
    "kvdist.nodes",
    "kvdist.naming",
    "kvdist.dtypes",
    "kvdist.config.settings",
    "kvdist.checkpoint.snapshot",
)
"""Modules whose functions and classes a journal may name."""
OTHERS = {
    "builtins": ("set", "frozenset"),
    "collections": ("ChainMap", "Counter", "OrderedDict", "defaultdict", "deque"),
    "functools": ("partial",),
    "numpy": ("dtype", "ndarray"),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy.core.numeric": ("_frombuffer",),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.numeric": ("_frombuffer",),
    __name__: ("State", "_method"),
}
"""Other module → functions and classes of it that a journal may name."""


def _reduced(method: MethodType) -> tuple[Any, tuple[object, str]]:
    return _method, (method.__self__, method.__name__)


class Pickler(pickle.Pickler):
    """Writes objects of a machine: a method as its object and its name."""

    dispatch_table = {**copyreg.dispatch_table, MethodType: _reduced}  # noqa: RUF012  # as `pickle.Pickler` wants it


class Unpickler(pickle.Unpickler):
    """Reads objects of a machine, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`.

        Raises:
            ValueError: no machine consists of such objects.
        """
        if name in OTHERS.get(module, ()):
            return super().find_class(module, name)
        if module.startswith(OWN) and (found := super().find_class(module, name)).__module__ == module:
            return found
        raise ValueError(f"it names {module}.{name}, of which no scheduler consists")


def _method(owner: object, name: str) -> Any:
    """Return a method of an object of a machine, by its name."""
    if not type(owner).__module__.startswith(OWN):
        raise ValueError(f"it names a method of {type(owner).__name__}, which is no part of a scheduler")
    return getattr(owner, name)


def unpickled(content: bytes) -> Any:
    """Return the state or entry in the content of a record."""
    return Unpickler(io.BytesIO(content)).load()


def record_of(value: object) -> bytes:
    """Convert a state or an entry to a record of the file."""
    content = io.BytesIO()
    Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    length = content.tell()
    return RECORD.pack(length, length ^ LENGTH_MAX, zlib.crc32(content.getbuffer())) + content.getvalue()


def sweep(newest: Path) -> None:
    """Remove journals beside `newest` that are a day older: their schedulers were killed as jobs ended."""
    stale_at = newest.stat().st_mtime - STALE_S
    for path in newest.parent.glob("journal-*"):
        with contextlib.suppress(OSError):
            if path.stat().st_mtime < stale_at:
                with path.open("rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _write(descriptor: int, data: bytes) -> None:
    """Write all of the data, or raise `OSError`."""
    written = os.write(descriptor, data)
    while written < len(data):
        written += os.write(descriptor, data[written:])


def _locked(path: Path) -> int:
    """Open and lock a journal, which is created if missing. Returns the descriptor."""
    by, name = time.monotonic() + LOCK_WAIT_S, f"KVDIST_JOURNAL is {str(path)!r}"
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{name}, which cannot be opened ({error.strerror}): name a file of this host") from error
        try:
            _require_own(os.fstat(descriptor), name)
            flocked(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, path, WITHOUT_FLOCK)
            with contextlib.suppress(FileNotFoundError):  # another process has replaced or removed it meanwhile
                if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
                    return descriptor
        except BlockingIOError:
            if time.monotonic() >= by:
                os.close(descriptor)
                raise ConfigError(
                    f"{name}, which another scheduler has open: only one can run. If it hangs, end it; if it is of"
                    " another job, give each its own file"
                ) from None
            time.sleep(0.05)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _require_own(found: os.stat_result, name: str) -> None:
    """Refuse a journal that other users than that of the scheduler can read or write."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{name}, which is not a file: name one that is not there yet")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"{name}, which user {found.st_uid} owns with mode {mode:04o}: a journal must belong to the user who runs"
            f" the scheduler, {os.geteuid()}, and be open to nobody else (mode 0600)"
        )
