"""How long the rest of a cluster takes to notice that one of its processes was killed, and to end.

    python benchmarks/failure.py --repeats 20

Each repeat starts two workers, two servers and a scheduler, lets them train, kills one with signal 9 and takes the
time until the last surviving worker has raised, and until every process of the job is gone. Every exception must name
the victim, and so must the launcher's last line.
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from cluster import Process, cluster_of
from steady import SteadyCluster, steady_cluster

WORKERS = SERVERS = 2
VICTIMS = ("worker-1", "server-1", "scheduler")
TIMEOUT_S = 30.0
TARGET_S = 1.0


@dataclass(frozen=True)
class Outcome:
    """One killing."""

    raised_s: float
    ended_s: float
    faults: tuple[str, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures how soon a killed process is noticed.")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--victim", choices=VICTIMS, action="append", help="may be repeated; default: each of them")
    options = parser.parse_args()
    victims = options.victim or VICTIMS
    outcomes: dict[str, list[Outcome]] = {victim: [] for victim in victims}
    for _ in range(options.repeats):
        for victim in victims:
            with steady_cluster(WORKERS, SERVERS, "10x10000") as cluster:
                outcomes[victim].append(kill(cluster, victim))
    failed = [report(victim, outcomes[victim]) for victim in victims]
    sys.exit(any(failed))


def kill(cluster: SteadyCluster, victim: str) -> Outcome:
    """Kill one process and watch the others."""
    processes = {process.name: process for process in cluster_of(cluster.launcher.pid)}
    target = processes.pop(victim)
    others = [*processes.values(), Process("kvdist-launch", cluster.launcher.pid)]
    watched = {os.pidfd_open(process.pid): process.name for process in others}
    killed_at = time.monotonic()
    os.kill(target.pid, signal.SIGKILL)
    left = wait_for_ends(watched, killed_at + TIMEOUT_S)
    ended_s = time.monotonic() - killed_at
    survivors = [name for name in processes if name.startswith("worker")]
    raised = read_raised(cluster, len(survivors))
    faults = [f"{name} is still there after {TIMEOUT_S} s" for name in left]
    faults += [f"a worker was told: {event['message']}" for event in raised if victim not in event["message"]]
    if len(raised) < len(survivors):
        faults.append(f"only {len(raised)} of {len(survivors)} workers raised")
    if "kvdist-launch" not in left:
        faults += launcher_faults(cluster, victim)
    last_raised = max((event["at"] for event in raised), default=float("inf"))
    return Outcome(last_raised - killed_at, ended_s, tuple(faults))


def launcher_faults(cluster: SteadyCluster, victim: str) -> list[str]:
    """What is wrong with how the launcher ended."""
    last_line = cluster.log.read_text(errors="replace").strip().rpartition("\n")[2]
    faults = [] if cluster.launcher.wait() else ["the launcher ended with code 0"]
    return faults if victim in last_line else [*faults, f"the launcher's last line does not name it: {last_line}"]


def wait_for_ends(watched: dict[int, str], deadline: float) -> list[str]:
    """Wait for the processes behind these descriptors to end, close them, and return who has not ended."""
    left = dict(watched)
    try:
        while left and (ready := select.select(list(left), [], [], max(0.0, deadline - time.monotonic()))[0]):
            for descriptor in ready:
                del left[descriptor]
    finally:
        for descriptor in watched:
            os.close(descriptor)
    return list(left.values())


def read_raised(cluster: SteadyCluster, expected: int) -> list[dict[str, Any]]:
    """What the workers told of their end; they are gone, so it is there or never will be."""
    raised: list[dict[str, Any]] = []
    while len(raised) < expected and (told := cluster.told(time.monotonic())):
        raised += [event for event in told if event["event"] == "raised"]
    return raised


def report(victim: str, outcomes: list[Outcome]) -> bool:
    """Print one victim's line; whether something was wrong."""
    raised, ended = [outcome.raised_s for outcome in outcomes], [outcome.ended_s for outcome in outcomes]
    verdict = "met" if statistics.median(raised) <= TARGET_S else "MISSED"
    print(
        f"kill -9 {victim}, {len(outcomes)} times: "
        f"last worker raised after {statistics.median(raised):.3f} s (worst {max(raised):.3f} s), target {TARGET_S} s "
        f"{verdict}; all gone after {statistics.median(ended):.3f} s (worst {max(ended):.3f} s); medians",
        flush=True,
    )
    faults = sorted({fault for outcome in outcomes for fault in outcome.faults})
    for fault in faults:
        print(f"  wrong: {fault}")
    return bool(faults)


if __name__ == "__main__":
    main()
