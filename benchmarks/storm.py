"""A real training in a storm: processes are killed, stopped and cut off at random, and every example must count once.

    python benchmarks/storm.py                              # 16 workers, 4 servers, half an hour, 125 faults an hour
    python benchmarks/storm.py --minutes 2 --workers 6 --servers 2 --faults-per-hour 300
    # a kill every 10 s, of each of three ranks about every 30 s:
    python benchmarks/storm.py --minutes 5 --workers 3 --servers 2 --faults-per-hour 360 --kind kill --period 0.05 \\
        --patience 2
    python benchmarks/storm.py --peer torchrun              # the same on DDP, which starts again from checkpoints

Servers keep copies of each other's slices (`--replicas 1`), and are killed, too, one when all slices have a copy again;
so is the scheduler. First the same
job runs undisturbed for a while; what it does in a second is the measure. Workers are paced, so that the machine is not
what limits them. Kinds of faults that the program cannot survive are found out by a short trial and left out with a
line. All of this machine: the numbers are those of one host.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cluster import ROOT, cluster_of, descendants, end_on_terminate, environment, environment_of, worker_script

from tests.proxy import Proxy

EXAMPLES, BATCH = 1437, 16
"""Those of the digits that are trained on, and how many a worker takes at a time."""
SHARES = {"kill": 60, "stop": 15, "cut": 15, "server": 8, "scheduler": 2}
"""Of all faults, in percent."""
WORDS = {
    "kill": "killed (signal 9)",
    "stop": "stopped (SIGSTOP)",
    "cut": "cut off from the network",
    "server": "killed (signal 9)",
    "scheduler": "killed (signal 9)",
}
WORKER_KINDS = ("kill", "stop", "cut")
COLOURS = {"kill": "#d62728", "stop": "#ff7f0e", "cut": "#9467bd", "server": "#8c564b", "scheduler": "black"}
CUT_PATIENCES = 3.0
"""How long a worker is cut off, in patiences; it is given up after one and less than a second."""
LOOK_S = 0.25
TRIAL_S = 12.0
CHECKPOINT_EVERY = 20
"""Steps between two checkpoints of the peer."""


@dataclass(frozen=True)
class Fault:
    """One fault: what, to whom, when, and how often the victim had been started before."""

    kind: str
    victim: str
    at: float
    life: int


@dataclass
class Life:
    """What one process of a rank noted.

    Attributes:
        began, imported: when its first line ran, and when its own imports were done.
        steps: when each of its steps was counted, and of how many examples.
        reached: the number of its last step, where steps are made again after a restart.
        loaded, joined, batch: when it had its data, its store, and its first batch.
    """

    rank: int
    life: int
    began: float = 0.0
    imported: float = 0.0
    steps: list[tuple[float, int]] = field(default_factory=list)
    reached: int = 0
    loaded: float = 0.0
    joined: float = 0.0
    batch: float = 0.0


@dataclass
class Outcome:
    """What became of a run."""

    code: int
    faults: list[Fault]
    lives: list[Life]
    ends: list[dict[str, float]]
    seconds: float
    busy: float
    """Of all cores, by all processes of the job."""
    output: str

    @property
    def per_second(self) -> float:
        """Examples that were counted in a second, from the first step to the last."""
        times = [at for life in self.lives for at, _ in life.steps]
        return self.examples / (max(times) - min(times))

    @property
    def examples(self) -> int:
        """How many examples were counted; of steps that were made again only the last time."""
        made = sum(count for life in self.lives for _, count in life.steps)
        workers = len({life.rank for life in self.lives})
        return max(life.reached for life in self.lives) * BATCH * workers or made

    def returns(self, kind: str) -> list[tuple[float, float]]:
        """From each such fault to the first counted push of its replacement: as it was, and without imports."""
        found = []
        for fault in self.faults:
            later = [one for one in self.lives if f"worker-{one.rank}" == fault.victim and one.life > fault.life]
            first = min((one for one in later if one.steps), key=lambda one: one.life, default=None)
            if first is not None and fault.kind == kind:
                back_s = first.steps[0][0] - fault.at
                found.append((back_s, back_s - (first.imported - first.began)))
        return found

    def allowed(self, patience_s: float) -> float:
        """The share of the undisturbed throughput that these faults leave to a system that loses nothing else.

        A silent worker cannot be told from a slow one before the patience is over, and rounds wait as long; where there
        are no rounds, give a patience of 0. A lost worker makes no examples before its replacement has imported all.
        """
        start, over = self._span
        held = away = 0.0
        for fault in self.faults:
            if fault.kind in WORKER_KINDS:
                later = [one for one in self.lives if f"worker-{one.rank}" == fault.victim and one.life > fault.life]
                back = min((one.imported for one in later if one.imported), default=over)
                noticed = fault.at + (0.0 if fault.kind == "kill" else patience_s)
                held += max(0.0, min(noticed, over) - max(fault.at, start))
                away += max(0.0, min(back, over) - max(noticed, start))
        workers = len({life.rank for life in self.lives})
        return 1 - (held + away / workers) / (over - start)

    @property
    def _span(self) -> tuple[float, float]:
        """From when all workers had begun to the last step."""
        over = max(at for life in self.lives for at, _ in life.steps)
        return max(life.steps[0][0] for life in self.lives if life.life == 0 and life.steps), over

    def taking_part(self, patience_s: float) -> float:
        """The share of the time of living processes, from when all had begun, in which they took steps."""
        lived = worked = 0.0
        struck = {(fault.victim, fault.life): fault.at for fault in self.faults}
        start, over = self._span
        for one in self.lives:
            ended = min(struck.get((f"worker-{one.rank}", one.life), over), over)
            times = [at for at, _ in one.steps if start <= at <= ended]
            lived += max(0.0, ended - max(one.began, start))
            if times:
                gaps = zip(times, [*times[1:], ended], strict=True)
                worked += sum(min(after - before, 1.0 + patience_s) for before, after in gaps)
        return worked / lived


class Job:
    """A job at work, and what is done to it. A context: at its end nothing of it is left.

    Args:
        options: what was asked for.
        minutes: how long it would take undisturbed.
        relays: whether each worker's connections pass a relay, so that it can be cut off.
    """

    def __init__(self, options: argparse.Namespace, minutes: float, relays: bool) -> None:
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="storm-"))
        self.faults: list[Fault] = []
        self.began = time.monotonic()
        self.output = (self.folder / "output").open("w+b")
        self._proxies: dict[str, Proxy] = {}
        self._stack = contextlib.ExitStack()
        self._relays = socket.create_server(("127.0.0.1", 0)) if relays else None
        self._lock = threading.Lock()
        rounds = max(1, round(minutes * 60 / options.period))
        epochs = max(1, round(rounds * options.workers * BATCH / EXAMPLES))
        self.command = self._peer_command(rounds) if options.peer else self._command(epochs)
        self.cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if self._relays is not None:
            threading.Thread(target=self._serve_relays, daemon=True).start()
        self.launcher = subprocess.Popen(
            self.command, env=environment(**self._variables()), stdout=self.output, stderr=subprocess.STDOUT
        )

    def _command(self, epochs: int) -> list[str]:
        asked = self.options
        words = ["-n", str(asked.workers), "-s", str(asked.servers), "--on-loss", "continue", "--restart", "9999"]
        words += ["--patience", str(asked.patience), "--grace", "30", "--json-summary", str(self.folder / "summary")]
        words += ["--security", "none"] if self._relays else []
        if asked.snapshots:
            words += ["--snapshots", str(self.folder / "snapshots")]
        elif asked.servers > 1:
            words += ["--replicas", "1"]
        script = [worker_script("storm_worker.py"), str(self.folder), str(epochs), str(asked.period), str(asked.seed)]
        script += [asked.store]
        return [sys.executable, "-m", "kvdist_launch", *words, *asked.option, "--", sys.executable, *script]

    def _peer_command(self, rounds: int) -> list[str]:
        asked = self.options
        words = ["--nproc_per_node", str(asked.workers), "--max-restarts", "100000", "--monitor-interval", "0.1"]
        words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
        script = [worker_script("storm_ddp_worker.py"), str(self.folder), str(rounds), str(asked.period)]
        script += [str(CHECKPOINT_EVERY), str(asked.peer_timeout)]
        return [sys.executable, "-m", "torch.distributed.run", *words, *script]

    def _variables(self) -> dict[str, str]:
        # Small enough a bound that counters are cut into a slice for each server.
        variables = {"OMP_NUM_THREADS": "1", "MXNET_KVSTORE_BIGARRAY_BOUND": "1000"}
        if self.options.snapshots:
            variables |= {"KVDIST_CHECKPOINT_ROOT": str(self.folder), "KVDIST_SNAPSHOT_INTERVAL_S": "1"}
        if self._relays is not None:
            port = self._relays.getsockname()[1]
            variables |= {"KVDIST_TRANSPORT": "tcp", "STORM_RELAY": str(port)}
        return variables

    def _serve_relays(self) -> None:
        """Tell each worker where its own relay listens."""
        assert self._relays is not None
        while True:
            try:
                worker, _ = self._relays.accept()
            except OSError:
                return
            with worker, contextlib.suppress(OSError, ValueError), self._lock:
                rank, port = worker.makefile().readline().split()
                name = f"worker-{rank}"
                if name not in self._proxies:
                    self._proxies[name] = self._stack.enter_context(Proxy(lambda _: None, fronts_in="Roster"))
                worker.sendall(f"{self._proxies[name].front(int(port))}\n".encode())

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*descendants(self.launcher.pid), self.launcher.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.launcher.wait()
        if self._relays is not None:
            self._relays.close()
        self._stack.close()
        self.output.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def lives(self) -> list[Life]:
        """What all processes have noted so far."""
        found = []
        for path in sorted(self.folder.glob("*.*.*")):
            rank, life, _ = path.name.split(".")
            one = Life(int(rank), int(life))
            for line in path.read_text().splitlines():
                what, at, *rest = line.split()
                if what == "step":
                    one.steps.append((float(at), int(rest[0])))
                    one.reached = int(rest[1]) if rest[1:] else 0
                elif what in ("began", "imported", "loaded", "joined", "batch"):
                    setattr(one, what, float(at))
            found.append(one)
        return found

    def processes(self) -> dict[str, tuple[int, int]]:
        """The name of each process → its pid and how often its rank was started before."""
        if self.options.peer:
            return self._peer_processes()
        found = {}
        for process in cluster_of(self.launcher.pid):
            variables = environment_of(process.pid)
            found.setdefault(process.name, (process.pid, int(variables.get("KVDIST_RESTARTS", "0") or 0)))
        return found

    def _peer_processes(self) -> dict[str, tuple[int, int]]:
        found = {}
        for pid in descendants(self.launcher.pid):
            variables = environment_of(pid)
            if "LOCAL_RANK" in variables:
                life = int(variables.get("TORCHELASTIC_RESTART_COUNT", "0"))
                found.setdefault(f"worker-{variables['LOCAL_RANK']}", (pid, life))
        return found

    def taking_part(self) -> list[str]:
        """The workers that have taken a step lately."""
        now = time.monotonic()
        newest: dict[int, Life] = {}
        for one in self.lives():
            newest[one.rank] = max(one, newest.get(one.rank, one), key=lambda life: life.life)
        lately_s = 4 * self.options.period + 1.0
        return [f"worker-{rank}" for rank, one in newest.items() if one.steps and now - one.steps[-1][0] < lately_s]

    def strike(self, kind: str, chance: random.Random, spared: Collection[str] = ()) -> Fault | None:
        """Let a fault happen to somebody but `spared`; None if there is nobody for it now."""
        there = self.processes()
        if kind == "server" and not self._has_copies():
            return None
        if kind in ("server", "scheduler"):
            names = sorted(name for name in there if name.startswith(kind))
        else:
            part = set(self.taking_part()) & there.keys()
            names = sorted(part - set(spared)) if len(part) > self.options.workers // 2 else []
        if not names:
            return None
        victim = chance.choice(names)
        pid, life = there[victim]
        if kind == "cut":
            self._cut_off(victim)
        else:
            try:
                os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
            except ProcessLookupError:
                return None
        self.faults.append(Fault(kind, victim, time.monotonic(), life))
        return self.faults[-1]

    def _has_copies(self) -> bool:
        """Whether every server that was struck is back with what it needs: until then another death ends a job."""
        if self.options.snapshots:
            return any(self.folder.glob("snapshots/step-*/manifest.json"))
        struck, text = sum(fault.kind == "server" for fault in self.faults), self.text()
        back = text.count("is back, and is given a copy")
        return back >= struck and (not struck or text.rfind("the job survives a loss of") > text.rfind("is back, and"))

    def _cut_off(self, victim: str) -> None:
        """Let nothing through to or from a worker for a while; what is dialled meanwhile hangs, too."""
        proxy = self._proxies[victim]
        for up in (True, False):
            proxy.hold(up)
        for up in (True, False):
            threading.Timer(CUT_PATIENCES * self.options.patience, proxy.let_go, (up,)).start()

    def wait(self, seconds: float) -> bool:
        """Whether the job has ended within so long."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.launcher.wait(seconds)
        return self.launcher.returncode is not None

    def wait_for_steps(self, seconds: float = 180.0) -> None:
        """Return when every worker takes part.

        Raises:
            RuntimeError: they do not within `seconds`, or the job ended.
        """
        deadline = time.monotonic() + seconds
        while len(self.taking_part()) < self.options.workers:
            if self.wait(LOOK_S) or time.monotonic() > deadline:
                raise RuntimeError(f"the job did not start:\n{self.text()[-3000:]}")

    def text(self) -> str:
        """What the launcher has printed."""
        return Path(self.output.name).read_text(errors="replace")

    def outcome(self) -> Outcome:
        """How it ended."""
        used, seconds = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - self.began
        busy = used.ru_utime + used.ru_stime - self.cpu_before.ru_utime - self.cpu_before.ru_stime
        share = busy / seconds / len(os.sched_getaffinity(0))
        ends = [json.loads(path.read_text()) for path in self.folder.glob("end-*.json")]
        code = self.launcher.returncode
        return Outcome(code, self.faults, self.lives(), ends, seconds, share, self.text())


def moments(options: argparse.Namespace, kinds: dict[str, int], chance: random.Random) -> Iterator[tuple[float, str]]:
    """The pauses between faults, in seconds, and their kinds."""
    while True:
        pause_s = chance.expovariate(options.faults_per_hour / 3600)
        yield pause_s, chance.choices(list(kinds), list(kinds.values()))[0]


def run(
    options: argparse.Namespace, minutes: float, kinds: dict[str, int], relays: bool, say: Callable[[str], None]
) -> Outcome:
    """One job from its start to its end, with faults of these kinds, through relays or not."""
    chance = random.Random(options.seed)
    with Job(options, minutes, relays) as job:
        job.wait_for_steps()
        over_at = time.monotonic() + 2 * 60 * minutes + 60  # a job that hangs must not hang the benchmark
        for pause_s, kind in moments(options, kinds, chance) if kinds else ():
            if job.wait(pause_s) or time.monotonic() > over_at:
                break
            fault = job.strike(kind, chance)
            if fault is not None:
                say(f"{fault.at - job.began:7.1f} s  {fault.victim} is {WORDS[kind]}")
        if not job.wait(max(0.0, over_at - time.monotonic())):
            say("the job did not come to its end in twice its time and a minute, and is ended")
        return job.outcome()


def survives(options: argparse.Namespace, kind: str) -> bool:
    """Whether a small job comes to its end when one process of this kind is killed."""
    small = argparse.Namespace(**vars(options) | {"workers": 3, "servers": 2, "period": 0.05})
    with Job(small, TRIAL_S / 60, relays=False) as job:
        job.wait_for_steps()
        deadline = time.monotonic() + TRIAL_S
        while job.strike(kind, random.Random(0)) is None:  # a first snapshot may not be written yet
            if job.wait(LOOK_S) or time.monotonic() > deadline:
                raise RuntimeError(f"there is no {kind} to kill:\n{job.text()[-3000:]}")
        return job.wait(90.0) and job.launcher.returncode == 0 and bool(job.outcome().ends)


def kinds_of(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, int]:
    """The kinds of faults that there will be, with their weights."""
    if options.kind:
        return {kind: SHARES[kind] for kind in options.kind}
    kinds = dict(SHARES)
    if options.peer:
        say("left out beside torchrun: servers and a scheduler, which it has not, and networks that are cut")
        return {"kill": SHARES["kill"], "stop": SHARES["stop"] + SHARES["cut"]}
    for kind in ("server", "scheduler"):
        if not survives(options, kind):
            del kinds[kind]
            say(f"left out: killing a {kind} ends a job that leases its data, as a short trial has shown")
    return kinds


def report(options: argparse.Namespace, calm: Outcome, storm: Outcome, say: Callable[[str], None]) -> bool:
    """Print what was found; whether something was wrong."""
    count = Counter(fault.kind for fault in storm.faults)
    told = ", ".join(
        f"{number} × {'worker' if kind in WORKER_KINDS else kind} {WORDS[kind]}" for kind, number in count.items()
    )
    share = storm.per_second / calm.per_second
    say(f"{options.workers} workers, {options.servers} servers, {storm.seconds / 60:.1f} minutes, "
        f"{len(storm.faults)} faults ({told or 'none'})")  # fmt: skip
    say(f"cores busy: {calm.busy:.0%} undisturbed, {storm.busy:.0%} in the storm (at most 50 % for a fair figure)")
    say(f"throughput: {storm.per_second:.0f} examples/s, undisturbed {calm.per_second:.0f}: {share:.1%}")
    if not options.peer:
        allowed = storm.allowed(0.0 if options.store == "dist_async" else options.patience)
        say(
            f"the faults, the patience and the imports of replacements leave {allowed:.1%};"
            f" reached of that: {share / allowed:.1%}"
        )
    part = storm.taking_part(options.patience)
    say(f"share of the living that take part: {part:.1%}; throughput per one that does: {share / part:.1%}")
    for kind in WORKER_KINDS:
        if returns := storm.returns(kind):
            whole, without = zip(*returns, strict=True)
            alone = f"{statistics.median(without):.2f} s (worst {max(without):.2f} s)"
            say(f"worker {WORDS[kind]}: its replacement's first counted push after {statistics.median(whole):.2f} s;"
                f" without its own imports {alone}; median of {len(returns)}")  # fmt: skip
    say(f"manual acts: {int(storm.code != 0)}" + (f" (the job ended with code {storm.code})" if storm.code else ""))
    if options.peer:
        return say_of_peer(storm, say)
    ends = storm.ends
    wrong = not ends or any(end["lost"] or end["twice"] for end in ends) or len({str(end) for end in ends}) > 1
    if ends:
        end = ends[0]
        say(f"examples to count: {end['examples']}; lost {end['lost']}, counted twice {end['twice']}, "
            f"in part {end['in part']}")  # fmt: skip
        say(f"accuracy: {end['accuracy']:.4f}, after the shorter undisturbed run {calm.ends[0]['accuracy']:.4f}")
    if wrong or storm.code:
        say("WRONG: the job failed, or examples were lost, counted twice, or workers disagree; its last lines:")
        say("\n".join(storm.output.splitlines()[-25:]))
    return bool(wrong or storm.code)


def say_of_peer(storm: Outcome, say: Callable[[str], None]) -> bool:
    """What the peer did again; whether it failed."""
    made = sum(count for life in storm.lives for _, count in life.steps)
    say(
        f"examples computed: {made}, of which {made - storm.examples} again, after a checkpoint; {storm.examples} count"
    )
    return bool(storm.code)


def draw(outcome: Outcome, path: Path, say: Callable[[str], None]) -> None:
    """Write a picture of every worker over time: starting, at work, and what struck it."""
    try:
        import matplotlib as mpl
    except ImportError:
        say("no picture, for want of matplotlib: pip install 'kvdist[bench]'")
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    start = min(one.began for one in outcome.lives)
    names = [f"worker-{rank}" for rank in sorted({one.rank for one in outcome.lives})]
    names += sorted({fault.victim for fault in outcome.faults} - set(names))
    figure, axes = plt.subplots(figsize=(14, 1.5 + 0.3 * len(names)))
    struck = {(fault.victim, fault.life): fault.at for fault in outcome.faults}
    for one in outcome.lives:
        row = names.index(f"worker-{one.rank}")
        first, last = (one.steps[0][0], one.steps[-1][0]) if one.steps else (one.imported, one.imported)
        ended = struck.get((f"worker-{one.rank}", one.life), last)
        axes.barh(row, first - one.began, left=one.began - start, color="#c7c7c7", height=0.7)
        axes.barh(row, max(min(last, ended) - first, 0), left=first - start, color="#98df8a", height=0.7)
    for kind, colour in COLOURS.items():
        those = [fault for fault in outcome.faults if fault.kind == kind]
        if those:
            label = f"{kind} ({len(those)})" if kind in ("server", "scheduler") else f"worker: {kind} ({len(those)})"
            rows = [names.index(fault.victim) for fault in those]
            axes.plot([fault.at - start for fault in those], rows, "o", color=colour, label=label, markersize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel("seconds; green: takes part, grey: starts (imports, joins)")
    if outcome.faults:
        axes.legend(
            loc="upper center", bbox_to_anchor=(0.5, -0.5 / figure.get_figheight()), ncols=len(COLOURS), frameon=False
        )
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    say(f"picture: {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--servers", type=int, default=4)
    parser.add_argument("--minutes", type=float, default=30.0, help="of the storm, if nothing happened in it")
    parser.add_argument(
        "--calm-minutes", type=float, default=None, help="undisturbed before; default: a tenth, at least 0.5"
    )
    parser.add_argument("--faults-per-hour", type=float, default=125.0)
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--period", type=float, default=1.0, help="seconds that a worker's step takes at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--store", choices=["dist", "dist_async"], default="dist")
    parser.add_argument("--kind", choices=list(SHARES), action="append", help="only these, without trials")
    parser.add_argument("--peer", choices=["torchrun"], help="the same on torchrun, DDP and checkpoints")
    parser.add_argument(
        "--peer-timeout", type=float, default=10.0, help="of gloo, in seconds; its default is 30 minutes"
    )
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        help="another word for kvdist-launch, such as --option=--verbose",
    )
    parser.add_argument("--picture", type=Path, default=ROOT / "benchmarks" / "results" / "storm.png")
    options = parser.parse_args()
    options.snapshots = False
    end_on_terminate()

    def say(text: str) -> None:
        print(text, flush=True)

    kinds = kinds_of(options, say)
    calm_minutes = max(0.5, options.minutes / 10) if options.calm_minutes is None else options.calm_minutes
    say(f"undisturbed, for {calm_minutes:g} minutes")
    relays = "cut" in kinds  # undisturbed, too: they cost processor time, and everything goes over TCP then
    calm = run(options, calm_minutes, {}, relays, say)
    if calm.code or not calm.lives:
        sys.exit(f"the undisturbed job failed:\n{calm.output[-3000:]}")
    say(f"the storm, {options.faults_per_hour:g} faults an hour")
    storm = run(options, options.minutes, kinds, relays, say)
    failed = report(options, calm, storm, say)
    draw(storm, options.picture, say)
    sys.exit(failed)


if __name__ == "__main__":
    main()
