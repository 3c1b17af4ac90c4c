"""One process that trains an embedding alone: kvdist's layer, or torch's own with sparse gradients.

A step is a forward pass over random ids, a backward pass with given gradients, and the update. The clock of a worker
runs from step to step, so what travels beside them counts where it is waited for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

import kvdist
from kvdist import kv

SEED = 7
LEARNING_RATE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layer", choices=["torch", "kvdist"], required=True)
    parser.add_argument("--prefetch", action="store_true", help="name the ids of the next batch before each step")
    parser.add_argument("--rule", choices=["sgd", "adagrad"], required=True)
    parser.add_argument("--rows", type=int, required=True, help="of the table")
    parser.add_argument("--dim", type=int, required=True, help="elements of a row")
    parser.add_argument("--pushed", type=int, required=True, help="random ids of each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--out", required=True, help="directory for this worker's result")
    options = parser.parse_args()
    (torch_steps if options.layer == "torch" else kvdist_steps)(options)


def torch_steps(options: argparse.Namespace) -> None:
    """Of torch's layer, whose table is in this process."""
    layer = torch.nn.Embedding(options.rows, options.dim, sparse=True)
    rule = torch.optim.SGD if options.rule == "sgd" else torch.optim.Adagrad
    optimizer = rule(layer.parameters(), LEARNING_RATE)

    def step(ids: torch.Tensor, grad: torch.Tensor, _: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(ids).backward(grad)
        optimizer.step()

    measure(options, 0, lambda: None, step)


def kvdist_steps(options: argparse.Namespace) -> None:
    """Of kvdist's layer, whose table is declared and on servers."""
    with kv.create("dist") as store:
        store.set_optimizer(options.rule, learning_rate=LEARNING_RATE)
        layer = kvdist.Embedding(options.rows, options.dim, store, initializer="zeros")
        touch_all(options, store)

        def step(ids: torch.Tensor, grad: torch.Tensor, following: torch.Tensor) -> None:
            layer(ids).backward(grad)
            if options.prefetch:
                layer.prefetch(following)
            layer.step()

        measure(options, store.rank, store.barrier, step)


def touch_all(options: argparse.Namespace, store: kvdist.KVStore) -> None:
    """Have every row updated once, as the table of torch is there from the start."""
    order = torch.randperm(options.rows, generator=torch.Generator().manual_seed(SEED))
    for ids in order.split(options.pushed):
        store.push("embedding", kvdist.RowSparse(ids, torch.zeros(len(ids), options.dim), (options.rows, options.dim)))
    store.row_sparse_pull("embedding", row_ids=order[:1])


def measure(
    options: argparse.Namespace,
    rank: int,
    barrier: Callable[[], None],
    step: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None],
) -> None:
    """Run the steps and write their seconds to ``<out>/<rank>.json``."""
    count = options.warmup + options.steps
    generator = torch.Generator().manual_seed(SEED + rank)
    batches = torch.randint(options.rows, (count + 1, options.pushed), generator=generator)
    grad = torch.full((options.pushed, options.dim), 0.5)
    seconds = []
    barrier()
    for i in range(count):
        start = time.perf_counter()
        step(batches[i], grad, batches[i + 1])
        seconds.append(time.perf_counter() - start)
    with open(os.path.join(options.out, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(seconds[options.warmup :], file)


if __name__ == "__main__":
    main()
