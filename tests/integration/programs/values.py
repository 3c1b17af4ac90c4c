"""What values must be after pushes and pulls, one scenario a function: ``values.py SCENARIO``.

Every worker runs the scenario and checks by itself; gradients are integers, so that sums are exact.
"""

import sys

import numpy as np

from kvdist import kv

SMALL, BIG, IRREGULAR = (2, 3), (1200, 1200), (1211, 1211)
RATE = 2
ROUNDS = 7
DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8")


def exact_weights(store_type):
    """After round i every element is 1 + (i+1)·rate·n(n+1)/2, in keys that are whole, cut, and cut unevenly."""
    store = kv.create(store_type)
    n = store.num_workers
    shapes = {"3": SMALL, "5": SMALL, "7": SMALL, "99": BIG, "irregular": IRREGULAR, "one": (1,), "even": (10**6,)}
    keys = list(shapes)
    store.init(keys, [np.ones(shape, np.float32) for shape in shapes.values()])
    store.init(["4", "100"], [np.ones(SMALL, np.float16), np.ones(BIG, np.float16)])
    store.set_optimizer("test", rescale_grad=RATE)
    for i in range(ROUNDS):
        for key, shape in shapes.items():
            store.push(key, np.full(shape, store.rank + 1, np.float32))
        store.push(["4", "100"], [np.full(shape, store.rank + 1, np.float16) for shape in (SMALL, BIG)])
        expected = 1 + (i + 1) * RATE * n * (n + 1) // 2
        for key, shape in shapes.items():
            value = store.pull(key)
            assert value.shape == shape and (value == expected).all(), (key, i, value.flat[0], expected)
        out = [np.zeros(SMALL, np.float16), np.zeros(BIG, np.float16)]
        store.pull(["4", "100"], out=out)
        assert all((value == expected).all() for value in out), ("float16", i, out[0].flat[0], expected)
    return store


def sum_replaces(store_type):
    """Without an optimizer the sum over workers replaces the value, in place and with `out`."""
    store = kv.create(store_type)
    n = store.num_workers
    total = n * (n + 1) / 2
    ones = [np.ones(s, np.float32) for s in (SMALL, BIG)]
    store.broadcast(["3", "99"], ones, [np.empty(s, np.float32) for s in (SMALL, BIG)])
    for _ in range(3):
        values = [np.full(s, store.rank + 1, np.float32) for s in (SMALL, BIG)]
        store.pushpull(["3", "99"], values)
        assert all((value == total).all() for value in values)
    given, out = np.full(SMALL, store.rank + 1, np.float32), np.zeros(SMALL, np.float32)
    store.pushpull("3", given, out=out)
    assert (given == store.rank + 1).all() and (out == total).all()
    store.pushpull("3", given, out=out, average=True)
    assert (out == np.float32(total / n)).all(), out
    store.push("3", given, average=True)
    assert (store.pull("3") == np.float32(total / n)).all()
    return store


def first_values(store_type):
    """Key j gets the value j of rank 0, whatever the others gave; a repeated init changes nothing."""
    store = kv.create(store_type)
    keys = [*range(200, 210), *range(300, 303)]
    shapes = [SMALL if key < 300 else BIG for key in keys]
    kinds = [np.float32 if key % 2 else np.float16 for key in keys]
    store.init(
        keys,
        [np.full(shape, key + 1000 * store.rank, kind) for key, shape, kind in zip(keys, shapes, kinds, strict=True)],
    )
    for key, shape, kind in zip(keys, shapes, kinds, strict=True):
        store.init(key, np.zeros(shape, kind))
        value = store.pull(key)
        assert value.dtype == kind and value.shape == shape and (value == key).all(), (key, value)
    return store


def dtypes(store_type):
    """Every dtype, from torch and from NumPy, keeps its kind, and integers and halves are summed exactly."""
    import torch

    store = kv.create(store_type)
    n = store.num_workers
    for dtype in DTYPES:
        tensor = torch.arange(7).to(getattr(torch, dtype)).reshape(7, 1)
        store.init(dtype, tensor)
        back = store.pull(dtype)
        assert back.dtype == tensor.dtype and torch.equal(back, tensor), (dtype, back)
        store.pushpull(dtype, tensor * (store.rank + 1), out=back)
        assert torch.equal(back, tensor * (n * (n + 1) // 2)), (dtype, back)
        if dtype == "bfloat16":
            continue
        array = tensor.numpy()
        store.init("numpy " + dtype, array)
        store.push("numpy " + dtype, array)
        value = store.pull("numpy " + dtype)
        assert isinstance(value, np.ndarray) and value.dtype == dtype and (value == array * n).all(), (dtype, value)
    return store


def orders(store_type):
    """Workers that name their keys in different orders neither wait for ever nor mix them up."""
    store = kv.create(store_type)
    n = store.num_workers
    keys = [f"k{i}" for i in range(40)]
    order = [keys[(i * (2 * store.rank + 1) + 7 * store.rank) % 40] for i in range(40)]
    order = list(dict.fromkeys(order + keys))  # any order will do, as long as it is a different one on each worker
    numbers = [np.float32(keys.index(key)) for key in order]
    shapes = {key: (1 + 999 * (i % 3), 1 + i) for i, key in enumerate(keys)}
    store.init(order, [np.zeros(shapes[key], np.float32) for key in order])
    for i in range(5):
        given = [np.full(shapes[key], number + i, np.float32) for key, number in zip(order, numbers, strict=True)]
        priority = list(range(40))[store.rank]
        store.pushpull(order, given, priority=priority)
        for value, number in zip(given, numbers, strict=True):
            assert (value == n * (number + i)).all()
        order, numbers = order[::-1], numbers[::-1]
    return store


def many_small(store_type):
    """A thousand calls under way at once, a key each, are all counted."""
    store = kv.create(store_type)
    n, count = store.num_workers, 1000
    store.init(list(range(count)), [np.zeros(3, np.float32)] * count)
    for i in range(3):
        for key in range(count):
            store.push(key, np.full(3, key + i, np.float32), priority=-key)
        values = [future.result() for future in [store.pull_async(key) for key in range(count)]]
        assert all((value == n * (key + i)).all() for key, value in enumerate(values))
    return store


def devices(store_type):
    """Several arrays a key are summed, results go into each, and the same key twice in a call gathers its arrays."""
    store = kv.create(store_type)
    n = store.num_workers
    total = n * (n + 1) // 2
    for key, shape in (("small", SMALL), ("big", BIG)):
        store.init(key, np.zeros(shape, np.float32))
        values = [np.full(shape, (store.rank + 1) * 10**device, np.float32) for device in range(3)]
        store.pushpull(key, values)
        assert all((value == 111 * total).all() for value in values)
        outs = [np.zeros(shape, np.float32) for _ in range(2)]
        store.pull(key, out=outs)
        assert all((out == 111 * total).all() for out in outs)
    store.push(["small", "small"], [np.ones(SMALL, np.float32)] * 2)
    assert (store.pull("small") == 2 * n).all()
    return store


def awkward_shapes(store_type):
    """Arrays without elements, without dimensions, and with strides."""
    store = kv.create(store_type)
    n = store.num_workers
    shapes = [(0,), (0, 5), (3, 0, 2), (), (1,), (1, 1, 1)]
    keys = [str(shape) for shape in shapes]
    store.init(keys, [np.ones(shape) for shape in shapes])
    given = [np.full(shape, 2.0) for shape in shapes]
    store.pushpull(keys, given)
    assert [value.shape for value in given] == shapes
    assert all((value == 2 * n).all() for value in given)
    assert [value.shape for value in store.pull(keys)] == shapes
    for key, value in zip(keys, given, strict=True):
        store.push(key, value)
        assert (store.pull(key) == 2 * n * n).all()
    strided = np.arange(24, dtype=np.float64).reshape(4, 6)[::2, ::3]
    store.init("strided", np.zeros((2, 2)))
    store.push("strided", strided)
    assert (store.pull("strided") == n * strided).all()
    out = np.zeros((4, 6))
    store.pull("strided", out=out[::2, ::3])
    assert (out[::2, ::3] == n * strided).all() and out.sum() == n * strided.sum()
    return store


def own_writes(store_type):
    """A pull sees this worker's pushes that came before it, though nobody waited for those; nothing aliases."""
    store = kv.create(store_type)
    n = store.num_workers
    store.init("w", np.zeros(BIG, np.float32))
    store.set_optimizer("test")
    given = np.empty(BIG, np.float32)
    handed_out = []
    for i in range(5):
        given[...] = i
        store.push("w", given)
        given[...] = 777  # the call has returned, so the array is ours again
        handed_out.append(store.pull("w"))
    totals = np.cumsum([n * i for i in range(5)])
    assert all((value == total).all() for value, total in zip(handed_out, totals, strict=True)), [
        v.flat[0] for v in handed_out
    ]
    return store


def calls_key_by_key(store_type):
    """Loops over small keys, twice over each: the sums are right, and a pull never waits for another key's round."""
    store = kv.create(store_type)
    n = store.num_workers
    keys = list(range(50))
    store.init(keys, [np.zeros(10, np.float32) for _ in keys])
    outs = [np.zeros(10, np.float32) for _ in keys]
    for turn in range(1, 4):
        for half in range(2):
            for key in keys:
                store.push(key, np.full(10, key + turn + half, np.float32))
        for future in [store.pull_async(key, outs[key]) for key in keys]:
            future.result(timeout=30)
        assert all((out == n * (key + turn + 1)).all() for key, out in enumerate(outs)), outs[0]
    store.init([100, 101], [np.zeros(3, np.float32)] * 2)
    early, late = np.zeros(3, np.float32), np.zeros(3, np.float32)
    store.push(100, np.ones(3, np.float32))
    if store.rank == 0:
        store.push(101, np.ones(3, np.float32))
    first = store.pull_async(100, early)
    if store.rank == 0:
        second = store.pull_async(101, late)
    first.result(timeout=30)  # the others push 101 only after this
    assert (early == n).all()
    store.barrier()
    if store.rank:
        store.push(101, np.ones(3, np.float32))
        second = store.pull_async(101, late)
    second.result(timeout=30)
    assert (late == n).all()
    return store


def missing_gradients(store_type):
    """None counts as a contribution: nobody waits for it, and an average does not ignore who gave it."""
    store = kv.create(store_type)
    n = store.num_workers
    store.init(["a", "b"], [np.zeros(3, np.float32), np.zeros(BIG, np.float32)])
    gives = store.rank == n - 1
    given = [np.full(3, 6, np.float32), np.full(BIG, 6, np.float32)] if gives else [None, None]
    out = [np.empty(3, np.float32), np.empty(BIG, np.float32)]
    store.pushpull(["a", "b"], given, out=out)
    assert all((value == 6).all() for value in out)
    store.pushpull(["a", "b"], given, out=out, average=True)
    assert all((value == np.float32(6 / n)).all() for value in out), out[0]
    store.pushpull(["a", "b"], [np.ones(3, np.float32), None], out=out)
    assert (out[0] == n).all() and (out[1] == np.float32(6 / n)).all()
    return store


def replaced_values(store_type):
    """Broadcast of keys that have a value gives everybody rank 0's new one."""
    store = kv.create(store_type)
    store.init(["a", "big"], [np.zeros(3, np.float32), np.zeros(BIG, np.float32)])
    store.set_optimizer("test")
    for i in range(1, 4):
        store.push(["a", "big"], [np.ones(3, np.float32), np.ones(BIG, np.float32)])
        out = [np.empty(3, np.float32), np.empty(BIG, np.float32)]
        mine = [np.full(3, i * 100 + store.rank, np.float32), np.full(BIG, i * 100 + store.rank, np.float32)]
        store.broadcast(["a", "big"], mine, out)
        assert all((value == i * 100).all() for value in out), (i, out[0])
        store.barrier()  # or a fast worker's next push comes before a slow worker has looked
    return store


def two_stores(store_type):
    """Two stores of a process have keys, a mode and an optimizer of their own."""
    store = kv.create(store_type)
    other = kv.create("dist_async")
    n = store.num_workers
    assert (store.type, other.type, other.rank) == (store_type, "dist_async", store.rank)
    store.init("w", np.zeros(3, np.float32))
    other.init("w", np.full((2, 2), 5.0))
    other.set_optimizer("test")
    for i in range(1, 4):
        store.push("w", np.full(3, i, np.float32))
        other.push("w", np.full((2, 2), 1.0))
        assert (store.pull("w") == n * i).all()
    other.pull("w")  # sees the own pushes; the barrier makes it everybody's
    other.barrier()
    assert (other.pull("w") == 5 + 3 * n).all()
    other.close()
    third = kv.create(store_type)
    third.init("w", np.zeros(3, np.float32))
    third.set_optimizer("sgd", learning_rate=0.5)
    third.push("w", np.ones(3, np.float32))
    store.push("w", np.ones(3, np.float32))
    assert (store.pull("w") == n).all()
    assert (third.pull("w") == -0.5 * n).all()
    third.close()
    return store


def asynchronous(store_type):
    """Without rounds every push counts once, and nobody waits for anybody."""
    store = kv.create(store_type)
    n = store.num_workers
    keys = ["small", "big"]
    store.init(keys, [np.ones(SMALL, np.float32), np.ones(BIG, np.float32)])
    store.set_optimizer("test", rescale_grad=RATE)
    for i in range(ROUNDS):
        store.push(keys, [np.full(s, store.rank + 1, np.float32) for s in (SMALL, BIG)])
        own = 1 + (i + 1) * RATE * (store.rank + 1)
        assert all((value >= own).all() for value in store.pull(keys))
    store.barrier()
    expected = 1 + ROUNDS * RATE * n * (n + 1) // 2
    assert all((value == expected).all() for value in store.pull(keys))
    return store


if __name__ == "__main__":
    stores = []
    for scenario in sys.argv[1].split(","):
        stores.append(globals()[scenario](sys.argv[2]))
        print(f"{scenario} checked on {stores[-1].rank} of {stores[-1].num_workers}", flush=True)
    for used in stores:
        used.close()
