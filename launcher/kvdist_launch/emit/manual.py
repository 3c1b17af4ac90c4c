"""``--launcher none``: for every process the lines that start it in a shell.

Each block is a subshell of its own, so that pasting one leaves no variables behind.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvdist_launch.emit.shell import command, exports, indented
from kvdist_launch.environment import Environment
from kvdist_launch.hosts import Host
from kvdist_launch.placement import LAUNCHER
from kvdist_launch.plan import Process

UNSUPERVISED = frozenset({"KVDIST_SUPERVISED"})
"""Nobody tells a scheduler that was started by hand of processes that end."""


def manual(processes: Sequence[Process], hosts: Sequence[Host], folder: str, secret: str | None) -> str:
    """The blocks for all processes, in starting order, with an empty line between them.

    Args:
        folder: where processes start that have no folder of their own.
        secret: the name of a file in the home folder of each host for the job's secret; None needs none.
    """
    blocks = [["# Start these in any order, each in a shell on its host. They end together."]]
    if secret is not None:
        blocks.append(_secret(hosts, secret))
    for process in processes:
        lines = [f"cd {shlex.quote(process.cwd or folder)} || exit", *_exports(process)]
        if secret is not None:
            lines.append(f'export KVDIST_SECRET_FILE="$HOME"/{shlex.quote(secret)}')
        lines.append(f"exec {command(process.argv)}")
        where = "the launching machine" if process.host == LAUNCHER else str(hosts[process.host])
        blocks.append([f"# {process.node}, on {where}", "(", *indented(lines), ")"])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _exports(process: Process) -> list[str]:
    layers = process.environment
    settings = {name: value for name, value in layers.settings.items() if name not in UNSUPERVISED}
    return exports(Environment(layers.defaults, layers.front, settings))


def _secret(hosts: Sequence[Host], secret: str) -> list[str]:
    file = f'"$HOME"/{shlex.quote(secret)}'
    lines = [
        "# First, once: a secret for this job, and a copy of it on every host. Remove it when the job has ended.",
        f"( umask 077 && head -c 32 /dev/urandom > {file} )",
    ]
    for host in hosts:
        if not host.is_local:
            port = "" if host.port is None else f"-P {host.port} "
            name = f"[{host.name}]" if ":" in host.name else host.name
            user = "" if host.user is None else f"{host.user}@"
            lines.append(f"scp -p {port}-- {file} {shlex.quote(f'{user}{name}:')}")
    return lines
