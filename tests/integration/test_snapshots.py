"""Servers are killed and started again, and all go on from the newest snapshot with exact weights."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kvdist.checkpoint.format import read_manifest, write_manifest
from tests.integration.processes import PROGRAMS
from tests.integration.test_leases import found

OPTIONS = ["--on-loss", "continue", "--restart", "3"]
EVERY = {"KVDIST_SNAPSHOT_INTERVAL_S": "0.02"}
STEPS, PAUSE, WORKERS = 40, 20, 2
FINAL = STEPS * (STEPS + 1) // 2 * sum(range(WORKERS + 1))

HELD = """
import os, pathlib, time
from kvdist import kv
kv.register_command(1)(lambda head, body, rank: None)
while os.environ.get("KVDIST_RESTARTS", "0") != "0" and not pathlib.Path(__file__).with_name("dead").exists():
    time.sleep(0.01)
"""
"""Servers that are started again wait until the worker is dead."""


FULL = """
from pathlib import Path
from kvdist import kv
from kvdist.checkpoint import folders
kv.register_command(1)(lambda head, body, rank: None)
written = folders.write_slices
def write_slices(*arguments):
    if Path(__file__).with_name("full").exists():
        with open(Path(__file__).with_name("tries"), "a") as tries:
            tries.write("1")
        raise OSError(28, "No space left on device")
    return written(*arguments)
folders.write_slices = write_slices
"""
"""Servers cannot write while the file "full" is there, so no snapshot is newer than those that are."""


def flipped(content: bytes) -> bytes:
    bit = random.randrange(8 * len(content))
    changed = content[bit // 8] ^ 1 << bit % 8
    return content[: bit // 8] + bytes([changed]) + content[bit // 8 + 1 :]


def cut_off(content: bytes) -> bytes:
    return content[: random.randrange(len(content))]


def launched(job, tmp_path, *more, options=(), workers=WORKERS):
    """A job whose worker 0 waits in the middle, when there is a snapshot."""
    root = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    options = [*OPTIONS, "--snapshots", str(tmp_path / "snapshots"), *options]
    launcher = job.launch(workers, 2, "snapshots.py", str(tmp_path), *more, options=options, **EVERY, **root)
    job.line("launcher", "waits in the middle")
    job.wait(lambda: any((tmp_path / "snapshots").glob("step-*/manifest.json")), "there is a snapshot")
    return launcher


@pytest.mark.parametrize(
    ("victims", "program"),
    [
        pytest.param(["server-1"], (), marks=pytest.mark.slow),
        (["server-0", "server-1"], ()),
        (["scheduler", "server-1"], ()),
        pytest.param(["server-0", "scheduler", "server-1"], (), marks=pytest.mark.slow),
        pytest.param(["server-1"], ("trainer",), marks=pytest.mark.slow),
        (["server-1"], ("trainer", "--policy", "local_sgd:4")),
    ],
)
def test_killed_servers_come_back_and_all_go_on_from_the_newest_snapshot(job, tmp_path, victims, program):
    launcher = launched(job, tmp_path, *program[:1], options=program[1:])
    final = FINAL / WORKERS if "local_sgd:4" in program else FINAL  # the mean of what each has changed
    for name in victims:
        job.kill(name)
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    ends = re.findall(r"ended with (\S+).* after \d+ steps again, told of \[(.*)\]", launcher.text)
    assert [float(value) for value, _ in ends] == [final] * WORKERS, job.transcript()
    assert all(told for _, told in ends), "both heard of it"
    for name in victims:
        assert launcher.lines_with(f"{name} was started 2 times; it was killed by signal 9"), job.transcript()
    assert launcher.lines_with("all have gone back to step"), job.transcript()
    assert "Error" not in launcher.text, job.transcript()


def test_all_go_back_when_a_server_dies_that_has_counted_a_push_and_not_said_so(job, tmp_path):
    options = ["--server-module", "dying", "--env", f"PYTHONPATH={PROGRAMS}", "--env", "DIES=counted"]
    launcher = launched(job, tmp_path, options=[*options, "--env", f"DIES_AT={PAUSE + 3}"])
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with(f"server-1 dies when version {PAUSE + 3} is counted"), "the fault happened"
    ends = re.findall(r"ended with (\S+).* after \d+ steps again, told of \[(.*)\]", launcher.text)
    assert [float(value) for value, _ in ends] == [FINAL] * WORKERS, job.transcript()
    assert all(told for _, told in ends), "both heard of it"


def test_a_time_of_day_that_jumps_changes_nothing_of_losses_snapshots_and_ledgers(job, tmp_path):
    options = ["--server-module", "jumping", "--env", f"PYTHONPATH={PROGRAMS}", "--env", f"KVDIST_LEDGER={tmp_path}"]
    launcher = launched(job, tmp_path, "jumping", options=options)
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    jumped = {line.partition(" ")[0] for line in launcher.lines_with("and the next one 172800 s before it")}
    assert jumped >= {"sched", "s0", "s1", "w0", "w1"}, job.transcript()
    ends = re.findall(r"ended with (\S+).* after \d+ steps again, told of \[(\d+)\]", launcher.text)
    assert [float(value) for value, _ in ends] == [FINAL] * WORKERS, job.transcript()
    lost = launcher.lines_with(" was lost")
    assert lost and all("server-1 (" in line for line in lost), job.transcript()
    ledgers = [*tmp_path.glob("server-*.jsonl")]
    assert ledgers, "servers have written them"
    for path in ledgers:
        versions = {}
        for line in map(json.loads, path.read_text().splitlines()):
            for number in line["slices"]:
                if "counted" in line:
                    assert line["version"] == versions.get(number, line["version"] - 1) + 1, (path, line)
                if "lost" not in line:
                    versions[number] = line.get("rolled_back", line.get("version"))


def test_fragments_go_back_to_one_period_and_lose_no_more_than_its_steps_behind_their_push(job, tmp_path):
    launcher = launched(job, tmp_path, "trainer", options=["--policy", "local_sgd:4,fragments=2,delay=1"])
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("all have gone back to step"), job.transcript()
    ends = re.findall(r"ended with (\S+) (\S+) after \d+ steps again, told of \[(\d+)\]", launcher.text)
    assert len(ends) == WORKERS, job.transcript()
    for last, first, told in ends:
        # Rounds 2 and 3 are the exchange after step 6; the first fragment leaves two steps before a period ends.
        made = {0: 0, 1: 4, 2: 6}.get(int(told), 4 * int(told) - 6)
        lost = 0 if int(told) in (0, 2, 3) else (made + made - 1) * 3 / 2
        assert (float(last), float(first)) == (FINAL / WORKERS, FINAL / WORKERS - lost), job.transcript()


def test_what_is_left_of_compressed_pushes_is_dropped_when_all_go_back(job, tmp_path):
    launcher = launched(job, tmp_path, "compressed", workers=1)
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("all have gone back to step"), job.transcript()
    assert launcher.lines_with("the first push that counts is number 8"), job.transcript()


def test_a_worker_that_is_killed_while_all_go_back_is_waited_for_and_no_step_is_made_without_it(job, tmp_path):
    (tmp_path / "held.py").write_text(HELD)
    options = ["--min-workers", str(WORKERS), "--server-module", "held", "--env", f"PYTHONPATH={tmp_path}"]
    launcher = launched(job, tmp_path, "trainer", options=options)
    job.kill("server-1")
    job.line("launcher", "all go back to the newest snapshot")
    job.kill("worker-1")
    job.line("launcher", "worker-1 (pid")
    (tmp_path / "dead").touch()
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    ends = re.findall(r"ended with (\S+).* after", launcher.text)
    assert [float(value) for value in ends] == [FINAL] * WORKERS, job.transcript()
    for name in ("server-1", "worker-1"):
        assert launcher.lines_with(f"{name} was started 2 times; it was killed by signal 9"), job.transcript()
    assert launcher.lines_with("training waits for 1 more worker(s)"), job.transcript()
    assert launcher.lines_with("training goes on: 2 workers are there"), job.transcript()


@pytest.mark.parametrize(
    ("loader_workers", "victims"),
    [("0", ["server-1"]), pytest.param("2", ["server-0", "server-1"], marks=pytest.mark.slow)],
)
def test_all_go_back_to_where_the_snapshot_was_in_the_data_and_each_example_counts_once(
    job, tmp_path, loader_workers, victims
):
    snapshots = tmp_path / "snapshots"
    options = [*OPTIONS, "--snapshots", str(snapshots)]
    more = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path), "SNAPSHOTS": str(snapshots), "LOADER_TEMP": str(tmp_path)}
    command = ("leases.py", "1500", "2", "8", loader_workers, "dist", "{}")
    launcher = job.launch(3, 2, *command, options=options, **EVERY, **more)
    job.line("launcher", "waits in the middle")
    for name in victims:
        job.kill(name)
    (snapshots / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("all have gone back to step"), job.transcript()
    _, counts = found(job)
    assert counts == {(2, 2): 1500}, job.transcript()


def test_a_scheduler_that_comes_back_knows_the_newest_snapshot_and_all_go_back_to_it(job, tmp_path):
    launcher = launched(job, tmp_path)
    folders = [int(one.parent.name[5:]) for one in (tmp_path / "snapshots").glob("step-*/manifest.json")]
    job.kill("scheduler")
    job.line("launcher", "the scheduler was started again and goes on where it was")
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    ends = re.findall(r"ended with (\S+).* after \d+ steps again, told of \[(.*)\]", launcher.text)
    assert [float(value) for value, _ in ends] == [FINAL] * WORKERS, job.transcript()
    assert int(ends[0][1]) >= max(folders), job.transcript()
    assert launcher.lines_with("the scheduler was started 2 times"), job.transcript()


def test_a_dist_async_store_is_refused_beside_snapshots_with_what_keeps_it(job, tmp_path):
    program = tmp_path / "program.py"
    program.write_text("import numpy as np; from kvdist import kv; kv.create('dist_async').init('w', np.zeros(3))")
    root = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    options = [*OPTIONS, "--snapshots", str(tmp_path / "snapshots")]
    launcher = job.launch(1, 1, str(program), options=options, **root)
    job.finish()
    assert launcher.code not in (0, None), job.transcript()
    assert launcher.lines_with(" cannot bring back a store without rounds, which dist_async and the policy async make")
    assert "take --replicas 1 instead" in launcher.text, job.transcript()


def launched_held(job, tmp_path):
    """A job with two snapshots or more."""
    (tmp_path / "full.py").write_text(FULL)
    options = [*OPTIONS, "--snapshots", str(tmp_path / "snapshots")]
    options += ["--server-module", "full", "--env", f"PYTHONPATH={tmp_path}"]
    root = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    launcher = job.launch(WORKERS, 2, "snapshots_held.py", str(tmp_path), options=options, **EVERY, **root)
    folders = tmp_path / "snapshots"
    job.wait(lambda: len([*folders.glob("step-*/manifest.json")]) > 1, "there are two snapshots")
    return launcher


def with_two_snapshots(job, tmp_path):
    """A job that waits, with two snapshots or more, none of which is being written: the launcher and their folders."""
    launcher, folders = launched_held(job, tmp_path), tmp_path / "snapshots"
    (tmp_path / "full").touch()
    job.line("launcher", "was not made, training goes on")
    (tmp_path / "snapshot").touch()
    job.wait(lambda: len(launcher.lines_with("waits for go")) == WORKERS, "all wait")
    complete = sorted(int(one.parent.name.partition("-")[2]) for one in folders.glob("step-*/manifest.json"))
    return launcher, [folders / f"step-{step}" for step in complete]


def test_a_disk_that_is_full_for_long_is_said_once_and_so_is_its_end(job, tmp_path):
    launcher, tries = launched_held(job, tmp_path), tmp_path / "tries"
    (tmp_path / "full").touch()
    job.wait(lambda: tries.exists() and tries.stat().st_size >= 10, "each server has tried it several times")
    (tmp_path / "full").unlink()
    job.line("launcher", "snapshots are written again: that of step")
    for name in ("snapshot", "go"):
        (tmp_path / name).touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    said = [launcher.lines_with(f"server-{rank}: {tmp_path}") for rank in range(2)]
    assert 1 <= len(said[0] + said[1]) == len(launcher.lines_with("No space left")) <= 2, job.transcript()
    assert max(map(len, said)) == 1 and all("was not made, training goes on" in line for line in said[0] + said[1])


def tear(folder: Path, damage) -> str:
    """Damage the file of server 1, and return its name."""
    (path,) = folder.glob("server-1-*.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    return path.name


def flip(folder: Path) -> str:
    return tear(folder, flipped)


def cut(folder: Path) -> str:
    return tear(folder, cut_off)


def of_another_model(folder: Path) -> str:
    """Let the manifest name another shape, and return what is said of it."""
    manifest = read_manifest(folder)
    first, *others = manifest.keys
    write_manifest(folder, replace(manifest, keys=(replace(first, shape=(7,)), *others)))
    return "has shape (7,) and dtype"


@pytest.mark.slow_cases("cut", "of_another_model")
@pytest.mark.parametrize("damage", [flip, cut, of_another_model])
def test_where_the_newest_snapshot_cannot_be_used_the_one_before_it_takes_its_place(job, tmp_path, damage):
    launcher, folders = with_two_snapshots(job, tmp_path)
    said_of_it = damage(folders[-1])
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    (told,) = launcher.lines_with(f"{folders[-1]} cannot be read: ")
    assert said_of_it in told, told
    step = folders[-2].name.removeprefix("step-")
    assert launcher.lines_with(f"all have gone back to step {step}, and go on from there"), job.transcript()
    assert set(re.findall(r"is told of (\d+)", launcher.text)) == {step}, job.transcript()
    ends = re.findall(r"(?:first|second) ended with (\[.*\])", launcher.text)
    assert ends == [str([100] * WORKERS)] * 2 * WORKERS, job.transcript()


def test_where_each_snapshot_is_torn_the_job_ends_and_names_the_file(job, tmp_path):
    launcher, folders = with_two_snapshots(job, tmp_path)
    names = [cut(folder) for folder in folders]
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code not in (0, None), job.transcript()
    newest, *_ = launcher.lines_with(f"{folders[1]} cannot be read: ")
    assert names[1] in newest, job.transcript()
    ended = launcher.lines_with(f"PeerLostError: server-1 was lost, and the snapshot {folders[0]} cannot be read: ")
    assert ended, job.transcript()  # the same error of several workers is shown once
    assert all(names[0] in line and "there is none before it" in line for line in ended), job.transcript()


def test_where_each_snapshot_is_of_another_model_the_job_ends_and_names_what_differs(job, tmp_path):
    launcher, folders = with_two_snapshots(job, tmp_path)
    (said_of_it, *_) = [of_another_model(folder) for folder in folders]
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code not in (0, None), job.transcript()
    ended = launcher.lines_with(f"PeerLostError: server-1 was lost, and the snapshot {folders[0]} cannot be read: ")
    assert ended, job.transcript()  # the same error of several workers is shown once
    assert all(
        said_of_it in line and "in this store: init it as it was" in line and "there is none before it" in line
        for line in ended
    ), ended
