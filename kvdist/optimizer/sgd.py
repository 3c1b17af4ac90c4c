"""Gradient descent: plain, with momentum, with Nesterov's momentum, by signs, for late gradients; and a rule for tests.

Passes are counted after the gradient has been summed and clipped; weight decay adds two unless it is 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.base import Optimizer, States, Step
from kvdist.optimizer.registry import register
from kvdist.schema import number, whole


def add_decay(grad: Array, weight: Array, wd: float, scratch: Array) -> None:
    """grad ← grad + wd·weight. Two passes, none when wd is 0."""
    if wd:
        np.multiply(weight, wd, out=scratch)
        np.add(grad, scratch, out=grad)


def descend(weight: Array, step: Array, out: Array, momentum: Array | None, mu: float) -> None:
    """out ← weight − step; with a momentum m ← mu·m − step, and out ← weight + m. One pass; three with a momentum."""
    if momentum is None:
        np.subtract(weight, step, out=out)
        return
    np.multiply(momentum, mu, out=momentum)
    np.subtract(momentum, step, out=momentum)
    np.add(weight, momentum, out=out)


@register
@dataclass(kw_only=True, eq=False)
class SGD(Optimizer):
    """Stochastic gradient descent.

    ĝ = g + wd·w;  m ← μ·m − lr·ĝ;  w ← w + m.  Without momentum: w ← w − lr·ĝ.

    The learning rate is inside m, as in MXNet: a new rate affects new gradients only.

    Attributes:
        momentum: μ, from 0 to below 1.
    """

    name: ClassVar[str] = "sgd"

    learning_rate: float = number(0.1, at_least=0)
    momentum: float = number(0.0, at_least=0, below=1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """m; empty without momentum."""
        return ("momentum",) if self.momentum else ()

    def rests(self, wd: float) -> bool:
        """True without momentum and decay."""
        return not (self.momentum or wd)

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return the formula with or without momentum."""
        return Equation("sgd_momentum", (lr, wd, self.momentum)) if self.momentum else Equation("sgd", (lr, wd))

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in two passes over the array; four with momentum."""
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, step.lr, out=grad)
        descend(weight, grad, out, state[0] if state else None, self.momentum)


@register
@dataclass(kw_only=True, eq=False)
class NAG(Optimizer):
    """Gradient descent with Nesterov's momentum.

    ĝ = g + wd·w;  m ← μ·m − lr·ĝ;  w ← w + μ·m − lr·ĝ.

    Attributes:
        momentum: μ, from 0 to below 1.
    """

    name: ClassVar[str] = "nag"

    learning_rate: float = number(0.1, at_least=0)
    momentum: float = number(0.9, at_least=0, below=1)

    state_names = ("momentum",)  # m

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return the formula of `apply`."""
        return Equation("nag", (lr, wd, self.momentum))

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in six passes over the array."""
        (momentum,) = state
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, step.lr, out=grad)
        np.multiply(momentum, self.momentum, out=momentum)
        np.subtract(momentum, grad, out=momentum)
        np.multiply(momentum, self.momentum, out=scratch)
        np.subtract(scratch, grad, out=scratch)
        np.add(weight, scratch, out=out)


@register
@dataclass(kw_only=True, eq=False)
class Signum(Optimizer):
    """Steps of constant size in the direction of the momentum's sign; without momentum, of the gradient's sign.

    ĝ = g + wd·w;  m ← μ·m − (1 − μ)·ĝ;  w ← (1 − lr·wd_lh)·w + lr·sign(m).
    Without momentum: w ← (1 − lr·(wd + wd_lh))·w − lr·sign(g).

    Source: Bernstein et al., signSGD: compressed optimisation for non-convex problems (2018).

    Attributes:
        momentum: μ, from 0 to below 1.
        wd_lh: weight decay outside the sign, as in AdamW; at least 0.
    """

    name: ClassVar[str] = "signum"

    learning_rate: float = number(0.01, at_least=0)
    momentum: float = number(0.9, at_least=0, below=1)
    wd_lh: float = number(0.0, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """m; empty without momentum."""
        return ("momentum",) if self.momentum else ()

    def rests(self, wd: float) -> bool:
        """True without momentum and without both decays."""
        return not (self.momentum or wd or self.wd_lh)

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in seven passes over the array; four without momentum."""
        decay = self.wd_lh
        if self.momentum:
            (momentum,) = state
            add_decay(grad, weight, step.wd, scratch)
            np.multiply(momentum, self.momentum, out=momentum)
            np.multiply(grad, 1.0 - self.momentum, out=grad)
            np.subtract(momentum, grad, out=momentum)
            np.sign(momentum, out=grad)
            np.multiply(grad, step.lr, out=grad)
        else:
            decay += step.wd
            np.sign(grad, out=grad)
            np.multiply(grad, -step.lr, out=grad)
        np.multiply(weight, 1.0 - step.lr * decay, out=out)
        np.add(out, grad, out=out)


@register
@dataclass(kw_only=True, eq=False)
class DCASGD(Optimizer):
    """Delay-compensated gradient descent: corrects late gradients in asynchronous stores.

    ĝ = g + wd·w;  d = ĝ + λ·ĝ²·(w − p);  m ← μ·m − lr·d;  p ← w;  w ← w + m.  Without momentum m is −lr·d.

    p is the weight before the slice's last update, by any worker: a single copy for all workers, as in MXNet, while the
    paper keeps a copy per worker.

    Source: Zheng et al., Asynchronous Stochastic Gradient Descent with Delay Compensation (2017).

    Attributes:
        momentum: μ, from 0 to below 1.
        lamda: λ, strength of the correction; at least 0.
    """

    name: ClassVar[str] = "dcasgd"
    states_from_weight: ClassVar[tuple[str, ...]] = ("previous_weight",)

    learning_rate: float = number(0.1, at_least=0)
    momentum: float = number(0.0, at_least=0, below=1)
    lamda: float = number(0.04, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """p, which starts as the weight, and m with momentum."""
        return ("previous_weight", "momentum") if self.momentum else ("previous_weight",)

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in eight passes over the array; ten with momentum."""
        previous = state[0]
        add_decay(grad, weight, step.wd, scratch)
        np.subtract(weight, previous, out=scratch)
        np.copyto(previous, weight)
        np.multiply(scratch, self.lamda, out=scratch)
        np.multiply(scratch, grad, out=scratch)
        np.multiply(scratch, grad, out=scratch)
        np.add(grad, scratch, out=grad)
        np.multiply(grad, step.lr, out=grad)
        descend(weight, grad, out, state[1] if self.momentum else None, self.momentum)


@register
@dataclass(kw_only=True, eq=False)
class Test(Optimizer):
    """Plain sum for tests of a store: w ← w + g, with g the sum of rescale·gradient. It ignores lr and wd."""

    __test__: ClassVar[bool] = False  # or pytest would take the name for a class of tests

    name: ClassVar[str] = "test"

    state_names = ()

    def rests(self, wd: float) -> bool:
        """Always True."""
        return True

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in a single pass over the array."""
        np.add(weight, grad, out=out)


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
    """Stochastic gradient Langevin dynamics: gradient descent whose iterates become samples of the posterior.

    ĝ = g + wd·w;  w ← w − lr/2·ĝ + N(0, variance lr).

    The noise of an element depends on the seed, the key, the position in the parameter and the number of the update,
    but not on servers, slices or threads: two runs with the same seed are equal. See `normal_noise`.

    Source: Welling and Teh, Bayesian Learning via Stochastic Gradient Langevin Dynamics (2011).

    Attributes:
        seed: seed of the noise, an integer.
    """

    name: ClassVar[str] = "sgld"
    by_place: ClassVar[bool] = True
    on_host: ClassVar[bool] = True

    learning_rate: float = number(0.1, at_least=0)
    seed: int = whole(0, at_least=0)

    state_names = ()

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in five passes over the array, plus about ten in float64 for the noise."""
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, step.lr / 2.0, out=grad)
        noise = normal_noise(self.seed, step.extent.key, step.count, step.start, weight.size)
        np.multiply(noise, math.sqrt(step.lr), out=noise)
        np.copyto(scratch, noise, casting="same_kind")
        np.subtract(weight, grad, out=out)
        np.add(out, scratch, out=out)
