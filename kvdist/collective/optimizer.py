"""torch's optimizers over all ranks: Horovod's `DistributedOptimizer`.

The optimizer stays the same object, with its state, schedulers and hooks; its class becomes a subclass of the same name
that reduces gradients before it steps. A hook of `step` does that, so wrappers of `step`, such as those of learning
rate schedulers, do not matter.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from kvdist.collective.api import ProcessSet, allreduce, global_process_set, grouped_allreduce
from kvdist.collective.gradients import Distributed, GradientReducer, Groups, ReduceOptions, put_before
from kvdist.collective.reduction import Compression, NoneCompressor
from kvdist.reduce_op import Adasum, Average, ReduceOp

Named = list[tuple[str, torch.Tensor]]


class _Distributed(Distributed, torch.optim.Optimizer):
    """First base of the class of a distributed optimizer, in front of the optimizer's class."""

    _options: ReduceOptions
    _named: Named
    _reducers: list[GradientReducer]
    _known: set[int]
    _should_synchronize: bool
    _is_synchronized_early: bool

    def _begin(self, named: Named, options: ReduceOptions) -> None:
        self._named = named
        self._options = options
        self._reducers = []
        self._known = set()
        self._should_synchronize = True
        self._is_synchronized_early = False
        if self._takes_part:  # other ranks step by their own gradients
            self._watch()
            self.register_step_pre_hook(partial(_before_step, weakref.ref(self)))

    @property
    def backward_passes_per_step(self) -> int:
        """The backward passes that add up before gradients are reduced."""
        return self._options.passes

    @backward_passes_per_step.setter
    def backward_passes_per_step(self, passes: int) -> None:
        self.set_backward_passes_per_step(passes)

    @property
    def op(self) -> ReduceOp:
        """How gradients are combined."""
        return self._options.op

    @property
    def gradient_predivide_factor(self) -> float:
        """By which gradients are divided before they are summed."""
        return self._options.predivide_factor

    @property
    def sparse_as_dense(self) -> bool:
        """Whether sparse gradients travel as dense ones."""
        return self._options.sparse_as_dense

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that take part."""
        return self._options.process_set

    @property
    def _parameter_names(self) -> dict[torch.Tensor, str]:
        """Each parameter's name in messages, under Horovod's name, which scripts read."""
        return {parameter: name for name, parameter in _all_named(self, self._named)}

    @property
    def _takes_part(self) -> bool:
        # All ranks do in the set of all, also where `init` comes later.
        return self.process_set is global_process_set or bool(self.process_set.included())

    def _watch(self) -> None:
        """Start to reduce the gradients of parameters that are new or were unfrozen."""
        known = self._known
        if all(id(one) in known for group in self.param_groups for one in group["params"] if one.requires_grad):
            return
        named = [pair for pair in _all_named(self, self._named) if pair[1].requires_grad and id(pair[1]) not in known]
        names, parameters = zip(*named, strict=True)
        # Only one reducer starts during the backward pass: ranks might begin two in different orders.
        self._reducers.append(GradientReducer(names, parameters, self._options, is_eager=not self._reducers))
        known.update(map(id, parameters))

    @property
    def _is_pending(self) -> bool:
        return any(reducer.is_open for reducer in self._reducers)

    def synchronize(self) -> None:
        """Wait until all gradients are reduced, such as for clipping them before `step`.

        Raises:
            CollectiveError: an operation failed.
            RuntimeError: a gradient was changed while it was being reduced.
        """
        if self._takes_part:
            self._watch()
        for reducer in self._reducers:
            reducer.finish()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Return a context in which `step` uses the gradients as they are, after `synchronize`."""
        self._should_synchronize = False
        try:
            yield
        finally:
            self._should_synchronize = True

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Change the number of backward passes that add up before gradients are reduced, from the next step on."""
        self._refuse_if_pending("set_backward_passes_per_step()")
        self._options = replace(self._options, passes=passes)
        for reducer in self._reducers:
            reducer.remove_hooks()
        self._reducers = []
        self._known = set()
        if self._takes_part:
            self._watch()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Reset the gradients; not between a backward pass and the step that uses its gradients."""
        self._refuse_if_pending("zero_grad()")
        super().zero_grad(*args, **kwargs)

    def _refuse_if_pending(self, what: str) -> None:
        if self._is_pending:
            raise AssertionError(
                f"optimizer.{what} was called after loss.backward() and before optimizer.step() or"
                " optimizer.synchronize(), while gradients are being reduced"
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by `GradScaler.step` before it looks for infinite gradients."""
        self._before_scaler()
        return bool(vars(self).get("_step_supports_amp_scaling", False))

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, supports: bool) -> None:
        vars(self)["_step_supports_amp_scaling"] = supports

    def _before_scaler(self) -> None:
        """Reduce the gradients before a scaler looks at them, so that all ranks skip the same steps."""
        if self._should_synchronize and self._is_pending:
            self.synchronize()
            self._is_synchronized_early = True

    def _before_update(self) -> None:
        """Reduce the gradients before the update."""
        is_early, self._is_synchronized_early = self._is_synchronized_early, False
        if not self._should_synchronize:
            if self._is_pending:
                raise AssertionError("optimizer.step() within skip_synchronize() needs optimizer.synchronize() before")
        elif not is_early or self._is_pending:
            if self._reducers and all(reducer.is_finished for reducer in self._reducers):
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() context after"
                    " optimizer.synchronize(). This can cause training slowdown. It reduces the gradients a second"
                    " time; call it within `with optimizer.skip_synchronize():`",
                    stacklevel=6,
                )
            self.synchronize()
        for reducer in self._reducers:
            reducer.is_finished = False

    def _synchronizing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Wrap a closure to reduce its gradients and average its loss, so that all ranks decide alike."""

        def reduced() -> Any:
            loss = closure()
            self._before_update()
            if loss is None:
                return None
            is_tensor = isinstance(loss, torch.Tensor)
            value = loss.detach() if is_tensor else torch.tensor(float(loss), dtype=torch.float64, device="cpu")
            average = allreduce(value, op=Average, process_set=self._options.process_set)
            return average if is_tensor else average.item()

        return reduced

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a distributed optimizer cannot be copied or pickled; use its state_dict()")


class _DistributedAdasum(_Distributed):
    """Steps on each rank alone, and combines the changes of all ranks by Adasum."""

    _before: list[torch.Tensor]

    def _begin(self, named: Named, options: ReduceOptions) -> None:
        self._named = named
        self._options = options
        self._reducers = []
        self._should_synchronize = True
        me = weakref.ref(self)
        self.register_step_pre_hook(lambda *_: _of(me)._remember())
        self.register_step_post_hook(lambda *_: _of(me)._combine())

    def synchronize(self) -> None:
        """Do nothing: `step` combines its changes."""

    def skip_synchronize(self) -> Any:
        """Raise `AssertionError`: not possible with Adasum."""
        raise AssertionError("skip_synchronize() is not possible with Adasum, which combines what step() has changed")

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Do nothing: gradients add up until `step`."""

    def _before_scaler(self) -> None:
        raise RuntimeError("GradScaler cannot be used with Adasum: ranks would skip different steps")

    def _trained(self) -> list[torch.Tensor]:
        return [one for _, one in _all_named(self, self._named) if one.requires_grad]

    def _remember(self) -> None:
        self._before = [parameter.detach().clone() for parameter in self._trained()]

    def _combine(self) -> None:
        parameters, before, self._before = self._trained(), self._before, []
        deltas = [parameter.detach() - start for parameter, start in zip(parameters, before, strict=True)]
        combined = grouped_allreduce(deltas, compression=self._options.compression, op=Adasum)
        with torch.no_grad():
            for parameter, start, delta in zip(parameters, before, combined, strict=True):
                parameter.copy_(start.add_(delta))


def _all_named(optimizer: torch.optim.Optimizer, named: Named) -> Named:
    """The parameters of an optimizer, in its order, with names."""
    names = {id(parameter): name for name, parameter in named}
    return [
        (names.get(id(parameter), f"allreduce.noname.{i}.{j}"), parameter)
        for i, group in enumerate(optimizer.param_groups)
        for j, parameter in enumerate(group["params"])
    ]


def _checked_named(optimizer: torch.optim.Optimizer, given: Iterable[tuple[str, torch.Tensor]] | None) -> Named:
    if given is None:
        return []
    named = list(given)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in named):
        raise ValueError("named_parameters must be (name, parameter) pairs, such as model.named_parameters()")
    names = [name for name, _ in named]
    twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if twice:
        raise ValueError(f"named_parameters has duplicate names: {', '.join(twice)}; each parameter needs its own")
    known = {id(parameter) for _, parameter in named}
    missing = sum(id(one) not in known for group in optimizer.param_groups for one in group["params"])
    if missing:
        raise ValueError(
            f"{missing} parameters of the optimizer are not in named_parameters: pass those of the whole model, or"
            " leave named_parameters out"
        )
    return named


def _of(me: weakref.ref[Any]) -> Any:
    """The distributed optimizer of a hook, which differs from the optimizer that steps if it wraps another."""
    optimizer = me()
    assert optimizer is not None, "its hooks are called after the optimizer is gone"
    return optimizer


def _before_step(me: weakref.ref[Any], _: Any, args: Any, kwargs: Any) -> Any:
    """A hook of `step`."""
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if closure is None:
        _of(me)._before_update()
        return None
    rest = {name: value for name, value in kwargs.items() if name != "closure"}
    return (args[0], _of(me)._synchronizing(closure), *args[2:]), rest


def require_torch_optimizer(optimizer: Any, function: str) -> None:
    """Check the optimizer that was passed to a function of this package.

    Raises:
        TypeError: it is not torch's, or does not call torch's constructor, which creates the hooks of `step`.
    """
    kind = type(optimizer)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{function} takes an optimizer of torch.optim, got {kind.__module__}.{kind.__qualname__}; kvdist's own"
            " optimizers are for a Trainer or a DistributedTrainer"
        )
    try:
        optimizer.register_step_pre_hook(lambda *_: None).remove()
    except AttributeError as error:
        raise TypeError(
            f"{kind.__qualname__} does not call torch.optim.Optimizer.__init__, so it lacks the hooks that {function}"
            f" needs: if it wraps another optimizer, give {function} that one, and wrap it afterwards"
        ) from error


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[tuple[str, torch.Tensor]] | None = None,
    compression: type[NoneCompressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Let a torch optimizer reduce gradients over the ranks before each step. Returns the same object.

    Gradients are sent in buckets while the backward pass still runs. Do not touch them between the backward pass and
    ``step()`` or ``synchronize()``. To clip gradients::

        loss.backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()

    ``GradScaler.step(optimizer)`` works without these calls; before ``GradScaler.unscale_`` call ``synchronize()``. If
    ``step`` gets a closure, each call of the closure has its gradients reduced and its loss averaged.

    Args:
        optimizer: a torch optimizer. It is changed in place: its class becomes a subclass of the same name.
        named_parameters: ``model.named_parameters()``, which the ranks compare.
        compression: compression of gradients for the network, such as `Compression.fp16`.
        backward_passes_per_step: number of passes whose gradients are added up, undivided, before they are reduced.
        op: Average, Sum, Min, Max or Product; or Adasum, which combines the weight changes of each rank's step instead
            of the gradients.
        gradient_predivide_factor: divisor of gradients before the sum; the rest of the division follows the sum. For
            Average only.
        num_groups: Horovod's older spelling of `groups`.
        groups: number of groups of gradients, each reduced as a unit; or lists of parameters.
        sparse_as_dense: send sparse gradients as dense tensors instead of gathering their rows; they become sparse
            again afterwards.
        process_set: ranks that take part; the other ranks step with their local gradients.

    Returns:
        `optimizer`, with the additional methods ``synchronize()``, ``skip_synchronize()`` and
        ``set_backward_passes_per_step(passes)``, and the attributes ``op``, ``process_set``, ``sparse_as_dense``,
        ``gradient_predivide_factor`` and ``backward_passes_per_step``.

    Raises:
        NotImplementedError: Adasum on a process set.
        TypeError: `optimizer` is not a torch optimizer, or does not support hooks.
        ValueError: arguments are invalid or contradict each other.
    """
    require_torch_optimizer(optimizer, "DistributedOptimizer")
    op = ReduceOp(op)
    if num_groups:
        warnings.warn("Parameter `num_groups` has been replaced by `groups`", DeprecationWarning, stacklevel=2)
    options = ReduceOptions(
        op=op,
        compression=compression,
        predivide_factor=gradient_predivide_factor,
        process_set=process_set,
        sparse_as_dense=sparse_as_dense,
        passes=backward_passes_per_step,
        groups=num_groups or None if groups is None else groups,
    )
    named = _checked_named(optimizer, named_parameters)
    process_set._number()
    put_before(optimizer, _DistributedAdasum if op is Adasum else _Distributed)
    optimizer._begin(named, options)  # type: ignore[attr-defined]
    return optimizer
