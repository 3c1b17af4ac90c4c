"""Compression on a real cluster, beside what the mirrored system tests: ``compression.py SCENARIO``."""

import sys

import numpy as np
import torch

from kvdist import Trainer, kv
from kvdist.errors import InitMismatch

THRESHOLD = 0.5


def trained(rank, gradients, **settings):
    """The weights after steps with these gradients on this worker, at learning rate 1, averaged over the workers."""
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(200, 100))]
    frozen = torch.nn.Parameter(torch.full((4,), 1 / 3), requires_grad=False)
    trainer = Trainer([*weights, frozen], "sgd", {"learning_rate": 1.0}, **settings)
    for gradient in gradients:
        for weight in weights:
            weight.grad = torch.full_like(weight, gradient)
        trainer.step()
    trainer.close()
    assert (frozen == 1 / 3).all(), "what is not trained is not compressed"
    (value,) = {float(one) for weight in weights for one in weight.detach().unique()}
    return value


def trainer():
    """Gradients of a quarter and, from the second worker, of an eighth: each second and each fourth of them counts."""
    rank = RANK
    n = WORKERS
    gradients = [0.25 if rank == 0 else 0.125] * 4
    # In four steps worker 0 sends 2 · .5, each other .5.
    expected = -(2 * THRESHOLD + (n - 1) * THRESHOLD) / n
    parameters = {"type": "2bit", "threshold": THRESHOLD}
    for update_on_kvstore in (True, False):
        for more in ({}, {"pull": "fp16"}):
            settings = {"compression_params": parameters | more, "update_on_kvstore": update_on_kvstore}
            found = trained(rank, gradients, kvstore="dist", **settings)
            assert found == expected, (update_on_kvstore, more, found, expected)
    # A store that was told before by its user; then the trainer says nothing.
    store = kv.create("dist")
    store.set_gradient_compression(parameters)
    for update_on_kvstore in (False,):
        assert trained(rank, gradients, kvstore=store, update_on_kvstore=update_on_kvstore) == expected
    store.close()
    # A device is compressed even where it is the only one.
    assert trained(rank, gradients, kvstore="device", compression_params=parameters) == (-1 if rank == 0 else -0.5)


def overlapped():
    """Gradients that leave during the backward pass are compressed as well."""
    weight = torch.nn.Parameter(torch.zeros(5))
    parameters = {"type": "2bit", "threshold": THRESHOLD}
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="dist", overlap=True,
                      compression_params=parameters)  # fmt: skip
    for _ in range(4):
        weight.grad = None
        (weight * (0.25 if RANK == 0 else 0.125)).sum().backward()
        trainer.step()
    assert (weight == -(2 * THRESHOLD + (WORKERS - 1) * THRESHOLD) / WORKERS).all(), weight
    trainer.close()


def loops():
    """A loop over a thousand small keys has the results of list calls; a slice of many travels in parts."""
    store = kv.create("dist")
    store.set_gradient_compression({"type": "2bit"})
    store.set_optimizer("test")
    keys = list(range(300))
    shapes = [(1 + key % 37,) for key in keys]
    store.init(keys, [np.zeros(shape, np.float32) for shape in shapes])
    for step in range(1, 6):
        for key, shape in zip(keys, shapes, strict=True):
            store.push(key, np.full(shape, 0.5 if key % 2 else 0.25, np.float32))
        outs = [np.empty(shape, np.float32) for shape in shapes]
        for future in [store.pull_async(key, out=out) for key, out in zip(keys, outs, strict=True)]:
            future.result()
        for key, out in zip(keys, outs, strict=True):
            assert (out == WORKERS * 0.5 * (step if key % 2 else step // 2)).all(), (key, step, out)
    store.close()


def halves():
    """The same values on every worker and server, and twice as many of them in a byte."""
    store = kv.create("dist")
    store.set_gradient_compression({"type": "topk", "ratio": 1, "pull": "bf16"})
    store.set_optimizer("test")
    sizes = [5, 1 << 20, 70_001]
    store.init([0, 1, 2], [np.zeros(size, np.float32) for size in sizes])
    outs = [np.empty(size, np.float32) for size in sizes]
    for step in range(1, 4):
        grads = [np.full(size, 1.0 + RANK, np.float32) for size in sizes]
        store.pushpull([0, 1, 2], grads, out=outs)
        assert all((out == step * WORKERS * (WORKERS + 1) / 2).all() for out in outs), outs
        (shown,) = store.pushpull_shared([1], [None], [outs[1]])
        assert shown is None, "what is rounded for everybody is not read where it lies"
    store.push([0, 1, 2], [np.full(size, 0.001, np.float32) for size in sizes])
    total = np.float32(3 * WORKERS * (WORKERS + 1) / 2) + np.float32(0.001 * WORKERS)
    (value,) = {float(one) for out in store.pull([0, 1, 2]) for one in np.unique(out)}
    assert abs(value - total) < total / 256 and value != total
    store.close()


def disagreement():
    """Workers that say different things are told so, all of them."""
    store = kv.create("dist")
    try:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5 + RANK})
    except InitMismatch as error:
        assert "2bit with the threshold 0.5" in str(error) and "2bit with the threshold 1.5" in str(error), error
    else:
        raise AssertionError("workers compress differently")
    store.set_gradient_compression({"type": "2bit"})
    store.leave_uncompressed(["a"] if RANK else [])
    store.init(["b"], [np.zeros(3, np.float32)])
    store.pushpull("b", [np.full(3, 0.5, np.float32)], out=[out := np.empty(3, np.float32)])
    assert (out == 0.5 * WORKERS).all()
    store.close()


if __name__ == "__main__":
    first = kv.create("dist")
    RANK, WORKERS = first.rank, first.num_workers
    for name in sys.argv[1:]:
        {one.__name__: one for one in (trainer, overlapped, loops, halves, disagreement)}[name]()
    print(f"checked on {RANK} of {WORKERS}", flush=True)
    first.close()
