"""The scheduler's book of a store: declared, agreed, placed."""

from __future__ import annotations

import pytest

from kvdist.core.scheduler.keybook import KeyBook, KeyRequest
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch
from kvdist.nodes import Member, worker
from kvdist.protocol.messages import Declare

FLOAT32, INT32 = int(DType.FLOAT32), int(DType.INT32)


def member(rank: int) -> Member:
    return Member(worker(rank), rank + 1)


def declare(
    book: KeyBook, rank: int, keys: dict[int | str, tuple[int, ...]], dtype: int = FLOAT32, mode: str = "sync"
) -> KeyRequest:
    dtypes, forms = (dtype,) * len(keys), ("",) * len(keys)
    message = Declare(100 + rank, 0, mode, tuple(keys), tuple(keys.values()), dtypes, dtypes, forms)
    return book.declare(member(rank), message, 1.5)


@pytest.fixture
def book() -> KeyBook:
    return KeyBook(0, "sync", member(0), 64)


def test_a_key_is_agreed_when_every_live_worker_has_declared_it(book: KeyBook) -> None:
    declare(book, 0, {"w": (2, 3)})
    assert book.take_agreed({0, 1}) == []
    declare(book, 1, {"w": (2, 3)})
    (entry,) = book.take_agreed({0, 1})
    assert (entry.key, entry.shape) == ("w", (2, 3))
    assert book.take_agreed({0, 1}) == []


def test_a_request_is_answered_when_its_last_key_is_placed(book: KeyBook) -> None:
    request = declare(book, 0, {"a": (1,), "b": (1,)})
    a, b = book.take_agreed({0})
    book.mark_placed([a])
    assert book.take_answerable() == []
    book.mark_placed([b])
    assert book.take_answerable() == [request]
    assert book.take_answerable() == []


def test_a_key_that_is_placed_is_answered_at_once_to_whoever_declares_it_later(book: KeyBook) -> None:
    declare(book, 0, {"a": (1,)})
    book.mark_placed(book.take_agreed({0}))
    book.take_answerable()
    late = declare(book, 1, {"a": (1,)})
    assert book.take_answerable() == [late]


def test_two_shapes_are_an_error_that_names_both_workers(book: KeyBook) -> None:
    first = declare(book, 0, {"w": (2, 3)})
    with pytest.raises(InitMismatch, match=r"shape \(2, 3\) and dtype float32 by worker-0, but with shape \(6,\)"):
        declare(book, 1, {"w": (6,)})
    assert [(request, "worker-1" in reason) for request, reason in book.take_conflicts() if request is first] == [
        (first, True)
    ]


def test_two_dtypes_are_an_error_that_names_them(book: KeyBook) -> None:
    declare(book, 0, {"w": (2,)})
    with pytest.raises(InitMismatch, match="dtype float32 by worker-0, but with shape .* and dtype int32 by worker-1"):
        declare(book, 1, {"w": (2,)}, INT32)


def test_whoever_comes_late_to_a_disagreement_gets_the_same_error(book: KeyBook) -> None:
    declare(book, 0, {"w": (2,)})
    with pytest.raises(InitMismatch) as second:
        declare(book, 1, {"w": (3,)})
    book.take_conflicts()
    with pytest.raises(InitMismatch) as third:
        declare(book, 2, {"w": (2,)})
    assert str(third.value) == str(second.value)
    assert book.take_agreed({0, 1, 2}) == []


def test_a_disagreement_fails_whole_requests_and_only_those_that_have_the_key(book: KeyBook) -> None:
    both = declare(book, 0, {"good": (1,), "bad": (1,)})
    other = declare(book, 0, {"other": (1,)})
    with pytest.raises(InitMismatch):
        declare(book, 1, {"bad": (2,)})
    assert both in [request for request, _ in book.take_conflicts()]
    assert book.requests == [other]


def test_two_types_of_store_are_an_error(book: KeyBook) -> None:
    declare(book, 0, {"w": (2,)})
    with pytest.raises(InitMismatch, match="store 0 is sync on worker-0 and async on worker-1"):
        declare(book, 1, {"w": (2,)}, mode="async")


def test_the_oldest_wait_names_a_key_and_who_has_not_declared_it(book: KeyBook) -> None:
    assert book.oldest_wait({0, 1, 2}) is None
    request = declare(book, 1, {"a": (1,), "b": (1,)})
    assert book.oldest_wait({0, 1, 2}) == (request, "a", (0, 2))


def test_a_worker_that_left_is_not_waited_for(book: KeyBook) -> None:
    declare(book, 0, {"w": (2,)})
    assert [entry.key for entry in book.take_agreed({0})] == ["w"]


def test_a_placement_lists_slices_and_homes_in_the_order_of_the_keys(book: KeyBook) -> None:
    declare(book, 0, {"a": (1,), "b": (1,)})
    for number, entry in enumerate(book.take_agreed({0})):
        entry.first_slice, entry.home = 10 + number, number
    placement = book.placement(("b", "a"))
    assert (placement.first_slices, placement.homes, placement.slice_bytes) == ((11, 10), (1, 0), 64)
