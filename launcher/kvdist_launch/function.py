"""Runs a function on workers, of this machine or of several, from a script or a notebook: `run`.

The workers are separate processes, alone or beside a scheduler and servers, exactly as ``kvdist-launch`` starts
them. The function reaches each on its standard input, and its result comes back over a pipe that it inherits; on other
machines the remote agent has the other ends, and both travel by its ssh connection. See `serialization`.

Works in any thread, and where an event loop runs (it blocks the loop, as any call does). In the main thread Ctrl-C asks
the job to end; a second Ctrl-C kills it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvdist.config.foreign import FOREIGN_NAMES, without_effect
from kvdist.config.losses import LossPolicy
from kvdist.config.paths import expanded
from kvdist.config.processes import module_words
from kvdist.config.settings import read_view
from kvdist.errors import ConfigError, DeadlineExceeded, KvdistError
from kvdist.nodes import NodeId, Role
from kvdist_launch.cli import launcher_facts, run_once
from kvdist_launch.environment import parse_assignments
from kvdist_launch.exits import ProcessExit, signal_name
from kvdist_launch.job import GracePeriods
from kvdist_launch.options import parse_options
from kvdist_launch.output import PROGRAM, JobOutput, LogFiles, TextSink
from kvdist_launch.plan import PYTHON
from kvdist_launch.request import Request, job_of
from kvdist_launch.request import hosts_of as request_hosts
from kvdist_launch.run_cli import hosts_of, ssh_option_of
from kvdist_launch.serialization import pack_call, unpack_result
from kvdist_launch.supervisor import Interrupted, Supervisor

GRACE_S = 2.0
"""For the others to end after a failure, as the caller waits for the traceback."""


TIMEOUT, RAISED = "timeout", "raised"
"""Reasons to end a job: the user's time limit; a function has raised, and its process does not end."""


class JobFailure(KvdistError, RuntimeError):
    """The job of a function failed, and not because of a worker. A `RuntimeError`, as what `horovod.run` raises.

    Attributes:
        exit_code: that of the first process that failed; 128 + n for signal n.
    """

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class WorkerFailure(JobFailure):
    """The function raised on a worker, or its process ended before the function had returned.

    Attributes:
        rank: the first worker that failed.
        host: the machine it ran on.
        exit_code: its exit code; 128 + n for signal n.
        kind: the name of the exception's type, such as ``ValueError``; empty without an exception.
        traceback: the traceback's text on the worker; empty without an exception.
    """

    def __init__(self, message: str, rank: int, host: str, exit_code: int, kind: str, traceback: str) -> None:
        super().__init__(message, exit_code)
        self.rank = rank
        self.host = host
        self.kind = kind
        self.traceback = traceback


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    min_num_proc: int | None = None,
    max_num_proc: int | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    cooldown_range: Sequence[int] | None = None,
    hosts: str | None = None,
    hostfile: str | None = None,
    host_discovery_script: str | None = None,
    start_timeout: float | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    disable_cache: bool | None = None,
    output_filename: str | None = None,
    verbose: int | None = None,
    use_gloo: bool | None = None,
    use_mpi: bool | None = None,
    mpi_args: str | None = None,
    network_interface: str | None = None,
    network_interfaces: str | Sequence[str] | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    servers: int = 0,
    on_loss: str | None = None,
    env: Mapping[str, str] | None = None,
    sync_dst_dir: str | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Call a function on every worker of a new job, and return the results in rank order.

    The arguments are those of ``horovod.run``, in its order, and five further arguments by name. What workers print is
    shown, each line with the name of its process. Needs cloudpickle (``pip install cloudpickle``).

    Args:
        func: what every worker calls; ``kvdist.horovod.init()`` and ``kvdist.kv.create('collective')`` in it are of the
            job, with `servers` also ``kv.create('dist')``. Functions of a notebook, lambdas and closures can be sent;
            modules that it uses must be importable in a new process, on each machine.
        args: its arguments.
        kwargs: its arguments by name.
        num_proc, np: number of workers, at least 1; by default 1, and `np` wins, as in Horovod.
        hosts, hostfile: such as ``'localhost:4,node2:4'``, or a file of lines ``HOST slots=N``: how many workers each
            takes; None is this machine. Others are reached by ssh, and have kvdist and cloudpickle at the same path.
        start_timeout: seconds that the processes may take to find each other.
        output_filename: a folder; what worker N prints is also written to ``rank.N/stdout`` and ``rank.N/stderr``.
        verbose: whether the launcher prints where each worker runs and how the job ended.
        executable: the Python that runs the workers; None for this Python, and for the same path on other machines.
        ssh_port, ssh_identity_file: port and private key for ssh.
        network_interface, network_interfaces: the name of the network interface of all other machines; the latter as
            text or in a list.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script, min_np, max_np: refused
            but for None, as the number of workers does not change during a job.
        disable_cache, use_gloo, use_mpi, mpi_args: taken and without effect: nothing is cached, and no MPI takes part.
        servers: number of servers; 0 is a job of workers alone, which use collective operations.
        on_loss: ``continue`` lets the other workers go on without a failed worker, whose result is then None; ``fail``,
            or None where KVDIST_ON_LOSS is not set, ends the job.
        env: variables for every process.
        sync_dst_dir: a folder on the other machines, to which the current folder is copied and in which workers start;
            None starts them in the current folder, which all must have.
        timeout_s: seconds after which the job is ended; None lets it run.

    Raises:
        WorkerFailure: the first worker that failed; it has the worker's traceback.
        JobFailure: a scheduler or server failed.
        DeadlineExceeded: the time was up.
        ConfigError: a count is wrong, a variable is impossible, the function cannot be sent, `hosts` has too few slots,
            or a host cannot take part.
        KeyboardInterrupt: Ctrl-C; the job has ended.
    """
    _check_foreign(locals(), bool(verbose))
    count = np if np is not None else num_proc if num_proc is not None else 1
    for name, number, least in (("np", count, 1), ("servers", servers, 0)):
        if number < least:
            raise ConfigError(f"{name} is {number}; a job needs at least {least}")
    places = hosts_of(hosts, hostfile, count, socket.gethostname())
    own = parse_assignments(f"{name}={value}" for name, value in (env or {}).items())
    if on_loss is not None:
        own = {"KVDIST_ON_LOSS": on_loss, **own}
    losses = _losses({**os.environ, **own}, count, servers)
    if losses.on_loss != "fail" and on_loss is not None and not servers:
        raise ConfigError(
            f"on_loss is {on_loss!r}, which needs servers, as they hold the weights: give servers=1 or more"
        )
    options = parse_options([])
    options.num_workers, options.num_servers, options.verbose = count, servers, bool(verbose)
    options.start_timeout = start_timeout
    options.env = [f"{name}={value}" for name, value in own.items()]
    is_here = all(host.is_local for host in places)
    if not is_here:
        options.interface, options.sync_dst_dir = _interface(network_interfaces or network_interface), sync_dst_dir
        options.ssh_option = ssh_option_of(ssh_port, ssh_identity_file)
    python = executable or (sys.executable if is_here else PYTHON)
    command = (python, *module_words("kvdist_launch.worker_main"))
    request = Request(options, command, hosts=tuple(places), is_filled=True, allows_plaintext=True)
    calls = WorkerCalls(pack_call(func, args, kwargs or {}, is_here), count, losses.goes_on, timeout_s)
    _run_calls(calls, request, output_filename)
    return calls.results()


def _losses(environ: Mapping[str, str], workers: int, servers: int) -> LossPolicy:
    """What follows when a worker is lost."""
    losses: LossPolicy = read_view(LossPolicy, environ, num_workers=workers, num_servers=servers)
    if losses.on_loss == "wait":
        raise ConfigError(
            "on_loss (KVDIST_ON_LOSS) is 'wait', which waits until a lost worker is started again, and workers that run"
            " a function are not: use on_loss='continue', or kvdist-launch --on-loss wait --restart N with a script"
        )
    losses.check()
    return losses


def _check_foreign(arguments: Mapping[str, object], is_verbose: bool) -> None:
    """Refuse arguments of Horovod's that would change the job, and warn of those without effect."""
    foreign = [name for name in FOREIGN_NAMES if arguments.get(name) is not None]
    for name in foreign:
        if FOREIGN_NAMES[name].is_refused:
            raise ConfigError(f"{name} is {arguments[name]!r}: {FOREIGN_NAMES[name].why}")
    if foreign and is_verbose:
        print(f"{PROGRAM}: {'; '.join(without_effect(foreign))}", file=sys.stderr, flush=True)


def _interface(names: str | Sequence[str] | None) -> str | None:
    """The only name among those of network interfaces."""
    listed: Sequence[str | None] = names.split(",") if isinstance(names, str) else names or [None]
    if len(listed) > 1:
        raise ConfigError(f"network_interfaces is {names!r}: name one interface, the one that all hosts have in common")
    return listed[0]


def _run_calls(calls: WorkerCalls, request: Request, output_folder: str | None) -> None:
    """Run the job of a request, whose workers make calls, to its end; raise what failed it."""
    hosts = request_hosts(request)
    launcher = launcher_facts(hosts)
    job = replace(job_of(request, hosts, launcher.environ), is_called=True)
    is_main = threading.current_thread() is threading.main_thread()
    out, err = TextSink(sys.stdout), TextSink(sys.stderr)
    logs = None if output_folder is None else LogFiles(Path(expanded(output_folder)), err.say, job.num_workers)
    output, grace = JobOutput(out, err, logs=logs), GracePeriods(grace_s=GRACE_S)
    supervisor = Supervisor(output, err, grace, None, is_main, not request.options.verbose, calls)
    calls.supervisor = supervisor
    try:
        code = run_once(request, job, hosts, launcher, supervisor)
    except Interrupted:
        raise KeyboardInterrupt from None
    cause = supervisor.job.cause
    if cause is not None:
        raise _failure(cause, calls, supervisor.last_lines(cause.node))
    if code:
        raise calls.reason_of_end() or KeyboardInterrupt


def _failure(cause: ProcessExit, calls: WorkerCalls, last_lines: Sequence[str]) -> JobFailure:
    if cause.deadlock and calls.raised:
        return calls.failure(calls.raised[0], cause.status, last_lines)
    if cause.node.role is not Role.WORKER:
        return JobFailure("\n    ".join([str(cause), *last_lines]), cause.exit_code)
    return calls.failure(cause.node.rank, cause.status, last_lines, cause.lost)


class WorkerAnswer:
    """The answer of a worker: a line of JSON, the head, then the bytes of the result, if the function returned.

    Args:
        raised: called when the function has raised by the head.
    """

    def __init__(self, raised: Callable[[], None]) -> None:
        self._raised = raised
        self._received = bytearray()
        self._head: dict[str, Any] = {}

    def receive(self, data: bytes) -> None:
        """Take a piece of it."""
        self._received += data
        if not self._head and b"\n" in data:
            end = self._received.index(b"\n")
            self._head = json.loads(self._received[:end])
            del self._received[: end + 1]
            if "raised" in self._head:
                self._raised()

    @property
    def head(self) -> dict[str, Any]:
        """What came before the result, or instead of it; empty if it did not come whole."""
        return self._head if len(self._received) == self._head.get("bytes", 0) else {}

    def take_result(self) -> Any:
        """The result. Its bytes are not kept, as they may be very many."""
        received, self._received = self._received, bytearray()
        return unpack_result(received)


class WorkerCalls:
    """The calls of all workers.

    Args:
        data: the bytes that every worker is sent.
        count: number of workers.
        goes_on: whether the others go on when a worker is lost.
        timeout_s: seconds after which the job is ended; None lets it run.

    Attributes:
        supervisor: runs the job of these calls; set before it starts.
        raised: the ranks whose functions have raised, in order of time.
    """

    supervisor: Supervisor

    def __init__(self, data: bytes, count: int, goes_on: bool, timeout_s: float | None) -> None:
        self.data = data
        self.goes_on = goes_on
        self.raised: list[int] = []
        self._answers = [WorkerAnswer(partial(self._has_raised, rank)) for rank in range(count)]
        self._timeout_s = timeout_s
        self._began = time.monotonic()
        self._due: dict[str, float] = {}
        """Reason to end the job → when."""
        self._reasons: set[str] = set()
        """Reasons for which the job was ended."""

    def begun(self) -> None:
        if self._timeout_s is not None:
            self._due[TIMEOUT] = self._began + self._timeout_s

    def received(self, node: NodeId, data: bytes) -> None:
        self._answers[node.rank].receive(data)

    def _has_raised(self, rank: int) -> None:
        self.raised.append(rank)
        if not (self.goes_on or self.supervisor.job.is_interrupted):  # else it raised because it was told to end
            self._due.setdefault(RAISED, time.monotonic() + GRACE_S)  # threads may keep its process from ending

    @property
    def deadline(self) -> float | None:
        return min((at for reason, at in self._due.items() if reason not in self._reasons), default=None)

    def expire(self, now: float) -> None:
        self._reasons |= {reason for reason, at in self._due.items() if at <= now}

    def reason_of_end(self) -> KvdistError | None:
        """The error for which the job was ended at a deadline; None if it was interrupted."""
        if RAISED in self._reasons:
            return self.failure(self.raised[0], None, ())
        if TIMEOUT in self._reasons:
            text = f"not every worker's function had returned after {self._timeout_s:g} s; the job was ended"
            return DeadlineExceeded(text)
        return None

    def results(self) -> list[Any]:
        """What every worker's function returned; None for lost workers without whom the others continued.

        Raises:
            WorkerFailure: a worker ended with exit code 0 before its function had returned.
        """
        records = self.supervisor.job.records if self.goes_on else ()
        lost = {one.node.rank for one in records if one.node.role is Role.WORKER and one.exit and one.exit.is_failure}
        for rank, answer in enumerate(self._answers):
            if "bytes" not in answer.head and rank not in lost:
                raise self.failure(rank, 0, ())
        return [None if rank in lost else answer.take_result() for rank, answer in enumerate(self._answers)]

    def failure(self, rank: int, status: int | None, last_lines: Sequence[str], lost: str = "") -> WorkerFailure:
        """The failure of a worker, by its report, or else by the way its process ended.

        Args:
            rank: the worker.
            status: how its process ended; None if it had to be ended after the function had raised.
            last_lines: the last lines it printed.
            lost: why its host cannot be reached any more, if so.
        """
        node = NodeId(Role.WORKER, rank)
        host = self.supervisor.host_of(node) or socket.gethostname()
        head = self._answers[rank].head
        status = int(head["exit_code"]) if status is None else status
        code = ProcessExit(node, 0, status).exit_code
        if "raised" in head:
            kind, text = str(head["raised"]), str(head["text"])
            message = f"{node} on {host} raised {kind} (exit code {code})\n\n{text}"
            return WorkerFailure(message.rstrip(), rank, host, code, kind, text)
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
        if lost:
            how = f"was lost ({lost})"
        when = "after" if head else "before"
        lines = ["; the last lines it printed:", *last_lines] if last_lines else []
        message = f"{node} on {host} {how} {when} the function had returned" + "\n    ".join(lines)
        return WorkerFailure(message, rank, host, code, "", "")
