"""The process of a scheduler or a server, which ``python -m kvdist`` runs if ``DMLC_ROLE`` names this role.

``--server-module my_rules``, or ``KVDIST_SERVER_MODULE=my_rules``, names modules that register optimizers and handlers
of commands; ``--optimizer-module`` and ``KVDIST_OPTIMIZER_MODULE`` name modules that register optimizers. Only the
command line and the environment choose which code of users runs in this process, never a peer.

Exit codes: 0 when every worker has left, 75 when the job ended because a process was lost, 2 for a mistake in the
environment or on the command line, 1 for anything else.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from kvdist.checkpoint.locks import release_when_terminated
from kvdist.config.addresses import local_address_towards, own_addresses_of
from kvdist.config.command_line import end_with
from kvdist.config.endpoints import split_endpoint, tcp_endpoint
from kvdist.config.environment import checkpoint_root_from_env, cluster_from_env, keep_descriptor, read_setting
from kvdist.config.exit_codes import EXIT_CONFIG, EXIT_PEER_LOST
from kvdist.config.settings import SETTINGS, ClusterConfig
from kvdist.config.sockets import SCHEME, private_folder, require_private_folder, scheduler_endpoint
from kvdist.core.machine import ChildEnded, LauncherGone, ProcessStarted
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.errors import EXITED, ConfigError, FencedError, JobOver, KvdistError, PeerLostError
from kvdist.nodes import UNRANKED, NodeId, Role
from kvdist.optimizer.registry import registered
from kvdist.runtime.cluster import HANDLERS, open_server_device, server_node
from kvdist.runtime.io_thread import ThreadedDisk
from kvdist.runtime.node import Node
from kvdist.runtime.preparations import prepare
from kvdist.runtime.process_name import name_process
from kvdist.transport.base import Transport
from kvdist.transport.endpoints import endpoint_of_listener
from kvdist.transport.factory import bind_port, open_sockets, open_transport

if TYPE_CHECKING:  # a feature at a seam: schedulers run without it
    from kvdist.runtime.journal import Journal

LOG = logging.getLogger("kvdist")

OBJECTS_PER_COLLECTION = 100_000
"""Many keys make many objects that stay. Python's default, a collection after each 700 new objects, would take as long
as their creation."""


def serve(options: argparse.Namespace) -> int:
    """Run the scheduler or the server that the environment describes until the job is over. Returns the exit code.

    Args:
        options: those of ``python -m kvdist``: ``server_module``, ``optimizer_module``, ``server_device``, ``verbose``.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    logging.getLogger("kvdist.kernels").setLevel(logging.INFO if options.verbose else logging.WARNING)
    try:
        modules = _modules("KVDIST_SERVER_MODULE", "--server-module", options.server_module)
        for_optimizers = _modules("KVDIST_OPTIMIZER_MODULE", "--optimizer-module", options.optimizer_module)
        import_server_modules(modules)
        import_optimizers([name for name in for_optimizers if name not in modules])
        config = cluster_from_env()
        if config is None or config.role is Role.WORKER:
            raise ConfigError(
                "python -m kvdist runs a scheduler or a server, and DMLC_ROLE says neither; workers run your own"
                " script. kvdist-launch starts all three"
            )
        if options.server_device is not None:
            devices = SETTINGS["KVDIST_SERVER_DEVICE"].parse(options.server_device, "--server-device")
            config = replace(config, server_devices=devices)
        gc.set_threshold(OBJECTS_PER_COLLECTION)
        gc.freeze()  # what has been imported stays, and looking through it takes the longer part of this process's end
        name_process(str(NodeId(config.role, UNRANKED if config.rank is None else config.rank)))
        node = _scheduler(config) if config.role is Role.SCHEDULER else _server(config)
        if config.role is Role.SCHEDULER:
            release_when_terminated()  # here, as its locks are taken by another thread
            prepare(node)
        node.run()
        _tell_of_strangers(node)
    except JobOver as error:
        return end_with(error, 0)
    except KvdistError as error:
        return end_with(error, EXIT_CONFIG if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if node.failure is None:
        return 0
    if isinstance(node.failure, JobOver):
        return end_with(node.failure, 0)
    if isinstance(node.failure, PeerLostError | FencedError):
        return end_with(node.failure, EXIT_PEER_LOST)
    return end_with(node.failure, EXIT_CONFIG if isinstance(node.failure, ConfigError) else 1)


def _modules(variable: str, option: str, names: Sequence[str]) -> tuple[str, ...]:
    """The modules that a variable and an option name."""
    return (*read_setting(variable), *SETTINGS[variable].parse(",".join(names), option))


def import_optimizers(names: Sequence[str]) -> None:
    """Import the modules that register the operator's optimizers.

    Raises:
        ConfigError: a module cannot be imported, or registers no optimizer.
    """
    advice = "registers no optimizer: decorate its classes with @kvdist.optimizer.register"
    _import("optimizer", names, registered, advice)


def import_server_modules(names: Sequence[str]) -> None:
    """Import the modules that register the operator's optimizers and handlers of commands.

    Raises:
        ConfigError: a module cannot be imported, or registers neither.
    """
    advice = (
        "registers nothing: decorate optimizers with @kvdist.optimizer.register, and handlers of commands with"
        " @kvdist.kv.register_command(number)"
    )
    _import("server", names, lambda: (registered(), tuple(HANDLERS)), advice)


def _import(kind: str, names: Sequence[str], known: Callable[[], object], advice: str) -> None:
    if names and "" not in sys.path:
        sys.path.append("")  # behind everything, so that no file there is taken for a module of others
    for name in dict.fromkeys(names):
        before = None if name in sys.modules else known()  # one named before it may have imported it
        try:
            import_module(name)
        except Exception as error:  # whatever went wrong in the module, its name belongs to the message
            raise ConfigError(
                f"the {kind} module {name} cannot be imported ({type(error).__name__}: {error}). It must be installed"
                f" on this machine, or lie in {Path.cwd()} or on PYTHONPATH"
            ) from error
        if known() == before:
            raise ConfigError(f"the {kind} module {name} {advice}")


def _scheduler(config: ClusterConfig) -> Node:
    config.require_private(config.root_host)
    if config.listen_fd is not None:
        keep_descriptor(config.listen_fd)
        _check_listening(config, config.listen_fd)
    transport = open_sockets(config)
    if config.listen_fd is not None:
        transport.bind_listening(config.listen_fd)
    elif config.is_local:
        transport.bind(scheduler_endpoint(config))
    else:
        hosts = own_addresses_of(config.root_host, config.node_host)
        for host in hosts:
            config.require_private(host)
        for host in hosts:
            transport.bind(tcp_endpoint(host, config.root_port))
    node = _scheduler_node(config, transport)
    if config.supervised:
        threading.Thread(target=_listen, args=(node,), name="kvdist-launcher", daemon=True).start()
    return node


def _check_listening(config: ClusterConfig, descriptor: int) -> None:
    """Check the launcher's socket, at which others look for this scheduler.

    Raises:
        ConfigError: it listens somewhere else, or its file was removed.
        JobOver: its file was removed, and an earlier scheduler removes it when the job is over.
    """
    endpoint = endpoint_of_listener(descriptor)
    is_tcp = endpoint.startswith("tcp://")
    if is_tcp:
        config.require_private(split_endpoint(endpoint)[0])
    is_ours = is_tcp and split_endpoint(endpoint)[1] == config.root_port
    if not (endpoint == scheduler_endpoint(config) if config.is_local else is_ours):
        raise ConfigError(
            f"KVDIST_LISTEN_FD is {descriptor}, a socket that listens at {endpoint}, but everybody dials"
            f" {scheduler_endpoint(config)} (DMLC_PS_ROOT_PORT): give both the same"
        )
    if config.is_local and not os.path.exists(endpoint.removeprefix(SCHEME)):
        gone = f"the scheduler cannot be dialled at {endpoint}, as the file is gone"
        if read_setting("KVDIST_RESTARTS"):
            raise JobOver(
                f"{gone}; it was started again when the job was over, and the scheduler before it had removed it"
            )
        raise ConfigError(f"{gone}: start the job again, and let nothing remove files below {private_folder()}")


def _scheduler_node(config: ClusterConfig, transport: Transport) -> Node:
    """A scheduler; in the place of a killed scheduler, if that left a journal."""
    machine = Scheduler(config, time.monotonic(), random.SystemRandom().getrandbits(48) + 2)
    journal = _journal(config)
    node = Node(machine, transport, config.job_tag, config.limits.explain_after_s, disk=_disk())
    if journal is not None:
        node.keep(journal)
    return node


def _journal(config: ClusterConfig) -> Journal | None:
    """The journal of the scheduler, if its settings ask for it."""
    if config.journal is None or not config.loss_policy.away_s:
        return None
    from kvdist.runtime.journal import Journal, sweep  # a feature at a seam: loaded where it is used

    path = Path(config.journal)
    if path.name != config.journal:
        return Journal(path, config)
    try:
        require_private_folder("or name a file of this host by KVDIST_JOURNAL")
    except ConfigError as error:
        LOG.warning("the scheduler keeps no journal, so its loss ends the job: %s", error)
        return None
    journal = Journal(Path(private_folder()) / path, config)
    sweep(journal.path)
    return journal


def _server(config: ClusterConfig) -> Node:
    # First of all: without its GPU this process should end before it joins the cluster.
    device = open_server_device(config.server_device(config.rank))
    host = config.node_host or local_address_towards(config.root_host, config.root_port)
    config.require_private(host)
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(f"DMLC_NODE_HOST is {host}, which workers cannot dial; give this machine's own address")
    transport, memory = open_transport(config)
    endpoint = bind_port(transport, config, host)
    return server_node(config, endpoint, scheduler_endpoint(config), device, transport, memory, _disk())


def _disk() -> ThreadedDisk:
    """The disk, restricted to the folder that this process allows, as peers name folders."""
    root, snapshots = checkpoint_root_from_env(), read_setting("KVDIST_SNAPSHOTS")
    if snapshots is not None and not Path(snapshots).absolute().is_relative_to(root):
        raise ConfigError(
            f"KVDIST_SNAPSHOTS is {snapshots!r}, which does not lie below {root}, where this process may write: set"
            " KVDIST_CHECKPOINT_ROOT to a folder above it"
        )
    return ThreadedDisk(root)


def _tell_of_strangers(node: Node) -> None:
    """Log how many connections and messages were not of this job, if any."""
    refused = node.reliable.strangers_refused + node.transport.strangers_refused
    if refused or node.garbage_dropped or node.forgeries:
        LOG.warning(
            "%s refused %d stranger(s) and dropped %d invalid message(s)%s",
            node.machine.me,
            refused,
            node.garbage_dropped,
            f" and {node.forgeries} forged one(s)" if node.forgeries else "",
        )


def _listen(node: Node) -> None:
    """Read the launcher's reports, line by line. The end of the stream means that the launcher has ended."""
    # Unbuffered: the interpreter aborts if it ends while a thread waits inside the buffered standard input.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            event = parse_report(line.decode("utf-8", "replace"))
            if event is not None:
                node.post(event)
    node.post(LauncherGone())


def parse_report(line: str) -> ChildEnded | ProcessStarted | None:
    """The event in a line of the launcher; None for a line of another form.

    The forms: ``ended worker 1 signal 9``, ``... exit 3``, ``... lost d2`` (its host), ``placed worker 1 d2 4242``. A
    line about an end may continue with ``life 2``: how often the process of this rank had been restarted.
    """
    words, life = line.split(), 0
    if len(words) == 7 and words[0] == "ended" and words[5] == "life" and words[6].isdigit():
        words, life = words[:5], int(words[6])
    if len(words) != 5 or not words[2].isdigit():
        return None
    try:
        node = NodeId(Role(words[1]), int(words[2]))
    except ValueError:
        return None
    match words[0], words[3], words[4]:
        case "ended", "lost", host:
            return ChildEnded(node, f"lost with its host {host}, which the launcher cannot reach any more", False, life)
        case "ended", "signal", number if number.isdigit():
            return ChildEnded(node, f"killed by signal {number} ({_signal_name(int(number))})", False, life)
        case "ended", "exit", code if code.isdigit():
            return ChildEnded(node, f"{EXITED}{code}", int(code) == 0, life)
        case "placed", host, pid if pid.isdigit():
            return ProcessStarted(node, host, int(pid))
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"
