"""Rules that choose the weight which would have been best so far: follow the regularised, or the moving, leader.

They compute the weight from sums instead of adding a step to it. Both divide by the learning rate, so it is above 0.
The expressions' gradient is summed and clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from kvdist.kernels.elementwise import above_zero, decayed, negated, sign, sqrt
from kvdist.kernels.interface import Equation
from kvdist.optimizer.adam import share, toward
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.registry import register
from kvdist.schema import flag, number


def _require_rate(name: str, lr: float, extent: Extent) -> None:
    if lr <= 0:
        raise ValueError(
            f"{name} divides by the learning rate, but that of {extent.key!r} is {lr:g}: use a rate above 0; to freeze"
            " a parameter, do not push it"
        )


def ftrl(grad, weight, sums, squares, inverse, wd, lamda1, beta):
    """σ = (√(n + g²) − √n)/lr;  z ← z + g − σ·w;  n ← n + g²;  w ← −sign(z)·max(|z| − λ1, 0)/((β + √n)/lr + wd).

    `inverse` is 1/lr.
    """
    former = sqrt(squares)
    squares = squares + grad * grad
    root = sqrt(squares)
    sums = sums + grad - (root - former) * inverse * weight
    size = above_zero(abs(sums) - lamda1) / ((root + beta) * inverse + wd)
    return negated(size * sign(sums)), sums, squares


@register
@dataclass(kw_only=True, eq=False)
class Ftrl(Optimizer):
    """Follow the regularised leader: weights are exactly 0 where the sum of gradients is small.

    σ = (√(n + g²) − √n)/lr;  z ← z + g − σ·w;  n ← n + g²;
    w ← −sign(z)·max(|z| − λ1, 0)/((β + √n)/lr + wd).  The decay acts only in this formula.

    The first update discards the initial weight, except for its part in z. In a row-sparse table the rule is lazy
    unless `lazy_update` is False, as in MXNet: rows without a gradient keep their weights.

    Source: McMahan et al., Ad Click Prediction: a View from the Trenches (2013).

    Attributes:
        lamda1: λ1, weight of the L1 penalty, at least 0.
        beta: β, at least 0; with 0 and no decay, an element that never had a gradient becomes NaN.
    """

    name: ClassVar[str] = "ftrl"

    learning_rate: float = number(0.1, at_least=0)
    lamda1: float = number(0.01, at_least=0)
    beta: float = number(1.0, at_least=0)
    lazy_update: bool = flag(True)

    state_names = ("sums", "squares")  # z and n

    def check_update(self, lr: float, wd: float, extent: Extent) -> None:
        """Reject a learning rate of 0."""
        _require_rate(self.name, lr, extent)

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `ftrl`."""
        return Equation(ftrl, (1.0 / lr, wd, self.lamda1, self.beta))


def ftml(grad, weight, divisor, variance, sums, wd, beta1, rest1, beta2, rest2, of_root, epsilon, scale):
    """ĝ = g + wd·w;  v ← β2·v + (1 − β2)·ĝ²;  e = scale·(of_root·√v + ε);  z ← β1·z + (1 − β1)·ĝ − (e − β1·d)·w;
    d ← e;  w ← −z/d, with scale = (1 − β1ᵗ)/lr and of_root = 1/√(1 − β2ᵗ).
    """
    grad = decayed(grad, weight, wd)
    variance = toward(variance, grad * grad, beta2, rest2)
    new = (sqrt(variance) * of_root + epsilon) * scale
    sums = toward(sums, grad, beta1, rest1) - (new - divisor * beta1) * weight
    return negated(sums / new), new, variance, sums


@register
@dataclass(kw_only=True, eq=False)
class FTML(Optimizer):
    """Follow the moving leader.

    ĝ = g + wd·w;  v ← β2·v + (1 − β2)·ĝ²;  e = (1 − β1ᵗ)/lr·(√(v/(1 − β2ᵗ)) + ε);
    z ← β1·z + (1 − β1)·ĝ − (e − β1·d)·w;  d ← e;  w ← −z/d.

    Source: Zheng and Kwok, Follow the Moving Leader in Deep Learning (2017).

    Attributes:
        beta1, beta2: decay of z and v, from 0 to below 1.
        epsilon: ε, at least 0; with 0 an element that never had a gradient becomes NaN.
    """

    name: ClassVar[str] = "ftml"

    learning_rate: float = number(0.0025, at_least=0)
    beta1: float = number(0.6, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-8, at_least=0)

    state_names = ("divisor", "variance", "sums")  # d, v and z

    def check_update(self, lr: float, wd: float, extent: Extent) -> None:
        """Reject a learning rate of 0."""
        _require_rate(self.name, lr, extent)

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `ftml`."""
        of_root, scale = 1.0 / math.sqrt(1.0 - self.beta2**count), (1.0 - self.beta1**count) / lr
        return Equation(ftml, (wd, *share(self.beta1), *share(self.beta2), of_root, self.epsilon, scale))
