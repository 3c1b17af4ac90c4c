"""The transport between processes of a host: large frames stay in shared memory, and messages carry their location.

Wraps another transport, which carries everything else, and all traffic to other hosts. Large frames in this process's
`Arena` travel as a descriptor (see `descriptors`); the receiver opens the sender's file once through
``/proc/<pid>/fd/<number>`` and keeps it mapped (see `segments`).

Descriptors are not passed over a unix socket (SCM_RIGHTS), because that would need a socket file in a run-time
directory, a second connection per peer and its handshake. With ``/proc`` no file has a name in the file system, so a
killed process leaves none behind, and the kernel checks the permission: the same user.

How two sides agree, without a message to strangers:

* `bind` marks the endpoint with this host. A process that dials an endpoint marked with its host sends a greeting when
  the connection is up. A transport without shared memory never marks and is never greeted.
* A greeting names the sender's file. A receiver that can read its first page answers with a greeting that confirms it.
  Only after that confirmation a process sends descriptors; until then, and whenever that fails, frames travel whole.
* A connection that comes back is greeted anew. Descriptors in flight to a predecessor that arrive at a process that has
  not been greeted are dropped, as messages may be when a connection breaks.
* A descriptor that cannot be read, because this process has no memory or no file descriptors left or because it is
  wrong, is dropped and logged, and its sender falls back: it reports the route as broken and mended, so that messages
      in flight are sent again, whole, as are all after them.
"""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from bisect import bisect_right
from collections.abc import Sequence

from kvdist.config.addresses import this_machine
from kvdist.errors import ProtocolError
from kvdist.nodes import NodeId
from kvdist.transport.base import Arrived, Buffer, Connected, Disconnected, Event, MemoryShared, Route, Transport
from kvdist.transport.endpoints import split_host, with_host
from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.shared_memory.descriptors import (
    FRAMES_MAX,
    Descriptor,
    Greeting,
    entry,
    fallback,
    greeting,
    is_pack,
    is_table,
    pack,
    read_fallback,
    read_greeting,
    read_pack,
    read_table,
    table,
)
from kvdist.transport.shared_memory.mapping import Bytes
from kvdist.transport.shared_memory.segments import (
    HEADER_BYTES,
    Exhausted,
    Segment,
    SegmentTable,
    SharedFile,
    create_file,
    open_file,
)

LOG = logging.getLogger("kvdist")

PACKED_BYTES_MAX = 4 << 10
"""Messages up to this size, without their described frames, are packed when they are sent together."""
DESCRIBE_FROM_BYTES = 32 << 10
"""Smaller frames travel whole: below this a descriptor costs more processor time than the copies that it saves."""


class SharedMemoryTransport(Transport):
    """Carries frames by way of another transport, except large frames of `arena`. See the module.

    Takes over both: closing this closes them.

    Attributes:
        inner: the transport that carries messages.
        arena: the memory of this process that peers may read.
        table: the segments of peers that are mapped by this process.
        bytes_described: number of bytes of frames that were sent as descriptors.
        bytes_whole: number of bytes that were sent through `inner`.
        routes_fallen_back: number of routes that carry frames whole because this process could not read a descriptor.
        messages_dropped: messages whose descriptors came before a greeting or could not be read.
    """

    def __init__(self, inner: Transport, arena: Arena) -> None:
        self.inner = inner
        self.arena = arena
        self.table = SegmentTable()
        self.bytes_described = 0
        self.bytes_whole = 0
        self.routes_fallen_back = 0
        self.messages_dropped = 0
        self._host = this_host()
        self._greeted: set[Route] = set()
        """Dialled routes that lead to this host."""
        self._partners: dict[Route, _Partner] = {}
        """Routes over which a greeting was sent or received, while they are up."""

    @staticmethod
    def available() -> str | None:
        """None when this system has shared memory between processes, else the reason why not."""
        if not sys.platform.startswith("linux"):
            return f"shared memory between processes needs Linux, and this is {sys.platform}"
        try:
            this_host()
            mine = create_file()
            try:
                open_file(mine.owner, mine.number, mine.token).close()
            finally:
                mine.close()
        except (OSError, AttributeError, ProtocolError) as error:
            return f"shared memory between processes does not work here: {error}"
        return None

    @property
    def routes_shared(self) -> int:
        """Number of routes over which descriptors may be sent now."""
        return sum(partner.reads_us for partner in self._partners.values())

    def allocate(self, nbytes: int) -> Bytes:
        """Memory that is not copied when it is sent to a process of this host. As `Arena.allocate`, from any thread."""
        return self.arena.allocate(nbytes)

    @property
    def strangers_refused(self) -> int:
        return self.inner.strangers_refused

    def hang_up(self, route: Route) -> None:
        self.inner.hang_up(route)

    def bind(self, endpoint: str) -> str:
        plain, _ = split_host(endpoint)
        return with_host(self.inner.bind(plain), f"{self._host}.{os.getpid()}")

    def connect(self, endpoint: str, to: NodeId | None = None) -> Route:
        plain, mark = split_host(endpoint)
        route = self.inner.connect(plain, to)
        if mark.partition(".")[0] == self._host:
            self._greeted.add(route)
        return route

    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        self.send_all(to, [frames])

    def send_all(self, to: Route, messages: Sequence[Sequence[Buffer]]) -> None:
        partner = self._partners.get(to)
        knows_descriptors = partner is not None and partner.has_greeted
        small: list[Sequence[Buffer]] = []
        for frames in messages:
            if partner is not None and knows_descriptors and frames:
                frames = self._described(frames, partner.reads_us)
            nbytes = _nbytes(frames)
            self.bytes_whole += nbytes
            if knows_descriptors and nbytes <= PACKED_BYTES_MAX and 0 < len(frames) <= FRAMES_MAX:
                small.append(frames)
                continue
            self._send_packed(to, small)
            small = []
            self.inner.send(to, frames)
        self._send_packed(to, small)

    def _send_packed(self, to: Route, messages: Sequence[Sequence[Buffer]]) -> None:
        if len(messages) == 1 and not is_pack(messages[0]):
            self.inner.send(to, messages[0])
        elif messages:
            self.inner.send(to, [pack(messages)])

    def recv(self, timeout_s: float) -> list[Event]:
        """As in the contract, but an empty list may come early, once per connection, when it is greeted."""
        events: list[Event] = []
        for event in self.inner.recv(timeout_s):
            if type(event) is Arrived:
                self._arrived(event, events)
            elif type(event) is Disconnected:
                self._part(event.route)
                events.append(event)
            else:
                if type(event) is Connected and event.route in self._greeted:
                    self._partners[event.route] = _Partner(self.table)
                    self.inner.send(event.route, [greeting(self.arena.file)])
                events.append(event)
        return events

    def wake(self) -> None:
        self.inner.wake()

    def close(self, linger_s: float = 0.0) -> None:
        self.inner.close(linger_s)
        for route in list(self._partners):
            self._part(route)
        self.arena.close()

    def _described(self, frames: Sequence[Buffer], reads_us: bool) -> Sequence[Buffer]:
        """The frames as they are sent: frames that the partner can read itself are empty, and listed in a table at the
        end."""
        sent, entries = list(frames), []
        for index, frame in enumerate(frames):
            view = memoryview(frame)
            if not view.c_contiguous:
                return frames  # and the inner transport says so
            if view.nbytes < DESCRIBE_FROM_BYTES or not reads_us:
                continue
            offset = self.arena.locate(view)
            if offset is not None:
                sent[index] = b""
                entries.append(entry(index, offset, view.nbytes))
                self.bytes_described += view.nbytes
        # A frame of the user's that happens to look like a table gets a table of its own behind it.
        if entries or is_table(frames[-1]):
            sent.append(table(entries))
        return sent

    def _arrived(self, message: Arrived, events: list[Event]) -> None:
        partner = self._partners.get(message.route)
        heard = read_greeting(message.frames)
        reason = read_fallback(message.frames)
        if heard is not None:
            self._meet(message.route, heard, events)
        elif reason is not None and partner is not None:
            self._send_whole(message.route, partner, reason, events)
        elif partner is not None and partner.has_greeted and is_pack(message.frames):
            self._unpack(message, partner, events)
        else:
            self._read(message, partner, events)

    def _unpack(self, message: Arrived, partner: _Partner, events: list[Event]) -> None:
        try:
            for frames in read_pack(message.frames[0]):
                self._read(Arrived(message.route, frames, message.sender), partner, events)
        except ProtocolError as error:
            self._fall_back(message.route, partner, error)

    def _read(self, message: Arrived, partner: _Partner | None, events: list[Event]) -> None:
        if not is_table(message.frames[-1]):
            events.append(message)
        elif partner is None or not partner.has_greeted:
            self.messages_dropped += 1
        else:
            try:
                events.append(Arrived(message.route, partner.restored(message.frames), message.sender))
            except ProtocolError as error:
                self._fall_back(message.route, partner, error)

    def _fall_back(self, route: Route, partner: _Partner, error: ProtocolError) -> None:
        """Drop a message that cannot be read, and ask its sender to repeat it without descriptors."""
        self.messages_dropped += 1
        if partner.has_fallen_back:
            return  # its sender had not received the fallback yet
        partner.has_fallen_back = True
        partner.close()
        self.routes_fallen_back += 1
        LOG.warning("%s; its values come through the socket from now on, which takes longer", error)
        self.inner.send(route, [fallback(str(error))])

    def _send_whole(self, route: Route, partner: _Partner, reason: str, events: list[Event]) -> None:
        """Send no more descriptors: the partner could not read one. Messages in flight are sent again."""
        if partner.reads_us:
            partner.reads_us = False
            why = f"the process at its other end cannot read this one's shared memory: {reason}"
            events += [Disconnected(route, why), Connected(route)]

    def _meet(self, route: Route, heard: Greeting, events: list[Event]) -> None:
        partner = self._partners.setdefault(route, _Partner(self.table))
        partner.greeting = heard
        if not partner.reads_us and heard.has_read == self.arena.file.token:
            partner.reads_us = True
            events.append(MemoryShared(route))
        if partner.was_answered:
            return
        try:
            open_file(heard.owner, heard.number, heard.token).close()
        except ProtocolError as error:
            # The peer gets no answer, and so sends everything whole.
            if isinstance(error, Exhausted):
                LOG.warning("%s; its values come through the socket, which takes longer", error)
            return
        partner.was_answered = True
        self.inner.send(route, [greeting(self.arena.file, heard.token)])

    def _part(self, route: Route) -> None:
        """Forget a route that is down."""
        partner = self._partners.pop(route, None)
        if partner is not None:
            partner.reads_us = False
            partner.close()


class _Partner:
    """The process at the other end of a route.

    Attributes:
        greeting: its greeting, which names its file; None until it has come.
        was_answered: whether the greeting was answered: this process can read the partner's memory.
        reads_us: whether it has confirmed that it can read the memory of this process.
        has_fallen_back: whether it was asked to send no more descriptors.
    """

    def __init__(self, mapped: SegmentTable) -> None:
        self.greeting: Greeting | None = None
        self.was_answered = False
        self.reads_us = False
        self.has_fallen_back = False
        self._mapped = mapped
        self._file: SharedFile | None = None
        self._segments: list[Segment] = []
        """Segments of its file, in order and without gaps."""
        self._offsets: list[int] = []

    @property
    def has_greeted(self) -> bool:
        """Whether it has sent a greeting, and so knows descriptors."""
        return self.greeting is not None

    def restored(self, frames: Sequence[memoryview]) -> list[memoryview]:
        """The message as its sender passed it to `send`.

        Raises:
            ProtocolError: a descriptor is wrong, or this process can open or map no more.
        """
        if self.has_fallen_back:
            raise ProtocolError("a message with descriptors after it was told to send none")
        whole = list(frames[:-1])
        for one in read_table(frames):
            whole[one.frame] = self._read(one)
        return whole

    def _read(self, one: Descriptor) -> memoryview:
        if self._file is None:
            assert self.greeting is not None
            self._file = open_file(self.greeting.owner, self.greeting.number, self.greeting.token)
        end = one.offset + one.length
        if end > self._file.bytes_mapped:
            segment = self._file.map_rest(end)
            self._segments.append(segment)
            self._offsets.append(segment.offset)
            self._mapped.add(segment)
        index = bisect_right(self._offsets, one.offset) - 1
        if one.offset < HEADER_BYTES or index < 0 or end > self._offsets[index] + self._segments[index].nbytes:
            raise ProtocolError(f"bytes {one.offset} to {end} are not in one piece of its shared memory")
        start = one.offset - self._offsets[index]
        return self._segments[index].view[start : start + one.length]

    def close(self) -> None:
        """Release its memory, which is unmapped with the last array over it."""
        for segment in self._segments:
            self._mapped.discard(segment)
        self._segments.clear()
        self._offsets.clear()
        if self._file is not None:
            self._file.close()
            self._file = None


def _nbytes(frames: Sequence[Buffer]) -> int:
    return sum(len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in frames)


def this_host() -> str:
    """A digest of the facts that two processes must share to open each other's memory: the machine, the pid namespace,
    the user.

    Raises:
        OSError: the system has no ``/proc``.
    """
    seen = f"{this_machine()} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    return hashlib.sha256(seen.encode()).hexdigest()[:16]
