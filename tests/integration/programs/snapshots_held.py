"""Workers that wait between rounds of zeros and rounds that count: ``snapshots_held.py FOLDER``.

Rounds of zeros are made until FOLDER/snapshot is there; then all wait for FOLDER/go. Then each makes 100 steps, in
which rank r pushes 10⁶ʳ, so a weight says how many pushes of each worker are in it. A server that is killed while all
wait takes nothing with it but rounds of zeros, to whichever snapshot all go back.
"""

import sys
import time
from pathlib import Path

import numpy as np

from kvdist import RolledBackError, kv

STEPS = 100
KEYS = ["first", "second", "stop"]
"""On both servers; `stop` is above 0 once rank 0 has seen FOLDER/snapshot."""


def main():
    folder, store = Path(sys.argv[1]), kv.create("dist")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(KEYS, [np.zeros(3) for _ in KEYS])

    def exchange(push, stop=0.0):
        values = [np.full(3, -push), np.full(3, -push), np.full(3, -stop)]
        store.pushpull(KEYS, values)
        return values

    is_held = False
    while not is_held:
        time.sleep(0.01)
        *_, stop = exchange(0.0, float(store.rank == 0 and (folder / "snapshot").exists()))
        is_held = bool(stop[0] > 0)
    print("waits for go", flush=True)
    while not (folder / "go").exists():
        time.sleep(0.01)
    try:
        for _ in range(STEPS):
            exchange(0.0)
    except RolledBackError as error:
        print(f"is told of {error.step}", flush=True)
    for _ in range(STEPS):
        first, second, _ = exchange(10.0 ** (6 * store.rank))
    for key, value in (("first", first), ("second", second)):
        assert (value == value[0]).all(), value
        counts = [int(value[0]) // 10 ** (6 * rank) % 10**6 for rank in range(store.num_workers)]
        print(f"{key} ended with {counts}", flush=True)
    store.barrier()
    store.close()


if __name__ == "__main__":
    main()
