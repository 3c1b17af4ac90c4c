"""The noise of SGLD: normal, reproducible, and of an element alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.optimizer import Extent, Updater, create
from kvdist.optimizer.sgd import normal_noise
from tests.cases import each


def test_noise_is_normal_to_the_fourth_moment():
    noise = normal_noise(1, "w", 1, 0, 400_000)
    for power, expected, spread in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(np.mean(noise**power) - expected) < 5 * math.sqrt(spread / noise.size)
    assert abs((np.abs(noise) < 1).mean() - 0.682689) < 0.004


@each("length", [1, 2, 3, 4, 5, 1000])
@each("start", [0, 1, 2, 3, 4, 5, 999])
def test_an_element_has_the_same_noise_in_every_stretch(start, length):
    whole = normal_noise(7, "w", 3, 0, 2000)
    np.testing.assert_array_equal(normal_noise(7, "w", 3, start, length), whole[start : start + length])


@each("other", [(8, "w", 3), (7, "v", 3), (7, "w", 4), (7, 0, 3), (7, "0", 3)])
def test_seed_key_and_count_each_make_other_noise(other):
    one, another = normal_noise(7, "w", 3, 0, 10_000), normal_noise(*other, 0, 10_000)
    assert abs(np.corrcoef(one, another)[0, 1]) < 0.05


def test_a_weight_at_rest_gets_noise_of_the_variance_of_its_learning_rate():
    weight = np.zeros(100_000, np.float32)
    Updater(create("sgld", learning_rate=0.25))("w", np.zeros_like(weight), weight)
    assert weight.std() == pytest.approx(0.5, rel=0.02)
    assert abs(weight.mean()) < 0.01


def test_two_runs_of_one_seed_are_equal_and_of_another_are_not():
    def trained(seed):
        updater, weight = Updater(create("sgld", seed=seed)), np.ones(50)
        for _ in range(3):
            updater.update("w", weight, [weight], [1.0], DType.FLOAT64, weight, extent=Extent("w", (50,)))
        return weight

    np.testing.assert_array_equal(trained(5), trained(5))
    assert (trained(5) != trained(6)).all()
