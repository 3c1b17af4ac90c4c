"""The limping cluster in a simulated time: tunes every way of training for unequal machines on one grid.

    python benchmarks/limping_simulated.py             # all settings; some minutes of one core
    python benchmarks/limping_simulated.py graded equal

Gradients are real (a perceptron 64-64-10 on the digits, NumPy), only time is simulated: a gradient of b examples takes
a machine (0.1 + 0.9 b / 32) / speed units, with a jitter; an exchange takes 0.1 of them, which all pay but for a quota,
whose workers go on meanwhile. A way is judged by when the mean of three looks at the test accuracy is 0.97; looks are
at the average of the weights (exponential, over half an epoch, for all alike), one for each 150 examples that reached
them. Every configuration is tried, the best third two times more, the best eight of these on twelve seeds, and the best
of these on fresh ones. `limping.py` measures the winners, which this leaves in ``results/limping_simulated.json``, on
real processes.
"""

from __future__ import annotations

import os

os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import argparse
import heapq
import json
import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

RESULTS = Path(__file__).resolve().parent / "results" / "limping_simulated.json"
TARGET, LOOKS, LOOK_EVERY = 0.97, 3, 150
EPOCHS_MAX = 12
DETECTION, RESTART = 2.0, 20.0
"""Units until a death is known, and until DDP has started again."""
JITTER = 0.15
STALL_CHANCE, STALL = 0.05, 10.0
"""Of a spiky machine: in each unit of compute, and its mean length in units."""
PLATEAU = 0.98
"""Of a split that is used, after `EPOCHS_MAX` epochs: on others the target says little."""
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Setting:
    """Machines and what happens to them.

    Attributes:
        speeds: of each machine; 1 makes 32 examples in a unit.
        exchange: units of one.
        spiky: whether machines stall at random.
        calm: the setting whose times say when the first machine is killed, at 30 %, and comes back, at 60 %.
    """

    speeds: tuple[float, ...]
    exchange: float = 0.1
    spiky: bool = False
    calm: str = ""


CHRONIC, GRADED, EQUAL = (1.0, 1.0, 0.25), (1.0, 0.6, 0.4, 0.25), (1.0, 1.0, 1.0)
SETTINGS = {
    "graded": Setting(GRADED),
    "graded, death": Setting(GRADED, calm="graded"),
    "chronic": Setting(CHRONIC),
    "chronic, death": Setting(CHRONIC, calm="chronic"),
    "equal": Setting(EQUAL),
    "slow network": Setting(CHRONIC, exchange=1.0),
    "spiky": Setting(EQUAL, spiky=True),
}


@dataclass(frozen=True)
class Config:
    """How to train.

    Attributes:
        method: a key of `METHODS`.
        machines: how many, the fastest ones.
        batch: of one gradient on one machine.
        learning_rate, momentum: of SGD.
        quota: examples of a version; 0 without a quota.
        every: steps of each machine between two exchanges.
        outer: learning rate and Nesterov's momentum of the optimizer that takes the changes of local steps.
    """

    method: str
    machines: int
    batch: int
    learning_rate: float
    momentum: float
    quota: int = 0
    every: int = 1
    outer: tuple[float, float] = (1.0, 0.0)


# Learning.


class Problem:
    """The digits, a quarter of them held out."""

    def __init__(self, split: int) -> None:
        inputs, targets = load_digits(return_X_y=True)
        inputs = (inputs / 16).astype(np.float32)
        self.train_x, self.test_x, self.train_y, self.test_y = train_test_split(
            inputs, targets, test_size=0.25, stratify=targets, random_state=split
        )

    def first_weights(self, chance: np.random.Generator) -> Floats:
        """Normal, by the number of inputs (He et al.), and biases of 0."""
        weights = np.zeros(4810, np.float32)
        first, _, second, _ = layers(weights)
        for part in (first, second):
            part[:] = chance.normal(0, math.sqrt(2 / 64), part.shape)
        return weights

    def gradient(self, weights: Floats, chosen: NDArray[np.int64]) -> Floats:
        """Of the mean cross entropy over these examples."""
        first, first_bias, second, second_bias = layers(weights)
        x, count = self.train_x[chosen], len(chosen)
        hidden = np.maximum(x @ first + first_bias, 0)
        scores = hidden @ second + second_bias
        chances = np.exp(scores - scores.max(axis=1, keepdims=True))
        chances /= chances.sum(axis=1, keepdims=True)
        chances[np.arange(count), self.train_y[chosen]] -= 1
        chances /= count
        found = np.empty_like(weights)
        to_first, to_first_bias, to_second, to_second_bias = layers(found)
        np.matmul(hidden.T, chances, out=to_second)
        chances.sum(axis=0, out=to_second_bias)
        back = (chances @ second.T) * (hidden > 0)
        np.matmul(x.T, back, out=to_first)
        back.sum(axis=0, out=to_first_bias)
        return found

    def accuracy(self, weights: Floats) -> float:
        """On the held out digits."""
        first, first_bias, second, second_bias = layers(weights)
        scores = np.maximum(self.test_x @ first + first_bias, 0) @ second + second_bias
        return float((scores.argmax(axis=1) == self.test_y).mean())


def layers(weights: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Views of a vector as both layers' weights and biases."""
    return (
        weights[:4096].reshape(64, 64), weights[4096:4160], weights[4160:4800].reshape(64, 10), weights[4800:]
    )  # fmt: skip


@cache
def problem(split: int) -> Problem:
    return Problem(split)


def reaches_plateau(split: int) -> bool:
    """Whether a split can be learned well enough that the target says something."""
    config = Config("alone", 1, 16, 0.2, 0.5)
    run = Run(config, Setting((1.0,), exchange=0.0), split, 0, target=2.0)
    METHODS["alone"](run)
    return max(run.looks) >= PLATEAU


@cache
def splits() -> list[int]:
    """Four that can be learned."""
    return [split for split in range(20) if reaches_plateau(split)][:4]


class Run:
    """One training: its time, its data, its chance, and what was seen of it.

    Args:
        give_up: units after which the outcome does not matter.
        death: when the first machine is lost and when it is back.
    """

    def __init__(
        self,
        config: Config,
        setting: Setting,
        split: int,
        seed: int,
        *,
        give_up: float = math.inf,
        death: tuple[float, float] = (math.inf, math.inf),
        target: float = TARGET,
    ) -> None:
        self.config, self.setting, self.problem, self.target = config, setting, problem(split), target
        self.died, self.returned = death
        self.speeds = sorted(setting.speeds, reverse=True)[: config.machines]
        self.chance = np.random.default_rng([split, seed])
        self.weights = self.problem.first_weights(self.chance)
        self.average = self.weights.copy()
        self.now, self.seen, self.looked, self._give_up = 0.0, 0, 0, give_up
        self.looks: list[float] = []
        self.reached = math.inf
        self._order = self.chance.permutation(len(self.problem.train_y))
        self._place = 0

    def take(self, count: int) -> NDArray[np.int64]:
        """The next examples of the stream that all share."""
        if self._place + count > len(self._order):
            self._order, self._place = self.chance.permutation(len(self._order)), 0
        self._place += count
        return self._order[self._place - count : self._place]

    def computing(self, machine: int) -> float:
        """Units until a machine has the next gradient."""
        cost = 0.1 + 0.9 * self.config.batch / 32
        took = cost / self.speeds[machine] * float(np.exp(self.chance.normal(0, JITTER)))
        if self.setting.spiky and self.chance.random() < STALL_CHANCE * cost:
            took += float(self.chance.exponential(STALL))
        return took

    def version(self, samples: int) -> bool:
        """There are new weights, of so many examples more. Whether the run is over."""
        epoch = len(self._order)
        self.seen += samples
        self.average += (self.weights - self.average) * np.float32(1 - math.exp(-2 * samples / epoch))
        if self.seen - self.looked >= LOOK_EVERY:
            self.looked = self.seen
            self.looks.append(self.problem.accuracy(self.average))
            if len(self.looks) >= LOOKS and statistics.fmean(self.looks[-LOOKS:]) >= self.target - 1e-9:
                self.reached = self.now
        return self.reached < math.inf or self.now > self._give_up or self.seen > EPOCHS_MAX * epoch


class Outer:
    """Applies changes to the weights: SGD with Nesterov's momentum."""

    def __init__(self, config: Config) -> None:
        self.rate, self.momentum = (np.float32(number) for number in config.outer)
        self._speed = np.float32(0)

    def __call__(self, weights: Floats, change: Floats) -> Floats:
        if not self.momentum:
            return weights + self.rate * change
        self._speed = self.momentum * self._speed + change
        return weights + self.rate * (change + self.momentum * self._speed)


class Sgd:
    """As torch's, with momentum."""

    def __init__(self, config: Config) -> None:
        self.rate, self.momentum = np.float32(config.learning_rate), np.float32(config.momentum)
        self.speed: Any = np.float32(0)

    def __call__(self, weights: Floats, gradient: Floats) -> Floats:
        self.speed = self.momentum * self.speed + gradient
        return weights - self.rate * self.speed


# The ways to train.


def ddp(run: Run) -> None:
    """All in step, with equal batches. At a death, and a return, all start again from the last epoch's checkpoint."""
    optimizer = Sgd(run.config)
    count, epoch = len(run.speeds), len(run.problem.train_y)
    saved, losses = (run.weights, run.average.copy(), optimizer.speed, 0), [run.died, run.returned]
    while True:
        present = range(1 if run.died <= run.now < run.returned and count > 1 else 0, count)
        took = max(run.computing(one) for one in present) + (run.setting.exchange if len(present) > 1 else 0)
        if losses and run.now + took > losses[0]:
            run.now = losses.pop(0) + RESTART + (DETECTION if losses else 0)
            run.weights, average, optimizer.speed, run.seen = saved
            run.average, run.looked, run.looks = average.copy(), run.seen, []
            continue
        run.now += took
        samples = run.config.batch * len(present)
        run.weights = optimizer(run.weights, run.problem.gradient(run.weights, run.take(samples)))
        before = run.seen // epoch
        if run.version(samples):
            return
        if run.seen // epoch > before:
            saved = (run.weights, run.average.copy(), optimizer.speed, run.seen)


def local_steps(run: Run) -> None:
    """All make a number of steps of their own, and wait for each other."""
    outer, count = Outer(run.config), len(run.speeds)
    optimizers = [Sgd(run.config) for _ in run.speeds]
    while True:
        back = run.returned <= run.now
        present = range(0 if run.now < run.died or back else 1, count)
        took = max(sum(run.computing(one) for _ in range(run.config.every)) for one in present)
        took += run.setting.exchange
        if run.now < run.died <= run.now + took:
            took, present = max(took, run.died + DETECTION - run.now), range(1, count)
            optimizers[0] = Sgd(run.config)
        run.now += took
        changes = []
        for one in present:
            own = run.weights
            for _ in range(run.config.every):
                own = optimizers[one](own, run.problem.gradient(own, run.take(run.config.batch)))
            changes.append(own - run.weights)
        run.weights = outer(run.weights, np.mean(changes, axis=0, dtype=np.float32))
        if run.version(run.config.batch * run.config.every * len(present)):
            return


class QuotaWorker:
    """A machine under a quota.

    Attributes:
        own: its weights; `since`: what they were at its last push, as far as it has taken new ones.
        total, samples: gradients since its last push, and of how many examples.
        version: the newest whose weights it has.
        present: not lost.
    """

    def __init__(self, config: Config, weights: Floats, version: int) -> None:
        self.own = self.since = weights
        self.optimizer = Sgd(config)
        self.total: Any = np.float32(0)
        self.samples, self.version, self.life = 0, version, 0
        self.present = True


class Quota:
    """A version for each so many examples, as `kvdist.training.quota` makes them."""

    def __init__(self, run: Run, local: bool) -> None:
        self._run, self._local = run, local
        self._workers = [QuotaWorker(run.config, run.weights, 0) for _ in run.speeds]
        self._outer, self._optimizer = Outer(run.config), Sgd(run.config)
        self._events: list[tuple[float, int, int, int]] = []
        self._version, self._complete = 0, 0.0
        """The newest that was pushed, and when it is complete."""
        self._under_way: tuple[Floats, int] | None = None

    def __call__(self) -> None:
        run = self._run
        for one in range(len(self._workers)):
            self._begin(one)
        for at, kind in ((run.died, -1), (run.returned, -2)):
            heapq.heappush(self._events, (at, kind, 0, 0))
        while True:
            run.now, kind, one, life = heapq.heappop(self._events)
            if kind == -1:
                self._lose(self._workers[0])
            elif kind == -2:
                self._workers[0] = QuotaWorker(run.config, run.weights, self._version)
                self._workers[0].life = 2
                self._begin(0)
            elif kind == 0:
                assert self._under_way is not None
                (run.weights, samples), self._under_way = self._under_way, None
                if run.version(samples):
                    return
                self._push_if_due()
            elif self._workers[one].life == life:
                self._end_batch(one)

    def _lose(self, worker: QuotaWorker) -> None:
        worker.present, worker.samples, worker.life = False, 0, 1
        self._complete = max(self._complete, self._run.now) + DETECTION
        if self._under_way is not None:  # it waits for one who says nothing
            self._events = [event for event in self._events if event[1] != 0]
            heapq.heapify(self._events)
            heapq.heappush(self._events, (self._complete, 0, 0, 0))

    def _begin(self, one: int) -> None:
        heapq.heappush(self._events, (self._run.now + self._run.computing(one), 1, one, self._workers[one].life))

    def _end_batch(self, one: int) -> None:
        run, worker = self._run, self._workers[one]
        gradient = run.problem.gradient(worker.own, run.take(run.config.batch))
        worker.samples += run.config.batch
        if self._local:
            worker.own = worker.optimizer(worker.own, gradient)
        else:
            worker.total = worker.total + gradient * np.float32(run.config.batch)
        complete = self._version - (self._under_way is not None)
        if worker.version < complete:
            worker.version = complete
            worker.own = run.weights + (worker.own - worker.since) if self._local else run.weights
            worker.since = run.weights
        self._push_if_due()
        self._begin(one)

    def _push_if_due(self) -> None:
        run, workers = self._run, [worker for worker in self._workers if worker.present]
        samples = sum(worker.samples for worker in workers)
        if samples < run.config.quota or self._under_way is not None:
            return
        if self._local:
            change = sum(
                (worker.own - worker.since) * np.float32(worker.samples / samples)
                for worker in workers
                if worker.samples
            )
            weights = self._outer(run.weights, change)
            for worker in workers:
                worker.since = worker.own
        else:
            weights = self._optimizer(run.weights, sum(worker.total for worker in workers) / np.float32(samples))
        for worker in workers:
            worker.samples, worker.total = 0, np.float32(0)
        self._under_way, self._version = (weights, samples), self._version + 1
        self._complete = max(self._complete, run.now) + run.setting.exchange
        heapq.heappush(self._events, (self._complete, 0, 0, 0))


METHODS = {
    "DDP": ddp,
    "DDP, best subset": ddp,
    "alone": ddp,
    "quota": lambda run: Quota(run, local=False)(),
    "quota, local steps": lambda run: Quota(run, local=True)(),
    "local_sgd": local_steps,
    "diloco": local_steps,
}

# Tuning.

BATCHES, RATES, MOMENTA = (4, 8, 16, 32), (1.0, 2.0, 0.5, 4.0, 0.25, 8.0), (0.5, 0.9, 0.0)
"""Of DDP; the rates are effective ones: learning rate / (1 - momentum). Those with knobs of their own have fewer."""
QUOTAS, LOCAL_QUOTAS, EVERY = (16, 32, 64), (64, 128), (2, 4, 8)
NESTEROV = ((1.0, 0.0), (0.7, 0.5))
"""The mean, and an outer optimizer, of a quota of local steps."""
SCREENINGS, BEST, MORE_SEEDS, FRESH_SEEDS = 3, 8, 3, 4
"""Runs of a configuration, the worse two thirds of which have only one; how many are run again, on how many seeds of
each split; and on how many new ones the best of them is."""


def subset(speeds: tuple[float, ...]) -> int:
    """How many of the fastest machines DDP does best with, by the planning formula."""
    ordered = sorted(speeds, reverse=True)
    return max(range(1, len(ordered) + 1), key=lambda count: count * ordered[count - 1])


def grid(method: str, setting: Setting) -> Iterator[Config]:
    """All configurations of a method that are tried."""
    every = len(setting.speeds)
    for batch, rate, momentum in product(BATCHES, RATES, MOMENTA):
        base = Config(method, every, batch, rate * (1 - momentum), momentum)
        if method == "DDP":
            yield base
        elif method == "DDP, best subset":
            # Compute alone decides how many; the next larger and smaller subsets are tried as well.
            best = subset(setting.speeds)
            for machines in {count for count in (best - 1, best, best + 1) if 2 <= count < every}:
                yield replace(base, machines=machines)
        elif method == "alone" and not setting.calm:
            yield replace(base, machines=1)
        elif method == "quota" and batch < 16 and rate <= 2:
            yield from (replace(base, quota=quota) for quota in QUOTAS)
        elif method == "quota, local steps" and batch in (8, 16) and 0.5 <= rate <= 4:
            yield from (replace(base, quota=one, outer=outer) for one, outer in product(LOCAL_QUOTAS, NESTEROV))
        elif method == "local_sgd" and batch < 32:
            yield from (replace(base, every=number) for number in EVERY)
        elif method == "diloco" and batch < 32:
            yield from (replace(base, every=number, outer=(0.7, 0.9)) for number in EVERY)


def timed(config: Config, setting: Setting, split: int, seed: int, give_up: float, death: tuple[float, float]) -> float:
    """Units until the target; infinite if it is not reached."""
    run = Run(config, setting, split, seed, give_up=give_up, death=death)
    with np.errstate(all="ignore"):  # learning rates that are too high
        METHODS[config.method](run)
    return run.reached


def tune(method: str, setting: Setting, calm: dict[str, Any] | None) -> dict[str, Any] | None:
    """The best configuration of a method, what it takes, and its neighbours; None if none reaches the target.

    Args:
        calm: what came out without a death; with one, only the best of those are tried.
    """
    death, best = (math.inf, math.inf), math.inf
    if calm is not None:
        death = (0.3 * calm["median"], 0.6 * calm["median"])
        tried = [calm["winner"], *calm["neighbours"]]
        screened = [(0.0, Config(**{name: one[name] for name in calm["winner"]})) for one in tried]
    else:
        screened = screen(method, setting)
    pairs = [(split, 2000 + seed) for split, seed in product(splits(), range(MORE_SEEDS))]
    again = []
    for _, config in screened:
        more = [timed(config, setting, split, seed, 3 * best, death) for split, seed in pairs]
        again.append((statistics.median(more), config))
        best = min(best, again[-1][0])
    again = sorted((one for one in again if one[0] < math.inf), key=lambda one: one[0])
    if not again:
        return None
    fresh = [
        timed(again[0][1], setting, split, 3000 + seed, math.inf, death)
        for split, seed in product(splits(), range(FRESH_SEEDS))
    ]
    return {
        "winner": asdict(again[0][1]),
        "median": statistics.median(fresh),
        "units": fresh,
        "neighbours": [{"median": median, **asdict(config)} for median, config in again[1:]],
    }


def screen(method: str, setting: Setting) -> list[tuple[float, Config]]:
    """The configurations of a method that are worth more runs."""
    calm, best, screened = (math.inf, math.inf), math.inf, []
    for config in grid(method, setting):
        took = timed(config, setting, splits()[0], 1000, 2 * best, calm)
        best = min(best, took)
        screened.append((took, config))
    screened = sorted((one for one in screened if one[0] < math.inf), key=lambda one: one[0])[: len(screened) // 3]
    for number in range(1, SCREENINGS):
        screened = [
            (took + timed(config, setting, splits()[number], 1000 + number, 4 * best, calm), config)
            for took, config in screened
        ]
    return sorted((one for one in screened if one[0] < math.inf), key=lambda one: one[0])[:BEST]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", default=[], metavar="SETTING", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    found: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    print(f"splits {splits()}")
    for name in options.settings or SETTINGS:
        setting, began = SETTINGS[name], time.process_time()
        here = found.setdefault(name, {})
        for method in options.methods:
            calm = found[setting.calm].get(method) if setting.calm else None
            tuned = None if setting.calm and calm is None else tune(method, setting, calm)
            if tuned is None:
                continue
            here[method] = tuned
            ratio = tuned["median"] / here["DDP"]["median"] if "DDP" in here else math.nan
            took = time.process_time() - began
            print(
                f"{name:15} {method:20} {tuned['median']:7.1f} {ratio:5.2f} {tuned['winner']} {took:.0f}s", flush=True
            )
            there = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # another one may tune other settings
            there.setdefault(name, {})[method] = tuned
            RESULTS.write_text(json.dumps({key: there[key] for key in SETTINGS if key in there}, indent=1) + "\n")


if __name__ == "__main__":
    main()
