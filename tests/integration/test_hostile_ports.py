"""Strangers at every port of a running job, with all that they can find out: the job goes on, and stays as large.

They know the protocol, the job's tag and who is in it, but no incarnation: those are drawn anew for each job.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import time
import zlib

import hypothesis
import pytest
from hypothesis import strategies as st

from kvdist.nodes import SCHEDULER, UNRANKED, Member, NodeId, Role, server, worker
from kvdist.protocol.messages import Packet, Stamp
from kvdist.protocol.wire import encode
from tests.acceptance.hostile import COMMAND, GREETING, MORE, READY, frame, listening_ports, resident_bytes
from tests.integration.processes import HOST, PROGRAMS
from tests.protocol.conftest import messages

JOB = "besieged"
GROWTH_BYTES_MAX = 300 << 20
"""For one process, of what all attacks together send, and what the job itself takes meanwhile."""
ANSWER_S = 0.2
"""How long a stranger listens; whether the other side hangs up is its own affair."""
SETTINGS = {
    "KVDIST_SECURITY": "none",
    "KVDIST_JOB": JOB,
    "PYTHONPATH": str(PROGRAMS),
    "KVDIST_SERVER_MODULE": "patient",
}
CLAIMED = [
    *(Member(node, 1) for node in (SCHEDULER, server(0), worker(0), worker(1))),
    Member(NodeId(Role.WORKER, UNRANKED), 99),
    Member(NodeId(Role.SERVER, UNRANKED), 99),
]
"""In whose name strangers speak."""


def packed(frames):
    """A message of ZMTP."""
    return b"".join(frame(one, MORE * (place < len(frames) - 1)) for place, one in enumerate(frames))


def stamped(message, chance):
    """A message in somebody's name."""
    seq = chance.choice([1, 2, 1 << 40]) if message.SEQUENCED else 0
    job, destination = zlib.crc32(JOB.encode()), chance.choice([0, 1])
    stamp = Stamp(job, 1, chance.choice(CLAIMED), destination, seq, 3, 4)
    return [bytes(one) for one in encode(Packet(stamp, message))]


def changed(frames, chance):
    """A message with one to three other bytes, or a frame too many, too few, twice or cut."""
    frames = list(frames)
    place = chance.randrange(len(frames))
    body = bytearray(frames[place])
    for _ in range(chance.randint(1, 3) if body else 0):
        body[chance.randrange(len(body))] = chance.choice([0, 1, 127, 128, 255, 0xC1, 0xDF])
    frames[place] = bytes(body[: chance.choice([len(body), chance.randrange(len(body) + 1)])])
    if chance.random() < 0.2:
        frames = chance.choice([frames[:-1], frames + frames[-1:], frames[::-1]])
    return frames or [b""]


SHAKEN = GREETING + frame(READY, COMMAND)
"""A whole handshake."""


def attacks(chance):
    """What strangers send, each on a connection of its own."""
    yield chance.randbytes(chance.choice([1, 9, 64, 5000]))
    yield SHAKEN[: chance.randrange(len(SHAKEN))]
    yield SHAKEN + b"\x02" + b"\x7f" + bytes(7) + b"x" * 1000  # a frame that claims exabytes
    yield SHAKEN + frame(b"KVDI", MORE) * 20_000  # a message without an end
    yield SHAKEN + frame(b"") * 20_000
    yield GREETING[:12] + b"PLAIN".ljust(20, b"\0") + bytes(32) + frame(READY, COMMAND)
    yield SHAKEN + packed([b"KVDI" + bytes(56), bytes(1 << 22), bytes(1 << 22)])
    for message in messages():
        frames = stamped(message, chance)
        yield SHAKEN + packed(frames)
        yield SHAKEN + packed(changed(frames, chance))


@st.composite
def conversations(draw):
    """What a stranger sends on one connection: anything, or messages behind a handshake, valid ones or nearly so."""
    if draw(st.integers(0, 7)) == 0:
        return draw(st.binary(max_size=200))
    chance = draw(st.randoms(use_true_random=False))
    known = st.sampled_from(messages()).map(lambda message: stamped(message, chance))
    nearly = known.map(lambda frames: changed(frames, chance))
    unknown = st.lists(st.binary(max_size=100), min_size=1, max_size=4)
    data = SHAKEN + b"".join(map(packed, draw(st.lists(known | nearly | nearly | unknown, min_size=1, max_size=4))))
    return data[: draw(st.integers(0, len(data)))] if draw(st.booleans()) else data


def attack(ports, data):
    """Send it to each port and listen for a moment. Returns how many hung up."""
    refused = 0
    with contextlib.ExitStack() as stack:
        strangers = []
        for port in sorted(ports):
            with contextlib.suppress(OSError):
                stranger = stack.enter_context(socket.create_connection((HOST, port), timeout=10))
                stranger.sendall(data)
                strangers.append(stranger)
        until = time.monotonic() + ANSWER_S
        for stranger in strangers:
            with contextlib.suppress(OSError):
                stranger.settimeout(max(0.001, until - time.monotonic()))
                while stranger.recv(65536):
                    pass
                refused += 1
    return refused


@pytest.mark.hypothesis
@pytest.mark.parametrize("examples", [60, pytest.param(1_000, marks=pytest.mark.slow)])
def test_strangers_at_every_port_change_nothing(job, tmp_path, examples):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    settings = {**SETTINGS, "KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    job.cluster(2, 1, "exact.py", str(tmp_path / "checkpoints"), "8", str(fifo), **settings)
    job.line("scheduler", "KVDIST_SECURITY is none")
    job.wait(lambda: len(ports_of(job)) == 4, "scheduler, server and workers listen")
    for name in ("worker-0", "worker-1"):
        job.line(name, "half")
    ports, before = ports_of(job), sizes_of(job)
    refused = [attack(ports, data) for data in attacks(random.Random(1))]
    assert len(refused) >= 100 and sum(refused) >= len(refused) * len(ports) / 2, refused

    @hypothesis.settings(max_examples=examples, phases=[hypothesis.Phase.generate], database=None)
    @hypothesis.given(conversations())
    def anything_else(data):
        attack(ports, data)
        assert [name for name, process in job.processes.items() if process.popen.poll() is not None] == [], data

    anything_else()
    grown = {name: size - before[name] for name, size in sizes_of(job).items()}
    fifo.write_bytes(b"")
    job.succeed()
    assert all(job.processes[name].lines_with("exact") for name in ("worker-0", "worker-1")), job.transcript()
    assert max(grown.values()) < GROWTH_BYTES_MAX, grown
    for name in ("scheduler", "server-0"):
        assert job.processes[name].lines_with(" stranger(s) and dropped "), job.transcript()


def ports_of(job):
    """The TCP ports of all processes."""
    return {port for process in job.processes.values() for port in listening_ports(process.pid)}


def sizes_of(job):
    """The memory of each process."""
    return {name: resident_bytes(process.pid) for name, process in job.processes.items()}
