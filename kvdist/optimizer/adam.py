"""Adam and related rules: a running mean of the gradients, divided by a measure of their size, element by element.

The small number ε is outside the root and outside the bias correction, as in MXNet; torch corrects the variance first,
so its ε acts differently in the first steps. Passes are counted after the gradient has been summed and clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.base import Optimizer, States, Step
from kvdist.optimizer.registry import register
from kvdist.optimizer.sgd import add_decay
from kvdist.schema import flag, number


def toward(mean: Array, decay: float, value: Array, scratch: Array) -> None:
    """mean ← decay·mean + (1 − decay)·value. Three passes; `scratch` may be `value`."""
    np.multiply(value, 1.0 - decay, out=scratch)
    np.multiply(mean, decay, out=mean)
    np.add(mean, scratch, out=mean)


def corrected(lr: float, beta1: float, beta2: float, count: int) -> float:
    """lr·√(1 − β2ᵗ)/(1 − β1ᵗ): both moments start at 0, this undoes their bias towards it."""
    return lr * math.sqrt(1.0 - beta2**count) / (1.0 - beta1**count)


def moment_numbers(beta1: float, beta2: float, epsilon: float) -> tuple[float, ...]:
    """β1, 1 − β1, β2, 1 − β2, ε: what `ratio` takes, before it is rounded to the type of the arrays."""
    return beta1, 1.0 - beta1, beta2, 1.0 - beta2, epsilon


def ratio(grad: Array, state: States, scratch: Array, moments: Sequence[float]) -> None:
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
    """Adam: steps scaled by running means of the gradient, m, and of its square, v.

    ĝ = g + wd·w;  m ← β1·m + (1 − β1)·ĝ;  v ← β2·v + (1 − β2)·ĝ²;
    w ← w − lr·√(1 − β2ᵗ)/(1 − β1ᵗ) · m/(√v + ε).

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
    """

    name: ClassVar[str] = "adam"

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-8, at_least=0)

    state_names = ("mean", "variance")  # m and v

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return the formula with the bias-corrected rate, wd and the numbers of the moments."""
        rate = corrected(lr, self.beta1, self.beta2, count)
        return Equation("adam", (rate, wd, *moment_numbers(self.beta1, self.beta2, self.epsilon)))

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in twelve passes over the array."""
        rate, wd, *moments = self.equation(step.lr, step.wd, step.count).numbers
        add_decay(grad, weight, wd, scratch)
        ratio(grad, state, scratch, moments)
        np.multiply(scratch, rate, out=scratch)
        np.subtract(weight, scratch, out=out)


@register
@dataclass(kw_only=True, eq=False)
class AdamW(Optimizer):
    """Adam with decoupled weight decay.

    m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  w ← w − η·(m/(√v + ε) + wd·w),
    with η = lr·√(1 − β2ᵗ)/(1 − β1ᵗ), or η = lr without `correct_bias`. The decay uses the old weight.

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
        correct_bias: whether η corrects the bias of the moments towards 0.
    """

    name: ClassVar[str] = "adamw"

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-6, at_least=0)
    correct_bias: bool = flag(True)

    state_names = ("mean", "variance")  # m and v

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return the formula with the rate η, wd and the numbers of the moments."""
        rate = corrected(lr, self.beta1, self.beta2, count) if self.correct_bias else lr
        return Equation("adamw", (rate, wd, *moment_numbers(self.beta1, self.beta2, self.epsilon)))

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in twelve passes over the array; fourteen if wd is not 0."""
        rate, wd, *moments = self.equation(step.lr, step.wd, step.count).numbers
        ratio(grad, state, scratch, moments)
        add_decay(scratch, weight, wd, grad)
        np.multiply(scratch, rate, out=scratch)
        np.subtract(weight, scratch, out=out)


@register
@dataclass(kw_only=True, eq=False)
class AdaBelief(Optimizer):
    """Adam, but with the second moment of the gradient's deviation from its running mean.

    ĝ = clip(g + wd·w);  m ← β1·m + (1 − β1)·ĝ;  s ← β2·s + (1 − β2)·(ĝ − m)² + ε;  w ← w − η·m/(√s + ε),
    with η as in AdamW. Unlike in the other rules, clipping follows the decay.

    Source: Zhuang et al., AdaBelief Optimizer (2020).

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
        correct_bias: whether η corrects the bias of the moments towards 0.
    """

    name: ClassVar[str] = "adabelief"
    clips_itself: ClassVar[bool] = True

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-6, at_least=0)
    correct_bias: bool = flag(True)

    state_names = ("mean", "deviation")  # m and s

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in fourteen passes over the array, and another to clip."""
        mean, deviation = state
        add_decay(grad, weight, step.wd, scratch)
        if self.clip_gradient is not None:
            grad.clip(-self.clip_gradient, self.clip_gradient, out=grad)
        toward(mean, self.beta1, grad, scratch)
        np.subtract(grad, mean, out=grad)
        np.multiply(grad, grad, out=grad)
        toward(deviation, self.beta2, grad, grad)
        np.add(deviation, self.epsilon, out=deviation)
        np.sqrt(deviation, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.divide(mean, scratch, out=scratch)
        rate = corrected(step.lr, self.beta1, self.beta2, step.count) if self.correct_bias else step.lr
        np.multiply(scratch, rate, out=scratch)
        np.subtract(weight, scratch, out=out)


@register
@dataclass(kw_only=True, eq=False)
class Adamax(Optimizer):
    """Adam with the largest recent gradient in place of the root of the second moment.

    ĝ = g + wd·w;  m ← β1·m + (1 − β1)·ĝ;  u ← max(β2·u, |ĝ|);  w ← w − lr/(1 − β1ᵗ)·m/(u + ε).

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization (2014), section 7.

    Attributes:
        beta1, beta2: decay of m and u, from 0 to below 1.
        epsilon: ε, at least 0.
    """

    name: ClassVar[str] = "adamax"

    learning_rate: float = number(0.002, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-8, at_least=0)

    state_names = ("mean", "largest")  # m and u

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in ten passes over the array."""
        mean, largest = state
        add_decay(grad, weight, step.wd, scratch)
        toward(mean, self.beta1, grad, scratch)
        np.abs(grad, out=grad)
        np.multiply(largest, self.beta2, out=largest)
        np.maximum(largest, grad, out=largest)
        np.add(largest, self.epsilon, out=scratch)
        np.divide(mean, scratch, out=scratch)
        np.multiply(scratch, step.lr / (1.0 - self.beta1**step.count), out=scratch)
        np.subtract(weight, scratch, out=out)


@register
@dataclass(kw_only=True, eq=False)
class Nadam(Optimizer):
    """Adam with Nesterov's momentum.

    ĝ = g + wd·w;  μᵗ = β1·(1 − ½·0.96^(t·schedule_decay));  P ← P·μᵗ, from 1;  m ← β1·m + (1 − β1)·ĝ;
    v ← β2·v + (1 − β2)·ĝ²;  w ← w − lr·((1 − μᵗ)·ĝ/(1 − P) + μᵗ⁺¹·m/(1 − P·μᵗ⁺¹))/(√(v/(1 − β2ᵗ)) + ε).

    Each slice has a separate P, as in torch. In MXNet all parameters share P, so it depends on their number.

    Source: Dozat, Incorporating Nesterov Momentum into Adam (2016).

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
        schedule_decay: how fast μ approaches β1, at least 0.
    """

    name: ClassVar[str] = "nadam"
    initial_scalars: ClassVar[Mapping[str, float]] = MappingProxyType({"m_schedule": 1.0})

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-8, at_least=0)
    schedule_decay: float = number(0.004, at_least=0)

    state_names = ("mean", "variance")  # m and v

    def _momentum(self, count: int) -> float:
        return self.beta1 * (1.0 - 0.5 * math.pow(0.96, count * self.schedule_decay))

    def advance(self, scalars: tuple[float, ...], count: int) -> tuple[float, ...]:
        """Return the next P: P ← P·μᵗ."""
        return (scalars[0] * self._momentum(count),)

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in seventeen passes over the array."""
        mean, variance = state
        now, following, schedule = self._momentum(step.count), self._momentum(step.count + 1), step.scalars[0]
        add_decay(grad, weight, step.wd, scratch)
        toward(mean, self.beta1, grad, scratch)
        np.multiply(grad, grad, out=scratch)
        toward(variance, self.beta2, scratch, scratch)
        np.multiply(grad, (1.0 - now) / (1.0 - schedule), out=grad)
        np.multiply(mean, following / (1.0 - schedule * following), out=scratch)
        np.add(grad, scratch, out=grad)
        np.multiply(variance, 1.0 / (1.0 - self.beta2**step.count), out=scratch)
        np.sqrt(scratch, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.divide(grad, scratch, out=grad)
        np.multiply(grad, step.lr, out=grad)
        np.subtract(weight, grad, out=out)
