"""Rules that scale each element by its own history: Adam, and Adam with decoupled weight decay.

The small number ε stands outside the root and outside the correction of the bias, as in MXNet; torch corrects the
variance first, so its ε counts differently in the first steps. Passes are counted after the gradient has been summed
and clipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.gradient_descent import add_decay
from kvdist.optimizer.registry import register
from kvdist.optimizer.schema import flag, number


def _corrected(lr: float, beta1: float, beta2: float, count: int) -> float:
    """lr·√(1 − β2ᵗ)/(1 − β1ᵗ): both moments start at 0, this undoes their bias towards it."""
    return lr * math.sqrt(1.0 - beta2**count) / (1.0 - beta1**count)


def _moments(beta1: float, beta2: float, epsilon: float) -> tuple[float, ...]:
    """β1, 1 − β1, β2, 1 − β2, ε: what `_ratio` takes, before it is rounded to the type of the arrays."""
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, epsilon


def _ratio(grad: Array, state: tuple[Array, ...], scratch: Array, moments: Sequence[float]) -> None:
    """m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  scratch ← m/(√v + ε). Ten passes; `grad` is used up."""
    mean, variance = state
    beta1, rest1, beta2, rest2, epsilon = moments
    np.multiply(grad, rest1, out=scratch)
    np.multiply(mean, beta1, out=mean)
    np.add(mean, scratch, out=mean)
    np.multiply(grad, grad, out=grad)
    np.multiply(grad, rest2, out=grad)
    np.multiply(variance, beta2, out=variance)
    np.add(variance, grad, out=variance)
    np.sqrt(variance, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.divide(mean, scratch, out=scratch)


@register
@dataclass(kw_only=True, eq=False)
class Adam(Optimizer):
    """Adaptive moments.

    ĝ = g + wd·w;  m ← β1·m + (1 − β1)·ĝ;  v ← β2·v + (1 − β2)·ĝ²;
    w ← w − lr·√(1 − β2ᵗ)/(1 − β1ᵗ) · m/(√v + ε), with t the number of updates.

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
    """

    name: ClassVar[str] = "adam"

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-8, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """m and v."""
        return ("mean", "variance")

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """The rate with its correction, wd, and the moments' numbers."""
        rate = _corrected(lr, self.beta1, self.beta2, count)
        return Equation("adam", (rate, wd, *_moments(self.beta1, self.beta2, self.epsilon)))

    def apply(
        self,
        weight: Array,
        grad: Array,
        out: Array,
        state: tuple[Array, ...],
        scratch: Array,
        lr: float,
        wd: float,
        count: int,
    ) -> None:
        """Twelve passes."""
        rate, wd, *moments = self.equation(lr, wd, count).numbers
        add_decay(grad, weight, wd, scratch)
        _ratio(grad, state, scratch, moments)
        np.multiply(scratch, rate, out=scratch)
        np.subtract(weight, scratch, out=out)


@register
@dataclass(kw_only=True, eq=False)
class AdamW(Optimizer):
    """Adam with weight decay beside the moments.

    m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  w ← w − η·(m/(√v + ε) + wd·w),
    with η = lr·√(1 − β2ᵗ)/(1 − β1ᵗ), or η = lr without `correct_bias`. The decay is of the old weight.

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
        correct_bias: whether η undoes the moments' bias towards 0.
    """

    name: ClassVar[str] = "adamw"

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-6, at_least=0)
    correct_bias: bool = flag(True)

    @property
    def state_names(self) -> tuple[str, ...]:
        """m and v."""
        return ("mean", "variance")

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """The rate η, wd, and the moments' numbers."""
        rate = _corrected(lr, self.beta1, self.beta2, count) if self.correct_bias else lr
        return Equation("adamw", (rate, wd, *_moments(self.beta1, self.beta2, self.epsilon)))

    def apply(
        self,
        weight: Array,
        grad: Array,
        out: Array,
        state: tuple[Array, ...],
        scratch: Array,
        lr: float,
        wd: float,
        count: int,
    ) -> None:
        """Twelve passes, and two where wd is not 0."""
        rate, wd, *moments = self.equation(lr, wd, count).numbers
        _ratio(grad, state, scratch, moments)
        add_decay(scratch, weight, wd, grad)
        np.multiply(scratch, rate, out=scratch)
        np.subtract(weight, scratch, out=out)
