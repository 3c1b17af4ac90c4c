"""A trainer in the form of ``torch.optim.Optimizer``, for code that expects that class.

Schedulers of learning rates, `torch.amp.GradScaler`, and frameworks around a training loop work with it. Invariants:

* Its groups are those of the trainer (`ParamGroups`), whose numbers the next step takes, changed by the user or by a
  scheduler.
* With an optimizer of torch as argument of the `Trainer`, the groups are those of that optimizer, so its schedulers
  act. Its steps and its state are the trainer's, so its methods for these raise.
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
from typing import Any, NoReturn

import numpy as np
import torch

from kvdist.checkpoint.snapshot import DROPPED_STATE
from kvdist.kernels.interface import Array
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.optimizer.base import Extent
from kvdist.optimizer.states import SliceState, is_count
from kvdist.optimizer.torch_rules import TorchRule
from kvdist.training.param_groups import ParamGroups, refuse_own, refuse_step, words_of
from kvdist.training.parameters import Parameter, divide, require_shapes

LOG = logging.getLogger("kvdist")

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


class TorchOptimizer(torch.optim.Optimizer):
    """The result of `kvdist.Trainer.as_torch_optimizer`.

    Args:
        parameters: parameters of the trainer.
        groups: their groups.
        take_step: makes a step; with True, takes part in a step without gradients.
        gather: returns the optimizer's state of each trained parameter.
        replace: replaces those states.
        overlaps: whether gradients leave during the backward pass.

    Raises:
        ValueError: the optimizer has an ``lr_scheduler``; or the user's optimizer of torch has another trainer.
    """

    _step_supports_amp_scaling = True
    """Flag for `GradScaler` to call `step` in any case. For the call it sets two attributes: ``found_inf``, more than 0
    if this worker's gradients are not finite, and ``grad_scale``, the factor that they still contain, or None."""

    def __init__(
        self,
        parameters: Sequence[Parameter],
        groups: ParamGroups,
        take_step: Callable[[bool], None],
        gather: Callable[[], Sequence[SliceState | None]],
        replace: Callable[[Sequence[SliceState | None]], None],
        overlaps: bool,
    ) -> None:
        live = groups.optimizer
        if live.lr_scheduler is not None:
            raise ValueError(
                "the optimizer has an lr_scheduler, which overrides the lr of a group: leave lr_scheduler out and use"
                " one of torch.optim.lr_scheduler, or call the trainer's step() instead of as_torch_optimizer()"
            )
        self._live = live
        self._groups = groups
        self._overlaps = overlaps
        self._take_step = take_step
        self._gather = gather
        self._replace = replace
        self._parameters = parameters
        self._is_complete = False
        # OneCycleLR looks in the defaults for the momentum.
        defaults = {"lr": live.learning_rate, "weight_decay": live.wd, **words_of(live)}
        super().__init__([dict(one) for one in groups.param_groups], defaults)
        self.param_groups = groups.param_groups
        self._is_complete = True
        groups.shown.append(self)
        if groups.given is not None:
            self._take_over(groups.given)

    def _take_over(self, given: torch.optim.Optimizer) -> None:
        """Go on from the state of the user's optimizer, and disable its methods for its steps and its state."""
        if refuse_step in given._optimizer_step_pre_hooks.values():
            raise ValueError("the optimizer belongs to another Trainer: make an optimizer for each Trainer")
        tensors = itertools.chain.from_iterable(group["params"] for group in given.param_groups)
        state = {index: given.state[one] for index, one in enumerate(tensors) if given.state.get(one)}
        if state:
            self._replace(self._from_torch(state))
            given.state.clear()
        given.register_step_pre_hook(refuse_step)
        vars(given)["__getstate__"] = _refuse_copy  # a copy would have neither these hooks nor the state
        given.register_state_dict_pre_hook(lambda _: refuse_own("state_dict", "as_torch_optimizer().state_dict()"))
        given.register_load_state_dict_pre_hook(
            lambda *_: refuse_own("load_state_dict", "as_torch_optimizer().load_state_dict(state)")
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
            self._take_step(is_overflow)
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
        of_torch = {
            one.replicas[0]: self._to_torch(one, state)
            for (_, one), state in zip(self._trained(), self._gather(), strict=True)
            if state is not None
        }
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
        for own, loaded in zip(self._groups.param_groups, self.param_groups, strict=True):
            own.update(loaded)
        self.param_groups = self._groups.param_groups
        self._replace(states)

    def _trained(self) -> list[tuple[int, Parameter]]:
        """The parameters that have states, by their index in a state of torch."""
        tensors = itertools.chain.from_iterable(group["params"] for group in self.param_groups)
        index_of = {id(tensor): index for index, tensor in enumerate(tensors)}
        return [(index_of[id(one.replicas[0])], one) for one in self._parameters if one.trained]

    def _names(self) -> tuple[list[str], list[str]]:
        """Torch's names of the arrays and of the numbers of a state."""
        names = TORCH_NAMES.get(self._live.name, {})
        arrays, numbers = self._live.state_names, self._live.initial_scalars
        return [names.get(name, name) for name in arrays], [names.get(name, name) for name in numbers]

    def _to_torch(self, parameter: Parameter, state: SliceState) -> dict[str, torch.Tensor]:
        names, numbers = self._names()
        rule = self._live.for_key(parameter.key)
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
        return [self._of_one(one, of_torch[i]) if i in of_torch else None for i, one in trained]

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


def _refuse_copy() -> NoReturn:
    raise TypeError(
        "an optimizer whose steps a Trainer makes cannot be pickled or copied, as the Trainer has its state: save"
        " trainer.as_torch_optimizer().state_dict() instead"
    )


def _shaped(array: Array, shape: torch.Size) -> torch.Tensor:
    """A view of the array as a tensor of this shape; one-dimensional if the numbers of elements differ."""
    tensor = torch.from_numpy(array)
    return tensor.reshape(shape) if tensor.numel() == shape.numel() else tensor
