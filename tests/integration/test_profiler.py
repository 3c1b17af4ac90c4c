"""Traces of real processes: what they hold, and that they are valid however a process ends."""

from __future__ import annotations

import json
import signal

import pytest


def trace(path):
    """The events of a file by category, and what it says of itself. Raises if it is not JSON."""
    told = json.loads(path.read_text("utf-8"))
    events = {}
    for event in told["traceEvents"]:
        events.setdefault("end" if event["ph"] == "e" else event.get("cat"), []).append(event)
    return events, told["otherData"]


def test_two_workers_and_two_servers_write_a_valid_trace_each(job, tmp_path):
    job.launch(2, 2, "profiled.py", "both_sides", KVDIST_PROFILE_DIR=str(tmp_path))
    job.succeed()
    names = [f"served.server-{rank}.json" for rank in range(2)] + [f"work.worker-{rank}.json" for rank in range(2)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    keys, clocks = set(), []
    for rank in range(2):
        events, about = trace(tmp_path / f"served.server-{rank}.json")
        assert about["process"] == f"server-{rank}" and about["events_max"] == 500 and about["events_dropped"] == 0
        rounds = {}
        for event in events["round"]:
            keys.add(event["args"]["key"])
            rounds.setdefault((event["args"]["key"], event["args"]["bytes"]), []).append(event["args"]["version"])
            assert event["args"]["contributions"] == 2 and event["dur"] > 0
        assert rounds and all(versions == [1, 2, 3, 4] for versions in rounds.values())
        assert {event["args"]["from"] for event in events["message"]} == {"scheduler", "worker-0", "worker-1"}
        clocks += [event["ts"] for event in events["round"]]
    assert keys == {"small", "big"}
    for rank in range(2):
        events, about = trace(tmp_path / f"work.worker-{rank}.json")
        calls = [event for event in events["call"] if event["name"].startswith("pushpull of 2 keys")]
        assert len(calls) == 4 and all(event["args"]["bytes"] == 16 + 4 * 1200 * 1200 for event in calls)
        # All processes of a host have one clock, so the rounds lie within the calls that they answer.
        ends = [event["ts"] for event in events["end"] if event["name"] == calls[0]["name"]]
        assert calls[0]["ts"] < min(clocks) and max(clocks) < max(ends)
        assert {"joining the cluster", "barrier"} <= {event["name"] for event in events["call"]}
    refused = [line.split("refused: ")[1] for line in job.processes["launcher"].lines_with("refused: ")]
    assert [line.split(" cannot be")[0] for line in refused[:2]] == ["'../served.json'", "'a/b'"]
    assert "server-" in refused[2] and "a trace is in progress: finish it" in refused[2]


def test_a_variable_traces_all_processes_of_a_job_that_knows_nothing_of_it(job, tmp_path):
    job.launch(2, 2, "nothing.py", KVDIST_PROFILER_AUTOSTART="1", KVDIST_PROFILE_DIR=str(tmp_path))
    job.succeed()
    for name in ("server-0", "server-1", "worker-0", "worker-1"):
        events, about = trace(tmp_path / f"profile.{name}.json")
        assert about["process"] == name and events["message"]


@pytest.mark.slow_cases("2", "9")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_trace_of_a_worker_that_is_ended_by_a_signal_is_valid(job, tmp_path, number):
    period = "3600" if number == signal.SIGINT else "0.02"
    job.cluster(1, 2, "profiled.py", "for_ever", period, KVDIST_PROFILE_DIR=str(tmp_path))
    # After Ctrl-C the end of the interpreter writes what came since; else the last renewal has what came before it.
    job.line("worker-0", "50 steps" if number == signal.SIGINT else "renewed")
    job.kill("worker-0", number)
    assert job.finish()["worker-0"] != 0
    events, about = trace(tmp_path / "work.worker-0.json")
    steps = [event for event in events["call"] if event["name"] == "pushpull of key 'w'"]
    assert len(steps) >= (50 if number == signal.SIGINT else 1)
    assert about["events_dropped"] == 0
