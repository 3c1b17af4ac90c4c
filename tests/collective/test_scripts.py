"""Scripts in the shape of Horovod's examples for PyTorch, at two processes, of which nothing but the import differs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.collective.scripts import horovodrun

PROGRAMS = Path(__file__).with_name("programs")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sklearn") is None, reason="the programs have their images from scikit-learn"),
]


@pytest.mark.parametrize(
    "options",
    [
        ["--fp16-allreduce", "--gradient-predivide-factor", "2"],
        ["--use-mixed-precision"],
        ["--use-adasum", "--lr", "0.2"],
    ],
    ids=["half", "mixed", "adasum"],
)
def test_mnist(job, tmp_path, options):
    first, second = horovodrun(job, tmp_path, PROGRAMS / "mnist.py", *options)
    assert first == second
    assert float(first["accuracy"]) > 0.8, first


@pytest.mark.parametrize("options", [[], ["--fp16-allreduce", "--use-adasum"]], ids=["average", "adasum"])
def test_synthetic_benchmark(job, tmp_path, options):
    for result in horovodrun(job, tmp_path, PROGRAMS / "synthetic.py", *options):
        assert float(result["loss"]) < float(result["first"]) and result["steps"] == "14", result


def test_imagenet_goes_on_from_the_checkpoint_of_rank_0(job, tmp_path):
    before, _ = horovodrun(job, tmp_path, PROGRAMS / "imagenet.py")
    assert before["began"] == "0" and before["lr"] == "0.080000"
    after, other = horovodrun(job, tmp_path, PROGRAMS / "imagenet.py", "--epochs", "4")
    assert after == other and after["began"] == "2"
    assert float(after["loss"]) < 0.5 * float(before["loss"]), (before, after)
    # The same four epochs at once have the same end.
    whole, _ = horovodrun(
        job, tmp_path, PROGRAMS / "imagenet.py", "--epochs", "4", "--checkpoint-format", "whole-{epoch}"
    )
    assert whole["loss"] == after["loss"]
