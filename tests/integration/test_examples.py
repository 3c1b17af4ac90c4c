"""The examples, run as their first lines say: on a launched cluster, and alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the examples train torch networks, and torch is not installed")
pytest.importorskip("sklearn", reason="examples/digits.py has its images from scikit-learn, which is not installed")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIGITS, CIFAR10 = str(EXAMPLES / "digits.py"), str(EXAMPLES / "cifar10_dist.py")
WHERE = "get https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, unpack it, and give --data cifar-10-batches-bin"
DEMO_S = 100.0
"""For the demo, which takes 8 s on two idle cores."""

WITH_DIGESTS = """
import hashlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("example", sys.argv.pop(1))
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
evaluate = example.evaluate
def evaluate_and_digest(data, device, net):
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in net.parameters())
    print("digest", hashlib.sha256(weights).hexdigest(), flush=True)
    return evaluate(data, device, net)
example.evaluate = evaluate_and_digest
example.main()
"""
"""Runs the CIFAR-10 example and also prints what the weights are, which its accuracies do not tell."""


def accuracies(process, name):
    """The accuracies that one worker printed, epoch by epoch."""
    lines = [line.removeprefix(f"[{name}] ") for line in process.lines_with("Test_acc")]
    own = [line.split() for line in lines if line.startswith("Epoch ")]
    assert [words[:3] for words in own] == [["Epoch", f"{epoch}:", "Test_acc"] for epoch in range(len(own))]
    return [float(words[3]) for words in own]


@pytest.mark.timeout(DEMO_S + 20)
def test_the_demo_reaches_97_percent_with_the_same_accuracy_on_both_workers(job):
    launcher = job.launch(2, 2, DIGITS)
    job.succeed(DEMO_S)
    first, second = accuracies(launcher, "worker-0"), accuracies(launcher, "worker-1")
    assert first == second
    assert len(first) == 25
    assert first[-1] >= 0.97, launcher.text
    assert "2 workers and 2 servers finished in " in launcher.text.splitlines()[-1]


def test_the_demo_runs_without_a_launcher_and_says_how_to_have_one(job):
    alone = job.start("alone", [sys.executable, DIGITS, "--epochs", "1"])
    job.succeed()
    (accuracy,) = accuracies(alone, "alone")
    assert 0.5 < accuracy <= 1
    assert len(alone.lines_with("worker 0 of 1")) == 1
    (warning,) = alone.lines_with("kvdist-launch")
    assert "running alone" in warning


def test_the_cifar10_example_trains_two_devices_on_each_of_two_workers(job):
    arguments = ["--fake-data", "--devices", "cpu,cpu", "--epochs", "1", "--fake-images", "12", "--batch-size", "4"]
    launcher = job.launch(2, 2, sys.executable, "-c", WITH_DIGESTS, CIFAR10, *arguments)
    job.succeed()
    for name in ("worker-0", "worker-1"):
        # Not the same one on both: each tests with the running means of the images it saw.
        (accuracy,) = accuracies(launcher, name)
        assert 0 <= accuracy <= 1
    assert len(launcher.lines_with("Total number of workers: 2")) == 2
    digests = [line.split()[-1] for line in launcher.lines_with("digest ")]
    assert len(digests) == 2 and len(set(digests)) == 1, launcher.text


def test_the_cifar10_example_without_data_says_where_to_get_it(job):
    launcher = job.launch(2, 2, CIFAR10)
    assert job.finish() == {"launcher": 2}
    # The first worker to fail ends the job, and the other may not have come as far.
    said = launcher.lines_with("error: ")
    assert said and all(line.endswith(f"error: no data: {WHERE}; or try --fake-data") for line in said)


def test_the_cifar10_example_with_an_empty_folder_says_what_is_missing_and_where_to_get_it(job, tmp_path):
    alone = job.start("alone", [sys.executable, CIFAR10, "--data", str(tmp_path)])
    assert job.finish() == {"alone": 1}
    (line,) = alone.lines_with("CIFAR-10")
    assert line.startswith(f"{tmp_path} does not hold CIFAR-10: data_batch_1.bin, ")
    assert line.endswith(f"missing; {WHERE}")
