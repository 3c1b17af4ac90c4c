"""How workers end that have lost a peer."""

from __future__ import annotations

import pytest

from tests.integration.processes import EXIT_PEER_LOST

LOSES_A_SERVER = """
    import atexit
    import threading
    import time

    import torch
    from kvdist import kv

    atexit.register(print, "a handler of the script ran", flush=True)
    store = kv.create("dist")
    store.init("w", torch.zeros(10))
    if store.rank == 1:
        threading.Event().wait()  # never contributes, so that the other one waits

    matrix, is_busy = torch.ones(600, 600), threading.Event()

    def ask_again(future):
        # Answered when the store has ended already, by the thread that ends it.
        store.pushpull_async("w", torch.ones(10)).add_done_callback(compute)

    def compute(future):
        is_busy.set()
        end = time.monotonic() + 2.0
        while time.monotonic() < end:
            matrix @ matrix
        print("a callback ran to its end", flush=True)

    waits = store.pushpull_async("w", torch.ones(10))
    waits.add_done_callback(ask_again)
    print("waiting", flush=True)
    is_busy.wait()
    waits.result()
"""


def test_a_worker_whose_callbacks_use_torch_while_it_ends_after_a_loss_ends_with_its_error(job, script):
    pytest.importorskip("torch")
    job.cluster(2, 1, script(LOSES_A_SERVER))
    job.line("worker-0", "waiting")
    job.kill("server-0")
    job.finish(but="worker-1")
    worker = job.processes["worker-0"]
    assert worker.lines_with("PeerLostError: server-0"), job.transcript()
    assert len(worker.lines_with("/kvdist/")) <= 3, job.transcript()
    assert worker.code == EXIT_PEER_LOST, job.transcript()
    assert worker.lines_with("a callback ran to its end") and worker.lines_with("a handler of the script ran")
    job.kill("worker-1")
    job.finish()
