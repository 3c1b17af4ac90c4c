"""Stores that go on from a checkpoint: all servers, or none."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.checkpoint.snapshot import STATES, WEIGHTS, ReadManifest, ReadShards
from kvdist.optimizer.registry import registered
from tests.cases import each
from tests.core.training import (
    SMALL,
    VALUES,
    a_cluster,
    failures,
    gradients,
    moment,
    push,
    push_all,
    require_moment,
    require_nothing_left,
    save_all,
    set_optimizer,
)
from tests.core.wired import Wired


def saved_after(folder: Path, turns: int, num_servers: int = 2, num_workers: int = 2) -> Wired:
    wired = a_cluster(num_workers, num_servers)
    push_all(wired, *range(turns))
    save_all(wired, folder)
    wired.settle_works()
    return wired


def load_all(wired: Wired, folder: Path, **options: Any) -> list[int]:
    return [wired.load(rank, folder, **options) for rank in range(len(wired.workers))]


def values_of(wired: Wired) -> Mapping[int | str, list[float]]:
    request = wired.pull(0, *VALUES)
    wired.settle()
    return {key: wired.value(request, key) for key in VALUES}


def as_lists(arrays: Mapping[int | str, Any]) -> Mapping[int | str, list[float]]:
    return {key: array.tolist() for key, array in arrays.items()}


@each("num_servers", [1, 2, 3])
def test_any_number_of_servers_goes_on_to_the_bit(tmp_path: Path, num_servers: int) -> None:
    saved_after(tmp_path, 2)
    other = a_cluster(2, num_servers)
    push_all(other, 7)
    requests = load_all(other, tmp_path)
    other.settle_works()
    assert all(request in other.completed for request in requests)
    assert values_of(other) == as_lists(moment((0, 1), 2)[0])
    push_all(other, 2, 3)
    assert values_of(other) == as_lists(moment((0, 1), 4)[0])
    require_nothing_left(other)


MATRICES: dict[int | str, tuple[int, ...]] = {"matrix": (30, 4), "tall": (7, 2), "vector": (3,)}
"""One that is cut over all servers, unless its optimizer needs it whole or by rows."""


@each("name, dtype", [*((name, "float32") for name in registered()), ("sgd", "float16"), ("adam", "float16")])
def test_every_rule_with_all_that_it_remembers_goes_on_to_the_bit(tmp_path: Path, name: str, dtype: str) -> None:
    generator = np.random.default_rng(5)
    sizes = {key: math.prod(shape) for key, shape in MATRICES.items()}
    firsts = {key: generator.normal(size=size).tolist() for key, size in sizes.items()}
    rounds = [{key: generator.normal(size=size).tolist() for key, size in sizes.items()} for _ in range(3)]

    def fresh(num_servers: int) -> Wired:
        wired = Wired(1, num_servers, SMALL, bigarray_bound=42)
        set_optimizer(wired, name, **({"multi_precision": True} if dtype == "float16" else {}))
        wired.declare(0, MATRICES, dtype=dtype)
        wired.settle()
        wired.give(0, firsts)
        return wired

    def train(wired: Wired, grads: Sequence[dict[int | str, list[float]]]) -> list[list[float]]:
        for grad in grads:
            wired.push(0, grad)
        wired.settle()
        request = wired.pull(0, *MATRICES)
        wired.settle()
        return [wired.value(request, key) for key in MATRICES]

    wired, other = fresh(2), fresh(3)
    train(wired, rounds[:2])
    wired.save(0, tmp_path, *MATRICES)
    wired.settle_works()
    train(other, rounds[1:2])
    loading = other.load(0, tmp_path)
    other.settle_works()
    assert loading in other.completed
    assert train(other, rounds[2:]) == train(wired, rounds[2:])


def test_a_store_goes_back_and_saves_again(tmp_path: Path) -> None:
    wired = saved_after(tmp_path / "a", 1)
    push_all(wired, 5, 6)
    load_all(wired, tmp_path / "a")
    wired.settle_works()
    push_all(wired, 1)
    requests = save_all(wired, tmp_path / "b")
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path / "b", (0, 1), 2)
    load_all(wired, tmp_path / "b")
    wired.settle_works()
    push_all(wired, 2)
    assert values_of(wired) == as_lists(moment((0, 1), 3)[0])
    require_nothing_left(wired)


def test_weights_alone_leave_the_states_as_they_are(tmp_path: Path) -> None:
    saved_after(tmp_path, 0)
    other = a_cluster()
    push_all(other, 0)
    load_all(other, tmp_path, contents=(WEIGHTS,))
    other.settle_works()
    push_all(other, 1)
    momenta = [moment((0, 1), turns)[1]["b"] for turns in (2,)]
    assert values_of(other)["b"] == (np.array(VALUES["b"], np.float32) + momenta[0]).tolist()


def test_states_alone_leave_the_weights_as_they_are(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    save_all(wired, tmp_path, contents=(STATES,))
    wired.settle_works()
    other = a_cluster()
    load_all(other, tmp_path, contents=(STATES,))
    other.settle_works()
    assert values_of(other) == VALUES
    push_all(other, 1)
    momenta = moment((0, 1), 2)[1]
    assert values_of(other)["w"] == (np.array(VALUES["w"], np.float32) + momenta["w"]).tolist()
    failed = load_all(other, tmp_path)
    other.settle_works()
    assert "the checkpoint has no weights" in failures(other, failed)[0]


def test_a_store_is_restored_only_when_no_push_is_under_way(tmp_path: Path) -> None:
    wired = saved_after(tmp_path, 1)
    push(wired, 0, 1)
    push(wired, 0, 2)
    requests = load_all(wired, tmp_path)
    wired.settle()
    assert not wired.works, "worker 0 waits for the pushes of worker 1"
    wired.advance(wired.limits.explain_after_s)
    text = wired.workers[1].explain(wired.now)
    assert text is not None and "for worker-0" in text and "loading of a checkpoint" in text
    push(wired, 1, 1)
    push(wired, 1, 2)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    assert values_of(wired) == as_lists(moment((0, 1), 1)[0])


def test_a_worker_that_leaves_is_not_waited_for_by_those_who_load(tmp_path: Path) -> None:
    wired = saved_after(tmp_path, 1, num_workers=3)
    requests = [wired.load(rank, tmp_path) for rank in (0, 1)]
    wired.settle()
    assert not wired.works
    wired.leave(2)
    wired.advance(1.0)  # it says goodbye when all that it has said has arrived
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_nothing_left(wired)


def test_what_a_worker_pushed_before_it_left_is_not_added_to_what_was_loaded(tmp_path: Path) -> None:
    wired = saved_after(tmp_path, 1, num_workers=3)
    push_all(wired, 1)
    push(wired, 2, 2)
    wired.leave(2)
    wired.advance(1.0)
    requests = [wired.load(rank, tmp_path) for rank in (0, 1)]
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    for rank in (0, 1):
        push(wired, rank, 2)
    wired.settle()
    values, momenta = moment((0, 1, 2), 1)
    grads = [np.array(gradients(rank, 2)["w"], np.float32) for rank in (0, 1)]
    assert values_of(wired)["w"] == (values["w"] + momenta["w"] / 2 - grads[0] - grads[1]).tolist()


def test_servers_that_keep_nothing_of_the_store_read_nothing(tmp_path: Path) -> None:
    wired = Wired(1, 3)
    wired.initialise({"w": [1, 2, 3]})
    wired.save(0, tmp_path, "w")
    wired.settle_works()
    wired.load(0, tmp_path)
    assert [type(work) for work in wired.settle_works()] == [ReadManifest, ReadShards]
    require_nothing_left(wired)


@each("failing", [0, 1])
def test_when_one_server_cannot_read_nobody_takes_anything_over(tmp_path: Path, failing: int) -> None:
    saved_after(tmp_path, 2)
    other = a_cluster()
    push_all(other, 0)
    before = values_of(other)
    requests = load_all(other, tmp_path)
    other.settle()
    assert isinstance(other.work(), ReadManifest)
    other.settle()
    assert [type(one.work) for one in other.works] == [ReadShards, ReadShards]
    for turn in (0, 1):
        other.work("input/output error" if turn == failing else "")
        other.settle()
    assert all("input/output error" in reason for reason in failures(other, requests))
    assert values_of(other) == before
    push_all(other, 1)
    assert values_of(other) == as_lists(moment((0, 1), 2)[0]), "momenta are as they were"
    again = load_all(other, tmp_path)
    other.settle_works()
    assert all(request in other.completed for request in again)
    require_nothing_left(other)


def test_a_damaged_file_is_found_before_anything_changes(tmp_path: Path) -> None:
    saved_after(tmp_path, 1)
    victim = next(iter(sorted(tmp_path.glob("*.safetensors"))))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    other = a_cluster()
    requests = load_all(other, tmp_path)
    other.settle_works()
    assert all("is damaged" in reason for reason in failures(other, requests))
    assert values_of(other) == VALUES


def test_what_does_not_fit_the_store_is_refused(tmp_path: Path) -> None:
    saved_after(tmp_path, 1)
    fewer = Wired(2, 2, SMALL)
    fewer.initialise({"w": VALUES["w"]})
    requests = load_all(fewer, tmp_path, contents=(WEIGHTS,))
    fewer.settle_works()
    assert "which this store has not" in failures(fewer, requests)[0]
    shorter = Wired(2, 2, SMALL)
    shorter.initialise({**VALUES, "w": [1, 2]})
    requests = load_all(shorter, tmp_path, contents=(WEIGHTS,))
    shorter.settle_works()
    assert "key 'w' has shape (50,)" in failures(shorter, requests)[0]
    other = Wired(2, 2, SMALL)
    other.initialise(VALUES)
    set_optimizer(other, "adam")
    requests = load_all(other, tmp_path)
    other.settle_works()
    assert "but this store updates with adam" in failures(other, requests)[0]
    require_nothing_left(other)


def test_workers_that_load_something_else_all_fail(tmp_path: Path) -> None:
    wired = saved_after(tmp_path, 1)
    requests = [wired.load(0, tmp_path), wired.load(1, tmp_path / "other")]
    wired.settle_works()
    assert all("the workers do not agree" in reason for reason in failures(wired, requests))
    again = [wired.load(0, tmp_path), wired.load(1, tmp_path, contents=(WEIGHTS,))]
    wired.settle_works()
    failures(wired, again)
    require_nothing_left(wired)


def test_a_folder_without_a_manifest_is_no_checkpoint(tmp_path: Path) -> None:
    wired = a_cluster()
    requests = load_all(wired, tmp_path)
    wired.settle_works()
    assert all("is not a checkpoint" in reason for reason in failures(wired, requests))
    assert values_of(wired) == VALUES
