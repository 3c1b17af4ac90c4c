"""Models, batches and optimizers with the same numbers on each rank, whose threads share torch's generator."""

from __future__ import annotations

import itertools
import threading

import torch
from torch import nn

making = threading.Lock()


def model_of(*sizes, seed=0):
    """Layers of these sizes with the same numbers on each rank, whose threads share torch's generator."""
    with making:
        torch.manual_seed(seed)
        layers = [nn.Linear(a, b) for a, b in itertools.pairwise(sizes)]
    return nn.Sequential(*layers)


def batch_of(rank, rows=6, size=4):
    return torch.randn(rows, size, generator=torch.Generator().manual_seed(rank))


def loss_of(model, batch):
    return (model(batch) - 1).square().mean()


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def alike(weights, expected, **close):
    for mine in weights:
        assert torch.equal(mine, weights[0])
    torch.testing.assert_close(weights[0], expected, **{"rtol": 1e-5, "atol": 1e-6, **close})


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)
