"""Workers that make steps of their own, and go on from a checkpoint that other workers have saved: ``FOLDER``."""

import sys
from pathlib import Path

import torch

from kvdist import NoCheckpoint, Trainer, kv

store = kv.create("dist", policy="local_sgd:2")
weight = torch.nn.Parameter(torch.ones(3))
trainer = Trainer([weight], torch.optim.Adam([weight], 0.1), kvstore=store)
try:
    trainer.load_checkpoint(sys.argv[1])
except NoCheckpoint:
    print("begins", flush=True)
state = trainer.as_torch_optimizer().state_dict()["state"]
print(f"worker {store.rank} has {len(state)} moments at version {trainer.version}", flush=True)
for _ in range(3):
    weight.grad = torch.full((3,), 1.0 + store.rank)
    trainer.step()
trainer.save_checkpoint(sys.argv[1], trainer.version, keep=1).result()
store.barrier()
if store.rank == 0:
    print("files", *sorted(path.name[:16] for path in Path(sys.argv[1]).glob("step-*/worker-*")), flush=True)
store.close()
