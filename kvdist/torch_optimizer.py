"""A trainer in the form of ``torch.optim.Optimizer``, for what talks to that class.

Schedulers of learning rates, `torch.amp.GradScaler`, and frameworks around a training loop work with it. Rules that
hold here:

* A group's ``lr`` and ``weight_decay`` are those of the next step, whoever has changed them. The other numbers of an
  optimizer cannot change, because servers would never learn of it, so they are not in the groups.
* What changed last counts: a group's number, or the trainer's. Both are looked at when a step begins.
* A step that `GradScaler` skips on one worker is not skipped: the worker takes part without gradients, so the others
  do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from kvdist.optimizer.base import Optimizer
from kvdist.parameters import Parameter

NUMBERS = {"lr": ("learning_rate", "lr_mult"), "weight_decay": ("wd", "wd_mult")}
"""What of a group may change: torch's word, our name, and the table of factors on it."""


class Steps(Protocol):
    """What this needs of a trainer."""

    def __call__(self, *, skip: bool) -> None:
        """Make a step, or take part in one without gradients."""


class TorchOptimizer(torch.optim.Optimizer):
    """What `kvdist.Trainer.as_torch_optimizer` returns; not made by hand.

    Its ``state_dict()`` has the groups with their numbers. What an optimizer remembers of each weight (momenta) rests
    where the weights are updated, and is not in it.

    Args:
        parameters: the trainer's.
        live: the optimizer whose numbers travel with each step.
        take_step: makes the steps.
        overlaps: gradients leave during the backward pass.
    """

    _step_supports_amp_scaling = True
    """Asks `GradScaler` to call `step` in any case. For the call it sets two attributes: ``found_inf``, more than 0 if
    this worker's gradients are not finite, and ``grad_scale``, what they are still multiplied by, or None."""

    def __init__(self, parameters: Sequence[Parameter], live: Optimizer, take_step: Steps, overlaps: bool) -> None:
        if live.lr_scheduler is not None:
            raise ValueError(
                "the optimizer has a schedule of its own, so a group's lr would mean nothing: leave lr_scheduler out"
                " and use one of torch.optim.lr_scheduler, or call the trainer's step() instead of as_torch_optimizer()"
            )
        self._live = live
        self._overlaps = overlaps
        self._take_step = take_step
        self._parameters = parameters
        by_group: dict[int, list[int]] = {}
        for key, parameter in enumerate(parameters):
            by_group.setdefault(id(parameter.group), []).append(key)
        self._keys = list(by_group.values())
        self._declared = [parameters[keys[0]].group for keys in self._keys]
        self._is_complete = False
        groups = [
            {"params": [replica for key in keys for replica in parameters[key].replicas], **self._numbers(keys)}
            for keys in self._keys
        ]
        super().__init__(groups, {"lr": live.learning_rate, "weight_decay": live.wd})
        self._is_complete = True
        self._seen = {number: self._of_groups(number) for number in NUMBERS}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Only torch's constructor may: a trainer's parameters are known from its beginning.

        Raises:
            RuntimeError: it is called by anybody else.
        """
        if self._is_complete:
            raise RuntimeError("parameters cannot be added to a trainer; make another one with all of them")
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Make a step as ``trainer.step()`` does: losses are means, gradients are averaged over the workers.

        As with torch, a gradient that no backward pass has renewed is used again.

        Args:
            closure: computes gradients and returns the loss; called once, before they are sent.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: a `GradScaler` calls it, and gradients leave during the backward pass.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf, scale = vars(self).get("found_inf"), vars(self).get("grad_scale")
        if self._overlaps and found_inf is not None:
            raise RuntimeError(
                "a GradScaler finds out too late that gradients are not finite when they leave during backward(): make"
                " the trainer with overlap=False"
            )
        is_overflow = found_inf is not None and float(found_inf) > 0
        divisor = 1.0 if is_overflow or scale is None else float(scale)
        grads = [replica.grad for one in self._parameters for replica in one.replicas]
        _divide(grads, divisor)
        try:
            self._take_step(skip=is_overflow)
        except BaseException:
            # The scaler takes these away only after a step that went well, and would count them in at the next one.
            vars(self).pop("found_inf", None)
            vars(self).pop("grad_scale", None)
            _divide(grads, 1.0 / divisor)
            raise
        return loss

    def tell(self) -> None:
        """Give the optimizer the groups' numbers, or the groups the optimizer's: those that have changed."""
        for number, (name, table) in NUMBERS.items():
            of_groups = self._of_groups(number)
            if of_groups != self._seen[number]:
                self._give(of_groups, name, table)
            else:
                for keys, group in zip(self._keys, self.param_groups, strict=True):
                    group[number] = self._numbers(keys)[number]
            self._seen[number] = self._of_groups(number)

    def _give(self, of_groups: list[float], name: str, table: str) -> None:
        declared = [float(group.get(table, 1.0)) for group in self._declared]
        base, factors = base_and_factors(of_groups, declared)
        multipliers = dict(getattr(self._live, table))
        for keys, factor in zip(self._keys, factors, strict=True):
            # A group speaks for its first key; what the others have besides, by the table, they keep.
            first = multipliers.get(keys[0], 1.0)
            own = {key: multipliers.get(key, 1.0) / first if first else 1.0 for key in keys}
            multipliers.update({key: factor * share for key, share in own.items()})
        setattr(self._live, name, base)
        setattr(self._live, table, {key: factor for key, factor in multipliers.items() if factor != 1.0})

    def _numbers(self, keys: Sequence[int]) -> dict[str, float]:
        return {"lr": self._live.pushed_lr(keys[0]), "weight_decay": self._live.wd_for(keys[0])}

    def _of_groups(self, number: str) -> list[float]:
        return [float(group[number]) for group in self.param_groups]


def base_and_factors(numbers: Sequence[float], declared: Sequence[float]) -> tuple[float, list[float]]:
    """One number and a factor for each group that give the groups' numbers.

    Args:
        numbers: of the groups, at least 0.
        declared: the factors that the user gave the groups; kept where they fit.
    """
    base = max((number / factor for number, factor in zip(numbers, declared, strict=True) if factor > 0), default=0.0)
    base = base or max(numbers)
    factors = [
        factor if base * factor == number else number / base for number, factor in zip(numbers, declared, strict=True)
    ]
    return base, factors


def _divide(grads: Sequence[torch.Tensor | None], divisor: float) -> None:
    present = [grad for grad in grads if grad is not None]
    if present and divisor != 1.0:
        torch._foreach_div_(present, divisor)
