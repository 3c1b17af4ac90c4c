"""A worker that trains on a queue of examples; the weights say how often each was counted.

    python leases.py LENGTH EPOCHS BATCH LOADER_WORKERS STORE VICTIMS [FOLDER]

Example i moves element i of one parameter by 1, and element LENGTH - 1 - i of another; under KVDIST_POLICY, a quota, by
one of the number of examples in its version. VICTIMS maps ranks to the example counts after which they kill themselves,
some milliseconds into the step that follows. With SNAPSHOTS rank 0 waits in the middle, when there is a snapshot in
that folder, until SNAPSHOTS/go is there. Rank 1 sends itself SIGTERM in the batch that TERMINATED counts; under a
quota, where nobody waits for it, the others do before their third batch, for the file HERE. With JOINS_LAST rank 0
waits behind the last step until rank 1, which has died and was started again, has joined. With DIES_LAST the worker
that has the last batch alone dies behind its step. With INTERRUPTED an error comes to rank 1 while it waits in its
fifth step: it leaves by it, or catches it and begins its loop again.
"""

import ast
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from kvdist import QueueSampler, Trainer, kv

if "LOADER_TEMP" in os.environ:
    tempfile.tempdir = os.environ["LOADER_TEMP"]  # what the loaders of a killed process leave there goes with the test
LENGTH, EPOCHS, BATCH, LOADER_WORKERS = map(int, sys.argv[1:5])
VICTIMS = ast.literal_eval(sys.argv[6])
FOLDER = sys.argv[7] if len(sys.argv) > 7 else ""
HAS_QUOTA = "KVDIST_POLICY" in os.environ


class Numbers(Dataset):
    """The example at i is i."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index


def wait_in_the_middle(trainer):
    folder = Path(os.environ["SNAPSHOTS"])
    go = folder / "go"
    if trainer.version >= 30 and not go.exists() and any(folder.glob("step-*/manifest.json")):
        print("waits in the middle", flush=True)
        while not go.exists():
            time.sleep(0.01)


def counts_in(weight):
    """How often each example was counted. Of a version of n each has moved its element by 1 / n, and there are n."""
    moved = (-weight).tolist()
    if not HAS_QUOTA:
        return [round(one) for one in moved]
    sizes = [round(1 / one) if one else 0 for one in moved]
    complete = {size for size, count in Counter(sizes).items() if size and count % size == 0}
    return [0 if not size else 1 if size in complete else 2 for size in sizes]


def join_last(trainer, folder):
    """In the second life: take part before there is any data to train on."""
    if (folder / "begun").exists():
        print(f"joins at version {trainer.version}", flush=True)
        (folder / "joined").touch()
    (folder / "begun").touch()


def kill_soon(after_s):
    threading.Timer(after_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()


def interrupt_the_wait(rank):
    """Let an error come to rank 1 from outside while it waits for rank 0."""
    if rank == 0:
        time.sleep(1.0)
    elif rank == 1:
        signal.signal(signal.SIGALRM, interrupted)
        signal.setitimer(signal.ITIMER_REAL, 0.3)


def interrupted(*_):
    raise RuntimeError("a process of the loader has died")


def main():
    store = kv.create(sys.argv[5])
    with store if os.environ.get("INTERRUPTED") == "leaves" else contextlib.nullcontext():
        train(store)
    store.close()


def train(store):
    weights = [torch.nn.Parameter(torch.zeros(LENGTH)) for _ in range(2)]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store)
    saves = FOLDER and not os.path.isdir(FOLDER)
    store.barrier()
    if FOLDER and not saves:
        trainer.load_checkpoint(FOLDER)
    other = store.rank if "OTHER_LENGTH" in os.environ else 0
    sampler = QueueSampler(LENGTH + other, epochs=EPOCHS, seed=7)
    loader = DataLoader(Numbers(), BATCH, sampler=sampler, num_workers=LOADER_WORKERS)
    if "JOINS_LAST" in os.environ and store.rank == 1:
        join_last(trainer, Path(os.environ["JOINS_LAST"]))
    used = 0
    victim_after = VICTIMS.get(store.rank, None)
    steps = 0
    while True:
        try:
            for numbers in trainer.batches(loader):
                print(f"has {min(numbers.tolist())} and {len(numbers) - 1} more", flush=True)
                loss = weights[0][numbers].sum() + weights[1][LENGTH - 1 - numbers].sum()
                (loss / len(numbers) if HAS_QUOTA else loss).backward()
                if victim_after is not None and used >= victim_after:
                    kill_soon(random.Random(f"{store.rank} {used}").uniform(0, 0.004))
                    victim_after = None
                if "SNAPSHOTS" in os.environ and store.rank == 0:
                    wait_in_the_middle(trainer)
                if store.rank == 1 and os.environ.get("TERMINATED") == str(steps + 1):
                    if "HERE" in os.environ:
                        Path(os.environ["HERE"]).touch()
                    os.kill(os.getpid(), signal.SIGTERM)
                while "HERE" in os.environ and store.rank != 1 and steps == 2 and not Path(os.environ["HERE"]).exists():
                    time.sleep(0.01)
                if "INTERRUPTED" in os.environ and steps == 4:
                    interrupt_the_wait(store.rank)
                time.sleep(0.002 * ((store.rank % 3) + 1) if store.rank not in VICTIMS else 0.001)
                trainer.step(None if HAS_QUOTA else 1)
                for weight in weights:
                    weight.grad = None
                used += len(numbers)
                steps += 1
                while "JOINS_LAST" in os.environ and store.rank == 0 and trainer.samples_seen == LENGTH:
                    if Path(os.environ["JOINS_LAST"], "joined").exists():
                        break
                    time.sleep(0.01)
                if "DIES_LAST" in os.environ and trainer.samples_seen == LENGTH:
                    os.kill(os.getpid(), signal.SIGKILL)
                if saves and trainer.version == 20:
                    trainer.save_checkpoint(FOLDER, 20)
                    break
            break
        except RuntimeError:
            if os.environ.get("INTERRUPTED") != "again":
                raise
            print("begins again", flush=True)
            steps += 1  # its push counts
            used += len(numbers)
            for weight in weights:
                weight.grad = None
    seen = trainer.samples_seen
    counts = [counts_in(weights[0].detach()), counts_in(weights[1].detach().flip(0))]
    assert seen == sum(counts[0]), (seen, sum(counts[0]))
    found = Counter(zip(*counts, strict=True))
    print(f"used {used} in {steps} steps, version {trainer.version}; counts {dict(found)}", flush=True)
    mean = store.average(float(used))
    print(f"mean {mean}", flush=True)


if __name__ == "__main__":
    main()
