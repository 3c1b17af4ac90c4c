"""Whatever the bytes are: a valid packet or `ProtocolError`, soon, and with little memory."""

from __future__ import annotations

import struct
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.errors import ProtocolError
from kvdist.protocol import messages as m
from kvdist.protocol import wire
from kvdist.protocol.arrays import Encoding
from tests.cases import each

TELLING_BYTES = bytes.fromhex("00 01 7f 80 90 c0 c1 c7 dd df ff")
"""Numbers at their ends, and those with which msgpack's lists, maps, nil, extensions and the unused code begin."""


def attempt(frames) -> str:
    """'' for a valid packet, else the complaint, which must be one printable line. Anything else is raised."""
    try:
        assert isinstance(wire.decode(frames), m.Packet)
    except ProtocolError as error:
        text = str(error)
        assert text.isprintable()
        assert 0 < len(text) < 300
        return text
    return ""


def frames_of(packet) -> list[bytes]:
    return [bytes(frame) for frame in wire.encode(packet)]


def kinds() -> list[str]:
    return [kind.message.__name__ for kind in wire.KINDS.values()]


def with_header(packet, fields) -> list[bytes]:
    """The frames of the packet with another list of fields; bytes are taken as a whole header."""
    frames = frames_of(packet)
    frames[1] = fields if isinstance(fields, bytes) else msgpack.packb(fields)
    return frames


@each("name", kinds())
def test_every_truncation_of_the_envelope_or_the_header_is_refused(name, examples):
    frames = frames_of(examples[name])
    assert attempt(frames) == ""
    for index, frame in enumerate(frames[:2]):
        for end in range(len(frame)):
            assert attempt([*frames[:index], frame[:end], *frames[index + 1 :]])


@each("name", sorted(kind.message.__name__ for kind in wire.KINDS.values() if kind.has_payload))
def test_a_payload_one_byte_too_short_or_too_long_is_refused(name, examples):
    frames = frames_of(examples[name])
    for payload in (frames[2][:-1], frames[2] + b"\0", b"", frames[2] * 2):
        assert "payload" in attempt([*frames[:2], payload])


@each("name", kinds())
def test_every_changed_byte_gives_a_packet_or_a_protocol_error(name, examples):
    frames = frames_of(examples[name])
    outcomes = set()
    for index, frame in enumerate(frames[:2]):
        for at in range(len(frame)):
            for value in {*TELLING_BYTES, frame[at] ^ 1, frame[at] ^ 0x80}:
                changed = bytearray(frame)
                changed[at] = value
                outcomes.add(bool(attempt([*frames[:index], bytes(changed), *frames[index + 1 :]])))
    assert outcomes == {True, False}


@settings(max_examples=300)
@given(name=st.sampled_from(kinds()), header=st.binary(max_size=200), payload=st.binary(max_size=64))
def test_random_headers_give_a_packet_or_a_protocol_error(name, header, payload, examples):
    frames = frames_of(examples[name])
    attempt([frames[0], header, payload][: len(frames)])


ITEMS = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text(max_size=5)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@settings(max_examples=300)
@given(name=st.sampled_from(kinds()), data=st.data())
def test_a_field_of_any_other_type_gives_a_packet_or_a_protocol_error(name, data, examples):
    header = msgpack.unpackb(frames_of(examples[name])[1])
    if header:
        header[data.draw(st.integers(0, len(header) - 1))] = data.draw(ITEMS)
    attempt(with_header(examples[name], header))


@settings(max_examples=200)
@given(frames=st.lists(st.binary(max_size=80), max_size=4))
def test_random_frames_are_refused(frames):
    assert attempt(frames)


@each("name", kinds())
def test_any_other_number_of_frames_is_refused(name, examples):
    frames = frames_of(examples[name])
    for wrong in ([], frames[:1], frames[:-1], [*frames, b""], [b"", *frames], [b""] * len(frames), frames * 50):
        assert attempt(wrong)


def test_an_http_request_is_refused_as_not_a_message():
    assert "not a kvdist message" in attempt([b"GET / HTTP/1.1\r\nHost: example.org\r\n\r\n"])


@each("rest", [b"", b"\xff" * 55, b"anything of any length, even of later versions" * 9])
def test_another_version_is_told_apart_and_named(rest):
    with pytest.raises(wire.VersionMismatch, match="version 3 .* version 2") as caught:
        wire.decode([b"KVDI\x03" + rest])
    assert caught.value.version == 3


@each("at, complaint", [(6, "reserved"), (7, "reserved"), (57, "reserved"), (59, "reserved")])
def test_reserved_bytes_that_are_not_zero_are_refused(at, complaint, examples):
    frames = frames_of(examples["Alive"])
    frames[0] = frames[0][:at] + b"\x01" + frames[0][at + 1 :]
    assert complaint in attempt(frames)


@each("code", [0, 7, 8, 18, 39, 255])
def test_an_unknown_kind_is_refused(code, examples):
    frames = frames_of(examples["Alive"])
    frames[0] = frames[0][:5] + bytes([code]) + frames[0][6:]
    assert attempt(frames) == f"unknown kind of message {code}"


def test_an_unknown_role_or_a_scheduler_of_another_rank_is_refused(examples):
    frames = frames_of(examples["Alive"])
    assert "unknown role 3" in attempt([frames[0][:56] + b"\x03\0\0\0", frames[1]])
    assert "the scheduler has rank 0" in attempt([frames[0][:56] + b"\0\0\0\0", frames[1]])


@each("name, seq", [("Push", 0), ("Alive", 1)])
def test_a_sequence_number_that_the_kind_does_not_have_is_refused(name, seq, examples):
    frames = frames_of(examples[name])
    frames[0] = frames[0][:36] + struct.pack("<Q", seq) + frames[0][44:]
    assert f"{name}: sequence number {seq}" in attempt(frames)


def test_bytes_after_the_last_field_are_refused(examples):
    for name in kinds():
        frames = frames_of(examples[name])
        assert "left over" in attempt([frames[0], frames[1] + b"\xc0", *frames[2:]])


@each(
    "header",
    [
        b"\x93\x01\x00\x82\xa1a\x01\xa1a\x02",
        b"\x93\x01\x00\x82\xa1a\x01\xa1a\x01",
    ],
)
def test_a_map_with_the_same_name_twice_is_refused(header, examples):
    assert "same name twice" in attempt(with_header(examples["Configure"], header))


@each(
    "description, complaint",
    [
        (b"\x81\x01\x01", "not readable"),
        (b"\x81\xc4\x01a\x01", "expected text"),
        (b"\x81\xa1a\xd4\x05\x00", "not readable|extension"),
        (b"\x81\xa1a\xc7\x00\x05", "extension"),
        (b"\x81\xa1a\xd6\xff\0\0\0\0", "not readable|extension"),
        (b"\x81\xa1a\xa1\xff", "not readable"),
        (b"\x81\xa1a\xcf" + b"\xff" * 8, "64-bit"),
        (b"\x81\xa1a\xcb\x7f\xf0" + b"\0" * 6, "finite"),
        (b"\x81\xa1a\x91\x01", "found a tuple"),
        (b"\xdf\xff\xff\xff\xff\xa1a", "not readable"),
        (b"\x80\x00", "left over"),
        (b"\x90", "expected a map"),
    ],
)
def test_descriptions_hold_nothing_but_distinct_names_and_scalars(description, complaint, examples):
    found = attempt(with_header(examples["Configure"], b"\x93\x01\x00" + description))
    assert found.startswith("Configure, ")
    assert any(part in found for part in complaint.split("|")), found


@each("infinity", [float("inf"), float("-inf")])
def test_settings_may_be_nan_and_never_infinite(infinity, examples):
    header = msgpack.unpackb(frames_of(examples["Push"])[1])
    header[7][0] = [infinity, 0.0, 1.0]
    assert "finite float or NaN" in attempt(with_header(examples["Push"], header))
    header[7][0] = [1, 0.0, 1.0]
    assert "finite float or NaN" in attempt(with_header(examples["Push"], header))


def u32s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}I", *numbers)


def u64s(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}Q", *numbers)


KEY, SHAPE, FORM = [u32s(1), b"w"], [b"\1", u64s(1)], [u32s(0), b""]


def declare(keys=KEY, shapes=SHAPE, dtypes=b"\1", pulled_as=b"\1", forms=FORM, request=1, pushes=0):
    """The header of a Declare of one key, which is right but for what is given."""
    return [request, 0, "sync", keys, shapes, dtypes, pulled_as, forms, pushes]


@each(
    "name, header",
    [
        ("Declare", declare(shapes=[b"\2", u64s(1 << 32, 1 << 32)])),
        ("Declare", declare(shapes=[b"\2", u64s((1 << 64) - 1, 2)])),
        ("Declare", declare(shapes=[b"\1", u64s(1) + b"\0"])),
        ("Declare", declare(shapes=[b"\2", u64s(1)])),
        ("Declare", declare(shapes=[b"\0", u64s(1)])),
        ("Declare", declare(shapes=[b"\x21", u64s(*[1] * 33)])),
        ("Declare", declare(shapes=[b"\1\1", u64s(1, 1)])),
        ("Declare", declare(shapes=["\1", u64s(1)])),
        ("Declare", declare(shapes=[[1], u64s(1)])),
        ("Declare", declare(shapes=[b"\1"])),
        ("Declare", declare(shapes=[[1]])),
        ("Declare", declare(keys=[u32s(1), b""])),
        ("Declare", declare(keys=[u32s(1), b"ab"])),
        ("Declare", declare(keys=[u32s(2), b"a\xff"])),
        ("Declare", declare(keys=[u32s(1025), b"a" * 1025])),
        ("Declare", declare(keys=[u32s(0xFFFFFFFF), b"\0" * 7])),
        ("Declare", declare(keys=[u32s(0xFFFFFFFE), b"a"])),
        ("Declare", declare(keys=[u32s(0x80000001), b"\0" * 8])),
        ("Declare", declare(keys=[u32s(0x80000001), b"\0" * 8 + b"\xff"])),
        ("Declare", declare(keys=[u32s(0x80000000 + 1017), b"\0" * 8 + b"a" * 1017])),
        ("Declare", declare(keys=[u32s(1)[:3], b"a"])),
        ("Declare", declare(keys=[u32s(1), "a"])),
        ("Declare", declare(keys=[u32s(1, 0), b"a"])),
        ("Declare", declare(keys={})),
        ("Declare", declare(dtypes=b"\0", pulled_as=b"\0")),
        ("Declare", declare(dtypes=b"\1\1", pulled_as=b"\1\1")),
        ("Declare", declare(dtypes=[1])),
        ("Declare", declare(forms=[u32s(1), b""])),
        ("Declare", declare(forms=[b"", b""])),
        ("Declare", declare(request=True)),
        ("Placed", [1, [[0], [0]], [0]]),
        ("Placed", [1, [[0], [0], 0], [0]]),
        ("Welcome", [0, 1, 1]),
        ("Seen", [1, [[0, 0, 0, 0, 0, 0]], b"", False, 0, 0]),
        ("Roster", [[[[0, 1, 5], "h", 1, "e"]], 1, [], [], []]),
        ("Roster", [[[[3, 1, 5], "h", 1, "e"]], 1, [], [], []]),
        ("Roster", [[[[2, -1, 5], "h", 1, "e"]], 1, [], [], []]),
        ("Roster", [[[[2, 1, 5], "h", 1]], 1, [], [], []]),
        ("Roster", [[], 1, [], [[2, 1]], []]),
        ("Done", []),
        ("Done", [1, 2]),
        ("Done", [-1]),
        ("Done", [1 << 63 | 1, None]),
        ("Waiting", ["s", [1], 3]),
        ("Waiting", ["s", [1], float("nan")]),
        ("Pull", [b"", b"", b"", b""]),
        ("Pull", [b"\0" * 4, b"\0" * 4, b"\0" * 4, b"\0" * 5]),
        ("Pull", [b"\0" * 4, b"\0" * 4, b"\0" * 4, b"\0" * 8]),
        ("Pull", ["\0" * 4] * 4),
        ("Refused", [b"\0" * 4, b"\0" * 4, 99, "reason"]),
    ],
)
def test_values_outside_of_their_type_are_refused_with_the_name_of_the_message(name, header, examples):
    assert attempt(with_header(examples[name], header)).startswith(f"{name}, ")


TOP_K_DATA = np.array([0, 4], "<u4").tobytes() + np.array([1, 2], "<f4").tobytes()


def compressed(examples, counts, entries, encoding, parameter, payload, **changes) -> str:
    """The complaint about a compressed push with these arrays."""
    packet = examples["CompressedPush"]
    n = len(counts)
    fields = {
        "pull": True, **dict.fromkeys(("runs", "ids", "steps", "versions", "samples"), bytes(4 * n)),
        "flags": bytes(n), "settings": [[0.5, 0.0, 1.0]], "setting_of": bytes(n),
        "arrays": [np.array(counts, "<u4").tobytes(), np.array(entries, "<u4").tobytes(), encoding, parameter],
    }  # fmt: skip
    frames = with_header(packet, list((fields | changes).values()))
    return attempt([*frames[:2], payload])


def test_a_compressed_push_that_is_right_is_taken(examples):
    assert compressed(examples, [5], [5], 1, 0.5, bytes(8)) == ""
    assert compressed(examples, [5, 33], [5, 33], 2, -0.5, bytes(16)) == ""
    assert compressed(examples, [5], [5], 3, 0.0, bytes(16)) == ""
    assert compressed(examples, [5], [2], 5, 0.0, TOP_K_DATA) == ""
    assert compressed(examples, [5], [0], 5, 0.0, b"") == ""


@each("encoding", [-1, 0, max(Encoding) + 1, 255, 1 << 40, None, 1.0, True, "1"])
def test_an_encoding_that_there_is_not_is_refused(encoding, examples):
    refusal = compressed(examples, [5], [5], encoding, 0.5, bytes(8))
    assert "encoding" in refusal and "parameter" not in refusal


@each(
    "encoding, parameter",
    [(1, 0.0), (1, -0.5), (1, 0.1), (1, 1e300), (2, -1e300), (1, float("nan")), (1, float("inf")), (2, float("nan")),
     (2, -float("inf")), (3, 1.0), (4, -1.0), (5, 0.01), (1, 1), (1, None), (1, True)],
)  # fmt: skip
def test_a_parameter_that_the_encoding_does_not_have_is_refused(encoding, parameter, examples):
    sizes = {1: 8, 2: 8, 3: 16, 4: 16, 5: 40}
    assert compressed(examples, [5], [5], encoding, parameter, bytes(sizes[encoding]))


@each(
    "counts, entries, encoding, complaint",
    [
        ([5], [4], 1, "another number of entries"),
        ([4], [5], 3, "another number of entries"),
        ([1], [2], 5, "more entries than elements"),
        ([5], [5, 5], 1, "lengths"),
        ([17], [17], 1, ""),
        ([33], [33], 1, "16"),
        ([5], [3], 5, "24"),
    ],
)
def test_counts_and_entries_that_do_not_fit_the_payload_are_refused(counts, entries, encoding, complaint, examples):
    parameter = 0.5 if encoding == 1 else 0.0
    found = compressed(examples, counts, entries, encoding, parameter, bytes(8))
    assert bool(found) is bool(complaint)
    assert complaint in found


@each("indices", [[0, 5], [4, 0], [1, 1], [0, 0xFFFFFFFF], [0xFFFFFFFF, 1]])
def test_indices_that_do_not_ascend_or_are_no_elements_are_refused(indices, examples):
    payload = np.array(indices, "<u4").tobytes() + bytes(8)
    assert "indices" in compressed(examples, [5], [2], 5, 0.0, payload)


def test_elements_beyond_the_budget_are_refused_before_anything_is_allocated(examples):
    # One entry that claims to be of four thousand million elements, and a million slices that claim a million each.
    tracemalloc.start()
    try:
        assert "when decoded" in compressed(examples, [0xFFFFFFFF], [1], 5, 0.0, bytes(8))
        assert "when decoded" in compressed(examples, [1 << 20] * 1000, [0] * 1000, 5, 0.0, b"")
        assert "when decoded" in compressed(examples, [1 << 25], [1 << 25], 1, 0.5, bytes(1 << 23))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


def test_an_empty_compressed_contribution_has_no_elements(examples):
    assert "empty" in compressed(examples, [5], [5], 1, 0.5, bytes(8), flags=b"\1")
    assert "empty" in compressed(examples, [5], [0], 5, 0.0, b"", flags=b"\1")
    assert "unknown flags" in compressed(examples, [0], [0], 1, 0.5, b"", flags=b"\x10")


@each("pulled_as", [0, 2, 5, 99])
def test_values_come_back_as_their_own_type_or_as_halves_of_float32(pulled_as, examples):
    assert attempt(with_header(examples["Declare"], declare(pulled_as=bytes([pulled_as]))))
    assert attempt(with_header(examples["Declare"], declare(dtypes=b"\2", pulled_as=b"\3")))
    assert attempt(with_header(examples["Declare"], declare(pulled_as=b"\3"))) == ""


def test_keys_are_read_as_the_document_says(examples):
    keys = [u32s(3, 0xFFFFFFFF, 0), "ü1".encode() + struct.pack("<q", -5)]
    header = declare(keys, [b"\2\0\1", u64s(3, 0, 7)], b"\1\2\1", b"\1\2\1", [u32s(0, 4, 0), b"rows"])
    message = wire.decode(with_header(examples["Declare"], header)).message
    assert (message.keys, message.shapes, message.forms) == (("ü1", -5, ""), ((3, 0), (), (7,)), ("", "rows", ""))
    assert message.dtypes == (1, 2, 1)


def test_counts_whose_bytes_overflow_64_bits_or_32_are_refused(examples):
    for count, n in ((0xFFFFFFFF, 1), (0x20000000, 8), (0x80000000, 4)):
        header = [b"\0" * 4 * n] * 2 + [[bytes([2]) * n, struct.pack("<I", count) * n, 0]]
        assert f"make {8 * count * n}" in attempt(with_header(examples["InitValues"], header))


BOMBS = {
    "an array that claims 2**32-1 items": b"\xdd\xff\xff\xff\xff",
    "keys that claim 2**20 items": b"\x98\x01\x00\xa4sync\xdd\x00\x10\x00\x00",
    "keys whose lengths claim 2**32-1 bytes": b"\x98\x01\x00\xa4sync\x92\xc6\xff\xff\xff\xff",
    "a key that claims 2**30 bytes": b"\x98\x01\x00\xa4sync\x92\xc4\x04\x00\x00\x00\x40\xc4\x00",
    "a name that claims 2**32-1 bytes": b"\x97\x01\x00\xdb\xff\xff\xff\xff",
    "arrays in arrays, each of which claims 2**20 items": b"\x97\x01\x00" + b"\xdd\x00\x10\x00\x00" * 100_000,
    "arrays in arrays, each of which claims 256 items": b"\x97\x01\x00" + b"\xdc\x01\x00" * 100_000,
    "keys that are nested arrays": b"\x97\x01\x00\xa4sync\x91" + b"\xdc\x01\x00" * 100_000,
    "a hundred thousand arrays of one": b"\x91" * 100_000,
    "a hundred thousand maps of one": b"\x97\x01\x00" + b"\x81\xa1a" * 100_000,
    "bytes where text should be": b"\x97\x01\x00\xc6\x00\xff\xff\xff" + b"\0" * 100_000,
}


@each("name", BOMBS)
def test_claimed_sizes_and_deep_nesting_are_refused_without_memory(name, examples):
    frames = with_header(examples["Declare"], BOMBS[name])
    assert attempt(frames).startswith("Declare, ")
    tracemalloc.start()
    try:
        attempt(frames)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < len(frames[1]) * 3 + (4 << 20)


def test_a_header_over_the_limit_is_refused_before_it_is_read(examples):
    frames = with_header(examples["Pull"], b"\xc1" * 65)
    with pytest.raises(ProtocolError, match="65 bytes, where 64 are allowed"):
        wire.decode(frames, wire.WireLimits(header_bytes_max=64))


def test_control_characters_of_a_peer_do_not_reach_the_complaint(examples):
    for text in ("\x1b[2J", "\r\n", "\u202e"):
        assert attempt(with_header(examples["Done"], [text]))
        assert attempt(with_header(examples["Configure"], [1, 0, {text: [text]}]))
