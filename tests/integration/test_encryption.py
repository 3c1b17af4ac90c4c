"""Encrypted jobs of real processes: they end well, whoever does not belong to them is told so, and the job goes on."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from kvdist.config.addresses import own_addresses
from kvdist.transport.handshake import mechanism_at
from tests.integration.processes import EXIT_CONFIG, HOST, program
from tests.integration.test_bad_input import listening_port

SOON_S = 25.0
"""A process that is refused says so within this time, its start included: it does not try until its time is over."""
FROM_HERE = rf"refused a connection( from {re.escape(HOST)})?"
"""The address is there where the listener has come to see it before the connection was over."""


@pytest.fixture
def secret(tmp_path):
    return secret_file(tmp_path / "secret", b"s" * 32)


def secret_file(path, content, mode=0o600):
    path.write_bytes(content)
    path.chmod(mode)
    return str(path)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("threads", ["1", "2"])
def test_an_encrypted_job_ends_well_and_large_values_still_lie_in_shared_memory(job, secret, threads):
    job.cluster(2, 2, "shared.py", "exact", KVDIST_SECRET_FILE=secret, KVDIST_IO_THREADS=threads)
    job.succeed()
    for name in ("worker-0", "worker-1"):
        (line,) = job.processes[name].lines_with(" mapped ")
        assert int(line.split(" mapped ")[1].split()[0]) > 0, job.transcript()


def test_an_encrypted_job_sends_every_byte_and_computes_the_same(job, secret):
    variables = {"KVDIST_SECRET_FILE": secret, "KVDIST_TRANSPORT": "tcp", "KVDIST_SECURITY": "curve"}
    job.cluster(2, 2, "values.py", "exact_weights", "dist_sync", **variables)
    job.succeed()


def test_a_job_listens_on_an_address_that_others_reach_only_when_it_encrypts(job, secret):
    reachable = [str(one.address) for one in own_addresses() if not one.address.is_loopback]
    if not reachable:
        pytest.skip("this machine has no address but loopback ones")
    shared = {"DMLC_PS_ROOT_URI": reachable[0], "DMLC_NODE_HOST": reachable[0]}
    for role in ("scheduler", "server"):
        job.start(f"plain {role}", [sys.executable, "-m", "kvdist"], **{**job.environment(role, 1, 1), **shared})
    codes = job.finish()
    assert set(codes.values()) == {EXIT_CONFIG}, job.transcript()
    for process in job.processes.values():
        assert f"{reachable[0]} can be reached from other machines, and this job does not encrypt" in process.text
    job.processes.clear()
    job.cluster(1, 1, "nothing.py", KVDIST_SECRET_FILE=secret, KVDIST_RANK="0", **shared)
    job.succeed()


@pytest.fixture
def running(job, secret, tmp_path, monkeypatch):
    """A job of two workers and two servers that waits until it is told to go on; returns what goes on and ends it."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    job.cluster(2, 2, "mistakes.py", "rounds", str(fifo), KVDIST_SECRET_FILE=secret)
    job.line("worker-0", "round")
    job.line("worker-1", "round")
    monkeypatch.setattr("kvdist.transport.handshake.PATIENCE_S", SOON_S)
    ports = [job.port, *(listening_port(job.pid_of(f"server-{rank}")) for rank in range(2))]
    assert [mechanism_at(f"tcp://{HOST}:{port}") for port in ports] == ["CURVE"] * 3

    def go_on():
        for count in (2, 3):
            fifo.open("wb").close()
            if count == 2:
                job.line("worker-0", "round", count=2)
        codes = job.finish()
        ours = {name: code for name, code in codes.items() if name != "other"}
        assert not any(ours.values()), f"{ours}\n{job.transcript()}"
        return job.processes["scheduler"].text

    return go_on


def refused(job, name, *command, **variables):
    """Start one more process of the cluster, and wait until it has ended; what it has printed."""
    role, _, rank = name.partition("-")
    argv = program(*command) if command else [sys.executable, "-m", "kvdist"]
    job.start("other", argv, **{**job.environment(role, 2, 2), "KVDIST_RANK": rank, **variables})
    job.wait(lambda: job.processes["other"].code is not None, "the other one ends", SOON_S)
    assert job.processes["other"].code != 0, job.transcript()
    return job.processes["other"].text


@pytest.mark.slow_cases("one byte more")
@pytest.mark.parametrize("content", [b"w" * 32, b"s" * 33], ids=["another secret", "one byte more"])
def test_a_process_with_another_secret_is_refused_in_a_sentence(job, running, tmp_path, content):
    other = secret_file(tmp_path / "other", content)
    text = refused(job, "worker-1", "nothing.py", KVDIST_SECRET_FILE=other)
    assert "AuthenticationError: " in text
    assert f"tcp://{HOST}:{job.port} does not know the key of this worker-1" in text
    told = running()
    assert re.search(f"{FROM_HERE}: its secret is not that of this job", told), told
    assert "stranger(s)" in told


def test_a_server_with_another_secret_is_refused_with_the_code_of_a_mistake(job, running, tmp_path):
    text = refused(job, "server-1", KVDIST_SECRET_FILE=secret_file(tmp_path / "other", b"w" * 32))
    assert job.processes["other"].code == EXIT_CONFIG
    assert "kvdist: tcp://" in text and "does not know the key of this server-1" in text
    running()


def test_a_process_without_a_secret_is_refused_in_a_sentence(job, running):
    text = refused(job, "worker-1", "nothing.py")
    assert "AuthenticationError: " in text and "encrypts, and this process has no secret" in text
    told = running()
    assert re.search(f"{FROM_HERE}: it", told), told


def test_a_process_that_takes_the_rank_of_another_is_refused(job, running, secret):
    text = refused(job, "worker-1", "nothing.py", KVDIST_SECRET_FILE=secret)
    assert "worker-1 is taken by process" in text
    running()


def test_a_process_that_speaks_in_anothers_name_is_refused_and_counted(job, running, secret):
    text = refused(job, "worker-1", "forger.py", "0", KVDIST_SECRET_FILE=secret)
    sentence = "the key of this connection is that of worker-1, but what it says is signed worker-0"
    assert sentence in text
    told = running()
    assert f"scheduler dropped a forged message: {sentence}" in told
    assert "forged one(s)" in told


def test_a_process_of_a_larger_cluster_has_no_key_here(job, running, secret):
    text = refused(job, "worker-5", "nothing.py", KVDIST_SECRET_FILE=secret, DMLC_NUM_WORKER="6")
    assert "has the same secret, but no worker-5 in its cluster" in text
    running()


@pytest.mark.parametrize("plain", [{}, {"KVDIST_SECURITY": "none"}], ids=["file", "tcp"])
def test_an_encrypted_process_at_a_plain_port_is_refused_in_a_sentence(job, secret, plain):
    job.node("scheduler", 1, 1, **plain)
    text = refused(job, "worker-0", "nothing.py", KVDIST_SECRET_FILE=secret)
    assert "AuthenticationError: " in text and "does not encrypt, and this process " in text
    if plain:
        job.line("scheduler", "refused a connection")
    job.node("server-0", 1, 1, **plain)
    job.node("worker-0", 1, 1, "nothing.py", **plain)
    codes = job.finish()
    assert (codes["scheduler"], codes["server-0"], codes["worker-0"]) == (0, 0, 0), job.transcript()


def test_without_a_rank_an_encrypted_process_says_who_sets_it(job, secret):
    process = job.start(
        "other", [sys.executable, "-m", "kvdist"], **job.environment("server", 1, 1), KVDIST_SECRET_FILE=secret
    )
    job.finish()
    assert process.code == EXIT_CONFIG
    assert "KVDIST_RANK is not set, but in an encrypted job" in process.text
    assert "kvdist-launch sets it" in process.text


def test_security_none_beside_a_secret_is_refused(job, secret):
    job.node("scheduler", 1, 1, KVDIST_SECRET_FILE=secret, KVDIST_SECURITY="none")
    assert job.finish() == {"scheduler": EXIT_CONFIG}
    assert "KVDIST_SECURITY is none, but KVDIST_SECRET_FILE is" in job.processes["scheduler"].text


# Ports and addresses.


def test_every_process_that_chooses_a_port_takes_one_of_the_range(job, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    first = job.port + 1
    ports = range(first, first + 41)
    variables = {"KVDIST_PORT_RANGE": f"{ports[0]}-{ports[-1]}", "KVDIST_LOCAL_REDUCE": "on", "KVDIST_SECURITY": "none"}
    job.cluster(2, 2, "mistakes.py", "rounds", str(fifo), **variables)
    job.line("worker-1", "round")
    listening = [listening_port(job.pid_of(name)) for name in ("server-0", "server-1", "worker-0", "worker-1")]
    assert len(set(listening)) == 4 and set(listening) <= set(ports), (listening, ports)
    for count in (2, 3):
        fifo.open("wb").close()
        if count == 2:
            job.line("worker-0", "round", count=2)
    job.succeed()


PLAIN = {"KVDIST_SECURITY": "none"}
INHERITS = """
import os, socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
listening = socket.create_server((sys.argv[1], int(sys.argv[2])), family=family)
os.set_inheritable(listening.fileno(), True)
os.environ["KVDIST_LISTEN_FD"] = str(listening.fileno())
os.execv(sys.executable, [sys.executable, "-m", "kvdist"])
"""


@pytest.mark.slow_cases("127.0.0.1-encrypted", "::1-encrypted", "::1-plain")
@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
@pytest.mark.parametrize("host", [HOST, "::1"])
def test_a_scheduler_listens_where_its_launcher_has_begun_to(job, secret, host, encrypted):
    shared = {"DMLC_PS_ROOT_URI": host, **({"KVDIST_SECRET_FILE": secret} if encrypted else PLAIN)}
    variables = {**job.environment("scheduler", 1, 1), **shared}
    job.start("scheduler", [sys.executable, "-c", INHERITS, host, str(job.port)], **variables)
    for name in ("server-0", "worker-0"):
        job.node(name, 1, 1, "nothing.py", **shared)
    job.succeed()


def test_a_descriptor_at_another_port_than_everybody_dials_is_refused_with_both(job):
    with socket.create_server((HOST, 0)) as listening:
        other = listening.getsockname()[1]
    process = job.start("scheduler", [sys.executable, "-c", INHERITS, HOST, str(other)],
                        **job.environment("scheduler", 1, 1), **PLAIN)  # fmt: skip
    job.finish()
    assert process.code == EXIT_CONFIG
    told = f"that listens at tcp://{HOST}:{other}, but everybody dials tcp://{HOST}:{job.port} (DMLC_PS_ROOT_PORT)"
    assert told in process.text


@pytest.mark.slow_cases("plain")
@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
def test_a_cluster_lives_on_ipv6(job, secret, encrypted):
    variables = {"DMLC_PS_ROOT_URI": "::1", **({"KVDIST_SECRET_FILE": secret} if encrypted else PLAIN)}
    job.cluster(1, 1, "nothing.py", **variables)
    job.succeed()


HOSTS = f"{HOST} localhost\n::1 localhost\n"
WITH_HOSTS = 'mount --bind "$0" /etc/hosts && exec "$@"'


@pytest.mark.slow_cases("plain")
@pytest.mark.parametrize("encrypted", [True, False], ids=["encrypted", "plain"])
def test_a_cluster_meets_at_a_name_with_an_address_of_each_kind(job, secret, tmp_path, encrypted):
    hosts = tmp_path / "hosts"
    hosts.write_text(HOSTS, "ascii")
    seen = subprocess.run(
        ["unshare", "-m", "sh", "-c", WITH_HOSTS, hosts, "getent", "ahosts", "localhost"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if HOST not in seen.stdout or "::1" not in seen.stdout:
        pytest.skip(f"another /etc/hosts needs root and a mount namespace: {seen.stdout}{seen.stderr}")
    shared = {"DMLC_PS_ROOT_URI": "localhost", **({"KVDIST_SECRET_FILE": secret} if encrypted else PLAIN)}
    for name in ("scheduler", "server-0", "worker-0"):
        role, _, rank = name.partition("-")
        argv = program("nothing.py") if role == "worker" else [sys.executable, "-m", "kvdist"]
        variables = {**job.environment(role, 1, 1), **shared, "KVDIST_RANK": rank or "0"}
        job.start(name, ["unshare", "-m", "sh", "-c", WITH_HOSTS, str(hosts), *argv], **variables)
    job.succeed()


def test_a_scheduler_at_a_port_that_is_taken_names_the_process_that_has_it(job):
    with socket.create_server((HOST, job.port)):
        process = job.node("scheduler", 1, 1, **PLAIN)
        job.finish()
    assert process.code == EXIT_CONFIG
    assert f"cannot bind tcp://{HOST}:{job.port}: it is in use by process {os.getpid()} (" in process.text
    assert "EADDRINUSE" in process.text


ADDRESS = "fd5e::7"
CARD_UP = (
    "link set lo up",
    "link add card type veth peer name other",
    "link set card up",
    "link set other up",
    f"address add {ADDRESS}/64 dev card nodad",
)


@pytest.fixture
def space():
    """A network of its own with an IPv6 address beside the loopback one."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("a network namespace needs root and the program ip")
    name = f"kvdist-six-{os.getpid()}"
    done = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
    try:
        for words in CARD_UP:
            subprocess.run(["ip", "-n", name, *words.split()], capture_output=True, check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@pytest.mark.slow_cases("fd00::/8")
@pytest.mark.parametrize("interface", ["card", "fd00::/8"])
def test_a_cluster_of_a_namespace_listens_on_the_ipv6_address_of_its_card(job, secret, space, interface):
    shared = {"DMLC_PS_ROOT_URI": ADDRESS, "KVDIST_SECRET_FILE": secret, "KVDIST_INTERFACE": interface}
    for name in ("scheduler", "server-0", "worker-0"):
        role, _, rank = name.partition("-")
        argv = program("nothing.py") if role == "worker" else [sys.executable, "-m", "kvdist"]
        variables = {**job.environment(role, 1, 1), **shared, "KVDIST_RANK": rank or "0"}
        job.start(name, ["ip", "netns", "exec", space, *argv], **variables)
    job.succeed()
