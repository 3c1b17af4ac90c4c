"""Checks before anything starts: every host at the same time, one table, a sentence for each problem."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvdist.errors import ConfigError
from kvdist.version import __version__
from kvdist_launch.host_pool import KEY_CHANGED, HostConnection, HostPool
from kvdist_launch.hosts import Host
from kvdist_launch.output import text_table

FREE_BYTES_MIN = 64 << 20
"""Less room than this in the folder that is copied to is a problem."""


class HostProblem(ConfigError):
    """Hosts cannot take part."""


def connect(pool: HostPool, python: str) -> None:
    """Reach all hosts; a host that cannot be reached has a problem that says what to do.

    Args:
        python: the interpreter of hosts that name none.
    """
    pool.connect()
    for one in pool.connections:
        if one.problem:
            one.problem = explained(one.problem, one.host.python or python, one.host)


def judge(connections: Iterable[HostConnection], destination: str | None, root: str = "the scheduler") -> None:
    """Turn everything that would stop the job later into a problem of its host.

    Args:
        connections: the hosts, asked.
        destination: the folder that is copied to.
        root: the process that all others dial.
    """
    for one in connections:
        if not one.problem:
            one.problem = "; ".join(_problems(one, destination, root))


def _problems(one: HostConnection, destination: str | None, root: str) -> list[str]:
    facts, found = one.facts, one.found
    wrong = []
    if facts["version"] != __version__:
        wrong.append(
            f"it has kvdist {facts['version']} and this machine {__version__}; install the same:"
            f" {facts['python']} -m pip install kvdist=={__version__}"
        )
    folder = found.get("folder", {})
    if destination and folder.get("problem"):
        wrong.append(str(folder["problem"]))
    elif destination and folder.get("free_bytes", 0) < FREE_BYTES_MIN:
        wrong.append(f"{destination} has {_size(folder.get('free_bytes', 0))} free")
    if found.get("problem"):
        wrong.append(str(found["problem"]))
    if found.get("has_cwd") is False:
        wrong.append(
            "it does not have the folder in which the job was started here; copy it there with --sync-dst-dir, or start"
            " in a folder that all hosts have"
        )
    if found.get("has_port") is False:
        wrong.append("every port of the range is taken there; widen --port-range")
    missing = [gpu for gpu in one.host.gpus or () if gpu.isdigit() and int(gpu) >= facts["gpus"]]
    if missing:
        wrong.append(f"gpus= names {', '.join(missing)}, and the host has {facts['gpus']} (counted from 0)")
    if found.get("unreachable"):
        wrong.append(f"{root} cannot be reached from there: {found['unreachable']}")
    return wrong


def explained(failure: str, python: str, host: Host) -> str:
    """The message of ssh or of the far shell, with what to do about it.

    Args:
        failure: the message.
        python: the interpreter that was to run the agent.
    """
    known_as = host.name if host.port is None else f"'[{host.name}]:{host.port}'"
    advice = {
        # First, as ssh then also prints what it prints for an unknown key.
        KEY_CHANGED: f"the key of {host.name} has changed: find out why, as another machine may answer in its place;"
        f" ssh-keygen -R {known_as} forgets the old key",
        "Permission denied": "log in by key without a password, as ssh itself must be able to (ssh-copy-id)",
        "Host key verification failed": "connect once by hand to see its key, or give --accept-new-host-keys",
        "Could not resolve": "check the name, or add it to ~/.ssh/config",
        "Connection timed out": "is it up, and does a firewall let ssh through?",
        "Connection refused": "does an ssh daemon run there, at that port?",
        "No module named": f"install kvdist there: {python} -m pip install kvdist=={__version__}",
        "No such file or directory": f"there is no {python}; give the interpreter of that host by python= or --python",
        "not found": f"there is no {python}; give the interpreter of that host by python= or --python",
    }
    for sign, what in advice.items():
        if sign in failure:
            return f"{failure}: {what}"
    return failure


def require_all(connections: Sequence[HostConnection]) -> None:
    """Refuse to go on while a host has a problem.

    Raises:
        HostProblem: one has; the message has a sentence for each.
    """
    problems = [f"{one.host.name}: {one.problem}" for one in connections if one.problem]
    if problems:
        count = f"{len(problems)} of {len(connections)} hosts" if len(connections) > 1 else "the host"
        raise HostProblem(f"{count} cannot take part\n  " + "\n  ".join(problems))


def table(connections: Sequence[HostConnection], root: str = "scheduler") -> str:
    """All hosts, a line each, with the columns that have something in them.

    Args:
        connections: the hosts.
        root: the title of the column that says whether the root was reached.
    """
    titles = ("host", "address", "python", "kvdist", "cores", "GPUs", "free", root)
    rows = [[one.host.name, *_cells(one)] for one in connections]
    filled = [place for place in range(len(titles)) if any(len(row) > place and row[place] for row in rows)]
    return text_table(
        [titles[place] for place in filled], [[row[place] for place in filled if place < len(row)] for row in rows]
    )


def _cells(one: HostConnection) -> list[str]:
    facts, found = one.facts, one.found
    if not facts:
        return ["no connection"]
    free = found.get("folder", {}).get("free_bytes")
    unreachable = found.get("unreachable")
    return [
        "this machine" if one.is_here else one.address,
        str(facts["python_version"]),
        str(facts["version"]),
        str(facts["cores"]),
        str(facts["gpus"]),
        "" if free is None else _size(free),
        "" if unreachable is None else "no" if unreachable else "reached",
    ]


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
