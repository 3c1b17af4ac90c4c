"""What messages and bytes cost this machine's processor: measured, for the model of `scale.py`."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import zmq
from modelled import Costs

from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer.registry import create
from kvdist.optimizer.updater import Updater

SLICE_BYTES = 4 << 20
SLICES = 25
"""How many are in use at once: more than any cache holds, as in a step that moves a model."""
SMALL_BYTES = 64
REPEATS = 5


def measure_costs() -> Costs:
    """The costs of this machine, each the least of some repeats: what disturbs it is not part of it."""
    grads, others, outs = ([np.ones(SLICE_BYTES // 4, np.float32) for _ in range(SLICES)] for _ in range(3))
    updater = Updater(create("sgd"))

    def add(i: int) -> None:
        REFERENCE.weighted_sum([grads[i], others[i]], [1.0, 1.0], DType.FLOAT32, outs[i])

    def update(i: int) -> None:
        updater.update(i, outs[i], [grads[i]], [1.0], DType.FLOAT32, others[i])

    copying = least(lambda i: np.copyto(outs[i], grads[i]), SLICES, time.thread_time)
    summing = least(add, SLICES, time.thread_time)
    updating = least(update, SLICES, time.thread_time)
    message, large = message_s(SMALL_BYTES, 2000), message_s(SLICE_BYTES, SLICES)
    per_byte = (large - message) / SLICE_BYTES
    # Both ends work in one process here, and nobody can tell how they share the work: half each.
    return Costs(
        send_message_s=message / 2,
        send_byte_s=per_byte / 2,
        receive_message_s=message / 2,
        receive_byte_s=per_byte / 2,
        sum_byte_s=summing / (2 * SLICE_BYTES),
        update_byte_s=updating / SLICE_BYTES,
        copy_byte_s=copying / SLICE_BYTES,
    )


def message_s(size: int, count: int) -> float:
    """Processor time of one message of three frames over TCP on the loopback: both ends, and what carries the bytes.

    What has arrived is kept until `count` messages later, as a server keeps contributions and a worker values.
    """
    payloads = [bytes(size) for _ in range(count)]
    kept: list[object] = [None] * count
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")

        def send_and_receive(i: int) -> None:
            client.send_multipart([bytes(64), bytes(64), payloads[i]], copy=False)
            kept[i] = server.recv_multipart(copy=False)

        return least(send_and_receive, count, time.process_time)


def least(action: Callable[[int], object], count: int, clock: Callable[[], float]) -> float:
    """Seconds of one call by a clock of processor time: the least of the averages over calls with 0 to `count` - 1."""
    averages = []
    for _ in range(REPEATS + 1):
        start = clock()
        for i in range(count):
            action(i)
        averages.append((clock() - start) / count)
    return min(averages[1:])
