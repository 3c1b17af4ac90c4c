"""Real processes over connections that lose, repeat, delay and break: every value is exact, and nobody hangs.

The faults strike single messages of the wire, by a relay between the processes (`tests.proxy`).
"""

from __future__ import annotations

import ast
import socket
import threading

import pytest

from tests.integration.processes import PROGRAMS, TIMEOUT_S, environment_of
from tests.proxy import (
    COMMAND,
    GREETING_BYTES,
    MORE,
    NAMES,
    Cut,
    Drop,
    Proxy,
    Twice,
    cut_at_every_frame,
    first_of_each_kind,
    packed,
    weather,
)

KINDS = {
    "Hello", "Welcome", "Roster", "Seen", "Declare", "Assign", "Placed", "Configure", "SetOptimizer", "Done", "Barrier",
    "InitValues", "InitRows", "Push", "PushRows", "Pull", "PullRows", "Values", "Counted", "Command",
    "Perform", "MarkPushes", "Claim", "Claimed", "Prepare", "Save", "Saved", "Load", "Restore", "TakeRestored",
    "ReplaceValues", "Ack", "Alive", "Goodbye", "Stop", "CompressedPush", "PullState", "ReplaceState", "Failed",
    "DropRestored", "StepTimes",
}  # fmt: skip
"""What the program makes processes say."""
KINDS_OF_LOSSES = {
    "Ready", "Counters", "Join", "Replicate", "Replicated", "Fill",
}  # fmt: skip
KINDS_OF_ROLLBACKS = {"TakeSnapshot", "SnapshotTaken", "Rewind", "Quiet", "Rewound"}
KINDS_OF_DATA = {"Lease", "Leased", "Used", "Progress", "Due"}
LEFT_TO_THE_SIMULATION = {
    "Abort", "Blocked", "CheckBlocked", "HandedBack", "JoinedPush", "Refused", "Rejected",
    "NotDue", "Waiting",
}  # fmt: skip
OFTEN = frozenset({"Ack", "Alive", "StepTimes"})
PATIENT = {
    "KVDIST_SECURITY": "none",
    "KVDIST_TRANSPORT": "tcp",
    "KVDIST_PATIENCE_S": "60",
    "KVDIST_FAREWELL_S": "60",
    "PYTHONPATH": str(PROGRAMS),
    "KVDIST_SERVER_MODULE": "patient",
    "KVDIST_BIGARRAY_BOUND": "20000",
}


def run_through(job, proxy, tmp_path, workers=2, servers=2, rounds=4, timeout_s=TIMEOUT_S):
    """A whole job whose connections the proxy carries."""
    settings = {**PATIENT, "KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    command = ("exact.py", str(tmp_path / "checkpoints"), str(rounds))
    job.node("scheduler", workers, servers, **settings)
    port = {"DMLC_PS_ROOT_PORT": str(proxy.front(job.port))}
    for name in [*(f"server-{rank}" for rank in range(servers)), *(f"worker-{rank}" for rank in range(workers))]:
        job.node(name, workers, servers, *command, **settings, **port)
    job.succeed(timeout_s)
    for rank in range(workers):
        assert job.processes[f"worker-{rank}"].lines_with("exact"), job.transcript()


FATES = {
    "lost alone": Drop(),  # TCP does not: it is said again after seconds
    "lost with the connection": Cut(0, 0),
    "delivered, and the answer lost": "delivered",
    "comes twice": Twice(),
}


def fates(*slow, quick=()):
    """What becomes of the first message of each kind."""
    cases = [(name, pytest.mark.slow) for name in slow] + [(name, ()) for name in quick]
    return pytest.mark.parametrize("fate", [pytest.param(FATES[name], marks=marks, id=name) for name, marks in cases])


def strike_first_of_each(fate):
    """The fault. What is said every second, and again when a connection is new, would break each connection at once."""
    return first_of_each_kind(lambda one: Cut(len(one.frames) - 1) if fate == "delivered" else fate, OFTEN)


def require_struck(proxy, kinds, fate):
    """Every kind was struck, and has arrived all the same."""
    hit = {name.partition(" ")[2] for name in proxy.fired} - {""}
    assert hit >= kinds - OFTEN, kinds - OFTEN - hit
    if fate != "delivered":  # the answer may come on the next connection, before anything is said again
        assert set(proxy.passed) >= kinds - OFTEN, kinds - OFTEN - set(proxy.passed)


@fates("lost alone", quick=("lost with the connection", "delivered, and the answer lost", "comes twice"))
def test_the_first_message_of_every_kind_is_lost_or_comes_twice(job, tmp_path, fate):
    with Proxy(strike_first_of_each(fate)) as proxy:
        run_through(job, proxy, tmp_path, timeout_s=250.0)
    require_struck(proxy, KINDS, fate)


def test_each_kind_is_struck_or_left_to_the_simulation():
    struck = KINDS | KINDS_OF_LOSSES | KINDS_OF_ROLLBACKS | KINDS_OF_DATA
    assert (len(KINDS), len(struck)) == (41, 57), "as docs/decisions/proof.md says"
    assert struck | LEFT_TO_THE_SIMULATION == set(NAMES.values()) and not struck & LEFT_TO_THE_SIMULATION


def launch_through(job, proxy, workers, *command, options=(), **variables):
    """A job of a launcher whose connections the proxy carries."""
    port = job.port  # at which nobody listens: the launcher chooses another one
    settings = {**PATIENT, "KVDIST_SERVER_MODULE": "fronted", "FRONT": str(proxy.front(port)), **variables}
    words = ("fronted.py", str(PROGRAMS / command[0]), *command[1:])
    launcher = job.launch(workers, 2, *words, options=options, **settings)
    job.wait(lambda: "scheduler" in job.children(), "the scheduler begins")
    proxy.move(port, int(environment_of(job.pid_of("scheduler"))["DMLC_PS_ROOT_PORT"]))
    return launcher


# Breaks at one new kind after the other would be a link over which nothing comes, which counts as a loss.
@fates(quick=("comes twice",))
def test_so_is_that_of_each_kind_that_losses_bring(job, tmp_path, fate):
    go = tmp_path / "go"
    with Proxy(strike_first_of_each(fate)) as proxy:
        options = ["--on-loss", "continue", "--restart", "3", "--replicas", "1"]
        launcher = launch_through(job, proxy, 3, "survival.py", "joins", "[1]", "2", "1", str(go), options=options)
        job.line("launcher", "life 1 has joined in step")
        job.kill("server-1")
        job.line("launcher", "the job survives a loss of server-0 again")
        killed = job.pid_of("scheduler")
        job.kill("scheduler")
        job.wait(lambda: job.children().get("scheduler", killed) != killed, "the scheduler is started again")
        go.touch()
        job.finish()
    assert launcher.code == 0, job.transcript()
    for name in ("worker-1", "server-1", "the scheduler"):
        assert launcher.lines_with(f"{name} was started 2 times; it was killed by signal 9"), "the fault happened"
    masks = [line.partition("masks ")[2] for line in launcher.lines_with("masks {")]
    assert len(masks) == 3 and len(set(masks)) == 1, job.transcript()
    found = ast.literal_eval(masks[0])
    assert found[0] == found[2] == [(1 << 16) - 1], job.transcript()
    require_struck(proxy, KINDS_OF_LOSSES, fate)


@fates("comes twice")
def test_so_is_that_of_each_kind_with_which_all_go_back(job, tmp_path, fate):
    with Proxy(strike_first_of_each(fate)) as proxy:
        options = ["--on-loss", "continue", "--restart", "3", "--snapshots", str(tmp_path / "snapshots")]
        settings = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path), "KVDIST_SNAPSHOT_INTERVAL_S": "0.02"}
        launcher = launch_through(job, proxy, 2, "snapshots.py", str(tmp_path), options=options, **settings)
        job.line("launcher", "waits in the middle")
        job.wait(lambda: any((tmp_path / "snapshots").glob("step-*/manifest.json")), "there is a snapshot")
        job.kill("server-1")
        (tmp_path / "go").touch()
        job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("server-1 was started 2 times; it was killed by signal 9"), "the fault happened"
    assert len(launcher.lines_with("ended with 2460 after")) == 2, job.transcript()
    require_struck(proxy, KINDS_OF_ROLLBACKS, fate)


@fates("lost alone", "comes twice")
def test_so_is_that_of_each_kind_that_hands_out_the_data_of_a_quota(job, fate, tmp_path):
    with Proxy(strike_first_of_each(fate)) as proxy:
        options = ["--policy", "quota:400"]
        words = ("leases.py", "1000", "1", "8", "0", "dist", "{}")
        launcher = launch_through(job, proxy, 3, *words, options=options, TERMINATED="7", HERE=str(tmp_path / "here"))
        job.finish()
    assert launcher.code == 0, job.transcript()
    assert len(launcher.lines_with("counts {(1, 1): 1000}")) == 2, job.transcript()
    require_struck(proxy, KINDS_OF_DATA, fate)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(3, marks=pytest.mark.slow)])
def test_connections_break_after_any_frame_and_at_any_byte(job, tmp_path, seed):
    with Proxy(cut_at_every_frame(seed, 12)) as proxy:
        run_through(job, proxy, tmp_path, rounds=8)
    assert proxy.fired["Cut"] >= 20, proxy.fired
    assert max(proxy.lives.values()) > 6


@pytest.mark.parametrize(
    "loss, twice, late, late_s",  # one in so many messages
    [
        (90, 10, 11, 0.02),
        pytest.param(10, 0, 0, 0.0, marks=pytest.mark.slow),
        pytest.param(0, 2, 21, 2.0, marks=pytest.mark.slow),
    ],
)
def test_messages_are_lost_doubled_and_late(job, tmp_path, loss, twice, late, late_s):
    with Proxy(weather(loss, twice, late, late_s)) as proxy:
        run_through(job, proxy, tmp_path, rounds=1 if loss == 10 else 6, timeout_s=300.0)
    wanted = {"Drop": loss, "Twice": twice, "Later": late}
    assert all(proxy.fired[name] >= 3 for name, one_in in wanted.items() if one_in), proxy.fired


@pytest.mark.parametrize("ways", [(True,), pytest.param((False,), marks=pytest.mark.slow)], ids=["up", "down"])
def test_a_network_that_is_away_in_one_direction_for_a_while(job, tmp_path, ways):
    struck = threading.Event()

    def fault(passing):
        if passing.kind == "Push" and passing.number > 20 and not struck.is_set():
            struck.set()
            for up in ways:
                proxy.hold(up)
            threading.Timer(2.0, lambda: [proxy.let_go(up) for up in ways]).start()

    with Proxy(fault) as proxy:
        run_through(job, proxy, tmp_path, rounds=8)
    assert proxy.fired["held"] == len(ways)


def test_what_libzmq_says_between_two_frames_of_a_message_is_not_of_the_message():
    ping = b"\4PING\0\0"
    said = packed(MORE, b"first") + packed(COMMAND, ping) + packed(0, b"second")
    with socket.create_server(("127.0.0.1", 0)) as listener, Proxy(lambda one: heard.append(one.frames)) as proxy:
        heard = []
        front = proxy.front(listener.getsockname()[1])
        with socket.create_connection(("127.0.0.1", front)) as dialler, listener.accept()[0] as acceptor:
            for one in (dialler, acceptor):
                one.settimeout(TIMEOUT_S)
            greeting = bytes(GREETING_BYTES)
            dialler.sendall(greeting + said)
            expected = greeting + packed(COMMAND, ping) + packed(MORE, b"first") + packed(0, b"second")
            got = b""
            while len(got) < len(expected):
                got += acceptor.recv(len(expected) - len(got))
        assert got == expected
        assert heard == [(b"first", b"second")]
