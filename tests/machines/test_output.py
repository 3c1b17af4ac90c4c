"""What a job on several machines shows, logs and sums up."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.machines


def test_lines_say_their_host_and_logs_and_the_summary_lie_with_the_launcher(machines, launch, project):
    job = launch(
        "-n", "2", "-s", "2", "-H", "d1,d2", "--sync-dst-dir", str(machines.destination), "--filter", "w*@d2,s0",
        "--log-dir", "logs", "--json-summary", "summary.json", "python", "rounds.py", "fail", "9",
    )  # fmt: skip
    assert job.finish() == 1, job.text
    shown = {line.partition(" │ ")[0] for line in job.text.splitlines() if " │ " in line}
    assert "w1@d2" in shown and shown <= {"w1@d2", "s0@d1"}
    told = [
        line for line in job.lines_with("ValueError: the learning rate went overboard") if line.startswith("w1@d2 │")
    ]
    assert len(told) == 1
    logs = {path.name: path.read_text() for path in (project / "logs").iterdir()}
    assert sorted(logs) == ["scheduler.log", "server-0.log", "server-1.log", "worker-0.log", "worker-1.log"]
    assert "ValueError: the learning rate went overboard\n" in logs["worker-1.log"]
    assert logs["worker-0.log"]
    found = json.loads((project / "summary.json").read_text())
    assert (found["exit_code"], found["outcome"]) == (1, "failed")
    assert (found["first_failure"]["node"], found["first_failure"]["host"]) == ("worker-1", "d2")
    hosts = {one["node"]: one["host"] for one in found["processes"]}
    assert hosts == {"scheduler": "", "server-0": "d1", "server-1": "d2", "worker-0": "d1", "worker-1": "d2"}


def test_a_job_that_could_not_start_leaves_a_summary_too(machines, launch, project):
    job = launch("-n", "1", "-s", "1", "-H", "nowhere", "--json-summary", "summary.json", "true")
    assert job.finish() == 2, job.text
    found = json.loads((project / "summary.json").read_text())
    assert (found["exit_code"], found["outcome"], found["processes"]) == (2, "not started", [])
    assert "nowhere: " in found["sentence"]
