"""Whether a connection is silent: descriptors belong to libzmq, which closes them at any time."""

from __future__ import annotations

import os
import socket
import sys

import pytest

from kvdist.transport.silence import hang_up, silence_s

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells")


@pytest.fixture
def connection():
    """Two ends of a connection that has brought nothing yet, and the listener's port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as near, listener.accept()[0] as far:
            yield near, far, port


def test_a_closed_descriptor_is_not_silent_and_not_hung_up(connection):
    near, _, port = connection
    descriptor = near.detach()
    os.close(descriptor)
    assert silence_s(descriptor) == 0
    assert not hang_up(descriptor, port, 0.0)


def test_a_descriptor_that_is_a_file_by_now_is_left_alone(tmp_path):
    with open(tmp_path / "file", "wb") as file:
        assert silence_s(file.fileno()) == 0
        before = len(os.listdir("/proc/self/fd"))
        assert not hang_up(file.fileno(), 1, 0.0)
        assert len(os.listdir("/proc/self/fd")) == before
        file.write(b"it is still open")


def test_only_a_connection_of_the_port_is_hung_up(connection):
    near, far, port = connection
    assert not hang_up(near.fileno(), 1, 0.0)
    before = len(os.listdir("/proc/self/fd"))
    assert hang_up(near.fileno(), port, 0.0)
    assert len(os.listdir("/proc/self/fd")) == before
    assert far.recv(1) == b""
