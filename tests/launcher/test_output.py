"""Lines of many processes in one output: whole, prefixed, unchanged."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, server, worker
from kvdist_launch.output import (
    HELD_S,
    LAST_LINES,
    LINE_BYTES_MAX,
    SCREEN_LINES,
    TEXT_MAX,
    JobOutput,
    LineSplitter,
    LogFiles,
    RepeatedErrors,
    Sink,
    all_printable,
    printable,
)
from tests.cases import each


def split(*chunks: bytes) -> list[bytes]:
    splitter = LineSplitter()
    return [line for chunk in chunks for line in splitter.feed(chunk)] + splitter.finish()


@each(
    "chunks, lines",
    [
        ([], []),
        ([b"a\nb\n"], [b"a\n", b"b\n"]),
        ([b"a", b"b", b"\n"], [b"ab\n"]),
        ([b"a\n\nb\n"], [b"a\n", b"\n", b"b\n"]),
        ([b"no end"], [b"no end\n"]),
        ([b"a\r\nb\r\n"], [b"a\n", b"b\n"]),
        ([b"a\r", b"\nb\n"], [b"a\n", b"b\n"]),
        ([b"\r 10%", b"\r 20%", b"\r100%\n"], [b" 10%\r", b" 20%\r", b"100%\n"]),
        ([b"10%\r20%\r"], [b"10%\r", b"20%\n"]),
        ([b"\r"], []),
        ([b"\xff\x00\xfe\n"], [b"\xff\x00\xfe\n"]),
    ],
)
def test_lines_end_at_newlines_and_carriage_returns(chunks, lines):
    assert split(*chunks) == lines


def test_a_line_that_does_not_end_is_shown_in_pieces():
    splitter = LineSplitter()
    assert splitter.feed(b"x" * LINE_BYTES_MAX) == []
    assert splitter.feed(b"yz") == [b"x" * LINE_BYTES_MAX + b"\n"]
    assert splitter.finish() == [b"yz\n"]


@given(st.lists(st.binary(max_size=20)))
def test_no_byte_of_a_line_is_lost_however_the_stream_is_cut(chunks):
    text = b"".join(chunks)
    assert b"".join(split(*chunks)).translate(None, b"\r\n") == text.translate(None, b"\r\n")
    assert split(*chunks) == split(text)


def written(is_terminal: bool, colours: bool = True, *calls: tuple[object, list[bytes]]) -> bytes:
    reader, writer = os.pipe()
    sink = Sink(writer, is_terminal, colours)
    for node, lines in calls:
        sink.write_lines(sink.prefix(node), lines)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        return pipe.read()


def test_every_line_has_the_name_of_its_process_before_it():
    shown = written(False, True, (worker(0), [b"a\n", b"b\n"]), (SCHEDULER, [b"c\n"]), (server(12), [b"d\n"]))
    assert shown.decode() == "w0 │ a\nw0 │ b\nsched │ c\ns12 │ d\n"


def test_the_host_stands_behind_the_name_where_there_are_several():
    assert Sink(1, is_terminal=False).prefix(worker(3), "d1").decode() == "w3@d1 │ "
    assert Sink(1, is_terminal=True).prefix(SCHEDULER, "d1").decode() == "\x1b[90msched@d1 │\x1b[0m "


def test_progress_bars_become_lines_where_nothing_can_be_overwritten():
    assert written(False, True, (worker(0), [b"10%\r", b"20%\r"])).decode() == "w0 │ 10%\nw0 │ 20%\n"


def test_progress_bars_are_overwritten_on_a_terminal_and_leave_no_rest():
    assert written(True, False, (worker(0), [b"10%\r"]), (worker(1), [b"a\n", b"b\n"])).decode() == (
        "\x1b[Kw0 │ 10%\r\x1b[Kw1 │ a\n\x1b[Kw1 │ b\n"
    )


def test_processes_have_colours_of_their_own_on_a_terminal():
    shown = written(True, True, (worker(0), [b"a\n"]), (worker(1), [b"a\n"]))
    assert shown.decode() == "\x1b[K\x1b[36mw0 │\x1b[0m a\n\x1b[K\x1b[32mw1 │\x1b[0m a\n"


def test_lines_begin_with_the_local_time_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        reader, writer = os.pipe()
        sink = Sink(writer, is_terminal=False, clock=lambda: 1763751662.0625)
        sink.write_lines(sink.prefix(worker(0)), [b"a\n", b"b\n"])
        sink.write_lines(b"kvdist-launch: ", [b"c\n"])
        assert os.read(reader, 1000).decode() == (
            "2025-11-21T21:01:02.062 w0 │ a\n2025-11-21T21:01:02.062 w0 │ b\n2025-11-21T21:01:02.062 kvdist-launch: c\n"
        )
        os.close(reader)
        os.close(writer)
    finally:
        monkeypatch.undo()
        time.tzset()


def test_an_output_that_nobody_reads_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    sink = Sink(writer, is_terminal=False)
    sink.write_lines(b"", [b"a\n"])
    sink.write_lines(b"", [b"b\n"])
    os.close(writer)


# Shown, filtered, logged and remembered.

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


@each(
    "patterns, shown",
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
def test_patterns_choose_by_short_and_long_names_and_hosts(screen, patterns, shown):
    output = JobOutput(screen.sink, screen.sink, [one for one in patterns.split(",") if one])
    hosts = {node: "d2" if str(node).startswith("worker") else "d1" for node in SEATS}
    output.open(hosts.items())
    for node in SEATS:
        output.feed(node, OUT, b"x\n")
    assert sorted(re.findall(r"^(\w+)@", screen.text(), re.MULTILINE)) == sorted(shown.split())


def test_a_pattern_that_matches_nobody_is_told(screen):
    output = JobOutput(screen.sink, screen.sink, ["w0", "w7", "srv*"])
    assert output.open((node, "") for node in SEATS) == ["--filter w7,srv* matches no process of this job"]


def test_what_is_filtered_is_not_shown_but_logged_and_remembered(screen, tmp_path):
    output = JobOutput(screen.sink, screen.sink, ["w0"], LogFiles(tmp_path / "logs", print))
    assert output.open([(worker(0), "d1"), (worker(1), "d1")]) == []
    output.feed(worker(0), OUT, b"seen\n")
    output.feed(worker(1), OUT, b"not seen\n")
    output.close()
    assert screen.text() == "w0@d1 │ seen\n"
    assert (tmp_path / "logs" / "worker-1.log").read_bytes() == b"not seen\n"
    assert output.last_lines(worker(1)) == [b"not seen"]


LOST = b"kvdist: worker-1 (host d1, pid 7) was lost, last reported in step 3: killed by signal 9 (SIGKILL)\n"


@each("patterns, shown", [((), "w0 │ seen\n"), (("s*", "w0"), f"s0 │ {LOST.decode()}w0 │ seen\n")])
def test_what_servers_print_of_a_lost_peer_is_not_shown_unless_asked_for_but_logged(screen, tmp_path, patterns, shown):
    output = JobOutput(screen.sink, screen.sink, patterns, LogFiles(tmp_path, print))
    output.open([(server(0), ""), (worker(0), "")])
    output.feed(server(0), ERR, LOST)
    output.feed(worker(0), OUT, b"seen\n")
    output.close()
    assert screen.text() == shown
    assert (tmp_path / "server-0.log").read_bytes() == LOST
    assert output.last_error_line(server(0)) == LOST


@each("patterns, count", [((), 0), (("w0", "s0"), 2)])
def test_that_others_wait_for_the_cluster_is_left_to_the_scheduler_unless_asked_for(screen, patterns, count):
    output = JobOutput(screen.sink, screen.sink, patterns)
    output.open([(server(0), ""), (worker(0), "")])
    for node in (server(0), worker(0)):
        text = f"{node} has waited 10.1 s for the cluster of 2 worker(s) and 1 server(s) to be complete\n"
        output.feed(node, ERR, text.encode())
    output.close()
    assert screen.text().count("to be complete") == count


def test_the_end_of_an_output_is_on_the_screen_until_many_lines_follow(screen):
    output = JobOutput(screen.sink, screen.sink)
    output.open([(worker(0), ""), (worker(1), "")])
    assert not output.is_on_screen(worker(0))
    output.feed(worker(0), ERR, b"ValueError: x\n")
    output.feed(worker(1), OUT, b"on\n" * SCREEN_LINES)
    assert output.is_on_screen(worker(0))
    output.feed(worker(1), OUT, b"on\n")
    assert not output.is_on_screen(worker(0))


def test_the_end_of_a_standard_output_is_on_the_screen_too(screen):
    output = JobOutput(screen.sink, screen.sink)
    output.open([(worker(0), ""), (worker(1), "")])
    output.feed(worker(0), OUT, b"hi\n")
    output.feed(worker(1), ERR, b"on\n" * SCREEN_LINES)
    assert output.is_on_screen(worker(0))
    output.feed(worker(1), ERR, b"on\n")
    assert not output.is_on_screen(worker(0))


def test_lines_that_go_to_a_file_are_not_on_the_screen_and_push_nothing_from_it(screen, tmp_path):
    with open(tmp_path / "out", "wb") as file:
        output = JobOutput(Sink(file.fileno(), False), screen.sink)
        output.open([(worker(0), ""), (worker(1), "")])
        output.feed(worker(0), ERR, b"ValueError: x\n")
        output.feed(worker(1), OUT, b"on\n" * (SCREEN_LINES + 1))
        assert output.is_on_screen(worker(0)) and not output.is_on_screen(worker(1))
        output.feed(worker(0), OUT, b"the last line\n")
        assert not output.is_on_screen(worker(0))


def test_hidden_lines_are_not_on_the_screen_and_do_not_count(screen):
    output = JobOutput(screen.sink, screen.sink)
    output.open([(server(0), ""), (worker(0), "")])
    output.feed(worker(0), OUT, b"hi\n")
    output.feed(server(0), ERR, LOST * (SCREEN_LINES + 1))
    assert output.is_on_screen(worker(0)) and not output.is_on_screen(server(0))


def test_a_log_has_both_outputs_in_the_order_in_which_they_came_and_no_prefix(screen, tmp_path):
    output = JobOutput(screen.sink, screen.sink, logs=LogFiles(tmp_path, print))
    output.open([(SCHEDULER, "")])
    output.feed(SCHEDULER, OUT, b"one\nhalf a ")
    output.feed(SCHEDULER, ERR, b"two \xff\n10%\r20%\r")
    output.feed(SCHEDULER, OUT, b"line\nno end")
    output.close()
    assert (tmp_path / "scheduler.log").read_bytes() == b"one\ntwo \xff\n10%\nhalf a line\nno end\n20%\n"


def test_logs_of_the_job_before_are_kept_and_those_before_them_are_not(screen, tmp_path):
    for text in (b"first\n", b"second\n", b"third\n"):
        output = JobOutput(screen.sink, screen.sink, logs=LogFiles(tmp_path, print))
        output.open([(worker(0), "")])
        output.feed(worker(0), OUT, text)
        output.close()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "worker-0.log": b"third\n",
        "worker-0.log.1": b"second\n",
    }


def test_each_output_of_a_rank_has_a_file_in_its_folder_named_as_long_as_the_largest(screen, tmp_path):
    for size, names in ((11, ["rank.00", "rank.10"]), (10, ["rank.0", "rank.9"]), (1, ["rank.0"])):
        folder = tmp_path / str(size)
        output = JobOutput(screen.sink, screen.sink, logs=LogFiles(folder, print, size))
        output.open([(SCHEDULER, ""), (worker(0), ""), (worker(size - 1), "")])
        output.feed(worker(0), OUT, b"out\n")
        output.feed(worker(0), ERR, b"err")
        output.feed(SCHEDULER, OUT, b"kept nowhere\n")
        output.close()
        assert sorted(path.name for path in folder.iterdir()) == names
        assert (folder / names[0] / "stdout").read_bytes() == b"out\n"
        assert (folder / names[0] / "stderr").read_bytes() == b"err\n"


def test_a_full_disk_is_told_once_and_stops_nothing(screen, tmp_path):
    said: list[str] = []
    logs = LogFiles(tmp_path, said.append)
    output = JobOutput(screen.sink, screen.sink, logs=logs)
    output.open([(worker(0), ""), (worker(1), "")])
    # A file that is full: every write to it fails with the reason of a full disk.
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, logs._descriptors[tmp_path / "worker-0.log"])
    os.close(full)
    for node in (worker(0), worker(1), worker(0)):
        output.feed(node, OUT, b"a\n")
    output.close()
    path = tmp_path / "worker-0.log"
    assert said == [f"{path}: No space left on device; the log files end here, the job goes on"]
    assert screen.text() == "w0 │ a\nw1 │ a\nw0 │ a\n"


def test_a_folder_of_logs_that_cannot_be_made_is_refused_before_anything_starts(screen, tmp_path):
    (tmp_path / "file").write_text("")
    output = JobOutput(screen.sink, screen.sink, logs=LogFiles(tmp_path / "file" / "logs", print))
    with pytest.raises(ConfigError, match=r"log files cannot be written to .*file/logs: .* give --log-dir a folder"):
        output.open([(worker(0), "")])


def test_the_last_lines_of_both_outputs_are_remembered_without_blank_ones(screen):
    output = JobOutput(screen.sink, screen.sink)
    output.open([(worker(0), "")])
    output.feed(worker(0), OUT, b"".join(b"%d\n" % number for number in range(20)))
    output.feed(worker(0), ERR, b"wrong\n\n  \n")
    output.feed(worker(0), OUT, b"end")
    output.close()
    last = output.last_lines(worker(0))
    assert last == [*(b"%d" % number for number in range(12, 20)), b"wrong", b"end"]
    assert len(last) == LAST_LINES
    assert output.last_error_line(worker(0)) == b"wrong\n"


def test_a_prompt_is_shown_at_once_without_a_prefix_and_lines_of_others_begin_after_it(screen, tmp_path):
    output = JobOutput(screen.sink, screen.sink, ["w1"], LogFiles(tmp_path, print))
    output.open([(worker(0), ""), (worker(1), "")], with_stdin=worker(0))
    output.feed(worker(0), OUT, b"-> breakpoint()\n(Pdb) ")
    assert screen.text() == "-> breakpoint()\n(Pdb) "
    output.feed(worker(1), OUT, b"a line\nanother\n")
    output.feed(worker(0), OUT, b"42\n")
    assert screen.text() == "\nw1 │ a line\nw1 │ another\n42\n"
    output.close()
    assert screen.text() == ""
    assert (tmp_path / "worker-0.log").read_text() == "-> breakpoint()\n(Pdb) 42\n"


# Text of other machines.


@each(
    "text, shown",
    [
        ("d1: Größe 3 │ ok", "d1: Größe 3 │ ok"),
        ("\x1b]0;title\x07\x1b[2Jred", "\\x1b]0;title\\x07\\x1b[2Jred"),
        ("a\r\nb\tc\x00", "a\\r\\nb\\tc\\x00"),
        ("\x9b1m \u202e \udcff", "\\x9b1m \\u202e \\udcff"),
        ("x" * 3 * TEXT_MAX, "x" * TEXT_MAX + " …"),
        ("", ""),
    ],
)
def test_what_cannot_be_seen_is_escaped_and_what_goes_on_for_ever_is_cut(text, shown):
    assert printable(text) == shown


def test_every_text_of_an_answer_is_made_printable_and_the_rest_stays():
    answer = {"folder": {"problem": "\x1b[31m", "free_bytes": 7}, "listen": ["\x07", 1.5, None, True]}
    assert all_printable(answer) == {
        "folder": {"problem": "\\x1b[31m", "free_bytes": 7}, "listen": ["\\x07", 1.5, None, True],
    }  # fmt: skip


ERROR = [b"Traceback (most recent call last):\n", b'  File "train.py", line 3, in <module>\n', b"ValueError: x\n"]


def seen(shown: list[tuple[object, list[bytes]]]) -> list[tuple[object, bytes]]:
    return [(node, line) for node, lines in shown for line in lines]


def test_an_error_of_several_workers_is_shown_as_it_comes_and_once():
    errors = RepeatedErrors()
    assert seen(errors.take(worker(0), ERROR[:2], 0.0)) == [(worker(0), line) for line in ERROR[:2]]
    assert errors.take(worker(1), [b"[rank1]: " + line for line in ERROR], 0.1) == [], "it is ahead of the other"
    assert errors.end(worker(1), 0.2) == [], "the other may go on like this"
    assert seen(errors.take(worker(0), ERROR[2:], 0.3)) == [(worker(0), ERROR[2])]
    assert errors.end(worker(0), 0.4) == []
    assert errors.shown_by == {worker(1): worker(0)}


@each("more", [[b"ValueError: y\n"], [b"ValueError: x\n", b"and more\n"]])
def test_an_error_that_differs_is_shown_whole_as_soon_as_it_does(more):
    errors = RepeatedErrors()
    errors.take(worker(0), ERROR, 0.0)
    errors.end(worker(0), 0.1)
    lines = [*ERROR[:2], *more]
    assert seen(errors.take(worker(1), lines, 0.2)) == [(worker(1), line) for line in lines]
    assert errors.end(worker(1), 0.3) == [] and errors.shown_by == {}


def test_an_error_whose_model_ends_or_goes_another_way_is_shown():
    for ends in (False, True):
        errors = RepeatedErrors()
        errors.take(worker(0), ERROR[:2], 0.0)
        errors.take(worker(1), ERROR, 0.1)
        shown = errors.end(worker(0), 0.2) if ends else errors.take(worker(0), [b"KeyError: y\n"], 0.2)
        assert [one for one in seen(shown) if one[0] == worker(1)] == [(worker(1), line) for line in ERROR]


def test_nothing_is_held_back_for_long_and_nothing_for_what_was_shown_long_ago():
    errors = RepeatedErrors()
    errors.take(worker(0), ERROR, 0.0)
    assert errors.take(worker(1), ERROR, 1.0) == [] == errors.tick(1.0 + HELD_S)
    assert seen(errors.tick(1.1 + HELD_S)) == [(worker(1), line) for line in ERROR]
    errors.end(worker(0), 2.0)
    errors.end(worker(1), 2.0)
    assert seen(errors.take(worker(2), ERROR, 2.1 + HELD_S)) == [(worker(2), line) for line in ERROR]


def test_each_of_several_errors_of_a_worker_is_compared_and_its_chain_is_one_error():
    errors = RepeatedErrors()
    chain = [*ERROR, b"\n", b"During handling of the above exception, another exception occurred:\n", b"\n", *ERROR]
    lost = [b"kvdist.errors.PeerLostError: worker-1 was lost\n"]
    errors.take(worker(0), [*chain, *ERROR, *lost], 0.0)
    assert errors.take(worker(1), chain, 0.1) == []
    assert errors.take(worker(1), [*ERROR, *lost], 0.1) == []
    assert errors.end(worker(1), 0.2) == []


def test_the_exception_of_a_traceback_is_known_by_its_line_until_many_lines_follow(screen):
    output = JobOutput(screen.sink, screen.sink)
    output.open([(worker(0), "")])
    output.feed(worker(0), ERR, b"".join([*ERROR[:2], b"my.Problem: a\n", b"second line\n"]))
    assert output.exception_line(worker(0)) == b"my.Problem: a\n"
    output.feed(worker(0), ERR, b"on\n" * LAST_LINES)
    assert output.exception_line(worker(0)) == b""


def test_what_is_no_error_passes_in_one_piece():
    assert RepeatedErrors().take(worker(0), [b"a\n", b"b\n"], 0.0) == [(worker(0), [b"a\n", b"b\n"])]


def test_an_error_that_was_shown_of_another_worker_is_on_the_screen_and_in_the_log(screen, tmp_path):
    output = JobOutput(screen.sink, screen.sink, logs=LogFiles(tmp_path, print))
    output.open([(worker(0), ""), (worker(1), "")])
    for node in (worker(0), worker(1)):
        output.feed(node, ERR, b"".join(ERROR))
    assert not output.is_on_screen(worker(1))
    output.close()
    assert screen.text() == "".join(f"w0 │ {line.decode()}" for line in ERROR)
    assert output.is_on_screen(worker(1)) and output.last_error_line(worker(1)) == ERROR[-1]
    assert (tmp_path / "worker-1.log").read_bytes() == b"".join(ERROR)
