"""What the user asks for, as a job: from options and words to a `JobSpec`, and errors for what does not fit together.

``kvdist-launch`` and ``kvdist-run`` are two spellings of the same options; both become a `Request`. The user's
command is a list of arguments and never passes through a shell.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvdist.config.environment import limits_from_env
from kvdist.config.losses import LossPolicy
from kvdist.config.processes import module_words
from kvdist.config.settings import SETTINGS, Limits, read_view, rows_of
from kvdist.config.suggestions import nearest
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.environment import (
    SECURITY_VARIABLES,
    Environment,
    interpreter_front,
    parse_assignments,
    parse_exports,
    read_env_file,
)
from kvdist_launch.hosts import Host, read_hosts
from kvdist_launch.job import GracePeriods
from kvdist_launch.options import asked, target_of
from kvdist_launch.plan import PYTHON, UNBOUND, JobSpec, require_room, workers_of_slots
from kvdist_launch.processes import NOT_EXECUTABLE, NOT_FOUND, CommandError
from kvdist_launch.security import security_of

SHELL_OPERATORS = frozenset({"&&", "||", "|", ";", "&", ">", ">>", "<", "2>", "2>&1"})


INTERPRETERS = {
    re.compile(r"(python|pypy)[0-9.]*"): re.compile(r"-[bBdEiIOPqRsSuvx]+|-[WX].+"),
    re.compile(r"(ba|da|k|z)?sh"): re.compile(r"-[eluvx]+"),
}
"""Programs that run the file which their first word names that is not an option; and their options without a value."""


def parse_command(
    words: Sequence[str], path: str | None, is_here: bool = True, is_read_here: bool = False, modules: str = ""
) -> tuple[str, ...]:
    """The argument list of the user's command: the words, or the words that a single word quotes.

    Args:
        path: where programs are searched, as in the variable PATH; None is the system's default.
        is_here: whether it runs on this machine, so that the program, and the script that it runs, must exist.
        is_read_here: whether a script of the current folder must exist, as this machine runs or copies it.
        modules: folders in which Python finds modules besides, as in the variable PYTHONPATH.

    Raises:
        CommandError: the program, its script or its module does not exist, or the program cannot be executed.
        ConfigError: the command is missing, its quotes do not match, or it is written for a shell.
    """
    command = list(words)
    if len(command) == 1 and shutil.which(command[0], path=path) is None:
        command = _split_words(command[0])
    if not command or not command[0]:
        raise ConfigError("the command is missing; write it last, after the options, as in: ... python train.py")
    if is_here:
        _require_program(command[0], path)
    words = _interpreted(command)
    script = words[0] if words and not words[0].startswith(("-", "+")) else ""
    if script and (is_here or (is_read_here and not os.path.isabs(script))):
        _require_script(script)
    if is_here and words[:1] == ["-m"] and len(words) > 1 and _is_this_python(command[0], path):
        _require_module(words[1].partition(".")[0], modules)
    return tuple(command)


def _interpreted(command: Sequence[str]) -> list[str]:
    """What an interpreter is to run, and its arguments: the command without the interpreter and its plain options."""
    program = os.path.basename(command[0])
    plain = next((options for name, options in INTERPRETERS.items() if name.fullmatch(program)), None)
    words = list(command[1:]) if plain is not None else []
    while words and plain is not None and (plain.fullmatch(words[0]) or words[0] in ("-W", "-X")):
        del words[: 2 if words[0] in ("-W", "-X") else 1]
    return words


def _require_script(script: str) -> None:
    if os.path.exists(script):
        return
    near = _near_file(script)
    where = "" if os.path.isabs(script) else f" in {os.getcwd()}"
    advice = f"did you mean {near}?" if near else "name it by its path from here"
    raise CommandError(f"there is no script {script}{where}; {advice}", NOT_FOUND)


def _near_file(path: str) -> str:
    """The file of the same folder whose name is most like this path's; '' if none is."""
    folder, name = os.path.split(path)
    near: list[str] = []
    with contextlib.suppress(OSError):
        near = nearest(name, os.listdir(folder or "."), 0.7)
    return os.path.join(folder, near[0]) if near else ""


def _is_this_python(program: str, path: str | None) -> bool:
    """Whether a program is of the same environment as this process, and so has the same packages."""
    found = shutil.which(program, path=path)
    return found is not None and os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)


def _require_module(name: str, modules: str) -> None:
    folders = ["", *filter(None, modules.split(os.pathsep))]
    if any(os.path.exists(os.path.join(folder, name + ending)) for folder in folders for ending in ("", ".py")):
        return
    from importlib.util import find_spec  # here, as few need it

    with contextlib.suppress(ValueError):  # __main__ has none
        if find_spec(name) is not None:
            return
    near = os.path.splitext(_near_file(f"{name}.py"))[0]
    advice = f"did you mean python -m {near}?" if near else "install it, or start the job in the folder that has it"
    raise CommandError(f"there is no module {name} in {os.getcwd()} or installed for this Python; {advice}", NOT_FOUND)


def _split_words(text: str) -> list[str]:
    try:
        command = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"the command {text!r} cannot be split into words: {str(error).lower()}") from error
    operators = [word for word in command if word in SHELL_OPERATORS]
    if operators:
        raise ConfigError(
            f"the command {text!r} needs a shell for {operators[0]!r}, but the launcher runs it without a shell; write:"
            f" sh -c {shlex.quote(text)}"
        )
    return command


def _require_program(program: str, path: str | None) -> None:
    if shutil.which(program, path=path) is not None:
        return
    if os.path.isdir(program):
        raise CommandError(f"{program} is a directory, not a command", NOT_EXECUTABLE)
    if os.path.dirname(program) and os.path.exists(program):
        raise CommandError(
            f"{program} is not executable; make it so (chmod +x {shlex.quote(program)}), or name its interpreter"
            f" (python {shlex.quote(program)})",
            NOT_EXECUTABLE,
        )
    where = "there is no such file" if os.path.dirname(program) else "it is not in any directory of PATH"
    script = _near_file(program) if program.endswith(".py") else ""
    near = f"python {script}" if script else "" if os.path.dirname(program) else _near_program(program, path)
    where += f"; did you mean {near}?" if near and not os.path.isfile(program) else ""
    if re.fullmatch(r"[A-Za-z_]\w*=.*", program, re.DOTALL):
        where = f"it sets a variable; write it as an option before the command: -x {shlex.quote(program)}"
    if os.path.isfile(program):
        where += f"; a file of that name lies here, so name its interpreter too (python {shlex.quote(program)})"
    raise CommandError(f"the command {program!r} does not exist: {where}", NOT_FOUND)


def _near_program(program: str, path: str | None) -> str:
    """The program of the PATH whose name is most like this name; '' if none is."""
    names: set[str] = set()
    for folder in os.get_exec_path(None if path is None else {"PATH": path}):
        with contextlib.suppress(OSError):
            names.update(os.listdir(folder))
    return next(iter(nearest(program, sorted(names), 0.8)), "")


ROLE_COMMAND = (PYTHON, *module_words("kvdist"))
"""What schedulers and servers run."""

RETURN_S = "120"
"""How many seconds the servers keep the weights for a worker that is started again, if it was the last worker."""

GRACE_S = 5.0
GRACE_WITHOUT_SERVERS_S = 2.0
"""The default of ``--grace``. Without servers the others notice a failure at once or not at all, so less is enough."""

SPREADS = ("--emit sbatch", "--emit kubernetes", "--launcher slurm")
"""Targets that may place processes on several machines."""

OF_SERVERS = (
    *("--on-loss", "--restart", "--max-workers", "--replicas", "--server-module", "--optimizer-module"),
    *("--server-device", "--env-server", "--scheduler-on", "--min-workers"),
)
"""Options that have no meaning without servers."""

ELSEWHERE_WITHOUT_SERVERS = {
    "--launcher mpi": "mpirun -np {n} COMMAND starts it, and needs nothing of kvdist-launch",
    "--launcher slurm": "srun --ntasks={n} COMMAND starts it, and needs nothing of kvdist-launch",
    "--emit sbatch": "a batch script with the line srun COMMAND starts it, and needs nothing of kvdist-launch",
    "--emit kubernetes": "take a job whose pods get RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, such as"
    " a TrainJob with a torch policy",
}
"""For each target that starts scheduler and servers too: how to start a job without servers by that target."""


@dataclass(frozen=True)
class Request:
    """A call of a launcher.

    Attributes:
        options: those of ``kvdist-launch``.
        words: the user's command.
        role_command: what schedulers and servers run.
        program: the prefix of the launcher's messages.
        hosts: where the job runs; None leaves that to the options.
        is_filled: whether workers take all slots of a host before those of the next.
        output_folder: for each worker's outputs, as ``rank.N/stdout`` and ``rank.N/stderr``; '' keeps none.
        allows_plaintext: whether workers on several machines may send without encryption, as under horovodrun, which a
            warning says.
    """

    options: argparse.Namespace
    words: Sequence[str]
    role_command: tuple[str, ...] = ROLE_COMMAND
    program: str = "kvdist-launch"
    hosts: tuple[Host, ...] | None = None
    is_filled: bool = False
    output_folder: str = ""
    allows_plaintext: bool = False


def hosts_of(request: Request) -> list[Host]:
    """The hosts of the job; this machine if none is named.

    Raises:
        ConfigError: they are not valid, or the launcher cannot start processes on them.
    """
    options = request.options
    if request.hosts is not None:
        hosts = list(request.hosts)
    else:
        hosts = [Host("localhost")] if options.hostfile is None else read_hosts(options.hostfile)
    _require_way(options, hosts)
    return hosts


def job_of(request: Request, hosts: Sequence[Host], environ: Mapping[str, str]) -> JobSpec:
    """The job that is asked for. `environ` has the launcher's variables.

    Raises:
        ConfigError: something is missing, impossible, or does not fit the rest.
    """
    options, target = request.options, target_of(request.options)
    num_workers = _num_workers(options, hosts)
    num_servers = num_workers if options.num_servers is None else options.num_servers
    if num_workers < 1:
        raise ConfigError(f"-n is {num_workers}; a job needs at least 1 worker")
    if num_servers < 0:
        raise ConfigError(f"-s is {num_servers}; write the number of servers, or 0 for a job without servers")
    for role, number in ((Role.SERVER, num_servers), (Role.WORKER, num_workers)):
        require_room(hosts, role, number)
    env, env_worker = _variables(options, environ), parse_assignments(options.env_worker or ())
    env_server = parse_assignments(options.env_server or ())
    limits_from_env({**environ, **env})  # before anything starts
    others = any(not host.is_local for host in hosts)
    if options.stdin is not None and options.stdin >= num_workers:
        raise ConfigError(
            f"--stdin names worker {options.stdin}, and -n {num_workers} has workers 0 to {num_workers - 1}"
        )
    if not num_servers:
        _require_fit_without_servers(options, num_workers)
    losses = _losses(options, env, environ, num_workers, num_servers)
    losses.check()
    for option, variables in (("--env-server", env_server), ("--env-worker", env_worker)):
        for name in set(variables) & set(SECURITY_VARIABLES):
            raise ConfigError(f"{option} {name}: all processes of a job need the same; write --env {name}=...")
    seen = Environment(front=interpreter_front(sys.executable), settings={**env, **env_worker}).over(environ)
    return JobSpec(
        num_workers=num_workers,
        num_servers=num_servers,
        command=parse_command(
            request.words,
            seen.get("PATH"),
            is_here=not others and options.emit is None,
            is_read_here=bool(options.sync_dst_dir) or (options.emit is None and any(host.is_local for host in hosts)),
            modules=seen.get("PYTHONPATH", ""),
        ),
        role_command=request.role_command
        + (("--verbose",) if options.verbose else ())
        + _module_words("--server-module", options.server_module or ())
        + _module_words("--optimizer-module", options.optimizer_module or ()),
        port=UNBOUND,
        name=os.urandom(8).hex(),
        scheduler_host=_scheduler_host(options.scheduler_on, hosts),
        stdin=options.stdin,
        is_filled=request.is_filled,
        cwd=(options.sync_dst_dir or os.getcwd()) if others else None,
        env=env,
        env_server=env_server,
        env_worker=env_worker,
        security=security_of(
            options.security,
            env,
            environ,
            leaves_machine=others or target in SPREADS,
            has_servers=num_servers > 0,
            makes_secret=target,
            allows_plaintext=request.allows_plaintext,
        ),
        losses=losses,
    )


def grace_of(options: argparse.Namespace, environ: Mapping[str, str]) -> GracePeriods:
    """How long to wait for processes that should end, or are stopped. `job_of` refuses wrong variables."""
    default_s = GRACE_WITHOUT_SERVERS_S if options.num_servers == 0 else GRACE_S
    grace_s = default_s if options.grace is None else options.grace
    try:
        patience_s = SETTINGS["KVDIST_PATIENCE_S"].read({**environ, **_variables(options, environ)})
    except ConfigError:
        patience_s = Limits.patience_s
    return GracePeriods(grace_s=grace_s, farewell_s=grace_s, patience_s=patience_s)


def _loss_options(options: argparse.Namespace) -> dict[str, Any]:
    """The options about losses that the user has given, by the fields of `LossPolicy`."""
    values = {name: getattr(options, name, None) for name in rows_of(LossPolicy)}
    return {name: value for name, value in values.items() if value is not None}


def _losses(
    options: argparse.Namespace, env: Mapping[str, str], environ: Mapping[str, str], num_workers: int, num_servers: int
) -> LossPolicy:
    """What follows when a process is lost, by the options and by the variables of the job."""
    written = _loss_options(options)
    losses: LossPolicy = read_view(
        LossPolicy,
        {**environ, **env},
        num_workers=num_workers,
        num_servers=num_servers,
        restart=options.restart or 0,
        on_worker_exit=options.on_worker_exit,
        target=target_of(options),
        is_launched=True,
        options=written,
        **{name: value for name, value in written.items() if type(value) is int},
    )
    return losses


def _require_way(options: argparse.Namespace, hosts: Sequence[Host]) -> None:
    """Check that processes can be started on every host."""
    if options.launcher == "ssh" and options.hostfile is None:
        raise ConfigError(
            "--launcher ssh needs the names of the machines: write -H HOSTS, where HOSTS is a hostfile"
            " (kvdist-launch --example-hostfile prints one) or a list such as a:2,b:2"
        )
    others = [host for host in hosts if not host.is_local]
    if others and options.launcher == "local":
        raise ConfigError(
            f"--launcher local starts processes on this machine only, and -H names {others[0]}; leave one of them out"
        )
    if not others and options.sync_dst_dir:
        raise ConfigError("--sync-dst-dir copies to other machines, and -H names none; leave it out")


def _require_fit_without_servers(options: argparse.Namespace, num_workers: int) -> None:
    """Refuse options that a job without servers cannot have."""
    given = [name for name in asked(options) if name in OF_SERVERS]
    if given:
        raise ConfigError(f"{given[0]} is for jobs with servers, and -s 0 starts none; leave one of them out")
    target = target_of(options)
    if target in ELSEWHERE_WITHOUT_SERVERS:
        advice = ELSEWHERE_WITHOUT_SERVERS[target].format(n=num_workers)
        raise ConfigError(f"{target} is for jobs with servers, and -s 0 starts none. For a job without them, {advice}")


def _scheduler_host(name: str | None, hosts: Sequence[Host]) -> int | None:
    """The index of the host of that name; None is the launching machine."""
    if name is None:
        return None
    for index, host in enumerate(hosts):
        if host.name.lower() == name.lower():
            return index
    raise ConfigError(f"--scheduler-on {name} is not one of the hosts: {', '.join(host.name for host in hosts[:10])}")


def _num_workers(options: argparse.Namespace, hosts: Sequence[Host]) -> int:
    if options.num_workers is not None:
        return int(options.num_workers)
    if options.hostfile is None:
        raise ConfigError("the number of workers is missing: write -n WORKERS, or -H with slots for every host")
    return workers_of_slots(hosts)


def _variables(options: argparse.Namespace, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for every process: of files, then ``-x``, then ``--env``; later values win."""
    start_timeout_s = None if options.start_timeout is None else f"{options.start_timeout:g}"
    rows = rows_of(LossPolicy)
    wanted = {rows[name].variable: str(value) for name, value in _loss_options(options).items()} | {
        "KVDIST_INTERFACE": options.interface,
        "KVDIST_PORT_RANGE": options.port_range and "-".join(map(str, options.port_range)),
        "KVDIST_SERVER_DEVICE": options.server_device,
        "KVDIST_DUMP": options.dump and os.path.abspath(options.dump),
        "KVDIST_SNAPSHOTS": options.snapshots and os.path.abspath(options.snapshots),
        "KVDIST_RETURN_S": RETURN_S if options.restart else None,
        "KVDIST_PATIENCE_S": None if options.patience is None else f"{options.patience:g}",
        "KVDIST_FORM_TIMEOUT_S": start_timeout_s,  # until the cluster is complete
        "KVDIST_START_TIMEOUT_S": start_timeout_s,  # until ranks have found each other
    }
    variables = {name: value for name, value in wanted.items() if value}
    for path in options.env_file or ():
        variables |= read_env_file(path)
    return {**variables, **parse_exports(options.x or (), environ), **parse_assignments(options.env or ())}


def _module_words(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The words that name modules to schedulers and servers; invalid names end the job before it starts."""
    names = [name for text in texts for name in SETTINGS["KVDIST_SERVER_MODULE"].parse(text, option)]
    return tuple(word for name in names for word in (option, name))
