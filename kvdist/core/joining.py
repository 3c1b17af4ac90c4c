"""How a server or a worker becomes part of the cluster: hello, welcome, roster, each with a deadline."""

from __future__ import annotations

from dataclasses import dataclass

from kvdist import errors
from kvdist.core import machine as fx
from kvdist.nodes import SCHEDULER, UNRANKED, Member, NodeId, Role
from kvdist.protocol import messages as msg

SCHEDULER_MEMBER = Member(SCHEDULER, 1)
HELLO_INTERVAL_S = 0.5
KEPT_HELLO_INTERVAL_S = 0.1
"""Interval once the scheduler has heard the hello, while the rank still belongs to a process which may be dead."""


@dataclass(frozen=True, slots=True)
class Introduction:
    """Identity and size of the cluster that a process sends in its hello."""

    role: Role
    token: int
    """A random number that identifies this process until it has an incarnation."""
    wanted_rank: int | None
    host: str
    pid: int
    endpoint: str
    num_workers: int
    num_servers: int
    version: str
    scheduler_endpoint: str
    life: int = 0
    """Number of processes of this rank that were started before."""


class Joining:
    """The tie of a server or worker to the scheduler: how it joins, and how long the scheduler may be away.

    Args:
        introduction: identity of this process.
        connect_timeout_s: how long the scheduler may take to answer.
        form_timeout_s: how long the cluster may take to be complete after that.
        now: the time.
    """

    def __init__(self, introduction: Introduction, connect_timeout_s: float, form_timeout_s: float, now: float) -> None:
        self.introduction = introduction
        self.connect_timeout_s = connect_timeout_s
        self.form_timeout_s = form_timeout_s
        self.me = Member(NodeId(introduction.role, UNRANKED), introduction.token)
        self.started_at = now
        self.welcomed_at: float | None = None
        self.complete = False
        self.away_s = 0.0
        """Seconds that the scheduler may be away, because it is started again."""
        self.hint = ""
        """Processes that are missing, by the scheduler's last hint."""
        self._heard_at = now
        self._next_hello = now
        self._dialled = False

    @property
    def welcomed(self) -> bool:
        """Whether the scheduler has assigned a rank, so that the loss of the scheduler matters."""
        return self.welcomed_at is not None

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        if self.complete:
            return fx.NEVER
        if self.welcomed_at is None:
            return min(self._next_hello, self._heard_at + self.connect_timeout_s)
        return self.welcomed_at + self.form_timeout_s

    def tick(self, now: float) -> list[fx.Effect]:
        """Repeat the hello if it is time.

        Raises:
            DeadlineExceeded: the scheduler does not answer, or the cluster does not become complete.
        """
        if self.complete:
            return []
        if self.welcomed_at is not None:
            if now >= self.welcomed_at + self.form_timeout_s:
                raise errors.DeadlineExceeded(self.explain(now) or "")
            return []
        if now >= self._heard_at + self.connect_timeout_s:
            raise errors.DeadlineExceeded(
                f"the scheduler at {self.introduction.scheduler_endpoint} did not answer within"
                f" {self.connect_timeout_s:g} s: is it running, and are DMLC_PS_ROOT_URI and DMLC_PS_ROOT_PORT"
                " right? (KVDIST_CONNECT_TIMEOUT_S sets the time)"
            )
        if now < self._next_hello:
            return []
        effects: list[fx.Effect] = []
        if not self._dialled:
            self._dialled = True
            effects.append(fx.Connect(SCHEDULER_MEMBER, self.introduction.scheduler_endpoint))
        self._next_hello = now + HELLO_INTERVAL_S
        return [*effects, fx.Send(SCHEDULER_MEMBER, self._hello())]

    def hinted(self, deed: str, now: float) -> None:
        """Store the scheduler's hint about missing processes. The scheduler is alive, so its answer may take long."""
        self.hint = deed
        if self.welcomed_at is None:
            self._heard_at = now
            self._next_hello = min(self._next_hello, now + KEPT_HELLO_INTERVAL_S)

    def disconnected(self, now: float) -> None:
        """Repeat the hello: the connection to the scheduler broke, and the hello or its answer may be lost with it."""
        if self._dialled:
            self._next_hello = now

    def scheduler_due(self, grace_s: float, after_silence: bool, now: float) -> float:
        """When a scheduler whose connection has just broken counts as lost.

        Before the cluster is complete a silent scheduler never counts as lost: `form_timeout_s` bounds that.
        """
        is_judged = self.complete or not after_silence
        return now + grace_s + self.away_s if is_judged else fx.NEVER

    def welcome(self, message: msg.Welcome, now: float) -> None:
        """Take the rank that the scheduler has assigned."""
        if self.welcomed_at is None:
            self.me = Member(NodeId(self.introduction.role, message.rank), message.incarnation)
            self.welcomed_at = now
            self.away_s = message.away_s

    def roster(self, message: msg.Roster) -> tuple[msg.Peer, ...]:
        """Take the list of members; the first list ends the joining."""
        self.complete = True
        return message.peers

    def refusal(self, message: msg.Rejected) -> errors.KvdistError:
        """Return the error of the user for a refusal."""
        if message.is_over:
            return errors.JobOver(message.reason)
        return errors.ConfigError(
            f"{self.introduction.scheduler_endpoint} refused this {self.introduction.role}: {message.reason}"
        )

    def explain(self, now: float) -> str | None:
        """Return the processes or the answer that this process awaits; None once the cluster is complete."""
        if self.complete:
            return None
        if self.welcomed_at is None:
            waited = now - self.started_at
            if self.hint:
                return f"waiting for {self.hint}, since {waited:.1f} s"
            return (
                f"waiting for the scheduler at {self.introduction.scheduler_endpoint} to answer, since {waited:.1f} s"
            )
        return (
            f"{self.me} has waited {now - self.welcomed_at:.1f} s for the cluster of {self.introduction.num_workers}"
            f" worker(s) and {self.introduction.num_servers} server(s) to be complete"
            + (f": waiting for {self.hint}" if self.hint else "")
        )

    def _hello(self) -> msg.Hello:
        intro = self.introduction
        wanted = -1 if intro.wanted_rank is None else intro.wanted_rank
        return msg.Hello(
            wanted,
            intro.host,
            intro.pid,
            intro.endpoint,
            intro.num_workers,
            intro.num_servers,
            intro.version,
            intro.life,
        )
