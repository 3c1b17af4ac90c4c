"""Workers of one host that push together: what this is about is said by the first argument."""

from __future__ import annotations

import sys

import numpy as np

import kvdist
from kvdist import kv

SIZES = {"large": 300_001, "small": 7, "one": 1, "empty": 0, "wide": 70_000}
ROUNDS = 6


def gradient(name: str, rank: int, turn: int) -> np.ndarray:
    return (np.arange(SIZES[name]) % 5 + rank + 10 * turn).astype(np.float32)


def mixed(store: kv.KVStore) -> None:
    """Every worker in an order and in groups of its own, some push only, some push and pull, one has no gradient."""
    generator = np.random.default_rng(store.rank)
    names = list(SIZES)
    store.init(names, [np.zeros(SIZES[name], np.float32) for name in names])
    for turn in range(ROUNDS):
        order = [names[i] for i in generator.permutation(len(names))]
        asked = []
        while order:
            count = int(generator.integers(1, len(order) + 1))
            group, order = order[:count], order[count:]
            grads = [None if is_absent(name, store.rank, turn) else gradient(name, store.rank, turn) for name in group]
            if generator.random() < 0.5 and not any(grad is None for grad in grads):
                outs = [np.empty(SIZES[name], np.float32) for name in group]
                asked.append((group, outs, store.pushpull_async(group, grads, outs)))
            else:
                store.push(group, grads)
                asked.append((group, None, store.pull_async(group)))
        # Others wait for other groups first, so nobody waits before it has pushed everything.
        for group, outs, future in asked:
            found = future.result()
            check(group, found if outs is None else outs, turn, store.num_workers)


def is_absent(name: str, rank: int, turn: int) -> bool:
    return name == "wide" and turn % 2 == 1 and rank == turn % 3


def check(names: list[str], found: list[np.ndarray], turn: int, workers: int) -> None:
    for name, array in zip(names, found, strict=True):
        present = [rank for rank in range(workers) if not is_absent(name, rank, turn)]
        wanted = np.sum([gradient(name, rank, turn) for rank in present], axis=0, dtype=np.float32)
        assert np.array_equal(array, wanted), f"{name} in turn {turn}: {array} is not {wanted}"


def disagree(store: kv.KVStore) -> None:
    store.init("w", np.zeros(5, np.float32))
    store.set_optimizer("sgd", learning_rate=0.5)
    if store.rank == 1:
        store.set_optimizer("sgd", learning_rate=0.25)
    try:
        store.pushpull("w", np.ones(5, np.float32))
    except kvdist.OptimizerMismatch as error:
        print(f"mismatch: {error}", flush=True)


def leader_first(store: kv.KVStore) -> None:
    """Worker 0 leaves after three rounds, with a push that nobody has waited for; the others go on."""
    store.init("w", np.zeros(SIZES["large"], np.float32))
    out = np.empty(SIZES["large"], np.float32)
    for turn in range(3):
        store.pushpull("w", gradient("large", store.rank, turn), out)
    store.push("w", gradient("large", store.rank, 3))
    if store.rank == 0:
        return
    workers = store.num_workers
    for turn in range(3, 8):
        first = 0 if turn == 3 else 1
        if turn > 3:
            store.push("w", gradient("large", store.rank, turn))
        wanted = np.sum([gradient("large", rank, turn) for rank in range(first, workers)], axis=0, dtype=np.float32)
        assert np.array_equal(store.pull("w"), wanted), f"turn {turn}"


def traffic(store: kv.KVStore) -> None:
    """Ten rounds of one large key."""
    store.init("w", np.zeros(SIZES["large"], np.float32))
    out = np.empty(SIZES["large"], np.float32)
    for turn in range(10):
        store.pushpull("w", gradient("large", store.rank, turn), out)
        check(["large"], [out], turn, store.num_workers)


def main() -> None:
    store = kv.create("dist")
    {"mixed": mixed, "disagree": disagree, "leader_first": leader_first, "traffic": traffic}[sys.argv[1]](store)
    worker = store._backend._cluster.node.machine
    leads = worker.aggregation is not None and worker.aggregation.leads
    print(f"done on {store.rank}: leads {leads}, summed {worker.traffic.summed > 0}", flush=True)
    store.close()


if __name__ == "__main__":
    main()
