"""Gradient descent: plain, with momentum, with Nesterov's momentum, by signs, for late gradients; and a rule for tests.

The expressions' gradient is summed and clipped.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.elementwise import decayed, evaluate, sign
from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.base import Optimizer, States, Step
from kvdist.optimizer.registry import register
from kvdist.schema import number, whole


def sgd(grad, weight, lr, wd):
    """w ← w − lr·(g + wd·w)."""
    return weight - decayed(grad, weight, wd) * lr


def sgd_momentum(grad, weight, momentum, lr, wd, mu):
    """m ← μ·m − lr·(g + wd·w);  w ← w + m."""
    momentum = momentum * mu - decayed(grad, weight, wd) * lr
    return weight + momentum, momentum


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
        """Return `sgd_momentum`, or `sgd` without momentum."""
        return Equation(sgd_momentum, (lr, wd, self.momentum)) if self.momentum else Equation(sgd, (lr, wd))


def nag(grad, weight, momentum, lr, wd, mu):
    """ĝ = g + wd·w;  m ← μ·m − lr·ĝ;  w ← w + μ·m − lr·ĝ."""
    step = decayed(grad, weight, wd) * lr
    momentum = momentum * mu - step
    return weight + (momentum * mu - step), momentum


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
        """Return `nag`."""
        return Equation(nag, (lr, wd, self.momentum))


def signum(grad, weight, momentum, lr, wd, mu, rest, kept):
    """m ← μ·m − (1 − μ)·(g + wd·w);  w ← (1 − lr·wd_lh)·w + lr·sign(m)."""
    momentum = momentum * mu - decayed(grad, weight, wd) * rest
    return weight * kept + sign(momentum) * lr, momentum


def sign_descent(grad, weight, step, kept):
    """w ← (1 − lr·(wd + wd_lh))·w + step·sign(g), with step = −lr."""
    return weight * kept + sign(grad) * step


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

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `signum`, or `sign_descent` without momentum."""
        if self.momentum:
            numbers = (lr, wd, self.momentum, 1.0 - self.momentum, 1.0 - lr * self.wd_lh)
            return Equation(signum, numbers)
        return Equation(sign_descent, (-lr, 1.0 - lr * (self.wd_lh + wd)))


def compensated(grad, weight, previous, lr, wd, lamda):
    """lr·(ĝ + λ·ĝ²·(w − p)), with ĝ = g + wd·w."""
    grad = decayed(grad, weight, wd)
    return (grad + (weight - previous) * lamda * grad * grad) * lr


def dcasgd(grad, weight, previous, lr, wd, lamda):
    """w ← w − lr·d;  p ← the w before."""
    return weight - compensated(grad, weight, previous, lr, wd, lamda), weight


def dcasgd_momentum(grad, weight, previous, momentum, lr, wd, lamda, mu):
    """m ← μ·m − lr·d;  w ← w + m;  p ← the w before."""
    momentum = momentum * mu - compensated(grad, weight, previous, lr, wd, lamda)
    return weight + momentum, weight, momentum


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

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `dcasgd_momentum`, or `dcasgd` without momentum."""
        if self.momentum:
            return Equation(dcasgd_momentum, (lr, wd, self.lamda, self.momentum))
        return Equation(dcasgd, (lr, wd, self.lamda))


def added(grad, weight):
    """w ← w + g."""
    return weight + grad


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

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `added`."""
        return Equation(added, ())


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


def sgld(grad, weight, noise, half_lr, wd):
    """w ← w − lr/2·(g + wd·w) + noise."""
    return weight - decayed(grad, weight, wd) * half_lr + noise


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
        """Evaluate `sgld` with the noise of these elements."""
        noise = normal_noise(self.seed, step.extent.key, step.count, step.start, weight.size)
        np.multiply(noise, math.sqrt(step.lr), out=noise)
        np.copyto(scratch, noise, casting="same_kind")
        evaluate(sgld, (grad, weight, scratch), (step.lr / 2.0, step.wd), (out,))
