"""What the ranks of a job without servers say to rank 0, which compares them, and what it answers.

One message a frame: a byte for its kind, then its fields in order, little-endian, as `LAYOUT` of its class says. Texts
are UTF-8 behind their length in bytes, lists behind the number of their items. COLLECTIVE.md has the table.

Rules that hold here:

* Whatever the bytes are, only `ProtocolError` leaves `decode`.
* Nothing is allocated for a size that a peer merely claims: every item of a list takes bytes that must be there.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvdist.errors import ProtocolError

MESSAGE_BYTES_MAX = 16 << 20
TEXT_BYTES_MAX = 4096
"""Longer texts are cut by whoever sends them: they are for people."""
DIGEST_BYTES = 8
ENTRY_BYTES = 1 + DIGEST_BYTES
"""An operation in a `CallReport`: whether its rank waits to be admitted to it, and the digest of its signature."""
WHOLE_JOB = 0xFFFFFFFF
"""In the place of a group's number."""

_U8, _U32, _U64 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")
_PAIR = struct.Struct("<IQ")


@dataclass(frozen=True, slots=True)
class RankHello:
    """A rank has come. `token` is what rank 0 left at the meeting point, which strangers have not read."""

    KIND: ClassVar[int] = 1
    LAYOUT: ClassVar[str] = "token:text rank:u32 size:u32 host:text version:text"
    token: str
    rank: int
    size: int
    host: str
    version: str


@dataclass(frozen=True, slots=True)
class DefineOperation:
    """The signature of an operation whose digest comes next; see `kvdist.collective.signature`."""

    KIND: ClassVar[int] = 2
    LAYOUT: ClassVar[str] = "kind:text name:text tensors:texts detail:text device:text"
    kind: str
    name: str
    tensors: tuple[str, ...]
    detail: str
    device: str


@dataclass(frozen=True, slots=True)
class CallReport:
    """The operations that a rank has called since its last report, and how many are done of all."""

    KIND: ClassVar[int] = 3
    LAYOUT: ClassVar[str] = "group:u32 first:u64 done:u64 entries:bytes"
    group: int
    first: int
    done: int
    entries: bytes


@dataclass(frozen=True, slots=True)
class OperationFailed:
    """An operation failed on a rank. `is_connection`: another one may be the cause."""

    KIND: ClassVar[int] = 4
    LAYOUT: ClassVar[str] = "group:u32 sequence:u64 is_connection:flag text:text"
    group: int
    sequence: int
    is_connection: bool
    text: str


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """Who is in a group; said by each of them before its first report of it."""

    KIND: ClassVar[int] = 5
    LAYOUT: ClassVar[str] = "group:u32 ranks:numbers"
    group: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankBye:
    """A rank leaves, after so many operations of its groups; `failure` says why if it should not have."""

    KIND: ClassVar[int] = 6
    LAYOUT: ClassVar[str] = "failure:text counts:pairs"
    failure: str
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class LastCalls:
    """A rank calls no more than so many operations of these groups. It stays to finish them, then sends `RankBye`."""

    KIND: ClassVar[int] = 7
    LAYOUT: ClassVar[str] = "counts:pairs"
    counts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class AllConnected:
    """All ranks have come; their hosts."""

    KIND: ClassVar[int] = 16
    LAYOUT: ClassVar[str] = "hosts:texts"
    hosts: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Agreed:
    """All ranks are at the same operations of a group up to, and without, this one."""

    KIND: ClassVar[int] = 17
    LAYOUT: ClassVar[str] = "group:u32 sequence:u64"
    group: int
    sequence: int


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Ranks are at different operations. `is_fatal`: some have begun theirs, and the group is at its end."""

    KIND: ClassVar[int] = 18
    LAYOUT: ClassVar[str] = "group:u32 sequence:u64 is_fatal:flag text:text"
    group: int
    sequence: int
    is_fatal: bool
    text: str


@dataclass(frozen=True, slots=True)
class RankGone:
    """A rank is gone. With a `cause` that is a failure; else it has left after so many operations of its groups."""

    KIND: ClassVar[int] = 19
    LAYOUT: ClassVar[str] = "rank:u32 host:text cause:text counts:pairs"
    rank: int
    host: str
    cause: str
    counts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class GroupFailed:
    """A group, or `WHOLE_JOB`, is at its end."""

    KIND: ClassVar[int] = 20
    LAYOUT: ClassVar[str] = "group:u32 text:text"
    group: int
    text: str


@dataclass(frozen=True, slots=True)
class Participate:
    """To a rank that has joined: take part in this operation with zeros; with no `kind`, only count it."""

    KIND: ClassVar[int] = 21
    LAYOUT: ClassVar[str] = "group:u32 sequence:u64 kind:text name:text tensors:texts detail:text device:text"
    group: int
    sequence: int
    kind: str = ""
    name: str = ""
    tensors: tuple[str, ...] = ()
    detail: str = ""
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class AllJoined:
    """All ranks have joined, this one last."""

    KIND: ClassVar[int] = 22
    LAYOUT: ClassVar[str] = "group:u32 sequence:u64 last:u32"
    group: int
    sequence: int
    last: int


@dataclass(frozen=True, slots=True)
class Throttle:
    """Whether each operation of a group must be waited for from now on: while somebody has joined."""

    KIND: ClassVar[int] = 23
    LAYOUT: ClassVar[str] = "group:u32 waits:flag"
    group: int
    waits: bool


@dataclass(frozen=True, slots=True)
class StallWarning:
    """Something has been waited for too long; a sentence for the user."""

    KIND: ClassVar[int] = 24
    LAYOUT: ClassVar[str] = "text:text"
    text: str


@dataclass(frozen=True, slots=True)
class Farewell:
    """The `RankBye` has been heard."""

    KIND: ClassVar[int] = 25
    LAYOUT: ClassVar[str] = ""


@dataclass(frozen=True, slots=True)
class RankLeaving:
    """A rank calls no more than so many operations of these groups: what is behind them can never be done."""

    KIND: ClassVar[int] = 26
    LAYOUT: ClassVar[str] = "rank:u32 host:text counts:pairs"
    rank: int
    host: str
    counts: tuple[tuple[int, int], ...]


ToCoordinator = RankHello | DefineOperation | CallReport | OperationFailed | GroupMembers | RankBye | LastCalls
ToMember = (
    AllConnected
    | Agreed
    | Mismatch
    | RankGone
    | GroupFailed
    | Participate
    | AllJoined
    | Throttle
    | StallWarning
    | Farewell
    | RankLeaving
)
Message = ToCoordinator | ToMember

_CLASSES: dict[int, Any] = {
    message.KIND: message
    for message in (
        RankHello, DefineOperation, CallReport, OperationFailed, GroupMembers, RankBye, LastCalls,
        AllConnected, Agreed, Mismatch, RankGone, GroupFailed, Participate, AllJoined, Throttle, StallWarning,
        Farewell, RankLeaving,
    )
}  # fmt: skip


def encode(message: Message) -> bytes:
    """The bytes of a message; texts for people are cut at `TEXT_BYTES_MAX`."""
    kinds = _FORMS[message.KIND]
    return b"".join((_U8.pack(message.KIND), *(_PACK[k](v) for k, v in zip(kinds, _values(message), strict=True))))


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame.

    Raises:
        ProtocolError: there is none.
    """
    if not 0 < len(frame) <= MESSAGE_BYTES_MAX:
        raise ProtocolError(f"a message of {len(frame)} bytes; from 1 to {MESSAGE_BYTES_MAX} are allowed")
    source = _Source(bytes(frame))
    try:
        made = _CLASSES[source.u8()]
        message: Message = made(*(getattr(source, kind)() for kind in _FORMS[made.KIND]))
    except (KeyError, struct.error, UnicodeDecodeError, ProtocolError) as error:
        raise ProtocolError(f"no message of a collective job: {error}") from None
    if source.rest:
        raise ProtocolError(f"{source.rest} bytes behind a message of a collective job")
    return message


def _values(message: Message) -> Sequence[Any]:
    return [getattr(message, name) for name in _NAMES[message.KIND]]


class _Source:
    """The bytes of a message, read from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def rest(self) -> int:
        return len(self._data) - self._at

    def u8(self) -> int:
        return int(self._number(_U8))

    def u32(self) -> int:
        return int(self._number(_U32))

    def u64(self) -> int:
        return int(self._number(_U64))

    def flag(self) -> bool:
        value = self.u8()
        if value > 1:
            raise ProtocolError(f"a flag of {value}")
        return value == 1

    def bytes(self) -> bytes:
        nbytes = self.u32()
        if nbytes > self.rest:
            raise ProtocolError(f"{nbytes} bytes claimed, {self.rest} there")
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def text(self) -> str:
        return self.bytes().decode()

    def texts(self) -> tuple[str, ...]:
        return tuple(self.text() for _ in range(self._count(_U32.size)))

    def numbers(self) -> tuple[int, ...]:
        return tuple(self.u32() for _ in range(self._count(_U32.size)))

    def pairs(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.u32(), self.u64()) for _ in range(self._count(_PAIR.size)))

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(value)

    def _count(self, item_bytes: int) -> int:
        count = self.u32()
        if count * item_bytes > self.rest:
            raise ProtocolError(f"{count} items claimed in {self.rest} bytes")
        return count


def _bytes(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def _text(value: str) -> bytes:
    # Cut where a character begins, and never fail for what people have typed.
    return _bytes(value.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore").encode())


_PACK: dict[str, Callable[[Any], bytes]] = {
    "u32": _U32.pack,
    "u64": _U64.pack,
    "flag": lambda value: _U8.pack(bool(value)),
    "bytes": _bytes,
    "text": _text,
    "texts": lambda values: b"".join((_U32.pack(len(values)), *map(_text, values))),
    "numbers": lambda values: b"".join((_U32.pack(len(values)), *map(_U32.pack, values))),
    "pairs": lambda values: b"".join((_U32.pack(len(values)), *(_PAIR.pack(*pair) for pair in values))),
}
_NAMES = {kind: [word.partition(":")[0] for word in made.LAYOUT.split()] for kind, made in _CLASSES.items()}
_FORMS = {kind: [word.partition(":")[2] for word in made.LAYOUT.split()] for kind, made in _CLASSES.items()}
