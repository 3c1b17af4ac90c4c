"""The scheduler's book of one store: which worker declared which key how.

A key goes through three states: *declared* by some workers, *agreed* when every live worker has declared it alike,
*placed* when every server knows of it. A request for a list of keys is answered when its last key is placed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from kvdist.core.sharding import Keep, cut, row_length
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch
from kvdist.nodes import Member
from kvdist.protocol.messages import ROWS, Declare, Placement


@dataclass(slots=True, eq=False)
class KeyRequest:
    """One worker's list of keys, waiting to be placed."""

    member: Member
    request: int
    keys: tuple[int | str, ...]
    missing: int
    """How many of the keys are not placed yet."""
    since: float


@dataclass(slots=True, eq=False)
class Entry:
    """What is known of one key."""

    key: int | str
    shape: tuple[int, ...]
    dtype: int
    first: Member
    """Who declared it first; the others must agree."""
    pulled_as: int = 0
    """The dtype in which its values come back."""
    form: str = ""
    """What its rows begin as, if it is a table of rows."""
    declared: frozenset[int] = frozenset()
    """The ranks that have declared it: one of few sets that all keys share."""
    home: int = -1
    giver: int = 0
    """The rank of the worker whose value is the first one."""
    first_slice: int = -1
    placed: bool = False
    conflict: str = ""
    """The error that everybody gets once two workers disagreed."""
    waiters: tuple[KeyRequest, ...] = ()

    def is_torn(self, keep: Keep, num_servers: int, slice_bytes: int) -> bool:
        """Whether it has been placed otherwise than an optimizer needs that must have so much together."""
        if keep is Keep.NOTHING or self.first_slice < 0 or self.form:
            return False
        row = row_length(self.shape)
        where = (self.home, num_servers, self.first_slice, slice_bytes, row)
        slices = cut(math.prod(self.shape), DType(self.dtype).itemsize, *where)
        if keep is Keep.WHOLE:
            return len({piece.server for piece in slices}) > 1
        return any(piece.start % row for piece in slices)


@dataclass(slots=True)
class KeyBook:
    """All keys of one store."""

    store: int
    mode: str
    opener: Member
    """Who used the store first."""
    slice_bytes: int
    entries: dict[int | str, Entry] = field(default_factory=dict)
    requests: list[KeyRequest] = field(default_factory=list)
    _homeless: dict[int | str, Entry] = field(default_factory=dict)
    """The entries for which no place was sought yet."""
    _declarers: dict[tuple[frozenset[int], int], frozenset[int]] = field(default_factory=dict)
    """Ranks and one more → all of them."""

    def declare(self, sender: Member, message: Declare, now: float) -> KeyRequest:
        """Note that `sender` is about to initialise these keys.

        Raises:
            InitMismatch: another worker declared one of them, or the store, otherwise. Everybody who waits for that
                key is to be told the same; `take_conflicts` finds them.
        """
        columns = (message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms)
        if message.mode != self.mode:
            reason = (
                f"store {message.store} is {self.mode} on {self.opener} and {message.mode} on {sender}:"
                " every worker must create its stores in the same order and with the same types"
            )
            for key, shape, dtype, pulled_as, form in zip(*columns, strict=True):
                self.entries.setdefault(key, Entry(key, shape, dtype, sender, pulled_as, form)).conflict = reason
            raise InitMismatch(reason)
        request = KeyRequest(sender, message.request, message.keys, 0, now)
        conflict, rank, ones = "", sender.node.rank, (request,)
        before = after = frozenset[int]()
        for key, shape, dtype, pulled_as, form in zip(*columns, strict=True):
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = self._homeless[key] = Entry(key, shape, dtype, sender, pulled_as, form)
            elif not entry.conflict and (entry.shape, entry.dtype, entry.form) != (shape, dtype, form):
                ours, theirs = _said(entry.shape, entry.dtype, entry.form), _said(shape, dtype, form)
                entry.conflict = (
                    f"key {key!r} was declared with {ours} by {entry.first}, but with {theirs} by {sender};"
                    " every worker must initialise a key alike"
                )
            elif not entry.conflict and entry.pulled_as != pulled_as:
                entry.conflict = (
                    f"the values of key {key!r} come back as {DType(entry.pulled_as).label} to {entry.first}, but as"
                    f" {DType(pulled_as).label} to {sender}; every worker must set the same compression"
                )
            conflict = conflict or entry.conflict
            if entry.declared is not before or not after:  # nearly all keys have the same
                before = entry.declared
                after = self._with(before, rank)
            entry.declared = after
            if not entry.placed:
                entry.waiters = entry.waiters + ones if entry.waiters else ones
                request.missing += 1
        if conflict:
            raise InitMismatch(conflict)
        self.requests.append(request)
        return request

    def _with(self, ranks: frozenset[int], rank: int) -> frozenset[int]:
        found = self._declarers.get((ranks, rank))
        if found is None:
            found = self._declarers[ranks, rank] = ranks | {rank}
        return found

    def take_conflicts(self) -> list[tuple[KeyRequest, str]]:
        """The requests that wait for a key about which workers disagree, each once; they are removed."""
        failed: dict[int, tuple[KeyRequest, str]] = {}
        for entry in self.entries.values():
            if entry.conflict:
                for request in entry.waiters:
                    failed.setdefault(id(request), (request, entry.conflict))
                entry.waiters = ()
        self.requests = [request for request in self.requests if id(request) not in failed]
        return list(failed.values())

    def take_agreed(self, members: Set[int], keys: Iterable[int | str] | None = None) -> list[Entry]:
        """The keys that every live worker has declared and that have no place yet, in their order.

        Args:
            members: the ranks of the live workers.
            keys: which of them to look at; None for all, in order of declaration.
        """
        homeless = self._homeless
        entries = homeless.values() if keys is None else [homeless[key] for key in keys if key in homeless]
        complete = {ranks for ranks in {entry.declared for entry in entries} if members <= ranks}
        agreed = [entry for entry in entries if entry.declared in complete and not entry.conflict]
        for entry in agreed:
            del self._homeless[entry.key]
        return agreed

    def mark_placed(self, entries: list[Entry]) -> None:
        """Every server knows of these keys now."""
        for entry in entries:
            entry.placed = True
            for request in entry.waiters:
                request.missing -= 1
            entry.waiters = ()

    def take_answerable(self) -> list[KeyRequest]:
        """The requests all of whose keys are placed; they are removed."""
        ready = [request for request in self.requests if request.missing == 0]
        self.requests = [request for request in self.requests if request.missing]
        return ready

    def placement(self, keys: tuple[int | str, ...]) -> Placement:
        """Where these keys live."""
        entries = [self.entries[key] for key in keys]
        return Placement(
            tuple([entry.first_slice for entry in entries]), tuple([entry.home for entry in entries]), self.slice_bytes
        )

    @property
    def tables(self) -> list[Entry]:
        """The keys that are tables of rows."""
        return [entry for entry in self.entries.values() if entry.form]

    def torn(self, keep: Keep, num_servers: int) -> list[int | str]:
        """The keys that have been placed otherwise than an optimizer needs that must have so much together."""
        return [key for key, one in self.entries.items() if one.is_torn(keep, num_servers, self.slice_bytes)]

    def waits(self, members: Set[int]) -> Iterator[tuple[int, int, Set[int]]]:
        """(rank, request, who has to declare one of its keys) of all who wait."""
        for request in self.requests:
            entries = [self.entries[key] for key in request.keys]
            declared = {entry.declared for entry in entries if not entry.placed}
            yield request.member.node.rank, request.request, {rank for some in declared for rank in members - some}

    def oldest_wait(self, members: Set[int]) -> tuple[KeyRequest, int | str, tuple[int, ...]] | None:
        """The request that has waited longest, one key it waits for, and who has not declared that."""
        for request in self.requests:
            for key in request.keys:
                entry = self.entries[key]
                if not entry.placed:
                    return request, key, tuple(sorted(members - entry.declared))
        return None


def _said(shape: tuple[int, ...], dtype: int, form: str) -> str:
    """What a worker declared, for people."""
    kind = "" if not form else ", as a table of rows" if form == ROWS else f", as a table of rows that begin as {form}"
    return f"shape {shape} and dtype {DType(dtype).label}{kind}"
