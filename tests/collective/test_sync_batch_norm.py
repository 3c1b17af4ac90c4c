"""Batch normalisation over all ranks equals that of their batches in one."""

from __future__ import annotations

import copy

import torch
from torch import nn

import kvdist.collective as hvd
from kvdist.errors import CollectiveError
from tests.cases import each
from tests.collective.ranks import returned, run_ranks

KINDS = {
    "one number for each channel": (nn.BatchNorm1d, (), {}),
    "lines": (nn.BatchNorm1d, (5,), {"momentum": None}),
    "images": (nn.BatchNorm2d, (3, 2), {"eps": 1e-3}),
    "volumes": (nn.BatchNorm3d, (2, 1, 3), {"affine": False}),
    "without statistics": (nn.BatchNorm2d, (3, 2), {"track_running_stats": False}),
    "shifted far": (nn.BatchNorm2d, (3, 2), {"momentum": 0.7}),
}
ROWS = [4, 1, 0]


@each("kind", KINDS)
def test_it_equals_the_normalisation_of_all_batches_in_one(kind):
    layer, shape, options = KINDS[kind]
    torch.manual_seed(3)
    plain = layer(4, **options)
    if plain.affine:
        nn.init.normal_(plain.weight)
        nn.init.normal_(plain.bias)
    offset = 100.0 if kind == "shifted far" else 0.5
    batches = [torch.randn(2, rows, 4, *shape) * 2 + offset for rows in ROWS]
    weights = [torch.randn(2, rows, 4, *shape) for rows in ROWS]
    layers = [hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)) for _ in ROWS]

    def program(rank):
        results = []
        for batch, weight in zip(batches[rank], weights[rank], strict=True):
            given = batch.clone().requires_grad_()
            result = layers[rank](given)
            (result * weight).sum().backward()
            results.append((result.detach(), given.grad))
        return results

    parts = returned(run_ranks(len(ROWS), program))
    for number in range(2):
        whole = torch.cat([batch[number] for batch in batches]).requires_grad_()
        result = plain(whole)
        (result * torch.cat([weight[number] for weight in weights])).sum().backward()
        close = {"rtol": 1e-6, "atol": 1e-4 if kind == "shifted far" else 2e-6}
        torch.testing.assert_close(torch.cat([part[number][0] for part in parts]), result.detach(), **close)
        torch.testing.assert_close(torch.cat([part[number][1] for part in parts]), whole.grad, **close)
    for name, wanted in plain.named_buffers():
        torch.testing.assert_close(getattr(layers[0], name), wanted, rtol=1e-6, atol=1e-6)
    for name, wanted in plain.named_parameters():  # its gradients are for the optimizer to add up
        total = sum(getattr(one, name).grad for one in layers)
        torch.testing.assert_close(total, wanted.grad, rtol=1e-5, atol=1e-4 if kind == "shifted far" else 1e-5)


def test_halves_are_normalised_in_float32_and_stay_halves():
    def program(rank):
        layer = hvd.SyncBatchNorm(2)
        result = layer(torch.tensor([[1.0, 60000.0], [3.0, 20000.0]]).half() + rank)
        result.sum().backward()
        return result.dtype, result.isfinite().all().item(), layer.weight.grad.dtype

    assert returned(run_ranks(2, program)) == [(torch.float16, True, torch.float32)] * 2


def test_in_evaluation_and_alone_it_is_ordinary():
    plain, batch = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)

    def evaluate(rank):
        layer = hvd.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).eval()
        return layer(batch) if rank == 0 else None  # the other rank does not take part

    assert torch.equal(returned(run_ranks(2, evaluate))[0], copy.deepcopy(plain).eval()(batch))
    (alone,) = returned(run_ranks(1, lambda _: hvd.SyncBatchNorm(3)(batch)))
    assert torch.equal(alone, plain(batch))


def test_models_are_converted_as_a_whole_with_what_they_have_learned():
    model = nn.Sequential(nn.Linear(2, 3), nn.Sequential(nn.BatchNorm1d(3), nn.ReLU()))
    model(torch.randn(5, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weight = model[1][0].weight
    converted = hvd.SyncBatchNorm.convert_sync_batchnorm(model.eval())
    assert isinstance(converted[1][0], hvd.SyncBatchNorm) and not converted[1][0].training
    assert converted[1][0].weight is weight
    assert {name: tensor.tolist() for name, tensor in converted.state_dict().items()} == {
        name: tensor.tolist() for name, tensor in before.items()
    }


@each("shape", [(3,), (2, 4)])
def test_inputs_of_other_channels_are_refused(shape):
    def program(rank):
        return hvd.SyncBatchNorm(3)(torch.ones(shape if rank == 0 else (2, 3)))

    first, second = run_ranks(2, program)  # the other one is told, and does not wait
    assert isinstance(first, ValueError) and "takes inputs [batch, 3, ...], not" in str(first)
    assert isinstance(second, CollectiveError) and "takes inputs [batch, 3, ...], not" in str(second)


def test_one_value_for_each_channel_is_no_batch():
    results = run_ranks(2, lambda rank: hvd.SyncBatchNorm(3)(torch.ones(1 - rank, 3)))
    assert all(isinstance(result, ValueError) and "more than 1 value" in str(result) for result in results)
