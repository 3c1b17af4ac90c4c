"""Which calls of a loop become one request, in which order requests are left, and how long they wait for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvdist.core.sharding import cut
from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import KeyInfo, Run, RunKind, Transfer, make_plan
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import coalescing
from kvdist.kvstore.backend import PLAIN, PushOptions
from kvdist.kvstore.coalescing import BATCH_S, PATIENCE_S, QUIET_S, Coalescer, PullFuture
from kvdist.kvstore.push_pull import SERVER_DECIDES, Staging, gathered, push_runs
from kvdist.runtime.node import Growing
from kvdist.transport.shared_memory.allocator import HeapAllocator

KEYS = [KeyInfo(i, (3,), DType.FLOAT32, tuple(cut(3, 4, 0, 1, i, 1 << 20))) for i in range(8)]


@dataclass
class Left:
    """A request that was left for the node's thread."""

    answer: Any
    make: Callable[[int], Transfer]
    growing: Growing
    transfer: Transfer | None = None

    def made(self) -> tuple[RunKind, list[int | str]]:
        """What it is, once it is made."""
        if self.transfer is None:
            self.transfer = self.make(1)
        return self.transfer.kind, list(self.answer.infos)


@dataclass
class Store:
    """As much of a store as gatherings need."""

    left: list[Left] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    """Bytes that are not under way any more."""
    gatherings: Coalescer = field(init=False)

    def __post_init__(self) -> None:
        def lay_out(
            infos: list[KeyInfo], bits: Any, encoded: Any, options: PushOptions, settings: Sequence[Any]
        ) -> tuple[Sequence[Run], Callable[[], None]]:
            plan = make_plan(infos, 1 << 20)
            own = Staging(plan, HeapAllocator(), Traffic()).fill(bits, REFERENCE, [None])
            runs = push_runs(plan, own.memory, bits, gathered(settings), options, [None], lambda _: False)
            return runs, own.release

        self.gatherings = Coalescer(
            lay_out,
            lambda infos, results: [],
            lambda answer, make, growing: self.left.append(Left(answer, make, growing)),
            lambda: None,
            self.errors.append,
            self.counted.append,
        )

    def push(self, *keys: int, value: float = 1.0, options: PushOptions = PLAIN, priority: int = 0) -> None:
        for key in keys:
            self.gatherings.push(KEYS[key], np.full(3, value, np.float32), SERVER_DECIDES, priority, options)

    def pull(self, *keys: int, finish: Callable[[], Any] | None = None, priority: int = 0) -> list[PullFuture]:
        out = np.zeros(3, np.float32)
        return [self.gatherings.pull(KEYS[key], out, finish, priority) for key in keys]

    def made(self) -> list[tuple[RunKind, list[int | str]]]:
        return [left.made() for left in self.left]


@pytest.fixture
def store() -> Store:
    return Store()


# What becomes one request.


def test_a_loop_of_pushes_and_one_of_pulls_are_two_requests(store: Store) -> None:
    store.push(2, 0, 1)
    store.pull(1, 0, 2)
    assert store.made() == [(RunKind.PUSH, [2, 0, 1]), (RunKind.PULL, [1, 0, 2])]


def test_a_loop_that_pushes_and_pulls_each_key_is_two_requests_too(store: Store) -> None:
    for key in range(4):
        store.push(key)
        store.pull(key)
    assert store.made() == [(RunKind.PUSH, [0, 1, 2, 3]), (RunKind.PULL, [0, 1, 2, 3])]


def test_a_push_of_a_key_that_was_pulled_comes_behind_that_pull(store: Store) -> None:
    store.push(0)
    store.pull(0, 1)
    store.push(1)
    store.pull(1)
    assert store.made() == [
        (RunKind.PUSH, [0]),
        (RunKind.PULL, [0, 1]),
        (RunKind.PUSH, [1]),
        (RunKind.PULL, [1]),
    ]


def test_a_key_that_comes_again_begins_another_request(store: Store) -> None:
    store.push(0, 1, 0)
    store.pull(3, 3)
    store.push(2)
    assert store.made() == [
        (RunKind.PUSH, [0, 1]),
        (RunKind.PUSH, [0]),
        (RunKind.PULL, [3]),
        (RunKind.PULL, [3]),
        (RunKind.PUSH, [2]),
    ]


def test_what_another_request_has_closed_or_the_node_has_taken_takes_in_nothing(store: Store) -> None:
    store.push(0)
    store.pull(1)
    store.gatherings.close()
    store.push(2)
    store.left[-1].made()
    store.push(3)
    store.pull(4)
    store.left[-1].made()
    store.pull(5)
    assert store.made()[2:] == [
        (RunKind.PUSH, [2]),
        (RunKind.PUSH, [3]),
        (RunKind.PULL, [4]),
        (RunKind.PULL, [5]),
    ]


def test_pushes_that_count_differently_do_not_mix(store: Store) -> None:
    store.push(0)
    store.push(1, options=PushOptions(average=False, samples=0))
    store.push(2, options=PushOptions(average=True, samples=8))
    assert store.made() == [(RunKind.PUSH, [0, 1]), (RunKind.PUSH, [2])]


def test_a_request_has_the_highest_priority_of_its_calls(store: Store) -> None:
    for key in range(3):
        store.push(key, priority=-key - 1)
        store.pull(key, priority=key)
    assert [left.make(1).priority for left in store.left] == [-1, 2]


def test_a_request_does_not_grow_for_ever(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coalescing, "BATCH_CALLS_MAX", 3)
    store.push(*range(5))
    assert store.made() == [(RunKind.PUSH, [0, 1, 2]), (RunKind.PUSH, [3, 4])]


def test_what_was_pushed_may_be_changed_at_once(store: Store) -> None:
    grad = np.ones(3, np.float32)
    store.gatherings.push(KEYS[0], grad, SERVER_DECIDES, 0, PLAIN)
    grad[:] = 7
    (run,) = store.left[0].make(1).runs
    assert run.payload is not None
    assert np.frombuffer(run.payload, np.float32, 3).tolist() == [1, 1, 1]


# How it ends.


def test_each_pull_is_done_when_its_own_key_is(store: Store) -> None:
    futures = store.pull(0, 1, 2)
    answer = store.left[0].answer
    answer.set_keys([2, 0], None)
    assert [future.done() for future in futures] == [True, False, True]
    answer.set_keys([1], None)
    answer.set_result(None)
    assert [future.result() for future in futures] == [None] * 3


def test_a_key_that_fails_fails_its_own_pull_only(store: Store) -> None:
    futures = store.pull(0, 1, 2)
    answer = store.left[0].answer
    answer.set_keys([1], ValueError("refused"))
    answer.set_keys([0], None)
    assert [future.done() for future in futures] == [True, True, False]
    answer.set_exception(KeyError("lost"))
    assert [type(future.exception()) for future in futures] == [type(None), ValueError, KeyError]


def test_a_result_is_where_it_is_wanted_before_its_future_is_done(store: Store) -> None:
    seen: list[bool] = []

    def wrong() -> None:
        raise ValueError("cannot be written")

    (good,) = store.pull(0, finish=lambda: seen.append(good.done()))
    (bad,) = store.pull(1, finish=wrong)
    (plain,) = store.pull(2)
    store.left[0].answer.set_keys([0, 1, 2], None)
    assert seen == [False]
    assert good.result() is None and plain.result() is None
    assert str(bad.exception()) == "cannot be written"


def test_the_error_of_pushes_is_kept_for_the_store(store: Store) -> None:
    store.push(0, 1)
    store.left[0].answer.set_exception(ValueError("refused"))
    assert [str(error) for error in store.errors] == ["refused"]


def test_the_bytes_of_pushes_are_under_way_until_they_are_counted_or_have_failed(store: Store) -> None:
    store.push(0, 1)
    store.made()
    assert store.counted == []
    store.left[0].answer.set_result(None)
    assert store.counted == [32]  # each is padded to 16
    store.push(2)
    store.left[1].answer.set_exception(ValueError("refused"))
    assert store.counted == [32, 16]


# How long it waits.


def test_it_waits_until_nothing_is_added_any_more(store: Store) -> None:
    store.push(0)
    growing = store.left[0].growing
    assert growing.due(10.0) == 10.0 + QUIET_S
    assert growing.due(10.002) == 10.0 + QUIET_S  # nothing came since
    store.push(1)
    assert growing.due(10.003) == 10.003 + QUIET_S
    for i in range(2, 8):
        store.push(i)
        due = growing.due(10.0 + BATCH_S * i / 7.01)
    assert due == 10.0 + BATCH_S  # while it grows, but not for ever


def test_a_loop_that_was_longer_the_last_time_is_waited_for(store: Store) -> None:
    store.push(0, 1, 2)
    store.left[0].made()
    store.push(0, 1)
    growing = store.left[1].growing
    assert growing.due(10.0) == 10.0 + PATIENCE_S
    assert growing.due(10.0 + BATCH_S) == 10.0 + PATIENCE_S  # nothing came since
    store.push(2)
    assert growing.due(10.001) == 10.001 + QUIET_S
    store.pull(0)
    assert store.left[2].growing.due(10.0) == 10.0 + QUIET_S  # pulls are another loop
    store.push(3)
    assert growing.due(11.0) == 10.0 + BATCH_S
    store.left[1].made()
    store.push(1)
    assert store.left[3].growing.due(20.0) == 20.0 + QUIET_S  # one that begins elsewhere is another loop


def test_a_loop_that_has_become_shorter_is_waited_for_once(store: Store) -> None:
    store.push(0, 1, 2)
    store.left[0].made()
    store.push(0, 1)
    assert store.left[1].growing.due(10.0) == 10.0 + PATIENCE_S
    store.left[1].made()
    store.push(0, 1)
    assert store.left[2].growing.due(20.0) == 20.0 + QUIET_S


def test_a_pull_after_the_node_has_stopped_fails_and_so_does_one_that_joins_what_will_not_be_made() -> None:
    store = Store()
    first = store.gatherings.pull(KEYS[0], np.zeros(3, np.float32), None, 0)
    error = RuntimeError("gone")
    store.left[0].answer.set_exception(error)
    later = store.gatherings.pull(KEYS[1], np.zeros(3, np.float32), None, 0)
    assert first.exception(0) is error
    assert len(store.left) == 2, "nothing joins what was given up"
    store.left[1].answer.set_exception(error)
    assert later.exception(0) is error


def test_what_is_refused_at_once_fails_the_call_that_began_it() -> None:
    error = RuntimeError("closed")

    class Closed(Store):
        def submit(self, answer: Any, *_: Any) -> None:
            answer.set_exception(error)

    store = Closed()
    store.gatherings._submit = store.submit
    future = store.gatherings.pull(KEYS[0], np.zeros(3, np.float32), None, 0)
    assert future.exception(0) is error
    store.gatherings.push(KEYS[0], np.ones(3, np.float32), SERVER_DECIDES, 0, PLAIN)
    assert error in store.errors
    assert sum(store.counted) == 16
