"""A worker that trains under a policy; the gradient of rank r is minus one at element r.

    python policies.py POLICY VICTIM STEPS [UNTIL]

The victim kills itself in its fifth step. The others are not equally fast, and make STEPS steps each; with UNTIL more,
until the element of the victim is that large: by its next process.
"""

import os
import signal
import sys
import threading
import time

import torch

from kvdist import Trainer, kv

POLICY, VICTIM, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
UNTIL = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
LIFE = int(os.environ.get("KVDIST_RESTARTS", "0"))


def made_by_victim(store, weight):
    """Its element of the weights; of those of the servers where its own steps are in its own weights."""
    return float((store.pull(0) if store.rank == VICTIM else weight)[VICTIM])


def main():
    with kv.create("dist", policy=POLICY) as store:
        weight = torch.nn.Parameter(torch.zeros(store.num_workers, dtype=torch.float64))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        step = 0
        while step < STEPS or (UNTIL and made_by_victim(store, weight) < UNTIL):
            if store.rank == VICTIM and step == 4 and not LIFE:
                threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(0.002 + 0.003 * store.rank)
            weight.grad = torch.zeros_like(weight)
            weight.grad[store.rank] = -1.0
            trainer.step(samples=1)
            step += 1
        trainer.exchange()
        store.barrier()
        final = store.pull(0).tolist()
        print(f"ended with {final}, version {trainer.version}, dropped {trainer.samples_dropped}", flush=True)


if __name__ == "__main__":
    main()
