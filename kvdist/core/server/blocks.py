"""`Blocks`: which block each slice of a server is in, found for whole messages in a few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvdist.core.server.block import Block
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.arrays import U8, U32, Arrays
from kvdist.protocol.messages import Flag

# A plain number: operators of enums are written in Python.
_EMPTY = int(Flag.EMPTY)

SLICES_MAX = 1024
"""Of one block: cutting off one slice after the other costs the square of it."""
BlockRows = tuple[int, int, Block]
"""(begin, end, block): the rows of a message that are all slices of a block, in order."""


class Blocks:
    """All blocks of a server. Each slice is in one.

    Args:
        bytes_max: the most that blocks of several slices have.
        updater_of: what updates a store, by its number; None while a sum replaces values.
    """

    def __init__(self, bytes_max: int, updater_of: Callable[[int], SliceUpdater | None]) -> None:
        self._bytes_max = bytes_max
        self._updater_of = updater_of
        self._all: dict[int, Block] = {}
        """By the number in `_block`."""
        self._next = 0
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Elements of each slice; -1 for one that is not kept here."""
        self._dtypes: U8 = np.zeros(0, np.uint8)
        self._block: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._position: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Of each slice in its block."""

    def __iter__(self) -> Iterator[Block]:
        """A snapshot: blocks may be split or merged on the way."""
        return iter(list(self._all.values()))

    def __contains__(self, number: int) -> bool:
        return number < len(self._counts) and bool(self._counts[number] >= 0)

    def has_room_for(self, nbytes: int, slices: int) -> bool:
        """Whether a block of several slices may have so many bytes and slices."""
        return nbytes <= self._bytes_max and slices <= SLICES_MAX

    def of(self, number: int) -> tuple[Block, int]:
        """The block of a slice that is kept here, and its position there."""
        return self._all[int(self._block[number])], int(self._position[number])

    def add(self, block: Block) -> None:
        """Its slices are in no other block."""
        size = len(self._counts)
        last = int(block.ids.max())
        if last >= size:  # the tables at least double, or each init would copy them
            more = max(last + 1 - size, size)
            self._counts = np.concatenate([self._counts, np.full(more, -1, np.int64)])
            self._dtypes = np.concatenate([self._dtypes, np.zeros(more, np.uint8)])
            self._block = np.concatenate([self._block, np.zeros(more, np.int64)])
            self._position = np.concatenate([self._position, np.zeros(more, np.int64)])
        self._counts[block.ids] = block.counts
        self._dtypes[block.ids] = block.dtype
        self._enter(block)

    def _enter(self, block: Block) -> None:
        self._all[self._next] = block
        self._block[block.ids] = self._next
        self._position[block.ids] = np.arange(len(block))
        self._next += 1

    # Whether a message is right.

    def fit(self, ids: U32, arrays: Arrays | None) -> bool:
        """Whether all of these are plainly right: the usual case, in few calls."""
        if int(ids.max()) >= len(self._counts):
            return False
        expected = self._counts[ids]
        if arrays is None:
            return bool((expected >= 0).all())
        return bool((expected == arrays.counts).all() and (self._dtypes[ids] == arrays.dtypes).all())

    def misfits(self, ids: U32, arrays: Arrays | None, flags: U8 | None) -> Iterator[tuple[int, bool]]:
        """Those that are wrong: (row, whether the slice is kept here at all).

        An empty contribution has no array to look at.

        Args:
            ids: slices.
            arrays: what came for them, if anything.
            flags: of contributions.
        """
        inside = ids < len(self._counts)
        within = np.where(inside, ids, 0)
        expected = np.where(inside, self._counts[within], -1) if len(self._counts) else np.full(len(ids), -1)
        good = expected >= 0
        if arrays is not None and good.any():
            fits = (arrays.counts == expected) & (arrays.dtypes == self._dtypes[within])
            if flags is not None:
                fits |= (flags & _EMPTY).astype(bool)
            good &= fits
        for i in np.flatnonzero(~good).tolist():
            yield i, bool(expected[i] >= 0)

    # Blocks for a message.

    def cover(self, ids: U32, *columns: npt.NDArray[np.generic]) -> list[BlockRows]:
        """The rows of a message as whole blocks, which are split where they have to be.

        Args:
            ids: slices that are kept here, each once.
            columns: what must be equal for all rows of a block.
        """
        return self._cover(ids, _changes(columns, len(ids)))

    def cover_merged(self, ids: U32, *columns: npt.NDArray[np.generic]) -> list[BlockRows]:
        """As `cover`, but that neighbours merge where they may."""
        changes = _changes(columns, len(ids))
        rows = self._cover(ids, changes)
        return rows if len(rows) < 2 or changes.all() else self._merge(rows, changes)

    def isolate(self, ids: U32) -> list[Block]:
        """A block for each of these slices, each named once."""
        return [block for _, _, block in self._cover(ids, np.ones(max(len(ids) - 1, 0), np.bool_))]

    def _cover(self, ids: U32, changes: npt.NDArray[np.bool_]) -> list[BlockRows]:
        if not len(ids):
            return []
        numbers, positions = self._block[ids], self._position[ids]
        breaks = changes | (numbers[1:] != numbers[:-1]) | (positions[1:] != positions[:-1] + 1)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(ids)]
        found = [(begin, end, self._all[number]) for begin, end, number in _firsts(bounds, numbers)]
        cuts: dict[int, set[int]] = {}
        for begin, end, block in found:
            if end - begin < len(block):
                first = int(positions[begin])
                cuts.setdefault(int(numbers[begin]), {0, len(block)}).update((first, first + end - begin))
        if not cuts:
            return found
        for number, cut in cuts.items():
            self._split(number, sorted(cut))
        return [(begin, end, self._all[number]) for begin, end, number in _firsts(bounds, self._block[ids])]

    def _split(self, number: int, bounds: Sequence[int]) -> None:
        block = self._all[number]
        parts = block.split(bounds, self._updater_of(block.store))
        del self._all[number]
        for part in parts:
            self._enter(part)

    def _merge(self, rows: Sequence[BlockRows], changes: npt.NDArray[np.bool_]) -> list[BlockRows]:
        merged: list[BlockRows] = []
        run: list[BlockRows] = []
        nbytes = slices = 0
        for one in rows:
            begin, _, block = one
            fits = bool(run) and self.has_room_for(nbytes + block.nbytes, slices + len(block))
            if fits and not changes[begin - 1] and run[-1][2].may_merge(block):
                run.append(one)
                nbytes, slices = nbytes + block.nbytes, slices + len(block)
                continue
            merged += self._merged(run)
            run, nbytes, slices = [one], block.nbytes, len(block)
        return merged + list(self._merged(run))

    def _merged(self, run: Sequence[BlockRows]) -> Sequence[BlockRows]:
        if len(run) < 2:
            return run
        blocks = [block for _, _, block in run]
        updater = self._updater_of(blocks[0].store)
        if updater is not None and not updater.joinable(blocks):
            return run
        try:
            whole = Block.merged(blocks, updater)
        except MemoryError:
            return run  # they do as well apart
        for block in blocks:
            del self._all[int(self._block[block.ids[0]])]
        self._enter(whole)
        return [(run[0][0], run[-1][1], whole)]


def _firsts(bounds: Sequence[int], numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """(begin, end, number of the first row) between these bounds."""
    return zip(bounds[:-1], bounds[1:], numbers[bounds[:-1]].tolist(), strict=True)


def _changes(columns: Sequence[npt.NDArray[np.generic]], rows: int) -> npt.NDArray[np.bool_]:
    """(rows - 1,) whether any column differs from the row before."""
    changes = np.zeros(max(rows - 1, 0), np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return changes
