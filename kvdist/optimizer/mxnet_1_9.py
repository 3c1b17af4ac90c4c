"""Differences between the optimizers of MXNet 1.9 and of MXNet's main branch, which this package implements.

`create(..., defaults="mxnet-1.9")` uses these defaults, and warns of an optimizer whose equation differs in 1.9.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType

from kvdist import lr_scheduler as schedules
from kvdist.optimizer.base import Optimizer

NAME = "mxnet-1.9"

SAME: Mapping[str, object] = MappingProxyType({})

DEFAULTS: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        "adadelta": {"epsilon": 1e-5},
        "adagrad": {"epsilon": 1e-7},
        "adam": {"lazy_update": True},
        "adamax": {"epsilon": 0.0},
        "dcasgd": {"learning_rate": 0.01},
        "ftml": {"learning_rate": 0.01},
        "ftrl": SAME,
        "groupadagrad": {"epsilon": 1e-5},
        "lamb": SAME,
        "lars": {"learning_rate": 0.01, "epsilon": 0.0},
        "nadam": SAME,
        "nag": {"learning_rate": 0.01, "momentum": 0.0},
        "rmsprop": SAME,
        "sgd": {"learning_rate": 0.01, "lazy_update": True},
        "sgld": {"learning_rate": 0.01},
        "signum": SAME,
        "test": SAME,
    }
)
"""Optimizers of 1.9 → the defaults that differ in 1.9."""

Applies = Callable[[Optimizer], object]
"""Predicate: with this optimizer's numbers the equations differ."""


def _always(_: Optimizer) -> bool:
    return True


def _clips_decay(optimizer: Optimizer) -> bool:
    return bool(optimizer.wd and optimizer.clip_gradient)


CLIPS_BOTH: tuple[Applies, str] = (_clips_decay, "clip_gradient cuts gradient and decay together")

EQUATIONS: Mapping[str, tuple[tuple[Applies, str], ...]] = MappingProxyType(
    {
        "adadelta": ((lambda one: one.wd, "the decay is no part of the gradient: w ← w − Δ − wd·w"),),
        "adagrad": ((_always, "w ← w − lr·(g/√(h + ε) + wd·w)"),),
        "adam": (CLIPS_BOTH,),
        "adamax": (CLIPS_BOTH,),
        "ftml": (CLIPS_BOTH,),
        "groupadagrad": ((_always, "ε is inside the root: w ← w − lr·g/√(h + ε)"),),
        "lars": ((_always, "the momentum follows changes of the rate, and biases are known by their names alone"),),
        "nadam": ((_always, "all parameters share one momentum schedule"), CLIPS_BOTH),
        "nag": ((lambda one: one.wd and vars(one)["momentum"], "the decay acts through the momentum in another way"),),
        "rmsprop": ((lambda one: not vars(one)["centered"], "ε is inside the root: w ← w − lr·ĝ/√(n + ε)"), CLIPS_BOTH),
        "test": ((lambda one: one.clip_gradient, "clip_gradient does nothing"),),
    }
)
"""Optimizers whose equation differs in 1.9 → pairs of condition and description of the difference."""


def with_defaults(name: str, defaults: str, hyperparameters: Mapping[str, object]) -> dict[str, object]:
    """The hyper-parameters, completed by the defaults of 1.9.

    Without a learning rate among the hyper-parameters a schedule keeps its `base_lr`, as in 1.9.

    Raises:
        ValueError: `defaults` is not ``mxnet-1.9``, or 1.9 has no optimizer of this name.
    """
    if defaults != NAME:
        raise ValueError(f"defaults is {defaults!r}; it must be {NAME!r}, or left out for those of MXNet's main branch")
    if name not in DEFAULTS:
        raise ValueError(f"MXNet 1.9 has no optimizer {name!r}, so it has no defaults for it: leave defaults out")
    found = {**DEFAULTS[name], **hyperparameters}
    if hyperparameters.get(schedules.ENTRY) is not None and "learning_rate" not in hyperparameters:
        found.pop("learning_rate", None)
    return found


def warn_of_equations(optimizer: Optimizer) -> None:
    """Warn if the equation of this optimizer differs in 1.9."""
    told = [how for applies, how in EQUATIONS.get(optimizer.name, ()) if applies(optimizer)]
    if told:
        warnings.warn(
            f"{optimizer.name} has the defaults of MXNet 1.9, but not its equation: in 1.9 {'; '.join(told)}",
            stacklevel=3,
        )
