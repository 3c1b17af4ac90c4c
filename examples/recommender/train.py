"""DeepFM learns who clicks on which advertisement; the rows of its embedding live on the servers.

    kvdist-launch -n 2 -s 2 python examples/recommender/train.py

Without a launcher it runs alone. The data is made by a rule; ``--data FILE …`` reads files in the format of Criteo's
data sets instead. Two stores: one holds the table, with AdaGrad, and workers pull and push only the rows of their
batches; the other one the dense layers, with Adam. Every worker prints the AUC on the same held-out examples.

Source of the model: Guo et al., DeepFM: A Factorization-Machine based Neural Network for CTR Prediction (2017).
"""

import argparse
from pathlib import Path

import criteo
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from kvdist import Embedding, SplitSampler, Trainer, kv

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", type=Path, nargs="+", help="files in the format of Criteo; without them data is made")
parser.add_argument("--examples", type=int, default=30000, help="how many are made, or read at most")
parser.add_argument("--table-rows", type=int, default=1 << 24, help="of the embedding; only those in use take memory")
parser.add_argument("--dim", type=int, default=8, help="elements of a category's vector")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=256, help="examples per worker and step")
args = parser.parse_args()

# The workers of one machine share its cores; the first weights are the same in every run.
torch.set_num_threads(1)
torch.manual_seed(0)


class DeepFM(nn.Module):
    """A factorisation machine and a network beside each other, on the same vectors."""

    def __init__(self, table: Embedding, dim: int) -> None:
        super().__init__()
        self.table = table
        self.linear = nn.Linear(criteo.COUNTS, 1)
        self.deep = nn.Sequential(
            nn.Linear(criteo.COUNTS + criteo.CATEGORIES * dim, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(),
            nn.Linear(32, 1),
        )  # fmt: skip

    def forward(self, counts: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = self.table(ids)
        weights, vectors = rows[..., 0], rows[..., 1:]
        pairs = (vectors.sum(dim=1).square() - vectors.square().sum(dim=1)).sum(dim=1) / 2
        deep = self.deep(torch.cat([counts, vectors.flatten(1)], dim=1))
        return weights.sum(dim=1) + pairs + (deep + self.linear(counts)).squeeze(1)


tables, layers = kv.create("dist"), kv.create("dist")
print(f"worker {layers.rank} of {layers.num_workers}", flush=True)

if args.data:
    data = criteo.read(args.data, args.table_rows, args.examples)
else:
    data = criteo.generated(args.examples, args.table_rows)
labels, counts, ids = (torch.from_numpy(array) for array in (data.labels, data.counts, data.ids))
held_out = max(1, len(data) // 5)

tables.set_optimizer("adagrad", learning_rate=0.03)
table = Embedding(args.table_rows, 1 + args.dim, tables, initializer="normal(0.01,seed=1)")
net = DeepFM(table, args.dim)
trainer = Trainer(net.parameters(), "adam", {"learning_rate": 0.001}, kvstore=layers)
sampler = SplitSampler(len(data) - held_out, layers.num_workers, layers.rank, seed=0)


def test_auc() -> float:
    """The area under the curve on the held-out examples, which are the last ones."""
    net.eval()
    with torch.no_grad():
        scores = [net(counts[part], ids[part]) for part in torch.arange(len(data) - held_out, len(data)).split(4096)]
    net.train()
    return criteo.auc(data.labels[-held_out:], torch.cat(scores).numpy())


for epoch in range(args.epochs):
    batches = torch.tensor(list(sampler)).split(args.batch_size)
    for batch, following in zip(batches, [*batches[1:], None], strict=True):
        net.zero_grad()
        loss = binary_cross_entropy_with_logits(net(counts[batch], ids[batch]), labels[batch])
        loss.backward()
        if following is not None:
            table.prefetch(ids[following])  # its rows travel as soon as this batch's gradients have left
        table.step()
        trainer.step()
    print(f"Epoch {epoch}: Test_auc {test_auc():.6f}", flush=True)

layers.close()
tables.close()
