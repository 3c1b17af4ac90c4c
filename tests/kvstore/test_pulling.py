"""A future of a pull behaves as any other future, whenever it is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ALL_COMPLETED, Future, as_completed, wait
from concurrent.futures import TimeoutError as FutureTimeout

import pytest

from kvdist.kvstore.coalescing import PullFuture, fail, fulfil
from tests.cases import each


class Owner:
    """Counts how often somebody hurried, and may do something about it."""

    def __init__(self, act: Callable[[], None] = lambda: None) -> None:
        self.hurried = 0
        self._act = act

    def hurry(self) -> None:
        self.hurried += 1
        self._act()


def test_it_is_a_future_that_cannot_be_cancelled() -> None:
    future = PullFuture(Owner().hurry)
    assert isinstance(future, Future)
    assert future.running() and not future.done()
    assert not future.cancel() and not future.cancelled()
    fulfil([future])
    assert future.done() and not future.running() and not future.cancel()


def test_an_outcome_that_came_before_anybody_looked_is_there() -> None:
    owner = Owner()
    good, bad = PullFuture(owner.hurry), PullFuture(owner.hurry)
    fulfil([good])
    fail([bad], ValueError("no"))
    assert good.result() is None and good.exception() is None
    with pytest.raises(ValueError, match="no"):
        bad.result()
    assert isinstance(bad.exception(), ValueError)
    assert owner.hurried == 0


@each("look", [Future.result, Future.exception, PullFuture.result, PullFuture.exception])
def test_who_waits_hurries_what_has_not_left(look: Callable[[PullFuture], object]) -> None:
    owner = Owner(lambda: fulfil([future]))
    future = PullFuture(owner.hurry)
    assert look(future) is None
    assert owner.hurried


def test_waiting_has_a_time_limit() -> None:
    future = PullFuture(Owner().hurry)
    for _ in range(2):
        with pytest.raises(FutureTimeout):
            future.result(timeout=0)
        with pytest.raises(FutureTimeout):
            future.exception(timeout=0)
    future.set_result(None)
    assert future.result(timeout=0) is None


def test_callbacks_get_the_future_itself_before_and_after_its_end() -> None:
    owner = Owner()
    future = PullFuture(owner.hurry)
    called: list[Future[None]] = []
    future.add_done_callback(called.append)
    assert called == [] and owner.hurried == 0
    future.set_exception(ValueError("no"))
    future.add_done_callback(called.append)
    assert called == [future, future]
    assert isinstance(future.exception(), ValueError)


def test_waiting_after_a_callback_was_added_hurries_too() -> None:
    owner = Owner(lambda: fulfil([future]))
    future = PullFuture(owner.hurry)
    future.add_done_callback(lambda _: None)
    assert future.result(timeout=0) is None
    assert owner.hurried == 1


def test_wait_and_as_completed_of_the_standard_library_know_it() -> None:
    owner = Owner()
    early, late, failed = (PullFuture(owner.hurry) for _ in range(3))
    fulfil([early])
    done, waiting = wait([early, late, failed], timeout=0)
    assert done == {early} and waiting == {late, failed}
    assert owner.hurried
    arriving = as_completed([early, late, failed])
    assert next(arriving) is early
    fail([failed], ValueError("no"))
    assert next(arriving) is failed
    fulfil([late])
    assert next(arriving) is late
    assert wait([early, late, failed], 0, ALL_COMPLETED).not_done == set()


def test_asyncio_can_wait_for_it() -> None:
    async def both() -> list[object]:
        good, bad = PullFuture(Owner().hurry), PullFuture(Owner().hurry)
        wrapped = [asyncio.wrap_future(good), asyncio.wrap_future(bad)]
        fulfil([good])
        fail([bad], ValueError("no"))
        return list(await asyncio.gather(*wrapped, return_exceptions=True))

    good, bad = asyncio.run(both())
    assert good is None and isinstance(bad, ValueError)


def test_an_attribute_that_no_future_has_is_missing() -> None:
    future = PullFuture(Owner().hurry)
    for _ in range(2):
        with pytest.raises(AttributeError, match="'PullFuture' object has no attribute 'colour'"):
            _ = future.colour
    assert "running" in repr(future)
