"""What rank 0 knows of the operations of one group: how far each rank has called them, and what they are.

Pure: it keeps, and says what it keeps. `kvdist.collective.coordinator` decides.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from kvdist.collective.signature import JOIN_SIGNATURE
from kvdist.protocol.collective import ENTRY_BYTES

RECENT_MAX = 1024
"""Operations that are remembered when all ranks have agreed on them: a rank is never further behind with its work."""

Entry = tuple[bytes, bool]
"""The digest of a called operation, and whether its rank waits to be admitted to it."""


@dataclass(slots=True)
class RankProgress:
    """Where one rank is.

    Attributes:
        queue: what it has called and not all have.
        called, done: how many operations, ever.
        since: when it began to wait for the one that it waits for.
    """

    queue: deque[Entry] = field(default_factory=deque)
    called: int = 0
    done: int = 0
    since: float = 0.0

    @property
    def waits(self) -> bool:
        return self.done < self.called

    @property
    def has_joined(self) -> bool:
        """Whether the next thing that it has called is `join`."""
        return bool(self.queue) and self.queue[0][0] == JOIN_SIGNATURE.digest


class Ledger:
    """The operations of a group.

    Args:
        ranks: its members, ascending.

    Attributes:
        agreed: up to which operation the ranks have called the same.
        joining: the ranks that have called `join`, in the order in which that was heard.
        is_paced: the ranks were told to wait for every operation.
        has_failed: it is at its end.
        told_s: for how long the present wait had lasted when it was last told of; 0 for never.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.of: dict[int, RankProgress] = {rank: RankProgress() for rank in ranks}
        self.agreed = 0
        self.joining: list[int] = []
        self.is_paced = False
        self.has_failed = False
        self.told_s = 0.0
        self.told_of = -1
        self._recent: deque[bytes] = deque(maxlen=RECENT_MAX)

    def call(self, rank: int, entries: bytes, done: int, now: float) -> None:
        """A rank has called these operations, and so many are done of all."""
        progress = self.of[rank]
        was_idle, was_done = not progress.waits, progress.done
        for at in range(0, len(entries), ENTRY_BYTES):
            digest = entries[at + 1 : at + ENTRY_BYTES]
            progress.queue.append((digest, entries[at] == 1))
            if digest == JOIN_SIGNATURE.digest:
                self.joining.append(rank)
        progress.called += len(entries) // ENTRY_BYTES
        progress.done = min(max(done, progress.done), progress.called)
        if was_idle or progress.done > was_done:
            progress.since = now

    def active(self) -> list[int]:
        """The ranks that have not joined."""
        if not self.joining:
            return list(self.ranks)
        return [rank for rank in self.ranks if not self.of[rank].has_joined]

    def pass_one(self, ranks: list[int], digest: bytes) -> None:
        """These ranks have dealt with the next operation, and so have those that only count it."""
        for rank in ranks:
            self.of[rank].queue.popleft()
        for rank in set(self.ranks) - set(ranks):
            # A rank that has joined has its place in the program behind what the others do without it.
            self.of[rank].called += 1
            self.of[rank].done += 1
        self.agreed += 1
        self._recent.append(digest)

    def digest_of(self, sequence: int) -> bytes | None:
        """The digest of an operation that somebody has called; None for one long past."""
        if sequence < self.agreed:
            back = self.agreed - sequence
            return self._recent[-back] if back <= len(self._recent) else None
        for progress in self.of.values():
            at = sequence - self.agreed
            if not progress.has_joined and at < len(progress.queue):
                return progress.queue[at][0]
        return None
