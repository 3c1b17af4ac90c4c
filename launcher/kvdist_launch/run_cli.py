"""The command ``kvdist-run``: the options of horovodrun, brought to those of ``kvdist-launch -s 0``.

It decides nothing that the other does not: a request is made of the words here, and `cli.launch` carries it out.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace

from kvdist.errors import ConfigError
from kvdist_launch.cli import USAGE_ERROR, launch
from kvdist_launch.environment import parse_exports
from kvdist_launch.hosts import Host, parse_host_list, read_hostfile
from kvdist_launch.options import parse_options
from kvdist_launch.request import Request
from kvdist_launch.run_options import WITHOUT_EFFECT, parse

PROGRAM = "kvdist-run"

NOT_ENCRYPTED = (
    "WARNING: WHAT THE PROCESSES SEND TO EACH OTHER IS NOT ENCRYPTED, and leaves this machine: use it in a network that"
    " you trust"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a job as the command line says and return the launcher's exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.

    Raises:
        SystemExit: argparse answered (``--help``, ``--version``, ``--check-build``) or refused the options.
    """
    own, idle, command = parse(sys.argv[1:] if argv is None else argv)
    for name in idle:
        _say(f"{name} has no effect: {WITHOUT_EFFECT[name][1]}")
    try:
        request = request_of(own, command, os.environ, socket.gethostname())
    except ConfigError as error:
        _say(f"error: {error}")
        return USAGE_ERROR
    if request.options.security == "none":
        _say(NOT_ENCRYPTED)
    return launch(request)


def request_of(
    own: argparse.Namespace, command: Sequence[str], environ: Mapping[str, str], this_machine: str
) -> Request:
    """What ``kvdist-launch`` is asked for.

    Args:
        own: the options of ``kvdist-run``.
        command: the user's.
        environ: the launcher's variables.
        this_machine: the name of this machine, under which it may stand among the hosts.

    Raises:
        ConfigError: the hosts are not valid, or have too few slots, or there is to be encryption between them.
    """
    hosts = _hosts(own, this_machine)
    options = parse_options([])
    options.num_workers, options.num_servers = own.num_proc, 0
    options.x = own.x
    options.interface = own.network_interfaces
    options.start_timeout = own.start_timeout
    options.timestamps = own.prefix_output_with_timestamp
    options.ssh_option = [
        f"{name}={value}"
        for name, value in (("Port", own.ssh_port), ("IdentityFile", own.ssh_identity_file))
        if value is not None
    ]
    options.env = [f"{name}={value}" for name, value in _variables(own).items()]
    if any(not host.is_local for host in hosts):
        # horovodrun has no word for it, so who asks for encryption does so by the variable.
        variables = {**environ, **parse_exports(own.x or (), environ)}
        asks = variables.get("KVDIST_SECURITY", "").lower() == "curve"
        if asks or variables.get("KVDIST_SECRET_FILE"):
            raise ConfigError(
                f"{'KVDIST_SECURITY is curve' if asks else 'KVDIST_SECRET_FILE is set'}, and what processes on several"
                " machines send to each other is not encrypted, as torch.distributed cannot do that: leave it out if"
                " the network between them is trusted"
            )
        options.security = "none"
    return Request(
        options,
        command,
        program=PROGRAM,
        hosts=tuple(hosts),
        is_filled=True,
        is_verbose=own.verbose,
        output_folder=own.output_filename or "",
    )


def _hosts(own: argparse.Namespace, this_machine: str) -> list[Host]:
    if own.hosts is not None and own.hostfile is not None:
        raise ConfigError("-H and -hostfile both say which hosts there are; leave one of them out")
    if own.hosts is not None:
        named = parse_host_list(own.hosts)
    elif own.hostfile is not None:
        named = read_hostfile(own.hostfile)
    else:
        named = [Host("localhost", slots=own.num_proc)]
    hosts = [replace(host, name="localhost") if _is(host, this_machine) else host for host in named]
    if sum(host.is_local for host in hosts) > 1:
        raise ConfigError(f"this machine stands twice among the hosts, once as {this_machine}; write it once")
    silent = [host.name for host in hosts if host.slots is None]
    if silent:
        raise ConfigError(f"{silent[0]} has no number of slots: write HOST:SLOTS behind -H, or HOST slots=N in a file")
    slots = sum(host.slots or 0 for host in hosts)
    if slots < own.num_proc:
        each = ", ".join(f"{host}: {host.slots}" for host in hosts)
        raise ConfigError(
            f"-np asks for {own.num_proc} processes, but the hosts have {slots} slots ({each}); add slots or hosts, or"
            f" ask for -np {slots}"
        )
    return hosts


def _is(host: Host, this_machine: str) -> bool:
    """Whether a host is this machine under its own name; a user or a port asks for ssh even to it."""
    names = {this_machine.lower(), this_machine.lower().partition(".")[0]}
    return host.name.lower() in names and host.port is None and host.user is None


def _variables(own: argparse.Namespace) -> dict[str, str]:
    """What the processes are told by variables."""
    told: dict[str, str] = {}
    if own.timeline_filename is not None:
        told["KVDIST_TIMELINE"] = own.timeline_filename
    if own.timeline_mark_cycles:
        told["KVDIST_TIMELINE_MARK_CYCLES"] = "1"
    if own.stall_check_warning_time_seconds is not None:
        told["KVDIST_STALL_CHECK_S"] = f"{own.stall_check_warning_time_seconds:g}"
    if own.no_stall_check:
        told["KVDIST_STALL_CHECK_S"] = "0"
    if own.stall_check_shutdown_time_seconds is not None:
        told["KVDIST_STALL_SHUTDOWN_S"] = f"{own.stall_check_shutdown_time_seconds:g}"
    return told


def _say(text: str) -> None:
    print(f"{PROGRAM}: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
