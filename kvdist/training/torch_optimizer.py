"""A trainer in the form of ``torch.optim.Optimizer``, for code that expects that class.

Schedulers of learning rates, `torch.amp.GradScaler`, and frameworks around a training loop work with it. Invariants:

* A group's ``lr`` and ``weight_decay`` are those of the next step, changed by the user or by a scheduler.
* So is its ``momentum``, or ``betas``, which OneCycleLR and CyclicLR change, if the weights are updated in this
  process. Servers would never learn of the change, so with them it is an error. All groups have the same value.
* The other numbers of an optimizer cannot change, so they are not in the groups. With a rule of torch each group has
  all its numbers; all but ``lr`` and ``weight_decay`` change as ``momentum`` does.
* With an optimizer of torch as argument of the `Trainer`, the groups are those of that optimizer, so its schedulers
  act. Its steps and its state are the trainer's, so its methods for these raise.
* The latest change counts: of a group's number, or of the trainer's. Both are compared when a step begins.
* A step that `GradScaler` skips on one worker is not skipped: the worker takes part without gradients, so the others
  do not wait for it.
* ``state_dict()`` has the optimizer's state in torch's format, from servers or this process. Many programs call it on
  rank 0 alone, so no other worker takes part. ``load_state_dict()`` is called on every worker, as under
  DistributedDataParallel.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from kvdist.checkpoint.snapshot import DROPPED_STATE
from kvdist.kernels.interface import Array
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.states import SliceState, is_count
from kvdist.optimizer.torch_rules import TorchRule, grouped, known_words
from kvdist.training.parameters import Parameter, divide, require_shapes

LOG = logging.getLogger("kvdist")

NUMBERS = {"lr": ("learning_rate", "lr_mult"), "weight_decay": ("wd", "wd_mult")}
"""Hyper-parameters of a group that may change: torch's name → our name and the table of its factors."""


TORCH_NAMES: Mapping[str, Mapping[str, str]] = {
    "sgd": {"momentum": "momentum_buffer"},
    "nag": {"momentum": "momentum_buffer"},
    "adam": {"mean": "exp_avg", "variance": "exp_avg_sq"},
    "adamw": {"mean": "exp_avg", "variance": "exp_avg_sq"},
    "nadam": {"mean": "exp_avg", "variance": "exp_avg_sq", "m_schedule": "mu_product"},
    "adamax": {"mean": "exp_avg", "largest": "exp_inf"},
    "adagrad": {"history": "sum"},
    "adadelta": {"gradients": "square_avg", "steps": "acc_delta"},
    "rmsprop": {"squares": "square_avg", "mean": "grad_avg", "delta": "momentum_buffer"},
}
"""Torch's names of the states, for rules that torch has too; other names stay."""
STEP, MASTER = "step", "master"


class Steps(Protocol):
    """The step function of a trainer."""

    def __call__(self, *, skip: bool) -> None:
        """Make a step, or with `skip` take part in a step without gradients."""


class TorchOptimizer(torch.optim.Optimizer):
    """The result of `kvdist.Trainer.as_torch_optimizer`.

    Args:
        parameters: parameters of the trainer.
        live: the optimizer whose hyper-parameters travel with each step.
        take_step: makes a step.
        gather: returns the optimizer's state of each trained parameter.
        replace: replaces those states.
        overlaps: whether gradients leave during the backward pass.
        given: an optimizer of torch by the user, whose groups count; or None.

    Raises:
        ValueError: the optimizer has an ``lr_scheduler``; or `given` has other parameters than the trainer, hooks, or
            another trainer.
    """

    _step_supports_amp_scaling = True
    """Flag for `GradScaler` to call `step` in any case. For the call it sets two attributes: ``found_inf``, more than 0
    if this worker's gradients are not finite, and ``grad_scale``, the factor that they still contain, or None."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        live: Optimizer,
        take_step: Steps,
        gather: Callable[[], Sequence[SliceState | None]],
        replace: Callable[[Sequence[SliceState | None]], None],
        overlaps: bool,
        given: torch.optim.Optimizer | None = None,
    ) -> None:
        if live.lr_scheduler is not None:
            raise ValueError(
                "the optimizer has an lr_scheduler, which overrides the lr of a group: leave lr_scheduler out and use"
                " one of torch.optim.lr_scheduler, or call the trainer's step() instead of as_torch_optimizer()"
            )
        self._live = live
        self._overlaps = overlaps
        self._take_step = take_step
        self._gather = gather
        self._replace = replace
        self._parameters = parameters
        self._key_of = {id(parameter): key for key, parameter in enumerate(parameters)}
        self._given = given
        self._keys = _keys_by_group(parameters) if given is None else _keys_of_given(parameters, given)
        self._declared = [parameters[keys[0]].group if keys else {} for keys in self._keys]
        self._is_complete = False
        self._told: list[dict[str, Any]] | None = None
        """Numbers of each group when the rule of torch last took them, without rate and decay; None before that."""
        own = {"lr": live.learning_rate, "weight_decay": live.wd, **self._momentum()}
        defaults = live.words() if isinstance(live, TorchRule) else own  # OneCycleLR looks there for the momentum
        super().__init__(self._own_groups() if given is None else [dict(one) for one in given.param_groups], defaults)
        self._is_complete = True
        self._seen = {} if isinstance(live, TorchRule) else {number: self._of_groups(number) for number in NUMBERS}
        if given is not None:
            self._take_over(given)

    def rekey(self, key_of: Mapping[int, int]) -> None:
        """Adopt new keys of the trainer's parameters.

        Args:
            key_of: old key → new key.
        """
        self._key_of = {id(parameter): key for key, parameter in enumerate(self._parameters)}
        self._keys = [[key_of[key] for key in keys] for keys in self._keys]
        self._told = None

    def _own_groups(self) -> list[dict[str, Any]]:
        """Groups with the parameters and the present numbers."""
        members = [[replica for key in keys for replica in self._parameters[key].replicas] for keys in self._keys]
        if isinstance(self._live, TorchRule):
            words = self._live.words()
            pairs = zip(self._keys, self._declared, strict=True)
            present = [{**words, **self._numbers(keys), **declared} for keys, declared in pairs]
            return [{**numbers, "params": own} for numbers, own in zip(present, members, strict=True)]
        momentum = self._momentum()
        return [
            {"params": own, **self._numbers(keys)} | momentum for own, keys in zip(members, self._keys, strict=True)
        ]

    def _take_over(self, given: torch.optim.Optimizer) -> None:
        """Share the groups of the user's optimizer, go on from its state, and disable its methods for both."""
        self.param_groups = given.param_groups
        if _refuse_step in given._optimizer_step_pre_hooks.values():
            raise ValueError("the optimizer belongs to another Trainer: make an optimizer for each Trainer")
        self.tell(updates_here=True)  # before the state, as what a group keeps depends on its numbers
        tensors = itertools.chain.from_iterable(group["params"] for group in given.param_groups)
        state = {index: given.state[one] for index, one in enumerate(tensors) if given.state.get(one)}
        if state:
            self._replace(self._from_torch(state))
            given.state.clear()
        given.register_step_pre_hook(_refuse_step)
        vars(given)["__getstate__"] = _refuse_copy  # a copy would have neither these hooks nor the state
        given.register_state_dict_pre_hook(lambda _: _refuse_own("state_dict", "as_torch_optimizer().state_dict()"))
        given.register_load_state_dict_pre_hook(
            lambda *_: _refuse_own("load_state_dict", "as_torch_optimizer().load_state_dict(state)")
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises a `TypeError`: the optimizer cannot be pickled or copied."""
        _refuse_copy()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse further groups: a trainer's parameters are fixed at its creation.

        Raises:
            RuntimeError: always, except within torch's constructor.
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
            The return value of `closure`.

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
        grads = [[replica.grad for replica in one.replicas if replica.grad is not None] for one in self._parameters]
        divide(grads, divisor)
        try:
            self._take_step(skip=is_overflow)
        except BaseException:
            # The scaler takes these away only after a step that went well, and would count them in at the next one.
            vars(self).pop("found_inf", None)
            vars(self).pop("grad_scale", None)
            divide(grads, 1.0 / divisor)
            raise
        return loss

    def state_dict(self) -> dict[str, Any]:
        """Groups and state, as of torch's optimizers: ``{'state': {0: {'step': …, 'exp_avg': …}}, 'param_groups': …}``.

        The state covers each parameter that a step has updated, gathered from the servers if they update, in tensors on
        the host: ``step``, the number of its updates; arrays of the parameter's shape (for a rule by rows of its rows),
        by torch's names where torch has the rule, in kvdist's sense (see docs/optimizers.md); and ``master``, the
        float32 weight behind a half weight. A parameter with replicas has a single state.

        Call it on any worker, between two steps; the other workers need not. In ``dist_async`` their steps go on
        meanwhile.

        Raises:
            RuntimeError: gradients of the next step have been sent already (``overlap=True``).
            NotImplementedError: the store is a custom store.
        """
        states = zip(self._trained(), self._gather(), strict=True)
        of_torch = {one.replicas[0]: self._to_torch(one, state) for (_, one), state in states if state is not None}
        self.state = defaultdict(dict, of_torch)
        try:
            return super().state_dict()
        finally:
            self.state = defaultdict(dict)  # it would be old after the next step

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from a result of `state_dict`: groups and state, with the same bits.

        Call it on every worker, with the same content. Before the first step it takes effect with that step; later it
        returns when all workers have called it.

        Raises:
            ValueError: the state is of another optimizer, of other parameters or other shapes. Nothing has changed.
            RuntimeError: a lazy module has no shape yet.
            InitMismatch: workers loaded different states, or some of them none. Before the first step, that step raises
                it instead.
        """
        require_shapes(self._parameters)
        states = self._from_torch(state_dict.get("state", {}))
        super().load_state_dict({**state_dict, "state": {}})
        if self._given is not None:
            for own, loaded in zip(self._given.param_groups, self.param_groups, strict=True):
                own.update(loaded)
            self.param_groups = self._given.param_groups
        self._replace(states)

    def _trained(self) -> list[tuple[int, Parameter]]:
        """The parameters that have states, by their index in a state of torch."""
        order = [self._parameters[key] for keys in self._keys for key in keys]
        starts = itertools.accumulate((len(one.replicas) for one in order), initial=0)
        index_of = dict(zip(map(id, order), starts, strict=False))
        return [(index_of[id(one)], one) for one in self._parameters if one.trained]

    def _names(self) -> tuple[list[str], list[str]]:
        """Torch's names of the arrays and of the numbers of a state."""
        names = TORCH_NAMES.get(self._live.name, {})
        arrays, numbers = self._live.state_names, self._live.initial_scalars
        return [names.get(name, name) for name in arrays], [names.get(name, name) for name in numbers]

    def _to_torch(self, parameter: Parameter, state: SliceState) -> dict[str, torch.Tensor]:
        names, numbers = self._names()
        rule = self._live.for_key(self._key_of[id(parameter)])
        own = rule.own_states if isinstance(rule, TorchRule) else names
        shape = parameter.replicas[0].shape
        of_torch = {STEP: torch.tensor(float(state.count), dtype=torch.float64, device="cpu")}
        for name, array in zip(names, state.arrays, strict=True):
            if name in own:
                of_torch[name] = _shaped(array, shape)
        for name, number in zip(numbers, state.scalars, strict=True):
            of_torch[name] = torch.tensor(number, dtype=torch.float64, device="cpu")
        if state.master is not None:
            of_torch[MASTER] = _shaped(state.master, shape)
        return of_torch

    def _from_torch(self, of_torch: Mapping[Any, Any]) -> list[SliceState | None]:
        trained = self._trained()
        others = of_torch.keys() - {index for index, _ in trained}
        if others:
            raise ValueError(
                f"the state has {len(of_torch)} parameters, but this optimizer trains {len(trained)}, without"
                f" {sorted(map(str, others))[:5]}: load it into the same model"
            )
        if DROPPED_STATE not in self._names()[0] and any(DROPPED_STATE in one for one in of_torch.values()):
            LOG.warning(
                "the averages of the weights in a state of an earlier version of kvdist are dropped: average on a"
                " worker, with torch.optim.swa_utils.AveragedModel"
            )
            of_torch = {i: {name: one[name] for name in one if name != DROPPED_STATE} for i, one in of_torch.items()}
        return [None if index not in of_torch else self._of_one(one, of_torch[index]) for index, one in trained]

    def _of_one(self, parameter: Parameter, of_torch: Mapping[str, Any]) -> SliceState | None:
        shape, dtype = values.describe(parameter.replicas[0])
        weight = np.zeros(math.prod(shape), dtype.storage)
        fresh = SliceState.fresh(self._live, weight, dtype, Extent(0, shape), REFERENCE)
        expected = self._to_torch(parameter, fresh)
        if self._live.name == "torch.sgd" and STEP not in of_torch:  # torch does not count the steps of SGD
            of_torch = {STEP: 0.0 if of_torch.get("momentum_buffer") is None else 1.0, **of_torch}
            of_torch = {name: value for name, value in of_torch.items() if value is not None}
            if not of_torch[STEP]:
                return None
        if of_torch.keys() != expected.keys():
            raise ValueError(
                f"the state of {parameter.name} has {', '.join(map(str, of_torch)) or 'nothing'}, and"
                f" {self._live.name} keeps {', '.join(expected)}: it is of another optimizer, or of another setting"
            )
        for name, own in expected.items():
            given = torch.as_tensor(of_torch[name], device="cpu")
            if given.shape != own.shape:
                raise ValueError(
                    f"the state {name} of {parameter.name} has shape {tuple(given.shape)}, but in this model"
                    f" {tuple(own.shape)}: load it into the same model"
                )
            own.copy_(given)  # `fresh` has the memory of the arrays
        count = float(expected[STEP])
        if not is_count(count):
            raise ValueError(f"the state {STEP} of {parameter.name} is {count}; it counts updates")
        scalars = tuple(float(expected[name]) for name in self._names()[1])
        return SliceState(int(count), fresh.arrays, scalars, fresh.master) if count else None

    def tell(self, updates_here: bool) -> None:
        """Synchronise hyper-parameters between the groups and the optimizer; changed values win.

        Args:
            updates_here: whether the weights are updated in this process.

        Raises:
            ValueError: the groups differ in momentum, or it has changed and the weights are updated on the store; or
                a hook was registered on the user's optimizer.
        """
        if self._given is not None:
            _refuse_hooks(self._given)
        for shown in (self, self._given or self):
            shown._opt_called = True  # type: ignore[attr-defined]  # or torch's schedulers warn after `Trainer.step`
        if isinstance(self._live, TorchRule):
            self._tell_rule(self._live, updates_here)
        else:
            self._tell_momentum(updates_here)
        for number, (name, table) in NUMBERS.items():
            of_groups = self._of_groups(number)
            if of_groups != self._seen.get(number):
                self._give(of_groups, name, table)
            else:
                for keys, group in zip(self._keys, self.param_groups, strict=True):
                    present = self._numbers(keys)[number]
                    if not math.isclose(present, group[number], rel_tol=1e-12):  # a factor rounds
                        group[number] = present
            self._seen[number] = self._of_groups(number)

    def follow(self) -> None:
        """Copy the optimizer's numbers, which another worker has changed, to the groups."""
        for keys, group in zip(self._keys, self.param_groups, strict=True):
            if isinstance(self._live, TorchRule) and keys:
                group.update(self._live.for_key(keys[0]).words())
            elif not isinstance(self._live, TorchRule):
                group.update(self._momentum())
            group.update(self._numbers(keys))
        self._seen = {number: self._of_groups(number) for number in NUMBERS}

    def _give(self, of_groups: list[float], name: str, table: str) -> None:
        declared = [float(group.get(table, 1.0)) for group in self._declared]
        base, factors = base_and_factors(of_groups, declared)
        multipliers = dict(getattr(self._live, table))
        for keys, factor in zip(self._keys, factors, strict=True):
            if not keys:
                continue
            # A group speaks for its first key; what the others have besides, by the table, they keep.
            first = multipliers.get(keys[0], 1.0)
            own = {key: multipliers.get(key, 1.0) / first if first else 1.0 for key in keys}
            multipliers.update({key: factor * share for key, share in own.items()})
        setattr(self._live, name, base)
        setattr(self._live, table, {key: factor for key, factor in multipliers.items() if factor != 1.0})

    def _tell_rule(self, live: TorchRule, updates_here: bool) -> None:
        """Apply changed numbers of the groups to a rule of torch, except rate and decay."""
        if len(self.param_groups) != len(self._keys):
            raise ValueError("a parameter group was added after the Trainer was made; make another Trainer with all")
        rules = [live.for_key(keys[0]) if keys else live for keys in self._keys]
        groups = zip(rules, self.param_groups, strict=True)  # a state from elsewhere may lack a number
        told = [{**rule.words(), **known_words(type(live), group)} for rule, group in groups]
        told = [{word: value for word, value in words.items() if word not in NUMBERS} for words in told]
        if told == self._told:
            return
        wanted = grouped(type(live), list(zip(self._keys, told, strict=True)))
        changed = {name: number for name, number in wanted.items() if vars(live)[name] != number}
        if changed:
            said = ", ".join(f"{name} to {number}" for name, number in changed.items())
            if not updates_here:
                raise ValueError(
                    f"the groups have changed {said}, but the weights are updated on the store, which keeps the values"
                    " from the trainer's creation: create the trainer with update_on_kvstore=False, or a scheduler with"
                    " cycle_momentum=False"
                )
            if self._told is not None and type(live)(**wanted).state_names != live.state_names:
                raise ValueError(
                    f"the groups have changed {said}, which needs other states than the trainer has: create another"
                    " Trainer"
                )
            for name, number in changed.items():
                live.change_here(name, number)
        self._told = told

    def _momentum(self) -> dict[str, Any]:
        """The optimizer's momentum as entries of a group, by torch's names; empty for an optimizer without momentum."""
        live = vars(self._live)
        if "momentum" in live:
            return {"momentum": live["momentum"]}
        return {"betas": (live["beta1"], live["beta2"])} if "beta1" in live and "beta2" in live else {}

    def _tell_momentum(self, updates_here: bool) -> None:
        for word, present in self._momentum().items():
            # A state from elsewhere may lack it, or have a list for it.
            of_groups: list[Any] = [group.get(word, present) for group in self.param_groups]
            if word == "betas":
                of_groups = [tuple(betas) for betas in of_groups]
            wanted, *others = of_groups
            if any(other != wanted for other in others):
                raise ValueError(f"{word} is {[wanted, *others]} in the groups; a trainer needs the same in all")
            if wanted == present:
                continue
            if not updates_here:
                raise ValueError(
                    f"{word} has changed from {present} to {wanted}, but the weights are updated on the store, which"
                    " keeps the values from the trainer's creation: create the scheduler with cycle_momentum=False, or"
                    " the trainer with update_on_kvstore=False"
                )
            if not present:
                raise ValueError(
                    f"{word} has changed from 0 to {wanted}, but the trainer was made without momentum: give its"
                    " optimizer one, as in {'momentum': 0.9}, or make the scheduler with cycle_momentum=False"
                )
            fields = zip(("beta1", "beta2"), wanted, strict=True) if word == "betas" else [("momentum", wanted)]
            for field, number in fields:
                self._live.change_here(field, number)

    def _numbers(self, keys: Sequence[int]) -> dict[str, float]:
        key = keys[0] if keys else None
        return {"lr": self._live.pushed_lr(key), "weight_decay": self._live.wd_for(key)}

    def _of_groups(self, number: str) -> list[float]:
        return [float(group[number]) for group in self.param_groups]


def _keys_by_group(parameters: Sequence[Parameter]) -> list[list[int]]:
    """The keys of each group of the Trainer's argument."""
    by_group: dict[int, list[int]] = {}
    for key, parameter in enumerate(parameters):
        by_group.setdefault(id(parameter.group), []).append(key)
    return list(by_group.values())


def _keys_of_given(parameters: Sequence[Parameter], given: torch.optim.Optimizer) -> list[list[int]]:
    """The keys of each group of an optimizer of torch.

    Raises:
        ValueError: the optimizer has other parameters than the trainer.
    """
    key_of = {id(one.replicas[0]): key for key, one in enumerate(parameters)}
    members = [[key_of.get(id(tensor)) for tensor in group["params"]] for group in given.param_groups]
    keys = [[key for key in group if key is not None] for group in members]
    if any(key is None for group in members for key in group):
        raise ValueError("the optimizer has parameters that the Trainer has not: give both the same, net.parameters()")
    there = {key for group in keys for key in group}
    left = [one.label for key, one in enumerate(parameters) if one.trained and key not in there]
    if left:
        raise ValueError(
            f"{', '.join(left[:3])} is trained, and the optimizer has it not: give both the same parameters, or freeze"
            " it by requires_grad_(False)"
        )
    return keys


def _refuse_hooks(given: torch.optim.Optimizer) -> None:
    hooks = [*given._optimizer_step_pre_hooks.values(), *given._optimizer_step_post_hooks.values()]
    for hook in hooks:
        if hook is not _refuse_step:
            raise ValueError(
                f"the optimizer has a hook of its step(), {getattr(hook, '__qualname__', hook)}, which a Trainer never"
                " calls: register it on trainer.as_torch_optimizer(), and call its step()"
            )


def _refuse_copy() -> NoReturn:
    raise TypeError(
        "an optimizer whose steps a Trainer makes cannot be pickled or copied, as the Trainer has its state: save"
        " trainer.as_torch_optimizer().state_dict() instead"
    )


def _refuse_step(*_: object) -> NoReturn:
    _refuse_own("step", "step()")


def _refuse_own(method: str, instead: str) -> NoReturn:
    raise RuntimeError(
        f"{method}() of an optimizer that a Trainer has taken over would act on this process alone: call"
        f" trainer.{instead}"
    )


def base_and_factors(numbers: Sequence[float], declared: Sequence[float]) -> tuple[float, list[float]]:
    """A base number and a factor for each group, whose products are the groups' numbers.

    Args:
        numbers: number of each group, at least 0.
        declared: factors that the user has set for the groups; kept where they fit.
    """
    base = max((number / factor for number, factor in zip(numbers, declared, strict=True) if factor > 0), default=0.0)
    base = base or max(numbers)
    factors = [
        factor if base * factor == number else number / base for number, factor in zip(numbers, declared, strict=True)
    ]
    return base, factors


def _shaped(array: Array, shape: torch.Size) -> torch.Tensor:
    """A view of the array as a tensor of this shape; one-dimensional if the numbers of elements differ."""
    tensor = torch.from_numpy(array)
    return tensor.reshape(shape) if tensor.numel() == shape.numel() else tensor
