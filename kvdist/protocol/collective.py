"""The control messages of a job without servers: between its ranks and rank 0, which compares their calls.

COLLECTIVE.md specifies the bytes: one message per frame, a byte for its kind, then its fields in order, little-endian.
A field's annotation names its type; `encode` and `decode` are compiled from it, and a test compares it with the page.
Annotations are therefore not postponed in this module. Invariants:

* Only `ProtocolError` leaves `decode`, whatever the bytes are.
* No memory is allocated for a size that a peer merely claims: the bytes of every item must have arrived.
"""

import dataclasses
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, get_args

from kvdist import errors

MESSAGE_BYTES_MAX = 16 << 20
TEXT_BYTES_MAX = 4096
"""The sender cuts longer texts: they are for people."""
DIGEST_BYTES = 8
ENTRY_BYTES = 1 + DIGEST_BYTES
"""An operation in a `CallReport`: whether its rank waits to be admitted to it, and the digest of its signature."""
WHOLE_JOB = 0xFFFFFFFF
"""Stands for all groups in place of a group's number."""

_U8, _U32, _U64 = struct.Struct("<B"), struct.Struct("<I"), struct.Struct("<Q")
_PAIR = struct.Struct("<IQ")


class _Source:
    """The bytes of a message, read from the front."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def rest(self) -> int:
        return len(self._data) - self._at

    def number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(value)

    def octets(self) -> bytes:
        nbytes = self.count(1)
        self._at += nbytes
        return self._data[self._at - nbytes : self._at]

    def count(self, item_bytes: int) -> int:
        """The number of items of a list, whose bytes must have arrived."""
        count = self.number(_U32)
        if count * item_bytes > self.rest:
            raise errors.ProtocolError(f"{count} items claimed in {self.rest} bytes")
        return count


@dataclass(frozen=True, slots=True)
class ControlType:
    """How values of a type travel; `name` is the type's name in COLLECTIVE.md."""

    name: str
    pack: Callable[[Any], bytes]
    read: Callable[[_Source], Any]


def _read_flag(source: _Source) -> bool:
    value = source.number(_U8)
    if value > 1:
        raise errors.ProtocolError(f"a flag of {value}")
    return value == 1


def _pack_octets(value: bytes) -> bytes:
    return _U32.pack(len(value)) + value


def _pack_text(value: str) -> bytes:
    # Cut where a character begins, and never fail for what people have typed.
    return _pack_octets(value.encode("utf-8", "replace")[:TEXT_BYTES_MAX].decode("utf-8", "ignore").encode())


def _read_text(source: _Source) -> str:
    return source.octets().decode()


def _list_of(name: str, item_bytes: int, pack: Callable[[Any], bytes], read: Callable[[_Source], Any]) -> ControlType:
    """A tuple of items, each of at least `item_bytes`."""
    return ControlType(
        name,
        lambda values: b"".join((_U32.pack(len(values)), *map(pack, values))),
        lambda source: tuple([read(source) for _ in range(source.count(item_bytes))]),
    )


def _read_u32(source: _Source) -> int:
    return source.number(_U32)


UInt32 = Annotated[int, ControlType("u32", _U32.pack, _read_u32)]
UInt64 = Annotated[int, ControlType("u64", _U64.pack, lambda source: source.number(_U64))]
Boolean = Annotated[bool, ControlType("flag", lambda value: _U8.pack(bool(value)), _read_flag)]
Octets = Annotated[bytes, ControlType("bytes", _pack_octets, _Source.octets)]
Text = Annotated[str, ControlType("text", _pack_text, _read_text)]
Texts = Annotated[tuple[str, ...], _list_of("texts", _U32.size, _pack_text, _read_text)]
Numbers = Annotated[tuple[int, ...], _list_of("numbers", _U32.size, _U32.pack, _read_u32)]
Pairs = Annotated[
    tuple[tuple[int, int], ...],
    _list_of(
        "pairs",
        _PAIR.size,
        lambda pair: _PAIR.pack(*pair),
        lambda source: (source.number(_U32), source.number(_U64)),
    ),
]


class ControlMessage:
    """Base class of all control messages."""

    __slots__ = ()
    KIND: ClassVar[int]
    """The code of the kind: its first byte."""


@dataclass(frozen=True, slots=True)
class RankHello(ControlMessage):
    """A rank has connected.

    `token` is the token that rank 0 published in the rendezvous store, which strangers cannot read. `host` is for
    people; ranks with equal `machine` are on the same machine.
    """

    KIND = 1
    token: Text
    rank: UInt32
    size: UInt32
    host: Text
    machine: Text
    version: Text


@dataclass(frozen=True, slots=True)
class DefineOperation(ControlMessage):
    """The signature of an operation whose digest comes next; see `kvdist.collective.signature`."""

    KIND = 2
    kind: Text
    name: Text
    tensors: Texts
    detail: Text
    device: Text


@dataclass(frozen=True, slots=True)
class CallReport(ControlMessage):
    """The operations that a rank has called since its last report, and how many are done of all."""

    KIND = 3
    group: UInt32
    first: UInt64
    done: UInt64
    entries: Octets


@dataclass(frozen=True, slots=True)
class OperationFailed(ControlMessage):
    """An operation failed on a rank. `is_connection`: another rank may be the cause."""

    KIND = 4
    group: UInt32
    sequence: UInt64
    is_connection: Boolean
    text: Text


@dataclass(frozen=True, slots=True)
class GroupMembers(ControlMessage):
    """The ranks of a group; each of them sends this before its first report of the group."""

    KIND = 5
    group: UInt32
    ranks: Numbers


@dataclass(frozen=True, slots=True)
class RankBye(ControlMessage):
    """A rank leaves; `counts` are the operations that it has done per group, `failure` the reason if it must leave."""

    KIND = 6
    failure: Text
    counts: Pairs


@dataclass(frozen=True, slots=True)
class LastCalls(ControlMessage):
    """A rank calls no operations beyond these counts per group. It stays to finish them, then sends `RankBye`."""

    KIND = 7
    counts: Pairs


@dataclass(frozen=True, slots=True)
class RankWaits(ControlMessage):
    """A rank calls nothing more in a group before the end of operation `sequence`, or a later: its threads wait."""

    KIND = 8
    group: UInt32
    sequence: UInt64


@dataclass(frozen=True, slots=True)
class AllConnected(ControlMessage):
    """All ranks are connected; their hosts and machines."""

    KIND = 16
    hosts: Texts
    machines: Texts


@dataclass(frozen=True, slots=True)
class Agreed(ControlMessage):
    """All ranks are at the same operations of a group before operation `sequence`."""

    KIND = 17
    group: UInt32
    sequence: UInt64


@dataclass(frozen=True, slots=True)
class Mismatch(ControlMessage):
    """Ranks called different operations; `call` is this rank's.

    `is_fatal`: some have begun theirs, and the group has failed.
    """

    KIND = 18
    group: UInt32
    sequence: UInt64
    is_fatal: Boolean
    text: Text
    call: UInt64 = 0


@dataclass(frozen=True, slots=True)
class RankGone(ControlMessage):
    """A rank has left: with a `cause` because of a failure, else after `counts` operations per group."""

    KIND = 19
    rank: UInt32
    host: Text
    cause: Text
    counts: Pairs = ()


@dataclass(frozen=True, slots=True)
class GroupFailed(ControlMessage):
    """A group, or `WHOLE_JOB`, has failed."""

    KIND = 20
    group: UInt32
    text: Text


@dataclass(frozen=True, slots=True)
class Participate(ControlMessage):
    """To a rank that has joined: take part in this operation with zeros; with no `kind`, only count it."""

    KIND = 21
    group: UInt32
    sequence: UInt64
    kind: Text = ""
    name: Text = ""
    tensors: Texts = ()
    detail: Text = ""
    device: Text = "cpu"


@dataclass(frozen=True, slots=True)
class AllJoined(ControlMessage):
    """All ranks have joined, `last` as the last."""

    KIND = 22
    group: UInt32
    sequence: UInt64
    last: UInt32


@dataclass(frozen=True, slots=True)
class Throttle(ControlMessage):
    """Whether each operation of a group must be agreed on before it begins: after a `Reorder` or a `join`."""

    KIND = 23
    group: UInt32
    waits: Boolean


@dataclass(frozen=True, slots=True)
class StallWarning(ControlMessage):
    """An operation waits for too long; a sentence for the user."""

    KIND = 24
    text: Text


@dataclass(frozen=True, slots=True)
class Farewell(ControlMessage):
    """Rank 0 has received the `RankBye`."""

    KIND = 25


@dataclass(frozen=True, slots=True)
class RankLeaving(ControlMessage):
    """A rank calls no operations beyond these counts per group: later operations can never complete."""

    KIND = 26
    rank: UInt32
    host: Text
    counts: Pairs


@dataclass(frozen=True, slots=True)
class Reorder(ControlMessage):
    """To a rank that called operations in another order: all ranks are at its `call`, which is operation `sequence`."""

    KIND = 27
    group: UInt32
    sequence: UInt64
    call: UInt64


ToCoordinator = (
    RankHello | DefineOperation | CallReport | OperationFailed | GroupMembers | RankBye | LastCalls | RankWaits
)
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
    | Reorder
)
Message = ToCoordinator | ToMember

_FIELDS: dict[type[Any], tuple[tuple[str, ControlType], ...]] = {
    message: tuple((field.name, get_args(field.type)[1]) for field in dataclasses.fields(message))
    for message in get_args(Message)
}
_CLASSES: dict[int, type[Any]] = {message.KIND: message for message in _FIELDS}


def encode(message: Message) -> bytes:
    """The bytes of a message; texts are cut at `TEXT_BYTES_MAX`."""
    fields = _FIELDS[type(message)]
    return b"".join((_U8.pack(message.KIND), *[kind.pack(getattr(message, name)) for name, kind in fields]))


def decode(frame: bytes | memoryview) -> Message:
    """The message in a frame.

    Raises:
        ProtocolError: the bytes are not a message; the text explains why.
    """
    if not 0 < len(frame) <= MESSAGE_BYTES_MAX:
        raise errors.ProtocolError(f"a message of {len(frame)} bytes; from 1 to {MESSAGE_BYTES_MAX} are allowed")
    source = _Source(bytes(frame))
    try:
        made = _CLASSES[source.number(_U8)]
        message: Message = made(*[kind.read(source) for _, kind in _FIELDS[made]])
    except (KeyError, struct.error, UnicodeDecodeError, errors.ProtocolError) as error:
        raise errors.ProtocolError(f"not a message of a collective job: {error}") from None
    if source.rest:
        raise errors.ProtocolError(f"{source.rest} bytes are left over after a message of a collective job")
    return message
