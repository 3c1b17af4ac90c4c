"""What is noted of a server's rounds, and of calls."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.worker.requests import EnterBarrier
from kvdist.diagnostics.profiler import NodeTrace, trace_rounds
from kvdist.diagnostics.trace import Trace
from kvdist.errors import KvdistError
from kvdist.protocol.messages import HEAD_OF_USERS_MAX, Ack, Command, Message, Packet, Perform, Pull, Stamp
from tests.cases import each
from tests.core.wired import Wired


def spans(trace: Trace) -> list[tuple[str, dict[str, object]]]:
    return [(span.name, span.arguments) for span in trace._spans]


def traced(num_workers: int, **options: object) -> tuple[Wired, Trace]:
    wired, trace = Wired(num_workers, 1, **options), Trace(100)
    trace_rounds(wired.servers[0].shard, trace)
    return wired, trace


def test_each_round_of_a_slice_is_noted_with_its_version_contributions_and_bytes() -> None:
    wired, trace = traced(2)
    wired.initialise({"w": [0.0, 0.0, 0.0]})
    for step in range(2):
        wired.push(0, {"w": [1.0, 2.0, 3.0]})
        wired.settle()
        assert len(spans(trace)) == step, "the round is open"
        wired.push(1, {"w": None})
        wired.settle()
    about = {"key": "w", "contributions": 2, "bytes": 12, "slices": 1}
    assert spans(trace) == [("round of key 'w'", {**about, "version": version}) for version in (1, 2)]


def test_a_group_is_one_event_under_its_first_key() -> None:
    wired, trace = traced(1)
    keys = {number: [0.0] * (number + 1) for number in range(5)}
    wired.initialise(keys)
    for _ in range(8):
        wired.push(0, dict(keys))
        wired.settle()
    name, about = spans(trace)[-1]
    assert name == "round of key 0"
    assert about == {"key": 0, "version": 8, "contributions": 1, "bytes": 60, "slices": 5}


def test_slices_that_are_updated_together_are_one_event() -> None:
    wired, trace = traced(1, limits=Limits(slice_bytes=8))
    wired.set_optimizer(0, "lars")
    wired.settle()
    wired.initialise({"w": [1.0] * 5})
    wired.push(0, {"w": [1.0] * 5})
    wired.settle()
    assert spans(trace) == [
        ("round of key 'w'", {"key": "w", "version": 1, "contributions": 1, "bytes": 20, "slices": 3})
    ]


def test_a_call_is_noted_from_the_call_to_its_end_with_its_error() -> None:
    trace = Trace(10)
    node = NodeTrace(trace)
    node.called()
    since = node.take_since()
    assert node.take_since() > since, "a second request of the same call begins later"
    node.asked(EnterBarrier(1, 0), since)
    node.asked(Command(2, 7, "x"), since)
    node.answered(2, KvdistError("no"))
    node.answered(1)
    node.answered(1)
    assert spans(trace) == [("command 7 to the servers", {"error": "KvdistError: no"}), ("barrier", {})]
    assert all(span.begin_ns == since and span.overlaps for span in trace._spans)


def test_a_call_from_before_the_trace_is_left_out() -> None:
    node = NodeTrace(Trace(10))
    node.asked(EnterBarrier(1, 0), 0)
    node.answered(1)
    assert spans(node.trace) == []


def test_waiting_is_noted_though_it_ends_with_an_error() -> None:
    node = NodeTrace(Trace(10))
    future: Future[None] = Future()
    future.set_exception(KvdistError("no"))
    with pytest.raises(KvdistError):
        node.wait(future)
    assert spans(node.trace) == [("wait", {})]


@each(
    "message, tells",
    [
        (Ack(wanted=False), False),
        (Perform(1, HEAD_OF_USERS_MAX + 1, ""), False),
        (Perform(1, HEAD_OF_USERS_MAX, ""), True),
        (Pull(*[np.zeros(1, np.uint32)] * 4), True),
    ],
)
def test_what_comes_though_nobody_works_is_noted_but_tells_nothing(message: Message, tells: bool) -> None:
    node = NodeTrace(Trace(10))
    node.handled(Packet(Stamp(1, 0, SCHEDULER_MEMBER, 0, 0, 0, 0), message), 1)
    assert [name for name, _ in spans(node.trace)] == [type(message).__name__]
    assert node.trace.snapshot().tells == tells
