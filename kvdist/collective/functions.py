"""Functions around the operations: equal starting values on all ranks, averaged metrics, Python objects.

Objects are numbers, text, lists, dictionaries, arrays and tensors; never code, and no pickle. A rank whose object
cannot be sent sends the reason in its place, so all ranks raise and none waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Work

from kvdist.collective.api import (
    ProcessSet,
    allreduce,
    broadcast_async_,
    global_process_set,
    group_of,
    grouped_broadcast_async_,
    refuse,
    root_in,
    submit,
    synchronize,
)
from kvdist.collective.channel import Channel
from kvdist.collective.operations import AllGather, Operation, contiguous_values
from kvdist.collective.optimizer import require_torch_optimizer
from kvdist.collective.signature import Signature, kind_of, span
from kvdist.errors import ProtocolError
from kvdist.protocol.objects import Leaf, decode_from, encode_or_reason
from kvdist.reduce_op import Average

Parameters = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def broadcast_parameters(params: Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Replace parameters by those of the root rank.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``, in any order, matched by name between ranks; or
            a list of tensors, matched by position. Entries that are None are skipped.
        root_rank: global rank whose parameters are sent.
        process_set: ranks that take part.

    Raises:
        CollectiveError: the operation failed; `CollectiveMismatch` if ranks have different parameters.
        TypeError: a value is not a tensor.
    """
    named = [(name, tensor) for name, tensor in _named(params) if tensor is not None]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            error = TypeError(
                f"{name or 'a parameter'} is a {type(tensor).__name__}, but broadcast_parameters sends tensors:"
                " send it with broadcast_object, and leave it out here"
            )
            refuse(process_set, error, kind_of("broadcast", len(named)), _label_of(named))
    for device in dict.fromkeys(tensor.device for _, tensor in named):
        here = [(name, tensor) for name, tensor in named if tensor.device == device]
        tensors = [tensor for _, tensor in here]
        synchronize(grouped_broadcast_async_(tensors, root_rank, _label_of(here), process_set))


def _label_of(named: list[tuple[str, Any]]) -> str:
    return span([str(name) for name, _ in named]) if named[-1][0] else "parameters"


def broadcast_each(
    tensors: Iterable[tuple[str, torch.Tensor]], root_rank: int, process_set: ProcessSet
) -> list[torch.Tensor]:
    """Replace named tensors by those of one rank, each by an operation of its own, and return them."""
    handles = [broadcast_async_(tensor, root_rank, name, process_set) for name, tensor in tensors]
    return [handle.result() for handle in handles]


def _named(params: Parameters) -> list[tuple[str, Any]]:
    items = params.items() if isinstance(params, Mapping) else params
    named = [pair if isinstance(pair, tuple) else ("", pair) for pair in items]
    return sorted(named, key=lambda pair: str(pair[0]))  # those without names stay in their order


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int = 0,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Replace the state and the hyper-parameters of an optimizer by those of the root rank.

    The ``state_dict()`` of the root is sent and loaded. Unlike Horovod's function it makes no step to create state, so
    no parameter changes and no counter advances; an optimizer without state gets the hyper-parameters too. As in
    Horovod, gradients are zeros afterwards if the optimizer had no state.

    Args:
        optimizer: optimizer of the same class and parameters on all ranks. Within a group, parameters are matched by
            name if the optimizer knows names (``SGD(model.named_parameters())``), otherwise by position.
        root_rank: global rank whose state is sent.
        model: model whose ``Embedding(sparse=True)`` layers determine which gradients of SGD are sparse zeros.
        process_set: ranks that take part.

    Raises:
        CollectiveError: the operation failed.
        TypeError: `optimizer` is not a torch optimizer; on the root also if the state contains a value that cannot be
            sent, which the message names.
        ValueError: the optimizer of the root has other parameter groups.
    """
    require_torch_optimizer(optimizer, "broadcast_optimizer_state")
    group = group_of(process_set)
    is_root = group.ranks[group.rank] == root_rank
    is_new = not optimizer.state
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank, "optimizer state", process_set)
    if not is_root:
        optimizer.load_state_dict(_in_order_of(optimizer, state))
    if is_new:
        _zero_gradients(optimizer, model)


def _in_order_of(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of another rank's optimizer, in place, with the parameters of each group in the order of this one's."""
    for number, (own, other) in enumerate(zip(optimizer.param_groups, state["param_groups"], strict=False)):
        names, others = own.get("param_names"), other.get("param_names")  # from torch 2.6 on
        if names is None or others is None or names == others:
            continue
        if sorted(names) != sorted(others):
            here, there = (sorted(set(one) - set(rest))[:3] for one, rest in ((names, others), (others, names)))
            raise ValueError(
                f"group {number} of the optimizer has different parameters on this rank and on the root: only on this"
                f" rank {here}, only on the root {there}; give the optimizers of all ranks the same parameters in the"
                " same groups"
            )
        place_of = dict(zip(others, other["params"], strict=True))
        other.update(params=[place_of[name] for name in names], param_names=list(names))
    return state


def _zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    tables = [one for one in (() if model is None else model.modules()) if isinstance(one, torch.nn.Embedding)]
    sparse = {id(one.weight) for one in tables if one.sparse and isinstance(optimizer, torch.optim.SGD)}
    for parameter in [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]:
        zeros = torch.zeros_like(parameter, requires_grad=False)
        is_sparse = id(parameter) in sparse or isinstance(optimizer, torch.optim.SparseAdam)
        parameter.grad = zeros.to_sparse(1) if is_sparse else zeros


def metric_average(
    value: float | torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> float:
    """Return the mean over the ranks of a number, such as a loss or an accuracy.

    Args:
        value: number of this rank, or a tensor with a single element.
        name: name of the operation in messages.
        process_set: ranks that take part.

    Raises:
        CollectiveError: the operation failed.
    """
    mine = torch.tensor(float(value), dtype=torch.float64, device="cpu")
    return float(allreduce(mine, name=name, op=Average, process_set=process_set))


_DTYPES = {
    f"torch.{name}": getattr(torch, name)
    for name in (
        *("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "bfloat16", "float32", "float64"),
        *("complex64", "complex128", "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2"),
    )
    if name in vars(torch)
}


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of the root rank.

    An object is made of None, bool, int, float, str, bytes, list, tuple, set, dict, NumPy arrays and torch tensors,
    nested up to 64 levels. Tensors arrive detached, on the CPU.

    Args:
        obj: object to send; ignored on ranks other than the root.
        root_rank: global rank whose object is sent.
        name: name of the operation in messages.
        process_set: ranks that take part.

    Returns:
        On the root `obj` itself, on the other ranks a copy.

    Raises:
        CollectiveError: the operation failed; on ranks other than the root also if the object cannot be sent.
        TypeError: on the root, the object contains a value of another type; the message names it.
        ValueError: on the root, a string cannot be encoded as UTF-8, such as a file name with a lone surrogate.
    """
    group = group_of(process_set)
    is_root = group.ranks[group.rank] == root_rank
    given, failure = _encoded(obj) if is_root else (None, None)
    received = submit(
        process_set,
        "broadcast_object",
        name,
        lambda _: _BroadcastBytes(name or "", given, root_rank, root_in(group, root_rank)),
    ).result()
    if failure is not None:
        raise failure
    return obj if is_root else _decoded(received, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all ranks, in rank order; `broadcast_object` lists the types that can be sent.

    Args:
        obj: object of this rank.
        name: name of the operation in messages.
        process_set: ranks that take part.

    Returns:
        A list of copies, including a copy of `obj`.

    Raises:
        CollectiveError: the operation failed, or the object of another rank cannot be sent.
        TypeError: the object of this rank contains a value of another type; the message names it.
        ValueError: a string cannot be encoded as UTF-8, such as a file name with a lone surrogate.
    """
    group = group_of(process_set)
    given, failure = _encoded(obj)
    size = torch.tensor([given.numel()], device="cpu")
    sizes, raw_bytes = submit(
        process_set,
        kind_of("allgather_object", 2),
        name,
        lambda _: AllGather(name or "", [size, given], "allgather_object"),
    ).result()
    if failure is not None:
        raise failure
    return [_decoded(part, rank) for rank, part in zip(group.ranks, raw_bytes.split(sizes.tolist()), strict=True)]


class _BroadcastBytes(Operation):
    """All ranks get the root's bytes, whose number the others do not know."""

    def __init__(self, name: str, given: torch.Tensor | None, root: int, root_in_group: int) -> None:
        self._raw_bytes = given
        self._root = root_in_group
        self.signature = Signature("broadcast_object", name, (), f"from rank {root}")

    def begin(self, channel: Channel) -> Sequence[Work]:
        size = torch.tensor([0 if self._raw_bytes is None else self._raw_bytes.numel()], device="cpu")
        channel.broadcast(size, self._root).wait()
        if self._raw_bytes is None:
            self._raw_bytes = torch.empty(int(size), dtype=torch.uint8, device="cpu")
        return [channel.broadcast(self._raw_bytes, self._root)]

    def finish(self) -> torch.Tensor | None:
        return self._raw_bytes


def _encoded(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    """The bytes to send for an object, and the error if it cannot be sent."""
    octets, failure = encode_or_reason(obj, _translated)
    return torch.from_numpy(octets), failure


def _decoded(received: torch.Tensor, rank: int) -> Any:
    return decode_from(rank, received.numpy(), _tensor_of)


def _translated(value: object) -> object | None:
    if isinstance(value, torch.Size):
        return tuple(value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or str(value.dtype) not in _DTYPES or value.is_meta:
        what = f"layout {value.layout} and dtype {value.dtype} on {value.device}"
        raise TypeError(f"it is a tensor of {what}")
    # As bytes with one more dimension: NumPy does not have all dtypes.
    raw_bytes = contiguous_values(value.detach().cpu()).unsqueeze(-1).view(torch.uint8)
    return Leaf(str(value.dtype), raw_bytes.numpy())


def _tensor_of(kind: str, raw_bytes: NDArray[Any]) -> torch.Tensor:
    dtype = _DTYPES.get(kind)
    if dtype is None or raw_bytes.dtype != np.uint8 or raw_bytes.shape[-1:] != (dtype.itemsize,):
        raise ProtocolError(f"an array of the unknown kind {kind[:40]!r}")
    # Flat: torch gives empty arrays of several dimensions strides that a view of another dtype refuses.
    return torch.from_numpy(raw_bytes.reshape(-1)).view(dtype).reshape(raw_bytes.shape[:-1])
