"""What users, other programs and other jobs do wrong: each mistake brings its sentence, and nothing hangs."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
import sys
import time
from pathlib import Path

import pytest
import zmq

from kvdist.config.settings import Limits
from kvdist.config.sockets import local_endpoint
from tests.integration.processes import EXIT_CONFIG, HOST, program

BRIEF = {"KVDIST_CONNECT_TIMEOUT_S": "1"}


def listening_port(pid):
    """The TCP port on which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            match = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(link))
            if match:
                inodes.add(match[1])
    tables = [Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    (port,) = {int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[9] in inodes}
    return port


# Calls.


def test_wrong_calls_name_key_and_reason_and_break_nothing(job):
    launcher = job.launch(2, 2, "mistakes.py", "calls")
    job.succeed()
    said = [line.removeprefix("w1 │ ") for line in launcher.text.splitlines() if line.startswith("w1 │ ")]
    expected = [
        r"KeyNotInitialised: key 'unknown' has not been initialised; call init first\. The store has the keys 'w'",
        r"KeyNotInitialised: key 'unknown' has not been initialised",
        r"ValueError: key 'w' has shape \(3, 2\), but the value has shape \(2, 3\)",
        r"TypeError: key 'w': arrays of dtype bool are not supported; use one of float32",
        r"ValueError: key 'w' has shape \(3, 2\), but the value has shape \(3,\)",
        r"KeyNotInitialised: key 'unknown' has not been initialised",
        r"InitMismatch: key 'w' was initialised with shape \(3, 2\) and dtype float32, and now with shape \(5,\)",
        r"TypeError: .*a value must be a NumPy array or a torch tensor, not str",
        r"TypeError: .*arrays of dtype complex64 are not supported",
        r"ValueError: the time-out of a barrier is 0; it must be a positive number of seconds, or None",
        r"TypeError: .*servers run no functions from workers: use set_optimizer, or a 'local' store",
        r"ValueError: .*sgdd.*sgd",
        r"ValueError: there is no store called 'dist_sink'; did you mean dist_sync\? Known are: local, .*dist_async",
        r"works",
    ]
    assert len(said) == len(expected), job.transcript()
    for line, pattern in zip(said, expected, strict=True):
        assert re.match(pattern, line), f"{line!r} is not {pattern!r}"


def test_shapes_or_dtypes_that_differ_between_workers_are_told_to_all_of_them(job):
    launcher = job.launch(3, 2, "mistakes.py", "shapes")
    job.succeed()
    for rank in range(3):
        said = [line for line in launcher.text.splitlines() if line.startswith(f"w{rank} │ ")]
        assert len(said) == 4, job.transcript()
        for line, key in zip(said[:3], ("w", "v", "u"), strict=True):
            assert f"InitMismatch: worker-1 declares key {key!r} with " in line, job.transcript()
            assert "; worker-0 and worker-2 with " in line, line
        assert "shape (3,)" in said[0] and "shape (4,)" in said[0]
        assert "float32" in said[1] and "float64" in said[1]


def test_models_that_differ_between_workers_are_told_to_all_of_them(job):
    pytest.importorskip("torch")
    launcher = job.launch(3, 2, "mistakes.py", "models")
    job.succeed()
    expected = [
        r"worker-1 says: 1 parameters, trained are 0; worker-0 and worker-2 say: 2 parameters, trained are 0-1",
        r"worker-1 says: 4 parameters, trained are 0-1; worker-0 and worker-2 say: 4 parameters, trained are 0-3",
        r"worker-1 says: .*'learning_rate': 0\.5.*; worker-0 and worker-2 say: .*'learning_rate': 0\.25",
        r"works",
    ]
    for rank in range(3):
        said = [line for line in launcher.text.splitlines() if line.startswith(f"w{rank} │ ")]
        assert len(said) == len(expected), job.transcript()
        for line, pattern in zip(said, expected, strict=True):
            assert re.search(pattern, line), f"{line!r} has no {pattern!r}"
        assert all("InitMismatch: the workers do not agree." in line for line in said[:3]), job.transcript()


def test_stores_of_different_types_are_refused(job):
    launcher = job.launch(2, 1, "mistakes.py", "stores")
    job.finish()
    text = "every worker must create its stores in the same order and with the same types"
    assert launcher.lines_with(text), job.transcript()


# Environments.


def alone(job, *words, **variables):
    """Run one program, without a cluster around it, to its end."""
    process = job.start("alone", program(*words), **variables)
    job.finish()
    return process


def test_half_an_environment_is_refused_naming_what_is_missing(job):
    given = {"DMLC_ROLE": "worker", "DMLC_PS_ROOT_URI": HOST, "DMLC_NUM_WORKER": "2"}
    process = alone(job, "mistakes.py", "create", **given)
    assert "ConfigError: the environment describes half a cluster: " in process.text
    assert "DMLC_PS_ROOT_PORT, DMLC_NUM_SERVER are missing" in process.text
    assert "Start with kvdist-launch" in process.text


@pytest.mark.parametrize(
    ("launcher", "variables"),
    [
        ("torchrun", {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": HOST, "MASTER_PORT": "29500"}),
        ("Open MPI's mpirun", {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}),
        ("Slurm's srun", {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}),
    ],
)
def test_the_environment_of_another_launcher_is_refused(job, launcher, variables):
    process = alone(job, "mistakes.py", "create", **variables)
    assert f"ConfigError: {launcher} started 2 tasks" in process.text
    assert "Start with kvdist-launch -n WORKERS -s SERVERS COMMAND instead" in process.text


def test_a_worker_that_cannot_reach_the_scheduler_gives_up_in_time(job):
    begun = time.monotonic()
    process = alone(job, "mistakes.py", "create", **job.environment("worker", 1, 1), **BRIEF)
    assert process.ended_at - begun < Limits().connect_timeout_s
    text = f"DeadlineExceeded: the scheduler at {local_endpoint(job.port)} did not answer within 1 s: is it running"
    assert text in process.text


def test_a_server_that_cannot_reach_the_scheduler_gives_up_in_time(job):
    process = alone(job, sys.executable, "-m", "kvdist", **job.environment("server", 1, 1), **BRIEF)
    assert process.code == 1
    assert f"kvdist: the scheduler at {local_endpoint(job.port)} did not answer within 1 s" in process.text


def test_a_scheduler_host_that_does_not_exist_is_named(job):
    variables = {**job.environment("server", 1, 1), "DMLC_PS_ROOT_URI": "no-such-host.invalid"}
    process = alone(job, sys.executable, "-m", "kvdist", **variables, **BRIEF)
    assert process.code == EXIT_CONFIG, process.text
    assert "kvdist: no way from this machine to the scheduler at no-such-host.invalid:" in process.text


def test_a_cluster_that_never_becomes_complete_ends_and_names_who_is_missing(job):
    # First who is to be there in time, and only then the one that looks at the clock.
    job.node("worker-0", 2, 1, "mistakes.py", "create", KVDIST_EXPLAIN_AFTER_S="0.5")
    job.line("worker-0", "waiting for the scheduler")
    job.node("scheduler", 2, 1, KVDIST_FORM_TIMEOUT_S="5")
    job.finish()
    text = "the cluster is incomplete after 5 s: server-0, worker-1 did not register"
    assert text in job.processes["scheduler"].text, job.transcript()
    assert "worker-0" not in job.processes["scheduler"].text
    assert job.processes["worker-0"].lines_with("Error: ") or job.processes["worker-0"].lines_with("DeadlineExceeded: ")


def test_a_port_that_is_taken_is_named(job):
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((HOST, job.port))
        other.listen()
        variables = {**job.environment("scheduler", 1, 1), "KVDIST_SECURITY": "none"}
        process = alone(job, sys.executable, "-m", "kvdist", **variables)
    assert process.code == EXIT_CONFIG, process.text
    assert f"{HOST}:{job.port}: it is in use by process {os.getpid()} (" in process.text
    assert "Traceback" not in process.text


def test_two_workers_that_claim_one_rank_are_named(job):
    for name in ("scheduler", "server-0"):
        job.node(name, 2, 1)
    for name in ("one", "other"):
        job.start(name, program("mistakes.py", "create"), **job.environment("worker", 2, 1), KVDIST_RANK="0")
    one, other = job.processes["one"], job.processes["other"]
    job.wait(lambda: one.code is not None or other.code is not None, "one of the two is refused")
    refused, taken = (one, other) if one.code is not None else (other, one)
    assert "ConfigError: " in refused.text, job.transcript()
    assert f"worker-0 is taken by process {taken.pid} on {socket.gethostname()}" in refused.text, job.transcript()
    assert f"process {refused.pid} on " in refused.text and "each process needs a different KVDIST_RANK" in refused.text
    job.node("worker-1", 2, 1, "mistakes.py", "create")
    job.succeed()
    assert "nothing was raised" in taken.text


def test_a_worker_too_many_is_refused(job):
    job.cluster(1, 1, "faults.py", "endless")
    job.line("worker-0", "going")
    late = job.start("late", program("mistakes.py", "create"), **job.environment("worker", 1, 1))
    job.wait(lambda: late.code is not None, "the second worker is refused")
    assert "ConfigError: " in late.text and "the cluster has its 1 worker(s) already" in late.text
    job.kill("worker-0")
    job.finish()


def test_a_size_that_differs_between_processes_is_refused(job):
    for name in ("scheduler", "server-0"):
        job.node(name, 1, 1)
    wrong = job.start("wrong", program("mistakes.py", "create"), **job.environment("worker", 2, 1))
    job.wait(lambda: wrong.code is not None, "the worker is refused")
    text = "it expects 2 worker(s) and 1 server(s), the scheduler 1 and 1: DMLC_NUM_WORKER and DMLC_NUM_SERVER"
    assert "ConfigError: " in wrong.text and text in wrong.text
    job.node("worker-0", 1, 1, "nothing.py")
    job.wait(lambda: all(p.code is not None for p in job.processes.values()), "the right worker is served")
    assert [job.processes[name].code for name in ("scheduler", "server-0", "worker-0")] == [0, 0, 0]


def test_another_jobs_process_is_refused_and_the_job_goes_on(job):
    for name in ("scheduler", "server-0"):
        job.node(name, 1, 1)
    other = job.start(
        "other", program("mistakes.py", "create"), **job.environment("worker", 1, 1), KVDIST_JOB="another"
    )
    job.wait(lambda: other.code is not None, "the other job's worker is refused")
    assert "ConfigError: " in other.text and "this port belongs to another job" in other.text
    job.node("worker-0", 1, 1, "nothing.py")
    job.succeed()
    # It says hello again until it has read the answer, and each time is counted.
    assert re.search(r"refused [1-9]\d* stranger\(s\)", job.processes["scheduler"].text), job.transcript()


def test_another_version_of_the_protocol_is_refused_and_the_job_goes_on(job):
    for name in ("scheduler", "server-0"):
        job.node(name, 1, 1)
    other = job.start("other", program("mistakes.py", "other_version"), **job.environment("worker", 1, 1))
    job.wait(lambda: other.code is not None, "the other version's worker is refused")
    assert "ConfigError: the peer speaks version" in other.text, job.transcript()
    assert "install the same" in other.text
    job.node("worker-0", 1, 1, "nothing.py")
    job.succeed()
    assert "dropped an invalid message from a stranger: the peer speaks version" in job.processes["scheduler"].text


def test_a_command_that_does_not_exist_is_named(job):
    launcher = job.launch(2, 2, "no-such-program", "--option")
    job.finish()
    assert launcher.code == 127
    text = "kvdist-launch: error: the command 'no-such-program' does not exist: it is not in any directory of PATH"
    assert text in launcher.text


@pytest.mark.parametrize("address", ["0.0.0.0", "192.0.2.77"])
def test_a_scheduler_that_others_could_reach_needs_to_be_told_so(job, address):
    variables = {**job.environment("scheduler", 1, 1), "DMLC_PS_ROOT_URI": address}
    process = alone(job, sys.executable, "-m", "kvdist", **variables)
    assert process.code == EXIT_CONFIG
    assert f"kvdist: {address} can be reached from other machines, and this job does not encrypt" in process.text
    assert "Set KVDIST_SECURITY=none if the network is trusted" in process.text


def test_a_server_that_others_could_reach_needs_to_be_told_so(job):
    variables = {**job.environment("server", 1, 1), "DMLC_NODE_HOST": "0.0.0.0"}
    process = alone(job, sys.executable, "-m", "kvdist", **variables)
    assert process.code == EXIT_CONFIG
    assert "kvdist: 0.0.0.0 can be reached from other machines" in process.text


def test_a_worker_script_does_not_become_a_server(job):
    process = alone(job, "mistakes.py", "create", **job.environment("server", 1, 1))
    text = "ConfigError: DMLC_ROLE is server, but only workers create stores; start this process with"
    assert text in process.text


def test_python_m_kvdist_without_a_role_shows_its_commands_and_does_not_end_well(job):
    process = alone(job, sys.executable, "-m", "kvdist")
    assert process.code == EXIT_CONFIG
    assert "usage: kvdist COMMAND" in process.text and "DMLC_ROLE is" in process.text


def test_python_m_kvdist_in_the_place_of_a_worker_says_what_it_runs(job):
    process = alone(job, sys.executable, "-m", "kvdist", **job.environment("worker", 1, 1))
    assert process.code == EXIT_CONFIG
    assert "kvdist: python -m kvdist runs a scheduler or a server, and DMLC_ROLE says neither" in process.text


# Strangers at the port.


def test_garbage_and_http_at_the_ports_are_counted_and_hurt_nobody(job, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    job.cluster(2, 1, "mistakes.py", "rounds", str(fifo), KVDIST_SECURITY="none")
    job.line("worker-0", "round")
    ports = [job.port, listening_port(job.pid_of("server-0"))]
    for port in ports:
        for data in (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", bytes(range(256)) * 64, b"\xff"):
            send_bytes(port, data)
        # Valid for the transport, but not for the protocol.
        send_frames(port, [b"hello", b"world"])
        send_frames(port, [b"KVDI" + bytes(56), b"\xc1", b""])
        send_frames(port, [b""] * 20)
    for count in (2, 3):
        fifo.open("wb").close()
        if count == 2:
            job.line("worker-0", "round", count=2)
    job.succeed()
    for name in ("scheduler", "server-0"):
        process = job.processes[name]
        assert len(process.lines_with("dropped an invalid message from a stranger: ")) == 3, job.transcript()
        counted = re.search(r"refused (\d+) stranger\(s\) and dropped (\d+) invalid message\(s\)", process.text)
        assert counted, job.transcript()
        assert int(counted[1]) >= 2 and int(counted[2]) == 3, job.transcript()


def send_bytes(port, data):
    """Talk to a port as somebody who does not know ZeroMQ, until the other side hangs up."""
    # It may hang up at any byte; that somebody came is in what it has counted.
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=10) as stranger:
        stranger.sendall(data)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(4096):
            pass


def send_frames(port, frames):
    """Talk to a port as somebody who knows ZeroMQ only; returns when the message has left."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 10_000
        stranger.connect(f"tcp://{HOST}:{port}")
        stranger.send_multipart(frames)


def test_a_connection_that_is_reset_hurts_nobody(job, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    job.cluster(1, 1, "mistakes.py", "rounds", str(fifo), KVDIST_SECURITY="none")
    job.line("worker-0", "round")
    for port in (job.port, listening_port(job.pid_of("server-0"))):
        for _ in range(20):
            with socket.create_connection((HOST, port), timeout=10) as stranger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    fifo.open("wb").close()
    job.line("worker-0", "round", count=2)
    fifo.open("wb").close()
    job.succeed()
