"""A `LightningModule` is trained by servers and goes on from Lightning's own checkpoint, bit for bit.

    kvdist-launch -n 2 -s 2 python examples/lightning_fit.py 1    # one epoch, saved in last.ckpt
    kvdist-launch -n 2 -s 2 python examples/lightning_fit.py 2    # the second epoch

Needs `pip install lightning`. Each worker's ``lightning.Trainer`` has one device and knows of no other worker.
"""

import os
import sys

import lightning
import torch

from kvdist import Trainer, kv


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 1)

    def training_step(self, batch, number):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        adamw = torch.optim.AdamW(self.parameters(), lr=0.05)
        optimizer = Trainer(self.parameters(), adamw, kvstore=store, clip_norm=1.0).as_torch_optimizer()
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)]


store = kv.create("dist")
torch.manual_seed(0)
examples = torch.randn(40, 6)[store.rank :: store.num_workers]
loop = lightning.Trainer(
    max_epochs=int(sys.argv[1]), accelerator="cpu", devices=1, logger=False, enable_checkpointing=False
)
loop.fit(
    Regression(),
    torch.utils.data.DataLoader(examples, batch_size=4),
    ckpt_path="last.ckpt" if os.path.exists("last.ckpt") else None,
)
if store.rank == 0:
    loop.save_checkpoint("last.ckpt")
store.close()
