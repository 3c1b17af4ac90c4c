"""Checks of kvdist.mxnet, run in MXNet's own environment: mxnet_horovod.py SCENARIO …

Expected values are computed by hand, or by MXNet's own optimizers in this process.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import kvdist
import kvdist.mxnet as hvd

IS_1 = mx.__version__.startswith("1.")
arrays_of = mx.nd if IS_1 else mx.np
"""What Gluon's layers take and give."""
LARGE = (700, 801)
"""More elements than a slice has."""


def expect(given: Any, wanted: Any, tolerance: float = 0.0) -> None:
    given, wanted = (one.asnumpy() if isinstance(one, mx.nd.NDArray) else np.asarray(one) for one in (given, wanted))
    message = f"{given.ravel()[:3]} of {given.shape} is not {wanted.ravel()[:3]} of {wanted.shape}"
    assert given.shape == wanted.shape and np.allclose(given, wanted, rtol=tolerance, atol=tolerance), message


def refused(error: type[Exception], words: str, call: Callable[..., object], *args: Any, **kwargs: Any) -> None:
    """A call raises this error, and it says all these words."""
    try:
        call(*args, **kwargs)
    except error as said:
        missing = [word for word in words.split() if word not in str(said)]
        assert not missing, f"{missing} not in: {said}"
    else:
        raise AssertionError(f"not refused with {words!r}")


def parameter(name: str, shape: tuple[int, ...], init: Any = "ones", **kwargs: Any) -> gluon.Parameter:
    made = gluon.Parameter(name, shape=shape, **kwargs)
    made.initialize(init)
    return made


def backward(params: list[gluon.Parameter], factor: float) -> None:
    """The gradient of every parameter is `factor`, whatever its weights are."""
    with autograd.record():
        losses = [(one.data() * factor).sum() for one in params]
    autograd.backward(losses)


def sums() -> None:
    """Averages and sums of every dtype, in place and not, scaled, one and several."""
    n, mine = hvd.size(), hvd.rank() + 1
    total = n * (n + 1) / 2
    for shape in ((1,), (3, 2), LARGE):
        given = mx.nd.full(shape, mine)
        expect(hvd.allreduce(given), np.full(shape, total / n), 1e-6)
        expect(given, np.full(shape, mine))
        assert hvd.allreduce_(given, average=False) is given
        expect(given, np.full(shape, total))
    for dtype in ("float16", "float64", "int8", "int32", "int64", "uint8"):
        given = mx.nd.full((5,), mine, dtype=dtype)
        summed, mean = hvd.allreduce(given, op=hvd.Sum), hvd.allreduce(given, op=hvd.Average)
        assert (summed.dtype, mean.dtype) == (given.dtype, given.dtype)
        expect(summed, np.full(5, total))
        expect(mean, np.full(5, total / n if "float" in dtype else total // n), 1e-3)
    negative = mx.nd.full((2,), -mine, dtype="int64")
    expect(hvd.allreduce(negative, name="toward zero"), np.full(2, -(total // n)))
    given = mx.nd.full((4,), mine)
    scaled = hvd.allreduce(given, average=False, prescale_factor=0.5, postscale_factor=4.0, priority=3)
    expect(scaled, np.full(4, 2 * total))
    expect(given, np.full(4, mine))
    group = [mx.nd.full((k + 1,), mine * (k + 1), dtype=dtype) for k, dtype in enumerate(("float32", "int32") * 2)]
    for k, one in enumerate(hvd.grouped_allreduce(group, average=False, name="group")):
        expect(one, np.full(k + 1, total * (k + 1)))
    hvd.grouped_allreduce_(group, average=False, name="group")
    expect(group[3], np.full(4, total * 4))
    assert hvd.grouped_allreduce([]) == []
    with autograd.record():
        expect(hvd.allreduce(mx.nd.ones((2,))), [1, 1])
    if not IS_1:
        summed = hvd.allreduce(mx.np.array(mine), average=False)
        assert type(summed) is mx.np.ndarray and summed.item() == total


def rows() -> None:
    """Row-sparse arrays get the rows that any rank has."""
    n, mine = hvd.size(), hvd.rank()
    for step in range(3):
        ids = [mine, 4 + step]  # one of its own, and one that all have
        given = mx.nd.sparse.row_sparse_array((np.full((2, 3), mine + 1.0), ids), shape=(9, 3), dtype="float32")
        wanted = np.zeros((9, 3))
        wanted[:n] += np.arange(1, n + 1)[:, None]
        wanted[4 + step] += n * (n + 1) / 2
        summed = hvd.allreduce(given, average=False, name="rows", prescale_factor=2.0)
        assert summed.stype == "row_sparse" and sorted(summed.indices.asnumpy()) == sorted({*range(n), 4 + step})
        expect(summed.tostype("default"), 2 * wanted)
        expect(hvd.allreduce(given, name="rows").tostype("default"), wanted / n, 1e-6)
    empty = mx.nd.sparse.zeros("row_sparse", (9, 3))
    expect(hvd.allreduce(empty, average=False).tostype("default"), np.zeros((9, 3)))

    if not IS_1:
        return  # Gluon 2 has no sparse gradients
    table = gluon.nn.Embedding(50, 4, sparse_grad=True)
    table.initialize(mx.init.One())
    other = parameter("other", (3,))
    trainer = hvd.DistributedTrainer([*table.collect_params().values(), other], "sgd", {"learning_rate": 1.0})
    for _ in range(2):
        with autograd.record():
            loss = table(mx.nd.array([mine, 40])).sum() + other.data().sum()
        loss.backward()
        trainer.step(1)
    wanted = np.ones((50, 4))
    wanted[:n] -= 2 / n
    wanted[40] -= 2
    expect(table.weight.data(), wanted, 1e-6)
    expect(other.data(), np.full(3, -1.0))


def gathered() -> None:
    """Arrays of different lengths, and objects."""
    n, mine = hvd.size(), hvd.rank()
    for width in (1, 2000):
        wanted = np.concatenate([np.full((k + 1, width), k) for k in range(n)])
        expect(hvd.allgather(mx.nd.full((mine + 1, width), mine), name="rows"), wanted)
    assert hvd.allgather(mx.nd.ones((2,), dtype="float16")).dtype == np.float16
    refused(kvdist.InitMismatch, "gives float rows shape", hvd.allgather, mx.nd.ones((1, 2 + mine)))
    for root in range(n):
        given = {"epoch": mine, "names": ("a", {1, 2}), "weights": mx.nd.full((2,), mine), "raw": np.arange(mine)}
        found = hvd.broadcast_object(given, root_rank=root)
        assert found["epoch"] == root and found["names"] == ("a", {1, 2}) and len(found["raw"]) == root
        expect(found["weights"], [root, root])
        given = arrays_of.full((2,), mine)
        assert type(hvd.broadcast_object(given, root_rank=root)) is type(given)
    assert hvd.allgather_object("x" * (5000 * mine)) == ["x" * (5000 * k) for k in range(n)]
    expected = TypeError if mine == 0 else kvdist.CollectiveError
    refused(expected, "cannot sent", hvd.broadcast_object, object(), root_rank=0)
    assert hvd.broadcast_object(mine, root_rank=n - 1) == n - 1, "what could not be sent stops nobody"


def broadcasts() -> None:
    """Arrays, parameters, dicts, and parameters that get their shape later, from any root."""
    n, mine = hvd.size(), hvd.rank()
    for root in range(n):
        given = mx.nd.full((3, 2), mine)
        expect(hvd.broadcast(given, root_rank=root, name="given"), np.full((3, 2), root))
        expect(given, np.full((3, 2), mine))
        assert hvd.broadcast_(given, root_rank=root) is given
        expect(given, np.full((3, 2), root))
    odd = mx.nd.array([np.nan, -0.0, np.inf, mine])
    bits = hvd.broadcast(odd, n - 1).asnumpy()
    assert np.isnan(bits[0]) and np.signbit(bits[1]) and bits[2:].tolist() == [np.inf, n - 1]
    arrays = {"b": mx.nd.full((4,), mine), "a": mx.nd.full(LARGE, mine, dtype="float64")}
    hvd.broadcast_parameters(arrays, root_rank=n - 1)
    expect(arrays["a"], np.full(LARGE, n - 1))
    expect(arrays["b"], np.full(4, n - 1))
    hvd.broadcast_parameters({})

    mx.random.seed(mine + 1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(3, in_units=2), gluon.nn.Dense(5), gluon.nn.Dense(2))
    net.initialize(mx.init.Normal(1.0))
    net.hybridize()
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)
    hvd.broadcast_parameters(net.collect_params(), root_rank=1)  # what is awaited is awaited once
    net(arrays_of.ones((1, 2)))
    for name, one in net.collect_params().items():
        everywhere = hvd.allgather_object(one.data().asnumpy())
        assert all((other == everywhere[1]).all() for other in everywhere), name
        assert np.abs(everywhere[1]).sum() > 0 or "bias" in name
    net.initialize(mx.init.Constant(mine), force_reinit=True)
    expect(next(iter(net.collect_params().values())).data(), np.full((3, 2), mine))


def trainers() -> None:
    """Steps of a Trainer, of an optimizer in a Trainer, with options; the gradients themselves."""
    n, mine = hvd.size(), hvd.rank() + 1
    mean = (n + 1) / 2
    options: list[dict[str, Any]] = [
        {},
        {"gradient_predivide_factor": 2.0},
        {"num_groups": 2, "prefix": "second"},
        {"compression": hvd.Compression.fp16},
    ]
    for option in options:
        params = [parameter("large", LARGE), parameter("odd", (7,)), parameter("double", (2,), dtype="float64")]
        params.append(parameter("still", (2,), grad_req="null"))
        params[1].lr_mult = 3.0
        trainer = hvd.DistributedTrainer(params, "sgd", {"learning_rate": 0.5}, **option)
        for step in range(3):
            backward(params[:3], 4.0 * mine)
            trainer.step(4)
            moved = 0.5 * (step + 1) * mean
            expect(params[0].data(), np.full(LARGE, 1 - moved), 1e-6)
            expect(params[1].data(), np.full(7, 1 - 3 * moved), 1e-6)
            expect(params[2].data(), np.full(2, 1 - moved), 1e-6)
        expect(params[3].data(), np.ones(2))
        backward(params[:3], 4.0 * mine)
        trainer.allreduce_grads()
        expect(params[0].grad(), np.full(LARGE, 4 * n * mean / option.get("gradient_predivide_factor", 1.0)))
        trainer.update(4)

    for name, numbers in (("sgd", {"momentum": 0.9}), ("adam", {})):
        params = [parameter(f"p{k}", (3 + k,)) for k in range(6)]
        inner = mx.optimizer.create(name, learning_rate=0.5, **numbers)
        opt = hvd.DistributedOptimizer(inner, gradient_predivide_factor=float(n))
        assert isinstance(opt, mx.optimizer.Optimizer) and (opt.rescale_grad, opt.learning_rate) == (1.0, 0.5)
        trainer = gluon.Trainer(params, opt, kvstore=None)
        update = mx.optimizer.get_updater(mx.optimizer.create(name, learning_rate=0.5, **numbers))
        reference = mx.nd.ones((3,))
        for step in range(4):
            if step == 2:
                trainer.set_learning_rate(0.25)
                update.optimizer.set_learning_rate(0.25)
                with tempfile.TemporaryDirectory() as folder:
                    file = str(Path(folder) / "states")
                    trainer.save_states(file)
                    trainer.load_states(file)
            backward(params, 8.0 * mine)
            trainer.step(8)
            update(0, mx.nd.full((3,), mean), reference)
            expect(params[0].data(), reference, 1e-6)
            expect(params[5].data()[:3], reference, 1e-6)
        assert inner.learning_rate == 0.25 or step > 2, "states that were loaded have a copy"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        inner = mx.optimizer.create("sgd", learning_rate=1.0)
        one = parameter("one", (2,))
        trainer = hvd.DistributedTrainer([one], hvd.DistributedOptimizer(inner))
    assert any("takes the optimizer out" in str(one.message) for one in said)
    backward([one], mine)
    trainer.step(1)
    expect(one.data(), np.full(2, 1 - mean))


def net_of(weights: np.random.RandomState) -> gluon.nn.HybridSequential:
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(32, in_units=20, activation="tanh"), gluon.nn.Dense(5, in_units=32))
    net.initialize()
    for one in net.collect_params().values():
        one.set_data(arrays_of.array(weights.randn(*one.shape) * 0.3))
    return net


def whole_batch() -> None:
    """Twenty steps end where one process ends that has all examples of a step."""
    n, mine = hvd.size(), hvd.rank()
    loss_of = gluon.loss.SoftmaxCrossEntropyLoss()
    sgd, adam = {"learning_rate": 0.1, "momentum": 0.9, "wd": 1e-3}, {"learning_rate": 0.01}
    for name, numbers in (("sgd", sgd), ("adam", adam)):
        for way in ("trainer", "optimizer"):
            data = np.random.RandomState(3)
            nets = [net_of(np.random.RandomState(5)) for _ in range(2)]
            alone = gluon.Trainer(nets[0].collect_params(), mx.optimizer.create(name, **numbers), kvstore=None)
            opt = mx.optimizer.create(name, **numbers)
            params = nets[1].collect_params()
            if way == "trainer":
                together = hvd.DistributedTrainer(params, opt)
            else:
                together = gluon.Trainer(params, hvd.DistributedOptimizer(opt), kvstore=None)
            for _ in range(20):
                inputs, targets = data.randn(16 * n, 20).astype(np.float32), data.randint(0, 5, 16 * n)
                for net, trainer, part in ((nets[0], alone, slice(None)), (nets[1], together, slice(mine, None, n))):
                    with autograd.record():
                        loss = loss_of(net(arrays_of.array(inputs[part])), arrays_of.array(targets[part]))
                    loss.backward()
                    trainer.step(len(inputs[part]))
            pairs = zip(nets[1].collect_params().items(), nets[0].collect_params().values(), strict=True)
            for (label, one), other in pairs:
                ours, theirs = one.data().asnumpy(), other.data().asnumpy()
                off = np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)
                print(f"{name} by {way}: {label} is off by {off:.1e}", flush=True)
                assert off <= 1e-6, (name, way, label, off)


def places() -> None:
    """All ranks are on this machine."""
    assert hvd.is_initialized()
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


def differences() -> None:
    """What ranks give that differs is an error on all of them that names it; then they go on."""
    mine = hvd.rank()
    trailing = "every rank must give the same"
    given = mx.nd.ones((2 + mine,))
    refused(kvdist.InitMismatch, f"'x' float32 (2,) (3,) worker-0 {trailing}", hvd.allreduce, given, name="x")
    dtype = "float64" if mine else "float32"
    refused(kvdist.InitMismatch, "'y' float32 float64 worker-1", hvd.allreduce, mx.nd.ones((2,), dtype=dtype), name="y")
    refused(kvdist.InitMismatch, "'z0' 'z1'", hvd.allreduce, mx.nd.ones((2,)), name=f"z{mine}")
    refused(kvdist.InitMismatch, "Sum Average", hvd.allreduce, mx.nd.ones((2,)), op=hvd.Average if mine else hvd.Sum)
    refused(kvdist.InitMismatch, "from rank 0 1", hvd.broadcast, mx.nd.ones((2,)), root_rank=mine)
    names = ["first", "second"] if mine else ["second", "first"]
    params = [parameter(name, (4,)) for name in names]
    for trainer in (
        hvd.DistributedTrainer(params, "sgd"),
        gluon.Trainer(params, hvd.DistributedOptimizer(mx.optimizer.create("sgd")), kvstore=None),
    ):
        backward(params, 1.0)
        refused(kvdist.InitMismatch, f"gradient 0 'first' 'second' worker-1 {trailing}", trainer.step, 1)
    more = {"a": mx.nd.ones((2,)), **({"b": mx.nd.ones((2,))} if mine else {})}
    refused(kvdist.InitMismatch, "parameter 'b' nothing more", hvd.broadcast_parameters, more)
    expect(hvd.allreduce(mx.nd.full((2,), mine), average=False), np.full(2, hvd.size() * (hvd.size() - 1) / 2))


def wrong_calls() -> None:
    """In one process: what is refused before anything travels."""
    refused(kvdist.ConfigError, "kvdist.mxnet has not been initialized; use hvd.init()", hvd.size)
    refused(kvdist.ConfigError, "use hvd.init()", hvd.DistributedTrainer, [parameter("p", (1,))], "sgd")
    assert not hvd.is_initialized()
    hvd.init()
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
    params, ones = [parameter("p", (2,))], mx.nd.ones((2,))
    store = {"kvstore": "dist_sync"}
    refused(TypeError, "no kvstore 'dist_sync' leave it out", hvd.DistributedTrainer, params, "sgd", **store)
    ours = kvdist.optimizer.create("sgd")
    for make in (lambda opt: hvd.DistributedTrainer(params, opt), hvd.DistributedOptimizer):
        refused(TypeError, "optimizer of MXNet kvdist.optimizer.sgd.SGD mx.optimizer.create", make, ours)
    zero = {"gradient_predivide_factor": 0.0}
    refused(ValueError, "gradient_predivide_factor is 0.0", hvd.DistributedTrainer, params, "sgd", **zero)
    refused(ValueError, "num_groups is -1", hvd.DistributedOptimizer, mx.optimizer.create("sgd"), num_groups=-1)
    refused(TypeError, "compression 'fp16' Compression.fp16", hvd.DistributedTrainer, params, "sgd", None, "fp16")
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allgather, lambda one: hvd.broadcast(one, 0)):
        refused(TypeError, "arrays of MXNet numpy.ndarray of float64 mx.nd.array(value,", call, np.ones(2))
    refused(TypeError, "'w' numpy.ndarray", hvd.broadcast_parameters, {"w": np.ones(2)})
    refused(TypeError, "net.collect_params() list", hvd.broadcast_parameters, params)
    refused(ValueError, "root_rank is 1; the ranks are 0 to 0", hvd.broadcast, ones, 1)
    refused(ValueError, "Adasum; servers have Average and Sum", hvd.allreduce, ones, op=2)
    refused(ValueError, "supersedes average", hvd.allreduce, ones, average=True, op=hvd.Sum)
    refused(TypeError, "allreduce takes arrays", hvd.allreduce, 1.0)
    refused(TypeError, "grouped_allreduce list of arrays call allreduce", hvd.grouped_allreduce, ones)
    refused(ValueError, "root_rank is 'a'", hvd.broadcast, ones, "a")
    rows = mx.nd.ones((2, 1)).tostype("row_sparse")
    refused(TypeError, "row_sparse .tostype('default')", hvd.broadcast_object, rows)
    refused(TypeError, "row_sparse .tostype('default')", hvd.broadcast, rows, 0)
    refused(TypeError, "allgather dense row_sparse float32 (2, 1)", hvd.allgather, rows)

    bare = gluon.Parameter("bare", shape=(2,))
    refused(RuntimeError, "'bare' no value no initializer net.initialize()", hvd.broadcast_parameters, {"bare": bare})
    trainer = hvd.DistributedTrainer([bare], "sgd")
    refused(RuntimeError, "'bare' has no value at the first step net.initialize() forward", trainer.step, 1)
    net = gluon.nn.HybridSequential()
    net.add(gluon.nn.Dense(2), gluon.nn.Dense(3))
    net.initialize()
    trainer = hvd.DistributedTrainer(net.collect_params(), "sgd")
    hvd.broadcast_parameters(net.collect_params())
    net[0](arrays_of.ones((1, 2)))
    refused(RuntimeError, "weight' has no value at the first step net.collect_params(select)", trainer.step, 1)
    hvd.shutdown()  # which says what was never broadcast
    hvd.shutdown()
    hvd.init()
    expect(hvd.allreduce(ones), [1, 1])
    hvd.shutdown()


def ends() -> None:
    """The end of the process says, too, what was never broadcast."""
    net = gluon.nn.Dense(2)
    net.initialize()
    hvd.broadcast_parameters(net.collect_params())


if __name__ == "__main__":
    scenarios = sys.argv[1:]
    if scenarios != ["wrong_calls"]:
        hvd.init()
    for scenario in scenarios:
        globals()[scenario]()
    print(f"checked {' '.join(scenarios)}", flush=True)
