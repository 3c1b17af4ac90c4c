"""Checks of examples/mxnet_bridge, run in MXNet's own environment: bridge.py FOLDER SCENARIO …

Expected values are MXNet's: computed by its own optimizers in this process, or by hand.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples" / "mxnet_bridge"))
import kvdist_store
from kvdist_translation import IS_1, RULES

FOLDER = Path(sys.argv[1])
LARGE = (1000, 1001)
"""More elements than a key may have that stays on one server."""
DEVICES = [mx.cpu(0), mx.cpu(1)]


def expect(given, wanted, tolerance: float = 0.0) -> None:
    given = given.asnumpy() if isinstance(given, mx.nd.NDArray) else np.asarray(given)
    wanted = wanted.asnumpy() if isinstance(wanted, mx.nd.NDArray) else np.asarray(wanted)
    message = f"{given.ravel()[:3]} is not {wanted.ravel()[:3]}"
    assert np.allclose(given, wanted, rtol=tolerance, atol=tolerance), message


def refused(call: Callable[[], object], error: type[Exception], *words: str) -> None:
    try:
        call()
    except error as said:
        assert all(word in str(said) for word in words), said
    else:
        raise AssertionError(f"nothing was refused that should name {words}")


def parameter(name: str, shape: tuple[int, ...], devices=DEVICES[:1]) -> gluon.Parameter:
    made = gluon.Parameter(name, shape=shape)
    made.initialize(mx.init.One(), ctx=devices)
    return made


def backward(params: list[gluon.Parameter], factor: float) -> None:
    """Each device's gradient of every parameter is `factor`, whatever the weights are."""
    for device in params[0].list_ctx():
        with autograd.record():
            loss = sum((one.data(device) * factor).sum() for one in params)
        loss.backward()


def values(store) -> None:
    """The store's methods: numbers and names as keys, lists, two devices, no optimizer."""
    n, mine = store.num_workers, store.rank + 1
    total = n * (n + 1) / 2
    out = [mx.nd.zeros((3, 2), ctx=device) for device in DEVICES]
    store.broadcast("a", mx.nd.full((3, 2), mine), out)
    for one in out:
        expect(one, np.full((3, 2), 1.0))
    store.pushpull("a", [mx.nd.full((3, 2), mine, ctx=device) for device in DEVICES], out, priority=-1)
    for one in out:
        expect(one, np.full((3, 2), 2 * total))
    pushed = mx.nd.full((3, 2), mine)
    store.pushpull("a", pushed)
    expect(pushed, np.full((3, 2), total))
    large, small = mx.nd.zeros(LARGE), mx.nd.zeros((1,), dtype="float64")
    store.init(["large", "small"], [large, small])
    store.push(["large", "small"], [mx.nd.full(LARGE, mine), mx.nd.full((1,), mine, dtype="float64")])
    store.pull(["large", "small"], [large, small])
    expect(large, np.full(LARGE, total))
    expect(small, [total])
    assert (store.type, store.is_capable("optimizer")) == ("kvdist_sync", True)
    assert mx.kv.create("KVDist_Async").type == "kvdist_async"


def gluon_step(store) -> None:
    """MXNet's own test of a step, (rank + 1)·w of ones at rate 1, and steps with whole numbers of a large parameter."""
    n = store.num_workers
    small = parameter("small", (10, 1))
    trainer = gluon.Trainer([small], "sgd", {"learning_rate": 1.0}, kvstore=store)
    with autograd.record():
        loss = (small.data() * (store.rank + 1)).sum()
    loss.backward()
    trainer.step(1)
    expect(small.data(), np.full((10, 1), 1 - n * (n + 1) / 2))

    params = [parameter("large", LARGE, DEVICES), parameter("odd", (7,), DEVICES)]
    params[1].lr_mult = 3.0
    store, calls = mx.kv.create("kvdist"), []
    below = store._store.pushpull
    store._store.pushpull = lambda keys, *rest: calls.append(keys) or below(keys, *rest)
    trainer = gluon.Trainer(params, "sgd", {"learning_rate": 1.0}, kvstore=store)
    of_all, moved = 2 * n * (n + 1) / 2, 0.0
    for step, rate in enumerate([1.0, 1.0, 0.5]):
        trainer.set_learning_rate(rate)
        backward(params, 4.0 * (store.rank + 1) * (step + 1))
        trainer.step(4)
        moved += rate * of_all * (step + 1)
        for device in DEVICES:
            expect(params[0].data(device), np.full(LARGE, 1 - moved))
            expect(params[1].data(device), np.full((7,), 1 - 3 * moved))
    assert calls == [[0, 1]] * 3, "each step is one call with all parameters"


def here(store) -> None:
    """With update_on_kvstore=False MXNet updates, and any optimizer of its will do."""
    n = store.num_workers
    one = parameter("here", (5,))
    optimizer = mx.optimizer.AdaGrad(learning_rate=0.5)
    trainer = gluon.Trainer([one], optimizer, kvstore=store, update_on_kvstore=False)
    update, weight = mx.optimizer.get_updater(mx.optimizer.AdaGrad(learning_rate=0.5)), mx.nd.ones((5,))
    for step in range(3):
        backward([one], store.rank + step)
        trainer.step(1)
        update(0, mx.nd.full((5,), n * (n - 1) / 2 + n * step), weight)
        expect(one.data(), weight, 1e-6)


CASES_OF_1 = [
    ("SGD", {"momentum": 0.9, "wd": 0.01}),
    ("SGD", {"clip_gradient": 0.3, "wd": 0.1}),
    ("ccSGD", {}),
    ("NAG", {"momentum": 0.9}),
    ("Signum", {"wd": 0.01, "wd_lh": 0.02}),
    ("Signum", {"momentum": 0.0, "wd": 0.01}),
    ("DCASGD", {}),
    ("Adam", {"wd": 0.01}),
    ("Adam", {"clip_gradient": 0.3}),
    ("Adamax", {"wd": 0.01}),
    ("AdaDelta", {}),
    ("RMSProp", {"centered": True, "wd": 0.01, "clip_weights": 0.5}),
    ("Ftrl", {"wd": 0.01}),
    ("FTML", {"wd": 0.01}),
    ("LAMB", {"wd": 0.01}),
    ("LAMB", {"lower_bound": 0.1, "upper_bound": 0.5, "bias_correction": False}),
    ("Test", {}),
]
CASES_OF_2 = [
    *((name, {"wd": 0.01}) for name in sorted(set(RULES) - {"GroupAdaGrad", "SGLD"})),
    *((name, {"wd": 0.01, "clip_gradient": 0.3}) for name in ("SGD", "NAG", "Adam", "Adamax", "AdaGrad", "RMSProp")),
    ("SGD", {"momentum": 0.9, "wd": 0.01}),
    ("NAG", {"momentum": 0.9, "wd": 0.01}),
    ("Signum", {"momentum": 0.9, "wd": 0.01, "wd_lh": 0.02}),
    ("DCASGD", {"momentum": 0.9, "wd": 0.01}),
    ("AdamW", {"correct_bias": False, "wd": 0.01}),
    ("RMSProp", {"centered": True, "wd": 0.01, "clip_weights": 0.5}),
    ("LAMB", {"lower_bound": 0.1, "upper_bound": 0.5, "bias_correction": False}),
    ("GroupAdaGrad", {}),
]
CASES = CASES_OF_1 if IS_1 else CASES_OF_2


def rules(store) -> None:
    """Each optimizer that is translated moves weights as MXNet's own does, with a schedule."""
    assert {name for name, _ in CASES} == set(RULES) - {"SGLD"}, "SGLD has noise of its own"
    for name, numbers in CASES:

        def make(name=name, numbers=numbers):
            schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
            return mx.optimizer.create(name, learning_rate=0.1, lr_scheduler=schedule, rescale_grad=0.5, **numbers)

        own, update = mx.kv.create("kvdist"), mx.optimizer.get_updater(make())
        random = np.random.RandomState(0)
        wanted = mx.nd.array(random.randn(7, 5))
        given = wanted.copy()
        own.set_optimizer(make())
        own.init(0, given)
        for _ in range(6):
            grads = random.randn(own.num_workers, 7, 5).astype(np.float32)
            own.pushpull(0, mx.nd.array(grads[own.rank]), given)
            update(0, mx.nd.array(grads.sum(axis=0)), wanted)
            expect(given, wanted, 2e-5)
        own.close()


REFUSED_OF_1 = {"AdaGrad": {}, "LBSGD": {}, "RMSProp": {}}


def not_translated(store) -> None:
    """What kvdist does in another way is refused by name, with what to do."""
    make = mx.optimizer
    for name, numbers in {"Nadam": {}, "LARS": {}, **REFUSED_OF_1}.items() if IS_1 else [("Nadam", {}), ("LARS", {})]:
        optimizer = make.create(name, **numbers)
        refused(lambda given=optimizer: store.set_optimizer(given), ValueError, name, "=False")
    refused(lambda: store.set_optimizer(make.create("test", clip_gradient=1.0)), ValueError, "Test", "clip_gradient")
    for name in ("adam", "ftml", "lamb"):
        late = make.create(name, begin_num_update=9)
        refused(lambda given=late: store.set_optimizer(given), ValueError, "begin_num_update=9")

    class Own(make.SGD):
        pass

    refused(lambda: store.set_optimizer(Own()), TypeError, "Own", "update_on_kvstore=False")
    for optimizer in [make.NAG(momentum=0.9, wd=0.1), make.Adam(wd=0.1, clip_gradient=1.0)] if IS_1 else []:
        own = mx.kv.create("kvdist")
        own.set_optimizer(optimizer)
        own.init(0, mx.nd.ones((2,)))
        refused(lambda own=own: own.push(0, mx.nd.ones((2,))), ValueError, "wd")
        own.close()
    sparse = mx.nd.ones((2, 3)).tostype("row_sparse")
    lazy = mx.kv.create("kvdist")
    lazy.set_optimizer(make.Adam(lazy_update=True))
    lazy.init(0, mx.nd.ones((2, 3)))
    refused(lambda: lazy.push(0, sparse), ValueError, "key 0", "row_sparse", "lazy_update False")
    store.init("pushed", mx.nd.ones((2,)))
    store.push("pushed", mx.nd.ones((2,)))
    refused(lambda: store._set_updater(print), NotImplementedError, "set_optimizer")
    refused(lambda: store.pull("pushed"), ValueError, "out")
    refused(lambda: store.push([1, 2], [sparse]), ValueError, "2 keys", "1 values")
    refused(lambda: store.save_optimizer_states("nowhere"), ValueError, "set_optimizer")


def schedule_goes_on(store) -> None:
    """begin_num_update moves the schedule of an optimizer that does not count updates otherwise, as in MXNet."""
    schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=1.0)
    store.set_optimizer(mx.optimizer.SGD(learning_rate=1.0, lr_scheduler=schedule, begin_num_update=4))
    store.init(0, mx.nd.zeros((2,)))
    given = mx.nd.ones((2,))
    store.pushpull(0, given)
    expect(given, np.full((2,), -0.25 * store.num_workers))  # the rate of the fifth update


def resumed(store) -> None:
    """Saved states and counts bring a second trainer to where the first one went on to."""
    folder = str(FOLDER / "states")

    def trained(store, weights, steps, loaded=None):
        one = gluon.Parameter("one", shape=(6,))
        one.initialize(mx.init.Constant((mx.nd if IS_1 else mx.np).array(weights)))
        schedule = mx.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1)
        optimizer = mx.optimizer.Adam(learning_rate=0.1, lr_scheduler=schedule)
        trainer = gluon.Trainer([one], optimizer, kvstore=store)
        if loaded:
            trainer.load_states(loaded)
        for step in steps:
            backward([one], (store.rank + 1) * (step + 1.0))
            trainer.step(1)
        return one.data().asnumpy(), trainer

    start = np.arange(6, dtype=np.float32)
    wanted, _ = trained(mx.kv.create("kvdist"), start, range(6))
    half, trainer = trained(mx.kv.create("kvdist"), start, range(3))
    trainer.save_states(folder)
    given, trainer = trained(mx.kv.create("kvdist"), half, range(3, 6), folder)
    expect(given, wanted)
    assert trainer.learning_rate == 0.025, trainer.learning_rate


def main() -> None:
    logging.disable(logging.INFO)
    store = mx.kv.create("kvdist")
    assert type(store) is kvdist_store.KVDist
    for scenario in sys.argv[2:]:
        globals()[scenario](store if scenario == "values" else mx.kv.create("kvdist"))
    print("bridge checked", *sys.argv[2:], flush=True)


if __name__ == "__main__":
    main()
