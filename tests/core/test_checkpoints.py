"""Which moment of a store is saved, and which of its keys."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from kvdist.checkpoint.format import NAME, read_manifest
from kvdist.checkpoint.shards import Shards
from kvdist.checkpoint.snapshot import EVERYTHING, WriteManifest, WriteShard
from kvdist.core.machine import Send
from kvdist.core.server.block import Block
from kvdist.core.server.checkpoints import ServerCheckpoints
from kvdist.core.server.shard import Shard
from kvdist.core.worker import pending
from kvdist.core.worker.pending import SavingCalls
from kvdist.dtypes import DType
from kvdist.protocol.messages import Failed, MarkPushes, Save, SavedFile
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
    read,
    require_moment,
    require_nothing_left,
    save_all,
    set_optimizer,
)
from tests.core.wired import Wired


@each("seed", range(12))
def test_a_synchronous_checkpoint_is_one_moment_whoever_runs_ahead_or_lags(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    wired = a_cluster(3)
    calls = [generator.choice((0, 1, 2)) for _ in range(200)]
    progress, requests = [0, 0, 0], []
    for rank in [*calls, *[0, 1, 2] * 6]:
        at = progress[rank]
        if at == 3:
            requests.append(wired.save(rank, tmp_path, *VALUES, step=3))
        elif at < 6:
            push(wired, rank, at if at < 3 else at - 1)
        progress[rank] += 1
        wired.deliver(min(len(wired.wire), generator.randrange(4)))
        if wired.works and generator.random() < 0.2:
            wired.work()
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    manifest = require_moment(tmp_path, (0, 1, 2), 3)
    assert manifest.exact and manifest.mode == "sync" and manifest.num_servers == 2 and manifest.num_workers == 3
    reads = [wired.pull(rank, *VALUES) for rank in range(3)]
    wired.settle()
    assert wired.value(reads[0], "w") == moment((0, 1, 2), 5)[0]["w"].tolist(), "training has gone on"
    require_nothing_left(wired)


def test_marks_that_come_after_the_pushes_find_the_moment_too(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0, 1)
    requests = save_all(wired, tmp_path)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path, (0, 1), 2)


def test_the_mark_of_one_worker_is_enough_to_keep_the_moment(tmp_path: Path) -> None:
    wired = a_cluster()
    push(wired, 0, 0)
    wired.save(0, tmp_path, *VALUES)
    push(wired, 0, 1)
    wired.settle()
    push(wired, 1, 0)
    wired.settle()
    assert [type(one.work) for one in wired.works] == [WriteShard, WriteShard], "both write before worker 1 has called"
    late = wired.save(1, tmp_path, *VALUES)
    push(wired, 1, 1)
    wired.settle()
    assert late not in wired.completed
    wired.settle_works()
    assert late in wired.completed
    require_moment(tmp_path, (0, 1), 1)


def test_a_number_beyond_the_next_checkpoint_is_refused(tmp_path: Path) -> None:
    wired = a_cluster()
    save = Save(7, 0, str(tmp_path / "step-1"), EVERYTHING, 1, "0" * 16, 1, 0, 1, SavedFile("", 0, ""), "")
    (answer,) = wired.scheduler.handle(wired.workers[0].me, save, wired.now)
    assert isinstance(answer, Send) and isinstance(answer.message, Failed)
    assert answer.message.reason == "worker-0 saves checkpoint 1, where the next is 0"
    assert not len(wired.scheduler.checkpoints)


def test_keys_that_were_never_pushed_are_saved_as_they_began(tmp_path: Path) -> None:
    wired = a_cluster()
    save_all(wired, tmp_path)
    wired.settle_works()
    require_moment(tmp_path, (0, 1), 0)


def test_a_checkpoint_waits_for_first_values(tmp_path: Path) -> None:
    wired = Wired(2, 1)
    for rank in (0, 1):
        wired.declare(rank, {"w": (2,)})
    wired.settle()
    requests = [wired.save(rank, tmp_path, "w") for rank in (0, 1)]
    wired.settle()
    assert not wired.works
    wired.give(0, {"w": [3, 4]})
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    assert Shards(tmp_path, read_manifest(tmp_path)).whole("w", 2, DType.FLOAT32).tolist() == [3, 4]


def test_many_slices_are_marked_in_several_messages(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    with mock.patch.object(pending, "SLICES_PER_MARK", 2):
        requests = [wired.save(rank, tmp_path, *VALUES) for rank in (0, 1)]
    marks = [packet.message for _, _, packet in wired.wire if isinstance(packet.message, MarkPushes)]
    assert len(marks) > 4 and sum(mark.last for mark in marks) == 4
    push_all(wired, 1)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path, (0, 1), 1)


def test_rounds_ask_nobody_about_checkpoints_while_there_is_none(tmp_path: Path) -> None:
    wired = a_cluster()
    with (
        mock.patch.multiple(ServerCheckpoints, look=None, take_effects=None),
        mock.patch.object(SavingCalls, "send_loads"),
    ):
        push_all(wired, 0, 1)
    save_all(wired, tmp_path)
    wired.settle_works()
    with (
        mock.patch.multiple(ServerCheckpoints, look=None, take_effects=None),
        mock.patch.object(SavingCalls, "send_loads"),
    ):
        push_all(wired, 2)
    require_moment(tmp_path, (0, 1), 2)


def test_what_is_written_does_not_change_while_rounds_go_on(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    save_all(wired, tmp_path)
    wired.settle()
    held = [wired.works.popleft() for _ in range(2)]
    push_all(wired, 1, 2, 3, 4)
    for one in held:
        wired.finish(one)
    wired.settle_works()
    require_moment(tmp_path, (0, 1), 1)
    push_all(wired, 5)
    require_nothing_left(wired)


def test_two_checkpoints_at_once_are_two_moments(tmp_path: Path) -> None:
    wired = a_cluster()
    requests = []
    for turn in (0, 1):
        for rank in (0, 1):
            push(wired, rank, turn)
            requests.append(wired.save(rank, tmp_path / str(turn), *VALUES, step=turn))
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path / "0", (0, 1), 1)
    require_moment(tmp_path / "1", (0, 1), 2)
    require_nothing_left(wired)


def test_small_slices_that_are_updated_as_a_block_are_saved_one_by_one(tmp_path: Path) -> None:
    wired = a_cluster(num_servers=1)
    small: tuple[int | str, ...] = ("b", 3)
    rounds = []
    apply = Shard.apply

    def counted(self: Shard, blocks: Sequence[Block], *arguments: Any) -> None:
        rounds.extend([1] * (len(blocks[0]) > 1))
        apply(self, blocks, *arguments)

    with mock.patch.object(Shard, "apply", counted):
        for turn in range(4):
            for rank in (0, 1):
                wired.push(rank, {key: gradients(rank, turn)[key] for key in small})
                wired.push(rank, {key: grad for key, grad in gradients(rank, turn).items() if key not in small})
                wired.settle()
                if turn == 1:
                    wired.save(rank, tmp_path, *VALUES)
            if turn == 1:
                before = len(rounds)
    assert 0 < before < len(rounds), "they are one block before it and after it"
    wired.settle_works()
    require_moment(tmp_path, (0, 1), 2)
    require_nothing_left(wired)


def test_a_host_that_pushes_through_its_leader_saves_the_moment(tmp_path: Path) -> None:
    wired = a_cluster(3, hosts=("a", "a", "b"), local_reduce="on")
    push(wired, 2, 0)
    push(wired, 2, 1)
    for rank in (0, 1):
        push(wired, rank, 0)
        wired.save(rank, tmp_path, *VALUES)
        push(wired, rank, 1)
    wired.settle()
    wired.save(2, tmp_path, *VALUES)  # at another step than the others
    wired.settle_works()
    assert not (tmp_path / NAME).exists()
    for rank in (1, 0, 2):
        push(wired, rank, 2)
        wired.save(rank, tmp_path, *VALUES)
        push(wired, rank, 3)
        wired.settle()
    wired.settle_works()
    require_moment(tmp_path, (0, 1, 2), 3)


@each("name", ["lamb", "lars"])
def test_all_slices_of_a_parameter_with_norms_are_of_one_round_and_go_on_to_the_bit(tmp_path: Path, name: str) -> None:
    numbers = {"learning_rate": 0.1}
    shapes: dict[int | str, list[float]] = {"w": VALUES["w"], "b": [1, 2]}

    def fresh(num_servers: int) -> Wired:
        wired = Wired(2, num_servers, SMALL, bigarray_bound=42)
        set_optimizer(wired, name, **numbers)
        wired.initialise(shapes)
        return wired

    def train(wired: Wired, *turns: int) -> None:
        for turn in turns:
            for rank in (0, 1):
                wired.push(rank, {key: gradients(rank, turn)[key] for key in shapes})
        wired.settle()

    def values(wired: Wired) -> list[list[float]]:
        read = wired.pull(0, *shapes)
        wired.settle()
        return [wired.value(read, key) for key in shapes]

    wired = fresh(2)
    train(wired, 0, 1)
    for rank in (0, 1):
        wired.save(rank, tmp_path, *shapes)
        wired.push(rank, {key: gradients(rank, 2)[key] for key in shapes})
    wired.settle_works()
    train(wired, 3)
    other = fresh(3)
    for rank in (0, 1):
        other.load(rank, tmp_path)
    other.settle_works()
    train(other, 2, 3)
    assert values(other) == values(wired)


# Asynchronous stores.


def test_an_asynchronous_checkpoint_has_at_least_what_was_marked(tmp_path: Path) -> None:
    wired = a_cluster(mode="async")
    push(wired, 0, 0)
    requests = [wired.save(0, tmp_path, *VALUES)]
    wired.settle()
    assert not wired.works, "worker 1 has not said what it wants in it"
    push(wired, 0, 1)
    wired.settle()
    push(wired, 1, 0)
    requests.append(wired.save(1, tmp_path, *VALUES))
    push(wired, 1, 1)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    manifest = read_manifest(tmp_path)
    assert manifest.mode == "async" and not manifest.exact
    found = read(tmp_path, "b")
    assert found.state is not None and found.state.count == 3, "the marked pushes, and one that came meanwhile"


def test_an_asynchronous_checkpoint_goes_on_when_the_last_worker_leaves_that_it_waits_for(tmp_path: Path) -> None:
    wired = a_cluster(mode="async")
    push(wired, 0, 0)
    request = wired.save(0, tmp_path, *VALUES)
    wired.settle()
    assert not wired.works
    wired.leave(1)
    wired.settle_works()
    assert request in wired.completed
    require_nothing_left(wired)


# Keys.


def test_a_store_without_keys_has_nothing_to_save_or_load(tmp_path: Path) -> None:
    wired = Wired(2, 2)
    requests = [wired.save(rank, tmp_path) for rank in (0, 1)] + [wired.load(rank, tmp_path) for rank in (0, 1)]
    wired.settle_works()
    assert all("the store has no keys" in reason for reason in failures(wired, requests))
    require_nothing_left(wired)


def test_servers_that_keep_nothing_of_the_store_write_nothing(tmp_path: Path) -> None:
    wired = Wired(2, 3)
    wired.initialise({"w": [1, 2, 3]})
    requests = [wired.save(rank, tmp_path, "w") for rank in (0, 1)]
    works = wired.settle_works()
    assert [type(work) for work in works] == [WriteShard, WriteManifest]
    assert all(request in wired.completed for request in requests)
    assert len(read_manifest(tmp_path).files) == 1
    loads = [wired.load(rank, tmp_path) for rank in (0, 1)]
    wired.settle_works()
    assert all(request in wired.completed for request in loads)
    require_nothing_left(wired)


def test_a_key_that_is_initialised_meanwhile_is_not_in_it_and_not_waited_for(tmp_path: Path) -> None:
    wired = Wired(2, 2)
    wired.initialise({"w": [1, 2, 3]})
    requests = [wired.save(rank, tmp_path, "w") for rank in (0, 1)]
    wired.initialise({"v": [4, 5]})
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    assert [one.key for one in read_manifest(tmp_path).keys] == ["w"]
    loads = [wired.load(rank, tmp_path) for rank in (0, 1)]
    wired.settle_works()
    assert "has no key 'v'" in failures(wired, loads)[0]


@each("mode", ["sync", "async"])
def test_workers_that_save_other_keys_fail_and_do_not_wait_for_ever(tmp_path: Path, mode: str) -> None:
    wired = Wired(2, 1)
    wired.initialise({"w": [1, 2, 3], "v": [4]}, mode)
    set_optimizer(wired, "sgd")
    wired.push(0, {"w": [1, 1, 1], "v": [1]})
    requests = [wired.save(0, tmp_path, "w", "v"), wired.save(1, tmp_path, "w")]
    wired.settle_works()
    assert all("init has returned" in reason for reason in failures(wired, requests))
    require_nothing_left(wired)


def test_two_stores_are_saved_at_once(tmp_path: Path) -> None:
    wired = a_cluster()
    wired.initialise({"other": [1.5, 2.5]}, store=1)
    requests = []
    for rank in (0, 1):
        push(wired, rank, 0)
        requests.append(wired.save(rank, tmp_path / "a", *VALUES))
        requests.append(wired.save(rank, tmp_path / "b", "other", store=1))
        push(wired, rank, 1)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path / "a", (0, 1), 1)
    assert [one.key for one in read_manifest(tmp_path / "b").keys] == ["other"]
    require_nothing_left(wired)
