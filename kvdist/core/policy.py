"""When a round closes, and which contributions count: a frozen object per store.

Its settings are synchronous rounds, quotas (rounds of as many steps as each worker has made) and asynchronous updates,
the first and the last with priority slices, too. The decisions are pure functions of the state, so every server decides
alike. When a worker pushes under a quota, a quorum or a bounded delay is decided in `kvdist.core.server.progress`. A
version that is closed on k contributions of many would need a rule here for late contributions (`Round.offer`), and
their outcome in the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from kvdist.config.settings import Limits


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules by which a store handles contributions."""

    name: str
    """The name on the wire and in messages."""
    close: int | None
    """Number of contributions in a version; None = a contribution from every live worker."""
    needs_optimizer: bool
    """Whether a contribution without an optimizer on the server is an error (no round sums it)."""
    has_own_pace: bool = False
    """Whether each worker has its pace of steps between two versions, so that their schedules differ."""
    by_priority: bool = False
    """Whether keys are cut small and few bytes are in flight, so that urgent slices overtake soon (P3)."""

    def __post_init__(self) -> None:
        if self.close not in (None, 1):
            raise ValueError(
                f"policy {self.name!r} closes a version after {self.close} contributions, but only 1 and None (one of"
                " every live worker) are implemented: nothing says what a late contribution is worth"
            )

    @property
    def is_lockstep(self) -> bool:
        """Whether each version has a contribution of every live worker.

        Then contributions may be summed on the way to a server, a push waits for all workers (what the search for
        deadlocks relies on), and counters name a moment of training, so a checkpoint is exact.
        """
        return self.close is None

    def slice_bytes(self, limits: Limits) -> int:
        """Return the most bytes that a slice of such a store has."""
        return limits.priority_slice_bytes if self.by_priority else limits.slice_bytes

    def is_full(self, present: Set[int], members: Set[int]) -> bool:
        """Whether the contributions of the workers `present` make a version while `members` are alive."""
        return members <= present if self.close is None else len(present) >= self.close

    def missing(self, present: Set[int], members: Set[int]) -> tuple[int, ...]:
        """The ranks whose contributions are awaited."""
        return tuple(sorted(members - present)) if self.close is None else ()

    def chosen(self, present: Iterable[int]) -> list[int]:
        """The ranks whose contributions make a version that `is_full`, in the order in which they are summed."""
        return sorted(present)[: self.close]


SYNC = Policy("sync", close=None, needs_optimizer=False)
"""A version has a contribution from every live worker."""
QUOTA = Policy("quota", close=None, needs_optimizer=False, has_own_pace=True)
"""A version has a contribution from every live worker, of as many steps as each has completed."""
ASYNC = Policy("async", close=1, needs_optimizer=True)
"""Every contribution makes a version at once."""
P3 = Policy("p3", close=None, needs_optimizer=False, by_priority=True)
"""`SYNC` with priority slices."""
P3_ASYNC = Policy("p3_async", close=1, needs_optimizer=True, by_priority=True)
"""`ASYNC` with priority slices."""

MODES = {policy.name: policy for policy in (SYNC, QUOTA, ASYNC, P3, P3_ASYNC)}
"""Mode of a store, as it travels → the rules of that mode. `kvdist.config.policies` has the policies of users."""


def with_priority_slices(policy: Policy) -> Policy:
    """The policy that makes versions alike, with priority slices; a quota has none, as it pushes seldom."""
    if policy.has_own_pace:
        return policy
    return P3 if policy.is_lockstep else P3_ASYNC
