"""All hosts of a job: connected, asked and looked after at the same time, on one selector.

While anything takes long the agents are shown every second that the launcher lives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from kvdist_launch.crew import Crew, LocalCrew
from kvdist_launch.hosts import Host
from kvdist_launch.probe import answer_here, facts_of_this_host
from kvdist_launch.remote import RemoteCrew
from kvdist_launch.ssh import SshOptions, agent_command
from kvdist_launch.supervisor import BEAT_S, Supervisor

LOOK_S = 10.0
"""How long connecting and all questions may take together."""
GREETING_S = 8.0
"""How long of that a host may take to log us in and start its agent."""
ANSWER_S_MIN = 1.0
"""How long agents may take for a question at least."""


@dataclass
class Station:
    """One host of the job.

    Attributes:
        host: as the user named it.
        crew: its processes.
        facts: what its agent said first.
        found: its answers to what was asked since.
        problem: why it cannot take part, a sentence; empty if it can.
    """

    host: Host
    crew: Crew
    facts: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_here(self) -> bool:
        """Whether it is this machine."""
        return isinstance(self.crew, LocalCrew)

    @property
    def seen_as(self) -> str:
        """The address under which the host sees this machine; empty if it is this machine."""
        return self._connection()[0]

    @property
    def address(self) -> str:
        """The address under which this machine reached the host."""
        return self._connection()[2]

    def _connection(self) -> list[str]:
        words = str(self.facts.get("environ", {}).get("SSH_CONNECTION", "")).split()
        return words if len(words) == 4 and not self.is_here else ["", "", "", ""]


class Fleet:
    """The hosts.

    Args:
        hosts: in the user's order.
        python: the interpreter of hosts that name none.
        wanted: what the user wants of ssh.
        supervisor: gives the selector, and hears what processes do.
    """

    def __init__(self, hosts: Sequence[Host], python: str, wanted: SshOptions, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._beat_at = time.monotonic() + BEAT_S
        self._look_by = time.monotonic() + LOOK_S
        self.stations: list[Station] = []
        for host in hosts:
            if host.is_local:
                crew = LocalCrew(supervisor.selector, supervisor)
                self.stations.append(Station(host, crew, facts_of_this_host()))
                continue
            argv = agent_command(host, host.python or python, wanted)
            crew_there = RemoteCrew(host.name, argv, supervisor.selector, supervisor, wanted.patience_s)
            self.stations.append(Station(host, crew_there))

    def __enter__(self) -> Fleet:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def connect(self) -> None:
        """Wait for every agent's first words; who does not say them has a problem."""
        remote = self._remote()
        self.turn_until(lambda: all(crew.facts is not None or crew.failure for _, crew in remote), GREETING_S)
        for station, crew in remote:
            if crew.failure:
                station.problem = crew.failure
            elif crew.facts is None:
                station.problem = f"no answer within {GREETING_S:g} s"
            else:
                station.facts = crew.facts

    def ask(self, questions: Callable[[Station], dict[str, Any]]) -> None:
        """Let every host look at itself; see `probe.answer_here` for the questions.

        Args:
            questions: what a host is asked; nothing, and it is not.
        """
        asked = []
        for station, crew in self._remote():
            wanted = questions(station)
            if not station.problem and wanted:
                crew.answers.pop("prepared", None)
                crew.ask("prepare", **wanted)
                asked.append((station, crew))
        for station in self.stations:
            if station.is_here and (wanted := questions(station)):
                station.found.update(answer_here(wanted))
        left_s = max(ANSWER_S_MIN, self._look_by - time.monotonic())
        self.turn_until(lambda: all("prepared" in crew.answers or crew.failure for _, crew in asked), left_s)
        for station, crew in asked:
            if "prepared" in crew.answers:
                station.found.update(crew.answers["prepared"])
            else:
                station.problem = crew.failure or f"its agent has not answered within {left_s:.0f} s"

    def turn_until(self, is_done: Callable[[], bool], timeout_s: float = float("inf")) -> None:
        """Take what comes from the hosts until something is the case, or time is up."""
        deadline = time.monotonic() + timeout_s
        while not is_done() and (now := time.monotonic()) < deadline:
            self._supervisor.turn(max(0.0, min(deadline, self._beat_at) - now))
            if time.monotonic() >= self._beat_at:
                self._beat_at = time.monotonic() + BEAT_S
                for _, crew in self._remote():
                    crew.beat(time.monotonic())

    def dismiss_idle(self, busy: Iterable[Crew]) -> None:
        """Let the hosts go that have nothing to do."""
        crews = list(busy)
        idle = [crew for _, crew in self._remote() if crew not in crews]
        for crew in idle:
            crew.ask("leave")
            crew.hang_up()
        for crew in idle:
            crew.release()

    def release(self) -> None:
        """Let every host go, all at the same time."""
        for _, crew in self._remote():
            crew.ask("leave")
            crew.hang_up()
        for station in self.stations:
            station.crew.release()

    def _remote(self) -> list[tuple[Station, RemoteCrew]]:
        return [(one, one.crew) for one in self.stations if isinstance(one.crew, RemoteCrew)]
