"""Messages to frames and back. WIRE.md specifies the bytes; `KINDS` is its table of messages.

Invariants:

* Whatever the bytes are, only `ProtocolError` leaves `decode`; its text is safe to print.
* Nothing is allocated for a size that a peer merely claims.
* A message that a receiver would refuse is refused by `encode`, in the process with the mistake.
* The payload passes through in both directions and is never copied.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, get_args

import msgpack
import numpy as np

from kvdist import errors
from kvdist.dtypes import DType
from kvdist.protocol import messages, wire_types
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U8, Arrays, Payload, check_indices
from kvdist.protocol.limits import DEFAULT, WireLimits
from kvdist.protocol.wire_types import Source, WireType, wire_fields

MAGIC = b"KVDI"
VERSION = 2

_ENVELOPE = struct.Struct("<4sBBHIIIQQQQIB3s")
LONG_BYTES = 1024
_long: tuple[Any, WireLimits, bytes] = (None, DEFAULT, b"")
"""The last message without arrays with a header of at least `LONG_BYTES`, and that header: a broadcast is encoded once.
A roster of a thousand takes as long to encode as a thousand short messages."""
_EMPTY = int(msg.Flag.EMPTY)


class VersionMismatch(errors.ProtocolError):
    """The peer speaks another version of the protocol, `version`; nothing else of its message was looked at."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the peer speaks version {version} of the protocol, this process version {VERSION}; install the same"
            " kvdist on every machine"
        )
        self.version = version


@dataclass(frozen=True, slots=True)
class MessageFormat:
    """How messages of a class travel, compiled from the annotations of the class.

    Attributes:
        message: the class.
        fields: its fields in order.
        packs, reads: the names of the fields with the functions of their types.
        has_payload: whether frames of arrays follow the header.
        groups: for each group of columns its name, and a function that gets the columns of a message.
        checks: the fields whose types have a check.
        rule: checks the conditions between fields; None without conditions.
        is_reread: whether `encode` reads its output back: rare messages with input of users, with many ways to be
            wrong.
    """

    message: type[Any]
    fields: tuple[tuple[str, WireType], ...]
    packs: tuple[tuple[str, Callable[[Any], Any]], ...]
    reads: tuple[tuple[str, Callable[[Source], Any]], ...]
    has_payload: bool
    groups: tuple[tuple[str, Callable[[Any], tuple[Any, ...]]], ...]
    checks: tuple[tuple[str, Callable[[Any, WireLimits], None]], ...]
    rule: Callable[[Any], None] | None
    is_reread: bool

    def check(self, message: Any, limits: WireLimits) -> None:
        """Refuse a message whose fields do not fit together or break a limit.

        Raises:
            ProtocolError: names the reason.
        """
        for group, columns in self.groups:
            lengths = set(map(len, columns(message)))
            if len(lengths) != 1:
                raise errors.ProtocolError(f"lists that belong together have lengths {sorted(lengths)}")
            count = lengths.pop()
            if group != "keys" and not (group == "slices") <= count <= limits.slices_max:
                raise errors.ProtocolError(f"{count} {group}, where 1 to {limits.slices_max} are allowed")
        for name, check in self.checks:
            check(getattr(message, name), limits)
        if self.rule is not None:
            self.rule(message)


def encode(packet: msg.Packet, limits: WireLimits = DEFAULT) -> list[Payload]:
    """The frames of a message: envelope, header and, for a message with arrays, the payload itself.

    Raises:
        ValueError: a field is not what WIRE.md allows; the message names it.
    """
    global _long
    message: Any = packet.message
    kind = _FORMATS[type(message)]
    name = "stamp"
    try:
        envelope = _pack_stamp(packet.stamp, message.KIND, message.SEQUENCED)
        known, known_limits, header = _long
        if message is known and limits == known_limits:
            return [envelope, header]
        packed = []
        for name, pack in kind.packs:
            packed.append(pack(getattr(message, name)))
        name = "header"
        header = msgpack.packb(packed)
        payload = [memoryview(frame) for frame in message.arrays.frames] if kind.has_payload else []
        if kind.is_reread:
            _read_message(kind, header, payload, limits)
        else:
            _check_header(header, limits)
            kind.check(message, limits)
    except (
        errors.ProtocolError,
        TypeError,
        ValueError,
        OverflowError,
        KeyError,
        AttributeError,
        struct.error,
    ) as error:
        raise ValueError(f"cannot send this {kind.message.__name__} ({name}): {error}") from error
    if len(header) >= LONG_BYTES and not kind.has_payload:
        _long = message, limits, header
    return [envelope, header, *payload]


def decode(frames: Sequence[memoryview | bytes], limits: WireLimits = DEFAULT) -> msg.Packet:
    """The message that the frames hold. Its arrays show the frames, read-only.

    Raises:
        VersionMismatch: another version of this protocol.
        ProtocolError: anything else that WIRE.md does not allow; names it.
    """
    if not frames:
        raise errors.ProtocolError("a message without frames")
    kind, stamp = read_stamp(frames[0])
    least, most = (3, 2 + limits.payload_frames_max) if kind.has_payload else (2, 2)
    if not least <= len(frames) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise errors.ProtocolError(f"{kind.message.__name__}: expected {wanted} frames, found {len(frames)}")
    payload = [memoryview(frame).toreadonly() for frame in frames[2:]]
    return msg.Packet(stamp, _read_message(kind, frames[1], payload, limits))


# Envelope.


def _pack_stamp(stamp: msg.Stamp, kind: int, sequenced: bool) -> bytes:
    if (stamp.seq > 0) is not sequenced:
        raise ValueError(f"seq is {stamp.seq}; sequenced messages count from 1, all others have 0")
    source = stamp.source
    role = wire_types.ROLE_CODES[source.node.role]
    wire_types.member_of(role, source.node.rank, source.incarnation)
    return _ENVELOPE.pack(
        MAGIC, VERSION, kind, 0, stamp.job, stamp.epoch, source.node.rank, source.incarnation, stamp.destination,
        stamp.seq, stamp.ack, stamp.step, role, b"",
    )  # fmt: skip


def read_stamp(frame: memoryview | bytes) -> tuple[MessageFormat, msg.Stamp]:
    """Read an envelope: the format of the message and its stamp.

    Raises:
        ProtocolError: it is not an envelope of this version.
    """
    start = bytes(memoryview(frame)[:5])
    if start[:4] != MAGIC or len(start) < 5:
        raise errors.ProtocolError("not a kvdist message: the first frame does not begin with KVDI and a version")
    if start[4] != VERSION:
        raise VersionMismatch(start[4])
    if len(frame) != _ENVELOPE.size:
        raise errors.ProtocolError(f"an envelope of {len(frame)} bytes, where {_ENVELOPE.size} are expected")
    (_, _, code, flags, job, epoch, rank, incarnation, destination, seq, ack, step, role, rest) = _ENVELOPE.unpack(
        frame
    )
    kind = KINDS.get(code)
    if kind is None:
        raise errors.ProtocolError(f"unknown kind of message {code}")
    if flags or rest != b"\0\0\0":
        raise errors.ProtocolError("the reserved bytes of the envelope are not zero")
    if (seq > 0) is not kind.message.SEQUENCED:
        raise errors.ProtocolError(f"{kind.message.__name__}: sequence number {seq}")
    source = wire_types.member_of(role, rank, incarnation)
    return kind, msg.Stamp(job, epoch, source, destination, seq, ack, step)


# Header.


def _read_message(
    kind: MessageFormat, header: memoryview | bytes, payload: list[memoryview], limits: WireLimits
) -> Any:
    name = "header"
    try:
        _check_header(header, limits)
        reader = _reader(header, limits)
        source = Source(reader, limits, payload)
        wire_types.expect_count(source, len(kind.fields))
        values = []
        for name, read in kind.reads:  # noqa: B007 (the handlers below name the field that failed)
            values.append(read(source))
        name = "header"
        if reader.tell() != len(header):
            raise errors.ProtocolError(f"{len(header) - reader.tell()} bytes are left over after the last field")
        message = kind.message(*values)
        kind.check(message, limits)
    except errors.ProtocolError as error:
        raise errors.ProtocolError(f"{kind.message.__name__}, {name}: {error}") from None
    # RecursionError: msgpack's pure-Python version on deeply nested items.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise errors.ProtocolError(f"{kind.message.__name__}, {name}: not readable ({type(error).__name__})") from None
    return message


def _check_header(header: memoryview | bytes, limits: WireLimits) -> None:
    if len(header) > limits.header_bytes_max:
        raise errors.ProtocolError(f"{len(header)} bytes, where {limits.header_bytes_max} are allowed")


def _reader(header: memoryview | bytes, limits: WireLimits) -> Any:
    """A decoder of single items; the widest lists and maps that it may allocate are those of one small field."""
    reader = msgpack.Unpacker(
        use_list=False,
        max_buffer_size=max(len(header), 1),
        max_str_len=max(limits.sentence_bytes_max, limits.name_bytes_max, limits.key_bytes_max, limits.body_bytes_max),
        max_array_len=max(limits.settings_max, limits.dims_max),
        max_map_len=limits.entries_max,
        max_ext_len=0,
        ext_hook=_refuse_extension,
        object_pairs_hook=_distinct,
    )
    reader.feed(header)
    return reader


def _refuse_extension(code: int, data: bytes) -> None:  # noqa: ARG001 (msgpack calls it so)
    raise errors.ProtocolError("an extension type")


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise errors.ProtocolError("a map with the same name twice")
    return entries


# Conditions between the fields of a message.


def _check_pulled_as(message: messages.Declare | messages.Assign) -> None:
    for dtype, pulled_as in set(zip(message.dtypes, message.pulled_as, strict=True)):
        if pulled_as != dtype and not (dtype == DType.FLOAT32 and pulled_as in (DType.FLOAT16, DType.BFLOAT16)):
            raise errors.ProtocolError(f"values of dtype {dtype} cannot be pulled as dtype {pulled_as}")


_Contribution = messages.Push | messages.JoinedPush | messages.CompressedPush


def _check_contributions(message: _Contribution) -> None:
    flags = message.flags
    if int(np.bitwise_or.reduce(flags)) & _EMPTY and (message.arrays.counts[flags & _EMPTY != 0].any()):
        raise errors.ProtocolError("an empty contribution has elements")
    _check_setting_of(message)


def _check_setting_of(message: _Contribution | messages.PushRows) -> None:
    if (highest := int(np.maximum.reduce(message.setting_of))) >= len(message.settings):
        raise errors.ProtocolError(f"a slice uses setting {highest} of {len(message.settings)}")


def _check_joined_push(message: messages.JoinedPush) -> None:
    if len({one.rank for one in message.contributors}) < len(message.contributors):
        raise errors.ProtocolError("a sum has two pushes of one worker")
    _check_contributions(message)


def _check_compressed_push(message: messages.CompressedPush) -> None:
    _check_contributions(message)
    check_indices(message.arrays)


def _check_init_rows(message: messages.InitRows) -> None:
    _check_arrays_of_rows(message.flags, message.arrays)


def _check_push_rows(message: messages.PushRows) -> None:
    _check_setting_of(message)
    _check_arrays_of_rows(message.flags, message.arrays)


def _check_arrays_of_rows(flags: U8, arrays: Arrays) -> None:
    if len(arrays.counts) != 2 * len(flags):
        raise errors.ProtocolError(
            f"{len(arrays.counts)} arrays, where ids and values of {len(flags)} slices are expected"
        )
    if int(np.bitwise_or.reduce(flags)) & _EMPTY and arrays.counts[::2][flags & _EMPTY != 0].any():
        raise errors.ProtocolError("an empty contribution has rows")


def _check_blocked(message: messages.Blocked) -> None:
    if (message.firsts[1:] <= message.firsts[:-1]).any():
        raise errors.ProtocolError("the first slices of stretches must ascend")


def _check_round(message: messages.Replicate) -> None:
    if len(message.settings) != 1:
        raise errors.ProtocolError(f"{len(message.settings)} settings of a sum, which has one")
    if message.code >= 0 and message.code not in {int(code) for code in messages.ErrorCode}:
        raise errors.ProtocolError(f"unknown error {message.code}")
    if message.has_rows:
        wire_types.check_rows(message.arrays, DEFAULT)


def _check_fill(message: messages.Fill) -> None:
    if (message.ids != message.ids[0]).any():
        raise errors.ProtocolError("pieces of several slices, where those of one are expected")
    known = {-1, *(int(code) for code in messages.ErrorCode)}
    if unknown := {one.code for one in message.standings} - known:
        raise errors.ProtocolError(f"unknown error {min(unknown)}")


_RULES: dict[type[Any], Callable[[Any], None]] = {
    messages.Fill: _check_fill,
    messages.Replicate: _check_round,
    messages.Declare: _check_pulled_as,
    messages.Assign: _check_pulled_as,
    messages.Push: _check_contributions,
    messages.JoinedPush: _check_joined_push,
    messages.CompressedPush: _check_compressed_push,
    messages.InitRows: _check_init_rows,
    messages.PushRows: _check_push_rows,
    messages.Blocked: _check_blocked,
}


# The table of messages.


def _compiled(message: type[Any]) -> MessageFormat:
    fields = wire_fields(message)
    columns: dict[str, list[str]] = {}
    for name, field in fields:
        if field.group:
            columns.setdefault(field.group, []).extend(f"{name}.{part}".rstrip(".") for part in field.columns)
    groups = tuple((group, attrgetter(*names)) for group, names in columns.items() if len(names) > 1)
    checks = tuple((name, field.check) for name, field in fields if field.check is not None)
    has_payload = any(field.name in ("arrays", "coded") for _, field in fields)
    packs = tuple((name, field.pack) for name, field in fields)
    reads = tuple((name, field.read) for name, field in fields)
    return MessageFormat(
        message, fields, packs, reads, has_payload, groups, checks, _RULES.get(message), "slices" not in columns
    )


_FORMATS: dict[type[Any], MessageFormat] = {message: _compiled(message) for message in get_args(messages.Message)}
KINDS: dict[int, MessageFormat] = {message.KIND: form for message, form in _FORMATS.items()}
"""Code of a kind → how its messages travel."""
