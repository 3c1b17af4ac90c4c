"""The roles of a job, where another system chooses the hosts and gives every process its number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvdist.nodes import Role
from kvdist_launch.environment import Environment
from kvdist_launch.hosts import Host
from kvdist_launch.plan import DEVICES, HostFacts, JobSpec, plan

PLACES = ("KVDIST_LOCAL_RANK", "KVDIST_LOCAL_SIZE", "KVDIST_CROSS_RANK", "KVDIST_CROSS_SIZE")
"""How a worker stands among the others, which depends on the hosts that the other system chooses."""

OF_ONE_PROCESS = frozenset({"KVDIST_RANK", *PLACES, "KVDIST_SUPERVISED", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"})
"""What differs within a role or is known only where a process runs; and nobody tells a scheduler of endings."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """All processes of one role.

    Attributes:
        count: how many there are.
        argv: what each runs.
        environment: what is changed about the environment of each, but for `OF_ONE_PROCESS`.
    """

    role: Role
    count: int
    argv: tuple[str, ...]
    environment: Environment


def parts_of(job: JobSpec, launcher: HostFacts, python: str) -> list[RoleSpec]:
    """The scheduler, the servers and the workers of `job`.

    Args:
        launcher: the launching machine, whose environment is forwarded as to any other host.
        python: the interpreter of schedulers and servers.

    Raises:
        ConfigError: a variable has an impossible value.
    """
    environ = {name: value for name, value in launcher.environ.items() if name != DEVICES}
    elsewhere = HostFacts(cores=0, python=python, address="elsewhere")
    # Which devices a worker has, the other system decides, unless the user asks for the same in every one.
    job = replace(job, scheduler_host=0)
    processes = plan(job, [Host("elsewhere")], [elsewhere], replace(launcher, environ=environ))
    parts = []
    for role, count in ((Role.SCHEDULER, 1), (Role.SERVER, job.num_servers), (Role.WORKER, job.num_workers)):
        first = next(process for process in processes if process.node.role is role)
        settings = {name: text for name, text in first.environment.settings.items() if name not in OF_ONE_PROCESS}
        wished = {**job.env, **(job.env_worker if role is Role.WORKER else {})}
        settings.update({DEVICES: wished[DEVICES]} if DEVICES in wished else {})
        parts.append(RoleSpec(role, count, first.argv, replace(first.environment, settings=settings)))
    return parts
