"""The options of ``kvdist-launch``, as a table in the groups in which ``--help`` shows them.

This module converts each option's text to a value of the right type, or raises an error with the expected form.
"""

from __future__ import annotations

import argparse
import functools
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from kvdist.config.command_line import Parser
from kvdist.config.paths import expanded
from kvdist.config.policies import policy_from
from kvdist.config.settings import SETTINGS
from kvdist.config.suggestions import did_you_mean
from kvdist.errors import ConfigError
from kvdist.version import __version__

LAUNCHERS = ("local", "ssh", "mpi", "slurm", "none")
FORMATS = ("sbatch", "kubernetes")

USAGE = "kvdist-launch -n WORKERS [-s SERVERS] [-H HOSTS] [options] [--] COMMAND [ARGUMENT...]"

EXAMPLES = """\
examples:
  kvdist-launch -n 2 python train.py                     two workers, two servers, one scheduler
  kvdist-launch -n 4 -s 1 python train.py -n 5 --lr .1   options after the command belong to the command
  kvdist-launch -n 2 -s 2 "python train.py --lr .1"      the command as a quoted string
  kvdist-launch -n 4 -s 0 python train.py                no servers: collectives among four workers
  kvdist-launch -n 2 --env-worker LOG=debug -- ./train   a variable for the workers alone
  kvdist-launch -n 4 -H hosts python train.py            on the machines of the file hosts, over ssh
  kvdist-launch -H a:2,b:2 python train.py               two workers on each of a and b
  kvdist-launch -n 4 -H hosts --dry-run python train.py  only show what would run where

Only workers run COMMAND, without a shell. Each line of output begins with the name of its process. The first process
that fails ends the job, and kvdist-launch exits with its exit code (128 + n for signal n). Ctrl-C asks the workers to
end; a second Ctrl-C kills all processes.
"""

Option = tuple[tuple[str, ...], dict[str, Any]]


def parse_options(words: Sequence[str]) -> argparse.Namespace:
    """The values of all options in the launcher's part of the command line.

    Raises:
        SystemExit: argparse answered (``--help``, ``--version``) or refused the options.
    """
    options: argparse.Namespace = new_parser().parse_args(words)
    return options


@functools.cache
def new_parser() -> Parser:
    """The parser of the launcher's part of the command line."""
    description = "Start a kvdist job: scheduler, servers, and workers that run COMMAND; with -s 0 workers alone."
    return grouped_parser("kvdist-launch", USAGE, description, EXAMPLES, GROUPS, OF_MXNET)


def grouped_parser(
    program: str,
    usage: str,
    description: str,
    examples: str,
    groups: Iterable[tuple[str, Iterable[Option]]],
    instead: Mapping[str, str] | None = None,
) -> Parser:
    """A parser of options in groups: for each group its title, and the arguments of `add_argument`.

    Args:
        program, usage, description, examples: texts of ``--help``.
        instead: options that the program does not have → advice on a replacement.
    """
    parser = Parser(
        prog=program,
        usage=usage,
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
        instead=instead,
    )
    for title, options in groups:
        group = parser.add_argument_group(title)
        for names, settings in options:
            group.add_argument(*names, **settings)
    return parser


OF_MXNET = {"--p3": "-x DMLC_PS_VAN_TYPE=p3, or kv.create('p3'), gives priority slices"}
"""Options of MXNet's launcher that ``kvdist-launch`` does not have → advice on a replacement."""


def _launcher(text: str) -> str:
    if text in ("sge", "yarn"):
        raise argparse.ArgumentTypeError(
            f"invalid choice: {text!r}, which only MXNet's launcher has; --launcher none prints the commands to start"
            " on each host"
        )
    return text


def target_of(options: argparse.Namespace) -> str:
    """The option by which another program starts the processes, such as ``--emit sbatch``; '' if the launcher does."""
    if options.emit is not None:
        return f"--emit {options.emit}"
    return f"--launcher {options.launcher}" if options.launcher in ("mpi", "slurm", "none") else ""


def split_command(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The launcher's part of the command line, and the user's command; a ``--`` between them is dropped."""
    return new_parser().split(words)


def asked(options: argparse.Namespace) -> list[str]:
    """The options whose value differs from the default."""
    found = []
    for names, settings in OPTIONS:
        value = getattr(options, names[-1].lstrip("-").replace("-", "_"), None)
        if value != settings.get("default", False if settings.get("action") == "store_true" else None):
            found.append(names[-1])
    return found


SHOW_VERSION = {"action": "version", "version": f"%(prog)s {__version__}", "help": "print the version and exit"}


class ShowExample(argparse.Action):
    """Print a hostfile and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from kvdist_launch.hosts import EXAMPLE_HOSTFILE

        print(EXAMPLE_HOSTFILE, end="")
        parser.exit()


class ShowCompletion(argparse.Action):
    """Print the script that completes options in a shell and exit."""

    def __call__(self, parser: argparse.ArgumentParser, _: object, shell: object, *__: object) -> None:
        try:
            import shtab
        except ImportError:
            parser.error("--print-completion needs shtab; install it: pip install shtab")
        print(shtab.complete(parser, str(shell)))
        parser.exit()


def numbers(advice: str) -> Callable[[str], float]:
    """A parser of finite numbers of at least 0; `advice` completes the error."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not 0 <= number < float("inf"):
            raise argparse.ArgumentTypeError(f"{text!r}{advice}")
        return number

    return read


to_seconds = numbers(" is not a number of seconds; write a number of at least 0")


def _port_range(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([0-9]{1,5})[-:]([0-9]{1,5})", text)
    if match is None or not 1 <= int(match.group(1)) <= int(match.group(2)) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of ports; write FIRST-LAST, as in 20000-20100")
    return int(match.group(1)), int(match.group(2))


def to_interface(text: str) -> str:
    """The name of a network card, or a network."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.@-]{0,14}", text):
        return text
    try:
        return str(ipaddress.ip_network(text, strict=False))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither the name of an interface, such as eth1, nor a network, such as 10.1.0.0/16"
        ) from None


def matching(pattern: str, advice: str, kind: Callable[[str], Any] = str) -> Callable[[str], Any]:
    """A parser of texts that match `pattern`, whose first group is the value; `advice` completes the error."""

    def parse(text: str) -> Any:
        match = re.fullmatch(pattern, text)
        if match is None or not text.isprintable():
            raise argparse.ArgumentTypeError(f"{text!r}{advice}")
        return kind(match.group(1))

    return parse


_whole = matching("(-?[0-9]{1,9})", " is not a whole number", int)
_restarts = matching(
    "(?:abort|restart:([1-9][0-9]{0,3}))",
    ": write abort, or restart:N with a number from 1 to 9999",
    lambda number: int(number or 0),
)
_number_of_restarts = matching(
    "([1-9][0-9]{0,3})", ": write how often each worker may be started again, from 1 to 9999", int
)
_worker = matching("w(?:orker-)?([0-9]{1,6})", ": write the name of a worker, as in w0", int)
_ssh_option = matching("([A-Za-z]{1,64}=.+)", ": write NAME=VALUE as in ssh_config, such as ProxyJump=gate")


def checked(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser whose errors are argparse's."""

    def read(text: str) -> Any:
        try:
            return parse(text)
        except (ConfigError, ValueError) as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


_devices = checked(lambda text: ",".join(SETTINGS["KVDIST_SERVER_DEVICE"].parse(text, "--server-device")))
_policy = checked(lambda text: str(policy_from(text) or text))  # sync is no policy


def _filters(text: str) -> tuple[str, ...]:
    patterns = tuple(text.split(","))
    if not all(re.fullmatch(r"[A-Za-z0-9*?@._\[\]!-]{1,64}", pattern) for pattern in patterns):
        raise argparse.ArgumentTypeError(
            f"{text!r}: write names of processes with commas between, as in w0,s*,worker-[0-3]"
        )
    return patterns


def to_line(text: str) -> str:
    """A line of text."""
    if not text or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{text!r} must be a line of text without control characters")
    return text


to_path = checked(lambda text: expanded(to_line(text)))


def _word(text: str) -> str:
    if text.startswith("-"):
        raise argparse.ArgumentTypeError(f"{text!r} must not begin with a hyphen")
    return to_line(text)


def _remote_folder(text: str) -> str:
    """An absolute folder of other hosts, without the ``..`` and the hyphens that lead a copy astray."""
    parts = [part for part in text.split("/") if part not in ("", ".")]
    if not text.startswith("/") or not parts or ".." in parts or not text.isprintable():
        raise argparse.ArgumentTypeError(
            f"{text!r} must be the absolute path of a folder without .., as in /tmp/my-job, and not / itself"
        )
    return "/" + "/".join(parts)


def valued(kind: Callable[[str], object], metavar: str, text: str, **settings: object) -> dict[str, Any]:
    """The arguments of `add_argument` for an option with a value."""
    return {"type": kind, "metavar": metavar, "help": text, **settings}


def repeated(kind: Callable[[str], object], metavar: str, text: str) -> dict[str, Any]:
    """The arguments of `add_argument` for an option with a value that may be repeated."""
    return valued(kind, metavar, text, action="append")


def _choice(choices: Sequence[str], text: str) -> dict[str, Any]:
    def chosen(word: str) -> str:
        near = "" if word in choices else did_you_mean(word, choices)
        if near:
            raise argparse.ArgumentTypeError(f"{word!r} is unknown; {near} (choose from {', '.join(choices)})")
        return word

    return {"type": chosen, "choices": choices, "metavar": "|".join(choices), "help": text}


def flag(text: str) -> dict[str, Any]:
    """An option without a value."""
    return {"action": "store_true", "help": text}


GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    ("job", (
        (("-n", "--num-workers"), valued(_whole, "WORKERS", "number of workers (default: all slots of -H)")),
        (("-s", "--num-servers"), valued(_whole, "SERVERS", "number of servers (default: as workers); 0 is a job"
         " without servers, which trains by collective operations")),
        (("--server-module",), repeated(str, "MODULE", SETTINGS["KVDIST_SERVER_MODULE"].help())),
        (("--optimizer-module",), repeated(str, "MODULE", SETTINGS["KVDIST_OPTIMIZER_MODULE"].help())),
        (("--server-device",), valued(_devices, "DEVICE", SETTINGS["KVDIST_SERVER_DEVICE"].help())),
    )),
    ("hosts", (
        (("-H", "--hostfile"), valued(str, "HOSTS", "a hostfile, or a list HOST:SLOTS,... (default: this machine)")),
        (("--launcher",), {**_choice(LAUNCHERS, "how to start processes (default: local, with -H"
         " ssh); none only prints the commands"), "type": _launcher}),
        (("--scheduler-on",), valued(_word, "HOST", "host of the scheduler (default: the launching machine)")),
        (("--sync-dst-dir",), valued(_remote_folder, "DIR", "copy the current folder to DIR on every host, and run in"
         " DIR")),
        (("--sync-exclude",), repeated(to_line, "PATTERN", "do not copy files that match, as in rsync; may be"
         " repeated")),
        (("--sync-delete",), flag("delete files in DIR that are not in the current folder")),
        (("--python",), valued(_word, "PATH", "Python interpreter on other hosts (default: the path of the"
         " launcher's interpreter, or python after --activate)")),
        (("--activate",), valued(to_line, "COMMAND", "line of bash that runs on each host before python starts, such"
         " as: source /opt/env/bin/activate")),
        (("--ssh-option",), repeated(_ssh_option, "NAME=VALUE", "option for ssh, as in ssh_config; may be repeated")),
        (("--accept-new-host-keys",), flag("accept the keys of hosts that ssh does not know yet")),
        (("--no-preflight",), flag("start without a check of the hosts")),
    )),
    ("environment", (
        (("-x",), repeated(str, "NAME[=VALUE]", "pass on a variable of this environment, or set it")),
        (("--env",), repeated(str, "NAME=VALUE", "set a variable for every process")),
        (("--env-server",), repeated(str, "NAME=VALUE", "set a variable for the servers")),
        (("--env-worker",), repeated(str, "NAME=VALUE", "set a variable for the workers")),
        (("--env-file",), repeated(to_path, "FILE", "set the variables of a file with lines NAME=VALUE")),
    )),
    ("network and security", (
        (("--security",), _choice(("curve", "none"), SETTINGS["KVDIST_SECURITY"].help() + " (default: curve)")),
        (("--port-range",), valued(_port_range, "FIRST-LAST", SETTINGS["KVDIST_PORT_RANGE"].help())),
        (("--interface",), valued(to_interface, "NAME|CIDR", SETTINGS["KVDIST_INTERFACE"].help())),
    )),
    ("output", (
        (("--log-dir",), valued(to_path, "DIR", "also write the output of each process to a file in DIR")),
        (("--dump",), valued(to_path, "DIR", "folder for the last messages and answers of each process, if the job"
         " fails or waits for long; `kvdist why DIR` explains them")),
        (("--filter",), valued(_filters, "NAMES", "show only the output of these processes, as in"
         " w0,s*,worker-[0-3]")),
        (("-v", "--verbose"), flag("say where each worker runs, and which kernels the servers use; with --dry-run show"
         " every command and its variables")),
        (("--timestamps",), flag("begin each line with the time")),
        (("--json-summary",), valued(to_path, "FILE", "write a summary of the job to FILE, as JSON")),
        (("--stdin",), valued(_worker, "WORKER", "give this terminal's input to a worker, as in w0, for a debugger; its"
         " output is shown as it comes, without prefixes")),
        (("--dry-run",), flag("only show a table of what would run where; with -v every command with its variables,"
         " but for values that look secret")),
    )),
    ("failure", (
        (("--on-worker-exit",), valued(_restarts, "abort|restart:N", "reaction to the failure or loss of any process:"
         " the job ends, or the whole job is started again, at most N times (default: abort)", default=0)),
        (("--on-loss",), _choice(("fail", "wait", "continue"), SETTINGS["KVDIST_ON_LOSS"].help())),
        (("--restart",), valued(_number_of_restarts, "N", "with --on-loss wait or continue: start each lost worker"
         " again, at most N times, on another host if its host is lost; with continue also a killed scheduler")),
        (("--snapshots",), valued(to_path, "DIR", SETTINGS["KVDIST_SNAPSHOTS"].help())),
        (("--max-workers",), valued(_whole, "N", SETTINGS["KVDIST_MAX_WORKERS"].help() + "; see docs/launching.md")),
        (("--min-workers",), valued(_whole, "N", SETTINGS["KVDIST_MIN_WORKERS"].help() + "; see docs/reliability.md")),
        (("--policy",), valued(_policy, "NAME", SETTINGS["KVDIST_POLICY"].help())),
        (("--replicas",), valued(_whole, "N", SETTINGS["KVDIST_REPLICAS"].help() + "; see docs/reliability.md")),
        (("--start-timeout",), valued(to_seconds, "SECONDS", SETTINGS["KVDIST_FORM_TIMEOUT_S"].help())),
        (("--patience",), valued(to_seconds, "SECONDS", SETTINGS["KVDIST_PATIENCE_S"].help())),
        (("--grace",), valued(to_seconds, "SECONDS", "seconds for the other processes to end after a failure, an"
         " interruption or the last worker's end (default: 5; without servers 2)")),
    )),
    ("other targets", (
        (("--emit",), _choice(FORMATS, "print a script or manifest that starts this job, and start nothing")),
        (("--image",), valued(_word, "IMAGE", "container image for --emit kubernetes")),
        (("--example-hostfile",), {"action": ShowExample, "nargs": 0, "help": "print a hostfile and exit"}),
        (("--print-completion",), {"action": ShowCompletion, **_choice(("bash", "zsh"), "print the script that"
         " completes these options in a shell, and exit")}),
        (("--version",), SHOW_VERSION),
        (("-h", "--help"), {"action": "help", "help": "print this text and exit"}),
    )),
)  # fmt: skip
"""Every option: its names, and the arguments of `add_argument`."""

OPTIONS: tuple[Option, ...] = tuple(option for _, options in GROUPS for option in options)
