"""Adam and related rules: a running mean of the gradients, divided by a measure of their size, element by element.

The small number ε is outside the root and outside the bias correction, as in MXNet; torch corrects the variance first,
so its ε acts differently in the first steps. The expressions' gradient is summed and clipped.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from kvdist.kernels.elementwise import decayed, limited, maximum, no_limit, sqrt
from kvdist.kernels.interface import Equation
from kvdist.optimizer.base import Optimizer, Step
from kvdist.optimizer.registry import register
from kvdist.schema import flag, number


def toward(mean, value, beta, rest):
    """β·mean + (1 − β)·value, with rest = 1 − β."""
    return mean * beta + value * rest


def corrected(lr: float, beta1: float, beta2: float, count: int) -> float:
    """lr·√(1 − β2ᵗ)/(1 − β1ᵗ): both moments start at 0, this undoes their bias towards it."""
    return lr * math.sqrt(1.0 - beta2**count) / (1.0 - beta1**count)


def share(beta: float) -> tuple[float, float]:
    """β and 1 − β: what `toward` takes."""
    return beta, 1.0 - beta


def adam(grad, weight, mean, variance, rate, wd, beta1, rest1, beta2, rest2, epsilon):
    """ĝ = g + wd·w;  m ← β1·m + (1 − β1)·ĝ;  v ← β2·v + (1 − β2)·ĝ²;  w ← w − rate·m/(√v + ε)."""
    grad = decayed(grad, weight, wd)
    mean, variance = toward(mean, grad, beta1, rest1), toward(variance, grad * grad, beta2, rest2)
    return weight - mean / (sqrt(variance) + epsilon) * rate, mean, variance


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
        """Return `adam` with the bias-corrected rate."""
        rate = corrected(lr, self.beta1, self.beta2, count)
        return Equation(adam, (rate, wd, *share(self.beta1), *share(self.beta2), self.epsilon))


def adamw(grad, weight, mean, variance, rate, wd, beta1, rest1, beta2, rest2, epsilon):
    """m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  w ← w − rate·(m/(√v + ε) + wd·w)."""
    mean, variance = toward(mean, grad, beta1, rest1), toward(variance, grad * grad, beta2, rest2)
    return weight - decayed(mean / (sqrt(variance) + epsilon), weight, wd) * rate, mean, variance


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
        """Return `adamw` with the rate η."""
        rate = corrected(lr, self.beta1, self.beta2, count) if self.correct_bias else lr
        return Equation(adamw, (rate, wd, *share(self.beta1), *share(self.beta2), self.epsilon))


def adabelief(grad, weight, mean, deviation, rate, wd, limit, beta1, rest1, beta2, rest2, epsilon):
    """ĝ = clip(g + wd·w);  m ← β1·m + (1 − β1)·ĝ;  s ← β2·s + (1 − β2)·(ĝ − m)² + ε;  w ← w − rate·m/(√s + ε)."""
    grad = limited(decayed(grad, weight, wd), limit)
    mean = toward(mean, grad, beta1, rest1)
    apart = grad - mean
    deviation = toward(deviation, apart * apart, beta2, rest2) + epsilon
    return weight - mean / (sqrt(deviation) + epsilon) * rate, mean, deviation


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

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `adabelief` with the rate η."""
        rate = corrected(lr, self.beta1, self.beta2, count) if self.correct_bias else lr
        moments = *share(self.beta1), *share(self.beta2)
        return Equation(adabelief, (rate, wd, no_limit(self.clip_gradient), *moments, self.epsilon))


def adamax(grad, weight, mean, largest, rate, wd, beta1, rest1, beta2, epsilon):
    """ĝ = g + wd·w;  m ← β1·m + (1 − β1)·ĝ;  u ← max(β2·u, |ĝ|);  w ← w − rate·m/(u + ε)."""
    grad = decayed(grad, weight, wd)
    mean, largest = toward(mean, grad, beta1, rest1), maximum(largest * beta2, abs(grad))
    return weight - mean / (largest + epsilon) * rate, mean, largest


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

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `adamax` with the bias-corrected rate."""
        return Equation(adamax, (lr / (1.0 - self.beta1**count), wd, *share(self.beta1), self.beta2, self.epsilon))


def nadam(grad, weight, mean, variance, lr, wd, beta1, rest1, beta2, rest2, of_grad, of_mean, of_variance, epsilon):
    """w ← w − lr·(of_grad·ĝ + of_mean·m)/(√(of_variance·v) + ε), with ĝ, m and v as of `adam`."""
    grad = decayed(grad, weight, wd)
    mean, variance = toward(mean, grad, beta1, rest1), toward(variance, grad * grad, beta2, rest2)
    step = (grad * of_grad + mean * of_mean) / (sqrt(variance * of_variance) + epsilon)
    return weight - step * lr, mean, variance


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

    def _formula(self, step: Step) -> Equation:
        """Return `nadam` with the factors that follow from P."""
        now, following, schedule = self._momentum(step.count), self._momentum(step.count + 1), step.scalars[0]
        factors = (
            (1.0 - now) / (1.0 - schedule),
            following / (1.0 - schedule * following),
            1.0 / (1.0 - self.beta2**step.count),
        )
        return Equation(nadam, (step.lr, step.wd, *share(self.beta1), *share(self.beta2), *factors, self.epsilon))
