"""Sparse tables of a server: their rounds, and what pushes and pulls of rows do to them. Pure.

Walk of a push of rows: `SparseShard.push` → `SparseTable.offer`, part by part → when every live worker has
contributed `close_round` and `SparseTable.apply` → a count to each. A pull waits until its worker's pushes are counted;
then its rows are gathered into a buffer that is leased until the worker has acknowledged it.

A contribution too large for one message arrives in several and is offered to the round with the last one. If one part
is refused, the later ones are too: no part of a contribution counts without the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdist import errors
from kvdist.checkpoint.snapshot import ReadSlice, SavedSlice, WantedSlice
from kvdist.core.policy import POLICIES
from kvdist.core.round import (
    PullRequest,
    Round,
    Setting,
    Verdict,
    agreed_settings,
    require_optimizer,
    scales_of,
    setting_of,
)
from kvdist.core.server.buffers import Allocate
from kvdist.core.server.shard import Replies, RoundWait, Shard
from kvdist.core.server.snapshots import Snapshots
from kvdist.core.server.table_rows import TableRows
from kvdist.core.sharding import slices_of
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.initializer import initializer_from
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U32, Arrays, Bits, padded, views
from kvdist.protocol.limits import DEFAULT

BUFFERS_KEPT_MAX = 8
"""Buffers that are kept for later replies: the first touch of fresh memory costs several times a copy."""
BUFFER_UNIT_BYTES = 64 << 10
"""Their sizes are multiples of this, so that one serves replies of similar sizes."""

RowIds = npt.NDArray[np.int64]
"""(k,) row ids of the whole table, strictly ascending."""

_EMPTY = int(msg.Flag.EMPTY)


@dataclass(slots=True)
class RowContribution:
    """What one worker adds to the next version of the rows.

    parts: (ids, values) as they came, ascending from part to part.
    """

    member: Member
    run: int
    step: int
    version: int
    samples: int
    flags: int
    setting: Setting
    parts: list[tuple[RowIds, Bits]]

    @property
    def is_empty(self) -> bool:
        """Whether there is no gradient; a gradient of no rows is one."""
        return bool(self.flags & _EMPTY)

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return sum(values.nbytes for _, values in self.parts)

    def obstacle_to(self, part: RowContribution) -> str:
        """Why this is not its next part; '' if it is."""
        if (part.run, part.step, part.flags) != (self.run, self.step, self.flags):
            return "a part of another push between those"
        ids = part.parts[0][0]
        last = next((int(before[-1]) for before, _ in reversed(self.parts) if len(before)), -1)
        return "rows that do not ascend" if len(ids) and int(ids[0]) <= last else ""


@dataclass(slots=True)
class RowPull(PullRequest):
    """A worker that waits for rows to reach a state."""

    ids: RowIds


@dataclass(slots=True, eq=False)
class SparseTable:
    """The rows of one table that one server has, and their rounds."""

    number: int
    """Of the slice."""
    store: int
    rows: TableRows
    round: Round[RowContribution, RowPull]
    has_value: bool
    """Whether its first values are complete."""
    ids: U32 = field(init=False)
    """(1,) its number."""
    arriving: dict[int, RowContribution] = field(default_factory=dict)
    """Worker rank → a contribution that is not complete."""
    spoilt: dict[int, int] = field(default_factory=dict)
    """Worker rank → the last run with a refused part."""
    before: tuple[RowIds, Bits] | None = None
    """Where all wait for lost workers: what the last round has changed, as it was; see `Block.previous`."""
    rooms: dict[int, Bits] = field(default_factory=dict)
    """Worker rank → memory for the values of a contribution in several parts: fresh memory is slow."""

    def __post_init__(self) -> None:
        self.ids = _u32(self.number)

    def offer(self, contribution: RowContribution, more: bool, now: float) -> Verdict:
        """Put a contribution, or the next part of it, into its slot.

        Raises:
            PushRefused: the worker's push counter does not fit, or a part does not follow the one before it; its
                sender is broken.
        """
        rank = contribution.member.node.rank
        verdict = self.round.place_of(contribution)
        if verdict is not Verdict.ACCEPTED:
            return verdict
        begun = self.arriving.pop(rank, None)
        if begun is not None:
            obstacle = begun.obstacle_to(contribution)
            if obstacle:
                raise errors.PushRefused(f"{contribution.member} sent {obstacle} of {name_of(self.round.key)}")
            begun.parts += contribution.parts
            contribution = begun
        if more:
            self.arriving[rank] = contribution
            return Verdict.REPEATED
        return self.round.offer(contribution, now)

    def spoil(self, rank: int, run: int) -> None:
        """Refuse all parts of a run, because one was refused; drop what has arrived."""
        self.spoilt[rank] = run
        begun = self.arriving.get(rank)
        if begun is not None and begun.run == run:
            del self.arriving[rank]

    def forget(self, gone: Set[int]) -> None:
        """Drop what belongs to departed workers. Complete contributions still count."""
        self.round.forget(gone)
        for rank in gone:
            self.arriving.pop(rank, None)
            self.spoilt.pop(rank, None)
            self.rooms.pop(rank, None)

    def drop(self, lost: Set[int]) -> dict[int, int]:
        """Drop what lost workers have pushed and is not counted. Returns rank → how many pushes are."""
        return self.round.drop(lost)

    def apply(self, contributions: Sequence[RowContribution], optimizer: Optimizer | None, keeps: bool = False) -> None:
        """Change the rows by the contributions of a round.

        Args:
            contributions: they.
            optimizer: the rule.
            keeps: whether the version before can still be read.

        Raises:
            OptimizerMismatch, PushRefused: the round cannot be applied; nothing has changed.
        """
        key, self.before = self.round.key, None
        require_optimizer(key, self.round.policy, optimizer)
        present = [contribution for contribution in contributions if not contribution.is_empty]
        if not present:
            return
        lr, wd = agreed_settings(key, present, self.round.began.keys(), self.round.policy)
        scales = scales_of(present, contributions, optimizer)
        try:
            gradients = [self._joined(c) for c in present]
            if keeps:
                self.before = self.rows.visited([ids for ids, _ in gradients], optimizer, wd)
            self.rows.update(gradients, scales, optimizer, lr, wd)
        except (MemoryError, TypeError, ValueError) as error:
            raise errors.PushRefused(f"{name_of(key)}: {error}") from error

    def _joined(self, contribution: RowContribution) -> tuple[RowIds, Bits]:
        """All its ids and values, until the next round; one pass over them where they came in several messages."""
        if len(contribution.parts) == 1:
            return contribution.parts[0]
        ids, values = zip(*contribution.parts, strict=True)
        count, rank = sum(map(len, values)), contribution.member.node.rank
        room = self.rooms.get(rank)
        if room is None or not count <= len(room) <= 2 * count:
            room = self.rooms[rank] = np.empty(count, self.rows.dtype.storage)
        np.concatenate(values, out=room[:count])
        return np.concatenate(ids), room[:count]

    def obstacle_to_ids(self, ids: RowIds) -> str:
        """What is wrong with the ids of a message; '' if nothing is."""
        if not len(ids):
            return ""
        first, stop = self.rows.first, self.rows.stop
        if ids[0] < first or ids[-1] >= stop or not (ids[1:] > ids[:-1]).all():
            return f"{name_of(self.round.key)}: rows must ascend from {first} to {stop - 1} here"
        return ""

    def obstacle_to(self, sender: Member, run: int, ids: RowIds, values: Bits) -> str:
        """Why this part of a run cannot be taken, nor any later one; '' if it can."""
        rank, key = sender.node.rank, self.round.key
        if self.spoilt.get(rank) == run:
            return f"{name_of(key)}: an earlier part of the same rows was refused"
        if values.dtype != self.rows.dtype.storage or len(values) != len(ids) * self.rows.row_length:
            obstacle = f"{name_of(key)}: {len(ids)} rows of another size or dtype than was declared"
        else:
            obstacle = self.obstacle_to_ids(ids)
        if obstacle:
            self.spoil(rank, run)
        return obstacle

    def validate(self) -> None:
        """Check every invariant."""
        self.rows.validate()
        self.round.validate()
        assert not self.round.slots.keys() & self.arriving.keys(), "what is complete does not arrive"


@dataclass(slots=True, eq=False)
class ReplyBuffer:
    """Memory for a reply. While `leases` is not 0 it is being read."""

    memory: npt.NDArray[np.uint8]
    leases: int = 0


class ReplyBuffers:
    """Memory for replies, used again when it is no longer leased.

    Args:
        allocate: gives memory.
    """

    def __init__(self, allocate: Allocate) -> None:
        self.allocate = allocate
        self.all: list[ReplyBuffer] = []

    def acquire(self, nbytes: int) -> ReplyBuffer:
        """A free buffer of at least this many bytes and not many more."""
        free = [buffer for buffer in self.all if buffer.leases == 0]
        sizes = range(nbytes, 4 * nbytes + BUFFER_UNIT_BYTES + 1)
        found = next((buffer for buffer in free if len(buffer.memory) in sizes), None)
        if found is None:
            found = ReplyBuffer(self.allocate(max(1, -(-nbytes // BUFFER_UNIT_BYTES)) * BUFFER_UNIT_BYTES))
            self.all.append(found)
        others = [buffer for buffer in free if buffer is not found]
        for buffer in others[: max(0, len(self.all) - BUFFERS_KEPT_MAX)]:
            self.all.remove(buffer)
        return found


class SparseShard(Shard[SparseTable]):
    """The sparse tables that live, in part, on one server.

    Args:
        kernels: the backend for sums and casts.
        allocate: gives memory for replies.
        replies: what workers are told.
        snapshots: the checkpoints under way.
    """

    def __init__(self, kernels: Kernels, allocate: Allocate, replies: Replies, snapshots: Snapshots) -> None:
        super().__init__(replies, snapshots)
        self.all: dict[int, SparseTable] = {}
        """By the number of their slice."""
        self.buffers = ReplyBuffers(allocate)
        self.kernels = kernels
        self._optimizers: dict[int, Optimizer] = {}
        """By store."""

    # What the scheduler decides.

    def assign(self, message: msg.Assign, rank: int, num_servers: int) -> str:
        """Add the rows that are for the server of this rank. Returns why that failed, or ''."""
        placement = message.placement
        columns = (message.keys, message.shapes, message.dtypes, message.forms)
        failure = ""
        for key, shape, code, form, first, home in zip(*columns, placement.first_slices, placement.homes, strict=True):
            if not form:
                continue
            dtype, row = DType(code), max(1, math.prod(shape[1:]))
            for piece in slices_of(shape, dtype.itemsize, form, home, num_servers, first, placement.slice_bytes):
                if piece.server != rank or piece.number in self.all:
                    continue
                initializer = None if form == msg.ROWS else initializer_from(form)
                bounds = (piece.start // row, piece.stop // row)
                try:
                    rows = TableRows(key, piece.number, shape, dtype, *bounds, initializer, self.kernels)
                except MemoryError as error:
                    failure = failure or str(error)
                    continue
                round_: Round[RowContribution, RowPull] = Round(key, POLICIES[message.mode])
                round_.leave_out(message.later)
                table = SparseTable(piece.number, message.store, rows, round_, has_value=initializer is not None)
                self.all[piece.number] = table
        return failure

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """Treat pushes to the store as gradients from now on."""
        self._optimizers[store] = optimizer

    def updates(self, store: int) -> bool:
        """Whether pushes to a store are gradients."""
        return store in self._optimizers

    # What is here.

    def __iter__(self) -> Iterator[SparseTable]:
        """All tables."""
        return iter(self.all.values())

    def holder(self, number: int) -> SparseTable | None:
        """The table of a slice, if it is here."""
        return self.all.get(number)

    def key_of(self, number: int) -> int | str:
        """The key of a slice that is here."""
        return self.all[number].round.key

    def copies(self, numbers: Sequence[int], contents: Sequence[str]) -> tuple[list[SavedSlice], None]:
        """A copy of the present rows."""
        tables = [self.all[number] for number in numbers]
        optimizer = self._optimizers.get(tables[0].store)
        return [table.rows.saved(table.round.version, optimizer, contents) for table in tables], None

    def wanted(self, store: int) -> list[WantedSlice]:
        """What a checkpoint must hold for the tables of a store."""
        return [table.rows.wanted(self._optimizers.get(store)) for table in self._of(store)]

    def _begin_anew(self) -> None:
        for table in self:
            table.arriving.clear()
            table.spoilt.clear()
            table.has_value = table.has_value or not self.updates(table.store)

    def _load(self, store: int, found: Sequence[ReadSlice]) -> None:
        for one in found:
            table = self.all[one.number]
            table.rows.load(one, self._optimizers.get(store))
            table.has_value = table.has_value or one.weight is not None

    # What workers say.

    def initialise(self, sender: Member, message: msg.InitRows) -> None:
        """First values of rows."""
        arrays = views(message.arrays)
        for i, table in self._known(sender, message.runs, message.ids):
            run, ids, values = int(message.runs[i]), arrays[2 * i], arrays[2 * i + 1]
            obstacle = table.obstacle_to(sender, run, ids, values)
            if obstacle:
                self._refuse(sender, run, table.ids, obstacle)
                continue
            if not table.has_value:
                table.rows.put(ids, values)
            if not message.flags[i] & msg.MORE:
                table.has_value = True
                self._look(table)
                self._to(sender).acknowledge(run, table.ids, table.round.version, msg.Outcome.INITIALISED)
                self.close_if_ready(table)

    def push(self, sender: Member, message: msg.PushRows, now: float) -> None:
        """Contributions of rows."""
        settings = [setting_of(numbers) for numbers in message.settings]
        arrays = views(message.arrays)
        for i, table in self._known(sender, message.runs, message.ids):
            run, ids, values = int(message.runs[i]), arrays[2 * i], arrays[2 * i + 1]
            obstacle = table.obstacle_to(sender, run, ids, values)
            if obstacle:
                self._refuse(sender, run, table.ids, obstacle)
                continue
            numbers = (int(message.steps[i]), int(message.versions[i]), int(message.samples[i]))
            flags, setting = int(message.flags[i]), settings[int(message.setting_of[i])]
            contribution = RowContribution(sender, run, *numbers, flags & ~msg.MORE, setting, [(ids, values)])
            try:
                verdict = table.offer(contribution, bool(flags & msg.MORE), now)
            except errors.PushRefused as error:
                table.spoil(sender.node.rank, run)
                self._refuse(sender, run, table.ids, error)
                continue
            if verdict is Verdict.ACCEPTED:
                self.close_if_ready(table)
            elif verdict is Verdict.ALREADY_COUNTED and not flags & msg.MORE:
                self._answer(table, contribution)

    def pull(self, sender: Member, message: msg.PullRows, now: float) -> None:
        """Requests for rows."""
        arrays = views(message.arrays)
        for i, table in self._known(sender, message.runs, message.ids):
            run, ids = int(message.runs[i]), arrays[i]
            obstacle = table.obstacle_to_ids(ids)
            if len(ids) * table.rows.row_length * table.rows.dtype.itemsize > DEFAULT.payload_bytes_max:
                obstacle = f"{name_of(table.round.key)}: {len(ids)} rows are too many for one message"
            if obstacle:
                self._refuse(sender, run, table.ids, obstacle)
                continue
            table.round.wait(RowPull(sender, run, int(message.steps[i]), int(message.versions[i]), ids), now)
            self._answer_pulls(table)

    def _known(self, sender: Member, runs: U32, ids: U32) -> Iterator[tuple[int, SparseTable]]:
        for i, number in enumerate(ids.tolist()):
            table = self.all.get(number)
            if table is None:
                self._refuse(sender, int(runs[i]), ids[i : i + 1], f"{self.peers.name} has no table slice {number}")
            else:
                yield i, table

    # Rounds.

    def _apply(self, tables: Sequence[SparseTable], rounds: Sequence[Sequence[RowContribution]]) -> None:
        tables[0].apply(rounds[0], self._optimizers.get(tables[0].store), self.peers.waits)
        self._traffic.summed += sum([one.nbytes for one in rounds[0]])

    def _answer(self, table: SparseTable, contribution: RowContribution) -> None:
        reply, run = self._to(contribution.member), contribution.run
        if (refusal := table.round.refusal_of(contribution)) is not None:
            reply.refuse(run, table.ids, *refusal)
        else:
            reply.acknowledge(run, table.ids, table.round.version, msg.Outcome.COUNTED)

    def _answer_pull(self, table: SparseTable, pull: RowPull) -> None:
        try:
            buffer, message = self._gathered(table, pull)
        except MemoryError:
            reason = (
                f"{name_of(table.round.key)}: {self.peers.name} has no memory for an answer of {len(pull.ids)} rows"
            )
            self._refuse(pull.member, pull.run, table.ids, f"{reason}: pull fewer at once")
        else:
            self._to(pull.member).rows(message, buffer)

    def _gathered(self, table: SparseTable, pull: RowPull) -> tuple[ReplyBuffer, msg.RowValues]:
        """The answer to a pull: one pass over its rows."""
        rows = table.rows
        count = len(pull.ids) * rows.row_length
        nbytes = count * rows.dtype.itemsize
        buffer = self.buffers.acquire(padded(nbytes))
        payload = buffer.memory[: padded(nbytes)]
        values = payload[:nbytes].view(rows.dtype.storage)
        rows.gather(pull.ids, values)
        is_before = self.peers.waits and table.round.is_before(pull)
        if is_before and table.before is not None:
            _, mine, its = np.intersect1d(pull.ids, table.before[0], assume_unique=True, return_indices=True)
            shape = (-1, rows.row_length)
            values.reshape(shape)[mine] = table.before[1].reshape(shape)[its]
        payload[nbytes:] = 0
        self._traffic.joined += nbytes
        arrays = Arrays(np.array([rows.dtype], np.uint8), _u32(count), payload.data)
        return buffer, msg.RowValues(_u32(pull.run), table.ids, _u32(table.round.version - is_before), arrays)

    def _wait(self, table: SparseTable) -> RoundWait:
        live, round_ = self.peers.awaited, table.round
        if not table.has_value:
            return RoundWait(round_, f"give {name_of(round_.key)} its first values", (min(live, default=0),))
        # A worker that pulls waits for its own pushes.
        missing = (
            round_.missing(live) if round_.slots else tuple(sorted({one.member.node.rank for one in round_.pulls}))
        )
        return RoundWait(round_, f"push {name_of(round_.key)} (step {round_.version + 1})", missing)


def _u32(number: int) -> U32:
    return np.array([number], np.uint32)
