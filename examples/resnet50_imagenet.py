"""ResNet-50 learns ImageNet on several processes without servers, as Horovod's example of that name does.

    kvdist-launch -n 8 -s 0 python examples/resnet50_imagenet.py --data /data/imagenet --fp16-allreduce

`--data` has the folders ``train`` and ``val``, and in each a folder of images for every class; Pillow reads them. To
see it run without data: ``--fake-data``, on a CPU with ``--image-size 32 --width 4``. The learning rate is that of
one process times their number, reached in five epochs of warm-up; rank 0 writes a checkpoint after each epoch, and
a job that finds one goes on from it, with any number of processes.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import kvdist.horovod as hvd
from kvdist import SplitSampler

WARMUP_EPOCHS = 5
DECAYS = {30: 0.1, 60: 0.01, 80: 0.001}
"""Epoch → what the learning rate is multiplied by from then on."""
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of the colours of ImageNet."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder with train and val")
    parser.add_argument("--fake-data", action="store_true", help="random images instead")
    parser.add_argument("--fake-images", type=int, default=1024)
    parser.add_argument("--classes", type=int, default=1000, help="of random images")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=32, help="images per process and step")
    parser.add_argument("--base-lr", type=float, default=0.0125, help="of one process")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--wd", type=float, default=5e-5)
    parser.add_argument("--fp16-allreduce", action="store_true", help="let gradients travel as halves")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--width", type=int, default=64, help="channels of the first layer; 64 is ResNet-50")
    parser.add_argument("--loaders", type=int, default=4, help="processes that read images, for each rank")
    parser.add_argument("--checkpoints", type=Path, help="a folder; without it none are written")
    options = parser.parse_args()
    if not options.fake_data and options.data is None:
        parser.error("no data: give --data FOLDER with train and val, or try --fake-data")
    return options


# The network.


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut; the middle one has a quarter of the channels."""

    def __init__(self, before: int, inside: int, stride: int) -> None:
        super().__init__()
        after = 4 * inside
        self.body = nn.Sequential(
            *convolution(before, inside, 1),
            nn.ReLU(inplace=True),
            *convolution(inside, inside, 3, stride),
            nn.ReLU(inplace=True),
            *convolution(inside, after, 1),
        )
        is_plain = stride == 1 and before == after
        self.shortcut = nn.Identity() if is_plain else nn.Sequential(*convolution(before, after, 1, stride))
        nn.init.zeros_(self.body[-1].weight)  # each block begins as its shortcut

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def convolution(before: int, after: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    """A convolution and its normalisation."""
    layer = nn.Conv2d(before, after, size, stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer, nn.BatchNorm2d(after)


def resnet50(classes: int, width: int = 64) -> nn.Sequential:
    """ResNet-50: 25,557,032 parameters for 1000 classes and a width of 64."""
    parts = [*convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1)]
    channels = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        inside = width << stage
        for block in range(blocks):
            parts.append(Bottleneck(channels, inside, 2 if stage and not block else 1))
            channels = 4 * inside
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


# The data.


class FakeImages(Dataset):
    """Random images whose class can be seen in their colours; the same ones in each run."""

    def __init__(self, count: int, classes: int, size: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(classes, (count,), generator=random)
        self.classes = classes
        self._size = size

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        label = int(self.labels[number])
        random = torch.Generator().manual_seed(number)
        colour = torch.tensor([math.cos(label), math.sin(label), math.cos(3 * label)]).view(3, 1, 1)
        return torch.randn(3, self._size, self._size, generator=random) + 2 * colour, label


class ImageFolder(Dataset):
    """Images in one folder for each class.

    Args:
        folder: with those folders.
        size: to which images are cut, in pixels.
        is_training: cut and mirror at random; else take the middle.
    """

    def __init__(self, folder: Path, size: int, is_training: bool) -> None:
        names = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        self._images = [(path, label) for label, name in enumerate(names) for path in sorted((folder / name).iterdir())]
        if not self._images:
            raise SystemExit(f"{folder} has no folders with images, one for each class")
        self.classes = len(names)
        self._size = size
        self._is_training = is_training

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        try:
            from PIL import Image
        except ImportError:
            raise SystemExit("images are read by Pillow: pip install pillow, or try --fake-data") from None
        path, label = self._images[number]
        with Image.open(path) as image:
            cut = self._cut(image.convert("RGB"))
        pixels = torch.frombuffer(bytearray(cut.tobytes()), dtype=torch.uint8).view(self._size, self._size, 3)
        colours = pixels.permute(2, 0, 1).float() / 255
        return (colours - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(DEVIATION).view(3, 1, 1), label

    def _cut(self, image):
        """A square of the image: of 8 % to 100 % of its area and anywhere for training, else the middle."""
        width, height = image.size
        if not self._is_training:
            side = min(width, height) * 224 / 256
            left, top = (width - side) / 2, (height - side) / 2
        else:
            share, x, y, mirror = torch.rand(4).tolist()
            side = min(math.sqrt((0.08 + 0.92 * share) * width * height), width, height)
            left, top = x * (width - side), y * (height - side)
        box = (left, top, left + side, top + side)
        cut = image.resize((self._size, self._size), resample=2, box=box)
        return cut.transpose(0) if self._is_training and mirror < 0.5 else cut


def loaders(options: argparse.Namespace) -> tuple[DataLoader, DataLoader, int]:
    """What this rank trains on and what it tests on, and the number of classes."""
    if options.fake_data:
        train = FakeImages(options.fake_images, options.classes, options.image_size, seed=1)
        test = FakeImages(max(hvd.size(), options.fake_images // 8), options.classes, options.image_size, seed=2)
    else:
        train = ImageFolder(options.data / "train", options.image_size, is_training=True)
        test = ImageFolder(options.data / "val", options.image_size, is_training=False)

    def loader(images: Dataset) -> DataLoader:
        sampler = SplitSampler(len(images), hvd.size(), hvd.rank(), seed=0)
        workers = 0 if options.fake_data else options.loaders
        return DataLoader(images, options.batch_size, sampler=sampler, num_workers=workers)

    return loader(train), loader(test), train.classes


# Training.


def learning_rate(options: argparse.Namespace, epoch: float) -> float:
    """At a moment of training: warm-up from that of one process to that of all, then the decays."""
    if epoch < WARMUP_EPOCHS:
        return options.base_lr * (epoch * (hvd.size() - 1) / WARMUP_EPOCHS + 1)
    factor = min([1.0, *(factor for begin, factor in DECAYS.items() if epoch >= begin)])
    return options.base_lr * hvd.size() * factor


def train_epoch(options, model, optimizer, loader: DataLoader, device: torch.device, epoch: int) -> float:
    """One pass over the images; the loss, averaged over all ranks."""
    model.train()
    loss_sum = torch.zeros((), device=device)
    for step, (images, labels) in enumerate(loader):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(options, epoch + step / len(loader))
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        loss_sum += loss.detach()
    return hvd.metric_average(loss_sum.item() / len(loader), "train loss")


def accuracy(model: nn.Module, loader: DataLoader, device: torch.device) -> float:
    """The share of the test images that are named right, each rank having looked at its part of them."""
    model.eval()
    counts = torch.zeros(2, dtype=torch.int64)
    with torch.no_grad():
        for images, labels in loader:
            right = (model(images.to(device)).argmax(dim=1) == labels.to(device)).sum()
            counts += torch.tensor([int(right), len(labels)])
    right, count = hvd.allreduce(counts, op=hvd.Sum).tolist()
    return right / count


def newest(folder: Path | None) -> Path | None:
    """The checkpoint to go on from."""
    found = [] if folder is None or not folder.is_dir() else folder.glob("checkpoint-*.pt")
    return max(found, key=lambda path: int(path.stem.rpartition("-")[2]), default=None)


def save(folder: Path, epoch: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint; whoever looks for one sees it whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"checkpoint-{epoch}.pt"
    content = {"epoch": epoch, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(content, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def epochs_to_do(options, model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Have all ranks begin where rank 0 does; the epochs that are left."""
    done = 0
    checkpoint = newest(options.checkpoints) if hvd.rank() == 0 else None
    if checkpoint is not None:
        content = torch.load(checkpoint, map_location="cpu", weights_only=True)
        model.load_state_dict(content["model"])
        optimizer.load_state_dict(content["optimizer"])
        done = content["epoch"] + 1
    done = hvd.broadcast_object(done, root_rank=0, name="epochs that are done")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    yield from range(done, options.epochs)


def main() -> None:
    options = parse_arguments()
    hvd.init()
    if torch.cuda.is_available():
        torch.cuda.set_device(hvd.local_rank())
        device = torch.device("cuda", hvd.local_rank())
    else:
        torch.set_num_threads(1)  # the processes of one machine share its cores
        device = torch.device("cpu")
    torch.manual_seed(0)
    train, test, classes = loaders(options)
    model = resnet50(classes, options.width).to(device)
    optimizer = torch.optim.SGD(model.parameters(), options.base_lr, options.momentum, weight_decay=options.wd)
    compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), compression=compression)
    for epoch in epochs_to_do(options, model, optimizer):
        loss = train_epoch(options, model, optimizer, train, device, epoch)
        found = accuracy(model, test, device)
        print(f"Epoch {epoch}: Test_acc {found:.6f} Train_loss {loss:.4f}", flush=True)
        if hvd.rank() == 0 and options.checkpoints:
            save(options.checkpoints, epoch, model, optimizer)
    hvd.shutdown()


if __name__ == "__main__":
    main()
