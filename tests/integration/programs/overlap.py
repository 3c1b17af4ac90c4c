"""Training with ``overlap=True``, one scenario a function: ``overlap.py SCENARIO``. Every worker checks by itself."""

import hashlib
import os
import signal
import sys

import torch

from kvdist import PeerLostError, Trainer, kv

torch.set_num_threads(1)
STEPS = 5


class Branches(torch.nn.Module):
    """Layers of awkward sizes, two of more than a bucket, one of them not used by every pass."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(7, 1031)
        self.big = torch.nn.Linear(1031, 1033)
        self.branch = torch.nn.Linear(1033, 1033, bias=False)
        self.last = torch.nn.Linear(1033, 3)
        self.to(dtype)

    def forward(self, x, with_branch=True):
        x = torch.tanh(self.big(torch.tanh(self.first(x))))
        return self.last(x + self.branch(x) if with_branch else x)


def batches(rank, dtype=torch.float32):
    """What a worker trains on: other numbers for each rank and step."""
    random = torch.Generator().manual_seed(rank)
    return [torch.randn(5 + rank, 7, generator=random).to(dtype) for _ in range(STEPS)]


def both_ways(train, dtype=torch.float32, optimizer="adam"):
    """Run ``train(net, trainer, rank)`` without and with overlap, updating on the store and here; compare the bits."""
    stores = []
    for on_store in (True, False):
        weights = []
        for overlap in (False, True):
            stores.append(kv.create("dist"))
            net = Branches(dtype)
            ways = {"kvstore": stores[-1], "update_on_kvstore": on_store, "overlap": overlap}
            train(net, Trainer(net.parameters(), optimizer, {"learning_rate": 0.01}, **ways), stores[-1].rank)
            weights.append(list(net.parameters()))
        assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))
        assert not torch.equal(weights[1][0], Branches(dtype).first.weight), "it was trained"
        print_digest(weights[1], f"on_store={on_store}")
    for store in stores[:-1]:
        store.close()
    return stores[-1]


def print_digest(weights, label):
    """Print what tells whether all workers have the same bits."""
    digest = hashlib.sha256(b"".join(one.detach().double().numpy().tobytes() for one in weights))
    print("digest", label, digest.hexdigest(), flush=True)


def floats():
    """Gradients whose sum depends on the order of its terms, and a learning rate that changes."""

    def train(net, trainer, rank):
        for step, x in enumerate(batches(rank)):
            trainer.set_learning_rate(0.01 / (step + 1))
            net.zero_grad()
            net(x).square().mean().backward()
            trainer.step()

    return both_ways(train)


def bfloat16():
    """Weights of two bytes."""

    def train(net, trainer, rank):
        for x in batches(rank, torch.bfloat16):
            net.zero_grad()
            net(x).square().mean().backward()
            trainer.step()

    return both_ways(train, torch.bfloat16, "sgd")


def unused():
    """A layer that in each step some workers do not use, and a step without any backward pass on one of them."""

    def train(net, trainer, rank):
        for step, x in enumerate(batches(rank)):
            net.zero_grad()
            if not (step == 2 and rank == 0):
                net(x, with_branch=(step + rank) % 2 == 0).square().mean().backward()
            trainer.step()

    return both_ways(train)


def accumulation():
    """Several passes before each step, other numbers of them on each worker."""

    def train(net, trainer, rank):
        for x in batches(rank):
            net.zero_grad()
            with trainer.no_sync():
                for _ in range(rank + 1):
                    net(x + 1).square().mean().backward()
            net(x).square().mean().backward()
            trainer.step()

    return both_ways(train)


def loader():
    """Batches from a DataLoader whose workers are forked while gradients travel."""

    def train(net, trainer, rank):
        examples = torch.cat(batches(rank))[: 5 * STEPS]  # as many on each worker
        data = torch.utils.data.DataLoader(examples, batch_size=3, num_workers=2)
        for _ in range(2):
            for x in data:
                net.zero_grad()
                net(x).square().mean().backward()
                trainer.step()

    return both_ways(train)


def integers():
    """The loss (rank + 1)·w, sgd with lr 1, n·the mean: each step takes n(n+1)/2 away, exactly."""
    store = kv.create("dist")
    n = store.num_workers
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (1, 3, 1 << 20, 2_000_003)]
    numbers = {"learning_rate": 1.0, "rescale_grad": float(n)}
    trainer = Trainer(weights, "sgd", numbers, kvstore=store, overlap=True)
    for step in range(1, STEPS + 1):
        for weight in weights:
            weight.grad = None
        sum(weight.sum() * (store.rank + 1) for weight in weights).backward()
        trainer.step()
        expected = -step * n * (n + 1) // 2
        assert all((weight == expected).all() for weight in weights), [float(weight[0]) for weight in weights]
    return store


def asynchronous():
    """Out of step each push is an update of its own; in the end all of them are in the weights."""
    store = kv.create("dist_async")
    n = store.num_workers
    weights = [torch.nn.Parameter(torch.zeros(size)) for size in (3, 1 << 20, 2_000_003)]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store, overlap=True)
    trainer.broadcast_parameters()
    for step in range(1, STEPS + store.rank + 1):
        for weight in weights:
            weight.grad = None
        sum(weight.sum() * (store.rank + 1) for weight in weights).backward()
        trainer.step()
        assert all((weight <= -step * (store.rank + 1)).all() for weight in weights), "it sees its own pushes"
    store.barrier()
    total = -sum((STEPS + rank) * (rank + 1) for rank in range(n))
    assert all((value == total).all() for value in store.pull([0, 1, 2]))
    return store


def twice():
    """Two passes without no_sync raise in the second; a step after it still ends the round of all workers."""
    store = kv.create("dist")
    for on_store in (True, False):
        own, net = kv.create("dist"), Branches()
        trainer = Trainer(net.parameters(), "sgd", kvstore=own, overlap=True, update_on_kvstore=on_store)
        trainer.broadcast_parameters()
        x = batches(own.rank)[0]
        net(x).sum().backward()
        if own.rank == 0:
            refused(lambda net=net, x=x: net(x).sum().backward(), "an earlier pass has sent already")
            refused(trainer.step, "was changed after it had been sent")
        else:
            trainer.step()
        net.zero_grad()
        net(x).sum().backward()
        trainer.step()
        own.close()
    return store


def abandoned():
    """A pass that breaks off on one worker, which goes on with the next step."""
    store, net = kv.create("dist"), Branches()
    trainer = Trainer(net.parameters(), "adam", kvstore=store, overlap=True)
    trainer.broadcast_parameters()
    for step, x in enumerate(batches(store.rank)):
        net.zero_grad()
        hidden = net.first(x)
        if step == 2 and store.rank == 0:
            hidden.register_hook(broken)
        try:
            net.last(net.big(hidden)).square().mean().backward()
        except ZeroDivisionError:
            print("refused: the pass broke off", flush=True)
        trainer.step()
    print_digest(list(net.parameters()), "")
    return store


def broken(_):
    raise ZeroDivisionError("broken on purpose")


def refused(call, text):
    try:
        call()
    except RuntimeError as error:
        assert text in str(error), error
        print(f"refused: {error}", flush=True)
    else:
        raise AssertionError("it was taken")


def killed():
    """The last worker dies in the middle of a step; the others hear of it from backward or step."""
    store, net = kv.create("dist"), Branches()
    trainer = Trainer(net.parameters(), "sgd", kvstore=store, overlap=True)
    x = batches(store.rank)[0]
    try:
        trainer.broadcast_parameters()  # the last worker may be through with it, and dead, before the others are
        while True:
            net.zero_grad()
            net(x).sum().backward()
            if store.rank == store.num_workers - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            trainer.step()
    except PeerLostError as error:
        print(f"refused: {error}", flush=True)
        raise


if __name__ == "__main__":
    used = globals()[sys.argv[1]]()
    print(f"checked on {used.rank} of {used.num_workers}", flush=True)
    used.close()
