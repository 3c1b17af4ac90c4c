"""The short loop for plain arrays takes nothing that the long way would refuse or treat otherwise."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from kvdist.core.sharding import cut
from kvdist.core.worker.requests import KeyInfo, make_plan
from kvdist.dtypes import DType
from kvdist.errors import KeyNotInitialised
from kvdist.kvstore.keys import LISTED_KEYS_MIN, KeyTable
from kvdist.kvstore.placement import Devices
from kvdist.kvstore.push_pull import PushArgs, push_args
from kvdist.kvstore.results import PullArgs, pull_args
from kvdist.kvstore.results import cut as cut_of
from tests.cases import each

F32 = np.float32
SHAPES: dict[int | str, tuple[int, ...]] = {1: (3,), 2: (2, 3), 3: (), 4: (0,), 5: (4, 1)}


def table(shapes: dict[int | str, tuple[int, ...]] | None = None, dtype: DType = DType.FLOAT32) -> KeyTable:
    keys = KeyTable()
    for number, (key, shape) in enumerate((SHAPES if shapes is None else shapes).items()):
        size = int(np.prod(shape, dtype=int))
        info = KeyInfo(key, shape, dtype, tuple(cut(size, dtype.itemsize, 0, 1, number, 1 << 20)))
        keys.add(info, torch.zeros(shape, dtype=torch.bfloat16) if dtype is DType.BFLOAT16 else np.zeros(shape, F32))
    return keys


def filled(shape: tuple[int, ...], first: int = 1) -> Any:
    return (np.arange(int(np.prod(shape, dtype=int))) + first).astype(F32).reshape(shape)


def is_plain(keys: KeyTable, key: Any, value: Any, writable: bool = False) -> bool:
    return keys.plain_list(key, value, writable) is not None


def push_args_of(keys: KeyTable, key: Any, value: Any) -> PushArgs:
    return push_args(keys, key, value, Devices())


def pull_args_of(keys: KeyTable, key: Any, out: Any) -> PullArgs:
    return pull_args(keys, key, out, lambda: pytest.fail("nothing lies on a GPU"))


def outcome(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """What a call says of what it was given: keys and bits, or the error."""
    try:
        result = function(*arguments)
    except (TypeError, ValueError, KeyNotInitialised) as error:
        return type(error), str(error)
    if isinstance(result, PushArgs):
        return [info.key for info in result.infos], [[bits.tolist() for bits in each] for each in result.bits]
    return [info.key for info in result.infos], [bits.size for bits in result.results], len(result.copies)


def both_ways(function: Any, *arguments: Any) -> tuple[Any, ...]:
    """The outcome, which must be the same with the short loop switched off."""
    found = outcome(function, *arguments)
    with mock.patch.object(KeyTable, "plain_list", lambda *_, **__: None):
        assert outcome(function, *arguments) == found
    return found


@each("sequence", [list, tuple])
def test_a_list_of_plain_arrays_takes_the_short_way_and_shows_their_own_memory(sequence: type) -> None:
    keys = table()
    arrays = [filled(shape, 10 * number) for number, shape in SHAPES.items() if isinstance(number, int)]
    assert is_plain(keys, sequence(SHAPES), sequence(arrays), writable=True)
    both_ways(push_args_of, keys, list(SHAPES), arrays)
    both_ways(pull_args_of, keys, list(SHAPES), arrays)
    given, taken = push_args_of(keys, list(SHAPES), arrays), pull_args_of(keys, list(SHAPES), arrays)
    for array, (bits,), result in zip(arrays, given.bits, taken.results, strict=True):
        assert bits.ndim == result.ndim == 1
        result[...] = 77
        assert (array == 77).all() and (bits == 77).all()
    assert not taken.copies


def test_a_script_that_shuffles_its_keys_is_not_remembered_for_ever() -> None:
    keys = table(dict.fromkeys(range(6), (2,)))
    orders = list(itertools.permutations(range(6)))
    assert len(orders) * 6 > LISTED_KEYS_MIN
    for order in [*orders, *orders[:2]]:
        assert is_plain(keys, order, [filled((2,))] * 6)
    assert 6 <= keys.listed <= LISTED_KEYS_MIN


def fortran(shape: tuple[int, ...]) -> Any:
    return np.asfortranarray(filled(shape))


def unaligned(shape: tuple[int, ...]) -> Any:
    size = int(np.prod(shape))
    array = np.zeros(4 * size + 1, np.uint8)[1:].view(F32).reshape(shape)
    array[...] = filled(shape)
    return array


def strided(shape: tuple[int, ...]) -> Any:
    return np.repeat(filled(shape), 2, axis=-1)[..., ::2]


def big_endian(shape: tuple[int, ...]) -> Any:
    return filled(shape).astype(">f4")


def matrix(shape: tuple[int, ...]) -> Any:
    with pytest.warns(PendingDeprecationWarning):
        return np.matrix(filled(shape))


def tensor(shape: tuple[int, ...]) -> Any:
    return torch.from_numpy(filled(shape))


@each("form", [fortran, unaligned, strided, big_endian, matrix, tensor])
def test_other_forms_of_arrays_take_the_long_way_and_give_the_same(form: Any) -> None:
    keys, array = table(), form((2, 3))
    assert not is_plain(keys, [2], [array])
    assert both_ways(push_args_of, keys, [1, 2], [filled((3,)), array]) == ([1, 2], [[[1, 2, 3]], [[1, 2, 3, 4, 5, 6]]])
    assert both_ways(pull_args_of, keys, [1, 2], [filled((3,)), array])[0] == [1, 2]
    taken = pull_args_of(keys, [1, 2], [filled((3,)), array])
    taken.results[1][...] = 9
    taken.spread()
    assert (np.asarray(array) == 9).all()


def test_a_file_in_memory_takes_the_long_way(tmp_path: Any) -> None:
    array = np.memmap(tmp_path / "values", F32, "w+", shape=(2, 3))
    array[...] = filled((2, 3))
    keys = table()
    assert not is_plain(keys, [2], [array])
    assert both_ways(push_args_of, keys, [2], [array]) == ([2], [[[1, 2, 3, 4, 5, 6]]])
    both_ways(pull_args_of, keys, [2], [array])


def read_only(shape: tuple[int, ...]) -> Any:
    array = filled(shape)
    array.flags.writeable = False
    return array


def test_a_read_only_array_can_be_pushed_and_takes_no_result() -> None:
    keys = table()
    assert is_plain(keys, [1, 2], [read_only((3,)), filled((2, 3))])
    assert not is_plain(keys, [1, 2], [read_only((3,)), filled((2, 3))], writable=True)
    error, text = both_ways(pull_args_of, keys, [2, 1], [filled((2, 3)), read_only((3,))])
    assert error is ValueError and text.startswith("key 1: the array of shape (3,) and dtype float32 is read-only")


REFUSED = [
    ([1, 2], [filled((3,)), filled((3, 2))], ValueError, "key 2 has shape (2, 3), but the value has shape (3"),
    ([1], [np.zeros(3, np.uint16)], TypeError, "key 1: arrays of dtype uint16 are not supported"),
    ([1], [np.zeros(3, object)], TypeError, "key 1: arrays of dtype object are not supported"),
    ([1, 9], [filled((3,)), filled((3,))], KeyNotInitialised, "key 9 has not been initialised"),
    ([1, 2], [filled((3,))], ValueError, "2 keys need as many values, got 1"),
    ([], [], ValueError, "the list of keys is empty"),
    ([True], [filled((3,))], TypeError, "a key must be an int or a str, not bool"),
    ([True, False], [filled((3,)), filled((3,))], TypeError, "a key must be an int or a str, not bool"),
    ([1, True], [filled((3,)), filled((3,))], TypeError, "a key must be an int or a str, not bool"),
    ([1, "1"], [filled((3,)), filled((3,))], TypeError, "all int or all str, not mixed"),
    ([1.0], [filled((3,))], TypeError, "a key must be an int or a str, not float"),
    ([None], [filled((3,))], TypeError, "a key must be an int or a str, not NoneType"),
    ([1, 2], filled((2, 3)), TypeError, "a list of keys needs a list of values"),
    ([1], [[]], ValueError, "key 1 has an empty list of values"),
    ([1], [[1.0, 2.0, 3.0]], TypeError, "key 1: a value must be a NumPy array or a torch tensor, not float"),
    (["1"], [filled((3,))], KeyNotInitialised, "key '1' has not been initialised"),
]


@each("key, value, error, words", REFUSED)
@each("function", [push_args_of, pull_args_of])
def test_what_is_wrong_is_refused_in_the_same_words(
    function: Any, key: Any, value: Any, error: type, words: str
) -> None:
    keys = table()
    assert not is_plain(keys, key, value)
    found, text = both_ways(function, keys, key, value)
    assert found is error and words in text


@each("number", [np.int64(1), np.uint8(1), np.int32(1)])
def test_numbers_of_numpy_are_keys_and_take_the_long_way(number: Any) -> None:
    keys = table()
    assert not is_plain(keys, [number, 2], [filled((3,)), filled((2, 3))])
    found = both_ways(push_args_of, keys, [number, 2], [filled((3,)), filled((2, 3))])
    assert found[0] == [1, 2] and type(found[0][0]) is int


class Name(str):
    """A key of a type of one's own."""


def test_a_subclass_of_str_takes_the_long_way() -> None:
    keys = table({"w": (3,)})
    assert is_plain(keys, ["w"], [filled((3,))])
    assert not is_plain(keys, [Name("w")], [filled((3,))])
    assert both_ways(push_args_of, keys, [Name("w")], [filled((3,))]) == (["w"], [[[1, 2, 3]]])


def test_a_repeated_key_gathers_its_arrays() -> None:
    keys = table()
    arrays = [filled((3,)), filled((2, 3)), filled((3,), 5)]
    assert not is_plain(keys, [1, 2, 1], arrays)
    assert both_ways(push_args_of, keys, [1, 2, 1], arrays)[1][0] == [[1, 2, 3], [5, 6, 7]]
    taken = pull_args_of(keys, [1, 2, 1], arrays)
    taken.results[0][...] = 9
    taken.spread()
    assert (arrays[0] == 9).all() and (arrays[2] == 9).all()


def test_none_and_lists_for_each_key_take_the_long_way() -> None:
    keys = table()
    assert not is_plain(keys, [1, 2], [None, filled((2, 3))])
    assert both_ways(push_args_of, keys, [1, 2], [None, filled((2, 3))])[1] == [[], [[1, 2, 3, 4, 5, 6]]]
    devices = [[filled((3,)), None, filled((3,), 4)]]
    assert not is_plain(keys, [1], devices)
    assert both_ways(push_args_of, keys, [1], devices)[1] == [[[1, 2, 3], [4, 5, 6]]]
    assert both_ways(pull_args_of, keys, [1], devices) == ([1], [3], 1)


@each("key", [1, "w"])
def test_a_single_key_takes_the_long_way(key: int | str) -> None:
    keys = table({key: (3,)})
    assert not is_plain(keys, key, filled((3,)))
    assert both_ways(push_args_of, keys, key, filled((3,))) == ([key], [[[1, 2, 3]]])


def test_the_bits_of_a_bfloat16_key_are_not_an_array_of_numbers() -> None:
    keys = table({1: (3,)}, DType.BFLOAT16)
    assert not keys.plain
    for function in (push_args_of, pull_args_of):
        error, text = both_ways(function, keys, [1], [np.zeros(3, np.uint16)])
        assert error is TypeError and "key 1: arrays of dtype uint16 are not supported" in text
    value = torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16)
    assert both_ways(push_args_of, keys, [1], [value]) == ([1], [[[0x3F80, 0x4000, 0x4040]]])


def test_a_scalar_of_numpy_is_pushed_the_long_way_and_takes_no_result() -> None:
    keys = table()
    assert not is_plain(keys, [3], [np.float32(2)])
    assert both_ways(push_args_of, keys, [3], [np.float32(2)]) == ([3], [[[2]]])
    error, text = both_ways(pull_args_of, keys, [3], [np.float32(2)])
    assert error is ValueError and "a NumPy scalar cannot be written into" in text


def test_results_are_cut_as_their_slices_are() -> None:
    shapes: dict[int | str, tuple[int, ...]] = {1: (3,), 2: (10,)}
    infos = [
        KeyInfo(key, shape, DType.FLOAT32, tuple(cut(shape[0], 4, 0, 1, 10 * i, 16)))
        for i, (key, shape) in enumerate(shapes.items())
    ]
    results = [filled((3,)), filled((10,), 11)]
    for run in make_plan(infos, 1 << 20).runs:
        pieces = cut_of(run, results)
        assert [piece.size for piece in pieces] == run.counts.tolist() == [3, 4, 4, 2]
        assert np.concatenate(pieces).tolist() == [*range(1, 4), *range(11, 21)]
    (whole,) = make_plan(infos[:1], 1 << 20).runs
    assert cut_of(whole, results)[0] is results[0]
