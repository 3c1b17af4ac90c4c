"""Gradients on their way to being reduced over the ranks, started while the backward pass still runs.

Invariants:

* Ranks match operations by their order. Buckets start in the order in which they were created, whichever gradients come
  first on a rank, and a parameter without a gradient takes part with zeros.
* A gradient is reduced in place. From its last hook until `finish` returns only the reducer touches it; torch's version
  counters tell if other code did.
* Which gradients are sparse is agreed on once, in the first step, which therefore starts no bucket early. They travel
  that way from then on, whatever a single backward pass produces on a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from kvdist.buckets import BUCKET_BYTES, REENTRANT, Bucket, GradientBuckets, arrange
from kvdist.collective.api import (
    Handle,
    ProcessSet,
    global_process_set,
    grouped_allreduce,
    sparse_allreduce_async,
    submit,
)
from kvdist.collective.operations import AllReduce
from kvdist.collective.reduction import Compression, NoneCompressor
from kvdist.collective.signature import kind_of, span
from kvdist.reduce_op import Adasum, Average, Max, ReduceOp, Sum

Groups = int | Sequence[Sequence[torch.Tensor]] | None


@dataclass(frozen=True)
class ReduceOptions:
    """How gradients are reduced over the ranks.

    Attributes:
        name: name of the operation, in messages and timelines.
        op: how the ranks' gradients are combined.
        compression: compression of the gradients for the network.
        predivide_factor: f, for averages: gradients are divided by f before they are summed and by size / f afterwards,
            so half precision overflows later.
        process_set: the ranks that take part.
        sparse_as_dense: sparse gradients travel dense rather than gathered, and are sparse again afterwards.
        passes: backward passes whose gradients add up locally first.
        groups: the number of groups that travel together, or lists of parameters; None for buckets by size.
        scales_local: gradients of local variables are divided by the number of ranks, as a sum of means would be.
        local: the variables whose gradients stay local to each rank, by id.
    """

    name: str = "gradients"
    op: ReduceOp = Average
    compression: type[NoneCompressor] = field(default=Compression.none)
    predivide_factor: float = 1.0
    process_set: ProcessSet = field(default=global_process_set)
    sparse_as_dense: bool = False
    passes: int = 1
    groups: Groups = None
    scales_local: bool = True
    local: dict[int, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.predivide_factor != 1.0 and self.op is not Average:
            raise ValueError(
                f"gradient_predivide_factor is for op=Average; leave it at 1.0 with op={ReduceOp(self.op).name}"
            )
        if self.passes < 1:
            raise ValueError(f"backward_passes_per_step is {self.passes}; it must be at least 1")
        if self.op is Adasum and self.process_set is not global_process_set:
            raise NotImplementedError("Adasum works on all ranks, not on a process set")

    @property
    def prescale(self) -> float:
        """The factor before the reduction."""
        return 1.0 / self.predivide_factor

    @property
    def postscale(self) -> float:
        """The factor after the reduction."""
        return self.predivide_factor

    @property
    def ranks(self) -> int:
        """The number of ranks that take part."""
        self.process_set._number()
        return len(self.process_set.ranks)

    @property
    def has_others(self) -> bool:
        """Whether this rank reduces with others: it is a member of a process set of several ranks."""
        return self.ranks > 1 and bool(self.process_set.included())

    def reduce_shared(
        self,
        gradients: Sequence[Any],
        variables: Sequence[Any],
        reduce: Callable[[list[Any], list[Any]], Sequence[Any]],
        divide: Callable[[Any, int], Any],
    ) -> list[Any]:
        """Reduce the gradients of all variables but the local ones.

        Args:
            gradients: gradients of a framework, or None.
            variables: the variables of the gradients.
            reduce: reduces gradients of variables.
            divide: divides the gradient of a local variable by the number of ranks.
        """
        shared = [i for i, variable in enumerate(variables) if id(variable) not in self.local]
        reduced = iter(reduce([gradients[i] for i in shared], [variables[i] for i in shared]))
        is_divided = self.scales_local and self.has_others
        result = []
        for gradient, variable in zip(gradients, variables, strict=True):
            if id(variable) not in self.local:
                result.append(next(reduced))
            else:
                result.append(divide(gradient, self.ranks) if is_divided and gradient is not None else gradient)
        return result

    def for_gradients(self) -> ReduceOptions:
        """Return the options if `op` is Average, Sum or Adasum.

        Raises:
            ValueError: it is another operator.
        """
        if self.op not in (Average, Sum, Adasum):
            raise ValueError(f"op is {ReduceOp(self.op).name}; gradients are combined by Average, Sum or Adasum")
        return self

    def reduce(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reduce gradients as a unit into new tensors; all ranks pass the same dtypes and shapes.

        Raises:
            CollectiveError: the ranks disagree, or a rank was lost.
        """
        if not gradients:
            return []
        return grouped_allreduce(
            [gradient.detach() for gradient in gradients],
            name=self.name,
            compression=self.compression,
            op=self.op,
            prescale_factor=self.prescale,
            postscale_factor=self.postscale,
            process_set=self.process_set,
        )


def put_before(instance: Any, front: type, module: str = "") -> None:
    """Put a base before the class of an object, which keeps its state, and whose class keeps its name.

    Args:
        instance: such as an optimizer.
        front: the first base of its new class.
        module: ``__module__`` of the new class; '' for that of the old class.

    Raises:
        ValueError: the class already has a base that averages gradients.
    """
    own = type(instance)
    if isinstance(instance, Distributed):
        raise ValueError(f"this {own.__name__} is distributed already; wrap it once")
    names = {"__module__": module or own.__module__, "__qualname__": own.__qualname__, "__doc__": own.__doc__}
    instance.__class__ = type(own.__name__, (front, own), names)


class Distributed:
    """Marks optimizers and tapes whose gradients are reduced over all ranks."""


@dataclass(frozen=True)
class _Sent:
    """A gradient that is being reduced."""

    member: int
    grad: torch.Tensor
    version: int
    compressed: torch.Tensor
    ctx: Any


class GradientReducer(GradientBuckets):
    """Reduces the gradients of parameters over the ranks, once a step.

    Args:
        names: names of the parameters, which ranks compare.
        parameters: parameters that require gradients, in the same order on all ranks.
        options: how they are reduced.
        is_eager: whether buckets start during the backward pass.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[torch.Tensor], options: ReduceOptions, *, is_eager: bool = True
    ) -> None:
        self.parameters = list(parameters)
        self._options = options
        self._is_eager = is_eager
        self._sparse: frozenset[int] | None = frozenset() if options.sparse_as_dense else None
        """Parameters whose gradients travel as sparse tensors; None until the ranks have agreed."""
        self._made_dense: dict[int, int] = {}
        """Parameter whose sparse gradient travels dense → its number of sparse dimensions."""
        self._deferred: list[Bucket] = []
        self._under_way: list[tuple[Handle, list[_Sent]]] = []
        self.is_finished = False
        """Whether the gradients are reduced and no new gradient has come since."""
        super().__init__(
            names,
            [[parameter] for parameter in parameters],
            buckets=buckets_of(self.parameters, options.groups),
            passes=options.passes,
            in_order=True,
        )

    def begin(self) -> None:
        """Note the first gradient of a step."""
        self.is_finished = False

    def start(self, bucket: Bucket) -> None:
        """Begin to reduce a bucket, unless it must wait for `finish`."""
        if self._sparse is None or not self._is_eager:
            self._deferred.append(bucket)
        else:
            self._send(bucket)

    def too_late(self, member: int) -> Exception:
        """Return Horovod's error."""
        return AssertionError(
            f"the gradient of {self._names[member]} was computed more than backward_passes_per_step ({self._passes})"
            " times before a call to step() or synchronize(). Increase backward_passes_per_step to add gradients up"
            f" locally. {REENTRANT}"
        )

    def finish(self) -> None:
        """Reduce the remaining gradients, and wait for all.

        Raises:
            CollectiveError: an operation failed.
            RuntimeError: a gradient was changed while it was being reduced.
        """
        try:
            self.complete()
            if self._sparse is None:
                self._sparse = self._agreed_sparse()
            for bucket in self._deferred:
                self._send(bucket)
            gathered = [(member, self._gather(member)) for member in sorted(self._sparse)]
        finally:
            # After an error too, no operation is in progress.
            under_way, self._under_way, self._deferred = self._under_way, [], []
            wait_for([handle for handle, _ in under_way])
        changed = [self._names[one.member] for handle, sent in under_way for one in sent if self._is_changed(one)]
        for handle, sent in under_way:
            handle.result()
            self._put_back(sent)
        for member, dimensions in self._made_dense.items():
            grad = self.parameters[member].grad
            if grad is not None and self.parameters[member].requires_grad:
                self.parameters[member].grad = grad.to_sparse(dimensions)
        for member, handle in gathered:
            total = handle.result()
            if self.parameters[member].requires_grad:
                self.parameters[member].grad = total
        if changed:
            raise RuntimeError(
                f"the gradient of {', '.join(changed)} was changed while it was being reduced. Gradients leave during"
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
        names = [self._names[one.member] for one in sent]
        return f"gradient{'s' * (len(names) > 1)} of {span(names)}"  # compared, as tensors are by place

    def _reduce(self, tensors: list[torch.Tensor], note: str) -> Handle:
        options = self._options
        return submit(
            options.process_set,
            kind_of("allreduce", len(tensors)),
            "",
            lambda _: AllReduce("", tensors, tensors, options.op, options.prescale, options.postscale, note),
        )

    def _taken(self, member: int) -> _Sent:
        """Take the gradient of a parameter, in the form in which it travels."""
        parameter = self.parameters[member]
        # A parameter that was frozen meanwhile takes part with zeros, and its gradient stays as it is.
        grad = parameter.grad if parameter.requires_grad else None
        if grad is None:
            grad = torch.zeros_like(parameter, requires_grad=False)
        elif grad.layout != torch.strided:
            self._made_dense[member] = grad.sparse_dim()
            grad = grad.to_dense()
        if parameter.requires_grad:
            parameter.grad = grad
        # .data: what the operation writes must not count as a change by the user.
        compressed, ctx = self._options.compression.compress(grad.data)
        return _Sent(member, grad, grad._version, compressed, ctx)

    def _is_changed(self, one: _Sent) -> bool:
        parameter = self.parameters[one.member]
        return parameter.requires_grad and (parameter.grad is not one.grad or one.grad._version != one.version)

    def _put_back(self, sent: Sequence[_Sent]) -> None:
        for one in sent:
            result = self._options.compression.decompress(one.compressed, one.ctx)
            if result.data_ptr() != one.grad.data_ptr():
                one.grad.data.copy_(result)

    def _agreed_sparse(self) -> frozenset[int]:
        """Agree on the parameters that have a sparse gradient on any rank.

        Raises:
            ValueError: a gradient is sparse, and the operator cannot reduce it.
        """
        found = [int(_is_sparse(parameter.grad)) for parameter in self.parameters]
        flags = torch.tensor(found, dtype=torch.uint8, device="cpu")
        handle = submit(
            self._options.process_set,
            "allreduce",
            "",
            lambda _: AllReduce("", [flags], [flags], Max, note="which gradients are sparse"),
        )
        sparse = [member for member, flag in enumerate(handle.result()[0].tolist()) if flag]
        if sparse and self._options.op not in (Average, Sum):
            raise ValueError(
                f"the gradient of {self._names[sparse[0]]} is sparse, and sparse gradients are reduced by Average or"
                f" Sum, not {self._options.op.name}: set sparse_as_dense=True"
            )
        return frozenset(sparse)

    def _gather(self, member: int) -> Handle:
        parameter = self.parameters[member]
        grad = parameter.grad if parameter.requires_grad else None
        if grad is None:
            grad = torch.sparse_coo_tensor(
                torch.empty(1, 0, dtype=torch.int64, device=parameter.device),
                parameter.new_empty(0, *parameter.shape[1:]),
                parameter.shape,
                device=parameter.device,
                check_invariants=False,
            )
        elif not _is_sparse(grad):
            grad = grad.to_sparse(1)
        factor = self._options.prescale * self._options.postscale
        return sparse_allreduce_async(
            grad if factor == 1.0 else grad * factor, None, self._options.op, self._options.process_set
        )


def _is_sparse(grad: torch.Tensor | None) -> bool:
    return grad is not None and grad.layout == torch.sparse_coo


def wait_for(handles: Sequence[Handle]) -> None:
    """Wait until operations have ended, successfully or not."""
    for handle in handles:
        handle._future.exception()


def buckets_of(parameters: Sequence[torch.Tensor], groups: Groups) -> list[Bucket]:
    """Put parameters into buckets that travel together, the last parameters first.

    Args:
        parameters: in order.
        groups: the number of groups of neighbours; or lists of parameters, while all others go into buckets by size; or
            None for buckets by size alone.

    Raises:
        ValueError: `groups` is neither, or a parameter is in two groups.
    """
    if groups is None:
        members = [list(bucket.members) for bucket in arrange(_sizes(parameters))]
    elif isinstance(groups, int):
        if groups < 1:
            raise ValueError(f"groups is {groups}; it must be at least 1, or a list of lists of parameters")
        count, each = len(parameters), -(-len(parameters) // groups)
        members = [list(range(max(end - each, 0), end)) for end in range(count, 0, -max(each, 1))]
    else:
        members = _given(parameters, groups)
    members.sort(key=lambda one: -max(one))
    return [Bucket(tuple(sorted(one)), priority) for priority, one in enumerate(members)]


def _sizes(parameters: Sequence[torch.Tensor]) -> list[int]:
    return [parameter.numel() * parameter.element_size() for parameter in parameters]


def _given(parameters: Sequence[torch.Tensor], groups: Sequence[Sequence[torch.Tensor]]) -> list[list[int]]:
    """The members of the user's groups, and of buckets over the other parameters."""
    if not isinstance(groups, list | tuple) or not all(
        isinstance(one, torch.Tensor) for group in groups for one in (group if isinstance(group, list | tuple) else [0])
    ):
        raise ValueError("groups must be a number of groups, or a list of lists of parameters")
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    members = [[numbers[id(one)] for one in group if id(one) in numbers] for group in groups]
    taken = [number for group in members for number in group]
    if len(taken) != len(set(taken)):
        raise ValueError("groups contains a parameter twice")
    rest = sorted(set(range(len(parameters))) - set(taken))
    by_size = arrange(_sizes([parameters[number] for number in rest]), BUCKET_BYTES) if rest else []
    return [group for group in members if group] + [[rest[i] for i in bucket.members] for bucket in by_size]
