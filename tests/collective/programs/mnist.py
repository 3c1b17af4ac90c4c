"""What Horovod's example for PyTorch and MNIST does with Horovod, on scikit-learn's digits."""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import kvdist.horovod as hvd  # import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--lr", type=float, default=0.05)
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-mixed-precision", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--gradient-predivide-factor", type=float, default=1.0)
args = parser.parse_args()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.drop = nn.Conv2d(1, 16, kernel_size=3), nn.Dropout2d(0.1)
        self.fc1, self.fc2 = nn.Linear(144, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = functional.relu(functional.max_pool2d(self.drop(self.conv(x)), 2)).flatten(1)
        return functional.log_softmax(self.fc2(functional.relu(self.fc1(x))), dim=1)


def metric_average(value, name):
    return hvd.allreduce(torch.tensor(value), name=name).item()


def loader_of(part, batch_size):
    sampler = DistributedSampler(part, num_replicas=hvd.size(), rank=hvd.rank())
    return DataLoader(part, batch_size=batch_size, sampler=sampler), sampler


def train(epoch):
    model.train()
    train_sampler.set_epoch(epoch)
    for data, target in train_loader:
        optimizer.zero_grad()
        with torch.autocast("cpu", enabled=args.use_mixed_precision):
            loss = functional.nll_loss(model(data), target)
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        optimizer.synchronize()
        scaler.unscale_(optimizer)
        with optimizer.skip_synchronize():
            scaler.step(optimizer)
        scaler.update()


def test():
    model.eval()
    loss = right = 0.0
    with torch.no_grad():
        for data, target in test_loader:
            output = model(data)
            loss += functional.nll_loss(output, target, reduction="sum").item()
            right += (output.argmax(1) == target).sum().item()
    count = len(test_sampler)
    return metric_average(loss / count, "avg_loss"), metric_average(right / count, "avg_accuracy")


hvd.init()
torch.manual_seed(1 + hvd.rank())  # for the test: what is not broadcast differs
torch.set_num_threads(1)

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
train_loader, train_sampler = loader_of(TensorDataset(images[:1400], labels[:1400]), 32)
test_loader, test_sampler = loader_of(TensorDataset(images[1400:1796], labels[1400:1796]), 1000)

model = Net()
lr_scaler = hvd.size() if not args.use_adasum else 1
optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * lr_scaler, momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
    gradient_predivide_factor=args.gradient_predivide_factor,
)
scaler = torch.amp.GradScaler("cpu") if args.use_mixed_precision else None
for epoch in range(1, args.epochs + 1):
    train(epoch)
    loss, accuracy = test()

# For the test.
print(f"rank {hvd.rank()} of {hvd.size()}: loss {loss:.6f} accuracy {accuracy:.6f}")
print(f"digest {sum(float(p.detach().double().abs().sum()) for p in model.parameters())!r}", flush=True)
