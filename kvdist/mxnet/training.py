"""Gluon's Trainer and optimizers of MXNet whose gradients are averaged over the ranks."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import mxnet as mx
import numpy as np

from kvdist.mxnet.arrays import class_of
from kvdist.mxnet.ranks import current


class Compression:
    """How gradients travel: `none`, unchanged, or `fp16`, float32 as float16."""

    none = None
    fp16 = "float16"


class DistributedOptimizer(mx.optimizer.Optimizer):
    """An optimizer that averages gradients over the ranks before each update.

    For ``gluon.Trainer(params, optimizer, kvstore=None)`` and ``module.fit(data, kvstore=None, optimizer=optimizer)``.
    It has the attributes and methods of the optimizer that it wraps.

    Args:
        optimizer: an optimizer of MXNet, or of a class derived from theirs.
        gradient_predivide_factor: divisor of gradients before they are summed; the sums are multiplied by it.
        num_groups: without effect: the gradients of a step travel together in any case.

    Raises:
        TypeError: it is not an optimizer of MXNet.
        ValueError: a number is out of range.
    """

    def __init__(self, optimizer: Any, gradient_predivide_factor: float = 1.0, num_groups: int = 0) -> None:
        _require_optimizer("DistributedOptimizer", optimizer, mx.optimizer.Optimizer)
        _require_numbers(gradient_predivide_factor, num_groups)
        self.__dict__.update(_optimizer=optimizer, _predivide=gradient_predivide_factor)
        self.__dict__["aggregate_num"] = sys.maxsize  # MXNet's Updater then gives all parameters of a step at once
        self.rescale_grad = optimizer.rescale_grad

    def __getattribute__(self, name: str) -> Any:
        if name in _OWN or name.startswith("__"):
            return object.__getattribute__(self, name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "rescale_grad":
            self.__dict__[name] = value  # as users know it; sums become means by the other one
            value *= self._predivide / current().world.size
        setattr(self._optimizer, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = copy.copy(self._optimizer)
        plain.rescale_grad = self.rescale_grad
        return DistributedOptimizer, (plain, self._predivide)

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """Average the gradient of a parameter, or those of a list of parameters, and update."""
        self._update_by("update", index, weight, grad, state)

    def update_multi_precision(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        """As `update`; weights in half precision that have float32 masters are updated through these."""
        self._update_by("update_multi_precision", index, weight, grad, state)

    def _update_by(self, method: str, *columns: Any) -> None:
        optimizer = self._optimizer
        lists = columns if isinstance(columns[0], (list, tuple)) else [[one] for one in columns]
        named = zip(lists[0], lists[2], strict=True)
        groups = [(f"gradient {index} {_name_of(optimizer, index)!r}", [grad]) for index, grad in named]
        current().reduce(groups, before=1.0 / self._predivide)
        step = min(optimizer.aggregate_num, len(groups))  # some of MXNet 2 have infinity
        if step > 0:
            for start in range(0, len(groups), step):
                getattr(optimizer, method)(*[one[start : start + step] for one in lists])
        else:  # this optimizer of MXNet 1.9 takes no lists
            for one in zip(*lists, strict=True):
                getattr(optimizer, method)(*one)


_OWN = {"_optimizer", "_predivide", "_update_by", "aggregate_num", "rescale_grad", "update", "update_multi_precision"}
"""The attributes of a `DistributedOptimizer` that are not those of its optimizer."""


class DistributedTrainer(mx.gluon.Trainer):
    """A `gluon.Trainer` that averages gradients over the ranks, by a single exchange in a step.

    It may be created before parameters have shapes or are initialised. ``step(batch_size)`` divides by the examples of
    this rank alone, since gradients are averaged; those of several devices are summed.

    Args:
        params, optimizer, optimizer_params: as for `gluon.Trainer`.
        compression: ``Compression.fp16`` lets gradients of float32 travel, and be summed, as float16.
        gradient_predivide_factor: divisor of gradients before they are summed; the sums are multiplied by it.
        prefix: without effect: trainers cannot take each other's gradients.
        num_groups: without effect: the gradients of a step travel together in any case.
        kvstore: None.

    Raises:
        TypeError: the optimizer is not MXNet's, `kvstore` is not None, or the compression is unknown.
        ValueError: a number is out of range.
    """

    def __init__(
        self, params: Any, optimizer: Any, optimizer_params: Any = None, compression: str | None = Compression.none,
        gradient_predivide_factor: float = 1.0, prefix: str | None = None, num_groups: int = 0, kvstore: None = None,
    ) -> None:  # fmt: skip
        if kvstore is not None:
            raise TypeError(
                f"DistributedTrainer exchanges gradients itself and takes no kvstore, and {kvstore!r} is given: leave"
                " it out, or make a gluon.Trainer with a store of examples/mxnet_bridge"
            )
        if compression not in (Compression.none, Compression.fp16):
            raise TypeError(f"compression is {compression!r}; it must be Compression.none or Compression.fp16")
        _require_numbers(gradient_predivide_factor, num_groups)
        if isinstance(optimizer, DistributedOptimizer):
            warnings.warn("DistributedTrainer takes the optimizer out of the DistributedOptimizer", stacklevel=2)
            rescale_grad, optimizer = optimizer.rescale_grad, optimizer._optimizer
            optimizer.rescale_grad = rescale_grad
        _require_optimizer("DistributedTrainer", optimizer, (str, mx.optimizer.Optimizer))
        self._compression, self._before = compression, 1.0 / gradient_predivide_factor
        after = gradient_predivide_factor / current().world.size
        super().__init__(params, optimizer, optimizer_params=optimizer_params, kvstore=None)
        self._scale *= after
        named = params.items() if hasattr(params, "items") else ()
        self._labels = {id(one): name for name, one in named}  # in MXNet 2 all weights have the name 'weight'

    def _check_contexts(self) -> Any:
        return self._places("_check_contexts")

    def _check_devices(self) -> Any:  # its name in MXNet 2
        return self._places("_check_devices")

    def _places(self, check: str) -> Any:
        if any(one._data is None and not one._deferred_init for one in self._params):
            return [mx.current_context()]  # until it is known at the first step
        return getattr(super(), check)()

    def _init_kvstore(self) -> None:
        missing = [self._label(one) for one in self._params if one._data is None]
        if missing:
            said = f"{', '.join(map(repr, missing))} {'has' if len(missing) == 1 else 'have'}"
            raise RuntimeError(
                f"{said} no value at the first step: call net.initialize() and run a forward pass that uses all of the"
                " trainer's parameters, or give it fewer, by net.collect_params(select)"
            )
        name = "contexts" if hasattr(self, "_contexts") else "devices"
        places = self._places(f"_check_{name}")
        setattr(self, f"_{name}", places)
        while len(self._updaters) < len(places):
            self._updaters.append(mx.optimizer.get_updater(self._optimizer))
        super()._init_kvstore()

    def _label(self, parameter: Any) -> str:
        return str(self._labels.get(id(parameter), parameter.name))

    def _allreduce_grads(self) -> None:
        groups, halved = [], []
        for i, one in enumerate(self._params):
            if one.grad_req == "null":
                continue
            travelling = grads = one.list_grad()
            if self._compression and np.dtype(one.dtype) == np.float32 and grads[0].stype == "default":
                travelling = [grad.astype(self._compression) for grad in grads]
                halved += list(zip(grads, travelling, strict=True))
            groups.append((f"gradient {i} {self._label(one)!r}", travelling))
        current().reduce(groups, before=self._before)
        for grad, half in halved:
            grad[:] = half


def _name_of(optimizer: Any, index: Any) -> str:
    """The name of a parameter that an optimizer updates."""
    parameter = optimizer.param_dict.get(index)
    return str(optimizer.idx2name.get(index, index) if parameter is None else parameter.name)


def _require_optimizer(what: str, optimizer: Any, kinds: Any) -> None:
    if not isinstance(optimizer, kinds):
        raise TypeError(
            f"{what} takes an optimizer of MXNet, and this is a {class_of(optimizer)}: make one, such as"
            " mx.optimizer.create('sgd', learning_rate=0.1)"
        )


def _require_numbers(gradient_predivide_factor: float, num_groups: int) -> None:
    if not 0 < gradient_predivide_factor < float("inf"):
        raise ValueError(f"gradient_predivide_factor is {gradient_predivide_factor}; it must be a positive number")
    if num_groups < 0:
        raise ValueError(f"num_groups is {num_groups}; it counts groups, from 0")
