"""Encodes and decodes Python objects that ranks of a collective job exchange beside tensors.

A closed list of types travels: None, bool, int, float, str, bytes, list, tuple, set, dict, NumPy arrays and scalars,
and values that a caller translates to a `Leaf` (torch tensors). None of them can be executed, and no other type is
accepted: the error names the part of the object.

The bytes are the length of the tree (8 bytes, little-endian), the tree in msgpack, and the bytes of all arrays in the
order in which they appear in it. Beside msgpack's own types the tree has four extensions: 1 is a tuple (a packed list),
2 an integer beyond 64 bits (big-endian, two's complement), 3 an array (a packed list of kind, dtype and shape), 4 a set
(a packed list).
Invariants:

* Whatever the bytes are, only `ProtocolError` leaves `decode`.
* No memory is allocated for an array whose bytes are missing. Lists and maps claim at most as many entries as the tree
  has bytes. Tuples, keys among them, are nested at most `DEPTH_MAX` deep: each takes 50 kB of a thread's stack.
* Decoded arrays belong to the receiver: they are copied out of the bytes, once.
"""

from __future__ import annotations

import math
import re
import struct
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from kvdist import errors

Octets = NDArray[np.uint8]

DEPTH_MAX = 64
"""Largest depth of nesting. An object that contains itself exceeds it."""
TREE_BYTES_MAX = 1 << 30
DIMS_MAX = 32
BIG_INTEGER_BYTES_MAX = 4096

_LENGTH = struct.Struct("<Q")
_TUPLE, _BIG_INTEGER, _ARRAY, _SET = 1, 2, 3, 4
_PLAIN = (type(None), bool, float, str, bytes)
_NUMPY_DTYPE = re.compile(r"[<>|=][biufcSUMm][0-9]{1,9}(\[[0-9A-Za-z]{1,16}\])?")
_NUMPY, _SCALAR = "numpy", "numpy scalar"
_OBJECT, _SENTENCE = 0, 1
"""The first byte of a rank's message: an object follows, or the reason why it cannot be sent."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """A value that travels as an array.

    Attributes:
        kind: tells `build` what the array represents.
        array: an array of numbers.
    """

    kind: str
    array: NDArray[Any]


def _nothing(_: object) -> None:
    """Translates no type."""


def _refuse(kind: str, _: NDArray[Any]) -> Any:
    raise errors.ProtocolError(f"an array of the unknown kind {kind[:40]!r}")


# Encoding.

Place = tuple[Any, ...]
"""The path to a part of an object: indices and keys."""


def encode(value: object, translate: Callable[[object], object | None] = _nothing) -> Octets:
    """An object as bytes.

    Args:
        value: the object.
        translate: translates other types: to a `Leaf`, to a value of a known type, or to None if it cannot.

    Raises:
        TypeError: a part is of another type; the message names the type and the part.
        ValueError: it is nested too deeply, or contains itself, or has characters that are not text.
    """
    leaves: list[Leaf] = []
    tree = msgpack.packb(_tree(value, (), translate, leaves), strict_types=True)
    if len(tree) > TREE_BYTES_MAX:
        raise ValueError(f"the object without its arrays has {len(tree)} bytes, where {TREE_BYTES_MAX} are allowed")
    at = _LENGTH.size + len(tree)
    octets = np.empty(at + sum(leaf.array.nbytes for leaf in leaves), np.uint8)
    octets[:at] = np.frombuffer(_LENGTH.pack(len(tree)) + tree, np.uint8)
    for leaf in leaves:
        end = at + leaf.array.nbytes
        octets[at:end] = np.ascontiguousarray(leaf.array).reshape(-1).view(np.uint8)
        at = end
    return octets


def _tree(value: Any, place: Place, translate: Callable[[object], object | None], leaves: list[Leaf]) -> Any:
    """The value as msgpack takes it; arrays go to `leaves`."""
    kind = type(value)
    if kind in _PLAIN:
        return _sendable(value, place)
    if kind is int:
        return value if -(1 << 63) <= value < 1 << 64 else _big_integer(value, place)
    if len(place) >= DEPTH_MAX:
        raise ValueError(f"the object is nested more than {DEPTH_MAX} deep, or contains itself")
    if kind in (list, tuple):
        items = [_tree(item, (*place, number), translate, leaves) for number, item in enumerate(value)]
        return items if kind is list else msgpack.ExtType(_TUPLE, msgpack.packb(items, strict_types=True))
    if kind is set:
        return msgpack.ExtType(_SET, msgpack.packb([_key(item, place) for item in value], strict_types=True))
    if kind in (dict, OrderedDict):
        return {_key(key, place): _tree(item, (*place, key), translate, leaves) for key, item in value.items()}
    if isinstance(value, np.ndarray | np.generic):
        leaf: object | None = _numpy_leaf(value, place)
    else:
        try:
            leaf = translate(value)
        except (TypeError, ValueError, RuntimeError) as error:  # what torch says names no place
            raise TypeError(f"{_shown(place)} cannot be sent: {error}") from error
    if leaf is None:
        raise TypeError(
            f"{_shown(place)} is a {_name(kind)}, which cannot be sent: only None, bool, int, float, str, bytes, list,"
            " tuple, set, dict and arrays can"
        )
    if not isinstance(leaf, Leaf):
        return _tree(leaf, place, translate, leaves)
    leaves.append(leaf)
    return msgpack.ExtType(_ARRAY, msgpack.packb([leaf.kind, leaf.array.dtype.str, list(leaf.array.shape)]))


def _key(key: Any, place: Place) -> Any:
    if type(key) in _PLAIN:
        return _sendable(key, place)
    if type(key) is int and -(1 << 63) <= key < 1 << 64:
        return key
    if type(key) is tuple:
        if len(place) >= DEPTH_MAX:
            raise ValueError(f"{_shown(place[:2])}... has a key nested deeper than the {DEPTH_MAX} levels allowed")
        parts = [_key(part, (*place, number)) for number, part in enumerate(key)]
        return msgpack.ExtType(_TUPLE, msgpack.packb(parts, strict_types=True))
    raise TypeError(
        f"{_shown(place)} has a key or member of type {_name(type(key))}, which cannot be sent; use None, bool, int of"
        " 64 bits, float, str, bytes, and tuples of them"
    )


def _sendable(value: Any, place: Place) -> Any:
    """The value, unless it is a text that cannot be encoded.

    Raises:
        ValueError: the text cannot be encoded; the message names the part.
    """
    if type(value) is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"{_shown(place)} has characters that are not text (lone surrogates): {value[:80]!r}. Names of files,"
                " which can have such, are sent as bytes: os.fsencode(name)"
            ) from None
    return value


def _big_integer(value: int, place: Place) -> msgpack.ExtType:
    nbytes = value.bit_length() // 8 + 1
    if nbytes > BIG_INTEGER_BYTES_MAX:
        raise ValueError(f"{_shown(place)} is an integer of {nbytes} bytes, where {BIG_INTEGER_BYTES_MAX} are allowed")
    return msgpack.ExtType(_BIG_INTEGER, value.to_bytes(nbytes, "big", signed=True))


def _numpy_leaf(value: Any, place: Place) -> Leaf:
    array = np.asarray(value)
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        raise TypeError(f"{_shown(place)} is a {_name(type(value))}; numpy.asarray() makes a plain array of it")
    if not _NUMPY_DTYPE.fullmatch(array.dtype.str) or array.dtype.hasobject or array.dtype.names:
        raise TypeError(
            f"{_shown(place)} is an array of dtype {array.dtype}, which cannot be sent; only numbers and text"
        )
    return Leaf(_SCALAR if isinstance(value, np.generic) else _NUMPY, array)


def _shown(place: Place) -> str:
    return "obj" + "".join(f"[{step!r}]" for step in place)


def _name(kind: type) -> str:
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# Decoding.


def decode(octets: Octets, build: Callable[[str, NDArray[Any]], Any] = _refuse) -> Any:
    """The object that bytes of `encode` describe.

    Args:
        octets: the bytes.
        build: the inverse of `translate`: creates a value from the kind and array of a `Leaf`; may raise ProtocolError.

    Raises:
        ProtocolError: the bytes do not describe an object.
    """
    length = _LENGTH.unpack(octets[: _LENGTH.size].tobytes())[0] if len(octets) >= _LENGTH.size else -1
    if not 0 <= length <= min(len(octets) - _LENGTH.size, TREE_BYTES_MAX):
        raise errors.ProtocolError("an object's bytes end before its tree does")
    reader = _Reader(octets, _LENGTH.size + length, build)
    try:
        value = reader.read(octets[_LENGTH.size : _LENGTH.size + length].tobytes())
    # RecursionError: what is nested more deeply than `encode` would nest it.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise errors.ProtocolError(f"an object's tree is not readable ({type(error).__name__})") from None
    if reader.at != len(octets):
        raise errors.ProtocolError(f"{len(octets) - reader.at} bytes are left over behind an object")
    return value


class _Reader:
    """Reads a tree whose arrays begin at offset `at` of the same bytes."""

    def __init__(self, octets: Octets, at: int, build: Callable[[str, NDArray[Any]], Any]) -> None:
        self.at = at
        self._octets = octets
        self._build = build
        self._depth = 0

    def read(self, tree: bytes) -> Any:
        """The value of a tree; msgpack refuses lists and maps that claim more entries than the tree has bytes."""
        return msgpack.unpackb(tree, strict_map_key=False, ext_hook=self._extension)

    def _extension(self, code: int, data: bytes) -> Any:
        if code == _BIG_INTEGER and len(data) <= BIG_INTEGER_BYTES_MAX:
            return int.from_bytes(data, "big", signed=True)
        if self._depth > DEPTH_MAX:
            raise errors.ProtocolError(f"an object is nested more than {DEPTH_MAX} deep")
        self._depth += 1
        items = self.read(data) if code in (_TUPLE, _ARRAY, _SET) else None
        self._depth -= 1
        if not isinstance(items, list):
            raise errors.ProtocolError(f"an object has an extension of type {code} that is not known")
        if code == _ARRAY:
            return self._leaf(items)
        return tuple(items) if code == _TUPLE else set(items)

    def _leaf(self, description: list[Any]) -> Any:
        if [type(part) for part in description] != [str, str, list]:
            raise errors.ProtocolError("an array within an object is not described as one")
        kind, dtype, shape = description
        if not _NUMPY_DTYPE.fullmatch(dtype):
            raise errors.ProtocolError(f"an array within an object has the unknown dtype {dtype[:40]!r}")
        if len(shape) > DIMS_MAX or not all(type(size) is int and size >= 0 for size in shape):
            raise errors.ProtocolError("an array within an object has an impossible shape")
        itemsize = np.dtype(dtype).itemsize
        nbytes = math.prod(shape) * itemsize
        if not itemsize:
            raise errors.ProtocolError(f"an array within an object has the dtype {dtype}, without a size")
        if nbytes > len(self._octets) - self.at:
            raise errors.ProtocolError(f"an array within an object claims {nbytes} bytes, which are not there")
        array = np.empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = self._octets[self.at : self.at + nbytes]
        self.at += nbytes
        if kind in (_NUMPY, _SCALAR):
            return array if kind == _NUMPY else array[()]
        return self._build(kind, array)


# Between ranks: where an object cannot be sent the reason travels in its place, so that every rank raises.


def encode_or_reason(
    value: object, translate: Callable[[object], object | None] = _nothing
) -> tuple[Octets, TypeError | ValueError | None]:
    """The bytes that a rank sends for an object, and the error of `encode` if the object cannot be sent."""
    failure: TypeError | ValueError | None = None
    try:
        octets = encode(value, translate)
    except (TypeError, ValueError) as error:
        failure, octets = error, np.frombuffer(str(error).encode("utf-8", "replace"), np.uint8)
    first = np.array([_OBJECT if failure is None else _SENTENCE], np.uint8)
    return np.concatenate([first, octets]), failure


def decode_from(rank: int, octets: Octets, build: Callable[[str, NDArray[Any]], Any] = _refuse) -> Any:
    """The object of another rank.

    Args:
        rank: the rank.
        octets: the bytes from that rank's `encode_or_reason`.
        build: as for `decode`.

    Raises:
        CollectiveError: the rank has sent a reason in place of an object, or bytes that describe no object.
    """
    if len(octets) and octets[0] == _SENTENCE:
        raise errors.CollectiveError(f"rank {rank} has an object that cannot be sent: {octets[1:].tobytes().decode()}")
    try:
        return decode(octets[1:], build)
    except errors.ProtocolError as error:
        raise errors.CollectiveError(f"rank {rank} sent an invalid object: {error}") from error
