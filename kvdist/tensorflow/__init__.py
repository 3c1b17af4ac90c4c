"""TensorFlow without servers, under Horovod's names: ``import kvdist.tensorflow as hvd``.

Keras 3 on TensorFlow, loops with a tape, and session scripts of `tf.compat.v1`; `docs/collective.md` says which lines
of an old script change. The engine is torch's, so that torch is installed beside TensorFlow; which is imported first
does not matter.
"""

try:
    import tensorflow as _tensorflow  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"TensorFlow cannot be imported ({error}): pip install 'kvdist[tensorflow]', which is for Python 3.10 to 3.13"
    ) from error

from kvdist.collective import (
    Average,
    Compression,
    Max,
    Min,
    ProcessSet,
    Product,
    Sum,
    add_process_set,
    allgather_object,
    barrier,
    broadcast_object,
    cross_rank,
    cross_size,
    global_process_set,
    is_initialized,
    local_rank,
    local_size,
    rank,
    remove_process_set,
    size,
    start_timeline,
    stop_timeline,
)
from kvdist.horovod import init, shutdown
from kvdist.tensorflow import keras
from kvdist.tensorflow.operations import (
    BroadcastGlobalVariablesHook,
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    grouped_allreduce,
)
from kvdist.tensorflow.optimizer import DistributedGradientTape, DistributedOptimizer

__all__ = [
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "cross_rank",
    "cross_size",
    "global_process_set",
    "grouped_allreduce",
    "init",
    "is_initialized",
    "keras",
    "local_rank",
    "local_size",
    "rank",
    "remove_process_set",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
