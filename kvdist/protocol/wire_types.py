"""The types of fields in a header: how each is packed, and how it is read with nothing taken on trust.

A `Field` is a pair of functions, chosen once per kind in the table of `wire`. `read` takes the next item from a
`Source`; it raises `ProtocolError` when the item is anything but what the field says. Exact types hold: a bool is no
number, an integer no float. Lists whose length the peer chooses are read item by item, because a general decoder
would allocate the length that each of many nested lists claims to have. What is about keys, of which one message may
have very many, travels as runs of bytes instead, which are checked and taken apart in a few calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from kvdist.dtypes import DType
from kvdist.errors import ProtocolError
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol.arrays import Arrays, Coded
from kvdist.protocol.limits import WireLimits
from kvdist.protocol.messages import ErrorCode

ROLES = (Role.SCHEDULER, Role.SERVER, Role.WORKER)
"""A role's code is its place here."""
ROLE_CODES = {role: code for code, role in enumerate(ROLES)}

_U8 = np.dtype("<u1")
_U32 = np.dtype("<u4")
_U64 = np.dtype("<u8")


class Reader(Protocol):
    """What the fields need of a decoder of items."""

    def unpack(self) -> Any:
        """The next item, whole."""

    def read_bytes(self, nbytes: int) -> bytes:
        """The next bytes as they are; fewer at the end."""


@dataclass(slots=True)
class Source:
    """What one message is read from."""

    reader: Reader
    limits: WireLimits
    payload: list[memoryview]


@dataclass(frozen=True, slots=True)
class Field:
    """How values of one field are packed (to what msgpack knows) and read."""

    pack: Callable[[Any], Any]
    read: Callable[[Source], Any]


def _same(value: Any) -> Any:
    return value


def _found(value: object) -> str:
    """What was found instead, in a few harmless characters."""
    return ascii(value)[:40] if isinstance(value, int | float) else f"a {type(value).__name__}"


def integer(low: int, high: int) -> Field:
    """A whole number from `low` to `high`, both included."""

    def read(source: Source) -> int:
        value = source.reader.unpack()
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"expected an integer from {low} to {high}, found {_found(value)}")
        return value

    return Field(_same, read)


def _read_flag(source: Source) -> bool:
    value = source.reader.unpack()
    if type(value) is not bool:
        raise ProtocolError(f"expected true or false, found {_found(value)}")
    return value


def _read_seconds(source: Source) -> float:
    value = source.reader.unpack()
    if type(value) is not float or not math.isfinite(value):
        raise ProtocolError(f"expected a finite float, found {_found(value)}")
    return value


def _text(value: object, bytes_max: int) -> str:
    if type(value) is not str:
        raise ProtocolError(f"expected text, found {_found(value)}")
    # A character has one to four bytes, so most texts need not be encoded to be measured.
    if len(value) * 4 > bytes_max and len(value.encode()) > bytes_max:
        raise ProtocolError(f"a text is longer than {bytes_max} bytes")
    return value


def text(limit: str) -> Field:
    """Text of at most as many bytes as the limit of that name says."""
    return Field(_same, lambda source: _text(source.reader.unpack(), getattr(source.limits, limit)))


def sentence(bytes_max: int) -> Field:
    """Text for people: what is too long is cut by the sender, so that no report of a failure can fail itself."""

    def pack(value: str) -> str:
        data = value.encode("utf-8", "replace")
        if len(data) > bytes_max:
            data = data[: bytes_max - 3] + "…".encode()
        return data.decode("utf-8", "ignore")

    return Field(pack, text("sentence_bytes_max").read)


NUMBER = 0xFFFFFFFF
"""In place of the length of a key that is a number."""


def _pack_keys(values: Sequence[int | str]) -> list[bytes]:
    """Lengths, and one after the other the texts, or eight bytes of a number."""
    if set(map(type, values)) == {str}:
        return _pack_texts(cast("Sequence[str]", values))
    parts = list(map(_key_bytes, values))
    lengths = [len(part) if type(value) is str else NUMBER for part, value in zip(parts, values, strict=True)]
    return [np.array(lengths, _U32).tobytes(), b"".join(parts)]


def _key_bytes(value: object) -> bytes:
    if type(value) is str:
        return value.encode()
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value.to_bytes(8, "little", signed=True)
    raise ProtocolError(f"expected a key (text, or an integer of 64 bits), found {_found(value)}")


def _read_keys(source: Source) -> tuple[int | str, ...]:
    lengths, content = _read_lengths(source)
    is_number = lengths == NUMBER
    parts = _parts(np.where(is_number, 8, lengths), content, source.limits.key_bytes_max)
    if not is_number.any():
        return tuple(map(bytes.decode, parts))
    return tuple(
        [
            int.from_bytes(part, "little", signed=True) if number else part.decode()
            for part, number in zip(parts, is_number.tolist(), strict=True)
        ]
    )


def _pack_texts(values: Sequence[str]) -> list[bytes]:
    """Lengths, and the texts one after the other."""
    parts = [value.encode() for value in values]
    return [np.array(list(map(len, parts)), _U32).tobytes(), b"".join(parts)]


def _read_texts(source: Source) -> tuple[str, ...]:
    lengths, content = _read_lengths(source)
    return tuple(map(bytes.decode, _parts(lengths, content, source.limits.name_bytes_max)))


def _read_lengths(source: Source) -> tuple[Any, bytes]:
    """How long each key or text is, and all of them together."""
    expect(read_count(source), 2)
    lengths = np.frombuffer(_read_bytes(source, 4), _U32).astype(np.int64)
    if len(lengths) > source.limits.keys_max:
        raise ProtocolError(f"a list of {len(lengths)} items, where {source.limits.keys_max} are allowed")
    return lengths, _read_bytes(source, 1)


def _parts(lengths: Any, content: bytes, bytes_max: int) -> list[bytes]:
    """The content, cut."""
    if len(lengths) and int(lengths.max()) > bytes_max:
        raise ProtocolError(f"a text is longer than {bytes_max} bytes")
    ends = lengths.cumsum()
    if len(content) != (int(ends[-1]) if len(ends) else 0):
        raise ProtocolError(f"{len(content)} bytes of texts, where their lengths make another number")
    if not content:
        return [b""] * len(lengths)
    stops = ends.tolist()
    return [content[start:stop] for start, stop in zip([0, *stops], stops, strict=False)]


def _read_bytes(source: Source, width: int) -> bytes:
    """A run of bytes that holds numbers of this width."""
    data = source.reader.unpack()
    if type(data) is not bytes or len(data) % width:
        raise ProtocolError(f"expected a run of bytes that holds items of {width} bytes, found {_found(data)}")
    return data


def _pack_shapes(values: Sequence[Sequence[int]]) -> list[bytes]:
    """How many dimensions each has, and all dimensions one after the other."""
    lengths = [length for shape in values for length in shape]
    if min(lengths, default=0) < 0:
        raise ProtocolError(f"expected a dimension of at least 0, found {min(lengths)}")
    return [bytes(map(len, values)), np.array(lengths, _U64).tobytes()]


def _read_shapes(source: Source) -> tuple[tuple[int, ...], ...]:
    expect(read_count(source), 2)
    dims = np.frombuffer(_read_bytes(source, 1), _U8)
    if len(dims) > source.limits.keys_max:
        raise ProtocolError(f"a list of {len(dims)} items, where {source.limits.keys_max} are allowed")
    lengths = np.frombuffer(_read_bytes(source, 8), _U64)
    if len(dims) and int(dims.max()) > source.limits.dims_max:
        raise ProtocolError(f"expected a shape of at most {source.limits.dims_max} dimensions")
    stops = dims.astype(np.int64).cumsum().tolist()
    if len(lengths) != (stops[-1] if stops else 0):
        raise ProtocolError(f"{len(lengths)} dimensions, where shapes say {stops[-1] if stops else 0}")
    flat = lengths.tolist()
    shapes = tuple([tuple(flat[start:stop]) for start, stop in zip([0, *stops], stops, strict=False)])
    for shape in set(shapes):
        # Zeros do not count, so that no other dimension hides behind one.
        if math.prod([length or 1 for length in shape]) > source.limits.elements_max:
            raise ProtocolError(f"a shape has more than {source.limits.elements_max} elements")
    return shapes


def _read_dtypes(source: Source) -> tuple[int, ...]:
    data = _read_bytes(source, 1)
    if len(data) > source.limits.keys_max:
        raise ProtocolError(f"a list of {len(data)} items, where {source.limits.keys_max} are allowed")
    if wrong := set(data) - _DTYPE_CODES:
        raise ProtocolError(f"expected the code of a dtype, found {min(wrong)}")
    return tuple(data)


_DTYPE_CODES = frozenset(int(dtype) for dtype in DType)


def _pack_counts(values: Sequence[int]) -> bytes:
    return np.array(values, _U32).tobytes()


def _read_counts(source: Source) -> tuple[int, ...]:
    data = _read_bytes(source, 4)
    if len(data) > 4 * source.limits.keys_max:
        raise ProtocolError(f"a list of {len(data) // 4} items, where {source.limits.keys_max} are allowed")
    return tuple(np.frombuffer(data, _U32).tolist())


def _read_error(source: Source) -> int:
    value = source.reader.unpack()
    if type(value) is not int or value not in _ERROR_CODES:
        raise ProtocolError(f"expected the code of an error, found {_found(value)}")
    return value


_ERROR_CODES = frozenset(int(code) for code in ErrorCode)


def read_count(source: Source) -> int:
    """How many items the list has that begins here."""
    first = source.reader.read_bytes(1)
    if first and first[0] & 0xF0 == 0x90:
        return first[0] & 0x0F
    width = {b"\xdc": 2, b"\xdd": 4}.get(first)
    if width is None:
        raise ProtocolError("expected a list")
    digits = source.reader.read_bytes(width)
    if len(digits) != width:
        raise ProtocolError("the header ends inside a list")
    return int.from_bytes(digits, "big")


def many(item: Field, limit: str) -> Field:
    """A tuple of items, at most as many as the limit of that name says."""
    pack_item, read_item = item.pack, item.read

    def read(source: Source) -> tuple[Any, ...]:
        count = read_count(source)
        if count > getattr(source.limits, limit):
            raise ProtocolError(f"a list of {count} items, where {getattr(source.limits, limit)} are allowed")
        return tuple([read_item(source) for _ in range(count)])

    return Field(lambda values: [pack_item(value) for value in values], read)


def record(make: Callable[..., Any], **fields: Field) -> Field:
    """A dataclass inside a field: a list of its own fields in their order."""
    table = tuple(fields.items())

    def pack(value: Any) -> list[Any]:
        return [field.pack(getattr(value, name)) for name, field in table]

    def read(source: Source) -> Any:
        expect(read_count(source), len(table))
        return make(*[field.read(source) for _, field in table])

    return Field(pack, read)


def expect(found: int, wanted: int) -> None:
    """Refuse a list of another length."""
    if found != wanted:
        raise ProtocolError(f"expected a list of {wanted} items, found {found}")


def _read_member(source: Source) -> Member:
    value = source.reader.unpack()
    if type(value) is not tuple or len(value) != 3 or any(type(part) is not int for part in value):
        raise ProtocolError("expected the role, rank and incarnation of a process")
    role, rank, incarnation = value
    if not (0 <= role < len(ROLES) and 0 <= rank < 1 << 32 and 0 <= incarnation < 1 << 64):
        raise ProtocolError("the role, rank or incarnation of a process is out of range")
    return member_of(role, rank, incarnation)


def member_of(role: int, rank: int, incarnation: int) -> Member:
    """The process with that code of a role; the numbers already have their widths."""
    if role >= len(ROLES):
        raise ProtocolError(f"unknown role {role}")
    if role == 0 and rank != 0:
        raise ProtocolError(f"a scheduler of rank {rank}; the scheduler has rank 0")
    return Member(NodeId(ROLES[role], rank), incarnation)


def _read_description(source: Source) -> dict[str, str | int | float | bool | None]:
    value = source.reader.unpack()
    if type(value) is not dict or len(value) > source.limits.entries_max:
        raise ProtocolError(f"expected a map of at most {source.limits.entries_max} entries")
    for name, entry in value.items():
        _text(name, source.limits.entry_name_bytes_max)
        _scalar(entry, source.limits)
    return value


def _scalar(value: object, limits: WireLimits) -> None:
    if isinstance(value, str):
        _text(value, limits.name_bytes_max)
        return
    whole = isinstance(value, int) and -(1 << 63) <= value < 1 << 63
    if not (value is None or whole or (isinstance(value, float) and math.isfinite(value))):
        raise ProtocolError(f"expected text, a bool, a 64-bit integer, a finite float or nil, found {_found(value)}")


def _read_settings(source: Source) -> tuple[tuple[float, float, float], ...]:
    value = source.reader.unpack()
    if type(value) is not tuple or len(value) > source.limits.settings_max:
        raise ProtocolError(f"expected a list of at most {source.limits.settings_max} settings")
    for setting in value:
        if type(setting) is not tuple or len(setting) != 3:
            raise ProtocolError("expected a setting of three floats")
        for number in setting:
            if type(number) is not float or math.isinf(number):
                raise ProtocolError(f"expected a finite float or NaN, found {_found(number)}")
    return value


def _pack_settings(values: tuple[tuple[float, float, float], ...]) -> list[tuple[float, float, float]]:
    return [(float(lr), float(wd), float(rescale)) for lr, wd, rescale in values]


def _pack_u32(values: Any) -> bytes:
    if values.dtype != _U32:
        raise TypeError(f"expected an array of uint32, found {values.dtype}")
    data: bytes = values.tobytes()
    return data


def _pack_u8(values: Any) -> bytes:
    if values.dtype != _U8:
        raise TypeError(f"expected an array of uint8, found {values.dtype}")
    data: bytes = values.tobytes()
    return data


def _read_u32(source: Source) -> Any:
    numbers = _read_u32_or_none(source)
    if not len(numbers):
        raise ProtocolError("expected a run of bytes that holds one or more numbers of four bytes")
    return numbers


def _read_u32_or_none(source: Source) -> Any:
    data = source.reader.unpack()
    if type(data) is not bytes or len(data) % 4:
        raise ProtocolError("expected a run of bytes that holds numbers of four bytes")
    return np.frombuffer(data, _U32)


def _read_u8(source: Source) -> Any:
    data = source.reader.unpack()
    if type(data) is not bytes or not data:
        raise ProtocolError("expected a run of one or more bytes")
    return np.frombuffer(data, _U8)


def _pack_arrays(value: Arrays) -> list[Any]:
    return [_pack_u8(value.dtypes), _pack_u32(value.counts), value.encoding]


def _read_arrays(source: Source) -> Arrays:
    expect(read_count(source), 3)
    dtypes, counts = _read_u8(source), _read_u32(source)
    encoding = source.reader.unpack()
    if type(encoding) is not int or encoding != 0:
        raise ProtocolError(f"unknown encoding {_found(encoding)}")
    payload = source.payload[0] if len(source.payload) == 1 else tuple(source.payload)
    return Arrays(dtypes, counts, payload, encoding)


def _pack_coded(value: Coded) -> list[Any]:
    return [_pack_u32(value.counts), _pack_u32(value.entries), int(value.encoding), float(value.parameter)]


def _read_coded(source: Source) -> Coded:
    expect(read_count(source), 4)
    counts, entries = _read_u32(source), _read_u32(source)
    encoding, parameter = source.reader.unpack(), source.reader.unpack()
    if type(encoding) is not int:
        raise ProtocolError(f"expected the code of an encoding, found {_found(encoding)}")
    if type(parameter) is not float:
        raise ProtocolError(f"expected the parameter of an encoding, a float, found {_found(parameter)}")
    payload = source.payload[0] if len(source.payload) == 1 else tuple(source.payload)
    return Coded(counts, entries, encoding, parameter, payload)


FLAG = Field(_same, _read_flag)
SECONDS = Field(float, _read_seconds)
KEYS = Field(_pack_keys, _read_keys)
SHAPES = Field(_pack_shapes, _read_shapes)
DTYPES = Field(bytes, _read_dtypes)
TEXTS = Field(_pack_texts, _read_texts)
COUNTS = Field(_pack_counts, _read_counts)
"""Numbers of 32 bits, one per key."""
ERROR = Field(int, _read_error)
MEMBER = Field(lambda member: [ROLE_CODES[member.node.role], member.node.rank, member.incarnation], _read_member)
DESCRIPTION = Field(_same, _read_description)
SETTINGS = Field(_pack_settings, _read_settings)
NUMBERS = Field(_pack_u32, _read_u32)
NUMBERS_OR_NONE = Field(_pack_u32, _read_u32_or_none)
OCTETS = Field(_pack_u8, _read_u8)
ARRAYS = Field(_pack_arrays, _read_arrays)
CODED = Field(_pack_coded, _read_coded)
