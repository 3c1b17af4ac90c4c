"""A launcher run as a process of its own, with stand-ins for scheduler and servers."""

from __future__ import annotations

import os
import select
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvdist
import kvdist_launch
from tests.launcher import slurm_cluster

PACKAGES = [str(Path(package.__file__).parents[1]) for package in (kvdist, kvdist_launch)]
ROLES = str(Path(__file__).with_name("roles.py"))
DRIVER = """
import sys
from kvdist_launch.cli import main
raise SystemExit(main(sys.argv[2:], role_command=(sys.executable, sys.argv[1])))
"""
TIMEOUT_S = 50
FAILS_WHEN_READY = (
    "import os, time\n"
    "if os.environ['KVDIST_RANK'] != '1': time.sleep(60)\n"
    "os.open(os.environ['READY_FIFO'], os.O_RDONLY)\n"
    "exit(3)"
)
"""A worker: rank 1 fails once a server has said that it and the scheduler are there, the others do not end."""


SSH = """\
#!/bin/sh
# In place of ssh: the last word is what the far shell would run; hosts named "deaf" do not let anybody in,
# "changed" have another key, "loud" greet at length.
for word in "$@"; do host=$before before=$word; done
[ "$host" = hung ] && exec sleep 60
[ -e "$(dirname "$0")/../locked" ] && host=deaf
[ "$host" = deaf ] && { echo "deaf: Permission denied (publickey)." >&2; exit 255; }
[ "$host" = changed ] && { cat "$(dirname "$0")/../warning" >&2; exit 255; }
[ "$host" = loud ] && seq 100000
echo "Welcome to $host, you have new mail"
SSH_CONNECTION="127.0.0.1 5000 127.0.0.1 22" exec sh -c "$before"
"""


def prefix_of(name: str) -> str:
    """What stands before the lines of ``worker-0``, for one."""
    role, _, rank = name.partition("-")
    return f"{role[0]}{rank} │ " if rank else "sched │ "


class Launch:
    """One run of the launcher: its output so far, and how to talk to it."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str]) -> None:
        argv = [sys.executable, "-c", DRIVER, ROLES, *words]
        # Unbuffered: what was read ahead of a line would be missing from what `finish` gives, from somewhere in a line.
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)

    def line_with(self, text: str) -> str:
        """Read standard output up to a line that contains `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line.decode():
                return line.decode()
        raise AssertionError(f"no line contains {text!r}")

    def pid_of(self, name: str) -> int:
        """The pid that the process `name` printed."""
        return int(self.line_with(f"{prefix_of(name)}pid ").split()[-1])

    def error_line_with(self, text: str) -> str:
        """Read standard error up to a line that contains `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line.decode():
                return line.decode()
        raise AssertionError(f"no line contains {text!r}")

    def finish(self) -> tuple[int, str, str]:
        """The exit code and what was not yet read of standard output and standard error."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, (out or b"").decode(errors="surrogateescape"), err.decode()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """``launch('-n', '2', …)``: start the launcher, and see that it has ended when the test has."""
    fifo = tmp_path / "goodbye"
    os.mkfifo(fifo)
    own = {"PYTHONPATH": os.pathsep.join(PACKAGES), "GOODBYE_FIFO": str(fifo)}
    started: list[Launch] = []

    def start(*words: str, env: dict[str, str] | None = None) -> Launch:
        started.append(Launch(words, {**os.environ, **own, **(env or {})}))
        return started[-1]

    yield start
    for each in started:
        each.process.send_signal(signal.SIGTERM)  # Does nothing to one that has ended.
        each.process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def launch_on(launch, tmp_path, monkeypatch):
    """``launch_on('a,b', ...)``: run a job on hosts of these names, all of them this machine."""
    tools = tmp_path / "tools"
    tools.mkdir()
    ssh = tools / "ssh"
    ssh.write_text(SSH)
    ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return lambda hosts, *words: launch("-H", hosts, "--security", "none", *words)


@pytest.fixture
def ready(tmp_path: Path) -> tuple[str, str]:
    """The option by which servers say that they and the scheduler are there, for `FAILS_WHEN_READY`."""
    os.mkfifo(tmp_path / "ready")
    return "--env", f"READY_FIFO={tmp_path / 'ready'}"


@pytest.fixture
def is_gone() -> Callable[..., bool]:
    """``is_gone(pid, timeout_s)``: whether that process has ended, waiting for it at most so long."""

    def check(pid: int, timeout_s: float = 0.0) -> bool:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)

    return check


@pytest.fixture
def env() -> dict[str, str]:
    """The test's own variables, with which a process finds the packages."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(PACKAGES)}


@pytest.fixture
def mpi_env(env: dict[str, str], tmp_path: Path) -> dict[str, str]:
    """Variables for Open MPI's commands."""
    if shutil.which("mpirun") is None:
        pytest.skip("OPEN MPI IS NOT TESTED: apt install openmpi-bin")
    # A root user in a container with few cores, which only a test is.
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    env.pop("PYTHONUNBUFFERED", None)
    return {**env, **as_root, "OMPI_MCA_rmaps_base_oversubscribe": "1", "HOME": str(tmp_path)}


@pytest.fixture(scope="module")
def slurm_env(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables for Slurm's commands, which reach a cluster of one node."""
    why = slurm_cluster.missing()
    if why is not None:
        pytest.skip(f"SLURM IS NOT TESTED: {why}")
    with slurm_cluster.slurm_cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield {**variables, "PYTHONPATH": os.pathsep.join(PACKAGES)}
