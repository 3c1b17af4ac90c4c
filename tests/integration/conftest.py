"""The processes of these tests are forked; a file that is about their start says so with its own `popen`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.forks import Forked, forking


@pytest.fixture(scope="session")
def forked() -> Iterator[type[Forked]]:
    """`subprocess.Popen` that forks."""
    with forking() as popen:
        yield popen


@pytest.fixture
def popen(forked: type[Forked]) -> type[Forked]:
    return forked
