"""Tables of rows on real clusters, one scenario a function: ``rows.py SCENARIO [ARGUMENT…]``.

`known` are the mirrored system's own tests of row-sparse values: shapes, keys and expected numbers are theirs. Every
worker checks by itself.
"""

import os
import sys

import numpy as np
from ticking import start_ticking

from kvdist import KvdistError, LazyRows, PeerLostError, RowSparse, kv

SMALL, BIG = (2, 3), (1200, 1200)
RATE = 2
ROUNDS = 7


def say(text):
    print(text, flush=True)


def whole(shape, value, dtype=np.float32):
    """All rows of a table."""
    return RowSparse(np.arange(shape[0]), np.full(shape, value, dtype))


def some(ids, value, shape, dtype=np.float32):
    """Some rows of a table, all of one value."""
    return RowSparse(ids, np.full((len(ids), *shape[1:]), value, dtype), shape)


def require(found, wanted, *what):
    assert found.shape == wanted.shape and (found == wanted).all(), (*what, found, wanted)


# The known numbers.


def known(store, multi_precision):
    """Pushes of some rows, of none, and of many, in both floating types."""
    store.set_optimizer("test", rescale_grad=RATE, multi_precision=multi_precision == "on")
    singles, halves = {"9": SMALL, "11": SMALL, "97": BIG}, {"10": SMALL, "12": SMALL, "98": BIG}
    values = {key: whole(shape, 1) for key, shape in singles.items()}
    values |= {key: whole(shape, 1, np.float16) for key, shape in halves.items()}
    store.init(list(values), list(values.values()))
    for key, dtype in (("9", np.float32), ("10", np.float16)):
        one_row(store, key, dtype)
    for key in ("11", "97", "12", "98"):
        no_rows(store, key)
    for key, dtype in (("97", np.float32), ("98", np.float16)):
        many_rows(store, key, dtype)


def one_row(store, key, dtype):
    """Each worker pushes the row of its rank modulo 2, and pulls rows at random, with repetitions."""
    rank, generator = store.rank, np.random.default_rng(store.rank)
    for i in range(ROUNDS):
        dense = np.zeros(SMALL, dtype)
        dense[rank % 2] = rank + 1
        store.push(key, RowSparse.from_dense(dense))
        ids = generator.integers(0, 2, (1, 2))
        out = RowSparse.zeros(SMALL, dtype)
        store.row_sparse_pull(key, out=out, row_ids=ids)
        wanted = np.zeros(SMALL, dtype)
        for row in ids.reshape(-1):
            wanted[row] = 1 + sum((r + 1) * RATE * (i + 1) for r in range(store.num_workers) if r % 2 == row)
        require(out.to_dense(), wanted, key, i)


def no_rows(store, key):
    """Gradients without rows are rounds that change nothing; a pull of no rows brings none."""
    out = store.row_sparse_pull(key, row_ids=np.zeros(0, np.int64))
    shape, dtype = out.shape, out.values.dtype
    for _ in range(2):
        store.push(key, RowSparse.zeros(shape, dtype))
        store.row_sparse_pull(key, out=out, row_ids=np.arange(shape[0]))
        require(out.to_dense(), np.ones(shape, dtype), key)
    store.row_sparse_pull(key, out=out, row_ids=[])
    require(out.to_dense(), np.zeros(shape, dtype), key)


def many_rows(store, key, dtype):
    """Three tenths of the rows are candidates, of which worker r updates each 2(r+1)-th."""
    candidates = np.flatnonzero(np.random.default_rng(123).random(BIG[0]) < 0.3)
    generator = np.random.default_rng(store.rank)
    for i in range(ROUNDS):
        total = np.ones(BIG[0])
        for rank in range(store.num_workers):
            total[candidates[:: 2 * (rank + 1)]] += (rank + 1) * RATE * (i + 1)
        store.push(key, some(candidates[:: 2 * (store.rank + 1)], store.rank + 1, BIG, dtype))
        ids = generator.integers(0, BIG[0], BIG[0])
        out = RowSparse.zeros(BIG, dtype)
        store.row_sparse_pull(key, out=out, row_ids=ids)
        wanted = np.zeros(BIG, dtype)
        wanted[ids] = total[ids][:, None]
        require(out.to_dense(), wanted, key, i)


# Beside arrays, large ones, many of them.


def beside(store):
    """Tables and arrays in the same calls, with none, some and repeated rows, waiting and not; three lazy tables."""
    n, rank = store.num_workers, store.rank
    store.set_optimizer("test")
    arrays = {f"w{i}": np.zeros((7, 5 + 4000 * i), np.float32) for i in range(4)}
    store.init(list(arrays), list(arrays.values()))
    shape = (1 << 30, 5)
    tables = [f"t{i}" for i in range(3)]
    store.init(tables, [LazyRows(shape, "float32", "constant(1)") for _ in tables])
    ids = np.array([3, 1 << 29, (1 << 30) - 1, 3, 77])
    wanted = {3: 1.0, 77: 1.0, 1 << 29: 1.0, (1 << 30) - 1: 1.0}
    for i in range(1, 6):
        rows = some(ids, rank + i, shape)
        futures = [store.push_async(tables[0], rows)]
        store.push([tables[1], *arrays, tables[2]], [rows, *(np.full_like(a, rank) for a in arrays.values()), None])
        futures.append(store.row_sparse_pull_async(tables[0], row_ids=ids))
        for row in wanted:
            wanted[row] += sum((r + i) * (2 if row == 3 else 1) for r in range(n))
        for table in tables[:2]:
            found = store.row_sparse_pull(table, row_ids=ids)
            assert found.values[:, 0].tolist() == [wanted[row] for row in found.indices.tolist()], (table, i, found)
        assert [future.result() is None for future in futures] == [True, False]
        require(futures[1].result().values[:, 4], np.array(list(map(wanted.get, sorted(wanted))), np.float32), i)
        untouched = store.row_sparse_pull(tables[2], row_ids=ids).values
        assert (untouched == 1).all(), untouched
        for key, array in zip(arrays, store.pull(list(arrays)), strict=True):
            assert (array == i * n * (n - 1) // 2).all(), key


def large(store):
    """Every worker pushes more at once than a message may have, and pulls it again."""
    shape = (140_001, 129)
    assert shape[0] * shape[1] * 4 > 64 << 20
    store.init("t", RowSparse.zeros(shape))
    ids = np.arange(shape[0])
    for turn in range(2):
        values = np.repeat(((ids + store.rank + turn) % 1000)[:, None], shape[1], axis=1).astype(np.float32)
        future = store.push_async("t", RowSparse(ids, values, shape))
        if turn:
            future.result()
        wanted = sum((ids + rank + turn) % 1000 for rank in range(store.num_workers))
        out = store.row_sparse_pull("t", row_ids=ids)
        assert (out.values == wanted[:, None]).all(), turn
        store.barrier()


def reused(store):
    """Arrays are filled with something else as soon as `push` returns, from several threads, each with its table."""
    import threading

    shape, n = (5000, 33), store.num_workers
    names = [f"t{i}" for i in range(3)]
    store.set_optimizer("test")
    store.init(names, [RowSparse.zeros(shape) for _ in names])
    errors = []

    def work(position):
        try:
            ids = np.arange(position, shape[0], 3)
            values = np.empty((len(ids), shape[1]), np.float32)
            rows = RowSparse(ids, values, shape)
            for turn in range(30):
                values[...] = turn + store.rank + position
                store.push(names[position], rows)
                values[...] = np.nan
            found = store.row_sparse_pull(names[position], row_ids=ids).values
            wanted = sum(turn + rank + position for turn in range(30) for rank in range(n))
            assert (found == wanted).all(), (position, found, wanted)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def leaves(store):
    """Worker 1 pushes a large table and leaves at once; the others go on without it."""
    shape = (30_000, 100)
    store.set_optimizer("test")
    store.init("t", RowSparse.zeros(shape))
    store.push("t", whole(shape, store.rank + 1))
    if store.rank != 1:
        n = store.num_workers
        total = n * (n + 1) // 2
        assert (store.row_sparse_pull("t", row_ids=np.arange(shape[0])).values == total).all()
        store.push("t", some([5], 1, shape))
        assert store.row_sparse_pull("t", row_ids=[5]).values[0, 0] == total + n - 1


# What goes wrong.


def endless(store):
    """Rows go to and fro until somebody dies."""
    shape = (50_000, 50)
    store.set_optimizer("test")
    store.init("t", RowSparse.zeros(shape))
    rows = whole(shape, 1)
    start_ticking()
    say(f"going, pid {os.getpid()}")
    try:
        while True:
            store.push("t", rows)
            store.row_sparse_pull("t", row_ids=np.arange(0, shape[0], 2))
    except PeerLostError as error:
        say(f"lost {error.node!r}")
        raise


def attempt(call):
    """Print what a call raises."""
    try:
        call()
    except (KvdistError, ValueError, TypeError) as error:
        say(f"{type(error).__name__}: {error}")
    else:
        say("nothing was raised")


def mistakes(store):
    """Wrong calls raise before anything is sent."""
    shape = (6, 2)
    store.set_optimizer("test")
    store.init("t", whole(shape, 1))
    store.init("w", np.ones(3, np.float32))
    ones = np.ones((1, 2), np.float32)
    attempt(lambda: RowSparse([6], ones, shape))
    attempt(lambda: RowSparse([-1], ones, shape))
    attempt(lambda: RowSparse([1.0], ones, shape))
    attempt(lambda: RowSparse([1, 2], ones, shape))
    attempt(lambda: store.push("t", some([1], 1, (7, 2))))
    attempt(lambda: store.push("t", some([1], 1, (6, 3))))
    attempt(lambda: store.push(["w", "t"], [np.ones(3, np.float32), some([1], 1, (7, 2))]))
    attempt(lambda: store.push(["t", "w"], [some([1], 1, shape), np.ones(4, np.float32)]))
    attempt(lambda: store.row_sparse_pull("t", row_ids=[6]))
    attempt(lambda: store.row_sparse_pull("t", row_ids=[-1]))
    attempt(lambda: store.row_sparse_pull("t", row_ids=[0.5]))
    attempt(lambda: store.row_sparse_pull(["t", "t"], out=RowSparse.zeros(shape), row_ids=[[1], [2]]))
    attempt(lambda: store.init("t", whole((7, 2), 1)))
    attempt(lambda: store.init("huge", LazyRows((1 << 40, 8))))
    store.push("t", some([1], 1, shape))
    rows = store.row_sparse_pull("t", row_ids=range(6))
    assert rows.values[:, 0].tolist() == [1, 1 + store.num_workers, 1, 1, 1, 1], rows.values
    assert (store.pull("w") == 1).all(), "nothing of a call that raises is pushed"
    say("works")


def mismatches(store):
    """Worker 1 declares another shape; another type; an array; other first values. Everybody is told."""
    odd = store.rank == 1
    attempt(lambda: store.init("a", whole((5 if odd else 6, 2), 1)))
    attempt(lambda: store.init("b", whole((6, 2), 1, np.float16 if odd else np.float32)))
    attempt(lambda: store.init("c", np.ones((6, 2), np.float32) if odd else whole((6, 2), 1)))
    attempt(lambda: store.init("d", LazyRows((6, 2), initializer=f"constant({int(odd)})")))
    attempt(lambda: store.init("e", LazyRows((6, 2)) if odd else whole((6, 2), 1)))
    store.init("t", whole((6, 2), 1))
    store.push("t", some([1], 1, (6, 2)))
    assert store.row_sparse_pull("t", row_ids=[0, 1]).values[:, 0].tolist() == [0, store.num_workers]
    say("works")


if __name__ == "__main__":
    with kv.create(os.environ.get("STORE", "dist_sync")) as used:
        globals()[sys.argv[1]](used, *sys.argv[2:])
        print(f"checked on {used.rank} of {used.num_workers}", flush=True)
