"""The arguments of a push or a pull, checked: per key the bits that are pushed, or the memory for the result.

With them goes what the optimizer says about each key (learning rate, weight decay, rescale), read at the push, so
servers see a change at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdist.core.worker.requests import KeyInfo, Plan, RunPlan
from kvdist.kvstore import values
from kvdist.kvstore.device import Devices, OnDevice, Part, PinnedBlocks, Upload, WrittenThere, require_one_kind
from kvdist.kvstore.keys import KeyTable, Matched, as_dense
from kvdist.kvstore.values import Key, Keys, Value
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.arrays import U8, Bits

EncodedSlices = dict[int, tuple[Bits, int]]
"""The encoded contribution to a key: start of a slice → its bytes, padded, and the number of entries in them."""

_READABLE = 0x101
"""`ndarray.flags.num` of an array in C order and aligned; asked for each array of each call."""
_WRITABLE = 0x501
"""The same of one that may be written."""


@dataclass(slots=True)
class PushArgs:
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

    def part(self, place: slice) -> PushArgs:
        """Some of the keys."""
        return PushArgs(self.infos[place], self.bits[place], is_on_gpus=self.is_on_gpus)


@dataclass(slots=True)
class PullArgs:
    """Where results go.

    Attributes:
        infos: the keys.
        results: per key the memory that takes its result.
        copies: what else wants a result: the array, and the memory that has it.
        upload: brings results to GPUs.
        there: what else is written on GPUs.
    """

    infos: list[KeyInfo]
    results: list[Bits]
    copies: list[tuple[Any, Bits]]
    upload: Upload | None = None
    there: Sequence[WrittenThere] = ()

    @property
    def is_direct(self) -> bool:
        """Whether results are wanted nowhere else than where they arrive."""
        return not self.copies and self.upload is None and not self.there

    def spread(self) -> None:
        """The results are there: bring them to where else they are wanted."""
        if self.upload is not None:
            self.upload.start()
        for one in self.there:
            one.write()
        for array, bits in self.copies:
            values.write_bits(array, bits)


def push_args(keys: KeyTable, key: Keys, value: Value, devices: Devices) -> PushArgs:
    """What a call pushes, checked.

    Raises:
        DeviceError: a GPU cannot be used, or some values of a key lie on the host and some on GPUs.
        KeyNotInitialised, TypeError, ValueError: something is wrong; the message names the key.
    """
    plain = _plain(keys, key, value, _READABLE)
    if plain is not None:
        return PushArgs(plain[0], [[bits] for bits in plain[1]])
    pairs = values.pairs(key, value)
    matched = keys.matched([(one, [as_dense(array, devices) for array in arrays]) for one, arrays in pairs])
    infos = [info for info, _ in matched]
    if not _names_gpus(matched):
        return PushArgs(infos, [[values.read_bits(array) for array in arrays] for _, arrays in matched])
    for info, arrays in matched:
        require_one_kind(info.key, arrays)
    bits = [[devices.read(array, info.dtype) for array in arrays] for info, arrays in matched]
    is_on_gpus = any(isinstance(part, OnDevice) for parts in bits for part in parts)
    return PushArgs(infos, bits, is_on_gpus=is_on_gpus)


def pull_args(keys: KeyTable, key: Keys, out: Value, devices: Devices, blocks: PinnedBlocks) -> PullArgs:
    """Where a call wants its results, checked.

    Raises:
        DeviceError: a GPU cannot be used.
        KeyNotInitialised, TypeError, ValueError: something is wrong; the message names the key.
    """
    plain = _plain(keys, key, out, _WRITABLE)
    if plain is not None:
        return PullArgs(*plain, copies=[])
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
    upload = _upload(infos, rising, results, blocks) if rising else None
    return PullArgs(infos, [one for one in results if one is not None], copies, upload, there)


def _names_gpus(matched: Matched) -> bool:
    """Whether a value lies on a GPU. Where none does, nothing more is asked of them."""
    return any(values.gpu_of(array) is not None for _, arrays in matched for array in arrays)


def _upload(
    infos: Sequence[KeyInfo],
    rising: Sequence[tuple[int, list[OnDevice]]],
    results: list[Bits | None],
    blocks: PinnedBlocks,
) -> Upload:
    """What brings these keys' results to GPUs; tells `results` where they land."""
    sizes = [(infos[index].size, infos[index].dtype) for index, _ in rising]
    upload = Upload(blocks, sizes, rising[0][1][0].device)
    for number, (index, places) in enumerate(rising):
        results[index] = upload.results[number]
        for place in places:
            upload.want(number, place)
    return upload


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


Hyperparameters = tuple[float, float, float]
SERVER_DECIDES: Hyperparameters = (math.nan, math.nan, math.nan)
"""This worker has no optimizer."""


Settings = tuple[list[Hyperparameters], "np.ndarray[Any, Any] | None"]
"""Distinct settings, and for each key of a plan the index of its own; None if all have the first."""


def hyperparameters_of(info: KeyInfo, optimizer: Optimizer | None) -> Hyperparameters:
    """The setting of one key."""
    if optimizer is None:
        return SERVER_DECIDES
    numbers = (optimizer.pushed_lr(info.key), optimizer.wd_for(info.key), optimizer.rescale_grad)
    return _finite(info.key, numbers)


def gathered(settings: Sequence[Hyperparameters]) -> Settings:
    """Settings that were taken key by key."""
    distinct: dict[Hyperparameters, int] = {}
    index = [distinct.setdefault(setting, len(distinct)) for setting in settings]
    return list(distinct), np.array(index) if len(distinct) > 1 else None


def plan_hyperparameters(plan: Plan, optimizer: Optimizer | None) -> Settings:
    """The distinct (learning rate, weight decay, rescale) of a plan's keys; per key an index, None if all alike."""
    if optimizer is None:
        return [SERVER_DECIDES], None
    rescale = optimizer.rescale_grad
    if not optimizer.lr_mult and not optimizer.wd_mult:
        return [_finite(None, (optimizer.pushed_lr(None), optimizer.wd, rescale))], None
    return gathered([hyperparameters_of(info, optimizer) for info in plan.keys])


def run_hyperparameters(
    settings: list[Hyperparameters], index: np.ndarray[Any, Any] | None
) -> tuple[tuple[Hyperparameters, ...], U8 | None]:
    """The settings that one run uses, and its slices' indices into them."""
    if index is None:
        return (settings[0],), None
    used, positions = np.unique(index, return_inverse=True)
    return tuple(settings[i] for i in used.tolist()), positions.astype(np.uint8)


def _finite(key: Key | None, setting: Hyperparameters) -> Hyperparameters:
    if not all(map(math.isfinite, setting)):
        whose = "the optimizer" if key is None else f"key {key!r}"
        raise ValueError(f"learning rate, weight decay and rescale of {whose} are {setting}; they must be finite")
    return setting
