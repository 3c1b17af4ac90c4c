"""The mirrored system's own distributed tests of arrays and trainers: ``mirrored.py SCENARIO STORE``.

Shapes, keys and expected numbers are theirs. Every worker checks by itself.
"""

import sys

import numpy as np

from kvdist import Trainer, kv

SMALL, BIG, UNEVEN = (2, 3), (1200, 1200), (1211, 1211)
RATE = 2
ROUNDS = 7


def triangle(n):
    """1 + 2 + … + n: what the workers' ranks, from 1, sum up to."""
    return n * (n + 1) // 2


def updates(store):
    """A gradient of rank + 1 from every worker adds 2·n(n+1)/2 to a weight in each round: 57, 113, … 393 for 7."""
    shapes = {"3": SMALL, "5": SMALL, "7": SMALL, "99": BIG, "101": UNEVEN}
    halves = {"4": SMALL, "6": SMALL, "8": SMALL, "100": BIG}
    values = {key: np.ones(shape, np.float32) for key, shape in shapes.items()}
    values |= {key: np.ones(shape, np.float16) for key, shape in halves.items()}
    store.set_optimizer("test", rescale_grad=RATE)
    store.init(list(values), list(values.values()))
    expected = []
    for i in range(ROUNDS):
        expected.append(1 + (i + 1) * RATE * triangle(store.num_workers))
        for key, value in values.items():
            grad = np.full_like(value, store.rank + 1)
            store.push(key, grad)
            out = np.empty_like(value)
            store.pull(key, out=out)
            assert (out == expected[-1]).all(), (key, i, out.flat[0], expected[-1])
            assert (grad == store.rank + 1).all(), "what was pushed is not written"
    if store.num_workers == 7:
        assert (expected[0], expected[1], expected[-1]) == (57, 113, 393)


def devices(store):
    """The same with two arrays per key, pushed and pulled, and in one call, and with lists of lists."""
    keys = ["200", "300"]
    values = [np.ones(SMALL, np.float32), np.ones(BIG, np.float32)]
    store.set_optimizer("test", rescale_grad=RATE)
    store.init(keys, values)
    for i in range(3):
        grads = [[np.full_like(value, store.rank + 1) for _ in range(2)] for value in values]
        outs = [[np.empty_like(value) for _ in range(2)] for value in values]
        if i == 0:
            for key, grad, out in zip(keys, grads, outs, strict=True):
                store.push(key, grad)
                store.pull(key, out=out)
        else:
            store.pushpull(keys, grads, out=outs)
        expected = 1 + (i + 1) * RATE * 2 * triangle(store.num_workers)
        assert all((out == expected).all() for per_key in outs for out in per_key), (i, outs[0][0][0, 0], expected)


def replaced(store):
    """Without an optimizer the sum over devices and workers replaces the value, each time anew, in every array."""
    keys = [3, 99]
    arrays = [[np.empty(shape, np.float32) for _ in range(2)] for shape in (SMALL, BIG)]
    store.broadcast(keys, [np.full(SMALL, store.rank + 8.0, np.float32), np.ones(BIG, np.float32)], arrays)
    assert all((one == 8).all() for one in arrays[0]) and all((one == 1).all() for one in arrays[1])
    for _ in range(3):
        for per_key in arrays:
            for one in per_key:
                one.fill(store.rank + 1)
        store.pushpull(keys, arrays)
        assert all((one == 2 * triangle(store.num_workers)).all() for per_key in arrays for one in per_key)
    # A key that is named twice is summed over all its arrays.
    store.push([3, 3, 99], [arrays[0][0], arrays[0], None])
    assert (store.pull(3) == 3 * 2 * triangle(store.num_workers) * store.num_workers).all()


def first_values(store):
    """Two hundred keys of two types and sizes: every worker sees the value that rank 0 gave."""
    for start, shape in ((200, SMALL), (300, (120, 120))):
        keys = [str(start + position) for position in range(100)]
        dtypes = [np.float32] * 50 + [np.float16] * 50
        values = [np.full(shape, i if store.rank == 0 else -1, dtype) for i, dtype in enumerate(dtypes)]
        store.init(keys[0], values[0])
        store.init(keys, values)
        for i, (value, dtype) in enumerate(zip(store.pull(keys), dtypes, strict=True)):
            assert (value == i).all() and value.dtype == dtype


def together(store):
    """Means over the workers, and what rank 0 has, beside a store that has an optimizer."""
    n, rank = store.num_workers, store.rank
    mean = (n - 1) / 2
    store.set_optimizer("test")
    store.init([0], [np.zeros(3, np.float32)])
    for _ in range(2):
        assert store.average(rank) == mean and store.average(np.float32(rank)) == mean
        assert (store.average(np.full((2, 2), rank)) == mean).all()
        assert store.average(float(rank), counts=rank == n - 1) == n - 1
        assert np.isnan(store.average(1.0, counts=False))
    (own, other) = store.from_rank_0([np.arange(5) * (rank + 1), np.full((2, 2), rank, np.uint8)])
    assert own.tolist() == [0, 1, 2, 3, 4] and own.dtype == np.int64 and (other == 0).all()
    assert store.num_dead_nodes() == 0
    store.pushpull([0], [out := np.full(3, rank + 1, np.float32)])
    assert (out == triangle(n)).all()
    if n > 1:
        try:
            store.average(np.zeros(2 + (rank == 1)))
        except ValueError as error:
            assert "average of float64 of shape (3,)" in str(error) and "worker-1" in str(error), error
        else:
            raise AssertionError("workers averaged arrays of different shapes")
    assert store.average(1.0) == 1


COMPRESSED = {"1000": SMALL, "1200": UNEVEN, "1300": BIG}
HALF, ONE = np.float32(0.5), np.float32(1)


def pushed(store, keys, number):
    """The value of all keys after every worker has pushed this number everywhere."""
    for key, shape in keys.items():
        store.push(key, np.full(shape, number, np.float32))
    (value,) = {float(one) for key in keys for one in np.unique(store.pull(key))}
    return value


def agrees_with_a_simulation(store, keys, worth_of):
    """Equal random gradients from all workers: what is added is what one of them sends, times their number."""
    rng = np.random.default_rng(123)
    residuals = {key: np.zeros(shape, np.float32) for key, shape in keys.items()}
    values = dict(zip(keys, store.pull(list(keys)), strict=True))
    for i in range(ROUNDS):
        for key, shape in keys.items():
            gradient = rng.uniform(0, 1, shape).astype(np.float32)
            residuals[key] += gradient
            worth = worth_of(residuals[key])
            residuals[key] -= worth
            if i % 2:
                store.push(key, gradient)
                out = store.pull(key)
            else:
                out = np.empty(shape, np.float32)
                store.pushpull(key, gradient, out=out)
            assert (out - values[key] == store.num_workers * RATE * worth).all(), (key, i)
            values[key] = out


def two_bits(store):
    """Two bits with a threshold of .5: 0, 7, 7, 14, 21 with seven workers; first values are not compressed."""
    n = store.num_workers
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.set_optimizer("test", rescale_grad=RATE)
    ones = {str(int(key) + 1): shape for key, shape in COMPRESSED.items()}
    fresh = {str(int(key) + 2): shape for key, shape in COMPRESSED.items()}
    for keys, first in ((COMPRESSED, 0), (ones, 1), (fresh, 0)):
        store.init(list(keys), [np.full(shape, first, np.float32) for shape in keys.values()])
        assert all((value == first).all() for value in store.pull(list(keys)))
    found = [pushed(store, COMPRESSED, number) for number in (0, 0.4, 0.1, 0.2, 0.3, 0.5)]
    assert found == [0, 0, n, n, 2 * n, 3 * n], found
    assert n != 7 or found[1:] == [0, 7, 7, 14, 21]
    agrees_with_a_simulation(store, fresh, lambda r: np.where(r >= HALF, HALF, np.where(r <= -HALF, -HALF, 0 * HALF)))


def one_bit(store):
    """One bit with a threshold of 0: 14, 0, 14, 28, 14 with seven workers."""
    n = store.num_workers
    store.set_gradient_compression({"type": "1bit", "threshold": 0})
    store.set_optimizer("test", rescale_grad=RATE)
    fresh = {str(int(key) + 2): shape for key, shape in COMPRESSED.items()}
    for keys in (COMPRESSED, fresh):
        store.init(list(keys), [np.zeros(shape, np.float32) for shape in keys.values()])
    found = [pushed(store, COMPRESSED, number) for number in (1, -1, 2, 0, -2)]
    assert found == [2 * n, 0, 2 * n, 4 * n, 2 * n], found
    assert n != 7 or found == [14, 0, 14, 28, 14]
    agrees_with_a_simulation(store, fresh, lambda r: np.where(r > 0, ONE, -ONE))


def step(store):
    """One step of Gluon's trainer at learning rate 1 from gradients of rank + 1: 1 - n(n+1)/2, so -27 with seven."""
    import torch

    weight = torch.nn.Parameter(torch.ones(10, 1))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
    (weight * (store.rank + 1)).sum().backward()
    trainer.step(1)
    expected = 1 - triangle(store.num_workers)
    assert (weight == expected).all(), weight
    assert store.num_workers != 7 or expected == -27


def who_updates(store):
    """The dense rows of the trainer's table, each with two devices."""
    import torch

    for wanted, expected in ((None, True), (True, True), (False, False)):
        with kv.create(store.type) as own:
            replicas = [torch.nn.Parameter(torch.zeros(10)) for _ in range(2)]
            trainer = Trainer([replicas], "sgd", {"learning_rate": 1.0}, kvstore=own, update_on_kvstore=wanted)
            for replica in replicas:
                (replica + 1).sum().backward()
            trainer.step(1)
            assert all((replica == -2 * store.num_workers).all() for replica in replicas), replicas
            for replica in replicas:
                (replica + 1).sum().backward()
            try:
                trainer.allreduce_grads()
            except RuntimeError:
                assert expected
            else:
                assert not expected


def sparse_step(store):
    """The same step with sparse gradients, of a weight that workers have and of one that only servers have."""
    import torch

    from kvdist import Embedding

    expected, ids = 1 - triangle(store.num_workers), torch.arange(2)
    layer = torch.nn.Embedding(2, 10, sparse=True, _weight=torch.ones(2, 10))
    trainer = Trainer(layer.parameters(), "sgd", {"learning_rate": 1.0}, kvstore=store)
    (layer(ids) * (store.rank + 1)).sum().backward()
    trainer.step(1)
    assert (layer.weight == expected).all(), layer.weight
    with kv.create(store.type) as own:
        own.set_optimizer("sgd", learning_rate=1.0)
        table = Embedding(2, 10, own, initializer="constant(1)")
        (table(ids) * (store.rank + 1)).sum().backward()
        table.step(1)
        assert (table(ids) == expected).all(), table(ids)


def who_updates_for_sparse_gradients(store):
    """The rows of the trainer's table for sparse gradients: servers update, and cannot be told not to."""
    import torch

    for wanted in (None, True, False):
        with kv.create(store.type) as own:
            layer = torch.nn.Embedding(2, 10, sparse=True, _weight=torch.ones(2, 10))
            settings = {"kvstore": own, "update_on_kvstore": wanted}
            trainer = Trainer(layer.parameters(), "sgd", {"learning_rate": 1.0}, **settings)
            layer(torch.arange(2)).sum().backward()
            try:
                trainer.step(1)
            except ValueError as error:
                assert wanted is False and "some gradients are sparse" in str(error)
                continue
            assert wanted is not False and (layer.weight == 1 - store.num_workers).all()


def asynchronous(store):
    """An asynchronous store always updates, and says so to whoever wants otherwise."""
    import torch

    for wanted in (None, True, False):
        with kv.create("dist_async") as own:
            replicas = [torch.nn.Parameter(torch.zeros(10)) for _ in range(2)]
            trainer = Trainer([replicas], "sgd", {"learning_rate": 1.0}, kvstore=own, update_on_kvstore=wanted)
            try:
                trainer.broadcast_parameters()
            except ValueError as error:
                assert wanted is False and "needs update_on_kvstore=True" in str(error)
                continue
            assert wanted is not False
            for replica in replicas:
                (replica + 1).sum().backward()
            trainer.step(1)
            own.barrier()
            assert (own.pull(0) == -2 * store.num_workers).all()


COMPRESSING = (two_bits, one_bit)
NUMPY = (updates, devices, replaced, first_values, together)
TORCH = (step, sparse_step, who_updates, who_updates_for_sparse_gradients, asynchronous)


if __name__ == "__main__":
    first = kv.create(sys.argv[2])
    assert first.type == sys.argv[2]
    for scenario in {"numpy": NUMPY, "torch": TORCH, "compression": COMPRESSING}[sys.argv[1]]:
        with kv.create(sys.argv[2]) as used:
            scenario(used)
    print(f"checked on {first.rank} of {first.num_workers}", flush=True)
    first.close()
