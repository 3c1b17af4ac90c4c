"""WIRE.md says what the code does: its tables and examples are read and compared."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np

import kvdist.protocol
from kvdist.dtypes import DType
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol import messages as m
from kvdist.protocol import wire
from kvdist.protocol.arrays import Arrays, Coded, Encoding, coded_size, coded_sizes, padded
from kvdist.protocol.limits import DEFAULT
from tests.cases import each

DOCUMENT = Path(kvdist.protocol.__file__).with_name("WIRE.md").read_text(encoding="utf-8")
SENDERS = {
    "process", "worker", "server", "scheduler", "any", "scheduler, server", "server, worker", "receiver of a request",
}  # fmt: skip
RECEIVERS = {
    "process",
    "worker",
    "server",
    "scheduler",
    "server, scheduler",
    "any",
    "its sender",
    "server, worker",
    "scheduler, worker",
    "scheduler, server",
}


def table(first_column: str) -> list[dict[str, str]]:
    """The rows of the table whose first column is so called."""
    lines = DOCUMENT.splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(f"| {first_column} |"))
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


def message_rows() -> list[dict[str, str]]:
    lines = DOCUMENT.split("## 4. Messages")[1].split("## 5.")[0]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in lines.splitlines() if line.startswith("|")]
    return [dict(zip(rows[0], row, strict=True)) for row in rows[2:]]


ROWS = message_rows()


def fields_of(row: dict[str, str]) -> list[tuple[str, str]]:
    return [tuple(part.split(": ")) for part in row["fields"].split(", ")] if row["fields"] else []  # type: ignore[misc]


def test_the_table_has_every_kind_once_under_its_code():
    assert {int(row["code"]): row["message"] for row in ROWS} == {
        code: kind.message.__name__ for code, kind in wire.KINDS.items()
    }
    assert len(ROWS) == len(wire.KINDS)


@each("row", ROWS)
def test_a_row_has_the_fields_of_the_class_and_their_types_in_order(row):
    form = wire.KINDS[int(row["code"])]
    assert fields_of(row) == [(name, field.name) for name, field in form.fields]
    assert [name for name, _ in form.fields] == [field.name for field in dataclasses.fields(form.message)]
    assert row["sequenced"] == ("yes" if form.message.SEQUENCED else "no")
    assert form.has_payload == ("arrays" in dict(fields_of(row)))


def test_every_type_that_a_field_has_is_explained_and_every_explained_one_is_used():
    explained = {row["type"].strip("`") for row in table("type")}
    assert {kind for row in ROWS for _, kind in fields_of(row)} == explained


def test_every_limit_that_the_document_names_is_in_its_table():
    assert set(re.findall(r"`(\w+_max)`", DOCUMENT)) == {row["limit"] for row in table("limit")}


@each("row", ROWS)
def test_a_row_says_who_sends_to_whom_and_which_messages_answer(row):
    sender, receiver = row["direction"].split(" → ")
    assert sender in SENDERS
    assert receiver in RECEIVERS
    answers = re.findall(r"[A-Z]\w+", row["answered by"])
    assert answers or row["answered by"] == "–"
    assert set(answers) <= {other["message"] for other in ROWS}


CODES = {"error": m.ErrorCode, "on-loss": m.OnLoss, "due-when": m.DueWhen}


def test_the_table_of_types_has_every_code_of_those_that_are_codes():
    told = {row["type"].strip("`"): row["must be"] for row in table("type")}
    assert {name for name, text in told.items() if re.match(r"\d+ [a-z]", text)} == CODES.keys()
    for name, codes in CODES.items():
        assert told[name] == ", ".join(f"{one.value} {one.name.lower().replace('_', ' ')}" for one in codes)


def test_the_table_of_limits_is_what_the_code_obeys():
    assert {row["limit"]: int(row["value"]) for row in table("limit")} == dataclasses.asdict(DEFAULT)


def test_the_table_of_dtypes_is_the_codes_table():
    section = DOCUMENT.split("## 5. Arrays")[1].split("The `encoding` of")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if re.match(r"\| \d", line)]
    assert [(int(code), name.strip(), int(size)) for code, name, size in rows] == [
        (int(dtype), dtype.label, dtype.itemsize) for dtype in DType
    ]


ENCODING_SIZES = {"4⌈e/16⌉": lambda e: -(-e // 16) * 4, "4⌈e/32⌉": lambda e: -(-e // 32) * 4, "2e": lambda e: 2 * e,
                  "8e": lambda e: 8 * e, "4⌈e/256⌉ + 4⌈e/4⌉": lambda e: -(-e // 256) * 4 + -(-e // 4) * 4,
                  "4⌈e/256⌉ + 4⌈e/8⌉": lambda e: -(-e // 256) * 4 + -(-e // 8) * 4}  # fmt: skip


def test_the_table_of_encodings_has_every_code_and_the_sizes_that_the_code_computes():
    rows = {int(row["encoding"]): row for row in table("encoding")}
    assert set(rows) == set(Encoding)
    for code, row in rows.items():
        assert row["bytes of e entries"] in ENCODING_SIZES, "add the formula to ENCODING_SIZES"
        for entries in (0, 1, 15, 16, 17, 31, 32, 33, 256, 257, 1_000_003):
            expected = ENCODING_SIZES[row["bytes of e entries"]](entries)
            assert coded_size(Encoding(code), entries) == expected
            assert coded_sizes(code, np.array([entries], np.uint32)).tolist() == [expected]


def test_the_fields_of_the_envelope_make_60_bytes():
    rule = DOCUMENT.split("envelope     =")[1].split(";")[0].split()
    widths = dict(re.findall(r"^([a-z-]+) += (%x[\w.]+|OCTET|\d+OCTET)", DOCUMENT, re.MULTILINE))
    total = 0
    for name in rule:
        width = widths[name]
        total += int(width[:-5] or 1) if width.endswith("OCTET") else width.count(".") + 1
    assert total == 60


def test_the_document_names_the_version_that_is_spoken():
    assert DOCUMENT.startswith(f"# The kvdist wire protocol, version {wire.VERSION}\n")
    assert f"version      = %x{wire.VERSION:02X}\n" in DOCUMENT
    assert f"%x{wire.MAGIC.hex('.').upper()} " in DOCUMENT


def examples() -> list[tuple[dict[str, Any], list[bytes]]]:
    texts = re.findall(r"```json\n(.*?)```", DOCUMENT, re.DOTALL)
    dumps = re.findall(r"```hex\n(.*?)```", DOCUMENT, re.DOTALL)
    frames = [[bytes.fromhex(frame) for frame in dump.split("\n\n")] for dump in dumps]
    return list(zip((json.loads(text) for text in texts), frames, strict=True))


def told_arrays(told: dict[str, Any]) -> Arrays:
    """The arrays that the text of an example tells."""
    payload = b""
    for code, elements in zip(told["dtypes"], told["elements"], strict=True):
        data = np.array(elements, DType(code).storage).tobytes()
        payload += data.ljust(padded(len(data)), b"\0")
    return Arrays(np.array(told["dtypes"], np.uint8), np.array(told["counts"], np.uint32), payload, told["encoding"])


def told_coded(told: dict[str, Any]) -> Coded:
    """The encoded arrays that the text of an example tells."""
    columns = (np.array(told[name], np.uint32) for name in ("counts", "entries"))
    return Coded(*columns, told["encoding"], told["parameter"], b"".join(map(bytes.fromhex, told["bytes"])))


def told_packet(told: dict[str, Any]) -> m.Packet:
    """The packet that the text of an example tells."""
    (row,) = [row for row in ROWS if row["message"] == told["message"]]
    make = {
        "u32s": lambda value: np.array(value, np.uint32),
        "numbers": lambda value: np.array(value, np.uint32),
        "u8s": lambda value: np.array(value, np.uint8),
        "arrays": told_arrays,
        "coded": told_coded,
        "settings": lambda value: tuple(map(tuple, value)),
        "contributors": lambda value: tuple(m.Contributor(*one) for one in value),
    }
    values = {name: make.get(kind, lambda value: value)(told["fields"][name]) for name, kind in fields_of(row)}
    role, rank, incarnation = told["stamp"]["source"]
    source = Member(NodeId(Role(role), rank), incarnation)
    stamp = m.Stamp(**{**told["stamp"], "source": source})
    return m.Packet(stamp, wire.KINDS[int(row["code"])].message(**values))


def test_the_examples_are_a_hello_and_three_pushes_with_a_setting_left_to_the_server():
    (hello, _), (push, _), (joined, _), (coded, _) = examples()
    assert (hello["message"], push["message"], joined["message"]) == ("Hello", "Push", "JoinedPush")
    assert coded["message"] == "CompressedPush"
    assert math.isnan(push["fields"]["settings"][0][1])


@each("told, frames", examples())
def test_an_example_is_encoded_to_its_hex_and_decoded_to_its_text(told, frames, difference):
    packet = told_packet(told)
    assert [bytes(frame) for frame in wire.encode(packet)] == frames
    assert difference(packet, wire.decode(frames)) == ""
