"""Real processes: what users see, exit codes, first causes, signals, and that nothing is left behind."""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from unittest import mock

import pytest

from kvdist.nodes import worker
from kvdist_launch.environment import Environment
from kvdist_launch.plan import Process
from kvdist_launch.processes import LocalProcesses
from tests.launcher.conftest import FAILS_WHEN_READY, TIMEOUT_S

SAY_AND_SLEEP = "import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)"
LEAVE_CHILD = (
    "import os, subprocess, sys\n"
    "child = subprocess.Popen(['sleep', '60'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)\n"
    "print('pid', child.pid, flush=True)\n"
    "raise SystemExit(int(sys.argv[1]))"
)
STUBBORN = (
    "import os, signal, time\n"
    "for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)\n"
    "print('pid', os.getpid(), flush=True)\n"
    "time.sleep(60)"
)


def test_a_job_whose_workers_succeed_ends_with_0_and_a_summary(launch):
    code, out, err = launch("-n", "2", "-s", "1", "python", "-c", "print('hello')").finish()
    assert code == 0, err
    assert sorted(line for line in out.splitlines() if "hello" in line) == ["w0 │ hello", "w1 │ hello"]
    assert err.splitlines()[-1].startswith("kvdist-launch: 2 workers and 1 server finished in ")


def test_the_scheduler_is_told_of_every_ending(launch):
    _, out, _ = launch("-n", "1", "-s", "2", "python", "-c", "").finish()
    told = [line for line in out.splitlines() if line.startswith("sched │ ended")]
    assert told[0] == "sched │ ended worker 0 exit 0"
    assert sorted(told[1:]) == ["sched │ ended server 0 exit 0", "sched │ ended server 1 exit 0"]


def test_the_first_failing_worker_is_named_and_gives_its_exit_code(launch, ready):
    words = ("--grace", "3", *ready, "python", "-c", FAILS_WHEN_READY)
    code, out, err = launch("-n", "3", "-s", "2", *words).finish()
    assert code == 3
    assert "sched │ ended worker 1 exit 3" in out
    last = err.splitlines()[-1]
    assert last.startswith("kvdist-launch: worker-1 (pid ")
    assert "failed with exit code 3 after " in last
    assert last.endswith("; job ended with exit code 3")


def test_a_worker_that_fails_for_the_loss_of_another_is_not_named_though_it_ends_first(launch, tmp_path):
    # Both open the FIFO; worker-0 ends on its own, and its end lets worker-1 end.
    fifo = tmp_path / "first_ends"
    os.mkfifo(fifo)
    script = (
        "import os, sys\n"
        "from kvdist.errors import PeerLostError\n"
        "if os.environ['KVDIST_RANK'] == '0':\n"
        "    fifo = open(sys.argv[1], 'w')\n"
        "    raise PeerLostError('worker-1 was lost')\n"
        "open(sys.argv[1]).read()\n"
        "raise ValueError('mine')"
    )
    code, _, err = launch("-n", "2", "-s", "1", "python", "-c", script, str(fifo)).finish()
    assert code == 1
    assert err.splitlines()[-1].startswith("kvdist-launch: worker-1 (pid ")


@pytest.mark.parametrize(("name", "short"), [("scheduler", "sched"), ("server-1", "s1"), ("worker-0", "w0")])
def test_a_killed_process_is_named_with_its_signal_and_ends_the_job(launch, is_gone, name, short):
    job = launch("-n", "2", "-s", "2", "--grace", "0.2", "python", "-c", SAY_AND_SLEEP)
    lines = [job.line_with(" │ pid ") for _ in range(5)]
    pids = {line.split()[0]: int(line.split()[-1]) for line in lines}
    os.kill(pids[short], signal.SIGKILL)
    code, _, err = job.finish()
    assert code == 128 + 9
    assert f"{name} (pid {pids[short]}) was killed by signal 9 (SIGKILL)" in err.splitlines()[-1]
    assert all(is_gone(pid) for pid in pids.values())


def test_a_server_that_leaves_while_workers_run_fails_the_job_with_1(launch):
    job = launch("-n", "1", "-s", "1", "--grace", "0.2", "--env-server", "SERVER_DOES=leave", "sleep", "60")
    code, _, err = job.finish()
    assert code == 1
    assert "server-0 (pid " in err.splitlines()[-1]
    assert "ended early with exit code 0" in err.splitlines()[-1]


def test_a_scheduler_that_cannot_start_is_named_and_its_reason_shown(launch):
    job = launch("-n", "1", "--grace", "0.2", "--env", "SCHEDULER_DOES=fail", "sleep", "60")
    code, _, err = job.finish()
    assert code == 1
    assert err.index("sched │ address in use") < err.index("scheduler (pid ")


def test_servers_that_do_not_end_after_the_last_worker_are_terminated_and_named(launch):
    job = launch("-n", "1", "-s", "1", "--grace", "0.2", "--env-server", "SERVER_DOES=stay", "true")
    code, _, err = job.finish()
    assert code == 0
    assert "server-0 did not end within 0.2 s of the last worker's end; terminating" in err


def test_a_process_that_has_ended_or_goes_on_is_not_taken_for_a_stopped_one():
    listener = mock.Mock()
    with selectors.DefaultSelector() as selector:
        processes = LocalProcesses(selector, listener)
        processes.start([Process(worker(0), 0, ("cat",), Environment(), is_told_of_endings=True)])
        (((_, pid),),) = listener.started.call_args.args[1:]
        processes.beat(0.0)
        for number, pids in ((signal.SIGSTOP, [pid]), (signal.SIGCONT, [pid, 0])):
            os.kill(pid, number)
            os.waitid(os.P_PID, pid, os.WSTOPPED | os.WCONTINUED | os.WNOWAIT)
            processes.beat(1.0)
            assert [call.args for call in listener.stopped.call_args_list] == [(worker(0), one) for one in pids]
        os.kill(pid, signal.SIGTERM)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        processes.beat(2.0)
        assert len(listener.stopped.call_args_list) == 2
        processes.release()


@pytest.mark.parametrize("has_descriptor", [True, False])
def test_the_end_of_a_process_is_seen_at_once_whatever_the_system_offers(monkeypatch, has_descriptor):
    if not has_descriptor:
        monkeypatch.delattr(os, "pidfd_open")
    listener, threads = mock.Mock(), threading.active_count()
    with selectors.DefaultSelector() as selector:
        processes = LocalProcesses(selector, listener)
        shells = [(worker(0), "exit 3"), (worker(1), "sleep 60")]
        processes.start([Process(node, 0, ("sh", "-c", text), Environment()) for node, text in shells])
        while not listener.settled.called:
            for key, _ in selector.select(TIMEOUT_S):
                key.data()
        assert [[one.status for one in call.args[0]] for call in listener.ended.call_args_list] == [[3]]
        processes.release()
        assert not selector.get_map() and threading.active_count() == threads


@pytest.mark.parametrize(
    ("argv", "is_told"),
    [
        (("sh", "-c", "sleep 60; true"), True),
        (("sh", "-c", "sh -c 'sleep 60; true'; true"), True),
        (("sh", "-c", "tail -f /dev/null & sleep 60; true"), False),
        ((sys.executable, "-c", "import subprocess; subprocess.Popen(['sleep', '60']); input()"), False),
        (("sh", "-c", f"{sys.executable} -c \"import os; os.system('exec sleep 60')\"; true"), False),
    ],
)
def test_a_stopped_process_stands_for_the_shell_that_waits_for_it_and_for_nobody_who_may_work(argv, is_told):
    listener = mock.Mock()
    with selectors.DefaultSelector() as selector:
        processes = LocalProcesses(selector, listener)
        try:
            processes.start([Process(worker(0), 0, argv, Environment(), is_told_of_endings=True)])
            (((_, pid),),) = listener.started.call_args.args[1:]
            below = sleeping_below(pid)
            os.kill(below, signal.SIGSTOP)
            for one, state in ((below, "T"), (pid, "S")):  # the other one waits by now
                while Path(f"/proc/{one}/stat").read_text().split()[2] != state:
                    time.sleep(0.01)
            processes.beat(1.0)
            assert [call.args for call in listener.stopped.call_args_list] == ([(worker(0), below)] if is_told else [])
        finally:
            processes.release()


def sleeping_below(pid):
    """The process id of the ``sleep`` that is the youngest descendant of a process, when it has begun."""
    for _ in range(3000):
        below = pid
        while children := Path(f"/proc/{below}/task/{below}/children").read_text().split():
            below = int(children[-1])
        if Path(f"/proc/{below}/comm").read_text() == "sleep\n":
            return below
        time.sleep(0.01)
    raise AssertionError("it has started no sleep")


STOPS = "import os, signal; os.environ['KVDIST_RANK'] == '1' and os.kill(os.getpid(), signal.SIGSTOP)"


@pytest.mark.usefixtures("launch_on")
@pytest.mark.parametrize(
    ("words", "place"),
    [
        (("--on-worker-exit", "restart:1"), ""),
        (("-H", "a", "--security", "none"), " on a"),
    ],
)
def test_a_worker_that_is_stopped_when_the_others_have_finished_is_told_of_and_killed(launch, words, place):
    shell = ("sh", "-c", '"$0" -c "$1"; exit $?', sys.executable, STOPS)
    job = launch(*words, "-n", "2", "-s", "0", "--grace", "0.2", *shell)
    code, _, err = job.finish()
    who = rf"worker-1{place} \(pid \d+\)"
    assert re.search(rf"{who} has been stopped by a signal for 3 s; kill -CONT \d+ lets it go on", err), err
    assert re.search(rf"the job waits for the end of {who}, and kills it in 0.2 s", err), err
    assert code == 137 and re.search(
        rf"{who} was killed by signal 9 .*; the job had waited for nothing but its end", err
    ), err


def test_ctrl_c_reaches_the_workers_as_an_interrupt_they_can_handle(launch, is_gone):
    script = (
        "import os, time\n"
        "try:\n    print('pid', os.getpid(), flush=True); time.sleep(60)\n"
        "except KeyboardInterrupt: print('saved')"
    )
    job = launch("-n", "1", "-s", "1", "python", "-c", script)
    pid = job.pid_of("worker-0")
    job.process.send_signal(signal.SIGINT)
    code, out, err = job.finish()
    assert code == 130
    assert "w0 │ saved" in out
    assert "interrupted by signal 2 (SIGINT)" in err.splitlines()[-1]
    assert is_gone(pid)


def test_a_second_ctrl_c_kills_what_ignores_the_first(launch, is_gone):
    job = launch("-n", "1", "-s", "1", "--grace", "50", "python", "-c", STUBBORN)
    pid = job.pid_of("worker-0")
    while job.process.poll() is None:
        # Signals in quick succession count as one, so this repeats until the second is taken as such.
        job.process.send_signal(signal.SIGINT)
        try:
            job.process.wait(timeout=0.3)
        except subprocess.TimeoutExpired:
            continue
    assert job.finish()[0] == 130
    assert is_gone(pid)


@pytest.mark.slow_cases("15-143")
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_requests_to_end_are_treated_like_ctrl_c(launch, is_gone, number, exit_code):
    job = launch("-n", "1", "-s", "1", "--grace", "0.1", "python", "-c", STUBBORN)
    pid = job.pid_of("worker-0")
    job.process.send_signal(number)
    code, _, err = job.finish()
    assert code == exit_code
    assert "worker-0 did not end within 0.1 s of the interruption; terminating" in err
    assert is_gone(pid)


@pytest.mark.parametrize("exit_code", [0, 4])
def test_what_a_worker_has_started_ends_with_the_job(launch, is_gone, exit_code):
    job = launch("-n", "1", "-s", "1", "--grace", "0.2", "python", "-c", LEAVE_CHILD, str(exit_code))
    pid = job.pid_of("worker-0")
    assert job.finish()[0] == exit_code
    assert is_gone(pid, timeout_s=10.0)  # it was killed, and is nobody's child who would have waited for its end


@pytest.mark.slow_cases("0")
@pytest.mark.parametrize("servers", ["1", "0"])
def test_workers_do_not_outlive_a_killed_launcher(launch, is_gone, servers):
    job = launch("-n", "1", "-s", servers, "python", "-c", STUBBORN)
    pid = job.pid_of("worker-0")
    assert not is_gone(pid)
    job.process.kill()
    assert is_gone(pid, timeout_s=30.0)


def test_output_passes_through_byte_for_byte_and_by_stream(launch):
    script = "import os; os.write(1, b'\\xff\\xfe no end'); os.write(2, b'to stderr\\n')"
    _, out, err = launch("-n", "1", "-s", "1", "python", "-c", script).finish()
    assert "w0 │ \udcff\udcfe no end\n" in out
    assert "w0 │ to stderr\n" in err


def test_a_workers_standard_input_is_empty(launch):
    _, out, _ = launch("-n", "1", "-s", "1", "python", "-c", "import sys; print(repr(sys.stdin.read()))").finish()
    assert "w0 │ ''" in out


def test_training_goes_on_when_the_reader_of_the_output_has_gone(launch):
    script = "import os, time\nprint('pid', os.getpid())\nfor _ in range(1000): print('x' * 100)"
    job = launch("-n", "1", "-s", "1", "python", "-c", script)
    job.pid_of("worker-0")
    job.process.stdout.close()
    job.process.stdout = None
    code, _, err = job.finish()
    assert code == 0, err
    assert "finished in" in err


def test_awkward_arguments_and_values_reach_the_worker_unchanged(launch):
    awkward = "a b'c\"d$HOME `id` \n;*\\"
    script = "import os, sys; print(ascii((sys.argv[1:], os.environ['X'])))"
    _, out, _ = launch("-n", "1", "-s", "1", "--env-worker", f"X={awkward}", "python", "-c", script, awkward).finish()
    assert f"w0 │ {([awkward], awkward)!a}" in out


def test_python_is_the_interpreter_that_runs_the_launcher(launch):
    if sys.prefix == sys.base_prefix:
        pytest.skip("not in a virtual environment: PATH decides")
    _, out, _ = launch("-n", "1", "-s", "1", "python", "-c", "import sys; print(sys.prefix)").finish()
    assert f"w0 │ {sys.prefix}" in out


def test_a_job_is_started_anew_when_a_worker_fails_and_its_processes_know_how_often(launch):
    script = "import os; n = os.environ.get('KVDIST_RESTARTS', '0'); print('start', n); exit(0 if n == '2' else 5)"
    job = launch("-n", "1", "-s", "1", "--grace", "0.2", "--on-worker-exit", "restart:3", "python", "-c", script)
    code, out, err = job.finish()
    assert code == 0, err
    assert [line.split()[-1] for line in out.splitlines() if " start " in line] == ["0", "1", "2"]
    assert err.count("starting the whole job again") == 2 and "(2 of 3)" in err


def test_restarts_are_counted_and_the_last_failure_is_the_jobs(launch):
    job = launch("-n", "1", "-s", "1", "--grace", "0.2", "--on-worker-exit", "restart:1", "python", "-c", "exit(7)")
    code, _, err = job.finish()
    assert code == 7 and err.count("starting the whole job again") == 1


def test_a_failing_server_or_an_interruption_starts_nothing_anew(launch):
    words = ("--grace", "0.2", "--on-worker-exit", "restart:5")
    job = launch("-n", "1", "-s", "1", *words, "--env-server", "SERVER_DOES=leave", "sleep", "60")
    assert job.finish()[0] == 1
    job = launch("-n", "1", "-s", "1", *words, "python", "-c", SAY_AND_SLEEP)
    job.pid_of("worker-0")
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert code == 130 and "again" not in err


def test_who_interrupts_after_a_failure_wants_no_other_start(launch):
    script = "import os, time; os.environ['KVDIST_RANK'] == '1' and exit(7); time.sleep(600)"
    words = ("--grace", "60", "--on-worker-exit", "restart:5")
    job = launch("-n", "2", "-s", "1", *words, "python", "-c", script)
    job.error_line_with("waiting up to 60 s for the other processes to exit")
    job.process.send_signal(signal.SIGINT)
    code, _, err = job.finish()
    assert code == 7 and "starting the whole job again" not in err
