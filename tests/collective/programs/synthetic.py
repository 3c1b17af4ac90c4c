"""What Horovod's synthetic benchmark for PyTorch does with Horovod, on a network with two normalisations."""

import argparse
import timeit

import torch
from torch import nn
from torch.nn import functional

import kvdist.horovod as hvd  # import horovod.torch as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--use-adasum", action="store_true")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-batches-per-iter", type=int, default=4)
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1 + hvd.rank())  # for the test: what is not broadcast differs


def convolution(inputs, outputs, norm_layer=hvd.SyncBatchNorm):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, stride=2), norm_layer(outputs), nn.ReLU())


model = nn.Sequential(convolution(3, 8), convolution(8, 16), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * (hvd.size() if not args.use_adasum else 1))
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data, target = torch.randn(args.batch_size, 3, 32, 32), torch.randint(10, (args.batch_size,))
losses = []


def benchmark_step():
    optimizer.zero_grad()
    loss = functional.cross_entropy(model(data), target)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())


timeit.timeit(benchmark_step, number=2)
for number in range(args.num_iters):
    seconds = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    if hvd.rank() == 0:
        print(f"Iter #{number}: {args.batch_size * args.num_batches_per_iter / seconds:.1f} img/sec per CPU")

# For the test; the running statistics too are those of all ranks.
print(f"rank {hvd.rank()} of {hvd.size()}: first {losses[0]:.6f} loss {losses[-1]:.6f} steps {len(losses)}")
print(f"digest {sum(float(value.double().abs().sum()) for value in model.state_dict().values())!r}", flush=True)
