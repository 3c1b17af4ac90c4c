"""Python objects for all ranks: numbers, text, lists, dictionaries, arrays and tensors; never code. No pickle.

An object that cannot be sent is found by the rank that has it. It tells the others in place of the object, so all of
them raise, and none waits for bytes that never come.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed import Work

from kvdist.collective.calls import ProcessSet, global_process_set, group_of, root_in, submit
from kvdist.collective.channel import Channel
from kvdist.collective.group import Operation
from kvdist.collective.operations import AllGather, plain
from kvdist.collective.signature import Signature
from kvdist.errors import CollectiveError, ProtocolError
from kvdist.protocol.objects import Leaf, decode, encode

_OBJECT, _SENTENCE = 0, 1
"""The first byte: what follows is an object, or says why there is none."""
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
    """The object of one rank.

    None, bool, int, float, str, bytes, list, tuple, dict, NumPy arrays and torch tensors can be sent, in one another as
    deep as 64 levels. Tensors arrive on the CPU and without history.

    Args:
        obj: the object; what it is on other ranks than the root is not looked at.
        root_rank: the rank whose object it is, by its number among all.
        name: for messages.
        process_set: the ranks that take part.

    Returns:
        On the root `obj` itself, on the others a copy.

    Raises:
        CollectiveError: it failed, on a rank that is not the root also because the object cannot be sent.
        TypeError: on the root, something in the object is of another type; the message says what, and where.
    """
    group = group_of(process_set)
    is_root = group.ranks[group.rank] == root_rank
    given, failure = _encoded(obj) if is_root else (None, None)
    received = submit(
        process_set, lambda _: _BroadcastBytes(name or "", given, root_rank, root_in(group, root_rank))
    ).result()
    if failure is not None:
        raise failure
    return obj if is_root else _decoded(received, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The objects of all ranks, in rank order; what can be sent is said at `broadcast_object`.

    Args:
        obj: this rank's object.
        name: for messages.
        process_set: the ranks that take part.

    Returns:
        Copies, also of this rank's own.

    Raises:
        CollectiveError: it failed, also because another rank's object cannot be sent.
        TypeError: something in this rank's object is of another type; the message says what, and where.
    """
    group = group_of(process_set)
    given, failure = _encoded(obj)
    sizes, octets = submit(
        process_set,
        lambda _: AllGather(name or "", [torch.tensor([given.numel()]), given], "allgather_object"),
    ).result()
    if failure is not None:
        raise failure
    return [_decoded(part, rank) for rank, part in zip(group.ranks, octets.split(sizes.tolist()), strict=True)]


class _BroadcastBytes(Operation):
    """All ranks get one rank's bytes, of which the others do not know the number."""

    def __init__(self, name: str, given: torch.Tensor | None, root: int, root_in_group: int) -> None:
        self._octets = given
        self._root = root_in_group
        self.signature = Signature("broadcast_object", name, (), f"from rank {root}")

    def begin(self, channel: Channel) -> list[Work]:
        size = torch.tensor([0 if self._octets is None else self._octets.numel()])
        channel.broadcast(size, self._root).wait()
        if self._octets is None:
            self._octets = torch.empty(int(size), dtype=torch.uint8)
        return [channel.broadcast(self._octets, self._root)]

    def finish(self) -> torch.Tensor | None:
        return self._octets


def _encoded(obj: Any) -> tuple[torch.Tensor, Exception | None]:
    """What to send for an object, and what is wrong with it."""
    try:
        octets, failure = encode(obj, _translated), None
    except (TypeError, ValueError) as error:
        octets, failure = np.frombuffer(str(error).encode("utf-8", "replace"), np.uint8), error
    first = np.array([_OBJECT if failure is None else _SENTENCE], np.uint8)
    return torch.from_numpy(np.concatenate([first, octets])), failure


def _decoded(received: torch.Tensor, rank: int) -> Any:
    octets = received.numpy()
    if octets[0] == _SENTENCE:
        raise CollectiveError(f"rank {rank} has an object that cannot be sent: {octets[1:].tobytes().decode()}")
    try:
        return decode(octets[1:], _tensor_of)
    except ProtocolError as error:
        raise CollectiveError(f"what rank {rank} sent is no object: {error}") from error


def _translated(value: object) -> object | None:
    if isinstance(value, torch.Size):
        return tuple(value)
    if not isinstance(value, torch.Tensor):
        return None
    if value.layout != torch.strided or str(value.dtype) not in _DTYPES or value.is_meta:
        what = f"layout {value.layout} and dtype {value.dtype} on {value.device}"
        raise TypeError(f"a tensor of {what} cannot be sent as an object")
    # Bytes, one more dimension of them: NumPy does not know all dtypes.
    octets = plain(value.detach().cpu()).unsqueeze(-1).view(torch.uint8)
    return Leaf(str(value.dtype), octets.numpy())


def _tensor_of(kind: str, octets: NDArray[Any]) -> torch.Tensor:
    dtype = _DTYPES.get(kind)
    if dtype is None or octets.dtype != np.uint8 or octets.shape[-1:] != (dtype.itemsize,):
        raise ProtocolError(f"an array of the unknown kind {kind[:40]!r}")
    # Flat: torch gives an empty array of more dimensions strides that a view of another dtype refuses.
    return torch.from_numpy(octets.reshape(-1)).view(dtype).reshape(octets.shape[:-1])
