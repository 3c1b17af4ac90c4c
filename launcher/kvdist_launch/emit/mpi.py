"""``--launcher mpi``: one mpirun, in which rank 0 is the scheduler, then come the servers, then the workers.

Where each process sits, the plan says: mpirun is given one host a rank. mpirun passes standard input to rank 0 alone,
so what a rank runs lies in a private folder in the home folder, which every host of an MPI cluster sees; it is removed
at the end.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvdist_launch.emit.shell import command, exports, heredoc
from kvdist_launch.environment import Environment
from kvdist_launch.hosts import Host
from kvdist_launch.placement import LAUNCHER
from kvdist_launch.plan import Process

HEAD = """\
#!/bin/sh
umask 077
folder=$(mktemp -d "$HOME/.kvdist.XXXXXXXX") || exit
trap 'rm -rf "$folder"' EXIT
trap : INT TERM
"""

UNSUPERVISED = frozenset({"KVDIST_SUPERVISED"})
UNBUFFERED = "PYTHONUNBUFFERED"
"""Left out: mpirun gives ranks a terminal, to which Python writes whole lines, and unbuffered it writes pieces of them,
each of which mpirun would tag."""


def mpi(processes: Sequence[Process], hosts: Sequence[Host], here: str, word: str, is_secret: bool) -> str:
    """The shell script that starts mpirun and cleans up after it.

    Args:
        here: the name of the launching machine; mpirun does not take localhost for it.
        word: a line that stands in no value.
        is_secret: whether the processes get a common secret to encrypt with.
    """
    text = HEAD + ('head -c 32 /dev/urandom > "$folder/secret"\n' if is_secret else "")
    names = [_name(process, hosts, here) for process in processes]
    text += "\n".join([f"cat > \"$folder/hosts\" <<'{word}'", *heredoc(names, word)]) + "\n"
    lines = ["folder=$1", "case $OMPI_COMM_WORLD_RANK in"]
    for rank, process in enumerate(processes):
        lines += [f"{rank})", *_script(process, is_secret), ";;"]
    lines.append("esac")
    text += "\n".join([f"cat > \"$folder/process\" <<'{word}'", *heredoc(lines, word)]) + "\n"
    return text + (
        f'mpirun --map-by seq --hostfile "$folder/hosts" --tag-output -np {len(processes)}'
        ' /bin/sh "$folder/process" "$folder"\n'
    )


def _name(process: Process, hosts: Sequence[Host], here: str) -> str:
    is_here = process.host == LAUNCHER or hosts[process.host].is_local
    return here if is_here else hosts[process.host].name


def _script(process: Process, is_secret: bool) -> list[str]:
    layers = process.environment
    settings = {name: value for name, value in layers.settings.items() if name not in UNSUPERVISED}
    own = ["KVDIST_SECRET_FILE"] if is_secret else []
    defaults = {name: value for name, value in layers.defaults.items() if name != UNBUFFERED}
    lines = exports(Environment(defaults, layers.front, settings), own)
    lines += ['export KVDIST_SECRET_FILE="$folder/secret"'] if is_secret else []
    lines += [] if process.cwd is None else [f"cd {shlex.quote(process.cwd)} || exit"]
    return [*lines, f"exec {command(process.argv)} </dev/null"]
