"""What optimizers on servers do, one scenario a function: ``optimizers.py SCENARIO``."""

import hashlib
import sys

import numpy as np
import torch

from kvdist import ConfigError, OptimizerMismatch, kv, lr_scheduler, optimizer

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


def torchs_own():
    """AdamW of torch with two groups and a schedule: the steps of all workers are those of one process."""
    from kvdist import Trainer

    torch.set_num_threads(1)
    store = kv.create("dist")
    for kind, on_store, steps in (("dist", True, 100), ("dist", False, 20), ("collective", None, 20)):
        own = kv.create(kind)
        nets, optimizers = [], []
        for _ in range(2):
            torch.manual_seed(0)
            nets.append(torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)))
            weights = list(nets[-1].parameters())
            others = {"params": weights[2:], "weight_decay": 0.1, "betas": (0.5, 0.9)}
            optimizers.append(torch.optim.AdamW([{"params": weights[:2]}, others], lr=0.01))
        schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 120) for one in optimizers]
        trainer = Trainer(nets[0].parameters(), optimizers[0], kvstore=own, update_on_kvstore=on_store)
        for _ in range(steps):
            inputs = torch.randn(store.num_workers, 8, 7)
            for net, share in zip(nets, (inputs[store.rank], inputs.flatten(0, 1)), strict=True):
                net.zero_grad()
                (net(share) - share.sum(1, keepdim=True).sin()).square().mean().backward()
            trainer.step()
            optimizers[1].step()
            for schedule in schedules:
                schedule.step()
        for ours, theirs in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        trainer.close()
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
    print_digest(store.pull(list(SHAPES)))
    return store


def print_digest(arrays, label=""):
    """Print what tells whether all workers have the same bits."""
    print("digest", label, hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest(), flush=True)


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


# Against torch's own rules. Its functions, not its classes: those import a compiler, which takes seconds.


def nesterov():
    """Nesterov's momentum on the servers is torch's."""
    from torch.optim.sgd import sgd

    lr, momentum, wd = 0.05, 0.9, 0.01
    buffers = {key: [None] for key in SHAPES}

    def theirs(key, weight, grad, _):
        numbers = {"lr": lr, "momentum": momentum, "weight_decay": wd}
        sgd([weight], [grad], buffers[key], **numbers, dampening=0, nesterov=True, maximize=False)

    return against_torch(theirs, "nag", learning_rate=lr, momentum=momentum, wd=wd)


def adam_w():
    """AdamW on the servers is torch's, whose ε and decay are brought to where kvdist has them."""
    from torch.optim.adamw import adamw

    lr, beta1, beta2, epsilon, wd = 0.01, 0.8, 0.99, 1e-3, 0.1
    states = {}

    def theirs(key, weight, grad, count):
        # Ours has ε outside the correction of the variance, and the decay takes part in the corrections.
        root = (1 - beta2**count) ** 0.5
        numbers = {"eps": epsilon / root, "weight_decay": wd * root / (1 - beta1**count)}
        mean, variance = states.setdefault(key, (torch.zeros_like(weight), torch.zeros_like(weight)))
        states_and_step = [mean], [variance], [], [torch.tensor(count - 1.0)]
        numbers |= {"lr": lr, "beta1": beta1, "beta2": beta2}
        adamw([weight], [grad], *states_and_step, **numbers, amsgrad=False, maximize=False)

    return against_torch(theirs, "adamw", learning_rate=lr, beta1=beta1, beta2=beta2, epsilon=epsilon, wd=wd)


def against_torch(theirs, name, **numbers):
    """Ten steps of an optimizer on the servers, and of torch's here with the sum of all workers' gradients.

    Args:
        theirs: updates a weight of torch in place; gets the key, the weight, the gradient, and the count of the step.
        name, numbers: the optimizer of kvdist.
    """
    dtypes = {"small": np.float64, "big": np.float32}
    tolerances = {"small": 1e-12, "big": 2e-6}
    random = np.random.default_rng(7)  # the same on all workers
    first = {key: random.normal(size=shape).astype(dtypes[key]) for key, shape in SHAPES.items()}
    weights = {key: torch.tensor(value) for key, value in first.items()}
    store = kv.create("dist")
    store.init(list(SHAPES), list(first.values()))
    store.set_optimizer(name, **numbers)
    for count in range(1, 11):
        # Whole numbers: their sums are the same in any order.
        shapes = {key: (store.num_workers, *shape) for key, shape in SHAPES.items()}
        grads = {key: random.integers(-4, 5, shape).astype(dtypes[key]) for key, shape in shapes.items()}
        store.push(list(SHAPES), [grad[store.rank] for grad in grads.values()])
        for key, value in zip(SHAPES, store.pull(list(SHAPES)), strict=True):
            theirs(key, weights[key], torch.tensor(grads[key].sum(axis=0)), count)
            assert value.dtype == dtypes[key]
            np.testing.assert_allclose(value, weights[key].numpy(), tolerances[key], tolerances[key], err_msg=key)
    values = store.pull(list(SHAPES))
    assert all((value != old).mean() > 0.9 for value, old in zip(values, first.values(), strict=True))
    print_digest(values)
    return store


# Through a Trainer, with the update on the servers and here.


def bfloat16():
    """Weights of bfloat16 are updated in float32 and rounded once; on the servers so are the sums of gradients."""
    shapes = [(7,), (3, 5), (1200, 1200), (1,)]
    for on_store, store, train in trainers():
        random = torch.Generator().manual_seed(3)  # the same on all workers
        weights = parameters([torch.randn(shape, generator=random).bfloat16() for shape in shapes])
        with torch.no_grad():
            weights[-1].fill_(1)
        expected = [weight.detach().clone() for weight in weights]
        trainer = train(weights, learning_rate=2**-8)
        for _ in range(5):
            grads = [torch.randn(store.num_workers, *shape, generator=random).bfloat16() for shape in shapes]
            # 256 + 1 would be 256 in bfloat16, while 1 - 257/256 is -1/256.
            grads[-1][:, 0] = torch.tensor([1.0] * (store.num_workers - 1) + [256.0])
            set_grads(weights, [grad[store.rank] for grad in grads])
            trainer.step(1)
            sums = [grad.float().sum(dim=0) for grad in grads]
            if not on_store:  # they come back as bfloat16
                sums = [one.bfloat16().float() for one in sums]
            expected = [(old.float() - one * 2**-8).bfloat16() for old, one in zip(expected, sums, strict=True)]
            for weight, right in zip(weights, expected, strict=True):
                assert weight.dtype == torch.bfloat16 and torch.equal(weight, right), (on_store, weight.shape)
        assert (weights[-1] == 1 - 5) == (not on_store), weights[-1]
        print_digest_of(weights, on_store)
    return store


def schedule():
    """A schedule in the optimizer counts at the servers; factors of keys act on it."""
    store = started()
    n = store.num_workers
    chosen = optimizer.create("sgd", lr_scheduler=lr_scheduler.FactorScheduler(1, 0.5, base_lr=1.0))
    chosen.lr_mult = {"small": 2.0}
    store.set_optimizer(chosen)
    for _ in range(4):
        store.push(list(SHAPES), ones())
    small, big = store.pull(list(SHAPES))
    assert (small == 1 - 2 * 1.875 * n).all() and (big == 1 - 1.875 * n).all(), (small.flat[0], big.flat[0])
    return store


WHOLE = {"small": (2, 3), "big": (1200, 1200), "bias": (7,)}


def whole(name, **numbers):
    """Servers compute what one updater computes that has whole keys."""
    store = kv.create("dist")
    store.set_optimizer(name, **numbers)
    random = np.random.default_rng(5)  # the same on all workers
    keys = [key for key in WHOLE if name != "groupadagrad" or key != "bias"]
    weights = [random.standard_normal(WHOLE[key]).astype(np.float32) for key in keys]
    store.init(keys, weights)
    updater = optimizer.Updater(optimizer.create(name, **numbers))
    for _ in range(3):
        grads = random.standard_normal((store.num_workers, sum(weight.size for weight in weights))).astype(np.float32)
        ends = np.cumsum([weight.size for weight in weights])[:-1]
        parts = [[one.reshape(w.shape) for one, w in zip(np.split(g, ends), weights, strict=True)] for g in grads]
        store.push(keys, parts[store.rank])
        for key, weight, *own in zip(keys, weights, *parts, strict=True):
            updater(key, np.sum(own, axis=0, dtype=np.float32), weight)
        for found, weight in zip(store.pull(keys), weights, strict=True):
            np.testing.assert_allclose(found, weight, rtol=2e-5, atol=2e-5)
    print_digest(store.pull(keys))
    return store


def lars():
    return whole("lars", momentum=0.9, eta=0.1)


def lamb():
    return whole("lamb", wd=0.1)


def lans():
    return whole("lans", wd=0.1)


def rows():
    return whole("groupadagrad", learning_rate=0.1)


def noise():
    return whole("sgld", learning_rate=0.01, seed=11)


def nadam():
    return whole("nadam")


def masters():
    """Halves with masters take steps that are too small for halves."""
    store = kv.create("dist")
    store.set_optimizer("sgd", learning_rate=2.0**-14, multi_precision=True)
    keys = list(SHAPES)
    store.init(keys, [np.ones(shape, np.float16) for shape in SHAPES.values()])
    for _ in range(64):
        store.push(keys, [np.ones(shape, np.float16) for shape in SHAPES.values()])
    all_are(store, np.float16(1 - 64 * store.num_workers * 2.0**-14))
    # What is broadcast counts, not the masters.
    store.broadcast(keys, [np.full(shape, 4, np.float16) for shape in SHAPES.values()],
                    [np.empty(shape, np.float16) for shape in SHAPES.values()])  # fmt: skip
    store.push(keys, [np.ones(shape, np.float16) for shape in SHAPES.values()])
    all_are(store, np.float16(4))
    return store


def own_rule():
    """An optimizer of the operator's own, which scheduler and servers know by a module."""
    import rules_of_the_operator  # noqa: F401

    store = started()
    store.set_optimizer("Quartering", learning_rate=0.5)
    store.push(list(SHAPES), ones())
    all_are(store, 0.25 + 0.5 * store.num_workers)
    return store


def own_rule_unknown():
    """A rule that only the workers know is refused, and the error says what to do."""
    import rules_of_the_operator  # noqa: F401

    store = started()
    try:
        store.set_optimizer("quartering")
    except ConfigError as error:
        print(f"refused: {error}", flush=True)
    return store


def groups():
    """Groups of parameters have factors of their own on the learning rate and the decay, changed ones too."""
    for on_store, store, train in trainers():
        mean = (store.num_workers + 1) / 2
        weights = parameters([torch.ones(shape) for shape in ((3, 5), (1200, 1200), (1,), (7,))])
        factors = [(2.0, 1.0), (2.0, 1.0), (0.5, 0.0), (1.0, 1.0)]
        parts = [
            {"params": weights[:2], "lr_mult": 2.0},
            {"params": weights[2], "lr_mult": 0.5, "wd_mult": 0.0},
            {"params": iter(weights[3:])},
        ]
        trainer = train(parts, learning_rate=0.5, wd=0.25)
        expected = [1.0] * 4
        for lr in (0.5, 0.5, 0.25, 0.25):
            if lr != trainer.learning_rate:
                trainer.set_learning_rate(lr)
                trainer.optimizer.wd_mult[3], factors[3] = 4.0, (1.0, 4.0)
            set_grads(weights, [torch.full_like(weight, store.rank + 1) for weight in weights])
            trainer.step()
            expected = [
                old - lr * lr_mult * (mean + 0.25 * wd_mult * old)
                for old, (lr_mult, wd_mult) in zip(expected, factors, strict=True)
            ]
            for weight, right in zip(weights, expected, strict=True):
                assert (weight == right).all(), (on_store, weight.flatten()[0], right)
        print_digest_of(weights, on_store)
    return store


def batch_sizes():
    """Each worker's gradient is divided by the number of its own examples, whoever updates the weights."""
    for on_store, store, train in trainers():
        n = store.num_workers
        net = torch.nn.Linear(5, 3, bias=False)
        torch.nn.init.ones_(net.weight)
        trainer = train(net.parameters(), learning_rate=0.5, momentum=0.5)
        value, momentum = 1.0, 0.0
        for step in range(4):
            # 2 and 3 examples, then 3 and 2, …: a third of three equal numbers is exact.
            size = 2 + (store.rank + step) % 2
            net.zero_grad()
            net(torch.full((size, 5), store.rank + 1.0)).sum().backward()
            trainer.step(size)
            momentum = 0.5 * momentum - 0.5 * (n * (n + 1) // 2)
            value += momentum
            assert (net.weight == value).all(), (on_store, step, net.weight, value)
        print_digest_of([net.weight], on_store)
    return store


def clipping():
    """Gradients summed over the workers can be clipped before the update."""
    from kvdist import Trainer

    store = kv.create("dist")
    n = store.num_workers
    weights, copies = (parameters([torch.ones(3, 5), torch.ones(1200, 1200)]) for _ in range(2))
    momenta = [torch.zeros_like(copy) for copy in copies]
    numbers = {"learning_rate": 0.5, "momentum": 0.5}
    trainer = Trainer(weights, "sgd", numbers, kvstore=store, update_on_kvstore=False)
    for average in (False, True, False):
        set_grads(weights, [torch.full_like(weight, (store.rank + 1) * (3 + i)) for i, weight in enumerate(weights)])
        total = n * (n + 1) / 2 / (n if average else 1)
        set_grads(copies, [torch.full_like(copy, total * (3 + i)) for i, copy in enumerate(copies)])
        trainer.allreduce_grads(average=average)
        assert all(torch.equal(weight.grad, copy.grad) for weight, copy in zip(weights, copies, strict=True))
        for one in (weights, copies):
            assert torch.nn.utils.clip_grad_norm_(one, 2.0) > 2
        trainer.update()
        for weight, copy, momentum in zip(weights, copies, momenta, strict=True):
            momentum.mul_(0.5).sub_(copy.grad * 0.5)
            copy.data += momentum
            assert torch.equal(weight, copy), (weight.flatten()[0], copy.flatten()[0])
    print_digest_of(weights)
    return store


def trainers():
    """Each way to update: whether it is on the store, a store of its own, and what makes a trainer with sgd on it."""
    from kvdist import Trainer

    stores = [(on_store, kv.create("dist")) for on_store in (True, False)]
    for on_store, store in stores:

        def train(params, *, store=store, on_store=on_store, **numbers):
            return Trainer(params, "sgd", numbers, kvstore=store, update_on_kvstore=on_store)

        yield on_store, store, train
        if on_store:
            store.close()  # the other is returned, and keeps the process in the cluster until then


def parameters(tensors):
    return [torch.nn.Parameter(tensor) for tensor in tensors]


def set_grads(weights, grads):
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad.clone()  # the trainer may write to it


def print_digest_of(weights, label=""):
    """`print_digest` for parameters of any floating type: float64 loses nothing of them."""
    print_digest([weight.detach().double().numpy() for weight in weights], label)


if __name__ == "__main__":
    stores = []
    for scenario in sys.argv[1].split(","):
        stores.append(globals()[scenario]())
        print(f"{scenario} checked on {stores[-1].rank} of {stores[-1].num_workers}", flush=True)
    for used in stores:
        used.close()
