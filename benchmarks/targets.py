"""The headline: which contests are held, and which ratio each is to reach. Data; `bench.py` holds them.

A row's ratio is the peer's median over ours, both from the same run. `target` is what must be reached at least,
`stretch` what would be better.
"""

from __future__ import annotations

from dataclasses import dataclass

from end_to_end import Training
from models import parse_spec
from systems import Work

OURS = ("kvdist", "kvdist-resident", "kvdist-shared")
STEADY = 15
"""Steps until a server has loaded its compiled kernels, and a few more."""
LARGE, SMALL = parse_spec("25x1048576"), parse_spec("1000x1000")


@dataclass(frozen=True)
class Line:
    """Work between two network namespaces, over a line of so many Mbit/s."""

    work: Work | Training
    mbit: int = 1000

    def __str__(self) -> str:
        return f"{self.work}, {self.mbit} Mbit/s between two hosts"


@dataclass(frozen=True)
class Contest:
    """Systems that take turns at one piece of work."""

    name: str
    work: Work | Training | Line
    systems: tuple[str, ...]


@dataclass(frozen=True)
class Row:
    """One ratio that is to be reached."""

    title: str
    contest: str
    ours: str
    peer: str
    target: float
    stretch: float


CONTESTS = (
    Contest(
        "large",
        Work(LARGE, steps=15, warmup=STEADY),
        (*OURS, "kvdist-tcp", "mxnet", "gloo-flat", "gloo-tensors", "ddp"),
    ),
    Contest("large-sgd", Work(LARGE, optimizer="sgd", steps=15, warmup=STEADY), (*OURS, "mxnet")),
    Contest("large-adam", Work(LARGE, optimizer="adam", steps=15, warmup=STEADY), (*OURS, "mxnet")),
    Contest("large-4", Work(LARGE, workers=4, steps=15, warmup=STEADY), (*OURS, "mxnet")),
    Contest("small", Work(SMALL, steps=30), ("kvdist", "mxnet", "horovod")),
    Contest("small-per-key", Work(SMALL, call="per_key", steps=10), ("kvdist", "mxnet")),
    Contest("mlp", Training("mlp"), ("alone", "kvdist", "kvdist-overlap", "kvdist-share", "ddp")),
    Contest("line", Line(Work(LARGE, steps=6, warmup=2)), ("line", "kvdist", "mxnet", "gloo-flat")),
)

LIST_CALL = "25×4 MB, one list call, W=2 S=2"
ROWS = (
    Row(f"{LIST_CALL}, against MXNet", "large", "kvdist", "mxnet", 3, 3.5),
    Row(f"{LIST_CALL}, against MXNet", "large", "kvdist-resident", "mxnet", 7, 10),
    Row(f"{LIST_CALL}, against MXNet", "large", "kvdist-shared", "mxnet", 7, 10),
    Row("the same, SGD+momentum on the server", "large-sgd", "kvdist", "mxnet", 3.5, 4.5),
    Row("the same, SGD+momentum on the server", "large-sgd", "kvdist-resident", "mxnet", 7, 10),
    Row("the same, SGD+momentum on the server", "large-sgd", "kvdist-shared", "mxnet", 7, 10),
    Row("the same, Adam on the server", "large-adam", "kvdist", "mxnet", 3, 4),
    Row("the same, Adam on the server", "large-adam", "kvdist-resident", "mxnet", 5, 7),
    Row("the same, Adam on the server", "large-adam", "kvdist-shared", "mxnet", 5, 7),
    Row("the same, against gloo all-reduce of one flat tensor", "large", "kvdist", "gloo-flat", 1.1, 1.3),
    Row("the same, against gloo all-reduce of one flat tensor", "large", "kvdist-resident", "gloo-flat", 2.5, 4),
    Row("the same, against gloo all-reduce of one flat tensor", "large", "kvdist-shared", "gloo-flat", 2.5, 4),
    Row("25×4 MB, W=4 S=2, against MXNet", "large-4", "kvdist", "mxnet", 3.3, 4.5),
    Row("25×4 MB, W=4 S=2, against MXNet", "large-4", "kvdist-resident", "mxnet", 6, 10),
    Row("25×4 MB, W=4 S=2, against MXNet", "large-4", "kvdist-shared", "mxnet", 6, 10),
    Row("25×4 MB over TCP, W=2 S=2, against MXNet", "large", "kvdist-tcp", "mxnet", 1.3, 1.7),
    Row("1000×4 kB, one list call, against MXNet", "small", "kvdist", "mxnet", 8, 15),
    Row("1000×4 kB, one list call, against Horovod", "small", "kvdist", "horovod", 1.5, 2.5),
    Row("1000×4 kB, push and pull_async key by key, against MXNet", "small-per-key", "kvdist", "mxnet", 3, 5),
    Row("MLP step through the Trainer, W=2, against DDP", "mlp", "kvdist", "ddp", 1.3, 1.6),
    Row("MLP step through the Trainer, overlap, against DDP", "mlp", "kvdist-overlap", "ddp", 1.3, 1.6),
    Row("MLP step through the Trainer, W=2, against DDP", "mlp", "kvdist-share", "ddp", 1.4, 1.8),
    Row("1 Gbit/s between 2 hosts, servers colocated: share of the bound", "line", "kvdist", "bound", 0.9, 0.97),
)

PUSH_PULL = (*OURS, "kvdist-tcp", "mxnet", "horovod", "gloo-tensors", "gloo-flat", "ddp")
"""Every system that exchanges arrays; each is left out where it cannot do the work."""
QUICK = 10
"""Timed steps in each turn, where there are many contests."""
FULL_TURNS = 2
"""Of each system, where there are many contests."""


def full_contests() -> tuple[Contest, ...]:
    """What the headline leaves out: one dimension varied at a time, models, other modes."""
    sizes = [Contest(f"bytes-{size}", Work(parse_spec(f"25x{size}"), steps=QUICK), PUSH_PULL) for size in SIZES]
    keys = [
        Contest(f"keys-{count}", Work(parse_spec(f"{count}x{MILLION // count}"), steps=QUICK), PUSH_PULL)
        for count in (1, 10, 100, 1000, 10000)
    ]
    crowds = [
        Contest(f"workers-{w}-{s}", Work(LARGE, workers=w, servers=s, steps=QUICK, warmup=STEADY), PUSH_PULL)
        for w in (1, 2, 4, 8)
        for s in (1, 2)
    ]
    models = [Contest(name, Work(parse_spec(name), steps=5), PUSH_PULL) for name in ("resnet50", "vgg16", "bert-base")]
    asynchronous = [
        Contest(f"async-{rule}", Work(LARGE, store="dist_async", optimizer=rule, steps=QUICK), PUSH_PULL)
        for rule in ("sgd", "adam")
    ]
    two_calls = Contest("large-two-calls", Work(LARGE, call="push_pull", steps=QUICK), PUSH_PULL)
    resnet = Contest(
        "resnet18", Training("resnet18", steps=6), ("alone", "kvdist", "kvdist-overlap", "kvdist-share", "ddp")
    )
    return (*sizes, *keys, *crowds, *models, *asynchronous, two_calls, resnet)


MILLION = 1_000_000
SIZES = (1024, 16384, 131072, 1048576, 4194304)
