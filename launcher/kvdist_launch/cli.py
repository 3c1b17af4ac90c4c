"""The command line of ``kvdist-launch``: makes a plan of a request, and has it carried out."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType

from kvdist.config.addresses import host_name
from kvdist.config.command_line import USAGE_ERROR
from kvdist.config.environment import unknown_variables
from kvdist.config.exit_codes import EXIT_CONFIG
from kvdist.config.sockets import open_files_warning, raise_open_files_limit
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.environment import RESTARTS, forwarded
from kvdist_launch.exits import SIGNAL_BASE
from kvdist_launch.hosts import Host
from kvdist_launch.job import last_concluded, remove_summary, summary, write_summary
from kvdist_launch.options import asked, parse_options, split_command, target_of
from kvdist_launch.output import PROGRAM, JobOutput, LogFiles, Sink, text_table
from kvdist_launch.plan import (
    PLACEMENT_TITLES,
    PYTHON,
    HostFacts,
    JobSpec,
    placement,
    plan,
    preview,
    quoted,
    thread_note,
    worker_lines,
)
from kvdist_launch.probe import usable_cores
from kvdist_launch.processes import CommandError, LocalProcesses, handling_interruptions
from kvdist_launch.request import ROLE_COMMAND, Request, grace_of, hosts_of, job_of
from kvdist_launch.root_socket import LOOPBACK, listen, listening_here, port_of, ports_of
from kvdist_launch.security import NONE, NOT_ENCRYPTED, PLAIN_HERE
from kvdist_launch.supervisor import Interrupted, Supervisor


def main(argv: Sequence[str] | None = None, role_command: Sequence[str] = ROLE_COMMAND) -> int:
    """Run the job of a command line and return the launcher's exit code.

    Args:
        argv: the words after the program's name; None takes those this process was started with.
        role_command: what schedulers and servers run.

    Raises:
        SystemExit: argparse answered (``--help``, ``--version``) or refused the options.
    """
    own_words, command_words = split_command(sys.argv[1:] if argv is None else argv)
    return launch(Request(parse_options(own_words), command_words, tuple(role_command)))


def launch(request: Request) -> int:
    """Run the job that is asked for and return the launcher's exit code."""
    return _Launch(request).run()


class _Launch:
    """A call of a launcher: its attempts at a job, and what the user sees of them."""

    def __init__(self, request: Request) -> None:
        options = request.options
        clock = time.time if options.timestamps else None
        self._request = request
        self._launched = time.monotonic()
        self._out, self._err = _sinks(os.environ, clock, request.program)
        self._logs: LogFiles | None = None
        if request.output_folder:
            self._logs = LogFiles(Path(request.output_folder), self._err.say, options.num_workers)
        elif options.log_dir:
            self._logs = LogFiles(Path(options.log_dir), self._err.say)
        self._summary_path = Path(options.json_summary) if options.json_summary and not options.dry_run else None
        self._is_interrupted = False
        self._attempts: list[Supervisor] = []
        self._begin_attempt()

    def run(self) -> int:
        """Run the job, write the summary, and return the exit code."""
        if self._summary_path is not None:
            remove_summary(self._summary_path)
        code, reason = self._run_or_explain()
        if self._summary_path is not None:
            try:
                fields = summary([one.job for one in self._attempts], code, time.monotonic(), reason)
                write_summary(self._summary_path, fields)
            except OSError as error:
                self._err.say(f"--json-summary {self._summary_path} cannot be written: {error.strerror}")
        return code

    def _interrupt(self, number: int, _: FrameType | None) -> None:
        """End what has not begun. A job that is over keeps its outcome, and is not started again."""
        self._is_interrupted = True
        if not self._attempts[-1].job.sentence:
            raise Interrupted(number)

    def _begin_attempt(self) -> Supervisor:
        options = self._request.options
        output = JobOutput(self._out, self._err, options.filter or (), self._logs)
        supervisor = Supervisor(output, self._err, grace_of(options, os.environ), self._launched)
        self._attempts.append(supervisor)
        return supervisor

    def _run_or_explain(self) -> tuple[int, str]:
        """Run the job. Returns the exit code, and the mistake if the job was not started, or not all of it."""
        try:
            with handling_interruptions(self._interrupt):  # which may raise as soon as the first of them is handled
                return self._run(), ""
        except Interrupted as interruption:
            self._err.say(str(interruption))
            return SIGNAL_BASE + interruption.number, str(interruption)
        except ConfigError as error:
            self._err.say(f"error: {error}")
            return error.exit_code if isinstance(error, CommandError) else USAGE_ERROR, str(error)

    def _run(self) -> int:
        request, options = self._request, self._request.options
        hosts = hosts_of(request)
        launcher = launcher_facts(hosts)
        job = job_of(request, hosts, launcher.environ)
        for note in unknown_variables({**launcher.environ, **job.env, **job.env_server, **job.env_worker}):
            self._err.say(note)
        if target_of(options):
            return _run_elsewhere(options, job, hosts, launcher)
        if options.dry_run:
            return _show(job, hosts, launcher, options.verbose)
        return self._run_attempts(job, hosts, launcher)

    def _run_attempts(self, job: JobSpec, hosts: Sequence[Host], launcher: HostFacts) -> int:
        """Run the job, and again if it fails, as often as the user allows."""
        restarts = self._request.options.on_worker_exit
        for attempt in range(restarts + 1):
            counted = replace(job, env={**job.env, RESTARTS: str(attempt)}) if attempt else job
            supervisor = self._begin_attempt() if attempt else self._attempts[0]
            try:
                code = run_once(self._request, counted, hosts, launcher, supervisor)
            except (ConfigError, Interrupted) as error:
                if not attempt:
                    raise
                # The exit code and cause of the job stay those of the last attempt that ran.
                last = last_concluded([one.job for one in self._attempts])
                last.sentence += f"; it could not be started again: {error}"
                self._err.say(last.sentence)
                break
            if not _may_succeed_again(supervisor) or attempt == restarts or self._is_interrupted:
                break
            supervisor.say(f"starting the whole job again ({attempt + 1} of {restarts})")
        return code


def run_once(request: Request, job: JobSpec, hosts: Sequence[Host], launcher: HostFacts, supervisor: Supervisor) -> int:
    """Run an attempt at the job of a request. Returns its exit code.

    Args:
        request, job, hosts: the request, and the job and the hosts that it asks for.
        launcher: the facts of this machine; see `launcher_facts`.
        supervisor: runs the attempt.

    Raises:
        ConfigError: the job cannot be started.
        Interrupted: the user wants it to end, and it has not begun.
    """
    if all(host.is_local for host in hosts):
        return _run_here(job, hosts, launcher, supervisor, request.options.verbose)
    return _run_on_hosts(request, job, hosts, launcher, supervisor)


def _may_succeed_again(supervisor: Supervisor) -> bool:
    """Whether the job failed before all was done, in a way that may not happen again, and was not interrupted since."""
    cause = supervisor.job.cause
    if cause is None or supervisor.job.is_interrupted or cause.node in supervisor.job.killed:
        return False
    return cause.node.role is Role.WORKER or cause.status != EXIT_CONFIG


def _run_elsewhere(options: argparse.Namespace, job: JobSpec, hosts: Sequence[Host], launcher: HostFacts) -> int:
    """Print what starts the job elsewhere, or replace this process by it."""
    # Imported here because few ask for it, and every job would wait for it.
    from kvdist_launch.emit import address_towards, require_understood, run_script, script_of

    require_understood(options, asked(options))
    others = [host for host in hosts if not host.is_local]
    if others:
        launcher = replace(launcher, address=address_towards(others[0]))
    with listen(launcher.address, ports_of({**launcher.environ, **job.env})) as listening:
        # The job starts later, so all that can be done is to choose a port that is free now.
        job = replace(job, port=port_of(listening))
    processes = plan(job, hosts, [_assumed_facts(host, launcher) for host in hosts], launcher)
    text = script_of(options, job, hosts, processes, launcher)
    if options.emit is None and options.launcher != "none" and not options.dry_run:
        run_script(options.launcher, text, os.environ)
    return show(text)


def _run_here(
    job: JobSpec, hosts: Sequence[Host], launcher: HostFacts, supervisor: Supervisor, is_verbose: bool
) -> int:
    """Run a job all of whose hosts are this machine."""
    facts = [_assumed_facts(host, launcher) for host in hosts]
    is_local = job.num_servers > 0 and not job.security.word
    with listening_here(ports_of({**launcher.environ, **job.env}), is_local) as listening:
        processes = plan(replace(job, port=port_of(listening)), hosts, facts, launcher)
        notes: list[str | None] = [] if supervisor.is_quiet else [thread_note(processes, hosts, facts)]
        notes += worker_lines(processes, hosts) if is_verbose else ()
        # The limit is raised for this process, which reads what all of them print, and for them.
        notes.append(open_files_warning(raise_open_files_limit(), job.num_workers, job.num_servers))
        notes.append(PLAIN_HERE if job.security.word == NONE else None)
        for note in filter(None, notes):
            supervisor.say(note)
        local = LocalProcesses(supervisor.selector, supervisor)
        return supervisor.run([(local, processes)], listening, job.security.secret_of_run(), losses=job.losses)


def _run_on_hosts(
    request: Request, job: JobSpec, hosts: Sequence[Host], launcher: HostFacts, supervisor: Supervisor
) -> int:
    """Run a job that needs ssh."""
    # Imported here because a job on this machine needs none of it.
    from kvdist_launch.multi_host import run_on_hosts

    if request.allows_plaintext and job.security.word == NONE:
        supervisor.say(NOT_ENCRYPTED)
    note = _left_out_note(job, launcher)
    if note:
        supervisor.say(note)
    return run_on_hosts(request.options, job, hosts, supervisor, launcher.environ)


def launcher_facts(hosts: Sequence[Host]) -> HostFacts:
    """This machine; ``python`` will be the interpreter that runs the launcher, on every host."""
    address = LOOPBACK if all(host.is_local for host in hosts) else host_name()
    return HostFacts(usable_cores(), sys.executable, address, os.environ)


def _assumed_facts(host: Host, launcher: HostFacts) -> HostFacts:
    """The facts of a host as the launcher assumes them before it reaches the host."""
    python = host.python or launcher.python
    return replace(launcher, python=python) if host.is_local else HostFacts(0, python, host.name)


def _show(job: JobSpec, hosts: Sequence[Host], launcher: HostFacts, is_verbose: bool) -> int:
    """Show what would run where, and with `is_verbose` every command. Returns the exit code."""
    processes = plan(job, hosts, [_assumed_facts(host, launcher) for host in hosts], launcher)
    if is_verbose:
        text = preview(processes, hosts)
    else:
        words = ["python" if word == PYTHON else word for word in job.command]
        text = f"{text_table(PLACEMENT_TITLES, placement(processes, hosts))}\n\n"
        text += f"workers run: {' '.join(map(quoted, words))}\n"
        text += "" if job.cwd is None else f"in folder:   {quoted(job.cwd)}\n"
        text += "Nothing was started. Add -v to see every command with its variables.\n"
    if any(not host.is_local for host in hosts):
        text += "\nAddresses, cores and variables of other hosts are found out when the job starts.\n"
        note = _left_out_note(job, launcher)
        text += f"{note}\n" if note else ""
    return show(text)


def _left_out_note(job: JobSpec, launcher: HostFacts) -> str:
    """Which variables are kept from other hosts because their names look secret; empty without such variables."""
    names = [name for name in forwarded(launcher.environ)[1] if name not in job.env]
    return f"not forwarded, as their names look secret (-x NAME forwards one): {', '.join(names)}" if names else ""


def show(text: str, program: str = PROGRAM) -> int:
    """Show a text that is all that was asked for. Returns the exit code."""
    lines = [line.encode(errors="surrogateescape") + b"\n" for line in text.removesuffix("\n").split("\n")]
    out, _ = _sinks(os.environ, program=program)
    out.write_lines(b"", lines)
    return int(out.has_failed)


def _sinks(
    environ: Mapping[str, str], clock: Callable[[], float] | None = None, program: str = PROGRAM
) -> tuple[Sink, Sink]:
    """Standard output and standard error."""
    # https://no-color.org: any value but an empty one asks for no colour.
    terminals = (os.isatty(descriptor) and environ.get("TERM") != "dumb" for descriptor in (1, 2))
    colours = not environ.get("NO_COLOR")
    out, err = (Sink(number, is_it, colours, clock, program) for number, is_it in enumerate(terminals, 1))
    out.other, err.other = err, out
    return out, err
