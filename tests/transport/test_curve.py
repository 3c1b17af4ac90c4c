"""Keys out of one secret, and who is let in: by derivation alone, and over real connections on loopback."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import zmq
from zmq.utils import z85

from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, NodeId, Role, server, worker
from kvdist.transport.base import Arrived, Connected, DialRefused, Disconnected, Event, Transport
from kvdist.transport.curve import ZAP_DOMAIN, ZAP_ENDPOINT, ZapAuthenticator, hkdf_sha256
from kvdist.transport.handshake import SUSPICIOUS_FAILURES, Suspicion, mechanism_at
from kvdist.transport.zeromq import ZeroMQTransport
from tests.cases import each
from tests.ports import free_port
from tests.transport.encrypted import EVERYBODY, SECRET, credentials
from tests.transport.patience import PATIENCE_S, PATIENT

ATTEMPTS = 3

# Derivation.

RFC_5869 = [
    (
        b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42,
        "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865",
    ),
    (
        bytes(range(0x50)), bytes(range(0x60, 0xB0)), bytes(range(0xB0, 0x100)), 82,
        ("b11e398dc80327a1c8e7f78c596a49344f012eda2d4efad8a050cc4c19afa97c59045a99cac7827271cb41c65e590e09"
         "da3275600c2f09b8367793a9aca3db71cc30c58179ec3e87c14c01d5c1f3434f1d87"),
    ),
    (
        b"\x0b" * 22, b"", b"", 42,
        "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8",
    ),
]  # fmt: skip


@each("secret, salt, info, nbytes, expected", RFC_5869)
def test_keys_are_derived_as_the_standard_says(secret, salt, info, nbytes, expected):
    assert hkdf_sha256(secret, salt, info, nbytes).hex() == expected


def test_every_name_has_a_key_of_its_own_and_every_process_derives_the_same():
    keys = {credentials(me).secret_key(node) for me in EVERYBODY for node in EVERYBODY}
    assert len(keys) == len(EVERYBODY)
    assert all(len(z85.decode(key)) == 32 for key in keys)


def test_the_role_and_the_rank_are_in_a_key():
    nodes = [SCHEDULER, *(NodeId(role, rank) for role in (Role.SERVER, Role.WORKER) for rank in (0, 1, 10, 11))]
    assert len({credentials().public_key(node) for node in nodes}) == len(nodes)


def test_another_secret_gives_other_keys():
    assert credentials().secret_key(worker(0)) != credentials(secret=SECRET + b"\0").secret_key(worker(0))


def test_what_is_printed_shows_neither_the_secret_nor_a_key():
    own = credentials(worker(1))
    for shown in (repr(own), str(own), f"{own}"):
        assert repr(SECRET) not in shown and SECRET.hex() not in shown and str(own.secret_key(worker(1))) not in shown
        assert "rank=1" in shown


# The doorkeeper, asked as libzmq asks.


@pytest.fixture
def door() -> Iterator[Callable[[list[bytes]], list[bytes]]]:
    with zmq.Context() as context:
        keeper = ZapAuthenticator(context, credentials())
        asking = context.socket(zmq.REQ)
        asking.connect(ZAP_ENDPOINT)

        def ask(request: list[bytes]) -> list[bytes]:
            asking.send_multipart(request)
            assert keeper.socket.poll(1000 * PATIENCE_S)
            keeper.answer()
            assert asking.poll(1000 * PATIENCE_S)
            return asking.recv_multipart()

        yield ask
        asking.close(0)
        keeper.close()


def key_of(node: NodeId, secret: bytes = SECRET) -> bytes:
    return z85.decode(credentials(secret=secret).public_key(node))


def request(key: bytes) -> list[bytes]:
    return [b"1.0", b"17", ZAP_DOMAIN, b"192.0.2.1", b"", b"CURVE", key]


@each("node", sorted(EVERYBODY, key=str))
def test_a_key_of_the_cluster_is_let_in_by_its_name(door, node):
    assert door(request(key_of(node))) == [b"1.0", b"17", b"200", b"OK", str(node).encode(), b""]


@each(
    "asked",
    [
        request(key_of(worker(0), b"another" * 9)),
        request(key_of(worker(2))),
        request(b""),
        request(bytes(32)),
        [b"1.0", b"17", b"other", b"", b"", b"CURVE", key_of(worker(0))],
        [b"1.0", b"17", ZAP_DOMAIN, b"", b"", b"PLAIN", b"worker-0", b"word"],
        [b"1.0", b"17", ZAP_DOMAIN, b"", b"", b"NULL"],
        [b"2.0", b"17", ZAP_DOMAIN, b"", b"", b"CURVE", key_of(worker(0))],
        [b"1.0", b"17"],
    ],
)
def test_nobody_else_is_and_the_doorkeeper_stays_at_his_place(door, asked):
    assert door(asked)[1:3] == [b"17", b"400"]
    assert door([b""])[2] == b"400"
    assert door(request(key_of(worker(0))))[2] == b"200"


@each("caller", [worker(0), worker(7)])
def test_nobody_is_let_in_when_the_doorkeeper_is_gone(caller):
    ends = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_SUCCEEDED
    with zmq.Context() as context, context.socket(zmq.ROUTER) as guarded, context.socket(zmq.DEALER) as dialling:
        keeper = ZapAuthenticator(context, credentials())
        credentials().guard(guarded)
        port = guarded.bind_to_random_port("tcp://127.0.0.1")
        keeper.close()
        dialling.set(zmq.LINGER, 0)
        dialling.set(zmq.HANDSHAKE_IVL, 500)  # he may be asked while he is going, and answer no more
        credentials(caller).introduce(dialling, SCHEDULER)
        with dialling.get_monitor_socket(ends) as monitor:
            dialling.connect(f"tcp://127.0.0.1:{port}")
            dialling.send(b"hello")
            assert monitor.poll(1000 * PATIENCE_S)
            event = int.from_bytes(monitor.recv_multipart()[0][:2], sys.byteorder)
            dialling.disable_monitor()
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
        assert not guarded.poll(0)


# Over connections.


@contextlib.contextmanager
def opened(*transports: Transport) -> Iterator[None]:
    try:
        yield
    finally:
        for transport in transports:
            transport.close()


def until(transports: list[Transport], kind: type[Event]) -> tuple[Event, list[Event]]:
    """Run all in turn until one reports this; that, and everything before it."""
    seen: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        for transport in transports:
            for event in transport.recv(0.01):
                if isinstance(event, kind):
                    return event, seen
                seen.append(event)
    raise AssertionError(f"no {kind.__name__} within {PATIENCE_S} s, only {seen}")


def transport(me: NodeId | None, secret: bytes = SECRET, peers: frozenset[NodeId] = EVERYBODY) -> ZeroMQTransport:
    return ZeroMQTransport(PATIENT, None if me is None else credentials(me, secret, peers))


def test_a_message_tells_whose_key_its_connection_has_in_both_directions():
    listening, dialling = transport(server(1)), transport(worker(0))
    with opened(listening, dialling):
        route = dialling.connect(listening.bind("tcp://127.0.0.1:0"), server(1))
        dialling.send(route, [b"there"])
        there, _ = until([listening, dialling], Arrived)
        assert isinstance(there, Arrived) and there.sender == worker(0)
        listening.send(there.route, [b"back"])
        back, _ = until([dialling, listening], Arrived)
        assert isinstance(back, Arrived) and back.sender == server(1)


def test_an_unencrypted_message_tells_nothing():
    listening, dialling = transport(None), transport(None)
    with opened(listening, dialling):
        dialling.send(dialling.connect(listening.bind("tcp://127.0.0.1:0"), server(1)), [b"there"])
        there, _ = until([listening, dialling], Arrived)
        assert isinstance(there, Arrived) and there.sender is None


@pytest.mark.parametrize(
    ("listening", "dialling", "to", "says", "told"),
    [
        (transport, lambda _: transport(worker(0), b"x" * 32), SCHEDULER, "does not know the key of this worker-0",
         "its secret is not that of this job"),
        (transport, transport, server(0), "or is not server-0", "or it wanted another process"),
        (transport, lambda _: transport(worker(7)), SCHEDULER, "no worker-7 in its cluster", "are not of this cluster"),
        (transport, lambda _: transport(None), SCHEDULER, "and this process has no secret", ""),
        (lambda _: transport(None), transport, SCHEDULER, "does not encrypt, and this process does",
         "encrypt"),
    ],
    ids=["another secret", "another name", "an unknown name", "no secret", "encrypted at a plain port"],
)  # fmt: skip
def test_who_does_not_fit_is_told_why_and_does_not_dial_for_ever(listening, dialling, to, says, told, caplog):
    bound, caller = listening(SCHEDULER), dialling(worker(0))
    with opened(bound, caller):
        route = caller.connect(bound.bind("tcp://127.0.0.1:0"), to)
        caller.send(route, [b"hello"])
        refused, before = until([bound, caller], DialRefused)
        assert isinstance(refused, DialRefused) and refused.route == route and says in refused.reason
        assert not any(isinstance(event, Arrived | Connected) for event in before)
        caller.send(route, [b"again"])
        deadline = time.monotonic() + PATIENCE_S
        while not (bound.strangers_refused and (lines := refusals(caplog, told))) and time.monotonic() < deadline:
            assert bound.recv(0.3) == []
        assert bound.strangers_refused
        # Perhaps and for sure, without the address where that went unseen, and with it: each said once.
        assert 1 <= len(set(lines)) == len(lines) <= 4, caplog.messages


def refusals(caplog: pytest.LogCaptureFixture, told: str) -> list[str]:
    """What was said of connections that were refused, for this reason."""
    return [line for line in caplog.messages if told in line and "refused a connection" in line]


def test_a_process_that_lets_in_others_than_its_peer_does_is_let_in_itself():
    bound, caller = transport(SCHEDULER), transport(worker(0), peers=EVERYBODY | {worker(7)})
    with opened(bound, caller):
        caller.send(caller.connect(bound.bind("tcp://127.0.0.1:0"), SCHEDULER), [b"hello"])
        arrived, before = until([bound, caller], Arrived)
        assert isinstance(arrived, Arrived) and arrived.sender == worker(0)
        assert not any(isinstance(event, DialRefused) for event in before)
        assert bound.strangers_refused == 0


def test_what_an_encrypted_transport_dials_has_a_name():
    caller = transport(worker(0))
    with opened(caller), pytest.raises(ValueError, match="needs `to`"):
        caller.connect("tcp://127.0.0.1:9")


def greeting(major: int, mechanism: bytes) -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + bytes([major]) + b"\0" + mechanism.ljust(20, b"\0") + bytes(32)


@each(
    "bytes_said",
    [
        b"\x01\x00" + b"\x06\x00hello",  # ZMTP 1.0: no handshake at all
        b"\xff" + bytes(7) + b"\x01\x7f\x01\x05\x00\x00\x00\x05hello",  # ZMTP 2.0
        greeting(3, b"NULL") + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x00\x05hello",
        greeting(3, b"PLAIN"),
        greeting(3, b"CURVE") + b"\x04\x06\x05READY" + b"\x00\x05hello",
        greeting(3, b"CURVE") + bytes(range(256)),
        b"",
    ],
)
def test_no_older_protocol_and_no_weaker_mechanism_gets_a_message_in(bytes_said):
    bound = transport(SCHEDULER)
    with opened(bound):
        port = int(bound.bind("tcp://127.0.0.1:0").rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            with contextlib.suppress(OSError):  # it may have hung up at any byte
                stranger.sendall(bytes_said)
                stranger.shutdown(socket.SHUT_WR)
            deadline = time.monotonic() + PATIENCE_S
            while not bound.strangers_refused and time.monotonic() < deadline:
                assert bound.recv(0.05) == []
        assert bound.strangers_refused == 1


class Shy:
    """A listener that accepts and hangs up, as a proxy does whose own target is not up yet."""

    def __init__(self, word: bytes = b"") -> None:
        port = free_port()  # which nobody gets before its successor
        self.socket = socket.create_server(("127.0.0.1", port))
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.hung_up = 0
        self._word = word
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection:
                    connection.sendall(self._word)
                self.hung_up += 1

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self.socket.close()


@each("me", [worker(0), None])
def test_a_peer_that_is_not_up_yet_is_not_taken_for_one_that_refuses(me):
    caller = transport(me)
    bound = transport(None if me is None else SCHEDULER)
    with opened(caller, bound), contextlib.closing(Shy()) as shy:
        route = caller.connect(shy.endpoint, SCHEDULER)
        events: list[Event] = []
        while shy.hung_up < 3 * SUSPICIOUS_FAILURES:
            events += caller.recv(0.1)
        shy.close()
        bound.bind(shy.endpoint)
        caller.send(route, [b"hello"])
        _, more = until([bound, caller], Arrived)
        assert not any(isinstance(event, DialRefused) for event in [*events, *more])


def test_what_failed_before_a_peer_was_up_is_not_held_against_it():
    caller, bound = transport(worker(0)), transport(SCHEDULER)
    with opened(caller, bound), contextlib.closing(Shy()) as shy:
        route = caller.connect(shy.endpoint, SCHEDULER)
        deadline = time.monotonic() + PATIENCE_S
        while shy.hung_up <= SUSPICIOUS_FAILURES and time.monotonic() < deadline:
            bound.recv(0.01)  # the caller is busy with something else, and reads nothing of it
        shy.close()
        bound.bind(shy.endpoint)
        caller.send(route, [b"hello"])
        _, before = until([caller, bound], Arrived)
        assert not any(isinstance(event, DialRefused) for event in before)


def test_a_listener_that_is_busy_for_longer_than_a_handshake_makes_no_stranger_of_a_peer(monkeypatch, caplog):
    monkeypatch.setattr("kvdist.transport.zeromq.HANDSHAKE_MS", 500)
    caller, bound = transport(worker(0)), transport(SCHEDULER)
    with opened(caller, bound):
        caller.send(caller.connect(bound.bind("tcp://127.0.0.1:0"), SCHEDULER), [b"hello"])
        event, _ = until([caller], Disconnected)  # nobody answers the door
        assert isinstance(event, Disconnected) and "did not finish it in time: it may be busy" in event.reason
        until([bound, caller], Arrived)
        assert bound.strangers_refused == 0 and "refused a connection" not in caplog.text


def test_a_peer_that_ran_out_of_patience_with_a_busy_listener_is_not_called_one_with_another_secret(
    monkeypatch, caplog
):
    monkeypatch.setattr("kvdist.transport.zeromq.HANDSHAKE_MS_DIALLED", 700)
    for _ in range(ATTEMPTS):
        caller, bound = transport(worker(0)), transport(SCHEDULER)
        with opened(caller, bound):
            caller.send(caller.connect(bound.bind("tcp://127.0.0.1:0"), SCHEDULER), [b"hello"])
            until([caller], Disconnected)  # nobody answers the door
            until([bound, caller], Arrived)
            deadline = time.monotonic() + PATIENCE_S / ATTEMPTS
            while not refusals(caplog, "") and time.monotonic() < deadline:
                bound.recv(0.01)  # its second connection may be noticed before the end of the first one
        if refusals(caplog, ""):  # else the first one had ended before its handshake began, on a busy machine
            break
    said = "it is no process of kvdist, has ended, gave up waiting, or has another secret or none"
    assert refusals(caplog, "") == refusals(caplog, said) != []


def test_the_mechanism_of_a_listener_is_what_it_greets_with(monkeypatch):
    monkeypatch.setattr("kvdist.transport.handshake.PATIENCE_S", PATIENCE_S)
    secret, plain = transport(SCHEDULER), transport(None)
    with opened(secret, plain), contextlib.closing(Shy(b"HTTP/1.1 400 no\r\n\r\n" + bytes(64))) as other:
        assert mechanism_at(secret.bind("tcp://127.0.0.1:0")) == "CURVE"
        assert mechanism_at(plain.bind("tcp://127.0.0.1:0")) == "NULL"
        assert mechanism_at(other.endpoint) == ""
    assert mechanism_at(other.endpoint) == ""
    assert mechanism_at("ipc:///nowhere") == ""
    assert mechanism_at("tcp://x..y:9") == ""


def test_of_a_name_only_the_address_that_libzmq_dials_is_asked(monkeypatch):
    kind = (socket.SOCK_STREAM, 6, "")
    port = free_port()
    with socket.create_server(("::1", port), family=socket.AF_INET6) as six, contextlib.ExitStack() as stack:
        four = stack.enter_context(socket.create_server(("127.0.0.1", port)))
        four.setblocking(False)
        found = [(socket.AF_INET, *kind, ("127.0.0.1", port)), (socket.AF_INET6, *kind, ("::1", port, 0, 0))]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        monkeypatch.setattr("kvdist.transport.handshake.PATIENCE_S", 0.1)
        assert mechanism_at(f"tcp://localhost:{port}") == ""  # neither of them greets
        six.accept()[0].close()
        with pytest.raises(BlockingIOError):
            four.accept()


def test_suspicion_takes_several_failures_soon_after_each_other(monkeypatch):
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    suspicion = Suspicion()
    assert [suspicion.grows() for _ in range(2 * SUSPICIOUS_FAILURES)] == (
        [False] * (SUSPICIOUS_FAILURES - 1) + [True]
    ) * 2
    suspicion.grows()
    suspicion.clear()
    assert not suspicion.grows()
    for _ in range(10):
        now += 5.0  # a handshake that a busy process has let run out
        assert not suspicion.grows()


def test_suspicion_is_certain_of_what_fails_after_a_greeting_alone():
    suspicion = Suspicion()
    suspicion.caught_up()
    assert not suspicion.is_certain
    suspicion.greeted()
    assert not suspicion.is_certain
    suspicion.caught_up()
    assert suspicion.is_certain
    suspicion.clear()
    suspicion.caught_up()
    assert not suspicion.is_certain


# An inherited descriptor.


@each("me", [SCHEDULER, None])
@each("host, family", [("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)])
def test_a_listening_descriptor_is_served_and_belongs_to_the_transport(me, host, family):
    listening = socket.create_server((host, 0), family=family)
    port = listening.getsockname()[1]
    bound, caller = transport(me), transport(None if me is None else worker(0))
    with opened(bound, caller):
        endpoint = bound.bind_listening(listening.detach())
        assert endpoint == (f"tcp://[::1]:{port}" if ":" in host else f"tcp://127.0.0.1:{port}")
        caller.send(caller.connect(endpoint, SCHEDULER), [b"hello"])
        until([bound, caller], Arrived)
    with socket.create_server((host, port), family=family):
        pass  # nobody else holds it any more


def test_a_descriptor_that_is_no_listening_socket_is_refused_by_its_kind():
    bound = transport(None)
    with (
        opened(bound),
        tempfile.TemporaryFile() as file,
        socket.socket() as idle,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
        socket.socket(socket.AF_UNIX) as local,
    ):
        for one, says in (
            (file, "not a socket"),
            (idle, "does not listen"),
            (datagrams, "not listen"),
            (local, "not listen"),
        ):
            with pytest.raises(ConfigError, match=f"KVDIST_LISTEN_FD is {one.fileno()}.*{says}"):
                bound.bind_listening(one.fileno())
        for number in (99_999, 99_999_999_999):
            with pytest.raises(ConfigError, match=f"KVDIST_LISTEN_FD is {number}, but no such descriptor is open here"):
                bound.bind_listening(number)
