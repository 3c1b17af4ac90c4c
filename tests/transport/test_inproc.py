"""What only the in-process network promises: several nodes in one thread, and frames by reference."""

from __future__ import annotations

import threading

import pytest

from kvdist.errors import ConfigError
from kvdist.transport.base import Arrived, Connected
from kvdist.transport.inproc import InprocNetwork


def test_one_thread_that_runs_several_nodes_waits_for_any_of_them() -> None:
    network = InprocNetwork()
    server, worker = network.transport(), network.transport()
    server.bind("inproc://server")
    assert not network.wait(0.0)
    route = worker.connect("inproc://server")
    assert network.wait(0.0)
    assert worker.recv(0.0) == [Connected(route)]
    assert not network.wait(0.0)
    worker.send(route, [b"hello"])
    assert network.wait(0.0) and network.wait(0.0)  # waiting takes nothing
    (arrived,) = server.recv(0.0)
    assert isinstance(arrived, Arrived) and not network.wait(0.0)


def test_a_wake_of_any_transport_ends_the_wait_of_the_network() -> None:
    network = InprocNetwork()
    transports = [network.transport() for _ in range(3)]
    thread = threading.Thread(target=transports[1].wake)
    thread.start()
    assert network.wait(60.0)
    thread.join()
    assert [transport.recv(0.0) for transport in transports] == [[], [], []]
    assert not network.wait(0.0)


def test_a_closed_transport_does_not_keep_the_network_awake() -> None:
    network = InprocNetwork()
    transport = network.transport()
    transport.close()
    transport.wake()
    assert not network.wait(0.0)


def test_a_large_frame_is_the_senders_memory_and_cannot_be_written() -> None:
    network = InprocNetwork()
    server, worker = network.transport(), network.transport()
    server.bind("inproc://server")
    payload = bytearray(1 << 20)
    worker.send(worker.connect("inproc://server"), [payload])
    (arrived,) = server.recv(0.0)
    assert isinstance(arrived, Arrived)
    payload[7] = 1
    assert arrived.frames[0][7] == 1 and arrived.frames[0].readonly


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:1", "inproc://", "server"])
def test_an_endpoint_of_another_transport_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="write inproc://name"):
        InprocNetwork().transport().bind(endpoint)
