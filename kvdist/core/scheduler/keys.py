"""Agreements of the workers for each store: keys and their places, and the optimizer. Pure.

A key goes through three states: *declared* by some workers, *agreed* when every live worker has declared it alike,
*placed* when every server knows it. A worker's request for a list of keys is answered when its last key is placed.
Keys and workers may be many, so a key has a bit of an integer for each worker that has declared it.

The first worker that sets an optimizer decides for the store; the others must set the same.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import groupby
from operator import attrgetter, or_

from kvdist.checkpoint.snapshot import SavedKey
from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.policy import MODES
from kvdist.core.scheduler.agreement import Agreement, MemberWait, Questions
from kvdist.core.scheduler.membership import Membership
from kvdist.core.server.table_rows import obstacle
from kvdist.core.sharding import Keep, Placer, cut, keep_for, row_length
from kvdist.core.worker import requests as req
from kvdist.dtypes import DType
from kvdist.naming import minority_first, name_of
from kvdist.nodes import Member, NodeId, worker
from kvdist.optimizer.registry import from_description
from kvdist.protocol import messages as msg

DISPUTE_S = 1.0
"""Time for which a key with different declarations waits for the others, so that the error names the minority."""

ALIKE = "every worker must build the same model: a key has the same shape and dtype on all"
"""Advice if workers have declared a key differently."""
REFUSED = (
    "This process was refused, and nothing was changed: start it with the program of the others, or start the whole job"
    " again"
)

Description = dict[str, str | int | float | bool | None]

Declared = tuple[tuple[int, ...], int, int, str]
"""Declaration of a key by a worker: shape, dtype, dtype of pulled values, initial values of rows."""


@dataclass(slots=True, eq=False)
class KeyRequest:
    """A worker's request for a list of keys, which waits for their places."""

    member: Member
    request: int
    keys: tuple[int | str, ...]
    missing: int
    """Number of the keys that are not placed yet."""
    since: float


@dataclass(slots=True, eq=False)
class DeclaredKey:
    """A declared key, its place and its conflicts."""

    key: int | str
    shape: tuple[int, ...]
    dtype: int
    first: Member
    """Worker that declared the key first; the others must agree."""
    pulled_as: int
    """Dtype of pulled values."""
    form: str
    """Initial values of rows, if the key is a table of rows; else ''."""
    pushes: int
    """Number of pushes before its declaration: workers that join later in the program need not declare it."""
    declared: int = 0
    """A bit for each rank that has declared the key."""
    exempted: frozenset[Member] = frozenset()
    """Members that had joined later when the key got its place: its rounds do not wait for them yet."""
    home: int = -1
    init_rank: int = 0
    """Rank of the worker that sends the first value."""
    first_slice: int = -1
    placed: bool = False
    conflict: str = ""
    """Error that every worker gets after a disagreement; '' without."""
    waiters: list[KeyRequest] = field(default_factory=list)

    @property
    def said(self) -> Declared:
        """Declaration of the first worker."""
        return self.shape, self.dtype, self.pulled_as, self.form

    def dispute(self, otherwise: Mapping[int, Declared]) -> str:
        """Describe the different declarations, for people; `otherwise` has those that differ from the first by rank."""
        ranks = [rank for rank in range(self.declared.bit_length()) if self.declared >> rank & 1]
        groups = minority_first((rank, otherwise.get(rank, self.said)) for rank in ranks)
        shapes, dtypes, _, forms = (len(set(column)) > 1 for column in zip(*(said for _, said in groups), strict=True))
        if not (shapes or dtypes or forms):
            said = ", but as ".join(f"{DType(said[2]).label} to {who}" for who, said in groups)
            return f"the values of {name_of(self.key)} come back as {said}; every worker must set the same compression"
        clauses: list[str] = []
        for who, (shape, dtype, _, form) in groups:
            verb = "" if clauses else f" {'declare' if ' ' in who else 'declares'} {name_of(self.key)}"
            told = [f"shape {shape}"] * (shapes or forms) + [f"dtype {DType(dtype).label}"] * (dtypes or forms)
            clauses.append(f"{who}{verb} with {' and '.join(told)}{_kind(form) if forms else ''}")
        return f"{'; '.join(clauses)}; {ALIKE}"

    def is_split(self, keep: Keep, num_servers: int, slice_bytes: int) -> bool:
        """Return whether the key has been cut where an optimizer needs it together, by `keep`."""
        if keep is Keep.NOTHING or self.first_slice < 0 or self.form:
            return False
        row = row_length(self.shape)
        where = (self.home, num_servers, self.first_slice, slice_bytes, row)
        slices = cut(math.prod(self.shape), DType(self.dtype).itemsize, *where)
        if keep is Keep.WHOLE:
            return len({piece.server for piece in slices}) > 1
        return any(piece.start % row for piece in slices)


@dataclass(slots=True, eq=False)
class InstalledOptimizer:
    """The optimizer of a store, and the agreement of the servers to install it."""

    description: Description
    chosen_by: Member
    keep: Keep
    """Parts of a key that must stay together for the optimizer."""
    agreement: Agreement[str]
    failure: str = ""


@dataclass(slots=True, eq=False)
class StoreKeys:
    """All keys of a store."""

    store: int
    mode: str
    opener: Member
    """Worker that used the store first."""
    slice_bytes: int
    joined_later: Callable[[int], Set[Member]]
    """See `Membership.joined_later`."""
    entries: dict[int | str, DeclaredKey] = field(default_factory=dict)
    requests: dict[KeyRequest, None] = field(default_factory=dict)
    """Requests without an answer, in their order."""
    due: float = fx.NEVER
    """Time at which `give_up_disputed` stops waiting for further workers."""
    _disputed: dict[int | str, dict[int, Declared]] = field(default_factory=dict)
    """Key → rank → declaration that differs from the first worker's."""
    _unplaced: dict[int | str, DeclaredKey] = field(default_factory=dict)
    """Entries for which no place was chosen yet."""
    changes: int = 0
    """Number of times that keys have got their places or an error."""
    _ready: list[KeyRequest] = field(default_factory=list)
    """Requests whose keys are all placed."""

    def declare(self, sender: Member, message: msg.Declare, now: float) -> str:
        """Record the keys that a worker is about to initialise.

        Args:
            sender: the worker.
            message: its declaration.
            now: the time.

        Returns:
            The reason why it cannot, or ''. Other requests that wait for such a key fail, too: see `take_conflicts`.
        """
        conflict, rank, entries = "", sender.node.rank, []
        columns = (message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms)
        for key, shape, dtype, pulled_as, form in zip(*columns, strict=True):
            entry = self.entries.get(key)
            if entry is None:
                entry = self.entries[key] = self._unplaced[key] = DeclaredKey(
                    key, shape, dtype, sender, pulled_as, form, message.pushes
                )
            elif entry.placed and entry.said != (shape, dtype, pulled_as, form):
                conflict = conflict or _another_model(entry, (shape, dtype, pulled_as, form))
            elif not entry.conflict and entry.said != (shape, dtype, pulled_as, form):
                self._disputed.setdefault(key, {})[rank] = shape, dtype, pulled_as, form
                self.due = min(self.due, now + DISPUTE_S)
            if message.mode != self.mode:
                entry.conflict = self._other_type(sender, message)
            conflict = conflict or entry.conflict
            entry.declared |= 1 << rank
            entries.append(entry)
        if not conflict:
            self._enter(KeyRequest(sender, message.request, message.keys, 0, now), entries)
        return conflict

    def misfit(self, sender: Member, message: msg.Declare) -> str:
        """Return why a worker's declaration contradicts keys with places; '' if it does not."""
        columns = (message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms)
        for key, shape, dtype, pulled_as, form in zip(*columns, strict=True):
            entry = self.entries.get(key)
            if entry is None or not entry.placed:
                continue
            if message.mode != self.mode:
                return f"{self._other_type(sender, message)}. {REFUSED}"
            if entry.said != (shape, dtype, pulled_as, form):
                return _another_model(entry, (shape, dtype, pulled_as, form))
        return ""

    def _other_type(self, sender: Member, message: msg.Declare) -> str:
        return (
            f"store {message.store} is {self.mode} on {self.opener} and {message.mode} on {sender}: every worker must"
            " create its stores in the same order and with the same types"
        )

    def give_up_disputed(self, live: Set[int], now: float) -> bool:
        """Fail keys with different declarations, once all have declared or at `due`. Returns whether there were any."""
        if not self._disputed:
            return False
        lacks = self._lacks(live)
        given_up = [key for key in self._disputed if now >= self.due or not lacks(self.entries[key])]
        for key in given_up:
            entry, otherwise = self.entries[key], self._disputed.pop(key)
            entry.conflict = entry.conflict or entry.dispute(otherwise)
        if not self._disputed:
            self.due = fx.NEVER
        return bool(given_up)

    def _enter(self, request: KeyRequest, entries: Sequence[DeclaredKey]) -> None:
        for entry in entries:
            if not entry.placed:
                entry.waiters.append(request)
                request.missing += 1
        self.requests[request] = None
        if not request.missing:
            self._ready.append(request)

    def _lacks(self, live: Set[int]) -> Callable[[DeclaredKey], int]:
        """Return a function of a key: the live workers that must still declare it, a bit for each."""
        awaited, later = _bits(live), dict[int, int]()

        def lacks(entry: DeclaredKey) -> int:
            pushes = entry.pushes
            if pushes not in later:
                later[pushes] = _bits(member.node.rank for member in self.joined_later(pushes))
            return awaited & ~(entry.declared | later[pushes])

        return lacks

    def take_conflicts(self) -> list[tuple[KeyRequest, str]]:
        """Remove and return the requests that wait for a key with a conflict, each once."""
        self.changes += 1
        failed: dict[KeyRequest, str] = {}
        for entry in self.entries.values():
            if entry.conflict:
                for request in entry.waiters:
                    failed.setdefault(request, entry.conflict)
                entry.waiters = []
        for request in failed:
            self.requests.pop(request, None)
        return list(failed.items())

    def take_agreed(self, live: Set[int], keys: Iterable[int | str] | None = None) -> list[DeclaredKey]:
        """Remove and return the unplaced, undisputed keys that every live worker has declared, but for late workers.

        Args:
            live: ranks of the live workers.
            keys: keys to check, in the order of the result; None for all, in order of declaration.
        """
        unplaced = self._unplaced
        entries = unplaced.values() if keys is None else [unplaced[key] for key in keys if key in unplaced]
        lacks, disputed = self._lacks(live), self._disputed
        agreed = [one for one in entries if not (one.conflict or lacks(one) or one.key in disputed)]
        for entry in agreed:
            del self._unplaced[entry.key]
        return agreed

    def mark_placed(self, entries: Iterable[DeclaredKey]) -> None:
        """Record that every server knows these keys."""
        self.changes += 1
        for entry in entries:
            entry.placed = True
            for request in entry.waiters:
                request.missing -= 1
                if not request.missing:
                    self._ready.append(request)
            entry.waiters = []

    def take_answers(self) -> list[fx.Effect]:
        """Remove the requests whose keys are all placed, and return their answers."""
        ready, self._ready = [request for request in self._ready if request in self.requests], []
        for request in ready:
            del self.requests[request]
        return [fx.Send(request.member, self._answer(request)) for request in ready]

    def _answer(self, request: KeyRequest) -> msg.Placed:
        entries = [self.entries[key] for key in request.keys]
        placement = msg.Placement(
            tuple([entry.first_slice for entry in entries]), tuple([entry.home for entry in entries]), self.slice_bytes
        )
        givers = [msg.LATER if self.leaves_out(request.member, entry) else entry.init_rank for entry in entries]
        return msg.Placed(request.request, placement, tuple(givers))

    def leaves_out(self, member: Member, entry: DeclaredKey) -> bool:
        """Return whether rounds of a key have begun without this member."""
        return member in entry.exempted and MODES[self.mode].is_lockstep

    def waits(self, live: Set[int]) -> Iterator[MemberWait]:
        """Yield the waits for keys, with the workers that must still declare them."""
        lacks = self._lacks(live)
        found: dict[tuple[int | str, ...], tuple[tuple[NodeId, ...], int | str]] = {}
        for request in self.requests:
            if request.keys not in found:  # most workers ask for the same keys
                entries = [entry for key in request.keys if not (entry := self.entries[key]).placed]
                missing = 0
                for entry in entries:
                    missing |= lacks(entry)
                ranks = [rank for rank in sorted(live) if missing >> rank & 1]
                found[request.keys] = (tuple(map(worker, ranks)), entries[0].key)
            nodes, key = found[request.keys]
            subject, deed = f"the declaration of {name_of(key)}", f"initialise {name_of(key)}"
            yield MemberWait(request.member, request.request, request.since, nodes, subject, deed)


class Keys:
    """The keys and optimizers of all stores, as the scheduler knows them.

    Args:
        membership: members of the cluster.
        placer: chooses places for keys.
        questions: requests to servers.
        limits: sizes of slices.
    """

    def __init__(self, membership: Membership, placer: Placer, questions: Questions, limits: Limits) -> None:
        self.stores: dict[int, StoreKeys] = {}
        self.optimizers: dict[int, InstalledOptimizer] = {}
        self._membership = membership
        self._placer = placer
        self._questions = questions
        self._limits = limits
        self._by_slice: list[DeclaredKey] = []
        """All keys with slices, in order of the slices' numbers."""

    def declare(self, sender: Member, message: msg.Declare, now: float) -> list[fx.Effect]:
        """Handle the declaration of keys that a worker is about to initialise."""
        if message.mode not in MODES:
            reason = f"this scheduler knows no policy {message.mode!r}, only {', '.join(MODES)}"
            return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, reason))]
        reason = _cannot_update(self.optimizers.get(message.store), message)
        if reason:
            return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, reason))]
        store = self.stores.get(message.store)
        if store is None:
            slice_bytes = MODES[message.mode].slice_bytes(self._limits)
            own = (message.store, message.mode, sender, slice_bytes, self._membership.joined_later)
            store = self.stores[message.store] = StoreKeys(*own)
        effects: list[fx.Effect] = []
        conflict = store.declare(sender, message, now)
        if conflict:
            effects.append(fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.INIT_MISMATCH, conflict)))
        if store.give_up_disputed(_ranks(self._membership.awaited), now) or conflict:
            effects += _refuse(store, msg.ErrorCode.INIT_MISMATCH)
        return effects + self._advance(store, message.keys)

    @property
    def is_lockstep(self) -> bool:
        """Whether in every store each version has a contribution of every worker."""
        return all(MODES[store.mode].is_lockstep for store in self.stores.values())

    @property
    def due(self) -> float:
        """Time at which `advance_all` has work to do, whatever workers declare."""
        return min([store.due for store in self.stores.values()], default=fx.NEVER)

    def advance_all(self, now: float) -> list[fx.Effect]:
        """Place agreed keys and refuse disputed keys, after the awaited workers have become fewer or `due` has come."""
        effects: list[fx.Effect] = []
        for store in self.stores.values():
            if store.give_up_disputed(_ranks(self._membership.awaited), now):
                effects += _refuse(store, msg.ErrorCode.INIT_MISMATCH)
            effects += self._advance(store)
        return effects

    def _advance(self, store: StoreKeys, keys: Iterable[int | str] | None = None) -> list[fx.Effect]:
        """Place the agreed keys among `keys`, or among all, and answer requests whose keys are placed."""
        entries = store.take_agreed(_ranks(self._membership.awaited), keys)
        effects: list[fx.Effect] = []
        for _, group in groupby(entries, lambda entry: entry.pushes):
            alike = list(group)
            for start in range(0, len(alike), req.KEYS_PER_MESSAGE):
                effects += self._place(store, alike[start : start + req.KEYS_PER_MESSAGE])
        return effects + store.take_answers()

    def _place(self, store: StoreKeys, entries: list[DeclaredKey]) -> list[fx.Effect]:
        keys, shapes = [entry.key for entry in entries], [entry.shape for entry in entries]
        forms = [entry.form for entry in entries]
        dtypes = [entry.dtype for entry in entries]
        itemsize_of = {code: DType(code).itemsize for code in set(dtypes)}
        optimizer = self.optimizers.get(store.store)
        keep = Keep.NOTHING if optimizer is None else optimizer.keep
        itemsizes = [itemsize_of[code] for code in dtypes]
        placement = self._placer.place(keys, shapes, itemsizes, keep, forms, store.slice_bytes)
        for entry, first, home in zip(entries, placement.first_slices, placement.homes, strict=True):
            entry.first_slice, entry.home = first, home
        self._enter_slices(entries)
        return self._assign(store, entries, placement)

    def _assign(self, store: StoreKeys, entries: list[DeclaredKey], placement: msg.Placement) -> list[fx.Effect]:
        """Send keys with their places to the servers. The lowest rank that is not exempted gives first values."""
        there = self._membership.awaited or self._membership.newcomers
        exempted = self._membership.joined_later(entries[0].pushes) & {*self._membership.members.values()}
        for entry in entries:
            entry.exempted = frozenset(exempted)
        givers = _ranks(there) - _ranks(member.node for member in exempted)
        giver = min(givers or _ranks(there), default=0)
        later = tuple(sorted(one.node.rank for one in exempted if store.leaves_out(one, entries[0])))
        keys, said = tuple([entry.key for entry in entries]), [entry.said for entry in entries]
        shapes, dtypes, pulled_as, forms = zip(*said, strict=True)
        columns = (keys, shapes, dtypes, pulled_as, forms)
        message = msg.Assign(0, store.store, store.mode, *columns, placement, giver, later)
        return self._questions.ask(message, partial(self._placed, store, entries, placement, giver))

    def _placed(
        self, store: StoreKeys, entries: list[DeclaredKey], placement: msg.Placement, giver: int, failure: str
    ) -> list[fx.Effect]:
        """Mark keys as placed, as all servers know them; or fail keys that a server has refused."""
        live = _ranks(self._membership.awaited or self._membership.newcomers)
        if live and giver not in live:
            return self._assign(store, entries, placement)  # the chosen worker has left before others knew of it
        for entry in entries:
            entry.init_rank = giver
        # If no key comes too late, only a table can have failed; arrays of the same call are placed.
        refused = [entry for entry in entries if failure and (entry.form == msg.ROWS or self._membership.awaits_return)]
        for entry in refused:
            entry.conflict = failure
        store.mark_placed([entry for entry in entries if entry not in refused] if refused else entries)
        conflicts = _refuse(store, msg.ErrorCode.CONFIG) if refused else []
        return [*conflicts, *self._advance(store, ())]

    def told(self) -> list[msg.Assign | msg.SetOptimizer]:
        """Return the messages about keys and optimizers, for a server that replaces a lost server."""
        told: list[msg.Assign | msg.SetOptimizer] = [
            msg.SetOptimizer(0, store, one.description) for store, one in self.optimizers.items() if not one.failure
        ]
        for store in self.stores.values():
            placed = [entry for entry in store.entries.values() if entry.placed]
            for start in range(0, len(placed), req.KEYS_PER_MESSAGE):
                some = placed[start : start + req.KEYS_PER_MESSAGE]
                shapes, dtypes, pulled_as, forms = zip(*[entry.said for entry in some], strict=True)
                columns = (tuple([entry.key for entry in some]), shapes, dtypes, pulled_as, forms)
                firsts, homes = ([entry.first_slice for entry in some], [entry.home for entry in some])
                placement = msg.Placement(tuple(firsts), tuple(homes), store.slice_bytes)
                told.append(msg.Assign(0, store.store, store.mode, *columns, placement, some[0].init_rank))
        return told

    def saved(self, store: int) -> tuple[SavedKey, ...]:
        """Return the placed keys of a store, as checkpoints name them."""
        keys = self.stores.get(store)
        entries = () if keys is None else keys.entries.values()
        return tuple(SavedKey(one.key, one.shape, DType(one.dtype).label, one.form) for one in entries if one.placed)

    def misfit(self, sender: Member, message: msg.Declare) -> str:
        """Return why a newcomer's declaration contradicts keys with places; '' if it does not."""
        store = self.stores.get(message.store)
        return "" if store is None else store.misfit(sender, message)

    def is_decided(self, store: int, key: int | str) -> bool:
        """Return whether a key has its place, or an error."""
        keys = self.stores.get(store)
        entry = None if keys is None else keys.entries.get(key)
        return entry is not None and (entry.placed or bool(entry.conflict))

    @property
    def changes(self) -> int:
        """Number of times that keys have got their places or an error, or a store its first optimizer."""
        return len(self.optimizers) + sum(store.changes for store in self.stores.values())

    def exempt_nobody(self) -> None:
        """Let rounds of all keys wait for all workers, which stand at the same step."""
        for store in self.stores.values():
            for entry in store.entries.values():
                entry.exempted = frozenset()

    def key_of(self, number: int) -> int | str:
        """Return the key of a slice, by the number of the slice."""
        return self._entry_of(number).key

    def giver_of(self, number: int) -> int | None:
        """Return the rank that must send the first value of a slice; None if its key has no place yet."""
        entry = self._entry_of(number)
        return entry.init_rank if entry.placed else None

    def _enter_slices(self, entries: Iterable[DeclaredKey]) -> None:
        for entry in entries:
            insort_right(self._by_slice, entry, key=_first_slice)

    def _entry_of(self, number: int) -> DeclaredKey:
        return self._by_slice[bisect_right(self._by_slice, number, key=_first_slice) - 1]

    def configure(self, sender: Member, message: msg.Configure, now: float) -> list[fx.Effect]:
        """Handle a worker's choice of an optimizer."""
        present = self.optimizers.get(message.store)
        if present is None or present.failure:
            try:
                present = self._choose(sender, message, now)
            except ValueError as error:
                return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, str(error)))]
            return [*present.agreement.ask(sender, message.request), *self._install(message.store, present)]
        if present.description != message.description:
            first, second = _difference(present.description, message.description)
            reason = (
                f"{present.chosen_by} set the optimizer of this store to {first}, but {sender} asks for {second}: every"
                " worker must set the same optimizer, with equal numbers, and only once"
            )
            return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.OPTIMIZER_MISMATCH, reason))]
        return present.agreement.ask(sender, message.request)

    def _choose(self, sender: Member, message: msg.Configure, now: float) -> InstalledOptimizer:
        """Create the optimizer that the first worker asks for.

        Raises:
            ValueError: the optimizer is unknown, a key that it needs together has been split, or it cannot update a
                table of rows of the store.
        """
        optimizer = from_description(message.description)
        store = self.stores.get(message.store)
        entries = () if store is None else store.entries.values()
        for entry in entries:
            reason = obstacle(optimizer, entry.key, entry.shape, entry.form != msg.ROWS) if entry.form else None
            if reason:
                raise ValueError(reason)
        keep, slice_bytes = keep_for(optimizer), 0 if store is None else store.slice_bytes
        split = [entry.key for entry in entries if entry.is_split(keep, self._placer.num_servers, slice_bytes)]
        if split:
            whole = "live whole on one server" if keep is Keep.WHOLE else "be cut between rows"
            raise ValueError(
                f"the parameters of {message.description['name']} must {whole}, and {name_of(split[0])} was initialised"
                " before: call set_optimizer before init"
            )
        subject, membership = f"the optimizer of store {message.store}", self._membership
        agreement: Agreement[str] = Agreement(subject, "", now, membership.awaited)
        return InstalledOptimizer(message.description, sender, keep, agreement)

    def _install(self, store: int, optimizer: InstalledOptimizer) -> list[fx.Effect]:
        self.optimizers[store] = optimizer
        message = msg.SetOptimizer(0, store, optimizer.description)
        return self._questions.ask(message, partial(self._installed, optimizer), optimizer.agreement)

    @staticmethod
    def _installed(optimizer: InstalledOptimizer, failure: str) -> list[fx.Effect]:
        optimizer.failure = failure
        failed = partial(msg.Failed, code=msg.ErrorCode.CONFIG, reason=failure)
        return optimizer.agreement.answer(failed if failure else msg.Done)

    def waits(self) -> Iterator[MemberWait]:
        """Yield all waits for keys and optimizers."""
        live = _ranks(self._membership.awaited)
        for store in self.stores.values():
            yield from store.waits(live)
        for optimizer in self.optimizers.values():
            yield from optimizer.agreement.waits()


def _ranks(nodes: Iterable[NodeId]) -> set[int]:
    return {node.rank for node in nodes}


def _bits(ranks: Iterable[int]) -> int:
    """Return an integer with a bit for each of these ranks."""
    return reduce(or_, (1 << rank for rank in ranks), 0)


_first_slice: Callable[[DeclaredKey], int] = attrgetter("first_slice")


def _refuse(store: StoreKeys, code: msg.ErrorCode) -> list[fx.Effect]:
    """Fail the requests that wait for keys on which workers disagree."""
    return [fx.Send(one.member, msg.Failed(one.request, code, reason)) for one, reason in store.take_conflicts()]


def _cannot_update(chosen: InstalledOptimizer | None, message: msg.Declare) -> str:
    """Return why the optimizer of a store cannot update a table of rows among these keys; '' if it can."""
    if chosen is None or not any(message.forms):
        return ""
    optimizer = from_description(chosen.description)
    for key, shape, form in zip(message.keys, message.shapes, message.forms, strict=True):
        reason = obstacle(optimizer, key, shape, form != msg.ROWS) if form else None
        if reason:
            return reason
    return ""


def _kind(form: str) -> str:
    """Describe a table of rows by its initial values; '' for an array."""
    return (
        "" if not form else ", as a table of rows" if form == msg.ROWS else f", as a table of rows that begin as {form}"
    )


def _another_model(entry: DeclaredKey, said: Declared) -> str:
    """Explain that a worker's declaration of a key contradicts the agreed declaration."""
    own, theirs = (
        f"shape {shape}, dtype {DType(dtype).label}, values in {DType(pulled_as).label}{_kind(form)}"
        for shape, dtype, pulled_as, form in (said, entry.said)
    )
    return (
        f"this worker declares {name_of(entry.key)} with {own}, and the cluster has it with {theirs}: it runs another"
        f" model. {REFUSED}"
    )


def _difference(one: Description, other: Description) -> tuple[str, str]:
    """Describe two optimizers: by name; or, if the names are equal, by the hyperparameters that differ."""
    names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if one.get("name") != other.get("name"):
        return str(one.get("name")), str(other.get("name"))
    shown = [", ".join(f"{name}={of[name]!r}" for name in names if name in of) for of in (one, other)]
    return f"{one.get('name')} with {shown[0]}", f"{other.get('name')} with {shown[1]}"
