"""Latency and bandwidth: between two ends of one machine, and what is shown of many."""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Iterator

import pytest

from kvdist_launch import probe
from kvdist_launch.doctor import LinkTable
from kvdist_launch.probe import REPORT, TOKEN_BYTES, LinkSpeed, SpeedListener, measure_speed, serve_measurement
from tests.ports import held_port

TOKEN = "ab" * TOKEN_BYTES


class Listener:
    """An ear and who waits for it, in a thread."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._ours, theirs = socket.socketpair()
        self._theirs = theirs
        self.selector.register(theirs, selectors.EVENT_READ, None)
        self.ear = SpeedListener(self.selector)
        self._thread = threading.Thread(target=self._serve)

    def open(self) -> int:
        port = self.ear.open("127.0.0.1", TOKEN)["port"]
        self._thread.start()
        return int(port)

    def close(self) -> None:
        self._ours.send(b"x")
        if self._thread.ident is not None:
            self._thread.join()
        self.ear.close()
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
        speed = measure_speed("127.0.0.1", port, TOKEN)
        assert speed.problem == ""
        assert 0 < speed.latency_ms < 1000
        assert speed.mb_per_s > 0


def test_a_stranger_is_turned_away_and_keeps_nobody(listener, monkeypatch):
    monkeypatch.setattr(probe, "BURST_S", 0.01)
    port = listener.open()
    assert measure_speed("127.0.0.1", port, "cd" * TOKEN_BYTES).problem
    assert measure_speed("127.0.0.1", port, TOKEN).problem == ""


def test_a_port_where_nobody_listens_is_a_problem_and_no_error():
    with held_port() as port:
        problem = measure_speed("127.0.0.1", port, TOKEN).problem
    assert problem == f"127.0.0.1:{port} cannot be reached from there: Connection refused ECONNREFUSED"


def test_an_address_of_another_machine_cannot_be_listened_at():
    with selectors.DefaultSelector() as selector:
        assert SpeedListener(selector).open("192.0.2.1", TOKEN) == {
            "problem": "cannot listen at 192.0.2.1: Cannot assign requested address"
        }


def test_the_listener_counts_what_follows_the_first_piece():
    ours, theirs = tcp_pair()
    with ours, theirs:
        thread = threading.Thread(target=serve_measurement, args=(theirs, bytes.fromhex(TOKEN)))
        thread.start()
        ours.sendall(bytes.fromhex(TOKEN))
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


def test_the_tables_have_a_cell_for_each_direction_and_a_sentence_for_each_that_failed():
    speeds = {
        (0, 1): LinkSpeed(0.213, 117.6),
        (1, 0): LinkSpeed(0.25, 99.4),
        (0, 2): LinkSpeed(12.0, 3.0),
        (2, 0): LinkSpeed(problem="no answer from 10.0.0.1:7 within 3 s: a firewall, or no route"),
        (1, 2): LinkSpeed(1.0, 1000.0),
        (2, 1): LinkSpeed(1.0, 1000.0),
    }
    matrix = LinkTable(("this machine", "d1", "[x]"), speeds)
    lines = [line.split() for line in matrix.tables().splitlines() if "─" not in line]
    assert lines == [
        ["ms,", "there", "and", "back", "this", "machine", "d1", "[x]"],
        ["this", "machine", "0.21", "12.00"],
        ["d1", "0.25", "1.00"],
        ["[x]", "no", "1.00"],
        [],
        ["MB/s", "this", "machine", "d1", "[x]"],
        ["this", "machine", "118", "3"],
        ["d1", "99", "1000"],
        ["[x]", "no", "1000"],
    ]
    assert matrix.problems == ["[x] → this machine: no answer from 10.0.0.1:7 within 3 s: a firewall, or no route"]
    assert (matrix.slowest, matrix.latency_ms) == (1000.0, 1.0), "the launcher's own lines carry no gradients"
    alone = LinkTable(("this machine", "d1"), {(0, 1): LinkSpeed(0.2, 50.0), (1, 0): LinkSpeed(0.3, 40.0)})
    assert (alone.slowest, alone.latency_ms) == (40.0, 0.3)


def test_one_machine_alone_has_no_matrix():
    assert LinkTable(("this machine",), {}).tables() == ""
    assert LinkTable(("this machine",), {}).slowest is None
