"""The readers of the CIFAR-10 example, on files of a few made-up images."""

import importlib.util
import struct
from pathlib import Path

import numpy as np
import pytest
import torch

from kvdist import replicate
from tests.cases import each

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "cifar10_dist.py"
IMAGE_BYTES = 3 * 32 * 32


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("cifar10_dist", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def made_up(count, seed):
    random = np.random.default_rng(seed)
    return random.integers(0, 256, (count, 3, 32, 32), np.uint8), random.integers(0, 10, count, np.uint8)


def binary(images, labels):
    return b"".join(bytes([label]) + image.tobytes() for image, label in zip(images, labels, strict=True))


def python(images, labels):
    """The instructions that Python 2 wrote for {'batch_label': …, 'labels': […], 'data': array, 'filenames': […]}."""
    pixels = images.tobytes()
    shape = b"J" + struct.pack("<i", len(labels)) + b"M" + struct.pack("<H", IMAGE_BYTES) + b"\x86q\x05"
    return (
        b"\x80\x02}q\x01(U\x0bbatch_labelq\x02U\x15training batch 1 of 5q\x03"
         b"U\x06labelsq\x04]q\x06(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
        + b"U\x04dataq\x07cnumpy.core.multiarray\n_reconstruct\nq\x08K\x01K\x00" + shape
        + b"T" + struct.pack("<i", len(pixels)) + pixels
        + b"U\x09filenamesq\x09]q\x0a(U\x05a.pngq\x0beu."
    )  # fmt: skip


@each("write, suffix", [(binary, ".bin"), (python, "")])
def test_both_versions_of_the_data_are_read(example, tmp_path, write, suffix):
    batches = [made_up(4, seed) for seed in range(5)]
    for i, batch in enumerate(batches, start=1):
        (tmp_path / f"data_batch_{i}{suffix}").write_bytes(write(*batch))
    (tmp_path / f"test_batch{suffix}").write_bytes(write(*made_up(3, 9)))
    train, test = example.cifar10(tmp_path)
    for data, images, labels in [
        (train, np.concatenate([batch[0] for batch in batches]), np.concatenate([batch[1] for batch in batches])),
        (test, *made_up(3, 9)),
    ]:
        assert torch.equal(data.tensors[0], torch.tensor(images))
        assert torch.equal(data.tensors[1], torch.tensor(labels.astype(np.int64)))


def test_missing_files_are_named_with_where_to_get_them(example, tmp_path):
    (tmp_path / "data_batch_2.bin").write_bytes(binary(*made_up(2, 0)))
    with pytest.raises(SystemExit, match=r"data_batch_1.bin, data_batch_3.bin, .* missing; get https://"):
        example.cifar10(tmp_path)


@each("content", [b"", b"\1" * 3072, b"\1" * 3074])
def test_a_binary_file_that_is_not_whole_is_refused(example, tmp_path, content):
    path = tmp_path / "test_batch.bin"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=r"test_batch.bin is not whole"):
        example.read_binary(path)


@each(
    "content, message",
    [
        (b"", "is not a batch of CIFAR-10's Python version"),
        (b"<html>not found</html>", "is not a batch of CIFAR-10's Python version"),
        (python(*made_up(2, 0))[:-40], "is not a batch of CIFAR-10's Python version"),
        (b"\x80\x02}.", "holds 0 labels and 0 bytes of images"),
    ],
)
def test_a_python_file_that_is_no_batch_is_refused(example, tmp_path, content, message):
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(SystemExit, match=message):
        example.read_python(path)


def test_scaled_images_have_mean_0_and_deviation_1_for_a_picture_of_the_mean(example):
    grey = torch.full((1, 3, 32, 32), 0.4465 * 255).round().to(torch.uint8)
    assert example.scaled(grey)[0, 2].abs().max() < 0.01


def test_a_batch_smaller_than_the_devices_trains_those_that_have_images(example):
    sizes = []

    class Trainer:
        def step(self, batch_size):
            sizes.append(batch_size)

    devices = [torch.device("cpu")] * 2
    nets = replicate(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(IMAGE_BYTES, 10)), devices)
    images, labels = (torch.tensor(array) for array in made_up(1, 0))
    example.train_batch(images, labels.long(), devices, nets, Trainer())
    assert sizes == [1]
    assert nets[0][1].weight.grad is not None and nets[1][1].weight.grad is None
