"""Checkpoints of real clusters: saved while they train, loaded by clusters of other sizes, refused by full disks."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

PIECES = {"KVDIST_SLICE_BYTES": "16384", "MXNET_KVSTORE_BIGARRAY_BOUND": "3000"}
"""So that one key lies on every server, in several slices."""


def results(launcher) -> list[str]:
    return sorted({line.split("| ")[-1] for line in launcher.lines_with("came to")})


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param({}, id="shared memory"),
        pytest.param({"KVDIST_TRANSPORT": "tcp"}, id="tcp", marks=pytest.mark.slow),
        pytest.param({"KVDIST_LOCAL_REDUCE": "on"}, id="one push per host", marks=pytest.mark.slow),
    ],
)
def test_a_run_resumed_on_any_number_of_servers_has_the_bits_of_one_that_was_not_interrupted(job, tmp_path, ways):
    folder = tmp_path / "saved"
    variables = {**PIECES, **ways, "KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    launcher = job.launch(2, 2, "checkpoints.py", "train", str(folder), **variables)
    job.succeed()
    expected = results(launcher)
    assert len(expected) == 14, job.transcript()
    for servers in (1, 2, 3):
        launcher = job.launch(2, servers, "checkpoints.py", "resume", str(folder), **variables)
        job.succeed()
        assert results(launcher) == expected, f"on {servers} servers: {job.transcript()}"


@pytest.mark.parametrize(
    "ways",
    [
        pytest.param({}, id="shared memory"),
        pytest.param({"KVDIST_TRANSPORT": "tcp"}, id="tcp", marks=pytest.mark.slow),
        pytest.param({"KVDIST_LOCAL_REDUCE": "on"}, id="one push per host", marks=pytest.mark.slow),
    ],
)
def test_tables_of_rows_go_on_with_the_same_bits_on_any_number_of_servers(job, tmp_path, ways):
    folder = tmp_path / "saved"
    variables = {**PIECES, **ways, "KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    launcher = job.launch(2, 2, "checkpoints.py", "train_tables", str(folder), **variables)
    job.succeed()
    expected = results(launcher)
    assert len(expected) == 4, job.transcript()
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000, "rows that do not exist are not written"
    for servers in (1, 3):
        launcher = job.launch(2, servers, "checkpoints.py", "resume_tables", str(folder), **variables)
        job.succeed()
        assert results(launcher) == expected, f"on {servers} servers: {job.transcript()}"


@pytest.mark.slow_cases("here")
@pytest.mark.parametrize("where", ["there", "here"])
def test_a_trainer_goes_on_in_the_middle_of_an_epoch_with_the_same_bits(job, tmp_path, where):
    variables = {**PIECES, "KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    found = []
    for what, servers in (("train", 2), ("resume", 1)):
        launcher = job.launch(2, servers, "checkpoints.py", "trainer", str(tmp_path / "run"), what, where, **variables)
        job.succeed()
        found.append(results(launcher))
    assert found[0] == found[1] and len(found[0]) == 2, job.transcript()


@pytest.mark.slow_cases("asynchronous")
@pytest.mark.parametrize("scenario", ["asynchronous", "states"])
def test_stores_are_saved_and_loaded(job, tmp_path, scenario):
    launcher = job.launch(
        3, 2, "checkpoints.py", scenario, str(tmp_path / "run"), KVDIST_CHECKPOINT_ROOT=str(tmp_path), **PIECES
    )
    job.succeed()
    assert len(launcher.lines_with(f"{scenario} done on")) == 3


def test_workers_that_save_at_different_steps_are_all_told_and_go_on(job, tmp_path):
    launcher = job.launch(
        2, 1, "checkpoints.py", "disagree", str(tmp_path / "run"), KVDIST_CHECKPOINT_ROOT=str(tmp_path)
    )
    job.succeed()
    told = launcher.lines_with("disagree on")
    assert len(told) == 2 and all("every worker must call it at the same step" in line for line in told)
    assert len(launcher.lines_with("disagree done on")) == 2


def test_a_server_whose_disk_is_full_costs_a_checkpoint_and_nothing_else(job, tmp_path):
    if shutil.which("prlimit") is None:
        pytest.skip("NOT TESTED: a full disk needs prlimit (util-linux)")
    variables = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path), "KVDIST_TRANSPORT": "tcp", "KVDIST_SECURITY": "none"}
    job.node("scheduler", 2, 2, **variables)
    job.node("server-0", 2, 2, **variables)
    server = {**job.environment("server", 2, 2), "KVDIST_RANK": "1", **variables}
    job.start("server-1", ["prlimit", "--fsize=400000", sys.executable, "-m", "kvdist"], **server)
    for name in ("worker-0", "worker-1"):
        job.node(name, 2, 2, "checkpoints.py", "refused", str(tmp_path / "run"), **variables)
    job.succeed()
    for rank, name in enumerate(("worker-0", "worker-1")):
        (told,) = job.processes[name].lines_with(f"refused on {rank}")
        assert "server-1" in told and "File too large" in told, told
        assert job.processes[name].lines_with(f"refused done on {rank}")


def test_a_folder_that_the_servers_were_not_given_is_refused_with_what_to_do(job, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    launcher = job.launch(
        2, 2, "checkpoints.py", "train", str(tmp_path / "run"), KVDIST_CHECKPOINT_ROOT=str(elsewhere), **PIECES
    )
    assert any(job.finish().values())
    assert launcher.lines_with("set KVDIST_CHECKPOINT_ROOT to a folder above both")


def test_a_checkpoint_is_completed_though_nobody_closes_the_store(job, tmp_path):
    folder, fifo = tmp_path / "run", tmp_path / "fifo"
    os.mkfifo(fifo)
    job.launch(2, 2, "checkpoints.py", "unclosed", str(folder), str(fifo), KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.line("launcher", "under way: True")
    fifo.open("wb").close()
    job.succeed()
    assert (folder / "step-1" / "manifest.json").is_file(), job.transcript()


@pytest.mark.slow_cases("elsewhere-2-here", "elsewhere-2-there", "fewer-3-here", "fewer-3-there", "mistaken-2-here")
@pytest.mark.parametrize("where", ["there", "here"])
@pytest.mark.parametrize(("scenario", "workers"), [("elsewhere", 2), ("mistaken", 2), ("fewer", 3)])
def test_what_goes_wrong_on_one_worker_fails_on_all_and_keeps_nobody_waiting(job, tmp_path, scenario, workers, where):
    variables = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    launcher = job.launch(workers, 1, "checkpoints.py", scenario, str(tmp_path / "run"), where, **variables)
    job.succeed()
    assert len(launcher.lines_with(f"{scenario} done on")) == workers, job.transcript()


def test_an_exception_is_not_held_up_by_a_checkpoint(job, tmp_path):
    launcher = job.launch(2, 1, "checkpoints.py", "broken", str(tmp_path), KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.finish()
    assert {line for line in launcher.worker_lines() if "broken done on" in line} == {
        "w0 │ broken done on 0",
        "w1 │ broken done on 1: ended by an unhandled ZeroDivisionError: of the user",
    }
    assert launcher.code == 1, "the checkpoint was not made, and the program has not looked"
    assert launcher.lines_with("the last checkpoint, "), job.transcript()


def test_workers_of_another_number_begin_their_own_optimizers_anew_and_say_so(job, tmp_path):
    found = []
    for workers in (1, 2, 1):
        launcher = job.launch(workers, 1, "own_states.py", str(tmp_path), KVDIST_CHECKPOINT_ROOT=str(tmp_path))
        job.finish()
        assert launcher.code == 0, job.transcript()
        lines = sorted(line.partition("worker ")[2] for line in launcher.lines_with("moments at version"))
        found.append((lines, launcher.lines_with("begins anew"), launcher.lines_with("files ")))
    assert [lines for lines, _, _ in found] == [
        ["0 has 0 moments at version 0"],
        ["0 has 1 moments at version 3", "1 has 0 moments at version 3"],
        ["0 has 1 moments at version 6"],
    ]
    assert [len(said) for _, said, _ in found] == [0, 1, 0]
    assert "the local optimizer of worker 1 begins anew" in found[1][1][0]
    assert "it has those of worker 0" in found[1][1][0]
    assert all("worker-0-states" in files[0] for _, _, files in found), "keep=1 left those of the last one alone"
    assert "worker-1-states" in found[1][2][0] and "worker-1" not in found[2][2][0]


KEPT = Path(__file__).resolve().parents[1] / "checkpoint" / "kept"
"""Written by kvdist 0.2.0, with two workers, two servers and slices of at most 1,000 elements, by programs/kept.py."""


def test_checkpoints_and_a_snapshot_of_an_earlier_version_go_on_with_the_same_bits(job):
    launcher = job.launch(2, 3, "kept.py", "read", str(KEPT), KVDIST_CHECKPOINT_ROOT=str(KEPT))
    job.succeed()
    assert len(launcher.lines_with("the same 8 arrays")) == 2
    assert len(launcher.lines_with("the same weights after ")) == 2
