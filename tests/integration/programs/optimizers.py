"""What optimizers on servers do, one scenario a function: ``optimizers.py SCENARIO``."""

import hashlib
import sys

import numpy as np

from kvdist import OptimizerMismatch, kv, optimizer

SHAPES = {"small": (2, 3), "big": (1200, 1200)}


def ones(number=1.0):
    return [np.full(shape, number, np.float32) for shape in SHAPES.values()]


def started():
    """A store with a small and a big key of ones."""
    store = kv.create("dist")
    store.init(list(SHAPES), ones())
    return store


def all_are(store, number):
    values = store.pull(list(SHAPES))
    assert all((value == number).all() for value in values), ([value.flat[0] for value in values], number)


def gluon_step():
    """One parameter of ones, sgd with lr 1, the loss (rank + 1)·w: a step takes n(n+1)/2 away."""
    import torch

    from kvdist import Trainer

    store = kv.create("dist")
    n = store.num_workers
    for on_store in (True, False):
        own = kv.create("dist")
        net = torch.nn.Linear(10, 1, bias=False)
        torch.nn.init.ones_(net.weight)
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 1.0}, kvstore=own, update_on_kvstore=on_store)
        ((store.rank + 1) * net(torch.eye(10))).sum().backward()
        trainer.step(1)
        assert (net.weight == 1 - n * (n + 1) // 2).all(), net.weight
        own.close()
    return store


def learning_rate():
    """A learning rate, multiplier or scale that changes in mid-run is the next push's."""
    store = started()
    n = store.num_workers
    chosen = optimizer.create("sgd", learning_rate=1.0)
    store.set_optimizer(chosen)
    value = 1.0
    for lr, rescale in ((1.0, 1.0), (0.5, 1.0), (0.5, 2.0), (0.25, 0.5)):
        chosen.learning_rate, chosen.rescale_grad = lr, rescale
        store.push(list(SHAPES), ones())
        value -= lr * rescale * n
        all_are(store, value)
    chosen.lr_mult = {"small": 2.0}
    store.push(list(SHAPES), ones())
    small, big = store.pull(list(SHAPES))
    assert (small == value - 2 * 0.125 * n).all() and (big == value - 0.125 * n).all()
    return store


def trainer_learning_rate():
    """`Trainer.set_learning_rate` reaches the servers."""
    import torch

    from kvdist import Trainer

    store = kv.create("dist")
    weight = torch.nn.Parameter(torch.zeros(3))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
    for lr, expected in ((1.0, -1.0), (0.25, -1.25), (2.0, -3.25)):
        trainer.set_learning_rate(lr)
        weight.grad = None
        weight.sum().backward()
        trainer.step()  # gradients are averaged over the workers
        assert (weight == expected).all(), weight
    return store


def disagreement():
    """Workers with different learning rates in one round get an error that names them, all of them, and can go on."""
    store = started()
    n = store.num_workers
    chosen = optimizer.create("sgd", learning_rate=1.0)
    store.set_optimizer(chosen)
    chosen.learning_rate = 1.0 if store.rank else 0.5
    for call in (lambda: store.pushpull("small", ones()[0]), lambda: store.push_async("big", ones()[1]).result()):
        try:
            call()
        except OptimizerMismatch as error:
            assert all(f"worker-{rank} says lr" in str(error) for rank in range(n)), error
            print(f"refused: {error}", flush=True)
        else:
            raise AssertionError("two learning rates in one round")
    chosen.learning_rate = 1.0
    store.push(list(SHAPES), ones())
    all_are(store, 1 - n)
    return store


def lost_push():
    """The error of a push that nobody waited for comes with the next call."""
    store = started()
    chosen = optimizer.create("sgd", learning_rate=1.0)
    store.set_optimizer(chosen)
    chosen.learning_rate = 1.0 + store.rank
    store.push("small", ones()[0])
    try:
        for _ in range(3):
            store.barrier()
            store.pull("small")
    except OptimizerMismatch as error:
        print(f"refused: {error}", flush=True)
    else:
        raise AssertionError("the error of the push was lost")
    return store


def same_from_all():
    """The same optimizer from every worker, and once more, is one call that keeps the state."""
    store = started()
    for _ in range(3):
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        store.push(list(SHAPES), ones())
    n = store.num_workers
    all_are(store, 1 - n * (1 + 1.5 + 1.75))
    return store


def different():
    """A different optimizer from another worker is an error there, and from the same worker too."""
    store = started()
    if store.rank == 0:
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    store.barrier()
    if store.rank != 0:
        for name, options in (("adam", {}), ("sgd", {"learning_rate": 1.0, "momentum": 0.9})):
            refused(store, "worker-0 set the optimizer of this store to sgd", name, **options)
    store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    refused(store, "cannot be changed", "sgd", learning_rate=1.0, momentum=0.9)
    store.push(list(SHAPES), ones())
    all_are(store, 1 - store.num_workers)
    return store


def refused(store, text, name, **options):
    try:
        store.set_optimizer(name, **options)
    except OptimizerMismatch as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"{name} was taken")


def same_bits():
    """Prints a digest of weights after steps with gradients whose sum depends on the order of its terms."""
    store = started()
    store.set_optimizer("adam", learning_rate=0.01)
    random = np.random.default_rng(store.rank)
    for _ in range(5):
        store.push(list(SHAPES), [random.normal(size=shape).astype(np.float32) for shape in SHAPES.values()])
    values = store.pull(list(SHAPES))
    print("digest", hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest(), flush=True)
    return store


def asynchronous_without():
    """An asynchronous store without an optimizer refuses what it cannot sum, and says what to do."""
    store = kv.create("dist_async")
    store.init("w", np.ones(3, np.float32))
    try:
        store.pushpull("w", np.ones(3, np.float32))
    except ValueError as error:
        print(f"refused: {error}", flush=True)
    store.barrier()
    store.set_optimizer("test")
    store.barrier()
    store.push("w", np.ones(3, np.float32))
    store.pull("w")
    store.barrier()
    assert (store.pull("w") == 1 + store.num_workers).all()
    return store


if __name__ == "__main__":
    used = globals()[sys.argv[1]]()
    print(f"checked on {used.rank} of {used.num_workers}", flush=True)
    used.close()
