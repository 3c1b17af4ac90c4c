"""What processes print: shown or filtered, logged and remembered."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, server, worker
from kvdist_launch.output import LAST_LINES, JobOutput, LogFiles, OutputFilter, RankLogFiles, Sink

OUT, ERR = 0, 1
SEATS = [SCHEDULER, server(0), server(1), worker(0), worker(1), worker(10)]


class Screen:
    """A pipe in the place of the launcher's own output."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        self.sink = Sink(self._writer, is_terminal=False)

    def text(self) -> str:
        try:
            return os.read(self._reader, 1 << 16).decode()
        except BlockingIOError:
            return ""

    def close(self) -> None:
        os.close(self._reader)
        os.close(self._writer)


@pytest.fixture
def screen() -> Iterator[Screen]:
    made = Screen()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("patterns", "shown"),
    [
        ("", "sched s0 s1 w0 w1 w10"),
        ("w0", "w0"),
        ("w0,s*", "s0 s1 sched w0"),
        ("w?", "w0 w1"),
        ("worker-[0-1]", "w0 w1"),
        ("server-1,scheduler", "s1 sched"),
        ("*@d2", "w0 w1 w10"),
        ("w1@d2", "w1"),
        ("W0", ""),
    ],
)
def test_patterns_choose_by_short_and_long_names_and_hosts(patterns, shown):
    chosen = OutputFilter([one for one in patterns.split(",") if one])
    names = {"scheduler": "sched", "server-0": "s0", "server-1": "s1", "worker-0": "w0", "worker-1": "w1",
             "worker-10": "w10"}  # fmt: skip
    hosts = {node: "d2" if str(node).startswith("worker") else "d1" for node in SEATS}
    assert sorted(names[str(node)] for node in SEATS if chosen.shows(node, hosts[node])) == sorted(shown.split())


def test_a_pattern_that_matches_nobody_is_told(screen):
    transcript = JobOutput(screen.sink, screen.sink, OutputFilter(["w0", "w7", "srv*"]))
    assert transcript.open((node, "") for node in SEATS) == ["--filter w7,srv* matches no process of this job"]


def test_what_is_filtered_is_not_shown_but_logged_and_remembered(screen, tmp_path):
    transcript = JobOutput(screen.sink, screen.sink, OutputFilter(["w0"]), LogFiles(tmp_path / "logs", print))
    assert transcript.open([(worker(0), "d1"), (worker(1), "d1")]) == []
    transcript.feed(worker(0), OUT, b"seen\n")
    transcript.feed(worker(1), OUT, b"not seen\n")
    transcript.close()
    assert screen.text() == "w0@d1 │ seen\n"
    assert (tmp_path / "logs" / "worker-1.log").read_bytes() == b"not seen\n"
    assert transcript.last_lines(worker(1)) == [b"not seen"]


def test_a_log_has_both_outputs_in_the_order_in_which_they_came_and_no_prefix(screen, tmp_path):
    transcript = JobOutput(screen.sink, screen.sink, logs=LogFiles(tmp_path, print))
    transcript.open([(SCHEDULER, "")])
    transcript.feed(SCHEDULER, OUT, b"one\nhalf a ")
    transcript.feed(SCHEDULER, ERR, b"two \xff\n10%\r20%\r")
    transcript.feed(SCHEDULER, OUT, b"line\nno end")
    transcript.close()
    assert (tmp_path / "scheduler.log").read_bytes() == b"one\ntwo \xff\n10%\nhalf a line\nno end\n20%\n"


def test_logs_of_the_job_before_are_kept_and_those_before_them_are_not(screen, tmp_path):
    for text in (b"first\n", b"second\n", b"third\n"):
        transcript = JobOutput(screen.sink, screen.sink, logs=LogFiles(tmp_path, print))
        transcript.open([(worker(0), "")])
        transcript.feed(worker(0), OUT, text)
        transcript.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "worker-0.log": b"third\n",
        "worker-0.log.1": b"second\n",
    }


def test_each_output_of_a_rank_has_a_file_in_its_folder_named_as_long_as_the_largest(screen, tmp_path):
    for size, names in ((11, ["rank.00", "rank.10"]), (10, ["rank.0", "rank.9"]), (1, ["rank.0"])):
        folder = tmp_path / str(size)
        transcript = JobOutput(screen.sink, screen.sink, logs=RankLogFiles(folder, print, size))
        transcript.open([(SCHEDULER, ""), (worker(0), ""), (worker(size - 1), "")])
        transcript.feed(worker(0), OUT, b"out\n")
        transcript.feed(worker(0), ERR, b"err")
        transcript.feed(SCHEDULER, OUT, b"kept nowhere\n")
        transcript.close()
        assert sorted(path.name for path in folder.iterdir()) == names
        assert (folder / names[0] / "stdout").read_bytes() == b"out\n"
        assert (folder / names[0] / "stderr").read_bytes() == b"err\n"


def test_a_full_disk_is_told_once_and_stops_nothing(screen, tmp_path):
    said: list[str] = []
    logs = LogFiles(tmp_path, said.append)
    transcript = JobOutput(screen.sink, screen.sink, logs=logs)
    transcript.open([(worker(0), ""), (worker(1), "")])
    # A file that is full: every write to it fails with the reason of a full disk.
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, logs._descriptors[tmp_path / "worker-0.log"])
    os.close(full)
    for node in (worker(0), worker(1), worker(0)):
        transcript.feed(node, OUT, b"a\n")
    transcript.close()
    path = tmp_path / "worker-0.log"
    assert said == [f"{path}: No space left on device; the log files end here, the job goes on"]
    assert screen.text() == "w0 │ a\nw1 │ a\nw0 │ a\n"


def test_a_folder_of_logs_that_cannot_be_made_is_refused_before_anything_starts(screen, tmp_path):
    (tmp_path / "file").write_text("")
    transcript = JobOutput(screen.sink, screen.sink, logs=LogFiles(tmp_path / "file" / "logs", print))
    with pytest.raises(ConfigError, match=r"log files cannot be written to .*file/logs: .* give --log-dir a folder"):
        transcript.open([(worker(0), "")])


def test_the_last_lines_of_both_outputs_are_remembered_without_blank_ones(screen):
    transcript = JobOutput(screen.sink, screen.sink)
    transcript.open([(worker(0), "")])
    transcript.feed(worker(0), OUT, b"".join(b"%d\n" % number for number in range(20)))
    transcript.feed(worker(0), ERR, b"wrong\n\n  \n")
    transcript.feed(worker(0), OUT, b"end")
    transcript.close()
    last = transcript.last_lines(worker(0))
    assert last == [*(b"%d" % number for number in range(12, 20)), b"wrong", b"end"]
    assert len(last) == LAST_LINES
    assert transcript.last_error_line(worker(0)) == b"wrong\n"


def test_a_prompt_is_shown_at_once_without_a_prefix_and_lines_of_others_begin_after_it(screen, tmp_path):
    transcript = JobOutput(screen.sink, screen.sink, OutputFilter(["w1"]), LogFiles(tmp_path, print))
    transcript.open([(worker(0), ""), (worker(1), "")], with_stdin=worker(0))
    transcript.feed(worker(0), OUT, b"-> breakpoint()\n(Pdb) ")
    assert screen.text() == "-> breakpoint()\n(Pdb) "
    transcript.feed(worker(1), OUT, b"a line\nanother\n")
    transcript.feed(worker(0), OUT, b"42\n")
    assert screen.text() == "\nw1 │ a line\nw1 │ another\n42\n"
    transcript.close()
    assert screen.text() == ""
    assert (tmp_path / "worker-0.log").read_text() == "-> breakpoint()\n(Pdb) 42\n"
