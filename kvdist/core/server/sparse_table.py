"""`SparseTable`: the rows of a table that live on a server, and their rounds. Pure.

Rows change in place, so a pull gathers them into a buffer, which is leased until the worker has acknowledged it.

A contribution too large for a message arrives in several parts and is offered to the round with the last part. If a
part is refused, the later parts are too: no part of a contribution counts without the others.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np

from kvdist import errors
from kvdist.checkpoint.snapshot import SliceImage, WantedSlice
from kvdist.core.round import (
    Contribution,
    PullRequest,
    Round,
    RowIds,
    Verdict,
    agreed_settings,
    require_optimizer,
    scales_of,
)
from kvdist.core.server.buffers import Buffer, ReplyBuffers
from kvdist.core.server.holder import Holder, optimizer_of
from kvdist.core.server.table_rows import TableRows
from kvdist.dtypes import DType
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U32, Arrays, Bits, padded
from kvdist.protocol.limits import DEFAULT


@dataclass(slots=True, eq=False)
class SparseTable(Holder):
    """The rows of a table that live on this server: a single slice."""

    store: int
    rows: TableRows
    round: Round
    has_value: bool
    """Whether the first values are complete."""
    ids: U32 = field(init=False)
    """(1,) the number of the slice."""
    arriving: dict[int, list[Contribution]] = field(default_factory=dict)
    """Worker rank → the parts of a contribution that is not complete, ascending."""
    spoilt: dict[int, int] = field(default_factory=dict)
    """Worker rank → the last run with a refused part."""
    before: tuple[RowIds, Bits] | None = None
    """The old values of the rows that the last round has changed, where all wait for lost workers: see
    `Block.previous`."""
    rooms: dict[int, Bits] = field(default_factory=dict)
    """Worker rank → memory for the values of a contribution in several parts: fresh memory is slow."""

    def __post_init__(self) -> None:
        self.ids = np.array([self.rows.number], np.uint32)

    def key_of(self, position: int) -> int | str:
        """See `Holder`."""
        return self.round.key

    # Rounds.

    def offer(self, contribution: Contribution, more: bool, now: float) -> Verdict:
        """Put a contribution, or its next part, into its slot.

        Raises:
            PushRefused: the worker's push counter does not fit, or a part does not follow the part before it; its
                sender is broken.
        """
        rank = contribution.member.node.rank
        verdict = self.round.verdict_on(contribution)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        parts = self.arriving.pop(rank, [])
        if parts and (obstacle := _obstacle_between(parts, contribution)):
            raise errors.PushRefused(f"{contribution.member} sent {obstacle} of {name_of(self.round.key)}")
        parts.append(contribution)
        if more:
            self.arriving[rank] = parts
            return Verdict.INCOMPLETE
        try:
            return self.round.offer(self._joined(parts), now)
        except MemoryError as error:  # the push counts, or the next push of the worker would not fit its counter
            empty = replace(parts[0], flags=parts[0].flags | msg.Flag.EMPTY, samples=0, values=parts[0].values[:0])
            verdict = self.round.offer(replace(empty, row_ids=None), now)
            reason = f"{name_of(self.round.key)}: {error}"
            self.round.refused[rank] = (contribution.step, (msg.ErrorCode.REFUSED, reason))
            return verdict

    def _joined(self, parts: Sequence[Contribution]) -> Contribution:
        """Join the parts of a contribution by a pass over them; the memory is the rank's until its next push.

        Raises:
            MemoryError: the parts have no room together.
        """
        if len(parts) == 1:
            return parts[0]
        count, rank = sum(part.values.size for part in parts), parts[0].member.node.rank
        room = self.rooms.get(rank)
        if room is None or not count <= len(room) <= 2 * count:
            room = self.rooms[rank] = np.empty(count, self.rows.dtype.storage)
        np.concatenate([part.values for part in parts], out=room[:count])
        row_ids = np.concatenate([part.row_ids for part in parts if part.row_ids is not None])
        return replace(parts[0], values=room[:count], row_ids=row_ids)

    def spoil(self, rank: int, run: int) -> None:
        """Refuse all parts of a run after a refused part, and drop those that have arrived."""
        self.spoilt[rank] = run
        parts = self.arriving.get(rank)
        if parts and parts[0].run == run:
            del self.arriving[rank]

    def forget(self, gone: Set[int]) -> None:
        """Drop the pulls and incomplete pushes of departed workers. Their complete contributions still count."""
        self.round.forget(gone)
        for rank in gone:
            self.arriving.pop(rank, None)
            self.spoilt.pop(rank, None)
            self.rooms.pop(rank, None)

    def keep_version(self, contributions: Sequence[Contribution], updater: SliceUpdater | None) -> None:
        """Copy the rows that these contributions are going to change."""
        self.before = None
        if present := _present(contributions):
            _, wd = self._settings(present)
            try:
                self.before = self.rows.visited([row_ids for row_ids, _ in _rows(present)], optimizer_of(updater), wd)
            except (MemoryError, TypeError, ValueError) as error:
                raise errors.PushRefused(f"{name_of(self.round.key)}: {error}") from error

    def apply(self, rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater | None) -> None:
        """Change the rows in place."""
        optimizer = optimizer_of(updater)
        require_optimizer(self.round.key, self.round.policy, optimizer)
        if present := _present(rounds[0]):
            lr, wd = self._settings(present)
            scales = scales_of(present, rounds[0], optimizer)
            try:
                self.rows.update(_rows(present), scales, optimizer, lr, wd)
            except (MemoryError, TypeError, ValueError) as error:
                raise errors.PushRefused(f"{name_of(self.round.key)}: {error}") from error

    def _settings(self, present: Sequence[Contribution]) -> tuple[float | None, float | None]:
        return agreed_settings(self.round.key, present, self.round.began.keys(), self.round.policy)

    def summed(self, contributions: Sequence[Contribution], scales: Sequence[float]) -> tuple[Buffer, RowIds | None]:
        """Return the scaled sum of contributions, as the union of their rows."""
        row_ids, values = self.rows.summed(_rows(contributions), scales)
        return Buffer(values, values.view(np.uint8).data, pooled=False), row_ids

    def forwarded(self, total: Buffer | None, row_ids: RowIds | None) -> list[Arrays]:
        """Copy ids and values of rows into as many messages as they need."""
        dtype, row = self.rows.dtype, self.rows.row_length
        values = np.zeros(0, dtype.storage) if total is None else total.array
        row_ids = np.zeros(0, np.int64) if row_ids is None else row_ids
        rows_max = max(1, DEFAULT.payload_bytes_max // (8 + row * dtype.itemsize) - 1)
        starts = range(0, len(row_ids) or 1, rows_max)
        return [
            _laid_out(row_ids[start : start + rows_max], values[start * row : (start + rows_max) * row], dtype)
            for start in starts
        ]

    # Pulls.

    def gathered(self, pull: PullRequest, buffers: ReplyBuffers, waits: bool) -> tuple[Buffer, msg.Values]:
        """Gather the answer to a pull by a pass over its rows.

        Args:
            pull: the request.
            buffers: the memory for replies.
            waits: whether a worker may have rejoined that wants the version before.

        Raises:
            MemoryError: the answer has no room.
        """
        assert pull.row_ids is not None, "a pull from a table names rows"
        rows = self.rows
        count = len(pull.row_ids) * rows.row_length
        nbytes = count * rows.dtype.itemsize
        buffer = buffers.acquire(padded(nbytes))
        payload = buffer.array[: padded(nbytes)]
        values = payload[:nbytes].view(rows.dtype.storage)
        rows.gather(pull.row_ids, values)
        is_before = waits and self.round.is_before(pull)
        if is_before and self.before is not None:
            _, mine, its = np.intersect1d(pull.row_ids, self.before[0], assume_unique=True, return_indices=True)
            shape = (-1, rows.row_length)
            values.reshape(shape)[mine] = self.before[1].reshape(shape)[its]
        payload[nbytes:] = 0
        arrays = Arrays(np.array([rows.dtype], np.uint8), np.array([count], np.uint32), payload.data)
        version = np.array([self.round.version - is_before], np.uint32)
        return buffer, msg.Values(np.array([pull.run], np.uint32), self.ids, version, arrays)

    def obstacle_to_pull(self, row_ids: RowIds) -> str:
        """Return why rows cannot be pulled; '' if they can."""
        if len(row_ids) * self.rows.row_length * self.rows.dtype.itemsize > DEFAULT.payload_bytes_max:
            return f"{name_of(self.round.key)}: {len(row_ids)} rows are too many for one message"
        return self._obstacle_to_ids(row_ids)

    def obstacle_to(self, sender: Member, run: int, row_ids: RowIds, values: Bits) -> str:
        """Return why a part of a run, and any later part, cannot be accepted; '' if it can."""
        rank, key = sender.node.rank, self.round.key
        if self.spoilt.get(rank) == run:
            return f"{name_of(key)}: an earlier part of the same rows was refused"
        if values.dtype != self.rows.dtype.storage or len(values) != len(row_ids) * self.rows.row_length:
            obstacle = f"{name_of(key)}: {len(row_ids)} rows of another size or dtype than was declared"
        else:
            obstacle = self._obstacle_to_ids(row_ids)
        if obstacle:
            self.spoil(rank, run)
        return obstacle

    def _obstacle_to_ids(self, row_ids: RowIds) -> str:
        if not len(row_ids):
            return ""
        first, stop = self.rows.first, self.rows.stop
        if row_ids[0] < first or row_ids[-1] >= stop or not (row_ids[1:] > row_ids[:-1]).all():
            return f"{name_of(self.round.key)}: rows must ascend from {first} to {stop - 1} here"
        return ""

    # Checkpoints and rollbacks.

    def saved(
        self, positions: Sequence[int], updater: SliceUpdater | None, contents: Sequence[str]
    ) -> tuple[list[SliceImage], Buffer | None]:
        """See `Holder`. Rows and states are copied by a single pass."""
        return [self.rows.saved(self.round.version, optimizer_of(updater), contents)], None

    def wanted(self, updater: SliceUpdater | None) -> list[WantedSlice]:
        """See `Holder`."""
        return [self.rows.wanted(optimizer_of(updater))]

    def load(self, image: SliceImage, updater: SliceUpdater | None) -> None:
        """See `Holder`."""
        self.rows.load(image, optimizer_of(updater))
        self.has_value = self.has_value or image.weight is not None

    def clear_for_rollback(self, is_updated: bool) -> None:
        """See `Holder`."""
        self.arriving.clear()
        self.spoilt.clear()
        self.has_value = self.has_value or not is_updated

    def validate(self) -> None:
        """Check every invariant."""
        self.rows.validate()
        self.round.validate()
        assert not self.round.slots.keys() & self.arriving.keys(), "a complete contribution has no parts under way"


def _present(contributions: Sequence[Contribution]) -> list[Contribution]:
    """Return the contributions with a gradient; a gradient may have no rows."""
    return [contribution for contribution in contributions if not contribution.is_empty]


def _rows(contributions: Sequence[Contribution]) -> list[tuple[RowIds, Bits]]:
    return [(one.row_ids, one.values) for one in contributions if one.row_ids is not None]


def _obstacle_between(parts: Sequence[Contribution], part: Contribution) -> str:
    """Return why a part cannot follow others of a contribution; '' if it can."""
    first = parts[0]
    if (part.run, part.step, part.flags) != (first.run, first.step, first.flags):
        return "a part of another push between those"
    last, row_ids = next((int(ids[-1]) for ids, _ in reversed(_rows(parts)) if len(ids)), -1), part.row_ids
    return "rows that do not ascend" if row_ids is not None and len(row_ids) and int(row_ids[0]) <= last else ""


def _laid_out(row_ids: RowIds, values: Bits, dtype: DType) -> Arrays:
    """Return ids and values as a payload, by a single copy."""
    memory = np.zeros(8 * len(row_ids) + padded(values.nbytes), np.uint8)
    memory[: 8 * len(row_ids)] = row_ids.view(np.uint8)
    memory[8 * len(row_ids) : 8 * len(row_ids) + values.nbytes] = values.view(np.uint8)
    counts = np.array([len(row_ids), len(values)], np.uint32)
    return Arrays(np.array([DType.INT64, dtype], np.uint8), counts, memory.data)
