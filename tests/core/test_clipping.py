"""Pushes in two turns, as gradients travel that servers clip by the norm of all of them: measured, then applied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from kvdist.config.settings import Limits
from kvdist.core.worker.requests import Run, RunKind, Transfer, make_plan
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.kvstore.clipping import applying_runs, norm_of
from kvdist.protocol.messages import Flag
from tests.cases import each
from tests.core.wired import SERVER_DECIDES, Wired, _payload

SHAPES = {"a": 3, "b": 1, "large": 40, "c": 2}
LIMITS = Limits(slice_bytes=64)  # sixteen elements of float32


def gradient(rank: int, step: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(100 * step + rank)
    return {key: generator.integers(-9, 9, size).astype(np.float32) for key, size in SHAPES.items()}


def made(num_workers: int = 2, num_servers: int = 2, optimizer: str = "sgd", **numbers: float) -> Wired:
    """A cluster with small keys that share a block, and one that is cut over the servers; weights are zeros."""
    wired = Wired(num_workers, num_servers, LIMITS, bigarray_bound=16)
    for rank in range(num_workers):
        wired.set_optimizer(rank, optimizer, **{"learning_rate": 1.0, **numbers})
    wired.settle()
    wired.initialise({key: [0.0] * size for key, size in SHAPES.items()})
    return wired


def measure(
    wired: Wired,
    rank: int,
    grads: Mapping[str, np.ndarray | None],
    setting: tuple[float, float, float] = SERVER_DECIDES,
) -> tuple[int, list[Run]]:
    """The first turn: the request, and its runs with what the servers answer."""
    infos = [wired.infos[key] for key in grads]
    arrays = [grads[info.key] for info in infos]
    runs = []
    for run in make_plan(infos, wired.limits.slice_bytes).runs:
        flags = [Flag.MEASURE | (Flag.EMPTY if arrays[i] is None else 0) for i in run.key_of]
        payload = memoryview(_payload(run, arrays))
        runs.append(Run(run, payload, (), np.array(flags, np.uint8), (setting,), kept={}))
    return wired.ask(rank, lambda number: Transfer(number, RunKind.PUSHPULL, "measure", runs)), runs


def apply(wired: Wired, rank: int, factor: float, keys: Sequence[str] = tuple(SHAPES)) -> dict[str, np.ndarray]:
    """The second turn: what it will have pulled."""
    plan = make_plan([wired.infos[key] for key in keys], wired.limits.slice_bytes)
    results = {key: np.full(SHAPES[key], math.nan, np.float32) for key in keys}
    runs = [
        replace(run, sinks=[results[keys[piece.index]][piece.start : piece.stop] for piece in run.plan.pieces])
        for run in applying_runs(plan, list(results.values()), factor)
    ]
    wired.ask(rank, lambda number: Transfer(number, RunKind.PUSHPULL, "apply", runs))
    return results


def together(num_workers: int, step: int = 0) -> dict[str, np.ndarray]:
    grads = [gradient(rank, step) for rank in range(num_workers)]
    return {key: sum(grad[key] for grad in grads) for key in SHAPES}


def norm(grads: Mapping[str, np.ndarray]) -> float:
    return float(np.linalg.norm(np.concatenate(list(grads.values())).astype(np.float64)))


@each("num_workers", [1, 2, 5])
@each("num_servers", [1, 3])
def test_nothing_changes_before_all_is_measured_and_all_workers_learn_the_norm(num_workers, num_servers):
    wired = made(num_workers, num_servers)
    weights = {key: np.zeros(size, np.float32) for key, size in SHAPES.items()}
    for step in range(3):
        asked = [measure(wired, rank, gradient(rank, step)) for rank in range(num_workers)]
        wired.settle()
        assert all(request in wired.completed for request, _ in asked)
        assert {norm_of(runs) for _, runs in asked} == {norm(together(num_workers, step))}
        read = wired.pull(0, *SHAPES)
        wired.settle()
        for key, weight in weights.items():
            assert wired.value(read, key) == weight.tolist()
        pulled = [apply(wired, rank, 0.25) for rank in range(num_workers)]
        wired.settle()
        for key, grad in together(num_workers, step).items():
            weights[key] = weights[key] - np.float32(0.25) * grad
            for results in pulled:
                assert results[key].tolist() == weights[key].tolist()


def test_settings_of_the_first_turn_count_and_a_worker_without_a_gradient():
    wired = made()
    asked = [
        measure(wired, 0, gradient(0), (0.5, 0.0, 2.0)),
        measure(wired, 1, dict.fromkeys(SHAPES), (0.5, 0.0, 3.0)),
    ]
    wired.settle()
    assert norm_of(asked[0][1]) == norm_of(asked[1][1]) == 2 * norm(gradient(0))
    pulled = [apply(wired, rank, 0.5) for rank in (0, 1)]
    wired.settle()
    for results in pulled:
        assert results["large"].tolist() == (-0.5 * gradient(0)["large"]).tolist()


def test_turns_of_other_lists_of_keys_split_what_was_measured_together():
    wired = made(num_servers=1)
    for rank in (0, 1):
        measure(wired, rank, gradient(rank))
    wired.settle()
    pulled = [[apply(wired, rank, 1.0, [key]) for key in SHAPES] for rank in (0, 1)]
    wired.settle()
    for results in pulled:
        for key, one in zip(SHAPES, results, strict=True):
            assert one[key].tolist() == (-together(2)[key]).tolist()


def test_a_rule_with_norms_of_a_whole_parameter_is_applied_to_all_its_slices_at_once():
    wired, plain = made(2, 2, "lars", eta=0.5, wd=0.1), made(2, 2, "lars", eta=0.5, wd=0.1)
    for rank in (0, 1):
        measure(wired, rank, gradient(rank))
    wired.settle()
    pulled = [apply(wired, rank, 0.25) for rank in (0, 1)]
    quarter = [{key: 0.25 * grad for key, grad in gradient(rank).items()} for rank in (0, 1)]
    reads = [plain.pushpull(rank, quarter[rank]) for rank in (0, 1)]
    wired.settle()
    plain.settle()
    for key in SHAPES:
        assert pulled[0][key].tolist() == pulled[1][key].tolist() == plain.value(reads[0], key)


def test_what_is_measured_and_never_applied_leaves_later_pushes_as_they_are_and_is_forgotten():
    wired = made()
    for rank in (0, 1):
        measure(wired, rank, gradient(rank))
    wired.settle()
    reads = [wired.pushpull(rank, gradient(rank, 1)) for rank in (0, 1)]
    wired.settle()
    for key, grad in together(2, 1).items():
        assert wired.value(reads[0], key) == (-grad).tolist()
    for rank in (0, 1):
        apply(wired, rank, 1.0)
    wired.settle()
    assert {type(error) for error in wired.failed.values()} == {PushRefused}


def test_who_has_left_between_the_turns_is_not_waited_for():
    wired = made()
    for rank in (0, 1):
        measure(wired, rank, gradient(rank))
    wired.settle()
    wired.leave(1)
    wired.settle()
    results = apply(wired, 0, 1.0)
    wired.settle()
    assert results["large"].tolist() == (-together(2)["large"]).tolist()


def test_workers_that_clip_otherwise_are_all_told():
    wired = made()
    requests = [measure(wired, 0, gradient(0))[0], wired.pushpull(1, gradient(1))]
    wired.settle()
    for request in requests:
        assert isinstance(wired.failed[request], OptimizerMismatch)
        assert "worker-0 pushes a gradient to be clipped; worker-1 pushes a gradient." in str(wired.failed[request])
    for rank in (0, 1):
        measure(wired, rank, gradient(rank))
    wired.settle()
    before = len(wired.failed)
    for rank in (0, 1):
        apply(wired, rank, 0.5 + rank / 4)
    wired.settle()
    errors = list(wired.failed.values())[before:]
    assert [type(error) for error in errors] == [OptimizerMismatch] * 2
    assert all("worker-1 multiplies by 0.75" in str(error) for error in errors)


@each("factor", [1.0, math.nan])
def test_what_was_not_measured_is_not_applied(factor):
    wired = made(1)
    apply(wired, 0, factor)
    wired.settle()
    (error,) = wired.failed.values()
    assert isinstance(error, PushRefused) and "was not measured" in str(error)


def test_integers_have_no_norm():
    wired = Wired(1)
    wired.initialise({"n": [1, 2]}, dtype="int32")
    request, _ = measure(wired, 0, {"n": np.array([1, 2], np.int32)})
    wired.settle()
    assert "only floating types have a norm" in str(wired.failed[request])
