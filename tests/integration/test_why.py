"""Jobs of real processes that fail: ``kvdist why`` names in a paragraph who was awaited, and dumps replay."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROMPT = {"KVDIST_EXPLAIN_AFTER_S": "0.5"}


def why(folder: Path, *options: str) -> str:
    """What the command prints."""
    command = [sys.executable, "-m", "kvdist", "why", str(folder), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def assert_replays(folder: Path) -> None:
    lines = why(folder, "--replay").splitlines()
    assert len(lines) == len(list(folder.glob("*.dump"))) > 0
    assert all(line.endswith("events, and the same answers") for line in lines), lines


@pytest.mark.parametrize(
    "scenario, sentences",
    [
        (
            "raises",
            [
                " because of worker-1 (host ",
                "ValueError: the learning rate went overboard.",
                "Its main thread was at ",
                "why.py:",
            ],
        ),
        (
            "barrier",
            [
                "No process was lost; workers waited for each other",
                "worker-0 waits for worker-1 to push key 'w' (step 6)",
                "worker-1 waits for worker-0 in barrier",
                "They waited in these lines: worker-0 at ",
            ],
        ),
        ("other keys", ["worker-0 waits for worker-1 to push key 'v'", "worker-1 waits for worker-0 to push key 'w'"]),
    ],
)
def test_the_paragraph_names_the_party(job, tmp_path_factory, scenario, sentences):
    folder = tmp_path_factory.mktemp("dumps")
    job.launch(2, 1, "why.py", scenario, options=["--grace", "30", "--dump", str(folder)])
    codes = job.finish()
    assert codes["launcher"], "the job failed"
    text = why(folder)
    assert "\n" not in text.strip() and all(sentence in text for sentence in sentences), text
    assert_replays(folder)


def test_a_killed_worker_is_named_with_who_waited_for_it(job, tmp_path_factory):
    folder, fifo = tmp_path_factory.mktemp("dumps"), tmp_path_factory.mktemp("fifo") / "fifo"
    os.mkfifo(fifo)
    options = ["--grace", "30", "--dump", str(folder)]
    job.launch(2, 1, "why.py", "stands still", str(fifo), options=options, **PROMPT)
    job.line("launcher", "to push key 'w' (step 6)")  # by then the others' pushes have come
    job.kill("worker-1")
    job.finish()
    text = why(folder)
    assert " because of worker-1 (host " in text and ": killed by signal 9 (SIGKILL)." in text, text
    assert "server-0 waited" in text and "worker-0 waited" in text, text
    assert "for worker-1 to push key 'w' (step 6)." in text and "see dmesg on " in text, text
    assert_replays(folder)


def test_a_killed_server_is_named(job, tmp_path_factory):
    folder, fifo = tmp_path_factory.mktemp("dumps"), tmp_path_factory.mktemp("fifo") / "fifo"
    os.mkfifo(fifo)
    job.launch(2, 2, "why.py", "stands still", str(fifo), options=["--grace", "30"], KVDIST_DUMP=str(folder))
    job.line("launcher", "standing still")
    job.kill("server-1")
    fifo.write_bytes(b"")
    job.finish()
    text = why(folder)
    assert " because of server-1 (host " in text and "killed by signal 9" in text, text
    assert_replays(folder)


def test_a_worker_that_stops_pushing_is_named_with_its_line(job, tmp_path_factory):
    folder, fifo = tmp_path_factory.mktemp("dumps"), tmp_path_factory.mktemp("fifo") / "fifo"
    os.mkfifo(fifo)
    job.launch(2, 1, "why.py", "stands still", str(fifo), KVDIST_DUMP=str(folder), **PROMPT)
    job.line("launcher", "for worker-1")
    text = why(folder)  # while the job still runs
    assert "No process of this job was lost; these dumps are of long waits. Everybody waited for worker-1" in text, text
    assert "for worker-1 to push key 'w' (step 6)" in text and "See what it does" in text, text
    for name in ("worker-0", "worker-1"):
        job.kill(name, signal.SIGTERM)
    job.finish()
    text = why(folder)
    assert "it was interrupted. Everybody waited for worker-1 (host " in text, text
    assert "for worker-1 to push key 'w' (step 6)" in text, text
    assert "waited for nobody: its main thread was at " in text and " in stand_still." in text, text
    assert_replays(folder)


def test_a_worker_that_never_came_is_named_when_the_job_is_interrupted(job, tmp_path_factory):
    folder, fifo = tmp_path_factory.mktemp("dumps"), tmp_path_factory.mktemp("fifo") / "fifo"
    os.mkfifo(fifo)
    shown = ["--filter", "w*,scheduler"]
    job.launch(2, 1, "why.py", "comes late", str(fifo), options=shown, KVDIST_DUMP=str(folder), **PROMPT)
    job.line("launcher", "w0 │ worker-0 has waited")
    job.line("launcher", "sched │ 1/1 servers, 1/2 workers")
    job.kill("launcher", signal.SIGTERM)
    job.finish()
    text = why(folder)
    assert "The cluster was never complete: worker-1 had not registered with the scheduler." in text, text


def test_a_job_that_ends_well_leaves_no_dump(job, tmp_path_factory):
    folder = tmp_path_factory.mktemp("dumps")
    job.launch(2, 1, "why.py", "nothing", KVDIST_DUMP=str(folder))
    job.succeed()
    assert list(folder.iterdir()) == []


def test_a_folder_without_dumps_is_refused(tmp_path):
    command = [sys.executable, "-m", "kvdist", "why", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and "--dump" in done.stderr, done.stderr
