"""Runs a function on workers of this machine, from a script or a notebook: `run`.

The workers are processes of their own, alone or beside a scheduler and servers, exactly as ``kvdist-launch`` starts
them. The function reaches each over a pipe that it inherits, and its result comes back over another; see `cargo`.

Works in any thread, and where an event loop runs (it blocks the loop, as any call does). In the main thread Ctrl-C ends
the job: first it is asked to end, once more kills it.
"""

from __future__ import annotations

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
from typing import Any

from kvdist.errors import ConfigError, DeadlineExceeded, KvdistError
from kvdist.nodes import NodeId, Role
from kvdist_launch.call import Call
from kvdist_launch.cargo import pack_call
from kvdist_launch.course import Patience
from kvdist_launch.crew import LocalCrew
from kvdist_launch.ending import Ending, signal_name
from kvdist_launch.environment import parse_assignments
from kvdist_launch.hosts import Host
from kvdist_launch.listening import LOOPBACK, listening_here, port_of, ports_of
from kvdist_launch.output import TextSink
from kvdist_launch.plan import PYTHON, HostFacts, Job, Process, plan, worker_lines
from kvdist_launch.probe import usable_cores
from kvdist_launch.secret import NONE, PLAIN_HERE, Security, security_of
from kvdist_launch.signals import Mailbox, Signals
from kvdist_launch.supervisor import Supervisor
from kvdist_launch.transcript import Transcript

HERE = (Host("localhost"),)

GRACE_S = 2.0
"""For the others to end after a failure: somebody waits for the traceback."""


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
    np: int = 2,
    servers: int = 0,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    *,
    verbose: bool = False,
    num_proc: int | None = None,
    disable_cache: bool = False,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
) -> list[Any]:
    """Call a function on every worker of a new job on this machine, and return the results in rank order.

    What workers print is shown here, each line with the name of its process. Needs cloudpickle
    (``pip install 'kvdist[notebook]'``).

    Args:
        func: what every worker calls; ``kvdist.horovod.init()`` and ``kvdist.kv.create('collective')`` in it are of the
            job, with `servers` also ``kv.create('dist')``. Functions of a notebook, lambdas and closures can be sent;
            modules that it uses must be importable in a new process.
        args: its arguments.
        kwargs: its arguments by name.
        np: number of workers, at least 1.
        servers: number of servers; 0 is a job of workers alone, which use collective operations.
        env: variables for every process.
        timeout_s: seconds after which the job is ended; None lets it run.
        verbose: whether the launcher says where each worker runs and how the job ended.
        num_proc: Horovod's newer name of `np`; it wins.
        disable_cache, use_mpi, use_gloo: taken because Horovod has them; nothing is cached here, and no MPI takes part.

    Raises:
        WorkerFailure: the first worker that failed; it has the traceback of there.
        JobFailure: a scheduler or server failed.
        DeadlineExceeded: the time was up.
        ConfigError: a count is wrong, a variable is impossible, or the function cannot be sent.
        KeyboardInterrupt: Ctrl-C; the job has ended.
    """
    del disable_cache, use_mpi, use_gloo
    np = np if num_proc is None else num_proc
    for name, count, least in (("np", np, 1), ("servers", servers, 0)):
        if count < least:
            raise ConfigError(f"{name} is {count}; a job needs at least {least}")
    own = parse_assignments(f"{name}={value}" for name, value in (env or {}).items())
    security = security_of(None, own, os.environ, leaves_machine=False, has_servers=servers > 0)
    is_local = servers > 0 and not security.word
    variables = {**os.environ, **own}
    calls = _Calls(pack_call(func, args, kwargs or {}), np)
    is_main = threading.current_thread() is threading.main_thread()
    signals = Signals() if is_main else Mailbox()
    out, err = TextSink(sys.stdout), TextSink(sys.stderr)
    supervisor = Supervisor(Transcript(out, err), err, Patience(grace_s=GRACE_S), signals=signals, is_quiet=not verbose)
    deadline, patience = _Alarm(timeout_s, signals), _Alarm(GRACE_S, signals)
    began = time.monotonic()
    with calls, deadline, patience, listening_here(ports_of(variables), is_local) as listening:
        processes = calls.over(_plan(np, servers, own, security, port_of(listening)))
        if security.word == NONE:
            supervisor.say(PLAIN_HERE)
        for line in worker_lines(processes, HERE) if verbose else ():
            supervisor.say(line)
        crew = _Crew(supervisor, calls, partial(deadline.begin, began), patience, None if is_main else signals)
        code = supervisor.run([(crew, processes)], listening, security.secret_of_run())
        calls.drain()
    if supervisor.cause is not None:
        raise _failure(supervisor.cause, calls, supervisor.last_lines(supervisor.cause.node))
    if patience.has_rung and code:
        raise calls.failure(calls.raised[0], None, ())
    if deadline.has_rung and code:
        raise DeadlineExceeded(f"not every worker's function had returned after {timeout_s:g} s; the job was ended")
    if code:
        raise KeyboardInterrupt
    return calls.results()


def _plan(np: int, servers: int, env: Mapping[str, str], security: Security, port: int) -> list[Process]:
    here = HostFacts(usable_cores(), sys.executable, LOOPBACK, os.environ)
    job = Job(
        num_workers=np,
        num_servers=servers,
        command=(sys.executable, "-m", "kvdist_launch.callee"),
        role_command=(PYTHON, "-m", "kvdist"),
        port=port,
        name=os.urandom(8).hex(),
        env=env,
        security=security,
    )
    return plan(job, HERE, [here], here)


def _failure(cause: Ending, calls: _Calls, last_lines: Sequence[str]) -> JobFailure:
    if cause.node.role is not Role.WORKER:
        return JobFailure("\n    ".join([str(cause), *last_lines]), cause.exit_code)
    return calls.failure(cause.node.rank, cause.status, last_lines)


class _Calls:
    """The calls of all workers.

    Args:
        call: what every worker is sent.
        count: how many there are.

    Attributes:
        raised: the ranks whose functions have raised, the first one first.
    """

    def __init__(self, call: bytes, count: int) -> None:
        self._calls = [Call(call) for _ in range(count)]
        self.raised: list[int] = []

    def __enter__(self) -> _Calls:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._calls:
            call.forget()
            call.close()

    def over(self, processes: Sequence[Process]) -> list[Process]:
        """The processes, in which each worker has its ends of the pipes."""
        return [self._given(one) if one.node.role is Role.WORKER else one for one in processes]

    def begin(self, selector: selectors.BaseSelector, raised: Callable[[], None]) -> None:
        """All have been started.

        Args:
            selector: where the pipes are waited for.
            raised: called when a function has raised.
        """
        for rank, call in enumerate(self._calls):
            call.begin(selector, partial(self._take_raised, rank, raised))

    def drain(self) -> None:
        """All have ended: take what they sent last."""
        for call in self._calls:
            call.forget()
            call.receive()

    def results(self) -> list[Any]:
        """What every worker's function returned.

        Raises:
            WorkerFailure: one ended with exit code 0 without having returned.
        """
        for rank, call in enumerate(self._calls):
            if "bytes" not in call.head:
                raise self.failure(rank, 0, ())
        return [call.take_result() for call in self._calls]

    def failure(self, rank: int, status: int | None, last_lines: Sequence[str]) -> WorkerFailure:
        """The failure of a worker, as told by itself, or if it had no time to, by its end.

        Args:
            rank: whose.
            status: how its process ended; None if that had to be ended after the function had raised.
            last_lines: what it printed last.
        """
        host, node = socket.gethostname(), NodeId(Role.WORKER, rank)
        head = self._calls[rank].head
        status = int(head["exit_code"]) if status is None else status
        code = Ending(node, 0, status).exit_code
        if "raised" in head:
            kind, text = str(head["raised"]), str(head["text"])
            message = f"{node} on {host} raised {kind} (exit code {code})\n\n{text}"
            return WorkerFailure(message.rstrip(), rank, host, code, kind, text)
        how = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
        when = "after" if head else "before"
        lines = ["; the last it printed:", *last_lines] if last_lines else []
        message = f"{node} on {host} {how} {when} the function had returned" + "\n    ".join(lines)
        return WorkerFailure(message, rank, host, code, "", "")

    def _take_raised(self, rank: int, raised: Callable[[], None]) -> None:
        self.raised.append(rank)
        raised()

    def _given(self, process: Process) -> Process:
        ends = self._calls[process.node.rank].theirs
        return replace(process, argv=(*process.argv, *map(str, ends)), descriptors=ends)


class _Crew(LocalCrew):
    """The processes of the job.

    Args:
        supervisor: listens to it.
        calls: begin when the workers have been started.
        begun: called then, too.
        patience: begins when a function has raised. Threads may keep its process, and nothing would be told before.
        mailbox: is told of endings by threads, one for each process; None where signals tell.
    """

    def __init__(
        self,
        supervisor: Supervisor,
        calls: _Calls,
        begun: Callable[[], None],
        patience: _Alarm,
        mailbox: Mailbox | None,
    ) -> None:
        super().__init__(supervisor.selector, supervisor)
        self._supervisor = supervisor
        self._calls = calls
        self._begun = begun
        self._patience = patience
        self._mailbox = mailbox
        self._watchers: list[threading.Thread] = []

    def start(
        self, processes: Sequence[Process], listening: socket.socket | None = None, secret: bytes | None = None
    ) -> None:
        super().start(processes, listening, secret)
        self._calls.begin(self._selector, self._raised)
        self._begun()
        if self._mailbox is not None:
            for node, child in self._children.items():
                watcher = threading.Thread(target=_watch, args=(child.pid, self._mailbox), name=f"kvdist-{node}")
                watcher.start()
                self._watchers.append(watcher)

    def release(self) -> None:
        # Nobody is reaped before nobody is waited for: a process id that is free again may be anybody's.
        for node in self._children:
            self.signal_group(node, signal.SIGKILL)
        for watcher in self._watchers:
            watcher.join()
        super().release()

    def _raised(self) -> None:
        if not self._supervisor.is_interrupted:  # else it was told to end, and raised for that
            self._patience.begin(time.monotonic())


def _watch(pid: int, mailbox: Mailbox) -> None:
    """Wait for the end of a process, which stays unreaped, and tell."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    mailbox.post(signal.SIGCHLD)


class _Alarm:
    """Ends the job after some time.

    Args:
        after_s: how long after its beginning; None is never.
        signals: what ends the job.

    Attributes:
        has_rung: whether time was up.
    """

    def __init__(self, after_s: float | None, signals: Mailbox) -> None:
        self.has_rung = False
        self._after_s = after_s
        self._signals = signals
        self._timer: threading.Timer | None = None

    def __enter__(self) -> _Alarm:
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def begin(self, since: float) -> None:
        """Count from then on, once. Processes must run: before, a signal would reach nobody and be lost.

        Args:
            since: by the monotonic clock.
        """
        if self._after_s is not None and self._timer is None:
            self._timer = threading.Timer(max(0.0, since + self._after_s - time.monotonic()), self._ring)
            self._timer.daemon = True
            self._timer.start()

    def _ring(self) -> None:
        self.has_rung = True
        self._signals.post(signal.SIGTERM)
