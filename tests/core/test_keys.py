"""The keys of a store, as the scheduler knows them: declared, agreed, placed."""

from __future__ import annotations

import pytest

from kvdist.core.machine import NEVER, Send
from kvdist.core.scheduler.keys import DISPUTE_S, StoreKeys
from kvdist.dtypes import DType
from kvdist.nodes import Member, worker
from kvdist.protocol.messages import Declare, Placed

FLOAT32, INT32 = int(DType.FLOAT32), int(DType.INT32)


def member(rank: int) -> Member:
    return Member(worker(rank), rank + 1)


def declare(
    store: StoreKeys, rank: int, keys: dict[int | str, tuple[int, ...]], dtype: int = FLOAT32, mode: str = "sync"
) -> str:
    dtypes, forms = (dtype,) * len(keys), ("",) * len(keys)
    message = Declare(100 + rank, 0, mode, tuple(keys), tuple(keys.values()), dtypes, dtypes, forms)
    return store.declare(member(rank), message, 1.5)


def answered(store: StoreKeys) -> list[Placed]:
    answers = []
    for effect in store.take_answers():
        assert isinstance(effect, Send) and isinstance(effect.message, Placed)
        assert effect.to.node.rank == effect.message.request - 100
        answers.append(effect.message)
    return answers


@pytest.fixture
def store() -> StoreKeys:
    return StoreKeys(0, "sync", member(0), 64, lambda pushes: set())


def test_a_key_is_agreed_when_every_live_worker_has_declared_it(store: StoreKeys) -> None:
    assert declare(store, 0, {"w": (2, 3)}) == ""
    assert store.take_agreed({0, 1}) == []
    declare(store, 1, {"w": (2, 3)})
    (entry,) = store.take_agreed({0, 1})
    assert (entry.key, entry.shape) == ("w", (2, 3))
    assert store.take_agreed({0, 1}) == []


def test_a_request_is_answered_when_its_last_key_is_placed(store: StoreKeys) -> None:
    declare(store, 0, {"a": (1,), "b": (1,)})
    a, b = store.take_agreed({0})
    store.mark_placed([a])
    assert answered(store) == []
    store.mark_placed([b])
    assert [answer.request for answer in answered(store)] == [100]
    assert answered(store) == []


def test_a_key_that_is_placed_is_answered_at_once_to_a_worker_that_declares_it_later(store: StoreKeys) -> None:
    declare(store, 0, {"a": (1,)})
    store.mark_placed(store.take_agreed({0}))
    answered(store)
    declare(store, 1, {"a": (1,)})
    assert [answer.request for answer in answered(store)] == [101]


ALIKE = "; every worker must build the same model: a key has the same shape and dtype on all"


def reason_of(store: StoreKeys) -> str:
    """Why every worker's request is refused, once no further worker is awaited."""
    assert store.give_up_disputed({0, 1, 2, 3}, store.due)
    (reason,) = {reason for _, reason in store.take_conflicts()}
    return reason


def test_the_workers_that_declare_another_shape_are_named_first_with_what_the_others_say(store: StoreKeys) -> None:
    for rank in (1, 2, 0, 3):
        assert declare(store, rank, {"w": (10, 5 if rank == 2 else 4)}) == ""
        assert store.take_conflicts() == [], "they wait for the others"
        assert store.give_up_disputed({0, 1, 2, 3}, 1.5) == (rank == 3)
    failed = store.take_conflicts()
    others = "worker-0, worker-1 and worker-3 with shape (10, 4)"
    assert {reason for _, reason in failed} == {f"worker-2 declares key 'w' with shape (10, 5); {others}{ALIKE}"}
    assert sorted(request.member.node.rank for request, _ in failed) == [0, 1, 2, 3] and store.due == NEVER


def test_a_worker_that_does_not_come_is_awaited_for_a_second(store: StoreKeys) -> None:
    declare(store, 0, {"w": (2, 3)})
    declare(store, 1, {"w": (6,)})
    assert store.due == 1.5 + DISPUTE_S and not store.give_up_disputed({0, 1, 2}, 1.6)
    with_others = f"worker-0 declares key 'w' with shape (2, 3); worker-1 with shape (6,){ALIKE}"
    assert reason_of(store) == with_others


def test_only_what_differs_is_told(store: StoreKeys) -> None:
    declare(store, 0, {"w": (2,)})
    declare(store, 1, {"w": (2,)}, INT32)
    assert reason_of(store) == f"worker-0 declares key 'w' with dtype float32; worker-1 with dtype int32{ALIKE}"


def test_a_worker_that_comes_late_to_a_disagreement_gets_the_same_error(store: StoreKeys) -> None:
    declare(store, 0, {"w": (2,)})
    declare(store, 1, {"w": (3,)})
    reason = reason_of(store)
    assert declare(store, 2, {"w": (2,)}) == reason
    assert store.take_agreed({0, 1, 2}) == []


def test_a_disagreement_fails_whole_requests_and_only_those_that_have_the_key(store: StoreKeys) -> None:
    declare(store, 0, {"good": (1,), "bad": (1,)})
    declare(store, 2, {"other": (1,)})
    declare(store, 1, {"bad": (2,)})
    assert store.give_up_disputed({0, 1}, 1.5)
    assert [request.member for request, _ in store.take_conflicts()] == [member(0), member(1)]
    assert [request.member for request in store.requests] == [member(2)]


def test_two_types_of_store_are_an_error(store: StoreKeys) -> None:
    declare(store, 0, {"w": (2,)})
    assert "store 0 is sync on worker-0 and async on worker-1" in declare(store, 1, {"w": (2,)}, mode="async")


def test_a_wait_names_a_key_and_the_workers_that_have_not_declared_one(store: StoreKeys) -> None:
    assert not list(store.waits({0, 1, 2}))
    declare(store, 1, {"a": (1,), "b": (1,)})
    (wait,) = store.waits({0, 1, 2})
    assert (wait.member, wait.request, wait.workers) == (member(1), 101, (0, 2))
    assert wait.sentence(3.0) == "waiting 1.5 s for worker-0, worker-2 to initialise key 'a'"


def test_a_worker_that_left_is_not_waited_for(store: StoreKeys) -> None:
    declare(store, 0, {"w": (2,)})
    assert [entry.key for entry in store.take_agreed({0})] == ["w"]


def test_a_placement_lists_slices_and_homes_in_the_order_of_the_keys(store: StoreKeys) -> None:
    declare(store, 0, {"a": (1,), "b": (1,)})
    declare(store, 1, {"b": (1,), "a": (1,)})
    entries = store.take_agreed({0, 1})
    for number, entry in enumerate(entries):
        entry.first_slice, entry.home = 10 + number, number
    store.mark_placed(entries)
    placement = answered(store)[1].placement
    assert (placement.first_slices, placement.homes, placement.slice_bytes) == ((11, 10), (1, 0), 64)
