"""What a program's default device changes: nothing, as tensors of kvdist's own lie where they are used."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

import kvdist.collective as hvd
from kvdist import Trainer, kv
from kvdist.kvstore.rowsparse import RowSparse
from tests.cases import each
from tests.collective.ranks import returned, run_ranks

ELSEWHERE = "meta"
"""In place of a GPU: a device whose tensors nothing can be computed with."""


def operations(rank):
    mine, rows = torch.full((4,), rank + 1.0), torch.ones(rank + 1, 2)
    splits = torch.tensor([1, 3], dtype=torch.int32)
    sparse = torch.sparse_coo_tensor([[rank]], [1.0], (2,), check_invariants=False)
    with torch.device(ELSEWHERE):
        received, counts = hvd.alltoall(mine, splits=splits)
        return [
            hvd.allgather_object(rank),
            hvd.broadcast_object({"rank": rank}, 1),
            hvd.metric_average(float(rank), "m"),
            hvd.allreduce(sparse, op=hvd.Sum).to_dense().tolist(),
            hvd.allreduce(mine, op=hvd.Adasum).tolist(),
            hvd.allgather(rows).sum().item(),
            [one.sum().item() for one in hvd.grouped_allgather([rows, mine])],
            received.tolist(),
            counts.tolist(),
            hvd.reducescatter(mine, op=hvd.Sum).tolist(),
            hvd.join() in (0, 1),
        ]


def gathering_rows(rank):
    """The gradient of gathered rows, whose numbers the ranks tell each other."""
    rows = torch.ones(rank + 1, 2, requires_grad=True)
    with torch.device(ELSEWHERE):
        hvd.allgather(rows).sum().backward()
    return rows.grad.tolist()


def optimizing(rank, **options):
    table, bias = nn.Embedding(4, 1, sparse=True), nn.Parameter(torch.zeros(1))
    table.weight.data.zero_()
    ids = torch.tensor([rank])
    optimizer = torch.optim.SGD([table.weight, bias], lr=1.0)
    with torch.device(ELSEWHERE):
        optimizer = hvd.DistributedOptimizer(optimizer, [("table", table.weight), ("bias", bias)], **options)
        hvd.broadcast_optimizer_state(optimizer)

        def closure():
            optimizer.zero_grad()
            loss = (table(ids).sum() + bias * (rank + 1)).sum()
            loss.backward()
            return loss.item()

        results = [optimizer.step(closure) for _ in range(2)]
    return results, table.weight.tolist(), bias.item()


def training(store_name, **options):
    weight, other = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(2))
    x = torch.ones(1)
    with torch.device(ELSEWHERE), kv.create(store_name) as store:
        trainer = Trainer([weight, other], "adam", {"learning_rate": 0.1}, kvstore=store, **options)
        optimizer = trainer.as_torch_optimizer()
        for _ in range(2):
            optimizer.zero_grad()
            ((weight + 1) * x * other.sum()).sum().backward()
            trainer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        trainer.step(ignore_stale_grad=True)
        mean = store.average(3.0)
        trainer.close()
    return weight.tolist(), other.tolist(), mean


def storing(store_name):
    values, rows = np.arange(4, dtype=np.float32), RowSparse([1], np.ones((1, 2), np.float32), (3, 2))
    tensor = torch.ones(3, dtype=torch.bfloat16)
    with torch.device(ELSEWHERE), kv.create(store_name) as store:
        store.init(["a", "b"], [values, tensor])
        store.push(["a", "b"], [values, tensor])
        pulled = [np.asarray(store.pull("a")).tolist(), store.pull("b").tolist()]
        store.barrier()
        pulled.append(RowSparse.zeros((3, 2), "bfloat16").to_torch().to_dense().tolist())
        pulled.append(rows.to_torch().to_dense().tolist())
    return pulled


@each(
    "function, arguments",
    [
        (operations, {}),
        (gathering_rows, {}),
        (optimizing, {}),
        (optimizing, {"sparse_as_dense": True}),
        (optimizing, {"sparse_as_dense": True, "op": hvd.Adasum}),
    ],
)
def test_ranks_do_the_same_whatever_the_default_device_is(monkeypatch, function, arguments):
    found = returned(run_ranks(2, lambda rank: function(rank, **arguments)))
    monkeypatch.setattr(f"{__name__}.ELSEWHERE", "cpu")
    assert found == returned(run_ranks(2, lambda rank: function(rank, **arguments)))


@each("name", ["collective", "device", "dist"])
@each("options", [{}, {"update_on_kvstore": False}, {"overlap": True}])
def test_a_trainer_does_the_same_whatever_the_default_device_is(monkeypatch, name, options):
    if name == "device" and options:
        options = {}

    def all_ranks():
        if name == "collective":
            return returned(run_ranks(2, lambda rank: training(name, **options)))
        return training(name, **options)

    found = all_ranks()
    monkeypatch.setattr(f"{__name__}.ELSEWHERE", "cpu")
    assert found == all_ranks()


@each("name", ["collective", "device", "dist"])
def test_a_store_does_the_same_whatever_the_default_device_is(monkeypatch, name):
    found = storing(name)
    monkeypatch.setattr(f"{__name__}.ELSEWHERE", "cpu")
    assert found == storing(name)
