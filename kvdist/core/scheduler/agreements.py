"""What the workers of a cluster agree on, store by store: keys and their places, and the optimizer. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvdist.core.machine import Effect, Send
from kvdist.core.policy import POLICIES
from kvdist.core.scheduler.chosen import Description, Optimizer, choose, obstacle_to
from kvdist.core.scheduler.keybook import Entry, KeyBook
from kvdist.core.scheduler.membership import Seats
from kvdist.core.scheduler.servers_asked import ServersAsked, Then
from kvdist.core.sharding import Keep, Placer
from kvdist.core.worker.requests import KEYS_PER_MESSAGE
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch
from kvdist.nodes import Member
from kvdist.protocol.messages import (
    ROWS,
    Assign,
    Configure,
    Declare,
    Done,
    ErrorCode,
    Failed,
    Message,
    Placed,
    SetOptimizer,
)


class Agreements:
    """The keys and optimizers of all stores, as the scheduler knows them.

    Args:
        seats: who is in the cluster.
        placer: chooses where keys live.
        asked: what servers are asked.
    """

    def __init__(self, seats: Seats, placer: Placer, asked: ServersAsked) -> None:
        self.books: dict[int, KeyBook] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.placer = placer
        self._seats = seats
        self._asked = asked

    def declare(self, sender: Member, message: Declare, now: float) -> list[Effect]:
        """A worker is about to initialise keys."""
        if message.mode not in POLICIES:
            reason = f"this scheduler knows no policy {message.mode!r}, only {', '.join(POLICIES)}"
            return [Send(sender, Failed(message.request, ErrorCode.CONFIG, reason))]
        obstacle = obstacle_to(message, self.optimizers.get(message.store))
        if obstacle:
            return [Send(sender, Failed(message.request, ErrorCode.CONFIG, obstacle))]
        book = self.books.get(message.store)
        if book is None:
            book = self.books[message.store] = KeyBook(
                message.store, message.mode, sender, self.placer.slice_bytes_of(POLICIES[message.mode])
            )
        effects: list[Effect] = []
        try:
            book.declare(sender, message, now)
        except InitMismatch as error:
            effects.append(Send(sender, Failed(message.request, ErrorCode.INIT_MISMATCH, str(error))))
            effects += self._conflicts(book, ErrorCode.INIT_MISMATCH, but=(sender, message.request))
            return effects + self._advance(book, message.keys)
        return self._advance(book, message.keys)

    @staticmethod
    def _conflicts(book: KeyBook, code: ErrorCode, but: tuple[Member, int] | None = None) -> list[Effect]:
        """Tell those who wait for keys that cannot be, all but one who knows."""
        conflicts = [one for one in book.take_conflicts() if (one[0].member, one[0].request) != but]
        return [Send(request.member, Failed(request.request, code, reason)) for request, reason in conflicts]

    def advance_all(self) -> list[Effect]:
        """Fewer workers are awaited: place what is agreed now."""
        return [effect for book in self.books.values() for effect in self._advance(book)]

    def _advance(self, book: KeyBook, keys: Iterable[int | str] | None = None) -> list[Effect]:
        """Place what is agreed of these keys, or of all, and answer what is placed."""
        entries = book.take_agreed(self._seats.workers.keys(), keys)
        effects: list[Effect] = []
        for start in range(0, len(entries), KEYS_PER_MESSAGE):
            effects += self._place(book, entries[start : start + KEYS_PER_MESSAGE])
        for request in book.take_answerable():
            givers = tuple([book.entries[key].giver for key in request.keys])
            effects.append(Send(request.member, Placed(request.request, book.placement(request.keys), givers)))
        return effects

    def _place(self, book: KeyBook, entries: list[Entry]) -> list[Effect]:
        keys, shapes = [entry.key for entry in entries], [entry.shape for entry in entries]
        forms = [entry.form for entry in entries]
        dtypes = tuple([entry.dtype for entry in entries])
        itemsize_of = {code: DType(code).itemsize for code in set(dtypes)}
        optimizer = self.optimizers.get(book.store)
        keep = Keep.NOTHING if optimizer is None else optimizer.keep
        itemsizes = [itemsize_of[code] for code in dtypes]
        placement = self.placer.place(keys, shapes, itemsizes, keep, forms, book.slice_bytes)
        giver = min(self._seats.workers, default=0)  # rank 0, or who comes after it if that has left
        for entry, first, home in zip(entries, placement.first_slices, placement.homes, strict=True):
            entry.first_slice, entry.home, entry.giver = first, home, giver

        pulled_as = tuple([entry.pulled_as for entry in entries])
        columns = (tuple(keys), tuple(shapes), dtypes, pulled_as, tuple(forms))

        def placed(failure: str) -> list[Effect]:
            # Only a table can have failed; arrays of the same call are there.
            refused = [entry for entry in entries if failure and entry.form == ROWS]
            for entry in refused:
                entry.conflict = failure
            book.mark_placed([entry for entry in entries if entry not in refused] if refused else entries)
            conflicts = self._conflicts(book, ErrorCode.CONFIG) if refused else []
            return [*conflicts, *self._advance(book, ())]

        return self._ask(
            lambda request: Assign(request, book.store, book.mode, *columns, placement),
            placed,
        )

    def key_of(self, number: int) -> int | str:
        """The key that a slice belongs to, by the number of the slice."""
        entries = [entry for book in self.books.values() for entry in book.entries.values()]
        before = [entry for entry in entries if 0 <= entry.first_slice <= number]
        return max(before, key=lambda entry: entry.first_slice).key

    def configure(self, sender: Member, message: Configure) -> list[Effect]:
        """A worker chooses an optimizer."""
        present = self.optimizers.get(message.store)
        if present is None or present.failure:
            try:
                book = self.books.get(message.store)
                optimizer = choose(message, sender, book, self.placer.num_servers)
            except ValueError as error:
                return [Send(sender, Failed(message.request, ErrorCode.CONFIG, str(error)))]
            self.optimizers[message.store] = optimizer
            return self._ask(
                lambda request: SetOptimizer(request, message.store, message.description),
                lambda failure: self._configured(optimizer, failure),
            )
        if present.description != message.description:
            reason = (
                f"{present.chosen_by} set the optimizer of this store to {_shown(present.description)}, but {sender}"
                f" asks for {_shown(message.description)}: every worker must set the same one, and only once"
            )
            return [Send(sender, Failed(message.request, ErrorCode.OPTIMIZER_MISMATCH, reason))]
        if present.installed:
            return [Send(sender, Done(message.request))]
        present.waiters.append((sender, message.request))
        return []

    def _configured(self, optimizer: Optimizer, failure: str) -> list[Effect]:
        optimizer.installed = not failure
        optimizer.failure = failure
        answers: list[Effect] = []
        for member, request in optimizer.waiters:
            answer = Failed(request, ErrorCode.CONFIG, failure) if failure else Done(request)
            answers.append(Send(member, answer))
        optimizer.waiters = []
        return answers

    def _ask(self, make: Callable[[int], Message], then: Then) -> list[Effect]:
        return self._asked.ask(self._seats.servers, make, then)


def _shown(description: Description) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in description.items() if name != "name")
    return f"{description.get('name')}({options})"
