"""The digits are learned twice: undisturbed, then while the scheduler, servers and workers are killed at random.

    python examples/faults.py

The launcher starts killed processes again. The scheduler goes on from its journal, workers join the others, who go on
meanwhile, and each server has a copy of what another one has. In both runs the workers learn from as
many batches, so they should know the digits equally well. Needs Linux, where processes are found by name.
"""

import argparse
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from os import kill
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("-n", "--num-workers", type=int, default=3)
parser.add_argument("-s", "--num-servers", type=int, default=2)
parser.add_argument("--epochs", type=int, default=80)
parser.add_argument("--kills", type=int, default=6, help="how many processes are killed")
parser.add_argument("--every", type=float, default=4.0, help="seconds between two kills, on average")
parser.add_argument("--seed", type=int, default=None, help="of the choice of victims and times")
args = parser.parse_args()

WORSE_MAX = 0.02
"""Other batches come in another order, so a few of the 360 held-out images may be told differently."""

KILLABLE = re.compile(r"kv-(scheduler|(worker|server)-[0-9]+)")
SCHEDULER = "scheduler"
BACK, COPIED = "is back, and is given a copy", "the job survives a loss of"
"""What the scheduler says of servers."""
ACCURACY = re.compile(r"Test_acc ([0-9.]+)")
TOOK_OVER = {
    "scheduler": "the next one went on from its journal, while the others trained on",
    "server": "another server went on with its weights, of which it had a copy, and it got copies when it was back",
    "worker": "the others trained on without it, until the next one joined them",
}
began = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - began:6.1f} s  {text}", flush=True)


def processes_of(launcher: int) -> dict[str, int]:
    """The names of the job's processes that have joined the cluster, such as kv-worker-3, each with its process id."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            name = Path(f"/proc/{child}/comm").read_text().strip()
        except OSError:
            continue  # it has just ended
        if KILLABLE.fullmatch(name):
            found[name.removeprefix("kv-")] = int(child)
    return found


class Copies:
    """Whether all weights have a copy, by what the scheduler says: else the next death of a server ends the job."""

    def __init__(self) -> None:
        self.are_whole = True
        self._is_back = True

    def lost(self) -> None:
        self.are_whole = self._is_back = False

    def read(self, line: str) -> None:
        self._is_back = self._is_back or BACK in line
        self.are_whole = self.are_whole or (self._is_back and COPIED in line)


def kill_some(launcher: subprocess.Popen[str], killed: Counter[str], copies: Copies) -> None:
    """Kill processes of a job now and then, as long as it runs."""
    chance = random.Random(args.seed)
    while killed.total() < args.kills and launcher.poll() is None:
        time.sleep(chance.uniform(0.5, 1.5) * args.every)
        there = processes_of(launcher.pid) if launcher.poll() is None else {}
        workers = sorted(name for name in there if name.startswith("worker"))
        servers = sorted(name for name in there if name.startswith("server"))
        if len(workers) < 2 or SCHEDULER not in there:
            continue  # the last worker has nobody who goes on, and one thing at a time
        # First the scheduler, so that it is among them; then servers and workers in turn.
        is_turn = killed.total() % 2 == 1 and copies.are_whole
        name = SCHEDULER if not killed else chance.choice(servers if is_turn else workers)
        if name in servers:
            copies.lost()
        say(f"kill -9 {name} (pid {there[name]})")
        try:
            kill(there[name], signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed[name] += 1


def train(*options: str, killed: Counter[str] | None = None) -> tuple[float, float]:
    """Learn the digits. Returns the accuracy that the workers ended with, and how long it took in seconds."""
    words = [sys.executable, "-m", "kvdist_launch", "-n", str(args.num_workers), "-s", str(args.num_servers), *options]
    words += [sys.executable, str(Path(__file__).with_name("digits_survive.py")), "--epochs", str(args.epochs)]
    start, accuracy, shown = time.monotonic(), 0.0, 0.0
    launcher = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    copies = Copies()
    if killed is not None:
        threading.Thread(target=kill_some, args=(launcher, killed, copies), daemon=True).start()
    assert launcher.stdout is not None
    for line in launcher.stdout:
        copies.read(line)
        found = ACCURACY.search(line)
        if found is None:
            say(line.rstrip())
        else:
            accuracy = float(found.group(1))
            if time.monotonic() - shown > 1.0:  # every worker says so after every epoch
                shown = time.monotonic()
                say(line.rstrip())
    if launcher.wait():
        sys.exit(f"the job failed with exit code {launcher.returncode}")
    return accuracy, time.monotonic() - start


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def main() -> None:
    say(f"first undisturbed: {args.num_workers} workers, {args.num_servers} servers, {args.epochs} epochs")
    undisturbed, quiet_s = train()
    say(f"the same again, and {args.kills} processes are killed on the way")
    killed: Counter[str] = Counter()
    with tempfile.NamedTemporaryFile(suffix=".json") as summary:
        words = ("--on-loss", "continue", "--replicas", "1", "--restart", str(args.kills))
        words += ("--json-summary", summary.name)
        disturbed, storm_s = train(*words, killed=killed)
        lives = Counter(one["node"] for one in json.loads(Path(summary.name).read_text())["processes"])
    print()
    for name in sorted(killed):
        how = TOOK_OVER[name.partition("-")[0]]
        print(f"{name}: killed {times(killed[name])}, and {how}; started {times(lives[name])}")
    print(f"accuracy undisturbed: {undisturbed:.4f}, in {quiet_s:.0f} s")
    print(f"accuracy with {killed.total()} kills: {disturbed:.4f}, in {storm_s:.0f} s")
    if killed.total() < args.kills:
        sys.exit(
            f"training ended after {killed.total()} of {args.kills} kills: take more --epochs, or less for --every"
        )
    if disturbed < undisturbed - WORSE_MAX:
        sys.exit(f"the disturbed run is worse by more than {WORSE_MAX}")


main()
