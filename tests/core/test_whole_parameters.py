"""Parameters whose optimizer must see them whole, or in rows: where they live, and when their versions are made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core.scheduler.keys import DeclaredKey
from kvdist.core.sharding import Keep, Placer, cut
from kvdist.dtypes import DType
from kvdist.errors import ConfigError, OptimizerMismatch, PushRefused
from kvdist.nodes import Member, worker
from kvdist.optimizer import Extent, Optimizer, Step, Updater, create, register
from kvdist.protocol.messages import Placement
from tests.cases import each
from tests.core.wired import Wired
from tests.simulation import SCENARIOS, run

SIZE = 10
SMALL = Limits(slice_bytes=16)  # four elements of float32
RULES = [("lars", {"eta": 0.5, "momentum": 0.9}), ("lamb", {"wd": 0.1}), ("lans", {"wd": 0.1})]


def vector(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 9, size).astype(np.float32)


def made(num_workers: int = 2, num_servers: int = 2, mode: str = "sync", name: str = "lamb", **numbers: float) -> Wired:
    """A cluster with one key of three slices, large enough to be cut over the servers, and the optimizer before it."""
    wired = Wired(num_workers, num_servers, SMALL, bigarray_bound=4)
    for rank in range(num_workers):
        wired.set_optimizer(rank, name, **numbers)
    wired.settle()
    wired.initialise({"w": vector(0).tolist()}, mode)
    return wired


@each("name, numbers", RULES)
@each("servers", [1, 3])
def test_slices_on_a_server_are_updated_with_the_lengths_of_the_whole(name: str, numbers: dict, servers: int) -> None:
    wired = made(2, servers, name=name, **numbers)
    assert len(wired.infos["w"].slices) == 3
    assert len({piece.server for piece in wired.infos["w"].slices}) == 1
    updater, weight = Updater(create(name, **numbers)), vector(0)
    for step in range(1, 6):
        grads = [vector(10 * step), vector(10 * step + 1)]
        reads = [wired.pushpull(rank, {"w": grads[rank]}) for rank in (0, 1)]
        wired.settle()
        updater.update("w", weight, grads, [1.0, 1.0], DType.FLOAT32, weight, extent=Extent("w", (SIZE,)))
        assert wired.value(reads[0], "w") == wired.value(reads[1], "w")
        np.testing.assert_allclose(wired.value(reads[0], "w"), weight, rtol=2e-6, atol=2e-6)


def test_no_slice_has_a_new_version_before_all_have_all_contributions() -> None:
    wired = made()
    read = wired.pushpull(0, {"w": vector(1)})
    wired.settle()
    other = wired.pushpull(1, {"w": vector(2)})
    blocks = [block for server in wired.servers for block in server.shard.blocks]
    while wired.wire:
        wired.deliver()
        assert len({block.version for block in blocks}) == 1
    assert {block.version for block in blocks} == {1}
    assert wired.value(read, "w") == wired.value(other, "w")


def test_asynchronous_contributions_are_applied_one_worker_after_the_other() -> None:
    wired = made(mode="async")
    updater, weight = Updater(create("lamb")), vector(0)
    for step in range(1, 5):
        rank = step % 2
        read = wired.pushpull(rank, {"w": vector(step)})
        wired.settle()
        updater.update("w", weight, [vector(step)], [1.0], DType.FLOAT32, weight)
        np.testing.assert_allclose(wired.value(read, "w"), weight, rtol=2e-6, atol=2e-6)


def test_an_empty_contribution_counts_and_rounds_of_them_change_nothing() -> None:
    wired = made()
    reads = [wired.pushpull(rank, {"w": None}) for rank in (0, 1)]
    wired.settle()
    assert wired.value(reads[0], "w") == wired.value(reads[1], "w") == vector(0).tolist()
    reads = [wired.pushpull(0, {"w": None}), wired.pushpull(1, {"w": vector(1)})]
    wired.settle()
    weight = vector(0)
    Updater(create("lamb")).update("w", weight, [vector(1)], [1.0], DType.FLOAT32, weight)
    np.testing.assert_allclose(wired.value(reads[0], "w"), weight, rtol=2e-6)


def test_workers_that_disagree_are_all_told_and_the_next_round_goes_on() -> None:
    wired = made()
    reads = [wired.pushpull(rank, {"w": vector(1)}, setting=(0.5 + rank, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    for read in reads:
        assert isinstance(wired.failed[read], OptimizerMismatch)
        assert "worker-1 says lr 1.5" in str(wired.failed[read])
    reads = [wired.pushpull(rank, {"w": vector(1)}, setting=(0.5, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    assert wired.value(reads[0], "w") == wired.value(reads[1], "w") != vector(0).tolist()


def test_a_wait_is_explained_with_who_is_missing() -> None:
    wired = made()
    wired.pushpull(0, {"w": vector(1)})
    wired.settle()
    home = wired.servers[wired.infos["w"].slices[0].server]
    assert home.explain(wired.now) == "waiting 0.0 s for worker-1 to push key 'w' (step 1)"
    wired.advance(11)
    assert "worker-1" in str(wired.workers[0].explain(wired.now))


def test_a_worker_that_leaves_lets_the_others_rounds_be_closed() -> None:
    wired = made()
    read = wired.pushpull(0, {"w": vector(1)})
    wired.settle()
    assert read not in wired.completed
    wired.leave(1)
    wired.settle()
    weight = vector(0)
    Updater(create("lamb")).update("w", weight, [vector(1)], [1.0], DType.FLOAT32, weight)
    np.testing.assert_allclose(wired.value(read, "w"), weight, rtol=2e-6)


@each("name, words", [("lamb", "live whole on one server"), ("lans", "live whole")])
def test_an_optimizer_that_comes_after_a_key_was_cut_says_what_to_do(name: str, words: str) -> None:
    wired = Wired(1, 2, SMALL, bigarray_bound=4)
    wired.initialise({"small": [1, 2], "w": vector(0).tolist()})
    request = wired.set_optimizer(0, name)
    wired.settle()
    assert isinstance(wired.failed[request], ConfigError)
    assert words in str(wired.failed[request]) and "'w'" in str(wired.failed[request])
    assert "set_optimizer before init" in str(wired.failed[request])
    read = wired.pushpull(0, {"w": vector(1)})
    other = wired.set_optimizer(0, "sgd", learning_rate=1.0)
    wired.settle()
    assert wired.value(read, "w") == vector(1).tolist(), "nothing was set"
    assert other in wired.completed, "another one may be"


def test_a_key_that_lives_on_one_server_may_get_its_optimizer_later() -> None:
    wired = Wired(1, 2, SMALL, bigarray_bound=1000)
    wired.initialise({"w": vector(0).tolist()})
    wired.set_optimizer(0, "lamb")
    wired.settle()
    read = wired.pushpull(0, {"w": vector(1)})
    wired.settle()
    weight = vector(0)
    Updater(create("lamb")).update("w", weight, [vector(1)], [1.0], DType.FLOAT32, weight)
    np.testing.assert_allclose(wired.value(read, "w"), weight, rtol=2e-6)


# Rows.


@each("shape", [(7, 3), (2, 9), (1, 5), (5, 1)])
def test_a_matrix_is_cut_between_its_rows_over_all_servers(shape: tuple[int, int]) -> None:
    wired = Wired(2, 3, SMALL, bigarray_bound=4)
    for rank in (0, 1):
        wired.set_optimizer(rank, "groupadagrad", learning_rate=0.5)
        wired.declare(rank, {"w": shape})
    size = shape[0] * shape[1]
    wired.settle()
    wired.give(0, {"w": vector(0, size)})
    slices = wired.infos["w"].slices
    assert {piece.server for piece in slices} == {0, 1, 2}
    assert all(piece.start % shape[1] == 0 for piece in slices) and slices[-1].stop == size
    updater, weight = Updater(create("groupadagrad", learning_rate=0.5)), vector(0, size)
    for step in (1, 2):
        grads = [vector(10 * step, size), vector(10 * step + 1, size)]
        reads = [wired.pushpull(rank, {"w": grads[rank]}) for rank in (0, 1)]
        wired.settle()
        updater.update("w", weight, grads, [1.0, 1.0], DType.FLOAT32, weight, extent=Extent("w", shape))
        np.testing.assert_array_equal(wired.value(reads[1], "w"), weight)


def test_a_vector_is_refused_by_a_rule_for_rows_where_it_is_pushed() -> None:
    wired = Wired(1, 1)
    wired.set_optimizer(0, "groupadagrad")
    wired.settle()
    wired.initialise({"w": [1, 2, 3]})
    request = wired.push(0, {"w": [1, 1, 1]})
    wired.settle()
    assert isinstance(wired.failed[request], PushRefused)
    assert "updates matrices, but the parameter 'w' has shape (3,)" in str(wired.failed[request])


def test_rows_are_never_torn_and_a_long_row_is_a_slice_of_its_own() -> None:
    slices = cut(5 * 7, 4, Placement.CUT_AT_ROWS, 2, 3, 60, 7)
    assert [(one.number, one.server, one.start, one.stop) for one in slices] == [
        (3, 0, 0, 14), (4, 0, 14, 21), (5, 1, 21, 35)
    ]  # fmt: skip
    assert [one.count for one in cut(3 * 9, 4, Placement.CUT_AT_ROWS, 1, 0, 8, 9)] == [9, 9, 9]


def test_what_must_stay_whole_goes_to_the_emptiest_server_however_large() -> None:
    placer = Placer(3, 4, 1 << 20)
    assert placer.place(["a", "b"], [(100,), (90,)], [4, 4], Keep.WHOLE).homes == (0, 1)
    assert placer.place(["c"], [(10, 10)], [4], Keep.ROWS).homes == (Placement.CUT_AT_ROWS,)
    assert placer.loads_bytes == [400 + 120, 360 + 160, 120]


@each(
    "home, shape, keep, split",
    [
        (0, (100,), Keep.WHOLE, False),
        (Placement.CUT, (100,), Keep.WHOLE, True),
        (Placement.CUT, (100,), Keep.NOTHING, False),
        (Placement.CUT, (100,), Keep.ROWS, False),
        (Placement.CUT, (10, 10), Keep.ROWS, False),
        (Placement.CUT, (5, 20), Keep.ROWS, True),
        (Placement.CUT_AT_ROWS, (5, 20), Keep.ROWS, False),
        (0, (5, 20), Keep.ROWS, False),
        (0, (5, 2000), Keep.ROWS, True),
    ],
)
def test_a_key_knows_whether_it_is_split(home: int, shape: tuple[int, ...], keep: Keep, split: bool) -> None:
    key = DeclaredKey("w", shape, DType.FLOAT32, Member(worker(0), 1), DType.FLOAT32, "", 0, home=home, first_slice=0)
    assert key.is_split(keep, 2, 4096) is split


def test_a_rule_that_needs_the_whole_may_come_after_pushes_in_which_slices_travelled_with_others() -> None:
    wired = Wired(1, 1, SMALL, bigarray_bound=100)
    first = {"w": vector(0).tolist(), "b": [1.0]}
    wired.initialise(first)
    for _ in range(3):
        wired.push(0, {"w": vector(1), "b": [2]})
        wired.settle()
    wired.set_optimizer(0, "lamb")
    wired.settle()
    read = wired.pushpull(0, {"w": vector(2), "b": [3]})
    wired.settle()
    updater, weight = Updater(create("lamb")), vector(1)
    updater.update("w", weight, [vector(2)], [1.0], DType.FLOAT32, weight, extent=Extent("w", (SIZE,)))
    np.testing.assert_allclose(wired.value(read, "w"), weight, rtol=2e-6, atol=2e-6)


# Under faults.


@register
@dataclass(kw_only=True, eq=False)
class Measured(Optimizer):
    """w ← w − lr·g, after lengths were asked for that nothing uses: what it makes is as exact as sums are."""

    name: ClassVar[str] = "measured_of_whole_parameters"
    norm_count: ClassVar[int] = 1

    @property
    def state_names(self) -> tuple[str, ...]:
        return ()

    def measure(self, turn: int, weight: Any, grad: Any, state: Any, scratch: Any, step: Step) -> tuple[Any, ...]:
        return (weight,)

    def apply(self, weight: Any, grad: Any, out: Any, state: Any, scratch: Any, step: Step) -> None:
        assert len(step.norms) == 1
        np.subtract(weight, step.lr * grad, out=out)


@each("name", ["updated", "async", "storm", "async storm", "leaver in a storm", "killed worker"])
def test_every_weight_is_exact_in_all_weathers(name: str) -> None:
    scenario = replace(SCENARIOS[name], num_servers=1, optimizer=Measured.name)
    results = [run(seed, scenario) for seed in range(3)]  # it raises where a weight is wrong
    assert scenario.victims or sum(result.reads for result in results) > 0
