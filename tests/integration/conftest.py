"""The processes of these tests are forked; a file that is about their start says so with its own `popen`."""

from __future__ import annotations

import pytest

from tests.forks import Forked


@pytest.fixture
def popen(forked: type[Forked]) -> type[Forked]:
    return forked
