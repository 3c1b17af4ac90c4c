"""One machine of the limping cluster: learns the digits at a given speed, with kvdist or with DDP.

    kvdist-launch -n 3 -s 2 --policy quota:128,local_steps python examples/limping/train.py --speeds 1 1 0.25
    torchrun --nproc_per_node 3 examples/limping/train.py --ddp --speeds 1 1 0.25

A batch of b takes (0.1 + 0.9 b / 32) / speed units, nearly all of it asleep, so that a laptop is enough for several
machines. `benchmarks/limping.py` starts this script in all its settings, kills a machine, and draws what comes out;
README.md here says how to read it. The lines of kvdist are in `with_kvdist`, those of DDP in `with_ddp`.
"""

import os
import sys
import time
from pathlib import Path


def wait_for_return(folder: Path) -> None:
    """A machine that was killed is started again at once, and is up when a file says so."""
    while int(os.environ.get("KVDIST_RESTARTS", "0")) and not (folder / "back").exists():
        time.sleep(0.05)


if "--folder" in sys.argv:  # before the imports, which a machine that comes back has still to do
    wait_for_return(Path(sys.argv[sys.argv.index("--folder") + 1]))

import argparse  # noqa: E402
import math  # noqa: E402
import random  # noqa: E402

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

TARGET, LOOKS, LOOK_EVERY = 0.97, 3, 150
STALL_CHANCE, STALL_UNITS = 0.05, 10.0
JITTER = 0.15


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ddp", action="store_true")
    parser.add_argument("--speeds", type=float, nargs="+", required=True, help="of the machines, by rank")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--unit", type=float, default=0.3, help="seconds of 32 examples at speed 1")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--spiky", action="store_true", help="machines stall at random")
    parser.add_argument("--folder", type=Path, default=None, help="where looks at the accuracy are noted")
    parser.add_argument("--data", type=Path, default=None, help="the digits in a file, for want of scikit-learn")
    parser.add_argument("--examples", type=int, default=0, help="end after so many; 0: at the target")
    parser.add_argument("--looker", type=int, default=1, help="the rank that looks at the accuracy")
    return parser.parse_args()


def digits(path: Path | None) -> tuple[torch.Tensor, ...]:
    """Inputs and targets to train on, and those of the quarter that is held out."""
    if path is not None:
        return tuple(torch.load(path))
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    inputs, targets = load_digits(return_X_y=True)
    parts = train_test_split(inputs / 16, targets, test_size=0.25, stratify=targets, random_state=0)
    train_x, test_x, train_y, test_y = (torch.tensor(part) for part in parts)
    return train_x.float(), train_y, test_x.float(), test_y


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    for layer in (net[0], net[2]):
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
    return net


class Machine:
    """Takes its time for a gradient, and notes from when to when it was busy."""

    def __init__(self, options: argparse.Namespace, number: int) -> None:
        self._options, self._speed = options, options.speeds[number]
        self._chance = random.Random(f"{options.seed} {number} {os.environ.get('KVDIST_RESTARTS', '0')}")
        self._began = self._due = 0.0
        self._log = None if options.folder is None else (options.folder / f"busy-{number}").open("a", buffering=1)

    def begin(self, batch: int) -> None:
        chance, cost = self._chance, 0.1 + 0.9 * batch / 32
        units = cost / self._speed * math.exp(chance.gauss(0, JITTER))
        if self._options.spiky and chance.random() < STALL_CHANCE * cost:
            units += chance.expovariate(1 / STALL_UNITS)
        self._began = time.monotonic()
        self._due = self._began + units * self._options.unit

    def end(self) -> None:
        now = time.monotonic()
        time.sleep(max(0.0, self._due - now))
        if self._log is not None:
            print(self._began, max(self._due, now), file=self._log)


class Looks:
    """Averages the weights, exponentially over half an epoch, and looks at their accuracy each 150 examples."""

    def __init__(self, options: argparse.Namespace, net: nn.Module, data: tuple[torch.Tensor, ...]) -> None:
        _, train_y, self._x, self._y = data
        self._half_epoch, self._examples = len(train_y) / 2, options.examples
        self._weights = [weight.detach() for weight in net.parameters()]
        self.average = [weight.clone() for weight in self._weights]
        self._net = network(0)
        self.seen = self._looked = 0
        self._last: list[float] = []
        self._log = None if options.folder is None else (options.folder / "looks").open("a", buffering=1)
        print("began", time.monotonic(), file=self._log)

    def go_on(self, average: list[torch.Tensor], seen: int) -> None:
        """A checkpoint was loaded."""
        torch._foreach_copy_(self.average, average)
        self.seen = self._looked = seen

    def version(self, seen: int) -> bool:
        """The weights are now of so many examples. Whether the target is reached."""
        share = 1 - math.exp((self.seen - seen) / self._half_epoch)
        torch._foreach_lerp_(self.average, self._weights, share)
        self.seen = seen
        if seen - self._looked < LOOK_EVERY:
            return False
        self._looked = seen
        with torch.no_grad():
            torch._foreach_copy_([weight.detach() for weight in self._net.parameters()], self.average)
            right = self._net(self._x).argmax(dim=1) == self._y
        self._last = [*self._last, float(right.float().mean())][-LOOKS:]
        print("look", time.monotonic(), seen, self._last[-1], file=self._log)
        reached = len(self._last) == LOOKS and sum(self._last) / LOOKS >= TARGET - 1e-9
        if self._examples:
            reached = seen >= self._examples
        if reached:
            print("reached", time.monotonic(), file=self._log)
        return reached


def with_kvdist(options: argparse.Namespace) -> None:
    from kvdist import QueueSampler, Trainer, kv

    data = digits(options.data)
    net = network(options.seed)
    store = kv.create("dist")  # its policy: kvdist-launch --policy
    optimizer = torch.optim.SGD(net.parameters(), options.lr, options.momentum)
    trainer = Trainer(net.parameters(), optimizer, kvstore=store)
    sampler = QueueSampler(len(data[1]), epochs=100, seed=options.seed)
    machine, looks = Machine(options, store.rank), None
    is_looker = store.rank == min(options.looker, store.num_workers - 1)
    version = -1
    for x, y in trainer.batches(DataLoader(TensorDataset(*data[:2]), options.batch, sampler=sampler)):
        if version < 0:
            version = 0
            if "KVDIST_RESTARTS" not in os.environ or os.environ["KVDIST_RESTARTS"] == "0":
                store.barrier()  # all have imported everything
            looks = Looks(options, net, data) if is_looker else None
        machine.begin(options.batch)
        optimizer.zero_grad()
        cross_entropy(net(x), y).backward()
        machine.end()
        trainer.step(samples=len(x))
        if looks is not None and trainer.version > version:
            version = trainer.version
            if looks.version(trainer.samples_seen):
                break
    time.sleep(3600 if options.folder else 0)  # whoever started this ends it


def with_ddp(options: argparse.Namespace) -> None:
    import datetime

    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    data = digits(options.data)
    net = network(options.seed)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    rank, workers = dist.get_rank(), dist.get_world_size()
    machine = Machine(options, int(os.environ.get("LIMPING_MACHINE", rank)))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), options.lr, options.momentum)
    dist.barrier()  # all have imported everything
    looks, epoch = Looks(options, net, data) if rank == 0 else None, 0
    saved = Path(options.folder or ".") / "limping.pt"
    if options.folder is not None and saved.exists():
        state = torch.load(saved)
        epoch = state["epoch"]
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        if looks is not None:
            looks.go_on(state["average"], state["seen"])
    while True:
        order = torch.randperm(len(data[1]), generator=torch.Generator().manual_seed(1000 * options.seed + epoch))
        for first in range(rank * options.batch, len(order) - workers * options.batch, workers * options.batch):
            chosen = order[first : first + options.batch]
            machine.begin(options.batch)
            optimizer.zero_grad()
            loss = cross_entropy(model(data[0][chosen]), data[1][chosen])
            machine.end()
            loss.backward()
            optimizer.step()
            if looks is not None and looks.version(looks.seen + workers * options.batch):
                time.sleep(3600 if options.folder else 0)
                return
        epoch += 1
        if looks is not None and options.folder is not None:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"epoch": epoch, "average": looks.average, "seen": looks.seen}, f"{saved}.new")
            os.replace(f"{saved}.new", saved)


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = parse()
    with_ddp(asked) if asked.ddp else with_kvdist(asked)
