"""Latency and bandwidth between all hosts of a fleet, and the launcher's machine.

Pairs are measured one after another, in both directions, so that none disturbs another.
"""

from __future__ import annotations

import os
import selectors
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kvdist_launch.fleet import Fleet, Station
from kvdist_launch.measure import SERVE_S, TOKEN_BYTES, Ear, Speed, dial
from kvdist_launch.remote import RemoteCrew
from kvdist_launch.tables import text_table

ANSWER_S = 2 * SERVE_S
"""For an agent's answer; longer than everything that a measurement waits for."""

HERE = "this machine"


@dataclass(frozen=True)
class Matrix:
    """What was measured.

    Attributes:
        names: of the machines.
        speeds: (from, to) → what was measured, by places in `names`.
    """

    names: tuple[str, ...]
    speeds: dict[tuple[int, int], Speed]

    @property
    def problems(self) -> list[str]:
        """A sentence for each direction that could not be measured."""
        return [
            f"{self.names[source]} → {self.names[target]}: {speed.problem}"
            for (source, target), speed in self.speeds.items()
            if speed.problem
        ]

    @property
    def slowest(self) -> float | None:
        """The lowest bandwidth between hosts of the job, in MB/s; None if nothing was measured."""
        return min((one.mb_per_s for one in self._of_hosts()), default=None)

    @property
    def latency_ms(self) -> float:
        """The longest round trip between hosts of the job."""
        return max((one.latency_ms for one in self._of_hosts()), default=0.0)

    def _of_hosts(self) -> list[Speed]:
        """What was measured; the launching machine's own lines, the first, only if there are no others."""
        measured = {place: one for place, one in self.speeds.items() if not one.problem}
        return [one for place, one in measured.items() if 0 not in place] or list(measured.values())

    def tables(self) -> str:
        """Two tables, of latencies and bandwidths: from the host of the row to that of the column.

        Empty if there is only one machine.
        """
        if not self.speeds:
            return ""
        latency = self._table("ms, there and back", lambda speed: f"{speed.latency_ms:.2f}")
        bandwidth = self._table("MB/s", lambda speed: f"{speed.mb_per_s:.0f}")
        return f"{latency}\n\n{bandwidth}"

    def _table(self, title: str, shown: Callable[[Speed], str]) -> str:
        places = range(len(self.names))
        rows = [[name, *(self._cell((row, column), shown) for column in places)] for row, name in enumerate(self.names)]
        return text_table([title, *self.names], rows, right=True)

    def _cell(self, place: tuple[int, int], shown: Callable[[Speed], str]) -> str:
        speed = self.speeds.get(place)
        return "" if speed is None else "no" if speed.problem else shown(speed)


def measure(fleet: Fleet, selector: selectors.BaseSelector, interface: str | None = None) -> Matrix:
    """Measure between all hosts that are connected, and this machine.

    Args:
        fleet: the hosts. With an interface, each has been asked for its address there.
        selector: the fleet's.
        interface: this machine's address on the interface that is to be measured; None measures the routes by which
            hosts were reached.
    """
    parties: list[_Here | _There] = [
        _There(station, station.crew, fleet)
        for station in fleet.stations
        if isinstance(station.crew, RemoteCrew) and not station.problem
    ]
    here = _Here(selector, interface)
    parties.insert(0, here)
    try:
        speeds = {(source, target): _speed(parties[source], parties[target]) for source, target in _pairs(len(parties))}
    finally:
        here.close()
    return Matrix(tuple(party.name for party in parties), speeds)


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return ((source, target) for source in range(count) for target in range(count) if source != target)


def _speed(source: _Here | _There, target: _Here | _There) -> Speed:
    token = os.urandom(TOKEN_BYTES).hex()
    address = target.address_from(source)
    if not address:
        return Speed(problem=f"it is not known under which address {target.name} is reached")
    opened = target.open(address, token)
    try:
        if "port" not in opened:
            return Speed(problem=f"{target.name}: {opened['problem']}")
        return source.dial(address, int(opened["port"]), token)
    finally:
        target.close()


class _Here:
    """This machine."""

    name = HERE

    def __init__(self, selector: selectors.BaseSelector, address: str | None) -> None:
        self._ear = Ear(selector)
        self._address = address

    def address_from(self, other: _Here | _There) -> str:
        """Under which it is reached from another one."""
        return self._address or (other.station.seen_as if isinstance(other, _There) else "")

    def open(self, address: str, token: str) -> dict[str, Any]:
        """Listen."""
        return self._ear.open(address, token)

    def dial(self, address: str, port: int, token: str) -> Speed:
        """Measure."""
        return dial(address, port, token)

    def close(self) -> None:
        """Listen no more."""
        self._ear.close()


class _There:
    """Another machine."""

    def __init__(self, station: Station, crew: RemoteCrew, fleet: Fleet) -> None:
        self.station = station
        self.name = station.host.name
        self._crew = crew
        self._fleet = fleet

    def address_from(self, other: _Here | _There) -> str:
        """Under which it is reached from another one."""
        return str(self.station.found.get("address") or self.station.address)

    def open(self, address: str, token: str) -> dict[str, Any]:
        """Listen."""
        return self._ask("measure_listen", "measure_listening", address=address, token=token)

    def dial(self, address: str, port: int, token: str) -> Speed:
        """Measure."""
        return Speed(**self._ask("measure_dial", "measured", address=address, port=port, token=token))

    def close(self) -> None:
        """Listen no more."""
        self._crew.ask("measure_end")

    def _ask(self, question: str, kind: str, **fields: Any) -> dict[str, Any]:
        crew = self._crew
        crew.answers.pop(kind, None)
        crew.ask(question, **fields)
        self._fleet.turn_until(lambda: kind in crew.answers or bool(crew.failure), ANSWER_S)
        nothing = {"problem": crew.failure or f"its agent has not answered within {ANSWER_S:g} s"}
        return crew.answers.get(kind, nothing)
