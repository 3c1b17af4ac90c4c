"""Gradients on their way to being reduced over the ranks, started while the backward pass still runs.

Invariants:

* Ranks match operations by their order. Buckets start in the order in which they were made, whichever gradients come
  first on a rank, and a parameter without a gradient takes part with zeros.
* A gradient is reduced where it lies. From its last hook until `finish` returns only the reducer touches it; torch's
  version counters tell if something else did.
* Which gradients are sparse is agreed on once, in the first step, which therefore starts no bucket early. They travel
  that way from then on, whatever a single backward pass produces on one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from kvdist.buckets import BUCKET_BYTES, Bucket, GradientBuckets, arrange
from kvdist.collective.api import (
    Handle,
    ProcessSet,
    global_process_set,
    grouped_allreduce,
    sparse_allreduce_async,
    submit,
)
from kvdist.collective.operations import AllReduce
from kvdist.collective.reduction import Average, Compression, Max, NoneCompressor, ReduceOp, Sum

Groups = int | Sequence[Sequence[torch.Tensor]] | None


@dataclass(frozen=True)
class Way:
    """How gradients are reduced.

    Attributes:
        op: Average or Sum, Min, Max, Product.
        compression: how they travel.
        prescale, postscale: factors before and after.
        passes: backward passes whose gradients add up locally first.
        sparse_as_dense: sparse gradients become dense ones.
        groups: which gradients travel together: their number, or lists of parameters; None for buckets by size.
        process_set: the ranks that take part.
    """

    op: ReduceOp = Average
    compression: type[NoneCompressor] = Compression.none
    prescale: float = 1.0
    postscale: float = 1.0
    passes: int = 1
    sparse_as_dense: bool = False
    groups: Groups = None
    process_set: ProcessSet = field(default=global_process_set)


@dataclass(frozen=True)
class _Sent:
    """A gradient that is under way."""

    member: int
    grad: torch.Tensor
    version: int
    compressed: torch.Tensor
    ctx: Any


class GradientReducer(GradientBuckets):
    """Reduces the gradients of parameters over the ranks, once a step.

    Args:
        names: what the user calls the parameters.
        parameters: those that require gradients, in an order that is the same on all ranks.
        way: how they are reduced.
        is_eager: whether buckets start during the backward pass.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], way: Way, *, is_eager: bool = True
    ) -> None:
        self.parameters = list(parameters)
        self._way = way
        self._is_eager = is_eager
        self._sparse: frozenset[int] | None = frozenset() if way.sparse_as_dense else None
        """Parameters whose gradients travel as sparse ones; None until that is agreed on."""
        self._deferred: list[Bucket] = []
        self._under_way: list[tuple[Handle, list[_Sent]]] = []
        self.is_finished = False
        """Whether the gradients are reduced and no other one has come since."""
        super().__init__(
            names,
            [[parameter] for parameter in parameters],
            buckets=buckets_of(self.parameters, way.groups),
            passes=way.passes,
            in_order=True,
        )

    def begin(self) -> None:
        """The first gradient of a step is there."""
        self.is_finished = False

    def start(self, bucket: Bucket) -> None:
        """Begin to reduce a bucket's gradients, unless that has to wait for `finish`."""
        if self._sparse is None or not self._is_eager:
            self._deferred.append(bucket)
        else:
            self._send(bucket)

    def too_late(self, member: int) -> Exception:
        """Horovod's error for it."""
        return AssertionError(
            f"the gradient of {self._names[member]} was computed more than backward_passes_per_step ({self._passes})"
            " times before a call to step() or synchronize(). Increase backward_passes_per_step to add gradients up"
            " locally"
        )

    def finish(self) -> None:
        """Reduce all gradients that are not under way yet, and wait for all.

        Raises:
            CollectiveError: an operation failed.
            RuntimeError: a gradient was changed while it was under way.
        """
        try:
            self.complete()
            if self._sparse is None:
                self._sparse = self._agreed_sparse()
            for bucket in self._deferred:
                self._send(bucket)
            gathered = [(member, self._gather(member)) for member in sorted(self._sparse)]
        finally:
            # Whatever was wrong, nothing is under way afterwards.
            under_way, self._under_way, self._deferred = self._under_way, [], []
            wait_for([handle for handle, _ in under_way])
        changed = [self._names[one.member] for handle, sent in under_way for one in sent if self._is_changed(one)]
        for handle, sent in under_way:
            handle.result()
            self._put_back(sent)
        for member, handle in gathered:
            total = handle.result()
            if self.parameters[member].requires_grad:
                self.parameters[member].grad = total
        if changed:
            raise RuntimeError(
                f"the gradient of {', '.join(changed)} was changed while it was under way. Gradients leave during"
                " backward(): call optimizer.synchronize() before you clip, scale or unscale them, and step() within"
                " `with optimizer.skip_synchronize():`"
            )
        self.is_finished = True

    def _send(self, bucket: Bucket) -> None:
        members = [member for member in bucket.members if member not in (self._sparse or ())]
        for device in dict.fromkeys(self.parameters[member].device for member in members):
            sent = [self._taken(member) for member in members if self.parameters[member].device == device]
            self._under_way.append((self._reduce([one.compressed for one in sent], self._note(sent)), sent))

    def _note(self, sent: Sequence[_Sent]) -> str:
        first, last = self._names[sent[0].member], self._names[sent[-1].member]
        return f"gradient of {first}" if len(sent) == 1 else f"gradients of {first} to {last}"

    def _reduce(self, tensors: list[torch.Tensor], note: str) -> Handle:
        way = self._way
        return submit(
            way.process_set,
            lambda _: AllReduce("", tensors, tensors, way.op, way.prescale, way.postscale, note),
        )

    def _taken(self, member: int) -> _Sent:
        """The gradient of a parameter, in the form in which it travels."""
        parameter = self.parameters[member]
        # One that is frozen now takes part with zeros, and its gradient is left as it is.
        grad = parameter.grad if parameter.requires_grad else None
        if grad is None:
            grad = torch.zeros_like(parameter, requires_grad=False)
        elif grad.layout != torch.strided:
            grad = grad.to_dense()
        if parameter.requires_grad:
            parameter.grad = grad
        # .data: what the operation writes is no change of the user's.
        compressed, ctx = self._way.compression.compress(grad.data)
        return _Sent(member, grad, grad._version, compressed, ctx)

    def _is_changed(self, one: _Sent) -> bool:
        parameter = self.parameters[one.member]
        return parameter.requires_grad and (parameter.grad is not one.grad or one.grad._version != one.version)

    def _put_back(self, sent: Sequence[_Sent]) -> None:
        for one in sent:
            result = self._way.compression.decompress(one.compressed, one.ctx)
            if result.data_ptr() != one.grad.data_ptr():
                one.grad.data.copy_(result)

    def _agreed_sparse(self) -> frozenset[int]:
        """The parameters that have a sparse gradient on any rank."""
        flags = torch.tensor([int(_is_sparse(parameter.grad)) for parameter in self.parameters], dtype=torch.uint8)
        handle = submit(
            self._way.process_set,
            lambda _: AllReduce("", [flags], [flags], Max, note="which gradients are sparse"),
        )
        return frozenset(member for member, flag in enumerate(handle.result()[0].tolist()) if flag)

    def _gather(self, member: int) -> Handle:
        parameter = self.parameters[member]
        grad = parameter.grad if parameter.requires_grad else None
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64),
                parameter.new_empty(0, *parameter.shape[1:]),
                parameter.shape,
                device=parameter.device,
                check_invariants=False,
            )
        elif not _is_sparse(grad):
            grad = grad.to_sparse(1)
        factor = self._way.prescale * self._way.postscale
        return sparse_allreduce_async(
            grad if factor == 1.0 else grad * factor, None, self._way.op, self._way.process_set
        )


def _is_sparse(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.layout == torch.sparse_coo


def wait_for(handles: Sequence[Handle]) -> None:
    """Wait until operations are over, well or not."""
    futures: list[Future[Any]] = [handle._future for handle in handles]
    wait(futures)


def buckets_of(parameters: Sequence[torch.Tensor], groups: Groups) -> list[Bucket]:
    """Which parameters travel together, the last ones first.

    Args:
        parameters: in order.
        groups: into how many groups of neighbours they are cut; or lists of parameters, beside which those that are in
            none are put into buckets by size; or None for buckets by size alone.

    Raises:
        ValueError: `groups` is neither, or a parameter is in two.
    """
    if groups is None:
        members = [list(bucket.members) for bucket in arrange(_sizes(parameters))]
    elif isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"groups is {groups}; it is at least 1, or a list of lists of parameters")
        count, each = len(parameters), -(-len(parameters) // groups)
        members = [list(range(max(end - each, 0), end)) for end in range(count, 0, -max(each, 1))]
    else:
        members = _given(parameters, groups)
    members.sort(key=lambda one: -max(one))
    return [Bucket(tuple(sorted(one)), priority) for priority, one in enumerate(members)]


def _sizes(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [parameter.numel() * parameter.element_size() for parameter in parameters]


def _given(parameters: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """The members of groups that the user gave, and of buckets over the rest."""
    if not isinstance(groups, list | tuple) or not all(
        isinstance(one, torch.Tensor) for group in groups for one in (group if isinstance(group, list | tuple) else [0])
    ):
        raise ValueError("groups is a number of groups, or a list of lists of parameters")
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    members = [[numbers[id(one)] for one in group if id(one) in numbers] for group in groups]
    taken = [number for group in members for number in group]
    if len(taken) != len(set(taken)):
        raise ValueError("a parameter is in groups twice")
    rest = sorted(set(range(len(parameters))) - set(taken))
    by_size = arrange([_sizes(parameters)[number] for number in rest], BUCKET_BYTES) if rest else []
    return [group for group in members if group] + [[rest[i] for i in bucket.members] for bucket in by_size]


@dataclass(frozen=True)
class ReduceOptions:
    """What becomes of the gradients of the ranks.

    Attributes:
        name: of the operation, in messages and timelines.
        op: Average or Sum.
        compression: one of `Compression`, by which they travel.
        predivide_factor: f of an average for which gradients are divided by f before they are summed, and by size / f
            afterwards: half precision overflows later.
        process_set: the ranks that take part.
    """

    name: str = "gradients"
    op: ReduceOp = Average
    compression: type[NoneCompressor] = field(default=Compression.none)
    predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(f"op is {ReduceOp(self.op).name}; gradients are combined by Average or Sum")
        if self.predivide_factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor belongs to op=Average; leave it at 1.0 with op=Sum")

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.process_set.size()

    def of(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The ranks' gradients as one list, new tensors; all ranks give the same dtypes and shapes.

        Raises:
            CollectiveError: the ranks disagree, or one is gone.
        """
        if not gradients:
            return []
        return grouped_allreduce(
            [gradient.detach() for gradient in gradients],
            name=self.name,
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / self.predivide_factor,
            postscale_factor=self.predivide_factor,
            process_set=self.process_set,
        )
