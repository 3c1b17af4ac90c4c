"""A worker's calls of `save_checkpoint` and `load_checkpoint`: what they say to whom, and when. Pure."""

from __future__ import annotations

import numpy as np

from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import Effect, Send
from kvdist.core.worker.requests import ClaimFolder, LoadStore, SaveStore
from kvdist.core.worker.transfers import Transfers
from kvdist.nodes import Member
from kvdist.protocol.messages import CHECKPOINT, Claim, Load, MarkPushes, Save, Waiting

SLICES_PER_MARK = 1 << 18


class SavingCalls:
    """What this worker has asked to be saved and restored.

    Args:
        transfers: knows what has been pushed.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._saved: dict[int, int] = {}
        """Store → how many of its checkpoints this worker has marked."""
        self._loaded: dict[int, int] = {}
        self.waiting: list[LoadStore] = []
        """Until no push is under way. Empty nearly always."""
        self.hint: Waiting | None = None
        """Who is missing in a checkpoint."""

    def claim(self, request: ClaimFolder) -> list[Effect]:
        """Ask for the directory into which the next checkpoint is to be saved."""
        counter = self._saved.get(request.store, 0)
        claim = Claim(request.request, request.store, counter, request.folder, request.contents)
        return [Send(SCHEDULER_MEMBER, claim)]

    def save(self, request: SaveStore, servers: dict[int, Member]) -> list[Effect]:
        """Mark the pushes of this worker at every server, before any later one leaves."""
        counter = self._saved.get(request.store, 0)
        self._saved[request.store] = counter + 1
        numbers: dict[int, list[int]] = {rank: [] for rank in servers}
        for info in request.keys:
            for piece in info.slices:
                numbers[piece.server].append(piece.number)
        effects: list[Effect] = []
        for rank, mine in sorted(numbers.items()):
            ids = np.array(mine, np.uint32)
            for start in range(0, len(ids) or 1, SLICES_PER_MARK):
                some = ids[start : start + SLICES_PER_MARK]
                steps, is_last = self._transfers.slices.pushed[some], start + SLICES_PER_MARK >= len(ids)
                contents = () if request.failure else request.contents
                where = (request.store, counter, request.folder, contents, request.run, request.step)
                effects.append(Send(servers[rank], MarkPushes(*where, is_last, some, steps)))
        place = (request.store, counter, request.folder, request.contents, request.run, request.step, request.keep)
        save = Save(request.request, *place, len(request.keys), request.file, request.failure)
        return [*effects, Send(SCHEDULER_MEMBER, save)]

    def hinted(self, hint: Waiting) -> bool:
        """Whether this is about a checkpoint, which is not what the user's other calls wait for."""
        if not hint.subject.startswith(CHECKPOINT):
            return False
        self.hint = hint
        return True

    def load(self, request: LoadStore) -> None:
        """Ask for it as soon as no push of this worker is under way."""
        self.waiting.append(request)

    def settle(self) -> list[Effect]:
        """Say what may be said by now."""
        if not self._transfers.is_idle:
            return []
        effects: list[Effect] = []
        for request in self.waiting:
            counter = self._loaded.get(request.store, 0)
            self._loaded[request.store] = counter + 1
            load = Load(request.request, request.store, counter, request.folder, request.contents, request.failure)
            effects.append(Send(SCHEDULER_MEMBER, load))
        self.waiting.clear()
        return effects
