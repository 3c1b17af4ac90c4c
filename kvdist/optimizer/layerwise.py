"""Rules whose rate depends on the lengths (2-norms) of whole parameters and of their gradients: LARS, LAMB and LANS.

They are for large batches: each parameter moves by a share of its own length. MXNet computed the lengths for
each shard; here they are those of the parameter, which therefore lives whole on one server.

Passes are counted after the gradient has been summed. A turn of `measure` sums and widens once more; the sum of squares
of each array that it returns is two passes, in float64.
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
from kvdist.optimizer.sgd import add_decay, descend
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

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in two passes over the array; four with momentum; another to clip, and two for the decay."""
        if self.clip_gradient is not None:
            grad.clip(-self.clip_gradient, self.clip_gradient, out=grad)
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, self._rate(step), out=grad)
        descend(weight, grad, out, state[0] if state else None, self.momentum)


def _is_unscaled(extent: Extent) -> bool:
    key = extent.key
    return key.endswith(UNSCALED_ENDINGS) if isinstance(key, str) else len(extent.shape) < 2


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
        """Update m and v; return w and u. Eleven passes over the array."""
        mean, variance = state
        toward(mean, self.beta1, grad, scratch)
        np.multiply(grad, grad, out=grad)
        toward(variance, self.beta2, grad, grad)
        self._direction(weight, state, grad, scratch, step)
        return weight, grad

    def _direction(self, weight: Array, state: States, out: Array, scratch: Array, step: Step) -> None:
        """out ← u. Four passes, and two for the decay."""
        count = step.count if self.bias_correction else math.inf  # βᵗ is 0 then
        _ratio(state[0], state[1], 1.0 - self.beta1**count, 1.0 - self.beta2**count, self.epsilon, out, scratch)
        add_decay(out, weight, step.wd, scratch)

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in seven passes over the array, and two for the decay."""
        of_weight, of_step = step.norms
        self._direction(weight, state, grad, scratch, step)
        np.multiply(grad, step.lr * trust(of_weight, of_step, self.lower_bound, self.upper_bound), out=grad)
        np.subtract(weight, grad, out=out)


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
        """Return w and g first; then update m and v, and return p and q. Seventeen passes over the array."""
        if turn == 0:
            return weight, grad
        mean, variance = state
        self._normalise(grad, step.norms[1])
        toward(mean, self.beta1, grad, scratch)
        np.multiply(grad, grad, out=scratch)
        toward(variance, self.beta2, scratch, scratch)
        by_mean, by_grad = self._directions(weight, grad, state, scratch, step)
        return by_mean, by_grad

    def _normalise(self, grad: Array, length: float) -> None:
        if length:
            np.multiply(grad, 1.0 / length, out=grad)
        if self.clip_gradient is not None:
            grad.clip(-self.clip_gradient, self.clip_gradient, out=grad)

    def _directions(self, weight: Array, grad: Array, state: States, scratch: Array, step: Step) -> tuple[Array, Array]:
        """p, which is new, and q in `grad`. Eight passes, and four for the decay."""
        mean, variance = state
        rest1, rest2 = 1.0 - self.beta1**step.count, 1.0 - self.beta2**step.count
        by_mean = np.empty_like(mean)
        _ratio(mean, variance, rest1, rest2, self.epsilon, by_mean, scratch)
        _ratio(grad, variance, 1.0, rest2, self.epsilon, grad, scratch)
        add_decay(by_mean, weight, step.wd, scratch)
        add_decay(grad, weight, step.wd, scratch)
        return by_mean, grad

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in thirteen passes over the array, and four for the decay."""
        of_weight, of_grad, of_by_mean, of_by_grad = step.norms
        self._normalise(grad, of_grad)
        by_mean, by_grad = self._directions(weight, grad, state, scratch, step)
        bounds = self.lower_bound, self.upper_bound
        np.multiply(by_mean, step.lr * self.beta1 * trust(of_weight, of_by_mean, *bounds), out=by_mean)
        np.multiply(by_grad, step.lr * (1.0 - self.beta1) * trust(of_weight, of_by_grad, *bounds), out=by_grad)
        np.add(by_mean, by_grad, out=by_mean)
        np.subtract(weight, by_mean, out=out)


def _ratio(
    mean: Array, variance: Array, rest1: float, rest2: float, epsilon: float, out: Array, scratch: Array
) -> None:
    """out ← (mean/rest1)/(√(variance/rest2) + ε); `mean` may be `out`. Five passes."""
    np.multiply(variance, 1.0 / rest2, out=scratch)
    np.sqrt(scratch, out=scratch)
    np.add(scratch, epsilon, out=scratch)
    np.multiply(scratch, rest1, out=scratch)
    np.divide(mean, scratch, out=out)
