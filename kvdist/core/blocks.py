"""`Blocks`: which block each slice of a server is in, found for whole messages in a few calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvdist.core.block import Block
from kvdist.optimizer.interface import SliceUpdater
from kvdist.protocol.arrays import U8, U32, Arrays
from kvdist.protocol.messages import Flag

# A plain number: operators of enums are written in Python.
_EMPTY = int(Flag.EMPTY)

Stretch = tuple[int, int, Block]
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

    def has_room_for(self, nbytes: int) -> bool:
        """Whether a block of several slices may have so many bytes."""
        return nbytes <= self._bytes_max

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

    def parts(self, ids: U32, *columns: npt.NDArray[np.generic]) -> Iterator[tuple[int, int, Block, int]]:
        """The rows of a message as parts of blocks, which are not split: (begin, end, block, position of the first)."""
        breaks = self._breaks(ids) | _changes(columns, len(ids))
        for begin, end in pairwise([0, *(np.flatnonzero(breaks) + 1).tolist(), len(ids)]):
            yield begin, end, *self.of(int(ids[begin]))

    def cover(self, ids: U32, *columns: npt.NDArray[np.generic]) -> Iterator[Stretch]:
        """The rows of a message as whole blocks, which are split where they have to be.

        Args:
            ids: slices that are kept here.
            columns: what must be equal for all rows of a block.
        """
        yield from self._cover(ids, self._breaks(ids) | _changes(columns, len(ids)))

    def cover_merged(self, ids: U32, *columns: npt.NDArray[np.generic]) -> Iterable[Stretch]:
        """As `cover`, but that neighbours merge where they may."""
        changes = _changes(columns, len(ids))
        stretches = self._cover(ids, self._breaks(ids) | changes)
        if changes.all() or len(set(ids.tolist())) < len(ids):
            return stretches
        return self._merge(list(stretches), changes)

    def _breaks(self, ids: U32) -> npt.NDArray[np.bool_]:
        blocks, positions = self._block[ids], self._position[ids]
        breaks: npt.NDArray[np.bool_] = (blocks[1:] != blocks[:-1]) | (positions[1:] != positions[:-1] + 1)
        return breaks

    def _cover(self, ids: U32, breaks: npt.NDArray[np.bool_]) -> Iterator[Stretch]:
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(ids)]
        for begin, end in pairwise(bounds):
            while begin < end:  # once, unless a slice came before and its block has been split since
                block, position = self.of(int(ids[begin]))
                rows = min(end - begin, len(block) - position)
                yield begin, begin + rows, block if rows == len(block) else self._part(block, position, position + rows)
                begin += rows

    def _merge(self, stretches: Sequence[Stretch], changes: npt.NDArray[np.bool_]) -> list[Stretch]:
        merged: list[Stretch] = []
        run: list[Stretch] = []
        nbytes = 0
        for stretch in stretches:
            begin, _, block = stretch
            fits = bool(run) and self.has_room_for(nbytes + block.nbytes) and not changes[begin - 1]
            if fits and run[-1][2].may_merge(block):
                run.append(stretch)
                nbytes += block.nbytes
                continue
            merged += self._merged(run)
            run, nbytes = [stretch], block.nbytes
        return merged + list(self._merged(run))

    def alone(self, number: int) -> Block:
        """The block of this slice and no other."""
        block, position = self.of(number)
        return block if len(block) == 1 else self._part(block, position, position + 1)

    def take_apart(self, block: Block) -> list[Block]:
        """A block for each slice."""
        return [block] if len(block) == 1 else self._split(block, range(len(block) + 1))

    def _part(self, block: Block, begin: int, end: int) -> Block:
        bounds = [0] * (begin > 0) + [begin, end] + [len(block)] * (end < len(block))
        return self._split(block, bounds)[begin > 0]

    def _split(self, block: Block, bounds: Sequence[int]) -> list[Block]:
        del self._all[int(self._block[block.ids[0]])]
        parts = block.split(bounds, self._updater_of(block.store))
        for part in parts:
            self._enter(part)
        return parts

    def _merged(self, run: Sequence[Stretch]) -> Sequence[Stretch]:
        if len(run) < 2:
            return run
        blocks = [block for _, _, block in run]
        updater = self._updater_of(blocks[0].store)
        if updater is not None and not updater.joinable(blocks):
            return run
        for block in blocks:
            del self._all[int(self._block[block.ids[0]])]
        whole = Block.merged(blocks, updater)
        self._enter(whole)
        return [(run[0][0], run[-1][1], whole)]


def _changes(columns: Sequence[npt.NDArray[np.generic]], rows: int) -> npt.NDArray[np.bool_]:
    """(rows - 1,) whether any column differs from the row before."""
    changes = np.zeros(max(rows - 1, 0), np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return changes
