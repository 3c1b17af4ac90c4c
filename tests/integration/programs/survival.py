"""Workers of which some are lost while the others go on: ``survival.py SCENARIO [ARGUMENT…]``.

Every push is a power of two that nobody else pushes, so each element of a weight says whose pushes are in it, and no
push can be counted twice without being seen.
"""

import ast
import os
import signal
import sys
import threading
import time

import numpy as np

from kvdist import kv

STEPS = 16
"""Of all workers; three of them fit into the 53 bits of a float64."""
SIZES = {"small": 3, "middle": 5_000, "large": 1_200_000, "whole": 60_000}
"""One is cut over all servers, others live on one."""


def say(text):
    print(text, flush=True)


def started(mode="dist"):
    store = kv.create(mode)
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(list(SIZES), [np.zeros(size) for size in SIZES.values()])
    return store


def step_of(rank, step):
    return [np.full(size, 2.0 ** (STEPS * rank + step)) for size in SIZES.values()]


def tell_weights(store):
    """Say which pushes are counted: for each worker the masks that some element has, such as 65535 for all 16."""
    found = {}
    for weights in store.pull(list(SIZES)):
        for value in np.unique(-weights).tolist():
            for rank in range(store.num_workers):
                found.setdefault(rank, set()).add((int(value) >> (STEPS * rank)) % (1 << STEPS))
    say(f"masks { ({rank: sorted(masks) for rank, masks in found.items()}) }")


def killed(victims, at, after_s, mode="dist"):
    """Some workers are killed a while after they have begun to push in a step; the others train to the end."""
    victims, changes = ast.literal_eval(victims), []
    store = started(mode)
    store.on_membership_change(lambda before, after: changes.append((before, after)))
    names = list(SIZES)
    for step in range(STEPS):
        values = step_of(store.rank, step)
        if step == int(at) and store.rank in victims:
            threading.Timer(float(after_s), os.kill, (os.getpid(), signal.SIGKILL)).start()
            store.push(names, values)
            time.sleep(60)
        store.pushpull(names, values)
    while len(store.members) > store.num_workers - len(victims):
        time.sleep(0.01)
    store.barrier()
    tell_weights(store)
    say(f"members {store.members}, {store.num_dead_nodes()} dead, {changes[-1][1]}")
    mean = np.zeros(2)
    store.init("mean", np.zeros(2))
    store.pushpull("mean", np.full(2, store.rank + 1.0), out=mean, average=True)
    if mode == "dist":  # without rounds there are no means
        assert (mean == -np.mean([rank + 1 for rank in store.members])).all(), mean
    values = np.full(3, float(store.rank))
    store.broadcast("small", values, values)
    assert (values == min(store.members)).all(), values
    say(f"mean over those that are there: {store.average(float(store.rank))}")
    store.close()
    say("went on to the end")


def raises(ranks):
    """Some workers have the same bug, one after the other."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if store.rank in ast.literal_eval(ranks) and step == 2 + store.rank:
            raise RuntimeError("this script is wrong")
        store.pushpull(names, step_of(store.rank, step))
        time.sleep(0.05)
    say("went on to the end")


def stopped():
    """Worker 1 stands still for longer than the patience; it wakes up as a zombie."""
    store = started()
    names = list(SIZES)
    for step in range(STEPS):
        if store.rank == 1 and step == 3:
            say("stands still")
            os.kill(os.getpid(), signal.SIGSTOP)
        store.pushpull(names, step_of(store.rank, step))
    tell_weights(store)
    while store.num_dead_nodes() == 0:
        time.sleep(0.01)
    say("goes on without it")
    with open(os.environ["FIFO"], "rb") as words:
        words.read()
    store.pull("small")
    store.close()
    say("went on to the end")


def only_sums():
    """A store without an optimizer cannot go on without a worker."""
    store = kv.create("dist")
    store.init("w", np.zeros(3))
    store.push("w", np.ones(3))


def updates_here():
    """Nor can a trainer whose workers update."""
    import torch

    from kvdist import Trainer

    weight = torch.nn.Parameter(torch.zeros(4))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="dist", update_on_kvstore=False)
    weight.sum().backward()
    trainer.step()


def without_servers():
    """Nor can a store that sums among workers."""
    kv.create("collective")


def clips():
    """Nor can servers that clip by a norm."""
    store = started()
    store.pushpull_clipped("small", np.ones(3), out=np.ones(3), clip_norm=1.0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
