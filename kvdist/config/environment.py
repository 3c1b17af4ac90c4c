"""Who this process is among those that train together without servers, whatever has started them.

Every launcher says it with variables of its own. The first one in `LAUNCHERS` of which any variable is set counts, and
must have set all that are needed: half of a description is an error, never a guess. `settings` reads the variables.

Some launchers say nothing of machines, or not enough. What follows for a process from the rest is then assumed, and
`placed` puts it right once the ranks have met and know each other's hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvdist.config.addresses import is_loopback
from kvdist.config.slurm import hosts_of, tasks_of
from kvdist.config.variables import TWINS, integer
from kvdist.errors import ConfigError

PORTS = range(20_000, 30_000)
"""Where rank 0 listens when only the number of a job is known, chosen by that number."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks of a job find each other.

    Attributes:
        host: where rank 0 listens; '' when all ranks are on one machine and it chooses a port, see `job`.
        port: at which port; 0 with '' as host.
        listen_fd: rank 0 has inherited the listening socket under this descriptor.
        is_served: somebody else listens there already, for all ranks (torchrun's agent).
        job: unlike that of any other job on the machine.
    """

    host: str = ""
    port: int = 0
    listen_fd: int | None = None
    is_served: bool = False
    job: str = "default"


@dataclass(frozen=True, slots=True)
class World:
    """Who this process is.

    Attributes:
        rank, size: among all processes.
        local_rank, local_size: among those of its machine.
        cross_rank, cross_size: among those that have its local rank, one on each machine.
        launcher: what has said so; '' for nobody.
        meeting: where the others are found.
        is_assumed: whether nobody has said all of the local and cross numbers; see `placed`.
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

    def __post_init__(self) -> None:
        for what, rank, size in (
            ("rank", self.rank, self.size),
            ("local rank", self.local_rank, self.local_size),
            ("cross rank", self.cross_rank, self.cross_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(f"{self.launcher} says {what} {rank} of {size}; ranks count from 0 to the size - 1")


Variables = Mapping[str, str]
Pair = tuple[int, int]
"""A rank and a size."""
Places = Callable[[Variables], tuple[Pair | None, Pair | None]]
"""Reads the local and the cross numbers, each None where nobody says them."""


@dataclass(frozen=True, slots=True)
class Told:
    """What is known of a job when the meeting point is looked for.

    Attributes:
        size: the number of ranks.
        local_size: how many of them are on this machine; None if nobody says.
        parent: the process that has started this one, which the ranks of one machine have in common.
    """

    size: int
    local_size: int | None
    parent: int


@dataclass(frozen=True, slots=True)
class Launcher:
    """How one launcher tells a process who it is.

    Attributes:
        name: what people call it.
        rank, size: the variables that say both; one without the other is an error.
        places: reads the local and the cross numbers.
        meeting: finds where the ranks meet.
        signs: other variables that only this one sets; they are an error without rank and size.
    """

    name: str
    rank: str
    size: str
    places: Places
    meeting: Callable[[Variables, Told], Meeting]
    signs: tuple[str, ...] = ()


def world_of(env: Variables, parent: int = 0) -> World:
    """Who the process is that has these variables; rank 0 of 1 where no launcher has set any.

    Args:
        env: variables; of those with two names, under ours.
        parent: the process that has started this one.

    Raises:
        ConfigError: a launcher has set only some of what is needed, or something that is no number.
    """
    if integer(env, "KVDIST_NUM_SERVER", 0) != 0:
        raise ConfigError(
            f"this job has servers ({TWINS['KVDIST_NUM_SERVER']}={env['KVDIST_NUM_SERVER']}), through which its ranks"
            " meet: use kv.create('collective') or kvdist.horovod.init(), or start it with -s 0"
        )
    for launcher in LAUNCHERS:
        if launcher.rank == "PMI_RANK" and _is_also_a_task_of_slurm(env):
            continue
        if env.get(launcher.rank) and env.get(launcher.size):
            return _told_by(launcher, env, parent)
        given = [name for name in (launcher.rank, launcher.size, *launcher.signs) if env.get(name)]
        if given:
            missing = " and ".join(_shown(name) for name in (launcher.rank, launcher.size) if not env.get(name))
            raise ConfigError(
                f"{_shown(given[0])} is set and {missing} not: {launcher.name} sets both. Start with it, or unset"
                f" {_shown(given[0])}"
            )
    return World()


def placed(world: World, hosts: Sequence[Hashable]) -> World:
    """The same rank with the local and cross numbers that follow from where all ranks are.

    Args:
        world: who this process is.
        hosts: for each rank, what the ranks of its machine have in common and no others.
    """
    locals_of: dict[Hashable, list[int]] = {}
    for rank, host in enumerate(hosts):
        locals_of.setdefault(host, []).append(rank)
    mine = locals_of[hosts[world.rank]]
    local_rank = mine.index(world.rank)
    across = [ranks[local_rank] for ranks in locals_of.values() if len(ranks) > local_rank]
    return replace(
        world,
        local_rank=local_rank,
        local_size=len(mine),
        cross_rank=across.index(world.rank),
        cross_size=len(across),
        is_assumed=False,
    )


def _told_by(launcher: Launcher, env: Variables, parent: int) -> World:
    rank, size = integer(env, launcher.rank), integer(env, launcher.size)
    if size < 1:
        raise ConfigError(f"{_shown(launcher.size)} is {size}; there is at least 1 process")
    if size == 1:
        return World(rank, 1, launcher=launcher.name)
    local, cross = launcher.places(env)
    meeting = launcher.meeting(env, Told(size, None if local is None else local[1], parent))
    is_assumed = local is None or (cross is None and local[1] != size)
    if local is None:
        is_here = not meeting.host or is_loopback(meeting.host)
        local = (rank, size) if is_here else (0, 1)
    if cross is None:
        cross = (rank // local[1], -(-size // local[1]))
    return World(rank, size, *local, *cross, launcher.name, meeting, is_assumed)


def _shown(name: str) -> str:
    return TWINS.get(name, name)


# Local and cross numbers.


def _named(local: tuple[str, str], cross: tuple[str, str] | None = None) -> Places:
    """Reads variables of these names."""
    return lambda env: (_pair(env, *local), None if cross is None else _pair(env, *cross))


def _pair(env: Variables, rank: str, size: str) -> Pair | None:
    given = [name for name in (rank, size) if env.get(name)]
    if not given:
        return None
    if len(given) == 1:
        missing = size if given[0] == rank else rank
        raise ConfigError(f"{given[0]} is set and {missing} is not: set both, or none")
    pair = integer(env, rank), integer(env, size)
    if not 0 <= pair[0] < pair[1]:
        raise ConfigError(f"{rank} is {pair[0]} and {size} is {pair[1]}; ranks count from 0 to the size - 1")
    return pair


def _of_agents(env: Variables) -> tuple[Pair | None, Pair | None]:
    """Torchrun's numbers: each machine has an agent, which is no cross rank unless all have as many processes."""
    local, agents = _pair(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE"), _pair(env, "GROUP_RANK", "GROUP_WORLD_SIZE")
    is_even = local is not None and agents is not None and local[1] * agents[1] == integer(env, "WORLD_SIZE")
    return local, agents if is_even else None


def _of_tasks(env: Variables) -> tuple[Pair | None, Pair | None]:
    """A task's numbers from Slurm's list of how many tasks each node has."""
    if not env.get("SLURM_STEP_NODELIST"):
        raise ConfigError(
            f"Slurm has allotted {env['SLURM_NTASKS']} tasks, and this process is none of them, as SLURM_STEP_NODELIST"
            " is not set: start it with srun"
        )
    names = ("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_TASKS_PER_NODE")
    missing = [name for name in names if not env.get(name)]
    if len(missing) == len(names):
        return None, None
    if missing:
        raise ConfigError(f"{missing[0]} is not set, and Slurm's srun sets all of {', '.join(names)}")
    local, node, tasks = integer(env, names[0]), integer(env, names[1]), tasks_of(env[names[2]])
    if not (0 <= node < len(tasks) and 0 <= local < tasks[node]):
        raise ConfigError(
            f"{names[0]}={local} and {names[1]}={node} say another place than there is in {names[2]}={env[names[2]]}"
        )
    across = [index for index, count in enumerate(tasks) if count > local]
    return (local, tasks[node]), (across.index(node), len(across))


def _is_also_a_task_of_slurm(env: Variables) -> bool:
    """Whether srun itself speaks PMI: it says the same rank with either's variables, and machines only with its own."""
    same = (("PMI_RANK", "SLURM_PROCID"), ("PMI_SIZE", "SLURM_NTASKS"))
    return not env.get("MPI_LOCALRANKID") and all(env.get(a) and env.get(a) == env.get(b) for a, b in same)


# Where they meet.


def _at_root(env: Variables, _: Told) -> Meeting:
    """Jobs of kvdist-launch and kvdist-run."""
    missing = [name for name in ("KVDIST_ROOT_URI", "KVDIST_ROOT_PORT") if not env.get(name)]
    if missing:
        raise ConfigError(
            f"the environment describes half a job without servers: {' and '.join(map(_shown, missing))} missing. Start"
            " with kvdist-launch -s 0, which sets them all"
        )
    descriptor = integer(env, "KVDIST_LISTEN_FD", -1)
    return Meeting(
        env["KVDIST_ROOT_URI"],
        _port(env, "KVDIST_ROOT_PORT"),
        None if descriptor < 0 else descriptor,
        job=env.get("KVDIST_JOB") or "default",
    )


def _at_master(env: Variables) -> Meeting | None:
    """Torch's own variables, which people also pass to processes of other launchers."""
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


def _of_torchrun(env: Variables, _: Told) -> Meeting:
    meeting = _at_master(env)
    if meeting is None:
        raise ConfigError("RANK and WORLD_SIZE are set, MASTER_ADDR and MASTER_PORT are not: set all four")
    return meeting


def _of_horovod(env: Variables, told: Told) -> Meeting:
    found = _at_master(env)
    if found is None and (env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR") or env.get("HOROVOD_GLOO_RENDEZVOUS_PORT")):
        raise ConfigError(
            "this process was started by horovodrun, whose meeting point other programs cannot use: start it with"
            " kvdist-run, which takes the same options"
        )
    return found or _on_this_machine(told, f"horovod.{told.parent}", "MASTER_ADDR=node1 MASTER_PORT=29500 ...")


def _of_open_mpi(env: Variables, told: Told) -> Meeting:
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(told.parent)
    return _at_master(env) or _on_this_machine(
        told, f"ompi.{job}", "mpirun -x MASTER_ADDR=node1 -x MASTER_PORT=29500 ..."
    )


def _of_pmi(env: Variables, told: Told) -> Meeting:
    # MPICH has no variable that is the same for all ranks of a job and another for the next job.
    job = env.get("PMI_JOBID") or str(told.parent)
    return _at_master(env) or _on_this_machine(
        told, f"pmi.{job}", "mpiexec -genv MASTER_ADDR node1 -genv MASTER_PORT 29500 ..."
    )


def _on_this_machine(told: Told, job: str, example: str) -> Meeting:
    if told.local_size not in (None, told.size):
        raise ConfigError(
            f"the {told.size} processes of this job are on several machines, and nothing says where rank 0 can be"
            f" reached: pass its address and a free port of it to all of them, as in {example}"
        )
    return Meeting(job=job)


def _of_slurm(env: Variables, _: Told) -> Meeting:
    found = _at_master(env)
    if found is not None:
        return found
    job, step = integer(env, "SLURM_JOB_ID", 0), integer(env, "SLURM_STEP_ID", 0)
    name, hosts = f"slurm.{job}.{step}", hosts_of(env["SLURM_STEP_NODELIST"])
    if len(hosts) == 1:
        return Meeting(job=name)
    return Meeting(hosts[0], PORTS[(16 * job + step) % len(PORTS)], job=name)


def _port(env: Variables, name: str) -> int:
    port = integer(env, name)
    if not 1 <= port <= 65535:
        raise ConfigError(f"{_shown(name)} is {port}; a port is a number from 1 to 65535")
    return port


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
        _of_open_mpi,
    ),
    Launcher("mpiexec (PMI)", "PMI_RANK", "PMI_SIZE", _named(("MPI_LOCALRANKID", "MPI_LOCALNRANKS")), _of_pmi),
    Launcher("Slurm's srun", "SLURM_PROCID", "SLURM_NTASKS", _of_tasks, _of_slurm),
)
"""In the order in which they are asked."""
