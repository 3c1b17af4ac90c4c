"""What is told of a job that is over, for people and for programs."""

from __future__ import annotations

import json
import os

import pytest

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.nodes import SCHEDULER, server, worker
from kvdist.version import __version__
from kvdist_launch.job import JobSummary, ProcessExit, remove_summary, write_summary

HOSTS = {SCHEDULER: "", server(0): "d1", server(1): "d2", worker(0): "d1", worker(1): "d2", worker(2): "d1"}


def begun() -> JobSummary:
    chronicle = JobSummary(100.0)
    chronicle.started(HOSTS.items(), 100.25)
    return chronicle


def end(chronicle, now, *ends):
    endings = [ProcessExit(node, 1000 + list(HOSTS).index(node), status) for node, status in ends]
    chronicle.ended(endings, now)
    return endings[0]


def failed():
    """worker-1 fails, who lost a peer ends by itself, and the rest is told to end."""
    chronicle = begun()
    cause = end(chronicle, 104.5, (worker(1), 3))
    end(chronicle, 104.6, (SCHEDULER, EXIT_PEER_LOST), (server(0), EXIT_PEER_LOST), (server(1), EXIT_PEER_LOST))
    chronicle.told_to_end(worker(0))
    chronicle.told_to_end(worker(2))
    end(chronicle, 109.5, (worker(0), -15), (worker(2), -9))
    return chronicle, cause


def test_a_failure_is_told_with_last_lines_and_how_the_others_ended():
    chronicle, cause = failed()
    assert chronicle.conclude("it failed", cause, ["Traceback", "ValueError: x"]) == [
        "the last lines of worker-1:",
        "    Traceback",
        "    ValueError: x",
        "2 servers and the scheduler lost a peer; 2 workers were ended by the launcher",
        "it failed",
    ]


def test_a_process_that_said_nothing_has_no_last_lines():
    chronicle, cause = failed()
    assert len(chronicle.conclude("it failed", cause, [])) == 2


def test_a_job_that_did_not_fail_is_told_in_its_sentence_alone():
    assert begun().conclude("all is well") == ["all is well"]


@pytest.mark.parametrize(
    ("ends", "told"),
    [
        ([(worker(0), 0)], "1 worker finished"),
        ([(worker(0), 0), (worker(2), 0), (server(0), 0)], "2 workers and 1 server finished"),
        ([(worker(0), 4), (worker(2), 5)], "1 worker failed with exit code 4; 1 worker failed with exit code 5"),
        ([(worker(0), -9), (worker(2), -9)], "2 workers were killed by signal 9 (SIGKILL)"),
        (
            [(SCHEDULER, -11), (server(0), -11), (worker(0), -11)],
            "1 worker, 1 server and the scheduler were killed by signal 11 (SIGSEGV)",
        ),
    ],
)
def test_the_others_are_told_by_the_ways_in_which_they_ended(ends, told):
    chronicle = begun()
    cause = end(chronicle, 101.0, (worker(1), 3))
    end(chronicle, 102.0, *ends)
    assert chronicle.conclude("it failed", cause) == [told, "it failed"]


def test_processes_of_a_lost_host_are_told_as_such():
    chronicle = begun()
    cause = ProcessExit(worker(1), 1004, 255, host="d2", lost="the connection to d2 ended")
    chronicle.ended([cause, ProcessExit(server(1), 1002, 255, host="d2", lost="the connection to d2 ended")], 103.0)
    assert chronicle.conclude("lost", cause) == ["1 server was lost with its host", "lost"]
    summary = chronicle.summary(255, 104.0)
    assert summary["first_failure"]["lost"] == "the connection to d2 ended"
    assert "exit_code" not in summary["first_failure"]


def test_the_summary_has_everything_that_a_program_wants_to_know():
    chronicle, cause = failed()
    chronicle.conclude("worker-1 failed", cause, ["ValueError: x"])
    summary = chronicle.summary(3, 110.0)
    processes = summary.pop("processes")
    assert summary == {
        "version": __version__,
        "exit_code": 3,
        "duration_s": 10.0,
        "outcome": "failed",
        "sentence": "worker-1 failed",
        "first_failure": {
            "node": "worker-1",
            "role": "worker",
            "rank": 1,
            "host": "d2",
            "pid": 1004,
            "exit_code": 3,
            "after_s": 4.25,
            "last_lines": ["ValueError: x"],
        },
    }
    assert [one["node"] for one in processes] == [str(node) for node in HOSTS]
    assert processes[5] == {
        "node": "worker-2", "host": "d1", "pid": 1005, "signal": 9, "started_s": 0.25, "ended_s": 9.5,
    }  # fmt: skip


@pytest.mark.parametrize(("code", "reason", "outcome"), [
    (0, "", "finished"), (130, "", "interrupted"), (127, "on d2, no such program", "failed"),
])  # fmt: skip
def test_the_outcome_is_one_word(code, reason, outcome):
    chronicle = begun()
    chronicle.conclude("it ended")
    summary = chronicle.summary(code, 102.0, reason)
    assert (summary["outcome"], summary["sentence"]) == (outcome, reason or "it ended")


def test_a_job_of_which_nothing_was_started_says_so():
    summary = JobSummary(100.0).summary(127, 102.0, "no such program")
    assert (summary["outcome"], summary["sentence"]) == ("not started", "no such program")


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_job_that_could_not_be_started_again_keeps_its_failure(has_begun):
    chronicle = begun()
    cause = end(chronicle, 101.0, (worker(0), 1))
    chronicle.conclude("worker-0 failed", cause, ["ValueError"])
    if has_begun:
        chronicle.begin()
    sentence = "worker-0 failed; it could not be started anew: d2 is gone"
    assert chronicle.give_up("d2 is gone") == sentence
    summary = chronicle.summary(1, 104.0)
    assert (summary["outcome"], summary["sentence"]) == ("failed", sentence)
    assert (summary["first_failure"]["exit_code"], summary["first_failure"]["last_lines"]) == (1, ["ValueError"])


def test_a_job_that_was_started_again_has_all_processes_and_only_the_last_failure():
    chronicle = begun()
    first = end(chronicle, 101.0, (worker(0), 1))
    end(chronicle, 101.5, *((node, -9) for node in HOSTS if node != worker(0)))
    chronicle.conclude("the first", first, ["ValueError"])
    chronicle.begin()
    chronicle.started([(worker(0), "d1"), (worker(1), "d2")], 102.0)
    chronicle.ended([cause := ProcessExit(worker(1), 8, 4), ProcessExit(worker(0), 7, 0)], 103.0)
    assert chronicle.conclude("the second", cause) == ["1 worker finished", "the second"]
    summary = chronicle.summary(4, 104.0)
    assert (summary["sentence"], summary["first_failure"]["pid"]) == ("the second", 8)
    lives = [one for one in summary["processes"] if one["node"] == "worker-0"]
    assert [(one["exit_code"], one["started_s"], one["ended_s"]) for one in lives] == [(1, 0.25, 1.0), (0, 2.0, 3.0)]
    chronicle.begin()
    chronicle.conclude("the third")
    assert chronicle.summary(0, 105.0)["first_failure"] is None


def test_a_summary_replaces_the_one_of_the_job_before_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, {"exit_code": 1})
    write_summary(path, {"exit_code": 0, "text": "é"})
    assert json.loads(path.read_text("utf-8")) == {"exit_code": 0, "text": "é"}
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_summary_that_cannot_be_written_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "summary.json"
    path.mkdir()
    with pytest.raises(OSError):
        write_summary(path, {})
    assert os.listdir(tmp_path) == ["summary.json"]


def test_a_summary_goes_through_links_and_pipes_and_leaves_them_what_they_are(tmp_path):
    link, pipe = tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(tmp_path / "target.json")
    write_summary(link, {"exit_code": 1})
    assert link.is_symlink() and json.loads((tmp_path / "target.json").read_text()) == {"exit_code": 1}
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    remove_summary(pipe)
    write_summary(pipe, {"exit_code": 2})
    assert json.loads(os.read(reader, 1000)) == {"exit_code": 2}
    os.close(reader)
    assert sorted(os.listdir(tmp_path)) == ["link.json", "pipe", "target.json"]


def test_the_summary_of_an_earlier_job_is_removed_if_it_is_there(tmp_path):
    path = tmp_path / "summary.json"
    remove_summary(path)
    path.write_text("{}")
    remove_summary(path)
    assert not path.exists()
