"""How ssh and rsync are called, and copying the current folder to every host by rsync, all hosts at the same time.

Commands are argument lists, with one string for the far shell, made by one `shlex.join`. Names of hosts and users were
checked by the grammar of `hosts`, so none begins with a dash or holds anything that a shell would notice; ``--`` stands
before them all the same. Nothing secret is ever an argument.

Every failure to copy is fatal: code that is older than what the user sees would run otherwise. Nothing is deleted on
the other side unless the user asks for it.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import PurePosixPath

from kvdist.config.settings import Limits
from kvdist.errors import ConfigError
from kvdist_launch.hosts import Host
from kvdist_launch.output import printable

CONNECT_S = 7
"""How long a host may take to answer at all."""
ALIVE_S = 2
"""How often ssh probes a connection that says nothing."""


@dataclass(frozen=True)
class SshOptions:
    """What the user wants of ssh.

    Attributes:
        accepts_new_host_keys: hosts that were never seen are trusted; one whose key has changed never is.
        options: more ``-o`` options, as ``Name=value``.
        activate: a line of bash that is run before the interpreter, such as ``source ~/venv/bin/activate``.
        patience_s: how long a host may say nothing before it is given up.
    """

    accepts_new_host_keys: bool = False
    options: tuple[str, ...] = ()
    activate: str = ""
    patience_s: float = Limits.patience_s


def agent_command(host: Host, python: str, wanted: SshOptions) -> list[str]:
    """The words that start the agent of a host.

    Args:
        host: which.
        python: the interpreter there.
        wanted: what the user wants of ssh.
    """
    return ["ssh", "-T", *_ssh_words(host, wanted), "--", host.name, far_command(python, wanted.activate)]


def python_of_hosts(python: str | None, activate: str | None) -> str:
    """The interpreter of hosts that name none: after an activation that which it has put into the path.

    Args:
        python: what the user names for all hosts; None is nothing.
        activate: what is run before; None is nothing.
    """
    return python or ("python" if activate else sys.executable)


def far_command(python: str, activate: str) -> str:
    """What the user's shell on the far side is given, whichever shell that is."""
    agent = shlex.join([python, "-m", "kvdist_launch.agent"])
    if not activate:
        return agent
    # What activation prints is not ours; the agent's output is a protocol. The line is a word of its own, so that a
    # comment in it ends with it; and no word has a line end of ours, which csh would not take between quotes.
    script = f'kvdist_line=$1; shift; eval "$kvdist_line" >&2 && exec {agent}'
    return shlex.join(["bash", "-c", script, "bash", activate])


def rsync_command(host: Host, source: str, destination: str, wanted: SshOptions, extra: Sequence[str]) -> list[str]:
    """The words that copy a folder's content to a host.

    Args:
        host: where to.
        source: a folder here.
        destination: a folder there, absolute.
        wanted: what the user wants of ssh.
        extra: more options of rsync.
    """
    if host.is_local:
        return ["rsync", "-a", "-s", *extra, "--", f"{source.rstrip('/')}/", f"{destination}/"]
    shell = shlex.join(["ssh", "-T", *_ssh_words(host, wanted)])
    name = f"[{host.name}]" if ":" in host.name else host.name
    return ["rsync", "-a", "-s", *extra, "-e", shell, "--", f"{source.rstrip('/')}/", f"{name}:{destination}/"]


def _ssh_words(host: Host, wanted: SshOptions) -> list[str]:
    settings = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_S}",
        f"ServerAliveInterval={ALIVE_S}",
        f"ServerAliveCountMax={math.ceil(wanted.patience_s / ALIVE_S)}",
        f"StrictHostKeyChecking={'accept-new' if wanted.accepts_new_host_keys else 'yes'}",
        *wanted.options,
    ]
    words = [word for setting in settings for word in ("-o", setting)]
    if host.port is not None:
        words += ["-p", str(host.port)]
    if host.user is not None:
        words += ["-l", host.user]
    return words


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
class SyncOptions:
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


class RsyncRun:
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

    def __init__(self, sync: SyncOptions, host: Host, wanted: SshOptions, selector: selectors.BaseSelector) -> None:
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
def shown(copies: Sequence[RsyncRun], is_terminal: bool) -> Iterator[Callable[[], None]]:
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
