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
SMALL_BYTES = 64
REPEATS = 5


def measure_costs() -> Costs:
    """The costs of this machine, each the least of some repeats: what disturbs it is not part of it."""
    grads = [np.ones(SLICE_BYTES // 4, np.float32) for _ in range(2)]
    out = np.empty_like(grads[0])
    copying = least(lambda: np.copyto(out, grads[0]), 50, time.thread_time)
    summing = least(lambda: REFERENCE.weighted_sum(grads, [1.0, 1.0], DType.FLOAT32, out), 50, time.thread_time)
    updater = Updater(create("sgd"))
    updating = least(lambda: updater.update(0, out, grads[:1], [1.0], DType.FLOAT32, out), 20, time.thread_time)
    message, large = message_s(SMALL_BYTES, 2000), message_s(SLICE_BYTES, 60)
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
    """Processor time of one message of three frames over TCP on the loopback: both ends, and what carries the bytes."""
    frames = [bytes(64), bytes(64), bytes(size)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as server, context.socket(zmq.DEALER) as client:
        port = server.bind_to_random_port("tcp://127.0.0.1")
        client.connect(f"tcp://127.0.0.1:{port}")

        def send_and_receive() -> None:
            client.send_multipart(frames, copy=False)
            server.recv_multipart(copy=False)

        send_and_receive()
        return least(send_and_receive, count, time.process_time)


def least(action: Callable[[], object], count: int, clock: Callable[[], float]) -> float:
    """Seconds of one call by a clock of processor time: the least of the averages over `count` calls."""
    averages = []
    for _ in range(REPEATS):
        start = clock()
        for _ in range(count):
            action()
        averages.append((clock() - start) / count)
    return min(averages)
