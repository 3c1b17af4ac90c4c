"""A worker that trains under a policy; the gradient of rank r is minus one at element r.

    python policies.py POLICY VICTIM STEPS

The victim kills itself in its fifth step. The others are not equally fast, and make STEPS steps each.
"""

import os
import signal
import sys
import threading
import time

import torch

from kvdist import Trainer, kv

POLICY, VICTIM, STEPS = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])


def main():
    with kv.create("dist", policy=POLICY) as store:
        weight = torch.nn.Parameter(torch.zeros(store.num_workers, dtype=torch.float64))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        for step in range(STEPS):
            if store.rank == VICTIM and step == 4:
                threading.Timer(0.005, os.kill, (os.getpid(), signal.SIGKILL)).start()
            time.sleep(0.002 + 0.003 * store.rank)
            weight.grad = torch.zeros_like(weight)
            weight.grad[store.rank] = -1.0
            trainer.step(samples=1)
        trainer.exchange()
        store.barrier()
        final = store.pull(0).tolist()
        print(f"ended with {final}, version {trainer.version}, dropped {trainer.samples_dropped}", flush=True)


if __name__ == "__main__":
    main()
