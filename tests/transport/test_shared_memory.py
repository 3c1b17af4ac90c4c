"""Frames that stay where they are: between real processes, and against peers that say what is not true."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvdist.transport.base import Arrived, Connected, Disconnected, MemoryShared, Route, Transport
from kvdist.transport.endpoints import split_host, with_host
from kvdist.transport.shared_memory import descriptors
from kvdist.transport.shared_memory.allocator import SharedAllocator, WindowCache
from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.shared_memory.mapping import address_of
from kvdist.transport.shared_memory.segments import HEADER_BYTES, MAGIC, NAME, Exhausted
from kvdist.transport.shared_memory.transport import DESCRIBE_FROM_BYTES, SharedMemoryTransport
from kvdist.transport.zeromq import ZeroMQTransport
from tests.transport.mappings import Pins, segments_mapped
from tests.transport.patience import PATIENCE_S, PATIENT
from tests.transport.test_contract import arrivals, contents, first, receive

pytestmark = pytest.mark.skipif(
    SharedMemoryTransport.available() is not None, reason=str(SharedMemoryTransport.available())
)

LARGE = (3 << 20) + 4321


@contextlib.contextmanager
def shared(bytes_max: int = 32 << 20, inner: Transport | None = None) -> Iterator[SharedMemoryTransport]:
    transport = SharedMemoryTransport(inner or ZeroMQTransport(PATIENT), Arena(bytes_max, 1 << 20))
    with contextlib.closing(transport):
        yield transport


@contextlib.contextmanager
def plain() -> Iterator[ZeroMQTransport]:
    with contextlib.closing(ZeroMQTransport(PATIENT)) as transport:
        yield transport


def arrival(transport: Transport) -> Arrived:
    return arrivals(transport, 1)[0]


def loss(transport: Transport) -> Disconnected:
    lost = first(transport, Disconnected)
    assert isinstance(lost, Disconnected)
    return lost


def greeted(server: SharedMemoryTransport, worker: SharedMemoryTransport, endpoint: str) -> tuple[Route, Route]:
    """Dial and wait until both may send descriptors; the route of the worker, and that of the server."""
    before = server.routes_shared, worker.routes_shared
    to_server = worker.connect(endpoint)
    worker.send(to_server, [b"hello"])
    routes = []
    deadline = time.monotonic() + PATIENCE_S
    while server.routes_shared == before[0] or worker.routes_shared == before[1]:
        assert time.monotonic() < deadline, "no greeting"
        worker.recv(0.01)
        routes += [event.route for event in server.recv(0.01) if isinstance(event, Arrived)]
    return to_server, routes[0]


def pattern(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def filled(transport: SharedMemoryTransport, nbytes: int, seed: int) -> np.ndarray:
    array = transport.allocate(nbytes)
    array[:] = pattern(nbytes, seed)
    return array


# Real processes.

PEER = """
import hashlib, sys
import numpy as np
from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.base import Arrived
from kvdist.transport.shared_memory.transport import SharedMemoryTransport
from kvdist.transport.zeromq import ZeroMQTransport
from tests.transport.patience import PATIENT

transport = SharedMemoryTransport(ZeroMQTransport(PATIENT), Arena(32 << 20, 1 << 20))
kept = []
if sys.argv[1] == "bind":
    print(transport.bind("tcp://127.0.0.1:0"), flush=True)
else:
    transport.send(transport.connect(sys.argv[2]), [b"hello"])
while True:
    for event in transport.recv(60.0):
        if not isinstance(event, Arrived):
            continue
        what, *frames = event.frames
        if bytes(what) == b"make":
            nbytes, seed = (int(bytes(frame)) for frame in frames)
            array = transport.allocate(nbytes)
            array[:] = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
            kept.append(array)
            answer = [b"made", array, b"after"]
        elif bytes(what) == b"counters":
            answer = [b"%d" % n for n in (transport.bytes_described, transport.bytes_whole, transport.routes_shared)]
        else:
            answer = [hashlib.sha256(frame).hexdigest().encode() for frame in frames]
        transport.send(event.route, answer)
"""


@contextlib.contextmanager
def peer_process(what: str, endpoint: str = "") -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", PEER, what, endpoint], stdout=subprocess.PIPE, text=True) as peer:
        try:
            yield peer
        finally:
            peer.kill()


@contextlib.contextmanager
def dialled_process(worker: SharedMemoryTransport) -> Iterator[tuple[subprocess.Popen[str], Route]]:
    """A process that binds, dialled by `worker`, greeted."""
    with peer_process("bind") as peer:
        assert peer.stdout is not None
        wanted = worker.routes_shared + 1
        route = worker.connect(peer.stdout.readline().strip())
        receive(worker, lambda _: worker.routes_shared == wanted)
        yield peer, route


def ask(transport: SharedMemoryTransport, route: Route, *frames: Any) -> list[memoryview]:
    transport.send(route, list(frames))
    return arrival(transport).frames


def counters(transport: SharedMemoryTransport, route: Route) -> tuple[int, ...]:
    return tuple(int(bytes(frame)) for frame in ask(transport, route, b"counters"))


def test_two_processes_read_each_others_large_frames_where_they_lie() -> None:
    with shared() as worker, dialled_process(worker) as (_, route):
        mine = filled(worker, LARGE, 1)
        before = worker.bytes_whole
        (digest,) = ask(worker, route, b"digest", mine)
        assert bytes(digest).decode() == hashlib.sha256(mine).hexdigest()
        assert worker.bytes_described == LARGE and worker.bytes_whole - before < 1000
        what, theirs, after = ask(worker, route, b"make", b"%d" % LARGE, b"2")
        assert (bytes(what), bytes(after)) == (b"made", b"after")
        assert theirs.readonly and theirs.format == "B" and bytes(theirs) == pattern(LARGE, 2).tobytes()
        described, whole, routes = counters(worker, route)
        assert described == LARGE and whole < 1000 and routes == 1


def test_a_process_that_dials_is_read_and_reads_too() -> None:
    with shared() as server, peer_process("connect", server.bind("tcp://127.0.0.1:0")):
        route = arrival(server).route
        receive(server, lambda _: server.routes_shared == 1)
        mine = filled(server, LARGE, 8)
        (digest,) = ask(server, route, b"digest", mine)
        assert bytes(digest).decode() == hashlib.sha256(mine).hexdigest()
        _, theirs, _ = ask(server, route, b"make", b"%d" % LARGE, b"9")
        assert bytes(theirs) == pattern(LARGE, 9).tobytes()
        assert server.bytes_described == LARGE and counters(server, route)[0] == LARGE


def test_what_a_killed_process_has_sent_stays_readable_and_nothing_is_left_on_the_machine() -> None:
    def files() -> set[str]:
        folders = ["/dev/shm", tempfile.gettempdir()]
        return {name for folder in folders for name in os.listdir(folder) if "kvdist-arena" in name}

    with shared() as worker, dialled_process(worker) as (peer, route):
        views = [ask(worker, route, b"make", b"%d" % LARGE, b"%d" % seed)[1] for seed in range(3)]
        peer.send_signal(signal.SIGKILL)
        peer.wait()
        assert loss(worker).route == route
        assert worker.routes_shared == 0 and len(worker.table) == 0
        for seed, view in enumerate(views):
            assert bytes(view) == pattern(LARGE, seed).tobytes()
        mine = filled(worker, LARGE, 1)
        worker.send(route, [mine])  # waits for a successor, and holds nobody up
    assert files() == set()
    assert bytes(views[0]) == pattern(LARGE, 0).tobytes()


def test_memory_of_a_peer_is_unmapped_when_it_is_gone_and_nobody_shows_it() -> None:
    before = segments_mapped()
    with shared() as worker, dialled_process(worker) as (peer, route):
        own = segments_mapped()
        frames = ask(worker, route, b"make", b"%d" % LARGE, b"1")
        assert segments_mapped() == own + 1
        peer.send_signal(signal.SIGKILL)
        loss(worker)
        assert segments_mapped() == own + 1 and len(frames[1]) == LARGE
        del frames
        assert segments_mapped() == own
    del worker
    assert segments_mapped() == before


def test_what_peers_show_is_pinned_for_a_gpu_until_they_are_gone() -> None:
    pins = Pins()
    with shared() as worker, dialled_process(worker) as (peer, route):
        SharedAllocator(worker.arena, WindowCache([worker.arena.table, worker.table])).pin(pins)
        mine = worker.allocate(100)
        own = set(pins.present)
        frames = ask(worker, route, b"make", b"%d" % 100_000, b"1")
        (theirs,) = set(pins.present) - own
        assert theirs <= address_of(frames[1]) and address_of(frames[1]) + 100_000 <= theirs + pins.present[theirs]
        ask(worker, route, b"make", b"%d" % 100_000, b"2")
        assert set(pins.present) == own | {theirs}, "a segment is pinned once"
        peer.send_signal(signal.SIGKILL)
        loss(worker)
        assert set(pins.present) == own, "and let go before its last frame is"
        assert bytes(frames[1]) == pattern(100_000, 1).tobytes()
        assert len(own) == 1 and len(mine) == 100
    assert not pins.present


def test_a_stopped_process_holds_nobody_up() -> None:
    with shared() as worker, dialled_process(worker) as (stopped, to_stopped), dialled_process(worker) as (_, living):
        stopped.send_signal(signal.SIGSTOP)
        mine = filled(worker, LARGE, 1)
        for _ in range(100):
            worker.send(to_stopped, [b"digest", mine])
        for seed in range(5):
            _, theirs, _ = ask(worker, living, b"make", b"50000", b"%d" % seed)
            assert bytes(theirs) == pattern(50_000, seed).tobytes()
        stopped.send_signal(signal.SIGCONT)
        answers = receive(worker, lambda events: len(events) >= 100)
        digest = hashlib.sha256(mine).hexdigest().encode()
        assert [contents(answer) for answer in answers if isinstance(answer, Arrived)] == [[digest]] * 100


def test_a_window_shows_what_two_processes_hold_as_one_array() -> None:
    size = 40 * 4096
    with shared() as worker, dialled_process(worker) as (first, left), dialled_process(worker) as (_, right):
        cache = WindowCache([worker.arena.table, worker.table])
        frames = [ask(worker, left, b"make", b"%d" % size, b"1")[1], ask(worker, right, b"make", b"70001", b"2")[1]]
        window = cache.view(frames)
        assert window is not None
        expected = np.concatenate([pattern(size, 1), pattern(70_001, 2)])
        assert (window == expected).all() and window.size == expected.size
        assert cache.view(frames) is window and len(cache) == 1
        first.send_signal(signal.SIGKILL)
        loss(worker)
        assert cache.view(frames) is None  # it cannot be opened any more
        assert (window == expected).all()


# Who greets whom.


def test_small_frames_and_frames_outside_the_arena_travel_whole_beside_large_ones() -> None:
    with shared() as server, shared() as worker:
        to_server, _ = greeted(server, worker, server.bind("tcp://127.0.0.1:0"))
        array = filled(worker, 4 * DESCRIBE_FROM_BYTES, 3)
        pieces = [array[:DESCRIBE_FROM_BYTES], array[: DESCRIBE_FROM_BYTES - 1], pattern(70_000, 4), array[5:]]
        worker.send(to_server, [memoryview(piece) for piece in [pieces[0], *pieces]])
        message = arrival(server)
        assert contents(message) == [piece.tobytes() for piece in [pieces[0], *pieces]]
        assert all(frame.readonly for frame in message.frames)
        assert worker.bytes_described == 2 * DESCRIBE_FROM_BYTES + array.size - 5
        shown = [server.table.find(np.frombuffer(frame, np.uint8).ctypes.data, 1) for frame in message.frames]
        assert [place is not None for place in shown] == [True, True, False, False, True]


def test_a_typed_view_of_the_arena_is_sent_as_its_bytes_and_a_strided_one_refused() -> None:
    with shared() as server, shared() as worker:
        to_server, _ = greeted(server, worker, server.bind("tcp://127.0.0.1:0"))
        numbers = worker.allocate(1 << 20).view(np.float64).reshape(-1, 128)
        numbers[:] = np.arange(numbers.size).reshape(numbers.shape)
        with pytest.raises(ValueError, match="contiguous"):
            worker.send(to_server, [b"half", memoryview(numbers[:, ::2])])
        worker.send(to_server, [memoryview(numbers)])
        (frame,) = arrival(server).frames
        assert bytes(frame) == numbers.tobytes()


def test_another_host_is_not_greeted_and_gets_everything_whole() -> None:
    with shared() as server, shared() as worker:
        endpoint, mark = split_host(server.bind("tcp://127.0.0.1:0"))
        route = worker.connect(with_host(endpoint, "0" * 16 + mark[16:]))
        array = filled(worker, LARGE, 1)
        worker.send(route, [array])
        message = arrival(server)
        assert contents(message) == [array.tobytes()]
        server.send(message.route, [filled(server, LARGE, 2)])
        assert contents(arrival(worker)) == [pattern(LARGE, 2).tobytes()]
        for _ in range(3):  # long enough for greetings, if there were any
            worker.send(route, [b"ping"])
            server.send(arrival(server).route, [b"pong"])
            arrival(worker)
        assert [side.routes_shared for side in (server, worker)] == [0, 0]
        assert [side.bytes_described for side in (server, worker)] == [0, 0]
        assert server.bytes_whole == worker.bytes_whole == LARGE + 3 * 4


def test_a_transport_without_shared_memory_sees_no_greeting_from_either_side() -> None:
    with shared() as server, plain() as worker:
        route = worker.connect(server.bind("tcp://127.0.0.1:0"))
        worker.send(route, [b"x", b"y"])
        message = arrival(server)
        server.send(message.route, [filled(server, LARGE, 1)])
        assert contents(message) == [b"x", b"y"] and contents(arrival(worker)) == [pattern(LARGE, 1).tobytes()]
    with plain() as server, shared() as worker:
        route = worker.connect(server.bind("tcp://127.0.0.1:0"))
        worker.send(route, [filled(worker, LARGE, 2)])
        message = arrival(server)
        server.send(message.route, [b"back"])
        assert contents(message) == [pattern(LARGE, 2).tobytes()] and contents(arrival(worker)) == [b"back"]


def test_a_connection_that_comes_back_is_greeted_anew() -> None:
    with shared() as worker:
        with shared() as server:
            endpoint = server.bind("tcp://127.0.0.1:0")
            to_server, _ = greeted(server, worker, endpoint)
            array = filled(worker, LARGE, 1)
            worker.send(to_server, [array])
            assert contents(arrival(server)) == [array.tobytes()]
            assert worker.bytes_described == LARGE
        assert loss(worker).route == to_server
        assert worker.routes_shared == 0
        with shared() as successor:
            assert successor.bind(endpoint) == endpoint
            deadline = time.monotonic() + PATIENCE_S
            while not (worker.routes_shared and successor.routes_shared):
                assert time.monotonic() < deadline, "no greeting"
                worker.recv(0.01)
                assert {type(event) for event in successor.recv(0.01)} <= {MemoryShared}
            worker.send(to_server, [array])
            assert contents(arrival(successor)) == [array.tobytes()]
            assert worker.bytes_described == 2 * LARGE


def descriptors_open() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_forty_connections_leave_no_descriptor_and_no_mapping() -> None:
    with shared() as server:
        endpoint = server.bind("tcp://127.0.0.1:0")
        mine = filled(server, 50_000, 5)
        for number in range(40):
            with shared(4 << 20) as worker:
                to_server, to_worker = greeted(server, worker, endpoint)
                worker.send(to_server, [filled(worker, 40_000, number)])
                server.send(to_worker, [mine])
                assert contents(arrival(server)) == [pattern(40_000, number).tobytes()]
                assert contents(arrival(worker)) == [mine.tobytes()]
            assert loss(server).route == to_worker
            if number == 5:
                mapped, open_ = segments_mapped(), descriptors_open()
        assert server.routes_shared == len(server.table) == 0
        assert segments_mapped() <= mapped
        deadline = time.monotonic() + PATIENCE_S
        while descriptors_open() > open_ and time.monotonic() < deadline:
            server.recv(0.01)  # the thread of libzmq says that it closes one before it does
        assert descriptors_open() <= open_


def test_each_side_greets_at_most_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[bytes] = []
    greeting = descriptors.greeting

    def counted(*arguments: Any) -> bytes:
        packed.append(greeting(*arguments))
        return packed[-1]

    monkeypatch.setattr("kvdist.transport.shared_memory.transport.greeting", counted)
    with shared() as server, shared() as worker:
        to_server, _ = greeted(server, worker, server.bind("tcp://127.0.0.1:0"))
        for _ in range(3):
            worker.send(to_server, [b"ping"])
            server.send(arrival(server).route, [b"pong"])
            arrival(worker)
    assert len(packed) == 3


# Peers that say what is not true.


class Liar:
    """A peer that writes its own greetings and tables."""

    def __init__(self, transport: ZeroMQTransport, endpoint: str, arena: Arena) -> None:
        self.transport = transport
        self.endpoint = endpoint
        self.arena = arena
        self.route = transport.connect(endpoint)

    def greet(self, **changed: Any) -> None:
        file = self.arena.file
        fields = {"owner": file.owner, "number": file.number, "token": file.token} | changed
        packed = descriptors.GREETING.pack(descriptors.GREETING_MAGIC, *fields.values(), descriptors.NO_TOKEN)
        self.transport.send(self.route, [packed])

    def table(self, *entries: bytes) -> None:
        self.transport.send(self.route, [b"head", b"", descriptors.table(entries)])

    def says(self, array: np.ndarray, **changed: Any) -> bytes:
        fields = {"frame": 1, "offset": self.arena.locate(array), "length": array.size} | changed
        return descriptors.ENTRY.pack(*fields.values())

    def told(self) -> str:
        """Why it was told to send everything whole."""
        answers = receive(self.transport, lambda events: any(map(self._reason, events)))
        return next(filter(None, map(self._reason, answers)))

    def _reason(self, event: Any) -> str | None:
        return descriptors.read_fallback(event.frames) if isinstance(event, Arrived) else None


@pytest.fixture
def liar_and_server() -> Iterator[tuple[Liar, SharedMemoryTransport]]:
    arena = Arena(4 << 20, 1 << 20)
    with contextlib.closing(arena), shared() as server, plain() as transport:
        yield Liar(transport, server.bind("tcp://127.0.0.1:0"), arena), server


def gone_pid() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


SIZE = 40_000
LIES: dict[str, tuple[dict[str, int], str]] = {
    "beyond the end": ({"offset": (1 << 20) + HEADER_BYTES - SIZE + 1}, "is not in the shared memory of process"),
    "far beyond": ({"offset": (1 << 64) - 1, "length": (1 << 64) - 1}, "is not in the shared memory"),
    "longer than all": ({"length": 1 << 63}, "is not in the shared memory"),
    "in the header": ({"offset": HEADER_BYTES - 1}, "are not in one piece of its shared memory"),
    "no such frame": ({"frame": 2}, "names a frame twice, or one that is there"),
    "a frame that is there": ({"frame": 0}, "names a frame twice, or one that is there"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_descriptor_that_is_not_true_is_dropped_and_its_sender_told_to_send_everything_whole(
    liar_and_server: tuple[Liar, SharedMemoryTransport], caplog: pytest.LogCaptureFixture, lie: str
) -> None:
    liar, server = liar_and_server
    changed, reason = LIES[lie]
    array = liar.arena.allocate(SIZE)
    array[:] = 1
    liar.greet()
    liar.table(liar.says(array))
    message = arrival(server)
    assert contents(message) == [b"head", array.tobytes()]
    liar.table(liar.says(array, **changed))
    liar.table(liar.says(array))  # as true as it is: it was under way when its sender was told
    liar.transport.send(liar.route, [b"head", array.tobytes()])
    assert contents(arrival(server)) == [b"head", array.tobytes()]
    assert reason in liar.told()
    assert sum(reason in record.message for record in caplog.records) == 1
    assert server.routes_fallen_back == 1 and server.messages_dropped == 2 and len(server.table) == 0
    assert bytes(message.frames[1]) == array.tobytes()
    with shared() as honest:
        to_server, _ = greeted(server, honest, liar.endpoint)
        honest.send(to_server, [filled(honest, LARGE, 1)])
        assert contents(arrival(server)) == [pattern(LARGE, 1).tobytes()]
        assert server.routes_fallen_back == 1


@contextlib.contextmanager
def unsealed() -> Iterator[int]:
    """A file of the right name and contents that can be cut."""
    file = os.memfd_create(NAME)
    os.pwrite(file, MAGIC + bytes(range(16)), 0)
    os.ftruncate(file, 100_000)
    yield file
    os.close(file)


@contextlib.contextmanager
def stub() -> Iterator[int]:
    file = os.memfd_create(NAME, os.MFD_ALLOW_SEALING)
    os.pwrite(file, MAGIC + bytes(range(16)), 0)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
    yield file
    os.close(file)


@contextlib.contextmanager
def pipe() -> Iterator[int]:
    """Opening it would wait for a writer."""
    ends = os.pipe()
    yield ends[0]
    for end in ends:
        os.close(end)


@contextlib.contextmanager
def another_memory() -> Iterator[int]:
    """A file that is in order, and not the one that was named."""
    with contextlib.closing(Arena(1 << 20, 1 << 20)) as arena:
        yield arena.file.number


@contextlib.contextmanager
def no_number() -> Iterator[int]:
    yield 999_999


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (unsealed, "not sealed against shrinking"),
        (stub, "less than its first page"),
        (pipe, "not shared memory of kvdist"),
        (another_memory, "does not have the token"),
        (no_number, "cannot open the shared memory of process"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_not_mapped(
    liar_and_server: tuple[Liar, SharedMemoryTransport],
    other: Callable[[], contextlib.AbstractContextManager[int]],
    reason: str,
) -> None:
    liar, server = liar_and_server
    with other() as file:
        liar.greet(number=file, token=bytes(range(16)))
        liar.table(liar.says(liar.arena.allocate(SIZE)))
        liar.transport.send(liar.route, [b"ordinary"])
        assert contents(arrival(server)) == [b"ordinary"]
        assert reason in liar.told() and server.routes_shared == len(server.table) == 0


def test_a_file_of_another_kind_that_was_put_there_meanwhile_is_not_mapped(
    liar_and_server: tuple[Liar, SharedMemoryTransport], monkeypatch: pytest.MonkeyPatch
) -> None:
    liar, server = liar_and_server
    monkeypatch.setattr("os.readlink", lambda path: f"/memfd:{NAME}")
    with pipe() as file:
        liar.greet(number=file)
        liar.table(liar.says(liar.arena.allocate(SIZE)))
        receive(server, lambda _: server.routes_fallen_back == 1)
        assert "cannot read the shared memory of process" in liar.told()


def test_memory_of_a_process_that_has_ended_is_not_mapped(liar_and_server: tuple[Liar, SharedMemoryTransport]) -> None:
    liar, server = liar_and_server
    liar.greet(owner=gone_pid())
    liar.table(liar.says(liar.arena.allocate(SIZE)))
    receive(server, lambda _: server.routes_fallen_back == 1)
    assert "cannot open the shared memory of process" in liar.told()


def test_a_malformed_table_is_dropped(liar_and_server: tuple[Liar, SharedMemoryTransport]) -> None:
    liar, server = liar_and_server
    liar.greet()
    liar.table(b"half an entry")
    receive(server, lambda _: server.routes_fallen_back == 1)
    assert "a table of 13 bytes" in liar.told()


def test_a_frame_cannot_be_described_twice(liar_and_server: tuple[Liar, SharedMemoryTransport]) -> None:
    liar, server = liar_and_server
    array = liar.arena.allocate(SIZE)
    liar.greet()
    liar.table(liar.says(array), liar.says(array))
    receive(server, lambda _: server.routes_fallen_back == 1)
    assert "names a frame twice" in liar.told()


def test_who_names_a_file_that_cannot_be_read_is_not_answered_and_is_served_whole(
    liar_and_server: tuple[Liar, SharedMemoryTransport],
) -> None:
    liar, server = liar_and_server
    liar.greet(token=bytes(16))
    liar.transport.send(liar.route, [b"ordinary"])
    message = arrival(server)
    array = filled(server, LARGE, 1)
    server.send(message.route, [b"first", array])
    assert contents(arrival(liar.transport)) == [b"first", array.tobytes()]
    assert server.routes_shared == 0


def test_descriptors_from_somebody_who_has_not_greeted_are_dropped(
    liar_and_server: tuple[Liar, SharedMemoryTransport],
) -> None:
    """As when they waited for the predecessor at this endpoint."""
    liar, server = liar_and_server
    liar.table(liar.says(liar.arena.allocate(SIZE)))
    liar.transport.send(liar.route, [b"ordinary"])
    assert contents(arrival(server)) == [b"ordinary"]
    assert server.messages_dropped == 1 and server.routes_fallen_back == 0


# A peer that can open or map no more.


def test_what_a_peer_cannot_map_any_more_is_reported_as_lost_and_then_sent_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with shared() as server, shared() as worker:
        to_server, _ = greeted(server, worker, server.bind("tcp://127.0.0.1:0"))

        def exhausted(owner: int, number: int, token: bytes) -> object:
            raise Exhausted(f"cannot open the shared memory of process {owner}: no more files")

        monkeypatch.setattr("kvdist.transport.shared_memory.transport.open_file", exhausted)
        array = filled(worker, LARGE, 1)
        worker.send(to_server, [b"first", array])
        worker.send(to_server, [b"second"])
        assert contents(arrival(server)) == [b"second"]
        broken, mended = receive(worker, lambda events: len(events) >= 2)
        assert isinstance(broken, Disconnected) and broken.route == to_server and "no more files" in broken.reason
        assert mended == Connected(to_server)
        assert [worker.routes_shared, server.routes_shared] == [0, 1], "the other way is as it was"
        worker.send(to_server, [b"first", array])
        assert contents(arrival(server)) == [b"first", array.tobytes()]
        (record,) = caplog.records
        assert "no more files; its values come through the socket from now on" in record.message


def test_a_message_that_looks_like_a_table_arrives_as_it_was_sent() -> None:
    with shared() as server, shared() as worker:
        to_server, to_worker = greeted(server, worker, server.bind("tcp://127.0.0.1:0"))
        lookalike = descriptors.table([bytes(descriptors.ENTRY.size)])
        for frames in ([b"", lookalike], [lookalike], [filled(worker, LARGE, 1), lookalike]):
            worker.send(to_server, frames)
            assert contents(arrival(server)) == [bytes(frame) for frame in frames]
        server.send(to_worker, [lookalike])
        assert contents(arrival(worker)) == [lookalike]
