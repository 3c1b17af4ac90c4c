"""A worker that learns the digits from a queue of examples, each step at its time, and notes when it did what.

    python storm_worker.py FOLDER EPOCHS PERIOD_S SEED STORE

Besides the network each server has a row of counters, whose gradient is 1 for each example of a batch: they say in the
end how often every example was counted, on that server.
"""

import time

BEGAN = time.monotonic()

import json  # noqa: E402  # what an import takes is the user's time, and not the cluster's
import os  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from kvdist import QueueSampler, Trainer, kv  # noqa: E402

IMPORTED = time.monotonic()
BATCH = 16
LEARNING_RATE = 0.3
"""Of the mean over all workers that take part."""


def through_the_relay() -> None:
    """Have the driver's relay of this worker carry all its connections, if there is one."""
    if address := os.environ.get("STORM_RELAY"):
        with socket.create_connection(("127.0.0.1", int(address))) as driver:
            driver.sendall(f"{os.environ['KVDIST_RANK']} {os.environ['DMLC_PS_ROOT_PORT']}\n".encode())
            os.environ["DMLC_PS_ROOT_PORT"] = driver.makefile().readline().strip()


def main() -> None:
    folder, epochs, period_s, seed = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(images)) % 5 == 0
    train_images, train_labels = images[~is_test], labels[~is_test]
    count = len(train_images)
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    servers = int(os.environ["DMLC_NUM_SERVER"])
    counters = nn.Parameter(torch.zeros(servers, count))  # cut into as many slices
    through_the_relay()
    loaded = time.monotonic()
    life = os.environ.get("KVDIST_RESTARTS", "0")
    with (
        kv.create(sys.argv[5]) as store,
        (folder / f"{store.rank}.{life}.{os.getpid()}").open("w", buffering=1) as log,
    ):
        print("began", BEGAN, file=log)
        print("imported", IMPORTED, file=log)
        print("loaded", loaded, file=log)
        print("joined", time.monotonic(), file=log)
        parameters = [*net.parameters(), counters]
        trainer = Trainer(parameters, "sgd", {"learning_rate": 1.0}, kvstore=store)
        sampler = QueueSampler(count, epochs=epochs, seed=seed)
        data = TensorDataset(torch.arange(count), train_images, train_labels)
        for step, (numbers, inputs, targets) in enumerate(trainer.batches(DataLoader(data, BATCH, sampler=sampler))):
            if step == 0:
                print("batch", time.monotonic(), file=log)
            due = time.monotonic() + period_s
            loss = cross_entropy(net(inputs), targets) * (LEARNING_RATE / len(store.members))
            (loss + counters[:, numbers].sum()).backward()
            time.sleep(max(0.0, due - time.monotonic()))
            trainer.step(1)
            for parameter in parameters:
                parameter.grad = None
            print("step", time.monotonic(), len(numbers), file=log)
        print("end", time.monotonic(), file=log)
        least, most = torch.aminmax((-counters.detach()).round().int(), dim=0)
        with torch.no_grad():
            right = net(images[is_test]).argmax(dim=1) == labels[is_test]
        found = {
            "accuracy": float(right.float().mean()),
            "examples": count * epochs,
            "counted": [int(least.sum()), int(most.sum())],
            "lost": int((epochs - most).clamp(min=0).sum()),
            "twice": int((most - epochs).clamp(min=0).sum()),
            "in part": int((least != most).sum()),
        }
        (folder / f"end-{store.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
