"""Stores without servers in a job that has some: ``collective.py SCENARIO``. Every worker checks by itself."""

import sys

import torch

from kvdist import Embedding, LazyRows, Trainer, kv

torch.set_num_threads(1)
STEPS = 4


def integers(net, rank):
    """Gradients that are whole numbers, so that no sum is rounded."""
    for number, parameter in enumerate(net.parameters()):
        values = torch.arange(parameter.numel()) * (3 + rank) + number
        parameter.grad = ((values % 17) - 8).float().view(parameter.shape)


def exact():
    """`collective` gives the weights of `dist_sync`, to the bit."""
    weights = []
    for name, overlap in (("dist_sync", False), ("collective", False), ("collective", True)):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(1031, 1033), torch.nn.Linear(1033, 3))
        store = kv.create(name)
        rule = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
        trainer = Trainer(net.parameters(), "sgd", rule, kvstore=store, overlap=overlap)
        trainer.broadcast_parameters()
        for step in range(STEPS):
            net.zero_grad()
            integers(net, store.rank + step)
            grads = [parameter.grad for parameter in net.parameters()]
            net.zero_grad()
            # Their derivatives are the gradients, so hooks see them come.
            sum((one * grad).sum() for one, grad in zip(net.parameters(), grads, strict=True)).backward()
            trainer.step()
        weights.append([parameter.detach().clone() for parameter in net.parameters()])
        if name != "dist_sync":
            store.close()
    for other in weights[1:]:
        assert all(torch.equal(one, two) for one, two in zip(weights[0], other, strict=True))
    print(f"the same bits on {store.rank} of {store.num_workers}", flush=True)


class TwoTowers(torch.nn.Module):
    """Scores of users and items: tables with sparse gradients under dense layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.users = torch.nn.Embedding(101, 8, sparse=True)
        self.items = torch.nn.Embedding(53, 8, sparse=True)
        self.user_tower = torch.nn.Linear(8, 5)
        self.item_tower = torch.nn.Linear(8, 5)

    def forward(self, users, items):
        return (self.user_tower(self.users(users)) * self.item_tower(self.items(items))).sum(dim=1)


def hybrid(folder):
    """A net with sparse and dense layers comes out as on servers alone, whoever updates what."""
    ends = []
    for name, optimizer, overlap in [
        (name, optimizer, overlap)
        for optimizer in ("adagrad", "adam")
        for name, overlap in (("dist", False), ("hybrid", False), ("hybrid", True))
    ]:
        net = TwoTowers()
        store = kv.create(name)
        trainer = Trainer(net.parameters(), optimizer, {"learning_rate": 0.05}, kvstore=store, overlap=overlap)
        random = torch.Generator().manual_seed(store.rank)
        for _ in range(STEPS):
            users, items = torch.randint(101, (16,), generator=random), torch.randint(53, (16,), generator=random)
            net.zero_grad()
            (net(users, items) - (users % 3)).square().mean().backward()
            trainer.step()
        assert "2 of 6 keys on servers" in repr(store) or name == "dist", repr(store)
        ends.append([parameter.detach().clone() for parameter in net.parameters()])
    for first, second, third in (ends[:3], ends[3:]):
        for one, two, three in zip(first, second, third, strict=True):
            torch.testing.assert_close(one, two, atol=1e-6, rtol=0)
            torch.testing.assert_close(one, three, atol=1e-6, rtol=0)
    print(f"the same towers on {store.rank} of {store.num_workers}", flush=True)
    tables(folder)


def tables(folder):
    """Tables and arrays in one store: rows by id, states, checkpoints."""
    store = kv.create("hybrid")
    store.set_optimizer("adagrad", learning_rate=0.5)
    layer = Embedding(1000, 4, store, key=7, initializer="zeros")
    store.init([0, 8], [torch.zeros(3), LazyRows((50, 2), initializer="constant(1)")])
    layer(torch.tensor([store.rank, 5])).sum().backward()
    layer.step()
    store.push([0, 8], [torch.ones(3), None])
    rows = store.row_sparse_pull(7, row_ids=[0, 1, 5, 9]).values[:, 0]
    assert [value < 0 for value in rows] == [True, True, True, False], rows
    weight = store.pull(0)
    store.save_checkpoint(folder, 3, state=store.rank).result()
    store.push([7, 0], [None, torch.ones(3)])
    assert not torch.equal(store.pull(0), weight)
    found = store.load_checkpoint(folder)
    assert (found.step, found.state) == (3, store.rank)
    assert torch.equal(store.pull(0), weight)
    store.save_optimizer_states(f"{folder}/states")
    store.load_optimizer_states(f"{folder}/states")
    out = [torch.zeros(3), torch.zeros(50, 2)]
    store.pull([0, 8], out=out, ignore_sparse=False)
    assert out[1].tolist() == [[1.0, 1.0]] * 50
    print(f"tables on {store.rank} of {store.num_workers}", flush=True)
    store.close()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
