"""The commands: versions and imports, debuggers, names of processes, restarts, and what exit codes say."""

from __future__ import annotations

import codecs
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

import kvdist
from tests.cases import each
from tests.ports import HOST

LOST_A_PEER = 75
"""The exit code of whoever ends because another process was lost."""
BY_SIGNAL_9 = 137


@each("module", ["kvdist", "kvdist_launch", "kvdist_launch.run_cli"])
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
PATIENT_END = ("--grace", "60")
"""Where a process that is slow to end shall still tell its own exit code."""


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
    own, sys.excepthook = sys.excepthook, lambda *words: (own(*words), print("the program's own hook", flush=True))
    store.barrier()
    print("trains", flush=True)
    if store.rank == 1 and sys.argv[1] == "bug":
        raise ValueError("a bug")
    if store.rank == 1 and sys.argv[1] == "gone":
        os._exit(0)
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


@pytest.mark.parametrize("how", ["bug", "killed"])
def test_a_failure_is_told_once_and_the_others_end_in_one_line_or_silently(job, script, how):
    program = "".join(line for line in LEAVES.splitlines(keepends=True) if "excepthook" not in line)
    launcher = job.launch(3, 2, sys.executable, script(program), how, options=PATIENT_END)
    job.line("launcher", "trains", count=3)
    if how == "killed":
        job.kill("worker-1")
    assert job.finish() == {"launcher": BY_SIGNAL_9 if how == "killed" else 1}, job.transcript()
    told = [line for line in launcher.text.splitlines() if "OMP_" not in line and "trains" not in line]
    said = {name: [line for line in told if line.startswith(f"{name} │ ")] for name in ("w0", "w1", "w2", "s0", "s1")}
    assert not launcher.lines_with("sched │") and not said["s0"] + said["s1"], job.transcript()
    (line,) = said["w0"] + said["w2"]  # the other one had the same to say
    assert line.partition(" │ ")[2].startswith("kvdist.errors.PeerLostError: worker-1 (host "), job.transcript()
    if how == "bug":
        assert told[0] == "w1 │ Traceback (most recent call last):" and said["w1"][-1] == "w1 │ ValueError: a bug"
        assert not launcher.lines_with("the last lines of"), "they stand above"
    else:
        assert told[-1].startswith("kvdist-launch: worker-1 (pid ") and "killed by signal 9" in told[-1]


def test_the_launcher_says_75_where_the_first_cause_is_a_lost_peer(job, script):
    launcher = job.launch(2, 1, sys.executable, script(LEAVES), "gone", options=PATIENT_END)
    assert job.finish() == {"launcher": LOST_A_PEER}, job.transcript()
    assert launcher.text.splitlines()[-1].startswith("kvdist-launch: job ended with exit code 75 after ")


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


# Debuggers.

STOPS = """
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.zeros(4, np.float32))
    if store.rank == 0:
        found = 40 + 2
        breakpoint()
    store.barrier()
    print(f"worker {store.rank} is through", flush=True)
    store.close()
"""


def test_a_debugger_gets_the_terminal_with_stdin(script):
    command = [sys.executable, "-m", "kvdist_launch", "-n", "2", "-s", "1", "--stdin", "w0"]
    terminal, side = os.openpty()
    process = subprocess.Popen(
        [*command, sys.executable, script(STOPS)], stdin=side, stdout=side, stderr=side, start_new_session=True
    )
    os.close(side)
    try:
        shown = read_until(terminal, "(Pdb) ")
        os.write(terminal, b"p found\n")
        assert "42" in read_until(terminal, "(Pdb) ")
        os.write(terminal, b"c\n")
        shown += read_until(terminal, "finished in")
        assert process.wait(100) == 0, shown
        assert "worker 0 is through" in shown and "worker 1 is through" in shown
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


def read_until(descriptor: int, text: str) -> str:
    """What a terminal shows up to the first time of a text, and what came with that."""
    shown, decoder = "", codecs.getincrementaldecoder("utf-8")()  # a character may come in two pieces
    while text not in shown:
        assert select.select([descriptor], [], [], 100)[0], f"{text!r} is not shown: {shown}"
        shown += decoder.decode(os.read(descriptor, 1 << 16))
    return shown


def test_a_debugger_without_input_is_told_how_to_get_some(job, script):
    launcher = job.launch(2, 1, sys.executable, script(STOPS), options=PATIENT_END)
    assert job.finish() == {"launcher": 1}, job.transcript()
    (sentence,) = launcher.lines_with("has no standard input")
    assert sentence.startswith("kvdist-launch: worker-0 ") and "--stdin w0" in sentence


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("-n", "2", "--stdin", "w2"), "--stdin names worker 2, and -n 2 has workers 0 to 1"),
        (("-n", "2", "--stdin", "s0"), "write the name of a worker, as in w0"),
        (("-n", "2", "-H", "d1:2", "--dry-run", "--stdin", "w1"), "--stdin worker-1: it runs on d1"),
    ],
)
def test_input_for_a_process_that_cannot_have_it_is_refused(job, words, sentence):
    launcher = job.start("launcher", [sys.executable, "-m", "kvdist_launch", *words, "true"])
    assert job.finish() == {"launcher": 2}
    assert launcher.lines_with(sentence), job.transcript()


# Names of processes.


@pytest.mark.parametrize(
    "popen", [subprocess.Popen], ids=["started"]
)  # a launcher that is forked has a process of its own to fork
def test_processes_are_named_after_role_and_rank(job, script, tmp_path):
    job.launch(2, 2, sys.executable, script(ENDLESS_AT_FIRST), str(tmp_path / "attempts"), options=("--grace", "1"))
    job.line("launcher", "trains", count=2)
    names = {node: Path(f"/proc/{pid}/comm").read_text().strip() for node, pid in job.children().items()}
    nodes = ("scheduler", "server-0", "server-1", "worker-0", "worker-1")
    assert names == {node: f"kv-{node}" for node in nodes}
    assert "train.py" in Path(f"/proc/{job.pid_of('worker-1')}/cmdline").read_text(), "the command is still there"
    job.kill("worker-1")
    assert job.finish() == {"launcher": BY_SIGNAL_9}, job.transcript()


# A scheduler of torch that also changes the momentum.

ONE_CYCLE = """
    import sys, torch, kvdist

    torch.manual_seed(0)
    net = torch.nn.Linear(4, 1)
    options = {"update_on_kvstore": False} if sys.argv[1] == "here" else {}
    trainer = kvdist.Trainer(net.parameters(), "adam", {"learning_rate": 0.01}, kvstore="dist", **options)
    optimizer = trainer.as_torch_optimizer()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)
    x, betas, losses = torch.randn(32, 4), set(), []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step() if len(losses) < 19 else None
        betas.add(optimizer.param_groups[0]["betas"][0])
        losses.append(loss.item())
    print(f"learned {losses[-1] < 0.5 * losses[0]} with momenta from {min(betas):.2f} to {max(betas):.2f}", flush=True)
    trainer.close()
"""


def test_one_cycle_trains_with_its_defaults_where_workers_update(job, script, tmp_path):
    # torch.optim makes a folder for a cache.
    launcher = job.launch(2, 1, sys.executable, script(ONE_CYCLE), "here", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    job.succeed()
    assert len(launcher.lines_with("learned True with momenta from 0.85 to 0.95")) == 2, job.transcript()


def test_one_cycle_says_what_to_do_where_servers_update(job, script, tmp_path):
    command = (sys.executable, script(ONE_CYCLE), "on servers")
    launcher = job.launch(1, 1, *command, options=PATIENT_END, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert job.finish() == {"launcher": 1}
    (sentence,) = launcher.lines_with("w0 │ ValueError: betas has changed from (0.9, 0.999) to (0.95, 0.999)")
    assert "cycle_momentum=False" in sentence and "update_on_kvstore=False" in sentence
