"""Identity and settings of this process, from its environment, which no other module reads.

A job with servers is described by kvdist's variables (``DMLC_*`` or ``KVDIST_*``). A job without servers may be started
by other launchers, each with its set of variables. The first launcher in `LAUNCHERS` that has any variable set counts,
and it must have set all that are needed: half of a description is an error, never a guess.

Some launchers describe machines not at all, or not completely. The local and cross numbers are then assumed, and
`placed` corrects them once the ranks have met and know each other's hosts.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvdist.config import foreign
from kvdist.config.addresses import address_of_interface
from kvdist.config.endpoints import expand_ranges, is_loopback
from kvdist.config.foreign import HOROVOD_VARIABLES, MXNET_VARIABLES
from kvdist.config.paths import expanded
from kvdist.config.processes import this_process
from kvdist.config.settings import (
    CLUSTER_VARIABLES,
    HOROVOD_INTERFACE,
    HOROVOD_LOG_LEVEL,
    PATHS,
    PYTHON_LEVELS,
    REPLACED_BY_PATIENCE,
    SETTINGS,
    STALL_CHECK_DISABLE,
    TWINS,
    ClusterConfig,
    CollectiveSettings,
    Limits,
    Setting,
    Variables,
    check_security,
    read_view,
    refuse_replaced,
    with_twins,
)
from kvdist.config.suggestions import did_you_mean
from kvdist.errors import ConfigError
from kvdist.nodes import Role

# What the environment of this process says. `environ` is read instead of it where it is given.


def read_setting(variable: str, environ: Variables | None = None) -> Any:
    """The value of a setting: see the table in `kvdist.config.settings`.

    Args:
        variable: our name of the variable, such as ``KVDIST_KERNELS``.

    Raises:
        ConfigError: the value is not valid.
    """
    row = SETTINGS[variable]
    return row.read(_with_paths(_variables(environ), [row]))


INTERNAL = frozenset({"KVDIST_TAKEN_BY", "KVDIST_WATCHDOG", *REPLACED_BY_PATIENCE})
"""``KVDIST_*`` variables that are no settings: variables of the launcher, and variables that are refused by name."""


def unknown_variables(environ: Variables | None = None) -> list[str]:
    """A warning for each ``KVDIST_*`` variable that is no setting."""
    names = [name for name, value in sorted(_variables(environ).items()) if value and name.startswith("KVDIST_")]
    return [
        f"{name} is no setting; {did_you_mean(name, list(SETTINGS), 1) or 'kvdist config lists all'}"
        for name in names
        if name not in SETTINGS and name not in INTERNAL
    ]


def limits_from_env(environ: Variables | None = None) -> Limits:
    """The bounds on memory, messages and waits.

    Raises:
        ConfigError: a variable is not valid, does not fit another, or is of an earlier version.
    """
    env = _without_horovod(_variables(environ))
    refuse_replaced(env)
    limits = read_view(Limits, env)
    for name in ("slice_bytes", "priority_slice_bytes"):
        if getattr(limits, name) > limits.frame_bytes_max:
            raise ConfigError(
                f"KVDIST_{name.upper()} is {getattr(limits, name)}; a slice travels in one frame, so it must be at most"
                f" KVDIST_FRAME_BYTES_MAX, {limits.frame_bytes_max}"
            )
    if 0 < limits.stall_shutdown_s < 2 * limits.explain_after_s:
        # Who is awaited has to be known by then.
        return replace(limits, explain_after_s=limits.stall_shutdown_s / 2)
    return limits


def cluster_from_env(environ: Variables | None = None) -> ClusterConfig | None:
    """The cluster that the environment describes; None if it describes no cluster.

    Raises:
        ConfigError: some but not all of the needed variables are set, a value is not valid, or another launcher
            (torchrun, mpirun, srun) started several tasks without a cluster for them.
    """
    env = _with_paths(_without_horovod(_variables(environ)))
    given = {name: text for name in CLUSTER_VARIABLES if (text := SETTINGS[name].text(env)[0])}
    if given in ({}, {"KVDIST_ROLE": "worker"}):
        _refuse_other_launchers(_variables(environ))
        return None
    SETTINGS["KVDIST_ROLE"].read(env)  # a mistyped role is worse than what is missing
    present = list(given)
    missing = [name for name in CLUSTER_VARIABLES if name not in present]
    if missing:
        raise ConfigError(
            f"the environment describes half a cluster: {_listed(present)} set, {_listed(missing)} missing. Start with"
            " kvdist-launch, which sets them all, or set the missing ones"
        )
    node_host, interface = SETTINGS["KVDIST_NODE_HOST"].read(env), SETTINGS["KVDIST_INTERFACE"].read(env)
    if node_host is None and interface is not None:
        node_host = address_of_interface(interface, prefers_ipv6=":" in given["KVDIST_ROOT_URI"])
    return read_view(ClusterConfig, env, node_host=node_host, limits=limits_from_env(env))


def embedded_cluster_from_env(environ: Variables | None = None) -> ClusterConfig:
    """A cluster of a worker and a server inside this process, with the limits that the environment sets.

    Raises:
        ConfigError: a value is not valid.
    """
    env = _without_horovod(_variables(environ))
    # There is nothing to encrypt here, but a mistake is one here too.
    check_security(SETTINGS["KVDIST_SECURITY"].read(env), SETTINGS["KVDIST_SECRET_FILE"].read(env))
    read = {name: SETTINGS[variable].read(env) for name, variable in EMBEDDED.items()}
    return ClusterConfig(Role.WORKER, "this process", 1, 1, 1, **read, limits=limits_from_env(env))


EMBEDDED = {"bigarray_bound": "KVDIST_BIGARRAY_BOUND", "server_devices": "KVDIST_SERVER_DEVICE"}


def world_from_env(environ: Variables | None = None) -> World:
    """Rank, size and meeting point of this process in a job without servers.

    Raises:
        ConfigError: its launcher has set only half of the variables, or the job has servers.
    """
    return world_of(with_twins(_variables(environ)), os.getppid())


def collective_settings_from_env(environ: Variables | None = None) -> CollectiveSettings:
    """The settings of a rank in a job without servers; Horovod's variables are read where ours are not set.

    Raises:
        ConfigError: a value is not valid.
    """
    env = _with_paths(_variables(environ))
    refuse_replaced(env)
    settings = read_view(CollectiveSettings, env)
    check_security(settings.security, settings.secret_file)
    if settings.interface is None:
        settings = replace(settings, interface=HOROVOD_INTERFACE.read(env))
    if STALL_CHECK_DISABLE.read(env) and not env.get("KVDIST_STALL_CHECK_S"):
        return replace(settings, stall_check_s=0.0)
    return settings


def describes_cluster(environ: Variables | None = None) -> bool:
    """Whether a variable is set that describes a cluster to a process, even if others are missing."""
    env = _variables(environ)
    return any(SETTINGS[name].text(env)[0] for name in CLUSTER_VARIABLES)


def is_launched(environ: Variables | None = None) -> bool:
    """Whether a launcher started this process and set its variables, including the user's settings."""
    return any(_variables(environ).get(name) for name in ("KVDIST_LOCAL_RANK", "KVDIST_SUPERVISED"))


def source_of(variable: str, environ: Variables | None = None) -> str:
    """Name of the variable from which a setting has its value; '' for the default.

    Args:
        variable: our name of the variable.

    Raises:
        ConfigError: a variable of another form, such as Horovod's, sets it to a value that is not valid.
    """
    return SETTINGS[variable].text(_variables(environ))[1]


def has_servers_from_env(environ: Variables | None = None) -> bool:
    """Whether this process is part of a job with servers, through which its ranks meet (see `World`)."""
    return with_twins(_variables(environ)).get("KVDIST_NUM_SERVER", "0") != "0"


def profile_dir_from_env(environ: Variables | None = None) -> Path:
    """The folder of traces whose names have no folder (``KVDIST_PROFILE_DIR``), by default the current folder."""
    return Path(read_setting("KVDIST_PROFILE_DIR", environ) or ".").absolute()


def checkpoint_root_from_env(environ: Variables | None = None) -> Path:
    """The folder below which this process writes and reads checkpoints that other processes name.

    By default it is the current folder.

    Raises:
        ConfigError: the path is not absolute; or it is not set, and the current folder was removed.
    """
    root = read_setting("KVDIST_CHECKPOINT_ROOT", environ)
    try:
        return Path(root or Path.cwd())
    except FileNotFoundError:
        raise ConfigError("the current folder was removed: change to another one") from None


def without_effect(environ: Variables | None = None) -> list[str]:
    """A warning for each variable of MXNet that is set and has no effect in kvdist."""
    env = _variables(environ)
    is_p3 = (env.get("DMLC_PS_VAN_TYPE") or "").lower() == "p3"
    found = [name for name in MXNET_VARIABLES if env.get(name) and not (is_p3 and name == "DMLC_PS_VAN_TYPE")]
    return foreign.without_effect(found)


def horovod_without_effect(environ: Variables | None = None) -> list[str]:
    """A warning for each variable of Horovod that is set and has no effect in kvdist."""
    env = _variables(environ)
    found = [name for name in HOROVOD_VARIABLES if env.get(name, "").lower() not in ("", "0", "gloo")]
    return foreign.without_effect(found)


def horovod_log_level(environ: Variables | None = None) -> str | None:
    """Python's name of the level in ``HOROVOD_LOG_LEVEL``; None if it is not set.

    Raises:
        ConfigError: the level is unknown.
    """
    level = HOROVOD_LOG_LEVEL.read(_variables(environ))
    return None if level is None else PYTHON_LEVELS.get(level, level.upper())


# The place of this process in its job. Children inherit the variables that describe it, and cannot have it too.

TAKEN = "KVDIST_TAKEN_BY"
"""Variable that a process which takes its place sets for its children: its `this_process`, its name, and the place."""


def require_own_place(place: str) -> None:
    """Refuse a place that this process has inherited from a process that has taken it.

    Args:
        place: place of this process, as for `take_place`.

    Raises:
        ConfigError: this process is a child of the process that has the place.
    """
    word, _, rest = os.environ.get(TAKEN, "").partition(" ")
    name, _, taken = rest.partition(" ")
    if taken != place or word == this_process():
        return
    by = ", started by multiprocessing," if is_of_multiprocessing() else ""
    raise ConfigError(
        f"this process ({os.getpid()}) is a child of {name} (process {word.partition('.')[0]}){by} and cannot have its"
        " place in the job, whose variables it has inherited. A script that starts processes by spawn or forkserver,"
        ' as a DataLoader can, is run again by each of them: put what it does below `if __name__ == "__main__":`.'
        " Another program must be started without the variables that describe this job"
    )


def is_of_multiprocessing() -> bool:
    """Whether multiprocessing has started this process."""
    process = sys.modules.get("multiprocessing.process")  # which is there, then
    if process is None:
        return False
    return process.parent_process() is not None or getattr(process.current_process(), "_inheriting", False)


def take_place(name: str, place: str) -> None:
    """Record for children of this process that the place they inherit is taken.

    Args:
        name: name of this process in messages.
        place: text from the variables of this process that no other process has at the same time.
    """
    os.environ[TAKEN] = f"{this_process()} {name} {place}"


def place_of_rank() -> str:
    """The place of this process in a job without servers; '' in a job of a single process."""
    world = world_of(with_twins(os.environ))  # a child has another parent
    where = world.meeting
    return f"rank {world.rank} of {world.size} at {where.host}:{where.port} in {where.job}" if world.size > 1 else ""


def keep_descriptor(descriptor: int) -> None:
    """Keep an inherited descriptor, which has been read, from children, where its number may be another file."""
    os.environ.pop("KVDIST_LISTEN_FD", None)
    with contextlib.suppress(OSError, OverflowError):  # who listens at it says what is wrong with it
        os.set_inheritable(descriptor, False)


def _variables(environ: Variables | None) -> Variables:
    return os.environ if environ is None else environ


def _with_paths(env: Variables, rows: Iterable[Setting] = SETTINGS.values()) -> Variables:
    """The variables, with the paths in these settings expanded.

    Raises:
        ConfigError: a path has a ``~`` or a ``$NAME`` that cannot be expanded.
    """
    found = {}
    for text, name in [row.text(env) for row in rows if row.kind in PATHS]:
        try:
            found[name] = expanded(text)
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    found.pop("", None)  # of those that are not set
    return {**env, **found} if found else env


def _without_horovod(env: Variables) -> Variables:
    """The variables without those of Horovod, which are about jobs without servers."""
    return {name: text for name, text in env.items() if not name.startswith("HOROVOD_")}


def _listed(names: list[str]) -> str:
    return ", ".join(SETTINGS[name].name for name in names) + (" is" if len(names) == 1 else " are")


def _refuse_other_launchers(env: Variables) -> None:
    for launcher in LAUNCHERS[1:]:
        size = env.get(launcher.size, "")
        if size.isdigit() and int(size) > 1 and launcher.rank in env:
            raise ConfigError(
                f"{launcher.name} started {size} tasks ({launcher.size}={size}), but no kvdist cluster is described:"
                " each task would train a model of its own. Start with kvdist-launch -n WORKERS -s SERVERS COMMAND"
                " instead, or take kv.create('collective'), which needs no servers"
            )


# Jobs without servers.

PORTS = range(20_000, 30_000)
"""Ports of rank 0 if only the number of the job is known, which selects the port."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Meeting point of the ranks of a job.

    Attributes:
        host: host at which rank 0 listens; '' if all ranks are on one machine and it chooses a port, see `job`.
        port: port at which rank 0 listens; 0 with '' as host.
        listen_fd: descriptor of the listening socket that rank 0 has inherited; None without such a socket.
        is_served: whether another process listens at the address already, for all ranks (torchrun's agent).
        job: a name that no other job on the machine has.
    """

    host: str = ""
    port: int = 0
    listen_fd: int | None = None
    is_served: bool = False
    job: str = "default"


@dataclass(frozen=True, slots=True)
class World:
    """Position of this process in a job without servers.

    Attributes:
        rank, size: rank among all processes, and their number.
        local_rank, local_size: rank among the processes of its machine, and their number.
        cross_rank, cross_size: rank among the workers with its local rank, a worker on each machine, and their number.
        launcher: name of the launcher; '' for a process without a launcher.
        meeting: meeting point of the ranks.
        is_assumed: whether the launcher left local or cross numbers open; see `placed`.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    launcher: str = ""
    meeting: Meeting = Meeting()
    is_assumed: bool = False


Pair = tuple[int, int]
"""A rank and a size."""
Places = Callable[[Variables], tuple[Pair | None, Pair | None]]
"""Function that reads the local and the cross numbers; None for numbers that the launcher does not set."""


@dataclass(frozen=True, slots=True)
class Launcher:
    """Variables by which a launcher describes a process.

    Attributes:
        name: name of the launcher in messages.
        rank, size: names of the variables of both; either without the other is an error.
        places: function that reads the local and the cross numbers.
        meeting: function that returns the meeting point of the ranks; None if they are on one machine and meet there.
        job: function that returns the name of a job on one machine, from its variables and the id of the parent
            process, which the ranks of a machine have in common.
        example: how to tell ranks on several machines where they meet.
        signs: other variables that only this launcher sets; they are an error without rank and size.
    """

    name: str
    rank: str
    size: str
    places: Places
    meeting: Callable[[Variables], Meeting | None]
    job: Callable[[Variables, int], str] = lambda *_: ""
    example: str = ""
    signs: tuple[str, ...] = ()


def world_of(env: Variables, parent: int = 0) -> World:
    """Position of a process with these variables; rank 0 of 1 if no launcher has set any.

    Args:
        env: variables; a variable with two names is under kvdist's name.
        parent: id of the parent process.

    Raises:
        ConfigError: a launcher has set only some of the needed variables, or a value that is not a number.
    """
    if _integer(env, "KVDIST_NUM_SERVER", 0) != 0:
        raise ConfigError(
            f"this job has servers ({TWINS['KVDIST_NUM_SERVER']}={env['KVDIST_NUM_SERVER']}), through which its ranks"
            " meet: use kv.create('collective') or kvdist.horovod.init(), or start it with -s 0"
        )
    for launcher in LAUNCHERS:
        if launcher.rank == "PMI_RANK" and _is_also_a_task_of_slurm(env):
            continue
        if env.get(launcher.rank) and env.get(launcher.size):
            return _world_by(launcher, env, parent)
        given = [name for name in (launcher.rank, launcher.size, *launcher.signs) if env.get(name)]
        if given:
            missing = " and ".join(_name(name) for name in (launcher.rank, launcher.size) if not env.get(name))
            raise ConfigError(
                f"{_name(given[0])} is set and {missing} not: {launcher.name} sets both. Start with it, or unset"
                f" {_name(given[0])}"
            )
    return World()


def placed(world: World, hosts: Sequence[Hashable]) -> World:
    """`world` with the local and cross numbers that follow from the hosts of all ranks.

    Args:
        world: position of this process.
        hosts: for each rank an identifier of its machine; see `this_machine`.
    """
    local, cross = positions(hosts)[world.rank]
    return World(world.rank, world.size, *local, *cross, world.launcher, world.meeting)


def positions(hosts: Sequence[Hashable]) -> list[tuple[Pair, Pair]]:
    """The local and the cross numbers of each rank, by the hosts of all ranks."""
    ranks_of: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    found: dict[int, tuple[Pair, Pair]] = {}
    for local_rank in range(max(map(len, ranks_of.values()), default=0)):
        across = [ranks for ranks in ranks_of.values() if len(ranks) > local_rank]
        for cross_rank, ranks in enumerate(across):
            found[ranks[local_rank]] = (local_rank, len(ranks)), (cross_rank, len(across))
    return [found[rank] for rank in range(len(hosts))]


def _world_by(launcher: Launcher, env: Variables, parent: int) -> World:
    rank, size = _pair(env, launcher.rank, launcher.size) or (0, 1)
    if size == 1:
        return World(rank, 1, launcher=launcher.name)
    local, cross = launcher.places(env)
    meeting = launcher.meeting(env)
    if meeting is None and local is not None and local[1] != size:
        raise ConfigError(
            f"the {size} processes of this job are on several machines, and nothing says where rank 0 can be reached:"
            f" pass its address and a free port of it to all of them, as in {launcher.example}"
        )
    meeting = meeting or Meeting(job=launcher.job(env, parent))
    is_assumed = local is None or (cross is None and local[1] != size)
    if local is None:
        is_here = not meeting.host or is_loopback(meeting.host)
        local = (rank, size) if is_here else (0, 1)
    if cross is None:
        cross = (rank // local[1], -(-size // local[1]))
    return World(rank, size, *local, *cross, launcher.name, meeting, is_assumed)


def _name(name: str) -> str:
    return TWINS.get(name, name)


def _integer(env: Variables, name: str, default: int | None = None) -> int:
    text = env.get(name, "")
    if not text and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"{_name(name)} is {text!r}; it must be a whole number") from None


# Local and cross numbers.


def _named(local: tuple[str, str], cross: tuple[str, str] | None = None) -> Places:
    """A function that reads the local and the cross numbers from variables of these names."""
    return lambda env: (_pair(env, *local), None if cross is None else _pair(env, *cross))


def _pair(env: Variables, rank: str, size: str) -> Pair | None:
    given = [name for name in (rank, size) if env.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = size if given[0] == rank else rank
        raise ConfigError(f"{given[0]} is set and {missing} is not: set both, or none")
    pair = _integer(env, rank), _integer(env, size)
    if not 0 <= pair[0] < pair[1]:
        raise ConfigError(
            f"{_name(rank)} is {pair[0]} and {_name(size)} is {pair[1]}; ranks count from 0 to the size - 1"
        )
    return pair


def _of_agents(env: Variables) -> tuple[Pair | None, Pair | None]:
    """Torchrun's numbers: the rank of a machine's agent is the cross rank if all machines have as many processes."""
    local, agents = _pair(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), _pair(env, "GROUP_RANK", "GROUP_WORLD_SIZE")
    is_even = local is not None and agents is not None and local[1] * agents[1] == _integer(env, "WORLD_SIZE")
    return local, agents if is_even else None


def _of_tasks(env: Variables) -> tuple[Pair | None, Pair | None]:
    """A task's numbers from Slurm's list of the number of tasks on each node."""
    if not env.get("SLURM_STEP_NODELIST"):
        raise ConfigError(
            f"Slurm has allotted {env['SLURM_NTASKS']} tasks, but this process is not one of them, as"
            " SLURM_STEP_NODELIST is not set: start it with srun"
        )
    names = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    missing = [name for name in names if not env.get(name)]
    if len(missing) == len(names):
        return None, None
    if missing:
        raise ConfigError(f"{missing[0]} is not set, and Slurm's srun sets all of {', '.join(names)}")
    local, node, tasks = _integer(env, names[0]), _integer(env, names[1]), tasks_of(env[names[2]])
    if not (0 <= node < len(tasks) and 0 <= local < tasks[node]):
        raise ConfigError(f"{names[0]}={local} and {names[1]}={node} contradict {names[2]}={env[names[2]]}")
    across = [index for index, count in enumerate(tasks) if count > local]
    return (local, tasks[node]), (across.index(node), len(across))


def _is_also_a_task_of_slurm(env: Variables) -> bool:
    """Whether srun has set the PMI variables too: ranks and sizes agree, but only Slurm's describe machines."""
    same = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_NTASKS"))
    return not env.get("MPI_LOCALRANKID") and all(env.get(a) and env.get(a) == env.get(b) for a, b in same)


# Where they meet.


def _at_root(env: Variables) -> Meeting:
    """Meeting point of jobs of kvdist-launch and kvdist-run."""
    missing = [name for name in ("KVDIST_ROOT_URI", "KVDIST_ROOT_PORT") if not env.get(name)]
    if missing:
        raise ConfigError(
            f"the environment describes half a job without servers: {' and '.join(map(_name, missing))} missing. Start"
            " with kvdist-launch -s 0, which sets them all"
        )
    descriptor = _integer(env, "KVDIST_LISTEN_FD", -1)
    return Meeting(
        env["KVDIST_ROOT_URI"],
        _port(env, "KVDIST_ROOT_PORT"),
        None if descriptor < 0 else descriptor,
        job=env.get("KVDIST_JOB") or "default",
    )


def _at_master(env: Variables) -> Meeting | None:
    """Meeting point from torch's variables, which users also set for other launchers; None without them."""
    given = [name for name in ("MASTER_ADDR", "MASTER_PORT") if env.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = "MASTER_PORT" if given[0] == "MASTER_ADDR" else "MASTER_ADDR"
        raise ConfigError(f"{given[0]} is set and {missing} is not: set both, or none")
    served = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    # A launcher that restarts its processes lets them meet at the same place again.
    job = f"{env.get('TORCHELASTIC_RUN_ID') or 'torch'}.{env.get('TORCHELASTIC_RESTART_COUNT') or '0'}"
    return Meeting(env["MASTER_ADDR"], _port(env, "MASTER_PORT"), None, served, job)


def _of_torchrun(env: Variables) -> Meeting:
    meeting = _at_master(env)
    if meeting is None:
        raise ConfigError("RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: set all four")
    return meeting


def _of_horovod(env: Variables) -> Meeting | None:
    found = _at_master(env)
    if found is None and (env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")):
        raise ConfigError(
            "this process was started by horovodrun, whose meeting point other programs cannot use: start it with"
            " kvdist-run, which takes the same options"
        )
    return found


def _of_slurm(env: Variables) -> Meeting:
    found = _at_master(env)
    if found is not None:
        return found
    job, step = _integer(env, "SLURM_JOB_ID", 0), _integer(env, "SLURM_STEP_ID", 0)
    name, hosts = f"slurm.{job}.{step}", hosts_of(env["SLURM_STEP_NODELIST"])
    if len(hosts) == 1:
        return Meeting(job=name)
    return Meeting(hosts[0], PORTS[(16 * job + step) % len(PORTS)], job=name)


def _port(env: Variables, name: str) -> int:
    port = _integer(env, name)
    if not 1 <= port <= 65535:
        raise ConfigError(f"{_name(name)} is {port}; a port is a number from 1 to 65535")
    return port


# Slurm's lists.

ENTRIES_MAX = 65_536
"""Largest number of entries for which a list, a few characters long, may stand; more are a mistake."""


def hosts_of(nodes: str) -> list[str]:
    """The hosts of a Slurm list like ``login,gpu[01-03,7],r[1-2]n[1-2]``, in its order.

    Raises:
        ConfigError: the text is not such a list.
    """
    parts = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", nodes)
    if ",".join(parts) != nodes:
        raise ConfigError(f"not a valid Slurm host list: {_short(nodes)}; expected one such as gpu[01-03,7]")
    hosts: list[str] = []
    try:
        for part in parts:
            hosts += expand_ranges(part, ENTRIES_MAX - len(hosts))
    except ValueError as error:
        raise ConfigError(f"not a valid Slurm host list: {_short(nodes)}: {error}") from None
    return hosts


def tasks_of(counts: str) -> list[int]:
    """The numbers of tasks of the nodes in a list like ``2(x3),1``, in its order.

    Raises:
        ConfigError: the text is not such a list.
    """
    found: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part)
        if match is None or len(found) + int(match.group(2) or 1) > ENTRIES_MAX:
            raise ConfigError(f"not a valid Slurm list of task counts: {_short(counts)}; expected one such as 2(x3),1")
        found += [int(match.group(1))] * int(match.group(2) or 1)
    return found


def _short(text: str, most: int = 80) -> str:
    return repr(text if len(text) <= most else text[:most] + "...")


LAUNCHERS = (
    Launcher(
        "kvdist-launch",
        "KVDIST_RANK",
        "KVDIST_NUM_WORKER",
        _named(("KVDIST_LOCAL_RANK", "KVDIST_LOCAL_SIZE"), ("KVDIST_CROSS_RANK", "KVDIST_CROSS_SIZE")),
        _at_root,
        signs=("KVDIST_NUM_SERVER", "KVDIST_ROOT_URI", "KVDIST_ROOT_PORT"),
    ),
    Launcher(
        "horovodrun",
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        _named(("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"), ("HOROVOD_CROSS_RANK", "HOROVOD_CROSS_SIZE")),
        _of_horovod,
        lambda _, parent: f"horovod.{parent}",
        "MASTER_ADDR=node1 MASTER_PORT=29500 ...",
    ),
    Launcher(
        "torchrun",
        "RANK",
        "WORLD_SIZE",
        _of_agents,
        _of_torchrun,
    ),
    Launcher(
        "Open MPI's mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        _named(("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")),
        _at_master,
        lambda env, parent: f"ompi.{env.get('PMIX_NAMESPACE') or env.get('OMPI_MCA_ess_base_jobid') or parent}",
        "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ...",
    ),
    Launcher(
        "mpiexec (PMI)",
        "PMI_RANK",
        "PMI_SIZE",
        _named(("MPI_LOCALRANKID", "MPI_LOCALNRANKS")),
        _at_master,
        # MPICH has no variable that is the same for all ranks of a job and another for the next job.
        lambda env, parent: f"pmi.{env.get('PMI_JOBID') or parent}",
        "mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 ...",
    ),
    Launcher("Slurm's srun", "SLURM_PROCID", "SLURM_NTASKS", _of_tasks, _of_slurm),
)
"""All launchers, in the order in which their variables are looked up."""
