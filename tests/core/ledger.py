"""What servers count, as they count it: the truth that the simulation holds values against, and the rules of counting.

* The versions of a slice follow each other.
* Each push of a worker is counted at most once, and none before the pushes ahead of it.
* Nothing of a worker is counted once the server has said that it counts nothing more of it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from kvdist.core.server.server import Server
from kvdist.core.server.shard import StoredHolder
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
    newcomers_above: int = 0
    """The incarnations of those that were there from the start are not higher."""

    def keep_of(self, server: Server) -> None:
        """Keep the books of a server, too."""
        page = Page(self, lambda member: member in server.peers.lost)
        server.dense.ledger = server.sparse.ledger = page

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
        if step:
            assert member.incarnation > self.newcomers_above, f"the first pushes of {member} are not counted"
            assert step == version, f"push {step} of {member} is counted in version {version + 1}"
            assert self.since.setdefault(member, step) == step, f"{member} has joined in several steps"
        self.pushed[number, member] = step


@dataclass
class Page:
    """The books of one server."""

    books: Books
    is_lost: Callable[[Member], bool]

    def counted(self, holder: StoredHolder, contributions: Sequence[Any]) -> None:
        """A round has been closed."""
        counted = [(one.member, one.step) for one in contributions]
        for number in holder.ids.tolist():
            assert len(self.books.rounds[number]) == holder.round.version - 1, (
                "the versions of a slice follow each other"
            )
            for member, step in counted:
                assert not self.is_lost(member), f"{member} is counted after its loss was settled"
                if (number, member) not in self.books.pushed:
                    self.books.begin(number, member, step, holder.round.version - 1)
                before = self.books.pushed[number, member]
                assert step == before, f"push {step} of {member} is counted after {before} of them"
                self.books.pushed[number, member] += 1
            self.books.rounds[number].append(counted)

    def rolled_back(self, holder: StoredHolder) -> None:
        """A server was lost: what made later versions is undone, and will be pushed again."""
        version, books = holder.round.version, self.books
        books.since.clear()
        for number in holder.ids.tolist():
            assert len(books.rounds[number]) >= version, "nobody goes back to what has not been"
            del books.rounds[number][version:]
            books.undone[number] = min(version, books.undone.get(number, version))
            for place in [place for place in books.pushed if place[0] == number]:
                books.pushed[place] = version

    def refused(self, holder: StoredHolder, contributions: Sequence[Any], reason: str) -> None:
        """They count all the same."""

    def dropped(self, holder: StoredHolder, lost: Set[int]) -> None:
        """What is not counted never will be."""
