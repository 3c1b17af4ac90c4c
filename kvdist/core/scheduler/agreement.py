"""Agreement: members make statements on a subject, and all that ask get the same answer. Pure.

The quorum, the members whose statements are needed, is data: all live workers at a barrier, all servers for a command,
both for a checkpoint, only the first speaker if the first decides. Invariants:

* A repeated statement changes nothing. A member's newer statement replaces its older statement.
* Processes count, not ranks: a statement of an earlier incarnation does not count for the present incarnation.
* An agreement has a single answer. Members that ask later get the same.
* Only members that are still in the cluster are answered and awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeAlias, TypeVar

from kvdist.core import machine as fx
from kvdist.naming import waiting
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol import messages as msg

Statement = TypeVar("Statement")
Said = TypeVar("Said")

Live = Mapping[NodeId, Member]
"""Members in the cluster, by node id. `Membership` changes the mapping as they join and leave."""

Question: TypeAlias = (
    msg.Assign | msg.DropRestored | msg.Join | msg.Perform | msg.Prepare | msg.Restore
    | msg.SetOptimizer | msg.TakeRestored
)  # fmt: skip
"""A message of the scheduler to all servers; each of them answers."""

Answer = Callable[[int], msg.Message]
"""Number of a request → the answer to it."""


@dataclass(frozen=True, slots=True)
class MemberWait:
    """A member that waits for an answer.

    missing: members that must act first: workers, or else servers; empty while the scheduler itself is at work.
    subject: subject of the agreement, such as ``barrier 3``; '' if the deed is that of missing servers, too.
    deed: action of the missing workers, such as ``reach barrier 3``.
    who: description of the missing members, if their ranks are not known yet.
    """

    member: Member
    request: int
    since: float
    missing: tuple[NodeId, ...]
    subject: str
    deed: str
    who: str = ""

    @property
    def workers(self) -> tuple[int, ...]:
        """Ranks of the missing workers."""
        return tuple([node.rank for node in self.missing if node.role is Role.WORKER])

    def hint(self, now: float) -> fx.Send:
        """Return the message that tells the member for whom it waits."""
        who = "" if self.workers else f"{self.who or _names(self.missing)} to "
        waited = now - self.since
        return fx.Send(self.member, msg.Waiting(f"{who}{self._awaited_deed}", self.workers, waited, self.request))

    def sentence(self, now: float) -> str:
        """Explain who has to do what, and for how long the member has waited."""
        return waiting(now - self.since, self.who or _names(self.missing), self._awaited_deed)

    @property
    def _awaited_deed(self) -> str:
        return self.deed if self.workers or not self.subject else f"finish {self.subject}"


class Agreement(Generic[Statement]):
    """The statements of members on a subject, and the answer.

    Args:
        subject: the subject, such as ``barrier 3``.
        deed: action by which a worker takes part, such as ``reach barrier 3``.
        since: time at which the agreement began.
        askers: members that may ask for the answer.
        quorum: members whose statements are needed, group by group.
        joined_later: returns members of the quorum that take no part, because they joined later in the program.
    """

    def __init__(
        self,
        subject: str,
        deed: str,
        since: float,
        askers: Live,
        quorum: Sequence[Live] = (),
        joined_later: Callable[[], Set[Member]] = frozenset,
    ) -> None:
        self.subject = subject
        self.deed = deed
        self.since = since
        self.said: dict[NodeId, tuple[Member, Statement]] = {}
        """Node id → (member, its statement), in the order of the first statements."""
        self.waits_for: Agreement[str] | None = None
        """Agreement that must be complete next, after this agreement."""
        self.joined_later = joined_later
        self.unasked: set[Member] = set()
        """Members of the quorum that were not asked, so take no part."""
        self._askers = askers
        self._quorum = quorum
        self._asked: dict[tuple[Member, int], None] = {}
        """(member, request) of all members that wait for the answer."""
        self._answer: Answer | None = None

    @property
    def is_answered(self) -> bool:
        """Whether the answer is known."""
        return self._answer is not None

    @property
    def exempted(self) -> Set[Member]:
        """Members of the quorum that take no part."""
        return self.joined_later() | self.unasked

    @property
    def is_complete(self) -> bool:
        """Whether every member of the quorum that takes part has made its statement."""
        return len(self.said) + len(self.exempted) >= sum(map(len, self._quorum)) and not self.missing()

    def say(self, member: Member, statement: Statement) -> None:
        """Store the statement of a member."""
        self.said[member.node] = (member, statement)

    def has_heard(self, member: Member) -> bool:
        """Return whether this very process has made its statement."""
        return self.said.get(member.node, (None,))[0] == member

    def ask(self, member: Member, request: int) -> list[fx.Effect]:
        """Answer a request: now if the answer is known, else by `answer`."""
        if self._answer is not None:
            return [fx.Send(member, self._answer(request))]
        self._asked[member, request] = None
        return []

    def answer(self, answer: Answer) -> list[fx.Effect]:
        """Send the answer to all members that have asked, and keep it for later requests."""
        self._answer = answer
        asked, self._asked = self._asked, {}
        return [fx.Send(member, answer(request)) for member, request in asked if self._is_live(member)]

    def missing(self) -> tuple[NodeId, ...]:
        """Return the members without a statement, of the first group that is not complete."""
        for group in self._quorum:
            silent = [(node, member) for node, member in group.items() if not self.has_heard(member)]
            exempted = self.exempted if silent else ()
            missing = [node for node, member in silent if member not in exempted]
            if missing:
                return tuple(sorted(missing, key=lambda node: node.rank))
        return ()

    def disagreement(self, what: Callable[[Statement], Said]) -> list[tuple[int, Said]]:
        """Return the rank of each member and its part of the statement; empty if all are equal.

        Args:
            what: returns the part of a statement that must be equal.
        """
        said = [(node.rank, what(statement)) for node, (_, statement) in self.said.items()]
        return said if any(one[1] != said[0][1] for one in said) else []

    def waits(self) -> Iterator[MemberWait]:
        """Yield the waits of all members that wait for the answer."""
        if self._asked:
            missing = self.missing() or (self.waits_for.missing() if self.waits_for else ())
            for member, request in self._asked:
                if self._is_live(member):
                    yield MemberWait(member, request, self.since, missing, self.subject, self.deed)

    def validate(self) -> None:
        """Check every invariant."""
        assert not (self.is_answered and self._asked), "a member that has its answer does not wait for it"

    def _is_live(self, member: Member) -> bool:
        return self._askers.get(member.node) == member


class Questions:
    """Requests of the scheduler to all servers, with an agreement for each number of a request.

    Args:
        servers: the live servers.
    """

    def __init__(self, servers: Live) -> None:
        self._servers = servers
        self._open: dict[int, tuple[Agreement[str], Callable[[str], list[fx.Effect]] | None]] = {}
        self._asked: dict[int, Question] = {}
        """Number → open request, for a server that replaces a lost server."""
        self.next_request = 1

    def ask(
        self,
        message: Question,
        then: Callable[[str], list[fx.Effect]] | None = None,
        cause: Agreement[Any] | None = None,
    ) -> list[fx.Effect]:
        """Send a message to all servers.

        Args:
            message: the message; its number of the request is replaced.
            then: called when the last server has answered, with '' or with the first failure; may be None.
            cause: the agreement that waits for the answers.
        """
        request = self.next_request
        self.next_request += 1
        question: Agreement[str] = Agreement("", "", 0.0, {}, (self._servers,))
        if cause is not None:
            cause.waits_for = question
        self._open[request] = (question, then)
        asked = self._asked[request] = replace(message, request=request)
        servers = sorted(self._servers.values(), key=lambda server: server.node.rank)
        return [fx.Send(server, asked) for server in servers]

    def exempt(self, server: Member) -> None:
        """Exempt a server from all open requests, as it has joined after them."""
        for question, _ in self._open.values():
            question.unasked.add(server)

    def drop(self, question: Agreement[str] | None) -> None:
        """Drop the request with this agreement."""
        for request in [number for number, (one, _) in self._open.items() if one is question]:
            del self._open[request]
            self._asked.pop(request, None)

    def drop_all(self, kind: type[Question]) -> None:
        """Drop all requests by messages of a kind."""
        for request in [number for number, asked in self._asked.items() if isinstance(asked, kind)]:
            del self._open[request], self._asked[request]

    @property
    def unanswered(self) -> list[Question]:
        """Open requests, which a server that replaces a lost server must answer."""
        return list(self._asked.values())

    def answered(self, sender: Member, request: int, failure: str) -> list[fx.Effect]:
        """Store a server's answer: '' or its failure. Returns what follows if the last server has answered."""
        question, _ = self._open.get(request, (None, None))
        if question is None or question.has_heard(sender):
            return []
        question.say(sender, failure)
        return self._end(request)

    def advance(self) -> list[fx.Effect]:
        """Complete the requests for which only a server was missing that has left."""
        return [effect for request in list(self._open) for effect in self._end(request)]

    def _end(self, request: int) -> list[fx.Effect]:
        question, then = self._open[request]
        if not question.is_complete:
            return []
        del self._open[request]
        self._asked.pop(request, None)
        failure = next((failure for _, failure in question.said.values() if failure), "")
        return [] if then is None else then(failure)


def _names(nodes: Iterable[NodeId]) -> str:
    return ", ".join(map(str, nodes)) or "the scheduler"
