"""Horovod's names for MXNet, as in ``import kvdist.mxnet as hvd``, over kvdist's servers.

Neither torch nor numba is imported: MXNet 1.9.1 needs a NumPy that they do not work with. A call is done when it
returns, and arrays do not change afterwards: calls wait for MXNet's engine.
"""

from __future__ import annotations

import atexit
import logging
import numbers
import shlex
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    import mxnet as mx
except ImportError as error:
    raise ImportError(
        "kvdist.mxnet needs MXNet, which is not installed: examples/mxnet_bridge/environment.sh makes an environment"
    ) from error

from kvdist.config.environment import has_servers_from_env, world_from_env
from kvdist.config.exit_codes import shorten_tracebacks
from kvdist.errors import ConfigError
from kvdist.mxnet.arrays import MXArray, array_of, class_of, described, is_sparse, leaf_of
from kvdist.mxnet.ranks import Ranks, current, of_process, require_same
from kvdist.mxnet.training import Compression, DistributedOptimizer, DistributedTrainer
from kvdist.protocol.objects import decode_from, encode_or_reason
from kvdist.reduce_op import Average, ReduceOp, Sum, op_of

__all__ = [
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "Sum",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]

LOG = logging.getLogger("kvdist")

# The beginning, the end, and who this process is.


def init() -> None:
    """Become a rank of a job with servers, or in a process without a job rank 0 of 1; a second call only warns.

    Raises:
        ConfigError: the job has several processes and no servers; the message has the line to type.
        DeadlineExceeded: the cluster does not become complete.
    """
    shorten_tracebacks()
    if of_process:
        LOG.warning("init() was called before: this process already is rank %d of %d", rank(), size())
        return
    if not has_servers_from_env() and (world := world_from_env()).size > 1:
        line = shlex.join(["kvdist-launch", "-n", str(world.size), "-s", "1", "python", *sys.orig_argv[1:]])
        raise ConfigError(
            f"kvdist.mxnet sums on servers, and this job of {world.size} processes, started by {world.launcher}, has"
            f" none: start it with {line}"
        )
    of_process.append(Ranks())
    atexit.register(_tell_awaited)


def shutdown() -> None:
    """Leave the job; a second call does nothing. A process that has left a cluster cannot join it again."""
    while of_process:
        _tell_awaited()
        of_process.pop().store.close()


def _tell_awaited() -> None:
    """Warn of parameters that were to be broadcast as soon as they had a value, and never got one."""
    for ranks in of_process:
        if ranks.awaited:
            LOG.warning(
                "broadcast_parameters() never broadcast %s, which got no value: run a forward pass that uses it, or"
                " leave it out",
                ", ".join(map(repr, ranks.awaited.values())),
            )


def is_initialized() -> bool:
    """Whether this process is a rank."""
    return bool(of_process)


def rank() -> int:
    """The number of this process, from 0."""
    return current().world.rank


def size() -> int:
    """The number of training processes."""
    return current().world.size


def local_rank() -> int:
    """The number of this process on its machine, such as for choosing a GPU."""
    return current().world.local_rank


def local_size() -> int:
    """The number of processes on this machine."""
    return current().world.local_size


def cross_rank() -> int:
    """The number of this machine among the machines that have a process of this local rank."""
    return current().world.cross_rank


def cross_size() -> int:
    """The number of machines that have a process of this local rank."""
    return current().world.cross_size


# Operations.


def allreduce(
    tensor: MXArray, average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, op: ReduceOp | None = None,
) -> MXArray:  # fmt: skip
    """Average or sum an array over the ranks, into a new array of its shape, dtype, context and storage type.

    Args:
        tensor: dense or row_sparse, of float16, float32, float64, int8, int32, int64 or uint8. Averages and scaled sums
            of integers are cut toward zero.
        average: True, the default, for the mean, False for the sum; or pass `op`.
        name: the name by which ranks pair operations; without a name they pair by shape, dtype and order.
        priority: higher goes first.
        prescale_factor: factor of the arrays before they are summed.
        postscale_factor: factor of the result.
        op: `Average` or `Sum`.

    Raises:
        TypeError: `tensor` is not an array of MXNet, or not of such a dtype.
        ValueError: both `average` and `op` are set, or `op` is another operator.
        InitMismatch: ranks differ in names, shapes, dtypes or operators; all of them raise.
    """
    _require_arrays("allreduce", [tensor])
    return grouped_allreduce([tensor], average, name, priority, prescale_factor, postscale_factor, op)[0]


def allreduce_(
    tensor: MXArray, average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, op: ReduceOp | None = None,
) -> MXArray:  # fmt: skip
    """Average or sum an array in place, and return it. Everything else is as for `allreduce`."""
    _require_arrays("allreduce_", [tensor])
    return grouped_allreduce_([tensor], average, name, priority, prescale_factor, postscale_factor, op)[0]


def grouped_allreduce(
    tensors: Sequence[MXArray], average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, op: ReduceOp | None = None,
) -> list[MXArray]:  # fmt: skip
    """Average or sum several arrays by one exchange, into new arrays. Everything else is as for `allreduce`."""
    copies = _copies("grouped_allreduce", tensors)
    return grouped_allreduce_(copies, average, name, priority, prescale_factor, postscale_factor, op)


def grouped_allreduce_(
    tensors: Sequence[MXArray], average: bool | None = None, name: str | None = None, priority: int = 0,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, op: ReduceOp | None = None,
) -> list[MXArray]:  # fmt: skip
    """Average or sum several arrays by one exchange in place; returns them. Everything else is as for `allreduce`."""
    ranks, chosen = current(), op_of(average, op)
    if chosen not in (Average, Sum):
        raise ValueError(f"op is {chosen.name}; servers have Average and Sum")
    _require_arrays("grouped_allreduce_", tensors)
    names = [f"allreduce {'' if name is None else repr(name)} number {number}" for number in range(len(tensors))]
    groups = [(label, [one]) for label, one in zip(names, tensors, strict=True)]
    ranks.reduce(groups, chosen, priority, prescale_factor, postscale_factor)
    return list(tensors)


def allgather(tensor: MXArray, name: str | None = None, priority: int = 0) -> MXArray:
    """Concatenate the arrays of all ranks along their first dimension, in rank order, into a new array.

    Args:
        tensor: dense, of at least one dimension. Ranks may differ in the first dimension.
        name: for messages.
        priority: without effect.

    Raises:
        TypeError: `tensor` is not such an array of MXNet.
        InitMismatch: ranks differ in dtypes, or in other dimensions than the first; all of them raise.
    """
    _require_arrays("allgather", [tensor])
    if is_sparse(tensor) or not tensor.shape:
        raise TypeError(f"allgather takes dense arrays of one dimension or more, not one of {described(tensor)}")
    parts = allgather_object(tensor.asnumpy())
    require_same([[f"allgather {name!r} of {part.dtype} rows of shape {part.shape[1:]}"] for part in parts])
    make = mx.nd.array if type(tensor) is mx.nd.NDArray else mx.np.array
    return make(np.concatenate(parts), ctx=tensor.context, dtype=tensor.dtype)


def broadcast(tensor: MXArray, root_rank: int, name: str | None = None, priority: int = 0) -> MXArray:
    """A new array with the values of rank `root_rank`. Everything else is as for `broadcast_`."""
    return broadcast_(_copies("broadcast", [tensor])[0], root_rank, name, priority)


def broadcast_(tensor: MXArray, root_rank: int, name: str | None = None, priority: int = 0) -> MXArray:
    """Replace the values of an array by those of rank `root_rank`, and return it.

    Args:
        tensor: dense, of the same shape and dtype on all ranks.
        root_rank: the rank whose values all ranks get.
        name: the name by which ranks pair operations; without a name they pair by shape, dtype and order.
        priority: higher goes first.

    Raises:
        TypeError: `tensor` is not a dense array of MXNet.
        ValueError: `root_rank` is not a rank of the job.
        InitMismatch: ranks differ in names, shapes, dtypes or roots; all of them raise.
    """
    _require_arrays("broadcast_", [tensor])
    _require_root(root_rank)
    current().broadcast([(f"broadcast {'' if name is None else repr(name)}", [tensor])], root_rank, priority)
    return tensor


def broadcast_object(obj: Any = None, root_rank: int = 0, name: str | None = None) -> Any:
    """Get the object of the root rank: on the root `obj` itself, on the others a copy.

    None, bool, int, float, str, bytes, list, tuple, set, dict, arrays of NumPy and dense arrays of MXNet can be sent,
    nested up to 64 levels.

    Args:
        obj: the object; ignored on ranks other than the root.
        root_rank: the rank whose object all ranks get.
        name: without effect.

    Raises:
        CollectiveError: on ranks other than the root, the object cannot be sent.
        TypeError, ValueError: on the root, the object cannot be sent, and the message names the part.
        ValueError: `root_rank` is not a rank of the job.
    """
    _require_root(root_rank)
    is_root = rank() == root_rank
    given, failure = encode_or_reason(obj if is_root else None, leaf_of)
    gathered = current().gather(given if is_root else given[:0])
    if failure is not None:
        raise failure
    return obj if is_root else decode_from(root_rank, gathered[root_rank], array_of)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Copies of the objects of all ranks, in rank order; `broadcast_object` lists the types that can be sent.

    Raises:
        CollectiveError: the object of another rank cannot be sent.
        TypeError, ValueError: this rank's cannot.
    """
    return current().gather_objects(obj)


def broadcast_parameters(params: Any, root_rank: int = 0, prefix: str | None = None) -> None:
    """Replace parameters by those of the root rank; a parameter without a shape yet as soon as it has a value.

    Args:
        params: ``net.collect_params()``, or a dict of parameters or arrays, such as either of ``module.get_params()``.
        root_rank: the rank whose parameters all ranks get.
        prefix: prefix of the names in messages.

    Raises:
        TypeError: `params` is of another type, or contains values of another type.
        RuntimeError: a parameter was not initialised.
        InitMismatch: ranks differ in names, shapes or dtypes; all of them raise.
    """
    _require_root(root_rank)
    if not hasattr(params, "items"):
        kind = type(params).__name__
        raise TypeError(f"broadcast_parameters takes net.collect_params(), or a dict of arrays by name, not a {kind}")
    groups = []
    for key, value in sorted(params.items()):
        name = f"{prefix or ''}{key}"
        if not isinstance(value, mx.gluon.Parameter):
            _require_arrays("broadcast_parameters", [value], name)
            groups.append((f"parameter {name!r}", [value]))
        elif value._data is not None:
            groups.append((f"parameter {name!r}", value.list_data()))
        elif value._deferred_init:
            _broadcast_later(name, value, root_rank)
        else:
            raise RuntimeError(f"parameter {name!r} has no value and no initializer: call net.initialize() before")
    current().broadcast(groups, root_rank)


def _broadcast_later(name: str, parameter: Any, root_rank: int) -> None:
    """Broadcast a parameter once MXNet gives it a value, which `Parameter._init_impl` does."""
    ranks, give_value = current(), parameter._init_impl
    if "_init_impl" in vars(parameter):
        return  # this was asked for before

    def give_value_and_broadcast(*args: Any, **kwargs: Any) -> None:
        del parameter._init_impl  # from now on it is the method of the class again
        give_value(*args, **kwargs)
        del ranks.awaited[parameter]
        ranks.broadcast([(f"parameter {name!r}", parameter.list_data())], root_rank)

    parameter._init_impl = give_value_and_broadcast
    ranks.awaited[parameter] = name


# Checks.


def _copies(what: str, tensors: Sequence[Any]) -> list[MXArray]:
    _require_arrays(what, tensors)
    with mx.autograd.pause():
        return [one.copy() for one in tensors]


def _require_arrays(what: str, values: Sequence[Any], name: str = "") -> None:
    if isinstance(values, mx.nd.NDArray):
        single = what.removeprefix("grouped_")
        raise TypeError(f"{what} takes a list of arrays, not an array: write a list, or call {single}")
    for value in values:
        if not isinstance(value, mx.nd.NDArray):
            dtype = f" of {value.dtype}" if hasattr(value, "dtype") else ""
            raise TypeError(
                f"{what} takes arrays of MXNet, and {repr(name) if name else 'a value'} is a {class_of(value)}{dtype}:"
                " make one, such as by mx.nd.array(value, dtype='float32')"
            )


def _require_root(root_rank: object) -> None:
    if not isinstance(root_rank, numbers.Integral) or not 0 <= int(root_rank) < size():
        raise ValueError(f"root_rank is {root_rank!r}; the ranks are 0 to {size() - 1}")
