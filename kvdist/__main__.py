"""``python -m kvdist``: be the scheduler or the server that the environment describes.

``--server-module my_rules``, or ``KVDIST_SERVER_MODULE=my_rules``, names modules that register optimizers and handlers
of commands (``--optimizer-module`` and ``KVDIST_OPTIMIZER_MODULE``: such with optimizers). It is the one way to run
code of one's own here, and whoever starts the process chooses it, never a peer.

``kvdist export`` and ``kvdist checkpoints`` work on checkpoints instead; see `kvdist.checkpoint.commands`.

Exit codes: 0 when every worker has left, 75 when the job ended because a process was lost, 2 for a mistake in the
environment or on the command line, 1 for anything else.
"""

from __future__ import annotations

import argparse
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from kvdist.checkpoint.commands import add_commands
from kvdist.config import (
    ClusterConfig,
    checkpoint_root_from_env,
    kernels_from_env,
    local_address_towards,
    module_names,
    optimizer_modules_from_env,
    profile_dir_from_env,
    server_modules_from_env,
    tcp_endpoint,
)
from kvdist.core.effects import ChildEnded, LauncherGone
from kvdist.core.scheduler import Scheduler
from kvdist.core.server import Server
from kvdist.disk import ThreadedDisk
from kvdist.errors import ConfigError, KvdistError, PeerLostError
from kvdist.kernels.choice import choose
from kvdist.kvstore.cluster import begin_profiling, introduction
from kvdist.kvstore.commands import HANDLERS
from kvdist.node import Node
from kvdist.nodes import NodeId, Role
from kvdist.optimizer.registry import registered
from kvdist.profiling import PROFILER_HEAD, Profiler
from kvdist.transport.opening import open_transport
from kvdist.transport.zeromq import ZeroMQTransport

LOG = logging.getLogger("kvdist")

EXIT_PEER_LOST = 75
EXIT_CONFIG = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run until the job is over. Returns the exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.
    """
    logging.basicConfig(format="%(message)s", level=logging.INFO, stream=sys.stderr)
    options = _parser().parse_args(argv)
    try:
        if options.command is not None:
            text, code = options.command(options)
            print(text)
            return int(code)
        modules = server_modules_from_env() + module_names(",".join(options.server_module))
        for_optimizers = optimizer_modules_from_env() + module_names(",".join(options.optimizer_module))
        import_server_modules(modules)
        import_optimizers([name for name in for_optimizers if name not in modules])
        config = ClusterConfig.from_env()
        if config is None or config.role is Role.WORKER:
            raise ConfigError(
                "python -m kvdist runs a scheduler or a server, and DMLC_ROLE says neither; workers run your own"
                " script. kvdist-launch starts all three"
            )
        node = _scheduler(config) if config.role is Role.SCHEDULER else _server(config)
        node.run()
        _tell_of_strangers(node)
    except KvdistError as error:
        return _told(error, EXIT_CONFIG if isinstance(error, ConfigError) else 1)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    if node.failure is None:
        return 0
    lost = isinstance(node.failure, PeerLostError)
    return _told(node.failure, EXIT_PEER_LOST if lost else EXIT_CONFIG if isinstance(node.failure, ConfigError) else 1)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kvdist",
        description="Be the scheduler or the server that the environment describes. kvdist-launch starts these.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--server-module",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module that registers optimizers (kvdist.optimizer.register) or handlers of commands"
        " (kvdist.kv.register_command)",
    )
    parser.add_argument(
        "--optimizer-module",
        action="append",
        default=[],
        metavar="MODULE",
        help="import a module that registers optimizers (kvdist.optimizer.register)",
    )
    add_commands(parser)
    return parser


def import_optimizers(names: Sequence[str]) -> None:
    """Import the modules in which the operator's own optimizers are registered.

    Raises:
        ConfigError: one cannot be imported, or registers no optimizer.
    """
    for name in dict.fromkeys(names):
        before = None if name in sys.modules else registered()  # one named before it may have imported it
        _import(f"the optimizer module {name}", name)
        if registered() == before:
            raise ConfigError(
                f"the optimizer module {name} registers no optimizer: decorate its classes with"
                " @kvdist.optimizer.register"
            )


def import_server_modules(names: Sequence[str]) -> None:
    """Import the modules in which the operator's own optimizers and handlers of commands are registered.

    Raises:
        ConfigError: one cannot be imported, or registers neither.
    """
    for name in dict.fromkeys(names):
        before = None if name in sys.modules else (registered(), tuple(HANDLERS))
        _import(f"the server module {name}", name)
        if (registered(), tuple(HANDLERS)) == before:
            raise ConfigError(
                f"the server module {name} registers nothing: decorate optimizers with @kvdist.optimizer.register, and"
                " handlers of commands with @kvdist.kv.register_command(number)"
            )


def _import(what: str, name: str) -> None:
    try:
        import_module(name)
    except Exception as error:  # whatever went wrong in the module, its name belongs to the message
        raise ConfigError(
            f"{what} cannot be imported ({type(error).__name__}: {error}). It must be installed on this machine, or lie"
            f" in {Path.cwd()} or on PYTHONPATH"
        ) from error


def _scheduler(config: ClusterConfig) -> Node:
    config.require_private(config.root_host)
    transport = ZeroMQTransport(config.limits)
    transport.bind(config.scheduler_endpoint)
    first_incarnation = random.SystemRandom().getrandbits(48) + 2
    machine = Scheduler(config, time.monotonic(), first_incarnation)
    node = Node(machine, transport, config.job_tag, config.limits.explain_after_s, disk=_disk())
    if config.supervised:
        threading.Thread(target=_listen, args=(node,), name="kvdist-launcher", daemon=True).start()
    return node


def _server(config: ClusterConfig) -> Node:
    host = config.node_host or local_address_towards(config.root_host, config.root_port)
    config.require_private(host)
    if host in ("0.0.0.0", "::", "*"):
        raise ConfigError(f"DMLC_NODE_HOST is {host}, which workers cannot dial; give this machine's own address")
    transport, memory = open_transport(config)
    endpoint = transport.bind(tcp_endpoint(host, 0))
    introduced = introduction(config, endpoint, config.scheduler_endpoint)
    kernels = choose(kernels_from_env())
    profiler = Profiler(profile_dir_from_env)
    handlers = {PROFILER_HEAD: profiler.perform, **HANDLERS}
    machine = Server(introduced, config.limits, kernels, time.monotonic(), memory.allocate, handlers)
    node = Node(machine, transport, config.job_tag, config.limits.explain_after_s, disk=_disk())
    begin_profiling(profiler, node)
    return node


def _disk() -> ThreadedDisk:
    """Peers name folders, and whoever started this process says below which they may."""
    return ThreadedDisk(checkpoint_root_from_env())


def _tell_of_strangers(node: Node) -> None:
    """Say how often somebody came to the port who was not of this job, if anybody did."""
    refused = node.reliable.strangers_refused + node.transport.strangers_refused
    if refused or node.garbage_dropped:
        LOG.warning(
            "%s refused %d stranger(s) and dropped %d invalid message(s)",
            node.machine.me,
            refused,
            node.garbage_dropped,
        )


def _listen(node: Node) -> None:
    """What the launcher saw, line by line: ``ended worker 1 signal 9``. The end of the stream is the launcher's."""
    # Unbuffered: the interpreter aborts if it ends while a thread waits inside the buffered standard input.
    with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
        for line in lines:
            event = parse_ended(line.decode("utf-8", "replace"))
            if event is not None:
                node.post(event)
    node.post(LauncherGone())


def parse_ended(line: str) -> ChildEnded | None:
    """The event that a launcher's line tells of; None for a line of another form."""
    words = line.split()
    if len(words) != 5 or words[0] != "ended" or not words[2].isdigit() or not words[4].isdigit():
        return None
    try:
        node = NodeId(Role(words[1]), int(words[2]))
    except ValueError:
        return None
    number = int(words[4])
    if words[3] == "signal":
        return ChildEnded(node, f"killed by signal {number} ({_signal_name(number)})", clean=False)
    if words[3] == "exit":
        return ChildEnded(node, f"exited with code {number}", clean=number == 0)
    return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _told(error: Exception, code: int) -> int:
    print(f"kvdist: {error}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
