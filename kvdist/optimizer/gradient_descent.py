"""Gradient descent: plain, with momentum, with Nesterov's momentum; and a rule for tests.

Passes are counted after the gradient has been summed and clipped; weight decay adds two wherever it is not 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import register
from kvdist.optimizer.schema import number


def add_decay(grad: Array, weight: Array, wd: float, scratch: Array) -> None:
    """grad ← grad + wd·weight. Two passes, none when wd is 0."""
    if wd:
        np.multiply(weight, wd, out=scratch)
        np.add(grad, scratch, out=grad)


@register
@dataclass(kw_only=True, eq=False)
class SGD(Optimizer):
    """Stochastic gradient descent.

    ĝ = g + wd·w;  m ← μ·m − lr·ĝ;  w ← w + m.  Without momentum: w ← w − lr·ĝ.

    The learning rate is inside m, as in MXNet: a new one acts on new gradients only.

    Attributes:
        momentum: μ, from 0 to below 1.
    """

    name: ClassVar[str] = "sgd"

    learning_rate: float = number(0.1, at_least=0)
    momentum: float = number(0.0, at_least=0, below=1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """No array without momentum."""
        return ("momentum",) if self.momentum else ()

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """Two rules: one without momentum."""
        return Equation("sgd_momentum", (lr, wd, self.momentum)) if self.momentum else Equation("sgd", (lr, wd))

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
        """Two passes; four with momentum."""
        add_decay(grad, weight, wd, scratch)
        np.multiply(grad, lr, out=grad)
        if not self.momentum:
            np.subtract(weight, grad, out=out)
            return
        (momentum,) = state
        np.multiply(momentum, self.momentum, out=momentum)
        np.subtract(momentum, grad, out=momentum)
        np.add(weight, momentum, out=out)


@register
@dataclass(kw_only=True, eq=False)
class NAG(Optimizer):
    """Nesterov's accelerated gradient.

    ĝ = g + wd·w;  m ← μ·m − lr·ĝ;  w ← w + μ·m − lr·ĝ.

    Attributes:
        momentum: μ, from 0 to below 1.
    """

    name: ClassVar[str] = "nag"

    learning_rate: float = number(0.1, at_least=0)
    momentum: float = number(0.9, at_least=0, below=1)

    @property
    def state_names(self) -> tuple[str, ...]:
        """m."""
        return ("momentum",)

    def equation(self, lr: float, wd: float, count: int) -> Equation:
        """As `apply`."""
        return Equation("nag", (lr, wd, self.momentum))

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
        """Six passes."""
        (momentum,) = state
        add_decay(grad, weight, wd, scratch)
        np.multiply(grad, lr, out=grad)
        np.multiply(momentum, self.momentum, out=momentum)
        np.subtract(momentum, grad, out=momentum)
        np.multiply(momentum, self.momentum, out=scratch)
        np.subtract(scratch, grad, out=scratch)
        np.add(weight, scratch, out=out)


@register
@dataclass(kw_only=True, eq=False)
class Test(Optimizer):
    """For tests of a store: w ← w + g, where g is the sum of rescale·gradient. It knows no lr and no wd."""

    __test__: ClassVar[bool] = False  # or pytest would take the name for a class of tests

    name: ClassVar[str] = "test"

    @property
    def state_names(self) -> tuple[str, ...]:
        """None."""
        return ()

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
        """One pass."""
        np.add(weight, grad, out=out)
