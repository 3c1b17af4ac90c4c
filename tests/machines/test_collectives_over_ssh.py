"""Jobs without servers on machines of their own, over real ssh daemons."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest

from tests.machines.launching import TIMEOUT_S
from tests.machines.machines import PYTHONPATH

pytest.importorskip("torch", reason="COLLECTIVES BETWEEN MACHINES ARE NOT TESTED: torch is not installed")
pytestmark = pytest.mark.machines

TOGETHER_S = 40.0
"""One failing rank ends all others within this time, on all machines, slow ones too, counted from what it printed last;
they would sleep for 60 s."""


def words(machines, *options):
    return ("-s", "0", "--security", "none", *options, "--sync-dst-dir", str(machines.destination))


def told(text):
    return sorted(re.findall(r"(w\d@\w+) │ (rank \d.*)", text))


def test_ranks_on_two_machines_meet_at_rank_0_which_inherits_its_socket(machines, launch):
    job = launch(*words(machines, "-n", "3", "-H", "d1:2,d2:2"), "python", "sums.py", "end")
    assert job.finish() == 0, job.text
    assert told(job.text) == [
        ("w0@d1", "rank 0 of 3, 0 of 2 here, 0 of 2 across: 6, inherited"),
        ("w1@d1", "rank 1 of 3, 1 of 2 here, 0 of 1 across: 6"),
        ("w2@d2", "rank 2 of 3, 0 of 1 here, 1 of 2 across: 6"),
    ]
    assert job.lines_with("nothing that this job sends is encrypted")
    assert " rank 0\n" in job.text, "the table has a column for whether it was reached"


def test_the_first_rank_that_fails_ends_those_of_other_machines(machines, launch):
    job = launch(*words(machines, "-n", "3", "-H", "d1,d2,d3"), "python", "sums.py", "fail")
    job.wait_for("rank 1 of 3")
    began = time.monotonic()
    assert job.finish() == 9, job.text
    assert time.monotonic() - began < TOGETHER_S
    assert "worker-1 on d2 (pid " in job.text.splitlines()[-1]


def test_several_machines_without_a_word_about_encryption_are_refused(machines, launch):
    job = launch("-n", "2", "-s", "0", "-H", "d1,d2", "python", "sums.py", "end")
    assert job.finish() == 2
    assert "say so with --security none" in job.text


def test_kvdist_run_fills_machines_in_their_order_and_says_aloud_that_nothing_is_encrypted(machines, project, launch):
    argv = machines.command([sys.executable, "-m", "kvdist_launch.run_cli"])
    options = ["-np", "3", "-H", "d1:2,d2:2", "--verbose", "--output-filename", "out"]
    program = ["python", f"{machines.destination}/sums.py", "end"]
    for name in ("d1", "d2"):
        for file in project.iterdir():
            if file.is_file():
                (machines.machines[name].destination / file.name).write_bytes(file.read_bytes())
    env = {"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    argv += [*options, *program]
    done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert [name for name, _ in told(done.stdout)] == ["w0@d1", "w1@d1", "w2@d2"]
    assert "WARNING: WHAT THE PROCESSES SEND TO EACH OTHER IS NOT ENCRYPTED" in done.stderr
    assert "kvdist-run: worker-2 on d2: local rank 0 of 1, cross rank 1 of 2\n" in done.stderr
    assert sorted(str(path.relative_to(project)) for path in project.rglob("stdout")) == [
        "out/rank.0/stdout", "out/rank.1/stdout", "out/rank.2/stdout",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("return", ["results [(0, 3.0, '10.177.0.2'), (1, 3.0, '10.177.0.3')] True"]),
        ("raise", ["failure (1, 'd2', 1, 'LookupError')", "called.py", "in work\n", "LookupError: no such thing"]),
        ("kill", ["failure (1, 'd2', 137, '')", "worker-1 on d2 was killed by signal 9 (SIGKILL) before the function"]),
        ("lose", ["failure (1, 'd2', 255, '')", "worker-1 on d2 was lost (the connection to d2 ended "]),
    ],
)
def test_a_function_is_called_on_two_machines_and_its_results_or_its_failure_come_back(
    machines, project, launch, how, told
):
    argv = [sys.executable, "-c", f"import called; called.main({how!r}, {str(machines.destination)!r})"]
    env = {"PYTHONPATH": PYTHONPATH, "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"}
    done = subprocess.run(
        machines.command(argv), cwd=project, env=env, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in told), done.stdout
    assert "WHAT THE PROCESSES SEND TO EACH OTHER IS NOT ENCRYPTED" in done.stderr
