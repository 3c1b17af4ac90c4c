"""Calls of workers that are together with others where one of these is at another place of its program."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from types import SimpleNamespace

import numpy as np
import pytest

from kvdist import kv
from kvdist.core.worker.requests import ClaimFolder
from kvdist.errors import CheckpointError, PeerLostError
from kvdist.kvstore.backend import SaveJob
from kvdist.kvstore.checkpoints import ServerSaving
from kvdist.kvstore.dist import DistBackend
from tests.cases import each


class Giving(DistBackend):
    """One of three workers, whose first barriers with a giver fail, as that one is not there."""

    members = (0, 1, 2)
    _number = 0

    def __init__(self, rank, failures):
        self.rank, self.failures, self.named = rank, failures, []
        self._barrier_lock = threading.Lock()
        self.arrays = SimpleNamespace(submit=lambda make, finish: make(1))
        memory, node = SimpleNamespace(forget_shown=None), SimpleNamespace(failure=None)
        self._cluster = SimpleNamespace(wait=self.wait_for, memory=memory, node=node)

    def meet(self, timeout=None, statement=None):
        pass

    def wait_for(self, barrier):
        self.named.append(barrier.giver)
        if len(self.named) <= self.failures:
            raise PeerLostError("give them again")


@each("failures, named", [(0, [0]), (1, [0, 1]), (2, [0, 1, 2]), (3, [0, 1, 2, 0])])
def test_if_one_is_not_there_to_give_the_next_one_does(failures, named):
    workers = [Giving(rank, failures) for rank in range(3)]
    gave = []
    for one in workers:
        one._replace_by(lambda one=one: gave.append((len(one.named), one.rank)))
    assert [one.named for one in workers] == [named] * 3, "all name the same one each time"
    assert sorted(gave) == list(enumerate(named)), "whom a barrier names has given before it"


def saving_of_one_that_looks_on(asked):
    def submit(make, finish):
        asked.append(make(1))
        future = Future()
        future.set_result("")
        return future

    return ServerSaving(0, 0, submit, Future.result, lambda future: None, lambda: None)


def test_who_looks_on_is_given_the_checkpoint_that_the_others_have_saved_and_writes_nothing(tmp_path):
    store = kv.create("local")
    store.init("w", np.zeros(3, np.float32))
    store.save_checkpoint(tmp_path, 0).result()
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    asked = []
    saving = saving_of_one_that_looks_on(asked)
    for _ in range(2):
        future = saving.save([object()], SaveJob(tmp_path, 0, state={"epoch": 1}))
        assert future.result(timeout=0) == tmp_path / "step-0"
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert all(isinstance(one, ClaimFolder) for one in asked)


def test_who_looks_on_cannot_save_what_the_others_have_not_saved(tmp_path):
    asked = []
    with pytest.raises(CheckpointError, match="the others have not saved .*step-3: it saves with them after its first"):
        saving_of_one_that_looks_on(asked).save([object()], SaveJob(tmp_path, 3))
    assert [type(one) for one in asked] == [ClaimFolder], "the others' checkpoints do not fail for that"
