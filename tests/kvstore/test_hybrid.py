"""`HybridBackend`: what it asks of its two sides, which do the work."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from kvdist import KeyNotInitialised, RowSparse, kv
from kvdist.errors import CheckpointError, InitMismatch

pytest.importorskip("torch")

from kvdist.kvstore.backend import Backend
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.checkpoints import CheckpointFuture
from kvdist.kvstore.hybrid import HybridBackend

ROWS = RowSparse([0], np.ones((1, 2), np.float32), (5, 2))
ARRAY = np.ones(3, np.float32)


class Half(Backend):
    """One of the sides, which notes what it is asked for."""

    optimizer = None

    def __init__(self, name, calls, failure=None):
        super().__init__("half", 0, 2)
        self._name = name
        self._calls = calls
        self._failure = failure

    def _note(self, *what, **options):
        self._calls.append((self._name, *what))

    @contextlib.contextmanager
    def reporting(self):
        try:
            yield
        except ValueError:
            self._note("reported")
            raise

    def meet(self, timeout=None, statement=None):
        self._note("meet")

    def declare(self, given):
        self._note("init", [one for one, _ in given])

    def claim(self, job):
        self._note("claim", Path(job.directory))

    def save(self, job):
        self._note(Path(job.directory), job.step, job.keep, job.state)
        future = CheckpointFuture(Path(job.directory))
        future.finish(self._failure)
        return future

    def note_error(self, error):
        self._note("error", str(error))

    def check(self):
        pass

    transfer = replace = reduce = set_optimizer = states = replace_states = command = load = close = check


def with_keys(calls, **options):
    store = KVStore(HybridBackend(Half("servers", calls), Half("workers", calls, **options)))
    store.init(["table", "array"], [ROWS, ARRAY])
    assert calls[1:] == [("servers", "init", ["table"]), ("workers", "init", ["array"])]
    calls.clear()
    return store


def test_workers_save_before_servers_and_keep_one_more_so_that_no_checkpoint_is_a_half():
    calls = []
    folder = Path("/somewhere")
    with_keys(calls).save_checkpoint(folder, 7, keep=2, state="mine").result()
    assert calls == [
        ("servers", "claim", folder),
        ("workers", folder / "workers", 7, 3, None),
        ("servers", folder, 7, 2, "mine"),
    ]


def test_what_workers_could_not_save_servers_do_not_save():
    calls = []
    store = with_keys(calls, failure=CheckpointError("the disk is full"))
    with pytest.raises(CheckpointError, match="the disk is full"):
        store.save_checkpoint("/somewhere", 7).result()
    assert [call[:2] for call in calls] == [("servers", "claim"), ("workers", Path("/somewhere/workers"))]


def test_a_call_that_is_wrong_on_one_worker_is_told_to_the_others_who_would_wait():
    calls = []
    store = with_keys(calls)
    with pytest.raises(ValueError, match="2 keys need as many values, got 1"):
        store.init(["b", "c"], [ARRAY])
    assert calls == [("workers", "reported")]


def test_the_servers_decide_whether_the_error_of_a_push_of_rows_is_one():
    """After `close` the answer of a push may be overtaken by leaving, which is no error."""
    calls = []
    store = with_keys(calls)
    store._backend.note_error(ValueError("late"))
    assert calls == [("servers", "error", "late")]
    assert not store._backend.errors


def test_keys_whose_init_is_refused_are_not_counted(monkeypatch):
    store = with_keys([])

    def refuse(self, given):
        raise InitMismatch("workers declared different keys")

    with monkeypatch.context() as patched:
        patched.setattr(Half, "declare", refuse)
        with pytest.raises(InitMismatch):
            store.init("other", ARRAY)
    assert "1 of 2 keys on servers" in repr(store)


def test_results_of_both_sides_come_in_the_order_of_the_call():
    """Arrays of which rows are expected go to the servers, the others to the worker."""
    keys = ["w1", "s1", "s2", "w2"]
    with kv.create("hybrid") as store:
        store.expect_rows(["s1", "s2"])
        store.leave_unkept(["summed"])
        store.init([*keys, "summed"], [np.full(2, number, np.float32) for number in range(5)])
        assert "2 of 5 keys on servers" in repr(store)
        assert [value[0] for value in store.pull(keys)] == [0, 1, 2, 3]
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        store.pushpull(keys, [np.full(2, 10 * number, np.float32) for number in range(4)], out=list(np.zeros((4, 2))))
        states = store.optimizer_states(keys)
        momenta = [state.arrays[0][0] for state in states]
        assert momenta == [-10.0 * number for number in range(4)]
        store.replace_optimizer_states(keys, states[::-1])
        assert [state.arrays[0][0] for state in store.optimizer_states(keys)] == momenta[::-1]
        for wrong in (["summed"], ["w1", "summed"]):
            with pytest.raises(KeyNotInitialised, match="key 'summed'"):
                store.optimizer_states(wrong)
            with pytest.raises(ValueError, match="key 'summed' belongs to a Trainer"):
                store.pull(wrong)


def test_the_parts_of_a_call_that_no_side_can_take_raise_before_the_first_update():
    with kv.create("hybrid") as store:
        store.expect_rows(["s"])
        store.init(["w", "s"], [ARRAY, ARRAY])
        for value, error in (([ARRAY], "2 keys need as many values, got 1"), (ARRAY, "needs a list of values")):
            with pytest.raises((ValueError, TypeError), match=error):
                store.push(["w", "s"], value)
        assert [one.tolist() for one in store.pull(["w", "s"])] == [ARRAY.tolist()] * 2
