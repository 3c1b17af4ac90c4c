"""What a job consists of: one list of processes, each with its argv and its whole environment.

Pure: nothing here starts a process or reads the machine, so a plan can be compared with a file and printed. No
shell ever sees an argument or a value; they reach the processes byte for byte, whatever they contain.

A process's environment is, later ones winning: the launcher's own without the variables of an earlier job,
defaults that the user may override, ``--env``, the role's ``--env-…``, and last who the process is in the cluster.
torchrun's variables (RANK, WORLD_SIZE and so on) are never set: libraries would go distributed on seeing them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from kvdist.config import CLUSTER_VARIABLES, TWINS, ClusterConfig
from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, NodeId, Role, server, worker

OWNED_VARIABLES = frozenset(
    [
        *CLUSTER_VARIABLES,
        *(TWINS[name] for name in CLUSTER_VARIABLES),
        "KVDIST_RANK",
        "KVDIST_LOCAL_RANK",
        "KVDIST_JOB",
        "KVDIST_SUPERVISED",
    ]
)
"""Who a process is: set by the launcher alone, and never taken over from the environment it was started in."""

OTHER_NAME = {**TWINS, **{theirs: ours for ours, theirs in TWINS.items()}}
"""For each variable that has two names, the other one."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process to start.

    Attributes:
        node: its seat in the cluster.
        argv: the program and its arguments.
        env: its whole environment.
        is_told_of_endings: whether its standard input carries one line for each process that ended
            (``ended worker 1 exit 3``); the input of the others is empty.
    """

    node: NodeId
    argv: tuple[str, ...]
    env: Mapping[str, str]
    is_told_of_endings: bool = False


@dataclass(frozen=True)
class Job:
    """What the user asked for.

    Attributes:
        command: the worker's program and arguments.
        role_command: the program and arguments of schedulers and servers.
        port: the scheduler's TCP port on `host`.
        name: a token unlike that of any other job.
        cores: CPU cores that all workers share.
        env, env_server, env_worker: variables for every process, for servers, for workers.
    """

    num_workers: int
    num_servers: int
    command: tuple[str, ...]
    role_command: tuple[str, ...]
    port: int
    name: str
    host: str = "127.0.0.1"
    cores: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    env_server: Mapping[str, str] = field(default_factory=dict)
    env_worker: Mapping[str, str] = field(default_factory=dict)

    @property
    def nodes(self) -> list[NodeId]:
        """The seats in the order in which they are started: those that others wait for come first."""
        return [SCHEDULER, *map(server, range(self.num_servers)), *map(worker, range(self.num_workers))]


def plan(job: Job, environ: Mapping[str, str]) -> list[Process]:
    """The processes of `job`, in starting order, when the launcher's environment is `environ`.

    Raises:
        ConfigError: a variable has an impossible value; the message names it.
    """
    return [
        Process(
            node,
            job.command if node.role is Role.WORKER else job.role_command,
            _environment(job, node, environ),
            is_told_of_endings=node.role is Role.SCHEDULER,
        )
        for node in job.nodes
    ]


def threads_per_worker(cores: int, num_workers: int) -> int:
    """How many threads each worker's numerical libraries should use so that together they fill the cores."""
    return max(1, cores // num_workers)


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """``NAME=VALUE`` texts as a dictionary; MXNet's ``NAME:VALUE`` is understood too.

    The first character that cannot be part of a name decides, so values may contain both separators.

    Raises:
        ConfigError: a text has neither form, or names a variable that the launcher sets itself.
    """
    variables = {}
    for text in texts:
        match = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)[=:](.*)", text, re.DOTALL)
        if match is None:
            raise ConfigError(f"{text!r} does not set a variable; write NAME=VALUE, as in --env LOG_LEVEL=debug")
        name, value = match.groups()
        if name in OWNED_VARIABLES:
            raise ConfigError(f"{name} is set by kvdist-launch for each process; leave out {text!r}")
        variables[name] = value
    return variables


def _environment(job: Job, node: NodeId, environ: Mapping[str, str]) -> dict[str, str]:
    env = {"PYTHONUNBUFFERED": "1"}
    if node.role is Role.WORKER:
        env["OMP_NUM_THREADS"] = str(threads_per_worker(job.cores, job.num_workers))
    own: Mapping[str, str] = {Role.SERVER: job.env_server, Role.WORKER: job.env_worker}.get(node.role, {})
    env.update((name, value) for name, value in environ.items() if name not in OWNED_VARIABLES)
    for variables in (job.env, own):
        for name, value in variables.items():
            # A variable that has two names would otherwise keep the value that this one is meant to replace.
            env.pop(OTHER_NAME.get(name, ""), None)
            env[name] = value
    # Read through the configuration so that the user's settings (limits, placement and so on) are checked before
    # anything starts, and kept.
    config = ClusterConfig.from_env({**env, **_identity(job, node)})
    if config is None:
        raise ConfigError(f"the launcher described no cluster to {node}")
    env.update(config.to_env())
    if node.role is Role.WORKER:
        env["KVDIST_LOCAL_RANK"] = str(node.rank)
    return env


def _identity(job: Job, node: NodeId) -> dict[str, str]:
    cluster = ClusterConfig(
        role=node.role,
        root_host=job.host,
        root_port=job.port,
        num_workers=job.num_workers,
        num_servers=job.num_servers,
        rank=node.rank,
        job=job.name,
        supervised=node.role is Role.SCHEDULER,
    )
    return {name: value for name, value in cluster.to_env().items() if name in OWNED_VARIABLES}
