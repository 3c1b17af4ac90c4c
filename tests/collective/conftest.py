"""What the tests of collectives share."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from kvdist.collective.engine import CollectiveEngine
from kvdist.config.environment import World


@pytest.fixture(scope="session", autouse=True)
def descriptors_of_the_process() -> None:
    """What torch opens once and keeps is there before a test is watched: gloo's loop of events, and the store's."""
    TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=10), False)
    CollectiveEngine(World()).close()
