"""Waits: those that can never end raise and name who waits where; pushes wait for room; slow workers are waited for."""

from __future__ import annotations

import re
import signal

import pytest

from kvdist.diagnostics import why
from tests.integration.processes import Job

SOON_S = 60.0
"""A deadlock is declared within 10 s; a busy machine may take longer."""

START = """
    import sys, threading, time
    from pathlib import Path
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    rank = store.rank
"""


def deadlocked(job: Job, workers: int = 2, within_s: float = SOON_S) -> list[str]:
    """Wait for the end of a job in which all workers raise `DeadlockError`; per worker the line that says why."""
    codes = job.finish(within_s)
    told = []
    for rank in range(workers):
        name = f"worker-{rank}"
        assert codes[name] == 1, f"exit codes {codes}\n{job.transcript()}"
        lines = job.processes[name].lines_with("kvdist.errors.DeadlockError: ")
        assert lines, f"{name} did not raise DeadlockError\n{job.transcript()}"
        told.append(lines[-1])
    assert codes["scheduler"] == 1, f"exit codes {codes}\n{job.transcript()}"
    return told


@pytest.mark.slow
def test_init_in_opposite_orders_raises_on_every_worker_and_names_both_calls(job, script):
    program = script(
        START
        + """
    for key in ("a", "b") if rank == 0 else ("b", "a"):
        store.init(key, np.zeros(4, np.float32))
    """
    )
    job.cluster(2, 1, program)
    for line in deadlocked(job):
        assert "worker-0 waits for worker-1 in init of key 'a'" in line
        assert "worker-1 waits for worker-0 in init of key 'b'" in line


def test_a_deadlock_is_found_at_once_after_large_arrays_were_sent_over_the_network(job, script):
    # pyzmq then has a thread that frees what was sent.
    program = script(
        START
        + """
    store.init("w", np.zeros(1 << 20, np.float32))
    store.pushpull("w", np.ones(1 << 20, np.float32))
    for key in ("a", "b") if rank == 0 else ("b", "a"):
        store.init(key, np.zeros(4, np.float32))
    """
    )
    job.cluster(2, 1, program, KVDIST_TRANSPORT="tcp", KVDIST_SECURITY="none")
    for line in deadlocked(job, within_s=50):
        assert "worker-0 waits for worker-1 in init of key 'a'" in line
        assert "worker-1 waits for worker-0 in init of key 'b'" in line


@pytest.mark.parametrize(
    ("call", "place"),
    [pytest.param("store.barrier()", "barrier", marks=pytest.mark.slow), ("store.average(1.0)", "average of")],
)
def test_workers_that_take_uneven_steps_and_then_meet_raise(job, script, call, place):
    program = script(
        START
        + f"""
    store.init("w", np.zeros(4, np.float32))
    for step in range(3 if rank == 0 else 2):
        store.push("w", np.ones(4, np.float32))
        value = store.pull("w")
    {call}
    """
    )
    job.cluster(2, 1, program)
    for line in deadlocked(job):
        assert "worker-0 waits for worker-1 to push key 'w' (step 3), in pull of key 'w'" in line
        assert re.search(rf"worker-1 waits for worker-0 in [^;]*{place}", line)


EXCHANGE = (
    START
    + """
    import torch
    from kvdist import Trainer
    weight = torch.nn.Parameter(torch.zeros(3))
    trainer = Trainer([("w", weight)], "sgd", {"learning_rate": 0.1}, kvstore=store)
    for _ in range(2):
        weight.grad = torch.ones(3)
        trainer.step(samples=2)
    trainer.exchange()
    trainer.exchange() if rank == 0 else store.barrier()
    """
)
"""Worker 0 makes another exchange than the others do."""


def test_an_exchange_that_the_others_do_not_make_raises(job, script):
    launcher = job.launch(2, 1, script(EXCHANGE), options=["--policy", "quota:64"])
    job.finish(SOON_S)
    (line,) = {one[one.index("deadlock:") :] for one in launcher.lines_with("kvdist.errors.DeadlockError: ")}
    assert "worker-0 waits for worker-1 in exchange() or save_checkpoint()" in line
    assert "worker-1 waits for worker-0 in barrier" in line


def test_who_waits_in_an_exchange_is_known_where_no_deadlock_is_looked_for(job, script, tmp_path):
    # A thread of the script may act, so nobody may say that the job cannot go on.
    thread = "threading.Thread(target=threading.Event().wait, daemon=True).start()"
    program = script(EXCHANGE.replace("import torch", f"import torch; {thread}", 1))
    options = ["--policy", "quota:64", "--dump", str(tmp_path)]
    launcher = job.launch(2, 1, program, options=options, KVDIST_STALL_SHUTDOWN_S="8", KVDIST_EXPLAIN_AFTER_S="4")
    job.finish(SOON_S)
    assert launcher.code != 0
    assert launcher.lines_with("worker-0: waiting") and launcher.lines_with("for worker-1"), job.transcript()
    told = why.explained(tmp_path)
    assert re.search(r"orker-0.* wait(ed|ing) [\d.]+ s for worker-1.* to make an exchange of all workers", told), told
    assert re.search(r"orker-1.* wait(ed|ing) [\d.]+ s for worker-0.* to reach barrier", told), told
    assert "waited for nobody" not in told


def test_a_close_that_waits_for_pushes_of_a_worker_that_waits_for_it_raises(job, script):
    program = script(
        START
        + """
    store.init("w", np.zeros(4, np.float32))
    for step in range(4 if rank == 0 else 1):
        store.push("w", np.ones(4, np.float32))
    if rank == 0:
        store.close()
    else:
        store.barrier()
    """
    )
    job.cluster(2, 1, program)
    for line in deadlocked(job):
        assert "worker-0 waits for worker-1 to push key 'w' (step 2), in leaving the cluster" in line
        assert "worker-1 waits for worker-0 in barrier" in line


def test_a_worker_that_closes_after_fewer_steps_is_not_waited_for(job, script):
    program = script(
        START
        + """
    store.init("w", np.zeros(4, np.float32))
    for step in range(9 if rank == 0 else 4):
        store.push("w", np.ones(4, np.float32))
        value = store.pull("w")
    store.close()
    print("last", value[0])
    """
    )
    job.cluster(2, 1, program)
    job.succeed()
    assert job.processes["worker-0"].lines_with("last 1.0")
    assert job.processes["worker-1"].lines_with("last 2.0")


@pytest.mark.slow
def test_a_worker_that_computes_or_has_a_thread_that_will_push_is_waited_for(job, script):
    # Both phases last longer than it takes to declare a deadlock.
    program = script(
        START
        + """
    store.init(["w", "v"], [np.zeros(4, np.float32)] * 2)
    if rank == 1:
        time.sleep(15)
    store.barrier()
    print("waited for who computes")

    def push():
        time.sleep(15 if rank == 1 else 0)
        store.push("w", np.ones(4, np.float32))

    thread = threading.Thread(target=push)
    thread.start()
    if rank == 0:
        thread.join()
        print("sum", store.pull("w").sum())
    store.barrier()
    thread.join()
    store.close()
    """
    )
    job.cluster(2, 1, program)
    job.succeed()
    assert job.processes["worker-0"].lines_with("sum 8.0")


IDLE_THREAD = """
    threading.Thread(target=threading.Event().wait, name="metrics", daemon=True).start()
    for key in ("a", "b") if rank == 0 else ("b", "a"):
        store.init(key, np.zeros(4, np.float32))
"""


@pytest.mark.slow
def test_a_thread_that_has_never_called_kvdist_keeps_a_deadlock_from_being_found_for_a_minute_only(job, script):
    job.cluster(2, 1, script(START + IDLE_THREAD))
    for line in deadlocked(job, within_s=SOON_S + 60):
        assert "worker-0 waits for worker-1 in init of key 'a'" in line


def test_a_thread_that_keeps_a_deadlock_from_being_found_is_named_with_what_ends_the_wait(job, script):
    job.launch(2, 1, script(START + IDLE_THREAD), KVDIST_STALL_SHUTDOWN_S="4")
    job.finish(SOON_S)
    told = [line for line in job.transcript().splitlines() if "a deadlock is not looked for" in line]
    assert told, job.transcript()
    for line in told:
        assert "init of key" in line
        assert "while these threads may call kvdist: 'metrics'; KVDIST_STALL_SHUTDOWN_S ends such a wait" in line


def test_a_wait_of_stall_shutdown_seconds_raises_and_ends_the_job(job, script):
    program = script(
        START
        + """
    store.init("w", np.zeros(4, np.float32))
    if rank == 1:
        threading.Event().wait()
    store.pushpull("w", np.ones(4, np.float32))
    """
    )
    launcher = job.launch(2, 1, program, KVDIST_STALL_SHUTDOWN_S="3")
    job.finish(SOON_S)
    assert launcher.code != 0
    line = launcher.lines_with("kvdist.errors.DeadlineExceeded: ")[0]
    assert "pushpull of key 'w'" in line
    assert "for worker-1" in line
    assert "KVDIST_STALL_SHUTDOWN_S" in line


MIB = 1 << 20


def peak_bytes(job: Job, name: str) -> int:
    """The most memory that a process has had, shared memory included."""
    with open(f"/proc/{job.pid_of(name)}/status") as status:
        (line,) = [line for line in status if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_pushes_ahead_of_a_slow_worker_wait_for_room_and_memory_stays_bounded(job, script, tmp_path, transport):
    program = script(
        START
        + """
    folder = Path(sys.argv[1])
    store.init("w", np.zeros(1 << 20, np.float32))
    store.set_optimizer("sgd", learning_rate=1.0)
    ones = np.ones(1 << 20, np.float32)
    pushed = 0

    def push():
        global pushed
        for pushed in range(1, 201):
            store.push("w", ones)

    def wait_for(name):
        while not (folder / name).exists():
            time.sleep(0.05)

    print("ready", flush=True)
    if rank == 1:
        wait_for("ahead")
    thread = threading.Thread(target=push)
    thread.start()
    if rank == 0:
        before = -1
        while before != pushed or pushed < 2:
            before = pushed
            time.sleep(1)
        print("pushed", pushed, flush=True)
    thread.join()
    value = store.pull("w")
    print("all arrived" if (value == -400).all() else value, flush=True)
    wait_for("end")
    store.close()
    """
    )
    variables = {"KVDIST_UNDER_WAY_BYTES": str(16 * MIB), "KVDIST_TRANSPORT": transport}
    if transport == "tcp":
        variables["KVDIST_SECURITY"] = "none"
    job.cluster(2, 1, program, str(tmp_path), **variables)
    names = ("server-0", "worker-0")
    job.line("worker-0", "ready")
    before = {name: peak_bytes(job, name) for name in names}
    pushed = int(job.line("worker-0", "pushed ").split()[1])
    assert 2 <= pushed <= 8, "16 MiB have room for four pushes of 4 MiB; the next one waits"
    (tmp_path / "ahead").touch()
    for rank in range(2):
        job.line(f"worker-{rank}", "all arrived")
    for name in names:
        grown = peak_bytes(job, name) - before[name]
        assert grown < 200 * MIB, f"{name} has grown by {grown} bytes, where 800 MiB were pushed"
    (tmp_path / "end").touch()
    job.succeed()


def test_opposite_orders_of_keys_go_on_with_the_least_room(job, script):
    program = script(
        START
        + """
    keys = ["a", "b", "c"] if rank == 0 else ["c", "b", "a"]
    for key in "abc":
        store.init(key, np.zeros(100_000, np.float32))
    for step in range(30):
        for key in keys:
            store.push(key, np.full(100_000, step, np.float32))
    print("last", {float(store.pull(key)[0]) for key in keys})
    store.close()
    """
    )
    job.cluster(2, 1, program, KVDIST_UNDER_WAY_BYTES="1")
    job.succeed()
    for rank in range(2):
        assert job.processes[f"worker-{rank}"].lines_with("last {58.0}")


def test_pushes_that_wait_for_room_that_only_each_other_could_make_raise(job, script):
    program = script(
        START
        + """
    for key in "ab":
        store.init(key, np.zeros(100_000, np.float32))
    for step in range(30):
        store.push("ab"[rank], np.ones(100_000, np.float32))
    """
    )
    job.cluster(2, 1, program, KVDIST_UNDER_WAY_BYTES="1")
    for line in deadlocked(job):
        assert re.search(r"worker-0 waits for worker-1 to push key 'a' \(step 1\), in push \(for room: [^;]*\)", line)
        assert re.search(r"worker-1 waits for worker-0 to push key 'b' \(step 1\), in push \(for room: [^;]*\)", line)


@pytest.mark.parametrize("way", ["loss", "interrupt", "close"])
def test_a_push_that_waits_for_room_ends_with_whatever_ends_the_job_or_the_store(job, script, way):
    program = script(
        START
        + """
    store.init("w", np.zeros(100_000, np.float32))
    if rank == 1:
        threading.Event().wait()

    def watch():
        before = -1
        while before != pushed or pushed < 2:
            before = pushed
            time.sleep(0.5)
        print("waits", flush=True)
        if sys.argv[1] == "close":
            store.close()

    pushed = 0
    threading.Thread(target=watch, daemon=True).start()
    for pushed in range(1, 100):
        store.push("w", np.ones(100_000, np.float32))
    """
    )
    job.cluster(2, 1, program, way, KVDIST_UNDER_WAY_BYTES="1")
    job.line("worker-0", "waits")
    worker = job.processes["worker-0"]
    if way != "close":
        job.kill(*{"loss": ("worker-1",), "interrupt": ("worker-0", signal.SIGINT)}[way])
    expected = {"loss": "PeerLostError: worker-1", "interrupt": "KeyboardInterrupt", "close": "StoreClosed: "}[way]
    job.line("worker-0", expected)
    if way != "loss":
        job.kill("worker-1")
    job.finish(SOON_S)
    assert worker.code != 0
