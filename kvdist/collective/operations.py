"""The collective operations: what the ranks must agree on, and how each is made of the channel's verbs.

Each class states its passes over the data. Inputs are written only by in-place operations. Data that is moved and not
reduced travels as bytes, so all dtypes can.

Small tensors of one dtype are packed into fusion buffers, so a thousand of them cost a few operations; large ones are
sent from where they lie. The partition follows from dtypes and sizes alone, never from memory layout: all ranks must
cut alike.
"""

from __future__ import annotations

import abc
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch._utils import _unflatten_dense_tensors
from torch.distributed import Work

from kvdist.collective.channel import Channel
from kvdist.collective.reduction import Average, ReduceOp, Sum, check_reducible, scale_, settle_
from kvdist.collective.signature import JOIN_SIGNATURE, REFUSED, Signature
from kvdist.errors import CollectiveError
from kvdist.protocol.collective import Participate


class Operation(abc.ABC):
    """Something that all ranks of a group do together."""

    signature: Signature
    cuda_device: int | None = None
    """Where its tensors are, if that is a CUDA device and is known."""

    @abc.abstractmethod
    def begin(self, channel: Channel) -> list[Work]:
        """On the group's thread: begin it. What must be known first, such as sizes, may be waited for here."""

    @abc.abstractmethod
    def finish(self) -> Any:
        """On the group's thread, once all that was begun is done: the result."""


ALONE_BYTES = 512 << 10
"""A tensor of so many bytes travels alone: copying it would cost more than another operation."""
FLAT_BYTES = 4 << 20
"""A flat buffer is full with so many bytes, so that one is packed while the one before is under way."""

WIDENED = {torch.int16: torch.int32}
"""Types that gloo and NCCL cannot reduce → those in which they do."""


def partition(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors that travel together, those without elements left out."""
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
    """The positions of tensors that share memory with another one, such as one that is given twice."""
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
    """Tensors that travel together.

    Args:
        outputs: where results go, all of one dtype and device.
        dtype: in which they travel; None for their own.
        is_apart: whether outputs must not be written to before everything is done.

    Attributes:
        values: what travels, contiguous: the only output itself where that is possible.
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
        # One call of torch for all views: a thousand calls would take longer than what is sent.
        self._views = list(_unflatten_dense_tensors(self.values, self._outputs))  # type: ignore[no-untyped-call]

    @property
    def raw_bytes(self) -> torch.Tensor:
        """The buffer as bytes, for what is moved and not reckoned with: there are dtypes that gloo does not know."""
        return bytes_of(self.values)

    def fill(self, tensors: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        """Take tensors in, each multiplied by a factor; one pass, and one over what is in the cache for a factor."""
        if self._views is not None:
            torch._foreach_copy_(self._views, list(tensors))
        elif tensors[0] is not self.values:
            self.values.copy_(tensors[0])
        scale_(self.values, factor)

    def unpack(self) -> None:
        """Write to the outputs; one pass, or none where the buffer is the output."""
        if self._views is not None:
            torch._foreach_copy_(self._outputs, self._views)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.view(-1).view(torch.uint8)


def describe(tensor: torch.Tensor, *, any_rows: bool = False) -> str:
    """The dtype and shape of a tensor as in ``float32[17, 3]``; with ``*`` for its rows if ranks may differ in them."""
    return _described(tensor.dtype, tuple(tensor.shape), any_rows)


@lru_cache(maxsize=4096)
def _described(dtype: torch.dtype, shape: tuple[int, ...], any_rows: bool) -> str:
    sizes = [str(size) for size in shape]
    if any_rows:
        sizes[:1] = ["*"]
    return f"{str(dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def device_of(tensors: Sequence[torch.Tensor]) -> str:
    """The kind of device that tensors of one operation are on."""
    return tensors[0].device.type if tensors else "cpu"


def cuda_device_of(tensors: Sequence[torch.Tensor]) -> int | None:
    """The number of the CUDA device that tensors of one operation are on; None on the CPU."""
    return tensors[0].device.index if tensors and tensors[0].is_cuda else None


def checked(kind: str, tensors: Sequence[Any]) -> list[torch.Tensor]:
    """The tensors of an operation.

    Raises:
        TypeError: one is no dense tensor; the message says what to do.
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
            raise ValueError(f"{kind} of tensors on {tensors[0].device} and {tensor.device}: all belong on one device")
    return list(tensors)


def check_writable(kind: str, outputs: Sequence[torch.Tensor]) -> None:
    """Whether results can be written to tensors.

    Raises:
        ValueError: elements of one are the same memory, or are not what lies in it.
    """
    for output in outputs:
        if output.is_conj() or output.is_neg():
            raise ValueError(f"{kind} cannot write to the conjugate or the negative of other memory; clone() it")
        if not output.is_contiguous() and any(
            step == 0 and size > 1 for step, size in zip(output.stride(), output.shape, strict=True)
        ):
            raise ValueError(f"{kind} cannot write to an expanded tensor, whose elements share memory; clone() it")


def writing(outputs: Sequence[torch.Tensor]) -> AbstractContextManager[object]:
    """For what is written to a caller's tensors, and not recorded: in inference mode where they were made in it."""
    return torch.inference_mode() if any(output.is_inference() for output in outputs) else torch.no_grad()


def contiguous_values(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values as they are sent: contiguous, without history, conjugated and negated where it says so."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _check_rows(kind: str, tensors: Sequence[torch.Tensor], does: str) -> None:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError(f"{kind} {does} rows, and a scalar has none; reshape(1) gives it one")


def _grouped(kind: str, tensors: Sequence[torch.Tensor]) -> str:
    return kind if len(tensors) == 1 else f"grouped {kind}"


def _scales(op: ReduceOp, prescale: float, postscale: float, note: str = "") -> str:
    scales = "" if prescale == postscale == 1.0 else f", prescale {prescale!r}, postscale {postscale!r}"
    return f"{op.name}{scales}" + (f", {note}" if note else "")


class AllReduce(Operation):
    """All ranks get what `op` makes of their tensors, one or several in one unit.

    Passes beside those of the engine: small tensors of a unit are packed and unpacked, one each; a large one that is
    not reduced in place is copied, one; each factor that is not 1, and the division of an average, is one.

    Args:
        name: what the user calls it.
        tensors: what is reduced, dense.
        outputs: where results are written, the tensors themselves for in place.
        op, prescale, postscale: postscale x op(prescale x tensor). Not Adasum, for which there is `AdasumOperation`.
        note: more that ranks must agree on, for people to read.
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
        self.cuda_device = cuda_device_of(tensors)
        self.signature = Signature(
            _grouped("allreduce", tensors),
            name,
            tuple(map(describe, tensors)),
            _scales(op, prescale, postscale, note),
            device_of(tensors),
        )

    def begin(self, channel: Channel) -> list[Work]:
        self._size = channel.size
        works = []
        parts = partition(self._tensors)
        shared = overlapping(self._outputs) if len(parts) > 1 else frozenset()
        with writing(self._outputs):
            for part in parts:
                dtype = WIDENED.get(self._outputs[part[0]].dtype)
                buffer = FusionBuffer([self._outputs[i] for i in part], dtype, is_apart=part[0] in shared)
                buffer.fill([self._tensors[i] for i in part], self._prescale)
                self._buffers.append(buffer)
                works.append(channel.all_reduce(buffer.values, self._op))
        return works

    def finish(self) -> list[torch.Tensor]:
        with writing(self._outputs):
            for buffer in self._buffers:
                settle_(buffer.values, self._op, self._size, self._postscale)
                buffer.unpack()
        return self._outputs


class AllGather(Operation):
    """All ranks get all ranks' rows, in rank order; they may have different numbers of them.

    Passes: two where the numbers differ (rows are padded and cut), none else.

    Args:
        kind: what it is called, where it is part of something else.
        detail: what else the ranks must agree on.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor], kind: str = "allgather", detail: str = "") -> None:
        checked(kind, tensors)
        _check_rows(kind, tensors, "joins")
        self._tensors = [contiguous_values(tensor) for tensor in tensors]
        self._gathered: list[tuple[torch.Tensor, list[int]]] = []
        self.cuda_device = cuda_device_of(tensors)
        self.signature = Signature(
            _grouped(kind, tensors),
            name,
            tuple(describe(tensor, any_rows=True) for tensor in tensors),
            detail,
            device_of(tensors),
        )

    def begin(self, channel: Channel) -> list[Work]:
        mine = torch.tensor([tensor.shape[0] for tensor in self._tensors], dtype=torch.int64)
        rows = torch.empty(channel.size * len(mine), dtype=torch.int64)
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
    """All ranks get one rank's tensors.

    Passes: small tensors of a unit are packed on the root and unpacked on the others; a large one is copied on the root
    if not in place.

    Args:
        root: its rank among all, for people.
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
        self.cuda_device = cuda_device_of(tensors)
        self.signature = Signature(
            _grouped("broadcast", tensors),
            name,
            tuple(map(describe, tensors)),
            f"from rank {root}",
            device_of(tensors),
        )

    def begin(self, channel: Channel) -> list[Work]:
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
        splits: how many rows go to each rank of the group, as int32; None for equally many.
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
        self.cuda_device = cuda_device_of([tensor])
        self.signature = Signature("alltoall", name, (describe(tensor, any_rows=True),), detail, device_of([tensor]))

    def begin(self, channel: Channel) -> list[Work]:
        ones = [1] * channel.size
        counts = torch.empty(channel.size, dtype=torch.int64)
        channel.all_to_all(counts, torch.tensor(self._sent, dtype=torch.int64), ones, ones).wait()
        self._received = counts.tolist()
        self._output = self._tensor.new_empty((sum(self._received), *self._tensor.shape[1:]))
        row_bytes = self._tensor[:1].element_size() * self._tensor.shape[1:].numel()
        if not row_bytes:
            return []
        sent = [rows * row_bytes for rows in self._sent]
        received = [rows * row_bytes for rows in self._received]
        return [channel.all_to_all(bytes_of(self._output), bytes_of(self._tensor)[: sum(sent)], received, sent)]

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._output, torch.tensor(self._received, dtype=torch.int32)


def splits_of(tensor: torch.Tensor, splits: torch.Tensor | None, size: int) -> list[int]:
    """The numbers of rows for each rank.

    Raises:
        ValueError: they do not fit the tensor or the group.
    """
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                f"alltoall without splits cuts {rows} rows into equal parts for {size} ranks, which fails: give splits"
            )
        return [rows // size] * size
    if not isinstance(splits, torch.Tensor) or splits.dtype != torch.int32:
        raise ValueError(f"splits are an int32 tensor, not {getattr(splits, 'dtype', type(splits).__name__)}")
    given: list[int] = splits.tolist()
    if splits.dim() != 1 or len(given) != size or min(given) < 0:
        raise ValueError(f"splits are {given}; alltoall wants {size} numbers of rows, one for each rank")
    if sum(given) > rows:
        raise ValueError(f"splits are {given}, together {sum(given)} rows, and the tensor has {rows}")
    return given


class ReduceScatter(Operation):
    """Every rank gets its part of the rows of what `op` makes of all ranks' tensors.

    The first ranks get one row more where rows cannot be divided evenly. Passes: one for each factor that is not 1.
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
            raise ValueError(f"reducescatter is for Average and Sum, not {op.name}")
        for dtype in {tensor.dtype for tensor in tensors}:
            check_reducible("reducescatter", dtype, op, prescale != 1.0 or postscale != 1.0)
        _check_rows("reducescatter", tensors, "cuts")
        self._tensors = [contiguous_values(tensor) for tensor in tensors]
        self._op = op
        self._prescale = prescale
        self._postscale = postscale
        self._outputs: list[torch.Tensor] = []
        self._size = 1
        self.cuda_device = cuda_device_of(tensors)
        self.signature = Signature(
            _grouped("reducescatter", tensors),
            name,
            tuple(map(describe, tensors)),
            _scales(op, prescale, postscale),
            device_of(tensors),
        )

    def begin(self, channel: Channel) -> list[Work]:
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
    """How many rows each rank gets: as equal as can be, the first ones more."""
    return [rows // size + (rank < rows % size) for rank in range(size)]


class BarrierOperation(Operation):
    """No rank goes on before all have come."""

    def __init__(self) -> None:
        self.signature = Signature("barrier", "", ())

    def begin(self, channel: Channel) -> list[Work]:
        return [channel.barrier()]

    def finish(self) -> Any:
        return None


_TENSOR = re.compile(r"([a-z0-9]+)\[((?:[0-9]+(?:, [0-9]+)*)?)\]")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class JoinOperation(Operation):
    """The place of `join` among the operations of a rank; what it means is done by the group."""

    def __init__(self) -> None:
        self.signature = JOIN_SIGNATURE

    def begin(self, channel: Channel) -> list[Work]:
        return []

    def finish(self) -> Any:
        return None


def zeros_operation(play: Participate) -> AllReduce:
    """The part that a rank which has joined has in an operation of the others.

    Raises:
        CollectiveError: it cannot be made of what is known of it.
    """
    tensors = [_zeros(text, play.device) for text in play.tensors]
    return AllReduce(play.name, tensors, tensors, ReduceOp[play.detail.partition(",")[0]])


def _zeros(text: str, device: str) -> torch.Tensor:
    match = _TENSOR.fullmatch(text)
    if match is None or match[1] not in _DTYPES:
        raise CollectiveError(f"this rank has joined, and cannot make zeros for {text!r}")
    shape = [int(size) for size in match[2].split(", ")] if match[2] else []
    return torch.zeros(shape, dtype=_DTYPES[match[1]], device=device)


TOLD_MAX = 1000
"""So many letters of the reason are told."""


class FailedOperation(Operation):
    """Says to all ranks why this one did not call an operation.

    Args:
        error: why.
    """

    def __init__(self, error: BaseException) -> None:
        told = f"{type(error).__name__}: {error}"
        # What is longer than a message takes would have another digest on rank 0.
        self.signature = Signature(REFUSED, "", (), told if len(told) <= TOLD_MAX else f"{told[:TOLD_MAX]}...")

    def begin(self, channel: Channel) -> list[Work]:
        return []

    def finish(self) -> Any:
        return None
