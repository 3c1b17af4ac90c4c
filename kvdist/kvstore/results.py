"""Destinations of the results of a call: the caller's arrays, new arrays, or views of the servers' shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import ALONE_BYTES_MIN, KeyInfo, Plan, Run, RunPlan
from kvdist.dtypes import DType
from kvdist.kvstore import values
from kvdist.kvstore.keys import KeyTable
from kvdist.kvstore.placement import OnDevice, Part, names_gpus
from kvdist.kvstore.values import Keys, Value
from kvdist.protocol.arrays import Bits
from kvdist.protocol.messages import Flag
from kvdist.runtime.node import Finish
from kvdist.transport.shared_memory.allocator import Allocator

if TYPE_CHECKING:
    from kvdist.kvstore.device import DeviceTransfers

PAIRS_COMPARED_MAX = 1 << 20
"""Number of pairs of arrays above which a check for overlaps costs more than a copy of the arrays."""

Shares = Callable[[int], bool]
"""Whether the server of a rank shares memory with this process."""


@dataclass(slots=True)
class PullArgs:
    """Keys and destinations of a pull.

    Attributes:
        infos: the keys.
        results: per key the host memory that takes its result.
        copies: further arrays, each with the result that is copied into it and the type of that result.
        upload: copies results to GPUs; None if no result is wanted on a GPU.
    """

    infos: Sequence[KeyInfo]
    results: list[Bits]
    copies: Sequence[tuple[Any, Bits, DType]] = ()
    upload: Finish | None = None

    @property
    def is_direct(self) -> bool:
        """Whether results need no copy after they have arrived."""
        return not self.copies and self.upload is None

    def part(self, place: slice) -> PullArgs:
        """The memory for the results of some of the keys; without further copies."""
        return PullArgs(self.infos[place], self.results[place])

    def spread(self) -> None:
        """Copy results, which have arrived, to GPUs and to further arrays."""
        if self.upload is not None:
            self.upload()
        for array, bits, dtype in self.copies:
            values.write_bits(array, bits, dtype)


def pull_args(
    keys: KeyTable, key: Keys, out: Value, gpus: Callable[[], DeviceTransfers], skips_rows: bool = False
) -> PullArgs:
    """Keys and destinations of a pull, checked.

    Args:
        keys: the initialised keys.
        key, out: arguments of the user's call.
        gpus: returns the transfers to GPUs; called if a result is wanted on a GPU.
        skips_rows: as of `KeyTable.writable`.

    Raises:
        DeviceError: a GPU cannot be used.
        KeyNotInitialised, TypeError, ValueError: a key or an array is wrong; the message names the key.
    """
    plain = keys.plain_list(key, out, writable=True)
    if plain is not None:
        return PullArgs(plain[0].infos, plain[1])
    matched = keys.writable(values.pairs(key, out), skips_rows)
    infos = [info for info, _ in matched]
    if names_gpus(matched):
        return PullArgs(infos, *gpus().places(matched))
    results: list[Bits] = []
    copies: list[tuple[Any, Bits, DType]] = []
    for info, arrays in matched:
        first = values.writable_bits(arrays[0], info.dtype) if arrays else None
        if first is None or len(arrays) > 1:
            rest = arrays if first is None else arrays[1:]
            first = np.empty(info.size, info.dtype.storage) if first is None else first
            copies += [(array, first, info.dtype) for array in rest]
        results.append(first)
    return PullArgs(infos, results, copies)


def new_results(table: KeyTable, key: Keys) -> tuple[list[KeyInfo], list[Bits], Callable[[], Any]]:
    """For a pull without `out`: the keys, memory for their values, and a function that returns the filled arrays.

    Raises:
        KeyNotInitialised: a key is not known.
    """
    names = values.keys(key)
    order = {one: i for i, one in enumerate(dict.fromkeys(names))}
    infos = [table[one] for one in order]
    results: list[Bits] = [np.empty(info.size, info.dtype.storage) for info in infos]

    def copy(index: int) -> Any:
        return table.like(infos[index], results[index].copy())

    def finish() -> Any:
        arrays = {info.key: table.like(info, bits) for info, bits in zip(infos, results, strict=True)}
        if not isinstance(key, (list, tuple)):
            return arrays[names[0]]
        # A key that is named twice gives two arrays.
        return [arrays.pop(one) if one in arrays else copy(order[one]) for one in names]

    return infos, results, finish


def cut(run: RunPlan, results: Sequence[Bits]) -> list[Bits]:
    """Per slice of a run the stretch of its key's result."""
    if run.whole_keys is not None:
        return [results[index] for index in run.whole_keys]
    return [results[piece.index][piece.start : piece.stop] for piece in run.pieces]


def reaches_another(arrays: Sequence[Sequence[Part]], results: Sequence[Bits]) -> bool:
    """Whether the result of some key is written where the array of another key lies, which must not be lent then.

    Args:
        arrays: per key its contributions.
        results: per key the memory of its result.
    """
    large = [
        (i, part)
        for i, parts in enumerate(arrays)
        for part in parts
        if part.nbytes >= ALONE_BYTES_MIN and not isinstance(part, OnDevice)
    ]
    if not large:
        return False
    if len(large) * len(results) > PAIRS_COMPARED_MAX:
        return True
    sources = np.array([_extent(part) for _, part in large], np.int64).reshape(-1, 2)
    targets = np.array([_extent(result) for result in results], np.int64).reshape(-1, 2)
    meets = (sources[:, None, 0] < targets[None, :, 1]) & (targets[None, :, 0] < sources[:, None, 1])
    keys = np.array([i for i, _ in large], np.intp)
    meets[np.arange(len(large)), keys] = False  # its own value comes back only after it was counted
    return bool(meets.any())


def _extent(array: Bits) -> tuple[int, int]:
    """The first address of a contiguous array, and the first address behind it."""
    start: int = array.__array_interface__["data"][0]
    return start, start + array.nbytes


class SharedResults:
    """The keys of a call whose results stay in the servers' shared memory: large values, on servers that share it.

    Args:
        plan: the keys and their runs.
        shares: whether the server of a rank shares memory with this process.
    """

    def __init__(self, plan: Plan, shares: Shares) -> None:
        self._plan = plan
        self._indices = [
            i
            for i, info in enumerate(plan.keys)
            if info.pulled_as is None and _is_large(info) and _all_share(info, shares)
        ]
        self._wanted = set(self._indices)
        self._kept: dict[int, list[tuple[int, int, dict[int, Bits]]]] = {index: [] for index in self._indices}
        """Index of a key → its slices: (start, stop, the values of the run by position)."""

    def keeps(self, run: RunPlan) -> bool:
        """Whether the result of this run stays in the server's memory."""
        return len(run.pieces) == 1 and run.pieces[0].index in self._wanted

    def keeping(self, run: Run) -> Run:
        """The run, changed to ask the server for a result that stays in shared memory."""
        kept: dict[int, Bits] = {}
        (piece,) = run.plan.pieces
        self._kept[piece.index].append((piece.start, piece.stop, kept))
        assert run.flags is not None
        return replace(run, sinks=(), flags=run.flags | np.uint8(Flag.HOLD), kept=kept)

    def shown(self, memory: Allocator, results: Sequence[Bits], keys: KeyTable, traffic: Traffic) -> list[Any]:
        """Per key a view of its result, which has arrived, or None if the result was copied to `results` instead."""
        found: list[Any] = [None] * len(self._plan.keys)
        for index in self._indices:
            info = self._plan.keys[index]
            pieces = sorted(self._kept[index], key=lambda piece: piece[:2])
            window = memory.show([kept[0].view(np.uint8) for _, _, kept in pieces])
            if window is not None:
                found[index] = shown = keys.like(info, window.view(info.dtype.storage))
                if isinstance(shown, np.ndarray):
                    shown.flags.writeable = False  # what torch does not know
                continue
            for start, stop, kept in pieces:
                results[index][start:stop] = kept[0]
                traffic.copied_out += kept[0].nbytes
        return found


def _is_large(info: KeyInfo) -> bool:
    return all(piece.count * info.dtype.itemsize >= ALONE_BYTES_MIN for piece in info.slices)


def _all_share(info: KeyInfo, shares: Shares) -> bool:
    return all(shares(piece.server) for piece in info.slices)
