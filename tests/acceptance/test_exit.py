"""How workers end that have lost a peer, and what becomes of those that do not end."""

from __future__ import annotations

import sys

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


DOES_NOT_END = """
    import os, signal, sys, threading
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", np.zeros(2, np.float32))
    store.pushpull("w", np.ones(2, np.float32))
    store.close()
    if store.rank == 1 and sys.argv[1] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif store.rank == 1 and sys.argv[1] == "a pool":
        ThreadPoolExecutor().submit(threading.Event().wait)
    elif store.rank == 1:
        threading.Thread(target=threading.Event().wait).start()
"""
GOES_ON = ("--on-loss", "continue", "--restart", "3")


@pytest.mark.parametrize(
    ("how", "options", "code"),
    [("stopped", GOES_ON, 0), ("a thread", (), 137), pytest.param("a pool", (), 137, marks=pytest.mark.slow)],
)
def test_a_worker_that_does_not_end_after_its_goodbye_is_told_of_and_killed(job, script, how, options, code):
    launcher = job.launch(2, 1, sys.executable, script(DOES_NOT_END), how, options=options)
    assert job.finish() == {"launcher": code}, job.transcript()
    why = "has been stopped by a signal for 3 s" if how == "stopped" else "the main thread ended 10 s ago"
    assert launcher.lines_with(why), job.transcript()
    (waits,) = launcher.lines_with(", and kills it in 5 s")
    assert "the job waits for the end of worker-1 (pid " in waits
    assert launcher.lines_with("was killed by signal 9 (SIGKILL)"), job.transcript()
