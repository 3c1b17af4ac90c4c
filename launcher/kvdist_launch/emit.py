"""A job as text for other systems that start processes: shells, Slurm, Open MPI, Kubernetes.

A plan comes in, text comes out. Values that a user gave are quoted for the language they end up in and never
interpreted in it. They stand in the text of a script, never in the argument list of a program, where ``ps`` would show
them. `run_script` replaces this process by a shell that reads the script on standard input, so output, signals and
exit code are those of Slurm or Open MPI themselves.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import shlex
import shutil
import socket
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvdist.config.addresses import local_address_towards
from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.config.losses import LossPolicy
from kvdist.config.processes import LEAVE_FOLDER
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.environment import OTHER_NAME, OWNED_VARIABLES, RESTARTS, Environment
from kvdist_launch.hosts import Host
from kvdist_launch.options import target_of
from kvdist_launch.plan import DEVICES, LAUNCHER, PLACES, HostFacts, JobSpec, Process, place_name, plan

FAIL = LossPolicy()
"""The policy by which the first loss ends the job."""

# The roles of a job, if another system chooses the hosts and gives every process its number.

OF_ONE_PROCESS = frozenset({"KVDIST_RANK", *PLACES, "KVDIST_SUPERVISED", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT"})
"""Variables that differ within a role or are known only on the host, and what a supervisor sets for the scheduler."""


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """All processes of a role.

    Attributes:
        count: number of the processes.
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


# Lines of a POSIX shell: blocks to paste, and one mpirun.
#
# By hand: each block is a subshell of its own, so that pasting one leaves no variables behind. mpirun: rank 0 is the
# scheduler, then come the servers, then the workers, on the hosts that the plan says. mpirun passes standard input to
# rank 0 alone, so the script of each rank lies in a private folder in the home folder, which every host of an MPI
# cluster sees; it is removed at the end.


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


def heredoc(lines: Sequence[str], word: str) -> list[str]:
    """What follows ``<<'word'``. `word` must not be a whole line of the text."""
    if any(word in line.split("\n") for line in lines):
        raise ValueError(f"{word} ends the text early")
    return [*lines, word]


def run_again(argv: Sequence[str], restarts: int, after: str = "") -> list[str]:
    """The lines that run a program, and at most `restarts` times again after a signal or exit code 75.

    Args:
        after: what follows the words of the command, such as a redirection.
    """
    if not restarts:
        return [f"exec {shlex.join(argv)}{after}"]
    # A command may have several lines, which must stay as they are.
    return [line.format(restarts=restarts, command=f"{shlex.join(argv)}{after}") for line in AGAIN.split("\n")]


AGAIN = f"""\
export {RESTARTS}=0
until {{command}}; do
  code=$?
  [ "$code" -gt 128 ] || [ "$code" = {EXIT_PEER_LOST} ] || exit "$code"
  [ "${RESTARTS}" -lt {{restarts}} ] || exit "$code"
  {RESTARTS}=$(({RESTARTS} + 1))
  sleep $(({RESTARTS} < 30 ? {RESTARTS} : 30))
done"""
"""A shell's exit code for a program that a signal killed is above 128."""


def manual(
    processes: Sequence[Process], hosts: Sequence[Host], folder: str, secret: str | None, losses: LossPolicy = FAIL
) -> str:
    """The blocks for all processes, in starting order, with an empty line between them.

    Args:
        folder: where processes without a working folder start.
        secret: the name of a file in the home folder of each host for the job's secret; None needs none.
        losses: what follows when a process is lost; `losses.restart` is how often a block may start its worker again.
    """
    ends = WORKERS_COME_BACK if losses.goes_on else "They end together."
    blocks = [[f"# Start these in any order, each in a shell on its host. {ends}"]]
    if secret is not None:
        blocks.append(_secret_lines(hosts, secret))
    titled = [(f"# {process.node}, on {place_name(process, hosts)}", process) for process in processes]
    if losses.max_workers is not None:  # with no rank, and no place among the others
        titled.append((MORE.format(losses.max_workers), _without(processes[-1], "KVDIST_RANK", *PLACES)))
    for title, process in titled:
        lines = [f"cd {shlex.quote(process.cwd or folder)} || exit"]
        lines += exports(_without(process, SUPERVISED).environment)
        if secret is not None:
            lines.append(f'export KVDIST_SECRET_FILE="$HOME"/{shlex.quote(secret)}')
        lines += run_again(process.argv, losses.restart if process.node.role is Role.WORKER else 0)
        # Only lines of ours move in: a value that has several lines keeps them as they are.
        indented = [f"  {line}" for line in lines]
        blocks.append([title, "(", *indented, ")"])
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


SUPERVISED = "KVDIST_SUPERVISED"
"""Variable that is left out, as no launcher reports exits of processes to the scheduler."""


def _without(process: Process, *names: str) -> Process:
    """A copy of a process without some variables of the launcher."""
    layers = (process.environment.defaults, process.environment.settings)
    defaults, settings = ({name: text for name, text in layer.items() if name not in names} for layer in layers)
    return replace(process, environment=replace(process.environment, defaults=defaults, settings=settings))


MORE = """\
# One more worker, at any time, on any host that has the files; once for each, up to {} workers in all."""

WORKERS_COME_BACK = """A worker that is lost can be started again:
# paste its block once more, here or on another host that has the files."""


def _secret_lines(hosts: Sequence[Host], secret: str) -> list[str]:
    file = f'"$HOME"/{shlex.quote(secret)}'
    lines = [
        "# First, once: a secret for this job, and a copy of it on every host. Remove it when the job has ended.",
        f"( umask 077 && head -c 32 /dev/urandom > {file} )",
    ]
    for host in hosts:
        if not host.is_local:
            options = [] if host.port is None else ["-P", str(host.port)]
            options += [] if host.identity is None else ["-i", host.identity]
            options += [] if host.known_hosts is None else ["-o", f'UserKnownHostsFile="{host.known_hosts}"']
            name = f"[{host.name}]" if ":" in host.name else host.name
            user = "" if host.user is None else f"{host.user}@"
            lines.append(f"{shlex.join(['scp', '-p', *options, '--'])} {file} {shlex.quote(f'{user}{name}:')}")
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
    environment = _without(process, SUPERVISED, UNBUFFERED).environment
    lines = exports(environment, ["KVDIST_SECRET_FILE"] if is_secret else [])
    lines += ['export KVDIST_SECRET_FILE="$folder/secret"'] if is_secret else []
    lines += [] if process.cwd is None else [f"cd {shlex.quote(process.cwd)} || exit"]
    return [*lines, f"exec {shlex.join(process.argv)} </dev/null"]


# Slurm: a batch script with three job steps in one allocation.
#
# Scheduler, servers and workers are a step each, so Slurm's number of a task is the rank, and its number within the
# node the local rank. What the tasks run reaches them through srun's standard input: nothing is in an argument list,
# and no folder needs to be shared but those of the user's own program.

SLURM_HEAD = """\
#!/bin/bash
#SBATCH --job-name=kvdist
#SBATCH --ntasks={tasks}
# Add what your cluster asks for, such as:
##SBATCH --partition=gpu --time=1:00:00 --gpus-per-task=1 --cpus-per-task=4

# The scheduler runs on the first node. One node alone can use its loopback address.
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(getent ahosts "$first" | awk 'NR == 1 {{ print $1 }}')
case $address in
127.* | ::1 | "") [ "$SLURM_JOB_NUM_NODES" = 1 ] || address=$(hostname -I | awk '{{ print $1 }}') ;;
esac
port=$((20000 + SLURM_JOB_ID % 10000))
secret={secret}

# Starts one step; its tasks read the script on standard input, after a line that is known only here.
step() {{
  exec srun --overlap {on_loss} --label "$@" /bin/sh -s \\
    < <(printf 'address=%s port=%s secret=%s\\n' "$address" "$port" "$secret" && cat)
}}

# That port may be another job's, or program's: one that is free there. --label puts the number of the task before it.
port=$(step {options} <<'{word}'
{find_port}
{word}
) || exit
port=${{port##* }}
"""

FIND_PORT = f"""\
{LEAVE_FOLDER}
import random, socket
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
for port in (int(sys.argv[2]), *random.sample(range(20000, 30000), 100)):
    try:
        socket.create_server((sys.argv[1], port), family=family).close()
    except OSError as error:
        why = error
    else:
        print(port)
        break
else:
    sys.exit(f"kvdist: no port of {{sys.argv[1]}} is free for the scheduler: {{why}}")
"""
"""Run on the node of the scheduler, with its address and the port to prefer."""

MAKE_SECRET = "$(head -c 32 /dev/urandom | base64 | tr -d '\\n')"

TAIL = """\

# The workers decide how the job ends. The others then end by themselves, or if workers never joined them, are ended.
trap 'kill "$scheduler" "$servers" "$workers" 2>/dev/null' INT TERM
wait "$workers"; code=$?
( sleep {grace}; kill "$scheduler" "$servers" 2>/dev/null ) &
guard=$!
wait "$servers" "$scheduler"
kill "$guard" 2>/dev/null
exit "$code"
"""
GRACE_S = 10

USE_SECRET = """\
file=$(umask 077 && mktemp "${TMPDIR:-/tmp}/kvdist.XXXXXXXX") || exit
printf %s "$secret" > "$file"
exec 9< "$file" && rm -f "$file" || exit
export KVDIST_SECRET_FILE="/proc/$$/fd/9"
unset secret"""
"""The file has no name any more when the program starts, so that not even a killed program leaves it behind."""

SET_PLACES = """\
set -- $(echo "$SLURM_STEP_TASKS_PER_NODE" | tr , '\\n' | tr '(x)' '   ' | awk -v node="$SLURM_NODEID" \\
  -v local="$SLURM_LOCALID" '{
    for (i = 0; i < ($2 ? $2 : 1); i++) {
      if (seen == node) size = $1
      if ($1 > local) { across++; if (seen < node) rank++ }
      seen++
    }
  } END { print size, rank + 0, across }')
export KVDIST_LOCAL_RANK="$SLURM_LOCALID" KVDIST_LOCAL_SIZE="$1" KVDIST_CROSS_RANK="$2" KVDIST_CROSS_SIZE="$3\""""
"""Slurm writes 2(x3),1 where three nodes have two tasks each and a fourth has a single task."""

OF_A_TASK = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "KVDIST_RANK", *PLACES, "KVDIST_SECRET_FILE")
OPTIONS = {
    Role.SCHEDULER: '--nodes=1 --nodelist="$first" --ntasks=1',
    Role.SERVER: "--distribution=cyclic --ntasks={count}",
    Role.WORKER: "--distribution=cyclic --ntasks={count}",
}
VARIABLES = {Role.SCHEDULER: "scheduler", Role.SERVER: "servers", Role.WORKER: "workers"}


def sbatch(roles: Sequence[RoleSpec], word: str, is_secret: bool, losses: LossPolicy = FAIL) -> str:
    """The batch script.

    Args:
        word: a line that does not occur in any value.
        is_secret: whether the processes get a common secret to encrypt with.
        losses: what follows when a process is lost; `losses.restart` is how often a task may start its worker again.
    """
    on_loss = "--kill-on-bad-exit=0 --no-kill" if losses.goes_on else "--kill-on-bad-exit=1"
    tasks = sum(spec.count for spec in roles)
    text = SLURM_HEAD.format(
        tasks=tasks,
        secret=MAKE_SECRET if is_secret else "",
        on_loss=on_loss,
        options=OPTIONS[Role.SCHEDULER],
        word=word,
        find_port=f'exec {shlex.join([roles[0].argv[0], "-c", FIND_PORT])} "$address" "$port" </dev/null',
    )
    for spec in roles:
        options = OPTIONS[spec.role].format(count=spec.count)
        lines = [
            f"step {options} <<'{word}' &",
            *heredoc(_task_script(spec, is_secret, losses.restart if spec.role is Role.WORKER else 0), word),
            f"{VARIABLES[spec.role]}=$!",
        ]
        text += "\n" + "\n".join(lines) + "\n"
    return text + TAIL.format(grace=GRACE_S)


def _task_script(spec: RoleSpec, is_secret: bool, restarts: int) -> list[str]:
    """What each task runs. The braces make the shell read all of it before anything else reads standard input."""
    lines = ["{", *exports(spec.environment, OF_A_TASK if is_secret else OF_A_TASK[:-1])]
    lines += ['export DMLC_PS_ROOT_URI="$address" DMLC_PS_ROOT_PORT="$port" KVDIST_JOB="slurm-$SLURM_JOB_ID"']
    lines += ['export KVDIST_RANK="$SLURM_PROCID"']
    if spec.role is Role.WORKER:
        lines += SET_PLACES.split("\n")
    if is_secret:
        lines += USE_SECRET.split("\n")
    return [*lines, *run_again(spec.argv, restarts, " </dev/null"), "}"]


# Kubernetes: a list of a JobSet with one replicated job a role, a headless service, and a secret, as JSON.
#
# Ranks are the completion indexes of indexed jobs. The JobSet succeeds when all workers have. It needs the JobSet
# controller (jobset.x-k8s.io) in the cluster; Kubernetes itself has no job with several roles.

RANK_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
FAILURES_FIELD = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
SECRET_FOLDER = "/run/kvdist"

WAIT_FOR_NAME = f"""\
{LEAVE_FOLDER}
import socket, time
for _ in range(300):
    try:
        socket.getaddrinfo(sys.argv[1], None)
        break
    except OSError:
        time.sleep(1)
"""
"""A pod's name resolves a moment after the pod runs; a process that asks too early would fail."""


def kubernetes(
    roles: Sequence[RoleSpec], name: str, image: str, port: int, secret: str | None, losses: LossPolicy = FAIL
) -> str:
    """The manifests, for ``kubectl apply -f``.

    Args:
        name: of everything in them: a DNS label.
        image: the container image, which has kvdist and the user's program.
        secret: in base64; None leaves encryption out.
        losses: what follows when a process is lost; `losses.restart` is how many new pods a worker may have.

    Raises:
        ConfigError: a word or a variable has bytes that are not UTF-8, which JSON cannot hold.
    """
    metadata = {"name": name}
    data = {"type": "Opaque", "data": {"secret": secret}}
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {"jobset.sigs.k8s.io/jobset-name": name},
    }
    jobset = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [str(Role.WORKER)]},
        "failurePolicy": {"maxRestarts": 0},
        "startupPolicy": {"startupPolicyOrder": "InOrder"},
        "replicatedJobs": [_replicated_job(spec, name, image, port, secret is not None, losses) for spec in roles],
    }
    secrets = [] if secret is None else [{"apiVersion": "v1", "kind": "Secret", "metadata": metadata, **data}]
    items = [
        *secrets,
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": metadata, "spec": jobset},
    ]
    text = json.dumps({"apiVersion": "v1", "kind": "List", "items": items}, indent=2, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            "a word or a variable of the job has bytes that are not UTF-8; JSON cannot hold them"
        ) from None
    return f"{text}\n"


def _replicated_job(
    spec: RoleSpec, name: str, image: str, port: int, is_secret: bool, losses: LossPolicy
) -> dict[str, object]:
    scheduler, role = f"{name}-{Role.SCHEDULER}-0-0.{name}", str(spec.role)
    is_spared = spec.role is Role.WORKER and losses.goes_on  # the others go on without a process of this role
    mounts: list[object] = [{"name": "memory", "mountPath": "/dev/shm"}]
    volumes: list[object] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    if is_secret:
        mounts.append({"name": "secret", "mountPath": SECRET_FOLDER, "readOnly": True})
        volumes.append({"name": "secret", "secret": {"secretName": name, "defaultMode": 0o400}})
    container = {
        "name": role,
        "image": image,
        "command": [_dollars(word) for word in spec.argv],
        "env": _variables_of_pod(spec, scheduler, port, is_secret, is_spared),
        "volumeMounts": mounts,
    }
    pod: dict[str, object] = {"restartPolicy": "Never", "containers": [container], "volumes": volumes}
    if spec.role is not Role.SCHEDULER:
        wait = ["python", "-c", WAIT_FOR_NAME, scheduler]
        pod["initContainers"] = [{"name": "wait-for-scheduler", "image": image, "command": wait}]
    job = {
        "parallelism": spec.count,
        "completions": spec.count,
        "completionMode": "Indexed",
        **({"backoffLimitPerIndex": losses.restart} if is_spared else {"backoffLimit": 0}),
        "template": {"spec": pod},
    }
    return {"name": role, "replicas": 1, "template": {"spec": job}}


def _variables_of_pod(
    spec: RoleSpec, scheduler: str, port: int, is_secret: bool, counts_restarts: bool
) -> list[object]:
    values = {**spec.environment.defaults, **spec.environment.settings}
    values = {variable: _dollars(values[variable]) for variable in sorted(values)}
    values |= {"DMLC_PS_ROOT_URI": scheduler, "DMLC_PS_ROOT_PORT": str(port)}
    fields = {"KVDIST_RANK": RANK_FIELD}
    if spec.role is Role.SCHEDULER:  # it binds an address; the name of its pod stands for that only elsewhere
        del values["DMLC_PS_ROOT_URI"]
        fields["DMLC_PS_ROOT_URI"] = "status.podIP"
    if spec.role is Role.WORKER:  # a pod is a host of its own
        values |= {"KVDIST_LOCAL_RANK": "0", "KVDIST_LOCAL_SIZE": "1", "KVDIST_CROSS_SIZE": str(spec.count)}
        fields |= {"KVDIST_CROSS_RANK": RANK_FIELD} | ({RESTARTS: FAILURES_FIELD} if counts_restarts else {})
    values |= {"KVDIST_SECRET_FILE": f"{SECRET_FOLDER}/secret"} if is_secret else {}
    read: list[object] = [
        {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": path}}} for variable, path in fields.items()
    ]
    return [*({"name": variable, "value": value} for variable, value in values.items()), *read]


def _dollars(text: str) -> str:
    """Kubernetes replaces ``$(NAME)`` in words and values; two dollars stand for a dollar."""
    return text.replace("$", "$$")


# Which of them the options ask for.

UNDERSTOOD = frozenset(
    [
        "--num-workers", "--num-servers", "--server-module", "--optimizer-module", "--server-device", "--hostfile",
        "-x", "--env", "--env-server", "--env-worker", "--env-file", "--security", "--emit", "--launcher", "--image",
        "--dry-run", "--verbose", "--on-loss", "--restart", "--max-workers", "--min-workers", "--replicas", "--policy",
    ]
)  # fmt: skip
"""The options that have an effect on processes that another system starts."""

SSH_PORT = 22
CONTAINER_PORT = 9191
"""Free, as nothing else listens in the container."""


def address_towards(host: Host) -> str:
    """The address under which `host` reaches this machine, by the route; a scheduler cannot bind a name.

    Raises:
        ConfigError: no route leads to it, or the name is only an alias of ssh.
    """
    try:
        return local_address_towards(host.name, host.port or SSH_PORT)
    except ConfigError as error:
        raise ConfigError(
            f"-H: {host} is not a name or address that this machine can reach (an alias of ssh is neither); write the"
            " address of the host"
        ) from error


def script_of(
    options: argparse.Namespace,
    job: JobSpec,
    hosts: Sequence[Host],
    processes: Sequence[Process],
    launcher: HostFacts,
) -> str:
    """The script that starts the job.

    Raises:
        ConfigError: the options do not fit each other, or something is missing.
    """
    word = f"KVDIST_{job.name}"
    is_secret = job.security.encrypts
    if options.emit is None and options.launcher == "none":
        secret_name = f".kvdist-{job.name}.secret" if is_secret else None
        return manual(processes, hosts, os.getcwd(), secret_name, job.losses)
    if options.emit is None and options.launcher == "mpi":
        reached = [str(host) for host in hosts if host.asks_for_ssh]
        if reached:
            raise ConfigError(
                f"mpirun takes no user, port or other option of ssh with a host, and {reached[0]} has one; leave it"
                " out, and write it into ~/.ssh/config"
            )
        return mpi(processes, hosts, socket.gethostname(), word, is_secret)
    if options.emit in (None, "sbatch"):
        return sbatch(roles_of(job, launcher, launcher.python), word, is_secret, job.losses)
    # This machine's variables are wrong in a container; only what the user asks for goes there.
    roles = roles_of(job, replace(launcher, environ={}), "python")
    secret = base64.b64encode(os.urandom(32)).decode() if is_secret else None
    return kubernetes(roles, f"kvdist-{job.name[:8]}", options.image, CONTAINER_PORT, secret, job.losses)


def require_understood(options: argparse.Namespace, given: Sequence[str]) -> None:
    """Refuse options that would be ignored, and see that none is missing.

    Raises:
        ConfigError: an option does not fit.
    """
    target = target_of(options)
    ignored = [name for name in given if name not in UNDERSTOOD]
    if ignored:
        raise ConfigError(
            f"{' and '.join(ignored)} {'is' if len(ignored) == 1 else 'are'} for processes that kvdist-launch itself"
            f" starts and watches, and with {target} it does not; leave {' and '.join(ignored)} out"
        )
    if options.hostfile is not None and (options.emit is not None or options.launcher == "slurm"):
        raise ConfigError(f"{target} leaves the choice of hosts to others; leave out -H {options.hostfile}")
    if options.emit == "kubernetes" and options.image is None:
        raise ConfigError(f"{target} needs --image IMAGE, a container image with kvdist and your program")
    if options.image is not None and options.emit != "kubernetes":
        raise ConfigError("--image is for --emit kubernetes; leave it out")


def run_script(launcher: str, text: str, environ: Mapping[str, str]) -> None:
    """Replace this process by a shell that runs the script.

    Raises:
        ConfigError: this machine lacks a program that the script needs.
    """
    program = {"slurm": "srun", "mpi": "mpirun"}[launcher]
    if shutil.which(program, path=environ.get("PATH")) is None:
        raise ConfigError(f"--launcher {launcher} needs {program}, which is not in any directory of PATH; install it")
    if launcher == "slurm" and "SLURM_JOB_ID" not in environ:
        raise ConfigError(
            "--launcher slurm needs an allocation of Slurm, and this process has none; get one with salloc, or write a"
            " batch script with --emit sbatch"
        )
    with tempfile.TemporaryFile() as file:
        file.write(text.encode(errors="surrogateescape"))
        file.seek(0)
        os.dup2(file.fileno(), 0)
        os.execvpe("bash", ["bash", "-s"], dict(environ))
