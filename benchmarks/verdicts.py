"""Is the slow one named? Something is made wrong in jobs of real processes, and what the scheduler says of it is read.

    python benchmarks/verdicts.py                                    # one run of each
    sudo python benchmarks/verdicts.py --runs 20 --at-once 4         # with root, a slow line too, in namespaces
    python benchmarks/verdicts.py --only nothing --balanced-minutes 30

Three workers, nearly always asleep, and two servers. The first thing that is said must be the right one; the time until
then begins with the step from which on it is wrong. Whatever else is said is a false alarm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from cluster import ROOT, WORKERS, Start, end_on_terminate, environment, launch_command, worker_command
from namespaces import PORT, Host, limit, limited_hosts
from peers.environments import Absent

WORKER_COUNT, SERVERS, UNIT_S, LINE_MBIT = 3, 2, 0.3, 10
STEPS, MIDDLE = 70, 30
TIMEOUT_S = 400.0
SENTENCE = re.compile(r"(?:sched │ )?((?:worker|server)-\d+ \([^)]*\) .*)")
"""Of the scheduler, about a member."""
AT_END = " In all the others have waited "


@dataclass(frozen=True)
class Fault:
    """What is wrong, from which step on, and how the right sentence begins."""

    kind: str
    since: int
    right: str


LAST = rf"worker-{WORKER_COUNT - 1} \([^)]*\)"
FAULTS = {
    "slow from the start": Fault("compute", 0, rf"{LAST} computes \S+x slower"),
    "slow from the middle": Fault("compute", MIDDLE, rf"{LAST} has become \S+x slower"),
    "slow data": Fault("data", 0, f"{LAST} waits for its data"),
    "slow line": Fault("line", 0, f"{LAST} waits for its slow line"),
    "slow server": Fault("server", 0, r"server-0 \([^)]*\) computes for"),
    "pause": Fault("pause", MIDDLE, f"{LAST} stood still once"),
    "nothing": Fault("nothing", 0, "nothing is right here"),
}


@dataclass
class Outcome:
    """Of one run: what was said and when, and when each step of all workers was over."""

    said: list[tuple[float, str]]
    steps: list[float]

    def first(self, fault: Fault) -> tuple[bool, float, int]:
        """Whether the first sentence is right, and after how many seconds and rounds it came."""
        if not self.said:
            return False, 0.0, 0
        at, text = self.said[0]
        began = self.steps[max(fault.since - 1, 0)]
        rounds = sum(began < step <= at for step in self.steps)
        return re.match(fault.right, text) is not None, at - began, rounds

    def false_alarms(self, fault: Fault) -> list[str]:
        """What should not have been said."""
        return [text for _, text in self.said if not re.match(fault.right, text)]


def run(fault: Fault, steps: int) -> Outcome:
    """One job.

    Raises:
        Absent: there can be no slow line here.
        RuntimeError: the job failed; the message holds what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="verdicts-") as folder:
        words = [folder, str(UNIT_S), str(steps), str(fault.since), fault.kind]
        command, lines = worker_command("verdict_worker.py", *words), []
        with started(fault, command) as processes:
            heard = processes[0].stderr
            assert heard is not None
            reader = threading.Thread(target=lambda: lines.extend((time.monotonic(), line) for line in heard))
            reader.start()
            deadline = time.monotonic() + TIMEOUT_S + 2 * UNIT_S * steps
            codes = [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]
            reader.join()
        files = [Path(folder, f"{rank}.json") for rank in range(WORKER_COUNT)]
        if not all(map(Path.exists, files)):  # how processes end on a busy machine is not the question
            raise RuntimeError(f"exit codes {codes}:\n{''.join(line for _, line in lines)}")
        made = [json.loads(file.read_text()) for file in files]
    found = [(at, SENTENCE.match(line)) for at, line in lines]
    said = [(at, match[1]) for at, match in found if match and AT_END not in match[1]]
    return Outcome(said, [max(times) for times in zip(*made, strict=True)])


@contextlib.contextmanager
def started(fault: Fault, command: list[str]) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of a job, of which the first one says what the scheduler says; ended with the block."""
    variables = {"OMP_NUM_THREADS": "1", "KVDIST_SERVER_MODULE": "sleeping_rule"}
    variables["PYTHONPATH"] = ":".join(map(str, (ROOT, ROOT / "launcher", WORKERS)))
    with contextlib.ExitStack() as stack:
        if fault.kind == "line":
            hosts = stack.enter_context(limited_hosts(None, WORKER_COUNT))
            limit(hosts[-1].name, hosts[-1].interface, LINE_MBIT)
            starts = by_hand(hosts, command, variables)
        else:
            starts = [Start(launch_command(WORKER_COUNT, SERVERS, command), environment(**variables))]
        processes: list[subprocess.Popen[str]] = []
        for start in starts:
            errors = subprocess.DEVNULL if processes else subprocess.PIPE
            process = subprocess.Popen(
                start.command, env=start.environment, stdout=subprocess.DEVNULL, stderr=errors, text=True
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            processes.append(process)
        yield processes


def by_hand(hosts: list[Host], command: list[str], variables: dict[str, str]) -> list[Start]:
    """A worker in each namespace, and the scheduler and all servers in the first one."""
    shared = variables | {
        "DMLC_PS_ROOT_URI": hosts[0].address,
        "DMLC_PS_ROOT_PORT": str(PORT),
        "DMLC_NUM_WORKER": str(WORKER_COUNT),
        "DMLC_NUM_SERVER": str(SERVERS),
        "KVDIST_SECURITY": "none",
    }
    module = [sys.executable, "-m", "kvdist"]
    roles = [(hosts[0], "scheduler", 0, module), *((hosts[0], "server", rank, module) for rank in range(SERVERS))]
    roles += [(host, "worker", rank, command) for rank, host in enumerate(hosts)]
    return [
        host.inside(
            Start(
                words,
                environment(**shared, DMLC_NODE_HOST=host.address, DMLC_ROLE=role, KVDIST_RANK=str(rank)),
            )
        )
        for host, role, rank, words in roles
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1, help="of each fault (default: 1)")
    parser.add_argument("--at-once", type=int, default=1, help="jobs that run at the same time (default: 1)")
    parser.add_argument("--only", choices=FAULTS, nargs="+", default=list(FAULTS))
    parser.add_argument("--balanced-minutes", type=float, default=0.0, help="one run more in which nothing is wrong")
    options = parser.parse_args()
    end_on_terminate()
    one_line = threading.Lock()

    def made(name: str, steps: int) -> Outcome | Absent:
        with one_line if FAULTS[name].kind == "line" else contextlib.nullcontext():  # names of namespaces are shared
            try:
                outcome = run(FAULTS[name], steps)
            except Absent as error:
                return error
        print(f"{name}: {outcome.said[0][1] if outcome.said else 'nothing was said'}", flush=True)
        return outcome

    longest = round(60 * options.balanced_minutes / UNIT_S)
    works = [(name, STEPS) for name in options.only for _ in range(options.runs)]
    works = [("nothing", longest)] * bool(longest) + works
    with ThreadPoolExecutor(options.at_once) as pool:
        outcomes = list(pool.map(lambda work: made(*work), works))
    print(f"\n{'':22} {'right first':>12} {'seconds':>16} {'rounds':>12}  false alarms")
    for name in dict.fromkeys(name for name, _ in works):
        found = [outcome for (of, _), outcome in zip(works, outcomes, strict=True) if of == name]
        absent = [one for one in found if isinstance(one, Absent)]
        if absent:
            print(f"{name:22} SKIPPED: {absent[0]}")
            continue
        print(row(name, [one for one in found if isinstance(one, Outcome)]), flush=True)
    return 0


def row(name: str, outcomes: list[Outcome]) -> str:
    """A line of the table, and the sentences that should not have been said below it."""
    fault = FAULTS[name]
    right = [(seconds, rounds) for is_right, seconds, rounds in (one.first(fault) for one in outcomes) if is_right]
    alarms = [text for one in outcomes for text in one.false_alarms(fault)]
    rounds_made = sum(len(one.steps) for one in outcomes)
    if fault.kind == "nothing":
        text = f"{name:22} {f'{len(outcomes)} runs':>12} {f'{rounds_made} rounds':>16} {'':12}  {len(alarms)}"
    else:
        columns = [statistics.median(column) if column else 0 for column in zip(*right, strict=True)] or [0, 0]
        most = [max(column) for column in zip(*right, strict=True)] or [0, 0]
        text = (
            f"{name:22} {f'{len(right)} of {len(outcomes)}':>12} {f'{columns[0]:.1f} (≤ {most[0]:.1f})':>16}"
            f" {f'{columns[1]:.0f} (≤ {most[1]:.0f})':>12}  {len(alarms)}"
        )
    return "\n".join([text, *(f"    {alarm}" for alarm in alarms)])


if __name__ == "__main__":
    sys.exit(main())
