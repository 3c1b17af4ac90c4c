"""A trace is bounded, and its file is valid at every moment."""

from __future__ import annotations

import json
import threading

import pytest

from kvdist.trace import Trace, now_ns, write


def document(trace, process="server-1"):
    return json.loads("".join(trace.text(process, {"host": "höst"})))


def spans(told):
    return [event for event in told["traceEvents"] if event["ph"] != "M"]


@pytest.mark.parametrize("count", [0, 1, 49, 50, 51, 101])
def test_whatever_the_number_of_events_the_text_is_json_with_all_of_them(count):
    trace = Trace(1000)
    for number in range(count):
        trace.add(f"push of key 'ä{number}\"'", "call", now_ns(), {"key": "\udcff"})
    told = document(trace)
    assert [event["name"] for event in spans(told)] == [f"push of key 'ä{number}\"'" for number in range(count)]
    assert told["otherData"] == {"host": "höst", "process": "server-1", "events_max": 1000, "events_dropped": 0}


@pytest.mark.parametrize(("count", "dropped"), [(6, 0), (7, 0), (8, 1), (23, 16)])
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
