"""Gradient descent with noise, and noise that is the same however the work is divided."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.interface import Array
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.gradient_descent import add_decay
from kvdist.optimizer.registry import register
from kvdist.optimizer.step import Step
from kvdist.schema import number, whole

WORDS_PER_COUNT = 4
"""Philox gives four words of 64 bits for each value of its counter."""


def normal_noise(seed: int, key: Hashable, count: int, start: int, length: int) -> Array:
    """Independent standard normal numbers, float64, for the elements `start` to `start + length` of a parameter.

    Element i always gets the same number, whatever stretch it is asked for with and in whichever process: it comes
    from word i of the counter-based generator Philox, whose key is (`seed`, the parameter's name) and whose counter
    is (i, `count`). Two halves of the word are a point in the unit square, and Box and Muller make it normal.

    Args:
        seed: of the whole training, at least 0.
        key: the parameter's.
        count: which update it is.
        start, length: which elements.
    """
    name = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    first = start // WORDS_PER_COUNT
    generator = np.random.Philox(
        key=np.array([seed, name], np.uint64), counter=np.array([first, count, 0, 0], np.uint64)
    )
    skipped = start - first * WORDS_PER_COUNT
    words = generator.random_raw(skipped + length)[skipped:]
    radius = ((words >> np.uint64(32)).astype(np.float64) + 1.0) * 2.0**-32  # above 0, for the logarithm
    np.log(radius, out=radius)
    np.multiply(radius, -2.0, out=radius)
    np.sqrt(radius, out=radius)
    angle = (words & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2.0 * math.pi * 2.0**-32)
    np.cos(angle, out=angle)
    return np.multiply(radius, angle, out=radius)


@register
@dataclass(kw_only=True, eq=False)
class SGLD(Optimizer):
    """Stochastic gradient Langevin dynamics: gradient descent that ends in samples of the posterior.

    ĝ = g + wd·w;  w ← w − lr/2·ĝ + N(0, variance lr).

    The noise of an element depends on the seed, its key, its place in the parameter and the number of the update, not
    on servers, slices or threads: two runs with one seed are equal. See `normal_noise`.

    Source: Welling and Teh, Bayesian Learning via Stochastic Gradient Langevin Dynamics (2011).

    Attributes:
        seed: of the noise; a whole number.
    """

    name: ClassVar[str] = "sgld"
    by_place: ClassVar[bool] = True
    on_host: ClassVar[bool] = True

    learning_rate: float = number(0.1, at_least=0)
    seed: int = whole(0, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """None."""
        return ()

    def apply(
        self, weight: Array, grad: Array, out: Array, state: tuple[Array, ...], scratch: Array, step: Step
    ) -> None:
        """Five passes, and some ten over float64 for the noise."""
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, step.lr / 2.0, out=grad)
        noise = normal_noise(self.seed, step.extent.key, step.count, step.start, weight.size)
        np.multiply(noise, math.sqrt(step.lr), out=noise)
        np.copyto(scratch, noise, casting="same_kind")
        np.subtract(weight, grad, out=out)
        np.add(out, scratch, out=out)
