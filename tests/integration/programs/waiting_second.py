"""A second model is declared when a worker was killed and is back: ``waiting_second.py FOLDER STEP LIVES``.

Worker 1 kills itself before the first step in each of its first LIVES lives. The others wait until it takes part again,
and all declare the second model before step STEP. The end says the weights of both.
"""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch

from kvdist import Trainer, kv
from kvdist.optimizer import SGD

STEPS = 6


def main():
    folder, first, lives = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    life = int(os.environ.get("KVDIST_RESTARTS", "0"))
    store, second = kv.create("dist"), kv.create("dist")
    store.barrier()
    if store.rank == 1 and life < lives:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.manual_seed(7)
    net = torch.nn.Linear(3, 3)
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.05}, kvstore=store)
    trainer.broadcast_parameters()
    version = trainer.version
    if store.rank == 1:
        (folder / "takes part").touch()
    while not (folder / "takes part").exists():
        time.sleep(0.01)
    found = np.zeros(3, np.float32)
    for step in range(version, STEPS):
        if step == first:
            second.set_optimizer(SGD(learning_rate=1.0))
            second.init("second", np.zeros(3, np.float32))
        loss = net(torch.full((2, 3), float(step + store.rank))).square().mean()
        net.zero_grad()
        loss.backward()
        trainer.step()
        if step >= first:
            second.pushpull("second", np.full(3, (step + 1) * 10.0**store.rank, np.float32), out=found)
    weights = [parameter.detach().numpy().tobytes().hex() for parameter in net.parameters()]
    print(f"weights {weights} and {found.tolist()}", flush=True)
    second.close()
    store.close()


main()
