"""Ranks that are real processes die, stop and fail, and the others say so and end."""

import os
import signal
import socket
import sys
import time

import pytest

from tests.integration.processes import EXIT_PEER_LOST, PROGRAMS, TICKS_MAX, TIMEOUT_S
from tests.ports import free_port

HEAD = """
import os, sys, time
import torch
import kvdist.collective as hvd
from kvdist.errors import KvdistError
from ticking import start_ticking
torch.set_num_threads(1)
hvd.init()
rank, ones = hvd.rank(), torch.ones(1000)
for _ in range(5):
    hvd.allreduce(ones, name="first")
start_ticking()
print("ready", flush=True)
"""
WITHOUT_OTHER_THREADS = HEAD.replace("start_ticking()\n", "")


class Job:
    """Three ranks under the variables of torchrun, without it."""

    def __init__(self, popen, folder, body, head=HEAD, **env):
        self._folder = folder
        program = folder / "program.py"
        program.write_text(head + body)
        common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "KVDIST_START_TIMEOUT_S": f"{TIMEOUT_S:g}"}
        common |= {"PYTHONPATH": os.pathsep.join([str(PROGRAMS), os.environ.get("PYTHONPATH", "")])}
        common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._ranks = []
        for rank in range(3):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), **env}
            with (folder / f"{rank}.out").open("w") as output:
                self._ranks.append(popen([sys.executable, str(program)], env=own, stdout=output, stderr=output))

    def said(self, rank):
        return (self._folder / f"{rank}.out").read_text()

    def wait_for(self, text, ranks=range(3)):
        """Wait until these ranks have printed it."""
        until = time.monotonic() + TIMEOUT_S
        while not all(text in self.said(rank) for rank in ranks):
            assert time.monotonic() < until, [self.said(rank) for rank in range(3)]
            time.sleep(0.02)

    def signal(self, rank, number):
        os.kill(self._ranks[rank].pid, number)

    def ticks(self, rank):
        """How often a rank has said that it runs."""
        return self.said(rank).split("\n").count("tick")

    def ends(self):
        """How the ranks ended."""
        return [rank.wait() for rank in self._ranks]


# The others print when they hear of it, which is what has to be soon: ending Python takes what it takes.
FOR_EVER = """
try:
    while True:
        hvd.allreduce(ones, name="again")
except KvdistError:
    print("heard of it", flush=True)
    raise
"""


@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others_soon_with_its_name_and_what_they_waited_for(popen, tmp_path, victim):
    job = Job(popen, tmp_path, FOR_EVER)
    job.wait_for("ready")
    before = [job.ticks(rank) for rank in range(3)]
    job.signal(victim, signal.SIGKILL)
    assert job.ends() == [-9 if rank == victim else EXIT_PEER_LOST for rank in range(3)]
    for rank in set(range(3)) - {victim}:
        said = job.said(rank)
        assert f"RankLostError: rank {victim} on host {socket.gethostname()} is gone" in said
        assert said.partition("heard of it")[0].split("\n").count("tick") - before[rank] <= TICKS_MAX, said


def test_a_rank_that_dies_while_the_others_connect_to_it_ends_their_wait(popen, tmp_path):
    program = """
import atexit
import os
import threading
atexit.register(lambda: print("left:", [thread.name for thread in threading.enumerate()]))
import kvdist.collective as hvd
from kvdist.collective.channel import Channel
if os.environ["RANK"] == "1":
    Channel.open = lambda self: os._exit(7)
hvd.init()
"""
    job = Job(popen, tmp_path, program, head="")
    # C++ would abort a process whose Python ends while a thread is in gloo.
    assert job.ends() == [EXIT_PEER_LOST, 7, EXIT_PEER_LOST]
    for rank in (0, 2):
        assert "left: ['MainThread']" in job.said(rank)
        assert "RankLostError: rank 1 on host" in job.said(rank)
        assert f"rank {rank} waited for the connections to the other ranks" in job.said(rank)


@pytest.mark.slow
def test_a_rank_that_is_killed_while_the_others_compute_is_named_by_their_next_operation(popen, tmp_path):
    body = """
if rank == 1:
    time.sleep(60)
while not os.path.exists(os.environ["GO"]):
    time.sleep(0.02)
hvd.barrier()
"""
    job = Job(popen, tmp_path, body, GO=str(tmp_path / "go"))
    job.wait_for("ready")
    job.signal(1, signal.SIGKILL)
    (tmp_path / "go").touch()
    assert job.ends() == [EXIT_PEER_LOST, -9, EXIT_PEER_LOST]
    assert "RankLostError: rank 1 on host" in job.said(0) and "RankLostError: rank 1 on host" in job.said(2)


def test_an_exception_of_one_rank_ends_the_others_with_its_text(popen, tmp_path):
    body = """
if rank == 1:
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.02)
    raise FileNotFoundError("no such file: train.csv")
handle = hvd.allreduce_async(ones, name="second")
print("called", flush=True)
hvd.synchronize(handle)
"""
    job = Job(popen, tmp_path, body, GO=str(tmp_path / "go"))
    job.wait_for("called", (0, 2))
    (tmp_path / "go").touch()
    assert job.ends() == [EXIT_PEER_LOST, 1, EXIT_PEER_LOST]
    for rank in (0, 2):
        assert "is gone: ended by FileNotFoundError: no such file: train.csv" in job.said(rank)
        assert f"rank {rank} waited for allreduce 'second' of float32[1000]" in job.said(rank)
    last = [line for line in job.said(1).splitlines() if line != "tick"][-1]
    assert last == "FileNotFoundError: no such file: train.csv"


ENDS = {"exit": ("sys.exit(3)", 3), "exception": ("raise FileNotFoundError('train.csv')", 1)}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_ends_while_it_waits_itself_is_named_to_those_who_wait_for_it_in_process_sets(popen, tmp_path, end):
    statement, code = ENDS[end]
    body = f"""
first, second = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
if rank == 1:
    hvd.allreduce_async(ones, name="never called by the others")
    while not os.path.exists(os.environ["GO"]):
        time.sleep(0.01)
    print("ends", flush=True)
    {statement}
handle = hvd.allreduce_async(ones, name="in a set", process_set=second if rank else first)
print("called", flush=True)
try:
    hvd.synchronize(handle)
except KvdistError:
    print("heard of it", flush=True)
    raise
"""
    job = Job(popen, tmp_path, body, GO=str(tmp_path / "go"))
    job.wait_for("called", (0, 2))
    (tmp_path / "go").touch()
    job.wait_for("ends", [1])
    before = [job.ticks(rank) for rank in range(3)]
    assert job.ends() == [EXIT_PEER_LOST, code, EXIT_PEER_LOST]
    for rank in (0, 2):
        assert "RankLostError: rank 1 on host" in job.said(rank)
        assert f"rank {rank} waited for allreduce 'in a set'" in job.said(rank)
        assert job.said(rank).partition("heard of it")[0].split("\n").count("tick") - before[rank] <= TICKS_MAX


@pytest.mark.slow
def test_a_stopped_rank_is_no_dead_one_and_is_told_of_by_name(popen, tmp_path):
    body = """
for _ in range(100):
    hvd.allreduce(ones, name="again")
    time.sleep(0.02)
"""
    job = Job(popen, tmp_path, body, KVDIST_STALL_CHECK_S="1")
    job.wait_for("ready")
    job.signal(2, signal.SIGSTOP)
    job.wait_for("for rank 2 (", [0])
    job.signal(2, signal.SIGCONT)
    assert job.ends() == [0, 0, 0]
    assert "for allreduce 'again'" in job.said(0)


def test_names_that_never_meet_are_an_error_at_once_where_no_other_thread_could_call(popen, tmp_path):
    body = """
since = time.monotonic()
try:
    hvd.allreduce(ones, name=f"only {rank}")
except KvdistError as error:
    print("failed", error, flush=True)
print("well" if hvd.allreduce(ones, name="on", op=hvd.Sum)[0] == 3 else "ill", flush=True)
"""
    # Without warnings about waits there is no limit to the wait for other threads.
    job = Job(popen, tmp_path, body, WITHOUT_OTHER_THREADS, KVDIST_STALL_CHECK_S="0")
    assert job.ends() == [0, 0, 0], [job.said(rank) for rank in range(3)]
    for rank in range(3):
        assert "failed ranks called different operations as operation 5: rank 0 allreduce 'only 0'" in job.said(rank)
        assert "well" in job.said(rank)


def test_names_that_a_rank_leaves_behind_are_an_error_at_once_whatever_other_threads_run(popen, tmp_path):
    body = """
if rank == 2:
    hvd.allreduce_async(ones, name="left behind")
else:
    try:
        hvd.allreduce(ones, name="never called by rank 2")
    except KvdistError as error:
        print("heard", error, flush=True)
"""
    job = Job(popen, tmp_path, body, KVDIST_STALL_CHECK_S="0")
    assert job.ends() == [0, 0, 0], [job.said(rank) for rank in range(3)]
    for rank in range(2):
        assert "rank 2 allreduce 'left behind'" in job.said(rank)


@pytest.mark.slow
def test_ranks_begin_anew_after_an_end_and_after_a_failure(popen, tmp_path):
    body = """
pair = hvd.ProcessSet(0, 1)
for attempt in range(3):
    hvd.shutdown()
    hvd.init(process_sets=[pair])
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [3.0] * 3
    if rank < 2:
        assert hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=pair).tolist() == [2.0] * 3
    if attempt == 1:
        for name in "abab":
            hvd.allreduce(ones, name=name)
        try:
            hvd.allreduce(ones, name="b" if rank else "a")
        except KvdistError as error:
            print("failed", error, flush=True)
        else:
            raise AssertionError("ranks differ, and nobody has said so")
print("well", flush=True)
"""
    job = Job(popen, tmp_path, body, WITHOUT_OTHER_THREADS)
    assert job.ends() == [0, 0, 0], [job.said(rank) for rank in range(3)]
    for rank in range(3):
        assert "failed ranks called different operations" in job.said(rank) and "well" in job.said(rank)


def test_ranks_whose_connections_did_not_come_about_may_begin_again(popen, tmp_path):
    program = """
import os
import torch
import kvdist.collective as hvd
from kvdist.collective.channel import Channel
from kvdist.errors import KvdistError

opens = Channel.open
def fail(self):
    Channel.open = opens
    raise RuntimeError("no device")

if os.environ["RANK"] == "1":
    Channel.open = fail
try:
    hvd.init()
except (KvdistError, RuntimeError) as error:
    print("failed", error, flush=True)
hvd.init()
print("sum", hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist(), flush=True)
"""
    job = Job(popen, tmp_path, program, head="")
    assert job.ends() == [0, 0, 0], [job.said(rank) for rank in range(3)]
    for rank in range(3):
        assert "no device" in job.said(rank) and "sum [3.0, 3.0, 3.0]" in job.said(rank)


@pytest.mark.slow
def test_a_rank_that_leaves_in_good_order_ends_well_and_the_others_hear_of_it(popen, tmp_path):
    body = """
if rank == 0:
    hvd.shutdown()
else:
    try:
        hvd.barrier()
    except KvdistError as error:
        print("heard", error, flush=True)
"""
    job = Job(popen, tmp_path, body)
    assert job.ends() == [0, 0, 0]
    assert all("rank 0 on host" in job.said(rank) and "has called shutdown()" in job.said(rank) for rank in (1, 2))
