"""Command lines of ssh and rsync, and copying the current folder to every host by rsync, all hosts concurrently.

Commands are argument lists, with one string for the remote shell, built by one `shlex.join`. Names of hosts and users
were checked by the grammar of `hosts`, so none begins with a dash or contains a character that is special to a shell;
``--`` stands before them all the same. No secret is ever an argument.

Every failure to copy is fatal: otherwise older code than the user's would run. No file is deleted on the other side
unless the user asks for it.
"""

from __future__ import annotations

import argparse
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

from kvdist.config.processes import module_words
from kvdist.config.settings import Limits
from kvdist.errors import ConfigError
from kvdist_launch.hosts import Host
from kvdist_launch.output import printable

CONNECT_S = 7
"""Time that a host may take to accept the connection."""
ALIVE_S = 2
"""Interval at which ssh probes a silent connection."""


@dataclass(frozen=True)
class SshOptions:
    """The user's options for ssh.

    Attributes:
        accepts_new_host_keys: whether hosts that were never seen are trusted; a host whose key has changed never is.
        options: more ``-o`` options, as ``Name=value``.
        activate: a line of bash that is run before the interpreter, such as ``source ~/venv/bin/activate``.
        patience_s: silence after which a host is lost.
    """

    accepts_new_host_keys: bool = False
    options: tuple[str, ...] = ()
    activate: str = ""
    patience_s: float = Limits.patience_s


def agent_command(host: Host, python: str, wanted: SshOptions) -> list[str]:
    """The command that starts the agent of a host, by the interpreter `python` of the host."""
    return ["ssh", "-T", *_ssh_words(host, wanted), "--", host.name, far_command(python, wanted.activate)]


def ssh_options(options: argparse.Namespace, patience_s: float = Limits.patience_s) -> SshOptions:
    """The ssh options of the command line."""
    more, activate = tuple(options.ssh_option or ()), options.activate or ""
    return SshOptions(options.accept_new_host_keys, more, activate, patience_s)


def python_of_hosts(options: argparse.Namespace) -> str:
    """The interpreter of hosts that name none: the user's, or after an activation the first ``python`` in the path."""
    return options.python or ("python" if options.activate else sys.executable)


def far_command(python: str, activate: str) -> str:
    """The command for the user's shell on the remote host, whichever shell that is."""
    agent = shlex.join([python, *module_words("kvdist_launch.agent")])
    if not activate:
        return agent
    # Output of the activation must not mix with the agent's frames. The line is a separate word, so that a comment in
    # it ends with it; and no word of this command has a line end, which csh would not take between quotes.
    script = f'kvdist_line=$1; shift; eval "$kvdist_line" >&2 && exec {agent}'
    return shlex.join(["bash", "-c", script, "bash", activate])


def rsync_command(host: Host, source: str, destination: str, wanted: SshOptions, extra: Sequence[str]) -> list[str]:
    """The command that copies the content of the local folder `source` to the absolute folder `destination` of a
    host."""
    if host.is_local:
        return ["rsync", "-a", "-s", *extra, "--", f"{source.rstrip('/')}/", f"{destination}/"]
    shell = shlex.join(["ssh", "-T", *_ssh_words(host, wanted)])
    name = f"[{host.name}]" if ":" in host.name else host.name
    return ["rsync", "-a", "-s", *extra, "-e", shell, "--", f"{source.rstrip('/')}/", f"{name}:{destination}/"]


def login_of(host: Host) -> str:
    """The login name and host, as a person writes them for ssh."""
    return f"{host.user}@{host.name}" if host.user else host.name


def words_of_host(host: Host) -> list[str]:
    """The options of ssh that a host needs: its files of keys and its port."""
    words = [] if host.known_hosts is None else ["-o", f'UserKnownHostsFile="{host.known_hosts}"']
    words += [] if host.port is None else ["-p", str(host.port)]
    return [*words, *([] if host.identity is None else ["-i", host.identity])]


def _ssh_words(host: Host, wanted: SshOptions) -> list[str]:
    settings = [
        "BatchMode=yes",
        f"ConnectTimeout={CONNECT_S}",
        f"ServerAliveInterval={ALIVE_S}",
        f"ServerAliveCountMax={math.ceil(wanted.patience_s / ALIVE_S)}",
        f"StrictHostKeyChecking={'accept-new' if wanted.accepts_new_host_keys else 'yes'}",
    ]
    words = [word for setting in settings for word in ("-o", setting)]
    # The first value counts, so the options of this host come before those of all hosts.
    words += words_of_host(host)
    words += [word for setting in wanted.options for word in ("-o", setting)]
    return words if host.user is None else [*words, "-l", host.user]


ALWAYS_EXCLUDED = (".git/", "__pycache__/", ".venv/")

SENT = re.compile(rb"Total bytes sent: ([\d,.]+)")
PERCENT = re.compile(rb"(\d+)%")
REASON_LINES_MAX = 3
READ_BYTES = 64 * 1024
KEPT_BYTES = 16 * 1024
"""Bytes of rsync's output that are kept: the statistics, or the reason of a failure."""


@dataclass(frozen=True)
class SyncOptions:
    """A folder to copy, and where to.

    Attributes:
        source: a folder on this machine, absolute.
        destination: a folder on every host, absolute.
        excluded: patterns of rsync.
        deletes: whether files that `source` lacks are removed from `destination`.
    """

    source: str
    destination: str
    excluded: tuple[str, ...] = ()
    deletes: bool = False

    def words(self) -> list[str]:
        """The options of rsync for this copy."""
        words = ["--stats", "--info=progress2", "--mkpath", "--filter=:- .gitignore"]
        words += [f"--exclude={pattern}" for pattern in (*ALWAYS_EXCLUDED, *self.excluded)]
        return [*words, "--delete"] if self.deletes else words


class RsyncRun:
    """Copying to a host; starts on construction.

    Args:
        sync: the folders.
        host: the host.
        wanted: the user's options for ssh.
        selector: waits for rsync's output; the data of a key is the callback.

    Attributes:
        percent: how much of the copy is done, as far as rsync knows.
        result: rsync's exit code; None while it runs.
    """

    def __init__(self, sync: SyncOptions, host: Host, wanted: SshOptions, selector: selectors.BaseSelector) -> None:
        self.host = host
        self.percent = 0
        self.result: int | None = None
        self._sync = sync
        self._selector = selector
        self._started = time.monotonic()
        self._seconds = 0.0
        self._printed = {"out": b"", "err": b""}
        argv = rsync_command(host, sync.source, sync.destination, wanted, sync.words())
        try:
            self._rsync = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
            )
        except FileNotFoundError:
            raise ConfigError(
                "rsync is not installed on this machine; install it, or leave out --sync-dst-dir"
            ) from None
        pipes = {"out": self._rsync.stdout, "err": self._rsync.stderr}
        self._open = {name: pipe for name, pipe in pipes.items() if pipe is not None}
        for name, pipe in self._open.items():
            selector.register(pipe, selectors.EVENT_READ, partial(self._read, name))

    @property
    def pid(self) -> int:
        """Process id of rsync, which leads its own process group."""
        return self._rsync.pid

    @property
    def line(self) -> str:
        """The message at the start, in the form of MXNet's launcher."""
        sync = self._sync
        return f"{_timestamp()} INFO rsync {sync.source.rstrip('/')}/ -> {self.host.name}:{sync.destination}"

    @property
    def report(self) -> str:
        """The message at the end."""
        sent = SENT.search(self._printed["out"])
        count = int(re.sub(rb"\D", b"", sent[1])) if sent else 0
        return f"{_timestamp()} INFO rsync to {self.host.name}: {count:,} bytes in {self._seconds:.1f} s"

    @property
    def failure(self) -> str:
        """Why it failed; empty if it did not."""
        if not self.result:
            return ""
        lines = [printable(line) for line in self._printed["err"].decode(errors="replace").splitlines() if line.strip()]
        why = " / ".join(lines[:REASON_LINES_MAX]) or "rsync gave no reason"
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
            self._printed[name] = (self._printed[name] + data)[-KEPT_BYTES:]
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
def progress_bars(copies: Sequence[RsyncRun], is_terminal: bool) -> Iterator[Callable[[], None]]:
    """Show a bar for each copy, on a terminal only. Yields a function that updates the bars."""
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
