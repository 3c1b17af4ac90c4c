"""Large values that stay in shared memory: the same bits as over sockets, and nothing of it outlives its processes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.processes import PROGRAMS

MIB = 1 << 20
FULL = "no more shared memory, so values are sent between processes of this host"
SETTINGS = {
    "shared memory": {},
    "tcp": {"KVDIST_TRANSPORT": "tcp"},
    "one worker by tcp": {"TCP_RANK": "1", "KVDIST_SECURITY": "none"},
    "no room": {"KVDIST_SHARED_BYTES_MAX": "8192"},
    "little room": {"KVDIST_SHARED_BYTES_MAX": "12000000"},
}


def run(job, workers, servers, *words, **variables):
    """Launch a scenario of `programs/shared.py`, see that every worker has checked it; what the workers printed."""
    launcher = job.launch(workers, servers, "shared.py", *words, **variables)
    job.succeed()
    checked = sorted(line.split(" │ ", 1)[1] for line in launcher.lines_with("checked on"))
    assert checked == [f"checked on {rank} of {workers}" for rank in range(workers)], job.transcript()
    return [line.split(" │ ", 1)[1] for line in launcher.worker_lines()]


def digests(lines):
    return [line for line in lines if line.startswith("digest ")]


@pytest.mark.slow_cases("little room", "shared memory")
@pytest.mark.parametrize(
    "setting",
    [
        pytest.param(one, marks=[pytest.mark.slow] if one in ("tcp", "one worker by tcp", "no room") else [])
        for one in SETTINGS
    ],
)
def test_integer_gradients_give_exact_weights_by(job, setting):
    lines = run(job, 3, 2, "exact", **SETTINGS[setting])
    used = sorted(line for line in lines if " mapped " in line)
    mapped = [int(line.split(" mapped ")[1].split()[0]) for line in used]
    views = [int(line.split("was shown ")[1].split()[0]) for line in used]
    warned = [line.split(":")[0].split(" │")[0] for line in job.processes["launcher"].lines_with(FULL)]
    assert len(warned) == len(set(warned)), "one line from each process at most"
    if setting == "shared memory":
        assert min(mapped) > 0 and min(views) > 0 and not warned, used
    elif setting == "one worker by tcp":
        assert mapped[1] == views[1] == 0 and min(mapped[::2]) > 0 and min(views[::2]) > 0, used
    elif setting == "little room":
        assert max(mapped) > 0 and warned, used
    else:
        assert max(mapped) == max(views) == 0, used
        assert len(warned) == (5 if setting == "no room" else 0), job.transcript()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_bits_of_training_are_the_same_however_they_travelled(job):
    found = {setting: digests(run(job, 3, 2, "trained", **SETTINGS[setting])) for setting in SETTINGS}
    assert all(len(lines) == 3 for lines in found.values())
    assert len({line for lines in found.values() for line in lines}) == 1, found


@pytest.mark.slow_cases("little room", "tcp")
@pytest.mark.parametrize("setting", ["shared memory", "little room", "tcp"])
def test_an_array_is_its_callers_again_when_push_returns_or_its_future_resolves(job, setting):
    run(job, 2, 2, "callers_memory", **SETTINGS[setting])


@pytest.mark.slow
def test_a_view_stays_as_it_is_until_the_next_one(job):
    run(job, 3, 2, "views")


def test_a_view_stays_as_it_is_while_others_make_versions(job):
    run(job, 3, 2, "views_out_of_step")


@pytest.mark.slow_cases("async-0")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3, 4, 5))])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_kill_9_at_any_moment_of_large_transfers_leaves_no_wrong_number(job, way, seed):
    chosen = random.Random(f"{way} {seed}")
    victim = chosen.choice(["worker-1", "worker-0"]) if seed % 2 else chosen.choice(["server-0", "server-1"])
    job.cluster(3, 2, "shared.py", "endless", way)
    for rank in range(3):
        job.line(f"worker-{rank}", "going")
    time.sleep(chosen.uniform(0.0, 0.5))  # the moment is the fault
    assert job.pid_of(victim) in job.marked(), job.transcript()
    before = job.ticks()
    job.kill(victim)
    survivors = {name: process for name, process in job.processes.items() if name != victim}
    job.wait(lambda: all("was lost" in one.text for one in survivors.values()), "they all notice")
    job.finish()
    job.assert_soon(before)
    assert job.processes[victim].code == -signal.SIGKILL, "the fault happened"
    for name, process in survivors.items():
        assert process.code and f"{victim} (" in process.text and "AssertionError" not in process.text, job.transcript()
        if name.startswith("worker"):
            assert process.lines_with(f"lost {victim!r}: "), job.transcript()
    assert not [name for name in os.listdir("/dev/shm") if "kvdist-arena" in name]  # others may have secrets there


@pytest.mark.slow_cases("sync")
@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_worker_leaves_with_a_push_under_way_and_the_others_go_on(job, how):
    launcher = job.launch(3, 2, "shared.py", "leaves", how)
    job.succeed()
    assert len(launcher.lines_with("left")) == 1 and len(launcher.lines_with("checked on")) == 2, job.transcript()


def test_out_of_step_the_others_go_on_while_a_worker_stands_still(job, tmp_path):
    flag = tmp_path / "enough"
    launcher = job.launch(3, 2, "shared.py", "paced", "dist_async", str(flag))
    for rank in range(3):
        job.line("launcher", f"worker {rank} round", count=2)
    job.kill("worker-2", signal.SIGSTOP)
    counts = {rank: len(launcher.lines_with(f"worker {rank} round")) for rank in (0, 1)}
    for rank, count in counts.items():
        job.line("launcher", f"worker {rank} round", count=count + 10)  # 50 rounds of 4 MB
    stood = len(launcher.lines_with("worker 2 round"))
    job.kill("worker-2", signal.SIGCONT)
    job.line("launcher", "worker 2 round", count=stood + 1)
    flag.touch()
    job.succeed()
    assert len(launcher.lines_with("checked on")) == 3


def test_in_step_the_others_wait_for_a_worker_that_stands_still(job, tmp_path):
    flag = tmp_path / "enough"
    launcher = job.launch(3, 2, "shared.py", "paced", "dist", str(flag), KVDIST_EXPLAIN_AFTER_S="0.5")
    job.line("launcher", "worker 2 round", count=2)
    job.kill("worker-2", signal.SIGSTOP)
    for rank in (0, 1):
        # The first may be of a wait before. At the second, half a second later, all has come that was printed before.
        text = f"worker-{rank}: waiting "
        job.line("launcher", text, count=len(launcher.lines_with(text)) + 2)
    counts = {rank: len(launcher.lines_with(f"worker {rank} round")) for rank in range(3)}
    assert max(counts.values()) - min(counts.values()) <= 1, counts
    job.kill("worker-2", signal.SIGCONT)
    for rank, count in counts.items():
        job.line("launcher", f"worker {rank} round", count=count + 2)
    flag.touch()
    job.succeed()
    assert len(launcher.lines_with("checked on")) == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("way", ["lists", "made again", "views"])
def test_memory_does_not_grow_with_steps(job, tmp_path, way):
    fifo, growth_max = tmp_path / "fifo", 8 * MIB
    for rank in range(2):
        os.mkfifo(f"{fifo}.{rank}")
    job.launch(2, 1, "shared.py", "steady", way, str(fifo), "50", "300")
    samples = []
    for step in (50, 300):
        for rank in range(2):
            job.line("launcher", f"worker {rank} at step {step}", timeout_s=200)
        samples.append({name: memory_of(pid) for name, pid in job.children().items()})
        for rank in range(2):
            Path(f"{fifo}.{rank}").open("wb").close()
    job.succeed()
    print(way, *samples, sep="\n")
    for name, after in samples[1].items():
        growth = {kind: nbytes - samples[0][name][kind] for kind, nbytes in after.items()}
        assert max(growth.values()) < growth_max, f"{name} grew by {growth} in 250 steps: {samples}"


def memory_of(pid):
    """Bytes of a process by kind. A page that is shared counts in each process that has it mapped."""
    lines = [line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines()]
    return {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "RssShmem:", "RssAnon:")}


def test_children_that_are_forked_meanwhile_disturb_nothing(job):
    run(job, 2, 2, "forks")


def test_after_close_nothing_of_the_stores_memory_stays_mapped(job):
    launcher = job.launch(2, 2, "shared.py", "closed")
    job.succeed()
    assert len(launcher.lines_with("mapped by peers 0, views 0, own 0")) == 2, job.transcript()
    assert len(launcher.lines_with("open 0")) == 2, job.transcript()


@pytest.mark.slow_cases("with the proc of outside")
@pytest.mark.parametrize(
    "options",
    [pytest.param(["--mount-proc"], marks=pytest.mark.slow), []],
    ids=["with its own proc", "with the proc of outside"],
)
def test_a_worker_with_other_process_numbers_sends_its_values(job, options):
    unshare = ["unshare", "--pid", "--fork", "--kill-child", *options]
    if not succeeds([*unshare, "true"]):
        pytest.skip(f"this system or user cannot do `{' '.join(unshare)}`")
    for name in ("scheduler", "server-0", "server-1", "worker-0"):
        job.node(name, 2, 2, "shared.py", "exact")
    job.node("worker-1", 2, 2, *unshare, sys.executable, str(PROGRAMS / "shared.py"), "exact")
    job.succeed()
    text = {rank: job.processes[f"worker-{rank}"].text for rank in range(2)}
    assert "mapped 0 segments and was shown 0 views" in text[1], job.transcript()
    assert "checked on 0 of 2" in text[0] and "mapped 0 segments" not in text[0], job.transcript()


def succeeds(command):
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        return False
