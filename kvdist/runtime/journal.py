"""The journal of a scheduler: a file with all that its machine was told, so that a new process can be told the same.

An input is appended after the machine has reacted to it, which changes nothing outside, and before any of its effects
leaves. So whatever others have heard from a scheduler, its journal explains. To them a scheduler that was killed and
started again is one that stood still: it has the same members, numbers and open questions. Rules that hold here:

* An entry that is torn was never acted on, and is dropped. Damage anywhere else is an error.
* One process has the file: it is locked with ``flock``.
* The time of the machine goes on from the last entry, so that nobody was silent while there was no scheduler.
* What was lost with a power cut is noticed by the numbers of messages: see `Reliable`.

The file is a line of JSON, which says whose journal it is, and records: a length and a CRC-32, 4 bytes each, and a
pickle. The first record is a state, the others are inputs since. After `ENTRIES_MAX` inputs the state is written
anew, into a file beside it that is renamed: this bounds the size of the file, and the time to read it. Only its owner
can read or write it. It has no secret, and of a message that carries values only their size. Whoever reads it makes
nothing but objects of the machine, see `Unpickler`: no code in the file is run.
"""

from __future__ import annotations

import contextlib
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

from kvdist.checkpoint.locks import NO_FLOCK
from kvdist.checkpoint.snapshot import LockFolder
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
RECORD = struct.Struct("<II")
"""Length and CRC-32 of what follows."""
ENTRIES_MAX = 20_000
"""So many inputs are read in one to two seconds."""
BYTES_MAX = 32 << 20
"""Of entries, in case that some are long."""
AGAIN = "Start the job again, from a checkpoint if it has one, and remove {}"
AGAIN_S = 10.0
"""When a journal that could not be written is tried once more."""
STALE_S = 86400.0
"""A journal that nobody has open, and that is so much older than the newest, is of a job that is over."""
LOCK_WAIT_S = 5.0
"""A process that was killed may hold its lock until the system has ended it."""
ASIDE = ".new"
"""Behind the name of a journal while it is written anew."""

Entry = tuple[Any, ...]
"""(time,) when something was due; (time, event, number of a work with the disk) of an event, -1 for none; (time,
envelope, header, bytes of the payload) of a message, -1 for none."""


@dataclass(slots=True)
class State:
    """What a scheduler is between two inputs.

    Attributes:
        now: the time of the machine.
        reliable: the machine, and its lines to all others.
        works: number → work with the disk that is not done.
        begun: how many works there have been.
    """

    now: float
    reliable: Reliable
    works: dict[int, fx.Persist]
    begun: int = 0

    @property
    def scheduler(self) -> Scheduler:
        """The machine."""
        machine = self.reliable.machine
        assert isinstance(machine, Scheduler)
        return machine

    def tell(self, entry: Entry) -> list[fx.Effect]:
        """Tell the machine what it was told before, and return what it did then."""
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
        """Note a work with the disk."""
        self.works[self.begun] = work
        self.begun += 1

    def end(self, event: fx.Persisted) -> int:
        """The number of the work that an event ends."""
        number = next(number for number, work in self.works.items() if work.token is event.token)
        del self.works[number]
        return number


@dataclass(slots=True)
class Revived:
    """What a journal says.

    Attributes:
        state: of the scheduler when its process was killed.
        effects: of the last input. They may not have left.
        entries: how many inputs there were since the state that was in the file.
    """

    state: State
    effects: list[fx.Effect]
    entries: int

    @property
    def unsaid(self) -> list[fx.Effect]:
        """What would never be said or done, if it was not: what goes to others is repeated anyway."""
        return [one for one in self.effects if isinstance(one, fx.Log | fx.TellLauncher | fx.Halt)]

    @property
    def locks(self) -> list[LockFolder]:
        """The locks of folders that the process had."""
        return [LockFolder(*place) for place in self.state.scheduler.locked_folders]


class Journal:
    """The file of one scheduler, which this process alone has.

    Args:
        path: it.
        config: of the scheduler.

    Raises:
        ConfigError: it cannot be opened, another process has it, or it is no journal of this job; says which.
    """

    def __init__(self, path: Path, config: ClusterConfig) -> None:
        self.path = path
        self._config = config
        self._descriptor = _locked(path)
        self._state: State | None = None
        self._is_whole = False
        """Whether the file says all that the machine was told."""
        self._entries = self._nbytes = 0
        """Since the state that is in the file."""
        self._again_at = fx.NEVER
        """When it is tried once more, after it could not be written."""

    # Of a process that is killed.

    def begin(self, reliable: Reliable, now: float) -> None:
        """Keep the journal of this machine from now on."""
        self._state = State(now, reliable, {})
        self.write_state(now)

    def received(self, now: float, frames: Sequence[Buffer]) -> None:
        """A message came."""
        envelope, header, *payload = frames
        nbytes = sum([memoryview(frame).nbytes for frame in payload]) if payload else -1
        self._append((now, bytes(envelope), bytes(header), nbytes))

    def observed(self, now: float, event: fx.Event) -> None:
        """An event that is no message."""
        assert self._state is not None
        work = self._state.end(event) if isinstance(event, fx.Persisted) else -1
        self._append((now, replace(event, token=None) if isinstance(event, fx.Persisted) else event, work))

    def ticked(self, now: float) -> None:
        """Something fell due."""
        self._append((now,))

    def began(self, work: fx.Persist) -> None:
        """The machine has given a work to the disk."""
        assert self._state is not None
        self._state.begin(work)

    def is_due(self, now: float) -> bool:
        """Whether the state should be written now, between two inputs."""
        is_long = self._entries >= ENTRIES_MAX or self._nbytes >= BYTES_MAX
        return now >= self._again_at if self._again_at < fx.NEVER else is_long

    def write_state(self, now: float) -> None:
        """Let a state take the place of all that is in the file."""
        assert self._state is not None
        self._state.now = now
        aside = self.path.with_name(self.path.name + ASIDE)
        try:
            descriptor = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                _flocked(descriptor, aside)
                _write(descriptor, self._heading + record_of(self._state))
                os.rename(aside, self.path)
            except BaseException:
                os.close(descriptor)
                aside.unlink(missing_ok=True)
                raise
        except OSError as error:
            if self._is_whole:  # and can grow for as long again
                self._entries = self._nbytes = 0
                LOG.warning("the journal %s grows, as it cannot be written anew (%s)", self.path, error.strerror)
            else:
                self._fail(error, now)
            return
        os.close(self._descriptor)
        self._descriptor, self._is_whole = descriptor, True
        self._entries = self._nbytes = 0
        if self._again_at < fx.NEVER:
            self._again_at = fx.NEVER
            LOG.warning("the journal of the scheduler, %s, is written again", self.path)

    def close(self, is_over: bool) -> None:
        """Keep it no more.

        Args:
            is_over: whether the job is, so that nobody needs the file.
        """
        if is_over:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)

    def _append(self, entry: Entry) -> None:
        if not self._is_whole:
            return
        record = record_of(entry)
        try:
            _write(self._descriptor, record)
        except OSError as error:
            self._fail(error, entry[0])
        self._entries += 1
        self._nbytes += len(record)

    def _fail(self, error: OSError, now: float) -> None:
        """It cannot be written: what is there is not to be read, as it lacks what is done from now on.

        Raises:
            ConfigError: that cannot be made sure either.
        """
        if self._again_at == fx.NEVER:
            LOG.warning(
                "the journal of the scheduler, %s, cannot be written (%s): until it can, a loss of the scheduler ends"
                " the job. Free some room, or name a file on another disk by KVDIST_JOURNAL",
                self.path,
                error.strerror,
            )
        self._again_at, self._is_whole = now + AGAIN_S, False
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
        """Whose journal it is."""
        job, host = self._config.job_tag, host_name()
        return json.dumps({"format": FORMAT, "kvdist": __version__, "job": job, "host": host}).encode() + b"\n"

    # Of a process that takes its place.

    @property
    def is_new(self) -> bool:
        """Whether no scheduler has written anything into it."""
        return self._state is None and os.fstat(self._descriptor).st_size == 0

    def read(self) -> Revived:
        """The scheduler whose journal this is, as it was.

        Raises:
            ConfigError: it is of another job, version or host, it is damaged, or it was given up.
        """
        data = bytearray(os.fstat(self._descriptor).st_size)
        data = data[: os.preadv(self._descriptor, [data], 0)]
        start = self._read_heading(bytes(data[: data.find(b"\n") + 1]))
        contents = self._contents(data, start)
        if not contents:
            raise ConfigError(
                f"{self._whose} has no state: the scheduler could not write it any more (its disk was full), so no"
                f" other can take its place. {AGAIN.format(self.path)}"
            )
        effects: list[fx.Effect] = []
        place = "the state"
        try:
            state = unpickled(contents[0])
            self._require_settings(state.scheduler.config)
            for number, content in enumerate(contents[1:], 1):
                place = f"entry {number}"
                effects = state.tell(unpickled(content))
        except ConfigError:
            raise
        except Exception as error:  # whatever is in a file
            raise ConfigError(
                f"{self._whose} cannot be followed: {place} of {len(contents) - 1} entries gives"
                f" {type(error).__name__}: {error}. {AGAIN.format(self.path)}"
            ) from error
        self._state, self._is_whole = state, True
        state.scheduler.tell_launcher_again()
        return Revived(state, effects, len(contents) - 1)

    @property
    def _whose(self) -> str:
        return f"the journal of the scheduler, {self.path} (KVDIST_JOURNAL),"

    def _read_heading(self, line: bytes) -> int:
        """The number of bytes of the heading, if it is that of this job."""
        try:
            said = json.loads(line)
            assert said["format"] == FORMAT
        except Exception as error:  # whatever is in a file
            raise ConfigError(
                f"KVDIST_JOURNAL is {self.path}, which is no journal of kvdist: name a file for the scheduler alone"
            ) from error
        if said.get("job") != self._config.job_tag:
            raise ConfigError(
                f"{self._whose} is of another job than {self._config.job!r}, which this is (KVDIST_JOB): give each job"
                f" its own file, or remove {self.path} if that job is over"
            )
        for name, own, cure in (
            ("kvdist", __version__, "install the version with which the job was started"),
            ("host", host_name(), "a scheduler can only take the place of another on the same host: start it there"),
        ):
            if said.get(name) != own:
                raise ConfigError(f"{self._whose} is of {name} {said.get(name)!r:.80}, and this is {own!r}: {cure}")
        return len(line)

    def _contents(self, data: bytearray, start: int) -> list[bytes]:
        """All records; the last one may be torn."""
        found: list[bytes] = []
        while start + RECORD.size <= len(data):
            length, checksum = RECORD.unpack_from(data, start)
            content = bytes(data[start + RECORD.size : start + RECORD.size + length])
            stop = start + RECORD.size + length
            if length and zlib.crc32(content) == checksum:
                found.append(content)
            elif stop < len(data) and any(data[start:]):
                raise ConfigError(
                    f"{self._whose} is damaged at byte {start} of {len(data)}: no scheduler can be made of it."
                    f" {AGAIN.format(self.path)}"
                )
            else:
                LOG.warning("%s ends in the middle of an entry, which nobody has acted on", self._whose)
                break
            start = stop
        os.ftruncate(self._descriptor, min(start, len(data)))
        os.lseek(self._descriptor, 0, os.SEEK_END)
        return found

    def _require_settings(self, config: ClusterConfig) -> None:
        """Whether the process before had the same settings."""
        for field in fields(ClusterConfig):
            before, now = getattr(config, field.name), getattr(self._config, field.name)
            if before != now and field.name not in OF_PROCESS:
                raise ConfigError(
                    f"{self._whose} is of a scheduler with {field.name}={before!r}, and this one has {now!r}: start it"
                    " with the same settings"
                )


OF_PROCESS = frozenset({"restarts", "listen_fd"})
"""What may differ between two processes of one scheduler."""


OWN = ("kvdist.core.", "kvdist.protocol.", "kvdist.nodes", "kvdist.naming", "kvdist.dtypes", "kvdist.config.settings",
       "kvdist.checkpoint.snapshot")  # fmt: skip
"""The modules of which everything may be in a journal."""
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
"""Module → what of it may be."""


class Pickler(pickle.Pickler):
    """Writes objects of a machine: a method by its name."""

    def reducer_override(self, value: object) -> Any:
        """See `pickle.Pickler`."""
        return (_method, (value.__self__, value.__name__)) if isinstance(value, MethodType) else NotImplemented


class Unpickler(pickle.Unpickler):
    """Reads objects of a machine, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler`.

        Raises:
            ValueError: this is nothing that a machine consists of.
        """
        if name in OTHERS.get(module, ()):
            return super().find_class(module, name)
        if module.startswith(OWN) and (found := super().find_class(module, name)).__module__ == module:
            return found
        raise ValueError(f"it names {module}.{name}, of which no scheduler consists")


def _method(owner: object, name: str) -> Any:
    """A method of an object of a machine."""
    if not type(owner).__module__.startswith(OWN):
        raise ValueError(f"it names a method of {type(owner).__name__}, which is no part of a scheduler")
    return getattr(owner, name)


def unpickled(content: bytes) -> Any:
    """What the content of a record says."""
    return Unpickler(io.BytesIO(content)).load()


def record_of(value: object) -> bytes:
    """A state or an entry, as it stands in the file."""
    content = io.BytesIO()
    Pickler(content, pickle.HIGHEST_PROTOCOL).dump(value)
    return RECORD.pack(content.tell(), zlib.crc32(content.getbuffer())) + content.getvalue()


def sweep(newest: Path) -> None:
    """Remove the journals beside this one that are a day older: their schedulers were killed when the jobs ended."""
    now = newest.stat().st_mtime
    for path in newest.parent.glob("journal-*"):
        with contextlib.suppress(OSError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if now - path.stat().st_mtime > STALE_S:
                path.unlink()


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it, or raise `OSError`."""
    written = os.write(descriptor, data)
    if written != len(data):
        os.write(descriptor, data[written:])  # says why it cannot


def _locked(path: Path) -> int:
    """Open a journal, or make it, and keep all others from it."""
    by, name = time.monotonic() + LOCK_WAIT_S, f"KVDIST_JOURNAL is {str(path)!r}"
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{name}, which cannot be opened ({error.strerror}): name a file of this host") from error
        try:
            _require_own(os.fstat(descriptor), name)
            _flocked(descriptor, path)
            with contextlib.suppress(FileNotFoundError):  # it was written anew, or removed, meanwhile
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
    """Whether nobody else can write a journal, or read what users have said."""
    if not stat.S_ISREG(found.st_mode):
        raise ConfigError(f"{name}, which is not a file: name one that is not there yet")
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise ConfigError(
            f"{name}, which user {found.st_uid} owns with mode {mode:04o}: a journal must belong to the user who runs"
            f" the scheduler, {os.geteuid()}, and be open to nobody else (mode 0600)"
        )


def _flocked(descriptor: int, path: Path) -> None:
    """Lock a file.

    Raises:
        BlockingIOError: another process has it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        LOG.warning(
            "the file system of %s does not support flock (%s): nothing but who starts schedulers keeps two from"
            " running for one job",
            path,
            error.strerror,
        )
