"""What people do with torch, with real workers, one scenario a function: ``habits.py SCENARIO``."""

import sys

import torch

from kvdist import Trainer, kv, sync_buffers

torch.set_num_threads(1)


def stores():
    """A store for each way to update, and whether the store does."""
    for on_store in (True, False):
        with kv.create("dist") as store:
            yield store, on_store


def weights(*numbers):
    return [torch.nn.Parameter(torch.full((3, 5), float(number))) for number in numbers]


def backward(parameters, factor):
    for parameter in parameters:
        parameter.grad = None
        (parameter * factor).sum().backward()


def check(parameters, *expected):
    for parameter, number in zip(parameters, expected, strict=True):
        assert (parameter == number).all(), (parameter.flatten()[0], number)


def skipped():
    """A step that a scaler skips on one worker, on all of them, and on none; nobody waits, and all stay the same."""
    for store, on_store in stores():
        n, rank = store.num_workers, store.rank
        (weight,) = parameters = weights(0)
        trainer = Trainer(parameters, "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=on_store)
        optimizer = trainer.as_torch_optimizer()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        expected = 0.0
        for overflowing in ([], [0], list(range(n)), [n - 1], []):
            optimizer.zero_grad()
            scaler.scale(weight.sum() * n * (rank + 1)).backward()
            if rank in overflowing:
                weight.grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
            expected -= sum(r + 1 for r in range(n) if r not in overflowing)
            check(parameters, expected)
        assert trainer.nonfinite_steps == 1 + (rank in (0, n - 1)) + (n == 1)
        assert scaler.get_scale() == 8.0 / 2**trainer.nonfinite_steps, "each worker has a scale of its own"


def refused():
    """A worker refuses its gradients, names them, and goes on without them."""
    for store, on_store in stores():
        parameters = weights(0, 0)
        options = {"update_on_kvstore": on_store, "reject_nonfinite": True}
        trainer = Trainer(parameters, "sgd", {"learning_rate": 1.0}, kvstore=store, **options)
        backward(parameters, store.num_workers)
        if store.rank == 1:
            parameters[1].grad[2, 4] = float("nan")
        try:
            trainer.step()
        except FloatingPointError as error:
            print(f"refused: {error}", flush=True)
            trainer.skip_step()
        others = store.num_workers - 1
        check(parameters, -others, -others)


def missing():
    """Parameters without a gradient on some workers, and on all of them; momentum shows that those rest."""
    for store, on_store in stores():
        parameters = some, none = weights(0, 7)
        numbers = {"learning_rate": 1.0, "momentum": 0.5}
        trainer = Trainer(parameters, "sgd", numbers, kvstore=store, update_on_kvstore=on_store)
        backward(parameters, 1)
        trainer.step(1)
        for _ in range(2):
            some.grad = none.grad = None
            if store.rank == 0:
                backward([some], 1)
            trainer.step(1)
        n = store.num_workers
        check(parameters, -n - (1 + 0.5 * n) - (1 + 0.5 * (1 + 0.5 * n)), 7 - n)
        some.grad = None
        backward([none], 1)
        trainer.step(1)
        check([none], 7 - n - 1.5 * n)


def accumulated():
    """Several passes before a step, tied and lazy layers, with overlap and without: the same weights everywhere."""
    digests = []
    for overlap in (False, True):
        with kv.create("dist") as store:
            torch.manual_seed(0)
            first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            second.weight = first.weight
            net = torch.nn.Sequential(first, torch.nn.Tanh(), second, torch.nn.LazyLinear(3))
            trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store, overlap=overlap)
            optimizer = trainer.as_torch_optimizer()
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            net(torch.ones(1, 4))
            trainer.broadcast_parameters()
            for step in range(5):
                generator = torch.Generator().manual_seed(10 * step + store.rank)
                optimizer.zero_grad()
                with trainer.no_sync():
                    for _ in range(2):
                        net(torch.randn(6, 4, generator=generator)).square().mean().backward()
                net(torch.randn(6, 4, generator=generator)).square().mean().backward()
                optimizer.step()
                schedule.step()
            assert second.weight is first.weight
            digests.append(torch.cat([one.detach().flatten() for one in net.parameters()]))
            for rank_0, own in zip(store.from_rank_0([digests[-1]]), [digests[-1]], strict=True):
                assert torch.equal(rank_0, own)
    assert torch.equal(*digests)


def changed():
    """Weights that were loaded on all workers are refused until they are everybody's; then all have rank 0's."""
    with kv.create("dist") as store:
        parameters = weights(0, 0)
        trainer = Trainer(parameters, "sgd", {"learning_rate": 1.0}, kvstore=store)
        backward(parameters, 1)
        trainer.step()
        check(parameters, -1, -1)
        with torch.no_grad():
            parameters[1].fill_(store.rank + 3)
        backward(parameters, 1)
        try:
            trainer.step()
        except RuntimeError as error:
            assert "parameter 1 of shape (3, 5) was changed outside of step()" in str(error), error
        else:
            raise AssertionError("a change was not noticed")
        trainer.broadcast_parameters()
        check(parameters, -1, 3)
        trainer.step()
        check(parameters, -2, 2)


def buffers():
    """Running statistics become the mean over the workers, counts become rank 0's; the optimizer is not touched."""
    with kv.create("dist") as store:
        n, rank = store.num_workers, store.rank
        net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.BatchNorm1d(4).double())
        net.register_buffer("flags", torch.tensor([rank == 0, rank == 1]))
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 1.0}, kvstore=store)
        trainer.broadcast_parameters()
        for _ in range(2):
            for norm in net[1:]:
                norm.running_mean.fill_(rank + 1)
                norm.running_var.fill_(3 * rank)
                norm.num_batches_tracked.fill_(100 * rank + (1 << 60))
            net.flags[:] = torch.tensor([rank == 0, rank == 1])
            sync_buffers(net, store)
            for norm in net[1:]:
                assert (norm.running_mean == (n + 1) / 2).all() and (norm.running_var == 3 * (n - 1) / 2).all()
                assert norm.num_batches_tracked == 1 << 60
            assert net.flags.tolist() == [True, False]
        assert torch.equal(store.average(torch.full((2,), float(rank))), torch.full((2,), (n - 1) / 2))


if __name__ == "__main__":
    with kv.create("dist") as first:
        for scenario in sys.argv[1:]:
            globals()[scenario]()
        print(f"checked on {first.rank} of {first.num_workers}", flush=True)
