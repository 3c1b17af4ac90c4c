"""The limping cluster on real processes: unequal machines, one of which is killed and comes back; kvdist beside DDP.

    python benchmarks/limping.py graded --seeds 1          # ten minutes; prints a table
    python benchmarks/limping.py --seeds 5 --write         # all settings; results/limping.json, .md and .png
    python benchmarks/limping.py graded --final --seeds 5  # accuracy after ten epochs, in place of time to an accuracy
    python benchmarks/limping.py graded --neighbours           # what is next to the simulated winners
    python benchmarks/limping.py graded --best 3 --seeds 5 9   # the best three of these, on more seeds
    python benchmarks/limping.py --report                  # the table and the picture of what is there

Every machine is a process that runs `examples/limping/train.py` at its speed, nearly always asleep, so several jobs run
at once as long as the processors are mostly idle, which is measured. All start with what `limping_simulated.py` found
best for them. Time runs from when all processes have begun to when the mean of three looks at the averaged weights is
0.97. A machine is killed by signal 9 at 30 % of the median of the same way to train without a death, and comes back
at 60 %. DDP's ranks are started as torchrun starts them. At a death, and at the return, this script does what an
elastic agent does, without torchrun's seconds of detection and rendezvous: it ends all ranks and starts those that
there are, which go on at the last epoch's checkpoint. The slow network needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cluster import ROOT, Start, cluster_of, descendants, end_on_terminate, environment, free_port, machine
from limping_simulated import RESULTS as TUNED
from limping_simulated import SETTINGS, Setting, problem
from namespaces import BURST_KILOBYTES, PREFIX, Host, ip, kvdist_starts, remove, remove_stale, run_tool

RESULTS = ROOT / "benchmarks" / "results"
SCRIPT = str(ROOT / "examples" / "limping" / "train.py")
UNIT_S = 0.3
SPLIT = 0
"""Of the digits, one that `limping_simulated` uses, too."""
SLOW_KBIT = 1000
"""19 kB take 0.15 s: gradients of a small network on a line as slow for them as 1 Gbit/s is for 20 MB."""
START_S, RUN_S = 240.0, 400.0
NEIGHBOUR_S = 150.0
"""After which a neighbour of a winner has lost, whatever comes: twice what the slowest winner of four grades takes."""
RUNNERS_UP = 3
BEST_SEEDS = 5
"""A configuration of fewer is not taken for the best one."""
EXAMPLES = 13_470
"""Ten epochs: with ``--final``, a run ends after so many."""
METHODS = ("DDP", "DDP, best subset", "alone", "dist", "quota", "quota, local steps")
COLOURS = dict(zip(METHODS, ("#d62728", "#ff7f0e", "#7f7f7f", "#9467bd", "#1f77b4", "#2ca02c"), strict=True))
AIMS = [
    ("chronic, death", "quota, local steps", "DDP", 0.45),
    ("chronic, death", "quota, local steps", "DDP, best subset", 0.75),
    ("chronic, death", "quota", "DDP", 0.60),
    ("chronic, death", "quota", "DDP, best subset", 0.95),
    ("graded", "quota, local steps", "DDP", 0.45),
    ("graded", "quota, local steps", "DDP, best subset", 0.65),
    ("graded", "quota", "DDP", 0.65),
    ("graded", "quota", "DDP, best subset", 0.90),
    ("graded, death", "quota, local steps", "DDP", 0.45),
    ("graded, death", "quota, local steps", "DDP, best subset", 0.65),
    ("slow network", "quota, local steps", "DDP", 0.35),
    ("slow network", "quota, local steps", "alone", 0.75),
    ("spiky", "quota, local steps", "DDP", 0.75),
    ("spiky", "quota", "DDP", 0.85),
    ("equal", "quota, local steps", "DDP", 1.0),
    ("equal", "dist", "DDP", 1.0),
]
"""Setting, method, beside which, and what the ratio of the medians should not be above."""


@dataclass(frozen=True)
class Work:
    """One run that is to be made."""

    setting: str
    method: str
    seed: int
    examples: int = 0
    """After which it ends; 0: when it reaches the target."""
    changes: str = ""
    """What differs from the configuration that the simulation found best: ``"batch=8; outer=[0.7, 0.5]"``."""

    @property
    def machines(self) -> Setting:
        return SETTINGS[self.setting]


def work_of(run: dict[str, Any]) -> Work:
    return Work(run["setting"], run["method"], run["seed"], run.get("examples", 0), run.get("changes", ""))


class TooLongError(RuntimeError):
    """It did not come to its end in time."""


def tuned(work: Work) -> dict[str, Any] | None:
    """The configuration that the simulation found best, with the work's changes; None where it has none."""
    found = json.loads(TUNED.read_text())[work.setting]
    name = "DDP" if work.method == "dist" else work.method
    if name not in found:
        return None
    changes = [change.split("=") for change in work.changes.split("; ") if change]
    return dict(found[name]["winner"]) | {key: json.loads(value) for key, value in changes}


def neighbours(setting: str, method: str) -> list[str]:
    """Changes that are one step of the grid away from the winner, and those that make a runner-up of it.

    On a slow network also pushes of eight bits a number.
    """
    found = json.loads(TUNED.read_text())[setting][method]
    winner = found["winner"]
    size = "quota" if winner["quota"] else "batch"
    steps = [{key: winner[key] * factor} for key in ("learning_rate", size) for factor in (0.5, 2)]
    if winner["quota"] and SETTINGS[setting].exchange == 1.0:
        steps.append({"bits": 8})
    others = [{key: one[key] for key in winner if one[key] != winner[key]} for one in found["neighbours"]]
    whole = (size, "bits")
    told = [
        "; ".join(f"{key}={json.dumps(int(value) if key in whole else rounded(value))}" for key, value in one.items())
        for one in (*others[:RUNNERS_UP], *steps)
    ]
    return list(dict.fromkeys(told))


def rounded(value: Any) -> Any:
    return round(value, 6) if isinstance(value, float) else value


def best_changes(setting: str, method: str, count: int, runs: list[dict[str, Any]]) -> list[str]:
    """The winner, and the best of its neighbours."""
    own = by_changes(runs).get((setting, method), {})
    return list(beside_winner(own))[: count + 1]


def beside_winner(found: dict[str, dict[int, float]]) -> dict[str, tuple[int, float, float]]:
    """Of each configuration how many seeds it shares with the winner, and both medians on those; the best one first."""
    told = {}
    for changes, own in found.items():
        shared = sorted(own.keys() & found[""].keys())
        medians = [statistics.median([one[seed] for seed in shared]) for one in (own, found[""])]
        told[changes] = (len(shared), *medians)
    return dict(sorted(told.items(), key=lambda one: (bool(one[0]), one[1][1] / one[1][2])))


def by_changes(runs: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, dict[int, float]]]:
    """Seconds by setting and method, by changes, and by seed, where there are any changes; of the last run of each."""
    found: dict[tuple[str, str], dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for run in runs:
        if not run.get("examples"):
            found[run["setting"], run["method"]][run.get("changes", "")][run["seed"]] = run["seconds"]
    return {key: group for key, group in found.items() if "" in group and len(group) > 1}


def best_of(tried: dict[str, dict[int, float]]) -> list[float]:
    """The times of the configuration with the lowest median, of the winner and those with enough seeds."""
    enough = [list(own.values()) for changes, own in tried.items() if not changes or len(own) >= BEST_SEEDS]
    return min(enough, key=statistics.median)


class Job:
    """One run at work. A context: at its end nothing of it is left.

    Args:
        work: what it is.
        data: a file with the digits.
        kill_s, back_s: seconds after which the first machine is killed and is back; None: never.
    """

    def __init__(self, work: Work, data: Path, kill_s: float | None, back_s: float | None) -> None:
        config = tuned(work)
        assert config is not None
        self._config, self._work, self._kill_s, self._back_s = config, work, kill_s, back_s
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="limping-")))
        self._output = self._stack.enter_context((self.folder / "output").open("wb"))
        self._speeds = sorted(work.machines.speeds, reverse=True)[: config["machines"]]
        self._started: list[subprocess.Popen[bytes]] = []
        self._is_ddp = work.method.startswith("DDP") or work.method == "alone"
        self._rendezvous = free_port()
        words = [f"--batch={config['batch']}", f"--lr={config['learning_rate']}", f"--momentum={config['momentum']}"]
        words += [f"--unit={UNIT_S}", f"--seed={work.seed}", f"--folder={self.folder}", f"--data={data}"]
        words += ["--folder", str(self.folder), "--speeds", *map(str, self._speeds)]
        words += ["--examples", str(work.examples)]
        words += ["--spiky"] * work.machines.spiky + ["--ddp"] * self._is_ddp
        self._command = [sys.executable, SCRIPT, *words]

    def __enter__(self) -> Job:
        count = len(self._speeds)
        if self._work.machines.exchange == 1.0 and count > 1:
            hosts = self._stack.enter_context(slow_hosts(count, SLOW_KBIT))
            self._start_on(hosts)
        elif self._is_ddp:
            self._start_ddp(range(count))
        else:
            words = ["-n", str(count), "-s", "2", "--on-loss", "continue", "--restart", "9", "--patience", "5"]
            launcher = [sys.executable, "-m", "kvdist_launch", *words, "--", *self._command]
            self._start(Start(launcher, environment(OMP_NUM_THREADS="1", **self._policy())))
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            for pid in [*descendants(process.pid), process.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
        self._stack.close()

    def _policy(self) -> dict[str, str]:
        if self._work.method == "dist":
            return {}
        rate, momentum = self._config["outer"]
        outer = "" if (rate, momentum) == (1.0, 0.0) else f",{rate},{momentum}"
        local = ",local_steps" if self._work.method == "quota, local steps" else ""
        bits = f",bits={self._config['bits']}" if "bits" in self._config else ""
        return {"KVDIST_POLICY": f"quota:{self._config['quota']}{local}{outer}{bits}"}

    def _start(self, start: Start) -> None:
        self._started.append(
            subprocess.Popen(start.command, env=start.environment, stdout=self._output, stderr=self._output)
        )

    def _start_on(self, hosts: list[Host]) -> None:
        if self._is_ddp:
            ranks = self._ranks([hosts[0].address] * len(hosts), hosts[0].interface)
            starts = [host.inside(start) for host, start in zip(hosts, ranks, strict=True)]
        else:
            starts = kvdist_starts(self._command, hosts, **self._policy())
        for start in starts:
            self._start(start)

    def _ranks(self, masters: list[str], interface: str) -> list[Start]:
        """All ranks of DDP, with the variables that torchrun gives them."""
        shared = {"MASTER_PORT": str(self._rendezvous), "WORLD_SIZE": str(len(masters)), "OMP_NUM_THREADS": "1"}
        shared["GLOO_SOCKET_IFNAME"] = interface
        return [
            Start(self._command, environment(**shared, MASTER_ADDR=master, RANK=str(rank), LOCAL_RANK="0"))
            for rank, master in enumerate(masters)
        ]

    def _start_ddp(self, machines: range) -> None:
        """Start all ranks of DDP on these machines, after an end of those that there are, as an elastic agent does."""
        for process in self._started:
            process.kill()
            process.wait()
        self._rendezvous = free_port()
        for start, number in zip(self._ranks(["127.0.0.1"] * len(machines), "lo"), machines, strict=True):
            self._start(Start(start.command, start.environment | {"LIMPING_MACHINE": str(number)}))

    def run(self) -> dict[str, Any]:
        """What came out, when it has reached the target.

        Raises:
            RuntimeError: it has not begun, or not reached the target in time; the message has what it printed.
        """
        began = self._await("began", time.monotonic() + START_S)
        before_s = processor_s(self._pids())
        events = [(self._kill_s, self._kill), (self._back_s, self._bring_back)]
        for after_s, act in events:
            if after_s is not None and self._until(began + after_s):
                act()
        try:
            reached = self._await("reached", began + (NEIGHBOUR_S if self._work.changes else RUN_S))
        except TooLongError:
            if not self._lines("look"):
                raise
            reached = time.monotonic()  # it counts as so long
        had_s = processor_s(self._pids()) - before_s
        looks = [line.split()[1:] for line in self._lines("look")]
        return {
            **asdict(self._work),
            "seconds": round(reached - began, 3), "killed_s": self._kill_s, "back_s": self._back_s,
            "processors": round(max(0.0, had_s) / (reached - began), 3),  # without those that were killed
            "fastest_idle": round(self._idle("busy-0", began, reached), 4),
            "looks": [[round(float(at) - began, 2), int(seen), round(float(right), 4)] for at, seen, right in looks],
        }  # fmt: skip

    def _pids(self) -> list[int]:
        return [pid for one in self._started for pid in (one.pid, *descendants(one.pid))]

    def _lines(self, word: str) -> list[str]:
        looks = self.folder / "looks"
        return [line for line in looks.read_text().splitlines() if line.startswith(word)] if looks.exists() else []

    def _idle(self, name: str, began: float, ended: float) -> float:
        """The share of this time in which a machine computed nothing, by what it noted in this file."""
        spans = [[float(word) for word in line.split()] for line in (self.folder / name).read_text().splitlines()]
        return 1 - sum(max(0.0, min(end, ended) - max(start, began)) for start, end in spans) / (ended - began)

    def _until(self, when: float) -> bool:
        """Wait; whether there is still something to be done then."""
        while time.monotonic() < when:
            if self._lines("reached"):
                return False
            time.sleep(0.02)
        return True

    def _await(self, word: str, deadline: float) -> float:
        while not (found := self._lines(word)):
            ended = next((one for one in self._started if one.poll() not in (None, -signal.SIGKILL)), None)
            is_late = time.monotonic() > deadline
            if ended is not None or is_late:
                said = (self.folder / "output").read_text(errors="replace")[-6000:]
                looks = ", ".join(self._lines("look")[-3:]) or "none"
                kind = TooLongError if is_late and ended is None else RuntimeError
                raise kind(f"{self._work}: not {word}; {ended and ended.args}; last looks: {looks}\n{said}")
            time.sleep(0.1)
        return float(found[0].split()[1])

    def _kill(self) -> None:
        if self._is_ddp:
            self._start_ddp(range(1, len(self._speeds)))
            return
        victims = [one.pid for one in cluster_of(self._started[0].pid) if one.name == "worker-0"]
        assert victims, f"{self._work}: nobody to kill"
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    def _bring_back(self) -> None:
        if self._is_ddp:
            self._start_ddp(range(len(self._speeds)))
        (self.folder / "back").touch()


BRIDGES = itertools.count()


@contextlib.contextmanager
def slow_hosts(count: int, kbit: int) -> Iterator[list[Host]]:
    """Namespaces that are joined by a bridge, with cards of `kbit` each way; gone when the block ends."""
    number = next(BRIDGES)
    bridge = f"limp{os.getpid() % 10000}-{number}"
    hosts = [Host(f"{PREFIX}{os.getpid()}-{number}-{i}", f"10.78.0.{i + 1}", "line") for i in range(count)]
    limit = ["rate", f"{kbit}kbit", "burst", f"{min(BURST_KILOBYTES, 4)}kb", "latency", "5000ms"]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for i, host in enumerate(hosts):
            outer = f"{bridge}-{i}"
            ip("netns", "add", host.name)
            ip("link", "add", outer, "type", "veth", "peer", "name", host.interface, "netns", host.name)
            ip("link", "set", outer, "master", bridge, "up")
            ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                ip("-n", host.name, "link", "set", interface, "up")
            run_tool(["tc", "qdisc", "add", "dev", outer, "root", "tbf", *limit])
            run_tool(["tc", "-n", host.name, "qdisc", "add", "dev", host.interface, "root", "tbf", *limit])
        yield hosts
    finally:
        remove([host.name for host in hosts])
        subprocess.run(["ip", "link", "delete", bridge], capture_output=True)


# Many runs.


def processor_s(pids: list[int]) -> float:
    """What these processes have had of the processors."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def save_digits(path: Path) -> None:
    """So that workers need no scikit-learn, whose import takes longer than a kvdist worker's own."""
    import torch

    one = problem(SPLIT)
    parts = (one.train_x, one.train_y, one.test_x, one.test_y)
    torch.save(tuple(torch.from_numpy(part) for part in parts), path)


def measure(
    works: list[Work], at_once: int, before: list[dict[str, Any]], runs: list[dict[str, Any]], keep: Any
) -> None:
    """Make these runs, several at once, and append to `runs` what comes out; `before` says when a machine dies."""
    lock = threading.Lock()
    medians = {
        (setting, method): statistics.median(run["seconds"] for run in group)
        for (setting, method), group in grouped(to_target(before)).items()
    }

    def one(work: Work) -> None:
        calm = medians.get((work.machines.calm, work.method))
        times = (None, None) if not work.machines.calm else (0.3 * calm, 0.6 * calm) if calm else None
        if times is None:
            print(f"left out: {work}, as it has not been run without a death", flush=True)
            return
        try:
            with Job(work, data, *times) as job:
                found = job.run()
        except RuntimeError as error:
            print(f"FAILED: {error}", flush=True)
            return
        print(f"{work.setting:15} {work.method:20} {work.seed:3} {found['seconds']:6.1f} s, {found['processors']:.2f}"
              f" processors {work.changes}", flush=True)  # fmt: skip
        with lock:
            runs[:] = [run for run in runs if work_of(run) != work] + [found]
            keep()

    with tempfile.TemporaryDirectory(prefix="limping-") as folder, ThreadPoolExecutor(at_once) as pool:
        data = Path(folder, "digits.pt")
        save_digits(data)
        list(pool.map(one, works))


def to_target(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that ended at the target, and not after a number of examples, with the simulated winners."""
    return [run for run in runs if not run.get("examples") and not run.get("changes")]


def grouped(runs: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    groups = defaultdict(list)
    for run in runs:
        groups[run["setting"], run["method"]].append(run)
    return groups


# What came out.


def ratio(ours: list[float], theirs: list[float], chance: random.Random) -> tuple[float, float, float]:
    """Of the medians, with the 5 % and the 95 % of a bootstrap."""
    found = sorted(
        statistics.median(chance.choices(ours, k=len(ours))) / statistics.median(chance.choices(theirs, k=len(theirs)))
        for _ in range(2000)
    )
    return statistics.median(ours) / statistics.median(theirs), found[100], found[1900]


def report(runs: list[dict[str, Any]], neighbouring: list[dict[str, Any]]) -> str:
    """Tables of medians and of what was aimed at.

    Args:
        neighbouring: runs of neighbours of the winners, and of the winners beside them.
    """
    chance = random.Random(0)
    simulated = json.loads(TUNED.read_text())
    groups = grouped(to_target(runs))
    times = {key: [run["seconds"] for run in group] for key, group in groups.items()}

    def beside(setting: str, method: str, other: str) -> str:
        if method == other or (setting, other) not in times:
            return ""
        middle, low, high = ratio(times[setting, method], times[setting, other], chance)
        return f"{middle:.2f} [{low:.2f}, {high:.2f}]"

    rows = [
        ["setting", "method", "seeds", "median s", "least–most", "of DDP", "of DDP's best subset", "simulated of DDP",
         "fastest idle"]
    ]  # fmt: skip
    for setting, method in itertools.product(SETTINGS, METHODS):
        own = times.get((setting, method))
        if not own:
            continue
        there = simulated.get(setting, {})
        model = f"{there[method]['median'] / there['DDP']['median']:.2f}" if method in there else ""
        span = f"{min(own):.1f}–{max(own):.1f}"
        against = [beside(setting, method, other) for other in METHODS[:2]]
        calm = [run["fastest_idle"] for run in groups[setting, method] if "fastest_idle" in run and not run["killed_s"]]
        idle = f"{statistics.median(calm):.1%}" if calm else ""
        rows.append([setting, method, str(len(own)), f"{statistics.median(own):.1f}", span, *against, model, idle])
    best = {key: best_of(tried) for key, tried in by_changes([*neighbouring, *runs]).items()}
    aims = [["setting", "method", "beside", "aim", "ratio [5 %, 95 %]", "reached", "of the best of both", "reached"]]
    for setting, method, other, aim in AIMS:
        if (setting, method) in times and (setting, other) in times:
            told = beside(setting, method, other)
            alike = {} if method == "dist" else best  # it has DDP's configuration
            ours, theirs = (alike.get((setting, one), times[setting, one]) for one in (method, other))
            middle, low, high = ratio(ours, theirs, chance)
            verdicts = ["yes" if one <= aim else "no" for one in (float(told.split()[0]), round(middle, 2))]
            both = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            aims.append([setting, method, other, f"≤ {aim}", told, verdicts[0], both, verdicts[1]])
    for method, aim in (("quota, local steps", 1.2), ("quota", 1.25), ("DDP", None), ("DDP, best subset", None)):
        calm, death = times.get(("chronic", method)), times.get(("chronic, death", method))
        if calm and death:
            middle, low, high = ratio(death, calm, chance)
            verdict = "" if aim is None else "yes" if middle <= aim else "no"
            told = f"{middle:.2f} [{low:.2f}, {high:.2f}]"
            aims.append(["chronic, death", method, "itself, calm", f"≤ {aim}" if aim else "", told, verdict, "", ""])
    finals = [["setting", "method", "seeds", "accuracy", "least–most", "points from dist"]]
    ends = {
        key: [100 * statistics.fmean(look[2] for look in run["looks"][-3:]) for run in group]
        for key, group in grouped([run for run in runs if run.get("examples")]).items()
    }
    for (setting, method), own in sorted(ends.items()):
        middle, span = statistics.median(own), f"{min(own):.2f}–{max(own):.2f}"
        others = ends.get((setting, "dist")) if method != "dist" else None
        apart = f"{middle - statistics.median(others):+.2f}" if others else ""
        finals.append([setting, method, str(len(own)), f"{middle:.2f} %", span, apart])
    changed = [["setting", "method", "changes of the winner", "seeds", "median s", "winner's", "ratio"]]
    for (setting, method), tried in by_changes([*runs, *neighbouring]).items():
        for changes, (seeds, own_s, winner_s) in list(beside_winner(tried).items())[1:]:
            medians = [f"{own_s:.1f}", f"{winner_s:.1f}", f"{own_s / winner_s:.2f}"]
            changed.append([setting, method, changes, str(seeds), *medians])
    had = sorted(run["processors"] for run in runs)
    lines = [
        "# The limping cluster",
        "",
        "Made by `python benchmarks/limping.py --write` and `--report`. Seconds until the averaged weights have an",
        f"accuracy of 0.97, of paced processes on one machine: a unit is {UNIT_S} s. Ratios are of medians, with the",
        f"5 % and 95 % of a bootstrap. A run that has not ended after {RUN_S:.0f} s counts as so long.",
        f"A job kept {statistics.median(had):.2f} processors busy, at most {had[-1]:.2f}.",
        "",
        *table(rows),
        "",
        "## Beside what was aimed at",
        "",
        "First of what the simulation found best for each, and then of what is best here: the winner, or one of its",
        f"neighbours of at least {BEST_SEEDS} seeds. The lowest of several medians flatters, on both sides.",
        "",
        *table(aims),
        "",
        "## What is next to the simulated winners",
        "",
        "Medians of the seeds on which both have been measured, the winner again with its best neighbours. A run that",
        f"has not ended after {NEIGHBOUR_S:.0f} s counts as so long.",
        "",
        *table(changed),
        "",
        f"## After {EXAMPLES:,} examples",
        "",
        "The mean of the last three looks.",
        "",
        *table(finals),
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def table(rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(one)} |" for one in (rows[0], ["---"] * len(rows[0]), *rows[1:])]


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over time: a thin line for each seed, a thick one for their median."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no picture, for want of matplotlib: pip install 'kvdist[bench]'")
        return
    mpl.use("Agg")
    import matplotlib.pyplot as plt
    import numpy as np

    groups = grouped(to_target(runs))
    settings = [name for name in SETTINGS if any(setting == name for setting, _ in groups)]
    rows = (len(settings) + 1) // 2
    figure, axes = plt.subplots(rows, 2, figsize=(15, 4.2 * rows), squeeze=False)
    for name, panel in zip(settings, axes.flat, strict=False):
        for method in METHODS:
            group = groups.get((name, method), [])
            if not group:
                continue
            longest = max(run["seconds"] for run in group)
            grid, lines = np.linspace(0, longest, 300), []
            for run in group:
                times, accuracies = (
                    [0.0, *(look[0] for look in run["looks"])],
                    [0.1, *(look[2] for look in run["looks"])],
                )
                lines.append(np.interp(grid, times, accuracies))
                panel.plot(times, accuracies, color=COLOURS[method], linewidth=0.6, alpha=0.45)
            median_s = statistics.median(run["seconds"] for run in group)
            is_before = grid <= median_s
            label = f"{method}: {median_s:.1f} s"
            panel.plot(grid[is_before], np.median(lines, axis=0)[is_before], color=COLOURS[method], linewidth=2.6,
                       label=label)  # fmt: skip
            panel.axvline(median_s, color=COLOURS[method], linewidth=1.0, linestyle=":")
        machines = SETTINGS[name]
        what = ", ".join(f"{speed:g}" for speed in machines.speeds)
        panel.axhline(0.97, color="black", linewidth=0.8)
        panel.set(title=f"{name} (speeds {what})", ylim=(0.85, 0.99), xlim=(0, None), xlabel="seconds")
        panel.legend(loc="lower right", title="median until 0.97 (mean of 3 looks)")
    for panel in axes.flat[len(settings) :]:
        panel.axis("off")
    axes[0][0].set_ylabel("accuracy of the averaged weights")
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    print(f"picture: {path}")


def variants(setting: str, method: str, options: argparse.Namespace, runs: list[dict[str, Any]]) -> list[str]:
    """Which configurations of a method to run, by their changes."""
    if options.best:
        return best_changes(setting, method, options.best, runs)
    return neighbours(setting, method) if options.neighbours else [""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="SETTING", help=f"of {', '.join(SETTINGS)}; default: all")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[5], help="how many, or first and last")
    parser.add_argument("--at-once", type=int, default=2, help="jobs that run at the same time (default: 2)")
    parser.add_argument("--neighbours", action="store_true", help="what is next to the simulated winners")
    parser.add_argument("--best", type=int, metavar="N", help="the winners, and their N best neighbours that are kept")
    parser.add_argument("--final", action="store_true", help=f"end after {EXAMPLES} examples, and compare accuracies")
    parser.add_argument(
        "--write", action="store_true", help="add to results/limping*.json, and write table and picture"
    )
    parser.add_argument("--report", action="store_true", help="run nothing; write table and picture of what is there")
    options = parser.parse_args()
    end_on_terminate()
    kept, is_beside = options.write or options.report, options.neighbours or bool(options.best)
    paths = (RESULTS / "limping.json", RESULTS / "limping_neighbours.json")
    found = [json.loads(path.read_text())["runs"] if (kept or is_beside) and path.exists() else [] for path in paths]
    path, runs = paths[is_beside], found[is_beside]

    def keep() -> None:
        if options.write:
            if path.exists():  # another one may measure other settings
                known = {work_of(run) for run in runs}
                there = json.loads(path.read_text())["runs"]
                runs.extend(run for run in there if work_of(run) not in known)
            lines = ",\n".join(json.dumps(run) for run in runs)
            path.write_text(f'{{"machine": {json.dumps(machine())},\n"unit_s": {UNIT_S},\n"runs": [\n{lines}\n]}}\n')

    settings = options.settings or list(SETTINGS)
    if not options.report:
        if any(SETTINGS[name].exchange == 1.0 for name in settings):
            remove_stale()
        first, last = (0, options.seeds[0] - 1) if len(options.seeds) == 1 else options.seeds
        for name in settings:
            examples = EXAMPLES if options.final else 0
            works = [
                Work(name, method, seed, examples, changes)
                for seed in range(first, last + 1)
                for method in options.methods
                for changes in variants(name, method, options, [*found[0], *found[1]])
            ]
            works = [
                work for work in works
                if tuned(work) and (work.method != "dist" or examples or work.setting == "equal")
            ]  # fmt: skip
            measure(works, options.at_once, found[0], runs, keep)
    text = report(*found)
    print(text)
    if kept:
        (RESULTS / "limping.md").write_text(text)
        draw(found[0], RESULTS / "limping.png")


if __name__ == "__main__":
    main()
