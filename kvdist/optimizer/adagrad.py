"""Rules that divide the gradient by the root of a history of its squares: AdaGrad's family.

Passes are counted after the gradient has been summed and clipped; weight decay adds two wherever it is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.adam import toward
from kvdist.optimizer.base import Extent, Optimizer, States, Step
from kvdist.optimizer.registry import register
from kvdist.optimizer.sgd import add_decay
from kvdist.schema import flag, number, optional_number


def is_above_zero(epsilon: float) -> bool:
    """Whether it still is, rounded to the type of the arrays."""
    return bool(np.float32(epsilon) > 0)


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
        """Return the formula of `apply`."""
        return Equation("adagrad", (lr, wd, self.epsilon))

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in seven passes over the array."""
        (history,) = state
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, grad, out=scratch)
        np.add(history, scratch, out=history)
        np.sqrt(history, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.divide(grad, scratch, out=grad)
        np.multiply(grad, step.lr, out=grad)
        np.subtract(weight, grad, out=out)


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
        """Update in five passes over the array, and three over the rows."""
        (history,) = state
        row = step.extent.row_length
        if not row:
            return
        np.multiply(grad, grad, out=scratch)
        history += scratch.reshape(-1, row).mean(axis=1)
        divisor = np.sqrt(history)
        divisor += self.epsilon
        np.multiply(grad, step.lr, out=grad)
        matrix = grad.reshape(-1, row)
        np.divide(matrix, divisor[:, np.newaxis], out=matrix)
        np.subtract(weight, grad, out=out)


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

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in seventeen passes over the array."""
        gradients, steps = state
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, grad, out=scratch)
        toward(gradients, self.rho, scratch, scratch)
        np.add(gradients, self.epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.divide(grad, scratch, out=grad)
        np.add(steps, self.epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.multiply(grad, scratch, out=grad)
        np.multiply(grad, grad, out=scratch)
        toward(steps, self.rho, scratch, scratch)
        np.multiply(grad, step.lr, out=grad)
        np.subtract(weight, grad, out=out)


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

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Update in nine passes over the array; sixteen if centered; another to clip."""
        add_decay(grad, weight, step.wd, scratch)
        np.multiply(grad, grad, out=scratch)
        toward(state[0], self.rho, scratch, scratch)
        if self.centered:
            self._move_delta(grad, state, scratch, step.lr)
            np.add(weight, state[2], out=out)
        else:
            np.sqrt(state[0], out=scratch)
            np.add(scratch, self.epsilon, out=scratch)
            np.divide(grad, scratch, out=grad)
            np.multiply(grad, step.lr, out=grad)
            np.subtract(weight, grad, out=out)
        if self.clip_weights is not None:
            out.clip(-self.clip_weights, self.clip_weights, out=out)

    def _move_delta(self, grad: Array, state: States, scratch: Array, lr: float) -> None:
        squares, mean, delta = state
        toward(mean, self.rho, grad, scratch)
        np.multiply(mean, mean, out=scratch)
        np.subtract(squares, scratch, out=scratch)
        np.add(scratch, self.epsilon, out=scratch)
        np.sqrt(scratch, out=scratch)
        np.divide(grad, scratch, out=grad)
        np.multiply(grad, lr, out=grad)
        np.multiply(delta, self.momentum, out=delta)
        np.subtract(delta, grad, out=delta)
