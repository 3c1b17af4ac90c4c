"""Objects as bytes: what goes through, what is refused, and that no bytes do harm."""

from __future__ import annotations

import contextlib
import math
from collections import OrderedDict, defaultdict, namedtuple

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.errors import ProtocolError
from kvdist.protocol.objects import Leaf, decode, encode
from tests.cases import each

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
keys = st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.tuples(st.integers(0, 9))
objects = st.recursive(
    plain,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.sets(keys) | st.dictionaries(keys, inner),
    max_leaves=8,
)


def types_of(value):
    if isinstance(value, dict):
        return {key: types_of(item) for key, item in value.items()}
    return [type(value), *map(types_of, value)] if isinstance(value, list | tuple) else type(value)


@settings(max_examples=60)
@given(objects)
def test_objects_come_back_as_they_were(value):
    result = decode(encode(value))
    assert result == value and types_of(result) == types_of(value)


def test_dictionaries_keep_their_order_and_ordered_ones_are_dictionaries():
    result = decode(encode(OrderedDict([("b", 1), ("a", 2), (3, [math.inf])])))
    assert type(result) is dict and list(result.items()) == [("b", 1), ("a", 2), (3, [math.inf])]


@each(
    "array",
    [
        np.arange(6, dtype=np.int16).reshape(2, 3),
        np.ones((3, 4), np.float32).T,
        np.array(2.5),
        np.empty((0, 3), np.complex64),
        np.array([1, 2], ">i4"),
        np.array(["text", "ü"]),
        np.array([True, False]),
        np.array(["2020-01-01"], "M8[D]"),
    ],
)
def test_arrays_come_back_with_dtype_and_shape_and_are_the_receivers_own(array):
    result, number = decode(encode([array, 7]))
    assert result.dtype == array.dtype and result.shape == array.shape and (result == array).all() and number == 7
    assert result.flags.writeable and result.flags.owndata


def test_scalars_of_numpy_stay_what_they_are():
    values = [np.float32(1.5), np.int64(-3), np.bool_(True), np.float64(2.0), np.str_("a")]
    results = decode(encode(values))
    assert results == values and list(map(type, results)) == list(map(type, values))


def test_what_a_caller_translates_comes_back_from_what_he_builds():
    octets = encode({"f": Fraction(1, 3)}, lambda value: Leaf("fraction", np.array([value.over, value.under])))
    result = decode(octets, lambda kind, array: (kind, *array.tolist()))
    assert result == {"f": ("fraction", 1, 3)}
    with pytest.raises(ProtocolError, match="unknown kind 'fraction'"):
        decode(octets)


class Fraction:
    def __init__(self, over, under):
        self.over, self.under = over, under


class Loud(str):
    __slots__ = ()


Point = namedtuple("Point", "x")


@each(
    "value, sentence",
    [
        ({"a": [1, 2, 3j]}, r"obj\['a'\]\[2\] is a complex, which cannot be sent"),
        ([{(1, Loud("x"))}], r"obj\[0\]\[1\] has a key or member of type tests.*Loud"),
        (object(), "obj is a object,"),
        ([Fraction(1, 2)], r"obj\[0\] is a tests.protocol.test_objects.Fraction"),
        ((Loud("x"),), r"obj\[0\] is a tests.*Loud"),
        ([Point(1)], r"obj\[0\] is a tests.*Point"),
        ({1: defaultdict(int)}, r"obj\[1\] is a collections.defaultdict"),
        ({"k": {Loud("x"): 1}}, r"obj\['k'\] has a key or member of type tests.*Loud"),
        ([np.array([object()])], r"obj\[0\] is an array of dtype object"),
        ([np.zeros(1, [("a", "i4")])], r"obj\[0\] is an array of dtype \[\('a'"),
        ([np.ma.zeros(2)], r"obj\[0\] is a numpy.*MaskedArray; numpy.asarray"),
        (len, "obj is a builtin_function_or_method"),
    ],
)
def test_anything_else_is_refused_by_its_type_and_place(value, sentence):
    with pytest.raises(TypeError, match=sentence):
        encode(value)


@each(
    "value, place",
    [
        ({"a": ["b", "name-\udcff.png"]}, r"obj\['a'\]\[1\]"),
        ({"a": {"\ud800": 1}}, r"obj\['a'\]"),
        ([{("a", "\ud800")}], r"obj\[0\]\[1\]"),
        ("\ud800", "obj"),
    ],
)
def test_text_without_bytes_is_refused_by_its_place(value, place):
    with pytest.raises(ValueError, match=f"^{place} has characters that are not text .*: '.*ud[8c].*os.fsencode"):
        encode(value)


def test_an_object_that_contains_itself_is_nested_too_deeply():
    endless = []
    endless.append(endless)
    with pytest.raises(ValueError, match="more than 64 deep, or contains itself"):
        encode(endless)


@each("make", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"a": inner}])
def test_what_may_be_sent_may_also_be_read_however_deep(make):
    value = 1
    for _ in range(64):
        value = make(value)
    assert decode(encode(value)) == value


def test_keys_are_not_nested_deeper_either():
    key = 1
    for _ in range(70):
        key = (key,)
    with pytest.raises(ValueError, match="deeper than the 64 levels"):
        encode({key: 1})


def packed(tree, data=b""):
    inner = msgpack.packb(tree)
    return np.frombuffer(len(inner).to_bytes(8, "little") + inner + data, np.uint8)


def array(*description):
    return msgpack.ExtType(3, msgpack.packb(list(description)))


def nested(depth):
    tree = msgpack.packb([])
    for _ in range(depth):
        tree = msgpack.packb([msgpack.ExtType(1, tree)])
    return np.frombuffer(len(tree).to_bytes(8, "little") + tree, np.uint8)


@each(
    "octets, sentence",
    [
        (nested(900), "nested more than 64 deep"),
        (packed(array("numpy", "|S0", [1 << 45])), "without a size"),
        (np.zeros(7, np.uint8), "end before"),
        (np.full(20, 255, np.uint8), "end before"),
        (packed(1)[:-1], "end before"),
        (packed(1, b"x"), "1 bytes are left over"),
        (packed(msgpack.ExtType(9, b"")), "type 9 that is not known"),
        (packed(msgpack.ExtType(1, b"\x01")), "type 1 that is not known"),
        (packed(msgpack.ExtType(2, b"\0" * 5000)), "not known"),
        (packed(array("numpy", "<f4", [2]), b"1234567"), "claims 8 bytes"),
        (packed(array("numpy", "<f8", [1 << 60, 1 << 60])), "claims"),
        (packed(array("numpy", "<f4", [-1])), "impossible shape"),
        (packed(array("numpy", "<f4", [0] * 33)), "impossible shape"),
        (packed(array("numpy", "|O", [0])), "unknown dtype"),
        (packed(array("numpy", "<f4")), "not described"),
        (packed(array("numpy", "<f3", [0])), "not readable"),
        (packed({(): 1})[:0], "end before"),
        (np.frombuffer(b"\x05" + b"\0" * 7 + b"\xdd\xff\xff\xff\xff", np.uint8), "not readable"),
        (np.frombuffer(b"\x03" + b"\0" * 7 + b"\x81\x90\x01", np.uint8), "not readable"),
    ],
)
def test_other_bytes_are_refused(octets, sentence):
    with pytest.raises(ProtocolError, match=sentence):
        decode(octets)


@settings(max_examples=100)
@given(st.binary(max_size=60), st.data())
def test_no_bytes_raise_anything_but_a_protocol_error(tail, data):
    good = encode({"a": [1, (2.5, "x")], "b": np.arange(3)}).tobytes()
    at = data.draw(st.integers(0, len(good)))
    for octets in (
        tail,
        good[:at] + tail,
        len(tail).to_bytes(8, "little") + tail,
        good[:at] + tail + good[at + len(tail) :],
    ):
        with contextlib.suppress(ProtocolError):
            decode(np.frombuffer(octets, np.uint8))
