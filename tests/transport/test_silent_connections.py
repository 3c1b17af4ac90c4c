"""What a listener says of those whom it refused."""

from __future__ import annotations

import contextlib
import fcntl
import resource
import socket
import subprocess
import sys

import pytest
import zmq

from kvdist.config.settings import Limits
from kvdist.transport.connections import TOLD_MAX, Bounds, SilentConnections
from kvdist.transport.sockets import BoundSocket
from kvdist.transport.tcp_info import NOWHERE, shut_down
from kvdist.transport.zeromq import ZeroMQTransport

HERE = "tcp://127.0.0.1:9"
LOCKS = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'ab'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


@pytest.fixture
def said(caplog):
    return lambda: [message.removeprefix(f"{HERE} refused a connection") for message in caplog.messages]


def come(callers, descriptor, why, is_certain=True):
    callers.accepted(descriptor)
    callers.refused(why, is_certain)
    callers.closed(descriptor, HERE)


@pytest.fixture
def descriptor():
    """Of a connection from this machine."""
    with socket.create_server(("127.0.0.1", 0)) as listening, socket.create_connection(listening.getsockname()):
        accepted, _ = listening.accept()
        with accepted:
            yield accepted.fileno()


def test_an_address_is_told_once_and_again_when_the_reason_is_certain(descriptor, said):
    callers = SilentConnections()
    for is_certain in (False, False, True, False, True):
        come(callers, descriptor, "for sure" if is_certain else "perhaps", is_certain)
    assert said() == [" from 127.0.0.1: perhaps", " from 127.0.0.1: for sure"]


def test_whoever_is_gone_or_no_socket_has_no_address(tmp_path, said):
    callers = SilentConnections()
    with open(tmp_path / "file", "wb") as file:
        come(callers, file.fileno(), "a file by now")
    come(callers, 99_999, "closed by now")
    assert said() == [": a file by now"]


def test_of_one_without_an_address_it_is_said_only_where_nothing_as_certain_has_been(descriptor, said):
    callers = SilentConnections()
    come(callers, 99_999, "for sure")
    come(callers, descriptor, "perhaps", is_certain=False)
    come(callers, 99_999, "for sure")
    come(callers, descriptor, "for sure")
    come(callers, 99_999, "perhaps", is_certain=False)
    assert said() == [": for sure", " from 127.0.0.1: perhaps", " from 127.0.0.1: for sure"]


def test_a_lock_on_a_file_that_has_the_number_by_now_is_kept(tmp_path):
    path = tmp_path / "file"
    with open(path, "wb") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        SilentConnections().accepted(file.fileno())
        done = subprocess.run([sys.executable, "-c", LOCKS, str(path)], capture_output=True, text=True, check=False)
        assert "BlockingIOError" in done.stderr, done


def test_a_connection_that_ends_by_itself_is_nobodys_business(descriptor, said):
    callers = SilentConnections()
    callers.accepted(descriptor)
    callers.closed(descriptor, HERE)
    come(callers, descriptor, "")
    callers.accepted(descriptor)
    callers.known(descriptor)
    callers.closed(descriptor, HERE)
    assert said() == []


def test_of_several_that_are_refused_together_each_is_told_and_no_peer_that_goes_between(monkeypatch, said):
    monkeypatch.setattr("kvdist.transport.connections.remote_address", lambda descriptor: (f"192.0.2.{descriptor}", 9))
    callers = SilentConnections()
    for number in (1, 2, 3):
        callers.accepted(number)
    callers.known(1)
    callers.refused("perhaps", is_certain=False)
    callers.refused("for sure", is_certain=True)
    for number in (1, 2, 3):
        callers.closed(number, HERE)
    assert said() == [" from 192.0.2.2: perhaps", " from 192.0.2.3: for sure"]


def test_only_so_many_addresses_are_told(monkeypatch, said):
    addresses = iter((f"192.0.2.{number}", 9) for number in range(TOLD_MAX + 5))
    monkeypatch.setattr("kvdist.transport.connections.remote_address", lambda _: next(addresses))
    callers = SilentConnections()
    for number in range(TOLD_MAX + 5):
        come(callers, number, "another secret")
    assert len(said()) == TOLD_MAX


@pytest.fixture
def pairs():
    """Makes connections of this machine: (their end, the accepted one)."""
    with contextlib.ExitStack() as stack:
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def make():
            theirs = stack.enter_context(socket.create_connection(listening.getsockname(), 10))
            return theirs, stack.enter_context(listening.accept()[0])

        yield make


def is_open(theirs):
    theirs.setblocking(False)
    try:
        return theirs.recv(1) != b""
    except BlockingIOError:
        return True


def test_what_brings_too_much_without_a_complete_message_is_shut_down_the_largest_first(pairs):
    callers = SilentConnections(Bounds(connections=9, bytes_each=1000, bytes_all=1500))
    ends = []
    for nbytes in (400, 1001, 700, 600, 0):
        theirs, accepted = pairs()
        callers.accepted(accepted.fileno())
        theirs.sendall(bytes(nbytes))
        assert len(accepted.recv(2000, socket.MSG_PEEK)) == nbytes if nbytes else True
        ends.append(theirs)
    assert callers.are_watched
    callers.look()
    callers.judge()
    assert [is_open(theirs) for theirs in ends] == [True, False, False, True, True]
    assert callers.shut_down == 2


def test_of_more_connections_than_there_may_be_the_oldest_is_shut_down_and_one_that_has_spoken_is_not_counted(pairs):
    callers = SilentConnections(Bounds(connections=2, bytes_each=1000, bytes_all=1500))
    ends = [pairs() for _ in range(4)]
    for number, (_, accepted) in enumerate(ends):
        callers.accepted(accepted.fileno())
        if number == 0:
            assert callers.known(accepted.fileno())[0] == "127.0.0.1"
    assert [is_open(theirs) for theirs, _ in ends] == [True, False, True, True]


def test_only_the_connection_that_is_meant_is_shut_down(pairs):
    (theirs, accepted), (other, _) = pairs(), pairs()
    assert not shut_down(accepted.fileno(), NOWHERE)
    assert not shut_down(accepted.fileno(), other.getsockname()) and is_open(theirs)
    assert shut_down(accepted.fileno(), theirs.getsockname()) and not is_open(theirs)


def test_connections_are_looked_at_soon_until_they_have_said_something(pairs):
    callers = SilentConnections(Bounds(connections=9, bytes_each=1 << 20, bytes_all=1 << 20))
    _, accepted = pairs()
    watched = [callers.are_watched]
    callers.accepted(accepted.fileno())
    callers.look()
    watched.append(callers.are_watched)
    callers.known(accepted.fileno())
    watched.append(callers.are_watched)
    assert watched == [False, True, False]


def test_who_says_something_after_the_look_is_not_judged_by_it(pairs):
    callers = SilentConnections(Bounds(connections=9, bytes_each=10, bytes_all=1000))
    ends = [pairs() for _ in range(3)]
    for theirs, accepted in ends:
        callers.accepted(accepted.fileno())
        theirs.sendall(bytes(11))
        assert len(accepted.recv(11, socket.MSG_PEEK)) == 11
    callers.look()
    callers.known(ends[0][1].fileno())
    callers.accepted(ends[1][1].fileno())  # another connection by now
    callers.judge()
    assert [is_open(theirs) for theirs, _ in ends] == [True, True, False]


@pytest.fixture
def flooded(monkeypatch):
    """A bound link at which messages always wait, and what is called of its `Callers`."""
    called = []
    monkeypatch.setattr("kvdist.transport.sockets.BATCH_MESSAGES", 2)
    monkeypatch.setattr(SilentConnections, "look", lambda _: called.append("look"))
    monkeypatch.setattr(SilentConnections, "judge", lambda _: called.append("judge"))
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        link = BoundSocket(context.socket(zmq.ROUTER), "inproc://here", None, Bounds(9, 1000, 1500))
        link.socket.bind(link.endpoint)
        dealer.connect(link.endpoint)
        for _ in range(13):
            dealer.send(b"complete")
        yield link, called
        link.close()


def test_messages_that_never_end_delay_the_bounds_until_each_connection_has_had_its_turns(flooded):
    link, called = flooded
    for descriptor in (97, 98, 99):
        link.connections.accepted(descriptor)
    counts = []
    for _ in range(6):
        link.collect([])
        link.look()
        counts.append(len(called))
    assert not link.is_drained
    # `inproc` has no descriptor, so that no other connection is met: three have six turns in three batches.
    assert counts == [0, 0, 2, 2, 2, 4] and called == ["judge", "look"] * 2


def test_where_no_message_is_left_what_is_seen_is_judged_at_once(flooded):
    link, called = flooded
    while not link.is_drained or not called:
        link.collect([])
        if link.is_drained:
            link.look()
    assert called == ["look", "judge"]


def test_a_window_full_is_not_too_much_for_a_member_whose_first_message_is_not_read_yet():
    limits = Limits(window_bytes=1 << 30)
    transport = ZeroMQTransport(limits, peers_max=20)
    bounds = transport._bounds
    transport.close()
    assert bounds.bytes_each > limits.window_bytes
    assert bounds.bytes_all >= 20 * limits.window_bytes


@pytest.mark.parametrize(("peers", "most"), [(10, 64), (90, 90), (100, 92), (300, 64)])
def test_connections_that_have_not_spoken_leave_room_for_those_that_have(monkeypatch, peers, most):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    transport = ZeroMQTransport(Limits(), peers_max=peers)
    transport.close()
    assert transport._bounds.connections == most
