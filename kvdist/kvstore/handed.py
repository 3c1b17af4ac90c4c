"""What a call hands over: per key the bits that are pushed, or the memory that takes the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdist.core.worker.requests import Bits, KeyInfo, RunPlan
from kvdist.kvstore import values
from kvdist.kvstore.ascent import Ascent, Blocks, WrittenThere
from kvdist.kvstore.base import Keys, Value
from kvdist.kvstore.devices import Devices, OnDevice, Part, require_one_kind
from kvdist.kvstore.key_table import KeyTable, Matched
from kvdist.kvstore.tables import as_dense

EncodedSlices = dict[int, tuple[Bits, int]]
"""The encoded contribution to a key: start of a slice → its bytes, padded, and the number of entries in them."""

_READABLE = 0x101
"""`ndarray.flags.num` of an array in C order and aligned; asked for each array of each call."""
_WRITABLE = 0x501
"""The same of one that may be written."""


@dataclass(slots=True)
class Given:
    """What is pushed.

    Attributes:
        infos: the keys.
        bits: per key the contributions of its devices, where they lie; none where there is no gradient.
        encoded: per key what was encoded already, in which case `bits` only say that there is something.
        is_on_gpus: whether some of it lies there.
    """

    infos: list[KeyInfo]
    bits: Sequence[Sequence[Part]]
    encoded: list[EncodedSlices | None] | None = None
    is_on_gpus: bool = False

    def part(self, place: slice) -> Given:
        """Some of the keys."""
        return Given(self.infos[place], self.bits[place], is_on_gpus=self.is_on_gpus)


@dataclass(slots=True)
class Taken:
    """Where results go.

    Attributes:
        infos: the keys.
        results: per key the memory that takes its result.
        copies: what else wants a result: the array, and the memory that has it.
        ascent: brings results to GPUs.
        there: what else is written on GPUs.
    """

    infos: list[KeyInfo]
    results: list[Bits]
    copies: list[tuple[Any, Bits]]
    ascent: Ascent | None = None
    there: Sequence[WrittenThere] = ()

    @property
    def is_direct(self) -> bool:
        """Whether results are wanted nowhere else than where they arrive."""
        return not self.copies and self.ascent is None and not self.there

    def spread(self) -> None:
        """The results are there: bring them to where else they are wanted."""
        if self.ascent is not None:
            self.ascent.rise()
        for one in self.there:
            one.write()
        for array, bits in self.copies:
            values.write_bits(array, bits)


def given(keys: KeyTable, key: Keys, value: Value, devices: Devices) -> Given:
    """What a call pushes, checked.

    Raises:
        DeviceError: a GPU cannot be used, or some values of a key lie on the host and some on GPUs.
        KeyNotInitialised, TypeError, ValueError: something is wrong; the message names the key.
    """
    plain = _plain(keys, key, value, _READABLE)
    if plain is not None:
        return Given(plain[0], [[bits] for bits in plain[1]])
    pairs = values.pairs(key, value)
    matched = keys.matched([(one, [as_dense(array, devices) for array in arrays]) for one, arrays in pairs])
    infos = [info for info, _ in matched]
    if not _names_gpus(matched):
        return Given(infos, [[values.read_bits(array) for array in arrays] for _, arrays in matched])
    for info, arrays in matched:
        require_one_kind(info.key, arrays)
    bits = [[devices.read(array, info.dtype) for array in arrays] for info, arrays in matched]
    is_on_gpus = any(isinstance(part, OnDevice) for parts in bits for part in parts)
    return Given(infos, bits, is_on_gpus=is_on_gpus)


def taken(keys: KeyTable, key: Keys, out: Value, devices: Devices, blocks: Blocks) -> Taken:
    """Where a call wants its results, checked.

    Raises:
        DeviceError: a GPU cannot be used.
        KeyNotInitialised, TypeError, ValueError: something is wrong; the message names the key.
    """
    plain = _plain(keys, key, out, _WRITABLE)
    if plain is not None:
        return Taken(*plain, copies=[])
    matched = keys.matched(values.pairs(key, out), writable=True)
    infos = [info for info, _ in matched]
    results: list[Bits | None] = []
    copies: list[tuple[Any, Bits]] = []
    rising: list[tuple[int, list[OnDevice]]] = []
    there: list[WrittenThere] = []
    names_gpus = _names_gpus(matched)
    for index, (info, arrays) in enumerate(matched):
        places = [devices.place(array, info.dtype) for array in arrays] if names_gpus else []
        if places and all(place is not None for place in places):
            results.append(None)
            rising.append((index, [place for place in places if place is not None]))
            continue
        first = values.writable_bits(arrays[0]) if arrays else None
        rest = arrays if first is None else arrays[1:]
        if first is None:
            first = np.empty(info.size, info.dtype.storage)
        results.append(first)
        for array in rest:
            if names_gpus and values.gpu_of(array) is not None:
                there.append(WrittenThere.of(array, first))
            else:
                copies.append((array, first))
    ascent = _ascent(infos, rising, results, blocks) if rising else None
    return Taken(infos, [one for one in results if one is not None], copies, ascent, there)


def _names_gpus(matched: Matched) -> bool:
    """Whether a value lies on a GPU. Where none does, nothing more is asked of them."""
    return any(values.gpu_of(array) is not None for _, arrays in matched for array in arrays)


def _ascent(
    infos: Sequence[KeyInfo],
    rising: Sequence[tuple[int, list[OnDevice]]],
    results: list[Bits | None],
    blocks: Blocks,
) -> Ascent:
    """What brings these keys' results to GPUs; tells `results` where they land."""
    sizes = [(infos[index].size, infos[index].dtype) for index, _ in rising]
    ascent = Ascent(blocks, sizes, rising[0][1][0].device)
    for number, (index, places) in enumerate(rising):
        results[index] = ascent.results[number]
        for place in places:
            ascent.want(number, place)
    return ascent


def plain_one(keys: KeyTable, key: Keys, value: Value, writable: bool = False) -> tuple[KeyInfo, Bits] | None:
    """One key and its NumPy array in order, looked at as little as can be, as a loop over keys asks; else None."""
    if type(key) is not int and type(key) is not str:
        return None
    expected = keys.plain.get(key)
    if expected is None or type(value) is not np.ndarray:
        return None
    info, shape, dtype = expected
    flags = _WRITABLE if writable else _READABLE
    if value.dtype is not dtype or value.shape != shape or value.flags.num & flags != flags:
        return None
    return info, value if value.ndim == 1 else value.reshape(-1)


def named(infos: Sequence[KeyInfo]) -> str:
    """These keys for people, such as ``key 'fc1'`` or ``3 keys (0, 1, 2)``."""
    keys = ", ".join([repr(info.key) for info in infos[:3]])
    return f"key {keys}" if len(infos) == 1 else f"{len(infos)} keys ({keys}{', …' if len(infos) > 3 else ''})"


def _plain(keys: KeyTable, key: Keys, value: Value, flags: int) -> tuple[list[KeyInfo], list[Bits]] | None:
    """The usual case in one short loop: a list of different keys, a NumPy array in order for each. Else None."""
    if not isinstance(key, list | tuple) or not isinstance(value, list | tuple) or len(key) != len(value) or not key:
        return None
    if {type(one) for one in key} not in ({int}, {str}) or len(set(key)) != len(key):
        return None
    infos, bits, known = [], [], keys.plain
    for one, array in zip(key, value, strict=True):
        expected = known.get(one)
        if expected is None or type(array) is not np.ndarray:
            return None
        info, shape, dtype = expected
        if array.dtype is not dtype or array.shape != shape or array.flags.num & flags != flags:
            return None
        infos.append(info)
        bits.append(array if array.ndim == 1 else array.reshape(-1))
    return infos, bits


def cut(run: RunPlan, results: Sequence[Bits]) -> list[Bits]:
    """Per slice of a run the stretch of its key's result."""
    if run.whole_keys is not None:
        return [results[index] for index in run.whole_keys]
    return [results[piece.index][piece.start : piece.stop] for piece in run.pieces]


def made(table: KeyTable, key: Keys) -> tuple[list[KeyInfo], list[Bits], Callable[[], Any]]:
    """For a pull without `out`: the keys, memory for their values, and what makes arrays of it once it is filled.

    Raises:
        KeyNotInitialised: a key is not known.
    """
    names = values.keys(key)
    order = {one: i for i, one in enumerate(dict.fromkeys(names))}
    infos = [table[one] for one in order]
    results: list[Bits] = [np.empty(info.size, info.dtype.storage) for info in infos]

    def finish() -> Any:
        arrays = {info.key: table.like(info, bits) for info, bits in zip(infos, results, strict=True)}
        if not isinstance(key, (list, tuple)):
            return arrays[names[0]]
        # A key that is named twice gives two arrays.
        return [arrays.pop(one) if one in arrays else _copy(table, infos, results, order[one]) for one in names]

    return infos, results, finish


def _copy(table: KeyTable, infos: Sequence[KeyInfo], results: Sequence[Bits], index: int) -> Any:
    return table.like(infos[index], results[index].copy())
