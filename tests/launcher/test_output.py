"""Lines of many processes in one output: whole, prefixed, unchanged."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.nodes import SCHEDULER, server, worker
from kvdist_launch.output import LINE_BYTES_MAX, LineSplitter, Sink


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


@pytest.mark.parametrize(
    ("chunks", "lines"),
    [
        ([], []),
        ([b"a\nb\n"], [b"a\n", b"b\n"]),
        ([b"a", b"b", b"\n"], [b"ab\n"]),
        ([b"a\n\nb\n"], [b"a\n", b"\n", b"b\n"]),
        ([b"no end"], [b"no end\n"]),
        ([b"a\r\nb\r\n"], [b"a\n", b"b\n"]),
        ([b"a\r", b"\nb\n"], [b"a\n", b"b\n"]),
        ([b"\r 10%", b"\r 20%", b"\r100%\n"], [b" 10%\r", b" 20%\r", b"100%\n"]),
        ([b"10%\r20%\r"], [b"10%\r", b"20%\n"]),
        ([b"\r"], []),
        ([b"\xff\x00\xfe\n"], [b"\xff\x00\xfe\n"]),
    ],
)
def test_lines_end_at_newlines_and_carriage_returns(chunks, lines):
    assert split(*chunks) == lines


def test_a_line_that_does_not_end_is_shown_in_pieces():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * LINE_BYTES_MAX) == []
    assert splitter.feed(b"yz") == [b"x" * LINE_BYTES_MAX + b"\n"]
    assert splitter.finish() == [b"yz\n"]


@given(st.lists(st.binary(max_size=20)))
def test_no_byte_of_a_line_is_lost_however_the_stream_is_cut(chunks):
    text = b"".join(chunks)
    assert b"".join(split(*chunks)).translate(None, b"\r\n") == text.translate(None, b"\r\n")
    assert split(*chunks) == split(text)


def written(is_terminal: bool, colours: bool = True, *calls: tuple[object, list[bytes]]) -> bytes:
    reader, writer = os.pipe()
    sink = Sink(writer, is_terminal, colours)
    for node, lines in calls:
        sink.write_lines(sink.prefix(node), lines)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


def test_every_line_has_the_name_of_its_process_before_it():
    shown = written(False, True, (worker(0), [b"a\n", b"b\n"]), (SCHEDULER, [b"c\n"]), (server(12), [b"d\n"]))
    assert shown.decode() == "w0 │ a\nw0 │ b\nsched │ c\ns12 │ d\n"


def test_the_host_stands_behind_the_name_where_there_are_several():
    assert Sink(1, is_terminal=False).prefix(worker(3), "d1").decode() == "w3@d1 │ "
    assert Sink(1, is_terminal=True).prefix(SCHEDULER, "d1").decode() == "\x1b[90msched@d1 │\x1b[0m "


def test_progress_bars_become_lines_where_nothing_can_be_overwritten():
    assert written(False, True, (worker(0), [b"10%\r", b"20%\r"])).decode() == "w0 │ 10%\nw0 │ 20%\n"


def test_progress_bars_are_overwritten_on_a_terminal_and_leave_no_rest():
    assert written(True, False, (worker(0), [b"10%\r"]), (worker(1), [b"a\n", b"b\n"])).decode() == (
        "\x1b[Kw0 │ 10%\r\x1b[Kw1 │ a\n\x1b[Kw1 │ b\n"
    )


def test_processes_have_colours_of_their_own_on_a_terminal():
    shown = written(True, True, (worker(0), [b"a\n"]), (worker(1), [b"a\n"]))
    assert shown.decode() == "\x1b[K\x1b[36mw0 │\x1b[0m a\n\x1b[K\x1b[32mw1 │\x1b[0m a\n"


def test_lines_begin_with_the_local_time_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        reader, writer = os.pipe()
        sink = Sink(writer, is_terminal=False, clock=lambda: 1763751662.0625)
        sink.write_lines(sink.prefix(worker(0)), [b"a\n", b"b\n"])
        sink.write_lines(b"kvdist-launch: ", [b"c\n"])
        assert os.read(reader, 1000).decode() == (
            "2025-11-21T21:01:02.062 w0 │ a\n2025-11-21T21:01:02.062 w0 │ b\n2025-11-21T21:01:02.062 kvdist-launch: c\n"
        )
        os.close(reader)
        os.close(writer)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_output_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    sink = Sink(writer, is_terminal=False)
    sink.write_lines(b"", [b"a\n"])
    sink.write_lines(b"", [b"b\n"])
    os.close(writer)
