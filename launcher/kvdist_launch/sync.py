"""Copies the current folder to every host, once per host, by rsync, all hosts at the same time.

Every failure is fatal: code that is older than what the user sees would run otherwise. Nothing is deleted on the other
side unless that was asked for.
"""

from __future__ import annotations

import contextlib
import os
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from kvdist.errors import ConfigError
from kvdist_launch.foreign import printable
from kvdist_launch.hosts import Host
from kvdist_launch.ssh import SshOptions, rsync_command

ALWAYS_EXCLUDED = (".git/", "__pycache__/", ".venv/")

SENT = re.compile(rb"Total bytes sent: ([\d,.]+)")
PERCENT = re.compile(rb"(\d+)%")
REASON_LINES_MAX = 3
READ_BYTES = 64 * 1024
KEPT_BYTES = 16 * 1024
"""What is kept of what rsync printed: the statistics, or the reason."""


class SyncError(ConfigError):
    """A host does not have the files."""


@dataclass(frozen=True)
class Sync:
    """What is copied where.

    Attributes:
        source: a folder here, absolute.
        destination: a folder on every host, absolute.
        excluded: patterns of rsync.
        deletes: whether files that are not here are removed there.
    """

    source: str
    destination: str
    excluded: tuple[str, ...] = ()
    deletes: bool = False

    def words(self) -> list[str]:
        """The options of rsync for that."""
        words = ["--stats", "--info=progress2", "--mkpath", "--filter=:- .gitignore"]
        words += [f"--exclude={pattern}" for pattern in (*ALWAYS_EXCLUDED, *self.excluded)]
        return [*words, "--delete"] if self.deletes else words


def destination_of(text: str) -> str:
    """The folder that ``--sync-dst-dir`` names, without redundant parts.

    Raises:
        ConfigError: it is not absolute, leads upwards, or is the root of the file system.
    """
    path = PurePosixPath(text)
    wrong = (
        "is not absolute" if not path.is_absolute()
        else "leads upwards by '..'" if ".." in path.parts
        else "is the root of the file system" if len(path.parts) == 1
        else "has a character that no path has" if "\0" in text
        else ""
    )  # fmt: skip
    if wrong:
        raise ConfigError(
            f"--sync-dst-dir is {text!r}, which {wrong}; write the folder of the hosts as an absolute path, such as"
            " /home/you/project"
        )
    return str(path)


class Copy:
    """Copying to one host, under way from its making on.

    Args:
        sync: what.
        host: where to.
        wanted: what the user wants of ssh.
        selector: where rsync's output is waited for; the data of a key is what is to be called.

    Attributes:
        percent: how much of it is done, as far as rsync knows.
        result: its exit code; None while it runs.
    """

    def __init__(self, sync: Sync, host: Host, wanted: SshOptions, selector: selectors.BaseSelector) -> None:
        self.host = host
        self.percent = 0
        self.result: int | None = None
        self._sync = sync
        self._selector = selector
        self._started = time.monotonic()
        self._seconds = 0.0
        self._said = {"out": b"", "err": b""}
        argv = rsync_command(host, sync.source, sync.destination, wanted, sync.words())
        try:
            self._rsync = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except FileNotFoundError:
            raise SyncError("rsync is not installed on this machine; install it, or leave out --sync-dst-dir") from None
        pipes = {"out": self._rsync.stdout, "err": self._rsync.stderr}
        self._open = {name: pipe for name, pipe in pipes.items() if pipe is not None}
        for name, pipe in self._open.items():
            selector.register(pipe, selectors.EVENT_READ, partial(self._read, name))

    @property
    def pid(self) -> int:
        """Of rsync, which leads a group of its own."""
        return self._rsync.pid

    @property
    def line(self) -> str:
        """What is said when it begins, in the words of MXNet's launcher."""
        sync = self._sync
        return f"{_timestamp()} INFO rsync {sync.source.rstrip('/')}/ -> {self.host.name}:{sync.destination}"

    @property
    def report(self) -> str:
        """What is said when it is done."""
        sent = SENT.search(self._said["out"])
        count = int(re.sub(rb"\D", b"", sent[1])) if sent else 0
        return f"{_timestamp()} INFO rsync to {self.host.name}: {count:,} bytes in {self._seconds:.1f} s"

    @property
    def failure(self) -> str:
        """Why it failed; empty if it did not."""
        if not self.result:
            return ""
        lines = [printable(line) for line in self._said["err"].decode(errors="replace").splitlines() if line.strip()]
        why = " / ".join(lines[:REASON_LINES_MAX]) or "it gave no reason"
        return f"rsync to {self.host.name}:{self._sync.destination} failed with exit code {self.result} ({why})"

    def stop(self) -> None:
        """End it if it still runs."""
        if self.result is None:
            self._rsync.kill()
            for pipe in self._open.values():
                self._selector.unregister(pipe)
                pipe.close()
            self._open.clear()
            self.result = self._rsync.wait()

    def _read(self, name: str) -> None:
        pipe = self._open.get(name)
        if pipe is None:
            return
        data = os.read(pipe.fileno(), READ_BYTES)
        if data:
            self._said[name] = (self._said[name] + data)[-KEPT_BYTES:]
            found = PERCENT.findall(data) if name == "out" else []
            self.percent = int(found[-1]) if found else self.percent
            return
        self._selector.unregister(pipe)
        pipe.close()
        del self._open[name]
        if not self._open:
            self.result = self._rsync.wait()
            self._seconds = time.monotonic() - self._started


@contextlib.contextmanager
def shown(copies: Sequence[Copy], is_terminal: bool) -> Iterator[Callable[[], None]]:
    """A bar for each copy, on a terminal only; what it gives brings the bars up to date."""
    if not is_terminal:
        yield lambda: None
        return
    # Imported here because only people need bars, and importing takes longer than copying little.
    from rich.console import Console
    from rich.progress import Progress

    def update() -> None:
        for task, copy in zip(tasks, copies, strict=True):
            progress.update(task, completed=copy.percent if copy.result is None else 100)
        progress.refresh()

    with Progress(console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        tasks = [progress.add_task(f"rsync to {copy.host.name}", total=100) for copy in copies]
        yield update


def _timestamp() -> str:
    now = time.time()
    return f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(now))},{int(now * 1000) % 1000:03d}"
