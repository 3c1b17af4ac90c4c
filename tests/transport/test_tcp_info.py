"""Whether a connection is silent: descriptors belong to libzmq, which closes them at any time."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest
import zmq

from kvdist.config.settings import Limits
from kvdist.transport.base import Disconnected
from kvdist.transport.sockets import CONNECTED, DISCONNECTED, UP, DialledSocket
from kvdist.transport.tcp_info import shut_down_silent, silence_s
from kvdist.transport.zeromq import ZeroMQTransport
from tests.cases import each

only_linux_tells = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@pytest.fixture
def connection():
    """Two ends of a connection that has brought nothing yet, and the listener's port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, listener.accept()[0] as far:
            yield near, far, port


@only_linux_tells
def test_a_closed_descriptor_is_not_silent_and_not_hung_up(connection):
    near, _, port = connection
    descriptor = near.detach()
    os.close(descriptor)
    assert silence_s(descriptor) == 0
    assert not shut_down_silent(descriptor, port, 0.0)


def test_a_descriptor_that_is_a_file_by_now_is_left_alone(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        assert silence_s(file.fileno()) == 0
        before = len(os.listdir("/proc/self/fd"))
        assert not shut_down_silent(file.fileno(), 1, 0.0)
        assert len(os.listdir("/proc/self/fd")) == before
        file.write(b"it is still open")


@only_linux_tells
def test_only_a_connection_of_the_port_is_hung_up(connection):
    near, far, port = connection
    assert not shut_down_silent(near.fileno(), 1, 0.0)
    before = len(os.listdir("/proc/self/fd"))
    assert shut_down_silent(near.fileno(), port, 0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert far.recv(1) == b""


@each(
    "looks, after_silence",
    [
        ((), False),
        ((0.9, 1.9), False),  # the peer has spoken within two heartbeats: it has ended
        ((1.9, 2.1), True),  # the peer may have hung up for silence before we do
        ((2.1, 0.0), True),  # the kernel has the end already, which the monitor has not said yet
        ((2.1, 0.3), False),  # it was silent, and has spoken since
        ((7.6,), True),  # we hang up
    ],
)
def test_a_break_comes_after_silence_if_the_last_look_found_none_of_the_last_heartbeats(
    monkeypatch, looks, after_silence
):
    limits, hung_up = Limits(patience_s=10.0), []
    monkeypatch.setattr("kvdist.transport.sockets.shut_down_silent", lambda *words: hung_up.append(words) or True)
    with zmq.Context() as context:
        link = DialledSocket(context.socket(zmq.DEALER), "tcp://127.0.0.1:9")
        link.observe(CONNECTED, 77, [])
        link.observe(UP, 0, [])
        for silent_s in looks:
            monkeypatch.setattr("kvdist.transport.sockets.silence_s", {77: silent_s}.get)
            link.hang_up_silent(limits.silence_s, limits.quiet_s)
        link.observe(DISCONNECTED, 77, [])
        events = []
        link.report_lost(events)
        link.close()
    assert [(type(event), event.after_silence) for event in events] == [(Disconnected, after_silence)]
    assert hung_up == ([(77, 9, 7.5)] if max(looks, default=0) >= 7.5 else [])


def test_silence_is_looked_for_when_it_is_due_and_not_only_now_and_then(monkeypatch):
    looked = []
    monkeypatch.setattr("kvdist.transport.zeromq.CAN_JUDGE", True)
    transport = ZeroMQTransport(Limits(patience_s=10.0))
    with contextlib.closing(transport):
        transport.bind("tcp://127.0.0.1:0")
        for longest_s in (0.5, 7.0, 7.499, 7.6):
            monkeypatch.setattr(transport._links[0], "hang_up_silent", lambda *_, said=longest_s: said)
            transport._hang_up_silent(100.0)
            looked.append(transport._silence_look_at)
    assert looked == pytest.approx([100.9375, 100.5, 100.01, 100.01])
