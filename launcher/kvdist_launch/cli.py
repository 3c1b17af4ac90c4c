"""The command line of ``kvdist-launch``: from a request to a plan, and on to who carries it out."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from kvdist.config.addresses import host_name
from kvdist.config.environment import limits_from_env
from kvdist.config.exit_codes import EXIT_CONFIG
from kvdist.config.settings import with_twins
from kvdist.config.sockets import open_files_warning, raise_open_files_limit
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.environment import forwarded
from kvdist_launch.hosts import Host
from kvdist_launch.job import SIGNAL_BASE, GracePeriods, JobSummary, remove_summary, write_summary
from kvdist_launch.options import asked, is_elsewhere, parse_options, split_command
from kvdist_launch.output import PROGRAM, JobOutput, LogFiles, OutputFilter, RankLogFiles, Sink
from kvdist_launch.plan import HostFacts, JobSpec, Process, plan, thread_note, worker_lines
from kvdist_launch.probe import usable_cores
from kvdist_launch.processes import CommandError, LocalProcesses
from kvdist_launch.request import ROLE_COMMAND, Request, hosts_of, job_of, patience_of
from kvdist_launch.root_socket import LOOPBACK, listen, listening_here, port_of, ports_of
from kvdist_launch.security import NONE, PLAIN_HERE
from kvdist_launch.supervisor import Interrupted, Supervisor

RESTARTS = "KVDIST_RESTARTS"
"""Tells the processes how often the job was started before, where it was."""
USAGE_ERROR = 2


class Screen:
    """What the user sees of a job, and who watches it now.

    Args:
        out, err: where outputs go.
        shown: whose output is shown.
        logs: where all of it is kept; None is nowhere.
        patience: how long is waited for processes that should end.

    Attributes:
        chronicle: what happened so far, of all starts.
    """

    def __init__(
        self, out: Sink, err: Sink, shown: OutputFilter, logs: LogFiles | None, patience: GracePeriods
    ) -> None:
        self.err = err
        self.chronicle = JobSummary(time.monotonic())
        self._out = out
        self._shown = shown
        self._logs = logs
        self._patience = patience
        self.supervisor = self.begin()

    def begin(self) -> Supervisor:
        """The one who watches from now on: a new one for each start of the job."""
        transcript = JobOutput(self._out, self.err, self._shown, self._logs)
        self.supervisor = Supervisor(transcript, self.err, self._patience, self.chronicle)
        return self.supervisor


def main(argv: Sequence[str] | None = None, role_command: Sequence[str] = ROLE_COMMAND) -> int:
    """Run a job as the command line says and return the launcher's exit code.

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
    options = request.options
    clock = time.time if options.timestamps else None
    out, err = (_sink(number, os.environ, clock, request.program) for number in (1, 2))
    screen = Screen(out, err, OutputFilter(options.filter or ()), _logs(request, err), patience_of(options))
    if options.json_summary and not options.dry_run:
        remove_summary(Path(options.json_summary))
    code, reason = _attempt(request, screen)
    if options.json_summary and not options.dry_run:
        try:
            write_summary(Path(options.json_summary), screen.chronicle.summary(code, time.monotonic(), reason))
        except OSError as error:
            err.say(f"--json-summary {options.json_summary} cannot be written: {error.strerror}")
    return code


def _logs(request: Request, err: Sink) -> LogFiles | None:
    if request.output_folder:
        return RankLogFiles(Path(request.output_folder), err.say, request.options.num_workers)
    return LogFiles(Path(request.options.log_dir), err.say) if request.options.log_dir else None


def _attempt(request: Request, screen: Screen) -> tuple[int, str]:
    """Run the job. Returns the exit code, and what was wrong where the job was not started, or not all of it."""
    try:
        return _run(request, screen), ""
    except Interrupted as interruption:
        screen.err.say(str(interruption))
        return SIGNAL_BASE + interruption.number, str(interruption)
    except KeyboardInterrupt:
        reason = "interrupted before anything was started"
        screen.err.say(reason)
        return SIGNAL_BASE + signal.SIGINT, reason
    except ConfigError as error:
        screen.err.say(f"error: {error}")
        return error.exit_code if isinstance(error, CommandError) else USAGE_ERROR, str(error)


def _run(request: Request, screen: Screen) -> int:
    """Run the job, and again when it fails, as often as the user wants."""
    options = request.options
    hosts = hosts_of(request)
    launcher = _launcher_facts(hosts)
    job = job_of(request, hosts, launcher.environ)
    if is_elsewhere(options):
        return _run_elsewhere(options, job, hosts, launcher)
    if options.dry_run:
        facts = [_assumed_facts(host, launcher) for host in hosts]
        return _show(job, plan(job, hosts, facts, launcher), hosts, launcher)
    for attempt in range(options.on_worker_exit + 1):
        counted = replace(job, env={**job.env, RESTARTS: str(attempt)}) if attempt else job
        supervisor = screen.begin() if attempt else screen.supervisor
        try:
            code = _run_once(request, counted, hosts, launcher, supervisor)
        except (ConfigError, Interrupted, KeyboardInterrupt) as error:
            if not attempt:
                raise
            # The job's code and cause stay those of the last start that there was.
            screen.err.say(screen.chronicle.give_up(str(error) or "interrupted"))
            break
        if not _wants_another(supervisor) or attempt == options.on_worker_exit:
            break
        supervisor.say(f"starting the whole job again ({attempt + 1} of {options.on_worker_exit})")
    return code


def _run_once(
    request: Request, job: JobSpec, hosts: Sequence[Host], launcher: HostFacts, supervisor: Supervisor
) -> int:
    if all(host.is_local for host in hosts):
        return _run_here(job, hosts, launcher, supervisor, request.is_verbose)
    return _run_on_hosts(request, job, hosts, launcher, supervisor)


def _wants_another(supervisor: Supervisor) -> bool:
    """Whether the job failed in a way that may not happen again, and nobody has interrupted it since."""
    cause = supervisor.cause
    if cause is None or supervisor.is_interrupted:
        return False
    return cause.node.role is Role.WORKER or cause.status != EXIT_CONFIG


def _run_elsewhere(options: argparse.Namespace, job: JobSpec, hosts: Sequence[Host], launcher: HostFacts) -> int:
    """Print what starts the job elsewhere, or let that run in this process's place."""
    # Imported here because few ask for it, and every job would wait for it.
    from kvdist_launch.emit.export import address_towards, require_understood, run_script, script_of

    require_understood(options, asked(options))
    others = [host for host in hosts if not host.is_local]
    if others:
        launcher = replace(launcher, address=address_towards(others[0]))
    with listen(launcher.address, ports_of({**launcher.environ, **job.env})) as listening:
        # Whoever starts the job does so later, so all that can be done is to choose a port that is free now.
        job = replace(job, port=port_of(listening))
    processes = plan(job, hosts, [_assumed_facts(host, launcher) for host in hosts], launcher)
    text = script_of(options, job, hosts, processes, launcher)
    if options.emit is None and options.launcher != "none" and not options.dry_run:
        run_script(options.launcher, text, os.environ)
    lines = [line.encode(errors="surrogateescape") + b"\n" for line in text.split("\n")[:-1]]
    _sink(1, os.environ).write_lines(b"", lines)
    return 0


def _run_here(
    job: JobSpec, hosts: Sequence[Host], launcher: HostFacts, supervisor: Supervisor, is_verbose: bool
) -> int:
    """Run a job all of whose hosts are this machine."""
    facts = [_assumed_facts(host, launcher) for host in hosts]
    variables = {**launcher.environ, **job.env}
    is_local = job.num_servers > 0 and not job.security.word
    with listening_here(ports_of(variables), is_local) as listening:
        processes = plan(replace(job, port=port_of(listening)), hosts, facts, launcher)
        note = thread_note(processes, hosts, facts)
        if note is not None:
            supervisor.say(note)
        for line in worker_lines(processes, hosts) if is_verbose else ():
            supervisor.say(line)
        # For this process, which reads what all of them print, and for them.
        warning = open_files_warning(raise_open_files_limit(), job.num_workers, job.num_servers)
        if warning:
            supervisor.say(warning)
        if job.security.word == NONE:
            supervisor.say(PLAIN_HERE)
        crew = LocalProcesses(supervisor.selector, supervisor)
        return supervisor.run([(crew, processes)], listening, job.security.secret_of_run())


def _run_on_hosts(
    request: Request, job: JobSpec, hosts: Sequence[Host], launcher: HostFacts, supervisor: Supervisor
) -> int:
    """Run a job that needs ssh."""
    options = request.options
    # Imported here because a job on this machine needs none of it.
    from kvdist_launch.multi_host import LaunchOptions, run_on_hosts
    from kvdist_launch.ssh import SshOptions, SyncOptions, python_of_hosts

    note = _left_out_note(job, launcher)
    if note:
        supervisor.say(note)
    # What the options say stands in the job's variables too; there may be others, which servers follow as well.
    variables = with_twins({**launcher.environ, **job.env})
    ssh = SshOptions(
        options.accept_new_host_keys,
        tuple(options.ssh_option or ()),
        options.activate or "",
        limits_from_env(variables).patience_s,
    )
    wishes = LaunchOptions(
        python=python_of_hosts(options.python, options.activate),
        ssh=ssh,
        ports=ports_of(variables),
        interface=variables.get("KVDIST_INTERFACE") or None,
        is_checked=not options.no_preflight,
        is_verbose=request.is_verbose,
    )
    if options.sync_dst_dir and RESTARTS not in job.env:  # a job that is started anew has its files
        excluded = tuple(options.sync_exclude or ())
        wishes = replace(wishes, sync=SyncOptions(os.getcwd(), options.sync_dst_dir, excluded, options.sync_delete))
    return run_on_hosts(job, hosts, wishes, supervisor, launcher.environ)


def _launcher_facts(hosts: Sequence[Host]) -> HostFacts:
    """This machine; ``python`` will be the interpreter that runs the launcher, on every host."""
    address = LOOPBACK if all(host.is_local for host in hosts) else host_name()
    return HostFacts(usable_cores(), sys.executable, address, os.environ)


def _assumed_facts(host: Host, launcher: HostFacts) -> HostFacts:
    """What is known of a host that nobody has asked yet."""
    python = host.python or launcher.python
    return replace(launcher, python=python) if host.is_local else HostFacts(0, python, host.name)


def _show(job: JobSpec, processes: Sequence[Process], hosts: Sequence[Host], launcher: HostFacts) -> int:
    # Imported here because few ask for it, and every job would wait for it.
    from kvdist_launch.plan import preview

    text = preview(processes, hosts)
    if any(not host.is_local for host in hosts):
        text += "\nAddresses, cores and variables of other hosts are found out when the job starts.\n"
        note = _left_out_note(job, launcher)
        text += f"{note}\n" if note else ""
    _sink(1, os.environ).write_lines(b"", [line.encode() + b"\n" for line in text.splitlines()])
    return 0


def _left_out_note(job: JobSpec, launcher: HostFacts) -> str:
    """Which variables other hosts do not get for the look of their names; empty where there are none."""
    names = [name for name in forwarded(launcher.environ)[1] if name not in job.env]
    return f"not forwarded, as their names look secret (-x NAME forwards one): {', '.join(names)}" if names else ""


def _sink(
    descriptor: int, environ: Mapping[str, str], clock: Callable[[], float] | None = None, program: str = PROGRAM
) -> Sink:
    # https://no-color.org: any value but an empty one asks for no colour.
    is_terminal = os.isatty(descriptor) and environ.get("TERM") != "dumb"
    return Sink(descriptor, is_terminal, not environ.get("NO_COLOR"), clock, program)
