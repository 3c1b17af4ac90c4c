"""Everything that stores say to each other, with sums of integers: ``exact.py DIRECTORY [ROUNDS] [FIFO]``.

Each worker checks every value that it reads, so a push that is lost, or counted twice, is seen by all.
"""

import shutil
import sys
from pathlib import Path

import numpy as np
from patient import COMMAND

from kvdist import CheckpointError, RowSparse, kv

SHAPES = {"small": (3,), "alone": (65, 256), "cut": (100, 200)}
"""In a message with others, in one of its own, and on all servers, with `KVDIST_BIGARRAY_BOUND=20000`."""
TABLE = (40, 8)


def full(value):
    return [np.full(shape, value, np.float32) for shape in SHAPES.values()]


def require(found, value, *what):
    assert all((array == value).all() for array in found), (*what, [array.flat[0] for array in found], value)


def load_damaged(store, directory):
    """Of a checkpoint of which one server cannot read its part nothing is taken."""
    damaged = directory.with_name("damaged")
    if store.rank == 0:
        shutil.copytree(directory, damaged)
        path = max(damaged.glob("step-1/server-*.safetensors"))
        path.write_bytes(path.read_bytes()[:-1])
    store.barrier()
    try:
        store.load_checkpoint(damaged)
    except CheckpointError:
        return
    raise AssertionError(f"{damaged} was loaded")


def main(directory, rounds="4", fifo=""):
    store = kv.create("dist")
    n = store.num_workers
    each_round = n * (n + 1) // 2
    store.init(list(SHAPES), full(5))
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init("table", RowSparse(np.arange(TABLE[0]), np.full(TABLE, 3, np.float32)))
    store.send_command_to_servers(COMMAND, "x")
    out, counted = full(0), 0
    for number in range(int(rounds)):
        store.pushpull(list(SHAPES), full(store.rank + 1), out=out)
        counted += each_round
        require(out, 5 - counted, "pushpull", number)
        store.push(list(SHAPES), full(store.rank + 1))
        counted += each_round
        store.pull(list(SHAPES), out=out)
        require(out, 5 - counted, "pull", number)
        rows = np.array([number, 20 + number])
        store.push("table", RowSparse(rows, np.full((2, TABLE[1]), store.rank + 1, np.float32), TABLE))
        found = store.row_sparse_pull("table", row_ids=rows).to_dense()[rows]
        require([found], 3 - each_round, "rows", number)
    if fifo:
        print("half", flush=True)
        if store.rank == 0:
            with open(fifo, "rb") as words:
                words.read()
    packed = kv.create("dist")
    packed.set_gradient_compression({"type": "2bit", "threshold": 1.0})
    packed.init("packed", np.zeros(5_000, np.float32))
    packed.pushpull("packed", ones := np.ones(5_000, np.float32))
    require([ones], n, "packed")
    packed.close()
    store.barrier()
    if store.rank == 0:
        store.replace_optimizer_states(list(SHAPES), store.optimizer_states(list(SHAPES)))
    if directory:
        store.save_checkpoint(directory, 1).result()
        load_damaged(store, Path(directory))
        store.pushpull("small", np.ones(3, np.float32), out=out[0])
        store.load_checkpoint(directory)
        store.pull("small", out=out[0])
        require(out[:1], 5 - counted, "loaded")
    store.broadcast(list(SHAPES), full(7 if store.rank == 0 else 0), out)
    require(out, 7, "broadcast")
    store.close()
    print("exact", flush=True)


main(*sys.argv[1:])
