"""Every system that can be compared, and the work it is given: how its processes are started, and what it cannot do.

Systems take turns within one run, A B A B, so that whatever else the machine does meets all alike. Each turn starts
fresh processes. A system that is not here, or cannot do the work, is left out, and that is said.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from cluster import PLAIN_TCP, Start, environment, launch_command, run_together, worker_command
from peers.environments import Absent
from peers.horovod import horovod_starts
from peers.mxnet import bridge_starts, hvd_starts, mxnet_starts
from peers.torch_gloo import torch_starts
from workers.workload import Spec

IN_PROCESS_STORES = ("local", "device")
GOING_ON = {"KVDIST_ON_LOSS": "continue"}
COPIES = GOING_ON | {"KVDIST_REPLICAS": "1"}
"""Each server has a copy of another one's slices."""


@dataclass(frozen=True)
class Work:
    """One exchange of arrays: what, by how many, in which way."""

    spec: Spec
    workers: int = 2
    servers: int = 2
    store: str = "dist_sync"
    call: str = "pushpull"
    optimizer: str = "none"
    """On the servers."""
    steps: int = 20
    """Timed, in each turn."""
    warmup: int = 3
    """Before those."""

    def arguments(self, system: str, folder: str) -> list[str]:
        """What every worker is told."""
        named = ("store", "call", "optimizer", "steps", "warmup")
        words = [word for name in named for word in (f"--{name}", str(getattr(self, name)))]
        return [*words, "--system", system, "--spec", self.spec.text, "--out", folder]

    def __str__(self) -> str:
        return (
            f"{self.spec} float32 ({self.spec.payload_bytes / 1e6:.1f} MB), {self.workers} workers, "
            f"{self.servers} servers, {self.store}, {self.call}, optimizer {self.optimizer}"
        )


@dataclass(frozen=True)
class System:
    """Something that can do the work.

    starts: the processes that do it, with these arguments for their workers.
    """

    label: str
    starts: Callable[[Work, list[str]], list[Start]]
    refuses: Callable[[Work], str] = lambda _: ""
    """Why it cannot do a work; empty if it can."""


@dataclass
class Measured:
    """Seconds of every timed step on every worker, over all turns; or why there are none."""

    seconds: list[float] = field(default_factory=list)
    left_out: str = ""
    turn_medians_s: list[float] = field(default_factory=list)
    """Of each turn: how far they lie apart says how quiet the machine was."""
    failed: bool = False
    """It was left out because it went wrong, not because it is absent or made for something else."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def quantile_s(self, share: float) -> float:
        """The value below which this share of the steps lies."""
        return sorted(self.seconds)[min(len(self.seconds) - 1, int(len(self.seconds) * share))]


def kvdist_system(label: str, arrays: str = "plain", **variables: str) -> System:
    """kvdist with arrays of a kind, and these variables in the environment of all its processes."""

    def starts(work: Work, arguments: list[str]) -> list[Start]:
        command = worker_command("kvdist_worker.py", *arguments, "--store-arrays", arrays)
        if work.store not in IN_PROCESS_STORES:
            command = launch_command(work.workers, work.servers, command)
        return [Start(command, environment(**variables))]

    def refuses(work: Work) -> str:
        return "weights that are shown are the answer to a pushpull" if work.call != "pushpull" else ""

    return System(label, starts, refuses) if arrays == "shared" else System(label, starts)


def _without_servers(label: str) -> System:
    """kvdist's store that sums among the workers, in place, as all-reduce does."""

    def starts(work: Work, arguments: list[str]) -> list[Start]:
        words = [*arguments, "--store", "collective"]  # the last one counts
        command = launch_command(work.workers, 0, worker_command("kvdist_worker.py", *words))
        return [Start(command, environment())]

    return System(label, starts, _collective_refuses)


def _mxnet_refuses(work: Work) -> str:
    return "a store within one process is no cluster" if work.store in IN_PROCESS_STORES else ""


def _collective_refuses(work: Work) -> str:
    if work.workers == 1:
        return "one worker has nothing to reduce"
    if work.optimizer != "none":
        return "all-reduce has no servers that could hold an optimizer"
    if "async" in work.store or work.store in IN_PROCESS_STORES:
        return f"all-reduce is not what {work.store} does"
    return "all-reduce is one call, not a push and a pull" if work.call == "push_pull" else ""


def _torch_system(label: str) -> System:
    def starts(work: Work, arguments: list[str]) -> list[Start]:
        return torch_starts(work.workers, worker_command("torch_worker.py", *arguments))

    return System(label, starts, _collective_refuses)


def _trainer_refuses(work: Work) -> str:
    return "a Trainer has an optimizer" if work.optimizer == "none" else _mxnet_refuses(work)


SYSTEMS: dict[str, System] = {
    "kvdist": kvdist_system("kvdist"),
    "kvdist-resident": kvdist_system("kvdist, resident", "resident"),
    "kvdist-shared": kvdist_system("kvdist, resident and shown", "shared"),
    "kvdist-tcp": kvdist_system("kvdist, TCP", **PLAIN_TCP),
    "kvdist-continue": kvdist_system("kvdist, --on-loss continue", **GOING_ON),
    "kvdist-copies": kvdist_system("kvdist, --replicas 1", **COPIES),
    "kvdist-tcp-continue": kvdist_system("kvdist, TCP, continue", **PLAIN_TCP, **GOING_ON),
    "kvdist-tcp-copies": kvdist_system("kvdist, TCP, --replicas 1", **PLAIN_TCP, **COPIES),
    "collective": _without_servers("kvdist, collective"),
    "mxnet": System("MXNet 1.9.1", lambda work, words: mxnet_starts(work.workers, work.servers, words), _mxnet_refuses),
    "mxnet-trainer": System(
        "MXNet 1.9.1, Trainer",
        lambda work, words: mxnet_starts(work.workers, work.servers, words, script="gluon_worker.py"),
        _trainer_refuses,
    ),
    "bridge": System(
        "MXNet's Trainer on kvdist",
        lambda work, words: bridge_starts(work.workers, work.servers, words),
        _trainer_refuses,
    ),
    "horovod": System(
        "Horovod 0.28.1 (gloo)", lambda work, words: horovod_starts(work.workers, words), _collective_refuses
    ),
    "horovod-trainer": System(
        "Horovod 0.28.1 (gloo), Trainer",
        lambda work, words: horovod_starts(work.workers, words, script="hvd_trainer_worker.py"),
        _trainer_refuses,
    ),
    "hvd-trainer": System(
        "kvdist.mxnet, Trainer", lambda work, words: hvd_starts(work.workers, work.servers, words), _trainer_refuses
    ),
    "hvd-trainer-numba": System(
        "kvdist.mxnet, Trainer, servers with numba",
        lambda work, words: hvd_starts(work.workers, work.servers, words, has_numba=True),
        _trainer_refuses,
    ),
    "gloo-tensors": _torch_system("torch gloo, per tensor"),
    "gloo-flat": _torch_system("torch gloo, one flat tensor"),
    "gloo-packed": _torch_system("torch gloo, one flat tensor, packed"),
    "ddp": _torch_system("torch DDP (gloo)"),
}


def measure(work: Work, names: Iterable[str], turns: int) -> dict[str, Measured]:
    """Have these systems do the work in turns; the result by system, in the order given."""

    def one_turn(name: str, folder: str) -> None:
        system = SYSTEMS[name]
        if reason := system.refuses(work):
            raise Absent(reason)
        run_together(system.starts(work, work.arguments(name, folder)))

    return take_turns(names, one_turn, turns)


def take_turns(names: Iterable[str], one_turn: Callable[[str, str], None], turns: int) -> dict[str, Measured]:
    """A B A B: call `one_turn(name, folder)` for each name, again and again, and gather what its workers wrote there.

    A name whose turn fails is left out from then on, with the reason printed: what it has done before does not count.
    """
    measured = {name: Measured() for name in names}
    for _ in range(turns):
        for name, result in measured.items():
            if result.left_out:
                continue
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                try:
                    one_turn(name, folder)
                    seconds = read_seconds(Path(folder))
                    result.seconds += seconds
                    result.turn_medians_s.append(statistics.median(seconds))
                except (Absent, RuntimeError) as error:
                    reason = str(error).strip() or type(error).__name__
                    measured[name] = Measured(left_out=reason, failed=isinstance(error, RuntimeError))
                    print(f"LEFT OUT: {name}: {reason}", flush=True)
    return measured


def read_seconds(folder: Path) -> list[float]:
    """What the workers of one turn have written, one list a worker.

    Raises:
        RuntimeError: they wrote nothing.
    """
    seconds = [second for file in sorted(folder.glob("*.json")) for second in json.loads(file.read_text())]
    if not seconds:
        raise RuntimeError("its workers ended without a result")
    return seconds
