"""The profiler in one process: the calls of the mirrored system, files, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest

import kvdist.diagnostics.trace
from kvdist import KvdistError, kv, profiler
from kvdist.diagnostics.profiler import PROFILER_HEAD, PROFILERS, Profiler, TraceSettings, require_plain
from kvdist.runtime.cluster import PROCESS_CLUSTER
from kvdist.runtime.node import Node
from tests.cases import each

ONES = np.ones(5, np.float32)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where traces go; the process's own profiler is a fresh one, and is finished at the end."""
    monkeypatch.setenv("KVDIST_PROFILE_DIR", str(tmp_path))
    monkeypatch.setattr(PROFILERS, "worker", Profiler(lambda: tmp_path))
    yield tmp_path
    PROFILERS.worker.dump(finished=True)


def events(path, category):
    told = json.loads(path.read_text("utf-8"))
    return [event for event in told["traceEvents"] if event.get("cat") == category and event["ph"] != "e"]


def let_threads_end():
    """Servers write beside their work; the thread ends when a finished trace is written."""
    for thread in threading.enumerate():
        if thread.name == "kvdist-profiler":
            thread.join()


def tell(told, **more):
    """What a command of a worker does on a server."""
    PROFILERS.worker.perform(PROFILER_HEAD, json.dumps({"do": told, **more}), 0)


def test_worker_and_server_write_a_file_each(folder):
    profiler.set_config(filename="t.json", profile_all=True, aggregate_stats=False)
    profiler.start()
    with kv.create("dist") as store:
        profiler.set_config(filename="s", profile_process="server")
        profiler.set_state("run", profile_process="server")
        store.init("w", np.zeros(5, np.float32))
        store.push("w", ONES)
        store.pull("w")
        store.barrier()
        profiler.dump(profile_process="server")
        profiler.dump()
        store.pushpull("w", ONES.copy())
    let_threads_end()
    assert sorted(path.name for path in folder.iterdir()) == ["s.server-0", "t.worker-0.json"]
    calls = {event["name"]: event for event in events(folder / "t.worker-0.json", "call")}
    assert calls.keys() >= {"joining the cluster", "init of key 'w'", "push of key 'w'", "pull of key 'w'", "barrier"}
    assert calls["push of key 'w'"]["args"] == {"bytes": 24, "slices": 1, "priority": 0}
    assert "pushpull of key 'w'" not in calls, "the trace was finished before"
    assert events(folder / "t.worker-0.json", "wait")
    (closed,) = events(folder / "s.server-0", "round")
    assert closed["args"] == {"key": "w", "version": 1, "contributions": 1, "bytes": 20, "slices": 1}
    handled = {event["name"]: event["args"] for event in events(folder / "s.server-0", "message")}
    assert handled.keys() >= {"Assign", "InitValues", "Push", "Pull"}
    assert handled["Push"] == {"from": "worker-0", "step": 1, "slices": 1, "bytes": 24}


def test_nothing_is_noted_while_paused_and_a_new_trace_begins_anew(folder):
    path = folder / "profile.worker-0.json"
    with kv.create("dist") as store:
        store.init("w", ONES)
        profiler.resume()
        assert PROCESS_CLUSTER.present.node.trace is None, "there is no trace to go on with"
        profiler.start()
        store.pull("w")
        profiler.pause()
        assert PROCESS_CLUSTER.present.node.trace is None
        store.pushpull("w", ONES.copy())
        profiler.resume()
        store.barrier()
        profiler.set_state("stop")
        names = [event["name"] for event in events(path, "call")]
        assert names == ["pull of key 'w'", "barrier"]
        profiler.start()
        store.barrier()
        profiler.dump(finished=False)
        assert len(events(path, "call")) == 3
        store.barrier()
        profiler.dump()
        assert len(events(path, "call")) == 4
        profiler.start()
        store.barrier()
        profiler.dump()
        assert len(events(path, "call")) == 1


def test_a_second_worker_that_comes_late_does_not_replace_a_finished_trace_of_a_server(folder):
    path = folder / "profile.server-0.json"
    with kv.create("dist") as store:
        profiler.start("server")
        store.init("w", ONES)
        store.pushpull("w", ONES.copy())
        profiler.dump(profile_process="server")
        let_threads_end()
        before = path.read_bytes()
        profiler.start("server")
        profiler.set_config(profile_process="server")
        profiler.pause("server")
        profiler.resume("server")
        profiler.dump(finished=False, profile_process="server")
        profiler.dump(profile_process="server")
        let_threads_end()
        assert path.read_bytes() == before
        profiler.start("server")
        store.pull("w")
        profiler.dump(profile_process="server")
        let_threads_end()
        assert not events(path, "round") and "Pull" in [event["name"] for event in events(path, "message")]
        os.unlink(path)
        os.mkdir(path)
        with pytest.raises(KvdistError, match="server-0: KvdistError: the trace of server-0 cannot be written to"):
            profiler.start("server")
    assert [path.name for path in folder.iterdir()] == ["profile.server-0.json"]


def test_no_command_of_a_worker_waits_for_a_file(folder, monkeypatch):
    begun, released, write = threading.Event(), threading.Event(), kvdist.diagnostics.trace.write

    def slowly(path, pieces):
        begun.set()
        assert released.wait(20), "somebody waits for the file"
        write(path, pieces)

    path = folder / "profile.worker-0.json"
    with kv.create("dist") as store:
        tell("start")
        store.barrier()
        tell("stop")
        let_threads_end()
        monkeypatch.setattr(kvdist.diagnostics.trace, "write", slowly)
        tell("start")
        store.barrier()
        tell("dump", finished=False)
        assert begun.wait(20)
        for told in ("pause", "resume", "stop", "start"):
            tell(told)
        store.barrier()
        tell("dump", finished=True)
        tell("set_config", filename="next.json", events_max=9, dump_period_s=1.0)
        tell("start")
        store.barrier()
        tell("dump", finished=True)
        assert [event["name"] for event in events(path, "call")][-1:] == ["barrier"]
        assert not (folder / "next.worker-0.json").exists()
        released.set()
        let_threads_end()
        assert [event["name"] for event in events(path, "call")] == ["barrier"] * 3
        assert [event["name"] for event in events(folder / "next.worker-0.json", "call")] == ["barrier"]


def test_a_handler_of_a_signal_may_dump_while_a_dump_is_written(folder, monkeypatch):
    path, text, once = folder / "profile.worker-0.json", kvdist.diagnostics.trace.TraceSnapshot.text, iter([True])

    def interrupted(snapshot, process, about):
        for piece in text(snapshot, process, about):
            yield piece
            if threading.current_thread() is threading.main_thread() and next(once, False):
                signal.raise_signal(signal.SIGUSR1)

    def dump(number, frame):
        store.barrier()
        profiler.dump(finished=False)
        assert len(events(path, "call")) == 2

    with kv.create("dist") as store:
        profiler.start()
        store.barrier()
        monkeypatch.setattr(kvdist.diagnostics.trace.TraceSnapshot, "text", interrupted)
        before = signal.signal(signal.SIGUSR1, dump)
        try:
            profiler.dump(finished=False)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert next(once, "ran") == "ran"
        assert len(events(path, "call")) == 2, "the newer one stays"


def test_the_profiler_may_be_paused_at_any_moment(folder):
    """On another thread than that which looks at the trace: here the trace comes and goes with every look."""

    class Flickering(Node):
        trace = property(lambda self: next(looks))

    with kv.create("dist") as store:
        profiler.start()
        node = PROCESS_CLUSTER.present.node
        looks = cycle([node.trace, None, None, node.trace, node.trace])
        node.__class__ = Flickering
        store.init("w", ONES)
        for _ in range(20):
            store.pushpull("w", ONES.copy())
            with pytest.raises(KvdistError, match="no handler is registered"):
                store.send_command_to_servers(4)
        node.__class__ = Node


def test_a_trace_of_a_busy_worker_is_bounded(folder):
    profiler.set_config(max_events=5)
    with kv.create("dist") as store:
        profiler.start()
        for _ in range(20):
            store.barrier()
        profiler.dump()
    told = json.loads((folder / "profile.worker-0.json").read_text("utf-8"))
    assert len({event.get("id", event["ts"]) for event in told["traceEvents"] if event["ph"] != "M"}) == 5
    assert told["otherData"]["events_dropped"] >= 50
    assert told["otherData"]["process"] == "worker-0"


def test_settings_cannot_change_within_a_trace_but_may_be_said_again(folder):
    profiler.set_config(filename="a.json")
    profiler.start()
    profiler.set_config(filename="a.json")
    with pytest.raises(KvdistError, match=r"a trace is in progress: finish it with profiler\.dump"):
        profiler.set_config(filename="b.json")
    profiler.stop()
    profiler.dump()
    profiler.set_config(filename="b.json")


def test_a_trace_that_the_environment_began_goes_on_under_the_settings_of_a_call(folder, monkeypatch):
    monkeypatch.setenv("MXNET_PROFILER_AUTOSTART", "1")
    with kv.create("dist") as store:
        profiler.set_config(filename=folder / "mine", max_events=1000)
        profiler.set_config(filename="served", profile_process="server")
        with pytest.raises(KvdistError, match="cannot be written to .*nowhere"):
            profiler.set_config(filename="nowhere/mine")
        profiler.pause()
        profiler.resume()
        profiler.set_config(filename="mine", max_events=1000)
        store.barrier()
        for process in ("worker", "server"):
            profiler.start(process)
            with pytest.raises(KvdistError, match=r"a trace is in progress: finish it with profiler\.dump"):
                profiler.set_config(filename="other", profile_process=process)
            profiler.dump(profile_process=process)
    let_threads_end()
    names = [event["name"] for event in events(folder / "mine.worker-0", "call")]
    assert names[0] == "joining the cluster" and "barrier" in names
    assert json.loads((folder / "mine.worker-0").read_text())["otherData"]["events_max"] == 1000
    assert "Welcome" in [event["name"] for event in events(folder / "served.server-0", "message")]
    assert not list(folder.glob("other*"))


def test_a_dump_without_a_node_says_that_there_is_nothing(folder, caplog):
    profiler.dump()
    profiler.start()
    kv.create("local").close()
    profiler.dump()
    assert caplog.text.count("profiler.dump() has nothing to write") == 2
    assert list(folder.iterdir()) == []


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(folder):
    with kv.create("dist") as store:
        profiler.set_config(filename="nowhere/t.json")
        with pytest.raises(KvdistError, match=r"the trace of worker-0 cannot be written to .*nowhere.*KVDIST_PROFILE_"):
            profiler.start()
        assert PROCESS_CLUSTER.present.node.trace is None
        profiler.set_config(filename="profile.json")
        os.mkdir(folder / "profile.server-0.json")
        with pytest.raises(KvdistError, match=r"server-0: KvdistError: the trace of server-0 cannot be written to"):
            profiler.start("server")
        store.barrier()


def test_a_file_that_can_no_longer_be_written_is_an_error_and_stays_as_it_was(folder):
    profiler.set_config(dump_period=600)  # or the file may be renewed, with what has come to it, before it is moved
    with kv.create("dist") as store:
        profiler.start()
        store.barrier()
        profiler.dump(finished=False)
        before = (folder / "profile.worker-0.json").read_bytes()
        store.barrier()
        os.rename(folder, folder.with_name("elsewhere"))
        with pytest.raises(KvdistError, match="cannot be written"):
            profiler.dump(finished=False)
        os.rename(folder.with_name("elsewhere"), folder)
        assert (folder / "profile.worker-0.json").read_bytes() == before


WRONG_NAMES = ["", ".", "..", "a/b", "../x", "/etc/x", "a\\b", "a b", "ä", "x\0", "x\n", "a" * 65, "~x", "a:b"]


@each("name", WRONG_NAMES)
def test_a_server_takes_no_file_name_but_a_plain_one_from_the_network(tmp_path, name):
    body = json.dumps({"do": "set_config", "filename": name, "events_max": 10, "dump_period_s": 1.0})
    with pytest.raises(ValueError, match="cannot be the file name of a server's trace"):
        Profiler(lambda: tmp_path).perform(PROFILER_HEAD, body, 0)
    assert name in ("", ".", "..", "x\0") or TraceSettings(name), "a worker's own may be any that a file can have"


@each("name", ["profile.json", "a", "A-Z_0.9", ".x", "...", "a" * 64])
def test_a_plain_name_is_taken(name):
    require_plain(name)


@each(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '"start"',
        '{"do": "delete"}',
        '{"do": "set_config"}',
        '{"do": "dump"}',
        "[" * 9999,
        '{"do": "set_config", "filename": "x", "events_max": 1000001, "dump_period_s": 1.0}',
        '{"do": "set_config", "filename": "x", "events_max": 0, "dump_period_s": 1.0}',
        '{"do": "set_config", "filename": "x", "events_max": 1, "dump_period_s": 1e999}',
        '{"do": "set_config", "filename": "x", "events_max": 1, "dump_period_s": NaN}',
        '{"do": "set_config", "filename": "x", "events_max": 1, "dump_period_s": 0.0}',
        '{"do": "set_config", "filename": "x", "events_max": 1, "dump_period_s": 1e10}',
        '{"do": "set_config", "filename": "x", "events_max": true, "dump_period_s": 1.0}',
        '{"do": "set_config", "filename": 7, "events_max": 1, "dump_period_s": 1.0}',
    ],
)
def test_a_body_that_is_no_call_is_refused(tmp_path, body):
    with pytest.raises((ValueError, TypeError, RecursionError)):
        Profiler(lambda: tmp_path).perform(PROFILER_HEAD, body, 0)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"filename": "../x", "profile_process": "server"}, ValueError, "'../x' cannot be the file name of a server's"),
        ({"filename": ""}, ValueError, "the file name of a trace is empty"),
        ({"filename": b"x"}, TypeError, "is a str or a path, not bytes"),
        ({"filename": None}, TypeError, "is a str or a path, not NoneType"),
        ({"filename": "/"}, ValueError, "'/' names a directory: a trace needs the name of a file"),
        ({"filename": "."}, ValueError, "'.' names a directory"),
        ({"filename": "a/.."}, ValueError, "'a/..' names a directory"),
        ({"filename": "a/"}, ValueError, "'a/' names a directory"),
        ({"filename": "a\0"}, ValueError, "has a NUL"),
        ({"filename": "\ud800"}, ValueError, "has characters that files' cannot"),
        (
            {"filename": Path("a/b"), "profile_process": "server"},
            ValueError,
            "'a/b' cannot be the file name of a server",
        ),
        ({"max_events": 0}, ValueError, "a trace keeps 1 to 1000000 events, not 0"),
        ({"max_events": 1.5}, TypeError, "max_events is an int, not float"),
        ({"max_events": True}, TypeError, "max_events is an int, not bool"),
        ({"dump_period": 0}, ValueError, "the time between two dumps is 0; it must be more than 0 s"),
        ({"dump_period": 86400.5}, ValueError, "the time between two dumps is 86400.5; .* at most 86400 s"),
        ({"dump_period": 10**400}, ValueError, "the time between two dumps is 1000"),
        ({"dump_period": float("nan")}, ValueError, "the time between two dumps is nan"),
        ({"dump_period": "x"}, TypeError, "dump_period is a number of seconds, not str"),
        ({"dump_period": True}, TypeError, "dump_period is a number of seconds, not bool"),
        ({"profile_process": "scheduler"}, ValueError, "profile_process is 'worker' or 'server', not 'scheduler'"),
        ({"profile_al": True}, TypeError, "set_config has no option profile_al; it takes filename, max_events"),
    ],
)
def test_a_wrong_option_is_named(folder, options, error, words):
    with pytest.raises(error, match=words):
        profiler.set_config(**options)


def test_a_state_is_run_or_stop(folder):
    with pytest.raises(ValueError, match="the state of the profiler is 'run' or 'stop', not 'go'"):
        profiler.set_state("go")


def test_servers_need_a_store_to_be_told(folder):
    with pytest.raises(KvdistError, match=r"the profiler of the servers needs a store: call kv\.create"):
        profiler.start(profile_process="server")


SCRIPT = """
import numpy as np
from kvdist import kv

store = kv.create("dist")
store.init("w", np.zeros(3, np.float32))
store.pull("w")
{end}
"""


@each("end", ["", "1 / 0", "raise KeyboardInterrupt"])
def test_a_variable_traces_a_script_that_knows_nothing_of_it_however_it_ends(tmp_path, end):
    env = {"MXNET_PROFILER_AUTOSTART": "1", "KVDIST_PROFILE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT.format(end=end)]
    subprocess.run(command, env={**os.environ, **env}, capture_output=True, timeout=150)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["profile.server-0.json", "profile.worker-0.json"]
    names = [event["name"] for event in events(tmp_path / "profile.worker-0.json", "call")]
    assert names[-1] == "pull of key 'w'"
    assert [event["name"] for event in events(tmp_path / "profile.server-0.json", "message")][-1] in ("Pull", "Ack")
