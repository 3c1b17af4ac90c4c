"""The messages between the ranks of a job without servers."""

import contextlib
import dataclasses
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvdist.protocol
from kvdist.errors import ProtocolError
from kvdist.protocol.collective import (
    TEXT_BYTES_MAX,
    Agreed,
    AllConnected,
    AllJoined,
    CallReport,
    DefineOperation,
    Farewell,
    GroupFailed,
    GroupMembers,
    LastCalls,
    Mismatch,
    OperationFailed,
    Participate,
    RankBye,
    RankGone,
    RankHello,
    RankLeaving,
    RankWaits,
    Reorder,
    StallWarning,
    Throttle,
    decode,
    encode,
)
from tests.cases import each

EXAMPLES = [
    RankHello("token", 3, 5, "höst", "0123456789ab", "1.0"),
    DefineOperation("allreduce", "grad.3", ("float32[17, 3]", "int8[]"), "Sum", "cuda"),
    CallReport(0, 2**40, 7, bytes(range(18))),
    OperationFailed(1, 9, True, "broke"),
    GroupMembers(4, (0, 2, 5)),
    RankBye("", ((0, 12), (3, 2**63))),
    AllConnected(("a", "b"), ("m", "m")),
    Agreed(0, 1),
    Mismatch(1, 2, False, "text", 2**40),
    RankGone(2, "h", "cause", ((0, 1),)),
    GroupFailed(0xFFFFFFFF, "over"),
    Participate(0, 1, "allreduce", "x", ("float32[2]",), "Sum", "cpu"),
    AllJoined(0, 3, 2),
    Throttle(0, True),
    StallWarning("slow"),
    Farewell(),
    LastCalls(((0, 2**40), (7, 0))),
    RankLeaving(3, "h", ((0, 2),)),
    RankWaits(0, 2**40),
    Reorder(1, 7, 2**33),
]


@each("message", EXAMPLES)
def test_a_message_comes_back_as_it_was(message):
    assert decode(encode(message)) == message


@each("message", EXAMPLES)
def test_a_message_that_is_cut_or_has_more_behind_it_is_refused(message):
    data = encode(message)
    for cut in range(len(data)):
        with pytest.raises(ProtocolError):
            decode(data[:cut])
    with pytest.raises(ProtocolError):
        decode(data + b"\0")


@given(st.binary(max_size=64))
def test_whatever_comes_only_a_protocol_error_leaves(data):
    with contextlib.suppress(ProtocolError):
        decode(data)


def test_a_claim_of_many_items_takes_no_memory():
    with pytest.raises(ProtocolError, match="claimed"):
        decode(bytes([GroupMembers.KIND]) + (0).to_bytes(4, "little") + (2**32 - 1).to_bytes(4, "little"))


def test_a_text_is_cut_between_characters_where_it_is_too_long():
    text = decode(encode(StallWarning("ä" * TEXT_BYTES_MAX))).text
    assert text == "ä" * (TEXT_BYTES_MAX // 2)


def test_a_text_that_cannot_be_encoded_still_travels():
    assert decode(encode(StallWarning("a\ud800b"))).text == "a?b"


def test_the_page_has_every_message_with_its_fields():
    page = Path(kvdist.protocol.__file__).with_name("COLLECTIVE.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([0-9]+) \| `(\w+)` \| [a-z0 ]+ \| (.*) \|$", page, re.MULTILINE)
    told = [(int(kind), name, re.findall(r"`(\w+): (\w+)`", fields)) for kind, name, fields in rows]
    kinds = sorted({type(message) for message in EXAMPLES}, key=lambda kind: kind.KIND)
    fields = {
        kind: [(field.name, field.type.__metadata__[0].name) for field in dataclasses.fields(kind)] for kind in kinds
    }
    assert told == [(kind.KIND, kind.__name__, fields[kind]) for kind in kinds]
