"""A cluster of real processes for each test, and the proof that nothing of it is left."""

from __future__ import annotations

import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.processes import Job

GONE_S = 30.0
"""How long what a test has already ended may take to be gone: the guard of a killed launcher waits 3 s by itself."""


@pytest.fixture
def job() -> Iterator[Job]:
    """Processes of one cluster. Afterwards no process, port or temporary file of it may be left."""
    # Not pytest's own directory: its path is too long for the sockets that the standard library makes there.
    folder = Path(tempfile.mkdtemp(prefix="job-"))
    job = Job(folder, uuid.uuid4().hex)
    try:
        yield job
        deadline = time.monotonic() + GONE_S
        while (left := job.left_behind()) and time.monotonic() < deadline:
            time.sleep(0.05)  # orphans are nobody's children, so their end cannot be waited for
        assert not left, f"left behind: {'; '.join(left)}\n{job.transcript()}"
    finally:
        job.close()
        shutil.rmtree(folder)
