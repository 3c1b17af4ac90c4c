"""How ssh and rsync are called: argument lists, and one string for the far shell, made by one `shlex.join`.

Names of hosts and users were checked by the grammar of `hosts`, so none begins with a dash or holds anything that a
shell would notice; ``--`` stands before them all the same. Nothing secret is ever an argument.
"""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvdist.config.settings import Limits
from kvdist_launch.hosts import Host

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
    return ["ssh", "-T", *_options(host, wanted), "--", host.name, far_command(python, wanted.activate)]


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
    shell = shlex.join(["ssh", "-T", *_options(host, wanted)])
    name = f"[{host.name}]" if ":" in host.name else host.name
    return ["rsync", "-a", "-s", *extra, "-e", shell, "--", f"{source.rstrip('/')}/", f"{name}:{destination}/"]


def _options(host: Host, wanted: SshOptions) -> list[str]:
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
