"""Which slices of a server are in a group, and whether it is worth while to put them into one again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvdist.core.group import SLICES_MIN, Group
from kvdist.protocol.arrays import U32

ROUNDS_WORTH_IT = 16
STRIKES_MAX = 8
"""After so many groups of the same slices in a row, each dissolved sooner than that, the slices stay apart."""
APART_MAX = 256
"""Pushes of them until they are tried again: what took them apart may have been a machine that was busy for a while."""
RECORDS_MAX = 4096
"""Runs of slices that are remembered."""


@dataclass(slots=True, eq=False)
class _Record:
    """What is known of a run of slices."""

    group: Group | None = None
    strikes: int = 0
    apart: int = 0
    """Pushes that found the slices apart for good."""


@dataclass(slots=True)
class Groups:
    """All groups of a server. A slice is in one of them at most."""

    _records: dict[bytes, _Record] = field(default_factory=dict)
    _record_of: dict[int, _Record] = field(default_factory=dict)
    """Slice → the record of the group that it is in."""

    def __iter__(self) -> Iterator[Group]:
        """A snapshot: groups may be dissolved on the way."""
        return iter([record.group for record in self._records.values() if record.group is not None])

    def __contains__(self, number: int) -> bool:
        return number in self._record_of

    def find(self, ids: U32) -> Group | None:
        """The group of exactly these slices in this order."""
        record = self._records.get(ids.tobytes())
        return None if record is None else record.group

    def is_worth_it(self, ids: U32) -> bool:
        """Whether to make a group of these slices, which are pushed together; asked at each such push."""
        if len(ids) < SLICES_MIN:
            return False
        record = self._records.get(ids.tobytes())
        if record is None:
            return len(self._records) < RECORDS_MAX
        if record.strikes >= STRIKES_MAX:
            record.apart += 1
            if record.apart < APART_MAX:
                return False
            record.strikes, record.apart = STRIKES_MAX - 1, 0  # one more try
        return True

    def add(self, group: Group) -> None:
        """Its slices are in no other group."""
        record = self._records.setdefault(group.ids.tobytes(), _Record())
        record.group = group
        for number in group.ids.tolist():
            self._record_of[number] = record

    def of(self, ids: U32) -> list[Group]:
        """The groups that have any of these slices."""
        if not self._record_of:
            return []
        records = {id(record): record for n in ids.tolist() if (record := self._record_of.get(n)) is not None}
        return [record.group for record in records.values() if record.group is not None]

    def dissolve(self, group: Group) -> None:
        """Its slices are shards again."""
        record = self._records[group.ids.tobytes()]
        record.group = None
        record.strikes = record.strikes + 1 if group.rounds < ROUNDS_WORTH_IT else 0
        for number in group.ids.tolist():
            del self._record_of[number]
        group.dissolve()
