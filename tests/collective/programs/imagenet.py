"""What Horovod's example for PyTorch and ImageNet does with Horovod: a warm-up, several passes a step, checkpoints."""

import argparse
import math
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import kvdist.horovod as hvd  # import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--batches-per-allreduce", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.02)
parser.add_argument("--warmup-epochs", type=float, default=2)
parser.add_argument("--checkpoint-format", default="./checkpoint-{epoch}.pth.tar")
args = parser.parse_args()


class Metric:
    """The mean over batches and ranks."""

    def __init__(self, name):
        self.name, self.sum, self.n = name, torch.tensor(0.0), torch.tensor(0.0)

    def update(self, value):
        self.sum += hvd.allreduce(value.detach().cpu(), name=self.name)
        self.n += 1

    @property
    def avg(self):
        return self.sum / self.n


def adjust_learning_rate(epoch, batch):
    adjust = 1.0
    if epoch < args.warmup_epochs:
        epoch += (batch + 1) / len(loader)
        adjust = 1 / hvd.size() * (epoch * (hvd.size() - 1) / args.warmup_epochs + 1)
    for group in optimizer.param_groups:
        group["lr"] = args.base_lr * hvd.size() * args.batches_per_allreduce * adjust


def train(epoch):
    sampler.set_epoch(epoch)
    metric = Metric("train_loss")
    for batch, (data, target) in enumerate(loader):
        adjust_learning_rate(epoch, batch)
        optimizer.zero_grad()
        for begin in range(0, len(data), args.batch_size):
            part = slice(begin, begin + args.batch_size)
            loss = functional.cross_entropy(model(data[part]), target[part])
            metric.update(loss)
            loss.div_(math.ceil(len(data) / args.batch_size))
            loss.backward()
        optimizer.step()
    return metric.avg.item()


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1 + hvd.rank())  # for the test: what is not broadcast differs

resume_from_epoch = 0
for try_epoch in range(args.epochs, 0, -1):
    if os.path.exists(args.checkpoint_format.format(epoch=try_epoch)) and hvd.rank() == 0:  # for the test: rank 0 alone
        resume_from_epoch = try_epoch
        break
resume_from_epoch = hvd.broadcast(torch.tensor(resume_from_epoch), root_rank=0, name="resume_from_epoch").item()

digits = load_digits()
train_dataset = TensorDataset(
    torch.tensor(digits.data[:1536], dtype=torch.float32) / 16, torch.tensor(digits.target[:1536])
)
sampler = DistributedSampler(train_dataset, num_replicas=hvd.size(), rank=hvd.rank())
loader = DataLoader(train_dataset, batch_size=args.batch_size * args.batches_per_allreduce, sampler=sampler)

model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=args.base_lr, momentum=0.9, weight_decay=5e-5)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.none,
    backward_passes_per_step=args.batches_per_allreduce,
    op=hvd.Average,
    gradient_predivide_factor=1.0,
)
if resume_from_epoch > 0 and hvd.rank() == 0:
    checkpoint = torch.load(args.checkpoint_format.format(epoch=resume_from_epoch))
    model.load_state_dict(checkpoint["model"])
    optimizer.load_state_dict(checkpoint["optimizer"])
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)

for epoch in range(resume_from_epoch, args.epochs):
    loss = train(epoch)
    if hvd.rank() == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, args.checkpoint_format.format(epoch=epoch + 1))

# For the test; the momentum too is that of the root.
momentum = [state["momentum_buffer"] for state in optimizer.state.values()]
rate = optimizer.param_groups[0]["lr"]
print(f"rank {hvd.rank()} of {hvd.size()}: began {resume_from_epoch} loss {loss:.6f} lr {rate:.6f}")
tensors = [*(p.detach() for p in model.parameters()), *momentum]
print(f"digest {sum(float(tensor.double().abs().sum()) for tensor in tensors)!r}", flush=True)
