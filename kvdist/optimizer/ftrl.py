"""Rules that choose the weight which would have been best so far: follow the regularised, or the moving, leader.

They compute the weight from sums instead of adding a step to it. Both divide by the learning rate, so it is above 0.
Passes are counted after the gradient has been summed and clipped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.interface import Array
from kvdist.optimizer.adam import toward
from kvdist.optimizer.base import Extent, Optimizer, States, Step
from kvdist.optimizer.registry import register
from kvdist.optimizer.sgd import add_decay
from kvdist.schema import flag, number


def _require_rate(name: str, lr: float, extent: Extent) -> None:
    if lr <= 0:
        raise ValueError(
            f"{name} divides by the learning rate, but that of {extent.key!r} is {lr:g}: use a rate above 0; to freeze"
            " a parameter, do not push it"
        )


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

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in nineteen passes over the array."""
        sums, squares = state
        np.add(sums, grad, out=sums)
        np.multiply(grad, grad, out=grad)
        np.sqrt(squares, out=scratch)
        np.add(squares, grad, out=squares)
        np.sqrt(squares, out=grad)
        np.subtract(grad, scratch, out=scratch)
        np.multiply(scratch, 1.0 / step.lr, out=scratch)
        np.multiply(scratch, weight, out=scratch)
        np.subtract(sums, scratch, out=sums)
        # (β + √n)/lr + wd, with √n in `grad`
        np.add(grad, self.beta, out=grad)
        np.multiply(grad, 1.0 / step.lr, out=grad)
        np.add(grad, step.wd, out=grad)
        np.abs(sums, out=scratch)
        np.subtract(scratch, self.lamda1, out=scratch)
        np.maximum(scratch, 0.0, out=scratch)
        np.divide(scratch, grad, out=scratch)
        np.sign(sums, out=grad)
        np.multiply(scratch, grad, out=scratch)
        np.subtract(0.0, scratch, out=out)


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

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in seventeen passes over the array."""
        divisor, variance, sums = state
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, grad, out=scratch)
        toward(variance, self.beta2, scratch, scratch)
        toward(sums, self.beta1, grad, grad)
        np.sqrt(variance, out=scratch)
        np.multiply(scratch, 1.0 / math.sqrt(1.0 - self.beta2**step.count), out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.multiply(scratch, (1.0 - self.beta1**step.count) / step.lr, out=scratch)
        np.multiply(divisor, self.beta1, out=divisor)
        np.subtract(scratch, divisor, out=grad)
        np.multiply(grad, weight, out=grad)
        np.subtract(sums, grad, out=sums)
        np.copyto(divisor, scratch)
        np.divide(sums, divisor, out=scratch)
        np.subtract(0.0, scratch, out=out)
