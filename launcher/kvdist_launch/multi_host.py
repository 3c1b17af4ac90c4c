"""A job on several hosts, from the first connection to the exit code.

Everything that can be checked beforehand is checked before any process is started or file copied: the error then names
the hosts that cannot take part, with a reason, and nothing has been changed on any host.

An alias that ssh knows is not an address, so addresses are never taken from the hosts' names. A host reports the
address under which it sees this machine (ssh's variable); its processes can dial that address if it belongs to this
machine and not to a router in between.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kvdist.config.addresses import address_of_interface
from kvdist.config.environment import limits_from_env
from kvdist.config.settings import with_twins
from kvdist.config.sockets import open_files_warning
from kvdist.errors import ConfigError
from kvdist.nodes import Role
from kvdist_launch.environment import RESTARTS
from kvdist_launch.host_pool import HostConnection, HostPool, judge, require_all, table
from kvdist_launch.hosts import Host
from kvdist_launch.plan import LAUNCHER, HostFacts, JobSpec, Process, moved, plan, root_host, thread_note, worker_lines
from kvdist_launch.probe import usable_cores
from kvdist_launch.processes import HostProcesses
from kvdist_launch.root_socket import listen, port_of, ports_of, turn_away
from kvdist_launch.ssh import RsyncRun, SyncOptions, progress_bars, python_of_hosts, ssh_options
from kvdist_launch.supervisor import Assignment, Supervisor
from kvdist_launch.watchdog import Watchdog

ANY_ADDRESS, ANY_IPV4_ADDRESS = "::", "0.0.0.0"


def root_addresses(
    connections: Sequence[HostConnection],
    root: HostConnection | None,
    interface: str | None = None,
    is_ours: Callable[[str], bool] | None = None,
    has_servers: bool = True,
) -> list[str]:
    """The address under which each host reaches the job's root.

    Args:
        connections: the hosts. The root's has been asked for its address on the interface, if any.
        root: the host of the scheduler, or in a job without servers of rank 0; None is this machine.
        interface: the name of a network card, or a network, in which the address has to be.
        is_ours: whether an address belongs to this machine; None asks the system.
        has_servers: whether the root is a scheduler.

    Raises:
        ConfigError: a host sees this machine behind a router, so that the host cannot dial it; or it has no
            such interface.
    """
    if root is not None and not root.is_here:
        if root.found.get("no_interface"):
            raise ConfigError(f"{root.host.name}: {root.found['no_interface']}")
        return [str(root.found.get("address") or root.address)] * len(connections)
    if interface is not None:
        return [address_of_interface(interface)] * len(connections)
    is_ours = is_address_of_this_machine if is_ours is None else is_ours
    for one in connections:
        if one.seen_as and not is_ours(one.seen_as):
            advice = (
                f"a scheduler here. Let it run on one of the hosts: --scheduler-on {one.host.name}"
                if has_servers
                else f"rank 0 here. Name {one.host.name} before localhost in the list of hosts"
            )
            raise ConfigError(
                f"{one.host.name} sees this machine as {one.seen_as}, which is not one of its addresses (NAT, or a jump"
                f" host): processes on {one.host.name} could not reach {advice}"
            )
    seen = [one.seen_as for one in connections if one.seen_as]
    here = seen[0] if seen else "127.0.0.1"
    return [one.seen_as or here for one in connections]


def listening_address(addresses: Sequence[str]) -> str:
    """The address at which the root listens so that all of `addresses` reach it."""
    if len(set(addresses)) == 1:
        return addresses[0]
    return ANY_ADDRESS if any(":" in address for address in addresses) else ANY_IPV4_ADDRESS


def is_address_of_this_machine(address: str) -> bool:
    """Whether a network card of this machine has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def run_on_hosts(
    options: argparse.Namespace, job: JobSpec, hosts: Sequence[Host], supervisor: Supervisor, environ: Mapping[str, str]
) -> int:
    """Run a job on hosts. Returns its exit code.

    Args:
        options: those of ``kvdist-launch``.
        job: the request; the run finds its port and addresses.
        environ: the launcher's variables.

    Raises:
        ConfigError: a host cannot take part, a copy failed, or the plan does not fit; no process runs then.
    """
    # The job's variables include those of the options; servers follow all of them.
    variables = with_twins({**environ, **job.env})
    ssh = ssh_options(options, limits_from_env(variables).patience_s)
    with supervisor, HostPool(hosts, python_of_hosts(options), ssh, supervisor) as pool:
        return _HostJob(job, options, variables, pool, supervisor, environ).run()


class _HostJob:
    """The steps of a job on hosts, in order, and their findings."""

    def __init__(
        self,
        job: JobSpec,
        options: argparse.Namespace,
        variables: Mapping[str, str],
        pool: HostPool,
        supervisor: Supervisor,
        environ: Mapping[str, str],
    ) -> None:
        self._job = job
        self._options = options
        self._variables = variables
        self._ports = ports_of(variables)
        self._pool = pool
        self._supervisor = supervisor
        self._environ = environ
        is_copied = RESTARTS in job.env  # a job that is started again has its files
        self._destination: str | None = None if is_copied else options.sync_dst_dir
        self._connections = pool.connections
        self._hosts = [one.host for one in pool.connections]
        root = root_host(job, self._hosts)
        self._root = None if root is None else pool.connections[root]
        self._listening: socket.socket | None = None
        self._addresses: list[str] = []

    def run(self) -> int:
        self._connect()
        interface, has_servers = self._variables.get("KVDIST_INTERFACE") or None, self._job.num_servers > 0
        if interface is not None:
            self._pool.ask(lambda one: {"interface": interface} if one is self._root else {})
        self._addresses = root_addresses(self._connections, self._root, interface, has_servers=has_servers)
        port = self._listen()
        if not self._options.no_preflight:
            self._check(port)
        if self._destination is not None:
            self._copy(self._destination)
        facts = self._facts()
        launcher = HostFacts(usable_cores(), sys.executable, self._addresses[0], self._environ)
        job = replace(self._job, port=port)
        processes = plan(job, self._hosts, facts, launcher)
        for note in self._notes(processes, facts):
            self._supervisor.say(note)
        if self._listening is not None:
            turn_away(self._listening)
        assignments = self._assignments(processes)
        self._pool.dismiss_idle(host for host, _ in assignments)
        workers = {process.node: process for process in processes if process.node.role is Role.WORKER}

        def elsewhere(process: Process) -> Assignment:
            """A new place for a process whose host is lost."""
            lost = {index for index, one in enumerate(self._connections) if one.processes.failure}
            if process.node in workers:
                others = [one for node, one in workers.items() if node != process.node]
                process = moved(job, self._hosts, facts, launcher, others, process, lost)
                workers[process.node] = process
            return self._pool.dial_again(self._connections[process.host]), process

        secret = self._job.security.secret_of_run()
        return self._supervisor.run(assignments, self._listening, secret, elsewhere, self._job.losses)

    def _connect(self) -> None:
        """Reach all hosts. If a host cannot be reached, all mistakes of all hosts are reported at once."""
        self._pool.connect()
        if not self._options.no_preflight and any(one.problem for one in self._connections):
            self._check(None)
        require_all(self._connections)

    def _listen(self) -> int:
        """Bind the root's port, on the machine where it will run."""
        root = self._root
        if root is None or root.is_here:
            self._listening = listen(listening_address(self._addresses), self._ports)
            return port_of(self._listening)
        where = [self._addresses[0], self._ports]
        self._pool.ask(lambda one: {"listen": where} if one is root else {})
        require_all(self._connections)
        if "port" not in root.found:
            raise ConfigError(f"{root.host.name}: {root.found['problem']}")
        return int(root.found["port"])

    def _check(self, port: int | None) -> None:
        """Check every host, and show the results.

        Args:
            port: the port at which the root listens; None if it does not listen yet.
        """
        destination = self._destination
        addresses = self._addresses or [""] * len(self._connections)
        address_of = {id(one): address for one, address in zip(self._connections, addresses, strict=True)}

        def questions(connection: HostConnection) -> dict[str, object]:
            return {
                "folder": destination,
                "cwd": None if destination else self._job.cwd,  # rsync makes its folder
                "dial": None if port is None else [address_of[id(connection)], port],
                "ports": self._ports,
            }

        self._pool.ask(questions)
        root = "the scheduler" if self._job.num_servers else "rank 0"
        judge(self._connections, destination, root)
        for line in table(self._connections, root.removeprefix("the ")).splitlines():
            self._supervisor.note(line)
        require_all(self._connections)

    def _copy(self, destination: str) -> None:
        """Copy to every host; to this machine too, if it is among them and the folder is another."""
        excluded, deletes = tuple(self._options.sync_exclude or ()), self._options.sync_delete
        sync = SyncOptions(os.getcwd(), destination, excluded, deletes)
        runs: list[RsyncRun] = []
        watchdog = Watchdog()
        try:
            for one in self._connections:
                if not one.is_here or os.path.realpath(sync.destination) != os.path.realpath(sync.source):
                    runs.append(RsyncRun(sync, one.host, self._pool.ssh, self._supervisor.selector))
                    watchdog.watch(runs[-1].pid)
                    self._supervisor.note(runs[-1].line)
            with progress_bars(runs, self._supervisor.is_on_terminal) as update:

                def is_done() -> bool:
                    update()
                    return all(run.result is not None for run in runs)

                self._pool.turn_until(is_done)
        finally:
            for run in runs:
                run.stop()
            watchdog.dismiss()
        if failures := [run.failure for run in runs if run.failure]:
            raise ConfigError("; ".join(failures))
        for run in runs:
            self._supervisor.note(run.report)

    def _facts(self) -> list[HostFacts]:
        return [
            HostFacts(
                cores=int(one.facts["cores"]),
                python=str(one.facts["python"]),
                address=one.address,
                environ=self._environ if one.is_here else one.facts["environ"],
                scheduler=address,
            )
            for one, address in zip(self._connections, self._addresses, strict=True)
        ]

    def _notes(self, processes: Sequence[Process], facts: Sequence[HostFacts]) -> Iterator[str]:
        """The launcher's messages before the start."""
        note = thread_note(processes, self._hosts, facts)
        if note is not None:
            yield note
        if self._options.verbose:
            yield from worker_lines(processes, self._hosts)
        yield (
            "traffic between hosts is encrypted"
            if self._job.security.encrypts
            else "nothing that this job sends is encrypted (KVDIST_SECURITY=none)"
        )
        for one in self._connections:
            warning = open_files_warning(int(one.facts["open_files"]), self._job.num_workers, self._job.num_servers)
            if warning:
                yield f"{one.host.name}: {warning}"

    def _assignments(self, processes: Sequence[Process]) -> list[tuple[HostProcesses, list[Process]]]:
        """What each host starts. This machine is a further host if only the scheduler runs on it."""
        hosts: dict[int, HostProcesses] = {index: one.processes for index, one in enumerate(self._connections)}
        hosts[LAUNCHER] = self._pool.here.processes
        found: dict[int, tuple[HostProcesses, list[Process]]] = {}
        for process in processes:
            host = hosts[process.host]
            found.setdefault(id(host), (host, []))[1].append(process)
        return list(found.values())
