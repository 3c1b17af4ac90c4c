"""The commands: versions and imports, debuggers, names of processes, restarts, and what exit codes say."""

from __future__ import annotations

import subprocess
import sys

import pytest

import kvdist
from tests.ports import HOST

LOST_A_PEER = 75
"""The exit code of whoever ends because another process was lost."""
BY_SIGNAL_9 = 137


@pytest.mark.parametrize("module", ["kvdist", "kvdist_launch", "kvdist_launch.run_cli"])
def test_every_command_says_its_version(module):
    done = subprocess.run([sys.executable, "-m", module, "--version"], capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert kvdist.__version__ in done.stdout


def test_stores_can_be_imported_from_kvdist_kv():
    program = "import kvdist.kv as kv; from kvdist.kv import create; from kvdist import kv as same; print(kv is same)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert (done.stdout, done.stderr) == ("True\n", "")


# Restarts, and exit codes.

ENDLESS_AT_FIRST = """
    import os, sys
    import numpy as np
    from kvdist import kv

    attempt = os.environ.get("KVDIST_RESTARTS", "0")
    store = kv.create("dist")
    store.init("w", np.zeros(4, np.float32))
    store.pushpull("w", np.ones(4, np.float32))
    with open(sys.argv[1], "a") as attempts:
        attempts.write(f"{store.rank}: attempt {attempt}\\n")
    print("trains", flush=True)
    while attempt == "0":
        store.pushpull("w", np.ones(4, np.float32))
    store.close()
"""


@pytest.mark.parametrize("victim", ["server-1", "scheduler"])
def test_the_whole_job_starts_again_when_a_server_or_the_scheduler_is_killed(job, script, tmp_path, victim):
    attempts = tmp_path / "attempts"
    launcher = job.launch(2, 2, sys.executable, script(ENDLESS_AT_FIRST), str(attempts), options=RESTART_ONCE)
    job.line("launcher", "trains", count=2)
    job.kill(victim)
    job.succeed()
    assert launcher.lines_with(f"{victim} (pid ") and launcher.lines_with("killed by signal 9 (SIGKILL)")
    assert sorted(attempts.read_text().splitlines()) == [
        "0: attempt 0", "0: attempt 1", "1: attempt 0", "1: attempt 1"
    ]  # fmt: skip


RESTART_ONCE = ("--on-worker-exit", "restart:1", "--grace", "1")


def test_a_server_that_is_configured_wrongly_is_not_started_again(job):
    options = ("--server-module", "no_such_module", *RESTART_ONCE)
    launcher = job.launch(1, 1, sys.executable, "-c", "from kvdist import kv; kv.create('dist')", options=options)
    assert job.finish() == {"launcher": 2}, job.transcript()
    assert launcher.lines_with("no_such_module") and not launcher.lines_with("starting the whole job again")


def test_the_launcher_passes_on_the_signal_that_killed_the_first(job, script, tmp_path):
    job.launch(2, 1, sys.executable, script(ENDLESS_AT_FIRST), str(tmp_path / "attempts"), options=("--grace", "1"))
    job.line("launcher", "trains", count=2)
    job.kill("server-0")
    assert job.finish() == {"launcher": BY_SIGNAL_9}, job.transcript()


LEAVES = """
    import os, sys
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.zeros(4, np.float32))
    store.barrier()
    print("trains", flush=True)
    if store.rank == 1 and sys.argv[1] == "bug":
        raise ValueError("a bug")
    if store.rank == 1 and sys.argv[1] == "gone":
        os._exit(0)
    own, sys.excepthook = sys.excepthook, lambda *words: (own(*words), print("the program's own hook", flush=True))
    while True:
        store.pushpull("w", np.ones(4, np.float32))
"""


@pytest.mark.parametrize(("how", "code"), [("bug", 1), ("killed", -9)])
def test_a_supervisor_can_tell_a_lost_peer_from_a_bug(job, script, how, code):
    job.cluster(3, 2, sys.executable, script(LEAVES), how)
    for rank in range(3):
        job.line(f"worker-{rank}", "trains")
    if how == "killed":
        job.kill("worker-1")
    codes = job.finish()
    others = dict.fromkeys(("scheduler", "server-0", "server-1", "worker-0", "worker-2"), LOST_A_PEER)
    assert codes == {"worker-1": code, **others}, job.transcript()
    for name in ("worker-0", "worker-2"):
        lines = job.processes[name].text.splitlines()
        assert [line for line in lines if line.startswith("Traceback")], "as without kvdist"
        assert [line for line in lines if line.startswith("kvdist.errors.PeerLostError: worker-1 ")]
        assert lines.count("the program's own hook") == 1


def test_the_launcher_says_75_where_the_first_cause_is_a_lost_peer(job, script):
    launcher = job.launch(2, 1, sys.executable, script(LEAVES), "gone", options=("--grace", "1"))
    assert job.finish() == {"launcher": LOST_A_PEER}, job.transcript()
    assert launcher.lines_with("worker-0 (pid ") and launcher.lines_with("lost a peer and ended with exit code 75")


def test_a_rank_without_servers_that_loses_another_ends_with_75(job, script):
    program = script(
        """
        import os, torch
        import kvdist.collective as hvd

        hvd.init()
        hvd.allreduce(torch.ones(2))
        print("trains", flush=True)
        while True:
            hvd.allreduce(torch.ones(2))
        """
    )
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": HOST, "MASTER_PORT": str(job.port)}
    for rank in "01":
        job.start(f"rank-{rank}", [sys.executable, program], RANK=rank, LOCAL_RANK=rank, **place)
    for rank in "01":
        job.line(f"rank-{rank}", "trains")
    job.kill("rank-1")
    assert job.finish() == {"rank-0": LOST_A_PEER, "rank-1": -9}, job.transcript()
    assert job.processes["rank-0"].lines_with("kvdist.errors.RankLostError: rank 1 on host ")
