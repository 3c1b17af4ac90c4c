"""Black-box tests: the public API and the command lines, in real processes. Nothing here knows how kvdist is built.

The processes are forked; a file that is about their start says so with its own `popen`.

What a test asserts is what a document promises, so these tests stay as they are when the code is rebuilt.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forks import Forked
from tests.integration.processes import Job
from tests.namespaces import Host, link


@pytest.fixture
def popen(forked: type[Forked]) -> type[Forked]:
    return forked


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """``script('''...''')`` writes a worker's program and returns its path, for `Job.launch` and `Job.node`."""

    def write(text: str, name: str = "train.py") -> str:
        path = tmp_path / name
        path.write_text(textwrap.dedent(text))
        return str(path)

    return write


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts with an unlimited link; `Host.limit` makes it slow. Mark such tests ``machines``."""
    with link() as pair:
        yield pair


@pytest.fixture
def cluster_over_link(job: Job, hosts: tuple[Host, Host]) -> Callable[..., None]:
    """Start scheduler and servers on the first host, workers on the second, by hand, as in docs/manual-start.md."""

    def start(workers: int, servers: int, *command: str, **variables: str) -> None:
        near, far = hosts
        names = ["scheduler", *(f"server-{i}" for i in range(servers)), *(f"worker-{i}" for i in range(workers))]
        for name in names:
            host = far if name.startswith("worker") else near
            own = {"DMLC_PS_ROOT_URI": near.address, "DMLC_NODE_HOST": host.address, "KVDIST_SECURITY": "none"}
            job.node(name, workers, servers, *command, host=host, **{**own, **variables})

    return start
