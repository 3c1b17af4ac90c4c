"""Three machines for a module of tests; skipped, aloud, where they cannot be made."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.machines.launching import Launched
from tests.machines.machines import GONE_S, Machines, obstacle, running

PROGRAMS = Path(__file__).with_name("programs")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    """The launcher's machine, and d1, d2 and d3."""
    reason = obstacle()
    if reason:
        pytest.skip(f"NO MACHINES CAN BE MADE HERE, SO STARTING JOBS OVER SSH IS NOT TESTED: {reason}")
    folder = Path(tempfile.mkdtemp(prefix="machines-", dir="/tmp"))
    try:
        with running(folder, ["d1", "d2", "d3"]) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """The folder in which launchers are called: programs, a file beside them, and a hostfile."""
    project = tmp_path / "project"
    shutil.copytree(PROGRAMS, project, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EXAMPLES / "cifar10_dist.py", project)
    (project / "beside.txt").write_text("what lies beside\n")
    (project / "hosts").write_text("d1\nd2\n")
    return project


@pytest.fixture
def launch(machines: Machines, project: Path) -> Iterator[Callable[..., Launched]]:
    """``launch('-n', '2', ...)``: run kvdist-launch in the project's folder on the launcher's machine.

    Afterwards it must have ended, and no machine may have a process left.
    """
    machines.write_ssh_config()
    for machine in machines.machines.values():
        clear(machine.destination)
    started: list[Launched] = []

    def start(*words: str, **variables: str) -> Launched:
        started.append(Launched(machines, project, words, variables))
        return started[-1]

    yield start
    for each in started:
        each.end()
    assert machines.left_after(GONE_S) == []


def clear(folder: Path) -> None:
    """Remove what is in a folder; the folder itself is mounted elsewhere and must stay."""
    for entry in folder.iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
