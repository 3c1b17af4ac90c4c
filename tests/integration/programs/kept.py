"""Workers whose checkpoints and snapshots are kept as test data: ``kept.py write|snapshot|read FOLDER``.

`write` makes FOLDER/dense and FOLDER/rows at step 5, goes on for three steps, and leaves in FOLDER/values.npz the
weights of both moments. `snapshot` trains until servers have written one into FOLDER. `read` loads both checkpoints,
makes the same three steps and compares the bits; and it loads FOLDER/snapshot, and compares with as many steps.
"""

import sys
import time
from pathlib import Path

import numpy as np

from kvdist import LazyRows, RowSparse, kv

DENSE = {"large": (1_100, "float32"), "half": (7, "float16")}
"""Keys of arrays, with sizes and dtypes; the first is cut into slices."""
TABLES = {"rows": (20, 4), "lazy": (1_000, 4)}
SAVED, MORE = 5, 3
FOLDER = Path(sys.argv[2])


def dense_store():
    store = kv.create("dist")
    store.set_optimizer("adam", learning_rate=0.25, multi_precision=True)
    store.init(list(DENSE), [np.zeros(size, dtype) for size, dtype in DENSE.values()])
    return store


def step_dense(store, step):
    for key, (size, dtype) in DENSE.items():
        gradient = (((7 * np.arange(size) + 3 * step + store.rank) % 11 - 5) / 8).astype(
            dtype
        )  # exact on every machine
        store.pushpull(key, gradient, out=np.empty(size, dtype))


def rows_store():
    store = kv.create("dist")
    store.set_optimizer("adagrad", learning_rate=0.5)
    store.init("rows", RowSparse(np.arange(20), np.ones(TABLES["rows"], np.float32)))
    store.init("lazy", LazyRows(TABLES["lazy"], "float32", "uniform(0.1,seed=3)"))
    return store


def step_rows(store, step):
    for key, shape in TABLES.items():
        ids = np.array([step % shape[0], (3 * step + store.rank) % shape[0]])
        store.push(key, RowSparse(ids, np.full((2, shape[1]), 1.0 + store.rank, np.float32), shape))


def weights(dense, rows):
    found = dict(zip(DENSE, dense.pull(list(DENSE)), strict=True))
    return found | {key: rows.pull(key, ignore_sparse=False).values for key in TABLES}


def moments():
    """The weights when the checkpoints are made, or loaded, and three steps later."""
    dense, rows = dense_store(), rows_store()
    if sys.argv[1] == "read":
        for store, name in ((dense, "dense"), (rows, "rows")):
            loaded = store.load_checkpoint(FOLDER / name)
            assert (loaded.step, loaded.state) == (SAVED, {"rank": store.rank}), loaded
    else:
        for step in range(SAVED):
            step_dense(dense, step)
            step_rows(rows, step)
        for store, name in ((dense, "dense"), (rows, "rows")):
            store.save_checkpoint(FOLDER / name, SAVED, state={"rank": store.rank}).result()
    found = {f"saved {key}": value for key, value in weights(dense, rows).items()}
    for step in range(SAVED, SAVED + MORE):
        step_dense(dense, step)
        step_rows(rows, step)
    found |= {f"later {key}": value for key, value in weights(dense, rows).items()}
    return dense.rank, found


def take_snapshot():
    store, step = dense_store(), 0
    while not any(FOLDER.glob("step-*/manifest.json")):
        step_dense(store, step)
        step += 1
        time.sleep(0.02)
        assert step < 3_000, "no snapshot in a minute"


def compare_snapshot():
    trained, loaded = dense_store(), dense_store()
    step = loaded.load_checkpoint(FOLDER / "snapshot").step
    for done in range(step):
        step_dense(trained, done)
    for key, first, second in zip(DENSE, trained.pull(list(DENSE)), loaded.pull(list(DENSE)), strict=True):
        assert first.tobytes() == second.tobytes(), key
    print(f"the same weights after {step} steps", flush=True)


def main():
    if sys.argv[1] == "snapshot":
        take_snapshot()
        return
    rank, found = moments()
    if sys.argv[1] == "write":
        if rank == 0:
            np.savez_compressed(FOLDER / "values.npz", **found)
        return
    with np.load(FOLDER / "values.npz") as values:
        different = [name for name in values if values[name].tobytes() != found[name].tobytes()]
    assert not different, different
    print(f"the same {len(found)} arrays", flush=True)
    compare_snapshot()


if __name__ == "__main__":
    main()
