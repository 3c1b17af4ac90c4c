"""All tables of rows of a server: what pushes and pulls of rows do to them, and who is answered what. Pure.

Walk of a push of rows: `push` → `RowShard.offer`, part by part → when every live worker has a slot `RowShard.take` and
`apply` → `Counted` to each. A pull is answered when its worker's pushes are counted: `RowBlock.gather` into a buffer
that is leased until the worker has acknowledged it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.snapshot import ReadSlice, SavedSlice, WantedSlice
from kvdist.config.settings import Limits
from kvdist.core.machine import Effect, Send
from kvdist.core.policy import POLICIES
from kvdist.core.round import Round, Verdict, setting_of
from kvdist.core.server import row_saving
from kvdist.core.server.buffers import Allocate, Bits
from kvdist.core.server.cuts import Cuts
from kvdist.core.server.replies import Answers
from kvdist.core.server.row_block import RowBlock
from kvdist.core.server.row_shard import Ids, RowContribution, RowPull, RowShard
from kvdist.core.sharding import slices_of
from kvdist.core.traffic import Traffic
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.initializer import initializer_from
from kvdist.kernels.interface import Kernels
from kvdist.nodes import Member, server
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.arrays import U32, Arrays, padded, views
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import (
    MORE,
    ROWS,
    Assign,
    ErrorCode,
    InitRows,
    Outcome,
    PullRows,
    PushRows,
    RowValues,
    Waiting,
)

BUFFERS_KEPT_MAX = 8
"""Buffers of answers that are kept for the next ones: the first touch of fresh memory costs several times a copy."""
BUFFER_UNIT_BYTES = 64 << 10
"""Their sizes are multiples of this, so that answers of nearly the same size fit into each other's."""


@dataclass(slots=True, eq=False)
class RowBuffer:
    """Memory for an answer. While `leases` is not 0 somebody still reads it."""

    memory: npt.NDArray[np.uint8]
    leases: int = 0


class RowTables:
    """The tables of rows that live, in part, on one server.

    Args:
        limits: sizes and times.
        kernels: who does the arithmetic.
        allocate: gives memory for answers.
        traffic: where passes are counted.
        cuts: what checkpoints are under way.
    """

    def __init__(self, limits: Limits, kernels: Kernels, allocate: Allocate, traffic: Traffic, cuts: Cuts) -> None:
        self.shards: dict[int, RowShard] = {}
        self.workers: Mapping[int, Member] = {}
        """Rank → the live worker there."""
        self._limits = limits
        self._kernels = kernels
        self._allocate = allocate
        self._traffic = traffic
        self._cuts = cuts
        cuts.add(self)
        self._name = "this server"
        self._optimizers: dict[int, Optimizer] = {}
        """By store."""
        self._store_of: dict[int, int] = {}
        self._buffers: list[RowBuffer] = []
        self._answers: dict[Member, Answers] = {}
        self._values: list[tuple[Member, RowBuffer, RowValues]] = []

    # What the scheduler decides.

    def assign(self, message: Assign, rank: int, num_servers: int) -> str:
        """Keep the rows of these tables that are for the server of this rank; why that cannot be, or ''."""
        self._name = str(server(rank))
        placement = message.placement
        columns = (message.keys, message.shapes, message.dtypes, message.forms)
        failure = ""
        for key, shape, code, form, first, home in zip(*columns, placement.first_slices, placement.homes, strict=True):
            if not form:
                continue
            dtype, row = DType(code), max(1, math.prod(shape[1:]))
            for piece in slices_of(shape, dtype.itemsize, form, home, num_servers, first, placement.slice_bytes):
                if piece.server != rank or piece.number in self.shards:
                    continue
                initializer = None if form == ROWS else initializer_from(form)
                bounds = (piece.start // row, piece.stop // row)
                try:
                    block = RowBlock(key, piece.number, shape, dtype, *bounds, initializer, self._kernels)
                except MemoryError as error:
                    failure = failure or str(error)
                    continue
                shard = RowShard(
                    piece.number, block, Round(key, POLICIES[message.mode]), has_value=initializer is not None
                )
                self.shards[piece.number] = shard
                self._store_of[piece.number] = message.store
        return failure

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """From now on pushes to the store are gradients."""
        self._optimizers[store] = optimizer

    def roster(self, workers: Mapping[int, Member]) -> None:
        """These are the live workers. Who left cannot be waited for any more, and waits for nothing itself."""
        gone = self.workers.keys() - workers.keys()
        self.workers = workers
        for shard in self.shards.values():
            shard.round.forget(gone)
            for rank in gone:
                shard.arriving.pop(rank, None)
                shard.spoilt.pop(rank, None)
                shard.rooms.pop(rank, None)
            self._close_if_ready(shard)

    # Checkpoints: see `Keeper`.

    def keeps(self, number: int) -> bool:
        """Whether a slice is here."""
        return number in self.shards

    def kept(self, number: int) -> RowShard:
        """A slice that is here."""
        return self.shards[number]

    def taken(self, numbers: Sequence[int], contents: Sequence[str]) -> tuple[list[SavedSlice], None]:
        """A copy of the rows as they are now."""
        shards = [self.shards[number] for number in numbers]
        optimizer = self._optimizers.get(self._store_of[numbers[0]])
        return [row_saving.taken(shard.block, shard.version, optimizer, contents) for shard in shards], None

    def wanted(self, store: int) -> list[WantedSlice]:
        """What a checkpoint must have of the tables of a store."""
        return [row_saving.wanted(shard.block, self._optimizers.get(store)) for shard in self._of(store)]

    def restore(self, store: int, found: Sequence[ReadSlice]) -> None:
        """Go on from what was found. What departed workers have pushed to open rounds was for the values before it."""
        for shard in self._of(store):
            slots = shard.round.slots
            shard.round.slots = {rank: one for rank, one in slots.items() if rank in self.workers}
        for one in found:
            shard = self.shards[one.number]
            row_saving.restore(shard.block, one, self._optimizers.get(store))
            shard.has_value = shard.has_value or one.weight is not None

    def _of(self, store: int) -> list[RowShard]:
        return [shard for number, shard in self.shards.items() if self._store_of[number] == store]

    # What workers say.

    def initialise(self, sender: Member, message: InitRows) -> None:
        """First values of rows."""
        arrays = views(message.arrays)
        for i, shard in self._known(sender, message.runs, message.ids):
            run, ids, values = int(message.runs[i]), arrays[2 * i], arrays[2 * i + 1]
            obstacle = self._obstacle(sender, run, shard, ids, values)
            if obstacle:
                self._refuse(sender, run, shard.number, obstacle)
                continue
            if not shard.has_value:
                shard.block.put(ids, values)
            if not message.flags[i] & MORE:
                shard.has_value = True
                if self._cuts.awaited:
                    self._cuts.look([shard.number], self.workers)
                self._to(sender).counted(run, shard.ids, shard.version, Outcome.INITIALISED)
                self._close_if_ready(shard)

    def push(self, sender: Member, message: PushRows, now: float) -> None:
        """Contributions of rows."""
        settings = [setting_of(numbers) for numbers in message.settings]
        arrays = views(message.arrays)
        for i, shard in self._known(sender, message.runs, message.ids):
            run, ids, values = int(message.runs[i]), arrays[2 * i], arrays[2 * i + 1]
            obstacle = self._obstacle(sender, run, shard, ids, values)
            if obstacle:
                self._refuse(sender, run, shard.number, obstacle)
                continue
            numbers = (int(message.steps[i]), int(message.versions[i]), int(message.samples[i]))
            flags, setting = int(message.flags[i]), settings[int(message.setting_of[i])]
            contribution = RowContribution(sender, run, *numbers, flags & ~MORE, setting, [(ids, values)])
            try:
                verdict = shard.offer(contribution, bool(flags & MORE), now)
            except PushRefused as error:
                shard.spoil(sender.node.rank, run)
                self._refuse(sender, run, shard.number, str(error))
                continue
            if verdict is Verdict.ACCEPTED:
                self._close_if_ready(shard)
            elif verdict is Verdict.ALREADY_COUNTED and not flags & MORE:
                self._to(sender).counted(run, shard.ids, shard.version, Outcome.COUNTED)

    def pull(self, sender: Member, message: PullRows, now: float) -> None:
        """Rows are wanted."""
        arrays = views(message.arrays)
        for i, shard in self._known(sender, message.runs, message.ids):
            run, ids = int(message.runs[i]), arrays[i]
            obstacle = shard.obstacle_to(ids)
            if len(ids) * shard.block.row_length * shard.block.dtype.itemsize > DEFAULT.payload_bytes_max:
                obstacle = f"key {shard.key!r}: {len(ids)} rows are too many for one message"
            if obstacle:
                self._refuse(sender, run, shard.number, obstacle)
                continue
            shard.round.wait(RowPull(sender, run, int(message.steps[i]), int(message.versions[i]), ids), now)
            self._answer_pulls(shard)

    # What workers are told.

    def take_answers(self) -> list[Effect]:
        """All that has arisen since the last time."""
        if not self._answers and not self._values:
            return []
        effects: list[Effect] = []
        for member, answers in self._answers.items():
            if self._is_here(member):
                effects += answers.messages(member, self._limits.slice_bytes, self._traffic)
        for member, buffer, message in self._values:
            if self._is_here(member):
                effects.append(Send(member, message, (buffer,)))
            else:
                buffer.leases -= 1
        self._answers, self._values = {}, []
        return effects

    def hints(self, now: float) -> list[Effect]:
        """Tell those who have waited long in which round, and for whom."""
        hints: dict[Member, Waiting] = {}
        for shard in self._waiting():
            if now - shard.round.open_since >= self._limits.explain_after_s:
                subject, missing = self._lacks(shard)
                waiters = [one.member for one in shard.round.slots.values()]
                waiters += [pull.member for pull in shard.round.pulls]
                for member in waiters:
                    hints.setdefault(member, Waiting(subject, missing, now - shard.round.open_since))
        return [Send(member, hint) for member, hint in hints.items()]

    def explain(self, now: float) -> str | None:
        """The oldest open round, and who is missing in it."""
        shard = min(self._waiting(), key=lambda shard: shard.round.open_since, default=None)
        if shard is None:
            return None
        subject, missing = self._lacks(shard)
        names = ", ".join(f"worker-{rank}" for rank in missing)
        return f"{subject} has waited {now - shard.round.open_since:.1f} s for {names}"

    def validate(self) -> None:
        """Check every invariant."""
        assert not self._answers and not self._values, "answers leave with the message that caused them"
        for shard in self.shards.values():
            shard.validate(self.workers.keys())

    # Inside.

    def _known(self, sender: Member, runs: U32, ids: U32) -> Iterator[tuple[int, RowShard]]:
        for i, number in enumerate(ids.tolist()):
            shard = self.shards.get(number)
            if shard is None:
                self._refuse(sender, int(runs[i]), number, f"slice {number} is no table of {self._name}")
            else:
                yield i, shard

    def _obstacle(self, sender: Member, run: int, shard: RowShard, ids: Ids, values: Bits) -> str:
        """Why this part of a run cannot be taken, nor any later one; '' if it can."""
        block = shard.block
        if shard.is_spoilt(sender.node.rank, run):
            return f"key {shard.key!r}: an earlier part of the same rows was refused"
        if values.dtype != block.dtype.storage or len(values) != len(ids) * block.row_length:
            obstacle = f"key {shard.key!r}: {len(ids)} rows of another size or dtype than was declared"
        else:
            obstacle = shard.obstacle_to(ids)
        if obstacle:
            shard.spoil(sender.node.rank, run)
        return obstacle

    def _close_if_ready(self, shard: RowShard) -> None:
        optimizer = self._optimizers.get(self._store_of[shard.number])
        while shard.is_ready(self.workers.keys()):
            contributions = shard.round.take()
            try:
                shard.apply(contributions, optimizer)
            except (OptimizerMismatch, PushRefused) as error:
                is_mismatch = isinstance(error, OptimizerMismatch)
                code = ErrorCode.OPTIMIZER_MISMATCH if is_mismatch else ErrorCode.REFUSED
                for one in contributions:
                    self._refuse(one.member, one.run, shard.number, str(error), code)
            else:
                for one in contributions:
                    self._traffic.summed += sum(values.nbytes for _, values in one.parts)
                    self._to(one.member).counted(one.run, shard.ids, shard.version, Outcome.COUNTED)
            if self._cuts.awaited:
                self._cuts.look([shard.number], self.workers)
        self._answer_pulls(shard)

    def _answer_pulls(self, shard: RowShard) -> None:
        for pull in shard.take_satisfied_pulls():
            try:
                answer = self._gathered(shard, pull)
            except MemoryError:
                reason = f"key {shard.key!r}: {self._name} has no memory for an answer of {len(pull.ids)} rows"
                self._refuse(pull.member, pull.run, shard.number, f"{reason}: pull fewer at once")
            else:
                self._values.append((pull.member, *answer))

    def _gathered(self, shard: RowShard, pull: RowPull) -> tuple[RowBuffer, RowValues]:
        """The answer to a pull: one pass over its rows."""
        block = shard.block
        count = len(pull.ids) * block.row_length
        nbytes = count * block.dtype.itemsize
        buffer = self._buffer(padded(nbytes))
        payload = buffer.memory[: padded(nbytes)]
        block.gather(pull.ids, payload[:nbytes].view(block.dtype.storage))
        payload[nbytes:] = 0
        buffer.leases += 1
        self._traffic.joined += nbytes
        arrays = Arrays(_u8(block.dtype), _u32(count), payload.data)
        return buffer, RowValues(_u32(pull.run), _u32(shard.number), _u32(shard.version), arrays)

    def _buffer(self, nbytes: int) -> RowBuffer:
        """Memory that nobody reads, of at least so many bytes and not much more."""
        free = [buffer for buffer in self._buffers if buffer.leases == 0]
        sizes = range(nbytes, 4 * nbytes + BUFFER_UNIT_BYTES + 1)
        found = next((buffer for buffer in free if len(buffer.memory) in sizes), None)
        if found is None:
            found = RowBuffer(self._allocate(max(1, -(-nbytes // BUFFER_UNIT_BYTES)) * BUFFER_UNIT_BYTES))
            self._buffers.append(found)
        others = [buffer for buffer in free if buffer is not found]
        for buffer in others[: max(0, len(self._buffers) - BUFFERS_KEPT_MAX)]:
            self._buffers.remove(buffer)
        return found

    def _waiting(self) -> list[RowShard]:
        return [shard for shard in self.shards.values() if not shard.round.is_quiet]

    def _lacks(self, shard: RowShard) -> tuple[str, tuple[int, ...]]:
        """What those who wait for a table wait for, and whose it is."""
        if not shard.has_value:
            return f"the first values of key {shard.key!r}", (min(self.workers, default=0),)
        if shard.round.slots:
            missing = shard.round.missing(self.workers.keys())
        else:  # who pulls waits for what it has pushed itself
            missing = tuple(sorted({pull.member.node.rank for pull in shard.round.pulls}))
        return f"round {shard.version} of key {shard.key!r}", missing

    def _refuse(self, member: Member, run: int, number: int, reason: str, code: ErrorCode = ErrorCode.REFUSED) -> None:
        self._to(member).refuse(run, _u32(number), code, reason)

    def _to(self, member: Member) -> Answers:
        answers = self._answers.get(member)
        if answers is None:
            answers = self._answers[member] = Answers()
        return answers

    def _is_here(self, member: Member) -> bool:
        return self.workers.get(member.node.rank) == member


def _u32(number: int) -> U32:
    return np.array([number], np.uint32)


def _u8(number: int) -> npt.NDArray[np.uint8]:
    return np.array([number], np.uint8)
