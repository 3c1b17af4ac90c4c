"""Jobs on machines of their own, over real ssh daemons: what the tutorial shows, and what goes wrong there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.machines.machines import GONE_S

pytestmark = pytest.mark.machines


def tutorial(machines, *program):
    """The tutorial's words, with the worker's own."""
    return (
        "-n", "2", "-s", "2", "-H", "hosts", "--sync-dst-dir", str(machines.destination), "--launcher", "ssh",
        " ".join(["python", f"{machines.destination}/rounds.py", *program]),
    )  # fmt: skip


def test_the_command_of_the_tutorial_copies_starts_and_ends_a_job_on_two_machines(machines, launch):
    job = launch(*tutorial(machines, "end", "5"))
    assert job.finish() == 0, job.text
    for name in ("d1", "d2"):
        (line,) = job.lines_with(f" -> {name}:{machines.destination}")
        assert " INFO rsync " in line
        assert job.lines_with(f"INFO rsync to {name}: ")
        assert (machines.machines[name].destination / "beside.txt").read_text() == "what lies beside\n"
    assert not list(machines.machines["d3"].destination.iterdir())
    found = job.lines_with("found what lies beside in ")
    assert len(found) == 2 and all(str(machines.destination) in line for line in found)
    assert len(job.lines_with("is done, security curve")) == 2
    assert job.lines_with("2 workers and 2 servers finished in ")


def test_keys_and_known_hosts_of_ssh_stand_in_the_hostfile(machines, launch, project):
    ssh = machines.home / ".ssh"
    shutil.copy(ssh / "key", ssh / "lab key")
    (ssh / "known_hosts").rename(ssh / "lab hosts")
    options = "user=root identity='~/.ssh/lab key' known_hosts='~/.ssh/lab hosts'"
    machine = machines.machines["d1"]
    (ssh / "config").unlink()
    try:
        for own, code in ((options, 0), (options.partition(" known_hosts")[0], 2)):
            (project / "hosts").write_text(f"{machine.address} port={machine.port} {own}\n")
            job = launch(*tutorial(machines, "end", "2"))
            assert job.finish() == code, job.text
            assert len(job.lines_with("is done, security curve")) == (0 if code else 2), job.text
        assert job.lines_with("Host key verification failed"), job.text
    finally:
        for name in ("lab key", "lab hosts"):
            (ssh / name).unlink()


def test_three_machines_without_encryption_say_so(machines, launch):
    job = launch(
        "-n", "3", "-s", "3", "-H", "d1,d2,d3", "--security", "none", "--sync-dst-dir", str(machines.destination),
        "python", "rounds.py", "end", "3",
    )  # fmt: skip
    assert job.finish() == 0, job.text
    assert len(job.lines_with("is done, security none")) == 3
    assert job.lines_with("nothing that this job sends is encrypted")


def test_a_failing_workers_code_and_last_words_come_out(machines, launch):
    job = launch(*tutorial(machines, "fail", "9"))
    assert job.finish() == 1, job.text
    assert job.lines_with("ValueError: the learning rate went overboard")
    last = job.text.splitlines()[-1]
    assert "worker-1 on d2 (pid " in last and "failed with exit code 1" in last and "exit code 1" in last


def test_a_killed_launcher_leaves_no_process_on_any_machine(machines, launch):
    job = launch(*tutorial(machines, "last", "10000"))
    job.wait_for("round 3")
    assert all(machines.machines[name].processes() for name in ("d1", "d2"))
    job.signal(signal.SIGKILL)
    assert machines.left_after(GONE_S) == []


def test_an_interrupted_job_ends_everywhere_and_says_so(machines, launch):
    job = launch(*tutorial(machines, "last", "10000"))
    job.wait_for("round 3")
    job.signal(signal.SIGINT)
    assert job.finish() == 128 + signal.SIGINT, job.text
    assert job.lines_with("interrupted by signal 2 (SIGINT)")
    assert job.lines_with("KeyboardInterrupt")
    assert machines.left_after(GONE_S) == []


def test_a_killed_worker_of_another_machine_is_named_with_its_signal(machines, launch):
    job = launch(*tutorial(machines, "last", "10000"))
    job.wait_for("round 3")
    line = job.line_with("worker 1 pid ")
    os.kill(int(line.split(" pid ")[1].split()[0]), signal.SIGKILL)
    assert job.finish() == 128 + 9, job.text
    assert "worker-1 on d2 (pid " in job.text.splitlines()[-1]
    assert "was killed by signal 9 (SIGKILL)" in job.text.splitlines()[-1]


def test_a_machine_that_drops_off_is_named_and_its_processes_end_too(machines, launch):
    job = launch(*tutorial(machines, "last", "10000"))
    job.wait_for("round 3")
    machine = machines.machines["d2"]
    machine.set_link(up=False)
    try:
        assert job.finish() == 255, job.text
        assert "on d2" in job.text.splitlines()[-1] and "was lost" in job.text.splitlines()[-1]
        assert machines.left_after(60.0) == [], "the agent there has heard nothing any more"
    finally:
        machine.set_link(up=True)


COMES_BACK = """
import os
import numpy as np
from kvdist import kv

store = kv.create("dist")
store.set_optimizer("sgd", learning_rate=1.0)
store.init(["all", "again"], [np.zeros(5000), np.zeros(1)])
is_back, pushes = "KVDIST_RESTARTS" in os.environ, 0
out = [np.zeros(5000), np.zeros(1)]
while -out[1][0] < 20:
    store.pushpull(["all", "again"], [np.ones(5000), np.full(1, float(is_back))], out=out)
    pushes += 1
    print("round", pushes, flush=True)
print("made", pushes, "counted", -out[0].min(), -out[0].max(), flush=True)
store.close()
"""


@pytest.mark.parametrize("how", ["agent", "cable"])
def test_a_worker_whose_machine_is_gone_is_started_on_another_one(machines, launch, project, how):
    (project / "back.py").write_text(COMES_BACK)
    (project / "hosts").write_text("d1 slots=1\nd2 role=worker slots=1\nd3 role=worker slots=1\n")
    job = launch(
        "-n", "2", "-s", "1", "-H", "hosts", "--sync-dst-dir", str(machines.destination),
        "--on-loss", "continue", "--restart", "9", "--patience", "3", "python", "back.py",
    )  # fmt: skip
    job.wait_for("w1@d3 │ round 20")
    machine = machines.machines["d3"]
    try:
        if how == "cable":
            machine.set_link(up=False)
        else:
            for pid in [pid for pid, line in machine.processes().items() if "kvdist_launch.agent" in line]:
                os.kill(pid, signal.SIGKILL)
        assert job.finish() == 0, job.text
    finally:
        machine.set_link(up=True)
    assert job.lines_with("worker-1 on d3 (pid ") and job.lines_with("worker-1 is started again on d1")
    assert job.lines_with("w1@d1 │ made "), job.text
    counts = [line.split("counted ")[1].split() for line in job.lines_with("counted ")]
    assert len(counts) == 2 and counts[0] == counts[1] and counts[0][0] == counts[0][1], job.text
    assert machines.left_after(60.0) == [], "the agent there has heard nothing any more"


def test_a_machine_without_that_python_is_named_before_anything_starts(machines, launch, project):
    (project / "hosts").write_text("d1\nd2 python=/opt/nothing/bin/python\n")
    job = launch(*tutorial(machines, "end", "1"))
    assert job.finish() == 2, job.text
    assert job.lines_with("d2: ") and job.lines_with("there is no /opt/nothing/bin/python")
    assert not list(machines.machines["d1"].destination.iterdir()), "nothing was copied anywhere"


def test_a_wrong_key_is_told_with_what_to_do(machines, launch):
    (machines.machines["d2"].folder / "authorized_keys").rename(machines.machines["d2"].folder / "no_keys")
    try:
        job = launch(*tutorial(machines, "end", "1"))
        assert job.finish() == 2, job.text
        assert job.lines_with("d2: ") and job.lines_with("Permission denied") and job.lines_with("ssh-copy-id")
    finally:
        (machines.machines["d2"].folder / "no_keys").rename(machines.machines["d2"].folder / "authorized_keys")


def test_an_unknown_host_key_is_refused_unless_new_ones_are_accepted(machines, launch):
    known = machines.home / ".ssh/known_hosts"
    known.write_text("")
    job = launch(*tutorial(machines, "end", "1"))
    assert job.finish() == 2, job.text
    assert job.lines_with("--accept-new-host-keys")
    job = launch("--accept-new-host-keys", *tutorial(machines, "end", "1"))
    assert job.finish() == 0, job.text


def test_a_changed_host_key_is_not_to_be_accepted_as_a_new_one(machines, launch, tmp_path):
    known = machines.home / ".ssh/known_hosts"
    before = known.read_text()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "other")], check=True)
    kind, key, *_ = (tmp_path / "other.pub").read_text().split()
    names = {line.split()[0] for line in before.splitlines() if line.strip()}
    known.write_text("".join(f"{name} {kind} {key}\n" for name in names))
    try:
        job = launch("--accept-new-host-keys", *tutorial(machines, "end", "1"))
        assert job.finish() == 2, job.text
        assert job.lines_with("IDENTIFICATION HAS CHANGED!") and job.lines_with("ssh-keygen -R d2 forgets the old key")
        assert "--accept-new-host-keys" not in job.text
    finally:
        known.write_text(before)


def test_a_host_that_does_not_exist_is_named_with_the_others(machines, launch):
    job = launch("-n", "1", "-s", "1", "-H", "d1,nowhere.invalid", "true")
    assert job.finish() == 2, job.text
    assert job.lines_with("1 of 2 hosts cannot take part")
    assert job.lines_with("nowhere.invalid: ")


def test_a_scheduler_on_a_host_serves_the_job(machines, launch):
    job = launch("--scheduler-on", "d3", *tutorial(machines, "end", "2"))
    assert job.finish() == 2 and "d3" in job.text, "it is none of the hosts"
    job = launch("--scheduler-on", "d2", *tutorial(machines, "end", "2"))
    assert job.finish() == 0, job.text


def test_this_machine_may_be_one_of_the_hosts(machines, launch):
    job = launch(
        "-n", "2", "-s", "2", "-H", "localhost,d2", "--sync-dst-dir", str(machines.destination),
        "python", "rounds.py", "end", "3",
    )  # fmt: skip
    assert job.finish() == 0, job.text
    assert len(job.lines_with("is done, security curve")) == 2


def test_no_secret_stands_in_any_command_line_or_in_the_output(machines, launch):
    job = launch("--env", "MY_TOKEN=hunter2hunter2", *tutorial(machines, "last", "10000"))
    job.wait_for("round 3")
    lines = [line for one in machines.machines.values() for line in one.processes().values()]
    assert len(lines) >= 6
    secret = secret_of(job)
    assert not [line for line in lines if "hunter2" in line or secret in line]
    job.signal(signal.SIGINT)
    job.finish()
    assert "hunter2" not in job.text and secret not in job.text


def secret_of(job):
    """What encrypts a job, in hexadecimal digits, from the file that one of its workers was given."""
    line = job.line_with("worker 1 pid ")
    process = Path("/proc") / line.split(" pid ")[1].split()[0]
    variables = dict(one.split(b"=", 1) for one in (process / "environ").read_bytes().split(b"\0") if one)
    path = variables[b"KVDIST_SECRET_FILE"].decode()
    # Seen as the worker sees it, which has folders of its own machine.
    secret = (process / f"root{path}").read_bytes()
    assert len(secret) == 32
    return secret.hex()


def test_a_full_disk_at_the_destination_is_told_before_or_while_copying(machines, launch, project):
    machine = machines.machines["d2"]
    machine.run("mount", "-t", "tmpfs", "-o", "size=70m", "tmpfs", str(machines.destination))
    try:
        (project / "large.bin").write_bytes(os.urandom(90_000_000))
        job = launch(*tutorial(machines, "end", "1"))
        assert job.finish() == 2, job.text
        assert job.lines_with(f"rsync to d2:{machines.destination} failed")
        assert job.lines_with("No space left on device")
        assert not job.lines_with("worker 0 pid "), "nothing was started"
        machine.run("dd", "if=/dev/zero", f"of={machines.destination}/more", "bs=1M", "count=60", check=False)
        job = launch(*tutorial(machines, "end", "1"))
        assert job.finish() == 2, job.text
        assert job.lines_with(f"d2: {machines.destination} has ") and "INFO rsync" not in job.text
    finally:
        machine.run("umount", str(machines.destination))


def test_gitignored_and_excluded_files_stay_here_and_nothing_is_deleted_unasked(machines, launch, project):
    (project / ".gitignore").write_text("secret.txt\n")
    for name in ("secret.txt", "huge.ckpt", "kept.txt"):
        (project / name).write_text(name)
    there = machines.machines["d1"].destination
    (there / "results.txt").write_text("of an earlier run")
    job = launch("--sync-exclude", "*.ckpt", *tutorial(machines, "end", "1"))
    assert job.finish() == 0, job.text
    names = {path.name for path in there.iterdir()}
    assert {"kept.txt", "results.txt"} <= names and not names & {"secret.txt", "huge.ckpt"}
    job = launch("--sync-exclude", "*.ckpt", "--sync-delete", *tutorial(machines, "end", "1"))
    assert job.finish() == 0, job.text
    assert not (there / "results.txt").exists()


def test_the_cifar10_example_trains_on_three_machines(machines, launch):
    job = launch(
        "-n", "3", "-s", "3", "-H", "d1,d2,d3", "--sync-dst-dir", str(machines.destination),
        "python", "cifar10_dist.py", "--fake-data", "--fake-images", "12", "--batch-size", "4", "--epochs", "1",
    )  # fmt: skip
    assert job.finish(150.0) == 0, job.text
    assert len(job.lines_with("Test_acc")) == 3
    assert job.lines_with("3 workers and 3 servers finished in ")


def test_a_second_interruption_kills_what_ignores_the_first(machines, launch):
    stubborn = "import signal, time; signal.signal(2, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
    job = launch("-n", "1", "-s", "1", "-H", "d1", "--no-preflight", "--grace", "60", "python", "-c", stubborn)
    job.wait_for("here")
    job.signal(signal.SIGINT)
    job.wait_for("a second one kills everything")
    deadline = time.monotonic() + 40.0  # after 60 s it would be terminated anyway
    # Signals in quick succession count as one, so it is repeated until the launcher has ended.
    while True:
        with contextlib.suppress(ProcessLookupError):
            job.signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(1.0)
            break
        assert time.monotonic() < deadline, job.text
    assert job.finish() == 130, job.text
    assert machines.left_after(GONE_S) == []


def test_a_killed_agent_leaves_nothing_and_its_host_is_named(machines, launch):
    job = launch(*tutorial(machines, "last", "10000"))
    job.wait_for("round 3")
    (agent,) = [pid for pid, line in machines.machines["d2"].processes().items() if "kvdist_launch.agent" in line]
    os.kill(agent, signal.SIGKILL)
    assert job.finish() == 255, job.text
    assert "on d2" in job.text.splitlines()[-1] and "was lost: the connection to d2 ended" in job.text.splitlines()[-1]
    assert machines.left_after(GONE_S) == [], "a guard ended them"


def test_who_has_not_come_is_named_with_its_machine_and_the_cluster_is_not_awaited_for_ever(machines, launch):
    idle = (
        "import os, time; os.environ["
        "'KVDIST_RANK'] == '1' and time.sleep(600); from kvdist import kv; kv.create('dist')"
    )
    job = launch(
        "-n", "2", "-s", "2", "-H", "d1,d2", "--no-preflight", "--start-timeout", "20", "--grace", "1",
        "python", "-c", idle, KVDIST_EXPLAIN_AFTER_S="1",
    )  # fmt: skip
    assert job.finish() != 0, job.text
    assert job.lines_with("2/2 servers, 1/2 workers; waiting for worker-1 on d2 (pid ")
    assert job.lines_with("the cluster is incomplete after 20 s: worker-1 on d2 (pid ")
