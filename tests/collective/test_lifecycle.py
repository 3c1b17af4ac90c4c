"""How ranks find each other, wait for each other, and end."""

import json
import logging
import os
import re
import socket
import subprocess
import sys
import textwrap
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import HashStore

import kvdist.collective as hvd
from kvdist.collective import basics, rendezvous
from kvdist.collective.basics import current, using
from kvdist.collective.channel import Channel, ConnectingGroup
from kvdist.collective.consistency import CoordinatedCheck
from kvdist.collective.engine import CollectiveEngine
from kvdist.collective.rendezvous import forget_port, meet
from kvdist.config.environment import Meeting, World
from kvdist.config.processes import this_process
from kvdist.config.settings import CollectiveSettings, Limits
from kvdist.errors import CollectiveError, CollectiveMismatch, ConfigError, ForkError, RankLostError
from kvdist.kvstore import engine_lifecycle
from kvdist.protocol.collective import AllConnected, RankGone, RankHello, encode
from kvdist.transport.zeromq import ZeroMQTransport
from tests.cases import each
from tests.collective.ranks import bystanders, returned, run_ranks, world_of
from tests.ports import held_port

ONES = torch.ones(6)


def in_threads(size, function):
    """What `function(rank)` returns, or raises, on as many threads."""
    results = [None] * size

    def be(rank):
        try:
            results[rank] = function(rank)
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            results[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(size)]
    with bystanders():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    return results


# Again.


@each("fails", [False, True])
def test_ranks_can_begin_anew_after_an_end_or_a_failure(fails):
    store, has_looked = HashStore(), threading.Event()

    class Met(set):
        def __contains__(self, token):
            if super().__contains__(token):
                has_looked.set()
                return True
            return False

    def program(rank):
        met = Met()
        for generation in range(2):
            if generation and rank == 0:
                # What rank 0 left at its first beginning is still there when rank 1 looks for the second.
                assert has_looked.wait(30)
            with using(CollectiveEngine(world_of(rank, 2), met, lambda _, __: store)) as engine:
                total = hvd.allreduce(torch.full((3,), float(rank + generation)), op=hvd.Sum)
                if fails and generation == 0:
                    for name in "abab":
                        hvd.allreduce(torch.ones(4 if name == "a" else 4096), name=name)
                    with pytest.raises(CollectiveMismatch):
                        # Rank 1 has begun, and is left in the middle.
                        hvd.allreduce(torch.ones(4 if rank else 4096), name="a" if rank else "b")
                engine.close()
        return total.tolist()

    assert returned(in_threads(2, program)) == [[3.0] * 3] * 2


@pytest.mark.parametrize(("code", "failure"), [(None, ""), (0, ""), (3, "ended by SystemExit: 3")])
def test_an_end_with_exit_code_0_is_no_failure(monkeypatch, code, failure):
    ended = []
    monkeypatch.setattr(basics, "of_process", [SimpleNamespace(close=ended.append)])
    try:
        sys.exit(code)
    except SystemExit:
        hvd.shutdown()
    assert ended == [failure]


def test_a_rank_whose_timeline_cannot_be_written_leaves_with_that_word(tmp_path):
    def be(rank):
        settings = CollectiveSettings(timeline=str(tmp_path / "none" / "t.json") if rank == 0 else "")
        with using(CollectiveEngine(world_of(rank, 2), find=lambda _, __: store, settings=settings)) as engine:
            try:
                return hvd.allreduce(ONES)
            finally:
                engine.close()

    store = HashStore()
    first, second = in_threads(2, be)
    assert isinstance(first, OSError)
    assert isinstance(second, CollectiveError) and "its timeline cannot be written" in str(second)


def test_a_forked_child_knows_who_it_is_and_touches_nothing():
    def program(rank):
        hvd.allreduce(ONES)
        child = None
        if rank == 0:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    hvd.allreduce(ONES)
                except ForkError as error:
                    os.write(write, f"{hvd.rank()} {error}".encode())
                current().close()
                os._exit(0)
            os.close(write)
            _, status = os.waitpid(child, 0)
            said = os.read(read, 1000).decode()
            os.close(read)
            assert status == 0 and said.startswith("0 this process was forked from rank 0")
        return hvd.allreduce(ONES, op=hvd.Sum)[0].item()

    assert returned(run_ranks(2, program)) == [2.0, 2.0]


# Finding each other.


@pytest.mark.parametrize(
    ("hosts", "places"),
    [
        ("aaa", [(0, 3, 0, 1), (1, 3, 0, 1), (2, 3, 0, 1)]),
        ("aba", [(0, 2, 0, 2), (0, 1, 1, 2), (1, 2, 0, 1)]),
    ],
)
def test_ranks_whose_launcher_said_nothing_of_machines_know_their_places_once_they_have_met(monkeypatch, hosts, places):
    monkeypatch.setattr(
        "kvdist.collective.coordinator.AllConnected", lambda names, _: AllConnected(names, tuple(hosts))
    )
    store = HashStore()

    def program(rank):
        world = World(rank, 3, 0, 1, rank, 3, is_assumed=True)
        with using(CollectiveEngine(world, find=lambda _, __: store)) as engine:
            engine.close()
            return hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()

    assert returned(in_threads(3, program)) == places


def test_what_a_launcher_has_said_of_machines_stays():
    store = HashStore()

    def program(rank):
        with using(CollectiveEngine(World(rank, 2, 0, 1, rank, 2), find=lambda _, __: store)) as engine:
            engine.close()
            return hvd.local_rank(), hvd.cross_rank()

    assert returned(in_threads(2, program)) == [(0, 0), (0, 1)]


def test_a_rank_that_leaves_as_soon_as_it_has_come_fails_nobody_who_still_connects():
    for _ in range(10):
        assert returned(run_ranks(3, lambda rank: rank)) == [0, 1, 2]


def test_who_has_left_in_good_order_was_connected_to_all_and_fails_only_operations():
    member, failed = CoordinatedCheck(1, "here", lambda: None, lambda _: None), []
    opening = ConnectingGroup(0, (0, 1))
    opening.fail = lambda error_of, from_sequence=0: failed.append(("opening", error_of("")))
    member.enter(opening)
    member.hear(RankGone(0, "there", "", ((0, 0),)))
    assert failed == []
    group = SimpleNamespace(number=0, ranks=(0, 1), is_open=True, fail=lambda of, at=0: failed.append((at, of("x"))))
    member.enter(group)
    assert [at for at, _ in failed] == [0] and isinstance(failed[0][1], RankLostError)


def test_a_process_that_ends_by_a_failure_gives_up_what_still_connects():
    has_begun, has_ended = threading.Event(), threading.Event()

    def program(rank):
        if rank:
            has_begun.set()
            return has_ended.wait(60)
        assert has_begun.wait(60)
        opening = ConnectingGroup(7, (0, 1))
        current()._control.check.enter(opening)
        current().close("a mistake")
        has_ended.set()
        with pytest.raises(CollectiveError, match="this process ends: a mistake"):
            opening.open(Channel(HashStore(), rank, 2, "127.0.0.1"))
        return "kvdist-opening" not in [thread.name for thread in threading.enumerate()]

    assert returned(run_ranks(2, program)) == [True, True]


def test_the_ranks_that_have_not_come_are_named_on_those_that_have():
    store, settings = HashStore(), CollectiveSettings(start_timeout_s=3.0)

    def program(rank):
        CollectiveEngine(world_of(rank, 4), find=lambda _, __: store, settings=settings)

    for error in in_threads(2, program):
        assert isinstance(error, CollectiveError)
        assert "2 of 4 ranks have come within 3 s (KVDIST_START_TIMEOUT_S); missing: ranks 2 and 3" in str(error)


def test_a_beginning_that_failed_leaves_nothing_to_those_who_begin_again_or_come_late():
    store, has_failed = HashStore(), threading.Event()

    def program(rank):
        met = set()
        if rank < 2:
            with pytest.raises(CollectiveError, match="missing: rank 2"):
                settings = CollectiveSettings(start_timeout_s=3.0)
                CollectiveEngine(world_of(rank, 3), met, find=lambda _, __: store, settings=settings)
        if rank == 0:
            assert not store.check(["control"])
            has_failed.set()
        assert has_failed.wait(30)
        with using(CollectiveEngine(world_of(rank, 3), met, find=lambda _, __: store)) as engine:
            total = hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum)
            engine.close()
        return total.tolist()

    assert returned(in_threads(3, program)) == [[3.0] * 3] * 3


def test_a_process_whose_sets_are_refused_is_no_rank_and_may_begin_again():
    with pytest.raises(ValueError, match="a process set needs"):
        hvd.init(World(), process_sets=[[0, 5]])
    assert not hvd.is_initialized()
    hvd.init(World())
    hvd.shutdown()


def test_a_handler_of_a_signal_may_end_a_beginning(monkeypatch):
    monkeypatch.setattr(engine_lifecycle.basics, "init", lambda *_: engine_lifecycle.ENGINE.end())
    thread = threading.Thread(target=engine_lifecycle.ENGINE.begin, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def test_without_rank_0_the_others_say_so():
    with pytest.raises(CollectiveError, match="rank 0 has not called init.. within 0.2 s"):
        settings = CollectiveSettings(start_timeout_s=0.2)
        CollectiveEngine(world_of(1, 2), find=lambda _, __: HashStore(), settings=settings)


def test_two_processes_of_one_rank_are_told_apart_from_a_rank_that_is_missing():
    store, settings = HashStore(), CollectiveSettings(start_timeout_s=3.0)

    def program(number):
        CollectiveEngine(world_of(min(number, 1), 3), find=lambda _, __: store, settings=settings)

    errors = sorted(map(str, in_threads(3, program)))
    assert sum("missing: rank 2" in error for error in errors) == 2
    assert "two processes say that they are rank 1" in errors[-1]


def test_what_strangers_send_is_dropped(caplog):
    store, began, over = HashStore(), threading.Event(), threading.Event()

    def annoy():
        assert began.wait(30)
        endpoint = store.get("control").decode().split()[0]
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(500)):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(endpoint.removeprefix("ipc://"))
                stranger.sendall(data)
        transport = ZeroMQTransport(Limits(), judges_silence=False)
        route = transport.connect(endpoint)
        for frame in (encode(RankHello("guess", 1, 2, "h", "m", "1")), b"", b"\xff" * 99):
            transport.send(route, [frame])
        transport.recv(0.2)
        transport.close()

    def program(rank):
        if rank == 2:
            try:
                return annoy()
            finally:
                over.set()
        with using(CollectiveEngine(world_of(rank, 2), find=lambda _, __: store)) as engine:
            began.set()
            for _ in range(200):
                hvd.allreduce(ONES, op=hvd.Sum)
            assert over.wait(60)  # while they sum or afterwards, all of it has come before they leave
            total = hvd.allreduce(ONES, op=hvd.Sum)
            engine.close()
        return total[0].item()

    assert returned(in_threads(3, program)) == [2.0, 2.0, None]


@each("settings", [{"secret_file": "/run/secret"}, {"security": "curve"}])
def test_ranks_that_are_to_encrypt_are_refused_as_nothing_encrypts_their_values(settings):
    for error in run_ranks(2, lambda rank: None, settings=CollectiveSettings(start_timeout_s=1.0, **settings)):
        assert isinstance(error, ConfigError)
        assert "collective operations (gloo, NCCL) are not encrypted" in str(error)


def test_rank_0_listens_within_the_range_of_ports(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    store, settings = HashStore(), CollectiveSettings(port_range=(port, min(port + 20, 65535)), security="none")

    def program(rank):
        with using(CollectiveEngine(world_of(rank, 2), find=lambda _, __: store, settings=settings)) as engine:
            engine.close()
        return int(store.get("control").decode().split()[0].rpartition(":")[2])

    assert set(returned(in_threads(2, program))) <= set(range(port, port + 21))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(rendezvous, "require_private_folder", lambda _: None)
    monkeypatch.setattr(rendezvous, "private_folder", lambda: str(tmp_path))
    return tmp_path


PID, BEGIN, NAMESPACE = this_process().split(".")


@pytest.mark.parametrize(
    "left",
    ["", "x", "1 2", f"99 {2**22 - 1}.{BEGIN}.{NAMESPACE}", f"99 {PID}.5.{NAMESPACE}"],
    ids=["nothing", "a word", "too little", "of nobody", "of another begin"],
)
def test_a_port_that_a_dead_process_has_left_is_passed_over(folder, left):
    (folder / "rank0-job").write_text(left)
    world = World(1, 2, 1, 2, meeting=Meeting(job="job"))
    with pytest.raises(CollectiveError, match="rank 0 has not started within 0.1 s"):
        meet(world, 0.1)


def test_the_port_is_found_and_its_file_is_removed_by_whom_it_belongs_to(folder):
    first, second = (World(rank, 2, rank, 2, meeting=Meeting(job="a/b")) for rank in range(2))
    master = meet(first, 60.0)
    meet(second, 60.0).set("said", "hello")
    assert master.get("said") == b"hello"
    forget_port(second)
    assert [path.name for path in folder.iterdir()] == ["rank0-a_b"]
    forget_port(first)
    assert list(folder.iterdir()) == []


def test_the_port_is_left_again_for_those_who_have_not_come_to_a_beginning_that_failed(folder):
    first, second = (World(rank, 2, rank, 2, meeting=Meeting(job="job")) for rank in range(2))
    found = basics._MeetingPoint()
    found.find(first, 60.0)
    forget_port(first)
    found.find(first, 60.0).set("said", "hello")
    assert meet(second, 60.0).get("said") == b"hello"


def test_ports_that_killed_processes_have_left_are_removed_by_a_later_job(folder):
    ages = {"rank0-killed": 100_000, "rank0-killed.7": 90_000, "rank0-begins": 1_000, "a socket": 100_000}
    for name, age_s in ages.items():
        (folder / name).write_text("99 1 5")
        os.utime(folder / name, (time.time() - age_s,) * 2)
    world = World(0, 2, 0, 2, meeting=Meeting(job="job"))
    meet(world, 60.0)
    assert {path.name for path in folder.iterdir()} == {"rank0-begins", "rank0-job", "a socket"}
    forget_port(world)


def test_a_port_that_another_program_has_is_named_with_what_to_set():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        world = World(0, 2, 0, 2, meeting=Meeting("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(CollectiveError, match="rank 0 on .* cannot listen at .*set MASTER_ADDR and MASTER_PORT"):
            meet(world, 10.0)


@each("listens", [False, True])
def test_a_place_where_nobody_listens_or_another_program_does_is_named_in_time(listens):
    with held_port() as port, socket.create_server(("127.0.0.1", port)) if listens else nullcontext():
        world = World(1, 2, 1, 2, meeting=Meeting("127.0.0.1", port))
        began = time.monotonic()
        with pytest.raises(CollectiveError, match=rf"has found no rank 0 within 0.2 s at 127.0.0.1:{port}"):
            meet(world, 0.2)
        assert time.monotonic() - began < 60, "torch would wait for five minutes, or for ever"


# Waiting.


IS_SAID = re.compile(
    r"waiting .* s for rank 1 \(.*\) to call allreduce 'second' of float32\[6\] \(Sum\) \(operation 1\);"
    r" rank 1 called allreduce 'first' .* last"
)
"""On a slow machine another operation may be said to be awaited too, and another rank beside this one."""


def test_who_is_awaited_too_long_is_named_on_rank_0(caplog):
    settings = CollectiveSettings(stall_check_s=0.5)

    def program(rank):
        hvd.allreduce(ONES, name="first")
        if rank == 1:
            assert told.wait(30)
        return hvd.allreduce(ONES, name="second", op=hvd.Sum)[0].item()

    told = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            if IS_SAID.search(record.getMessage()):
                told.set()

    listener = Listener()
    logging.getLogger("kvdist").addHandler(listener)
    try:
        assert returned(run_ranks(3, program, settings=settings)) == [3.0] * 3
    finally:
        logging.getLogger("kvdist").removeHandler(listener)
    assert any(IS_SAID.search(record.getMessage()) for record in caplog.records)


def test_a_wait_that_may_not_last_raises_on_all_ranks():
    settings = CollectiveSettings(stall_check_s=0.0, stall_shutdown_s=0.6)

    def program(rank):
        if rank == 1:
            assert over.wait(30)
        with pytest.raises(CollectiveError, match="for rank 1 .* to call barrier .*KVDIST_STALL_SHUTDOWN_S"):
            try:
                hvd.barrier()
            finally:
                over.set()
        return rank

    over = threading.Event()
    assert returned(run_ranks(2, program, settings=settings)) == [0, 1]


# What was done when.


def test_the_timeline_has_horovods_events_and_each_rank_a_file(tmp_path):
    def program(rank):
        hvd.start_timeline(str(tmp_path / "t.json"), mark_cycles=True)
        for _ in range(3):
            hvd.allreduce(ONES, name="grad")
        hvd.allgather(ONES)
        hvd.stop_timeline()
        hvd.allreduce(ONES)
        return rank

    returned(run_ranks(2, program))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.rank1.json"]
    for path in tmp_path.iterdir():
        written = json.loads(path.read_text())
        assert written["otherData"]["start_time_since_epoch_in_micros"] > 0
        events = written["traceEvents"]
        begun = [event for event in events if event["ph"] in "bX"]
        names = {event["name"] for event in begun}
        assert names >= {"QUEUE", "NEGOTIATE_ALLREDUCE", "ALLREDUCE", "NEGOTIATE_ALLGATHER", "ALLGATHER", "CYCLE_START"}
        assert sum(event["name"] == "ALLREDUCE" for event in begun) == 3
        assert all(event["args"]["name"] == "allreduce.grad" for event in begun if event["name"] == "ALLREDUCE")


def test_a_timeline_from_the_start_is_whole_while_it_is_written(tmp_path):
    settings = CollectiveSettings(timeline=str(tmp_path / "t.json"))

    def program(rank):
        for _ in range(5):
            hvd.allreduce(ONES)
            json.loads((tmp_path / "t.json").read_text())
        return rank

    returned(run_ranks(1, program, settings=settings))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["name"] == "ALLREDUCE" and event["ph"] == "b" for event in events) == 5
    assert not any(event["name"] == "CYCLE_START" for event in events)


def test_a_timeline_is_written_to_its_end_when_the_program_ends(tmp_path):
    program = f"""
        import torch, kvdist.horovod as hvd
        hvd.init()
        hvd.start_timeline({str(tmp_path / "t.json")!r})
        hvd.allreduce(torch.ones(1), name="last")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {"allreduce.last"} == {
        event["args"]["name"] for event in events if event["name"] == "ALLREDUCE" and event["args"]
    }


def test_a_place_where_no_timeline_can_be_written_is_refused_at_once(tmp_path):
    def program(rank):
        with pytest.raises(OSError):
            hvd.start_timeline(str(tmp_path / "nowhere" / "t.json"))
        return rank

    returned(run_ranks(1, program))


def test_variables_of_horovod_set_the_level_of_the_log_or_are_named():
    program = "import logging, kvdist.collective as hvd; hvd.init(); print(logging.getLogger('kvdist').level)"
    asked = {"HOROVOD_LOG_LEVEL": "debug", "HOROVOD_CYCLE_TIME": "5"}
    done = subprocess.run([sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout == "10\n", done.stderr
    assert done.stderr.count("HOROVOD_CYCLE_TIME has no effect: an operation begins when it is called") == 1
