"""The roles of a job, if another system chooses the hosts and gives every process its number."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvdist.nodes import Role
from kvdist_launch.environment import Environment
from kvdist_launch.hosts import Host
from kvdist_launch.plan import DEVICES, HostFacts, JobSpec, plan

PLACES = ("KVDIST_LOCAL_RANK", "KVDIST_LOCAL_SIZE", "KVDIST_CROSS_RANK", "KVDIST_CROSS_SIZE")
"""A worker's position among the others, which depends on the hosts that the other system chooses."""

OF_ONE_PROCESS = frozenset({"KVDIST_RANK", *PLACES, "KVDIST_SUPERVISED", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"})
"""Variables that differ within a role or are known only on the host; and the scheduler has no supervisor there."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """All processes of one role.

    Attributes:
        count: how many there are.
        argv: what each runs.
        environment: the changes to the environment of each, without `OF_ONE_PROCESS`.
    """

    role: Role
    count: int
    argv: tuple[str, ...]
    environment: Environment


def roles_of(job: JobSpec, launcher: HostFacts, python: str) -> list[RoleSpec]:
    """The scheduler, the servers and the workers of `job`.

    Args:
        launcher: the launching machine, whose environment is forwarded as to any other host.
        python: the interpreter of schedulers and servers.

    Raises:
        ConfigError: a variable has an impossible value.
    """
    environ = {name: value for name, value in launcher.environ.items() if name != DEVICES}
    elsewhere = HostFacts(cores=0, python=python, address="elsewhere")
    # The other system gives a worker its devices, unless the user asks for the same for all.
    job = replace(job, scheduler_host=0)
    processes = plan(job, [Host("elsewhere")], [elsewhere], replace(launcher, environ=environ))
    roles = []
    for role, count in ((Role.SCHEDULER, 1), (Role.SERVER, job.num_servers), (Role.WORKER, job.num_workers)):
        first = next(process for process in processes if process.node.role is role)
        settings = {name: text for name, text in first.environment.settings.items() if name not in OF_ONE_PROCESS}
        asked = {**job.env, **(job.env_worker if role is Role.WORKER else {})}
        settings.update({DEVICES: asked[DEVICES]} if DEVICES in asked else {})
        roles.append(RoleSpec(role, count, first.argv, replace(first.environment, settings=settings)))
    return roles
