"""The slices of a server as arrays in a file, and back, for servers that cut the keys differently.

Each slice is stored separately: weight, states and master as 1-D arrays, named by the key and the range of elements. A
reader takes the overlapping parts for each of its slices, so any number of servers can read the files of any other
number. Values are copied, not computed, so their bits are the same.

Of a slice of a lazy table only existing rows are stored, ordered by id, beside their ids. Other rows still have their
initial value.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.checkpoint.files import require_intact, require_present
from kvdist.checkpoint.format import Tensor, TensorFile, read_manifest, write_tensors
from kvdist.checkpoint.snapshot import (
    DROPPED_STATE,
    STATES,
    WEIGHTS,
    Bits,
    FileRecord,
    Ids,
    Manifest,
    SliceImage,
    WantedSlice,
)
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError
from kvdist.naming import name_of
from kvdist.optimizer.initializer import initializer_from
from kvdist.optimizer.states import SliceState

WEIGHT, MASTER, INDICES = "weight", "master", "indices"
SLICES = "kvdist.slices"
"""Metadata of a file: description of each of its slices beside the arrays."""
SAMPLES = "kvdist.samples"
"""Metadata of a file: number of examples behind each of its slices, if any number is known."""
RUN, STEP = "kvdist.run", "kvdist.step"
"""Metadata of a file: the checkpoint for which it was written. Files of older versions lack both."""


def write_slices(folder: Path, stem: str, slices: Sequence[SliceImage], run: str, step: int) -> FileRecord:
    """Write the file of a server for this step of this run.

    Raises:
        CheckpointError, OSError: as in `write_tensors`.
    """
    tensors = [tensor for one in slices for tensor in _tensors(one)]
    described = [_described(one) for one in slices]
    metadata = {SLICES: json.dumps(described), RUN: run, STEP: str(step), "format": "kvdist"}
    if any(one.samples for one in slices):
        metadata[SAMPLES] = json.dumps([one.samples for one in slices])
    return write_tensors(folder, stem, tensors, metadata)


def _described(one: SliceImage) -> list[Any]:
    updates, scalars = (0, ()) if one.state is None else (one.state.count, one.state.scalars)
    entry = [one.key, one.start, one.count, one.version, updates, list(scalars), list(one.states)]
    return entry if one.ids is None else [*entry, one.initializer]


def _tensors(one: SliceImage) -> Iterator[Tensor]:
    name = _name(one.key, one.start, one.count)
    if one.ids is not None:
        yield _tensor(f"{name}/{INDICES}", DType.INT64, one.ids)
    if one.weight is not None:
        yield _tensor(f"{name}/{WEIGHT}", one.dtype, one.weight)
    for state, bits in one.states.items():
        yield _tensor(f"{name}/{STATES}/{state}", one.dtype.of_states, bits)
    if one.state is not None and one.state.master is not None:
        yield _tensor(f"{name}/{MASTER}", one.dtype.of_states, one.state.master)


def _tensor(name: str, dtype: DType, bits: Bits) -> Tensor:
    return Tensor(name, dtype, (bits.size,), lambda: bits)


def _name(key: int | str, start: int, count: int) -> str:
    return f"{json.dumps(key, ensure_ascii=False)}[{start}:{start + count}]"


@dataclass(frozen=True, slots=True)
class _Piece:
    """A saved slice in a file."""

    file: TensorFile
    name: str
    start: int
    stop: int
    version: int
    updates: int
    scalars: tuple[float, ...]
    states: tuple[str, ...]
    initializer: str = ""
    """Initializer of a lazy table; '' otherwise."""
    samples: int = 0
    """Number of examples behind the value."""

    def ids(self, row: int) -> Ids:
        """Return the ids of the existing rows, of `row` elements each.

        Raises:
            CheckpointError: the ids are outside the slice, or not ascending.
        """
        found = np.empty(self.num_rows, np.int64)
        self.file.read_into(f"{self.name}/{INDICES}", 0, found)
        ends = (self.start // row, self.stop // row)
        if len(found) and (found[0] < ends[0] or found[-1] >= ends[1] or not (found[1:] > found[:-1]).all()):
            raise CheckpointError(
                f"{self.file.path} is damaged: the rows of {self.name} do not ascend from {ends[0]} to {ends[1] - 1}"
            )
        return found

    @property
    def num_rows(self) -> int:
        """Number of existing rows of a lazy table."""
        entry = self.file.entries.get(f"{self.name}/{INDICES}")
        if entry is None:
            raise CheckpointError(f"{self.file.path} is damaged: it does not say which rows of {self.name} it has")
        return entry.size


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of a piece for a result: `count` elements of the weight, from `begin` in the piece to `at` in the result."""

    piece: _Piece
    begin: int
    at: int
    count: int


class Shards:
    """All files with arrays of a checkpoint. The checksum of a file is compared before an array of it is read.

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest.

    Raises:
        CheckpointError: a file is missing or cut off, was not written by a server, or belongs to another checkpoint.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._unverified = {folder / record.name: record for record in manifest.shards}
        self._pieces: dict[int | str, list[_Piece]] = {}
        for path, record in list(self._unverified.items()):
            require_present(folder, record)
            try:
                file = TensorFile(path)
                manifest.require_part(path, file.metadata.get(RUN), file.metadata.get(STEP))
                for piece, key in _pieces(file):
                    self._pieces.setdefault(key, []).append(piece)
            except CheckpointError:
                self._verify(path)  # a damaged file is the more useful error
                raise
        for pieces in self._pieces.values():
            pieces.sort(key=lambda piece: piece.start)

    def verify(self) -> None:
        """Compare the checksums of all files now, instead of at the first read of each file.

        Raises:
            CheckpointError: a file is damaged.
        """
        for path in list(self._unverified):
            self._verify(path)

    def _verify(self, path: Path) -> None:
        record = self._unverified.pop(path, None)
        if record is not None:
            require_intact(self._folder, record)

    def read(self, wanted: WantedSlice, contents: Sequence[str]) -> SliceImage:
        """Read a slice.

        Raises:
            CheckpointError: the files lack a part of it, or a file is damaged.
        """
        try:
            pieces = self._covering(wanted)
        except CheckpointError:
            self.verify()  # the names of slices may be damaged
            raise
        for piece in pieces:
            self._verify(piece.file.path)
            if bool(piece.initializer) is not bool(wanted.lazy_row):
                kinds = ("whole", "a lazy table")
                is_lazy = bool(wanted.lazy_row)
                raise CheckpointError(
                    f"{piece.file.path} has {name_of(wanted.key)} as {kinds[not is_lazy]}, which is"
                    f" {kinds[is_lazy]} here"
                )
        parts, ids = _lazy_parts(wanted, pieces) if wanted.lazy_row else (_parts(wanted, pieces), None)
        size = wanted.count if ids is None else len(ids) * wanted.lazy_row
        has_state = STATES in contents and wanted.has_state
        return SliceImage(
            wanted.number,
            wanted.key,
            wanted.start,
            wanted.count,
            wanted.dtype,
            max(piece.version for piece in pieces),
            _gathered(parts, WEIGHT, size, wanted.dtype.storage) if WEIGHTS in contents else None,
            has_state,
            self._state(wanted, pieces, parts, size) if has_state else None,
            wanted.state_names,
            ids,
            pieces[0].initializer,
            max(piece.samples for piece in pieces),
        )

    def whole(self, key: int | str, size: int, dtype: DType) -> Bits:
        """Return all elements of a key."""
        weight = self.read(WantedSlice(0, key, 0, size, dtype), (WEIGHTS,)).weight
        assert weight is not None
        return weight

    def rows(self, key: int | str, size: int, row: int, dtype: DType, contents: Sequence[str]) -> SliceImage:
        """Read a lazy table of `size` elements, with `row` elements a row: the ids and these contents of its existing
        rows."""
        return self.read(WantedSlice(0, key, 0, size, dtype, lazy_row=row), contents)

    def num_rows(self, key: int | str) -> int:
        """Return the number of existing rows of a lazy table. Reads only headers.

        Raises:
            CheckpointError: the key is not a lazy table in some file.
        """
        return sum(piece.num_rows for piece in self._pieces.get(key, []))

    def initializer(self, key: int | str) -> str:
        """Return the initializer of a lazy table, for rows that do not exist."""
        return next((piece.initializer for piece in self._pieces.get(key, [])), "")

    def _covering(self, wanted: WantedSlice) -> list[_Piece]:
        """Return the pieces that cover a slice, in order; each element is in a single piece."""
        position, stop = wanted.start, wanted.stop
        pieces = self._pieces.get(wanted.key, [])
        # An empty key has one empty slice.
        found = [one for one in pieces if (one.start < stop and position < one.stop) or wanted.count == 0]
        for piece in found:
            if piece.start < position and piece is not found[0]:
                raise CheckpointError(f"{self._folder} has element {piece.start} of {name_of(wanted.key)} twice")
            if piece.start > position:
                break
            position = piece.stop
        if position < stop or not found:
            raise CheckpointError(
                f"{self._folder} has no element {position} of {name_of(wanted.key)}: a file of a server is not in it"
            )
        return found

    def _state(
        self, wanted: WantedSlice, pieces: Sequence[_Piece], parts: Sequence[_Part], size: int
    ) -> SliceState | None:
        """Return the state of a slice; None if it was never updated."""
        updated = [piece for piece in pieces if piece.updates]
        if not updated:
            return None
        having = [part for part in parts if part.piece.updates]
        if len(having) < len(parts) and wanted.from_weight:
            raise CheckpointError(
                f"some of {name_of(wanted.key)} was never updated, in an asynchronous store, and other parts of it lie"
                " on the same server now: load it with as many servers as it was saved with"
            )
        for piece in updated:
            if piece.states not in (wanted.state_names, (*wanted.state_names, DROPPED_STATE)):
                raise CheckpointError(
                    f"{piece.file.path} has states {', '.join(piece.states) or 'none'} of {name_of(wanted.key)}, where"
                    f" the optimizer has {', '.join(wanted.state_names) or 'none'}"
                )
        accumulate, row = wanted.dtype.accumulate, wanted.row
        ends = [wanted.start, wanted.stop, *(end for piece in pieces for end in (piece.start, piece.stop))]
        if any(end % row for end in ends):
            raise CheckpointError(
                f"{name_of(wanted.key)} is cut within its rows, in {self._folder} or in this store, and its states are"
                " by rows: call set_optimizer before init, so that it is cut between rows"
            )

        names = (f"{STATES}/{name}" for name in wanted.state_names)
        arrays = tuple(_gathered(having, name, size, accumulate, row) for name in names)
        master = _gathered(having, MASTER, size, accumulate) if wanted.has_master else None
        # Slices of a key have had the same number of updates; in asynchronous stores the highest number counts.
        newest = max(updated, key=lambda piece: piece.updates)
        return SliceState(newest.updates, arrays, newest.scalars, master)


def _parts(wanted: WantedSlice, pieces: Sequence[_Piece]) -> list[_Part]:
    """Return the parts of these pieces that make up a slice."""
    parts = []
    for piece in pieces:
        start, stop = max(piece.start, wanted.start), min(piece.stop, wanted.stop)
        if start < stop:
            parts.append(_Part(piece, start - piece.start, start - wanted.start, stop - start))
    return parts


def _lazy_parts(wanted: WantedSlice, pieces: Sequence[_Piece]) -> tuple[list[_Part], Ids]:
    """Return the parts that make up a slice of a lazy table, of existing rows only, and the ids of these rows."""
    row = wanted.lazy_row
    ends = [wanted.start, wanted.stop, *(end for piece in pieces for end in (piece.start, piece.stop))]
    if any(end % row for end in ends):
        raise CheckpointError(f"{pieces[0].file.path} is damaged: {name_of(wanted.key)} is cut within a row")
    if len({piece.initializer for piece in pieces}) > 1:
        raise CheckpointError(
            f"the files disagree on the initial value of the rows of {name_of(wanted.key)}: a file is damaged"
        )
    parts, found, at = [], [np.zeros(0, np.int64)], 0
    for piece in pieces:
        ids = piece.ids(row)
        begin, end = np.searchsorted(ids, (wanted.start // row, wanted.stop // row)).tolist()
        if begin < end:
            parts.append(_Part(piece, begin * row, at, (end - begin) * row))
            found.append(ids[begin:end])
            at += (end - begin) * row
    return parts, np.concatenate(found)


def _gathered(parts: Sequence[_Part], what: str, size: int, dtype: Any, row: int = 1) -> Bits:
    """Assemble an array of `size` elements, or of an element for each `row` of them, from its parts."""
    out: Bits = np.zeros(size // row, dtype)  # the initial value of states, for missing parts
    for part in parts:
        low, high = part.at // row, (part.at + part.count) // row
        part.piece.file.read_into(f"{part.piece.name}/{what}", part.begin // row, out[low:high])
    return out


def updates_in(folder: Path) -> int:
    """Return the most updates of any slice of a checkpoint. Reads only headers.

    Raises:
        CheckpointError: a file is not readable.
    """
    return max((piece.updates for piece in _all_pieces(folder)), default=0)


def samples_in(folder: Path) -> int:
    """Return the most examples behind any slice of a checkpoint. Reads only headers.

    Raises:
        CheckpointError: a file is not readable.
    """
    return max((piece.samples for piece in _all_pieces(folder)), default=0)


def _all_pieces(folder: Path) -> Iterator[_Piece]:
    for record in read_manifest(folder).shards:
        for piece, _ in _pieces(TensorFile(folder / record.name)):
            yield piece


def _pieces(file: TensorFile) -> Iterator[tuple[_Piece, int | str]]:
    try:
        described = json.loads(file.metadata[SLICES])
        totals = json.loads(file.metadata[SAMPLES]) if SAMPLES in file.metadata else [0] * len(described)
        for entry, samples in zip(described, totals, strict=True):
            key, start, count, version, updates, scalars, states, *lazy = entry
            if any(type(number) is not int or number < 0 for number in (start, count, version, updates, samples)):
                raise ValueError(f"a number of a slice of key {key!r:.80} is not a count")
            if type(key) not in (int, str):
                raise ValueError(f"a key {key!r:.80}")
            numbers = start, start + count, version, updates
            kept = (tuple(map(float, scalars)), tuple(states))
            (begins,) = (initializer_from(text).describe() for text in lazy) if lazy else ("",)
            yield _Piece(file, _name(key, start, count), *numbers, *kept, begins, samples), key
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{file.path} is damaged: its slices are not readable ({error})") from None
