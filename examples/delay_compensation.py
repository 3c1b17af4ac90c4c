"""DC-ASGD as a rule of one's own: gradients that come late are corrected for what has changed meanwhile.

    kvdist-launch -n 4 -s 2 --server-module examples.delay_compensation python examples/delay_compensation.py

In `dist_async` a worker's gradient belongs to the weights that it has pulled, and meets those that others have changed
since. The rule keeps for each worker the weights behind its last push, which are those that it gets, and corrects by
the change since then: w ← w − lr·(ĝ + λ·ĝ²·(w − p)), where ĝ = g + wd·w, and p are the weights kept for the worker.
MXNet's `dcasgd` has one p for all workers.

Servers import this file for the class alone. Memory: one copy of the weights for each worker. A worker that was started
again has the weights of the servers, and its first gradient is corrected as if it had those of its former life.

Source: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation (2017), DC-ASGD-c.
"""

import argparse
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.optimizer import Optimizer, register
from kvdist.schema import number, whole

WORKERS_MAX = 64


@register
@dataclass(kw_only=True, eq=False)
class DelayCompensation(Optimizer):
    """w ← w − lr·(ĝ + λ·ĝ²·(w − p)).

    Attributes:
        workers: how many there are. Gradients of later ranks, and of ranks from 64 on, are not corrected.
        lamda: λ, how strongly to correct; at least 0.
    """

    name: ClassVar[str] = "delaycompensation"
    states_from_weight: ClassVar[tuple[str, ...]] = tuple(f"pulled_{rank}" for rank in range(WORKERS_MAX))

    learning_rate: float = number(0.1, at_least=0)
    workers: int = whole(at_least=1)
    lamda: float = number(0.04, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """For each worker the weights that it has got, which start as the weight."""
        return self.states_from_weight[: self.workers]

    def apply(self, weight, grad, out, state, scratch, step) -> None:
        """Ten passes."""
        np.multiply(weight, step.wd, out=scratch)
        np.add(grad, scratch, out=grad)
        is_known = step.pusher is not None and step.pusher < len(state)
        if is_known:
            np.subtract(weight, state[step.pusher], out=scratch)
            for factor in (grad, grad, self.lamda):
                np.multiply(scratch, factor, out=scratch)
            np.add(grad, scratch, out=grad)
        np.multiply(grad, step.lr, out=grad)
        np.subtract(weight, grad, out=out)
        if is_known:
            np.copyto(state[step.pusher], out)


def main() -> None:
    """Train the digits in `dist_async`."""
    import torch
    from sklearn.datasets import load_digits
    from torch import nn
    from torch.nn.functional import cross_entropy
    from torch.utils.data import DataLoader, TensorDataset

    from kvdist import SplitSampler, Trainer, kv

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lamda", type=float, default=0.04, help="0 corrects nothing")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(images)) % 5 == 0
    train = TensorDataset(images[~is_test], labels[~is_test])
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    with kv.create("dist_async") as store:
        rule = DelayCompensation(learning_rate=args.lr, workers=store.num_workers, lamda=args.lamda)
        trainer = Trainer(net.parameters(), rule, kvstore=store)
        loader = DataLoader(train, 16, sampler=SplitSampler(len(train), store.num_workers, store.rank, seed=0))
        for epoch in range(args.epochs):
            for batch, target in loader:
                net.zero_grad()
                cross_entropy(net(batch), target).backward()
                trainer.step()
            with torch.no_grad():
                right = net(images[is_test]).argmax(dim=1) == labels[is_test]
            print(f"Epoch {epoch}: Test_acc {float(right.float().mean()):.6f}", flush=True)


if __name__ == "__main__":
    main()
