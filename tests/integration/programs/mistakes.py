"""Workers that do something wrong, one scenario a function: ``mistakes.py SCENARIO [ARGUMENT…]``.

A scenario prints the message that its mistake brings, and goes on to show that nothing else broke.
"""

import os
import sys

import numpy as np

import kvdist.protocol.wire
from kvdist import KvdistError, kv


def say(text):
    print(text, flush=True)


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def attempt(call):
    """Print what a call raises."""
    try:
        call()
    except (KvdistError, ValueError, TypeError) as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("nothing was raised")


def works(store):
    """A round goes through."""
    store.init("after", ones(3))
    value = ones(3)
    store.pushpull("after", value)
    assert (value == store.num_workers).all()
    say("works")


def calls():
    """Wrong calls raise before anything is sent."""
    store = kv.create("dist")
    store.init("w", ones(3, 2))
    attempt(lambda: store.push("unknown", ones(3)))
    attempt(lambda: store.pull("unknown"))
    attempt(lambda: store.push("w", ones(2, 3)))
    attempt(lambda: store.push("w", ones(3, 2, dtype=bool)))
    attempt(lambda: store.pull("w", out=ones(3)))
    attempt(lambda: store.push(["w", "unknown"], [ones(3, 2), ones(1)]))
    attempt(lambda: store.init("w", ones(5)))
    attempt(lambda: store.init("z", "words"))
    attempt(lambda: store.init("z", ones(2, dtype=np.complex64)))
    attempt(lambda: store.barrier(timeout=0))
    attempt(lambda: store.set_updater(lambda key, received, stored: None))
    attempt(lambda: store.set_optimizer("sgdd"))
    attempt(lambda: kv.create("dist_sink"))
    works(store)
    store.close()


def shapes():
    """Worker 1 declares another shape; then another dtype; then a list of which one key differs."""
    store = kv.create("dist")
    odd = store.rank == 1
    attempt(lambda: store.init("w", ones(4 if odd else 3)))
    attempt(lambda: store.init("v", ones(3, dtype=np.float64 if odd else np.float32)))
    attempt(lambda: store.init(["a", "u"], [ones(2), ones(4 if odd else 3)]))
    works(store)
    store.close()


def models():
    """Workers whose networks, frozen layers or settings differ; each try is a store of its own."""
    import torch

    from kvdist import Trainer

    odd = kv.create("dist").rank == 1
    tries = [
        ([torch.nn.Linear(3, 2, bias=not odd)], "sgd", {}, None),
        ([torch.nn.Linear(3, 2), torch.nn.Linear(2, 2).requires_grad_(not odd)], "sgd", {}, None),
        ([torch.nn.Linear(3, 2)], "sgd", {"learning_rate": 0.5 if odd else 0.25}, False),
    ]
    for layers, name, numbers, on_store in tries:
        store = kv.create("dist")
        net = torch.nn.Sequential(*layers)
        trainer = Trainer(net.parameters(), name, numbers, kvstore=store, update_on_kvstore=on_store)
        attempt(trainer.broadcast_parameters)
    works(kv.create("dist"))


def stores():
    """Worker 1 creates its store with another type."""
    store = kv.create("dist_async" if os.environ["KVDIST_RANK"] == "1" else "dist_sync")
    attempt(lambda: store.init("w", ones(3)))
    store.close()


def create():
    """Only try to join."""
    attempt(lambda: kv.create("dist"))


def other_version():
    """Join with a message of another version of the protocol."""
    kvdist.protocol.wire.VERSION += 1
    attempt(lambda: kv.create("dist"))


def rounds(fifo):
    """Two rounds, and between them the test does what it likes."""
    store = kv.create("dist")
    store.init("w", ones(3))
    for _ in range(2):
        value = ones(3)
        store.pushpull("w", value)
        assert (value == store.num_workers).all()
        say("round")
        if store.rank == 0:
            with open(fifo, "rb") as words:
                words.read()
        store.barrier()
    store.close()
    say("served to the end")


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
