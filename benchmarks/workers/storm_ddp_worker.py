"""The training of `storm_worker.py` on DDP with gloo: torchrun starts all ranks again, and they go on at a checkpoint.

torchrun --nproc_per_node 16 --max-restarts 1000 storm_ddp_worker.py FOLDER STEPS PERIOD_S CHECKPOINT_EVERY TIMEOUT_S
"""

import time

BEGAN = time.monotonic()

import datetime  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sklearn.datasets import load_digits  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

IMPORTED = time.monotonic()
BATCH, LEARNING_RATE = 16, 0.3


def main() -> None:
    folder, steps, period_s = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    every, timeout_s = int(sys.argv[4]), float(sys.argv[5])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=timeout_s))
    rank, workers = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    is_test = torch.arange(len(images)) % 5 == 0
    train_images, train_labels = images[~is_test], labels[~is_test]
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    saved, step = folder / "checkpoint", 0
    if saved.exists():
        state = torch.load(saved)
        step = state["step"]
        net.load_state_dict(state["net"])
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    life = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with (folder / f"{rank}.{life}.{os.getpid()}").open("w", buffering=1) as log:
        print("began", BEGAN, file=log)
        print("imported", IMPORTED, file=log)
        while step < steps:
            due = time.monotonic() + period_s
            chance = torch.Generator().manual_seed(step * workers + rank)
            chosen = torch.randint(len(train_images), (BATCH,), generator=chance)
            optimizer.zero_grad()
            loss = cross_entropy(model(train_images[chosen]), train_labels[chosen])
            time.sleep(max(0.0, due - time.monotonic()))
            loss.backward()
            optimizer.step()
            step += 1
            print("step", time.monotonic(), BATCH, step, file=log)
            if rank == 0 and step % every == 0:
                torch.save({"step": step, "net": net.state_dict()}, folder / "new")
                (folder / "new").rename(saved)
    if rank == 0:
        with torch.no_grad():
            right = net(images[is_test]).argmax(dim=1) == labels[is_test]
        found = {"accuracy": float(right.float().mean()), "examples": steps * workers * BATCH}
        (folder / "end-0.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
