"""Keras 3 without servers, under Horovod's names: ``import kvdist.keras as hvd``.

It supports the torch and the TensorFlow backend of Keras. `DistributedOptimizer` averages gradients over the ranks, and
the callbacks broadcast weights and average metrics; `docs/collective.md` lists the six steps. Saved models do not
depend on this package: Keras alone loads them.
"""

from typing import TYPE_CHECKING as _TYPE_CHECKING

try:
    import keras as _keras
except ImportError as error:
    raise ImportError(
        f"Keras 3 cannot be imported ({error}): pip install 'keras>=3.12' and set KERAS_BACKEND=torch, because the"
        " default backend of Keras is TensorFlow; or pip install 'tensorflow-cpu>=2.20'"
    ) from error

from kvdist.collective import (
    Adasum,
    Average,
    Compression,
    ProcessSet,
    Sum,
    add_process_set,
    allgather_object,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    size,
    start_timeline,
    stop_timeline,
)
from kvdist.horovod import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
    shutdown,
    sycl_built,
    without_elastic,
)
from kvdist.keras import callbacks
from kvdist.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer, load_model
from kvdist.keras.values import allgather, allreduce, broadcast, broadcast_global_variables, reducescatter

if _keras.backend.backend() not in ("torch", "tensorflow"):
    raise ImportError(
        f"kvdist.keras trains on Keras' torch and tensorflow backends, and the backend is {_keras.backend.backend()!r}:"
        " set KERAS_BACKEND=torch before keras is imported"
    )

if not _TYPE_CHECKING:
    __getattr__ = without_elastic(__name__)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
    "sycl_built",
]
