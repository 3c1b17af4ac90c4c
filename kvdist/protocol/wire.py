"""Messages to frames and back. The bytes are specified in WIRE.md, whose table of messages is `KINDS`.

Rules that hold here:

* Whatever the bytes are, only `ProtocolError` leaves `decode`; its text is safe to print.
* Nothing is allocated for a size that a peer merely claims.
* What a receiver would refuse is refused by `encode`, in the process that made the mistake.
* The payload is handed through in both directions, never copied.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import msgpack
import numpy as np

from kvdist.dtypes import DType
from kvdist.errors import ProtocolError
from kvdist.protocol import messages, wire_types
from kvdist.protocol.arrays import ITEMSIZES, U8, Arrays, Payload, as_octets, check_coded, check_indices, padded_sizes
from kvdist.protocol.limits import DEFAULT, SLICE_BYTES_MIN, WireLimits
from kvdist.protocol.messages import Flag, Outcome, Packet, Stamp
from kvdist.protocol.wire_types import Field, Source

MAGIC = b"KVDI"
VERSION = 1

_ENVELOPE = struct.Struct("<4sBBHIIIIQQQQIB3s")
_EMPTY, _CARRIED = int(Flag.EMPTY), int(Flag.CARRIED)
_FLAGS_KNOWN = int(Flag.EMPTY | Flag.DELTA | Flag.AVERAGE | Flag.HOLD)
_OUTCOME_MAX = int(max(Outcome))


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol, `version`; nothing else of its message was looked at."""

    def __init__(self, version: int) -> None:
        super().__init__(
            f"the peer speaks version {version} of the protocol, this process version {VERSION}; install the same"
            " kvdist on every machine"
        )
        self.version = version


@dataclass(frozen=True, slots=True)
class Codec:
    """How messages of one class travel: the fields of the header in order, and what must hold between them."""

    message: type[Any]
    fields: tuple[tuple[str, Field], ...]
    check: Callable[[Any, WireLimits], None]
    has_payload: bool
    reread: bool
    """Read back by `encode`: rare, made of what users typed, with many ways to be wrong."""


def encode(packet: Packet, limits: WireLimits = DEFAULT) -> list[Payload]:
    """The frames of a message: envelope, header and, for a message with arrays, the payload itself.

    Raises:
        ValueError: a field is not what WIRE.md allows; the message names it.
    """
    message: Any = packet.message
    kind = _KIND_OF[type(message)]
    name = "stamp"
    try:
        envelope = _pack_stamp(packet.stamp, message.KIND, message.SEQUENCED)
        packed = []
        for name, field in kind.fields:
            packed.append(field.pack(getattr(message, name)))
        name = "header"
        header: bytes = msgpack.packb(packed)
        payload = [memoryview(frame) for frame in message.arrays.frames] if kind.has_payload else []
        if kind.reread:
            _read_message(kind, header, payload, limits)
        else:
            _check_header(header, limits)
            kind.check(message, limits)
    except (ProtocolError, TypeError, ValueError, OverflowError, KeyError, AttributeError, struct.error) as error:
        raise ValueError(f"cannot send this {kind.message.__name__} ({name}): {error}") from error
    return [envelope, header, *payload]


def decode(frames: Sequence[memoryview | bytes], limits: WireLimits = DEFAULT) -> Packet:
    """The message that the frames hold. Its arrays show the frames, read-only.

    Raises:
        VersionMismatch: another version of this protocol.
        ProtocolError: anything else that WIRE.md does not allow; says what.
    """
    if not frames:
        raise ProtocolError("a message without frames")
    kind, stamp = _read_stamp(frames[0])
    least, most = (3, 2 + limits.payload_frames_max) if kind.has_payload else (2, 2)
    if not least <= len(frames) <= most:
        wanted = str(least) if least == most else f"{least} to {most}"
        raise ProtocolError(f"{kind.message.__name__}: expected {wanted} frames, found {len(frames)}")
    payload = [memoryview(frame).toreadonly() for frame in frames[2:]]
    return Packet(stamp, _read_message(kind, frames[1], payload, limits))


# Envelope.


def _pack_stamp(stamp: Stamp, kind: int, sequenced: bool) -> bytes:
    if (stamp.seq > 0) is not sequenced:
        raise ValueError(f"seq is {stamp.seq}; sequenced messages count from 1 and all others have 0")
    source = stamp.source
    role = wire_types.ROLE_CODES[source.node.role]
    wire_types.member_of(role, source.node.rank, source.incarnation)
    return _ENVELOPE.pack(
        MAGIC, VERSION, kind, 0, stamp.job, stamp.term, stamp.epoch, source.node.rank, source.incarnation,
        stamp.destination, stamp.seq, stamp.ack, stamp.step, role, b"",
    )  # fmt: skip


def _read_stamp(frame: memoryview | bytes) -> tuple[Codec, Stamp]:
    start = bytes(memoryview(frame)[:5])
    if start[:4] != MAGIC or len(start) < 5:
        raise ProtocolError("not a kvdist message: the first frame does not begin with KVDI and a version")
    if start[4] != VERSION:
        raise VersionMismatch(start[4])
    if len(frame) != _ENVELOPE.size:
        raise ProtocolError(f"an envelope of {len(frame)} bytes, where {_ENVELOPE.size} are expected")
    (_, _, code, flags, job, term, epoch, rank, incarnation, destination, seq, ack, step, role, rest) = (
        _ENVELOPE.unpack(frame)
    )
    kind = KINDS.get(code)
    if kind is None:
        raise ProtocolError(f"unknown kind of message {code}")
    if flags or rest != b"\0\0\0":
        raise ProtocolError("the reserved bytes of the envelope are not zero")
    if (seq > 0) is not kind.message.SEQUENCED:
        raise ProtocolError(f"{kind.message.__name__}: sequence number {seq}")
    source = wire_types.member_of(role, rank, incarnation)
    return kind, Stamp(job, term, epoch, source, destination, seq, ack, step)


# Header.


def _read_message(kind: Codec, header: memoryview | bytes, payload: list[memoryview], limits: WireLimits) -> Any:
    name = "header"
    try:
        _check_header(header, limits)
        reader = _reader(header, limits)
        source = Source(reader, limits, payload)
        wire_types.expect(wire_types.read_count(source), len(kind.fields))
        values = []
        for name, field in kind.fields:  # noqa: B007 (the handlers below name the field that failed)
            values.append(field.read(source))
        name = "header"
        if reader.tell() != len(header):
            raise ProtocolError(f"{len(header) - reader.tell()} bytes are left over after the last field")
        message = kind.message(*values)
        kind.check(message, limits)
    except ProtocolError as error:
        raise ProtocolError(f"{kind.message.__name__}, {name}: {error}") from None
    # RecursionError: msgpack's pure-Python version on deeply nested items.
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ProtocolError(f"{kind.message.__name__}, {name}: not readable ({type(error).__name__})") from None
    return message


def _check_header(header: memoryview | bytes, limits: WireLimits) -> None:
    if len(header) > limits.header_bytes_max:
        raise ProtocolError(f"{len(header)} bytes, where {limits.header_bytes_max} are allowed")


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
    raise ProtocolError("an extension type")


def _distinct(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ProtocolError("a map with the same name twice")
    return entries


# What must hold between the fields of a message.


def _nothing(message: Any, limits: WireLimits) -> None:
    pass


def _same_length(lists: Sequence[Sized]) -> int:
    lengths = {len(one) for one in lists}
    if len(lengths) != 1:
        raise ProtocolError(f"lists that belong together have lengths {sorted(lengths)}")
    return lengths.pop()


def _check_slices(count: int, limits: WireLimits) -> None:
    if not 0 < count <= limits.slices_max:
        raise ProtocolError(f"{count} slices, where 1 to {limits.slices_max} are allowed")


def _check_payload(arrays: Arrays, limits: WireLimits) -> None:
    if arrays.encoding != 0:
        raise ProtocolError(f"unknown encoding {arrays.encoding}")
    if not ITEMSIZES[arrays.dtypes].all():
        raise ProtocolError("an array has an unknown dtype")
    sizes = padded_sizes(arrays.dtypes, arrays.counts)
    wanted = int(sizes.sum())
    found = arrays.nbytes
    if found > limits.payload_bytes_max:
        raise ProtocolError(f"a payload of {found} bytes, where {limits.payload_bytes_max} are allowed")
    if wanted != found:
        raise ProtocolError(f"the payload has {found} bytes where its dtypes and counts make {wanted}")
    if isinstance(arrays.payload, tuple):
        _check_frames(arrays.payload, sizes, limits)


def _check_frames(frames: Sequence[Payload], sizes: np.ndarray[Any, Any], limits: WireLimits) -> None:
    if not 0 < len(frames) <= limits.payload_frames_max:
        raise ProtocolError(f"{len(frames)} payload frames, where 1 to {limits.payload_frames_max} are allowed")
    lengths = [memoryview(frame).nbytes for frame in frames]
    if len(frames) == 1:
        return
    frame_ends, array_ends = np.cumsum(lengths), sizes.cumsum()
    # The sums agree, so each frame ends at or before the end of the last array.
    if not all(lengths) or (array_ends[array_ends.searchsorted(frame_ends)] != frame_ends).any():
        raise ProtocolError("a payload frame is empty, or ends within an array")


def _check_outcomes(outcomes: U8) -> None:
    if outcomes.max() > _OUTCOME_MAX:
        raise ProtocolError(f"unknown outcome {outcomes.max()}")


def _check_declare(message: messages.Declare, limits: WireLimits) -> None:  # noqa: ARG001
    _same_length((message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms))
    _check_pulled_as(message)


def _check_pulled_as(message: messages.Declare | messages.Assign) -> None:
    for dtype, pulled_as in set(zip(message.dtypes, message.pulled_as, strict=True)):
        if pulled_as != dtype and not (dtype == DType.FLOAT32 and pulled_as in (DType.FLOAT16, DType.BFLOAT16)):
            raise ProtocolError(f"values of dtype {dtype} do not come back as {pulled_as}")


def _check_placed(message: messages.Placed, limits: WireLimits) -> None:  # noqa: ARG001
    _same_length((message.placement.first_slices, message.placement.homes, message.givers))


def _check_assign(message: messages.Assign, limits: WireLimits) -> None:  # noqa: ARG001
    placement = message.placement
    columns = (message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms)
    _same_length((*columns, placement.first_slices, placement.homes))
    _check_pulled_as(message)


def _check_init_values(message: messages.InitValues | messages.ReplaceValues, limits: WireLimits) -> None:
    arrays = message.arrays
    _check_slices(_same_length((message.runs, message.ids, arrays.dtypes, arrays.counts)), limits)
    _check_payload(arrays, limits)


def _check_push(message: messages.Push, limits: WireLimits) -> None:
    _check_contributions(message, message.arrays, _FLAGS_KNOWN, limits)


def _check_compressed_push(message: messages.CompressedPush, limits: WireLimits) -> None:
    coded = message.arrays
    _same_length((message.ids, coded.counts, coded.entries))
    check_coded(coded, limits.payload_bytes_max)
    _check_contributions(message, as_octets(coded), _FLAGS_KNOWN, limits)
    if (coded.counts[message.flags & _EMPTY != 0] != 0).any():
        raise ProtocolError("an empty contribution has elements")
    check_indices(coded)


def _check_joined_push(message: messages.JoinedPush, limits: WireLimits) -> None:
    _same_length((message.ids, message.ranks))
    _check_contributions(message, message.arrays, _FLAGS_KNOWN | _CARRIED, limits)


def _check_contributions(
    message: messages.Push | messages.JoinedPush | messages.CompressedPush,
    arrays: Arrays,
    known: int,
    limits: WireLimits,
) -> None:
    flags = message.flags
    _check_columns(message, known, limits)
    _same_length((flags, arrays.dtypes, arrays.counts))
    bare = _EMPTY | _CARRIED
    if int(np.bitwise_or.reduce(flags)) & bare and (arrays.counts[flags & bare != 0] != 0).any():
        raise ProtocolError("an empty or carried contribution has elements")
    _check_payload(arrays, limits)


def _check_columns(
    message: messages.Push | messages.JoinedPush | messages.CompressedPush | messages.PushRows,
    known: int,
    limits: WireLimits,
) -> None:
    """What contributions of all kinds have beside their values."""
    m, flags = message, message.flags
    _check_slices(_same_length((m.runs, m.ids, m.steps, m.versions, m.samples, flags, m.setting_of)), limits)
    if len(m.settings) > limits.settings_max:
        raise ProtocolError(f"{len(m.settings)} settings, where {limits.settings_max} are allowed")
    present = int(np.bitwise_or.reduce(flags))
    if present & ~known:
        raise ProtocolError(f"unknown flags {present & ~known}")
    if any(math.isinf(number) for setting in m.settings for number in setting):
        raise ProtocolError("a learning rate, weight decay or scale is infinite")
    if m.setting_of.max() >= len(m.settings):
        raise ProtocolError(f"a slice uses setting {m.setting_of.max()} of {len(m.settings)}")


def _check_rows(flags: U8, known: int, arrays: Arrays, limits: WireLimits) -> None:
    """Whether each slice has ids and values of as many rows, or neither."""
    present = int(np.bitwise_or.reduce(flags))
    if present & ~known:
        raise ProtocolError(f"unknown flags {present & ~known}")
    if len(arrays.counts) != 2 * len(flags) or len(arrays.dtypes) != 2 * len(flags):
        raise ProtocolError(f"{len(arrays.counts)} arrays, where ids and values of {len(flags)} slices are expected")
    ids, values = arrays.counts[::2], arrays.counts[1::2]
    if (arrays.dtypes[::2] != DType.INT64).any():
        raise ProtocolError("row ids are not int64")
    if ((ids == 0) != (values == 0)).any() or (values % np.maximum(ids, 1)).any():
        raise ProtocolError("the values of a slice are not those of its rows")
    if present & _EMPTY and ids[flags & _EMPTY != 0].any():
        raise ProtocolError("an empty contribution has rows")
    _check_payload(arrays, limits)


def _check_init_rows(message: messages.InitRows, limits: WireLimits) -> None:
    _check_slices(_same_length((message.runs, message.ids, message.flags)), limits)
    _check_rows(message.flags, messages.MORE, message.arrays, limits)


def _check_push_rows(message: messages.PushRows, limits: WireLimits) -> None:
    known = _EMPTY | int(Flag.AVERAGE) | messages.MORE
    _check_columns(message, known, limits)
    _check_rows(message.flags, known, message.arrays, limits)


def _check_pull_rows(message: messages.PullRows, limits: WireLimits) -> None:
    m, arrays = message, message.arrays
    _check_slices(_same_length((m.runs, m.ids, m.steps, m.versions, arrays.dtypes, arrays.counts)), limits)
    if (arrays.dtypes != DType.INT64).any():
        raise ProtocolError("row ids are not int64")
    _check_payload(arrays, limits)


def _check_row_values(message: messages.RowValues, limits: WireLimits) -> None:
    m, arrays = message, message.arrays
    _check_slices(_same_length((m.runs, m.ids, m.versions, arrays.dtypes, arrays.counts)), limits)
    _check_payload(arrays, limits)


def _check_pull(message: messages.Pull, limits: WireLimits) -> None:
    _check_slices(_same_length((message.runs, message.ids, message.steps, message.versions)), limits)


def _check_values(message: messages.Values, limits: WireLimits) -> None:
    m, arrays = message, message.arrays
    count = _same_length((m.runs, m.ids, m.versions, m.outcomes, arrays.dtypes, arrays.counts))
    _check_slices(count, limits)
    _check_outcomes(m.outcomes)
    _check_payload(arrays, limits)


def _check_pull_state(message: messages.PullState, limits: WireLimits) -> None:
    _check_slices(_same_length((message.runs, message.ids, message.steps, message.parts)), limits)


def _check_replace_state(message: messages.ReplaceState, limits: WireLimits) -> None:
    m, arrays = message, message.arrays
    _check_slices(_same_length((m.runs, m.ids, m.parts, arrays.dtypes, arrays.counts)), limits)
    _check_payload(arrays, limits)


def _check_counted(message: messages.Counted, limits: WireLimits) -> None:
    _check_slices(_same_length((message.runs, message.ids, message.versions, message.outcomes)), limits)
    _check_outcomes(message.outcomes)


def _check_mark(message: messages.MarkPushes, limits: WireLimits) -> None:
    if _same_length((message.ids, message.steps)):  # a server may keep nothing of a store
        _check_slices(len(message.ids), limits)


def _check_blocked(message: messages.Blocked, limits: WireLimits) -> None:
    if not _same_length((message.firsts, message.pushed, message.awaited)):
        return
    _check_slices(len(message.firsts), limits)
    if (message.firsts[1:] <= message.firsts[:-1]).any():
        raise ProtocolError("the first slices of stretches must ascend")


def _check_refused(message: messages.Refused | messages.HandedBack, limits: WireLimits) -> None:
    _check_slices(_same_length((message.runs, message.ids)), limits)


# The table of messages.

_U32 = wire_types.integer(0, (1 << 32) - 1)
_U64 = wire_types.integer(0, (1 << 64) - 1)
_FROM_MINUS_1 = wire_types.integer(-1, (1 << 32) - 1)
_NAME = wire_types.text("name_bytes_max")
_SENTENCE = wire_types.sentence(DEFAULT.sentence_bytes_max)
_BODY = wire_types.text("body_bytes_max")
_KEYS, _SHAPES, _DTYPES, _FORMS = wire_types.KEYS, wire_types.SHAPES, wire_types.DTYPES, wire_types.TEXTS
_NUMBERS, _OCTETS, _ARRAYS = wire_types.NUMBERS, wire_types.OCTETS, wire_types.ARRAYS

_PLACEMENT = wire_types.record(
    messages.Placement,
    first_slices=wire_types.COUNTS,
    homes=wire_types.COUNTS,
    slice_bytes=wire_types.integer(SLICE_BYTES_MIN, (1 << 32) - 1),
)
_PEER = wire_types.record(messages.Peer, member=wire_types.MEMBER, host=_NAME, pid=_U32, endpoint=_NAME)

_NAMES = wire_types.many(_NAME, "entries_max")
_REQUESTS = wire_types.many(_U64, "entries_max")
_FILE = wire_types.record(messages.SavedFile, name=_NAME, nbytes=_U64, sha256=_NAME)

KINDS: dict[int, Codec] = {}
"""Code of a kind → how it travels."""
_KIND_OF: dict[type[Any], Codec] = {}


def _kind(message: type[Any], check: Callable[[Any, WireLimits], None] = _nothing, **table: Field) -> None:
    in_slices = "runs" in table
    kind = Codec(message, tuple(table.items()), check, "arrays" in table, not in_slices)
    KINDS[message.KIND] = _KIND_OF[message] = kind


_kind(messages.Hello, wanted_rank=_FROM_MINUS_1, host=_NAME, pid=_U32, endpoint=_NAME, num_workers=_U32,
      num_servers=_U32, version=_NAME)  # fmt: skip
_kind(messages.Welcome, rank=_U32, incarnation=_U64)
_kind(messages.Rejected, reason=_SENTENCE)
_kind(messages.Roster, peers=wire_types.many(_PEER, "members_max"))
_kind(messages.Declare, _check_declare, request=_U64, store=_U32, mode=_NAME, keys=_KEYS,
      shapes=_SHAPES, dtypes=_DTYPES, pulled_as=_DTYPES, forms=_FORMS)  # fmt: skip
_kind(messages.Placed, _check_placed, request=_U64, placement=_PLACEMENT, givers=wire_types.COUNTS)
_kind(messages.Assign, _check_assign, request=_U64, store=_U32, mode=_NAME, keys=_KEYS,
      shapes=_SHAPES, dtypes=_DTYPES, pulled_as=_DTYPES, forms=_FORMS, placement=_PLACEMENT)  # fmt: skip
_kind(messages.Configure, request=_U64, store=_U32, description=wire_types.DESCRIPTION)
_kind(messages.SetOptimizer, request=_U64, store=_U32, description=wire_types.DESCRIPTION)
_kind(messages.Done, request=_U64)
_kind(messages.Failed, request=_U64, code=wire_types.ERROR, reason=_SENTENCE)
_kind(messages.Barrier, request=_U64, store=_U32, counter=_U64, statement=_SENTENCE)
_kind(messages.InitValues, _check_init_values, runs=_NUMBERS, ids=_NUMBERS, arrays=_ARRAYS)
_kind(messages.ReplaceValues, _check_init_values, runs=_NUMBERS, ids=_NUMBERS, arrays=_ARRAYS)
_kind(messages.PullState, _check_pull_state, runs=_NUMBERS, ids=_NUMBERS, steps=_NUMBERS, parts=_OCTETS)
_kind(messages.ReplaceState, _check_replace_state, runs=_NUMBERS, ids=_NUMBERS, parts=_OCTETS, arrays=_ARRAYS)
_kind(messages.Push, _check_push, pull=wire_types.FLAG, runs=_NUMBERS, ids=_NUMBERS, steps=_NUMBERS, versions=_NUMBERS,
      samples=_NUMBERS, flags=_OCTETS, settings=wire_types.SETTINGS, setting_of=_OCTETS, arrays=_ARRAYS)  # fmt: skip
_kind(messages.CompressedPush, _check_compressed_push, pull=wire_types.FLAG, runs=_NUMBERS, ids=_NUMBERS,
      steps=_NUMBERS, versions=_NUMBERS, samples=_NUMBERS, flags=_OCTETS, settings=wire_types.SETTINGS,
      setting_of=_OCTETS, arrays=wire_types.CODED)  # fmt: skip
_kind(messages.JoinedPush, _check_joined_push, pull=wire_types.FLAG, runs=_NUMBERS, ids=_NUMBERS, ranks=_NUMBERS,
      steps=_NUMBERS, versions=_NUMBERS, samples=_NUMBERS, flags=_OCTETS, settings=wire_types.SETTINGS,
      setting_of=_OCTETS, arrays=_ARRAYS)  # fmt: skip
_kind(messages.HandedBack, _check_refused, runs=_NUMBERS, ids=_NUMBERS)
_kind(messages.Pull, _check_pull, runs=_NUMBERS, ids=_NUMBERS, steps=_NUMBERS, versions=_NUMBERS)
_kind(messages.Values, _check_values, runs=_NUMBERS, ids=_NUMBERS, versions=_NUMBERS, outcomes=_OCTETS,
      arrays=_ARRAYS)  # fmt: skip
_kind(messages.Counted, _check_counted, runs=_NUMBERS, ids=_NUMBERS, versions=_NUMBERS, outcomes=_OCTETS)
_kind(messages.Refused, _check_refused, runs=_NUMBERS, ids=_NUMBERS, code=wire_types.ERROR, reason=_SENTENCE)
_kind(messages.InitRows, _check_init_rows, runs=_NUMBERS, ids=_NUMBERS, flags=_OCTETS, arrays=_ARRAYS)
_kind(messages.PushRows, _check_push_rows, runs=_NUMBERS, ids=_NUMBERS, steps=_NUMBERS, versions=_NUMBERS,
      samples=_NUMBERS, flags=_OCTETS, settings=wire_types.SETTINGS, setting_of=_OCTETS, arrays=_ARRAYS)  # fmt: skip
_kind(
    messages.PullRows, _check_pull_rows, runs=_NUMBERS, ids=_NUMBERS, steps=_NUMBERS, versions=_NUMBERS, arrays=_ARRAYS
)
_kind(messages.RowValues, _check_row_values, runs=_NUMBERS, ids=_NUMBERS, versions=_NUMBERS, arrays=_ARRAYS)
_kind(messages.Alive)
_kind(messages.Ack, wanted=wire_types.FLAG)
_kind(messages.Waiting, subject=_SENTENCE, ranks=wire_types.many(_U32, "members_max"), since_s=wire_types.SECONDS)
_kind(messages.Goodbye, request=_U64, failure=_SENTENCE)
_kind(messages.Abort, code=wire_types.ERROR, node=_NAME, host=_NAME, cause=_SENTENCE, step=_FROM_MINUS_1,
      sentence=_SENTENCE)  # fmt: skip
_kind(messages.Stop)
_kind(messages.Blocked, _check_blocked, number=_U64, place=_SENTENCE, requests=_REQUESTS, slice=_FROM_MINUS_1,
      firsts=wire_types.NUMBERS_OR_NONE, pushed=wire_types.NUMBERS_OR_NONE,
      awaited=wire_types.NUMBERS_OR_NONE)  # fmt: skip
_kind(messages.CheckBlocked)
_kind(messages.Claim, request=_U64, store=_U32, counter=_U64, folder=_NAME, contents=_NAMES)
_kind(messages.Claimed, request=_U64, run=_NAME)
_kind(messages.Prepare, request=_U64, store=_U32, folder=_NAME, contents=_NAMES, run=_NAME)
_kind(messages.MarkPushes, _check_mark, store=_U32, counter=_U64, folder=_NAME, contents=_NAMES, run=_NAME, step=_U64,
      last=wire_types.FLAG, ids=wire_types.NUMBERS_OR_NONE, steps=wire_types.NUMBERS_OR_NONE)  # fmt: skip
_kind(messages.Save, request=_U64, store=_U32, counter=_U64, folder=_NAME, contents=_NAMES, run=_NAME, step=_U64,
      keep=_U32, num_keys=_U32, file=_FILE, failure=_SENTENCE)  # fmt: skip
_kind(messages.Saved, store=_U32, counter=_U64, file=_FILE, failure=_SENTENCE)
_kind(messages.Load, request=_U64, store=_U32, counter=_U64, folder=_NAME, contents=_NAMES,
      failure=_SENTENCE)  # fmt: skip
_kind(messages.Restore, request=_U64, store=_U32, folder=_NAME, contents=_NAMES)
_kind(messages.TakeRestored, request=_U64, store=_U32)
_kind(messages.DropRestored, request=_U64, store=_U32)
_kind(messages.Command, request=_U64, head=_U32, body=_BODY)
_kind(messages.Perform, request=_U64, head=_U32, body=_BODY)
