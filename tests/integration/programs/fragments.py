"""Workers that exchange fragments by turns, of whom some are killed: ``fragments.py RANK:STEP…``.

All together use each of 600 examples twice. A killed worker has pushed one fragment further than another.
"""

import os
import signal
import sys

import torch
from torch.utils.data import DataLoader

from kvdist import QueueSampler, Trainer, kv

DEATHS = {int(rank): int(step) for rank, step in (word.split(":") for word in sys.argv[1:])}

with kv.create("dist") as store:
    parameters = [(f"p{i}", torch.nn.Parameter(torch.zeros(600))) for i in range(2)]
    trainer = Trainer(parameters, "sgd", {"learning_rate": 1.0}, kvstore=store)
    batches = trainer.batches(DataLoader(range(600), 8, sampler=QueueSampler(600, epochs=2)))
    for steps, places in enumerate(batches, 1):
        for _, parameter in parameters:
            parameter.grad = None
        sum(-parameter[places].mean() for _, parameter in parameters).backward()
        if steps == DEATHS.get(store.rank) and not os.environ.get("KVDIST_RESTARTS"):
            os.kill(os.getpid(), signal.SIGKILL)
        trainer.step()
    trainer.exchange()
    print("samples_seen", trainer.samples_seen, flush=True)
