"""One push for all workers of a host: how its leader makes it, and how a server takes it apart again.

Contributions that agree in settings and flags are summed in rank order, and the sum stands in the row of the lowest
rank that has a gradient; the rows of the others are *carried*. Halves are not summed here, because the sum of a host
would be rounded, or overflow, where that of all workers is not: each row has its own bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdist.core.host_sum import HostRound, Share
from kvdist.core.round import Setting, setting_of
from kvdist.core.server.block import Block, Contribution
from kvdist.core.server.buffers import Allocate, Bits
from kvdist.core.traffic import Traffic
from kvdist.core.worker.outbox import SETTINGS_PER_MESSAGE_MAX, Ready
from kvdist.core.worker.requests import ALONE_BYTES_MIN
from kvdist.dtypes import DType
from kvdist.errors import PushRefused
from kvdist.kernels.interface import Kernels
from kvdist.nodes import Member
from kvdist.protocol.arrays import Arrays, PayloadView, offsets, padded, stretches
from kvdist.protocol.messages import Flag, JoinedPush

ROWS_PER_MESSAGE_MAX = 1 << 16
"""So that the columns of a message stay far below the longest header."""
_EMPTY, _CARRIED = int(Flag.EMPTY), int(Flag.CARRIED)
_NAN = float("nan")


@dataclass(slots=True, eq=False)
class _Row:
    """One worker's contribution to a slice, as it travels."""

    number: int
    run: int
    """The leader's."""
    share: Share
    flags: int
    parts: list[Bits]
    """What is summed into its bytes; nothing for an empty or carried one."""

    @property
    def count(self) -> int:
        return self.parts[0].size if self.parts else 0


@dataclass(slots=True, eq=False)
class _Batch:
    """Rows of small slices that leave together."""

    rows: list[_Row] = field(default_factory=list)
    nbytes: int = 0
    settings: set[Setting] = field(default_factory=set)

    def has_room_for(self, rows: Sequence[_Row], nbytes_max: int) -> bool:
        settings = self.settings.union(row.share.setting for row in rows)
        fits = self.nbytes + _nbytes(rows) <= nbytes_max and len(self.rows) + len(rows) <= ROWS_PER_MESSAGE_MAX
        return fits and len(settings) <= SETTINGS_PER_MESSAGE_MAX

    def add(self, rows: Sequence[_Row]) -> None:
        self.rows += rows
        self.nbytes += _nbytes(rows)
        self.settings.update(row.share.setting for row in rows)


class Joiner:
    """Makes joined pushes of full rounds.

    Args:
        me: the leader.
        kernels: what sums.
        allocate: gives the memory from which sums are sent.
        join_bytes_max: small slices travel together up to this size.
        payload_bytes_max: the most that a message may have.
        traffic: where passes are counted.
    """

    def __init__(
        self,
        me: Member,
        kernels: Kernels,
        allocate: Allocate,
        join_bytes_max: int,
        payload_bytes_max: int,
        traffic: Traffic,
    ) -> None:
        self._me = me
        self._kernels = kernels
        self._allocate = allocate
        self._join_bytes_max = join_bytes_max
        self._payload_bytes_max = payload_bytes_max
        self._traffic = traffic

    def fits(self, host_round: HostRound) -> bool:
        """Whether one message can carry the slice: not when many rows of a large one have bytes of their own."""
        if sum(padded(share.values.nbytes) for share in host_round.shares.values()) <= self._payload_bytes_max:
            return True  # whatever can be summed
        return _nbytes(self._rows(host_round)) <= self._payload_bytes_max

    def join(self, rounds: Iterable[HostRound]) -> Iterator[Ready]:
        """As few messages as there may be: small slices together, a large one alone, so that sums and sends overlap."""
        batches: dict[tuple[int, bool, int], _Batch] = {}
        for host_round in rounds:
            own = host_round.shares[self._me.node.rank].own
            assert own is not None
            pull = any(share.pull for share in host_round.shares.values())
            key = (own.data.plan.server, pull, own.priority)
            rows = self._rows(host_round)
            if _nbytes(rows) >= ALONE_BYTES_MIN:
                yield self._ready(key, rows)
                continue
            batch = batches.setdefault(key, _Batch())
            if batch.rows and not batch.has_room_for(rows, self._join_bytes_max):
                yield self._ready(key, batch.rows)
                batch = batches[key] = _Batch()
            batch.add(rows)
        for key, batch in batches.items():
            yield self._ready(key, batch.rows)

    def _rows(self, host_round: HostRound) -> list[_Row]:
        run = host_round.shares[self._me.node.rank].run
        rows: list[_Row] = []
        carriers: dict[object, _Row] = {}
        for rank in sorted(host_round.shares):
            share = host_round.shares[rank]
            row = _Row(host_round.number, run, share, share.flags, [])
            rows.append(row)
            if share.flags & _EMPTY:
                continue
            dtype = DType(share.dtype)
            alone = rank if dtype.accumulate != dtype.storage else -1
            carrier = carriers.setdefault((share.flags, share.setting, dtype, share.values.size, alone), row)
            carrier.parts.append(share.values)
            if carrier is not row:
                row.flags |= _CARRIED
        return rows

    def _ready(self, key: tuple[int, bool, int], rows: Sequence[_Row]) -> Ready:
        server, pull, priority = key
        settings = {setting: i for i, setting in enumerate(dict.fromkeys(row.share.setting for row in rows))}
        shares = [row.share for row in rows]
        arrays = self._summed(rows)
        message = JoinedPush(
            pull=pull,
            runs=np.array([row.run for row in rows], np.uint32),
            ids=np.array([row.number for row in rows], np.uint32),
            ranks=np.array([share.member.node.rank for share in shares], np.uint32),
            steps=np.array([share.step for share in shares], np.uint32),
            versions=np.array([share.version for share in shares], np.uint32),
            samples=np.array([share.samples for share in shares], np.uint32),
            flags=np.array([row.flags for row in rows], np.uint8),
            settings=tuple(_numbers(setting) for setting in settings),
            setting_of=np.array([settings[share.setting] for share in shares], np.uint8),
            arrays=arrays,
        )
        members = tuple(dict.fromkeys(share.member for share in shares))
        return Ready(server, priority, message, arrays.nbytes, members)

    def _summed(self, rows: Sequence[_Row]) -> Arrays:
        """The bytes of all rows in one stretch of memory: one pass over what is summed."""
        dtypes = np.array([row.share.dtype for row in rows], np.uint8)
        counts = np.array([row.count for row in rows], np.uint32)
        starts, total = offsets(dtypes, counts)
        memory = self._allocate(total)
        for row, start in zip(rows, starts.tolist(), strict=True):
            if not row.parts:
                continue
            dtype = DType(row.share.dtype)
            stop = start + row.count * dtype.itemsize
            target = memory[start:stop].view(dtype.storage)
            self._kernels.weighted_sum(row.parts, [1.0] * len(row.parts), dtype, target)
            memory[stop : start + padded(stop - start)] = 0
            self._traffic.summed += len(row.parts) * (stop - start)
        return Arrays(dtypes, counts, memory.data if total else b"")


def _nbytes(rows: Sequence[_Row]) -> int:
    return sum(padded(row.parts[0].nbytes) for row in rows if row.parts)


def _numbers(setting: Setting) -> tuple[float, float, float]:
    lr, wd, rescale = (_NAN if number is None else number for number in setting)
    return lr, wd, rescale


@dataclass(frozen=True, slots=True, eq=False)
class JoinedSlice:
    """The contributions of a host to one slice."""

    number: int
    run: int
    """The run of the sender, who is answered."""
    contributions: Sequence[Contribution]
    strangers: Sequence[int]
    """Ranks for which the sender may not speak."""
    counts: Sequence[int]
    """Elements of each row that has bytes."""
    dtypes: Sequence[int]


def slices_of(sender: Member, message: JoinedPush, neighbours: Mapping[int, Member]) -> Iterator[JoinedSlice]:
    """A joined push, slice by slice.

    Args:
        sender: the leader of a host.
        message: what it said.
        neighbours: rank → worker of that host, those that have left among them.

    Raises:
        ValueError: the payload is not as long as the message says.
    """
    arrays = PayloadView(message.arrays).arrays(0, len(message.ids))
    settings = [setting_of(numbers) for numbers in message.settings]
    columns = (message.ranks, message.steps, message.versions, message.samples, message.flags, message.setting_of)
    ranks, steps, versions, samples, flags, setting = (column.tolist() for column in columns)
    codes = message.arrays.dtypes.tolist()
    for begin, end in stretches(message.ids):
        run = int(message.runs[begin])
        rows = range(begin, end)
        contributions = [
            Contribution(
                neighbours[ranks[i]], run, steps[i], versions[i], samples[i], flags[i], settings[setting[i]], arrays[i],
                message.pull, silent=neighbours[ranks[i]] != sender,
            )
            for i in rows
            if ranks[i] in neighbours
        ]  # fmt: skip
        strangers = [ranks[i] for i in rows if ranks[i] not in neighbours]
        with_bytes = [i for i in rows if not flags[i] & (_EMPTY | _CARRIED)]
        yield JoinedSlice(
            int(message.ids[begin]),
            run,
            contributions,
            strangers,
            [arrays[i].size for i in with_bytes],
            [codes[i] for i in with_bytes],
        )


def require_takable(joined: JoinedSlice, block: Block) -> None:
    """Refuse contributions of a host that cannot be taken for a block of one slice.

    Raises:
        PushRefused: the sender is broken.
    """
    obstacle = ""
    if joined.strangers or not any(not contribution.silent for contribution in joined.contributions):
        names = ", ".join(f"worker-{rank}" for rank in joined.strangers) or "others only"
        obstacle = f"the sender speaks for {names}, and may speak for itself and the workers of its host"
    elif len({contribution.member for contribution in joined.contributions}) < len(joined.contributions):
        obstacle = f"slice {joined.number} has two contributions of one worker"
    elif block.round.policy.close is not None:
        obstacle = f"key {block.key!r} is asynchronous: its contributions are applied one by one, not summed on the way"
    elif any(count != block.pool.size for count in joined.counts) or any(code != block.dtype for code in joined.dtypes):
        obstacle = f"slice {joined.number} has another size or dtype than was declared"
    if obstacle:
        raise PushRefused(obstacle)
