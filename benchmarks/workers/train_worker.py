"""One process that trains a network on made-up images: through kvdist's Trainer, through torch DDP, or by itself.

Every system starts from the same weights, has the same images and the same rule (SGD with momentum, gradients averaged
over workers), and computes with one thread, so that what differs is how gradients travel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from examples.cifar10_dist import ResNet18
from kvdist import Trainer, kv

LEARNING_RATE = 0.01
MOMENTUM = 0.9
BATCHES = 4
"""Different ones, used over and over."""
SHAPES = {"mlp": (64, (784,)), "transformer": (4, (16, 256)), "resnet18": (32, (3, 32, 32))}
"""Model → images in a batch, and the shape of each: those of MNIST, sixteen patches of 256 numbers, CIFAR-10."""
TRAINER_OPTIONS = {
    "kvdist": {},
    "kvdist-overlap": {"overlap": True},
    "kvdist-share": {"share_weights": True},
    "collective": {},
    "collective-overlap": {"overlap": True},
}


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = {"mlp": mlp, "transformer": Transformer, "resnet18": ResNet18}[options.model]()
    if options.system in ("alone", "apart"):
        rank, workers, train, done = alone(model)
    elif options.system.startswith("ddp"):
        rank, workers, train, done = with_ddp(model, has_views=options.system == "ddp-views")
    else:
        rank, workers, train, done = with_trainer(model, options.system)
    batches = made_up(options.model, rank)
    first_weights = [parameter.detach().clone() for parameter in model.parameters()]
    seconds = []
    for number in range(options.warmup + options.steps):
        images, labels = batches[number % BATCHES]
        start = time.perf_counter()
        loss = train(images, labels)
        seconds.append(time.perf_counter() - start)
    pairs = zip(model.parameters(), first_weights, strict=True)
    moved = [(now.detach() - then).double().abs().sum().item() for now, then in pairs]
    folder = Path(options.out)
    Path(folder, f"{rank}.end").write_text(json.dumps({"workers": workers, "loss": loss, "moved": moved}))
    Path(folder, f"{rank}.json").write_text(json.dumps(seconds[options.warmup :]))
    done()


def mlp() -> nn.Module:
    """784-2048-2048-2048-10: 10,020,874 parameters."""
    sizes = (784, 2048, 2048, 2048, 10)
    layers = [nn.Linear(before, after) for before, after in itertools.pairwise(sizes)]
    return nn.Sequential(*(part for layer in layers[:-1] for part in (layer, nn.ReLU())), layers[-1])


class Transformer(nn.Module):
    """Nine layers of width 256, and a class for the mean of what comes out: 7,110,410 parameters in 110 tensors."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, dim_feedforward=1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 9, enable_nested_tensor=False)
        self.classes = nn.Linear(256, 10)

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        classes: torch.Tensor = self.classes(self.layers(patches).mean(dim=1))
        return classes


def made_up(model: str, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Images and labels, different on each rank and the same in each run."""
    batch, shape = SHAPES[model]
    random = torch.Generator().manual_seed(rank + 1)
    return [
        (torch.randn(batch, *shape, generator=random), torch.randint(10, (batch,), generator=random))
        for _ in range(BATCHES)
    ]


Parts = tuple[int, int, Callable[[torch.Tensor, torch.Tensor], float], Callable[[], None]]
"""Rank, number of workers, one step of training that gives its loss, and how to take leave."""


def alone(model: nn.Module) -> Parts:
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE, MOMENTUM)

    def train(images: torch.Tensor, labels: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return int(os.environ.get("RANK", "0")), 1, train, lambda: None


def with_ddp(model: nn.Module, has_views: bool) -> Parts:
    dist.init_process_group("gloo")
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=has_views)
    _, _, train, _ = alone(wrapped)
    return dist.get_rank(), dist.get_world_size(), train, dist.destroy_process_group


def with_trainer(model: nn.Module, system: str) -> Parts:
    store = kv.create("collective" if "collective" in system else "dist")
    rule = {"learning_rate": LEARNING_RATE, "momentum": MOMENTUM}
    trainer = Trainer(model.parameters(), "sgd", rule, kvstore=store, **TRAINER_OPTIONS[system])

    def train(images: torch.Tensor, labels: torch.Tensor) -> float:
        model.zero_grad()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        trainer.step()
        return loss.item()

    return store.rank, store.num_workers, train, store.close


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", choices=["alone", "apart", "ddp", "ddp-views", *TRAINER_OPTIONS], required=True)
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--out", required=True, help="directory for this worker's result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
