"""Workers that are killed again and again while the others wait for them: ``waiting.py KIND VICTIM LIVES``.

Gradients depend on the weights, the rank and the step alone. In each of its first LIVES lives the victim kills itself a
random time after a step has begun, or ends as ENDS says: by an exception in a `with`, or by an exit code. The end says
a digest of all weights.
"""

import hashlib
import os
import random
import signal
import sys
import threading
import time

import torch

from kvdist import Embedding, Trainer, kv

STEPS = 18
KILLED_AT = (3, 5, 9, 10, 12)
"""By life; who is further by then is killed in its first step."""
ROWS, WIDTH = 40, 8


def main():
    kind, victim, lives = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    life = int(os.environ.get("KVDIST_RESTARTS", "0"))
    store = kv.create("dist")
    if os.environ.get("ENDS") == "exception":
        with store:
            train(store, kind, victim, lives, life)
    else:
        train(store, kind, victim, lives, life)
        store.close()


def train(store, kind, victim, lives, life):
    samples = sum(16 + rank for rank in range(store.num_workers))
    torch.manual_seed(7)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 300), torch.nn.Tanh(), torch.nn.Linear(300, 300))
    numbers = {"learning_rate": 0.05, "lazy_update": True} | ({"momentum": 0.9} if kind in ("momentum", "rows") else {})
    trainer = Trainer(net.parameters(), "adam" if kind == "adam" else "sgd", numbers, kvstore=store)
    table = Embedding(ROWS, WIDTH, store, 1000, "normal(0.5,seed=3)") if kind == "rows" else None
    version = trainer.version
    if life:
        print(f"worker {store.rank} is back in life {life} at version {version}", flush=True)
    doomed = store.rank == victim and life < lives
    for step in range(version, STEPS):
        if doomed and step >= KILLED_AT[life] and os.environ.get("ENDS") == "exception":
            raise ValueError(f"bad luck in life {life}")
        if doomed and step >= KILLED_AT[life] and "ENDS" in os.environ:
            sys.exit(int(os.environ["ENDS"]))
        if doomed and step >= KILLED_AT[life]:
            moment = random.Random(f"{kind} {life}").uniform(0.0, 0.03)
            threading.Timer(moment, os.kill, (os.getpid(), signal.SIGKILL)).start()
            doomed = False
        generator = torch.Generator().manual_seed(1000 * store.rank + step)
        ids = torch.randint(ROWS, (16,), generator=generator)
        inputs = torch.randn(16, WIDTH, generator=generator)
        outputs = net(inputs if table is None else inputs * table(ids))
        loss = (outputs - torch.randn(16, 300, generator=generator)).square().mean()
        net.zero_grad()
        loss.backward()
        if "KVDIST_POLICY" not in os.environ:  # what is exchanged later counts later
            assert trainer.samples_seen == samples * step, (trainer.samples_seen, step)
        trainer.step(samples=16 + store.rank)
        if table is not None:
            table.step()
        time.sleep(0.01)
    assert trainer.samples_seen == samples * STEPS, trainer.samples_seen
    if store.rank == victim and life < lives:
        time.sleep(60)  # until the end that has been set
    digest = hashlib.sha256()
    for parameter in net.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    if table is not None:
        digest.update(table(torch.arange(ROWS)).detach().numpy().tobytes())
    print(f"weights {digest.hexdigest()}", flush=True)


main()
