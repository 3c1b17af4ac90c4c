"""Rules whose rate depends on the lengths (2-norms) of whole parameters and of their gradients: LARS, LAMB and LANS.

They are for large batches: each parameter moves by a share of its own length. MXNet computed the lengths for
each shard; here they are those of the parameter, which therefore lives whole on one server.

Norms arrive in the expressions as rates. A turn of `measure` sums and widens once more; the sum of squares of each
array that it returns is two passes, in float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.elementwise import decayed, evaluate, limited, no_limit, sqrt
from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.adam import share, toward
from kvdist.optimizer.base import Extent, Optimizer, States, Step
from kvdist.optimizer.registry import register
from kvdist.optimizer.sgd import sgd, sgd_momentum
from kvdist.schema import flag, number, optional_number

UNSCALED_ENDINGS = ("gamma", "beta", "bias")
"""The ends of names of parameters that LARS treats as SGD does."""


def trust(of_weight: float, of_step: float, least: float | None = None, most: float | None = None) -> float:
    """How many times the step's length the weight's is, after that is brought into bounds; 1 where one is 0."""
    if least is not None:
        of_weight = max(of_weight, least)
    if most is not None:
        of_weight = min(of_weight, most)
    return of_weight / of_step if of_weight and of_step else 1.0


def lars(grad, weight, rate, wd, limit):
    """w ← w − rate·(clip(g) + wd·w)."""
    return sgd(limited(grad, limit), weight, rate, wd)


def lars_momentum(grad, weight, momentum, rate, wd, limit, mu):
    """m ← μ·m − rate·(clip(g) + wd·w);  w ← w + m."""
    return sgd_momentum(limited(grad, limit), weight, momentum, rate, wd, mu)


@register
@dataclass(kw_only=True, eq=False)
class LARS(Optimizer):
    """Layer-wise adaptive rate scaling: SGD with momentum and a separate learning rate for each parameter.

    ĝ = clip(g) + wd·w;  rate = lr·eta·‖w‖/(‖g‖ + wd·‖w‖ + ε), or lr where ‖w‖ or ‖g‖ is 0;  m ← μ·m − rate·ĝ;
    w ← w + m.  Without momentum: w ← w − rate·ĝ.

    Biases and the scales of normalisation layers use lr. A key that is a string is recognised by its ending: gamma,
    beta or bias. For a key that is a number, such as those of a Trainer, these are the parameters with fewer than two
    dimensions.

    Source: You, Gitman and Ginsburg, Large Batch Training of Convolutional Networks (2017).

    Attributes:
        momentum: μ, from 0 to below 1.
        eta: trust coefficient of the parameter's rate, at least 0.
        epsilon: ε, at least 0.
    """

    name: ClassVar[str] = "lars"
    norm_count: ClassVar[int] = 1
    clips_itself: ClassVar[bool] = True

    learning_rate: float = number(0.1, at_least=0)
    momentum: float = number(0.0, at_least=0, below=1)
    eta: float = number(0.001, at_least=0)
    epsilon: float = number(1e-8, at_least=0)

    @property
    def state_names(self) -> tuple[str, ...]:
        """m; empty without momentum."""
        return ("momentum",) if self.momentum else ()

    def measure(self, turn: int, weight: Array, grad: Array, state: States, scratch: Array, step: Step) -> States:
        """Return w, and g before clipping."""
        return weight, grad

    def _rate(self, step: Step) -> float:
        of_weight, of_grad = step.norms
        if _is_unscaled(step.extent) or not of_weight or not of_grad:
            return step.lr
        return step.lr * self.eta * of_weight / (of_grad + step.wd * of_weight + self.epsilon)

    def _formula(self, step: Step) -> Equation:
        """Return `lars_momentum`, or `lars` without momentum."""
        numbers = self._rate(step), step.wd, no_limit(self.clip_gradient)
        return Equation(lars_momentum, (*numbers, self.momentum)) if self.momentum else Equation(lars, numbers)


def _is_unscaled(extent: Extent) -> bool:
    key = extent.key
    return key.endswith(UNSCALED_ENDINGS) if isinstance(key, str) else len(extent.shape) < 2


def direction(weight, mean, variance, wd, of_variance, epsilon, rest1):
    """m̂/(√v̂ + ε) + wd·w, with v̂ = of_variance·v and m̂ = m/rest1."""
    return decayed(mean / ((sqrt(variance * of_variance) + epsilon) * rest1), weight, wd)


def lamb_direction(grad, weight, mean, variance, beta1, part1, beta2, part2, wd, of_variance, epsilon, rest1):
    """m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  the gradient becomes u."""
    mean, variance = toward(mean, grad, beta1, part1), toward(variance, grad * grad, beta2, part2)
    return direction(weight, mean, variance, wd, of_variance, epsilon, rest1), mean, variance


def lamb(grad, weight, mean, variance, rate, wd, of_variance, epsilon, rest1):
    """w ← w − rate·u, with m and v of this update, and rate = lr·r."""
    return weight - direction(weight, mean, variance, wd, of_variance, epsilon, rest1) * rate, mean, variance


@register
@dataclass(kw_only=True, eq=False)
class LAMB(Optimizer):
    """Adam with decoupled weight decay, whose step length is proportional to the norm of the parameter.

    m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  u = m̂/(√v̂ + ε) + wd·w, with m̂ = m/(1 − β1ᵗ) and
    v̂ = v/(1 − β2ᵗ), or m and v without `bias_correction`;  w ← w − lr·r·u, with r = ‖w‖/‖u‖, and 1 if a norm is 0.

    Source: You et al., Large Batch Optimization for Deep Learning: Training BERT in 76 minutes (2019).

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
        lower_bound, upper_bound: bounds to which ‖w‖ is clipped; None or 0 for no bound.
        bias_correction: whether the bias of the moments towards 0 is corrected.
    """

    name: ClassVar[str] = "lamb"
    norm_count: ClassVar[int] = 1

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-6, at_least=0)
    lower_bound: float | None = optional_number()
    upper_bound: float | None = optional_number()
    bias_correction: bool = flag(True)

    state_names = ("mean", "variance")  # m and v

    def measure(self, turn: int, weight: Array, grad: Array, state: States, scratch: Array, step: Step) -> States:
        """Update m and v; return w and u."""
        numbers = (*share(self.beta1), *share(self.beta2), *self._direction(step))
        evaluate(lamb_direction, (grad, weight, *state), numbers, (grad, *state), scratch)
        return weight, grad

    def _direction(self, step: Step) -> tuple[float, ...]:
        """Numbers of `direction`."""
        count = step.count if self.bias_correction else math.inf  # βᵗ is 0 then
        return step.wd, 1.0 / (1.0 - self.beta2**count), self.epsilon, 1.0 - self.beta1**count

    def _formula(self, step: Step) -> Equation:
        """Return `lamb`."""
        of_weight, of_step = step.norms
        rate = step.lr * trust(of_weight, of_step, self.lower_bound, self.upper_bound)
        return Equation(lamb, (rate, *self._direction(step)))


def lans_pair(grad, weight, mean, variance, wd, of_variance, epsilon, rest1):
    """p and q of `LANS`."""
    root = sqrt(variance * of_variance) + epsilon
    return decayed(mean / (root * rest1), weight, wd), decayed(grad / root, weight, wd)


def lans_directions(
    grad, weight, mean, variance, scale, limit, wd, of_variance, epsilon, rest1, beta1, part1, beta2, part2
):
    """g ← clip(scale·g);  m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  the results are p, q, m and v."""
    grad = limited(grad * scale, limit)
    mean, variance = toward(mean, grad, beta1, part1), toward(variance, grad * grad, beta2, part2)
    by_mean, by_grad = lans_pair(grad, weight, mean, variance, wd, of_variance, epsilon, rest1)
    return by_mean, by_grad, mean, variance


def lans(grad, weight, mean, variance, scale, limit, wd, of_variance, epsilon, rest1, of_mean, of_grad):
    """w ← w − (of_mean·p + of_grad·q), with g ← clip(scale·g), and m and v of this update."""
    grad = limited(grad * scale, limit)
    by_mean, by_grad = lans_pair(grad, weight, mean, variance, wd, of_variance, epsilon, rest1)
    return weight - (by_mean * of_mean + by_grad * of_grad), mean, variance


@register
@dataclass(kw_only=True, eq=False)
class LANS(Optimizer):
    """LAMB with normalised gradients and Nesterov's momentum.

    g ← clip(g/‖g‖);  m ← β1·m + (1 − β1)·g;  v ← β2·v + (1 − β2)·g²;  s = √(v/(1 − β2ᵗ)) + ε;
    p = m/(1 − β1ᵗ)/s + wd·w;  q = g/s + wd·w;  w ← w − lr·(β1·‖w‖/‖p‖·p + (1 − β1)·‖w‖/‖q‖·q).
    A ratio with a norm of 0 counts as 1, and a gradient of zeros is not normalised.

    Source: Zheng et al., Accelerated Large Batch Optimization of BERT Pretraining in 54 minutes (2020).

    Attributes:
        beta1, beta2: decay of the moments, from 0 to below 1.
        epsilon: ε, at least 0.
        lower_bound, upper_bound: bounds to which ‖w‖ is clipped; None or 0 for no bound.
    """

    name: ClassVar[str] = "lans"
    norm_count: ClassVar[int] = 2
    clips_itself: ClassVar[bool] = True

    learning_rate: float = number(0.001, at_least=0)
    beta1: float = number(0.9, at_least=0, below=1)
    beta2: float = number(0.999, at_least=0, below=1)
    epsilon: float = number(1e-6, at_least=0)
    lower_bound: float | None = optional_number()
    upper_bound: float | None = optional_number()

    state_names = ("mean", "variance")  # m and v

    def measure(self, turn: int, weight: Array, grad: Array, state: States, scratch: Array, step: Step) -> States:
        """Return w and g first; then update m and v, and return p and q."""
        if turn == 0:
            return weight, grad
        numbers = (*self._scaling(step), *self._direction(step), *share(self.beta1), *share(self.beta2))
        by_mean = np.empty_like(grad)
        evaluate(lans_directions, (grad, weight, *state), numbers, (by_mean, grad, *state), scratch)
        return by_mean, grad

    def _scaling(self, step: Step) -> tuple[float, float]:
        """Factor that makes the gradient's norm 1, unless that is 0, and the limit of its elements then."""
        of_grad = step.norms[1]
        return 1.0 / of_grad if of_grad else 1.0, no_limit(self.clip_gradient)

    def _direction(self, step: Step) -> tuple[float, ...]:
        """Numbers of `lans_pair`."""
        of_variance = 1.0 / (1.0 - self.beta2**step.count)
        return step.wd, of_variance, self.epsilon, 1.0 - self.beta1**step.count

    def _formula(self, step: Step) -> Equation:
        """Return `lans`."""
        of_weight, _, of_by_mean, of_by_grad = step.norms
        bounds = self.lower_bound, self.upper_bound
        rates = (
            step.lr * self.beta1 * trust(of_weight, of_by_mean, *bounds),
            step.lr * (1.0 - self.beta1) * trust(of_weight, of_by_grad, *bounds),
        )
        return Equation(lans, (*self._scaling(step), *self._direction(step), *rates))
