"""Processes as lines of a POSIX shell: ``--launcher none`` (blocks to paste) and ``--launcher mpi`` (one mpirun).

Values stand in the text of a script, never in the argument list of a program, where ``ps`` would show them.

By hand: each block is a subshell of its own, so that pasting one leaves no variables behind. mpirun: rank 0 is the
scheduler, then come the servers, then the workers, on the hosts that the plan says. mpirun passes standard input to
rank 0 alone, so the script of each rank lies in a private folder in the home folder, which every host of an MPI
cluster sees; it is removed at the end.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from kvdist_launch.environment import OTHER_NAME, OWNED_VARIABLES, Environment
from kvdist_launch.hosts import Host
from kvdist_launch.plan import LAUNCHER, Process

INDENT = "  "


def exports(environment: Environment, besides: Iterable[str] = ()) -> list[str]:
    """The lines that change a shell's environment as `Environment.over` does.

    Args:
        besides: names that other lines export afterwards.
    """
    stale = {*OWNED_VARIABLES, *(OTHER_NAME[name] for name in environment.settings if name in OTHER_NAME)}
    lines = [f"unset {' '.join(sorted(stale - {*environment.settings, *besides}))}"]
    for name, value in sorted(environment.defaults.items()):
        lines.append(f'[ "${{{name}+set}}" ] || export {name}={shlex.quote(value)}')
    for name, value in sorted(environment.front.items()):
        lines.append(f'export {name}={shlex.quote(value)}"${{{name}:+:${name}}}"')
    return lines + [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.settings.items())]


def indented(lines: Iterable[str]) -> list[str]:
    """The lines one step further in; a value that has several lines keeps them as they are."""
    return [INDENT + line for line in lines]


def heredoc(lines: Sequence[str], word: str) -> list[str]:
    """What follows ``<<'word'``. `word` must not be a line of its own in the text."""
    if any(word in line.split("\n") for line in lines):
        raise ValueError(f"{word} ends the text early")
    return [*lines, word]


UNSUPERVISED = "KVDIST_SUPERVISED"
"""Left out, as no launcher reports exits of processes to the scheduler."""


def manual(processes: Sequence[Process], hosts: Sequence[Host], folder: str, secret: str | None) -> str:
    """The blocks for all processes, in starting order, with an empty line between them.

    Args:
        folder: where processes start that have no folder of their own.
        secret: the name of a file in the home folder of each host for the job's secret; None needs none.
    """
    blocks = [["# Start these in any order, each in a shell on its host. They end together."]]
    if secret is not None:
        blocks.append(_secret_lines(hosts, secret))
    for process in processes:
        lines = [f"cd {shlex.quote(process.cwd or folder)} || exit", *exports(_unsupervised(process))]
        if secret is not None:
            lines.append(f'export KVDIST_SECRET_FILE="$HOME"/{shlex.quote(secret)}')
        lines.append(f"exec {shlex.join(process.argv)}")
        where = "the launching machine" if process.host == LAUNCHER else str(hosts[process.host])
        blocks.append([f"# {process.node}, on {where}", "(", *indented(lines), ")"])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _unsupervised(process: Process, *left_out: str) -> Environment:
    """The process's environment without `UNSUPERVISED`, and without some of its defaults."""
    layers = process.environment
    settings = {name: value for name, value in layers.settings.items() if name != UNSUPERVISED}
    defaults = {name: value for name, value in layers.defaults.items() if name not in left_out}
    return Environment(defaults, layers.front, settings)


def _secret_lines(hosts: Sequence[Host], secret: str) -> list[str]:
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


MPI_HEAD = """\
#!/bin/sh
umask 077
folder=$(mktemp -d "$HOME/.kvdist.XXXXXXXX") || exit
trap 'rm -rf "$folder"' EXIT
trap : INT TERM
"""

UNBUFFERED = "PYTHONUNBUFFERED"
"""Left out: mpirun gives ranks a terminal, to which Python writes whole lines, and unbuffered it writes pieces of them,
each of which mpirun would tag."""


def mpi(processes: Sequence[Process], hosts: Sequence[Host], here: str, word: str, is_secret: bool) -> str:
    """The shell script that starts mpirun and cleans up after it.

    Args:
        here: the name of the launching machine; mpirun does not take localhost for it.
        word: a line that does not occur in any value.
        is_secret: whether the processes get a common secret to encrypt with.
    """
    text = MPI_HEAD + ('head -c 32 /dev/urandom > "$folder/secret"\n' if is_secret else "")
    names = [_name(process, hosts, here) for process in processes]
    text += "\n".join([f"cat > \"$folder/hosts\" <<'{word}'", *heredoc(names, word)]) + "\n"
    lines = ["folder=$1", "case $OMPI_COMM_WORLD_RANK in"]
    for rank, process in enumerate(processes):
        lines += [f"{rank})", *_rank_script(process, is_secret), ";;"]
    lines.append("esac")
    text += "\n".join([f"cat > \"$folder/process\" <<'{word}'", *heredoc(lines, word)]) + "\n"
    return text + (
        f'mpirun --map-by seq --hostfile "$folder/hosts" --tag-output -np {len(processes)}'
        ' /bin/sh "$folder/process" "$folder"\n'
    )


def _name(process: Process, hosts: Sequence[Host], here: str) -> str:
    is_here = process.host == LAUNCHER or hosts[process.host].is_local
    return here if is_here else hosts[process.host].name


def _rank_script(process: Process, is_secret: bool) -> list[str]:
    lines = exports(_unsupervised(process, UNBUFFERED), ["KVDIST_SECRET_FILE"] if is_secret else [])
    lines += ['export KVDIST_SECRET_FILE="$folder/secret"'] if is_secret else []
    lines += [] if process.cwd is None else [f"cd {shlex.quote(process.cwd)} || exit"]
    return [*lines, f"exec {shlex.join(process.argv)} </dev/null"]
