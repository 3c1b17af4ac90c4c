"""The command line of ``kvdist-launch``.

Everything after the first word that is no option of ours belongs to the user's command, even if it looks like one
of ours. argparse cannot promise that, so the command is cut off before argparse sees the rest.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from kvdist.config import module_names
from kvdist.errors import ConfigError
from kvdist_launch.command import CommandError, parse_command
from kvdist_launch.course import Patience
from kvdist_launch.local import free_port
from kvdist_launch.output import Sink
from kvdist_launch.plan import Job, parse_assignments, plan, threads_per_worker
from kvdist_launch.supervisor import Supervisor

ROLE_COMMAND = (sys.executable, "-m", "kvdist")
"""What schedulers and servers run."""

HOST = "127.0.0.1"
USAGE_ERROR = 2

USAGE = "kvdist-launch -n WORKERS [-s SERVERS] [options] [--] COMMAND [ARGUMENT...]"

EXAMPLES = """\
examples:
  kvdist-launch -n 2 python train.py                     two workers, two servers, one scheduler
  kvdist-launch -n 4 -s 1 python train.py -n 5 --lr .1   what follows the command belongs to it
  kvdist-launch -n 2 -s 2 "python train.py --lr .1"      the same as one quoted string
  kvdist-launch -n 2 --env-worker LOG=debug -- ./train   a variable for the workers alone

Only workers run COMMAND; it is never passed to a shell. Each line of output gets the name of its process. The first
process that fails ends the job, and its exit code (128 + n for signal n) is that of kvdist-launch. Ctrl-C asks the
workers to end, and once more kills everything.
"""


class ShowVersion(argparse.Action):
    """Print the version and exit. argparse's own action wants to know it beforehand, and finding it takes time."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"kvdist-launch {_version()}")
        parser.exit()


OPTIONS: tuple[tuple[tuple[str, ...], dict[str, Any]], ...] = (
    (("-n", "--num-workers"), {"type": int, "required": True, "metavar": "WORKERS", "help": "number of workers"}),
    (("-s", "--num-servers"), {"type": int, "metavar": "SERVERS", "help": "number of servers (default: as workers)"}),
    (("--env",), {"action": "append", "metavar": "NAME=VALUE", "help": "set a variable for every process"}),
    (("--env-server",), {"action": "append", "metavar": "NAME=VALUE", "help": "set a variable for the servers"}),
    (("--env-worker",), {"action": "append", "metavar": "NAME=VALUE", "help": "set a variable for the workers"}),
    (
        ("--server-module",),
        {"action": "append", "metavar": "MODULE", "help": "a module with optimizers or handlers of commands of your"
         " own, which scheduler and servers import"},
    ),
    (
        ("--optimizer-module",),
        {"action": "append", "metavar": "MODULE", "help": "a module with optimizers of your own, which scheduler and"
         " servers import"},
    ),
    (
        ("--grace",),
        {"type": float, "default": 5.0, "metavar": "SECONDS", "help": "how long the others may take to end after a"
         " failure, an interruption or the last worker's end (default: 5)"},
    ),
    (("--launcher",), {"default": "local", "metavar": "local", "help": "how to start processes; so far only: local"}),
    (("-H", "--hostfile"), {"metavar": "HOSTS", "help": argparse.SUPPRESS}),
    (("--sync-dst-dir",), {"metavar": "DIR", "help": argparse.SUPPRESS}),
    (("--version",), {"action": ShowVersion, "nargs": 0, "help": "print the version and exit"}),
    (("-h", "--help"), {"action": "help", "help": "print this text and exit"}),
)  # fmt: skip
"""Every option: its names, and what argparse is told of it."""

VALUED_OPTIONS = frozenset(
    name for names, settings in OPTIONS if settings.get("action", "append") == "append" for name in names
)
"""The options whose value may be the next word."""


def main(argv: Sequence[str] | None = None, role_command: Sequence[str] = ROLE_COMMAND) -> int:
    """Run a job as the command line says and return the launcher's exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.
        role_command: what schedulers and servers run.

    Raises:
        SystemExit: argparse answered (``--help``, ``--version``) or refused the options.
    """
    own_words, command_words = split_command(sys.argv[1:] if argv is None else argv)
    options = _parser().parse_args(own_words)
    environ = _environ()
    err = _sink(2, environ)
    try:
        _require_one_machine(options)
        job = _job(options, command_words, tuple(role_command), environ)
        supervisor = Supervisor(plan(job, environ), _sink(1, environ), err, _patience(options.grace))
        if "OMP_NUM_THREADS" not in {**environ, **job.env, **job.env_worker}:
            supervisor.say(_thread_note(job))
        return supervisor.run()
    except ConfigError as error:
        err.write_lines(b"kvdist-launch: error: ", [f"{error}\n".encode(errors="surrogateescape")])
        return error.exit_code if isinstance(error, CommandError) else USAGE_ERROR


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's own words and those of the user's command; a ``--`` between them is dropped."""
    index = 0
    while index < len(words):
        word = words[index]
        if word == "--":
            return list(words[:index]), list(words[index + 1 :])
        if not word.startswith("-") or word == "-":
            break
        index += 2 if word in VALUED_OPTIONS else 1
    return list(words[:index]), list(words[index:])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvdist-launch",
        usage=USAGE,
        description="Start a kvdist job on this machine: one scheduler, its servers, and workers that run COMMAND.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    for names, settings in OPTIONS:
        parser.add_argument(*names, **settings)
    return parser


def _require_one_machine(options: argparse.Namespace) -> None:
    asked = {
        f"-H {options.hostfile}": options.hostfile,
        f"--sync-dst-dir {options.sync_dst_dir}": options.sync_dst_dir,
        f"--launcher {options.launcher}": options.launcher != "local",
    }
    several = [text for text, is_asked in asked.items() if is_asked]
    if several:
        raise ConfigError(
            f"several machines are not supported by this version; leave out {' and '.join(several)} to start all"
            " processes on this machine, or start the processes yourself with DMLC_* variables"
        )


def _job(
    options: argparse.Namespace, words: Sequence[str], role_command: tuple[str, ...], environ: Mapping[str, str]
) -> Job:
    num_servers = options.num_workers if options.num_servers is None else options.num_servers
    for flag, count, role in (("-n", options.num_workers, "worker"), ("-s", num_servers, "server")):
        if count < 1:
            raise ConfigError(f"{flag} is {count}; a job needs at least 1 {role}")
    env, env_worker = parse_assignments(options.env or ()), parse_assignments(options.env_worker or ())
    return Job(
        num_workers=options.num_workers,
        num_servers=num_servers,
        command=parse_command(words, {**environ, **env, **env_worker}.get("PATH")),
        role_command=role_command
        + _module_words("--server-module", options.server_module or ())
        + _module_words("--optimizer-module", options.optimizer_module or ()),
        port=free_port(HOST),
        name=os.urandom(8).hex(),
        host=HOST,
        cores=len(os.sched_getaffinity(0)),
        env=env,
        env_server=parse_assignments(options.env_server or ()),
        env_worker=env_worker,
    )


def _module_words(option: str, texts: Sequence[str]) -> tuple[str, ...]:
    """The words with which schedulers and servers are told of modules; misspelt names end the job before it starts."""
    names = [name for text in texts for name in module_names(text)]
    return tuple(word for name in names for word in (option, name))


def _patience(grace_s: float) -> Patience:
    if not 0 <= grace_s < float("inf"):
        raise ConfigError(f"--grace is {grace_s}; it must be a number of seconds, at least 0")
    return Patience(grace_s=grace_s, farewell_s=grace_s)


def _environ() -> dict[str, str]:
    """The launcher's environment, in which ``python`` is the interpreter that runs the launcher.

    A launcher called by its path from a virtual environment that is not activated would otherwise start workers
    with an interpreter that does not have kvdist.
    """
    environ = dict(os.environ)
    if sys.prefix != sys.base_prefix:
        own = os.path.dirname(sys.executable)
        path = environ.get("PATH", os.defpath)
        if path.split(os.pathsep)[0] != own:
            environ["PATH"] = own + os.pathsep + path
    return environ


def _sink(descriptor: int, environ: Mapping[str, str]) -> Sink:
    # https://no-color.org: any value but an empty one asks for no colour.
    is_terminal = os.isatty(descriptor) and environ.get("TERM") != "dumb"
    return Sink(descriptor, is_terminal, colours=not environ.get("NO_COLOR"))


def _thread_note(job: Job) -> str:
    threads = threads_per_worker(job.cores, job.num_workers)
    return f"OMP_NUM_THREADS={threads} for each worker (cores: {job.cores}, workers: {job.num_workers})"


def _version() -> str:
    # Imported here because it costs a third of the launcher's whole start, and few ask for the version.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("kvdist")
    except PackageNotFoundError:
        return "(unknown version: kvdist is not installed as a package)"
