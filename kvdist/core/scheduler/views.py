"""Views: which roster each server has acted on, and what waits until all have acted on it. Pure.

A server answers each roster by `Seen`, when it has done all that the roster asks for. Rosters are absolute, so an
answer to a newer roster answers all older rosters, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvdist.core import machine as fx
from kvdist.nodes import Member, NodeId
from kvdist.protocol import messages as msg


@dataclass(slots=True, eq=False)
class Views:
    """Rosters, and the answers of servers."""

    servers: Mapping[NodeId, Member]
    """Live servers."""
    epoch: int = 0
    """Number of the newest roster."""
    is_stale: bool = False
    """Whether servers need another roster, because something has changed that workers need not know."""
    _seen: dict[Member, msg.Seen] = field(default_factory=dict)
    """Server → its newest answer."""
    _waiting: list[tuple[int, Callable[[], list[fx.Effect]]]] = field(default_factory=list)
    """(epoch, what follows when every server has answered a roster of this epoch or a later one)"""

    @property
    def is_answered(self) -> bool:
        """Whether every server has answered the newest roster: many changes at nearly the same time share a roster."""
        return self._answered == self.epoch

    @property
    def answers(self) -> list[msg.Seen]:
        """The newest answer of each server that has answered."""
        return [self._seen[server] for server in self.servers.values() if server in self._seen]

    def then(self, follow: Callable[[], list[fx.Effect]]) -> None:
        """Call a function when all servers have answered the next roster."""
        self._waiting.append((self.epoch + 1, follow))

    def heard(self, server: Member, message: msg.Seen) -> list[fx.Effect]:
        """Store the answer of a server. Returns what follows if it was the last answer."""
        self._seen[server] = message
        effects: list[fx.Effect] = []
        while self._waiting and self._waiting[0][0] <= self._answered:
            _, follow = self._waiting.pop(0)
            effects += follow()
        return effects

    def server_lost(self, server: Member) -> None:
        """Let everything wait for answers to the next roster, as another server has the slices of a lost server."""
        self._seen.pop(server, None)
        self._waiting = [(self.epoch + 1, follow) for _, follow in self._waiting]

    @property
    def _answered(self) -> int:
        """Epoch of the newest roster that every server has answered."""
        epochs = [self._seen[server].epoch if server in self._seen else 0 for server in self.servers.values()]
        return min(epochs, default=self.epoch)
