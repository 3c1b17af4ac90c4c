"""Workers are killed, and the others go on with exact weights; what still ends the job; what is refused beforehand."""

from __future__ import annotations

import ast
import os
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.cases import each
from tests.integration.processes import PROGRAMS, prefix_of, program
from tests.integration.test_shared_memory import memory_of
from tests.namespaces import CARD, NO_CARD, link, run
from tests.ports import free_port

GOES_ON = ["--on-loss", "continue"]
STEPS = 16
ALL = (1 << STEPS) - 1


def masks_of(job, rank):
    """What a worker says of the final weights: rank → the masks of pushes that some element has."""
    (line,) = [
        line for line in job.processes["launcher"].lines_with("masks {") if line.startswith(prefix_of(f"worker-{rank}"))
    ]
    return ast.literal_eval(line.partition("masks ")[2])


def require_exact(job, num_workers, victims, at):
    """Every push of a survivor is in every element; of a victim all before its last step, and that one, or not."""
    stayed = [rank for rank in range(num_workers) if rank not in victims]
    found = [masks_of(job, rank) for rank in stayed]
    assert all(masks == found[0] for masks in found), job.transcript()
    for rank in range(num_workers):
        allowed = {(1 << at) - 1, (1 << (at + 1)) - 1} if rank in victims else {ALL}
        assert set(found[0][rank]) <= allowed, (rank, found[0], job.transcript())


@pytest.mark.parametrize(
    ("num_workers", "victims", "after_s", "mode"),
    [
        (3, [1], 0.0, "dist"),
        pytest.param(3, [1], 0.02, "dist", marks=pytest.mark.slow),
        pytest.param(3, [0], 0.005, "dist", marks=pytest.mark.slow),
        pytest.param(3, [2, 0], 0.01, "dist", marks=pytest.mark.slow),
        pytest.param(3, [1], 0.01, "dist_async", marks=pytest.mark.slow),
    ],
)
def test_the_others_go_on_with_exact_weights_when_workers_are_killed(job, num_workers, victims, after_s, mode):
    launcher = job.launch(
        num_workers, 2, "survival.py", "killed", str(victims), "5", str(after_s), mode, options=GOES_ON
    )
    job.finish()
    assert launcher.code == 0, job.transcript()
    for rank in victims:
        assert launcher.lines_with(f"worker-{rank} (pid "), job.transcript()
        assert launcher.lines_with("was killed by signal 9 (SIGKILL); the other workers go on"), "the fault happened"
        (told,) = [line for line in launcher.lines_with(f"worker-{rank} (host ") if "was lost" in line]
        assert "killed by signal 9 (SIGKILL)" in told and "on" in told, job.transcript()
        assert re.search(rf"worker-{rank}: its first [56] pushes are in the weights", launcher.text), job.transcript()
    require_exact(job, num_workers, victims, 5)
    stayed = tuple(rank for rank in range(num_workers) if rank not in victims)
    said = f"members {stayed}, {len(victims)} dead, {stayed}"
    assert len(launcher.lines_with(said)) == len(launcher.lines_with("went on to the end")) == len(stayed)
    mean = sum(stayed) / len(stayed)
    assert len(launcher.lines_with(f"mean over those that are there: {mean}")) == len(stayed), job.transcript()


@pytest.mark.parametrize("call", ["save_checkpoint", "close"])
def test_the_others_go_on_with_exact_weights_when_a_worker_is_killed_that_saves_or_closes(job, tmp_path, call):
    words = ("survival.py", "killed_in", call, str(tmp_path / "saved"))
    launcher = job.launch(3, 2, *words, options=GOES_ON, KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with(f"dies in {call}"), "the fault happened"
    assert launcher.lines_with("was killed by signal 9 (SIGKILL); the other workers go on"), job.transcript()
    for rank in (0, 2):  # what it had pushed after that is dropped, as the others had not made the step
        assert masks_of(job, rank) == {0: [ALL], 1: [(1 << STEPS // 2) - 1], 2: [ALL]}, job.transcript()
    assert len(launcher.lines_with("went on to the end")) == 2, job.transcript()


@pytest.mark.parametrize(
    ("victims", "times"),
    [([1], 1), pytest.param([0], 1, marks=pytest.mark.slow), pytest.param([1, 2], 2, marks=pytest.mark.slow)],
)
def test_workers_that_are_killed_and_started_again_join_the_others_with_exact_weights(job, victims, times):
    restart = [*GOES_ON, "--restart", str(times)]
    launcher = job.launch(3, 2, "survival.py", "joins", str(victims), "2", str(times), options=restart)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("was killed by signal 9 (SIGKILL)")) >= times * len(victims), "the fault happened"
    assert len(launcher.lines_with("went on to the end")) == 3, job.transcript()
    found = [masks_of(job, rank) for rank in range(3)]
    assert found[0] == found[1] == found[2], job.transcript()
    for rank in range(3):
        if rank not in victims:
            assert found[0][rank] == [ALL], job.transcript()
            continue
        (line,) = [one for one in launcher.lines_with(f"life {times} has joined in step") if f"w{rank} " in one[:4]]
        joined = int(line.rpartition(" ")[2])
        own = {mask >> (joined + 1) for mask in found[0][rank]}
        assert own == {(1 << (STEPS - joined - 1)) - 1}, "every push since it has joined counts, once"
        assert not any(mask >> joined & 1 for mask in found[0][rank]), "it has joined with zeros"


def test_the_scheduler_is_killed_when_a_worker_has_joined_and_all_go_on(job, tmp_path):
    go = tmp_path / "go"
    launcher = job.launch(3, 2, "survival.py", "joins", "[1]", "2", "1", str(go), options=[*GOES_ON, "--restart", "3"])
    job.line("launcher", "life 1 has joined in step")
    job.kill("scheduler")
    go.touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("the scheduler was started 2 times; it was killed by signal 9 (SIGKILL)"), "the fault"
    assert len(launcher.lines_with("went on to the end")) == 3, job.transcript()
    found = [masks_of(job, rank) for rank in range(3)]
    assert found[0] == found[1] == found[2], job.transcript()
    assert found[0][0] == found[0][2] == [ALL], job.transcript()


@pytest.mark.parametrize(
    ("victim", "after_s"),
    [
        (0, 0.0),
        (1, 0.01),
        pytest.param(0, 0.01, marks=pytest.mark.slow),
        pytest.param(1, 0.0, marks=pytest.mark.slow),
        pytest.param(0, 0.03, marks=pytest.mark.slow),
    ],
)
def test_the_others_of_a_host_are_exact_when_its_leader_or_a_follower_is_killed(job, victim, after_s):
    arguments = ("survival.py", "killed", f"[{victim}]", "5", str(after_s))
    launcher = job.launch(3, 2, *arguments, options=GOES_ON, KVDIST_LOCAL_REDUCE="on")
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("was killed by signal 9 (SIGKILL); the other workers go on"), "the fault happened"
    (leader,) = launcher.lines_with("has summed for its host: True")
    assert leader.startswith(prefix_of("worker-0")), job.transcript()
    require_exact(job, 3, [victim], 5)
    assert len(launcher.lines_with("went on to the end")) == 2, job.transcript()


@pytest.mark.parametrize(
    ("victim", "after_s", "mode", "transport"),
    [
        (1, 0.003, "dist", "auto"),
        pytest.param(0, 0.02, "dist", "tcp", marks=pytest.mark.slow),
        pytest.param(2, 0.008, "dist_async", "auto", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_killed_costs_nothing_where_another_has_a_copy(
    job, tmp_path, victim, after_s, mode, transport
):
    options = [*GOES_ON, "--replicas", "1", "--env", f"KVDIST_TRANSPORT={transport}"]
    options += ["--env", f"KVDIST_CHECKPOINT_ROOT={tmp_path}"]
    arguments = ("without_server", str(victim), "5", str(after_s), mode, str(tmp_path))
    launcher = job.launch(2, 3, "survival.py", *arguments, options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    killed = f"server-{victim} (pid "
    (line,) = [one for one in launcher.lines_with("go on if one has a copy") if killed in one]
    assert "was killed by signal 9 (SIGKILL)" in line, "the fault happened"
    assert launcher.lines_with(f"; server-{(victim + 1) % 3} goes on with its slices"), job.transcript()
    assert len(launcher.lines_with("went on to the end")) == 2, job.transcript()
    assert masks_of(job, 0) == masks_of(job, 1) == {0: [ALL], 1: [ALL]}, job.transcript()


@pytest.mark.parametrize("when", ["counted", "copied"])
def test_a_push_counts_once_whose_server_dies_when_it_has_counted_it_and_not_said_so(job, when):
    options = [*GOES_ON, "--replicas", "1", "--server-module", "dying"]
    options += ["--env", f"PYTHONPATH={PROGRAMS}", "--env", f"DIES={when}", "--env", "DIES_AT=7"]
    launcher = job.launch(2, 3, "survival.py", "trains_on", options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with(f"server-1 dies when version 7 is {when}"), "the fault happened"
    assert launcher.lines_with("; server-2 goes on with its slices"), job.transcript()
    assert masks_of(job, 0) == masks_of(job, 1) == {0: [ALL], 1: [ALL]}, job.transcript()


@pytest.mark.parametrize(
    ("servers", "victims", "mode"),
    [
        (2, (1, 0, 1), "dist"),
        pytest.param(3, (1, 2, 0), "dist", marks=pytest.mark.slow),
        pytest.param(2, (0, 1, 0), "dist_async", marks=pytest.mark.slow),
    ],
)
def test_servers_that_are_killed_one_after_the_other_come_back_and_get_copies_while_training_goes_on(
    job, tmp_path, servers, victims, mode
):
    options = [*GOES_ON, "--replicas", "1", "--restart", "9"]
    words = ("servers_come_back", str(tmp_path), str(len(victims)), mode)
    launcher = job.launch(2, servers, "survival.py", *words, options=options)
    owners = list(range(servers))
    for stage, victim in enumerate(victims):
        job.line("launcher", f"stage {stage}", count=2)
        before = len(launcher.text)
        job.kill(f"server-{victim}")
        heir = (victim + 1) % servers
        owners = [heir if owner == victim else owner for owner in owners]
        job.line("launcher", "was killed by signal 9 (SIGKILL); starting it again", count=stage + 1)
        job.line("launcher", "is back, and is given a copy of slices while training goes on", count=stage + 1)
        told = [f"the job survives a loss of server-{owner} again" for owner in set(owners)]
        job.wait(lambda told=told, before=before: all(one in launcher.text[before:] for one in told), "all have copies")
        (tmp_path / f"filled-{stage}").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert not launcher.lines_with("stranger(s)"), "workers that a new server does not know yet are none"
    assert masks_of(job, 0) == masks_of(job, 1) == {0: [ALL], 1: [ALL]}, job.transcript()


SHORT = """
import os
from pathlib import Path
from kvdist import kv
from kvdist.core.server import replica
kv.register_command(1)(lambda head, body, rank: None)
fill = replica.Copy._fill
def short_of_memory(self, message):
    if os.environ.get("KVDIST_RESTARTS") == "1":
        raise MemoryError("Unable to allocate 4.00 MiB")
    fill(self, message)
replica.Copy._fill = short_of_memory
"""
"""A server that was started again once has no memory for copies; the second time it has."""


def test_a_server_that_has_no_memory_for_a_copy_says_so_and_the_job_goes_on_without_it(job, tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    options = [*GOES_ON, "--replicas", "1", "--restart", "9", "--server-module", "short"]
    options += ["--env", f"PYTHONPATH={tmp_path}"]
    launcher = job.launch(2, 2, "survival.py", "servers_come_back", str(tmp_path), "1", "dist", options=options)
    job.line("launcher", "stage 0", count=2)
    job.kill("server-1")
    told = job.line("launcher", "was lost: it has no memory for a copy of what server-0 has: use more servers")
    assert "server-1" in told, told
    job.line("launcher", "the job survives a loss of server-0 again")
    (tmp_path / "filled-0").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert masks_of(job, 0) == masks_of(job, 1) == {0: [ALL], 1: [ALL]}, job.transcript()


def is_prefix(mask):
    """Whether these are the first pushes, without a gap."""
    return mask & (mask + 1) == 0


@pytest.mark.parametrize(("victims", "after_s"), [([1], 0.0), pytest.param([0, 2], 0.003, marks=pytest.mark.slow)])
def test_rows_of_tables_are_exact_when_workers_are_killed(job, victims, after_s):
    launcher = job.launch(3, 2, "survival.py", "rows", str(victims), "5", str(after_s), options=GOES_ON)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("was killed by signal 9 (SIGKILL); the other workers go on")) == len(victims)
    require_exact(job, 3, victims, 5)


@each(
    "way, told",
    [
        ("exits", "failed with exit code 3"),
        ("is interrupted", "signal 2 (SIGINT)"),
        ("is terminated", "signal 15 (SIGTERM)"),
    ],
)
@pytest.mark.slow
def test_a_worker_that_ends_in_the_middle_is_survived_whatever_its_way(job, way, told):
    launcher = job.launch(2, 1, "survival.py", "ends", way, options=GOES_ON)
    job.finish()
    assert launcher.code == 0, job.transcript()
    (line,) = launcher.lines_with("; the other workers go on")
    assert "worker-1 (pid" in line and told in line, job.transcript()
    assert masks_of(job, 0) == {0: [ALL], 1: [0b11111]}, job.transcript()


@pytest.mark.slow
def test_the_last_worker_is_not_survived(job):
    launcher = job.launch(2, 1, "survival.py", "killed", "[0, 1]", "5", "0", options=GOES_ON)
    job.finish()
    assert launcher.code in (75, 128 + signal.SIGKILL), job.transcript()
    assert launcher.lines_with("killed by signal 9 (SIGKILL)") and not launcher.lines_with("went on to the end")


@pytest.mark.slow
def test_one_exception_is_survived_and_the_same_a_second_time_ends_the_job(job):
    launcher = job.launch(3, 1, "survival.py", "raises", "[1]", options=GOES_ON)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("went on to the end")) == 2
    assert launcher.lines_with("RuntimeError: this script is wrong")
    launcher = job.launch(3, 1, "survival.py", "raises", "[0, 1]", options=GOES_ON)
    job.finish()
    assert launcher.code == 1, job.transcript()
    assert not launcher.lines_with("went on to the end")


def stands_still(job, name):
    """Wait until a process has been stopped."""
    status = Path(f"/proc/{job.pid_of(name)}/status")
    job.wait(lambda: "State:\tT" in status.read_text(), f"{name} stands still")


@pytest.mark.slow
def test_a_worker_that_stood_still_for_too_long_is_told_so_and_does_no_harm(job, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo")
    settings = {"KVDIST_PATIENCE_S": "5", "KVDIST_ON_LOSS": "continue", "FIFO": str(fifo)}
    job.cluster(3, 2, "survival.py", "stopped", **settings)
    for rank in (0, 2):
        job.line(f"worker-{rank}", "goes on without it")
    stands_still(job, "worker-1")
    job.kill("worker-1", signal.SIGCONT)
    job.wait(lambda: job.processes["worker-1"].code is not None, "the zombie ends")
    assert "FencedError: worker-1 was given up" in job.processes["worker-1"].text, job.transcript()
    with open(fifo, "wb"):
        pass
    codes = job.finish()
    assert {name: code for name, code in codes.items() if code} == {"worker-1": 75}, job.transcript()
    for rank in (0, 2):
        found = ast.literal_eval(job.line(f"worker-{rank}", "masks ").partition("masks ")[2])
        assert found == {0: [ALL], 1: [0b111], 2: [ALL]}, job.transcript()


@pytest.mark.slow
def test_a_worker_that_wakes_up_beside_its_replacement_is_told_so_and_nothing_of_it_is_counted(job, tmp_path):
    command = ("survival.py", "joins", "[1]", "3", "1", str(tmp_path / "go"), "stopped")
    settings = {"KVDIST_PATIENCE_S": "5", "KVDIST_ON_LOSS": "continue"}
    settings |= {"KVDIST_SERVER_MODULE": "jumping", "PYTHONPATH": str(PROGRAMS)}
    job.cluster(3, 2, *command, **settings)
    stands_still(job, "worker-1")
    again = {**job.environment("worker", 3, 2), **settings, "KVDIST_RANK": "1", "KVDIST_RESTARTS": "1"}
    second = job.start("replacement", program(*command), **again)
    joined = int(job.line("replacement", "life 1 has joined in step").rpartition(" ")[2])
    assert job.processes["worker-1"].code is None and joined >= 4
    job.kill("worker-1", signal.SIGCONT)
    job.wait(lambda: job.processes["worker-1"].code is not None, "the zombie ends")
    assert "FencedError: worker-1 was given up" in job.processes["worker-1"].text, job.transcript()
    (tmp_path / "go").touch()
    codes = job.finish()
    assert {name: code for name, code in codes.items() if code} == {"worker-1": 75}, job.transcript()
    after = ALL >> (joined + 1) << (joined + 1)
    for process in (job.processes["worker-0"], second, job.processes["worker-2"]):
        (line,) = process.lines_with("masks ")
        found = ast.literal_eval(line.partition("masks ")[2])
        assert found[0] == found[2] == [ALL], job.transcript()
        # Its last push before it stood still, and that one alone, may have been counted: with the round, in each slice.
        assert set(found[1]) <= {0b111 | after, 0b1111 | after}, (found, joined, job.transcript())
    for name in ("scheduler", "server-0", "server-1"):
        assert job.processes[name].lines_with("a look at the clock, and the next one 172800 s before it"), "it jumped"


@pytest.mark.slow
@each("how", ["sleeps", "keeps the GIL"])
def test_a_worker_that_reads_nothing_for_longer_than_the_patience_is_not_lost(job, how):
    launcher = job.launch(2, 1, "survival.py", "reads_nothing", "12", how, options=[*GOES_ON, "--patience", "6"])
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("0 dead")) == 2
    assert masks_of(job, 0) == masks_of(job, 1) == {0: [ALL], 1: [ALL]}


@pytest.mark.slow
def test_servers_keep_nothing_of_workers_that_have_ended(job, tmp_path):
    workers, megabyte = 13, 1 << 20
    os.mkfifo(fifo := tmp_path / "fifo")
    launcher = job.launch(workers, 1, "survival.py", "forgotten", options=GOES_ON, FIFO=str(fifo))
    job.line("launcher", "begins")
    fifo.open("wb").close()
    job.line("launcher", "is alone")
    nbytes = memory_of(job.pid_of("server-0"))["RssShmem:"]
    fifo.open("wb").close()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("was killed by signal 9 (SIGKILL); the other workers go on")) == workers - 1
    # Three or four versions, and what one worker pushes. Each of the lost has pushed 8 MB, and has read 8 MB.
    assert nbytes < 8 * 8 * megabyte, nbytes


OTHER_ADDRESS = "10.213.7.3"
"""Of the first host, for its scheduler alone."""


@each("lost", ["scheduler", "server-0"])
@pytest.mark.slow
@pytest.mark.machines
def test_a_worker_that_is_cut_off_from_one_process_is_given_up_and_the_others_are_exact(job, tmp_path, lost):
    with link() as (near, far):
        run("ip", "-n", near.namespace, "address", "add", f"{OTHER_ADDRESS}/24", "dev", CARD)
        settings = {"DMLC_PS_ROOT_URI": OTHER_ADDRESS, "KVDIST_SECURITY": "none", "KVDIST_ON_LOSS": "continue"}
        for name in ("scheduler", "server-0", "worker-0", "worker-1"):
            host = far if name == "worker-1" else near
            where = {**settings, "DMLC_NODE_HOST": host.address, "KVDIST_PATIENCE_S": "4"}
            job.node(name, 2, 1, "survival.py", "cut_off", str(tmp_path), host=host, **where)
        for rank in (0, 1):
            job.line(f"worker-{rank}", "waits for the cut")
        far.send_to_card(OTHER_ADDRESS if lost == "scheduler" else near.address, NO_CARD)
        (tmp_path / "cut").touch()
        codes = job.finish()
    assert codes == {"scheduler": 0, "server-0": 0, "worker-0": 0, "worker-1": 75}, job.transcript()
    assert re.search(r"worker-1 \(host .*\) was lost.*; 1 worker goes on", job.processes["scheduler"].text)
    said = "FencedError: worker-1 was given up" if lost == "scheduler" else "PeerLostError: server-0 ("
    assert job.processes["worker-1"].lines_with(said), job.transcript()
    found = ast.literal_eval(job.line("worker-0", "masks ").partition("masks ")[2])
    assert found[0] == [ALL] and all(map(is_prefix, found[1])), job.transcript()
    (tmp_path / "cut").unlink()


@pytest.mark.slow
def test_the_launcher_ends_a_worker_that_stands_still_for_good_and_was_given_up(job):
    launcher = job.launch(2, 1, "survival.py", "stopped_for_good", options=[*GOES_ON, "--patience", "3"])
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-1 has been given up, and its process is ended"), job.transcript()
    assert not [line for line in launcher.lines_with("given up worker 1 life 0") if "│" in line], "for the launcher"
    assert launcher.lines_with("was silent for") or launcher.lines_with("brought nothing for long")
    assert masks_of(job, 0) == {0: [ALL], 1: [0b111]}, job.transcript()
    assert len(launcher.lines_with("went on to the end")) == 1


@pytest.mark.slow
def test_a_lost_server_ends_the_job_all_the_same(job):
    launcher = job.launch(2, 2, "survival.py", "stopped", options=[*GOES_ON, "--patience", "60"])
    job.line("launcher", "stands still")
    job.kill("server-1")
    job.finish()
    assert launcher.code == 128 + signal.SIGKILL, job.transcript()
    assert "server-1" in launcher.text.splitlines()[-1]


@each(
    "scenario, said",
    [
        ("only_sums", "servers must hold the weights, but this store only sums"),
        ("updates_here", "and this Trainer's workers update"),
        ("without_servers", "the store 'collective' sums among workers, none of which can be left out"),
        ("clips", "which a lost worker would leave half done"),
    ],
)
@pytest.mark.slow
def test_what_cannot_go_on_is_refused_in_the_first_step(job, scenario, said):
    launcher = job.launch(2, 1, "survival.py", scenario, options=GOES_ON)
    job.finish()
    assert launcher.code, job.transcript()
    assert launcher.lines_with("ConfigError: KVDIST_ON_LOSS is 'continue'"), job.transcript()
    assert said in " ".join(launcher.text.split()), job.transcript()


AWAY = {"KVDIST_ON_LOSS": "continue", "KVDIST_CHECKPOINT_ROOT": "/"}


def lose_the_scheduler(job, folder, **variables):
    """Three workers train halfway, and the scheduler is killed."""
    folder.mkdir()
    job.cluster(3, 2, "survival.py", "away", str(folder), **variables)
    for rank in range(3):
        job.line(f"worker-{rank}", "halfway")
    job.kill("scheduler")
    job.wait(lambda: job.processes["scheduler"].code is not None, "the scheduler ends")
    assert job.processes["scheduler"].code == -signal.SIGKILL


def start_it_again(job, **variables):
    """With the same settings; its journal says the rest."""
    return job.node("scheduler", 3, 2, **variables)


def require_all(job, num_workers=3):
    for rank in range(num_workers):
        found = ast.literal_eval(job.line(f"worker-{rank}", "masks ").partition("masks ")[2])
        assert found == {rank: [ALL] for rank in range(num_workers)}, job.transcript()
        assert job.line(f"worker-{rank}", "late ").endswith("late [7.0, 7.0, 7.0], steps ['step-0', 'step-1']")


@each("encrypts", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_training_goes_on_while_the_scheduler_is_away_and_everything_else_when_it_is_back(job, tmp_path, encrypts):
    settings = {**AWAY, "KVDIST_JOURNAL": str(tmp_path / "journal")}
    if encrypts:
        (tmp_path / "secret").write_bytes(bytes(range(32)))
        settings["KVDIST_SECRET_FILE"] = str(tmp_path / "secret")
        (tmp_path / "secret").chmod(0o600)
    lose_the_scheduler(job, tmp_path / "saved", **settings)
    (tmp_path / "saved" / "killed").touch()
    for rank in range(3):
        job.line(f"worker-{rank}", "pushed to the end without a scheduler")
    back = start_it_again(job, **settings)
    job.succeed()
    assert back.lines_with("the scheduler was started again and goes on where it was"), job.transcript()
    require_all(job)
    assert not (tmp_path / "journal").exists(), "the job is over"


def test_a_scheduler_that_comes_back_without_its_journal_ends_the_job_at_once(job, tmp_path):
    settings = {**AWAY, "KVDIST_JOURNAL": str(tmp_path / "journal")}
    lose_the_scheduler(job, tmp_path / "saved", **settings)
    (tmp_path / "journal").unlink()
    (tmp_path / "saved" / "killed").touch()
    start_it_again(job, **settings)
    job.line("worker-0", "has no seat in this job")
    job.line("server-1", "has no seat in this job")
    job.wait(lambda: all(job.processes[f"worker-{rank}"].code == 75 for rank in range(3)), "all workers end")
    job.kill("scheduler")
    job.finish()


def test_two_schedulers_never_act_on_one_journal(job, tmp_path):
    settings = {**AWAY, "KVDIST_JOURNAL": str(tmp_path / "journal"), "KVDIST_SCHEDULER_AWAY_S": "60"}
    (tmp_path / "saved").mkdir()
    job.cluster(3, 2, "survival.py", "away", str(tmp_path / "saved"), **settings)
    for rank in range(3):
        job.line(f"worker-{rank}", "halfway")
    job.kill("scheduler", signal.SIGSTOP)
    environment = {**job.environment("scheduler", 3, 2), **settings, "DMLC_PS_ROOT_PORT": str(free_port())}
    second = job.start("second", [sys.executable, "-m", "kvdist"], **environment)
    job.line("second", "which another scheduler has open: only one can run. If it hangs, end it")
    job.wait(lambda: second.code == 2, "it ends")
    del job.processes["second"]
    job.kill("scheduler", signal.SIGCONT)
    (tmp_path / "saved" / "killed").touch()
    job.succeed()
    require_all(job)


@pytest.mark.slow
def test_a_worker_that_is_lost_while_the_scheduler_is_away_is_given_up_when_that_is_back(job, tmp_path):
    settings = {**AWAY, "KVDIST_PATIENCE_S": "3", "KVDIST_JOURNAL": str(tmp_path / "journal")}
    lose_the_scheduler(job, tmp_path / "saved", **settings)
    job.kill("worker-1")
    (tmp_path / "saved" / "killed").touch()
    start_it_again(job, **settings)
    codes = job.finish()
    assert {name: code for name, code in codes.items() if code} == {"worker-1": -signal.SIGKILL}, job.transcript()
    for rank in (0, 2):
        found = ast.literal_eval(job.line(f"worker-{rank}", "masks ").partition("masks ")[2])
        assert found == {0: [ALL], 1: [(1 << STEPS // 2) - 1], 2: [ALL]}, job.transcript()
    job.line("scheduler", "worker-1 (host")


@pytest.mark.slow
def test_who_does_not_come_back_to_it_ends_a_job_that_no_loss_is_to_be_survived_in(job, tmp_path):
    settings = {**AWAY, "KVDIST_ON_LOSS": "fail", "KVDIST_SCHEDULER_AWAY_S": "30", "KVDIST_PATIENCE_S": "3"}
    settings["KVDIST_JOURNAL"] = str(tmp_path / "journal")
    lose_the_scheduler(job, tmp_path / "saved", **settings)
    job.kill("worker-1")
    job.kill("worker-2")
    (tmp_path / "saved" / "killed").touch()
    start_it_again(job, **settings)
    codes = job.finish()
    assert codes["scheduler"] == codes["worker-0"] == 75, job.transcript()
    said = "was lost, last reported in step 8: it has not come back since the scheduler was started again"
    assert said in job.processes["worker-0"].text, job.transcript()


@pytest.mark.slow
def test_a_scheduler_that_does_not_come_back_ends_the_job_after_its_time(job, tmp_path):
    lose_the_scheduler(job, tmp_path / "saved", **AWAY, KVDIST_SCHEDULER_AWAY_S="2")
    (tmp_path / "saved" / "killed").touch()
    codes = job.finish()
    assert codes["worker-0"] == codes["server-0"] == 75, job.transcript()
    assert "it was not started again within 2 s" in job.processes["worker-0"].text, job.transcript()


def test_a_killed_scheduler_is_started_again_and_every_push_counts(job):
    launcher = job.launch(3, 2, "survival.py", "trains_on", options=[*GOES_ON, "--restart", "3"])
    job.line("launcher", "step 3")
    job.kill("scheduler")
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("the scheduler was started 2 times; it was killed by signal 9 (SIGKILL)"), "the fault"
    for rank in range(3):
        assert masks_of(job, rank) == {0: [ALL], 1: [ALL], 2: [ALL]}, job.transcript()
