"""What a worker knows of its keys, and what it refuses before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from kvdist.core.sharding import cut
from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, KeyNotInitialised
from kvdist.kvstore.keys import KeyTable, require_sendable
from kvdist.protocol.limits import DEFAULT
from tests.cases import each


def info(key: int | str, shape: tuple[int, ...] = (3,), dtype: DType = DType.FLOAT32) -> KeyInfo:
    size = int(np.prod(shape, dtype=int))
    return KeyInfo(key, shape, dtype, tuple(cut(size, dtype.itemsize, 0, 1, 0, 1 << 20)))


@pytest.fixture
def keys() -> KeyTable:
    made = KeyTable()
    made.add(info("w"), np.zeros(3, np.float32))
    made.add(info("t", (2, 0)), torch.zeros(2, 0))
    return made


def test_the_table_counts_its_keys_and_their_bytes(keys: KeyTable) -> None:
    assert (len(keys), keys.nbytes) == (2, 12)
    assert "w" in keys and "v" not in keys
    assert keys["w"].shape == (3,)


@each("dtype", DType)
def test_only_keys_of_numpys_own_types_are_plain(dtype: DType) -> None:
    made = KeyTable()
    made.add(info(1, (2, 3), dtype), torch.zeros(2, 3))
    if dtype is DType.BFLOAT16:
        assert not made.plain
    else:
        known, shape, storage = made.plain[1]
        assert known is made[1] and shape == (2, 3) and storage is np.dtype(dtype.storage)


def test_an_unknown_key_says_which_ones_there_are(keys: KeyTable) -> None:
    with pytest.raises(KeyNotInitialised, match=r"key 'v' has not been initialised.*'w', 't'"):
        keys["v"]
    with pytest.raises(KeyNotInitialised, match="neither has any other"):
        KeyTable()["v"]


def test_values_come_back_as_the_kind_that_was_given(keys: KeyTable) -> None:
    assert isinstance(keys.like(keys["w"], np.zeros(3, np.float32)), np.ndarray)
    assert isinstance(keys.like(keys["t"], np.zeros(0, np.float32)), torch.Tensor)


def test_an_init_names_what_is_new_once_per_key_with_its_first_array(keys: KeyTable) -> None:
    first, second = np.zeros(2), np.ones(2)
    assert keys.undeclared([("w", [np.ones(3, np.float32)]), ("new", [first, second])]) == [
        ("new", first, (2,), DType.FLOAT64, "")
    ]


@pytest.mark.parametrize("again", [np.zeros(4, np.float32), np.zeros(3), np.zeros((3, 1), np.float32)])
def test_a_key_that_is_initialised_otherwise_than_before_is_refused(keys: KeyTable, again: Any) -> None:
    with pytest.raises(InitMismatch, match=r"key 'w' was initialised with shape \(3,\) and dtype float32, and now"):
        keys.undeclared([("w", [again])])


def declare(*given: Any) -> None:
    """Declare new keys as a store does that sends them."""
    require_sendable(KeyTable().undeclared(given))


@each(
    "key, shape, words",
    [
        ("x" * (DEFAULT.key_bytes_max + 1), (1,), "longer than 1024 bytes"),
        ("é" * (DEFAULT.key_bytes_max // 2 + 1), (1,), "longer than 1024 bytes"),
        ("\udcff", (1,), "not text"),
        ("d", (1,) * 33, "33 dimensions; at most 32"),
    ],
)
def test_what_no_message_can_carry_is_refused(key: str, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        declare((key, [np.zeros(shape, np.float32)]))


def test_the_limits_themselves_are_allowed() -> None:
    fits = [("x" * DEFAULT.key_bytes_max, [np.zeros(1)]), ("d", [np.zeros((1,) * 32)])]
    declare(*fits)
    bounds = [((1 << 63) - 1, [np.zeros(1)]), (-(1 << 63), [np.zeros(1)])]
    declare(*bounds)
    for key in (1 << 63, -(1 << 63) - 1):
        with pytest.raises(ValueError, match="does not fit into 64 bits"):
            declare((key, [np.zeros(1)]))


def test_more_elements_than_a_key_may_have_are_refused_even_where_one_dimension_is_zero() -> None:
    huge = np.broadcast_to(np.zeros(1, np.float32), (1 << 20, 1 << 19))
    with pytest.raises(ValueError, match="at most 274877906944 elements"):
        declare(("h", [huge]))
    nothing = np.broadcast_to(np.zeros((1, 1, 0), np.float32), (1 << 20, 1 << 19, 0))
    with pytest.raises(ValueError, match="at most 274877906944 elements"):
        declare(("n", [nothing]))


def test_names_and_numbers_do_not_mix_in_one_store(keys: KeyTable) -> None:
    with pytest.raises(TypeError, match=r"key 1 is of another type than 'w'"):
        keys.undeclared([(1, [np.zeros(1)])])


def test_arrays_are_matched_with_their_keys_or_refused(keys: KeyTable) -> None:
    array = np.zeros(3, np.float32)
    assert keys.matched([("w", [array, array])]) == [(keys["w"], [array, array])]
    assert keys.matched([("w", [])]) == [(keys["w"], [])]
    with pytest.raises(KeyNotInitialised):
        keys.matched([("w", [array]), ("v", [array])])
    with pytest.raises(ValueError, match="key 'w' has shape"):
        keys.matched([("w", [array, np.zeros(4, np.float32)])])
    array.flags.writeable = False
    assert keys.matched([("w", [array])])
    with pytest.raises(ValueError, match="key 'w': the array .* is read-only"):
        keys.writable([("w", [array])])
