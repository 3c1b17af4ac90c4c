"""A trace is bounded, and its file is valid at every moment."""

from __future__ import annotations

import json
import threading

import pytest

from kvdist.diagnostics.trace import Trace, TraceCopy, TraceFiles, now_ns, require_writable, write
from tests.cases import each


def document(trace, process="server-1"):
    return json.loads("".join(trace.snapshot().text(process, {"host": "höst"})))


def spans(told):
    return [event for event in told["traceEvents"] if event["ph"] != "M"]


@each("count", [0, 1, 49, 50, 51, 101])
def test_whatever_the_number_of_events_the_text_is_json_with_all_of_them(count):
    trace = Trace(1000)
    for number in range(count):
        trace.add(f"push of key 'ä{number}\"'", "call", now_ns(), {"key": "\udcff"})
    told = document(trace)
    assert [event["name"] for event in spans(told)] == [f"push of key 'ä{number}\"'" for number in range(count)]
    assert told["otherData"] == {"host": "höst", "process": "server-1", "events_max": 1000, "events_dropped": 0}


@each("count, dropped", [(6, 0), (7, 0), (8, 1), (23, 16)])
def test_a_full_trace_keeps_the_newest_events_and_says_how_many_are_gone(count, dropped):
    trace = Trace(7)
    for number in range(count):
        trace.add(str(number), "call", now_ns(), {})
    told = document(trace)
    assert [event["name"] for event in spans(told)] == [str(number) for number in range(dropped, count)]
    assert told["otherData"]["events_dropped"] == dropped


def test_times_are_microseconds_and_what_overlaps_is_a_pair():
    trace = Trace(10)
    begin = now_ns()
    trace.add("one", "message", begin, {"bytes": 4})
    trace.add("two", "call", begin, {"bytes": 8}, overlaps=True)
    one, begun, ended = spans(document(trace))
    assert one["ph"] == "X" and one["ts"] == begin / 1000 and one["dur"] >= 0 and one["args"] == {"bytes": 4}
    assert (begun["ph"], ended["ph"]) == ("b", "e") and begun["id"] == ended["id"] and begun["ts"] <= ended["ts"]
    assert begun["args"] == {"bytes": 8}


def test_the_process_and_its_threads_have_names():
    trace = Trace(10)
    trace.add("here", "call", now_ns(), {})
    thread = threading.Thread(target=trace.add, args=("there", "call", now_ns(), {}), name="another")
    thread.start()
    thread.join()
    told = document(trace)
    names = {event["name"]: set() for event in told["traceEvents"]}
    for event in told["traceEvents"]:
        names[event["name"]].add(event["args"].get("name", event["tid"]))
    assert names["process_name"] == {"server-1"}
    assert names["thread_name"] == {threading.current_thread().name, "another"}
    assert names["here"] != names["there"]


def test_threads_may_add_while_the_text_is_made():
    trace = Trace(500)
    ended = threading.Event()

    def add():
        while not ended.is_set():
            trace.add("x", "call", now_ns(), {})

    threads = [threading.Thread(target=add) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            told = document(trace)
            assert len(spans(told)) <= 500
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_text_that_cannot_be_finished_leaves_the_file_as_it_was(tmp_path):
    def pieces():
        yield "{" * 100_000
        raise KeyboardInterrupt

    path = tmp_path / "t.json"
    write(path, ["{}"])
    with pytest.raises(KeyboardInterrupt):
        write(path, pieces())
    assert path.read_text() == "{}"
    assert list(tmp_path.iterdir()) == [path], "and nothing beside it"


def test_a_text_that_is_written_within_another_of_the_same_place_disturbs_it_not(tmp_path):
    path = tmp_path / "t.json"

    def pieces():
        yield "outer"
        write(path, ["inner"])
        assert path.read_text() == "inner"
        yield " text"

    write(path, pieces())
    assert path.read_text() == "outer text"
    assert list(tmp_path.iterdir()) == [path]


def test_a_snapshot_stays_as_it_was():
    trace = Trace(10)
    trace.add("one", "call", now_ns(), {})
    snapshot = trace.snapshot()
    trace.add("two", "call", now_ns(), {})
    assert snapshot.last == 0 and [span.name for span in snapshot.spans] == ["one"]
    assert trace.last == 1


@each(
    "before, after, then, kept, dropped",
    [(7, 3, 0, 3, 2), (7, 3, 1, 3, 3), (7, 5, 0, 5, 0), (4, 9, 0, 4, 1), (4, 9, 5, 9, 1), (4, 9, 6, 9, 2)],
)
def test_another_number_to_keep_counts_on_with_what_is_gone(before, after, then, kept, dropped):
    trace = Trace(before)
    for number in range(5):
        trace.add(str(number), "call", now_ns(), {})
    trace.keep(after)
    for number in range(5, 5 + then):
        trace.add(str(number), "call", now_ns(), {})
    told = document(trace)
    assert [event["name"] for event in spans(told)] == [str(number) for number in range(5 + then)][-kept:]
    assert told["otherData"]["events_max"] == after and told["otherData"]["events_dropped"] == dropped


def copy(trace, path, number=1):
    return TraceCopy(path, number, trace.snapshot(), "worker-0", {})


def names(path):
    return [event["name"] for event in spans(json.loads(path.read_text()))]


def test_a_newer_copy_that_comes_while_an_older_one_is_written_stays(tmp_path):
    files, trace, path = TraceFiles(), Trace(200), tmp_path / "t.json"

    class Interrupting(dict):
        """Arguments whose telling brings the newer copy, as a signal handler does that dumps."""

        def items(self):
            if trace.last == 0:
                trace.add("newer", "call", now_ns(), {})
                files.put(copy(trace, path))
                assert names(path) == ["older", "newer"]
            return super().items()

    trace.add("older", "call", now_ns(), Interrupting(key="w"))
    older = copy(trace, path)
    files.put(older)
    assert trace.last == 1, "the handler ran"
    assert names(path) == ["older", "newer"]
    files.put(older)
    assert names(path) == ["older", "newer"]
    assert list(tmp_path.iterdir()) == [path]


def test_a_finished_trace_gives_way_only_to_one_that_has_something_to_tell(tmp_path):
    files, first, second, path = TraceFiles(), Trace(9), Trace(9), tmp_path / "t.json"
    first.add("work", "round", now_ns(), {})
    files.finish(path, 1)
    files.put(copy(first, path))
    second.add("Ack", "message", now_ns(), {}, tells=False)
    files.put(copy(second, path, 2))
    assert names(path) == ["work"]
    files.put(copy(second, tmp_path / "other.json", 2))
    assert names(tmp_path / "other.json") == ["Ack"], "elsewhere nothing is lost"
    second.add("more", "round", now_ns(), {})
    files.put(copy(second, path, 2))
    assert names(path) == ["Ack", "more"]


def test_whether_a_place_can_be_written_is_found_out_without_a_change_there(tmp_path):
    path = tmp_path / "t.json"
    require_writable(path)
    assert list(tmp_path.iterdir()) == []
    path.write_text("{}")
    require_writable(path)
    assert path.read_text() == "{}" and list(tmp_path.iterdir()) == [path]
    for place in (tmp_path, tmp_path / "nowhere" / "t.json"):
        with pytest.raises(OSError, match=r"Is a directory|No such file"):
            require_writable(place)
