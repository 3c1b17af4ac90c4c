"""What holds for every test: nothing is left behind, and nothing of the caller's environment leaks in.

A test fails when it leaves a thread, a child process or an open descriptor. What can outlive its maker (grandchildren,
files in the run-time directory) is looked for once, at the end of the run and by the process that outlives the others,
so that tests running side by side cannot accuse each other. It counts what is of this run: processes by a mark in their
environment, files because all processes of the run have a directory of its own. Jobs of others may run meanwhile.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.util
import multiprocessing.resource_tracker
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from tests.forks import Forked, forking
from tests.integration.processes import Job

ROOT = Path(__file__).resolve().parent.parent
PROOF = ROOT / "docs" / "decisions" / "proof.md"
GRACE_S = 30.0
"""How long what a test has already told to stop may take to be gone, on a machine that is busy with other things."""
LOOK_AGAIN_S = 0.05
"""How often it is looked for where its end cannot be waited for."""

RUN_MARK = "PYTEST_RUN_OF_KVDIST"
OURS = "kvdist*"
"""The names of files that kvdist makes outside the project."""


# What Python has compiled is kept: without that, each of thousands of processes compiles kvdist anew.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Set before anything imports a numeric library: side by side on two cores, more threads only get in each other's way.
for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(variable, "1")

# Hypothesis fails an example that takes more than 200 ms, which one does now and then where the machine is busy, and
# looks at other examples each time. A change is refused for what it does: every run looks at the same, in its own time,
# and `make fuzz` looks at others.
with contextlib.suppress(ImportError):
    import hypothesis

    patient = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
    hypothesis.settings.register_profile("repeatable", patient, derandomize=True)
    hypothesis.settings.register_profile("elsewhere", patient, print_blob=True)
    hypothesis.settings.load_profile("repeatable")


MARK_OF_GPU = "mark.gpu"
ONLY_GPU = "gpu"
"""The expression of marks of a run on a machine with a GPU, ``python -m pytest -m gpu``: it may lack much else."""


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Know the time-out of pyproject.toml also where pytest-timeout is not installed, which then does not apply."""
    if not pluginmanager.hasplugin("timeout"):
        parser.addini("timeout", "the seconds that a test may take, for pytest-timeout, which is not installed")
    parser.addoption(
        "--scenarios", action="store_true", help="only the tests by which docs/decisions/proof.md shows a scenario"
    )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a run of the tests for GPUs, import only the files that have some: the others may need what is not here."""
    is_other = collection_path.name.startswith("test_") and MARK_OF_GPU not in collection_path.read_text("utf-8")
    return True if config.option.markexpr == ONLY_GPU and is_other else None


def pytest_configure(config: pytest.Config) -> None:
    """Take the cluster's variables out of the environment, and let child processes find an uninstalled checkout."""
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): for pytest-timeout, which is not installed")
    if config.option.markexpr == ONLY_GPU:
        # That machine has whatever versions of libraries it has, and what those warn of is not ours. Where one is
        # missing that a file needs, the other files are worth running.
        config.addinivalue_line("filterwarnings", "default")
        config.option.continue_on_collection_errors = True
    for name in list(os.environ):
        if name.startswith(("DMLC_", "KVDIST_", "MXNET_", "PS_")):
            del os.environ[name]
    if RUN_MARK not in os.environ:  # else this is one of several processes of a run
        os.environ[RUN_MARK] = str(os.getpid())
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # where pytest keeps the last runs' files
        os.environ["TMPDIR"] = os.environ["XDG_RUNTIME_DIR"] = tempfile.mkdtemp(prefix="run-")
        tempfile.tempdir = None  # to be looked up again
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell without job control starts what runs in the background so, and children would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup
    paths = [str(ROOT), str(ROOT / "launcher"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(path for path in paths if path))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Some cases of a test are slow; tests marked `gpu` are left out where no device is.

    Who asks for nothing but those gets each of them skipped with the reason.
    """
    mark_slow_cases(items)
    if config.option.scenarios:
        scenarios, _, _ = PROOF.read_text("utf-8").partition("\n## Rules and their mutants\n")
        shown = set(re.findall(r"`(test_\w+)`", scenarios))
        config.hook.pytest_deselected(items=[item for item in items if item.originalname not in shown])
        items[:] = [item for item in items if item.originalname in shown]
    of_gpus = [item for item in items if item.get_closest_marker("gpu")]
    for path in {item.path for item in of_gpus}:
        if MARK_OF_GPU not in path.read_text("utf-8"):
            raise pytest.UsageError(f"write {MARK_OF_GPU} into {path}: without it `pytest -m gpu` passes the file over")
    if not of_gpus or cuda_is_available():
        return
    if config.option.markexpr != ONLY_GPU:
        config.hook.pytest_deselected(items=of_gpus)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        return
    for item in of_gpus:
        item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while modules are imported and tests are found: nearly all that this makes stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Take what collecting has made, half a million objects, out of what each collection of garbage looks through.

    The checks below collect garbage after many tests, which took half a second each.
    """
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say aloud what nobody ran."""
    if config.option.markexpr != ONLY_GPU and not cuda_is_available():
        terminalreporter.write_line("LEFT OUT: the tests marked gpu, for want of a CUDA device; `make gpu` runs them")


def mark_slow_cases(items: list[pytest.Item]) -> None:
    """Mark the cases slow that ``@pytest.mark.slow_cases`` above their test names, by what pytest writes in brackets.

    Raises:
        pytest.UsageError: there is no such case, although all cases of the test were collected.
    """
    collected: dict[str, set[str]] = {}
    for item in items:
        test, _, case = item.nodeid.partition("[")
        collected.setdefault(test, set()).add(case.removesuffix("]"))
        for marker in item.iter_markers("slow_cases"):
            if case.removesuffix("]") in marker.args:
                item.add_marker(pytest.mark.slow)
    for item in items:
        test = item.nodeid.partition("[")[0]
        named = {case for marker in item.iter_markers("slow_cases") for case in marker.args}
        if len(collected[test]) > 1 and (stale := named - collected[test]):
            raise pytest.UsageError(f"slow_cases of {test} names cases that do not exist: {', '.join(sorted(stale))}")


def cuda_is_available() -> bool:
    """Whether the driver is here and sees a CUDA device, and torch too where that is installed."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0 or not count.value:
        return False
    if importlib.util.find_spec("torch") is None:
        return True
    import torch

    return torch.cuda.is_available()


# Per test: threads, children, descriptors.


@pytest.fixture(autouse=True)
def nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves a thread, a child process or an open socket, pipe or memory file.

    On a GPU descriptors are not counted: CUDA opens pipes and events for itself when it likes, and keeps them.
    """
    threads, children, descriptors = set(threading.enumerate()), child_processes(), open_descriptors()
    yield
    deadline = time.monotonic() + GRACE_S
    left = [*new_threads(threads, deadline), *new_children(children, deadline)]
    if request.node.get_closest_marker("gpu") is None:
        left += new_descriptors(descriptors, deadline)
    if left:
        pytest.fail("left behind by this test: " + "; ".join(left), pytrace=False)


def new_threads(before: set[threading.Thread], deadline: float) -> list[str]:
    """Threads that were not there and do not end by the deadline."""
    for thread in threads_of_python() - before:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))
    return [f"thread {thread.name!r}" for thread in threads_of_python() - before]


def threads_of_python() -> set[threading.Thread]:
    """All threads but those of a library's own pool, such as TensorFlow's, which Python shows once they call it."""
    return {thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}


def child_processes() -> set[int]:
    """Process ids of this process's children; empty where the system does not tell."""
    children: set[int] = set()
    for task in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # the thread may have ended, or the kernel may lack the file
            children.update(int(pid) for pid in (task / "children").read_text().split())
    return children


def new_children(before: set[int], deadline: float) -> list[str]:
    """Children that were not there, that no one has waited for, and that do not end by the deadline."""
    if child_processes() <= before:
        return []
    gc.collect()  # a Popen that ended is reaped when it is collected
    names = []
    for pid in child_processes() - before - {tracker_pid()}:
        if not ends_by(pid, deadline):
            names.append(f"process {pid} ({command_of(pid)})")
    return names


def tracker_pid() -> int | None:
    """The helper process that the standard library starts once and keeps."""
    return getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)


def ends_by(pid: int, deadline: float) -> bool:
    """Wait for a child's end and reap it."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        ended = bool(select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0])
    finally:
        os.close(descriptor)
    if ended:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    return ended


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200].strip()
    except OSError:
        return "gone"


def open_descriptors() -> Counter[str]:
    """How many descriptors of each kind that a leak would be made of; plain files come and go with capturing."""
    kinds: Counter[str] = Counter()
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else []:
        with contextlib.suppress(OSError):
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:", "/dev/shm/")):
                kinds[target.split(":[")[0].split(" ")[0]] += 1
    return kinds


def new_descriptors(before: Counter[str], deadline: float) -> list[str]:
    """Kinds of descriptors of which there are more than there were, and still are at the deadline."""
    if not open_descriptors() - before:
        return []
    gc.collect()
    while (grown := grown_since(before)) and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)  # a thread of a library closes its own when it comes to that
    return [f"{count} more open {kind}" for kind, count in grown.items()]


def grown_since(before: Counter[str]) -> Counter[str]:
    """How many more descriptors there are now, but for the one that the standard library keeps."""
    grown = open_descriptors() - before
    if getattr(multiprocessing.resource_tracker._resource_tracker, "_fd", None) is not None:
        grown["pipe"] -= 1
    return +grown


@pytest.fixture(scope="session")
def forked() -> Iterator[type[Forked]]:
    """`subprocess.Popen` that forks."""
    with forking() as popen:
        yield popen


@pytest.fixture
def popen() -> type[subprocess.Popen[bytes]]:
    """What starts the processes of a job: a folder of tests may have another way."""
    return subprocess.Popen


@pytest.fixture
def job(popen: type[subprocess.Popen[bytes]]) -> Iterator[Job]:
    """Processes of one cluster. Afterwards no process, port or temporary file of it may be left."""
    # Not pytest's own directory: its path is too long for the sockets that the standard library makes there.
    folder = Path(tempfile.mkdtemp(prefix="job-"))
    job = Job(folder, uuid.uuid4().hex, popen)
    try:
        yield job
        left = job.left_behind(GRACE_S)
        assert not left, f"left behind: {'; '.join(left)}\n{job.transcript()}"
    finally:
        job.close()
        shutil.rmtree(folder)


# Once, at the end: what only the machine remembers.


def run_files() -> list[str]:
    """Files of kvdist in this run's directory for temporary files, which is also that for sockets and secrets."""
    return sorted(str(path) for path in Path(os.environ["XDG_RUNTIME_DIR"]).rglob(OURS))


def marked_processes() -> list[str]:
    """Processes that descend from this run and are not part of it."""
    mark = f"{RUN_MARK}={os.environ[RUN_MARK]}".encode()
    own = {os.getpid(), os.getppid(), tracker_pid()}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int(folder.name) not in own and mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(f"process {folder.name} ({command_of(int(folder.name))})")
    return found


def left_on_the_machine() -> list[str]:
    """Processes and files of this run."""
    return marked_processes() + run_files()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Turn a run red that leaves processes or files on the machine."""
    if os.environ[RUN_MARK] != str(os.getpid()):
        return  # one of several: the process that started them looks when all are done
    deadline = time.monotonic() + GRACE_S
    while (left := left_on_the_machine()) and time.monotonic() < deadline:
        time.sleep(LOOK_AGAIN_S)  # a guard that is just ending what it guards, say; nobody's child can be waited for
    if left:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        print("\nleft behind on this machine by the test run: " + "; ".join(left), file=sys.stderr)
    shutil.rmtree(os.environ["XDG_RUNTIME_DIR"], ignore_errors=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Name what failed once more, as the last lines: of a log that was cut, the end is what is left."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        return  # one of several
    reports = [*reporter.stats.get("failed", ()), *reporter.stats.get("error", ())]
    for name in dict.fromkeys(report.nodeid for report in reports):
        print(f"failed: {name}", file=sys.stderr)
