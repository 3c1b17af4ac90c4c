"""Real processes over connections that lose, repeat, delay and break: every value is exact, and nobody hangs.

The faults strike single messages of the wire, by a relay between the processes (`tests.proxy`).
"""

from __future__ import annotations

import socket
import threading

import pytest

from tests.integration.processes import PROGRAMS, TIMEOUT_S
from tests.proxy import (
    COMMAND,
    GREETING_BYTES,
    MORE,
    Cut,
    Drop,
    Proxy,
    Twice,
    cut_at_every_frame,
    first_of_each_kind,
    packed,
    weather,
)

KINDS = {
    "Hello", "Welcome", "Roster", "Declare", "Assign", "Placed", "Configure", "SetOptimizer", "Done", "Barrier",
    "InitValues", "InitRows", "Push", "PushRows", "Pull", "PullRows", "Values", "RowValues", "Counted", "Command",
    "Perform", "MarkPushes", "Claim", "Claimed", "Prepare", "Save", "Saved", "Load", "Restore", "TakeRestored",
    "ReplaceValues", "Ack", "Alive", "Goodbye", "Stop",
}  # fmt: skip
"""What the program makes processes say."""
OFTEN = frozenset({"Ack", "Alive"})
PATIENT = {
    "KVDIST_SECURITY": "none",
    "KVDIST_TRANSPORT": "tcp",
    "KVDIST_PATIENCE_S": "60",
    "KVDIST_FAREWELL_S": "60",
    "PYTHONPATH": str(PROGRAMS),
    "KVDIST_SERVER_MODULE": "patient",
    "KVDIST_BIGARRAY_BOUND": "20000",
}


def run_through(job, proxy, tmp_path, workers=2, servers=2, rounds=4, timeout_s=TIMEOUT_S):
    """A whole job whose connections the proxy carries."""
    settings = {**PATIENT, "KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    command = ("exact.py", str(tmp_path / "checkpoints"), str(rounds))
    job.node("scheduler", workers, servers, **settings)
    port = {"DMLC_PS_ROOT_PORT": str(proxy.front(job.port))}
    for name in [*(f"server-{rank}" for rank in range(servers)), *(f"worker-{rank}" for rank in range(workers))]:
        job.node(name, workers, servers, *command, **settings, **port)
    job.succeed(timeout_s)
    for rank in range(workers):
        assert job.processes[f"worker-{rank}"].lines_with("exact"), job.transcript()


@pytest.mark.parametrize(
    "fate",
    [
        pytest.param(Drop(), marks=pytest.mark.slow, id="lost alone"),  # TCP does not: it is said again after seconds
        pytest.param(Cut(0, 0), id="lost with the connection"),
        pytest.param("delivered", id="delivered, and the answer lost"),
        pytest.param(Twice(), id="comes twice"),
    ],
)
def test_the_first_message_of_every_kind_is_lost_or_comes_twice(job, tmp_path, fate):
    def of(passing):
        return Cut(len(passing.frames) - 1) if fate == "delivered" else fate

    # What is said every second, and again when a connection is new, would break each connection at once.
    with Proxy(first_of_each_kind(of, OFTEN)) as proxy:
        run_through(job, proxy, tmp_path)
    hit = {name.partition(" ")[2] for name in proxy.fired} - {""}
    assert hit >= KINDS - OFTEN, KINDS - OFTEN - hit
    if fate != "delivered":  # the answer may come on the next connection, before anything is said again
        assert set(proxy.passed) >= KINDS - OFTEN, KINDS - OFTEN - set(proxy.passed)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_connections_break_after_any_frame_and_at_any_byte(job, tmp_path, seed):
    with Proxy(cut_at_every_frame(seed, 12)) as proxy:
        run_through(job, proxy, tmp_path, rounds=8)
    assert proxy.fired["Cut"] >= 20, proxy.fired
    assert max(proxy.lives.values()) > 6


@pytest.mark.parametrize(
    "loss, twice, late, late_s",  # one in so many messages
    [
        (90, 10, 11, 0.02),
        pytest.param(10, 0, 0, 0.0, marks=pytest.mark.slow),
        pytest.param(0, 2, 21, 2.0, marks=pytest.mark.slow),
    ],
)
def test_messages_are_lost_doubled_and_late(job, tmp_path, loss, twice, late, late_s):
    with Proxy(weather(loss, twice, late, late_s)) as proxy:
        run_through(job, proxy, tmp_path, rounds=1 if loss == 10 else 6, timeout_s=300.0)
    wanted = {"Drop": loss, "Twice": twice, "Later": late}
    assert all(proxy.fired[name] >= 3 for name, one_in in wanted.items() if one_in), proxy.fired


@pytest.mark.parametrize("ways", [(True,), pytest.param((False,), marks=pytest.mark.slow)], ids=["up", "down"])
def test_a_network_that_is_away_in_one_direction_for_a_while(job, tmp_path, ways):
    struck = threading.Event()

    def fault(passing):
        if passing.kind == "Push" and passing.number > 20 and not struck.is_set():
            struck.set()
            for up in ways:
                proxy.hold(up)
            threading.Timer(2.0, lambda: [proxy.let_go(up) for up in ways]).start()

    with Proxy(fault) as proxy:
        run_through(job, proxy, tmp_path, rounds=8)
    assert proxy.fired["held"] == len(ways)


def test_what_libzmq_says_between_two_frames_of_a_message_is_not_of_the_message():
    ping = b"\4PING\0\0"
    said = packed(MORE, b"first") + packed(COMMAND, ping) + packed(0, b"second")
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(lambda one: heard.append(one.frames)) as proxy:
        heard = []
        front = proxy.front(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", front)) as dialler, listener.accept()[0] as acceptor:
            for one in (dialler, acceptor):
                one.settimeout(TIMEOUT_S)
            greeting = bytes(GREETING_BYTES)
            dialler.sendall(greeting + said)
            expected = greeting + packed(COMMAND, ping) + packed(MORE, b"first") + packed(0, b"second")
            got = b""
            while len(got) < len(expected):
                got += acceptor.recv(len(expected) - len(got))
        assert got == expected
        assert heard == [(b"first", b"second")]
