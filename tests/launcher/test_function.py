"""Functions on workers: results in rank order, failures raised here, from scripts, threads and notebooks."""

from __future__ import annotations

import asyncio
import inspect
import io
import linecache
import os
import signal
import subprocess
import sys
import threading
import time
import tracemalloc
from importlib.util import find_spec
from types import CodeType

import pytest

import kvdist_launch
from kvdist.errors import ConfigError, DeadlineExceeded
from kvdist_launch.function import WorkerAnswer
from kvdist_launch.processes import READ_BYTES
from kvdist_launch.serialization import SerializationError, pack_call, pack_result, unpack_call
from tests.cases import each

cloudpickle = pytest.importorskip("cloudpickle", reason="functions are sent by cloudpickle, which is not installed")

TIMEOUT_S = 150
IS_RANK_1 = "os.environ['KVDIST_RANK'] == '1'"


@pytest.fixture(autouse=True)
def patient(monkeypatch, forked):
    """A machine that runs other tests may let a process stand still for 10 s, which is no loss; all are forked."""
    monkeypatch.setenv("KVDIST_PATIENCE_S", "60")
    monkeypatch.setattr(subprocess, "Popen", forked)


def by_value(source: str, name: str = "fn"):
    """A function as if a notebook's cell had defined it; those of this file could not be imported by a worker."""
    names = {"__name__": "__main__"}
    exec(source, names)
    return names[name]


def test_results_come_in_rank_order_from_workers_of_one_job(capsys):
    fn = by_value(
        "def fn(start, step=1):\n"
        "    import numpy as np\n"
        "    from kvdist import kv\n"
        "    store = kv.create('dist')\n"
        "    store.init('a', np.zeros(3))\n"
        "    store.push('a', np.full(3, float(start + step * store.rank)))\n"
        "    out = np.zeros(3)\n"
        "    store.pull('a', out=out)\n"
        "    print('sum', out[0])\n"
        "    return store.rank, out\n"
    )
    results = kvdist_launch.run(fn, (10,), {"step": 5}, np=3, servers=1)
    assert [rank for rank, _ in results] == [0, 1, 2]
    assert [out.tolist() for _, out in results] == [[45.0] * 3] * 3
    shown = capsys.readouterr()
    assert sorted(shown.out.splitlines()) == ["w0 │ sum 45.0", "w1 │ sum 45.0", "w2 │ sum 45.0"]
    assert "kvdist-launch" not in shown.err


@pytest.mark.skipif(find_spec("torch") is None, reason="WORKERS WITHOUT SERVERS ARE NOT TESTED: torch is not installed")
def test_without_servers_workers_gather_and_results_come_in_rank_order():
    fn = by_value(
        "def fn(a, b, c, d):\n"
        "    import torch\n"
        "    import kvdist.collective as hvd\n"
        "    hvd.init()\n"
        "    gathered = hvd.allgather(torch.tensor([hvd.rank(), a + b + c + d])).tolist()\n"
        "    return {0: gathered, 1: 'ret_val_of_rank_1'}.get(hvd.rank())\n"
    )
    results = kvdist_launch.run(fn, (1, 20), {"c": 300, "d": 4000}, np=3)
    assert results == [[0, 4321, 1, 4321, 2, 4321], "ret_val_of_rank_1", None]


def test_without_servers_a_failing_rank_ends_the_others_and_there_is_no_store_of_a_cluster():
    fn = by_value(
        f"import os, time\ndef fn():\n    if {IS_RANK_1}:\n        from kvdist import kv\n        kv.create('dist')\n"
        "    time.sleep(60)"
    )
    began = time.monotonic()
    with pytest.raises(kvdist_launch.WorkerFailure, match=r"this job has no servers .* servers=2\)") as caught:
        kvdist_launch.run(fn, np=3)
    assert (caught.value.rank, caught.value.kind) == (1, "kvdist.errors.ConfigError")
    assert time.monotonic() - began < 50, "the others would have slept for 60 s"


def test_the_words_of_horovod_are_taken_and_verbose_lets_the_launcher_speak(capsys):
    fn = by_value("def fn():\n    import os\n    return os.environ['DMLC_NUM_SERVER'], os.environ['DMLC_NUM_WORKER']")
    quiet = kvdist_launch.run(fn, np=2, verbose=False, disable_cache=True, use_mpi=True)
    assert (quiet, capsys.readouterr().err) == ([("0", "2")] * 2, "")
    assert kvdist_launch.run(func=fn, num_proc=1, verbose=True, use_gloo=True) == [("0", "1")]
    said = capsys.readouterr().err
    assert "kvdist-launch: worker-0 on localhost: local rank 0 of 1, cross rank 0 of 1\n" in said
    assert "kvdist-launch: 1 worker finished in " in said
    assert "kvdist-launch: use_gloo has no effect: gloo connects processes on CPUs in any case" in said


def test_lambdas_closures_and_large_values_travel():
    factor = 3
    big = bytes(3 << 20)
    results = kvdist_launch.run(lambda more: (factor, big + more), (b"x",), np=1, servers=1)
    assert results == [(3, big + b"x")]


@each("treatment", [signal.SIG_IGN, signal.SIG_DFL])
def test_exit_codes_are_the_launcher_s_whatever_this_program_does_with_sigchld(treatment):
    before = signal.signal(signal.SIGCHLD, treatment)
    try:
        assert kvdist_launch.run(lambda: 3, np=1, servers=1) == [3]
        assert signal.getsignal(signal.SIGCHLD) == treatment
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_variables_reach_the_workers_and_those_of_the_launcher_are_refused():
    fn = by_value("def fn():\n    import os\n    return os.environ['MY_NAME'], os.environ['KVDIST_RANK']")
    assert kvdist_launch.run(fn, np=2, servers=1, env={"MY_NAME": "a=b"}) == [("a=b", "0"), ("a=b", "1")]
    with pytest.raises(ConfigError, match="KVDIST_RANK is set by the launcher"):
        kvdist_launch.run(fn, env={"KVDIST_RANK": "7"})


def test_a_worker_that_is_lost_has_no_result_where_the_others_go_on():
    fn = by_value(
        "import os, signal, time\n"
        "import numpy as np\n"
        "from kvdist import kv\n"
        "def fn(how):\n"
        "    store = kv.create('dist')\n"
        "    store.set_optimizer('sgd', learning_rate=1.0)\n"
        "    store.init('w', np.zeros(2))\n"
        "    if store.rank == 1 and how == 'killed': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if store.rank == 1: raise LookupError('no such thing')\n"
        "    store.pushpull('w', np.ones(2))\n"
        "    while store.num_dead_nodes() == 0: time.sleep(0.01)\n"
        "    return 1 in store.members\n"
    )
    for how in ("killed", "raises"):
        assert kvdist_launch.run(fn, (how,), np=3, servers=1, on_loss="continue") == [False, None, False]
    with pytest.raises(kvdist_launch.WorkerFailure, match="LookupError: no such thing"):
        kvdist_launch.run(fn, ("raises",), np=3, servers=1)
    with pytest.raises(ConfigError, match="on_loss is 'continue', which needs servers"):
        kvdist_launch.run(fn, ("raises",), np=3, on_loss="continue")
    with pytest.raises(ConfigError, match="KVDIST_ON_LOSS"):
        kvdist_launch.run(fn, ("raises",), np=3, servers=1, on_loss="perhaps")
    with pytest.raises(ConfigError, match="'wait', which waits until a lost worker is started again"):
        kvdist_launch.run(fn, ("raises",), np=3, servers=1, on_loss="wait")


def test_a_job_that_asks_for_encryption_gets_its_secret(monkeypatch):
    fn = by_value("def fn():\n    from kvdist import kv\n    return kv.create('dist').num_workers")
    assert kvdist_launch.run(fn, np=1, servers=1, env={"KVDIST_SECURITY": "curve"}) == [1]
    monkeypatch.setenv("KVDIST_SECURITY", "curve")
    assert kvdist_launch.run(fn, np=1, servers=1) == [1]
    with pytest.raises(ConfigError, match="KVDIST_SECURITY=curve asks for encryption, and what the workers"):
        kvdist_launch.run(fn, np=2)


def test_the_first_exception_is_raised_here_with_its_traceback(capsys):
    fn = by_value(
        f"import os, time\ndef fn():\n    if {IS_RANK_1}: raise LookupError('no such thing')\n    time.sleep(60)"
    )
    with pytest.raises(kvdist_launch.WorkerFailure, match=r"worker-1 on .* raised LookupError \(exit") as caught:
        kvdist_launch.run(fn, np=2, servers=1)
    failure = caught.value
    assert (failure.rank, failure.exit_code, failure.kind) == (1, 1, "LookupError")
    assert failure.traceback.startswith("Traceback (most recent call last):\n")
    assert failure.traceback.endswith("LookupError: no such thing\n")
    assert "callee.py" not in failure.traceback and "runpy" not in failure.traceback
    assert failure.traceback in f"{failure}\n"
    assert "w1 │ LookupError: no such thing" in capsys.readouterr().err


def test_a_deadlock_is_raised_as_the_workers_have_it():
    fn = by_value(
        "from kvdist import kv\n"
        "def fn():\n"
        "    store = kv.create('dist')\n"
        "    for key in 'ab' if store.rank else 'ba':\n"
        "        store.init(key, __import__('numpy').zeros(2))\n"
    )
    with pytest.raises(kvdist_launch.WorkerFailure, match="raised kvdist.errors.DeadlockError .*exit code 1") as caught:
        kvdist_launch.run(fn, np=2, servers=1)
    assert "deadlock: worker-0 waits for worker-1 in init of key 'b'" in str(caught.value)


def test_code_keeps_its_file_names_whatever_cloudpickle_writes_for_them(monkeypatch):
    reduce = cloudpickle.Pickler.dispatch_table[CodeType]
    monkeypatch.setitem(  # as version 3.1.3 does
        cloudpickle.Pickler.dispatch_table.maps[0], CodeType, lambda code: reduce(code.replace(co_filename="<dynamic>"))
    )
    names = {"__name__": "__main__"}
    exec(compile("def fn():\n    return lambda: 3\n", "/tmp/ipykernel_1/98.py", "exec"), names)
    fn, _, _ = unpack_call(pack_call(names["fn"], (), {}))
    assert [fn.__code__.co_filename, fn().__code__.co_filename, fn()()] == [*["/tmp/ipykernel_1/98.py"] * 2, 3]


def test_a_function_of_a_notebook_shows_its_lines_in_a_traceback(capsys):
    # As IPython does it: the name is of no file, and `linecache` knows the lines.
    name = "/tmp/ipykernel_1/987654.py"
    source = "import functools\ndef inner(batch):\n    return batch['price']\ndef fn():\n    return inner({})\n"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names = {"__name__": "__main__"}
    try:
        exec(compile(source, name, "exec"), names)
        with pytest.raises(kvdist_launch.WorkerFailure) as caught:
            kvdist_launch.run(names["fn"], np=1, servers=1)
    finally:
        del linecache.cache[name]
    for text in (caught.value.traceback, capsys.readouterr().err.replace("w0 │ ", "")):
        assert f'  File "{name}", line 5, in fn\n    return inner({{}})\n' in text
        assert f"  File \"{name}\", line 3, in inner\n    return batch['price']\n" in text


@pytest.mark.slow_cases("exit(5)-SystemExit-5", "raise LookupError('no')-LookupError-1")
@pytest.mark.parametrize(
    ("ends", "kind", "exit_code"), [("raise LookupError('no')", "LookupError", 1), ("exit(5)", "SystemExit", 5)]
)
def test_a_thread_that_lives_on_keeps_no_failure_from_being_told(ends, kind, exit_code):
    fn = by_value(
        "import os, threading, time\nfrom sys import exit\n"
        f"def fn():\n    threading.Thread(target=time.sleep, args=(60,)).start()\n    if {IS_RANK_1}: {ends}\n"
        "    time.sleep(60)"
    )
    began = threading.active_count()
    with pytest.raises(kvdist_launch.WorkerFailure, match=f"worker-1 on .* raised {kind}") as caught:
        kvdist_launch.run(fn, np=2, servers=1, timeout_s=50)
    assert (caught.value.rank, caught.value.kind, caught.value.exit_code) == (1, kind, exit_code)
    assert threading.active_count() == began


def test_a_large_result_is_not_copied_while_it_is_received():
    result = pack_result(bytes(32 << 20))
    answer = WorkerAnswer(lambda: None)
    tracemalloc.start()
    answer.receive(b'{"bytes": %d}\n' % len(result))
    for begin in range(0, len(result), READ_BYTES):
        answer.receive(result[begin : begin + READ_BYTES])
    assert len(answer.take_result()) == 32 << 20
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 2.5 * len(result), "the bytes and the result itself, no more"


@pytest.mark.slow_cases(
    "exit(5)-5-raised SystemExit (exit code 5)", "os._exit(4)-4-ended with exit code 4 before the function had returned"
)
@pytest.mark.parametrize(
    ("ends", "exit_code", "sentence"),
    [
        ("os.kill(os.getpid(), 9)", 137, "was killed by signal 9 (SIGKILL) before the function had returned"),
        ("os._exit(4)", 4, "ended with exit code 4 before the function had returned"),
        ("os._exit(0)", 0, "ended with exit code 0 before the function had returned"),
        ("exit(5)", 5, "raised SystemExit (exit code 5)"),
        ("exit()", 0, "raised SystemExit (exit code 0)"),
    ],
)
def test_a_worker_that_ends_without_a_result_is_a_failure_with_its_exit_code(ends, exit_code, sentence):
    fn = by_value(f"import os\nfrom sys import exit\ndef fn():\n    if {IS_RANK_1}: {ends}")
    with pytest.raises(RuntimeError) as caught:
        kvdist_launch.run(fn, np=2, servers=1)
    assert (caught.value.rank, caught.value.exit_code) == (1, exit_code)
    assert sentence in str(caught.value)


def test_a_result_that_cannot_be_sent_is_named():
    with pytest.raises(kvdist_launch.WorkerFailure, match="its result, a value of type generator, cannot be sent back"):
        kvdist_launch.run(lambda: (letter for letter in "ab"), np=1, servers=1)


def test_what_cannot_be_sent_is_named_before_anything_starts():
    lock = threading.Lock()
    for words, named in (
        ((lambda: lock,), "the variable 'lock' that the function uses, a value of type _thread.lock"),
        ((print, (1, lock)), r"args\[1\], a value of type _thread.lock"),
        ((print, (), {"end": lock}), r"kwargs\['end'\], a value of type _thread.lock"),
    ):
        with pytest.raises(SerializationError, match=f"{named}, cannot be sent to the workers"):
            kvdist_launch.run(*words)


def test_what_a_worker_cannot_import_is_named():
    data = pack_call(pytest.raises, (), {}).replace(b"_pytest.raises", b"_pytest.raisin")
    before = list(sys.path)
    with pytest.raises(SerializationError, match="the function cannot be loaded in the worker: ModuleNotFoundError"):
        unpack_call(data)
    assert sys.path == before


def test_a_worker_elsewhere_looks_for_modules_in_its_own_path_first(monkeypatch):
    monkeypatch.setattr(sys, "path", ["/launching", "/both"])
    data = pack_call(print, (), {}, is_here=False)
    monkeypatch.setattr(sys, "path", ["/both", "/there"])
    unpack_call(data)
    assert sys.path == ["/both", "/there", "/launching"]


@each("front, rest", [(True, []), (False, [""])])
def test_the_current_folder_stands_where_it_does_here_though_it_is_another_one_there(monkeypatch, front, rest):
    here = os.getcwd()
    monkeypatch.setattr(sys, "path", [here, "/launching"] if front else ["/scripts", here, "/launching"])
    data = pack_call(print, (), {}, is_here=False)
    monkeypatch.setattr(sys, "path", ["/there", ""])
    unpack_call(data)
    others = ["/there", *rest, *([] if front else ["/scripts"]), "/launching"]
    assert sys.path == (["", *others] if front else others)


def test_without_cloudpickle_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigError, match=r"pip install cloudpickle"):
        kvdist_launch.run(print)


@each(
    "counts, message",
    [
        ({"np": 0}, "np is 0; a job needs at least 1"),
        ({"num_proc": 0}, "np is 0; a job needs at least 1"),
        ({"num_proc": 1, "np": 0}, "np is 0; a job needs at least 1"),
        ({"servers": -1}, "servers is -1; a job needs at least 0"),
    ],
)
def test_a_job_needs_workers(counts, message):
    with pytest.raises(ConfigError, match=message):
        kvdist_launch.run(print, **counts)


HOROVODS = """func args kwargs num_proc min_num_proc max_num_proc slots reset_limit cooldown_range hosts hostfile
host_discovery_script start_timeout ssh_port ssh_identity_file disable_cache output_filename verbose use_gloo use_mpi
mpi_args network_interface network_interfaces executable np min_np max_np"""
"""The arguments of ``horovod.run`` 0.28.1 in their order (horovod/runner/__init__.py)."""


def test_the_arguments_are_those_of_horovod_in_its_order():
    parameters = inspect.signature(kvdist_launch.run).parameters.values()
    assert [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD] == HOROVODS.split()
    assert [one.name for one in parameters if one.kind is one.KEYWORD_ONLY] == [
        "servers",
        "on_loss",
        "env",
        "sync_dst_dir",
        "timeout_s",
    ]


def test_what_workers_print_is_also_kept_as_horovod_keeps_it(tmp_path):
    fn = by_value("def fn():\n    import os\n    print('rank', os.environ['KVDIST_RANK'])")
    out, hostfile = tmp_path / "out", tmp_path / "hosts"
    hostfile.write_text("localhost slots=2\n")
    given = {"start_timeout": 60, "ssh_port": 2222, "network_interfaces": "lo", "mpi_args": "-q"}
    kvdist_launch.run(fn, (), {}, 2, hostfile=str(hostfile), output_filename=str(out), **given)
    assert [(out / f"rank.{rank}" / "stdout").read_text() for rank in (0, 1)] == ["rank 0\n", "rank 1\n"]


def test_one_interface_may_stand_in_a_list_as_horovod_wants_it(monkeypatch):
    requests = []

    def refuse(request, *_):
        requests.append(request)
        raise ConfigError("seen")

    monkeypatch.setattr("kvdist_launch.function.run_once", refuse)
    for given in ({"network_interfaces": ["eth0"]}, {"network_interfaces": "eth0"}, {"network_interface": "eth0"}, {}):
        with pytest.raises(ConfigError, match="seen"):
            kvdist_launch.run(print, hosts="elsewhere:1", **given)
    assert [request.options.interface for request in requests] == ["eth0", "eth0", "eth0", None]


def test_the_interpreter_and_the_time_to_start_reach_the_workers(tmp_path):
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nMINE=yes exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    fn = by_value("def fn():\n    import os\n    return os.environ['MINE'], os.environ['KVDIST_START_TIMEOUT_S']")
    assert kvdist_launch.run(fn, executable=str(python), start_timeout=7) == [("yes", "7")]


@each(
    "arguments, message",
    [
        ({"hosts": "elsewhere:1", "network_interfaces": "eth0,eth1"}, "'eth0,eth1': name one interface"),
        ({"hosts": "elsewhere:1", "network_interfaces": ["eth0", "eth1"]}, "'eth1']: name one interface"),
        ({"hosts": "elsewhere:1", "env": {"KVDIST_SECURITY": "curve"}}, "KVDIST_SECURITY=curve asks for encryption"),
        ({"hosts": "localhost:1", "num_proc": 2}, "-np asks for 2 processes, but the hosts have 1 slot"),
        ({"min_num_proc": 1}, "min_num_proc is 1: training while processes come and go is not possible yet"),
        ({"max_np": 4}, "max_np is 4: training while processes come and go is not possible yet"),
        ({"slots": 2}, "slots is 2: "),
        ({"reset_limit": 2}, "reset_limit is 2: "),
        ({"cooldown_range": [1, 2]}, r"cooldown_range is \[1, 2\]: "),
        ({"host_discovery_script": "./hosts.sh"}, r"host_discovery_script is './hosts.sh': "),
    ],
)
def test_what_cannot_be_done_for_a_function_is_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        kvdist_launch.run(print, **arguments)


def test_a_job_that_takes_too_long_is_ended():
    with pytest.raises(DeadlineExceeded, match=r"after 0\.5 s; the job was ended"):
        kvdist_launch.run(time.sleep, (60,), np=1, servers=1, timeout_s=0.5)


@each("timeout_s", [0.0, 1e-6])
def test_a_deadline_that_is_over_before_the_job_has_started_is_kept(timeout_s):
    with pytest.raises(DeadlineExceeded):
        kvdist_launch.run(time.sleep, (8,), np=1, servers=1, timeout_s=timeout_s)


def test_it_works_in_a_thread_and_leaves_none_behind():
    before = threading.active_count()
    results: list[object] = []

    def call():
        results.append(kvdist_launch.run(os.getppid, np=2, servers=1))
        try:
            kvdist_launch.run(by_value("def fn():\n    raise OSError('no')"), np=1, servers=1)
        except kvdist_launch.WorkerFailure as error:
            results.append(error.kind)
        try:
            kvdist_launch.run(time.sleep, (60,), np=1, servers=1, timeout_s=0.5)
        except DeadlineExceeded:
            results.append("too late")

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(TIMEOUT_S)
    assert results == [[os.getpid()] * 2, "OSError", "too late"]
    assert threading.active_count() == before


def test_it_works_where_an_event_loop_runs_and_leaves_its_signals_alone():
    async def cell():
        here = asyncio.get_running_loop()
        interrupted = asyncio.Event()
        here.add_signal_handler(signal.SIGUSR1, interrupted.set)
        result = kvdist_launch.run(lambda: 7, np=1, servers=1)
        os.kill(os.getpid(), signal.SIGUSR1)
        await asyncio.wait_for(interrupted.wait(), 60)
        here.remove_signal_handler(signal.SIGUSR1)
        return result

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
    assert asyncio.run(cell()) == [7]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == before


def test_output_goes_to_a_stream_that_has_no_descriptor(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stdout", shown)
    kvdist_launch.run(print, ("é",), np=1, servers=1)
    assert shown.getvalue() == "w0 │ é\n"


NOTEBOOK = """
import kvdist_launch
class Point:
    def __init__(self, x): self.x = x

def double(point):
    return Point(2 * point.x)

print([isinstance(one, Point) and one.x for one in kvdist_launch.run(double, (Point(21),), np=2, servers=1)])
kvdist_launch.run(lambda: 1 / 0, np=1, servers=1)
print('still here')
"""


def test_functions_and_classes_of_an_interactive_session_travel():
    argv = [sys.executable, "-q", "-i", "-c", ""]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(argv, input=NOTEBOOK, text=True, capture_output=True, timeout=TIMEOUT_S, env=env)
    assert done.stdout.splitlines() == ["[42, 42]", "still here"], done.stderr
    assert "WorkerFailure: worker-0 on " in done.stderr and "raised ZeroDivisionError" in done.stderr


INTERRUPTED = """
import kvdist_launch

def wait():
    import os, time
    try:
        print('pid', os.getpid(), flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print('asked to end', flush=True)

try:
    kvdist_launch.run(wait, np=1, servers=1)
except KeyboardInterrupt:
    print('interrupted here')
"""


def test_ctrl_c_ends_the_job_and_is_raised_here(is_gone):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
    argv = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[-1])
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert out.splitlines() == ["w0 │ asked to end", "interrupted here"], err
    assert is_gone(pid)


def test_nothing_outlives_the_process_that_called(is_gone):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", INTERRUPTED], stdout=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline().split()[-1])
        process.kill()
        assert is_gone(pid, timeout_s=30.0)
