"""`ParamGroups`: the hyper-parameters of a trainer, in the form of torch's parameter groups. Invariants:

* The groups have the numbers. The optimizer, which updates the weights or whose numbers travel with a step, gets those
  of the groups when a step begins (`read`). Setting `learning_rate` or `wd` of the optimizer, which is Gluon's
  spelling, sets the groups. So do the numbers of another worker within `Trainer.join`.
* A group's ``lr`` is the trainer's learning rate multiplied by the ``lr_mult`` of the group, and its ``weight_decay``
  accordingly. The optimizer's tables `lr_mult` and `wd_mult` begin with these factors and belong to the user: another
  factor of a key acts besides the group's number, which it does not change.
* Rate and decay may change at any time. So may ``momentum``, or ``betas``, which OneCycleLR and CyclicLR change, if the
  weights are updated in this process: servers would never learn of it. All groups have the same.
* With a rule of torch each group has all numbers of the rule; all but rate and decay change as ``momentum`` does.
* With a schedule in the optimizer (`lr_scheduler`) ``lr`` has no effect: whoever updates the weights counts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from kvdist.optimizer.base import Optimizer, numbers_of
from kvdist.optimizer.torch_rules import TorchRule, grouped
from kvdist.training.parameters import GROUP_ENTRIES, Parameter

NUMBERS = {"learning_rate": ("lr", "lr_mult"), "wd": ("weight_decay", "wd_mult")}
"""Numbers of the optimizer that may change at any time: their names in a group, and the tables of their factors."""
WORDS = tuple(word for word, _ in NUMBERS.values())


class ParamGroups:
    """The parameter groups of a trainer, and the optimizer that gets their numbers.

    Args:
        parameters: all parameters of the trainer; the key of each is its position.
        optimizer: the rule.
        given: an optimizer of torch by the user, whose groups these are; None for the groups of the parameters.

    Raises:
        ValueError: `given` has other parameters than the trainer, or hooks of its step; or the groups differ in too
            many numbers.
    """

    def __init__(
        self, parameters: Sequence[Parameter], optimizer: Optimizer, given: torch.optim.Optimizer | None = None
    ) -> None:
        self.optimizer = optimizer
        self.given = given
        self.shown: list[torch.optim.Optimizer] = [] if given is None else [given]
        """Optimizers of torch's class that have these groups."""
        self.updates_here = True
        """Whether the weights are updated in this process; the trainer's first step decides."""
        self._members = _members_by_group(parameters) if given is None else _members_of_given(parameters, given)
        declared = [members[0].group if members else {} for members in self._members]
        self._factors = {name: [group.get(table, 1.0) for group in declared] for name, (_, table) in NUMBERS.items()}
        """For each number the factor that it contains in each group."""
        for _, table in NUMBERS.values():
            of_keys = {one.key: one.group[table] for one in parameters if table in one.group}
            setattr(optimizer, table, {**getattr(optimizer, table), **of_keys})
        self.param_groups: list[dict[str, Any]] = [] if given is None else given.param_groups
        for place, members in enumerate(self._members if given is None else ()):
            own = {word: number for word, number in declared[place].items() if word not in GROUP_ENTRIES}
            own["params"] = [replica for one in members for replica in one.replicas]
            numbers = {
                word: getattr(optimizer, name) * self._factors[name][place] for name, (word, _) in NUMBERS.items()
            }
            self.param_groups.append({**numbers, **words_of(optimizer), **own})
        self.read(anew=True)
        optimizer._set_groups = weakref.WeakMethod(self.set)

    def read(self, *, anew: bool = False) -> None:
        """Give the optimizer the numbers of the groups, for the next step.

        Args:
            anew: whether the optimizer may have the numbers of other keys; it has no states then.

        Raises:
            ValueError: a number is out of range; a number has changed that cannot change, or not in one group alone; a
                group was added; or the user's optimizer has got a hook of its step.
        """
        self._adopt()
        if self.given is not None:
            _refuse_hooks(self.given)
        for optimizer in self.shown:
            optimizer._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn
        self._read_rule(anew)
        self.read_numbers()

    def _adopt(self) -> None:
        """Take a list of groups that was assigned to an optimizer of torch's class, as wrappers of optimizers do."""
        for optimizer in self.shown:
            if optimizer.param_groups is not self.param_groups:
                self.param_groups = optimizer.param_groups
                for other in self.shown:
                    other.param_groups = self.param_groups
                return

    def read_numbers(self) -> None:
        """Give the optimizer the rate and decay of the groups: a number for all, and factors of keys."""
        self._adopt()
        live = self.optimizer
        for name, (word, table) in NUMBERS.items():
            if name == "learning_rate" and live.lr_scheduler is not None:
                continue
            factors = self._factors[name]
            values = [float(group[word]) for group in self.param_groups]
            if values == [getattr(live, name) * factor for factor in factors]:
                continue
            bases = [value / factor for value, factor in zip(values, factors, strict=True) if factor]
            base = max(bases, default=0.0) or max(values)
            if not _is_same(base, getattr(live, name)):
                live.change_here(name, base)
            base = getattr(live, name)
            for place, value in enumerate(values):
                if not _is_same(base * factors[place], value):
                    self._multiply(table, place, factors[place], value / base)
                    factors[place] = value / base

    def _multiply(self, table: str, place: int, before: float, factor: float) -> None:
        """Let the keys of a group have another factor; they keep those that the table gives them besides."""
        of_keys = {**getattr(self.optimizer, table)}
        for one in self._members[place]:
            of_keys[one.key] = of_keys.get(one.key, 1.0) / before * factor if before else factor
        setattr(self.optimizer, table, {key: factor for key, factor in of_keys.items() if factor != 1.0})

    def set(self, name: str, number: float) -> None:
        """Set the rate or the decay of all groups, before the optimizer gets it.

        Args:
            name: ``learning_rate`` or ``wd``.
            number: its new value, before the factors of the groups.
        """
        self.read_numbers()
        word, _ = NUMBERS[name]
        for group, factor in zip(self.param_groups, self._factors[name], strict=True):
            group[word] = number * factor

    def replace(self, numbers: Mapping[str, Any], tables: Mapping[str, Mapping[int, float]]) -> None:
        """Make the numbers of another worker those of the groups, and of the optimizer.

        Args:
            numbers: fields of the optimizer.
            tables: its tables of factors, by their names.
        """
        live = self.optimizer
        for name, number in numbers.items():
            live.change_here(name, number)
        for name, (word, table) in NUMBERS.items():
            before, factors = getattr(live, table), self._factors[name]
            setattr(live, table, {key: factor for key, factor in tables[table].items() if factor != 1.0})
            for place, (members, group) in enumerate(zip(self._members, self.param_groups, strict=True)):
                old, new = (by_key.get(members[0].key, 1.0) if members else 1.0 for by_key in (before, tables[table]))
                factors[place] = factors[place] / old * new if old else new
                group[word] = getattr(live, name) * factors[place]
        for group, words in zip(self.param_groups, self._words(), strict=True):
            group.update(words)

    def rekey(self, key_of: Mapping[int, int]) -> None:
        """Let the factors of the optimizer follow new keys of the parameters.

        Args:
            key_of: old key → new key.
        """
        for _, table in NUMBERS.values():
            factors = getattr(self.optimizer, table)
            setattr(self.optimizer, table, {key_of.get(key, key): factor for key, factor in factors.items()})
        self.read(anew=True)

    def _words(self) -> list[dict[str, Any]]:
        """For each group the optimizer's numbers but rate and decay, by torch's names."""
        live = self.optimizer
        return [words_of(live.for_key(members[0].key) if members else live) for members in self._members]

    def _read_rule(self, anew: bool) -> None:
        """Give the optimizer the other numbers of the groups."""
        live = self.optimizer
        if len(self.param_groups) != len(self._members):
            raise ValueError("a parameter group was added after the Trainer was made; make another Trainer with all")
        present = self._words()
        wanted = [_words_in(group, words) for group, words in zip(self.param_groups, present, strict=True)]
        if wanted == present and not anew:
            return
        fields: dict[str, Any] = TorchRule.arguments(wanted[0])
        if isinstance(live, TorchRule):
            keys = [[one.key for one in members] for members in self._members]
            fields = grouped(type(live), list(zip(keys, wanted, strict=True)))
        elif any(words != wanted[0] for words in wanted):
            raise ValueError(f"{', '.join(wanted[0])} is different in {wanted}; a trainer needs the same in all groups")
        changed = {name: number for name, number in fields.items() if vars(live)[name] != number}
        if changed and not anew:
            said = ", ".join(
                f"{word} has changed from {before[word]} to {number}"
                for before, words in zip(present, wanted, strict=True)
                for word, number in words.items()
                if before[word] != number
            )
            if not self.updates_here:
                raise ValueError(
                    f"{said}, but the weights are updated on the store, which keeps the values from the trainer's"
                    " creation: create the scheduler with cycle_momentum=False, or the trainer with"
                    " update_on_kvstore=False"
                )
            numbers = {name: vars(live)[name] for name in numbers_of(type(live))}
            if type(live)(**{**numbers, **changed}).state_names != live.state_names:
                raise ValueError(
                    f"{said}, which needs other states than the optimizer has: give that number from the start, as in"
                    " {'momentum': 0.9}, or make another Trainer; a scheduler that changes the momentum takes"
                    " cycle_momentum=False"
                )
        for name, number in changed.items():
            live.change_here(name, number)


def words_of(rule: Optimizer) -> dict[str, Any]:
    """The entries of a group, but for rate and decay, by torch's names: all numbers of a rule of torch, or momentum."""
    if isinstance(rule, TorchRule):
        return {word: number for word, number in rule.words().items() if word not in WORDS}
    live = vars(rule)
    if "momentum" in live:
        return {"momentum": live["momentum"]}
    return {"betas": (live["beta1"], live["beta2"])} if "beta1" in live and "beta2" in live else {}


def _words_in(group: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a group by their names in `present`; a state from elsewhere may lack one, or have a list."""
    found = {word: group.get(word, number) for word, number in present.items()}
    return {word: tuple(number) if isinstance(number, list) else number for word, number in found.items()}


def _is_same(number: float, other: float) -> bool:
    return math.isclose(number, other, rel_tol=1e-12)  # quotients and products of factors are rounded


def _members_by_group(parameters: Sequence[Parameter]) -> list[list[Parameter]]:
    """The parameters of each group of the Trainer's argument."""
    by_group: dict[int, list[Parameter]] = {}
    for parameter in parameters:
        by_group.setdefault(id(parameter.group), []).append(parameter)
    return list(by_group.values())


def _members_of_given(parameters: Sequence[Parameter], given: torch.optim.Optimizer) -> list[list[Parameter]]:
    """The parameters of each group of an optimizer of torch.

    Raises:
        ValueError: the optimizer has other parameters than the trainer.
    """
    known = {id(one.replicas[0]): one for one in parameters}
    groups = [[id(tensor) for tensor in group["params"]] for group in given.param_groups]
    present = {tensor for group in groups for tensor in group}
    if not present <= known.keys():
        raise ValueError("the optimizer has parameters that the Trainer has not: give both the same, net.parameters()")
    left = [one.label for tensor, one in known.items() if one.trained and tensor not in present]
    if left:
        raise ValueError(
            f"{', '.join(left[:3])} is trained, and the optimizer has it not: give both the same parameters, or freeze"
            " it by requires_grad_(False)"
        )
    return [[known[tensor] for tensor in group] for group in groups]


def _refuse_hooks(given: torch.optim.Optimizer) -> None:
    hooks = [*given._optimizer_step_pre_hooks.values(), *given._optimizer_step_post_hooks.values()]
    for hook in hooks:
        if hook is not refuse_step:
            raise ValueError(
                f"the optimizer has a hook of its step(), {getattr(hook, '__qualname__', hook)}, which a Trainer never"
                " calls: register it on trainer.as_torch_optimizer(), and call its step()"
            )


def refuse_step(*_: object) -> NoReturn:
    """Hook of an optimizer of torch whose steps a trainer makes: raises a `RuntimeError`."""
    refuse_own("step", "step()")


def refuse_own(method: str, instead: str) -> NoReturn:
    """Raises a `RuntimeError`: a method of the user's optimizer would act on this process alone."""
    raise RuntimeError(
        f"{method}() of an optimizer that a Trainer has taken over would act on this process alone: call"
        f" trainer.{instead}"
    )
