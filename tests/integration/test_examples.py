"""The examples, run as their first lines say: on a launched cluster, and alone."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.processes import prefix_of

pytestmark = [
    pytest.mark.skipif(find_spec("torch") is None, reason="the examples train torch networks"),
    pytest.mark.skipif(find_spec("sklearn") is None, reason="examples/digits.py has its images from scikit-learn"),
]

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DIGITS, CIFAR10 = str(EXAMPLES / "digits.py"), str(EXAMPLES / "cifar10_dist.py")
DEVICES = str(EXAMPLES / "digits_devices.py")
COMPENSATED = str(EXAMPLES / "delay_compensation.py")
WHERE = "get https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz, unpack it, and give --data cifar-10-batches-bin"
DEMO_S = 240.0
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
    lines = [line.removeprefix(prefix_of(name)) for line in process.lines_with("Test_acc")]
    own = [line.split() for line in lines if line.startswith("Epoch ")]
    assert [words[:3] for words in own] == [["Epoch", f"{epoch}:", "Test_acc"] for epoch in range(len(own))]
    return [float(words[3]) for words in own]


@pytest.mark.timeout(DEMO_S + 20)
@pytest.mark.parametrize(
    ("options", "epochs", "least"),
    [(["--epochs", "5"], 5, 0.9), pytest.param([], 25, 0.97, marks=pytest.mark.slow)],
    ids=["begins", "97 percent"],
)
def test_the_demo_learns_with_the_same_accuracy_on_both_workers(job, options, epochs, least):
    launcher = job.launch(2, 2, DIGITS, *options)
    job.succeed(DEMO_S)
    first, second = accuracies(launcher, "worker-0"), accuracies(launcher, "worker-1")
    assert first == second
    assert len(first) == epochs
    assert first[-1] >= least, launcher.text
    assert "2 workers and 2 servers finished in " in launcher.text.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 20)
def test_the_demo_of_faults_kills_one_of_each_role_and_ends_as_well_as_undisturbed(job):
    words = ("--kills", "3", "--every", "1", "--epochs", "60")
    demo = job.start("demo", [sys.executable, str(EXAMPLES / "faults.py"), *words])
    job.succeed(DEMO_S)
    for victim in ("scheduler", "server-[01]", "worker-[012]"):
        assert re.search(f"kill -9 {victim} ", demo.text), "the faults happened"
    assert re.search(r"scheduler: killed once, and the next one went on from its journal.* started 2 times", demo.text)
    assert re.search(r"server-[01]: killed once, and another server went on .* started 2 times", demo.text)
    assert re.search(r"worker-[012]: killed once, and the others trained on .* started 2 times", demo.text)
    assert len(demo.lines_with("accuracy ")) == 2, demo.text


def test_the_demo_runs_without_a_launcher_and_says_how_to_have_one(job):
    alone = job.start("alone", [sys.executable, DIGITS, "--epochs", "1"])
    job.succeed()
    (accuracy,) = accuracies(alone, "alone")
    assert 0.5 < accuracy <= 1
    assert len(alone.lines_with("worker 0 of 1")) == 1
    (warning,) = alone.lines_with("kvdist-launch")
    assert "running alone" in warning


@pytest.mark.slow_cases("device", "dist_device_sync")
@pytest.mark.parametrize("store", ["device", "dist_device_sync"])
def test_one_worker_learns_the_digits_on_two_devices(job, store):
    alone = job.start("alone", [sys.executable, DEVICES, "--store", store, "--devices", "cpu,cpu"])
    job.succeed()
    found = accuracies(alone, "alone")
    assert len(found) == 15 and found[-1] >= 0.95, alone.text


@pytest.mark.slow
def test_three_workers_learn_the_digits_with_a_rule_of_ones_own_on_the_servers(job):
    options = ["--server-module", "delay_compensation"]
    launcher = job.launch(3, 2, sys.executable, COMPENSATED, options=options, PYTHONPATH=str(EXAMPLES))
    job.succeed()
    for rank in range(3):
        found = accuracies(launcher, f"worker-{rank}")
        assert len(found) == 10 and found[-1] >= 0.93, launcher.text


@pytest.mark.slow
def test_two_workers_with_two_devices_each_learn_the_same_digits(job):
    launcher = job.launch(2, 2, DEVICES, "--store", "dist_device_sync", "--devices", "cpu,cpu")
    job.succeed()
    first, second = accuracies(launcher, "worker-0"), accuracies(launcher, "worker-1")
    assert first == second
    assert len(first) == 15 and first[-1] >= 0.95, launcher.text


@pytest.mark.slow
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


@pytest.mark.slow
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


RECOMMENDER = EXAMPLES / "recommender"


def aucs(process, name):
    """The areas under the curve that one worker printed, epoch by epoch."""
    lines = [line.removeprefix(prefix_of(name)) for line in process.lines_with("Test_auc")]
    return [float(line.split()[3]) for line in lines if line.startswith("Epoch ")]


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 20)
def test_the_recommender_learns_alone(job):
    alone = job.start("alone", [sys.executable, str(RECOMMENDER / "train.py")])
    job.succeed(DEMO_S)
    found = aucs(alone, "alone")
    assert len(found) == 2 and found[-1] > 0.73, alone.text


@pytest.mark.slow
@pytest.mark.timeout(DEMO_S + 20)
def test_the_recommender_learns_the_same_on_each_of_three_workers(job):
    launcher = job.launch(3, 2, str(RECOMMENDER / "train.py"))
    job.succeed(DEMO_S)
    found = [aucs(launcher, f"worker-{rank}") for rank in range(3)]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 2 and found[0][-1] > 0.71, launcher.text


def test_the_recommender_reads_files_in_the_format_of_criteo(job, tmp_path):
    sys.path.insert(0, str(RECOMMENDER))
    try:
        import criteo
    finally:
        sys.path.remove(str(RECOMMENDER))
    criteo.write(300, tmp_path / "day_0")
    script = [sys.executable, str(RECOMMENDER / "train.py"), "--epochs", "1", "--data", str(tmp_path / "day_0")]
    alone = job.start("alone", script)
    job.succeed()
    assert len(aucs(alone, "alone")) == 1
    (tmp_path / "bad").write_text("1\t2\n")
    with pytest.raises(ValueError, match="bad, line 1: 2 fields, where a label, 13 counts and 26 categories"):
        criteo.read([tmp_path / "bad"], 100)
    assert criteo.auc(criteo.np.array([0, 1, 1, 0]), criteo.np.array([0.1, 0.9, 0.5, 0.5])) == 0.875


COLLECTIVE, RESNET50 = str(EXAMPLES / "collective_mnist_style.py"), str(EXAMPLES / "resnet50_imagenet.py")
SMALL = ["--fake-data", "--fake-images", "48", "--image-size", "32", "--width", "4", "--classes", "4"]
RANKS = [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
"""One runs without a launcher."""


def epochs_of_ranks(job, ranks, name, *command, **variables):
    """Epoch → the accuracy and the loss, which all ranks of a job without servers printed alike."""
    launch = ["-m", "kvdist_launch", "-n", str(ranks), "-s", "0", sys.executable] if ranks > 1 else []
    process = job.start(name, [sys.executable, *launch, *command], **variables)
    job.succeed()
    found = re.findall(r"Epoch (\d+): Test_acc (\S+) Train_loss (\S+)", process.text)
    alike = set(found)
    assert len(found) == ranks * len(alike), process.text
    return {int(epoch): (float(accuracy), float(loss)) for epoch, accuracy, loss in alike}


@pytest.mark.parametrize("ranks", RANKS)
def test_gluons_script_learns_the_digits_without_servers(job, ranks):
    epochs = epochs_of_ranks(job, ranks, "job", COLLECTIVE, "--epochs", "8")
    assert sorted(epochs) == list(range(8))
    assert epochs[7][0] >= 0.9 and epochs[7][1] < 0.4, epochs


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("ranks", RANKS)
def test_resnet_50_learns_random_images_and_goes_on_from_the_checkpoint_of_one_rank(job, ranks, tmp_path):
    folder, caches = tmp_path / "saved", {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "caches")}
    command = [RESNET50, *SMALL, "--batch-size", "6", "--fp16-allreduce", "--checkpoints", str(folder), "--epochs"]
    assert sorted(epochs_of_ranks(job, ranks, "first", *command, "1", **caches)) == [0]
    assert [path.name for path in folder.iterdir()] == ["checkpoint-0.pt"]
    if ranks > 1:
        assert sorted(epochs_of_ranks(job, ranks, "second", *command, "2", **caches)) == [1], "one is done"


def test_resnet_50_without_data_says_what_to_give(job):
    alone = job.start("alone", [sys.executable, RESNET50])
    assert job.finish() == {"alone": 2}
    assert len(alone.lines_with("give --data FOLDER with train and val, or try --fake-data")) == 1
