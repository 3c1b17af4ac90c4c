"""The parameters of a trainer: their order, names and replicas, and whether they can be trained together.

Invariants:

* Invalid parameters are refused at the trainer's creation, by name and with a remedy.
* A lazy parameter (`torch.nn.LazyLinear`) has no shape before a forward pass; it is checked when training begins.
* A parameter is identified across workers by its name, or without names by its position.
* A parameter is a tensor, or a list of replicas, a tensor per device; every parameter has the same number of replicas.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvdist.errors import InitMismatch
from kvdist.kvstore import values
from kvdist.naming import NamedKey

GROUP_ENTRIES = ("params", "lr_mult", "wd_mult")
_GROUP_ADVICE = {
    "lr": "give 'lr_mult', a factor on the trainer's learning_rate, or take a rule of torch, such as 'torch.sgd'",
    "weight_decay": "give 'wd_mult', a factor on the trainer's wd, or take a rule of torch, such as 'torch.sgd'",
}


@dataclass(eq=False)
class Parameter:
    """A parameter: its replicas, and whether it is trained or only kept equal to the value of rank 0."""

    name: str
    """Name by the user, or ``parameter 7``."""
    is_named: bool
    """Whether the name is by the user."""
    replicas: list[torch.Tensor]
    trained: bool
    group: Mapping[str, Any]
    key: int = 0
    """Position among all parameters of the trainer; with names, among those of rank 0 once the workers have met."""
    _filled: list[torch.Tensor] = field(default_factory=list)
    """Replicas whose gradients are zeros from `fill_grads`."""

    @property
    def label(self) -> str:
        """Name in messages: ``'layer1.weight'``, or without a name ``parameter 7 of shape (10, 4)``."""
        if self.is_named or self.is_lazy:
            return repr(self.name) if self.is_named else self.name
        return f"{self.name} of shape {tuple(self.replicas[0].shape)}"

    def grads(self) -> list[torch.Tensor] | None:
        """The gradients of all devices with a gradient, converted to dense; None if no device has a gradient."""
        for replica in self.replicas:
            if replica.grad is not None and replica.grad.is_sparse:
                replica.grad = replica.grad.to_dense()
        return [replica.grad for replica in self.replicas if replica.grad is not None] or None

    def fill_grads(self) -> None:
        """Set zeros on devices without a gradient, as memory for a sum."""
        for replica in self.replicas:
            if replica.grad is None:
                replica.grad = replica.detach().new_zeros(replica.shape)
                self._filled.append(replica)

    def drop_filled(self) -> None:
        """Remove the zeros of `fill_grads`, which the next step would take for a gradient of the user."""
        for replica in self._filled:
            replica.grad = None
        self._filled.clear()

    @property
    def carried(self) -> list[torch.Tensor]:
        """Tensors that travel: the replicas, or their bytes if untrained and of a type that no key may have."""
        return self.replicas if self.trained or self.is_lazy else [_carried(replica) for replica in self.replicas]

    @property
    def has_grad(self) -> bool:
        """Whether a device has a gradient."""
        return any(replica.grad is not None for replica in self.replicas)

    @property
    def has_sparse_grad(self) -> bool:
        """Whether a device has a sparse gradient."""
        return any(replica.grad is not None and replica.grad.is_sparse for replica in self.replicas)

    @property
    def is_lazy(self) -> bool:
        """Whether the parameter has no shape yet, as in torch's lazy modules."""
        from torch.nn.parameter import is_lazy

        return any(is_lazy(replica) for replica in self.replicas)


def collect(params: Any, entries: Collection[str] = GROUP_ENTRIES) -> list[Parameter]:
    """Collect the parameters in order, each once, all with the same number of replicas.

    Args:
        params: as for `kvdist.Trainer`.
        entries: names of the entries that a parameter group may have.

    Raises:
        TypeError, ValueError: a parameter cannot be trained, or the parameters cannot be trained together.
    """
    from torch.nn import Module

    if isinstance(params, Module):
        raise TypeError("give the network's parameters, not the network: net.named_parameters()")
    if callable(params) and not isinstance(params, Iterable):
        raise TypeError("params is a method or a function: call it, as in net.named_parameters()")
    if isinstance(params, str) or values.is_tensor(params) or not isinstance(params, Iterable):
        raise TypeError(f"params must be parameters, such as net.parameters(), not {type(params).__name__}")
    seen: set[int] = set()
    collected: list[Parameter] = []
    for parameter in _groups(params, entries):
        if id(parameter.replicas[0]) not in seen:
            collected.append(parameter)
        seen.update(id(replica) for replica in parameter.replicas)
    if not collected:
        raise ValueError("there are no parameters to train: the list is empty (was a generator used up before?)")
    counts = {len(parameter.replicas): parameter.name for parameter in collected}
    if len(counts) > 1:
        said = " and ".join(f"{name} on {count}" for count, name in counts.items())
        raise ValueError(f"every parameter must be on the same number of devices, but there is {said}")
    if not any(parameter.trained for parameter in collected):
        raise ValueError("no parameter requires grad; state_dict() gives copies, use dict(net.named_parameters())")
    return collected


def require_shapes(parameters: Sequence[Parameter]) -> None:
    """Check the shapes of parameters that were lazy when they were collected.

    Raises:
        RuntimeError: a parameter has no shape yet.
        ValueError, TypeError: as in `collect`.
    """
    lazy = [parameter.label for parameter in parameters if parameter.is_lazy]
    if lazy:
        raise RuntimeError(
            f"{', '.join(lazy)} has no shape yet, as its module is lazy: run one forward pass on every worker before"
            " the first step() or broadcast_parameters()"
        )
    for parameter in parameters:
        _check_replicas(parameter.name, parameter.replicas)


def named_keys(parameters: Sequence[Parameter]) -> list[NamedKey]:
    """The keys of all parameters, with their names for messages."""
    return [NamedKey(parameter.key, parameter.label) for parameter in parameters]


def identities(parameters: Sequence[Parameter]) -> NDArray[np.uint8] | None:
    """Digest of each parameter's name, which identifies it on all workers: (parameters, 16); None without any names.

    Equal names are numbered before the digest; a parameter without a name is identified by its position.
    """
    if not any(one.is_named for one in parameters):
        return None
    seen: Counter[str] = Counter()
    digests = []
    for place, one in enumerate(parameters):
        known_by = f"{one.name}\0{seen[one.name]}" if one.is_named else f"\0{place}"
        seen[one.name] += 1
        digests.append(hashlib.blake2b(known_by.encode("utf-8", "surrogatepass"), digest_size=16).digest())
    return np.frombuffer(b"".join(digests), np.uint8).reshape(-1, 16)


def reordered(own: NDArray[np.uint8], others: NDArray[np.uint8]) -> list[int]:
    """The positions of this worker's `identities`, in the order of those of worker 0, which must be the same.

    Raises:
        InitMismatch: the identities differ.
    """
    places = {one.tobytes(): place for place, one in enumerate(own)}
    if places.keys() != {one.tobytes() for one in others}:
        raise InitMismatch("the parameters of this worker have other names than those of worker 0: start both alike")
    return [places[one.tobytes()] for one in others]


def ranges(numbers: Sequence[int]) -> str:
    """Abbreviate ascending numbers, as in ``0-3, 7``."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)


def _groups(params: Iterable[Any], entries: Collection[str]) -> Iterator[Parameter]:
    if isinstance(params, Mapping):
        yield from _named([(str(name), params[name]) for name in sorted(params)], {}, 0)
        return
    items = list(params)
    if not any(isinstance(item, Mapping) for item in items):
        yield from _named(items, {}, 0, has_order=not isinstance(params, Set))
        return
    first = 0
    for item in items:
        if not isinstance(item, Mapping):
            raise TypeError(f"params mixes groups and parameters: {type(item).__name__} stands beside a group (a dict)")
        _check_group(item, entries)
        given = item["params"]
        members = [given] if values.is_tensor(given) else list(given)
        yield from _named(members, item, first, has_order=not isinstance(given, Set))
        first += len(members)


def _check_group(group: Mapping[str, Any], entries: Collection[str]) -> None:
    for entry in group:
        if entry not in entries:
            usual = f"a group has {', '.join(entries)}"
            advice = _GROUP_ADVICE.get(entry, usual) if entries is GROUP_ENTRIES else usual
            raise ValueError(f"a parameter group cannot have {entry!r}: {advice}")
    if "params" not in group:
        raise ValueError("a parameter group needs 'params', the list of its parameters")


def _named(
    items: Iterable[Any], group: Mapping[str, Any], first: int, *, has_order: bool = True
) -> Iterator[Parameter]:
    for position, item in enumerate(items, first):
        name, is_named = f"parameter {position}", False
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            (name, item), is_named = item, True
        elif not has_order:
            raise TypeError(
                "parameters without names are in a set, whose order differs from worker to worker and from run to run:"
                " give a list, or pairs of name and parameter, such as net.named_parameters()"
            )
        replicas = list(item) if isinstance(item, (list, tuple)) else [item]
        _check_replicas(name, replicas)
        yield Parameter(name, is_named, replicas, replicas[0].requires_grad, group)


def _check_replicas(name: str, replicas: list[Any]) -> None:
    from torch.nn.parameter import is_lazy

    if not replicas:
        raise ValueError(f"{name} has no replica; give a tensor, or a list with one for each device")
    for replica in replicas:
        if not values.is_tensor(replica):
            raise TypeError(f"{name} must be a torch parameter or a list of its replicas, not {type(replica).__name__}")
        if not replica.is_leaf:
            raise ValueError(f"{name} is the result of a computation, not a parameter, so training it has no effect")
        if is_lazy(replica):
            continue  # `require_shapes` checks it
        if (replica.shape, replica.dtype) != (replicas[0].shape, replicas[0].dtype):
            raise ValueError(
                f"the replicas of {name} differ: {tuple(replicas[0].shape)} {replicas[0].dtype} on the first device,"
                f" {tuple(replica.shape)} {replica.dtype} on another"
            )
        try:
            values.require_plain(replica)
            values.describe(replica if replica.requires_grad else _carried(replica))
        except TypeError as error:
            advice = (
                "train a real parameter, and compute with torch.view_as_complex(parameter); or take"
                " kvdist.horovod.DistributedOptimizer"
                if replica.is_complex() and replica.requires_grad
                else "convert it before the Trainer is made"
            )
            raise TypeError(f"{name} cannot be a parameter of a Trainer: {error}. Remedy: {advice}") from None


def _carried(replica: torch.Tensor) -> torch.Tensor:
    """The tensor, or a view of its bytes if it is of a type that no key may have.

    Raises:
        TypeError: the tensor is of such a type, and not contiguous.
    """
    if values.is_key_type(replica):
        return replica
    if not replica.is_contiguous():
        raise TypeError(f"of dtype {replica.dtype} it must be contiguous in memory; use .contiguous()")
    return replica.detach().view(-1).view(torch.uint8)


Grads: TypeAlias = Sequence["list[Tensor] | None"]
"""For each trained parameter its gradients, only of those devices that have a gradient; None if no device has one."""


def divide(grads: Grads, divisor: float) -> None:
    """Divide gradients in place."""
    present = [grad for given in grads for grad in given or ()]
    if present and divisor != 1:
        torch._foreach_div_(present, divisor)


def scale(parameters: Sequence[Parameter], factor: float) -> None:
    """Multiply the gradients of parameters, on every device, in place."""
    present = [grad for parameter in parameters for grad in parameter.grads() or ()]
    if present and factor != 1:
        torch._foreach_mul_(present, factor)
