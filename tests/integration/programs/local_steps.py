"""Workers that exchange fragments by turns; the last one dies in the middle of a period: ``local_steps.py DEAD_AT``.

It is started again, and joins. At the end all say a digest of the weights, which must be the same.
"""

import hashlib
import os
import signal
import sys
import time

import torch

from kvdist import Trainer, kv

STEPS = 240


def main():
    life, dead_at = int(os.environ.get("KVDIST_RESTARTS", "0")), int(sys.argv[1])
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(6, 50), torch.nn.Tanh(), torch.nn.Linear(50, 6))
    store = kv.create("dist")
    trainer = Trainer(net.parameters(), torch.optim.Adam(net.parameters(), 0.01), kvstore=store)
    begun = trainer.version
    is_last = store.rank == store.num_workers - 1
    if life:
        print(f"joined at version {begun}", flush=True)
    for step in range(begun, STEPS):
        if is_last and not life and step == dead_at:
            os.kill(os.getpid(), signal.SIGKILL)
        inputs = torch.randn(16, 6, generator=torch.Generator().manual_seed(1000 * store.rank + step))
        net.zero_grad()
        (net(inputs) - inputs).square().mean().backward()
        trainer.step()
        time.sleep(0.02)
    trainer.exchange()
    digest = hashlib.sha256()
    for weight in net.parameters():
        digest.update(weight.detach().numpy().tobytes())
    print(f"worker {store.rank}: {STEPS} steps, version {trainer.version}, weights {digest.hexdigest()}", flush=True)
    store.close()


main()
