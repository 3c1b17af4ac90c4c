"""Horovod's names for training without servers: ``import kvdist.horovod as hvd``.

The module has all names of `kvdist.collective`, a `DistributedTrainer`, and Horovod's functions that query the build.
`init` also works in jobs with servers, where each worker is a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

try:
    import torch
except ImportError as error:
    raise ImportError("kvdist.horovod needs torch, which is not installed: pip install 'torch>=2.1'") from error

from kvdist import collective
from kvdist.collective import *  # noqa: F403
from kvdist.collective import Compression, ProcessSet, global_process_set
from kvdist.collective.reduction import NoneCompressor
from kvdist.errors import CollectiveError
from kvdist.kvstore import collective_store
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
"""Horovod's name of `kvdist.errors.CollectiveError`: an operation that failed on other ranks."""


# The beginning and the end.


def init(comm: None = None, process_sets: str | Iterable[ProcessSet | Iterable[int]] | None = None) -> None:  # type: ignore[no-redef]
    """Make this process a rank. A second call does nothing.

    Args:
        comm: must be None; use process sets instead of Horovod's sub-communicators.
        process_sets: list of process sets to register, equal on all ranks; ``dynamic`` has no effect.

    Raises:
        ValueError: `comm` is not None.
        ConfigError: the environment variables of the launcher are incomplete, or the job is encrypted.
        CollectiveError: the other ranks did not appear in time.
    """
    if comm is not None:
        raise ValueError(
            "init(comm=...) cannot leave processes out, and knows no communicators of MPI: start the job with as many"
            " processes as train, or give some of the ranks as process_sets"
        )
    ENGINE.begin(process_sets)


def shutdown() -> None:  # type: ignore[no-redef]
    """Leave the job. A second call does nothing, and all ranks may call `init` again afterwards."""
    ENGINE.end()


# Features of the build.


def mpi_threads_supported() -> bool:
    """Always False: kvdist does not communicate by MPI."""
    return False


def mpi_enabled() -> bool:
    """Always False: mpirun can only start the processes."""
    return False


def mpi_built() -> bool:
    """Always False."""
    return False


def gloo_enabled() -> bool:
    """Always True: tensors in host memory travel by gloo, except for sums within a host."""
    return True


def gloo_built() -> bool:
    """Always True: torch includes gloo."""
    return True


def nccl_built() -> int:
    """Version of torch's NCCL, such as 22703; 0 if torch has none."""
    if torch.version.cuda is None:
        return 0
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = (*version, 0, 0)[:3]
    return 10_000 * major + 100 * minor + patch


def ddl_built() -> bool:
    """Always False."""
    return False


def ccl_built() -> bool:
    """Always False."""
    return False


def sycl_built() -> bool:
    """Always False."""
    return False


def cuda_built() -> bool:
    """Whether this torch was built for CUDA."""
    return torch.version.cuda is not None


def rocm_built() -> bool:
    """Whether this torch was built for ROCm."""
    return torch.version.hip is not None


class DistributedTrainer(Trainer):
    """`Trainer` that averages gradients over the ranks, as Horovod's trainer for Gluon.

    All ranks start with the weights of rank 0. ``step(batch_size)`` divides by the number of examples of this rank
    alone, because gradients are averaged over ranks: pass that number for losses that are sums, and 1 or nothing for
    losses that are means. Lazy modules need a forward pass before the first step, to get their shapes.

    Args:
        params: as in `kvdist.Trainer`.
        optimizer: a name such as ``'sgd'``, or a `kvdist.optimizer.Optimizer`.
        optimizer_params: hyper-parameters for a name.
        compression: ``Compression.fp16`` or ``Compression.bf16`` compresses gradients for the network; they must be
            float32.
        gradient_predivide_factor: divisor of gradients before the sum; the sum is multiplied by it.
        prefix: accepted for Horovod, without effect: keys of different trainers do not collide.
        num_groups: accepted for Horovod, without effect: all gradients of a step travel together.
        process_set: ranks that train together.

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
        chosen = make_optimizer(params, optimizer, optimizer_params)
        params_of_compression = _compression_params(compression)
        self._own_store = collective_store(
            "horovod", number=process_set._number(), predivide=float(gradient_predivide_factor)
        )
        super().__init__(params, chosen, kvstore=self._own_store, compression_params=params_of_compression)

    _always_averages = True

    def close(self) -> None:
        """Release the parameters. A second call does nothing."""
        super().close()
        self._own_store.close()


def _compression_params(compression: type[NoneCompressor]) -> dict[str, str] | None:
    known = {Compression.none: None, Compression.fp16: {"type": "fp16"}, Compression.bf16: {"type": "bf16"}}
    if compression not in known:
        raise TypeError(f"compression is Compression.none, .fp16 or .bf16, not {compression!r}")
    return known[compression]
