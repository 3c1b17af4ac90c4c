"""What launcher and agent say to each other: whole frames out of any pieces, and an error for everything else."""

from __future__ import annotations

import os
import selectors
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.nodes import NodeId, Role
from kvdist_launch.agent_protocol import (
    HEADER_BYTES_MAX,
    PIPE_FULL_BYTES,
    Frame,
    FrameDecoder,
    FrameError,
    FrameWriter,
    exit_of,
    process_of,
)
from kvdist_launch.environment import Environment
from kvdist_launch.exits import ProcessExit
from kvdist_launch.plan import Process
from tests.cases import each

FRAMES = [
    Frame("alive", {}),
    Frame("output", {"node": ["worker", 0], "stream": 1}, b"\x00\xff\n{}\n no end"),
    Frame("tell", {"line": "a 'b' \"c\" \n \udcff \u2028"}),
    Frame("output", {"node": ["worker", 1], "stream": 0}, b"\n"),
]


@given(st.lists(st.integers(1, 40), min_size=1))
def test_frames_are_the_same_however_the_pipe_cuts_them(sizes):
    data = b"".join(frame.encode() for frame in FRAMES)
    decoder, found = FrameDecoder(), []
    position = 0
    while position < len(data):
        size = sizes[position % len(sizes)]
        found += decoder.feed(data[position : position + size])
        position += size
    assert found == FRAMES


def test_processes_and_exits_are_the_same_on_the_other_side():
    layers = Environment({"A": "1"}, {"PATH": "/x"}, {"B": "two\nlines"})
    processes = [
        Process(NodeId(Role.WORKER, 3), 1, ("python", "-c", ""), layers, cwd="/there", is_called=True),
        Process(NodeId(Role.SCHEDULER, 0), -1, ("python",), Environment(), is_root=True, is_told_of_endings=True),
    ]
    exits = [ProcessExit(NodeId(Role.SERVER, 0), 42, -9, host="d1", life=2), ProcessExit(processes[0].node, 43, 0)]
    (frame,) = FrameDecoder().feed(Frame("start", {"processes": processes, "endings": exits}).encode())
    assert [process_of(one) for one in frame.fields["processes"]] == processes
    assert [exit_of(one, "d1") for one in frame.fields["endings"]] == [exits[0], replace(exits[1], host="d1")]


@each(
    "data",
    [
        b"hello\n",
        b"[]\n",
        b"{}\n",
        b'{"kind": 3}\n',
        b'{"kind": "output", "bytes": -1}\n',
        b'{"kind": "output", "bytes": true}\n',
        b'{"kind": "output", "bytes": 1e9}\n',
        b'{"kind": "output", "bytes": 99999999999}\n',
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
    ],
)
def test_what_is_no_frame_is_an_error(data):
    with pytest.raises(FrameError):
        FrameDecoder().feed(data)


def test_a_head_without_end_is_not_collected_for_ever():
    decoder = FrameDecoder()
    piece = b"x" * (HEADER_BYTES_MAX // 4)
    with pytest.raises(FrameError, match="longer than"):
        for _ in range(6):
            decoder.feed(piece)


def test_a_writer_never_waits_and_says_when_it_is_full():
    broken = []
    selector = selectors.DefaultSelector()
    reading, writing = os.pipe()
    writer = FrameWriter(selector, writing, lambda: broken.append(1))
    payload = b"p" * 100_000
    count = 0
    while not writer.is_full:
        writer.send("output", payload, number=count)
        count += 1
    assert count * len(payload) > PIPE_FULL_BYTES and not writer.is_empty
    decoder, numbers = FrameDecoder(), []
    os.set_blocking(reading, False)
    while len(numbers) < count:
        for key, _ in selector.select(0.0):
            key.data()
        numbers += [frame.fields["number"] for frame in decoder.feed(os.read(reading, 1 << 20))]
    assert numbers == list(range(count)) and writer.is_empty and not selector.get_map()
    os.close(reading)
    writer.send("alive")
    assert broken == [1]
    writer.send("alive")
    assert broken == [1], "who is gone is gone once"
    os.close(writing)
    selector.close()
