"""What messages and bytes cost this machine's processors: measured, for the model of `scale.py`.

Bytes are measured as they are moved in a real step: over more memory than a cache holds, while another process moves
bytes of its own, and with kvdist's own transport between two processes, on either side by thread.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np
from cluster import environment, worker_command
from modelled import CACHES, COLD_BYTES, Costs

from kvdist.config.settings import Limits
from kvdist.dtypes import DType
from kvdist.kernels.cpu import choose
from kvdist.optimizer.registry import create
from kvdist.optimizer.updater import Updater
from kvdist.transport.base import Arrived, Route
from kvdist.transport.zeromq import ZeroMQTransport

SLICE_BYTES = 2 << 20
SLICES = 25
"""How many are in use at once: more than any cache holds, as in a step that moves a model."""
SMALL_BYTES = 128 << 10
"""Of a message that is sent without a copy."""
REPEATS = 7

HAMMER = f"""
import sys, threading, numpy
threading.Thread(target=lambda: (sys.stdin.read(), stop.append(1)), daemon=True).start()
stop = []
ours, theirs = (numpy.ones({SLICE_BYTES} * {SLICES}, numpy.uint8) for _ in range(2))
print(flush=True)
while not stop:
    numpy.copyto(ours, theirs)
"""
"""A program that moves bytes on the other core."""


Statistic = Callable[[Sequence[float]], float]
"""What is taken of repeats: the median for a machine as busy as it is, the least for one without other work."""


def measure_costs(of: Statistic = median) -> Costs:
    """The costs of this machine."""
    small, large = carrying(SMALL_BYTES, 200, of), carrying(SLICE_BYTES, SLICES, of)
    byte = (large - small) / (SLICE_BYTES - SMALL_BYTES)
    message = small - SMALL_BYTES * byte
    copying, summing, updating = memory_costs(of)
    wake_s = waking_s(200, of)
    return Costs(
        give_message_s=max(0.0, message.give_s),
        give_byte_s=max(0.0, byte.give_s),
        send_message_s=max(0.0, message.send_s),
        send_byte_s=byte.send_s,
        receive_message_s=max(0.0, message.receive_s),
        receive_byte_s=byte.receive_s,
        take_message_s=max(0.0, message.take_s),
        take_byte_s=max(0.0, byte.take_s),
        wake_s=wake_s,
        sum_byte_s=summing,
        update_byte_s=updating,
        copy_byte_s=copying,
    )


def memory_costs(of: Statistic) -> tuple[float, float, float]:
    """Seconds of a byte that is copied, summed with one of another worker, and made into a weight."""
    grads, others, outs = ([np.ones(SLICE_BYTES // 4, np.float32) for _ in range(SLICES)] for _ in range(3))
    kernels = choose(kernels_here())
    updater = Updater(create("sgd"), kernels)

    def add(i: int) -> None:
        kernels.weighted_sum([grads[i], others[i]], [1.0, 1.0], DType.FLOAT32, outs[i])

    def update(i: int) -> None:
        updater.update(i, outs[i], [grads[i]], [1.0], DType.FLOAT32, others[i])

    with hammering():
        copying = repeated(lambda i: np.copyto(outs[i], grads[i]), of) / SLICE_BYTES
        return copying, repeated(add, of) / (2 * SLICE_BYTES), repeated(update, of) / SLICE_BYTES


def kernels_here() -> str:
    """What a server with enough to do comes to use."""
    return "numba" if importlib.util.find_spec("numba") else "numpy"


@contextlib.contextmanager
def hammering() -> Iterator[None]:
    """Another process copies memory as fast as it can until the block ends."""
    with subprocess.Popen([sys.executable, "-c", HAMMER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None and other.stdout is not None
        other.stdout.readline()
        try:
            yield
        finally:
            other.stdin.close()


@dataclass(frozen=True)
class Carrying:
    """Seconds of one message over TCP on the loopback, by thread."""

    give_s: float
    """The thread that sends it: until the transport has it."""
    send_s: float
    """The transport's thread there, which the kernel's work is part of."""
    receive_s: float
    """The transport's thread at the other end."""
    take_s: float
    """The thread that takes it from there."""

    def __sub__(self, other: Carrying) -> Carrying:
        return Carrying(*(mine - its for mine, its in zip(vars(self).values(), vars(other).values(), strict=True)))

    def __truediv__(self, amount: float) -> Carrying:
        return Carrying(*(value / amount for value in vars(self).values()))

    def __rmul__(self, amount: float) -> Carrying:
        return Carrying(*(amount * value for value in vars(self).values()))


def carrying(size: int, count: int, of: Statistic) -> Carrying:
    """What a message of three frames, the last of `size` bytes, costs both ends."""
    payloads = [memoryview(bytes([i % 256]) * size) for i in range(count)]
    with connected() as (transport, route):
        rounds = [one_round(transport, route, payloads) for _ in range(REPEATS + 1)][1:]
    return Carrying(*(of(one) for one in zip(*(vars(found).values() for found in rounds), strict=True)))


def waking_s(count: int, of: Statistic) -> float:
    """Processor time of one end, all its threads, that says little and waits for the answer, with cold caches."""
    spent = []
    with connected() as (transport, route):
        for _ in range(count):
            CACHES.fill(COLD_BYTES)
            start = time.process_time()
            there(transport, route)
            spent.append(time.process_time() - start)
    return of(spent)


@contextlib.contextmanager
def connected() -> Iterator[tuple[ZeroMQTransport, Route]]:
    """A transport, and the route to another process that takes what it sends."""
    transport = ZeroMQTransport(Limits())
    command = worker_command("carry_worker.py", transport.bind("tcp://127.0.0.1:0"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment()) as other:
        try:
            yield transport, arrived(transport).route
        finally:
            assert other.stdin is not None
            other.stdin.close()
    transport.close()


def one_round(transport: ZeroMQTransport, route: Route, payloads: list[memoryview]) -> Carrying:
    start, threads = there(transport, route), (time.thread_time(), time.process_time())
    for payload in payloads:
        transport.send(route, [b"#" * 64, bytes(64), payload])
    own_s = time.thread_time() - threads[0]
    end = there(transport, route)
    all_s = time.process_time() - threads[1] - (time.thread_time() - threads[0])
    take_s = end[0] - start[0]
    return Carrying(own_s, all_s, end[1] - start[1] - take_s, take_s) / len(payloads)


def there(transport: ZeroMQTransport, route: Route) -> tuple[float, float]:
    """The processor time of the other end, once it has taken all that was sent: of its thread, and of all threads."""
    transport.send(route, [b"?"])
    answer = json.loads(bytes(arrived(transport).frames[0]))
    return answer[0], answer[1]


def arrived(transport: ZeroMQTransport) -> Arrived:
    """The next message."""
    while True:
        for event in transport.recv(10.0):
            if isinstance(event, Arrived):
                return event


def repeated(action: Callable[[int], object], of: Statistic) -> float:
    """Processor seconds of one call, of the averages over calls with 0 to `SLICES` - 1."""
    averages = []
    for _ in range(REPEATS + 1):
        start = time.thread_time()
        for i in range(SLICES):
            action(i)
        averages.append((time.thread_time() - start) / SLICES)
    return of(averages[1:])


if __name__ == "__main__":
    for name, value in vars(measure_costs()).items():
        print(f"{name:20} {value:.3g}")
