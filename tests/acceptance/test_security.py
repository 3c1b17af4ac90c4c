"""Who can reach the processes of a job, read what they say, or disturb them: docs/security.md."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests.integration.processes import EXIT_CONFIG, Job, environment_of

HERE = "127.0.0.1"
SOON_MS = 30_000

TRAIN = """
    import sys
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.arange(1000, dtype=np.float32))
    print("ready", flush=True)
    open(sys.argv[1]).read()
    store.push("w", np.ones(1000, np.float32))
    print("sum", store.pull("w").sum())
    store.close()
"""
JOIN = """
    from kvdist import kv
    kv.create("dist")
    print("joined")
"""


@pytest.fixture
def secret(tmp_path: Path) -> str:
    path = tmp_path / "job.secret"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def running(job: Job, script: Callable[..., str], tmp_path: Path) -> Callable[..., Callable[[], None]]:
    """Start a job with the launcher; returns, when its workers are ready, what lets them go on and end well."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)

    def start(workers: int, *options: str, **variables: str) -> Callable[[], None]:
        program = script(TRAIN)
        job.launch(workers, 2, sys.executable, program, str(fifo), options=options, **variables)
        job.line("launcher", "ready", count=workers)

        def go_on() -> None:
            with contextlib.ExitStack() as stack:
                for _ in range(workers):
                    stack.enter_context(fifo.open("wb"))
            job.finish()
            launcher = job.processes["launcher"]
            assert launcher.code == 0, job.transcript()
            assert len(launcher.lines_with("sum ")) == workers

        return go_on

    return start


def scheduler_port(job: Job) -> int:
    return int(environment_of(job.pid_of("scheduler"))["DMLC_PS_ROOT_PORT"])


def handshake(port: int) -> int:
    """What becomes of a client without encryption that dials a TCP port of this machine: the event of ZeroMQ."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_CLOSED
        monitor = client.get_monitor_socket(wanted)
        client.connect(f"tcp://{HERE}:{port}")
        assert monitor.poll(SOON_MS), "ZeroMQ says what became of the connection"
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        client.disable_monitor()
        monitor.close(0)
        return event


# What is asked for is done, or refused.


def test_a_secret_that_is_exported_before_a_job_of_one_machine_encrypts_it(job, running, script, secret):
    go_on = running(2, KVDIST_SECRET_FILE=secret)
    port = scheduler_port(job)
    assert handshake(port) == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    stranger = {**job.environment("worker", 2, 2), "DMLC_PS_ROOT_PORT": str(port), "KVDIST_RANK": "1"}
    job.start("stranger", [sys.executable, script(JOIN, "join.py")], **stranger)
    job.wait(lambda: job.processes["stranger"].code is not None, "the stranger ends")
    assert job.processes["stranger"].lines_with("AuthenticationError: "), job.transcript()
    go_on()


def test_a_job_of_one_machine_that_is_to_encrypt_draws_a_secret(job, running):
    go_on = running(1, KVDIST_SECURITY="curve")
    assert handshake(scheduler_port(job)) == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    go_on()


def test_the_secret_of_a_job_leaves_nothing_behind_when_launcher_and_guard_are_killed(job, running):
    before = set(Path("/dev/shm").glob("kvdist-*"))
    running(1, "--security", "curve")
    launcher = job.pid_of("launcher")
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    victims = [launcher, *map(int, children)]
    assert len(victims) == 1 + 1 + 1 + 2 + 1, "launcher, guard, scheduler, servers, worker"
    path = Path(environment_of(job.pid_of("scheduler"))["KVDIST_SECRET_FILE"])
    assert len(path.read_bytes()) == 32
    for pid in victims:
        os.kill(pid, 9)
    job.finish()
    assert not path.exists()
    assert set(Path("/dev/shm").glob("kvdist-*")) <= before
    assert not list(job.folder.iterdir())


@pytest.mark.parametrize("content", [None, b"short", b"x" * 32], ids=["missing", "short", "readable by others"])
def test_a_secret_that_cannot_be_used_is_refused_before_anything_starts(job, tmp_path, content):
    path = tmp_path / "bad.secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600 if content == b"short" else 0o644)
    job.launch(1, 1, "true", KVDIST_SECRET_FILE=str(path))
    assert job.finish() == {"launcher": EXIT_CONFIG}
    assert job.processes["launcher"].lines_with(f"error: KVDIST_SECRET_FILE is {str(path)!r}, "), job.transcript()


@pytest.mark.parametrize(
    ("servers", "options"), [(1, ["--security", "none"]), (0, [])], ids=["security none", "no servers"]
)
def test_a_secret_that_could_not_take_effect_is_refused(job, secret, servers, options):
    job.launch(2, servers, "true", options=options, KVDIST_SECRET_FILE=secret)
    assert job.finish() == {"launcher": EXIT_CONFIG}
    assert job.processes["launcher"].lines_with("error: KVDIST_SECRET_FILE "), job.transcript()
