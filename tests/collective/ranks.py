"""Several ranks in one process, each a thread with an engine of its own, over real gloo groups on loopback."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from torch.distributed import HashStore

from kvdist.collective import group
from kvdist.collective.basics import using
from kvdist.collective.engine import DEFAULTS, CollectiveEngine
from kvdist.config.environment import World
from kvdist.config.settings import CollectiveSettings

PATIENCE_S = 120.0


def world_of(rank: int, size: int) -> World:
    """A rank on one machine."""
    return World(rank, size, rank, size, launcher="a test")


@contextlib.contextmanager
def bystanders() -> Iterator[None]:
    """Within it the threads that run already are none of the ranks', which else may call what others wait for."""
    before, calls_nothing = set(threading.enumerate()), group._calls_nothing
    with mock.patch.object(group, "_calls_nothing", lambda thread: thread in before or calls_nothing(thread)):
        yield


def run_ranks(
    size: int, function: Callable[..., Any], *args: Any, settings: CollectiveSettings = DEFAULTS
) -> list[Any]:
    """Call ``function(rank, *args)`` on as many ranks; what each returned, or the exception that it raised.

    The function uses `kvdist.collective` as a program does after `init`.
    """
    store = HashStore()
    results: list[Any] = [None] * size

    def be(rank: int) -> None:
        try:
            with using(CollectiveEngine(world_of(rank, size), find=lambda _, __: store, settings=settings)) as engine:
                try:
                    results[rank] = function(rank, *args)
                finally:
                    engine.close()
        except Exception as error:  # noqa: BLE001 (the test looks at it)
            results[rank] = error

    threads = [threading.Thread(target=be, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(size)]
    with bystanders():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert not any(thread.is_alive() for thread in threads), f"ranks still run after {PATIENCE_S} s: {results}"
    return results


def returned(results: list[Any]) -> list[Any]:
    """What the ranks returned, if none of them raised."""
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
