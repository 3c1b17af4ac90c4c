"""Which threads wait in calls of kvdist, which may act, and how a push waits for room."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvdist.runtime import waits
from kvdist.runtime.waits import NEVER_CALLED_S, AwaitedFuture, UnderWay, UserThreads, note_call

THREADS = UserThreads(UnderWay(100))


@pytest.fixture(autouse=True)
def only_threads_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run the tests may act, too."""
    frames_of_all = sys._current_frames
    others = frames_of_all().keys() - {threading.get_ident()}
    frames = lambda: {number: frame for number, frame in frames_of_all().items() if number not in others}  # noqa: E731
    monkeypatch.setattr(sys, "_current_frames", frames)


def wait_until(is_so: Callable[[], bool]) -> None:
    """Look again and again until something holds that another thread does."""
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def nothing_wrong() -> None:
    """The push can still be made."""


@contextmanager
def running(
    target: Callable[[], object], end: Callable[[], object], daemon: bool = False
) -> Iterator[threading.Thread]:
    """A thread that runs until `end` has been called."""
    thread = threading.Thread(target=target, daemon=daemon)
    thread.start()
    try:
        yield thread
    finally:
        end()
        thread.join()


def calling(target: Callable[[], object]) -> Callable[[], None]:
    """The same of a thread that has called kvdist."""

    def run() -> None:
        note_call()
        target()

    return run


def blocked_since_elsewhere(future: AwaitedFuture[None]) -> list[float | None]:
    """What is said while the main thread waits for a future that another thread resolves, which does not count."""
    said: list[float | None] = []

    def look() -> None:
        try:
            wait_until(lambda: THREADS.longest_wait_since() is not None)
            said.append(THREADS.blocked_since())
        finally:
            future.set_result(None)

    thread = threading.Thread(target=look, name="kvdist-node")
    thread.start()
    future.result()
    thread.join()
    return said


def test_a_program_whose_only_thread_waits_is_blocked_until_the_wait_ends():
    (since,) = blocked_since_elsewhere(AwaitedFuture())
    assert since is not None and since <= time.monotonic()
    assert THREADS.blocked_since() is None
    assert THREADS.longest_wait_since() is None


def test_a_thread_that_sleeps_or_waits_for_anything_else_may_act():
    event = threading.Event()
    with running(calling(event.wait), event.set) as thread:
        wait_until(lambda: thread in waits._callers)
        assert blocked_since_elsewhere(AwaitedFuture()) == [None]


def test_a_daemon_that_has_never_called_kvdist_may_act_for_a_minute():
    event = threading.Event()
    began = time.monotonic()
    with running(event.wait, event.set, daemon=True):
        (since,) = blocked_since_elsewhere(AwaitedFuture())
    assert since is not None
    assert began + NEVER_CALLED_S <= since <= time.monotonic() + NEVER_CALLED_S


def test_the_threads_that_may_act_while_others_wait_are_named():
    event, future = threading.Event(), AwaitedFuture[None]()
    note_call()
    waiting = running(future.result, lambda: future.set_result(None))
    with running(event.wait, event.set, daemon=True) as idle, waiting:
        idle.name = "metrics"
        wait_until(lambda: THREADS.longest_wait_since() is not None)
        now = time.monotonic()
        assert sorted(THREADS.may_act(now).split(", ")) == ["'MainThread'", "'metrics'"]
        assert THREADS.may_act(now + NEVER_CALLED_S) == "'MainThread'"
    assert THREADS.may_act(time.monotonic()) == ""


def test_a_thread_that_is_no_daemon_may_act_for_ever():
    event = threading.Event()
    with running(event.wait, event.set):
        assert blocked_since_elsewhere(AwaitedFuture()) == [None]


def test_an_executor_may_act_while_it_works_and_not_while_it_is_idle():
    event, began = threading.Event(), threading.Event()

    def work() -> None:
        note_call()
        began.set()
        event.wait()

    with ThreadPoolExecutor(1) as executor:
        working = executor.submit(work)
        began.wait()
        assert blocked_since_elsewhere(AwaitedFuture()) == [None]
        event.set()
        working.result()
        said: list[float | None] = [None]

        def idle() -> bool:  # the thread of the executor may still be on its way back to the queue
            said[:] = blocked_since_elsewhere(AwaitedFuture())
            return said[0] is not None

        wait_until(idle)


def test_a_wait_with_a_time_out_is_not_one_that_only_others_can_end():
    future: AwaitedFuture[None] = AwaitedFuture()
    with pytest.raises(TimeoutError):
        future.result(0.001)
    waiting = threading.Thread(target=lambda: future.exception(60))
    waiting.start()
    wait_until(lambda: future._condition._waiters)  # type: ignore[attr-defined]
    assert THREADS.longest_wait_since() is None
    future.set_result(None)
    waiting.join()


def test_a_push_enters_at_once_while_there_is_room_and_waits_until_there_is():
    under_way = UnderWay(100)
    under_way.enter(60, nothing_wrong)
    under_way.enter(40, nothing_wrong)
    with running(lambda: under_way.enter(30, nothing_wrong), lambda: under_way.leave(100)):
        wait_until(lambda: under_way.waiting == 1)
        assert UserThreads(under_way).room_wait() == (
            "for room: 100 bytes are under way, and KVDIST_UNDER_WAY_BYTES allows 100"
        )
        under_way.leave(20)
        under_way.enter(0, nothing_wrong)
        assert under_way.nbytes == 80 and under_way.waiting == 1
    assert under_way.nbytes == 10
    assert UserThreads(under_way).room_wait() == ""


def test_a_push_that_is_larger_than_all_room_enters_alone():
    under_way = UnderWay(100)
    under_way.enter(500, nothing_wrong)
    assert under_way.nbytes == 500


def test_there_is_always_room_for_two_contributions_to_all_keys():
    under_way = UnderWay(1)
    under_way.grow(50)
    under_way.enter(50, nothing_wrong)
    under_way.enter(50, nothing_wrong)
    with running(lambda: under_way.enter(50, nothing_wrong), lambda: under_way.grow(25)):
        wait_until(lambda: under_way.waiting == 1)
    assert under_way.nbytes == 150


def test_a_push_that_waits_ends_with_what_makes_it_impossible():
    under_way = UnderWay(100)
    under_way.enter(100, nothing_wrong)
    raised: list[BaseException] = []

    def check() -> None:
        raise RuntimeError("closed")

    def push() -> None:
        try:
            under_way.enter(1, check)
        except RuntimeError as error:
            raised.append(error)

    with running(push, under_way.wake):
        wait_until(lambda: under_way.waiting == 1)
    assert [str(error) for error in raised] == ["closed"]
    assert under_way.nbytes == 100 and under_way.waiting == 0


def test_the_thread_that_brings_the_answers_does_not_wait_for_them():
    under_way = UnderWay(100)
    under_way.enter(100, nothing_wrong)
    thread = threading.Thread(target=lambda: under_way.enter(100, nothing_wrong), name="kvdist-node")
    thread.start()
    thread.join()
    assert under_way.nbytes == 200


def test_a_thread_knows_for_how_long_it_has_waited_in_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    before = waits.waited_s()
    with waits.WaitingCall():
        now += 2.0
        with waits.WaitingCall():  # of a signal handler of the user
            now += 1.0
    now += 5.0
    assert waits.waited_s() - before == 3.0
    with ThreadPoolExecutor(1) as others:
        assert others.submit(waits.waited_s).result() == 0.0
