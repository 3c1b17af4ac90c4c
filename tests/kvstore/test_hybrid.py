"""`HybridStore`: what it tells its two stores, which do the work."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from kvdist import RowSparse
from kvdist.errors import CheckpointError

pytest.importorskip("torch")

from kvdist.kvstore.hybrid import HybridStore
from kvdist.kvstore.saved import CheckpointFuture

ROWS = RowSparse([0], np.ones((1, 2), np.float32), (5, 2))
ARRAY = np.ones(3, np.float32)


class Half:
    """One of the stores, which notes what it is told."""

    type, rank, num_workers = "half", 0, 2

    def __init__(self, name, calls, failure=None):
        self._name = name
        self._calls = calls
        self._failure = failure

    @contextlib.contextmanager
    def _told(self):
        try:
            yield
        except ValueError:
            self._calls.append((self._name, "told"))
            raise

    def agree(self, statement):
        self._calls.append((self._name, "agree"))

    def init(self, key, value):
        self._calls.append((self._name, "init", list(key)))

    def _claim_folder(self, directory, step):
        self._calls.append((self._name, "claim", Path(directory)))

    def save_checkpoint(self, directory, step, **options):
        self._calls.append((self._name, Path(directory), step, options))
        future = CheckpointFuture(Path(directory))
        future.finish(self._failure)
        return future


def with_keys(calls, **options):
    store = HybridStore(Half("servers", calls), Half("workers", calls, **options))
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
        ("workers", folder / "workers", 7, {"keep": 3}),
        ("servers", folder, 7, {"state": "mine", "keep": 2, "names": None}),
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
    with pytest.raises(ValueError, match="2 keys and 1 values"):
        store.init(["b", "c"], [ARRAY])
    assert calls == [("workers", "told")]
