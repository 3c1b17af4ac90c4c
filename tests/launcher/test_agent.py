"""Agents on the far side of a pipe that is not ssh: the same program, started here by a stand-in for ssh."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest

from kvdist.nodes import NodeId, Role
from kvdist_launch.agent_protocol import GREETING, Frame, FrameDecoder
from kvdist_launch.environment import Environment
from kvdist_launch.host_pool import RemoteProcesses
from kvdist_launch.plan import Process
from tests.cases import each
from tests.launcher.conftest import FAILS_WHEN_READY, PACKAGES, TIMEOUT_S

GONE_S = 15.0
"""Within this time nothing is left of a job whose launcher or agent is gone. It takes 3 s, and silence alone would
take an agent 20 s to notice."""


def test_a_job_runs_on_other_hosts_as_on_this_one(launch_on):
    job = launch_on("a,b", "-n", "3", "-s", "2", "python", "-c", "import os; print('rank', os.environ['KVDIST_RANK'])")
    code, out, err = job.finish()
    assert code == 0, err
    assert sorted(line.split()[-1] for line in out.splitlines() if " rank " in line) == ["0", "1", "2"]
    assert err.splitlines()[-1].startswith("kvdist-launch: 3 workers and 2 servers finished in ")


def test_a_failing_worker_of_another_host_is_named_with_it(launch_on, ready):
    words = ("--grace", "3", *ready, "python", "-c", FAILS_WHEN_READY)
    code, out, err = launch_on("a,b", "-n", "2", "-s", "1", *words).finish()
    assert code == 3
    assert "worker-1 on b (pid " in err and "failed with exit code 3" in err
    assert "ended worker 1 exit 3" in out and "placed worker 1 b " in out, "the scheduler was told"


@each("patience_s, silent_s", [(1.0, 3.0), (5.0, 5.0)])
def test_a_silent_host_is_lost_after_the_patience_and_not_because_a_sign_of_life_is_late(patience_s, silent_s):
    with selectors.DefaultSelector() as selector:
        host = RemoteProcesses("a", ["sleep", "60"], selector, mock.Mock(), patience_s)
        now = time.monotonic()
        host.beat(now + silent_s - 0.1)
        assert not host.failure
        host.beat(now + silent_s + 0.1)
        assert host.failure == f"a has not answered for {silent_s:g} s (KVDIST_PATIENCE_S)"
        host._ssh.kill()
        host.release()


def test_a_host_that_lets_nobody_in_is_named_before_anything_starts(launch_on):
    code, out, err = launch_on("a,deaf,b", "-n", "2", "-s", "1", "true").finish()
    assert code == 2 and out == ""
    assert "1 of 3 hosts cannot take part" in err and "deaf: " in err and "Permission denied" in err


CHANGED = """\
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Host key for changed has changed and you have requested strict checking.
Host key verification failed.
"""


def test_a_host_with_another_key_than_before_is_no_new_one(launch_on, tmp_path):
    (tmp_path / "warning").write_text(CHANGED)
    code, _, err = launch_on("changed", "-n", "1", "-s", "1", "true").finish()
    assert code == 2
    assert "(WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!: Host key verification failed.)" in err
    assert "ssh-keygen -R changed forgets" in err and "--accept-new-host-keys" not in err


def test_what_a_host_says_moves_no_cursor_and_floods_nobody(launch_on, tmp_path):
    (tmp_path / "warning").write_text("x" * 9000 + "\n\x1b]0;mine\x07\x1b[2J" + "y" * 9000 + "\n")
    _, _, err = launch_on("changed", "-n", "1", "-s", "1", "true").finish()
    assert "\\x1b]0;mine\\x07\\x1b[2Jyyy" in err and "\x1b" not in err and "\x07" not in err
    assert len(err) < 3000


def test_a_login_script_that_prints_much_keeps_no_agent_from_being_heard(launch_on):
    code, _, err = launch_on("loud", "-n", "1", "-s", "1", "true").finish()
    assert code == 0, err


def test_a_program_that_a_host_does_not_have_is_told_with_the_host(launch_on):
    code, _, err = launch_on("a", "-n", "1", "-s", "1", "no-such-program-anywhere").finish()
    assert code == 127
    assert "on a, worker-0 could not be started: no-such-program-anywhere" in err


def test_a_job_that_cannot_be_started_anew_ends_as_it_had_failed_before(launch_on, tmp_path):
    # The host lets nobody in any more once the worker has failed.
    script = f"open({str(tmp_path / 'locked')!r}, 'w'); exit(5)"
    summary = tmp_path / "summary"
    words = ("--grace", "0.2", "--on-worker-exit", "restart:2", "--json-summary", str(summary))
    code, _, err = launch_on("a", "-n", "1", "-s", "1", *words, "python", "-c", script).finish()
    assert code == 5, err
    assert "failed with exit code 5" in err and "it could not be started again: the host cannot take part" in err
    found = json.loads(summary.read_text())
    assert (found["outcome"], found["exit_code"], found["first_failure"]["exit_code"]) == ("failed", 5, 5)


def test_a_job_that_one_host_could_not_start_has_failed(launch_on, tmp_path):
    script = tmp_path / "train"
    script.write_text("no interpreter is named here\n")
    script.chmod(0o755)
    summary = tmp_path / "summary"
    code, _, err = launch_on("a", "-n", "1", "-s", "1", "--json-summary", str(summary), str(script)).finish()
    assert code == 126, err
    found = json.loads(summary.read_text())
    assert (found["outcome"], found["first_failure"]) == ("failed", None)
    assert "on a, worker-0 could not be started" in found["sentence"]


def test_much_output_arrives_whole_and_in_order(launch_on):
    script = "for i in range(20000): print(i, 'x' * 100)"
    code, out, err = launch_on("a", "-n", "1", "-s", "1", "python", "-c", script).finish()
    assert code == 0, err
    numbers = [int(line.split()[-2]) for line in out.splitlines() if line.endswith("x" * 100)]
    assert numbers == list(range(20000))


def test_processes_of_other_hosts_do_not_outlive_a_killed_launcher(launch_on, is_gone):
    script = "import os, time; print('worker is', os.getpid(), flush=True); time.sleep(60)"
    job = launch_on("a", "-n", "1", "-s", "1", "python", "-c", script)
    pid = int(job.line_with("worker is").split()[-1])
    job.process.kill()
    assert is_gone(pid, GONE_S)


def test_hosts_that_have_nothing_to_do_are_let_go(launch_on):
    code, _, err = launch_on("a,b,c,d", "-n", "1", "-s", "1", "python", "-c", "print('hello')").finish()
    assert code == 0 and "Traceback" not in err, err
    assert "1 worker and 1 server finished in " in err


@pytest.mark.slow
def test_hosts_that_hang_are_named_together_and_keep_nobody_waiting_one_after_another(launch_on):
    before = time.monotonic()
    code, _, err = launch_on("a,hung,deaf", "-n", "1", "-s", "1", "true").finish()
    assert code == 2
    assert "2 of 3 hosts cannot take part" in err and "hung: no answer within 8 s" in err
    assert [line.split()[0] for line in err.splitlines() if line.startswith(" a ")] == ["a"], "the table is shown"
    assert time.monotonic() - before < TIMEOUT_S


@pytest.mark.slow_cases("1-129", "15-143")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
def test_a_launcher_that_is_ended_while_it_connects_says_so(launch_on, number, code):
    job = launch_on("a,hung", "-n", "1", "-s", "1", "true")
    assert job.process.stderr is not None
    wait_for_child(job.process.pid, "sleep")
    job.process.send_signal(number)
    ended, _, err = job.finish()
    assert ended == code and f"interrupted by signal {int(number)}" in err and "before anything was started" in err


def wait_for_child(pid: int, name: str) -> None:
    """Until a process of that name has been started by this one."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{child}/comm").read_text().strip() == name:
                    return
        signal.sigtimedwait([], 0.02)
    raise AssertionError(f"{pid} has started no {name}")


@pytest.mark.slow
def test_a_reader_that_pauses_for_long_costs_nothing_and_nobody(launch_on):
    script = (
        "import os, sys, time\n"
        "for i in range(40000): print(i, 'x' * 100)\n"
        "print('all is said', file=sys.stderr, flush=True)\n"
        "time.sleep(1)"
    )
    job = launch_on("a", "-n", "1", "-s", "1", "--patience", "3", "python", "-c", script)
    job.line_with(" 10 ")
    signal.sigtimedwait([], 5.0)  # nobody reads for longer than an agent may be silent
    code, out, err = job.finish()
    assert code == 0, err
    numbers = [int(line.split()[-2]) for line in out.splitlines() if line.endswith("x" * 100)]
    assert numbers[-1] == 39999 and numbers == list(range(numbers[0], 40000))


def test_a_launcher_that_is_killed_while_it_starts_processes_leaves_none(launch, tmp_path):
    job = launch("-n", "40", "-s", "1", "sleep", "61")
    wait_for_child(job.process.pid, "sleep")
    children = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    job.process.kill()
    deadline = time.monotonic() + GONE_S
    while time.monotonic() < deadline and [one for one in children if Path(f"/proc/{one}").exists()]:
        signal.sigtimedwait([], 0.05)  # they are nobody's children now, so their end cannot be waited for
    assert not [one for one in children if Path(f"/proc/{one}").exists()]


class Agent:
    """An agent on a pipe that the test holds."""

    def __init__(self) -> None:
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(PACKAGES)}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kvdist_launch.agent"],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        self.decoder = FrameDecoder()
        self.frames: list[Frame] = []
        assert self.process.stdout is not None
        line = b""
        while not line.endswith(b"\n"):
            line += self.process.stdout.read(1)
        assert line == GREETING + b"\n"
        self.answer("greeting")

    def say(self, kind: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(Frame(kind, fields).encode())

    def answer(self, kind: str) -> Frame:
        assert self.process.stdout is not None
        while not (found := [frame for frame in self.frames if frame.kind == kind]):
            data = os.read(self.process.stdout.fileno(), 65536)
            assert data, f"the agent ended without saying {kind!r}"
            self.frames += self.decoder.feed(data)
        self.frames.remove(found[0])
        return found[0]

    def start(self, *argv: str, secret: str | None = None) -> int:
        one = Process(NodeId(Role.WORKER, 0), 0, argv, Environment())
        self.say("start", processes=[one], secret=secret, keeps_socket=False)
        return int(self.answer("started").fields["pids"][0][1])


@pytest.fixture
def agent():
    made = Agent()
    yield made
    made.process.kill()
    made.process.wait(TIMEOUT_S)
    for stream in (made.process.stdin, made.process.stdout, made.process.stderr):
        stream.close()


def test_an_agent_ends_its_processes_when_the_pipe_ends(agent, is_gone):
    pid = agent.start("sleep", "60")
    assert not is_gone(pid)
    agent.process.stdin.close()
    assert is_gone(pid, GONE_S)
    assert agent.process.wait(TIMEOUT_S) == 1


def test_an_agent_ends_what_ignores_requests_to_end(agent, is_gone):
    stubborn = "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; print(1); time.sleep(60)"
    pid = agent.start(sys.executable, "-uc", stubborn)
    agent.answer("output")
    agent.process.stdin.close()
    assert is_gone(pid, GONE_S)


def test_what_is_no_frame_ends_an_agent_and_its_processes(agent, is_gone):
    pid = agent.start("sleep", "60")
    agent.process.stdin.write(b"GET / HTTP/1.1\r\n")
    assert is_gone(pid, GONE_S)
    assert agent.process.wait(TIMEOUT_S) == 1
    assert b"is not a frame" in agent.process.stderr.read()


def test_a_killed_agent_leaves_no_process_and_no_secret(agent, is_gone, tmp_path):
    show = "import os, time; print(os.environ['KVDIST_SECRET_FILE'], flush=True); time.sleep(60)"
    pid = agent.start(sys.executable, "-c", show, secret="ab" * 32)
    path = Path(agent.answer("output").payload.decode().strip())
    assert path.read_bytes() == b"\xab" * 32
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    agent.process.send_signal(signal.SIGKILL)
    assert is_gone(pid, GONE_S)
    assert not path.exists()


def test_a_secret_is_gone_when_the_job_is(agent):
    agent.start(sys.executable, "-c", "import os; print(os.environ['KVDIST_SECRET_FILE'])", secret="cd" * 32)
    path = Path(agent.answer("output").payload.decode().strip())
    agent.answer("settled")
    agent.say("leave")
    assert agent.process.wait(TIMEOUT_S) == 0
    assert not path.exists()


def test_an_activated_environment_has_its_own_interpreter(launch_on, tmp_path):
    script = tmp_path / "env" / "python"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexport FOUND=activated\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    program = ("sh", "-c", "echo found $FOUND")
    activate = ("--activate", f"PATH={script.parent}:$PATH # the project's")
    code, out, err = launch_on("a", "-n", "1", "-s", "1", *activate, *program).finish()
    assert code == 0, err
    assert "found activated" in out
