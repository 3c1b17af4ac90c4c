"""What servers count, as they count it: the truth that the simulation holds values against, and the rules of counting.

* The versions of a slice follow each other.
* Each push of a worker is counted at most once, and none before the pushes ahead of it.
* Nothing of a worker is counted once the server has said that it counts nothing more of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvdist.core.machine import Effect
from kvdist.core.server.checkpoints import Restoring
from kvdist.core.server.holder import Holder
from kvdist.core.server.replica import Copy, ReplicatedServer
from kvdist.core.server.server import Server
from kvdist.core.server.shard import LatePush
from kvdist.nodes import Member

Counted = list[tuple[Member, int]]
"""The contributions to one version: whose, and how many pushes it had made before."""


@dataclass
class Books:
    """All that has been counted on all servers.

    Attributes:
        rounds: slice → the contributions to its versions 1, 2, …
        pushed: (slice, worker) → how many of its pushes are counted, with those before it joined.
        since: a worker that has joined later → how many pushes the others had made by then.
    """

    since: dict[Member, int] = field(default_factory=dict)
    rounds: dict[int, list[Counted]] = field(default_factory=lambda: defaultdict(list))
    pushed: Counter[tuple[int, Member]] = field(default_factory=Counter)
    undone: dict[int, int] = field(default_factory=dict)
    """Slice → the version to which it went back, until somebody has noticed."""
    is_void: Callable[[Member], bool] = lambda member: False
    """Whether a server was given up: it may not know, and what it thinks does not matter."""
    has_gone_back: bool = False
    """Whether all went back to a snapshot: a worker that has rested may have pushed nothing before."""
    awaited: Sequence[int] | None = None
    """Where all wait for lost workers: rank → how many rounds it takes part in. Then each round has all of them."""
    may_rest: bool = False
    """Whether a worker may have nothing to push in rounds that wait for it."""
    newcomers_above: int = 0
    """The incarnations of those that were there from the start are not higher."""

    def keep_of(self, server: Server) -> None:
        """Keep the books of a server, too."""
        page: Page = Page(self, lambda member: member in server.peers.lost)
        if isinstance(server, ReplicatedServer):
            new_copy = server._new_copy

            def make() -> Copy:
                copy = new_copy()
                copy.shard.ledger = CopyPage(self, lambda member: member in copy.peers.lost, server)
                return copy

            server._new_copy, server.copy = make, make()  # type: ignore[assignment]
            server._restoring = Restoring((server.shard, server.copy.shard))
            page = PrimaryPage(self, page.is_lost, server)
        server.shard.ledger = page

    def version_with(self, number: int, rank: int, pushes: int) -> int | None:
        """The first version of a slice that has so many pushes of a worker; None if there is none yet."""
        if not pushes:
            return 0
        for version, counted in enumerate(self.rounds[number], 1):
            if any(member.node.rank == rank and step == pushes - 1 for member, step in counted):
                return version
        return None

    def has_in_part(self, rank: int) -> bool:
        """Whether a push of this worker is counted in some slices and not in others."""
        counts = Counter(dict.fromkeys(self.rounds, 0))
        for (number, member), pushes in self.pushed.items():
            counts[number] += pushes * (member.node.rank == rank)
        return len(set(counts.values())) > 1

    def begin(self, number: int, member: Member, step: int, version: int) -> None:
        """A worker is counted in a slice for the first time. It begins with the same step in all of them."""
        if step and self.awaited is not None:
            earlier = [one for of, one in self.pushed if of == number and one.node == member.node]
            before = max([self.pushed[number, one] for one in earlier], default=0)
            assert step == before, f"push {step} of {member} is counted after {before} of its rank"
        elif step:
            is_late = member.incarnation > self.newcomers_above or self.has_gone_back
            assert is_late, f"the first pushes of {member} are not counted"
            may_rest = step < version and self.may_rest
            assert step == version or may_rest, f"push {step} of {member} is counted in version {version + 1}"
            assert self.since.setdefault(member, step) == step, f"{member} has joined in several steps"
        self.pushed[number, member] = step


@dataclass
class Page:
    """The books of one server."""

    books: Books
    is_lost: Callable[[Member], bool]

    def round_closed(self, holder: Holder, contributions: Sequence[Any]) -> None:
        """A round has been closed."""
        counted = self._told(contributions)
        for number in holder.ids.tolist() if holder.store == 0 else ():  # others have versions of their own
            self.enter(number, holder.round.version, counted)

    def _told(self, contributions: Sequence[Any]) -> Counted:
        for one in contributions:
            assert not self.is_lost(one.member), f"{one.member} is counted after its loss was settled"
        return [(one.member, one.step) for one in contributions]

    def enter(self, number: int, version: int, counted: Counted) -> None:
        """A version of a slice is made of these."""
        assert len(self.books.rounds[number]) == version - 1, "the versions of a slice follow each other"
        if self.books.awaited is not None and version <= max(self.books.awaited):
            wanted = [(rank, version - 1) for rank, rounds in enumerate(self.books.awaited) if version <= rounds]
            found = [(member.node.rank, step) for member, step in counted]
            assert found == wanted, f"version {version} of slice {number} has {found}, undisturbed it has {wanted}"
        for member, step in counted:
            if (number, member) not in self.books.pushed:
                self.books.begin(number, member, step, version - 1)
            before = self.books.pushed[number, member]
            assert step == before, f"push {step} of {member} is counted after {before} of them"
            self.books.pushed[number, member] += 1
        self.books.rounds[number].append(counted)

    def rolled_back(self, holder: Holder) -> None:
        """A server was lost: what made later versions is undone, and will be pushed again."""
        version, books = holder.round.version, self.books
        books.has_gone_back = True
        books.since.clear()
        for number in holder.ids.tolist():
            assert len(books.rounds[number]) >= version, "nobody goes back to what has not been"
            del books.rounds[number][version:]
            books.undone[number] = min(version, books.undone.get(number, version))
            for place in [place for place in books.pushed if place[0] == number]:
                books.pushed[place] = version

    def refused(self, holder: Holder, contributions: Sequence[Any], reason: str) -> None:
        """They count all the same."""

    def dropped(self, holder: Holder, lost: Mapping[int, Member]) -> None:
        """What is not counted never will be."""

    def fenced(self, member: Member, message: LatePush, holder: Callable[[int], Holder | None]) -> None:
        """Nor will this."""


@dataclass
class CopyPage(Page):
    """The book of what a server has copies of."""

    server: ReplicatedServer

    def round_closed(self, holder: Holder, contributions: Sequence[Any]) -> None:
        """A round has been closed elsewhere."""
        if not self.books.is_void(self.server.me):
            super().round_closed(holder, contributions)


@dataclass
class PrimaryPage(Page):
    """The book of a server whose slices have a copy: what only it knows is not true yet, and may never be."""

    server: ReplicatedServer
    own: dict[int, list[Counted]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        go_on = self.server._go_on_alone

        def alone() -> list[Effect]:
            for number in self.own:
                self._tell(number)
            return go_on()

        self.server._go_on_alone = alone  # type: ignore[method-assign]

    def round_closed(self, holder: Holder, contributions: Sequence[Any]) -> None:
        """A round has been closed."""
        if self.books.is_void(self.server.me):
            return
        counted = self._told(contributions)
        for number in holder.ids.tolist():
            if number not in self.own:  # it may be taken over
                self.own[number] = list(self.books.rounds[number])
            self.own[number].append(counted)
            if self.server.shard.is_alone(number):
                self._tell(number)

    def _tell(self, number: int) -> None:
        """This server alone decides now."""
        known = self.books.rounds[number]
        assert self.own[number][: len(known)] == known, "a copy has what its server has"
        for version in range(len(known), len(self.own[number])):
            self.enter(number, version + 1, self.own[number][version])
