"""The collective operations: the facts that ranks must agree on, and how the channel's verbs implement them.

Each class states its passes over the data. Inputs are written only by in-place operations. Data that is moved and not
reduced travels as bytes, so all dtypes can.

Small tensors of a dtype are packed into fusion buffers, so a thousand of them cost a few operations; large tensors are
sent without a copy. The partition follows from dtypes and sizes alone, never from memory layout: all ranks must cut
alike.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors
from torch.distributed import Work

from kvdist.collective.channel import Channel
from kvdist.collective.reduction import check_reducible, scale_, settle_
from kvdist.collective.signature import REFUSED, Signature, kind_of
from kvdist.errors import CollectiveError
from kvdist.protocol.collective import Participate
from kvdist.reduce_op import Average, ReduceOp, Sum


class Operation(abc.ABC):
    """An operation that all ranks of a group do together."""

    signature: Signature
    cuda_device: int | None = None
    """The CUDA device of its tensors, if they are on a known device."""

    def _sign(
        self, kind: str, name: str, tensors: Sequence[torch.Tensor], detail: str = "", *, any_rows: bool = False
    ) -> None:
        """Set the signature and the device of an operation on these tensors."""
        described = tuple(describe(tensor, any_rows=any_rows) for tensor in tensors)
        device = tensors[0].device if tensors else torch.device("cpu")
        self.cuda_device = device.index if device.type == "cuda" else None
        self.signature = Signature(kind_of(kind, len(tensors)), name, described, detail, device.type)

    @abc.abstractmethod
    def begin(self, channel: Channel) -> Sequence[Work]:
        """Begin it, on the group's thread. May wait for data that it needs first, such as sizes."""

    @abc.abstractmethod
    def finish(self) -> Any:
        """Return the result, on the group's thread, after all works that `begin` returned are done."""


ALONE_BYTES = 512 << 10
"""A tensor of this size or more travels alone: copying it would cost more than another operation."""
FLAT_BYTES = 4 << 20
"""The capacity of a fusion buffer, small enough that a buffer is packed while the previous buffer travels."""

WIDENED = {torch.int16: torch.int32}
"""Dtypes that gloo and NCCL cannot reduce → the dtypes used in their place."""


def partition(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """Group the positions of tensors that travel together; tensors without elements are left out."""
    parts: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= ALONE_BYTES:
            parts.append([position])
        elif nbytes:
            part, filled = filling.get(tensor.dtype, ([], FLAT_BYTES))
            if filled + nbytes > FLAT_BYTES:
                part, filled = [], 0
                parts.append(part)
            part.append(position)
            filling[tensor.dtype] = (part, filled + nbytes)
    return parts


def overlapping(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """The positions of tensors that share memory with another tensor, such as a repeated tensor."""
    spans = sorted((tensor.data_ptr(), _end(tensor), i) for i, tensor in enumerate(tensors) if tensor.numel())
    found: set[int] = set()
    furthest, owner = 0, -1
    for begin, end, i in spans:
        if begin < furthest:
            found |= {i, owner}
        if end > furthest:
            furthest, owner = end, i
    return frozenset(found)


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last byte of a tensor."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


class FusionBuffer:
    """Contiguous memory in which tensors travel together.

    Args:
        outputs: the tensors for the results, all of the same dtype and device.
        dtype: dtype of the buffer; None for that of the outputs.
        is_apart: whether outputs must not be written before everything is done.

    Attributes:
        values: the buffer; the output itself if it is the only output and usable.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None, *, is_apart: bool = False
    ) -> None:
        first = outputs[0]
        self._outputs = list(outputs)
        self._views: list[torch.Tensor] | None = None
        if len(outputs) == 1 and first.is_contiguous() and dtype in (None, first.dtype) and not is_apart:
            self.values = first
            return
        self.values = first.new_empty(sum(output.numel() for output in outputs), dtype=dtype)
        # One call for all views: a thousand calls would take longer than the transfer.
        self._views = list(_unflatten_dense_tensors(self.values, self._outputs))  # type: ignore[no-untyped-call]

    @property
    def raw_bytes(self) -> torch.Tensor:
        """The buffer as bytes, for data that is moved and not reduced: gloo does not know all dtypes."""
        return bytes_of(self.values)

    def fill(self, tensors: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        """Copy tensors into the buffer, times a factor; one pass, and another over cached data for a factor."""
        if self._views is not None:
            torch._foreach_copy_(self._views, list(tensors))
        elif tensors[0] is not self.values:
            self.values.copy_(tensors[0])
        scale_(self.values, factor)

    def unpack(self) -> None:
        """Copy the buffer to the outputs; one pass, or none where the buffer is the output."""
        if self._views is not None:
            torch._foreach_copy_(self._outputs, self._views)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    # Not view(-1), which keeps a stride of 0 where there is one element.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def describe(tensor: torch.Tensor, *, any_rows: bool = False) -> str:
    """The dtype and shape of a tensor, as in ``float32[17, 3]``; rows as ``*`` if ranks may have different numbers."""
    return _described(tensor.dtype, tuple(tensor.shape), any_rows)


@lru_cache(maxsize=4096)
def _described(dtype: torch.dtype, shape: tuple[int, ...], any_rows: bool) -> str:
    sizes = [str(size) for size in shape]
    if any_rows:
        sizes[:1] = ["*"]
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def checked(kind: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors of an operation after checking them.

    Raises:
        TypeError: a value is not a dense tensor; the message says what to do.
        ValueError: they are on different devices.
    """
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            raise TypeError(
                f"{kind} takes torch tensors, not NumPy arrays: torch.from_numpy(array) is a tensor in the same memory"
            )
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{kind} takes torch tensors, not {type(tensor).__name__}; torch.tensor(...) makes one")
        if tensor.layout != torch.strided:
            raise TypeError(f"{kind} takes dense tensors, not {tensor.layout}; use sparse_allreduce_async, or to_dense")
        if tensor.device != tensors[0].device:
            raise ValueError(f"{kind} of tensors on {tensors[0].device} and {tensor.device}: move all to one device")
    return list(tensors)


def check_writable(kind: str, outputs: Sequence[torch.Tensor]) -> None:
    """Refuse tensors to which results cannot be written.

    Raises:
        ValueError: elements of a tensor share memory, or it is a lazy conjugate or negative.
    """
    for output in outputs:
        if output.is_conj() or output.is_neg():
            raise ValueError(f"{kind} cannot write to the conjugate or the negative of other memory; clone() it")
        if not output.is_contiguous() and any(
            step == 0 and size > 1 for step, size in zip(output.stride(), output.shape, strict=True)
        ):
            raise ValueError(f"{kind} cannot write to an expanded tensor, whose elements share memory; clone() it")


def writing(outputs: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """Return a context without autograd for writing to tensors; inference mode for tensors created in it."""
    return torch.inference_mode() if any(output.is_inference() for output in outputs) else torch.no_grad()


def contiguous_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values for sending: contiguous, detached, with lazy conjugation and negation applied."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _check_rows(kind: str, tensors: Sequence[torch.Tensor], does: str) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} {does} rows, and a scalar has none; reshape(1) gives it one")


def _scales(op: ReduceOp, prescale: float, postscale: float, note: str = "") -> str:
    scales = "" if prescale == postscale == 1.0 else f", prescale {prescale!r}, postscale {postscale!r}"
    return f"{op.name}{scales}" + (f", {note}" if note else "")


class AllReduce(Operation):
    """All ranks get the reduction of their tensors, as a unit.

    Passes: small tensors are packed and unpacked, a pass each; a large tensor that is not reduced in place is copied;
    each factor other than 1, and the division of an average, is a pass.

    Args:
        name: the user's name for it; '' for none.
        tensors: dense.
        outputs: tensors for the results; `tensors` themselves if in place.
        op, prescale, postscale: postscale * op(prescale * tensor). For Adasum see `AdasumOperation`.
        note: further text that ranks must agree on, up to `signature.ASIDE`.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
        note: str = "",
    ) -> None:
        self._tensors = checked("allreduce", tensors)
        for dtype in {tensor.dtype for tensor in tensors}:
            check_reducible("allreduce", dtype, op, prescale != 1.0 or postscale != 1.0)
        self._outputs = list(outputs)
        check_writable("allreduce", self._outputs)
        self._op = op
        self._prescale = prescale
        self._postscale = postscale
        self._buffers: list[FusionBuffer] = []
        self._size = 1
        self._sign("allreduce", name, tensors, _scales(op, prescale, postscale, note))

    def begin(self, channel: Channel) -> Sequence[Work]:
        self._size = channel.size
        with writing(self._outputs):
            return channel.all_reduce(self._filled(), self._op)

    def finish(self) -> list[torch.Tensor]:
        with writing(self._outputs):
            for buffer in self._buffers:
                settle_(buffer.values, self._op, self._size, self._postscale)
                buffer.unpack()
        return self._outputs

    def _filled(self) -> Iterator[torch.Tensor]:
        """Yield the tensors to send, in order: large tensors, and buffers of small ones."""
        parts = partition(self._tensors)
        shared = overlapping(self._outputs) if len(parts) > 1 else frozenset()
        for part in parts:
            dtype = WIDENED.get(self._outputs[part[0]].dtype)
            buffer = FusionBuffer([self._outputs[i] for i in part], dtype, is_apart=part[0] in shared)
            buffer.fill([self._tensors[i] for i in part], self._prescale)
            self._buffers.append(buffer)
            yield buffer.values


class AllGather(Operation):
    """All ranks get all ranks' rows, in rank order; ranks may have different numbers of rows.

    Passes: two where the numbers differ (rows are padded and cut), otherwise none.

    Args:
        kind: its name in messages, where it is part of another operation.
        detail: further text that ranks must agree on.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], kind: str = "allgather", detail: str = "") -> None:
        checked(kind, tensors)
        _check_rows(kind, tensors, "joins")
        self._tensors = [contiguous_values(tensor) for tensor in tensors]
        self._gathered: list[tuple[torch.Tensor, list[int]]] = []
        self._sign(kind, name, tensors, detail, any_rows=True)

    def begin(self, channel: Channel) -> Sequence[Work]:
        mine = torch.tensor([tensor.shape[0] for tensor in self._tensors], dtype=torch.int64, device="cpu")
        rows = torch.empty(channel.size * len(mine), dtype=torch.int64, device="cpu")
        if len(mine):
            channel.all_gather(rows, mine).wait()
        counts = rows.view(channel.size, len(mine)).T.tolist()
        works = []
        for tensor, of_ranks in zip(self._tensors, counts, strict=True):
            most = max(of_ranks)
            padded = tensor
            if tensor.shape[0] < most:
                padded = tensor.new_zeros((most, *tensor.shape[1:]))
                padded[: tensor.shape[0]] = tensor
            output = tensor.new_empty((channel.size * most, *tensor.shape[1:]))
            self._gathered.append((output, of_ranks))
            if output.numel():
                works.append(channel.all_gather(bytes_of(output), bytes_of(padded)))
        return works

    def finish(self) -> list[torch.Tensor]:
        return [_without_padding(output, rows) for output, rows in self._gathered]


def _without_padding(output: torch.Tensor, rows: list[int]) -> torch.Tensor:
    most = max(rows)
    if min(rows) == most:
        return output
    return torch.cat([output[i * most : i * most + count] for i, count in enumerate(rows)])


class Broadcast(Operation):
    """All ranks get the tensors of the root.

    Passes: small tensors are packed on the root and unpacked on the others; a large tensor is copied on the root if not
    in place.

    Args:
        root: its global rank, for messages.
        root_in_group: its rank in the group.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        outputs: Sequence[torch.Tensor],
        root: int,
        root_in_group: int,
    ) -> None:
        self._tensors = checked("broadcast", tensors)
        self._outputs = list(outputs)
        check_writable("broadcast", self._outputs)
        self._buffers: list[FusionBuffer] = []
        self._root = root_in_group
        self._sign("broadcast", name, tensors, f"from rank {root}")

    def begin(self, channel: Channel) -> Sequence[Work]:
        works = []
        with writing(self._outputs):
            for part in partition(self._tensors):
                buffer = FusionBuffer([self._outputs[i] for i in part])
                if channel.rank == self._root:
                    buffer.fill([self._tensors[i] for i in part])
                self._buffers.append(buffer)
                works.append(channel.broadcast(buffer.raw_bytes, self._root))
        return works

    def finish(self) -> list[torch.Tensor]:
        with writing(self._outputs):
            for buffer in self._buffers:
                buffer.unpack()
        return self._outputs


class AllToAll(Operation):
    """Every rank sends every rank some of its rows. Passes: none.

    Args:
        splits: int32, the number of rows for each rank of the group; None for equal parts.
        size: of the group.
    """

    def __init__(self, name: str, tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> None:
        checked("alltoall", [tensor])
        _check_rows("alltoall", [tensor], "cuts")
        self._tensor = contiguous_values(tensor)
        self._sent = splits_of(tensor, splits, size)
        self._received: list[int] = []
        self._output = tensor
        detail = "equal parts" if splits is None else "given parts"
        self._sign("alltoall", name, [tensor], detail, any_rows=True)

    def begin(self, channel: Channel) -> Sequence[Work]:
        ones = [1] * channel.size
        counts = torch.empty(channel.size, dtype=torch.int64, device="cpu")
        own_counts = torch.tensor(self._sent, dtype=torch.int64, device="cpu")
        channel.all_to_all(counts, own_counts, ones, ones).wait()
        self._received = counts.tolist()
        self._output = self._tensor.new_empty((sum(self._received), *self._tensor.shape[1:]))
        row_bytes = self._tensor[:1].element_size() * self._tensor.shape[1:].numel()
        if not row_bytes:
            return []
        sent = [rows * row_bytes for rows in self._sent]
        received = [rows * row_bytes for rows in self._received]
        return [channel.all_to_all(bytes_of(self._output), bytes_of(self._tensor)[: sum(sent)], received, sent)]

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._output, torch.tensor(self._received, dtype=torch.int32, device="cpu")


def splits_of(tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> list[int]:
    """The number of rows for each rank.

    Raises:
        ValueError: `splits` do not fit the tensor or the group.
    """
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(f"alltoall cannot cut {rows} rows into equal parts for {size} ranks: pass splits")
        return [rows // size] * size
    if not isinstance(splits, torch.Tensor) or splits.dtype != torch.int32:
        raise ValueError(f"splits must be an int32 tensor, not {getattr(splits, 'dtype', type(splits).__name__)}")
    given: list[int] = splits.tolist()
    if splits.dim() != 1 or len(given) != size or min(given) < 0:
        raise ValueError(f"splits are {given}; alltoall needs {size} numbers of rows, one for each rank")
    if sum(given) > rows:
        raise ValueError(f"splits are {given}, together {sum(given)} rows, and the tensor has {rows}")
    return given


class ReduceScatter(Operation):
    """Every rank gets its part of the rows of the reduction.

    The first ranks get a row more where the rows do not divide evenly. Passes: one for each factor other than 1.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        op: ReduceOp,
        prescale: float = 1.0,
        postscale: float = 1.0,
    ) -> None:
        checked("reducescatter", tensors)
        if op not in (Average, Sum):
            raise NotImplementedError(f"reducescatter is for Average and Sum, not {op.name}")
        for dtype in {tensor.dtype for tensor in tensors}:
            check_reducible("reducescatter", dtype, op, prescale != 1.0 or postscale != 1.0)
        _check_rows("reducescatter", tensors, "cuts")
        self._tensors = [contiguous_values(tensor) for tensor in tensors]
        self._op = op
        self._prescale = prescale
        self._postscale = postscale
        self._outputs: list[torch.Tensor] = []
        self._size = 1
        self._sign("reducescatter", name, tensors, _scales(op, prescale, postscale))

    def begin(self, channel: Channel) -> Sequence[Work]:
        self._size = channel.size
        works = []
        for tensor in self._tensors:
            wide = tensor.to(WIDENED.get(tensor.dtype, tensor.dtype))
            if self._prescale != 1.0:
                wide = wide.clone() if wide is tensor else wide
                scale_(wide, self._prescale)
            parts = list(torch.split(wide, rows_of_ranks(tensor.shape[0], channel.size)))
            output = torch.empty_like(parts[channel.rank])
            self._outputs.append(output)
            if tensor.numel():
                works.append(channel.reduce_scatter(output, parts, self._op))
        return works

    def finish(self) -> list[torch.Tensor]:
        for output in self._outputs:
            settle_(output, self._op, self._size, self._postscale)
        return [output.to(tensor.dtype) for output, tensor in zip(self._outputs, self._tensors, strict=True)]


def rows_of_ranks(rows: int, size: int) -> list[int]:
    """The number of rows for each rank: as equal as possible, the first ranks have more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


class BarrierOperation(Operation):
    """No rank continues before all have called it."""

    def __init__(self) -> None:
        self.signature = Signature("barrier", "", ())

    def begin(self, channel: Channel) -> Sequence[Work]:
        return [channel.barrier()]

    def finish(self) -> Any:
        return None


_TENSOR = re.compile(r"([a-z0-9]+)\[((?:[0-9]+(?:, [0-9]+)*)?)\]")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def zeros_operation(play: Participate) -> AllReduce:
    """Create the part of a rank that has joined in an operation of the others.

    Raises:
        CollectiveError: the description of a tensor is invalid.
    """
    tensors = [_zeros(text, play.device) for text in play.tensors]
    return AllReduce(play.name, tensors, tensors, ReduceOp[play.detail.partition(",")[0]])


def _zeros(text: str, device: str) -> torch.Tensor:
    match = _TENSOR.fullmatch(text)
    if match is None or match[1] not in _DTYPES:
        raise CollectiveError(f"this rank has joined, and cannot make zeros for {text!r}")
    shape = [int(size) for size in match[2].split(", ")] if match[2] else []
    return torch.zeros(shape, dtype=_DTYPES[match[1]], device=device)


class MarkerOperation(Operation):
    """Takes a place in the order of operations and transfers no data.

    Used for `join`, for an operation that a rank cannot call, and for changes of the process sets.

    Args:
        signature: the operation as ranks must agree on it.
        action: called when they have agreed; its result is the operation's.
    """

    def __init__(self, signature: Signature, action: Callable[[], Any] = lambda: None) -> None:
        self.signature = signature
        self._action = action
        self._result: Any = None

    def begin(self, channel: Channel) -> Sequence[Work]:
        self._result = self._action()
        return []

    def finish(self) -> Any:
        return self._result


REASON_MAX = 1000
"""The reason is cut at this length: a longer text would not fit in a message, and have another digest on rank 0."""


def failed_operation(error: BaseException, kind: str, name: str) -> MarkerOperation:
    """Create the operation that replaces an operation that this rank could not call, and reports the reason to all
    ranks."""
    reason = f"{type(error).__name__}: {error}"
    reason = reason if len(reason) <= REASON_MAX else f"{reason[:REASON_MAX]}..."
    return MarkerOperation(Signature(kind, name, (), REFUSED + reason))
