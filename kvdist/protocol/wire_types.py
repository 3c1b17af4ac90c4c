"""The types of message fields, WIRE.md section 3: how each is packed, read and checked.

An alias such as `UInt32` is the annotation of a field: the Python type, and a `WireType` that `wire` compiles
its encoder and decoder from. Invariants:

* `read` takes an item from a `Source` and raises `ProtocolError` unless it is exactly what the type allows: a bool
  is not a number, an integer is not a float.
* Lists whose length the peer chooses are read item by item, because a general decoder would allocate the length that
  each of many nested lists claims. Columns about keys or slices travel as runs of bytes, read in a few calls.
* `check` looks at what `read` does not; it runs on both sides, after the lengths of all columns have been compared.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, cast

import numpy as np

from kvdist import errors
from kvdist.dtypes import DType
from kvdist.naming import NamedKey
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol.arrays import ITEMSIZES, U8, U32, Arrays, Coded, Payload, as_octets, check_coded, pad_sizes
from kvdist.protocol.limits import DEFAULT, WireLimits

ROLES = (Role.SCHEDULER, Role.SERVER, Role.WORKER)
"""The code of a role is its index in this tuple."""
ROLE_CODES = {role: code for code, role in enumerate(ROLES)}
MEMBERS_KEPT_MAX = 4096
"""Processes that are remembered: strangers may claim any number of them."""

_U8 = np.dtype("<u1")
_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")


class ItemReader(Protocol):
    """The part of a msgpack decoder that fields are read with."""

    def unpack(self) -> Any:
        """The next item, whole."""

    def read_bytes(self, nbytes: int) -> bytes:
        """The next bytes as they are; fewer at the end."""


@dataclass(slots=True)
class Source:
    """The bytes of a message that is read."""

    reader: ItemReader
    limits: WireLimits
    payload: list[memoryview]


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class WireType:
    """How values of a type travel.

    Attributes:
        name: name of the type in WIRE.md.
        read: reads the next value of a source.
        pack: converts a value to a value that msgpack packs.
        group: fields of a message with the same group have equal lengths: ``slices``, ``numbers`` or ``keys``.
        columns: the attributes of a value whose lengths count for the group; '' is the value itself.
        check: checks further conditions of a value; None without any.
    """

    name: str
    read: Callable[[Source], Any]
    pack: Callable[[Any], Any] = _same
    group: str = ""
    columns: tuple[str, ...] = ("",)
    check: Callable[[Any, WireLimits], None] | None = None


def wire_fields(message: type[Any]) -> tuple[tuple[str, WireType], ...]:
    """The names and wire types of a dataclass's fields, in order, as its annotations say."""
    annotations: list[tuple[str, Any]] = [(field.name, field.type) for field in dataclasses.fields(message)]
    return tuple((name, annotation.__metadata__[0]) for name, annotation in annotations)


def _found(value: object) -> str:
    """Describe a wrong value in a few printable characters."""
    return ascii(value)[:40] if isinstance(value, int | float) else f"a {type(value).__name__}"


def _check_count(count: int, limit: int) -> None:
    if count > limit:
        raise errors.ProtocolError(f"a list of {count} items, where {limit} are allowed")


# Single values.


def integer(name: str, low: int, high: int) -> WireType:
    """A whole number from `low` to `high`, both included."""

    def read(source: Source) -> int:
        value = source.reader.unpack()
        if type(value) is not int or not low <= value <= high:
            raise errors.ProtocolError(f"expected an integer from {low} to {high}, found {_found(value)}")
        return value

    return WireType(name, read)


def code(name: str, codes: type[Any], meaning: str) -> WireType:
    """The code of a member of an enumeration."""
    known = frozenset(int(one) for one in codes)

    def read(source: Source) -> int:
        value = source.reader.unpack()
        if type(value) is not int or value not in known:
            raise errors.ProtocolError(f"expected the code of {meaning}, found {_found(value)}")
        return value

    return WireType(name, read, int)


def _read_flag(source: Source) -> bool:
    value = source.reader.unpack()
    if type(value) is not bool:
        raise errors.ProtocolError(f"expected true or false, found {_found(value)}")
    return value


def _read_seconds(source: Source) -> float:
    value = source.reader.unpack()
    if type(value) is not float or not math.isfinite(value):
        raise errors.ProtocolError(f"expected a finite float, found {_found(value)}")
    return value


def _text(value: object, bytes_max: int) -> str:
    if type(value) is not str:
        raise errors.ProtocolError(f"expected text, found {_found(value)}")
    # A character has one to four bytes, so most texts need not be encoded to be measured.
    if len(value) * 4 > bytes_max and len(value.encode()) > bytes_max:
        raise errors.ProtocolError(f"a text is longer than {bytes_max} bytes")
    return value


def text(name: str, limit: str, pack: Callable[[str], str] = _same) -> WireType:
    """Text of at most as many bytes as the limit of that name."""
    return WireType(name, lambda source: _text(source.reader.unpack(), getattr(source.limits, limit)), pack)


def _pack_sentence(value: str) -> str:
    """Cut a text that is too long, so that reporting a failure cannot fail itself."""
    data = value.encode("utf-8", "replace")
    if len(data) > DEFAULT.sentence_bytes_max:
        data = data[: DEFAULT.sentence_bytes_max - 3] + "…".encode()
    return data.decode("utf-8", "ignore")


_UINT32 = integer("u32", 0, (1 << 32) - 1)
_UINT64 = integer("u64", 0, (1 << 64) - 1)
_NAME = text("name", "name_bytes_max")

UInt32 = Annotated[int, _UINT32]
UInt64 = Annotated[int, _UINT64]
FromMinusOne = Annotated[int, integer("from-1", -1, (1 << 32) - 1)]
Int64 = Annotated[int, integer("i64", -(1 << 63), (1 << 63) - 1)]
Boolean = Annotated[bool, WireType("flag", _read_flag)]
Seconds = Annotated[float, WireType("seconds", _read_seconds, float)]
Name = Annotated[str, _NAME]
Sentence = Annotated[str, text("sentence", "sentence_bytes_max", _pack_sentence)]
Body = Annotated[str, text("body", "body_bytes_max")]


# Lists and records.


def read_count(source: Source) -> int:
    """Read the number of items of a list."""
    first = source.reader.read_bytes(1)
    if first and first[0] & 0xF0 == 0x90:
        return first[0] & 0x0F
    width = {b"\xdc": 2, b"\xdd": 4}.get(first)
    if width is None:
        raise errors.ProtocolError("expected a list")
    digits = source.reader.read_bytes(width)
    if len(digits) != width:
        raise errors.ProtocolError("the header ends inside a list")
    return int.from_bytes(digits, "big")


def expect_count(source: Source, wanted: int) -> None:
    """Begin to read a list of that many items."""
    found = read_count(source)
    if found != wanted:
        raise errors.ProtocolError(f"expected a list of {wanted} items, found {found}")


def list_of(name: str, item: WireType, limit: str) -> WireType:
    """A tuple of items, at most as many as the limit of that name."""
    pack_item, read_item = item.pack, item.read

    def read(source: Source) -> tuple[Any, ...]:
        count = read_count(source)
        _check_count(count, getattr(source.limits, limit))
        return tuple([read_item(source) for _ in range(count)])

    return WireType(name, read, lambda values: [pack_item(value) for value in values])


def record(name: str, make: type[Any], group: str = "", columns: tuple[str, ...] = ("",)) -> WireType:
    """A dataclass inside a field: a list of its fields in their order."""
    table = wire_fields(make)

    def pack(value: Any) -> list[Any]:
        return [field.pack(getattr(value, name)) for name, field in table]

    def read(source: Source) -> Any:
        expect_count(source, len(table))
        return make(*[field.read(source) for _, field in table])

    return WireType(name, read, pack, group, columns)


@functools.lru_cache(maxsize=MEMBERS_KEPT_MAX)
def member_of(role: int, rank: int, incarnation: int) -> Member:
    """The process with that code of a role; the numbers already have their widths.

    The same object for each message of a process: to create and compare objects costs more than a look-up.
    """
    if role >= len(ROLES):
        raise errors.ProtocolError(f"unknown role {role}")
    if role == 0 and rank != 0:
        raise errors.ProtocolError(f"a scheduler of rank {rank}; the scheduler has rank 0")
    return Member(NodeId(ROLES[role], rank), incarnation)


def _read_member(source: Source) -> Member:
    value = source.reader.unpack()
    if type(value) is not tuple or len(value) != 3 or any(type(part) is not int for part in value):
        raise errors.ProtocolError("expected the role, rank and incarnation of a process")
    role, rank, incarnation = value
    if not (0 <= role < len(ROLES) and 0 <= rank < 1 << 32 and 0 <= incarnation < 1 << 64):
        raise errors.ProtocolError("the role, rank or incarnation of a process is out of range")
    return member_of(role, rank, incarnation)


def _read_description(source: Source) -> dict[str, str | int | float | bool | None]:
    value = source.reader.unpack()
    if type(value) is not dict or len(value) > source.limits.entries_max:
        raise errors.ProtocolError(f"expected a map of at most {source.limits.entries_max} entries")
    for name, entry in value.items():
        _text(name, source.limits.entry_name_bytes_max)
        _check_scalar(entry, source.limits)
    return value


def _check_scalar(value: object, limits: WireLimits) -> None:
    if isinstance(value, str):
        _text(value, limits.name_bytes_max)
        return
    whole = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    if not (value is None or whole or (isinstance(value, float) and math.isfinite(value))):
        raise errors.ProtocolError(
            f"expected text, a bool, a 64-bit integer, a finite float or nil, found {_found(value)}"
        )


MEMBER = WireType(
    "member", _read_member, lambda member: [ROLE_CODES[member.node.role], member.node.rank, member.incarnation]
)

Names = Annotated[tuple[str, ...], list_of("names", _NAME, "entries_max")]
Requests = Annotated[tuple[int, ...], list_of("requests", _UINT64, "entries_max")]
Ranks = Annotated[tuple[int, ...], list_of("ranks", _UINT32, "members_max")]
Members = Annotated[tuple[Member, ...], list_of("members", MEMBER, "members_max")]
Description = Annotated[dict[str, str | int | float | bool | None], WireType("description", _read_description)]


# Columns about keys: tuples with one item per key.


def _read_bytes(source: Source, width: int) -> bytes:
    """A run of bytes that holds numbers of this width."""
    data = source.reader.unpack()
    if type(data) is not bytes or len(data) % width:
        raise errors.ProtocolError(f"expected a run of bytes that holds items of {width} bytes, found {_found(data)}")
    _check_count(len(data) // width, source.limits.keys_max)
    return data


KEY_IS_NUMBER = 0xFFFFFFFF
"""Stands in place of the length of a key that is a number."""
KEY_HAS_NAME = 0x80000000
"""Added to the length of the name of a key that is a number with a name."""


def _pack_keys(values: Sequence[int | str]) -> list[bytes]:
    """Lengths, and in sequence the texts, or eight bytes of a number."""
    if set(map(type, values)) == {str}:
        return _pack_texts(cast("Sequence[str]", values))
    lengths, parts = zip(*map(_key_bytes, values), strict=True) if values else ((), ())
    return [np.array(lengths, _U32).tobytes(), b"".join(parts)]


def _key_bytes(value: object) -> tuple[int, bytes]:
    """A key's length, or the code that replaces it, and its bytes."""
    if type(value) is str:
        text = value.encode()
        return len(text), text
    if type(value) in (int, NamedKey) and -(1 << 63) <= (number := cast("int", value)) < 1 << 63:
        data = number.to_bytes(8, "little", signed=True)
        if not isinstance(value, NamedKey):
            return KEY_IS_NUMBER, data
        name = value.name.encode()
        return KEY_HAS_NAME + len(name), data + name
    raise errors.ProtocolError(f"expected a key (text, or an integer of 64 bits), found {_found(value)}")


def _read_keys(source: Source) -> tuple[int | str, ...]:
    lengths, content = _read_lengths(source)
    is_number, has_name = lengths == KEY_IS_NUMBER, lengths >= KEY_HAS_NAME
    if not has_name.any():
        return tuple(map(bytes.decode, _cut(lengths, content, source.limits.key_bytes_max)))
    lengths = np.where(is_number, 8, np.where(has_name, lengths - KEY_HAS_NAME + 8, lengths))
    parts = _cut(lengths, content, source.limits.key_bytes_max)
    kinds = (is_number.astype(int) + has_name).tolist()
    return tuple([_KEY_READERS[kind](part) for kind, part in zip(kinds, parts, strict=True)])


def _number_of(part: bytes) -> int:
    return int.from_bytes(part, "little", signed=True)


_KEY_READERS: tuple[Callable[[bytes], int | str], ...] = (
    bytes.decode,
    lambda part: NamedKey(_number_of(part[:8]), part[8:].decode()),
    _number_of,
)
"""By how many of these are true: its length is that of a number; it is that of a number, or of its name."""


def _pack_texts(values: Sequence[str]) -> list[bytes]:
    """Lengths, and the texts in sequence."""
    parts = [value.encode() for value in values]
    return [np.array(list(map(len, parts)), _U32).tobytes(), b"".join(parts)]


def _read_texts(source: Source) -> tuple[str, ...]:
    lengths, content = _read_lengths(source)
    return tuple(map(bytes.decode, _cut(lengths, content, source.limits.name_bytes_max)))


def _read_lengths(source: Source) -> tuple[Any, bytes]:
    """How long each key or text is, and all of them together."""
    expect_count(source, 2)
    lengths = np.frombuffer(_read_bytes(source, 4), _U32).astype(np.int64)
    content = source.reader.unpack()
    if type(content) is not bytes:
        raise errors.ProtocolError(f"expected the bytes of texts, found {_found(content)}")
    return lengths, content


def _cut(lengths: Any, content: bytes, bytes_max: int) -> list[bytes]:
    """The content, cut into parts of these lengths."""
    if len(lengths) and int(lengths.max()) > bytes_max:
        raise errors.ProtocolError(f"a text is longer than {bytes_max} bytes")
    ends = lengths.cumsum()
    if len(content) != (int(ends[-1]) if len(ends) else 0):
        raise errors.ProtocolError(f"{len(content)} bytes of texts, where their lengths make another number")
    if not content:
        return [b""] * len(lengths)
    stops = ends.tolist()
    return [content[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _pack_shapes(values: Sequence[Sequence[int]]) -> list[bytes]:
    """The number of dimensions of each shape, and all dimensions in sequence."""
    lengths = [length for shape in values for length in shape]
    if min(lengths, default=0) < 0:
        raise errors.ProtocolError(f"expected a dimension of at least 0, found {min(lengths)}")
    return [bytes(map(len, values)), np.array(lengths, _U64).tobytes()]


def _read_shapes(source: Source) -> tuple[tuple[int, ...], ...]:
    expect_count(source, 2)
    dims = np.frombuffer(_read_bytes(source, 1), _U8)
    if len(dims) and int(dims.max()) > source.limits.dims_max:
        raise errors.ProtocolError(f"expected a shape of at most {source.limits.dims_max} dimensions")
    data = source.reader.unpack()
    stops = dims.astype(np.int64).cumsum().tolist()
    if type(data) is not bytes or len(data) != 8 * (stops[-1] if stops else 0):
        raise errors.ProtocolError(f"expected {stops[-1] if stops else 0} dimensions of 8 bytes, found {_found(data)}")
    flat = np.frombuffer(data, _U64).tolist()
    shapes = tuple([tuple(flat[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)])
    for shape in set(shapes):
        # Zeros do not count, so that no other dimension hides behind one.
        if math.prod([length or 1 for length in shape]) > source.limits.elements_max:
            raise errors.ProtocolError(f"a shape has more than {source.limits.elements_max} elements")
    return shapes


_DTYPE_CODES = frozenset(int(dtype) for dtype in DType)


def _read_dtypes(source: Source) -> tuple[int, ...]:
    data = _read_bytes(source, 1)
    if wrong := set(data) - _DTYPE_CODES:
        raise errors.ProtocolError(f"expected the code of a dtype, found {min(wrong)}")
    return tuple(data)


Keys = Annotated[tuple[int | str, ...], WireType("keys", _read_keys, _pack_keys, "keys")]
Shapes = Annotated[tuple[tuple[int, ...], ...], WireType("shapes", _read_shapes, _pack_shapes, "keys")]
DTypes = Annotated[tuple[int, ...], WireType("dtypes", _read_dtypes, bytes, "keys")]
Forms = Annotated[tuple[str, ...], WireType("forms", _read_texts, _pack_texts, "keys")]
Givers = Annotated[
    tuple[int, ...],
    WireType(
        "givers",
        lambda source: tuple(np.frombuffer(_read_bytes(source, 4), _U32).tolist()),
        lambda values: np.array(values, _U32).tobytes(),
        "keys",
    ),
]


# Columns about slices: arrays with one item per slice.


def _packer(dtype: np.dtype[Any]) -> Callable[[Any], bytes]:
    def pack(values: Any) -> bytes:
        if values.dtype != dtype:
            raise TypeError(f"expected an array of {dtype}, found {values.dtype}")
        data: bytes = values.tobytes()
        return data

    return pack


def _reader(dtype: np.dtype[Any]) -> Callable[[Source], Any]:
    width = dtype.itemsize

    def read(source: Source) -> Any:
        data = source.reader.unpack()
        if type(data) is not bytes or len(data) % width:
            raise errors.ProtocolError(f"expected a run of bytes that holds numbers of {width} bytes")
        return np.frombuffer(data, dtype)

    return read


_pack_u8, _pack_u32 = _packer(_U8), _packer(_U32)
_read_u8, _read_u32 = _reader(_U8), _reader(_U32)


def bits(known: int) -> WireType:
    """A byte of flags per slice, with no other bits than these."""
    unknown = ~int(known)  # a plain int: arithmetic with members of an enumeration is slow

    def check(values: U8, limits: WireLimits) -> None:  # noqa: ARG001
        if found := int(np.bitwise_or.reduce(values)) & unknown:
            raise errors.ProtocolError(f"unknown flags {found}")

    return WireType("u8s", _read_u8, _pack_u8, "slices", check=check)


def _read_settings(source: Source) -> tuple[tuple[float, float, float], ...]:
    value = source.reader.unpack()
    if type(value) is not tuple:
        raise errors.ProtocolError("expected a list of settings")
    for setting in value:
        if type(setting) is not tuple or len(setting) != 3:
            raise errors.ProtocolError("expected a setting of three floats")
        for number in setting:
            if type(number) is not float:
                raise errors.ProtocolError(f"expected a finite float or NaN, found {_found(number)}")
    return value


def _pack_settings(values: tuple[tuple[float, float, float], ...]) -> list[tuple[float, float, float]]:
    return [(float(lr), float(wd), float(rescale)) for lr, wd, rescale in values]


def _check_settings(values: tuple[tuple[float, float, float], ...], limits: WireLimits) -> None:
    if len(values) > limits.settings_max:
        raise errors.ProtocolError(f"{len(values)} settings, where {limits.settings_max} are allowed")
    for setting in values:
        for number in setting:
            if math.isinf(number):
                raise errors.ProtocolError(f"expected a finite float or NaN, found {number}")


U32s = Annotated[U32, WireType("u32s", _read_u32, _pack_u32, "slices")]
U8s = Annotated[U8, WireType("u8s", _read_u8, _pack_u8, "slices")]
Numbers = Annotated[U32, WireType("numbers", _read_u32, _pack_u32, "numbers")]
Settings = Annotated[
    tuple[tuple[float, float, float], ...], WireType("settings", _read_settings, _pack_settings, check=_check_settings)
]


# Arrays in the payload.


def _payload(source: Source) -> Payload | tuple[Payload, ...]:
    return source.payload[0] if len(source.payload) == 1 else tuple(source.payload)


def _pack_arrays(value: Arrays) -> list[Any]:
    return [_pack_u8(value.dtypes), _pack_u32(value.counts), value.encoding]


def _read_arrays(source: Source) -> Arrays:
    expect_count(source, 3)
    dtypes, counts = _read_u8(source), _read_u32(source)
    encoding = source.reader.unpack()
    if type(encoding) is not int or encoding != 0:
        raise errors.ProtocolError(f"unknown encoding {_found(encoding)}")
    return Arrays(dtypes, counts, _payload(source), encoding)


def _pack_coded(value: Coded) -> list[Any]:
    return [_pack_u32(value.counts), _pack_u32(value.entries), int(value.encoding), float(value.parameter)]


def _read_coded(source: Source) -> Coded:
    expect_count(source, 4)
    counts, entries = _read_u32(source), _read_u32(source)
    encoding, parameter = source.reader.unpack(), source.reader.unpack()
    if type(encoding) is not int:
        raise errors.ProtocolError(f"expected the code of an encoding, found {_found(encoding)}")
    if type(parameter) is not float:
        raise errors.ProtocolError(f"expected the parameter of an encoding, a float, found {_found(parameter)}")
    return Coded(counts, entries, encoding, parameter, _payload(source))


def _check_arrays(arrays: Arrays, limits: WireLimits) -> None:
    if arrays.encoding != 0:
        raise errors.ProtocolError(f"unknown encoding {arrays.encoding}")
    itemsizes = ITEMSIZES.take(arrays.dtypes)
    if not np.minimum.reduce(itemsizes):
        raise errors.ProtocolError("an array has an unknown dtype")
    sizes = pad_sizes(itemsizes * arrays.counts)
    wanted = int(np.add.reduce(sizes))
    found = arrays.nbytes
    if found > limits.payload_bytes_max:
        raise errors.ProtocolError(f"a payload of {found} bytes, where {limits.payload_bytes_max} are allowed")
    if wanted != found:
        raise errors.ProtocolError(f"the payload has {found} bytes where its dtypes and counts make {wanted}")
    if isinstance(arrays.payload, tuple):
        _check_frames(arrays.payload, sizes, limits)


def _check_frames(frames: Sequence[Payload], sizes: np.ndarray[Any, Any], limits: WireLimits) -> None:
    if not 0 < len(frames) <= limits.payload_frames_max:
        raise errors.ProtocolError(f"{len(frames)} payload frames, where 1 to {limits.payload_frames_max} are allowed")
    if len(frames) == 1:
        return
    lengths = [memoryview(frame).nbytes for frame in frames]
    frame_ends, array_ends = np.cumsum(lengths), sizes.cumsum()
    # The sums agree, so each frame ends at or before the end of the last array.
    if not all(lengths) or (array_ends[array_ends.searchsorted(frame_ends)] != frame_ends).any():
        raise errors.ProtocolError("a payload frame is empty, or ends within an array")


def _check_coded(coded: Coded, limits: WireLimits) -> None:
    check_coded(coded, limits.payload_bytes_max)
    _check_arrays(as_octets(coded), limits)


def _check_row_ids(arrays: Arrays, limits: WireLimits) -> None:
    if (arrays.dtypes != DType.INT64).any():
        raise errors.ProtocolError("row ids are not int64")
    _check_arrays(arrays, limits)


def check_rows(arrays: Arrays, limits: WireLimits) -> None:
    """Whether each slice has ids and values of as many rows, or neither."""
    if len(arrays.counts) % 2 or len(arrays.dtypes) != len(arrays.counts):
        raise errors.ProtocolError(f"{len(arrays.counts)} arrays, where ids and values of each slice are expected")
    ids, values = arrays.counts[::2], arrays.counts[1::2]
    if (arrays.dtypes[::2] != DType.INT64).any():
        raise errors.ProtocolError("row ids are not int64")
    if ((ids == 0) != (values == 0)).any() or (values % np.maximum(ids, 1)).any():
        raise errors.ProtocolError("the values of a slice are not a whole number for each of its rows")
    _check_arrays(arrays, limits)


_IN_ARRAYS = ("dtypes", "counts")

SliceArrays = Annotated[
    Arrays, WireType("arrays", _read_arrays, _pack_arrays, "slices", _IN_ARRAYS, check=_check_arrays)
]
"""An array per slice."""
RowIds = Annotated[Arrays, WireType("arrays", _read_arrays, _pack_arrays, "slices", _IN_ARRAYS, check=_check_row_ids)]
"""An array of row ids per slice."""
RowArrays = Annotated[Arrays, WireType("arrays", _read_arrays, _pack_arrays, check=check_rows)]
"""Two arrays per slice: ids of rows, and their values."""
CodedArrays = Annotated[
    Coded, WireType("coded", _read_coded, _pack_coded, "slices", ("counts", "entries"), check=_check_coded)
]
