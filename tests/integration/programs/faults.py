"""Workers to which something happens, one scenario a function: ``faults.py SCENARIO [ARGUMENT…]``.

Where a worker has to wait for the test it opens a FIFO, which blocks until the test opens the other end.
"""

import os
import sys
import time

import numpy as np
from ticking import start_ticking

from kvdist import BarrierTimeout, ForkError, KvdistError, PeerLostError, kv


def say(text):
    print(text, flush=True)


def ones(number=1.0):
    return np.full(3, number, np.float32)


def wait_for(fifo):
    """Block until the test says so."""
    with open(fifo, "rb") as words:
        words.read()


def started():
    store = kv.create("dist")
    store.init("w", ones(0))
    return store


def blocked(kind):
    """Everybody waits for something that never comes: worker 0 in `kind`, the others in something else."""
    store = started()
    store.barrier()
    call = kind if store.rank == 0 else "barrier" if kind != "barrier" else "pushpull"
    say(f"blocked in {call}, pid {os.getpid()}")
    start_ticking()
    try:
        if call == "barrier":
            store.barrier()
        elif call == "init":
            store.init("second", ones())
        elif call == "pull":
            store.push("w", ones())
            store.pull("w")
        elif call == "save":
            store.save_checkpoint(os.environ["FOLDER"], 1).result()
        elif call == "close":
            store.push("w", ones())
            store.push("w", ones())  # it leaves when the one before it is counted, which it is not without the others
            store.close()
        else:
            store.pushpull("w", ones())
    except PeerLostError as error:
        say(f"lost {error.node!r} on {error.host!r}: {error}")
        try:
            store.pull("w")
        except PeerLostError as again:
            say(f"lost again: {again}")
        say(f"{store.num_dead_nodes()} is known to be lost")
        raise
    say("the call returned")


def raises():
    """Worker 1 has a bug; the others are in a round with it."""
    store = started()
    store.pushpull("w", ones())
    if store.rank == 1:
        raise RuntimeError("the script of worker 1 is wrong")
    store.pushpull("w", ones())


def exits(code):
    """Worker 1 ends itself with an exit code, without a word to anybody."""
    store = started()
    store.pushpull("w", ones())
    if store.rank == 1:
        os._exit(int(code))
    store.pushpull("w", ones())


def exits_by_itself(code):
    """Worker 1 ends with `sys.exit`, which runs what is registered for the end of the interpreter."""
    store = started()
    store.pushpull("w", ones())
    if store.rank == 1:
        sys.exit(int(code))
    for _ in range(1000):
        store.pushpull("w", ones())
    store.barrier()
    wait_for(os.environ["FIFO"])
    store.pushpull("w", ones())


def never_joins():
    """Worker 1 ends well without a store."""
    if os.environ["KVDIST_RANK"] == "1":
        say("this one needs no store")
        return
    kv.create("dist")
    say("the call returned")


def never_joins_at_all():
    """No worker needs a store, and that is nobody's fault."""
    say("no store here")


def slow(fifo):
    """Worker 1 comes late to every round."""
    store = started()
    for i in range(2):
        if store.rank == 1:
            say("late")
            wait_for(fifo)
        value = ones(i + 1)
        store.pushpull("w", value)
        assert (value == store.num_workers * (i + 1)).all(), value
        say("a round is over")
    store.close()


def leaves_early(how):
    """Worker 1 leaves after two rounds; the others go on by themselves, to the value of their own sums."""
    store = started()
    for i in range(5):
        if store.rank == 1 and i == 2:
            if how == "close":
                store.close()
            say("left early")
            return
        value = ones(store.rank + 1)
        store.pushpull("w", value)
        members = [rank for rank in range(store.num_workers) if rank != 1 or i < 2]
        assert (value == sum(rank + 1 for rank in members)).all(), (i, value)
    store.barrier()
    store.init("new", ones(5))
    assert (store.pull("new") == 5).all()
    say("went on to the end")
    store.close()


def leaves_a_push_behind():
    """Worker 1 pushes and leaves at once; its push counts."""
    store = started()
    store.push("w", ones(store.rank + 1))
    if store.rank != 1:
        total = sum(rank + 1 for rank in range(store.num_workers))
        assert (store.pull("w") == total).all(), store.pull("w")
    say("checked")
    store.close()


def late_to_barrier(fifo):
    """Worker 1 is late to a barrier that the others give half a second; afterwards they all meet at another one.

    Worker 2 may be late too, by chance, and is named then as well; who tries again waits for worker 1 alone in the end.
    """
    store = started()
    if store.rank == 1:
        wait_for(fifo)
    else:
        missing = ()
        while missing != (1,):
            begun = time.monotonic()
            try:
                store.barrier(timeout=0.5)
            except BarrierTimeout as error:
                missing = error.missing
                assert 1 in missing and store.rank not in missing and time.monotonic() - begun >= 0.5, error
                last_words = f"timed out: {error}"
            else:
                raise AssertionError("nobody waited for worker 1")
        say(last_words)
    store.barrier()
    store.barrier(timeout=20)
    say("met")
    store.close()


def forked():
    """A store refuses to work in a forked child, and the parent's goes on."""
    store = started()
    for i in range(3):
        child = os.fork()
        if child == 0:
            for call in (
                lambda: store.push("w", ones()),
                lambda: store.pull("w"),
                lambda: store.barrier(),
                lambda: store.init("x", ones()),
                lambda: kv.create("dist"),
            ):
                try:
                    call()
                except ForkError as error:
                    say(f"in the child: {error}")
            sys.exit(0)  # runs what is registered for the end of the interpreter
        value = ones(i + 1)
        store.pushpull("w", value)
        assert (value == store.num_workers * (i + 1)).all()
        _, status = os.waitpid(child, 0)
        assert status == 0, status
    store.close()
    say("the parent went on")


def loader():
    """A DataLoader that forks feeds training."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from kvdist import SplitSampler, Trainer

    torch.set_num_threads(1)
    store = kv.create("dist")
    weight = torch.nn.Parameter(torch.zeros(4))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
    data = TensorDataset(torch.ones(24, 4))
    sampler = SplitSampler(len(data), store.num_workers, store.rank)
    for _ in range(2):
        for (batch,) in DataLoader(data, 3, sampler=sampler, num_workers=2, multiprocessing_context="fork"):
            weight.grad = None
            (batch @ weight).mean().backward()
            trainer.step()
    steps = 2 * 24 // store.num_workers // 3
    assert (weight == -steps).all(), (weight, steps)
    store.close()
    say("trained")


def after_close():
    """A closed store says so, whatever is called, and its process does not join again."""
    store = started()
    store.barrier()
    store.close()
    store.close()
    for call in (
        lambda: store.push("w", ones()),
        lambda: store.pull("w"),
        lambda: store.pushpull("w", ones()),
        lambda: store.init("x", ones()),
        lambda: store.broadcast("w", ones(), ones()),
        lambda: store.barrier(),
        lambda: store.set_optimizer("sgd"),
        lambda: kv.create("dist"),
    ):
        try:
            call()
        except KvdistError as error:
            say(f"{type(error).__name__}: {error}")


def endless(elements="3"):
    """Rounds without an end."""
    store = kv.create("dist")
    value = np.ones(int(elements), np.float32)
    store.init("w", value)
    store.pushpull("w", value)
    start_ticking()
    say("going")
    while True:
        store.pushpull("w", value)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
