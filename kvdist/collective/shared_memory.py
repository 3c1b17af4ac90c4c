"""Sums over the ranks of a host, through memory that they share.

Every rank has two slots in memory that all of them map, and a Unix socket to each other rank, over which a byte reports
a finished step. Tensors are summed chunk by chunk, where a chunk is as many stretches of them as fill a slot:

1. A rank copies its part of a chunk into its slot, except for the stripe that it sums itself, and reports that. 2. When
all have copied, it sums its stripe, in the order of the ranks, writes the result into all slots, and reports it. 3.
When all have summed, it copies the other stripes from its slot. The slot is free again.

The next chunk is copied into the other slot before the second step, so a rank seldom waits. Of n bytes a rank of two
reads and writes 4n in all, much of it in the cache. A small chunk is not cut: each rank sums all of it after step 1,
with the same operations in the same order, so that all get the same bits either way.

Where the ranks are on several hosts, those of each host do this among themselves, and between the second and the third
step the first rank of each host sums its slot over the hosts, and copies the result into the other slots of its host.

A rank that dies closes its sockets: the others of its host raise at once.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from kvdist.config.addresses import this_machine

SLOT_BYTES = 2 << 20
"""Size of a slot, and so of a chunk: fits the cache of a core."""
SMALL_BYTES = 32 << 10
"""Largest chunk that every rank sums whole: a second wait would cost more."""
DTYPES = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8, torch.int8)
)
"""Dtypes that can be summed in shared memory: those of gloo, except booleans."""
CONNECT_S = 10.0
"""Time until a rank that does not answer is given up; all have met just before, and others wait for the outcome."""
_COPIED, _SUMMED, _JOINED = b"c", b"s", b"j"
_RANK = struct.Struct("!I")
_CREDENTIALS = struct.Struct("iII")


class Chunk:
    """Stretches of tensors that are summed together; they lie one behind the other in a slot.

    Args:
        dtype: dtype of their elements.

    Attributes:
        count: number of elements of all stretches.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.count = 0
        self._stretches: list[tuple[int, int, torch.Tensor]] = []
        """(first, end, stretch): each stretch with its range of elements in the slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all stretches."""
        return self.count * self.dtype.itemsize

    def take(self, values: torch.Tensor) -> int:
        """Add as much of a flat tensor as fits; returns the number of added elements."""
        start, size = self.count, SLOT_BYTES // self.dtype.itemsize
        self.count = min(start + values.numel(), size)
        taken = self.count - start
        if taken:
            self._stretches.append((start, self.count, values[:taken]))
        return taken

    def between(self, start: int, stop: int) -> Iterator[tuple[torch.Tensor, slice]]:
        """The parts of the stretches between two elements, each with its place in a slot."""
        for begin, end, stretch in self._stretches:
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield stretch[first - begin : last - begin], slice(first, last)


def chunks_of(tensors: Iterable[torch.Tensor]) -> Iterator[Chunk]:
    """Cut contiguous tensors, none empty, into chunks in their order; all chunks of a dtype but the last are full."""
    chunk = None
    for tensor in tensors:
        values = tensor.detach().view(-1)
        if chunk is None or chunk.dtype is not values.dtype:
            if chunk is not None:
                yield chunk
            chunk = Chunk(values.dtype)
        while (values := values[chunk.take(values) :]).numel():
            yield chunk
            chunk = Chunk(values.dtype)
    if chunk is not None:
        yield chunk


class SharedMemory:
    """The shared memory of some ranks of a host, including this process.

    Args:
        ranks: ranks of these processes in their group.
        rank: index of this process in `ranks`. In the rest of this class, "rank" means such an index.
        peers: by rank, a socket to each other rank; None for this rank.
        memory: by rank, its two slots.
        join: replaces the sum over this host by the sum over all hosts; called only by the first rank of each host.
            None if this is the only host.

    A single thread calls `sum`, in the order in which all ranks call it; any thread may call `abort`.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        rank: int,
        peers: list[socket.socket | None],
        memory: list[torch.Tensor],
        join: Callable[[torch.Tensor], None] | None,
    ) -> None:
        self._ranks, self._rank, self._size, self._join = ranks, rank, len(peers), join
        self._closing = threading.Lock()
        self._peers = {of: peer for of, peer in enumerate(peers) if peer is not None}
        self._memory = memory
        self._copied = self._summed = 0
        """Numbers of chunks that this rank has copied into its slots, and has summed."""
        self._heard = {of: dict.fromkeys((_COPIED, _SUMMED, _JOINED), 0) for of in self._peers}
        """Other rank → step → number of chunks for which the rank has reported the step."""
        _open.add(self)

    def sum(self, tensors: Iterable[torch.Tensor]) -> None:
        """Replace each of these contiguous CPU tensors by the sum of all ranks' tensors.

        Raises:
            RuntimeError: a rank has ended, or `abort` was called.
        """
        copied = None
        for chunk in chunks_of(tensors):
            self._copy(chunk)
            if copied is not None:
                self._sum(copied)
            copied = chunk
        if copied is not None:
            self._sum(copied)

    def abort(self) -> None:
        """Make a waiting `sum` raise."""
        with self._closing:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):  # it is closed
                    peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Leave: the others can sum no more."""
        with self._closing:
            for peer in self._peers.values():
                peer.close()

    def _copy(self, chunk: Chunk) -> None:
        """Do step 1 of a chunk; of a small chunk copy all stripes."""
        self._wait_for(_SUMMED, self._copied - 1)  # the chunk before the last, which was in this slot
        slot = self._slot(self._rank, self._copied, chunk)
        for of, ends in enumerate(self._stripes(chunk)):
            if of != self._rank or self._is_small(chunk):
                for stretch, place in chunk.between(*ends):
                    copy(stretch, slot[place])
        self._copied += 1
        self._say(_COPIED)

    def _sum(self, chunk: Chunk) -> None:
        """Do steps 2 and 3 of a chunk."""
        slots, stripes = [self._slot(of, self._summed, chunk) for of in range(self._size)], self._stripes(chunk)
        self._summed += 1
        self._wait_for(_COPIED, self._summed)
        if self._is_small(chunk):
            for stretch, place in chunk.between(0, chunk.count):
                add(slots[0][place], slots[1][place], stretch)
                for slot in slots[2:]:
                    add(stretch, slot[place], stretch)
            self._say(_SUMMED)
            return
        for stretch, place in chunk.between(*stripes[self._rank]):
            parts = [slot[place] for slot in slots]
            parts[self._rank] = stretch
            for part in parts[1:]:
                add(parts[0], part, parts[0])
            for part in parts[1:]:
                copy(parts[0], part)
        self._say(_SUMMED)
        self._wait_for(_SUMMED, self._summed)
        own, taken = slots[self._rank], [ends for of, ends in enumerate(stripes) if of != self._rank]
        if self._join is not None:
            self._sum_over_hosts(chunk, slots, self._join)
            taken = [(0, chunk.count)]
        for ends in taken:
            for stretch, place in chunk.between(*ends):
                copy(own[place], stretch)

    def _sum_over_hosts(
        self, chunk: Chunk, slots: Sequence[torch.Tensor], join: Callable[[torch.Tensor], None]
    ) -> None:
        """Replace the content of the slots by the sum over hosts, between steps 2 and 3; the first rank adds its stripe
        first."""
        if self._rank:
            self._wait_for(_JOINED, self._summed, (0,))
            return
        for stretch, place in chunk.between(*self._stripes(chunk)[0]):
            copy(stretch, slots[0][place])
        join(slots[0])
        for slot in slots[1:]:
            copy(slots[0], slot)
        self._say(_JOINED)

    def _slot(self, rank: int, number: int, chunk: Chunk) -> torch.Tensor:
        """The slot of a rank for this chunk, with the chunk's length and dtype."""
        start = SLOT_BYTES * (number % 2)
        return self._memory[rank][start : start + chunk.nbytes].view(chunk.dtype)

    def _stripes(self, chunk: Chunk) -> list[tuple[int, int]]:
        """By rank, the range of elements that it sums."""
        cuts = [chunk.count * of // self._size for of in range(self._size + 1)]
        return list(pairwise(cuts))

    def _is_small(self, chunk: Chunk) -> bool:
        return chunk.nbytes <= SMALL_BYTES and self._join is None

    def _say(self, what: bytes) -> None:
        for peer in self._peers.values():
            with contextlib.suppress(OSError):  # it has left, or is lost: a later wait for it raises
                peer.sendall(what, socket.MSG_NOSIGNAL)

    def _wait_for(self, what: bytes, count: int, ranks: Iterable[int] | None = None) -> None:
        """Wait until each other rank, or each of `ranks`, has reported this step `count` times."""
        for of in self._peers if ranks is None else ranks:
            peer, heard = self._peers[of], self._heard[of]
            while heard[what] < count:
                try:
                    said = peer.recv(64)
                except OSError as error:
                    raise self._lost(of) from error
                if not said:
                    raise self._lost(of)
                for one in heard:
                    heard[one] += said.count(one)

    def _lost(self, rank: int) -> RuntimeError:
        return RuntimeError(f"the connection to rank {self._ranks[rank]} of the group, on this host, was closed")


_open: weakref.WeakSet[SharedMemory] = weakref.WeakSet()


def _close_all() -> None:
    """Close the sockets in a forked child, which would keep them open after its parent has ended."""
    for one in list(_open):
        one.close()


os.register_at_fork(after_in_child=_close_all)


def add(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
    """out ← one + other; except for half precision on this thread alone, as the program's threads compute meanwhile."""
    if out.dtype in (torch.float16, torch.bfloat16):  # NumPy knows no bfloat16, and is slow at float16
        torch.add(one, other, out=out)
    else:
        with np.errstate(all="ignore"):  # a model that diverges shows inf and NaN, not warnings
            np.add(one.numpy(), other.numpy(), out=out.numpy())


def copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """target ← source, on this thread alone."""
    np.copyto(target.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def host_of_this_process() -> str:
    """Name the host: equal for processes that can share memory, of the same machine and user."""
    return f"{this_machine()} {os.geteuid()}"


def connected(
    store: Store, rank: int, size: int, host: str, first_ranks: Callable[[list[int]], Callable[[torch.Tensor], None]]
) -> SharedMemory | None:
    """Connect the ranks of this host to memory that they share. None on all ranks if it helps none, or a rank cannot.

    Args:
        store: shared by exactly the ranks of the group, which all call this.
        rank: rank of this process within the group.
        size: number of ranks of the group.
        host: the same for ranks that can share memory, see `host_of_this_process`; '' for a rank that does not.
        first_ranks: connects the first ranks of the hosts, called only on them; returns a function that sums over them.
    """
    hosts = _said_by_all(store, "host", rank, size, host)
    if "" in hosts or len(set(hosts)) == size:
        return None
    local = [of for of in range(size) if hosts[of] == hosts[rank]]
    firsts = sorted({hosts.index(host) for host in hosts})
    with contextlib.ExitStack() as own, contextlib.ExitStack() as until_agreed:
        try:
            listener = own.enter_context(socket.socket(socket.AF_UNIX))
            name = f"kvdist-{secrets.token_hex(16)}"
            listener.bind(f"\0{name}")
            listener.listen(size)
            descriptor = os.memfd_create("kvdist-collective", os.MFD_CLOEXEC)
            own.callback(os.close, descriptor)
            os.posix_fallocate(descriptor, 0, 2 * SLOT_BYTES)
        except (OSError, AttributeError):  # some Pythons are built without memfd_create
            name = ""
        names = _said_by_all(store, "socket", rank, size, name)
        if "" in names:
            return None
        shared = None
        with contextlib.suppress(OSError, ValueError, RuntimeError):
            join = None if len(firsts) == 1 else first_ranks(firsts) if rank == local[0] else _never
            shared = _connect(listener, descriptor, local, local.index(rank), [names[of] for of in local], join)
            until_agreed.callback(shared.close)
        if all(_said_by_all(store, "connected", rank, size, "yes" if shared else "")):
            until_agreed.pop_all()
            return shared
        return None


def _never(_: torch.Tensor) -> None:
    """Placeholder for `join` on a rank that is not the first of its host."""
    raise AssertionError("the first rank of this host does that")


def _said_by_all(store: Store, what: str, rank: int, size: int, said: str) -> list[str]:
    """Publish a value of this rank, and return the values of all ranks."""
    store.set(f"{what}/{rank}", said)
    return [bytes(store.get(f"{what}/{of}")).decode() for of in range(size)]


def _connect(
    listener: socket.socket,
    descriptor: int,
    ranks: Sequence[int],
    rank: int,
    names: Sequence[str],
    join: Callable[[torch.Tensor], None] | None,
) -> SharedMemory:
    """Connect to the ranks below this rank, let the others connect, and exchange the memory's descriptors.

    Args:
        listener: socket to which the ranks above this rank connect.
        descriptor: descriptor of this rank's memory.
        ranks, rank, join: as in `SharedMemory`.
        names: names of the listeners, by rank.

    Raises:
        OSError: memory cannot be mapped, or a rank does not answer.
        ValueError: another process answers.
    """
    peers: list[socket.socket | None] = [None] * len(names)
    memory: list[Any] = [None] * len(names)
    memory[rank] = _mapped(descriptor)
    with contextlib.ExitStack() as until_failed:
        for peer, expected in _connections(listener, rank, names):
            until_failed.callback(peer.close)
            socket.send_fds(peer, [_RANK.pack(rank)], [descriptor])
            said, descriptors, _, _ = socket.recv_fds(peer, _RANK.size, 1)
            try:
                of = _RANK.unpack(said)[0] if len(said) == _RANK.size else rank
                if of not in expected or peers[of] is not None or len(descriptors) != 1:
                    raise ValueError(f"another process has answered in place of one of the ranks {list(expected)}")
                memory[of] = _mapped(descriptors[0])
            finally:
                for theirs in descriptors:
                    os.close(theirs)
            peer.settimeout(None)
            peers[of] = peer
        until_failed.pop_all()
    return SharedMemory(ranks, rank, peers, memory, join)


def _connections(
    listener: socket.socket, rank: int, names: Sequence[str]
) -> Iterator[tuple[socket.socket, Sequence[int]]]:
    """A socket to each other rank, and the ranks that may be at its other end."""
    for of, name in enumerate(names[:rank]):
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.settimeout(CONNECT_S)
            peer.connect(f"\0{name}")
        except BaseException:
            peer.close()
            raise
        if not _is_of_this_user(peer):
            peer.close()
            raise ValueError(f"a process of another user listens in place of rank {of}")
        yield peer, (of,)
    deadline, left = time.monotonic() + CONNECT_S, len(names) - rank - 1
    while left:
        listener.settimeout(max(0.0, deadline - time.monotonic()) or 1e-3)
        peer, _ = listener.accept()
        if not _is_of_this_user(peer):  # names of sockets are no secret
            peer.close()
            continue
        peer.settimeout(CONNECT_S)
        left -= 1
        yield peer, range(rank + 1, len(names))


def _is_of_this_user(peer: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return bool(user == os.geteuid())


def _mapped(descriptor: int) -> torch.Tensor:
    """Two slots, as bytes.

    Raises:
        ValueError: the file is shorter.
    """
    return torch.frombuffer(mmap.mmap(descriptor, 2 * SLOT_BYTES), dtype=torch.uint8)
