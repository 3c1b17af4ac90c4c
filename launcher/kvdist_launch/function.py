"""Runs a function on workers of this machine, from a script or a notebook: `run`.

The workers are processes of their own, alone or beside a scheduler and servers, exactly as ``kvdist-launch`` starts
them. The function reaches each over a pipe that it inherits, and its result comes back over another; see
`serialization`.

Works in any thread, and where an event loop runs (it blocks the loop, as any call does). In the main thread Ctrl-C asks
the job to end; a second one kills it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvdist.errors import ConfigError, DeadlineExceeded, KvdistError
from kvdist.nodes import NodeId, Role
from kvdist_launch.environment import parse_assignments
from kvdist_launch.hosts import Host
from kvdist_launch.job import GracePeriods, ProcessExit, signal_name
from kvdist_launch.output import JobOutput, LogFiles, TextSink
from kvdist_launch.plan import PYTHON, HostFacts, JobSpec, Process, plan, worker_lines
from kvdist_launch.probe import usable_cores
from kvdist_launch.processes import READ_BYTES, EventPipe, LocalProcesses, SignalPipe
from kvdist_launch.root_socket import LOOPBACK, listening_here, port_of, ports_of
from kvdist_launch.run_cli import hosts_of
from kvdist_launch.security import NONE, PLAIN_HERE, Security, security_of
from kvdist_launch.serialization import pack_call, unpack_result
from kvdist_launch.supervisor import Supervisor

HERE = (Host("localhost"),)

GRACE_S = 2.0
"""For the others to end after a failure, as the caller waits for the traceback."""


class JobFailure(KvdistError):
    """The job of a function failed, and not because of a worker.

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
        kind: the name of the exception's type, such as ``ValueError``; empty if there was none.
        traceback: the traceback's text as it was there; empty if there was none.
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
    network_interfaces: str | None = None,
    executable: str | None = None,
    np: int | None = None,
    min_np: int | None = None,
    max_np: int | None = None,
    *,
    servers: int = 0,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
) -> list[Any]:
    """Call a function on every worker of a new job on this machine, and return the results in rank order.

    The arguments are those of ``horovod.run``, in its order, and three of our own by name. What workers print is shown
    here, each line with the name of its process. Needs cloudpickle (``pip install 'kvdist[notebook]'``).

    Args:
        func: what every worker calls; ``kvdist.horovod.init()`` and ``kvdist.kv.create('collective')`` in it are of the
            job, with `servers` also ``kv.create('dist')``. Functions of a notebook, lambdas and closures can be sent;
            modules that it uses must be importable in a new process.
        args: its arguments.
        kwargs: its arguments by name.
        num_proc, np: number of workers, at least 1; 1 if neither is given, and `num_proc` wins.
        hosts, hostfile: such as ``'localhost:4'``, or a file of lines ``HOST slots=N``: this machine, and how many
            workers it takes.
        start_timeout: seconds that the processes may take to find each other.
        output_filename: a folder; what worker N prints is also written to ``rank.N/stdout`` and ``rank.N/stderr``.
        verbose: whether the launcher says where each worker runs and how the job ended.
        executable: the Python that runs the workers; None for this one.
        min_num_proc, max_num_proc, slots, reset_limit, cooldown_range, host_discovery_script, min_np, max_np: refused
            but for None, as the number of workers does not change during a job.
        ssh_port, ssh_identity_file, network_interface, network_interfaces, disable_cache, use_gloo, use_mpi, mpi_args:
            taken and without effect: all workers are on this machine, nothing is cached, and no MPI takes part.
        servers: number of servers; 0 is a job of workers alone, which use collective operations.
        env: variables for every process.
        timeout_s: seconds after which the job is ended; None lets it run.

    Raises:
        WorkerFailure: the first worker that failed; it has the traceback of there.
        JobFailure: a scheduler or server failed.
        DeadlineExceeded: the time was up.
        ConfigError: a count is wrong, a variable is impossible, the function cannot be sent, or `hosts` names another
            machine or has too few slots.
        KeyboardInterrupt: Ctrl-C; the job has ended.
    """
    del ssh_port, ssh_identity_file, disable_cache, use_gloo, use_mpi, mpi_args, network_interface, network_interfaces
    _refuse_elastic(
        min_num_proc=min_num_proc, max_num_proc=max_num_proc, slots=slots, reset_limit=reset_limit,
        cooldown_range=cooldown_range, host_discovery_script=host_discovery_script, min_np=min_np, max_np=max_np,
    )  # fmt: skip
    count = num_proc if num_proc is not None else np if np is not None else 1
    for name, number, least in (("np", count, 1), ("servers", servers, 0)):
        if number < least:
            raise ConfigError(f"{name} is {number}; a job needs at least {least}")
    _require_this_machine(hosts, hostfile, count)
    own = parse_assignments(f"{name}={value}" for name, value in (env or {}).items())
    if start_timeout is not None:
        own = {**dict.fromkeys(("KVDIST_FORM_TIMEOUT_S", "KVDIST_START_TIMEOUT_S"), f"{start_timeout:g}"), **own}
    security = security_of(None, own, os.environ, leaves_machine=False, has_servers=servers > 0)
    calls = _WorkerCalls(pack_call(func, args, kwargs or {}), count)
    _run_calls(calls, servers, own, security, timeout_s, bool(verbose), output_filename, executable or sys.executable)
    return calls.results()


def _refuse_elastic(**given: object) -> None:
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} is {value!r}: training while processes come and go is not possible yet; leave it out, and give"
                " num_proc, the number of workers for the whole job"
            )


def _require_this_machine(hosts: str | None, hostfile: str | None, count: int) -> None:
    for host in hosts_of(hosts, hostfile, count, socket.gethostname()):
        if not host.is_local:
            raise ConfigError(
                f"the hosts name {host}, and run calls a function on this machine alone: write the function into a"
                " script, and start that with kvdist-run -H"
            )


def _run_calls(
    calls: _WorkerCalls,
    servers: int,
    env: Mapping[str, str],
    security: Security,
    timeout_s: float | None,
    verbose: bool,
    output_folder: str | None,
    executable: str,
) -> None:
    """Run the job; raise what failed it."""
    is_main = threading.current_thread() is threading.main_thread()
    events = SignalPipe() if is_main else EventPipe()
    out, err = TextSink(sys.stdout), TextSink(sys.stderr)
    grace = GracePeriods(grace_s=GRACE_S)
    logs = None if output_folder is None else LogFiles(Path(output_folder), err.say, len(calls))
    supervisor = Supervisor(JobOutput(out, err, logs=logs), err, grace, events=events, is_quiet=not verbose)
    deadline, raised = _Deadline(timeout_s, events), _Deadline(GRACE_S, events)
    began = time.monotonic()

    def begin() -> None:
        calls.begin(supervisor, raised)
        deadline.begin(began)

    is_local = servers > 0 and not security.word
    with calls, deadline, raised, listening_here(ports_of({**os.environ, **env}), is_local) as listening:
        processes = calls.over(_plan_here(len(calls), servers, env, security, port_of(listening), executable))
        notes = worker_lines(processes, HERE) if verbose else []
        for note in [*([PLAIN_HERE] if security.word == NONE else []), *notes]:
            supervisor.say(note)
        local = LocalProcesses(supervisor.selector, supervisor, exits=None if is_main else events)
        code = supervisor.run([(local, processes)], listening, security.secret_of_run(), begin)
        calls.drain()
    cause = supervisor.job.cause
    if cause is not None:
        raise _failure(cause, calls, supervisor.last_lines(cause.node))
    if raised.is_over and code:
        raise calls.failure(calls.raised[0], None, ())
    if deadline.is_over and code:
        raise DeadlineExceeded(f"not every worker's function had returned after {timeout_s:g} s; the job was ended")
    if code:
        raise KeyboardInterrupt


def _plan_here(
    np: int, servers: int, env: Mapping[str, str], security: Security, port: int, executable: str
) -> list[Process]:
    here = HostFacts(usable_cores(), sys.executable, LOOPBACK, os.environ)
    job = JobSpec(
        num_workers=np,
        num_servers=servers,
        command=(executable, "-m", "kvdist_launch.worker_main"),
        role_command=(PYTHON, "-m", "kvdist"),
        port=port,
        name=os.urandom(8).hex(),
        env=env,
        security=security,
    )
    return plan(job, HERE, [here], here)


def _failure(cause: ProcessExit, calls: _WorkerCalls, last_lines: Sequence[str]) -> JobFailure:
    if cause.node.role is not Role.WORKER:
        return JobFailure("\n    ".join([str(cause), *last_lines]), cause.exit_code)
    return calls.failure(cause.node.rank, cause.status, last_lines)


class WorkerCall:
    """The pipes to and from one worker.

    Args:
        call: the bytes to send.

    Attributes:
        theirs: the worker's ends of the pipes, which it inherits.
    """

    def __init__(self, call: bytes) -> None:
        theirs_in, self._outward = os.pipe()
        self._inward, theirs_out = os.pipe()
        self.theirs: tuple[int, ...] = (theirs_in, theirs_out)
        self._mine = {self._inward, self._outward}
        self._unsent = memoryview(call)
        self._received = bytearray()
        self._head: dict[str, Any] = {}
        self._selector: selectors.BaseSelector | None = None
        self._raised: Callable[[], None] | None = None

    def begin(self, selector: selectors.BaseSelector, raised: Callable[[], None]) -> None:
        """Send and receive from now on; the worker has its ends.

        Args:
            selector: waits for the pipes.
            raised: called when the function has raised.
        """
        self._selector, self._raised = selector, raised
        self._close_theirs()
        for descriptor, event, act in (
            (self._outward, selectors.EVENT_WRITE, self._send),
            (self._inward, selectors.EVENT_READ, self.receive),
        ):
            os.set_blocking(descriptor, False)
            selector.register(descriptor, event, act)

    def receive(self) -> None:
        """Take what has come of the result."""
        with contextlib.suppress(BlockingIOError):
            while self._inward in self._mine:
                data = os.read(self._inward, READ_BYTES)
                self._received += data
                if not self._head and b"\n" in data:
                    self._take_head()
                if not data:
                    self._end(self._inward)

    @property
    def head(self) -> dict[str, Any]:
        """What came before the result, or instead of it; empty if it did not come whole."""
        return self._head if len(self._received) == self._head.get("bytes", 0) else {}

    def take_result(self) -> Any:
        """The result. Its bytes are not kept: there may be very many."""
        received, self._received = self._received, bytearray()
        return unpack_result(received)

    def leave_selector(self) -> None:
        """Use the selector no more: it is closed."""
        self._selector = None

    def close(self) -> None:
        """Free everything."""
        self._close_theirs()
        for descriptor in list(self._mine):
            self._end(descriptor)

    def _take_head(self) -> None:
        end = self._received.index(b"\n")
        self._head = json.loads(self._received[:end])
        del self._received[: end + 1]
        if "raised" in self._head and self._raised is not None:
            self._raised()

    def _send(self) -> None:
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._outward, self._unsent) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # The worker has ended; its exit code is reported elsewhere.
        self._end(self._outward)

    def _end(self, descriptor: int) -> None:
        if self._selector is not None:
            self._selector.unregister(descriptor)
        os.close(descriptor)
        self._mine.discard(descriptor)

    def _close_theirs(self) -> None:
        for descriptor in self.theirs:
            os.close(descriptor)
        self.theirs = ()


class _WorkerCalls:
    """The calls of all workers.

    Args:
        call: the bytes that every worker is sent.
        count: how many workers there are.

    Attributes:
        raised: the ranks whose functions have raised, the first one first.
    """

    def __init__(self, call: bytes, count: int) -> None:
        self._calls = [WorkerCall(call) for _ in range(count)]
        self.raised: list[int] = []

    def __enter__(self) -> _WorkerCalls:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls:
            call.leave_selector()
            call.close()

    def __len__(self) -> int:
        return len(self._calls)

    def over(self, processes: Sequence[Process]) -> list[Process]:
        """The processes, in which each worker inherits its ends of the pipes."""
        return [self._with_pipes(one) if one.node.role is Role.WORKER else one for one in processes]

    def begin(self, supervisor: Supervisor, deadline: _Deadline) -> None:
        """Send and receive from now on: all workers have been started.

        Args:
            supervisor: its selector waits for the pipes.
            deadline: begins when a function has raised; threads may keep its process from ending.
        """

        def raised(rank: int) -> None:
            self.raised.append(rank)
            if not supervisor.job.is_interrupted:  # else it raised because it was told to end
                deadline.begin(time.monotonic())

        for rank, call in enumerate(self._calls):
            call.begin(supervisor.selector, partial(raised, rank))

    def drain(self) -> None:
        """Take what the workers sent last; all have ended."""
        for call in self._calls:
            call.leave_selector()
            call.receive()

    def results(self) -> list[Any]:
        """What every worker's function returned.

        Raises:
            WorkerFailure: a worker ended with exit code 0 before its function had returned.
        """
        for rank, call in enumerate(self._calls):
            if "bytes" not in call.head:
                raise self.failure(rank, 0, ())
        return [call.take_result() for call in self._calls]

    def failure(self, rank: int, status: int | None, last_lines: Sequence[str]) -> WorkerFailure:
        """The failure of a worker, by its own report, or else by the way its process ended.

        Args:
            rank: the worker.
            status: how its process ended; None if it had to be ended after the function had raised.
            last_lines: the last lines it printed.
        """
        host, node = socket.gethostname(), NodeId(Role.WORKER, rank)
        head = self._calls[rank].head
        status = int(head["exit_code"]) if status is None else status
        code = ProcessExit(node, 0, status).exit_code
        if "raised" in head:
            kind, text = str(head["raised"]), str(head["text"])
            message = f"{node} on {host} raised {kind} (exit code {code})\n\n{text}"
            return WorkerFailure(message.rstrip(), rank, host, code, kind, text)
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
        when = "after" if head else "before"
        lines = ["; the last lines it printed:", *last_lines] if last_lines else []
        message = f"{node} on {host} {how} {when} the function had returned" + "\n    ".join(lines)
        return WorkerFailure(message, rank, host, code, "", "")

    def _with_pipes(self, process: Process) -> Process:
        ends = self._calls[process.node.rank].theirs
        return replace(process, argv=(*process.argv, *map(str, ends)), descriptors=ends)


class _Deadline:
    """Ends the job after some time.

    Args:
        after_s: the time from its beginning; None is never.
        events: gets SIGTERM posted then.

    Attributes:
        is_over: whether the time is up.
    """

    def __init__(self, after_s: float | None, events: EventPipe) -> None:
        self.is_over = False
        self._after_s = after_s
        self._events = events
        self._timer: threading.Timer | None = None

    def __enter__(self) -> _Deadline:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def begin(self, since: float) -> None:
        """Count from `since` (monotonic), once. Processes must run: earlier, a signal would be lost."""
        if self._after_s is not None and self._timer is None:
            self._timer = threading.Timer(max(0.0, since + self._after_s - time.monotonic()), self._expire)
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        self.is_over = True
        self._events.post(signal.SIGTERM)
