"""Horovod's names for training without servers, as in ``import kvdist.horovod as hvd``.

Everything of `kvdist.collective`, a `DistributedTrainer`, and the questions that Horovod's scripts ask about what was
built in. `init` also works in jobs with servers, whose ranks meet through the cluster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

try:
    import torch
except ImportError as error:
    raise ImportError("kvdist.horovod needs torch, which is not installed: pip install 'kvdist[torch]'") from error

from kvdist import collective
from kvdist.collective import *  # noqa: F403
from kvdist.collective import Compression, ProcessSet, global_process_set
from kvdist.collective.reduction import NoneCompressor
from kvdist.errors import CollectiveError
from kvdist.kvstore import collective_store
from kvdist.kvstore.adapter import KVStoreBase
from kvdist.kvstore.engine_lifecycle import ENGINE
from kvdist.optimizer.base import Optimizer
from kvdist.training.trainer import Trainer
from kvdist.training.trainer_config import make_optimizer

__all__ = [
    "DistributedTrainer",
    "HorovodInternalError",
    "ccl_built",
    "cuda_built",
    "ddl_built",
    "gloo_built",
    "gloo_enabled",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rocm_built",
    "sycl_built",
]
__all__ += collective.__all__


def without_elastic(module: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module that has Horovod's names but for ``elastic``."""

    def missing(name: str) -> Any:
        if name == "elastic":
            raise NotImplementedError(
                f"{module}.elastic is not offered: ranks cannot come and go within a job, so that there is no run, no"
                " State and no ElasticSampler. Restart from a checkpoint: save one now and then, load the last one when"
                " the script begins, and start it with `kvdist-launch -s 0 --on-worker-exit restart:N`. Or train on"
                " servers, by a Trainer with kvstore='dist', where `--on-loss continue` goes on without lost workers"
            )
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


if not TYPE_CHECKING:  # for type checkers all other names would exist too
    __getattr__ = without_elastic(__name__)

HorovodInternalError = CollectiveError
"""What an operation raises that other ranks have broken: `kvdist.errors.CollectiveError`."""


# The beginning and the end.


def init(comm: None = None, process_sets: str | Iterable[ProcessSet | Iterable[int]] | None = None) -> None:  # type: ignore[no-redef]
    """Become a rank; a second call does nothing.

    Args:
        comm: None. Horovod's sub-communicators are process sets here.
        process_sets: to be known from the start, the same on all ranks; the word ``dynamic`` has no effect.

    Raises:
        ValueError: `comm` is given.
        ConfigError: the environment says only half of who this process is, or the job encrypts.
        CollectiveError: the other ranks were not found in time.
    """
    if comm is not None:
        raise ValueError(
            "init(comm=...) cannot leave processes out, and knows no communicators of MPI: start the job with as many"
            " processes as train, or give some of the ranks as process_sets"
        )
    ENGINE.begin(process_sets)


def shutdown() -> None:  # type: ignore[no-redef]
    """Stop being a rank; a second call does nothing. `init` may be called again then, by all ranks."""
    ENGINE.end()


# What was built in.


def mpi_threads_supported() -> bool:
    """False: nothing here is MPI's."""
    return False


def mpi_enabled() -> bool:
    """False: mpirun can start the processes, and no more."""
    return False


def mpi_built() -> bool:
    """False."""
    return False


def gloo_enabled() -> bool:
    """True: tensors in the host's memory go by gloo, but for sums within a host."""
    return True


def gloo_built() -> bool:
    """True: torch has it."""
    return True


def nccl_built() -> int:
    """The version of torch's NCCL, such as 22703; 0 if it has none."""
    if torch.version.cuda is None:
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = (*version, 0, 0)[:3]
    return 10_000 * major + 100 * minor + patch


def ddl_built() -> bool:
    """False."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def sycl_built() -> bool:
    """False."""
    return False


def cuda_built() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built for ROCm."""
    return torch.version.hip is not None


class DistributedTrainer(Trainer):
    """A `Trainer` that averages gradients over the ranks: Horovod's for Gluon.

    Rank 0's weights become everybody's before the first step. ``step(batch_size)`` divides by the examples of this
    rank alone, since gradients are averaged: with losses that are sums give their number, with means give 1 or nothing.
    Parameters of lazy modules get their shapes in a forward pass, which must come before the first step.

    Args:
        params: as for `kvdist.Trainer`.
        optimizer: a name such as ``'sgd'``, or an `Optimizer` of kvdist.
        optimizer_params: hyper-parameters for a name.
        compression: ``Compression.fp16`` or ``Compression.bf16`` lets gradients, which are float32 then, travel so.
        gradient_predivide_factor: gradients are divided by it before they are summed, and multiplied after that.
        prefix: without effect: keys of other trainers cannot be mistaken for these.
        num_groups: without effect: the gradients of a step travel together in any case.
        process_set: the ranks that train together.

    Raises:
        TypeError: parameters, optimizer or compression are of a wrong type.
        ValueError: a number is out of range, or the process set is not registered.
    """

    def __init__(
        self,
        params: Any,
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        compression: type[NoneCompressor] = Compression.none,
        gradient_predivide_factor: float = 1.0,
        prefix: str | None = None,
        num_groups: int = 0,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        if not 0 < gradient_predivide_factor < float("inf"):
            raise ValueError(f"gradient_predivide_factor is {gradient_predivide_factor}; it must be a positive number")
        if num_groups < 0:
            raise ValueError(f"num_groups is {num_groups}; it counts groups, from 0")
        if isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                f"DistributedTrainer updates by kvdist's optimizers, and {type(optimizer).__name__} is torch's: give a"
                " name and its numbers, such as DistributedTrainer(net.parameters(), 'adam', {'learning_rate': .001});"
                " or keep it, in DistributedOptimizer, and call its step()"
            )
        chosen = make_optimizer(optimizer, optimizer_params)
        params_of_compression = _compression_params(compression)
        self._own_store = collective_store(
            "horovod", number=process_set._number(), predivide=float(gradient_predivide_factor)
        )
        super().__init__(params, chosen, kvstore=self._own_store, compression_params=params_of_compression)

    def _begin_with(self, store: KVStoreBase) -> None:
        super()._begin_with(store)
        assert self._exchange is not None
        self._exchange.always_averages = True

    def close(self) -> None:
        """Let go of the parameters; a second call does nothing."""
        super().close()
        self._own_store.close()


def _compression_params(compression: type[NoneCompressor]) -> dict[str, str] | None:
    known = {Compression.none: None, Compression.fp16: {"type": "fp16"}, Compression.bf16: {"type": "bf16"}}
    if compression not in known:
        raise TypeError(f"compression is Compression.none, .fp16 or .bf16, not {compression!r}")
    return known[compression]
