"""The command ``kvdist-run``: the options of ``horovodrun`` 0.28, translated to those of ``kvdist-launch -s 0``.

Most mean the same. Those that do not are in `kvdist.config.foreign`: they are accepted with a single warning, or
refused.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvdist.config.command_line import USAGE_ERROR, Parser
from kvdist.config.foreign import FOREIGN, FOREIGN_NAMES, without_effect
from kvdist.config.processes import LEAVE_FOLDER
from kvdist.config.settings import HOROVOD_LOG_LEVEL, SETTINGS
from kvdist.errors import ConfigError
from kvdist_launch.cli import launch, show
from kvdist_launch.hosts import Host, parse_host_list, read_hostfile
from kvdist_launch.options import (
    SHOW_VERSION,
    Option,
    checked,
    flag,
    grouped_parser,
    matching,
    numbers,
    parse_options,
    repeated,
    to_interface,
    to_path,
    to_seconds,
    valued,
)
from kvdist_launch.plan import slots_word
from kvdist_launch.request import Request
from kvdist_launch.start import begin, end

USAGE = "kvdist-run -np PROCESSES [-H HOST:SLOTS,...] [options] [--] COMMAND [ARGUMENT...]"

EXAMPLES = """\
examples:
  kvdist-run -np 4 python train.py                            four processes on this machine
  kvdist-run -np 4 -H host:2,host2:2 python train.py          two on each of host and host2, over ssh
  kvdist-run -np 4 -hostfile hosts python train.py            on the machines of the file hosts
  kvdist-run -np 2 --output-filename out python train.py      out/rank.0/stdout, out/rank.0/stderr and so on

Hosts are filled in order. The first process that fails ends the job, and kvdist-run exits with its exit code (128 + n
for signal n). kvdist-launch -s 0 does the same with the options of kvdist-launch.
"""

WIDTH = 78


CONFIG_SECTIONS = {
    "params": "",
    "autotune": "autotune-",
    "timeline": "timeline-",
    "stall_check": "stall-check-",
    "library_options": "",
    "logging": "log-",
}
"""Sections of Horovod's configuration file → what its entries begin with as options."""

CONFIG_SWITCHES = {("autotune", True): ["--autotune"], ("stall_check", False): ["--no-stall-check"]}
"""The sections with an entry ``enabled``, and its value that is not the default → the option."""


def words_of_config(path: str) -> list[str]:
    """The options that Horovod's configuration file stands for.

    Args:
        path: a file of YAML; PyYAML reads it.

    Raises:
        ConfigError: it cannot be read, or has a section or entry that is no option.
    """
    try:
        import yaml  # type: ignore[import-untyped]  # a feature at a seam: loaded where it is used
    except ImportError:
        raise ConfigError("--config-file needs PyYAML; install it: pip install PyYAML") from None
    try:
        sections = yaml.safe_load(Path(path).read_text("utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"--config-file {path} cannot be read: {error}") from None
    if not isinstance(sections, dict):
        raise ConfigError(f"--config-file {path} is not a table of sections; known are {', '.join(CONFIG_SECTIONS)}")
    controller = sections.pop("controller", None)
    words = [] if controller is None else [f"--{str(controller).lower()}"]
    for section, entries in sections.items():
        if section not in CONFIG_SECTIONS or not isinstance(entries, dict):
            known = ", ".join(("controller", *CONFIG_SECTIONS))
            raise ConfigError(f"--config-file {path} has no use for {section!r}; sections are {known}")
        for entry, value in entries.items():
            words += _words_of_entry(section, str(entry), value)
    return words


def _words_of_entry(section: str, entry: str, value: object) -> list[str]:
    if entry == "enabled" and (section, not value) in CONFIG_SWITCHES:
        return []
    if entry == "enabled" and (section, bool(value)) in CONFIG_SWITCHES:
        return CONFIG_SWITCHES[section, bool(value)]
    name = f"--{CONFIG_SECTIONS[section]}{entry.replace('_', '-')}"
    if value is None or value is False:
        return []
    return [name] if value is True else [f"{name}={value}"]


class ShowBuild(argparse.Action):
    """Print which libraries can be used for training, in horovodrun's form, and exit."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.util import find_spec

        from kvdist.version import __version__

        frameworks = [("TensorFlow", "tensorflow"), ("Keras", "keras"), ("PyTorch", "torch"), ("MXNet", "mxnet")]
        operations = _torch_backends()
        lines = [f"kvdist v{__version__}:", "", "Available Frameworks:"]
        lines += [_box(title, find_spec(module) is not None) for title, module in frameworks]
        lines += ["", "Available Controllers:", _box("MPI", False), _box("Gloo", operations["Gloo"])]
        lines += ["", "Available Tensor Operations:", *(_box(name, there) for name, there in operations.items())]
        parser.exit(show("\n".join(lines), PROGRAM))


def _torch_backends() -> dict[str, bool]:
    """Which backends torch has; asked in a separate process, as the launcher does not import torch."""
    asked = f"{LEAVE_FOLDER}; import torch.distributed as d; print(d.is_nccl_available(), d.is_gloo_available())"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True)
    nccl, _, gloo = done.stdout.strip().partition(" ")
    return {"NCCL": nccl == "True", "Gloo": gloo == "True"}


def _box(name: str, is_there: bool) -> str:
    return f"    [{'X' if is_there else ' '}] {name}"


def new_parser() -> Parser:
    """The parser of kvdist-run's options."""
    description = "Start processes that train together without servers, with the options of horovodrun."
    parser = grouped_parser("kvdist-run", USAGE, description, EXAMPLES, GROUPS)
    without = parser.add_argument_group("without effect")
    options = [(name, row.is_refused) for row in FOREIGN for name in row.names.split() if name.startswith("-")]
    kinds: dict[str, dict[str, Any]] = {"=": {"type": _number}, ":": {"type": str}}
    for name, is_refused in options:
        kind = {"nargs": "*"} if is_refused else kinds.get(name[-1], {"action": "store_true"})
        without.add_argument(name.rstrip("=:"), help=argparse.SUPPRESS, **kind)
    idle = ", ".join(name.rstrip("=:") for name, is_refused in options if not is_refused)
    without.description = textwrap.fill(f"accepted, with a note: {idle}", WIDTH, break_on_hyphens=False)
    return parser


def parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The values of kvdist-run's options, the foreign options among the words, and the user's command.

    Raises:
        SystemExit: argparse answered (``--help``, ``--version``, ``--check-build``) or refused the options.
    """
    parser = new_parser()
    own, command = parser.split(words)
    own = _with_config_file(own, parser)
    given = {word.partition("=")[0] for word in own}
    foreign = [name for name in FOREIGN_NAMES if name in given]
    for name in foreign:
        if FOREIGN_NAMES[name].is_refused:
            parser.error(f"{name}: {FOREIGN_NAMES[name].why}")
    options = parser.parse_args(own)
    if options.num_proc is None:
        parser.error("the number of processes is missing: write -np PROCESSES")
    return options, foreign, command


def _with_config_file(own: list[str], parser: argparse.ArgumentParser) -> list[str]:
    """The options of a configuration file, then those of the command line, which win."""
    reader = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    reader.add_argument("--config-file", type=to_path)
    path = reader.parse_known_args(own)[0].config_file
    if path is None:
        return own
    try:
        return words_of_config(path) + own
    except ConfigError as error:
        parser.error(str(error))


_at_least_one = matching("(0*[1-9][0-9]*)", " is not a whole number of at least 1", int)


_number = numbers(" is not a number of at least 0")


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} is not a port; write a number from 1 to 65535")
    return int(text)


def _network(text: str) -> str:
    if "," in text:
        raise argparse.ArgumentTypeError(f"{text!r}: name one interface, the one that all hosts have in common")
    return to_interface(text)


GROUPS: tuple[tuple[str, tuple[Option, ...]], ...] = (
    ("job", (
        (("-np", "--num-proc"), valued(_at_least_one, "PROCESSES", "number of processes")),
        (("-H", "--hosts"), valued(str, "HOST:SLOTS,...", "hosts with their numbers of processes (default: localhost"
         " with all of -np)")),
        (("-hostfile", "--hostfile"), valued(to_path, "FILE", "file with lines HOST slots=N")),
        (("--start-timeout",), valued(to_seconds, "SECONDS", SETTINGS["KVDIST_START_TIMEOUT_S"].help())),
        (("--gloo-timeout-seconds",), valued(to_seconds, "SECONDS", "the same, unless --start-timeout is set")),
        (("--tcp",), flag("let NCCL use TCP only, as gloo does (NCCL_IB_DISABLE=1)")),
        (("-x",), repeated(str, "NAME[=VALUE]", "pass on a variable of this environment to other machines, or set it")),
        (("--config-file",), valued(to_path, "FILE", "Horovod's YAML file of options; the command line takes"
         " precedence")),
        (("--network-interfaces", "--network-interface"), valued(_network, "NAME", "network interface of all hosts")),
    )),
    ("ssh", (
        (("-p", "--ssh-port"), valued(_port, "PORT", "ssh port of all hosts")),
        (("-i", "--ssh-identity-file"), valued(to_path, "FILE", "private key for ssh")),
    )),
    ("output", (
        (("--output-filename",), valued(to_path, "DIR", "also write the output of each process to DIR/rank.N/stdout and"
         " DIR/rank.N/stderr")),
        (("--verbose",), flag("say where each process runs")),
        (("--log-level",), valued(checked(HOROVOD_LOG_LEVEL.parse), "LEVEL", HOROVOD_LOG_LEVEL.help())),
        (("-prefix-timestamp", "--prefix-output-with-timestamp"), flag("begin each line with the time")),
    )),
    ("timeline and stalls", (
        (("--timeline-filename",), valued(to_path, "FILE", SETTINGS["KVDIST_TIMELINE"].help())),
        (("--timeline-mark-cycles",), flag("also mark in the timeline when no operation was pending")),
        (("--no-timeline-mark-cycles",), {"action": "store_false", "dest": "timeline_mark_cycles",
         "help": argparse.SUPPRESS}),
        (("--no-stall-check",), flag("do not report ranks that keep others waiting")),
        (("--stall-check",), {"action": "store_false", "dest": "no_stall_check", "help": argparse.SUPPRESS}),
        (("--stall-check-warning-time-seconds",), valued(to_seconds, "SECONDS",
         SETTINGS["KVDIST_STALL_CHECK_S"].help())),
        (("--stall-check-shutdown-time-seconds",), valued(to_seconds, "SECONDS",
         SETTINGS["KVDIST_STALL_SHUTDOWN_S"].help())),
    )),
    ("other", (
        (("-cb", "--check-build"), {"action": ShowBuild, "nargs": 0, "help": "print the available frameworks"
         " and exit"}),
        (("-v", "--version"), SHOW_VERSION),
        (("-h", "--help"), {"action": "help", "help": "print this text and exit"}),
    )),
)  # fmt: skip
"""Every option with an effect: its names, and the arguments of `add_argument`."""

PROGRAM = "kvdist-run"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the job of a command line and return the launcher's exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.

    Raises:
        SystemExit: argparse answered (``--help``, ``--version``, ``--check-build``) or refused the options.
    """
    own, idle, command = parse(sys.argv[1:] if argv is None else argv)
    if idle:
        _say("; ".join(without_effect(idle)))
    try:
        request = request_of(own, command, socket.gethostname())
    except ConfigError as error:
        _say(f"error: {error}")
        return USAGE_ERROR
    return launch(request)


def request_of(own: argparse.Namespace, command: Sequence[str], this_machine: str) -> Request:
    """The request to ``kvdist-launch``.

    Args:
        own: options of ``kvdist-run``.
        this_machine: the name of this machine, which may be among the hosts.

    Raises:
        ConfigError: the hosts are not valid, or have too few slots.
    """
    hosts = hosts_of(own.hosts, own.hostfile, own.num_proc, this_machine)
    options = parse_options([])
    options.num_workers, options.num_servers = own.num_proc, 0
    options.x = own.x
    options.interface = own.network_interfaces
    options.start_timeout = own.gloo_timeout_seconds if own.start_timeout is None else own.start_timeout
    options.verbose = own.verbose
    options.timestamps = own.prefix_output_with_timestamp
    options.ssh_option = ssh_option_of(own.ssh_port, own.ssh_identity_file)
    options.env = [f"{name}={value}" for name, value in _variables(own).items()]
    return Request(
        options,
        command,
        program=PROGRAM,
        hosts=tuple(hosts),
        is_filled=True,
        output_folder=own.output_filename or "",
        allows_plaintext=True,
    )


def ssh_option_of(port: int | None, identity_file: str | None) -> list[str]:
    """Horovod's options for ssh as those of ``--ssh-option``."""
    named = (("Port", port), ("IdentityFile", identity_file))
    return [f"{name}={value}" for name, value in named if value is not None]


def hosts_of(hosts_text: str | None, hostfile: str | None, num_proc: int, this_machine: str) -> list[Host]:
    """The hosts that Horovod's words name, which have slots for all processes.

    Args:
        hosts_text: such as ``host:2,host2:2``.
        hostfile: a file of lines ``HOST slots=N``; with neither all processes run on this machine.
        num_proc: number of processes.
        this_machine: the name of this machine, which may be among the hosts.

    Raises:
        ConfigError: the hosts are not valid, or have too few slots.
    """
    if hosts_text is not None and hostfile is not None:
        raise ConfigError("-H and -hostfile both name the hosts; leave one of them out")
    if hosts_text is not None:
        named = parse_host_list(hosts_text)
    elif hostfile is not None:
        named = read_hostfile(hostfile)
    else:
        named = [Host("localhost", slots=num_proc)]
    hosts = [replace(host, name="localhost") if _is(host, this_machine) else host for host in named]
    if sum(host.is_local for host in hosts) > 1:
        raise ConfigError(f"this machine is named twice in the hosts, once as {this_machine}; write it once")
    silent = [host.name for host in hosts if host.slots is None]
    if silent:
        raise ConfigError(f"{silent[0]} has no number of slots: write HOST:SLOTS after -H, or HOST slots=N in a file")
    slots = sum(host.slots or 0 for host in hosts)
    if slots < num_proc:
        each = ", ".join(f"{host}: {host.slots}" for host in hosts)
        raise ConfigError(
            f"-np asks for {num_proc} processes, but the hosts have {slots_word(slots)} ({each}); add slots or hosts,"
            f" or ask for -np {slots}"
        )
    return hosts


def _is(host: Host, this_machine: str) -> bool:
    """Whether a host is this machine under its name; a user or a port asks for ssh even to it."""
    names = {this_machine.lower(), this_machine.lower().partition(".")[0]}
    return host.name.lower() in names and not host.asks_for_ssh


def _variables(own: argparse.Namespace) -> dict[str, str]:
    """The variables that carry options to the processes."""
    check_s = 0.0 if own.no_stall_check else own.stall_check_warning_time_seconds
    found = {
        "KVDIST_TIMELINE": own.timeline_filename,
        "KVDIST_TIMELINE_MARK_CYCLES": "1" if own.timeline_mark_cycles else None,
        "NCCL_IB_DISABLE": "1" if own.tcp else None,
        "HOROVOD_LOG_LEVEL": own.log_level,
        "KVDIST_STALL_CHECK_S": None if check_s is None else f"{check_s:g}",
        "KVDIST_STALL_SHUTDOWN_S": None
        if own.stall_check_shutdown_time_seconds is None
        else f"{own.stall_check_shutdown_time_seconds:g}",
    }
    return {name: value for name, value in found.items() if value is not None}


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    begin(PROGRAM)
    raise SystemExit(end(main()))
