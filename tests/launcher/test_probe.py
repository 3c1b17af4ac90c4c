"""Latency and bandwidth between two ends of one machine."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from kvdist_launch import probe
from kvdist_launch.probe import REPORT, TOKEN_BYTES, HostProbe, measure_speed, serve_measurement
from tests.ports import held_port

TOKEN = "ab" * TOKEN_BYTES
TOKEN_SENT = bytes.fromhex(TOKEN)


class Listener:
    """A probe and its selector, in a thread."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs
        self.selector.register(theirs, selectors.EVENT_READ, None)
        self.probe = HostProbe(self.selector)
        self._thread = threading.Thread(target=self._serve)

    def open(self) -> int:
        port = self.probe.answer("measure_listen", {"address": "127.0.0.1", "token": TOKEN})["port"]
        self._thread.start()
        return int(port)

    def close(self) -> None:
        self._ours.send(b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self.probe.close()
        self.selector.close()
        self._ours.close()
        self._theirs.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self.selector.select():
                if key.data is None:
                    return
                key.data()


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener()
    yield made
    made.close()


def test_a_way_is_measured_again_and_again(listener, monkeypatch):
    monkeypatch.setattr(probe, "BURST_S", 0.01)
    port = listener.open()
    for _ in range(2):
        speed = measure_speed("127.0.0.1", port, TOKEN_SENT)
        assert speed.problem == ""
        assert 0 < speed.latency_ms < 1000
        assert speed.mb_per_s > 0


def test_a_stranger_is_turned_away_and_keeps_nobody(listener, monkeypatch):
    monkeypatch.setattr(probe, "BURST_S", 0.01)
    port = listener.open()
    assert measure_speed("127.0.0.1", port, bytes(TOKEN_BYTES)).problem
    assert measure_speed("127.0.0.1", port, TOKEN_SENT).problem == ""


def test_a_port_where_nobody_listens_is_a_problem_and_no_error():
    with held_port() as port:
        problem = measure_speed("127.0.0.1", port, TOKEN_SENT).problem
    assert problem == f"127.0.0.1:{port} cannot be reached from there: Connection refused ECONNREFUSED"


def test_an_address_of_another_machine_cannot_be_listened_at():
    with selectors.DefaultSelector() as selector:
        assert HostProbe(selector).answer("measure_listen", {"address": "192.0.2.1", "token": TOKEN}) == {
            "problem": "cannot listen at 192.0.2.1: Cannot assign requested address"
        }


def test_the_listener_counts_what_follows_the_first_piece():
    ours, theirs = tcp_pair()
    with ours, theirs:
        thread = threading.Thread(target=serve_measurement, args=(theirs, TOKEN_SENT))
        thread.start()
        ours.sendall(TOKEN_SENT)
        for _ in range(probe.WARM_UP_TRIPS + probe.ROUND_TRIPS):
            ours.sendall(b"x")
            assert ours.recv(1) == b"x"
        ours.sendall(bytes(3_000_000))
        ours.shutdown(socket.SHUT_WR)
        nbytes, duration_ns = REPORT.unpack(ours.recv(REPORT.size, socket.MSG_WAITALL))
        thread.join()
    assert 3_000_000 - probe.BURST_BYTES <= nbytes < 3_000_000
    assert duration_ns > 0


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]
