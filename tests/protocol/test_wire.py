"""Messages survive the way through frames, and what may not be sent is refused where it was made."""

from __future__ import annotations

import dataclasses
import itertools
import math
import typing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist import errors
from kvdist.dtypes import DType
from kvdist.naming import NamedKey, name_of
from kvdist.nodes import SCHEDULER, UNRANKED, Member, NodeId, Role
from kvdist.protocol import messages as m
from kvdist.protocol import wire
from kvdist.protocol.arrays import Arrays, Coded, Encoding, coded_sizes, offsets, padded, views
from kvdist.protocol.limits import DEFAULT, WireLimits
from kvdist.protocol.messages import CompressedPush, Peer
from tests.cases import each

U32_MAX, U64_MAX = (1 << 32) - 1, (1 << 64) - 1
U32, U64 = st.integers(0, U32_MAX), st.integers(0, U64_MAX)
I64 = st.integers(-(1 << 63), (1 << 63) - 1)
DTYPES = st.sampled_from([int(dtype) for dtype in DType])
ERRORS = st.sampled_from([int(code) for code in m.ErrorCode])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SCALARS = st.none() | st.booleans() | I64 | FINITE | NAMES
DESCRIPTIONS = st.dictionaries(NAMES, SCALARS, max_size=5)
KEYS = I64 | NAMES
SHAPES = st.lists(st.integers(0, 9), max_size=6).map(tuple)
RANKED = st.builds(NodeId, st.sampled_from([Role.SERVER, Role.WORKER]), U32 | st.just(UNRANKED))
MEMBERS = st.builds(Member, RANKED | st.just(SCHEDULER), U64)
PEERS = st.lists(st.builds(Peer, MEMBERS, NAMES, U32, NAMES, U32, st.integers(-1, U32_MAX)), max_size=4).map(tuple)
CONTENTS = st.lists(NAMES, max_size=3).map(tuple)
FILES = st.builds(m.SavedFile, NAMES, U64, NAMES)
LENGTHS = st.sampled_from([1, 2, 3, 7, 15, 16, 17, 65])


def numbers(n: int) -> st.SearchStrategy[Any]:
    return st.lists(U32, min_size=n, max_size=n).map(lambda values: np.array(values, np.uint32))


def octets(n: int, high: int) -> st.SearchStrategy[Any]:
    return st.lists(st.integers(0, high), min_size=n, max_size=n).map(lambda values: np.array(values, np.uint8))


def equal_lists(n: int, *items: st.SearchStrategy[Any]) -> list[st.SearchStrategy[Any]]:
    return [st.lists(item, min_size=n, max_size=n).map(tuple) for item in items]


@st.composite
def arrays(draw: st.DrawFn, n: int, present: Any = 1) -> Arrays:
    dtypes = np.array(draw(st.lists(DTYPES, min_size=n, max_size=n)), np.uint8)
    counts = np.array(draw(st.lists(st.integers(0, 19), min_size=n, max_size=n)), np.uint32)
    counts = (counts * present).astype(np.uint32)
    payload = draw(st.binary(min_size=8, max_size=8)) * (offsets(dtypes, counts)[1] // 8)
    return Arrays(dtypes, counts, draw(st.sampled_from([bytes, bytearray, memoryview]))(payload))


@st.composite
def pushes(draw: st.DrawFn, n: int) -> m.Push:
    flags = draw(octets(n, 7))
    triple = st.tuples(*[FINITE | st.just(math.nan)] * 3)
    distinct = tuple(draw(st.lists(triple, min_size=1, max_size=5)))
    parallel = [draw(numbers(n)) for _ in range(5)]
    present = 1 - (flags & m.Flag.EMPTY)
    return m.Push(
        draw(st.booleans()), *parallel, flags, distinct, draw(octets(n, len(distinct) - 1)), draw(arrays(n, present))
    )


@st.composite
def joined_pushes(draw: st.DrawFn, n: int) -> m.JoinedPush:
    push = draw(pushes(n))
    of = draw(st.lists(st.builds(m.Contributor, U32, U64, U32, U32), max_size=5, unique_by=lambda one: one.rank))
    columns = (push.runs, push.ids, push.versions, push.flags, push.settings, push.setting_of, push.arrays)
    return m.JoinedPush(push.pull, tuple(of), *columns)


def blocked(n: int) -> st.SearchStrategy[m.Blocked]:
    firsts = st.lists(U32, min_size=n, max_size=n, unique=True).map(lambda some: np.array(sorted(some), np.uint32))
    requests = st.lists(U64, max_size=5).map(tuple)
    return st.builds(m.Blocked, U64, NAMES, requests, RANKS, st.integers(-1, U32_MAX), firsts, numbers(n), numbers(n))


@st.composite
def row_arrays(draw: st.DrawFn, n: int, present: Any = 1) -> Arrays:
    """Ids and values of up to two rows for each slice."""
    ids = (draw(numbers(n)) % 3 * present).astype(np.uint32)
    dtypes, counts = np.full(2 * n, 7, np.uint8), np.repeat(ids, 2)
    dtypes[1::2] = draw(arrays(n)).dtypes
    counts[1::2] *= draw(numbers(n)) % 4 + 1
    return Arrays(dtypes, counts, bytes(offsets(dtypes, counts)[1]))


@st.composite
def row_pushes(draw: st.DrawFn, n: int) -> m.PushRows:
    push = draw(pushes(n))
    flags = push.flags & np.uint8(m.Flag.EMPTY | m.Flag.AVERAGE)
    columns = (push.runs, push.ids, push.steps, push.versions, push.samples, flags, push.settings, push.setting_of)
    return m.PushRows(*columns, draw(row_arrays(n, 1 - (flags & m.Flag.EMPTY))))


@st.composite
def row_ids(draw: st.DrawFn, n: int) -> Arrays:
    counts = draw(numbers(n)) % 4
    return Arrays(np.full(n, 7, np.uint8), counts, draw(st.binary(min_size=8, max_size=8)) * int(counts.sum()))


@st.composite
def compressed_pushes(draw: st.DrawFn, n: int) -> CompressedPush:
    push = draw(pushes(n))
    encoding = draw(st.sampled_from(Encoding))
    present = 1 - (push.flags & m.Flag.EMPTY).astype(np.uint32)
    counts = (np.array(draw(st.lists(st.integers(0, 40), min_size=n, max_size=n)), np.uint32) * present).astype(
        np.uint32
    )
    entries = counts // 3 if encoding is Encoding.TOP_K else counts
    payload = b""
    for size, own in zip(coded_sizes(encoding, entries).tolist(), entries.tolist(), strict=True):
        data = draw(st.binary(min_size=size, max_size=size))
        if encoding is Encoding.TOP_K:
            data = np.arange(own, dtype="<u4").tobytes() + data[size // 2 :]
        payload += data.ljust(padded(size), b"\0")
    parameter = draw(st.floats(0.25, 2.0**100, width=32)) if encoding in (Encoding.TWO_BIT, Encoding.ONE_BIT) else 0.0
    columns = (push.runs, push.ids, push.steps, push.versions, push.samples, push.flags, push.settings, push.setting_of)
    return CompressedPush(push.pull, *columns, Coded(counts, entries, int(encoding), parameter, payload))


FORMS = DTYPES.flatmap(
    lambda code: st.tuples(st.just(code), st.sampled_from([1, 3, 4]) if code == DType.FLOAT32 else st.just(code))
)
"""The dtype of a key, and the one in which its values come back."""


def with_forms(make: Any) -> st.SearchStrategy[Any]:
    """What `make` makes of a number of keys, their dtypes, and those in which values come back."""

    def forms(n: int) -> st.SearchStrategy[Any]:
        return st.lists(FORMS, min_size=n, max_size=n).flatmap(
            lambda pairs: make(n, *(st.just(tuple(pair[i] for pair in pairs)) for i in range(2)))
        )

    return by_length(forms)


def names(n: int) -> st.SearchStrategy[tuple[str, ...]]:
    return st.lists(NAMES, min_size=n, max_size=n).map(tuple)


def placements(n: int) -> st.SearchStrategy[m.Placement]:
    return st.builds(m.Placement, *equal_lists(n, U32, U32), st.integers(8, U32_MAX))


def parallel(kind: type[Any], columns: int, *rest: Any) -> st.SearchStrategy[Any]:
    """`kind` from that many arrays of u32, then what `rest` makes of the number of slices."""
    return LENGTHS.flatmap(lambda n: st.builds(kind, *[numbers(n)] * columns, *[make(n) for make in rest]))


def by_length(make: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from([0, 1, 2, 15, 16, 17]).flatmap(make)


RANKS = st.lists(U32, max_size=20).map(tuple)
FATES = st.lists(st.builds(m.Fate, U32, U64, U32, U32, U32, U32, U32, U64), max_size=20).map(tuple)
TRAINED = st.lists(st.builds(m.Trained, U64, U64), max_size=20).map(tuple)
CONTRIBUTORS = st.lists(st.builds(m.Contributor, U32, U64, U32, U32), max_size=5).map(tuple)
CODES = st.sampled_from([-1, *map(int, m.ErrorCode)])
FROM_MINUS_ONE = st.integers(-1, U32_MAX)
STANDINGS = st.lists(
    st.builds(m.Standing, U32, U32, U64, FROM_MINUS_ONE, FROM_MINUS_ONE, FROM_MINUS_ONE, CODES, NAMES), max_size=5
).map(tuple)
SETTING = st.tuples(st.tuples(*[FINITE | st.just(math.nan)] * 2, st.just(1.0)))
ROUND = (U32, CONTRIBUTORS, SETTING, CODES, NAMES, st.booleans(), st.booleans())
"""What is said of a closed round."""
STRATEGIES: dict[type[Any], st.SearchStrategy[Any]] = {
    m.Hello: st.builds(m.Hello, st.integers(-1, U32_MAX), NAMES, U32, NAMES, U32, U32, NAMES, U32),
    m.Welcome: st.builds(m.Welcome, U32, U64, st.sampled_from([int(one) for one in m.OnLoss]), FINITE, U32),
    m.Rejected: st.builds(m.Rejected, NAMES, st.booleans()),
    m.Roster: st.builds(
        m.Roster, PEERS, U32, *[st.lists(MEMBERS, max_size=20).map(tuple)] * 2, RANKS, FATES, U32, RANKS
    ),
    m.Lease: st.builds(m.Lease, U64, U32, U32, U64, U32, st.booleans(), U64, U32, U32, U64, U64, st.booleans()),
    m.Progress: st.builds(
        m.Progress, U32, U32, U64, st.sampled_from([int(one) for one in m.DueWhen]), U64, st.booleans(), st.booleans()
    ),
    m.Due: st.builds(m.Due, U32, U32, st.booleans(), U64),
    m.NotDue: st.builds(m.NotDue, U32, U32, RANKS),
    m.Leased: (LENGTHS | st.just(0)).flatmap(
        lambda n: st.builds(m.Leased, U64, U32, U64, U64, st.booleans(), U64, st.booleans(), *[numbers(n)] * 2)
    ),
    m.Used: st.builds(m.Used, U64, U64, st.booleans()),
    m.Replicate: st.one_of(
        LENGTHS.flatmap(lambda n: st.builds(m.Replicate, st.just(np.arange(n, dtype=np.uint32)), *ROUND, arrays(n))),
        st.builds(m.Replicate, U32.map(lambda one: np.full(2, one, np.uint32)), *ROUND, row_arrays(1)),
    ),
    m.Replicated: st.builds(m.Replicated, U64),
    m.Fill: LENGTHS.flatmap(
        lambda n: st.builds(
            m.Fill,
            U32.map(lambda one: np.full(n, one, np.uint32)),
            octets(n, 255),
            U32,
            STANDINGS,
            st.integers(-1, U32_MAX),
            st.integers(-(1 << 63), (1 << 63) - 1),
            st.booleans(),
            NAMES,
            st.booleans(),
            arrays(n),
        )
    ),
    m.Seen: (LENGTHS | st.just(0)).flatmap(
        lambda n: st.builds(m.Seen, U32, FATES, numbers(n), st.booleans(), U32, U32)
    ),
    m.Declare: with_forms(
        lambda n, *forms: st.builds(m.Declare, U64, U32, NAMES, *equal_lists(n, KEYS, SHAPES), *forms, names(n), U32)
    ),
    m.Placed: by_length(lambda n: st.builds(m.Placed, U64, placements(n), *equal_lists(n, U32))),
    m.Assign: with_forms(
        lambda n, *forms: st.builds(
            m.Assign, U64, U32, NAMES, *equal_lists(n, KEYS, SHAPES), *forms, names(n), placements(n), U32, RANKS
        )
    ),
    m.Configure: st.builds(m.Configure, U64, U32, DESCRIPTIONS),
    m.SetOptimizer: st.builds(m.SetOptimizer, U64, U32, DESCRIPTIONS),
    m.Done: st.builds(m.Done, U64),
    m.Failed: st.builds(m.Failed, U64, ERRORS, NAMES),
    m.Barrier: st.builds(m.Barrier, U64, U32, NAMES, st.integers(-1, U32_MAX), U32, st.booleans()),
    m.InitValues: parallel(m.InitValues, 2, arrays),
    m.Push: LENGTHS.flatmap(pushes),
    m.Pull: parallel(m.Pull, 4),
    m.Values: parallel(m.Values, 3, arrays),
    m.Counted: parallel(m.Counted, 3),
    m.Refused: parallel(m.Refused, 2, lambda n: ERRORS, lambda n: NAMES),
    m.JoinedPush: LENGTHS.flatmap(joined_pushes),
    CompressedPush: LENGTHS.flatmap(compressed_pushes),
    m.HandedBack: parallel(m.HandedBack, 2),
    m.ReplaceValues: parallel(m.ReplaceValues, 2, arrays),
    m.PullState: parallel(m.PullState, 3, lambda n: octets(n, 255)),
    m.ReplaceState: parallel(m.ReplaceState, 2, lambda n: octets(n, 255), arrays),
    m.InitRows: parallel(m.InitRows, 2, lambda n: octets(n, 1).map(lambda more: more * m.MORE), row_arrays),
    m.PushRows: LENGTHS.flatmap(row_pushes),
    m.PullRows: parallel(m.PullRows, 4, row_ids),
    m.Alive: st.just(m.Alive()),
    m.StepTimes: st.builds(m.StepTimes, U32, U64, U64, U64, U64, U64),
    m.Ack: st.builds(m.Ack, st.booleans()),
    m.Waiting: st.builds(m.Waiting, NAMES, RANKS, FINITE, U64),
    m.Goodbye: st.builds(m.Goodbye, U64, NAMES),
    m.Abort: st.builds(m.Abort, ERRORS, NAMES, NAMES, NAMES, st.integers(-1, U32_MAX), NAMES),
    m.Stop: st.just(m.Stop()),
    m.Blocked: (LENGTHS | st.just(0)).flatmap(blocked),
    m.CheckBlocked: st.just(m.CheckBlocked()),
    m.MarkPushes: (LENGTHS | st.just(0)).flatmap(
        lambda n: st.builds(
            m.MarkPushes, U32, U64, NAMES, CONTENTS, NAMES, U64, st.booleans(), numbers(n), numbers(n), U32
        )
    ),
    m.Claim: st.builds(m.Claim, U64, U32, NAMES, CONTENTS),
    m.Claimed: st.builds(m.Claimed, U64, U64, NAMES, NAMES),
    m.Prepare: st.builds(m.Prepare, U64, U32, NAMES, CONTENTS, NAMES),
    m.Save: st.builds(m.Save, U64, U32, NAMES, CONTENTS, U64, NAMES, U64, U32, U32, FILES, NAMES, U32),
    m.Saved: st.builds(m.Saved, U32, U64, FILES, NAMES),
    m.Load: st.builds(m.Load, U64, U32, NAMES, CONTENTS, NAMES, U32),
    m.Restore: st.builds(m.Restore, U64, U32, NAMES, CONTENTS),
    m.TakeRestored: st.builds(m.TakeRestored, U64, U32, U32),
    m.DropRestored: st.builds(m.DropRestored, U64, U32),
    m.Join: st.builds(m.Join, U64, U32, RANKS),
    m.Counters: (LENGTHS | st.just(0)).flatmap(lambda n: st.builds(m.Counters, *[numbers(n)] * 3)),
    m.Ready: st.builds(m.Ready, U32),
    m.TakeSnapshot: st.builds(m.TakeSnapshot, U32, U32, NAMES, NAMES),
    m.SnapshotTaken: st.builds(m.SnapshotTaken, NAMES, FILES, NAMES, TRAINED),
    m.Rewind: st.builds(m.Rewind, U32, U32, NAMES),
    m.Quiet: st.builds(m.Quiet, U32),
    m.Rewound: (LENGTHS | st.just(0)).flatmap(lambda n: st.builds(m.Rewound, U32, numbers(n), numbers(n))),
    m.Command: st.builds(m.Command, U64, U32, NAMES),
    m.Perform: st.builds(m.Perform, U64, U32, NAMES),
}


@st.composite
def packets(draw: st.DrawFn, message: st.SearchStrategy[Any]) -> m.Packet:
    said = draw(message)
    seq = draw(st.integers(1, U64_MAX)) if said.SEQUENCED else 0
    return m.Packet(m.Stamp(*draw(st.tuples(U32, U32, MEMBERS, U64)), seq, draw(U64), draw(U32)), said)


def test_every_message_has_a_kind_of_its_own_and_a_strategy():
    kinds = typing.get_args(m.Message)
    assert {kind.KIND: kind for kind in kinds} == {code: kind.message for code, kind in wire.KINDS.items()}
    assert set(kinds) == set(STRATEGIES)


@each("kind", STRATEGIES)
def test_a_message_survives_the_way_through_frames(kind, difference):
    @settings(max_examples=15)
    @given(packets(STRATEGIES[kind]))
    def check(packet):
        frames = [bytes(frame) for frame in wire.encode(packet)]
        assert len(frames[0]) == 60
        assert difference(packet, wire.decode(frames)) == ""
        assert difference(packet, wire.decode([memoryview(bytearray(frame)) for frame in frames])) == ""

    check()


def test_the_comparison_of_packets_sees_each_difference(examples, difference):
    ours = examples["Push"]
    payload = bytes(ours.message.arrays.payload)
    assert difference(ours, ours) == ""
    for change in (
        {"pull": 1},
        {"ids": ours.message.ids + np.uint32(1)},
        {"flags": ours.message.flags.astype(np.uint32)},
        {"settings": ((0.5, 0.0, 0.25), (math.nan, 0.0, 1.0))},
        {"arrays": dataclasses.replace(ours.message.arrays, payload=payload[:-1] + b"!")},
    ):
        theirs = m.Packet(ours.stamp, dataclasses.replace(ours.message, **change))
        assert difference(ours, theirs).startswith(f"message: {next(iter(change))}")


def test_the_payload_is_the_senders_buffer_and_then_the_receivers(examples):
    counts = np.array([2], np.uint32)
    buffer = bytearray(16)
    message = dataclasses.replace(examples["Values"].message, arrays=Arrays(np.array([7], np.uint8), counts, buffer))
    envelope, header, payload = wire.encode(m.Packet(examples["Values"].stamp, message))
    received = wire.decode([envelope, header, payload]).message.arrays.payload
    buffer[3] = 7
    assert received[3] == 7
    assert received.readonly


def test_what_a_thousand_are_told_is_written_once(examples):
    peers = tuple(Peer(Member(NodeId(Role.WORKER, rank), 1), "host", rank, "tcp://host:1", 0) for rank in range(1000))
    roster = m.Roster(peers, 3)
    packets = [m.Packet(dataclasses.replace(examples["Roster"].stamp, destination=one), roster) for one in (5, 6)]
    (first, header), (second, again) = (wire.encode(packet) for packet in packets)
    assert header is again
    assert [wire.decode([envelope, header]) for envelope in (first, second)] == packets
    _, other = wire.encode(m.Packet(packets[0].stamp, dataclasses.replace(roster, epoch=4)))
    assert wire.decode([first, other]).message.epoch == 4
    with pytest.raises(ValueError, match="999"):
        wire.encode(packets[0], dataclasses.replace(DEFAULT, members_max=999))


def test_decoded_arrays_cannot_be_written(examples):
    message = wire.decode(wire.encode(examples["Push"])).message
    with pytest.raises(ValueError, match="read-only"):
        message.ids[0] = 1


def test_a_key_without_elements_has_a_payload_without_bytes(examples):
    none = Arrays(np.array([1], np.uint8), np.array([0], np.uint32), b"")
    packet = m.Packet(examples["Values"].stamp, dataclasses.replace(examples["Values"].message, arrays=none))
    frames = wire.encode(packet)
    assert len(frames) == 3
    assert wire.decode(frames).message.arrays.payload.nbytes == 0


def test_a_sentence_that_is_too_long_is_cut_and_arrives(stamped):
    reason = wire.decode(wire.encode(stamped(m.Rejected("é" * 5000)))).message.reason
    assert reason == "é" * 4094 + "…"
    exact = "x" * DEFAULT.sentence_bytes_max
    assert wire.decode(wire.encode(stamped(m.Rejected(exact)))).message.reason == exact


def test_a_sentence_with_half_a_surrogate_pair_arrives_without_it(stamped):
    packet = stamped(m.Goodbye(1, "cannot read '\udcff'"))
    assert wire.decode(wire.encode(packet)).message.failure == "cannot read '?'"


def bare_rows(*counts: int) -> Arrays:
    """Arrays of int64 that say these counts."""
    return Arrays(np.full(len(counts), 7, np.uint8), np.array(counts, np.uint32), b"")


REFUSED_CHANGES = [
    ("Declare", {"keys": ("a" * 1025, 1)}, "keys.*longer than 1024 bytes"),
    ("Declare", {"keys": (True, 1)}, "expected a key"),
    ("Declare", {"keys": (1 << 63, 1)}, "expected a key"),
    ("Declare", {"keys": ("\udcff", 1)}, "surrogates"),
    ("Declare", {"keys": (1,)}, r"lengths \[1, 2\]"),
    ("Declare", {"shapes": ((1,) * 33, ())}, "at most 32 dimensions"),
    ("Declare", {"shapes": ((-1,), ())}, "dimension"),
    ("Declare", {"shapes": ((1 << 32, 1 << 32), ())}, "more than 274877906944 elements"),
    ("Declare", {"shapes": ((0, 1 << 32, 1 << 32), ())}, "more than 274877906944 elements"),
    ("Declare", {"dtypes": (1, 9)}, "code of a dtype"),
    ("Declare", {"store": 1 << 32}, "store: expected an integer"),
    ("Configure", {"description": {"lr": math.nan}}, "finite"),
    ("Configure", {"description": {"lr": math.inf}}, "finite"),
    ("Configure", {"description": {"lr": [1]}}, "found a tuple"),
    ("Configure", {"description": {"a" * 65: 1}}, "longer than 64 bytes"),
    ("Configure", {"description": dict.fromkeys(map(str, range(65)))}, "description"),
    ("Configure", {"description": {1: 1}}, "description"),
    ("Placed", {"placement": m.Placement((0,), (0, 1), 8)}, "lengths"),
    ("Placed", {"givers": (0,)}, "lengths"),
    ("Push", {"settings": ((math.inf, 0.0, 1.0),)}, "finite float or NaN, found inf"),
    ("Placed", {"placement": m.Placement((0,), (0,), 7)}, "from 8"),
    ("Assign", {"shapes": ((1,), ((1 << 38) + 1,))}, "shapes"),
    ("Failed", {"code": 8}, "code of an error"),
    ("Waiting", {"since_s": math.inf}, "finite"),
    ("Ack", {"wanted": 1}, "true or false"),
    ("Blocked", {"firsts": np.array([0, 2, 2], np.uint32)}, "ascend"),
    ("Blocked", {"pushed": np.zeros(2, np.uint32)}, r"lengths \[2, 3\]"),
    ("Blocked", {"requests": (1,) * 65}, "65 items"),
    ("Hello", {"wanted_rank": -2}, "wanted_rank"),
    ("Replicate", {"settings": ()}, "0 settings of a sum"),
    ("Replicate", {"code": 99}, "unknown error 99"),
    ("Replicate", {"ids": np.zeros(2, np.uint32)}, "row ids are not int64"),
    ("Fill", {"ids": np.array([4, 5], np.uint32)}, "pieces of several slices"),
    ("Fill", {"standings": (m.Standing(0, 0, 0, -1, -1, 3, 99, ""),)}, "unknown error 99"),
    ("Hello", {"host": "h" * 1025}, "longer than 1024"),
    ("Push", {"ids": np.zeros(3, np.int64)}, "array of uint32, found int64"),
    ("Push", {"flags": np.zeros(3, np.uint32)}, "array of uint8, found uint32"),
    ("Push", {"ids": np.zeros(2, np.uint32)}, r"lengths \[2, 3\]"),
    ("Push", {"flags": np.array([0, 17, 0], np.uint8)}, "unknown flags 16"),
    ("Push", {"flags": np.array([1, 1, 0], np.uint8)}, "empty contribution has elements"),
    ("JoinedPush", {"flags": np.array([1, 0], np.uint8)}, "empty contribution has elements"),
    ("JoinedPush", {"flags": np.array([4, 8], np.uint8)}, "unknown flags 8"),
    (
        "JoinedPush",
        {"contributors": (m.Contributor(2, 5, 1, 0), m.Contributor(2, 6, 1, 0))},
        "two pushes of one worker",
    ),
    ("PushRows", {"flags": np.array([8, 1, 0], np.uint8)}, "unknown flags 8"),
    ("PushRows", {"flags": np.array([1, 1, 0], np.uint8)}, "an empty contribution has rows"),
    ("PushRows", {"arrays": bare_rows(3, 8, 0, 0, 1, 5)}, "not a whole number for each"),
    ("PushRows", {"arrays": bare_rows(0, 8, 0, 0, 1, 5)}, "not a whole number for each"),
    ("PushRows", {"arrays": bare_rows(0, 0, 0, 0, 0)}, "5 arrays, where ids"),
    ("PushRows", {"arrays": Arrays(np.full(6, 6, np.uint8), np.zeros(6, np.uint32), b"")}, "row ids are not int64"),
    ("InitRows", {"flags": np.array([4, 0], np.uint8)}, "unknown flags 4"),
    ("PullRows", {"arrays": Arrays(np.full(2, 6, np.uint8), np.zeros(2, np.uint32), b"")}, "row ids are not int64"),
    ("JoinedPush", {"versions": np.zeros(1, np.uint32)}, r"lengths \[1, 2\]"),
    ("HandedBack", {"ids": np.zeros(1, np.uint32)}, r"lengths \[1, 2\]"),
    ("Push", {"setting_of": np.array([0, 2, 0], np.uint8)}, "setting 2 of 2"),
    ("Push", {"arrays": Arrays(np.ones(3, np.uint8), np.zeros(3, np.uint32), b"\0" * 8)}, "8 bytes .* make 0"),
    ("Push", {"arrays": Arrays(np.full(3, 9, np.uint8), np.zeros(3, np.uint32), b"")}, "unknown dtype"),
    ("Push", {"arrays": Arrays(np.ones(3, np.uint8), np.zeros(3, np.uint32), b"", 1)}, "unknown encoding 1"),
    ("Push", {"settings": ((0.1, 0.0, 1.0),) * 257}, "257 settings, where 256"),
    ("Command", {"body": "é" * (1 << 15) + "x"}, "body: not readable"),
    ("Command", {"head": -1}, "head: expected an integer"),
    ("Perform", {"body": b"x"}, "body.*found a bytes"),
    ("Pull", dict.fromkeys(("runs", "ids", "steps", "versions"), np.zeros(0, np.uint32)), "0 slices"),
]


@each("name, change, complaint", REFUSED_CHANGES)
def test_a_sender_refuses_what_a_receiver_would(name, change, complaint, examples):
    packet = m.Packet(examples[name].stamp, dataclasses.replace(examples[name].message, **change))
    with pytest.raises(ValueError, match=f"cannot send this {name}.*{complaint}"):
        wire.encode(packet)


@each(
    "name, change",
    [
        ("Push", {"seq": 0}),
        ("Alive", {"seq": 1}),
        ("Alive", {"step": -1}),
        ("Alive", {"job": 1 << 32}),
        ("Alive", {"source": Member(NodeId(Role.SCHEDULER, 1), 1)}),
        ("Alive", {"source": Member(NodeId(Role.WORKER, -1), 1)}),
    ],
)
def test_a_sender_refuses_an_impossible_stamp(name, change, examples):
    packet = m.Packet(dataclasses.replace(examples[name].stamp, **change), examples[name].message)
    with pytest.raises(ValueError, match="stamp"):
        wire.encode(packet)


@each("limit", ["header_bytes_max", "payload_bytes_max", "slices_max", "settings_max"])
def test_both_sides_obey_the_limits_they_are_given(limit, examples):
    tight = WireLimits(**{limit: 1})
    with pytest.raises(ValueError, match="Push"):
        wire.decode(wire.encode(examples["Push"], tight), tight)
    with pytest.raises(errors.ProtocolError, match="Push"):
        wire.decode(wire.encode(examples["Push"]), tight)


# Several payload frames.


def values_in(examples, counts, lengths, dtype=1):
    """Values of arrays with these counts, whose payload is cut into frames of these lengths."""
    n = len(counts)
    column = np.arange(n, dtype=np.uint32)
    data = memoryview(bytes(index % 251 for index in range(sum(lengths))))
    frames, at = [], 0
    for length in lengths:
        frames.append(data[at : at + length])
        at += length
    arrays = Arrays(np.full(n, dtype, np.uint8), np.array(counts, np.uint32), tuple(frames))
    said = m.Values(column, column, column, arrays)
    return m.Packet(examples["Values"].stamp, said)


@each(
    "counts, lengths",
    [
        ([2], [8]),
        ([2, 4], [8, 16]),
        ([1, 1, 4], [16, 16]),
        ([0, 2, 0, 0, 4, 0], [8, 16]),
        ([3] * 64, [16] * 64),
        ([0], [0]),
    ],
)
def test_several_frames_arrive_as_they_were_sent(counts, lengths, examples):
    packet = values_in(examples, counts, lengths)
    sent = wire.encode(packet)
    assert [len(frame) for frame in sent[2:]] == lengths
    received = wire.decode([bytes(frame) for frame in sent]).message.arrays
    assert [bytes(frame) for frame in received.frames] == [bytes(frame) for frame in packet.message.arrays.frames]
    assert received.nbytes == sum(lengths)
    assert [view.tobytes() for view in views(received)] == [view.tobytes() for view in views(packet.message.arrays)]


@each(
    "counts, lengths, complaint",
    [
        ([2, 4], [16, 8], "ends within an array"),
        ([2, 4], [4, 20], "ends within an array"),
        ([4], [8, 8], "ends within an array"),
        ([2, 4], [8, 0, 16], "frame is empty"),
        ([2, 4], [0, 24], "frame is empty"),
        ([2, 4], [24, 0], "frame is empty"),
        ([0, 0], [0, 0], "frame is empty"),
        ([3], [12], "12 bytes where its dtypes and counts make 16"),
        ([2, 4], [8, 8], "16 bytes where its dtypes and counts make 24"),
        ([2, 4], [8, 16, 8], "32 bytes where its dtypes and counts make 24"),
        ([2] * 65, [8] * 65, "65 payload frames, where 1 to 64|expected 3 to 66 frames, found 67"),
        ([0], [], "0 payload frames|expected 3 to 66 frames, found 2"),
    ],
)
def test_frames_that_do_not_hold_whole_arrays_are_refused_by_both_sides(counts, lengths, complaint, examples):
    packet = values_in(examples, counts, lengths)
    with pytest.raises(ValueError, match=complaint):
        wire.encode(packet)
    whole = values_in(examples, counts, [offsets(packet.message.arrays.dtypes, packet.message.arrays.counts)[1]])
    envelope, header, _ = wire.encode(whole)
    frames = [bytes(frame) for frame in packet.message.arrays.frames]
    with pytest.raises(errors.ProtocolError, match=complaint):
        wire.decode([envelope, header, *frames])


@settings(max_examples=60)
@given(data=st.data())
def test_a_cut_payload_is_read_or_refused_and_nothing_else(data, examples):
    counts = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=8))
    dtypes = np.full(len(counts), 1, np.uint8)
    starts, total = offsets(dtypes, np.array(counts, np.uint32))
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=5)))
    lengths = [high - low for low, high in itertools.pairwise([0, *cuts, total])]
    frames = [bytes(frame) for frame in values_in(examples, counts, lengths).message.arrays.frames]
    envelope, header, payload = wire.encode(values_in(examples, counts, [total]))
    legal = len(frames) == 1 or (all(lengths) and set(cuts) <= {*starts.tolist(), total})
    if not legal:
        with pytest.raises(errors.ProtocolError, match="a payload frame"):
            wire.decode([envelope, header, *frames])
        return
    found = views(wire.decode([envelope, header, *frames]).message.arrays)
    plain = views(wire.decode([envelope, header, bytes(payload)]).message.arrays)
    assert [view.tobytes() for view in found] == [view.tobytes() for view in plain]


def test_a_limit_on_payload_bytes_counts_all_frames(examples):
    packet = values_in(examples, [2, 4], [8, 16])
    assert wire.decode(wire.encode(packet), WireLimits(payload_bytes_max=24))
    with pytest.raises(errors.ProtocolError, match="24 bytes, where 23"):
        wire.decode(wire.encode(packet), WireLimits(payload_bytes_max=23))
    with pytest.raises(errors.ProtocolError, match="expected 3 to 3 frames|expected 3 frames"):
        wire.decode(wire.encode(packet), WireLimits(payload_frames_max=1))


def test_a_key_takes_its_name_along(stamped):
    keys = (NamedKey(0, "'layer1.weight'"), NamedKey(-1, ""), NamedKey(2, "é" * 300), 3, "fc1")
    declared = m.Declare(1, 0, "sync", keys, ((2,),) * 5, (1,) * 5, (1,) * 5, ("",) * 5)
    received = wire.decode(wire.encode(stamped(declared))).message.keys
    assert received == keys
    assert [type(key) for key in received] == [type(key) for key in keys]
    assert [name_of(key) for key in received] == ["'layer1.weight'", "", "é" * 200, "key 3", "key 'fc1'"]
