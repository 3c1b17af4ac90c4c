"""A small network learns handwritten digits on several processes without servers, by Gluon's six steps with Horovod.

    kvdist-launch -n 2 -s 0 python examples/collective_mnist_style.py

torchrun, mpirun and srun start it as well, and without a launcher it runs alone. The data is real and comes with
scikit-learn. All processes print the same accuracy: that of the same weights on the same held-out images.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import kvdist.horovod as hvd
from kvdist import SplitSampler

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
parser.add_argument("--lr", type=float, default=0.02, help="of one process; it is multiplied by their number")
parser.add_argument("--no-cuda", action="store_true", help="stay on the CPU where there is a GPU")
args = parser.parse_args()

# The processes of one machine share its cores: more threads than that would only get in each other's way.
torch.set_num_threads(1)

# Step 1: become one of the ranks.
hvd.init()

# Step 2: each process has a device of its own.
on_gpu = torch.cuda.is_available() and not args.no_cuda
device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")

# Every fifth image is for testing. Of the others each rank has its part, in an order that changes with the epochs.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(images)) % 5 == 0
train = TensorDataset(images[~is_test], labels[~is_test])
test_images, test_labels = images[is_test].to(device), labels[is_test].to(device)
sampler = SplitSampler(len(train), hvd.size(), hvd.rank(), seed=0)
loader = DataLoader(train, args.batch_size, sampler=sampler)

torch.manual_seed(hvd.rank())  # other first weights on every rank, until step 5
model = nn.Sequential(
    nn.Conv2d(1, 20, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(20, 50, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(50 * 2 * 2, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
).to(device)

# Step 3: as many processes see as many times the images in a step, so the learning rate grows with them.
optimizer_params = {"learning_rate": args.lr * hvd.size(), "momentum": 0.9}

# Step 4: this trainer averages the gradients over the ranks before it updates.
trainer = hvd.DistributedTrainer(model.named_parameters(), "sgd", optimizer_params)

# Step 5: the weights of rank 0 become everybody's.
hvd.broadcast_parameters(model.state_dict(), root_rank=0)

loss_of = nn.CrossEntropyLoss(reduction="sum")
for epoch in range(args.epochs):
    loss_sum, count = 0.0, 0
    for batch, target in loader:
        model.zero_grad()
        loss = loss_of(model(batch.to(device)), target.to(device))
        loss.backward()
        trainer.step(len(batch))  # the loss is a sum over this rank's examples, and they are divided by their number
        loss_sum, count = loss_sum + loss.item(), count + len(batch)
    train_loss = hvd.metric_average(loss_sum / count, "train loss")
    with torch.no_grad():
        right = model(test_images).argmax(dim=1) == test_labels
    print(f"Epoch {epoch}: Test_acc {right.float().mean():.6f} Train_loss {train_loss:.4f}", flush=True)

# Step 6 is the checkpoint, which one rank would write: see resnet50_imagenet.py.
hvd.shutdown()
