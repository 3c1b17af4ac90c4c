"""Rules that divide the gradient by the root of a history of its squares: AdaGrad's family.

The expressions' gradient is summed and clipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.elementwise import decayed, evaluate, limited, no_limit, sqrt
from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.adam import share, toward
from kvdist.optimizer.base import Extent, Optimizer, States, Step
from kvdist.optimizer.registry import register
from kvdist.schema import flag, number, optional_number


def is_above_zero(epsilon: float) -> bool:
    """Whether it still is, rounded to the type of the arrays."""
    return bool(np.float32(epsilon) > 0)


def adagrad(grad, weight, history, lr, wd, epsilon):
    """ĝ = g + wd·w;  h ← h + ĝ²;  w ← w − lr·ĝ/(√h + ε)."""
    grad = decayed(grad, weight, wd)
    history = history + grad * grad
    return weight - grad / (sqrt(history) + epsilon) * lr, history


@register
@dataclass(kw_only=True, eq=False)
class AdaGrad(Optimizer):
    """Gradient descent with steps that shrink with the sum of all squared gradients so far.

    ĝ = g + wd·w;  h ← h + ĝ²;  w ← w − lr·ĝ/(√h + ε).

    Source: Duchi, Hazan and Singer, Adaptive Subgradient Methods (2011).

    Attributes:
        epsilon: ε, at least 0.
    """

    name: ClassVar[str] = "adagrad"

    learning_rate: float = number(0.01, at_least=0)
    epsilon: float = number(1e-6, at_least=0)

    state_names = ("history",)  # h

    def rests(self, wd: float) -> bool:
        """True without decay, if ε saves a row that never had a gradient from 0/0."""
        return not wd and is_above_zero(self.epsilon)

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `adagrad`."""
        return Equation(adagrad, (lr, wd, self.epsilon))


def group_adagrad(grad, weight, history, lr, epsilon):
    """w ← w − lr·g/(√h + ε), with the history of the row, after this gradient."""
    return weight - grad * lr / (sqrt(history) + epsilon)


@register
@dataclass(kw_only=True, eq=False)
class GroupAdaGrad(Optimizer):
    """AdaGrad with a common history for each row of a matrix, such as an embedding.

    h of the row ← h + mean(g²) over the row;  w ← w − lr·g/(√h + ε).  Only for matrices, and without weight decay.

    Attributes:
        epsilon: ε, at least 0.
    """

    name: ClassVar[str] = "groupadagrad"
    by_rows: ClassVar[bool] = True

    learning_rate: float = number(0.01, at_least=0)
    epsilon: float = number(1e-6, at_least=0)

    state_names = ("history",)  # h, one element a row

    def rests(self, wd: float) -> bool:
        """True if ε saves a row that never had a gradient from 0/0."""
        return not wd and is_above_zero(self.epsilon)

    def check_update(self, lr: float, wd: float, extent: Extent) -> None:
        """Reject weight decay, and parameters that are not matrices."""
        if wd:
            raise ValueError(f"groupadagrad knows no weight decay, and wd is {wd:g}: set it to 0")
        if len(extent.shape) != 2:
            raise ValueError(
                f"groupadagrad updates matrices, but the parameter {extent.key!r} has shape {extent.shape}: put other"
                " parameters into a second store with another optimizer, such as adagrad"
            )

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update the history of the rows, and evaluate `group_adagrad` with it."""
        (history,) = state
        row = step.extent.row_length
        if not row:
            return
        np.multiply(grad, grad, out=scratch)
        history += scratch.reshape(-1, row).mean(axis=1)
        matrices = [array.reshape(-1, row) for array in (grad, weight, out)]
        inputs = (*matrices[:2], history[:, np.newaxis])
        evaluate(group_adagrad, inputs, (step.lr, self.epsilon), matrices[2:])


def adadelta(grad, weight, gradients, steps, lr, wd, rho, rest, epsilon):
    """ĝ = g + wd·w;  a ← ρ·a + (1 − ρ)·ĝ²;  Δ = ĝ/√(a + ε)·√(b + ε);  b ← ρ·b + (1 − ρ)·Δ²;  w ← w − lr·Δ."""
    grad = decayed(grad, weight, wd)
    gradients = toward(gradients, grad * grad, rho, rest)
    step = grad / sqrt(gradients + epsilon) * sqrt(steps + epsilon)
    return weight - step * lr, gradients, toward(steps, step * step, rho, rest)


@register
@dataclass(kw_only=True, eq=False)
class AdaDelta(Optimizer):
    """Gradient descent whose step size is the ratio of recent step sizes to recent gradient sizes.

    ĝ = g + wd·w;  a ← ρ·a + (1 − ρ)·ĝ²;  Δ = √(b + ε)/√(a + ε)·ĝ;  b ← ρ·b + (1 − ρ)·Δ²;  w ← w − lr·Δ.

    Source: Zeiler, ADADELTA: An Adaptive Learning Rate Method (2012).

    Attributes:
        rho: ρ, from 0 to below 1.
        epsilon: ε, at least 0; with 0 the weights never change.
    """

    name: ClassVar[str] = "adadelta"

    learning_rate: float = number(1.0, at_least=0)
    rho: float = number(0.9, at_least=0, below=1)
    epsilon: float = number(1e-6, at_least=0)

    state_names = ("gradients", "steps")  # a and b

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `adadelta`."""
        return Equation(adadelta, (lr, wd, *share(self.rho), self.epsilon))


def rmsprop(grad, weight, squares, lr, wd, rho, rest, epsilon, limit):
    """ĝ = g + wd·w;  n ← ρ·n + (1 − ρ)·ĝ²;  w ← clip(w − lr·ĝ/(√n + ε))."""
    grad = decayed(grad, weight, wd)
    squares = toward(squares, grad * grad, rho, rest)
    return limited(weight - grad / (sqrt(squares) + epsilon) * lr, limit), squares


def rmsprop_centered(grad, weight, squares, mean, delta, lr, wd, rho, rest, epsilon, limit, mu):
    """ĝ and n as of `rmsprop`;  q ← ρ·q + (1 − ρ)·ĝ;  Δ ← μ·Δ − lr·ĝ/√(n − q² + ε);  w ← clip(w + Δ)."""
    grad = decayed(grad, weight, wd)
    squares, mean = toward(squares, grad * grad, rho, rest), toward(mean, grad, rho, rest)
    delta = delta * mu - grad / sqrt(squares - mean * mean + epsilon) * lr
    return limited(weight + delta, limit), squares, mean, delta


@register
@dataclass(kw_only=True, eq=False)
class RMSProp(Optimizer):
    """Gradient descent with steps divided by the root of a running mean of squared gradients.

    ĝ = g + wd·w;  n ← ρ·n + (1 − ρ)·ĝ²;  w ← w − lr·ĝ/(√n + ε).
    Centered: q ← ρ·q + (1 − ρ)·ĝ;  Δ ← μ·Δ − lr·ĝ/√(n − q² + ε);  w ← w + Δ.

    As in MXNet, only the centered rule uses μ, and only in that rule ε is inside the root.

    Source: Tieleman and Hinton, Lecture 6.5 (2012); centered: Graves, Generating Sequences With Recurrent Neural
    Networks (2013).

    Attributes:
        rho: ρ, from 0 to below 1.
        momentum: μ of the centered rule, from 0 to below 1.
        epsilon: ε, at least 0.
        centered: whether to divide by the standard deviation instead.
        clip_weights: bound on the new weights, which are clipped to ±clip_weights; None or 0: no clipping.
    """

    name: ClassVar[str] = "rmsprop"

    learning_rate: float = number(0.001, at_least=0)
    rho: float = number(0.9, at_least=0, below=1)
    momentum: float = number(0.9, at_least=0, below=1)
    epsilon: float = number(1e-8, at_least=0)
    centered: bool = flag(False)
    clip_weights: float | None = optional_number()

    @property
    def state_names(self) -> tuple[str, ...]:
        """n; with `centered` also q and Δ."""
        return ("squares", "mean", "delta") if self.centered else ("squares",)

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Return `rmsprop_centered` or `rmsprop`."""
        numbers = (lr, wd, *share(self.rho), self.epsilon, no_limit(self.clip_weights))
        return Equation(rmsprop_centered, (*numbers, self.momentum)) if self.centered else Equation(rmsprop, numbers)
