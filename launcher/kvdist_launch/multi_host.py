"""A job on several hosts, from the first connection to the exit code.

Everything that can be known beforehand is checked before anything is started or copied: hosts that cannot take part are
named, with a reason, and then nothing has happened yet.

An alias that ssh knows is not an address, so addresses are never taken from the hosts' names. A host says which
address it sees this machine under (ssh's own variable); its processes can dial that address if it belongs to this
machine and not to a router in between.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvdist.config.addresses import address_of_interface
from kvdist.config.sockets import open_files_warning
from kvdist.errors import ConfigError
from kvdist_launch.host_pool import HostConnection, HostPool
from kvdist_launch.hosts import Host
from kvdist_launch.plan import LAUNCHER, HostFacts, JobSpec, Process, plan, root_host, thread_note, worker_lines
from kvdist_launch.preflight import explained, judge, require_all, table
from kvdist_launch.probe import usable_cores
from kvdist_launch.processes import HostProcesses, LocalProcesses
from kvdist_launch.root_socket import listen, port_of, turn_away
from kvdist_launch.ssh import RsyncRun, SshOptions, SyncError, SyncOptions, shown
from kvdist_launch.supervisor import Supervisor
from kvdist_launch.watchdog import Watchdog

ANY_ADDRESS, ANY_IPV4_ADDRESS = "::", "0.0.0.0"


def root_addresses(
    stations: Sequence[HostConnection],
    root: HostConnection | None,
    interface: str | None = None,
    is_ours: Callable[[str], bool] | None = None,
    has_servers: bool = True,
) -> list[str]:
    """For each host the address of the job's root, as it is reached from there.

    Args:
        stations: the hosts. One where the root runs has been asked for its address on the interface, if any.
        root: where the scheduler runs, or in a job without servers rank 0; None is this machine.
        interface: the name of a network card, or a network, in which the address has to be.
        is_ours: whether this machine has an address.
        has_servers: whether the root is a scheduler.

    Raises:
        ConfigError: a host sees this machine behind a router, so that it cannot be dialled from there; or there is no
            such interface.
    """
    if root is not None and not root.is_here:
        if root.found.get("no_interface"):
            raise ConfigError(f"{root.host.name}: {root.found['no_interface']}")
        return [str(root.found.get("address") or root.address)] * len(stations)
    if interface is not None:
        return [address_of_interface(interface)] * len(stations)
    is_ours = is_address_of_this_machine if is_ours is None else is_ours
    for station in stations:
        if station.seen_as and not is_ours(station.seen_as):
            advice = (
                f"a scheduler here. Let it run on one of the hosts: --scheduler-on {station.host.name}"
                if has_servers
                else f"rank 0 here. Name {station.host.name} before localhost in the list of hosts"
            )
            raise ConfigError(
                f"{station.host.name} sees this machine as {station.seen_as}, which is none of its addresses (NAT, or a"
                f" jump host): processes there could not reach {advice}"
            )
    seen = [station.seen_as for station in stations if station.seen_as]
    here = seen[0] if seen else "127.0.0.1"
    return [station.seen_as or here for station in stations]


def listening_address(addresses: Sequence[str]) -> str:
    """Where the root listens so that it is reached under all of these."""
    if len(set(addresses)) == 1:
        return addresses[0]
    return ANY_ADDRESS if any(":" in address for address in addresses) else ANY_IPV4_ADDRESS


def is_address_of_this_machine(address: str) -> bool:
    """Whether one of this machine's network cards has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


@dataclass(frozen=True)
class LaunchOptions:
    """How the user wants a job to be brought to its hosts.

    Attributes:
        python: the interpreter of hosts that name none.
        ssh: what is wanted of ssh.
        sync: what is copied to every host first; None is nothing.
        ports: those that may be listened at; none is any.
        interface: the network card, or the network, that everybody is to use; None is the route that there is.
        is_checked: whether hosts are looked at before anything starts there.
        is_verbose: whether it is said where each worker runs.
    """

    python: str
    ssh: SshOptions
    sync: SyncOptions | None = None
    ports: tuple[int, ...] = ()
    interface: str | None = None
    is_checked: bool = True
    is_verbose: bool = False


def run_on_hosts(
    job: JobSpec, hosts: Sequence[Host], wishes: LaunchOptions, supervisor: Supervisor, environ: Mapping[str, str]
) -> int:
    """Run a job on hosts. Returns its exit code.

    Args:
        job: what is wanted; its port and addresses are found here.
        hosts: where.
        wishes: how.
        supervisor: watches it.
        environ: the launcher's variables.

    Raises:
        ConfigError: a host cannot take part, a copy failed, or the plan does not fit; nothing runs then.
    """
    with supervisor, HostPool(hosts, wishes.python, wishes.ssh, supervisor) as fleet:
        return _HostJob(job, wishes, fleet, supervisor, environ).run()


class _HostJob:
    """The steps, in order, and what they have found out."""

    def __init__(
        self, job: JobSpec, wishes: LaunchOptions, fleet: HostPool, supervisor: Supervisor, environ: Mapping[str, str]
    ) -> None:
        self._job = job
        self._wishes = wishes
        self._fleet = fleet
        self._supervisor = supervisor
        self._environ = environ
        self._stations = fleet.stations
        root = root_host(job, [station.host for station in fleet.stations])
        self._root = None if root is None else fleet.stations[root]
        self._listening: socket.socket | None = None
        self._addresses: list[str] = []

    def run(self) -> int:
        self._connect()
        interface = self._wishes.interface
        if interface is not None:
            self._fleet.ask(lambda station: {"interface": interface} if station is self._root else {})
        has_servers = self._job.num_servers > 0
        self._addresses = root_addresses(self._stations, self._root, interface, has_servers=has_servers)
        port = self._listen()
        if self._wishes.is_checked:
            self._look(port)
        if self._wishes.sync is not None:
            self._copy(self._wishes.sync)
        hosts, facts = [one.host for one in self._stations], self._facts()
        processes = plan(replace(self._job, port=port), hosts, facts, self._launcher())
        note = thread_note(processes, hosts, facts)
        if note is not None:
            self._supervisor.say(note)
        for line in worker_lines(processes, hosts) if self._wishes.is_verbose else ():
            self._supervisor.say(line)
        self._supervisor.say(
            "what leaves a host is encrypted"
            if self._job.security.encrypts
            else "nothing that this job sends is encrypted (KVDIST_SECURITY=none)"
        )
        for station in self._stations:
            warning = open_files_warning(int(station.facts["open_files"]), self._job.num_workers, self._job.num_servers)
            if warning:
                self._supervisor.say(f"{station.host.name}: {warning}")
        if self._listening is not None:
            turn_away(self._listening)
        assignments = self._assignments(processes)
        self._fleet.dismiss_idle(crew for crew, _ in assignments)
        return self._supervisor.run(assignments, self._listening, self._job.security.secret_of_run())

    def _connect(self) -> None:
        """Reach all hosts. If one cannot be, all that is wrong with any of them is told at once."""
        self._fleet.connect()
        for station in self._stations:
            if station.problem:
                station.problem = explained(station.problem, station.host.python or self._wishes.python, station.host)
        if any(station.problem for station in self._stations) and self._wishes.is_checked:
            self._look(None)
        require_all(self._stations)

    def _listen(self) -> int:
        """Bind the root's port, wherever it will run."""
        root = self._root
        if root is None or root.is_here:
            self._listening = listen(listening_address(self._addresses), self._wishes.ports)
            return port_of(self._listening)
        where = [self._addresses[0], self._wishes.ports]
        self._fleet.ask(lambda station: {"listen": where} if station is root else {})
        require_all(self._stations)
        if "port" not in root.found:
            raise ConfigError(f"{root.host.name}: {root.found['problem']}")
        return int(root.found["port"])

    def _look(self, port: int | None) -> None:
        """Ask every host the rest, and show what they said.

        Args:
            port: where the root listens; None while that is not known.
        """
        sync = self._wishes.sync
        destination = None if sync is None else sync.destination
        addresses = self._addresses or [""] * len(self._stations)
        address_of = {id(one): address for one, address in zip(self._stations, addresses, strict=True)}

        def questions(station: HostConnection) -> dict[str, object]:
            return {
                "folder": destination,
                "cwd": None if sync else self._job.cwd,  # rsync makes its folder
                "dial": None if port is None else [address_of[id(station)], port],
                "ports": self._wishes.ports,
            }

        self._fleet.ask(questions)
        root = "the scheduler" if self._job.num_servers else "rank 0"
        judge(self._stations, destination, root)
        for line in table(self._stations, root.removeprefix("the ")).splitlines():
            self._supervisor.note(line)
        require_all(self._stations)

    def _copy(self, sync: SyncOptions) -> None:
        """Copy to every host; to this one too, if it is one of them and the folder is another."""
        selector = self._supervisor.selector
        copies: list[RsyncRun] = []
        guard = Watchdog()
        try:
            for station in self._stations:
                if not station.is_here or os.path.realpath(sync.destination) != os.path.realpath(sync.source):
                    copies.append(RsyncRun(sync, station.host, self._wishes.ssh, selector))
                    guard.watch(copies[-1].pid)
                    self._supervisor.note(copies[-1].line)
            with shown(copies, self._supervisor.is_on_terminal) as update:

                def is_done() -> bool:
                    update()
                    return all(copy.result is not None for copy in copies)

                self._fleet.turn_until(is_done)
        finally:
            for copy in copies:
                copy.stop()
            guard.dismiss()
        if failures := [copy.failure for copy in copies if copy.failure]:
            raise SyncError("; ".join(failures))
        for copy in copies:
            self._supervisor.note(copy.report)

    def _facts(self) -> list[HostFacts]:
        return [
            HostFacts(
                cores=int(station.facts["cores"]),
                python=str(station.facts["python"]),
                address=station.address,
                environ=self._environ if station.is_here else station.facts["environ"],
                scheduler=address,
            )
            for station, address in zip(self._stations, self._addresses, strict=True)
        ]

    def _launcher(self) -> HostFacts:
        return HostFacts(usable_cores(), sys.executable, self._addresses[0], self._environ)

    def _assignments(self, processes: Sequence[Process]) -> list[tuple[HostProcesses, list[Process]]]:
        """What each crew starts. This machine's is one more if only the scheduler runs here."""
        crews: dict[int, HostProcesses] = {index: station.crew for index, station in enumerate(self._stations)}
        here = next((one.crew for one in self._stations if one.is_here), None)
        crews[LAUNCHER] = here or LocalProcesses(self._supervisor.selector, self._supervisor)
        mine: dict[int, tuple[HostProcesses, list[Process]]] = {}
        for process in processes:
            crew = crews[process.host]
            mine.setdefault(id(crew), (crew, []))[1].append(process)
        return list(mine.values())
