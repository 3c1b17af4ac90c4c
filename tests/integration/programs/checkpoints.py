"""Stores and trainers that are saved while they train, and others that go on from there.

checkpoints.py train FOLDER       6 steps in every store, saved after 3, not waited for; prints what came out
checkpoints.py resume FOLDER      other first values, loaded, the last 3 steps; prints the same
checkpoints.py train_tables|resume_tables FOLDER     the same with tables of rows
checkpoints.py asynchronous FOLDER
checkpoints.py trainer FOLDER train|resume here|there
checkpoints.py refused FOLDER     a checkpoint that servers cannot write, between two that they can
checkpoints.py disagree FOLDER    workers call it at different steps
checkpoints.py states FOLDER
checkpoints.py unclosed|broken FOLDER, elsewhere|mistaken|fewer FOLDER here|there
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from kvdist import CheckpointError, LazyRows, NoCheckpoint, PeerLostError, RowSparse, SplitSampler, kv

RULES: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.01, "wd": 0.01},
    "nadam": {"learning_rate": 0.01},
    "lamb": {"learning_rate": 0.01},
    "groupadagrad": {"learning_rate": 0.1},
    "sgld": {"learning_rate": 0.01},
}
SHAPES = {"large": (500, 40), "odd": (4097,), "one": (1,), "none": (0,), **{f"small{i}": (7, 3) for i in range(20)}}
STEPS, SAVED = 6, 3


def values(rank: int, step: int, scale: float = 1.0) -> list[np.ndarray[Any, Any]]:
    random = np.random.default_rng([rank, step])
    return [(scale * random.standard_normal(shape)).astype(np.float32) for shape in SHAPES.values()]


def digest(arrays: list[Any]) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()[:16]


def shapes_of(rule: str) -> list[str]:
    # By rows means two dimensions.
    return [key for key, shape in SHAPES.items() if rule != "groupadagrad" or len(shape) == 2]


def opened(rule: str, seed: int, dtype: str = "float32") -> tuple[Any, list[str], list[Any]]:
    store = kv.create("dist")
    numbers = {**RULES[rule], **({"multi_precision": True} if dtype == "float16" else {})}
    store.set_optimizer(rule, **numbers)
    keys = shapes_of(rule)
    first = [one.astype(dtype) for one, key in zip(values(9, seed), SHAPES, strict=True) if key in keys]
    store.init(keys, first)
    return store, keys, [np.empty_like(one) for one in first]


def steps(store: Any, keys: list[str], outs: list[Any], begin: int, end: int) -> None:
    for step in range(begin, end):
        grads = [one for one, key in zip(values(store.rank, step), SHAPES, strict=True) if key in keys]
        store.pushpull(keys, [grad.astype(out.dtype) for grad, out in zip(grads, outs, strict=True)], out=outs)


def every_store() -> list[tuple[str, str]]:
    return [(rule, "float32") for rule in RULES] + [("adam", "float16")]


def train(folder: Path) -> None:
    saved = []
    for rule, dtype in every_store():
        store, keys, outs = opened(rule, seed=0, dtype=dtype)
        steps(store, keys, outs, 0, SAVED)
        # Rank 1 runs ahead: its pushes of the next step leave at once.
        future = store.save_checkpoint(folder / f"{rule}-{dtype}", SAVED, state={"rank": store.rank, "place": [1, 2.5]})
        steps(store, keys, outs, SAVED, STEPS)
        saved.append((future, rule, dtype, digest(outs)))
    for future, rule, dtype, found in saved:
        assert future.result().name == f"step-{SAVED}"
        print(f"{rule} {dtype} came to {found} on {store.rank}")


def resume(folder: Path) -> None:
    for rule, dtype in every_store():
        store, keys, outs = opened(rule, seed=77, dtype=dtype)
        steps(store, keys, outs, 20, 22)  # whatever it was before is gone
        checkpoint = store.load_checkpoint(folder / f"{rule}-{dtype}")
        assert checkpoint.step == SAVED and checkpoint.exact
        assert checkpoint.state == {"rank": store.rank, "place": [1, 2.5]}
        assert sorted(checkpoint.states) == list(range(store.num_workers))
        steps(store, keys, outs, checkpoint.step, STEPS)
        print(f"{rule} {dtype} came to {digest(outs)} on {store.rank}")


TABLE_RULES: dict[str, dict[str, Any]] = {
    "adagrad": {"learning_rate": 0.1},
    "adam": {"learning_rate": 0.01, "wd": 0.01, "lazy_update": True},
}
TABLE_SHAPES = {"eager": (2003, 8), "small": (3, 2), "lazy": (10**10, 6), "half": (10**10, 3)}


def opened_tables(rule: str, seed: int) -> Any:
    store = kv.create("dist")
    store.set_optimizer(rule, multi_precision=True, **TABLE_RULES[rule])
    random = np.random.default_rng(seed)
    for key in ("eager", "small"):
        values = random.standard_normal(TABLE_SHAPES[key]).astype(np.float32)
        store.init(key, RowSparse(np.arange(len(values)), values))
    store.init("lazy", LazyRows(TABLE_SHAPES["lazy"], initializer="normal(0.1,seed=5)"))
    store.init("half", LazyRows(TABLE_SHAPES["half"], "float16", "uniform(0.1)"))
    store.init("array", random.standard_normal((50, 3)).astype(np.float32))
    return store


def gradient_of(key: str, rank: int, step: int) -> RowSparse:
    random = np.random.default_rng([rank, step])
    rows, *rest = TABLE_SHAPES[key]
    ids = random.integers(0, min(rows, 500), random.integers(0, 200)) * (rows // min(rows, 500))
    dtype = np.float16 if key == "half" else np.float32
    return RowSparse(ids, random.standard_normal((len(ids), *rest)).astype(dtype), (rows, *rest))


def table_steps(store: Any, begin: int, end: int) -> str:
    """Train, and read all rows that were ever touched, and some that were not."""
    for step in range(begin, end):
        for key in TABLE_SHAPES:
            store.push(key, gradient_of(key, store.rank, step))
        store.push("array", np.random.default_rng([store.rank, step]).standard_normal((50, 3)).astype(np.float32))
    found = [store.pull("array")]
    for key, (rows, *_) in TABLE_SHAPES.items():
        ids = np.arange(501) * (rows // min(rows, 500))
        found.append(store.row_sparse_pull(key, row_ids=ids[ids < rows]).values)
    return digest(found)


def train_tables(folder: Path) -> None:
    for rule in TABLE_RULES:
        store = opened_tables(rule, 0)
        table_steps(store, 0, SAVED)
        future = store.save_checkpoint(folder / rule, SAVED)
        print(f"{rule} came to {table_steps(store, SAVED, STEPS)} on {store.rank}")
        future.result()


def resume_tables(folder: Path) -> None:
    for rule in TABLE_RULES:
        store = opened_tables(rule, 77)
        table_steps(store, 20, 22)  # whatever it was before is gone
        assert store.load_checkpoint(folder / rule).exact
        print(f"{rule} came to {table_steps(store, SAVED, STEPS)} on {store.rank}")


def asynchronous(folder: Path) -> None:
    """Each worker's pushes are integers, so what is saved says which of them it has."""
    store = kv.create("dist_async")
    store.set_optimizer("test")
    keys = ["a", "b"]
    store.init(keys, [np.zeros(5000, np.float32), np.zeros(3, np.float32)])
    grads = [np.full(5000, 1.0, np.float32), np.full(3, 1.0, np.float32)]
    for _ in range(4):
        store.push(keys, grads)
    future = store.save_checkpoint(folder, 4)
    for _ in range(4):
        store.push(keys, grads)
    future.result()
    store.barrier()
    checkpoint = store.load_checkpoint(folder)
    assert not checkpoint.exact
    store.barrier()
    outs = [np.empty(5000, np.float32), np.empty(3, np.float32)]
    store.pull(keys, out=outs)
    for out in outs:
        assert 4 * store.num_workers <= out.min() and out.max() <= 8 * store.num_workers, out
    print(f"asynchronous done on {store.rank}")


def refused(folder: Path) -> None:
    small, large = kv.create("dist"), kv.create("dist")
    small.init("s", np.arange(10, dtype=np.float32))
    large.init("l", np.zeros(300_000, np.float32))
    small.save_checkpoint(folder / "small", 1).result()
    before = sorted((folder / "small" / "step-1").iterdir())
    try:
        large.save_checkpoint(folder / "large", 2).result()
        raise AssertionError("it was written")
    except CheckpointError as error:
        print(f"refused on {large.rank}: {error}")
    large.pushpull("l", np.ones(300_000, np.float32))  # training goes on
    small.save_checkpoint(folder / "small", 2, keep=1).result()
    assert small.load_checkpoint(folder / "small").step == 2
    assert before and not (folder / "small" / "step-1").exists(), "only one is kept"
    large.barrier()
    left = [str(path) for path in folder.glob("large/**/*") if path.is_file() and path.name != "lock.json"]
    assert not left, left
    print(f"refused done on {small.rank}")


def disagree(folder: Path) -> None:
    store = kv.create("dist")
    store.init("a", np.zeros(10, np.float32))
    if store.rank == 0:
        store.push("a", np.ones(10, np.float32))
    future = store.save_checkpoint(folder, 1)
    if store.rank == 1:
        store.push("a", np.ones(10, np.float32))
    try:
        future.result()
        raise AssertionError("it was written")
    except CheckpointError as error:
        print(f"disagree on {store.rank}: {error}")
    store.pull("a")
    store.barrier()
    store.save_checkpoint(folder, 2).result()
    print(f"disagree done on {store.rank}")


def states(folder: Path) -> None:
    store, keys, outs = opened("sgd", 0)
    steps(store, keys, outs, 0, 2)
    store.save_optimizer_states(folder / "states")
    steps(store, keys, outs, 2, 4)
    expected = digest(outs)
    other = kv.create("dist")
    other.init(keys, [one for one, key in zip(values(9, 0), SHAPES, strict=True) if key in keys])
    other.load_optimizer_states(folder / "states")  # and with them the optimizer
    again, keys, outs = opened("sgd", 0)
    steps(again, keys, outs, 0, 2)
    again.load_optimizer_states(folder / "states")
    steps(again, keys, outs, 2, 4)
    assert digest(outs) == expected
    print(f"states done on {store.rank}")


def trainer(folder: Path, what: str, where: str) -> None:
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from kvdist import Trainer

    torch.manual_seed(3 if what == "train" else 4)
    net = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.Tanh(), torch.nn.Linear(30, 4))
    store = kv.create("dist")
    made = Trainer(
        net.named_parameters(), "adam", {"learning_rate": 0.05}, kvstore=store, update_on_kvstore=where == "there"
    )
    random = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(90, 20, generator=random), torch.randint(4, (90,), generator=random))
    sampler = SplitSampler(len(data), store.num_workers, store.rank, seed=1)
    loader = DataLoader(data, 5, sampler=sampler)
    epoch = 0
    if what == "resume":
        checkpoint = made.load_checkpoint(folder)
        epoch = checkpoint.state["epoch"]
        sampler.load_state_dict(checkpoint.state["sampler"])
    step = 0
    for number in range(epoch, 3):
        for batch, target in loader:
            net.zero_grad()
            torch.nn.functional.cross_entropy(net(batch), target).backward()
            made.step()
            step += 1
            if what == "train" and step == 13:
                state = {"epoch": number, "sampler": sampler.state_dict()}
                future = made.save_checkpoint(folder, step, state=state)
    if what == "train":
        future.result()
    made.save_states(folder / "states")
    made.load_states(folder / "states")
    print(f"trainer came to {digest([one.detach().numpy() for one in net.parameters()])} on {store.rank}")


def trainers(store: Any, where: str) -> Any:
    import torch

    from kvdist import Trainer

    weight = torch.nn.Parameter(torch.zeros(2000))
    made = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=where == "there")

    def step(made: Any) -> float:
        weight.grad = torch.ones(2000)
        made.step()
        return float(weight[0])

    return made, step


def unclosed(folder: Path, fifo: str) -> None:
    """Nobody closes the store: the interpreter's end waits for the checkpoint, which waits for worker 1."""
    store = kv.create("dist")
    store.init("a", np.zeros(3_000_000, np.float32))
    store.pushpull("a", np.ones(3_000_000, np.float32))
    if store.rank == 1:
        Path(fifo).read_bytes()  # until the test has read what worker 0 says
    future = store.save_checkpoint(folder, 1)
    if store.rank == 0:
        print(f"under way: {not future.done()}")


def elsewhere(folder: Path, where: str) -> None:
    """One worker does not find what it is to load: nobody does, and all go on together."""
    store = kv.create("dist")
    made, step = trainers(store, where)
    step(made)
    made.save_checkpoint(folder, 1).result()
    step(made)
    mine = folder if store.rank == 0 else folder / "nothing"
    try:
        made.load_checkpoint(mine)
        raise AssertionError("it was loaded")
    except NoCheckpoint:
        assert store.rank == 1
    except CheckpointError as error:
        assert store.rank == 0, error
        assert "worker" in str(error), error
    assert step(made) == -3.0
    made.load_checkpoint(folder)
    assert step(made) == -2.0
    print(f"elsewhere done on {store.rank}")


def mistaken(folder: Path, where: str) -> None:
    """One worker's arguments are wrong: that checkpoint fails on all, the next one does not."""
    store = kv.create("dist")
    made, step = trainers(store, where)
    step(made)
    try:
        made.save_checkpoint(folder, 1, state={} if store.rank == 0 else {1: 2}).result()
        raise AssertionError("it was written")
    except TypeError as error:
        assert store.rank == 1 and "not text" in str(error)
    except CheckpointError as error:
        assert store.rank == 0 and (where == "there" or "worker-1 failed: the state of" in str(error)), error
    assert made.save_checkpoint(folder, 2).result().name == "step-2"
    print(f"mistaken done on {store.rank}")


def fewer(folder: Path, where: str) -> None:
    """Rank 0 has left: the others save without it."""
    with kv.create("dist") as store:
        made, step = trainers(store, where)
        step(made)
        if store.rank == 0:
            print("fewer done on 0")
            return
        step(made)
        step(made)  # rank 0 is gone for certain: nobody waits for it
        made.save_checkpoint(folder, 3, state={"rank": store.rank}).result()
        checkpoint = made.load_checkpoint(folder)
        assert sorted(checkpoint.states) == [1, 2], checkpoint
        assert checkpoint.state == {"rank": store.rank}
        print(f"fewer done on {store.rank}")


def broken(folder: Path) -> None:
    """An exception leaves the block of a store while a checkpoint waits for another worker, which hears of it."""
    try:
        with kv.create("dist") as store:
            store.init("a", np.zeros(10, np.float32))
            if store.rank == 0:
                store.save_checkpoint(folder, 1)
                raise ZeroDivisionError("of the user")
            store.pushpull("a", np.ones(10, np.float32))
    except ZeroDivisionError:
        print("broken done on 0")
    except PeerLostError as error:
        print("broken done on 1:", error.cause)


if __name__ == "__main__":
    scenario, folder, *more = sys.argv[1:]
    globals()[scenario](Path(folder), *more)
    sys.stdout.flush()
