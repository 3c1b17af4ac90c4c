"""Plan of a job: which process runs on which host, with which argv and which environment.

Pure: nothing in it starts a process or reads a machine, so a plan can be compared with a file and printed. No shell
ever sees an argument or a value; they reach the processes byte for byte.

Processes take turns over the hosts as in MXNet, servers first: number i of servers and workers together goes to host i
modulo the number of hosts; a host that does not take the role, or has no free slot, is skipped. Then ranks are assigned
in the order of the hosts, so worker 0 is on the first host with workers, and the workers of a host have consecutive
ranks. Horovod's way fills all slots of a host before the next.

A process's environment, later values win: the host's without the variables of an earlier job, defaults, forwarded
variables (other hosts only), ``--env``, the role's ``--env-...``, and the process's identity in the cluster. Settings
of kvdist come from the launching machine alone, so that all hosts have the same.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from kvdist.config.environment import cluster_from_env, positions
from kvdist.config.losses import LossPolicy
from kvdist.config.settings import ClusterConfig
from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, NodeId, Role
from kvdist_launch.environment import (
    ADDRESS_VARIABLES,
    OWNED_VARIABLES,
    RESTARTS,
    SECURITY_VARIABLES,
    Environment,
    forwarded,
    interpreter_front,
    overlay,
    redacted,
)
from kvdist_launch.hosts import Host
from kvdist_launch.security import SECURITY, Security
from kvdist_launch.security import VARIABLE as SECRET_FILE

THIS_MACHINE = "this machine"
LAUNCHER = -1
"""The index of the launching machine, which need not be among the hosts."""


@dataclass(frozen=True, slots=True)
class ProcessPlace:
    """Where a process runs.

    Attributes:
        host: an index into the job's hosts, or `LAUNCHER`.
        local_rank: counts the processes of this role on this host.
        local_size: number of processes of this role on this host.
        cross_rank: its host's position among the hosts that have a process of this role and local rank.
        cross_size: number of such hosts.
    """

    node: NodeId
    host: int
    local_rank: int
    local_size: int = 0
    cross_rank: int = 0
    cross_size: int = 0


def place(
    hosts: Sequence[Host],
    num_workers: int,
    num_servers: int,
    scheduler_host: int | None = None,
    is_filled: bool = False,
) -> list[ProcessPlace]:
    """The processes of a job in starting order: scheduler, servers, workers; without servers, workers alone.

    Args:
        hosts: the job's hosts.
        num_workers, num_servers: how many processes of each role to place.
        scheduler_host: an index into `hosts`; None is the launching machine.
        is_filled: whether workers take all slots of a host before those of the next.

    Raises:
        ConfigError: the hosts do not have room for all processes; the message names the sums.
    """
    counts: dict[Role, list[int]] = {Role.SERVER: [0] * len(hosts), Role.WORKER: [0] * len(hosts)}
    turn = 0
    for role, number in ((Role.SERVER, num_servers), (Role.WORKER, num_workers)):
        require_room(hosts, role, number)
        for _ in range(number):
            while not _has_room(hosts[turn % len(hosts)], role, counts[role][turn % len(hosts)]):
                turn += 1
            counts[role][turn % len(hosts)] += 1
            turn += 0 if is_filled and role is Role.WORKER else 1
    placements = (
        [ProcessPlace(SCHEDULER, LAUNCHER if scheduler_host is None else scheduler_host, 0)] if num_servers else []
    )
    for role, filled in counts.items():
        places = [index for index, count in enumerate(filled) for _ in range(count)]
        for rank, (local, cross) in enumerate(positions(places)):
            placements.append(ProcessPlace(NodeId(role, rank), places[rank], *local, *cross))
    return placements


def workers_of_slots(hosts: Sequence[Host]) -> int:
    """The number of workers without the option: the sum of all slots.

    Raises:
        ConfigError: a host that takes workers does not have slots.
    """
    unknown = [str(host) for host in hosts if host.takes(Role.WORKER) and host.slots is None]
    if any(host.is_alone for host in hosts):
        raise ConfigError(
            f"-H {hosts[0]}: there is no such file, so it is taken for a host, and the number of workers is missing:"
            f" name the hostfile, or write -n WORKERS or -H {hosts[0]}:SLOTS"
        )
    if unknown:
        raise ConfigError(
            f"the number of workers is missing: write -n WORKERS, or slots= for every host"
            f" ({_listed(unknown)} {'has' if len(unknown) == 1 else 'have'} none)"
        )
    number = sum(host.slots or 0 for host in hosts if host.takes(Role.WORKER))
    if not number:
        raise ConfigError("every host has role=server, so none can run workers; add a host, or change a role")
    return number


def _has_room(host: Host, role: Role, taken: int) -> bool:
    return host.takes(role) and (role is not Role.WORKER or host.slots is None or taken < host.slots)


def require_room(hosts: Sequence[Host], role: Role, number: int) -> None:
    """Refuse more processes of a role than the hosts have room for.

    Raises:
        ConfigError: no host takes the role, or the sum of all slots is too small.
    """
    willing = [host for host in hosts if host.takes(role)]
    if number and not willing:
        other = Role.SERVER if role is Role.WORKER else Role.WORKER
        raise ConfigError(
            f"every host has role={other}, so none can run {role}s; add a host, or change a role to role=any"
        )
    slots = [host.slots for host in willing if host.slots is not None]
    if role is Role.WORKER and len(slots) == len(willing) and sum(slots) < number:
        sums = _listed([f"{host}: {host.slots}" for host in willing])
        raise ConfigError(
            f"-n asks for {number} workers, but the hosts have {slots_word(sum(slots))} ({sums}); add slots or hosts,"
            f" or ask for -n {sum(slots)}"
        )


def slots_word(number: int) -> str:
    """``1 slot``, ``2 slots``."""
    return f"{number} slot{'s' if number != 1 else ''}"


def _listed(names: Sequence[str], most: int = 6) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


PYTHON = "{python}"
"""As first word of a command: the interpreter of the host."""

INTERFACES = ("KVDIST_INTERFACE", "DMLC_INTERFACE")

UNKNOWN = "-"
"""Placeholder for the path of the secret, which is known only on the host of the process."""

DEVICES = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
NUM_SERVERS = "DMLC_NUM_SERVER"
PLACES = ("KVDIST_LOCAL_RANK", "KVDIST_LOCAL_SIZE", "KVDIST_CROSS_RANK", "KVDIST_CROSS_SIZE")
"""Variables with a worker's position among the other workers."""
HOROVOD_PLACES = ("HOROVOD_RANK", "HOROVOD_SIZE", *(name.replace("KVDIST", "HOROVOD") for name in PLACES))
"""Variables for scripts that read Horovod's, in jobs without servers."""


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts of a machine that a plan needs.

    Attributes:
        cores: CPU cores that the job's processes may use; 0 if unknown.
        python: the path of its interpreter.
        address: where the other machines of the job reach it.
        environ: its variables.
        scheduler: the address under which it reaches the scheduler; empty is that of the scheduler's host.
    """

    cores: int
    python: str
    address: str
    environ: Mapping[str, str] = field(default_factory=dict)
    scheduler: str = ""


@dataclass(frozen=True, slots=True)
class Process:
    """A process to start.

    Attributes:
        host: an index into the job's hosts, or `LAUNCHER`.
        argv: the program and its arguments.
        environment: the changes to its host's environment.
        cwd: the folder it starts in; None is that of the launcher or agent.
        is_told_of_endings: whether its standard input gets a line for each process that ended
            (``ended worker 1 exit 3``); the input of the others is empty.
        is_root: whether all others dial it, so that it inherits the listening socket: the scheduler, or in a job
            without servers worker 0.
        is_called: whether it gets the bytes of a call on its standard input, and writes a result to a descriptor, whose
            number is its last argument.
        has_stdin: whether its standard input is the launcher's; only on the launching machine.
    """

    node: NodeId
    host: int
    argv: tuple[str, ...]
    environment: Environment
    cwd: str | None = None
    is_told_of_endings: bool = False
    is_root: bool = False
    is_called: bool = False
    has_stdin: bool = False

    @property
    def life(self) -> int:
        """How often it was restarted."""
        return int(self.environment.settings.get(RESTARTS, "0"))

    def again(self, life: int) -> Process:
        """A copy of this process for restart number `life`."""
        settings = {**self.environment.settings, RESTARTS: str(life)}
        return replace(self, environment=replace(self.environment, settings=settings))


@dataclass(frozen=True)
class JobSpec:
    """The job as the user asked for it.

    Attributes:
        num_servers: 0 is a job of workers alone, which find each other through rank 0.
        command: the worker's program and arguments; see `PYTHON`.
        role_command: the program and arguments of schedulers and servers, likewise.
        port: the TCP port of the scheduler, or of rank 0.
        name: a token unlike that of any other job.
        scheduler_host: an index into the hosts; None is the launching machine.
        stdin: the rank of the worker whose standard input is the launcher's; None if no worker's is.
        is_called: whether workers get a call, see `Process`.
        is_filled: whether workers take all slots of a host before those of the next.
        cwd: the folder in which processes on hosts start; None is that of the launcher or agent.
        env, env_server, env_worker: variables for every process, for servers, for workers.
        security: wins over `SECURITY_VARIABLES` in `env`.
        losses: what follows when a process is lost.
    """

    num_workers: int
    num_servers: int
    command: tuple[str, ...]
    role_command: tuple[str, ...]
    port: int
    name: str
    scheduler_host: int | None = None
    stdin: int | None = None
    is_called: bool = False
    is_filled: bool = False
    cwd: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    env_server: Mapping[str, str] = field(default_factory=dict)
    env_worker: Mapping[str, str] = field(default_factory=dict)
    security: Security = field(default_factory=Security)
    losses: LossPolicy = field(default_factory=LossPolicy)


def plan(job: JobSpec, hosts: Sequence[Host], facts: Sequence[HostFacts], launcher: HostFacts) -> list[Process]:
    """The processes of `job`, in starting order.

    Args:
        facts: the facts of each of `hosts`.
        launcher: the facts of the launching machine; its address is where the hosts reach it.

    Raises:
        ConfigError: the hosts do not have room for all processes, a variable has an impossible value, or the worker of
            ``--stdin`` is on another machine; the message names it.
    """
    placements = _placements(job, hosts)
    return [_process(job, one, hosts, facts, launcher, is_root=one is placements[0]) for one in placements]


def _process(
    job: JobSpec,
    one: ProcessPlace,
    hosts: Sequence[Host],
    facts: Sequence[HostFacts],
    launcher: HostFacts,
    is_root: bool,
) -> Process:
    root = root_host(job, hosts)
    address = (launcher if root is None else facts[root]).address
    role, host = one.node.role, None if one.host == LAUNCHER else hosts[one.host]
    own = launcher if host is None else facts[one.host]
    argv = job.command if role is Role.WORKER else job.role_command
    argv = (own.python, *argv[1:]) if argv[:1] == (PYTHON,) else argv
    return Process(
        one.node,
        one.host,
        argv,
        _environment(job, own.scheduler or address, one, host, own, launcher),
        None if host is None else job.cwd,
        is_told_of_endings=role is Role.SCHEDULER,
        is_root=is_root,
        is_called=job.is_called and role is Role.WORKER,
        has_stdin=_has_stdin(job, one.node, host),
    )


def moved(
    job: JobSpec,
    hosts: Sequence[Host],
    facts: Sequence[HostFacts],
    launcher: HostFacts,
    others: Sequence[Process],
    process: Process,
    lost: Collection[int],
) -> Process:
    """A worker whose host is lost, as it runs on the host with a free slot and the fewest workers, else on its host.

    Args:
        job, hosts, facts, launcher: as for `plan`.
        others: the other workers, as they run now or last ran.
        process: the worker.
        lost: the indices of the lost hosts.
    """
    taken = Counter(one.host for one in others)
    free = [
        index
        for index, host in enumerate(hosts)
        if index not in lost and _has_room(host, process.node.role, taken[index])
    ]
    index = min(free, key=lambda one: taken[one], default=process.host)
    used = {one.environment.settings[PLACES[0]] for one in others if one.host == index}
    local_rank = next(number for number in range(len(used) + 1) if str(number) not in used)
    place = ProcessPlace(process.node, index, local_rank, local_size=taken[index] + 1, cross_size=1)
    return _process(job, place, hosts, facts, launcher, is_root=False)


def root_host(job: JobSpec, hosts: Sequence[Host]) -> int | None:
    """The index of the root's host (scheduler or rank 0); None is the launching machine.

    Raises:
        ConfigError: the hosts do not have room for all processes.
    """
    return job.scheduler_host if job.num_servers else _placements(job, hosts)[0].host


def _placements(job: JobSpec, hosts: Sequence[Host]) -> list[ProcessPlace]:
    return place(hosts, job.num_workers, job.num_servers, job.scheduler_host, job.is_filled)


def _has_stdin(job: JobSpec, node: NodeId, host: Host | None) -> bool:
    if node.role is not Role.WORKER or node.rank != job.stdin:
        return False
    if host is not None and not host.is_local:
        raise ConfigError(
            f"--stdin {node}: it runs on {host}, and this terminal's input reaches only workers of the launching"
            " machine; run the job there, or use a debugger that listens on a port, such as debugpy"
        )
    return True


def threads_per_worker(cores: int, num_workers: int) -> int:
    """Threads for each worker's numerical libraries, so that together they fill the cores."""
    return max(1, cores // num_workers)


def thread_note(processes: Sequence[Process], hosts: Sequence[Host], facts: Sequence[HostFacts]) -> str | None:
    """The sentence about OMP_NUM_THREADS of the workers; None if the user has set it for all."""
    notes: dict[str, list[str]] = {}
    workers = [process for process in processes if process.node.role is Role.WORKER]
    for index, count in Counter(process.host for process in workers).items():
        environment = next(process.environment for process in workers if process.host == index)
        if THREADS in environment.defaults and THREADS not in {**facts[index].environ, **environment.settings}:
            text = f"{environment.defaults[THREADS]} for each worker (cores: {facts[index].cores}, workers: {count})"
            notes.setdefault(text, []).append(str(hosts[index]))
    if len(hosts) == 1 and notes:
        return f"{THREADS}={next(iter(notes))}"
    return "; ".join(f"{THREADS}={text} on {_listed(names)}" for text, names in notes.items()) or None


def worker_lines(processes: Sequence[Process], hosts: Sequence[Host]) -> list[str]:
    """A line for each worker: its host, and its position among the workers."""
    lines = []
    for process in processes:
        if process.node.role is Role.WORKER:
            rank, size, across, machines = (process.environment.settings[name] for name in PLACES)
            lines.append(
                f"{process.node} on {hosts[process.host]}: local rank {rank} of {size}, cross rank {across} of"
                f" {machines}"
            )
    return lines


def share_of_devices(devices: Sequence[str], local_rank: int, workers: int) -> Sequence[str]:
    """The devices of a worker among `workers`: a separate block, or with fewer devices a device in turn."""
    if len(devices) < workers:
        return [devices[local_rank % len(devices)]]
    return devices[local_rank * len(devices) // workers : (local_rank + 1) * len(devices) // workers]


def _environment(
    job: JobSpec,
    address: str,
    one: ProcessPlace,
    host: Host | None,
    own: HostFacts,
    launcher: HostFacts,
) -> Environment:
    role = one.node.role
    front, settings = interpreter_front(own.python), {}
    if host is not None and not host.is_local:
        sent, _ = forwarded(launcher.environ)
        front, settings = {**sent.front, **front}, dict(sent.settings)
    by_role: Mapping[str, str] = {Role.SERVER: job.env_server, Role.WORKER: job.env_worker}.get(role, {})
    for variables in (job.env, by_role):
        overlay(settings, {name: value for name, value in variables.items() if name not in SECURITY_VARIABLES})
    settings.update(_cluster_settings(job, address, one.node, Environment(settings=settings).over(launcher.environ)))
    if host is not None and host.iface is not None:
        overlay(settings, {INTERFACES[0]: host.iface})
    defaults = {"PYTHONUNBUFFERED": "1"}
    if role is Role.WORKER:
        numbers = (one.local_rank, one.local_size, one.cross_rank, one.cross_size)
        settings |= dict(zip(PLACES, map(str, numbers), strict=True))
        if not job.num_servers:
            of_job = (one.node.rank, job.num_workers, *numbers)
            settings |= dict(zip(HOROVOD_PLACES, map(str, of_job), strict=True))
        if own.cores:
            defaults[THREADS] = str(threads_per_worker(own.cores, one.local_size))
        given = Environment(settings=settings).over(own.environ).get(DEVICES, "")
        devices = list((host.gpus if host else None) or (name.strip() for name in given.split(",") if name.strip()))
        if devices:
            settings[DEVICES] = ",".join(share_of_devices(devices, one.local_rank, one.local_size))
    else:
        # NumPy's threads for products of matrices spin when they start, and these processes multiply no matrices.
        defaults["OPENBLAS_NUM_THREADS"] = "1"
    if role is Role.SCHEDULER and job.losses.keeps_journal:
        defaults["KVDIST_JOURNAL"] = f"journal-{job.name}-{job.env.get(RESTARTS, 0)}"  # each start of a job has its own
    return Environment(defaults, front, settings)


def _cluster_settings(job: JobSpec, address: str, node: NodeId, environ: Mapping[str, str]) -> dict[str, str]:
    """The process's identity, and the settings of kvdist of the launching machine.

    They are read through the configuration, so that mistakes in them appear before anything starts. It knows no job
    without servers, so such a job is described to it with a server that is left out at the end.
    """
    identity = ClusterConfig(
        role=node.role,
        root_host=address,
        root_port=job.port,
        num_workers=job.num_workers,
        num_servers=job.num_servers or 1,
        rank=node.rank,
        job=job.name,
        supervised=node.role is Role.SCHEDULER,
    ).to_env()
    # Addresses and interfaces differ from host to host, and are looked up there.
    variables = {name: value for name, value in environ.items() if name not in {*ADDRESS_VARIABLES, *INTERFACES}}
    variables |= {name: value for name, value in identity.items() if name in OWNED_VARIABLES}
    if job.security.word:
        variables[SECURITY] = job.security.word
    if job.security.encrypts:
        variables[SECRET_FILE] = UNKNOWN
    config = cluster_from_env(variables)
    if config is None:
        raise ConfigError(f"the launcher described no cluster to {node}")
    settings = config.to_env() | {NUM_SERVERS: str(job.num_servers)}
    settings.pop(SECRET_FILE, None)
    return settings


UNBOUND = 1
"""The root's port until it is bound; a preview states that it is chosen at the start."""
ROOT_PORT = "DMLC_PS_ROOT_PORT"

PLACEMENT_TITLES = ("machine", "scheduler", "servers", "workers", "threads each", "GPUs")


def placement(processes: Sequence[Process], hosts: Sequence[Host]) -> list[tuple[str, ...]]:
    """The table that ``--dry-run`` prints: a row for each machine, with cells for `PLACEMENT_TITLES`.

    The cells have the ranks of servers and workers, the threads of each worker where they are known, and the GPUs that
    each worker sees, where any are named.
    """
    by_machine: dict[str, list[Process]] = {}
    for process in sorted(processes, key=lambda one: one.host):
        is_here = process.host == LAUNCHER or hosts[process.host].is_local
        by_machine.setdefault(THIS_MACHINE if is_here else str(hosts[process.host]), []).append(process)
    return [(machine, *_cells(several)) for machine, several in by_machine.items()]


def _cells(processes: Sequence[Process]) -> tuple[str, ...]:
    ranks = {role: _names(role, [one.node.rank for one in processes if one.node.role is role]) for role in Role}
    layers = [one.environment for one in processes if one.node.role is Role.WORKER]
    workers = [{**each.defaults, **each.settings} for each in layers]
    threads = dict.fromkeys(variables.get(THREADS, "") for variables in workers)
    devices = [variables[DEVICES] for variables in workers if DEVICES in variables]
    scheduler = "yes" if ranks[Role.SCHEDULER] else ""
    return scheduler, ranks[Role.SERVER], ranks[Role.WORKER], ", ".join(filter(None, threads)), " | ".join(devices)


def _names(role: Role, ranks: Sequence[int]) -> str:
    """Processes of rising ranks in few characters, such as ``worker-0..3, worker-7``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{role}-{part[0]}" + (f"..{part[-1]}" if len(part) > 1 else "") for part in parts)


def preview(processes: Sequence[Process], hosts: Sequence[Host]) -> str:
    """The text that ``--dry-run -v`` prints: each process with its host, folder, changed variables and argv, secrets
    hidden.

    Variables marked ``default`` apply where the host sets none, those marked ``front`` go before the host's value, and
    those marked ``set`` win.
    """
    return "\n".join(_process_text(process, hosts) for process in processes)


def _process_text(process: Process, hosts: Sequence[Host]) -> str:
    layers = process.environment
    folder = "" if process.cwd is None else f" in {quoted(process.cwd)}"
    lines = [f"{process.node} on {place_name(process, hosts)}{folder}"]
    for label, variables in (("default", layers.defaults), ("front", layers.front), ("set", layers.settings)):
        lines += [f"  {label:7} {name}={_shown(name, value)}" for name, value in sorted(redacted(variables).items())]
    lines.append(f"  run     {' '.join(quoted(word) for word in process.argv)}")
    return "".join(line + "\n" for line in lines)


def _shown(name: str, value: str) -> str:
    return "(a free port, chosen at the start)" if (name, value) == (ROOT_PORT, str(UNBOUND)) else quoted(value)


def place_name(process: Process, hosts: Sequence[Host]) -> str:
    """The host of a process, for people."""
    return "the launching machine" if process.host == LAUNCHER else str(hosts[process.host])


def quoted(text: str) -> str:
    """A word for a shell; control characters are written as bash and zsh do, ``$'\\n'``."""
    if text.isprintable():
        return shlex.quote(text)
    return f"$'{''.join(map(_escaped_letter, text))}'"


def _escaped_letter(letter: str) -> str:
    """A printable letter unchanged; others as an escape, or as their bytes in hexadecimal."""
    if letter in SHELL_ESCAPES or letter.isprintable():
        return SHELL_ESCAPES.get(letter, letter)
    return "".join(f"\\x{byte:02x}" for byte in letter.encode(errors="surrogateescape"))


SHELL_ESCAPES = {"'": "\\'", "\\": "\\\\", "\n": "\\n", "\t": "\\t"}
