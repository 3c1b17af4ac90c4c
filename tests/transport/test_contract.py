"""One battery for every transport: what `kvdist.transport.base` promises, over tcp, ipc, in the process, with shared
memory, and encrypted."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import zmq

from kvdist.errors import ConfigError, StoreClosed
from kvdist.transport.base import Arrived, Connected, Disconnected, Event, Route, Transport
from kvdist.transport.endpoints import split_host
from kvdist.transport.inproc import InprocNetwork
from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.shared_memory.transport import SharedMemoryTransport
from kvdist.transport.zeromq import ZeroMQTransport
from tests.ports import free_port
from tests.transport.encrypted import Encrypted
from tests.transport.patience import PATIENCE_S, PATIENT

LARGE = (5 << 20) + 1
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Place:
    """Where transports of one kind meet, and what they have reported so far."""

    kind: str
    folder: Path
    make: Callable[[], Transport]
    made: list[Transport] = field(default_factory=list)

    def transport(self) -> Transport:
        self.made.append(self.make())
        return self.made[-1]

    def endpoint(self, name: str = "server") -> str:
        if self.is_tcp:
            return "tcp://127.0.0.1:0"
        return f"ipc://{self.folder}/{name}" if self.kind == "ipc" else f"inproc://{name}"

    @property
    def is_tcp(self) -> bool:
        """Whether the system chooses the end point."""
        return self.kind not in ("ipc", "inproc")

    @property
    def is_encrypted(self) -> bool:
        return self.kind.startswith("curve")


def place_of(kind: str, folder: Path) -> Place:
    makers: dict[str, Callable[[], Transport]] = {
        "inproc": InprocNetwork().transport,
        "shm": lambda: SharedMemoryTransport(ZeroMQTransport(PATIENT), Arena(16 << 20, 1 << 20)),
        "curve": Encrypted,
        "curve-threads": lambda: Encrypted(io_threads=2),
        "curve-shm": lambda: SharedMemoryTransport(Encrypted(), Arena(16 << 20, 1 << 20)),
    }
    return Place(kind, folder, makers.get(kind, lambda: ZeroMQTransport(PATIENT)))


@pytest.fixture(params=["tcp", "ipc", "inproc", "shm", "curve", "curve-threads", "curve-shm"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    yield from closing(place_of(request.param, tmp_path))


@pytest.fixture(params=["tcp", "ipc", "shm", "curve"])
def network_place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    """The transports that leave the process."""
    yield from closing(place_of(request.param, tmp_path))


@pytest.fixture
def tcp(tmp_path: Path) -> Iterator[Place]:
    yield from closing(place_of("tcp", tmp_path))


def closing(place: Place) -> Iterator[Place]:
    yield place
    for transport in place.made:
        transport.close()


def receive(transport: Transport, enough: Callable[[list[Event]], bool]) -> list[Event]:
    """Events until there are enough; fails when they do not come."""
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while not enough(events):
        remaining = deadline - time.monotonic()
        assert remaining > 0, f"waited {PATIENCE_S} s and got only {events[-5:]}"
        events += transport.recv(remaining)
    return events


def arrivals(transport: Transport, count: int) -> list[Arrived]:
    events = receive(transport, lambda events: sum(isinstance(event, Arrived) for event in events) >= count)
    return [event for event in events if isinstance(event, Arrived)]


def first(transport: Transport, kind: type[Event]) -> Event:
    events = receive(transport, lambda events: any(isinstance(event, kind) for event in events))
    return next(event for event in events if isinstance(event, kind))


def pair(place: Place) -> tuple[Transport, Transport, Route, Route]:
    """A bound and a dialling transport that know each other, and the route of each to the other."""
    server, worker = place.transport(), place.transport()
    to_server = worker.connect(server.bind(place.endpoint()))
    worker.send(to_server, [b"hello"])
    (hello,) = arrivals(server, 1)
    assert first(worker, Connected) == Connected(to_server)
    return server, worker, to_server, hello.route


def contents(message: Arrived) -> list[bytes]:
    return [bytes(frame) for frame in message.frames]


def test_messages_of_a_route_arrive_in_order_and_whole(place: Place) -> None:
    server, worker, to_server, route = pair(place)
    sent = [[b"%d" % number, *[b"part"] * (number % 4)] for number in range(500)]
    for frames in sent:
        worker.send(to_server, frames)
    received = arrivals(server, 500)
    assert [contents(message) for message in received] == sent
    assert {message.route for message in received} == {route}


def test_empty_and_tiny_frames_and_those_at_the_copy_threshold_arrive_as_sent(place: Place) -> None:
    server, worker, to_server, _ = pair(place)
    sent = [[b""], [b"", b""], [b"x"], [b"", b"x", b""], [b"a", bytes(65535), bytes(65536)]]
    for frames in sent:
        worker.send(to_server, frames)
    assert [contents(message) for message in arrivals(server, len(sent))] == sent


def test_large_frames_arrive_intact_and_read_only_both_ways(place: Place) -> None:
    server, worker, to_server, to_worker = pair(place)
    payload = os.urandom(LARGE)
    worker.send(to_server, [b"small", bytearray(payload), memoryview(payload)])
    (message,) = arrivals(server, 1)
    assert contents(message) == [b"small", payload, payload]
    assert all(frame.readonly and frame.format == "B" for frame in message.frames)
    server.send(to_worker, message.frames)
    (echo,) = arrivals(worker, 1)
    assert contents(echo) == [b"small", payload, payload]


def test_a_typed_view_is_sent_as_its_bytes(place: Place) -> None:
    server, worker, to_server, _ = pair(place)
    worker.send(to_server, [memoryview(bytes(range(16))).cast("I"), memoryview(bytes(1 << 17)).cast("d")])
    (message,) = arrivals(server, 1)
    assert [(len(frame), frame.format) for frame in message.frames] == [(16, "B"), (1 << 17, "B")]


def test_a_small_buffer_may_be_reused_as_soon_as_send_returns(place: Place) -> None:
    server, worker, to_server, _ = pair(place)
    buffer = bytearray(b"first")
    worker.send(to_server, [buffer])
    buffer[:] = b"other"
    (message,) = arrivals(server, 1)
    assert contents(message) == [b"first"]


def test_a_refused_message_leaves_nothing_behind_that_the_next_one_would_complete(place: Place) -> None:
    server, worker, to_server, _ = pair(place)
    with pytest.raises(ValueError, match="contiguous"):
        worker.send(to_server, [b"half", memoryview(bytes(10))[::2]])
    with pytest.raises(ValueError, match="at least one frame"):
        worker.send(to_server, [])
    worker.send(to_server, [b"whole"])
    (message,) = arrivals(server, 1)
    assert contents(message) == [b"whole"]


def test_a_frame_over_the_limit_is_refused_before_the_peer_would_hang_up(tmp_path: Path) -> None:
    transport = ZeroMQTransport(replace(PATIENT, frame_bytes_max=100_000))
    with contextlib.closing(transport):
        route = transport.connect("tcp://127.0.0.1:9")
        with pytest.raises(ValueError, match=r"100001 bytes is over the limit of 100000"):
            transport.send(route, [bytes(100_001)])


def test_many_peers_are_told_apart_and_each_gets_its_own_answer(place: Place) -> None:
    server = place.transport()
    endpoint = server.bind(place.endpoint())
    workers = [place.transport() for _ in range(20)]
    routes = [worker.connect(endpoint) for worker in workers]
    for number, (worker, route) in enumerate(zip(workers, routes, strict=True)):
        worker.send(route, [b"%d" % number])
    received = arrivals(server, 20)
    assert len({message.route for message in received}) == 20
    for message in received:
        server.send(message.route, [b"to", *message.frames])
    for number, worker in enumerate(workers):
        assert contents(arrivals(worker, 1)[0]) == [b"to", b"%d" % number]


def test_one_transport_binds_and_dials_at_once(place: Place) -> None:
    left, right = place.transport(), place.transport()
    to_right = left.connect(right.bind(place.endpoint("right")))
    to_left = right.connect(left.bind(place.endpoint("left")))
    for number in range(100):
        left.send(to_right, [b"l%d" % number])
        right.send(to_left, [b"r%d" % number])
    assert [contents(message) for message in arrivals(left, 100)] == [[b"r%d" % number] for number in range(100)]
    assert [contents(message) for message in arrivals(right, 100)] == [[b"l%d" % number] for number in range(100)]


def test_what_is_sent_before_the_server_exists_waits_for_it(place: Place) -> None:
    server, worker = place.transport(), place.transport()
    endpoint = place.endpoint()
    if place.is_tcp:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    worker.send(worker.connect(endpoint), [b"early"])
    server.bind(endpoint)
    (message,) = arrivals(server, 1)
    assert contents(message) == [b"early"]


def test_a_peer_that_does_not_read_blocks_neither_the_sender_nor_the_others(place: Place) -> None:
    server, deaf, to_server, to_deaf = pair(place)
    listening = place.transport()
    endpoint = place.endpoint("second")
    listening.send(listening.connect(server.bind(endpoint)), [b"hello"])
    (hello,) = arrivals(server, 1)
    count = 5000
    chunk = bytes(8 << 10)
    for number in range(count):  # far more than sockets and receive queues take
        server.send(to_deaf, [b"%d" % number, chunk])  # where this blocks it does so for ever: nobody reads meanwhile
        server.send(hello.route, [b"%d" % number])
    assert [contents(message) for message in arrivals(listening, count)] == [
        [b"%d" % number] for number in range(count)
    ]
    late = arrivals(deaf, count)
    assert [bytes(message.frames[0]) for message in late] == [b"%d" % number for number in range(count)]
    deaf.send(to_server, [b"still here"])
    assert contents(arrivals(server, 1)[0]) == [b"still here"]


def test_the_bound_side_hears_that_a_peer_closed_after_its_last_message(place: Place) -> None:
    server, worker, to_server, route = pair(place)
    for number in range(200):
        worker.send(to_server, [b"%d" % number])
    worker.close(linger_s=5.0)
    events = receive(server, lambda events: any(isinstance(event, Disconnected) for event in events))
    last_words = [bytes(event.frames[0]) for event in events if isinstance(event, Arrived)]
    # On a machine that is busy the last of them may not have left when the transport was closed.
    assert last_words == [b"%d" % number for number in range(len(last_words))] != []
    assert [event.route for event in events] == [route] * (len(last_words) + 1)
    assert isinstance(events[-1], Disconnected) and events[-1].reason
    server.send(route, [b"to nobody"])
    assert server.recv(0.0) == []


def test_a_dialled_route_comes_back_and_the_bound_side_sees_a_new_one(place: Place) -> None:
    server, worker, to_server, _ = pair(place)
    endpoint = server.bind(place.endpoint("again"))
    to_server = worker.connect(endpoint)
    worker.send(to_server, [b"one"])
    old = arrivals(server, 1)[0].route
    assert first(worker, Connected) == Connected(to_server)
    server.close()
    lost = receive(worker, lambda events: any(event.route == to_server for event in events))
    assert isinstance(next(event for event in lost if event.route == to_server), Disconnected)
    successor = place.transport()
    successor.bind(endpoint)
    worker.send(to_server, [b"two"])
    (message,) = arrivals(successor, 1)
    assert first(worker, Connected) == Connected(to_server)
    assert contents(message) == [b"two"] and message.route != old


def test_wakes_from_another_thread_end_a_wait_at_once_and_many_count_as_one(place: Place) -> None:
    transport = place.transport()
    transport.bind(place.endpoint())

    def ring() -> None:
        for _ in range(100):
            transport.wake()

    thread = threading.Thread(target=ring)
    begin = time.monotonic()
    thread.start()
    assert transport.recv(PATIENCE_S) == []
    assert time.monotonic() - begin < PATIENCE_S / 2
    thread.join()
    transport.recv(0.0)  # what was rung after the first return
    begin = time.monotonic()
    assert transport.recv(0.05) == []
    assert time.monotonic() - begin >= 0.05
    transport.wake()
    assert transport.recv(PATIENCE_S) == []  # a wake before the wait counts too


def test_close_is_idempotent_and_afterwards_only_wake_is_allowed(place: Place) -> None:
    server, worker, to_server, _ = pair(place)
    worker.send(to_server, [bytes(LARGE)])
    arrivals(server, 1)
    for transport in (worker, server):
        transport.close()
        transport.close()
        transport.wake()
        with pytest.raises(StoreClosed, match="closed"):
            transport.recv(0.0)
    with pytest.raises(StoreClosed, match="closed"):
        worker.send(to_server, [b"late"])
    assert list(place.folder.iterdir()) == []  # threads and descriptors are counted for every test


def test_received_views_outlive_the_transport(place: Place) -> None:
    server, worker, to_server, _ = pair(place)
    payload = os.urandom(LARGE)
    worker.send(to_server, [payload, payload[:100_000], b"tiny"])
    views = arrivals(server, 1)[0].frames
    server.close()
    worker.close()
    gc.collect()
    assert [bytes(view) for view in views] == [payload, payload[:100_000], b"tiny"]


def test_binding_a_taken_endpoint_says_so_and_the_owner_goes_on(place: Place) -> None:
    server, worker, _, _ = pair(place)
    other = place.transport()
    taken = server.bind(place.endpoint("taken"))
    with pytest.raises(ConfigError, match=r"cannot bind .*(in use|taken).*choose another"):
        other.bind(taken)
    worker.send(worker.connect(taken), [b"ok"])
    assert contents(arrivals(server, 1)[0]) == [b"ok"]


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("udp://127.0.0.1:1", "write tcp://host:port"),
        ("127.0.0.1:1", "write tcp://host:port"),
        ("tcp://127.0.0.1", "a port from 0 to 65535"),
        ("tcp://127.0.0.1:70000", "a port from 0 to 65535"),
        ("tcp://::1:80", r"write tcp://\[::1\]:80"),
        ("tcp://192.0.2.1:0", "not an address of this machine"),
        ("ipc:///nowhere/at/all", "cannot bind ipc:///nowhere/at/all"),
        ("ipc:///" + "x" * 200, "cannot bind ipc:///x"),
    ],
)
def test_an_impossible_endpoint_is_refused_by_name(tcp: Place, endpoint: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        tcp.transport().bind(endpoint)


def test_a_file_at_an_ipc_path_is_not_overwritten_but_a_dead_socket_is(tmp_path: Path) -> None:
    place = place_of("ipc", tmp_path)
    (tmp_path / "server").write_text("precious")
    server = place.transport()
    with contextlib.closing(server):
        with pytest.raises(ConfigError, match="is not a socket"):
            server.bind(place.endpoint())
        assert (tmp_path / "server").read_text() == "precious"
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "dead"))
        server.bind(place.endpoint("dead"))
    assert not (tmp_path / "dead").exists()


PEER = """
import sys
from kvdist.transport.zeromq import ZeroMQTransport
from tests.transport.encrypted import Encrypted
from tests.transport.patience import PATIENT
transport = Encrypted() if sys.argv[3] == "encrypted" else ZeroMQTransport(PATIENT)
if sys.argv[1] == "bind":
    print(transport.bind(sys.argv[2]), flush=True)
else:
    transport.send(transport.connect(sys.argv[2]), [b"hello"])
while True:
    transport.recv(60.0)
"""


@contextlib.contextmanager
def peer_process(what: str, endpoint: str, encrypted: bool = False) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-c", PEER, what, endpoint, "encrypted" if encrypted else "plain"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, cwd=ROOT) as peer:
        try:
            yield peer
        finally:
            peer.kill()


def test_a_killed_dialler_is_reported_by_its_broken_connection(network_place: Place) -> None:
    server = network_place.transport()
    with peer_process("connect", server.bind(network_place.endpoint()), network_place.is_encrypted) as peer:
        route = arrivals(server, 1)[0].route
        peer.send_signal(signal.SIGKILL)
        assert first(server, Disconnected).route == route


def test_a_killed_server_is_reported_by_its_broken_connection(network_place: Place) -> None:
    worker = network_place.transport()
    with peer_process("bind", network_place.endpoint(), network_place.is_encrypted) as peer:
        assert peer.stdout is not None
        route = worker.connect(peer.stdout.readline().strip())
        assert first(worker, Connected) == Connected(route)
        peer.send_signal(signal.SIGKILL)
        assert first(worker, Disconnected).route == route


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
def test_a_stopped_peer_is_reported_by_its_silence(tmp_path: Path, scheme: str) -> None:
    server = ZeroMQTransport(replace(PATIENT, patience_s=3.0))
    endpoint = {"tcp": "tcp://127.0.0.1:0", "ipc": f"ipc://{tmp_path}/socket"}[scheme]
    with contextlib.closing(server), peer_process("connect", server.bind(endpoint)) as peer:
        route = arrivals(server, 1)[0].route
        peer.send_signal(signal.SIGSTOP)
        lost = first(server, Disconnected)
        assert lost.route == route
        assert lost.after_silence == (scheme == "tcp"), "over ipc:// libzmq judges, and closes without a reason"


def test_a_stopped_peer_that_need_not_speak_is_kept() -> None:
    server = ZeroMQTransport(replace(PATIENT, patience_s=1.0), judges_silence=False)
    with contextlib.closing(server), peer_process("connect", server.bind("tcp://127.0.0.1:0")) as peer:
        arrivals(server, 1)
        peer.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 2.5
        while time.monotonic() < deadline:
            assert server.recv(0.1) == []


@pytest.mark.parametrize(
    "noise",
    [b"", b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", bytes(range(7, 207)), b"\xff" + bytes(8) + b"\x7f" + bytes(60)],
)
def test_strangers_are_refused_counted_and_otherwise_unnoticed(tcp: Place, noise: bytes) -> None:
    server, worker, to_server, route = pair(tcp)
    assert isinstance(server, ZeroMQTransport)
    endpoint = server.bind("tcp://127.0.0.1:0")
    port = int(endpoint.rpartition(":")[2])
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(noise)
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while server.strangers_refused < 3 and time.monotonic() < deadline:
        events += server.recv(0.05)
    assert events == [] and server.strangers_refused == 3
    worker.send(to_server, [b"served"])
    message = arrivals(server, 1)[0]
    assert (message.route, contents(message)) == (route, [b"served"])


@pytest.mark.parametrize(
    "reply",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(64), b"\xff" + bytes(8) + b"\x7f" + bytes(60)],
    ids=["HTTP", "greeting"],
)
def test_whoever_dials_a_port_that_is_no_node_hears_of_it_and_the_route_works_when_a_node_comes(
    tcp: Place, reply: bytes
) -> None:
    worker = tcp.transport()
    port = free_port()  # which nobody gets between the two who listen there
    with socket.create_server(("127.0.0.1", port)) as web:
        endpoint = f"tcp://127.0.0.1:{port}"
        route = worker.connect(endpoint)
        connection, _ = web.accept()
        with connection:
            connection.sendall(reply)
            lost = first(worker, Disconnected)
    assert isinstance(lost, Disconnected)
    assert lost.route == route and "broke off the handshake" in lost.reason
    server = tcp.transport()
    server.bind(endpoint)
    events: list[Event] = []
    deadline = time.monotonic() + PATIENCE_S
    while not events and time.monotonic() < deadline:  # the first one may be lost with the broken connection
        worker.send(route, [b"one", b"message", b"whole"])
        events = server.recv(0.1)
    assert isinstance(events[0], Arrived) and contents(events[0]) == [b"one", b"message", b"whole"]
    assert first(worker, Connected) == Connected(route)


# Not encrypted: a guest with a key cannot leave before a busy server has let it in.
@pytest.mark.parametrize("kind", ["tcp", "ipc", "shm"])
def test_a_living_peer_is_never_reported_when_descriptors_are_used_again(kind: str, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        network_place = place_of(kind, tmp_path)
        stack.callback(lambda: [transport.close() for transport in network_place.made])
        check_that_descriptors_may_be_used_again(network_place)


def check_that_descriptors_may_be_used_again(network_place: Place) -> None:
    server, permanent, to_server, route = pair(network_place)
    endpoint = server.bind(network_place.endpoint("guests"))
    routes: set[Route] = set()
    lost: list[Route] = []
    for number in range(60):
        say_and_leave(endpoint, b"%d" % number)
        if number % 7 == 0:  # else the server is busy, and both the message and the end wait to be read
            take(server.recv(1.0), routes, lost)
    deadline = time.monotonic() + PATIENCE_S
    while (len(lost) < 60 or len(routes) < 60) and time.monotonic() < deadline:
        take(server.recv(0.1), routes, lost)
    assert len(routes) == 60 and sorted(map(repr, lost)) == sorted(map(repr, routes))
    assert route not in lost
    permanent.send(to_server, [b"still here"])
    assert arrivals(server, 1)[0].route == route


def say_and_leave(endpoint: str, word: bytes) -> None:
    """Dial, say one word, and hang up as soon as the system has it; a transport of ours would not wait for that."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = round(PATIENCE_S * 1000)
        socket.connect(split_host(endpoint)[0])
        socket.send(word)


def take(events: list[Event], routes: set[Route], lost: list[Route]) -> None:
    for event in events:
        if isinstance(event, Arrived):
            assert event.route not in lost, "a message after the end of its route"
            routes.add(event.route)
        elif isinstance(event, Disconnected):
            lost.append(event.route)


def test_a_guest_that_stays_is_not_taken_for_the_one_before_it(tcp: Place) -> None:
    """The first guest's message is read only when the second has its descriptor."""
    server = tcp.transport()
    endpoint = server.bind("tcp://127.0.0.1:0")
    say_and_leave(endpoint, b"leaving")
    staying = tcp.transport()
    to_server = staying.connect(endpoint)
    staying.send(to_server, [b"staying"])
    assert first(staying, Connected) == Connected(to_server)
    events = receive(server, lambda events: len(events) >= 3)
    routes = {bytes(event.frames[0]): event.route for event in events if isinstance(event, Arrived)}
    assert [event.route for event in events if isinstance(event, Disconnected)] == [routes[b"leaving"]]
    server.send(routes[b"staying"], [b"welcome"])
    assert contents(arrivals(staying, 1)[0]) == [b"welcome"]


FORKED = """
import os, sys
from kvdist.config.settings import Limits
from kvdist.transport.zeromq import ZeroMQTransport
transport = ZeroMQTransport(Limits())
transport.bind(sys.argv[1])
path = sys.argv[1].removeprefix("ipc://")
child = os.fork()
if child == 0:
    transport.close()
    sys.exit(0 if os.path.exists(path) else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
transport.close()
sys.exit(status or os.path.exists(path))
"""


def test_a_forked_child_that_closes_takes_nothing_from_its_parent(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", FORKED, f"ipc://{tmp_path}/server"], check=True, timeout=PATIENCE_S)
    assert list(tmp_path.iterdir()) == []
