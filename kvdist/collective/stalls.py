"""Who keeps the others waiting, told in a sentence when an operation takes too long. Pure; rank 0 asks at each tick."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvdist.collective.ledger import Ledger
from kvdist.collective.signature import Signature
from kvdist.protocol.collective import Stall, ToMember

SILENT_S = 3.0
"""A rank that waits says each second that it lives; see `kvdist.collective.member`."""
AGAIN = 2.0
"""The next sentence about the same wait comes when it has lasted this many times as long."""
NAMED_MAX = 6


@dataclass(frozen=True)
class Told:
    """What there was to tell."""

    text: str = ""
    is_the_end: bool = False
    answers: list[tuple[int, ToMember]] = field(default_factory=list)


class StallWatch:
    """Looks at waits.

    Args:
        check_s: one that is longer is told of; 0 for never.
        shutdown_s: one that is longer ends the job; 0 for never.
    """

    def __init__(self, check_s: float, shutdown_s: float) -> None:
        self._check_s = check_s
        self._shutdown_s = shutdown_s

    def look(
        self,
        number: int,
        ledger: Ledger,
        hosts: Mapping[int, str],
        heard: Mapping[int, float],
        signatures: Mapping[bytes, Signature],
        now: float,
    ) -> Told:
        """Who waits too long in a group, for whom. The longest wait counts."""
        waiting = [rank for rank in ledger.active() if rank in hosts and ledger.of[rank].waits]
        if ledger.has_failed or not waiting:
            return Told()
        first = min(waiting, key=lambda rank: (ledger.of[rank].done, ledger.of[rank].since))
        sequence = ledger.of[first].done
        waited_s = now - min(ledger.of[rank].since for rank in waiting if ledger.of[rank].done == sequence)
        if ledger.told_of != sequence:
            ledger.told_of, ledger.told_s = sequence, 0.0
        is_the_end = 0 < self._shutdown_s <= waited_s
        is_due = 0 < self._check_s <= waited_s and waited_s >= AGAIN * ledger.told_s
        if not (is_due or is_the_end):
            return Told()
        ledger.told_s = waited_s
        text = self._sentence(number, ledger, first, sequence, waited_s, hosts, heard, signatures, now)
        if is_the_end:
            return Told(f"{text}; the job ends after {self._shutdown_s:g} s of this (KVDIST_STALL_SHUTDOWN_S)", True)
        return Told(text, False, [(rank, Stall(text)) for rank in sorted({0, first}) if rank in hosts])

    def _sentence(
        self,
        number: int,
        ledger: Ledger,
        first: int,
        sequence: int,
        waited_s: float,
        hosts: Mapping[int, str],
        heard: Mapping[int, float],
        signatures: Mapping[bytes, Signature],
        now: float,
    ) -> str:
        def name(sequence: int) -> str:
            signature = signatures.get(ledger.digest_of(sequence) or b"")
            return f"operation {sequence}" if signature is None else f"{signature}"

        behind = [rank for rank in ledger.active() if ledger.of[rank].called <= sequence]
        silent = [rank for rank in ledger.active() if now - heard.get(rank, now) >= SILENT_S and rank not in behind]
        here = f" (operation {sequence}" + (f" of process set {number})" if number else ")")
        text = f"rank {first} has waited {waited_s:.0f} s for {name(sequence)}{here}: "
        if behind:
            told = [
                f"rank {rank} on host {hosts.get(rank, '?')} has not called it, "
                + (f"its last was {name(ledger.of[rank].called - 1)}" if ledger.of[rank].called else "nor any before")
                + (
                    f", and it has been silent for {now - heard[rank]:.0f} s"
                    if rank in heard and ledger.of[rank].waits and now - heard[rank] >= SILENT_S
                    else ""
                )
                for rank in behind[:NAMED_MAX]
            ]
            return text + "; ".join(told) + (f"; {len(behind) - NAMED_MAX} more" if len(behind) > NAMED_MAX else "")
        if silent:
            return text + "; ".join(
                f"rank {rank} on host {hosts.get(rank, '?')} called it and is silent for {now - heard[rank]:.0f} s"
                for rank in silent[:NAMED_MAX]
            )
        return text + "all ranks have called it and are alive; the network or a device is slow"
