"""Learning-rate schedules: the mirrored system's values, what is refused, and the trip in a description."""

from __future__ import annotations

import math

import numpy as np
import pytest

import kvdist
from kvdist.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
    from_description,
)
from kvdist.optimizer import Updater, create
from kvdist.optimizer import from_description as optimizer_from
from tests.cases import each

EVERY = [
    FactorScheduler(2, 0.5, base_lr=1.0),
    FactorScheduler(step=100, factor=0.1, stop_factor_lr=1e-4, base_lr=1.0, warmup_steps=20, warmup_begin_lr=0.1),
    MultiFactorScheduler([2, 5], 0.1, base_lr=1.0),
    MultiFactorScheduler(list(range(1, 33)), 0.9, warmup_mode="constant"),
    PolyScheduler(4, 1.0),
    CosineScheduler(max_update=1000, base_lr=3, final_lr=0.1, warmup_steps=7),
]
every_schedule = pytest.mark.parametrize("schedule", EVERY, ids=lambda one: f"{one.name}-{one.warmup_steps}")


@each(
    "schedule, rates",
    [
        (FactorScheduler(2, 0.5, base_lr=1), [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125]),
        (MultiFactorScheduler([2, 5], 0.1, base_lr=1), [1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01]),
        (PolyScheduler(4, base_lr=1), [1, 0.5625, 0.25, 0.0625, 0, 0]),
        (CosineScheduler(4, base_lr=1), [1, (2 + math.sqrt(2)) / 4, 0.5, (2 - math.sqrt(2)) / 4, 0, 0]),
        (PolyScheduler(4, base_lr=1, pwr=1, final_lr=0.5), [1, 0.875, 0.75, 0.625, 0.5, 0.5]),
    ],
)
def test_the_first_rates_are_those_of_the_mirrored_system(schedule, rates):
    np.testing.assert_allclose([schedule(k) for k in range(len(rates))], rates, rtol=1e-14, atol=1e-16)


@each(
    "schedule, rates",
    [
        (
            FactorScheduler(100, 0.1, 1e-4, 1, warmup_steps=20, warmup_begin_lr=0.1, warmup_mode="constant"),
            {0: 0.1, 10: 0.1, 21: 1, 101: 0.1, 201: 0.01, 1000: 1e-4},
        ),
        (
            MultiFactorScheduler([15, 25], 0.1, 0.1, warmup_steps=10, warmup_begin_lr=0.05),
            {0: 0.05, 5: 0.075, 15: 0.1, 16: 0.01, 20: 0.01, 26: 0.001, 100: 0.001},
        ),
        (PolyScheduler(1000, 3, 2, 0, warmup_steps=100), {0: 0, 50: 1.5, 100: 3, 1000: 0, 5000: 0}),
        (CosineScheduler(1000, 3, 0.1), {0: 3, 1000: 0.1, 5000: 0.1}),
    ],
)
def test_the_mirrored_systems_own_tests_hold(schedule, rates):
    for count, rate in rates.items():
        assert schedule(count) == pytest.approx(rate, rel=1e-12, abs=1e-15)


def test_the_mirrored_systems_bounds_hold():
    poly, cosine = PolyScheduler(1000, 3, 2, 0, warmup_steps=100), CosineScheduler(1000, 3, 0.1)
    assert poly(101) < 3 and poly(500) < 1.6 and cosine(500) > 1.5


@every_schedule
def test_a_rate_depends_on_the_count_alone(schedule):
    forwards = [schedule(k) for k in range(50)]
    assert [schedule(k) for k in reversed(range(50))] == forwards[::-1]
    assert all(0 <= rate <= schedule.base_lr for rate in forwards)


@each(
    "make, error, words",
    [
        (lambda: FactorScheduler(0), ValueError, "step must be at least 1"),
        (lambda: FactorScheduler(1.5), TypeError, "step must be a whole number"),
        (lambda: FactorScheduler(True), TypeError, "step must be a whole number"),
        (lambda: FactorScheduler(1, 1.5), ValueError, "factor must be at most 1"),
        (lambda: FactorScheduler(1, base_lr=-1), ValueError, "base_lr must be at least 0"),
        (lambda: FactorScheduler(1, base_lr=0.1, warmup_begin_lr=0.2), ValueError, "warmup_begin_lr is 0.2, above"),
        (lambda: FactorScheduler(1, warmup_steps=-1), ValueError, "warmup_steps must be at least 0"),
        (lambda: FactorScheduler(1, warmup_mode="cubic"), ValueError, "one of linear, constant, not 'cubic'"),
        (lambda: MultiFactorScheduler([]), ValueError, "takes 1 to 32"),
        (lambda: MultiFactorScheduler(range(1, 40)), TypeError, "must be a list"),
        (lambda: MultiFactorScheduler(list(range(1, 40))), ValueError, "has 39 numbers; it takes 1 to 32"),
        (lambda: MultiFactorScheduler([2, 2]), ValueError, "at least 1 and increase"),
        (lambda: MultiFactorScheduler([0, 2]), ValueError, "at least 1 and increase"),
        (lambda: MultiFactorScheduler("25"), TypeError, "must be a list of whole numbers, not str"),
        (lambda: MultiFactorScheduler([1.5]), TypeError, "a step must be a whole number"),
        (lambda: PolyScheduler(0), ValueError, "max_update must be at least 1"),
        (lambda: PolyScheduler(10, warmup_steps=10), ValueError, "not after the warm-up of 10"),
        (lambda: CosineScheduler(10, warmup_steps=11), ValueError, "not after the warm-up of 11"),
        (lambda: CosineScheduler(10, float("nan")), ValueError, "base_lr must be finite"),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(make, error, words):
    with pytest.raises(error, match=words):
        make()


# In an optimizer.


def test_an_optimizer_takes_its_first_rate_from_the_schedule():
    optimizer = create("sgd", lr_scheduler=FactorScheduler(2, base_lr=0.5))
    assert optimizer.learning_rate == 0.5
    assert [optimizer.lr_at(1.0, count) for count in (1, 2, 3)] == [0.5, 0.5, 0.5]


@each("rate", [0.1, 0.25])
def test_a_rate_that_is_given_beside_the_schedule_replaces_its_base(rate):
    # 0.1 is the default of sgd, and given all the same.
    optimizer = create("sgd", learning_rate=rate, lr_scheduler=CosineScheduler(10, base_lr=0.5))
    assert (optimizer.learning_rate, optimizer.lr_scheduler.base_lr) == (rate, rate)


def test_with_a_schedule_nobody_else_sets_the_rate():
    optimizer = create("sgd", lr_scheduler=PolyScheduler(10, base_lr=0.5))
    with pytest.raises(AttributeError, match=r"follows PolyScheduler\(max_update=10.*without lr_scheduler"):
        optimizer.learning_rate = 0.25
    with pytest.raises(AttributeError, match="lr_scheduler cannot change"):
        optimizer.lr_scheduler = None
    optimizer.learning_rate = 0.5  # what it is already


@each("wrong", [lambda count: 0.1, 0.1, "cosine", FactorScheduler])
def test_what_cannot_travel_is_no_schedule(wrong):
    with pytest.raises(TypeError, match=r"lr_scheduler must be a schedule of kvdist\.lr_scheduler.*learning_rate"):
        create("sgd", lr_scheduler=wrong)


def test_a_schedule_of_ones_own_is_refused_because_servers_would_not_know_it():
    class Constant(LRScheduler):
        name = "factor"

        def __init__(self):
            pass

        def _after_warmup(self, num_update):
            return 1.0

    with pytest.raises(TypeError, match="cannot travel to servers"):
        create("sgd", lr_scheduler=Constant())


def test_an_update_counts_for_itself_and_multiplies_the_rate_by_the_keys_factor():
    optimizer = create("sgd", lr_scheduler=MultiFactorScheduler([1, 2], 0.5, base_lr=1.0))
    optimizer.set_lr_mult({"b": 2.0})
    updater = Updater(optimizer)
    a, b = np.zeros(2), np.zeros(2)
    for _ in range(3):
        updater("a", np.ones(2), a)
    updater("b", np.ones(2), b)
    np.testing.assert_array_equal(a, np.full(2, -(1 + 0.5 + 0.25)))
    np.testing.assert_array_equal(b, np.full(2, -2.0))


@every_schedule
def test_a_description_makes_an_equal_schedule(schedule):
    optimizer = create("adam", lr_scheduler=schedule, wd=0.1)
    description = optimizer.describe()
    assert all(type(value) in (str, float, int, bool, type(None)) for value in description.values())
    assert len(description) <= 64 and all(len(entry) <= 64 for entry in description)
    assert optimizer_from(description).lr_scheduler == schedule
    assert optimizer_from(description).describe() == description
    assert from_description(schedule.describe()) == schedule


GOOD = create("sgd", lr_scheduler=MultiFactorScheduler([2, 5])).describe()


@each(
    "description, words",
    [
        ({**GOOD, "lr_scheduler": "warp"}, "unknown schedule 'warp'"),
        ({**GOOD, "lr_scheduler": 3}, "unknown schedule 3"),
        ({**GOOD, "lr_scheduler": None}, "unknown schedule None"),
        ({**GOOD, "lr_scheduler": "cosine"}, "other entries"),
        ({**GOOD, "lr_scheduler.other": 1.0}, "other entries"),
        ({**GOOD, "lr_scheduler.step.7": 9}, "other entries"),
        ({**GOOD, "lr_scheduler.step.0": 5}, "must be at least 1 and increase"),
        ({**GOOD, "lr_scheduler.step.0": "5"}, "a step must be a whole number"),
        ({**GOOD, "lr_scheduler.warmup_mode": "x" * 1000}, "^.{0,300}$"),
        ({key: value for key, value in GOOD.items() if key != "lr_scheduler.factor"}, "other entries"),
        ({key: value for key, value in GOOD.items() if key != "lr_scheduler"}, "has exactly name"),
    ],
)
def test_a_description_that_no_schedule_wrote_is_a_value_error(description, words):
    with pytest.raises(ValueError, match=words):
        optimizer_from(description)


# Where the weights live.


@each("kind", ["local", "dist"])
def test_a_store_computes_the_rate_from_the_number_of_updates(kind):
    schedule = FactorScheduler(1, 0.5, base_lr=1.0)
    with kvdist.kv.create(kind) as store:
        store.set_optimizer(create("sgd", lr_scheduler=schedule))
        store.init(["a", "b"], [np.zeros(3), np.zeros(3)])
        for _ in range(4):
            store.push("a", np.ones(3))
        store.push("b", np.ones(3))
        a, b = store.pull(["a", "b"])
    np.testing.assert_array_equal(a, np.full(3, -(1 + 0.5 + 0.25 + 0.125)))
    np.testing.assert_array_equal(b, np.full(3, -1.0))


def test_ranks_that_give_other_schedules_differ():
    with kvdist.kv.create("dist") as store:
        store.set_optimizer("sgd", lr_scheduler=FactorScheduler(1))
        with pytest.raises(kvdist.OptimizerMismatch, match=r"FactorScheduler\(step=2"):
            store.set_optimizer("sgd", lr_scheduler=FactorScheduler(2))
