"""What MXNet's nightly scripts check of its distributed stores, on kvdist's servers: mxnet_nightly.py GROUP …

Run by examples/mxnet_bridge/run.py in an environment of MXNet 1.9.1 or 2.0.0b1. The store has the name that the
scripts give it, such as ``dist_sync``, and a new one is made for each group. Expected values are those of
tests/nightly/dist_sync_kvstore.py, dist_async_kvstore.py, dist_device_sync_kvstore.py and its variants,
test_server_profiling.py and test_kvstore.py, or come from MXNet's own store of several devices, one for each worker, or
from MXNet training alone on the batches of all workers.
"""

from __future__ import annotations

import logging
import os
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

IS_1 = mx.__version__.startswith("1.")
RATE = 2
ROUNDS = 3
SMALL, BIG, IRREGULAR = (2, 3), (1200, 1200), (1211, 1211)
"""The larger two are more than a key that stays on one server may have, and the last does not divide by 16."""
DEVICES = [mx.cpu(0), mx.cpu(1)]


def made(name: str = "dist_sync"):
    """A new store."""
    store = mx.kv.create(name)
    assert isinstance(store, mx.kv.KVStore) and store.type == name, (type(store), store.type)
    return store


def adding(multi_precision: bool = False):
    """MXNet's Test optimizer, such that w becomes w + RATE · gradient."""
    rescale = RATE if IS_1 else -RATE  # in MXNet 2 it subtracts, times the learning rate
    return mx.optimizer.create("test", learning_rate=1.0, rescale_grad=rescale, multi_precision=multi_precision)


def expect(given, wanted, tolerance: float = 0.0) -> None:
    """Compare arrays of any kind, or an array with a number; relative to the largest."""
    given, wanted = (one.asnumpy() if isinstance(one, mx.nd.NDArray) else np.asarray(one) for one in (given, wanted))
    given, wanted = given.astype(np.float64), wanted.astype(np.float64)
    off = np.abs(given - wanted).max() if given.size else 0.0
    assert off <= tolerance * max(1.0, np.abs(wanted).max()), (off, given.ravel()[:4], wanted.ravel()[:4])


def refused(call, *errors: type[Exception]) -> None:
    try:
        call()
    except errors:
        return
    raise AssertionError(f"nothing was refused that should be a {errors}")


def total(store) -> float:
    """The sum of rank + 1 over the workers."""
    return store.num_workers * (store.num_workers + 1) / 2


def pulled(store, key, shape, dtype="float32"):
    out = mx.nd.zeros(shape, dtype=dtype)
    store.pull(key, out=out)
    return out


def pulled_rows(store, key, shape, row_ids, dtype="float32"):
    out = mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype)
    store.row_sparse_pull(key, out=out, row_ids=row_ids)
    return out


# dist_sync_kvstore.py


def init() -> None:
    store = made()
    for first, shape, count in ((200, SMALL, 20), (300, BIG, 4)):
        for i in range(count):
            dtype = "float32" if i < count / 2 else "float16"
            store.init(str(first + i), [mx.nd.ones(shape, dtype=dtype) * i])
            expect(pulled(store, str(first + i), shape, dtype), i)


def dense() -> None:
    for multi_precision in (False, True):
        store = made()
        shapes = {"3": SMALL, "5": SMALL, "99": BIG}
        keys = {(name, dtype): f"{name}.{dtype}" for name in shapes for dtype in ("float32", "float16")}
        for (name, dtype), key in keys.items():
            store.init(key, mx.nd.ones(shapes[name], dtype=dtype))
        store.set_optimizer(adding(multi_precision))
        for (name, dtype), key in keys.items():
            for i in range(ROUNDS):
                store.push(key, mx.nd.ones(shapes[name], dtype=dtype) * (store.rank + 1))
                expect(pulled(store, key, shapes[name], dtype), 1 + RATE * (i + 1) * total(store))


def table(store, key, shape, dtype) -> None:
    store.init(key, mx.nd.ones(shape, dtype=dtype).tostype("row_sparse"))


def rows() -> None:
    store = made()
    store.set_optimizer(adding())
    for dtype in ("float16", "float32"):
        table(store, dtype, SMALL, dtype)
        gradient = mx.nd.zeros(SMALL, dtype=dtype)
        gradient[store.rank % SMALL[0]] = store.rank + 1
        for i in range(ROUNDS):
            store.push(dtype, gradient.tostype("row_sparse"))
            wanted = np.ones(SMALL)
            for rank in range(store.num_workers):
                wanted[rank % SMALL[0]] += (rank + 1) * RATE * (i + 1)
            ids = np.random.randint(SMALL[0], size=SMALL[0])
            out = pulled_rows(store, dtype, SMALL, mx.nd.array(ids).reshape((1, 2)).astype(dtype), dtype)
            wanted[[row for row in range(SMALL[0]) if row not in ids]] = 0
            expect(out, wanted)


def rows_without_any() -> None:
    store = made()
    store.set_optimizer(adding())
    for dtype in ("float16", "float32"):
        for shape in (SMALL, BIG):
            key = f"{dtype}.{shape[0]}"
            table(store, key, shape, dtype)
            store.push(key, mx.nd.sparse.zeros("row_sparse", shape, dtype=dtype))
            expect(pulled_rows(store, key, shape, mx.nd.arange(shape[0])), 1)
            expect(pulled_rows(store, key, shape, mx.nd.array([])), 0)


def big_rows() -> None:
    store = made()
    store.set_optimizer(adding())
    for dtype in ("float16", "float32"):
        table(store, dtype, BIG, dtype)
        candidates = np.flatnonzero(np.random.RandomState(123).rand(BIG[0]) < 0.3)
        updated = [candidates[:: 2 * (rank + 1)] for rank in range(store.num_workers)]
        gradient = mx.nd.zeros(BIG, dtype=dtype)
        for row in updated[store.rank]:
            gradient[row] = store.rank + 1
        ids = np.random.RandomState(store.rank).randint(BIG[0], size=BIG[0])
        for i in range(ROUNDS):
            store.push(dtype, gradient.tostype("row_sparse"))
            out = pulled_rows(store, dtype, BIG, mx.nd.array(ids).reshape((-1, 2)), dtype)
            wanted = np.ones(BIG)
            for rank, own in enumerate(updated):
                wanted[own] += (rank + 1) * RATE * (i + 1)
            wanted[np.setdiff1d(np.arange(BIG[0]), ids)] = 0
            expect(out, wanted)


def rows_of_lists() -> None:
    """Lists of keys, several arrays for a key with ids of their own, and arrays of another kind."""
    store = made()
    shape = (6, 2)
    for key in ("a", "b"):
        store.init(key, (mx.nd.arange(12).reshape(shape) + 1).tostype("row_sparse"))
    full = np.arange(12).reshape(shape) + 1
    outs = [mx.nd.sparse.zeros("row_sparse", shape, ctx=device) for device in DEVICES]
    store.row_sparse_pull("a", out=outs, row_ids=[mx.nd.array([5, 1, 5]), mx.nd.array([0])])
    expect(outs[0], full * np.isin(np.arange(6), [1, 5])[:, None])
    expect(outs[1], full * np.isin(np.arange(6), [0])[:, None])
    store.row_sparse_pull("a", out=outs, row_ids=mx.nd.array([2, 3]))
    store.row_sparse_pull(["a", "b"], out=outs, row_ids=[mx.nd.array([2, 3]), mx.nd.array([4])])
    expect(outs[0], full * np.isin(np.arange(6), [2, 3])[:, None])
    expect(outs[1], full * np.isin(np.arange(6), [4])[:, None])
    before = outs[0].asnumpy()
    store.pull("a", out=outs[0])
    expect(outs[0], before)
    refused(lambda: store.pull("a", out=outs[0], ignore_sparse=False), mx.MXNetError)
    refused(lambda: store.row_sparse_pull("a", out=mx.nd.zeros(shape), row_ids=mx.nd.array([0])), mx.MXNetError)
    refused(lambda: store.push("a", mx.nd.zeros(shape).tostype("csr")), mx.MXNetError)


def compressed(kind: str, threshold: float):
    """A store as the script makes it: compression is set when keys are initialised already."""
    store = made()
    store.init("before", mx.nd.ones(SMALL))
    store.init("half", mx.nd.ones(SMALL, dtype="float16"))
    table(store, "rows", SMALL, "float32")
    store.set_optimizer(adding())
    store.set_gradient_compression({"type": kind, "threshold": threshold})
    return store


def two_bit() -> None:
    threshold = 0.5
    store = compressed("2bit", threshold)
    step = threshold * RATE * store.num_workers
    for shape in (SMALL, IRREGULAR, BIG):
        key, idle = str(shape[0]), f"idle.{shape[0]}"
        store.init(key, mx.nd.zeros(shape))
        store.init(idle, mx.nd.ones(shape))
        expect(pulled(store, key, shape), 0)
        expect(pulled(store, idle, shape), 1)
        for pushed, wanted in ((0, 0), (0.4, 0), (threshold - 0.4, 1), (0.2, 1), (threshold - 0.2, 2), (threshold, 3)):
            store.push(key, mx.nd.ones(shape) * pushed)
            expect(pulled(store, key, shape), wanted * step)
    store.push("before", mx.nd.ones(SMALL) * threshold)
    expect(pulled(store, "before", SMALL), 1 + step)
    expect(pulled(store, "half", SMALL, "float16"), 1)
    expect(pulled_rows(store, "rows", SMALL, mx.nd.array([1])), [[0] * 3, [1] * 3])


def quantised(kind: str, threshold: float, shapes) -> None:
    """Random gradients give what MXNet's own store makes of them, with a device for each worker."""
    store, own = compressed(kind, threshold), mx.kv.create("device")
    devices = [mx.cpu(rank) for rank in range(store.num_workers)]
    own.set_gradient_compression({"type": kind, "threshold": threshold})
    own.set_optimizer(adding())
    random = np.random.RandomState(123)
    for shape in shapes:
        key = str(shape[0])
        for one in (store, own):
            one.init(key, mx.nd.zeros(shape))
        for _ in range(ROUNDS):
            gradients = [random.uniform(-0.8, 0.8, shape).astype(np.float32) for _ in devices]
            own.push(key, [mx.nd.array(one, ctx=device) for one, device in zip(gradients, devices, strict=True)])
            store.push(key, mx.nd.array(gradients[store.rank]))
            expect(pulled(store, key, shape), pulled(own, key, shape))


def two_bit_random() -> None:
    quantised("2bit", 0.5, (SMALL, IRREGULAR, BIG))


def one_bit() -> None:
    """As test_kvstore.py has it: ones, what is left over, and, where MXNet has it, random gradients."""
    for threshold in (-0.5, 0.0, 0.5):
        store = compressed("1bit", threshold)
        step = RATE * store.num_workers
        store.init("ones", mx.nd.zeros(SMALL))
        for value in [1] * 3 + [-1] * 3:
            before = pulled(store, "ones", SMALL).asnumpy()
            store.push("ones", mx.nd.ones(SMALL) * value)
            expect(pulled(store, "ones", SMALL), before + value * step)
        for value, wanted in ((2, step), (0, 2 * step), (-2, step)):
            store.push("ones", mx.nd.ones(SMALL) * value)
            expect(pulled(store, "ones", SMALL), wanted)
        if not IS_1:
            quantised("1bit", threshold, (SMALL, IRREGULAR))


def compressed_later() -> None:
    """Compression may begin after pushes; what the optimizer remembers goes on."""
    for name in ("dist_sync", "dist_async"):
        store, own = made(name), mx.kv.create("local")
        for one in (store, own):
            one.set_optimizer(mx.optimizer.create("adam", learning_rate=0.1))
            one.init("w", mx.nd.ones(IRREGULAR))
        for step in range(2 * ROUNDS):
            if step == ROUNDS:
                store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
            gradient = mx.nd.full(IRREGULAR, 0.5 if step % 3 else -0.5)  # what 2bit carries exactly
            store.push("w", gradient)
            pulled(store, "w", IRREGULAR)
            store._barrier()
            pushes = 1 if name == "dist_sync" else store.num_workers
            for _ in range(pushes):
                own.push("w", gradient * (store.num_workers / pushes))
            expect(pulled(store, "w", IRREGULAR), pulled(own, "w", IRREGULAR), 2e-5)
            store._barrier()
    for name in ("dist_sync", "dist_async"):
        store = made(name)
        table(store, "rows", SMALL, "float32")
        store.set_optimizer(mx.optimizer.create("adam"))
        if name == "dist_sync" or store.rank == 0:
            store.push("rows", mx.nd.ones(SMALL).tostype("row_sparse"))
        refused(lambda store=store: store.set_gradient_compression({"type": "2bit"}), ValueError)


def compressed_trainer() -> None:
    """A Trainer with compression_params, as Gluon's users set it."""
    own = parameter("w", (3,))
    store = made()
    params = {"type": "2bit", "threshold": 0.5}
    trainer = gluon.Trainer([own], "sgd", {"learning_rate": 1.0}, kvstore=store, compression_params=params)
    for wanted in (0.0, 0.5, 0.5, 1.0):  # 0.3, 0.6, 0.4, 0.7 in the residual
        backward([own], 0.3)
        trainer.step(1)
        expect(own.data(), 1 - wanted * store.num_workers, 1e-6)


def parameter(name, shape, devices=DEVICES[:1], **kinds) -> gluon.Parameter:
    one = gluon.Parameter(name, shape=shape, **kinds)
    one.initialize(mx.init.One(), ctx=devices)
    return one


def backward(params, factor: float) -> None:
    for device in params[0].list_ctx():
        with autograd.record():
            loss = sum((one.data(device) * factor).sum() for one in params)
        loss.backward()


def gluon_step() -> None:
    store = made()
    own = parameter("x", (10, 1))
    trainer = gluon.Trainer([own], "sgd", {"learning_rate": 1.0}, kvstore=store)
    backward([own], store.rank + 1)
    trainer.step(1)
    expect(own.data(), 1 - total(store))


def gluon_sparse_step() -> None:
    store = made()
    own = parameter("x", (2, 10), stype="row_sparse", grad_stype="row_sparse")
    trainer = gluon.Trainer([own], "sgd", {"learning_rate": 1.0}, kvstore=store)
    ids = mx.nd.arange(2)
    with autograd.record():
        loss = (own.row_sparse_data(ids) * (store.rank + 1)).sum()
    loss.backward()
    trainer.step(1)
    expect(own.row_sparse_data(ids), 1 - total(store))


def trainer_types() -> None:
    cases = [
        ("default", "default", None, True),
        ("default", "default", True, True),
        ("default", "default", False, False),
        ("default", "row_sparse", None, True),
        ("default", "row_sparse", False, ValueError),
        ("row_sparse", "row_sparse", None, True),
        ("row_sparse", "row_sparse", False, ValueError),
    ]
    store = made()
    for stype, grad_stype, asked, wanted in cases if IS_1 else cases[:3]:
        own = parameter("x", (10, 1), DEVICES, stype=stype, grad_stype=grad_stype)
        trainer = gluon.Trainer([own], "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=asked)
        if wanted is ValueError:
            refused(trainer._init_kvstore, ValueError)
        else:
            trainer._init_kvstore()
            assert trainer._kv_initialized and trainer._update_on_kvstore is wanted


def trainer_reset() -> None:
    """Values cannot be set once they rest on the servers, and the trainer says so."""
    own = parameter("x", (4, 2), stype="row_sparse", grad_stype="row_sparse")
    trainer = gluon.Trainer([own], "sgd", {"learning_rate": 0.1}, kvstore=made())
    expect(own.row_sparse_data(mx.nd.arange(4)), 1)
    assert trainer._kv_initialized and trainer._update_on_kvstore
    refused(lambda: own.set_data(mx.nd.ones((4, 2)).tostype("row_sparse")), RuntimeError)


# dist_async_kvstore.py


def asynchronous() -> None:
    store = made("dist_async")
    for stype in ("default", "row_sparse") if IS_1 else ("default",):
        for asked in (False, True, None):
            own = parameter("x", (10, 1), DEVICES, stype=stype, grad_stype=stype)
            trainer = gluon.Trainer([own], "sgd", {"learning_rate": 0.1}, kvstore=store, update_on_kvstore=asked)
            if asked is False:
                refused(trainer._init_kvstore, ValueError)
            else:
                trainer._init_kvstore()
                assert trainer._update_on_kvstore is True
    store = made("dist_async")
    store.set_optimizer(adding())
    store.init("w", mx.nd.ones(SMALL))
    store.push("w", mx.nd.ones(SMALL) * (store.rank + 1))
    pulled(store, "w", SMALL)  # what was pushed here has been counted
    store._barrier()
    expect(pulled(store, "w", SMALL), 1 + RATE * total(store))


# dist_device_sync_kvstore.py


def devices() -> None:
    store = made("dist_device_sync")
    store.set_optimizer(adding())
    for shape in (SMALL, BIG):
        pushed, both = f"push.{shape[0]}", f"pushpull.{shape[0]}"
        store.init([pushed, both], [mx.nd.ones(shape), mx.nd.ones(shape)])
        for i in range(ROUNDS):
            wanted = 1 + RATE * len(DEVICES) * (i + 1) * total(store)
            arrays = [mx.nd.ones(shape, ctx=device) * (store.rank + 1) for device in DEVICES]
            store.push(pushed, arrays)
            expect(pulled(store, pushed, shape), wanted)
            outs = [mx.nd.zeros(shape, ctx=device) for device in DEVICES]
            store.pushpull(both, arrays, out=outs)
            for out in outs:
                expect(out, wanted)
    sums = made("dist_device_sync")
    for i, shape in enumerate((SMALL, BIG)):
        arrays = [mx.nd.zeros(shape, ctx=device) for device in DEVICES]
        sums.broadcast(str(i), mx.nd.ones(shape) * (i + sums.rank), arrays)
        for one in arrays:
            expect(one, i)
        for _ in range(ROUNDS):
            arrays = [mx.nd.ones(shape, ctx=device) * (sums.rank + 1) for device in DEVICES]
            sums.pushpull(str(i), arrays)
            for one in arrays:
                expect(one, len(DEVICES) * total(sums))


def other_optimizers() -> None:
    """Another optimizer in a store's life begins anew with the values that are there, as in MXNet's own store."""
    store, own = made("dist_device_sync"), mx.kv.create("local")
    for one in (store, own):
        one.init("w", mx.nd.ones(SMALL))
        one.init("rows", mx.nd.ones(SMALL).tostype("row_sparse"))
    chosen = [adding, *[lambda: mx.optimizer.SGD(learning_rate=0.5, momentum=0.5)] * 2, lambda: mx.optimizer.Adam(0.1)]
    for make in chosen:
        for one in (store, own):
            one.set_optimizer(make())
        for _ in range(ROUNDS):
            gradient = mx.nd.full(SMALL, store.rank + 1)
            store.push(["w", "rows"], [gradient, gradient.tostype("row_sparse")])
            summed = mx.nd.full(SMALL, total(store))
            own.push(["w", "rows"], [summed, summed.tostype("row_sparse")])
            expect(pulled(store, "w", SMALL), pulled(own, "w", SMALL), 1e-6)
        ids = mx.nd.arange(SMALL[0])
        expect(pulled_rows(store, "rows", SMALL, ids), pulled_rows(own, "rows", SMALL, ids), 1e-6)


# test_kvstore.py


def against_local() -> None:
    """Keys one by one and in a list, dense and row_sparse: as MXNet's own store with a device for each worker."""
    shapes = [(4, 4), (100, 100), (1200, 1200)]
    for stype in ("default", "row_sparse"):
        for together in (False, True):
            store, own = made(), mx.kv.create("local_update_cpu")
            keys, random = [3, 5, 7], np.random.RandomState(0)
            for one in (store, own):
                one.set_optimizer(mx.optimizer.create("sgd", learning_rate=0.1, momentum=0.9, wd=0.01))
                one.init(keys, [mx.nd.ones(shape).tostype(stype) for shape in shapes])
            for _ in range(ROUNDS):
                data = random.uniform(-1, 1, (store.num_workers, 3)).astype(np.float32)
                ways = [
                    [mx.nd.full(shape, data[rank][i], ctx=mx.cpu(rank)).tostype(stype) for rank in range(len(data))]
                    for i, shape in enumerate(shapes)
                ]
                mine = [arrays[store.rank] for arrays in ways]
                if together:
                    own.push(keys, ways)
                    store.push(keys, mine)
                else:
                    for key, arrays, one in zip(keys, ways, mine, strict=True):
                        own.push(key, arrays)
                        store.push(key, one)
                for key, shape in zip(keys, shapes, strict=True):
                    pull = pulled if stype == "default" else (lambda *own: pulled_rows(*own, mx.nd.arange(own[2][0])))
                    expect(pull(store, key, shape), pull(own, key, shape), 1e-6)


SPARSE = [
    ("SGD", {"momentum": 0.9, "wd": 0.01}),
    ("SGD", {"momentum": 0.9, "wd": 0.01, "lazy_update": True}),
    ("SGD", {"momentum": 0.9, "wd": 0.01, "lazy_update": False}),
    ("Adam", {"wd": 0.01}),
    ("Adam", {"wd": 0.01, "lazy_update": True}),
    ("Adam", {"wd": 0.01, "lazy_update": False}),
    ("Ftrl", {"wd": 0.01}),
]


def rows_by_optimizers() -> None:
    """Some rows at a time: an optimizer moves the rows that MXNet's moves."""
    shape = (12, 3)
    for name, numbers in SPARSE:
        store, own = made(), mx.kv.create("local")
        random = np.random.RandomState(0)
        first = mx.nd.array(random.randn(*shape)).tostype("row_sparse")
        for one in (store, own):
            one.set_optimizer(getattr(mx.optimizer, name)(learning_rate=0.1, **numbers))
            one.init("w", first)
        for _ in range(5):
            gradients = random.randn(store.num_workers, *shape)
            gradients *= random.rand(store.num_workers, shape[0], 1) < 0.3
            arrays = [mx.nd.array(one).tostype("row_sparse") for one in gradients]
            own.push("w", arrays)
            store.push("w", arrays[store.rank])
        ids = mx.nd.arange(shape[0])
        expect(pulled_rows(store, "w", shape, ids), pulled_rows(own, "w", shape, ids), 2e-5)


def wrong_calls() -> None:
    """What MXNet's library refuses is refused with its error, and what it leaves alone stays."""
    rows = mx.nd.ones(SMALL).tostype("row_sparse")
    for key, other in ((3, "a"), ("a", 3)):
        store = made()
        store.init(key, mx.nd.zeros(SMALL))
        calls = [
            lambda store=store, other=other: store.init(other, mx.nd.ones(SMALL)),
            lambda store=store, other=other: store.push(other, mx.nd.ones(SMALL)),
            lambda store=store, other=other: pulled(store, other, SMALL),
            lambda store=store, other=other: pulled_rows(store, other, SMALL, mx.nd.array([1])),
            lambda store=store, key=key: store.push(key, mx.nd.ones(BIG)),
            lambda store=store, key=key: store.row_sparse_pull(key, out=mx.nd.ones(SMALL), row_ids=mx.nd.array([1])),
            lambda store=store: pulled(store, "unknown", SMALL),
        ]
        for call in calls:
            refused(call, mx.MXNetError)
        refused(calls[0], TypeError)  # kvdist's own, too
        store.pull(key, out=rows)
        expect(rows, 1)
        expect(pulled(store, key, SMALL), 0)


# dist_device_sync_kvstore_byteps.py, dist_device_sync_kvstore_horovod.py


def sums() -> None:
    for name in ("horovod", "byteps"):
        store = made(name)
        assert store.local_rank == store.rank and not store.is_capable("optimizer")
        refused(lambda store=store: store.set_optimizer(adding()), NotImplementedError)
        out = [mx.nd.zeros(SMALL, ctx=device) for device in DEVICES]
        store.broadcast("first", mx.nd.full(SMALL, 5 + store.rank), out=out)
        for one in out:
            expect(one, 5)
        for shape in (SMALL, BIG):
            for _ in range(ROUNDS):
                arrays = [mx.nd.full(shape, store.rank + 1, ctx=device) for device in DEVICES]
                store.pushpull(str(shape[0]), arrays)  # in place, of a key that is new
                for one in arrays:
                    expect(one, len(DEVICES) * total(store))
        own = parameter("w", (3,))
        trainer = gluon.Trainer([own], "adagrad", {"learning_rate": 1.0}, kvstore=made(name))
        backward([own], store.rank + 1)
        trainer.step(1)
        assert trainer._update_on_kvstore is False
        expect(own.data(), 0, 1e-4)  # AdaGrad's first step is as long as the rate


# test_server_profiling.py


def profiled() -> None:
    store = made()
    files = {"server": "server.json", "worker": os.path.join(os.environ["KVDIST_PROFILE_DIR"], "worker.json")}
    for process, name in files.items():
        mx.profiler.set_config(filename=name, profile_all=True, profile_process=process)
        mx.profiler.set_state("run", profile_process=process)
    store.init("w", mx.nd.ones(BIG))
    for _ in range(ROUNDS):
        store.push("w", mx.nd.ones(BIG))
        pulled(store, "w", BIG)
    store._barrier()
    for process in files:
        mx.profiler.set_state("stop", process)
        mx.profiler.dump(profile_process=process)


# Fits


def batches(store, seed: int, steps: int, size: int, make):
    """Per step the batch of all workers, and which part of it is this one's."""
    random = np.random.RandomState(seed)
    own = slice(store.rank * size, (store.rank + 1) * size)
    for _ in range(steps):
        yield make(random, store.num_workers * size), own


def module_fit() -> None:
    """Module and FeedForward on kvdist end where Module alone ends with the batches of all workers."""
    store, size, steps = made("kvdist_sync"), 8, 4
    random = np.random.RandomState(0)
    data = random.randn(steps * size * store.num_workers, 5).astype(np.float32)
    target = (data.sum(axis=1) > 0).astype(np.float32)
    net = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=7, name="hidden")
    net = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(mx.sym.relu(net), num_hidden=2, name="out"), name="softmax")
    start = {
        "hidden_weight": (7, 5),
        "hidden_bias": (7,),
        "out_weight": (2, 7),
        "out_bias": (2,),
    }
    start = {name: mx.nd.array(random.randn(*shape)) for name, shape in start.items()}
    own = (np.arange(len(data)) // size) % store.num_workers == store.rank

    def fitted(chosen, size, kvstore):
        module = mx.mod.Module(net, logger=logging.getLogger("fit"))
        schedule = mx.lr_scheduler.FactorScheduler(2, 0.5)
        module.fit(
            mx.io.NDArrayIter(data[chosen], target[chosen], size),
            num_epoch=3,
            kvstore=kvstore,
            optimizer="sgd",
            optimizer_params={"learning_rate": 0.5, "momentum": 0.9, "wd": 0.01, "lr_scheduler": schedule},
            arg_params={name: value.copy() for name, value in start.items()},
        )
        return module.get_params()[0]

    numbers = {
        "learning_rate": 0.5,
        "momentum": 0.9,
        "wd": 0.01,
        "lr_scheduler": mx.lr_scheduler.FactorScheduler(2, 0.5),
    }
    first = {name: value.copy() for name, value in start.items()}
    feed = mx.model.FeedForward(net, num_epoch=3, optimizer="sgd", arg_params=first, **numbers)  # as in dist_lenet.py
    feed.fit(mx.io.NDArrayIter(data[own], target[own], size), kvstore=made())
    alone = fitted(slice(None), size * store.num_workers, None)
    together = fitted(own, size, store)
    for name, value in alone.items():
        expect(together[name], value, 1e-6)
        expect(feed.arg_params[name], value, 1e-6)


def is_common(value) -> None:
    """Compare an array with those of the other workers."""
    store = mx.kv.create("dist_sync")
    summed = value.copy()
    store.init("common", mx.nd.zeros(value.shape))
    store.push("common", value)
    store.pull("common", summed)
    expect(summed, value.asnumpy() * store.num_workers, 1e-6)


def first_weights() -> None:
    """Weights that the workers of Module update begin with those of rank 0, whoever makes the store."""
    os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
    rank = mx.kv.create("dist_sync").rank
    for name in ("horovod", "byteps", "BytePS", "dist_sync"):
        for kvstore in (name, mx.kv.create(name)):
            np.random.seed(rank)
            mx.random.seed(rank)
            x = np.random.randn(64, 3).astype("float32")
            layer = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=1, name="fc")
            output = mx.sym.LinearRegressionOutput(layer, mx.sym.var("y"))
            module = mx.mod.Module(output, label_names=["y"])
            data = mx.io.NDArrayIter(x, x.sum(1), 16, label_name="y")
            module.fit(data, kvstore=kvstore, optimizer="sgd", num_epoch=1, initializer=mx.init.Xavier())
            is_common(module.get_params()[0]["fc_weight"])
    del os.environ["MXNET_UPDATE_ON_KVSTORE"]


def sparse_module() -> None:
    """Module is refused weights and gradients of rows where the workers update, as it would not sum them."""
    os.environ["MXNET_UPDATE_ON_KVSTORE"] = "0"
    weight = mx.sym.var("table_weight", stype="row_sparse", shape=(9, 2))
    looked_up = mx.sym.Embedding(mx.sym.var("data"), input_dim=9, output_dim=2, sparse_grad=True, name="embedding")
    for layer, of in (
        (mx.sym.sparse.dot(mx.sym.var("data", stype="csr"), weight), "table_weight"),
        (mx.sym.mean(looked_up, axis=1), "embedding_weight"),
    ):
        module = mx.mod.Module(mx.sym.LinearRegressionOutput(layer, mx.sym.var("y")), label_names=["y"])
        x, y = np.random.randint(9, size=(8, 9)).astype("float32"), np.ones((8, 2), "float32")
        x = mx.nd.array(x).tostype("csr") if of == "table_weight" else x
        data = mx.io.NDArrayIter(x, y, 4, label_name="y", last_batch_handle="discard")
        for name in ("horovod", "dist_sync"):
            module.bind(data.provide_data, data.provide_label, force_rebind=True)
            module.init_params(force_init=True)

            said = ""
            try:
                module.init_optimizer(name, force_init=True)
                data.reset()
                module.forward_backward(next(data))
                module.update()
            except mx.MXNetError as error:
                said = str(error)
            assert of in said and "MXNET_UPDATE_ON_KVSTORE" in said, (name, of, said)
    del os.environ["MXNET_UPDATE_ON_KVSTORE"]


def trainer_by_name() -> None:
    """A Trainer with one device that is given the name of a store that sums has that store, and rank 0's weights."""
    rank = mx.kv.create("dist_sync").rank
    for name in ("horovod", "byteps"):
        own = parameter("w", (3,))
        own.initialize(mx.init.Constant(7 + rank), force_reinit=True)
        trainer = gluon.Trainer([own], "sgd", {"learning_rate": 1.0}, kvstore=name)
        backward([own], rank + 1)
        trainer.step(1)
        assert trainer._kvstore.type == name
        expect(own.data(), 7 - total(trainer._kvstore))


def updater_states() -> None:
    """The updater of a store has the states of the servers, an array for each."""
    for name, numbers, count in (("sgd", {}, 0), ("sgd", {"momentum": 0.9}, 1), ("adam", {}, 2)):
        own = parameter("w", (3,))
        trainer = gluon.Trainer([own], name, {"learning_rate": 0.5, **numbers}, kvstore=made())
        for step in range(3):
            backward([own], 1.0)
            trainer.step(1)
            (state,) = trainer._kvstore._updater.states.values()
            arrays = state if isinstance(state, tuple) else () if state is None else (state,)
            assert len(arrays) == count and all(one.shape == (3,) for one in arrays), (name, step, state)
            assert all(np.abs(one.asnumpy()).min() > 0 for one in arrays), (name, step, state)
        assert trainer._kvstore._updater.optimizer is trainer._optimizer


def sparse_fit() -> None:
    """Gluon with an embedding of sparse gradients, lazily updated: as alone on the batches of all workers."""
    for name, numbers in (("sgd", {"momentum": 0.9, "wd": 0.01}), ("adam", {"wd": 0.01})):
        store, size = made(), 4
        numbers = {"learning_rate": 0.05, "lazy_update": True, **numbers}

        def make(random, count):
            return random.randint(20, size=(count, 3)), random.randn(count, 1).astype(np.float32)

        def net():
            one = gluon.nn.HybridSequential()
            one.add(gluon.nn.Embedding(20, 4, sparse_grad=True), gluon.nn.Dense(1))
            one.initialize(mx.init.One())
            one(mx.nd.zeros((1, 3)))
            return one, list(one.collect_params().values())

        (shared, ours), (alone, theirs) = net(), net()
        trainers = [
            (gluon.Trainer(ours, name, numbers, kvstore=store), shared, True),
            (gluon.Trainer(theirs, name, numbers, kvstore=None), alone, False),
        ]
        loss = gluon.loss.L2Loss()
        for (words, target), own in batches(store, 1, 6, size, make):
            for trainer, trained, is_shared in trainers:
                chosen = own if is_shared else slice(None)
                with autograd.record():
                    value = loss(trained(mx.nd.array(words[chosen])), mx.nd.array(target[chosen]))
                value.backward()
                trainer.step(len(words))
        for mine, wanted in zip(ours, theirs, strict=True):
            expect(mine.data(), wanted.data(), 1e-5)


def names() -> None:
    """Every name of a distributed store means kvdist, and says in its type how it waits."""
    for name in ("dist", "dist_device_sync", "dist_sync_device", "dist_device_async", "dist_async_device"):
        made(name)
    assert mx.kv.create("kvdist").type == "kvdist_sync"
    assert mx.kv.create("KVDist_Async").type == "kvdist_async"


def main() -> None:
    logging.disable(logging.WARNING)
    for name in sys.argv[1:]:
        globals()[name]()
        print("passed", name, flush=True)


if __name__ == "__main__":
    main()
