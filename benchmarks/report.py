"""What a run of the benchmarks has found: as JSON for machines, as Markdown for people, and as plots."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import namespaces
import systems
from end_to_end import SYSTEMS as TRAINED
from end_to_end import Training
from systems import Measured, Work
from targets import Contest, Line, Row

NOT_MEASURED = "not measured"


class Report:
    """Contests that were held, and the rows of the table of targets that follow from them.

    Args:
        machine: where.
        turns: how many turns each system had.
        rows: the ratios that are asked for.
    """

    def __init__(self, machine: dict[str, object], turns: int, rows: Sequence[Row]) -> None:
        self._machine = machine
        self._turns = turns
        self._rows = rows
        self._held: dict[str, tuple[Contest, dict[str, Measured]]] = {}

    def add(self, contest: Contest, measured: dict[str, Measured]) -> None:
        """Take in a contest."""
        self._held[contest.name] = (contest, measured)

    def failures(self) -> list[str]:
        """Where kvdist itself did not come to an end, which no table may hide."""
        return [
            f"{name} with {system}: {one.left_out.splitlines()[-1]}"
            for name, (_, measured) in self._held.items()
            for system, one in measured.items()
            if system.startswith("kvdist") and one.failed
        ]

    def verdicts(self) -> list[dict[str, Any]]:
        """Every row whose contest was held: both times, their ratio, and whether it is enough."""
        return [self._verdict(row) for row in self._rows if row.contest in self._held]

    def _verdict(self, row: Row) -> dict[str, Any]:
        _, measured = self._held[row.contest]
        ours, peer = measured[row.ours], measured[row.peer]
        found = asdict(row) | {"ours_ms": None, "peer_ms": None, "ratio": None, "ratios_by_turn": []}
        if not (ours.seconds and peer.seconds):
            why = (ours.left_out or peer.left_out).splitlines()[-1]
            return found | {"reached": f"{NOT_MEASURED}: {why}"}
        ratio = peer.median_s / ours.median_s
        reached = "stretch" if ratio >= row.stretch else "yes" if ratio >= row.target else "no"
        times = {"ours_ms": round(ours.median_s * 1e3, 2), "peer_ms": round(peer.median_s * 1e3, 2)}
        by_turn = ratios_by_turn(ours, peer)
        return found | times | {"ratio": round(ratio, 2), "ratios_by_turn": by_turn, "reached": reached}

    def markdown(self) -> str:
        """The table of targets, and one table of every contest."""
        lines = [
            "Measured on {processor}, {cores} cores, Python {python}, kvdist {kvdist}; load before the run"
            " {load_before:.1f}; medians over {turns} turns.".format(**self._machine, turns=self._turns),
            "",
        ]
        verdicts = self.verdicts()
        if verdicts:
            titles = ["work", "ours", "ms", "peer", "ms", "ratio", "in single turns", "target (stretch)", "reached"]
            lines += ["| " + " | ".join(titles) + " |", "|---" * len(titles) + "|"]
        for row in verdicts:
            work = self._held[row["contest"]][0].work
            ours, peer = label(work, row["ours"]), label(work, row["peer"])
            cells = [row["title"], ours, row["ours_ms"], peer, row["peer_ms"], row["ratio"]]
            turns = row["ratios_by_turn"]
            cells += [f"{min(turns):g} to {max(turns):g}" if turns else None]
            cells += [f"{row['target']:g} ({row['stretch']:g})", row["reached"]]
            lines.append("| " + " | ".join("–" if cell is None else str(cell) for cell in cells) + " |")
        lines += [""] if verdicts else []
        lines += ["| contest | system | median ms | p10 ms | p90 ms | steps | |", "|---|---|---|---|---|---|---|"]
        lines += [self._contest_line(*held, name) for held in self._held.values() for name in held[1]]
        return "\n".join(lines)

    def _contest_line(self, contest: Contest, measured: dict[str, Measured], name: str) -> str:
        one, who = measured[name], label(contest.work, name)
        if not one.seconds:
            return f"| {contest.work} | {who} | – | – | – | – | left out: {one.left_out.splitlines()[-1]} |"
        times = [one.median_s, one.quantile_s(0.1), one.quantile_s(0.9)]
        cells = [str(contest.work), who, *(f"{1e3 * each:.2f}" for each in times), str(len(one.seconds))]
        return "| " + " | ".join([*cells, note(contest.work, name, measured)]) + " |"

    def record(self) -> dict[str, Any]:
        """Everything, as JSON holds it."""
        contests = [
            {"contest": one.name, "name": name, "label": label(one.work, name), **described(one.work), **timed(result)}
            for one, measured in self._held.values()
            for name, result in measured.items()
        ]
        found = {"machine": self._machine, "turns": self._turns}
        return {**found, "rows": self.verdicts(), "contests": contests}

    def write(self, folder: Path, name: str) -> None:
        """Write ``<name>.json`` and ``<name>.md``."""
        folder.mkdir(exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(self.record(), indent=1) + "\n", encoding="utf-8")
        (folder / f"{name}.md").write_text(self.markdown() + "\n", encoding="utf-8")

    def draw(self, folder: Path, name: str) -> None:
        """Draw ``<name>.png``, if matplotlib is here; if not, say so."""
        try:
            import plot
        except ImportError as error:
            print(f"NO PLOT: {error}; pip install 'kvdist[bench]' brings matplotlib")
            return
        plot.draw(self.record(), folder / f"{name}.png")
        print(f"drawn: {folder / name}.png")


def ratios_by_turn(ours: Measured, peer: Measured) -> list[float]:
    """The ratio in each turn; a peer that took no turns, such as the bound, is the same in all."""
    theirs = peer.turn_medians_s or [peer.median_s] * len(ours.turn_medians_s)
    return [round(other / one, 2) for one, other in zip(ours.turn_medians_s, theirs, strict=True)]


def label(work: Work | Training | Line, name: str) -> str:
    """What a system is called in tables, at this kind of work."""
    if isinstance(work, Training):
        return TRAINED[name]
    if isinstance(work, Line):
        return {**namespaces.SYSTEMS, "bound": "bound of the cost model"}[name]
    return systems.SYSTEMS[name].label


def note(work: Work | Training | Line, name: str, measured: dict[str, Measured]) -> str:
    """What a time means: images per second of a training, GB/s of an exchange, the share of a line's bound."""
    one = measured[name]
    if isinstance(work, Training):
        return f"{work.images_per_s(name, one):.0f} images/s"
    if isinstance(work, Work):
        return f"{work.spec.payload_bytes / one.median_s / 1e9:.2f} GB/s each way"
    return f"{measured['bound'].median_s / one.median_s:.1%} of the bound"


def described(work: Work | Training | Line) -> dict[str, Any]:
    """A work's settings, flat."""
    if isinstance(work, Training):
        return {"kind": "training", **asdict(work)}
    if isinstance(work, Line):
        return described(work.work) | {"kind": "line", "mbit": work.mbit}
    settings = {name: value for name, value in asdict(work).items() if name != "spec"}
    return {
        "kind": "exchange",
        "spec": str(work.spec),
        "keys": work.spec.count,
        "payload_bytes": work.spec.payload_bytes,
        **settings,
    }


def timed(measured: Measured) -> dict[str, Any]:
    """A system's times, in milliseconds, or why there are none."""
    if not measured.seconds:
        return {"left_out": measured.left_out}
    quantiles = {"median_ms": 0.5, "p10_ms": 0.1, "p90_ms": 0.9, "least_ms": 0.0}
    times = {name: round(measured.quantile_s(share) * 1e3, 3) for name, share in quantiles.items()}
    turns = [round(each * 1e3, 3) for each in measured.turn_medians_s]
    return times | {"median_ms": round(measured.median_s * 1e3, 3), "turns_ms": turns, "samples": len(measured.seconds)}
