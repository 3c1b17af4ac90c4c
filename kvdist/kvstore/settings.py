"""The numbers of an optimizer that travel with each push: learning rate, weight decay and rescale of every key.

They are read from the optimizer at the push, so a change made here is seen by the servers at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdist.core.worker.requests import KeyInfo, Plan
from kvdist.kvstore.values import Key
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.arrays import U8

Setting = tuple[float, float, float]
SERVER_DECIDES: Setting = (math.nan, math.nan, math.nan)
"""There is no optimizer here to ask."""


Settings = tuple[list[Setting], "np.ndarray[Any, Any] | None"]
"""Distinct settings, and for each key of a plan the index of its own; None if all have the first."""


def setting_of(info: KeyInfo, optimizer: Optimizer | None) -> Setting:
    """The setting of one key."""
    if optimizer is None:
        return SERVER_DECIDES
    numbers = (optimizer.pushed_lr(info.key), optimizer.wd_for(info.key), optimizer.rescale_grad)
    return _finite(info.key, numbers)


def gathered(settings: Sequence[Setting]) -> Settings:
    """Settings that were taken key by key."""
    distinct: dict[Setting, int] = {}
    index = [distinct.setdefault(setting, len(distinct)) for setting in settings]
    return list(distinct), np.array(index) if len(distinct) > 1 else None


def settings_of(plan: Plan, optimizer: Optimizer | None) -> Settings:
    """The distinct (learning rate, weight decay, rescale) of a plan's keys; per key an index, None if all alike."""
    if optimizer is None:
        return [SERVER_DECIDES], None
    rescale = optimizer.rescale_grad
    if not optimizer.lr_mult and not optimizer.wd_mult:
        return [_finite(None, (optimizer.pushed_lr(None), optimizer.wd, rescale))], None
    return gathered([setting_of(info, optimizer) for info in plan.keys])


def used_settings(settings: list[Setting], index: np.ndarray[Any, Any] | None) -> tuple[tuple[Setting, ...], U8 | None]:
    """The settings that one run uses, and its slices' indices into them."""
    if index is None:
        return (settings[0],), None
    used, positions = np.unique(index, return_inverse=True)
    return tuple(settings[i] for i in used.tolist()), positions.astype(np.uint8)


def _finite(key: Key | None, setting: Setting) -> Setting:
    if not all(map(math.isfinite, setting)):
        whose = "the optimizer" if key is None else f"key {key!r}"
        raise ValueError(f"learning rate, weight decay and rescale of {whose} are {setting}; they must be finite")
    return setting
