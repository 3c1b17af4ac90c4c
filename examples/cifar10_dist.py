"""ResNet-18 learns CIFAR-10 on several workers with several devices each; the servers hold the weights and run Adam.

    kvdist-launch -n 2 -s 2 python examples/cifar10_dist.py --data cifar-10-batches-bin --devices cuda:0,cuda:1

The data is CIFAR-10 from https://www.cs.toronto.edu/~kriz/cifar.html, the binary or the Python version, unpacked.
Without it, ``--fake-data`` shows that everything works (and learns nothing of use). Without a launcher the script
runs alone, as a cluster of one. Each worker prints the accuracy of its own network on the test images after an epoch.
"""

import argparse
import pickletools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu
from torch.utils.data import DataLoader, TensorDataset

from kvdist import Replicas, SplitSampler, Trainer, kv, replicate, split_and_load

WHERE = "get https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, unpack it, and give --data cifar-10-batches-bin"
IMAGE_BYTES = 3 * 32 * 32


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    train, test = fake_data(args) if args.fake_data else cifar10(args.data)

    # Step 1: use a distributed key-value store.
    store = kv.create(args.store)
    print(f"Total number of workers: {store.num_workers}")
    print(f"This worker's rank: {store.rank}", flush=True)

    # Step 2: split the training data over the workers.
    sampler = SplitSampler(len(train), store.num_workers, store.rank)
    train_data = DataLoader(train, args.batch_size, sampler=sampler)
    test_data = DataLoader(test, args.batch_size)

    # Step 3: the network once on every device of this worker; the trainer keeps the copies the same.
    devices = [torch.device(name) for name in args.devices.split(",")]
    nets = replicate(ResNet18(), devices)
    trainer = Trainer(nets.parameters(), "adam", {"learning_rate": args.lr}, kvstore=store)

    for epoch in range(args.epochs):
        for images, labels in train_data:
            train_batch(images, labels, devices, nets, trainer)
        print(f"Epoch {epoch}: Test_acc {evaluate(test_data, devices[0], nets[0]):.6f}", flush=True)

    store.close()


def train_batch(images: Tensor, labels: Tensor, devices: list[torch.device], nets: Replicas, trainer: Trainer) -> None:
    """Run one batch on all devices of this worker and update the weights."""
    # The last batch of an epoch may have any size, so the devices' parts may differ by one image.
    parts = split_and_load(images, devices, even_split=False)
    targets = split_and_load(labels, devices, even_split=False)
    nets.train()
    nets.zero_grad()
    for net, part, target in zip(nets, parts, targets, strict=True):
        if len(part):  # fewer images than devices leave the last ones without any
            cross_entropy(net(scaled(flipped(part))), target, reduction="sum").backward()
    # The losses are sums over images: the trainer divides by how many there were on all devices.
    trainer.step(len(images))


def evaluate(data: DataLoader, device: torch.device, net: nn.Module) -> float:
    """The share of the images that the network names right."""
    net.eval()
    right = 0
    with torch.no_grad():
        for images, labels in data:
            right += int((net(scaled(images.to(device))).argmax(dim=1) == labels.to(device)).sum())
    return right / len(data.dataset)


def flipped(images: Tensor) -> Tensor:
    """Half of the images, chosen at random, seen in a mirror."""
    mirror = torch.rand(len(images), 1, 1, 1, device=images.device) < 0.5
    return torch.where(mirror, images.flip(3), images)


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels:
            self.around = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(inner + self.around(x))


class ResNet18(nn.Sequential):
    """The residual network of 18 layers (He et al., 2015), its entry made for images of 32 × 32 pixels."""

    def __init__(self, classes: int = 10) -> None:
        entry = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        stages = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [
            block
            for before, channels, stride in stages
            for block in (Block(before, channels, stride), Block(channels, channels, 1))
        ]
        super().__init__(*entry, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes))


def cifar10(folder: Path) -> tuple[TensorDataset, TensorDataset]:
    """The 50,000 training and 10,000 test images, from the files of the binary version or of the Python version."""
    names = [f"data_batch_{i}" for i in range(1, 6)]
    read, suffix = (read_python, "") if (folder / "data_batch_1").exists() else (read_binary, ".bin")
    train = read_all(folder, [name + suffix for name in names], read)
    return train, read_all(folder, ["test_batch" + suffix], read)


def read_all(folder: Path, names: list[str], read: Callable[[Path], tuple[np.ndarray, np.ndarray]]) -> TensorDataset:
    """The images and labels of several files, as one data set of bytes."""
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        sys.exit(f"{folder} does not hold CIFAR-10: {', '.join(missing)} missing; {WHERE}")
    images, labels = zip(*(read(folder / name) for name in names), strict=True)
    return dataset(np.concatenate(images), np.concatenate(labels))


def read_binary(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Records of one byte of label and 3 × 32 × 32 bytes of image."""
    content = path.read_bytes()
    if not content or len(content) % (1 + IMAGE_BYTES):
        sys.exit(f"{path} is not whole ({len(content)} bytes); {WHERE}")
    records = np.frombuffer(content, np.uint8).reshape(-1, 1 + IMAGE_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0]


def read_python(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """The Python version: a pickled dict with an array under 'data' and a list under 'labels'.

    Loading a pickle may run any code that its author liked. So it is not loaded: its instructions are only listed, and
    the longest string among them is the memory of the array.
    """
    pixels, labels, word = b"", [], ""
    try:
        for instruction, argument, _ in pickletools.genops(path.read_bytes()):
            if isinstance(argument, (str, bytes)):
                word = argument
                if len(word) > len(pixels):
                    pixels = word.encode("latin-1") if isinstance(word, str) else word
            elif word in ("labels", b"labels") and "INT" in instruction.name:
                labels.append(argument)
    except ValueError as error:
        sys.exit(f"{path} is not a batch of CIFAR-10's Python version ({error}); {WHERE}")
    if not labels or len(pixels) != len(labels) * IMAGE_BYTES:
        sys.exit(f"{path} holds {len(labels)} labels and {len(pixels)} bytes of images, which do not fit; {WHERE}")
    return np.frombuffer(pixels, np.uint8).reshape(-1, 3, 32, 32), np.array(labels, np.uint8)


def fake_data(args: argparse.Namespace) -> tuple[TensorDataset, TensorDataset]:
    """Noise of the right shape, the same on every worker."""
    random = np.random.default_rng(args.seed)
    images = random.integers(0, 256, (args.fake_images, 3, 32, 32), np.uint8)
    labels = random.integers(0, 10, args.fake_images, np.uint8)
    return dataset(images, labels), dataset(images[:32], labels[:32])


def dataset(images: np.ndarray, labels: np.ndarray) -> TensorDataset:
    """Images as bytes, labels as int64."""
    return TensorDataset(torch.tensor(images), torch.tensor(labels, dtype=torch.int64))


def scaled(images: Tensor) -> Tensor:
    """Bytes as float32 with mean 0 and deviation 1 in each colour, those of the training images."""
    mean = torch.tensor([0.4914, 0.4822, 0.4465], device=images.device).view(3, 1, 1)
    deviation = torch.tensor([0.2470, 0.2435, 0.2616], device=images.device).view(3, 1, 1)
    return images.float().div_(255).sub_(mean).div_(deviation)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="cifar-10-batches-bin or cifar-10-batches-py")
    parser.add_argument("--fake-data", action="store_true", help="noise instead of images: a smoke test")
    parser.add_argument("--fake-images", type=int, default=128, help="how much noise")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=64, help="images per worker and step, on all its devices")
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--devices", default=device, help="such as cuda:0,cuda:1")
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--store", default="dist", help="the type of the store, such as dist or dist_async")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.data and not args.fake_data:
        parser.error(f"no data: {WHERE}; or try --fake-data")
    return args


if __name__ == "__main__":
    main()
