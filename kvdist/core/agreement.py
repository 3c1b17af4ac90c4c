"""Agreement: members say something about one subject, and all that asked get one answer. Pure.

Whose word is needed, the quorum, is data: all live workers at a barrier, all servers for a command, both for a
checkpoint, only the first speaker where the first one decides. Invariants:

* Saying the same again changes nothing. A member's newer statement replaces its older one.
* A process counts, not its rank: what an earlier incarnation said does not count for the present one.
* There is one answer. Members that ask after it was given get the same.
* Only members that are still in the cluster are answered and waited for.
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
"""Members that are in the cluster. `Membership` changes it as they come and go."""

Question: TypeAlias = (
    msg.Assign | msg.Cut | msg.DropRestored | msg.FindCut | msg.Perform | msg.Prepare | msg.Rest | msg.Restore
    | msg.RollBack | msg.SetOptimizer | msg.TakeRestored
)  # fmt: skip
"""What the scheduler sends to all servers, each of which answers."""

Answer = Callable[[int], msg.Message]
"""Makes the answer to the request of that number."""


@dataclass(frozen=True, slots=True)
class MemberWait:
    """A member that waits for an answer.

    missing: who has to act first: workers, or else servers; empty while the scheduler itself is at work.
    subject: what is waited for, such as ``barrier 3``; '' if the deed is that of missing servers, too.
    deed: what the missing workers have to do, such as ``reach barrier 3``.
    who: who is missing, in words, where it is not known which ranks these will have.
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
        """The ranks of the missing workers."""
        return tuple([node.rank for node in self.missing if node.role is Role.WORKER])

    def hint(self, now: float) -> fx.Send:
        """The message that tells the member for whom it waits."""
        who = "" if self.workers else f"{self.who or _names(self.missing)} to "
        return fx.Send(self.member, msg.Waiting(f"{who}{self._awaited_deed}", self.workers, now - self.since))

    def sentence(self, now: float) -> str:
        """Who has to do what, for how long."""
        return waiting(now - self.since, self.who or _names(self.missing), self._awaited_deed)

    @property
    def _awaited_deed(self) -> str:
        return self.deed if self.workers or not self.subject else f"finish {self.subject}"


class Agreement(Generic[Statement]):
    """What members say about one subject.

    Args:
        subject: what it is about, such as ``barrier 3``.
        deed: what a worker does to take part, such as ``reach barrier 3``.
        since: when it began.
        askers: who may ask for its answer.
        quorum: whose word is needed, group by group.
        joined_later: returns those of the quorum that take no part, because they have joined later in the program.
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
        """In the order in which they spoke first."""
        self.waits_for: Agreement[str] | None = None
        """What has to be agreed next, once this is complete."""
        self.joined_later = joined_later
        self.unasked: set[Member] = set()
        """Other members of the quorum that take no part."""
        self._askers = askers
        self._quorum = quorum
        self._asked: dict[tuple[Member, int], None] = {}
        """(member, request) of all that wait for the answer."""
        self._answer: Answer | None = None

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer."""
        return self._answer is not None

    @property
    def exempted(self) -> Set[Member]:
        """The members of the quorum that take no part."""
        return self.joined_later() | self.unasked

    @property
    def is_complete(self) -> bool:
        """Whether every member of the quorum that takes part has spoken."""
        return len(self.said) + len(self.exempted) >= sum(map(len, self._quorum)) and not self.missing()

    def say(self, member: Member, statement: Statement) -> None:
        """Note what a member says."""
        self.said[member.node] = (member, statement)

    def has_heard(self, member: Member) -> bool:
        """Whether this very process has spoken."""
        return self.said.get(member.node, (None,))[0] == member

    def ask(self, member: Member, request: int) -> list[fx.Effect]:
        """Answer a request: now, if there is an answer, else by `answer`."""
        if self._answer is not None:
            return [fx.Send(member, self._answer(request))]
        self._asked[member, request] = None
        return []

    def answer(self, answer: Answer) -> list[fx.Effect]:
        """Give this answer to all members that have asked, and to those that will."""
        self._answer = answer
        asked, self._asked = self._asked, {}
        return [fx.Send(member, answer(request)) for member, request in asked if self._is_live(member)]

    def missing(self) -> tuple[NodeId, ...]:
        """The members whose word is needed and not given, of the first group that lacks one."""
        for group in self._quorum:
            silent = [(node, member) for node, member in group.items() if not self.has_heard(member)]
            exempted = self.exempted if silent else ()
            missing = [node for node, member in silent if member not in exempted]
            if missing:
                return tuple(sorted(missing, key=lambda node: node.rank))
        return ()

    def disagreement(self, what: Callable[[Statement], Said]) -> list[tuple[int, Said]]:
        """The rank of each worker with what it said; empty if all agree.

        Args:
            what: what of a statement must be equal.
        """
        said = [(node.rank, what(statement)) for node, (_, statement) in self.said.items()]
        return said if any(one[1] != said[0][1] for one in said) else []

    def waits(self) -> Iterator[MemberWait]:
        """All that wait for the answer, and for whom."""
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
    """Requests of the scheduler to all servers, each an agreement about its number.

    Args:
        servers: who is asked.
    """

    def __init__(self, servers: Live) -> None:
        self._servers = servers
        self._open: dict[int, tuple[Agreement[str], Callable[[str], list[fx.Effect]] | None]] = {}
        self._asked: dict[int, Question] = {}
        """What is open, for a server that takes the place of a lost one."""
        self.next_request = 1

    def ask(
        self,
        message: Question,
        then: Callable[[str], list[fx.Effect]] | None = None,
        cause: Agreement[Any] | None = None,
    ) -> list[fx.Effect]:
        """Send all servers a message.

        Args:
            message: it, with any number of a request.
            then: called when the last server has answered, with '' or with the first failure; None for nothing.
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
        """Let no open question wait for this server, which has joined since."""
        for question, _ in self._open.values():
            question.unasked.add(server)

    def drop(self, question: Agreement[str] | None) -> None:
        """Ask this no more."""
        for request in [number for number, (one, _) in self._open.items() if one is question]:
            del self._open[request]
            self._asked.pop(request, None)

    @property
    def unanswered(self) -> list[Question]:
        """What a server has to answer that takes the place of a lost one."""
        return list(self._asked.values())

    def answered(self, sender: Member, request: int, failure: str) -> list[fx.Effect]:
        """A server has answered, with '' or with why it could not."""
        question, _ = self._open.get(request, (None, None))
        if question is None or question.has_heard(sender):
            return []
        question.say(sender, failure)
        return self._end(request)

    def advance(self) -> list[fx.Effect]:
        """A server is gone: whatever has waited for nobody else goes on."""
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
