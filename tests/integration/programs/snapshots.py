"""Workers that train while servers are killed: ``snapshots.py FOLDER [trainer | compressed | jumping]``.

In step t rank r pushes (t + 1) · (r + 1), so a weight says which steps are in it, and each is checked after each step.
Rank 0 waits in the middle until FOLDER/go is there.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np

from kvdist import RolledBackError, kv

STEPS, PAUSE = 40, 20
EARLY = 6
"""Under a policy of local steps this many are exchanged before their time."""
SIZES = {"small": 3, "large": 1_200_000}
"""One is cut over all servers."""


def wait_in_the_middle(rank, step):
    go, folder = Path(sys.argv[1]) / "go", Path(sys.argv[1]) / "snapshots"
    for _ in range(50 if rank == 0 and step < PAUSE else 0):  # a snapshot that has begun is complete after a step more
        if not any(folder.glob("step-*/manifest.json")):
            time.sleep(0.01)
    if rank == 0 and step == PAUSE and not go.exists():
        print("waits in the middle", flush=True)
        while not go.exists():
            time.sleep(0.01)


def wanted(store, step):
    ranks = sum(rank + 1 for rank in range(store.num_workers))
    return step * (step + 1) / 2 * ranks


def main():
    store = kv.create("dist")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(list(SIZES), [np.zeros(size) for size in SIZES.values()])
    told = []
    store.on_rollback(told.append)
    step, again, is_stale = 0, 0, False
    while step < STEPS:
        wait_in_the_middle(store.rank, step)
        gradients = [np.full(size, -float((step + 1) * (store.rank + 1))) for size in SIZES.values()]
        try:
            if is_stale:
                values = store.pull(list(SIZES))
                assert all((value == wanted(store, step)).all() for value in values), (step, values[0])
                is_stale = False
            store.pushpull(list(SIZES), gradients)
            values = gradients
            step += 1
            mean = store.average(np.full(2, float(step)))
            assert (mean == step).all(), (step, mean)
        except RolledBackError as error:
            again += step - error.step
            step, is_stale = error.step, True
            continue
        assert all((value == wanted(store, step)).all() for value in values), (step, values[0])
    store.barrier()
    print(f"ended with {values[0][0]:g} after {again} steps again, told of {told}", flush=True)
    store.close()


def with_trainer():
    import torch

    from kvdist import Trainer

    weights, store = [torch.nn.Parameter(torch.zeros(5)) for _ in range(2)], kv.create("dist")
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store)
    told, calls = [], 0
    store.on_rollback(told.append)
    while trainer.version < STEPS:
        wait_in_the_middle(store.rank, trainer.version)
        for weight in weights:
            weight.grad = torch.full((5,), -float((trainer.version + 1) * (store.rank + 1)))
        trainer.step(1)
        calls += 1
        if calls == EARLY:
            trainer.exchange()
    trainer.exchange()
    if "fragments" not in os.environ.get("KVDIST_POLICY", ""):  # of which one goes back further than the other
        assert torch.equal(*weights)
        assert trainer.samples_seen == store.num_workers * STEPS, trainer.samples_seen
    values = " ".join(f"{weight[0].item():g}" for weight in reversed(weights))
    print(f"ended with {values} after {calls - STEPS} steps again, told of {told}", flush=True)


def with_compression():
    """Each push has an eighth of the least that is sent, and stays with the worker until there are eight."""
    folder, store = Path(sys.argv[1]), kv.create("dist")
    store.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("w", np.zeros(5, np.float32))

    def push(gradient):
        value = np.full(5, gradient, np.float32)
        store.pushpull("w", value)
        return value[0]

    assert [push(-1 / 8) for _ in range(5)] == [0] * 5
    while not any(int(one.parent.name[5:]) > 0 for one in (folder / "snapshots").glob("step-*/manifest.json")):
        push(0.0)
    print("waits in the middle", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)
    try:
        while True:
            push(0.0)
    except RolledBackError:
        pushes = 1
    while push(-1 / 8) == 0:
        pushes += 1
    print(f"the first push that counts is number {pushes}", flush=True)
    store.close()


def with_jumps():
    """The time of day jumps in each process."""
    import jumping  # noqa: F401

    main()


if __name__ == "__main__":
    ways = {"": main, "trainer": with_trainer, "compressed": with_compression, "jumping": with_jumps}
    ways["".join(sys.argv[2:])]()
