"""Who can reach the processes of a job, read what they say, or disturb them: docs/security.md."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from tests.acceptance.hostile import (
    ABORT,
    ACK,
    ENVELOPE,
    HERE,
    MORE,
    PEER_LOST,
    REJECTED,
    SCHEDULER,
    SERVER,
    WORKER,
    dialled,
    frame,
    listening_ports,
    message,
    read_message,
    resident_bytes,
    wait_until_read,
)
from tests.integration.processes import EXIT_CONFIG, Job, environment_of

FOLDER = Path(f"/tmp/kvdist-{os.geteuid()}")
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


def sockets_of(job: Job) -> list[Path]:
    """The files at which the processes of a launched job listen."""
    port = scheduler_port(job)
    sockets = [path for path in FOLDER.iterdir() if path.is_socket()]
    return [path for path in sockets if port in (int(word) for word in path.name.split("-")[1:2])]


def lets_in_plain_text(port: int) -> bool:
    """Whether a client without encryption may talk at a TCP port of this machine.

    ZeroMQ says of a refusal what was wrong, or only that there was one: if the other side had hung up by then.
    """
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        refused = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        wanted = zmq.EVENT_HANDSHAKE_SUCCEEDED | refused[0] | refused[1]
        monitor = client.get_monitor_socket(wanted)
        client.connect(f"tcp://{HERE}:{port}")
        assert monitor.poll(SOON_MS), "ZeroMQ says what became of the connection"
        event = int.from_bytes(monitor.recv_multipart()[0][:2], "little")
        client.disable_monitor()
        monitor.close(0)
        return event not in refused


# What is asked for is done, or refused.


def test_a_secret_that_is_exported_before_a_job_of_one_machine_encrypts_it(job, running, script, secret):
    go_on = running(2, KVDIST_SECRET_FILE=secret)
    port = scheduler_port(job)
    assert not lets_in_plain_text(port)
    stranger = {**job.environment("worker", 2, 2), "DMLC_PS_ROOT_PORT": str(port), "KVDIST_RANK": "1"}
    job.start("stranger", [sys.executable, script(JOIN, "join.py")], **stranger)
    job.wait(lambda: job.processes["stranger"].code is not None, "the stranger ends")
    assert job.processes["stranger"].lines_with("AuthenticationError: "), job.transcript()
    go_on()


def test_a_job_of_one_machine_that_is_to_encrypt_draws_a_secret(job, running):
    go_on = running(1, KVDIST_SECURITY="curve")
    assert not lets_in_plain_text(scheduler_port(job))
    go_on()


@pytest.mark.parametrize("popen", [subprocess.Popen], ids=["started"])  # a launcher that is forked has one child more
def test_the_secret_of_a_job_leaves_nothing_behind_when_launcher_and_guard_are_killed(job, running):
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
    assert not list(job.folder.iterdir()), "the folder for temporary files and the one of XDG_RUNTIME_DIR"


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


# On one machine.


def test_a_job_of_one_machine_has_no_tcp_port_and_its_sockets_lie_where_only_its_user_gets(job, running):
    go_on = running(2)
    found = sockets_of(job)
    assert len(found) >= 3, "scheduler and servers listen"
    for pid in job.children().values():
        assert not listening_ports(pid), job.transcript()
    assert FOLDER.stat().st_mode & 0o777 == 0o700 and FOLDER.stat().st_uid == os.geteuid()
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in found)
    go_on()
    assert not [path for path in found if path.exists()]


def test_another_user_of_the_machine_reaches_nothing(job, running):
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: to be another user this test must run as root")
    go_on = running(1)
    path = max(sockets_of(job), key=lambda path: len(path.name))
    trial = f"import socket; socket.socket(socket.AF_UNIX).connect({str(path)!r})"
    done = subprocess.run(["/usr/bin/env", "python3", "-c", trial], user=65534, capture_output=True, text=True)
    assert "PermissionError" in done.stderr, done
    go_on()


def test_a_server_that_is_killed_leaves_no_socket_behind(job, running):
    running(1)
    found = sockets_of(job)
    job.kill("server-1")
    assert job.finish()["launcher"] != 0
    assert len(found) >= 3 and not [path for path in found if path.exists()]


def test_processes_that_are_started_by_hand_meet_and_a_second_job_at_their_port_is_told(job, script, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    job.cluster(1, 1, sys.executable, script(TRAIN), str(fifo))
    job.line("worker-0", "ready")
    job.start("second", [sys.executable, "-m", "kvdist"], **job.environment("scheduler", 1, 1))
    job.wait(lambda: job.processes["second"].code is not None, "the second scheduler ends")
    assert job.processes["second"].code == EXIT_CONFIG
    assert job.processes["second"].lines_with(f"in use by process {job.pid_of('scheduler')} "), job.transcript()
    fifo.open("wb").close()
    codes = job.finish()
    assert [code for name, code in codes.items() if name != "second"] == [0, 0, 0], job.transcript()
    assert "refused" not in job.processes["scheduler"].text, job.transcript()
    assert job.processes["worker-0"].lines_with("sum 1000.0"), job.transcript()


def test_plain_tcp_is_said_in_a_line(job, running):
    go_on = running(1, "--security", "none")
    assert listening_ports(job.pid_of("scheduler"))
    said = "every user of this machine can reach the sockets of this job, which are plain TCP"
    assert len(job.processes["launcher"].lines_with(said)) == 1
    go_on()


# Strangers at plain TCP ports.


@pytest.fixture
def plain(job, running):
    """A job without protection: what lets it go on, and the ports of scheduler and of server-0."""
    go_on = running(2, "--security", "none")
    ports = [listening_ports(job.pid_of(name)) for name in ("scheduler", "server-0")]
    assert [len(found) for found in ports] == [1, 1]
    return go_on, *(found.pop() for found in ports)


def test_strangers_learn_nothing(job, plain):
    go_on, *ports = plain
    tag = zlib.crc32(environment_of(job.pid_of("scheduler"))["KVDIST_JOB"].encode())
    answers = 0
    for port in ports:
        for role in (WORKER, SERVER):
            for asked_job in (7, tag):
                with dialled(port) as connection:
                    connection.sendall(message(ACK, [False], asked_job, role, 0, 99))
                    frames = read_message(connection)
                    while frames and frames[0][:5] != b"KVDI\2":
                        frames = read_message(connection)
                    if frames:
                        answers += 1
                        _, _, kind, _, told_job, epoch, _, incarnation, *_ = ENVELOPE.unpack(frames[0])
                        assert (kind, told_job, epoch, incarnation) == (REJECTED, asked_job, 0, 0)
    assert answers >= 2, "the other side says at least to other jobs that they are wrong"
    go_on()


def test_a_forged_abort_changes_nothing_and_is_counted(job, plain):
    go_on, *ports = plain
    tag = zlib.crc32(environment_of(job.pid_of("scheduler"))["KVDIST_JOB"].encode())
    forged = [PEER_LOST, "worker-0", "host", "made up", -1, "made up"]
    for port in ports:
        with dialled(port) as connection:
            connection.sendall(message(ABORT, forged, tag, SCHEDULER, 0, 1))
            read_message(connection)
    go_on()
    assert job.processes["launcher"].lines_with("server-0 refused 1 stranger(s)"), job.transcript()


BURST, BURSTS = 1000, 40


def test_messages_of_made_up_processes_take_no_memory_once_they_have_been_read(job, plain):
    go_on, *ports = plain
    tag = zlib.crc32(environment_of(job.pid_of("scheduler"))["KVDIST_JOB"].encode())
    for name, port in zip(("scheduler", "server-0"), ports, strict=True):
        pid, resident = job.pid_of(name), []
        for first in range(0, BURSTS * BURST, BURST):
            burst = b"".join(message(ACK, [False], tag, WORKER, 0, first + number) for number in range(BURST))
            with contextlib.suppress(ConnectionError), dialled(port) as connection:
                connection.sendall(burst)
                read_message(connection)
            wait_until_read(pid)
            resident.append(resident_bytes(pid))
        # The first bursts raise the high-water mark of the memory for unread messages: malloc keeps it.
        grown = resident[-1] - resident[BURSTS // 4]
        assert grown < 1 << 20, f"{name}: {grown >> 10} KiB for {BURST * BURSTS * 3 // 4} messages"
    go_on()


def test_a_message_without_an_end_is_cut_off_and_leaves_no_memory_behind(job, plain):
    go_on, *ports = plain
    piece = frame(bytes(1 << 20), MORE)
    for name, port in zip(("scheduler", "server-0"), ports, strict=True):
        before = resident_bytes(job.pid_of(name))
        for _ in range(6):
            with contextlib.suppress(ConnectionError), dialled(port) as connection:
                for _ in range(UNFINISHED_MIB + 1):
                    connection.sendall(piece)
                while connection.recv(1 << 16):
                    pass  # probes, until the other side hangs up
        grown = resident_bytes(job.pid_of(name)) - before
        assert grown < 4 * UNFINISHED_MIB << 20, f"{grown >> 20} MiB"
    go_on()


UNFINISHED_MIB = 128
"""What a connection may bring before its first complete message."""


def test_connections_that_say_nothing_cannot_use_up_the_descriptors(job, script, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    variables = {"KVDIST_SECURITY": "none", "DMLC_NUM_WORKER": "1"}
    limited = ["prlimit", "--nofile=256:256", sys.executable, "-m", "kvdist"]
    if shutil.which("prlimit") is None:
        pytest.skip("NOT TESTED: a limit on descriptors needs prlimit (util-linux)")
    job.start("scheduler", limited, **{**job.environment("scheduler", 1, 1), **variables})
    job.node("server-0", 1, 1, **variables)
    pid = job.pid_of("scheduler")
    job.wait(lambda: job.port in listening_ports(pid), "the scheduler listens")
    with contextlib.ExitStack() as stack:
        for _ in range(300):  # more than there are descriptors
            with contextlib.suppress(ConnectionError):
                stack.enter_context(dialled(job.port))
        job.node("worker-0", 1, 1, sys.executable, script(TRAIN), str(fifo), **variables)
        job.line("worker-0", "ready")
        job.wait(
            lambda: len(os.listdir(f"/proc/{pid}/fd")) < 200, "a quarter of 256, and the scheduler's own, are left"
        )
    fifo.open("wb").close()
    job.succeed()
